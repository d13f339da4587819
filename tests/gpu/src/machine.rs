//! What the system shows of its GPUs without NVML: nvidia-smi, `/proc` and sysfs.

use anyhow::{Context as _, ensure};
use berth_kernel::ids::pci::PciBusId;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The queried fields, in the order of [`SmiGpu`]. `nvidia-smi --help-query-gpu` lists their names.
const SMI_FIELDS: &str = "index,uuid,pci.bus_id,memory.total,driver_version";

/// A GPU as nvidia-smi shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SmiGpu {
    pub(crate) index: u32,
    pub(crate) uuid: String,
    /// As `00000000:65:00.0`.
    pub(crate) bus: String,
    /// `None` where nvidia-smi shows no number, such as `[N/A]`.
    pub(crate) memory_mib: Option<u64>,
    pub(crate) driver: String,
}

/// The GPUs by nvidia-smi; `None` if there is no such program.
///
/// # Errors
/// If it fails, or prints another format.
pub(crate) fn smi() -> anyhow::Result<Option<Vec<SmiGpu>>> {
    let query = format!("--query-gpu={SMI_FIELDS}");
    let output = match Command::new("nvidia-smi").arg(query).arg("--format=csv,noheader,nounits").output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        output => output.context("cannot start nvidia-smi")?,
    };
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "nvidia-smi ended with {}: {}", output.status, text.trim());
    parse_smi(&text).map(Some)
}

/// The output of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`.
fn parse_smi(text: &str) -> anyhow::Result<Vec<SmiGpu>> {
    let gpu = |line: &str| {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let [index, uuid, bus, memory, driver] = fields[..] else { return None };
        Some(SmiGpu {
            index: index.parse().ok()?,
            uuid: uuid.to_owned(),
            bus: bus.to_owned(),
            memory_mib: memory.parse().ok(),
            driver: driver.to_owned(),
        })
    };
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.map(|line| gpu(line).with_context(|| format!("nvidia-smi printed {line:?}"))).collect()
}

/// The version of the loaded kernel module; `None` if the file cannot be read.
pub(crate) fn driver_version() -> Option<String> {
    parse_driver_version(&fs::read_to_string("/proc/driver/nvidia/version").ok()?)
}

/// The version in `/proc/driver/nvidia/version`: the first word of the line `NVRM version:` that begins with a digit
/// and has a dot.
fn parse_driver_version(text: &str) -> Option<String> {
    let line = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?;
    let is_version = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
    line.split_whitespace().find(is_version).map(str::to_owned)
}

/// UUID and minor of the GPU on this bus, from `/proc/driver/nvidia/gpus/<bus>/information`; `None` if there is no such
/// file.
pub(crate) fn information(bus: &str) -> Option<(Option<String>, Option<u32>)> {
    let bus = PciBusId::parse(bus).ok()?.sysfs_name();
    let path = format!("/proc/driver/nvidia/gpus/{bus}/information");
    Some(parse_information(&fs::read_to_string(path).ok()?))
}

fn parse_information(text: &str) -> (Option<String>, Option<u32>) {
    let value = |key: &str| {
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(name, _)| name.trim() == key).map(|(_, value)| value.trim().to_owned())
    };
    (value("GPU UUID"), value("Device Minor").and_then(|minor| minor.parse().ok()))
}

/// The NUMA node of the PCI device on this bus; `None` if sysfs has none (-1), or no such device.
pub(crate) fn numa_node(bus: &str) -> Option<u32> {
    let path =
        Path::new("/sys/bus/pci/devices").join(PciBusId::parse(bus).ok()?.sysfs_name()).join("numa_node");
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// The character devices of the running kernel: names by major number.
pub(crate) fn character_devices() -> BTreeMap<u32, String> {
    parse_devices(&fs::read_to_string("/proc/devices").unwrap_or_default())
}

/// The section `Character devices:` of `/proc/devices`.
fn parse_devices(text: &str) -> BTreeMap<u32, String> {
    let section = text.lines().skip_while(|line| *line != "Character devices:").skip(1);
    let lines = section.take_while(|line| !line.trim().is_empty());
    let pair = |line: &str| {
        let (major, name) = line.trim().split_once(' ')?;
        Some((major.parse().ok()?, name.trim().to_owned()))
    };
    lines.filter_map(pair).collect()
}

/// The lines `smi_ms N` of `gpu-probe.sh`.
pub(crate) fn parse_smi_times(probe: &str) -> Vec<u64> {
    probe.lines().filter_map(|line| line.strip_prefix("smi_ms ")?.trim().parse().ok()).collect()
}

/// Whether this machine has a GPU whose driver is loaded, or why not.
pub(crate) fn find_driver() -> Result<(), String> {
    let signs = ["/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"];
    if signs.iter().any(|path| Path::new(path).exists()) {
        return Ok(());
    }
    let devices = fs::read_dir("/sys/bus/pci/devices").into_iter().flatten().flatten();
    let vendor = |folder: &Path| fs::read_to_string(folder.join("vendor")).unwrap_or_default();
    if devices.into_iter().any(|device| vendor(&device.path()).trim() == "0x10de") {
        return Err("there is an NVIDIA device, but its driver is not loaded (modprobe nvidia)".into());
    }
    Err("there is no NVIDIA GPU: no /dev/nvidiactl, no /proc/driver/nvidia".into())
}

/// The process's proportional set size, KiB, from `/proc/<pid>/smaps_rollup`.
///
/// # Errors
/// If the process has ended, or the kernel has no such file.
pub(crate) fn pss_kib(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| path.clone())?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let number = line.and_then(|line| line.trim().trim_end_matches("kB").trim().parse().ok());
    number.with_context(|| format!("{path} has no line Pss"))
}

/// The number of open descriptors and of threads of a process.
///
/// # Errors
/// If the process has ended.
pub(crate) fn descriptors_and_threads(pid: u32) -> anyhow::Result<(usize, usize)> {
    let count = |folder: &str| anyhow::Ok(fs::read_dir(format!("/proc/{pid}/{folder}"))?.count());
    Ok((count("fd")?, count("task")?))
}

/// The files that a process has open whose path `is_wanted`.
pub(crate) fn open_files(pid: u32, is_wanted: impl Fn(&Path) -> bool) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = entries.filter_map(|entry| fs::read_link(entry.path()).ok());
    targets.filter(|path| is_wanted(path)).map(|path| path.display().to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by hand after the format that `nvidia-smi --help-query-gpu` and NVIDIA's page "Useful nvidia-smi
    /// Queries" describe; the second GPU as one in MIG mode that reports no memory.
    const SMI: &str = "\
0, GPU-8a56a4bc-e184-a047-2620-be19fdf913d5, 00000000:65:00.0, 81559, 580.159.04
1, GPU-0c3d9c5a-6f5e-5a7e-b0a4-4a1f4a0e9d21, 00000000:A5:00.0, [N/A], 580.159.04
";

    #[test]
    fn nvidia_smi_is_read_by_line() {
        let gpus = parse_smi(SMI).unwrap();
        assert_eq!(gpus.len(), 2);
        assert_eq!((gpus[0].index, gpus[0].memory_mib), (0, Some(81_559)));
        assert_eq!((gpus[1].bus.as_str(), gpus[1].memory_mib), ("00000000:A5:00.0", None));
        assert_eq!(gpus[1].driver, "580.159.04");
        let error = parse_smi("No devices were found").unwrap_err().to_string();
        assert!(error.contains("No devices were found"), "{error}");
    }

    #[test]
    fn the_driver_version_is_found_for_both_kinds_of_kernel_module() {
        // The forms of the proprietary and of the open kernel modules (`kernel-open/nvidia/nv-procfs.c`, and the
        // version strings of `src/common/inc/nvUnixVersion.h`).
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version:  gcc 11\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@build)  Thu Jan 1\n";
        assert_eq!(parse_driver_version(closed).as_deref(), Some("535.183.01"));
        assert_eq!(parse_driver_version(open).as_deref(), Some("580.159.04"));
        assert_eq!(parse_driver_version("GCC version: 12.2.0"), None);
    }

    #[test]
    fn uuid_and_minor_are_read_from_the_drivers_file() {
        // After `kernel-open/nvidia/nv-procfs.c`, `nv_procfs_read_gpu_info`.
        let text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 45\nGPU UUID: \t GPU-8a56a4bc-e184-a047-2620-be19fdf913d5\n\
                    Video BIOS: \t 96.00.74.00.01\nBus Location: \t 0000:65:00.0\nDevice Minor: \t 3\nGPU Excluded:\t No\n";
        let uuid = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5".to_owned();
        assert_eq!(parse_information(text), (Some(uuid), Some(3)));
        assert_eq!(parse_information("Model: x\n"), (None, None));
    }

    #[test]
    fn only_character_devices_are_read() {
        // After `proc(5)`.
        let text = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n510 nvidia-uvm\n\nBlock devices:\n  7 loop\n";
        let devices = parse_devices(text);
        assert_eq!(devices.get(&510).map(String::as_str), Some("nvidia-uvm"));
        assert!(devices[&195].starts_with("nvidia"));
        assert!(!devices.contains_key(&7));
    }

    #[test]
    fn the_times_of_the_probe_are_read_in_order() {
        assert_eq!(parse_smi_times("== a\nsmi_ms 812\nnvidia-smi failed with 9\nsmi_ms 35\n"), [812, 35]);
    }

    #[test]
    fn this_process_has_memory_descriptors_and_threads() {
        let pid = std::process::id();
        let (descriptors, threads) = descriptors_and_threads(pid).unwrap();
        assert!(descriptors > 2 && threads > 0);
        assert!(pss_kib(pid).is_ok_and(|kib| kib > 100));
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(open_files(pid, |path| path == file.path()).len(), 1);
    }
}
