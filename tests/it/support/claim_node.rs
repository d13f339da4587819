//! A node whose GPUs are granted through DRA, and the claims of its API server.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use crate::support::gpus::MEMORY_MIB;
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use crate::support::wait::SOON;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::grants::claim::{Claim, ClaimOfServer, ClaimPod, DeviceResult};
use berth_kernel::hardware::device_access::DeviceAccess;
use berth_kernel::ids::names::DeviceId;
use berth_kernel::node::command::Command;
use berth_kernel::sharing::via::KubeletApi;
use berth_kubelet::dra::{ClaimReader, DraDriver, DriverSettings, RunningDriver};
use berth_kubelet::{ConnectionTimeouts, DeviceListStrategy, Edits};
use berth_proto::dra::dra_plugin_client::DraPluginClient;
use berth_proto::dra::{self, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hyper_util::rt::TokioIo;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

pub(crate) const DRIVER: &str = "gpu.nvidia.com";
pub(crate) const POOL: &str = "node-1";

/// The claims of an API server.
#[derive(Default)]
pub(crate) struct Server {
    pub(crate) claims: Mutex<BTreeMap<String, ClaimOfServer>>,
    pub(crate) is_away: AtomicBool,
    /// Whether it answers no read yet.
    pub(crate) is_slow: AtomicBool,
    /// Reads that have begun.
    pub(crate) reads: AtomicUsize,
}

impl ClaimReader for Server {
    fn read<'r>(&'r self, _: &'r str, name: &'r str) -> BoxFuture<'r, Result<Option<ClaimOfServer>, String>> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let answer = if self.is_away.load(Ordering::SeqCst) {
            Err("connection refused".to_owned())
        } else {
            Ok(self.claims.lock().unwrap().get(name).cloned())
        };
        async move {
            while self.is_slow.load(Ordering::SeqCst) {
                sleep(Duration::from_millis(5)).await;
            }
            answer
        }
        .boxed()
    }
}

/// A node whose GPUs are granted through DRA, with its driver.
pub(crate) struct ClaimNode {
    pub(crate) node: KubeletNode,
    pub(crate) server: Arc<Server>,
    pub(crate) settings: DriverSettings,
    pub(crate) driver: Option<RunningDriver>,
    pub(crate) client: DraPluginClient<Channel>,
}

impl ClaimNode {
    pub(crate) async fn new() -> Self {
        Self::waiting(Duration::from_millis(200)).await
    }

    /// `wait_max`: how long a call waits for a holder.
    pub(crate) async fn waiting(wait_max: Duration) -> Self {
        Self::with(NodeOptions::default(), wait_max).await
    }

    /// Each GPU is offered in four shares of 20,389 MiB.
    pub(crate) async fn shared(wait_max: Duration) -> Self {
        Self::with(NodeOptions { policy: Some("shares=4"), ..NodeOptions::default() }, wait_max).await
    }

    /// With a stack of these shipped policies, by name and parameters.
    pub(crate) async fn shipped(stack: &'static [(&'static str, &'static str)]) -> Self {
        Self::with(NodeOptions { stack, ..NodeOptions::default() }, Duration::from_millis(200)).await
    }

    /// With a stack of shipped policies, and with NVLinks between pairs of GPUs.
    pub(crate) async fn linked(
        stack: &'static [(&'static str, &'static str)],
        nvlinks: &'static [(u32, u32)],
    ) -> Self {
        Self::with(NodeOptions { stack, nvlinks, ..NodeOptions::default() }, Duration::from_millis(200)).await
    }

    async fn with(options: NodeOptions, wait_max: Duration) -> Self {
        let edits = Edits { strategies: [DeviceListStrategy::CdiCri].into(), ..Edits::default() };
        let node = NodeOptions { via: KubeletApi::Dra, edits, ..options }.unstarted().await;
        let access = DeviceAccess { by_cdi: true, ..DeviceAccess::default() };
        node.kernel.execute(Command::SetDeviceAccess(access)).await.unwrap();
        let settings = DriverSettings {
            driver: DRIVER.into(),
            node: POOL.into(),
            root_dir: node.settings.root_dir.clone(),
            cdi_dir: node.settings.root_dir.join("cdi"),
            edits: node.settings.edits.clone(),
            wait_max,
            gone_after: Duration::from_millis(300),
            connections: ConnectionTimeouts::default(),
        };
        let server = Arc::new(Server::default());
        let (driver, client) = started(&settings, &node, &server).await;
        Self { node, server, settings, driver: Some(driver), client }
    }

    /// A claim that the scheduler has allocated these GPUs, each for a request of its own.
    pub(crate) fn claim(&self, name: &str, gpus: &[u32]) -> dra::Claim {
        let result = |(index, gpu): (usize, &u32)| DeviceResult {
            request: format!("request-{index}"),
            ..result(&format!("gpu-{gpu}"))
        };
        self.allocated(name, gpus.iter().enumerate().map(result).collect())
    }

    /// A claim with a request for each `(gpu, shares)`, to which the scheduler has allocated the memory of that number of shares.
    pub(crate) fn shares(&self, name: &str, gpus: &[(u32, u64)]) -> dra::Claim {
        let result = |(index, (gpu, shares)): (usize, &(u32, u64))| DeviceResult {
            share_id: Some(format!("share-{name}-{index}")),
            consumed: [("memory".to_owned(), shares * (MEMORY_MIB / 4) * 1024 * 1024)].into(),
            ..result(&format!("gpu-{gpu}-shared"))
        };
        self.allocated(name, gpus.iter().enumerate().map(result).collect())
    }

    pub(crate) fn allocated(&self, name: &str, results: Vec<DeviceResult>) -> dra::Claim {
        let uid = format!("uid-{name}");
        let claim = ClaimOfServer {
            claim: Claim { uid: uid.clone(), namespace: "ns".into(), name: name.into() },
            pod_claim_name: None,
            pods: vec![ClaimPod { uid: format!("pod-of-{name}"), name: format!("pod-{name}") }],
            results,
        };
        self.server.claims.lock().unwrap().insert(name.into(), claim);
        dra::Claim { namespace: "ns".into(), uid, name: name.into() }
    }

    /// The answer for a claim.
    pub(crate) async fn answer(&self, claim: &dra::Claim) -> dra::NodePrepareResourceResponse {
        let request = NodePrepareResourcesRequest { claims: vec![claim.clone()] };
        let answer = self.client.clone().node_prepare_resources(request).await.unwrap().into_inner();
        answer.claims[&claim.uid].clone()
    }

    /// The CDI ids of a claim's devices, or the error.
    pub(crate) async fn prepare(&self, claim: &dra::Claim) -> Result<Vec<Vec<String>>, String> {
        let mut answers = self.prepare_all(std::slice::from_ref(claim)).await;
        answers.remove(&claim.uid).unwrap()
    }

    pub(crate) async fn prepare_all(
        &self,
        claims: &[dra::Claim],
    ) -> BTreeMap<String, Result<Vec<Vec<String>>, String>> {
        let request = NodePrepareResourcesRequest { claims: claims.to_vec() };
        let answer = self.client.clone().node_prepare_resources(request).await.unwrap().into_inner();
        assert_eq!(answer.claims.len(), claims.len(), "every claim of the request and no other");
        let ids = |response: dra::NodePrepareResourceResponse| {
            if response.error.is_empty() {
                Ok(response.devices.into_iter().map(|device| device.cdi_device_ids).collect())
            } else {
                assert!(response.devices.is_empty());
                Err(response.error)
            }
        };
        answer.claims.into_iter().map(|(uid, response)| (uid, ids(response))).collect()
    }

    pub(crate) async fn unprepare(&self, claim: &dra::Claim) {
        let request = NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
        let answer = self.client.clone().node_unprepare_resources(request).await.unwrap().into_inner();
        assert_eq!(answer.claims[&claim.uid].error, "");
    }

    /// The share numbers that a claim holds, by GPU.
    pub(crate) fn held_shares(&self, claim: &dra::Claim) -> Vec<DeviceId> {
        let live = self.live().into_iter().filter(|allocation| allocation.is_of_claim(&claim.uid));
        live.flat_map(|allocation| allocation.devices.clone()).collect()
    }

    pub(crate) fn live(&self) -> Vec<Arc<Allocation>> {
        self.node.kernel.snapshot().live.values().cloned().collect()
    }

    pub(crate) fn specification(&self, claim: &dra::Claim) -> PathBuf {
        self.settings.cdi_dir.join(format!("{DRIVER}-berth_{}.json", claim.uid))
    }

    /// The driver and the kubelet's connection end, and both start again.
    pub(crate) async fn restart(&mut self) {
        self.driver.take().unwrap().stop().await;
        let (driver, client) = started(&self.settings, &self.node, &self.server).await;
        (self.driver, self.client) = (Some(driver), client);
    }
}

/// A device that the scheduler has allocated to the request `gpu`.
pub(crate) fn result(device: &str) -> DeviceResult {
    DeviceResult {
        request: "gpu".into(),
        driver: DRIVER.into(),
        pool: POOL.into(),
        device: device.into(),
        admin_access: false,
        share_id: None,
        consumed: BTreeMap::new(),
    }
}

async fn started(
    settings: &DriverSettings,
    node: &KubeletNode,
    server: &Arc<Server>,
) -> (RunningDriver, DraPluginClient<Channel>) {
    let driver = DraDriver::new(settings.clone(), node.kernel.clone(), Arc::clone(server) as _).start();
    let socket = settings.registration_socket();
    until_async("the driver's sockets are there", || socket.exists()).await;
    (driver, DraPluginClient::new(dial(&settings.socket(), "http://localhost").await))
}

pub(crate) async fn until_async(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = timeout(SOON, async {
        while !holds() {
            sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "waited {SOON:?}: {what}");
}

/// `authority`: what the client sends as `:authority`.
pub(crate) async fn dial(socket: &Path, authority: &str) -> Channel {
    let socket = socket.to_owned();
    let connect = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost").origin(authority.parse().unwrap());
    endpoint.connect_with_connector(connect).await.unwrap()
}
