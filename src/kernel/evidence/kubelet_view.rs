//! What one reconcile pass has read of the kubelet: the time of its socket, `List`, and its checkpoint.

use crate::ids::names::{AllocationId, DeviceId, Resource};
use crate::ids::time::Now;
use std::collections::BTreeSet;

/// The view of one reconcile pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReconcileView {
    /// When the pass began, monotonic milliseconds. It proves nothing about later grants.
    pub began_mono_ms: u64,
    /// When kubelet.sock was created; `None` if it does not exist.
    pub kubelet: Option<KubeletAge>,
    /// The reply of `List`; `None` if the call failed.
    pub list: Option<PodList>,
    /// The checkpoint; `None` if it could not be read.
    pub checkpoint: Option<Vec<CheckpointEntry>>,
    /// Whether the checkpoint was written after the pass began. An older one may show holdings that have
    /// ended, but lacks none.
    pub fresh: bool,
    /// The source that cannot be read, and since when.
    pub source_error: Option<SourceError>,
    /// Whether to adopt unknown holdings of our resources (before the first registration only).
    pub adopt: bool,
}

/// When kubelet.sock was created, by both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KubeletAge {
    /// Milliseconds since 1970.
    pub created_wall_ms: u64,
    /// Monotonic milliseconds; 0 if it is older than this process.
    pub created_mono_ms: u64,
}

/// The reply of pod-resources `List`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodList {
    /// Every listed pod, as (namespace, name), with or without devices.
    pub pods: BTreeSet<(String, String)>,
    /// The containers' holdings of our resources.
    pub held: Vec<ListedHolding>,
}

/// One container's devices of one resource in `List`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedHolding {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The container's name.
    pub container: String,
    /// Our resource.
    pub resource: Resource,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
}

/// One entry of the kubelet's checkpoint under one of our resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointEntry {
    /// The pod's UID.
    pub pod_uid: String,
    /// The container's name.
    pub container: String,
    /// Our resource.
    pub resource: Resource,
    /// The devices, sorted.
    pub devices: Vec<DeviceId>,
    /// The allocation id in the environment of our reply; `None` if another plugin replied.
    pub allocation: Option<AllocationId>,
}

/// Why the kubelet's sources cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceError {
    /// The source and its error.
    pub reason: String,
    /// Since when, both clocks.
    pub since: Now,
}
