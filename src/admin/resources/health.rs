//! `/livez`, `/readyz` and `/metrics`.
//!
//! The kubelet restarts a daemon that is not alive. So each check of liveness is of something that should have ended and
//! did not, and not of something that fails: a full disk, an NVML that returns errors (it is opened again at each scan)
//! or an absent kubelet is reported by `/readyz`, and a restart would only withdraw the node's resources from its
//! containers. The exception is an NVML in a container that cannot be opened any more after the driver was replaced: the
//! container's mounts may be those of the former driver, which only a restart replaces.

use crate::state::{NodeFacts, StartStep, State};
use actix_web::web::{Data, Query};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{Alive, Check, ConfigurationState, Kind, Ready, rfc3339};
use berth_core::KernelHandle;
use berth_core::metrics::{CONTENT_TYPE, CheckResults};
use berth_core::stack::OfferNotes;
use berth_http::{Failure, HandlerResult, may_have_details};
use berth_kernel::grants::contested::contested;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::triage::TriageAnswer;
use berth_kernel::ids::names::{GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::transitions::{GpuName, Transition};
use berth_observe::counters::{RegistrationState, RegistrationStatus};
use serde::Deserialize;
use std::time::Duration;
use utoipa::IntoParams;

/// The query of a probe.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Probe {
    /// Accepted as by the probes of Kubernetes; the response lists every check in any case.
    #[allow(dead_code)]
    #[param(example = "")]
    verbose: Option<String>,
}

/// Check liveness
///
/// The daemon is alive if the ledger's writer makes progress, policy calls return, GPU scans start and end, the
/// runtime that serves the kubelet runs, and the kubelet has a stream of every registered resource. Failures that
/// are retried belong to `/readyz`. Over TLS from another machine the details need the right to read.
#[utoipa::path(get, path = "",
    security(()),
    responses(
        (status = 200, description = "The daemon is live", body = Alive),
        (status = 503, description = "A part of the daemon makes no progress; the body has the reason: restart it"),
    ))]
pub(crate) async fn livez(state: Data<State>, request: HttpRequest, _probe: Query<Probe>) -> HandlerResult {
    let checks = visible_checks(&request, liveness(&state.kernel));
    if checks.iter().all(|check| check.ok) {
        return Ok(HttpResponse::Ok().json(Alive { alive: true, checks }));
    }
    Err(Failure::new(Kind::NotAlive, describe_failed(&checks)).checks(checks))
}

/// The checks, with details only if the client may have them.
fn visible_checks(request: &HttpRequest, mut checks: Vec<Check>) -> Vec<Check> {
    if !may_have_details(request) {
        checks.iter_mut().for_each(|check| check.detail = None);
    }
    checks
}

/// The failed checks in one line: their names, with details if they have them.
fn describe_failed(checks: &[Check]) -> String {
    let failed = checks.iter().filter(|check| !check.ok);
    let texts = failed.map(|check| match &check.detail {
        Some(detail) => format!("{}: {detail}", check.name),
        None => check.name.clone(),
    });
    texts.collect::<Vec<_>>().join("; ")
}

/// The checks of liveness.
fn liveness(kernel: &KernelHandle) -> Vec<Check> {
    let counters = kernel.counters();
    let limits = counters.limits();
    let check = |name: &str, error: Option<String>, note: Option<String>| Check {
        name: name.into(),
        ok: error.is_none(),
        detail: error.or(note),
    };
    let over = |time: Option<Duration>, limit: Duration| {
        time.filter(|time| *time > limit).map(|time| format!("{:.0} s", time.as_secs_f64()))
    };
    // The keeper owns the sender, so an error means that its thread has ended.
    let ended = kernel.watch().has_changed().is_err();
    let ended = ended.then(|| "the thread that owns the ledger has ended".to_owned());
    let silent = over(counters.keeper.heartbeat.silent_for(), limits.keeper);
    let silent =
        silent.map(|time| format!("the thread that owns the ledger has processed nothing for {time}"));
    let stuck = over(counters.policies.busy_for(), limits.policies);
    let stuck = stuck.map(|time| format!("the policy thread has been busy with one call for {time}"));
    let hanging = over(counters.gpus.heartbeat.busy_for(), limits.scan);
    let hanging =
        hanging.map(|time| format!("a scan of the GPUs has not ended for {time}: NVML does not answer"));
    let every = counters.gpus.scan_interval();
    let overdue = every.and_then(|every| over(counters.gpus.heartbeat.silent_for(), every + limits.scan));
    let overdue = overdue
        .map(|time| format!("no scan of the GPUs has begun for {time}: the thread of the scans has ended"));
    let quiet = over(counters.front.silent_for(), limits.front);
    let quiet =
        quiet.map(|time| format!("the runtime that serves the kubelet has had no heartbeat for {time}"));
    let fails = counters.gpus.last_error().map(|why| format!("the last scan of the GPUs failed: {why}"));
    vec![
        check("keeper", ended.or(silent), None),
        check("policies", stuck, None),
        check("scans", hanging.or(overdue).or(counters.gpus.restart_reason()), fails),
        check("kubelet", quiet, None),
        check("streams", unwatched(kernel, limits.stream), None),
    ]
}

/// Registered resources that the kubelet does not watch.
fn unwatched(kernel: &KernelHandle, limit: Duration) -> Option<String> {
    let registrations = kernel.counters().kubelet.registrations();
    let unwatched: Vec<&str> = registrations
        .iter()
        .filter(|(_, registration)| {
            registration.at == Some(RegistrationState::Registered) && registration.streams == 0
        })
        .filter(|(_, registration)| registration.since.elapsed() > limit)
        .map(|(resource, _)| resource.as_str())
        .collect();
    (!unwatched.is_empty())
        .then(|| format!("registered, but without a stream of the kubelet: {}", unwatched.join(", ")))
}

/// Check readiness
///
/// The daemon is ready once the GPUs were scanned, the devices of running pods were adopted, the store accepts
/// writes, and the kubelet accepted every resource once since the daemon started: a rollout continues with the next
/// node when this one is ready, which it must not while its resources are missing. It is not ready while another
/// device plugin serves its resources, or while a running kubelet shows no pods, so that no allocation can end. A
/// kubelet that disconnects later is reported, but the daemon stays ready; so do policies of the active stack that
/// cannot be called yet. Nor is it ready while no GPU can be used because policies judge GPUs unhealthy. Over TLS from
/// another machine the details need the right to read; without it only the names of the checks are returned.
#[utoipa::path(get, path = "",
    security(()),
    responses(
        (status = 200, description = "The daemon is ready", body = Ready),
        (status = 503, description = "The daemon is not ready; the body has the reasons"),
    ))]
pub(crate) async fn readyz(state: Data<State>, request: HttpRequest, _probe: Query<Probe>) -> HandlerResult {
    let checks = visible_checks(&request, readiness(&(state.facts)(), &state));
    if checks.iter().all(|c| c.ok) {
        return Ok(HttpResponse::Ok().json(Ready { ready: true, checks }));
    }
    Err(Failure::new(Kind::NotReady, describe_failed(&checks)).retry_after(1).checks(checks))
}

/// The checks of readiness.
pub(crate) fn readiness(facts: &NodeFacts, state: &State) -> Vec<Check> {
    let kernel = &state.kernel;
    let store_error = kernel.store_error();
    let OfferNotes { mig, warnings } = kernel.offer_notes();
    let mig_notes = (!mig.notes.is_empty()).then(|| mig.notes.join("; "));
    let step = |name: &str, step: &StartStep| {
        let waiting = step.waiting();
        Check { name: name.into(), ok: waiting.is_none(), detail: waiting }
    };
    let under_way: Vec<_> = facts
        .registrations
        .iter()
        .filter_map(|(resource, step)| step.waiting().map(|why| format!("{resource}: {why}")))
        .collect();
    let under_way = (!under_way.is_empty()).then(|| under_way.join("; "));
    let (kubelet_ok, kubelet) = registration(kernel, facts.kubelet.waiting().or(under_way));
    let waits = facts.uncallable.as_ref().map(|why| format!("waiting: {why}"));
    let policies: Vec<String> = waits.into_iter().chain(warnings).collect();
    let policies = (!policies.is_empty()).then(|| policies.join("; "));
    let mut checks = vec![
        gpus(facts.gpus.waiting(), kernel),
        step("adoption", &facts.adoption),
        Check { name: "store".into(), ok: store_error.is_none(), detail: store_error },
        Check { name: "mig".into(), ok: mig.refusal.is_none(), detail: mig.refusal.or(mig_notes) },
        // The other policies and the baseline answer meanwhile.
        Check { name: "policies".into(), ok: true, detail: policies },
        // Waiting for an absent kubelet is not a failure of the daemon.
        Check {
            name: "kubelet".into(),
            ok: kubelet_ok,
            detail: kubelet.map(|why| format!("waiting: {why}")),
        },
        evidence(kernel),
    ];
    checks.push(Check { name: "holders".into(), ok: true, detail: contests(&kernel.snapshot()) });
    if let Some(configuration) = &facts.configuration {
        // The previous settings stay in use.
        let detail = configuration_detail(configuration);
        checks.push(Check { name: "configuration".into(), ok: true, detail });
    }
    if let Some(labels) = &facts.labels {
        // Missing labels affect the pods that select by them, not this daemon.
        checks.push(Check { name: "labels".into(), ok: true, detail: labels.waiting() });
    }
    if let Some(tls) = state.http.access.tls() {
        // The previous files stay in use while the present ones are invalid.
        checks.push(Check { name: "tls".into(), ok: true, detail: tls.last_error() });
    }
    checks
}

/// The devices that the kubelet gave to two pods.
fn contests(ledger: &Ledger) -> Option<String> {
    let all: Vec<String> = contested(ledger)
        .into_iter()
        // Each pair is found from both sides.
        .filter(|found| found.allocation.id < found.other.id)
        .map(|found| Transition::Contested(found).describe(ledger, GpuName::Index))
        .collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// Whether allocations of finished pods can end. Not ready while none can on a kubelet that runs: each needs the kubelet's
/// `List`, and its checkpoint or the pods of the API server. A hold keeps the daemon ready: an operator ends it.
fn evidence(kernel: &KernelHandle) -> Check {
    let (ledger, counters) = (kernel.snapshot(), &kernel.counters().kubelet);
    let blocked_ends = ledger.blocked_ends.as_deref();
    let is_registered =
        |registration: &RegistrationStatus| registration.at == Some(RegistrationState::Registered);
    let has_kubelet = counters.registrations().values().any(is_registered);
    let list = counters.pod_list();
    let limit = kernel.counters().limits().pod_list;
    // A kubelet that starts does not answer at once; one whose folder is not mounted never does.
    let failing = list.error.filter(|(_, since)| !list.answered || since.elapsed() > limit);
    let is_none_able = blocked_ends.is_some_and(|blocked_ends| {
        ledger.ends_withheld.is_none() && blocked_ends.allocations >= ledger.live.len()
    });
    let detail = blocked_ends.map(|blocked_ends| blocked_ends.describe(&rfc3339(blocked_ends.since_wall_ms)));
    let can_end = !has_kubelet || (failing.is_none() && !is_none_able);
    let failing = failing.filter(|_| has_kubelet).map(|(why, since)| {
        let elapsed_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
        let since = rfc3339(kernel.now().wall_ms.saturating_sub(elapsed_ms));
        format!("since {since}: {why}; no allocation can end, so the GPUs of finished pods stay allocated")
    });
    Check { name: "evidence".into(), ok: can_end, detail: detail.or(failing) }
}

/// Whether the GPUs were scanned; the others are used where some cannot be identified.
fn gpus(waiting: Option<String>, kernel: &KernelHandle) -> Check {
    let ledger = &kernel.snapshot();
    let judged = unusable_by_policy(ledger, |reading| kernel.baseline_triage(reading), kernel.now());
    let ok = waiting.is_none() && judged.is_none();
    let unidentified: Vec<String> =
        ledger.unidentified.iter().map(|gpu| format!("{gpu}: {}", gpu.reason)).collect();
    let counted = || {
        let (count, all) = (unidentified.len(), ledger.gpu_count());
        format!(
            "{count} of {all} GPUs cannot be offered, since the UUID is not known: {}",
            unidentified.join("; ")
        )
    };
    let detail = waiting.or(judged).or_else(|| (!unidentified.is_empty()).then(counted));
    Check { name: "gpus".into(), ok, detail }
}

/// Why no GPU can be used, if at least one is unhealthy because of policies alone: a rollout must not continue with a stack
/// that withdraws every GPU. A node whose hardware fails is ready, since another version of the daemon or of the stack would
/// not help. `own` is Berth's own triage.
fn unusable_by_policy(ledger: &Ledger, own: impl Fn(&Reading) -> TriageAnswer, now: Now) -> Option<String> {
    let gpus = || ledger.gpus.iter().filter(|(gpu, _)| !ledger.excluded.contains(*gpu));
    if gpus().any(|(_, state)| state.health.state.is_usable()) {
        return None;
    }
    let judged = gpus().filter_map(|(gpu, state)| Some((gpu, state.health.unhealthy_by_policy(&own, now)?)));
    let (judged, by): (Vec<_>, Vec<_>) = judged.unzip();
    let (one, all) = (by.first()?, gpus().count());
    let name = |gpu: &GpuId| ledger.index_of(gpu).map_or_else(|| gpu.to_string(), |index| index.to_string());
    let names: Vec<String> = judged.iter().map(|gpu| name(gpu)).collect();
    Some(format!(
        "0 of {all} GPUs can be used, and {} of them are unhealthy because of policies alone, the first because of {} \
         ({}): `berth policy rollback`, or the activation of a stack without that policy, judges them again; \
         `berth gpu mark-healthy {}` makes them healthy until the next such error",
        judged.len(),
        one.by,
        one.reason,
        names.join(" ")
    ))
}

/// Why the settings in use are not those of the file, if they are not.
fn configuration_detail(configuration: &ConfigurationState) -> Option<String> {
    let ConfigurationState { file, needs_restart, error, .. } = configuration;
    let refused = error.as_ref().map(|error| {
        let count = error.problems.len();
        let first = error.problems.first().map_or("", |problem| problem.message.as_str());
        format!("{file} is refused, and the previous settings stay in use: {count} errors, first: {first}")
    });
    let keys: Vec<&str> = needs_restart.iter().map(|change| change.key.as_str()).collect();
    let waits = (!keys.is_empty()).then(|| format!("needs a restart of the daemon: {}", keys.join(", ")));
    let all: Vec<String> = refused.into_iter().chain(waits).collect();
    (!all.is_empty()).then(|| all.join("; "))
}

/// Whether the kubelet accepted every resource once since the start, and what the daemon waits for: `waits`, or what is
/// missing. Compared with the ledger, which has all resources before the first registration.
fn registration(kernel: &KernelHandle, waits: Option<String>) -> (bool, Option<String>) {
    let ledger = kernel.snapshot();
    let resources = ledger.resources();
    if resources.is_empty() {
        let mut present = ledger.parts.values().filter(|part| part.present);
        return match present.any(|part| part.offered_by.is_none()) {
            true => (false, waits.or_else(|| Some("the GPUs are not offered yet".into()))),
            // A node without GPUs is ready.
            false => (waits.is_none(), waits),
        };
    }
    let registrations = kernel.counters().kubelet.registrations();
    // The kubelet has the devices of another plugin, so this daemon grants none.
    if registrations.values().any(|one| one.at == Some(RegistrationState::Contested)) {
        return (false, waits.or_else(|| Some("another device plugin serves a resource".into())));
    }
    let was_registered = |name: &&str| registrations.get(*name).is_some_and(|one| one.was_registered);
    let mut missing = resources.iter().map(Resource::as_str).filter(|name| !was_registered(name)).peekable();
    match missing.peek() {
        None => (true, waits),
        Some(_) => {
            let missing = missing.collect::<Vec<_>>().join(", ");
            (false, waits.or_else(|| Some(format!("the kubelet has not accepted {missing} yet"))))
        }
    }
}

/// Get metrics
///
/// OpenMetrics text; `deploy/METRICS.md` describes all families. The response is made from snapshots and counters,
/// and never waits for an Allocate. Open on this node and on the health listener; over TLS from another machine it
/// needs the right to read.
#[utoipa::path(get, path = "",
    security((), ("token" = [])),
    responses(
        (status = 200, description = "The metrics", body = String, content_type = "application/openmetrics-text"),
        (status = 401, description = "From another machine: no credentials, or a wrong token"),
        (status = 403, description = "The caller is not allowed to do this"),
    ))]
pub(crate) async fn metrics(state: Data<State>) -> HandlerResult {
    let facts = (state.facts)();
    let ready = readiness(&facts, &state);
    let messages = ready.iter().map(|check| (check.name.clone(), check.detail.is_some())).collect();
    let plain = |checks: Vec<Check>| checks.into_iter().map(|check| (check.name, check.ok)).collect();
    let configuration = facts.configuration.as_ref();
    let overridden = state.policies.file_stack().is_overridden_by(&state.kernel.snapshot().stack);
    let about = CheckResults {
        ready: plain(ready),
        live: plain(liveness(&state.kernel)),
        messages,
        file_refused: configuration.map(|configuration| configuration.error.is_some()),
        file_stack_overridden: configuration.map(|_| overridden),
    };
    let text = state.metrics.text(about);
    let text = text.map_err(|_| Failure::new(Kind::Internal, "a number could not be written as text"))?;
    Ok(HttpResponse::Ok().content_type(CONTENT_TYPE).body(text))
}
