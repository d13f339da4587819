//! The flags of `berth serve`. Each has an environment variable: `BERTH_` and the flag in capitals, or the name that
//! NVIDIA's plugin or OpenTelemetry uses. Values are checked while clap parses them, so that an invalid one is a usage
//! error; [`Config::merge`](super::Config::merge) checks the file's values by the same rules.

use super::checks::{address, by_rule};
use super::edits::EditArgs;
use super::gpus::{gpu_source, mig_strategy};
use super::nvidia::args::{NvidiaArgs, non_empty, unused_notice};
use super::tracing::TracingArgs;
use berth_observe::logs::LogFormat;
use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// Flags of `berth serve`, filled from the environment, too.
#[derive(Args, Clone, Debug, Default)]
#[command(args_override_self = true)]
pub struct ServeArgs {
    /// The configuration file (YAML); flags and environment take precedence
    #[arg(long, env = "BERTH_CONFIG", hide_env = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Selection of a file by a node label.
    #[command(flatten)]
    pub choice: ChoiceArgs,
    /// The node's name [default: NODE_NAME, else the host's name]
    #[arg(long, env = "BERTH_NODE_NAME", hide_env = true, value_name = "NAME")]
    pub node_name: Option<String>,
    /// The kubelet's folder [default: /var/lib/kubelet]
    #[arg(long, env = "BERTH_KUBELET_DIR", hide_env = true, value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// The kubelet's --root-dir, with pod-resources/ [default: the kubelet's folder]
    #[arg(long, env = "BERTH_KUBELET_ROOT_DIR", hide_env = true, hide_short_help = true, value_name = "DIR")]
    pub kubelet_root_dir: Option<PathBuf>,
    /// The folder of kubelet.sock [default: device-plugins in the kubelet's folder]
    #[arg(
        long,
        env = "BERTH_DEVICE_PLUGINS_DIR",
        hide_env = true,
        hide_short_help = true,
        value_name = "DIR"
    )]
    pub device_plugins_dir: Option<PathBuf>,
    /// The folder of the allocation store, the policies and the token [default: /var/lib/berth]
    #[arg(long, env = "BERTH_STATE_DIR", hide_env = true, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// The token file, set from the flag that all commands share.
    #[arg(skip)]
    pub token_file: Option<PathBuf>,
    /// Source of the GPUs: nvml, sim:8xh100, or sim:FILE [default: nvml]
    #[arg(long, env = "BERTH_GPUS", hide_env = true, value_name = "SOURCE", value_parser = by_rule(|text| gpu_source(text, None, Path::new("/"))))]
    pub gpus: Option<String>,
    /// Path of libnvidia-ml.so.1, if the dynamic loader does not find it
    #[arg(long, env = "BERTH_NVML_LIBRARY", hide_env = true, hide_short_help = true, value_name = "FILE")]
    pub nvml_library: Option<PathBuf>,
    /// Whether to use the API server [default: auto: with --kubeconfig or a pod's service account]
    #[arg(long, env = "BERTH_API_SERVER", hide_env = true, value_enum)]
    pub api_server: Option<ApiServerMode>,
    /// Whether the guard reads these settings. It uses no API server, so a setting that needs one is no error for it.
    #[arg(skip)]
    pub is_guard: bool,
    /// Kubeconfig for the API server, outside a pod; one that runs a program (exec) is refused
    #[arg(long, env = "BERTH_KUBECONFIG", hide_env = true, hide_short_help = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Address of the admin API; loopback only, unless admin.tls is configured [default: 127.0.0.1:9470]
    #[arg(long, env = "BERTH_ADMIN_LISTEN", hide_env = true, value_name = "ADDRESS", value_parser = by_rule(|text| address("adminListen", text)))]
    pub admin_listen: Option<String>,
    /// Unix socket of the admin API for root on this node, without a token [default: none]
    #[arg(long, env = "BERTH_ADMIN_SOCKET", hide_env = true, hide_short_help = true, value_name = "FILE")]
    pub admin_socket: Option<PathBuf>,
    /// Address that serves only /livez, /readyz and /metrics, without a token [default: none]
    #[arg(long, env = "BERTH_HEALTH_LISTEN", hide_env = true, value_name = "ADDRESS", value_parser = by_rule(|text| address("healthListen", text)))]
    pub health_listen: Option<String>,
    /// Format of the log [default: text]
    #[arg(long, env = "BERTH_LOG", hide_env = true, value_enum)]
    pub log: Option<LogFormat>,
    /// Export of traces.
    #[command(flatten)]
    pub tracing: TracingArgs,
    /// Register even if the devices of running pods cannot be read from the kubelet's checkpoint
    #[arg(long, env = "BERTH_SKIP_ADOPTION", hide_env = true, hide_short_help = true, value_parser = BoolishValueParser::new())]
    pub skip_adoption: bool,
    /// XIDs that do not make a GPU unhealthy, besides 13,31,43,45,68,109; `all`: nothing makes a GPU unhealthy
    #[arg(
        long,
        env = "DP_DISABLE_HEALTHCHECKS",
        hide_env = true,
        hide_short_help = true,
        value_name = "XIDS",
        allow_hyphen_values = true
    )]
    pub disable_healthchecks: Option<String>,
    /// XIDs that make a GPU unhealthy even if --disable-healthchecks names them; `all`: every XID
    #[arg(
        long,
        env = "DP_ENABLE_HEALTHCHECKS",
        hide_env = true,
        hide_short_help = true,
        value_name = "XIDS",
        allow_hyphen_values = true
    )]
    pub enable_healthchecks: Option<String>,
    /// MIG strategy unless a policy decides: none, single or mixed, as in NVIDIA's plugin [default: none]
    #[arg(long, env = "MIG_STRATEGY", hide_env = true, hide_short_help = true, value_name = "STRATEGY", value_parser = by_rule(mig_strategy))]
    pub mig_strategy: Option<String>,
    /// How allocated devices are passed to containers.
    #[command(flatten)]
    pub edits: EditArgs,
    /// Flags of NVIDIA's device plugin without an equivalent in Berth.
    #[command(flatten)]
    pub nvidia: NvidiaArgs,
}

impl ServeArgs {
    /// The configuration file, from `--config` or NVIDIA's `CONFIG_FILE`.
    #[must_use]
    pub fn config_file(&self) -> Option<&Path> {
        self.config.as_deref().or_else(|| non_empty(self.nvidia.config_file.as_ref()))
    }

    /// One notice for each flag of NVIDIA's that is ignored because Berth's own flag is set, too.
    pub(super) fn overridden_nvidia_args(&self) -> Vec<String> {
        let (file, socket) =
            (non_empty(self.nvidia.config_file.as_ref()), self.nvidia.kubelet_dir_of_socket());
        let file = file.filter(|file| self.config.as_deref().is_some_and(|config| config != *file));
        let socket = socket.filter(|folder| self.kubelet_dir.as_ref().is_some_and(|dir| dir != folder));
        let socket = socket.and(self.nvidia.kubelet_socket.as_deref());
        [("CONFIG_FILE", file, "--config"), ("KUBELET_SOCKET", socket, "--kubelet-dir")]
            .into_iter()
            .filter_map(|(name, path, flag)| {
                let reason = format!("{flag} is set, too, and takes precedence: remove one of the two");
                Some(unused_notice(name, &path?.to_string_lossy(), &reason))
            })
            .collect()
    }

    /// The kubelet's folder, from `--kubelet-dir` or NVIDIA's `KUBELET_SOCKET`.
    #[must_use]
    pub fn kubelet_dir(&self) -> Option<PathBuf> {
        self.kubelet_dir.clone().or_else(|| self.nvidia.kubelet_dir_of_socket())
    }

    /// Whether a flag or the environment sets this setting, so that the file's value is not used.
    pub(super) fn overrides(&self, setting: &str) -> bool {
        match setting {
            "adminListen" => self.admin_listen.is_some(),
            "admin.socket" => self.admin_socket.is_some(),
            "kubeconfig" => self.kubeconfig.is_some(),
            "kubeletDir" => self.kubelet_dir().is_some(),
            "kubeletRootDir" => self.kubelet_root_dir.is_some(),
            "devicePluginsDir" => self.device_plugins_dir.is_some(),
            "nvmlLibrary" => self.nvml_library.is_some(),
            "stateDir" => self.state_dir.is_some(),
            "tokenFile" => self.token_file.is_some(),
            "gpus" | "gpus.source" => self.gpus.is_some(),
            "containerEdits.nvidiaDriverRoot" => non_empty(self.edits.nvidia_driver_root.as_ref()).is_some(),
            "containerEdits.nvidiaDevRoot" => non_empty(self.nvidia.dev_root.as_ref()).is_some(),
            "tracing.endpoint" => self.tracing.tracing_endpoint.is_some(),
            "nodeName" => self.node_name.is_some(),
            "apiServer" => self.api_server.is_some(),
            "healthListen" => self.health_listen.is_some(),
            "log" => self.log.is_some(),
            "skipAdoption" => self.skip_adoption,
            "failOnInitError" => self.nvidia.fail_on_init_error.is_some(),
            "migStrategy" => self.mig_strategy.is_some(),
            "containerEdits.deviceListStrategy" => !self.edits.device_list_strategy.is_empty(),
            "containerEdits.deviceIdStrategy" => self.edits.device_id_strategy.is_some(),
            "containerEdits.passDeviceSpecs" => self.edits.pass_device_specs.is_some(),
            "containerEdits.gdrcopyEnabled" => self.nvidia.gdrcopy_enabled.is_some(),
            "containerEdits.gdsEnabled" => self.nvidia.gds_enabled.is_some(),
            "containerEdits.mofedEnabled" => self.nvidia.mofed_enabled.is_some(),
            _ => false,
        }
    }
}

/// Use of the API server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ApiServerMode {
    /// Used if there is a kubeconfig or a service account of the pod.
    #[default]
    Auto,
    /// Not used.
    Off,
}

/// The flags of the selection.
#[derive(Args, Clone, Debug, Default)]
pub struct ChoiceArgs {
    /// Folder of configuration files; a node label selects one, and its keys replace those of --config
    #[arg(long, env = "BERTH_CONFIG_DIR", hide_env = true, hide_short_help = true, value_name = "DIR")]
    pub config_dir: Option<PathBuf>,
    /// The node label that selects the file [default: nvidia.com/device-plugin.config]
    #[arg(long, env = "BERTH_CONFIG_LABEL", hide_env = true, hide_short_help = true, value_name = "KEY")]
    pub config_label: Option<String>,
    /// The file in --config-dir for a node without the label
    #[arg(long, env = "BERTH_CONFIG_DEFAULT", hide_env = true, hide_short_help = true, value_name = "FILE")]
    pub config_default: Option<String>,
    /// What to use without label and --config-default, tried in order: named (the file `default`), single (the only
    /// file), empty (--config alone) [default: named,single]
    #[arg(long, env = "BERTH_CONFIG_FALLBACKS", hide_env = true, hide_short_help = true, value_name = "LIST", value_parser = fallbacks)]
    pub config_fallbacks: Option<Fallbacks>,
}

/// What to use without label and default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fallback {
    /// The file `default`.
    Named,
    /// The only file of the folder.
    Single,
    /// No file.
    Empty,
}

/// The fallbacks in the order in which they are tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fallbacks(pub(super) Vec<Fallback>);

pub(super) fn fallbacks(text: &str) -> Result<Fallbacks, String> {
    let keywords = text.split(',').map(str::trim).filter(|keyword| !keyword.is_empty());
    let parsed = keywords.map(|keyword| match keyword {
        "named" => Ok(Fallback::Named),
        "single" => Ok(Fallback::Single),
        "empty" => Ok(Fallback::Empty),
        _ => Err("expected named, single or empty, separated by commas".to_owned()),
    });
    parsed.collect::<Result<_, _>>().map(Fallbacks)
}
