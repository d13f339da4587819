//! Configuration files of NVIDIA's device plugin (`version: v1`, v0.20) as Berth's own.
//!
//! [`translate`] is pure: it turns the parsed file into Berth's YAML and a list of findings. Settings that NVIDIA's
//! version reads but disables with a warning (`resources`, `devices`, `rename`) are left out, so that a node offers the
//! same devices before and after a changeover; the finding names Berth's setting for it. The schema is `api/config/v1`
//! of NVIDIA's repository.

mod draft;
mod flags;
mod read;
mod sharing;

use super::file::FileConfig;
use berth_files::yaml::{Document, LeftOut, Problems, Shape};
use draft::Draft;
use read::Section;
use serde::Serialize;
use serde_json::Value;
use std::fmt;

/// The policy for `sharedDevicesAllocationPolicy: packed`.
pub const PACKED: &str = "binpack";
/// Why IMEX channels are not passed.
pub(super) const IMEX: &str = "Berth passes no IMEX channels; leave NVIDIA's plugin on nodes whose pods need them, or pass \
     /dev/nvidia-caps-imex-channels/channel0 with containerEdits.resources.<resource>.devices";
/// Why `mpsRoot` is not used.
pub(super) const MPS_ROOT: &str = "Berth does not use NVIDIA's MPS control daemon; containerEdits.resources.<resource>.mps names \
     the folders of one that you run";
/// Why settings of CDI specifications are not used.
pub(super) const CDI: &str = "Berth writes no CDI specification; run `nvidia-ctk cdi generate` on the node and set \
     containerEdits.cdiKind to the kind in it";
/// Why a YAML merge is refused.
const MERGES: &str = "Berth does not resolve YAML merges, as NVIDIA's plugin does: in place of `<<`, write the keys of the mapping \
     that it names";
/// The top-level keys of such a file.
const KEYS: [&str; 5] = ["version", "flags", "resources", "sharing", "imex"];
/// Variables of NVIDIA's programs that no flag of `berth serve` reads, and why each is not used.
const VARIABLES: [(&str, &str); 14] = [
    ("NVIDIA_CTK_PATH", CDI),
    ("CONTAINER_DRIVER_ROOT", "set DRIVER_ROOT_CTR_PATH instead"),
    ("USE_NODE_FEATURE_API", LABELS),
    ("GFD_CONFIG_FILE", "Berth labels the node itself and reads CONFIG_FILE"),
    ("GFD_MIG_STRATEGY", "Berth's labels follow MIG_STRATEGY"),
    ("GFD_FAIL_ON_INIT_ERROR", "FAIL_ON_INIT_ERROR applies to labels, too"),
    ("GFD_ONESHOT", "Berth updates labels as long as the daemon runs"),
    ("GFD_NO_TIMESTAMP", LABELS),
    ("GFD_SLEEP_INTERVAL", "Berth updates labels when GPUs change, which it checks every health.pollSeconds"),
    ("GFD_OUTPUT_FILE", "set labels.nfdFile instead"),
    ("GFD_MACHINE_TYPE_FILE", LABELS),
    ("GFD_USE_NODE_FEATURE_API", LABELS),
    ("NVIDIA_MIG_CONFIG_DEVICES", "Berth does not change MIG layouts"),
    (
        "NVIDIA_MIG_MONITOR_DEVICES",
        "only NVIDIA's container runtime uses it, for the container in which Berth runs",
    ),
];
/// Why settings of NVIDIA's GPU feature discovery are not used.
const LABELS: &str = "set labels.nfdFile or labels.node to choose how Berth labels the node";

/// A setting without an equal in Berth.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Its key in the file, such as `flags.mpsRoot`.
    pub key: String,
    /// Why it is not used, and what to do instead.
    pub note: String,
    /// Whether a daemon refuses to start with it, since containers would lack something that they need.
    pub refused: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let effect = if self.refused { "not supported" } else { "set, not used" };
        write!(f, "{effect}: {}: {}", self.key, self.note)
    }
}

/// An NVIDIA file as a Berth file.
#[derive(Clone, Debug)]
pub struct Translated {
    /// Berth's YAML, with each finding as a comment in place of its setting.
    pub yaml: String,
    /// The same, parsed.
    pub file: FileConfig,
    /// Settings without an equal, in the file's order.
    pub findings: Vec<Finding>,
    /// The findings with which a daemon does not start.
    pub refusal: Problems,
}

impl Translated {
    /// Checks that a daemon can start with it.
    ///
    /// # Errors
    /// The findings with which it does not start.
    pub fn into_usable(self) -> Result<Self, Problems> {
        if self.refusal.is_empty() { Ok(self) } else { Err(self.refusal) }
    }
}

/// Whether a file is NVIDIA's: it has a `version` or only NVIDIA's keys. Errors in it, such as a duplicate key, do not
/// matter.
#[must_use]
pub fn is_nvidia(document: &Document) -> bool {
    let Shape::Map(keys) = document.shape() else { return false };
    let known = |key: &&str| KEYS.iter().any(|known| key.eq_ignore_ascii_case(known));
    !keys.is_empty() && (keys.iter().any(|key| key.eq_ignore_ascii_case("version")) || keys.iter().all(known))
}

/// Translates a file of NVIDIA's device plugin.
///
/// # Errors
/// All errors with which NVIDIA's plugin would not start either, with their lines.
pub fn translate(document: &Document) -> Result<Translated, Problems> {
    let file = value_of(document)?;
    let mut draft = Draft::default();
    refuse_merges("", &file, &mut draft);
    let mut top = Section::new("", &file, &mut draft);
    let version = top.text("version", &mut draft).unwrap_or_default();
    if !["", "v1"].contains(&version.as_str()) {
        draft.error("version", &format!("unknown version {version:?}; NVIDIA's plugin supports only v1"));
    }
    flags::translate(top.section("flags", &mut draft), &mut draft);
    draft.part = draft::FilePart::Stack;
    resources(top.section("resources", &mut draft), &mut draft);
    sharing::translate(top.section("sharing", &mut draft), &mut draft);
    draft.part = draft::FilePart::Top;
    imex(top.section("imex", &mut draft), &mut draft);
    top.report_unread(&mut draft);
    draft.finish(document)
}

/// Refuses YAML merges, which NVIDIA's library resolves: without them, settings would be lost.
fn refuse_merges(path: &str, value: &Value, draft: &mut Draft) {
    match value {
        Value::Object(keys) => {
            for (key, value) in keys {
                let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                if key == read::MERGE {
                    draft.refuse(&path, MERGES);
                } else {
                    refuse_merges(&path, value, draft);
                }
            }
        }
        Value::Array(entries) => {
            for (n, entry) in entries.iter().enumerate() {
                refuse_merges(&format!("{path}[{n}]"), entry, draft);
            }
        }
        _ => {}
    }
}

/// `resources`: NVIDIA's plugin reads and disables it.
fn resources(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    for key in ["gpus", "mig"] {
        for (path, entry) in section.list(key, draft) {
            let mut entry = Section::new(&path, entry, draft);
            let (pattern, name) = (entry.text("pattern", draft), entry.text("name", draft));
            let (Some(pattern), Some(name)) = (pattern, name) else {
                draft.error(&path, "needs `pattern` and `name`");
                continue;
            };
            let Some(name) = read::resource_name(&format!("{path}.name"), &name, draft) else { continue };
            let note = format!(
                "NVIDIA's plugin v0.20 ignores it too and offers these GPUs under their usual names; to offer GPUs under \
                 a name of their own, add a stack entry `timeslice` with `replicas: 1`, `resource: {name}` and `only: [{{model: {pattern:?}}}]`"
            );
            draft.unused(&path, &note);
        }
    }
    section.report_unread(draft);
}

/// `imex`.
fn imex(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    let required = section.bool("required", draft).unwrap_or(false);
    let ids: Vec<Option<i64>> = section.list("channelIDs", draft).iter().map(|(_, id)| id.as_i64()).collect();
    match ids[..] {
        [] => {}
        [Some(0)] if required => draft.refuse("imex.channelIDs", IMEX),
        [Some(0)] => draft.unused("imex.channelIDs", IMEX),
        _ => draft.error("imex.channelIDs", "must be [] or [0]"),
    }
    section.report_unread(draft);
}

/// The document as a JSON value.
fn value_of(document: &Document) -> Result<Value, Problems> {
    document.read(LeftOut::default()).whole()
}

/// The notice for a setting that is not used.
pub(super) fn unused_notice(name: &str, value: &str, reason: &str) -> String {
    format!("set, not used: {name}={value:?}: {reason}")
}

/// One notice for each variable of NVIDIA's programs that is set but not used.
pub(super) fn unused_environment_notices(read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let set = VARIABLES.iter().filter_map(|(name, reason)| Some((name, read(name)?, reason)));
    set.filter(|(_, value, _)| !value.is_empty())
        .map(|(name, value, reason)| unused_notice(name, &value, reason))
        .collect()
}

/// Checks that Berth supports this strategy of device discovery.
///
/// # Errors
/// What to set instead.
pub(super) fn check_discovery(strategy: &str) -> Result<(), String> {
    match strategy {
        "auto" | "nvml" => Ok(()),
        "tegra" => Err(
            "Berth finds GPUs by NVML, which Tegra lacks: leave NVIDIA's plugin on those nodes, or set auto"
                .into(),
        ),
        _ => Err("set auto or nvml".into()),
    }
}

#[cfg(test)]
mod tests;
