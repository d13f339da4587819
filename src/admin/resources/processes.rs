//! `/gpus/{uuid}/processes` and `/bypass`: who is on the GPUs, and by which right.

use crate::failure::IntoFailure;
use crate::resources::gpus::{gpu_id, gpu_of_query};
use crate::state::State;
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::{Bypass, BypassList, Process, ProcessList, ProcessSight, ReachingPod};
use berth_http::Failure;
use berth_http::{etag, paging};
use berth_kernel::attribution;
use berth_kernel::attribution::{Attributions, pods_with_gpu_bypass};
use berth_kernel::names::PartId;
use berth_kernel::refusal::Refusal;
use serde::Deserialize;
use utoipa::IntoParams;

/// Most processes in one answer, at about 400 bytes each: four GPUs full of strangers.
const BYPASSES_MAX: usize = 1024;

/// The processes on a GPU
///
/// Who they are, how much memory they have, and which allocation they use. A GPU that does not tell
/// its processes one by one has none here; `sight` says how far to trust that.
#[utoipa::path(get, path = "/api/v1/gpus/{uuid}/processes", tag = "processes", operation_id = "listGpuProcesses",
    params(("uuid" = String, Path, description = "UUID of the GPU; to an index the answer is 404, with a hint that names the UUID", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 200, description = "The processes", body = ProcessList),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
    ))]
pub(crate) async fn list(
    state: web::Data<State>,
    request: HttpRequest,
    path: web::Path<String>,
) -> Result<HttpResponse, Failure> {
    let gpu = gpu_id(&state, &path)?;
    let ledger = state.kernel.snapshot();
    if !ledger.gpus.contains_key(&gpu) {
        return Err(Refusal::UnknownGpu { gpu }.into_failure());
    }
    let owners = Attributions::new(&ledger);
    let all = owners.on(&gpu).unwrap_or_default().iter();
    let all = all.map(|(seen, whose)| Process::of(&ledger, gpu.as_str(), seen, whose));
    etag::fresh(&request, &ProcessList { items: all.collect(), sight: ProcessSight::of(ledger.sight()) })
}

/// Which processes. All that are given must hold.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Filter {
    /// On this GPU, by UUID.
    #[param(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    gpu: Option<String>,
    /// Most items; 1024 if not given, which is the most.
    #[param(minimum = 1, maximum = 1024, example = 100)]
    limit: Option<usize>,
    /// Only those that follow: `next` of the answer before, with the same filter.
    #[param(
        example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5 4711 GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"
    )]
    cursor: Option<String>,
}

/// What tells a bypass from others: a process may be on several instances of a GPU.
type Key = (PartId, u32, PartId);

fn key(bypass: &attribution::Bypass) -> Key {
    (bypass.gpu.clone(), bypass.process.pid, bypass.process.part.clone())
}

fn parse_cursor(text: &str) -> Result<Key, Failure> {
    let mut words = text.split(' ');
    let key = (|| {
        let (gpu, pid, part) = (words.next()?, words.next()?, words.next()?);
        Some((PartId::parse(gpu).ok()?, pid.parse().ok()?, PartId::parse(part).ok()?))
    })();
    key.filter(|_| words.next().is_none()).ok_or_else(|| paging::malformed(text))
}

/// Uses of GPUs that no allocation explains
///
/// Processes on a GPU whose pod was not granted it, host processes, and what an ended allocation left
/// behind: each is told once it is seen for ten seconds. And, where the API server is a source, pods
/// whose spec lets them reach GPUs past every grant. A page at a time: `next` of one answer is the
/// `cursor` of the following request.
#[utoipa::path(get, path = "/api/v1/bypass", tag = "processes", operation_id = "listBypasses", params(Filter),
    responses(
        (status = 200, description = "What is seen now, by GPU and process id", body = BypassList),
        (status = 400, description = "A malformed query, or an unknown key in it"),
    ))]
pub(crate) async fn bypass(
    state: web::Data<State>,
    request: HttpRequest,
    filter: web::Query<Filter>,
) -> Result<HttpResponse, Failure> {
    let limit = paging::limit(filter.limit, BYPASSES_MAX, BYPASSES_MAX)?;
    let after = filter.cursor.as_deref().map(parse_cursor).transpose()?;
    let ledger = state.kernel.snapshot();
    let gpu = filter.gpu.as_deref().map(|gpu| gpu_of_query(&ledger, gpu)).transpose()?;
    let mut found = Attributions::new(&ledger).bypasses();
    found.retain(|bypass| gpu.as_ref().is_none_or(|gpu| bypass.gpu == *gpu));
    found.sort_by_cached_key(key);
    let total = found.len();
    let (found, next) = paging::page(found, after.as_ref(), limit, key);
    etag::fresh(
        &request,
        &BypassList {
            sight: ProcessSight::of(ledger.sight()),
            items: found.iter().map(|b| Bypass::of(&ledger, b)).collect(),
            total,
            next: next.map(|(gpu, pid, part)| format!("{gpu} {pid} {part}")),
            pods: ledger.pods.is_some().then(|| pods_with_gpu_bypass(&ledger).map(ReachingPod::of).collect()),
        },
    )
}
