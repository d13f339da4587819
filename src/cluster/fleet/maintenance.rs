//! Carries out the GPUMaintenances of this node: each has a mark of its own on each of its GPUs while the object exists.
//!
//! The daemon removes a mark when a complete list does not contain the mark's object, or when the watch reports that the object was
//! deleted. It removes no mark while the CustomResourceDefinition is being deleted or cannot be read: the API server then
//! deletes all objects, although no one has asked to grant their GPUs again. It removes no mark after a failed request either.

use super::super::settings::{FleetTask, Settings};
use super::{ErrorSource, NO_KIND};
use berth_core::KernelHandle;
use berth_core::keeper::CommandError;
use berth_fleet::maintenance::{
    ALL_GPUS, AtDeadline, BLOCKERS_MAX, GpuMaintenance, MaintenanceSpec, MaintenanceState, MaintenanceStatus,
    Mode,
};
use berth_fleet::{FIELD_MANAGER, GROUP};
use berth_kernel::drain::eviction_plan::{EvictionStatus, holders};
use berth_kernel::drain::marks::{self, Author, Drain, Mark, MarkKind, Marks, Order, Owner, Owners};
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kube::{
    Backoff, Cause, ConditionContent, Event, RequestError, conditions, jittered, random, request, retry_at,
    time,
};
use futures_util::StreamExt;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};

/// The least time between two writes of one object, since the API server compares each write with the watches of all nodes.
const WRITE_INTERVAL: Duration = Duration::from_secs(10);
/// The mean time between two attempts to remove the marks of deleted objects while the CustomResourceDefinition cannot be read.
const REMOVAL_RETRY_MEAN: Duration = Duration::from_secs(60);
/// How long after its deadline a drain is late that deletes its pods then, milliseconds.
const DELETION_GRACE_MS: u64 = 300_000;
/// Most GPUMaintenances of a node; each GPU can have eight marks.
const OBJECTS_MAX: usize = 256;
/// The longest wait after an open watch is lost.
const RECONNECT_WAIT_MAX: Duration = Duration::from_secs(60);
/// The right that the watch needs, for the message of a 403.
const WATCH_RIGHT: &str = "list and watch gpumaintenances (ClusterRole berth-fleet)";
/// The name of the definition.
const DEFINITION: &str = "gpumaintenances.fleet.berth.dev";
/// What is watched, for errors.
const OBJECTS: &str = "the GPUMaintenances of this node";

/// Carries out the GPUMaintenances; never returns.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle, task: &FleetTask) {
    let api: Api<GpuMaintenance> = Api::all(client.clone());
    let fields = settings.of_node();
    let mut stream =
        Box::pin(berth_kube::events(&settings.connection, OBJECTS, api.clone(), fields, |object| {
            Some(object.clone())
        }));
    let mut snapshots = kernel.watch();
    let mut known = KnownMaintenances::default();
    let mut updater = MarkUpdater {
        definitions: Api::all(client),
        set_from: Instant::now(),
        kept: Vec::new(),
        remove_from: Instant::now(),
    };
    let mut writer = StatusWriter {
        api,
        settings,
        backoff: Backoff::new(settings.connection.retry_interval),
        failed_until: None,
    };
    let mut backoff = Backoff::new(settings.connection.retry_interval);
    // When the watch is polled again after an error.
    let mut watch_from = Instant::now();
    loop {
        let mut ledger = snapshots.borrow_and_update().clone();
        if updater.update(&mut known, &ledger, kernel, task).await {
            ledger = kernel.snapshot();
        }
        writer.write_due(&mut known, &ledger, kernel.now(), task).await;
        let next_event = async {
            sleep_until(watch_from).await;
            stream.next().await
        };
        let wake = async {
            // A deadline may pass, and a mark or a status may be due.
            if known.objects.is_empty() && known.obsolete_marks(&ledger).is_empty() {
                pending::<()>().await;
            }
            sleep(WRITE_INTERVAL).await;
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
            () = wake => continue,
        };
        match event {
            Some(Ok(event)) => {
                known.apply(event);
                if known.is_current {
                    backoff.reset();
                    task.set_error(ErrorSource::Watch, None);
                    let owners = known.owners().map(|owner| owner.as_str().to_owned()).collect();
                    task.state.send_modify(|state| state.maintenances = Arc::new(owners));
                }
            }
            Some(Err(error)) => {
                let was_open = std::mem::replace(&mut known.is_current, false);
                // Not an error: the API server keeps versions for some minutes only.
                if !matches!(error.cause, Cause::Expired) {
                    task.set_error(ErrorSource::Watch, Some(error.text(WATCH_RIGHT, NO_KIND)));
                }
                watch_from = error.retry_at(&settings.connection, &mut backoff, was_open, RECONNECT_WAIT_MAX);
            }
            None => return pending().await,
        }
    }
}

/// Sets and removes marks.
struct MarkUpdater {
    definitions: Api<CustomResourceDefinition>,
    /// The earliest time of the next attempt to set marks; later after the keeper has failed.
    set_from: Instant,
    /// The obsolete marks that the last attempt could not remove, and when they are tried again.
    kept: Vec<(GpuId, Owner)>,
    remove_from: Instant,
}

impl MarkUpdater {
    /// Sets the marks that are missing and removes obsolete ones. Returns whether the ledger has changed.
    async fn update(
        &mut self,
        known: &mut KnownMaintenances,
        ledger: &Ledger,
        kernel: &KernelHandle,
        task: &FleetTask,
    ) -> bool {
        let mut is_changed = false;
        if Instant::now() >= self.set_from {
            for (uid, command) in known.missing_marks(ledger, kernel.now()) {
                is_changed |= self.set_mark(known, &uid, command, ledger, kernel).await;
                if Instant::now() < self.set_from {
                    // The keeper has failed.
                    break;
                }
            }
        }
        let obsolete = known.obsolete_marks(ledger);
        if obsolete.is_empty() {
            self.kept.clear();
            task.set_error(ErrorSource::Removal, None);
        } else if obsolete != self.kept || Instant::now() >= self.remove_from {
            is_changed |= self.remove_marks(obsolete, ledger, kernel, task).await;
        }
        is_changed
    }

    /// Removes the marks whose objects were deleted, but not those of objects that were deleted with their definition: these are
    /// older than the definition that there is now.
    async fn remove_marks(
        &mut self,
        obsolete: Vec<(GpuId, Owner)>,
        ledger: &Ledger,
        kernel: &KernelHandle,
        task: &FleetTask,
    ) -> bool {
        let right = "get customresourcedefinitions (ClusterRole berth-fleet)";
        let read = request(self.definitions.get_metadata(DEFINITION), right).await;
        let created_wall_ms = match read.as_ref().map(|found| created_wall_ms(&found.metadata)) {
            Ok(Some(created)) => Ok(created),
            Ok(None) => Err("the CustomResourceDefinition is being deleted".to_owned()),
            Err(error) if error.code() == 404 => Err(NO_KIND.to_owned()),
            Err(error) => Err(error.why.clone()),
        };
        let created_wall_ms = match created_wall_ms {
            Ok(created_wall_ms) => created_wall_ms,
            Err(why) => {
                self.keep(obsolete, why, task);
                return false;
            }
        };
        let (mut is_changed, mut kept, mut commands) = (false, Vec::new(), Vec::new());
        for (gpu, owner) in obsolete {
            let mark = ledger.gpus.get(&gpu).and_then(|state| state.marks.by_owner.get(&owner));
            if mark.is_some_and(|mark| mark.since_wall_ms < created_wall_ms) {
                commands.push(format!("`berth gpu uncordon {gpu} --owner {owner}`"));
                kept.push((gpu, owner));
                continue;
            }
            let removal = Command::Uncordon { gpu: gpu.clone(), owners: Owners::One(owner.clone()) };
            match kernel.execute(removal).await {
                Ok(_) => {
                    is_changed = true;
                    tracing::info!(%gpu, %owner, "the mark of a deleted GPUMaintenance was removed");
                }
                Err(error) => {
                    kept.push((gpu, owner));
                    self.keep(kept, error.to_string(), task);
                    return is_changed;
                }
            }
        }
        if !kept.is_empty() {
            let why = format!(
                "their objects were deleted with the CustomResourceDefinition; to remove the marks, run {}",
                commands.join(" and ")
            );
            self.keep(kept, why, task);
        }
        is_changed
    }

    /// Keeps these marks until the next attempt.
    fn keep(&mut self, marks: Vec<(GpuId, Owner)>, why: String, task: &FleetTask) {
        self.kept = marks;
        self.remove_from = Instant::now() + jittered(REMOVAL_RETRY_MEAN, random());
        task.set_error(ErrorSource::Removal, Some(why));
    }

    async fn set_mark(
        &mut self,
        known: &mut KnownMaintenances,
        uid: &str,
        MarkCommand { gpu, command }: MarkCommand,
        ledger: &Ledger,
        kernel: &KernelHandle,
    ) -> bool {
        let Some(object) = known.objects.get_mut(uid) else { return false };
        let maintenance = &object.name;
        match kernel.execute(command).await {
            Ok(_) => {
                tracing::info!(%gpu, maintenance, "a GPU was cordoned or drained for a GPUMaintenance");
                object.refused.remove(&gpu);
                true
            }
            Err(CommandError::Refused(refusal)) => {
                tracing::warn!(%gpu, maintenance, %refusal, "a GPU cannot be cordoned or drained for a GPUMaintenance");
                let marks = ledger.gpus.get(&gpu).map(|state| state.marks.clone()).unwrap_or_default();
                object.refused.insert(gpu, RefusedMark { marks, why: refusal.to_string() });
                false
            }
            Err(error) => {
                tracing::warn!(%gpu, maintenance, %error, "a GPU could not be cordoned or drained for a GPUMaintenance; the daemon tries again in 10 s");
                self.set_from = Instant::now() + WRITE_INTERVAL;
                false
            }
        }
    }
}

/// When the definition was created, milliseconds since 1970; `None` while it is being deleted.
fn created_wall_ms(definition: &ObjectMeta) -> Option<u64> {
    if definition.deletion_timestamp.is_some() {
        return None;
    }
    let created = definition.creation_timestamp.as_ref().map(|created| created.0.as_millisecond());
    Some(created.and_then(|created| u64::try_from(created).ok()).unwrap_or(0))
}

/// The GPUMaintenances of this node, as the API server has shown them.
#[derive(Default)]
struct KnownMaintenances {
    /// By UID.
    objects: BTreeMap<String, Maintenance>,
    /// The UIDs of those that are too many to be carried out.
    others: BTreeSet<String>,
    /// Whether there was a complete list.
    is_complete: bool,
    /// Whether changes are seen.
    is_current: bool,
}

/// One GPUMaintenance.
struct Maintenance {
    name: String,
    generation: Option<i64>,
    /// Its `resourceVersion`: a status is not written to another object of the same name.
    version: Option<String>,
    spec: MaintenanceSpec,
    /// The status as the API server has shown it last.
    status: MaintenanceStatus,
    /// GPUs on which the mark does not fit.
    refused: BTreeMap<GpuId, RefusedMark>,
    /// The earliest time of the next write.
    write_from: Option<Instant>,
    /// Why the last write failed; `None` if it did not.
    error: Option<String>,
}

/// A mark that the kernel has refused; it is set once the GPU has other marks.
struct RefusedMark {
    marks: Marks,
    why: String,
}

/// A command that sets the mark of an object on a GPU.
struct MarkCommand {
    gpu: GpuId,
    command: Command,
}

impl KnownMaintenances {
    fn apply(&mut self, event: Event<GpuMaintenance>) {
        match event {
            Event::Listing => {}
            Event::Opened => self.is_current = self.is_complete,
            Event::Listed(objects) => {
                let uids: BTreeSet<String> =
                    objects.iter().filter_map(|object| object.metadata.uid.clone()).collect();
                self.objects.retain(|uid, _| uids.contains(uid));
                self.others.clear();
                objects.into_iter().for_each(|object| self.insert(object));
                (self.is_complete, self.is_current) = (true, true);
            }
            Event::Applied(object) => self.insert(object),
            Event::Deleted(object) => {
                if let Some(uid) = object.metadata.uid {
                    self.objects.remove(&uid);
                    self.others.remove(&uid);
                }
            }
        }
    }

    fn insert(&mut self, object: GpuMaintenance) {
        let (Some(uid), Some(name)) = (object.metadata.uid, object.metadata.name) else { return };
        if self.objects.len() >= OBJECTS_MAX && !self.objects.contains_key(&uid) {
            tracing::warn!(
                name,
                "more than {OBJECTS_MAX} GPUMaintenances name this node; this one is not carried out"
            );
            self.others.insert(uid);
            return;
        }
        self.others.remove(&uid);
        let known = self.objects.remove(&uid);
        let (refused, write_from, error) =
            known.map(|known| (known.refused, known.write_from, known.error)).unwrap_or_default();
        let (generation, version) = (object.metadata.generation, object.metadata.resource_version);
        let status = object.status.unwrap_or_default();
        self.objects.insert(
            uid,
            Maintenance { name, generation, version, spec: object.spec, status, refused, write_from, error },
        );
    }

    /// The marks that GPUs do not have yet, with the object's UID.
    fn missing_marks(&self, ledger: &Ledger, now: Now) -> Vec<(String, MarkCommand)> {
        let mut commands = Vec::new();
        for (uid, object) in self.objects.iter().filter(|(_, object)| object.spec.mode != Mode::Other) {
            let Ok(owner) = Owner::maintenance(uid) else { continue };
            for (gpu, state) in object.gpus(ledger).filter_map(|gpu| Some((gpu, ledger.gpus.get(gpu)?))) {
                let is_refused = object.refused.get(gpu).is_some_and(|refused| refused.marks == state.marks);
                if !is_refused && !object.has_its_mark(state.marks.by_owner.get(&owner)) {
                    let command = object.mark_command(gpu.clone(), owner.clone(), now);
                    commands.push((uid.clone(), MarkCommand { gpu: gpu.clone(), command }));
                }
            }
        }
        commands
    }

    /// The marks whose objects are deleted.
    fn obsolete_marks(&self, ledger: &Ledger) -> Vec<(GpuId, Owner)> {
        let marks = ledger.gpus.iter().flat_map(|(gpu, state)| {
            state.marks.by_owner.keys().map(move |owner| (gpu.clone(), owner.clone()))
        });
        let existing: BTreeSet<Owner> = self.owners().collect();
        marks
            .filter(|(_, owner)| self.is_complete && owner.is_maintenance() && !existing.contains(owner))
            .collect()
    }

    /// The owners of the marks of all objects that exist.
    fn owners(&self) -> impl Iterator<Item = Owner> {
        self.objects.keys().chain(&self.others).filter_map(|uid| Owner::maintenance(uid).ok())
    }
}

impl Maintenance {
    /// Its GPUs that the node has.
    fn gpus<'l>(&'l self, ledger: &'l Ledger) -> impl Iterator<Item = &'l GpuId> {
        ledger.gpus.keys().filter(|gpu| self.spec.selects(gpu.as_str()) && !ledger.excluded.contains(*gpu))
    }

    /// Whether this is the object's mark. The drain of one may have been stopped while `fleet.enabled` was false.
    fn has_its_mark(&self, mark: Option<&Mark>) -> bool {
        mark.is_some_and(|mark| self.spec.mode == Mode::Cordon || mark.expired || mark.order().is_some())
    }

    fn mark_command(&self, gpu: GpuId, owner: Owner, now: Now) -> Command {
        let why = self.spec.reason.clone().unwrap_or_default();
        let author = Author { owner, by: format!("GPUMaintenance/{}", self.name), why };
        if self.spec.mode == Mode::Cordon {
            return Command::Cordon { gpu, author };
        }
        let in_ms = |deadline: Duration| u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        let order = Order {
            evict: self.spec.evict.unwrap_or(false),
            deadline_wall_ms: self
                .spec
                .deadline()
                .map(|deadline| now.wall_ms.saturating_add(in_ms(deadline))),
            at_deadline: match self.spec.at_deadline {
                None | Some(AtDeadline::Wait | AtDeadline::Other) => marks::AtDeadline::Wait,
                Some(AtDeadline::GiveUp) => marks::AtDeadline::GiveUp,
                Some(AtDeadline::Delete) => marks::AtDeadline::Delete,
            },
            ..Order::default()
        };
        Command::Drain { gpu, author, order }
    }

    /// UUIDs that no GPU of the node has, or only one that the configuration excludes.
    fn unknown<'l>(&'l self, ledger: &'l Ledger) -> impl Iterator<Item = &'l str> {
        let is_known = |uuid: &str| self.gpus(ledger).any(|gpu| gpu.as_str() == uuid);
        self.spec.uuids.iter().map(String::as_str).filter(move |uuid| *uuid != ALL_GPUS && !is_known(uuid))
    }

    /// What is to be reported; the conditions have the times of those that were reported before.
    fn report(&self, uid: &str, ledger: &Ledger, now: Now) -> MaintenanceStatus {
        let owner = Owner::maintenance(uid).ok();
        let mark_of =
            |gpu: &GpuId| Some((gpu.clone(), ledger.gpus.get(gpu)?.marks.by_owner.get(owner.as_ref()?)?));
        let marked: Vec<(GpuId, &Mark)> = self.gpus(ledger).filter_map(mark_of).collect();
        let states = self.gpus(ledger).map(|gpu| {
            let mark = marked.iter().find(|(known, _)| known == gpu).map(|(_, mark)| *mark);
            state(mark, ledger.gpus.get(gpu).map(|state| state.drain()))
        });
        let state = states.min();
        let (mut pods, mut unknown) = (BTreeSet::new(), BTreeSet::new());
        for holder in self.gpus(ledger).flat_map(|gpu| holders(ledger, gpu)) {
            if let (Some(namespace), Some(pod)) = (holder.namespace, holder.pod) {
                pods.insert(format!("{namespace}/{pod}"));
            } else {
                unknown.extend(holder.allocations);
            }
        }
        let holders = u32::try_from(pods.len() + unknown.len()).unwrap_or(u32::MAX);
        let since = marked.iter().map(|(_, mark)| mark.since_wall_ms).min();
        let before = self.status.conditions.as_deref().unwrap_or_default();
        let contents = self.condition_contents(state, &marked, ledger, now);
        MaintenanceStatus {
            state,
            since: since.map(time),
            holders: Some(holders),
            blockers: Some(pods.into_iter().take(BLOCKERS_MAX).collect()),
            conditions: Some(conditions(contents, before, self.generation, &time(now.wall_ms))),
        }
    }

    /// The conditions, with the meaning that kstatus gives to `Reconciling` and `Stalled`.
    fn condition_contents(
        &self,
        state: Option<MaintenanceState>,
        marked: &[(GpuId, &Mark)],
        ledger: &Ledger,
        now: Now,
    ) -> Vec<ConditionContent> {
        let drains = self.spec.mode == Mode::Drain;
        let goal = if drains { MaintenanceState::Drained } else { MaintenanceState::Cordoned };
        let is_reached = state.is_some_and(|state| state >= goal);
        let stalled = self.stalled(is_reached, marked, ledger, now);
        let (reason, message) = match (&stalled, state) {
            (Some((reason, _)), _) => (*reason, "see the condition Stalled".to_owned()),
            (None, Some(MaintenanceState::Drained)) => {
                ("Drained", "no pod holds the GPUs, and no process uses them".to_owned())
            }
            (None, Some(MaintenanceState::Cordoned)) => {
                ("Cordoned", "nothing new is granted on the GPUs".to_owned())
            }
            (None, Some(MaintenanceState::Draining)) => ("Draining", self.waits_for(ledger)),
            (None, None | Some(MaintenanceState::Pending | MaintenanceState::Other)) => {
                ("Pending", "the GPUs are not cordoned yet".to_owned())
            }
        };
        let content = |type_, status, reason, message: &str| ConditionContent {
            type_,
            status,
            reason,
            message: message.to_owned(),
        };
        let is_stalled = stalled.is_some();
        let (why, details) = stalled.unwrap_or(("NotStalled", "no problem was found".to_owned()));
        let drained = content("Drained", is_reached && !is_stalled, reason, &message);
        let mut contents = vec![
            content("Reconciling", !is_reached && !is_stalled, reason, &message),
            content("Stalled", is_stalled, why, &details),
        ];
        if drains {
            contents.insert(0, drained);
        }
        contents
    }

    /// What the drain waits for: a pod that cannot be evicted, or else any holder.
    fn waits_for(&self, ledger: &Ledger) -> String {
        let blocked = self.gpus(ledger).flat_map(|gpu| holders(ledger, gpu)).find_map(|holder| {
            let why = match &holder.status {
                EvictionStatus::Static => "is a static pod, which cannot be evicted".to_owned(),
                EvictionStatus::Budget { message } => format!("waits for its disruption budget: {message}"),
                EvictionStatus::Failed { message } => format!("cannot be evicted: {message}"),
                _ => return None,
            };
            Some(format!("pod {}/{} {why}", holder.namespace?, holder.pod?))
        });
        blocked.unwrap_or_else(|| {
            "pods hold the GPUs, or a process was seen on them in the last 10 s".to_owned()
        })
    }

    /// Why the goal cannot be reached without an operator; reason and message.
    fn stalled(
        &self,
        is_reached: bool,
        marked: &[(GpuId, &Mark)],
        ledger: &Ledger,
        now: Now,
    ) -> Option<(&'static str, String)> {
        if let Some((gpu, RefusedMark { why, .. })) = self.refused.iter().next() {
            return Some(("TooManyMarks", format!("{gpu} cannot be cordoned: {why}")));
        }
        if self.spec.mode == Mode::Other {
            let text = "the daemon of the node does not know this mode: upgrade it, or delete the object";
            return Some(("UnknownMode", text.to_owned()));
        }
        let node = &self.spec.node_name;
        if self.gpus(ledger).next().is_none() && self.spec.uuids.iter().any(|uuid| uuid == ALL_GPUS) {
            return Some((
                "NoSuchGPU",
                format!("node {node} has no GPU: `berth node check` on the node shows why"),
            ));
        }
        let unknown: Vec<&str> = self.unknown(ledger).collect();
        if !unknown.is_empty() {
            let uuids = unknown.join(", ");
            let text = format!(
                "node {node} has no GPU with the UUID {uuids}, or its configuration excludes the GPU: `kubectl get gpunode \
                 {node} -o yaml` shows the UUIDs"
            );
            return Some(("NoSuchGPU", text));
        }
        // Pods that are deleted at the deadline have time to end.
        let grace_ms = if self.spec.at_deadline == Some(AtDeadline::Delete) { DELETION_GRACE_MS } else { 0 };
        let now = Now {
            wall_ms: now.wall_ms.saturating_sub(grace_ms),
            mono_ms: now.mono_ms.saturating_sub(grace_ms),
        };
        let is_late = |mark: &Mark| mark.expired || mark.order().is_some_and(|order| order.is_late(now));
        let late = marked.iter().any(|(_, mark)| is_late(mark));
        (!is_reached && late).then(|| {
            (
                "Late",
                "the deadline has passed, and pods hold the GPUs, or processes use them; see `blockers`"
                    .to_owned(),
            )
        })
    }
}

/// The state of one GPU, by the object's mark on it and by all marks on it.
fn state(mark: Option<&Mark>, drain: Option<Drain>) -> MaintenanceState {
    match (mark.map(|mark| mark.kind), drain) {
        (None, _) => MaintenanceState::Pending,
        (Some(MarkKind::Cordon), _) => MaintenanceState::Cordoned,
        (Some(MarkKind::Drain(_)), Some(Drain::Drained(_))) => MaintenanceState::Drained,
        (Some(MarkKind::Drain(_)), _) => MaintenanceState::Draining,
    }
}

struct StatusWriter<'s> {
    api: Api<GpuMaintenance>,
    settings: &'s Settings,
    backoff: Backoff,
    /// After a failure: until when nothing is sent.
    failed_until: Option<Instant>,
}

impl StatusWriter<'_> {
    /// Writes each status that differs from the object's and is due.
    async fn write_due(
        &mut self,
        known: &mut KnownMaintenances,
        ledger: &Ledger,
        now: Now,
        task: &FleetTask,
    ) {
        for (uid, object) in &mut known.objects {
            let report = object.report(uid, ledger, now);
            if report == object.status {
                object.error = None;
                continue;
            }
            if object.write_from.max(self.failed_until).is_some_and(|due| due > Instant::now()) {
                continue;
            }
            object.write_from = Some(Instant::now() + WRITE_INTERVAL);
            match self.apply(object, &report).await {
                Ok(version) => {
                    object.version = version;
                    object.status = report;
                    self.backoff.reset();
                    object.error = None;
                    self.failed_until = None;
                }
                // The object was deleted, or another one has its name: the watch shows it.
                Err(error) if matches!(error.code(), 404 | 409) => {}
                Err(error) => {
                    let until = retry_at(&self.settings.connection, &mut self.backoff, error.code());
                    // Otherwise an answer that is about this object alone would keep the others from being written.
                    object.write_from = Some(until + WRITE_INTERVAL);
                    if !matches!(error.code(), 400..=428 | 430..=499) {
                        self.failed_until = Some(until);
                    }
                    object.error = Some(error.why);
                }
            }
        }
        task.set_error(ErrorSource::Status, known.objects.values().find_map(|object| object.error.clone()));
    }

    async fn apply(
        &self,
        object: &Maintenance,
        status: &MaintenanceStatus,
    ) -> Result<Option<String>, RequestError> {
        let patch = json!({
            "apiVersion": format!("{GROUP}/v1alpha1"),
            "kind": "GPUMaintenance",
            "metadata": {"name": object.name, "resourceVersion": object.version},
            "status": status,
        });
        let (parameters, patch) = (PatchParams::apply(FIELD_MANAGER).force(), Patch::Apply(&patch));
        let patched = self.api.patch_status(&object.name, &parameters, &patch);
        let patched = request(patched, "patch gpumaintenances/status (ClusterRole berth-fleet)").await?;
        Ok(patched.metadata.resource_version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_node::{NOW, gpu, node};
    use std::sync::Arc;

    fn object(uid: &str, spec: &serde_json::Value) -> GpuMaintenance {
        let whole = json!({
            "apiVersion": "fleet.berth.dev/v1alpha1",
            "kind": "GPUMaintenance",
            "metadata": {"name": format!("name-{uid}"), "uid": uid, "generation": 1},
            "spec": spec,
        });
        serde_json::from_value(whole).unwrap()
    }

    fn cordon(uid: &str, uuids: &[&str]) -> GpuMaintenance {
        object(uid, &json!({"nodeName": "n", "mode": "cordon", "uuids": uuids}))
    }

    fn put_mark(ledger: &mut Ledger, index: u32, uid: &str, mark: Mark) {
        let state = Arc::make_mut(ledger.gpus.get_mut(&gpu(index)).unwrap());
        state.marks.by_owner.insert(Owner::maintenance(uid).unwrap(), mark);
    }

    fn of(commands: &[(String, MarkCommand)]) -> Vec<String> {
        let text = |command: &Command| match command {
            Command::Cordon { gpu, author } => format!("cordon {gpu} by {} {}", author.by, author.owner),
            Command::Drain { gpu, order, .. } => {
                let deadline = order.deadline_wall_ms.map(|at| (at - NOW.wall_ms) / 1000);
                format!("drain {gpu} evict {} in {deadline:?} then {:?}", order.evict, order.at_deadline)
            }
            other => panic!("{other:?}"),
        };
        commands.iter().map(|(_, one)| text(&one.command)).collect()
    }

    fn shown(obsolete: &[(GpuId, Owner)]) -> Vec<String> {
        obsolete.iter().map(|(gpu, owner)| format!("{gpu} {owner}")).collect()
    }

    #[test]
    fn each_gpu_of_an_object_gets_its_mark_once_and_loses_it_with_the_object() {
        let (mut ledger, mut known) = (node(2), KnownMaintenances::default());
        known.apply(Event::Listing);
        known.apply(Event::Listed(vec![cordon("a", &["*"]), cordon("b", &["GPU-1", "GPU-9"])]));
        assert_eq!(
            of(&known.missing_marks(&ledger, NOW)),
            [
                "cordon GPU-0 by GPUMaintenance/name-a fleet:a",
                "cordon GPU-1 by GPUMaintenance/name-a fleet:a",
                "cordon GPU-1 by GPUMaintenance/name-b fleet:b",
            ]
        );
        for (index, uid) in [(0, "a"), (1, "a"), (1, "b")] {
            put_mark(&mut ledger, index, uid, Mark::cordon("x", "", NOW.wall_ms));
        }
        assert!(known.missing_marks(&ledger, NOW).is_empty() && known.obsolete_marks(&ledger).is_empty());
        known.apply(Event::Deleted(cordon("a", &["*"])));
        assert_eq!(shown(&known.obsolete_marks(&ledger)), ["GPU-0 fleet:a", "GPU-1 fleet:a"]);
        // A list that lacks it.
        known.apply(Event::Listed(Vec::new()));
        assert_eq!(known.obsolete_marks(&ledger).len(), 3);
    }

    #[test]
    fn a_refused_mark_is_set_once_the_gpu_has_other_marks() {
        let (mut ledger, mut known) = (node(1), KnownMaintenances::default());
        known.apply(Event::Applied(cordon("a", &["GPU-0"])));
        let marks = ledger.gpus[&gpu(0)].marks.clone();
        let refused = RefusedMark { marks, why: "it has eight marks".into() };
        known.objects.get_mut("a").unwrap().refused.insert(gpu(0), refused);
        assert!(known.missing_marks(&ledger, NOW).is_empty());
        let status = known.objects["a"].report("a", &ledger, NOW);
        let stalled = status.conditions.iter().flatten().find(|one| one.type_ == "Stalled").unwrap();
        assert_eq!((stalled.status.as_str(), stalled.reason.as_str()), ("True", "TooManyMarks"));
        put_mark(&mut ledger, 0, "other", Mark::cordon("x", "", NOW.wall_ms));
        assert_eq!(known.missing_marks(&ledger, NOW).len(), 1);
    }

    #[test]
    fn objects_beyond_the_limit_keep_their_marks() {
        let (mut ledger, mut known) = (node(1), KnownMaintenances::default());
        put_mark(&mut ledger, 0, "last", Mark::cordon("x", "", NOW.wall_ms));
        let many = (0..OBJECTS_MAX).map(|n| cordon(&n.to_string(), &["GPU-9"]));
        known.apply(Event::Listed(many.chain([cordon("last", &["GPU-0"])]).collect()));
        assert_eq!(known.objects.len(), OBJECTS_MAX);
        assert!(known.obsolete_marks(&ledger).is_empty());
        known.apply(Event::Deleted(cordon("last", &["GPU-0"])));
        assert_eq!(shown(&known.obsolete_marks(&ledger)), ["GPU-0 fleet:last"]);
    }

    #[test]
    fn before_a_complete_list_no_mark_is_removed() {
        let (mut ledger, mut known) = (node(1), KnownMaintenances::default());
        put_mark(&mut ledger, 0, "a", Mark::cordon("x", "", NOW.wall_ms));
        known.apply(Event::Listing);
        known.apply(Event::Opened);
        assert!(known.obsolete_marks(&ledger).is_empty());
        known.apply(Event::Listed(Vec::new()));
        assert_eq!(shown(&known.obsolete_marks(&ledger)), ["GPU-0 fleet:a"]);
    }

    #[test]
    fn a_drain_has_its_deadline_from_the_moment_at_which_the_daemon_began_it() {
        let ledger = node(1);
        let mut known = KnownMaintenances::default();
        let spec = json!({
            "nodeName": "n", "mode": "drain", "uuids": ["GPU-0"],
            "evict": true, "deadline": "30m", "atDeadline": "giveUp",
        });
        known.apply(Event::Applied(object("a", &spec)));
        assert_eq!(
            of(&known.missing_marks(&ledger, NOW)),
            ["drain GPU-0 evict true in Some(1800) then GiveUp"]
        );
    }

    #[test]
    fn the_conditions_show_progress_failure_and_success_as_kstatus_reads_them() {
        let mut ledger = node(2);
        let mut known = KnownMaintenances::default();
        known.apply(Event::Applied(object(
            "a",
            &json!({"nodeName": "n", "mode": "drain", "uuids": ["GPU-0"], "deadline": "10s"}),
        )));
        let shown = |known: &KnownMaintenances, ledger: &Ledger, now: Now| {
            let status = known.objects["a"].report("a", ledger, now);
            let of = |kind: &str| {
                let found = status.conditions.iter().flatten().find(|one| one.type_ == kind).unwrap();
                format!("{} {}", found.status, found.reason)
            };
            (status.state.unwrap(), of("Reconciling"), of("Stalled"), of("Drained"))
        };
        let row = |state, reconciling: &str, stalled: &str, drained: &str| {
            (state, reconciling.to_owned(), stalled.to_owned(), drained.to_owned())
        };
        assert_eq!(
            shown(&known, &ledger, NOW),
            row(MaintenanceState::Pending, "True Pending", "False NotStalled", "False Pending")
        );
        let order = Order { deadline_wall_ms: Some(NOW.wall_ms + 10_000), ..Order::default() };
        let drain = Mark { kind: MarkKind::Drain(order), ..Mark::cordon("x", "", NOW.wall_ms) };
        put_mark(&mut ledger, 0, "a", drain);
        assert_eq!(
            shown(&known, &ledger, NOW),
            row(MaintenanceState::Draining, "True Draining", "False NotStalled", "False Draining")
        );
        let late = Now { wall_ms: NOW.wall_ms + 11_000, mono_ms: NOW.mono_ms + 11_000 };
        assert_eq!(
            shown(&known, &ledger, late),
            row(MaintenanceState::Draining, "False Late", "True Late", "False Late")
        );
        let mut given_up = ledger.clone();
        put_mark(&mut given_up, 0, "a", Mark { expired: true, ..Mark::cordon("x", "", NOW.wall_ms) });
        assert!(known.missing_marks(&given_up, late).is_empty(), "it is not begun again");
        assert_eq!(
            shown(&known, &given_up, late),
            row(MaintenanceState::Cordoned, "False Late", "True Late", "False Late")
        );
        Arc::make_mut(ledger.gpus.get_mut(&gpu(0)).unwrap()).marks.drained_wall_ms = Some(NOW.wall_ms);
        assert_eq!(
            shown(&known, &ledger, late),
            row(MaintenanceState::Drained, "False Drained", "False NotStalled", "True Drained")
        );
    }

    #[test]
    fn a_condition_keeps_its_time_while_its_status_stays() {
        let ledger = node(1);
        let mut known = KnownMaintenances::default();
        known.apply(Event::Applied(cordon("a", &["GPU-7"])));
        let first = known.objects["a"].report("a", &ledger, NOW);
        let stalled = first.conditions.as_ref().unwrap().iter().find(|one| one.type_ == "Stalled").unwrap();
        assert_eq!((stalled.status.as_str(), stalled.reason.as_str()), ("True", "NoSuchGPU"));
        known.objects.get_mut("a").unwrap().status = first.clone();
        let later = Now { wall_ms: NOW.wall_ms + 60_000, mono_ms: NOW.mono_ms + 60_000 };
        assert_eq!(known.objects["a"].report("a", &ledger, later), first, "so nothing is written");
    }
}
