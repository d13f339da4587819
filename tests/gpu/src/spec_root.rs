//! A root folder that holds what a CDI spec names, and of the driver nothing else: where CUDA works in it, a container
//! runtime that follows the spec gives a container all that it needs. In a mount namespace of its own, which ends with
//! the process.
#![allow(unsafe_code, reason = "mounts and chroot are system calls of the C library")]

use crate::cuda;
use anyhow::{Context as _, ensure};
use libloading::Library;
use serde::Deserialize;
use std::ffi::{CString, c_ulong};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::ptr;

/// What every container has besides the spec: kernel file systems and the usual device nodes.
const USUAL: [&str; 6] = ["/proc", "/sys", "/dev/null", "/dev/zero", "/dev/urandom", "/dev/shm"];
/// Libraries of the C library that CUDA's needs; loaded before the root changes, as an image has its own.
const C_LIBRARIES: [&str; 5] = ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libgcc_s.so.1"];

/// The parts of a CDI spec (version 1.1, `SPEC.md`) that are files.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct Spec {
    container_edits: Edits,
    devices: Vec<Device>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Device {
    container_edits: Edits,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Edits {
    device_nodes: Vec<Node>,
    mounts: Vec<Mount>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    path: String,
    host_path: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mount {
    host_path: String,
    container_path: String,
}

impl Spec {
    /// Reads a spec in JSON, as Berth writes it.
    ///
    /// # Errors
    /// If the file is no such spec.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read(path).with_context(|| path.display().to_string())?;
        serde_json::from_slice(&text).with_context(|| format!("{} is no CDI spec in JSON", path.display()))
    }

    /// Pairs of paths: on the host, and in the container.
    fn files(&self) -> Vec<(String, String)> {
        let all = self.devices.iter().map(|device| &device.container_edits).chain([&self.container_edits]);
        let pairs = |edits: &Edits| {
            let node = |node: &Node| {
                (node.host_path.clone().unwrap_or_else(|| node.path.clone()), node.path.clone())
            };
            let mount = |mount: &Mount| (mount.host_path.clone(), mount.container_path.clone());
            edits.device_nodes.iter().map(node).chain(edits.mounts.iter().map(mount)).collect::<Vec<_>>()
        };
        let mut files: Vec<_> = all.flat_map(pairs).collect();
        files.sort();
        files.dedup();
        files
    }

    /// The paths on the host.
    pub(crate) fn host_paths(&self) -> Vec<String> {
        self.files().into_iter().map(|(host, _)| host).collect()
    }

    /// How many libraries it mounts.
    pub(crate) fn libraries(&self) -> usize {
        let is_library = |mount: &&Mount| mount.container_path.contains(".so");
        self.container_edits.mounts.iter().filter(is_library).count()
    }

    /// The path of CUDA's driver library in the container.
    fn cuda(&self) -> Option<PathBuf> {
        let files = self.files().into_iter().map(|(_, inside)| PathBuf::from(inside));
        let is_cuda = |path: &PathBuf| {
            path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("libcuda.so"))
        };
        files.into_iter().find(is_cuda)
    }
}

fn c_path(path: &Path) -> anyhow::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn checked(what: &str, answer: libc::c_int) -> anyhow::Result<()> {
    ensure!(answer == 0, "{what}: {}", io::Error::last_os_error());
    Ok(())
}

fn mount(source: &Path, target: &Path, kind: Option<&str>, flags: c_ulong) -> anyhow::Result<()> {
    let (from, to) = (c_path(source)?, c_path(target)?);
    let kind = kind.map(CString::new).transpose()?;
    let kind = kind.as_ref().map_or(ptr::null(), |kind| kind.as_ptr());
    // SAFETY: all texts end with NUL and outlive the call.
    let answer = unsafe { libc::mount(from.as_ptr(), to.as_ptr(), kind, flags, ptr::null()) };
    checked(&format!("mounting {} at {}", source.display(), target.display()), answer)
}

/// Shows a file or folder of the host at a path below the root.
fn bind(root: &Path, host: &Path, inside: &Path) -> anyhow::Result<()> {
    let target = root.join(inside.strip_prefix("/").unwrap_or(inside));
    if host.is_dir() {
        fs::create_dir_all(&target)?;
    } else {
        fs::create_dir_all(target.parent().unwrap_or(root))?;
        if !target.exists() {
            fs::write(&target, "")?;
        }
    }
    mount(host, &target, None, libc::MS_BIND | libc::MS_REC)
}

/// Makes the root folder, changes the root to it, and returns the UUID of CUDA's first device there. Needs root.
///
/// # Errors
/// If the root folder cannot be made, or CUDA does not work in it.
pub(crate) fn uuid_within(spec: &Path, root: &Path) -> anyhow::Result<String> {
    let spec = Spec::read(spec)?;
    let cuda = spec.cuda().context("the spec has no libcuda.so")?;
    // Kept open: what is loaded needs no file any more.
    // SAFETY: these are the C library's own, whose initialisers have no preconditions.
    let kept: Vec<Library> =
        C_LIBRARIES.iter().filter_map(|name| unsafe { Library::new(name) }.ok()).collect();
    // SAFETY: a system call without pointers.
    checked("making a mount namespace", unsafe { libc::unshare(libc::CLONE_NEWNS) })?;
    let whole = Path::new("/");
    mount(whole, whole, None, libc::MS_REC | libc::MS_PRIVATE)?;
    mount(Path::new("tmpfs"), root, Some("tmpfs"), 0)?;
    for path in USUAL.iter().map(Path::new).filter(|path| path.exists()) {
        bind(root, path, path)?;
    }
    for (host, inside) in spec.files() {
        bind(root, Path::new(&host), Path::new(&inside))?;
    }
    fs::create_dir_all(root.join("tmp"))?;
    let path = c_path(root)?;
    // SAFETY: the path ends with NUL and outlives the call.
    checked("chroot", unsafe { libc::chroot(path.as_ptr()) })?;
    std::env::set_current_dir("/")?;
    let uuid = cuda::uuid(&[cuda]);
    drop(kept);
    uuid
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After the example of the CDI specification, with NVIDIA's names.
    const SPEC: &str = r#"{
        "cdiVersion": "0.5.0",
        "kind": "berth/gpu",
        "devices": [
            { "name": "0", "containerEdits": { "deviceNodes": [{ "path": "/dev/nvidia0", "hostPath": "/run/dev/nvidia0" }] } }
        ],
        "containerEdits": {
            "env": ["NVIDIA_VISIBLE_DEVICES=void"],
            "deviceNodes": [{ "path": "/dev/nvidiactl" }],
            "mounts": [
                { "hostPath": "/usr/lib/libcuda.so.580.1", "containerPath": "/usr/lib64/libcuda.so.580.1", "options": ["ro"] },
                { "hostPath": "/usr/bin/nvidia-smi", "containerPath": "/usr/bin/nvidia-smi" }
            ],
            "hooks": [{ "hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook" }]
        }
    }"#;

    #[test]
    fn files_and_libraries_of_a_spec_are_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), SPEC).unwrap();
        let spec = Spec::read(file.path()).unwrap();
        assert_eq!(
            spec.host_paths(),
            ["/dev/nvidiactl", "/run/dev/nvidia0", "/usr/bin/nvidia-smi", "/usr/lib/libcuda.so.580.1"]
        );
        assert_eq!(spec.libraries(), 1);
        assert_eq!(spec.cuda(), Some("/usr/lib64/libcuda.so.580.1".into()));
        fs::write(file.path(), "kind: nvidia.com/gpu").unwrap();
        assert!(Spec::read(file.path()).unwrap_err().to_string().contains("no CDI spec"));
    }
}
