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
mod segments;

use crate::folder::free_bytes;
use berth_kernel::ids::names::Digest;
use berth_kernel::node::ports::{DecisionPage, Input, Journal, JournalError, JournalStats, Visit};
use berth_kernel::policy::decision::{Decision, Filter, JournalLimit};
use entry::Entry;
use frame::{Frame, Head, frames};
use parking_lot::Mutex;
use segments::{SEGMENT_BYTES, SEGMENT_READ_MAX, Segment, Segments};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

/// Bytes in memory at which decisions are written.
const PENDING_BYTES: usize = 64 * 1024;
/// Decisions in memory: the API's default page of 50, one more, and some spare. At most about 4 KiB each,
/// so 256 KiB.
const RECENT_MAX: usize = 64;
/// Free bytes on the disk from which on decisions are written: on a disk with less, the store and other programs need
/// them.
const FREE_BYTES_MIN: u64 = 16 * 1024 * 1024;
/// Most bytes of the files that one scan reads: some tens of milliseconds.
const SCAN_BYTES: u64 = 4 * SEGMENT_BYTES;
/// Most files that one scan reads: each start of the daemon creates one.
const SCAN_FILES: usize = 64;
/// At most one file is dropped for its age in this interval, and none in the first one: a clock that is
/// years ahead for a while loses little, and a journal of 7 days has no more files than hours.
const AGE_PRUNE_INTERVAL: Duration = Duration::from_secs(3600);

/// A journal in a folder.
#[derive(Debug)]
pub struct FileJournal {
    folder: PathBuf,
    limit: JournalLimit,
    state: Mutex<State>,
    /// The statistics as of the last change; read without the lock of the state, which a hung disk may hold.
    published: Mutex<JournalStats>,
    free_bytes: fn(&Path) -> io::Result<u64>,
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
            if let Some(last) = frames(&bytes).filter_map(|frame| frame.seq()).last() {
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
        let journal =
            Self { folder: folder.to_owned(), limit, state, published: Mutex::default(), free_bytes };
        journal.update(|state| journal.prune(state))?;
        Ok(journal)
    }

    /// Changes the state, and publishes the statistics.
    fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        *self.published.lock() = JournalStats {
            kept: (state.next - state.oldest()).saturating_sub(state.lost),
            bytes: state.segments.bytes() + state.pending.len() as u64,
            oldest_wall_ms: None,
            dropped: state.dropped,
            lost: state.lost,
        };
        result
    }

    fn error(&self, what: &str, source: io::Error) -> JournalError {
        journal_error(&self.folder, what, source)
    }

    fn append_to(
        &self,
        state: &mut State,
        decision: &Decision,
        input: Option<&Input>,
    ) -> Result<u64, JournalError> {
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
            self.write(state)?;
        }
        Ok(seq)
    }

    /// Writes the pending frames; on an error they are lost. They also are while the disk is nearly full, so that the
    /// record takes no room that the store needs; older files stay.
    fn write(&self, state: &mut State) -> Result<(), JournalError> {
        if state.pending.is_empty() {
            return Ok(());
        }
        let written = self.check_room().and_then(|()| state.write());
        if written.is_err() {
            state.lost += state.pending_count;
            state.nodes.clear();
            state.recent.clear();
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

    fn check_room(&self) -> io::Result<()> {
        // A file system that does not tell is left to fail in the write itself.
        let free = (self.free_bytes)(&self.folder).unwrap_or(u64::MAX);
        if free >= FREE_BYTES_MIN {
            return Ok(());
        }
        let (free, least) = (free >> 20, FREE_BYTES_MIN >> 20);
        let text = format!(
            "its disk has {free} MiB left, and decisions are recorded from {least} MiB on: free some space"
        );
        Err(io::Error::new(io::ErrorKind::StorageFull, text))
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

    /// Passes the matching decisions to `visit`, newest first, until it returns false. Returns the number
    /// before which to continue.
    fn scan(
        &self,
        filter: &Filter,
        with_inputs: bool,
        visit: &mut Visit<'_>,
    ) -> Result<Option<u64>, JournalError> {
        let (segments, next) = self.select_segments(filter.before, SCAN_FILES)?;
        for segment in segments {
            let bytes = self.read(&segment)?;
            let decisions: Vec<_> = frames(&bytes).filter_map(|frame| Some((frame.seq()?, frame))).collect();
            let nodes = if with_inputs { nodes(&bytes) } else { HashMap::new() };
            // The clock may have been set back, so a single old decision does not end the scan; a file with
            // only old ones does.
            let since = filter.since_wall_ms.unwrap_or(0);
            let is_old = |frame: &Frame<'_>| matches!(frame.head, Head::Decision { at_wall_ms, .. } if at_wall_ms < since);
            let is_too_old = !decisions.is_empty() && decisions.iter().all(|(_, frame)| is_old(frame));
            for (seq, frame) in decisions.into_iter().rev() {
                if filter.before.is_some_and(|before| seq >= before) {
                    continue;
                }
                // An unreadable decision, perhaps of a later release, is skipped.
                let Ok((decision, input)) = self.decode(&frame, seq, &nodes) else {
                    tracing::debug!(seq, "cannot read a decision of the journal");
                    continue;
                };
                if filter.matches(&decision) && !visit(decision, input) {
                    return Ok(Some(seq + 1));
                }
            }
            if is_too_old {
                return Ok(None);
            }
        }
        Ok(next)
    }

    /// Decodes a decision, with its input if its node is in `nodes`.
    fn decode(
        &self,
        frame: &Frame<'_>,
        seq: u64,
        nodes: &HashMap<String, Frame<'_>>,
    ) -> Result<(Decision, Option<Input>), JournalError> {
        let body = frame.body().map_err(|e| self.damaged(seq, e))?;
        let mut entry: Entry = serde_json::from_slice(&body).map_err(|e| self.damaged(seq, e))?;
        let question = entry.question.take();
        let decision = entry.into_decision().map_err(|e| self.damaged(seq, e))?;
        let node = decision.input.as_ref().and_then(|digest| nodes.get(digest.as_str()));
        let input = match (node, question) {
            (Some(node), Some(question)) => Some(Input {
                node: node.body().map_err(|e| self.damaged(seq, e))?,
                question: question.get().as_bytes().to_vec(),
            }),
            _ => None,
        };
        Ok((decision, input))
    }

    /// The newest files that may contain a number below `before`, and the number before which to continue.
    fn select_segments(
        &self,
        before: Option<u64>,
        files_max: usize,
    ) -> Result<(Vec<Segment>, Option<u64>), JournalError> {
        let older = |segment: &&Segment| before.is_none_or(|before| segment.first < before);
        let mut selected: Vec<Segment> = self.update(|state| {
            self.write(state).map(|()| state.segments.list.iter().rev().filter(older).cloned().collect())
        })?;
        let mut bytes = 0;
        let overflow = selected.iter().position(|segment| {
            bytes += segment.bytes;
            bytes > SCAN_BYTES
        });
        let files_max = files_max.min(overflow.map_or(usize::MAX, |files| files.max(1)));
        let has_more = selected.len() > files_max;
        selected.truncate(files_max);
        let next = selected.last().filter(|_| has_more).map(|last| last.first);
        Ok((selected, next))
    }

    /// The time of a file's first decision, milliseconds since 1970.
    fn first_wall_ms(&self, segment: &Segment) -> Option<u64> {
        let bytes = self.read(segment).ok()?;
        frames(&bytes).find_map(|frame| match frame.head {
            Head::Decision { at_wall_ms, .. } => Some(at_wall_ms),
            Head::Node { .. } => None,
        })
    }

    /// The file's bytes; none if it was deleted meanwhile.
    fn read(&self, segment: &Segment) -> Result<Vec<u8>, JournalError> {
        match berth_files::read(&segment.path, SEGMENT_READ_MAX) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            read => read.map_err(|e| self.error("cannot be read", e)),
        }
    }

    fn damaged(&self, seq: u64, error: impl std::fmt::Display) -> JournalError {
        let what = format!(
            "decision {seq} is damaged ({error}); to discard the journal, stop berth and delete the folder"
        );
        JournalError { path: self.folder.display().to_string(), what, source: None }
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

/// The newest decisions, oldest first, for clients that poll: such a request reads and verifies no file of
/// 4 MiB.
#[derive(Debug, Default)]
struct Recent(VecDeque<Decision>);

impl Recent {
    fn push(&mut self, decision: Decision) {
        if self.0.len() == RECENT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(decision);
    }

    /// Removes all, since some may not be on disk.
    fn clear(&mut self) {
        self.0.clear();
    }

    /// As [`berth_kernel::node::ports::Journal::find`], among decisions from number `oldest` on. `None` if there are
    /// too few matches in memory, so that the files must be read.
    fn find(&self, filter: &Filter, limit: usize, oldest: u64) -> Option<DecisionPage> {
        let kept = self.0.iter().rev().take_while(|decision| decision.seq >= oldest);
        let matches = kept.filter(|decision| filter.matches(decision));
        // Counted before any decision is cloned.
        let after = matches.clone().nth(limit)?;
        Some(DecisionPage { decisions: matches.take(limit).cloned().collect(), next: Some(after.seq + 1) })
    }
}

impl Journal for FileJournal {
    fn append(&self, decision: &Decision, input: Option<&Input>) -> Result<u64, JournalError> {
        self.update(|state| self.append_to(state, decision, input))
    }

    fn flush(&self) -> Result<(), JournalError> {
        self.update(|state| self.write(state))
    }

    fn find(&self, filter: &Filter, limit: usize) -> Result<DecisionPage, JournalError> {
        {
            let state = self.state.lock();
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
        let (segments, _) = self.select_segments(seq.checked_add(1), 1)?;
        let Some(segment) = segments.first() else { return Ok(None) };
        let bytes = self.read(segment)?;
        let Some(frame) = frames(&bytes).find(|frame| frame.seq() == Some(seq)) else {
            return Ok(None);
        };
        self.decode(&frame, seq, &nodes(&bytes)).map(Some)
    }

    fn stats_without_oldest(&self) -> JournalStats {
        *self.published.lock()
    }

    fn stats(&self) -> JournalStats {
        let mut stats = self.stats_without_oldest();
        let (oldest, known) = {
            let state = self.state.lock();
            (state.segments.list.front().cloned(), state.oldest_wall_ms)
        };
        let Some(oldest) = oldest else { return stats };
        stats.oldest_wall_ms = match known {
            Some((first, at_wall_ms)) if first == oldest.first => Some(at_wall_ms),
            // A file's first decision does not change, so it is read once.
            _ => self.first_wall_ms(&oldest),
        };
        if let Some(at_wall_ms) = stats.oldest_wall_ms {
            self.state.lock().oldest_wall_ms = Some((oldest.first, at_wall_ms));
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

/// The nodes of a file by digest.
fn nodes(bytes: &[u8]) -> HashMap<String, Frame<'_>> {
    frames(bytes)
        .filter_map(|frame| match frame.head {
            Head::Node { digest } => Some((hex(&digest), frame)),
            Head::Decision { .. } => None,
        })
        .collect()
}

fn hex(digest: &[u8; 32]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn journal_error(folder: &Path, what: &str, source: io::Error) -> JournalError {
    JournalError { path: folder.display().to_string(), what: what.to_owned(), source: Some(source) }
}

#[cfg(test)]
mod tests;
