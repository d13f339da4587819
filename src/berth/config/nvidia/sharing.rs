//! `sharing` of a file of NVIDIA's: time-slicing becomes a stack; MPS needs its own control daemon.

use super::draft::Draft;
use super::read::{Section, resource, scalar};
use serde_json::Value;

/// Shares of one device that `timeslice` makes at most.
const REPLICAS_MAX: u64 = 128;

pub(super) fn translate(section: Option<Section<'_>>, draft: &mut Draft) {
    let Some(mut section) = section else { return };
    // A `null` here is an empty section there.
    let sliced = section.has("timeSlicing").then(|| section.value("timeSlicing").unwrap_or(&Value::Null));
    if let Some(mps) = section.value("mps") {
        resources(Section::of("sharing.mps", mps, draft), draft);
        draft.refuse(
            "sharing.mps",
            "Berth starts no MPS control daemon: run nvidia-cuda-mps-control on the node, share by `timeslice` or `memory`, and \
             name its folders in containerEdits.resources.<resource>.mps; or write sharing.timeSlicing",
        );
        if sliced.is_some() {
            draft.unused("sharing.timeSlicing", "sharing.mps takes precedence, as in NVIDIA's plugin");
        }
    } else if let Some(sliced) = sliced {
        let parameters = resources(Section::of("sharing.timeSlicing", sliced, draft), draft);
        draft.policy("timeslice", &parameters);
    }
    section.report_unread(draft);
}

/// The parameters of `timeslice`, line by line.
fn resources(mut section: Section<'_>, draft: &mut Draft) -> Vec<String> {
    let rename = section.truth("renameByDefault", draft).unwrap_or(false);
    let mut lines = Vec::new();
    if section.truth("failRequestsGreaterThanOne", draft).unwrap_or(false) {
        lines.push("failRequestsGreaterThanOne: true".into());
    }
    lines.push("resources:".into());
    let entries = section.list("resources", draft);
    if entries.is_empty() {
        draft.error(&section.path("resources"), "names no resource");
    }
    for (path, entry) in entries {
        let mut entry = Section::of(&path, entry, draft);
        lines.extend(one(&mut entry, &path, rename, draft));
        entry.report_unread(draft);
    }
    section.report_unread(draft);
    lines
}

/// One resource and its replicas; `None` for what is an error or nothing.
fn one(entry: &mut Section<'_>, path: &str, by_default: bool, draft: &mut Draft) -> Option<String> {
    let Some(name) = entry.text("name", draft) else {
        draft.error(path, "needs a `name`");
        return None;
    };
    let name = resource(&format!("{path}.name"), &name, draft);
    let replicas = entry.value("replicas").and_then(Value::as_u64).filter(|replicas| *replicas >= 2);
    let rename = entry.text("rename", draft).filter(|rename| !rename.is_empty());
    let rename = rename.and_then(|rename| resource(&format!("{path}.rename"), &rename, draft));
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
    let shared = if by_default { format!("{name}.shared") } else { name.clone() };
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
    let rename = if by_default { format!(", rename: {shared}") } else { String::new() };
    Some(format!("  - {{ name: {name}, replicas: {replicas}{rename} }}"))
}

/// `devices`, if it is not all of them. NVIDIA's plugin checks it and then shares every device.
fn devices(entry: &mut Section<'_>, path: &str, draft: &mut Draft) -> Option<String> {
    // Missing is "all"; `null` is not.
    let given =
        if entry.has("devices") { entry.value("devices").unwrap_or(&Value::Null) } else { return None };
    let fits = match given {
        Value::String(all) if all == "all" => return None,
        Value::Number(count) => count.as_u64().is_some_and(|count| count > 0),
        Value::Array(devices) => devices.iter().all(|device| scalar(device).is_some_and(|d| is_device(&d))),
        _ => false,
    };
    if !fits {
        let rule =
            "must be `all`, a number of devices, or a list of GPU indices, MIG indices (0:1) and UUIDs";
        draft.error(&format!("{path}.devices"), rule);
        return None;
    }
    serde_json::to_string(given).ok()
}

/// A GPU index, a MIG index or a UUID, as NVIDIA's plugin takes them.
fn is_device(text: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.parse::<u64>().is_ok();
    let uuid = |text: &str| {
        let lengths = text.split('-').map(str::len);
        lengths.eq([8, 4, 4, 4, 12]) && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
    };
    let gpu = |text: &str| text.strip_prefix("GPU-").is_some_and(uuid);
    let instance = |text: &str| match text.split('/').collect::<Vec<_>>()[..] {
        [one] => uuid(one),
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
