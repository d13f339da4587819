//! The traits that `core` needs from adapters. All are synchronous and object-safe.

mod install_error;

pub use install_error::InstallError;

use crate::hardware::gpu::{Inventory, Reading};
use crate::hardware::process::{ProcessIdentity, ProcessVisibility};
use crate::ids::names::Digest;
use crate::ids::time::Now;
use crate::node::ledger::Ledger;
use crate::node::record::{Record, Write};
use crate::policy::decision::{Cost, Decision, Filter, OwnedQuestion};
use crate::policy::hooks::{Answer, Fault, FaultKind, Question};
use crate::policy::version::PolicyVersion;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The node's GPUs. Implemented by `nvml` and `sim`; used by the GPU watch thread alone.
pub trait Gpus: Send + Sync {
    /// Scans all GPUs. Blocks, but not longer than the adapter's own deadline: a GPU whose calls hang is
    /// in [`Inventory::scan_errors`] and keeps its last known state.
    ///
    /// # Errors
    /// If the backend as a whole does not answer, with a fix.
    fn scan(&self) -> Result<Inventory, GpusError>;

    /// Waits at most `wait` for the next event. `None` if there was none.
    ///
    /// # Errors
    /// If events are not available at present; the caller keeps polling.
    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError>;

    /// Ends a wait of [`Self::next_reading`] that is under way, so that its thread can stop.
    fn interrupt(&self) {}

    /// Closes the driver's library, if it is open; the next scan opens it again. Blocks for `wait` at most.
    ///
    /// # Errors
    /// If a call hangs, or files of the driver stay open; names them.
    fn close(&self, wait: Duration) -> Result<(), GpusError> {
        let _ = wait;
        Ok(())
    }

    /// What identifies the loaded driver, if the backend knows it: it changes when the driver is replaced.
    fn loaded_driver(&self) -> Option<String> {
        None
    }

    /// Why only a restart of the daemon's container can help, if so: its mounts may be of a driver that was replaced.
    fn restart_reason(&self) -> Option<String> {
        None
    }

    /// For logs: `NVML 13.0 at /usr/lib/...`, `8 simulated H100`.
    fn describe(&self) -> String;
}

/// Identifies the processes on GPUs. Implemented by `procfs`; used by the GPU watch thread alone.
pub trait Processes: Send + Sync {
    /// Whether NVML's process ids are valid in the daemon's PID namespace.
    fn process_visibility(&self) -> ProcessVisibility;

    /// Identifies processes without blocking; the result has an entry for each id. Called once in each
    /// inventory scan with all processes of interest; others are removed from caches.
    fn identify(&self, pids: &BTreeSet<u32>) -> BTreeMap<u32, ProcessIdentity>;
}

/// A GPU backend failed.
#[derive(Debug)]
pub struct GpusError {
    /// The error and how to fix it.
    pub what: String,
    /// The cause, if there is one.
    pub source: Option<Box<dyn Error + Send + Sync>>,
}

impl fmt::Display for GpusError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl Error for GpusError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| &**source as &(dyn Error + 'static))
    }
}

/// Durable records. Implemented by `store`; used by the keeper alone.
pub trait Store: Send {
    /// Every record, sorted by key. Reopens the store first if an append failed.
    ///
    /// # Errors
    /// If the store cannot be read; it is left unchanged.
    fn load(&mut self) -> Result<Vec<Record>, StoreError>;

    /// Stores all writes or none, durable (through the drive's cache) before `Ok`.
    ///
    /// # Errors
    /// If that cannot be guaranteed. Whether the writes are stored is then unknown until `load`.
    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError>;

    /// The store's folder, for errors.
    fn path(&self) -> String;

    /// A function that may be called from any thread to end a store call that hangs for another reason
    /// than the disk.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Size of its files in bytes, if it has files.
    fn bytes(&self) -> Option<u64> {
        None
    }
}

/// See [`Store::waker`].
pub type Waker = Box<dyn Fn() + Send>;

/// A store operation failed.
#[derive(Debug)]
pub enum StoreError {
    /// Another process has it open.
    Locked {
        /// The store's folder.
        path: String,
    },
    /// Written by a newer release.
    Newer {
        /// The store's folder.
        path: String,
        /// Its format.
        found: u32,
        /// Newest format that this release reads.
        known: u32,
    },
    /// A store was created here and is missing now.
    Gone {
        /// The store's folder.
        path: String,
        /// The file that shows that it was created.
        made: String,
    },
    /// Its contents are corrupt.
    Damaged {
        /// The store's folder.
        path: String,
        /// What is damaged.
        what: String,
    },
    /// A record is too large for one atomic write.
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The disk did not answer in time; a write may or may not be stored.
    Slow {
        /// The store's folder.
        path: String,
        /// The deadline, milliseconds.
        ms: u64,
    },
    /// The disk, or the quota on it, is full.
    Full {
        /// The store's folder.
        path: String,
        /// The system's error.
        what: String,
    },
    /// Another I/O error: disk read-only, removed.
    Io {
        /// The store's folder.
        path: String,
        /// The system's error.
        what: String,
    },
}

/// The state folder of a store, for commands that name it.
fn state_dir(store: &str) -> &str {
    store.strip_suffix("/store").unwrap_or(store)
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Locked { path } => write!(
                f,
                "the store at {path} is in use by another process; stop it, or give this one another --state-dir"
            ),
            Self::Newer { path, found, known } => write!(
                f,
                "the store at {path} was written by a newer berth (format {found}, this one reads up to {known}); run that release, or move the folder away"
            ),
            Self::Gone { path, made } => write!(
                f,
                "the store at {path} is missing, although {made} shows that one was created here; its cordons, stack and allocations are lost with it. Put it back, restore an export (`berth state import FILE --state-dir {dir}`), or start with an empty store (`berth state init --state-dir {dir}`), which adopts running pods from the kubelet's checkpoint",
                dir = state_dir(path),
            ),
            Self::Damaged { path, what } => write!(
                f,
                "the store at {path} is damaged ({what}) and was left unchanged: move the folder away, then restore an export (`berth state import FILE --state-dir {dir}`), or start with an empty store (`berth state init --state-dir {dir}`), which adopts running pods from the kubelet's checkpoint",
                dir = state_dir(path),
            ),
            Self::TooLarge { bytes, limit } => write!(
                f,
                "a record of {bytes} bytes is larger than the {limit} bytes that one write stores atomically"
            ),
            Self::Slow { path, ms } => write!(f, "the disk under {path} did not answer within {ms} ms"),
            Self::Full { path, what } | Self::Io { path, what } => {
                write!(f, "cannot write to the store at {path}: {what}")
            }
        }
    }
}

impl Error for StoreError {}

/// The files of policy versions. Implemented by `wasm`; used at the start, and by uploads, downloads and deletions.
pub trait PolicyFiles: Send + Sync {
    /// Installs a component, or a core module, which is converted to one: checks it, compiles it in a
    /// child process with limits, calls `describe` and stores the bytes. Blocks, up to its own deadline.
    /// Installing the same bytes twice is harmless.
    ///
    /// # Errors
    /// If it is not a policy, imports what policies may not, or costs too much to compile.
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError>;

    /// Every policy that is built into the daemon. Compiles none of them.
    fn shipped(&self, now: Now) -> Vec<PolicyVersion> {
        let _ = now;
        Vec::new()
    }

    /// Registers a version of the store without loading it, which costs memory and perhaps a compilation:
    /// [`PolicyRuntime::load`] loads it before its first call. Returns whether its file exists.
    fn register(&self, version: &PolicyVersion) -> bool {
        let _ = version;
        false
    }

    /// Up to `bytes_max` of the component's bytes from offset `from`; fewer, or none, only at its end. Only
    /// this piece is in memory. It is not verified: the caller compares the whole with the digest.
    ///
    /// # Errors
    /// If its file is missing.
    fn read(&self, digest: &Digest, from: u64, bytes_max: usize) -> Result<Vec<u8>, InstallError> {
        let module = self.read_all(digest)?;
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        Ok(module.into_iter().skip(from).take(bytes_max).collect())
    }

    /// The component's bytes, verified.
    ///
    /// # Errors
    /// If its file is missing or does not match the digest.
    fn read_all(&self, digest: &Digest) -> Result<Vec<u8>, InstallError>;

    /// Deletes a version's files and unregisters it.
    fn remove(&self, digest: &Digest);
}

/// One question to one policy.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The policy version.
    pub digest: &'a Digest,
    /// The entry's parameters, JSON.
    pub parameters: &'a str,
    /// The state of the node.
    pub node: &'a Arc<Ledger>,
    /// The time from which ages are computed; a policy has no clock.
    pub now: Now,
    /// The question.
    pub question: Question<'a>,
    /// Longest wall time of the call, milliseconds; the adapter has a constant limit of fuel.
    pub wall_ms_max: u64,
}

/// Calls policies. Implemented by `wasm`; used by the policy thread and the lab.
pub trait PolicyRuntime: Send + Sync {
    /// Loads a version of the store, or one that is built into the daemon, so that it can be called. If it
    /// had to be compiled, which blocks up to a deadline, the returned version has another artifact digest.
    ///
    /// # Errors
    /// If its files are missing or do not match the digests.
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError>;

    /// Unloads a version's code; the next call loads it from its file again.
    fn unload(&self, digest: &Digest) {
        let _ = digest;
    }

    /// Calls one policy in a new instance. The caller checks the answer against the offer and the permissions.
    fn call(&self, call: Call<'_>) -> CallOutput;

    /// The input of a call without the policy's parameters, so that the call can be repeated later.
    ///
    /// # Errors
    /// If the question names what the node does not have.
    fn record_input(&self, node: &Arc<Ledger>, now: Now, question: Question<'_>) -> Result<Input, Fault> {
        let _ = (node, now, question);
        Err(Fault { kind: FaultKind::Missing, detail: "recording is not supported".into() })
    }

    /// Calls a policy with a recorded input.
    ///
    /// # Errors
    /// A message, if this release cannot read the input.
    fn call_recorded(
        &self,
        digest: &Digest,
        parameters: &str,
        input: &Input,
    ) -> Result<ReplayedCall, String> {
        let _ = (digest, parameters, input);
        Err("replaying recorded calls is not supported".into())
    }
}

/// The input of a policy call, as JSON with the names of the contract.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// The node. Several questions of one generation share it.
    pub node: Vec<u8>,
    /// The question.
    pub question: Vec<u8>,
}

/// The result of a call with its cost and log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallOutput {
    /// The policy's answer; `None` is `pass`. A fault if it trapped, exceeded a limit, or returned a malformed answer.
    pub answer: Result<Option<Answer>, Fault>,
    /// The cost of the call.
    pub cost: Cost,
    /// Lines that the policy logged, escaped and truncated.
    pub log_lines: Vec<String>,
}

impl From<Result<Option<Answer>, Fault>> for CallOutput {
    /// An answer without cost and log.
    fn from(answer: Result<Option<Answer>, Fault>) -> Self {
        Self { answer, cost: Cost::default(), log_lines: Vec::new() }
    }
}

/// The result of a call with a recorded input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplayedCall {
    /// The question of the input.
    pub question: OwnedQuestion,
    /// The policy's answer now.
    pub answer: Result<Option<Answer>, Fault>,
    /// The cost of the call.
    pub cost: Cost,
}

/// The journal of policy decisions. Implemented by `store`; written by the recorder's thread alone, read
/// by any. Bounded: the oldest decisions are dropped. A power cut may lose the newest.
pub trait Journal: Send + Sync {
    /// Appends a decision, sets its `seq` and `input`, and returns its `seq`. It may stay in memory until
    /// [`Journal::flush`].
    ///
    /// # Errors
    /// If it cannot be written to disk; the decision is lost and counted as such.
    fn append(&self, decision: &Decision, input: Option<&Input>) -> Result<u64, JournalError>;

    /// Writes decisions in memory to disk.
    ///
    /// # Errors
    /// If the write fails.
    fn flush(&self) -> Result<(), JournalError>;

    /// The decisions that match `filter`, newest first, at most `limit`. Reads only a part of the journal
    /// in one call; [`DecisionPage::next`] continues the search.
    ///
    /// # Errors
    /// If the journal cannot be read.
    fn find(&self, filter: &Filter, limit: usize) -> Result<DecisionPage, JournalError>;

    /// Passes the matching decisions with the policies' inputs to `visit` until it returns false. Returns
    /// where to continue, starting with the decision that `visit` rejected.
    ///
    /// # Errors
    /// If the journal cannot be read.
    fn visit_each(&self, filter: &Filter, visit: &mut Visit<'_>) -> Result<Option<u64>, JournalError>;

    /// One decision with the policies' input.
    ///
    /// # Errors
    /// If the journal cannot be read.
    fn open(&self, seq: u64) -> Result<Option<(Decision, Option<Input>)>, JournalError>;

    /// The journal's statistics.
    fn stats(&self) -> JournalStats;

    /// The statistics without `oldest_wall_ms`, which is read from disk. Does not block, even if the disk
    /// hangs.
    fn stats_without_oldest(&self) -> JournalStats {
        self.stats()
    }
}

/// Accepts a decision with the policies' input; returns false to stop before it.
pub type Visit<'v> = dyn FnMut(Decision, Option<Input>) -> bool + 'v;

/// One page of decisions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DecisionPage {
    /// Newest first.
    pub decisions: Vec<Decision>,
    /// If there may be more: [`Filter::before`] of the next page.
    pub next: Option<u64>,
}

/// Statistics of the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalStats {
    /// Decisions in the journal.
    pub kept: u64,
    /// Bytes on disk and in memory.
    pub bytes: u64,
    /// Time of the oldest decision, milliseconds since 1970.
    pub oldest_wall_ms: Option<u64>,
    /// Decisions dropped since the daemon started, for their age or the size limit.
    pub dropped: u64,
    /// Decisions that were not recorded since the daemon started: the recorder was too slow, or the disk
    /// failed.
    pub lost: u64,
}

/// A journal operation failed.
#[derive(Debug)]
pub struct JournalError {
    /// Its folder.
    pub path: String,
    /// The error.
    pub what: String,
    /// The system's error.
    pub source: Option<std::io::Error>,
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the decision journal at {}: {}", self.path, self.what)
    }
}

impl Error for JournalError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source as &(dyn Error + 'static))
    }
}

/// Both clocks.
pub trait Clock: Send + Sync {
    /// The current time.
    fn now(&self) -> Now;
}
