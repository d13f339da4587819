//! The load of GPUs and its past, past events, the caller's access, and why devices are not free: over REST, by the
//! whole daemon on simulated GPUs and on a fake NVML, and with scans that a test makes up.

use crate::gpus::mig::Rig;
use crate::rest::processes::{HOST, Machine, Sleeper, systemd};
use crate::support::admin_node::AdminNode;
use crate::support::gpus::{SHARED, WHOLE, gpu, gpu_id};
use crate::support::process_node::ProcessNode;
use crate::support::wait::{SOON, until};
use berth_kernel::hardware::gpu::Load;
use berth_kernel::ids::names::{DeviceId, Resource};
use fake_nvml::{Code, Fault, Process, State};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

fn items(value: &Value) -> &Vec<Value> {
    value["items"].as_array().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn load_and_history_of_simulated_gpus_follow_their_processes_and_pods() {
    let machine = Machine::new(HOST);
    let node = ProcessNode::new(&machine.settings()).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let uid = node.start("trainer", SHARED, 1).await.unwrap();
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["pod"].is_string());
    let uuid = daemon.live()[0]["gpus"][0].as_str().unwrap().to_owned();
    let path = format!("/gpus/{uuid}");
    let idle = daemon.get_until(&path, |gpu| gpu["utilizationPercent"] == 0);
    assert!(idle["temperatureCelsius"].as_u64().unwrap() < 45 && idle["powerWatts"] == 7, "{idle}");
    assert_eq!(idle["memoryGrantedMiB"], 7680, "half of a T4");
    assert_eq!(idle["topHolder"], json!({"namespace": "ns", "pod": "trainer", "devices": 1}));
    assert_eq!(idle["podCount"], 1);

    let process = Sleeper::start();
    machine.place(process.pid(), &systemd(&uid, "a"));
    machine.runs(&format!("{{pid: {}, memoryMiB: 512}}", process.pid()));
    let busy = daemon.get_until(&path, |gpu| gpu["utilizationPercent"].as_u64() > Some(20));
    assert!(busy["powerWatts"].as_u64() > idle["powerWatts"].as_u64(), "{busy}");
    let mut seen = BTreeSet::new();
    until("utilisation moves", || {
        seen.insert(daemon.get(&path)["utilizationPercent"].as_u64());
        seen.len() >= 3
    });

    let past = format!("{path}/history");
    let known = |past: &Value| !past["pods"].as_array().unwrap().is_empty();
    let history = daemon.get_until(&past, known);
    assert_eq!(history["stepSeconds"], 15);
    let newest = items(&history).last().unwrap();
    assert!(newest["memoryUsedMiB"].as_u64() <= Some(512) && newest["memoryGrantedMiB"].is_u64(), "{newest}");
    let pod = &history["pods"][0];
    assert_eq!((&pod["namespace"], &pod["pod"]), (&"ns".into(), &"trainer".into()));
    let point = items(pod).last().unwrap();
    assert!(point["memoryUsedMiB"] == 512 && point["utilizationPercent"].as_u64() > Some(20), "{point}");
    let day = daemon.get(&format!("{past}?last=24h&points=720"));
    assert_eq!((day["stepSeconds"].as_u64(), items(&day).is_empty()), (Some(120), false));

    let text = ureq::get(daemon.base.replace("/api/v1", "/metrics")).call().unwrap();
    let text = text.into_body().read_to_string().unwrap();
    for name in ["berth_gpu_utilization_ratio", "berth_gpu_temperature_celsius", "berth_gpu_power_watts"] {
        let shown = text.lines().filter(|line| line.starts_with(&format!("{name}{{"))).count();
        assert_eq!(shown, 2, "{name}");
    }

    // A cordon is in the past, and the grant before it is not.
    daemon.call("PUT", &format!("{path}/cordon"), &json!({"reason": "fan"}));
    let events = daemon.get_until("/events/history", |past| {
        items(past).first().is_some_and(|event| event["kind"] == "gpuCordoned")
    });
    assert!(items(&events).iter().all(|event| event["kind"] != "allocationGranted"), "{events}");
    let printed = daemon.printed(&["gpu", "history", &uuid, "--last", "15m"]);
    assert!(printed.starts_with("averages of ") && printed.contains("\nns/trainer "), "{printed}");
    let printed =
        daemon.printed(&["events", "--since", "10m", "--no-follow", "--kind", "gpuFound,gpuCordoned"]);
    let lines: Vec<&str> = printed.lines().collect();
    assert!(lines[1].contains("Z  gpuFound "), "oldest first: {printed}");
    assert!(lines.last().unwrap().ends_with("is cordoned by admin (fan)"), "{printed}");
    let one =
        daemon.printed(&["events", "--since", "10m", "--no-follow", "-o", "json", "--kind", "gpuCordoned"]);
    let event: Value = serde_json::from_str(&one).unwrap();
    assert_eq!((event["kind"].as_str(), event.get("id")), (Some("gpuCordoned"), None));
    let access = daemon.get("/access");
    assert_eq!(access, json!({"caller": "token admin", "right": "change"}));
    daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_that_nvml_does_not_report_is_absent_and_the_gpu_is_healthy() {
    let mut state = State::h100(2);
    let uuids: Vec<String> = state.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    for call in ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates"] {
        state.faults.push(Fault::fail(call, Code::NotSupported).of_gpu(uuids[1].as_str()));
    }
    state.gpus[0].utilization_gpu = 42;
    state.gpus[0].power_mw = 350_000;
    state.gpus[0].processes = vec![Process::new(7, 100)];
    let rig = Rig::new(&state, "").await;
    let daemon = rig.node.serve();
    rig.allocatable(&[(WHOLE, 2)]).await;
    let read = |uuid: &str, holds: &dyn Fn(&Value) -> bool| daemon.get_until(&format!("/gpus/{uuid}"), holds);
    let full = read(&uuids[0], &|gpu| gpu["powerWatts"] == 350);
    assert_eq!((&full["utilizationPercent"], &full["temperatureCelsius"]), (&42.into(), &32.into()));
    let unsupported = read(&uuids[1], &|gpu| gpu["temperatureCelsius"] == 32);
    assert!(
        unsupported.get("powerWatts").is_none() && unsupported.get("utilizationPercent").is_none(),
        "{unsupported}"
    );
    assert_eq!(unsupported["health"]["state"], "healthy");
    let path = format!("/gpus/{}/history", uuids[1]);
    let past =
        daemon.get_until(&path, |past| items(past).iter().any(|point| point["temperatureCelsius"] == 32));
    assert!(items(&past).iter().all(|point| point.get("powerWatts").is_none()), "{past}");
    rig.nvml.change(|state| state.gpus[0].temperature_c = 77).unwrap();
    read(&uuids[0], &|gpu| gpu["temperatureCelsius"] == 77);
    daemon.stop();
}

/// Scans with this temperature on GPU 0.
fn scan(node: &AdminNode, gpus: u32, celsius: u32) {
    node.scan_with(gpus, |inventory| {
        let load = Load { temperature_celsius: Some(celsius), ..Load::default() };
        inventory.loads = BTreeMap::from([(gpu_id(0), load)]);
    });
}

#[test]
fn a_load_that_moves_changes_no_snapshot_and_wakes_no_reader() {
    let node = AdminNode::new(2);
    scan(&node, 2, 40);
    let mut snapshots = node.kernel.watch();
    snapshots.mark_unchanged();
    let generation = node.kernel.snapshot().generation;
    for celsius in 41..60 {
        scan(&node, 2, celsius);
    }
    assert_eq!(node.kernel.snapshot().generation, generation);
    assert!(!snapshots.has_changed().unwrap());
    let shown = node.get("/api/v1/gpus/GPU-0").expect(200);
    assert_eq!(shown["temperatureCelsius"], 59);
    let other = node.get("/api/v1/gpus/GPU-1").expect(200);
    assert!(other.get("temperatureCelsius").is_none());
    let past = node.get("/api/v1/gpus/GPU-0/history?last=15m&points=1").expect(200);
    assert_eq!((&past["stepSeconds"], items(&past).len()), (&900.into(), 1));
    assert_eq!(items(&past)[0]["temperatureCelsius"], 50, "the average of 40 to 59");
}

#[test]
fn queries_of_histories_are_checked_and_an_unknown_gpu_is_not_found() {
    let node = AdminNode::new(1);
    for (path, word) in [
        ("gpus/GPU-0/history?last=25h", "last: a duration of 1m to 24h"),
        ("gpus/GPU-0/history?last=yesterday", "last: a duration of 1m to 24h"),
        ("gpus/GPU-0/history?points=0", "points: 1 to 720"),
        ("gpus/GPU-0/history?points=721", "points: 1 to 720"),
        ("gpus/GPU-0/history?points=-1", "invalid digit"),
        ("events/history?last=1s", "last: a duration of 1m to 24h"),
        ("events/history?limit=501", "limit: 1 to 500"),
        ("events/history?limit=0", "limit: 1 to 500"),
    ] {
        let message = node.get(&format!("/api/v1/{path}")).problem(400, "malformed-query");
        assert!(message.contains(word), "{path}: {message}");
    }
    node.get("/api/v1/gpus/GPU-7/history").problem(404, "unknown-gpu");
    let index = node.get("/api/v1/gpus/0/history").problem(404, "unknown-gpu");
    assert!(index.contains("index 0 is GPU-0"), "{index}");
}

#[test]
fn a_refused_request_is_an_event_and_a_flood_of_them_leaves_the_others() {
    let node = AdminNode::new(2);
    node.json("PUT", "/api/v1/gpus/GPU-1/cordon", r#"{"reason": "fan"}"#).expect(200);
    let resource = Resource::parse(WHOLE).unwrap();
    for n in 0..2_000 {
        node.kernel.request_refused(&resource, &[DeviceId::whole(&gpu(1))], &format!("reason {n}"));
    }
    let path = "/api/v1/events/history?last=1h";
    let refused = |past: &Value| {
        items(past).iter().filter(|event| event["kind"] == "requestRefused").cloned().collect::<Vec<_>>()
    };
    // The first refusals become events while later requests are still being refused.
    until("the refusals", || refused(&node.get(path).expect(200)).len() >= 20);
    let past = node.get(path).expect(200);
    let all = refused(&past);
    assert_eq!(all.len(), 20, "in a minute");
    assert_eq!(
        (&all[0]["gpu"], &all[0]["words"]),
        (&"GPU-1".into(), &"refused 1 x nvidia.com/gpu: reason 19".into())
    );
    assert!(items(&past).iter().any(|event| event["kind"] == "gpuCordoned"), "{past}");
    let limited = node.get("/api/v1/events/history?limit=3").expect(200);
    assert_eq!(items(&limited), &items(&past)[..3]);
    let stream = node.get("/api/v1/events?follow=false&since=0&kind=requestRefused");
    let text = String::from_utf8(stream.body).unwrap();
    assert_eq!(text.matches("event: requestRefused").count(), 20, "{text}");
}

#[test]
fn the_devices_of_a_resource_add_up_with_a_reason_for_each_that_is_not_free() {
    let node = AdminNode::new(4);
    node.allocate(0);
    node.json("PUT", "/api/v1/gpus/GPU-1/cordon", r#"{"reason": "fan"}"#).expect(200);
    node.scan_failing(4, 2);
    let answer = node.get("/api/v1/node").expect(200);
    let resource = &answer["resources"][0];
    let counts = ["devices", "held", "free", "withdrawn", "cordoned", "unhealthy"];
    let counts = counts.map(|key| resource[key].as_u64().unwrap());
    assert_eq!(counts, [4, 1, 1, 0, 1, 1], "{resource}");
    assert_eq!(
        resource["notFree"],
        json!([
            {"state": "unhealthy", "devices": 1, "reason": "GPU 2: fell off the bus", "gpu": "GPU-2"},
            {"state": "cordoned", "devices": 1, "reason": "GPU 1: cordoned by admin (fan)", "gpu": "GPU-1"},
        ])
    );
}
