//! Allocations that have ended, for people to look at: bounded in number and in bytes.
//!
//! A ledger is cloned for every snapshot and changed with every end, and there may be ten thousand
//! of these. So they lie in chunks that snapshots share and an end copies one of; what many have in
//! common (their resource, devices, namespace, container, decision) is in memory once, and the names
//! of a chunk's pods are one text: 150 bytes each, where a live allocation takes 0.8 KiB in a dozen
//! pieces that would keep a page of the heap each.
//!
//! What is pruned is gone from the store with the same write. It is never missed: nothing that
//! lives is in here, the store's counter outlives the highest number given, and the one kind of
//! ended allocation that a source may show once more goes last ([`Past::may_be_shown_again`]).

mod past;

pub use past::{Entry, Past, weight};

use super::allocation::{Allocation, End};
use super::names::{AllocationId, DeviceId};
use past::{Chunk, Common, Parts, parts};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// How many are kept if the settings do not say.
pub const HISTORY_ALLOCATIONS_DEFAULT: usize = 1024;
/// The most that the settings may ask for: 1.5 MiB of memory here and 1 MiB in the store's check, and
/// [`HISTORY_BYTES_MAX`] on the disk, which are read whole at each start (some 0.1 s).
pub const HISTORY_ALLOCATIONS_MAX: usize = 10_000;
/// The fewest: what an operator ended and a checkpoint may show again must not be forgotten at once.
pub const HISTORY_ALLOCATIONS_MIN: usize = 64;
/// Most bytes of store that they may take together, whatever their number, by [`weight`]: ten
/// thousand of the usual 0.5 KiB with room to spare, or 1024 of the largest that can be written.
pub const HISTORY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How many are pruned in one turn beyond those that end in it: a limit that was lowered is reached
/// in steps of some 20 ms of disk, not in one that an Allocate would wait for.
pub const PRUNED_AT_ONCE: usize = 256;

/// Allocations in a chunk. An end copies two of them, the newest and the oldest (2 x 64 x 2 shared
/// pointers and 10 KiB), and a pointer to each of the others (10,000 / 64 = 157): the least together.
const CHUNK: usize = 64;

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

/// Ended allocations, oldest end first. A clone costs a pointer for every 64 of them.
#[derive(Clone, Debug, Default)]
pub struct History {
    chunks: VecDeque<Arc<Chunk>>,
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
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = Past<'_>> {
        self.chunks.iter().flat_map(|chunk| chunk.pasts())
    }

    /// The newest.
    #[must_use]
    pub fn back(&self) -> Option<Past<'_>> {
        self.iter().next_back()
    }

    /// The one with this id; looks at the newest first.
    #[must_use]
    pub fn get(&self, id: AllocationId) -> Option<Past<'_>> {
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
        let parts = parts(allocation, ended, same_common, same_devices);
        self.add(parts);
    }

    /// What a store remembers, in any order.
    #[must_use]
    pub fn restored(ended: Vec<(Allocation, End)>) -> Self {
        let mut commons = BTreeSet::<Arc<Common>>::new();
        let mut sets = BTreeSet::<Arc<[DeviceId]>>::new();
        let mut ordered = BTreeMap::new();
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
            let parts = parts(allocation, end, same_common, same_devices);
            ordered.insert((parts.entry.ended.wall_ms, parts.entry.id), parts);
        }
        let mut history = Self::default();
        ordered.into_values().for_each(|parts| history.add(parts));
        history
    }

    fn add(&mut self, parts: Parts) {
        if self.chunks.back().is_none_or(|chunk| chunk.entries.len() >= CHUNK) {
            self.chunks.push_back(Arc::default());
        }
        let Some(chunk) = self.chunks.back_mut().map(Arc::make_mut) else {
            return;
        };
        // Room for all of them: chunks that grew by doubling would leave as much behind.
        chunk.entries.reserve_exact(CHUNK - chunk.entries.len());
        self.bytes += chunk.push(parts);
        self.len += 1;
    }

    /// Forgets one. Those that are pruned are old, so it looks at the oldest first.
    pub fn remove(&mut self, id: AllocationId) {
        let found = self.chunks.iter().enumerate().find_map(|(at, chunk)| {
            let within = chunk.entries.iter().position(|entry| entry.id == id)?;
            Some((at, within))
        });
        let Some((at, within)) = found else {
            return;
        };
        let weight = self.chunks[at].past(within).weight();
        let chunk = Arc::make_mut(&mut self.chunks[at]);
        chunk.entries.remove(within);
        if chunk.entries.is_empty() {
            self.chunks.remove(at);
        }
        self.len -= 1;
        self.bytes -= weight;
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

#[cfg(test)]
mod tests;
