//! Activates the stack that the GPUNode of this node names, and rolls it back if one of its policies is suspended before the stack is
//! settled.
//!
//! The daemon decides alone: whether the active stack has settled, and which revision has failed, is in the store with the stacks. So a
//! bad stack is rolled back without a controller, without the API server, and after a restart.

use super::super::settings::{FleetTask, NodeStackState, PolicyPulled, Settings};
use super::policy_pull::{PolicyPull, PolicyPullError};
use super::{ErrorSource, NO_KIND};
use berth_core::keeper::CommandError;
use berth_core::lab::{GateError, GateReport, GateRules};
use berth_core::policies::{ResolveError, resolve_version};
use berth_core::stack::PolicyStatuses;
use berth_core::{ActivateError, FileStack, KernelHandle, PolicyService};
use berth_fleet::gpu_node::{
    ENTRIES_BYTES_MAX, ENTRIES_MAX, EntrySpec, GateSpec, GpuNode, OnFault as OnFaultSpec, PermissionsSpec,
    SOAK, StackPhase, StackSpec,
};
use berth_kernel::node::command::{Command, NewStack};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::stack::{
    FailedRevision, FleetRevision, OnFault, Permissions, StackEntry, StackOrigin,
};
use berth_kube::{Backoff, Cause, Event, events, jittered, random};
use futures_util::StreamExt;
use futures_util::stream::once;
use kube::{Api, Client};
use serde_json::{Map, Value};
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until};

/// What is watched, for errors.
const OBJECT: &str = "the GPUNode of this node";
/// The right that the watch needs, for the message of a 403.
const RIGHT: &str = "list and watch gpunodes (ClusterRole berth-fleet)";
/// The longest wait after an open watch is lost, since an API server that restarts ends those of all nodes at one moment.
const RECONNECT_WAIT_MAX: Duration = Duration::from_secs(60);
/// The first wait before an activation that failed is tried again; doubles up to [`RETRY_MAX`]. Each attempt calls all policies.
const RETRY_FIRST: Duration = Duration::from_secs(5);
/// The first wait before a rollback that failed is tried again.
const ROLLBACK_RETRY: Duration = Duration::from_secs(1);
/// How often a rollback to one stack is tried again.
const ROLLBACK_ATTEMPTS: u32 = 3;
/// See [`RETRY_FIRST`].
const RETRY_MAX: Duration = Duration::from_secs(300);
/// How often the wall clock is read while a break-glass lasts.
const CLOCK_CHECKED_EVERY: Duration = Duration::from_secs(60);
/// The longest reason, bytes.
const REASON_BYTES_MAX: usize = 512;

/// Activates the stack that `spec.stack` of the GPUNode names, and rolls back a stack that fails; never returns. Rollbacks need no
/// client: `clients` has one once the API server was reached.
pub(crate) async fn keep(
    settings: &Settings,
    mut clients: watch::Receiver<Option<Client>>,
    kernel: &KernelHandle,
    task: &FleetTask,
) {
    let connected = async move {
        match clients.wait_for(Option::is_some).await.ok().and_then(|client| client.clone()) {
            Some(client) => client,
            None => pending().await,
        }
    };
    let of_client = |client| {
        let fields = Some(format!("metadata.name={}", settings.node));
        events(&settings.connection, OBJECT, Api::<GpuNode>::all(client), fields, |object| {
            Some(object.clone())
        })
    };
    let mut stream = Box::pin(once(connected).flat_map(of_client));
    let mut may_activate = task.may_activate.clone();
    let (mut snapshots, mut statuses) = (kernel.watch(), kernel.watch_policy_statuses());
    let mut uploads = task.policies.watch_uploads();
    let mut node_stack = NodeStack::new(task.stack.borrow().clone());
    let mut backoff = Backoff::new(settings.connection.retry_interval);
    let (mut watch_from, mut is_current) = (Instant::now(), false);
    let pull_lock = Arc::default();
    // Tasks of their own, which end when the set is dropped: a rollback must not wait for what they hold.
    let mut work: JoinSet<Done> = JoinSet::new();
    loop {
        let ledger = snapshots.borrow_and_update().clone();
        let suspended = suspension(&ledger, &statuses.borrow_and_update());
        node_stack.may_activate = *may_activate.borrow_and_update();
        let now = Now { instant: Instant::now(), wall_ms: kernel.now().wall_ms };
        let next = node_stack.next(&ledger, suspended.as_deref(), &task.policies.file_stack(), now);
        task.report(&node_stack.state);
        let wake = match next {
            Next::Wait(until) => until,
            Next::Pull(pull) => {
                let (puller, policies) = (task.puller.clone(), task.policies.clone());
                let pull_lock = Arc::clone(&pull_lock);
                work = JoinSet::new();
                work.spawn(async move { Done::Pull(pull.run(&puller, &pull_lock, &policies).await) });
                node_stack.work = Some(Work::Pull);
                continue;
            }
            Next::Gate { stack, rules } => {
                let lab = task.lab.clone();
                work = JoinSet::new();
                work.spawn(async move { Done::Gate(lab.pass_gate(&stack, &rules).await) });
                node_stack.work = Some(Work::Gate);
                node_stack.revision_at_gate = ledger.stack.revision;
                continue;
            }
            next => {
                node_stack.act(next, &ledger, kernel, &task.policies).await;
                continue;
            }
        };
        if node_stack.work.is_none() {
            work = JoinSet::new();
        }
        let next_event = async {
            sleep_until(watch_from).await;
            stream.next().await
        };
        let event = tokio::select! {
            event = next_event => event,
            Some(done) = work.join_next() => {
                node_stack.note_done(done.unwrap_or_else(|error| Done::Lost(error.to_string())));
                continue;
            }
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return pending().await;
                }
                sleep(settings.batch_window).await;
                continue;
            }
            Ok(()) = statuses.changed() => continue,
            Ok(()) = may_activate.changed() => continue,
            Ok(()) = uploads.changed() => {
                node_stack.try_again();
                continue;
            }
            () = async {
                match wake {
                    Some(at) => sleep_until(at).await,
                    None => pending().await,
                }
            } => continue,
        };
        match event {
            Some(Ok(event)) => {
                match event {
                    // A deleted object changes nothing: the daemon creates it again.
                    Event::Listing | Event::Deleted(_) => {}
                    Event::Opened => is_current = true,
                    Event::Listed(objects) => {
                        is_current = true;
                        node_stack.read(objects.into_iter().next());
                    }
                    Event::Applied(object) => node_stack.read(Some(object)),
                }
                if is_current {
                    backoff.reset();
                    task.set_error(ErrorSource::Stack, None);
                }
            }
            Some(Err(error)) => {
                let was_open = std::mem::replace(&mut is_current, false);
                watch_from = error.retry_at(&settings.connection, &mut backoff, was_open, RECONNECT_WAIT_MAX);
                if !matches!(error.cause, Cause::Expired) {
                    task.set_error(ErrorSource::Stack, Some(error.text(RIGHT, NO_KIND)));
                }
            }
            None => return pending().await,
        }
    }
}

impl FleetTask {
    fn report(&self, state: &NodeStackState) {
        self.stack.send_if_modified(|reported| {
            let is_changed = reported != state;
            reported.clone_from(state);
            is_changed
        });
    }
}

/// The first suspended policy of the active stack, with its last fault; `None` if no policy is suspended.
fn suspension(ledger: &Ledger, statuses: &PolicyStatuses) -> Option<String> {
    ledger.stack.entries.iter().find_map(|entry| {
        let status = statuses.get(&entry.label())?;
        let is_suspended = status.suspended && status.revision == ledger.stack.revision;
        let fault = status.last.as_deref().unwrap_or("its calls failed");
        is_suspended.then(|| format!("policy {} was suspended: {fault}", entry.label()))
    })
}

/// The stack that the GPUNode names, and the progress of the daemon with it.
struct NodeStack {
    state: NodeStackState,
    spec: Option<StackSpec>,
    /// Whether a stack may be activated: the devices of running pods were adopted.
    may_activate: bool,
    /// Why the stack of the specification cannot be used; `None` if that is not known.
    refused: Option<String>,
    gate: Gate,
    /// The revision of the stack that was active when the gate began.
    revision_at_gate: u64,
    /// The pull or gate that runs concurrently with the loop, for the stack of the specification.
    work: Option<Work>,
    /// The revision of the active stack whose soak lasts, and its begin.
    soak: Option<(u64, Instant)>,
    /// The revision of the active stack to which the following fields refer.
    rollback_revision: u64,
    /// The number of rollbacks in a row that failed, each to another stack.
    failed_rollbacks: usize,
    /// Why the stack before a break-glass was not activated again.
    not_returned: Option<String>,
    break_glass_end: Option<Instant>,
    /// When an activation that has failed is tried again.
    activation: Retry,
    /// The same of a rollback, or of recording that the stack has settled.
    rollback: Retry,
}

/// Whether the stack of the specification has passed its gate.
#[derive(Debug, PartialEq, Eq)]
enum Gate {
    NotPassed,
    Passed,
    /// It has failed, and why.
    Failed(String),
}

/// An operation that takes long, so it runs concurrently with the loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Pull,
    Gate,
}

/// The result of a [`Work`].
enum Done {
    Pull(Result<(), PolicyPullError>),
    Gate(Result<GateReport, GateError>),
    /// The task has panicked.
    Lost(String),
}

/// When an action is tried again.
#[derive(Default)]
struct Retry {
    failures: u32,
    at: Option<Instant>,
}

impl Retry {
    fn is_due(&self, now: Instant) -> bool {
        self.at.is_none_or(|at| at <= now)
    }

    fn note_failed(&mut self, first: Duration) {
        let wait = first.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures += 1;
        self.at = Some(Instant::now() + jittered(wait, random()));
    }
}

/// A time on both clocks: the end of a break-glass must survive a restart.
#[derive(Clone, Copy)]
struct Now {
    instant: Instant,
    wall_ms: u64,
}

/// What is to be done.
#[derive(Debug)]
enum Next {
    /// Wait until this time or until a change; if `None`, wait until a change.
    Wait(Option<Instant>),
    /// Record that the active stack has settled.
    Settle,
    /// Pull a policy that the node does not have.
    Pull(PolicyPull),
    /// Try the stack that the specification names.
    Gate { stack: NewStack, rules: GateRules },
    /// Activate the stack that the specification names.
    Activate(NewStack),
    /// Activate again a stack that was active before the failed one, or before the break-glass.
    RollBack(NewStack),
}

impl NodeStack {
    fn new(state: NodeStackState) -> Self {
        Self {
            state,
            spec: None,
            may_activate: false,
            refused: None,
            gate: Gate::NotPassed,
            revision_at_gate: 0,
            work: None,
            soak: None,
            rollback_revision: 0,
            failed_rollbacks: 0,
            not_returned: None,
            break_glass_end: None,
            activation: Retry::default(),
            rollback: Retry::default(),
        }
    }

    /// Takes over `spec.stack` of the GPUNode; without a GPUNode there is none.
    fn read(&mut self, object: Option<GpuNode>) {
        let (spec, generation) =
            object.map(|object| (object.spec.stack, object.metadata.generation)).unwrap_or_default();
        if self.spec != spec {
            self.spec = spec;
            (self.gate, self.work) = (Gate::NotPassed, None);
            self.try_again();
        }
        let revision = |spec: &StackSpec| FleetRevision {
            policy: spec.policy.clone(),
            revision: spec.revision.clone(),
            attempt: spec.attempt.unwrap_or(1),
        };
        self.state.wanted = self.spec.as_ref().map(revision);
        self.state.generation = generation;
        self.state.is_read = true;
    }

    /// Forgets failures that a new specification or an upload may have mended.
    fn try_again(&mut self) {
        (self.activation, self.rollback) = (Retry::default(), Retry::default());
        (self.refused, self.failed_rollbacks, self.state.pulled) = (None, 0, None);
    }

    fn next(&mut self, ledger: &Ledger, suspended: Option<&str>, file: &FileStack, now: Now) -> Next {
        let Now { instant: now, wall_ms } = now;
        let mut wake = None;
        if self.rollback_revision != ledger.stack.revision {
            (self.rollback_revision, self.failed_rollbacks) = (ledger.stack.revision, 0);
            (self.rollback, self.not_returned, self.break_glass_end) = (Retry::default(), None, None);
        }
        if let StackOrigin::BreakGlass { until_wall_ms } = ledger.stack.origin {
            self.soak = None;
            // Never longer than it was to last, also if the clock was wrong when it began.
            let whole = until_wall_ms.saturating_sub(ledger.stack.since_wall_ms);
            let left = Duration::from_millis(until_wall_ms.saturating_sub(wall_ms).min(whole));
            let end = self.break_glass_end.map_or(now + left, |end| end.min(now + left));
            self.break_glass_end = Some(end);
            return self.next_of_break_glass(ledger, end, file, now);
        }
        if let StackOrigin::Fleet { revision, is_settled: false } = &ledger.stack.origin {
            // Also if the specification names another stack by now, or none.
            match suspended {
                Some(reason) => {
                    // After the suspension was ended by an operator, the soak begins again.
                    self.soak = None;
                    let next = self.roll_back(ledger, revision, reason, file, now);
                    let is_other_named =
                        self.state.wanted.as_ref().is_some_and(|wanted| !is_same(wanted, revision));
                    match next {
                        Next::Wait(until) if is_other_named => wake = until,
                        next => return next,
                    }
                }
                None => {
                    self.failed_rollbacks = 0;
                    let end = self.soak_end(ledger.stack.revision, revision, now);
                    if end.is_some_and(|end| end <= now) {
                        if self.rollback.is_due(now) {
                            return Next::Settle;
                        }
                        wake = self.rollback.at;
                    } else {
                        wake = end;
                    }
                }
            }
        } else {
            self.soak = None;
        }
        match (self.spec.clone(), self.state.wanted.clone()) {
            (Some(spec), Some(wanted)) => self.next_of_specification(&spec, wanted, ledger, wake, now),
            _ => {
                if self.state.is_read {
                    (self.state.phase, self.state.why) = (None, None);
                }
                Next::Wait(wake)
            }
        }
    }

    /// While a break-glass lasts, nothing is done. At its end the stack before it is activated again; what the specification names by
    /// now follows as usual.
    fn next_of_break_glass(&mut self, ledger: &Ledger, end: Instant, file: &FileStack, now: Instant) -> Next {
        // Its shadows would compare with this stack.
        self.work = None;
        let stack = &ledger.stack;
        if self.state.is_read {
            let error = self.not_returned.as_deref().map_or_else(String::new, |error| format!("; {error}"));
            let why = format!(
                "{} has activated another stack on the node for a limited time: {}; `berth policy reset` on the node ends it earlier{error}",
                stack.by, stack.why
            );
            match self.state.wanted {
                Some(_) => self.set(StackPhase::LocalOverride, Some(&why)),
                None => (self.state.phase, self.state.why) = (None, None),
            }
        }
        if now < end {
            return Next::Wait(Some(end.min(now + CLOCK_CHECKED_EVERY)));
        }
        if !self.may_activate {
            return Next::Wait(None);
        }
        if !self.rollback.is_due(now) {
            return Next::Wait(self.rollback.at);
        }
        let mut former = former(ledger, file);
        former.retain(|(origin, _)| match origin {
            StackOrigin::Fleet { revision, is_settled } => {
                let is_failed =
                    stack.failed.as_ref().is_some_and(|failed| is_same(&failed.revision, revision));
                let is_wanted = self.state.wanted.as_ref().is_none_or(|wanted| is_same(wanted, revision));
                !is_failed && (*is_settled || is_wanted)
            }
            _ => true,
        });
        let Some((origin, entries)) = former.into_iter().nth(self.failed_rollbacks) else {
            // Some may be usable again by then.
            self.failed_rollbacks = 0;
            self.rollback.at = Some(now + RETRY_MAX);
            return Next::Wait(self.rollback.at);
        };
        let (failed, by) = (stack.failed.clone(), stack.by.clone());
        let why = "the break-glass has ended".to_owned();
        Next::RollBack(NewStack { origin, failed, by, why, entries })
    }

    /// `wake`: when the next step is due for the active stack.
    fn next_of_specification(
        &mut self,
        spec: &StackSpec,
        wanted: FleetRevision,
        ledger: &Ledger,
        wake: Option<Instant>,
        now: Instant,
    ) -> Next {
        let found = entries(spec, &wanted.policy, ledger);
        // What is new in the stack depends on the active one.
        if self.revision_at_gate != ledger.stack.revision && !matches!(self.gate, Gate::Failed(_)) {
            self.gate = Gate::NotPassed;
            self.work = self.work.filter(|work| *work != Work::Gate);
        }
        if let StackOrigin::Fleet { revision, is_settled } = &ledger.stack.origin
            && is_same(revision, &wanted)
            && found.as_ref().is_ok_and(|entries| *entries == ledger.stack.entries)
        {
            let seconds = spec.soak().as_secs();
            let why = format!(
                "the stack is settled if none of its policies is suspended within {seconds} s of the activation"
            );
            self.note_found(spec, &found);
            match is_settled {
                true => self.set(StackPhase::Settled, None),
                false => self.set(StackPhase::Soaking, Some(&why)),
            }
            return Next::Wait(wake);
        }
        if let Some(failed) = ledger.stack.failed.as_ref().filter(|failed| is_same(&failed.revision, &wanted))
        {
            self.set(StackPhase::RolledBack, Some(&failed.reason));
            self.state.pulled = None;
            return Next::Wait(wake);
        }
        self.note_found(spec, &found);
        let failed_gate = match &self.gate {
            Gate::Failed(why) => Some(why.clone()),
            _ => None,
        };
        if let Some(why) = failed_gate.or_else(|| self.refused.clone()) {
            self.set(StackPhase::Refused, Some(&why));
            return Next::Wait(wake);
        }
        if let Err(Unusable::Missing { why, pull: None }) = &found {
            self.set(StackPhase::Pulling, Some(why));
            return Next::Wait(wake);
        }
        if !self.may_activate {
            self.set(StackPhase::Pulling, Some("the daemon is starting"));
            return Next::Wait(wake);
        }
        if !self.activation.is_due(now) {
            return Next::Wait(self.activation.at.into_iter().chain(wake).min());
        }
        if self.work.is_some() {
            return Next::Wait(wake);
        }
        let is_first = self.activation.failures == 0;
        let entries = match found {
            Ok(entries) => entries,
            Err(Unusable::Missing { pull: Some(pull), .. }) => {
                if is_first {
                    self.set(StackPhase::Pulling, Some(&format!("the node pulls {}", pull.reference())));
                }
                return Next::Pull(*pull);
            }
            Err(_) => return Next::Wait(wake),
        };
        let rules = spec.gate.as_ref().filter(|_| self.gate != Gate::Passed).map(gate_rules);
        match &rules {
            Some(rules) => self.set(StackPhase::Gating, Some(&describe(rules))),
            None if is_first => self.set(StackPhase::Pulling, Some("the stack is being activated")),
            None => {}
        }
        let (by, why) = (wanted.policy.clone(), format!("revision {}", wanted.revision));
        let origin = StackOrigin::Fleet { revision: wanted, is_settled: false };
        let stack = NewStack { origin, failed: None, by, why, entries };
        match rules {
            Some(rules) => Next::Gate { stack, rules },
            None => Next::Activate(stack),
        }
    }

    /// Notes which policies the node has, and refuses entries that can never be used.
    fn note_found(&mut self, spec: &StackSpec, found: &Result<Vec<StackEntry>, Unusable>) {
        let has_refs = spec.entries.iter().any(|entry| entry.repository.is_some());
        let pulled = |is_pulled, reason, message: &str| {
            Some(PolicyPulled { is_pulled, reason, message: message.to_owned() }).filter(|_| has_refs)
        };
        match found {
            Ok(_) => self.state.pulled = pulled(true, "Pulled", "the node has all policies of the stack"),
            // The reason of a failure is more precise.
            Err(Unusable::Missing { why, .. }) if self.state.pulled.as_ref().is_none_or(|p| p.is_pulled) => {
                self.state.pulled = pulled(false, "Pulling", why);
            }
            Err(Unusable::Missing { .. }) => {}
            Err(Unusable::Invalid(why)) => {
                self.state.pulled = pulled(false, "Invalid", why);
                if self.refused.is_none() {
                    self.refuse(why);
                }
            }
        }
    }

    /// The end of the soak of the active stack; `None` while its length is not known. A restart begins the soak again.
    fn soak_end(&mut self, stack: u64, revision: &FleetRevision, now: Instant) -> Option<Instant> {
        let begin = match self.soak {
            Some((of, begin)) if of == stack => begin,
            _ => now,
        };
        self.soak = Some((stack, begin));
        let is_named = self.state.wanted.as_ref().is_some_and(|wanted| is_same(wanted, revision));
        let named = self.spec.as_ref().filter(|_| is_named);
        self.state.is_read.then(|| begin + named.map_or(SOAK, StackSpec::soak))
    }

    /// The rollback of a revision that has failed.
    fn roll_back(
        &mut self,
        ledger: &Ledger,
        revision: &FleetRevision,
        reason: &str,
        file: &FileStack,
        now: Instant,
    ) -> Next {
        if !self.rollback.is_due(now) {
            return Next::Wait(self.rollback.at);
        }
        let reason = cut(reason);
        let Some((origin, entries)) = candidates(ledger, file).into_iter().nth(self.failed_rollbacks) else {
            let why = format!(
                "{reason}; no earlier stack can be activated again: name another one in `spec.stack`"
            );
            self.set_failed(revision, &why);
            // The node may only have been too busy, or its disk full.
            self.failed_rollbacks = 0;
            self.rollback.at = Some(now + RETRY_MAX);
            return Next::Wait(self.rollback.at);
        };
        let why = format!("revision {} has failed: {reason}", revision.revision);
        let failed = Some(Box::new(FailedRevision { revision: revision.clone(), reason }));
        Next::RollBack(NewStack { origin, failed, by: revision.policy.clone(), why, entries })
    }

    async fn act(&mut self, next: Next, ledger: &Ledger, kernel: &KernelHandle, policies: &PolicyService) {
        let revision = ledger.stack.revision;
        match next {
            Next::Wait(_) | Next::Pull(_) | Next::Gate { .. } => {}
            Next::Settle => match kernel.execute(Command::SettleStack { revision }).await {
                Ok(_) => {
                    tracing::info!(why = ledger.stack.why, "the stack of the GPUNode has settled");
                    self.rollback = Retry::default();
                }
                Err(error) => {
                    tracing::warn!(%error, "it could not be recorded that the stack of the GPUNode has settled; the daemon tries again");
                    self.rollback.note_failed(ROLLBACK_RETRY);
                }
            },
            Next::Activate(stack) => {
                let why = stack.why.clone();
                match policies.activate(stack, Some(revision)).await {
                    Ok(_) => {
                        tracing::info!(why, "the stack of the GPUNode was activated");
                        self.try_again();
                    }
                    Err(error) => self.note_not_activated(&error),
                }
            }
            Next::RollBack(stack) => {
                let why = stack.why.clone();
                match policies.activate(stack, Some(revision)).await {
                    Ok(_) => {
                        tracing::warn!(why, "an earlier stack was activated again");
                        self.try_again();
                    }
                    Err(error) => {
                        tracing::error!(why, %error, "an earlier stack could not be activated again; the daemon tries another one, or tries again");
                        self.note_not_rolled_back(ledger, &error, &why);
                    }
                }
            }
        }
    }

    fn note_done(&mut self, done: Done) {
        self.work = None;
        match done {
            Done::Pull(result) => self.note_pull(result),
            Done::Gate(result) => self.note_gate(result),
            Done::Lost(error) => {
                tracing::error!(error, "a pull or a gate has failed unexpectedly; the daemon tries again");
                self.set(StackPhase::Pulling, Some(&format!("a fault of the daemon: {error}")));
                self.activation.note_failed(RETRY_FIRST);
            }
        }
    }

    fn note_pull(&mut self, result: Result<(), PolicyPullError>) {
        let Err(error) = result else {
            (self.activation, self.state.pulled) = (Retry::default(), None);
            return;
        };
        let why = error.to_string();
        self.state.pulled =
            Some(PolicyPulled { is_pulled: false, reason: error.reason(), message: cut(&why) });
        if error.may_succeed_later() {
            tracing::warn!(
                why,
                "a policy of the stack that the GPUNode names was not pulled; the daemon tries again"
            );
            self.set(StackPhase::Pulling, Some(&why));
            self.activation.note_failed(RETRY_FIRST);
        } else {
            self.refuse(&why);
        }
    }

    fn note_gate(&mut self, result: Result<GateReport, GateError>) {
        match result {
            Ok(GateReport { replayed, shadowed }) => {
                tracing::info!(replayed, shadowed, "the stack of the GPUNode has passed its gate");
                self.gate = Gate::Passed;
                self.activation = Retry::default();
            }
            Err(GateError::Activation(error)) => self.note_not_activated(&error),
            Err(error) => {
                let why = error.to_string();
                let is_final = match error {
                    GateError::Failed(_) => true,
                    GateError::Lab(error) => !error.may_succeed_later(),
                    GateError::Activation(_) | GateError::ShadowEnded => false,
                };
                if is_final {
                    self.refuse(&why);
                    self.gate = Gate::Failed(cut(&why));
                } else {
                    tracing::warn!(
                        why,
                        "the gate of the stack that the GPUNode names could not be completed; the daemon tries again"
                    );
                    self.set(StackPhase::Gating, Some(&why));
                    self.activation.note_failed(RETRY_FIRST);
                }
            }
        }
    }

    fn note_not_activated(&mut self, error: &ActivateError) {
        if !may_succeed_later(error) {
            self.refuse(&error.to_string());
            return;
        }
        self.set(StackPhase::Pulling, Some(&error.to_string()));
        self.activation.note_failed(RETRY_FIRST);
    }

    fn note_not_rolled_back(&mut self, ledger: &Ledger, error: &ActivateError, why: &str) {
        if let StackOrigin::Fleet { revision, .. } = &ledger.stack.origin {
            self.set_failed(
                revision,
                &format!("{why}; an earlier stack could not be activated again: {error}"),
            );
        }
        if ledger.stack.is_break_glass() {
            self.not_returned = Some(format!(
                "the stack before it could not be activated again: {error}; the daemon tries again, or another earlier stack"
            ));
        }
        let is_interrupted = matches!(
            error,
            ActivateError::Command(CommandError::Refused(Refusal::StackChanged { .. }))
                | ActivateError::FileChanged
        );
        // A stack that lacks a file does not get it soon, and one that the node is too busy for is tried a few times.
        // At the end of a break-glass no stack is failing, so that one is tried for as long as it takes.
        let may_try = self.rollback.failures < ROLLBACK_ATTEMPTS || ledger.stack.is_break_glass();
        if is_interrupted || (error.is_passing() && may_try) {
            self.rollback.note_failed(ROLLBACK_RETRY);
        } else {
            self.rollback = Retry::default();
            self.failed_rollbacks += 1;
        }
    }

    /// The phase is that of the specification, so that it is not shown of another revision.
    fn set_failed(&mut self, revision: &FleetRevision, why: &str) {
        if self.state.wanted.as_ref().is_some_and(|wanted| is_same(wanted, revision)) {
            self.set(StackPhase::Failed, Some(why));
        }
    }

    fn refuse(&mut self, why: &str) {
        tracing::error!(why, "the stack that the GPUNode names is refused; the active stack stays");
        self.refused = Some(cut(why));
        self.set(StackPhase::Refused, Some(why));
    }

    fn set(&mut self, phase: StackPhase, why: Option<&str>) {
        (self.state.phase, self.state.why) = (Some(phase), why.map(cut));
    }
}

/// Whether both are the same attempt of a revision. The name of the stack is only shown.
fn is_same(one: &FleetRevision, other: &FleetRevision) -> bool {
    one.revision == other.revision && one.attempt == other.attempt
}

fn gate_rules(gate: &GateSpec) -> GateRules {
    GateRules {
        replay_decisions: gate.replay_decisions.unwrap_or_default().into(),
        shadow_for: gate.shadow_for().unwrap_or_default(),
        new_denials_percent_max: gate.max_new_denials_percent.unwrap_or_default().into(),
    }
}

fn describe(rules: &GateRules) -> String {
    let GateRules { replay_decisions, shadow_for, .. } = rules;
    let replay =
        (*replay_decisions > 0).then(|| format!("on at most {replay_decisions} recorded admissions"));
    let shadow = (!shadow_for.is_zero()).then(|| format!("on live ones for {} s", shadow_for.as_secs()));
    let steps: Vec<String> = replay.into_iter().chain(shadow).collect();
    format!("the new policies are tried without effect before the activation: {}", steps.join(", then "))
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(REASON_BYTES_MAX)].to_owned()
}

/// The stacks to which a rollback may return, the newest first: those that have settled, and those of callers and of the configuration
/// file. The file may have another stack by now; if that cannot be used, the file's former one is activated as that of a caller. At
/// last comes the file's stack, whatever the history has.
fn candidates(ledger: &Ledger, file: &FileStack) -> Vec<(StackOrigin, Vec<StackEntry>)> {
    let mut candidates = former(ledger, file);
    candidates.retain(|(origin, entries)| {
        let is_unsettled = matches!(origin, StackOrigin::Fleet { is_settled: false, .. });
        // The same entries would fail again.
        !is_unsettled && *entries != ledger.stack.entries
    });
    candidates
}

/// The stacks that were active before, the newest first, without those of a break-glass, which must not be activated again after their
/// end.
fn former(ledger: &Ledger, file: &FileStack) -> Vec<(StackOrigin, Vec<StackEntry>)> {
    let of_file = file.error.is_none().then(|| (StackOrigin::File, file.entries.clone()));
    let of_past = ledger.past_stacks.values().rev().flat_map(|stack| match &stack.origin {
        StackOrigin::BreakGlass { .. } => vec![],
        StackOrigin::File => {
            let former = (StackOrigin::Api, stack.entries.clone());
            of_file.clone().into_iter().chain([former]).collect()
        }
        origin => vec![(origin.clone(), stack.entries.clone())],
    });
    let mut former = Vec::new();
    for stack in of_past.chain(of_file.clone()) {
        if !former.contains(&stack) {
            former.push(stack);
        }
    }
    former
}

/// Whether the same activation may succeed later: the node is busy, or lacks a file that an upload brings, or pods must end first.
fn may_succeed_later(error: &ActivateError) -> bool {
    match error {
        ActivateError::Unprepared(unprepared) => !unprepared.error.is_permanent(),
        ActivateError::Command(
            CommandError::Refused(
                Refusal::StackChanged { .. } | Refusal::UnknownPolicy { .. } | Refusal::BadOffer { .. },
            )
            | CommandError::Stopping,
        ) => true,
        error => error.is_passing(),
    }
}

/// Why the entries of a specification cannot be used.
#[derive(Debug)]
enum Unusable {
    /// The node does not have a policy. It can be pulled, or a caller may upload it.
    Missing {
        why: String,
        pull: Option<Box<PolicyPull>>,
    },
    Invalid(String),
}

/// The entries of a specification. `by` is the name of the stack.
fn entries(spec: &StackSpec, by: &str, ledger: &Ledger) -> Result<Vec<StackEntry>, Unusable> {
    let bytes = serde_json::to_vec(&spec.entries).map_or(usize::MAX, |json| json.len());
    if bytes > ENTRIES_BYTES_MAX {
        return Err(Unusable::Invalid(format!(
            "entries: {bytes} bytes of JSON; at most {ENTRIES_BYTES_MAX}"
        )));
    }
    if spec.entries.len() > ENTRIES_MAX {
        return Err(Unusable::Invalid(format!(
            "entries: {}; at most {ENTRIES_MAX} are allowed",
            spec.entries.len()
        )));
    }
    spec.entries.iter().enumerate().map(|(place, given)| entry(given, place, by, ledger)).collect()
}

fn entry(given: &EntrySpec, place: usize, by: &str, ledger: &Ledger) -> Result<StackEntry, Unusable> {
    let EntrySpec { name, layer, shipped, parameters, permissions, on_fault, .. } = given;
    let invalid = |why: String| Unusable::Invalid(format!("entries[{place}]: {why}"));
    let pull = PolicyPull::of(given, by).map_err(invalid)?.map(Box::new);
    if layer.is_some() == (*shipped == Some(true)) {
        return Err(invalid("set either layer or shipped: true".to_owned()));
    }
    let version = resolve_version(ledger, name, layer.as_deref()).map_err(|error| match error {
        ResolveError::Missing(why) => {
            let why = match &pull {
                Some(pull) => format!("entries[{place}]: the node pulls policy {name} from {}", pull.reference()),
                None => format!(
                    "entries[{place}]: {why}, with `berth policy push`, or set `ref` and `manifest` of the entry"
                ),
            };
            Unusable::Missing { why, pull }
        }
        ResolveError::Invalid(why) => invalid(why),
    })?;
    if layer.is_none() && !version.shipped {
        return Err(invalid(format!("this daemon has no policy {name} built in")));
    }
    let parameters = parameters.clone().unwrap_or_else(|| "{}".to_owned());
    if let Err(error) = serde_json::from_str::<Map<String, Value>>(&parameters) {
        return Err(invalid(format!("parameters: not a JSON object: {error}")));
    }
    let permissions = with_defaults(permissions.clone().unwrap_or_default());
    permissions.check().map_err(invalid)?;
    let on_fault = match on_fault {
        None | Some(OnFaultSpec::Skip) => OnFault::Skip,
        Some(OnFaultSpec::Deny) => OnFault::Deny,
        Some(OnFaultSpec::Other) => {
            return Err(invalid("onFault: this daemon accepts only `skip` and `deny`".to_owned()));
        }
    };
    Ok(StackEntry {
        name: version.name.clone(),
        digest: version.digest.clone(),
        parameters,
        permissions,
        on_fault,
    })
}

fn with_defaults(given: PermissionsSpec) -> Permissions {
    let usual = Permissions::default();
    Permissions {
        deny: given.deny.unwrap_or(usual.deny),
        share_max: given.share_max.unwrap_or(usual.share_max),
        resources: given.resources.unwrap_or(usual.resources),
        environment: given.environment.unwrap_or(usual.environment),
    }
}

#[cfg(test)]
mod tests;
