//! A part with its offer and devices, as written.

use berth_kernel::gpu;
use berth_kernel::names::{PartId, Resource, SHARE_NUMBER_MAX};
use berth_kernel::offer;
use berth_kernel::record::{DeviceRun, PartRecord};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// See [`PartRecord`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Part {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    vendor: String,
    model: String,
    index: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    minor: Option<u32>,
    memory_mib: u64,
    pci_bus: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    numa: Option<u32>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    mig_enabled: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mig: Option<Mig>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<String, String>,
    offered_by: String,
    lines: Vec<Line>,
    ranges: Vec<Range>,
    devices: Vec<Alike>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Mig {
    profile: String,
    gpu_instance: u32,
    compute_instance: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    resource: String,
    count: u32,
    consumes: Consumes,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
enum Consumes {
    Whole,
    /// MiB of memory, percent of compute.
    Slice(u64, u32),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Range {
    resource: String,
    first: u32,
    len: u32,
}

/// Runs that differ in their numbers only, together: an offer cut up by held devices has many, of
/// about 14 bytes each.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Alike {
    resource: String,
    consumes: Consumes,
    /// First share number (`null`: the whole part), how many, whether retiring.
    runs: Vec<(Option<u32>, u32, bool)>,
}

impl Consumes {
    fn of(consumes: offer::Consumes) -> Self {
        match consumes {
            offer::Consumes::Whole => Self::Whole,
            offer::Consumes::Slice { memory_mib, compute_percent } => {
                Self::Slice(memory_mib, compute_percent)
            }
        }
    }

    fn read(self) -> offer::Consumes {
        match self {
            Self::Whole => offer::Consumes::Whole,
            Self::Slice(memory_mib, compute_percent) => {
                offer::Consumes::Slice { memory_mib, compute_percent }
            }
        }
    }
}

impl Part {
    pub(in super::super) fn of(record: &PartRecord) -> Self {
        let part = &record.part;
        Self {
            parent: part.parent.as_ref().map(PartId::to_string),
            vendor: part.vendor.clone(),
            model: part.model.clone(),
            index: part.gpu_index,
            minor: part.minor,
            memory_mib: part.memory_mib,
            pci_bus: part.pci_bus.clone(),
            numa: part.numa_node,
            mig_enabled: part.mig_enabled,
            mig: part.mig.as_ref().map(|mig| Mig {
                profile: mig.profile.clone(),
                gpu_instance: mig.gpu_instance,
                compute_instance: mig.compute_instance,
            }),
            attributes: part.attributes.clone(),
            offered_by: record.offered_by.clone(),
            lines: record.lines.iter().map(line_of).collect(),
            ranges: record.ranges.iter().map(range_of).collect(),
            devices: record
                .runs
                .chunk_by(|a, b| a.resource == b.resource && a.consumes == b.consumes)
                .map(alike_of)
                .collect(),
        }
    }

    pub(in super::super) fn read(self, id: PartId) -> Result<PartRecord, String> {
        let parent = self.parent.as_deref().map(PartId::parse).transpose();
        let part = gpu::Part {
            id,
            parent: parent.map_err(|e| e.to_string())?,
            vendor: self.vendor,
            model: self.model,
            gpu_index: self.index,
            minor: self.minor,
            memory_mib: self.memory_mib,
            pci_bus: self.pci_bus,
            numa_node: self.numa,
            mig_enabled: self.mig_enabled,
            mig: self.mig.map(|mig| gpu::Mig {
                profile: mig.profile,
                gpu_instance: mig.gpu_instance,
                compute_instance: mig.compute_instance,
            }),
            attributes: self.attributes,
        };
        let lines = self.lines.into_iter().map(|line| {
            Ok(offer::OfferLine {
                resource: resource(&line.resource)?,
                count: line.count,
                consumes: line.consumes.read(),
            })
        });
        let ranges = self.ranges.into_iter().map(|range| {
            within(Some(range.first), range.len)?;
            Ok(offer::ShareRange { resource: resource(&range.resource)?, first: range.first, len: range.len })
        });
        Ok(PartRecord {
            part,
            offered_by: self.offered_by,
            lines: lines.collect::<Result<_, String>>()?,
            ranges: ranges.collect::<Result<_, String>>()?,
            runs: runs_of(self.devices)?,
        })
    }
}

fn line_of(line: &offer::OfferLine) -> Line {
    Line { resource: line.resource.to_string(), count: line.count, consumes: Consumes::of(line.consumes) }
}

fn range_of(range: &offer::ShareRange) -> Range {
    Range { resource: range.resource.to_string(), first: range.first, len: range.len }
}

fn alike_of(runs: &[DeviceRun]) -> Alike {
    Alike {
        resource: runs[0].resource.to_string(),
        consumes: Consumes::of(runs[0].consumes),
        runs: runs.iter().map(|run| (run.first, run.len, run.retiring)).collect(),
    }
}

fn runs_of(devices: Vec<Alike>) -> Result<Vec<DeviceRun>, String> {
    let mut runs = Vec::new();
    for alike in devices {
        let resource = resource(&alike.resource)?;
        for (first, len, retiring) in alike.runs {
            within(first, len)?;
            runs.push(DeviceRun {
                resource: resource.clone(),
                first,
                len,
                consumes: alike.consumes.read(),
                retiring,
            });
        }
    }
    Ok(runs)
}

fn resource(text: &str) -> Result<Resource, String> {
    Resource::parse(text).map_err(|e| e.to_string())
}

/// A damaged length must not become a device each.
fn within(first: Option<u32>, len: u32) -> Result<(), String> {
    let fits = match first {
        None => len == 1,
        Some(first) => first.checked_add(len).is_some_and(|end| end <= SHARE_NUMBER_MAX + 1),
    };
    if fits { Ok(()) } else { Err(format!("there are no {len} shares from {first:?} on")) }
}
