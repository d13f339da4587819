//! `/gpus/{uuid}/cordon`, `/gpus/{uuid}/drain` and `/gpus/{uuid}/health`: taking a GPU out, and marking one healthy.

use crate::failure::OrFailure;
use crate::resources::gpus::{View, gpu_id, gpu_state, holder, shown};
use crate::state::State;
use actix_web::http::header::ETAG;
use actix_web::web::{Data, Path, Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{
    AtDeadline, Cordon, Drain, DrainOrder, DrainPreview, Gpu, HealthState, Kind, MarkHealthy,
    deletion_command,
};
use berth_http::{Caller, Failure, HandlerResult, body, etag};
use berth_kernel::drain::eviction::EvictionOutcome;
use berth_kernel::drain::eviction_plan::{EvictionStatus, holders_if};
use berth_kernel::drain::marks::{self, Author, Marks, Owner, Owners};
use berth_kernel::ids::names::GpuId;
use berth_kernel::node::command::Command;
use berth_kernel::node::refusal::Refusal;
use berth_kernel::node::revision::Revision;
use serde::Deserialize;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use utoipa::IntoParams;

/// Longest deadline of a drain, seconds: a week.
const DEADLINE_S_MAX: u32 = 7 * 24 * 3600;

/// Cordon a GPU
///
/// Nothing new is granted on it, and its free devices are withdrawn at once; existing allocations stay. Idempotent,
/// except that another reason replaces the previous one.
#[utoipa::path(put, path = "",
    request_body(content = Cordon, description = "The reason; optional"),
    responses(
        (status = 200, description = "The GPU, cordoned", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, body or If-Match"),
        (status = 422, description = "An unknown key, or a reason that is not allowed"),
    ))]
pub(crate) async fn cordon(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    request: HttpRequest,
    payload: Payload,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let Cordon { reason } = body::json_or_default(&request, payload).await?;
    caller.check_reason(&reason)?;
    let command = Command::Cordon { gpu: gpu.clone(), author: Author::api(caller.name(), reason.clone()) };
    let log = || tracing::info!(%gpu, by = caller.name(), reason, "a GPU was cordoned");
    change_marks(&state, &request, &gpu, command, log).await
}

/// Uncordon a GPU
///
/// Removes the caller's cordon or drain, in any state. The GPU is granted again once no other owner's mark is left;
/// `drain.marks` of the answer names those. With `owner`, removes that owner's mark instead. Idempotent.
#[utoipa::path(delete, path = "",
    responses(
        (status = 200, description = "The GPU, active unless another owner's mark is left", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, query or If-Match"),
        (status = 409, description = "The mark belongs to a GPUMaintenance or DeviceTaintRule; delete that object to remove the mark"),
    ))]
pub(crate) async fn uncordon(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    query: Query<OwnerQuery>,
    request: HttpRequest,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let owners = query.owners(&caller, &state)?;
    let command = Command::Uncordon { gpu: gpu.clone(), owners };
    let log = || tracing::info!(%gpu, by = caller.name(), "an uncordon removed marks of a GPU");
    change_marks(&state, &request, &gpu, command, log).await
}

/// Whose mark a request removes.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OwnerQuery {
    /// The owner as `drain.marks` of the GPU names it, or `all` for all owners except GPUMaintenances and DeviceTaintRules; the caller if absent.
    #[param(example = "api:admin")]
    owner: Option<String>,
}

impl OwnerQuery {
    /// The owners that the query names. A query that names an existing GPUMaintenance or DeviceTaintRule is refused, since the
    /// daemon would set the mark of that object again at once.
    fn owners(&self, caller: &Caller, state: &State) -> Result<Owners, Failure> {
        let owner = match self.owner.as_deref() {
            Some("all") => return Ok(Owners::All),
            Some(owner) => {
                Owner::parse(owner).map_err(|error| Failure::new(Kind::Query, format!("owner: {error}")))?
            }
            None => Owner::api(&caller.name()),
        };
        if (state.facts)().marking_objects.iter().any(|owners| owners.contains(owner.as_str())) {
            let ledger = state.kernel.snapshot();
            let mut marks = ledger.gpus.values().filter_map(|gpu| gpu.marks.by_owner.get(&owner));
            if let Some(mark) = marks.next() {
                let detail = format!("the mark of {} is removed when the object is deleted", mark.by);
                let hint = format!("run `{}`", deletion_command(&mark.by));
                return Err(Failure::new(Kind::State, detail).hint(hint));
            }
        }
        Ok(Owners::One(owner))
    }
}

/// Drain a GPU
///
/// Cordons the GPU and waits until no allocation is left on it and, if processes are visible, none was seen on it for
/// ten seconds; then its state is `drained`. With `evict` its pods are evicted through the API server, and its held
/// devices are listed Unhealthy meanwhile; without it pods end by themselves or by `kubectl`. A new order replaces
/// the previous one; a GPU that is drained already stays so.
#[utoipa::path(put, path = "",
    request_body(content = DrainOrder, description = "The settings; optional"),
    responses(
        (status = 200, description = "The GPU, draining or drained", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, body or If-Match"),
        (status = 409, description = "Evictions need an API server, and none is configured"),
        (status = 422, description = "An unknown key, or a value that is not allowed"),
    ))]
pub(crate) async fn start(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    request: HttpRequest,
    payload: Payload,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let DrainOrder { reason, evict, deadline_seconds, at_deadline } =
        body::json_or_default(&request, payload).await?;
    caller.check_reason(&reason)?;
    if deadline_seconds.is_some_and(|s| s == 0 || s > DEADLINE_S_MAX) {
        let rule = format!("deadlineSeconds: from 1 to {DEADLINE_S_MAX}");
        return Err(Failure::new(Kind::Invalid, rule));
    }
    if at_deadline != AtDeadline::Wait && deadline_seconds.is_none() {
        return Err(Failure::new(Kind::Invalid, "atDeadline: there is no deadlineSeconds"));
    }
    if at_deadline == AtDeadline::Delete && !evict {
        return Err(Failure::new(Kind::Invalid, "atDeadline: delete is allowed only with evict: true"));
    }
    if evict && (state.facts)().api_server.is_none() {
        return Err(no_api_server());
    }
    let now = state.kernel.now().wall_ms;
    let order = marks::Order {
        evict,
        deadline_wall_ms: deadline_seconds.map(|s| now.saturating_add(u64::from(s) * 1000)),
        at_deadline: at_deadline.into(),
        ..marks::Order::default()
    };
    let author = Author::api(caller.name(), reason.clone());
    let command = Command::Drain { gpu: gpu.clone(), author, order };
    let log = || tracing::info!(%gpu, by = caller.name(), reason, evict, "a GPU is being drained");
    change_marks(&state, &request, &gpu, command, log).await
}

fn no_api_server() -> Failure {
    Failure::new(Kind::NoApiServer, "pods are evicted through the API server, and none is configured").hint(
        "start the daemon with --kubeconfig FILE, or in a pod with a service account (and not with \
                   --api-server off); or drain without evict and end the pods yourself",
    )
}

/// Whether a preview is of a drain that evicts.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PreviewQuery {
    /// Whether the drain evicts the pods; false by default. The API server is then asked about each.
    #[serde(default)]
    #[param(example = true)]
    evict: bool,
}

/// Longest time in which the API server is asked about the pods of one GPU; each answer takes milliseconds.
const PREVIEW_MAX: Duration = Duration::from_secs(5);

/// Preview a drain
///
/// Returns the pods that hold the GPU, with their owners, and changes nothing. With `evict`, the API server is asked
/// whether it would evict each pod now (an eviction with `dryRun`), so that disruption budgets are known before the
/// drain: `notAsked` is then a pod that it would evict.
#[utoipa::path(get, path = "",
    responses(
        (status = 200, description = "The pods that hold it", body = DrainPreview),
        (status = 409, description = "Evictions need an API server, and none is configured"),
    ))]
pub(crate) async fn preview(
    state: Data<State>,
    path: Path<String>,
    query: Query<PreviewQuery>,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let ledger = state.kernel.snapshot();
    gpu_state(&ledger, &gpu)?;
    let mut holders = holders_if(&ledger, &gpu, query.evict);
    if query.evict {
        let previews = state.eviction_previews.as_ref().ok_or_else(no_api_server)?;
        // One caller after the other: a preview is a request to the API server for each pod.
        let turn = timeout_at(Instant::now() + PREVIEW_MAX, previews.turn.lock()).await;
        let busy = |_| Failure::new(Kind::Busy, "previews of other drains ask the API server").retry_after(1);
        let _turn = turn.map_err(busy)?;
        let end = Instant::now() + PREVIEW_MAX;
        for holder in &mut holders {
            let pod = holder.shown.as_ref().filter(|_| holder.status == EvictionStatus::NotRequested);
            let Some(pod) = pod.map(Arc::clone) else { continue };
            let late = || EvictionOutcome::Failed("the API server was not asked in time".into());
            let outcome = timeout_at(end, (previews.dry_run)(pod)).await.unwrap_or_else(|_| late());
            holder.status = EvictionStatus::checked(&outcome);
        }
    }
    let holders = holders.into_iter().map(holder).collect();
    Ok(HttpResponse::Ok().json(DrainPreview { holders }))
}

/// Get the progress of a drain
///
/// Returns the remaining holders and what blocks each, the number of remaining processes, and the remaining time. The
/// ETag depends on what operators set and does not change while holders leave, so that it can be sent as If-Match
/// with the next order.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "Its drain state, with the progress of a drain", body = Drain, headers(("ETag" = String, description = "The ETag of the drain state, for If-Match")))))]
pub(crate) async fn show(state: Data<State>, path: Path<String>) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let tag = drain_tag(&state, &gpu)?;
    let shown = View::of(&state).drain(&gpu).ok_or(Refusal::UnknownGpu { gpu }).or_failure()?;
    Ok(HttpResponse::Ok().insert_header((ETAG, tag)).json(shown))
}

/// Stop a drain
///
/// Turns the caller's drain into a cordon; uncordon the GPU to have it granted again. With `owner`, does so to that
/// owner's drain instead. Idempotent.
#[utoipa::path(delete, path = "",
    responses(
        (status = 200, description = "The GPU, cordoned or active, or draining by another owner", body = Gpu, headers(("ETag" = String, description = "The ETag of the new drain state, for If-Match"))),
        (status = 400, description = "A malformed UUID, query or If-Match"),
        (status = 409, description = "The mark belongs to a GPUMaintenance or DeviceTaintRule; delete that object to remove the mark"),
    ))]
pub(crate) async fn stop(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    query: Query<OwnerQuery>,
    request: HttpRequest,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let owners = query.owners(&caller, &state)?;
    let command = Command::StopDrain { gpu: gpu.clone(), owners };
    let log = || tracing::info!(%gpu, by = caller.name(), "a drain was stopped");
    change_marks(&state, &request, &gpu, command, log).await
}

/// Mark a GPU healthy
///
/// For a GPU that is unhealthy or degraded until an operator marks it healthy, or before its quiet time is over. It
/// stays healthy until the next bad reading. For a healthy GPU, only the events that a policy ignored are forgotten. A
/// GPU that does not respond cannot be marked.
#[utoipa::path(put, path = "",
    request_body(content = MarkHealthy, description = "Why"),
    responses(
        (status = 200, description = "The GPU, healthy", body = Gpu),
        (status = 400, description = "No UUID, or no JSON"),
        (status = 409, description = "The GPU is not present, or does not answer"),
        (status = 422, description = "An unknown key, or a value that is not allowed"),
    ))]
pub(crate) async fn mark_healthy(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    request: HttpRequest,
    payload: Payload,
) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let MarkHealthy { state: wanted, reason } = body::json(&request, payload).await?;
    if wanted != HealthState::Healthy {
        return Err(Failure::new(
            Kind::Invalid,
            "state: only \"healthy\" can be set; cordon a GPU to take it out of use",
        ));
    }
    caller.check_reason(&reason)?;
    let command = Command::MarkHealthy { gpu: gpu.clone(), by: caller.name(), why: reason.clone() };
    let applied = state.kernel.execute(command).await.or_failure()?;
    if !applied.entry.changes.is_empty() {
        tracing::info!(%gpu, by = caller.name(), reason, "a GPU was marked healthy");
    }
    Ok(HttpResponse::Ok().json(shown(&state, &gpu)?))
}

/// The marks that the request's `If-Match` names, which the keeper checks again in the turn of the command; `None`
/// without a condition.
fn if_match(state: &State, request: &HttpRequest, gpu: &GpuId) -> Result<Option<Revision>, Failure> {
    let ledger = state.kernel.snapshot();
    let marks = &gpu_state(&ledger, gpu)?.marks;
    etag::expected(request, &tag(marks), || Revision::Marks { gpu: gpu.clone(), marks: marks.clone() })
}

fn drain_tag(state: &State, gpu: &GpuId) -> Result<String, Failure> {
    Ok(tag(&gpu_state(&state.kernel.snapshot(), gpu)?.marks))
}

/// Executes a command about the marks of a GPU, calls `log` if they have changed, and responds with the GPU. The tag is
/// read first: if the GPU changes again in between, a request with this tag is refused, although the body shows that
/// change.
async fn change_marks(
    state: &State,
    request: &HttpRequest,
    gpu: &GpuId,
    command: Command,
    log: impl FnOnce(),
) -> HandlerResult {
    let expected = if_match(state, request, gpu)?;
    let applied = state.kernel.execute(command.expecting(expected)).await.or_failure()?;
    if !applied.entry.changes.is_empty() {
        log();
    }
    let tag = drain_tag(state, gpu)?;
    Ok(HttpResponse::Ok().insert_header((ETAG, tag)).json(shown(state, gpu)?))
}

/// The strong tag of a GPU's drain state, for `If-Match`: it depends on what operators set, not on the progress.
fn tag(marks: &Marks) -> String {
    let state = marks.drain();
    if marks.is_empty() {
        return format!("\"{}\"", state.as_str());
    }
    let mut hasher = DefaultHasher::new();
    marks.drained_wall_ms.hash(&mut hasher);
    for (owner, mark) in &marks.by_owner {
        let order = mark.order().map(|order| {
            let then = match order.at_deadline {
                marks::AtDeadline::Wait => 0u8,
                marks::AtDeadline::Delete => 1,
                marks::AtDeadline::GiveUp => 2,
            };
            (order.evict, order.deadline_wall_ms, then)
        });
        (owner.as_str(), &mark.by, &mark.why, mark.since_wall_ms, order, mark.expired).hash(&mut hasher);
    }
    format!("\"{}-{:016x}\"", state.as_str(), hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::drain::marks::{Mark, MarkKind, Order};

    #[test]
    fn the_tag_of_a_drain_depends_on_all_that_operators_set() {
        let late = Order { deadline_wall_ms: Some(9), ..Order::default() };
        let drain = |order| Mark { kind: MarkKind::Drain(order), ..Mark::cordon("admin", "a", 7) };
        let of_one = |mark: Mark| Marks::from(mark);
        let second = |mut marks: Marks| {
            marks.by_owner.insert(Owner::api("bob"), Mark::cordon("bob", "", 8));
            marks
        };
        let states = [
            Marks::default(),
            of_one(Mark::cordon("admin", "a", 7)),
            of_one(Mark::cordon("admin", "b", 7)),
            of_one(Mark { expired: true, ..Mark::cordon("admin", "a", 7) }),
            of_one(drain(Order::default())),
            of_one(drain(Order { evict: true, ..Order::default() })),
            of_one(drain(Order { at_deadline: marks::AtDeadline::GiveUp, ..late })),
            of_one(drain(late)),
            second(of_one(drain(late))),
            Marks { drained_wall_ms: Some(9), ..of_one(drain(Order::default())) },
        ];
        let tags: std::collections::BTreeSet<_> = states.iter().map(tag).collect();
        assert_eq!(tags.len(), states.len());
        assert_eq!(tag(&states[1]), tag(&states[1].clone()));
    }
}
