use super::*;
use berth_core::lab::LabError;
use berth_kernel::ids::names::Digest;
use berth_kernel::node::ports::InstallError;
use berth_kernel::policy::stack::{Stack, keep_past};
use berth_kernel::policy::version::{Origin, PolicyVersion};
use berth_oci::{PullError, RegistryError};
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
    let mut entry = entry_of('a');
    entry["parameters"] = json!(format!("{{\"for\": \"{revision}\"}}"));
    json!({"policy": "team", "revision": revision, "soak": "10s", "entries": [entry]})
}

fn reading(stack: &Value) -> NodeStack {
    let mut node_stack = NodeStack::new(NodeStackState::default());
    node_stack.may_activate = true;
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
    wall_ms: u64,
}

impl Node {
    fn new(stack: &Value) -> Self {
        let now = Instant::now();
        Self { ledger: node(), node_stack: reading(stack), file: FileStack::default(), now, wall_ms: 0 }
    }

    fn next(&mut self, suspended: Option<&str>) -> Next {
        let now = Now { instant: self.now, wall_ms: self.wall_ms };
        self.node_stack.next(&self.ledger, suspended, &self.file, now)
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
            next @ (Next::Pull(_) | Next::Gate { .. }) => panic!("{next:?}"),
            Next::Activate(stack) => (format!("activate {}", stack.why), stack),
            Next::RollBack(stack) => {
                let to = match &stack.origin {
                    StackOrigin::File => "file",
                    StackOrigin::Api => "api",
                    StackOrigin::BreakGlass { .. } => "break-glass",
                    StackOrigin::Fleet { revision, .. } => &revision.revision,
                };
                (format!("to {to}: {}", stack.why), stack)
            }
        };
        activate(&mut self.ledger, stack);
        self.node_stack.try_again();
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
        self.node_stack = reading(stack);
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
    assert_eq!(node.step(Some("it traps")), "to 00000000000a: revision 00000000000c has failed: it traps");
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
    node.node_stack = NodeStack::new(NodeStackState::before_reading(&node.ledger));
    assert_eq!(node.step(None), "wait");
    assert_eq!(node.step(Some("it traps")), "to file: revision 00000000000a has failed: it traps");
}

#[test]
fn a_rollback_that_fails_for_good_goes_on_to_an_older_stack() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.settle();
    node.name(&stack_of("00000000000b"));
    node.step(None);
    let failed = ActivateError::Command(CommandError::Refused(Refusal::Untrusted { policies: Vec::new() }));
    let fail_all = |node: &mut Node| {
        for expected in ["00000000000a", "File", "Api"] {
            let Next::RollBack(stack) = node.next(Some("it traps")) else { panic!("{expected}") };
            assert!(format!("{:?}", stack.origin).contains(expected), "{:?}", stack.origin);
            node.node_stack.note_not_rolled_back(&node.ledger, &failed, &stack.why);
        }
    };
    fail_all(&mut node);
    // All of them are tried again some minutes later.
    assert_eq!((node.step(Some("it traps")).as_str(), node.phase()), ("wait until", "Failed"));
    assert!(node.why().contains("name another one in `spec.stack`"), "{}", node.why());
    node.name(&stack_of("00000000000c"));
    fail_all(&mut node);
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
        suspension(&node.ledger, &status(active, true)).unwrap().contains("mixed@aaaaaaaaaaaa was suspended")
    );
    for other in [status(active, false), status(active - 1, true), PolicyStatuses::new()] {
        assert_eq!(suspension(&node.ledger, &other), None);
    }
}

/// A rollback to a stack whose policy was deleted, for example.
#[test]
fn while_a_rollback_fails_another_stack_of_the_specification_is_activated() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.step(None);
    let busy = ActivateError::Command(CommandError::Busy);
    assert!(matches!(node.next(Some("it traps")), Next::RollBack(_)));
    node.node_stack.note_not_rolled_back(&node.ledger, &busy, "");
    assert_eq!((node.step(Some("it traps")).as_str(), node.phase()), ("wait until", "Failed"));
    // Meanwhile the soak would have ended.
    node.soak();
    node.node_stack.note_not_rolled_back(&node.ledger, &busy, "");
    let mut missing = stack_of("00000000000b");
    missing["entries"] = json!([entry_of('b')]);
    node.node_stack.read(object(&missing));
    node.node_stack.rollback.note_failed(Duration::from_secs(60));
    let Next::Wait(until) = node.next(Some("it traps")) else { panic!("it waits") };
    assert!(until.is_some_and(|at| at > node.now), "no busy loop");
    assert_eq!(node.phase(), "Pulling");
    node.name(&stack_of("00000000000c"));
    node.node_stack.rollback.note_failed(Duration::from_secs(60));
    assert_eq!(node.step(Some("it traps")), "activate revision 00000000000c");
}

#[test]
fn a_revision_that_was_suspended_does_not_settle_by_the_end_of_the_suspension() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.step(None);
    node.step(None);
    node.node_stack.rollback.note_failed(Duration::from_secs(60));
    assert_eq!(node.step(Some("it traps")), "wait until");
    node.soak();
    assert_eq!((node.step(None).as_str(), node.phase()), ("wait until", "Soaking"));
    // A longer soak applies to the one that lasts.
    let mut longer = stack_of("00000000000a");
    longer["soak"] = json!("1h");
    node.name(&longer);
    node.soak();
    assert_eq!((node.step(None).as_str(), node.phase()), ("wait until", "Soaking"));
    assert!(node.why().contains("3600 s"), "{}", node.why());
}

#[test]
fn nothing_is_activated_before_the_devices_of_running_pods_are_adopted() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.node_stack.may_activate = false;
    assert_eq!(
        (node.step(None).as_str(), node.phase(), node.why()),
        ("wait", "Pulling", "the daemon is starting")
    );
    node.node_stack.may_activate = true;
    assert_eq!(node.step(None), "activate revision 00000000000a");
    let mut renamed = stack_of("00000000000a");
    renamed["policy"] = json!("other");
    node.name(&renamed);
    assert_eq!((node.step(None).as_str(), node.phase()), ("wait until", "Soaking"), "the name is only shown");
}

fn gated() -> Value {
    let mut stack = stack_of("00000000000a");
    stack["gate"] = json!({"replayDecisions": 500, "shadowFor": "5m", "maxNewDenialsPercent": 1});
    stack
}

/// The gate begins.
fn begin_gate(node: &mut Node) -> GateRules {
    let Next::Gate { rules, stack } = node.next(None) else { panic!("no gate") };
    assert_eq!((node.phase(), stack.why.as_str()), ("Gating", "revision 00000000000a"));
    node.node_stack.work = Some(Work::Gate);
    node.node_stack.revision_at_gate = node.ledger.stack.revision;
    assert!(node.step(None).starts_with("wait"));
    assert_eq!(node.phase(), "Gating");
    rules
}

#[test]
fn a_stack_with_a_gate_is_activated_once_it_has_passed() {
    let mut node = Node::new(&gated());
    let rules = begin_gate(&mut node);
    let expected =
        GateRules { replay_decisions: 500, shadow_for: Duration::from_secs(300), new_denials_percent_max: 1 };
    assert_eq!(rules, expected);
    assert!(node.why().contains("500 recorded admissions") && node.why().contains("300 s"), "{}", node.why());
    node.node_stack.note_done(Done::Gate(Ok(GateReport { replayed: 500, shadowed: 3 })));
    // The gate is not repeated when the node was busy, or after an upload.
    assert!(matches!(node.next(None), Next::Activate(_)));
    node.node_stack.note_not_activated(&ActivateError::Command(CommandError::Busy));
    node.node_stack.try_again();
    assert_eq!(node.step(None), "activate revision 00000000000a");
    assert_eq!((node.step(None).as_str(), node.phase()), ("wait until", "Soaking"));
}

#[test]
fn a_stack_that_fails_its_gate_is_refused_until_the_specification_changes() {
    for error in [GateError::Failed("it denies all".into()), GateError::Lab(LabError::None)] {
        let mut node = Node::new(&gated());
        begin_gate(&mut node);
        let why = error.to_string();
        node.node_stack.note_done(Done::Gate(Err(error)));
        node.node_stack.try_again();
        assert_eq!((node.step(None).as_str(), node.phase(), node.why()), ("wait", "Refused", why.as_str()));
        let mut looser = gated();
        looser["gate"]["maxNewDenialsPercent"] = json!(100);
        node.name(&looser);
        begin_gate(&mut node);
        node.name(&stack_of("00000000000a"));
        assert_eq!(node.step(None), "activate revision 00000000000a");
    }
}

#[test]
fn a_gate_that_was_interrupted_begins_again_and_a_stack_that_cannot_be_activated_is_refused() {
    let fails = ActivateError::Fails { policy: "a".into(), fault: "trap".into(), passing: false };
    for (error, phase) in [
        (GateError::Lab(LabError::Busy), "Gating"),
        (GateError::ShadowEnded, "Gating"),
        (GateError::Activation(ActivateError::Command(CommandError::Busy)), "Pulling"),
        (GateError::Activation(fails), "Refused"),
    ] {
        let mut node = Node::new(&gated());
        begin_gate(&mut node);
        node.node_stack.note_done(Done::Gate(Err(error)));
        let step = node.step(None);
        assert_eq!(node.phase(), phase);
        if phase == "Refused" {
            assert_eq!(step, "wait");
        } else {
            assert_eq!(step, "wait until");
            node.node_stack.try_again();
            begin_gate(&mut node);
        }
    }
}

/// What is new in a stack depends on the active one: a policy of it may have failed since.
#[test]
fn a_gate_begins_again_when_the_active_stack_has_changed() {
    let mut node = Node::new(&stack_of("00000000000b"));
    node.step(None);
    node.name(&gated());
    begin_gate(&mut node);
    assert_eq!(node.step(Some("it traps")), "to file: revision 00000000000b has failed: it traps");
    begin_gate(&mut node);
    node.node_stack.note_done(Done::Gate(Ok(GateReport { replayed: 500, shadowed: 3 })));
    assert!(matches!(node.next(None), Next::Activate(_)));
    Arc::make_mut(&mut node.ledger.stack).revision += 1;
    begin_gate(&mut node);
}

/// A stack whose second policy the node does not have, and can pull.
fn with_ref() -> Value {
    let mut missing = entry_of('b');
    missing["ref"] = json!("reg.example/gpu/mixed");
    missing["manifest"] = json!(format!("sha256:{}", "c".repeat(64)));
    json!({"policy": "team", "revision": "00000000000a", "entries": [entry_of('a'), missing]})
}

fn pull_failed(node: &mut Node, error: PullError) {
    let Next::Pull(pull) = node.next(None) else { panic!("no pull") };
    node.node_stack.work = Some(Work::Pull);
    assert_eq!(node.step(None), "wait", "one pull at a time");
    let error = pull.failed(error);
    node.node_stack.note_done(Done::Pull(Err(error)));
}

fn pulled(node: &Node) -> (bool, &str) {
    let pulled = node.node_stack.state.pulled.as_ref().unwrap();
    (pulled.is_pulled, pulled.reason)
}

#[test]
fn a_policy_that_the_node_does_not_have_is_pulled_from_its_ref() {
    let mut node = Node::new(&with_ref());
    let Next::Pull(pull) = node.next(None) else { panic!("no pull") };
    let from = format!("reg.example/gpu/mixed@sha256:{}", "c".repeat(64));
    assert_eq!((pull.reference(), node.phase()), (from.clone(), "Pulling"));
    assert!(node.why().contains(&from), "{}", node.why());
    assert_eq!(pulled(&node), (false, "Pulling"));
    node.node_stack.note_done(Done::Pull(Ok(())));
    let mut policies = (*node.ledger.policies).clone();
    let digest = Digest::parse(&"b".repeat(64)).unwrap();
    let mut version = PolicyVersion::clone(&policies[&Digest::parse(&"a".repeat(64)).unwrap()]);
    version.digest = digest.clone();
    policies.insert(digest, Arc::new(version));
    node.ledger.policies = Arc::new(policies);
    assert_eq!(node.step(None), "activate revision 00000000000a");
    assert_eq!((node.step(None).as_str(), pulled(&node)), ("wait until", (true, "Pulled")));
    node.name(&stack_of("00000000000b"));
    assert_eq!(node.node_stack.state.pulled, None, "no policy of it has a ref");
}

#[test]
fn a_pull_that_may_succeed_later_is_tried_again_and_other_failures_refuse_the_stack() {
    let digest = || Digest::parse(&"c".repeat(64)).unwrap();
    let registry = RegistryError::Answer { url: "https://reg.example".into(), why: "it is down".into() };
    let damaged =
        PullError::DigestMismatch { what: "the layer".into(), expected: digest(), actual: digest() };
    let other = PullError::OtherLayer { expected: digest(), actual: digest() };
    let not_allowed = PullError::NotAllowed { repository: "reg.example/a".into(), allowed: Vec::new() };
    for (error, phase, reason) in [
        (PullError::Registry(registry), "Pulling", "RegistryUnavailable"),
        (PullError::Settings("no file".into()), "Pulling", "SettingsInvalid"),
        (damaged, "Pulling", "DigestMismatch"),
        (PullError::LongAnswer { what: "the layer".into(), max: 1 }, "Pulling", "TooLarge"),
        (other, "Refused", "DigestMismatch"),
        (not_allowed, "Refused", "RepositoryNotAllowed"),
        (PullError::WrongMediaType("an image".into()), "Refused", "WrongMediaType"),
        (PullError::TooLarge { max: 1 }, "Refused", "TooLarge"),
    ] {
        let mut node = Node::new(&with_ref());
        let why = error.to_string();
        pull_failed(&mut node, error);
        let step = node.step(None);
        assert_eq!((node.phase(), pulled(&node)), (phase, (false, reason)));
        assert!(
            node.why().contains(&why) && node.why().contains("policy mixed from reg.example"),
            "{}",
            node.why()
        );
        assert_eq!(step, if phase == "Refused" { "wait" } else { "wait until" });
        // An upload by hand, or a change of the specification, is a reason to try again.
        node.node_stack.try_again();
        assert!(matches!(node.next(None), Next::Pull(_)));
    }
}

#[test]
fn a_failed_revision_is_not_pulled_again_and_an_invalid_ref_is_refused() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.step(None);
    node.step(Some("it traps"));
    node.restart(&with_ref());
    assert_eq!((node.step(None).as_str(), node.phase()), ("wait", "RolledBack"));
    for (key, value) in [("ref", json!("reg.example/Gpu")), ("manifest", Value::Null), ("ref", Value::Null)] {
        let mut stack = with_ref();
        stack["entries"][1][key] = value;
        let mut node = Node::new(&stack);
        assert_eq!((node.step(None).as_str(), node.phase()), ("wait", "Refused"), "{key}");
    }
}

fn break_glass(node: &mut Node, until_wall_ms: u64) {
    let origin = StackOrigin::BreakGlass { until_wall_ms };
    let (by, why, entries) = ("alice".into(), "an outage".into(), Vec::new());
    let failed = node.ledger.stack.failed.clone();
    activate(&mut node.ledger, NewStack { origin, failed, by, why, entries });
}

#[test]
fn a_break_glass_lasts_until_its_end_over_a_restart_and_then_the_stack_before_it_is_active_again() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.settle();
    break_glass(&mut node, 60_000);
    node.name(&stack_of("00000000000b"));
    for _ in 0..2 {
        let step = node.step(Some("it traps"));
        assert_eq!((step.as_str(), node.phase()), ("wait until", "LocalOverride"));
        assert!(node.why().contains("alice") && node.why().contains("an outage"), "{}", node.why());
        node.restart(&stack_of("00000000000b"));
    }
    node.wall_ms = 60_000;
    assert_eq!(node.step(None), "to 00000000000a: the break-glass has ended");
    assert!(node.ledger.stack.is_settled());
    assert_eq!(node.step(None), "activate revision 00000000000b");
}

#[test]
fn a_break_glass_ends_before_the_gpu_node_was_read_and_returns_to_a_stack_that_had_not_settled() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.step(None);
    break_glass(&mut node, 1);
    break_glass(&mut node, 2);
    node.node_stack = NodeStack::new(NodeStackState::before_reading(&node.ledger));
    node.wall_ms = 2;
    assert_eq!(node.step(None), "wait", "the daemon is starting");
    node.node_stack.may_activate = true;
    assert_eq!(node.step(None), "to 00000000000a: the break-glass has ended");
    assert!(!node.ledger.stack.is_settled());
    assert_eq!(node.step(Some("it traps")), "to file: revision 00000000000a has failed: it traps");
    // A failed revision stays failed.
    break_glass(&mut node, 3);
    node.restart(&stack_of("00000000000a"));
    node.wall_ms = 3;
    assert_eq!(node.step(None), "to file: the break-glass has ended");
    assert_eq!((node.step(None).as_str(), node.phase()), ("wait", "RolledBack"));
}

#[test]
fn a_break_glass_does_not_return_to_a_failed_stack_or_to_an_unsettled_one_that_is_no_longer_named() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.step(None);
    break_glass(&mut node, 0);
    node.name(&stack_of("00000000000b"));
    assert_eq!(node.step(None), "to file: the break-glass has ended");
    node.step(None);
    assert_eq!(node.step(Some("it traps")), "to file: revision 00000000000b has failed: it traps");
    break_glass(&mut node, 0);
    node.name(&stack_of("00000000000a"));
    assert_eq!(node.step(None), "to file: the break-glass has ended");
}

#[test]
fn a_break_glass_does_not_return_to_the_failed_revision_even_if_nothing_else_can_be_used() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.step(None);
    node.step(Some("it traps"));
    break_glass(&mut node, 0);
    let failed = ActivateError::Command(CommandError::Refused(Refusal::Untrusted { policies: Vec::new() }));
    for expected in ["File", "Api"] {
        let Next::RollBack(stack) = node.next(None) else { panic!("{expected}") };
        assert!(format!("{:?}", stack.origin).contains(expected), "{:?}", stack.origin);
        node.node_stack.note_not_rolled_back(&node.ledger, &failed, &stack.why);
    }
    assert!(matches!(node.next(None), Next::Wait(Some(_))));
    assert!(node.why().contains("could not be activated again"), "{}", node.why());
}

#[test]
fn a_break_glass_lasts_at_most_the_requested_time_if_the_clock_is_wrong() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.settle();
    break_glass(&mut node, 1_000_060_000);
    Arc::make_mut(&mut node.ledger.stack).since_wall_ms = 1_000_000_000;
    let Next::Wait(Some(until)) = node.next(None) else { panic!("it waits") };
    assert!(until <= node.now + Duration::from_secs(60));
    // The clock is still behind.
    node.now += Duration::from_secs(61);
    assert_eq!(node.step(None), "to 00000000000a: the break-glass has ended");
}

/// A version that was deleted meanwhile, for example.
#[test]
fn a_break_glass_whose_former_stack_cannot_be_used_goes_on_to_an_older_one() {
    let mut node = Node::new(&stack_of("00000000000a"));
    node.settle();
    break_glass(&mut node, 0);
    let failed = ActivateError::Command(CommandError::Refused(Refusal::Untrusted { policies: Vec::new() }));
    for expected in ["00000000000a", "File", "Api"] {
        let Next::RollBack(stack) = node.next(None) else { panic!("{expected}") };
        assert!(format!("{:?}", stack.origin).contains(expected), "{:?}", stack.origin);
        node.node_stack.note_not_rolled_back(&node.ledger, &failed, &stack.why);
    }
    let Next::Wait(until) = node.next(None) else { panic!("it waits") };
    assert!(until.is_some_and(|at| at > node.now), "no busy loop");
    node.now += RETRY_MAX * 2;
    assert!(matches!(node.next(None), Next::RollBack(_)));
}
