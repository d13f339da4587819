//! Converts grants and device lists to the kubelet's wire types.

use super::device_nodes::device_nodes;
use super::wire::v1beta1::{CdiDevice, ContainerAllocateResponse, Device, DeviceSpec, Mount};
use super::wire::v1beta1::{NumaNode, TopologyInfo};
use super::wire::{HEALTHY, UNHEALTHY};
use crate::edits::{DeviceListStrategy, Edits, MpsEdits, ResourceEdits, device_name};
use berth_kernel::evidence::part_use;
use berth_kernel::evidence::pods::{DEVICE_MOUNTS, VISIBLE_DEVICES};
use berth_kernel::grants::allocation::{Allocation, Limits};
use berth_kernel::grants::annotation::{self, ALLOCATION_VARIABLE, GrantAnnotation};
use berth_kernel::hardware::gpu::Part;
use berth_kernel::ids::names::Resource;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::listing::ListedDevice;
use std::collections::BTreeSet;

/// The value with which NVIDIA's runtime adds nothing to a container.
const NO_DEVICES: &str = "void";

/// A key that differs between two resources of one container: the kubelet merges their environments
/// and keeps only one of two equal keys.
fn resource_key(prefix: &str, resource: &Resource) -> String {
    let name = resource.as_str().chars();
    let name = name.map(|c| match c {
        c if c.is_ascii_alphanumeric() => c.to_ascii_uppercase(),
        _ => '_',
    });
    prefix.chars().chain(name).collect()
}

/// The environment key that carries the allocation id of this resource.
pub(super) fn allocation_key(resource: &Resource) -> String {
    resource_key(ALLOCATION_VARIABLE, resource)
}

/// A listed device as a wire type. A device without a NUMA node has no topology at all.
pub(super) fn device(listed: &ListedDevice) -> Device {
    let health = if listed.healthy { HEALTHY } else { UNHEALTHY };
    Device {
        id: listed.id.to_string(),
        health: health.to_owned(),
        topology: listed.numa_node.map(|node| TopologyInfo { nodes: vec![NumaNode { id: i64::from(node) }] }),
    }
}

/// The response for the container of this grant.
pub(super) fn response(allocation: &Allocation, ledger: &Ledger, edits: &Edits) -> ContainerAllocateResponse {
    let parts = granted_parts(allocation, ledger);
    let names = parts.iter().map(|part| device_name(part, edits.id_strategy));
    let names: Vec<String> = names.collect();
    let mut response = ContainerAllocateResponse::default();
    for (key, value) in &allocation.decision.environment {
        response.envs.insert(key.clone(), value.clone());
    }
    add_limits(allocation, &mut response);
    for feature in &edits.features {
        response.envs.insert(feature.variable().to_owned(), "enabled".to_owned());
    }
    for list in &edits.strategies {
        add_strategy(*list, &names, allocation, edits, &mut response);
    }
    if edits.is_cdi_only() {
        // As in the specification itself: a runtime that ignores it, since its configuration changed and it was not
        // started again, would else give the container what the image names, which is often `all`.
        response.envs.insert(VISIBLE_DEVICES.to_owned(), NO_DEVICES.to_owned());
    }
    if edits.pass_device_specs && !edits.is_cdi_only() {
        response.devices = device_nodes(&parts, edits);
    }
    if let Some(own) = edits.resources.get(&allocation.resource) {
        add_operator_edits(own, &mut response);
        if let Some(mps) = &own.mps {
            // The strictest limits of the parts apply to all: MPS numbers GPUs in CUDA's order, which the
            // container can change.
            let limits = part_use::limits(ledger, allocation, true).map(|(limits, _)| limits);
            add_mps(mps, limits.unwrap_or_default(), parts.len(), &mut response);
        }
    }
    // Last, so that a policy cannot override it.
    let key = allocation_key(&allocation.resource);
    response.envs.insert(key, allocation.id.to_string());
    // The guard finds the allocation of a container by this annotation, since a pod can set the variable itself.
    let grant = GrantAnnotation::of(ledger, allocation);
    response.annotations.insert(annotation::key(&allocation.resource), grant.to_string());
    response
}

/// Adds the operator's mounts and devices.
fn add_operator_edits(own: &ResourceEdits, response: &mut ContainerAllocateResponse) {
    response.mounts.extend(own.mounts.iter().map(|mount| Mount {
        container_path: mount.container_path.clone(),
        host_path: mount.host_path.clone(),
        read_only: mount.read_only,
    }));
    response.devices.extend(own.devices.iter().map(|device| DeviceSpec {
        container_path: device.container_path.as_ref().unwrap_or(&device.host_path).clone(),
        host_path: device.host_path.clone(),
        permissions: device.permissions.clone(),
    }));
}

/// Adds the mounts and variables of the MPS control daemon, and its limits. Limits in a process's environment
/// can only be stricter than the daemon's own.
fn add_mps(mps: &MpsEdits, limits: Limits, gpus: usize, response: &mut ContainerAllocateResponse) {
    let mount = |host: &str, container: &str| Mount {
        container_path: container.to_owned(),
        host_path: host.to_owned(),
        read_only: false,
    };
    response.mounts.push(mount(&mps.pipe_directory, mps.inner_pipe_directory()));
    response.mounts.push(mount(&mps.shm, "/dev/shm"));
    let mut set_env = |key: &str, value: String| response.envs.insert(key.to_owned(), value);
    set_env("CUDA_MPS_PIPE_DIRECTORY", mps.inner_pipe_directory().to_owned());
    if let Some(mib) = limits.memory_mib {
        // By CUDA's device number, which starts at 0 in every container. MPS ignores limits by UUID.
        let limits: Vec<String> = (0..gpus).map(|gpu| format!("{gpu}={mib}M")).collect();
        set_env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limits.join(","));
    }
    if let Some(percent) = limits.compute_percent.filter(|percent| *percent < 100) {
        set_env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.to_string());
    }
    if let Some(log) = &mps.log_directory {
        set_env("CUDA_MPS_LOG_DIRECTORY", log.clone());
        response.mounts.push(mount(log, log));
    }
}

/// The parts of the granted devices, each once even if several of its shares are granted.
fn granted_parts<'l>(allocation: &Allocation, ledger: &'l Ledger) -> Vec<&'l Part> {
    let ids: BTreeSet<_> = allocation.devices.iter().map(|d| &d.part).collect();
    let parts = ids.into_iter().filter_map(|id| ledger.part(id));
    let mut parts: Vec<&Part> = parts.map(|state| &state.part).collect();
    parts.sort_by(|a, b| (a.gpu_index, &a.id).cmp(&(b.gpu_index, &b.id)));
    parts
}

fn add_limits(allocation: &Allocation, response: &mut ContainerAllocateResponse) {
    let limits = allocation.decision.limits;
    if let Some(mib) = limits.memory_mib {
        let key = resource_key("BERTH_MEMORY_LIMIT_MIB_", &allocation.resource);
        response.envs.insert(key, mib.to_string());
    }
    if let Some(percent) = limits.compute_percent {
        let key = resource_key("BERTH_COMPUTE_LIMIT_PERCENT_", &allocation.resource);
        response.envs.insert(key, percent.to_string());
    }
}

fn add_strategy(
    list: DeviceListStrategy,
    names: &[String],
    allocation: &Allocation,
    edits: &Edits,
    response: &mut ContainerAllocateResponse,
) {
    let cdi = |name: &String| format!("{}={name}", edits.cdi_kind);
    match list {
        DeviceListStrategy::Envvar => {
            let value = names.join(",");
            response.envs.insert(VISIBLE_DEVICES.to_owned(), value);
        }
        DeviceListStrategy::VolumeMounts => {
            // The variable then holds the mounts' folder, even if `envvar` is also set: a runtime that
            // accepts GPUs from mounts only, so that images cannot name their own, rejects names in it.
            response.envs.insert(VISIBLE_DEVICES.to_owned(), DEVICE_MOUNTS.to_owned());
            response.mounts.extend(names.iter().map(|name| Mount {
                container_path: format!("{DEVICE_MOUNTS}/{name}"),
                host_path: "/dev/null".to_owned(),
                read_only: false,
            }));
        }
        DeviceListStrategy::CdiAnnotations => {
            // One key per grant: the kubelet merges annotations of two resources by key, too.
            let key = format!("{}berth_{}", edits.cdi_annotation_prefix, allocation.id);
            let value: Vec<String> = names.iter().map(cdi).collect();
            response.annotations.insert(key, value.join(","));
        }
        DeviceListStrategy::CdiCri => {
            let devices = names.iter().map(|name| CdiDevice { name: cdi(name) });
            response.cdi_devices.extend(devices);
        }
    }
}

#[cfg(test)]
mod tests {
    mod strategies;

    use super::*;
    use crate::edits::{DeviceIdStrategy, HostDevice};
    use berth_kernel::grants::allocation::{Decision, GrantOrigin, Holder};
    use berth_kernel::hardware::gpu::MIG_INDEX;
    use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, PartId};
    use berth_kernel::ids::time::Now;
    use berth_kernel::node::change::{Change, Entry};
    use std::collections::BTreeMap;
    use std::path::PathBuf;

    fn resource(name: &str) -> Resource {
        Resource::parse(name).unwrap()
    }

    fn ledger() -> Ledger {
        let part = |n: u32| {
            let gpu = GpuId::parse(&format!("GPU-{}", 9 - n)).unwrap();
            Change::PartFound(Part { minor: Some(n + 4), ..Part::whole_gpu(gpu, n) })
        };
        let mut ledger = Ledger::default();
        ledger.apply(&Entry { at: Now::default(), changes: vec![part(0), part(1)] });
        ledger
    }

    fn allocation(resource_name: &str, devices: &[&str]) -> Allocation {
        Allocation {
            id: AllocationId { store: 0xab, number: 7 },
            resource: resource(resource_name),
            devices: devices.iter().map(|id| DeviceId::parse(id).unwrap()).collect(),
            granted_wall_ms: 0,
            origin: GrantOrigin::DevicePlugin,
            holder: Holder::default(),
            overlapped: false,
            decision: Decision::default(),
            ended: None,
        }
    }

    fn edits_with(strategies: &[DeviceListStrategy]) -> Edits {
        Edits { strategies: strategies.iter().copied().collect(), ..Edits::default() }
    }

    #[test]
    fn gpus_are_named_once_and_in_index_order() {
        let grant = allocation("nvidia.com/gpu.shared", &["GPU-8::0", "GPU-9::1", "GPU-9::2"]);
        let got = response(&grant, &ledger(), &Edits::default());
        assert_eq!(got.envs["NVIDIA_VISIBLE_DEVICES"], "GPU-9,GPU-8");
        let index = Edits { id_strategy: DeviceIdStrategy::Index, ..Edits::default() };
        let got = response(&grant, &ledger(), &index);
        assert_eq!(got.envs["NVIDIA_VISIBLE_DEVICES"], "0,1");
        assert!(got.mounts.is_empty() && got.devices.is_empty());
    }

    #[test]
    fn the_annotation_has_the_allocation_and_the_memory_of_each_part() {
        let mut grant = allocation("nvidia.com/gpu.shared", &["GPU-8::0", "GPU-9::1"]);
        let annotations = |grant: &Allocation| response(grant, &ledger(), &Edits::default()).annotations;
        let of = |text: &str| [("berth.dev/grant.nvidia.com_gpu.shared".to_owned(), text.to_owned())].into();
        assert_eq!(annotations(&grant), of("000000ab-7 GPU-8 GPU-9"));
        grant.decision.limits.memory_mib = Some(4096);
        assert_eq!(annotations(&grant), of("000000ab-7 GPU-8=4096 GPU-9=4096"));
    }

    #[test]
    fn a_mig_instance_is_named_by_uuid_or_by_two_indices() {
        let mut ledger = ledger();
        let whole = ledger.part(&PartId::parse("GPU-8").unwrap()).unwrap().part.clone();
        let instance = |id: &str, index: Option<&str>| Part {
            id: PartId::parse(id).unwrap(),
            gpu: whole.gpu.clone(),
            attributes: index.map(|i| (MIG_INDEX.to_owned(), i.to_owned())).into_iter().collect(),
            ..whole.clone()
        };
        let parts = [instance("MIG-a", Some("2")), instance("MIG-b", None)].map(Change::PartFound);
        ledger.apply(&Entry { at: Now::default(), changes: parts.to_vec() });
        let grant = allocation("nvidia.com/gpu", &["MIG-a", "MIG-b"]);
        let got = response(&grant, &ledger, &Edits::default());
        assert_eq!(got.envs["NVIDIA_VISIBLE_DEVICES"], "MIG-a,MIG-b");
        let index = Edits { id_strategy: DeviceIdStrategy::Index, ..Edits::default() };
        assert_eq!(response(&grant, &ledger, &index).envs["NVIDIA_VISIBLE_DEVICES"], "1:2,MIG-b");
    }

    #[test]
    fn mps_limits_are_set_for_every_gpu_of_the_container() {
        let mps: MpsEdits = serde_json::from_str(
            r#"{"pipeDirectory": "/run/mps/pipe", "containerPipeDirectory": "/mps", "logDirectory": "/run/mps/log"}"#,
        )
        .unwrap();
        let own = ResourceEdits { mps: Some(mps), ..ResourceEdits::default() };
        let shared = resource("nvidia.com/gpu.shared");
        let edits = Edits { resources: BTreeMap::from([(shared, own)]), ..Edits::default() };
        let mut grant = allocation("nvidia.com/gpu.shared", &["GPU-8::0", "GPU-9::1", "GPU-9::2"]);
        let got = response(&grant, &ledger(), &edits);
        assert_eq!(got.envs["CUDA_MPS_PIPE_DIRECTORY"], "/mps");
        assert_eq!(got.envs["CUDA_MPS_LOG_DIRECTORY"], "/run/mps/log");
        assert!(!got.envs.contains_key("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), "no limits are set");
        let mounts: Vec<_> = got
            .mounts
            .iter()
            .map(|m| (m.host_path.as_str(), m.container_path.as_str(), m.read_only))
            .collect();
        let shm = ("/dev/shm", "/dev/shm", false);
        assert_eq!(mounts, [("/run/mps/pipe", "/mps", false), shm, ("/run/mps/log", "/run/mps/log", false)]);
        grant.decision.limits = Limits { memory_mib: Some(4096), compute_percent: Some(30) };
        let envs = response(&grant, &ledger(), &edits).envs;
        assert_eq!(envs["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"], "0=4096M,1=4096M");
        assert_eq!(envs["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "30");
        grant.resource = resource("nvidia.com/gpu");
        assert!(response(&grant, &ledger(), &edits).mounts.is_empty());
    }

    #[test]
    fn a_policy_cannot_override_the_allocation_id_of_a_resource() {
        let mut grant = allocation("nvidia.com/mig-1g.10gb", &["GPU-9"]);
        let key = "BERTH_ALLOCATION_ID_NVIDIA_COM_MIG_1G_10GB";
        grant.decision.environment = vec![(key.into(), "forged".into()), ("MODE".into(), "slow".into())];
        grant.decision.limits = Limits { memory_mib: Some(500), compute_percent: Some(50) };
        let envs = response(&grant, &ledger(), &Edits::default()).envs;
        assert_eq!(envs[key], "000000ab-7");
        assert_eq!(envs["MODE"], "slow");
        assert_eq!(envs["BERTH_MEMORY_LIMIT_MIB_NVIDIA_COM_MIG_1G_10GB"], "500");
        assert_eq!(envs["BERTH_COMPUTE_LIMIT_PERCENT_NVIDIA_COM_MIG_1G_10GB"], "50");
    }

    #[test]
    fn the_operators_mounts_and_devices_apply_to_their_resource_only() {
        let own = ResourceEdits {
            devices: vec![HostDevice {
                host_path: "/dev/x".into(),
                container_path: None,
                permissions: "r".into(),
            }],
            ..ResourceEdits::default()
        };
        let edits =
            Edits { resources: BTreeMap::from([(resource("nvidia.com/gpu"), own)]), ..Edits::default() };
        let got = response(&allocation("nvidia.com/gpu", &["GPU-9"]), &ledger(), &edits);
        assert_eq!(got.devices[0].container_path, "/dev/x");
        let other = allocation("nvidia.com/gpu.shared", &["GPU-9::0"]);
        assert!(response(&other, &ledger(), &edits).devices.is_empty());
    }

    #[test]
    fn device_nodes_are_passed_by_minor_number_under_the_device_root() {
        let edits =
            Edits { pass_device_specs: true, driver_root: PathBuf::from("/nowhere"), ..Edits::default() };
        let got = response(&allocation("nvidia.com/gpu", &["GPU-8"]), &ledger(), &edits);
        let mut nodes = got.devices.iter().map(|d| (d.container_path.as_str(), d.host_path.as_str()));
        assert!(nodes.any(|node| node == ("/dev/nvidia5", "/nowhere/dev/nvidia5")), "{:?}", got.devices);
    }

    #[test]
    fn a_device_without_a_numa_node_has_no_topology() {
        let mut listed =
            ListedDevice { id: DeviceId::parse("GPU-9::3").unwrap(), healthy: false, numa_node: None };
        let wire = device(&listed);
        assert_eq!((wire.id.as_str(), wire.health.as_str()), ("GPU-9::3", "Unhealthy"));
        assert!(wire.topology.is_none());
        listed.numa_node = Some(1);
        assert_eq!(device(&listed).topology.unwrap().nodes[0].id, 1);
    }
}
