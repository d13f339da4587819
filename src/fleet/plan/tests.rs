use super::*;
use crate::gpu_node::{GpuNodeStatus, StackPhase, StackStatus};
use crate::sharing_policy::{ATTEMPT, PAUSED, RolloutPhase, UNDO};
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

const MINUTE: u64 = 60;

/// Nodes, one SharingPolicy and the controller.
struct Fleet {
    view: View,
    memory: Memory,
    resolutions: BTreeMap<String, Resolution>,
    now: u64,
}

impl Fleet {
    /// `models`: that of each node, in the order of their names.
    fn new(models: &[&str], rollout: &Value) -> Self {
        let mut fleet =
            Self { view: View::default(), memory: Memory::default(), resolutions: BTreeMap::new(), now: 0 };
        for (number, model) in models.iter().enumerate() {
            fleet.add(&format!("n{number:02}"), model);
        }
        fleet.apply("team", 1, rollout);
        fleet
    }

    fn add(&mut self, name: &str, model: &str) {
        let node = NodeFacts {
            uid: format!("node of {name}"),
            labels: [("pool".to_owned(), "a".to_owned())].into(),
            is_ready: true,
        };
        self.view.nodes.insert(name.to_owned(), node);
        let object = json!({
            "apiVersion": "fleet.berth.dev/v1alpha1",
            "kind": "GPUNode",
            "metadata": {
                "name": name,
                "uid": format!("uid of {name}"),
                "generation": 1,
                "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": name, "uid": format!("node of {name}")}],
            },
            "spec": {},
            "status": {"heartbeatTime": "2026-01-01T00:00:00Z", "models": [model]},
        });
        self.view.gpu_nodes.insert(name.to_owned(), serde_json::from_value(object).unwrap());
    }

    /// Applies a SharingPolicy whose policy has this parameter.
    fn apply(&mut self, name: &str, parameter: u32, rollout: &Value) {
        let spec = json!({
            "nodeSelector": {"matchLabels": {"pool": "a"}},
            "stack": [{"name": "mixed", "shipped": true, "parameters": {"number": parameter}}],
            "rollout": rollout,
        });
        let known = self.view.policies.get(name);
        let generation = known.and_then(|known| known.metadata.generation).unwrap_or(0) + 1;
        let status = known.and_then(|known| known.status.clone());
        let object = json!({
            "apiVersion": "fleet.berth.dev/v1alpha1",
            "kind": "SharingPolicy",
            "metadata": {"name": name, "uid": name, "generation": generation},
            "spec": spec,
        });
        let mut object: SharingPolicy = serde_json::from_value(object).unwrap();
        object.status = status;
        let entries = crate::revision::entries(&object.spec.stack, &BTreeMap::new());
        self.resolutions.insert(name.to_owned(), Resolution { of: (generation, None), entries });
        self.view.policies.insert(name.to_owned(), object);
    }

    /// Makes the plan and does what it says. Returns the nodes that were assigned a stack.
    fn step(&mut self) -> Vec<String> {
        self.now += 1;
        let now = Now { since_start: Duration::from_secs(self.now), wall: Time(Timestamp::UNIX_EPOCH) };
        let plan = plan(&self.view, &mut self.memory, &self.resolutions, &now);
        assert_eq!(plan.unresolved, Vec::<String>::new());
        for (name, status) in plan.statuses {
            self.view.policies.get_mut(&name).unwrap().status = Some(status);
        }
        let assignments = plan.assignments.into_iter().map(|assignment| {
            let object = self.view.gpu_nodes.get_mut(&assignment.node).unwrap();
            object.spec.stack = Some(assignment.stack);
            object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
            assignment.node
        });
        let mut assigned: Vec<String> = assignments.collect();
        assigned.sort();
        assigned
    }

    /// Steps until nothing is assigned any more; returns all nodes that were assigned a stack.
    fn steps(&mut self) -> Vec<String> {
        let mut assigned: Vec<String> = Vec::new();
        for _ in 0..4 {
            assigned.extend(self.step());
        }
        assigned.sort();
        assigned
    }

    /// What a daemon reports of the stack that it was assigned.
    fn report(&mut self, name: &str, phase: StackPhase) {
        let object = self.view.gpu_nodes.get_mut(name).unwrap();
        let key = Key::of(object.spec.stack.as_ref().unwrap());
        let has_failed = matches!(phase, StackPhase::RolledBack | StackPhase::Refused);
        let failed = has_failed.then(|| crate::gpu_node::FailedRevision {
            revision: key.revision.clone(),
            attempt: key.attempt,
            reason: "it traps".into(),
        });
        let generation = object.metadata.generation;
        let status = object.status.get_or_insert_with(GpuNodeStatus::default);
        status.observed_generation = generation;
        status.stack = Some(StackStatus {
            phase: Some(phase),
            active: Some(key.revision).filter(|_| !has_failed),
            failed,
            ..StackStatus::default()
        });
    }

    /// All nodes that were assigned a stack have settled.
    fn settle(&mut self) {
        let assigned = self.view.gpu_nodes.values().filter(|object| object.spec.stack.is_some());
        let names: Vec<String> = assigned.filter_map(|object| object.metadata.name.clone()).collect();
        for name in names {
            self.report(&name, StackPhase::Settled);
        }
    }

    /// Lets a rollout become complete.
    fn complete(&mut self) {
        for _ in 0..8 {
            self.steps();
            self.settle();
        }
        assert_eq!(self.phase(), RolloutPhase::Complete);
    }

    fn status(&self) -> &SharingPolicyStatus {
        self.view.policies["team"].status.as_ref().unwrap()
    }

    fn phase(&self) -> RolloutPhase {
        self.status().rollout.as_ref().unwrap().phase
    }

    /// The status and the reason of the conditions that are True.
    fn reasons(&self) -> Vec<(String, String)> {
        let all = self.status().conditions.iter().flatten().filter(|one| one.status == "True");
        all.map(|one| (one.type_.clone(), one.reason.clone())).collect()
    }

    fn is(&self, type_: &str, reason: &str) -> bool {
        self.reasons() == [(type_.to_owned(), reason.to_owned())]
    }

    fn annotate(&mut self, key: &str, value: &str) {
        let annotations = &mut self.view.policies.get_mut("team").unwrap().metadata.annotations;
        annotations.get_or_insert_default().insert(key.to_owned(), value.to_owned());
    }

    fn revision_of(&self, name: &str) -> String {
        self.view.gpu_nodes[name].spec.stack.as_ref().map_or_else(String::new, |stack| stack.revision.clone())
    }
}

fn canaries() -> Value {
    json!({"steps": [{"nodesPerModel": 1, "soak": "10s"}, {"percent": 50, "soak": "20s"}, {"percent": 100}]})
}

#[test]
fn one_node_a_model_is_told_then_half_then_all() {
    let mut fleet = Fleet::new(&["a", "a", "a", "a", "b", "b"], &canaries());
    assert_eq!(fleet.step(), Vec::<String>::new(), "the status is written first");
    let first = fleet.steps();
    assert_eq!(first.len(), 2);
    assert!(
        first.iter().any(|name| name < &"n04".to_owned())
            && first.iter().any(|name| name >= &"n04".to_owned())
    );
    assert!(fleet.is("Reconciling", "Soaking"));
    fleet.report(&first[0], StackPhase::Settled);
    assert_eq!(fleet.steps(), Vec::<String>::new(), "the other one still soaks");
    fleet.settle();
    assert_eq!(fleet.steps().len(), 1, "three of six");
    let soaks: Vec<_> =
        fleet.view.gpu_nodes.values().filter_map(|one| one.spec.stack.clone()?.soak).collect();
    assert_eq!(soaks.iter().filter(|soak| *soak == "20s").count(), 1);
    fleet.settle();
    assert_eq!(fleet.steps().len(), 3);
    assert_eq!(fleet.status().good, None);
    fleet.settle();
    fleet.steps();
    assert!(fleet.is("Ready", "Settled"), "{:?}", fleet.reasons());
    assert_eq!(fleet.status().good.as_ref().unwrap().revision, fleet.revision_of("n00"));
}

#[test]
fn a_failed_node_halts_the_rollout_and_all_return_to_the_revision_before() {
    let mut fleet = Fleet::new(&["a"; 6], &canaries());
    fleet.complete();
    let good = fleet.revision_of("n00");
    fleet.apply("team", 2, &canaries());
    let assigned = fleet.steps();
    assert_eq!(assigned.len(), 1);
    fleet.report(&assigned[0], StackPhase::RolledBack);
    assert_eq!(fleet.steps(), assigned, "it is assigned the good revision");
    assert!(fleet.is("Stalled", "Halted"), "{:?}", fleet.reasons());
    assert_eq!(fleet.revision_of(&assigned[0]), good);
    // It comes back to the halted revision by way of another one.
    fleet.apply("team", 1, &canaries());
    fleet.complete();
    fleet.apply("team", 2, &canaries());
    assert_eq!(fleet.steps(), Vec::<String>::new());
    assert!(fleet.is("Stalled", "Halted"));
    let revision = fleet.status().rollout.clone().unwrap().revision;
    fleet.annotate(ATTEMPT, "000000000000/2");
    assert_eq!(fleet.steps(), Vec::<String>::new(), "another revision is meant");
    fleet.annotate(ATTEMPT, &format!("{revision}/2"));
    assert_eq!(fleet.steps().len(), 1);
    assert!(fleet.is("Reconciling", "Soaking"));
}

#[test]
fn without_an_earlier_revision_nothing_is_undone_and_hold_tells_nothing() {
    let mut fleet = Fleet::new(&["a"; 4], &canaries());
    let assigned = fleet.steps();
    fleet.report(&assigned[0], StackPhase::Refused);
    assert_eq!(fleet.steps(), Vec::<String>::new());
    let message = fleet.status().conditions.as_ref().unwrap()[2].message.clone();
    assert!(message.contains("nothing is undone") && message.contains("it traps"), "{message}");
    let mut hold = canaries();
    hold["onHalt"] = "hold".into();
    let mut fleet = Fleet::new(&["a"; 4], &hold);
    fleet.complete();
    fleet.apply("team", 2, &hold);
    let assigned = fleet.steps();
    fleet.report(&assigned[0], StackPhase::RolledBack);
    assert_eq!(fleet.steps(), Vec::<String>::new());
    assert!(fleet.is("Stalled", "Halted"));
}

#[test]
fn a_node_that_does_not_settle_in_time_has_failed() {
    let mut fleet = Fleet::new(&["a"; 4], &canaries());
    let assigned = fleet.steps();
    fleet.report(&assigned[0], StackPhase::Pulling);
    fleet.now += 10 * MINUTE;
    fleet.steps();
    assert!(fleet.is("Reconciling", "Soaking"), "its soak of 10 s counts, too");
    fleet.now += 10;
    fleet.steps();
    assert!(fleet.is("Stalled", "Halted"));
}

#[test]
fn nodes_that_are_away_neither_count_nor_block_and_follow() {
    let mut fleet = Fleet::new(&["a"; 6], &canaries());
    for name in ["n01", "n02"] {
        fleet.view.nodes.get_mut(name).unwrap().is_ready = false;
    }
    fleet.complete();
    assert!(fleet.is("Ready", "Settled"), "{:?}", fleet.reasons());
    let rollout = fleet.status().rollout.clone().unwrap();
    assert_eq!((rollout.total, rollout.assigned, rollout.away), (6, 6, 2));
    fleet.view.nodes.get_mut("n01").unwrap().is_ready = true;
    fleet.report("n01", StackPhase::Soaking);
    fleet.steps();
    assert!(fleet.is("Reconciling", "Soaking"));
    // All others have no heartbeat for 25 minutes; then a rollout assigns nothing.
    fleet.now += 26 * MINUTE;
    fleet.apply("team", 2, &canaries());
    assert_eq!(fleet.steps(), Vec::<String>::new());
}

#[test]
fn nodes_that_go_away_while_they_try_a_revision_halt_it_except_the_first() {
    let mut fleet = Fleet::new(&["a"; 6], &canaries());
    let mut assigned = fleet.steps();
    for is_halted in [false, true] {
        assert_eq!(assigned.len(), 1);
        fleet.report(&assigned[0], StackPhase::Soaking);
        fleet.view.nodes.get_mut(&assigned[0]).unwrap().is_ready = false;
        // Another node takes the place of the first.
        assigned = fleet.steps();
        assert_eq!(fleet.is("Stalled", "Halted"), is_halted, "{:?}", fleet.reasons());
    }
    assert_eq!(assigned, Vec::<String>::new());
}

#[test]
fn a_new_node_gets_the_good_revision_until_the_last_step() {
    let mut fleet = Fleet::new(&["a"; 4], &canaries());
    fleet.complete();
    let good = fleet.revision_of("n00");
    fleet.apply("team", 2, &canaries());
    fleet.steps();
    fleet.add("n99", "a");
    fleet.steps();
    assert_eq!(fleet.revision_of("n99"), good);
    fleet.complete();
    assert_ne!(fleet.revision_of("n99"), good);
    fleet.add("n98", "a");
    fleet.steps();
    assert_eq!(fleet.revision_of("n98"), fleet.revision_of("n99"));
}

#[test]
fn the_highest_priority_decides_and_an_overlap_is_named() {
    let mut fleet = Fleet::new(&["a"; 2], &canaries());
    fleet.apply("alpha", 7, &canaries());
    fleet.steps();
    assert!(fleet.is("Stalled", "Overlapped"), "{:?}", fleet.reasons());
    fleet.view.policies.get_mut("team").unwrap().spec.priority = Some(1);
    fleet.complete();
    assert_eq!(fleet.view.gpu_nodes["n00"].spec.stack.as_ref().unwrap().policy, "team");
    fleet.view.policies.remove("team");
    let assigned = fleet.steps();
    assert_eq!(assigned.len(), 1, "the other one begins its own rollout");
}

#[test]
fn a_paused_rollout_tells_nothing_and_an_undone_one_is_halted() {
    let mut fleet = Fleet::new(&["a"; 4], &canaries());
    fleet.complete();
    fleet.annotate(PAUSED, "true");
    fleet.apply("team", 2, &canaries());
    fleet.annotate(PAUSED, "true");
    assert_eq!(fleet.steps(), Vec::<String>::new());
    assert!(fleet.is("Reconciling", "Paused"));
    fleet.annotate(PAUSED, "false");
    assert_eq!(fleet.steps().len(), 1);
    let revision = fleet.status().rollout.clone().unwrap().revision;
    fleet.annotate(UNDO, &format!("{revision}/2"));
    fleet.steps();
    assert!(fleet.is("Reconciling", "Soaking"), "another attempt is meant");
    fleet.annotate(UNDO, &format!("{revision}/1"));
    assert_eq!(fleet.steps().len(), 1);
    assert!(fleet.is("Stalled", "Halted"));
}

#[test]
fn what_a_daemon_has_reported_of_an_earlier_attempt_does_not_count() {
    let mut fleet = Fleet::new(&["a"; 4], &canaries());
    fleet.complete();
    let revision = fleet.revision_of("n00");
    fleet.annotate(ATTEMPT, &format!("{revision}/2"));
    assert_eq!(fleet.steps().len(), 1);
    assert_eq!(fleet.steps(), Vec::<String>::new(), "it has not settled again");
    fleet.complete();
    assert_eq!(fleet.status().good.as_ref().unwrap().attempt, 2);
}

#[test]
fn more_steps_do_not_keep_a_complete_rollout_from_new_nodes() {
    let mut fleet = Fleet::new(&["a"; 4], &json!({"steps": [{"percent": 100}]}));
    fleet.complete();
    fleet.apply("team", 1, &canaries());
    for name in ["n90", "n91"] {
        fleet.add(name, "a");
    }
    assert_eq!(fleet.steps(), ["n90", "n91"]);
    fleet.complete();
    assert!(fleet.is("Ready", "Settled"));
}

#[test]
fn without_nodes_a_policy_is_ready_and_with_the_first_its_rollout_begins() {
    let mut fleet = Fleet::new(&[], &canaries());
    fleet.steps();
    assert!(fleet.is("Ready", "NoNodes"));
    fleet.add("n00", "a");
    assert_eq!(fleet.steps(), ["n00"]);
    fleet.complete();
    // The Node was replaced by another one of its name.
    fleet.view.nodes.get_mut("n00").unwrap().uid = "another".into();
    fleet.steps();
    assert!(fleet.is("Ready", "NoNodes"));
}

#[test]
fn no_more_nodes_are_told_at_a_time_than_per_second() {
    let rollout = json!({"steps": [{"percent": 100}], "perSecond": 3});
    let mut fleet = Fleet::new(&["a"; 8], &rollout);
    let assigned: Vec<usize> = (0..5).map(|_| fleet.step().len()).collect();
    assert_eq!(assigned, [0, 3, 3, 2, 0]);
}
