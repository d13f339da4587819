//! Flags and variables of NVIDIA's device plugin (v0.20) for which Berth has no flag of its own, and the notices for
//! those that are not used. None is shown by `--help`; `docs/changeover.md` lists them.

use crate::checks::{Checks, bad, invalid_because};
use clap::Args;
use clap::builder::{BoolishValueParser, TypedValueParser};
use std::path::{Path, PathBuf};

/// The policy for `sharedDevicesAllocationPolicy: packed`.
pub(crate) const PACKED: &str = "binpack";
/// Why IMEX channels are not passed.
pub(crate) const IMEX: &str = "Berth passes no IMEX channels; leave NVIDIA's plugin on nodes whose pods need them, or pass \
     /dev/nvidia-caps-imex-channels/channel0 with containerEdits.resources.<resource>.devices";
/// Why `mpsRoot` is not used.
pub(crate) const MPS_ROOT: &str = "Berth does not use NVIDIA's MPS control daemon; containerEdits.resources.<resource>.mps names \
     the folders of one that you run";
/// Why settings of CDI specifications are not used.
pub(crate) const CDI: &str = "Berth uses the CDI specification of nvidia-ctk (containerEdits.cdiKind), or makes its own without \
     this program and without options";
/// Variables of NVIDIA's programs that no flag of `berth serve` reads, and why each is not used.
const VARIABLES: [(&str, &str); 14] = [
    ("NVIDIA_CTK_PATH", CDI),
    ("CONTAINER_DRIVER_ROOT", "set DRIVER_ROOT_CTR_PATH instead"),
    ("USE_NODE_FEATURE_API", LABELS),
    ("GFD_CONFIG_FILE", "Berth labels the node itself and reads CONFIG_FILE"),
    ("GFD_MIG_STRATEGY", "Berth's labels follow MIG_STRATEGY"),
    ("GFD_FAIL_ON_INIT_ERROR", "FAIL_ON_INIT_ERROR applies to labels, too"),
    ("GFD_ONESHOT", "Berth updates labels as long as the daemon runs"),
    ("GFD_NO_TIMESTAMP", LABELS),
    ("GFD_SLEEP_INTERVAL", "Berth updates labels when GPUs change, which it checks every health.pollSeconds"),
    ("GFD_OUTPUT_FILE", "set labels.nfdFile instead"),
    ("GFD_MACHINE_TYPE_FILE", LABELS),
    ("GFD_USE_NODE_FEATURE_API", LABELS),
    ("NVIDIA_MIG_CONFIG_DEVICES", "Berth does not change MIG layouts"),
    (
        "NVIDIA_MIG_MONITOR_DEVICES",
        "only NVIDIA's container runtime uses it, for the container in which Berth runs",
    ),
];
/// Why settings of NVIDIA's GPU feature discovery are not used.
pub(super) const LABELS: &str = "set labels.nfdFile or labels.node to choose how Berth labels the node";

/// Flags and variables of NVIDIA's device plugin.
#[derive(Args, Clone, Debug, Default)]
#[allow(missing_docs)] // NVIDIA's names; each becomes a setting of `Config` or a notice
pub struct NvidiaArgs {
    #[arg(long, env = "CONFIG_FILE", hide = true, value_parser = path)]
    pub config_file: Option<PathBuf>,
    #[arg(long, env = "KUBELET_SOCKET", hide = true, value_parser = path)]
    pub kubelet_socket: Option<PathBuf>,
    #[arg(long, env = "FAIL_ON_INIT_ERROR", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = boolish)]
    pub fail_on_init_error: Option<bool>,
    #[arg(long, alias = "nvidia-dev-root", env = "NVIDIA_DEV_ROOT", hide = true, value_parser = path)]
    pub dev_root: Option<PathBuf>,
    #[arg(long, alias = "container-driver-root", env = "DRIVER_ROOT_CTR_PATH", hide = true, value_parser = path)]
    pub driver_root_ctr_path: Option<PathBuf>,
    #[arg(long, env = "GDRCOPY_ENABLED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = boolish)]
    pub gdrcopy_enabled: Option<bool>,
    #[arg(long, env = "GDS_ENABLED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = boolish)]
    pub gds_enabled: Option<bool>,
    #[arg(long, env = "MOFED_ENABLED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = boolish)]
    pub mofed_enabled: Option<bool>,
    #[arg(long, env = "CDI_ANNOTATION_PREFIX", hide = true)]
    pub cdi_annotation_prefix: Option<String>,
    #[arg(long, env = "SHARED_DEVICES_ALLOCATION_POLICY", hide = true, value_parser = ["distributed", "packed"])]
    pub shared_devices_allocation_policy: Option<String>,
    #[arg(long, env = "DEVICE_DISCOVERY_STRATEGY", hide = true, value_parser = |text: &str| check_discovery(text).map(|()| text.to_owned()))]
    pub device_discovery_strategy: Option<String>,
    #[arg(long, env = "IMEX_CHANNEL_IDS", hide = true)]
    pub imex_channel_ids: Vec<String>,
    #[arg(long, env = "IMEX_REQUIRED", hide = true, num_args = 0..=1, default_missing_value = "true", value_parser = boolish)]
    pub imex_required: Option<bool>,
    #[arg(long, env = "MPS_ROOT", hide = true)]
    pub mps_root: Option<String>,
    #[arg(long, alias = "nvidia-ctk-path", env = "NVIDIA_CDI_HOOK_PATH", hide = true, value_parser = path)]
    pub nvidia_cdi_hook_path: Option<PathBuf>,
    #[arg(long, env = "CDI_FEATURE_FLAGS", hide = true)]
    pub cdi_feature_flags: Vec<String>,
    #[arg(long, env = "CDI_DISABLE_HOOKS", hide = true)]
    pub cdi_disable_hooks: Vec<String>,
}

/// The path, unless it is empty: an empty variable counts as not set.
pub(crate) fn non_empty(path: Option<&PathBuf>) -> Option<&Path> {
    path.map(PathBuf::as_path).filter(|path| !path.as_os_str().is_empty())
}

/// As [`BoolishValueParser`]; an empty variable is false, as in NVIDIA's plugin.
pub(crate) fn boolish(text: &str) -> Result<bool, String> {
    if text.is_empty() {
        return Ok(false);
    }
    let read = BoolishValueParser::new().parse_ref(&clap::Command::new("berth"), None, text.as_ref());
    read.map_err(|_| "value was not a boolean: expected true or false".into())
}

/// A path; an empty one counts as not set.
#[allow(clippy::unnecessary_wraps)] // clap requires this signature
pub(crate) fn path(text: &str) -> Result<PathBuf, String> {
    Ok(text.into())
}

impl NvidiaArgs {
    /// `K` of `K/device-plugins/kubelet.sock`.
    pub(crate) fn kubelet_dir_of_socket(&self) -> Option<PathBuf> {
        let socket = non_empty(self.kubelet_socket.as_ref())?;
        let plugins = socket.parent()?;
        let usual = socket.ends_with("kubelet.sock") && plugins.ends_with("device-plugins");
        usual.then(|| plugins.parent().map(Path::to_path_buf)).flatten()
    }

    /// One notice for each setting that is not used. A setting that containers need is an error.
    pub(crate) fn notices(&self, checks: &mut Checks) -> Vec<String> {
        let mut lines = Vec::new();
        let mut unused =
            |name: &str, value: &str, reason: &str| lines.push(unused_notice(name, value, reason));
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
                checks.add(invalid_because("IMEX_CHANNEL_IDS", &channels, IMEX));
            }
            ["0"] => unused("IMEX_CHANNEL_IDS", &channels, IMEX),
            _ => checks.add(bad("IMEX_CHANNEL_IDS", &channels, "an empty value or 0")),
        }
        for (name, value, reason) in [
            ("MPS_ROOT", self.mps_root.as_slice(), MPS_ROOT),
            ("CDI_FEATURE_FLAGS", &self.cdi_feature_flags, CDI),
            ("CDI_DISABLE_HOOKS", &self.cdi_disable_hooks, CDI),
        ] {
            let value = value.join(",");
            if !value.is_empty() {
                unused(name, &value, reason);
            }
        }
        lines
    }
}

/// The notice for a setting that is not used.
pub(crate) fn unused_notice(name: &str, value: &str, reason: &str) -> String {
    format!("set, not used: {name}={value:?}: {reason}")
}

/// One notice for each variable of NVIDIA's programs that is set but not used.
pub(crate) fn unused_environment_notices(read: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let set = VARIABLES.iter().filter_map(|(name, reason)| Some((name, read(name)?, reason)));
    set.filter(|(_, value, _)| !value.is_empty())
        .map(|(name, value, reason)| unused_notice(name, &value, reason))
        .collect()
}

/// Checks that Berth supports this strategy of device discovery.
///
/// # Errors
/// What to set instead.
pub(crate) fn check_discovery(strategy: &str) -> Result<(), String> {
    match strategy {
        "auto" | "nvml" => Ok(()),
        "tegra" => Err(
            "Berth finds GPUs by NVML, which Tegra lacks: leave NVIDIA's plugin on those nodes, or set auto"
                .into(),
        ),
        _ => Err("set auto or nvml".into()),
    }
}
