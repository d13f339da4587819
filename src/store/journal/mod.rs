//! [`Journal`] in files: decisions with the policies' inputs, bounded in bytes and in age.
//!
//! Not in sled like the ledger: sled keeps in memory what it has read, so a scan of 64 MiB of decisions
//! would need three times the daemon's memory limit; and the ledger's store is copied and read
//! completely at every start. A scan of the journal reads one file of 4 MiB after the other, and damaged
//! or deleted files do not affect the ledger.
//!
//! Nothing is synced: a power failure may lose the newest decisions. A file with a torn tail is read up
//! to it, and the next decision starts a new file.

mod entry;
mod frame;
mod recent;
mod scan;
mod segments;

use berth_kernel::decision::{Decision, Filter, JournalLimit};
use berth_kernel::names::Digest;
use berth_kernel::ports::{DecisionPage, Input, Journal, JournalError, JournalStats, Visit};
use entry::Entry;
use frame::{Frame, Head, frames};
use parking_lot::{Mutex, MutexGuard};
use recent::Recent;
use segments::{SEGMENT_BYTES, SEGMENT_READ_MAX, Segments};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Bytes in memory at which decisions are written.
const PENDING_BYTES: usize = 64 * 1024;
/// At most one file is dropped for its age in this interval, and none in the first one: a clock that is
/// years ahead for a while loses little, and a journal of 7 days has no more files than hours.
const AGE_PRUNE_INTERVAL: Duration = Duration::from_secs(3600);

/// A journal in a folder.
#[derive(Debug)]
pub struct FileJournal {
    folder: PathBuf,
    limit: JournalLimit,
    state: Mutex<State>,
    published: PublishedStats,
}

/// The statistics as of the last change; read without the lock, which a hung disk may hold.
#[derive(Debug, Default)]
struct PublishedStats {
    kept: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    lost: AtomicU64,
}

/// The locked state; dropping it publishes the statistics.
struct StateGuard<'j> {
    state: MutexGuard<'j, State>,
    published: &'j PublishedStats,
}

impl Deref for StateGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        let state = &*self.state;
        let kept = (state.next - state.oldest()).saturating_sub(state.lost);
        let bytes = state.segments.bytes() + state.pending.len() as u64;
        let published = self.published;
        // Readers need no consistent set of values.
        for (counter, value) in [
            (&published.kept, kept),
            (&published.bytes, bytes),
            (&published.dropped, state.dropped),
            (&published.lost, state.lost),
        ] {
            counter.store(value, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct State {
    segments: Segments,
    /// The newest file, once it is written to.
    file: Option<File>,
    /// Digests of the nodes in the newest file.
    nodes: HashSet<[u8; 32]>,
    /// Unwritten frames, with the first number and the count of their decisions.
    pending: Vec<u8>,
    pending_first: u64,
    pending_count: u64,
    next: u64,
    dropped: u64,
    lost: u64,
    recent: Recent,
    /// The oldest file's first number and the time of its first decision.
    oldest_wall_ms: Option<(u64, u64)>,
    /// When files were last pruned by age, or the journal was opened.
    last_age_prune: Instant,
}

impl FileJournal {
    /// Opens the journal in this folder, or creates one.
    ///
    /// # Errors
    /// If the folder or its newest file cannot be read.
    pub fn open(folder: &Path, limit: JournalLimit) -> Result<Self, JournalError> {
        let error = |what: &str, source| journal_error(folder, what, source);
        let segments = Segments::open(folder).map_err(|e| error("cannot open its folder", e))?;
        let mut next = 1;
        // The newest file may have no complete frame.
        for segment in segments.list.iter().rev() {
            let bytes = berth_files::read(&segment.path, SEGMENT_READ_MAX)
                .map_err(|e| error("cannot read its newest file", e))?;
            // Its name is in use, whatever it contains.
            next = next.max(segment.first + 1);
            if let Some(last) = frames(&bytes).filter_map(|frame| seq(&frame)).last() {
                next = next.max(last + 1);
                break;
            }
        }
        let state = State {
            segments,
            file: None,
            nodes: HashSet::new(),
            pending: Vec::new(),
            pending_first: next,
            pending_count: 0,
            next,
            dropped: 0,
            lost: 0,
            recent: Recent::default(),
            oldest_wall_ms: None,
            last_age_prune: Instant::now(),
        };
        let state = Mutex::new(state);
        let journal = Self { folder: folder.to_owned(), limit, state, published: PublishedStats::default() };
        journal.prune(&mut journal.lock_mut())?;
        Ok(journal)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn lock_mut(&self) -> StateGuard<'_> {
        StateGuard { state: self.lock(), published: &self.published }
    }

    fn error(&self, what: &str, source: io::Error) -> JournalError {
        journal_error(&self.folder, what, source)
    }

    /// Writes the pending frames; on an error they are lost. A full disk also drops the oldest file.
    fn write(&self, state: &mut State) -> Result<(), JournalError> {
        if state.pending.is_empty() {
            return Ok(());
        }
        let written = state.write();
        if let Err(error) = &written {
            state.lost += state.pending_count;
            state.nodes.clear();
            state.recent.clear();
            if error.kind() == io::ErrorKind::StorageFull {
                let before = state.oldest();
                // Best effort: the write error is returned.
                let _ = state.segments.drop_oldest();
                state.dropped += state.oldest() - before;
            }
        }
        state.pending.clear();
        state.pending_count = 0;
        written.map_err(|e| self.error("cannot be written", e))?;
        if state.segments.list.back().is_some_and(|newest| newest.bytes >= SEGMENT_BYTES) {
            state.file = None;
            state.nodes.clear();
        }
        self.prune(state)
    }

    fn prune(&self, state: &mut State) -> Result<(), JournalError> {
        // Leaves room for the file in use.
        let bytes = self.limit.bytes.saturating_sub(SEGMENT_BYTES).max(SEGMENT_BYTES);
        let age = Duration::from_millis(self.limit.age_ms);
        let before = state.oldest();
        let mut pruned = state.segments.prune(bytes);
        if state.last_age_prune.elapsed() >= AGE_PRUNE_INTERVAL {
            state.last_age_prune = Instant::now();
            pruned = pruned.and_then(|()| state.segments.prune_aged(age, SystemTime::now()));
        }
        state.dropped += state.oldest() - before;
        pruned.map_err(|e| self.error("cannot delete its oldest file", e))
    }
}

impl State {
    fn write(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(self.segments.create(self.pending_first)?);
        }
        let (Some(file), Some(newest)) = (&mut self.file, self.segments.list.back_mut()) else {
            return Ok(());
        };
        if let Err(error) = file.write_all(&self.pending) {
            // Truncated to the last complete frame, so that the file can be written to again.
            if newest.bytes > 0 && file.set_len(newest.bytes).is_ok() {
                return Err(error);
            }
            self.file = None;
            self.segments.drop_empty();
            return Err(error);
        }
        newest.bytes += self.pending.len() as u64;
        newest.modified = SystemTime::now();
        Ok(())
    }

    fn oldest(&self) -> u64 {
        self.segments.list.front().map_or(self.pending_first, |segment| segment.first)
    }

    /// Adds a node, unless the newest file has it, and returns its digest.
    fn add_node(&mut self, node: &[u8]) -> io::Result<[u8; 32]> {
        let digest: [u8; 32] = Sha256::digest(node).into();
        if !self.nodes.contains(&digest) {
            frame::write(&mut self.pending, Head::Node { digest }, node)?;
            self.nodes.insert(digest);
        }
        Ok(digest)
    }
}

impl Journal for FileJournal {
    fn append(&self, decision: &Decision, input: Option<&Input>) -> Result<u64, JournalError> {
        let mut state = self.lock_mut();
        let seq = state.next;
        state.next += 1;
        if state.pending_count == 0 {
            state.pending_first = seq;
        }
        state.pending_count += 1;
        let question = input.and_then(|input| {
            let text = String::from_utf8(input.question.clone()).ok()?;
            RawValue::from_string(text).ok()
        });
        let added = (|| -> io::Result<()> {
            let node = input.map(|input| state.add_node(&input.node)).transpose()?;
            let input = node.and_then(|digest| Digest::parse(&hex(&digest)).ok());
            let numbered = Decision { seq, input, ..decision.clone() };
            let body = serde_json::to_vec(&Entry::new(&numbered, question))?;
            let head = Head::Decision { seq, at_wall_ms: decision.at_wall_ms };
            frame::write(&mut state.pending, head, &body)?;
            state.recent.push(numbered);
            Ok(())
        })();
        if let Err(error) = added {
            state.lost += 1;
            return Err(self.error("cannot encode a decision", error));
        }
        if state.pending.len() >= PENDING_BYTES {
            self.write(&mut state)?;
        }
        Ok(seq)
    }

    fn flush(&self) -> Result<(), JournalError> {
        self.write(&mut self.lock_mut())
    }

    fn find(&self, filter: &Filter, limit: usize) -> Result<DecisionPage, JournalError> {
        {
            let state = self.lock();
            if let Some(found) = state.recent.find(filter, limit, state.oldest()) {
                return Ok(found);
            }
        }
        let mut decisions = Vec::new();
        let next = self.scan(filter, false, &mut |decision, _| {
            let has_room = decisions.len() < limit;
            if has_room {
                decisions.push(decision);
            }
            has_room
        })?;
        Ok(DecisionPage { decisions, next })
    }

    fn visit_each(&self, filter: &Filter, visit: &mut Visit<'_>) -> Result<Option<u64>, JournalError> {
        self.scan(filter, true, visit)
    }

    fn open(&self, seq: u64) -> Result<Option<(Decision, Option<Input>)>, JournalError> {
        self.read_decision(seq)
    }

    fn stats_without_oldest(&self) -> JournalStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        JournalStats {
            kept: read(&self.published.kept),
            bytes: read(&self.published.bytes),
            oldest_wall_ms: None,
            dropped: read(&self.published.dropped),
            lost: read(&self.published.lost),
        }
    }

    fn stats(&self) -> JournalStats {
        let mut stats = self.stats_without_oldest();
        let (oldest, known) = {
            let state = self.lock();
            (state.segments.list.front().cloned(), state.oldest_wall_ms)
        };
        let Some(oldest) = oldest else { return stats };
        stats.oldest_wall_ms = match known {
            Some((first, at_wall_ms)) if first == oldest.first => Some(at_wall_ms),
            // A file's first decision does not change, so it is read once.
            _ => self.first_wall_ms(&oldest),
        };
        if let Some(at_wall_ms) = stats.oldest_wall_ms {
            self.lock().oldest_wall_ms = Some((oldest.first, at_wall_ms));
        }
        stats
    }
}

impl Drop for FileJournal {
    fn drop(&mut self) {
        // Best effort: the newest decisions may be lost.
        let _ = self.flush();
    }
}

fn seq(frame: &Frame<'_>) -> Option<u64> {
    match frame.head {
        Head::Decision { seq, .. } => Some(seq),
        Head::Node { .. } => None,
    }
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn journal_error(folder: &Path, what: &str, source: io::Error) -> JournalError {
    JournalError { path: folder.display().to_string(), what: what.to_owned(), source: Some(source) }
}

#[cfg(test)]
mod tests;
