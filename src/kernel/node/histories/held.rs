//! What the model knows of pods: the containers that hold devices, and the sources' objects.

use crate::evidence::kubelet_view::CheckpointEntry;
use crate::evidence::pods::tests::pod_without_containers;
use crate::evidence::pods::{Pod, PodsView, Stage};
use crate::ids::names::{AllocationId, DeviceId, Resource};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

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

impl Held {
    /// Its entry in the kubelet's checkpoint.
    pub(super) fn checkpointed(&self) -> CheckpointEntry {
        CheckpointEntry {
            pod_uid: self.uid.clone(),
            container: self.container.into(),
            resource: self.resource.clone(),
            devices: self.devices.clone(),
            allocation: self.allocation,
        }
    }
}

/// The sources' state, and the daemon's view of it.
#[derive(Default)]
pub(super) struct Sources {
    /// The API server's objects.
    pub(super) objects: BTreeMap<String, Arc<Pod>>,
    /// Force-deleted pods, which may still run.
    pub(super) force_deleted: BTreeSet<String>,
    /// Running pods whose devices the kubelet's checkpoint lost.
    pub(super) lost_from_checkpoint: Vec<Held>,
    /// Containers that go on although the kubelet has forgotten their pod.
    pub(super) lingering: Vec<Held>,
    /// The guard's run.
    pub(super) guard_run: u64,
    /// The allocation in the annotation of each running container, by the pod's UID and the container's name: a
    /// container keeps what it was created with.
    pub(super) annotations: BTreeMap<(String, &'static str), AllocationId>,
    /// The daemon's view after its first list, lost when the daemon crashes.
    pub(super) view: Option<PodsView>,
    /// An earlier view, to be submitted again later.
    pub(super) earlier_view: Option<PodsView>,
}

impl Sources {
    /// A new object. A name is that of one object at a time.
    pub(super) fn create_object(&mut self, uid: &str, name: &str) {
        self.objects.retain(|_, pod| pod.name != name);
        self.objects.insert(uid.into(), Arc::new(pod_object(uid, name, Stage::Waiting)));
    }

    pub(super) fn crash(&mut self) {
        self.view = None;
        self.earlier_view = None;
    }
}

pub(super) fn pod_object(uid: &str, name: &str, stage: Stage) -> Pod {
    Pod {
        namespace: "ns".into(),
        name: name.into(),
        created_wall_ms: 0,
        ..pod_without_containers(uid, stage)
    }
}
