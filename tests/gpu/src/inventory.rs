//! Steps that only read: the probe, `berth node check`, the facts of each GPU, repeated scans, and MIG.

use crate::check::{Check, round, skip};
use crate::node::{ENVVAR, Node};
use crate::{child, fixture, machine, nvml};
use anyhow::{Context as _, bail, ensure};
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_kernel::node::ports::Gpus as _;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The script of step 0, built in, so that no other file has to be copied.
const PROBE: &str = include_str!("../gpu-probe.sh");
/// Scans of step 3, and those before them that start threads and read what does not change.
const SCANS: usize = 100;
const FIRST_SCANS: usize = 3;
/// How long threads of the last scan may take to end before threads are counted.
const REST: Duration = Duration::from_millis(300);
/// How long a GPU that nothing else uses may take to start.
const START_MAX: Duration = Duration::from_secs(60);
/// The library's name for the dynamic loader.
const NVML: &str = "libnvidia-ml.so.1";
const MIB: u64 = 1024 * 1024;

/// The number of GPUs that NVML lists.
///
/// # Errors
/// If there is none.
pub(crate) fn count(report: &nvml::Report) -> anyhow::Result<usize> {
    ensure!(!report.gpus.is_empty(), "NVML lists no GPU");
    Ok(report.gpus.len())
}

/// Step 0: the probe's output becomes a file, and the settings are remembered.
pub(crate) fn probe(check: &Check) -> anyhow::Result<()> {
    check.record.at("gpu-probe.sh");
    let mut command = Command::new("sh");
    command.arg("-c").arg(PROBE).stdin(Stdio::null());
    child::ends_with_this_thread(&mut command);
    let output = command.output().context("cannot start sh")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    check
        .write("gpu-probe.txt", format!("{text}\n{}", String::from_utf8_lossy(&output.stderr)).as_bytes())?;
    ensure!(output.status.success(), "gpu-probe.sh ended with {}", output.status);
    match machine::parse_smi_times(&text)[..] {
        [first, second] => {
            check.record.figure("smi_ms_first", first);
            check.record.figure("smi_ms_second", second);
        }
        _ => check.record.note("nvidia-smi is not in the PATH"),
    }
    let before = read_nvml(check)?;
    check.record.figure("gpus", count(&before)?);
    check.record.figure("settings", json!(before.gpus.iter().map(|gpu| &gpu.settings).collect::<Vec<_>>()));
    check.set_before(before.gpus);
    Ok(())
}

/// What NVML reports now, read by another process.
///
/// # Errors
/// If it cannot be read.
pub(crate) fn read_nvml(check: &Check) -> anyhow::Result<nvml::Report> {
    let library = library(check);
    check.record.at("reading NVML");
    nvml::read_in_child(&library)
}

/// The NVML library: the given one, else the one that `berth node check` finds, which knows more folders than the
/// dynamic loader.
pub(crate) fn library(check: &Check) -> PathBuf {
    let find = || {
        let line = node_check_lines(check).ok()?.into_iter().find(|line| line["check"] == "GPUs")?;
        library_of(line["detail"].as_str()?)
    };
    let given = check.options.nvml.clone();
    given.unwrap_or_else(|| check.library.get_or_init(|| find().unwrap_or_else(|| NVML.into())).clone())
}

/// The library of `1 GPU, NVML at PATH, driver VERSION`.
fn library_of(detail: &str) -> Option<PathBuf> {
    let (_, rest) = detail.split_once("NVML at ")?;
    rest.split_once(", driver").map(|(path, _)| path.into())
}

/// The lines of `berth node check`, on folders that do not exist.
fn node_check_lines(check: &Check) -> anyhow::Result<Vec<Value>> {
    check.record.at("berth node check");
    let folder = tempfile::tempdir()?;
    let mut command = check.berth("node check -o json");
    command.arg("--kubelet-dir").arg(folder.path().join("kubelet"));
    command.arg("--state-dir").arg(folder.path().join("state")).args(["--admin-listen", "127.0.0.1:0"]);
    child::ends_with_this_thread(&mut command);
    let output = command.output().context("berth node check")?;
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("berth node check: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// Step 1: `berth node check` finds the library, all GPUs, and the version that the kernel module has. How long NVML
/// takes is measured first, as long as nothing has started the GPU.
pub(crate) fn node_check(check: &Check) -> anyhow::Result<()> {
    let report = read_nvml(check)?;
    check.record.figure("open_ms", round(report.open_ms));
    if let Some(ms) = report.first_handle_ms {
        check.record.figure("first_handle_ms", round(ms));
    }
    let began = Instant::now();
    let lines = node_check_lines(check)?;
    check.record.ms("node_check_ms", began.elapsed());
    let line = |name: &str| {
        let line = lines.iter().find(|line| line["check"] == name);
        line.with_context(|| format!("berth node check has no line {name}"))
    };
    let gpus = line("GPUs")?;
    let detail = gpus["detail"].as_str().unwrap_or_default();
    ensure!(gpus["level"] == "ok", "GPUs: {gpus}");
    let expected = match count(&report)? {
        1 => "1 GPU, ".to_owned(),
        n => format!("{n} GPUs, "),
    };
    ensure!(detail.starts_with(&expected), "{detail:?}, but NVML lists {expected}");
    ensure!(library_of(detail).is_some(), "{detail:?} names no library");
    let version = report.driver_version.context("nvmlSystemGetDriverVersion did not answer")?;
    ensure!(detail.contains(&format!("driver {version}")), "{detail:?}, but NVML's driver is {version}");
    if check.is_fake() {
        check.record.note("/proc/driver/nvidia: the fake has none");
        return Ok(());
    }
    ensure!(line("driver")?["level"] != "FAIL", "driver: {}", line("driver")?);
    match machine::driver_version() {
        Some(loaded) => ensure!(loaded == version, "the loaded module is {loaded}, the library {version}"),
        None => check.record.note("the module's version: /proc/driver/nvidia/version cannot be read"),
    }
    Ok(())
}

/// Step 2: what the daemon shows of each GPU is what nvidia-smi, `/proc` and sysfs show; and each NVML call with its
/// code and duration, also as a fixture of the fake.
pub(crate) fn facts(check: &Check) -> anyhow::Result<()> {
    let report = read_nvml(check)?;
    check.record.figure("calls", json!(report.calls));
    let failed = report.calls.iter().filter(|call| call.code != "SUCCESS").count();
    check.record.figure("calls_made", report.calls.len());
    check.record.figure("calls_not_successful", failed);
    let fixture = check.options.out.join("fake-nvml.json");
    fixture::state(&report).write(&fixture).context("cannot write the state file")?;
    let node = Node::start(check, ENVVAR)?;
    node.wait_registered(count(&report)?, START_MAX)?;
    check.record.at("nvidia-smi");
    let shown_by_smi = if check.is_fake() { None } else { machine::smi()? };
    if shown_by_smi.is_none() {
        check.record.note("nvidia-smi: not there");
    }
    for gpu in &report.gpus {
        let uuid = gpu.uuid.as_deref().context("nvmlDeviceGetUUID did not answer")?;
        let shown = node.get(&format!("/gpus/{uuid}"))?;
        let differences = differences(check, gpu, &shown, shown_by_smi.as_deref());
        ensure!(differences.is_empty(), "GPU {}: {}", gpu.index, differences.join("; "));
    }
    node.stop()
}

/// Where the daemon differs from NVML, nvidia-smi, `/proc` and sysfs, as far as this machine has them.
fn differences(
    check: &Check,
    gpu: &nvml::Gpu,
    shown: &Value,
    smi: Option<&[machine::SmiGpu]>,
) -> Vec<String> {
    let mut found = Vec::new();
    let mut compare = |what: &str, shown: Value, source: &str, expected: Value| {
        let same = match (shown.as_str(), expected.as_str()) {
            (Some(shown), Some(expected)) => shown.eq_ignore_ascii_case(expected),
            _ => shown == expected,
        };
        if !same {
            found.push(format!("{what} {shown}, {source} has {expected}"));
        }
    };
    let memory_mib = gpu.memory.map(|(total, _, _)| total / MIB);
    compare("minor", shown["minor"].clone(), "NVML", json!(gpu.minor));
    compare("bus", shown["pciBus"].clone(), "NVML", json!(gpu.bus));
    compare("memory", shown["memoryMiB"].clone(), "NVML", json!(memory_mib));
    if let Some(smi) = smi {
        match smi.iter().find(|other| Some(&other.uuid) == gpu.uuid.as_ref()) {
            Some(other) => {
                compare("index", shown["index"].clone(), "nvidia-smi", json!(other.index));
                compare("bus", shown["pciBus"].clone(), "nvidia-smi", json!(other.bus));
                if let Some(mib) = other.memory_mib {
                    compare("memory", shown["memoryMiB"].clone(), "nvidia-smi", json!(mib));
                }
            }
            None => compare("uuid", shown["uuid"].clone(), "nvidia-smi", Value::Null),
        }
    }
    let bus = gpu.bus.as_deref().unwrap_or_default();
    if check.is_fake() {
        return found;
    }
    match machine::information(bus) {
        Some((uuid, minor)) => {
            compare("uuid", shown["uuid"].clone(), "/proc", json!(uuid));
            compare("minor", shown["minor"].clone(), "/proc", json!(minor));
        }
        None => check.record.note(format!("/proc/driver/nvidia/gpus has no {bus}")),
    }
    match machine::numa_node(bus) {
        Some(node) => compare("NUMA node", shown["numaNode"].clone(), "sysfs", json!(node)),
        None => check.record.note(format!("sysfs has no NUMA node of {bus}")),
    }
    found
}

/// What the process that scans has measured.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scans {
    /// Microseconds of each scan, without the first ones.
    us: Vec<u64>,
    first_ms: f64,
    /// Descriptors and threads before and after.
    before: (usize, usize),
    after: (usize, usize),
    pss_kib: u64,
    /// What was wrong in any of them.
    errors: Vec<String>,
}

/// Scans as the daemon does, without a pause.
///
/// # Errors
/// If NVML cannot be opened, or a scan fails as a whole.
pub(crate) fn make_scans(library: Option<PathBuf>) -> anyhow::Result<Scans> {
    let gpus = NvmlGpus::open(NvmlOptions { library, ..NvmlOptions::default() })?;
    let pid = std::process::id();
    let (mut us, mut errors, mut first_ms, mut before) = (Vec::new(), Vec::new(), 0.0, (0, 0));
    for scan in 0..FIRST_SCANS + SCANS {
        if scan == FIRST_SCANS {
            std::thread::sleep(REST);
            before = machine::descriptors_and_threads(pid)?;
        }
        let began = Instant::now();
        let inventory = gpus.scan()?;
        let took = began.elapsed();
        errors
            .extend(inventory.scan_errors.iter().map(|(gpu, error)| format!("scan {scan}: {gpu}: {error}")));
        if scan == 0 {
            first_ms = round(took.as_secs_f64() * 1000.0);
        } else if scan >= FIRST_SCANS {
            us.push(u64::try_from(took.as_micros())?);
        }
    }
    std::thread::sleep(REST);
    let after = machine::descriptors_and_threads(pid)?;
    Ok(Scans { us, first_ms, before, after, pss_kib: machine::pss_kib(pid)?, errors })
}

/// Step 3: a hundred scans report no error and leave nothing open.
pub(crate) fn scans(check: &Check) -> anyhow::Result<()> {
    check.record.at("scanning");
    let library = check.options.nvml.as_deref().map(std::path::Path::as_os_str);
    let output = child::output("scans", &library.into_iter().collect::<Vec<_>>())?;
    let mut scans: Scans =
        serde_json::from_str(&output).context("the process that scans printed no figures")?;
    scans.us.sort_unstable();
    #[allow(clippy::cast_precision_loss, reason = "durations of milliseconds")]
    let quantile =
        |percent: usize| scans.us.get(scans.us.len() * percent / 100).map(|us| *us as f64 / 1000.0);
    check.record.figure("first_scan_ms", scans.first_ms);
    check.record.figure("scan_ms_p50", quantile(50));
    check.record.figure("scan_ms_p99", quantile(99));
    check.record.figure("fds", scans.after.0);
    check.record.figure("threads", scans.after.1);
    check.record.figure("pss_kib", scans.pss_kib);
    ensure!(scans.errors.is_empty(), "errors of scans: {}, first: {}", scans.errors.len(), scans.errors[0]);
    // On a busy machine a scan may need another thread, which is kept; a leak would be one of each scan.
    let more_threads = scans.after.1.saturating_sub(scans.before.1);
    ensure!(
        scans.before.0 == scans.after.0 && more_threads < SCANS / 10,
        "descriptors and threads were {:?}, and are {:?} after {SCANS} scans",
        scans.before,
        scans.after
    );
    Ok(())
}

/// Step 10: MIG as the driver has it, read only: the mode and the instances are those that the daemon shows.
pub(crate) fn mig(check: &Check) -> anyhow::Result<()> {
    let report = read_nvml(check)?;
    let gpus = count(&report)?;
    if report.gpus.iter().all(|gpu| gpu.mig.is_none()) {
        return Err(skip("no GPU here supports MIG"));
    }
    let profiles: Vec<&Vec<u32>> = report.gpus.iter().map(|gpu| &gpu.profiles).collect();
    check.record.figure("profiles", json!(profiles));
    check.record.figure("profiles_of_first", report.gpus[0].profiles.len());
    let instances: usize = report.gpus.iter().map(|gpu| gpu.instances.len()).sum();
    check.record.figure("instances", instances);
    let node = Node::start(check, ENVVAR)?;
    node.wait_registered(gpus, START_MAX)?;
    for gpu in &report.gpus {
        let shown = node.get(&format!("/gpus/{}", gpu.uuid.as_deref().unwrap_or_default()))?;
        let enabled = gpu.mig.is_some_and(|(current, _, _)| current == 1);
        ensure!(shown["migEnabled"] == enabled, "migEnabled {}, NVML has {enabled}", shown["migEnabled"]);
        let parts = shown["parts"].as_array().map_or(&[][..], Vec::as_slice);
        for instance in &gpu.instances {
            if !parts.iter().any(|part| part["uuid"] == *instance.uuid) {
                bail!("{} of GPU {} is not among its parts", instance.uuid, gpu.index);
            }
        }
        let shown_instances = parts.iter().filter(|part| !part["mig"].is_null()).count();
        ensure!(
            shown_instances == gpu.instances.len(),
            "{shown_instances} instances are shown, NVML has {}",
            gpu.instances.len()
        );
    }
    if instances == 0 {
        check.record.note("instances: MIG is off, and stays off");
    }
    node.stop()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_read_from_the_line_of_the_gpus() {
        let detail = "1 GPU, NVML at /usr/lib/libnvidia-ml.so.1, driver 580.159.04";
        assert_eq!(library_of(detail), Some("/usr/lib/libnvidia-ml.so.1".into()));
        assert_eq!(library_of("8 GPUs, 8 simulated H100"), None);
    }
}
