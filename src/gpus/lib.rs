//! The node's GPUs, behind the ports of the kernel: [`nvml`] reads them from the driver, [`sim`] simulates them, and
//! [`procfs`] finds the owners of processes on GPUs.

pub mod nvml;
pub mod procfs;
pub mod sim;
