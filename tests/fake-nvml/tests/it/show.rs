//! What the file says is what a program sees, and a change is seen by the next call.

use std::process::Command;
use std::{env, fs};

use fake_nvml::{Code, Fault, Installed, Process, RecoveryAction, State};
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{Brand, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::{DeviceArchitecture, UsedGpuMemory};
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;

use crate::{Bench, open};

const MIB: u64 = 1024 * 1024;

#[test]
fn versions() {
    let bench = Bench::new(&State::t4(1));
    assert_eq!(bench.nvml.sys_driver_version().unwrap(), "570.172.08");
    assert_eq!(bench.nvml.sys_nvml_version().unwrap(), "12.570.172.08");
    assert_eq!(bench.nvml.sys_cuda_driver_version().unwrap(), 12080);
    assert_eq!(bench.nvml.unit_count().unwrap(), 0);
}

#[test]
fn every_gpu_has_the_values_of_the_file() {
    let state = State::h100(8);
    let bench = Bench::new(&state);
    assert_eq!(bench.nvml.device_count().unwrap(), 8);
    for (index, gpu) in (0..).zip(&state.gpus) {
        let device = bench.nvml.device_by_index(index).unwrap();
        assert_eq!(device.uuid().unwrap(), gpu.uuid);
        assert_eq!(device.name().unwrap(), "NVIDIA H100 80GB HBM3");
        assert_eq!(device.index().unwrap(), index);
        assert_eq!(device.minor_number().unwrap(), index);
        assert_eq!(device.memory_info().unwrap().total, 81_559 * MIB);
        assert_eq!(device.brand().unwrap(), Brand::Nvidia);
        assert_eq!(device.architecture().unwrap(), DeviceArchitecture::Hopper);
        let capability = device.cuda_compute_capability().unwrap();
        assert_eq!((capability.major, capability.minor), (9, 0));
        let pci = device.pci_info().unwrap();
        assert_eq!(pci.bus_id, gpu.pci_bus_id);
        assert_eq!(pci.pci_device_id, 0x2330_10DE);
        assert_eq!(Some(device.serial().unwrap()), gpu.serial);
        assert_eq!(device.power_usage().unwrap(), 70_000);
        assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), 32);
        assert!(device.is_ecc_enabled().unwrap().currently_enabled);
        let by_uuid = bench.nvml.device_by_uuid(gpu.uuid.as_str()).unwrap();
        assert_eq!(by_uuid.index().unwrap(), index);
        let by_bus = bench.nvml.device_by_pci_bus_id(gpu.pci_bus_id.as_str()).unwrap();
        assert_eq!(by_bus.uuid().unwrap(), gpu.uuid);
    }
    assert!(matches!(bench.nvml.device_by_index(8), Err(NvmlError::InvalidArg)));
    assert!(matches!(bench.nvml.device_by_uuid("GPU-none"), Err(NvmlError::NotFound)));
}

#[test]
fn a_change_takes_effect_in_the_next_call() {
    let bench = Bench::new(&State::h100(2));
    let device = bench.nvml.device_by_index(1).unwrap();
    for round in 1..200_u32 {
        bench.change(|state| state.gpus[1].temperature_c = round);
        assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), round);
    }
    bench.change(|state| *state = State::h100(5));
    assert_eq!(bench.nvml.device_count().unwrap(), 5);
}

#[test]
fn processes_and_their_memory() {
    let bench = Bench::new(&State::h100(2));
    let device = bench.nvml.device_by_index(0).unwrap();
    assert!(device.running_compute_processes().unwrap().is_empty());
    bench.change(|state| {
        for pid in 100..140 {
            state.gpus[0].run(pid, 10);
        }
        state.gpus[0].processes[0].name = Some("python3".into());
        state.gpus[0].processes.push(Process { mps: true, ..Process::new(7, 5) });
    });
    let processes = device.running_compute_processes().unwrap();
    assert_eq!(processes.iter().map(|p| p.pid).collect::<Vec<_>>(), (100..140).collect::<Vec<_>>());
    assert!(processes.iter().all(|p| p.used_gpu_memory == UsedGpuMemory::Used(10 * MIB)));
    assert!(processes.iter().all(|p| p.gpu_instance_id.is_none() && p.compute_instance_id.is_none()));
    assert_eq!(device.memory_info().unwrap().used, 400 * MIB);
    assert_eq!(bench.nvml.sys_process_name(100, 64).unwrap(), "python3");
    assert_eq!(bench.nvml.sys_process_name(100, 7).unwrap(), "python", "cut to the buffer");
    assert!(matches!(bench.nvml.sys_process_name(101, 64), Err(NvmlError::NotFound)));
    let mps = device.mps_running_compute_processes().unwrap();
    assert_eq!(mps.iter().map(|p| p.pid).collect::<Vec<_>>(), [7]);
    bench.change(|state| assert!(state.gpus[0].end(100)));
    assert_eq!(device.running_compute_processes().unwrap().len(), 39);
    assert_eq!(device.memory_info().unwrap().used, 390 * MIB);
}

#[test]
fn errors_rows_and_the_recovery_action() {
    let bench = Bench::new(&State::a100(1));
    let device = bench.nvml.device_by_index(0).unwrap();
    bench.change(|state| {
        let gpu = &mut state.gpus[0];
        gpu.recovery_action = RecoveryAction::DrainAndReset;
        gpu.remapped_rows.as_mut().unwrap().pending = true;
        gpu.remapped_rows.as_mut().unwrap().uncorrectable = 3;
        gpu.ecc.as_mut().unwrap().uncorrected_volatile = 9;
    });
    let ecc = |kind| device.total_ecc_errors(kind, EccCounter::Volatile).unwrap();
    assert_eq!(ecc(MemoryError::Uncorrected), 9);
    assert_eq!(ecc(MemoryError::Corrected), 0);
    let fields = device.field_values_for(&[FieldId(230), FieldId(143), FieldId(144), FieldId(9999)]).unwrap();
    let value = |at: usize| {
        let field: &nvml_wrapper::struct_wrappers::device::FieldValueSample = fields[at].as_ref().unwrap();
        format!("{:?}", field.value.as_ref().unwrap())
    };
    assert_eq!(value(0), "U32(4)");
    assert_eq!(value(1), "U32(3)");
    assert_eq!(value(2), "U32(1)");
    assert!(matches!(fields[3].as_ref().unwrap().value, Err(NvmlError::NotSupported)));
}

#[test]
fn a_missing_or_broken_file_means_no_driver() {
    let folder = tempfile::tempdir().unwrap();
    let installed = Installed::new(folder.path(), &State::t4(1)).unwrap();
    fs::remove_file(installed.state_path()).unwrap();
    assert!(matches!(open(&installed), Err(NvmlError::DriverNotLoaded)));
    fs::write(installed.state_path(), "{").unwrap();
    assert!(matches!(open(&installed), Err(NvmlError::DriverNotLoaded)));
    State::t4(3).write(installed.state_path()).unwrap();
    let nvml = open(&installed).unwrap();
    assert_eq!(nvml.device_count().unwrap(), 3);
    // Later, the last good state stays.
    fs::write(installed.state_path(), "{").unwrap();
    assert_eq!(nvml.device_count().unwrap(), 3);
    fs::remove_file(installed.state_path()).unwrap();
    assert_eq!(nvml.device_count().unwrap(), 3);
    State::t4(4).write(installed.state_path()).unwrap();
    assert_eq!(nvml.device_count().unwrap(), 4);
}

#[test]
fn a_driver_that_does_not_load() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = State::t4(1);
    state.faults.push(Fault::fail("nvmlInit*", Code::LibRmVersionMismatch));
    let installed = Installed::new(folder.path(), &state).unwrap();
    assert!(matches!(open(&installed), Err(NvmlError::LibRmVersionMismatch)));
    installed.change(|state| state.faults.clear()).unwrap();
    assert!(open(&installed).is_ok());
}

/// Runs itself in a child process that has the variable, since a process cannot safely change its own environment.
#[test]
fn the_environment_names_the_file() {
    const VARIABLE: &str = "FAKE_NVML_CONFIG";
    if env::var_os(VARIABLE).is_some() {
        let library = fake_nvml::library_path().unwrap();
        let nvml = Nvml::builder().lib_path(library.as_os_str()).init();
        assert_eq!(nvml.unwrap().device_count().unwrap(), 6);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("elsewhere.json");
    State::t4(6).write(&path).unwrap();
    let child = Command::new(env::current_exe().unwrap())
        .args(["--exact", "show::the_environment_names_the_file"])
        .env(VARIABLE, &path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}
