//! `guard`: the plugin of the container runtime, and the daemon's connection to it.

use super::checks::Checks;
use berth_guard::Settings;
use serde::Deserialize;
use std::path::PathBuf;

/// The file's `guard`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct GuardFile {
    socket: Option<PathBuf>,
    nri_socket: Option<PathBuf>,
    cgroup_root: Option<PathBuf>,
}

impl GuardFile {
    pub(super) fn resolve(self, checks: &mut Checks) -> Settings {
        let mut path = |setting, given: Option<PathBuf>, usual| {
            given.map_or(usual, |path| checks.absolute_path(setting, path))
        };
        let usual = Settings::default();
        Settings {
            socket: path("guard.socket", self.socket, usual.socket),
            nri_socket: path("guard.nriSocket", self.nri_socket, usual.nri_socket),
            cgroup_root: path("guard.cgroupRoot", self.cgroup_root, usual.cgroup_root),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, FileConfig, ServeArgs};
    use berth_guard::Settings;

    #[test]
    fn its_paths_are_absolute_and_have_defaults() {
        let settings = |yaml| Config::merge(&ServeArgs::default(), FileConfig::parse(yaml).unwrap());
        assert_eq!(settings("").unwrap().guard, Settings::default());
        let guard =
            settings("guard: {socket: /tmp/g.sock, cgroupRoot: /sys/fs/cgroup/unified}").unwrap().guard;
        assert_eq!(guard.socket.to_str(), Some("/tmp/g.sock"));
        assert_eq!(guard.cgroup_root.to_str(), Some("/sys/fs/cgroup/unified"));
        let error = settings("guard: {nriSocket: \"a\\nb\"}").unwrap_err().to_string();
        assert!(error.contains("guard.nriSocket"), "{error}");
    }
}
