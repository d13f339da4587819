//! The serialized form of a part with its offer and devices.

use berth_kernel::hardware::gpu;
use berth_kernel::ids::names::{GpuId, PartId, Resource, SHARE_NUMBER_MAX};
use berth_kernel::ids::pci::PciBusId;
use berth_kernel::node::record::{DeviceRun, PartRecord};
use berth_kernel::sharing::offer;
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
    devices: Vec<RunGroup>,
}

#[derive(Serialize, Deserialize)]
struct Mig(#[serde(with = "MigFields")] gpu::Mig);

#[derive(Serialize, Deserialize)]
#[serde(remote = "gpu::Mig", deny_unknown_fields, rename_all = "camelCase")]
struct MigFields {
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

/// Runs that differ only in their numbers. An offer with held devices in between has many, of about
/// 14 bytes each.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RunGroup {
    resource: String,
    consumes: Consumes,
    /// First share number (`null`: the whole part), number of devices, whether they are retiring.
    runs: Vec<(Option<u32>, u32, bool)>,
}

impl Consumes {
    fn from_kernel(consumes: offer::Consumes) -> Self {
        match consumes {
            offer::Consumes::Whole => Self::Whole,
            offer::Consumes::Slice { memory_mib, compute_percent } => {
                Self::Slice(memory_mib, compute_percent)
            }
        }
    }

    fn into_kernel(self) -> offer::Consumes {
        match self {
            Self::Whole => offer::Consumes::Whole,
            Self::Slice(memory_mib, compute_percent) => {
                offer::Consumes::Slice { memory_mib, compute_percent }
            }
        }
    }
}

impl Part {
    pub(in super::super) fn from_kernel(record: &PartRecord) -> Self {
        let part = &record.part;
        let line = |line: &offer::OfferLine| Line {
            resource: line.resource.to_string(),
            count: line.count,
            consumes: Consumes::from_kernel(line.consumes),
        };
        let range = |range: &offer::ShareRange| Range {
            resource: range.resource.to_string(),
            first: range.first,
            len: range.len,
        };
        Self {
            parent: (!part.is_whole_gpu()).then(|| part.gpu.to_string()),
            vendor: part.vendor.clone(),
            model: part.model.clone(),
            index: part.gpu_index,
            minor: part.minor,
            memory_mib: part.memory_mib,
            pci_bus: part.pci_bus.map(|bus| bus.to_string()).unwrap_or_default(),
            numa: part.numa_node,
            mig_enabled: part.mig_enabled,
            mig: part.mig.clone().map(Mig),
            attributes: part.attributes.clone(),
            offered_by: record.offered_by.as_ref().map(ToString::to_string).unwrap_or_default(),
            lines: record.lines.iter().map(line).collect(),
            ranges: record.ranges.iter().map(range).collect(),
            devices: record
                .runs
                .chunk_by(|a, b| a.resource == b.resource && a.consumes == b.consumes)
                .map(group_runs)
                .collect(),
        }
    }

    pub(in super::super) fn into_kernel(self, id: PartId) -> Result<PartRecord, String> {
        let parent = self.parent.as_deref().map(GpuId::parse).transpose().map_err(|e| e.to_string())?;
        let part = gpu::Part {
            gpu: parent.unwrap_or_else(|| GpuId::of_whole(&id)),
            id,
            vendor: self.vendor,
            model: self.model,
            gpu_index: self.index,
            minor: self.minor,
            memory_mib: self.memory_mib,
            // Empty if it is unknown. The next scan reads it again.
            pci_bus: PciBusId::parse(&self.pci_bus).ok(),
            numa_node: self.numa,
            mig_enabled: self.mig_enabled,
            mig: self.mig.map(|mig| mig.0),
            attributes: self.attributes,
        };
        let lines = self.lines.into_iter().map(|line| {
            Ok(offer::OfferLine {
                resource: resource(&line.resource)?,
                count: line.count,
                consumes: line.consumes.into_kernel(),
            })
        });
        let ranges = self.ranges.into_iter().map(|range| {
            check_run(Some(range.first), range.len)?;
            Ok(offer::ShareRange { resource: resource(&range.resource)?, first: range.first, len: range.len })
        });
        Ok(PartRecord {
            part,
            offered_by: Some(self.offered_by).filter(|by| !by.is_empty()).map(Into::into),
            lines: lines.collect::<Result<_, String>>()?,
            ranges: ranges.collect::<Result<_, String>>()?,
            runs: ungroup_runs(self.devices)?,
        })
    }
}

fn group_runs(runs: &[DeviceRun]) -> RunGroup {
    RunGroup {
        resource: runs[0].resource.to_string(),
        consumes: Consumes::from_kernel(runs[0].consumes),
        runs: runs.iter().map(|run| (run.first, run.len, run.retiring)).collect(),
    }
}

fn ungroup_runs(devices: Vec<RunGroup>) -> Result<Vec<DeviceRun>, String> {
    let mut runs = Vec::new();
    for group in devices {
        let resource = resource(&group.resource)?;
        for (first, len, retiring) in group.runs {
            check_run(first, len)?;
            runs.push(DeviceRun {
                resource: resource.clone(),
                first,
                len,
                consumes: group.consumes.into_kernel(),
                retiring,
            });
        }
    }
    Ok(runs)
}

fn resource(text: &str) -> Result<Resource, String> {
    Resource::parse(text).map_err(|e| e.to_string())
}

/// Checks a run's length: a damaged one must not create that many devices.
fn check_run(first: Option<u32>, len: u32) -> Result<(), String> {
    let fits = match first {
        None => len == 1,
        Some(first) => first.checked_add(len).is_some_and(|end| end <= SHARE_NUMBER_MAX + 1),
    };
    if fits { Ok(()) } else { Err(format!("no {len} shares exist from {first:?} on")) }
}
