//! A GPU's health from NVML's event to every open stream of the kubelet, and back: the real binary over the fake
//! NVML.

use crate::gpus::mig::Rig;
use crate::rest::livez::NoOwners;
use crate::support::admin_node::AdminNode;
use crate::support::gpus::{SHARED, WHOLE, gpu, gpu_id};
use crate::support::kubelet_node::NodeOptions;
use crate::support::process_node::DaemonProcess;
use crate::support::wait::{SOON, until};
use berth_core::{GpuWatch, InventoryScanner};
use berth_kernel::hardware::gpu::{Inventory, RECOVERY, Reading, XID};
use berth_kernel::hardware::health::HealthState;
use berth_kernel::node::ports::{Gpus, GpusError};
use fake_nvml::{Event, EventKind, Fault, RecoveryAction, State};
use serde_json::Value;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const SMALL: &str = "nvidia.com/mig-1g.10gb";
const LARGE: &str = "nvidia.com/mig-3g.40gb";

fn health(daemon: &DaemonProcess, uuid: &str) -> Value {
    daemon.call("GET", &format!("/gpus/{uuid}"), &Value::Null)["health"].clone()
}

/// A GPU that works again stays unhealthy until the plugin is restarted.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/234
/// Report: https://github.com/Project-HAMi/HAMi/issues/2200
/// Report: https://github.com/NVIDIA/gpu-operator/issues/1065
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_xid_of_one_instance_makes_its_gpu_unhealthy_on_every_stream_until_it_recovers() {
    let mut state = State::h100(2);
    state.split(1, &[1, 1, 3]);
    let sick = state.gpus[1].uuid.clone();
    let rig = Rig::new(&state, "migStrategy: mixed").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 1), (SMALL, 2), (LARGE, 1)]).await;
    let pod = rig.node.start("holder", SMALL, 1).await.unwrap();
    let of_instance = |gpu: String| {
        move |state: &mut State| {
            state.events.push(Event {
                seq: 1,
                gpu,
                kind: EventKind::Xid,
                data: 95,
                gpu_instance: Some(9),
                compute_instance: Some(0),
            });
        }
    };
    rig.nvml.change(of_instance(sick.clone())).unwrap();
    // The large instance reported; the small ones, one of them held, share its GPU. GPU 0 does not.
    let kubelet = &rig.node.kubelet;
    let out = |k: &kubelet_standin::Kubelet| {
        let sick = |r: &str, n: usize| k.listed(r).values().filter(|h| *h == "Unhealthy").count() == n;
        sick(SMALL, 2) && sick(LARGE, 1) && sick(WHOLE, 0)
    };
    kubelet.wait_for("both streams of the GPU", SOON, out).await.unwrap();
    // After its reset, which the driver shows, it is as before, with the history.
    let action = |action| rig.nvml.change(|state| state.gpus[1].recovery_action = action).unwrap();
    action(RecoveryAction::GpuReset);
    until("the action", || health(&daemon, &sick).to_string().contains("recovery action 1"));
    action(RecoveryAction::None);
    rig.allocatable(&[(SMALL, 2), (LARGE, 1), (WHOLE, 1)]).await;
    until("the API", || health(&daemon, &sick)["state"] == "healthy");
    let history = health(&daemon, &sick)["history"].clone();
    let history = history.as_array().unwrap();
    assert_eq!(history.last().unwrap()["state"], "unhealthy");
    let is_of_xid = |past: &Value| past["reason"].as_str().is_some_and(|why| why.contains("XID 95"));
    assert!(history.iter().any(is_of_xid), "{history:?}");
    daemon.until("its holder, unharmed", |live| live.len() == 1 && live[0]["holder"]["podUid"] == pod);
    assert_eq!(kubelet.anomalies(), []);
}

/// An XID makes one share of a GPU unhealthy, and pods still land on the others.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1929
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_xid_makes_every_share_of_its_gpu_unhealthy_and_an_applications_xid_none() {
    let state = State::h100(2);
    let stack = "stack: [{ policy: timeslice, parameters: { replicas: 3 } }]";
    let rig = Rig::new(&state, stack).await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(SHARED, 6)]).await;
    let xid = |xid| {
        let uuid = state.gpus[0].uuid.clone();
        rig.nvml.change(|state| state.push_xid(&uuid, xid)).unwrap();
    };
    xid(31);
    xid(95);
    // One event behind the other: once the second has been heard, so has the first.
    rig.allocatable(&[(SHARED, 3)]).await;
    let message = health(&daemon, &state.gpus[0].uuid).to_string();
    assert!(message.contains("XID 95") && !message.contains("XID 31"), "{message}");
    let action = |action| rig.nvml.change(|state| state.gpus[0].recovery_action = action).unwrap();
    action(RecoveryAction::GpuReset);
    until("the action", || health(&daemon, &state.gpus[0].uuid).to_string().contains("recovery action 1"));
    action(RecoveryAction::None);
    rig.allocatable(&[(SHARED, 6)]).await;
    // An event that changes the GPU's health is recorded, however soon after an equal one.
    xid(95);
    rig.allocatable(&[(SHARED, 3)]).await;
    until("both decisions", || {
        let decisions = daemon.call("GET", "/decisions?hook=triage&limit=200", &Value::Null);
        let items = decisions["items"].as_array().unwrap();
        items.iter().filter(|decision| decision["reading"]["code"] == 95).count() == 2
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_equal_xids_is_logged_and_recorded_once() {
    let state = State::h100(1);
    let uuid = state.gpus[0].uuid.clone();
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 1)]).await;
    let flood = |state: &mut State| {
        for _ in 0..300 {
            state.push_xid(&uuid, 31);
        }
    };
    rig.nvml.change(flood).unwrap();
    rig.nvml.change(|state| state.push_xid(&uuid, 95)).unwrap();
    // One event behind the other: once the last is recorded, so are those before it.
    let recorded = || {
        let decisions = daemon.call("GET", "/decisions?hook=triage&limit=200", &Value::Null);
        let items = decisions["items"].as_array().unwrap().iter();
        items.map(|decision| decision["reading"]["code"].clone()).collect::<Vec<_>>()
    };
    until("the last event", || recorded().contains(&95.into()));
    assert_eq!(recorded(), [95, 31]);
    // The log arrives through a pipe, so its lines may come later than the decisions.
    let logged = || daemon.log().matches("a GPU error was rated").count();
    until("both lines", || logged() >= 2);
    assert_eq!(logged(), 2, "{}", daemon.log());
}

/// GPUs with events that came all at once.
struct FloodedGpus(Mutex<VecDeque<Reading>>);

impl Gpus for FloodedGpus {
    fn scan(&self) -> Result<Inventory, GpusError> {
        panic!("no scan is due")
    }

    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError> {
        let reading = self.0.lock().unwrap().pop_front();
        if reading.is_none() {
            std::thread::sleep(wait.min(Duration::from_millis(10)));
        }
        Ok(reading)
    }

    fn describe(&self) -> String {
        "GPUs with many events".into()
    }
}

/// An event comes once: one that had no room in the inbox of the policies would be forgotten, and its GPU granted.
#[test]
fn no_event_of_a_flood_is_lost() {
    let node = AdminNode::new(1);
    let gpu = node.kernel.snapshot().gpus.keys().next().unwrap().clone();
    let xid =
        |code| Reading { part: gpu.as_part().clone(), source: XID.into(), code, detail: "it failed".into() };
    let mut events = VecDeque::from(vec![xid(31); 1000]);
    events.push_back(xid(95));
    let scanner = InventoryScanner::new(Arc::new(FloodedGpus(Mutex::new(events))), Arc::new(NoOwners));
    let watch = GpuWatch::start(&scanner, &node.kernel, Duration::from_secs(3600)).unwrap();
    until("the last event", || node.kernel.snapshot().gpus[&gpu].health.reason.contains("XID 95"));
    let counted = node.kernel.counters().gpus.xids();
    assert_eq!(counted[&(gpu.to_string(), 31)], 1000);
    drop(watch);
}

/// A scan finds a reset by comparing with the scan before, so no later scan finds it again.
#[test]
fn nothing_that_a_scan_shows_is_lost() {
    let node = AdminNode::new(1);
    let gpu = node.kernel.snapshot().gpus.keys().next().unwrap().clone();
    node.scan_with(1, |inventory| {
        let sign = |code| Reading {
            part: gpu.as_part().clone(),
            source: XID.into(),
            code,
            detail: "it failed".into(),
        };
        inventory.signs = vec![sign(31); 1000];
        inventory.signs.push(sign(95));
    });
    until("the last sign", || node.kernel.snapshot().gpus[&gpu].health.reason.contains("XID 95"));
}

/// A restart of the plugin makes a broken GPU healthy.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/111
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sign_of_a_gpu_lasts_as_long_as_it_is_reported_and_across_restarts() {
    let state = State::h100(2);
    let uuid = state.gpus[0].uuid.clone();
    let rig = Rig::new(&state, "").await;
    let mut daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    // A row that waits for a reset does no harm: it is shown, and the GPU is granted.
    rig.nvml.change(|s| s.gpus[0].remapped_rows.as_mut().unwrap().pending = true).unwrap();
    until("degraded", || health(&daemon, &uuid)["state"] == "degraded");
    assert_eq!(rig.node.kubelet.allocatable(WHOLE), Some(2));
    rig.nvml.change(|s| s.gpus[0].recovery_action = RecoveryAction::DrainAndReset).unwrap();
    rig.allocatable(&[(WHOLE, 1)]).await;
    until("its reason", || health(&daemon, &uuid)["state"] == "unhealthy");
    let before = health(&daemon, &uuid);
    assert!(before["reason"].as_str().unwrap().contains("recovery action 4"), "{before}");

    // The API shows health before the store has it. An order is answered after that, even if it changes nothing.
    daemon.call("DELETE", &format!("/gpus/{uuid}/cordon"), &Value::Null);
    daemon.child.kill().unwrap();
    daemon.child.wait().unwrap();
    let daemon = rig.node.serve();
    let after = health(&daemon, &uuid);
    assert_eq!(after["history"], before["history"], "kept over the restart");
    assert_eq!(after["since"], before["since"]);
    // For much longer than its quiet time every scan reports the same, which is one entry of the history.
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        assert_ne!(health(&daemon, &uuid)["state"], "healthy");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(health(&daemon, &uuid)["history"].as_array().unwrap().len() <= 3);
    assert!(daemon.log().matches("a GPU error was rated").count() <= 2, "reported once: {}", daemon.log());
    rig.nvml
        .change(|s| {
            s.gpus[0].recovery_action = RecoveryAction::None;
            s.gpus[0].remapped_rows.as_mut().unwrap().pending = false;
        })
        .unwrap();
    rig.allocatable(&[(WHOLE, 2)]).await;
}

/// A GPU that is added or rescanned is not found before a restart.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/34
/// Report: https://github.com/NVIDIA/gpu-operator/issues/482
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_hanging_and_new_gpus_are_found_without_a_restart() {
    let mut state = State::h100(3);
    let late = state.gpus.pop().unwrap();
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    rig.nvml.change(|state| state.gpus.push(late.clone())).unwrap();
    rig.allocatable(&[(WHOLE, 3)]).await;
    // Lost, without an event.
    rig.nvml
        .change(|state| {
            state.faults.push(Fault::fail("nvmlEventSetWait_v2", fake_nvml::Code::Timeout));
            state.gpus[0].lost = true;
        })
        .unwrap();
    rig.allocatable(&[(WHOLE, 2)]).await;
    // A call that hangs makes one more GPU unhealthy, and delays no response.
    rig.nvml
        .change(|state| state.faults.push(Fault::hang("nvmlDeviceGetMigMode").of_gpu(&late.uuid)))
        .unwrap();
    rig.allocatable(&[(WHOLE, 1)]).await;
    assert!(health(&daemon, &late.uuid)["reason"].as_str().unwrap().contains("does not answer"));
    rig.node.start("a", WHOLE, 1).await.unwrap();
    rig.nvml
        .change(|state| {
            state.faults.clear();
            state.gpus[0].lost = false;
        })
        .unwrap();
    rig.allocatable(&[(WHOLE, 3)]).await;
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

#[tokio::test]
async fn a_policys_triage_overrules_the_readings_of_a_gpu() {
    let sign =
        || Reading { part: gpu(1), source: RECOVERY.into(), code: 3, detail: "asks for something".into() };
    for (script, state, allocatable) in [
        ("whole", HealthState::Unhealthy, 3),
        ("whole triage=degraded", HealthState::Degraded, 4),
        ("whole triage=ignore", HealthState::Healthy, 4),
    ] {
        let node = NodeOptions { policy: Some(script), ..NodeOptions::default() }.started().await;
        node.allocatable(WHOLE, 4).await;
        node.scan_with_readings(vec![sign(), sign()]).await;
        // Later calls are answered later.
        node.kernel.reoffer().await.unwrap();
        assert_eq!(node.kernel.snapshot().gpus[&gpu_id(1)].health.state, state, "{script}");
        node.allocatable(WHOLE, allocatable).await;
    }
}
