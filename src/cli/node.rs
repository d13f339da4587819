//! `berth node show`.

use crate::client::Client;
use crate::names::{runs, scheduling};
use crate::output::Column::{Name, Whole};
use crate::output::{Out, facts, fitted, or_dash};
use berth_api::{
    ConfigurationState, Dra, DrainState, Fleet, FleetStack, Guard, Node, NotFree, ResourceState,
    SettingProblem, StackSource, StepState,
};
use clap::Subcommand;

/// The commands of `berth node` for a running daemon.
#[derive(Subcommand, Debug)]
pub enum NodeCommand {
    /// Show the node: devices of each resource by state, and why devices are not free
    Show,
}

pub(crate) fn run(command: &NodeCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        NodeCommand::Show => out.answer(&client.get::<Node>("/node")?, show),
    }
}

fn show(node: &Node) -> String {
    let counts = &node.counts;
    let cordoned = scheduling(&DrainState::Cordoned);
    let bypasses = if counts.bypasses > 0 {
        format!("{} (`berth process bypass`)", counts.bypasses)
    } else {
        String::new()
    };
    let mut text = facts(&[
        ("node", node.name.clone()),
        ("version", node.version.clone()),
        ("state", if node.ready { "ready".into() } else { "not ready".into() }),
        ("gpus", {
            let more = |count: usize, what: &str| {
                if count > 0 { format!(", {count} {what}") } else { String::new() }
            };
            format!(
                "{}: {} work, {} {cordoned}{}{}",
                counts.gpus,
                counts.working_gpus,
                counts.cordoned_gpus,
                more(counts.excluded_gpus, "excluded"),
                more(counts.unidentified_gpus, "not identified (`berth gpu list`)"),
            )
        }),
        ("gpu source", node.gpu_source.clone()),
        ("driver", node.driver_version.clone().unwrap_or_default()),
        ("allocations", format!("{} live, {} ended", counts.allocations, counts.ended_allocations)),
        ("stack", stack(node)),
        ("guard", node.guard.as_ref().map(guard).unwrap_or_default()),
        ("dra", node.dra.as_ref().map(dra).unwrap_or_default()),
        ("fleet", node.fleet.as_ref().map(fleet).unwrap_or_default()),
        ("bypasses", bypasses),
    ]);
    let failed = node.checks.iter().filter(|check| !check.ok);
    let failed = failed.map(|check| format!("{}: {}", check.name, or_dash(check.detail.as_ref())));
    let store = node.store_error.iter().map(|error| format!("store: {error}"));
    let hold = node.hold.iter().map(|hold| format!("no allocation ends at present: {hold}"));
    let release = node.driver_release.iter().map(|release| {
        format!("the driver is released until {}; `berth nvml resume` uses it again", release.until)
    });
    let warnings = node.warnings.iter().map(|warning| format!("warning: {warning}"));
    let problems = failed.chain(store).chain(hold).chain(release).chain(configuration(node)).chain(warnings);
    let problems: Vec<_> = problems.collect();
    if !problems.is_empty() {
        text += "\n";
        text += &problems.iter().map(|problem| format!("{problem}\n")).collect::<String>();
    }
    if node.resources.is_empty() {
        return text + "\nno resource is offered\n";
    }
    text += "\n";
    let head = [
        ("RESOURCE", Name),
        ("DEVICES", Whole),
        ("HELD", Whole),
        ("FREE", Whole),
        ("WITHDRAWN", Whole),
        ("CORDONED", Whole),
        ("UNHEALTHY", Whole),
    ];
    text += &fitted(&head, node.resources.iter().map(row));
    let reasons: String = node.resources.iter().flat_map(reasons).map(|line| format!("{line}\n")).collect();
    if !reasons.is_empty() {
        text += &format!("\n{reasons}");
    }
    text
}

/// The state of a guard that has run on this node; empty without one.
fn guard(guard: &Guard) -> String {
    match (&guard.version, &guard.why) {
        (None, _) => String::new(),
        (Some(_), Some(why)) => format!("not connected: {why}"),
        (Some(version), None) => {
            let runtime = or_dash(guard.runtime.as_ref());
            let action = guard.bypass_action.as_ref();
            let action =
                action.map_or_else(String::new, |action| format!("; bypass action: {}", action.as_str()));
            format!("{version}, connected to {runtime}{action}; {}", memory_limits(guard))
        }
    }
}

/// The errors of the GPUNode and the GPUMaintenances.
fn fleet(fleet: &Fleet) -> String {
    let Fleet { stack, stack_error, gpu_node_error, maintenances_error, status_error, removal_error } = fleet;
    let errors = [
        ("changes of `spec.stack` of the GPUNode are not seen", stack_error),
        ("the GPUNode is not up to date", gpu_node_error),
        ("changes of GPUMaintenances are not seen", maintenances_error),
        ("the status of a GPUMaintenance is not up to date", status_error),
        ("the marks of deleted GPUMaintenances are kept", removal_error),
    ];
    let text = |(what, why): (&str, &Option<String>)| Some(format!("{what}: {}", why.as_ref()?));
    let errors: Vec<String> = errors.into_iter().filter_map(text).collect();
    let errors = if errors.is_empty() { "up to date".into() } else { errors.join("; ") };
    let Some(FleetStack { policy, revision, phase, why }) = stack else { return errors };
    let why = why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
    format!("{errors}; stack of {policy}, revision {revision}: {phase}{why}")
}

/// The state of the DRA driver.
fn dra(dra: &Dra) -> String {
    let registered = match (&dra.why, dra.registered) {
        (_, true) => "registered".to_owned(),
        (why, false) => format!("not registered: {}", or_dash(why.as_ref())),
    };
    let slices = match &dra.slices_error {
        Some(why) => format!("its ResourceSlices are not up to date: {why}"),
        None if dra.devices == 1 => "1 device published".to_owned(),
        None => format!("{} devices published", dra.devices),
    };
    let rules = dra.taint_rules_error.as_ref().map_or_else(String::new, |why| format!("; {why}"));
    let shares = dra.no_shares.as_ref().map_or_else(String::new, |why| format!("; no shares: {why}"));
    let counters = dra.no_counters.as_ref().map_or_else(String::new, |why| format!("; {why}"));
    let taints = match dra.drops_taints {
        true => {
            "; devices with a taint are left out of the ResourceSlices, since the API server drops taints: enable its feature gate \
             DRADeviceTaints"
        }
        false => "",
    };
    format!("{}, {registered}; {slices}{rules}{shares}{counters}{taints}", dra.driver)
}

/// Where the guard can limit the memory of containers.
fn memory_limits(guard: &Guard) -> String {
    let (able, unable): (Vec<_>, Vec<_>) = guard.memory_limits.iter().partition(|one| one.supported);
    let why = unable.iter().map(|one| format!("{}: {}", one.gpu, or_dash(one.why.as_ref())));
    match (&guard.memory_limits_error, unable.is_empty()) {
        (Some(why), _) => format!("the guard cannot limit the memory of containers: {why}"),
        (None, true) if able.is_empty() => {
            "the guard has not tried yet to limit the memory of containers".into()
        }
        (None, true) => "the guard can limit the memory of containers on all GPUs".into(),
        (None, false) => format!(
            "the guard can limit the memory of containers on {} of {} GPUs, not on {}",
            able.len(),
            guard.memory_limits.len(),
            why.collect::<Vec<_>>().join("; ")
        ),
    }
}

/// The active stack, and where it comes from.
fn stack(node: &Node) -> String {
    let from = match &node.stack_source {
        Some(StackSource::Api) if node.file_stack_overridden => {
            ", from the API instead of the file's; `berth policy reset` activates the file's"
        }
        Some(StackSource::Api) => ", from the API",
        Some(StackSource::Fleet) => ", from the GPUNode",
        Some(StackSource::BreakGlass) => {
            ", from a break-glass, in place of the GPUNode's stack; `berth policy reset` ends it"
        }
        Some(StackSource::File) => ", from the file",
        Some(StackSource::Other(_)) | None => "",
    };
    format!("revision {}{from}", node.stack_revision)
}

/// Why the settings in use are not those of the configuration file, if they are not.
fn configuration(node: &Node) -> Vec<String> {
    let Some(ConfigurationState { file, needs_restart, error, .. }) = &node.configuration else {
        return Vec::new();
    };
    let refused = error.iter().flat_map(|error| {
        let problems = error.problems.iter().map(|SettingProblem { line, key, message }| {
            let line = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            let key = key.as_ref().map(|key| format!("{key}: ")).unwrap_or_default();
            format!("  {line}{key}{message}")
        });
        let head = format!("{file} is refused since {}, and the settings before it stay in use:", error.at);
        std::iter::once(head).chain(problems)
    });
    let keys: Vec<&str> = needs_restart.iter().map(|change| change.key.as_str()).collect();
    let waits = (!keys.is_empty()).then(|| format!("{file}: applied after a restart: {}", keys.join(", ")));
    refused.chain(waits).collect()
}

/// The devices of a resource; the last five numbers add up to the first one.
fn row(resource: &ResourceState) -> Vec<String> {
    let ResourceState { devices, held, free, withdrawn, cordoned, unhealthy, .. } = resource;
    let others = [withdrawn, cordoned, unhealthy];
    // An older daemon does not report the last three.
    let is_known = *devices == held + free + others.into_iter().sum::<u32>();
    let others = others.map(|count| if is_known { count.to_string() } else { "-".into() });
    let known = [devices, held, free].map(ToString::to_string);
    [vec![resource.resource.clone()], known.to_vec(), others.to_vec()].concat()
}

/// Why devices are not free, and why a resource is not registered.
fn reasons(resource: &ResourceState) -> Vec<String> {
    let name = &resource.resource;
    let not_free = grouped(&resource.not_free);
    let not_free = not_free.into_iter().map(|text| format!("{name}: {text}"));
    let breaker = resource.breaker.iter().map(|breaker| format!("{name}: {breaker}"));
    let waiting = match &resource.registration {
        StepState { done: false, waiting } => {
            Some(format!("{name}: not registered with the kubelet: {}", or_dash(waiting.as_ref())))
        }
        StepState { done: true, .. } => None,
    };
    not_free.chain(breaker).chain(waiting).collect()
}

/// The reasons, each once with all GPUs that have it: `2 withdrawn: GPU 0-1: no CDI specification names it yet`.
fn grouped(not_free: &[NotFree]) -> Vec<String> {
    let mut groups: Vec<(&NotFree, &str, Vec<u32>, u32)> = Vec::new();
    for one in not_free {
        let of_gpu = one.reason.strip_prefix("GPU ").and_then(|rest| rest.split_once(": "));
        let of_gpu = of_gpu.and_then(|(index, reason)| Some((index.parse::<u32>().ok()?, reason)));
        let (index, reason) =
            of_gpu.map_or((None, one.reason.as_str()), |(index, reason)| (Some(index), reason));
        let same = |(first, known, indices, _): &&mut (&NotFree, &str, Vec<u32>, u32)| {
            first.state == one.state && *known == reason && indices.is_empty() == index.is_none()
        };
        match groups.iter_mut().find(same) {
            Some((_, _, indices, devices)) => {
                indices.extend(index);
                *devices += one.devices;
            }
            None => groups.push((one, reason, index.into_iter().collect(), one.devices)),
        }
    }
    let text = |(one, reason, indices, devices): (&NotFree, &str, Vec<u32>, u32)| {
        let gpus =
            if indices.is_empty() { String::new() } else { format!("GPU {}: ", runs(indices).join(",")) };
        format!("{devices} {}: {gpus}{reason}", one.state)
    };
    groups.into_iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn resource(more: &serde_json::Value) -> ResourceState {
        let mut whole = json!({"resource": "nvidia.com/gpu.shared", "registration": {"done": true}, "devices": 160, "held": 40, "free": 70});
        let (whole_map, more) = (whole.as_object_mut().unwrap(), more.as_object().unwrap());
        whole_map.extend(more.clone());
        serde_json::from_value(whole).unwrap()
    }

    #[test]
    fn a_stack_in_place_of_the_files_and_a_refused_file_are_shown() {
        let mut whole = json!({
            "name": "n", "version": "1", "generation": 1, "ready": true, "checks": [], "gpuSource": "sim",
            "resources": [], "processes": {"state": "visible"}, "stackRevision": 3, "counts": {"gpus": 8,
                "workingGpus": 8, "cordonedGpus": 0, "allocations": 0, "endedAllocations": 0, "bypasses": 0,
                "policies": 9},
        });
        let shown = |whole: &serde_json::Value| show(&serde_json::from_value(whole.clone()).unwrap());
        assert!(shown(&whole).contains("revision 3\n"), "an older daemon: {}", shown(&whole));
        whole["stackSource"] = json!("api");
        assert!(shown(&whole).contains("revision 3, from the API\n"), "{}", shown(&whole));
        whole["fileStackOverridden"] = json!(true);
        whole["warnings"] = json!(["policy memory@0123: 140 slices would fit"]);
        whole["configuration"] = json!({"file": "/etc/berth/config.yaml", "loadedAt": "t", "changed": [],
            "needsRestart": [], "error": {"at": "2026-01-02T03:04:05Z", "problems": [
                {"line": 3, "key": "stack[0].policy", "message": "no policy tmeslice"}]}});
        let text = shown(&whole);
        for line in [
            "from the API instead of the file's; `berth policy reset` activates the file's\n",
            "/etc/berth/config.yaml is refused since 2026-01-02T03:04:05Z, and the settings before it stay in use:\n",
            "  line 3: stack[0].policy: no policy tmeslice\n",
            "warning: policy memory@0123: 140 slices would fit\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }

    #[test]
    fn devices_add_up_and_each_that_is_not_free_has_a_reason() {
        let known = resource(&json!({"withdrawn": 10, "cordoned": 20, "unhealthy": 20, "notFree": [
            {"state": "unhealthy", "devices": 10, "reason": "GPU 3: XID 79: GPU has fallen off the bus"},
        ]}));
        assert_eq!(row(&known), ["nvidia.com/gpu.shared", "160", "40", "70", "10", "20", "20"]);
        assert_eq!(
            reasons(&known),
            ["nvidia.com/gpu.shared: 10 unhealthy: GPU 3: XID 79: GPU has fallen off the bus"]
        );
        let of_two = resource(&json!({"withdrawn": 3, "notFree": [
            {"state": "withdrawn", "devices": 1, "reason": "GPU 0: no CDI specification names it yet"},
            {"state": "withdrawn", "devices": 2, "reason": "GPU 1: no CDI specification names it yet"},
        ]}));
        assert_eq!(
            reasons(&of_two),
            ["nvidia.com/gpu.shared: 3 withdrawn: GPU 0-1: no CDI specification names it yet"]
        );
        let waiting =
            resource(&json!({"registration": {"done": false, "waiting": "there is no kubelet yet"}}));
        assert_eq!(row(&waiting)[4..], ["-", "-", "-"], "an older daemon does not report them");
        assert_eq!(
            reasons(&waiting),
            ["nvidia.com/gpu.shared: not registered with the kubelet: there is no kubelet yet"]
        );
    }
}
