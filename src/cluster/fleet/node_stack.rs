//! Activates the stack that the GPUNode of this node names, and rolls it back if one of its policies is suspended before the stack is
//! settled.
//!
//! The daemon decides alone: whether the active stack has settled, and which revision has failed, is in the store with the stacks. So a
//! bad stack is rolled back without a controller, without the API server, and after a restart.

use super::super::client::error_chain;
use super::super::object_watch::{Cause, Event, events};
use super::super::settings::{FleetTask, NodeStackState, Settings};
use super::super::wait::{Backoff, random};
use super::{ErrorSource, NO_KIND};
use berth_core::keeper::CommandError;
use berth_core::policies::{ResolveError, resolve_version};
use berth_core::stack::PolicyStatuses;
use berth_core::{ActivateError, FileStack, KernelHandle, PolicyService};
use berth_fleet::gpu_node::{
    ENTRIES_BYTES_MAX, ENTRIES_MAX, EntrySpec, GpuNode, OnFault as OnFaultSpec, PermissionsSpec, SOAK,
    StackPhase, StackSpec,
};
use berth_kernel::node::command::{Command, NewStack};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::InstallError;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::stack::{
    FailedRevision, FleetRevision, OnFault, Permissions, StackEntry, StackOrigin,
};
use futures_util::StreamExt;
use kube::{Api, Client};
use serde_json::{Map, Value};
use std::future::pending;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// What is watched, for errors.
const OBJECT: &str = "the GPUNode of this node";
/// The right that the watch needs, for the message of a 403.
const RIGHT: &str = "list and watch gpunodes (ClusterRole berth-fleet)";
/// The longest wait after an open watch is lost, since an API server that restarts ends those of all nodes at one moment.
const RECONNECT_WAIT_MAX: Duration = Duration::from_secs(60);
/// The longest reason, bytes.
const REASON_BYTES_MAX: usize = 512;

/// Activates the stack that `spec.stack` of the GPUNode names, and rolls back a stack that fails; never returns.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle, task: &FleetTask) {
    let api: Api<GpuNode> = Api::all(client);
    let fields = Some(format!("metadata.name={}", settings.node));
    let mut stream = Box::pin(events(settings, OBJECT, api, fields, |object| Some(object.clone())));
    let (mut snapshots, mut statuses) = (kernel.watch(), kernel.watch_policy_statuses());
    let mut uploads = task.policies.watch_uploads();
    let mut node_stack = NodeStack::new(task.stack.borrow().clone(), settings.retry_interval);
    let mut backoff = Backoff::new(settings.retry_interval);
    let (mut watch_from, mut is_current) = (Instant::now(), false);
    loop {
        let ledger = snapshots.borrow_and_update().clone();
        let suspended = suspension(&ledger, &statuses.borrow_and_update());
        let next =
            node_stack.next(&ledger, suspended.as_deref(), &task.policies.file_stack(), Instant::now());
        task.report(&node_stack.state);
        let wake = match next {
            Next::Wait(until) => until,
            next => {
                node_stack.act(next, &ledger, kernel, &task.policies).await;
                task.report(&node_stack.state);
                node_stack.retry_at
            }
        };
        let next_event = async {
            sleep_until(watch_from).await;
            stream.next().await
        };
        let event = tokio::select! {
            event = next_event => event,
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return pending().await;
                }
                sleep(settings.batch_window).await;
                continue;
            }
            Ok(()) = statuses.changed() => continue,
            Ok(()) = uploads.changed() => {
                (node_stack.retry_at, node_stack.failed_rollbacks) = (None, 0);
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
                watch_from = error.retry_at(settings, &mut backoff, was_open, RECONNECT_WAIT_MAX);
                if !matches!(error.cause, Cause::Expired) {
                    let text = error_chain(&error);
                    let text = match error.cause.code() {
                        403 => format!("{text} (the daemon needs: {RIGHT}; see deploy/cluster-role.yaml)"),
                        404 => format!("{text}: {NO_KIND}"),
                        _ => text,
                    };
                    task.set_error(ErrorSource::Stack, Some(text));
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
    /// Why the stack of the specification cannot be used; `None` if that is not known.
    refused: Option<String>,
    /// The revision of the active stack whose soak lasts, and its end.
    soak: Option<(u64, Instant)>,
    /// The number of rollbacks in a row that failed for good, each to another stack.
    failed_rollbacks: usize,
    /// When an action that has failed is tried again.
    retry_at: Option<Instant>,
    backoff: Backoff,
}

/// What is to be done.
#[derive(Debug)]
enum Next {
    /// Wait until this time or until a change; if `None`, wait until a change.
    Wait(Option<Instant>),
    /// Record that the active stack has settled.
    Settle,
    /// Activate the stack that the specification names.
    Activate(NewStack),
    /// Activate again a stack that was active before the failed one.
    RollBack(NewStack),
}

impl NodeStack {
    fn new(state: NodeStackState, retry_interval: Duration) -> Self {
        Self {
            state,
            spec: None,
            refused: None,
            soak: None,
            failed_rollbacks: 0,
            retry_at: None,
            backoff: Backoff::new(retry_interval),
        }
    }

    /// Takes over `spec.stack` of the GPUNode; without a GPUNode there is none.
    fn read(&mut self, object: Option<GpuNode>) {
        let (spec, generation) =
            object.map(|object| (object.spec.stack, object.metadata.generation)).unwrap_or_default();
        if self.spec != spec {
            self.spec = spec;
            (self.refused, self.retry_at) = (None, None);
            self.backoff.reset();
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

    fn next(&mut self, ledger: &Ledger, suspended: Option<&str>, file: &FileStack, now: Instant) -> Next {
        if let StackOrigin::Fleet { revision, is_settled: false } = &ledger.stack.origin {
            // Also if the specification names another stack by now, or none.
            let soak_end = self.soak_end(ledger.stack.revision, revision, now);
            if let Some(reason) = suspended {
                let is_named = self.state.wanted.as_ref().is_none_or(|wanted| wanted == revision);
                match self.roll_back(ledger, revision, reason, file, now) {
                    Some(next) => return next,
                    None if is_named => return Next::Wait(None),
                    // The specification names another stack by now.
                    None => {}
                }
            } else {
                self.failed_rollbacks = 0;
            }
            if suspended.is_none() && soak_end <= now {
                return if self.is_due(now) { Next::Settle } else { Next::Wait(self.retry_at) };
            }
        } else {
            self.soak = None;
        }
        let soak_end = self.soak.map(|(_, end)| end);
        let (Some(spec), Some(wanted)) = (self.spec.clone(), self.state.wanted.clone()) else {
            if self.state.is_read {
                (self.state.phase, self.state.why) = (None, None);
            }
            return Next::Wait(soak_end);
        };
        match &ledger.stack.failed {
            Some(failed) if failed.revision == wanted => {
                self.set(StackPhase::RolledBack, Some(&failed.reason));
                return Next::Wait(soak_end);
            }
            _ => {}
        }
        if let Some(why) = self.refused.clone() {
            self.set(StackPhase::Refused, Some(&why));
            return Next::Wait(soak_end);
        }
        let entries = match entries(&spec, ledger) {
            Ok(entries) => entries,
            Err(Unusable::Missing(why)) => {
                self.set(StackPhase::Pulling, Some(&why));
                return Next::Wait(soak_end);
            }
            Err(Unusable::Invalid(why)) => {
                self.refuse(&why);
                return Next::Wait(soak_end);
            }
        };
        match &ledger.stack.origin {
            StackOrigin::Fleet { revision, is_settled }
                if *revision == wanted && ledger.stack.entries == entries =>
            {
                let seconds = spec.soak().as_secs();
                let why = format!(
                    "the stack is settled if none of its policies is suspended within {seconds} s of the activation"
                );
                match is_settled {
                    true => self.set(StackPhase::Settled, None),
                    false => self.set(StackPhase::Soaking, Some(&why)),
                }
                Next::Wait(soak_end)
            }
            _ if !self.is_due(now) => Next::Wait(self.retry_at),
            _ => {
                self.set(StackPhase::Pulling, Some("the stack is being activated"));
                let (by, why) = (wanted.policy.clone(), format!("revision {}", wanted.revision));
                let origin = StackOrigin::Fleet { revision: wanted, is_settled: false };
                Next::Activate(NewStack { origin, failed: None, by, why, entries })
            }
        }
    }

    /// The end of the soak of the active stack. A restart begins the soak again.
    fn soak_end(&mut self, stack: u64, revision: &FleetRevision, now: Instant) -> Instant {
        let named = self.spec.as_ref().filter(|_| self.state.wanted.as_ref() == Some(revision));
        match self.soak {
            Some((of, end)) if of == stack => end,
            // Before the specification was read, or if it names another stack, the length is not known.
            _ => {
                let end = now + named.map_or(SOAK, StackSpec::soak);
                if named.is_some() || self.state.is_read {
                    self.soak = Some((stack, end));
                }
                end
            }
        }
    }

    /// The rollback of a revision that has failed; `None` if no earlier stack can be activated.
    fn roll_back(
        &mut self,
        ledger: &Ledger,
        revision: &FleetRevision,
        reason: &str,
        file: &FileStack,
        now: Instant,
    ) -> Option<Next> {
        if !self.is_due(now) {
            return Some(Next::Wait(self.retry_at));
        }
        let reason = cut(reason);
        let Some((origin, entries)) = candidates(ledger, file).into_iter().nth(self.failed_rollbacks) else {
            let why = format!(
                "{reason}; no earlier stack can be activated again: name another one in `spec.stack`"
            );
            self.set(StackPhase::Failed, Some(&why));
            return None;
        };
        let why = format!("revision {} has failed: {reason}", revision.revision);
        let failed = Some(Box::new(FailedRevision { revision: revision.clone(), reason }));
        Some(Next::RollBack(NewStack { origin, failed, by: revision.policy.clone(), why, entries }))
    }

    async fn act(&mut self, next: Next, ledger: &Ledger, kernel: &KernelHandle, policies: &PolicyService) {
        let revision = ledger.stack.revision;
        match next {
            Next::Wait(_) => {}
            Next::Settle => match kernel.execute(Command::SettleStack { revision }).await {
                Ok(_) => {
                    tracing::info!(why = ledger.stack.why, "the stack of the GPUNode has settled");
                    self.note_done();
                }
                Err(error) => {
                    tracing::warn!(%error, "it could not be recorded that the stack of the GPUNode has settled; the daemon tries again");
                    self.retry();
                }
            },
            Next::Activate(stack) => {
                let why = stack.why.clone();
                match policies.activate(stack, Some(revision)).await {
                    Ok(_) => {
                        tracing::info!(why, "the stack of the GPUNode was activated");
                        self.note_done();
                    }
                    Err(error) => self.note_not_activated(&error),
                }
            }
            Next::RollBack(stack) => {
                let why = stack.why.clone();
                match policies.activate(stack, Some(revision)).await {
                    Ok(_) => {
                        tracing::error!(why, "the stack of the GPUNode was rolled back");
                        self.note_done();
                    }
                    Err(error) => {
                        tracing::error!(why, %error, "the stack of the GPUNode has failed, but an earlier stack could not be activated again; the daemon tries another one, or tries again");
                        self.note_not_rolled_back(&error, &why);
                    }
                }
            }
        }
    }

    /// The ledger has changed, so that the next step is decided at once.
    fn note_done(&mut self) {
        self.backoff.reset();
        (self.retry_at, self.failed_rollbacks) = (None, 0);
    }

    fn note_not_activated(&mut self, error: &ActivateError) {
        match may_succeed_later(error) {
            true => self.set(StackPhase::Pulling, Some(&error.to_string())),
            false => self.refuse(&error.to_string()),
        }
        self.retry();
    }

    fn note_not_rolled_back(&mut self, error: &ActivateError, why: &str) {
        self.set(
            StackPhase::Failed,
            Some(&format!("{why}; an earlier stack could not be activated again: {error}")),
        );
        if may_succeed_later(error) {
            self.retry();
        } else {
            self.failed_rollbacks += 1;
            self.retry_at = Some(Instant::now());
        }
    }

    fn retry(&mut self) {
        self.retry_at = Some(Instant::now() + self.backoff.next(random()));
    }

    fn is_due(&self, now: Instant) -> bool {
        self.retry_at.is_none_or(|at| at <= now)
    }

    fn refuse(&mut self, why: &str) {
        tracing::error!(why, "the stack that the GPUNode names cannot be used on this node");
        self.refused = Some(cut(why));
        self.set(StackPhase::Refused, Some(why));
    }

    fn set(&mut self, phase: StackPhase, why: Option<&str>) {
        (self.state.phase, self.state.why) = (Some(phase), why.map(cut));
    }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(REASON_BYTES_MAX)].to_owned()
}

/// The stacks to which a rollback may return, the newest first: those that have settled, and those of callers and of the configuration
/// file. The file may have another stack by now; if that cannot be used, the file's former one is activated as that of a caller.
fn candidates(ledger: &Ledger, file: &FileStack) -> Vec<(StackOrigin, Vec<StackEntry>)> {
    let mut candidates = Vec::new();
    for stack in ledger.past_stacks.values().rev() {
        match &stack.origin {
            StackOrigin::Fleet { is_settled: false, .. } => {}
            StackOrigin::File => {
                if file.error.is_none() {
                    candidates.push((StackOrigin::File, file.entries.clone()));
                }
                candidates.push((StackOrigin::Api, stack.entries.clone()));
            }
            origin => candidates.push((origin.clone(), stack.entries.clone())),
        }
    }
    candidates
}

/// Whether the same activation may succeed later: the node is busy, or lacks a file that an upload brings.
fn may_succeed_later(error: &ActivateError) -> bool {
    match error {
        ActivateError::Unprepared(unprepared) => {
            matches!(
                unprepared.error,
                InstallError::Busy
                    | InstallError::Failed { .. }
                    | InstallError::Lost { .. }
                    | InstallError::Stopping
            )
        }
        ActivateError::Command(
            CommandError::Refused(Refusal::StackChanged { .. } | Refusal::UnknownPolicy { .. })
            | CommandError::Stopping,
        ) => true,
        error => error.is_passing(),
    }
}

/// Why the entries of a specification cannot be used.
#[derive(Debug)]
enum Unusable {
    /// The node does not have a policy; an upload may add it.
    Missing(String),
    Invalid(String),
}

/// The entries of a specification.
fn entries(spec: &StackSpec, ledger: &Ledger) -> Result<Vec<StackEntry>, Unusable> {
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
    spec.entries.iter().enumerate().map(|(place, given)| entry(given, place, ledger)).collect()
}

fn entry(given: &EntrySpec, place: usize, ledger: &Ledger) -> Result<StackEntry, Unusable> {
    let EntrySpec { name, layer, parameters, permissions, on_fault } = given;
    let invalid = |why: String| Unusable::Invalid(format!("entries[{place}]: {why}"));
    let version = resolve_version(ledger, name, Some(layer)).map_err(|error| match error {
        ResolveError::Missing(why) => Unusable::Missing(format!("entries[{place}]: {why}")),
        ResolveError::Invalid(why) => invalid(why),
    })?;
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
mod tests {
    use super::*;
    use berth_kernel::ids::names::Digest;
    use berth_kernel::policy::stack::{Stack, keep_past};
    use berth_kernel::policy::version::{Origin, PolicyVersion};
    use serde_json::json;
    use std::sync::Arc;

    /// A node with the policy `mixed` and the stack of its configuration file.
    fn node() -> Ledger {
        let mut ledger = Ledger::default();
        let digest = Digest::parse(&"a".repeat(64)).unwrap();
        let version = PolicyVersion {
            name: "mixed".into(),
            version: "1.0.0".into(),
            summary: String::new(),
            hooks: Vec::new(),
            parameters_schema: "{}".into(),
            artifact: digest.clone(),
            digest: digest.clone(),
            bytes: 1,
            shipped: true,
            since_wall_ms: 0,
            origin: Origin::default(),
        };
        ledger.policies = Arc::new([(digest, Arc::new(version))].into());
        ledger.stack = Arc::new(Stack { revision: 1, by: "config".into(), ..Stack::default() });
        ledger
    }

    fn entry_of(digit: char) -> Value {
        json!({"name": "mixed", "layer": format!("sha256:{}", digit.to_string().repeat(64))})
    }

    fn object(stack: &Value) -> Option<GpuNode> {
        let object = json!({
            "apiVersion": "fleet.berth.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {"name": "n1"},
            "spec": {"stack": stack},
        });
        Some(serde_json::from_value(object).unwrap())
    }

    fn stack_of(revision: &str) -> Value {
        json!({"policy": "team", "revision": revision, "soak": "10s", "entries": [entry_of('a')]})
    }

    fn reading(stack: &Value) -> NodeStack {
        let mut node_stack = NodeStack::new(NodeStackState::default(), Duration::from_secs(1));
        node_stack.read(object(stack));
        node_stack
    }

    /// What the kernel does with an activation.
    fn activate(ledger: &mut Ledger, stack: NewStack) {
        let revision = ledger.stack.revision + 1;
        let new = Arc::new(stack.into_stack(revision, 0));
        let old = std::mem::replace(&mut ledger.stack, new);
        keep_past(Arc::make_mut(&mut ledger.past_stacks), old);
    }

    /// A node, and the daemon's state.
    struct Node {
        ledger: Ledger,
        node_stack: NodeStack,
        file: FileStack,
        now: Instant,
    }

    impl Node {
        fn new(stack: &Value) -> Self {
            let now = Instant::now();
            Self { ledger: node(), node_stack: reading(stack), file: FileStack::default(), now }
        }

        fn next(&mut self, suspended: Option<&str>) -> Next {
            self.node_stack.next(&self.ledger, suspended, &self.file, self.now)
        }

        /// Makes the next step; an activation succeeds. Returns what was done.
        fn step(&mut self, suspended: Option<&str>) -> String {
            let (text, stack) = match self.next(suspended) {
                Next::Wait(until) => return format!("wait{}", if until.is_some() { " until" } else { "" }),
                Next::Settle => {
                    if let StackOrigin::Fleet { is_settled, .. } =
                        &mut Arc::make_mut(&mut self.ledger.stack).origin
                    {
                        *is_settled = true;
                    }
                    return "settle".to_owned();
                }
                Next::Activate(stack) => (format!("activate {}", stack.why), stack),
                Next::RollBack(stack) => {
                    let to = match &stack.origin {
                        StackOrigin::File => "file",
                        StackOrigin::Api => "api",
                        StackOrigin::Fleet { revision, .. } => &revision.revision,
                    };
                    (format!("to {to}: {}", stack.why), stack)
                }
            };
            activate(&mut self.ledger, stack);
            self.node_stack.note_done();
            text
        }

        fn phase(&self) -> &'static str {
            self.node_stack.state.phase.map_or("none", StackPhase::as_str)
        }

        fn why(&self) -> &str {
            self.node_stack.state.why.as_deref().unwrap_or_default()
        }

        /// Names another stack.
        fn name(&mut self, stack: &Value) {
            self.node_stack.read(object(stack));
        }

        /// Lets the time of a soak pass.
        fn soak(&mut self) {
            self.now += Duration::from_secs(11);
        }

        /// Activates the stack of the specification and lets it settle.
        fn settle(&mut self) {
            self.step(None);
            self.step(None);
            self.soak();
            assert_eq!(self.step(None), "settle");
            assert_eq!((self.step(None).as_str(), self.phase()), ("wait", "Settled"));
        }

        /// The same node with another process.
        fn restart(&mut self, stack: &Value) {
            self.node_stack = NodeStack::new(NodeStackState::default(), Duration::from_secs(1));
            self.node_stack.read(object(stack));
        }
    }

    #[test]
    fn a_new_revision_is_activated_soaks_and_settles() {
        let mut node = Node::new(&stack_of("00000000000a"));
        assert_eq!(node.step(None), "activate revision 00000000000a");
        assert_eq!((node.step(None).as_str(), node.phase()), ("wait until", "Soaking"));
        node.soak();
        assert_eq!(node.step(None), "settle");
        assert_eq!((node.step(None).as_str(), node.phase()), ("wait", "Settled"));
        // A policy that is suspended later changes nothing, and neither does a restart.
        assert_eq!(node.step(Some("it traps")), "wait");
        node.restart(&stack_of("00000000000a"));
        assert_eq!((node.step(None).as_str(), node.phase()), ("wait", "Settled"));
        // Other entries are another stack, also with the same revision.
        let mut changed = stack_of("00000000000a");
        changed["entries"][0]["parameters"] = json!("{\"a\": 1}");
        node.name(&changed);
        assert_eq!(node.step(None), "activate revision 00000000000a");
        assert_eq!((node.step(None).as_str(), node.phase()), ("wait until", "Soaking"));
        node.name(&Value::Null);
        assert_eq!((node.step(None).as_str(), node.phase()), ("wait until", "none"));
    }

    #[test]
    fn a_revision_with_a_suspended_policy_is_rolled_back_and_tried_again_only_when_told() {
        let mut node = Node::new(&stack_of("00000000000a"));
        node.step(None);
        assert_eq!(node.step(Some("it traps")), "to file: revision 00000000000a has failed: it traps");
        assert_eq!((node.step(None).as_str(), node.phase(), node.why()), ("wait", "RolledBack", "it traps"));
        node.restart(&stack_of("00000000000a"));
        assert_eq!((node.step(None).as_str(), node.phase()), ("wait", "RolledBack"));
        let mut again = stack_of("00000000000a");
        again["attempt"] = json!(2);
        node.name(&again);
        assert_eq!(node.step(None), "activate revision 00000000000a");
    }

    #[test]
    fn a_failure_returns_to_the_settled_revision_even_if_another_one_was_tried_between() {
        let mut node = Node::new(&stack_of("00000000000a"));
        node.settle();
        for revision in ["00000000000b", "00000000000c"] {
            node.name(&stack_of(revision));
            assert_eq!(node.step(None), format!("activate revision {revision}"));
        }
        node.restart(&stack_of("00000000000c"));
        assert_eq!(
            node.step(Some("it traps")),
            "to 00000000000a: revision 00000000000c has failed: it traps"
        );
        assert!(node.ledger.stack.is_settled());
    }

    /// Whatever the specification names meanwhile, and before the object was read after a restart.
    #[test]
    fn a_stack_that_has_not_settled_is_rolled_back_also_if_it_is_named_no_more() {
        let mut unusable = stack_of("00000000000b");
        unusable["entries"] = json!([entry_of('b')]);
        for other in [Value::Null, unusable] {
            let mut node = Node::new(&stack_of("00000000000a"));
            node.step(None);
            node.name(&other);
            assert_eq!(node.step(None), "wait until");
            assert_eq!(node.step(Some("it traps")), "to file: revision 00000000000a has failed: it traps");
        }
        let mut node = Node::new(&stack_of("00000000000a"));
        node.step(None);
        node.node_stack =
            NodeStack::new(NodeStackState::before_reading(&node.ledger.stack), Duration::from_secs(1));
        assert_eq!(node.step(None), "wait");
        assert_eq!(node.step(Some("it traps")), "to file: revision 00000000000a has failed: it traps");
    }

    #[test]
    fn a_rollback_that_fails_for_good_goes_on_to_an_older_stack() {
        let mut node = Node::new(&stack_of("00000000000a"));
        node.settle();
        node.name(&stack_of("00000000000b"));
        node.step(None);
        let failed =
            ActivateError::Command(CommandError::Refused(Refusal::Untrusted { policies: Vec::new() }));
        for expected in ["00000000000a", "File", "Api"] {
            let Next::RollBack(stack) = node.next(Some("it traps")) else { panic!("{expected}") };
            assert!(format!("{:?}", stack.origin).contains(expected), "{:?}", stack.origin);
            node.node_stack.note_not_rolled_back(&failed, &stack.why);
            node.now = Instant::now();
        }
        assert_eq!((node.step(Some("it traps")).as_str(), node.phase()), ("wait", "Failed"));
        assert!(node.why().contains("name another one in `spec.stack`"), "{}", node.why());
        node.name(&stack_of("00000000000c"));
        assert_eq!(node.step(Some("it traps")), "activate revision 00000000000c");
    }

    #[test]
    fn a_file_whose_stack_cannot_be_used_is_not_returned_to() {
        let mut node = Node::new(&stack_of("00000000000a"));
        node.step(None);
        node.file.error = Some("a typing error".into());
        assert_eq!(node.step(Some("it traps")), "to api: revision 00000000000a has failed: it traps");
    }

    #[test]
    fn an_activation_that_may_succeed_later_is_tried_again() {
        let unprepared = |error: InstallError| {
            ActivateError::Unprepared(berth_core::Unprepared { policy: "mixed@a".into(), error })
        };
        let digest = Digest::parse(&"a".repeat(64)).unwrap();
        for (error, phase) in [
            (unprepared(InstallError::Busy), "Pulling"),
            (unprepared(InstallError::Lost { digest }), "Pulling"),
            (unprepared(InstallError::Stopping), "Pulling"),
            (unprepared(InstallError::NotAPolicy { what: String::new() }), "Refused"),
            (ActivateError::Fails { policy: "a".into(), fault: "trap".into(), passing: false }, "Refused"),
            (ActivateError::Fails { policy: "a".into(), fault: "time".into(), passing: true }, "Pulling"),
        ] {
            let mut node = Node::new(&stack_of("00000000000a"));
            assert!(matches!(node.next(None), Next::Activate(_)));
            node.node_stack.note_not_activated(&error);
            assert_eq!(node.phase(), phase, "{error}");
        }
    }

    #[test]
    fn a_policy_that_the_node_does_not_have_is_waited_for_and_what_cannot_be_used_is_refused() {
        let with = |entry: Value| json!({"policy": "team", "revision": "00000000000a", "entries": [entry]});
        let merged = |key: &str, value: Value| {
            let mut entry = entry_of('a');
            entry[key] = value;
            with(entry)
        };
        for (stack, expected, why) in [
            (with(entry_of('b')), "Pulling", "no policy with digest"),
            (merged("name", json!("other")), "Refused", "is of policy mixed"),
            (merged("parameters", json!("[1]")), "Refused", "not a JSON object"),
            (merged("parameters", json!(format!("{{{}}}", " ".repeat(4000)))), "Refused", "bytes of JSON"),
            (merged("permissions", json!({"shareMax": 129})), "Refused", "1 to 128"),
            (merged("onFault", json!("explode")), "Refused", "only `skip` and `deny`"),
        ] {
            let mut node = Node::new(&stack);
            assert_eq!(node.step(None), "wait");
            assert_eq!(node.phase(), expected, "{stack}");
            assert!(node.why().contains(why), "{}", node.why());
            assert_eq!(node.ledger.stack.revision, 1);
        }
    }

    #[test]
    fn only_a_suspended_policy_of_the_active_stack_counts() {
        let mut node = Node::new(&stack_of("00000000000a"));
        node.step(None);
        let status = |revision, suspended| {
            let label = node.ledger.stack.entries[0].label();
            let status = berth_core::stack::PolicyStatus { revision, suspended, ..Default::default() };
            PolicyStatuses::from([(label, status)])
        };
        let active = node.ledger.stack.revision;
        assert!(
            suspension(&node.ledger, &status(active, true))
                .unwrap()
                .contains("mixed@aaaaaaaaaaaa was suspended")
        );
        for other in [status(active, false), status(active - 1, true), PolicyStatuses::new()] {
            assert_eq!(suspension(&node.ledger, &other), None);
        }
    }
}
