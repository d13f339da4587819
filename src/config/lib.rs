//! The settings: one struct, read once, from flags, environment, file and defaults, in this order of precedence.

mod admin;
mod args;
mod cdi;
mod checks;
mod choice;
mod edits;
mod file;
mod gpus;
pub mod nvidia;
mod reload;
mod source;
mod stack;
mod tracing;
mod trusted;

pub use args::{ApiServerMode, ChoiceArgs, ServeArgs};
pub use cdi::{CdiGenerate, CdiSettings, RUNTIME_FILES};
pub use checks::{BadSetting, BadSettings, ConfigError};
pub use choice::{Choice, Chosen};
pub use file::{FileConfig, StackEntryConfig};
pub use gpus::{GpuSource, ProcessSettings};
pub use nvidia::args::NvidiaArgs;
pub use reload::{Effect, Origin, Reloaded, SettingChange, Versions};
pub use source::{Source, read_text_or_input};
pub use stack::new_stack;

use berth_cluster::{ApiServer, LabelSettings};
use berth_core::stack::Baseline;
use berth_files::yaml::Problem;
use berth_http::AdminAccess;
use berth_kernel::hardware::gpu_selector::GpuSelector;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::hardware::triage::XidRules;
use berth_kernel::ids::names::Resource;
use berth_kernel::ids::time::Timing;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::decision::JournalLimit;
use berth_kubelet::{Edits, ReconcileTiming};
use berth_observe::logs::LogFormat;
use berth_observe::trace::TracingSettings;
use checks::{Checks, address, in_range, invalid_because};
use gpus::{HealthChecks, gpu_source, mig_strategy};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// All settings of the daemon.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node's name, for the API and events.
    pub node_name: String,
    /// The folder of kubelet.sock, of the kubelet's checkpoint and of the plugins' sockets.
    pub device_plugins_dir: PathBuf,
    /// The kubelet's `--root-dir`, with `pod-resources/` and `pods-api/`.
    pub kubelet_root_dir: PathBuf,
    /// The folder of the store, the policies and the token.
    pub state_dir: PathBuf,
    /// Access to the API server.
    pub api_server: ApiServer,
    /// The source of the GPUs.
    pub gpus: GpuSource,
    /// GPUs that are not offered under any stack.
    pub excluded_gpus: Vec<GpuSelector>,
    /// Address of the admin API.
    pub admin_listen: SocketAddr,
    /// Address that serves only `/livez`, `/readyz` and `/metrics`, without a token.
    pub health_listen: Option<SocketAddr>,
    /// The bearer token's file, created at the first start.
    pub token_file: PathBuf,
    /// Further access to the admin API: tokens, TLS, a Unix socket, cluster users.
    pub admin: AdminAccess,
    /// Format of the log.
    pub log: LogFormat,
    /// Export of traces; `None` if it is off.
    pub tracing: Option<TracingSettings>,
    /// How allocated devices are passed to containers.
    pub edits: Edits,
    /// Whether the strategies of `edits` are replaced by those that work on the node.
    pub auto_strategy: bool,
    /// CDI specifications and the container runtime's configuration.
    pub cdi: CdiSettings,
    /// The resource of whole GPUs, unless a policy names another.
    pub resource: Resource,
    /// The MIG strategy, unless a policy decides otherwise.
    pub mig_strategy: MigStrategy,
    /// The kernel's rules.
    pub rules: Rules,
    /// Limits of the journal of decisions; `None` if there is none.
    pub decisions: Option<JournalLimit>,
    /// XIDs that do not make a GPU unhealthy.
    pub xids: XidRules,
    /// Processes on GPUs: which ones are ignored.
    pub processes: ProcessSettings,
    /// Interval of the inventory scans.
    pub poll: Duration,
    /// Labels of the node.
    pub labels: LabelSettings,
    /// Intervals of the reconcile passes.
    pub rounds: ReconcileTiming,
    /// Whether Berth registers even if running pods cannot be adopted.
    pub skip_adoption: bool,
    /// The file's stack, in the order of evaluation.
    pub stack: Vec<StackEntryConfig>,
    /// The file of these settings, for the line numbers of errors that are found later.
    pub source: Option<Arc<Source>>,
    /// The files of these settings, to read them again; `None` without a file.
    pub origin: Option<Arc<Origin>>,
    /// The file that a node label selected, if `--config-dir` is set.
    pub chosen: Option<Chosen>,
    /// Whether readings and failing calls make a GPU unhealthy; if not, only a missing GPU is withheld.
    pub health_checks: bool,
    /// Whether the daemon ends if the GPUs cannot be read at the start.
    pub fail_on_init_error: bool,
    /// Settings that are ignored or used differently, one log line each.
    pub notices: Vec<String>,
}

impl Config {
    /// Loads the settings of `berth serve`.
    ///
    /// # Errors
    /// If the file or a value is invalid.
    pub fn load(args: &ServeArgs) -> Result<Self, ConfigError> {
        Self::load_with_base(args.config_file(), None, args)
    }

    /// Loads `file`, with the keys of `base` that it lacks.
    fn load_with_base(
        file: Option<&Path>,
        base: Option<&Path>,
        args: &ServeArgs,
    ) -> Result<Self, ConfigError> {
        let mut config = match file {
            Some(file) => match Origin::new(args, file, base).read()? {
                (Some(config), problems, _) if problems.is_empty() => config,
                (_, problems, source) => return Err(source.error(problems)),
            },
            None => Self::merge(args, FileConfig::default())?,
        };
        config.notices.extend(nvidia::args::unused_environment_notices(|name| std::env::var(name).ok()));
        Ok(config)
    }

    /// The error of a setting, with its line in the file that these settings come from.
    #[must_use]
    pub fn locate(&self, bad: BadSetting) -> Problem {
        match &self.source {
            Some(source) => source.locate(bad, &ServeArgs::default()),
            None => Problem { place: None, key: bad.setting, what: bad.what },
        }
    }

    /// What is answered if every policy passes.
    #[must_use]
    pub fn baseline(&self) -> Baseline {
        Baseline {
            resource: self.resource.clone(),
            mig: self.mig_strategy,
            mps_sockets: self.edits.mps_sockets(),
            xids: self.xids.clone(),
            quiet_ms: self.rules.timing.quiet_ms,
        }
    }

    /// Merges the flags (which include the environment), a file's settings and the defaults.
    ///
    /// # Errors
    /// All invalid values.
    pub fn merge(args: &ServeArgs, file: FileConfig) -> Result<Self, BadSettings> {
        let mut checks = Checks::default();
        let path_or = |flag: &Option<PathBuf>, file, default: &str| {
            flag.clone().or(file).unwrap_or_else(|| default.into())
        };
        let state_dir =
            checks.absolute_path("stateDir", path_or(&args.state_dir, file.state_dir, "/var/lib/berth"));
        let kubelet_dir = checks
            .absolute_path("kubeletDir", path_or(&args.kubelet_dir(), file.kubelet_dir, "/var/lib/kubelet"));
        let device_plugins_dir = args.device_plugins_dir.clone().or(file.device_plugins_dir);
        let device_plugins_dir = device_plugins_dir.map_or_else(
            || kubelet_dir.join("device-plugins"),
            |path| checks.absolute_path("devicePluginsDir", path),
        );
        let kubelet_root_dir = args.kubelet_root_dir.clone().or(file.kubelet_root_dir);
        let kubelet_root_dir =
            kubelet_root_dir.map_or(kubelet_dir, |path| checks.absolute_path("kubeletRootDir", path));
        let token_file =
            args.token_file.clone().or(file.token_file).unwrap_or_else(|| state_dir.join("token"));
        let kubeconfig = args.kubeconfig.clone().or(file.kubeconfig);
        let kubeconfig = kubeconfig.map(|path| checks.absolute_path("kubeconfig", path));
        let overcommit = file.memory_overcommit.unwrap_or(1.0);
        checks.ok(in_range("memoryOvercommit", overcommit, 1.0..=16.0));
        let health = file.health.unwrap_or_default();
        let defaults = Timing::default();
        let quiet_ms = health.quiet_seconds.map_or(defaults.quiet_ms, |s| s.saturating_mul(1000));
        let timing = file.timing.unwrap_or_default().resolve(&Timing { quiet_ms, ..defaults });
        // A scan takes a few calls per GPU: shorter intervals would leave no pause between scans.
        let poll_seconds = health.poll_seconds.unwrap_or(5.0);
        checks.ok(in_range("health.pollSeconds", poll_seconds, 0.05..=3600.0));
        let admin = file.admin.unwrap_or_default().resolve(args.admin_socket.clone(), &mut checks);
        let listen = args.admin_listen.clone().or(file.admin_listen);
        let listen = listen.as_deref().unwrap_or("127.0.0.1:9470");
        let admin_listen = checks.record_error(admin::listen(listen, admin.tls.is_some()));
        let health_listen = args.health_listen.clone().or(file.health_listen);
        let health_listen = health_listen.as_deref().and_then(|h| checks.ok(address("healthListen", h)));
        let resource = file.resource.unwrap_or_else(|| "nvidia.com/gpu".into());
        let resource = Resource::parse(&resource).map_err(|e| invalid_because("resource", &resource, e.rule));
        let resource = checks.record_error(resource);
        let (edits, auto_strategy) =
            file.container_edits.unwrap_or_default().resolve(&args.edits, &args.nvidia, &mut checks);
        let cdi = cdi::resolve(file.cdi, file.container_runtime, &args.nvidia, &mut checks);
        let driver =
            nvidia::args::non_empty(args.nvidia.driver_root_ctr_path.as_ref()).unwrap_or(&edits.driver_root);
        let health_checks =
            HealthChecks::new(args.disable_healthchecks.as_deref(), args.enable_healthchecks.as_deref());
        let mut notices = args.nvidia.notices(&mut checks);
        notices.extend(args.overridden_nvidia_args());
        notices.extend(health_checks.notices());
        let library = args.nvml_library.clone().or(file.nvml_library);
        let library = library.map(|path| checks.plain_path("nvmlLibrary", path));
        let gpus_file = file.gpus.unwrap_or_default();
        let gpus = args.gpus.clone().or_else(|| gpus_file.source.clone()).unwrap_or_else(|| "nvml".into());
        let gpus = checks.record_error(gpu_source(&gpus, library, driver));
        let excluded_gpus = gpus_file.excluded(&mut checks);
        let mig = args.mig_strategy.clone().or(file.mig_strategy);
        let mig_strategy = mig.and_then(|keyword| checks.ok(mig_strategy(&keyword))).unwrap_or_default();
        let history = checks.ok(file.history.unwrap_or_default().limit()).unwrap_or_default();
        let decisions = checks.ok(file.decisions.unwrap_or_default().limit()).flatten();
        let tracing = checks.ok(file.tracing.unwrap_or_default().resolve(&args.tracing)).flatten();
        let trusted_keys = trusted::keys(file.trusted_keys, &mut checks);
        let processes = file.processes.unwrap_or_default().resolve(&mut checks);
        let labels = file.labels.unwrap_or_default().resolve(&mut checks);
        let stack = file::resolve_stack(
            file.stack.unwrap_or_default(),
            args.nvidia.shared_devices_allocation_policy.as_deref(),
            &mut checks,
        );
        let token_file = checks.absolute_path("tokenFile", token_file);
        checks.finish()?;
        Ok(Self {
            node_name: node_name(args.node_name.clone().or(file.node_name)),
            device_plugins_dir,
            kubelet_root_dir,
            token_file,
            api_server: api_server(args.api_server.or(file.api_server), kubeconfig),
            gpus: gpus?,
            excluded_gpus,
            admin,
            admin_listen: admin_listen?,
            health_listen,
            log: args.log.or(file.log).unwrap_or_default(),
            tracing,
            resource: resource?,
            mig_strategy,
            rules: Rules { timing, overcommit_percent: percent(overcommit), history, trusted_keys },
            decisions,
            xids: health_checks.rules(health.ignored_xids),
            health_checks: !health_checks.is_off(),
            processes,
            poll: Duration::from_secs_f64(poll_seconds),
            labels,
            rounds: file.rounds.unwrap_or_default().resolve(&ReconcileTiming::default()),
            skip_adoption: args.skip_adoption || file.skip_adoption.unwrap_or(false),
            stack,
            chosen: None,
            state_dir,
            edits,
            auto_strategy,
            cdi,
            source: None,
            origin: None,
            fail_on_init_error: args.nvidia.fail_on_init_error.or(file.fail_on_init_error).unwrap_or(false),
            notices,
        })
    }
}

/// `Auto` uses a kubeconfig, or else the pod's service account if there is one.
fn api_server(mode: Option<ApiServerMode>, kubeconfig: Option<PathBuf>) -> ApiServer {
    let account = Path::new("/var/run/secrets/kubernetes.io/serviceaccount/token");
    match (mode.unwrap_or_default(), kubeconfig) {
        (ApiServerMode::Off, _) => ApiServer::Off,
        (ApiServerMode::Auto, Some(file)) => ApiServer::Kubeconfig(file),
        (ApiServerMode::Auto, None)
            if account.exists() && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() =>
        {
            ApiServer::InCluster
        }
        (ApiServerMode::Auto, None) => ApiServer::Off,
    }
}

/// A pod template can set `NODE_NAME` by the downward API.
fn node_name(setting: Option<String>) -> String {
    setting
        .or_else(|| std::env::var("NODE_NAME").ok())
        .filter(|n| !n.is_empty())
        .unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned())
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // the caller checks that it is 100 to 1600
fn percent(overcommit: f64) -> u32 {
    (overcommit * 100.0).round() as u32
}

#[cfg(test)]
mod tests;
