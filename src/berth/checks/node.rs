//! `berth node check`: what this node has and still needs, one line each, with the fix. Looks where
//! the daemon would look, and changes nothing.

mod host;
mod kubelet;
mod line;
mod offers;
mod running;
mod state;

use crate::config::{Config, Findings, GpuSource, ServeArgs, Without};
use crate::{command, daemon};
use berth_cli::connection::ClientArgs;
use berth_cli::output::{Out, print_error};
use berth_cluster::ApiServer;
use berth_kernel::gpu::Part;
use berth_kernel::process::Sight;
use line::{Level, Line};
use std::path::Path;
use std::process::ExitCode;

/// What a look at the GPUs found.
struct Looked {
    /// In one line.
    text: String,
    /// GPUs and MIG instances.
    parts: Vec<Part>,
}

pub(crate) fn run(args: &ServeArgs, client: &ClientArgs, out: &mut Out) -> ExitCode {
    let config = match command::load(args, client) {
        Ok(config) => config,
        Err(error) => {
            print_error(&error);
            return command::exit_code(&error);
        }
    };
    let mut lines = look_around(&config, Path::new("/"), look);
    lines.push(processes(&config, daemon::sight));
    // What is wrong with the GPUs has a line of its own.
    let gpus = lines.iter().all(|line| line.check != "GPUs" || line.level != Level::Fail);
    lines.push(stack(&config, Without { files: false, gpus: !gpus }, daemon::rehearse));
    lines.push(api_server(&config, reach));
    let failed = lines.iter().any(|line| line.level == Level::Fail);
    if let Err(error) = out.answer(&lines, |lines| as_text(lines)) {
        print_error(&error);
        return ExitCode::FAILURE;
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// What `berth node check` says of the GPUs.
fn look(source: &GpuSource) -> anyhow::Result<Looked> {
    let gpus = crate::daemon::open_gpus(source.clone())?;
    let found = gpus.look()?;
    let count = found.parts.iter().filter(|p| p.parent.is_none()).count();
    anyhow::ensure!(count > 0, "{} shows no GPU", gpus.describe());
    let mut text = format!("{count} GPUs, {}", gpus.describe());
    for (gpu, trouble) in &found.troubles {
        text += &format!("; {gpu} does not work: {trouble}");
    }
    Ok(Looked { text, parts: found.parts })
}

/// What `berth node check` asks the API server.
fn reach(config: &Config) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let settings = berth_cluster::Settings::new(config.api_server.clone(), config.node_name.clone());
    let connected = runtime.block_on(berth_cluster::connect(&settings));
    connected.map(drop).map_err(|error| anyhow::anyhow!(berth_cluster::error_chain(&error)))
}

/// Everything, under `root`, which is `/` outside tests.
fn look_around(config: &Config, root: &Path, look: fn(&GpuSource) -> anyhow::Result<Looked>) -> Vec<Line> {
    let looked = look(&config.gpus);
    let mut lines = vec![host::driver(config), gpus(&looked)];
    lines.extend(looked.ok().map(|found| offers::mig(config, &found.parts)));
    lines.extend(kubelet::all(config));
    lines.push(state::folder(config));
    lines.push(running::ports(config));
    lines.extend(running::evidence(config));
    lines.push(host::cdi(config, root));
    lines.push(host::runtime(config, root));
    lines.extend(offers::mps(config, root));
    lines
}

fn gpus(looked: &anyhow::Result<Looked>) -> Line {
    match looked {
        Ok(Looked { text, .. }) if text.contains("does not work") => {
            Line::warn("GPUs", text, "nvidia-smi -q tells more; what does not work is not granted")
        }
        Ok(Looked { text, .. }) => Line::ok("GPUs", text),
        Err(error) => {
            // Most errors of GPUs end with what to do, after a colon.
            let text = error.to_string();
            let (what, fix) = text.rsplit_once(": ").unwrap_or((
                &text,
                "see that nvidia-smi works on the node; try berth without a GPU with --gpus sim:8xh100",
            ));
            Line::fail("GPUs", what, fix)
        }
    }
}

/// Without them the daemon works, and says less: nobody is told from an intruder.
fn processes(config: &Config, sight: fn(&Config) -> Sight) -> Line {
    const CHECK: &str = "processes";
    match sight(config) {
        Sight::Visible => Line::ok(CHECK, "those on the GPUs can be told by their pods"),
        Sight::Hidden { why, fix } => Line::warn(CHECK, why, fix),
        Sight::Unsupported { why } => {
            Line::warn(CHECK, why, "mount the host's /proc, or say where it is: processes.procRoot")
        }
    }
}

fn stack(
    config: &Config,
    without: Without,
    rehearse: fn(&Config, Without) -> anyhow::Result<Findings>,
) -> Line {
    const CHECK: &str = "stack";
    match rehearse(config, without) {
        Ok(found) if !found.errors.is_empty() => {
            let errors: Vec<_> = found.errors.iter().map(ToString::to_string).collect();
            Line::fail(
                CHECK,
                errors.join("; "),
                "correct the configuration; berth config check FILE says where",
            )
        }
        Ok(_) if config.stack.is_empty() => {
            Line::ok(CHECK, "none in the configuration: whole GPUs are offered, or what was activated")
        }
        Ok(_) if without.gpus => {
            Line::warn(CHECK, "the stack was not checked: there are no GPUs", "see the GPUs check")
        }
        Ok(found) if !found.notes.is_empty() => {
            Line::warn(CHECK, found.notes.join("; "), "berth policy list shows what a running daemon knows")
        }
        Ok(_) => Line::ok(CHECK, "its policies take their parameters"),
        Err(error) => {
            Line::fail(CHECK, format!("{error:#}"), "fix the error named here, then run the check again")
        }
    }
}

/// Optional, so that nothing of it fails the node.
fn api_server(config: &Config, reach: fn(&Config) -> anyhow::Result<()>) -> Line {
    const CHECK: &str = "API server";
    if config.api_server == ApiServer::Off {
        let what = "not used (--kubeconfig, or a pod's service account): no eviction, no Node events, and ends of pods take two rounds";
        return Line::ok(CHECK, what);
    }
    match reach(config) {
        Ok(()) => Line::ok(CHECK, format!("it answers and knows node {}", config.node_name)),
        Err(error) => {
            let fix = "see the address, the credentials and the role; the daemon goes on asking";
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
    use crate::config::FileConfig;
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

    fn found(_: &GpuSource) -> anyhow::Result<Looked> {
        Ok(Looked { text: "1 GPUs".into(), parts: Vec::new() })
    }

    #[test]
    fn a_bare_node_fails_with_a_fix_in_each_line_that_is_not_ok() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "");
        let lines = look_around(&config, dir.path(), |_| anyhow::bail!("no libnvidia-ml.so.1"));
        assert_eq!(level(&lines, "GPUs"), Level::Fail);
        assert_eq!(level(&lines, "kubelet folder"), Level::Fail);
        assert!(lines.iter().all(|l| l.level == Level::Ok || l.fix.is_some()));
        assert!(!dir.path().join("state").exists(), "it changed something");
    }

    #[test]
    fn a_node_that_has_everything_is_ok_in_every_line() {
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
        let lines = look_around(&config, dir.path(), found);
        for line in &lines {
            assert_eq!(line.level, Level::Ok, "{line:?}");
        }
    }

    #[test]
    fn what_of_processes_cannot_be_seen_is_told_with_the_fix() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "");
        let hidden =
            |_: &Config| Sight::Hidden { why: "own PID namespace".into(), fix: "hostPID: true".into() };
        let line = processes(&config, hidden);
        assert_eq!((line.level, line.fix.as_deref()), (Level::Warn, Some("hostPID: true")));
        assert_eq!(processes(&config, |_| Sight::Visible).level, Level::Ok);
        let unsupported = |_: &Config| Sight::Unsupported { why: "no /proc".into() };
        assert!(processes(&config, unsupported).fix.is_some());
    }

    #[test]
    fn what_is_broken_is_told_from_what_is_absent() {
        let dir = tempfile::tempdir().unwrap();
        let config = config(dir.path(), "containerEdits: {deviceListStrategy: [cdi-annotations]}");
        let plugins = dir.path().join("kubelet/device-plugins");
        fs::create_dir_all(&plugins).unwrap();
        fs::write(dir.path().join("state"), "a file").unwrap();
        fs::write(plugins.join("kubelet.sock"), "no socket").unwrap();
        fs::write(plugins.join("kubelet_internal_checkpoint"), "{").unwrap();
        let lines = look_around(&config, dir.path(), found);
        assert_eq!(level(&lines, "kubelet folder"), Level::Ok);
        assert_eq!(level(&lines, "kubelet socket"), Level::Fail);
        assert_eq!(level(&lines, "pod-resources socket"), Level::Warn);
        assert_eq!(level(&lines, "checkpoint"), Level::Fail);
        assert_eq!(level(&lines, "state folder"), Level::Fail);
        assert_eq!(level(&lines, "CDI specs"), Level::Fail);
    }
}
