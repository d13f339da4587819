//! The flags of `berth serve`. Each has an environment variable: `BERTH_` and the flag in capitals, or the name that
//! NVIDIA's plugin or OpenTelemetry uses. Values are checked while clap parses them, so that an invalid one is a usage
//! error; [`super::Config::merge`] checks the file's values by the same rules.

mod nvidia;

pub use nvidia::NvidiaArgs;
pub(super) use nvidia::non_empty;

use super::{ApiServerMode, ChoiceArgs, LogFormat, parsers};
use clap::Args;
use clap::builder::BoolishValueParser;
use std::path::PathBuf;

/// Flags of `berth serve`, filled from the environment, too.
#[derive(Args, Clone, Debug, Default)]
#[command(args_override_self = true)]
pub struct ServeArgs {
    /// The configuration file (YAML); flags and environment take precedence
    #[arg(long, env = "BERTH_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Selection of a file by a node label.
    #[command(flatten)]
    pub choice: ChoiceArgs,
    /// The node's name [default: NODE_NAME, else the host's name]
    #[arg(long, env = "BERTH_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// The kubelet's folder [default: /var/lib/kubelet]
    #[arg(long, env = "BERTH_KUBELET_DIR", value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// The folder of the allocation store, the policies and the token [default: /var/lib/berth]
    #[arg(long, env = "BERTH_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// The token file, set from the flag that all commands share.
    #[arg(skip)]
    pub token_file: Option<PathBuf>,
    /// Source of the GPUs: nvml, sim:8xh100 (count and model), or sim:FILE [default: nvml]
    #[arg(long, env = "BERTH_GPUS", value_name = "SOURCE", value_parser = parsers::gpus)]
    pub gpus: Option<String>,
    /// Path of libnvidia-ml.so.1, if the dynamic loader does not find it
    #[arg(long, env = "BERTH_NVML_LIBRARY", value_name = "FILE")]
    pub nvml_library: Option<PathBuf>,
    /// Whether to use the API server [default: auto, if there is a kubeconfig or a service account]
    #[arg(long, env = "BERTH_API_SERVER", value_enum)]
    pub api_server: Option<ApiServerMode>,
    /// Kubeconfig for the API server, outside a pod; one that runs a program (exec) is refused
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Address of the admin API; loopback only, unless admin.tls is configured [default: 127.0.0.1:9470]
    #[arg(long, env = "BERTH_ADMIN_LISTEN", value_name = "ADDRESS", value_parser = parsers::admin_listen)]
    pub admin_listen: Option<String>,
    /// Unix socket of the admin API for root on this node, without a token [default: none]
    #[arg(long, env = "BERTH_ADMIN_SOCKET", value_name = "FILE")]
    pub admin_socket: Option<PathBuf>,
    /// Address that serves only /livez, /readyz and /metrics, without a token [default: none]
    #[arg(long, env = "BERTH_HEALTH_LISTEN", value_name = "ADDRESS", value_parser = parsers::health_listen)]
    pub health_listen: Option<String>,
    /// Format of the log [default: text]
    #[arg(long, env = "BERTH_LOG", value_enum)]
    pub log: Option<LogFormat>,
    /// OTLP endpoint for traces, such as `http://otel-collector.observability:4317` [default: none]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL", value_parser = parsers::tracing_endpoint)]
    pub tracing_endpoint: Option<String>,
    /// Protocol of the endpoint: grpc or http/protobuf [default: http/protobuf at port 4318, else grpc]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_PROTOCOL", value_name = "PROTOCOL", value_parser = parsers::tracing_protocol)]
    pub tracing_protocol: Option<String>,
    /// Fraction of traces that are exported, 0 to 1; a caller's own decision takes precedence [default: 1]
    #[arg(long, env = "OTEL_TRACES_SAMPLER_ARG", value_name = "RATIO", value_parser = parsers::tracing_sample_ratio)]
    pub tracing_sample_ratio: Option<String>,
    /// Register even if the devices of running pods cannot be read from the kubelet's checkpoint
    #[arg(long, env = "BERTH_SKIP_ADOPTION", value_parser = BoolishValueParser::new())]
    pub skip_adoption: bool,
    /// XIDs that do not make a GPU unhealthy, besides 13,31,43,45,68,109; `all`: nothing makes a GPU unhealthy
    #[arg(long, env = "DP_DISABLE_HEALTHCHECKS", value_name = "XIDS", allow_hyphen_values = true)]
    pub disable_healthchecks: Option<String>,
    /// XIDs that make a GPU unhealthy even if disabled above; `all` for every one
    #[arg(long, env = "DP_ENABLE_HEALTHCHECKS", value_name = "XIDS", allow_hyphen_values = true)]
    pub enable_healthchecks: Option<String>,
    /// MIG strategy unless a policy decides: none, single or mixed, as in NVIDIA's plugin [default: none]
    #[arg(long, env = "MIG_STRATEGY", value_name = "STRATEGY", value_parser = parsers::mig_strategy)]
    pub mig_strategy: Option<String>,
    /// How allocated devices are passed to containers.
    #[command(flatten)]
    pub edits: EditArgs,
    /// Flags of NVIDIA's device plugin without an equal in Berth.
    #[command(flatten)]
    pub nvidia: NvidiaArgs,
}

impl ServeArgs {
    /// Whether a flag or the environment sets this setting, so that the file's value is not used.
    pub(super) fn overrides(&self, setting: &str) -> bool {
        match setting {
            "adminListen" => self.admin_listen.is_some(),
            "admin.socket" => self.admin_socket.is_some(),
            "kubeconfig" => self.kubeconfig.is_some(),
            "kubeletDir" => self.kubelet_dir().is_some(),
            "nvmlLibrary" => self.nvml_library.is_some(),
            "stateDir" => self.state_dir.is_some(),
            "tokenFile" => self.token_file.is_some(),
            "gpus" => self.gpus.is_some(),
            "containerEdits.nvidiaDriverRoot" => non_empty(self.edits.nvidia_driver_root.as_ref()).is_some(),
            "containerEdits.nvidiaDevRoot" => non_empty(self.nvidia.dev_root.as_ref()).is_some(),
            "tracing.endpoint" => self.tracing_endpoint.is_some(),
            _ => false,
        }
    }
}

/// Container edits, by the names of NVIDIA's device plugin.
#[derive(Args, Clone, Debug, Default)]
pub struct EditArgs {
    /// How GPUs are passed to containers: envvar, volume-mounts, cdi-annotations, cdi-cri; several with commas [default: envvar]
    #[arg(long, env = "DEVICE_LIST_STRATEGY", value_name = "LIST", value_parser = parsers::device_list_strategy)]
    pub device_list_strategy: Vec<String>,
    /// Name GPUs by uuid or index [default: uuid]
    #[arg(long, env = "DEVICE_ID_STRATEGY", value_name = "STRATEGY", value_parser = parsers::device_id_strategy)]
    pub device_id_strategy: Option<String>,
    /// Pass the /dev/nvidia* nodes, for nodes where the CPU manager resets container devices
    #[arg(long, env = "PASS_DEVICE_SPECS", num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", value_parser = parsers::boolish)]
    pub pass_device_specs: Option<bool>,
    /// Where the NVIDIA driver is installed on the host [default: /]
    #[arg(long, alias = "driver-root", env = "NVIDIA_DRIVER_ROOT", value_name = "DIR", value_parser = parsers::path)]
    pub nvidia_driver_root: Option<PathBuf>,
}
