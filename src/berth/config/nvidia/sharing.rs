//! `sharing` of an NVIDIA file: time-slicing becomes a stack entry; MPS needs its own control daemon.

use super::draft::Draft;
use super::read::{Section, resource_name, scalar};
use serde_json::Value;

/// Most shares of one device by `timeslice`.
const REPLICAS_MAX: u64 = 128;

pub(super) fn translate(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    // NVIDIA's plugin reads `null` as an empty section.
    let sliced = section.has("timeSlicing").then(|| section.value("timeSlicing").unwrap_or(&Value::Null));
    if let Some(mps) = section.value("mps") {
        resources(Section::new("sharing.mps", mps, draft), draft);
        draft.refuse(
            "sharing.mps",
            "Berth starts no MPS control daemon: run nvidia-cuda-mps-control on the node, share by `timeslice` or `memory`, and \
             name its folders in containerEdits.resources.<resource>.mps; or write sharing.timeSlicing",
        );
        if sliced.is_some() {
            draft.unused("sharing.timeSlicing", "sharing.mps takes precedence, as in NVIDIA's plugin");
        }
    } else if let Some(sliced) = sliced {
        let parameters = resources(Section::new("sharing.timeSlicing", sliced, draft), draft);
        draft.add_policy("timeslice", &parameters);
    }
    section.report_unread(draft);
}

/// The parameters of `timeslice`, line by line.
fn resources(mut section: Section<'_>, draft: &mut Draft) -> Vec<String> {
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
        lines.extend(resource(&mut entry, &path, rename, draft));
        entry.report_unread(draft);
    }
    section.report_unread(draft);
    lines
}

/// One resource and its replicas; `None` if the entry has an error.
fn resource(
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
    let value =
        if entry.has("devices") { entry.value("devices").unwrap_or(&Value::Null) } else { return None };
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
