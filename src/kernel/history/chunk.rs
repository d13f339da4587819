//! Ended allocations as the history stores them, in chunks.

use crate::allocation::{Allocation, Decision, End, EndReason, Holder};
use crate::names::{AllocationId, DeviceId, Resource};
use std::ops::Deref;
use std::sync::Arc;

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
    overlapped: bool,
    pub(super) devices: Arc<[DeviceId]>,
    pub(super) common: Arc<Common>,
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
pub(super) struct Common {
    resource: Resource,
    namespace: Option<String>,
    container: Option<String>,
    decision: Decision,
}

impl<'h> EndedAllocation<'h> {
    /// The requested resource.
    #[must_use]
    pub fn resource(self) -> &'h Resource {
        &self.entry.common.resource
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

    pub(super) fn weight(self) -> usize {
        let Common { resource, namespace, container, decision } = &*self.entry.common;
        let held = [namespace.as_deref(), self.pod(), self.pod_uid(), container.as_deref()];
        record_len(resource, &self.entry.devices, held, decision)
    }
}

/// Upper bound of the bytes that an ended allocation takes in the store. A byte that JSON escapes takes up to
/// six.
#[must_use]
pub fn weight(allocation: &Allocation) -> usize {
    let Allocation { resource, devices, holder, decision, .. } = allocation;
    let Holder { namespace, pod, pod_uid, container } = holder;
    let held = [namespace.as_deref(), pod.as_deref(), pod_uid.as_deref(), container.as_deref()];
    record_len(resource, devices, held, decision)
}

fn record_len(
    resource: &Resource,
    devices: &[DeviceId],
    held: [Option<&str>; 4],
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
    let parts: usize = devices
        .chunk_by(|a, b| a.part == b.part)
        .map(|of_part| PART + of_part[0].part.as_str().len() + of_part.len() * SHARE)
        .sum();
    let by: usize = decision.by.iter().map(|by| json_len(by.as_str()) + TEXT).sum();
    let environment: usize = decision.environment.iter().map(|(k, v)| json_len(k) + json_len(v) + PAIR).sum();
    let held: usize = held.into_iter().flatten().map(json_len).sum();
    FRAME + resource.as_str().len() + parts + held + by + environment + json_len(&decision.reason)
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
pub(super) struct Chunk {
    pub(super) entries: Vec<Entry>,
    /// The names and UIDs of their pods, concatenated; including those of pruned allocations.
    text: String,
}

impl Chunk {
    pub(super) fn past(&self, entry: usize) -> EndedAllocation<'_> {
        EndedAllocation { entry: &self.entries[entry], text: &self.text }
    }

    pub(super) fn pasts(&self) -> impl DoubleEndedIterator<Item = EndedAllocation<'_>> {
        self.entries.iter().map(|entry| EndedAllocation { entry, text: &self.text })
    }

    /// Adds an allocation. Returns its weight.
    pub(super) fn push(&mut self, NewEntry { mut entry, pod, pod_uid }: NewEntry) -> usize {
        entry.pod = self.append(pod);
        entry.pod_uid = self.append(pod_uid);
        self.entries.push(entry);
        self.past(self.entries.len() - 1).weight()
    }

    fn append(&mut self, text: Option<String>) -> Option<Span> {
        let text = text?;
        // The names of 64 pods are far below 4 GiB; a name beyond that would be dropped.
        let span = Span { start: self.text.len().try_into().ok()?, len: text.len().try_into().ok()? };
        self.text.push_str(&text);
        Some(span)
    }
}

/// An ended allocation, ready for [`Chunk::push`].
pub(super) struct NewEntry {
    pub(super) entry: Entry,
    pod: Option<String>,
    pod_uid: Option<String>,
}

/// Splits an ended allocation; `same_common` and `same_devices` return shared copies of equal values.
pub(super) fn split(
    allocation: Allocation,
    ended: End,
    same_common: impl FnOnce(Common) -> Arc<Common>,
    same_devices: impl FnOnce(Vec<DeviceId>) -> Arc<[DeviceId]>,
) -> NewEntry {
    let Allocation { id, resource, devices, granted_wall_ms, holder, overlapped, decision, ended: _ } =
        allocation;
    let Holder { namespace, pod, pod_uid, container } = holder;
    let common = same_common(Common { resource, namespace, container, decision });
    let devices = same_devices(devices);
    let entry = Entry { id, granted_wall_ms, ended, overlapped, devices, common, pod: None, pod_uid: None };
    NewEntry { entry, pod, pod_uid }
}
