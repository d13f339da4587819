//! `cdi` and `containerRuntime`: CDI specifications, and the configuration of the node's container runtime.

use super::checks::Checks;
use super::nvidia::args::{NvidiaArgs, non_empty};
use serde::Deserialize;
use std::path::PathBuf;

/// Most folders of specifications, and most files of container runtimes.
const PATHS_MAX: usize = 16;
/// The folders that runtimes read (CDI SPEC.md, "Default directories").
const FOLDERS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Usual configuration files: containerd's, those of k3s and RKE2, CRI-O's, Docker's.
pub const RUNTIME_FILES: [&str; 5] = [
    "/etc/containerd/config.toml",
    "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
    "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
    "/etc/crio/crio.conf",
    "/etc/docker/daemon.json",
];

/// When Berth makes a CDI specification of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CdiGenerate {
    /// If no other names every GPU.
    #[default]
    Auto,
    /// Always, and GPUs are passed by it.
    Always,
    /// Never.
    Never,
}

/// Settings of CDI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CdiSettings {
    /// When Berth makes a specification.
    pub generate: CdiGenerate,
    /// The folders of specifications, in ascending order of precedence; Berth's own is in the last one.
    pub folders: Vec<PathBuf>,
    /// The path of nvidia-cdi-hook on the host, if it is not in a usual place.
    pub hook: Option<PathBuf>,
    /// Configuration files of container runtimes; those that do not exist are skipped.
    pub runtime_files: Vec<PathBuf>,
}

/// The file's `cdi`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct CdiFile {
    generate: Option<CdiGenerate>,
    folders: Option<Vec<PathBuf>>,
}

/// The file's `containerRuntime`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RuntimeFile {
    config_files: Option<Vec<PathBuf>>,
}

/// The settings of flags, environment and file.
pub(super) fn resolve(
    cdi: Option<CdiFile>,
    runtime: Option<RuntimeFile>,
    nvidia: &NvidiaArgs,
    checks: &mut Checks,
) -> CdiSettings {
    let (cdi, runtime) = (cdi.unwrap_or_default(), runtime.unwrap_or_default());
    let mut paths = |setting: &str, given: Option<Vec<PathBuf>>, usual: &[&str]| -> Vec<PathBuf> {
        let given = given.unwrap_or_else(|| usual.iter().map(PathBuf::from).collect());
        checks.at_most(setting, given.len(), PATHS_MAX, "paths");
        given
            .into_iter()
            .enumerate()
            .map(|(n, path)| checks.absolute_path(&format!("{setting}[{n}]"), path))
            .collect()
    };
    let folders = paths("cdi.folders", cdi.folders, &FOLDERS);
    let runtime_files = paths("containerRuntime.configFiles", runtime.config_files, &RUNTIME_FILES);
    if folders.is_empty() {
        checks.add(super::checks::bad("cdi.folders", "[]", "at least one folder"));
    }
    CdiSettings {
        generate: cdi.generate.unwrap_or_default(),
        folders,
        hook: non_empty(nvidia.nvidia_cdi_hook_path.as_ref()).map(PathBuf::from),
        runtime_files,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, FileConfig, ServeArgs};

    fn settings(yaml: &str) -> Result<Config, String> {
        let file = FileConfig::parse(yaml).map_err(|error| error.to_string())?;
        Config::merge(&ServeArgs::default(), file).map_err(|error| error.to_string())
    }

    #[test]
    fn the_strategy_is_auto_and_a_specification_is_made_where_none_exists() {
        let config = settings("").unwrap();
        assert!(config.containers.auto_strategy);
        assert_eq!(config.containers.cdi.generate, CdiGenerate::Auto);
        assert_eq!(config.containers.cdi.folders, ["/etc/cdi", "/var/run/cdi"].map(PathBuf::from));
        assert!(config.containers.cdi.runtime_files.contains(&PathBuf::from("/etc/containerd/config.toml")));
        let config =
            settings("containerEdits: {deviceListStrategy: [envvar]}\ncdi: {generate: never}").unwrap();
        assert!(!config.containers.auto_strategy);
        assert_eq!(config.containers.cdi.generate, CdiGenerate::Never);
    }

    #[test]
    fn wrong_settings_are_refused() {
        for (yaml, expected) in [
            ("cdi: {generate: sometimes}", "generate"),
            ("cdi: {folders: []}", "at least one folder"),
            ("containerRuntime: {configFile: /x}", "configFile"),
            ("containerEdits: {deviceListStrategy: [auto, envvar]}", "auto, or at least one of"),
            ("containerEdits: {deviceListStrategy: []}", "auto, or at least one of"),
        ] {
            let error = settings(yaml).unwrap_err();
            assert!(error.contains(expected), "{yaml}: {error}");
        }
    }
}
