//! The flags of `berth serve`. Each can be given as an environment variable, too: `BERTH_` and the
//! flag in capitals, or the name that users of NVIDIA's plugin and of OpenTelemetry type. Values are
//! checked as they are read, so that a bad one is bad usage; the file's go through the same rules in
//! [`super::Config::merge`].

mod nvidia;

pub use nvidia::NvidiaArgs;
pub(super) use nvidia::given;

use super::{ApiServerMode, ChoiceArgs, LogFormat, parsers};
use clap::Args;
use clap::builder::BoolishValueParser;
use std::path::PathBuf;

/// Flags of `berth serve`, with the environment in them.
#[derive(Args, Clone, Debug, Default)]
#[command(args_override_self = true)]
pub struct ServeArgs {
    /// The configuration file (YAML); flags and environment win over it
    #[arg(long, env = "BERTH_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Which file of a folder is laid over it.
    #[command(flatten)]
    pub choice: ChoiceArgs,
    /// The node's name [default: NODE_NAME, else the host's name]
    #[arg(long, env = "BERTH_NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    /// The kubelet's folder [default: /var/lib/kubelet]
    #[arg(long, env = "BERTH_KUBELET_DIR", value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// Where the allocation store, policies and the token live [default: /var/lib/berth]
    #[arg(long, env = "BERTH_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// The token file, by the flag that all commands share.
    #[arg(skip)]
    pub token_file: Option<PathBuf>,
    /// Where GPUs come from: nvml, sim:8xh100 (so many, of a known model), or sim:FILE [default: nvml]
    #[arg(long, env = "BERTH_GPUS", value_name = "SOURCE", value_parser = parsers::gpus)]
    pub gpus: Option<String>,
    /// Path of libnvidia-ml.so.1, if not where the loader finds it
    #[arg(long, env = "BERTH_NVML_LIBRARY", value_name = "FILE")]
    pub nvml_library: Option<PathBuf>,
    /// Whether the API server is a source of truth, too [default: auto, if there is a kubeconfig or a service account]
    #[arg(long, env = "BERTH_API_SERVER", value_enum)]
    pub api_server: Option<ApiServerMode>,
    /// How to reach the API server from outside of a pod; one that runs a program (exec) is refused
    #[arg(long, env = "BERTH_KUBECONFIG", value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Where the admin API listens; loopback only, unless admin.tls is configured [default: 127.0.0.1:9470]
    #[arg(long, env = "BERTH_ADMIN_LISTEN", value_name = "ADDRESS", value_parser = parsers::admin_listen)]
    pub admin_listen: Option<String>,
    /// A Unix socket where root of this node needs no token [default: none]
    #[arg(long, env = "BERTH_ADMIN_SOCKET", value_name = "FILE")]
    pub admin_socket: Option<PathBuf>,
    /// Where only /livez, /readyz and /metrics are served, without a token [default: nowhere]
    #[arg(long, env = "BERTH_HEALTH_LISTEN", value_name = "ADDRESS", value_parser = parsers::health_listen)]
    pub health_listen: Option<String>,
    /// How logs are written [default: text]
    #[arg(long, env = "BERTH_LOG", value_enum)]
    pub log: Option<LogFormat>,
    /// Where traces go, by OTLP, such as `http://otel-collector.observability:4317` [default: nowhere]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL", value_parser = parsers::tracing_endpoint)]
    pub tracing_endpoint: Option<String>,
    /// What is spoken there: grpc or http/protobuf [default: http/protobuf at port 4318, else grpc]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_PROTOCOL", value_name = "PROTOCOL", value_parser = parsers::tracing_protocol)]
    pub tracing_protocol: Option<String>,
    /// How much of all traces is kept, 0 to 1; a caller's own decision wins [default: 1]
    #[arg(long, env = "OTEL_TRACES_SAMPLER_ARG", value_name = "RATIO", value_parser = parsers::tracing_sample_ratio)]
    pub tracing_sample_ratio: Option<String>,
    /// Register even if what running pods hold cannot be read from the kubelet's checkpoint
    #[arg(long, env = "BERTH_SKIP_ADOPTION", value_parser = BoolishValueParser::new())]
    pub skip_adoption: bool,
    /// XIDs that say nothing of a GPU's health, besides 13,31,43,45,68,109; `all`: nothing makes a GPU unhealthy
    #[arg(long, env = "DP_DISABLE_HEALTHCHECKS", value_name = "XIDS", allow_hyphen_values = true)]
    pub disable_healthchecks: Option<String>,
    /// XIDs that make a GPU unhealthy even if disabled above; `all` for every one
    #[arg(long, env = "DP_ENABLE_HEALTHCHECKS", value_name = "XIDS", allow_hyphen_values = true)]
    pub enable_healthchecks: Option<String>,
    /// MIG where no policy says otherwise: none, single or mixed, as with NVIDIA's plugin [default: none]
    #[arg(long, env = "MIG_STRATEGY", value_name = "STRATEGY", value_parser = parsers::mig_strategy)]
    pub mig_strategy: Option<String>,
    /// What containers are given.
    #[command(flatten)]
    pub edits: EditArgs,
    /// What only NVIDIA's users type.
    #[command(flatten)]
    pub nvidia: NvidiaArgs,
}

impl ServeArgs {
    /// Whether a setting that could come from a file comes from a flag or the environment.
    pub(super) fn gives(&self, setting: &str) -> bool {
        match setting {
            "adminListen" => self.admin_listen.is_some(),
            "admin.socket" => self.admin_socket.is_some(),
            "kubeconfig" => self.kubeconfig.is_some(),
            "kubeletDir" => self.kubelet_dir().is_some(),
            "nvmlLibrary" => self.nvml_library.is_some(),
            "stateDir" => self.state_dir.is_some(),
            "tokenFile" => self.token_file.is_some(),
            "gpus" => self.gpus.is_some(),
            "containerEdits.nvidiaDriverRoot" => given(self.edits.nvidia_driver_root.as_ref()).is_some(),
            "containerEdits.nvidiaDevRoot" => given(self.nvidia.dev_root.as_ref()).is_some(),
            "tracing.endpoint" => self.tracing_endpoint.is_some(),
            _ => false,
        }
    }
}

/// Container edits by the names that NVIDIA's users type.
#[derive(Args, Clone, Debug, Default)]
pub struct EditArgs {
    /// How containers are told their GPUs: envvar, volume-mounts, cdi-annotations, cdi-cri; several with commas [default: envvar]
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
