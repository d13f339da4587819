//! MIG devices.

use fake_nvml::{Process, State};
use nvml_wrapper::error::NvmlError;

use crate::Bench;

#[test]
fn instances_with_their_parent_profile_and_processes() {
    let mut state = State::h100(2);
    let uuids = state.split(1, &[1, 2, 3]);
    let instances = state.gpus[1].mig.as_ref().unwrap().instances.clone();
    state.gpus[1].processes = vec![
        Process { gpu_instance: Some(8), compute_instance: Some(0), ..Process::new(42, 100) },
        Process { gpu_instance: Some(7), compute_instance: Some(0), ..Process::new(43, 100) },
    ];
    let bench = Bench::new(&state);
    let plain = bench.nvml.device_by_index(0).unwrap();
    assert_eq!(plain.mig_device_count().unwrap(), 0);
    assert_eq!(plain.mig_mode().unwrap().current, 0);
    let parent = bench.nvml.device_by_index(1).unwrap();
    assert_eq!(parent.mig_mode().unwrap().current, 1);
    assert_eq!(parent.mig_device_count().unwrap(), 7);
    for ((index, uuid), instance) in (0..).zip(&uuids).zip(&instances) {
        let device = parent.mig_device_by_index(index).unwrap();
        assert_eq!(&device.uuid().unwrap(), uuid);
        assert!(device.mig_is_mig_device_handle().unwrap());
        assert_eq!(device.name().unwrap(), format!("NVIDIA H100 80GB HBM3 MIG {}", instance.profile));
        assert_eq!(device.memory_info().unwrap().total, instance.memory_mib * 1024 * 1024);
        assert_eq!(device.mig_parent_device().unwrap().uuid().unwrap(), state.gpus[1].uuid);
        let attributes = device.attributes().unwrap();
        assert_eq!(attributes.gpu_instance_slice_count, instance.slices);
        assert_eq!(bench.nvml.device_by_uuid(uuid.as_str()).unwrap().index().unwrap(), index);
        assert!(matches!(device.minor_number(), Err(NvmlError::InvalidArg)));
    }
    assert!(matches!(parent.mig_device_by_index(3), Err(NvmlError::NotFound)));
    assert!(matches!(parent.mig_device_by_index(7), Err(NvmlError::InvalidArg)));
    let second = parent.mig_device_by_index(1).unwrap();
    let pids = |device: &nvml_wrapper::Device| {
        let processes = device.running_compute_processes().unwrap();
        processes.iter().map(|p| p.pid).collect::<Vec<_>>()
    };
    assert_eq!(pids(&second), [42]);
    assert_eq!(pids(&parent), [42, 43], "the GPU shows all of them");
}

#[test]
fn a_destroyed_instance_is_lost_to_its_handle() {
    let mut state = State::a100(1);
    state.split(0, &[1, 1]);
    let bench = Bench::new(&state);
    let parent = bench.nvml.device_by_index(0).unwrap();
    let device = parent.mig_device_by_index(1).unwrap();
    bench.change(|state| drop(state.split(0, &[1])));
    assert!(matches!(device.uuid(), Err(NvmlError::GpuLost)));
    bench.change(|state| state.gpus[0].lost = true);
    assert!(matches!(parent.mig_device_by_index(0), Err(NvmlError::GpuLost)));
}

#[test]
fn a_model_without_mig_reports_that() {
    let bench = Bench::new(&State::t4(1));
    let device = bench.nvml.device_by_index(0).unwrap();
    assert!(matches!(device.mig_mode(), Err(NvmlError::NotSupported)));
    assert_eq!(device.mig_device_count().unwrap(), 0);
}
