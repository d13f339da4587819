//! The driver's life: GPUs that start slowly, a fabric that is late, a driver that is replaced or released.

use crate::gpus::mig::Rig;
use crate::support::gpus::WHOLE;
use crate::support::nvml::FakeNvml;
use crate::support::process_node::DaemonProcess;
use crate::support::wait::{SOON, until, until_some};
use berth_gpus::nvml::NvmlOptions;
use berth_kernel::hardware::gpu::{Inventory, RECOVERY, Reading, ScanError};
use berth_kernel::hardware::triage::{Severity, XidRules, baseline_triage};
use berth_kernel::node::ports::Gpus;
use fake_nvml::{Code, Fabric, FabricState, Fault, RecoveryAction, State};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};

/// A deadline that slow calls exceed. On a busy machine any call may, so that only tests of slow calls have it.
const DEADLINE: Duration = Duration::from_millis(500);

fn errors(inventory: &Inventory) -> Vec<&ScanError> {
    inventory.scan_errors.values().collect()
}

#[test]
fn gpus_that_start_slowly_are_all_found_by_the_first_scan() {
    let mut state = State::h100(8);
    for gpu in &mut state.gpus {
        gpu.cold_start_ms = 1500;
    }
    let end = Instant::now() + SOON;
    loop {
        let began = Instant::now();
        let nvml = FakeNvml::new(&state, |options| NvmlOptions { deadline: DEADLINE, ..options });
        let first = nvml.scan();
        let took = began.elapsed();
        assert_eq!((first.parts.len(), errors(&first)), (8, Vec::new()));
        // One after the other it takes twelve seconds. A busy machine may take as long.
        if took < Duration::from_secs(8) {
            break;
        }
        assert!(Instant::now() < end, "{took:?}");
    }
}

#[test]
fn one_slow_call_changes_nothing_and_two_in_a_row_are_an_error_until_a_good_scan() {
    // Only two slow calls in a row make an error here, however long one of them takes.
    let nvml = FakeNvml::new(&State::h100(2), |options| NvmlOptions {
        deadline: DEADLINE,
        hung_after: SOON,
        ..options
    });
    let id = nvml.scan().parts[0].gpu.clone();
    let slow = Fault::slow("nvmlDeviceGetMemoryInfo_v2", 1200).of_gpu(id.as_str());
    nvml.change(|state| state.faults.push(slow.clone().times(1)));
    let during = nvml.scan();
    assert_eq!((during.parts.len(), errors(&during)), (2, Vec::new()), "slow, not wrong");
    assert!(during.usage.len() < 2, "it was not read");
    nvml.scan_until("read again", |inventory| inventory.usage.len() == 2);
    nvml.change(|state| state.faults = vec![slow]);
    let hung = nvml.scan_until("hung", |inventory| inventory.scan_errors.keys().eq([&id]));
    let error = &hung.scan_errors[&id];
    assert!(error.heals_at_once && error.reason.contains("does not answer"), "{error:?}");
    nvml.change(|state| state.faults.clear());
    nvml.scan_until("well", |inventory| inventory.scan_errors.is_empty() && inventory.usage.len() == 2);
}

#[test]
fn a_call_that_hangs_is_an_error_after_its_time() {
    let hung_after = Duration::from_secs(2);
    let nvml =
        FakeNvml::new(&State::h100(2), |options| NvmlOptions { deadline: DEADLINE, hung_after, ..options });
    nvml.scan();
    nvml.change(|state| state.faults.push(Fault::hang("*")));
    let began = Instant::now();
    let slow = nvml.scan();
    assert!(errors(&slow).is_empty() || began.elapsed() >= hung_after, "{slow:?}");
    let hung = nvml.scan_until("hung", |inventory| !inventory.scan_errors.is_empty());
    assert_eq!((hung.parts.len(), errors(&hung).len()), (2, 2));
    nvml.change(|state| state.faults.clear());
    nvml.scan_until("well", |inventory| inventory.scan_errors.is_empty());
}

#[test]
fn a_contained_error_degrades_and_a_required_reset_makes_unhealthy() {
    let nvml = FakeNvml::new(&State::h100(1), |options| options);
    let uuid = nvml.scan().parts[0].id.clone();
    let severity = |reading: &Reading| baseline_triage(reading, &XidRules::default(), 60_000).severity;
    nvml.change(|state| state.contained_error(uuid.as_str()));
    let event = nvml.next();
    assert_eq!((event.code, severity(&event)), (94, Severity::Degraded));
    let signs = nvml.scan().signs;
    assert_eq!(signs.len(), 2, "the error is counted and its row waits: {signs:?}");
    assert!(signs.iter().all(|sign| severity(sign) == Severity::Degraded), "{signs:?}");
    nvml.change(|state| state.require(uuid.as_str(), RecoveryAction::GpuReset));
    let event = nvml.next();
    assert_eq!((event.source.as_str(), event.code, severity(&event)), (RECOVERY, 1, Severity::Unhealthy));
    // Its end is no reading.
    nvml.change(|state| state.require(uuid.as_str(), RecoveryAction::None));
    nvml.change(|state| {
        state.push_xid(uuid.as_str(), 31);
    });
    assert_eq!(nvml.next().code, 31);
}

/// GPUs behind NVSwitches are offered before the fabric manager runs, and CUDA fails with error 802.
/// Report: https://github.com/NVIDIA/gpu-operator/issues/1043
#[test]
fn a_gpu_waits_for_its_fabric_and_its_links_are_read_once_that_is_ready() {
    let mut state = State::h100(2);
    for gpu in &mut state.gpus {
        gpu.fabric = Some(Fabric { state: FabricState::InProgress, status: 0 });
        gpu.nvlinks.iter_mut().flatten().for_each(|link| link.active = false);
    }
    let nvml = FakeNvml::new(&state, |options| options);
    let links = |inventory: &Inventory| inventory.links.iter().next().unwrap().2.nvlinks;
    let waiting = nvml.scan();
    assert!(errors(&waiting).iter().all(|error| error.heals_at_once), "{waiting:?}");
    assert_eq!((errors(&waiting).len(), links(&waiting)), (2, 0));
    nvml.change(|state| {
        for gpu in &mut state.gpus {
            gpu.fabric = Some(Fabric::default());
            gpu.nvlinks.iter_mut().flatten().for_each(|link| link.active = true);
        }
    });
    let ready = nvml.scan();
    assert_eq!((errors(&ready).len(), links(&ready)), (0, 18));
    nvml.change(|state| state.gpus[0].fabric = Some(Fabric { state: FabricState::Completed, status: 3 }));
    let failed = nvml.scan();
    let [error] = errors(&failed)[..] else { panic!("{failed:?}") };
    assert!(error.reason.contains("NVML error 3"), "{error:?}");
}

fn inode(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).unwrap().ino()
}

/// The driver was replaced, and NVML answers with a mismatch of driver and library.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1431
#[test]
fn a_driver_that_is_replaced_is_opened_from_its_new_files_and_a_stale_container_asks_for_a_restart() {
    let restart_after = Duration::from_secs(1);
    let nvml = FakeNvml::new(&State::h100(2), |options| NvmlOptions {
        in_container: true,
        restart_after,
        ..options
    });
    assert_eq!((errors(&nvml.scan()).len(), nvml.gpus.restart_reason()), (0, None));
    let library = nvml.installed.library().to_owned();
    let old = inode(&library);
    nvml.change(|state| {
        state.stale_library = Some(old);
        state.faults.push(Fault::fail("nvmlDeviceGetCount_v2", Code::LibRmVersionMismatch));
    });
    let mismatch = nvml.scan_until("a mismatch", |inventory| !inventory.scan_errors.is_empty());
    assert_eq!((mismatch.parts.len(), errors(&mismatch).len()), (2, 2));
    // On a busy machine the library may still be open at the next scan, which then uses it.
    until("a restart is asked for", || {
        assert_eq!(errors(&nvml.scan()).len(), 2);
        nvml.gpus.restart_reason().is_some_and(|stale| stale.contains("different versions"))
    });
    // The new driver's mount arrives after all.
    let new = nvml.folder.path().join("new");
    std::fs::copy(&library, &new).unwrap();
    std::fs::rename(&new, &library).unwrap();
    nvml.change(|state| state.faults.clear());
    assert_ne!(inode(&library), old);
    nvml.scan_until("well", |inventory| inventory.scan_errors.is_empty());
    assert_eq!(nvml.gpus.restart_reason(), None);
}

/// Open files of this process with this path.
fn held(path: &Path) -> usize {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == path)).count()
}

#[test]
fn nvml_is_closed_with_its_files_and_a_call_that_hangs_is_named() {
    let nodes = tempfile::tempdir().unwrap();
    let node = nodes.path().join("nvidia0");
    std::fs::write(&node, "").unwrap();
    let mut state = State::h100(1);
    state.gpus[0].held_file = Some(node.clone());
    let device_nodes = nodes.path().join("nvidia");
    let nvml = FakeNvml::new(&state, |options| NvmlOptions { device_nodes, ..options });
    nvml.scan();
    assert_eq!(held(&node), 1);
    nvml.gpus.close(SOON).unwrap();
    assert_eq!(held(&node), 0);
    // The next scan opens it again.
    assert_eq!((errors(&nvml.scan()).len(), held(&node)), (0, 1));
    nvml.change(|state| state.faults.push(Fault::hang("nvmlShutdown")));
    // On a busy machine another call may be under way at first.
    until("the call that hangs is named", || {
        let error = nvml.gpus.close(Duration::from_secs(2)).unwrap_err().to_string();
        error.contains("nvmlShutdown does not answer")
    });
    // Scans go on meanwhile, with the library that is still open.
    assert_eq!(errors(&nvml.scan()).len(), 0);
    nvml.change(|state| state.faults.clear());
}

fn release(daemon: &DaemonProcess, body: &Value) -> Value {
    daemon.call("POST", "/node/nvml/release", body)
}

/// The driver cannot be unloaded, since the plugin uses it.
/// Report: https://github.com/NVIDIA/gpu-operator/issues/163
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_driver_is_closed_and_nothing_is_granted_until_it_is_used_again() {
    let nodes = tempfile::tempdir().unwrap();
    let node = nodes.path().join("nvidia0");
    std::fs::write(&node, "").unwrap();
    let mut state = State::h100(2);
    state.gpus[0].held_file = Some(node.clone());
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    let pid = daemon.child.id();
    let held = || {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == node)).count()
    };
    assert_eq!(held(), 1);
    // Held: refused, and nothing changes.
    let pod = rig.node.start("holder", WHOLE, 1).await.unwrap();
    let refused = release(&daemon, &json!({}));
    // Its pod runs, so ending the allocation would be refused: the remedy shows the pods instead.
    assert_eq!(refused["action"]["operation"], "listAllocations", "{refused}");
    assert_eq!(refused["status"], 409, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("holds a GPU"), "{refused}");
    rig.allocatable(&[(WHOLE, 2)]).await;
    // A forced release closes NVML and keeps the allocation. On a busy machine NVML may not close in time.
    let forced = |order: &Value| {
        until_some("a release", || Some(release(&daemon, order)).filter(|done| done["status"] != 409))
    };
    let done = forced(&json!({"reason": "upgrade", "force": true}));
    assert_eq!((done["by"].as_str(), done["why"].as_str()), (Some("admin"), Some("upgrade")), "{done}");
    assert_eq!(held(), 0);
    rig.allocatable(&[(WHOLE, 0)]).await;
    let node_state = daemon.call("GET", "/node", &Value::Null);
    assert_eq!(node_state["driverRelease"], done);
    let gpus = daemon.call("GET", "/gpus", &Value::Null);
    for gpu in gpus["items"].as_array().unwrap() {
        assert_eq!(gpu["health"]["state"], "unhealthy", "{gpu}");
        assert!(gpu["health"]["reason"].as_str().unwrap().contains("released by admin"), "{gpu}");
    }
    assert!(rig.node.start("late", WHOLE, 1).await.is_err());
    assert_eq!(daemon.live().len(), 1);
    daemon.call("POST", "/node/nvml/resume", &Value::Null);
    rig.allocatable(&[(WHOLE, 2)]).await;
    until("used again", || held() == 1);
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["podUid"] == pod);
    assert_eq!(daemon.call("GET", "/node", &Value::Null)["driverRelease"], Value::Null);
    // Its time ends a release, too.
    let done = forced(&json!({"forSeconds": 1, "force": true}));
    assert_eq!(done["by"], "admin", "{done}");
    until("its end", || daemon.call("GET", "/node", &Value::Null)["driverRelease"].is_null());
    rig.allocatable(&[(WHOLE, 2)]).await;
    until("used again", || held() == 1);
    // A call that hangs: the driver stays in use.
    rig.nvml.change(|state| state.faults.push(Fault::hang("nvmlShutdown"))).unwrap();
    let hung = release(&daemon, &json!({"force": true}));
    assert_eq!(hung["status"], 409, "{hung}");
    assert!(hung["detail"].as_str().unwrap().contains("nvmlShutdown does not answer"), "{hung}");
    rig.nvml.change(|state| state.faults.clear()).unwrap();
    rig.allocatable(&[(WHOLE, 2)]).await;
    assert_eq!(rig.node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_releases_at_once_one_follows_the_other() {
    let nodes = tempfile::tempdir().unwrap();
    let node = nodes.path().join("nvidia0");
    std::fs::write(&node, "").unwrap();
    let mut state = State::h100(2);
    state.gpus[0].held_file = Some(node.clone());
    // So that the second one comes while the first one closes the driver.
    state.faults.push(Fault::slow("nvmlShutdown", 1000));
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    let (daemon, barrier) = (&daemon, std::sync::Barrier::new(2));
    let order = |reason: &str| {
        barrier.wait();
        until_some("a release", || {
            let released =
                daemon.client(&["nvml", "release", "--reason", reason, "--output", "json"]).output().unwrap();
            let error = String::from_utf8_lossy(&released.stderr);
            // A busy machine may not close the driver in time.
            if error.contains("does not answer") {
                return None;
            }
            assert!(released.status.success(), "{error}");
            Some(serde_json::from_slice::<Value>(&released.stdout).unwrap())
        })
    };
    let (a, b) = std::thread::scope(|scope| {
        let (a, b) = (scope.spawn(|| order("a")), scope.spawn(|| order("b")));
        (a.join().unwrap(), b.join().unwrap())
    });
    assert_eq!((&a["why"], &b["why"]), (&json!("a"), &json!("b")));
    // The later one counts, and the driver is closed.
    let shown = daemon.call("GET", "/node", &Value::Null)["driverRelease"].clone();
    assert!(shown == a || shown == b, "{shown}");
    let pid = daemon.child.id();
    let mut files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    assert!(!files.any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == node)));
    rig.allocatable(&[(WHOLE, 0)]).await;
    daemon.call("POST", "/node/nvml/resume", &Value::Null);
    rig.allocatable(&[(WHOLE, 2)]).await;
}
