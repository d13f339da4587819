//! `/node` and `/readyz`.

use crate::node_facts::{NodeFacts, Step};
use crate::resources::gpu_view::View;
use crate::state::State;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::Kind;
use berth_api::{Check, Counts, Node, ProcessSight, Ready, ResourceState, StepState, rfc3339};
use berth_core::admission::{KernelHandle, OfferNotes};
use berth_http::Failure;
use berth_http::etag;
use berth_http::probe_details;
use berth_http::query::Probe;
use berth_kernel::attribution::pods_with_gpu_bypass;
use berth_kernel::breaker::{Breaker, Phase};
use berth_kernel::names::Resource;
use std::collections::BTreeMap;

/// Get the node
///
/// Returns whether the daemon is ready and what it waits for, the resources as listed to the kubelet, and the numbers
/// of GPUs, allocations and policies.
#[utoipa::path(get, path = "/api/v1/node", tag = "node", operation_id = "getNode",
    responses((status = 200, description = "The node", body = Node)))]
pub(crate) async fn show(state: web::Data<State>, request: HttpRequest) -> Result<HttpResponse, Failure> {
    let facts = (state.facts)();
    let view = View::of(&state);
    let ledger = &view.ledger;
    let store_trouble = state.kernel.store_error();
    let checks = checks(&facts, &state);
    let node = Node {
        ready: checks.iter().all(|c| c.ok),
        checks,
        resources: resources(&facts, &view),
        name: facts.name,
        version: env!("CARGO_PKG_VERSION").into(),
        generation: ledger.generation,
        gpu_source: facts.gpu_source,
        driver_version: facts.driver_version,
        cuda_version: facts.cuda_version,
        store_trouble,
        api_server: facts.api_server.as_ref().map(step_state),
        hold: ledger.hold.as_deref().map(String::from),
        stack_revision: ledger.stack.revision,
        processes: ProcessSight::of(ledger.sight()),
        counts: counts(&view),
    };
    etag::fresh(&request, &node)
}

/// Check readiness
///
/// The daemon is ready once the GPUs were scanned, the devices of running pods were adopted, the store accepts
/// writes, and the kubelet accepted every resource once since the daemon started: a rollout continues with the next
/// node when this one is ready, which it must not while its resources are missing. A kubelet that disconnects later
/// is reported, but the daemon stays ready; so do policies of the active stack that cannot be called yet. Over TLS
/// from another machine the details need the right to read; without it only the names of the checks are returned.
#[utoipa::path(get, path = "/readyz", tag = "health", operation_id = "readyz", security(()), params(Probe),
    responses(
        (status = 200, description = "The daemon is ready", body = Ready),
        (status = 400, description = "A malformed query, or an unknown key in it"),
        (status = 503, description = "The daemon is not ready; the body has the reasons"),
    ))]
pub(crate) async fn readyz(
    state: web::Data<State>,
    request: HttpRequest,
    _probe: web::Query<Probe>,
) -> Result<HttpResponse, Failure> {
    let checks = probe_details::visible_checks(&request, checks(&(state.facts)(), &state));
    if checks.iter().all(|c| c.ok) {
        return Ok(HttpResponse::Ok().json(Ready { ready: true, checks }));
    }
    Err(Failure::new(Kind::NotReady, probe_details::describe_failed(&checks)).retry_after(1).checks(checks))
}

pub(crate) fn checks(facts: &NodeFacts, state: &State) -> Vec<Check> {
    let kernel = &state.kernel;
    let store_trouble = kernel.store_error();
    let OfferNotes { mig, warnings } = kernel.offer_notes();
    let mig_notes = (!mig.notes.is_empty()).then(|| mig.notes.join("; "));
    let step = |name: &str, step: &Step| {
        let waiting = waiting(step);
        Check { name: name.into(), ok: waiting.is_none(), detail: waiting }
    };
    let under_way: Vec<_> = facts
        .registrations
        .iter()
        .filter_map(|r| waiting(&r.state).map(|why| format!("{}: {why}", r.resource)))
        .collect();
    let kubelet = match waiting(&facts.kubelet) {
        Some(why) => Some(why),
        None => Some(under_way.join("; ")).filter(|text| !text.is_empty()),
    };
    let (kubelet_ok, kubelet) = match registered(kernel) {
        Registered::Nothing => (kubelet.is_none(), kubelet),
        Registered::All => (true, kubelet),
        Registered::Waiting(missing) => (false, Some(kubelet.unwrap_or(missing))),
    };
    let waits = facts.uncallable.as_ref().map(|why| format!("waiting: {why}"));
    let policies: Vec<String> = waits.into_iter().chain(warnings).collect();
    let policies = (!policies.is_empty()).then(|| policies.join("; "));
    let mut checks = vec![
        step("gpus", &facts.gpus),
        step("adoption", &facts.adoption),
        Check { name: "store".into(), ok: store_trouble.is_none(), detail: store_trouble },
        Check { name: "mig".into(), ok: mig.refusal.is_none(), detail: mig.refusal.or(mig_notes) },
        // The other policies and the baseline answer meanwhile.
        Check { name: "policies".into(), ok: true, detail: policies },
        // Waiting for an absent kubelet is not a failure of the daemon.
        Check {
            name: "kubelet".into(),
            ok: kubelet_ok,
            detail: kubelet.map(|why| format!("waiting: {why}")),
        },
        // A device that the kubelet considers free is granted nevertheless.
        Check {
            name: "evidence".into(),
            ok: true,
            detail: kernel.snapshot().stuck.as_deref().map(|s| s.describe(&rfc3339(s.since_wall_ms))),
        },
    ];
    if let Some(labels) = &facts.labels {
        // Missing labels affect the pods that select by them, not this daemon.
        checks.push(Check { name: "labels".into(), ok: true, detail: waiting(labels) });
    }
    if let Some(tls) = state.http.access.tls() {
        // The previous files stay in use while the present ones are invalid.
        checks.push(Check { name: "tls".into(), ok: true, detail: tls.last_error() });
    }
    checks
}

/// The registration of all resources since the start.
enum Registered {
    /// There is none: a node without GPUs is ready.
    Nothing,
    /// Each resource was accepted once.
    All,
    /// Some are missing.
    Waiting(String),
}

/// Compared with the ledger, which has all resources before the first registration.
fn registered(kernel: &KernelHandle) -> Registered {
    let ledger = kernel.snapshot();
    let resources = ledger.resources();
    if resources.is_empty() {
        let mut present = ledger.parts.values().filter(|part| part.present);
        return match present.any(|part| part.offered_by.is_none()) {
            true => Registered::Waiting("the GPUs are not offered yet".into()),
            false => Registered::Nothing,
        };
    }
    let standings = kernel.counters().kubelet.registrations();
    let taken = |resource: &str| standings.get(resource).is_some_and(|standing| standing.was_registered);
    let missing: Vec<&str> = resources.iter().map(Resource::as_str).filter(|name| !taken(name)).collect();
    match missing.is_empty() {
        true => Registered::All,
        false => Registered::Waiting(format!("the kubelet has not accepted {} yet", missing.join(", "))),
    }
}

fn waiting(step: &Step) -> Option<String> {
    match step {
        Step::Done => None,
        Step::Waiting(why) => Some(why.clone()),
    }
}

fn step_state(step: &Step) -> StepState {
    StepState { done: *step == Step::Done, waiting: waiting(step) }
}

/// Every resource with devices or a registration.
fn resources(facts: &NodeFacts, view: &View) -> Vec<ResourceState> {
    let mut all: BTreeMap<String, ResourceState> = BTreeMap::new();
    let blank = |resource: &str| ResourceState {
        resource: resource.into(),
        registration: StepState { done: false, waiting: Some("not registered".into()) },
        devices: 0,
        held: 0,
        free: 0,
        breaker: None,
    };
    for used in view.uses() {
        let state = ResourceState {
            devices: used.devices,
            held: used.held,
            free: used.free,
            ..blank(&used.resource)
        };
        all.insert(used.resource.clone(), state);
    }
    for registration in &facts.registrations {
        let name = registration.resource.as_str();
        let state = all.entry(name.into()).or_insert_with(|| blank(name));
        state.registration = step_state(&registration.state);
    }
    for (resource, breaker) in view.ledger.breakers.iter() {
        if let Some(state) = all.get_mut(resource.as_str()) {
            state.breaker = breaker_words(resource, breaker);
        }
    }
    all.into_values().collect()
}

fn breaker_words(resource: &Resource, breaker: &Breaker) -> Option<String> {
    match breaker.phase {
        Phase::Closed => None,
        Phase::Open { .. } => Some(format!(
            "requests for {resource} were denied repeatedly: its free devices are withdrawn for {} s",
            breaker.pause_ms / 1000
        )),
        Phase::HalfOpen => Some("one device is listed again; the next request decides".into()),
    }
}

fn counts(view: &View) -> Counts {
    let ledger = &view.ledger;
    let gpus = || ledger.gpus.values();
    Counts {
        gpus: ledger.gpus.len(),
        working_gpus: gpus().filter(|g| g.health.state.is_usable()).count(),
        cordoned_gpus: gpus().filter(|g| !g.marks.is_empty()).count(),
        allocations: ledger.live.len(),
        ended_allocations: ledger.ended.len(),
        bypasses: view.bypasses(),
        bypassing_pods: ledger.pods.is_some().then(|| pods_with_gpu_bypass(ledger).count()),
        policies: ledger.policies.len(),
    }
}
