//! A snapshot of the ledger in WIT types, with the parts and devices behind its indices, and a cache of such views.

use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::bindings::berth::policy::types as wit;
use super::settings::Settings;
use berth_kernel::drain::marks::Drain;
use berth_kernel::grants::allocation::{Allocation, Holder};
use berth_kernel::grants::pod_candidates;
use berth_kernel::grants::pod_candidates::Candidate;
use berth_kernel::hardware::gpu::{Part, Path};
use berth_kernel::hardware::health::HealthState;
use berth_kernel::hardware::mig::{self, MigStrategy};
use berth_kernel::ids::names::{DeviceId, GpuId, PartId, Resource};
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::AdmitRequest;
use berth_kernel::sharing::breaker::{Breaker, Phase};
use berth_kernel::sharing::offer::{Consumes, OfferLine};
use berth_kernel::sharing::part_state::{Device, PartState, Taken};

/// The attribute with the resource that a part would be offered as without policies; absent if it would not be
/// offered.
const BASELINE_RESOURCE: &str = "baseline.resource";

/// The attribute that says whether the guard can limit the memory of a share of a part at present: `memoryLimits` or `none`.
const MEMORY_ENFORCER: &str = "enforce.memory";

/// The parts and devices behind the indices of a node.
#[derive(PartialEq, Eq)]
pub(super) struct Indices {
    pub(super) parts: Vec<PartId>,
    /// Part, resource and share number by device index.
    pub(super) devices: Vec<(u32, u32, Option<u32>)>,
}

impl Indices {
    /// The part at an index.
    pub(super) fn part(&self, index: u32) -> Option<PartId> {
        self.parts.get(usize::try_from(index).ok()?).cloned()
    }

    /// The device at an index, and the index of its resource.
    pub(super) fn device(&self, index: u32) -> Option<(DeviceId, u32)> {
        let (part, resource, share) = *self.devices.get(usize::try_from(index).ok()?)?;
        Some((DeviceId { part: self.part(part)?, share }, resource))
    }
}

/// A snapshot in WIT types, with the parts, resources and devices behind its indices.
pub(super) struct View {
    ledger: Arc<Ledger>,
    created: Now,
    /// How long after `created` a new view would be the same, milliseconds: ages are in whole seconds.
    fresh_ms: u64,
    pub(super) context: wit::Context,
    resources: Vec<Resource>,
    /// The devices are in ascending order.
    pub(super) indices: Indices,
    by_part: BTreeMap<PartId, u32>,
}

impl View {
    /// A view with empty parameters. What is the same in the view of another snapshot is moved from there: with a
    /// thousand allocations, making the texts again takes longer than a policy call.
    pub(super) fn new(ledger: &Arc<Ledger>, now: Now, settings: &Settings, other: Option<Self>) -> Self {
        let mut states: Vec<&PartState> = ledger.parts.values().map(AsRef::as_ref).collect();
        states.sort_by_key(|s| (s.part.gpu_index, &s.part.gpu, !s.part.is_whole_gpu()));
        let keys = states.iter().flat_map(|state| state.devices.keys());
        let mut resources: Vec<_> = keys.map(|(resource, _)| resource).collect();
        // The devices of a part are sorted by resource, so that this removes most duplicates before the sort.
        resources.dedup();
        resources.sort_unstable();
        resources.dedup();
        let count = states.iter().map(|state| state.devices.len()).sum();
        let mut view = Self {
            ledger: Arc::clone(ledger),
            created: now,
            fresh_ms: fresh_ms(ledger, now),
            context: wit::Context {
                node: wit::Node {
                    parts: Vec::with_capacity(states.len()),
                    links: Vec::new(),
                    resources: resources.iter().map(ToString::to_string).collect(),
                    devices: Vec::with_capacity(count),
                    allocations: Vec::new(),
                },
                parameters: String::new(),
            },
            resources: resources.into_iter().cloned().collect(),
            indices: Indices {
                parts: states.iter().map(|state| state.part.id.clone()).collect(),
                devices: Vec::with_capacity(count),
            },
            by_part: (0..).zip(&states).map(|(n, state)| (state.part.id.clone(), n)).collect(),
        };
        let present = ledger.parts.values().filter(|state| state.present).map(|state| &state.part);
        let baseline = mig::plan(settings.mig, &settings.resource, present, |_| true);
        for (index, state) in (0..).zip(states) {
            let mut part = view.part_to_wit(ledger, state, now);
            let resource = baseline.resource(&state.part.id);
            part.attributes.extend(resource.map(|resource| attribute(BASELINE_RESOURCE, resource)));
            let enforcer = if ledger.why_not_limitable(state).is_none() { "memoryLimits" } else { "none" };
            part.attributes.push(attribute(MEMORY_ENFORCER, &enforcer));
            view.context.node.parts.push(part);
            view.add_devices(ledger, index, state);
        }
        view.add_links(ledger);
        view.add_allocations(ledger, now, other);
        view
    }

    fn add_allocations(&mut self, ledger: &Ledger, now: Now, other: Option<Self>) {
        // Allocations refer to parts, resources and devices by index.
        let other = other.filter(|other| other.resources == self.resources && other.indices == self.indices);
        let (known, shown) = match other {
            Some(other) => (Some(other.ledger), other.context.node.allocations),
            None => (None, Vec::new()),
        };
        // Both are in the order of the allocations' ids.
        let mut others = known.iter().flat_map(|known| known.live.iter()).zip(shown).peekable();
        self.context.node.allocations = Vec::with_capacity(ledger.live.len());
        for (id, allocation) in ledger.live.iter() {
            while others.next_if(|((other, _), _)| *other < id).is_some() {}
            let same = others.next_if(|((other, known), _)| *other == id && Arc::ptr_eq(known, allocation));
            let allocation = match same {
                Some((_, shown)) => {
                    wit::Allocation { age_seconds: seconds(age_ms(allocation, now)), ..shown }
                }
                None => self.allocation(allocation, now),
            };
            self.context.node.allocations.push(allocation);
        }
    }

    /// Whether a new view of this snapshot at this time would be the same.
    pub(super) fn is_current(&self, ledger: &Arc<Ledger>, now: Now) -> bool {
        let is_fresh =
            |created: u64, now: u64| now.checked_sub(created).is_some_and(|age| age < self.fresh_ms);
        // The view owns its snapshot, so the address cannot have been reused.
        Arc::ptr_eq(&self.ledger, ledger)
            && is_fresh(self.created.mono_ms, now.mono_ms)
            && is_fresh(self.created.wall_ms, now.wall_ms)
    }

    /// The containers that may be requesting `count` devices of `resource`.
    pub(super) fn candidates(&self, resource: &Resource, count: usize) -> Vec<wit::Candidate> {
        let candidates = pod_candidates::candidates(&self.ledger, resource, count);
        candidates.into_iter().map(candidate_to_wit).collect()
    }

    /// The containers that may be requesting these devices.
    pub(super) fn candidates_of(&self, request: &AdmitRequest) -> Vec<wit::Candidate> {
        pod_candidates::candidates_of(&self.ledger, request).into_iter().map(candidate_to_wit).collect()
    }

    pub(super) fn part_index(&self, part: &PartId) -> Option<u32> {
        self.by_part.get(part).copied()
    }

    pub(super) fn resource_index(&self, resource: &Resource) -> Option<u32> {
        index(self.resources.binary_search(resource).ok()?)
    }

    /// The index of a device by the indices of its part and resource; `None` if it is not in this snapshot.
    pub(super) fn device_index(&self, part: u32, resource: u32, share: Option<u32>) -> Option<u32> {
        index(self.indices.devices.binary_search(&(part, resource, share)).ok()?)
    }

    fn part_to_wit(&self, ledger: &Ledger, state: &PartState, now: Now) -> wit::Part {
        let part = &state.part;
        let gpu = ledger.gpu_of(state);
        let usage = ledger.usage.get(&part.id).cloned().unwrap_or_default();
        let health = gpu.map(|gpu| gpu.health.state).filter(|_| state.present);
        wit::Part {
            id: part.id.to_string(),
            vendor: part.vendor.clone(),
            model: part.model.clone(),
            gpu_index: part.gpu_index,
            parent: (!part.is_whole_gpu()).then(|| self.part_index(part.gpu.as_part())).flatten(),
            mig_enabled: part.mig_enabled,
            memory_mib: part.memory_mib,
            numa_node: part.numa_node,
            health: health_to_wit(health.unwrap_or(HealthState::Vanished)),
            drain: gpu.map_or(wit::DrainState::Active, |gpu| drain_to_wit(&gpu.drain())),
            attributes: attributes(part),
            processes: ledger.processes_on(&part.id).unwrap_or(0),
            // The contract has no value for memory that cannot be read.
            memory_used_mib: usage.memory_used_mib.unwrap_or(0),
            idle_seconds: if state.held() { 0 } else { seconds(idle_ms(state, now)) },
            offered: state.lines.iter().map(line_to_wit).collect(),
        }
    }

    fn add_devices(&mut self, ledger: &Ledger, index: u32, state: &PartState) {
        let may_grant = ledger.may_grant(state);
        let memory_mib = ledger.memory_to_grant_mib(state);
        let taken = ledger.taken(state);
        // The devices are sorted by resource, so that each resource is looked up once.
        let mut last: Option<(&Resource, u32, bool)> = None;
        for ((name, share), device) in &state.devices {
            let (_, resource, paused) = match last.filter(|(known, ..)| *known == name) {
                Some(known) => known,
                None => {
                    let open = |breaker: &Breaker| matches!(breaker.phase, Phase::Open { .. });
                    let paused = ledger.breakers.get(name).is_some_and(open);
                    let Some(index) = self.resource_index(name) else {
                        continue;
                    };
                    *last.insert((name, index, paused))
                }
            };
            self.indices.devices.push((index, resource, *share));
            self.context.node.devices.push(wit::Device {
                part: index,
                resource,
                state: state_to_wit(device, taken, memory_mib, may_grant && !paused),
                consumes: consumes_to_wit(device.consumes),
            });
        }
    }

    fn add_links(&mut self, ledger: &Ledger) {
        // The links are sorted by their first part, so that each of those is looked up once.
        let mut last: Option<(&GpuId, Option<u32>)> = None;
        for (a, b, link) in ledger.links.iter() {
            let known = last.filter(|(known, _)| *known == a);
            let (_, index) = *last.insert(known.unwrap_or_else(|| (a, self.part_index(a.as_part()))));
            if let (Some(a), Some(b)) = (index, self.part_index(b.as_part())) {
                self.context.node.links.push(wit::Link {
                    a,
                    b,
                    path: path_to_wit(link.path),
                    nvlinks: link.nvlinks,
                });
            }
        }
    }

    fn allocation(&self, allocation: &Allocation, now: Now) -> wit::Allocation {
        // A held device remains listed, so its resource and the device itself always have an index.
        let resource = self.resource_index(&allocation.resource).unwrap_or_default();
        let devices = allocation.devices.iter();
        wit::Allocation {
            id: allocation.id.to_string(),
            resource,
            devices: devices
                .filter_map(|id| self.device_index(self.part_index(&id.part)?, resource, id.share))
                .collect(),
            holder: holder_to_wit(&allocation.holder),
            age_seconds: seconds(age_ms(allocation, now)),
            overlapped: allocation.overlapped,
        }
    }
}

fn index(position: usize) -> Option<u32> {
    u32::try_from(position).ok()
}

fn idle_ms(state: &PartState, now: Now) -> u64 {
    now.mono_ms.saturating_sub(state.idle_since_mono_ms)
}

fn age_ms(allocation: &Allocation, now: Now) -> u64 {
    now.wall_ms.saturating_sub(allocation.granted_wall_ms)
}

/// Time until the first of the shown ages reaches its next second.
fn fresh_ms(ledger: &Ledger, now: Now) -> u64 {
    let idle = ledger.parts.values().filter(|state| !state.held()).map(|state| idle_ms(state, now));
    let ages = ledger.live.values().map(|allocation| age_ms(allocation, now));
    idle.chain(ages).map(|ms| 1_000 - ms % 1_000).min().unwrap_or(1_000)
}

fn seconds(ms: u64) -> u32 {
    u32::try_from(ms / 1000).unwrap_or(u32::MAX)
}

fn candidate_to_wit(candidate: Candidate) -> wit::Candidate {
    let pod = &candidate.pod;
    wit::Candidate {
        namespace: pod.namespace.clone(),
        pod: pod.name.clone(),
        pod_uid: pod.uid.clone(),
        container: candidate.container,
        labels: pod.labels.iter().map(|(key, value)| attribute(key, value)).collect(),
    }
}

/// The backend's attributes, and the facts that have no field in the WIT type.
fn attributes(part: &Part) -> Vec<wit::Attribute> {
    let mut attributes: Vec<_> = part.attributes.iter().map(|(key, value)| attribute(key, value)).collect();
    attributes.extend(part.pci_bus.map(|bus| attribute("pci.bus", &bus)));
    attributes.extend(part.minor.map(|minor| attribute("minor", &minor)));
    if let Some(mig) = &part.mig {
        attributes.push(attribute("mig.profile", &mig.profile));
        attributes.push(attribute("mig.gpu-instance", &mig.gpu_instance));
        attributes.push(attribute("mig.compute-instance", &mig.compute_instance));
    }
    attributes
}

fn attribute(key: &str, value: &impl ToString) -> wit::Attribute {
    wit::Attribute { key: key.to_owned(), value: value.to_string() }
}

/// Whether a device is free is decided for each device by itself: it must fit in addition to the held devices, not in
/// addition to other free ones.
fn state_to_wit(device: &Device, taken: Taken, memory_mib: u64, grantable: bool) -> wit::DeviceState {
    if device.held() {
        wit::DeviceState::Held
    } else if !device.offered() {
        wit::DeviceState::Retiring
    } else if grantable && taken.plus(device.consumes).excess(memory_mib).is_none() {
        wit::DeviceState::Free
    } else {
        wit::DeviceState::Withdrawn
    }
}

fn consumes_to_wit(consumes: Consumes) -> wit::Consumes {
    match consumes {
        Consumes::Whole => wit::Consumes::Whole,
        Consumes::Slice { memory_mib, compute_percent } => {
            wit::Consumes::Slice(wit::Slice { memory_mib, compute_percent })
        }
    }
}

fn line_to_wit(line: &OfferLine) -> wit::OfferLine {
    wit::OfferLine {
        resource: line.resource.to_string(),
        count: line.count,
        consumes: consumes_to_wit(line.consumes),
    }
}

fn health_to_wit(state: HealthState) -> wit::Health {
    match state {
        HealthState::Healthy => wit::Health::Healthy,
        HealthState::Degraded => wit::Health::Degraded,
        HealthState::Unhealthy => wit::Health::Unhealthy,
        HealthState::Vanished => wit::Health::Vanished,
    }
}

fn drain_to_wit(drain: &Drain) -> wit::DrainState {
    match drain {
        Drain::Active => wit::DrainState::Active,
        Drain::Cordoned(_) => wit::DrainState::Cordoned,
        Drain::Draining(..) => wit::DrainState::Draining,
        Drain::Drained(_) => wit::DrainState::Drained,
    }
}

fn path_to_wit(path: Path) -> wit::Path {
    match path {
        Path::SameBoard => wit::Path::SameBoard,
        Path::SingleSwitch => wit::Path::SingleSwitch,
        Path::MultiSwitch => wit::Path::MultiSwitch,
        Path::HostBridge => wit::Path::HostBridge,
        Path::SameNuma => wit::Path::SameNuma,
        Path::CrossNuma => wit::Path::CrossNuma,
    }
}

fn holder_to_wit(holder: &Holder) -> Option<wit::Holder> {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    (!holder.is_unknown()).then(|| wit::Holder {
        namespace: text(&holder.namespace),
        pod: text(&holder.pod),
        container: text(&holder.container),
        pod_uid: holder.pod_uid.clone(),
    })
}

/// Number of cached views: that of the newest snapshot, and those of older ones that the recorder still has to
/// process. A view has some tens of kilobytes and owns its snapshot, which shares nearly all of its memory with the
/// next one.
const VIEWS_MAX: usize = 4;

/// A cache of recent views. The placement and admission of a pod, each policy of the stack and the recorder usually use
/// the same snapshot, and creating its view takes longer than many policy calls.
///
/// A view is removed while it is in use. Concurrent users do not wait, but create their own.
pub(super) struct ViewCache {
    views: Mutex<VecDeque<View>>,
    /// With the number of changes.
    settings: RwLock<(u64, Settings)>,
}

impl ViewCache {
    pub(super) fn new(settings: Settings) -> Self {
        Self { views: Mutex::default(), settings: RwLock::new((0, settings)) }
    }

    /// Changes what views show besides the snapshot.
    pub(super) fn set_offers(&self, resource: Resource, mig: MigStrategy) {
        let mut settings = self.settings.write();
        settings.0 += 1;
        settings.1 = Settings { resource, mig, ..settings.1.clone() };
        self.views.lock().clear();
    }

    /// Calls `read` with the view of a snapshot for a policy with these parameters.
    pub(super) fn with<T>(
        &self,
        node: &Arc<Ledger>,
        now: Now,
        parameters: &str,
        read: impl FnOnce(&View) -> T,
    ) -> T {
        let changes = self.settings.read().0;
        let mut view = match self.take(node, now) {
            Some(view) if view.is_current(node, now) => view,
            other => View::new(node, now, &self.settings.read().1, other),
        };
        view.context.parameters.clear();
        view.context.parameters.push_str(parameters);
        let result = read(&view);
        // A view by settings that were replaced during the call is not cached.
        let settings = self.settings.read();
        if settings.0 == changes {
            self.put(view);
        }
        result
    }

    /// Takes the view of this snapshot at this time, or else the oldest one of another.
    fn take(&self, node: &Arc<Ledger>, now: Now) -> Option<View> {
        let mut views = self.views.lock();
        let current = views.iter().rposition(|view| view.is_current(node, now));
        let oldest = (views.len() >= VIEWS_MAX).then_some(0);
        views.remove(current.or(oldest)?)
    }

    fn put(&self, view: View) {
        let mut views = self.views.lock();
        views.push_back(view);
        let oldest = if views.len() > VIEWS_MAX { views.pop_front() } else { None };
        // Frees the memory without the lock.
        drop(views);
        drop(oldest);
    }
}

#[cfg(test)]
mod tests;
