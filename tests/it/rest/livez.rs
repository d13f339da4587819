//! `/livez` while something that must progress does not: the ledger's writer, the policy thread, a scan of the GPUs,
//! a stream; and while something only fails.

use crate::support::admin_fakes::module;
use crate::support::admin_node::{AdminNode, ask};
use crate::support::gpus::WHOLE;
use crate::support::wait::{SOON, until, until_some};
use berth_core::{GpuWatch, InventoryScanner};
use berth_kernel::hardware::gpu::{Inventory, Reading};
use berth_kernel::hardware::process::{ProcessIdentity, ProcessVisibility};
use berth_kernel::node::ports::{Gpus, GpusError, Processes};
use berth_observe::counters::{LivenessLimits, RegistrationState};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Limits that nothing exceeds during a test.
const LONG: LivenessLimits =
    LivenessLimits { keeper: SOON, policies: SOON, scan: SOON, front: SOON, stream: SOON, pod_list: SOON };
/// A limit that is exceeded on purpose.
const SHORT: Duration = Duration::from_millis(200);

/// The error of `/livez`, the same on both listeners.
fn liveness_error(node: &AdminNode) -> Option<String> {
    let health = node.api.as_ref().unwrap().health_address.unwrap();
    let [one, two] = [node.address(), health].map(|address| ask(address, "GET", "/livez", &[], b""));
    if one.status == 200 || two.status == 200 {
        return None;
    }
    assert_eq!(one.value()["checks"].as_array().unwrap().len(), 5);
    Some(two.problem(503, "not-alive"))
}

fn alive_again(node: &AdminNode) {
    until_some("it lives again", || {
        (ask(node.address(), "GET", "/livez", &[], b"").status == 200).then_some(())
    });
}

fn cordon(address: SocketAddr, token: &str) -> u16 {
    let headers = [("authorization", &*format!("Bearer {token}")), ("content-type", "application/json")];
    ask(address, "PUT", "/api/v1/gpus/GPU-0/cordon", &headers, b"{}").status
}

#[test]
fn a_store_that_hangs_does_not_fail_livez() {
    let node = AdminNode::new(1);
    node.kernel.counters().set_limits(LivenessLimits { keeper: Duration::from_secs(3), ..LONG });
    let held = node.store_held.lock().unwrap();
    // Answered at the append's deadline, and while the append still hangs.
    for _ in 0..2 {
        assert_eq!(cordon(node.address(), &node.token), 503);
    }
    std::thread::sleep(Duration::from_secs(4));
    // The thread that took over may be late for a moment. The heartbeat of the thread that hangs would never come.
    alive_again(&node);
    drop(held);
    until_some("the store works again", || (cordon(node.address(), &node.token) == 200).then_some(()));
}

#[test]
fn a_ledger_writer_that_died_fails_livez() {
    let node = AdminNode::new(1);
    // Longer than the second in which the writer moves by itself.
    node.kernel.counters().set_limits(LivenessLimits { keeper: Duration::from_secs(3), ..LONG });
    alive_again(&node);
    // The lock is poisoned, so that an append panics.
    let held = Arc::clone(&node.store_held);
    let poison = std::thread::spawn(move || {
        let _held = held.lock().unwrap();
        panic!("poisons the lock");
    });
    assert!(poison.join().is_err());
    assert_eq!(cordon(node.address(), &node.token), 503);
    let says = until_some("the writer is missed", || liveness_error(&node));
    assert!(says.contains("owns the ledger has"), "{says}");
    // What reads snapshots answers all the same.
    let scrape = ask(node.address(), "GET", "/metrics", &[], b"");
    let text = String::from_utf8(scrape.body).unwrap();
    assert!(text.contains("berth_live{check=\"keeper\"} 0\n"), "{text}");
}

#[test]
fn a_policy_thread_that_does_not_return_fails_livez() {
    let node = AdminNode::new(1);
    node.upload(&module("share", "1")).expect(201);
    let entries = serde_json::json!({"entries": [{"policy": "share", "parameters": {"shares": 2}}]});
    node.json("PUT", "/api/v1/stack", &entries.to_string()).expect(200);
    node.kernel.counters().set_limits(LivenessLimits { policies: SHORT, ..LONG });
    let policies = Arc::clone(&node.policies);
    let held = policies.calls.lock().unwrap();
    let kernel = node.kernel.clone();
    let reoffer = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(kernel.reoffer()).is_ok()
    });
    let says = until_some("it is missed", || liveness_error(&node));
    assert!(says.contains("the policy thread has been busy with one call"), "{says}");
    drop(held);
    // The held call may have taken longer than the 8 s in which it had to be answered.
    reoffer.join().unwrap();
    until("the policies are called again", || node.runtime.block_on(node.kernel.reoffer()).is_ok());
    alive_again(&node);
}

/// GPUs whose scan hangs while the lock is held, and fails when a test orders it.
#[derive(Default)]
struct HangingGpus {
    held: Mutex<()>,
    fails: Mutex<bool>,
}

impl Gpus for HangingGpus {
    fn scan(&self) -> Result<Inventory, GpusError> {
        let _held = self.held.lock().unwrap();
        if *self.fails.lock().unwrap() {
            return Err(GpusError { what: "NVML cannot count the GPUs".into(), source: None });
        }
        Ok(Inventory::default())
    }

    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError> {
        std::thread::sleep(wait);
        Ok(None)
    }

    fn describe(&self) -> String {
        "GPUs that hang".into()
    }
}

pub(crate) struct NoOwners;

impl Processes for NoOwners {
    fn process_visibility(&self) -> ProcessVisibility {
        ProcessVisibility::default()
    }

    fn identify(&self, _: &BTreeSet<u32>) -> BTreeMap<u32, ProcessIdentity> {
        BTreeMap::new()
    }
}

#[test]
fn a_hanging_scan_fails_livez_and_a_failing_one_does_not() {
    let node = AdminNode::new(1);
    node.kernel.counters().set_limits(LivenessLimits { scan: SHORT, ..LONG });
    let gpus = Arc::new(HangingGpus::default());
    let scanner = InventoryScanner::new(gpus.clone(), Arc::new(NoOwners));
    let watch = GpuWatch::start(&scanner, &node.kernel, Duration::from_millis(50)).unwrap();
    let counters = &node.kernel.counters().gpus;
    until_some("it scans", || counters.answered_wall_ms());
    {
        let _held = gpus.held.lock().unwrap();
        // A scan that begins late on a busy machine is another error.
        until("the missing scan is detected", || {
            liveness_error(&node).is_some_and(|says| says.contains("a scan of the GPUs has not ended for"))
        });
    }
    alive_again(&node);

    *gpus.fails.lock().unwrap() = true;
    let message = until_some("the failure is reported", || {
        let answer = ask(node.address(), "GET", "/livez", &[], b"");
        // A scan that is late on a busy machine is an error until it ends.
        if answer.status != 200 {
            return None;
        }
        let checks = answer.value()["checks"].as_array().unwrap().clone();
        let scans = checks.into_iter().find(|check| check["name"] == "scans").unwrap();
        scans["detail"].as_str().map(String::from)
    });
    assert!(message.contains("NVML cannot count the GPUs"), "{message}");
    *gpus.fails.lock().unwrap() = false;
    until_some("the failure is over", || counters.last_error().is_none().then_some(()));
    // A thread that has ended begins no further scan.
    alive_again(&node);
    drop(watch);
    until("the scans are missed", || {
        liveness_error(&node).is_some_and(|says| says.contains("no scan of the GPUs has begun for"))
    });
}

/// A scan whose result ends its thread after NVML has answered.
struct DeadlyGpus;

impl Gpus for DeadlyGpus {
    fn scan(&self) -> Result<Inventory, GpusError> {
        panic!("at what it found");
    }

    fn next_reading(&self, wait: Duration) -> Result<Option<Reading>, GpusError> {
        std::thread::sleep(wait);
        Ok(None)
    }

    fn describe(&self) -> String {
        "GPUs that kill".into()
    }
}

#[test]
fn a_dead_scan_thread_fails_livez() {
    let node = AdminNode::new(1);
    node.kernel.counters().set_limits(LivenessLimits { scan: SHORT, ..LONG });
    let scanner = InventoryScanner::new(Arc::new(DeadlyGpus), Arc::new(NoOwners));
    let watch = GpuWatch::start(&scanner, &node.kernel, Duration::from_millis(50)).unwrap();
    let says = until_some("it is missed", || liveness_error(&node));
    assert!(says.contains("scans: "), "{says}");
    drop(watch);
}

#[test]
fn a_blocked_kubelet_runtime_fails_livez() {
    let node = AdminNode::new(1);
    node.kernel.counters().set_limits(LivenessLimits { front: SHORT, ..LONG });
    assert_eq!(liveness_error(&node), None, "no progress is expected yet");
    drop(node.kernel.counters().front.begin());
    let says = until_some("it is missed", || liveness_error(&node));
    assert!(says.contains("kubelet: the runtime that serves the kubelet has had no heartbeat for"), "{says}");
    // A heartbeat counts for a short time only, which a slow test may miss.
    until_some("it lives again", || {
        drop(node.kernel.counters().front.begin());
        (ask(node.address(), "GET", "/livez", &[], b"").status == 200).then_some(())
    });
}

/// The plugin runs, and the node has no allocatable GPU.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/58
#[test]
fn a_registered_resource_without_a_watch_fails_livez() {
    let node = AdminNode::new(1);
    node.kernel.counters().set_limits(LivenessLimits { stream: SHORT, ..LONG });
    let kubelet = &node.kernel.counters().kubelet;
    kubelet.set_registration(WHOLE, Some(RegistrationState::Registering));
    kubelet.stream_began(WHOLE);
    kubelet.set_registration(WHOLE, Some(RegistrationState::Registered));
    assert_eq!(liveness_error(&node), None);
    kubelet.stream_ended(WHOLE);
    let says = until_some("the stream is missed", || liveness_error(&node));
    assert!(says.contains(&format!("registered, but without a stream of the kubelet: {WHOLE}")), "{says}");
    // A daemon that waits for a kubelet is alive.
    kubelet.set_registration(WHOLE, Some(RegistrationState::Waiting));
    alive_again(&node);
}
