//! The source of the GPUs, their MIG strategy, what makes them unhealthy, and the processes on them.

use super::checks::{BadSetting, Checks, bad, parse_keyword};
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_gpus::procfs::ProcFs;
use berth_gpus::sim::SimGpus;
use berth_kernel::hardware::gpu_selector::GpuSelector;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::node::ports::{Gpus, GpusError};
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Highest XID that `all` covers; NVIDIA's numbers end well below.
const XID_MAX: u64 = 1024;
/// Most names in `processes.ignore`.
const NAMES_MAX: usize = 64;
/// Longest of these names, bytes; Linux keeps only 15 bytes of a process's name.
const NAME_BYTES_MAX: usize = 64;

/// Programs that use GPUs without an allocation on any node: NVIDIA's persistence daemon and tool
/// (`man nvidia-persistenced`, `man nvidia-smi`), DCGM's engine, command and exporter (the DCGM user
/// guide), the servers of MPS (`man nvidia-cuda-mps-control`), and the X server. These are command names.
const IGNORED_PROCESSES: [&str; 8] = [
    "nvidia-persistenced",
    "nvidia-smi",
    "nv-hostengine",
    "dcgmi",
    "dcgm-exporter",
    "nvidia-cuda-mps-server",
    "nvidia-cuda-mps-control",
    "Xorg",
];

/// The source of the GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuSource {
    /// NVML.
    Nvml {
        /// Path of `libnvidia-ml.so.1`; by default the dynamic loader finds it.
        library: Option<PathBuf>,
        /// The folder of the driver's installation, if it is not `/`.
        driver_root: Option<PathBuf>,
    },
    /// Simulated GPUs: a profile such as `8xh100`, or a file.
    Sim(String),
}

impl GpuSource {
    /// Opens the backend.
    ///
    /// # Errors
    /// If it cannot be opened; the error has the fix.
    pub fn open(&self) -> Result<Arc<dyn Gpus>, GpusError> {
        Ok(match self {
            Self::Nvml { library, driver_root } => Arc::new(NvmlGpus::open(NvmlOptions {
                library: library.clone(),
                driver_root: driver_root.clone().unwrap_or_else(|| "/".into()),
                in_container: std::env::var_os("KUBERNETES_SERVICE_HOST").is_some(),
                ..NvmlOptions::default()
            })?),
            Self::Sim(profile) => Arc::new(SimGpus::open(profile)?),
        })
    }

    /// Checks that the source can ever work. An unknown simulated profile cannot, while a missing library or file may
    /// still appear.
    ///
    /// # Errors
    /// If the profile is unknown.
    pub fn check(&self) -> Result<(), GpusError> {
        if let Some(profile) = self.profile() {
            SimGpus::open(profile)?;
        }
        Ok(())
    }

    /// The profile of simulated GPUs, which do not depend on the machine.
    #[must_use]
    pub fn profile(&self) -> Option<&str> {
        match self {
            Self::Sim(profile) if SimGpus::is_profile(profile) => Some(profile),
            Self::Sim(_) | Self::Nvml { .. } => None,
        }
    }
}

/// Most items of `gpus.exclude`: four times the GPUs of the largest node.
const EXCLUDED_MAX: usize = 64;

/// `gpus` in the file: the source alone, or a mapping.
#[derive(Clone, Debug, Default)]
pub(super) struct GpusFile {
    pub(super) source: Option<String>,
    exclude: Vec<Excluded>,
}

/// An item of `gpus.exclude`; an index may be written as a number.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Excluded {
    Index(u32),
    Text(String),
}

impl GpusFile {
    pub(super) fn excluded(self, checks: &mut Checks) -> Vec<GpuSelector> {
        checks.at_most("gpus.exclude", self.exclude.len(), EXCLUDED_MAX, "items");
        let mut selectors = Vec::new();
        for (at, item) in self.exclude.into_iter().enumerate() {
            let text = match item {
                Excluded::Index(index) => index.to_string(),
                Excluded::Text(text) => text,
            };
            match GpuSelector::parse(text.trim()) {
                Ok(selector) => selectors.push(selector),
                Err(why) => {
                    let rule = format!("an index, a UUID, a PCI bus id or a model ({why})");
                    checks.add(bad(format!("gpus.exclude[{at}]"), &text, rule));
                }
            }
        }
        selectors
    }
}

impl<'de> Deserialize<'de> for GpusFile {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Default, Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields, default)]
        struct Mapping {
            source: Option<String>,
            exclude: Vec<Excluded>,
        }
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = GpusFile;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the source of the GPUs, or a mapping with `source` and `exclude`")
            }

            fn visit_str<E: de::Error>(self, source: &str) -> Result<GpusFile, E> {
                Ok(GpusFile { source: Some(source.to_owned()), exclude: Vec::new() })
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<GpusFile, A::Error> {
                let Mapping { source, exclude } = Mapping::deserialize(MapAccessDeserializer::new(map))?;
                Ok(GpusFile { source, exclude })
            }
        }
        deserializer.deserialize_any(Either)
    }
}

pub(super) fn gpu_source(
    text: &str,
    library: Option<PathBuf>,
    driver_root: &Path,
) -> Result<GpuSource, BadSetting> {
    let driver_root = (driver_root != Path::new("/")).then(|| driver_root.to_owned());
    match text.split_once(':') {
        None if text == "nvml" => Ok(GpuSource::Nvml { library, driver_root }),
        Some(("sim", profile)) if !profile.is_empty() => Ok(GpuSource::Sim(profile.into())),
        _ => Err(bad("gpus", text, "nvml, sim:8xh100 (count and model), or sim:FILE")),
    }
}

/// Parses the keywords of NVIDIA's device plugin.
pub(super) fn mig_strategy(keyword: &str) -> Result<MigStrategy, BadSetting> {
    let known = [MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed];
    parse_keyword("migStrategy", keyword, &known.map(|strategy| (strategy.as_str(), strategy)))
}

/// `health` in the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct HealthFile {
    pub(super) poll_seconds: Option<f64>,
    pub(super) quiet_seconds: Option<u64>,
    pub(super) ignored_xids: Option<Vec<u64>>,
}

/// One of `DP_DISABLE_HEALTHCHECKS` and `DP_ENABLE_HEALTHCHECKS`, in every spelling that NVIDIA's device plugin accepts
/// (`internal/rm/health.go` of v0.20).
#[derive(Debug, Default)]
struct XidList {
    all: bool,
    xids: Vec<u64>,
    /// One notice for each item that is no XID.
    notices: Vec<String>,
}

impl XidList {
    fn parse(variable: &str, text: Option<&str>) -> Self {
        let mut list = Self::default();
        for item in text.unwrap_or_default().split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match item.to_ascii_lowercase().as_str() {
                "all" | "xids" => list.all = true,
                number => match number.parse() {
                    Ok(xid) => list.xids.push(xid),
                    Err(_) => list.notices.push(format!(
                        "{variable}: {item:?} is not an XID and is ignored, as NVIDIA's plugin does"
                    )),
                },
            }
        }
        list
    }
}

/// XIDs that make a GPU unhealthy: both lists, of which enabled XIDs take precedence.
pub(super) struct HealthChecks {
    disabled: XidList,
    enabled: XidList,
}

impl HealthChecks {
    pub(super) fn new(disabled: Option<&str>, enabled: Option<&str>) -> Self {
        Self {
            disabled: XidList::parse("DP_DISABLE_HEALTHCHECKS", disabled),
            enabled: XidList::parse("DP_ENABLE_HEALTHCHECKS", enabled),
        }
    }

    /// Whether nothing makes a GPU unhealthy.
    pub(super) fn is_off(&self) -> bool {
        self.disabled.all && !self.enabled.all && self.enabled.xids.is_empty()
    }

    /// The ignored XIDs, sorted, and those that make a GPU unhealthy. `file` replaces those that are ignored by
    /// default.
    pub(super) fn rules(&self, file: Option<Vec<u64>>) -> XidRules {
        if self.enabled.all {
            return XidRules { ignored: Vec::new(), counted: (0..=XID_MAX).collect() };
        }
        let mut ignored = file.unwrap_or_else(|| XidRules::default().ignored);
        if self.disabled.all {
            ignored.extend(0..=XID_MAX);
        }
        ignored.extend(&self.disabled.xids);
        ignored.retain(|xid| !self.enabled.xids.contains(xid));
        ignored.sort_unstable();
        ignored.dedup();
        XidRules { ignored, counted: self.enabled.xids.clone() }
    }

    pub(super) fn notices(&self) -> impl Iterator<Item = String> {
        self.disabled.notices.iter().chain(&self.enabled.notices).cloned()
    }
}

/// How processes on GPUs are treated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSettings {
    /// Command names of processes that, without an allocation, do not count as a bypass and do not delay a drain.
    pub ignore: Vec<String>,
    /// The path of `/proc`.
    pub proc_root: PathBuf,
}

impl ProcessSettings {
    /// The source of processes and their owners.
    #[must_use]
    pub fn source(&self) -> ProcFs {
        ProcFs::new(self.proc_root.clone(), &self.ignore)
    }
}

/// `processes` in the file: see [`ProcessSettings`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ProcessesFile {
    ignore: Option<Vec<String>>,
    proc_root: Option<PathBuf>,
}

impl ProcessesFile {
    pub(super) fn resolve(self, checks: &mut Checks) -> ProcessSettings {
        let ignore = self.ignore.unwrap_or_else(|| IGNORED_PROCESSES.map(String::from).to_vec());
        checks.at_most("processes.ignore", ignore.len(), NAMES_MAX, "names");
        for (at, name) in ignore.iter().enumerate() {
            let is_valid_length = (1..=NAME_BYTES_MAX).contains(&name.len());
            if !is_valid_length || name.contains('/') || name.chars().any(char::is_control) {
                let rule = format!(
                    "a command name of 1 to {NAME_BYTES_MAX} bytes, as `ps -o comm` shows it, without a path"
                );
                checks.add(bad(format!("processes.ignore[{at}]"), name, rule));
            }
        }
        let proc_root = self.proc_root.unwrap_or_else(|| "/proc".into());
        ProcessSettings { ignore, proc_root: checks.plain_path("processes.procRoot", proc_root) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks(disabled: &str, enabled: &str) -> HealthChecks {
        HealthChecks::new(Some(disabled), Some(enabled))
    }

    #[test]
    fn every_spelling_of_nvidias_plugin_is_accepted() {
        // The application errors of NVIDIA's plugin but 109, which degrades.
        let file = || Some(vec![13, 31, 43, 45, 68]);
        for (disabled, enabled, ignored, counted, malformed) in [
            ("", "", &[13, 31, 43, 45, 68][..], &[][..], 0),
            (",", ",", &[13, 31, 43, 45, 68], &[], 0),
            ("79, 48", "48,13", &[31, 43, 45, 68, 79], &[48, 13], 0),
            ("68,not-an-int,67", "", &[13, 31, 43, 45, 67, 68], &[], 1),
            ("-68", "x", &[13, 31, 43, 45, 68], &[], 2),
        ] {
            let checks = checks(disabled, enabled);
            let rules = checks.rules(file());
            let given = (rules.ignored.as_slice(), rules.counted.as_slice());
            assert_eq!(given, (ignored, counted), "{disabled:?} {enabled:?}");
            assert_eq!(checks.notices().count(), malformed, "{disabled:?} {enabled:?}");
            assert!(!checks.is_off());
        }
    }

    #[test]
    fn all_turns_the_checks_off_unless_some_are_enabled() {
        for all in ["all", "ALL", " all ", "xids", "xids,79", "79,All"] {
            assert!(checks(all, "").is_off(), "{all}");
            let checks = checks(all, "48");
            assert!(!checks.is_off());
            let rules = checks.rules(None);
            assert!(rules.ignored.contains(&79) && !rules.ignored.contains(&48));
        }
        for (disabled, enabled) in [("", "all"), ("79", "XIDS")] {
            let rules = checks(disabled, enabled).rules(None);
            assert!(rules.ignored.is_empty() && rules.counted.contains(&94) && rules.counted.contains(&13));
        }
    }
}
