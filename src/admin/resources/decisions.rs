//! `/decisions`: recorded questions to the stack, the answer of each policy, and the outcomes.

use crate::failure::IntoFailure;
use crate::resources::explanation;
use crate::resources::gpus::gpu_of_query;
use crate::state::State;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::Kind;
use berth_api::{DecisionRecord, DecisionRecordList, Explanation};
use berth_http::Failure;
use berth_http::{etag, paging};
use berth_kernel::decision::{self, Requester};
use berth_kernel::ledger::Ledger;
use berth_kernel::names::AllocationId;
use berth_kernel::policy::Hook;
use berth_kernel::refusal::Refusal;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use utoipa::IntoParams;

/// Default number of decisions in a response.
const DECISIONS_DEFAULT: usize = 50;
/// Most decisions in a response: some 2 MiB with the offers of 16 GPUs each.
const DECISIONS_MAX: usize = 500;

/// Filters of decisions. All given ones must match.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Query {
    /// Only those that name this GPU, by UUID.
    #[param(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    gpu: Option<String>,
    /// Only those for a pod in this namespace: its allocations, and questions that it may have caused.
    #[param(example = "default")]
    namespace: Option<String>,
    /// Only those for a pod with this name, likewise.
    #[param(example = "trainer-0")]
    pod: Option<String>,
    /// Only those behind this allocation.
    #[param(example = "5eed0001-17")]
    allocation: Option<String>,
    /// Only those to which a policy contributed whose `name@digest` begins with this.
    #[param(example = "timeslice")]
    policy: Option<String>,
    /// `offered`, `placed`, `granted`, `denied`, `refused` or `triaged`; `fault`: a policy failed.
    #[param(example = "denied")]
    outcome: Option<String>,
    /// `offer`, `place`, `admit` or `triage`.
    #[param(example = "place")]
    hook: Option<String>,
    /// Only those at or after this time.
    #[param(example = "2026-02-03T04:05:06Z")]
    since: Option<String>,
    /// Only those before this time.
    #[param(example = "2026-02-03T05:05:06Z")]
    until: Option<String>,
    /// Maximum number of items; 50 by default, at most 500.
    #[param(minimum = 1, maximum = 500, example = 100)]
    limit: Option<usize>,
    /// Only items after this: `next` of the previous response, with the same filters.
    #[serde(alias = "before")]
    #[param(example = "4711")]
    cursor: Option<String>,
}

impl Query {
    pub(crate) fn of(hook: Option<String>, since: Option<String>, cursor: Option<String>) -> Self {
        Self { hook, since, cursor, ..Self::default() }
    }
}

const OUTCOMES: [&str; 7] = ["offered", "placed", "granted", "denied", "refused", "triaged", "fault"];

/// The filter of the journal.
///
/// # Errors
/// [`Kind::Query`] with the key and the rule.
pub(crate) fn filter(ledger: &Ledger, query: &Query) -> Result<decision::Filter, Failure> {
    let bad = |key: &str, rule: String| Failure::new(Kind::Query, format!("{key}: {rule}"));
    let moment = |key: &str, text: &Option<String>| -> Result<Option<u64>, Failure> {
        let Some(text) = text else { return Ok(None) };
        let parsed = humantime::parse_rfc3339_weak(text.trim_end_matches('Z'))
            .map_err(|_| bad(key, format!("a time such as 2026-02-03T04:05:06Z, not {text:?}")))?;
        let since = parsed.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Ok(Some(u64::try_from(since.as_millis()).unwrap_or(u64::MAX)))
    };
    let hook = query.hook.as_deref().map(|text| match Hook::parse(text) {
        Some(hook) if hook != Hook::Describe => Ok(hook),
        _ => Err(bad("hook", format!("offer, place, admit or triage, not {text:?}"))),
    });
    if let Some(outcome) = query.outcome.as_deref().filter(|o| !OUTCOMES.contains(o)) {
        return Err(bad("outcome", format!("one of {}, not {outcome:?}", OUTCOMES.join(", "))));
    }
    Ok(decision::Filter {
        gpu: query.gpu.as_deref().map(|gpu| gpu_of_query(ledger, gpu)).transpose()?,
        requester: whose(ledger, query)?,
        policy: query.policy.clone(),
        outcome: query.outcome.clone(),
        hook: hook.transpose()?,
        since_wall_ms: moment("since", &query.since)?,
        until_wall_ms: moment("until", &query.until)?,
        before: paging::number(query.cursor.as_deref())?,
    })
}

/// The decisions of a pod are those of its allocations, and those that it may have caused.
fn whose(ledger: &Ledger, query: &Query) -> Result<Option<Requester>, Failure> {
    if let Some(text) = &query.allocation {
        let id = AllocationId::parse(text).map_err(|e| Failure::new(Kind::Query, e))?;
        return Ok(Some(Requester { allocations: vec![id], pod: None }));
    }
    let (namespace, pod) = (query.namespace.as_deref(), query.pod.as_deref());
    if namespace.is_none() && pod.is_none() {
        return Ok(None);
    }
    let is = |of: Option<&str>, name: Option<&str>| {
        namespace.is_none_or(|n| Some(n) == of) && pod.is_none_or(|p| Some(p) == name)
    };
    let live = ledger.live.values().filter(|a| is(a.holder.namespace.as_deref(), a.holder.pod.as_deref()));
    let ended = ledger.ended.iter().filter(|past| is(past.namespace(), past.pod()));
    let allocations = live.map(|a| a.id).chain(ended.map(|past| past.id)).collect();
    let pod = format!("{}/{}", namespace.unwrap_or_default(), pod.unwrap_or_default());
    Ok(Some(Requester { allocations, pod: Some(pod) }))
}

/// List decisions, newest first
///
/// Lists questions to the stack, with the answer and duration of each policy, and the outcome. One page: `next` of a
/// response is the `cursor` of the following request.
#[utoipa::path(get, path = "/api/v1/decisions", tag = "decisions", operation_id = "listDecisions", params(Query),
    responses(
        (status = 200, description = "Those that match", body = DecisionRecordList),
        (status = 400, description = "A malformed query, or an unknown key in it"),
        (status = 409, description = "This daemon has no journal"),
    ))]
pub(crate) async fn list(
    state: web::Data<State>,
    request: HttpRequest,
    query: web::Query<Query>,
) -> Result<HttpResponse, Failure> {
    let limit = paging::limit(query.limit, DECISIONS_DEFAULT, DECISIONS_MAX)?;
    let filter = filter(&state.kernel.snapshot(), &query)?;
    let (found, standing) = state.kernel.decisions(filter, limit).await.map_err(IntoFailure::into_failure)?;
    etag::fresh(&request, &DecisionRecordList::of(&found, standing))
}

/// Get a decision
///
/// Returns the question, the answer and duration of each policy of the stack, and the outcome.
#[utoipa::path(get, path = "/api/v1/decisions/{seq}", tag = "decisions", operation_id = "getDecision",
    params(("seq" = u64, Path, description = "The number of the decision", example = 4710)),
    responses(
        (status = 200, description = "The decision", body = DecisionRecord),
        (status = 400, description = "No number"),
        (status = 404, description = "There is no such decision, or it is no longer recorded"),
        (status = 409, description = "This daemon has no journal"),
    ))]
pub(crate) async fn show(
    state: web::Data<State>,
    request: HttpRequest,
    path: web::Path<u64>,
) -> Result<HttpResponse, Failure> {
    let (decision, _) = state
        .kernel
        .decision(*path)
        .await
        .map_err(IntoFailure::into_failure)?
        .ok_or_else(|| unknown(*path))?;
    etag::fresh(&request, &DecisionRecord::of(&decision))
}

/// Get the input of a decision
///
/// Returns what the policies were given, in the form of the contract (policies-wasm/wit): `node.node` with parts,
/// devices and allocations, `node.shares` with the share number of each device, and `question`.
#[utoipa::path(get, path = "/api/v1/decisions/{seq}/input", tag = "decisions", operation_id = "getDecisionInput",
    params(("seq" = u64, Path, description = "The number of the decision", example = 4710)),
    responses(
        (status = 200, description = "The input of the policies", body = Object,
            example = json!({"node": {"node": {"parts": [{"id": "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5", "memory-mib": 81559}]}, "parameters": ""}, "question": {"hook": "place", "size": 1}})),
        (status = 400, description = "No number"),
        (status = 404, description = "There is no such decision, or its input was not recorded"),
        (status = 409, description = "This daemon has no journal"),
    ))]
pub(crate) async fn input(state: web::Data<State>, path: web::Path<u64>) -> Result<HttpResponse, Failure> {
    let (_, input) = state
        .kernel
        .decision(*path)
        .await
        .map_err(IntoFailure::into_failure)?
        .ok_or_else(|| unknown(*path))?;
    let input = input.ok_or_else(|| {
        Failure::new(Kind::UnknownDecision, format!("the input of decision {} is not recorded", *path))
    })?;
    let raw = |bytes: Vec<u8>| {
        let text = String::from_utf8(bytes).unwrap_or_default();
        RawValue::from_string(text)
            .map_err(|e| Failure::new(Kind::Internal, format!("the input is damaged: {e}")))
    };
    Ok(HttpResponse::Ok().json(json!({"node": raw(input.node)?, "question": raw(input.question)?})))
}

fn unknown(seq: u64) -> Failure {
    Failure::new(Kind::UnknownDecision, format!("decision {seq} is not recorded"))
}

/// Explain an allocation
///
/// Returns in sentences why it has its devices, with the recorded decisions behind it.
#[utoipa::path(get, path = "/api/v1/allocations/{id}/explanation", tag = "decisions", operation_id = "explainAllocation",
    params(("id" = String, Path, description = "The id of the allocation", example = "5eed0001-17")),
    responses(
        (status = 200, description = "The explanation", body = Explanation),
        (status = 400, description = "No id"),
        (status = 404, description = "There is no such allocation, or it has ended and is no longer kept"),
    ))]
pub(crate) async fn explain(
    state: web::Data<State>,
    request: HttpRequest,
    path: web::Path<String>,
) -> Result<HttpResponse, Failure> {
    let id = AllocationId::parse(&path).map_err(|error| Failure::new(Kind::Path, error))?;
    let ledger = state.kernel.snapshot();
    let live = ledger.live.get(&id).map(|a| (**a).clone());
    let allocation = live.or_else(|| ledger.ended.get(id).map(|past| past.allocation()));
    let allocation =
        allocation.ok_or(Refusal::UnknownAllocation { id }).map_err(IntoFailure::into_failure)?;
    etag::fresh(&request, &explanation::explain(&state.kernel, &ledger, &allocation).await)
}
