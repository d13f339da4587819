//! One GPU of the state file.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::instance::Mig;
use crate::link::NvLink;

/// One GPU. Only `uuid`, `name`, `memory_total_mib` and `pci_bus_id` must be given; the rest has quiet defaults.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// `GPU-` and a UUID; at most 79 characters.
    pub uuid: String,
    /// The marketing name, as `nvidia-smi -L` shows it.
    pub name: String,
    /// Memory in MiB; `null` where the driver does not report it (`NOT_SUPPORTED`), as of GB10.
    pub memory_total_mib: Option<u64>,
    /// Memory in use in MiB. The processes' memory is not added to it: say the sum yourself, or use [`Gpu::run`].
    #[serde(default)]
    pub memory_used_mib: u64,
    /// Memory that the driver keeps for itself, in MiB.
    #[serde(default)]
    pub memory_reserved_mib: u64,
    /// `dddddddd:bb:dd.f`, hexadecimal.
    pub pci_bus_id: String,
    /// Device id in the upper, vendor id in the lower 16 bits.
    #[serde(default = "default_pci_device_id")]
    pub pci_device_id: u32,
    /// Subsystem id, in the same form.
    #[serde(default)]
    pub pci_subsystem_id: u32,
    /// N of `/dev/nvidiaN`; by default the position in the list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u32>,
    /// NUMA node of the CPU nearest to the GPU (`nvmlDeviceGetMemoryAffinity`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_node: Option<u32>,
    /// NUMA node that the GPU's own memory is, where the platform has such (`nvmlDeviceGetNumaNodeId`, for example
    /// GH200).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_numa_node: Option<u32>,
    /// CUDA compute capability, major and minor.
    #[serde(default = "default_compute_capability")]
    pub compute_capability: (u32, u32),
    /// `nvmlBrandType_t`; 14 is NVIDIA.
    #[serde(default = "default_brand")]
    pub brand: u32,
    /// `nvmlDeviceArchitecture_t`; 9 is Hopper.
    #[serde(default = "default_architecture")]
    pub architecture: u32,
    /// Board serial number; `NOT_SUPPORTED` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// MIG; absent on models without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Mig>,
    /// The NVLinks, link 0 first; `null` is one that the model does not support. Empty: the model has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlinks: Vec<Option<NvLink>>,
    /// Processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<Process>,
    /// ECC; absent on models without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ecc: Option<Ecc>,
    /// Remapped rows; absent on models before Ampere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remapped_rows: Option<RemappedRows>,
    /// Whether a page of memory waits for its retirement; absent on models that remap rows instead, since Ampere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retired_pages_pending: Option<bool>,
    /// The recovery action that the driver requires (field value 230).
    #[serde(default)]
    pub recovery_action: RecoveryAction,
    /// Core temperature in degrees Celsius.
    #[serde(default = "default_temperature")]
    pub temperature_c: u32,
    /// Power draw in mW.
    #[serde(default = "default_power")]
    pub power_mw: u32,
    /// Power limit in mW.
    #[serde(default = "default_power_limit")]
    pub power_limit_mw: u32,
    /// Share of time in which a kernel ran, in percent.
    #[serde(default)]
    pub utilization_gpu: u32,
    /// Share of time in which memory was read or written, in percent.
    #[serde(default)]
    pub utilization_memory: u32,
    /// The state of the GPU's NVLink fabric; absent on models without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// How long the first handle after `nvmlInit` takes: it starts a GPU that nothing else uses.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cold_start_ms: u64,
    /// A file that is held open from the first handle to `nvmlShutdown`, as `/dev/nvidia0` is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_file: Option<PathBuf>,
    /// The GPU fell off the bus: every call on it answers `GPU_IS_LOST`.
    #[serde(default)]
    pub lost: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "the signature that serde asks for")]
fn is_zero(value: &u64) -> bool {
    *value == 0
}

fn default_pci_device_id() -> u32 {
    0x2330_10DE
}
fn default_compute_capability() -> (u32, u32) {
    (9, 0)
}
fn default_brand() -> u32 {
    14
}
fn default_architecture() -> u32 {
    9
}
fn default_temperature() -> u32 {
    32
}
fn default_power() -> u32 {
    70_000
}
fn default_power_limit() -> u32 {
    700_000
}

impl Gpu {
    /// A GPU with what must be given, and defaults.
    pub fn new(
        uuid: impl Into<String>,
        name: impl Into<String>,
        memory_total_mib: u64,
        pci_bus_id: impl Into<String>,
    ) -> Self {
        Self {
            uuid: uuid.into(),
            name: name.into(),
            memory_total_mib: Some(memory_total_mib),
            memory_used_mib: 0,
            memory_reserved_mib: 0,
            pci_bus_id: pci_bus_id.into(),
            pci_device_id: default_pci_device_id(),
            pci_subsystem_id: 0,
            minor: None,
            numa_node: None,
            memory_numa_node: None,
            compute_capability: default_compute_capability(),
            brand: default_brand(),
            architecture: default_architecture(),
            serial: None,
            mig: None,
            nvlinks: Vec::new(),
            processes: Vec::new(),
            ecc: None,
            remapped_rows: None,
            retired_pages_pending: None,
            recovery_action: RecoveryAction::None,
            temperature_c: default_temperature(),
            power_mw: default_power(),
            power_limit_mw: default_power_limit(),
            utilization_gpu: 0,
            utilization_memory: 0,
            fabric: None,
            cold_start_ms: 0,
            held_file: None,
            lost: false,
        }
    }

    /// Starts a compute process: it is listed, and its memory counts as used.
    pub fn run(&mut self, pid: u32, memory_mib: u64) {
        self.memory_used_mib += memory_mib;
        self.processes.push(Process::new(pid, memory_mib));
    }

    /// Ends a process, gives its memory back, and says whether it was there.
    pub fn end(&mut self, pid: u32) -> bool {
        let Some(at) = self.processes.iter().position(|process| process.pid == pid) else {
            return false;
        };
        let process = self.processes.remove(at);
        self.memory_used_mib = self.memory_used_mib.saturating_sub(process.memory_mib);
        true
    }

    /// Domain, bus and device of `pci_bus_id`; `None` if it is not written as it should be.
    pub(crate) fn pci_address(&self) -> Option<(u32, u32, u32)> {
        pci_address(&self.pci_bus_id)
    }
}

/// Domain, bus and device of `dddddddd:bb:dd.f`; a shorter domain is fine.
pub(crate) fn pci_address(bus_id: &str) -> Option<(u32, u32, u32)> {
    let (domain, rest) = bus_id.split_once(':')?;
    let (bus, rest) = rest.split_once(':')?;
    let (device, function) = rest.split_once('.')?;
    let hex = |text: &str, most: u32| u32::from_str_radix(text, 16).ok().filter(|value| *value <= most);
    hex(function, 7)?;
    Some((hex(domain, u32::MAX)?, hex(bus, 0xff)?, hex(device, 0x1f)?))
}

/// A process on a GPU: a plain compute process, unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Process {
    /// Process id, as the host counts.
    pub pid: u32,
    /// GPU memory in MiB.
    pub memory_mib: u64,
    /// What `nvmlSystemGetProcessName` answers; `NOT_FOUND` if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A client of MPS: listed by the MPS call and not by the compute call.
    #[serde(default)]
    pub mps: bool,
    /// It draws: listed by the graphics call and not by the compute call.
    #[serde(default)]
    pub graphics: bool,
    /// Its memory is reported as `NVML_VALUE_NOT_AVAILABLE`.
    #[serde(default)]
    pub memory_hidden: bool,
    /// Share of the GPU's time that it uses, in percent; absent: the driver has no sample of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub utilization: Option<u32>,
    /// GPU instance id under MIG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Compute instance id under MIG.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
}

impl Process {
    /// A plain compute process.
    pub fn new(pid: u32, memory_mib: u64) -> Self {
        Self {
            pid,
            memory_mib,
            name: None,
            mps: false,
            graphics: false,
            memory_hidden: false,
            utilization: None,
            gpu_instance: None,
            compute_instance: None,
        }
    }
}

/// ECC mode and counters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ecc {
    /// Whether ECC is on.
    #[serde(default = "yes")]
    pub enabled: bool,
    /// Corrected errors since the driver was loaded.
    #[serde(default)]
    pub corrected_volatile: u64,
    /// Uncorrected errors since the driver was loaded.
    #[serde(default)]
    pub uncorrected_volatile: u64,
    /// Corrected errors of the GPU's life.
    #[serde(default)]
    pub corrected_aggregate: u64,
    /// Uncorrected errors of the GPU's life.
    #[serde(default)]
    pub uncorrected_aggregate: u64,
}

fn yes() -> bool {
    true
}

impl Default for Ecc {
    fn default() -> Self {
        Self {
            enabled: true,
            corrected_volatile: 0,
            uncorrected_volatile: 0,
            corrected_aggregate: 0,
            uncorrected_aggregate: 0,
        }
    }
}

/// Rows of GPU memory replaced by spare ones.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RemappedRows {
    /// Rows remapped after correctable errors.
    pub correctable: u32,
    /// Rows remapped after uncorrectable errors.
    pub uncorrectable: u32,
    /// A remapping waits for a reset.
    pub pending: bool,
    /// A remapping failed: the GPU is to be replaced.
    pub failed: bool,
}

/// `nvmlGpuFabricInfo_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Fabric {
    /// How far the registration with the fabric is.
    pub state: FabricState,
    /// The error of a completed registration (`nvmlReturn_t`); 0: none.
    pub status: u32,
}

/// `nvmlGpuFabricState_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FabricState {
    /// The GPU has no fabric.
    NotSupported = 0,
    /// Not started.
    NotStarted = 1,
    /// It runs.
    InProgress = 2,
    /// It is over.
    #[default]
    Completed = 3,
}

/// `nvmlDeviceGpuRecoveryAction_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecoveryAction {
    /// Nothing to do.
    #[default]
    None = 0,
    /// Reset the GPU.
    GpuReset = 1,
    /// Reboot the node.
    NodeReboot = 2,
    /// Drain what uses peer-to-peer.
    DrainP2p = 3,
    /// Drain, then reset.
    DrainAndReset = 4,
    /// Recover the IMEX domain.
    RecoverImex = 5,
    /// Reset the GPU's PCIe bus.
    BusReset = 6,
    /// Reboot the system.
    SystemReboot = 7,
}
