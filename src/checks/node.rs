//! `berth node check`: the daemon's requirements on this node, one line each, with the fix. Uses the daemon's settings
//! and changes nothing.

mod guard;
mod host;
mod kubelet;
mod line;
mod state;

use crate::{SkippedChecks, dry_run};
use berth_cli::output::Out;
use berth_cluster::{ApiServer, NodeInfo};
use berth_config::{Config, ServeArgs};
use berth_kernel::hardware::gpu::{Inventory, Part, Reading};
use berth_kernel::hardware::process::ProcessVisibility;
use berth_kernel::ids::names::PartId;
use berth_kernel::node::ports::Processes as _;
use berth_strategy::NodeVersions;
use line::{Level, Line};
use std::path::Path;

/// The result of an inventory scan.
struct FoundGpus {
    /// One line for people.
    text: String,
    /// Whether a GPU does not work, or a setting selects none.
    is_warning: bool,
    /// GPUs and MIG instances that are offered.
    parts: Vec<Part>,
}

/// Checks the node with these settings, and returns whether no check failed.
///
/// # Errors
/// If the result cannot be printed.
pub fn run(args: &ServeArgs, config: &Config, out: &mut Out) -> anyhow::Result<bool> {
    let api_server = connect_api_server(config);
    let versions =
        api_server.as_ref().ok().and_then(Option::as_ref).map(NodeVersions::of).unwrap_or_default();
    let chosen = config.loaded.chosen.as_ref().and_then(|chosen| chosen.name.clone());
    let file = chosen.or_else(|| args.config_file().map(|file| file.display().to_string()));
    let configuration =
        file.unwrap_or_else(|| "no --config FILE: flags, environment variables and defaults".into());
    let mut lines = vec![Line::ok("configuration", configuration)];
    lines.extend(check_all(config, Path::new("/"), scan, &versions));
    lines.push(processes(config.gpus.processes.source().process_visibility()));
    // Without GPUs the stack is not checked; the line of the GPUs has the reason.
    let has_gpus = lines.iter().all(|line| line.check != "GPUs" || line.level != Level::Fail);
    lines.push(stack(config, SkippedChecks { files: false, gpus: !has_gpus }));
    lines.push(api_server_line(config, api_server));
    lines.push(guard::guard(config));
    out.answer(&lines, |lines| as_text(lines))?;
    Ok(lines.iter().all(|line| line.level != Level::Fail))
}

/// Opens and scans the GPUs.
fn scan(config: &Config) -> anyhow::Result<FoundGpus> {
    let gpus = config.gpus.source.open()?;
    let mut inventory = gpus.scan()?;
    let unused: Vec<String> =
        inventory.exclude(&config.gpus.excluded).into_iter().map(ToString::to_string).collect();
    found_gpus(inventory, &unused, &gpus.describe())
}

/// What a scan found. `unused`: what `gpus.exclude` names that is no GPU of this node.
///
/// # Errors
/// If there is no GPU that could be offered.
fn found_gpus(inventory: Inventory, unused: &[String], source: &str) -> anyhow::Result<FoundGpus> {
    let Inventory { mut parts, scan_errors, signs, unidentified, excluded, .. } = inventory;
    let gpus: Vec<&Part> = parts.iter().filter(|part| part.is_whole_gpu()).collect();
    let all = gpus.len() + unidentified.len();
    let name = |id: &PartId| match gpus.iter().find(|gpu| gpu.id == *id) {
        Some(gpu) => format!("GPU {} ({id})", gpu.gpu_index),
        None => id.to_string(),
    };
    let mut problems: Vec<String> = scan_errors
        .iter()
        .map(|(gpu, error)| format!("{} does not work: {error}", name(gpu.as_part())))
        .collect();
    problems.extend(unidentified.iter().map(|gpu| format!("{gpu} is not identified: {}", gpu.reason)));
    let of_working = |sign: &&Reading| !scan_errors.keys().any(|gpu| *gpu.as_part() == sign.part);
    problems
        .extend(signs.iter().filter(of_working).map(|sign| format!("{}: {}", name(&sign.part), sign.detail)));
    problems.extend(unused.iter().map(|selector| format!("gpus.exclude: no GPU of this node is {selector}")));
    anyhow::ensure!(all > 0, "{source} shows no GPU");
    let works = all - unidentified.len() - scan_errors.len();
    let count = match (all, works) {
        (1, 1) => "1 GPU".to_owned(),
        (all, works) if all == works => format!("{all} GPUs"),
        (all, works) => format!("{works} of {all} GPUs work"),
    };
    let mut text = format!("{count}, {source}");
    for gpu in &excluded {
        text += &format!("; {} is excluded (gpus.exclude)", name(gpu.as_part()));
    }
    for problem in &problems {
        text += &format!("; {problem}");
    }
    parts.retain(|part| !excluded.contains(&part.gpu));
    Ok(FoundGpus { text, is_warning: !problems.is_empty(), parts })
}

/// Reads the node object once, if the API server is used.
fn connect_api_server(config: &Config) -> anyhow::Result<Option<NodeInfo>> {
    if config.cluster.api_server == ApiServer::Off {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth_cluster::Settings::new(config.cluster.api_server.clone(), config.node.name.clone());
    let info = runtime.block_on(berth_cluster::node_info(&settings));
    info.map(Some).map_err(|error| anyhow::anyhow!(berth_cluster::error_chain(&error)))
}

/// The checks below `root`, which is `/` outside tests.
fn check_all(
    config: &Config,
    root: &Path,
    scan: fn(&Config) -> anyhow::Result<FoundGpus>,
    versions: &NodeVersions,
) -> Vec<Line> {
    let scanned = scan(config);
    let parts = scanned.as_ref().map(|found| found.parts.clone()).unwrap_or_default();
    let mut lines = vec![host::driver(config), gpus(&scanned)];
    lines.extend(scanned.ok().map(|found| host::mig(config, &found.parts)));
    lines.extend(kubelet::all(config));
    lines.push(state::folder(config));
    lines.push(state::ports(config));
    lines.extend(state::running(config));
    lines.push(host::strategy(config, root, &parts, versions));
    lines.extend(host::mps(config, root));
    lines
}

fn gpus(scanned: &anyhow::Result<FoundGpus>) -> Line {
    match scanned {
        Ok(FoundGpus { text, is_warning: true, .. }) => {
            Line::warn("GPUs", text, "nvidia-smi -q shows more; GPUs that do not work are not granted")
        }
        Ok(FoundGpus { text, .. }) => Line::ok("GPUs", text),
        Err(error) => {
            // Most GPU errors end with the fix, after a colon.
            let text = error.to_string();
            let (what, fix) = text.rsplit_once(": ").unwrap_or((
                &text,
                "make nvidia-smi work on the node; or try berth without a GPU with `berth serve --gpus sim:8xh100 --kubelet-dir /tmp/k --state-dir /tmp/s`",
            ));
            Line::fail("GPUs", what, fix)
        }
    }
}

/// A warning at most: without processes the daemon works, but cannot detect use without an allocation.
fn processes(visibility: ProcessVisibility) -> Line {
    const CHECK: &str = "processes";
    match visibility {
        ProcessVisibility::Visible => Line::ok(CHECK, "the pods of processes on the GPUs can be found"),
        ProcessVisibility::Hidden { why, fix } => Line::warn(CHECK, why, fix),
        ProcessVisibility::Unsupported { why } => {
            Line::warn(CHECK, why, "mount the host's /proc and set processes.procRoot to its path")
        }
    }
}

fn stack(config: &Config, skipped: SkippedChecks) -> Line {
    const CHECK: &str = "stack";
    match dry_run(config, skipped) {
        Ok(findings) if !findings.errors.is_empty() => {
            let errors: Vec<_> = findings.errors.iter().map(ToString::to_string).collect();
            Line::fail(
                CHECK,
                errors.join("; "),
                "correct the configuration; `berth config check FILE` shows the lines",
            )
        }
        Ok(_) if config.offers.stack.is_empty() => {
            Line::ok(CHECK, "none in the configuration: whole GPUs are offered, unless a stack is activated")
        }
        Ok(_) if skipped.gpus => Line::warn(CHECK, "not checked: there are no GPUs", "see the GPUs check"),
        Ok(findings) if !findings.notes.is_empty() => Line::warn(
            CHECK,
            findings.notes.join("; "),
            "`berth policy list` shows the policies of a running daemon",
        ),
        Ok(_) => Line::ok(CHECK, "its policies accept their parameters"),
        Err(error) => Line::fail(CHECK, format!("{error:#}"), "fix this error, then run the check again"),
    }
}

/// A warning at most, since the API server is optional.
fn api_server_line(config: &Config, connected: anyhow::Result<Option<NodeInfo>>) -> Line {
    const CHECK: &str = "API server";
    if config.cluster.api_server == ApiServer::Off {
        let what = "not used (--kubeconfig, or a pod's service account): no eviction, no Node events, and the end of a pod takes two reconcile passes";
        return Line::ok(CHECK, what);
    }
    match connected {
        Ok(_) => Line::ok(CHECK, format!("it answers and has node {}", config.node.name)),
        Err(error) => {
            let fix = "check the address, the credentials and the role; the daemon keeps trying";
            Line::warn(CHECK, format!("{error:#}"), fix)
        }
    }
}

fn as_text(lines: &[Line]) -> String {
    let width = lines.iter().map(|l| l.check.len()).max().unwrap_or_default();
    let text = |line: &Line| {
        let fix = line.fix.as_ref().map_or_else(String::new, |fix| format!("; fix: {fix}"));
        format!("{:4}  {:width$}  {}{fix}\n", line.level.as_str(), line.check, line.detail)
    };
    lines.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_config::FileConfig;
    use std::fs;
    use std::os::unix::net::UnixListener;

    fn config(dir: &Path, more: &str) -> Config {
        let (kubelet, state) = (dir.join("kubelet"), dir.join("state"));
        let yaml = format!(
            "gpus: sim:1xt4\nkubeletDir: {}\nstateDir: {}\nadminListen: 127.0.0.1:0\n{more}",
            kubelet.display(),
            state.display()
        );
        Config::merge(&ServeArgs::default(), FileConfig::parse(&yaml).unwrap()).unwrap()
    }

    fn level(lines: &[Line], check: &str) -> Level {
        lines.iter().find(|l| l.check == check).unwrap_or_else(|| panic!("no line {check}")).level
    }

    fn one_gpu(_: &Config) -> anyhow::Result<FoundGpus> {
        Ok(FoundGpus { text: "1 GPU".into(), is_warning: false, parts: Vec::new() })
    }

    #[test]
    fn a_bare_node_fails_with_a_fix_in_each_line_that_is_not_ok() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "");
        let lines = check_all(
            &config,
            dir.path(),
            |_| anyhow::bail!("no libnvidia-ml.so.1"),
            &NodeVersions::default(),
        );
        assert_eq!(level(&lines, "GPUs"), Level::Fail);
        assert_eq!(level(&lines, "kubelet folder"), Level::Fail);
        assert!(lines.iter().all(|l| l.level == Level::Ok || l.fix.is_some()));
        assert!(!dir.path().join("state").exists(), "the check must change nothing");
    }

    #[test]
    fn a_complete_node_is_ok_in_every_line() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "containerEdits: {deviceListStrategy: [cdi-cri]}");
        let plugins = dir.path().join("kubelet/device-plugins");
        let resources = dir.path().join("kubelet/pod-resources");
        for folder in [&plugins, &resources, &dir.path().join("state"), &dir.path().join("etc/cdi")] {
            fs::create_dir_all(folder).unwrap();
        }
        let _kubelet = UnixListener::bind(plugins.join("kubelet.sock")).unwrap();
        let _resources = UnixListener::bind(resources.join("kubelet.sock")).unwrap();
        fs::write(
            plugins.join("kubelet_internal_checkpoint"),
            r#"{"Data":{"PodDeviceEntries":null},"Checksum":1}"#,
        )
        .unwrap();
        fs::write(dir.path().join("etc/cdi/nvidia.yaml"), "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
            .unwrap();
        let lines = check_all(&config, dir.path(), one_gpu, &NodeVersions::default());
        for line in &lines {
            assert_eq!(line.level, Level::Ok, "{line:?}");
        }
    }

    #[test]
    fn hidden_processes_are_a_warning_with_a_fix() {
        let hidden =
            ProcessVisibility::Hidden { why: "own PID namespace".into(), fix: "hostPID: true".into() };
        let line = processes(hidden);
        assert_eq!((line.level, line.fix.as_deref()), (Level::Warn, Some("hostPID: true")));
        assert_eq!(processes(ProcessVisibility::Visible).level, Level::Ok);
        let unsupported = ProcessVisibility::Unsupported { why: "no /proc".into() };
        assert!(processes(unsupported).fix.is_some());
    }

    #[test]
    fn broken_files_fail_and_absent_ones_warn() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "containerEdits: {deviceListStrategy: [cdi-annotations]}");
        let plugins = dir.path().join("kubelet/device-plugins");
        fs::create_dir_all(&plugins).unwrap();
        fs::write(dir.path().join("state"), "a file").unwrap();
        fs::write(plugins.join("kubelet.sock"), "no socket").unwrap();
        fs::write(plugins.join("kubelet_internal_checkpoint"), "{").unwrap();
        let lines = check_all(&config, dir.path(), one_gpu, &NodeVersions::default());
        assert_eq!(level(&lines, "kubelet folder"), Level::Ok);
        assert_eq!(level(&lines, "kubelet socket"), Level::Fail);
        assert_eq!(level(&lines, "pod-resources socket"), Level::Warn);
        assert_eq!(level(&lines, "checkpoint"), Level::Fail);
        assert_eq!(level(&lines, "state folder"), Level::Fail);
        assert!(lines.iter().all(|line| line.check != "DRA driver"));
    }

    #[test]
    fn the_folders_of_the_dra_drivers_sockets_are_checked_if_it_is_enabled() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "kubeconfig: /kubeconfig\ndra: {enabled: true}");
        let check = || check_all(&config, dir.path(), one_gpu, &NodeVersions::default());
        assert_eq!(level(&check(), "DRA driver"), Level::Warn);
        for folder in ["plugins", "plugins_registry"] {
            fs::create_dir_all(dir.path().join("kubelet").join(folder)).unwrap();
        }
        assert_eq!(level(&check(), "DRA driver"), Level::Ok);
    }
}
