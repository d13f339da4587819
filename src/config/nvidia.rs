//! Configuration files of NVIDIA's device plugin (`version: v1`, v0.20) as Berth's own.
//!
//! [`translate`] is pure: it turns the parsed file into Berth's YAML and a list of findings. Settings that NVIDIA's
//! version reads but disables with a warning (`resources`, `devices`, `rename`) are left out, so that a node offers the
//! same devices before and after a changeover; the finding names Berth's setting for it. The schema is `api/config/v1`
//! of NVIDIA's repository.

pub(super) mod args;
mod draft;

pub use draft::Finding;

use super::edits;
use args::{CDI, IMEX, LABELS, MPS_ROOT, PACKED, check_discovery};
use berth_files::yaml::{Document, LeftOut, Problems, RootType};
use berth_kernel::hardware::mig::MigStrategy;
use draft::{Draft, FilePart, MERGE, Section, Translated, resource_name, scalar};
use serde_json::Value;

/// Why a YAML merge is refused.
const MERGES: &str = "Berth does not resolve YAML merges, as NVIDIA's plugin does: in place of `<<`, write the keys of the mapping \
     that it names";
/// Most shares of one device by `timeslice`.
const REPLICAS_MAX: u64 = 128;
/// The top-level keys of such a file.
const KEYS: [&str; 5] = ["version", "flags", "resources", "sharing", "imex"];

/// Whether a file is NVIDIA's: it has a `version` or only NVIDIA's keys. Errors in it, such as a duplicate key, do not
/// matter.
#[must_use]
pub fn is_nvidia(document: &Document) -> bool {
    let RootType::Map(keys) = document.root_type() else { return false };
    let known = |key: &&str| KEYS.iter().any(|known| key.eq_ignore_ascii_case(known));
    !keys.is_empty() && (keys.iter().any(|key| key.eq_ignore_ascii_case("version")) || keys.iter().all(known))
}

/// Translates a file of NVIDIA's device plugin.
///
/// # Errors
/// All errors with which NVIDIA's plugin would not start either, with their lines.
pub fn translate(document: &Document) -> Result<Translated, Problems> {
    let file: Value = document.read(LeftOut::default()).whole()?;
    let mut draft = Draft::default();
    refuse_merges("", &file, &mut draft);
    let mut top = Section::new("", &file, &mut draft);
    let version = top.text("version", &mut draft).unwrap_or_default();
    if !["", "v1"].contains(&version.as_str()) {
        draft.error("version", &format!("unknown version {version:?}; NVIDIA's plugin supports only v1"));
    }
    flags(top.section("flags", &mut draft), &mut draft);
    draft.part = FilePart::Stack;
    resources(top.section("resources", &mut draft), &mut draft);
    sharing(top.section("sharing", &mut draft), &mut draft);
    draft.part = FilePart::Top;
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
                if key == MERGE {
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
fn resources(mut section: Section<'_>, draft: &mut Draft) {
    for key in ["gpus", "mig"] {
        for (path, entry) in section.list(key, draft) {
            let mut entry = Section::new(&path, entry, draft);
            let (pattern, name) = (entry.text("pattern", draft), entry.text("name", draft));
            let (Some(pattern), Some(name)) = (pattern, name) else {
                draft.error(&path, "needs `pattern` and `name`");
                continue;
            };
            let Some(name) = resource_name(&format!("{path}.name"), &name, draft) else { continue };
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
fn imex(mut section: Section<'_>, draft: &mut Draft) {
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

/// `flags`: those of all programs, `plugin` and `gfd`.
fn flags(mut flags: Section<'_>, draft: &mut Draft) {
    if let Some(keyword) = flags.text("migStrategy", draft) {
        if MigStrategy::parse(&keyword).is_none() {
            draft.error("flags.migStrategy", &format!("{keyword:?} is not one of `none`, `single`, `mixed`"));
        }
        draft.set("migStrategy", &keyword);
    }
    if let Some(fail) = flags.bool("failOnInitError", draft) {
        draft.set("failOnInitError", &fail);
    }
    if flags.text("mpsRoot", draft).is_some_and(|root| !root.is_empty()) {
        draft.unused("flags.mpsRoot", MPS_ROOT);
    }
    if let Some(keyword) = flags.text("deviceDiscoveryStrategy", draft) {
        match (keyword.as_str(), check_discovery(&keyword)) {
            (_, Ok(())) => {}
            ("tegra", Err(reason)) => draft.refuse("flags.deviceDiscoveryStrategy", &reason),
            (_, Err(reason)) => {
                draft.error("flags.deviceDiscoveryStrategy", &format!("{keyword:?}: {reason}"));
            }
        }
    }
    if flags.bool("useNodeFeatureAPI", draft).is_some() {
        draft.unused("flags.useNodeFeatureAPI", LABELS);
    }
    gfd(flags.section("gfd", draft), draft);
    draft.part = FilePart::Edits;
    for key in ["nvidiaDriverRoot", "nvidiaDevRoot"] {
        if let Some(root) = flags.text(key, draft).filter(|root| !root.is_empty()) {
            draft.set(key, &root);
        }
    }
    for key in ["gdrcopyEnabled", "gdsEnabled", "mofedEnabled"] {
        if let Some(enabled) = flags.bool(key, draft) {
            draft.set(key, &enabled);
        }
    }
    plugin(flags.section("plugin", draft), draft);
    draft.part = FilePart::Top;
    flags.report_unread(draft);
}

fn plugin(mut section: Section<'_>, draft: &mut Draft) {
    if let Some(pass) = section.bool("passDeviceSpecs", draft) {
        draft.set("passDeviceSpecs", &pass);
    }
    device_list_strategy(&mut section, draft);
    if let Some(keyword) = section.text("deviceIDStrategy", draft) {
        if edits::id_strategy(&keyword).is_err() {
            draft.error(&section.path("deviceIDStrategy"), &format!("{keyword:?} is neither uuid nor index"));
        }
        draft.set("deviceIdStrategy", &keyword);
    }
    if let Some(prefix) = section.text("cdiAnnotationPrefix", draft).filter(|prefix| !prefix.is_empty()) {
        draft.set("cdiAnnotationPrefix", &prefix);
    }
    if section.text("nvidiaCTKPath", draft).is_some() {
        draft.unused(&section.path("nvidiaCTKPath"), CDI);
    }
    if section.text("containerDriverRoot", draft).is_some() {
        let note =
            "set --driver-root-ctr-path or DRIVER_ROOT_CTR_PATH if the driver is not mounted at /driver-root";
        draft.unused(&section.path("containerDriverRoot"), note);
    }
    match section.text("sharedDevicesAllocationPolicy", draft).as_deref() {
        None | Some("distributed") => {}
        Some("packed") => draft.add_policy(PACKED, &[]),
        Some(keyword) => draft.error(
            &section.path("sharedDevicesAllocationPolicy"),
            &format!("{keyword:?} is neither distributed nor packed"),
        ),
    }
    section.report_unread(draft);
}

/// A keyword, or a list of them.
fn device_list_strategy(section: &mut Section<'_>, draft: &mut Draft) {
    let path = section.path("deviceListStrategy");
    let keywords: Option<Vec<String>> = match section.value("deviceListStrategy") {
        None => return,
        Some(Value::Array(keywords)) => keywords.iter().map(scalar).collect(),
        Some(keyword) => scalar(keyword).map(|keyword| vec![keyword]),
    };
    let Some(keywords) = keywords else { return draft.error(&path, "must be text or a list of texts") };
    if keywords.is_empty() {
        return draft.refuse(&path, "with an empty list, containers would get no GPU; write [envvar]");
    }
    match edits::strategy(keywords.iter().map(String::as_str)) {
        Ok(Some(_)) => draft.set("deviceListStrategy", &keywords),
        // NVIDIA's plugin has no `auto`.
        Ok(None) | Err(_) => draft.error(
            &path,
            &format!(
                "{} is not one of `envvar`, `volume-mounts`, `cdi-annotations`, `cdi-cri`",
                keywords.join(", ")
            ),
        ),
    }
}

fn gfd(mut section: Section<'_>, draft: &mut Draft) {
    for (key, note) in [
        ("oneshot", "Berth updates labels as long as the daemon runs"),
        ("noTimestamp", LABELS),
        ("sleepInterval", "Berth updates labels when GPUs change, which it checks every health.pollSeconds"),
        ("outputFile", "set labels.nfdFile instead, to a path from which node-feature-discovery reads"),
        ("machineTypeFile", LABELS),
    ] {
        if section.value(key).is_some() {
            draft.unused(&section.path(key), note);
        }
    }
    section.report_unread(draft);
}

/// `sharing`: time-slicing becomes a stack entry; MPS needs its own control daemon.
fn sharing(mut section: Section<'_>, draft: &mut Draft) {
    // NVIDIA's plugin reads `null` as an empty section.
    let sliced = section.value_or_null("timeSlicing");
    if let Some(mps) = section.value("mps") {
        shared_resources(Section::new("sharing.mps", mps, draft), draft);
        draft.refuse(
            "sharing.mps",
            "Berth starts no MPS control daemon: run nvidia-cuda-mps-control on the node, share by `timeslice` or `memory`, and \
             name its folders in containerEdits.resources.<resource>.mps; or write sharing.timeSlicing",
        );
        if sliced.is_some() {
            draft.unused("sharing.timeSlicing", "sharing.mps takes precedence, as in NVIDIA's plugin");
        }
    } else if let Some(sliced) = sliced {
        let parameters = shared_resources(Section::new("sharing.timeSlicing", sliced, draft), draft);
        draft.add_policy("timeslice", &parameters);
    }
    section.report_unread(draft);
}

/// The parameters of `timeslice`, line by line.
fn shared_resources(mut section: Section<'_>, draft: &mut Draft) -> Vec<String> {
    let rename = section.bool("renameByDefault", draft).unwrap_or(false);
    let mut lines = Vec::new();
    if section.bool("failRequestsGreaterThanOne", draft).unwrap_or(false) {
        lines.push("failRequestsGreaterThanOne: true".into());
    }
    lines.push("resources:".into());
    let entries = section.list("resources", draft);
    if entries.is_empty() {
        draft.error(&section.path("resources"), "names no resource");
    }
    for (path, entry) in entries {
        let mut entry = Section::new(&path, entry, draft);
        lines.extend(shared_resource(&mut entry, &path, rename, draft));
        entry.report_unread(draft);
    }
    section.report_unread(draft);
    lines
}

/// One resource and its replicas; `None` if the entry has an error.
fn shared_resource(
    entry: &mut Section<'_>,
    path: &str,
    rename_by_default: bool,
    draft: &mut Draft,
) -> Option<String> {
    let Some(name) = entry.text("name", draft) else {
        draft.error(path, "needs a `name`");
        return None;
    };
    let name = resource_name(&format!("{path}.name"), &name, draft);
    let replicas = entry.value("replicas").and_then(Value::as_u64).filter(|replicas| *replicas >= 2);
    let rename = entry.text("rename", draft).filter(|rename| !rename.is_empty());
    let rename = rename.and_then(|rename| resource_name(&format!("{path}.rename"), &rename, draft));
    let selected = devices(entry, path, draft);
    let Some(replicas) = replicas else {
        draft.error(&format!("{path}.replicas"), "must be a number, 2 or more");
        return None;
    };
    let name = name?;
    if replicas > REPLICAS_MAX {
        let note = format!(
            "{replicas} shares of one device; Berth makes at most {REPLICAS_MAX}: write that many or fewer"
        );
        draft.refuse(&format!("{path}.replicas"), &note);
    }
    let shared = if rename_by_default { format!("{name}.shared") } else { name.clone() };
    if let Some(rename) = rename.filter(|rename| *rename != shared) {
        let note = format!(
            "NVIDIA's plugin v0.20 ignores it too and offers them as {shared}; to use this name, add `rename: {rename}` \
             to the entry of {name}, and the name to permissions.resources"
        );
        draft.unused(&format!("{path}.rename"), &note);
    }
    if let Some(selected) = selected {
        let note = format!(
            "NVIDIA's plugin v0.20 ignores it too and shares every device; to share only these, add `devices: {selected}` \
             to the entry of {name}"
        );
        draft.unused(&format!("{path}.devices"), &note);
    }
    let rename = if rename_by_default { format!(", rename: {shared}") } else { String::new() };
    Some(format!("  - {{ name: {name}, replicas: {replicas}{rename} }}"))
}

/// `devices`, unless it is all of them. NVIDIA's plugin checks it, but shares every device.
fn devices(entry: &mut Section<'_>, path: &str, draft: &mut Draft) -> Option<String> {
    // An absent key means "all"; `null` does not.
    let value = entry.value_or_null("devices")?;
    let is_valid = match value {
        Value::String(all) if all == "all" => return None,
        Value::Number(count) => count.as_u64().is_some_and(|count| count > 0),
        Value::Array(devices) => devices.iter().all(|device| scalar(device).is_some_and(|d| is_device(&d))),
        _ => false,
    };
    if !is_valid {
        let rule =
            "must be `all`, a number of devices, or a list of GPU indices, MIG indices (0:1) and UUIDs";
        draft.error(&format!("{path}.devices"), rule);
        return None;
    }
    serde_json::to_string(value).ok()
}

/// Whether this is a GPU index, a MIG index or a UUID, as NVIDIA's plugin accepts them.
fn is_device(text: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.parse::<u64>().is_ok();
    let uuid = |text: &str| {
        let lengths = text.split('-').map(str::len);
        lengths.eq([8, 4, 4, 4, 12]) && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
    };
    let gpu = |text: &str| text.strip_prefix("GPU-").is_some_and(uuid);
    let instance = |text: &str| match text.split('/').collect::<Vec<_>>()[..] {
        [instance] => uuid(instance),
        [parent, gpu_instance, compute_instance] => {
            gpu(parent) && number(gpu_instance) && number(compute_instance)
        }
        _ => false,
    };
    number(text)
        || text.split_once(':').is_some_and(|(gpu, instance)| number(gpu) && number(instance))
        || gpu(text)
        || text.strip_prefix("MIG-").is_some_and(instance)
}

#[cfg(test)]
mod tests;
