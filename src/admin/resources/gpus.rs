//! `/gpus`: the GPUs, their health, their devices with the holders, and the progress of drains; forgetting a GPU.

use crate::failure::{IntoFailure, OrFailure};
use crate::state::{StartStep, State};
use crate::survey::Survey;
use actix_web::web::{Data, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{
    Device, DeviceState, Drain, DrainHolder, DrainHolderState, DrainProgress, DrainState, Gpu, GpuList,
    GpuSummary, Health, HealthState, HealthTurn, Kind, Link, Mark, Mig, OfferLine, Operation, Part, PodOwner,
    TopHolder, Via, non_empty, rfc3339,
};
use berth_http::{Caller, Failure, HandlerResult, etag};
use berth_kernel::drain::eviction_plan::{EvictionStatus, GpuHolder, holders};
use berth_kernel::drain::marks::{self, Order};
use berth_kernel::hardware::gpu::{self, Load};
use berth_kernel::hardware::health;
use berth_kernel::ids::names::{AllocationId, DeviceKey, GpuId};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::{GpuState, Ledger};
use berth_kernel::node::refusal::Refusal;
use berth_kernel::sharing::part_state::{self, PartState};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use utoipa::IntoParams;

/// Filters of GPUs. All given ones must match.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Only those with this health.
    #[param(example = "healthy")]
    health: Option<HealthState>,
    /// Only those in this drain state.
    #[param(example = "active")]
    drain: Option<DrainState>,
}

impl Filter {
    fn check(&self) -> Result<(), Failure> {
        let (key, word, known) = match (&self.health, &self.drain) {
            (Some(HealthState::Other(word)), _) => ("health", word, HealthState::NAMES),
            (_, Some(DrainState::Other(word))) => ("drain", word, DrainState::NAMES),
            _ => return Ok(()),
        };
        let rule = format!("{key}: one of {}, not {word:?}", known.join(", "));
        Err(Failure::new(Kind::Query, rule))
    }
}

/// List GPUs
///
/// Lists each GPU with its health, its drain state, and its devices and held devices by resource, all in one
/// response.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The GPUs, in the order of their index", body = GpuList)))]
pub(crate) async fn list(state: Data<State>, request: HttpRequest, filter: Query<Filter>) -> HandlerResult {
    filter.check()?;
    let view = View::of(&state);
    let mut items = view.summaries();
    items.retain(|gpu| filter.health.as_ref().is_none_or(|health| *health == gpu.health.state));
    items.retain(|gpu| filter.drain.as_ref().is_none_or(|drain| *drain == gpu.drain.state));
    let unidentified = view.ledger().unidentified.iter().map(Into::into).collect();
    etag::fresh(&request, &GpuList { items, unidentified })
}

/// Get a GPU
///
/// Returns its facts, its health with the history, its drain state with the progress, each device with its holder,
/// and its distance to the other GPUs.
#[utoipa::path(get, path = "", responses((status = 200, description = "The GPU", body = Gpu)))]
pub(crate) async fn show(state: Data<State>, request: HttpRequest, path: Path<String>) -> HandlerResult {
    etag::fresh(&request, &shown(&state, &gpu_id(&state, &path)?)?)
}

/// Forget a vanished GPU
///
/// Removes it and its ids from the kubelet's list. Refused while the GPU is present, while an allocation names it,
/// and within a minute after it vanished.
#[utoipa::path(delete, path = "",
    responses(
        (status = 204, description = "The GPU was removed"),
        (status = 409, description = "The GPU is present, is held, or vanished a moment ago"),
    ))]
pub(crate) async fn forget(caller: Caller, state: Data<State>, path: Path<String>) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    state.kernel.execute(Command::Forget { gpu: gpu.clone() }).await.or_failure()?;
    tracing::info!(%gpu, by = caller.name(), "a vanished GPU was removed from the list");
    Ok(HttpResponse::NoContent().finish())
}

/// The GPU of a path. An index is not accepted, since it may be another GPU's after a boot; the error names the GPU
/// that has it now.
pub(crate) fn gpu_id(state: &State, text: &str) -> Result<GpuId, Failure> {
    let gpu = GpuId::parse(text).map_err(|error| Failure::new(Kind::Path, error))?;
    no_index(&state.kernel.snapshot(), &gpu, |words| Failure::new(Kind::UnknownGpu, words))?;
    Ok(gpu)
}

/// The GPU of the key `gpu` of a query; an index is not accepted either. An unknown GPU has no items, or only past
/// ones.
pub(crate) fn gpu_of_query(ledger: &Ledger, text: &str) -> Result<GpuId, Failure> {
    let bad = |words: String| Failure::new(Kind::Query, format!("gpu: {words}"));
    let gpu = GpuId::parse(text).map_err(|error| bad(error.to_string()))?;
    no_index(ledger, &gpu, bad)?;
    Ok(gpu)
}

/// The state of a known GPU.
pub(crate) fn gpu_state<'l>(ledger: &'l Ledger, gpu: &GpuId) -> Result<&'l GpuState, Failure> {
    let state = ledger.gpus.get(gpu).map(AsRef::as_ref);
    state.ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() }.into_failure())
}

fn no_index(ledger: &Ledger, gpu: &GpuId, problem: impl Fn(String) -> Failure) -> Result<(), Failure> {
    let index: u32 = match gpu.as_str().parse() {
        Ok(index) if !ledger.gpus.contains_key(gpu) => index,
        _ => return Ok(()),
    };
    let has_it = ledger.parts.values().filter(|p| p.part.gpu_index == index);
    // A vanished GPU keeps its index until it is forgotten; the present one is meant.
    Err(match has_it.max_by_key(|p| p.present).map(|p| &p.part.gpu) {
        Some(uuid) => problem(format!("{index} is an index; this route needs the UUID of a GPU"))
            .hint(format!("index {index} is {uuid} now; after a reboot it may be another GPU")),
        None => problem(format!("no GPU has the UUID or the index {index} on this node"))
            .hint("list the GPUs with their UUIDs")
            .action(Operation::ListGpus),
    })
}

pub(crate) fn shown(state: &State, gpu: &GpuId) -> Result<Gpu, Failure> {
    let shown = View::of(state).gpu(gpu);
    shown.ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() }.into_failure())
}

/// GPUs, parts and devices of one snapshot at the present time, as the API shows them.
pub(crate) struct View {
    survey: Arc<Survey>,
    /// The loads of the last scan.
    loads: Arc<BTreeMap<GpuId, Load>>,
    now: Now,
    /// The connection to the API server, where drains are shown.
    api_server: Option<StartStep>,
}

impl View {
    pub(crate) fn of(state: &State) -> Self {
        let (survey, now) = (state.caches.surveys.newest(&state.kernel), state.kernel.now());
        let loads = state.kernel.gpu_history().loads();
        Self { survey, loads, now, api_server: (state.facts)().api_server }
    }

    fn ledger(&self) -> &Ledger {
        &self.survey.ledger
    }

    /// All GPUs in the order of their index.
    fn summaries(&self) -> Vec<GpuSummary> {
        let gpus = self.ledger().gpus.iter();
        let mut all: Vec<_> = gpus.filter_map(|(id, state)| self.summary(id, state)).collect();
        all.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        all
    }

    /// One GPU with all its details.
    fn gpu(&self, id: &GpuId) -> Option<Gpu> {
        let state = self.ledger().gpus.get(id)?;
        let facts = &self.main_part(id)?.part;
        Some(Gpu {
            summary: self.summary(id, state)?,
            vendor: facts.vendor.clone(),
            minor: facts.minor,
            pci_bus: facts.pci_bus.map(|bus| bus.to_string()).unwrap_or_default(),
            numa_node: facts.numa_node,
            mig_enabled: facts.mig_enabled,
            attributes: facts.attributes.clone(),
            parts: self.parts(id).map(|p| self.part(p)).collect(),
            links: self.links(id),
        })
    }

    /// The progress of a GPU's drain.
    pub(crate) fn drain(&self, id: &GpuId) -> Option<Drain> {
        Some(self.drain_of(id, &self.ledger().gpus.get(id)?.marks))
    }

    fn parts<'v>(&'v self, gpu: &'v GpuId) -> impl Iterator<Item = &'v PartState> {
        let parts = self.ledger().parts.values().map(AsRef::as_ref);
        parts.filter(move |p| &p.part.gpu == gpu)
    }

    /// The whole GPU; if only its instances are known, the first of them.
    fn main_part<'v>(&'v self, gpu: &'v GpuId) -> Option<&'v PartState> {
        self.ledger().part(gpu.as_part()).or_else(|| self.parts(gpu).next())
    }

    fn summary(&self, id: &GpuId, state: &GpuState) -> Option<GpuSummary> {
        let main = self.main_part(id)?;
        let usage = self.ledger().usage.get(id.as_part());
        let load = self.loads.get(id);
        let holders = self.survey.holders.get(id);
        let pods = holders.map_or(&[][..], |holders| &holders.pods);
        Some(GpuSummary {
            uuid: id.to_string(),
            index: main.part.gpu_index,
            model: main.part.model.clone(),
            memory_mib: known_memory(&main.part),
            memory_used_mib: used_memory(&main.part, usage),
            processes: self.ledger().processes_on(id.as_part()),
            bypasses: self.survey.bypasses.get(id).copied().unwrap_or(0),
            present: self.parts(id).any(|p| p.present),
            excluded: self.ledger().excluded.contains(id),
            health: self.health(id, state),
            drain: self.drain_of(id, &state.marks),
            via: Some(Via::of(self.ledger(), id, state, self.now)),
            resources: self.survey.uses.get(id).cloned().unwrap_or_default(),
            utilization_percent: load.and_then(|load| load.utilization_percent).map(u32::from),
            temperature_celsius: load.and_then(|load| load.temperature_celsius),
            power_watts: load.and_then(|load| load.power_watts),
            memory_granted_mib: holders.and_then(|holders| holders.memory_granted_mib),
            top_holder: pods.first().map(|top| TopHolder {
                namespace: top.name.namespace.clone(),
                pod: top.name.pod.clone(),
                devices: top.devices,
            }),
            pod_count: u32::try_from(pods.len()).unwrap_or(u32::MAX),
        })
    }

    fn drain_of(&self, gpu: &GpuId, marks: &marks::Marks) -> Drain {
        let drain = marks.drain();
        let mark = drain.mark();
        Drain {
            state: (&drain).into(),
            by: mark.map(|m| m.by.clone()),
            why: mark.map(marks::Mark::reason).filter(|w| !w.is_empty()),
            since: mark.map(|m| rfc3339(m.since_wall_ms)),
            progress: drain
                .order()
                .map(|order| progress(self.ledger(), gpu, order, self.api_server.as_ref(), self.now)),
            marks: marks.by_owner.iter().map(|(owner, mark)| Mark::from_kernel(owner, mark)).collect(),
        }
    }

    fn part(&self, state: &PartState) -> Part {
        let usage = self.ledger().usage.get(&state.part.id);
        let devices = state.devices.iter();
        Part {
            uuid: state.part.id.to_string(),
            mig: state.part.mig.as_ref().map(|m| Mig {
                profile: m.profile.clone(),
                gpu_instance: m.gpu_instance,
                compute_instance: m.compute_instance,
            }),
            memory_mib: known_memory(&state.part),
            memory_used_mib: used_memory(&state.part, usage),
            processes: self.ledger().processes_on(&state.part.id),
            present: state.present,
            offered_by: state.offered_by.as_ref().map(ToString::to_string),
            offer: state.lines.iter().map(OfferLine::from).collect(),
            devices: devices
                .map(|((resource, share), device)| self.device(&state.key(resource, *share), device))
                .collect(),
        }
    }

    fn device(&self, key: &DeviceKey, device: &part_state::Device) -> Device {
        let healthy = self.survey.healthy.contains(key);
        let state = match (device.held(), healthy, device.offered()) {
            (true, _, _) => DeviceState::Held,
            (false, true, _) => DeviceState::Free,
            (false, false, true) => DeviceState::Withdrawn,
            (false, false, false) => DeviceState::Leaving,
        };
        Device {
            id: key.id.to_string(),
            resource: key.resource.to_string(),
            state,
            healthy,
            consumes: device.consumes.into(),
            allocations: device.holders.iter().map(ToString::to_string).collect(),
        }
    }

    fn health(&self, id: &GpuId, state: &GpuState) -> Health {
        let health = &state.health;
        let is_present = self.parts(id).any(|part| part.present);
        // After a restart the GPUs are known before the first scan.
        let unseen = !is_present && health.state != health::HealthState::Vanished;
        let reason = if unseen { "not found since the daemon started" } else { &health.reason };
        let is_healthy = health.state == health::HealthState::Healthy;
        let answers = is_present && !self.ledger().scan_errors.contains_key(id);
        let heals_at = (health.quiet_ms.is_some() && !is_healthy && answers).then(|| {
            let ms =
                self.now.wall_ms.saturating_add(health.quiet_until_mono_ms.saturating_sub(self.now.mono_ms));
            // Rounded to seconds: wall and monotonic time are read one after the other, and the difference of a
            // millisecond would change the answer and its ETag.
            rfc3339(ms.saturating_add(500) / 1000 * 1000)
        });
        Health {
            state: if unseen { HealthState::Vanished } else { (&health.state).into() },
            reason: non_empty(reason),
            since: rfc3339(health.since_wall_ms),
            heals: health.quiet_ms.is_some(),
            heals_at,
            history: health
                .history
                .iter()
                .map(|turn| HealthTurn {
                    state: (&turn.state).into(),
                    reason: non_empty(&turn.reason),
                    since: rfc3339(turn.since_wall_ms),
                })
                .collect(),
        }
    }

    fn links(&self, gpu: &GpuId) -> Vec<Link> {
        let others = self.ledger().gpus.keys().filter(|other| *other != gpu);
        others
            .filter_map(|other| {
                self.ledger().links.between(gpu, other).map(|link| Link {
                    gpu: other.to_string(),
                    path: (&link.path).into(),
                    nvlinks: link.nvlinks,
                })
            })
            .collect()
    }
}

/// The progress of the order for this GPU. `api_server`: the connection to the API server, if it is used.
fn progress(
    ledger: &Ledger,
    gpu: &GpuId,
    order: &Order,
    api_server: Option<&StartStep>,
    now: Now,
) -> DrainProgress {
    let holders = holders(ledger, gpu);
    let allocations: BTreeSet<AllocationId> =
        holders.iter().flat_map(|h| h.allocations.iter().copied()).collect();
    // The process list of a GPU includes its instances.
    let whole = ledger.processes_on(gpu.as_part());
    let parts = ledger.parts.values().filter(|p| &p.part.gpu == gpu);
    let seen = parts.filter_map(|p| ledger.processes_on(&p.part.id));
    DrainProgress {
        evict: order.evict,
        deadline: order.deadline_wall_ms.map(rfc3339),
        seconds_left: order.left_ms(now).map(|ms| ms / 1000),
        at_deadline: order.at_deadline.into(),
        late: order.is_late(now),
        warning: warning(order, api_server),
        allocations: allocations.iter().map(ToString::to_string).collect(),
        processes: whole.or_else(|| seen.reduce(u32::saturating_add)),
        holders: holders.into_iter().map(holder).collect(),
    }
}

/// Why pods cannot be evicted at all, if so.
fn warning(order: &Order, api_server: Option<&StartStep>) -> Option<String> {
    match api_server {
        _ if !order.evict => None,
        Some(StartStep::Done) => None,
        Some(StartStep::Waiting(why)) => {
            Some(format!("no pod is evicted while the API server cannot be used: {why}"))
        }
        // An order outlives a restart with other settings.
        None => Some(
            "no pod is evicted: no API server is configured any more (set --kubeconfig, or run in a pod \
             with a service account)"
                .into(),
        ),
    }
}

/// The part's memory, MiB, if the driver reports it.
fn known_memory(part: &gpu::Part) -> Option<u64> {
    Some(part.memory_mib).filter(|mib| *mib > 0)
}

/// The memory in use on the part, MiB. It cannot be read where the whole memory cannot.
fn used_memory(part: &gpu::Part, usage: Option<&gpu::Usage>) -> Option<u64> {
    known_memory(part).and(usage?.memory_used_mib)
}

/// The holder of an allocation of a GPU that is drained, or may be.
pub(crate) fn holder(holder: GpuHolder) -> DrainHolder {
    use DrainHolderState as State;
    let (state, message, since) = match holder.status {
        EvictionStatus::Unidentified => (State::NotKnown, None, None),
        EvictionStatus::NotShown => (State::NotShown, None, None),
        EvictionStatus::NotRequested => (State::NotAsked, None, None),
        EvictionStatus::Static => (State::StaticPod, None, None),
        EvictionStatus::Requested { since_wall_ms } => (State::Asked, None, Some(since_wall_ms)),
        EvictionStatus::Budget { message } => (State::DisruptionBudget, Some(message), None),
        EvictionStatus::Failed { message } => (State::Failed, Some(message), None),
        EvictionStatus::Terminating { since_wall_ms } => (State::Terminating, None, Some(since_wall_ms)),
        EvictionStatus::Over => (State::Over, None, None),
    };
    DrainHolder {
        namespace: holder.namespace,
        pod: holder.pod,
        pod_uid: holder.uid,
        containers: holder.containers.into_iter().collect(),
        allocations: holder.allocations.iter().map(ToString::to_string).collect(),
        comes_back: holder.shown.as_ref().is_some_and(|pod| pod.is_of_daemon_set()),
        shown: holder.shown.is_some(),
        owner: holder
            .shown
            .and_then(|pod| pod.owner.clone())
            .map(|owner| PodOwner { kind: owner.kind, name: owner.name }),
        state,
        message,
        since: since.map(rfc3339),
    }
}
