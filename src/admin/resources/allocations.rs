//! `/allocations`: the allocations and their holders, and ending one by an operator's order.

use crate::failure::OrFailure;
use crate::resources::gpus::gpu_of_query;
use crate::state::State;
use actix_web::web::{Data, Path, Query};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{Allocation, AllocationList, Kind};
use berth_http::{Caller, Failure, HandlerResult, etag, query};
use berth_kernel::evidence::attribution::Attributions;
use berth_kernel::evidence::running;
use berth_kernel::grants::allocation;
use berth_kernel::grants::history::EndedAllocation;
use berth_kernel::ids::names::{AllocationId, DeviceId, Resource};
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::cell::LazyCell;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

/// Default number of allocations in a response: what a full node of 16 GPUs with whole devices or few shares holds,
/// about 0.3 MiB.
pub(crate) const ALLOCATIONS_DEFAULT: usize = 500;
/// Most allocations in a response, about 0.7 MiB; further ones are requested with `cursor`.
pub(crate) const ALLOCATIONS_MAX: usize = 1000;

/// Filters of allocations. All given ones must match.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Only those on this GPU, by UUID.
    #[param(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    gpu: Option<String>,
    /// Only those of pods in this namespace.
    #[param(example = "default")]
    namespace: Option<String>,
    /// Only those of pods with this name.
    #[param(example = "trainer-0")]
    pod: Option<String>,
    /// Only those of this resource.
    #[param(example = "nvidia.com/gpu")]
    resource: Option<String>,
    /// `live` (the default), `ended` or `all`.
    #[serde(default)]
    #[param(inline)]
    state: StateFilter,
    /// Maximum number of items; 500 by default, at most 1000.
    #[param(minimum = 1, maximum = 1000, example = 100)]
    limit: Option<usize>,
    /// Only items after this: `next` of the previous response, with the same filters.
    #[serde(alias = "after")]
    #[param(example = "1770092645000.5eed0001-17")]
    cursor: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum StateFilter {
    #[default]
    Live,
    Ended,
    All,
}

impl Filter {
    fn matches(&self, ledger: &Ledger, found: Found<'_>) -> bool {
        let is =
            |wanted: &Option<String>, given: Option<&str>| wanted.as_deref().is_none_or(|w| Some(w) == given);
        let on_gpu = |gpu: &str| {
            found.devices().iter().any(|d| {
                let of = ledger.part(&d.part).map_or(&d.part, |p| p.part.gpu.as_part());
                of.as_str() == gpu
            })
        };
        let (namespace, pod, resource) = found.names();
        is(&self.namespace, namespace)
            && (is(&self.pod, pod) || found.claim_pods().any(|pod| Some(pod) == self.pod.as_deref()))
            && is(&self.resource, Some(resource))
            && self.gpu.as_deref().is_none_or(on_gpu)
    }
}

/// A live or ended allocation.
#[derive(Clone, Copy)]
enum Found<'l> {
    Live(&'l Arc<allocation::Allocation>),
    Ended(EndedAllocation<'l>),
}

impl<'l> Found<'l> {
    /// The allocation with this id, live or ended.
    fn by_id(ledger: &'l Ledger, id: AllocationId) -> Option<Self> {
        let live = ledger.live.get(&id).map(Self::Live);
        live.or_else(|| ledger.ended.get(id).map(Self::Ended))
    }

    fn live(self) -> Option<&'l Arc<allocation::Allocation>> {
        match self {
            Self::Live(a) => Some(a),
            Self::Ended(_) => None,
        }
    }

    fn devices(self) -> &'l [DeviceId] {
        match self {
            Self::Live(a) => &a.devices,
            Self::Ended(past) => past.devices(),
        }
    }

    /// Its namespace, pod and resource.
    fn names(self) -> (Option<&'l str>, Option<&'l str>, &'l str) {
        match self {
            Self::Live(a) => (a.holder.namespace.as_deref(), a.holder.pod.as_deref(), a.resource.as_str()),
            Self::Ended(past) => (past.namespace(), past.pod(), past.resource().as_str()),
        }
    }

    /// The names of the pods of its claim that are recorded.
    fn claim_pods(self) -> impl Iterator<Item = &'l str> {
        let claim = match self {
            Self::Live(a) => a.origin.claim(),
            Self::Ended(past) => past.claim(),
        };
        claim.into_iter().flat_map(|request| &request.pods).map(|pod| pod.name.as_str())
    }

    /// The sort key of the list. It does not change when an allocation ends, so that a page starts where the previous
    /// one ended.
    fn key(self) -> (u64, AllocationId) {
        match self {
            Self::Live(a) => (a.granted_wall_ms, a.id),
            Self::Ended(past) => (past.granted_wall_ms, past.id),
        }
    }

    fn shown(self, owners: &Attributions<'_>, mps: &BTreeSet<Resource>) -> Allocation {
        match self {
            Self::Live(a) => Allocation::of(owners, mps, a),
            Self::Ended(past) => Allocation::of(owners, mps, &past.allocation()),
        }
    }
}

fn cursor((granted_wall_ms, id): (u64, AllocationId)) -> String {
    format!("{granted_wall_ms}.{id}")
}

fn parse_cursor(text: &str) -> Result<(u64, AllocationId), Failure> {
    let parsed = text.split_once('.').and_then(|(ms, id)| {
        let key = (ms.parse().ok()?, AllocationId::parse(id).ok()?);
        (cursor(key) == text).then_some(key)
    });
    parsed.ok_or_else(|| query::malformed(text))
}

/// List allocations, newest first
///
/// Lists one page: `next` of a response is the `cursor` of the following request. `total` is the number of all
/// matching allocations.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "Those that match", body = AllocationList)))]
pub(crate) async fn list(state: Data<State>, request: HttpRequest, filter: Query<Filter>) -> HandlerResult {
    let limit = query::limit(filter.limit, ALLOCATIONS_DEFAULT, ALLOCATIONS_MAX)?;
    let after = filter.cursor.as_deref().map(parse_cursor).transpose()?;
    let ledger = state.kernel.snapshot();
    filter.gpu.as_deref().map(|gpu| gpu_of_query(&ledger, gpu)).transpose()?;
    let live = ledger.live.values().filter(|_| filter.state != StateFilter::Ended).map(Found::Live);
    let ended = ledger.ended.iter().filter(|_| filter.state != StateFilter::Live).map(Found::Ended);
    let mut found: Vec<_> = live.chain(ended).filter(|a| filter.matches(&ledger, *a)).collect();
    let total = found.len();
    found.retain(|a| after.is_none_or(|after| a.key() < after));
    let newest_first = |a: &Found<'_>| Reverse(a.key());
    let more = found.len() > limit;
    if more {
        found.select_nth_unstable_by_key(limit, newest_first);
        found.truncate(limit);
    }
    found.sort_unstable_by_key(newest_first);
    let next = found.last().filter(|_| more).map(|a| cursor(a.key()));
    let mps = (state.facts)().mps;
    let owners = LazyCell::new(|| Attributions::new(&ledger));
    let live: Vec<_> = found.iter().filter_map(|a| a.live()).collect();
    let texts = state.caches.allocations.of(&ledger, &mps, || &owners, &live);
    let texts = texts.map_err(|error| etag::unwritten(&error))?;
    let mut texts = texts.iter();
    let items = found.iter().filter_map(|found| match found {
        Found::Live(_) => texts.next().map(|text| Item::Live(&text.json)),
        Found::Ended(past) => Some(Item::Ended(Box::new(Allocation::of(&owners, &mps, &past.allocation())))),
    });
    etag::fresh(&request, &Page { items: items.collect(), total, next })
}

/// An [`AllocationList`] whose items are JSON texts already.
#[derive(Serialize)]
struct Page<'t> {
    items: Vec<Item<'t>>,
    total: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<String>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Item<'t> {
    Live(&'t RawValue),
    Ended(Box<Allocation>),
}

/// Get an allocation, live or ended
///
/// Returns its devices, its holder as far as known, the decision behind it, and what its processes use of its limits.
#[utoipa::path(get, path = "", responses((status = 200, description = "The allocation", body = Allocation)))]
pub(crate) async fn show(state: Data<State>, request: HttpRequest, path: Path<String>) -> HandlerResult {
    etag::fresh(&request, &shown(&state, &state.kernel.snapshot(), allocation_id(&path)?)?)
}

/// Options of ending an allocation.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Ending {
    /// End it even while a source shows its pod running. This does not stop the pod: its devices are free at once, and
    /// the kubelet may give them to another pod while it still uses them.
    #[serde(default)]
    #[param(example = false)]
    force: bool,
}

/// End an allocation
///
/// Ends an allocation by hand when no source can show whether its pod still runs; its devices are released at once.
/// Refused while the kubelet, the API server or a process on the GPU shows the pod running, and for 30 s after the
/// grant. `force` ends it anyway and is recorded in the audit log.
#[utoipa::path(delete, path = "",
    responses(
        (status = 200, description = "The allocation, ended", body = Allocation),
        (status = 400, description = "A malformed id or query"),
        (status = 404, description = "No such allocation"),
        (status = 409, description = "A source shows its pod running, or it has already ended"),
    ))]
pub(crate) async fn end(
    caller: Caller,
    state: Data<State>,
    path: Path<String>,
    ending: Query<Ending>,
) -> HandlerResult {
    let id = allocation_id(&path)?;
    let (force, by) = (ending.force.then_some(true), caller.name());
    let mut shown_running = String::new();
    if ending.force {
        caller.mark_forced();
        // For the log only; the command that ends it checks again.
        shown_running = running_sources(&state, &state.kernel.snapshot(), id);
    }
    let applied = state.kernel.execute(Command::End { id, force: ending.force }).await.or_failure()?;
    if shown_running.is_empty() {
        tracing::info!(allocation = %id, by, force, "an allocation was ended");
    } else {
        tracing::warn!(allocation = %id, by, force, shown = shown_running, "an allocation was ended while its pod runs");
    }
    Ok(HttpResponse::Ok().json(shown(&state, &applied.snapshot, id)?))
}

/// The sources that show the pod of an allocation running; empty if none does.
fn running_sources(state: &State, ledger: &Ledger, id: AllocationId) -> String {
    let Some(allocation) = ledger.live.get(&id) else { return String::new() };
    let now = state.kernel.now();
    let sources = running::running_sources(ledger, allocation, now);
    sources.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

pub(crate) fn allocation_id(text: &str) -> Result<AllocationId, Failure> {
    AllocationId::parse(text).map_err(|error| Failure::new(Kind::Path, error))
}

fn shown(state: &State, ledger: &Ledger, id: AllocationId) -> Result<Allocation, Failure> {
    let found = Found::by_id(ledger, id).ok_or(Refusal::UnknownAllocation { id }).or_failure()?;
    Ok(found.shown(&Attributions::new(ledger), &(state.facts)().mps))
}
