//! Allocations that have ended, for people to look at: bounded in number and in bytes.
//!
//! A ledger is cloned for every snapshot and changed with every end, and there may be ten thousand
//! of these. So they lie in chunks that snapshots share, an end copies one chunk of pointers, and
//! what many have in common (their resource, devices, namespace, container, decision) is in memory
//! once: about 0.25 KiB each where a live one takes 0.8.
//!
//! What is pruned is gone from the store with the same write. It is never missed: nothing that
//! lives is in here, the store's counter outlives the highest number given, and the one kind of
//! ended allocation that a source may show once more goes last ([`Past::may_be_shown_again`]).

use super::allocation::{ADOPTED, Allocation, Decision, End, EndReason, Holder};
use super::names::{AllocationId, DeviceId, Resource};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// How many are kept if the settings do not say.
pub const HISTORY_ALLOCATIONS_DEFAULT: usize = 1024;
/// The most that the settings may ask for: 2.5 MiB of memory, and [`HISTORY_BYTES_MAX`] of store,
/// which is read whole at each start.
pub const HISTORY_ALLOCATIONS_MAX: usize = 10_000;
/// The fewest: what an operator ended and a checkpoint may show again must not be forgotten at once.
pub const HISTORY_ALLOCATIONS_MIN: usize = 64;
/// Most bytes of store that they may take together, whatever their number, by [`weight`]: ten
/// thousand of the usual 0.5 KiB with room to spare, or 1024 of the largest that can be written.
pub const HISTORY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How many are pruned in one turn beyond those that end in it: a limit that was lowered is reached
/// in steps of some 20 ms of disk, not in one that an Allocate would wait for.
pub const PRUNED_AT_ONCE: usize = 256;

/// Pointers in a chunk: what one end copies, against the number of chunks that it copies pointers to
/// (10,000 / 128 = 79).
const CHUNK: usize = 128;

/// What bounds the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimit {
    /// How many are kept.
    pub allocations: usize,
    /// How many bytes of store they may take, by [`weight`].
    pub bytes: usize,
}

impl Default for HistoryLimit {
    fn default() -> Self {
        Self { allocations: HISTORY_ALLOCATIONS_DEFAULT, bytes: HISTORY_BYTES_MAX }
    }
}

/// One allocation that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Past {
    /// Its name for ever.
    pub id: AllocationId,
    /// When it was granted, milliseconds since 1970.
    pub granted_wall_ms: u64,
    /// How and when it ended.
    pub ended: End,
    overlapped: bool,
    devices: Arc<[DeviceId]>,
    pod: Option<Box<str>>,
    pod_uid: Option<Box<str>>,
    common: Arc<Common>,
}

/// What many have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Common {
    resource: Resource,
    namespace: Option<String>,
    container: Option<String>,
    decision: Decision,
}

impl Past {
    /// The resource asked for.
    #[must_use]
    pub fn resource(&self) -> &Resource {
        &self.common.resource
    }

    /// The devices, sorted.
    #[must_use]
    pub fn devices(&self) -> &[DeviceId] {
        &self.devices
    }

    /// The namespace of the pod that held it.
    #[must_use]
    pub fn namespace(&self) -> Option<&str> {
        self.common.namespace.as_deref()
    }

    /// The pod that held it.
    #[must_use]
    pub fn pod(&self) -> Option<&str> {
        self.pod.as_deref()
    }

    /// That pod's UID.
    #[must_use]
    pub fn pod_uid(&self) -> Option<&str> {
        self.pod_uid.as_deref()
    }

    /// The container that held it.
    #[must_use]
    pub fn container(&self) -> Option<&str> {
        self.common.container.as_deref()
    }

    /// All of it, as it was when it ended.
    #[must_use]
    pub fn allocation(&self) -> Allocation {
        Allocation {
            id: self.id,
            resource: self.common.resource.clone(),
            devices: self.devices.to_vec(),
            granted_wall_ms: self.granted_wall_ms,
            holder: Holder {
                namespace: self.common.namespace.clone(),
                pod: self.pod.as_deref().map(Into::into),
                pod_uid: self.pod_uid.as_deref().map(Into::into),
                container: self.common.container.clone(),
            },
            overlapped: self.overlapped,
            decision: self.common.decision.clone(),
            ended: Some(self.ended.clone()),
        }
    }

    /// Whether the kubelet's checkpoint may show it after its end, and this record is the only thing
    /// that says so. A round ends an allocation only by a fresh checkpoint without it, and a later
    /// one cannot have it; an operator's word ends it whatever the checkpoint says. What this store
    /// granted is known by its number; what it took over is not.
    #[must_use]
    pub fn may_be_shown_again(&self) -> bool {
        self.ended.reason == EndReason::Operator && self.common.decision.by == [ADOPTED]
    }

    fn weight(&self) -> usize {
        let Common { resource, namespace, container, decision } = &*self.common;
        let held = [namespace.as_deref(), self.pod(), self.pod_uid(), container.as_deref()];
        weigh(resource, &self.devices, held, decision)
    }
}

/// The bytes of store that an allocation takes once it has ended, at most: text may be escaped, and
/// a byte takes six then; what needs no escape takes what it is long.
#[must_use]
pub fn weight(allocation: &Allocation) -> usize {
    let Allocation { resource, devices, holder, decision, .. } = allocation;
    let Holder { namespace, pod, pod_uid, container } = holder;
    let held = [namespace.as_deref(), pod.as_deref(), pod_uid.as_deref(), container.as_deref()];
    weigh(resource, devices, held, decision)
}

fn weigh(resource: &Resource, devices: &[DeviceId], held: [Option<&str>; 4], decision: &Decision) -> usize {
    /// Key, names of fields, numbers and times.
    const FRAME: usize = 352;
    /// `{"part":"","shares":[]},`
    const PART: usize = 25;
    /// A share number and its comma, or `null,`.
    const SHARE: usize = 6;
    /// `"",`
    const TEXT: usize = 3;
    /// `["",""],`
    const PAIR: usize = 8;
    let parts: usize = devices
        .chunk_by(|a, b| a.part == b.part)
        .map(|of_one| PART + of_one[0].part.as_str().len() + of_one.len() * SHARE)
        .sum();
    let by: usize = decision.by.iter().map(|by| escaped(by) + TEXT).sum();
    let environment: usize = decision.environment.iter().map(|(k, v)| escaped(k) + escaped(v) + PAIR).sum();
    let held: usize = held.into_iter().flatten().map(escaped).sum();
    FRAME + resource.as_str().len() + parts + held + by + environment + escaped(&decision.reason)
}

/// Its length in JSON.
fn escaped(text: &str) -> usize {
    let one = |b: u8| match b {
        b'"' | b'\\' => 2,
        0..0x20 => 6,
        _ => 1,
    };
    text.bytes().map(one).sum()
}

/// Ended allocations, oldest end first. A clone costs a pointer for every 128 of them.
#[derive(Clone, Debug, Default)]
pub struct History {
    chunks: VecDeque<Arc<Vec<Arc<Past>>>>,
    len: usize,
    bytes: usize,
}

impl PartialEq for History {
    fn eq(&self, other: &Self) -> bool {
        // Where the chunks begin depends on what was pruned.
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl History {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of store that they take, by [`weight`].
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Oldest end first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Arc<Past>> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }

    /// The newest.
    #[must_use]
    pub fn back(&self) -> Option<&Arc<Past>> {
        self.chunks.back()?.last()
    }

    /// The one with this id; looks at the newest first.
    #[must_use]
    pub fn get(&self, id: AllocationId) -> Option<&Arc<Past>> {
        self.iter().rev().find(|past| past.id == id)
    }

    /// Takes in an allocation that ended now.
    pub fn push(&mut self, allocation: Allocation, ended: End) {
        // Whatever has much in common with others has it with some of the last two chunks.
        let recent = || self.iter().rev().take(2 * CHUNK);
        let same_common = |common: Common| match recent().find(|past| *past.common == common) {
            Some(past) => Arc::clone(&past.common),
            None => Arc::new(common),
        };
        let same_devices = |devices: Vec<DeviceId>| match recent().find(|past| *past.devices == *devices) {
            Some(past) => Arc::clone(&past.devices),
            None => devices.into(),
        };
        let past = past(allocation, ended, same_common, same_devices);
        self.add(past);
    }

    /// What a store remembers, in any order.
    #[must_use]
    pub fn restored(ended: Vec<(Allocation, End)>) -> Self {
        let mut commons = BTreeSet::<Arc<Common>>::new();
        let mut sets = BTreeSet::<Arc<[DeviceId]>>::new();
        let mut pasts = BTreeMap::new();
        for (allocation, end) in ended {
            let same_common = |common: Common| match commons.get(&common) {
                Some(known) => Arc::clone(known),
                None => {
                    let new = Arc::new(common);
                    commons.insert(Arc::clone(&new));
                    new
                }
            };
            let same_devices = |devices: Vec<DeviceId>| match sets.get(devices.as_slice()) {
                Some(known) => Arc::clone(known),
                None => {
                    let new: Arc<[DeviceId]> = devices.into();
                    sets.insert(Arc::clone(&new));
                    new
                }
            };
            let past = past(allocation, end, same_common, same_devices);
            pasts.insert((past.ended.wall_ms, past.id), past);
        }
        let mut history = Self::default();
        pasts.into_values().for_each(|past| history.add(past));
        history
    }

    fn add(&mut self, past: Past) {
        self.len += 1;
        self.bytes += past.weight();
        let past = Arc::new(past);
        match self.chunks.back_mut() {
            Some(chunk) if chunk.len() < CHUNK => Arc::make_mut(chunk).push(past),
            _ => {
                let mut chunk = Vec::with_capacity(CHUNK);
                chunk.push(past);
                self.chunks.push_back(Arc::new(chunk));
            }
        }
    }

    /// Forgets one. Those that are pruned are old, so it looks at the oldest first.
    pub fn remove(&mut self, id: AllocationId) {
        let found = self.chunks.iter().enumerate().find_map(|(at, chunk)| {
            let within = chunk.iter().position(|past| past.id == id)?;
            Some((at, within))
        });
        let Some((at, within)) = found else {
            return;
        };
        let chunk = Arc::make_mut(&mut self.chunks[at]);
        let past = chunk.remove(within);
        if chunk.is_empty() {
            self.chunks.remove(at);
        }
        self.len -= 1;
        self.bytes -= past.weight();
    }

    /// Those beyond the limit once `more` have ended, oldest first, and last of all those that a
    /// checkpoint may show again. At most [`PRUNED_AT_ONCE`] beyond as many as come.
    #[must_use]
    pub fn to_prune<'a>(
        &self,
        limit: HistoryLimit,
        more: impl IntoIterator<Item = &'a Allocation>,
    ) -> Vec<AllocationId> {
        let (mut len, mut bytes, mut most) = (self.len, self.bytes, PRUNED_AT_ONCE);
        for allocation in more {
            len += 1;
            bytes += weight(allocation);
            most += 1;
        }
        let shown = |wanted: bool| self.iter().filter(move |past| past.may_be_shown_again() == wanted);
        let mut pruned = Vec::new();
        for past in shown(false).chain(shown(true)) {
            if (len <= limit.allocations && bytes <= limit.bytes) || pruned.len() >= most {
                break;
            }
            len -= 1;
            bytes -= past.weight();
            pruned.push(past.id);
        }
        pruned
    }
}

/// An ended allocation, with what it has in common with others as those two give it.
fn past(
    allocation: Allocation,
    ended: End,
    same_common: impl FnOnce(Common) -> Arc<Common>,
    same_devices: impl FnOnce(Vec<DeviceId>) -> Arc<[DeviceId]>,
) -> Past {
    let Allocation { id, resource, devices, granted_wall_ms, holder, overlapped, decision, ended: _ } =
        allocation;
    let Holder { namespace, pod, pod_uid, container } = holder;
    Past {
        id,
        granted_wall_ms,
        ended,
        overlapped,
        devices: same_devices(devices),
        pod: pod.map(Into::into),
        pod_uid: pod_uid.map(Into::into),
        common: same_common(Common { resource, namespace, container, decision }),
    }
}

#[cfg(test)]
mod tests;
