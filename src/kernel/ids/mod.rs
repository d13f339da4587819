//! Names, PCI addresses and times, each parsed once into a type that is always valid.

pub mod names;
pub mod pci;
pub mod time;
