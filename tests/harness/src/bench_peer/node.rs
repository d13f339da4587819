//! The stand-in kubelet, a program under it, and the pods whose devices are asked for.

use crate::bench::disk;
use crate::bench::measure::Effort;
use crate::bench_peer::subject::{KUBELET_DIR, Programs, Setup, Subject};
use crate::resources::{self, Memory, Threads};
use anyhow::{Context as _, Result, bail, ensure};
use fakes::api::Api;
use fakes::{plugin, serving};
use kubelet_standin::proto::v1beta1::Empty;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use kubelet_standin::{Kubelet, PodSpec};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::Channel;

/// Longer than any step takes on any machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long after a program's end the next one is started: until the kubelet has processed it, for which Berth waits
/// 250 ms before it registers.
const GONE: Duration = Duration::from_millis(300);
/// The variable of Berth's answer that names the allocation starts so.
const ALLOCATION_ID: &str = "BERTH_ALLOCATION_ID_";
/// Bytes at the end of a program's log that an error shows.
const LOG_BYTES: usize = 2_000;

/// What all measurements share.
pub(crate) struct Bench {
    pub(crate) programs: Programs,
    pub(crate) effort: Effort,
    /// Bytes of records that an Allocate appends to Berth's store.
    pub(crate) bytes: usize,
    /// Runs only while a call is waited for: a call passes through no other thread of this program.
    runtime: Runtime,
    disk: TempDir,
}

impl Bench {
    pub(crate) fn new(programs: Programs, effort: Effort, bytes: usize) -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        Ok(Self { programs, effort, bytes, runtime, disk: disk::folder()? })
    }

    /// The kind of the disk's file system.
    pub(crate) fn disk(&self) -> Result<String> {
        disk::describe(self.disk.path())
    }

    /// A new folder on the disk.
    pub(crate) fn on_disk(&self) -> Result<TempDir> {
        Ok(TempDir::new_in(self.disk.path())?)
    }

    /// A new folder in memory.
    pub(crate) fn in_memory(&self) -> Result<TempDir> {
        Ok(TempDir::new_in(self.programs.folder())?)
    }

    /// Leaves the machine alone.
    pub(crate) fn rest(&self, time: Duration) {
        std::thread::sleep(match self.effort {
            Effort::Full => time,
            Effort::Glance => time / 10,
        });
    }
}

/// A kubelet without plugins.
pub(crate) struct Site<'b> {
    bench: &'b Bench,
    kubelet: Kubelet,
}

impl<'b> Site<'b> {
    pub(crate) fn new(bench: &'b Bench) -> Result<Self> {
        // The folder itself is known to be ours (`Programs::new`); what the last kubelet left would be taken over.
        for entry in std::fs::read_dir(KUBELET_DIR)? {
            std::fs::remove_dir_all(entry?.path())?;
        }
        let kubelet = bench.runtime.block_on(Kubelet::started(KUBELET_DIR))?;
        Ok(Self { bench, kubelet })
    }

    /// Starts the program. Answers how long it took until the kubelet knew all devices.
    pub(crate) fn serve(
        &self,
        subject: Subject,
        setup: Setup,
        state: &Path,
    ) -> Result<(Serving<'_, 'b>, Duration)> {
        let programs = &self.bench.programs;
        let mut command = programs.command(subject, setup, state)?;
        let log = File::create(programs.log(subject))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let began = Instant::now();
        let child = command.spawn().with_context(|| format!("cannot start {command:?}"))?;
        let serving = Serving {
            site: self,
            subject,
            setup,
            child,
            token: state.join("token"),
            client: None,
            api: None,
            pods: Vec::new(),
            admitted: 0,
        };
        let known = self.kubelet.wait_allocatable(setup.resource(subject), setup.devices(), PATIENCE);
        let known = self.bench.runtime.block_on(known);
        let took = began.elapsed();
        known.with_context(|| format!("{subject} does not register: {}", serving.last_log()))?;
        Ok((serving, took))
    }
}

impl Drop for Site<'_> {
    fn drop(&mut self) {
        self.bench.runtime.block_on(self.kubelet.stop());
    }
}

/// A pod that runs.
struct Pod {
    uid: String,
    /// Berth's, of its devices.
    allocation: Option<String>,
}

/// A program that runs, and its pods. Killed when dropped.
pub(crate) struct Serving<'s, 'b> {
    site: &'s Site<'b>,
    subject: Subject,
    setup: Setup,
    child: Child,
    /// The file with the token of Berth's admin API.
    token: PathBuf,
    client: Option<DevicePluginClient<Channel>>,
    api: Option<Api>,
    pods: Vec<Pod>,
    admitted: usize,
}

impl Serving<'_, '_> {
    pub(crate) fn subject(&self) -> Subject {
        self.subject
    }

    fn resource(&self) -> &'static str {
        self.setup.resource(self.subject)
    }

    /// The ids of all devices, sorted.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.site.kubelet.listed(self.resource()).into_keys().collect()
    }

    pub(crate) fn threads(&self) -> Result<Threads> {
        Threads::of(self.child.id())
    }

    pub(crate) fn processor_time(&self) -> Result<Duration> {
        resources::processor_time(self.child.id())
    }

    pub(crate) fn memory(&self) -> Result<Memory> {
        Memory::of(self.child.id())
    }

    /// One Allocate for one container, whose pod then runs: the kubelet lists it, and its checkpoint is written.
    /// Answers how long the call took.
    pub(crate) fn allocate(&mut self, ids: &[String]) -> Result<Duration> {
        let resource = self.resource();
        let runtime = &self.site.bench.runtime;
        let client = client(&mut self.client, self.site, resource)?;
        let called = runtime.block_on(plugin::allocate(client, ids));
        let (took, response) =
            called.with_context(|| format!("Allocate of {}: {}", self.subject, self.last_log()))?;
        let allocation = response.envs.iter().find(|(key, _)| key.starts_with(ALLOCATION_ID));
        let allocation = allocation.map(|(_, id)| id.clone());
        ensure!(
            allocation.is_some() == (self.subject == Subject::Berth),
            "the answer of {} names this allocation: {allocation:?}",
            self.subject
        );
        self.admitted += 1;
        // Both programs may have pods under one kubelet, whose names differ.
        let owner = if self.subject == Subject::Nvidia { "trainer" } else { "learner" };
        let name = format!("{owner}-7c9d8f6b5-{:05}", self.admitted);
        let pod = PodSpec::new("machine-learning", &name).container("main", &[(resource, ids.len())]);
        self.pods.push(Pod { uid: pod.uid.clone(), allocation });
        self.site.kubelet.run_allocated(pod, resource, ids, response)?;
        Ok(took)
    }

    /// One GetPreferredAllocation for one container. Answers how long it took.
    pub(crate) fn prefer(&mut self, from: &[String], size: usize) -> Result<Duration> {
        let client = client(&mut self.client, self.site, self.setup.resource(self.subject))?;
        self.site.bench.runtime.block_on(plugin::prefer(client, from, size))
    }

    pub(crate) fn pods(&self) -> usize {
        self.pods.len()
    }

    /// Ends the newest pods, so that so many are left. Of Berth, their allocations are ended as an operator ends them:
    /// by itself it waits until two passes over the kubelet's records have not shown the pod, half a minute after its
    /// start.
    pub(crate) fn end_pods(&mut self, left: usize) -> Result<()> {
        for pod in self.pods.split_off(left.min(self.pods.len())) {
            self.site.kubelet.finish(&pod.uid);
            self.site.kubelet.delete(&pod.uid);
            if let Some(id) = pod.allocation {
                let api = self.api()?;
                let path = format!("/allocations/{id}?force=true");
                self.site.bench.runtime.block_on(api.delete(&path))?;
            }
        }
        Ok(())
    }

    /// Checks that Berth holds an allocation for each pod and no other.
    pub(crate) fn check_allocations(&mut self) -> Result<()> {
        if self.subject == Subject::Berth {
            let api = self.api()?;
            let list = self.site.bench.runtime.block_on(api.get("/allocations?limit=1000"))?;
            let items = list["items"].as_array().context("no list of allocations")?.iter();
            let live: BTreeSet<&str> = items.filter_map(|item| item["id"].as_str()).collect();
            let held: BTreeSet<&str> = self.pods.iter().filter_map(|pod| pod.allocation.as_deref()).collect();
            ensure!(
                live == held,
                "{} pods run, and Berth holds {} allocations: {} are missing, {} have no pod",
                held.len(),
                live.len(),
                held.difference(&live).count(),
                live.difference(&held).count()
            );
        }
        Ok(())
    }

    fn api(&mut self) -> Result<Api> {
        if let Some(api) = &self.api {
            return Ok(api.clone());
        }
        let until = Instant::now() + PATIENCE;
        let origin = loop {
            let log = std::fs::read_to_string(self.site.bench.programs.log(self.subject))?;
            match log.lines().find_map(serving::origin) {
                Some(origin) => break origin,
                None if Instant::now() > until => bail!("its admin API does not start: {}", self.last_log()),
                None => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let (_, address) = origin.split_once("://").context("no URL")?;
        let api = Api::of_file(address.parse()?, self.token.clone());
        self.api = Some(api.clone());
        Ok(api)
    }

    /// The end of its log.
    fn last_log(&self) -> String {
        let log = std::fs::read(self.site.bench.programs.log(self.subject)).unwrap_or_default();
        String::from_utf8_lossy(&log[log.len().saturating_sub(LOG_BYTES)..]).into_owned()
    }

    /// Ends it as the kubelet ends a pod, and waits until the kubelet has noticed. Answers how long the program took.
    pub(crate) fn stop(mut self) -> Result<Duration> {
        let began = Instant::now();
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM)?;
        let status = self.child.wait()?;
        let took = began.elapsed();
        ensure!(status.success(), "{} ended with {status}: {}", self.subject, self.last_log());
        let resource = self.resource();
        let gone = self.site.kubelet.wait_for("its end", PATIENCE, |kubelet| !kubelet.is_served(resource));
        self.site.bench.runtime.block_on(gone)?;
        std::thread::sleep(GONE);
        Ok(took)
    }
}

impl Drop for Serving<'_, '_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The one client of the plugin's socket, dialled when it is needed first.
fn client<'c>(
    client: &'c mut Option<DevicePluginClient<Channel>>,
    site: &Site<'_>,
    resource: &str,
) -> Result<&'c mut DevicePluginClient<Channel>> {
    if client.is_none() {
        let socket = site.kubelet.plugin_socket(resource).context("no plugin is registered")?;
        let runtime = &site.bench.runtime;
        let mut dialled = runtime.block_on(plugin::dial(&socket))?;
        // Open like the kubelet's: Berth closes a connection on which no call runs for some seconds.
        let mut lists = runtime.block_on(dialled.list_and_watch(Empty {}))?.into_inner();
        runtime.spawn(async move { while let Ok(Some(_)) = lists.message().await {} });
        *client = Some(dialled);
    }
    client.as_mut().context("no client")
}
