//! What a grant changes in its container: how the container learns its GPUs, and mounts and devices
//! that the operator adds. Berth runs no MPS: an operator starts a control daemon, and [`MpsEdits`] says
//! to which one the containers of a resource are sent.

use berth_kernel::names::Resource;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// How a container is told its GPUs. NVIDIA's names.
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

/// How GPUs are named to the container runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceIdStrategy {
    /// By UUID.
    #[default]
    Uuid,
    /// By NVML index.
    Index,
}

/// What NVIDIA's container runtime adds on request.
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
    /// The variable that asks the runtime for it. NVIDIA's name.
    #[must_use]
    pub fn variable(self) -> &'static str {
        match self {
            Self::Gdrcopy => "NVIDIA_GDRCOPY",
            Self::Gds => "NVIDIA_GDS",
            Self::Mofed => "NVIDIA_MOFED",
        }
    }
}

/// What containers are given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edits {
    /// The ways, at least one.
    pub strategies: BTreeSet<DeviceListStrategy>,
    /// How GPUs are named.
    pub id_strategy: DeviceIdStrategy,
    /// Whether the device nodes are passed.
    pub pass_device_specs: bool,
    /// Where the driver is installed.
    pub driver_root: PathBuf,
    /// Where the device nodes are on the host; the driver root unless it is given.
    pub dev_root: PathBuf,
    /// Which libraries beside CUDA the runtime is asked for.
    pub features: BTreeSet<Feature>,
    /// CDI kind, as nvidia-ctk writes it by default.
    pub cdi_kind: String,
    /// Prefix of the CDI annotation's key.
    pub cdi_annotation_prefix: String,
    /// Mounts, devices and MPS by resource.
    pub resources: BTreeMap<Resource, ResourceEdits>,
}

impl Edits {
    /// Whether containers learn their GPUs by CDI alone, which then gives them the device nodes, too.
    #[must_use]
    pub fn by_cdi_only(&self) -> bool {
        use DeviceListStrategy::{CdiAnnotations, CdiCri};
        self.strategies.iter().all(|strategy| matches!(strategy, CdiAnnotations | CdiCri))
    }

    /// By resource the socket without which its containers would run outside of MPS.
    #[must_use]
    pub fn mps_sockets(&self) -> BTreeMap<Resource, PathBuf> {
        let with_mps =
            self.resources.iter().filter_map(|(resource, own)| Some((resource, own.mps.as_ref()?)));
        with_mps.map(|(resource, mps)| (resource.clone(), mps.control_socket())).collect()
    }
}

/// Mounts and devices of one resource, and its MPS.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ResourceEdits {
    /// Host folders or files mounted into its containers.
    pub mounts: Vec<WantedMount>,
    /// Host devices given to its containers.
    pub devices: Vec<WantedDevice>,
    /// The MPS control daemon that keeps its containers within their limits.
    pub mps: Option<MpsEdits>,
}

/// A mount of the operator's own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WantedMount {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Read-only unless said otherwise.
    #[serde(default = "yes")]
    pub read_only: bool,
}

/// A device of the operator's own.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WantedDevice {
    /// Path on the host.
    pub host_path: String,
    /// Path in the container; the same if not given.
    pub container_path: Option<String>,
    /// cgroup permissions: letters of `rwm`.
    #[serde(default = "read_write")]
    pub permissions: String,
}

fn yes() -> bool {
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
            dev_root: "/".into(),
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
    /// Its pipe directory on the host: what it was started with as `CUDA_MPS_PIPE_DIRECTORY`, or where
    /// the host has that of a daemon in a container.
    pub pipe_directory: String,
    /// The same in the container, where it is not as on the host. Clients and daemon must know it by one
    /// name, so this is the daemon's own where that runs in a container.
    pub container_pipe_directory: Option<String>,
    /// The daemon's log directory on the host; mounted by the same name.
    pub log_directory: Option<String>,
    /// The shared memory that daemon and clients have in common; `/dev/shm` in the container.
    #[serde(default = "host_shm")]
    pub shm: String,
}

fn host_shm() -> String {
    "/dev/shm".into()
}

impl MpsEdits {
    /// Every path in it, with its key.
    pub fn paths(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let given = [("pipeDirectory", &self.pipe_directory), ("shm", &self.shm)].into_iter();
        let container = self.container_pipe_directory.iter().map(|path| ("containerPipeDirectory", path));
        given.chain(container).chain(self.log_directory.iter().map(|path| ("logDirectory", path)))
    }

    /// The pipe directory's name in the container.
    #[must_use]
    pub fn inner_pipe_directory(&self) -> &str {
        self.container_pipe_directory.as_ref().unwrap_or(&self.pipe_directory)
    }

    /// What is there as long as the daemon runs.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        Path::new(&self.pipe_directory).join(CONTROL_SOCKET)
    }
}
