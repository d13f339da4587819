//! The API server: the node, claims as the scheduler leaves them, and the ResourceSlices of the drivers.

use anyhow::{Context as _, Result, bail, ensure};
use berth_proto::dra;
use futures_util::{Stream, StreamExt, pin_mut};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// The node's name, which is that of the pools.
pub(crate) const NODE: &str = "bench-dra";
const NAMESPACE: &str = "default";
/// The request of each claim.
const REQUEST: &str = "gpu";
/// Longer than a driver takes to publish its slices: NVIDIA's waits 30 s after a deletion.
const PUBLISHED_MAX: Duration = Duration::from_secs(90);
/// The interval at which the slices of a driver that starts are read.
const LOOK: Duration = Duration::from_millis(50);
/// How long the API server keeps a watch open, seconds.
const WATCH_SECONDS: u32 = 280;

/// Clients of the API server.
pub(crate) struct Cluster {
    claims: Api<ResourceClaim>,
    slices: Api<ResourceSlice>,
    /// With Berth's credentials: the API server's flow control delays Berth's requests, and an administrator's not.
    claims_of_berth: Api<ResourceClaim>,
}

impl Cluster {
    /// Connects, and creates the node.
    pub(crate) async fn new(kubeconfig: &Path, berth_kubeconfig: &Path) -> Result<Self> {
        let (admin, berth) = (client(kubeconfig).await?, client(berth_kubeconfig).await?);
        let nodes: Api<Node> = Api::all(admin.clone());
        nodes.create(&PostParams::default(), &node()?).await.context("the node cannot be created")?;
        Ok(Self {
            claims: Api::namespaced(admin.clone(), NAMESPACE),
            slices: Api::all(admin),
            claims_of_berth: Api::namespaced(berth, NAMESPACE),
        })
    }

    /// A new claim to which the scheduler has allocated the device, for a pod of its own.
    pub(crate) async fn claim(&self, name: &str, driver: &str, device: &str) -> Result<dra::Claim> {
        let claim: ResourceClaim = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "devices": {
                "requests": [{ "name": REQUEST, "exactly": { "deviceClassName": "gpu.nvidia.com" } }],
            }},
        }))?;
        let created = self.claims.create(&PostParams::default(), &claim).await;
        let created = created.with_context(|| format!("claim {name} cannot be created"))?;
        let uid = created.metadata.uid.context("a claim without a UID")?;
        let result = json!({ "request": REQUEST, "driver": driver, "pool": NODE, "device": device });
        let pod =
            json!({ "resource": "pods", "name": format!("pod-{name}"), "uid": format!("pod-of-{uid}") });
        let status = json!({ "status": {
            "allocation": { "devices": { "results": [result] } },
            "reservedFor": [pod],
        }});
        let allocated = self.claims.patch_status(name, &PatchParams::default(), &Patch::Merge(&status)).await;
        allocated.with_context(|| format!("claim {name} cannot be allocated"))?;
        Ok(dra::Claim { namespace: NAMESPACE.into(), uid, name: name.into() })
    }

    /// Reads a claim as Berth does. Answers how long that took.
    pub(crate) async fn read(&self, claim: &dra::Claim) -> Result<Duration> {
        let began = Instant::now();
        let read = self.claims_of_berth.get(&claim.name).await?;
        let took = began.elapsed();
        ensure!(
            read.metadata.uid.as_deref() == Some(claim.uid.as_str()),
            "the API server has another claim {}",
            claim.name
        );
        Ok(took)
    }

    /// Waits until the driver has published so many devices. Answers their names, sorted.
    pub(crate) async fn published(&self, driver: &str, devices: usize) -> Result<Vec<String>> {
        let until = Instant::now() + PUBLISHED_MAX;
        loop {
            let list = self.slices.list(&of_node()).await?;
            let names = complete_pool(list.items.iter(), driver);
            if let Some(names) = names.filter(|names| names.len() == devices) {
                return Ok(names);
            }
            ensure!(Instant::now() < until, "{driver} has not published {devices} devices: {:?}", list.items);
            sleep(LOOK).await;
        }
    }

    /// Deletes all slices of the node, as a kubelet does at its start. Answers after how long the pool of each driver
    /// was complete again, with so many devices.
    pub(crate) async fn delete_slices(&self, drivers: &[(&str, usize)]) -> Result<Vec<Duration>> {
        let list = self.slices.list(&of_node()).await?;
        let deleted = list.items.iter().filter_map(|slice| slice.metadata.uid.clone()).collect();
        let version = list.metadata.resource_version.unwrap_or_default();
        let parameters = WatchParams::default().fields(&fields()).timeout(WATCH_SECONDS);
        let events = self.slices.watch(&parameters, &version).await?;
        let began = Instant::now();
        let parameters = DeleteParams::default();
        let of_node = of_node();
        let delete = self.slices.delete_collection(&parameters, &of_node);
        let (deletion, back) = tokio::join!(delete, complete_again(events, deleted, drivers, began));
        deletion.context("the slices cannot be deleted")?;
        back
    }
}

/// Reads events until the pool of each driver is complete, without the slices that are being deleted.
async fn complete_again(
    events: impl Stream<Item = kube::Result<WatchEvent<ResourceSlice>>>,
    deleted: BTreeSet<String>,
    drivers: &[(&str, usize)],
    began: Instant,
) -> Result<Vec<Duration>> {
    let mut slices: BTreeMap<String, ResourceSlice> = BTreeMap::new();
    let mut back = vec![None; drivers.len()];
    pin_mut!(events);
    while back.iter().any(Option::is_none) {
        let event = timeout(PUBLISHED_MAX, events.next()).await.context("slices are not published again")?;
        match event.context("the watch of the slices has ended")?? {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                let uid = slice.metadata.uid.clone().unwrap_or_default();
                if !deleted.contains(&uid) {
                    slices.insert(uid, slice);
                }
            }
            WatchEvent::Deleted(slice) => {
                slices.remove(&slice.metadata.uid.unwrap_or_default());
            }
            WatchEvent::Bookmark(_) => {}
            WatchEvent::Error(status) => bail!("the watch of the slices has failed: {}", status.message),
        }
        for ((driver, devices), back) in drivers.iter().zip(&mut back) {
            let names = complete_pool(slices.values(), driver);
            if back.is_none() && names.is_some_and(|names| names.len() == *devices) {
                *back = Some(began.elapsed());
            }
        }
    }
    Ok(back.into_iter().flatten().collect())
}

/// The names of the devices in a driver's pool, sorted, if all slices of its newest generation are there.
fn complete_pool<'s>(
    slices: impl Iterator<Item = &'s ResourceSlice> + Clone,
    driver: &str,
) -> Option<Vec<String>> {
    let specs = slices.map(|slice| &slice.spec).filter(|spec| spec.driver == driver);
    let newest = specs.clone().map(|spec| spec.pool.generation).max()?;
    let current: Vec<_> = specs.filter(|spec| spec.pool.generation == newest).collect();
    let count = i64::try_from(current.len()).ok()?;
    if current.first()?.pool.resource_slice_count != count {
        return None;
    }
    let devices = current.into_iter().flat_map(|spec| spec.devices.iter().flatten());
    let mut names: Vec<String> = devices.map(|device| device.name.clone()).collect();
    names.sort_unstable();
    Some(names)
}

fn fields() -> String {
    format!("spec.nodeName={NODE}")
}

fn of_node() -> ListParams {
    ListParams::default().fields(&fields())
}

/// The node as its kubelet would create it. Berth reads the versions.
fn node() -> Result<Node> {
    Ok(serde_json::from_value(json!({
        "metadata": { "name": NODE },
        "status": { "nodeInfo": {
            "architecture": "amd64", "operatingSystem": "linux", "osImage": "none", "kernelVersion": "6.12.0",
            "machineID": "1", "systemUUID": "1", "bootID": "1", "kubeProxyVersion": "",
            "kubeletVersion": "v1.36.2", "containerRuntimeVersion": "containerd://2.1.4",
        }},
    }))?)
}

/// Like Berth's own client: without the library's repetitions.
async fn client(kubeconfig: &Path) -> Result<Client> {
    let file = Kubeconfig::read_from(kubeconfig)?;
    let mut config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    config.default_retry = false;
    Ok(Client::try_from(config)?)
}
