//! Allocates at a steady rate, one after the other as a kubelet sends them, each ended again by an operator.

use crate::load_admin::node::{Node, SHARED};
use anyhow::{Context as _, ensure};
use fakes::plugin;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use std::iter::Cycle;
use std::time::{Duration, Instant};
use std::vec::IntoIter;
use tokio::runtime::{Builder, Runtime};
use tonic::transport::Channel;

/// The environment variable that names the allocation.
const ID: &str = "BERTH_ALLOCATION_ID_NVIDIA_COM_GPU_SHARED";

/// The kubelet's part.
pub(crate) struct Allocates {
    /// Runs only while a call is waited for.
    runtime: Runtime,
    client: DevicePluginClient<Channel>,
    /// Devices that no pod holds, in turn.
    free: Cycle<IntoIter<String>>,
    every: Duration,
    agent: ureq::Agent,
    origin: String,
    authorization: String,
}

impl Allocates {
    pub(crate) fn new(node: &Node, per_second: u64) -> anyhow::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let socket = plugin::socket(&node.kubelet_dir(), SHARED);
        let client = runtime.block_on(plugin::dial(&socket))?;
        let held = node.kubelet.in_use(SHARED);
        let mut free: Vec<_> =
            node.kubelet.listed(SHARED).into_keys().filter(|id| !held.contains(id)).collect();
        free.sort_unstable();
        ensure!(!free.is_empty(), "no device of {SHARED} is free");
        Ok(Self {
            runtime,
            client,
            free: free.into_iter().cycle(),
            every: Duration::from_secs(1) / u32::try_from(per_second)?,
            agent: node.agent()?,
            origin: node.serving.origin.clone(),
            authorization: format!("Bearer {}", node.token),
        })
    }

    /// Asks for so long. Answers how long each Allocate took, from the call to its answer: a kubelet asks
    /// one at a time, so that no request waits before it is sent.
    pub(crate) fn run(&mut self, length: Duration) -> anyhow::Result<Vec<Duration>> {
        let (began, mut took) = (Instant::now(), Vec::new());
        let mut due = Duration::ZERO;
        while due < length {
            std::thread::sleep(due.saturating_sub(began.elapsed()));
            let id = self.free.next().context("no device")?;
            let (time, answer) = self.runtime.block_on(plugin::allocate(&mut self.client, &[id]))?;
            took.push(time);
            let allocation = answer.envs.get(ID).with_context(|| format!("no {ID} in the answer"))?;
            let url = format!("{}/api/v1/allocations/{allocation}?force=true", self.origin);
            self.agent.delete(&url).header("Authorization", &self.authorization).call()?;
            // Where one came late the next ones keep their distance: a burst would only find a warm daemon.
            due = (due + self.every).max(began.elapsed());
        }
        Ok(took)
    }
}
