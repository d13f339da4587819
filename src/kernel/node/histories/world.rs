//! The node of a history: the kernel, its store, and the pods that the kubelet really runs.

use super::claims::Prepared;
use super::held::{Held, Sources};
use super::op::Op;
use crate::drain::marks::{AtDeadline, Author, Order, Owners};
use crate::evidence::kubelet_view::{KubeletAge, ListedHolding, PodList, ReconcileView};
use crate::grants::history::HistoryLimit;
use crate::hardware::device_access::{DeviceAccess, NamedPart};
use crate::hardware::gpu::{Inventory, Part, Reading};
use crate::hardware::judgement::TriagedReading;
use crate::hardware::triage::TriageAnswer;
use crate::ids::names::{AllocationId, DeviceId, GpuId, PartId, Resource};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::command::{Attempt, Command, StackAnswer, Verdict};
use crate::node::decide::decide;
use crate::node::invariants::{
    health_follows_from_judgements_of_active_policies, i1_no_two_pods_hold_one_device,
    i2_grants_never_exceed_a_part, i3_a_healthy_device_is_held_or_grantable,
    i4_nothing_new_on_a_gpu_that_grants_nothing, i5_the_store_restores_the_ledger,
    i6_a_grant_ends_only_allocations_that_newer_ones_replace, i6_ends_agree_with_the_container_runtime,
    i6_no_allocation_of_a_running_pod_ends, i10_an_id_is_delisted_only_after_its_wait,
    i11_generation_grows_by_one, i14_a_gpu_changes_its_api_only_when_nothing_holds_it,
    pruning_loses_nothing_that_lives,
};
use crate::node::ledger::Ledger;
use crate::node::record::{Meta, Record, RecordKey, Write, health_records, health_writes, writes};
use crate::node::refusal::Refusal;
use crate::node::restore::restore;
use crate::node::rules::Rules;
use crate::node::tick::next_tick;
use crate::policy::decider::Decider;
use crate::policy::hooks::{AdmitRequest, FaultKind, Terms};
use crate::policy::stack::StackEntry;
use crate::sharing::listing::listing;
use crate::sharing::offer::{Consumes, OfferLine, PartOffer};
use crate::sharing::via::KubeletApi;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(super) struct World {
    pub(super) ledger: Ledger,
    pub(super) disk: BTreeMap<RecordKey, Record>,
    pub(super) now: Now,
    /// The containers of running pods that hold devices.
    pub(super) pods: Vec<Held>,
    /// Running pods without devices: UID and name.
    pub(super) without_gpu: Vec<(String, String)>,
    pub(super) stale: Vec<Held>,
    /// The contents of the kubelet's checkpoint, which is not rewritten when a pod is removed.
    pub(super) checkpoint: Vec<Held>,
    /// Pod UIDs and devices of ended allocations.
    pub(super) ended_holders: BTreeSet<(String, Vec<DeviceId>)>,
    pub(super) kubelet: KubeletAge,
    pub(super) next_pod: usize,
    pub(super) sources: Sources,
    /// What the kubelet has had prepared.
    pub(super) claims: Prepared,
}

/// The parts of the node: three GPUs, and a MIG instance of the last.
pub(super) const PARTS: usize = 4;
pub(super) const MIG: usize = 3;

pub(super) fn gpu(i: usize) -> GpuId {
    GpuId::parse(&format!("GPU-{i}")).unwrap()
}

pub(super) fn part_id(i: usize) -> PartId {
    if i == MIG { PartId::parse("MIG-3").unwrap() } else { gpu(i).as_part().clone() }
}

pub(super) fn resource(i: usize) -> Resource {
    Resource::parse(["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mem"][i]).unwrap()
}

pub(super) fn part(i: usize) -> Part {
    Part { id: part_id(i), memory_mib: 1000, ..Part::whole_gpu(gpu(if i == MIG { 2 } else { i }), 0) }
}

pub(super) fn shape(i: usize) -> Vec<OfferLine> {
    let whole = OfferLine { resource: resource(0), count: 1, consumes: Consumes::Whole };
    let slice = |r, count, memory_mib| OfferLine {
        resource: resource(r),
        count,
        consumes: Consumes::Slice { memory_mib, compute_percent: 100 / count },
    };
    match i {
        0 => vec![whole],
        1 => vec![slice(1, 4, 250)],
        2 => vec![whole, slice(1, 3, 333)],
        3 => vec![slice(1, 4, 250), slice(2, 2, 500), whole],
        4 => vec![slice(2, 3, 400)],
        _ => vec![],
    }
}

impl World {
    /// A node whose history keeps this number of ended allocations, and whose GPUs are granted through the device plugin
    /// API.
    pub(super) fn new(history: usize) -> Self {
        Self::with(history, KubeletApi::DevicePlugin)
    }

    pub(super) fn with(history: usize, via: KubeletApi) -> Self {
        let now = Now { wall_ms: 1_000_000, mono_ms: 1_000_000 };
        let meta = Record::Meta(Meta { store: 7, next_number: 1, kubelet_seen_wall_ms: None });
        let disk: BTreeMap<_, _> = [(meta.key(), meta)].into();
        let history = HistoryLimit { allocations: history, ..HistoryLimit::default() };
        let rules = Arc::new(Rules { history, via, ..Rules::default() });
        let ledger = restore(disk.values().cloned().collect(), now).with_rules(&rules);
        let kubelet = KubeletAge { created_wall_ms: 5, created_mono_ms: 5 };
        let mut world = Self {
            ledger,
            disk,
            now,
            pods: vec![],
            without_gpu: vec![],
            stale: vec![],
            checkpoint: vec![],
            ended_holders: BTreeSet::new(),
            kubelet,
            next_pod: 0,
            sources: Sources::default(),
            claims: Prepared::new(),
        };
        world.step(&Op::Scan { mask: (1 << PARTS) - 1 });
        world.step(&Op::NameParts { mask: (1 << PARTS) - 1 });
        world.step(&Op::Offer { shape: 2 });
        world
    }

    /// Decides and applies one command as the keeper does, and checks all invariants.
    pub(super) fn apply(&mut self, command: &Command) -> Result<Entry, Refusal> {
        let verdict = decide(&self.ledger, command, self.now);
        assert_eq!(verdict, decide(&self.ledger, command, self.now), "same input, same answer");
        let Verdict { entry, refusal } = verdict;
        let before = self.ledger.clone();
        if !entry.changes.is_empty() {
            self.ledger.apply(&entry);
            for write in writes(&before, &entry, &self.ledger) {
                match write {
                    Write::Put(record) => {
                        self.disk.insert(record.key(), record);
                    }
                    Write::Delete(key) => {
                        self.disk.remove(&key);
                    }
                }
            }
            let written = self.disk.values().filter_map(|record| match record {
                Record::Health(health) => Some((health.gpu.clone(), health.clone())),
                _ => None,
            });
            let (written, now) = (written.collect(), health_records(&self.ledger));
            for write in health_writes(&written, &now) {
                match write {
                    Write::Put(record) => self.disk.insert(record.key(), record),
                    Write::Delete(key) => self.disk.remove(&key),
                };
            }
            i11_generation_grows_by_one(&before, &self.ledger);
        }
        pruning_loses_nothing_that_lives(&before, &self.ledger, &entry, self.ledger.rules.history);
        self.check_no_ended_allocation_returns(&before, &entry);
        self.forget_ended_claims(&before, command, &entry);
        i4_nothing_new_on_a_gpu_that_grants_nothing(&before, &entry, &self.pods);
        i6_a_grant_ends_only_allocations_that_newer_ones_replace(&before, &self.ledger, command, &entry);
        if let Command::Reconcile(view) = command {
            i6_ends_agree_with_the_container_runtime(&before, &self.ledger, view, &entry);
        }
        i10_an_id_is_delisted_only_after_its_wait(&before, &self.ledger, &entry, self.now);
        i14_a_gpu_changes_its_api_only_when_nothing_holds_it(&before, &entry);
        self.check_state();
        refusal.map_or(Ok(entry), Err)
    }

    fn check_state(&self) {
        i1_no_two_pods_hold_one_device(&self.ledger);
        i2_grants_never_exceed_a_part(&self.ledger);
        i3_a_healthy_device_is_held_or_grantable(&self.ledger);
        i5_the_store_restores_the_ledger(&self.ledger, &self.disk, self.now);
        health_follows_from_judgements_of_active_policies(&self.ledger);
    }

    /// Requests devices as the kubelet's front end does: a refusal on a GPU that grants nothing new is repeated after a
    /// reconcile pass.
    pub(super) fn allocate(
        &mut self,
        resource: &Resource,
        mut devices: Vec<DeviceId>,
    ) -> Result<AllocationId, Refusal> {
        devices.sort();
        devices.dedup();
        let asked_mono_ms = self.now.mono_ms;
        match self.attempt(resource, devices.clone(), Attempt::First) {
            Err(refusal) if refusal.reconcile_may_resolve() => {
                if !matches!(refusal, Refusal::Held { .. } | Refusal::DoesNotFit { .. }) {
                    self.now.mono_ms += 1;
                    self.reconcile(true, true, true);
                }
                self.attempt(resource, devices, Attempt::Last { asked_mono_ms })
            }
            result => result,
        }
    }

    fn attempt(
        &mut self,
        resource: &Resource,
        devices: Vec<DeviceId>,
        attempt: Attempt,
    ) -> Result<AllocationId, Refusal> {
        let command = Command::Allocate {
            request: AdmitRequest { resource: resource.clone(), devices, claim: None },
            answer: StackAnswer::Allow { by: vec!["baseline".into()], terms: Terms::default() },
            evaluated: Some(self.ledger.generation),
            attempt,
        };
        let entry = self.apply(&command)?;
        Ok(entry
            .changes
            .iter()
            .find_map(|c| match c {
                Change::Granted(a) => Some(a.id),
                _ => None,
            })
            .unwrap())
    }

    pub(super) fn step(&mut self, op: &Op) {
        match op {
            Op::Start { resource: r, count, pick, init } => self.start(&resource(*r), *count, *pick, *init),
            Op::StartMain { which } => self.start_main(*which),
            Op::StartWithoutGpu { which } => {
                let pod = self.new_pod(Some(*which));
                self.without_gpu.push(pod);
            }
            Op::StartOnHeld { which } => self.start_on_held(*which),
            Op::Reissue { which } => self.reissue(*which),
            Op::Stop { which } if !self.pods.is_empty() => {
                self.stale = self.pods.clone();
                let uid = self.pods[which % self.pods.len()].uid.clone();
                self.pods.retain(|held| held.uid != uid);
            }
            Op::ArbitraryAllocate { resource: r, device } => {
                let id = if device % 2 == 0 {
                    DeviceId::whole(&part_id(device % 5))
                } else {
                    DeviceId::share(&part_id(device % 5), (device % 9).try_into().unwrap())
                };
                // The invariants must hold whether or not it is granted; the model has no such pod.
                let _ = self.allocate(&resource(*r), vec![id]);
            }
            Op::Deny { resource: r, device, times, fails } => {
                (0..*times).for_each(|_| self.deny(&resource(*r), *device, *fails));
            }
            Op::ForeignClient { which, times } => self.allocate_as_foreign_client(*which, *times),
            Op::Reconcile { list, checkpoint, fresh } => self.reconcile(*list, *checkpoint, *fresh),
            Op::RestartKubelet => {
                self.kubelet =
                    KubeletAge { created_wall_ms: self.now.wall_ms, created_mono_ms: self.now.mono_ms };
            }
            Op::Wait { ms } => {
                let due = next_tick(&self.ledger, self.now);
                self.now.mono_ms += ms;
                self.now.wall_ms += ms;
                let entry = self.apply(&Command::Tick).unwrap();
                let is_due = due.is_some_and(|due| due <= self.now.mono_ms);
                assert!(
                    is_due || entry.changes.is_empty(),
                    "a tick at {:?} instead of {due:?}: {entry:?}",
                    self.now
                );
            }
            Op::Cordon(i) => {
                let _ = self.apply(&Command::Cordon { gpu: gpu(*i), author: author("cordons") });
            }
            Op::Drain(i, evict) => {
                let deadline_wall_ms = evict.then_some(self.now.wall_ms + 40_000);
                let order = Order {
                    evict: *evict,
                    deadline_wall_ms,
                    at_deadline: AtDeadline::GiveUp,
                    ..Order::default()
                };
                let _ = self.apply(&Command::Drain { gpu: gpu(*i), author: author("drains"), order });
            }
            Op::StopDrain(i) => {
                let _ = self.apply(&Command::StopDrain { gpu: gpu(*i), owners: Owners::All });
            }
            Op::MarkHealthy(i) => {
                let _ =
                    self.apply(&Command::MarkHealthy { gpu: gpu(*i), by: "me".into(), why: String::new() });
            }
            Op::SetVia { gpu: i, dra } => {
                let api = if *dra { KubeletApi::Dra } else { KubeletApi::DevicePlugin };
                let _ = self.apply(&Command::SetVia { gpu: gpu(*i), api, author: author("moves") });
            }
            Op::FinishMove(i) => {
                let _ = self.apply(&Command::FinishMove { gpu: gpu(*i) });
            }
            Op::Uncordon(i) => {
                let _ = self.apply(&Command::Uncordon { gpu: gpu(*i), owners: Owners::All });
            }
            Op::Xid { gpu: i, code, again_s, by_policy, severity } => {
                let reading = Reading {
                    part: gpu(*i).as_part().clone(),
                    source: "xid".into(),
                    code: *code,
                    detail: String::new(),
                };
                let answer =
                    TriageAnswer { severity: *severity, reason: "xid".into(), again_after_s: *again_s };
                let policy = self.ledger.stack.entries.first().filter(|_| *by_policy);
                let by = policy.map_or(Decider::Baseline, StackEntry::decider);
                self.apply(&Command::ApplyTriage(TriagedReading { reading, answer, by })).unwrap();
            }
            Op::Scan { mask } => {
                let parts = (0..PARTS).filter(|i| mask & (1 << i) != 0).map(part).collect();
                self.apply(&Command::RecordScan(Inventory { parts, ..Inventory::default() })).unwrap();
            }
            Op::Forget(i) => {
                let _ = self.apply(&Command::Forget { gpu: gpu(*i) });
            }
            Op::Offer { shape: s } => {
                let offers = (0..PARTS)
                    .map(|i| (PartOffer { part: part_id(i), lines: shape((s + i) % 6) }, "test".into()))
                    .collect();
                self.apply(&Command::Offer(offers)).unwrap();
            }
            Op::Crash { foreign } => {
                self.now.mono_ms += 1;
                self.sources.crash();
                if let Some(part) = foreign {
                    self.grant_by_other_plugin(*part);
                }
                self.ledger =
                    restore(self.disk.values().cloned().collect(), self.now).with_rules(&self.ledger.rules);
                self.step(&Op::Scan { mask: (1 << PARTS) - 1 });
                self.step(&Op::NameParts { mask: (1 << PARTS) - 1 });
                self.adopt();
            }
            Op::End { which } => self.end_allocation(*which),
            Op::Pods(update) => self.show_pods(*update),
            Op::WriteStatus => self.write_status(),
            Op::Delete { which, force } => self.delete_object(*which, *force),
            Op::LoseFromCheckpoint { which } => self.lose_from_checkpoint(*which),
            Op::Evict { which, outcome } => self.evict(*which, *outcome),
            Op::ScanProcesses { host } => self.scan_processes(*host),
            Op::NameParts { mask } => {
                let named = (0..PARTS).filter(|i| mask & (1 << i) != 0).map(part_id);
                let named = named.filter_map(|id| Some((id.clone(), NamedPart::of(self.ledger.part(&id)?))));
                // A node without any name has no strategy either.
                let no_strategy = (*mask == 0).then(|| "no CDI specification".into());
                let named_parts = (*mask != 0).then(|| Arc::new(named.collect()));
                self.apply(&Command::SetDeviceAccess(DeviceAccess {
                    no_strategy,
                    by_cdi: true,
                    named_parts,
                    ..DeviceAccess::default()
                }))
                .unwrap();
            }
            Op::Activate { entries } => self.activate(*entries),
            Op::Linger { which } => self.linger(*which),
            Op::EndLingering => self.sources.lingering.clear(),
            Op::Runtime(update) => self.show_runtime(*update),
            Op::Prepare { which, resource: r, device, count } => {
                self.prepare(*which, &resource(*r), *device, *count);
            }
            Op::ReserveClaim { which, pods } => self.reserve(*which, *pods),
            Op::Unprepare { which } => self.unprepare(*which),
            Op::Stop { .. } => {}
        }
        self.claims_hold_what_was_prepared();
    }

    /// Creates the object of a new pod: its UID and name. With `reuse` it has the name of a pod that has stopped, if
    /// there is one.
    pub(super) fn new_pod(&mut self, reuse: Option<usize>) -> (String, String) {
        let free: Vec<String> =
            (0..self.next_pod).map(|n| format!("pod-{n}")).filter(|name| !self.runs_under(name)).collect();
        let uid = format!("uid-{}", self.next_pod);
        let name = reuse.and_then(|which| free.get(which % free.len().max(1)).cloned());
        let name = name.unwrap_or_else(|| format!("pod-{}", self.next_pod));
        self.next_pod += 1;
        self.sources.create_object(&uid, &name);
        (uid, name)
    }

    fn runs_under(&self, name: &str) -> bool {
        let sources = &self.sources;
        let mut held = self.pods.iter().chain(&sources.lost_from_checkpoint).chain(&sources.lingering);
        held.any(|held| held.name == name) || self.without_gpu.iter().any(|(_, known)| known == name)
    }

    /// A policy denies a request, or fails. All pods of a history are of one namespace, so that denials of pods that a
    /// source shows withdraw nothing.
    fn deny(&mut self, resource: &Resource, device: usize, fails: bool) {
        if self.ledger.stack.entries.is_empty() {
            self.activate(1);
        }
        let policy = self.ledger.stack.entries[0].label();
        let answer = match fails {
            true => StackAnswer::Faulted { policy, kind: FaultKind::Trap, detail: String::new() },
            false => StackAnswer::Deny { policy, reason: "no".into() },
        };
        let is_known = self.ledger.pods.as_ref().is_some_and(|view| view.current);
        let before = listing(&self.ledger, resource);
        let healthy: Vec<_> = before.iter().filter(|listed| listed.healthy).collect();
        let Some(listed) = healthy.get(device % healthy.len().max(1)) else { return };
        let request =
            AdmitRequest { resource: resource.clone(), devices: vec![listed.id.clone()], claim: None };
        let command = Command::Allocate { request, answer, evaluated: None, attempt: Attempt::First };
        assert!(self.apply(&command).is_err());
        if is_known && !fails {
            assert_eq!(listing(&self.ledger, resource), before, "a denial of one namespace");
        }
    }

    /// Starts a pod as the kubelet does: on devices that are listed healthy and that no pod uses.
    fn start(&mut self, resource: &Resource, count: usize, pick: usize, init: bool) {
        let in_use: BTreeSet<DeviceId> =
            self.pods.iter().filter(|p| p.resource == *resource).flat_map(|p| p.devices.clone()).collect();
        let mut free: Vec<DeviceId> = listing(&self.ledger, resource)
            .into_iter()
            .filter(|l| l.healthy && !in_use.contains(&l.id))
            .map(|l| l.id)
            .collect();
        if free.len() < count {
            return;
        }
        let first = pick % free.len();
        free.rotate_left(first);
        free.truncate(count);
        self.admit(resource, free, pick, if init { "init" } else { "main" });
    }

    /// A new pod requests these devices.
    fn admit(
        &mut self,
        resource: &Resource,
        mut devices: Vec<DeviceId>,
        pick: usize,
        container: &'static str,
    ) {
        devices.sort();
        if let Ok(allocation) = self.allocate(resource, devices.clone()) {
            let (uid, name) = self.new_pod(pick.is_multiple_of(2).then_some(pick));
            self.record(Held {
                uid,
                name,
                container,
                resource: resource.clone(),
                devices,
                allocation: Some(allocation),
            });
        }
    }

    /// The kubelet records what a container holds.
    fn record(&mut self, held: Held) {
        self.stale = self.pods.clone();
        self.pods.push(held);
        self.checkpoint.clone_from(&self.pods);
    }

    fn start_main(&mut self, which: usize) {
        let has_main = |uid: &str| self.pods.iter().any(|held| held.uid == uid && held.container == "main");
        let waiting: Vec<Held> = self.pods.iter().filter(|held| !has_main(&held.uid)).cloned().collect();
        let Some(init) = waiting.get(which % waiting.len().max(1)) else { return };
        let result = self.allocate(&init.resource, init.devices.clone());
        // A kubelet that has restarted admits the pod again.
        let is_known = init.allocation.is_some_and(|id| {
            self.ledger.sightings.get(&id).is_some_and(|sighting| sighting.is_requested_by(self.kubelet))
        });
        match result {
            Ok(allocation) => {
                self.record(Held { container: "main", allocation: Some(allocation), ..init.clone() });
            }
            Err(refusal) => {
                let newest =
                    |id| self.ledger.holders_of(&init.resource, id).last().copied() == init.allocation;
                // Without a strategy every request is refused.
                let has_strategy = self.ledger.device_access.no_strategy.is_none();
                // `List` shows the devices in a container where the kubelet gave them to another pod, too.
                let is_alone = self.pods.iter().all(|held| {
                    held.uid == init.uid || !held.devices.iter().any(|id| init.devices.contains(id))
                });
                assert!(
                    !has_strategy || !is_alone || !is_known || !init.devices.iter().all(newest),
                    "I7: an app container requested its init container's devices, but: {refusal}"
                );
            }
        }
    }

    /// Another pod is given what a running one holds: the kubelet does not prevent this (kubernetes#137534).
    fn start_on_held(&mut self, which: usize) {
        let Some(held) = self.pods.get(which % self.pods.len().max(1)).cloned() else { return };
        self.admit(&held.resource, held.devices, which, "main");
    }

    fn reissue(&mut self, which: usize) {
        if self.pods.is_empty() {
            return;
        }
        let i = which % self.pods.len();
        let held = self.pods[i].clone();
        let active = held.devices.iter().all(|id| self.ledger.may_grant_device(&held.resource, id));
        let older = held.allocation.filter(|id| self.ledger.live.contains_key(id));
        match self.allocate(&held.resource, held.devices.clone()) {
            Ok(allocation) => {
                if let Some(older) = older {
                    let overlapped = self.ledger.live.get(&older).is_none_or(|a| a.overlapped);
                    assert!(overlapped, "I7: the older allocation is overlapped or superseded");
                }
                self.pods[i].allocation = Some(allocation);
                self.checkpoint.clone_from(&self.pods);
            }
            Err(refusal) => assert!(
                !active || older.is_none(),
                "I7: the same devices were requested again, but: {refusal}"
            ),
        }
    }

    fn reconcile(&mut self, list: bool, checkpoint: bool, fresh: bool) {
        let checkpointed_pods = if fresh { &self.pods } else { &self.stale };
        let entries = checkpointed_pods.iter().map(Held::checkpointed);
        // The kubelet forgets a pod that is deleted by force.
        let listed = self.without_gpu.iter().filter(|(uid, _)| !self.sources.force_deleted.contains(uid));
        let names = self.pods.iter().map(|held| &held.name).chain(listed.map(|(_, name)| name));
        let pods = PodList {
            pods: names.map(|name| ("ns".to_owned(), name.clone())).collect(),
            held: self
                .pods
                .iter()
                // `List` has no init containers.
                .filter(|h| h.container != "init")
                .map(|h| ListedHolding {
                    namespace: "ns".into(),
                    pod: h.name.clone(),
                    container: h.container.into(),
                    resource: h.resource.clone(),
                    devices: h.devices.clone(),
                })
                .collect(),
        };
        let view = ReconcileView {
            began_mono_ms: self.now.mono_ms,
            kubelet: Some(self.kubelet),
            list: list.then_some(pods),
            checkpoint: checkpoint.then(|| entries.collect()),
            fresh,
            source_error: None,
            adopt: false,
        };
        let complete = view.list.is_some() && view.checkpoint.is_some() && view.fresh;
        // Without a checkpoint, only the view of all pods ends allocations, and whether a force-deleted pod
        // still runs is unknown.
        let without_checkpoint = view.list.is_some() && view.checkpoint.is_none();
        if checkpoint && fresh {
            self.checkpoint.clone_from(&self.pods);
        }
        let before = self.ledger.clone();
        let entry = self.apply(&Command::Reconcile(view)).unwrap();
        let mut running = self.pods.clone();
        running.retain(|held| !without_checkpoint || !self.sources.force_deleted.contains(&held.uid));
        i6_no_allocation_of_a_running_pod_ends(&before, &entry, &running, complete || without_checkpoint);
        self.i6_ends_agree_with_the_view_of_all_pods(&before, &entry, checkpoint);
        if checkpoint && fresh {
            self.i1_devices_under_two_pods_are_known();
        }
    }

    /// I1: after a pass with a fresh checkpoint the ledger knows which containers hold a device of another pod, too.
    fn i1_devices_under_two_pods_are_known(&self) {
        for held in &self.pods {
            let Some((id, sighting)) =
                held.allocation.and_then(|id| Some((id, self.ledger.sightings.get(&id)?)))
            else {
                continue;
            };
            let shares = |other: &Held| {
                other.uid != held.uid
                    && other.resource == held.resource
                    && other.devices.iter().any(|device| held.devices.contains(device))
            };
            // A pass that began in the millisecond of the grant may be older.
            if sighting.since_mono_ms < self.now.mono_ms {
                assert_eq!(sighting.contested, self.pods.iter().any(shares), "I1: {id} of {}", held.uid);
            }
        }
    }
}

fn author(by: &str) -> Author {
    Author::api(by.into(), String::new())
}
