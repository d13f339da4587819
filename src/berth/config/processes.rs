//! `processes`: whose processes on GPUs are found out how, and which are nobody's concern.

use super::checks::{Checks, bad};
use serde::Deserialize;
use std::path::PathBuf;

/// Most names in `ignore`.
const NAMES_MAX: usize = 64;
/// Longest of them, bytes; the kernel keeps 15 bytes of a process's name, so more says nothing.
const NAME_BYTES_MAX: usize = 64;

/// Daemons that are on GPUs without an allocation on any node: NVIDIA's persistence daemon and tool
/// (`man nvidia-persistenced`, `man nvidia-smi`), DCGM's engine, command and exporter (the DCGM user
/// guide), the servers of MPS (`man nvidia-cuda-mps-control`), and the X server. They are known by
/// their command names.
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

/// What is done about processes on GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessSettings {
    /// Command names that are neither a bypass nor in the way of a drain, where no allocation explains
    /// them.
    pub ignore: Vec<String>,
    /// Where `/proc` is.
    pub proc_root: PathBuf,
}

impl Default for ProcessSettings {
    fn default() -> Self {
        Self { ignore: IGNORED_PROCESSES.map(String::from).to_vec(), proc_root: "/proc".into() }
    }
}

/// The same in the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)] // as above
pub struct ProcessesFile {
    pub ignore: Option<Vec<String>>,
    pub proc_root: Option<PathBuf>,
}

impl ProcessesFile {
    pub(super) fn over(self, defaults: ProcessSettings, checks: &mut Checks) -> ProcessSettings {
        let ignore = self.ignore.unwrap_or(defaults.ignore);
        checks.at_most("processes.ignore", ignore.len(), NAMES_MAX, "names");
        for (at, name) in ignore.iter().enumerate() {
            let wrong = name.is_empty()
                || name.len() > NAME_BYTES_MAX
                || name.contains('/')
                || name.chars().any(char::is_control);
            if wrong {
                let rule = format!(
                    "a command name of 1 to {NAME_BYTES_MAX} bytes, as `ps -o comm` shows it, without a path"
                );
                checks.add(bad(format!("processes.ignore[{at}]"), name, rule));
            }
        }
        let proc_root = checks.plain("processes.procRoot", self.proc_root.unwrap_or(defaults.proc_root));
        ProcessSettings { ignore, proc_root }
    }
}
