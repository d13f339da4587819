//! The kubelet as far as it matters here: its pods, its books of who holds which devices, the
//! checkpoint file, and the device lists that it last read. Its books are the truth.

use berth_kernel::evidence::kubelet_view::{CheckpointEntry, ListedHolding, PodList};
use berth_kernel::ids::names::{AllocationId, DeviceId, Resource};
use berth_kernel::sharing::listing::ListedDevice;
use std::collections::{BTreeMap, BTreeSet};

/// Longest that a kubelet takes to write a grant down, milliseconds: less than the 30 s after our
/// reply in which nothing ends.
pub(crate) const RECORD_MS_MAX: u64 = 20_000;

/// The devices of one container.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hold {
    pub(crate) pod: u32,
    pub(crate) container: &'static str,
    pub(crate) resource: Resource,
    /// Sorted.
    pub(crate) devices: Vec<DeviceId>,
    /// The id in the answer's environment; `None` where another plugin answered.
    pub(crate) allocation: Option<AllocationId>,
}

/// A pod's UID; every fifth is a static pod's, made of a hash.
pub(crate) fn uid(pod: u32) -> String {
    if pod % 5 == 4 { format!("{pod:032x}") } else { format!("uid-{pod}") }
}

impl Hold {
    fn checkpointed(&self) -> CheckpointEntry {
        CheckpointEntry {
            pod_uid: uid(self.pod),
            container: self.container.into(),
            resource: self.resource.clone(),
            devices: self.devices.clone(),
            allocation: self.allocation,
        }
    }
}

/// The kubelet.
#[derive(Debug, Default)]
pub(crate) struct Kubelet {
    pub(crate) running: bool,
    /// Whether it has heard of all its pods since it started.
    pub(crate) ready: bool,
    /// Pods that live.
    alive: BTreeSet<u32>,
    next_pod: u32,
    /// Pods that have the name of an earlier pod, with its number.
    names: BTreeMap<u32, u32>,
    /// The name of the next pod.
    next_name: Option<u32>,
    books: Vec<Hold>,
    /// The checkpoint file, and how often it was written.
    file: (Vec<Hold>, u64),
    /// A grant that it was answered and has not written down, and since when (true time).
    slow: Option<(Hold, u64)>,
    /// The newest list of devices that it received, by resource.
    pub(crate) lists: BTreeMap<Resource, Vec<ListedDevice>>,
    /// When kubelet.sock was made: wall time, true time.
    pub(crate) created_ms: (u64, u64),
}

impl Kubelet {
    pub(crate) fn new_pod(&mut self) -> u32 {
        self.next_pod += 1;
        self.alive.insert(self.next_pod);
        if let Some(name) = self.next_name.take() {
            self.names.insert(self.next_pod, name);
        }
        self.next_pod
    }

    /// The next pod has the name of one that has ended, as in a StatefulSet. Returns whether there is one.
    pub(crate) fn reuse_name(&mut self, which: u32) -> bool {
        let taken: BTreeSet<u32> = self.alive.iter().map(|pod| self.name_number(*pod)).collect();
        let free: Vec<u32> = (1..=self.next_pod).filter(|name| !taken.contains(name)).collect();
        self.next_name = free.get(which as usize % free.len().max(1)).copied();
        self.next_name.is_some()
    }

    /// The number in a pod's name.
    pub(crate) fn name_number(&self, pod: u32) -> u32 {
        self.names.get(&pod).copied().unwrap_or(pod)
    }

    /// A pod's name.
    pub(crate) fn name(&self, pod: u32) -> String {
        format!("pod-{}", self.name_number(pod))
    }

    /// Whether the pod of this UID lives.
    pub(crate) fn is_uid_alive(&self, pod_uid: &str) -> bool {
        self.alive.iter().any(|pod| uid(*pod) == pod_uid)
    }

    /// Whether an init container holds this device and no other container of its pod does yet.
    pub(crate) fn is_of_init_container(&self, resource: &Resource, device: &DeviceId) -> bool {
        let on_device: Vec<&Hold> =
            self.held().filter(|h| h.resource == *resource && h.devices.contains(device)).collect();
        let has_app = |pod: u32| on_device.iter().any(|h| h.pod == pod && h.container != "init");
        on_device.iter().any(|h| h.container == "init" && !has_app(h.pod))
    }

    /// Whether a pod of this name lives whose init container alone holds devices, which `List` does not show.
    pub(crate) fn has_hidden_pod(&self, name: &str) -> bool {
        let mut of_init = self.held().filter(|hold| hold.container == "init");
        of_init.any(|hold| self.name(hold.pod) == name && !self.has_app(hold.pod))
    }

    /// How many pods there ever were: they are numbered from 1 on.
    pub(crate) fn made(&self) -> u32 {
        self.next_pod
    }

    pub(crate) fn is_alive(&self, pod: u32) -> bool {
        self.alive.contains(&pod)
    }

    /// It loses what a pod holds that lives on.
    pub(crate) fn forgets(&mut self, which: u32) {
        if let Some(lost) = self.some_hold(which, None).cloned() {
            self.books.retain(|hold| *hold != lost);
            self.write();
        }
    }

    /// Pods that live and hold something, each hold; the truth.
    pub(crate) fn held(&self) -> impl Iterator<Item = &Hold> {
        let slow = self.slow.iter().map(|(hold, _)| hold);
        self.books.iter().chain(slow).filter(|h| self.alive.contains(&h.pod))
    }

    /// The recorded holds of live pods: their containers run.
    pub(crate) fn recorded(&self) -> impl Iterator<Item = &Hold> {
        self.books.iter().filter(|h| self.alive.contains(&h.pod))
    }

    /// Some hold of a pod that lives, that is written down.
    pub(crate) fn some_hold(&self, which: u32, init: Option<bool>) -> Option<&Hold> {
        let fits = |h: &&Hold| {
            self.alive.contains(&h.pod) && init.is_none_or(|init| (h.container == "init") == init)
        };
        let count = self.books.iter().filter(fits).count();
        self.books.iter().filter(fits).nth(which as usize % count.max(1))
    }

    pub(crate) fn has_app(&self, pod: u32) -> bool {
        self.held().any(|h| h.pod == pod && h.container != "init")
    }

    /// Devices that are healthy by the last list and free by its books.
    pub(crate) fn free(&mut self, resource: &Resource) -> Vec<DeviceId> {
        self.purge();
        let holds = self.books.iter().chain(self.slow.iter().map(|(h, _)| h));
        let used: BTreeSet<&DeviceId> =
            holds.filter(|h| h.resource == *resource).flat_map(|h| &h.devices).collect();
        let list = self.lists.get(resource).into_iter().flatten();
        list.filter(|l| l.healthy && !used.contains(&l.id)).map(|l| l.id.clone()).collect()
    }

    /// Whether it could call Allocate now: it admits one pod at a time.
    pub(crate) fn can_admit(&self) -> bool {
        self.running && self.ready && self.slow.is_none()
    }

    /// Writes a grant down, in the books and the file.
    pub(crate) fn record(&mut self, hold: Hold) {
        self.books
            .retain(|h| (h.pod, h.container, &h.resource) != (hold.pod, hold.container, &hold.resource));
        self.books.push(hold);
        self.write();
    }

    pub(crate) fn record_later(&mut self, hold: Hold, true_ms: u64) {
        self.slow = Some((hold, true_ms));
    }

    /// Writes down what it was slow with.
    pub(crate) fn record_slow(&mut self) {
        if let Some((hold, _)) = self.slow.take() {
            self.record(hold);
        }
    }

    pub(crate) fn slow_since(&self) -> Option<u64> {
        self.slow.as_ref().map(|(_, since)| *since)
    }

    pub(crate) fn stop_pod(&mut self, which: u32) {
        let pod = self.alive.iter().nth(which as usize % self.alive.len().max(1)).copied();
        if let Some(pod) = pod {
            self.end_pod(pod);
        }
    }

    pub(crate) fn end_pod(&mut self, pod: u32) {
        self.alive.remove(&pod);
        // The pod's admission failed or was given up, so nothing is written down any more.
        self.slow.take_if(|(hold, _)| hold.pod == pod);
    }

    pub(crate) fn end_all(&mut self) {
        self.alive.clear();
        self.slow = None;
    }

    /// It forgets what dead pods held; it writes no file.
    fn purge(&mut self) {
        if self.running && self.ready {
            self.books.retain(|h| self.alive.contains(&h.pod));
        }
    }

    /// Writes its checkpoint file.
    pub(crate) fn write(&mut self) {
        if self.running {
            self.file = (self.books.clone(), self.file.1 + 1);
        }
    }

    /// How often the file was written: its inode.
    pub(crate) fn file_version(&self) -> u64 {
        self.file.1
    }

    pub(crate) fn checkpoint(&self) -> Vec<CheckpointEntry> {
        self.file.0.iter().map(Hold::checkpointed).collect()
    }

    /// pod-resources `List`. It forgets the dead first; it shows no init containers; until it has
    /// heard of all its pods it shows some.
    pub(crate) fn list(&mut self) -> Option<PodList> {
        if !self.running {
            return None;
        }
        self.purge();
        let name = |pod: u32| ("ns".to_owned(), self.name(pod));
        let known = |pod: u32| self.alive.contains(&pod) && (self.ready || pod.is_multiple_of(2));
        let pods = self.alive.iter().filter(|pod| known(**pod)).map(|pod| name(*pod)).collect();
        let apps = self.books.iter().filter(|h| h.container != "init" && known(h.pod));
        let held = apps.map(|h| ListedHolding {
            namespace: "ns".into(),
            pod: name(h.pod).1,
            container: h.container.into(),
            resource: h.resource.clone(),
            devices: h.devices.clone(),
        });
        Some(PodList { pods, held: held.collect() })
    }

    pub(crate) fn stop(&mut self) {
        // What it was answered and did not write down it never heard of.
        if let Some((hold, _)) = self.slow.take() {
            self.alive.remove(&hold.pod);
        }
        self.running = false;
        self.lists.clear();
    }

    /// Starts from the file, dead pods and all.
    pub(crate) fn start(&mut self, ready: bool, wall_ms: u64, true_ms: u64) {
        self.stop();
        self.running = true;
        self.ready = ready;
        self.books = self.file.0.clone();
        self.created_ms = (wall_ms, true_ms);
    }
}
