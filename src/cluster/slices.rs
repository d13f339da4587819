//! Publishes the node's ResourceSlices: the devices of its GPUs that are granted through DRA.
//!
//! The API server drops fields without an error if their feature gate is off. So it is asked with a dry run which fields it keeps,
//! and what cannot be published without the dropped fields is left out.
//! A kubelet that starts deletes all slices of its node; the watch of them shows that, and they are published again.

use super::settings::{DraTask, Settings, SlicesState};
use super::slice_contents::{GatedFields, SliceContents, contents};
use super::slice_order::SliceOrder;
use berth_core::KernelHandle;
use berth_kernel::ids::names::GpuId;
use berth_kernel::sharing::publish::{Versions, publication};
use berth_kernel::sharing::via::{KubeletApi, Via};
use berth_kube::{Backoff, REFRESH_MEAN, RequestError, after_loss, jittered, random, request};
use futures_util::{StreamExt, pin_mut};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, ListParams, PostParams, WatchEvent, WatchParams};
use kube::core::ObjectList;
use kube::{Api, Client};
use std::collections::{BTreeMap, BTreeSet};
use std::future::pending;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout, timeout_at};

/// The label of everything that this program creates.
const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "berth");
/// Longest name of an object, bytes.
const NAME_BYTES_MAX: usize = 253;
/// The right that changes of slices need, for the message of a 403.
const RIGHT: &str = "create, update and delete resourceslices (ClusterRole berth-dra)";
/// Most rounds of one publication. Each lists the slices and writes those that differ; the list of the next one shows
/// whether the API server kept what was written.
const ROUNDS_MAX: usize = 3;

/// Keeps the slices up to date; never returns. They are published while the kubelet has the driver registered: before,
/// pods would be given devices that no driver prepares.
pub(super) async fn keep(settings: &Settings, client: Client, kernel: &KernelHandle, task: &DraTask) {
    let mut backoff = Backoff::new(settings.connection.retry_interval);
    let (mut snapshots, mut registered) = (kernel.watch(), task.registered.clone());
    let mut publisher = Publisher::new(settings, client, task);
    loop {
        if registered.wait_for(|is_registered| *is_registered).await.is_err() {
            return pending().await;
        }
        snapshots.mark_unchanged();
        let read = publisher.read_server().await;
        publisher.order.lock().await.evaluate(kernel).await;
        let wanted = publisher.wanted(kernel).await;
        let published = match read {
            Ok(()) => publisher.publish(&wanted).await,
            Err(error) => Err(error),
        };
        let next = match published {
            Ok(version) => {
                backoff.reset();
                Ok(version)
            }
            Err(RequestError { why, .. }) => {
                publisher.set_state(Some(why));
                Err(settings.connection.retry_after.delay(backoff.next(random()), Instant::now()))
            }
        };
        let version = match next {
            Ok(version) => version,
            Err(wait) => {
                sleep(wait).await;
                continue;
            }
        };
        let ledger_changed = async {
            loop {
                let order_due = publisher.order.lock().await.due(&snapshots.borrow());
                let changed = match order_due {
                    None => snapshots.changed().await,
                    Some(due) => timeout_at(due, snapshots.changed()).await.unwrap_or(Ok(())),
                };
                if changed.is_err() {
                    return pending().await;
                }
                // A burst of changes is one comparison, which builds all devices, and one write.
                sleep(settings.batch_window).await;
                snapshots.mark_unchanged();
                publisher.order.lock().await.evaluate(kernel).await;
                if publisher.wanted(kernel).await != wanted {
                    return;
                }
            }
        };
        tokio::select! {
            () = ledger_changed => {}
            () = publisher.changed_by_others(&version, settings) => {}
            _ = registered.wait_for(|is_registered| !*is_registered) => {}
            () = sleep(jittered(REFRESH_MEAN, random())) => {}
        }
    }
}

/// What the slices are to say.
#[derive(Clone, Debug, PartialEq)]
struct Wanted {
    /// What each slice has; one empty slice if there is nothing, so that the pool is known to be complete.
    slices: Vec<SliceContents>,
    /// The GPUs that are to be moved to the device plugin API.
    moving: BTreeSet<GpuId>,
}

/// What the scheduler can do, by the API server's version, since a client cannot read the scheduler's. Schedulers before
/// 1.36.2 can allocate a GPU both whole and in shares (kubernetes#139211).
#[derive(Debug, Default)]
struct Scheduler {
    /// The version that was read last, and when.
    read: Option<(String, Instant)>,
    /// Since when the API server is new enough; `None` if it is not.
    new_since: Option<Instant>,
}

/// The first version whose scheduler does not allocate a GPU both whole and in shares.
const SHARING_SCHEDULER: [u64; 3] = [1, 36, 2];
/// How often the version is read.
const VERSION_INTERVAL: Duration = Duration::from_secs(15 * 60);
/// How long after the API server the scheduler is assumed to be new enough: an upgrade replaces the API server first.
const UPGRADE_MAX: Duration = Duration::from_secs(3600);

impl Scheduler {
    /// Reads the version if the last reading is older than [`VERSION_INTERVAL`]. Nothing is published before the first
    /// reading, since shares that an earlier process published would be withdrawn. If a later reading fails, the known
    /// version is kept.
    async fn read(&mut self, client: &Client) -> Result<(), RequestError> {
        if self.read.as_ref().is_some_and(|(_, at)| at.elapsed() < VERSION_INTERVAL) {
            return Ok(());
        }
        match request(client.apiserver_version(), "get /version (ClusterRole system:public-info-viewer)")
            .await
        {
            Ok(version) => self.note(version.git_version, Instant::now()),
            Err(error) if self.read.is_none() && !matches!(error.code(), 401 | 403 | 404) => {
                return Err(error);
            }
            Err(RequestError { why, .. }) => {
                tracing::debug!(why, "the API server's version could not be read");
                let known = self.read.as_ref().map(|(version, _)| version.clone());
                self.note(known.unwrap_or_default(), Instant::now());
            }
        }
        Ok(())
    }

    fn note(&mut self, version: String, now: Instant) {
        let is_new = numbers(&version).is_some_and(|numbers| numbers >= SHARING_SCHEDULER);
        let first = self.read.is_none();
        self.new_since = match self.new_since {
            // The daemon cannot know of an upgrade before it started.
            None if is_new && first => now.checked_sub(UPGRADE_MAX).or(Some(now)),
            since => since.or(Some(now)).filter(|_| is_new),
        };
        self.read = Some((version, now));
    }

    /// Why no shares are published for it; `None` if they are.
    fn why_no_shares(&self, now: Instant) -> Option<String> {
        let version = self.read.as_ref().map(|(version, _)| version.as_str()).unwrap_or_default();
        if version.is_empty() {
            return Some(
                "the API server does not show its version: bind the ClusterRole system:public-info-viewer to Berth's user"
                    .to_owned(),
            );
        }
        match self.new_since {
            None => Some(format!(
                "the scheduler of Kubernetes {version} can allocate a GPU both whole and in shares: upgrade to 1.36.2 or later"
            )),
            Some(since) if now.duration_since(since) < UPGRADE_MAX => Some(format!(
                "the API server has had version {version} for less than an hour, and the scheduler may still be older: shares \
                 are published when the hour has passed"
            )),
            Some(_) => None,
        }
    }
}

/// Major, minor and patch version of a text such as `v1.36.2-gke.1`.
fn numbers(version: &str) -> Option<[u64; 3]> {
    let version = version.strip_prefix('v').unwrap_or(version).split(['-', '+']).next()?;
    let numbers: Vec<u64> = version.split('.').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    numbers.try_into().ok()
}

struct Publisher<'s> {
    client: Client,
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    node: &'s str,
    task: &'s DraTask,
    scheduler: Scheduler,
    order: Mutex<SliceOrder>,
    /// The fields that the API server keeps, of those that were sent.
    kept: GatedFields,
    /// The fields that it drops.
    dropped: GatedFields,
}

impl<'s> Publisher<'s> {
    fn new(settings: &'s Settings, client: Client, task: &'s DraTask) -> Self {
        Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            client,
            node: &settings.node,
            task,
            scheduler: Scheduler::default(),
            order: Mutex::default(),
            kept: GatedFields::default(),
            dropped: GatedFields::default(),
        }
    }

    fn fields(&self) -> String {
        format!("spec.nodeName={},spec.driver={}", self.node, self.task.driver)
    }

    async fn wanted(&self, kernel: &KernelHandle) -> Wanted {
        let versions = kernel.counters().gpus.versions();
        let versions = Versions { driver: versions.driver, cuda: versions.cuda };
        let ledger = kernel.snapshot();
        // Their devices have a taint, or are left out.
        let leaves = |via: &Via| via.api == KubeletApi::Dra && via.moving;
        let moving = ledger.gpus.iter().filter(|(_, state)| leaves(&state.via));
        let moving = moving.map(|(gpu, _)| gpu.clone()).collect();
        let mut devices = publication(&ledger, &versions);
        self.order.lock().await.sort(&mut devices);
        let slices = contents(&devices, self.kept, &self.task.driver);
        Wanted { slices, moving }
    }

    /// Reads the scheduler's version, and which fields the API server keeps: it answers the dry run of a creation with the slice that
    /// it would store. Stored slices do not show this, since the API server keeps a field that a slice already had when the feature
    /// gate was turned off.
    async fn read_server(&mut self) -> Result<(), RequestError> {
        self.scheduler.read(&self.client).await?;
        let taints = GatedFields { taints: true, ..GatedFields::default() };
        let can_publish_shares = self.scheduler.why_no_shares(Instant::now()).is_none();
        let all = GatedFields { shares: can_publish_shares, counters: can_publish_shares, ..taints };
        let kept = match self.probe(all).await {
            // Before 1.36 a slice with devices that take counters also had to contain the counters, which the probe does not. The
            // version may have been that of another API server.
            Err(error) if error.code() == 422 && can_publish_shares => self.probe(taints).await?,
            kept => kept?,
        };
        let dropped = all.without(kept);
        dropped.log_dropped(self.dropped);
        (self.kept, self.dropped) = (kept, dropped);
        Ok(())
    }

    /// Creates a slice with these fields as a dry run; returns those that the API server keeps.
    async fn probe(&self, fields: GatedFields) -> Result<GatedFields, RequestError> {
        let slice = ResourceSlice {
            metadata: ObjectMeta { generate_name: Some("berth-probe-".into()), ..ObjectMeta::default() },
            spec: ResourceSliceSpec {
                driver: self.task.driver.clone(),
                node_name: Some(self.node.to_owned()),
                pool: ResourcePool { name: self.node.to_owned(), generation: 0, resource_slice_count: 1 },
                devices: Some(vec![fields.probe_device(&self.task.driver)]),
                ..ResourceSliceSpec::default()
            },
        };
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        let answered = request(self.slices.create(&parameters, &slice), RIGHT).await?;
        Ok(answered.spec.devices.iter().flatten().next().map(GatedFields::of).unwrap_or_default())
    }

    /// Brings the slices up to date; returns the version of the list that shows it.
    async fn publish(&self, wanted: &Wanted) -> Result<String, RequestError> {
        for _ in 0..ROUNDS_MAX {
            let list = self.list().await?;
            let plan = plan(&self.task.driver, self.node, wanted, &list.items);
            if plan.is_empty() {
                self.set_published(wanted, &list);
                return Ok(list.metadata.resource_version.unwrap_or_default());
            }
            for change in plan {
                self.make(change).await?;
            }
        }
        let why = "the API server does not keep the ResourceSlices as they were written".to_owned();
        Err(RequestError { why, status: None })
    }

    async fn list(&self) -> Result<ObjectList<ResourceSlice>, RequestError> {
        let params = ListParams::default().fields(&self.fields());
        request(self.slices.list(&params), "list resourceslices (ClusterRole berth-dra)").await
    }

    async fn make(&self, change: SliceChange) -> Result<(), RequestError> {
        let parameters = PostParams::default();
        match change {
            SliceChange::Create(mut slice) => {
                slice.metadata.owner_references = Some(vec![self.owner().await?]);
                request(self.slices.create(&parameters, &slice), RIGHT).await?;
            }
            SliceChange::Update(slice) => {
                let name = slice.metadata.name.clone().unwrap_or_default();
                request(self.slices.replace(&name, &parameters, &slice), RIGHT).await?;
            }
            SliceChange::Delete(name) => {
                let deleted = request(self.slices.delete(&name, &DeleteParams::default()), RIGHT).await;
                deleted.map(drop).or_else(|error| if error.code() == 404 { Ok(()) } else { Err(error) })?;
            }
        }
        Ok(())
    }

    /// The node owns the slices, so that the garbage collector deletes them with it.
    async fn owner(&self) -> Result<OwnerReference, RequestError> {
        let node = request(self.nodes.get_metadata(self.node), "get nodes (ClusterRole berth)").await?;
        Ok(OwnerReference {
            api_version: "v1".into(),
            kind: "Node".into(),
            name: self.node.to_owned(),
            uid: node.metadata.uid.unwrap_or_default(),
            controller: Some(true),
            block_owner_deletion: None,
        })
    }

    /// Returns once another client has changed or deleted a slice, or the watch of them has ended.
    async fn changed_by_others(&self, version: &str, settings: &Settings) {
        let seconds = u32::try_from(settings.connection.watch_timeout.as_secs()).unwrap_or(u32::MAX);
        let params = WatchParams::default().fields(&self.fields()).timeout(seconds);
        // The next round lists them.
        let wait = || {
            let lost = after_loss(settings.reconnect_wait_max, random());
            sleep(settings.connection.retry_after.delay(lost, Instant::now()))
        };
        let Ok(stream) = self.slices.watch(&params, version).await else { return wait().await };
        pin_mut!(stream);
        loop {
            match timeout(settings.connection.read_timeout, stream.next()).await {
                Ok(Some(Ok(WatchEvent::Bookmark(_)))) => {}
                Ok(Some(Ok(WatchEvent::Added(_) | WatchEvent::Modified(_) | WatchEvent::Deleted(_)))) => {
                    return;
                }
                _ => return wait().await,
            }
        }
    }

    fn set_published(&self, wanted: &Wanted, list: &ObjectList<ResourceSlice>) {
        let generation = list.items.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
        let devices = wanted.slices.iter().map(|slice| slice.devices.len()).sum();
        let (moving, drops_taints) = (wanted.moving.clone(), self.dropped.taints);
        let no_shares = self.dropped.why_no_shares().or_else(|| self.scheduler.why_no_shares(Instant::now()));
        let no_counters = self.dropped.why_no_counters();
        let error = None;
        self.set(SlicesState { generation, devices, moving, drops_taints, no_shares, no_counters, error });
    }

    fn set_state(&self, error: Option<String>) {
        let last = self.task.slices.borrow().clone();
        self.set(SlicesState { error, ..last });
    }

    fn set(&self, new: SlicesState) {
        self.task.slices.send_if_modified(|current| {
            let changed = *current != new;
            if changed {
                match (&new.error, &current.error) {
                    (Some(why), old) if old.as_ref() != Some(why) => {
                        tracing::warn!(why, "the ResourceSlices are not up to date");
                    }
                    (None, _) => tracing::info!(
                        devices = new.devices,
                        generation = new.generation,
                        "the ResourceSlices are published"
                    ),
                    _ => {}
                }
                *current = new;
            }
            changed
        });
    }
}

/// A change of one slice.
#[derive(Debug)]
enum SliceChange {
    Create(ResourceSlice),
    Update(ResourceSlice),
    Delete(String),
}

/// The changes that bring the slices to what is wanted. One slice that differs is updated; more of them get a new
/// generation of the pool, which counts once it is complete.
fn plan(driver: &str, node: &str, wanted: &Wanted, existing: &[ResourceSlice]) -> Vec<SliceChange> {
    let count = wanted.slices.len();
    let names: Vec<String> = (0..count).map(|index| slice_name(index, driver, node)).collect();
    let by_name: BTreeMap<&str, &ResourceSlice> =
        existing.iter().filter_map(|slice| Some((slice.metadata.name.as_deref()?, slice))).collect();
    let newest = existing.iter().map(|slice| slice.spec.pool.generation).max().unwrap_or(0);
    let spec = |generation: i64, contents: &SliceContents| ResourceSliceSpec {
        driver: driver.to_owned(),
        node_name: Some(node.to_owned()),
        pool: ResourcePool {
            name: node.to_owned(),
            generation,
            resource_slice_count: i64::try_from(count).unwrap_or(i64::MAX),
        },
        devices: Some(contents.devices.clone()).filter(|devices| !devices.is_empty()),
        shared_counters: Some(contents.counters.clone()).filter(|counters| !counters.is_empty()),
        ..ResourceSliceSpec::default()
    };
    let differs = |name: &String, contents| {
        by_name.get(name.as_str()).is_none_or(|slice| comparable(&slice.spec) != spec(newest, contents))
    };
    let pairs = || names.iter().zip(&wanted.slices);
    let different = pairs().filter(|(name, contents)| differs(name, contents)).count();
    let is_extra = |name: &&str| !names.iter().any(|ours| ours == name);
    let extra: Vec<&str> = by_name.keys().copied().filter(|name| is_extra(name)).collect();
    if different == 0 && extra.is_empty() {
        return Vec::new();
    }
    let is_in_place = different <= 1 && extra.is_empty() && by_name.len() == count;
    let generation = if is_in_place { newest } else { newest + 1 };
    let written = pairs().filter(|(name, contents)| !is_in_place || differs(name, contents));
    let mut changes: Vec<SliceChange> = written
        .map(|(name, contents)| {
            let spec = spec(generation, contents);
            match by_name.get(name.as_str()) {
                Some(known) => SliceChange::Update(ResourceSlice { metadata: known.metadata.clone(), spec }),
                None => SliceChange::Create(ResourceSlice {
                    metadata: ObjectMeta {
                        name: Some(name.clone()),
                        labels: Some([(MANAGED_BY.0.to_owned(), MANAGED_BY.1.to_owned())].into()),
                        ..ObjectMeta::default()
                    },
                    spec,
                }),
            }
        })
        .collect();
    changes.extend(extra.into_iter().map(|name| SliceChange::Delete(name.to_owned())));
    changes
}

/// The scheduler tries slices by their names, so these begin with the index.
fn slice_name(index: usize, driver: &str, node: &str) -> String {
    let mut name = format!("{index:05}-{driver}-{node}");
    name.truncate(name.floor_char_boundary(NAME_BYTES_MAX));
    name.trim_end_matches(['-', '.']).to_owned()
}

/// A slice without what the API server adds: the times of taints, and an empty list of devices.
fn comparable(spec: &ResourceSliceSpec) -> ResourceSliceSpec {
    let mut spec = spec.clone();
    for device in spec.devices.iter_mut().flatten() {
        device.taints.iter_mut().flatten().for_each(|taint| taint.time_added = None);
    }
    spec.devices = spec.devices.filter(|devices| !devices.is_empty());
    spec.shared_counters = spec.shared_counters.filter(|counters| !counters.is_empty());
    spec
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::resource::v1::{Device, DeviceTaint};

    fn device(name: &str, tainted: bool) -> Device {
        let taint =
            DeviceTaint { key: "d/cordoned".into(), effect: "NoSchedule".into(), ..Default::default() };
        Device { name: name.into(), taints: tainted.then(|| vec![taint]), ..Device::default() }
    }

    /// Slices of one device each.
    fn wanted(devices: &[&Device]) -> Wanted {
        let of = |device: &&Device| SliceContents { devices: vec![(*device).clone()], counters: Vec::new() };
        let slices = devices.iter().map(of).collect();
        Wanted { slices, moving: BTreeSet::new() }
    }

    /// The slices after the API server has made the changes.
    fn made(existing: &[ResourceSlice], changes: Vec<SliceChange>) -> Vec<ResourceSlice> {
        let name = |slice: &ResourceSlice| slice.metadata.name.clone().unwrap();
        let mut all: BTreeMap<String, ResourceSlice> =
            existing.iter().map(|slice| (name(slice), slice.clone())).collect();
        for change in changes {
            match change {
                SliceChange::Create(slice) => assert!(all.insert(name(&slice), slice).is_none()),
                SliceChange::Update(slice) => assert!(all.insert(name(&slice), slice).is_some()),
                SliceChange::Delete(name) => assert!(all.remove(&name).is_some()),
            }
        }
        all.into_values().collect()
    }

    fn generations(slices: &[ResourceSlice]) -> Vec<i64> {
        slices.iter().map(|slice| slice.spec.pool.generation).collect()
    }

    #[test]
    fn one_slice_that_differs_is_updated_and_more_get_a_new_generation() {
        let (a, b, c) = (device("a", false), device("b", false), device("c", false));
        let first = wanted(&[&a, &b]);
        let slices = made(&[], plan("d", "n1", &first, &[]));
        assert_eq!(generations(&slices), [1, 1]);
        assert!(plan("d", "n1", &first, &slices).is_empty());
        let one = wanted(&[&a, &device("b", true)]);
        let slices = made(&slices, plan("d", "n1", &one, &slices));
        assert_eq!(generations(&slices), [1, 1]);
        assert!(plan("d", "n1", &one, &slices).is_empty());
        let both = wanted(&[&c, &b]);
        let slices = made(&slices, plan("d", "n1", &both, &slices));
        assert_eq!(generations(&slices), [2, 2]);
        let fewer = wanted(&[&c]);
        let slices = made(&slices, plan("d", "n1", &fewer, &slices));
        assert_eq!(generations(&slices), [3]);
        assert_eq!(slices[0].spec.pool.resource_slice_count, 1);
        // A slice that a kubelet has deleted.
        let slices = made(&[], plan("d", "n1", &first, &[]));
        let left = &slices[1..];
        let slices = made(left, plan("d", "n1", &first, left));
        assert_eq!(generations(&slices), [2, 2]);
    }

    #[test]
    fn what_the_api_server_adds_is_no_difference() {
        let wanted = wanted(&[&device("a", true)]);
        let mut slices = made(&[], plan("d", "n1", &wanted, &[]));
        let added = slices[0].spec.devices.as_mut().unwrap()[0].taints.as_mut().unwrap();
        added[0].time_added = Some(serde_json::from_str("\"2026-11-29T00:00:00Z\"").unwrap());
        assert!(plan("d", "n1", &wanted, &slices).is_empty());
    }

    #[test]
    fn the_names_of_slices_sort_by_their_index_and_fit() {
        assert_eq!(slice_name(7, "gpu.nvidia.com", "n1"), "00007-gpu.nvidia.com-n1");
        let long = slice_name(0, "gpu.nvidia.com", &"n.".repeat(126));
        assert!(long.len() <= NAME_BYTES_MAX && !long.ends_with('.'));
    }

    #[test]
    fn a_scheduler_is_given_shares_if_it_counts_them_and_an_hour_after_an_upgrade() {
        let now = Instant::now();
        let mut scheduler = Scheduler::default();
        assert!(scheduler.why_no_shares(now).unwrap().contains("does not show its version"));
        for (version, is_new) in [
            ("v1.36.1", false),
            ("v1.36.2", true),
            ("v1.36.2-gke.1", true),
            ("v1.37.0-alpha.1+5a", true),
            ("v2", false),
            ("", false),
        ] {
            let mut scheduler = Scheduler::default();
            scheduler.note(version.to_owned(), now);
            let why = scheduler.why_no_shares(now);
            assert_eq!(why.is_none(), is_new, "{version}: {why:?}");
        }
        scheduler.note("v1.35.9".to_owned(), now);
        let later = now + UPGRADE_MAX;
        scheduler.note("v1.36.2".to_owned(), later);
        assert!(scheduler.why_no_shares(later).unwrap().contains("less than an hour"));
        scheduler.note("v1.36.3".to_owned(), later + VERSION_INTERVAL);
        assert_eq!(scheduler.why_no_shares(later + UPGRADE_MAX), None);
        scheduler.note("v1.35.9".to_owned(), later + UPGRADE_MAX);
        assert!(scheduler.why_no_shares(later + UPGRADE_MAX).unwrap().contains("upgrade to 1.36.2"));
    }
}
