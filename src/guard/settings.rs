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
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            socket: "/run/berth-guard/guard.sock".into(),
            nri_socket: "/var/run/nri/nri.sock".into(),
            cgroup_root: "/sys/fs/cgroup".into(),
        }
    }
}
