//! Names and PCI addresses, each parsed once into a type that is always valid; and times.

pub mod names;
pub mod pci;
pub mod time;
