//! Flags and variables of NVIDIA's device plugin (v0.20) for which Berth has no flag of its own. None is
//! shown by `--help`; `docs/changeover.md` lists them.

use super::super::checks::{Checks, bad, bad_because};
use super::super::{StackEntryConfig, nvidia, parsers};
use super::ServeArgs;
use clap::Args;
use std::path::{Path, PathBuf};

/// Flags and variables of NVIDIA's device plugin.
#[derive(Args, Clone, Debug, Default)]
#[allow(missing_docs)] // NVIDIA's names; each becomes a setting of `Config` or a notice
pub struct NvidiaArgs {
    #[arg(long, env = "CONFIG_FILE", hide = true, value_parser = parsers::path)]
    pub config_file: Option<PathBuf>,
    #[arg(long, env = "KUBELET_SOCKET", hide = true, value_parser = parsers::path)]
    pub kubelet_socket: Option<PathBuf>,
    #[arg(long, env = "FAIL_ON_INIT_ERROR", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = parsers::boolish)]
    pub fail_on_init_error: Option<bool>,
    #[arg(long, alias = "nvidia-dev-root", env = "NVIDIA_DEV_ROOT", hide = true, value_parser = parsers::path)]
    pub dev_root: Option<PathBuf>,
    #[arg(long, alias = "container-driver-root", env = "DRIVER_ROOT_CTR_PATH", hide = true, value_parser = parsers::path)]
    pub driver_root_ctr_path: Option<PathBuf>,
    #[arg(long, env = "GDRCOPY_ENABLED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = parsers::boolish)]
    pub gdrcopy_enabled: Option<bool>,
    #[arg(long, env = "GDS_ENABLED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = parsers::boolish)]
    pub gds_enabled: Option<bool>,
    #[arg(long, env = "MOFED_ENABLED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = parsers::boolish)]
    pub mofed_enabled: Option<bool>,
    #[arg(long, env = "CDI_ANNOTATION_PREFIX", hide = true)]
    pub cdi_annotation_prefix: Option<String>,
    #[arg(long, env = "SHARED_DEVICES_ALLOCATION_POLICY", hide = true, value_parser = ["distributed", "packed"])]
    pub shared_devices_allocation_policy: Option<String>,
    #[arg(long, env = "DEVICE_DISCOVERY_STRATEGY", hide = true, value_parser = parsers::device_discovery_strategy)]
    pub device_discovery_strategy: Option<String>,
    #[arg(long, env = "IMEX_CHANNEL_IDS", hide = true)]
    pub imex_channel_ids: Vec<String>,
    #[arg(long, env = "IMEX_REQUIRED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = parsers::boolish)]
    pub imex_required: Option<bool>,
    #[arg(long, env = "MPS_ROOT", hide = true)]
    pub mps_root: Option<String>,
    #[arg(long, alias = "nvidia-ctk-path", env = "NVIDIA_CDI_HOOK_PATH", hide = true)]
    pub nvidia_cdi_hook_path: Option<String>,
    #[arg(long, env = "CDI_FEATURE_FLAGS", hide = true)]
    pub cdi_feature_flags: Vec<String>,
    #[arg(long, env = "CDI_DISABLE_HOOKS", hide = true)]
    pub cdi_disable_hooks: Vec<String>,
}

/// The path, unless it is empty: an empty variable counts as not set.
pub(in crate::config) fn non_empty(path: Option<&PathBuf>) -> Option<&Path> {
    path.map(PathBuf::as_path).filter(|path| !path.as_os_str().is_empty())
}

impl ServeArgs {
    /// The configuration file, from `--config` or NVIDIA's `CONFIG_FILE`.
    #[must_use]
    pub fn config_file(&self) -> Option<&Path> {
        self.config.as_deref().or_else(|| non_empty(self.nvidia.config_file.as_ref()))
    }

    /// One notice for each flag of NVIDIA's that is ignored because Berth's own flag is set, too.
    pub(in crate::config) fn overridden_nvidia_args(&self) -> Vec<String> {
        let (file, socket) =
            (non_empty(self.nvidia.config_file.as_ref()), self.nvidia.kubelet_dir_of_socket());
        let file = file.filter(|file| self.config.as_deref().is_some_and(|config| config != *file));
        let socket = socket.filter(|folder| self.kubelet_dir.as_ref().is_some_and(|dir| dir != folder));
        let socket = socket.and(self.nvidia.kubelet_socket.as_deref());
        [("CONFIG_FILE", file, "--config"), ("KUBELET_SOCKET", socket, "--kubelet-dir")]
            .into_iter()
            .filter_map(|(name, path, flag)| {
                let reason = format!("{flag} is set, too, and takes precedence: remove one of the two");
                Some(nvidia::unused_notice(name, &path?.to_string_lossy(), &reason))
            })
            .collect()
    }

    /// The kubelet's folder, from `--kubelet-dir` or NVIDIA's `KUBELET_SOCKET`.
    #[must_use]
    pub fn kubelet_dir(&self) -> Option<PathBuf> {
        self.kubelet_dir.clone().or_else(|| self.nvidia.kubelet_dir_of_socket())
    }
}

impl NvidiaArgs {
    /// `K` of `K/device-plugins/kubelet.sock`.
    fn kubelet_dir_of_socket(&self) -> Option<PathBuf> {
        let socket = non_empty(self.kubelet_socket.as_ref())?;
        let plugins = socket.parent()?;
        let usual = socket.ends_with("kubelet.sock") && plugins.ends_with("device-plugins");
        usual.then(|| plugins.parent().map(Path::to_path_buf)).flatten()
    }

    /// The stack with `binpack` first for `packed`, and without it for `distributed`.
    #[must_use]
    pub fn apply_allocation_policy(&self, mut stack: Vec<StackEntryConfig>) -> Vec<StackEntryConfig> {
        let is_binpack = |entry: &StackEntryConfig| entry.policy == nvidia::PACKED;
        match self.shared_devices_allocation_policy.as_deref() {
            Some("packed") if !stack.iter().any(is_binpack) => {
                stack.insert(0, StackEntryConfig::named(nvidia::PACKED));
            }
            Some("distributed") => stack.retain(|entry| !is_binpack(entry)),
            _ => {}
        }
        stack
    }

    /// One notice for each setting that is not used. A setting that containers need is an error.
    pub(in crate::config) fn notices(&self, checks: &mut Checks) -> Vec<String> {
        let mut lines = Vec::new();
        let mut unused =
            |name: &str, value: &str, reason: &str| lines.push(nvidia::unused_notice(name, value, reason));
        if let Some(socket) = non_empty(self.kubelet_socket.as_ref())
            && self.kubelet_dir_of_socket().is_none()
        {
            let reason = "the kubelet's socket is device-plugins/kubelet.sock in the folder of --kubelet-dir";
            unused("KUBELET_SOCKET", &socket.to_string_lossy(), reason);
        }
        let channels = self.imex_channel_ids.join(",");
        match channels.split(',').map(str::trim).collect::<Vec<_>>()[..] {
            [""] => {}
            ["0"] if self.imex_required == Some(true) => {
                checks.add(bad_because("IMEX_CHANNEL_IDS", &channels, nvidia::IMEX));
            }
            ["0"] => unused("IMEX_CHANNEL_IDS", &channels, nvidia::IMEX),
            _ => checks.add(bad("IMEX_CHANNEL_IDS", &channels, "an empty value or 0")),
        }
        for (name, value, reason) in [
            ("MPS_ROOT", self.mps_root.as_slice(), nvidia::MPS_ROOT),
            ("NVIDIA_CDI_HOOK_PATH", self.nvidia_cdi_hook_path.as_slice(), nvidia::CDI),
            ("CDI_FEATURE_FLAGS", &self.cdi_feature_flags, nvidia::CDI),
            ("CDI_DISABLE_HOOKS", &self.cdi_disable_hooks, nvidia::CDI),
        ] {
            let value = value.join(",");
            if !value.is_empty() {
                unused(name, &value, reason);
            }
        }
        lines
    }
}
