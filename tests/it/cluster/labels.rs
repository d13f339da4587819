//! The node's labels: their values on simulated nodes, the file for node-feature-discovery, the patch of the node,
//! and a second writer.

use crate::cluster::pods_source as cluster;
use crate::support::admin_fakes::MemoryPolicies;
use crate::support::api_server::ApiServer;
use crate::support::api_writes::{Fault, Write};
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::kubelet_fakes::{MapStore, RealClock};
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::SOON;
use berth_cluster::node_labels::{Facts, Labels, labels};
use berth_core::keeper::Keeper;
use berth_core::stack::Baseline;
use berth_gpus::sim::{Machine, SimGpus};
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::Resource;
use berth_kernel::node::ports::Gpus as _;
use berth_kernel::node::rules::Rules;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// Labels of a simulated node that no policy shares.
fn of(machine: &str, mig: MigStrategy) -> Labels {
    let clock = Arc::new(RealClock(Instant::now()));
    let keeper = Keeper::open(Box::new(MapStore::default()), Rules::default(), clock.clone()).unwrap();
    let baseline = Baseline {
        resource: Resource::parse(WHOLE).unwrap(),
        mig,
        mps_sockets: BTreeMap::new(),
        xids: XidRules { ignored: Vec::new(), counted: Vec::new() },
        quiet_ms: 1000,
    };
    let policies = Arc::new(MemoryPolicies::default());
    let core = berth_core::start(keeper, &policies, clock, baseline, None).unwrap().core;
    let machine: Machine = serde_saphyr::from_str(machine).unwrap();
    core.kernel.record_scan(SimGpus::from_machine(machine).scan().unwrap()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(core.kernel.reoffer()).unwrap();
    let facts = Facts {
        driver_version: Some("580.65.06".into()),
        cuda_version: Some("13.0".into()),
        machine: Some("PowerEdge XE9680 (rev. 2)".into()),
        mig,
        mps: BTreeSet::new(),
    };
    labels(&core.kernel.snapshot(), &facts)
}

/// Those under a prefix, without it.
fn under<'l>(labels: &'l Labels, prefix: &str) -> BTreeMap<&'l str, &'l str> {
    labels.iter().filter_map(|(key, value)| Some((key.strip_prefix(prefix)?, value.as_str()))).collect()
}

#[test]
fn whole_gpus_are_labelled_as_feature_discovery_does() {
    let h100 = of("{model: h100, count: 8}", MigStrategy::None);
    let expected = [
        ("nvidia.com/cuda.driver-version.full", "580.65.06"),
        ("nvidia.com/cuda.driver-version.major", "580"),
        ("nvidia.com/cuda.driver-version.minor", "65"),
        ("nvidia.com/cuda.driver-version.revision", "06"),
        ("nvidia.com/cuda.driver.major", "580"),
        ("nvidia.com/cuda.driver.minor", "65"),
        ("nvidia.com/cuda.driver.rev", "06"),
        ("nvidia.com/cuda.runtime-version.full", "13.0"),
        ("nvidia.com/cuda.runtime-version.major", "13"),
        ("nvidia.com/cuda.runtime-version.minor", "0"),
        ("nvidia.com/cuda.runtime.major", "13"),
        ("nvidia.com/cuda.runtime.minor", "0"),
        ("nvidia.com/gpu.compute.major", "9"),
        ("nvidia.com/gpu.compute.minor", "0"),
        ("nvidia.com/gpu.count", "8"),
        ("nvidia.com/gpu.family", "hopper"),
        ("nvidia.com/gpu.machine", "PowerEdge-XE9680-rev.-2"),
        ("nvidia.com/gpu.memory", "81559"),
        ("nvidia.com/gpu.mode", "compute"),
        ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"),
        ("nvidia.com/gpu.replicas", "1"),
        ("nvidia.com/gpu.sharing-strategy", "none"),
        ("nvidia.com/mig.capable", "true"),
        ("nvidia.com/mps.capable", "false"),
    ];
    let actual: Vec<(&str, &str)> = h100.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    assert_eq!(actual, expected);

    for (machine, product, memory, family, compute, capable) in [
        ("{model: l4, count: 2}", "NVIDIA-L4", "23034", "ada-lovelace", ("8", "9"), "false"),
        ("{model: t4, count: 1}", "Tesla-T4", "15360", "turing", ("7", "5"), "false"),
        ("{model: a100, count: 4}", "NVIDIA-A100-SXM4-80GB", "81920", "ampere", ("8", "0"), "true"),
        ("{model: b200, count: 1}", "NVIDIA-B200", "183359", "blackwell", ("10", "0"), "true"),
        // One set of labels for a node: of the model that most GPUs are of.
        (
            "{model: a10, count: 1, more: [{model: l4, count: 2}]}",
            "NVIDIA-L4",
            "23034",
            "ada-lovelace",
            ("8", "9"),
            "false",
        ),
    ] {
        let labels = of(machine, MigStrategy::None);
        let gpu = under(&labels, "nvidia.com/gpu.");
        assert_eq!((gpu["product"], gpu["memory"], gpu["family"]), (product, memory, family), "{machine}");
        assert_eq!((gpu["compute.major"], gpu["compute.minor"]), compute, "{machine}");
        assert_eq!(labels["nvidia.com/mig.capable"], capable, "{machine}");
        assert!(!labels.contains_key("nvidia.com/mig.strategy"), "{machine}");
    }
    assert!(
        labels(&berth_kernel::node::ledger::Ledger::default(), &Facts::default()).is_empty(),
        "no GPU, no label"
    );
}

#[test]
fn mig_is_labelled_by_its_strategy() {
    let all = "{model: a100, count: 2, gpus: [
        {index: 0, mig: [3g.40gb, 3g.40gb]}, {index: 1, mig: [3g.40gb, 3g.40gb]}]}";
    let single = of(all, MigStrategy::Single);
    let gpu = under(&single, "nvidia.com/gpu.");
    assert_eq!(single["nvidia.com/mig.strategy"], "single");
    assert_eq!(
        (gpu["product"], gpu["count"], gpu["memory"], gpu["replicas"], gpu["sharing-strategy"]),
        ("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", "4", "40960", "1", "none")
    );
    assert_eq!((gpu["slices.gi"], gpu["slices.ci"], gpu["family"]), ("3", "3", "ampere"));

    let some = "{model: a100, count: 2, gpus: [{index: 0, mig: [1g.10gb, 1g.10gb, 2g.20gb]}]}";
    let mixed = of(some, MigStrategy::Mixed);
    assert_eq!(mixed["nvidia.com/mig.strategy"], "mixed");
    let small = under(&mixed, "nvidia.com/mig-1g.10gb.");
    assert_eq!(
        (small["product"], small["count"], small["memory"], small["replicas"]),
        ("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "2", "10240", "1")
    );
    assert_eq!(under(&mixed, "nvidia.com/mig-2g.20gb.")["count"], "1");
    // The whole GPU beside them stands for the model.
    let gpu = under(&mixed, "nvidia.com/gpu.");
    assert_eq!((gpu["product"], gpu["count"], gpu["replicas"]), ("NVIDIA-A100-SXM4-80GB", "2", "1"));

    // The rule of `single` is broken, and the labels say so as feature discovery's do.
    let invalid = of(some, MigStrategy::Single);
    let gpu = under(&invalid, "nvidia.com/gpu.");
    assert_eq!(
        (gpu["product"], gpu["count"], gpu["replicas"], gpu["sharing-strategy"], gpu["memory"]),
        ("NVIDIA-A100-SXM4-80GB-MIG-INVALID", "0", "0", "", "0")
    );
    // Without the strategy instances are not offered, and a GPU in MIG mode is not shared.
    let none = of("{model: a100, count: 1, gpus: [{index: 0, mig: [1g.10gb]}]}", MigStrategy::None);
    assert!(!none.keys().any(|key| key.contains("mig-") || key.contains("mig.strategy")), "{none:?}");
    assert_eq!(none["nvidia.com/gpu.replicas"], "0");
}

fn file_of(path: &Path) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| line.split_once('=').map(|(k, v)| (k.into(), v.into())).unwrap()).collect()
}

fn check(daemon: &DaemonProcess) -> Option<Value> {
    let node = daemon.call("GET", "/node", &Value::Null);
    node["checks"].as_array().unwrap().iter().find(|check| check["name"] == "labels").cloned()
}

/// The same as alerts see it.
fn noted(daemon: &DaemonProcess) -> Option<String> {
    let text = ureq::get(daemon.base.replace("/api/v1", "/metrics")).call().unwrap();
    let text = text.into_body().read_to_string().unwrap();
    let mut lines = text.lines();
    lines.find_map(|line| line.strip_prefix("berth_check_warning{check=\"labels\"} ").map(str::to_owned))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_for_nfd_follows_the_node_and_is_removed_for_another_writer() {
    let features = tempfile::tempdir().unwrap();
    let path = features.path().join("berth");
    let node = ProcessNode::new(&format!(
        "gpus: sim:2xl4\nlabels: {{ nfdFile: {} }}\nstack: [{{ policy: timeslice, parameters: {{ replicas: 4, resource: {WHOLE} }} }}]",
        path.display()
    ))
    .await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(WHOLE, 8, SOON).await.unwrap();
    let shared = crate::support::wait::until_some("the file has labels", || {
        let labels = file_of(&path);
        (labels.get("nvidia.com/gpu.replicas").map(String::as_str) == Some("4")).then_some(labels)
    });
    assert_eq!(shared["nvidia.com/gpu.product"], "NVIDIA-L4-SHARED");
    assert_eq!(shared["nvidia.com/gpu.sharing-strategy"], "time-slicing");
    crate::support::wait::until_some("it is reported", || {
        check(&daemon).filter(|check| check["detail"].is_null())
    });
    assert_eq!(noted(&daemon).as_deref(), Some("0"));

    // Under a name of their own, shares do not change what the product is called.
    let stack = serde_json::json!({"entries": [{"policy": "timeslice", "parameters": {"replicas": 3}}]});
    daemon.call("PUT", "/stack", &stack);
    node.kubelet.wait_allocatable(SHARED, 6, SOON).await.unwrap();
    crate::support::wait::until_some("the file follows", || {
        let labels = file_of(&path);
        let now =
            (labels.get("nvidia.com/gpu.replicas")?.as_str(), labels["nvidia.com/gpu.product"].as_str());
        (now == ("3", "NVIDIA-L4")).then_some(())
    });

    std::fs::write(features.path().join("gfd"), "nvidia.com/gfd.timestamp=1700000000\n").unwrap();
    // Any change of the node triggers the check.
    node.start("a", SHARED, 1).await.unwrap();
    crate::support::wait::until_some("ours stands back", || (!path.exists()).then_some(()));
    crate::support::wait::until_some("it says why", || {
        check(&daemon)
            .filter(|check| check["detail"].as_str().is_some_and(|why| why.contains("gfd.timestamp")))
    });
    daemon.line(|line| line.contains("gfd.timestamp"));
    assert_eq!(noted(&daemon).as_deref(), Some("1"));
    std::fs::remove_file(features.path().join("gfd")).unwrap();
    node.start("b", SHARED, 1).await.unwrap();
    crate::support::wait::until_some("it is back", || path.exists().then_some(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_is_patched_with_our_labels_and_no_others() {
    let server = ApiServer::start();
    server.world.label("zone", "a", "another-client");
    let node = ProcessNode::new("gpus: sim:2xh100\nlabels: { node: true }").await;
    server.world.fault(Write::Labels, Some(Fault::Forbidden));
    let daemon = cluster::serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 2, SOON).await.unwrap();
    crate::support::wait::until_some("the right that lacks is named", || {
        let says = |check: &Value| check["detail"].as_str().is_some_and(|why| why.contains("berth-label"));
        check(&daemon).filter(says)
    });
    server.world.fault(Write::Labels, None);
    let product = || server.world.labels().get("nvidia.com/gpu.product").cloned();
    crate::support::wait::until_some("the node is labelled", || {
        (product()? == "NVIDIA-H100-80GB-HBM3").then_some(())
    });
    assert_eq!(server.world.labels()["zone"], "a");
    crate::support::wait::until_some("it is reported", || {
        check(&daemon).filter(|check| check["detail"].is_null())
    });
    assert_eq!(check(&daemon).unwrap()["ok"], true);

    // Another writer appears: Berth's labels are removed at the next check.
    server.world.label("nvidia.com/gfd.timestamp", "1700000000", "nfd-master");
    let stack = serde_json::json!({"entries": [{"policy": "timeslice", "parameters": {"replicas": 3}}]});
    daemon.call("PUT", "/stack", &stack);
    crate::support::wait::until_some("ours are gone", || product().is_none().then_some(()));
    assert_eq!(server.world.labels().keys().collect::<Vec<_>>(), ["nvidia.com/gfd.timestamp", "zone"]);
    crate::support::wait::until_some("it says why", || {
        check(&daemon)
            .filter(|check| check["detail"].as_str().is_some_and(|why| why.contains("gfd.timestamp")))
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_of_other_managers_are_not_overwritten_and_labels_are_off_by_default() {
    let server = ApiServer::start();
    server.world.label("nvidia.com/gpu.count", "7", "another-client");
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    let daemon = cluster::serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    cluster::watching(&daemon);
    assert_eq!(check(&daemon), None, "not unless it is asked for");
    daemon.stop();
    assert_eq!(server.world.labels().len(), 1);

    let node = ProcessNode::new("gpus: sim:1xt4\nlabels: { node: true }").await;
    let daemon = cluster::serve(&node, &server);
    crate::support::wait::until_some("the conflict is reported", || {
        let says =
            |check: &Value| check["detail"].as_str().is_some_and(|w| w.contains("nvidia.com/gpu.count"));
        check(&daemon).filter(says)
    });
    let labels = server.world.labels();
    assert_eq!(labels["nvidia.com/gpu.count"], "7");
    assert_eq!(labels["nvidia.com/gpu.product"], "Tesla-T4", "the others stand");
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_for_nfd_is_removed_for_a_writer_that_shows_only_on_the_node() {
    let features = tempfile::tempdir().unwrap();
    let path = features.path().join("berth");
    std::fs::write(&path, "nvidia.com/gpu.count=1\n").unwrap();
    let server = ApiServer::start();
    server.world.label("nvidia.com/gfd.timestamp", "1700000000", "nfd-master");
    let settings = format!("gpus: sim:1xt4\nlabels: {{ nfdFile: {} }}", path.display());
    let node = ProcessNode::new(&settings).await;
    let daemon = cluster::serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    crate::support::wait::until_some("it says why", || {
        let says = |check: &Value| check["detail"].as_str().is_some_and(|w| w.contains("on the node object"));
        check(&daemon).filter(says)
    });
    assert!(!path.exists(), "what an earlier start wrote goes");
    daemon.stop();
    // Without one it writes as ever.
    let server = ApiServer::start();
    let node = ProcessNode::new(&settings).await;
    let daemon = cluster::serve(&node, &server);
    node.kubelet.wait_allocatable(WHOLE, 1, SOON).await.unwrap();
    crate::support::wait::until_some("the file has labels", || {
        file_of(&path).contains_key("nvidia.com/gpu.product").then_some(())
    });
    daemon.stop();
}
