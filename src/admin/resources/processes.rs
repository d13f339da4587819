//! `/gpus/{uuid}/processes` and `/bypass`: the processes on the GPUs and their allocations.

use crate::resources::gpus::{gpu_id, gpu_of_query, gpu_state};
use crate::state::State;
use actix_web::HttpRequest;
use actix_web::web::{Data, Path, Query};
use berth_api::{Bypass, BypassList, ContainerBypass, Process, ProcessList, ProcessSight, ReachingPod};
use berth_http::{Failure, HandlerResult, etag, query};
use berth_kernel::evidence::attribution::{self, Attributions, pods_with_gpu_bypass};
use berth_kernel::ids::names::{GpuId, PartId};
use serde::Deserialize;
use utoipa::IntoParams;

/// Most processes in a response, about 400 bytes each.
const BYPASSES_MAX: usize = 1024;

/// List the processes on a GPU
///
/// Lists each process with its owner, its memory, and the allocation that it uses. A GPU that does not report its
/// processes has none here; `sight` is how complete the list is.
#[utoipa::path(get, path = "", responses((status = 200, description = "The processes", body = ProcessList)))]
pub(crate) async fn list(state: Data<State>, request: HttpRequest, path: Path<String>) -> HandlerResult {
    let gpu = gpu_id(&state, &path)?;
    let ledger = state.kernel.snapshot();
    gpu_state(&ledger, &gpu)?;
    let owners = Attributions::new(&ledger);
    let all = owners.on(&gpu).unwrap_or_default().iter();
    let all = all.map(|(process, attribution)| Process::of(&ledger, gpu.as_str(), process, attribution));
    etag::fresh(
        &request,
        &ProcessList { items: all.collect(), sight: ProcessSight::of(ledger.process_visibility()) },
    )
}

/// Filters of processes. All given ones must match.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// Only those on this GPU, by UUID.
    #[param(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    gpu: Option<String>,
    /// Maximum number of items; 1024 by default, which is the most.
    #[param(minimum = 1, maximum = 1024, example = 100)]
    limit: Option<usize>,
    /// Only items after this: `next` of the previous response, with the same filters.
    #[param(
        example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5 4711 GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"
    )]
    cursor: Option<String>,
}

/// Identifies a bypass: a process may be on several instances of a GPU.
type Key = (GpuId, u32, PartId);

fn key(bypass: &attribution::Bypass) -> Key {
    (bypass.gpu.clone(), bypass.process.pid, bypass.process.part.clone())
}

fn parse_cursor(text: &str) -> Result<Key, Failure> {
    let mut words = text.split(' ');
    let key = (|| {
        let (gpu, pid, part) = (words.next()?, words.next()?, words.next()?);
        Some((GpuId::parse(gpu).ok()?, pid.parse().ok()?, PartId::parse(part).ok()?))
    })();
    key.filter(|_| words.next().is_none()).ok_or_else(|| query::malformed(text))
}

/// List uses of GPUs without an allocation
///
/// Lists processes on a GPU that was not granted to their pod, host processes, and processes of ended allocations,
/// once they were seen for ten seconds; if the API server is used, pods whose specs let them use GPUs without an
/// allocation; and containers that the guard restricted or refused, or could not stop. One page: `next` of a response is the `cursor` of the following request.
#[utoipa::path(get, path = "",
    responses((status = 200, description = "The processes, by GPU and process id", body = BypassList)))]
pub(crate) async fn bypass(state: Data<State>, request: HttpRequest, filter: Query<Filter>) -> HandlerResult {
    let limit = query::limit(filter.limit, BYPASSES_MAX, BYPASSES_MAX)?;
    let after = filter.cursor.as_deref().map(parse_cursor).transpose()?;
    let ledger = state.kernel.snapshot();
    let gpu = filter.gpu.as_deref().map(|gpu| gpu_of_query(&ledger, gpu)).transpose()?;
    let mut found = Attributions::new(&ledger).bypasses();
    found.retain(|bypass| gpu.as_ref().is_none_or(|gpu| bypass.gpu == *gpu));
    found.sort_by_cached_key(key);
    let total = found.len();
    let bypasses = ledger.runtime.iter().flat_map(|view| &view.container_bypasses);
    let (found, next) = query::page(found, after.as_ref(), limit, key);
    etag::fresh(
        &request,
        &BypassList {
            sight: ProcessSight::of(ledger.process_visibility()),
            items: found.iter().map(|b| Bypass::of(&ledger, b)).collect(),
            total,
            next: next.map(|(gpu, pid, part)| format!("{gpu} {pid} {part}")),
            pods: ledger.pods.is_some().then(|| pods_with_gpu_bypass(&ledger).map(ReachingPod::of).collect()),
            containers: bypasses.map(|bypass| ContainerBypass::of(bypass)).collect(),
        },
    )
}
