//! Prepares and unprepares claims.
//!
//! The kubelet makes calls at the same time: for different pods, for two pods that share a claim, and, before Kubernetes
//! 1.37, to prepare a claim that it is unpreparing.
//! Calls for one claim are answered one after another, and an unprepare voids every prepare that came before it.
//! The kubelet waits 45 s for a call, and after an error it tries again only a minute later. So a call whose devices are
//! still held waits for the holder's end.

use super::DriverSettings;
use super::cdi::Specifications;
use super::claims::{
    BadClaim, ChosenShares, ClaimReader, ClaimedDevice, devices_here, published_name, to_prepare,
};
use crate::connections::Call;
use berth_core::KernelHandle;
use berth_core::keeper::{CommandError, Snapshot};
use berth_kernel::evidence::running::running_sources;
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::grants::claim::{Claim as KernelClaim, ClaimOfServer, ClaimRequest, is_uid};
use berth_kernel::grants::prepare::{allocations_of, claims_with_outdated_pods};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::refusal::Refusal;
use berth_observe::counters::Rpc;
use berth_proto::dra::dra_plugin_server::{DraPlugin, DraPluginServer};
use berth_proto::dra::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest, NodePrepareResourcesResponse,
    NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest, NodeUnprepareResourcesResponse,
};
use futures_util::future::join_all;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tonic::{Code, Request, Response, Status};

/// Most claims of one call; in practice a pod has a few.
const CLAIMS_MAX: usize = 256;
/// The largest request: each claim has a namespace, a name and a UID of at most 63, 253 and 36 bytes.
const REQUEST_BYTES_MAX: usize = 1024 * 1024;
/// The longest wait for a claim from the API server.
const READ_MAX: Duration = Duration::from_secs(10);
/// The most claims that are read at a time, since a read that finds no free connection to the API server opens another one, with
/// a TLS handshake.
const READS_MAX: usize = 8;
/// The wait before a command is tried again that did not reach the ledger.
const RETRY: Duration = Duration::from_millis(500);
/// How often it is checked in [`DriverSettings::gone_after`] whether the API server still has a claim.
const GONE_CHECKS: u32 = 10;
/// Most commands at a time that wait for the keeper, so that a burst of claims does not fill its inbox and make it refuse an
/// Allocate, which the kubelet does not repeat.
const COMMANDS_MAX: usize = 16;
/// The wait before a release that could not be recorded is tried again, and before a claim whose recorded pods are outdated is
/// read for the second time.
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// The longest wait before a claim whose recorded pods are outdated is read again.
const PODS_RETRY_MAX: Duration = Duration::from_secs(60);

/// The server of the driver's API.
pub(super) fn server(driver: &Arc<Driver>) -> DraPluginServer<Service> {
    DraPluginServer::new(Service(Arc::clone(driver))).max_decoding_message_size(REQUEST_BYTES_MAX)
}

/// The gRPC service.
pub(super) struct Service(Arc<Driver>);

/// Prepares and unprepares claims; shared by all connections.
pub(super) struct Driver {
    settings: Arc<DriverSettings>,
    kernel: KernelHandle,
    claims: Arc<dyn ClaimReader>,
    specifications: Arc<Specifications>,
    calls: Mutex<BTreeMap<String, Arc<CallsOfClaim>>>,
    /// The shares that attempts under way have chosen.
    chosen: Mutex<ChosenShares>,
    /// UIDs of claims whose release could not be recorded.
    unreleased: Mutex<BTreeSet<String>>,
    /// See [`READS_MAX`].
    reads: Semaphore,
    /// See [`COMMANDS_MAX`].
    commands: Semaphore,
}

/// The calls for one claim that are being answered.
#[derive(Default)]
struct CallsOfClaim {
    /// Held while a command for the claim is under way.
    turn: tokio::sync::Mutex<()>,
    /// How many unprepares have come.
    unprepares: Mutex<u64>,
}

/// The shares that an attempt has chosen; others can choose them once it is dropped.
struct ChosenByAttempt<'d> {
    driver: &'d Driver,
    own: ChosenShares,
}

impl Drop for ChosenByAttempt<'_> {
    fn drop(&mut self) {
        self.driver.chosen.lock().retain(|id| !self.own.contains(id));
    }
}

/// Why a claim is not prepared.
#[derive(Debug, thiserror::Error)]
enum PrepareError {
    #[error(transparent)]
    BadClaim(#[from] BadClaim),
    #[error("the claim could not be read from the API server: {0}")]
    NoServer(String),
    #[error("{0}")]
    Command(CommandError),
    #[error("its devices were not free in time: {0}")]
    Held(Refusal),
    #[error("the kubelet has unprepared the claim meanwhile")]
    Voided,
    #[error(
        "a claim gets its devices by CDI, and `containerEdits.deviceListStrategy` has no CDI strategy on this node \
         (`berth node check` shows why)"
    )]
    NoCdi,
    #[error("the files of the claim could not be written: {0}")]
    Specification(std::io::Error),
}

#[tonic::async_trait]
impl DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let _call = Call::begin(&request);
        let counted = self.0.kernel.counters().kubelet.begin(Rpc::NodePrepareResources);
        let answered = self.0.prepare_all(request.into_inner().claims).await;
        let code = match &answered {
            Ok(claims) if claims.values().all(|response| response.error.is_empty()) => Code::Ok,
            Ok(_) => Code::FailedPrecondition,
            Err(status) => status.code(),
        };
        counted.end(code.into());
        answered.map(|claims| Response::new(NodePrepareResourcesResponse { claims }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let _call = Call::begin(&request);
        let counted = self.0.kernel.counters().kubelet.begin(Rpc::NodeUnprepareResources);
        let answered = self.0.unprepare_all(request.into_inner().claims).await;
        counted.end(answered.as_ref().map_or_else(Status::code, |_| Code::Ok).into());
        answered.map(|claims| Response::new(NodeUnprepareResourcesResponse { claims }))
    }
}

/// Whether a source shows a pod, a container or a process of the claim.
fn is_in_use(ledger: &Snapshot, uid: &str, now: Now) -> bool {
    allocations_of(ledger, uid)
        .into_iter()
        .any(|allocation| !running_sources(ledger, allocation, now).is_empty())
}

fn checked(claims: Vec<Claim>) -> Result<Vec<Claim>, Status> {
    if claims.len() > CLAIMS_MAX {
        return Err(Status::invalid_argument(format!("more than {CLAIMS_MAX} claims in one call")));
    }
    if let Some(claim) = claims.iter().find(|claim| !is_uid(&claim.uid)) {
        return Err(Status::invalid_argument(format!("claim {:?} has no valid UID", claim.name)));
    }
    Ok(claims)
}

impl Driver {
    pub(super) fn new(
        settings: Arc<DriverSettings>,
        kernel: KernelHandle,
        claims: Arc<dyn ClaimReader>,
        specifications: Arc<Specifications>,
    ) -> Self {
        let (calls, chosen, unreleased) = Default::default();
        let (reads, commands) = (Semaphore::new(READS_MAX), Semaphore::new(COMMANDS_MAX));
        Self { settings, kernel, claims, specifications, calls, chosen, unreleased, reads, commands }
    }

    fn calls_of(&self, uid: &str) -> Arc<CallsOfClaim> {
        let mut all = self.calls.lock();
        // Those of claims without a call are forgotten.
        all.retain(|_, calls| Arc::strong_count(calls) > 1);
        Arc::clone(all.entry(uid.to_owned()).or_default())
    }

    /// The responses for the claims of one call, by their UIDs.
    async fn prepare_all(
        self: &Arc<Self>,
        claims: Vec<Claim>,
    ) -> Result<HashMap<String, NodePrepareResourceResponse>, Status> {
        let arrived = Instant::now();
        let claims = checked(claims)?;
        let answers = claims.iter().map(|claim| async move {
            let response = match self.prepare(claim, arrived).await {
                Ok(devices) => NodePrepareResourceResponse { devices, error: String::new() },
                Err(error) => {
                    let (namespace, name) = (&claim.namespace, &claim.name);
                    tracing::warn!(namespace, claim = name, %error, "a claim was not prepared");
                    NodePrepareResourceResponse { devices: Vec::new(), error: error.to_string() }
                }
            };
            (claim.uid.clone(), response)
        });
        Ok(join_all(answers).await.into_iter().collect())
    }

    async fn prepare(self: &Arc<Self>, claim: &Claim, arrived: Instant) -> Result<Vec<Device>, PrepareError> {
        let calls = self.calls_of(&claim.uid);
        let unprepares = *calls.unprepares.lock();
        let deadline = arrived + self.settings.wait_max;
        let is_prepared = !allocations_of(&self.kernel.snapshot(), &claim.uid).is_empty();
        // The record answers for a claim that is prepared, so its call need not wait for a slow API server.
        let begin_before =
            if is_prepared { arrived + READ_MAX } else { deadline - READ_MAX.min(self.settings.wait_max) };
        let why = match self.read(&claim.namespace, &claim.name, begin_before).await {
            Ok(read) => {
                let read = read.filter(|read| read.claim.uid == claim.uid);
                let read =
                    read.ok_or_else(|| BadClaim::Gone(format!("{}/{}", claim.namespace, claim.name)))?;
                if !self.settings.edits.borrow().strategies.iter().any(|strategy| strategy.is_cdi()) {
                    return Err(PrepareError::NoCdi);
                }
                return self.grant(read, calls, unprepares, deadline).await;
            }
            Err(why) => why,
        };
        let _turn = calls.turn.lock().await;
        if *calls.unprepares.lock() != unprepares {
            return Err(PrepareError::Voided);
        }
        self.answer_of_record(claim, why).await
    }

    /// Reads a claim from the API server. [`READS_MAX`] reads run at a time: it fails if they leave no room before `begin_before`.
    async fn read(
        &self,
        namespace: &str,
        name: &str,
        begin_before: Instant,
    ) -> Result<Option<ClaimOfServer>, String> {
        let Ok(_place) = timeout_at(begin_before, self.reads.acquire()).await else {
            return Err(format!("{READS_MAX} reads of other claims did not end in time"));
        };
        let late = |_| Err(format!("no answer within {} s", READ_MAX.as_secs()));
        timeout(READ_MAX, self.claims.read(namespace, name)).await.unwrap_or_else(late)
    }

    /// Grants a claim its devices; waits for holders of them until `deadline`.
    async fn grant(
        self: &Arc<Self>,
        claim: ClaimOfServer,
        calls: Arc<CallsOfClaim>,
        unprepares: u64,
        deadline: Instant,
    ) -> Result<Vec<Device>, PrepareError> {
        let mut snapshots = self.kernel.watch();
        loop {
            snapshots.mark_unchanged();
            // A task of its own: if the kubelet leaves the call, an unprepare still comes after what this has submitted.
            let attempt = Arc::clone(self).attempt(claim.clone(), Arc::clone(&calls), unprepares);
            let attempted = tokio::spawn(attempt).await;
            let error = match attempted.unwrap_or(Err(PrepareError::Command(CommandError::Stopping))) {
                Ok(devices) => return Ok(devices),
                Err(
                    error @ (PrepareError::Held(_)
                    | PrepareError::Command(CommandError::Busy | CommandError::Late(_))),
                ) => error,
                Err(error) => return Err(error),
            };
            if Instant::now() >= deadline {
                return Err(error);
            }
            if matches!(error, PrepareError::Held(_)) {
                // The ledger shows when the holder has ended.
                if timeout_at(deadline, snapshots.changed()).await.is_err() {
                    return Err(error);
                }
            } else {
                sleep(RETRY).await;
            }
        }
    }

    /// Grants a claim its devices if they are free, and writes its specification.
    async fn attempt(
        self: Arc<Self>,
        claim: ClaimOfServer,
        calls: Arc<CallsOfClaim>,
        unprepares: u64,
    ) -> Result<Vec<Device>, PrepareError> {
        let _turn = calls.turn.lock().await;
        if *calls.unprepares.lock() != unprepares {
            return Err(PrepareError::Voided);
        }
        let (devices, _chosen) = self.choose(&claim)?;
        let permit = self.commands.acquire().await;
        let prepared = self.kernel.prepare(to_prepare(&claim, &devices)).await;
        drop(permit);
        let prepared = match prepared {
            Ok(prepared) => prepared,
            Err(CommandError::Refused(
                refusal @ (Refusal::Held { .. } | Refusal::DoesNotFit { .. } | Refusal::Moved),
            )) => return Err(PrepareError::Held(refusal)),
            Err(error) => return Err(PrepareError::Command(error)),
        };
        let uid = &claim.claim.uid;
        self.unreleased.lock().remove(uid);
        let written = self.specifications.write(uid, &prepared.snapshot).await;
        written.map_err(PrepareError::Specification)?;
        Ok(self.response(&devices, &prepared.allocations, &prepared.snapshot))
    }

    /// The devices of a claim. Other attempts choose other shares until the second value is dropped.
    fn choose(&self, claim: &ClaimOfServer) -> Result<(Vec<ClaimedDevice>, ChosenByAttempt<'_>), BadClaim> {
        let mut chosen = self.chosen.lock();
        // Read while `chosen` is locked: what an earlier attempt chose is in this snapshot, or still in `chosen`.
        let ledger = self.kernel.snapshot();
        let devices = devices_here(&ledger, claim, &self.settings.driver, &self.settings.node, &chosen)?;
        let ids = devices
            .iter()
            .flat_map(|device| device.ids.iter().map(|id| (device.resource.clone(), id.clone())));
        let own: ChosenShares = ids.filter(|id| id.1.share.is_some() && !chosen.contains(id)).collect();
        chosen.extend(own.iter().cloned());
        Ok((devices, ChosenByAttempt { driver: self, own }))
    }

    /// The answer without the API server: that of the claim's live allocations.
    async fn answer_of_record(&self, claim: &Claim, why: String) -> Result<Vec<Device>, PrepareError> {
        let ledger = self.kernel.snapshot();
        let live = allocations_of(&ledger, &claim.uid);
        // A claim that is to be released must not be: its release would end what a new pod holds.
        if live.is_empty() || self.unreleased.lock().contains(&claim.uid) {
            return Err(PrepareError::NoServer(why));
        }
        tracing::info!(
            claim = claim.name,
            why,
            "the claim could not be read from the API server; the kubelet gets the devices that are granted to it already"
        );
        self.specifications.write(&claim.uid, &ledger).await.map_err(PrepareError::Specification)?;
        let devices = live.iter().flat_map(|allocation| {
            let request = allocation.origin.claim().map(ClaimRequest::main_request).unwrap_or_default();
            let allocation: &Allocation = allocation;
            let ledger = &ledger;
            // Shares of a part are one device of the slices. Which of them are of which result is not recorded.
            let mut named = BTreeSet::new();
            allocation.devices.iter().enumerate().filter_map(move |(index, id)| {
                let device_name = published_name(ledger, id).filter(|name| named.insert(name.clone()))?;
                Some(Device {
                    request_names: vec![request.to_owned()],
                    pool_name: self.settings.node.clone(),
                    device_name,
                    cdi_device_ids: self.specifications.cdi_ids(
                        allocation,
                        index,
                        &ledger.part(&id.part)?.part,
                    ),
                    share_id: None,
                })
            })
        });
        Ok(devices.collect())
    }

    fn response(
        &self,
        devices: &[ClaimedDevice],
        allocations: &[Arc<Allocation>],
        ledger: &Snapshot,
    ) -> Vec<Device> {
        let device = |device: &ClaimedDevice| {
            let first = device.ids.first()?;
            let part = &ledger.part(&first.part)?.part;
            let is_of_request = |allocation: &&Arc<Allocation>| {
                let request = allocation.origin.claim().map(ClaimRequest::main_request);
                request == Some(device.result.main_request())
                    && allocation.resource == device.resource
                    && allocation.devices.contains(first)
            };
            // A device with admin access has no allocation, and so no variables of one.
            let cdi_device_ids = match allocations.iter().find(is_of_request) {
                Some(allocation) => {
                    let index = allocation.devices.iter().position(|id| id == first).unwrap_or(0);
                    self.specifications.cdi_ids(allocation, index, part)
                }
                None => vec![self.specifications.cdi_id_of_part(part)],
            };
            Some(Device {
                request_names: vec![device.result.main_request().to_owned()],
                pool_name: device.result.pool.clone(),
                device_name: device.result.device.clone(),
                cdi_device_ids,
                share_id: device.result.share_id.clone(),
            })
        };
        devices.iter().filter_map(device).collect()
    }

    /// The responses for the claims of one call, by their UIDs.
    async fn unprepare_all(
        &self,
        claims: Vec<Claim>,
    ) -> Result<HashMap<String, NodeUnprepareResourceResponse>, Status> {
        let claims = checked(claims)?;
        let answers = claims.iter().map(|claim| async move {
            self.unprepare(claim).await;
            (claim.uid.clone(), NodeUnprepareResourceResponse { error: String::new() })
        });
        Ok(join_all(answers).await.into_iter().collect())
    }

    /// An error would keep the pod in Terminating, and the kubelet does not call again after a success. So a release that
    /// cannot be recorded is tried again until it is; the devices stay held meanwhile.
    async fn unprepare(&self, claim: &Claim) {
        let calls = self.calls_of(&claim.uid);
        *calls.unprepares.lock() += 1;
        let _turn = calls.turn.lock().await;
        if let Err(error) = self.release(&claim.uid).await {
            tracing::warn!(
                namespace = claim.namespace, claim = claim.name, %error,
                "the release of a claim could not be recorded; its devices stay held until it is"
            );
            self.unreleased.lock().insert(claim.uid.clone());
        }
    }

    async fn release(&self, uid: &str) -> Result<(), CommandError> {
        let permit = self.commands.acquire().await;
        self.kernel.unprepare(uid.to_owned()).await?;
        drop(permit);
        self.unreleased.lock().remove(uid);
        self.specifications.remove(uid).await;
        Ok(())
    }

    /// Releases claims that the API server has not had for a time, and that nothing shows in use; never returns. Claims in
    /// use are not read: on many nodes that would be most of the API server's requests.
    pub(super) async fn release_gone(self: Arc<Self>) {
        let mut gone_since: BTreeMap<String, Instant> = BTreeMap::new();
        loop {
            sleep(self.settings.gone_after / GONE_CHECKS).await;
            let (ledger, now) = (self.kernel.snapshot(), self.kernel.now());
            let live = ledger.live.values().filter_map(|allocation| allocation.origin.claim());
            let mut claims: BTreeSet<_> = live.map(|request| request.claim.clone()).collect();
            claims.retain(|claim| !is_in_use(&ledger, &claim.uid, now));
            gone_since.retain(|uid, _| claims.iter().any(|claim| claim.uid == *uid));
            for claim in claims {
                let read = self.read(&claim.namespace, &claim.name, Instant::now() + READ_MAX).await;
                let is_gone = read.is_ok_and(|read| read.is_none_or(|read| read.claim.uid != claim.uid));
                if !is_gone {
                    gone_since.remove(&claim.uid);
                    continue;
                }
                let since = *gone_since.entry(claim.uid.clone()).or_insert_with(Instant::now);
                if since.elapsed() >= self.settings.gone_after {
                    self.release_unused(&claim).await;
                }
            }
        }
    }

    /// Records the pods that begin to use a prepared claim, since the kubelet calls the driver only for the first pod of a claim;
    /// never returns.
    pub(super) async fn record_pods(self: Arc<Self>) {
        let mut snapshots = self.kernel.watch();
        // For each claim that was read: the pods that named it then, the time of the next read if its recorded pods are still
        // outdated, and the wait after that read.
        let mut reads: BTreeMap<KernelClaim, (BTreeSet<String>, Instant, Duration)> = BTreeMap::new();
        let mut last_ledger: Option<Snapshot> = None;
        loop {
            let ledger = snapshots.borrow_and_update().clone();
            let is_same = last_ledger.as_ref().is_some_and(|last| {
                Arc::ptr_eq(&last.live, &ledger.live)
                    && last.pods.as_ref().map(Arc::as_ptr) == ledger.pods.as_ref().map(Arc::as_ptr)
            });
            let now = Instant::now();
            if !is_same || reads.values().any(|(_, again, _)| *again <= now) {
                let outdated = claims_with_outdated_pods(&ledger);
                reads.retain(|claim, _| outdated.contains_key(claim));
                for (claim, pods) in outdated {
                    let (again, wait) = match reads.get(&claim) {
                        Some((before, again, wait)) if *before == pods => (*again, *wait),
                        _ => (now, RETRY_AFTER_FAILURE),
                    };
                    if again <= now {
                        self.record_pods_of(&claim).await;
                        reads.insert(claim, (pods, Instant::now() + wait, (2 * wait).min(PODS_RETRY_MAX)));
                    }
                }
                last_ledger = Some(ledger);
            }
            let again = reads.values().map(|(_, again, _)| *again).min();
            let changed = match again {
                None => snapshots.changed().await,
                Some(again) => timeout_at(again, snapshots.changed()).await.unwrap_or(Ok(())),
            };
            if changed.is_err() {
                return;
            }
        }
    }

    /// Records the pods that the API server shows for a claim.
    async fn record_pods_of(&self, claim: &KernelClaim) {
        let (namespace, name) = (&claim.namespace, &claim.name);
        let recorded = match self.read(namespace, name, Instant::now() + READ_MAX).await {
            Err(why) => Err(why),
            Ok(read) => {
                // Meanwhile another claim may have this name.
                let Some(read) = read.filter(|read| read.claim == *claim) else { return };
                let command = Command::RecordClaimPods { claim: claim.uid.clone(), pods: read.pods };
                self.kernel.execute(command).await.map_err(|error| error.to_string())
            }
        };
        if let Err(why) = recorded {
            tracing::debug!(
                namespace,
                claim = name,
                why,
                "the pods of a claim could not be recorded; this is tried again"
            );
        }
    }

    async fn release_unused(&self, claim: &KernelClaim) {
        let calls = self.calls_of(&claim.uid);
        let _turn = calls.turn.lock().await;
        if is_in_use(&self.kernel.snapshot(), &claim.uid, self.kernel.now()) {
            return;
        }
        let (namespace, name) = (&claim.namespace, &claim.name);
        match self.release(&claim.uid).await {
            Ok(()) => tracing::warn!(
                namespace,
                claim = name,
                "a claim was released that the API server no longer has, although the kubelet has not unprepared it"
            ),
            Err(error) => tracing::debug!(namespace, claim = name, %error, "the release is tried again"),
        }
    }

    /// Tries releases again that could not be recorded; never returns.
    pub(super) async fn retry_releases(self: Arc<Self>) {
        loop {
            sleep(RETRY_AFTER_FAILURE).await;
            let uids: Vec<String> = self.unreleased.lock().iter().cloned().collect();
            for uid in uids {
                let calls = self.calls_of(&uid);
                let _turn = calls.turn.lock().await;
                // The claim may have been prepared again meanwhile.
                if self.unreleased.lock().contains(&uid) && self.release(&uid).await.is_ok() {
                    tracing::info!(claim = uid, "the release of a claim was recorded");
                }
            }
        }
    }
}
