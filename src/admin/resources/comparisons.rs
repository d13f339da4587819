//! `/replays` and `/shadows`: what another policy would have answered, or would answer now.

use crate::failure::{IntoFailure, OrFailure};
use crate::resources::decisions;
use crate::resources::stack_entries::parameters_text;
use crate::state::State;
use actix_web::http::header::LOCATION;
use actix_web::web::{Data, Path, Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{
    Candidate, Comparison, Difference, Hook, Kind, Operation, Replay, Shadow, ShadowList, parameters, rfc3339,
};
use berth_core::policies::resolve_version;
use berth_http::{Caller, Failure, HandlerResult, body, etag, query};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::hooks;
use berth_kernel::policy::version_records::may_activate;
use serde::Deserialize;
use std::collections::BTreeMap;
use utoipa::IntoParams;

/// Default number of decisions of a replay.
const REPLAY_DEFAULT: u64 = 1_000;
/// Most decisions of a replay; those that do not fit into its time are requested with `cursor`.
const REPLAY_MAX: u64 = 10_000;

/// Filters of replayed decisions.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Limit {
    /// Maximum number of decisions; 1000 by default, at most 10000.
    #[param(minimum = 1, maximum = 10000, example = 1000)]
    limit: Option<u64>,
    /// Only older decisions: `next` of the previous replay.
    #[serde(alias = "before")]
    #[param(example = "4711")]
    cursor: Option<String>,
    /// Only decisions of this hook: `offer`, `place`, `admit` or `triage`.
    #[param(example = "place")]
    hook: Option<String>,
    /// Only decisions at or after this time.
    #[param(example = "2026-02-03T04:05:06Z")]
    since: Option<String>,
}

/// Replay recorded decisions with a policy
///
/// Calls the policy with recorded questions again, newest first, and compares its answers with the recorded outcomes.
/// Nothing is changed. Questions on which the policy passes are counted separately. A replay takes at most 20
/// seconds; `next` is the `cursor` of the following one.
#[utoipa::path(post, path = "",
    request_body(content = Candidate),
    responses(
        (status = 200, description = "The differences", body = Replay),
        (status = 400, description = "The body is not JSON, or the query is malformed"),
        (status = 403, description = "No trusted key signed the policy"),
        (status = 409, description = "This daemon has no journal"),
        (status = 422, description = "The policy or its parameters cannot be used"),
    ))]
pub(crate) async fn replay(
    state: Data<State>,
    request: HttpRequest,
    query: Query<Limit>,
    payload: Payload,
) -> HandlerResult {
    let limit = query::limit(query.limit, REPLAY_DEFAULT, REPLAY_MAX)?;
    let ledger = state.kernel.snapshot();
    let query = decisions::Query::of(query.hook.clone(), query.since.clone(), query.cursor.clone());
    let filter = decisions::filter(&ledger, &query)?;
    let candidate = candidate(&ledger, body::json(&request, payload).await?)?;
    let label = candidate.policy.clone();
    let report = state.lab.replay(candidate, filter, limit).await.or_failure()?;
    Ok(HttpResponse::Ok().json(replay_body(&label, &report)))
}

/// List shadows
///
/// Lists the policies that are called in addition to the stack, each with the comparison of its answers with those of
/// the stack, and the newest differences. There are at most four, and those of a gate.
#[utoipa::path(get, path = "", responses((status = 200, description = "The shadows", body = ShadowList)))]
pub(crate) async fn list(state: Data<State>, request: HttpRequest) -> HandlerResult {
    let items = state.lab.shadows().iter().map(shadow_body).collect();
    etag::fresh(&request, &ShadowList { items })
}

/// Start a shadow
///
/// Calls a policy with every question that the stack gets, on the same node, outside of the request's path and
/// without effect, and counts where its answers would differ. A shadow lasts until it is deleted or the daemon ends.
#[utoipa::path(post, path = "",
    request_body(content = Candidate),
    responses(
        (status = 201, description = "The shadow, which is called from now on", body = Shadow, headers(("Location" = String, description = "Its path"))),
        (status = 400, description = "No JSON"),
        (status = 403, description = "No trusted key signed the policy"),
        (status = 409, description = "Four shadows are running already"),
        (status = 422, description = "The policy or its parameters cannot be used"),
    ))]
pub(crate) async fn add(
    caller: Caller,
    state: Data<State>,
    request: HttpRequest,
    payload: Payload,
) -> HandlerResult {
    let wanted = body::json(&request, payload).await?;
    let candidate = candidate(&state.kernel.snapshot(), wanted)?;
    let shadow = state.lab.add_shadow(candidate).await.or_failure()?;
    tracing::info!(
        policy = shadow.candidate.policy,
        by = caller.name(),
        "a shadow was started: its answers are counted but not used"
    );
    let location = format!("/api/v1/shadows/{}", shadow.id);
    Ok(HttpResponse::Created().insert_header((LOCATION, location)).json(shadow_body(&shadow)))
}

/// Get a shadow
///
/// Returns how its answers compare to the stack's, by hook, and the newest differences.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The shadow with its results", body = Shadow)))]
pub(crate) async fn show(state: Data<State>, request: HttpRequest, path: Path<u64>) -> HandlerResult {
    let shadows = state.lab.shadows();
    let shadow = shadows.iter().find(|s| s.id == *path).ok_or_else(|| unknown(*path))?;
    etag::fresh(&request, &shadow_body(shadow))
}

/// End a shadow
///
/// Returns its results. Its number is not used again while the daemon runs.
#[utoipa::path(delete, path = "", responses((status = 200, description = "Its results", body = Shadow)))]
pub(crate) async fn end(caller: Caller, state: Data<State>, path: Path<u64>) -> HandlerResult {
    let shadow = state.lab.remove_shadow(*path).ok_or_else(|| unknown(*path))?;
    tracing::info!(policy = shadow.candidate.policy, by = caller.name(), "a shadow was stopped");
    Ok(HttpResponse::Ok().json(shadow_body(&shadow)))
}

fn unknown(id: u64) -> Failure {
    Failure::new(Kind::UnknownShadow, format!("there is no shadow {id}"))
        .hint("list the shadows")
        .action(Operation::ListShadows)
}

/// The version that a request names, with its parameters.
pub(crate) fn candidate(ledger: &Ledger, wanted: Candidate) -> Result<berth_core::lab::Candidate, Failure> {
    let version = resolve_version(ledger, &wanted.policy, wanted.digest.as_deref()).map_err(|rule| {
        Failure::new(Kind::Invalid, rule).hint("list the policies").action(Operation::ListPolicies)
    })?;
    if !may_activate(&version, &ledger.rules.trusted_keys) {
        return Err(Refusal::Untrusted { policies: vec![version.label()] }.into_failure());
    }
    let parameters = parameters_text(wanted.parameters).map_err(|rule| Failure::new(Kind::Invalid, rule))?;
    let (policy, digest) = (version.label(), version.digest.clone());
    Ok(berth_core::lab::Candidate { policy, digest, parameters, permissions: None })
}

/// The result of a replay of the candidate `policy`.
fn replay_body(policy: &str, report: &berth_core::lab::Report) -> Replay {
    Replay {
        policy: policy.to_owned(),
        decisions: report.decisions,
        unreadable: report.unreadable,
        counts: counts(&report.counts),
        differences: report.differences.iter().map(difference).collect(),
        next: report.next.map(|seq| seq.to_string()),
    }
}

/// A shadow, newest differences first.
fn shadow_body(shadow: &berth_core::lab::Shadow) -> Shadow {
    Shadow {
        id: shadow.id,
        policy: shadow.candidate.policy.clone(),
        digest: shadow.candidate.digest.to_string(),
        parameters: parameters(&shadow.candidate.parameters),
        since: rfc3339(shadow.since.wall_ms),
        counts: counts(&shadow.counts),
        differences: shadow.differences.iter().rev().map(difference).collect(),
    }
}

fn difference(difference: &berth_core::lab::Difference) -> Difference {
    Difference {
        seq: difference.seq,
        at: rfc3339(difference.at_wall_ms),
        hook: difference.hook.into(),
        failed: difference.failed,
        message: difference.message.clone(),
    }
}

fn counts(counts: &BTreeMap<hooks::Hook, berth_core::lab::Counts>) -> BTreeMap<Hook, Comparison> {
    let one = |(hook, counts): (&hooks::Hook, &berth_core::lab::Counts)| {
        let berth_core::lab::Counts { same, differs, denies, passes, fails, skipped, without_candidates } =
            *counts;
        ((*hook).into(), Comparison { same, differs, denies, passes, fails, skipped, without_candidates })
    };
    counts.iter().map(one).collect()
}
