//! Flags and variables of NVIDIA's device plugin (v0.20) for which Berth has no flag of its own. None is
//! shown by `--help`; `docs/changeover.md` lists them.

use super::super::checks::{Checks, bad, bad_because};
use super::super::{StackEntryConfig, nvidia, parsers};
use super::ServeArgs;
use clap::Args;
use std::path::{Path, PathBuf};

/// Flags and variables by which NVIDIA's device plugin is started.
#[derive(Args, Clone, Debug, Default)]
#[allow(missing_docs)] // NVIDIA's names, and each becomes a setting of `Config` or a notice
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

/// A path that is not empty: an empty variable counts as not set.
pub(in crate::config) fn given(path: Option<&PathBuf>) -> Option<&Path> {
    path.map(PathBuf::as_path).filter(|path| !path.as_os_str().is_empty())
}

impl ServeArgs {
    /// The configuration file, by our name or by NVIDIA's.
    #[must_use]
    pub fn config_file(&self) -> Option<&Path> {
        self.config.as_deref().or_else(|| given(self.nvidia.config_file.as_ref()))
    }

    /// What of NVIDIA's is given beside Berth's own name for it, which wins: one line each.
    pub(in crate::config) fn outdone(&self) -> Vec<String> {
        let (file, socket) = (given(self.nvidia.config_file.as_ref()), self.nvidia.folder_of_socket());
        let file = file.filter(|file| self.config.as_deref().is_some_and(|config| config != *file));
        let socket = socket.filter(|folder| self.kubelet_dir.as_ref().is_some_and(|dir| dir != folder));
        let socket = socket.and(self.nvidia.kubelet_socket.as_deref());
        [("CONFIG_FILE", file, "--config"), ("KUBELET_SOCKET", socket, "--kubelet-dir")]
            .into_iter()
            .filter_map(|(name, path, flag)| {
                let why = format!("{flag} is given, too, and wins: remove one of the two");
                Some(nvidia::unused(name, &path?.to_string_lossy(), &why))
            })
            .collect()
    }

    /// The kubelet's folder, by our name or by the socket in it.
    #[must_use]
    pub fn kubelet_dir(&self) -> Option<PathBuf> {
        self.kubelet_dir.clone().or_else(|| self.nvidia.folder_of_socket())
    }
}

impl NvidiaArgs {
    /// `K` of `K/device-plugins/kubelet.sock`.
    fn folder_of_socket(&self) -> Option<PathBuf> {
        let socket = given(self.kubelet_socket.as_ref())?;
        let plugins = socket.parent()?;
        let usual = socket.ends_with("kubelet.sock") && plugins.ends_with("device-plugins");
        usual.then(|| plugins.parent().map(Path::to_path_buf)).flatten()
    }

    /// The stack with `binpack` first, or without it, as the allocation policy says.
    #[must_use]
    pub fn placed(&self, mut stack: Vec<StackEntryConfig>) -> Vec<StackEntryConfig> {
        let packs = |entry: &StackEntryConfig| entry.policy == nvidia::PACKED;
        match self.shared_devices_allocation_policy.as_deref() {
            Some("packed") if !stack.iter().any(packs) => {
                stack.insert(0, StackEntryConfig::named(nvidia::PACKED));
            }
            Some("distributed") => stack.retain(|entry| !packs(entry)),
            _ => {}
        }
        stack
    }

    /// What is set and not used, one line each. What containers would lack is an error.
    pub(in crate::config) fn notices(&self, checks: &mut Checks) -> Vec<String> {
        let mut lines = Vec::new();
        let mut unused = |name: &str, value: &str, why: &str| lines.push(nvidia::unused(name, value, why));
        if let Some(socket) = given(self.kubelet_socket.as_ref())
            && self.folder_of_socket().is_none()
        {
            let why = "the kubelet's socket is device-plugins/kubelet.sock in the folder of --kubelet-dir";
            unused("KUBELET_SOCKET", &socket.to_string_lossy(), why);
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
        for (name, value, why) in [
            ("MPS_ROOT", self.mps_root.as_slice(), nvidia::MPS_ROOT),
            ("NVIDIA_CDI_HOOK_PATH", self.nvidia_cdi_hook_path.as_slice(), nvidia::CDI),
            ("CDI_FEATURE_FLAGS", &self.cdi_feature_flags, nvidia::CDI),
            ("CDI_DISABLE_HOOKS", &self.cdi_disable_hooks, nvidia::CDI),
        ] {
            let value = value.join(",");
            if !value.is_empty() {
                unused(name, &value, why);
            }
        }
        lines
    }
}
