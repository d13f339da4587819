//! The settings of this crate.

use std::path::PathBuf;

/// The settings of the guard, and of the daemon's connection to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The socket between guard and daemon.
    pub socket: PathBuf,
    /// The socket on which the container runtime accepts plugins.
    pub nri_socket: PathBuf,
    /// Where the cgroups of the node are mounted: cgroup v2, or the folder of v1's hierarchies.
    pub cgroup_root: PathBuf,
    /// The kubelet's folder `device-plugins`, in which it keeps what device plugins gave each container.
    pub device_plugins: PathBuf,
    /// The folder of the files that containers of claims find; the names of its subfolders say what a claim was granted.
    pub claim_grants: PathBuf,
    /// The namespace of Berth's own pods, which the guard neither changes nor refuses.
    pub own_namespace: Option<String>,
    /// Whether and how the memory of containers is limited.
    pub limits: LimitSettings,
}

/// The settings of memory limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LimitSettings {
    /// None are set.
    Off,
    /// The GPUs are simulated, so that there is no driver.
    Simulated {
        /// Whether a container is refused if its limits cannot be set.
        is_required: bool,
    },
    /// By NVML.
    Nvml {
        /// Path of `libnvidia-ml.so.1`; by default it is searched for.
        library: Option<PathBuf>,
        /// Root of the driver's files.
        driver_root: PathBuf,
        /// Whether a container is refused if its limits cannot be set.
        is_required: bool,
    },
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            socket: "/run/berth-guard/guard.sock".into(),
            nri_socket: "/var/run/nri/nri.sock".into(),
            cgroup_root: "/sys/fs/cgroup".into(),
            own_namespace: None,
            claim_grants: "/var/lib/kubelet/plugins/gpu.nvidia.com/grants".into(),
            device_plugins: "/var/lib/kubelet/device-plugins".into(),
            limits: LimitSettings::Nvml { library: None, driver_root: "/".into(), is_required: false },
        }
    }
}
