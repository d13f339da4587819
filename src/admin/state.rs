//! The state that all handlers share, and the facts about the daemon besides the ledger. Other crates have these, and
//! the daemon collects them.

use crate::allocation_cache::JsonCache;
use crate::event_feed::Feed;
use crate::survey::Surveys;
use berth_api::{ConfigurationState, Kind};
use berth_core::metrics::Metrics;
use berth_core::{Core, DriverAccess, KernelHandle, Lab, PolicyService};
use berth_http::{Context, Failure};
use berth_kernel::drain::eviction::EvictionOutcome;
use berth_kernel::evidence::pods::Pod;
use berth_kernel::ids::names::Resource;
use berth_kernel::ids::time::Now;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Shared by all workers.
pub(crate) struct State {
    pub(crate) kernel: KernelHandle,
    pub(crate) policies: PolicyService,
    pub(crate) lab: Lab,
    pub(crate) driver: DriverAccess,
    pub(crate) metrics: Metrics,
    pub(crate) facts: FactsSource,
    pub(crate) http: Arc<Context>,
    pub(crate) caches: Caches,
    /// Permits of uploads.
    pub(crate) upload_permits: UploadPermits,
    /// The newest events of the node.
    pub(crate) feed: Feed,
    /// When the daemon started.
    pub(crate) started: Now,
    /// `None` without an API server.
    pub(crate) eviction_previews: Option<EvictionPreviews>,
}

/// Results that requests share.
#[derive(Default)]
pub(crate) struct Caches {
    /// Device counts of the newest snapshot.
    pub(crate) surveys: Surveys,
    /// Allocations as JSON texts.
    pub(crate) allocations: JsonCache,
}

/// Previews of drains that ask the API server.
pub(crate) struct EvictionPreviews {
    pub(crate) dry_run: EvictionDryRun,
    /// Held by the preview that asks.
    pub(crate) turn: tokio::sync::Mutex<()>,
}

/// Asks the API server whether it would evict a pod now, without evicting it.
pub type EvictionDryRun = Arc<dyn Fn(Arc<Pod>) -> BoxFuture<'static, EvictionOutcome> + Send + Sync>;

impl State {
    pub(crate) fn new(
        facts: FactsSource,
        http: Arc<Context>,
        core: Core,
        eviction_dry_run: Option<EvictionDryRun>,
    ) -> Self {
        let started = core.kernel.now();
        Self {
            metrics: Metrics::new(&core),
            feed: Feed::new(started),
            started,
            kernel: core.kernel,
            policies: core.policies,
            lab: core.lab,
            driver: core.driver,
            facts,
            http,
            caches: Caches::default(),
            upload_permits: UploadPermits::default(),
            eviction_previews: eviction_dry_run
                .map(|dry_run| EvictionPreviews { dry_run, turn: tokio::sync::Mutex::default() }),
        }
    }
}

/// Collects the facts for a request; must not block.
pub type FactsSource = Arc<dyn Fn() -> NodeFacts + Send + Sync>;

/// The facts about the daemon at one moment.
#[derive(Clone, Debug, Default)]
pub struct NodeFacts {
    /// The node's name.
    pub name: String,
    /// The backend of the GPUs.
    pub backend: GpuBackend,
    /// How GPUs are passed to containers, once it is decided.
    pub device_list_strategy: Option<berth_api::DeviceListStrategy>,
    /// Whether the GPUs were scanned.
    pub gpus: StartStep,
    /// Whether the devices of running pods were adopted.
    pub adoption: StartStep,
    /// The connection to the kubelet.
    pub kubelet: StartStep,
    /// The registration of each resource: whether the kubelet accepted it and watches its devices.
    pub registrations: BTreeMap<Resource, StartStep>,
    /// Resources whose containers are set up for MPS.
    pub mps: BTreeSet<Resource>,
    /// The connection to the API server; `None` if it is not used.
    pub api_server: Option<StartStep>,
    /// The guard; `None` where no daemon follows one.
    pub guard: Option<berth_api::Guard>,
    /// The DRA driver; `None` if it is not enabled.
    pub dra: Option<berth_api::Dra>,
    /// The GPUNode and the GPUMaintenances of the node; `None` if `fleet.enabled` is false.
    pub fleet: Option<berth_api::Fleet>,
    /// The name of the stack that the GPUNode of the node names; `None` if it names none.
    pub fleet_stack: Option<String>,
    /// The owners of the marks of the GPUMaintenances and of the DeviceTaintRules that exist.
    pub marking_objects: Vec<Arc<BTreeSet<String>>>,
    /// Why a policy of the active stack cannot be called, if so. The daemon retries.
    pub uncallable: Option<String>,
    /// Whether the node's labels are up to date; `None` if labels are not configured.
    pub labels: Option<StartStep>,
    /// The configuration file; `None` without one.
    pub configuration: Option<ConfigurationState>,
}

/// The backend of the GPUs.
#[derive(Clone, Debug, Default)]
pub struct GpuBackend {
    /// Where GPUs come from: `NVML at /usr/lib/...`, `8 simulated H100`.
    pub source: String,
    /// Driver version, if it has one.
    pub driver_version: Option<String>,
    /// CUDA version of the driver, if it has one.
    pub cuda_version: Option<String>,
}

/// A step of the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartStep {
    /// It is done.
    Done,
    /// It is not, with the reason, and with what to do if an operator has to act.
    Waiting(String),
}

impl StartStep {
    /// What it waits for, if it is not done.
    pub(crate) fn waiting(&self) -> Option<String> {
        match self {
            Self::Done => None,
            Self::Waiting(why) => Some(why.clone()),
        }
    }
}

impl Default for StartStep {
    fn default() -> Self {
        Self::Waiting("not begun".into())
    }
}

/// Concurrent uploads: each holds up to 32 MiB, and only one is compiled at a time.
const PERMITS: usize = 2;

/// When to retry while uploads are under way, seconds: most policies compile in that time.
const RETRY_S: u64 = 5;

/// Permits for uploads. An upload has its permit before its body is read, which may take a minute and 32 MiB, so no
/// caller has both permits: the other one is always left for another caller.
///
/// The callers whose uploads are under way, by [`berth_http::Caller::key`].
#[derive(Default)]
pub(crate) struct UploadPermits(Mutex<Vec<String>>);

/// A permit, given back when it is dropped.
pub(crate) struct Permit<'p> {
    permits: &'p UploadPermits,
    caller: String,
}

impl UploadPermits {
    /// Takes a permit for this caller.
    ///
    /// # Errors
    /// [`Kind::Busy`] if an upload of the same caller is under way, or all permits are taken.
    pub(crate) fn take(&self, caller: String) -> Result<Permit<'_>, Failure> {
        let mut taken = self.0.lock();
        let problem = if taken.contains(&caller) {
            Failure::new(
                Kind::Busy,
                "another upload of the same caller is in progress; each caller may have one at a time",
            )
            .hint("send this upload when the other one was answered")
        } else if taken.len() >= PERMITS {
            Failure::new(Kind::Busy, "uploads of other callers are in progress")
        } else {
            taken.push(caller.clone());
            return Ok(Permit { permits: self, caller });
        };
        Err(problem.retry_after(RETRY_S))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.permits.0.lock().retain(|caller| *caller != self.caller);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_caller_has_both_permits_and_each_gives_its_own_back() {
        let permits = UploadPermits::default();
        let take = |caller: &str| {
            permits.take(caller.into()).map_err(|failure| (failure.problem.status, failure.problem.detail))
        };
        let first = take("token a").unwrap();
        let (status, detail) = take("token a").err().unwrap();
        assert!(status == 503 && detail.contains("same caller"), "{status} {detail}");
        let second = take("certificate a").unwrap();
        let (status, detail) = take("token b").err().unwrap();
        assert!(status == 503 && detail.contains("other callers"), "{status} {detail}");
        drop(first);
        let third = take("token b").unwrap();
        assert_eq!(take("certificate a").err().unwrap().0, 503);
        drop((second, third));
        assert!(permits.0.lock().is_empty());
    }
}
