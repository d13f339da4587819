//! What shows that a pod holds an allocation, and that it does not any more: the kubelet, the pods,
//! the container runtime, the processes.

pub mod attribution;
mod device_plugin;
pub mod kubelet_view;
pub mod limits;
pub mod part_use;
pub mod pods;
pub mod process_scan;
pub mod reconcile;
pub mod running;
pub mod runtime;
pub mod sighting;
