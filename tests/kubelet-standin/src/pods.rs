//! Pods as the API server stores them. They are kept across kubelet restarts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// One container of a pod and the devices that it requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Unique in its pod.
    pub name: String,
    /// Number of requested devices, by resource name.
    pub resources: BTreeMap<String, usize>,
    /// A restartable init container (a sidecar), which runs alongside the others.
    pub restartable: bool,
}

/// A pod as the kubelet gets it from the API server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSpec {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID; generated from the name and a counter unless set.
    pub uid: String,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// A static pod, from a file on the node.
    pub is_static: bool,
    /// Init containers, in order, restartable ones included.
    pub init_containers: Vec<ContainerSpec>,
    /// App containers, in order.
    pub containers: Vec<ContainerSpec>,
    /// The topology manager's hint for this pod. With a hint, devices on these NUMA
    /// nodes are chosen first, and GetPreferredAllocation is not always called.
    pub numa_affinity: Option<BTreeSet<i64>>,
}

static NEXT_UID: AtomicU64 = AtomicU64::new(1);

impl PodSpec {
    /// A pod without containers and with a unique UID.
    pub fn new(namespace: &str, name: &str) -> Self {
        let n = NEXT_UID.fetch_add(1, Ordering::Relaxed);
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}-{n}"),
            labels: BTreeMap::new(),
            is_static: false,
            init_containers: Vec::new(),
            containers: Vec::new(),
            numa_affinity: None,
        }
    }

    /// Sets the UID.
    #[must_use]
    pub fn uid(mut self, uid: &str) -> Self {
        uid.clone_into(&mut self.uid);
        self
    }

    /// Adds a label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Makes the pod static.
    #[must_use]
    pub fn of_a_file(mut self) -> Self {
        self.is_static = true;
        self
    }

    /// Adds an app container.
    #[must_use]
    pub fn container(mut self, name: &str, resources: &[(&str, usize)]) -> Self {
        self.containers.push(container(name, resources, false));
        self
    }

    /// Adds an init container that ends before the app containers start.
    #[must_use]
    pub fn init(mut self, name: &str, resources: &[(&str, usize)]) -> Self {
        self.init_containers.push(container(name, resources, false));
        self
    }

    /// Adds a restartable init container.
    #[must_use]
    pub fn sidecar(mut self, name: &str, resources: &[(&str, usize)]) -> Self {
        self.init_containers.push(container(name, resources, true));
        self
    }

    /// Sets the topology manager's hint.
    #[must_use]
    pub fn numa(mut self, nodes: &[i64]) -> Self {
        self.numa_affinity = Some(nodes.iter().copied().collect());
        self
    }

    /// Init containers, then app containers: the order of admission.
    pub(crate) fn in_order(&self) -> impl Iterator<Item = (bool, &ContainerSpec)> {
        let inits = self.init_containers.iter().map(|c| (true, c));
        inits.chain(self.containers.iter().map(|c| (false, c)))
    }
}

fn container(name: &str, resources: &[(&str, usize)], restartable: bool) -> ContainerSpec {
    ContainerSpec {
        name: name.to_owned(),
        resources: resources.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect(),
        restartable,
    }
}

/// The phase of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Admitted or being admitted; its app containers do not run yet.
    Pending,
    /// Its app containers run.
    Running,
    /// All containers ended without an error.
    Succeeded,
    /// The pod failed permanently.
    Failed {
        /// `status.reason`.
        reason: String,
        /// `status.message`.
        message: String,
    },
}

/// A pod with its phase.
#[derive(Clone, Debug)]
pub struct Pod {
    /// The pod's spec.
    pub spec: PodSpec,
    /// The pod's phase.
    pub phase: Phase,
    /// Whether the kubelet has admitted it, and so set its start time.
    pub admitted: bool,
    /// The API object is deleted while the containers still run (`delete --force`).
    pub force_deleted: bool,
}

impl Pod {
    /// Whether the kubelet treats the pod as active: neither ended nor force-deleted.
    pub(crate) fn is_active(&self) -> bool {
        !self.force_deleted && matches!(self.phase, Phase::Pending | Phase::Running)
    }
}
