//! One part in the ledger: its hardware, its offer, its devices and their holders.

use crate::hardware::gpu::Part;
use crate::ids::names::{AllocationId, DeviceId, DeviceKey, Resource};
use crate::policy::decider::Decider;
use crate::sharing::offer::{Consumes, OfferLine, ShareRange, claim_share};
use std::collections::BTreeMap;

/// A part with its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartState {
    /// The hardware.
    pub part: Part,
    /// Whether the last inventory included it.
    pub present: bool,
    /// When `present` last changed, monotonic milliseconds.
    pub present_changed_mono_ms: u64,
    /// Source of the offer; `None` before the first.
    pub offered_by: Option<Decider>,
    /// Its offer.
    pub lines: Vec<OfferLine>,
    /// Owners of the share numbers.
    pub ranges: Vec<ShareRange>,
    /// Its devices by resource and share number (`None` is the whole part).
    pub devices: BTreeMap<(Resource, Option<u32>), Device>,
    /// Since when no allocation holds any of it, monotonic milliseconds.
    pub idle_since_mono_ms: u64,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// What it takes of the part.
    pub consumes: Consumes,
    /// Whether it is offered or retiring.
    pub state: DeviceState,
    /// Live allocations that name it, oldest first. Several only after a repeated Allocate (I7).
    pub holders: Vec<AllocationId>,
    /// When an Allocate last named it, monotonic milliseconds (I4, I10).
    pub last_allocate_mono_ms: Option<u64>,
}

/// Whether a device is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// Part of the offer.
    Offered,
    /// Part of an older offer: listed until it is not held and its wait is over (I10).
    Retiring {
        /// Since when it is neither offered nor held, monotonic milliseconds.
        since_mono_ms: u64,
    },
}

impl Device {
    /// A device that no allocation names.
    #[must_use]
    pub fn new(consumes: Consumes, state: DeviceState) -> Self {
        Self { consumes, state, holders: Vec::new(), last_allocate_mono_ms: None }
    }

    /// A device that a pod held before this daemon offered it. A share consumes no memory or compute,
    /// since the former owner's share size is not known; while held it still keeps the whole GPU from
    /// being granted (I2).
    #[must_use]
    pub fn adopted(share: Option<u32>, now_mono_ms: u64) -> Self {
        let nothing = Consumes::Slice { memory_mib: 0, compute_percent: 0 };
        let consumes = if share.is_some() { nothing } else { Consumes::Whole };
        Self::new(consumes, DeviceState::Retiring { since_mono_ms: now_mono_ms })
    }

    /// Whether a live allocation names it.
    #[must_use]
    pub fn held(&self) -> bool {
        !self.holders.is_empty()
    }

    /// Whether it is part of the current offer.
    #[must_use]
    pub fn offered(&self) -> bool {
        self.state == DeviceState::Offered
    }
}

/// The sum of what devices take of a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Devices that take everything.
    pub wholes: u32,
    /// Devices that take a slice.
    pub slices: u32,
    /// Memory of the slices, MiB.
    pub memory_mib: u64,
    /// Compute of the slices, percent.
    pub compute_percent: u32,
}

impl Taken {
    /// The sum with one more device.
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

    /// The first counter that exceeds a part with `memory_mib` of memory (I2).
    #[must_use]
    pub fn excess(self, memory_mib: u64) -> Option<Excess> {
        let excess = |counter, wanted, has| (wanted > has).then_some(Excess { counter, wanted, has });
        if self.wholes > 0 {
            return excess("whole GPU", u64::from(self.wholes + self.slices), 1);
        }
        excess("MiB of memory", self.memory_mib, memory_mib)
            .or_else(|| excess("percent of compute", u64::from(self.compute_percent), 100))
    }
}

/// A counter that is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Excess {
    /// Its name.
    pub counter: &'static str,
    /// The requested sum.
    pub wanted: u64,
    /// The part's capacity.
    pub has: u64,
}

impl PartState {
    /// A part that was found at this time.
    #[must_use]
    pub fn new(part: Part, now_mono_ms: u64) -> Self {
        Self {
            part,
            present: true,
            present_changed_mono_ms: now_mono_ms,
            offered_by: None,
            lines: Vec::new(),
            ranges: Vec::new(),
            devices: BTreeMap::new(),
            idle_since_mono_ms: now_mono_ms,
        }
    }

    /// The sum over its held devices. A device counts once, however many allocations name it.
    #[must_use]
    pub fn taken(&self) -> Taken {
        self.devices.values().filter(|d| d.held()).fold(Taken::default(), |t, d| t.plus(d.consumes))
    }

    /// Whether a live allocation names any of its devices.
    #[must_use]
    pub fn held(&self) -> bool {
        self.devices.values().any(Device::held)
    }

    /// Memory that grants may take, MiB: its memory times the overcommit in percent.
    #[must_use]
    pub fn memory_to_grant_mib(&self, overcommit_percent: u32) -> u64 {
        self.part.memory_mib.saturating_mul(u64::from(overcommit_percent)) / 100
    }

    /// The device under `resource` with this share number.
    #[must_use]
    pub fn device(&self, resource: &Resource, share: Option<u32>) -> Option<&Device> {
        self.devices.get(&(resource.clone(), share))
    }

    /// The device under `resource` with this share number, listed as [`Device::adopted`] if it is not yet.
    pub fn adopt_device(&mut self, resource: &Resource, share: Option<u32>, now_mono_ms: u64) -> &mut Device {
        if let Some(number) = share {
            claim_share(&mut self.ranges, resource, number);
        }
        let key = (resource.clone(), share);
        self.devices.entry(key).or_insert_with(|| Device::adopted(share, now_mono_ms))
    }

    /// The key of a device of this part.
    #[must_use]
    pub fn key(&self, resource: &Resource, share: Option<u32>) -> DeviceKey {
        DeviceKey { resource: resource.clone(), id: DeviceId { part: self.part.id.clone(), share } }
    }
}
