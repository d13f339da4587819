//! GPUs, parts and devices of one snapshot, as the API shows them.

use crate::node_facts::Step;
use crate::resources::drain_progress::progress;
use crate::state::State;
use crate::survey::Survey;
use berth_api::{
    Device, DeviceState, Drain, Gpu, GpuSummary, Health, HealthState, HealthTurn, Link, Mark, Mig, OfferLine,
    Part, ResourceUse, rfc3339,
};
use berth_core::keeper::Snapshot;
use berth_kernel::drain;
use berth_kernel::health;
use berth_kernel::ledger::GpuState;
use berth_kernel::names::{DeviceKey, PartId};
use berth_kernel::part_state::{self, PartState};
use berth_kernel::time::Now;
use std::sync::Arc;

/// One snapshot and the present time.
pub(crate) struct View {
    pub(crate) ledger: Snapshot,
    survey: Arc<Survey>,
    now: Now,
    /// The connection to the API server, where drains are shown.
    api_server: Option<Step>,
}

impl View {
    pub(crate) fn of(state: &State) -> Self {
        let survey = state.surveys.newest(&state.kernel);
        let (ledger, now) = (Arc::clone(&survey.ledger), state.kernel.now());
        Self { ledger, survey, now, api_server: (state.facts)().api_server }
    }

    /// All GPUs in the order of their index.
    pub(crate) fn summaries(&self) -> Vec<GpuSummary> {
        let gpus = self.ledger.gpus.iter();
        let mut all: Vec<_> = gpus.filter_map(|(id, state)| self.summary(id, state)).collect();
        all.sort_by(|a, b| (a.index, &a.uuid).cmp(&(b.index, &b.uuid)));
        all
    }

    /// One GPU with all its details.
    pub(crate) fn gpu(&self, id: &PartId) -> Option<Gpu> {
        let state = self.ledger.gpus.get(id)?;
        let facts = &self.main_part(id)?.part;
        Some(Gpu {
            summary: self.summary(id, state)?,
            vendor: facts.vendor.clone(),
            minor: facts.minor,
            pci_bus: facts.pci_bus.clone(),
            numa_node: facts.numa_node,
            mig_enabled: facts.mig_enabled,
            attributes: facts.attributes.clone(),
            parts: self.parts(id).map(|p| self.part(p)).collect(),
            links: self.links(id),
        })
    }

    /// The progress of a GPU's drain.
    pub(crate) fn drain(&self, id: &PartId) -> Option<Drain> {
        Some(self.drain_of(id, &self.ledger.gpus.get(id)?.marks))
    }

    /// Number of uses of the node's GPUs without an allocation.
    pub(crate) fn bypasses(&self) -> usize {
        self.survey.bypasses()
    }

    /// Listed and held devices of the whole node.
    pub(crate) fn uses(&self) -> &[ResourceUse] {
        self.survey.uses()
    }

    fn parts<'v>(&'v self, gpu: &'v PartId) -> impl Iterator<Item = &'v PartState> {
        let parts = self.ledger.parts.values().map(AsRef::as_ref);
        parts.filter(move |p| p.part.gpu() == gpu)
    }

    /// The whole GPU; if only its instances are known, the first of them.
    fn main_part<'v>(&'v self, gpu: &'v PartId) -> Option<&'v PartState> {
        self.ledger.part(gpu).or_else(|| self.parts(gpu).next())
    }

    fn summary(&self, id: &PartId, state: &GpuState) -> Option<GpuSummary> {
        let main = self.main_part(id)?;
        let usage = self.ledger.usage.get(id);
        Some(GpuSummary {
            uuid: id.to_string(),
            index: main.part.gpu_index,
            model: main.part.model.clone(),
            memory_mib: main.part.memory_mib,
            memory_used_mib: usage.map(|u| u.memory_used_mib),
            processes: self.ledger.processes_on(id),
            bypasses: self.survey.bypasses_on(id),
            present: self.parts(id).any(|p| p.present),
            health: health(state, self.parts(id).any(|p| p.present)),
            drain: self.drain_of(id, &state.marks),
            resources: self.survey.uses_on(id).to_vec(),
        })
    }

    fn drain_of(&self, gpu: &PartId, marks: &drain::Marks) -> Drain {
        let drain = marks.drain();
        let mark = drain.mark();
        Drain {
            state: (&drain).into(),
            by: mark.map(|m| m.by.clone()),
            why: mark.map(drain::Mark::reason).filter(|w| !w.is_empty()),
            since: mark.map(|m| rfc3339(m.since_wall_ms)),
            progress: drain
                .order()
                .map(|order| progress(&self.ledger, gpu, order, self.api_server.as_ref(), self.now)),
            marks: marks.by_owner.iter().map(|(owner, mark)| Mark::from_kernel(owner, mark)).collect(),
        }
    }

    fn part(&self, state: &PartState) -> Part {
        let usage = self.ledger.usage.get(&state.part.id);
        let devices = state.devices.iter();
        Part {
            uuid: state.part.id.to_string(),
            mig: state.part.mig.as_ref().map(|m| Mig {
                profile: m.profile.clone(),
                gpu_instance: m.gpu_instance,
                compute_instance: m.compute_instance,
            }),
            memory_mib: state.part.memory_mib,
            memory_used_mib: usage.map(|u| u.memory_used_mib),
            processes: self.ledger.processes_on(&state.part.id),
            present: state.present,
            offered_by: state.offered_by.as_ref().map(ToString::to_string),
            offer: state.lines.iter().map(OfferLine::from).collect(),
            devices: devices
                .map(|((resource, share), device)| self.device(&state.key(resource, *share), device))
                .collect(),
        }
    }

    fn device(&self, key: &DeviceKey, device: &part_state::Device) -> Device {
        let healthy = self.survey.is_healthy(key);
        let state = match (device.held(), healthy, device.offered()) {
            (true, _, _) => DeviceState::Held,
            (false, true, _) => DeviceState::Free,
            (false, false, true) => DeviceState::Withdrawn,
            (false, false, false) => DeviceState::Leaving,
        };
        Device {
            id: key.id.to_string(),
            resource: key.resource.to_string(),
            state,
            healthy,
            consumes: device.consumes.into(),
            allocations: device.holders.iter().map(ToString::to_string).collect(),
        }
    }

    fn links(&self, gpu: &PartId) -> Vec<Link> {
        let others = self.ledger.gpus.keys().filter(|other| *other != gpu);
        others
            .filter_map(|other| {
                self.ledger.links.between(gpu, other).map(|link| Link {
                    gpu: other.to_string(),
                    path: (&link.path).into(),
                    nvlinks: link.nvlinks,
                })
            })
            .collect()
    }
}

fn health(state: &GpuState, present: bool) -> Health {
    let health = &state.health;
    // After a restart the GPUs are known before the first scan.
    let unseen = !present && health.state != health::HealthState::Vanished;
    let reason = if unseen { "not found since the daemon started" } else { &health.reason };
    let said = |reason: &str| Some(reason.to_owned()).filter(|r| !r.is_empty());
    Health {
        state: if unseen { HealthState::Vanished } else { (&health.state).into() },
        reason: said(reason),
        since: rfc3339(health.since_wall_ms),
        heals: health.quiet_ms.is_some(),
        history: health
            .history
            .iter()
            .map(|turn| HealthTurn {
                state: (&turn.state).into(),
                reason: said(&turn.reason),
                since: rfc3339(turn.since_wall_ms),
            })
            .collect(),
    }
}
