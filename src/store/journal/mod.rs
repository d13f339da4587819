//! `Journal` in files: decisions with what the policies were shown, bounded in bytes and in age.
//!
//! Not in sled, where the ledger is: sled keeps in memory what it has read, so one look through 64 MiB
//! of the past would cost the daemon three times what it may have; and the ledger's store is copied and
//! read whole at every start. Here a look reads one file of 4 MiB at a time, and the past can be damaged
//! or deleted without any harm to the ledger.
//!
//! Nothing is synced: the tail may be lost with the machine. A file whose tail was torn is read up to
//! there, and a new one begun.

mod entry;
mod frame;
mod recent;
mod scan;
mod segments;

use berth_kernel::decision::{Decision, Filter, JournalLimit};
use berth_kernel::names::Digest;
use berth_kernel::ports::{Found, Input, Journal, JournalError, Standing, Visit};
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

/// What lies in memory at most before it is written, bytes.
const PENDING_BYTES: usize = 64 * 1024;
/// By age at most one file goes in this time, and none in the first of it: a clock that is years ahead
/// for a while takes nothing with it, and a journal that is 7 days long has no more files than hours.
const AGED_APART: Duration = Duration::from_secs(3600);

/// A journal in a folder.
#[derive(Debug)]
pub struct FileJournal {
    folder: PathBuf,
    limit: JournalLimit,
    state: Mutex<State>,
    size: Size,
}

/// How much there is, as of the last change: read without the lock, which a disk that hangs holds.
#[derive(Debug, Default)]
struct Size {
    kept: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
    lost: AtomicU64,
}

/// The lock; what was changed under it is published at its end.
struct Changing<'j> {
    state: MutexGuard<'j, State>,
    size: &'j Size,
}

impl Deref for Changing<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Changing<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let state = &*self.state;
        let kept = (state.next - state.oldest()).saturating_sub(state.lost);
        let bytes = state.segments.bytes() + state.pending.len() as u64;
        let Size { kept: k, bytes: b, dropped: d, lost: l } = self.size;
        // Each is right by itself; that they are of one moment nobody needs.
        for (place, value) in [(k, kept), (b, bytes), (d, state.dropped), (l, state.lost)] {
            place.store(value, Ordering::Relaxed);
        }
    }
}

#[derive(Debug)]
struct State {
    segments: Segments,
    /// The newest file, once something was written to it.
    file: Option<File>,
    /// Nodes that are in it already.
    nodes: HashSet<[u8; 32]>,
    /// What is not written yet, and the first number and the count of decisions in it.
    pending: Vec<u8>,
    pending_first: u64,
    pending_count: u64,
    next: u64,
    dropped: u64,
    lost: u64,
    recent: Recent,
    /// When the first decision of the oldest file was, by that file's first number.
    oldest_wall_ms: Option<(u64, u64)>,
    /// When a file last went by its age, or the journal was opened.
    aged: Instant,
}

impl FileJournal {
    /// Opens the journal in this folder, or makes one.
    ///
    /// # Errors
    /// If the folder cannot be used.
    pub fn open(folder: &Path, limit: JournalLimit) -> Result<Self, JournalError> {
        let wrong = |what: &str, source| trouble(folder, what, source);
        let segments = Segments::open(folder).map_err(|e| wrong("cannot use its folder", e))?;
        let mut next = 1;
        // The newest may hold no whole frame.
        for segment in segments.all.iter().rev() {
            let bytes = berth_files::read(&segment.path, SEGMENT_READ_MAX)
                .map_err(|e| wrong("cannot read its newest file", e))?;
            // Its name is taken, whatever is in it.
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
            aged: Instant::now(),
        };
        let state = Mutex::new(state);
        let journal = Self { folder: folder.to_owned(), limit, state, size: Size::default() };
        journal.prune(&mut journal.change())?;
        Ok(journal)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn change(&self) -> Changing<'_> {
        Changing { state: self.lock(), size: &self.size }
    }

    fn trouble(&self, what: &str, source: io::Error) -> JournalError {
        trouble(&self.folder, what, source)
    }

    /// Writes what is pending; what cannot be written is lost. A full disk costs the oldest file, too.
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
                // Best effort: the error is told already.
                let _ = state.segments.drop_oldest();
                state.dropped += state.oldest() - before;
            }
        }
        state.pending.clear();
        state.pending_count = 0;
        written.map_err(|e| self.trouble("cannot be written", e))?;
        if state.segments.all.back().is_some_and(|newest| newest.bytes >= SEGMENT_BYTES) {
            state.file = None;
            state.nodes.clear();
        }
        self.prune(state)
    }

    fn prune(&self, state: &mut State) -> Result<(), JournalError> {
        // Room for the file that is being written.
        let bytes = self.limit.bytes.saturating_sub(SEGMENT_BYTES).max(SEGMENT_BYTES);
        let age = Duration::from_millis(self.limit.age_ms);
        let before = state.oldest();
        let mut pruned = state.segments.prune(bytes);
        if state.aged.elapsed() >= AGED_APART {
            state.aged = Instant::now();
            pruned = pruned.and_then(|()| state.segments.prune_aged(age, SystemTime::now()));
        }
        state.dropped += state.oldest() - before;
        pruned.map_err(|e| self.trouble("cannot delete its oldest file", e))
    }
}

impl State {
    fn write(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(self.segments.begin(self.pending_first)?);
        }
        let (Some(file), Some(newest)) = (&mut self.file, self.segments.all.back_mut()) else {
            return Ok(());
        };
        if let Err(error) = file.write_all(&self.pending) {
            // Not a file for every failure, and no torn frame in the middle of one.
            if newest.bytes > 0 && file.set_len(newest.bytes).is_ok() {
                return Err(error);
            }
            self.file = None;
            self.segments.drop_empty();
            return Err(error);
        }
        newest.bytes += self.pending.len() as u64;
        newest.written = SystemTime::now();
        Ok(())
    }

    fn oldest(&self) -> u64 {
        self.segments.all.front().map_or(self.pending_first, |segment| segment.first)
    }

    /// Adds a node that is not in this file yet, and answers its name.
    fn node(&mut self, node: &[u8]) -> io::Result<[u8; 32]> {
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
        let mut state = self.change();
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
        let put = (|| -> io::Result<()> {
            let node = input.map(|input| state.node(&input.node)).transpose()?;
            let input = node.and_then(|digest| Digest::parse(&hex(&digest)).ok());
            let numbered = Decision { seq, input, ..decision.clone() };
            let body = serde_json::to_vec(&Entry::new(&numbered, question))?;
            let head = Head::Decision { seq, at_wall_ms: decision.at_wall_ms };
            frame::write(&mut state.pending, head, &body)?;
            state.recent.push(numbered);
            Ok(())
        })();
        if let Err(error) = put {
            state.lost += 1;
            return Err(self.trouble("a decision cannot be put into words", error));
        }
        if state.pending.len() >= PENDING_BYTES {
            self.write(&mut state)?;
        }
        Ok(seq)
    }

    fn flush(&self) -> Result<(), JournalError> {
        self.write(&mut self.change())
    }

    fn find(&self, filter: &Filter, limit: usize) -> Result<Found, JournalError> {
        {
            let state = self.lock();
            if let Some(found) = state.recent.find(filter, limit, state.oldest()) {
                return Ok(found);
            }
        }
        let mut decisions = Vec::new();
        let next = self.scan(filter, false, &mut |decision, _| {
            let room = decisions.len() < limit;
            if room {
                decisions.push(decision);
            }
            room
        })?;
        Ok(Found { decisions, next })
    }

    fn each(&self, filter: &Filter, visit: &mut Visit<'_>) -> Result<Option<u64>, JournalError> {
        self.scan(filter, true, visit)
    }

    fn open(&self, wanted: u64) -> Result<Option<(Decision, Option<Input>)>, JournalError> {
        self.one(wanted)
    }

    fn size(&self) -> Standing {
        let read = |place: &AtomicU64| place.load(Ordering::Relaxed);
        Standing {
            kept: read(&self.size.kept),
            bytes: read(&self.size.bytes),
            oldest_wall_ms: None,
            dropped: read(&self.size.dropped),
            lost: read(&self.size.lost),
        }
    }

    fn standing(&self) -> Standing {
        let mut standing = self.size();
        let (oldest, known) = {
            let state = self.lock();
            (state.segments.all.front().cloned(), state.oldest_wall_ms)
        };
        let Some(oldest) = oldest else { return standing };
        standing.oldest_wall_ms = match known {
            Some((first, at_wall_ms)) if first == oldest.first => Some(at_wall_ms),
            // What a file begins with stays as it is, so it is read once.
            _ => self.begins(&oldest),
        };
        if let Some(at_wall_ms) = standing.oldest_wall_ms {
            self.lock().oldest_wall_ms = Some((oldest.first, at_wall_ms));
        }
        standing
    }
}

impl Drop for FileJournal {
    fn drop(&mut self) {
        // Best effort: the tail may be lost.
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

fn trouble(folder: &Path, what: &str, source: io::Error) -> JournalError {
    JournalError { path: folder.display().to_string(), what: what.to_owned(), source: Some(source) }
}

#[cfg(test)]
mod tests;
