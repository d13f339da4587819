//! The history of ended allocations, bounded in number and in bytes.
//!
//! The ledger is cloned for every snapshot and changed by every end, and the history may hold ten thousand
//! allocations. They are therefore stored in chunks that snapshots share, and an end copies one chunk.
//! Common values (resource, devices, namespace, container, decision) are in memory once, and the pod names
//! of a chunk are one string. An ended allocation takes 150 bytes, and one of a claim its request in addition; a live
//! one takes 0.8 KiB in a dozen heap blocks, each of which could keep a page of the heap in use.
//!
//! A pruned allocation is deleted from the store with the same write. Pruning is safe: the history has no
//! live allocation, the store's counter stays above every number that was used, and those ended allocations
//! that a source may show again are pruned last ([`EndedAllocation::may_be_shown_again`]).

use crate::grants::allocation::{Allocation, Decision, End, EndReason, GrantOrigin, Holder};
use crate::grants::claim::{Claim, ClaimRequest};
use crate::ids::names::{AllocationId, DeviceId, Resource};
use std::borrow::Borrow;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Deref;
use std::sync::Arc;

/// The default number of allocations in the history.
pub const HISTORY_ALLOCATIONS_DEFAULT: usize = 1024;
/// The largest configurable number: 1.5 MiB of memory here, 1 MiB in the store's check, and
/// [`HISTORY_BYTES_MAX`] on disk, all of which is read at each start (about 0.1 s).
pub const HISTORY_ALLOCATIONS_MAX: usize = 10_000;
/// The smallest configurable number: an allocation that an operator ended and a checkpoint may show again
/// must not be pruned at once.
pub const HISTORY_ALLOCATIONS_MIN: usize = 64;
/// Most bytes that the history may take in the store, by [`weight`]: more than enough for ten thousand
/// allocations of the usual 0.5 KiB, or for 1024 of the largest possible size.
pub const HISTORY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Most allocations that one command prunes beyond those that end with it: after the limit is lowered, each
/// step takes about 20 ms of disk time, so that an Allocate never waits long.
pub const PRUNED_AT_ONCE: usize = 256;

/// Allocations in a chunk. An end copies two chunks, the newest and the oldest (2 x 64 x 2 shared pointers
/// and 10 KiB), and the pointers to all others (10,000 / 64 = 157). This size minimises the total.
const CHUNK: usize = 64;

/// The limits of the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryLimit {
    /// Number of allocations.
    pub allocations: usize,
    /// Bytes in the store, by [`weight`].
    pub bytes: usize,
}

impl Default for HistoryLimit {
    fn default() -> Self {
        Self { allocations: HISTORY_ALLOCATIONS_DEFAULT, bytes: HISTORY_BYTES_MAX }
    }
}

/// Ended allocations, oldest end first. A clone costs a pointer for every 64 of them.
#[derive(Clone, Debug, Default)]
pub struct History {
    chunks: VecDeque<Arc<Chunk>>,
    len: usize,
    bytes: usize,
}

impl PartialEq for History {
    fn eq(&self, other: &Self) -> bool {
        // The boundaries of the chunks depend on what was pruned.
        self.len == other.len && self.iter().eq(other.iter())
    }
}

impl History {
    /// The number of allocations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the history is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes that the history takes in the store, by [`weight`].
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// All allocations, oldest end first.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = EndedAllocation<'_>> {
        self.chunks.iter().flat_map(|chunk| chunk.iter())
    }

    /// The allocation that ended last.
    #[must_use]
    pub fn back(&self) -> Option<EndedAllocation<'_>> {
        self.iter().next_back()
    }

    /// The allocation with this id. The search starts at the newest.
    #[must_use]
    pub fn get(&self, id: AllocationId) -> Option<EndedAllocation<'_>> {
        self.iter().rev().find(|past| past.id == id)
    }

    /// Adds an allocation that has just ended.
    pub fn push(&mut self, allocation: &Allocation, ended: End) {
        let common = Common::of(allocation);
        // Common values are looked up in the last two chunks only.
        let recent = || self.iter().rev().take(2 * CHUNK);
        let same_common = recent().find(|past| *past.common == common).map(|past| Arc::clone(&past.common));
        let same_devices = recent().find(|past| *past.devices == *allocation.devices);
        let same_devices = same_devices.map(|past| Arc::clone(&past.devices));
        let common = same_common.unwrap_or_else(|| common.into());
        let devices = same_devices.unwrap_or_else(|| allocation.devices.as_slice().into());
        self.add(allocation, ended, common, devices);
    }

    /// Builds the history from the store's records, which may be in any order.
    #[must_use]
    pub fn restored(mut ended: Vec<(Allocation, End)>) -> Self {
        ended.sort_by_key(|(allocation, end)| (end.wall_ms, allocation.id));
        let (mut commons, mut device_lists) = (BTreeSet::new(), BTreeSet::new());
        let mut history = Self::default();
        for (allocation, end) in ended {
            let common = shared(&mut commons, Common::of(&allocation));
            let devices = shared(&mut device_lists, allocation.devices.as_slice());
            history.add(&allocation, end, common, devices);
        }
        history
    }

    fn add(&mut self, allocation: &Allocation, ended: End, common: Arc<Common>, devices: Arc<[DeviceId]>) {
        if self.chunks.back().is_none_or(|chunk| chunk.entries.len() >= CHUNK) {
            self.chunks.push_back(Arc::default());
        }
        let Some(chunk) = self.chunks.back_mut().map(Arc::make_mut) else {
            return;
        };
        // The full capacity at once: growth by doubling leaves as much freed memory behind.
        chunk.entries.reserve_exact(CHUNK - chunk.entries.len());
        let &Allocation { id, granted_wall_ms, overlapped, .. } = allocation;
        let origin = allocation.origin.clone();
        let (pod, pod_uid) = (&allocation.holder.pod, &allocation.holder.pod_uid);
        let (pod, pod_uid) = (chunk.append(pod.as_deref()), chunk.append(pod_uid.as_deref()));
        chunk.entries.push(Entry {
            id,
            granted_wall_ms,
            ended,
            origin,
            overlapped,
            devices,
            common,
            pod,
            pod_uid,
        });
        self.bytes += weight(allocation);
        self.len += 1;
    }

    /// Removes an allocation. The search starts at the oldest, because pruned allocations are old.
    pub fn remove(&mut self, id: AllocationId) {
        let position = self.chunks.iter().enumerate().find_map(|(chunk_index, chunk)| {
            let index = chunk.entries.iter().position(|entry| entry.id == id)?;
            Some((chunk_index, index))
        });
        let Some((chunk_index, index)) = position else {
            return;
        };
        let chunk = Arc::make_mut(&mut self.chunks[chunk_index]);
        self.bytes -= EndedAllocation { entry: &chunk.entries[index], text: &chunk.text }.weight();
        self.len -= 1;
        chunk.entries.remove(index);
        if chunk.entries.is_empty() {
            self.chunks.remove(chunk_index);
        }
    }

    /// The allocations beyond the limit once those of `ending` are added: the oldest first, and those that a
    /// checkpoint may show again last. Returns at most [`PRUNED_AT_ONCE`] more than are added.
    #[must_use]
    pub fn to_prune<'a>(
        &self,
        limit: HistoryLimit,
        ending: impl IntoIterator<Item = &'a Allocation>,
    ) -> Vec<AllocationId> {
        let (mut len, mut bytes, mut most) = (self.len, self.bytes, PRUNED_AT_ONCE);
        for allocation in ending {
            len += 1;
            bytes += weight(allocation);
            most += 1;
        }
        let by_shown_again = |again: bool| self.iter().filter(move |past| past.may_be_shown_again() == again);
        let mut pruned = Vec::new();
        for past in by_shown_again(false).chain(by_shown_again(true)) {
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

/// A reference to one ended allocation in its chunk.
#[derive(Clone, Copy, Debug)]
pub struct EndedAllocation<'h> {
    entry: &'h Entry,
    text: &'h str,
}

/// The stored fields of an ended allocation, except its pod's name and UID.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its id, which is never used again.
    pub id: AllocationId,
    /// When it was granted, milliseconds since 1970.
    pub granted_wall_ms: u64,
    /// How and when it ended.
    pub ended: End,
    /// The API of the kubelet through which it was granted.
    pub origin: GrantOrigin,
    overlapped: bool,
    devices: Arc<[DeviceId]>,
    common: Arc<Common>,
    pod: Option<Span>,
    pod_uid: Option<Span>,
}

/// A range of a chunk's text.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u32,
    len: u32,
}

impl Deref for EndedAllocation<'_> {
    type Target = Entry;

    fn deref(&self) -> &Entry {
        self.entry
    }
}

impl PartialEq for EndedAllocation<'_> {
    fn eq(&self, other: &Self) -> bool {
        // The spans of the names differ between chunks.
        self.allocation() == other.allocation()
    }
}

/// Values that many allocations share.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Common {
    resource: Resource,
    namespace: Option<String>,
    container: Option<String>,
    decision: Decision,
}

impl Common {
    fn of(allocation: &Allocation) -> Self {
        Self {
            resource: allocation.resource.clone(),
            namespace: allocation.holder.namespace.clone(),
            container: allocation.holder.container.clone(),
            decision: allocation.decision.clone(),
        }
    }
}

/// The known copy of an equal value, or else this value, which is known from then on.
fn shared<T: Ord + ?Sized>(known: &mut BTreeSet<Arc<T>>, value: impl Into<Arc<T>> + Borrow<T>) -> Arc<T> {
    if let Some(same) = known.get(value.borrow()) {
        return Arc::clone(same);
    }
    let value = value.into();
    known.insert(Arc::clone(&value));
    value
}

impl<'h> EndedAllocation<'h> {
    /// The requested resource.
    #[must_use]
    pub fn resource(self) -> &'h Resource {
        &self.entry.common.resource
    }

    /// The request of the claim that it was for; `None` if it was of the device plugin.
    #[must_use]
    pub fn claim(self) -> Option<&'h ClaimRequest> {
        self.entry.origin.claim()
    }

    /// The devices, sorted.
    #[must_use]
    pub fn devices(self) -> &'h [DeviceId] {
        &self.entry.devices
    }

    /// How and when it ended.
    #[must_use]
    pub fn end(self) -> &'h End {
        &self.entry.ended
    }

    /// The namespace of the pod that held it.
    #[must_use]
    pub fn namespace(self) -> Option<&'h str> {
        self.entry.common.namespace.as_deref()
    }

    /// The pod that held it.
    #[must_use]
    pub fn pod(self) -> Option<&'h str> {
        self.entry.pod.map(|span| self.text_at(span))
    }

    /// That pod's UID.
    #[must_use]
    pub fn pod_uid(self) -> Option<&'h str> {
        self.entry.pod_uid.map(|span| self.text_at(span))
    }

    /// The container that held it.
    #[must_use]
    pub fn container(self) -> Option<&'h str> {
        self.entry.common.container.as_deref()
    }

    /// The allocation as it was when it ended.
    #[must_use]
    pub fn allocation(self) -> Allocation {
        let common = &self.entry.common;
        Allocation {
            id: self.entry.id,
            resource: common.resource.clone(),
            devices: self.entry.devices.to_vec(),
            granted_wall_ms: self.entry.granted_wall_ms,
            origin: self.entry.origin.clone(),
            holder: Holder {
                namespace: common.namespace.clone(),
                pod: self.pod().map(Into::into),
                pod_uid: self.pod_uid().map(Into::into),
                container: common.container.clone(),
            },
            overlapped: self.entry.overlapped,
            decision: common.decision.clone(),
            ended: Some(self.entry.ended.clone()),
        }
    }

    /// Whether the kubelet's checkpoint may still show it after its end, and only this record prevents its
    /// adoption. A reconcile pass that could read the checkpoint ends an allocation only if a fresh
    /// checkpoint is without it, and later ones cannot contain it again. But an operator ends an allocation
    /// regardless of the checkpoint, and so do two passes with the API server's view while the checkpoint
    /// cannot be read. An allocation that this store granted is recognised by its number; an adopted one is
    /// not.
    #[must_use]
    pub fn may_be_shown_again(self) -> bool {
        let ended_without_checkpoint =
            matches!(self.entry.ended.reason, EndReason::Operator | EndReason::PodGone);
        ended_without_checkpoint && self.entry.common.decision.is_adoption()
    }

    fn text_at(self, span: Span) -> &'h str {
        // A chunk's text only grows, so that its spans stay valid.
        self.text.get(span.start as usize..span.start as usize + span.len as usize).unwrap_or_default()
    }

    fn weight(self) -> usize {
        let Common { resource, namespace, container, decision } = &*self.entry.common;
        let held = [namespace.as_deref(), self.pod(), self.pod_uid(), container.as_deref()];
        record_len(resource, &self.entry.devices, held, &self.entry.origin, decision)
    }
}

/// Upper bound of the bytes that an ended allocation takes in the store. A byte that JSON escapes takes up to
/// six.
#[must_use]
pub fn weight(allocation: &Allocation) -> usize {
    let Allocation { resource, devices, origin, holder, decision, .. } = allocation;
    let Holder { namespace, pod, pod_uid, container } = holder;
    let held = [namespace.as_deref(), pod.as_deref(), pod_uid.as_deref(), container.as_deref()];
    record_len(resource, devices, held, origin, decision)
}

fn record_len(
    resource: &Resource,
    devices: &[DeviceId],
    held: [Option<&str>; 4],
    origin: &GrantOrigin,
    decision: &Decision,
) -> usize {
    /// Key, field names, numbers and times.
    const FRAME: usize = 352;
    /// `{"part":"","shares":[]},`
    const PART: usize = 25;
    /// A share number and its comma, or `null,`.
    const SHARE: usize = 6;
    /// `"",`
    const TEXT: usize = 3;
    /// `["",""],`
    const PAIR: usize = 8;
    /// `"claim":{"uid":"","namespace":"","name":"","request":"","pods":[]},`
    const CLAIM: usize = 72;
    /// `"podClaimName":"",`
    const POD_CLAIM_NAME: usize = 18;
    let parts: usize = devices
        .chunk_by(|a, b| a.part == b.part)
        .map(|of_part| PART + of_part[0].part.as_str().len() + of_part.len() * SHARE)
        .sum();
    let by: usize = decision.by.iter().map(|by| json_len(by.as_str()) + TEXT).sum();
    let environment: usize = decision.environment.iter().map(|(k, v)| json_len(k) + json_len(v) + PAIR).sum();
    let held: usize = held.into_iter().flatten().map(json_len).sum();
    let claim = origin.claim().map_or(0, |request| {
        let ClaimRequest { claim: Claim { uid, namespace, name }, pod_claim_name, request, pods } = request;
        let texts: usize = [uid, namespace, name, request].into_iter().map(|text| json_len(text)).sum();
        let pods = pods.iter().map(|pod| json_len(&pod.uid) + json_len(&pod.name) + PAIR);
        let pod_claim_name = pod_claim_name.as_ref().map_or(0, |name| json_len(name) + POD_CLAIM_NAME);
        CLAIM + texts + pod_claim_name + pods.sum::<usize>()
    });
    FRAME + resource.as_str().len() + parts + held + claim + by + environment + json_len(&decision.reason)
}

/// The length of `text` in JSON.
fn json_len(text: &str) -> usize {
    let escaped_len = |b: u8| match b {
        b'"' | b'\\' => 2,
        0..0x20 => 6,
        _ => 1,
    };
    text.bytes().map(escaped_len).sum()
}

/// Up to 64 ended allocations, in the order of their ends.
#[derive(Clone, Debug, Default)]
struct Chunk {
    entries: Vec<Entry>,
    /// The names and UIDs of their pods, concatenated; including those of pruned allocations.
    text: String,
}

impl Chunk {
    fn iter(&self) -> impl DoubleEndedIterator<Item = EndedAllocation<'_>> {
        self.entries.iter().map(|entry| EndedAllocation { entry, text: &self.text })
    }

    fn append(&mut self, text: Option<&str>) -> Option<Span> {
        let text = text?;
        // The names of 64 pods are far below 4 GiB; a name beyond that would be dropped.
        let span = Span { start: self.text.len().try_into().ok()?, len: text.len().try_into().ok()? };
        self.text.push_str(text);
        Some(span)
    }
}

#[cfg(test)]
mod tests;
