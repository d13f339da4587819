//! Node labels that describe the GPUs, with the keys and values of NVIDIA's GPU feature discovery (GFD), which pods use
//! in node selectors.
//!
//! A pure function of a snapshot and a few facts; [`mod@file`] is the file that node-feature-discovery (NFD) reads. Not
//! written are these labels of GFD: `vgpu.*`, `gpu.clique` and `gpu.imex-domain`, since Berth does not read their
//! values from NVML, and `gfd.timestamp`, by which another writer is recognised.

pub mod file;

use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::ids::names::Resource;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::part_state::PartState;
use std::collections::{BTreeMap, BTreeSet};

/// Labels by key.
pub type Labels = BTreeMap<String, String>;

/// A label that GFD writes together with the others: if it is on the node, another program writes these labels.
pub const OTHER_WRITER: &str = "nvidia.com/gfd.timestamp";
/// The resource name in GFD's labels of whole GPUs.
const GPU: &str = "nvidia.com/gpu";
/// Longest label value, bytes.
const LABEL_VALUE_MAX: usize = 63;
/// The attributes of an instance that become labels; in the part's attributes they have the prefix `mig.`.
const INSTANCE_ATTRIBUTES: [&str; 8] = [
    "multiprocessors",
    "slices.gi",
    "slices.ci",
    "engines.copy",
    "engines.decoder",
    "engines.encoder",
    "engines.jpeg",
    "engines.ofa",
];

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

const UNSHARED: Sharing = Sharing { replicas: 1, strategy: "none", marked: false };

/// The labels of a node with this snapshot; empty without GPUs.
#[must_use]
pub fn labels(ledger: &Ledger, facts: &Facts) -> Labels {
    // A GPU that is excluded is no pod's, and of one without a model only the UUID is known.
    let is_described =
        |part: &&PartState| part.present && !ledger.is_excluded(part) && !part.part.model.is_empty();
    let present = || ledger.parts.values().map(AsRef::as_ref).filter(is_described);
    let gpus: Vec<&PartState> = present().filter(|p| p.part.is_whole_gpu()).collect();
    let Some(main) = main_gpu(&gpus) else { return Labels::new() };
    let mut instances: Vec<&PartState> = present().filter(|p| p.part.mig.is_some()).collect();
    instances.sort_by_key(|p| (p.part.gpu_index, p.part.mig_index()));
    let mut node = NodeLabels { facts, gpus, labels: Labels::new() };
    node.put_versions();
    let machine = facts.machine.as_deref().map(label_value).filter(|name| !name.is_empty());
    node.put("nvidia.com/gpu.machine", machine.unwrap_or_else(|| "unknown".into()));
    node.put("nvidia.com/gpu.mode", mode(&node.gpus));
    let is_mig_capable = node.gpus.iter().any(|gpu| is_mig_capable(&gpu.part));
    node.put("nvidia.com/mig.capable", is_mig_capable.to_string());
    node.put("nvidia.com/mps.capable", (!facts.mps.is_empty()).to_string());
    node.put_whole_gpus(main);
    node.put_mig(&instances, main);
    node.labels
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

/// The labels of a node with these GPUs, as far as they are complete.
struct NodeLabels<'l> {
    facts: &'l Facts,
    /// The GPUs that are present.
    gpus: Vec<&'l PartState>,
    labels: Labels,
}

impl NodeLabels<'_> {
    fn put(&mut self, key: impl Into<String>, value: impl Into<String>) {
        self.labels.insert(key.into(), value.into());
    }

    fn put_versions(&mut self) {
        if let Some(driver) = &self.facts.driver_version {
            let mut parts = driver.splitn(3, '.').map(label_value);
            let mut next = || parts.next().unwrap_or_default();
            let (major, minor, revision) = (next(), next(), next());
            // The older keys are still used in manifests.
            for (key, old_key, value) in
                [("major", "major", major), ("minor", "minor", minor), ("revision", "rev", revision)]
            {
                self.put(format!("nvidia.com/cuda.driver.{old_key}"), value.as_str());
                self.put(format!("nvidia.com/cuda.driver-version.{key}"), value);
            }
            self.put("nvidia.com/cuda.driver-version.full", label_value(driver));
        }
        if let Some((major, minor)) = self.facts.cuda_version.as_deref().and_then(|cuda| cuda.split_once('.'))
        {
            let (major, minor) = (label_value(major), label_value(minor));
            self.put("nvidia.com/cuda.runtime-version.full", format!("{major}.{minor}"));
            for (key, value) in [("major", major), ("minor", minor)] {
                self.put(format!("nvidia.com/cuda.runtime.{key}"), value.as_str());
                self.put(format!("nvidia.com/cuda.runtime-version.{key}"), value);
            }
        }
    }

    /// The labels `nvidia.com/gpu.*` of GPUs of one model.
    fn put_whole_gpus(&mut self, main: &PartState) {
        let same_model = || self.gpus.iter().filter(|gpu| gpu.part.model == main.part.model);
        let count = same_model().count();
        let shared = same_model().filter(|gpu| !gpu.part.mig_enabled).map(|gpu| sharing(gpu, self.facts));
        // A GPU in MIG mode is not shared itself.
        let none = Sharing { replicas: 0, ..UNSHARED };
        let sharing = shared.max_by_key(|sharing| sharing.replicas).unwrap_or(none);
        self.put("nvidia.com/gpu.product", product(&main.part.model, "", &sharing));
        self.put("nvidia.com/gpu.count", count.to_string());
        self.put("nvidia.com/gpu.replicas", sharing.replicas.to_string());
        self.put("nvidia.com/gpu.sharing-strategy", sharing.strategy);
        if main.part.memory_mib > 0 {
            self.put("nvidia.com/gpu.memory", main.part.memory_mib.to_string());
        }
        let capability = main.part.attributes.get("compute.capability").and_then(|both| both.split_once('.'));
        if let Some((major, minor)) = capability {
            self.put("nvidia.com/gpu.family", family(major, minor));
            self.put("nvidia.com/gpu.compute.major", label_value(major));
            self.put("nvidia.com/gpu.compute.minor", label_value(minor));
        }
    }

    /// The labels of MIG, by its strategy. `main` is the GPU whose model the labels describe.
    fn put_mig(&mut self, instances: &[&PartState], main: &PartState) {
        // A policy can offer instances by their profiles with every strategy.
        let by_profile =
            |p: &&PartState| p.lines.iter().any(|l| l.resource.as_str().starts_with("nvidia.com/mig-"));
        match self.facts.mig {
            MigStrategy::Single => {
                self.put("nvidia.com/mig.strategy", "single");
                self.put_single(instances, main);
            }
            MigStrategy::None if !instances.iter().any(by_profile) => {}
            MigStrategy::None | MigStrategy::Mixed => {
                self.put("nvidia.com/mig.strategy", "mixed");
                let mut profiles: BTreeMap<&str, Vec<&PartState>> = BTreeMap::new();
                for instance in instances {
                    profiles.entry(profile(instance)).or_default().push(instance);
                }
                for (profile, instances) in profiles {
                    self.put_instances(&instance_resource(profile), profile, &instances);
                }
            }
        }
    }

    /// The labels of strategy `single`: all instances are one resource with the name of whole GPUs. On a node that
    /// breaks this rule the product label ends in `MIG-INVALID`.
    fn put_single(&mut self, instances: &[&PartState], main: &PartState) {
        if self.gpus.iter().all(|gpu| !gpu.part.mig_enabled) {
            return;
        }
        let has_instances = |gpu: &&PartState| {
            gpu.part.mig_enabled
                && instances.iter().any(|i| !i.part.is_whole_gpu() && i.part.gpu == gpu.part.gpu)
        };
        if let Some(first) = instances.first().map(|first| profile(first))
            && self.gpus.iter().all(has_instances)
            && instances.iter().all(|instance| profile(instance) == first)
        {
            return self.put_instances(GPU, first, instances);
        }
        self.put("nvidia.com/gpu.product", product(&main.part.model, "MIG INVALID", &UNSHARED));
        for (suffix, value) in [("count", "0"), ("replicas", "0"), ("sharing-strategy", ""), ("memory", "0")]
        {
            self.put(format!("{GPU}.{suffix}"), value);
        }
    }

    /// Adds the labels of the instances of one profile under this resource name.
    fn put_instances(&mut self, resource: &str, profile: &str, instances: &[&PartState]) {
        let Some(first) = instances.first() else { return };
        let shared = instances.iter().map(|p| sharing(p, self.facts)).max_by_key(|sharing| sharing.replicas);
        let mut sharing = shared.unwrap_or(UNSHARED);
        sharing.marked |= sharing.replicas > 1
            && instances
                .iter()
                .flat_map(|p| &p.lines)
                .any(|l| l.count > 1 && l.resource.as_str() == resource);
        let kind = format!("MIG {}", profile_name(profile));
        let product = product(self.model(&first.part), &kind, &sharing);
        self.put(format!("{resource}.product"), product);
        self.put(format!("{resource}.count"), instances.len().to_string());
        self.put(format!("{resource}.replicas"), sharing.replicas.to_string());
        self.put(format!("{resource}.sharing-strategy"), sharing.strategy);
        if first.part.memory_mib > 0 {
            self.put(format!("{resource}.memory"), first.part.memory_mib.to_string());
        }
        for attribute in INSTANCE_ATTRIBUTES {
            if let Some(value) = first.part.attributes.get(&format!("mig.{attribute}")) {
                self.put(format!("{resource}.{attribute}"), label_value(value));
            }
        }
    }

    /// The model of the instance's GPU.
    fn model<'p>(&'p self, instance: &'p Part) -> &'p str {
        let gpu = self.gpus.iter().find(|gpu| gpu.part.gpu == instance.gpu);
        let own = || instance.model.split(" MIG ").next().unwrap_or_default();
        gpu.map_or_else(own, |gpu| gpu.part.model.as_str())
    }
}

/// The profile of a MIG instance.
fn profile(instance: &PartState) -> &str {
    instance.part.mig.as_ref().map_or("", |mig| &mig.profile)
}

/// The resource name of instances of this profile: `nvidia.com/mig-1g.10gb`.
fn instance_resource(profile: &str) -> String {
    format!("nvidia.com/mig-{}", profile_name(profile))
}

/// The profile as part of a resource name: `1g.10gb.me` for `1g.10gb+me`.
fn profile_name(profile: &str) -> String {
    profile.replace('+', ".")
}

/// The product name of a GPU, or with a `kind` that of its instances. If it is too long, the model is cut and not what
/// tells two products of one model apart.
fn product(model: &str, kind: &str, sharing: &Sharing) -> String {
    let mut suffix = label_value(kind);
    if !suffix.is_empty() {
        suffix.insert(0, '-');
    }
    if sharing.marked {
        suffix += "-SHARED";
    }
    label_value_with_suffix(model, &suffix)
}

/// How a part is shared, by the line of its offer with the most devices. A part without an offer is not shared.
fn sharing(part: &PartState, facts: &Facts) -> Sharing {
    let line = part.lines.iter().max_by_key(|line| line.count).filter(|line| line.count > 1);
    let Some(line) = line else { return UNSHARED };
    // The resource name of the part when it is offered as a whole.
    let whole = part.part.mig.as_ref().map_or_else(|| GPU.into(), |mig| instance_resource(&mig.profile));
    Sharing {
        replicas: line.count,
        strategy: if facts.mps.contains(&line.resource) { "mps" } else { "time-slicing" },
        marked: line.resource.as_str() == whole,
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

/// Converts a text to a label value as GFD does: at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit
/// at both ends (Kubernetes, "Labels and Selectors"). White space becomes one `-`, other characters that are not
/// allowed are removed. The result may be empty, which is a valid value.
fn label_value(text: &str) -> String {
    label_value_with_suffix(text, "")
}

/// [`label_value`] with a suffix that is never cut: the text before it is. Behind its leading `-` the suffix must be a
/// valid value.
fn label_value_with_suffix(text: &str, suffix: &str) -> String {
    let kept: String = text
        .chars()
        .filter(|c| c.is_ascii_alphanumeric() || c.is_whitespace() || "-_.".contains(*c))
        .collect();
    let joined = kept.split_whitespace().collect::<Vec<_>>().join("-");
    let edge = |c: char| !c.is_ascii_alphanumeric();
    let text_max = LABEL_VALUE_MAX.saturating_sub(suffix.len());
    // ASCII only, so every index is a character boundary.
    let cut = &joined[..joined.len().min(text_max)];
    let cut = cut.trim_matches(edge);
    if cut.is_empty() { suffix.trim_matches(edge).to_owned() } else { format!("{cut}{suffix}") }
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
        let mut node = NodeLabels { facts: &facts, gpus: Vec::new(), labels: Labels::new() };
        node.put_versions();
        let labels = node.labels;
        assert_eq!(labels["nvidia.com/cuda.driver-version.revision"], "");
        assert_eq!(labels["nvidia.com/cuda.driver-version.full"], "550.54");
        assert!(!labels.contains_key("nvidia.com/cuda.runtime-version.full"), "it is not known");
    }

    #[test]
    fn values_are_valid_in_kubernetes() {
        for (text, value) in [
            ("NVIDIA H100 80GB HBM3", "NVIDIA-H100-80GB-HBM3"),
            ("  Tesla   T4 ", "Tesla-T4"),
            ("NVIDIA RTX\u{2122} 6000 (Ada) /x+y", "NVIDIA-RTX-6000-Ada-xy"),
            ("\u{1f600}", ""),
            ("-_.a._-", "a"),
            ("", ""),
            ("a\tb\nc", "a-b-c"),
        ] {
            assert_eq!(label_value(text), value, "{text:?}");
        }
        let long = "a ".repeat(100);
        assert_eq!(label_value(&long).len(), LABEL_VALUE_MAX);
        let shared = label_value_with_suffix(&long, "-SHARED");
        assert!(shared.len() <= LABEL_VALUE_MAX && shared.ends_with("a-SHARED"), "{shared}");
        assert_eq!(label_value_with_suffix("\u{2122}", "-SHARED"), "SHARED");
    }

    /// The label of a long model with a MIG profile is too long.
    /// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1876
    #[test]
    fn a_long_model_is_cut_and_neither_the_profile_nor_the_sharing() {
        let model = "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition";
        let shared = Sharing { marked: true, ..UNSHARED };
        let of = |profile: &str, sharing| product(model, &format!("MIG {}", profile_name(profile)), sharing);
        assert_eq!(
            of("1g.24gb", &UNSHARED),
            "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edi-MIG-1g.24gb"
        );
        assert_eq!(of("4g.96gb", &shared), "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstat-MIG-4g.96gb-SHARED");
        assert_eq!(
            of("1g.24gb+me", &shared),
            "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Works-MIG-1g.24gb.me-SHARED"
        );
        assert_eq!(product(model, "MIG INVALID", &UNSHARED).len(), LABEL_VALUE_MAX);
        assert_eq!(product("NVIDIA H100", "MIG 1g.10gb", &UNSHARED), "NVIDIA-H100-MIG-1g.10gb");
    }

    proptest::proptest! {
        #[test]
        fn every_model_name_becomes_a_valid_value(text in "\\PC{0,120}", shared: bool) {
            let value = label_value_with_suffix(&text, if shared { "-SHARED" } else { "" });
            let ends = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
            proptest::prop_assert!(value.len() <= LABEL_VALUE_MAX);
            proptest::prop_assert!(ends(value.chars().next()) && ends(value.chars().last()));
            let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
            proptest::prop_assert!(value.chars().all(allowed));
        }
    }
}
