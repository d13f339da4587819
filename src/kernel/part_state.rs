//! One part as the ledger keeps it: what it is, what it is offered as, and who holds its devices.

use super::gpu::Part;
use super::names::{AllocationId, DeviceId, DeviceKey, Resource};
use super::offer::{Consumes, OfferLine, ShareRange};
use std::collections::BTreeMap;

/// A part with its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartState {
    /// What it is.
    pub part: Part,
    /// Whether the last inventory showed it.
    pub present: bool,
    /// Since when it is there or gone, monotonic milliseconds.
    pub turned_mono_ms: u64,
    /// Who made the offer: a policy's label or `baseline`; empty before the first.
    pub offered_by: String,
    /// What it is offered as.
    pub lines: Vec<OfferLine>,
    /// Who owns which share numbers.
    pub ranges: Vec<ShareRange>,
    /// Its devices by resource and share number (`None` is the whole part).
    pub devices: BTreeMap<(Resource, Option<u32>), Device>,
    /// Since when nobody holds any of it, monotonic milliseconds.
    pub idle_since_mono_ms: u64,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// What it takes of the part.
    pub consumes: Consumes,
    /// Whether it is offered or on its way out.
    pub standing: Standing,
    /// Live allocations that name it, oldest first. More than one only after I7.
    pub holders: Vec<AllocationId>,
    /// When an Allocate last named it, monotonic milliseconds (I4, I10).
    pub named_mono_ms: Option<u64>,
}

/// Whether a device is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Part of the offer.
    Offered,
    /// Of an older offer: listed until nobody holds it and its time is up (I10).
    Retiring {
        /// Since when it is both unoffered and unheld, monotonic milliseconds.
        since_mono_ms: u64,
    },
}

impl Device {
    /// One that a pod held before we ever offered it. It takes nothing but its number: what the former
    /// owner meant by a share is not known; a held share still keeps the whole GPU from being granted
    /// (I2).
    #[must_use]
    pub fn adopted(share: Option<u32>, now_mono_ms: u64) -> Self {
        Self {
            consumes: match share {
                None => Consumes::Whole,
                Some(_) => Consumes::Slice { memory_mib: 0, compute_percent: 0 },
            },
            standing: Standing::Retiring { since_mono_ms: now_mono_ms },
            holders: Vec::new(),
            named_mono_ms: None,
        }
    }

    /// Whether a live allocation names it.
    #[must_use]
    pub fn held(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Whether it may be granted as far as the offer goes.
    #[must_use]
    pub fn offered(&self) -> bool {
        self.standing == Standing::Offered
    }
}

/// What is taken of a part, summed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Devices that take everything.
    pub wholes: u32,
    /// Devices that take a slice.
    pub slices: u32,
    /// MiB of memory by the slices.
    pub memory_mib: u64,
    /// Percent of compute by the slices.
    pub compute_percent: u32,
}

impl Taken {
    /// With one more device.
    #[must_use]
    pub fn plus(mut self, consumes: Consumes) -> Self {
        match consumes {
            Consumes::Whole => self.wholes += 1,
            Consumes::Slice { memory_mib, compute_percent } => {
                self.slices += 1;
                self.memory_mib = self.memory_mib.saturating_add(memory_mib);
                self.compute_percent = self.compute_percent.saturating_add(compute_percent);
            }
        }
        self
    }

    /// The first counter on which this is more than a part of `memory_mib` has (I2).
    #[must_use]
    pub fn excess(self, memory_mib: u64) -> Option<Excess> {
        let over = |counter, wanted, has| (wanted > has).then_some(Excess { counter, wanted, has });
        if self.wholes > 0 {
            return over("whole GPU", u64::from(self.wholes + self.slices), 1);
        }
        over("MiB of memory", self.memory_mib, memory_mib)
            .or_else(|| over("percent of compute", u64::from(self.compute_percent), 100))
    }
}

/// A counter that does not suffice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excess {
    /// Which.
    pub counter: &'static str,
    /// The sum wanted.
    pub wanted: u64,
    /// What the part has.
    pub has: u64,
}

impl PartState {
    /// A part that was just found.
    #[must_use]
    pub fn new(part: Part, now_mono_ms: u64) -> Self {
        Self {
            part,
            present: true,
            turned_mono_ms: now_mono_ms,
            offered_by: String::new(),
            lines: Vec::new(),
            ranges: Vec::new(),
            devices: BTreeMap::new(),
            idle_since_mono_ms: now_mono_ms,
        }
    }

    /// What its held devices take. A device counts once, however many allocations name it.
    #[must_use]
    pub fn taken(&self) -> Taken {
        self.devices.values().filter(|d| d.held()).fold(Taken::default(), |t, d| t.plus(d.consumes))
    }

    /// Whether a live allocation names any of its devices.
    #[must_use]
    pub fn held(&self) -> bool {
        self.devices.values().any(Device::held)
    }

    /// Its memory as grants see it, MiB: times the overcommit, which is given in percent.
    #[must_use]
    pub fn memory_to_grant_mib(&self, overcommit_percent: u32) -> u64 {
        self.part.memory_mib.saturating_mul(u64::from(overcommit_percent)) / 100
    }

    /// Its device under `resource` with this share number.
    #[must_use]
    pub fn device(&self, resource: &Resource, share: Option<u32>) -> Option<&Device> {
        self.devices.get(&(resource.clone(), share))
    }

    /// The key of one of its devices.
    #[must_use]
    pub fn key(&self, resource: &Resource, share: Option<u32>) -> DeviceKey {
        DeviceKey { resource: resource.clone(), id: DeviceId { part: self.part.id.clone(), share } }
    }
}
