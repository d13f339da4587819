//! Converts NVML's values to the kernel's types. Pure.

use super::raw::FabricRegistration;
use berth_kernel::hardware::gpu::{Part, Path};
use berth_kernel::ids::pci::PciBusId;
use nvml_wrapper::enum_wrappers::device::TopologyLevel;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessUtilizationSample;
use std::collections::BTreeMap;

/// Bytes to MiB, rounded down.
pub(super) fn mib(bytes: u64) -> u64 {
    bytes / (1024 * 1024)
}

/// A percentage of NVML.
pub(super) fn percent(value: u32) -> u8 {
    u8::try_from(value.min(100)).unwrap_or(100)
}

/// The newest utilisation of the GPU's multiprocessors by each process (nvml.h, `smUtil`), percent. Some drivers return
/// entries that they did not fill: those without a process, or above 100, are left out.
pub(super) fn newest_percents(samples: &[ProcessUtilizationSample]) -> BTreeMap<u32, u8> {
    let mut samples: Vec<_> =
        samples.iter().filter(|sample| sample.pid != 0 && sample.sm_util <= 100).collect();
    samples.sort_by_key(|sample| sample.timestamp);
    samples.into_iter().map(|sample| (sample.pid, percent(sample.sm_util))).collect()
}

/// The ids of a MIG instance on its GPU: GPU instance and compute instance. `None` for a whole GPU.
pub(super) fn mig_ids(part: &Part) -> Option<(u32, u32)> {
    part.mig.as_ref().map(|mig| (mig.gpu_instance, mig.compute_instance))
}

/// The name of a MIG profile, such as `1g.10gb+me`: the end of NVML's name of the instance, which all drivers with MIG
/// set; else built from memory and `slices`, those of the GPU instance and of the compute instance, by NVIDIA's rule.
/// The suffix for extras is added, since not every driver's name has it.
pub(super) fn profile(
    model: &str,
    slices: Option<(u32, u32)>,
    gpu_instance_profile: Option<u32>,
    memory_mib: u64,
    gpu_mib: u64,
) -> String {
    let extras = extras(gpu_instance_profile);
    if let Some((_, profile)) = model.rsplit_once(" MIG ") {
        let profile = profile.trim();
        let extras = if profile.contains(['+', '-']) { "" } else { extras };
        return format!("{profile}{extras}");
    }
    let gb = profile_gb(memory_mib, gpu_mib);
    match slices {
        Some((of_gpu, of_compute)) => {
            let compute = if of_gpu == of_compute { String::new() } else { format!("{of_compute}c.") };
            format!("{compute}{of_gpu}g.{gb}gb{extras}")
        }
        None => format!("{gb}gb"),
    }
}

/// The suffix of the names of these `NVML_GPU_INSTANCE_PROFILE_*`: for media extensions, for all or none of them, and
/// for graphics.
fn extras(profile: Option<u32>) -> &'static str {
    match profile {
        Some(7 | 8) => "+me",
        Some(10..=12 | 17) => "+gfx",
        Some(13 | 14) => "-me",
        Some(15 | 16) => "+me.all",
        _ => "",
    }
}

/// The memory in a profile's name, GB: the eighths of the GPU's memory that the instance has, rounded up, times the
/// GPU's GiB, rounded up. So `7g.80gb` for an 80 GB board, although 79 GiB of it are usable.
fn profile_gb(instance_mib: u64, gpu_mib: u64) -> u64 {
    let eighths = (8 * instance_mib).div_ceil(gpu_mib.max(1)).clamp(1, 8);
    (eighths * gpu_mib.div_ceil(1024) + 4) / 8
}

/// The path for NVML's common ancestor.
pub(super) fn path(level: &TopologyLevel) -> Path {
    match level {
        TopologyLevel::Internal => Path::SameBoard,
        TopologyLevel::Single => Path::SingleSwitch,
        TopologyLevel::Multiple => Path::MultiSwitch,
        TopologyLevel::HostBridge => Path::HostBridge,
        TopologyLevel::Node => Path::SameNuma,
        TopologyLevel::System => Path::CrossNuma,
    }
}

/// The path between two GPUs by their NUMA nodes, where NVML does not report it (in some virtual machines).
pub(super) fn path_by_numa(a: Option<u32>, b: Option<u32>) -> Path {
    if a.is_some() && a == b { Path::SameNuma } else { Path::CrossNuma }
}

/// The active NVLinks of one GPU: their number by the PCI bus id of the other end, and the number of those to switches.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct OutgoingLinks {
    /// Links to other GPUs.
    pub(super) direct: BTreeMap<PciBusId, u32>,
    /// Links to NVSwitches.
    pub(super) switched: u32,
}

/// The number of active NVLinks between two GPUs. Over switches each GPU reaches each other with all of its links, so
/// the smaller number counts. A direct link counts only if it is active on both sides.
pub(super) fn nvlinks_between(
    a: (Option<PciBusId>, &OutgoingLinks),
    b: (Option<PciBusId>, &OutgoingLinks),
) -> u32 {
    let to = |links: &OutgoingLinks, bus: Option<PciBusId>| {
        bus.and_then(|bus| links.direct.get(&bus)).copied().unwrap_or(0)
    };
    to(a.1, b.0).min(to(b.1, a.0)) + a.1.switched.min(b.1.switched)
}

/// A field's value as a `u32`, if it fits.
pub(super) fn to_u32(value: &SampleValue) -> Option<u32> {
    match value {
        SampleValue::U32(value) => Some(*value),
        SampleValue::U64(value) => u32::try_from(*value).ok(),
        SampleValue::I64(value) => u32::try_from(*value).ok(),
        SampleValue::F64(_) => None,
    }
}

/// The text of a recovery action (`nvmlDeviceGpuRecoveryAction_t`); `None` for no action.
pub(super) fn recovery_text(action: u32) -> Option<String> {
    let required = match action {
        0 => return None,
        1 => "a reset of the GPU",
        2 => "a reboot of the node",
        3 => "a stop of all peer-to-peer work",
        4 => "a stop of its work and then a reset of the GPU",
        5 => "a recovery of the IMEX domain",
        6 => "a reset of its PCIe bus",
        7 => "a reboot of the system",
        _ => "an action that this release does not know",
    };
    Some(format!("the GPU requires {required} (recovery action {action})"))
}

/// Why a GPU whose registration with the fabric is in this state cannot be used: CUDA fails with error 802 until the
/// registration has completed (nvml.h, `nvmlGpuFabricInfo_t`). `None` for a GPU that is ready or has no fabric.
pub(super) fn fabric_error(fabric: FabricRegistration) -> Option<String> {
    match (fabric.state, fabric.status) {
        (FabricRegistration::NOT_SUPPORTED, _) | (FabricRegistration::COMPLETED, 0) => None,
        (FabricRegistration::COMPLETED, status) => Some(format!(
            "its registration with the NVLink fabric failed (NVML error {status}): check nvidia-fabricmanager and its log"
        )),
        _ => Some(
            "its NVLink fabric is not ready: if that lasts, check that nvidia-fabricmanager runs".to_owned(),
        ),
    }
}

/// Whether an error on one GPU concerns the whole driver: it was unloaded, or replaced by one of another version than
/// the library.
pub(super) fn is_driver_error(error: &NvmlError) -> bool {
    matches!(error, NvmlError::Uninitialized | NvmlError::DriverNotLoaded | NvmlError::LibRmVersionMismatch)
}

/// The text of an NVML error on one GPU, with the remedy if it is known.
pub(super) fn gpu_error_text(call: &str, error: &NvmlError) -> String {
    match error {
        NvmlError::GpuLost => {
            format!("{call}: the GPU fell off the bus; reset it or reboot the node")
        }
        NvmlError::ResetRequired => format!("{call}: the GPU needs a reset before it can be used"),
        error => format!("{call}: {error}"),
    }
}

/// A short description of an XID, by NVIDIA's guide "XID errors".
pub(super) fn xid_text(xid: u64) -> &'static str {
    match xid {
        13 => "graphics engine exception, by the application",
        31 => "GPU memory page fault, by the application",
        43 => "the GPU stopped processing, by the application",
        45 => "preemptive clean-up after earlier errors",
        48 => "double bit ECC error",
        61 | 62 => "internal micro-controller halt",
        63 => "a row remapping or page retirement was recorded",
        64 => "a row remapping or page retirement failed",
        68 => "video processor exception, by the application",
        74 => "NVLink error",
        79 => "the GPU fell off the bus",
        92 => "many single bit ECC errors",
        94 => "contained memory error",
        95 => "uncontained memory error",
        109 => "context switch timeout, by the application",
        119 => "the GPU's system processor timed out",
        120 => "the GPU's system processor failed",
        _ => "see NVIDIA's guide to XID errors",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(direct: &[(&str, u32)], switched: u32) -> OutgoingLinks {
        OutgoingLinks {
            direct: direct.iter().filter_map(|(text, n)| Some((bus(text)?, *n))).collect(),
            switched,
        }
    }

    fn bus(text: &str) -> Option<PciBusId> {
        PciBusId::parse(text).ok()
    }

    #[test]
    fn the_newest_sample_of_a_process_counts_and_entries_that_are_not_filled_do_not() {
        let sample = |pid, timestamp, sm_util| ProcessUtilizationSample {
            pid,
            timestamp,
            sm_util,
            mem_util: 0,
            enc_util: 0,
            dec_util: 0,
        };
        let samples =
            [sample(7, 20, 40), sample(7, 10, 90), sample(8, 5, 3), sample(0, 9, 1), sample(9, 9, 4_000_000)];
        assert_eq!(newest_percents(&samples), BTreeMap::from([(7, 40), (8, 3)]));
    }

    #[test]
    fn links_over_switches_count_as_the_weaker_side() {
        let (a, b) = (links(&[], 18), links(&[], 12));
        assert_eq!(nvlinks_between((bus("01:00.0"), &a), (bus("02:00.0"), &b)), 12);
        assert_eq!(nvlinks_between((None, &a), (None, &links(&[], 0))), 0);
    }

    #[test]
    fn direct_links_count_where_both_sides_have_them() {
        let a = links(&[("00000000:0F:00.0", 4), ("0000:47:00.0", 2)], 0);
        let b = links(&[("0000:07:00.0", 3)], 0);
        let between = nvlinks_between((bus("00000000:07:00.0"), &a), (bus("0000:0f:00.0"), &b));
        assert_eq!(between, 3);
        assert_eq!(nvlinks_between((bus("0:07:00.0"), &a), (bus("0:99:00.0"), &b)), 0);
        assert_eq!(nvlinks_between((bus("0:07:00.0"), &a), (None, &b)), 0, "not known where it is");
    }

    #[test]
    fn the_memory_in_a_profiles_name_is_that_of_nvidias_lists() {
        // Memory of the instance and of its GPU, MiB, and the number in the profile's name.
        for (instance, gpu, gb) in [
            (4_864, 40_536, 5),
            (9_856, 81_559, 10),
            (20_096, 81_559, 20),
            (40_448, 81_559, 40),
            (80_912, 81_559, 80),
            (16_384, 143_771, 18),
            (143_167, 143_771, 141),
        ] {
            assert_eq!(profile_gb(instance, gpu), gb, "{instance} of {gpu}");
        }
    }

    #[test]
    fn profiles_come_from_the_name_or_from_the_slices() {
        let with = |name: &str, slices, gpu_instance_profile| {
            profile(name, slices, gpu_instance_profile, 9856, 81_559)
        };
        let named = |name, slices| with(name, slices, None);
        assert_eq!(named("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), "1g.10gb");
        assert_eq!(named("NVIDIA A100 MIG 1c.3g.20gb", None), "1c.3g.20gb");
        assert_eq!(named("NVIDIA X", Some((1, 1))), "1g.10gb");
        assert_eq!(named("NVIDIA X", Some((3, 1))), "1c.3g.10gb");
        assert_eq!(with("NVIDIA X MIG 1g.10gb", None, Some(7)), "1g.10gb+me");
        assert_eq!(with("NVIDIA X MIG 1g.10gb+me", None, Some(7)), "1g.10gb+me");
        assert_eq!(with("NVIDIA X", Some((1, 1)), Some(13)), "1g.10gb-me");
        assert_eq!(with("NVIDIA X", Some((2, 2)), Some(11)), "2g.10gb+gfx");
        assert_eq!(with("NVIDIA X", Some((1, 1)), Some(17)), "1g.10gb+gfx");
    }
}
