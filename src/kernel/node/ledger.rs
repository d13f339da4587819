//! The state of the node: what each part is offered as, and which container holds which devices.
//!
//! A ledger is a value. Cloning one is cheap (its sections are shared and copied on write), so a
//! snapshot is a clone, and a reader never sees half a change (I11).

use crate::drain::eviction::EvictionRecord;
use crate::drain::marks::{Drain, Empty, Marks};
use crate::evidence::pods::{PodState, PodsView};
use crate::evidence::runtime::RuntimeView;
use crate::evidence::sighting::{BlockedEnds, Sighting};
use crate::grants::allocation::{Allocation, End, EndReason, GrantOrigin, Holder};
use crate::grants::history::History;
use crate::hardware::device_access::DeviceAccess;
use crate::hardware::gpu::{Links, ScanError, UnidentifiedGpu, Usage};
use crate::hardware::health::{Health, HealthState};
use crate::hardware::process::ProcessTable;
use crate::ids::names::{AllocationId, DeviceId, Digest, GpuId, PartId, Resource};
use crate::ids::time::Now;
use crate::node::change::{Change, Entry};
use crate::node::refusal::Refusal;
use crate::node::rules::Rules;
use crate::policy::hooks::Hook;
use crate::policy::stack::{PastStacks, Stack, StackEntry, keep_past};
use crate::policy::version::PolicyVersion;
use crate::sharing::breaker::Breaker;
use crate::sharing::offer::{Consumes, OfferLine};
use crate::sharing::part_state::{Device, DeviceState, PartState, Taken};
use crate::sharing::via::{KubeletApi, Via};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The state of one GPU, shared by its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuState {
    /// The cordons and drains of its owners.
    pub marks: Marks,
    /// The API of the kubelet through which it is granted.
    pub via: Via,
    /// Its health.
    pub health: Health,
    /// While it drains: since when no process uses it.
    pub empty: Option<Empty>,
    /// Since when its devices wait to leave the device lists, monotonic milliseconds: the GPU was found, its `via` changed, a
    /// device was added, or an allocation of the device plugin API on it began or ended, whichever was last. `None` after
    /// they have left ([`unlisting_due`]).
    ///
    /// [`unlisting_due`]: crate::sharing::listing::unlisting_due
    pub unlisting_wait_since_mono_ms: Option<u64>,
}

impl GpuState {
    /// An active GPU of this health, granted through the device plugin API, that was found at this time.
    #[must_use]
    pub fn new(health: Health, now: Now) -> Self {
        let unlisting_wait_since_mono_ms = Some(now.mono_ms);
        Self {
            marks: Marks::default(),
            via: Via::default(),
            health,
            empty: None,
            unlisting_wait_since_mono_ms,
        }
    }

    /// Its drain state.
    #[must_use]
    pub fn drain(&self) -> Drain {
        self.marks.drain()
    }
}

/// The whole state of the kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ledger {
    /// Grows by one with each applied entry (I11).
    pub generation: u64,
    /// The settings of the rules.
    pub rules: Arc<Rules>,
    /// Identifies the store in allocation ids.
    pub store: u32,
    /// The number of the next allocation.
    pub next_number: u64,
    /// Parts by id.
    pub parts: BTreeMap<PartId, Arc<PartState>>,
    /// GPUs by id.
    pub gpus: BTreeMap<GpuId, Arc<GpuState>>,
    /// The topology between GPUs.
    pub links: Arc<Links>,
    /// Utilisation of the parts at the last inventory scan.
    pub usage: Arc<BTreeMap<PartId, Usage>>,
    /// GPUs that are present but did not answer the last scan, with the error.
    pub scan_errors: Arc<BTreeMap<GpuId, ScanError>>,
    /// GPUs of the last scan whose UUID is not known.
    pub unidentified: Arc<Vec<UnidentifiedGpu>>,
    /// GPUs that the configuration excludes: nothing is offered or granted on them.
    pub excluded: Arc<BTreeSet<GpuId>>,
    /// Processes on the GPUs at the last scan.
    pub processes: Arc<ProcessTable>,
    /// Live allocations.
    pub live: Arc<BTreeMap<AllocationId, Arc<Allocation>>>,
    /// The most recently ended allocations.
    pub ended: Arc<History>,
    /// What reconcile passes observed of live allocations.
    pub sightings: Arc<BTreeMap<AllocationId, Sighting>>,
    /// The pods of this node, if a source lists them.
    pub pods: Option<Arc<PodsView>>,
    /// What the container runtime shows, if the guard has connected once.
    pub runtime: Option<Arc<RuntimeView>>,
    /// Evictions requested for GPUs that are being drained, by pod UID.
    pub evictions: Arc<BTreeMap<String, EvictionRecord>>,
    /// Why no allocation may end at present: all vanished across a kubelet restart.
    pub ends_withheld: Option<Arc<str>>,
    /// Why allocations have been unable to end for some time.
    pub blocked_ends: Option<Arc<BlockedEnds>>,
    /// Creation time of the kubelet.sock under which a live allocation was last seen, milliseconds
    /// since 1970; kept across restarts of the daemon.
    pub kubelet_seen_wall_ms: Option<u64>,
    /// Whether devices can be passed to containers.
    pub device_access: Arc<DeviceAccess>,
    /// Circuit breakers of resources with recent denials.
    pub breakers: Arc<BTreeMap<Resource, Breaker>>,
    /// Policy versions on this node.
    pub policies: Arc<BTreeMap<Digest, Arc<PolicyVersion>>>,
    /// The active stack.
    pub stack: Arc<Stack>,
    /// Previously active stacks.
    pub past_stacks: Arc<PastStacks>,
}

/// Why no new grant may be made on a part. Device lists only need to know that there is a reason, so nothing is copied
/// before an Allocate is refused.
pub(crate) enum Ungrantable<'l> {
    UnknownGpu,
    Vanished,
    /// With the reason of its health.
    Unhealthy(&'l str),
    /// Its GPU is granted through the other API, or is to be.
    OtherApi(&'l Via),
    /// Its GPU has marks.
    Cordoned(&'l GpuState),
    NoCdiName,
}

impl Ungrantable<'_> {
    /// The refusal of an Allocate for this part.
    pub(crate) fn refusal(&self, part: &PartState) -> Refusal {
        let gpu = part.part.gpu.clone();
        match self {
            Self::UnknownGpu => Refusal::UnknownGpu { gpu },
            Self::Vanished => Refusal::Vanished { gpu },
            Self::Unhealthy(reason) => Refusal::Unhealthy { gpu, reason: (*reason).to_owned() },
            Self::OtherApi(via) => Refusal::OtherApi { gpu, via: via.as_str() },
            Self::Cordoned(state) => {
                let drain = state.drain();
                let mark = drain.mark();
                let by = mark.map(|mark| mark.by.clone()).unwrap_or_default();
                Refusal::Cordoned { gpu, by, why: mark.map(|mark| mark.reason()).unwrap_or_default() }
            }
            Self::NoCdiName => Refusal::NoCdiName { part: part.part.id.clone() },
        }
    }
}

impl Ledger {
    /// This ledger under other rules, such as those of a changed configuration that is tried.
    #[must_use]
    pub fn with_rules(&self, rules: &Arc<Rules>) -> Self {
        Self { rules: Arc::clone(rules), ..self.clone() }
    }

    /// The part with this id.
    #[must_use]
    pub fn part(&self, id: &PartId) -> Option<&PartState> {
        self.parts.get(id).map(Arc::as_ref)
    }

    /// The device with this key.
    #[must_use]
    pub fn device(&self, resource: &Resource, id: &DeviceId) -> Option<&Device> {
        self.part(&id.part)?.device(resource, id.share)
    }

    /// The state of a part's GPU.
    #[must_use]
    pub fn gpu_of(&self, part: &PartState) -> Option<&GpuState> {
        self.gpus.get(&part.part.gpu).map(Arc::as_ref)
    }

    /// A GPU and its MIG instances, as far as they are known.
    pub fn parts_of(&self, gpu: &GpuId) -> impl Iterator<Item = &PartState> {
        self.parts.values().map(AsRef::as_ref).filter(move |p| &p.part.gpu == gpu)
    }

    /// The id of a part's GPU; of a part that is not known, its own.
    #[must_use]
    pub fn gpu_id_of(&self, part: &PartId) -> GpuId {
        self.part(part).map_or_else(|| GpuId::of_whole(part), |p| p.part.gpu.clone())
    }

    /// The index by which a GPU can be named; `None` for one that vanished and whose index another GPU has now.
    #[must_use]
    pub fn index_of(&self, gpu: &GpuId) -> Option<u32> {
        let part = self.part(gpu.as_part()).or_else(|| self.parts_of(gpu).next())?;
        let index = part.part.gpu_index;
        let has_it =
            |other: &Arc<PartState>| other.present && other.part.gpu_index == index && &other.part.gpu != gpu;
        let is_present = self.parts_of(gpu).any(|part| part.present);
        (is_present || !self.parts.values().any(has_it)).then_some(index)
    }

    /// The GPUs of an allocation's devices, sorted, each once.
    #[must_use]
    pub fn gpus_of(&self, allocation: &Allocation) -> BTreeSet<GpuId> {
        allocation.devices.iter().map(|id| self.gpu_id_of(&id.part)).collect()
    }

    /// The live allocations on these parts, sorted by id, each once.
    pub fn allocations_on<'l>(
        &'l self,
        parts: impl IntoIterator<Item = &'l PartState>,
    ) -> Vec<&'l Allocation> {
        let devices = parts.into_iter().flat_map(|p| p.devices.values());
        let ids: BTreeSet<AllocationId> = devices.flat_map(|d| d.holders.iter().copied()).collect();
        ids.iter().filter_map(|id| self.live.get(id)).map(AsRef::as_ref).collect()
    }

    /// Every resource that has a listed device, sorted.
    #[must_use]
    pub fn resources(&self) -> BTreeSet<Resource> {
        self.parts.values().flat_map(|p| p.devices.keys().map(|(r, _)| r.clone())).collect()
    }

    /// Whether containers can use this part: it is present, its GPU works, and devices can be passed to containers.
    #[must_use]
    pub fn is_usable(&self, part: &PartState) -> bool {
        self.device_access.no_strategy.is_none()
            && part.present
            && self.gpu_of(part).is_some_and(|g| g.health.state.is_usable())
    }

    /// Whether new grants may be made on this part (I4).
    #[must_use]
    pub fn may_grant(&self, part: &PartState) -> bool {
        self.device_access.no_strategy.is_none()
            && !self.is_excluded(part)
            && self.ungrantable(part).is_none()
    }

    /// Why the device plugin may grant nothing new on this part (I4), apart from an exclusion by the configuration and from
    /// a node without a strategy. Device lists use it through [`Self::may_grant`], so that no device is listed as Healthy
    /// whose Allocate would be refused (I3).
    pub(crate) fn ungrantable(&self, part: &PartState) -> Option<Ungrantable<'_>> {
        self.ungrantable_through(KubeletApi::DevicePlugin, part)
    }

    /// As [`Self::ungrantable`], for a grant through this API. Of several reasons, a cordon is named last but one.
    pub(crate) fn ungrantable_through(&self, api: KubeletApi, part: &PartState) -> Option<Ungrantable<'_>> {
        let Some(state) = self.gpu_of(part) else { return Some(Ungrantable::UnknownGpu) };
        if !part.present || state.health.state == HealthState::Vanished {
            return Some(Ungrantable::Vanished);
        }
        if state.health.state == HealthState::Unhealthy {
            return Some(Ungrantable::Unhealthy(&state.health.reason));
        }
        if !state.via.grants(api) {
            return Some(Ungrantable::OtherApi(&state.via));
        }
        if !state.marks.is_empty() {
            return Some(Ungrantable::Cordoned(state));
        }
        (!self.device_access.gives(api, part)).then_some(Ungrantable::NoCdiName)
    }

    /// Whether this device may be granted to a new pod once it is free (I4). False for a retiring device.
    #[must_use]
    pub fn may_grant_device(&self, resource: &Resource, id: &DeviceId) -> bool {
        let part = self.part(&id.part).filter(|part| self.may_grant(part));
        let device = part.and_then(|part| Some((part, part.device(resource, id.share)?)));
        device.is_some_and(|(part, device)| {
            device.offered() && self.why_not_enforceable(part, device).is_none()
        })
    }

    /// Whether the configuration excludes the part's GPU.
    #[must_use]
    pub fn is_excluded(&self, part: &PartState) -> bool {
        self.excluded.contains(&part.part.gpu)
    }

    /// The number of GPUs of the node: those that it has or had, and those whose UUID is not known.
    #[must_use]
    pub fn gpu_count(&self) -> usize {
        // A GPU that the last scan did not find may be one whose UUID it could not read: that is one GPU, not two.
        let is_other = |gpu: &&UnidentifiedGpu| self.missing_gpu_at(gpu).is_none();
        self.gpus.len() + self.unidentified.iter().filter(is_other).count()
    }

    /// The GPU that was in the slot of an unidentified one, and that the last scan did not find.
    #[must_use]
    pub fn missing_gpu_at(&self, gpu: &UnidentifiedGpu) -> Option<&GpuId> {
        let was_there = |state: &&Arc<PartState>| {
            !state.present && state.part.is_whole_gpu() && gpu.is_in_slot_of(&state.part)
        };
        self.parts.values().find(was_there).map(|state| &state.part.gpu)
    }

    /// The parts on the same hardware: a GPU's instances, or an instance's GPU.
    pub fn parts_on_same_hardware<'l>(&'l self, part: &'l PartState) -> impl Iterator<Item = &'l PartState> {
        let is_whole_gpu = part.part.is_whole_gpu();
        let gpu = if is_whole_gpu { None } else { self.part(part.part.gpu.as_part()) };
        let parts = is_whole_gpu.then(|| self.parts.values()).into_iter().flatten();
        let instances = parts.filter(|p| p.part.gpu == part.part.gpu && !p.part.is_whole_gpu());
        gpu.into_iter().chain(instances.map(Arc::as_ref))
    }

    /// How much of a part's memory may be granted, MiB.
    #[must_use]
    pub fn memory_to_grant_mib(&self, part: &PartState) -> u64 {
        part.memory_to_grant_mib(self.rules.overcommit_percent)
    }

    /// What held devices take of a part: its own devices, and all of it while a part on the same hardware is held (I2).
    #[must_use]
    pub fn taken(&self, part: &PartState) -> Taken {
        let own = part.taken();
        if self.parts_on_same_hardware(part).any(PartState::held) { own.plus(Consumes::Whole) } else { own }
    }

    /// Whether the policy of this stack entry has this hook; of a version that is not known, it is assumed.
    #[must_use]
    pub fn has_hook(&self, entry: &StackEntry, hook: Hook) -> bool {
        self.policies.get(&entry.digest).is_none_or(|version| version.hooks.contains(&hook))
    }

    /// Whether a policy of the active stack has this hook.
    #[must_use]
    pub fn calls_policies(&self, hook: Hook) -> bool {
        self.stack.entries.iter().any(|entry| self.has_hook(entry, hook))
    }

    /// The newest live allocation that names a device of this part.
    #[must_use]
    pub fn newest_on(&self, part: &PartState) -> Option<&Allocation> {
        let newest = part.devices.values().flat_map(|d| d.holders.iter()).max()?;
        self.live.get(newest).map(Arc::as_ref)
    }

    /// Applies one entry. Cannot fail: the entry was decided against this ledger.
    pub fn apply(&mut self, entry: &Entry) {
        for change in &entry.changes {
            self.apply_change(change, entry.at);
        }
        self.generation += 1;
    }

    fn apply_change(&mut self, change: &Change, at: Now) {
        match change {
            Change::PartFound(part) => self.add_part(part, at),
            Change::PartGone(id) => self.with_part(id, |p| {
                p.present = false;
                p.present_changed_mono_ms = at.mono_ms;
            }),
            Change::PartForgotten(id) => drop(self.parts.remove(id)),
            Change::GpuForgotten(gpu) => {
                self.parts.retain(|_, p| &p.part.gpu != gpu);
                self.gpus.remove(gpu);
            }
            Change::InventoryScanned { links, usage, scan_errors } => {
                self.links = Arc::clone(links);
                self.usage = Arc::clone(usage);
                self.scan_errors = Arc::clone(scan_errors);
            }
            Change::UnidentifiedChanged(gpus) => self.unidentified = Arc::clone(gpus),
            Change::ExcludedChanged(gpus) => self.excluded = Arc::clone(gpus),
            Change::ProcessesSeen(table) => self.processes = Arc::clone(table),
            Change::HealthChanged { gpu, health } => self.with_gpu(gpu, |g| g.health = health.clone()),
            Change::MarksChanged { gpu, marks } => self.with_gpu(gpu, |g| g.marks = marks.clone()),
            Change::ViaChanged { gpu, via } => {
                self.with_gpu(gpu, |g| g.via = via.clone());
                self.list_gpu(gpu, at);
            }
            Change::Unlisted(gpu) => self.with_gpu(gpu, |g| g.unlisting_wait_since_mono_ms = None),
            Change::EmptyChanged { gpu, empty } => self.with_gpu(gpu, |g| g.empty = *empty),
            Change::Offered { part, by, lines, ranges, devices } => {
                self.restart_wait_for_new_devices(part, devices, at);
                self.with_part(part, |p| {
                    // Under other resource names the part's idle time starts again.
                    if !p.held() && resource_names(&p.lines) != resource_names(lines) {
                        p.idle_since_mono_ms = at.mono_ms;
                    }
                    p.offered_by.clone_from(by);
                    p.lines.clone_from(lines);
                    p.ranges.clone_from(ranges);
                    p.devices.clone_from(devices);
                });
            }
            Change::Delisted(key) => self.with_part(&key.id.part, |p| {
                p.devices.remove(&(key.resource.clone(), key.id.share));
            }),
            Change::Granted(allocation) => self.add_allocation(allocation, at),
            Change::HolderLearned { id, holder } => self.with_live(*id, |a| {
                a.holder.update_from(holder);
            }),
            Change::ClaimPodsChanged { id, pods } => self.with_live(*id, |a| {
                if let GrantOrigin::Claim(request) = &mut a.origin {
                    Arc::make_mut(request).pods.clone_from(pods);
                }
                a.holder = a.origin.holder();
            }),
            Change::OverlapResolved(id) => self.with_live(*id, |a| a.overlapped = false),
            Change::Ended { id, reason } => self.end_allocation(*id, *reason, at),
            Change::Pruned(id) => Arc::make_mut(&mut self.ended).remove(*id),
            Change::SightingsUpdated { sightings, ends_withheld } => {
                self.sightings = Arc::clone(sightings);
                self.ends_withheld.clone_from(ends_withheld);
            }
            Change::BlockedEndsChanged(blocked_ends) => self.blocked_ends.clone_from(blocked_ends),
            Change::PodsSeen(view) => self.pods = Some(Arc::clone(view)),
            Change::RuntimeSeen(view) => self.see_containers(view),
            Change::RulesChanged(rules) => self.rules = Arc::clone(rules),
            Change::DeviceAccessChanged(device_access) => self.device_access = Arc::clone(device_access),
            Change::EvictionsUpdated(evictions) => self.evictions = Arc::clone(evictions),
            Change::KubeletSeen(created_wall_ms) => self.kubelet_seen_wall_ms = Some(*created_wall_ms),
            Change::BreakerChanged { resource, breaker } => {
                let breakers = Arc::make_mut(&mut self.breakers);
                match breaker {
                    Some(breaker) => breakers.insert(resource.clone(), breaker.clone()),
                    None => breakers.remove(resource),
                };
            }
            Change::PolicyAdded(version) | Change::PolicyUpdated(version) => {
                Arc::make_mut(&mut self.policies).insert(version.digest.clone(), Arc::new(version.clone()));
            }
            Change::PolicyDeleted(digest) => drop(Arc::make_mut(&mut self.policies).remove(digest)),
            Change::StackActivated(stack) => {
                let before = std::mem::replace(&mut self.stack, Arc::new(stack.clone()));
                keep_past(Arc::make_mut(&mut self.past_stacks), before);
            }
            Change::StackOriginChanged(origin) => Arc::make_mut(&mut self.stack).origin = origin.clone(),
        }
    }

    fn add_part(&mut self, part: &crate::hardware::gpu::Part, at: Now) {
        // A GPU that was absent when a claim on it was adopted.
        let is_claimed =
            |a: &Arc<Allocation>| a.origin.claim().is_some() && a.devices.iter().any(|id| id.part == part.id);
        let via = if self.live.values().any(is_claimed) { KubeletApi::Dra } else { self.rules.via };
        let via = Via::new(via);
        let new = || Arc::new(GpuState { via, ..GpuState::new(Health::healthy(at), at) });
        self.gpus.entry(part.gpu.clone()).or_insert_with(new);
        match self.parts.get_mut(&part.id) {
            Some(state) => {
                let state = Arc::make_mut(state);
                state.part = part.clone();
                if !state.present {
                    state.present_changed_mono_ms = at.mono_ms;
                }
                state.present = true;
            }
            None => {
                let mut state = PartState::new(part.clone(), at.mono_ms);
                self.list_held(&mut state, at);
                self.parts.insert(part.id.clone(), Arc::new(state));
            }
        }
    }

    /// Lists the devices that live allocations already name on a part that appears, such as one that
    /// was absent when an allocation of it was adopted. They are held, and retiring until offered.
    fn list_held(&self, state: &mut PartState, at: Now) {
        for allocation in self.live.values() {
            for id in &allocation.devices {
                if id.part == state.part.id {
                    let device = state.adopt_device(&allocation.resource, id.share, at.mono_ms);
                    device.holders.push(allocation.id);
                }
            }
        }
    }

    fn add_allocation(&mut self, allocation: &Allocation, at: Now) {
        let mut older = BTreeSet::new();
        for id in &allocation.devices {
            self.with_device(&allocation.resource, id, |device| {
                older.extend(device.holders.iter().copied());
                device.holders.push(allocation.id);
                device.last_allocate_mono_ms = Some(at.mono_ms);
            });
        }
        for id in older {
            self.with_live(id, |a| a.overlapped = true);
        }
        self.list_gpus_of(allocation, at);
        if allocation.id.store == self.store {
            self.next_number = self.next_number.max(allocation.id.number.saturating_add(1));
        }
        Arc::make_mut(&mut self.sightings).insert(allocation.id, Sighting::granted(at));
        Arc::make_mut(&mut self.live).insert(allocation.id, Arc::new(allocation.clone()));
    }

    fn end_allocation(&mut self, id: AllocationId, reason: EndReason, at: Now) {
        let Some(allocation) = Arc::make_mut(&mut self.live).remove(&id) else {
            return;
        };
        Arc::make_mut(&mut self.sightings).remove(&id);
        for device_id in &allocation.devices {
            self.with_device(&allocation.resource, device_id, |device| {
                device.holders.retain(|h| *h != id);
                if !device.held() && !device.offered() {
                    device.state = DeviceState::Retiring { since_mono_ms: at.mono_ms };
                }
            });
        }
        for part in allocation.parts() {
            self.with_part(part, |p| {
                if !p.held() {
                    p.idle_since_mono_ms = at.mono_ms;
                }
            });
        }
        self.list_gpus_of(&allocation, at);
        let end = End { reason, wall_ms: at.wall_ms };
        Arc::make_mut(&mut self.ended).push(&allocation, end);
    }

    /// The GPU's wait begins again if it gets devices that were not listed before: the kubelet may know their ids from another
    /// plugin, so they stay for a whole wait, too.
    fn restart_wait_for_new_devices(
        &mut self,
        part: &PartId,
        devices: &BTreeMap<(Resource, Option<u32>), Device>,
        at: Now,
    ) {
        let known = |p: &PartState| devices.keys().all(|key| p.devices.contains_key(key));
        if self.part(part).is_some_and(|p| !known(p)) {
            let gpu = self.gpu_id_of(part);
            self.with_gpu(&gpu, |g| {
                g.unlisting_wait_since_mono_ms = g.unlisting_wait_since_mono_ms.map(|_| at.mono_ms);
            });
        }
    }

    /// If the allocation is of the device plugin API, its GPUs are in the device lists, and their wait begins again.
    fn list_gpus_of(&mut self, allocation: &Allocation, at: Now) {
        if allocation.origin.api() == KubeletApi::DevicePlugin {
            for gpu in self.gpus_of(allocation) {
                self.list_gpu(&gpu, at);
            }
        }
    }

    /// The GPU is in the device lists, and its wait begins again. If it was not, so does that of its retiring devices, and of its
    /// instances that were destroyed.
    fn list_gpu(&mut self, gpu: &GpuId, at: Now) {
        let mut was_listed = true;
        self.with_gpu(gpu, |g| {
            was_listed = g.unlisting_wait_since_mono_ms.replace(at.mono_ms).is_some();
        });
        let parts: Vec<PartId> = self.parts_of(gpu).map(|part| part.part.id.clone()).collect();
        for part in parts.iter().filter(|_| !was_listed) {
            self.with_part(part, |p| {
                if !p.present {
                    p.idle_since_mono_ms = at.mono_ms;
                }
                for device in p.devices.values_mut().filter(|device| !device.offered()) {
                    device.state = DeviceState::Retiring { since_mono_ms: at.mono_ms };
                }
            });
        }
    }

    /// Takes over the runtime's view, and records which containers this run of the guard has seen.
    fn see_containers(&mut self, view: &Arc<RuntimeView>) {
        let live = Arc::clone(&self.live);
        for allocation in view.containers.keys().filter_map(|id| live.get(id)) {
            let Some(container) = view.container_of(allocation) else { continue };
            let run = container.is_cgroup_known.then_some(view.guard_run);
            let is_recorded =
                self.sightings.get(&allocation.id).is_some_and(|sighting| sighting.seen_by_guard_run == run);
            if !is_recorded && let Some(sighting) = Arc::make_mut(&mut self.sightings).get_mut(&allocation.id)
            {
                sighting.seen_by_guard_run = run;
            }
        }
        self.runtime = Some(Arc::clone(view));
    }

    fn with_part(&mut self, id: &PartId, change: impl FnOnce(&mut PartState)) {
        if let Some(part) = self.parts.get_mut(id) {
            change(Arc::make_mut(part));
        }
    }

    pub(crate) fn with_device(
        &mut self,
        resource: &Resource,
        id: &DeviceId,
        change: impl FnOnce(&mut Device),
    ) {
        self.with_part(&id.part, |p| {
            if let Some(device) = p.devices.get_mut(&(resource.clone(), id.share)) {
                change(device);
            }
        });
    }

    pub(crate) fn with_gpu(&mut self, id: &GpuId, change: impl FnOnce(&mut GpuState)) {
        if let Some(gpu) = self.gpus.get_mut(id) {
            change(Arc::make_mut(gpu));
        }
    }

    fn with_live(&mut self, id: AllocationId, change: impl FnOnce(&mut Allocation)) {
        if let Some(allocation) = Arc::make_mut(&mut self.live).get_mut(&id) {
            change(Arc::make_mut(allocation));
        }
    }

    /// What the pods source shows of an allocation's pod; of several pods of a claim, what it shows of the one that is least
    /// certain to have ended.
    #[must_use]
    pub fn pod_state_of(&self, allocation: &Allocation) -> PodState {
        let states = allocation.pod_uids().map(|uid| self.state_of_pod(allocation, uid));
        let order = [PodState::Alive, PodState::Unknown, PodState::Gone, PodState::Over];
        let certainty = |state: &PodState| order.iter().position(|other| other == state);
        states.min_by_key(certainty).unwrap_or(PodState::Unknown)
    }

    /// What the pods source shows of one pod of an allocation.
    pub(crate) fn state_of_pod(&self, allocation: &Allocation, uid: &str) -> PodState {
        let since = self.sightings.get(&allocation.id).map_or(u64::MAX, |s| s.since_mono_ms);
        self.pods.as_ref().map_or(PodState::Unknown, |view| view.state_of(uid, since))
    }

    /// Live allocations that name a device, oldest first.
    #[must_use]
    pub fn holders_of(&self, resource: &Resource, id: &DeviceId) -> &[AllocationId] {
        self.device(resource, id).map_or(&[], |d| &d.holders)
    }

    /// Namespace and name of the pod with this UID, from the pods source or from any allocation.
    #[must_use]
    pub fn pod_by_uid(&self, uid: &str) -> Option<Holder> {
        self.pod_in_view(uid).or_else(|| {
            let of_pod = self.live.values().filter(|a| a.pod_uids().any(|one| one == uid));
            let mut holders = of_pod.flat_map(|a| a.holders());
            let holder = holders.find(|h| h.pod_uid.as_deref() == Some(uid) && h.pod.is_some())?;
            Some(Holder { pod_uid: None, container: None, ..holder })
        })
    }

    /// Namespace and name of the pod with this UID, from the pods source alone.
    #[must_use]
    pub fn pod_in_view(&self, uid: &str) -> Option<Holder> {
        self.pods.as_ref().and_then(|view| view.pods.get(uid)).map(|pod| Holder {
            namespace: Some(pod.namespace.clone()),
            pod: Some(pod.name.clone()),
            ..Holder::default()
        })
    }
}

fn resource_names(lines: &[OfferLine]) -> BTreeSet<&Resource> {
    lines.iter().map(|line| &line.resource).collect()
}
