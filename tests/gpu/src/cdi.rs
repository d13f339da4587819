//! Step 6: the CDI spec that Berth makes of this machine, compared with NVIDIA's, and tried in a root folder of its
//! own.

use crate::check::{Check, skip};
use crate::child;
use crate::load::{arguments, cuda_paths};
use crate::node::Node;
use crate::spec_root::Spec;
use anyhow::{Context as _, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// The file name of Berth's own spec.
const OWN_SPEC: &str = "berth-gpu.json";
/// How long the daemon may take to write it.
const WRITTEN_MAX: Duration = Duration::from_secs(30);
const INTERVAL: Duration = Duration::from_millis(50);

/// Step 6: every host path of the spec exists; NVIDIA's own spec, if nvidia-ctk is there, has nothing that is missing;
/// and as root, CUDA works in a root folder with nothing but the spec.
pub(crate) fn check(check: &Check) -> anyhow::Result<()> {
    if !check.has_command("cdi") {
        return Err(skip("this berth has no `cdi check`"));
    }
    if check.is_fake() {
        return Err(skip("the fake has no files of a driver"));
    }
    let spec = check.options.out.join(OWN_SPEC);
    let folder = tempfile::tempdir()?;
    fs::copy(own_spec(check, folder.path())?, &spec).context("cannot copy Berth's spec")?;
    let parsed = Spec::read(&spec)?;
    let missing: Vec<String> =
        parsed.host_paths().into_iter().filter(|path| !Path::new(path).exists()).collect();
    ensure!(missing.is_empty(), "the spec names files that do not exist: {}", missing.join(", "));
    check.record.figure("libs", parsed.libraries());
    compare(check, &spec)?;
    try_spec(check, &spec)
}

/// Runs `berth` without a daemon.
fn berth(check: &Check, arguments: &[&str]) -> anyhow::Result<Output> {
    let mut command = Command::new(&check.options.berth);
    command.args(arguments).stdin(Stdio::null());
    child::ends_with_this_thread(&mut command);
    command.output().with_context(|| format!("berth {}", arguments.join(" ")))
}

/// Starts a daemon, which writes its spec into this folder.
fn own_spec(check: &Check, folder: &Path) -> anyhow::Result<PathBuf> {
    let keys = format!(
        "containerEdits: {{ deviceListStrategy: [cdi-cri] }}\ncdi: {{ generate: always, folders: [{}] }}\n",
        folder.display()
    );
    let node = Node::start(check, &keys)?;
    check.record.at("waiting for the spec");
    let file = folder.join(OWN_SPEC);
    let end = Instant::now() + WRITTEN_MAX;
    while !file.exists() {
        ensure!(Instant::now() < end, "the daemon has not written {OWN_SPEC}");
        std::thread::sleep(INTERVAL);
    }
    node.stop()?;
    Ok(file)
}

/// Compares with the spec that NVIDIA's toolkit makes of this machine.
fn compare(check: &Check, own: &Path) -> anyhow::Result<()> {
    check.record.at("nvidia-ctk cdi generate");
    let folder = tempfile::tempdir()?;
    let theirs = folder.path().join("nvidia.yaml");
    let mut command = Command::new("nvidia-ctk");
    command.args(["cdi", "generate", "--output"]).arg(&theirs).stdin(Stdio::null());
    child::ends_with_this_thread(&mut command);
    let generated = match command.output() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            check.record.note("NVIDIA's own spec: there is no nvidia-ctk");
            return Ok(());
        }
        generated => generated.context("nvidia-ctk")?,
    };
    ensure!(
        generated.status.success(),
        "nvidia-ctk ended with {}: {}",
        generated.status,
        String::from_utf8_lossy(&generated.stderr).trim()
    );
    let (own, theirs) = (own.display().to_string(), theirs.display().to_string());
    let compared = berth(check, &["cdi", "check", &own, "--against", &theirs, "-o", "json"])?;
    let text = String::from_utf8_lossy(&compared.stdout);
    if let Ok(answer) = serde_json::from_str::<Value>(&text) {
        for figure in ["missing", "extra"] {
            check.record.figure(figure, json!(answer[figure].as_array().map(Vec::len)));
        }
    }
    ensure!(
        compared.status.success(),
        "cdi check: {} {}",
        text.trim(),
        String::from_utf8_lossy(&compared.stderr).trim()
    );
    Ok(())
}

/// As root: CUDA finds the GPU in a root folder that has what the spec names, and nothing else of the driver.
fn try_spec(check: &Check, spec: &Path) -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        check.record.note("CUDA with the spec alone: needs root");
        return Ok(());
    }
    check.record.at("CUDA with the spec alone");
    let outside = match child::output("cuda-uuid", &arguments(&cuda_paths(check))) {
        Ok(uuid) => uuid,
        Err(error) => {
            check.record.note(format!("CUDA with the spec alone: no CUDA: {error:#}"));
            return Ok(());
        }
    };
    let root = tempfile::tempdir()?;
    let inside = child::output("spec-root", &[spec.as_os_str(), root.path().as_os_str()])
        .context("CUDA with the spec alone")?;
    ensure!(inside == outside, "CUDA with the spec alone finds {inside:?}, outside {outside:?}");
    Ok(())
}
