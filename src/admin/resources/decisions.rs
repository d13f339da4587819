//! `/decisions`: recorded questions to the stack, the answer of each policy, and the outcomes. The explanation of an
//! allocation, in sentences: the preferred placement, the decision of the policies, and what is no longer recorded.

use crate::failure::OrFailure;
use crate::resources::allocations::allocation_id;
use crate::resources::gpus::gpu_of_query;
use crate::state::State;
use actix_web::web::{self, Data, Path};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{DecisionRecord, DecisionRecordList, Explanation, Kind, rfc3339};
use berth_core::Lab;
use berth_http::{Failure, HandlerResult, etag, query};
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::decision::{self, CallOutcome, CallRecord, Decision, Filter, Outcome, Requester};
use berth_kernel::policy::hooks::Hook;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;
use std::collections::{BTreeMap, BTreeSet};
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
        requester: requester(ledger, query)?,
        policy: query.policy.clone(),
        outcome: query.outcome.clone(),
        hook: hook.transpose()?,
        since_wall_ms: moment("since", &query.since)?,
        until_wall_ms: moment("until", &query.until)?,
        before: query::number(query.cursor.as_deref())?,
    })
}

/// The decisions of a pod are those of its allocations, and those that it may have caused.
fn requester(ledger: &Ledger, query: &Query) -> Result<Option<Requester>, Failure> {
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
#[utoipa::path(get, path = "",
    responses(
        (status = 200, description = "Those that match", body = DecisionRecordList),
        (status = 409, description = "This daemon has no journal"),
    ))]
pub(crate) async fn list(
    state: Data<State>,
    request: HttpRequest,
    query: web::Query<Query>,
) -> HandlerResult {
    let limit = query::limit(query.limit, DECISIONS_DEFAULT, DECISIONS_MAX)?;
    let filter = filter(&state.kernel.snapshot(), &query)?;
    let (found, journal) = state.lab.decisions(filter, limit).await.or_failure()?;
    // The newest ledger: it has the allocation of each decision that was just read.
    etag::fresh(&request, &DecisionRecordList::of(&state.kernel.snapshot(), &found, journal))
}

/// Get a decision
///
/// Returns the question, the answer and duration of each policy of the stack, and the outcome.
#[utoipa::path(get, path = "",
    responses(
        (status = 200, description = "The decision", body = DecisionRecord),
        (status = 400, description = "No number"),
        (status = 404, description = "There is no such decision, or it is no longer recorded"),
        (status = 409, description = "This daemon has no journal"),
    ))]
pub(crate) async fn show(state: Data<State>, request: HttpRequest, path: Path<u64>) -> HandlerResult {
    let found = state.lab.decision(*path).await.or_failure()?;
    let (decision, _) = found.ok_or_else(|| unknown(*path))?;
    etag::fresh(&request, &DecisionRecord::of(&state.kernel.snapshot(), &decision))
}

/// Get the input of a decision
///
/// Returns what the policies were given, in the form of the contract (policies-wasm/wit): `node.node` with parts,
/// devices and allocations, `node.shares` with the share number of each device, and `question`.
#[utoipa::path(get, path = "",
    responses(
        (status = 200, description = "The input of the policies", body = Object,
            example = json!({"node": {"node": {"parts": [{"id": "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5", "memory-mib": 81559}]}, "parameters": ""}, "question": {"hook": "place", "size": 1}})),
        (status = 400, description = "No number"),
        (status = 404, description = "There is no such decision, or its input was not recorded"),
        (status = 409, description = "This daemon has no journal"),
    ))]
pub(crate) async fn input(state: Data<State>, path: Path<u64>) -> HandlerResult {
    let found = state.lab.decision(*path).await.or_failure()?;
    let (_, input) = found.ok_or_else(|| unknown(*path))?;
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
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The explanation", body = Explanation)))]
pub(crate) async fn explain(state: Data<State>, request: HttpRequest, path: Path<String>) -> HandlerResult {
    let id = allocation_id(&path)?;
    let ledger = state.kernel.snapshot();
    let live = ledger.live.get(&id).map(|a| (**a).clone());
    let allocation = live.or_else(|| ledger.ended.get(id).map(|past| past.allocation()));
    let allocation = allocation.ok_or(Refusal::UnknownAllocation { id }).or_failure()?;
    etag::fresh(&request, &explanation(&state.lab, &ledger, &allocation).await)
}

/// Longest time between a placement and its Allocate: the kubelet requests the placement just before, but waits in
/// between for other containers of the pod.
const PLACED_BEFORE_MS: u64 = 60_000;
/// Most placements that are searched.
const PLACEMENTS: usize = 100;
/// Most pages of the journal that are searched for one decision: all of it, at the default size.
const PAGES: usize = 8;

/// Explains an allocation; without a readable journal, from the allocation itself.
async fn explanation(lab: &Lab, node: &Ledger, allocation: &Allocation) -> Explanation {
    let admitted = admitted(lab, allocation).await;
    let placed = match &admitted {
        Some(admitted) => placed(lab, allocation, admitted).await,
        None => None,
    };
    let mut sentences = match (&admitted, &placed) {
        (Some(_), Some(placed)) => placement_sentences(node, allocation, placed),
        (Some(_), None) => {
            vec!["The kubelet chose these devices itself: it did not ask for a placement just before.".into()]
        }
        (None, _) => vec![
            "The decision is not recorded, or no longer; the following is from the allocation itself.".into(),
        ],
    };
    sentences.extend(grant_sentences(allocation, admitted.as_ref()));
    sentences.push(what(node, allocation));
    // What only other commands need comes last.
    sentences.push(grant(allocation, placed.as_ref()));
    if let Some(end) = &allocation.ended {
        sentences.push(format!("It ended at {} ({}).", rfc3339(end.wall_ms), end.reason.as_str()));
    }
    let decisions =
        placed.iter().chain(&admitted).map(|decision| DecisionRecord::of(node, decision)).collect();
    Explanation { allocation: allocation.id.to_string(), sentences, decisions }
}

async fn admitted(lab: &Lab, allocation: &Allocation) -> Option<Decision> {
    let requester = Requester { allocations: vec![allocation.id], pod: None };
    // By its id only: the clock may have been set meanwhile.
    let mut filter = Filter { requester: Some(requester), hook: Some(Hook::Admit), ..Filter::default() };
    for _ in 0..PAGES {
        let (found, _) = lab.decisions(filter.clone(), 1).await.ok()?;
        if let Some(decision) = found.decisions.into_iter().next() {
            return Some(decision);
        }
        filter.before = Some(found.next?);
    }
    None
}

/// The newest placement of exactly these devices, else of as many of this resource that its pod may have requested.
async fn placed(lab: &Lab, allocation: &Allocation, admitted: &Decision) -> Option<Decision> {
    let filter = Filter {
        hook: Some(Hook::Place),
        since_wall_ms: Some(admitted.at_wall_ms.saturating_sub(PLACED_BEFORE_MS)),
        before: Some(admitted.seq),
        ..Filter::default()
    };
    let found = lab.decisions(filter, PLACEMENTS).await.ok()?.0.decisions;
    let same_request = |d: &&Decision| {
        let request = d.request.as_ref();
        request.is_some_and(|r| {
            r.resource == allocation.resource.as_str() && r.count == allocation.devices.len()
        })
    };
    let same = |d: &&Decision| matches!(&d.outcome, Outcome::Placed(p, _) if set(&p.devices) == set(&allocation.devices));
    let of_these = found.iter().find(|d| same_request(d) && same(d));
    let holder = &allocation.holder;
    let own = holder.namespace.as_ref().zip(holder.pod.as_ref()).map(|(ns, pod)| format!("{ns}/{pod}"));
    let is_possible =
        |d: &&Decision| same_request(d) && own.as_ref().is_some_and(|own| d.candidates == [own.as_str()]);
    of_these.or_else(|| found.iter().find(is_possible)).cloned()
}

fn set(devices: &[DeviceId]) -> BTreeSet<&DeviceId> {
    devices.iter().collect()
}

fn what(node: &Ledger, allocation: &Allocation) -> String {
    let holder = &allocation.holder;
    let who = match (&holder.namespace, &holder.pod) {
        (Some(namespace), Some(pod)) => {
            let container = holder.container.as_deref().map_or_else(String::new, |c| format!("/{c}"));
            format!("{namespace}/{pod}{container}")
        }
        _ => "A pod that no source has shown yet".into(),
    };
    let has = if allocation.ended.is_some() { "had" } else { "has" };
    let (count, resource) = (allocation.devices.len(), &allocation.resource);
    format!("{who} {has} {count} x {resource} on {}.", gpus(node, &allocation.devices))
}

/// The ids and the time of a grant.
fn grant(allocation: &Allocation, placed: Option<&Decision>) -> String {
    let by = match placed.map(|placed| &placed.outcome) {
        Some(Outcome::Placed(_, by)) => format!(", placed by {by}"),
        _ => String::new(),
    };
    format!("Allocation {}{by}, granted at {}.", allocation.id, rfc3339(allocation.granted_wall_ms))
}

fn placement_sentences(node: &Ledger, allocation: &Allocation, placed: &Decision) -> Vec<String> {
    let Outcome::Placed(placement, by) = &placed.outcome else { return Vec::new() };
    let mut sentences = vec![format!("Placed by {}{}.", name(by), because(&placement.reason))];
    let required = placed.request.as_ref().map_or(0, |r| r.devices.len());
    if required > 0 {
        sentences.push(format!("The kubelet required {required} of the devices."));
    }
    let others = placed.calls.iter().filter(|call| call.policy != by.as_str());
    sentences.extend(without_answer(others, "was called first and failed"));
    if set(&placement.devices) != set(&allocation.devices) {
        let chosen = gpus(node, &placement.devices);
        sentences.push(format!("It chose {chosen}; the kubelet then allocated other devices."));
    }
    sentences
}

fn grant_sentences(allocation: &Allocation, admitted: Option<&Decision>) -> Vec<String> {
    let decision = &allocation.decision;
    if decision.is_adoption() {
        return vec!["It is older than this daemon's store: the daemon adopted it when it started.".into()];
    }
    let by: Vec<_> = decision.by.iter().filter(|by| **by != Decider::Baseline).map(name).collect();
    let because = because(&decision.reason);
    let mut sentences = vec![match by.as_slice() {
        // A policy that passed has not approved the request.
        [] => format!("No policy objected; admitted by default{because}."),
        by => format!("Admitted by {}{because}.", by.join(", ")),
    }];
    let calls = admitted.into_iter().flat_map(|d| &d.calls);
    sentences.extend(without_answer(calls, "failed and was skipped"));
    let memory = decision.limits.memory_mib.map(|m| format!("{m} MiB of memory"));
    let compute = decision.limits.compute_percent.map(|c| format!("{c} % of compute"));
    let limits: Vec<_> = memory.into_iter().chain(compute).collect();
    if !limits.is_empty() {
        sentences.push(format!("Its limits are {}.", limits.join(" and ")));
    }
    sentences
}

/// A sentence for each policy that failed or is suspended. One that passed is not named: that would read as if it had
/// approved.
fn without_answer<'c>(
    calls: impl Iterator<Item = &'c CallRecord>,
    failed: &str,
) -> impl Iterator<Item = String> {
    calls.filter_map(move |call| match &call.outcome {
        CallOutcome::Fault(fault) => Some(format!("{} {failed}: {fault}.", call.policy)),
        CallOutcome::Suspended => {
            Some(format!("{} was not called: it was suspended after too many faults.", call.policy))
        }
        CallOutcome::Pass | CallOutcome::Answer(_) => None,
    })
}

/// `: the least-held GPUs`, or nothing.
fn because(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(": {reason}") }
}

/// The name of a policy, without its version.
fn name(by: &Decider) -> String {
    match by {
        Decider::Baseline => "the built-in baseline".into(),
        Decider::Adopted | Decider::Policy(_) => by.as_str().split('@').next().unwrap_or_default().to_owned(),
    }
}

/// `GPU 0 and GPU 2 (2 devices)`, sorted by index.
fn gpus(node: &Ledger, devices: &[DeviceId]) -> String {
    let mut counts = BTreeMap::<(u32, GpuId), usize>::new();
    for device in devices {
        let part = node.part(&device.part);
        let index = part.map_or(u32::MAX, |p| p.part.gpu_index);
        let gpu = node.gpu_id_of(&device.part);
        *counts.entry((index, gpu)).or_default() += 1;
    }
    let one = |((index, gpu), count): (&(u32, GpuId), &usize)| {
        let many = if *count > 1 { format!(" ({count} devices)") } else { String::new() };
        if *index == u32::MAX { format!("{gpu}{many}") } else { format!("GPU {index}{many}") }
    };
    let all: Vec<_> = counts.iter().map(one).collect();
    match all.as_slice() {
        [] => "no GPU".into(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}
