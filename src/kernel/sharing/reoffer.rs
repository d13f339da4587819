//! From an offer to the devices of a part: checks of offers, and devices that are no longer offered.

use crate::ids::names::Resource;
use crate::ids::time::{Now, Timing};
use crate::node::change::Change;
use crate::node::refusal::Refusal;
use crate::policy::decider::Decider;
use crate::policy::stack::Permissions;
use crate::sharing::offer::{
    Consumes, LINES_PER_PART_MAX, OfferLine, PartOffer, SHARES_PER_PART_MAX, share_numbers,
};
use crate::sharing::part_state::{Device, DeviceState, PartState};
use std::collections::{BTreeMap, BTreeSet};

/// Checks a policy's offer of one part (I8). `permissions` are those of its stack entry; the baseline
/// has none.
///
/// # Errors
/// [`Refusal::BadOffer`] with the rule that the offer breaks.
pub fn check_offer(
    part: &PartState,
    offer: &PartOffer,
    permissions: Option<&Permissions>,
    overcommit_percent: u32,
) -> Result<(), Refusal> {
    let bad = |why: String| Err(Refusal::BadOffer { part: part.part.id.clone(), why });
    if offer.lines.len() > LINES_PER_PART_MAX {
        return bad(format!("{} resources; at most {LINES_PER_PART_MAX} are allowed", offer.lines.len()));
    }
    let mut seen = BTreeSet::new();
    let mut wholes = 0;
    for line in &offer.lines {
        if !seen.insert(&line.resource) {
            return bad(format!("{} is offered twice", line.resource));
        }
        if let Some(permissions) = permissions {
            check_permissions(line, permissions).or_else(bad)?;
        }
        check_line(part, line, overcommit_percent).or_else(bad)?;
        wholes += u32::from(line.consumes == Consumes::Whole);
    }
    if wholes > 1 {
        // Both would have the bare UUID as their id, and the kubelet reports health by id alone.
        return bad("two resources that each take the whole part".into());
    }
    Ok(())
}

fn check_permissions(line: &OfferLine, permissions: &Permissions) -> Result<(), String> {
    if !permissions.allows_resource(&line.resource) {
        return Err(format!("its stack entry may not name {} (permissions.resources)", line.resource));
    }
    if line.count > permissions.share_max {
        let max = permissions.share_max;
        return Err(format!(
            "{} devices; its stack entry permits at most {max} (permissions.shareMax)",
            line.count
        ));
    }
    Ok(())
}

fn check_line(part: &PartState, line: &OfferLine, overcommit_percent: u32) -> Result<(), String> {
    if line.count == 0 || line.count > SHARES_PER_PART_MAX {
        return Err(format!(
            "{} devices of {}; 1 to {SHARES_PER_PART_MAX} are allowed",
            line.count, line.resource
        ));
    }
    match line.consumes {
        Consumes::Whole if line.count != 1 => {
            Err(format!("{} devices of {} that each take the whole part", line.count, line.resource))
        }
        Consumes::Whole => Ok(()),
        Consumes::Slice { memory_mib, compute_percent } => {
            let total_mib = part.memory_to_grant_mib(overcommit_percent);
            if memory_mib > total_mib {
                Err(format!("a device of {} takes {memory_mib} MiB of {total_mib} MiB", line.resource))
            } else if compute_percent > 100 {
                Err(format!("a device of {} takes {compute_percent} percent of its compute", line.resource))
            } else {
                Ok(())
            }
        }
    }
}

/// The change that puts an offer of a part into effect; `None` if it is in effect already.
///
/// A held device keeps what it consumes until it is free; a device that is no longer offered stays
/// listed until [`delisting_due`] (I10).
///
/// # Errors
/// [`Refusal::BadOffer`] if the part has no share numbers left.
pub fn reoffer(
    part: &PartState,
    offer: &PartOffer,
    by: &Decider,
    now: Now,
) -> Result<Option<Change>, Refusal> {
    let mut ranges = part.ranges.clone();
    let mut wanted: BTreeMap<(Resource, Option<u32>), Consumes> = BTreeMap::new();
    for line in &offer.lines {
        if line.consumes == Consumes::Whole {
            wanted.insert((line.resource.clone(), None), line.consumes);
            continue;
        }
        let numbers = share_numbers(&mut ranges, &line.resource, line.count).ok_or_else(|| {
            Refusal::BadOffer { part: part.part.id.clone(), why: "it has no share numbers left".into() }
        })?;
        wanted.extend(numbers.into_iter().map(|n| ((line.resource.clone(), Some(n)), line.consumes)));
    }
    let mut devices = part.devices.clone();
    for (key, device) in &mut devices {
        match wanted.remove(key) {
            Some(consumes) => {
                device.state = DeviceState::Offered;
                if !device.held() {
                    device.consumes = consumes;
                }
            }
            None if device.offered() => device.state = DeviceState::Retiring { since_mono_ms: now.mono_ms },
            None => {}
        }
    }
    let added = wanted.into_iter();
    devices.extend(added.map(|(key, consumes)| (key, Device::new(consumes, DeviceState::Offered))));
    let unchanged = devices == part.devices
        && ranges == part.ranges
        && offer.lines == part.lines
        && part.offered_by.as_ref() == Some(by);
    Ok((!unchanged).then(|| Change::Offered {
        part: part.part.id.clone(),
        by: Some(by.clone()),
        lines: offer.lines.clone(),
        ranges,
        devices,
    }))
}

/// When a device may leave the list, monotonic milliseconds: unoffered and unheld for long enough, and not named by a
/// recent Allocate, since the kubelet looks up the id after the reply (I10). `None` while it is offered or held.
#[must_use]
pub fn delisting_due(device: &Device, timing: &Timing) -> Option<u64> {
    let DeviceState::Retiring { since_mono_ms } = device.state else {
        return None;
    };
    let retired = since_mono_ms.saturating_add(timing.retire_ms);
    let named = device.last_allocate_mono_ms.map_or(0, |at| at.saturating_add(timing.allocate_grace_ms));
    (!device.held()).then_some(retired.max(named))
}
