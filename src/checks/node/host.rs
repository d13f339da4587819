//! The node itself: driver, container runtime with its CDI specifications; and what the configuration offers of its
//! GPUs: the MIG strategy, and the MPS daemons of resources.

use super::line::Line;
use berth_config::{Config, GpuSource};
use berth_gpus::nvml::{NvmlOptions, WSL2, is_wsl2};
use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::mig::plan;
use berth_kubelet::Resolution;
use berth_strategy::{Access, NodeVersions, StrategyFinder};
use std::collections::BTreeSet;
use std::fs::read_to_string;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

/// The driver's kernel module. Its files are visible in every mount namespace.
pub(super) fn driver(config: &Config) -> Line {
    const CHECK: &str = "driver";
    if let GpuSource::Sim(profile) = &config.gpus.source {
        return Line::ok(CHECK, format!("not needed: GPUs are simulated ({profile})"));
    }
    let fix = "install the NVIDIA driver and load it (modprobe nvidia; nvidia-smi shows it)";
    let options = NvmlOptions::default();
    if is_wsl2(&options.dxg, &options.driver_version) {
        let (what, fix) = WSL2.split_once(": ").unwrap_or((WSL2, ""));
        return Line::fail(CHECK, what, fix);
    }
    let Ok(version) = read_to_string(&options.driver_version) else {
        return Line::fail(CHECK, "the nvidia kernel module is not loaded", fix);
    };
    let version =
        version.lines().next().unwrap_or_default().trim_start_matches("NVRM version:").trim().to_owned();
    if !Path::new("/dev/nvidiactl").exists()
        && !config.containers.edits.driver_root.join("dev/nvidiactl").exists()
    {
        let fix = "run nvidia-smi once, or `nvidia-modprobe -u -c=0`; in a pod: mount /dev";
        return Line::warn(CHECK, format!("{version}, but /dev/nvidiactl does not exist"), fix);
    }
    Line::ok(CHECK, version)
}

/// How GPUs are passed to containers on this node, as the daemon would decide it.
pub(super) fn strategy(config: &Config, root: &Path, parts: &[Part], versions: &NodeVersions) -> Line {
    const CHECK: &str = "device list strategy";
    let parts: Vec<&Part> = parts.iter().collect();
    let mut finder = StrategyFinder::new(config, root, false);
    let found = finder.find_for(&parts, &BTreeSet::new(), versions, Access::Read);
    let (strategies, why, warning) = match &found.resolution {
        Resolution::NoStrategy(error) => return Line::fail(CHECK, &error.what, &error.fix),
        Resolution::Works { strategies, why, warning, .. } => (strategies, why, warning),
    };
    let names: Vec<_> = strategies.iter().map(|strategy| strategy.as_str()).collect();
    let mut what = format!("{}: {why}", names.join(","));
    let mut fix = None;
    if let Some(error) = warning {
        what += &format!("; {}", error.what);
        fix = Some(error.fix.clone());
    }
    for warning in found.missing_nodes.iter().chain(&found.warnings) {
        what += &format!("; {warning}");
        fix = fix.or_else(|| Some("docs/cdi.md describes what containers need".to_owned()));
    }
    match fix {
        None => Line::ok(CHECK, what),
        Some(fix) => Line::warn(CHECK, what, fix),
    }
}

/// The MIG strategy, and the resources that the baseline would list with it. A stack may offer others.
pub(super) fn mig(config: &Config, parts: &[Part]) -> Line {
    const CHECK: &str = "MIG";
    let plan = plan(config.offers.mig_strategy, &config.offers.resource, parts, |_| true);
    let strategy = config.offers.mig_strategy;
    if let Some(refusal) = plan.messages.refusal {
        let (what, fix) =
            refusal.rsplit_once(": ").unwrap_or((&refusal, "give all GPUs the same MIG layout"));
        return Line::fail(CHECK, what, fix);
    }
    let counts: Vec<String> = plan.counts().iter().map(|(name, count)| format!("{count} {name}")).collect();
    let listed = if counts.is_empty() { "nothing".into() } else { counts.join(", ") };
    let stack = if config.offers.stack.is_empty() { "" } else { " where policies pass" };
    let detail = format!("strategy {strategy}: {listed}{stack}");
    if plan.messages.notes.is_empty() {
        return Line::ok(CHECK, detail);
    }
    let fix = "docs/sharing.md, \"MIG\", describes each strategy (--mig-strategy, MIG_STRATEGY)";
    Line::warn(CHECK, format!("{detail}; {}", plan.messages.notes.join("; ")), fix)
}

/// One line for each resource with MPS, whose devices are granted only while its daemon runs.
pub(super) fn mps(config: &Config, root: &Path) -> Vec<Line> {
    const CHECK: &str = "MPS";
    let under_root = |socket: &Path| -> PathBuf { root.join(socket.strip_prefix("/").unwrap_or(socket)) };
    let line = |(resource, socket): (_, PathBuf)| {
        let folder = socket.parent().unwrap_or(&socket).display();
        let metadata = std::fs::metadata(under_root(&socket));
        if metadata.is_ok_and(|f| f.file_type().is_socket() || f.file_type().is_fifo()) {
            return Line::ok(CHECK, format!("{resource}: {} exists", socket.display()));
        }
        Line::fail(
            CHECK,
            format!("{resource}: no control daemon at {}, so its devices are not granted", socket.display()),
            format!(
                "CUDA_MPS_PIPE_DIRECTORY={folder} nvidia-cuda-mps-control -d; if berth runs in a pod, mount {folder} \
                 into it"
            ),
        )
    };
    config.containers.edits.mps_sockets().into_iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::line::Level;
    use berth_config::{FileConfig, ServeArgs};
    use berth_kernel::hardware::gpu::Mig;
    use berth_kernel::ids::names::GpuId;
    use std::os::unix::net::UnixListener;

    fn config(yaml: &str) -> Config {
        Config::merge(&ServeArgs::default(), FileConfig::parse(yaml).unwrap()).unwrap()
    }

    /// A GPU outside of MIG mode, and one with an instance.
    fn parts() -> Vec<Part> {
        let part = |id: &str, gpu_index, mig_enabled| Part {
            model: "test".into(),
            memory_mib: 1000,
            mig_enabled,
            ..Part::whole_gpu(GpuId::parse(id).unwrap(), gpu_index)
        };
        let split = part("GPU-1", 1, true);
        let instance = Part {
            gpu: split.gpu.clone(),
            mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
            ..part("MIG-1", 1, false)
        };
        vec![part("GPU-0", 0, false), split, instance]
    }

    #[test]
    fn the_strategy_is_shown_with_its_resources() {
        let line = mig(&config("migStrategy: mixed"), &parts());
        assert_eq!(line.detail, "strategy mixed: 1 nvidia.com/gpu, 1 nvidia.com/mig-1g.10gb");
        assert_eq!(line.level, Level::Ok);
        let line = mig(&config(""), &parts());
        assert!(line.detail.starts_with("strategy none: 2 nvidia.com/gpu; GPU 1"), "{line:?}");
        assert_eq!(line.level, Level::Warn);
        let line = mig(&config("migStrategy: single"), &parts());
        assert_eq!(line.level, Level::Fail);
        assert!(line.detail.ends_with("1g.10gb on GPU 1, no MIG mode on GPU 0"), "{line:?}");
        assert!(line.fix.unwrap().contains("set migStrategy to mixed"));
        let stack = mig(&config("migStrategy: mixed\nstack: [{policy: exclusive}]"), &parts());
        assert!(stack.detail.ends_with("where policies pass"), "{stack:?}");
    }

    #[test]
    fn a_resource_with_mps_needs_its_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let yaml = "containerEdits: {resources: {nvidia.com/gpu.shared: {mps: {pipeDirectory: /run/mps}}}}";
        let config = config(yaml);
        let lines = mps(&config, dir.path());
        assert_eq!((lines.len(), lines[0].level), (1, Level::Fail));
        assert!(lines[0].fix.as_ref().unwrap().contains("CUDA_MPS_PIPE_DIRECTORY=/run/mps"));
        std::fs::create_dir_all(dir.path().join("run/mps")).unwrap();
        std::fs::write(dir.path().join("run/mps/control"), "").unwrap();
        assert_eq!(mps(&config, dir.path())[0].level, Level::Fail, "a plain file is not a daemon");
        std::fs::remove_file(dir.path().join("run/mps/control")).unwrap();
        let _daemon = UnixListener::bind(dir.path().join("run/mps/control")).unwrap();
        assert_eq!(mps(&config, dir.path())[0].level, Level::Ok);
    }
}
