//! `processes`: where processes on GPUs are looked up, and which ones are ignored.

use super::checks::{Checks, bad};
use serde::Deserialize;
use std::path::PathBuf;

/// Most names in `ignore`.
const NAMES_MAX: usize = 64;
/// Longest of these names, bytes; Linux keeps only 15 bytes of a process's name.
const NAME_BYTES_MAX: usize = 64;

/// Programs that use GPUs without an allocation on any node: NVIDIA's persistence daemon and tool
/// (`man nvidia-persistenced`, `man nvidia-smi`), DCGM's engine, command and exporter (the DCGM user
/// guide), the servers of MPS (`man nvidia-cuda-mps-control`), and the X server. These are command names.
pub const IGNORED_PROCESSES: [&str; 8] = [
    "nvidia-persistenced",
    "nvidia-smi",
    "nv-hostengine",
    "dcgmi",
    "dcgm-exporter",
    "nvidia-cuda-mps-server",
    "nvidia-cuda-mps-control",
    "Xorg",
];

/// How processes on GPUs are treated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSettings {
    /// Command names of processes that, without an allocation, do not count as a bypass and do not delay a drain.
    pub ignore: Vec<String>,
    /// The path of `/proc`.
    pub proc_root: PathBuf,
}

impl Default for ProcessSettings {
    fn default() -> Self {
        Self { ignore: IGNORED_PROCESSES.map(String::from).to_vec(), proc_root: "/proc".into() }
    }
}

/// `processes` in the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)] // documented at `ProcessSettings`
pub struct ProcessesFile {
    pub ignore: Option<Vec<String>>,
    pub proc_root: Option<PathBuf>,
}

impl ProcessesFile {
    pub(super) fn resolve(self, defaults: ProcessSettings, checks: &mut Checks) -> ProcessSettings {
        let ignore = self.ignore.unwrap_or(defaults.ignore);
        checks.at_most("processes.ignore", ignore.len(), NAMES_MAX, "names");
        for (at, name) in ignore.iter().enumerate() {
            let invalid = name.is_empty()
                || name.len() > NAME_BYTES_MAX
                || name.contains('/')
                || name.chars().any(char::is_control);
            if invalid {
                let rule = format!(
                    "a command name of 1 to {NAME_BYTES_MAX} bytes, as `ps -o comm` shows it, without a path"
                );
                checks.add(bad(format!("processes.ignore[{at}]"), name, rule));
            }
        }
        let proc_root = checks.plain_path("processes.procRoot", self.proc_root.unwrap_or(defaults.proc_root));
        ProcessSettings { ignore, proc_root }
    }
}
