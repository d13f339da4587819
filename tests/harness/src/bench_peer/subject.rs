//! The two programs, and how each is started.

use crate::bench::history;
use anyhow::{Context as _, Result, ensure};
use fake_nvml::{Installed, State};
use fakes::program;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// NVIDIA's device plugin has this path in its source.
pub(crate) const KUBELET_DIR: &str = "/var/lib/kubelet";
const GPUS: usize = 8;
/// The resource of Berth's whole GPUs while NVIDIA's plugin runs beside it.
const BERTHS_RESOURCE: &str = "berth.test/gpu";
/// Shares of each GPU: 1,024 on the node.
const REPLICAS: usize = 128;

/// A program that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    Nvidia,
    Berth,
}

impl Subject {
    pub(crate) const BOTH: [Self; 2] = [Self::Nvidia, Self::Berth];
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Nvidia => "NVIDIA",
            Self::Berth => "Berth",
        })
    }
}

/// What the program is to offer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// Each GPU whole; Berth without a policy.
    Whole,
    /// The same, Berth's under a resource of its own, so that both programs can run.
    SideBySide,
    /// Time-sliced GPUs.
    Shares,
    /// Whole GPUs, and Berth keeps as many records of ended allocations as it may.
    History,
}

impl Setup {
    pub(crate) fn resource(self, subject: Subject) -> &'static str {
        match (self, subject) {
            (Self::SideBySide, Subject::Berth) => BERTHS_RESOURCE,
            (Self::Whole | Self::SideBySide | Self::History, _) => "nvidia.com/gpu",
            (Self::Shares, _) => "nvidia.com/gpu.shared",
        }
    }

    /// Devices of the resource.
    pub(crate) fn devices(self) -> usize {
        match self {
            Self::Whole | Self::SideBySide | Self::History => GPUS,
            Self::Shares => GPUS * REPLICAS,
        }
    }

    fn berth(self) -> String {
        // What is measured is what a request costs, not how many one client may send.
        let limits = "admin: { limits: { readsPerSecond: 1000000, changesPerSecond: 1000000 } }\n";
        limits.to_owned()
            + &match self {
                Self::Whole => String::new(),
                Self::SideBySide => format!("resource: {BERTHS_RESOURCE}\n"),
                Self::Shares => {
                    format!("stack: [{{ policy: timeslice, parameters: {{ replicas: {REPLICAS} }} }}]\n")
                }
                Self::History => format!("history: {{ allocations: {} }}\n", history::RECORDS),
            }
    }

    fn nvidia(self) -> String {
        let sharing = match self {
            Self::Whole | Self::SideBySide | Self::History => String::new(),
            Self::Shares => format!(
                "sharing: {{ timeSlicing: {{ renameByDefault: true, \
                 resources: [{{ name: nvidia.com/gpu, replicas: {REPLICAS} }}] }} }}\n"
            ),
        };
        format!("version: v1\nflags: {{ migStrategy: none }}\n{sharing}")
    }
}

/// The programs, the GPUs that both see, and files of the run.
pub(crate) struct Programs {
    nvidia: PathBuf,
    berth: PathBuf,
    gpus: Installed,
    /// In memory.
    folder: TempDir,
}

impl Programs {
    /// `berth`: the one beside this program, if it is not given.
    ///
    /// # Errors
    /// If a program is missing, or this is not the place where NVIDIA's plugin can be run without harm.
    pub(crate) fn new(nvidia: &Path, berth: Option<&Path>) -> Result<Self> {
        let berth = program::or_beside_this(berth, "berth")?;
        ensure!(
            nvidia.is_file(),
            "{} does not exist: `just bench-peer` builds NVIDIA's device plugin and passes its path",
            nvidia.display()
        );
        let parent = Path::new("/var/lib");
        let mine = crate::bench::disk::is_in_memory(parent)?
            && std::fs::read_dir(KUBELET_DIR).is_ok_and(|mut entries| entries.next().is_none());
        ensure!(
            mine,
            "{KUBELET_DIR} is not an empty folder in memory: the plugins under test register there, so that a mount \
             namespace is needed, which `just bench-peer` makes"
        );
        let folder = TempDir::new_in(parent).context("a folder in /var/lib")?;
        let state = State::h100(GPUS);
        let gpus = Installed::new(&folder.path().join("nvml"), &state)?;
        Ok(Self { nvidia: nvidia.to_owned(), berth, gpus, folder })
    }

    pub(crate) fn berth(&self) -> &Path {
        &self.berth
    }

    /// In memory.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn log(&self, subject: Subject) -> PathBuf {
        self.folder().join(format!("{subject}.log"))
    }

    /// `state`: Berth's state folder.
    pub(crate) fn command(&self, subject: Subject, setup: Setup, state: &Path) -> Result<Command> {
        let file = self.folder().join(format!("{subject}.yaml"));
        let mut command = match subject {
            Subject::Nvidia => {
                std::fs::write(&file, setup.nvidia())?;
                let mut command = Command::new(&self.nvidia);
                command.arg("--config-file").arg(file);
                command
            }
            Subject::Berth => {
                std::fs::write(&file, setup.berth())?;
                let mut command = Command::new(&self.berth);
                command.arg("serve").arg("--config").arg(file).arg("--state-dir").arg(state);
                command.args(["--admin-listen", "127.0.0.1:0", "--api-server", "off"]);
                command
            }
        };
        let library = self.gpus.library().parent().context("the folder of the NVML library")?;
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("HOME", "/root");
        command.env("LD_LIBRARY_PATH", library).env("FAKE_NVML_CONFIG", self.gpus.state_path());
        Ok(command)
    }
}
