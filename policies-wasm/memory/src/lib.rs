//! `memory`: offers slices of GPUs by MiB, each size as a resource of its own, several sizes on one GPU.
//!
//! Each GPU offers as many slices of each size as would fit if it were cut into that size alone. The
//! sizes share the GPU's memory: the daemon withdraws slices that no longer fit beside the held ones
//! (invariants I2 and I3) and offers them again when those are released. So no memory has to be reserved
//! for a size beforehand.

mod fit;
mod parameters;

use berth_policy_sdk::{
    AdmitRequest, Consumes, Description, GrantTerms, Hooks, Limits, Node, OfferAnswer, OfferLine, Part,
    PartOffer, PlaceRequest, Placement, Policy, Slice, Verdict, check_gpu_resource, check_selectors,
    is_chosen, room, warn, warn_if_all_mig, warn_if_any_unused,
};
use std::collections::BTreeMap;

pub use parameters::{Compute, Parameters, Size};

/// Slices of one GPU at most, over all sizes: 16 GPUs x 128 are 2048 devices, the largest node for which
/// a call is sure to stay within its limits. The sizes with the most slices are reduced until all fit: a
/// single size keeps 128 slices (640 MiB each on 80 GiB), two sizes with many slices 64 each.
const DEVICES_PER_GPU_MAX: u64 = 128;
/// Sizes at most: the daemon accepts this many resources per GPU.
const SIZES_MAX: usize = 16;

/// The policy `memory`.
#[derive(Clone, Debug)]
pub struct Memory {
    parameters: Parameters,
}

impl Policy for Memory {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "memory".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Slices of GPUs by MiB, several sizes on one GPU.".into(),
            hooks: Hooks::OFFER | Hooks::PLACE | Hooks::ADMIT,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        let sizes = &parameters.sizes;
        if sizes.len() > SIZES_MAX {
            return Err(format!("sizes: {} entries; at most {SIZES_MAX} are allowed", sizes.len()));
        }
        for (n, size) in sizes.iter().enumerate() {
            check_gpu_resource(&format!("sizes[{n}].resource"), &size.resource, "")?;
            if size.memory_mib == 0 {
                return Err(format!("sizes[{n}].memoryMiB: 0 is not a size; write 1 or more"));
            }
            if size.max_per_gpu == Some(0) {
                return Err(format!("sizes[{n}].maxPerGpu: 0 would offer no slices; omit the size instead"));
            }
            if sizes[..n].iter().any(|other| other.resource == size.resource) {
                return Err(format!("sizes[{n}].resource: `{}` is used twice", size.resource));
            }
        }
        check_selectors("only", parameters.only.as_deref())?;
        Ok(Self { parameters })
    }

    fn offer(&self, node: &Node) -> Option<OfferAnswer> {
        let only = self.parameters.only.as_deref();
        warn_if_any_unused("only", only, node);
        warn_if_all_mig(node, "");
        let chosen = || (0..).zip(&node.parts).filter(|(_, part)| is_chosen(only, part));
        self.warn_of_limits(&chosen().map(|(_, part)| part).collect::<Vec<_>>());
        let offers = chosen().map(|(index, part)| PartOffer { part: index, lines: self.lines(part) });
        // A GPU that is too small for every size is left to the next policy.
        let parts = offers.filter(|offer| !offer.lines.is_empty()).collect();
        Some(OfferAnswer { parts, again_after_seconds: None })
    }

    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        self.size_of(node, request.request.resource)?;
        fit::best(node, request)
    }

    fn admit(&self, node: &Node, request: &AdmitRequest) -> Option<Verdict> {
        let size = self.size_of(node, request.request.resource)?;
        let limits = limits(node, &request.devices, self.parameters.compute)?;
        let count = request.devices.len();
        let reason = format!("{count} x {} MiB", size.memory_mib);
        Some(Verdict::Allow(GrantTerms { environment: Vec::new(), limits, reason }))
    }
}

impl Memory {
    fn size_of(&self, node: &Node, resource: u32) -> Option<&Size> {
        let name = node.resources.get(usize::try_from(resource).ok()?)?;
        self.parameters.sizes.iter().find(|size| size.resource == *name)
    }

    /// For each size how many slices of it would fit alone, and how many are offered within the limit over all sizes.
    fn counts(&self, part: &Part) -> Vec<(u64, u64)> {
        let fitting = self.parameters.sizes.iter().map(|size| {
            let fit = part.memory_mib / size.memory_mib;
            size.max_per_gpu.map_or(fit, |most| fit.min(u64::from(most)))
        });
        let fitting: Vec<u64> = fitting.collect();
        let all_with = |most: u64| fitting.iter().map(|count| (*count).min(most)).sum::<u64>();
        // 16 sizes with 8 slices each are within the limit, so a number above 0 is always found.
        let most = (1..=DEVICES_PER_GPU_MAX).rev().find(|most| all_with(*most) <= DEVICES_PER_GPU_MAX);
        fitting.iter().map(|count| (*count, (*count).min(most.unwrap_or(1)))).collect()
    }

    fn lines(&self, part: &Part) -> Vec<OfferLine> {
        let counts = self.counts(part).into_iter().map(|(_, offered)| offered);
        let sizes = self.parameters.sizes.iter().zip(counts).filter(|(_, count)| *count > 0);
        let line = |(size, count): (&Size, u64)| OfferLine {
            resource: size.resource.clone(),
            count: u32::try_from(count).unwrap_or(1),
            consumes: self.slice(size, part),
        };
        sizes.map(line).collect()
    }

    /// Warns of sizes of which a GPU offers fewer slices than would fit on it, and of those that fit on no GPU.
    fn warn_of_limits(&self, gpus: &[&Part]) {
        for (n, size) in self.parameters.sizes.iter().enumerate() {
            let mut reduced = BTreeMap::<(u64, u64), Vec<String>>::new();
            let mut is_offered = gpus.is_empty();
            for gpu in gpus {
                let (fit, offered) = self.counts(gpu)[n];
                is_offered |= offered > 0;
                if offered < fit {
                    reduced.entry((fit, offered)).or_default().push(gpu.gpu_index.to_string());
                }
            }
            let Size { resource, memory_mib, .. } = size;
            if !is_offered {
                warn(&format!("sizes[{n}]: no GPU that is cut has {memory_mib} MiB for {resource}"));
            }
            for ((fit, offered), gpus) in reduced {
                warn(&format!(
                    "sizes[{n}]: {fit} slices of {resource} would fit, {offered} are offered on GPU {}, since a GPU \
                     has at most {DEVICES_PER_GPU_MAX} slices over all sizes (accept it: maxPerGpu: {offered})",
                    gpus.join(", ")
                ));
            }
        }
    }

    fn slice(&self, size: &Size, part: &Part) -> Consumes {
        let compute_percent = match self.parameters.compute {
            Compute::None => 0,
            // At most 100, since the size fits. Rounded down, so that a full GPU has compute for all slices;
            // for a slice below one percent no compute is reserved.
            Compute::Proportional => {
                u32::try_from(size.memory_mib * 100 / part.memory_mib.max(1)).unwrap_or(100)
            }
        };
        Consumes::Slice(Slice { memory_mib: size.memory_mib, compute_percent })
    }
}

/// The limits of a container: the sum of its slices on one GPU, and with several GPUs the smallest sum,
/// since there is one limit for all of them. `None` if a device is not a slice.
fn limits(node: &Node, devices: &[u32], compute: Compute) -> Option<Limits> {
    let mut by_part = BTreeMap::<u32, (u64, u32)>::new();
    for index in devices {
        let device = room::device(node, *index)?;
        let Consumes::Slice(slice) = device.consumes else { return None };
        let sum = by_part.entry(device.part).or_default();
        sum.0 = sum.0.saturating_add(slice.memory_mib);
        sum.1 = sum.1.saturating_add(slice.compute_percent);
    }
    let percent = by_part.values().map(|(_, percent)| (*percent).min(100)).min();
    Some(Limits {
        memory_mib: by_part.values().map(|(mib, _)| *mib).min(),
        compute_percent: percent.filter(|percent| compute == Compute::Proportional && *percent > 0),
    })
}

berth_policy_sdk::export!(Memory);

#[cfg(test)]
mod brute;
#[cfg(test)]
mod tests;
