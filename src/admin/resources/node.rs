//! `/node`: the daemon's view of the node as a whole.

use crate::resources::driver::release_of;
use crate::resources::health::readiness;
use crate::resources::pod_rules;
use crate::state::{NodeFacts, StartStep, State};
use crate::survey::Survey;
use actix_web::HttpRequest;
use actix_web::web::Data;
use berth_api::{
    Counts, Guard, Node, NotFreeState, ProcessSight, ResourceState, StackSource, StepState, rfc3339,
};
use berth_http::{HandlerResult, etag};
use berth_kernel::evidence::attribution::pods_with_gpu_bypass;
use berth_kernel::ids::names::Resource;
use berth_kernel::ids::time::Now;
use berth_kernel::node::rules::Rules;
use berth_kernel::sharing::breaker::{Breaker, Phase};
use std::collections::BTreeMap;

/// Get the node
///
/// Returns whether the daemon is ready and what it waits for, the resources as listed to the kubelet, and the numbers
/// of GPUs, allocations and policies.
#[utoipa::path(get, path = "", responses((status = 200, description = "The node", body = Node)))]
pub(crate) async fn show(state: Data<State>, request: HttpRequest) -> HandlerResult {
    let facts = (state.facts)();
    let survey = state.caches.surveys.newest(&state.kernel);
    let ledger = &survey.ledger;
    let checks = readiness(&facts, &state);
    let mut warnings = pod_rules::of_active_stack(&state, ledger);
    warnings.extend(missing_guard(&ledger.rules, facts.guard.as_ref()));
    let node = Node {
        ready: checks.iter().all(|c| c.ok),
        checks,
        resources: resources(&facts, &survey),
        name: facts.name,
        version: env!("CARGO_PKG_VERSION").into(),
        started_at: Some(rfc3339(started_wall_ms(state.started, state.kernel.now()))),
        generation: ledger.generation,
        gpu_source: facts.backend.source,
        driver_version: facts.backend.driver_version,
        cuda_version: facts.backend.cuda_version,
        driver_release: state.driver.current_release().map(release_of),
        device_list_strategy: facts.device_list_strategy,
        store_error: state.kernel.store_error(),
        api_server: facts.api_server.as_ref().map(step_state),
        guard: facts.guard.map(|guard| match &ledger.runtime {
            Some(view) if guard.connected => guard.with_view(view),
            _ => guard,
        }),
        dra: facts.dra,
        fleet: facts.fleet,
        hold: ledger.ends_withheld.as_deref().map(String::from),
        configuration: facts.configuration,
        stack_revision: ledger.stack.revision,
        stack_source: Some(StackSource::of(&ledger.stack)),
        file_stack_overridden: state.policies.file_stack().is_overridden_by(&ledger.stack),
        warnings,
        processes: ProcessSight::of(ledger.process_visibility()),
        counts: counts(&survey),
    };
    etag::fresh(&request, &node)
}

/// The warning that the configuration needs a guard, which is not connected.
fn missing_guard(rules: &Rules, guard: Option<&Guard>) -> Option<String> {
    let needs = rules.why_guard_is_needed()?;
    let guard = guard.filter(|guard| !guard.connected)?;
    let why = guard.why.as_deref().unwrap_or("`berth guard` does not run on this node");
    Some(format!("{needs}, and the guard, which puts that into effect, is not connected: {why}"))
}

/// When the daemon started, by the present clock: a clock that was set meanwhile, as after a boot, must not move the start
/// into another year. Whole seconds of the difference count, so that a clock that is corrected slowly moves it rarely.
fn started_wall_ms(started: Now, now: Now) -> u64 {
    let offset_ms = |at: Now| at.wall_ms.cast_signed() - at.mono_ms.cast_signed();
    let moved_s = (offset_ms(now) - offset_ms(started)) / 1000;
    started.wall_ms.saturating_add_signed(moved_s * 1000)
}

fn step_state(step: &StartStep) -> StepState {
    StepState { done: *step == StartStep::Done, waiting: step.waiting() }
}

/// Every resource with devices or a registration.
fn resources(facts: &NodeFacts, survey: &Survey) -> Vec<ResourceState> {
    let mut all: BTreeMap<String, ResourceState> = BTreeMap::new();
    let blank = |resource: &str| ResourceState {
        resource: resource.into(),
        registration: StepState { done: false, waiting: Some("not registered".into()) },
        devices: 0,
        held: 0,
        free: 0,
        withdrawn: 0,
        cordoned: 0,
        unhealthy: 0,
        not_free: Vec::new(),
        breaker: None,
    };
    for used in &survey.of_node {
        let not_free = survey.not_free.get(&used.resource).cloned().unwrap_or_default();
        let sum = |state: NotFreeState| {
            not_free.iter().filter(|why| why.state == state).map(|why| why.devices).sum()
        };
        let state = ResourceState {
            devices: used.devices,
            held: used.held,
            free: used.free,
            withdrawn: sum(NotFreeState::Withdrawn),
            cordoned: sum(NotFreeState::Cordoned),
            unhealthy: sum(NotFreeState::Unhealthy),
            not_free,
            ..blank(&used.resource)
        };
        all.insert(used.resource.clone(), state);
    }
    for (resource, step) in &facts.registrations {
        let name = resource.as_str();
        let state = all.entry(name.into()).or_insert_with(|| blank(name));
        state.registration = step_state(step);
    }
    for (resource, breaker) in survey.ledger.breakers.iter() {
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
        Phase::HalfOpen => {
            Some("one device is listed again, and the others once a request succeeds or after a while".into())
        }
    }
}

fn counts(survey: &Survey) -> Counts {
    let ledger = &survey.ledger;
    let gpus = || ledger.gpus.values();
    Counts {
        gpus: ledger.gpu_count(),
        unidentified_gpus: ledger.unidentified.len(),
        excluded_gpus: ledger.excluded.len(),
        working_gpus: gpus().filter(|g| g.health.state.is_usable()).count(),
        cordoned_gpus: gpus().filter(|g| !g.marks.is_empty()).count(),
        allocations: ledger.live.len(),
        ended_allocations: ledger.ended.len(),
        bypasses: survey.bypasses.values().map(|count| *count as usize).sum(),
        bypassing_pods: ledger.pods.is_some().then(|| pods_with_gpu_bypass(ledger).count()),
        policies: ledger.policies.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::evidence::limits::Enforcement;

    #[test]
    fn a_setting_that_needs_the_guard_warns_until_the_guard_is_connected() {
        let required = Rules { enforcement: Enforcement::Require, ..Rules::default() };
        let guard = |connected, why: Option<&str>| Guard {
            connected,
            version: None,
            runtime: None,
            why: why.map(Into::into),
            memory_limits: Vec::new(),
            memory_limits_error: None,
            bypass_action: None,
        };
        assert_eq!(missing_guard(&Rules::default(), Some(&guard(false, None))), None, "it needs none");
        assert_eq!(missing_guard(&required, Some(&guard(true, None))), None);
        let warning = missing_guard(&required, Some(&guard(false, Some("its socket is gone")))).unwrap();
        assert!(warning.starts_with("`enforce.memory` is `require`"), "{warning}");
        assert!(warning.ends_with("is not connected: its socket is gone"), "{warning}");
        let warning = missing_guard(&required, Some(&guard(false, None))).unwrap();
        assert!(warning.contains("`berth guard` does not run"), "{warning}");
    }

    #[test]
    fn the_start_is_given_by_the_present_clock() {
        let started = Now { wall_ms: 5_000, mono_ms: 1_000 };
        let wall_ms = |wall_ms, mono_ms| started_wall_ms(started, Now { wall_ms, mono_ms });
        assert_eq!(wall_ms(65_000, 61_000), 5_000);
        assert_eq!(wall_ms(65_900, 61_000), 5_000, "a clock that is corrected moves it by whole seconds");
        assert_eq!(
            wall_ms(1_770_000_065_000, 61_000),
            1_770_000_005_000,
            "the clock was set after the start"
        );
        assert_eq!(wall_ms(0, 61_000), 0);
    }
}
