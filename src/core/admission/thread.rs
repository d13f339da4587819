//! The policy thread: asks the stack on a snapshot, hands request and answer to the keeper.
//!
//! One thread, since the kubelet calls serially and a policy call takes tens of microseconds. The
//! kubelet's jobs go first; offers are asked again when nothing else waits.

use super::account::Account;
use super::baseline::Baseline;
use super::fault_log::FaultLog;
use super::offers::Offers;
use super::prepare::Unprepared;
use super::recorder::Recorder;
use super::stack::Walk;
use crate::keeper::{Answered, Applied, AskError, Handle, Snapshot};
use crate::spans;
use berth_kernel::allocation::Allocation;
use berth_kernel::change::Change;
use berth_kernel::command::{Attempt, Command, NewStack, Rules, StackAnswer};
use berth_kernel::decision::{Asked, CallNote, Grant, Note, Outcome, Said};
use berth_kernel::gpu::Reading;
use berth_kernel::names::{Digest, PartId};
use berth_kernel::offer::PartOffer;
use berth_kernel::placement;
use berth_kernel::policy::{AdmitRequest, Hook, PlaceRequest, Placement, TriageAnswer};
use berth_kernel::ports::{Clock, Policies};
use berth_kernel::refusal::Refusal;
use berth_kernel::time::Now;
use crossbeam_channel::{Receiver, after, never, select_biased};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tracing::Span;

/// Changes of the ledger are gathered this long before offers are asked again, so that a burst of
/// Allocates costs one call. Health and drain do not wait for it: the kernel derives them.
const GATHER: Duration = Duration::from_millis(50);

/// What the kubelet waits for.
pub(super) enum KubeletJob {
    Allocate { request: AdmitRequest, attempt: Attempt, reply: oneshot::Sender<Result<Granted, AskError>> },
    Place { request: PlaceRequest, reply: oneshot::Sender<(Placement, String)> },
}

/// What others wait for.
pub(super) enum OtherJob {
    Triage(Reading),
    Offer {
        reply: oneshot::Sender<Answered>,
    },
    Activate {
        stack: NewStack,
        expected: Option<u64>,
        reply: oneshot::Sender<Result<Snapshot, ActivateError>>,
    },
    Unsuspend {
        place: usize,
        revision: u64,
        reply: oneshot::Sender<Result<bool, AskError>>,
    },
}

/// A grant, and the ledger that it is in.
#[derive(Clone, Debug)]
pub struct Granted {
    /// The allocation.
    pub allocation: Allocation,
    /// The ledger with it.
    pub snapshot: Snapshot,
}

/// Why a stack was not activated. Nothing changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ActivateError {
    /// A policy of it failed when it was asked what this node offers.
    #[error("policy {policy} fails on this node, so the stack was not activated: {fault}")]
    Fails {
        /// Its label.
        policy: String,
        /// How.
        fault: String,
        /// Whether it may be the machine's fault rather than the policy's.
        passing: bool,
    },
    /// A policy of it cannot be made callable.
    #[error("{0}; the stack was not activated")]
    Unprepared(Unprepared),
    /// The keeper said no, or could not.
    #[error("{0}")]
    Ask(AskError),
}

impl ActivateError {
    /// Whether the same stack may be activated a moment later: the machine was slow, or the store
    /// failed.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        match self {
            Self::Fails { passing, .. } => *passing,
            Self::Unprepared(error) => error.is_passing(),
            Self::Ask(error) => matches!(error, AskError::Store(_) | AskError::Busy | AskError::Late(_)),
        }
    }
}

/// One question to the stack.
struct Walked {
    /// When it was asked.
    now: Now,
    /// What each policy said.
    calls: Vec<CallNote>,
}

/// Offers, and what each policy said to get there: version, parameters, answer.
pub(super) type Offered = (Vec<(PartOffer, String)>, Vec<(Digest, String, Said)>);

/// What the thread works with.
pub(super) struct Worker {
    pub recorder: Recorder,
    /// The offers that were put down last.
    pub offered: RefCell<Option<Offered>>,
    pub keeper: Handle,
    pub policies: Arc<dyn Policies>,
    pub clock: Arc<dyn Clock>,
    pub baseline: Baseline,
    pub rules: Rules,
    pub account: Account,
    pub fault_log: RefCell<FaultLog>,
    /// By part and source the last sign: two sources at most for each GPU that there ever was.
    pub told: RefCell<BTreeMap<(PartId, String), (u64, String)>>,
}

/// The thread's inboxes.
pub(super) struct Inboxes {
    pub kubelet: Receiver<(Span, KubeletJob)>,
    pub other: Receiver<(Span, OtherJob)>,
    /// Told by the keeper that something was published.
    pub nudge: Receiver<()>,
}

impl Worker {
    /// Works until the front ends have gone.
    ///
    /// Offers are asked for by themselves only after the start has asked for the first ones: until then what
    /// pods hold is not adopted and the stack of the configuration is not active, and what the baseline
    /// offers meanwhile would stay listed beside the stack's own devices for as long as any id does (I10).
    pub(super) fn run(&self, inboxes: &Inboxes) {
        let mut ask_at: Option<Instant> = None;
        let mut offering = false;
        loop {
            let timer = ask_at.map_or_else(never, |at| after(at.saturating_duration_since(Instant::now())));
            select_biased! {
                recv(inboxes.kubelet) -> job => match job {
                    Ok((span, job)) => span.in_scope(|| self.kubelet_job(job)),
                    Err(_) => return,
                },
                recv(inboxes.other) -> job => match job {
                    Ok((span, job)) => {
                        let offered = span.in_scope(|| self.other_job(job));
                        if offered && !offering {
                            offering = true;
                            // First offers that change nothing wake no reader, and a policy may have asked to be
                            // asked again.
                            ask_at = Some(Instant::now() + GATHER);
                        }
                    }
                    Err(_) => return,
                },
                recv(inboxes.nudge) -> nudged => match nudged {
                    Ok(()) if !offering => {}
                    Ok(()) => {
                        let soon = Instant::now() + GATHER;
                        ask_at = Some(ask_at.map_or(soon, |at| at.min(soon)));
                    }
                    Err(_) => return,
                },
                recv(timer) -> _ => {
                    let _busy = self.keeper.figures().policies.begin();
                    // An offer that could not be recorded is asked for again, like one that failed.
                    let again = self.reoffer().map_or(Some(1), |(_, again)| again);
                    ask_at = again.map(|s| Instant::now() + Duration::from_secs(u64::from(s.max(1))));
                }
            }
        }
    }

    fn kubelet_job(&self, job: KubeletJob) {
        let _busy = self.keeper.figures().policies.begin();
        match job {
            // Whoever gave up waiting has failed the pod: a grant now would hold GPUs for nobody.
            KubeletJob::Allocate { reply, .. } if reply.is_closed() => {}
            KubeletJob::Allocate { request, attempt, reply } => {
                let _ = reply.send(self.allocate(&request, attempt));
            }
            KubeletJob::Place { request, reply } => {
                let node = self.keeper.snapshot();
                // What policies are shown is what goes on the record.
                let request = placement::narrowed(&node, &request, self.rules.overcommit_percent);
                let ((placement, by), walked) = self.walk(&node, Hook::Place, |walk| walk.place(&request));
                let _ = reply.send((placement.clone(), by.clone()));
                self.note(&node, Asked::Place(request), walked, Outcome::Placed(placement, by));
            }
        }
    }

    /// Answers whether it asked for offers of the stack that the node is to have. An activation that failed
    /// did not: at the start it is tried again, and until then the stack is empty.
    fn other_job(&self, job: OtherJob) -> bool {
        let _busy = self.keeper.figures().policies.begin();
        match job {
            OtherJob::Triage(reading) => self.triage(reading),
            OtherJob::Offer { reply } => {
                let _ = reply.send(self.reoffer().map(|(applied, _)| applied));
                return true;
            }
            OtherJob::Activate { stack, expected, reply } => {
                let activated = self.activate(stack, expected);
                let offered = activated.is_ok();
                let _ = reply.send(activated);
                return offered;
            }
            OtherJob::Unsuspend { place, revision, reply } => {
                let _ = reply.send(self.unsuspend(place, revision));
            }
        }
        false
    }

    /// Only this thread writes the faults; readers must not wait for a policy call.
    fn walk<T>(&self, node: &Snapshot, hook: Hook, ask: impl FnOnce(Walk<'_>) -> T) -> (T, Walked) {
        let mut faults = self.account.faults();
        let mut walked = Walked { now: self.clock.now(), calls: Vec::new() };
        let span = spans::stack(hook.as_str());
        let _inside = span.enter();
        let answer = ask(Walk {
            stack: &node.stack,
            policies: &*self.policies,
            node,
            now: walked.now,
            faults: &mut faults,
            baseline: &self.baseline,
            overcommit_percent: self.rules.overcommit_percent,
            calls: &mut walked.calls,
            leisure: 1,
        });
        spans::stack_answered(&span, walked.calls.len());
        self.account(&node.stack, hook, &walked.calls, faults);
        (answer, walked)
    }

    fn note(&self, node: &Snapshot, asked: Asked, walked: Walked, outcome: Outcome) {
        let Walked { now, calls } = walked;
        self.account.decided(asked.hook(), outcome.word());
        self.recorder.note(Note { node: Arc::clone(node), now, asked, calls, outcome, again: false });
    }

    /// Asks the stack and the keeper; once more if the node moved between the two.
    fn allocate(&self, request: &AdmitRequest, attempt: Attempt) -> Result<Granted, AskError> {
        let mut again = false;
        loop {
            let node = self.keeper.snapshot();
            let (answer, walked) = match self.baseline.mps_denial(&request.resource) {
                Some(denial) => (denial, Walked { now: self.clock.now(), calls: Vec::new() }),
                None => self.walk(&node, Hook::Admit, |walk| walk.admit(request)),
            };
            let said = answer.clone();
            let command =
                Command::Allocate { request: request.clone(), answer, seen: node.generation, again, attempt };
            let granted = match self.keeper.ask(command) {
                Err(AskError::Refused(Refusal::Moved)) if !again => {
                    again = true;
                    continue;
                }
                // An Allocate that is not refused always grants; if it ever did not, the kubelet must
                // not hear yes.
                answered => answered.and_then(|applied| granted(applied).ok_or(AskError::Stopping)),
            };
            self.note(&node, Asked::Admit(request.clone()), walked, verdict(said, &granted));
            return granted;
        }
    }

    fn triage(&self, reading: Reading) {
        let node = self.keeper.snapshot();
        let ((answer, by), walked) = self.walk(&node, Hook::Triage, |walk| walk.triage(&reading));
        if self.is_news(&node, &reading, &answer) {
            tracing::warn!(
                part = reading.part.as_str(), source = reading.source, code = reading.code,
                detail = reading.detail, severity = ?answer.severity, reason = answer.reason, "a GPU reports"
            );
            self.note(&node, Asked::Triage(reading.clone()), walked, Outcome::Triaged(answer.clone(), by));
        } else {
            self.account.decided(Hook::Triage, "triaged");
        }
        if let Err(error) = self.keeper.ask(Command::Triaged { reading, answer }) {
            tracing::error!(%error, "a reading was lost");
        }
    }

    /// An event always is; a sign comes again at every look, and is news where it differs from the last,
    /// or finds the GPU in better health than it leaves it.
    fn is_news(&self, node: &Snapshot, reading: &Reading, answer: &TriageAnswer) -> bool {
        if !reading.is_sign() {
            return true;
        }
        let key = (reading.part.clone(), reading.source.clone());
        let value = (reading.code, answer.reason.clone());
        let same = self.told.borrow_mut().insert(key, value.clone()) == Some(value);
        let health = node.part(&reading.part).and_then(|part| node.gpu_of(part)).map(|gpu| &gpu.health);
        !same || health.is_some_and(|old| old.after_triage(answer, self.clock.now()).state != old.state)
    }

    pub(super) fn reoffer(&self) -> Result<(Applied, Option<u32>), AskError> {
        let node = self.keeper.snapshot();
        let (Offers { parts, again_after_s, notes, .. }, walked) =
            self.walk(&node, Hook::Offer, |walk| walk.offers());
        self.keep_notes(notes);
        self.account.decided(Hook::Offer, "offered");
        self.note_offers(&node, walked, &parts);
        let applied = self.keeper.ask(Command::Offer(parts)).inspect_err(|error| {
            tracing::warn!(%error, "offers stay as they were");
        })?;
        Ok((applied, again_after_s))
    }

    /// Offers are asked at every change of the node, and most say what was said before: those would push
    /// all else out of the journal. What nobody was asked is the baseline's.
    fn note_offers(&self, node: &Snapshot, walked: Walked, parts: &[(PartOffer, String)]) {
        let said =
            walked.calls.iter().map(|call| (call.digest.clone(), call.parameters.clone(), call.said.clone()));
        let offered = Some((parts.to_vec(), said.collect()));
        let Walked { now, calls } = walked;
        if calls.is_empty() {
            return;
        }
        // Shadows are asked all the same.
        let again = self.offered.replace(offered.clone()) == offered;
        let (node, outcome) = (Arc::clone(node), Outcome::Offered(parts.to_vec()));
        self.recorder.note(Note { node, now, asked: Asked::Offer, calls, outcome, again });
    }
}

fn granted(applied: Applied) -> Option<Granted> {
    let allocation = applied.entry.changes.iter().find_map(|change| match change {
        Change::Granted(allocation) => Some(allocation.clone()),
        _ => None,
    })?;
    Some(Granted { allocation, snapshot: applied.snapshot })
}

/// What came of an Allocate, by the stack's word and the kernel's.
fn verdict(said: StackAnswer, granted: &Result<Granted, AskError>) -> Outcome {
    match said {
        StackAnswer::Deny { policy: by, reason } => Outcome::Denied { by, reason },
        StackAnswer::Faulted { policy: by, kind, detail } => {
            Outcome::Denied { by, reason: format!("it failed ({}): {detail}", kind.as_str()) }
        }
        StackAnswer::Allow { by, terms } => match granted {
            Err(error) => Outcome::Refused { reason: error.to_string() },
            Ok(granted) => Outcome::Granted(Grant {
                allocation: Some(granted.allocation.id),
                by,
                reason: terms.reason,
                limits: terms.limits,
                environment: terms.environment,
            }),
        },
    }
}
