//! Restricts or refuses containers that can use GPUs that were not allocated to them, by the rule of
//! [`berth_kernel::grants::bypass`].

use crate::cgroup::ContainerCgroup;
use crate::containers::{claim_grants_of, is_privileged};
use crate::device_filter::DeniedDevices;
use crate::plugin::Refusal;
use crate::settings::Settings;
use crate::state::GuardState;
use berth_kernel::evidence::pods::{DEVICE_MOUNTS, VISIBLE_DEVICES};
use berth_kernel::grants::annotation::GrantAnnotation;
use berth_kernel::grants::bypass::{
    Allocated, BypassAction, ContainerAccess, MOUNT_SOURCE, NRI_ANNOTATIONS, Phase, PodFacts,
    UnallocatedAccess, Verdict, cdi_devices, is_gpu, judge, visible_devices,
};
use berth_kernel::ids::names::PartId;
use berth_kubelet::checkpoint;
use berth_proto::guard::{self, BypassOutcome, BypassRules, ContainerBypass};
use berth_proto::nri::{Container, ContainerAdjustment, KeyValue, Mount, PodSandbox};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, Semaphore, watch};
use tokio::task::{spawn_blocking, yield_now};
use tokio::time::{sleep, timeout};

/// How long the answer to the runtime waits for the kubelet's checkpoint. Meanwhile no other container of the node is
/// created or started.
const CHECKPOINT_MAX: Duration = Duration::from_millis(50);
/// Interval at which access to devices is denied again: a runtime that updates a container may replace its programs.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// The kernel's list of drivers and their major numbers.
const DRIVERS: &str = "/proc/devices";
/// The most ways to other GPUs that are listed of one container: its pod's author decides how many there are.
const DETAILS_MAX: usize = 8;
const UNKNOWN_GPUS: &str = "Berth does not know which GPUs another device plugin or DRA driver allocated to the container, so \
                            that it is denied access to no device; `bypass.action: deny` refuses such a container";
const UNKNOWN_POD: &str = "`berth serve` has not shown its pod to the guard yet, so that it is not known whether the pod has \
                           claims; `berth node show` says whether both are connected";
const RAN_BEFORE: &str =
    "it ran before the guard: device files that it has opened stay open; delete the pod to close them";
const NO_CGROUP: &str = "its cgroup was not found: set `guard.cgroupRoot` to the folder where the node's cgroups are \
                         mounted, and restart the guard";
/// Minor numbers of nodes that are no GPU's, of the same major number: `nvidia-modeset` and `nvidiactl` (NVIDIA's driver:
/// `nv-chardev-numbers.h`).
const CONTROL_MINORS: [u32; 2] = [254, 255];

/// Restricts or refuses containers that can use GPUs that were not allocated to them.
pub(crate) struct BypassGuard {
    guard: Arc<GuardState>,
    /// By the daemon; `None` until it has sent some.
    rules: watch::Receiver<Option<Arc<BypassRules>>>,
    /// The folder of the kubelet's checkpoint.
    device_plugins: PathBuf,
    /// The folder of the files that Berth mounts into containers with claims; the path of each file names the grant.
    claim_grants: PathBuf,
    cgroup_root: PathBuf,
    own_namespace: Option<String>,
    /// The containers that are denied access to devices, will be at their start, or would be if it were known what was
    /// allocated to them; by id.
    watched: Mutex<BTreeMap<String, Watched>>,
    /// Starts the checks.
    wake: Notify,
    /// For one reading of the kubelet's checkpoint at a time: on a disk that hangs a reading cannot be ended.
    reading: Arc<Semaphore>,
}

/// A container that is denied access to devices.
#[derive(Clone, Debug)]
struct Watched {
    pod: PodSandbox,
    container: Container,
    /// What was found; its outcome and why are the last ones recorded.
    bypass: ContainerBypass,
    /// Minor numbers of the GPUs that it was granted; `None` while they are not known.
    minors: Option<BTreeSet<u32>>,
    /// `None` until it is started, or if it was not found.
    cgroup: Option<ContainerCgroup>,
    /// What that does not cover.
    note: &'static str,
}

/// What was found about a container.
struct Found {
    rules: Arc<BypassRules>,
    verdict: Verdict,
    /// What was allocated to it, or why that is not known: the verdict is then that on one to which nothing was allocated.
    allocated: Result<Allocated, String>,
    /// The verdict if its pod had claims; set only if it is not known whether it has, and that verdict differs.
    if_claiming: Option<Verdict>,
}

impl Found {
    /// Minor numbers of the GPUs that were granted to it, or why it is not known which devices it may open.
    fn minors(&self) -> Result<BTreeSet<u32>, String> {
        if self.if_claiming.is_some() {
            return Err(UNKNOWN_POD.into());
        }
        self.allocated.as_ref().map_err(Clone::clone).and_then(|known| minors(&self.rules, &known.parts))
    }
}

impl BypassGuard {
    pub(crate) fn new(
        settings: &Settings,
        guard: Arc<GuardState>,
        rules: watch::Receiver<Option<Arc<BypassRules>>>,
    ) -> Self {
        Self {
            guard,
            rules,
            device_plugins: settings.device_plugins.clone(),
            claim_grants: settings.claim_grants.clone(),
            cgroup_root: settings.cgroup_root.clone(),
            own_namespace: settings.own_namespace.clone(),
            watched: Mutex::default(),
            wake: Notify::new(),
            reading: Arc::new(Semaphore::new(1)),
        }
    }

    /// A container is being created. Returns what is changed in it.
    ///
    /// # Errors
    /// If it is refused.
    pub(crate) async fn create(
        &self,
        pod: &PodSandbox,
        container: &Container,
    ) -> Result<ContainerAdjustment, Refusal> {
        let Some(found) = self.find(pod, container, Phase::Created).await else {
            // What was done about it before its last creation.
            self.guard.update(|known| known.forget_bypass(&pod.uid, &container.name));
            return Ok(ContainerAdjustment::default());
        };
        let verdict = &found.verdict;
        let bypass = bypass_of(pod, container, verdict);
        if verdict.is_refused {
            // The kubelet tries again.
            let why = match (&found.allocated, &found.if_claiming) {
                (Err(why), _) => why.clone(),
                (Ok(_), Some(claiming)) if !claiming.is_refused => UNKNOWN_POD.into(),
                (Ok(_), _) => String::new(),
            };
            return Err(self.refuse(&found.rules, ContainerBypass { why, ..bypass }, verdict));
        }
        if let Err(why) = &found.allocated {
            // All of it may have been allocated to it: it is checked again when it starts.
            self.watch(pod, container, ContainerBypass { why: why.clone(), ..bypass }, None, "");
            return Ok(ContainerAdjustment::default());
        }
        if verdict.denies_devices {
            self.watch(pod, container, bypass, found.minors().ok(), "");
        } else if verdict.is_not_stopped {
            self.record_unknown(bypass);
        } else {
            self.record(&ContainerBypass { outcome: BypassOutcome::Stripped.into(), ..bypass });
        }
        Ok(adjustment(verdict))
    }

    /// A container is about to run its first instruction.
    pub(crate) async fn start(&self, pod: &PodSandbox, container: &Container) {
        let is_watched = self.watched.lock().contains_key(&container.id);
        if !is_watched {
            // It may have been created before the guard was connected. In one that was checked then, nothing is found.
            self.judge_running(pod, container, "").await;
        } else if let Some(watched) = self.watched.lock().get_mut(&container.id) {
            watched.container.pid = container.pid;
        }
        self.deny_devices(&container.id).await;
        self.wake.notify_one();
    }

    /// Judges the containers that were started before the guard was connected.
    pub(crate) async fn judge_all_running(&self, containers: Vec<(PodSandbox, Container)>) {
        // One that has not been started yet is judged when it is.
        for (pod, container) in containers.into_iter().filter(|(_, container)| container.pid != 0) {
            // The runtime has connected again.
            let is_known = |watched: &Watched| watched.minors.is_some() && watched.cgroup.is_some();
            if self.watched.lock().get(&container.id).is_some_and(is_known) {
                continue;
            }
            self.judge_running(&pod, &container, RAN_BEFORE).await;
            self.deny_devices(&container.id).await;
        }
        self.wake.notify_one();
    }

    async fn judge_running(&self, pod: &PodSandbox, container: &Container, note: &'static str) {
        let Some(found) = self.find(pod, container, Phase::Running).await else { return };
        let bypass = bypass_of(pod, container, &found.verdict);
        match &found.allocated {
            Ok(_) if found.verdict.is_not_stopped => self.record_unknown(bypass),
            Ok(_) => self.watch(pod, container, bypass, found.minors().ok(), note),
            Err(why) => {
                self.watch(pod, container, ContainerBypass { why: why.clone(), ..bypass }, None, note);
            }
        }
    }

    /// A container has ended.
    pub(crate) fn end(&self, id: &str) {
        self.watched.lock().remove(id);
    }

    /// Shows what the daemon has sent, and denies access to devices again and again, until it is dropped.
    pub(crate) async fn run(&self) {
        tokio::join!(self.show_action(), self.keep_denied());
    }

    async fn show_action(&self) {
        let mut rules = self.rules.clone();
        while rules.changed().await.is_ok() {
            let action = rules.borrow_and_update().as_ref().map(|rules| rules.action);
            self.guard.set_status(|status| status.bypass_action = action);
            // The daemon may show their pods now.
            let is_unknown = |(_, watched): &(&String, &Watched)| watched.minors.is_none();
            let unknown: Vec<_> =
                self.watched.lock().iter().filter(is_unknown).map(|(id, _)| id.clone()).collect();
            for id in unknown {
                self.deny_devices(&id).await;
            }
        }
    }

    async fn keep_denied(&self) {
        loop {
            self.wake.notified().await;
            while !self.watched.lock().is_empty() {
                sleep(CHECK_INTERVAL).await;
                let pods = self.guard.containers.lock().pods();
                self.watched.lock().retain(|_, watched| pods.contains(&watched.pod.uid));
                let ids: Vec<_> = self.watched.lock().keys().cloned().collect();
                for id in ids {
                    self.deny_devices(&id).await;
                    // Calls of the runtime are answered meanwhile.
                    yield_now().await;
                }
            }
        }
    }

    fn watch(
        &self,
        pod: &PodSandbox,
        container: &Container,
        bypass: ContainerBypass,
        minors: Option<BTreeSet<u32>>,
        note: &'static str,
    ) {
        let (pod, container) = (pod.clone(), container.clone());
        let id = container.id.clone();
        self.watched.lock().insert(id, Watched { pod, container, bypass, minors, cgroup: None, note });
    }

    /// Denies a container that has started access to the devices of other GPUs, and records the outcome if it is another one
    /// than before.
    async fn deny_devices(&self, id: &str) {
        let Some(mut watched) = self.watched.lock().get(id).cloned() else { return };
        if watched.container.pid == 0 {
            return;
        }
        // Devices that were denied stay denied after the action is set to `report`.
        let mut unknown = String::new();
        if watched.minors.is_none() {
            match self.find(&watched.pod, &watched.container, Phase::Running).await {
                // It can use only what was allocated to it: what was recorded before was no bypass.
                None => {
                    let ContainerBypass { pod_uid, container, .. } = &watched.bypass;
                    self.guard.update(|known| known.forget_bypass(pod_uid, container));
                    return self.end(id);
                }
                Some(found) if found.allocated.is_ok() && found.verdict.is_not_stopped => {
                    self.record_unknown(watched.bypass);
                    return self.end(id);
                }
                Some(found) => watched.minors = found.minors().map_err(|why| unknown = why).ok(),
            }
        }
        if watched.cgroup.as_ref().is_some_and(|cgroup| !cgroup.path().exists()) {
            // Another container may have its process's id by now.
            return self.end(id);
        }
        if watched.cgroup.is_none() {
            let cgroup = ContainerCgroup::of_container(&watched.container, &self.cgroup_root);
            watched.cgroup = cgroup.and_then(|cgroup| cgroup.of_whole_container(id));
        }
        if watched.cgroup.is_none() && !Path::new(&format!("/proc/{}", watched.container.pid)).exists() {
            return self.end(id);
        }
        let (outcome, why) = match (&watched.minors, &watched.cgroup) {
            (None, _) => (BypassOutcome::Failed, unknown),
            (_, None) => (BypassOutcome::Failed, NO_CGROUP.to_owned()),
            (Some(minors), Some(cgroup)) => match deny(minors, cgroup) {
                Ok(()) => (BypassOutcome::Stripped, watched.note.to_owned()),
                Err(error) => {
                    (BypassOutcome::Failed, format!("access to its devices cannot be denied: {error}"))
                }
            },
        };
        let is_new =
            watched.bypass.count == 0 || (watched.bypass.outcome(), &watched.bypass.why) != (outcome, &why);
        if is_new {
            watched.bypass =
                ContainerBypass { outcome: outcome.into(), why, wall_ms: now_ms(), ..watched.bypass };
            self.record(&watched.bypass);
            watched.bypass.count = 1;
        }
        // It may have ended meanwhile.
        if let Some(known) = self.watched.lock().get_mut(id) {
            *known = watched;
        }
    }

    /// How a container can use GPUs that were not allocated to it; `None` if it cannot.
    async fn find(&self, pod: &PodSandbox, container: &Container, phase: Phase) -> Option<Found> {
        let rules = self.rules.borrow().clone()?;
        let action = match rules.action() {
            guard::BypassAction::Report => return None,
            guard::BypassAction::Strip => BypassAction::Strip,
            guard::BypassAction::Deny => BypassAction::Deny,
        };
        if self.own_namespace.as_ref() == Some(&pod.namespace)
            || rules.exempt_namespaces.contains(&pod.namespace)
        {
            return None;
        }
        let access = access_of(pod, container);
        let facts = PodFacts {
            sets_visible_devices: rules.pods_setting_visible_devices.contains(&pod.uid),
            has_claims: rules.pods_with_claims.contains(&pod.uid),
        };
        // Most containers have nothing to do with GPUs, and the checkpoint is not read for them.
        // CDI devices may be Berth's.
        let claims: Vec<GrantAnnotation> = claim_grants_of(container, &self.claim_grants).collect();
        let has_claim_grants = !claims.is_empty();
        let assumed =
            Allocated { cdi_devices: access.cdi_devices.clone(), has_claim_grants, ..Allocated::default() };
        let verdict = judge(action, &access, &assumed, facts, phase);
        if verdict.unallocated.is_empty() {
            return None;
        }
        let allocated = match timeout(CHECKPOINT_MAX, self.allocated_to(pod, container)).await {
            Ok(allocated) => allocated,
            Err(_) => Err("the kubelet's checkpoint could not be read within 50 ms".into()),
        };
        let allocated = allocated.map(|known| with_claims(known, &claims, &access.cdi_devices));
        let Ok(known) = &allocated else {
            return Some(Found { rules, verdict, allocated, if_claiming: None });
        };
        let verdict = judge(action, &access, known, facts, phase);
        let is_pod_known = rules.known_pods.as_ref().is_none_or(|known| known.uids.contains(&pod.uid));
        let claiming = judge(action, &access, known, PodFacts { has_claims: true, ..facts }, phase);
        let if_claiming = Some(claiming).filter(|claiming| !is_pod_known && *claiming != verdict);
        (!verdict.unallocated.is_empty()).then_some(Found { rules, verdict, allocated, if_claiming })
    }

    /// What device plugins allocated to a container, or why that is not known.
    async fn allocated_to(&self, pod: &PodSandbox, container: &Container) -> Result<Allocated, String> {
        let failed = || "the guard had an internal error while it read the kubelet's checkpoint".to_owned();
        let place = Arc::clone(&self.reading).acquire_owned().await.map_err(|_| failed())?;
        let (folder, uid, name) = (self.device_plugins.clone(), pod.uid.clone(), container.name.clone());
        let reading = spawn_blocking(move || {
            let _place = place;
            checkpoint::allocated_to(&folder, &uid, &name)
        });
        reading.await.map_err(|_| failed())?.map_err(|error| error.to_string())
    }

    fn refuse(&self, rules: &BypassRules, bypass: ContainerBypass, verdict: &Verdict) -> Refusal {
        let remedies = verdict.unallocated.iter().map(UnallocatedAccess::remedy).collect();
        let refusal = refusal(rules, &bypass, &remedies);
        self.record(&ContainerBypass { outcome: BypassOutcome::Denied.into(), ..bypass });
        refusal
    }

    fn record_unknown(&self, bypass: ContainerBypass) {
        let why = UNKNOWN_GPUS.into();
        self.record(&ContainerBypass { why, outcome: BypassOutcome::Failed.into(), ..bypass });
    }

    fn record(&self, bypass: &ContainerBypass) {
        let mut is_new = false;
        self.guard.update(|known| {
            is_new = known.record_bypass(bypass.clone());
            true
        });
        if is_new {
            let ContainerBypass { namespace, pod, container, why, .. } = bypass;
            let (done, details) = (log_message(bypass.outcome()), bypass.details.join("; "));
            tracing::warn!(namespace, pod, container, why, "{done}: {details}");
        }
    }
}

/// Adds the parts that Berth granted to the container through claims, and the CDI devices of these grants.
fn with_claims(
    mut allocated: Allocated,
    claims: &[GrantAnnotation],
    cdi_devices: &BTreeSet<String>,
) -> Allocated {
    allocated.has_claim_grants = !claims.is_empty();
    let parts: BTreeSet<PartId> =
        claims.iter().flat_map(|grant| &grant.parts).map(|(part, _)| part.clone()).collect();
    // Each device of a grant is a CDI device of the kind DRIVER/berth, and a device of the node's CDI specification.
    let is_of_grant = |name: &&String| {
        let id = name.split_once("/berth=").and_then(|(_, id)| id.rsplit_once('-'));
        id.is_some_and(|(id, _)| claims.iter().any(|grant| grant.allocation.to_string() == id))
    };
    let (named_by_grants, not_named): (Vec<_>, Vec<_>) =
        cdi_devices.difference(&allocated.cdi_devices).cloned().partition(|name| is_of_grant(&name));
    allocated.cdi_devices.extend(named_by_grants);
    // The others are those of the granted parts only if there are no more of them than parts. If there are more, another driver
    // or a claim with admin access added some, and it is not known which: then none of them counts as allocated.
    if not_named.len() <= parts.len() {
        allocated.cdi_devices.extend(not_named);
    }
    allocated.parts.extend(parts);
    allocated
}

fn log_message(outcome: BypassOutcome) -> &'static str {
    match outcome {
        BypassOutcome::Failed => {
            "a container can use GPUs that were not allocated to it, and the guard could not stop that"
        }
        BypassOutcome::Stripped => {
            "the guard restricted a container that could use GPUs that were not allocated to it"
        }
        BypassOutcome::Denied => {
            "the guard refused a container that could use GPUs that were not allocated to it"
        }
    }
}

fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

fn bypass_of(pod: &PodSandbox, container: &Container, verdict: &Verdict) -> ContainerBypass {
    let mut details: Vec<_> = verdict.unallocated.iter().take(DETAILS_MAX).map(ToString::to_string).collect();
    if let Some(more @ 1..) = verdict.unallocated.len().checked_sub(DETAILS_MAX) {
        details.push(format!("and {more} more"));
    }
    ContainerBypass {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        container: container.name.clone(),
        details,
        wall_ms: now_ms(),
        ..ContainerBypass::default()
    }
}

/// The kubelet shows it as an event of the pod. `remedies`: one for each way in which the container can use other GPUs.
fn refusal(rules: &BypassRules, bypass: &ContainerBypass, remedies: &BTreeSet<&str>) -> Refusal {
    let details = bypass.details.join("; ");
    if !bypass.why.is_empty() {
        let why = &bypass.why;
        return Refusal(format!(
            "the container can use GPUs ({details}), and the guard does not know which were allocated to it: {why}. The kubelet \
             tries again; if this repeats, `berth node check` shows what is wrong"
        ));
    }
    let resources = match rules.resources.as_slice() {
        [] => "a GPU".to_owned(),
        all => all.join(" or "),
    };
    let remedies: Vec<_> = remedies.iter().copied().collect();
    Refusal(format!(
        "the container can use GPUs that were not allocated to it: {details}. To run it, {}, and request {resources} in its \
         `resources.limits` if it needs a GPU; or add its namespace to `bypass.exemptNamespaces` in Berth's configuration",
        remedies.join(", ")
    ))
}

/// The change of a container. A key or target with `-` before it is removed first: another plugin may have set it.
fn adjustment(verdict: &Verdict) -> ContainerAdjustment {
    let set = verdict.visible_devices.iter().flat_map(|value| {
        [(format!("-{VISIBLE_DEVICES}"), ""), (VISIBLE_DEVICES.to_owned(), value.as_str())]
    });
    let mounts = verdict.removed_mounts.iter();
    ContainerAdjustment {
        env: set.map(|(key, value)| KeyValue { key, value: value.to_owned() }).collect(),
        mounts: mounts
            .map(|target| Mount { destination: format!("-{target}"), ..Mount::default() })
            .collect(),
    }
}

/// What a container would run with.
fn access_of(pod: &PodSandbox, container: &Container) -> ContainerAccess {
    let is_variable = |variable: &&String| variable.split('=').next() == Some(VISIBLE_DEVICES);
    let named = |mount: &&Mount| {
        clean(&mount.source) == Path::new(MOUNT_SOURCE)
            && clean(&mount.destination).starts_with(DEVICE_MOUNTS)
    };
    // A runtime may copy the annotations of a pod, which its author writes, to its containers.
    let is_copied = |(key, value): &(&String, &String)| pod.annotations.get(*key) == Some(*value);
    let (copied, own): (Vec<_>, Vec<_>) = container.annotations.iter().partition(is_copied);
    let cdi = container.cdi_devices.iter().map(|device| device.name.clone());
    let named_by = |(key, value): (&String, &String)| -> Vec<String> {
        cdi_devices([(key.as_str(), value.as_str())].into_iter()).collect()
    };
    let names_gpus = |annotation: &(&String, &String)| named_by(*annotation).iter().any(|name| is_gpu(name));
    let is_nri = |key: &&String| key.split('/').next() == Some(NRI_ANNOTATIONS);
    let by_pod = pod.annotations.keys().filter(is_nri);
    let by_pod = by_pod.chain(copied.into_iter().filter(names_gpus).map(|(key, _)| key));
    ContainerAccess {
        visible_devices: visible_devices(&container.env),
        has_variable_twice: container.env.iter().filter(is_variable).count() > 1,
        mounts: container.mounts.iter().filter(named).map(|mount| mount.destination.clone()).collect(),
        annotations: by_pod.cloned().collect(),
        cdi_devices: cdi.chain(own.into_iter().flat_map(named_by)).filter(|name| is_gpu(name)).collect(),
        is_privileged: is_privileged(container),
    }
}

/// The path without `.`, `..` and empty parts.
fn clean(path: &str) -> PathBuf {
    let mut cleaned = PathBuf::new();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => drop(cleaned.pop()),
            Component::CurDir => {}
            _ => cleaned.push(part),
        }
    }
    cleaned
}

/// Denies a cgroup access to the devices of NVIDIA's driver, but for those of the GPUs with these minor numbers.
fn deny(minors: &BTreeSet<u32>, cgroup: &ContainerCgroup) -> io::Result<()> {
    denied_devices(&fs::read_to_string(DRIVERS)?, minors).apply_to(cgroup.path())
}

/// The major numbers of NVIDIA's drivers, and whether each is that of the GPUs, by the kernel's list of drivers.
fn majors(drivers: &str) -> BTreeMap<u32, bool> {
    let characters = drivers.lines().take_while(|line| !line.starts_with("Block"));
    let mut majors = BTreeMap::new();
    for line in characters {
        let Some((major, name)) = line.trim().split_once(' ') else { continue };
        if let Ok(major) = major.parse()
            && name.starts_with("nvidia")
        {
            // One number has several names with newer drivers.
            *majors.entry(major).or_insert(false) |= ["nvidia", "nvidia-frontend"].contains(&name);
        }
    }
    majors
}

/// The minor numbers of the parts' GPUs, or why they are not known.
fn minors(rules: &BypassRules, parts: &BTreeSet<PartId>) -> Result<BTreeSet<u32>, String> {
    let minor = |part: &PartId| {
        let found = rules.parts.iter().find(|one| one.part == part.as_str());
        found
            .map(|one| one.minor)
            .ok_or_else(|| format!("NVML did not report the minor number of {part}, which was granted to it"))
    };
    parts.iter().map(minor).collect()
}

/// What is denied to a container that was granted the GPUs with these minor numbers.
fn denied_devices(drivers: &str, granted: &BTreeSet<u32>) -> DeniedDevices {
    let majors = majors(drivers);
    if granted.is_empty() {
        return DeniedDevices { majors: majors.into_keys().collect(), all_but: None };
    }
    let gpus = majors.into_iter().find_map(|(major, is_of_gpus)| is_of_gpus.then_some(major));
    let open = granted.iter().copied().chain(CONTROL_MINORS).collect();
    DeniedDevices { majors: BTreeSet::new(), all_but: gpus.map(|major| (major, open)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::containers::Containers;
    use berth_proto::guard::{KnownPods, PartDeviceNode};
    use berth_proto::nri::{CdiDevice, LinuxContainer, LinuxDeviceCgroup, LinuxResources};

    fn pod(namespace: &str) -> PodSandbox {
        PodSandbox {
            id: "s".into(),
            name: "p".into(),
            uid: "uid-1".into(),
            namespace: namespace.into(),
            ..PodSandbox::default()
        }
    }

    fn container(environment: &[&str]) -> Container {
        Container {
            id: "c".into(),
            pod_sandbox_id: "s".into(),
            name: "main".into(),
            env: environment.iter().map(|variable| (*variable).to_owned()).collect(),
            ..Container::default()
        }
    }

    fn privileged() -> Container {
        let rule = LinuxDeviceCgroup { allow: true, access: "rwm".into(), ..LinuxDeviceCgroup::default() };
        let resources = Some(LinuxResources { devices: vec![rule] });
        Container { linux: Some(LinuxContainer { resources, ..LinuxContainer::default() }), ..container(&[]) }
    }

    fn rules(action: guard::BypassAction) -> BypassRules {
        BypassRules {
            action: action.into(),
            exempt_namespaces: vec!["kube-system".into()],
            pods_setting_visible_devices: vec!["uid-1".into()],
            resources: vec!["nvidia.com/gpu".into()],
            parts: vec![PartDeviceNode { part: "GPU-1".into(), minor: 1 }],
            pods_with_claims: vec!["uid-3".into()],
            known_pods: Some(KnownPods { uids: ["uid-1", "uid-2", "uid-3"].map(Into::into).into() }),
        }
    }

    struct Setup {
        guard: Arc<GuardState>,
        bypass: BypassGuard,
        folder: tempfile::TempDir,
    }

    impl Setup {
        /// `allocated`: the response of a device plugin for the container, as JSON of the checkpoint's entry.
        fn new(action: guard::BypassAction, entries: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let settings = Settings {
                device_plugins: folder.path().into(),
                cgroup_root: folder.path().join("cgroup"),
                own_namespace: Some("berth".into()),
                ..Settings::default()
            };
            let guard = Arc::new(GuardState::new(Settings::default().claim_grants));
            let (_, rules) = watch::channel(Some(Arc::new(rules(action))));
            let setup =
                Self { bypass: BypassGuard::new(&settings, Arc::clone(&guard), rules), guard, folder };
            setup.checkpoint(entries);
            setup
        }

        fn checkpoint(&self, entries: &str) {
            let checkpoint = format!(r#"{{"Data":{{"PodDeviceEntries":[{entries}]}}}}"#);
            fs::write(self.folder.path().join("kubelet_internal_checkpoint"), checkpoint).unwrap();
        }

        async fn create(&self, pod: &PodSandbox, container: &Container) -> Result<Vec<String>, Refusal> {
            let known = &self.guard;
            known.update(|known: &mut Containers| known.create(pod, container));
            let adjusted = self.bypass.create(pod, container).await?;
            let set = adjusted.env.iter().map(|one| format!("{}={}", one.key, one.value));
            Ok(set.chain(adjusted.mounts.into_iter().map(|mount| mount.destination)).collect())
        }

        /// What was done: outcome, why, and how often.
        fn bypasses(&self) -> Vec<(BypassOutcome, String, u32)> {
            let bypasses = self.guard.published().bypasses.into_iter();
            bypasses.map(|bypass| (bypass.outcome(), bypass.why.clone(), bypass.count)).collect()
        }
    }

    /// An entry whose response gives GPU-1 by the environment: `envs: {NVIDIA_VISIBLE_DEVICES: GPU-1}`, base64 of protobuf.
    const OF_ANOTHER: &str = r#"{"PodUID":"uid-1","ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-1"]},"AllocResp":"Ch8KFk5WSURJQV9WSVNJQkxFX0RFVklDRVMSBUdQVS0x"}"#;
    /// An entry of Berth: the annotations `cdi.k8s.io/berth_1: nvidia.com/gpu=GPU-1` and that of a grant of GPU-1.
    const OF_BERTH: &str = r#"{"PodUID":"uid-1","ContainerName":"main","ResourceName":"nvidia.com/gpu","DeviceIDs":{"-1":["GPU-1"]},"AllocResp":"IioKEmNkaS5rOHMuaW8vYmVydGhfMRIUbnZpZGlhLmNvbS9ncHU9R1BVLTEiMgoeYmVydGguZGV2L2dyYW50Lm52aWRpYS5jb21fZ3B1EhAwMDAwMDAyYS03IEdQVS0x"}"#;
    const VOID: [&str; 2] = ["-NVIDIA_VISIBLE_DEVICES=", "NVIDIA_VISIBLE_DEVICES=void"];
    const ALL: &str = "NVIDIA_VISIBLE_DEVICES=all";

    #[tokio::test]
    async fn what_was_not_allocated_is_taken_away() {
        let setup = Setup::new(guard::BypassAction::Strip, "");
        let mut asking = container(&["A=b", ALL]);
        let mount = |target: &str, source: &str| Mount { destination: target.into(), source: source.into() };
        asking.mounts = vec![
            mount("/var/run//nvidia-container-devices/all", "/dev/null"),
            mount("/var/run/nvidia-container-devices/data", "/var/lib/kubelet/volume"),
            mount("/etc/nvidia-container-devices.d", "/dev/null"),
        ];
        let changed = setup.create(&pod("team"), &asking).await.unwrap();
        assert_eq!(changed, [VOID[0], VOID[1], "-/var/run//nvidia-container-devices/all"]);
        assert_eq!(setup.bypasses(), [(BypassOutcome::Stripped, String::new(), 1)]);
        let nothing: [&str; 0] = [];
        for exempt in ["kube-system", "berth"] {
            assert_eq!(setup.create(&pod(exempt), &asking).await.unwrap(), nothing);
        }
        assert_eq!(setup.create(&pod("team"), &container(&["A=b"])).await.unwrap(), nothing);
        setup.guard.update(|known| known.end_sandbox("s"));
        assert_eq!(setup.bypasses(), [], "its pod has ended");
    }

    #[tokio::test]
    async fn what_a_device_plugin_allocated_stays() {
        let setup = Setup::new(guard::BypassAction::Deny, OF_ANOTHER);
        let allocated = container(&["NVIDIA_VISIBLE_DEVICES=GPU-1"]);
        let nothing: [&str; 0] = [];
        assert_eq!(setup.create(&pod("team"), &allocated).await.unwrap(), nothing);
        let own = Container { name: "other".into(), ..allocated };
        setup.create(&pod("team"), &own).await.unwrap_err();
        let strip = Setup::new(guard::BypassAction::Strip, OF_ANOTHER);
        let changed = strip.create(&pod("team"), &container(&[ALL])).await.unwrap();
        assert_eq!(changed[1], "NVIDIA_VISIBLE_DEVICES=GPU-1");
        assert_eq!(strip.create(&pod("team"), &privileged()).await.unwrap(), nothing);
        assert!(strip.bypass.watched.lock().is_empty(), "the GPUs of another plugin are not denied");
    }

    #[tokio::test]
    async fn a_refusal_names_the_cause_and_what_to_request() {
        let setup = Setup::new(guard::BypassAction::Deny, "");
        for _ in 0..2 {
            let Refusal(text) = setup.create(&pod("team"), &container(&[ALL])).await.unwrap_err();
            assert!(
                text.contains(r#"NVIDIA_VISIBLE_DEVICES is "all""#) && text.contains("nvidia.com/gpu"),
                "{text}"
            );
        }
        setup.create(&pod("team"), &privileged()).await.unwrap_err();
        assert_eq!(setup.bypasses(), [(BypassOutcome::Denied, String::new(), 3)]);
        let image = PodSandbox { uid: "uid-2".into(), ..pod("team") };
        assert_eq!(setup.create(&image, &container(&[ALL])).await.unwrap(), VOID, "the image sets it");
    }

    #[tokio::test]
    async fn without_the_checkpoint_deny_refuses_and_strip_looks_again_at_the_start() {
        let deny = Setup::new(guard::BypassAction::Deny, "{");
        let Refusal(text) = deny.create(&pod("team"), &privileged()).await.unwrap_err();
        assert!(text.contains("kubelet_internal_checkpoint"), "{text}");
        let strip = Setup::new(guard::BypassAction::Strip, "{");
        let nothing: [&str; 0] = [];
        assert_eq!(strip.create(&pod("team"), &privileged()).await.unwrap(), nothing);
        assert_eq!(strip.bypasses(), [], "all of it may have been allocated to it");
        let started = Container { pid: std::process::id(), ..privileged() };
        strip.bypass.start(&pod("team"), &started).await;
        let bypasses = strip.bypasses();
        assert!(
            bypasses[0].0 == BypassOutcome::Failed && bypasses[0].1.contains("kubelet_internal_checkpoint"),
            "{bypasses:?}"
        );
        strip.checkpoint(OF_ANOTHER);
        strip.bypass.deny_devices("c").await;
        assert!(strip.bypass.watched.lock().is_empty(), "another plugin allocated a GPU to it");
    }

    #[tokio::test]
    async fn a_privileged_container_with_a_cdi_device_of_berth_can_open_only_that_gpu() {
        let key = "cdi.k8s.io/berth_1".to_owned();
        let annotations = [(key, "nvidia.com/gpu=GPU-1".to_owned())].into();
        let container = Container { annotations, ..privileged() };
        let strip = Setup::new(guard::BypassAction::Strip, OF_BERTH);
        strip.create(&pod("team"), &container).await.unwrap();
        assert_eq!(strip.bypass.watched.lock()["c"].minors, Some([1].into()));
        let deny = Setup::new(guard::BypassAction::Deny, OF_BERTH);
        deny.create(&pod("team"), &container).await.unwrap_err();
    }

    #[tokio::test]
    async fn a_privileged_container_with_a_claim_of_berth_can_open_only_that_gpu() {
        let claiming = PodSandbox { uid: "uid-3".into(), ..pod("team") };
        let grants = Settings::default().claim_grants;
        let source =
            grants.join("uid-of-claim/gpu/0000002a-7/GPU-1=4096/metadata.json").display().to_string();
        let mounts = vec![Mount { source, destination: "/var/run/berth/grants/0000002a-7.json".into() }];
        let device = |name: &str| CdiDevice { name: name.into() };
        // The kind of the node's CDI specification: NVIDIA's, or that of the one which Berth generates.
        for kind in ["nvidia.com/gpu", "berth/gpu"] {
            let cdi_devices =
                vec![device("gpu.nvidia.com/berth=0000002a-7-0"), device(&format!("{kind}=GPU-1"))];
            let container = Container { mounts: mounts.clone(), cdi_devices, ..privileged() };
            let strip = Setup::new(guard::BypassAction::Strip, "");
            strip.create(&claiming, &container).await.unwrap();
            assert_eq!(strip.bypass.watched.lock()["c"].minors, Some([1].into()));
            let deny = Setup::new(guard::BypassAction::Deny, "");
            deny.create(&claiming, &container).await.unwrap_err();
            // Another container of the pod may have devices of another driver.
            deny.create(&claiming, &privileged()).await.unwrap();
            // A claim of another driver, or one with admin access, has no mount.
            for more in ["k8s.gpu.other.nvidia.com/claim=a", &format!("{kind}=GPU-0")] {
                let mut with_more = container.clone();
                with_more.cdi_devices.push(device(more));
                deny.create(&claiming, &with_more).await.unwrap();
                let strip = Setup::new(guard::BypassAction::Strip, "");
                strip.create(&claiming, &with_more).await.unwrap();
                assert!(strip.bypass.watched.lock().is_empty(), "{more}");
            }
            // The mount names the container's GPU even while the daemon has not shown the pod.
            let later = PodSandbox { uid: "uid-4".into(), ..pod("team") };
            let strip = Setup::new(guard::BypassAction::Strip, "");
            strip.create(&later, &container).await.unwrap();
            assert_eq!(strip.bypass.watched.lock()["c"].minors, Some([1].into()));
        }
    }

    #[tokio::test]
    async fn a_late_checkpoint_denies_no_device_to_a_container_with_gpus_of_another_plugin() {
        let strip = Setup::new(guard::BypassAction::Strip, "{");
        let asking = container(&["NVIDIA_VISIBLE_DEVICES=GPU-1", ALL]);
        strip.create(&pod("team"), &asking).await.unwrap();
        strip.checkpoint(OF_ANOTHER);
        strip.bypass.start(&pod("team"), &Container { pid: std::process::id(), ..asking }).await;
        assert_eq!(strip.bypasses(), [(BypassOutcome::Failed, UNKNOWN_GPUS.into(), 1)]);
        assert!(strip.bypass.watched.lock().is_empty());
    }

    #[tokio::test]
    async fn what_cannot_be_denied_is_shown_until_it_can() {
        let setup = Setup::new(guard::BypassAction::Strip, "");
        setup.create(&pod("team"), &privileged()).await.unwrap();
        assert_eq!(setup.bypasses(), [], "it is not started");
        let started = Container { pid: std::process::id(), ..privileged() };
        for _ in 0..2 {
            setup.bypass.start(&pod("team"), &started).await;
        }
        assert_eq!(setup.bypasses(), [(BypassOutcome::Failed, NO_CGROUP.into(), 1)]);
        let folder = setup.folder.path().join("cgroup");
        fs::create_dir_all(&folder).unwrap();
        let cgroup = ContainerCgroup::at(&folder);
        setup.bypass.watched.lock().get_mut("c").unwrap().cgroup = Some(cgroup);
        setup.bypass.deny_devices("c").await;
        // Without NVIDIA's driver there is nothing to deny.
        let outcomes: Vec<_> =
            setup.bypasses().into_iter().map(|(outcome, _, count)| (outcome, count)).collect();
        let has_driver = !majors(&fs::read_to_string(DRIVERS).unwrap()).is_empty();
        assert_eq!(
            outcomes,
            [if has_driver { (BypassOutcome::Failed, 2) } else { (BypassOutcome::Stripped, 2) }]
        );
        setup.bypass.end("c");
        assert!(setup.bypass.watched.lock().is_empty());
    }

    #[tokio::test]
    async fn devices_are_denied_to_a_container_that_ran_before_the_guard() {
        let setup = Setup::new(guard::BypassAction::Deny, "");
        let running = Container { pid: std::process::id(), ..container(&[ALL]) };
        setup.guard.update(|known| known.create(&pod("team"), &running));
        setup.bypass.judge_all_running(vec![(pod("team"), running.clone())]).await;
        assert_eq!(setup.bypasses(), [(BypassOutcome::Failed, NO_CGROUP.into(), 1)]);
        let claiming = PodSandbox { uid: "uid-3".into(), ..pod("team") };
        let admin = Container { id: "d".into(), pid: 1, ..privileged() };
        setup.bypass.judge_all_running(vec![(claiming, admin)]).await;
        assert_eq!(setup.bypasses().len(), 1, "a claim may have allocated GPUs to it");
    }

    #[tokio::test]
    async fn a_pod_that_the_daemon_has_not_shown_may_have_claims() {
        let later = PodSandbox { uid: "uid-4".into(), ..pod("team") };
        let deny = Setup::new(guard::BypassAction::Deny, "");
        let Refusal(text) = deny.create(&later, &privileged()).await.unwrap_err();
        assert!(text.contains("has not shown its pod") && text.contains("tries again"), "{text}");
        let with_mount = Mount { destination: format!("{DEVICE_MOUNTS}/all"), source: MOUNT_SOURCE.into() };
        let mounting = Container { name: "mounting".into(), mounts: vec![with_mount], ..privileged() };
        let Refusal(text) = deny.create(&later, &mounting).await.unwrap_err();
        assert!(text.contains("remove the mount"), "a claim would not allow it: {text}");
        let claiming = PodSandbox { uid: "uid-3".into(), ..pod("team") };
        deny.create(&claiming, &privileged()).await.unwrap();
        let mut strip = Setup::new(guard::BypassAction::Strip, "");
        let named = Container { env: vec![ALL.into()], name: "named".into(), ..privileged() };
        assert_eq!(strip.create(&later, &named).await.unwrap(), VOID, "with a claim or without");
        strip.bypass.end("c");
        strip.guard.update(|known| known.end_sandbox("s"));
        let shown = rules(guard::BypassAction::Strip);
        let (sender, receiver) = watch::channel(Some(Arc::new(shown.clone())));
        strip.bypass.rules = receiver;
        let started = |id: &str| Container { id: id.into(), pid: std::process::id(), ..privileged() };
        for id in ["c", "d"] {
            strip.create(&later, &started(id)).await.unwrap();
            strip.bypass.start(&later, &started(id)).await;
        }
        let unknown = (BypassOutcome::Failed, UNKNOWN_POD.into(), 2);
        assert_eq!(strip.bypasses(), [unknown], "nothing is denied yet");
        let mut with_claim = shown;
        with_claim.known_pods.as_mut().unwrap().uids.push("uid-4".into());
        let without_claim = with_claim.clone();
        with_claim.pods_with_claims.push("uid-4".into());
        let bypass = Arc::new(strip.bypass);
        let running = tokio::spawn({
            let bypass = Arc::clone(&bypass);
            async move { bypass.run().await }
        });
        sender.send_replace(Some(Arc::new(with_claim)));
        // As soon as the daemon shows the pod.
        while !bypass.watched.lock().is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(strip.guard.published().bypasses.len(), 0, "with a claim it was no bypass");
        strip.guard.update(|known| known.create(&later, &started("c")));
        sender.send_replace(Some(Arc::new(without_claim)));
        bypass.start(&later, &started("c")).await;
        assert_eq!(bypass.watched.lock()["c"].minors, Some(BTreeSet::new()));
        running.abort();
    }

    #[tokio::test]
    async fn a_variable_that_is_there_twice_has_devices_denied() {
        let setup = Setup::new(guard::BypassAction::Strip, "");
        let twice = container(&["NVIDIA_VISIBLE_DEVICES=void", ALL]);
        setup.create(&pod("team"), &twice).await.unwrap();
        assert_eq!(setup.bypass.watched.lock()["c"].minors, Some(BTreeSet::new()));
    }

    const LIST: &str = "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n507 nvidia-uvm\n508 nvidia-caps\n\nBlock devices:\n259 nvidia-block\n";

    #[test]
    fn the_drivers_of_the_gpus_are_found_by_their_names() {
        let expected: BTreeMap<_, _> = [(195, true), (507, false), (508, false)].into();
        assert_eq!(majors(LIST), expected);
        assert_eq!(majors("Character devices:\n195 nvidia-frontend\n"), [(195, true)].into());
        assert_eq!(majors(""), BTreeMap::new());
    }

    #[test]
    fn everything_is_denied_but_the_granted_gpus_with_their_control_nodes() {
        let all = denied_devices(LIST, &BTreeSet::new());
        assert_eq!(all, DeniedDevices { majors: [195, 507, 508].into(), all_but: None });
        let some = denied_devices(LIST, &[1].into());
        assert_eq!(some, DeniedDevices { majors: [].into(), all_but: Some((195, [1, 254, 255].into())) });
        let part = |name: &str| BTreeSet::from([PartId::parse(name).unwrap()]);
        let rules = rules(guard::BypassAction::Strip);
        assert_eq!(minors(&rules, &part("GPU-1")), Ok([1].into()));
        assert!(minors(&rules, &part("GPU-2")).unwrap_err().contains("GPU-2"));
    }

    #[test]
    fn cdi_devices_are_those_of_the_field_and_of_annotations() {
        let mut asking = container(&[]);
        asking.cdi_devices = vec![CdiDevice { name: "nvidia.com/gpu=0".into() }];
        asking.annotations = [("cdi.k8s.io/x".to_owned(), "a.com/b=1, nvidia.com/gpu=1".to_owned())].into();
        let cdi: Vec<String> = access_of(&pod("team"), &asking).cdi_devices.into_iter().collect();
        assert_eq!(cdi, ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]);
        let copied = PodSandbox { annotations: asking.annotations.clone(), ..pod("team") };
        let access = access_of(&copied, &asking);
        assert_eq!(access.cdi_devices, ["nvidia.com/gpu=0".to_owned()].into());
        assert_eq!(access.annotations, ["cdi.k8s.io/x".to_owned()].into());
    }

    #[test]
    fn an_annotation_for_nvidias_plugin_counts() {
        let key = "nvidia.cdi.k8s.io/container.main".to_owned();
        let annotations =
            [(key.clone(), "nvidia.com/gpu=all".to_owned()), ("nvidia.cdi.k8s.iox/a".into(), String::new())];
        let of_pod = PodSandbox { annotations: annotations.into(), ..pod("team") };
        assert_eq!(access_of(&of_pod, &container(&[])).annotations, [key].into());
    }

    #[test]
    fn a_bypass_lists_a_few_ways_and_how_many_more() {
        let mounts = (0..20).map(|n| format!("{DEVICE_MOUNTS}/{n}"));
        let many = ContainerAccess { mounts: mounts.collect(), ..ContainerAccess::default() };
        let verdict =
            judge(BypassAction::Strip, &many, &Allocated::default(), PodFacts::default(), Phase::Created);
        let bypass = bypass_of(&pod("team"), &container(&[]), &verdict);
        assert_eq!((bypass.details.len(), bypass.details[8].as_str()), (9, "and 12 more"));
    }
}
