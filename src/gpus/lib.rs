//! The node's GPUs, behind the ports of the kernel: [`nvml`] reads them from the driver, [`sim`] simulates them, and
//! [`procfs`] finds the owners of processes on GPUs. [`cdi`] makes and compares the specifications by which container
//! runtimes pass GPUs to containers.

pub mod cdi;
pub mod nvml;
pub mod procfs;
pub mod sim;
