//! What NVML answered on this machine as a state file of the fake NVML (`tests/fake-nvml`), so that tests elsewhere can
//! run against the same answers.

use crate::nvml::{Gpu, Report};
use fake_nvml::{
    Code, Ecc, Fault, Gpu as FakeGpu, Instance, Mig, NvLink, RecoveryAction, RemappedRows, Remote, State,
};
use std::collections::BTreeMap;

/// The other end of a link that names none.
const NO_BUS: &str = "00000000:00:00.0";
const MIB: u64 = 1024 * 1024;

/// The state that answers as NVML did: its GPUs, and a fault for each call that failed.
pub(crate) fn state(report: &Report) -> State {
    let mut state = State {
        gpus: report.gpus.iter().filter_map(|read| gpu(read, &report.gpus)).collect(),
        ..State::default()
    };
    if let Some(version) = &report.driver_version {
        state.driver_version.clone_from(version);
    }
    if let Some(version) = report.cuda_version {
        state.cuda_version = version;
    }
    state.faults = faults(report);
    state
}

fn gpu(read: &Gpu, gpus: &[Gpu]) -> Option<FakeGpu> {
    let (total, used, reserved) = read.memory.unwrap_or_default();
    let name = read.name.clone().unwrap_or_default();
    let mut gpu = FakeGpu::new(read.uuid.clone()?, name, total / MIB, read.bus.clone()?);
    (gpu.memory_used_mib, gpu.memory_reserved_mib) = (used / MIB, reserved / MIB);
    (gpu.pci_device_id, gpu.pci_subsystem_id) = (read.pci_device_id, read.pci_subsystem_id);
    (gpu.minor, gpu.numa_node) = (read.minor, read.numa_node);
    gpu.compute_capability = read.capability.unwrap_or(gpu.compute_capability);
    gpu.brand = read.brand.unwrap_or(gpu.brand);
    gpu.architecture = read.architecture.unwrap_or(gpu.architecture);
    gpu.mig = read.mig.map(|(current, pending, most)| Mig {
        enabled: current == 1,
        pending: Some(pending == 1),
        max_devices: most,
        privileged: true,
        instances: read.instances.iter().map(instance).collect(),
    });
    gpu.ecc = read.settings.ecc.map(|(current, _)| Ecc {
        enabled: current == 1,
        uncorrected_volatile: read.uncorrected.unwrap_or(0),
        ..Ecc::default()
    });
    gpu.remapped_rows = read.rows.map(|(correctable, uncorrectable, pending, failed)| RemappedRows {
        correctable,
        uncorrectable,
        pending: pending != 0,
        failed: failed != 0,
    });
    gpu.recovery_action = match read.recovery_action {
        Some(1) => RecoveryAction::GpuReset,
        Some(2) => RecoveryAction::NodeReboot,
        Some(3) => RecoveryAction::DrainP2p,
        Some(4) => RecoveryAction::DrainAndReset,
        _ => RecoveryAction::None,
    };
    let links = read.links.iter().rposition(Option::is_some).map_or(0, |last| last + 1);
    gpu.nvlinks =
        read.links[..links].iter().map(|link| link.as_ref().map(|link| nvlink(link, gpus))).collect();
    // The serial number identifies the machine's owner, and nothing depends on it.
    gpu.serial = read.has_serial.then(|| "0".to_owned());
    gpu.temperature_c = read.temperature.unwrap_or(gpu.temperature_c);
    gpu.power_mw = read.power_mw.unwrap_or(gpu.power_mw);
    gpu.power_limit_mw = read.settings.power_limit_mw.unwrap_or(gpu.power_limit_mw);
    Some(gpu)
}

fn nvlink(link: &crate::nvml::Link, gpus: &[Gpu]) -> NvLink {
    let bus = link.remote_bus.as_deref().unwrap_or(NO_BUS);
    let peer = gpus.iter().find(|gpu| gpu.bus.as_deref() == Some(bus)).and_then(|gpu| gpu.uuid.clone());
    NvLink { remote: peer.map_or_else(|| Remote::Switch(bus.to_owned()), Remote::Gpu), active: link.active }
}

fn instance(read: &crate::nvml::Instance) -> Instance {
    Instance {
        uuid: read.uuid.clone(),
        gpu_instance: read.gpu_instance,
        compute_instance: read.compute_instance,
        // The name ends as in `NVIDIA H100 80GB HBM3 MIG 1g.10gb`.
        profile: read.name.rsplit(' ').next().unwrap_or_default().to_owned(),
        memory_mib: read.memory_mib,
        memory_used_mib: 0,
        slices: read.slices,
        multiprocessors: 0,
    }
}

/// A fault for each call of a GPU that always failed with the same code. One that depends on its argument, such as the
/// number of a link, is answered by the fake itself.
fn faults(report: &Report) -> Vec<Fault> {
    let mut codes: BTreeMap<(&str, u32), Vec<&str>> = BTreeMap::new();
    for call in &report.calls {
        if let Some(index) = call.gpu {
            codes.entry((&call.name, index)).or_default().push(&call.code);
        }
    }
    let same = codes.into_iter().filter(|(_, codes)| codes.windows(2).all(|pair| pair[0] == pair[1]));
    let fault = |((name, index), codes): ((&str, u32), Vec<&str>)| {
        let code: Code = serde_json::from_value((*codes.first()?).into()).ok()?;
        let gpu = report.gpus.iter().find(|gpu| gpu.index == index)?;
        Some(Fault::fail(name, code).of_gpu(gpu.uuid.clone()?))
    };
    same.filter_map(fault).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvml;
    use fake_nvml::Installed;

    /// The calls without their durations.
    fn calls(report: &Report) -> Vec<(String, Option<u32>, Option<u32>, String)> {
        let call = |call: &nvml::Call| (call.name.clone(), call.gpu, call.argument, call.code.clone());
        report.calls.iter().map(call).collect()
    }

    #[test]
    fn the_fake_answers_from_the_fixture_as_the_library_did() {
        let mut state = State::h100(1);
        let uuid = state.gpus[0].uuid.clone();
        state.driver_version = "580.159.04".into();
        state.gpus[0].memory_used_mib = 512;
        for (call, code) in [
            ("nvmlDeviceGetRemappedRows", Code::NotSupported),
            ("nvmlDeviceGetMemoryInfo_v2", Code::FunctionNotFound),
            ("nvmlDeviceGetSerial", Code::NoPermission),
        ] {
            state.faults.push(Fault::fail(call, code).of_gpu(&uuid));
        }
        let folder = tempfile::tempdir().unwrap();
        let first = Installed::new(&folder.path().join("first"), &state).unwrap();
        let read = nvml::read(first.library()).unwrap();
        let second = Installed::new(&folder.path().join("second"), &super::state(&read)).unwrap();
        let again = nvml::read(second.library()).unwrap();
        assert_eq!(calls(&again), calls(&read));
        assert_eq!(again.driver_version.as_deref(), Some("580.159.04"));
        assert_eq!(again.gpus, read.gpus);
    }

    #[test]
    fn a_call_that_depends_on_its_argument_is_no_fault() {
        let call = |argument, code: &str| nvml::Call {
            name: "nvmlDeviceGetGpuInstanceProfileInfo".into(),
            gpu: Some(0),
            argument: Some(argument),
            code: code.into(),
            us: 1,
        };
        let mut report = Report {
            gpus: vec![Gpu { uuid: Some("GPU-a".into()), ..Gpu::default() }],
            calls: vec![call(0, "SUCCESS"), call(5, "NOT_SUPPORTED")],
            ..Report::default()
        };
        assert!(faults(&report).is_empty());
        report.calls.remove(0);
        assert_eq!(faults(&report).len(), 1);
    }
}
