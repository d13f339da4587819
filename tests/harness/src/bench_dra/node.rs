//! One node: a stand-in kubelet, the programs on it, and the calls of Berth's device plugin.

use super::Args;
use super::cluster::Cluster;
use super::driver::Driver;
use super::subject::{Places, Programs, Setup, Subject};
use crate::bench::disk;
use crate::bench::measure::Effort;
use crate::resources::Memory;
use anyhow::{Context as _, Result, bail, ensure};
use fakes::api::Api;
use fakes::{plugin, serving};
use kubelet_standin::proto::v1beta1::Empty;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use kubelet_standin::{HEALTHY, Kubelet, PodSpec};
use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::time::sleep;
use tonic::transport::Channel;

/// Longer than any step takes on any machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Until the kubelet has processed the end of a program, for which Berth waits before it registers.
const GONE: Duration = Duration::from_millis(300);
/// Of Berth's device plugin.
const RESOURCE: &str = "nvidia.com/gpu";
/// The variable of Berth's answer that names the allocation starts so.
const ALLOCATION_ID: &str = "BERTH_ALLOCATION_ID_";
/// Bytes at the end of a program's log that an error shows.
const LOG_BYTES: usize = 2_000;

/// What all measurements share.
pub(crate) struct Bench {
    pub(crate) programs: Programs,
    pub(crate) effort: Effort,
    pub(crate) cluster: Cluster,
    /// Runs only in `block_on`, so that no other thread delays a call.
    pub(crate) runtime: Runtime,
    disk: PathBuf,
    memory: PathBuf,
}

impl Bench {
    pub(crate) fn new(programs: Programs, effort: Effort, args: &Args) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let cluster = runtime.block_on(Cluster::new(&args.kubeconfig, &args.berth_kubeconfig))?;
        let (disk, memory) = (args.disk.clone(), args.memory.clone());
        ensure!(disk::is_in_memory(&memory)?, "{} does not lie in memory", memory.display());
        Ok(Self { programs, effort, cluster, runtime, disk, memory })
    }

    /// The kind of the disk's file system.
    pub(crate) fn disk(&self) -> Result<String> {
        disk::describe(&self.disk)
    }

    /// Waits without a call; the connections stay served.
    pub(crate) fn pause(&self, time: Duration) {
        self.runtime.block_on(async { sleep(time).await });
    }

    /// A pause until programs are at rest; short where figures mean nothing.
    pub(crate) fn rest(&self, time: Duration) {
        self.pause(match self.effort {
            Effort::Full => time,
            Effort::Glance => time / 10,
        });
    }
}

/// A node without programs.
pub(crate) struct Site<'b> {
    bench: &'b Bench,
    kubelet: Kubelet,
    places: Places,
    _disk: TempDir,
    _memory: TempDir,
}

impl<'b> Site<'b> {
    pub(crate) fn new(bench: &'b Bench) -> Result<Self> {
        let (disk, memory) = (TempDir::new_in(&bench.disk)?, TempDir::new_in(&bench.memory)?);
        let places = Places {
            kubelet: memory.path().join("kubelet"),
            cdi: memory.path().join("cdi"),
            disk: disk.path().to_owned(),
        };
        places.create()?;
        let kubelet = bench.runtime.block_on(Kubelet::started(&places.kubelet))?;
        Ok(Self { bench, kubelet, places, _disk: disk, _memory: memory })
    }

    /// Starts a Berth that knows the first GPUs of the node. Waits until the kubelet has their devices.
    pub(crate) fn berth(&self, setup: Setup) -> Result<Program> {
        if setup != Setup::First {
            self.berth(Setup::First)?.stop()?;
            let gone = self.kubelet.wait_for("its end", PATIENCE, |kubelet| !kubelet.is_served(RESOURCE));
            self.bench.runtime.block_on(gone)?;
            self.bench.pause(GONE);
        }
        let command = self.bench.programs.berth(setup, &self.places)?;
        let program = self.start(Subject::Berth, command)?;
        let devices = setup.plugin_devices();
        let known = self.kubelet.wait_allocatable(RESOURCE, devices, PATIENCE);
        let known = self.bench.runtime.block_on(known);
        known.with_context(|| format!("Berth does not register: {}", program.last_log()))?;
        Ok(program)
    }

    /// Starts NVIDIA's driver.
    pub(crate) fn nvidia(&self) -> Result<Program> {
        self.start(Subject::Nvidia, self.bench.programs.nvidia(&self.places)?)
    }

    fn start(&self, subject: Subject, mut command: Command) -> Result<Program> {
        let path = self.bench.programs.log(subject);
        let log = File::create(&path).with_context(|| format!("{}", path.display()))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        Ok(Program { subject, child, log: path })
    }

    /// Registers the program's driver. Answers it with the names of its devices, once they are published.
    pub(crate) fn driver(&self, program: &Program) -> Result<(Driver, Vec<String>)> {
        let subject = program.subject;
        let registered = async {
            let driver = Driver::registered(&self.places.registry(), subject.driver()).await?;
            let devices = self.bench.cluster.published(subject.driver(), subject.published()).await?;
            anyhow::Ok((driver, devices))
        };
        let registered = self.bench.runtime.block_on(registered);
        registered.with_context(|| format!("{subject}'s driver: {}", program.last_log()))
    }

    /// The device plugin of Berth.
    pub(crate) fn plugin(&self, berth: &Program) -> Result<Plugin<'_>> {
        let socket = self.kubelet.plugin_socket(RESOURCE).context("no plugin is registered")?;
        let runtime = &self.bench.runtime;
        let mut client = runtime.block_on(plugin::dial(&socket))?;
        // This call keeps the connection open: Berth closes one on which no call runs for some seconds.
        let mut lists = runtime.block_on(client.list_and_watch(Empty {}))?.into_inner();
        runtime.spawn(async move { while let Ok(Some(_)) = lists.message().await {} });
        let api = Api::of_file(berth.admin_address()?, self.places.state().join("token"));
        // An Allocate needs a healthy device.
        let listed = self.kubelet.listed(RESOURCE).into_iter().filter(|(_, health)| health == HEALTHY);
        let ids = listed.map(|(id, _)| id).collect();
        Ok(Plugin { bench: self.bench, kubelet: &self.kubelet, client, api, ids, admitted: 0 })
    }
}

impl Drop for Site<'_> {
    fn drop(&mut self) {
        self.bench.runtime.block_on(self.kubelet.stop());
    }
}

/// A program that runs. Killed when dropped.
pub(crate) struct Program {
    subject: Subject,
    child: Child,
    log: PathBuf,
}

impl Program {
    pub(crate) fn subject(&self) -> Subject {
        self.subject
    }

    /// Its share of the memory that it has mapped, bytes.
    pub(crate) fn memory(&self) -> Result<f64> {
        Ok(Memory::of(self.child.id())?.share as f64)
    }

    /// The address of Berth's admin API, which its log names.
    fn admin_address(&self) -> Result<std::net::SocketAddr> {
        let until = Instant::now() + PATIENCE;
        loop {
            let log = std::fs::read_to_string(&self.log)?;
            if let Some(origin) = log.lines().find_map(serving::origin) {
                let (_, address) = origin.split_once("://").context("no URL")?;
                return Ok(address.parse()?);
            }
            if Instant::now() > until {
                bail!("its admin API does not start: {}", self.last_log());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The end of its log.
    fn last_log(&self) -> String {
        let log = std::fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_BYTES)..]).into_owned()
    }

    /// Ends it as the kubelet ends a pod.
    pub(crate) fn stop(mut self) -> Result<()> {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "{} ended with {status}: {}", self.subject, self.last_log());
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Berth's device plugin, and the one client of its socket.
pub(crate) struct Plugin<'s> {
    bench: &'s Bench,
    kubelet: &'s Kubelet,
    client: DevicePluginClient<Channel>,
    api: Api,
    ids: Vec<String>,
    admitted: usize,
}

impl Plugin<'_> {
    /// One Allocate of one GPU, whose pod then runs and ends. Answers how long the call took.
    pub(crate) fn allocate(&mut self) -> Result<Duration> {
        let id = &self.ids[self.admitted % self.ids.len()];
        let ids = std::slice::from_ref(id);
        let (took, response) = self.bench.runtime.block_on(plugin::allocate(&mut self.client, ids))?;
        let allocation = response.envs.iter().find(|(key, _)| key.starts_with(ALLOCATION_ID));
        let allocation = allocation.map(|(_, id)| id.clone()).context("an answer without an allocation")?;
        self.admitted += 1;
        let pod = PodSpec::new("machine-learning", &format!("learner-{:05}", self.admitted));
        let pod = pod.container("main", &[(RESOURCE, 1)]);
        let uid = pod.uid.clone();
        self.kubelet.run_allocated(pod, RESOURCE, ids, response)?;
        self.kubelet.finish(&uid);
        self.kubelet.delete(&uid);
        // Otherwise the allocation ends only after two reconcile passes without the pod.
        let path = format!("/allocations/{allocation}?force=true");
        self.bench.runtime.block_on(self.api.delete(&path))?;
        Ok(took)
    }

    /// How many allocations Berth holds.
    pub(crate) fn live(&self) -> Result<usize> {
        let list = self.bench.runtime.block_on(self.api.get("/allocations?limit=1000"))?;
        Ok(list["items"].as_array().context("no list of allocations")?.len())
    }
}
