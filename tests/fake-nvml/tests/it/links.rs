//! NVLinks and common ancestors.

use fake_nvml::{NvLink, Remote, State};
use nvml_wrapper::Device;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::error::NvmlError;

use crate::Bench;

/// `nvmlIntNvLinkDeviceType_t`.
const GPU: u32 = 0;
const SWITCH: u32 = 2;

/// By the raw call: `NvLink::remote_device_type` of nvml-wrapper 0.13 throws the answer away and says `Unknown`.
fn remote_type(device: &Device, number: u32) -> u32 {
    let mut kind = u32::MAX;
    let library = device.nvml().lib();
    // SAFETY: the handle is valid while `device` lives, and `kind` outlives the call.
    let answer = unsafe { library.nvmlDeviceGetNvLinkRemoteDeviceType(device.handle(), number, &mut kind) };
    assert_eq!(answer, 0);
    kind
}

#[test]
fn links_to_switches() {
    let bench = Bench::new(&State::h100(8));
    let device = bench.nvml.device_by_index(5).unwrap();
    for number in 0..18 {
        let link = device.link_wrapper_for(number);
        assert!(link.is_active().unwrap());
        assert_eq!(remote_type(&device, number), SWITCH);
        assert!(link.remote_pci_info().unwrap().bus_id.starts_with("00000000:D"));
    }
    assert!(matches!(device.link_wrapper_for(18).is_active(), Err(NvmlError::InvalidArg)));
}

#[test]
fn links_between_gpus_and_a_link_that_is_down() {
    let mut state = State::h100(2);
    let uuids: Vec<_> = state.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    for (gpu, other) in state.gpus.iter_mut().zip(uuids.iter().rev()) {
        gpu.nvlinks = vec![Some(NvLink { remote: Remote::Gpu(other.clone()), active: true }); 2];
    }
    let bench = Bench::new(&state);
    let device = bench.nvml.device_by_index(0).unwrap();
    let link = device.link_wrapper_for(1);
    assert_eq!(link.remote_pci_info().unwrap().bus_id, state.gpus[1].pci_bus_id);
    assert_eq!(remote_type(&device, 1), GPU);
    bench.change(|state| state.gpus[0].nvlinks[1].as_mut().unwrap().active = false);
    assert!(!link.is_active().unwrap());
    assert!(device.link_wrapper_for(0).is_active().unwrap());
}

#[test]
fn no_links_on_a_pcie_board() {
    let bench = Bench::new(&State::t4(2));
    let device = bench.nvml.device_by_index(0).unwrap();
    assert!(matches!(device.link_wrapper_for(0).is_active(), Err(NvmlError::NotSupported)));
}

#[test]
fn common_ancestors_and_numa_nodes() {
    let bench = Bench::new(&State::a100(8));
    let device = |index| bench.nvml.device_by_index(index).unwrap();
    let level = |a, b| device(a).topology_common_ancestor(device(b)).unwrap();
    assert_eq!(level(0, 1), TopologyLevel::Multiple);
    assert_eq!(level(1, 2), TopologyLevel::Node);
    assert_eq!(level(2, 1), TopologyLevel::Node);
    assert_eq!(level(3, 4), TopologyLevel::System);
    let nodes = |index| device(index).memory_affinity(2, 0).unwrap();
    assert_eq!(nodes(0), [1, 0], "NUMA node 0");
    assert_eq!(nodes(7), [2, 0], "NUMA node 1");
    assert_eq!(device(0).topology_nearest_gpus(TopologyLevel::Multiple).unwrap().len(), 1);
    assert!(matches!(device(0).numa_node_id(), Err(NvmlError::NotSupported)));
    bench.change(|state| state.gpus[0].memory_numa_node = Some(4));
    assert_eq!(device(0).numa_node_id().unwrap(), 4);
}
