//! A small disk for the state folder, and another program that takes every byte of it that is free.

use anyhow::{Context, ensure};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Bytes of a small disk: the store, what it keeps free in its own files, and some room that changes hands.
const DISK_MIB: u32 = 24;
/// The largest write of the program that fills the disk.
const CHUNK_BYTES: usize = 64 * 1024;

/// The file system of a small disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SmallDisk {
    /// In memory; needs a user namespace of its own, and no more.
    Tmpfs,
    /// A file, mounted as a loop device; needs root.
    Ext4,
}

impl SmallDisk {
    /// A command that runs the program with these arguments where such disks can be mounted, and that ends with them.
    #[must_use]
    pub fn namespace(self, program: &Path) -> Command {
        let mut command = Command::new("unshare");
        // Loop devices belong to the first user namespace.
        command.arg(if self == Self::Tmpfs { "-rm" } else { "-m" }).arg(program);
        command
    }

    /// Why such a disk cannot be mounted here; `None` if it can.
    #[must_use]
    pub fn missing(self) -> Option<String> {
        let folder = tempfile::tempdir().ok()?;
        let mut command = self.namespace(Path::new("sh"));
        let script = self.script(folder.path());
        let output = command.args(["-c", &script]).output();
        match output {
            Ok(output) if output.status.success() => None,
            Ok(output) => Some(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            Err(error) => Some(error.to_string()),
        }
    }

    /// Mounts one as the state folder of a node in this folder; inside of [`Self::namespace`].
    ///
    /// # Errors
    /// If it cannot be mounted.
    pub fn mount(self, folder: &Path) -> anyhow::Result<Mounted> {
        let output = Command::new("sh").args(["-c", &self.script(folder)]).output().context("sh")?;
        ensure!(output.status.success(), "a small disk: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Mounted(folder.join("state")))
    }

    fn script(self, folder: &Path) -> String {
        let (state, image) = (folder.join("state"), folder.join("disk"));
        let (state, image) = (state.display(), image.display());
        let mount = match self {
            Self::Tmpfs => format!("mount -t tmpfs -o size={DISK_MIB}m none {state}"),
            // No blocks for root alone, since both programs are root's.
            Self::Ext4 => format!(
                "truncate -s {DISK_MIB}m {image} && mkfs.ext4 -q -F -m 0 {image} && mount -o loop {image} {state}"
            ),
        };
        format!("mkdir -p {state} && {mount}")
    }
}

/// A small disk, unmounted when dropped, so that its folder can be deleted.
#[derive(Debug)]
pub struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        // Best effort: its namespace ends with this process.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A program that takes every byte of a disk as soon as it is free, until it is dropped: then it deletes what it wrote.
#[derive(Debug)]
pub struct Filler {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Filler {
    /// Starts it on the disk of this folder.
    ///
    /// # Errors
    /// If it cannot create its file.
    pub fn start(folder: &Path) -> io::Result<Self> {
        let path = folder.join("filler");
        let file = OpenOptions::new().append(true).create(true).open(&path)?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("filler".into()).spawn(move || fill(&file, &stopped))?;
        Ok(Self { path, stop, thread: Some(thread) })
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.path);
    }
}

fn fill(mut file: &File, stop: &AtomicBool) {
    let bytes = [b'x'; CHUNK_BYTES];
    let mut len = CHUNK_BYTES;
    while !stop.load(Ordering::SeqCst) {
        match file.write(&bytes[..len]) {
            Ok(_) => len = CHUNK_BYTES,
            // To the last byte, and then from the beginning: more may have been given back meanwhile.
            Err(_) if len > 1 => len = (len / 16).max(1),
            Err(_) => {
                len = CHUNK_BYTES;
                std::thread::yield_now();
            }
        }
    }
}
