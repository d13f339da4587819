//! The simulated machine, how a profile or a file describes it, and the models of its GPUs.

use berth_files::yaml;
use berth_kernel::hardware::gpu::Path;
use berth_kernel::hardware::process::PROCESSES_PER_GPU_MAX;
use serde::Deserialize;
use std::collections::BTreeSet;

/// Most GPUs of a simulated machine: those of the largest real ones.
const COUNT_MAX: u32 = 16;
/// Most groups: each GPU of another model.
const GROUPS_MAX: usize = 16;

/// A simulated machine. As a file, YAML or JSON:
///
/// ```yaml
/// model: h100            # t4, a10, l4, l40s, a100-40gb, a100, h100, h200, b200
/// count: 8
/// more:                  # further models, whose GPUs follow in index
///   - { model: l4, count: 2 }
/// gpus:                  # only those that differ
///   - index: 3
///     lost: true         # fell off the bus
///   - index: 4
///     trouble: "needs a reset"
///   - index: 5
///     absent: true       # is not found
///   - index: 6
///     processes: 2       # their number only; they are not listed
///     memoryUsedMiB: 4096
///   - index: 7
///     mig: [1g.10gb, 2g.20gb]
///     running:           # listed one by one; instance is the index in mig, from 0
///       - { pid: 4711, memoryMiB: 512, instance: 1 }
///       - { pid: 4712, memoryMiB: 64, kind: graphics }
/// events:                # each is reported once; seq only grows
///   - { seq: 1, gpu: 3, xid: 79 }
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Machine {
    /// Key of the model of the first group of GPUs; usually of all.
    pub model: String,
    /// Number of GPUs of that model.
    pub count: u32,
    /// Further groups; their GPUs follow in index.
    #[serde(default)]
    pub more: Vec<SimGroup>,
    /// GPUs that differ from one that is healthy and idle.
    #[serde(default)]
    pub gpus: Vec<SimGpu>,
    /// The events.
    #[serde(default)]
    pub events: Vec<SimEvent>,
}

/// GPUs of one model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct SimGroup {
    /// Key of the model.
    pub model: String,
    /// Number of GPUs.
    pub count: u32,
}

/// The state of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct SimGpu {
    /// Index of the GPU, from 0.
    pub index: u32,
    /// The GPU is not found.
    #[serde(default)]
    pub absent: bool,
    /// The GPU is found, but does not answer.
    #[serde(default)]
    pub lost: bool,
    /// A problem that the GPU itself reports, although it answers.
    #[serde(default)]
    pub trouble: Option<String>,
    /// Number of processes that use it besides those in `running`. Unless it is 0, the GPU does not list its processes.
    #[serde(default)]
    pub processes: u32,
    /// Processes that the GPU lists.
    #[serde(default)]
    pub running: Vec<SimProcess>,
    /// Memory in use besides that of `running`, MiB.
    #[serde(rename = "memoryUsedMiB", default)]
    pub memory_used_mib: u64,
    /// Profiles of its MIG instances; empty: it is not in MIG mode.
    #[serde(default)]
    pub mig: Vec<String>,
}

/// A process on a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct SimProcess {
    /// Its process id.
    pub pid: u32,
    /// Memory that it uses, MiB.
    #[serde(rename = "memoryMiB", default)]
    pub memory_mib: u64,
    /// What it does on the GPU.
    #[serde(default)]
    pub kind: SimKind,
    /// Its MIG instance: an index in `mig`.
    #[serde(default)]
    pub instance: Option<usize>,
}

/// What a process does on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum SimKind {
    /// It computes.
    #[default]
    Compute,
    /// It computes as a client of MPS.
    Mps,
    /// It uses graphics.
    Graphics,
}

/// An XID of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct SimEvent {
    /// Sequence number, larger than that of each earlier event.
    pub seq: u64,
    /// Index of the GPU.
    pub gpu: u32,
    /// The XID.
    pub xid: u64,
}

impl Machine {
    /// Parses a profile: `8xh100`, or several such groups joined by `+`.
    ///
    /// # Errors
    /// If the profile is invalid.
    pub fn from_profile(text: &str) -> Result<Self, String> {
        let group = |text: &str| {
            let (count, model) = text.split_once('x')?;
            Some(SimGroup { model: model.to_owned(), count: count.parse().ok()? })
        };
        let Some(groups) = text.split('+').map(group).collect::<Option<Vec<_>>>() else {
            return Err(format!("{text:?} is not a profile such as 8xh100 or 2xa100+2xl4"));
        };
        Self::from_groups(groups)
    }

    /// A machine of these groups, in this order.
    ///
    /// # Errors
    /// If a group is invalid, or there is none.
    pub fn from_groups(groups: Vec<SimGroup>) -> Result<Self, String> {
        let mut groups = groups.into_iter();
        let Some(SimGroup { model, count }) = groups.next() else {
            return Err("a machine without a model".into());
        };
        let machine = Self { model, count, more: groups.collect(), gpus: Vec::new(), events: Vec::new() };
        machine.check().map(|()| machine)
    }

    /// Number of all GPUs.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.more.iter().fold(self.count, |sum, group| sum.saturating_add(group.count))
    }

    /// Key and number of GPUs of each group.
    pub(super) fn groups(&self) -> impl Iterator<Item = (&str, u32)> {
        let more = self.more.iter().map(|group| (group.model.as_str(), group.count));
        std::iter::once((self.model.as_str(), self.count)).chain(more)
    }

    /// The model of the GPU with this index.
    pub(super) fn model_of(&self, index: u32) -> Option<&'static Model> {
        let mut end = 0;
        let (key, _) = self.groups().find(|(_, count)| {
            end += count;
            index < end
        })?;
        Model::find(key)
    }

    /// Parses the text of a file.
    pub(super) fn from_text(text: &str) -> Result<Self, String> {
        // JSON is valid YAML.
        let machine: Self = yaml::from_str(text).map_err(|error| error.to_string())?;
        machine.check().map(|()| machine)
    }

    /// Checks the machine; the error is a text for users.
    pub(super) fn check(&self) -> Result<(), String> {
        if let Some((key, _)) = self.groups().find(|(key, _)| Model::find(key).is_none()) {
            let known = Model::keys();
            return Err(format!("model {key:?} is not known; known are {known}"));
        }
        let count = self.total();
        if count > COUNT_MAX || self.more.len() >= GROUPS_MAX {
            return Err(format!("count is {count}; at most {COUNT_MAX} GPUs"));
        }
        let mut seen = BTreeSet::new();
        for gpu in &self.gpus {
            let index = gpu.index;
            let model = self.model_of(index).filter(|_| seen.insert(index));
            let Some(model) = model else {
                return Err(format!("gpus: index {index} occurs twice or is not below count"));
            };
            let mut slices = 0;
            for profile in &gpu.mig {
                let Some((of_this, _)) = model.profile(profile) else {
                    let name = model.name;
                    return Err(format!("gpus: {profile:?} is no MIG profile of {name}"));
                };
                slices += of_this;
            }
            if gpu.running.len() > PROCESSES_PER_GPU_MAX {
                return Err(format!(
                    "gpus: index {index}: at most {PROCESSES_PER_GPU_MAX} processes in running"
                ));
            }
            let placed = |process: &&SimProcess| process.instance.is_some_and(|at| at >= gpu.mig.len());
            if let Some(process) = gpu.running.iter().find(placed) {
                return Err(format!(
                    "gpus: index {index}: process {} is on an instance that is not in mig",
                    process.pid
                ));
            }
            if slices > 7 {
                return Err(format!("gpus: index {index} has {slices} MIG slices; a GPU has 7"));
            }
        }
        let mut seqs = BTreeSet::new();
        match self.events.iter().find(|e| e.gpu >= count || !seqs.insert(e.seq)) {
            Some(event) => {
                Err(format!("events: seq {} occurs twice, or its gpu is not below count", event.seq))
            }
            None => Ok(()),
        }
    }

    /// The entry of the GPU with this index, added if there is none.
    pub fn gpu(&mut self, index: u32) -> &mut SimGpu {
        let position = match self.gpus.iter().position(|gpu| gpu.index == index) {
            Some(position) => position,
            None => {
                self.gpus.push(SimGpu { index, ..SimGpu::default() });
                self.gpus.len() - 1
            }
        };
        &mut self.gpus[position]
    }

    /// Appends an XID event of a GPU.
    pub fn push_xid(&mut self, gpu: u32, xid: u64) {
        let seq = self.newest_event() + 1;
        self.events.push(SimEvent { seq, gpu, xid });
    }

    /// The largest `seq` of the events; 0 without events.
    pub(super) fn newest_event(&self) -> u64 {
        self.events.iter().map(|event| event.seq).max().unwrap_or(0)
    }
}

/// A GPU model. Names and memory as `nvidia-smi` shows them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Model {
    /// The key in a profile such as `sim:8xh100`.
    pub(super) key: &'static str,
    pub(super) name: &'static str,
    pub(super) memory_mib: u64,
    pub(super) compute_capability: &'static str,
    pub(super) architecture: &'static str,
    /// Power limit of the board, watts, from NVIDIA's data sheets.
    pub(super) power_watts: u32,
    /// NVLinks of a GPU to the NVSwitches of its board; 0 for boards with PCIe only.
    pub(super) nvlinks: u32,
    /// Whether it can be split into MIG instances.
    pub(super) mig: bool,
    /// Size of a group of GPUs that are nearer to each other than their NUMA node.
    pub(super) neighbours: u32,
    /// The path between the GPUs of such a group.
    pub(super) neighbour_path: Path,
}

const H100: Model = Model {
    key: "h100",
    name: "NVIDIA H100 80GB HBM3",
    memory_mib: 81_559,
    compute_capability: "9.0",
    architecture: "hopper",
    power_watts: 700,
    nvlinks: 18,
    mig: true,
    neighbours: 1,
    neighbour_path: Path::SameNuma,
};

const L40S: Model = Model {
    key: "l40s",
    name: "NVIDIA L40S",
    memory_mib: 46_068,
    compute_capability: "8.9",
    architecture: "ada",
    power_watts: 350,
    nvlinks: 0,
    mig: false,
    neighbours: 2,
    neighbour_path: Path::SingleSwitch,
};

/// HGX A100: pairs of GPUs behind common PCIe switches.
const A100: Model = Model {
    key: "a100",
    name: "NVIDIA A100-SXM4-80GB",
    memory_mib: 81_920,
    compute_capability: "8.0",
    architecture: "ampere",
    power_watts: 400,
    nvlinks: 12,
    mig: true,
    neighbours: 2,
    neighbour_path: Path::MultiSwitch,
};

/// All models.
const MODELS: [Model; 9] = [
    Model {
        key: "t4",
        name: "Tesla T4",
        memory_mib: 15_360,
        compute_capability: "7.5",
        architecture: "turing",
        power_watts: 70,
        neighbour_path: Path::HostBridge,
        ..L40S
    },
    Model {
        key: "a10",
        name: "NVIDIA A10",
        memory_mib: 23_028,
        compute_capability: "8.6",
        architecture: "ampere",
        power_watts: 150,
        ..L40S
    },
    Model { key: "l4", name: "NVIDIA L4", memory_mib: 23_034, power_watts: 72, ..L40S },
    L40S,
    Model { key: "a100-40gb", name: "NVIDIA A100-SXM4-40GB", memory_mib: 40_960, ..A100 },
    A100,
    H100,
    Model { key: "h200", name: "NVIDIA H200", memory_mib: 143_771, ..H100 },
    Model {
        key: "b200",
        name: "NVIDIA B200",
        memory_mib: 183_359,
        compute_capability: "10.0",
        architecture: "blackwell",
        power_watts: 1_000,
        ..H100
    },
];

impl Model {
    /// The model with this key.
    fn find(key: &str) -> Option<&'static Self> {
        MODELS.iter().find(|model| model.key == key)
    }

    /// All keys, for error messages.
    fn keys() -> String {
        MODELS.map(|model| model.key).join(", ")
    }

    /// Compute slices and memory in MiB of a MIG profile of this model, such as `1g.10gb`. Memory is divided into
    /// eighths, and compute into sevenths of the GPU.
    pub(super) fn profile(&self, name: &str) -> Option<(u32, u64)> {
        /// Slices and eighths of memory.
        const PROFILES: [(u32, u64); 5] = [(1, 1), (2, 2), (3, 4), (4, 4), (7, 8)];
        let gb = self.memory_mib.div_ceil(1024);
        PROFILES
            .into_iter()
            .filter(|_| self.mig)
            .find(|(slices, eighths)| name == format!("{slices}g.{}gb", (gb * eighths + 4) / 8))
            .map(|(slices, eighths)| (slices, self.memory_mib * eighths / 8))
    }
}

#[cfg(test)]
mod tests {
    use super::super::SimGpus;
    use super::*;

    #[test]
    fn profiles_are_parsed_and_invalid_ones_rejected() {
        let machine = Machine::from_profile("16xh200").unwrap();
        assert_eq!((machine.count, machine.model.as_str()), (16, "h200"));
        let machine = Machine::from_profile("2xa100-40gb+1xl4+3xt4").unwrap();
        let models: Vec<_> = (0..7).map(|index| machine.model_of(index).map(|model| model.key)).collect();
        let t4 = Some("t4");
        assert_eq!(models, [Some("a100-40gb"), Some("a100-40gb"), Some("l4"), t4, t4, t4, None]);
        for (text, expected) in [
            ("h100", "is not a profile"),
            ("xh100", "is not a profile"),
            ("8xk80", "known are t4"),
            ("17xh100", "at most 16"),
            ("8xh100+9xl4", "at most 16"),
            ("8xh100+l4", "is not a profile"),
            ("8xh100+1xk80", "known are t4"),
        ] {
            let error = Machine::from_profile(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert!(SimGpus::is_profile("8xh100") && SimGpus::is_profile("8xk80"));
        assert!(SimGpus::is_profile("-1xh100") && Machine::from_profile("-1xh100").is_err());
        assert!(!SimGpus::is_profile("8xh100.yaml") && !SimGpus::is_profile("./8xh100"));
    }

    #[test]
    fn files_in_yaml_and_json_are_parsed_and_invalid_ones_rejected() {
        let yaml = "model: h100\ncount: 2\ngpus: [{index: 1, lost: true, mig: [1g.10gb]}]\n";
        let machine = Machine::from_text(yaml).unwrap();
        assert!(machine.gpus[0].lost);
        let json = r#"{"model": "t4", "count": 1, "events": [{"seq": 1, "gpu": 0, "xid": 79}]}"#;
        assert_eq!(Machine::from_text(json).unwrap().events[0].xid, 79);
        for (text, expected) in [
            ("model: h100\ncount: 2\nnonsense: 1\n", "nonsense"),
            ("model: h100\ncount: 2\ngpus: [{index: 2}]\n", "index 2"),
            ("model: t4\ncount: 2\ngpus: [{index: 1, mig: [1g.10gb]}]\n", "no MIG profile"),
            ("model: h100\ncount: 2\ngpus: [{index: 1, mig: [4g.40gb, 4g.40gb]}]\n", "a GPU has 7"),
            ("model: h100\ncount: 1\ngpus: [{index: 0, running: [{pid: 7, instance: 0}]}]\n", "not in mig"),
            ("model: h100\ncount: 1\ngpus: [{index: 0, running: [{pid: 7, kind: idle}]}]\n", "graphics"),
            ("model: h100\ncount: 1\nevents: [{seq: 1, gpu: 1, xid: 3}]\n", "seq 1"),
        ] {
            let error = Machine::from_text(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn profiles_are_named_as_nvidia_names_them() {
        let named = |key: &str, profile: &str| Model::find(key).unwrap().profile(profile);
        assert_eq!(named("h100", "1g.10gb"), Some((1, 10_194)));
        assert_eq!(named("h200", "1g.18gb"), Some((1, 17_971)));
        assert_eq!(named("b200", "1g.23gb"), Some((1, 22_919)));
        assert_eq!(named("a100-40gb", "3g.20gb"), Some((3, 20_480)));
        assert_eq!(named("h100", "1g.18gb"), None);
        assert_eq!(named("t4", "1g.2gb"), None);
    }

    #[test]
    fn every_key_finds_its_model() {
        for model in &MODELS {
            assert_eq!(Model::find(model.key), Some(model));
        }
    }
}
