//! Pods: what the API server would say of this node. They outlive a kubelet.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// One container of a pod and what it asks of device plugins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerSpec {
    /// Unique in its pod.
    pub name: String,
    /// Devices asked for, by resource name.
    pub resources: BTreeMap<String, usize>,
    /// An init container that keeps running beside the others (a sidecar).
    pub restartable: bool,
}

/// A pod as the API server would hand it to the kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodSpec {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID; made up from name and a counter unless set.
    pub uid: String,
    /// From a file of the node, not from the API server.
    pub is_static: bool,
    /// Init containers, in order, restartable ones included.
    pub init_containers: Vec<ContainerSpec>,
    /// App containers, in order.
    pub containers: Vec<ContainerSpec>,
    /// The topology manager's hint for this pod. With one, devices on these NUMA
    /// nodes come first and the plugin is not always asked which it prefers.
    pub numa_affinity: Option<BTreeSet<i64>>,
}

static NEXT_UID: AtomicU64 = AtomicU64::new(1);

impl PodSpec {
    /// A pod without containers and with a UID of its own.
    pub fn new(namespace: &str, name: &str) -> Self {
        let n = NEXT_UID.fetch_add(1, Ordering::Relaxed);
        Self {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: format!("uid-{name}-{n}"),
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

    /// Makes it a static pod.
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

/// Where a pod is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Admitted or being admitted; its app containers do not run yet.
    Pending,
    /// Its app containers run.
    Running,
    /// It ended by itself.
    Succeeded,
    /// It failed, for good.
    Failed {
        /// As in `status.reason`.
        reason: String,
        /// As in `status.message`.
        message: String,
    },
}

/// A pod and how it fares.
#[derive(Clone, Debug)]
pub struct Pod {
    /// What was asked for.
    pub spec: PodSpec,
    /// Where it is in its life.
    pub phase: Phase,
    /// The API object is gone while the containers still run (`delete --force`).
    pub force_deleted: bool,
}

impl Pod {
    /// What the kubelet calls an active pod: known to it and not ended.
    pub(crate) fn is_active(&self) -> bool {
        !self.force_deleted && matches!(self.phase, Phase::Pending | Phase::Running)
    }
}
