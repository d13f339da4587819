//! The history of ended allocations, bounded in number and in bytes.
//!
//! The ledger is cloned for every snapshot and changed by every end, and the history may hold ten thousand
//! allocations. They are therefore stored in chunks that snapshots share, and an end copies one chunk.
//! Common values (resource, devices, namespace, container, decision) are in memory once, and the pod names
//! of a chunk are one string. An ended allocation takes 150 bytes; a live one takes 0.8 KiB in a dozen heap
//! blocks, each of which could keep a page of the heap in use.
//!
//! A pruned allocation is deleted from the store with the same write. Pruning is safe: the history has no
//! live allocation, the store's counter stays above every number that was used, and those ended allocations
//! that a source may show again are pruned last ([`EndedAllocation::may_be_shown_again`]).

mod chunk;

pub use chunk::{EndedAllocation, Entry, weight};

use super::allocation::{Allocation, End};
use super::names::{AllocationId, DeviceId};
use chunk::{Chunk, Common, NewEntry, split};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
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
        self.chunks.iter().flat_map(|chunk| chunk.pasts())
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
    pub fn push(&mut self, allocation: Allocation, ended: End) {
        // Common values are looked up in the last two chunks only.
        let recent = || self.iter().rev().take(2 * CHUNK);
        let same_common = |common: Common| match recent().find(|past| *past.common == common) {
            Some(past) => Arc::clone(&past.common),
            None => Arc::new(common),
        };
        let same_devices = |devices: Vec<DeviceId>| match recent().find(|past| *past.devices == *devices) {
            Some(past) => Arc::clone(&past.devices),
            None => devices.into(),
        };
        let entry = split(allocation, ended, same_common, same_devices);
        self.add(entry);
    }

    /// Builds the history from the store's records, which may be in any order.
    #[must_use]
    pub fn restored(ended: Vec<(Allocation, End)>) -> Self {
        let mut commons = BTreeSet::<Arc<Common>>::new();
        let mut device_lists = BTreeSet::<Arc<[DeviceId]>>::new();
        let mut ordered = BTreeMap::new();
        for (allocation, end) in ended {
            let same_common = |common: Common| match commons.get(&common) {
                Some(known) => Arc::clone(known),
                None => {
                    let common = Arc::new(common);
                    commons.insert(Arc::clone(&common));
                    common
                }
            };
            let same_devices = |devices: Vec<DeviceId>| match device_lists.get(devices.as_slice()) {
                Some(known) => Arc::clone(known),
                None => {
                    let devices: Arc<[DeviceId]> = devices.into();
                    device_lists.insert(Arc::clone(&devices));
                    devices
                }
            };
            let new = split(allocation, end, same_common, same_devices);
            ordered.insert((new.entry.ended.wall_ms, new.entry.id), new);
        }
        let mut history = Self::default();
        ordered.into_values().for_each(|entry| history.add(entry));
        history
    }

    fn add(&mut self, entry: NewEntry) {
        if self.chunks.back().is_none_or(|chunk| chunk.entries.len() >= CHUNK) {
            self.chunks.push_back(Arc::default());
        }
        let Some(chunk) = self.chunks.back_mut().map(Arc::make_mut) else {
            return;
        };
        // The full capacity at once: growth by doubling leaves as much freed memory behind.
        chunk.entries.reserve_exact(CHUNK - chunk.entries.len());
        self.bytes += chunk.push(entry);
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
        let weight = self.chunks[chunk_index].past(index).weight();
        let chunk = Arc::make_mut(&mut self.chunks[chunk_index]);
        chunk.entries.remove(index);
        if chunk.entries.is_empty() {
            self.chunks.remove(chunk_index);
        }
        self.len -= 1;
        self.bytes -= weight;
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

#[cfg(test)]
mod tests;
