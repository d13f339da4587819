//! The two programs, how each is started, and the GPUs that both see.

use super::Args;
use super::cluster::NODE;
use anyhow::{Context as _, Result, ensure};
use fake_nvml::{Installed, State};
use fakes::program;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use serde_json::json;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Claims that are prepared at once, each of a GPU of its own.
pub(crate) const CLAIMS: usize = 32;
/// GPUs that Berth grants through its device plugin.
pub(crate) const PLUGIN_GPUS: usize = 8;
/// All GPUs of the node.
pub(crate) const GPUS: usize = PLUGIN_GPUS + CLAIMS;
/// The major number of NVIDIA's device nodes.
const NVIDIA_MAJOR: u32 = 195;

/// A program that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Subject {
    Berth,
    Nvidia,
}

impl Subject {
    /// The driver's name. NVIDIA's is fixed; two drivers of one name would delete each other's slices.
    pub(crate) fn driver(self) -> &'static str {
        match self {
            Self::Berth => "gpu.berth.test",
            Self::Nvidia => "gpu.nvidia.com",
        }
    }

    /// The devices that it publishes.
    pub(crate) fn published(self) -> usize {
        match self {
            Self::Berth => CLAIMS,
            Self::Nvidia => GPUS,
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Berth => "Berth",
            Self::Nvidia => "NVIDIA",
        })
    }
}

/// What Berth is to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Setup {
    /// The first GPUs, through the device plugin, so that they keep this API in the other setups.
    First,
    /// All GPUs, by the device plugin.
    Plugin,
    /// All GPUs, those that it has not seen before by the DRA driver.
    Driver,
}

impl Setup {
    /// GPUs of the node.
    pub(crate) fn gpus(self) -> usize {
        match self {
            Self::First => PLUGIN_GPUS,
            Self::Plugin | Self::Driver => GPUS,
        }
    }

    /// Devices of the device plugin.
    pub(crate) fn plugin_devices(self) -> usize {
        match self {
            Self::First | Self::Driver => PLUGIN_GPUS,
            Self::Plugin => GPUS,
        }
    }
}

/// The folders of one node.
pub(crate) struct Places {
    /// The kubelet's: sockets, in memory as they are not what is measured.
    pub(crate) kubelet: PathBuf,
    /// The CDI specifications of each program, in memory as on a node.
    pub(crate) cdi: PathBuf,
    /// Of Berth's state, and of the checkpoint of NVIDIA's driver.
    pub(crate) disk: PathBuf,
}

impl Places {
    /// Where the kubelet finds the registration sockets of plugins.
    pub(crate) fn registry(&self) -> PathBuf {
        self.kubelet.join("plugins_registry")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.disk.join("state")
    }

    fn cdi_of(&self, subject: Subject) -> PathBuf {
        self.cdi.join(subject.to_string())
    }

    /// Creates the folders, and the CDI specification by which Berth passes GPUs.
    pub(crate) fn create(&self) -> Result<()> {
        fs::create_dir_all(self.registry())?;
        fs::create_dir_all(self.cdi_of(Subject::Nvidia))?;
        let folder = self.cdi_of(Subject::Berth);
        fs::create_dir_all(&folder)?;
        let device =
            |uuid: &String| json!({ "name": uuid, "containerEdits": { "env": [format!("GPU={uuid}")] } });
        let uuids: Vec<String> = State::h100(GPUS).gpus.into_iter().map(|gpu| gpu.uuid).collect();
        let devices: Vec<_> = uuids.iter().map(device).collect();
        let specification = json!({ "cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices });
        fs::write(folder.join("gpus.json"), specification.to_string())?;
        Ok(())
    }
}

/// The programs, and the GPUs that both see.
pub(crate) struct Programs {
    berth: PathBuf,
    nvidia: Option<PathBuf>,
    kubeconfig: PathBuf,
    berth_kubeconfig: PathBuf,
    logs: PathBuf,
    gpus: Installed,
    /// What an installed driver consists of.
    driver_root: PathBuf,
}

impl Programs {
    /// # Errors
    /// If a program is missing, or a folder cannot be written.
    pub(crate) fn new(args: &Args) -> Result<Self> {
        let berth = program::or_beside_this(args.berth.as_deref(), "berth")?;
        if let Some(nvidia) = &args.nvidia {
            ensure!(
                nvidia.is_file(),
                "{} does not exist: build it as tests/e2e/README.md says",
                nvidia.display()
            );
        }
        let driver_root = args.memory.join("driver");
        let gpus = driver(&driver_root).context("the folder of the driver")?;
        Ok(Self {
            berth,
            nvidia: args.nvidia.clone(),
            kubeconfig: args.kubeconfig.clone(),
            berth_kubeconfig: args.berth_kubeconfig.clone(),
            logs: args.logs.clone(),
            gpus,
            driver_root,
        })
    }

    /// The programs that are measured.
    pub(crate) fn subjects(&self) -> Vec<Subject> {
        let nvidia = self.nvidia.as_ref().map(|_| Subject::Nvidia);
        std::iter::once(Subject::Berth).chain(nvidia).collect()
    }

    pub(crate) fn log(&self, subject: Subject) -> PathBuf {
        self.logs.join(format!("{subject}.log"))
    }

    /// The command that starts Berth, and the GPUs that it finds.
    pub(crate) fn berth(&self, setup: Setup, places: &Places) -> Result<Command> {
        State::h100(setup.gpus()).write(self.gpus.state_path())?;
        let dra = if setup == Setup::Driver {
            json!({ "enabled": true, "driver": Subject::Berth.driver(), "via": "dra" })
        } else {
            json!({ "enabled": false })
        };
        let configuration = json!({
            "nodeName": NODE,
            "kubeletDir": places.kubelet,
            "stateDir": places.state(),
            "kubeconfig": self.berth_kubeconfig,
            "nvmlLibrary": self.gpus.library(),
            "adminListen": "127.0.0.1:0",
            // What is measured is what a request costs, not how many one client may send.
            "admin": { "limits": { "readsPerSecond": 1_000_000, "changesPerSecond": 1_000_000 } },
            "containerEdits": { "deviceListStrategy": ["cdi-cri"] },
            "cdi": { "folders": [places.cdi_of(Subject::Berth)], "generate": "never" },
            "dra": dra,
        });
        // JSON is YAML.
        let file = places.disk.join("berth.yaml");
        fs::write(&file, configuration.to_string())?;
        let mut command = Command::new(&self.berth);
        command.arg("serve").arg("--config").arg(file);
        self.with_environment(&mut command);
        Ok(command)
    }

    /// The command that starts the plugin of NVIDIA's DRA driver, by the flags of its chart.
    pub(crate) fn nvidia(&self, places: &Places) -> Result<Command> {
        let program = self.nvidia.as_ref().context("NVIDIA's DRA driver is not measured")?;
        State::h100(GPUS).write(self.gpus.state_path())?;
        let plugins = places.disk.join("plugins");
        fs::create_dir_all(&plugins)?;
        let mut command = Command::new(program);
        command.args(["--node-name", NODE, "--namespace", "default", "-v", "4"]);
        // The image of the pods that it starts for MPS; the benchmark starts none.
        command.args(["--image-name", "none"]);
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command.arg("--cdi-root").arg(places.cdi_of(Subject::Nvidia));
        command.arg("--container-driver-root").arg(&self.driver_root);
        command.arg("--nvidia-driver-root").arg(&self.driver_root);
        // Written into its specifications, and not run.
        command.arg("--nvidia-cdi-hook-path").arg(self.driver_root.join("usr/bin/nvidia-cdi-hook"));
        command.arg("--kubelet-registrar-directory-path").arg(places.registry());
        command.arg("--kubelet-plugins-directory-path").arg(plugins);
        self.with_environment(&mut command);
        Ok(command)
    }

    fn with_environment(&self, command: &mut Command) {
        let path = std::env::var_os("PATH").unwrap_or_default();
        command.env_clear().env("PATH", path).env("HOME", "/root");
        command.env("FAKE_NVML_CONFIG", self.gpus.state_path());
    }
}

/// The files of an installed driver, by which NVIDIA's programs find it: the libraries, of which one is the fake NVML, the
/// program `nvidia-smi`, and the device nodes.
fn driver(root: &Path) -> Result<Installed> {
    let (libraries, programs, nodes) = (root.join("usr/lib64"), root.join("usr/bin"), root.join("dev"));
    let state = State::h100(GPUS);
    let gpus = Installed::new(&libraries, &state)?;
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        fs::write(libraries.join(format!("{name}.{}", state.driver_version)), [])?;
    }
    fs::create_dir_all(&programs)?;
    for name in ["nvidia-smi", "nvidia-cdi-hook"] {
        fs::write(programs.join(name), [])?;
    }
    fs::create_dir_all(&nodes)?;
    let of_gpus = (0..GPUS).map(|minor| format!("nvidia{minor}"));
    let others = ["nvidiactl", "nvidia-modeset", "nvidia-uvm", "nvidia-uvm-tools"].map(String::from);
    for (minor, name) in (0..).zip(of_gpus.chain(others)) {
        let (kind, mode) = (FileType::CharacterDevice, Mode::from_raw_mode(0o666));
        mknodat(CWD, nodes.join(&name), kind, mode, makedev(NVIDIA_MAJOR, minor))
            .with_context(|| format!("the device node {name} cannot be created: run this as root"))?;
    }
    Ok(gpus)
}
