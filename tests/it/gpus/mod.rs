//! GPUs: the driver, NVML that fails, MIG, CDI, simulated GPUs.

pub(crate) mod cdi;
pub(crate) mod contract;
pub(crate) mod driver_cycle;
pub(crate) mod first_scan;
pub(crate) mod health;
pub(crate) mod limits;
pub(crate) mod mig;
pub(crate) mod mig_shared;
pub(crate) mod nvml_faults;
pub(crate) mod sim_file;
