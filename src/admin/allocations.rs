//! `/allocations`: who holds what, and the operator's word that ends one.

use super::auth::OPERATOR;
use super::dto::{Allocation, AllocationList};
use super::problem::{Kind, Problem};
use super::state::State;
use crate::kernel::allocation::{self, ENDED_ALLOCATIONS_KEPT, LIVE_ALLOCATIONS_MAX};
use crate::kernel::belongs::Owners;
use crate::kernel::ledger::Ledger;
use crate::kernel::names::AllocationId;
use crate::kernel::refusal::Refusal;
use actix_web::{HttpResponse, web};
use serde::Deserialize;
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

/// Allocations in one answer if the caller does not say: what a full node of 16 GPUs in whole or
/// few shares holds, in about 0.3 MiB.
pub(super) const ALLOCATIONS_DEFAULT: usize = 500;
/// Most allocations in one answer: all that there can be.
pub(super) const ALLOCATIONS_MAX: usize = LIVE_ALLOCATIONS_MAX + ENDED_ALLOCATIONS_KEPT;

/// Which allocations. All that are given must hold.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct Filter {
    /// On this GPU, by UUID.
    #[param(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    gpu: Option<String>,
    /// Held by a pod of this namespace.
    #[param(example = "default")]
    namespace: Option<String>,
    /// Held by a pod of this name.
    #[param(example = "trainer-0")]
    pod: Option<String>,
    /// Of this resource.
    #[param(example = "nvidia.com/gpu")]
    resource: Option<String>,
    /// `live` (the default), `ended` or `all`.
    #[serde(default)]
    #[param(inline)]
    state: StateFilter,
    /// Most items; 500 if not given, at most 5120.
    #[param(minimum = 1, maximum = 5120, example = 100)]
    limit: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum StateFilter {
    #[default]
    Live,
    Ended,
    All,
}

impl Filter {
    fn matches(&self, ledger: &Ledger, allocation: &allocation::Allocation) -> bool {
        let is =
            |wanted: &Option<String>, given: Option<&str>| wanted.as_deref().is_none_or(|w| Some(w) == given);
        let on_gpu = |gpu: &str| {
            allocation.devices.iter().any(|d| {
                let of = ledger.part(&d.part).map_or(&d.part, |p| p.part.gpu());
                of.as_str() == gpu
            })
        };
        is(&self.namespace, allocation.holder.namespace.as_deref())
            && is(&self.pod, allocation.holder.pod.as_deref())
            && is(&self.resource, Some(allocation.resource.as_str()))
            && self.gpu.as_deref().is_none_or(on_gpu)
    }
}

/// Allocations, newest first
#[utoipa::path(get, path = "/api/v1/allocations", tag = "allocations", operation_id = "listAllocations", params(Filter),
    responses(
        (status = 200, description = "Those that match", body = AllocationList),
        (status = 400, description = "A malformed query, or an unknown key in it"),
    ))]
pub(super) async fn list(
    state: web::Data<State>,
    filter: web::Query<Filter>,
) -> Result<HttpResponse, Problem> {
    let limit = filter.limit.unwrap_or(ALLOCATIONS_DEFAULT);
    if !(1..=ALLOCATIONS_MAX).contains(&limit) {
        return Err(Problem::new(Kind::Query, format!("limit: 1 to {ALLOCATIONS_MAX}, not {limit}")));
    }
    let ledger = state.door.snapshot();
    let live = ledger.live.values().filter(|_| filter.state != StateFilter::Ended);
    let ended = ledger.ended.iter().filter(|_| filter.state != StateFilter::Live);
    let all = live.chain(ended);
    let mut found: Vec<&Arc<allocation::Allocation>> = all.filter(|a| filter.matches(&ledger, a)).collect();
    found.sort_by_key(|a| std::cmp::Reverse((a.granted_wall_ms, a.id)));
    let (owners, mps) = (Owners::of(&ledger), (state.facts)().mps);
    let items = found.iter().take(limit).map(|a| Allocation::of(&owners, &mps, a)).collect();
    Ok(HttpResponse::Ok().json(AllocationList { items, total: found.len() }))
}

/// One allocation, live or ended
#[utoipa::path(get, path = "/api/v1/allocations/{id}", tag = "allocations", operation_id = "getAllocation",
    params(("id" = String, Path, description = "Its id", example = "5eed0001-17")),
    responses(
        (status = 200, description = "The allocation", body = Allocation),
        (status = 400, description = "No id"),
        (status = 404, description = "No such allocation, or ended and no longer kept"),
    ))]
pub(super) async fn show(state: web::Data<State>, path: web::Path<String>) -> Result<HttpResponse, Problem> {
    let id = allocation_id(&path)?;
    answer(&state, &state.door.snapshot(), id)
}

/// End an allocation
///
/// For one that no source can judge, by the operator's own knowledge: its devices are free at once,
/// whether or not a container still uses them. Doing it twice changes nothing.
#[utoipa::path(delete, path = "/api/v1/allocations/{id}", tag = "allocations", operation_id = "endAllocation",
    params(("id" = String, Path, description = "Its id", example = "5eed0001-17")),
    responses(
        (status = 200, description = "The allocation, ended", body = Allocation),
        (status = 400, description = "No id"),
        (status = 404, description = "No such allocation"),
    ))]
pub(super) async fn end(state: web::Data<State>, path: web::Path<String>) -> Result<HttpResponse, Problem> {
    let id = allocation_id(&path)?;
    let before = state.door.snapshot();
    if before.ended.iter().any(|a| a.id == id) {
        return answer(&state, &before, id);
    }
    let applied = state.door.end(id).await?;
    tracing::info!(allocation = %id, by = OPERATOR, "an allocation was ended");
    answer(&state, &applied.snapshot, id)
}

fn allocation_id(text: &str) -> Result<AllocationId, Problem> {
    AllocationId::parse(text).map_err(|error| Problem::new(Kind::Path, error))
}

fn answer(state: &State, ledger: &Ledger, id: AllocationId) -> Result<HttpResponse, Problem> {
    let live = ledger.live.get(&id);
    let found = live.or_else(|| ledger.ended.iter().find(|a| a.id == id));
    let found = found.ok_or(Refusal::UnknownAllocation { id })?;
    Ok(HttpResponse::Ok().json(Allocation::of(&Owners::of(ledger), &(state.facts)().mps, found)))
}
