//! One ended allocation as it is kept, and a chunk of them.

use crate::allocation::{ADOPTED, Allocation, Decision, End, EndReason, Holder};
use crate::names::{AllocationId, DeviceId, Resource};
use std::ops::Deref;
use std::sync::Arc;

/// One allocation that has ended, where it lies.
#[derive(Clone, Copy, Debug)]
pub struct Past<'h> {
    entry: &'h Entry,
    text: &'h str,
}

/// What is kept of an allocation beside its pod's names.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name for ever.
    pub id: AllocationId,
    /// When it was granted, milliseconds since 1970.
    pub granted_wall_ms: u64,
    /// How and when it ended.
    pub ended: End,
    overlapped: bool,
    pub(super) devices: Arc<[DeviceId]>,
    pub(super) common: Arc<Common>,
    pod: Option<Piece>,
    pod_uid: Option<Piece>,
}

/// A piece of a chunk's text.
#[derive(Clone, Copy, Debug)]
struct Piece {
    at: u32,
    len: u32,
}

impl Deref for Past<'_> {
    type Target = Entry;

    fn deref(&self) -> &Entry {
        self.entry
    }
}

impl PartialEq for Past<'_> {
    fn eq(&self, other: &Self) -> bool {
        // Where their names lie is nothing of theirs.
        self.allocation() == other.allocation()
    }
}

/// What many have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Common {
    resource: Resource,
    namespace: Option<String>,
    container: Option<String>,
    decision: Decision,
}

impl<'h> Past<'h> {
    /// The resource asked for.
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
        self.entry.pod.map(|piece| self.piece(piece))
    }

    /// That pod's UID.
    #[must_use]
    pub fn pod_uid(self) -> Option<&'h str> {
        self.entry.pod_uid.map(|piece| self.piece(piece))
    }

    /// The container that held it.
    #[must_use]
    pub fn container(self) -> Option<&'h str> {
        self.entry.common.container.as_deref()
    }

    /// All of it, as it was when it ended.
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

    /// Whether the kubelet's checkpoint may show it after its end, and this record is the only thing
    /// that says so. A round that could read the checkpoint ends an allocation only by a fresh one without
    /// it, and a later one cannot have it. An operator's word ends it whatever the checkpoint says, and
    /// so does the API server's, in two rounds, while the checkpoint cannot be read. What this store
    /// granted is known by its number; what it took over is not.
    #[must_use]
    pub fn may_be_shown_again(self) -> bool {
        let by_word = matches!(self.entry.ended.reason, EndReason::Operator | EndReason::PodGone);
        by_word && self.entry.common.decision.by == [ADOPTED]
    }

    fn piece(self, piece: Piece) -> &'h str {
        // Its own chunk's text, which only grows.
        self.text.get(piece.at as usize..piece.at as usize + piece.len as usize).unwrap_or_default()
    }

    pub(super) fn weight(self) -> usize {
        let Common { resource, namespace, container, decision } = &*self.entry.common;
        let held = [namespace.as_deref(), self.pod(), self.pod_uid(), container.as_deref()];
        weigh(resource, &self.entry.devices, held, decision)
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

/// So many, in the order of their ends.
#[derive(Clone, Debug, Default)]
pub(super) struct Chunk {
    pub(super) entries: Vec<Entry>,
    /// The names of their pods, one after the other; of those that were pruned, too.
    text: String,
}

impl Chunk {
    pub(super) fn past(&self, entry: usize) -> Past<'_> {
        Past { entry: &self.entries[entry], text: &self.text }
    }

    pub(super) fn pasts(&self) -> impl DoubleEndedIterator<Item = Past<'_>> {
        self.entries.iter().map(|entry| Past { entry, text: &self.text })
    }

    /// Takes one in. Answers its weight.
    pub(super) fn push(&mut self, Parts { mut entry, pod, pod_uid }: Parts) -> usize {
        entry.pod = self.put(pod);
        entry.pod_uid = self.put(pod_uid);
        self.entries.push(entry);
        self.past(self.entries.len() - 1).weight()
    }

    fn put(&mut self, text: Option<String>) -> Option<Piece> {
        let text = text?;
        // Names of pods: 64 of them are nowhere near 4 GiB; one that were is kept without its name.
        let piece = Piece { at: self.text.len().try_into().ok()?, len: text.len().try_into().ok()? };
        self.text.push_str(&text);
        Some(piece)
    }
}

/// An ended allocation on its way into a chunk.
pub(super) struct Parts {
    pub(super) entry: Entry,
    pod: Option<String>,
    pod_uid: Option<String>,
}

/// An ended allocation, with what it has in common with others as those two give it.
pub(super) fn parts(
    allocation: Allocation,
    ended: End,
    same_common: impl FnOnce(Common) -> Arc<Common>,
    same_devices: impl FnOnce(Vec<DeviceId>) -> Arc<[DeviceId]>,
) -> Parts {
    let Allocation { id, resource, devices, granted_wall_ms, holder, overlapped, decision, ended: _ } =
        allocation;
    let Holder { namespace, pod, pod_uid, container } = holder;
    let common = same_common(Common { resource, namespace, container, decision });
    let devices = same_devices(devices);
    let entry = Entry { id, granted_wall_ms, ended, overlapped, devices, common, pod: None, pod_uid: None };
    Parts { entry, pod, pod_uid }
}
