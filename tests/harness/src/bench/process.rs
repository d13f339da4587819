//! The built binary, beside the stand-in kubelet: how long it takes to start, and its memory.

use crate::bench::history;
use crate::bench::measure::{Effort, Series, ratio};
use crate::bench::node::{GPU, House, PATIENCE};
use crate::bench::table::{Budget, Row, Table};
use crate::resources::Memory;
use anyhow::{Result, ensure};
use fakes::program;
use fakes::serving;
use kubelet_standin::Kubelet;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Starts of one run. A fresh node compiles the policy of its stack.
const FRESH_SAMPLES: usize = 3;
/// Restarts of one run.
const RESTART_SAMPLES: usize = 8;
/// How long it is left alone before its memory is read.
const IDLE: Duration = Duration::from_secs(10);
/// The stack, with five policies.
const STACK: &str = "[{ policy: mixed }]";
/// Five policies, each with code of its own.
const FIVE: &str = "[{ policy: quota, parameters: { default: { devices: 100 } } }, \
                    { policy: spread, parameters: { distinct: required } }, { policy: topology }, { policy: binpack }, \
                    { policy: mixed }]";
/// How long the stand-in takes at most to detect that a plugin has stopped.
const GONE: Duration = Duration::from_millis(150);

/// Where one daemon lives.
pub(crate) struct Site<'h> {
    house: &'h House,
    pub(crate) kubelet: Kubelet,
    folder: TempDir,
    state: PathBuf,
    stack: &'static str,
}

/// A daemon that runs.
pub(crate) struct Serving {
    process: serving::Serving,
    /// The admin API, up to `/api/v1`.
    pub(crate) base: String,
    /// Of it.
    pub(crate) token: String,
}

impl<'h> Site<'h> {
    /// With a kubelet, and a state folder of this name on the disk.
    pub(crate) fn new(house: &'h House, name: &str) -> Result<Self> {
        // Not below the state folder: the path of a unix socket has 107 bytes.
        let folder = tempfile::tempdir()?;
        let state = house.folder(name)?;
        let kubelet = house.kubelet.block_on(Kubelet::started(folder.path().join("kubelet")))?;
        Ok(Self { house, kubelet, folder, state, stack: STACK })
    }

    pub(crate) fn kubelet_dir(&self) -> PathBuf {
        self.folder.path().join("kubelet")
    }

    /// Starts the daemon. Answers how long it took to be registered.
    pub(crate) fn serve(&self) -> Result<(Serving, Duration)> {
        let config = self.folder.path().join("config.yaml");
        let stack = self.stack;
        // What is measured is what a request costs, not how many one client may send.
        let limits = "admin: { limits: { readsPerSecond: 1000000, changesPerSecond: 1000000 } }";
        std::fs::write(
            &config,
            format!("gpus: sim:8xh100\nstack: {stack}\nhistory: {{ allocations: 10000 }}\n{limits}\n"),
        )?;
        let mut command = Command::new(program::beside_this("berth")?);
        command.arg("serve").arg("--config").arg(&config);
        command.arg("--kubelet-dir").arg(self.kubelet_dir());
        command.arg("--state-dir").arg(&self.state).args(["--admin-listen", "127.0.0.1:0"]);
        let began = Instant::now();
        let process = serving::Serving::start(command)?;
        let served = |k: &Kubelet| k.is_served(GPU);
        let registered = self.kubelet.wait_for("the registration", PATIENCE, served);
        self.house.kubelet.block_on(registered)?;
        let took = began.elapsed();
        let base = format!("{}/api/v1", process.origin);
        let token = std::fs::read_to_string(self.state.join("token"))?.trim().to_owned();
        Ok((Serving { process, base, token }, took))
    }

    /// Ends it as a node's service manager does, and waits until the kubelet has noticed.
    fn stop(&self, mut serving: Serving) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&serving.process.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = serving.process.child.wait()?;
        ensure!(status.success(), "it ended with {status}");
        let gone = |k: &Kubelet| !k.is_served(GPU);
        self.house.kubelet.block_on(self.kubelet.wait_for("its end", PATIENCE, gone))?;
        std::thread::sleep(GONE);
        Ok(())
    }
}

pub(crate) fn measure(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let (mut fresh, mut again, mut full) = <(Series, Series, Series)>::default();
    let (mut fresh_bytes, mut again_bytes, mut five_bytes, mut full_bytes) = (None, None, None, None);
    for run in 0..effort.runs() {
        fresh.begin();
        again.begin();
        full.begin();
        for sample in 0..effort.samples(FRESH_SAMPLES) {
            let site = Site::new(house, &format!("fresh-{run}-{sample}"))?;
            let (serving, took) = site.serve()?;
            fresh.push(took);
            if fresh_bytes.is_none() {
                fresh_bytes = Some(idle(effort, &serving)?);
            }
            site.stop(serving)?;
        }
        let site = Site::new(house, "restarted")?;
        // What the state folder holds afterwards is what a restart finds.
        site.stop(site.serve()?.0)?;
        for _ in 0..effort.samples(RESTART_SAMPLES) {
            let (serving, took) = site.serve()?;
            again.push(took);
            if again_bytes.is_none() {
                again_bytes = Some(idle(effort, &serving)?);
            }
            site.stop(serving)?;
        }
        if five_bytes.is_none() {
            let site = Site { stack: FIVE, ..Site::new(house, "five")? };
            site.stop(site.serve()?.0)?;
            let (serving, _) = site.serve()?;
            five_bytes = Some(idle(effort, &serving)?);
            site.stop(serving)?;
        }
        let site = Site::new(house, &format!("history-{run}"))?;
        site.stop(site.serve()?.0)?;
        history::fill(&site.state.join("store"))?;
        for _ in 0..effort.samples(RESTART_SAMPLES) {
            let (serving, took) = site.serve()?;
            full.push(took);
            if full_bytes.is_none() {
                full_bytes = Some(idle(effort, &serving)?);
            }
            site.stop(serving)?;
        }
    }
    table.add(Row::new(
        "start to registered, fresh node (compiles the policy of its stack)",
        &fresh,
        Budget::NONE,
    ));
    // NVIDIA's plugin v0.20 takes 7 to 12 ms; 1.5 x the middle.
    table.add(Row::new("start to registered, restart", &again, Budget::median(14_250)));
    let name = format!("start to registered, restart with {} records of history", history::RECORDS);
    table.add(Row::new(name, &full, Budget::NONE).beside(ratio(full.median(), again.median()), "without"));
    let with_history = format!("restarted with {} records of history", history::RECORDS);
    for (name, bytes) in [
        ("fresh node", fresh_bytes),
        ("restarted", again_bytes),
        ("restarted, five policies in the stack", five_bytes),
        (&*with_history, full_bytes),
    ] {
        let name = format!("memory (PSS) after {} s idle, {name}", IDLE.as_secs());
        table.add(Row::bytes(name, bytes.unwrap_or_default(), Budget::megabytes(20)));
    }
    Ok(())
}

/// Its share of the memory it has mapped, after a while of nothing.
fn idle(effort: Effort, serving: &Serving) -> Result<u64> {
    if effort == Effort::Full {
        std::thread::sleep(IDLE);
    }
    Ok(Memory::of(serving.process.child.id())?.share)
}
