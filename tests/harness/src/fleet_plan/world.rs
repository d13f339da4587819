//! The simulated cluster: objects in an API server, daemons, people, and a controller that sees it all late.

use super::Outcome;
use super::daemon::{Behaviour, Daemon};
use crate::sim::simulation::rng::Rng;
use berth_fleet::gpu_node::{EntrySpec, GpuNode, GpuNodeSpec};
use berth_fleet::plan::{Assignment, Key, Memory, NodeFacts, Now, Resolution, View, plan};
use berth_fleet::revision::entries;
use berth_fleet::sharing_policy::{
    ATTEMPT, HALTED_MAX, HaltAt, OnHalt, PAUSED, RolloutPhase, RolloutSpec, SharingPolicy, SharingPolicySpec,
    SharingPolicyStatus, StackEntry, Step, UNDO,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, OwnerReference, Time};
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Seconds of a step.
const STEP: u64 = 5;
/// Steps in which things happen, and after which everything comes back.
const EVENTFUL_STEPS: u32 = 400;
/// Steps within which all rollouts must have ended then: the slowest waits for nodes that never settle, in each step.
const QUIET_STEPS: u32 = 2_400;
/// Steps for which what has ended must stay so.
const STABLE_STEPS: u32 = 60;
/// Most nodes that a revision may reach which settles nowhere: two of each of three models, and others in place of those that went
/// away before they began with it.
const REACHED_MAX: usize = 20;
/// A node that dies is back after so many seconds.
const NODE_START_SECONDS: u64 = 120;
/// A lease that its holder does not renew can be taken after so many seconds.
const LEASE_SECONDS: u64 = 15;

/// The controller: what it has read, and what it remembers.
struct Controller {
    view: View,
    memory: Memory,
    since: u64,
    /// Until when no event of a kind arrives: nodes, GPUNodes, SharingPolicies.
    silent_until: [u64; 3],
}

pub(super) struct World {
    random: Rng,
    is_printed: bool,
    now: u64,
    /// The API server's objects.
    api: View,
    next_id: u64,
    daemons: BTreeMap<String, Daemon>,
    /// When a node that has died has started again.
    back_at: BTreeMap<String, u64>,
    controller: Option<Controller>,
    /// When the next controller can have the lease.
    lease_free_at: u64,
    /// Nodes that were away, by the state of the API server, after they were assigned what they have.
    were_away: BTreeSet<String>,
    /// The nodes that were assigned a revision which settles nowhere, by the UID of the SharingPolicy.
    reached: BTreeMap<(Option<String>, Key), BTreeSet<String>>,
    /// The last revisions that were halted, by the UID of the SharingPolicy.
    halted: BTreeMap<String, Vec<Key>>,
    /// When each node was assigned what it has.
    assigned_at: BTreeMap<String, u64>,
    /// The rollout of each SharingPolicy, and when it began.
    began: BTreeMap<String, (Key, u64)>,
    is_quiet: bool,
    pub(super) outcome: Outcome,
}

impl World {
    pub(super) fn new(seed: u64, is_printed: bool) -> Self {
        let mut world = Self {
            random: Rng::new(seed),
            is_printed,
            now: 1,
            api: View::default(),
            next_id: 1,
            daemons: BTreeMap::new(),
            back_at: BTreeMap::new(),
            controller: None,
            lease_free_at: 0,
            were_away: BTreeSet::new(),
            reached: BTreeMap::new(),
            halted: BTreeMap::new(),
            assigned_at: BTreeMap::new(),
            began: BTreeMap::new(),
            is_quiet: false,
            outcome: Outcome::default(),
        };
        for number in 0..1 + world.random.below(60) {
            world.add_node(&format!("n{number}"));
        }
        world.edit("team");
        world
    }

    pub(super) fn run(&mut self) -> Result<(), String> {
        for _ in 0..EVENTFUL_STEPS {
            self.step()?;
        }
        self.settle_down();
        let (mut finished_for, mut unfinished) = (0, None);
        for _ in 0..QUIET_STEPS {
            self.step()?;
            unfinished = self.unfinished();
            finished_for = if unfinished.is_none() { finished_for + 1 } else { 0 };
            if finished_for > STABLE_STEPS {
                return Ok(());
            }
        }
        Err(format!("not finished: {}", unfinished.unwrap_or_default()))
    }

    fn print(&self, what: impl FnOnce() -> String) {
        if self.is_printed {
            println!("{:6} {}", self.now, what());
        }
    }

    fn id(&mut self) -> String {
        self.next_id += 1;
        self.next_id.to_string()
    }

    fn step(&mut self) -> Result<(), String> {
        self.now += STEP;
        if !self.is_quiet {
            self.disturb();
        }
        self.step_daemons();
        for (name, node) in &self.api.nodes {
            let is_alive = self
                .daemons
                .get(name)
                .is_some_and(|daemon| daemon.is_alive && self.now >= daemon.overridden_until);
            if !node.is_ready || !is_alive {
                self.were_away.insert(name.clone());
            }
        }
        self.step_controller()
    }

    fn add_node(&mut self, name: &str) {
        let uid = self.id();
        let pool = if self.random.chance(80) { "a" } else { "b" };
        let labels = [("pool".to_owned(), pool.to_owned())].into();
        self.api.nodes.insert(name.to_owned(), NodeFacts { uid, labels, is_ready: true });
        let daemon = Daemon::new(self.random.below(3), self.random.below(100));
        self.daemons.insert(name.to_owned(), daemon);
        self.api.gpu_nodes.remove(name);
        self.were_away.remove(name);
    }

    fn step_daemons(&mut self) {
        let names: Vec<String> = self.daemons.keys().cloned().collect();
        for name in names {
            let Some(node) = self.api.nodes.get(&name).cloned() else { continue };
            if !self.api.gpu_nodes.contains_key(&name) {
                if self.daemons[&name].is_alive && self.random.chance(50) {
                    let object = self.gpu_node(&name, &node.uid);
                    self.api.gpu_nodes.insert(name.clone(), object);
                }
                continue;
            }
            let (Some(object), Some(daemon)) =
                (self.api.gpu_nodes.get_mut(&name), self.daemons.get_mut(&name))
            else {
                continue;
            };
            let effect = daemon.step(object, self.now, &mut self.random);
            if let Some(status) = effect.status {
                object.status = Some(status);
                self.next_id += 1;
                object.metadata.resource_version = Some(self.next_id.to_string());
            }
            let node = self.api.nodes.get_mut(&name);
            if self.back_at.get(&name).is_some_and(|at| self.now >= *at) {
                self.back_at.remove(&name);
                daemon.is_alive = true;
                node.into_iter().for_each(|node| node.is_ready = true);
            } else if effect.kills_node {
                daemon.is_alive = false;
                node.into_iter().for_each(|node| node.is_ready = false);
                self.back_at.insert(name.clone(), self.now + NODE_START_SECONDS);
                self.print(|| format!("{name} dies of what it was assigned"));
            }
        }
    }

    fn gpu_node(&mut self, name: &str, owner: &str) -> GpuNode {
        let mut object = GpuNode::new(name, GpuNodeSpec::default());
        object.metadata.uid = Some(self.id());
        object.metadata.resource_version = Some(self.id());
        object.metadata.generation = Some(1);
        object.metadata.owner_references = Some(vec![OwnerReference {
            kind: "Node".to_owned(),
            name: name.to_owned(),
            uid: owner.to_owned(),
            ..OwnerReference::default()
        }]);
        object
    }

    // People, and accidents.

    fn disturb(&mut self) {
        let names: Vec<String> = self.api.nodes.keys().cloned().collect();
        for name in &names {
            if self.random.chance(1) && self.random.chance(40) {
                self.disturb_node(name);
            }
        }
        if self.random.chance(1) {
            self.edit("team");
        }
        if self.random.chance(1) {
            match self.api.policies.remove("other") {
                Some(_) => self.print(|| "the SharingPolicy other is deleted".to_owned()),
                None => self.edit("other"),
            }
        }
        if self.random.chance(2) {
            self.annotate();
        }
        if self.random.chance(3) && self.controller.is_some() {
            self.controller_dies();
        }
        if self.random.chance(5)
            && let Some(controller) = &mut self.controller
        {
            let kind = self.random.below(3) as usize;
            controller.silent_until[kind] = self.now + u64::from(self.random.below(120));
        }
    }

    fn disturb_node(&mut self, name: &str) {
        let Some(daemon) = self.daemons.get_mut(name) else { return };
        let Some(node) = self.api.nodes.get_mut(name) else { return };
        match self.random.below(7) {
            0 | 1 => node.is_ready = !node.is_ready,
            2 => daemon.is_alive = !daemon.is_alive,
            3 => daemon.overridden_until = self.now + u64::from(self.random.below(600)),
            4 => {
                self.api.gpu_nodes.remove(name);
            }
            5 => self.add_node(name),
            _ => {
                let pool = if self.random.chance(50) { "a" } else { "b" };
                node.labels.insert("pool".to_owned(), pool.to_owned());
                self.were_away.insert(name.to_owned());
            }
        }
        self.print(|| format!("{name} is disturbed"));
    }

    /// A person applies a SharingPolicy.
    fn edit(&mut self, name: &str) {
        let behaviour = self.random.of(&Behaviour::ALL);
        let number = self.random.below(4);
        let parameters = json!({"behaviour": behaviour.text(), "number": number});
        let stack = vec![StackEntry {
            name: "p".to_owned(),
            reference: None,
            shipped: Some(true),
            parameters: parameters.as_object().cloned(),
            permissions: None,
            on_fault: None,
        }];
        let soak = || Some("10s".to_owned());
        let percent = |percent| Step { percent: Some(percent), soak: soak(), ..Step::default() };
        let canaries = Step { nodes_per_model: Some(1 + self.random.below(2)), soak: soak(), percent: None };
        let steps = match self.random.below(3) {
            0 => vec![canaries, percent(10), percent(100)],
            1 => vec![canaries, percent(25), percent(50), percent(100)],
            _ => vec![percent(5), percent(100)],
        };
        let halt_at = self.random.chance(50).then(|| HaltAt {
            nodes: Some(1 + self.random.below(5)),
            percent: Some(1 + self.random.below(30)),
        });
        let spec = SharingPolicySpec {
            priority: Some(if name == "other" { self.random.of(&[-1, 0, 1]) } else { 0 }),
            node_selector: match self.random.below(3) {
                0 => LabelSelector::default(),
                _ => LabelSelector {
                    match_labels: Some([("pool".to_owned(), "a".to_owned())].into()),
                    ..LabelSelector::default()
                },
            },
            stack,
            gate: None,
            rollout: Some(RolloutSpec {
                steps,
                per_second: Some(1 + self.random.below(10)),
                halt_at,
                on_halt: self.random.chance(30).then_some(OnHalt::Hold),
            }),
        };
        self.print(|| format!("SharingPolicy {name} is applied: {behaviour:?} {number}, {:?}", spec.rollout));
        let (uid, version) = (self.id(), self.id());
        let object = self.api.policies.entry(name.to_owned()).or_insert_with(|| {
            let mut object = SharingPolicy::new(name, SharingPolicySpec::default());
            object.metadata.uid = Some(uid);
            object.metadata.generation = Some(0);
            object
        });
        object.spec = spec;
        object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
        object.metadata.resource_version = Some(version);
    }

    fn annotate(&mut self) {
        let version = self.id();
        let Some(object) = self.api.policies.get_mut("team") else { return };
        let Some(rollout) = object.status.as_ref().and_then(|status| status.rollout.clone()) else { return };
        let annotations = object.metadata.annotations.get_or_insert_default();
        let what = match self.random.below(5) {
            0 if annotations.remove(PAUSED).is_some() => "resumed",
            0 => {
                annotations.insert(PAUSED.to_owned(), "true".to_owned());
                "paused"
            }
            1 => {
                annotations.insert(UNDO.to_owned(), format!("{}/{}", rollout.revision, rollout.attempt));
                "undone"
            }
            _ => {
                let next = format!("{}/{}", rollout.revision, rollout.attempt + 1);
                annotations.insert(ATTEMPT.to_owned(), next);
                "tried again"
            }
        };
        object.metadata.resource_version = Some(version);
        self.print(|| format!("the rollout is {what}"));
    }

    fn controller_dies(&mut self) {
        self.controller = None;
        self.lease_free_at = self.now + LEASE_SECONDS + u64::from(self.random.below(60));
        self.print(|| "the controller dies".to_owned());
    }

    /// Everything comes back, and nothing more happens.
    fn settle_down(&mut self) {
        self.is_quiet = true;
        self.print(|| "everything comes back".to_owned());
        for node in self.api.nodes.values_mut() {
            node.is_ready = true;
        }
        for daemon in self.daemons.values_mut() {
            (daemon.is_alive, daemon.overridden_until) = (true, 0);
        }
        let version = self.id();
        for object in self.api.policies.values_mut() {
            if let Some(annotations) = &mut object.metadata.annotations {
                annotations.remove(PAUSED);
            }
            object.metadata.resource_version = Some(version.clone());
        }
        if let Some(controller) = &mut self.controller {
            controller.silent_until = [0; 3];
        }
    }

    // The controller.

    fn step_controller(&mut self) -> Result<(), String> {
        if self.controller.is_none() && self.now >= self.lease_free_at {
            self.print(|| "a controller begins".to_owned());
            self.controller = Some(Controller {
                view: self.api.clone(),
                memory: Memory::default(),
                since: self.now,
                silent_until: [0; 3],
            });
        }
        let Some(mut controller) = self.controller.take() else { return Ok(()) };
        self.deliver(&mut controller);
        let resolutions = resolutions(&controller.view);
        let second = i64::try_from(self.now).unwrap_or(0);
        let now = Now {
            since_start: Duration::from_secs(self.now - controller.since),
            wall: Time(Timestamp::from_second(second).unwrap_or(Timestamp::MAX)),
        };
        let plan = plan(&controller.view, &mut controller.memory, &resolutions, &now);
        self.controller = Some(controller);
        let mut assignments: BTreeMap<&str, u32> = BTreeMap::new();
        for assignment in &plan.assignments {
            *assignments.entry(assignment.stack.policy.as_str()).or_default() += 1;
        }
        for (policy, assignments) in assignments {
            let most = self.api.policies.get(policy).map(|object| object.spec.per_second());
            if most.is_some_and(|most| assignments > most.max(10)) {
                return Err(format!("{assignments} stacks assigned at a time"));
            }
        }
        for (name, status) in plan.statuses {
            self.write_status(&name, status)?;
            if self.dies_between() {
                return Ok(());
            }
        }
        for assignment in plan.assignments {
            self.write_stack(assignment)?;
            if self.dies_between() {
                return Ok(());
            }
        }
        Ok(())
    }

    fn dies_between(&mut self) -> bool {
        let dies = !self.is_quiet && self.random.chance(1) && self.random.chance(20);
        if dies {
            self.controller_dies();
        }
        dies
    }

    /// Events reach the controller late, and not at once.
    fn deliver(&mut self, controller: &mut Controller) {
        let [nodes, gpu_nodes, policies] = controller.silent_until.map(|until| self.now < until);
        let view = &mut controller.view;
        if !nodes {
            deliver(&self.api.nodes, &mut view.nodes, &mut self.random);
        }
        if !gpu_nodes {
            deliver(&self.api.gpu_nodes, &mut view.gpu_nodes, &mut self.random);
        }
        if !policies {
            deliver(&self.api.policies, &mut view.policies, &mut self.random);
        }
    }

    /// Server-side apply with the version that the controller has read: another one is a conflict.
    fn write_status(&mut self, name: &str, status: SharingPolicyStatus) -> Result<(), String> {
        let version = self.id();
        let Some(controller) = &mut self.controller else { return Ok(()) };
        let Some(object) = self.api.policies.get_mut(name) else { return Ok(()) };
        let Some(read) = controller.view.policies.get(name) else { return Ok(()) };
        if read.metadata.resource_version != object.metadata.resource_version {
            return Ok(());
        }
        let phase = |status: &Option<SharingPolicyStatus>| {
            let rollout = status.as_ref().and_then(|status| status.rollout.as_ref());
            rollout.map(|rollout| (rollout.phase, rollout.step, rollout.revision.clone(), rollout.attempt))
        };
        let before = phase(&object.status);
        object.status = Some(status);
        object.metadata.resource_version = Some(version);
        let after = phase(&object.status);
        for one in object.status.iter().flat_map(|status| status.halted.iter().flatten()) {
            let key = Key { policy: name.to_owned(), revision: one.revision.clone(), attempt: one.attempt };
            let halted = self.halted.entry(object.metadata.uid.clone().unwrap_or_default()).or_default();
            if !halted.contains(&key) {
                halted.push(key);
                let excess = halted.len().saturating_sub(HALTED_MAX);
                halted.drain(..excess);
                self.outcome.halted += 1;
            }
        }
        if let Some((_, _, revision, attempt)) = &after {
            let key = Key { policy: name.to_owned(), revision: revision.clone(), attempt: *attempt };
            if self.began.get(name).is_none_or(|(known, _)| *known != key) {
                self.began.insert(name.to_owned(), (key, self.now));
            }
        }
        if before != after {
            let is_complete = after.as_ref().is_some_and(|after| after.0 == RolloutPhase::Complete);
            self.outcome.complete += u64::from(is_complete);
            if self.is_printed {
                println!("{:6} {name}: {:?}", self.now, object.status.as_ref().map(|status| &status.rollout));
            }
        }
        controller.view.policies.insert(name.to_owned(), object.clone());
        let status = object.status.clone().unwrap_or_default();
        let step = status.rollout.as_ref().map_or(0, |rollout| rollout.step);
        let fails = status.resolved.is_some_and(|resolved| {
            let same = status.rollout.is_some_and(|rollout| rollout.revision == resolved.revision);
            same && behaviour(&resolved.entries).fails_everywhere()
        });
        if fails && step > 1 {
            return Err(format!("{name}: a revision that settles nowhere has reached step {step}"));
        }
        Ok(())
    }

    fn write_stack(&mut self, assignment: Assignment) -> Result<(), String> {
        let version = self.id();
        let Some(controller) = &mut self.controller else { return Ok(()) };
        let Some(object) = self.api.gpu_nodes.get_mut(&assignment.node) else { return Ok(()) };
        let Some(read) = controller.view.gpu_nodes.get(&assignment.node) else { return Ok(()) };
        let is_same = |one: &GpuNode, other: &GpuNode| {
            (&one.metadata.uid, &one.metadata.resource_version)
                == (&other.metadata.uid, &other.metadata.resource_version)
        };
        if !is_same(read, object) {
            return Ok(());
        }
        let key = Key::of(&assignment.stack);
        let behaviour = behaviour(&assignment.stack.entries);
        let is_new = object.spec.stack.as_ref().map(Key::of) != Some(key.clone());
        object.spec.stack = Some(assignment.stack);
        object.metadata.generation = object.metadata.generation.map(|generation| generation + 1);
        object.metadata.resource_version = Some(version);
        controller.view.gpu_nodes.insert(assignment.node.clone(), object.clone());
        if !is_new {
            return Err(format!("{} was assigned the same again", assignment.node));
        }
        self.outcome.assignments += 1;
        self.assigned_at.insert(assignment.node.clone(), self.now);
        self.were_away.remove(&assignment.node);
        if self.is_printed {
            println!("{:6} {} is assigned {key:?}", self.now, assignment.node);
        }
        if behaviour.fails_everywhere() {
            let uid = object.metadata.uid.clone().unwrap_or_default();
            let policy = self.api.policies.get(&key.policy).and_then(|policy| policy.metadata.uid.clone());
            let reached = self.reached.entry((policy, key.clone())).or_default();
            reached.insert(uid);
            if reached.len() > REACHED_MAX {
                return Err(format!("{key:?} settles nowhere and has reached {} nodes", reached.len()));
            }
        }
        self.check_assigned(&assignment.node, &key)
    }

    /// Checks a node that was just assigned a stack.
    fn check_assigned(&self, node: &str, key: &Key) -> Result<(), String> {
        let Some(policy) = self.api.policies.get(&key.policy) else { return Ok(()) };
        let read = self.controller.as_ref().map(|controller| &controller.view);
        let known = read.and_then(|view| view.policies.get(&key.policy));
        // The controller may have read an object that was deleted since.
        if known.and_then(|known| known.metadata.uid.clone()) != policy.metadata.uid {
            return Ok(());
        }
        let status = policy.status.clone().unwrap_or_default();
        let is_good = status
            .good
            .as_ref()
            .is_some_and(|good| (&good.revision, good.attempt) == (&key.revision, key.attempt));
        if is_good {
            return Ok(());
        }
        let rollout = status.rollout.unwrap_or_default();
        if (&rollout.revision, rollout.attempt) != (&key.revision, key.attempt) {
            return Err(format!("{node} was assigned {key:?}, and the status has {rollout:?}"));
        }
        let uid = policy.metadata.uid.clone().unwrap_or_default();
        if self.halted.get(&uid).is_some_and(|halted| halted.contains(key)) {
            return Err(format!("{node} was assigned {key:?}, which was halted"));
        }
        if known.and_then(|known| known.metadata.generation) != policy.metadata.generation {
            return Ok(());
        }
        let Some(step) = policy.spec.steps().get(rollout.step as usize - 1).cloned() else { return Ok(()) };
        let is_counted = |name: &&String| {
            let object = &self.api.gpu_nodes[*name];
            let is_assigned = object.spec.stack.as_ref().map(Key::of).as_ref() == Some(key);
            let is_member = read.is_some_and(|view| is_owned(view, &key.policy, object));
            // What an earlier rollout of the same revision has left does not count.
            let began = self.began.get(&key.policy).map_or(0, |(_, began)| *began);
            let is_new = self.assigned_at.get(*name).is_some_and(|at| *at >= began);
            is_assigned && is_member && is_new && !self.were_away.contains(*name)
        };
        let assigned: Vec<&String> = self.api.gpu_nodes.keys().filter(is_counted).collect();
        if let Some(per_model) = step.nodes_per_model {
            let model = |name: &str| self.daemons.get(name).map(|daemon| daemon.model);
            let same = assigned.iter().filter(|name| model(name) == model(node)).count();
            // A GPUNode that was created again has no model until its daemon has reported.
            if same > per_model as usize {
                return Err(format!(
                    "{same} nodes of a model were assigned it in a step of {per_model}: {assigned:?}"
                ));
            }
        } else if let Some(percent) = step.percent.filter(|percent| *percent < 100) {
            let total = read.map_or(0, |view| view.gpu_nodes.len());
            let most = (total * percent as usize).div_ceil(100);
            if assigned.len() > most {
                return Err(format!(
                    "{} of {total} nodes were assigned it in a step of {percent} %",
                    assigned.len()
                ));
            }
        }
        Ok(())
    }

    /// What has not ended.
    fn unfinished(&mut self) -> Option<String> {
        if self.controller.is_none() {
            return Some("there is no controller".to_owned());
        }
        let mut undone = 0;
        for (name, policy) in &self.api.policies {
            let status = policy.status.clone().unwrap_or_default();
            let Some(rollout) = status.rollout else { return Some(format!("{name} has no rollout")) };
            let of_policy =
                |object: &&GpuNode| object.spec.stack.as_ref().is_some_and(|stack| stack.policy == *name);
            let assigned: Vec<(&GpuNode, Key)> = self
                .api
                .gpu_nodes
                .values()
                .filter(of_policy)
                .filter(|object| is_owned(&self.api, name, object))
                .filter_map(|object| object.spec.stack.as_ref().map(|stack| (object, Key::of(stack))))
                .collect();
            let good = status.good.map(|good| Key {
                policy: name.clone(),
                revision: good.revision,
                attempt: good.attempt,
            });
            match rollout.phase {
                RolloutPhase::Complete => {
                    let key =
                        Key { policy: name.clone(), revision: rollout.revision, attempt: rollout.attempt };
                    if good.as_ref() != Some(&key) {
                        return Some(format!("{name} is complete, and {good:?} is good"));
                    }
                    // While too many nodes have failed, those that have joined since are not assigned it.
                    let mut conditions = status.conditions.iter().flatten();
                    let has_failed = conditions.any(|one| one.reason == "NodesFailed");
                    if let Some((object, other)) = assigned.iter().find(|(_, other)| *other != key)
                        && !has_failed
                    {
                        return Some(format!(
                            "{name} is complete, and {:?} has {other:?}",
                            object.metadata.name
                        ));
                    }
                }
                RolloutPhase::Halted if policy.spec.on_halt() == OnHalt::Undo => {
                    if let Some(good) = &good {
                        if let Some((object, other)) = assigned.iter().find(|(_, other)| other != good) {
                            return Some(format!(
                                "{name} is undone, and {:?} has {other:?}",
                                object.metadata.name
                            ));
                        }
                        undone += 1;
                    }
                }
                RolloutPhase::Halted => {}
                _ if rollout.total == 0 => {}
                phase => return Some(format!("{name} is {phase:?}: {rollout:?}")),
            }
        }
        self.outcome.undone = undone;
        None
    }
}

/// Whether the policy decides the stack of the node.
fn is_owned(view: &View, policy: &str, object: &GpuNode) -> bool {
    let node = object.metadata.name.as_ref().and_then(|name| view.nodes.get(name));
    let Some(node) = node else { return false };
    let matches = |one: &SharingPolicy| {
        let labels = one.spec.node_selector.match_labels.clone().unwrap_or_default();
        labels.iter().all(|(key, value)| node.labels.get(key) == Some(value))
    };
    let matching = view.policies.iter().filter(|(_, one)| matches(one));
    let best = matching.min_by_key(|(name, one)| (-one.spec.priority.unwrap_or(0), (*name).clone()));
    best.is_some_and(|(name, _)| name == policy)
}

/// Brings most of what differs up to date.
fn deliver<T: Clone + PartialEq>(from: &BTreeMap<String, T>, to: &mut BTreeMap<String, T>, random: &mut Rng) {
    let names: BTreeSet<String> = from.keys().chain(to.keys()).cloned().collect();
    for name in names {
        if from.get(&name) == to.get(&name) || random.chance(30) {
            continue;
        }
        match from.get(&name) {
            Some(object) => to.insert(name, object.clone()),
            None => to.remove(&name),
        };
    }
}

fn behaviour(entries: &[EntrySpec]) -> Behaviour {
    let parameters = entries.first().and_then(|entry| entry.parameters.clone());
    Behaviour::parse(&parameters.unwrap_or_default())
}

/// Nothing is in a registry here.
fn resolutions(view: &View) -> BTreeMap<String, Resolution> {
    let resolution = |(name, policy): (&String, &SharingPolicy)| {
        let of = (policy.metadata.generation.unwrap_or(0), None);
        (name.clone(), Resolution { of, entries: entries(&policy.spec.stack, &BTreeMap::new()) })
    };
    view.policies.iter().map(resolution).collect()
}
