//! Finishes the moves of GPUs to the kubelet's other API when the API server shows that this is safe: to DRA, when the node's
//! status counts no more devices than the device plugin lists as healthy; to the device plugin, when no claim is allocated a
//! device of the GPU.

use super::quantity::amount;
use super::settings::{DraTask, Settings, SlicesState};
use berth_core::KernelHandle;
use berth_core::keeper::CommandError;
use berth_kernel::ids::names::{GpuId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::listing::listing;
use berth_kernel::sharing::publish::{device_name, shared_device_name};
use berth_kernel::sharing::via::{KubeletApi, waits_for};
use berth_kube::{RequestError, jittered, random, request};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// How often the GPUs that are to be moved are checked.
const INTERVAL: Duration = Duration::from_secs(2);
/// The mean of the same while a claim or the node's status keeps one from its move: each check lists all claims.
const BLOCKED_INTERVAL: Duration = Duration::from_secs(10);
/// Claims of one page of a list of all.
const CLAIMS_PER_PAGE: u32 = 500;

/// Finishes moves of GPUs; never returns.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle, task: &DraTask) {
    let mut snapshots = kernel.watch();
    // Since when the slices show that a GPU is to be moved.
    let mut shown = BTreeMap::new();
    loop {
        let ledger = snapshots.borrow_and_update().clone();
        if !ledger.gpus.values().any(|state| state.via.moving) {
            shown.clear();
            if snapshots.changed().await.is_err() {
                return pending().await;
            }
            continue;
        }
        note_shown(&mut shown, &task.slices.borrow(), kernel.now());
        let mut is_blocked = false;
        for gpu in due(&ledger, &shown, kernel.now()) {
            match allocated(settings, &client, &ledger, &gpu, &task.driver).await {
                Ok(None) => finish_move(kernel, gpu).await,
                Ok(Some(what)) => {
                    is_blocked = true;
                    tracing::debug!(%gpu, what, "the GPU cannot be moved yet");
                }
                Err(RequestError { why, .. }) => {
                    tracing::warn!(%gpu, why, "the API server could not be read to check whether the GPU can be moved; it is checked again");
                    sleep(
                        settings
                            .connection
                            .retry_after
                            .delay(settings.connection.retry_interval, Instant::now()),
                    )
                    .await;
                }
            }
        }
        let wait = if is_blocked { BLOCKED_INTERVAL } else { INTERVAL };
        sleep(jittered(wait, random())).await;
    }
}

fn note_shown(shown: &mut BTreeMap<GpuId, u64>, slices: &SlicesState, now: Now) {
    shown.retain(|gpu, _| slices.error.is_none() && slices.moving.contains(gpu));
    for gpu in slices.moving.iter().filter(|_| slices.error.is_none()) {
        shown.entry(gpu.clone()).or_insert(now.mono_ms);
    }
}

/// The GPUs whose move waits for nothing in the ledger. A GPU that leaves DRA must also have been shown as moving in the
/// ResourceSlices for `timing.viaMs`.
fn due(ledger: &Ledger, shown: &BTreeMap<GpuId, u64>, now: Now) -> Vec<GpuId> {
    let moving = ledger.gpus.iter().filter(|(_, state)| state.via.moving);
    let is_due = |gpu: &GpuId, api: KubeletApi| {
        let wait_ms = ledger.rules.timing.via_ms;
        let is_shown = || shown.get(gpu).is_some_and(|since| now.passed(*since, wait_ms));
        waits_for(ledger, gpu, now).is_none() && (api == KubeletApi::DevicePlugin || is_shown())
    };
    moving.filter(|(gpu, state)| is_due(gpu, state.via.api)).map(|(gpu, _)| gpu.clone()).collect()
}

/// What may still be allocated through the API that the GPU leaves; `None` if nothing is.
async fn allocated(
    settings: &Settings,
    client: &Client,
    ledger: &Ledger,
    gpu: &GpuId,
    driver: &str,
) -> Result<Option<String>, RequestError> {
    match ledger.gpus.get(gpu).map(|state| state.via.api) {
        Some(KubeletApi::DevicePlugin) => {
            let nodes: Api<Node> = Api::all(client.clone());
            let node = request(nodes.get(&settings.node), "get nodes (ClusterRole berth)").await?;
            Ok(allocatable(ledger, gpu, &node))
        }
        Some(KubeletApi::Dra) => allocated_to_claim(client, ledger, gpu, driver, &settings.node).await,
        None => Ok(None),
    }
}

/// The scheduler counts a resource's allocatable devices, which the kubelet writes into the node's status some time after
/// a device list.
fn allocatable(ledger: &Ledger, gpu: &GpuId, node: &Node) -> Option<String> {
    let counted = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
    let resources: BTreeSet<&Resource> =
        ledger.parts_of(gpu).flat_map(|part| part.devices.keys().map(|(resource, _)| resource)).collect();
    resources.into_iter().find_map(|resource| {
        let shown = counted.and_then(|all| all.get(resource.as_str())).map(|count| amount(&count.0));
        let healthy = listing(ledger, resource).iter().filter(|device| device.healthy).count() as u64;
        match shown {
            None => None,
            Some(Some(shown)) if shown <= healthy => None,
            _ => Some(format!("the node's status shows more of {resource} than are listed")),
        }
    })
}

async fn allocated_to_claim(
    client: &Client,
    ledger: &Ledger,
    gpu: &GpuId,
    driver: &str,
    pool: &str,
) -> Result<Option<String>, RequestError> {
    let names = ledger.parts_of(gpu).map(|part| [device_name(&part.part), shared_device_name(&part.part)]);
    let names: BTreeSet<String> = names.flatten().flatten().collect();
    let claims: Api<ResourceClaim> = Api::all(client.clone());
    let mut params = ListParams::default().limit(CLAIMS_PER_PAGE);
    loop {
        let page = request(claims.list(&params), "list resourceclaims (ClusterRole berth-dra)").await?;
        if let Some(claim) = page.items.iter().find(|claim| has_device(claim, driver, pool, &names)) {
            let name = claim.metadata.name.as_deref().unwrap_or_default();
            let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
            return Ok(Some(format!("claim {namespace}/{name} has a device of the GPU")));
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(None),
        }
    }
}

fn has_device(claim: &ResourceClaim, driver: &str, pool: &str, names: &BTreeSet<String>) -> bool {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    // Admin access takes nothing.
    let mut holding = results.into_iter().flatten().filter(|result| !result.admin_access.unwrap_or(false));
    holding.any(|result| result.driver == driver && result.pool == pool && names.contains(&result.device))
}

async fn finish_move(kernel: &KernelHandle, gpu: GpuId) {
    match kernel.execute(Command::FinishMove { gpu: gpu.clone() }).await {
        Ok(_) => tracing::info!(%gpu, "the GPU was moved to the kubelet's other API"),
        // Something was granted meanwhile.
        Err(CommandError::Refused(refusal)) => {
            tracing::debug!(%gpu, %refusal, "the GPU cannot be moved yet");
        }
        Err(error) => tracing::warn!(%gpu, %error, "the move of the GPU could not be recorded"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_claim_that_was_allocated_a_device_of_the_gpu_keeps_it() {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": {"name": "gpu", "namespace": "ml"},
            "spec": {},
            "status": {"allocation": {"devices": {"results": [
                {"request": "gpu", "driver": "d", "pool": "n1", "device": "gpu-1"},
            ]}}},
        }))
        .unwrap();
        let names = |name: &str| BTreeSet::from([name.to_owned()]);
        assert!(has_device(&claim, "d", "n1", &names("gpu-1")));
        for (driver, pool, name) in [("e", "n1", "gpu-1"), ("d", "n2", "gpu-1"), ("d", "n1", "gpu-2")] {
            assert!(!has_device(&claim, driver, pool, &names(name)));
        }
    }
}
