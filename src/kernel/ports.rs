//! What the middle needs from outside, on one page. Sync and object-safe; async ends before here.

mod install_error;

pub use install_error::InstallError;

use crate::decision::{Asked, Cost, Decision, Filter};
use crate::gpu::{Inventory, Reading};
use crate::ledger::Ledger;
use crate::names::Digest;
use crate::policy::{Answer, Call, Fault, FaultKind, PolicyVersion, Question};
use crate::process::{Sight, Who};
use crate::record::{Record, Write};
use crate::time::Now;
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The node's GPUs. Implemented by `nvml` and `sim`; used by the GPU watch thread alone.
pub trait Gpus: Send + Sync {
    /// One look at all GPUs. Blocks, but never longer than the adapter's own deadline: a GPU whose
    /// calls hang is in `troubles`, and its last known facts stay.
    ///
    /// # Errors
    /// If the backend as a whole cannot be asked; says what to do about it.
    fn look(&self) -> Result<Inventory, GpusError>;

    /// The next event, waiting at most `wait`. `None` when there was none.
    ///
    /// # Errors
    /// If events cannot be had at all at present; the caller polls on.
    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError>;

    /// For logs: `NVML 13.0 at /usr/lib/...`, `8 simulated H100`.
    fn describe(&self) -> String;
}

/// Who the processes on GPUs are. Implemented by `procfs`; used by the GPU watch thread alone.
pub trait Processes: Send + Sync {
    /// Whether NVML's process ids mean the processes that are seen here.
    fn sight(&self) -> Sight;

    /// Who these are, as far as it can be told at once. Each of them is in the answer. Called once a
    /// look with all that are of interest: who is not asked about is forgotten.
    fn who(&self, pids: &BTreeSet<u32>) -> BTreeMap<u32, Who>;
}

/// A GPU backend that cannot be asked.
#[derive(Debug)]
pub struct GpusError {
    /// What is wrong and what to do.
    pub what: String,
    /// The cause, where there is one.
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
    /// Every record, in the order of their keys. Reopens first if an append failed.
    ///
    /// # Errors
    /// If the store cannot be read; it is left as it was.
    fn load(&mut self) -> Result<Vec<Record>, StoreError>;

    /// All writes or none, durable (through the drive's cache) before `Ok`.
    ///
    /// # Errors
    /// If that cannot be promised. Whether the writes are there then is not known until `load`.
    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError>;

    /// For whoever waits for a call of this store in vain: calling it from any thread ends a wait that
    /// the disk is not the reason of.
    fn waker(&self) -> Option<Waker> {
        None
    }

    /// Bytes that its files take, where it tells them, as they were when they were last looked at. Does
    /// not wait.
    fn bytes(&self) -> Option<u64> {
        None
    }
}

/// See [`Store::waker`].
pub type Waker = Box<dyn Fn() + Send>;

/// A store that failed.
#[derive(Debug)]
pub enum StoreError {
    /// Another process has it open.
    Locked {
        /// The store's folder.
        path: String,
    },
    /// Written by a later release.
    Newer {
        /// The store's folder.
        path: String,
        /// Format found.
        found: u32,
        /// Newest format that this release reads.
        known: u32,
    },
    /// One was made here, and there is none any more.
    Gone {
        /// The store's folder.
        path: String,
        /// The file that says so.
        made: String,
    },
    /// Cannot be read back.
    Damaged {
        /// The store's folder.
        path: String,
        /// What is wrong.
        what: String,
    },
    /// A record is too large to be written safely.
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The disk did not answer in time; if it was a write, it may or may not be there.
    Slow {
        /// The store's folder.
        path: String,
        /// The deadline.
        ms: u64,
    },
    /// An I/O error: full, read-only, gone.
    Io {
        /// The store's folder.
        path: String,
        /// The system's words.
        what: String,
    },
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
                "the store at {path} is missing, although {made} shows that one was created here; its cordons, stack and allocations are missing with it. Put it back, restore an export (`berth state import FILE`), or start with an empty store (`berth state init`), which adopts running pods from the kubelet's checkpoint"
            ),
            Self::Damaged { path, what } => write!(
                f,
                "the store at {path} is damaged ({what}); it was left as it is: move the folder away, then restore a copy (`berth state import FILE`), or begin with an empty store (`berth state init`), which adopts running pods from the kubelet's checkpoint"
            ),
            Self::TooLarge { bytes, limit } => write!(
                f,
                "a record of {bytes} bytes is larger than the {limit} bytes that one write keeps safe"
            ),
            Self::Slow { path, ms } => write!(f, "the disk under {path} did not answer within {ms} ms"),
            Self::Io { path, what } => write!(f, "cannot write to the store at {path}: {what}"),
        }
    }
}

impl Error for StoreError {}

/// Policy modules. Implemented by `wasm`; used by the policy thread and by uploads.
pub trait Policies: Send + Sync {
    /// Takes a component, or a core module that becomes one: checks it, compiles it in a limited
    /// child process, asks `describe`, keeps the bytes. Blocks, up to its own deadline. Installing
    /// the same bytes twice is harmless.
    ///
    /// # Errors
    /// If it is not a policy, asks for what policies do not get, or costs too much to compile.
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError>;

    /// Every policy that came with the daemon. None of them is compiled for it.
    fn shipped(&self, now: Now) -> Vec<PolicyVersion> {
        let _ = now;
        Vec::new()
    }

    /// Makes a version that the store knows, or that came with the daemon, callable. Answers the
    /// version with another artifact digest if it had to be compiled. Blocks then, up to its own
    /// deadline.
    ///
    /// # Errors
    /// If its files are gone or differ from what the store knows.
    fn restore(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError>;

    /// Remembers a version that the store knows, without making it callable yet: that costs memory
    /// and perhaps a compilation, and is done by [`Policies::restore`] before its first call. Answers
    /// whether its bytes are there.
    fn know(&self, version: &PolicyVersion) -> bool {
        let _ = version;
        false
    }

    /// The component's bytes.
    ///
    /// # Errors
    /// If its file is gone or differs.
    fn module(&self, digest: &Digest) -> Result<Vec<u8>, InstallError>;

    /// So many of the component's bytes from this one on; fewer, or none, only at its end. No more of it is in
    /// memory. Nobody has judged them: whoever puts pieces together holds the whole against the digest.
    ///
    /// # Errors
    /// If its file is gone.
    fn module_piece(&self, digest: &Digest, from: u64, bytes_max: usize) -> Result<Vec<u8>, InstallError> {
        let all = self.module(digest)?;
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        Ok(all.into_iter().skip(from).take(bytes_max).collect())
    }

    /// Lets go of a version's code, which the next call reads from its file again.
    fn rest(&self, digest: &Digest) {
        let _ = digest;
    }

    /// Deletes a version's files and forgets it.
    fn remove(&self, digest: &Digest);

    /// Asks one policy one question, in a fresh instance. `None` is `pass`. Whether the answer is
    /// within the offer and the permissions is checked by the caller.
    ///
    /// # Errors
    /// If the policy trapped, used too much, or answered something malformed.
    fn ask(&self, call: Call<'_>) -> Result<Option<Answer>, Fault>;

    /// As [`Policies::ask`], and what it cost, where that can be told.
    fn ask_at_cost(&self, call: Call<'_>) -> (Result<Option<Answer>, Fault>, Cost) {
        (self.ask(call), Cost::default())
    }

    /// As [`Policies::ask_at_cost`], with the lines that the policy logged meanwhile, escaped and cut.
    fn ask_aloud(&self, call: Call<'_>) -> Aloud {
        let (told, cost) = self.ask_at_cost(call);
        Aloud { told, cost, said: Vec::new() }
    }

    /// What policies are shown but for their parameters, to be asked again some day.
    ///
    /// # Errors
    /// If the question names what the node has not.
    fn input(&self, node: &Arc<Ledger>, now: Now, question: Question<'_>) -> Result<Input, Fault> {
        let _ = (node, now, question);
        Err(Fault { kind: FaultKind::Missing, detail: "these policies put nothing down".into() })
    }

    /// Asks a policy a question of the past.
    ///
    /// # Errors
    /// In words, if the input is not one that this release understands.
    fn ask_again(&self, digest: &Digest, parameters: &str, input: &Input) -> Result<AskedAgain, String> {
        let _ = (digest, parameters, input);
        Err("these policies cannot be asked about the past".into())
    }
}

/// What a policy was shown, as JSON of the contract's own words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Input {
    /// The node. Several questions at one moment share it.
    pub node: Vec<u8>,
    /// What was asked of it.
    pub question: Vec<u8>,
}

/// An answer, and all that there was about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aloud {
    /// What the policy answers.
    pub told: Result<Option<Answer>, Fault>,
    /// What that took.
    pub cost: Cost,
    /// What it logged; empty where nobody listens.
    pub said: Vec<String>,
}

/// An answer about the past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedAgain {
    /// What was asked.
    pub asked: Asked,
    /// What the policy says to it now.
    pub told: Result<Option<Answer>, Fault>,
    /// What that took.
    pub cost: Cost,
}

/// Decisions on the record. Implemented by `store`; written by the recorder's thread alone, read by
/// any. Bounded: what is older goes. Its tail may be lost with the machine.
pub trait Journal: Send + Sync {
    /// Puts a decision down under the next number, which is answered; `seq` and `input` of it are
    /// set here. It may lie in memory until [`Journal::flush`].
    ///
    /// # Errors
    /// If the disk does not take it; it is lost then, and counted.
    fn append(&self, decision: &Decision, input: Option<&Input>) -> Result<u64, JournalError>;

    /// Writes what lies in memory.
    ///
    /// # Errors
    /// If the disk does not take it.
    fn flush(&self) -> Result<(), JournalError>;

    /// Those that are wanted, newest first, at most `limit`. Looks at no more than a part of the
    /// journal at once: `Found::next` says where to go on.
    ///
    /// # Errors
    /// If it cannot be read.
    fn find(&self, filter: &Filter, limit: usize) -> Result<Found, JournalError>;

    /// As [`Journal::find`], with what the policies were shown: hands each to `visit` until it takes
    /// no more. Answers where to go on, the one that was not taken first.
    ///
    /// # Errors
    /// If it cannot be read.
    fn each(&self, filter: &Filter, visit: &mut Visit<'_>) -> Result<Option<u64>, JournalError>;

    /// One decision, and what the policies were shown for it.
    ///
    /// # Errors
    /// If it cannot be read.
    fn open(&self, seq: u64) -> Result<Option<(Decision, Option<Input>)>, JournalError>;

    /// How much there is.
    fn standing(&self) -> Standing;

    /// The same without what must be read from the disk, `oldest_wall_ms`, and without waiting for anybody: a
    /// disk that hangs does not hold up whoever asks.
    fn size(&self) -> Standing {
        self.standing()
    }
}

/// Takes a decision with what the policies were shown, or says that it takes no more.
pub type Visit<'v> = dyn FnMut(Decision, Option<Input>) -> bool + 'v;

/// Some decisions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Newest first.
    pub decisions: Vec<Decision>,
    /// If there may be more: [`Filter::before`] of the next question.
    pub next: Option<u64>,
}

/// How much the journal holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Decisions that are kept.
    pub kept: u64,
    /// Bytes on disk, and those not yet written.
    pub bytes: u64,
    /// When the oldest was made, milliseconds since 1970.
    pub oldest_wall_ms: Option<u64>,
    /// Decisions that went since the daemon started, for want of room or by their age.
    pub dropped: u64,
    /// Decisions that were never put down since the daemon started: the recorder was behind, or the
    /// disk failed.
    pub lost: u64,
}

/// A journal that failed.
#[derive(Debug)]
pub struct JournalError {
    /// Its folder.
    pub path: String,
    /// What is wrong.
    pub what: String,
    /// The system's own words.
    pub source: Option<std::io::Error>,
}

impl fmt::Display for JournalError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the journal of decisions at {}: {}", self.path, self.what)
    }
}

impl Error for JournalError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source as &(dyn Error + 'static))
    }
}

/// Both clocks.
pub trait Clock: Send + Sync {
    /// What time it is.
    fn now(&self) -> Now;
}
