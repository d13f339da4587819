//! The driver's life: GPUs that start slowly, a fabric that is late, a driver that is replaced or released.

use crate::daemon::process::{SOON, Serving, WHOLE};
use crate::gpus::mig::Rig;
use crate::support::wait::{until, until_some};
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_kernel::hardware::gpu::{Inventory, RECOVERY, Reading, ScanError};
use berth_kernel::hardware::triage::{Severity, XidRules, baseline_triage};
use berth_kernel::node::ports::Gpus;
use fake_nvml::{Code, Fabric, FabricState, Fault, Installed, RecoveryAction, State};
use serde_json::{Value, json};
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A deadline that slow calls exceed. On a busy machine any call may, so that only tests of slow calls have it.
const DEADLINE: Duration = Duration::from_millis(500);

struct Bench {
    gpus: NvmlGpus,
    installed: Installed,
    folder: TempDir,
}

impl Bench {
    fn new(state: &State, change: impl FnOnce(NvmlOptions) -> NvmlOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let installed = Installed::new(folder.path(), state).unwrap();
        let options = NvmlOptions {
            library: Some(installed.library().to_owned()),
            sysfs: folder.path().to_owned(),
            deadline: SOON,
            ..NvmlOptions::default()
        };
        let gpus = NvmlGpus::open(change(options)).unwrap();
        Self { gpus, installed, folder }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        self.installed.change(change).unwrap();
    }

    fn scan(&self) -> Inventory {
        let began = Instant::now();
        loop {
            match self.gpus.scan() {
                Ok(inventory) => return inventory,
                // On a busy machine the first count of the GPUs may exceed a short deadline.
                Err(error) if error.what.contains("does not answer") && began.elapsed() < SOON => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn scan_until(&self, what: &str, holds: impl Fn(&Inventory) -> bool) -> Inventory {
        let began = Instant::now();
        loop {
            let inventory = self.scan();
            if holds(&inventory) {
                return inventory;
            }
            assert!(began.elapsed() < SOON, "never {what}: {inventory:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn next(&self) -> Reading {
        let began = Instant::now();
        while began.elapsed() < SOON {
            if let Ok(Some(reading)) = self.gpus.next_reading(Duration::from_millis(100)) {
                return reading;
            }
        }
        panic!("no reading");
    }
}

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
        let bench = Bench::new(&state, |options| NvmlOptions { deadline: DEADLINE, ..options });
        let first = bench.scan();
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
    let bench = Bench::new(&State::h100(2), |options| NvmlOptions {
        deadline: DEADLINE,
        hung_after: SOON,
        ..options
    });
    let id = bench.scan().parts[0].gpu.clone();
    let slow = Fault::slow("nvmlDeviceGetMemoryInfo_v2", 1200).of_gpu(id.as_str());
    bench.change(|state| state.faults.push(slow.clone().times(1)));
    let during = bench.scan();
    assert_eq!((during.parts.len(), errors(&during)), (2, Vec::new()), "slow, not wrong");
    assert!(during.usage.len() < 2, "it was not read");
    bench.scan_until("read again", |inventory| inventory.usage.len() == 2);
    bench.change(|state| state.faults = vec![slow]);
    let hung = bench.scan_until("hung", |inventory| inventory.scan_errors.keys().eq([&id]));
    let error = &hung.scan_errors[&id];
    assert!(error.heals_at_once && error.reason.contains("does not answer"), "{error:?}");
    bench.change(|state| state.faults.clear());
    bench.scan_until("well", |inventory| inventory.scan_errors.is_empty() && inventory.usage.len() == 2);
}

#[test]
fn a_call_that_hangs_is_an_error_after_its_time() {
    let hung_after = Duration::from_secs(2);
    let bench =
        Bench::new(&State::h100(2), |options| NvmlOptions { deadline: DEADLINE, hung_after, ..options });
    bench.scan();
    bench.change(|state| state.faults.push(Fault::hang("*")));
    let began = Instant::now();
    let slow = bench.scan();
    assert!(errors(&slow).is_empty() || began.elapsed() >= hung_after, "{slow:?}");
    let hung = bench.scan_until("hung", |inventory| !inventory.scan_errors.is_empty());
    assert_eq!((hung.parts.len(), errors(&hung).len()), (2, 2));
    bench.change(|state| state.faults.clear());
    bench.scan_until("well", |inventory| inventory.scan_errors.is_empty());
}

#[test]
fn a_contained_error_degrades_and_a_required_reset_makes_unhealthy() {
    let bench = Bench::new(&State::h100(1), |options| options);
    let uuid = bench.scan().parts[0].id.clone();
    let severity = |reading: &Reading| baseline_triage(reading, &XidRules::default(), 60_000).severity;
    bench.change(|state| state.contained_error(uuid.as_str()));
    let event = bench.next();
    assert_eq!((event.code, severity(&event)), (94, Severity::Degraded));
    let signs = bench.scan().signs;
    assert_eq!(signs.len(), 2, "the error is counted and its row waits: {signs:?}");
    assert!(signs.iter().all(|sign| severity(sign) == Severity::Degraded), "{signs:?}");
    bench.change(|state| state.require(uuid.as_str(), RecoveryAction::GpuReset));
    let event = bench.next();
    assert_eq!((event.source.as_str(), event.code, severity(&event)), (RECOVERY, 1, Severity::Unhealthy));
    // Its end is no reading.
    bench.change(|state| state.require(uuid.as_str(), RecoveryAction::None));
    bench.change(|state| {
        state.push_xid(uuid.as_str(), 31);
    });
    assert_eq!(bench.next().code, 31);
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
    let bench = Bench::new(&state, |options| options);
    let links = |inventory: &Inventory| inventory.links.iter().next().unwrap().2.nvlinks;
    let waiting = bench.scan();
    assert!(errors(&waiting).iter().all(|error| error.heals_at_once), "{waiting:?}");
    assert_eq!((errors(&waiting).len(), links(&waiting)), (2, 0));
    bench.change(|state| {
        for gpu in &mut state.gpus {
            gpu.fabric = Some(Fabric::default());
            gpu.nvlinks.iter_mut().flatten().for_each(|link| link.active = true);
        }
    });
    let ready = bench.scan();
    assert_eq!((errors(&ready).len(), links(&ready)), (0, 18));
    bench.change(|state| state.gpus[0].fabric = Some(Fabric { state: FabricState::Completed, status: 3 }));
    let failed = bench.scan();
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
    let bench =
        Bench::new(&State::h100(2), |options| NvmlOptions { in_container: true, restart_after, ..options });
    assert_eq!((errors(&bench.scan()).len(), bench.gpus.restart_reason()), (0, None));
    let library = bench.installed.library().to_owned();
    let old = inode(&library);
    bench.change(|state| {
        state.stale_library = Some(old);
        state.faults.push(Fault::fail("nvmlDeviceGetCount_v2", Code::LibRmVersionMismatch));
    });
    let mismatch = bench.scan_until("a mismatch", |inventory| !inventory.scan_errors.is_empty());
    assert_eq!((mismatch.parts.len(), errors(&mismatch).len()), (2, 2));
    // On a busy machine the library may still be open at the next scan, which then uses it.
    until("a restart is asked for", || {
        assert_eq!(errors(&bench.scan()).len(), 2);
        bench.gpus.restart_reason().is_some_and(|stale| stale.contains("different versions"))
    });
    // The new driver's mount arrives after all.
    let new = bench.folder.path().join("new");
    std::fs::copy(&library, &new).unwrap();
    std::fs::rename(&new, &library).unwrap();
    bench.change(|state| state.faults.clear());
    assert_ne!(inode(&library), old);
    bench.scan_until("well", |inventory| inventory.scan_errors.is_empty());
    assert_eq!(bench.gpus.restart_reason(), None);
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
    let bench = Bench::new(&state, |options| NvmlOptions { device_nodes, ..options });
    bench.scan();
    assert_eq!(held(&node), 1);
    bench.gpus.close(SOON).unwrap();
    assert_eq!(held(&node), 0);
    // The next scan opens it again.
    assert_eq!((errors(&bench.scan()).len(), held(&node)), (0, 1));
    bench.change(|state| state.faults.push(Fault::hang("nvmlShutdown")));
    // On a busy machine another call may be under way at first.
    until("the call that hangs is named", || {
        let error = bench.gpus.close(Duration::from_secs(2)).unwrap_err().to_string();
        error.contains("nvmlShutdown does not answer")
    });
    // Scans go on meanwhile, with the library that is still open.
    assert_eq!(errors(&bench.scan()).len(), 0);
    bench.change(|state| state.faults.clear());
}

fn release(serving: &Serving, body: &Value) -> Value {
    serving.call("POST", "/node/nvml/release", body)
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
    let serving = rig.house.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    let pid = serving.child.id();
    let held = || {
        let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        files.filter(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == node)).count()
    };
    assert_eq!(held(), 1);
    // Held: refused, and nothing changes.
    let pod = rig.house.start("holder", WHOLE, 1).await.unwrap();
    let refused = release(&serving, &json!({}));
    // Its pod runs, so ending the allocation would be refused: the remedy shows the pods instead.
    assert_eq!(refused["action"]["operation"], "listAllocations", "{refused}");
    assert_eq!(refused["status"], 409, "{refused}");
    assert!(refused["detail"].as_str().unwrap().contains("holds a GPU"), "{refused}");
    rig.allocatable(&[(WHOLE, 2)]).await;
    // A forced release closes NVML and keeps the allocation. On a busy machine NVML may not close in time.
    let forced = |order: &Value| {
        until_some("a release", || Some(release(&serving, order)).filter(|done| done["status"] != 409))
    };
    let done = forced(&json!({"reason": "upgrade", "force": true}));
    assert_eq!((done["by"].as_str(), done["why"].as_str()), (Some("admin"), Some("upgrade")), "{done}");
    assert_eq!(held(), 0);
    rig.allocatable(&[(WHOLE, 0)]).await;
    let node_state = serving.call("GET", "/node", &Value::Null);
    assert_eq!(node_state["driverRelease"], done);
    let gpus = serving.call("GET", "/gpus", &Value::Null);
    for gpu in gpus["items"].as_array().unwrap() {
        assert_eq!(gpu["health"]["state"], "unhealthy", "{gpu}");
        assert!(gpu["health"]["reason"].as_str().unwrap().contains("released by admin"), "{gpu}");
    }
    assert!(rig.house.start("late", WHOLE, 1).await.is_err());
    assert_eq!(serving.live().len(), 1);
    serving.call("POST", "/node/nvml/resume", &Value::Null);
    rig.allocatable(&[(WHOLE, 2)]).await;
    until("used again", || held() == 1);
    serving.until("its holder", |live| live.len() == 1 && live[0]["holder"]["podUid"] == pod);
    assert_eq!(serving.call("GET", "/node", &Value::Null)["driverRelease"], Value::Null);
    // Its time ends a release, too.
    let done = forced(&json!({"forSeconds": 1, "force": true}));
    assert_eq!(done["by"], "admin", "{done}");
    until("its end", || serving.call("GET", "/node", &Value::Null)["driverRelease"].is_null());
    rig.allocatable(&[(WHOLE, 2)]).await;
    until("used again", || held() == 1);
    // A call that hangs: the driver stays in use.
    rig.nvml.change(|state| state.faults.push(Fault::hang("nvmlShutdown"))).unwrap();
    let hung = release(&serving, &json!({"force": true}));
    assert_eq!(hung["status"], 409, "{hung}");
    assert!(hung["detail"].as_str().unwrap().contains("nvmlShutdown does not answer"), "{hung}");
    rig.nvml.change(|state| state.faults.clear()).unwrap();
    rig.allocatable(&[(WHOLE, 2)]).await;
    assert_eq!(rig.house.kubelet.anomalies(), []);
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
    let serving = rig.house.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    let (serving, barrier) = (&serving, std::sync::Barrier::new(2));
    let order = |reason: &str| {
        barrier.wait();
        until_some("a release", || {
            let released = crate::daemon::process::berth()
                .args(["nvml", "release", "--reason", reason, "--output", "json"])
                .env("BERTH_SERVER", serving.base.trim_end_matches("/api/v1"))
                .env("BERTH_TOKEN_FILE", rig.house.folder.path().join("state/token"))
                .stdout(std::process::Stdio::piped())
                .output()
                .unwrap();
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
    let shown = serving.call("GET", "/node", &Value::Null)["driverRelease"].clone();
    assert!(shown == a || shown == b, "{shown}");
    let pid = serving.child.id();
    let mut files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    assert!(!files.any(|file| std::fs::read_link(file.path()).is_ok_and(|to| to == node)));
    rig.allocatable(&[(WHOLE, 0)]).await;
    serving.call("POST", "/node/nvml/resume", &Value::Null);
    rig.allocatable(&[(WHOLE, 2)]).await;
}
