//! Steps on the daemon alone: registration, Allocate by each strategy, and the release of the driver.

use crate::check::{Check, skip};
use crate::child::Running;
use crate::inventory::{library, read_nvml};
use crate::machine;
use crate::node::{ENVVAR, GPU, Node};
use anyhow::{Context as _, bail, ensure};
use fakes::plugin;
use kubelet_standin::proto::v1beta1::ContainerAllocateResponse;
use kubelet_standin::{HEALTHY, Kubelet, PodSpec, UNHEALTHY};
use rustix::fs::{major, stat};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

/// How long the registration may take once the GPU has been started by an earlier step.
const REGISTERED_MAX: Duration = Duration::from_secs(18);
/// Allocates of the measured strategy.
const ALLOCATES: usize = 50;
/// How long a change may take to reach the kubelet.
const SEEN_MAX: Duration = Duration::from_secs(15);
/// The folder whose mounts name GPUs to NVIDIA's runtime.
const MOUNTS: &str = "/var/run/nvidia-container-devices";

/// The UUIDs of the GPUs.
fn uuids(check: &Check) -> anyhow::Result<Vec<String>> {
    let uuids: Vec<String> = read_nvml(check)?.gpus.into_iter().filter_map(|gpu| gpu.uuid).collect();
    ensure!(!uuids.is_empty(), "NVML lists no GPU");
    Ok(uuids)
}

/// Step 4: the stand-in kubelet has every GPU, Healthy, under its UUID.
pub(crate) fn kubelet(check: &Check) -> anyhow::Result<()> {
    let expected: BTreeMap<String, String> =
        uuids(check)?.into_iter().map(|uuid| (uuid, HEALTHY.to_owned())).collect();
    let began = Instant::now();
    let node = Node::start(check, ENVVAR)?;
    node.wait_registered(expected.len(), REGISTERED_MAX)?;
    check.record.ms("registered_ms", began.elapsed());
    check.record.figure("pss_kib", machine::pss_kib(node.pid())?);
    let listed = node.kubelet.listed(GPU);
    ensure!(listed == expected, "the kubelet lists {listed:?}");
    let anomalies = node.kubelet.anomalies();
    ensure!(anomalies.is_empty(), "the kubelet reports {anomalies:?}");
    node.stop()
}

/// A strategy: its keys of the configuration, and what is wrong with its response for a GPU.
type Strategy = (&'static str, fn(&ContainerAllocateResponse, &str) -> Result<(), String>);

/// The strategy whose Allocates are measured, and whose device nodes are checked.
const MEASURED: &str = "envvar";

const STRATEGIES: [Strategy; 4] = [
    (MEASURED, |response, uuid| named(response.envs.get("NVIDIA_VISIBLE_DEVICES"), uuid)),
    ("volume-mounts", |response, uuid| {
        let mount = response.mounts.iter().find(|mount| mount.host_path == "/dev/null");
        named(mount.map(|mount| &mount.container_path), &format!("{MOUNTS}/{uuid}"))
    }),
    ("cdi-annotations", |response, uuid| {
        // The grant's own annotation, for the guard, is in the same map.
        let mut names = response.annotations.iter().filter(|(key, _)| key.starts_with("cdi.k8s.io/"));
        named(names.next().map(|(_, value)| value), &format!("nvidia.com/gpu={uuid}"))
    }),
    ("cdi-cri", |response, uuid| {
        named(response.cdi_devices.first().map(|device| &device.name), &format!("nvidia.com/gpu={uuid}"))
    }),
];

fn named(found: Option<&String>, expected: &str) -> Result<(), String> {
    if found.is_some_and(|found| found == expected) {
        Ok(())
    } else {
        Err(format!("{found:?}, not {expected}"))
    }
}

/// Step 5: each strategy names the GPU, and the device nodes that are passed are nodes of NVIDIA's driver.
pub(crate) fn allocate(check: &Check) -> anyhow::Result<()> {
    let uuids = uuids(check)?;
    // So that no daemon has to start the GPU.
    let mut holder = Running::start("nvml-hold", &[library(check).as_os_str()])?;
    holder.line()?;
    let failures: Vec<String> = STRATEGIES
        .iter()
        .filter_map(|strategy| {
            let error = allocate_by(check, strategy, &uuids).err()?;
            Some(format!("{}: {error:#}", strategy.0))
        })
        .collect();
    ensure!(failures.is_empty(), "{}", failures.join("; "));
    Ok(())
}

fn allocate_by(check: &Check, (strategy, judge): &Strategy, uuids: &[String]) -> anyhow::Result<()> {
    // Nothing is written into the machine's folders: only the names of the devices are judged.
    let keys = format!(
        "containerEdits: {{ deviceListStrategy: [{strategy}], passDeviceSpecs: true }}\ncdi: {{ generate: never }}\n"
    );
    let node = Node::start(check, &keys)?;
    node.wait_registered(uuids.len(), REGISTERED_MAX)?;
    check.record.at(&format!("Allocate with {strategy}"));
    let is_measured = *strategy == MEASURED;
    let allocates = if is_measured { ALLOCATES } else { 1 };
    let (mut durations, response) = node.block_on(call_allocate(&node, &uuids[..1], allocates))?;
    judge(&response, &uuids[0]).map_err(anyhow::Error::msg)?;
    if is_measured {
        durations.sort_unstable();
        let middle = durations[durations.len() / 2];
        check.record.figure("allocate_p50_us", u64::try_from(middle.as_micros())?);
        check_nodes(check, &response)?;
    }
    node.stop()
}

async fn call_allocate(
    node: &Node,
    ids: &[String],
    times: usize,
) -> anyhow::Result<(Vec<Duration>, ContainerAllocateResponse)> {
    let mut client = plugin::dial(&plugin::socket(&node.kubelet_dir(), GPU)).await?;
    let mut durations = Vec::new();
    let mut last = None;
    for _ in 0..times {
        let (took, response) = plugin::allocate(&mut client, ids).await?;
        durations.push(took);
        last = Some(response);
    }
    Ok((durations, last.context("no Allocate was made")?))
}

/// Every device node of the response is a character device with a major number of NVIDIA's driver.
fn check_nodes(check: &Check, response: &ContainerAllocateResponse) -> anyhow::Result<()> {
    ensure!(!response.devices.is_empty(), "passDeviceSpecs passed no device node");
    if check.is_fake() {
        check.record.note("device nodes: the fake has none");
        return Ok(());
    }
    let majors = machine::character_devices();
    check.record.figure("device_nodes", response.devices.len());
    for device in &response.devices {
        let found = stat(&device.host_path).with_context(|| device.host_path.clone())?;
        let kind = rustix::fs::FileType::from_raw_mode(found.st_mode);
        ensure!(kind.is_char_device(), "{} is no character device", device.host_path);
        match majors.get(&major(found.st_rdev)) {
            Some(name) => ensure!(name.starts_with("nvidia"), "{} is a node of {name}", device.host_path),
            None => check.record.note(format!("/proc/devices has no major number of {}", device.host_path)),
        }
    }
    Ok(())
}

/// Step 9: `berth nvml release` is refused while a GPU is held; without a pod it closes every file of the driver, and
/// `berth nvml resume` brings the GPUs back.
pub(crate) fn release(check: &Check) -> anyhow::Result<()> {
    let gpus = uuids(check)?.len();
    let node = Node::start(check, ENVVAR)?;
    node.wait_registered(gpus, REGISTERED_MAX)?;
    if !check.has_command("nvml") {
        return Err(skip("this berth has no `nvml release`"));
    }
    let pod = PodSpec::new("default", "gpu-check").container("main", &[(GPU, 1)]);
    let uid = pod.uid.clone();
    check.record.at("a pod with a GPU");
    node.block_on(node.kubelet.admit(pod)).context("cannot admit a pod with a GPU")?;
    node.block_on(node.kubelet.run(&uid)).context("cannot start its container")?;
    let refused = node.command(&["nvml", "release", "--for", "30m"])?;
    ensure!(!refused.status.success(), "`nvml release` was accepted while a pod holds a GPU");
    node.kubelet.finish(&uid);
    node.kubelet.delete(&uid);
    node.wait_api("the end of the allocation", "/allocations", SEEN_MAX, |list| {
        let live = |allocation: &Value| allocation["state"] != "ended";
        list["items"].as_array().filter(|items| !items.iter().any(live)).map(drop)
    })?;
    let is_of_driver = driver_files(check);
    let open = machine::open_files(node.pid(), &is_of_driver).len();
    check.record.figure("driver_files_before", open);
    if open == 0 {
        check.record.note("closing the driver's files: none is open before");
    }
    let began = Instant::now();
    succeeded("nvml release", &node.command(&["nvml", "release", "--for", "30m"])?)?;
    check.record.ms("release_ms", began.elapsed());
    let open = machine::open_files(node.pid(), &is_of_driver);
    ensure!(open.is_empty(), "after the release the daemon has open: {}", open.join(", "));
    let all_are = |health: &'static str| {
        move |kubelet: &Kubelet| {
            let listed = kubelet.listed(GPU);
            listed.len() == gpus && listed.values().all(|state| state == health)
        }
    };
    node.wait_kubelet("every GPU Unhealthy after the release", SEEN_MAX, all_are(UNHEALTHY))?;
    let began = Instant::now();
    succeeded("nvml resume", &node.command(&["nvml", "resume"])?)?;
    node.wait_kubelet("every GPU Healthy after the resumption", SEEN_MAX, all_are(HEALTHY))?;
    check.record.ms("resume_ms", began.elapsed());
    node.stop()
}

/// Which open files are the driver's: its device nodes, or the file that the fake holds in their place.
fn driver_files(check: &Check) -> impl Fn(&Path) -> bool + use<> {
    let state = check.options.fake_state.as_ref().and_then(|file| std::fs::read(file).ok());
    let state: Value = state.and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let gpus = state["gpus"].as_array().cloned().unwrap_or_default();
    let held: Vec<String> =
        gpus.iter().filter_map(|gpu| Some(gpu["held_file"].as_str()?.to_owned())).collect();
    move |path| is_node(path) || held.iter().any(|held| Path::new(held) == path)
}

/// Whether it is a node such as `/dev/nvidia0` or `/dev/nvidiactl`.
fn is_node(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.starts_with("/dev/nvidia"))
}

fn succeeded(what: &str, output: &Output) -> anyhow::Result<()> {
    if output.status.success() {
        return Ok(());
    }
    bail!("{what} ended with {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kubelet_standin::proto::v1beta1::{CdiDevice, Mount};

    #[test]
    fn each_strategy_is_judged_by_the_field_that_it_fills() {
        let mut response = ContainerAllocateResponse::default();
        for (strategy, judge) in STRATEGIES {
            assert!(judge(&response, "GPU-a").is_err(), "{strategy} accepts an empty response");
        }
        response.envs.insert("NVIDIA_VISIBLE_DEVICES".into(), "GPU-a".into());
        response.mounts.push(Mount {
            container_path: format!("{MOUNTS}/GPU-a"),
            host_path: "/dev/null".into(),
            read_only: false,
        });
        response.annotations.insert("cdi.k8s.io/x".into(), "nvidia.com/gpu=GPU-a".into());
        for resource in ["a", "b", "c", "d"] {
            response.annotations.insert(format!("berth.dev/grant.{resource}"), "id GPU-a".into());
        }
        response.cdi_devices.push(CdiDevice { name: "nvidia.com/gpu=GPU-a".into() });
        for (strategy, judge) in STRATEGIES {
            assert_eq!(judge(&response, "GPU-a"), Ok(()), "{strategy}");
            assert!(judge(&response, "GPU-b").is_err(), "{strategy}");
        }
    }

    #[test]
    fn nodes_of_the_driver_are_recognised() {
        assert!(is_node(Path::new("/dev/nvidiactl")) && is_node(Path::new("/dev/nvidia-uvm")));
        assert!(!is_node(Path::new("/dev/null")));
    }
}
