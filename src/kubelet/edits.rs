//! What a grant changes in its container: how GPUs are passed to it, and the operator's mounts and
//! devices. Berth runs no MPS control daemon: an operator starts one, and [`MpsEdits`] describes the one
//! that the containers of a resource use.

use berth_kernel::hardware::device_nodes::{HostFolder, MOUNTED_ROOT};
use berth_kernel::hardware::gpu::Part;
use berth_kernel::ids::names::Resource;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// How GPUs are passed to a container. NVIDIA's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceListStrategy {
    /// `NVIDIA_VISIBLE_DEVICES`.
    Envvar,
    /// `/dev/null` mounted at `/var/run/nvidia-container-devices/<id>`.
    VolumeMounts,
    /// CDI names in an annotation.
    CdiAnnotations,
    /// CDI names in the kubelet API's own field.
    CdiCri,
}

impl DeviceListStrategy {
    /// Whether it passes CDI names.
    #[must_use]
    pub fn is_cdi(self) -> bool {
        matches!(self, Self::CdiAnnotations | Self::CdiCri)
    }

    /// Its keyword.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Envvar => "envvar",
            Self::VolumeMounts => "volume-mounts",
            Self::CdiAnnotations => "cdi-annotations",
            Self::CdiCri => "cdi-cri",
        }
    }
}

/// How GPUs are named to the container runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceIdStrategy {
    /// By UUID.
    #[default]
    Uuid,
    /// By NVML index.
    Index,
}

/// The name of a part to the container runtime.
#[must_use]
pub fn device_name(part: &Part, strategy: DeviceIdStrategy) -> String {
    match strategy {
        DeviceIdStrategy::Index => match part.mig_index() {
            _ if part.is_whole_gpu() => part.gpu_index.to_string(),
            Some(index) => format!("{}:{index}", part.gpu_index),
            None => part.id.to_string(),
        },
        DeviceIdStrategy::Uuid => part.id.to_string(),
    }
}

/// A library that NVIDIA's container runtime adds on request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Feature {
    /// GDRCopy.
    Gdrcopy,
    /// GPUDirect Storage.
    Gds,
    /// MOFED.
    Mofed,
}

impl Feature {
    /// The variable that requests it from the runtime. NVIDIA's name.
    #[must_use]
    pub fn variable(self) -> &'static str {
        match self {
            Self::Gdrcopy => "NVIDIA_GDRCOPY",
            Self::Gds => "NVIDIA_GDS",
            Self::Mofed => "NVIDIA_MOFED",
        }
    }
}

/// The changes to containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edits {
    /// How GPUs are passed; at least one strategy.
    pub strategies: BTreeSet<DeviceListStrategy>,
    /// How GPUs are named.
    pub id_strategy: DeviceIdStrategy,
    /// Whether the device nodes are passed.
    pub pass_device_specs: bool,
    /// Where the driver is installed.
    pub driver_root: PathBuf,
    /// Where this process sees the driver root: in a container the host's path does not exist.
    pub driver_root_in_container: PathBuf,
    /// The folder of `dev` on the host, where it is not that of the driver root.
    pub dev_root: Option<PathBuf>,
    /// Libraries besides CUDA that are requested from the runtime.
    pub features: BTreeSet<Feature>,
    /// CDI kind; defaults to nvidia-ctk's.
    pub cdi_kind: String,
    /// Prefix of the CDI annotation's key.
    pub cdi_annotation_prefix: String,
    /// Mounts, devices and MPS by resource.
    pub resources: BTreeMap<Resource, ResourceEdits>,
}

impl Edits {
    /// The folders whose `dev` is searched for device nodes, in order: the configured one, that of the driver root, and
    /// the machine's own, in which a container has the nodes that its runtime passed.
    #[must_use]
    pub fn node_folders(&self) -> Vec<HostFolder> {
        let mut folders: Vec<_> = self.dev_root.iter().map(|root| dev_folder(root)).collect();
        folders.extend([self.driver_folder(), HostFolder::same("/")]);
        folders.dedup();
        folders
    }

    /// The driver root; where nothing is mounted for it, this process runs on the host and sees it by the host's path.
    /// An empty folder has nothing mounted.
    #[must_use]
    pub fn driver_folder(&self) -> HostFolder {
        if fs::read_dir(&self.driver_root_in_container).is_ok_and(|mut entries| entries.next().is_some()) {
            return HostFolder {
                seen: self.driver_root_in_container.clone(),
                host: self.driver_root.clone(),
            };
        }
        HostFolder::same(&self.driver_root)
    }

    /// Whether all strategies are CDI, which then adds the device nodes, too.
    #[must_use]
    pub fn is_cdi_only(&self) -> bool {
        self.strategies.iter().all(|strategy| strategy.is_cdi())
    }

    /// The MPS control socket of each resource with MPS. Without it, containers would run outside MPS.
    #[must_use]
    pub fn mps_sockets(&self) -> BTreeMap<Resource, PathBuf> {
        let with_mps =
            self.resources.iter().filter_map(|(resource, edits)| Some((resource, edits.mps.as_ref()?)));
        with_mps.map(|(resource, mps)| (resource.clone(), mps.control_socket())).collect()
    }
}

/// The configured folder of `dev`. Where it is not mounted into this process's container, its nodes are those that the
/// runtime passed to the container.
fn dev_folder(root: &Path) -> HostFolder {
    if root.join("dev").is_dir() {
        return HostFolder::same(root);
    }
    HostFolder { seen: "/".into(), host: root.to_owned() }
}

/// Mounts, devices and MPS of one resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ResourceEdits {
    /// Host folders or files mounted into its containers.
    pub mounts: Vec<HostMount>,
    /// Host devices passed to its containers.
    pub devices: Vec<HostDevice>,
    /// The MPS control daemon that enforces its containers' limits.
    pub mps: Option<MpsEdits>,
}

/// A mount that the operator adds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostMount {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Defaults to true.
    #[serde(default = "default_true")]
    pub read_only: bool,
}

/// A device that the operator adds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct HostDevice {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container; defaults to the host's path.
    pub container_path: Option<String>,
    /// cgroup permissions: letters of `rwm`.
    #[serde(default = "read_write")]
    pub permissions: String,
}

fn default_true() -> bool {
    true
}

fn read_write() -> String {
    "rw".into()
}

impl Default for Edits {
    fn default() -> Self {
        Self {
            strategies: BTreeSet::from([DeviceListStrategy::Envvar]),
            id_strategy: DeviceIdStrategy::Uuid,
            pass_device_specs: false,
            driver_root: "/".into(),
            driver_root_in_container: MOUNTED_ROOT.into(),
            dev_root: None,
            features: BTreeSet::new(),
            cdi_kind: "nvidia.com/gpu".into(),
            cdi_annotation_prefix: "cdi.k8s.io/".into(),
            resources: BTreeMap::new(),
        }
    }
}

/// The control daemon's socket in its pipe directory.
const CONTROL_SOCKET: &str = "control";

/// The control daemon of one resource's containers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MpsEdits {
    /// Its pipe directory on the host: its `CUDA_MPS_PIPE_DIRECTORY`, or that directory's path on the host
    /// where the daemon runs in a container.
    pub pipe_directory: String,
    /// The pipe directory in the container, if it differs from the host's. Clients and daemon must use the
    /// same path, so this is the daemon's own path where it runs in a container.
    pub container_pipe_directory: Option<String>,
    /// The daemon's log directory on the host; mounted under the same path.
    pub log_directory: Option<String>,
    /// The shared memory of daemon and clients on the host; `/dev/shm` in the container.
    #[serde(default = "host_shm")]
    pub shm: String,
}

fn host_shm() -> String {
    "/dev/shm".into()
}

impl MpsEdits {
    /// Every configured path, with its key.
    pub fn paths(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let given = [("pipeDirectory", &self.pipe_directory), ("shm", &self.shm)].into_iter();
        let container = self.container_pipe_directory.iter().map(|path| ("containerPipeDirectory", path));
        given.chain(container).chain(self.log_directory.iter().map(|path| ("logDirectory", path)))
    }

    /// The pipe directory in the container.
    #[must_use]
    pub fn inner_pipe_directory(&self) -> &str {
        self.container_pipe_directory.as_ref().unwrap_or(&self.pipe_directory)
    }

    /// The control socket on the host. It exists while the daemon runs.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        Path::new(&self.pipe_directory).join(CONTROL_SOCKET)
    }
}
