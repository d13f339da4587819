//! Offers: the resources that a part is offered under, and what its devices take of it.

use super::change::Change;
use super::decider::Decider;
use super::names::{PartId, Resource};
use super::part_state::{Device, DeviceState, PartState};
use super::refusal::Refusal;
use super::stack::Permissions;
use super::time::Now;
use std::collections::{BTreeMap, BTreeSet};

/// Most devices of one resource on one part. The largest supported node has 16 GPUs of 128 devices.
pub const SHARES_PER_PART_MAX: u32 = 128;
/// Most resources that one part is offered under.
pub const LINES_PER_PART_MAX: usize = 16;
/// Most resources of one node: each costs a socket, a server and a stream.
pub const RESOURCES_MAX: usize = 64;

/// What one device takes of its part while it is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consumes {
    /// Everything.
    Whole,
    /// An amount of each counter.
    Slice {
        /// MiB of memory; 0 reserves nothing.
        memory_mib: u64,
        /// Percent of compute, 0 to 100; 0 reserves nothing.
        compute_percent: u32,
    },
}

/// Devices of one resource on one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OfferLine {
    /// The resource that they are listed under.
    pub resource: Resource,
    /// Number of devices, 1 to [`SHARES_PER_PART_MAX`].
    pub count: u32,
    /// What each takes.
    pub consumes: Consumes,
}

/// The offer of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartOffer {
    /// The part.
    pub part: PartId,
    /// Its resources; none withdraws the part.
    pub lines: Vec<OfferLine>,
}

/// Share numbers that one resource owns permanently on one part: a number keeps its meaning while the
/// offer shrinks and grows again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareRange {
    /// The owner.
    pub resource: Resource,
    /// First number.
    pub first: u32,
    /// Count of numbers.
    pub len: u32,
}

/// The first `count` share numbers of `resource`; adds to its ranges if they hold fewer. `None` if the
/// part has no numbers left.
#[must_use]
pub fn share_numbers(ranges: &mut Vec<ShareRange>, resource: &Resource, count: u32) -> Option<Vec<u32>> {
    let owned = |ranges: &[ShareRange]| -> Vec<u32> {
        ranges.iter().filter(|r| r.resource == *resource).flat_map(|r| r.first..r.first + r.len).collect()
    };
    let mut numbers = owned(ranges);
    let available = u32::try_from(numbers.len()).unwrap_or(u32::MAX);
    if available < count {
        let missing = count - available;
        let end = ranges.iter().map(|r| r.first + r.len).max().unwrap_or(0);
        if end.checked_add(missing)? > super::names::SHARE_NUMBER_MAX + 1 {
            return None;
        }
        match ranges.last_mut().filter(|r| r.resource == *resource && r.first + r.len == end) {
            Some(last) => last.len += missing,
            None => ranges.push(ShareRange { resource: resource.clone(), first: end, len: missing }),
        }
        numbers = owned(ranges);
    }
    numbers.truncate(count as usize);
    Some(numbers)
}

/// Assigns `number` to `resource` if it is free, with the free numbers below it (an adopted `<uuid>::3`
/// means that its former owner listed 0 to 3).
pub fn claim_share(ranges: &mut Vec<ShareRange>, resource: &Resource, number: u32) {
    let end = ranges.iter().map(|r| r.first + r.len).max().unwrap_or(0);
    if number >= end {
        ranges.push(ShareRange { resource: resource.clone(), first: end, len: number + 1 - end });
    }
}

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
            "{} devices; its stack entry may share {max} ways (permissions.shareMax)",
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
/// listed until [`may_be_delisted`] (I10).
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

/// Whether a device may leave the list: unoffered and unheld for long enough, and not named by a recent
/// Allocate, since the kubelet looks up the id after the reply (I10).
#[must_use]
pub fn may_be_delisted(device: &Device, retire_ms: u64, named_ms: u64, now: Now) -> bool {
    let DeviceState::Retiring { since_mono_ms } = device.state else {
        return false;
    };
    !device.held()
        && now.passed(since_mono_ms, retire_ms)
        && device.last_allocate_mono_ms.is_none_or(|named| now.passed(named, named_ms))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(name: &str) -> Resource {
        Resource::parse(name).unwrap()
    }

    #[test]
    fn a_number_keeps_its_owner_while_offers_shrink_and_grow() {
        let (a, b) = (resource("x/a"), resource("x/b"));
        let mut ranges = Vec::new();
        assert_eq!(share_numbers(&mut ranges, &a, 3).unwrap(), [0, 1, 2]);
        assert_eq!(share_numbers(&mut ranges, &b, 2).unwrap(), [3, 4]);
        assert_eq!(share_numbers(&mut ranges, &a, 1).unwrap(), [0]);
        assert_eq!(share_numbers(&mut ranges, &a, 5).unwrap(), [0, 1, 2, 5, 6]);
        assert_eq!(share_numbers(&mut ranges, &b, 2).unwrap(), [3, 4]);
    }

    #[test]
    fn claiming_a_number_claims_the_free_ones_below_it() {
        let (a, b) = (resource("x/a"), resource("x/b"));
        let mut ranges = Vec::new();
        claim_share(&mut ranges, &a, 3);
        assert_eq!(share_numbers(&mut ranges, &a, 4).unwrap(), [0, 1, 2, 3]);
        assert_eq!(share_numbers(&mut ranges, &b, 1).unwrap(), [4]);
    }

    #[test]
    fn a_part_has_65536_share_numbers() {
        let mut ranges = vec![ShareRange { resource: resource("x/a"), first: 0, len: 65_530 }];
        assert_eq!(share_numbers(&mut ranges, &resource("x/b"), 7), None);
        assert_eq!(share_numbers(&mut ranges, &resource("x/b"), 6).unwrap().len(), 6);
    }
}
