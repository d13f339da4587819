//! Configuration files of NVIDIA's device plugin (`version: v1`, v0.20) as Berth's own.
//!
//! [`translate`] is pure: such a file, parsed, in, Berth's YAML and a list of findings out. What that
//! version reads and then switches off with a warning (`resources`, `devices`, `rename`), the translation
//! leaves out, too, so that a node offers the same devices before and after a changeover; the finding names
//! what does it here. The schema is `api/config/v1` of NVIDIA's repository.

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

/// The policy that places shares as `sharedDevicesAllocationPolicy: packed` does.
pub const PACKED: &str = "binpack";
/// Why IMEX channels are not given.
pub(super) const IMEX: &str = "Berth passes no IMEX channels; leave NVIDIA's plugin on nodes whose pods need them, or give \
     /dev/nvidia-caps-imex-channels/channel0 with containerEdits.resources.<resource>.devices";
/// Why the folder of NVIDIA's MPS control daemon is not used.
pub(super) const MPS_ROOT: &str = "Berth does not use NVIDIA's MPS control daemon; containerEdits.resources.<resource>.mps names \
     the folders of one that you run";
/// Why nothing of CDI specifications is used.
pub(super) const CDI: &str = "Berth writes no CDI specification; run `nvidia-ctk cdi generate` on the node and set \
     containerEdits.cdiKind to the kind in it";
/// Why a YAML merge is refused.
const MERGES: &str = "Berth does not resolve YAML merges, as NVIDIA's plugin does: in place of `<<`, write the keys of the mapping \
     that it names";
/// The five keys at the top of such a file.
const KEYS: [&str; 5] = ["version", "flags", "resources", "sharing", "imex"];
/// Variables of NVIDIA's programs that no flag of `berth serve` reads, and why each is not used.
const VARIABLES: [(&str, &str); 14] = [
    ("NVIDIA_CTK_PATH", CDI),
    ("CONTAINER_DRIVER_ROOT", "write DRIVER_ROOT_CTR_PATH"),
    ("USE_NODE_FEATURE_API", LABELS),
    ("GFD_CONFIG_FILE", "Berth labels the node itself and reads CONFIG_FILE"),
    ("GFD_MIG_STRATEGY", "labels follow MIG_STRATEGY"),
    ("GFD_FAIL_ON_INIT_ERROR", "FAIL_ON_INIT_ERROR counts for labels, too"),
    ("GFD_ONESHOT", "labels follow the GPUs as long as the daemon runs"),
    ("GFD_NO_TIMESTAMP", LABELS),
    ("GFD_SLEEP_INTERVAL", "labels follow the GPUs; health.pollSeconds is how often those are read"),
    ("GFD_OUTPUT_FILE", "write labels.nfdFile"),
    ("GFD_MACHINE_TYPE_FILE", LABELS),
    ("GFD_USE_NODE_FEATURE_API", LABELS),
    ("NVIDIA_MIG_CONFIG_DEVICES", "Berth changes no MIG layout"),
    (
        "NVIDIA_MIG_MONITOR_DEVICES",
        "only NVIDIA's container runtime uses it, for the container in which Berth runs",
    ),
];
/// How the node is labelled.
const LABELS: &str = "labels.nfdFile or labels.node choose how Berth labels the node";

/// A setting of a file that has no equal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Where it is in the file, such as `flags.mpsRoot`.
    pub key: String,
    /// What becomes of it, and what to do instead.
    pub note: String,
    /// Whether a daemon refuses to start with it: containers would lack what they ask for.
    pub refused: bool,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = if self.refused { "not supported" } else { "set, not used" };
        write!(f, "{what}: {}: {}", self.key, self.note)
    }
}

/// A file of NVIDIA's as one of Berth's.
#[derive(Clone, Debug)]
pub struct Translated {
    /// Berth's YAML, with a comment for each finding where its line would be.
    pub yaml: String,
    /// The same, read.
    pub file: FileConfig,
    /// What has no equal, in the order of the file.
    pub findings: Vec<Finding>,
    /// Those of the findings with which a daemon does not start.
    pub refusal: Problems,
}

impl Translated {
    /// The same, if a daemon can start with it.
    ///
    /// # Errors
    /// The findings that keep it from that.
    pub fn usable(self) -> Result<Self, Problems> {
        if self.refusal.is_empty() { Ok(self) } else { Err(self.refusal) }
    }
}

/// Whether a file is NVIDIA's: it has a `version`, or only keys of theirs. One with errors, such as a key that is
/// given twice, is NVIDIA's all the same.
#[must_use]
pub fn is_nvidia(document: &Document) -> bool {
    let Shape::Map(keys) = document.shape() else { return false };
    let known = |key: &&str| KEYS.iter().any(|theirs| key.eq_ignore_ascii_case(theirs));
    !keys.is_empty() && (keys.iter().any(|key| key.eq_ignore_ascii_case("version")) || keys.iter().all(known))
}

/// Turns a file of NVIDIA's device plugin into Berth's own.
///
/// # Errors
/// Everything in it that NVIDIA's plugin would not start with, by its place in the file.
pub fn translate(document: &Document) -> Result<Translated, Problems> {
    let file = value_of(document)?;
    let mut draft = Draft::default();
    refuse_merges("", &file, &mut draft);
    let mut top = Section::of("", &file, &mut draft);
    let version = top.text("version", &mut draft).unwrap_or_default();
    if !["", "v1"].contains(&version.as_str()) {
        draft.error("version", &format!("unknown version {version:?}; NVIDIA's plugin supports only v1"));
    }
    flags::translate(top.section("flags", &mut draft), &mut draft);
    draft.place = draft::Place::Stack;
    resources(top.section("resources", &mut draft), &mut draft);
    sharing::translate(top.section("sharing", &mut draft), &mut draft);
    draft.place = draft::Place::Top;
    imex(top.section("imex", &mut draft), &mut draft);
    top.report_unread(&mut draft);
    draft.finish(document)
}

/// Names every YAML merge of the file. NVIDIA's library resolves them, so without them settings would be lost.
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

/// `resources`: read and switched off by NVIDIA's plugin.
fn resources(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    for key in ["gpus", "mig"] {
        for (path, entry) in section.list(key, draft) {
            let mut entry = Section::of(&path, entry, draft);
            let (pattern, name) = (entry.text("pattern", draft), entry.text("name", draft));
            let (Some(pattern), Some(name)) = (pattern, name) else {
                draft.error(&path, "needs `pattern` and `name`");
                continue;
            };
            let Some(name) = read::resource(&format!("{path}.name"), &name, draft) else { continue };
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
    let required = section.truth("required", draft).unwrap_or(false);
    let ids: Vec<Option<i64>> = section.list("channelIDs", draft).iter().map(|(_, id)| id.as_i64()).collect();
    match ids[..] {
        [] => {}
        [Some(0)] if required => draft.refuse("imex.channelIDs", IMEX),
        [Some(0)] => draft.unused("imex.channelIDs", IMEX),
        _ => draft.error("imex.channelIDs", "must be [] or [0]"),
    }
    section.report_unread(draft);
}

/// The document as a value. YAML's own types stop here.
fn value_of(document: &Document) -> Result<Value, Problems> {
    document.read(LeftOut::default()).whole()
}

/// The line for a setting that is not used.
pub(super) fn unused(name: &str, value: &str, why: &str) -> String {
    format!("set, not used: {name}={value:?}: {why}")
}

/// Variables of NVIDIA's programs that are set and that nothing reads, one line each.
pub(super) fn unused_environment(read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let set = VARIABLES.iter().filter_map(|(name, why)| Some((name, read(name)?, why)));
    set.filter(|(_, value, _)| !value.is_empty())
        .map(|(name, value, why)| unused(name, &value, why))
        .collect()
}

/// Whether GPUs are found in the way that is asked for.
///
/// # Errors
/// What to give instead.
pub(super) fn discovery(strategy: &str) -> Result<(), String> {
    match strategy {
        "auto" | "nvml" => Ok(()),
        "tegra" => Err(
            "Berth finds GPUs by NVML, which Tegra lacks: leave NVIDIA's plugin on those nodes, or give auto"
                .into(),
        ),
        _ => Err("give auto or nvml".into()),
    }
}

#[cfg(test)]
mod tests;
