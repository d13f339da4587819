//! Offers: the resources that a part is offered under, and what its devices take of it.

use crate::ids::names::{PartId, Resource};

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
        if end.checked_add(missing)? > crate::ids::names::SHARE_NUMBER_MAX + 1 {
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
