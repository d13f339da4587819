//! The node's GPUs, behind the ports of the kernel: [`nvml`] asks the driver, [`sim`] simulates, and
//! [`procfs`] finds the owners of processes on GPUs.

pub mod nvml;
pub mod procfs;
pub mod sim;
