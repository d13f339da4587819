//! The programs of container runtimes that run on this node, and their versions.
//!
//! A version is what the running program itself answers to `--version`, since the file at its path may be newer than
//! the process. Berth runs as root, so it starts only what root runs here already: programs of root's processes in
//! Berth's own mount namespace, from files that only root can change. In a pod there are none, and the node object
//! shows the version.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The programs that matter, by the names of their processes.
const NAMES: [&str; 4] = ["containerd", "crio", "cri-dockerd", "dockerd"];
/// Most of them that are asked for their version.
const PROGRAMS_MAX: usize = 8;
/// How long a program may take to answer. It takes milliseconds.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(5);
/// Longest part of an answer that is read, bytes; the version is in its first line.
const ANSWER_BYTES_MAX: u64 = 4096;

/// A version of a program, without what follows its three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) patch: u32,
}

impl Version {
    /// Of `v2.1.4-k3s1`, `1.7.24~ds1` or `28.5.2,`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix('v').unwrap_or(text).splitn(3, '.');
        let mut number = || {
            let part = parts.next()?;
            let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            part.get(..digits)?.parse().ok()
        };
        Some(Self { major: number()?, minor: number()?, patch: number()? })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// A program that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    /// The name of its process.
    pub(super) name: String,
    /// Its version.
    pub(super) version: Version,
    /// Its arguments, without its name.
    pub(super) arguments: Vec<String>,
}

impl Program {
    /// The file that containerd was given, or its usual one.
    pub(super) fn config_file(&self) -> PathBuf {
        let mut arguments = self.arguments.iter();
        while let Some(argument) = arguments.next() {
            let (flag, value) =
                argument.split_once('=').map_or((argument.as_str(), None), |(f, v)| (f, Some(v)));
            if matches!(flag, "-c" | "--config" | "-config") {
                let value = value.or_else(|| arguments.next().map(String::as_str));
                return value.unwrap_or_default().into();
            }
        }
        "/etc/containerd/config.toml".into()
    }
}

/// Finds the programs, and asks each file once.
#[derive(Default)]
pub(crate) struct Programs {
    /// The version by device, inode and time of change of the program's file. `None` if it printed none.
    versions: BTreeMap<(u64, u64, i64, i64), Option<Version>>,
}

impl Programs {
    /// The programs that run now, by the processes in `proc`.
    pub(crate) fn find(&mut self, proc: &Path) -> Vec<Program> {
        let own_mounts = fs::read_link(proc.join("self/ns/mnt")).ok();
        let processes = fs::read_dir(proc).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut found: Vec<Program> = processes
            .filter_map(|process| {
                let name = fs::read_to_string(process.join("comm")).ok()?.trim().to_owned();
                NAMES.contains(&name.as_str()).then_some(())?;
                let mounts = fs::read_link(process.join("ns/mnt")).ok()?;
                let is_of_root = fs::metadata(&process).ok()?.uid() == 0;
                (is_of_root && Some(mounts) == own_mounts).then_some((process, name))
            })
            .take(PROGRAMS_MAX)
            .filter_map(|(process, name)| {
                let version = self.version(&process.join("exe"), &name)?;
                let line = fs::read(process.join("cmdline")).ok()?;
                let arguments =
                    line.split(|byte| *byte == 0).skip(1).map(|a| String::from_utf8_lossy(a).into_owned());
                Some(Program { name, version, arguments: arguments.collect() })
            })
            .collect();
        // The order of processes is that of their ids, which says nothing.
        found.sort_by(|a, b| (&a.name, a.version, &a.arguments).cmp(&(&b.name, b.version, &b.arguments)));
        found
    }

    fn version(&mut self, file: &Path, name: &str) -> Option<Version> {
        let metadata = fs::metadata(file).ok()?;
        let is_only_roots = metadata.uid() == 0 && metadata.mode() & 0o022 == 0;
        let key = (metadata.dev(), metadata.ino(), metadata.ctime(), metadata.ctime_nsec());
        *self.versions.entry(key).or_insert_with(|| is_only_roots.then(|| ask_version(file, name)).flatten())
    }
}

/// The version that a program shows. `name`: some programs are several in one file, and go by the name they are called.
fn ask_version(file: &Path, name: &str) -> Option<Version> {
    let mut child = Command::new(file)
        .arg0(name)
        .arg("--version")
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let begin = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(None) if begin.elapsed() < ANSWER_WAIT_MAX => std::thread::sleep(Duration::from_millis(5)),
            Ok(Some(status)) => break Some(status),
            _ => break None,
        }
    };
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
        return None;
    }
    let mut answer = Vec::new();
    child.stdout.take()?.take(ANSWER_BYTES_MAX).read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer);
    let version = answer.lines().next()?.split_whitespace().find_map(Version::parse);
    tracing::debug!(name, answer = %answer.trim(), "the version of a container runtime's program");
    version
}

#[cfg(test)]
mod tests {
    use super::*;

    fn program(arguments: &[&str]) -> Program {
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        Program { name: "containerd".into(), version: Version { major: 2, minor: 1, patch: 4 }, arguments }
    }

    #[test]
    fn versions_are_read_as_runtimes_write_them() {
        let shown = |text| Version::parse(text).map(|version| version.to_string());
        assert_eq!(shown("v2.1.4-k3s1").as_deref(), Some("2.1.4"));
        assert_eq!(shown("1.7.24~ds1").as_deref(), Some("1.7.24"));
        assert_eq!(shown("28.5.2,").as_deref(), Some("28.5.2"));
        for text in ["github.com/containerd/containerd/v2", "v2", "2.1", "dev", ""] {
            assert_eq!(shown(text), None, "{text}");
        }
    }

    #[test]
    fn a_containerd_has_the_file_that_it_was_given() {
        let file = |arguments: &[&str]| program(arguments).config_file().display().to_string();
        assert_eq!(file(&[]), "/etc/containerd/config.toml");
        assert_eq!(file(&["--log-level", "info", "-c", "/a.toml", "-a", "/x.sock"]), "/a.toml");
        assert_eq!(file(&["--config=/b.toml"]), "/b.toml");
    }

    #[test]
    fn only_programs_of_this_mount_namespace_are_asked() {
        let dir = tempfile::tempdir().unwrap();
        let process = |id: &str, comm: &str, mounts: &str| {
            let process = dir.path().join(id);
            fs::create_dir_all(process.join("ns")).unwrap();
            fs::write(process.join("comm"), format!("{comm}\n")).unwrap();
            fs::write(process.join("cmdline"), "containerd\0-c\0/a.toml\0").unwrap();
            std::os::unix::fs::symlink(mounts, process.join("ns/mnt")).unwrap();
            std::os::unix::fs::symlink("../containerd", process.join("exe")).unwrap();
        };
        let program = dir.path().join("containerd");
        // Another process writes the program: a child that another test starts could inherit the open file, and a
        // program whose file is open for writing cannot be started.
        let script = "#!/bin/sh\necho \"containerd example.com/v2 v2.1.4 0123abc\"\n";
        let mut write = std::process::Command::new("sh");
        write.args(["-c", "printf %s \"$1\" > \"$2\"", "sh", script]).arg(&program);
        assert!(write.status().unwrap().success());
        let allow =
            |mode| fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        allow(0o755);
        process("self", "berth", "mnt:[1]");
        process("10", "containerd", "mnt:[1]");
        process("11", "containerd", "mnt:[2]");
        process("12", "sh", "mnt:[1]");
        let is_root = fs::metadata(dir.path()).unwrap().uid() == 0;
        let expected: &[Program] = if is_root { &[self::program(&["-c", "/a.toml", ""])] } else { &[] };
        let mut programs = Programs::default();
        assert_eq!(programs.find(dir.path()), expected);
        assert_eq!(programs.find(dir.path()), expected, "the answer is kept");
        // Another user could have written this one.
        allow(0o777);
        assert_eq!(programs.find(dir.path()), []);
    }
}
