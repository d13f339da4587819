//! Steps 11 and 12: each creates a cgroup as a container has one, and does to it what the guard does. It sets a memory
//! limit, or denies access to device nodes.

use crate::check::{Check, skip};
use crate::inventory::{library, read_nvml};
use crate::load::{arguments, cuda_paths};
use crate::{child, cuda, machine};
use anyhow::{Context as _, ensure};
use berth_gpus::nvml::{LimitError, NvmlLimits};
use berth_guard::DeniedDevices;
use berth_kernel::ids::names::GpuId;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The limit, what fits into it beside the driver's own memory of the process, and what does not, MiB.
const LIMIT_MIB: u64 = 2048;
const FITS_MIB: usize = 1024;
const EXCEEDS_MIB: usize = 3072;
/// The driver rounds a limit down to its pages, MiB.
const PAGE_MIB: u64 = 2;
/// Where cgroup v2 is mounted; the second path where cgroup v1 is mounted, too.
const ROOTS: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// How long the kernel may count an ended process as one of the cgroup.
const REMOVE_MAX: Duration = Duration::from_secs(5);

/// A cgroup of version 2 that a step creates; removed when dropped.
struct Cgroup(PathBuf);

impl Cgroup {
    /// Creates one for a step.
    ///
    /// # Errors
    /// A skip, if none can be created here.
    fn create(step: &str) -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(skip("only root can create a cgroup"));
        }
        let root = ROOTS.iter().map(Path::new).find(|root| root.join("cgroup.controllers").exists());
        let root = root.ok_or_else(|| skip("cgroup v2 is not mounted"))?;
        let folder = root.join(format!("berth-gpu-check-{step}-{}", std::process::id()));
        fs::create_dir(&folder)
            .map_err(|error| skip(format!("{} cannot be created: {error}", folder.display())))?;
        let cgroup = Self(folder);
        let controllers = fs::read_to_string(root.join("cgroup.controllers"))?;
        // The driver limits memory by this controller, where the kernel has it.
        if controllers.split_whitespace().any(|name| name == "dmem") && !cgroup.0.join("dmem.max").exists() {
            let list = root.join("cgroup.subtree_control");
            return Err(skip(format!(
                "{} does not contain the controller dmem of this kernel",
                list.display()
            )));
        }
        Ok(cgroup)
    }

    /// Runs a hidden subcommand to its end in this cgroup.
    fn output(&self, subcommand: &str, arguments: &[&OsStr]) -> anyhow::Result<String> {
        let mut all = vec![OsStr::new("--cgroup"), self.0.as_os_str()];
        all.extend(arguments);
        child::output(subcommand, &all)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The process that ended last may still be in it.
        let end = Instant::now() + REMOVE_MAX;
        while let Err(error) = fs::remove_dir(&self.0) {
            if Instant::now() > end {
                eprintln!("gpu-check: {} is left: {error}", self.0.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Moves this process into a cgroup.
///
/// # Errors
/// If the kernel refuses it.
pub(crate) fn join(cgroup: &Path) -> anyhow::Result<()> {
    let file = cgroup.join("cgroup.procs");
    // 0 is the writing process.
    fs::write(&file, "0").with_context(|| format!("moving this process into the cgroup {}", cgroup.display()))
}

/// Step 11: a limit is set by NVML as the guard sets it, NVML reports it, and CUDA can allocate no more.
pub(crate) fn limits(check: &Check) -> anyhow::Result<()> {
    let first = read_nvml(check)?.gpus.into_iter().next().context("NVML lists no GPU")?;
    let gpu = GpuId::parse(&first.uuid.context("the GPU has no UUID")?)?;
    let cgroup = Cgroup::create("limits")?;
    let nvml = NvmlLimits::new(Some(library(check)), "/".into());
    check.record.at("opening NVML");
    nvml.open()?;
    check.record.at("setting the limit");
    let began = Instant::now();
    let answer = nvml.set(&gpu, &cgroup.0, LIMIT_MIB);
    let took = began.elapsed();
    let used = answer.and_then(|reported| Ok((reported, nvml.get(&gpu, &cgroup.0)?)));
    check.record.at("closing NVML");
    let is_closed = nvml.close("the step is at its end");
    let (reported, read) = used.map_err(|error| match error {
        LimitError::Unsupported { .. } => skip(error.to_string()),
        _ => error.into(),
    })?;
    ensure!(is_closed, "NVML was not closed in time");
    ensure!(
        reported == read,
        "NVML reported {reported:?} when the limit was set, and {read:?} when it was read again"
    );
    let reported = reported.context("NVML reports no limit after one was set")?;
    ensure!(
        (LIMIT_MIB - PAGE_MIB..=LIMIT_MIB).contains(&reported.limit_mib),
        "NVML reports a limit of {} MiB after {LIMIT_MIB} MiB were set",
        reported.limit_mib
    );
    check.record.figure("set_us", u64::try_from(took.as_micros())?);
    check.record.figure("limit_mib", reported.limit_mib);
    if check.is_fake() {
        check.record.note("nothing was allocated: the fake NVML has no CUDA");
        return Ok(());
    }
    let paths = cuda_paths(check);
    check.record.at("opening CUDA");
    let why_not = match child::output("cuda-uuid", &arguments(&paths)) {
        Ok(uuid) if uuid.trim() == gpu.to_string() => None,
        Ok(uuid) => Some(format!("CUDA's first GPU is {}, the limit is on {gpu}", uuid.trim())),
        Err(error) => Some(format!("CUDA cannot be opened: {error:#}")),
    };
    if let Some(why) = why_not {
        check.record.note(format!("no memory was allocated: {why}"));
        return Ok(());
    }
    check.record.at("allocating memory");
    let sizes = [FITS_MIB.to_string(), EXCEEDS_MIB.to_string()];
    let all: Vec<&OsStr> = sizes.iter().map(OsStr::new).chain(arguments(&paths)).collect();
    let text = cgroup.output("cuda-limited", &all)?;
    let seen: cuda::Limited = serde_json::from_str(&text)?;
    check.record.figure("total_mib", seen.total_mib);
    ensure!(
        seen.total_mib <= LIMIT_MIB,
        "CUDA shows {} MiB in total, but the limit is {LIMIT_MIB} MiB",
        seen.total_mib
    );
    let refusal = seen.refusal.with_context(|| {
        format!("CUDA allocated {EXCEEDS_MIB} MiB, although the limit is {LIMIT_MIB} MiB")
    })?;
    let is_out_of_memory = refusal.contains("CUDA_ERROR_OUT_OF_MEMORY");
    ensure!(is_out_of_memory, "CUDA refused {EXCEEDS_MIB} MiB by another error: {refusal}");
    check.record.figure("refusal", refusal);
    Ok(())
}

/// Step 12: CUDA does not start in a cgroup to which the guard's rule denies the driver's device nodes.
pub(crate) fn close(check: &Check) -> anyhow::Result<()> {
    if check.is_fake() {
        return Err(skip("the fake NVML has no CUDA and no device nodes"));
    }
    let names = machine::character_devices();
    let majors =
        names.iter().filter(|(_, name)| name.starts_with("nvidia")).map(|(major, _)| *major).collect();
    let denied = DeniedDevices { majors, all_but: None };
    ensure!(!denied.majors.is_empty(), "/proc/devices has no device of NVIDIA's driver: {names:?}");
    let cgroup = Cgroup::create("close")?;
    let paths = cuda_paths(check);
    check.record.at("opening CUDA");
    cgroup.output("cuda-uuid", &arguments(&paths)).map_err(|error| skip(format!("no CUDA: {error:#}")))?;
    check.record.at("denying access");
    let began = Instant::now();
    denied.apply_to(&cgroup.0).context("denying access to the device nodes")?;
    check.record.figure("deny_us", u64::try_from(began.elapsed().as_micros())?);
    check.record.at("opening CUDA without access");
    match cgroup.output("cuda-uuid", &arguments(&paths)) {
        Ok(uuid) => {
            anyhow::bail!(
                "CUDA opened {}, although access to device nodes with the major numbers {:?} is denied",
                uuid.trim(),
                denied.majors
            )
        }
        Err(error) => check.record.figure("refusal", format!("{error:#}")),
    }
    // The cause of the refusal is the cgroup.
    child::output("cuda-uuid", &arguments(&paths)).context("CUDA outside of the cgroup")?;
    Ok(())
}
