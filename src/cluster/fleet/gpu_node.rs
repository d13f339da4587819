//! Keeps the GPUNode of this node up to date: what `kubectl get gpunodes` shows, and what controllers read about the GPUs.
//!
//! A change of health, drains or conditions is written within seconds. A change of the numbers of devices is written with the next such
//! change, or after five minutes. With thousands of nodes this limits the load: each write is a new revision in etcd, and an event
//! for every watcher.

use super::super::condition::{Availability, availability};
use super::super::settings::{FleetTask, NodeStackState, PolicyPulled, Settings};
use super::{ErrorSource, NO_KIND};
use berth_core::KernelHandle;
use berth_fleet::gpu_node::{
    FailedRevision, GPUS_BYTES_MAX, GPUS_MAX, GpuNode, GpuNodeSpec, GpuNodeStatus, GpuStatus, MODELS_MAX,
    StackPhase, StackStatus, Summary,
};
use berth_fleet::{FIELD_MANAGER, GROUP};
use berth_kernel::hardware::health::HealthState;
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::ledger::{GpuState, Ledger};
use berth_kernel::policy::stack::{StackOrigin, last_settled};
use berth_kube::{
    Backoff, ConditionContent, REFRESH_MEAN, RequestError, after_loss, conditions, jittered, random, request,
    retry_at, time,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use std::future::pending;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// The mean time after which changed numbers of devices are written if nothing else has changed.
const COUNTS_MEAN: Duration = Duration::from_secs(300);
/// The longest delay before any other change is written. The delay is random, since one event may change all nodes at once.
const CHANGE_MAX: Duration = Duration::from_secs(5);
/// How many changes may be written without a wait between them; after that, one in each [`CHANGE_INTERVAL`].
const BURST: u32 = 3;
/// See [`BURST`].
const CHANGE_INTERVAL: Duration = Duration::from_secs(10);
/// The longest text that stands for a mark; the name of a caller or of a GPUMaintenance may have 253 bytes.
const MARK_BYTES_MAX: usize = 48;
/// The longest model name.
const MODEL_BYTES_MAX: usize = 96;

/// Keeps the object up to date; never returns.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle, task: &FleetTask) {
    let (mut snapshots, mut stacks) = (kernel.watch(), task.stack.subscribe());
    let mut writer = GpuNodeWriter {
        gpu_nodes: Api::all(client.clone()),
        nodes: Api::all(client),
        settings,
        conditions: None,
        backoff: Backoff::new(settings.connection.retry_interval),
    };
    let mut schedule = WriteSchedule::new(Instant::now());
    // A write before the GPUNode was read would remove the phase of the stack from the status.
    if stacks.wait_for(|stack| stack.is_read).await.is_err() {
        return pending().await;
    }
    loop {
        let report = Report::of(&snapshots.borrow_and_update(), &stacks.borrow_and_update());
        let due = schedule.due(&report, Instant::now(), random());
        if due <= Instant::now() {
            let written = writer.write(&report, kernel.now().wall_ms).await;
            match &written {
                Ok(()) => schedule.note_written(report, Instant::now(), random()),
                Err(error) => {
                    schedule.note_failed(retry_at(&settings.connection, &mut writer.backoff, error.code()));
                }
            }
            task.set_error(ErrorSource::GpuNode, written.err().map(|error| error.why));
            continue;
        }
        tokio::select! {
            changed = snapshots.changed() => {
                if changed.is_err() {
                    return pending().await;
                }
                sleep(settings.batch_window).await;
            }
            Ok(()) = stacks.changed() => {}
            () = sleep_until(due) => {}
        }
    }
}

/// What is reported, without times.
#[derive(Clone, Debug, PartialEq)]
struct Report {
    status: GpuNodeStatus,
    conditions: Vec<ConditionContent>,
}

impl Report {
    fn of(ledger: &Ledger, stack: &NodeStackState) -> Self {
        let Availability { is_available, reason, message } = availability(ledger);
        let available = ConditionContent { type_: "GPUsAvailable", status: is_available, reason, message };
        let pulled = stack.pulled.clone().map(|PolicyPulled { is_pulled, reason, message }| {
            ConditionContent { type_: "PolicyPulled", status: is_pulled, reason, message }
        });
        let conditions = [available].into_iter().chain(synced(stack)).chain(pulled).collect();
        let of_stack = GpuNodeStatus {
            observed_generation: stack.generation,
            stack: Some(stack_status(ledger, stack)),
            ..status(ledger)
        };
        Self { status: of_stack, conditions }
    }

    /// The same without the numbers of devices.
    fn without_counts(&self) -> Self {
        let mut report = self.clone();
        for gpu in report.status.gpus.iter_mut().flatten() {
            (gpu.offered, gpu.held) = (0, 0);
        }
        if let Some(summary) = &mut report.status.summary {
            (summary.offered, summary.held) = (0, 0);
        }
        report
    }
}

/// Whether the node has the stack that the GPUNode names; `None` if it names none.
fn synced(stack: &NodeStackState) -> Option<ConditionContent> {
    let (wanted, phase) = (stack.wanted.as_ref()?, stack.phase?);
    let revision = format!("revision {} of {}", wanted.revision, wanted.policy);
    let message = stack.why.as_ref().map_or_else(|| revision.clone(), |why| format!("{revision}: {why}"));
    let status = matches!(phase, StackPhase::Settled | StackPhase::Soaking);
    Some(ConditionContent { type_: "Synced", status, reason: phase.as_str(), message })
}

fn stack_status(ledger: &Ledger, stack: &NodeStackState) -> StackStatus {
    let (origin, active) = match &ledger.stack.origin {
        StackOrigin::File => ("file", None),
        StackOrigin::Api => ("api", None),
        StackOrigin::BreakGlass { .. } => ("breakGlass", None),
        StackOrigin::Fleet { revision, .. } => ("fleet", Some(revision.revision.clone())),
    };
    let settled = Some(&ledger.stack).filter(|stack| stack.is_settled());
    let good = match settled.or_else(|| last_settled(&ledger.past_stacks)).map(|settled| &settled.origin) {
        Some(StackOrigin::Fleet { revision, .. }) => Some(revision.revision.clone()),
        _ => None,
    };
    let rolled_back = ledger.stack.failed.as_ref().map(|failed| (&failed.revision, failed.reason.clone()));
    let refused = stack
        .wanted
        .as_ref()
        .filter(|_| matches!(stack.phase, Some(StackPhase::Refused | StackPhase::Failed)));
    let refused = refused.map(|wanted| (wanted, stack.why.clone().unwrap_or_default()));
    let failed = refused.or(rolled_back).map(|(revision, reason)| FailedRevision {
        revision: revision.revision.clone(),
        attempt: revision.attempt,
        reason,
    });
    StackStatus { origin: origin.to_owned(), active, good, phase: stack.phase, failed }
}

/// The status of a node with these GPUs, without stack, heartbeat and conditions.
fn status(ledger: &Ledger) -> GpuNodeStatus {
    let mut all: Vec<(Option<u32>, &GpuId, &GpuState)> = ledger
        .gpus
        .iter()
        .filter(|(gpu, _)| !ledger.excluded.contains(*gpu))
        .map(|(gpu, state)| (ledger.part(gpu.as_part()).map(|part| part.part.gpu_index), gpu, state.as_ref()))
        .collect();
    all.sort_by_key(|(index, gpu, _)| (index.unwrap_or(u32::MAX), *gpu));
    let mut models: Vec<String> = Vec::new();
    let (mut summary, mut gpus, mut bytes) = (Summary::default(), Vec::new(), 0);
    for (index, gpu, state) in all {
        let mut shown = gpu_status(ledger, index, gpu, state, &mut models);
        summary.gpus += 1;
        summary.offered += shown.offered;
        summary.held += shown.held;
        let is_available = state.marks.is_empty() && is_usable(ledger, gpu, state);
        *(if is_available { &mut summary.available } else { &mut summary.out }) += 1;
        // Each GPU may use one sixteenth of the limit; the marks that do not fit are left out.
        while json_bytes(&shown) > GPUS_BYTES_MAX / GPUS_MAX && shown.marks.pop().is_some() {}
        let grown = bytes + json_bytes(&shown) + 1;
        if gpus.len() < GPUS_MAX && grown <= GPUS_BYTES_MAX {
            bytes = grown;
            gpus.push(shown);
        }
    }
    GpuNodeStatus {
        observed_generation: None,
        heartbeat_time: None,
        summary: Some(summary),
        models: Some(models),
        stack: None,
        gpus: Some(gpus),
        conditions: None,
    }
}

/// Whether the GPU is there and works.
fn is_usable(ledger: &Ledger, gpu: &GpuId, state: &GpuState) -> bool {
    state.health.state.is_usable() && ledger.parts_of(gpu).any(|part| part.present)
}

fn gpu_status(
    ledger: &Ledger,
    index: Option<u32>,
    gpu: &GpuId,
    state: &GpuState,
    models: &mut Vec<String>,
) -> GpuStatus {
    let model = ledger.part(gpu.as_part()).map(|part| cut(&part.part.model, MODEL_BYTES_MAX));
    let model = model.and_then(|name| {
        let known = models.iter().position(|known| *known == name);
        known.or_else(|| {
            // The API server would refuse a status with more of them.
            (models.len() < MODELS_MAX).then(|| {
                models.push(name);
                models.len() - 1
            })
        })
    });
    let devices = || ledger.parts_of(gpu).flat_map(|part| part.devices.values());
    let count = |counted: usize| u32::try_from(counted).unwrap_or(u32::MAX);
    let is_present = ledger.parts_of(gpu).any(|part| part.present);
    let health = if is_present { state.health.state } else { HealthState::Vanished };
    let mark = |(owner, mark): (&berth_kernel::drain::marks::Owner, &berth_kernel::drain::marks::Mark)| {
        cut(if owner.is_object() { &mark.by } else { owner.as_str() }, MARK_BYTES_MAX)
    };
    GpuStatus {
        index,
        uuid: cut(&gpu.to_string(), MODEL_BYTES_MAX),
        model: model.and_then(|model| u32::try_from(model).ok()),
        health: health.as_str().to_owned(),
        drain: state.drain().as_str().to_owned(),
        marks: state.marks.by_owner.iter().map(mark).collect(),
        offered: count(devices().filter(|device| device.offered()).count()),
        held: count(devices().filter(|device| device.held()).count()),
    }
}

fn cut(text: &str, bytes_max: usize) -> String {
    text[..text.floor_char_boundary(bytes_max)].to_owned()
}

fn json_bytes(gpu: &GpuStatus) -> usize {
    serde_json::to_vec(gpu).map_or(usize::MAX, |json| json.len())
}

/// Limits how many changes are written.
struct TokenBucket {
    left: u32,
    /// When the next token is added.
    next: Instant,
}

impl TokenBucket {
    fn new(now: Instant) -> Self {
        Self { left: BURST, next: now + CHANGE_INTERVAL }
    }

    fn refill(&mut self, now: Instant) {
        while self.left < BURST && self.next <= now {
            self.left += 1;
            self.next += CHANGE_INTERVAL;
        }
    }

    /// The earliest time at which a change may be written.
    fn available_at(&mut self, now: Instant) -> Instant {
        self.refill(now);
        if self.left > 0 { now } else { self.next }
    }

    fn take(&mut self, now: Instant) {
        self.refill(now);
        if self.left == BURST {
            self.next = now + CHANGE_INTERVAL;
        }
        self.left = self.left.saturating_sub(1);
    }
}

/// What has changed since the last write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    DeviceCounts,
    Urgent,
}

/// When the status is written.
struct WriteSchedule {
    /// What was written last; `None` before the first time and after a failure.
    written: Option<Report>,
    tokens: TokenBucket,
    /// The change that is to be written, and when it may be.
    pending: Option<(Change, Instant)>,
    /// When the status is written again although nothing has changed.
    heartbeat_at: Instant,
    /// After a failure: until when nothing is sent.
    failed_until: Option<Instant>,
}

impl WriteSchedule {
    fn new(now: Instant) -> Self {
        Self {
            written: None,
            tokens: TokenBucket::new(now),
            pending: None,
            heartbeat_at: now,
            failed_until: None,
        }
    }

    /// When this report is to be written.
    fn due(&mut self, report: &Report, now: Instant, random: u32) -> Instant {
        let change = match &self.written {
            None => Some(Change::Urgent),
            Some(written) if written == report => None,
            Some(written) if written.without_counts() == report.without_counts() => {
                Some(Change::DeviceCounts)
            }
            Some(_) => Some(Change::Urgent),
        };
        self.pending = change.map(|change| match self.pending {
            Some((known, at)) if known == change => (change, at),
            _ if change == Change::DeviceCounts => (change, now + jittered(COUNTS_MEAN, random)),
            _ => (change, now + after_loss(CHANGE_MAX, random)),
        });
        let due = match self.pending {
            Some((Change::Urgent, at)) => at.max(self.tokens.available_at(now)),
            Some((Change::DeviceCounts, at)) => at.min(self.heartbeat_at),
            None => self.heartbeat_at,
        };
        self.failed_until.map_or(due, |until| due.max(until))
    }

    fn note_written(&mut self, report: Report, now: Instant, random: u32) {
        if let Some((Change::Urgent, _)) = self.pending.take() {
            self.tokens.take(now);
        }
        self.written = Some(report);
        self.heartbeat_at = now + jittered(REFRESH_MEAN, random);
        self.failed_until = None;
    }

    fn note_failed(&mut self, until: Instant) {
        self.written = None;
        self.failed_until = Some(until);
    }
}

struct GpuNodeWriter<'s> {
    gpu_nodes: Api<GpuNode>,
    nodes: Api<Node>,
    settings: &'s Settings,
    /// The conditions that the object has; `None` until it is known to exist.
    conditions: Option<Vec<Condition>>,
    backoff: Backoff,
}

impl GpuNodeWriter<'_> {
    /// Writes the status; creates the object if it is not there.
    async fn write(&mut self, report: &Report, now_wall_ms: u64) -> Result<(), RequestError> {
        let known = self.conditions.take();
        let applied = match &known {
            Some(before) => Some(self.apply(report, before, now_wall_ms).await),
            None => None,
        };
        let applied = match applied {
            Some(Err(error)) if error.code() != 404 => Err(error),
            Some(Ok(conditions)) => Ok(conditions),
            // The object is not known yet, or was deleted.
            None | Some(Err(_)) => {
                let before = self.read_or_create().await?;
                self.apply(report, &before, now_wall_ms).await
            }
        };
        self.conditions = Some(applied?);
        self.backoff.reset();
        Ok(())
    }

    /// The conditions of the object.
    async fn read_or_create(&self) -> Result<Vec<Condition>, RequestError> {
        let name = &self.settings.node;
        let read = request(self.gpu_nodes.get(name), "get gpunodes (ClusterRole berth-fleet)").await;
        let node = self.nodes.get_metadata(name);
        let node = request(node, "get nodes (ClusterRole berth)").await?.metadata.uid.unwrap_or_default();
        let known = match read {
            Err(error) if error.code() == 404 => self.create(&node).await?,
            known => known?,
        };
        let is_own = known.metadata.owner_references.iter().flatten().any(|owner| owner.uid == node);
        if !is_own {
            let why = format!(
                "GPUNode {name} belongs to a deleted node of the same name: the garbage collector deletes it, or run \
                 `kubectl delete gpunode {name}`"
            );
            return Err(RequestError { why, status: None });
        }
        Ok(known.status.and_then(|status| status.conditions).unwrap_or_default())
    }

    /// Creates the object. The node owns it, so that the garbage collector deletes it with the node.
    async fn create(&self, node_uid: &str) -> Result<GpuNode, RequestError> {
        let name = &self.settings.node;
        let mut object = GpuNode::new(name, GpuNodeSpec::default());
        object.metadata.owner_references = Some(vec![OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: name.clone(),
            uid: node_uid.to_owned(),
            controller: Some(true),
            block_owner_deletion: None,
        }]);
        let parameters = PostParams::default();
        let created = self.gpu_nodes.create(&parameters, &object);
        let created = request(created, "create gpunodes (ClusterRole berth-fleet)").await;
        created.map_err(|error| match error.code() {
            404 => RequestError { why: format!("{}: {NO_KIND}", error.why), ..error },
            _ => error,
        })
    }

    async fn apply(
        &self,
        report: &Report,
        before: &[Condition],
        now_wall_ms: u64,
    ) -> Result<Vec<Condition>, RequestError> {
        let now = time(now_wall_ms);
        let conditions =
            conditions(report.conditions.clone(), before, report.status.observed_generation, &now);
        let status = GpuNodeStatus {
            conditions: Some(conditions.clone()),
            heartbeat_time: Some(now),
            ..report.status.clone()
        };
        let patch = json!({
            "apiVersion": format!("{GROUP}/v1alpha1"),
            "kind": "GPUNode",
            "metadata": {"name": self.settings.node},
            "status": status,
        });
        let (parameters, patch) = (PatchParams::apply(FIELD_MANAGER).force(), Patch::Apply(&patch));
        let patched = self.gpu_nodes.patch_status(&self.settings.node, &parameters, &patch);
        request(patched, "patch gpunodes/status (ClusterRole berth-fleet)").await.map(|_| conditions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::drain::marks::{MARKS_MAX, Mark, Marks, Owner};
    use berth_kernel::hardware::gpu::Part;
    use berth_kernel::hardware::health::Health;
    use berth_kernel::ids::time::Now;
    use berth_kernel::sharing::part_state::PartState;
    use std::sync::Arc;

    /// A node with this number of healthy GPUs, none of which is offered.
    fn node(gpus: u32) -> Ledger {
        let mut ledger = Ledger::default();
        for index in 0..gpus {
            let id = GpuId::parse(&format!("GPU-8a56a4bc-0000-0000-0000-{index:012}")).unwrap();
            let part = Part { model: "NVIDIA H100 80GB HBM3".into(), ..Part::whole_gpu(id.clone(), index) };
            let present = PartState { present: true, ..PartState::new(part, 0) };
            ledger.parts.insert(id.as_part().clone(), Arc::new(present));
            let now = Now { wall_ms: 1_767_225_600_000, mono_ms: 0 };
            ledger.gpus.insert(id, Arc::new(GpuState::new(Health::healthy(now), now)));
        }
        ledger
    }

    fn mark_all(ledger: &mut Ledger, marks: &Marks) {
        ledger.gpus.values_mut().for_each(|state| Arc::make_mut(state).marks = marks.clone());
    }

    #[test]
    fn a_status_of_many_gpus_with_the_most_marks_and_the_longest_names_is_small() {
        let mut ledger = node(40);
        let long = "\"".repeat(150);
        let mark = |n: usize| {
            let owner = Owner::parse(&format!("api:{n}{long}")).unwrap();
            (owner, Mark::cordon(&long, &"why".repeat(200), 1_767_225_600_000))
        };
        let marks = Marks { by_owner: (0..MARKS_MAX).map(mark).collect(), drained_wall_ms: None };
        mark_all(&mut ledger, &marks);
        let Report { status, conditions } = Report::of(&ledger, &NodeStackState::default());
        let gpus = status.gpus.clone().unwrap();
        assert_eq!(gpus.len(), GPUS_MAX);
        assert_eq!(gpus[3].index, Some(3));
        assert!(gpus.iter().all(|gpu| !gpu.marks.is_empty()), "{gpus:?}");
        let summary = status.summary.unwrap();
        assert_eq!((summary.gpus, summary.available, summary.out), (40, 0, 40));
        let json = serde_json::to_string(&status).unwrap();
        assert!(json.len() + conditions[0].message.len() < 8 * 1024, "{} bytes", json.len());
    }

    #[test]
    fn no_more_models_are_reported_than_the_definition_allows() {
        let mut ledger = node(20);
        for (index, part) in ledger.parts.values_mut().enumerate() {
            Arc::make_mut(part).part.model = format!("model {index}");
        }
        assert_eq!(status(&ledger).models.unwrap().len(), MODELS_MAX);
    }

    #[test]
    fn a_gpu_is_available_if_it_works_and_nobody_has_marked_it() {
        let mut ledger = node(4);
        let ids: Vec<GpuId> = ledger.gpus.keys().cloned().collect();
        let change = |ledger: &mut Ledger, index: usize, change: fn(&mut GpuState)| {
            change(Arc::make_mut(ledger.gpus.get_mut(&ids[index]).unwrap()));
        };
        change(&mut ledger, 0, |state| state.health.state = HealthState::Unhealthy);
        change(&mut ledger, 1, |state| state.health.state = HealthState::Degraded);
        change(&mut ledger, 2, |state| state.marks = Mark::cordon("ada", "", 0).into());
        Arc::make_mut(ledger.parts.get_mut(ids[3].as_part()).unwrap()).present = false;
        let status = status(&ledger);
        let summary = status.summary.unwrap();
        assert_eq!((summary.gpus, summary.available, summary.out), (4, 1, 3));
        let shown: Vec<String> =
            status.gpus.unwrap().into_iter().map(|gpu| format!("{} {}", gpu.health, gpu.drain)).collect();
        assert_eq!(shown, ["unhealthy active", "degraded active", "healthy cordoned", "vanished active"]);
        assert_eq!(status.models.unwrap(), ["NVIDIA H100 80GB HBM3"]);
    }

    #[tokio::test]
    async fn changes_are_written_within_seconds_counts_within_minutes_and_a_burst_is_limited() {
        let seconds = Duration::from_secs;
        let begin = Instant::now();
        let mut ledger = node(1);
        let mut schedule = WriteSchedule::new(begin);
        let first = Report::of(&ledger, &NodeStackState::default());
        assert!((begin..=begin + seconds(5)).contains(&schedule.due(&first, begin, u32::MAX)));
        schedule.note_written(first.clone(), begin, u32::MAX / 2);
        // Nothing has changed: the heartbeat.
        let heartbeat = schedule.due(&first, begin, 0);
        assert!((seconds(899)..seconds(901)).contains(&(heartbeat - begin)));
        let mut counted = first.clone();
        counted.status.summary.as_mut().unwrap().held = 1;
        let due = schedule.due(&counted, begin, u32::MAX / 2);
        assert!((seconds(299)..seconds(301)).contains(&(due - begin)));
        // A later count does not delay the write.
        counted.status.summary.as_mut().unwrap().held = 2;
        assert_eq!(schedule.due(&counted, begin + seconds(100), u32::MAX), due);
        let mut now = begin;
        let mut waits = Vec::new();
        for n in 0..5_u64 {
            let marks = if n % 2 == 0 { Mark::cordon("ada", "", n).into() } else { Marks::default() };
            mark_all(&mut ledger, &marks);
            let report = Report::of(&ledger, &NodeStackState::default());
            let due = schedule.due(&report, now, 0);
            waits.push((due - now).as_secs());
            now = due;
            schedule.note_written(report, now, 0);
        }
        assert_eq!(waits, [0, 0, 10, 10, 10], "the first write also used a token");
        // After a failure everything is written again, but not before its wait is over.
        let report = Report::of(&ledger, &NodeStackState::default());
        schedule.note_failed(now + seconds(30));
        assert_eq!(schedule.due(&report, now, 0), now + seconds(30));
    }
}
