//! `/gpus/{uuid}/processes` and `/bypass`: who is on the GPUs, and by which right.

use super::dto::{Bypass, BypassList, Process, ProcessList, ProcessSight, ReachingPod};
use super::gpus::gpu_id;
use super::problem::Problem;
use super::state::State;
use crate::kernel::belongs::{Owners, reaching};
use crate::kernel::refusal::Refusal;
use actix_web::{HttpResponse, web};

/// Most processes in one answer, at about 400 bytes each: four GPUs full of strangers.
const BYPASSES_MAX: usize = 1024;

/// The processes on a GPU
///
/// Who they are, how much memory they have, and which allocation they use. A GPU that does not tell
/// its processes one by one has none here; `sight` says how far to trust that.
#[utoipa::path(get, path = "/api/v1/gpus/{uuid}/processes", tag = "processes", operation_id = "listGpuProcesses",
    params(("uuid" = String, Path, description = "UUID of the GPU", example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")),
    responses(
        (status = 200, description = "The processes", body = ProcessList),
        (status = 400, description = "No UUID"),
        (status = 404, description = "No such GPU"),
    ))]
pub(super) async fn list(state: web::Data<State>, path: web::Path<String>) -> Result<HttpResponse, Problem> {
    let gpu = gpu_id(&path)?;
    let ledger = state.door.snapshot();
    if !ledger.gpus.contains_key(&gpu) {
        return Err(Refusal::UnknownGpu { gpu }.into());
    }
    let owners = Owners::of(&ledger);
    let all = owners.on(&gpu).unwrap_or_default().iter();
    let all = all.map(|(seen, whose)| Process::of(&ledger, gpu.as_str(), seen, whose));
    Ok(HttpResponse::Ok().json(ProcessList { items: all.collect(), sight: ProcessSight::of(ledger.sight()) }))
}

/// Uses of GPUs that no allocation explains
///
/// Processes on a GPU whose pod was not granted it, host processes, and what an ended allocation left
/// behind: each is told once it is seen for ten seconds. And, where the API server is a source, pods
/// whose spec lets them reach GPUs past every grant.
#[utoipa::path(get, path = "/api/v1/bypass", tag = "processes", operation_id = "listBypasses",
    responses((status = 200, description = "What is seen now", body = BypassList)))]
pub(super) async fn bypass(state: web::Data<State>) -> HttpResponse {
    let ledger = state.door.snapshot();
    let found = Owners::of(&ledger).bypasses();
    HttpResponse::Ok().json(BypassList {
        sight: ProcessSight::of(ledger.sight()),
        items: found.iter().take(BYPASSES_MAX).map(|b| Bypass::of(&ledger, b)).collect(),
        total: found.len(),
        pods: ledger.pods.is_some().then(|| reaching(&ledger).map(ReachingPod::of).collect()),
    })
}
