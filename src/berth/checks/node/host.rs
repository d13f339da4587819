//! The node itself: driver, CDI specs, container runtime.

use super::line::Line;
use crate::config::{Config, GpuSource};
use berth_kubelet::DeviceListStrategy;
use serde::Deserialize;
use std::fs::{read_dir, read_to_string};
use std::path::{Path, PathBuf};

/// The driver's kernel module. Its files are visible in every mount namespace.
pub(super) fn driver(config: &Config) -> Line {
    const CHECK: &str = "driver";
    if let GpuSource::Sim(profile) = &config.gpus {
        return Line::ok(CHECK, format!("not needed: GPUs are simulated ({profile})"));
    }
    let fix = "install the NVIDIA driver and load it (modprobe nvidia; nvidia-smi shows it)";
    let Ok(version) = read_to_string("/proc/driver/nvidia/version") else {
        return Line::fail(CHECK, "the nvidia kernel module is not loaded", fix);
    };
    let version =
        version.lines().next().unwrap_or_default().trim_start_matches("NVRM version:").trim().to_owned();
    if !Path::new("/dev/nvidiactl").exists() && !config.edits.driver_root.join("dev/nvidiactl").exists() {
        let fix = "run nvidia-smi once, or `nvidia-modprobe -u -c=0`; in a pod: mount /dev";
        return Line::warn(CHECK, format!("{version}, but /dev/nvidiactl does not exist"), fix);
    }
    Line::ok(CHECK, version)
}

fn uses_cdi(config: &Config) -> bool {
    let strategies = &config.edits.strategies;
    strategies.contains(&DeviceListStrategy::CdiCri)
        || strategies.contains(&DeviceListStrategy::CdiAnnotations)
}

pub(super) fn cdi(config: &Config, root: &Path) -> Line {
    const CHECK: &str = "CDI specs";
    if !uses_cdi(config) {
        return Line::ok(CHECK, "not needed: no CDI strategy is configured");
    }
    let kind = &config.edits.cdi_kind;
    let folders = ["etc/cdi", "var/run/cdi"].map(|f| root.join(f));
    match folders.iter().find_map(|folder| find_spec(folder, kind)) {
        Some(file) => Line::ok(CHECK, format!("{} names the kind {kind}", file.display())),
        None => Line::fail(
            CHECK,
            format!("no spec of the kind {kind} in /etc/cdi or /var/run/cdi"),
            "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        ),
    }
}

/// The key of a CDI spec that is read.
#[derive(Deserialize)]
struct CdiSpec {
    kind: String,
}

/// A spec file that names this kind, in YAML or JSON.
fn find_spec(folder: &Path, kind: &str) -> Option<PathBuf> {
    let names_kind = |path: &PathBuf| {
        let text = read_to_string(path).unwrap_or_default();
        berth_files::yaml::from_str::<CdiSpec>(&text).is_ok_and(|spec| spec.kind == kind)
    };
    let files = read_dir(folder).ok()?.filter_map(|entry| entry.ok().map(|e| e.path()));
    let mut specs = files.filter(|p| p.extension().is_some_and(|e| e == "yaml" || e == "json"));
    specs.find(names_kind)
}

/// NVIDIA's runtime, which turns `NVIDIA_VISIBLE_DEVICES` into devices.
pub(super) fn runtime(config: &Config, root: &Path) -> Line {
    const CHECK: &str = "nvidia runtime";
    let strategies = &config.edits.strategies;
    let needs_runtime = strategies.contains(&DeviceListStrategy::Envvar)
        || strategies.contains(&DeviceListStrategy::VolumeMounts);
    if !needs_runtime {
        return Line::ok(CHECK, "not needed: the container runtime injects GPUs by CDI");
    }
    let folders = ["usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit"];
    let installed =
        folders.map(|p| root.join(p).join("nvidia-container-runtime")).into_iter().find(|p| p.exists());
    let Some(program) = installed else {
        let fix = "install the NVIDIA container toolkit, then nvidia-ctk runtime configure --runtime=containerd; or \
                   use CDI: --device-list-strategy cdi-cri";
        return Line::warn(CHECK, "nvidia-container-runtime was not found", fix);
    };
    let configs = ["etc/containerd/config.toml", "etc/crio/crio.conf", "etc/docker/daemon.json"];
    let config_folders = ["etc/containerd/conf.d", "etc/crio/crio.conf.d"];
    let entries = config_folders.iter().filter_map(|f| read_dir(root.join(f)).ok()).flatten();
    let files = configs.iter().map(|c| root.join(c)).chain(entries.filter_map(|e| e.ok().map(|e| e.path())));
    let names_runtime =
        |path: &PathBuf| read_to_string(path).is_ok_and(|t| t.contains("nvidia-container-runtime"));
    match files.into_iter().find(names_runtime) {
        Some(file) => Line::ok(CHECK, format!("{} is used by {}", program.display(), file.display())),
        None => Line::warn(
            CHECK,
            format!("{} is installed, but no container runtime's configuration names it", program.display()),
            "nvidia-ctk runtime configure --runtime=containerd && systemctl restart containerd",
        ),
    }
}
