//! A node with an admin API on loopback, over a real keeper and a real policy thread; and a client of the API.

use crate::support::admin_fakes::{MemoryPolicies, SwitchStore, digest_of};
use crate::support::batches::batches;
use crate::support::gpus::{WHOLE, gpu, gpu_id, part, resource};
use crate::support::kubelet_fakes::RealClock;
use crate::support::port::Port;
use crate::support::wait::SOON;
use berth_admin::{AdminServer, GpuBackend, NodeFacts, StartStep};
use berth_core::keeper::Keeper;
use berth_core::stack::Baseline;
use berth_core::{Core, KernelHandle};
use berth_http::AdminAccess;
use berth_http::{RunningServer, Settings};
use berth_kernel::evidence::kubelet_view::{CheckpointEntry, ListedHolding, PodList, ReconcileView};
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::hardware::gpu::{Inventory, Link, Part, Path, Usage};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::{AllocationId, DeviceId};
use berth_kernel::ids::time::Timing;
use berth_kernel::node::command::{Attempt, Command};
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::hooks::{AdmitRequest, Hook};
use berth_kernel::policy::version::{PolicyVersion, TrustedKey};
use berth_observe::counters::RegistrationState;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A node with an admin API and without a kubelet. Its policies are [`MemoryPolicies`].
pub(crate) struct AdminNode {
    pub(crate) kernel: KernelHandle,
    pub(crate) core: Core,
    pub(crate) api: Option<RunningServer>,
    pub(crate) dir: TempDir,
    pub(crate) token: String,
    pub(crate) facts: Arc<Mutex<NodeFacts>>,
    pub(crate) store_fails: Arc<AtomicBool>,
    pub(crate) store_held: Arc<Mutex<()>>,
    pub(crate) policies: Arc<MemoryPolicies>,
    pub(crate) runtime: tokio::runtime::Runtime,
}

/// The offer of a node whose policies have no opinion.
pub(crate) fn baseline() -> Baseline {
    Baseline {
        resource: resource(WHOLE),
        mig: MigStrategy::default(),
        mps_sockets: BTreeMap::new(),
        xids: XidRules { ignored: Vec::new(), counted: Vec::new() },
        quiet_ms: 1000,
    }
}

/// A response of the API.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: Vec<u8>,
}

impl AdminNode {
    pub(crate) fn new(gpus: u32) -> Self {
        Self::trusting(gpus, Vec::new())
    }

    /// A node whose policies must be signed with one of these keys, if there are any.
    pub(crate) fn trusting(gpus: u32, trusted_keys: Vec<TrustedKey>) -> Self {
        let store = SwitchStore::default();
        let (store_fails, store_held) = (Arc::clone(&store.fails), Arc::clone(&store.held));
        let timing = Timing { retire_ms: 0, reply_settle_ms: 0, ..Timing::default() };
        let rules = Rules { timing, trusted_keys, ..Rules::default() };
        let clock = Arc::new(RealClock(Instant::now()));
        let keeper = Keeper::open(Box::new(store), rules, clock.clone()).unwrap();
        let policies = Arc::new(MemoryPolicies::default());
        let core = berth_core::start(keeper, &policies, clock, baseline(), None).unwrap().core;
        let kernel = core.kernel.clone();
        let dir = tempfile::tempdir().unwrap();
        let facts = Arc::new(Mutex::new(NodeFacts {
            name: "node-1".into(),
            backend: GpuBackend { source: "2 GPUs of a test".into(), ..GpuBackend::default() },
            gpus: StartStep::Done,
            adoption: StartStep::Done,
            kubelet: StartStep::Done,
            ..NodeFacts::default()
        }));
        let mut node = Self {
            kernel,
            core,
            api: None,
            dir,
            token: String::new(),
            facts,
            store_fails,
            store_held,
            policies,
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap(),
        };
        node.scan(gpus);
        node.runtime.block_on(node.kernel.reoffer()).unwrap();
        // Readiness requires that the kubelet has accepted the resource, and there is no kubelet.
        node.kernel.counters().kubelet.set_registration(WHOLE, Some(RegistrationState::Registered));
        node.start();
        node
    }

    pub(crate) fn settings(&self) -> Settings {
        let loopback: SocketAddr = "127.0.0.1:0".parse().unwrap();
        Settings {
            listen: loopback,
            health_listen: Some(loopback),
            token_file: self.dir.path().join("token"),
            access: AdminAccess::default(),
            reviewer: None,
            tls_poll_interval: Duration::from_millis(20),
        }
    }

    pub(crate) fn start(&mut self) {
        self.start_with(self.settings());
    }

    /// Stops the API, and starts it at this port.
    pub(crate) fn start_at(&mut self, port: &Port) {
        self.start_again(Settings { listen: port.address(), ..self.settings() });
    }

    /// Stops the API, and starts it with these settings.
    pub(crate) fn start_again(&mut self, settings: Settings) {
        if let Some(running) = self.api.take() {
            running.stop();
        }
        self.start_with(settings);
    }

    fn start_with(&mut self, settings: Settings) {
        let server = AdminServer::bind(settings).unwrap();
        let facts = Arc::clone(&self.facts);
        let facts = Arc::new(move || facts.lock().unwrap().clone());
        self.api = Some(server.run(self.core.clone(), facts, batches(&self.kernel)).unwrap());
        let text = std::fs::read_to_string(self.dir.path().join("token")).unwrap();
        self.token = text.trim().to_owned();
    }

    /// Records a scan that finds this number of GPUs.
    pub(crate) fn scan(&self, gpus: u32) {
        self.scan_with(gpus, |_| ());
    }

    /// Records a scan in which one of the GPUs has an error.
    pub(crate) fn scan_failing(&self, gpus: u32, failing: u32) {
        self.scan_with(gpus, |inventory| {
            inventory.scan_errors = BTreeMap::from([(gpu_id(failing), "fell off the bus".into())]);
        });
    }

    /// Records a scan that finds this number of GPUs, and whose inventory is changed by `change`.
    pub(crate) fn scan_with(&self, gpus: u32, change: impl FnOnce(&mut Inventory)) {
        let parts: Vec<Part> = (0..gpus).map(|index| part(index, gpu(index))).collect();
        let mut inventory = Inventory::default();
        for a in &parts {
            for b in parts.iter().filter(|b| b.id > a.id) {
                inventory.links.set(&a.gpu, &b.gpu, Link { path: Path::HostBridge, nvlinks: 18 });
            }
            inventory.usage.insert(a.id.clone(), Usage { memory_used_mib: Some(7), processes: 1 });
        }
        inventory.parts = parts;
        change(&mut inventory);
        self.kernel.record_scan(inventory).unwrap();
    }

    /// Grants one device of whole GPU `index`.
    pub(crate) fn allocate(&self, index: u32) -> Allocation {
        let request = AdmitRequest {
            resource: resource(WHOLE),
            devices: vec![DeviceId::whole(&gpu(index))],
            claim: None,
        };
        let attempt = Attempt::Last { asked_mono_ms: 0 };
        self.runtime.block_on(self.kernel.allocate(request, attempt)).unwrap().allocation
    }

    /// Ends an allocation, even if a source shows its pod.
    pub(crate) fn end(&self, id: AllocationId) {
        self.runtime.block_on(self.kernel.execute(Command::End { id, force: true })).unwrap();
    }

    /// A reconcile pass in which the kubelet's `List` and checkpoint show that these pods (namespace, name) hold these
    /// allocations, each in a container `main`.
    pub(crate) fn reconcile(&self, held: &[(&Allocation, &str, &str)]) {
        let after = |at: u64| self.kernel.now().mono_ms > at;
        let granted = self.kernel.now().mono_ms;
        // A pass that began in the millisecond of a grant proves nothing about its allocation.
        while !after(granted) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let pods = held.iter().map(|(_, namespace, pod)| ((*namespace).to_owned(), (*pod).to_owned()));
        let listed = held.iter().map(|(a, namespace, pod)| ListedHolding {
            namespace: (*namespace).into(),
            pod: (*pod).into(),
            container: "main".into(),
            resource: a.resource.clone(),
            devices: a.devices.clone(),
        });
        let noted = held.iter().map(|(a, _, pod)| CheckpointEntry {
            pod_uid: format!("uid-of-{pod}"),
            container: "main".into(),
            resource: a.resource.clone(),
            devices: a.devices.clone(),
            allocation: Some(a.id),
        });
        let view = ReconcileView {
            began_mono_ms: self.kernel.now().mono_ms,
            list: Some(PodList { pods: pods.collect(), held: listed.collect() }),
            checkpoint: Some(noted.collect()),
            ..ReconcileView::default()
        };
        self.runtime.block_on(self.kernel.execute(Command::Reconcile(view))).unwrap();
    }

    /// Records a policy as one that is shipped with the daemon.
    pub(crate) fn record_shipped(&self, module: &[u8], name: &str, since_wall_ms: u64) -> PolicyVersion {
        let version = PolicyVersion { shipped: true, ..version_of(module, name, since_wall_ms) };
        let snapshot = self.kernel.snapshot();
        let others = snapshot.policies.values().filter(|known| known.shipped).map(|known| (**known).clone());
        let all = others.chain([version.clone()]).collect();
        self.kernel.execute_blocking(Command::RecordShipped(all)).unwrap();
        version
    }

    /// Records a version that was uploaded before the node trusted any key.
    pub(crate) fn record_upload(&self, module: &[u8], name: &str) -> PolicyVersion {
        let version = version_of(module, name, 1);
        self.kernel.execute_blocking(Command::RecordUpload(version.clone())).unwrap();
        version
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.api.as_ref().unwrap().address
    }

    pub(crate) fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], b"")
    }

    pub(crate) fn delete(&self, path: &str) -> Answer {
        self.ask("DELETE", path, &[], b"")
    }

    pub(crate) fn json(&self, method: &str, path: &str, body: &str) -> Answer {
        self.ask(method, path, &[("content-type", "application/json")], body.as_bytes())
    }

    pub(crate) fn upload(&self, module: &[u8]) -> Answer {
        self.ask("POST", "/api/v1/policies", &[("content-type", "application/wasm")], module)
    }

    /// Sends a request with the token.
    pub(crate) fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let bearer = format!("Bearer {}", self.token);
        let mut all = vec![("authorization", bearer.as_str())];
        all.extend(headers);
        self.ask_bare(method, path, &all, body)
    }

    /// Sends a request without the token.
    pub(crate) fn ask_bare(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        ask(self.address(), method, path, headers, body)
    }
}

/// Sends one request to this address.
pub(crate) fn ask(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let agent = agent(ureq::tls::TlsConfig::default());
    ask_by(&agent, &format!("http://{address}{path}"), method, headers, body).unwrap()
}

/// A client that returns each response unchanged: redirects are not followed, and error statuses are no errors.
pub(crate) fn agent(tls: ureq::tls::TlsConfig) -> ureq::Agent {
    berth_cli::endpoint::use_ring();
    ureq::Agent::config_builder()
        .http_status_as_error(false)
        .proxy(None)
        .max_redirects(0)
        .timeout_global(Some(SOON))
        .allow_non_standard_methods(true)
        .tls_config(tls)
        .build()
        .new_agent()
}

/// Sends one request with this client.
pub(crate) fn ask_by(
    agent: &ureq::Agent,
    url: &str,
    method: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Result<Answer, ureq::Error> {
    let mut request = ureq::http::Request::builder().method(method).uri(url);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let mut response = if body.is_empty() {
        agent.run(request.body(()).unwrap())?
    } else {
        agent.run(request.body(body).unwrap())?
    };
    let headers = response.headers().iter();
    Ok(Answer {
        status: response.status().as_u16(),
        headers: headers.map(|(n, v)| (n.to_string(), v.to_str().unwrap().to_owned())).collect(),
        body: response.body_mut().with_config().limit(64 << 20).read_to_vec()?,
    })
}

impl Answer {
    pub(crate) fn value(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The body as JSON. The status must be this one.
    pub(crate) fn expect(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        self.value()
    }

    /// The detail and the hint of a problem of this status and type. Its other members are checked.
    pub(crate) fn problem(&self, status: u16, kind: &str) -> String {
        let value = self.expect(status);
        assert_eq!(self.headers["content-type"], "application/problem+json");
        assert_eq!(value["type"], format!("/problems/{kind}"), "{value}");
        assert_eq!(value["status"], status);
        assert!(!value["title"].as_str().unwrap().is_empty());
        let detail = value["detail"].as_str().unwrap();
        assert!(!detail.is_empty());
        format!("{detail}; {}", value["hint"].as_str().unwrap_or_default())
    }
}

fn version_of(module: &[u8], name: &str, since_wall_ms: u64) -> PolicyVersion {
    PolicyVersion {
        name: name.into(),
        version: "1.0.0".into(),
        summary: "A policy of a test.".into(),
        hooks: vec![Hook::Offer],
        parameters_schema: "{}".into(),
        digest: digest_of(module),
        artifact: digest_of(module),
        bytes: 1,
        shipped: false,
        since_wall_ms,
        origin: berth_kernel::policy::version::Origin::default(),
    }
}
