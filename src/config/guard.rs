//! `guard`: the plugin of the container runtime, and the daemon's connection to it. `enforce`: what the guard holds
//! containers to. `bypass`: what it does about containers that can use GPUs that were not allocated
//! to them.

use super::checks::{Checks, bad};
use super::gpus::GpuSource;
use berth_guard::{LimitSettings, Settings};
use berth_kernel::evidence::limits::Enforcement;
use berth_kernel::grants::bypass::{BypassAction, BypassRules};
use berth_kernel::ids::names::is_dns_label;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::path::PathBuf;

/// The file's `enforce`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct EnforceFile {
    memory: Option<EnforceMode>,
}

/// `enforce.memory`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum EnforceMode {
    Auto,
    Require,
    Off,
}

impl EnforceFile {
    pub(super) fn memory(self) -> Enforcement {
        match self.memory {
            None | Some(EnforceMode::Auto) => Enforcement::Auto,
            Some(EnforceMode::Require) => Enforcement::Require,
            Some(EnforceMode::Off) => Enforcement::Off,
        }
    }
}

/// The file's `bypass`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct BypassFile {
    action: Option<ActionMode>,
    exempt_namespaces: Option<BTreeSet<String>>,
}

/// `bypass.action`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ActionMode {
    Report,
    Strip,
    Deny,
}

impl BypassFile {
    pub(super) fn resolve(self, checks: &mut Checks) -> BypassRules {
        let usual = BypassRules::default();
        for name in self.exempt_namespaces.iter().flatten().filter(|name| !is_dns_label(name)) {
            checks.add(bad("bypass.exemptNamespaces", name, "whole names of namespaces, without patterns"));
        }
        BypassRules {
            action: match self.action {
                None => usual.action,
                Some(ActionMode::Report) => BypassAction::Report,
                Some(ActionMode::Strip) => BypassAction::Strip,
                Some(ActionMode::Deny) => BypassAction::Deny,
            },
            exempt_namespaces: self.exempt_namespaces.unwrap_or(usual.exempt_namespaces),
        }
    }
}

/// The file's `guard`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct GuardFile {
    socket: Option<PathBuf>,
    nri_socket: Option<PathBuf>,
    cgroup_root: Option<PathBuf>,
}

impl GuardFile {
    /// `source`: the source of the GPUs, unless it is wrong. The folders are [`Settings::device_plugins`] and
    /// [`Settings::claim_grants`].
    pub(super) fn resolve(
        self,
        source: Option<&GpuSource>,
        enforcement: Enforcement,
        (device_plugins, claim_grants): (PathBuf, PathBuf),
        checks: &mut Checks,
    ) -> Settings {
        let mut path = |setting, given: Option<PathBuf>, usual| {
            given.map_or(usual, |path| checks.absolute_path(setting, path))
        };
        let usual = Settings::default();
        Settings {
            socket: path("guard.socket", self.socket, usual.socket),
            nri_socket: path("guard.nriSocket", self.nri_socket, usual.nri_socket),
            cgroup_root: path("guard.cgroupRoot", self.cgroup_root, usual.cgroup_root),
            device_plugins,
            claim_grants,
            own_namespace: usual.own_namespace,
            limits: limits(source, enforcement),
        }
    }
}

fn limits(source: Option<&GpuSource>, enforcement: Enforcement) -> LimitSettings {
    let is_required = enforcement == Enforcement::Require;
    match source {
        _ if enforcement == Enforcement::Off => LimitSettings::Off,
        None | Some(GpuSource::Sim(_)) => LimitSettings::Simulated { is_required },
        Some(GpuSource::Nvml { library, driver_root }) => LimitSettings::Nvml {
            library: library.clone(),
            driver_root: driver_root.clone().unwrap_or_else(|| "/".into()),
            is_required,
        },
    }
}

#[cfg(test)]
mod tests {
    use crate::{Config, FileConfig, ServeArgs};
    use berth_guard::{LimitSettings, Settings};
    use berth_kernel::evidence::limits::Enforcement;
    use berth_kernel::grants::bypass::{BypassAction, BypassRules};

    #[test]
    fn what_is_enforced_is_known_to_the_kernel_and_to_the_guard() {
        let settings = |yaml| Config::merge(&ServeArgs::default(), FileConfig::parse(yaml).unwrap()).unwrap();
        let nvml = |is_required| LimitSettings::Nvml {
            library: Some("/lib/libnvidia-ml.so.1".into()),
            driver_root: "/".into(),
            is_required,
        };
        for (yaml, enforcement, limits) in [
            ("nvmlLibrary: /lib/libnvidia-ml.so.1", Enforcement::Auto, nvml(false)),
            (
                "{nvmlLibrary: /lib/libnvidia-ml.so.1, enforce: {memory: require}}",
                Enforcement::Require,
                nvml(true),
            ),
            ("enforce: {memory: off}", Enforcement::Off, LimitSettings::Off),
            (
                "{gpus: 'sim:1xt4', enforce: {memory: auto}}",
                Enforcement::Auto,
                LimitSettings::Simulated { is_required: false },
            ),
        ] {
            let config = settings(yaml);
            assert_eq!((config.rules.enforcement, config.guard.limits), (enforcement, limits), "{yaml}");
        }
        let error = FileConfig::parse("enforce: {memory: always}").unwrap_err().to_string();
        assert!(error.contains("`auto`, `require`"), "{error}");
    }

    /// The daemon of the same file may be given a kubeconfig by `--kubeconfig`.
    #[test]
    fn the_guard_needs_no_api_server() {
        let file = || FileConfig::parse("dra: {enabled: true, driver: gpu.example.com}").unwrap();
        let args = ServeArgs { is_guard: true, ..ServeArgs::default() };
        let config = Config::merge(&args, file()).unwrap();
        let folder = "/var/lib/kubelet/plugins/gpu.example.com/grants";
        assert_eq!(config.guard.claim_grants.to_str(), Some(folder));
        assert!(Config::merge(&ServeArgs::default(), file()).is_err());
    }

    #[test]
    fn bypasses_are_only_reported_by_default() {
        let rules = |yaml| {
            Config::merge(&ServeArgs::default(), FileConfig::parse(yaml).unwrap()).unwrap().rules.bypass
        };
        assert_eq!(rules(""), BypassRules::default());
        assert_eq!(rules("").action, BypassAction::Report);
        let given = rules("bypass: {action: deny, exemptNamespaces: [berth]}");
        assert_eq!(
            (given.action, given.exempt_namespaces),
            (BypassAction::Deny, ["berth".to_owned()].into())
        );
        assert_eq!(
            rules("bypass: {action: strip}").exempt_namespaces,
            BypassRules::default().exempt_namespaces
        );
        for name in ["kube-*", "Kube", "", "-a"] {
            let yaml = format!("bypass: {{exemptNamespaces: ['{name}']}}");
            let error = Config::merge(&ServeArgs::default(), FileConfig::parse(&yaml).unwrap()).unwrap_err();
            assert!(error.to_string().contains("bypass.exemptNamespaces"), "{error}");
        }
        let error = FileConfig::parse("bypass: {action: kill}").unwrap_err().to_string();
        assert!(error.contains("`strip`"), "{error}");
    }

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
