//! Steps with work on the GPU: a process that holds memory, an error of an application, and CUDA processes that start
//! one after the other. With the fake NVML its state file simulates them.

use crate::check::{Check, skip};
use crate::child::Running;
use crate::inventory::{count, library, read_nvml};
use crate::node::{ENVVAR, Node};
use crate::{child, cuda, machine, nvml};
use anyhow::{Context as _, ensure};
use fake_nvml::State;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Memory of the process that is looked for, MiB.
const HELD_MIB: u64 = 1024;
/// How long the registration may take once the GPU has been started by an earlier step.
const REGISTERED_MAX: Duration = Duration::from_secs(18);
/// How long the daemon may take to see a process, its end, or an error: it scans twice a second.
const SEEN_MAX: Duration = Duration::from_secs(10);
/// Errors of applications that a store to a bad address causes: an MMU fault, or an exception of the graphics engine.
const FAULT_XIDS: [&str; 2] = ["code=\"31\"", "code=\"13\""];
const START_INTERVAL: Duration = Duration::from_secs(1);

/// What uses the GPU.
enum Work {
    /// CUDA processes; the paths of `libcuda.so.1` to try.
    Cuda(Vec<PathBuf>),
    /// The fake NVML, by its state file.
    Fake(PathBuf),
}

/// A process on the GPU; gone when dropped.
struct Holder<'w> {
    process: Running,
    work: &'w Work,
}

impl Work {
    /// Decides what uses the GPU here.
    ///
    /// # Errors
    /// A skip, if CUDA cannot be used.
    fn find(check: &Check) -> anyhow::Result<Self> {
        if let Some(state) = &check.options.fake_state {
            check.record.note("CUDA: the fake plays it");
            return Ok(Self::Fake(state.clone()));
        }
        let paths = cuda_paths(check);
        check.record.at("opening CUDA");
        child::output("cuda-uuid", &arguments(&paths))
            .map_err(|error| skip(format!("no CUDA: {error:#}")))?;
        Ok(Self::Cuda(paths))
    }

    /// Starts a process that holds [`HELD_MIB`].
    fn hold(&self) -> anyhow::Result<Holder<'_>> {
        let process = match self {
            Self::Cuda(paths) => {
                let mib = HELD_MIB.to_string();
                let mut arguments: Vec<&OsStr> = vec![OsStr::new(&mib)];
                arguments.extend(self::arguments(paths));
                let mut process = Running::start("cuda-hold", &arguments)?;
                process.line()?;
                process
            }
            Self::Fake(_) => Running::start("idle", &[])?,
        };
        let pid = process.pid();
        let holder = Holder { process, work: self };
        self.play(|state| state.gpus[0].run(pid, HELD_MIB))?;
        Ok(holder)
    }

    /// Causes an error of an application.
    fn fail(&self) -> anyhow::Result<()> {
        match self {
            Self::Cuda(paths) => child::output("cuda-fault", &arguments(paths)).map(drop),
            Self::Fake(_) => self.play(|state| {
                let uuid = state.gpus[0].uuid.clone();
                state.push_xid(&uuid, 31);
            }),
        }
    }

    /// Runs one short process.
    fn start_once(&self) -> anyhow::Result<()> {
        match self {
            Self::Cuda(paths) => child::output("cuda-add", &arguments(paths)).map(drop),
            Self::Fake(_) => self.hold().map(drop),
        }
    }

    /// Changes the fake's state; nothing with CUDA.
    fn play(&self, change: impl FnOnce(&mut State)) -> anyhow::Result<()> {
        let Self::Fake(path) = self else { return Ok(()) };
        let mut state = State::read(path)?;
        change(&mut state);
        Ok(state.write(path)?)
    }
}

impl Drop for Holder<'_> {
    fn drop(&mut self) {
        let pid = self.process.pid();
        // The next step finds out if the file cannot be written.
        let _ = self.work.play(|state| _ = state.gpus[0].end(pid));
    }
}

/// Where `libcuda.so.1` may be.
pub(crate) fn cuda_paths(check: &Check) -> Vec<PathBuf> {
    cuda::candidates(check.options.cuda.as_deref(), &library(check))
}

pub(crate) fn arguments(paths: &[PathBuf]) -> Vec<&OsStr> {
    paths.iter().map(|path| Path::as_os_str(path)).collect()
}

/// A registered node.
fn node(check: &Check) -> anyhow::Result<Node> {
    let gpus = count(&read_nvml(check)?)?;
    let node = Node::start(check, ENVVAR)?;
    node.wait_registered(gpus, REGISTERED_MAX)?;
    Ok(node)
}

/// Step 7: a process that holds memory is seen with its id, its memory and as a bypass, and is gone after its end.
pub(crate) fn process(check: &Check) -> anyhow::Result<()> {
    let work = Work::find(check)?;
    let node = node(check)?;
    let sight = node.get("/node")?["processes"].clone();
    if sight["state"] != "visible" {
        return Err(skip(format!("processes are not visible here: {sight}")));
    }
    check.record.at("holding memory");
    let holder = work.hold()?;
    let (pid, began) = (holder.process.pid(), Instant::now());
    let uuids: Vec<String> =
        node.gpus()?.iter().filter_map(|gpu| gpu["uuid"].as_str().map(str::to_owned)).collect();
    let mut found = None;
    let end = began + SEEN_MAX;
    while found.is_none() {
        for uuid in &uuids {
            let list = node.get(&format!("/gpus/{uuid}/processes"))?;
            found = found.or(process_of(&list, pid).map(|process| (uuid.clone(), process)));
        }
        ensure!(found.is_some() || Instant::now() < end, "process {pid} is not listed after {SEEN_MAX:?}");
    }
    check.record.ms("seen_ms", began.elapsed());
    let (uuid, process) = found.context("no process")?;
    match process["memoryMiB"].as_u64() {
        Some(mib) => {
            check.record.figure("memory_mib", mib);
            ensure!(mib >= HELD_MIB, "process {pid} has {mib} MiB, but holds {HELD_MIB}");
        }
        None => check.record.note("the memory of the process: NVML does not report it"),
    }
    node.wait_api("the bypass", "/bypass", SEEN_MAX, |list| {
        list["items"].as_array()?.iter().any(|bypass| bypass["pid"] == pid).then_some(())
    })?;
    check.record.ms("bypass_ms", began.elapsed());
    drop(holder);
    let began = Instant::now();
    let path = format!("/gpus/{uuid}/processes");
    node.wait_api("the end of the process", &path, SEEN_MAX, |list| {
        process_of(list, pid).is_none().then_some(())
    })?;
    check.record.ms("gone_ms", began.elapsed());
    node.stop()
}

fn process_of(list: &Value, pid: u32) -> Option<Value> {
    list["items"].as_array()?.iter().find(|process| process["pid"] == pid).cloned()
}

/// Step 8: an application's error is read and counted, and the GPU's health is as before.
pub(crate) fn xid(check: &Check) -> anyhow::Result<()> {
    let work = Work::find(check)?;
    let node = node(check)?;
    let before = node.health()?;
    let began = Instant::now();
    check.record.at("causing an error");
    work.fail()?;
    check.record.ms("fault_ms", began.elapsed());
    check.record.at("waiting for the XID");
    let end = Instant::now() + SEEN_MAX;
    let code = loop {
        let mut counted = None;
        for code in FAULT_XIDS {
            if node.metric("berth_gpu_xids_total", &[code])? > 0.0 {
                counted = Some(code);
            }
        }
        if let Some(code) = counted {
            break code;
        }
        let all = node.text("/metrics")?;
        let others: Vec<&str> = all.lines().filter(|line| line.starts_with("berth_gpu_xids_total")).collect();
        ensure!(Instant::now() < end, "no XID 31 or 13 within {SEEN_MAX:?}; counted: {others:?}");
    };
    check.record.ms("xid_ms", began.elapsed());
    check.record.figure("xid", code.trim_start_matches("code=").trim_matches('"'));
    // After one more scan a change of the health would be visible.
    std::thread::sleep(START_INTERVAL);
    let after = node.health()?;
    ensure!(after == before, "the health was {before:?}, and is {after:?}");
    node.stop()
}

/// Step 11: processes that start once a second cause no error, and the settings are as step 0 found them.
pub(crate) fn load(check: &Check) -> anyhow::Result<()> {
    let result = Work::find(check).and_then(|work| start_processes(check, &work));
    // Also without CUDA, and after a failure.
    let settings = settings_are_as_before(check);
    match (result, settings) {
        (Ok(()), settings) => settings,
        (Err(error), Ok(())) => Err(error),
        (Err(error), Err(settings)) => Err(settings.context(format!("{error:#}"))),
    }
}

fn start_processes(check: &Check, work: &Work) -> anyhow::Result<()> {
    let node = node(check)?;
    let before = node.health()?;
    let pss_before = machine::pss_kib(node.pid())?;
    let began = Instant::now();
    let (mut starts, mut longest) = (0_u32, Duration::ZERO);
    check.record.at("starting processes");
    while began.elapsed() < Duration::from_secs(check.options.load_seconds) {
        let start = Instant::now();
        work.start_once()?;
        starts += 1;
        longest = longest.max(start.elapsed());
        std::thread::sleep(START_INTERVAL.saturating_sub(start.elapsed()));
    }
    check.record.figure("starts", starts);
    check.record.ms("start_ms_max", longest);
    let growth = i64::try_from(machine::pss_kib(node.pid())?)? - i64::try_from(pss_before)?;
    check.record.figure("pss_growth_kib", growth);
    let after = node.health()?;
    ensure!(after == before, "the health was {before:?}, and is {after:?}");
    let failed = node.metric("berth_gpu_scans_total", &["outcome=\"failed\""])?;
    ensure!(failed == 0.0, "{failed} scans failed");
    node.stop()
}

fn settings_are_as_before(check: &Check) -> anyhow::Result<()> {
    let before = check.before().context("step 0 could not read the settings")?;
    let after = read_nvml(check)?.gpus;
    check.record.figure("settings", json!(after.iter().map(|gpu| &gpu.settings).collect::<Vec<_>>()));
    let changes = nvml::changed_settings(&before, &after);
    ensure!(changes.is_empty(), "settings have changed: {}", changes.join("; "));
    Ok(())
}
