//! What the model knows of a container that holds devices.

use crate::ids::names::{AllocationId, DeviceId, Resource};

/// A container of a running pod and the devices that it holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Held {
    pub(crate) uid: String,
    /// The pod's name. Once the pod has stopped, another one may have it.
    pub(crate) name: String,
    /// `init` or `main`.
    pub(crate) container: &'static str,
    pub(crate) resource: Resource,
    pub(crate) devices: Vec<DeviceId>,
    /// `None` if another plugin granted the devices.
    pub(crate) allocation: Option<AllocationId>,
}
