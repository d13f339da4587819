//! The DRA driver: its sockets as the kubelet calls them, and claims from their preparation to their release.

use crate::support::gpus::{MEMORY_MIB, SHARED, gpu, gpu_id};
use crate::support::kubelet_node::{KubeletNode, NodeOptions, api_server_shows, cordon};
use crate::support::wait::SOON;
use berth_kernel::grants::allocation::{Allocation, EndReason};
use berth_kernel::grants::claim::{Claim, ClaimOfServer, ClaimPod, DeviceResult};
use berth_kernel::hardware::device_access::DeviceAccess;
use berth_kernel::hardware::gpu::{Reading, XID};
use berth_kernel::ids::names::DeviceId;
use berth_kernel::node::command::Command;
use berth_kernel::sharing::via::KubeletApi;
use berth_kubelet::dra::{
    ClaimReader, DraDriver, DriverRegistration, DriverSettings, RunningDriver, adopt_claims,
};
use berth_kubelet::{ConnectionTimeouts, DeviceListStrategy, Edits};
use berth_proto::dra::dra_plugin_client::DraPluginClient;
use berth_proto::dra::{self, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use berth_proto::plugin_registration::registration_client::RegistrationClient;
use berth_proto::plugin_registration::{InfoRequest, RegistrationStatus};
use berth_proto::{v1, v1alpha1};
use futures_util::FutureExt;
use futures_util::future::{BoxFuture, join_all};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

const DRIVER: &str = "gpu.nvidia.com";
const POOL: &str = "node-1";

/// The claims of an API server.
#[derive(Default)]
struct Server {
    claims: Mutex<BTreeMap<String, ClaimOfServer>>,
    is_away: AtomicBool,
    reads: AtomicUsize,
}

impl ClaimReader for Server {
    fn read<'r>(&'r self, _: &'r str, name: &'r str) -> BoxFuture<'r, Result<Option<ClaimOfServer>, String>> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let answer = if self.is_away.load(Ordering::SeqCst) {
            Err("connection refused".to_owned())
        } else {
            Ok(self.claims.lock().unwrap().get(name).cloned())
        };
        async { answer }.boxed()
    }
}

/// A node whose GPUs are granted through DRA, with its driver.
struct ClaimNode {
    node: KubeletNode,
    server: Arc<Server>,
    settings: DriverSettings,
    driver: Option<RunningDriver>,
    client: DraPluginClient<Channel>,
}

impl ClaimNode {
    async fn new() -> Self {
        Self::waiting(Duration::from_millis(200)).await
    }

    /// `wait_max`: how long a call waits for a holder.
    async fn waiting(wait_max: Duration) -> Self {
        Self::with(None, wait_max).await
    }

    /// Each GPU is offered in four shares of 20,389 MiB.
    async fn shared(wait_max: Duration) -> Self {
        Self::with(Some("shares=4"), wait_max).await
    }

    async fn with(policy: Option<&'static str>, wait_max: Duration) -> Self {
        let edits = Edits { strategies: [DeviceListStrategy::CdiCri].into(), ..Edits::default() };
        let node = NodeOptions { via: KubeletApi::Dra, edits, policy, ..NodeOptions::default() };
        let node = node.unstarted().await;
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
    fn claim(&self, name: &str, gpus: &[u32]) -> dra::Claim {
        let result = |(index, gpu): (usize, &u32)| DeviceResult {
            request: format!("request-{index}"),
            ..result(&format!("gpu-{gpu}"))
        };
        self.allocated(name, gpus.iter().enumerate().map(result).collect())
    }

    /// A claim that the scheduler has allocated so much memory of GPUs that claims share: shares, by 20,389 MiB.
    fn shares(&self, name: &str, gpus: &[(u32, u64)]) -> dra::Claim {
        let result = |(index, (gpu, shares)): (usize, &(u32, u64))| DeviceResult {
            share_id: Some(format!("share-{name}-{index}")),
            consumed: [("memory".to_owned(), shares * (MEMORY_MIB / 4) * 1024 * 1024)].into(),
            ..result(&format!("gpu-{gpu}-shared"))
        };
        self.allocated(name, gpus.iter().enumerate().map(result).collect())
    }

    fn allocated(&self, name: &str, results: Vec<DeviceResult>) -> dra::Claim {
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
    async fn answer(&self, claim: &dra::Claim) -> dra::NodePrepareResourceResponse {
        let request = NodePrepareResourcesRequest { claims: vec![claim.clone()] };
        let answer = self.client.clone().node_prepare_resources(request).await.unwrap().into_inner();
        answer.claims[&claim.uid].clone()
    }

    /// The CDI ids of a claim's devices, or the error.
    async fn prepare(&self, claim: &dra::Claim) -> Result<Vec<Vec<String>>, String> {
        let mut answers = self.prepare_all(std::slice::from_ref(claim)).await;
        answers.remove(&claim.uid).unwrap()
    }

    async fn prepare_all(&self, claims: &[dra::Claim]) -> BTreeMap<String, Result<Vec<Vec<String>>, String>> {
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

    async fn unprepare(&self, claim: &dra::Claim) {
        let request = NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
        let answer = self.client.clone().node_unprepare_resources(request).await.unwrap().into_inner();
        assert_eq!(answer.claims[&claim.uid].error, "");
    }

    /// The share numbers that a claim holds, by GPU.
    fn held_shares(&self, claim: &dra::Claim) -> Vec<DeviceId> {
        let live = self.live().into_iter().filter(|allocation| allocation.is_of_claim(&claim.uid));
        live.flat_map(|allocation| allocation.devices.clone()).collect()
    }

    fn live(&self) -> Vec<Arc<Allocation>> {
        self.node.kernel.snapshot().live.values().cloned().collect()
    }

    fn specification(&self, claim: &dra::Claim) -> PathBuf {
        self.settings.cdi_dir.join(format!("{DRIVER}-berth_{}.json", claim.uid))
    }

    /// The driver and the kubelet's connection end, and both start again.
    async fn restart(&mut self) {
        self.driver.take().unwrap().stop().await;
        let (driver, client) = started(&self.settings, &self.node, &self.server).await;
        (self.driver, self.client) = (Some(driver), client);
    }
}

/// A device that the scheduler has allocated to the request `gpu`.
fn result(device: &str) -> DeviceResult {
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

async fn until_async(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = timeout(SOON, async {
        while !holds() {
            sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "waited {SOON:?}: {what}");
}

/// `authority`: in front of which the client sets its calls.
async fn dial(socket: &Path, authority: &str) -> Channel {
    let socket = socket.to_owned();
    let connect = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    let endpoint = Endpoint::from_static("http://localhost").origin(authority.parse().unwrap());
    endpoint.connect_with_connector(connect).await.unwrap()
}

/// grpc-go sends the escaped path of a unix socket as `:authority` (`encodeAuthority`).
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_watcher_of_plugins_finds_the_driver_by_its_socket() {
    let node = ClaimNode::new().await;
    let socket = node.settings.registration_socket();
    let escaped = socket.display().to_string().replace('/', "%2F");
    let mut client = RegistrationClient::new(dial(&socket, &format!("http://{escaped}")).await);
    let info = client.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
    assert_eq!(Path::new(&info.endpoint), node.settings.socket());
    assert_eq!(info.supported_versions[0], "v1.DRAPlugin");
    let mut state = node.driver.as_ref().unwrap().registration();
    for (status, expected) in [
        (
            RegistrationStatus { plugin_registered: true, error: String::new() },
            DriverRegistration::Registered,
        ),
        (
            RegistrationStatus { plugin_registered: false, error: "bad".into() },
            DriverRegistration::Failed("the kubelet refused the driver: bad".into()),
        ),
    ] {
        client.notify_registration_status(status).await.unwrap();
        assert_eq!(*state.borrow_and_update(), expected);
    }
    // The file is deleted: the watcher finds the driver again.
    fs::remove_file(&socket).unwrap();
    until_async("the socket is there again", || socket.exists()).await;
    node.driver.unwrap().stop().await;
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn beside_another_driver_of_its_name_the_driver_is_not_registered() {
    let (mut other, mut node) = (ClaimNode::new().await, ClaimNode::new().await);
    node.driver.take().unwrap().stop().await;
    let own = node.settings.registration_socket();
    let foreign = own.with_file_name(format!("{DRIVER}-reg.sock"));
    symlink(other.settings.registration_socket(), &foreign).unwrap();
    let driver = DraDriver::new(node.settings.clone(), node.node.kernel.clone(), node.server.clone()).start();
    let mut state = driver.registration();
    let names_it = |state: &DriverRegistration| matches!(state, DriverRegistration::Failed(why) if why.contains(&foreign.display().to_string()));
    assert!(timeout(SOON, state.wait_for(names_it)).await.is_ok(), "the other driver is named");
    assert!(!own.exists());
    other.driver.take().unwrap().stop().await;
    let waits = timeout(SOON, state.wait_for(|state| *state == DriverRegistration::Waiting)).await;
    assert!(waits.is_ok(), "the other driver has ended");
    assert!(own.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_that_is_prepared_again_keeps_its_ids_and_its_allocation() {
    let node = ClaimNode::new().await;
    let claim = node.claim("a", &[0, 1]);
    let first = node.prepare(&claim).await.unwrap();
    let [one, two] = &node.live()[..] else { panic!("two requests") };
    let own = |allocation: &Allocation| format!("{DRIVER}/berth={}-0", allocation.id);
    assert_eq!(
        first,
        [vec![own(one), "nvidia.com/gpu=GPU-0".into()], vec![own(two), "nvidia.com/gpu=GPU-1".into()]]
    );
    for _ in 0..3 {
        let (again, at_once) = tokio::join!(node.prepare(&claim), node.prepare(&claim));
        assert_eq!((again.as_ref(), at_once.as_ref()), (Ok(&first), Ok(&first)));
    }
    assert_eq!(node.live().len(), 2);
    let text = fs::read_to_string(node.specification(&claim)).unwrap();
    let specification: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(specification["kind"], format!("{DRIVER}/berth"));
    let device = &specification["devices"][0];
    assert_eq!(device["name"], format!("{}-0", one.id));
    let environment = device["containerEdits"]["env"].as_array().unwrap();
    let has = |variable: String| environment.contains(&Value::from(variable));
    assert!(has(format!("BERTH_ALLOCATION_ID_NVIDIA_COM_GPU={}", one.id)), "{environment:?}");
    assert!(has("NVIDIA_VISIBLE_DEVICES=void".into()), "{environment:?}");
    for _ in 0..2 {
        node.unprepare(&claim).await;
    }
    assert!(node.live().is_empty() && !node.specification(&claim).exists());
    let ended = node.node.kernel.snapshot().ended.iter().map(|past| past.end().reason).collect::<Vec<_>>();
    assert_eq!(ended, [EndReason::Released, EndReason::Released]);
    node.unprepare(&dra::Claim { namespace: "ns".into(), uid: "unknown".into(), name: "x".into() }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_is_prepared_although_another_one_of_the_call_is_not() {
    let node = ClaimNode::new().await;
    let (good, mut gone) = (node.claim("good", &[0]), node.claim("gone", &[1]));
    gone.uid = "uid-of-an-older-claim".into();
    let foreign = node.claim("foreign", &[]);
    let unknown = node.claim("unknown", &[77]);
    let all = [good.clone(), gone.clone(), foreign.clone(), unknown.clone()];
    let answers = node.prepare_all(&all).await;
    let ids = answers[&good.uid].clone().unwrap();
    let error = |claim: &dra::Claim| answers[&claim.uid].clone().unwrap_err();
    assert!(error(&gone).contains("no claim ns/gone with this UID"), "{}", error(&gone));
    assert!(error(&foreign).contains("no device of the driver"), "{}", error(&foreign));
    assert!(error(&unknown).contains("no device gpu-77"), "{}", error(&unknown));
    assert_eq!(node.prepare_all(&all).await[&good.uid], Ok(ids));
    assert_eq!(node.live().len(), 1);
    let path = dra::Claim { namespace: "ns".into(), uid: "../../x".into(), name: "x".into() };
    let request = NodePrepareResourcesRequest { claims: vec![path] };
    let status = node.client.clone().node_prepare_resources(request).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_waits_for_the_holder_of_its_device_and_names_it_in_the_end() {
    let mut node = ClaimNode::new().await;
    let (first, second) = (node.claim("first", &[0]), node.claim("second", &[0]));
    node.prepare(&first).await.unwrap();
    let holder = node.live()[0].id;
    let error = node.prepare(&second).await.unwrap_err();
    assert!(error.contains(&format!("allocation {holder}")), "{error}");
    node.settings.wait_max = SOON;
    node.restart().await;
    let release = async {
        sleep(Duration::from_millis(100)).await;
        node.unprepare(&first).await;
    };
    let (prepared, ()) = tokio::join!(node.prepare(&second), release);
    prepared.unwrap();
    assert_eq!(node.live()[0].origin.claim().unwrap().claim.name, "second");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_unprepare_voids_a_prepare_that_still_waits() {
    let node = ClaimNode::waiting(SOON).await;
    let (first, second) = (node.claim("first", &[0]), node.claim("second", &[0]));
    node.prepare(&first).await.unwrap();
    let overtake = async {
        sleep(Duration::from_millis(100)).await;
        node.unprepare(&second).await;
        node.unprepare(&first).await;
    };
    let (prepared, ()) = tokio::join!(node.prepare(&second), overtake);
    let error = prepared.unwrap_err();
    assert!(error.contains("has unprepared the claim"), "{error}");
    assert!(node.live().is_empty());
    node.prepare(&second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_the_api_server_a_prepared_claim_is_answered_from_its_record() {
    let node = ClaimNode::new().await;
    let (first, second) = (node.claim("first", &[0, 2]), node.claim("second", &[1]));
    let ids = node.prepare(&first).await.unwrap();
    node.server.is_away.store(true, Ordering::SeqCst);
    assert_eq!(node.prepare(&first).await.unwrap(), ids);
    let error = node.prepare(&second).await.unwrap_err();
    assert!(error.contains("connection refused"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn on_a_full_disk_a_claim_is_unprepared_and_its_device_stays_held_until_that_is_recorded() {
    let node = ClaimNode::new().await;
    let (first, second) = (node.claim("first", &[0]), node.claim("second", &[0]));
    node.prepare(&first).await.unwrap();
    node.node.store_fails.store(true, Ordering::SeqCst);
    node.unprepare(&first).await;
    assert_eq!(node.live().len(), 1);
    assert!(node.prepare(&second).await.is_err());
    node.node.store_fails.store(false, Ordering::SeqCst);
    node.node.wait("the release is recorded", |ledger| ledger.live.is_empty()).await;
    node.prepare(&second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_specifications_of_prepared_claims_are_always_there() {
    let mut node = ClaimNode::new().await;
    let claim = node.claim("a", &[0]);
    node.prepare(&claim).await.unwrap();
    let (file, stale) =
        (node.specification(&claim), node.settings.cdi_dir.join(format!("{DRIVER}-berth_x.json")));
    let text = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    until_async("it is written again", || fs::read(&file).is_ok_and(|now| now == text)).await;
    // A reboot empties the folder; the claim of a file that is left has been released.
    fs::remove_file(&file).unwrap();
    fs::write(&stale, "{}").unwrap();
    let foreign = node.settings.cdi_dir.join("nvidia.json");
    fs::write(&foreign, "{}").unwrap();
    node.restart().await;
    until_async("the folder is up to date", || file.exists() && !stale.exists()).await;
    assert!(foreign.exists());
}

/// The file's path on the node names the grant, and the guard reads it there.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn containers_of_a_claim_find_the_attributes_of_their_devices() {
    let mut node = ClaimNode::shared(Duration::from_millis(200)).await;
    let claim = node.shares("half", &[(0, 2)]);
    node.server.claims.lock().unwrap().get_mut("half").unwrap().pod_claim_name = Some("a-gpu".into());
    node.prepare(&claim).await.unwrap();
    let specification: Value =
        serde_json::from_slice(&fs::read(node.specification(&claim)).unwrap()).unwrap();
    let mounts = &specification["devices"][0]["containerEdits"]["mounts"];
    let mount = &mounts[0];
    // Another claim can have its file at the first path, and none at this one.
    assert_eq!(mounts[1]["containerPath"], format!("/var/run/berth/grants/{}.json", node.live()[0].id));
    assert_eq!(mounts[1]["hostPath"], mount["hostPath"]);
    let folder = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/a-gpu/gpu";
    assert_eq!(mount["containerPath"], format!("{folder}/{DRIVER}-metadata.json"));
    let path = PathBuf::from(mount["hostPath"].as_str().unwrap());
    let grant = format!("{}/{}={}", node.live()[0].id, gpu(0), 2 * (MEMORY_MIB / 4));
    let of_claim = node.settings.grants_folder().join(&claim.uid);
    assert_eq!(path, of_claim.join("gpu").join(grant).join("metadata.json"));
    let text = fs::read_to_string(&path).unwrap();
    let versions: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(versions.len(), 2);
    for version in versions {
        assert_eq!(
            (&version["metadata"]["uid"], &version["podClaimName"]),
            (&json!(claim.uid), &json!("a-gpu"))
        );
        let device = &version["requests"][0]["devices"][0];
        assert_eq!((&device["name"], &device["pool"]), (&json!("gpu-0-shared"), &json!(POOL)));
        assert_eq!(device["attributes"]["uuid"], json!({"string": gpu(0).as_str()}));
    }
    fs::remove_dir_all(node.settings.grants_folder()).unwrap();
    fs::create_dir_all(node.settings.grants_folder().join("uid-of-none")).unwrap();
    node.restart().await;
    until_async("the files are up to date", || {
        fs::read_to_string(&path).is_ok_and(|now| now == text)
            && !node.settings.grants_folder().join("uid-of-none").exists()
    })
    .await;
    node.unprepare(&claim).await;
    assert!(!of_claim.exists());
}

/// The kubelet does not have a claim prepared again while its containers run, so a daemon without its store reads the records.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_daemon_whose_store_was_lost_adopts_prepared_claims_and_their_gpus() {
    let first = ClaimNode::shared(Duration::from_millis(200)).await;
    let claim = first.shares("half", &[(0, 2)]);
    let ids = first.prepare(&claim).await.unwrap();
    let grants = first.settings.grants_folder();
    // One that is damaged, one that is not of its folder, which would be removed with the claim, and a file of someone else.
    let record = fs::read_to_string(grants.join(&claim.uid).join("claim.json")).unwrap();
    for (folder, text) in [("damaged", "{}"), ("other", &*record), ("up", &*record.replace(&claim.uid, ".."))]
    {
        fs::create_dir_all(grants.join(folder)).unwrap();
        fs::write(grants.join(folder).join("claim.json"), text).unwrap();
    }
    fs::write(grants.join("stray"), "").unwrap();
    let second = ClaimNode::shared(Duration::from_millis(200)).await;
    let author = berth_kernel::drain::marks::Author::api("ada".into(), String::new());
    let order = Command::SetVia { gpu: gpu_id(0), api: KubeletApi::DevicePlugin, author };
    second.node.kernel.execute(order).await.unwrap();
    second.node.clock.skip(30_000);
    second.node.kernel.execute(Command::FinishMove { gpu: gpu_id(0) }).await.unwrap();
    assert_eq!(adopt_claims(grants.clone(), &second.node.kernel).await, Ok(1));
    assert_eq!(adopt_claims(grants.clone(), &second.node.kernel).await, Ok(0), "it is known");
    assert_eq!(second.node.kernel.snapshot().gpus[&gpu_id(0)].via.api, KubeletApi::Dra);
    let (granted, adopted) = (&first.live()[0], &second.live()[0]);
    assert_eq!(
        (granted.id, &granted.devices, &granted.origin),
        (adopted.id, &adopted.devices, &adopted.origin)
    );
    assert_eq!(adopted.decision.limits.memory_mib, Some(2 * (MEMORY_MIB / 4)));
    second.shares("half", &[(0, 2)]);
    assert_eq!(
        second.prepare(&claim).await,
        Ok(ids),
        "a container starts again with the ids that the kubelet kept"
    );
    second.unprepare(&claim).await;
    assert_eq!(adopt_claims(grants, &second.node.kernel).await, Ok(0), "it has ended");
    assert_eq!(second.live(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_cordon_comes_too_late_for_a_claim_and_an_unhealthy_gpu_refuses_it() {
    let node = ClaimNode::new().await;
    node.node.kernel.execute(cordon(gpu_id(0), "fan")).await.unwrap();
    node.prepare(&node.claim("a", &[0])).await.unwrap();
    lose(&node, 1).await;
    let error = node.prepare(&node.claim("b", &[1])).await.unwrap_err();
    assert!(error.contains("unhealthy"), "{error}");
}

/// An XID makes the GPU unhealthy.
async fn lose(node: &ClaimNode, index: u32) {
    let reading = Reading { part: gpu(index), source: XID.into(), code: 79, detail: String::new() };
    node.node.kernel.submit_reading(reading).unwrap();
    node.node
        .wait("the GPU is unhealthy", |ledger| !ledger.gpus[&gpu_id(index)].health.state.is_usable())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn both_streams_of_health_show_every_device_and_each_change() {
    let node = ClaimNode::new().await;
    let channel = dial(&node.settings.socket(), "http://localhost").await;
    let mut client = v1::dra_resource_health_client::DraResourceHealthClient::new(channel.clone());
    let request = v1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await.unwrap().into_inner();
    let health = |message: v1::NodeWatchResourcesResponse| -> BTreeMap<String, (i32, String)> {
        let of = |device: v1::DeviceHealth| {
            let id = device.device.unwrap();
            assert_eq!(id.pool_name, POOL);
            (id.device_name, (device.health, device.message))
        };
        message.devices.into_iter().map(of).collect()
    };
    let first = health(stream.message().await.unwrap().unwrap());
    assert_eq!(first.len(), 4);
    assert!(first.values().all(|(health, _)| *health == v1::HealthStatus::Healthy as i32), "{first:?}");
    lose(&node, 1).await;
    let second = loop {
        let next = health(stream.message().await.unwrap().unwrap());
        if next != first {
            break next;
        }
    };
    assert_eq!(second["gpu-1"].0, v1::HealthStatus::Unhealthy as i32);
    assert!(second["gpu-1"].1.contains("79"), "{second:?}");
    let mut client = v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let request = v1alpha1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().devices.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gpu_of_the_device_plugin_is_granted_to_no_claim() {
    let node = ClaimNode::new().await;
    let claim = node.claim("a", &[0]);
    node.prepare(&claim).await.unwrap();
    let author = berth_kernel::drain::marks::Author::api("ada".into(), String::new());
    let order = Command::SetVia { gpu: gpu_id(0), api: KubeletApi::DevicePlugin, author };
    node.node.kernel.execute(order).await.unwrap();
    // It is prepared already, and the kubelet has restarted.
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await;
    node.node.clock.skip(30_000);
    node.node.kernel.execute(Command::FinishMove { gpu: gpu_id(0) }).await.unwrap();
    let error = node.prepare(&claim).await.unwrap_err();
    assert!(error.contains("via"), "{error}");
}

/// A release that was lost with the daemon: the kubelet does not repeat its call.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_that_the_api_server_has_no_more_is_released_after_a_time() {
    let node = ClaimNode::new().await;
    let (gone, kept) = (node.claim("gone", &[0]), node.claim("kept", &[1]));
    node.prepare(&gone).await.unwrap();
    node.prepare(&kept).await.unwrap();
    node.server.claims.lock().unwrap().remove("gone");
    node.node.wait("the claim is released", |ledger| ledger.live.len() == 1).await;
    assert_eq!(node.live()[0].origin.claim().unwrap().claim.name, "kept");
    until_async("its specification is removed", || !node.specification(&gone).exists()).await;
    // Without an answer nothing is known.
    node.server.is_away.store(true, Ordering::SeqCst);
    sleep(Duration::from_millis(600)).await;
    assert_eq!(node.live().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_whose_pod_runs_is_not_read_again() {
    let node = ClaimNode::new().await;
    let claim = node.claim("used", &[0]);
    let view = api_server_shows("pod-of-used", false);
    node.node.kernel.execute(Command::Pods(view)).await.unwrap();
    node.prepare(&claim).await.unwrap();
    // Ten checks for claims that are gone.
    sleep(node.settings.gone_after).await;
    assert_eq!(node.server.reads.load(Ordering::SeqCst), 1, "only the call to prepare it read it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn claims_get_different_shares_of_a_gpu_until_none_is_free() {
    let mut node = ClaimNode::shared(Duration::from_millis(200)).await;
    let claims: Vec<dra::Claim> = (0..4).map(|n| node.shares(&format!("c{n}"), &[(0, 1)])).collect();
    let answers = join_all(claims.iter().map(|claim| node.prepare(claim))).await;
    let ids: Vec<Vec<Vec<String>>> = answers.into_iter().collect::<Result<_, _>>().unwrap();
    for (claim, ids) in claims.iter().zip(&ids) {
        let own = node.live().into_iter().find(|allocation| allocation.is_of_claim(&claim.uid)).unwrap();
        assert_eq!(own.resource.as_str(), SHARED);
        let of_allocation = format!("{DRIVER}/berth={}-0", own.id);
        assert_eq!(*ids, [[of_allocation, "nvidia.com/gpu=GPU-0".into()]]);
        assert_eq!(node.prepare(claim).await.as_ref(), Ok(ids), "again");
    }
    let held: BTreeSet<DeviceId> = claims.iter().flat_map(|claim| node.held_shares(claim)).collect();
    assert_eq!(held.len(), 4, "{held:?}");
    let fifth = node.shares("fifth", &[(0, 1)]);
    let error = node.prepare(&fifth).await.unwrap_err();
    assert!(error.contains("holds its GPU"), "{error}");
    node.settings.wait_max = SOON;
    node.restart().await;
    let free = node.held_shares(&claims[2]);
    let release = async {
        sleep(Duration::from_millis(100)).await;
        node.unprepare(&claims[2]).await;
    };
    let (prepared, ()) = tokio::join!(node.prepare(&fifth), release);
    prepared.unwrap();
    assert_eq!(node.held_shares(&fifth), free);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_gets_as_many_shares_as_its_memory_takes_and_keeps_them() {
    let node = ClaimNode::shared(Duration::from_millis(200)).await;
    // Two requests for one GPU and one for another, which the scheduler puts into one claim.
    let claim = node.shares("big", &[(0, 2), (0, 1), (1, 3)]);
    let first = node.prepare(&claim).await.unwrap();
    assert_eq!(first.len(), 3, "an answer for each device: {first:?}");
    assert_ne!(first[0][0], first[1][0], "each with its own shares");
    let held = node.held_shares(&claim);
    let of = |index: u32| held.iter().filter(|id| id.part == gpu(index)).count();
    assert_eq!((of(0), of(1)), (3, 3));
    assert_eq!(node.prepare(&claim).await, Ok(first));
    assert_eq!(node.held_shares(&claim), held);
    let devices = node.answer(&claim).await.devices;
    let shown: Vec<_> =
        devices.iter().map(|device| (device.device_name.as_str(), device.share_id())).collect();
    assert_eq!(
        shown,
        [("gpu-0-shared", "share-big-0"), ("gpu-0-shared", "share-big-1"), ("gpu-1-shared", "share-big-2")]
    );
    // What is left of GPU 0 is one share.
    let error = node.prepare(&node.shares("two", &[(0, 2)])).await.unwrap_err();
    assert!(error.contains("holds its GPU"), "{error}");
    node.prepare(&node.shares("one", &[(0, 1)])).await.unwrap();
    let error = node.prepare(&node.shares("five", &[(2, 5)])).await.unwrap_err();
    assert!(error.contains("5 shares of the device gpu-2-shared, which has 4 now"), "{error}");
    let unread = DeviceResult {
        consumed: [("memory".to_owned(), u64::MAX)].into(),
        share_id: Some("s".into()),
        ..result("gpu-2-shared")
    };
    let error = node.prepare(&node.allocated("unread", vec![unread])).await.unwrap_err();
    assert!(error.contains("which has 4 now"), "{error}");
    let counted = DeviceResult {
        consumed: [("shares".to_owned(), 2)].into(),
        share_id: Some("s".into()),
        ..result("gpu-2-shared")
    };
    let error = node.prepare(&node.allocated("counted", vec![counted])).await.unwrap_err();
    assert!(error.contains("another capacity than the device gpu-2-shared has now"), "{error}");
    // Without the API server the record names the device once for all shares of a request.
    node.server.is_away.store(true, Ordering::SeqCst);
    let names: Vec<String> =
        node.answer(&claim).await.devices.into_iter().map(|device| device.device_name).collect();
    assert_eq!(names, ["gpu-0-shared", "gpu-1-shared"]);
}

/// A changed offer takes nothing from a claim that holds a share, and a claim for what is gone is refused with a reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_keeps_shares_whose_size_changes_or_that_are_offered_no_more() {
    let node = ClaimNode::shared(Duration::from_millis(200)).await;
    let claim = node.shares("kept", &[(0, 2)]);
    let first = node.prepare(&claim).await.unwrap();
    let held = node.held_shares(&claim);
    // By the new size its memory would be four shares.
    node.node.activate("shares=8").await;
    assert_eq!(node.prepare(&claim).await.as_ref(), Ok(&first));
    assert_eq!(node.held_shares(&claim), held);
    node.node.activate("whole").await;
    assert_eq!(node.prepare(&claim).await, Ok(first));
    let error = node.prepare(&node.shares("late", &[(1, 1)])).await.unwrap_err();
    assert!(error.contains("publishes no device gpu-1-shared"), "{error}");
    let error = node.prepare(&node.claim("whole", &[0])).await.unwrap_err();
    assert!(error.contains("holds its GPU"), "{error}");
    node.unprepare(&claim).await;
    node.prepare(&node.claim("whole", &[0])).await.unwrap();
}
