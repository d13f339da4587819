//! Every symbol that a program may bind is there.

use fake_nvml::State;
use nvml_wrapper::error::NvmlError;

use crate::Bench;

/// Symbols that NVIDIA's device plugin and GPU feature discovery reach through go-nvml, and some of each family that is
/// not built here.
const NAMES: &str = "
    nvmlInit nvmlInit_v2 nvmlInitWithFlags nvmlShutdown nvmlErrorString
    nvmlSystemGetDriverVersion nvmlSystemGetNVMLVersion nvmlSystemGetCudaDriverVersion nvmlSystemGetCudaDriverVersion_v2
    nvmlSystemGetProcessName nvmlDeviceGetCount nvmlDeviceGetCount_v2 nvmlDeviceGetHandleByIndex
    nvmlDeviceGetHandleByIndex_v2 nvmlDeviceGetHandleByUUID nvmlDeviceGetHandleByPciBusId_v2 nvmlDeviceGetUUID
    nvmlDeviceGetName nvmlDeviceGetIndex nvmlDeviceGetMinorNumber nvmlDeviceGetMemoryInfo nvmlDeviceGetMemoryInfo_v2
    nvmlDeviceGetPciInfo nvmlDeviceGetPciInfo_v2 nvmlDeviceGetPciInfo_v3 nvmlDeviceGetMigMode
    nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetMigDeviceHandleByIndex nvmlDeviceGetDeviceHandleFromMigDeviceHandle
    nvmlDeviceIsMigDeviceHandle nvmlDeviceGetGpuInstanceId nvmlDeviceGetComputeInstanceId nvmlDeviceGetAttributes
    nvmlDeviceGetAttributes_v2 nvmlDeviceGetGpuInstanceById nvmlGpuInstanceGetInfo
    nvmlGpuInstanceGetComputeInstanceById nvmlComputeInstanceGetInfo nvmlComputeInstanceGetInfo_v2
    nvmlDeviceGetGpuInstanceProfileInfo nvmlDeviceGetGpuInstanceProfileInfoV
    nvmlGpuInstanceGetComputeInstanceProfileInfo nvmlDeviceGetCudaComputeCapability nvmlDeviceGetBrand
    nvmlDeviceGetArchitecture nvmlDeviceGetAddressingMode nvmlDeviceGetGpuFabricInfo nvmlDeviceGetGpuFabricInfoV
    nvmlDeviceGetNumaNodeId nvmlDeviceGetTopologyCommonAncestor nvmlDeviceGetNvLinkState
    nvmlDeviceGetNvLinkRemotePciInfo nvmlDeviceGetNvLinkRemotePciInfo_v2 nvmlDeviceGetNvLinkRemoteDeviceType
    nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetComputeRunningProcesses_v2
    nvmlDeviceGetComputeRunningProcesses_v3 nvmlDeviceGetMPSComputeRunningProcesses_v3 nvmlDeviceGetFieldValues
    nvmlDeviceGetRemappedRows nvmlDeviceGetTotalEccErrors nvmlDeviceGetEccMode nvmlDeviceGetUtilizationRates
    nvmlDeviceGetTemperature nvmlDeviceGetTemperatureV nvmlDeviceGetPowerUsage nvmlEventSetCreate nvmlEventSetFree
    nvmlEventSetWait nvmlEventSetWait_v2 nvmlDeviceRegisterEvents nvmlDeviceGetSupportedEventTypes
    nvmlDeviceGetFanSpeed nvmlDeviceSetMigMode nvmlDeviceGetSamples nvmlVgpuInstanceGetUUID nvmlGpmMetricsGet
    nvmlUnitGetCount nvmlDeviceGetGridLicensableFeatures_v4 nvmlDeviceGetHostname_v1 nvmlSystemGetCPER_v1";

#[test]
fn a_program_finds_every_symbol() {
    let bench = Bench::new(&State::t4(1));
    let library = &bench.nvml.lib().__library;
    for name in NAMES.split_whitespace() {
        // SAFETY: the symbol is looked up and not called.
        let found = unsafe { library.get::<*const ()>(name.as_bytes()) };
        assert!(found.is_ok(), "{name}");
    }
}

#[test]
fn missing_functions_are_not_supported_and_do_not_crash() {
    let bench = Bench::new(&State::t4(1));
    let device = bench.nvml.device_by_index(0).unwrap();
    assert!(matches!(device.fan_speed(0), Err(NvmlError::NotSupported)));
}
