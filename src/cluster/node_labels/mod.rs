//! Node labels that describe the GPUs, with the keys and values of NVIDIA's GPU feature discovery (GFD), which pods use
//! in node selectors.
//!
//! A pure function of a snapshot and a few facts; [`mod@file`] is the file that node-feature-discovery (NFD) reads. Not
//! written are these labels of GFD: `vgpu.*`, `gpu.clique` and `gpu.imex-domain`, since Berth does not read their
//! values from NVML, and `gfd.timestamp`, by which another writer is recognised.

pub mod file;
mod mig;
mod value;

pub use value::{LABEL_VALUE_MAX, label_value, label_value_with_suffix};

use berth_kernel::gpu::Part;
use berth_kernel::ledger::Ledger;
use berth_kernel::mig::MigStrategy;
use berth_kernel::names::Resource;
use berth_kernel::part_state::PartState;
use std::collections::{BTreeMap, BTreeSet};

/// Labels by key.
pub type Labels = BTreeMap<String, String>;

/// A label that GFD writes together with the others: if it is on the node, another program writes these labels.
pub const OTHER_WRITER: &str = "nvidia.com/gfd.timestamp";
/// The resource name in GFD's labels of whole GPUs.
const GPU: &str = "nvidia.com/gpu";

/// The inputs of the labels that are not in a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Version of NVIDIA's driver: `580.65.06`.
    pub driver_version: Option<String>,
    /// The newest CUDA version that the driver supports: `13.0`.
    pub cuda_version: Option<String>,
    /// The machine's product name, from its DMI table.
    pub machine: Option<String>,
    /// The strategy by which MIG instances are offered.
    pub mig: MigStrategy,
    /// Resources that containers share by MPS.
    pub mps: BTreeSet<Resource>,
}

/// How the devices of a part are shared.
struct Sharing {
    replicas: u32,
    strategy: &'static str,
    /// Whether the shares have the resource name of a whole GPU: then GFD appends `-SHARED` to the product.
    marked: bool,
}

/// The labels of a node with this snapshot; empty without GPUs.
#[must_use]
pub fn labels(ledger: &Ledger, facts: &Facts) -> Labels {
    let gpus: Vec<&PartState> = present(ledger).filter(|p| p.part.parent.is_none()).collect();
    let Some(main) = main_gpu(&gpus) else { return Labels::new() };
    let mut labels = Labels::new();
    let mut put = |key: &str, value: String| {
        labels.insert(key.to_owned(), value);
    };
    versions(facts, &mut put);
    let machine = facts.machine.as_deref().map(label_value).filter(|name| !name.is_empty());
    put("nvidia.com/gpu.machine", machine.unwrap_or_else(|| "unknown".into()));
    put("nvidia.com/gpu.mode", mode(&gpus).into());
    put("nvidia.com/mig.capable", gpus.iter().any(|gpu| is_mig_capable(&gpu.part)).to_string());
    put("nvidia.com/mps.capable", (!facts.mps.is_empty()).to_string());
    whole_gpus(&gpus, main, facts, &mut put);
    mig::put_labels(ledger, &gpus, main, facts, &mut put);
    labels
}

fn present(ledger: &Ledger) -> impl Iterator<Item = &PartState> {
    ledger.parts.values().map(AsRef::as_ref).filter(|part| part.present)
}

/// A GPU of the most frequent model; of several, the one with the lowest index. A node has one set of labels, so it
/// describes one model.
fn main_gpu<'p>(gpus: &[&'p PartState]) -> Option<&'p PartState> {
    let count = |model: &str| gpus.iter().filter(|gpu| gpu.part.model == model).count();
    // A GPU outside of MIG mode is preferred: it shows how GPUs are shared.
    let rank = |gpu: &&PartState| {
        (count(&gpu.part.model), !gpu.part.mig_enabled, std::cmp::Reverse(gpu.part.gpu_index))
    };
    gpus.iter().copied().max_by_key(rank)
}

fn is_mig_capable(gpu: &Part) -> bool {
    gpu.mig_enabled || gpu.attributes.get("mig.capable").is_some_and(|capable| capable == "true")
}

/// `graphics` or `compute`, by the PCI class of the GPUs, if all have the same.
fn mode(gpus: &[&PartState]) -> &'static str {
    let classes: BTreeSet<_> = gpus.iter().map(|gpu| gpu.part.attributes.get("pci.class")).collect();
    let mut classes = classes.into_iter();
    match (classes.next().flatten().map(String::as_str), classes.next()) {
        // The prefix is base class and subclass; the last byte is the programming interface.
        (Some(class), None) if class.starts_with("0x0300") => "graphics",
        (Some(class), None) if class.starts_with("0x0302") => "compute",
        _ => "unknown",
    }
}

fn versions(facts: &Facts, put: &mut impl FnMut(&str, String)) {
    if let Some(driver) = &facts.driver_version {
        let mut parts = driver.splitn(3, '.').map(label_value);
        let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let revision = parts.next().unwrap_or_default();
        // The older keys are still used in manifests.
        put("nvidia.com/cuda.driver.major", major.clone());
        put("nvidia.com/cuda.driver.minor", minor.clone());
        put("nvidia.com/cuda.driver.rev", revision.clone());
        put("nvidia.com/cuda.driver-version.major", major);
        put("nvidia.com/cuda.driver-version.minor", minor);
        put("nvidia.com/cuda.driver-version.revision", revision);
        put("nvidia.com/cuda.driver-version.full", label_value(driver));
    }
    if let Some((major, minor)) = facts.cuda_version.as_deref().and_then(|cuda| cuda.split_once('.')) {
        let (major, minor) = (label_value(major), label_value(minor));
        put("nvidia.com/cuda.runtime.major", major.clone());
        put("nvidia.com/cuda.runtime.minor", minor.clone());
        put("nvidia.com/cuda.runtime-version.full", format!("{major}.{minor}"));
        put("nvidia.com/cuda.runtime-version.major", major);
        put("nvidia.com/cuda.runtime-version.minor", minor);
    }
}

/// The labels `nvidia.com/gpu.*` of GPUs of one model.
fn whole_gpus(gpus: &[&PartState], main: &PartState, facts: &Facts, put: &mut impl FnMut(&str, String)) {
    let same_model: Vec<&PartState> =
        gpus.iter().copied().filter(|gpu| gpu.part.model == main.part.model).collect();
    let shared = same_model.iter().filter(|gpu| !gpu.part.mig_enabled).map(|gpu| sharing(gpu, facts));
    // A GPU in MIG mode is not shared itself.
    let none = Sharing { replicas: 0, strategy: "none", marked: false };
    let sharing = shared.max_by_key(|sharing| sharing.replicas).unwrap_or(none);
    put("nvidia.com/gpu.product", product(&[&main.part.model], &sharing));
    put("nvidia.com/gpu.count", same_model.len().to_string());
    put("nvidia.com/gpu.replicas", sharing.replicas.to_string());
    put("nvidia.com/gpu.sharing-strategy", sharing.strategy.into());
    if main.part.memory_mib > 0 {
        put("nvidia.com/gpu.memory", main.part.memory_mib.to_string());
    }
    let capability = main.part.attributes.get("compute.capability").and_then(|both| both.split_once('.'));
    if let Some((major, minor)) = capability {
        put("nvidia.com/gpu.family", family(major, minor).into());
        put("nvidia.com/gpu.compute.major", label_value(major));
        put("nvidia.com/gpu.compute.minor", label_value(minor));
    }
}

fn product(parts: &[&str], sharing: &Sharing) -> String {
    label_value_with_suffix(&parts.join(" "), if sharing.marked { "-SHARED" } else { "" })
}

/// How a part is shared, by the line of its offer with the most devices. A part without an offer is not shared.
fn sharing(part: &PartState, facts: &Facts) -> Sharing {
    let line = part.lines.iter().max_by_key(|line| line.count).filter(|line| line.count > 1);
    let Some(line) = line else { return Sharing { replicas: 1, strategy: "none", marked: false } };
    let by_mps = facts.mps.contains(&line.resource);
    Sharing {
        replicas: line.count,
        strategy: if by_mps { "mps" } else { "time-slicing" },
        marked: line.resource.as_str() == whole_resource(&part.part),
    }
}

/// The resource name of the part when it is offered as a whole.
fn whole_resource(part: &Part) -> String {
    match &part.mig {
        None => GPU.into(),
        Some(mig) => mig::resource(&mig.profile),
    }
}

/// GFD's name of the architecture, by the compute capability.
fn family(major: &str, minor: &str) -> &'static str {
    let minor: u32 = minor.parse().unwrap_or(0);
    match (major, minor) {
        ("1", _) => "tesla",
        ("2", _) => "fermi",
        ("3", _) => "kepler",
        ("5", _) => "maxwell",
        ("6", _) => "pascal",
        ("7", 0..5) => "volta",
        ("7", _) => "turing",
        ("8", 0..9) => "ampere",
        ("8", _) => "ada-lovelace",
        ("9", _) => "hopper",
        ("10" | "12", _) => "blackwell",
        ("13", _) => "rubin",
        _ => "undefined",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_family_follows_from_the_compute_capability() {
        for (major, minor, expected) in [
            ("6", "1", "pascal"),
            ("7", "0", "volta"),
            ("7", "2", "volta"),
            ("7", "5", "turing"),
            ("8", "6", "ampere"),
            ("8", "9", "ada-lovelace"),
            ("9", "0", "hopper"),
            ("10", "3", "blackwell"),
            ("12", "0", "blackwell"),
            ("99", "0", "undefined"),
        ] {
            assert_eq!(family(major, minor), expected, "{major}.{minor}");
        }
    }

    #[test]
    fn a_driver_with_two_numbers_has_no_revision() {
        let facts = Facts { driver_version: Some("550.54".into()), ..Facts::default() };
        let mut labels = Labels::new();
        versions(&facts, &mut |key, value| {
            labels.insert(key.into(), value);
        });
        assert_eq!(labels["nvidia.com/cuda.driver-version.revision"], "");
        assert_eq!(labels["nvidia.com/cuda.driver-version.full"], "550.54");
        assert!(!labels.contains_key("nvidia.com/cuda.runtime-version.full"), "it is not known");
    }
}
