//! What the model knows of a pod that holds devices.

use crate::names::{AllocationId, DeviceId, Resource};

/// A running pod and the devices that its container holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Held {
    pub(crate) uid: String,
    pub(crate) resource: Resource,
    pub(crate) devices: Vec<DeviceId>,
    /// `None` if another plugin granted the devices.
    pub(crate) allocation: Option<AllocationId>,
}
