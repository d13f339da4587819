//! The settings of the daemon: one struct, merged from flags, environment, file and defaults, in this order of
//! precedence.

mod admin;
mod args;
mod cdi;
mod checks;
mod choice;
mod dra;
mod edits;
mod file;
mod fleet;
mod gpus;
mod guard;
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
pub use dra::DraSettings;
pub use file::{FileConfig, StackEntryConfig};
pub use gpus::{GpuSource, ProcessSettings};
pub use nvidia::args::NvidiaArgs;
pub use reload::{Effect, Files, Reloaded, SettingChange, Versions};
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
use berth_kubelet::dra::grants_folder;
use berth_kubelet::{Edits, ReconcileTiming};
use berth_observe::logs::LogFormat;
use berth_observe::trace::TracingSettings;
use berth_oci::PullSettings;
use checks::{Checks, address, in_range, invalid_because};
use gpus::{HealthChecks, gpu_source, mig_strategy};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// All settings of the daemon, by subject.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node.
    pub node: NodeSettings,
    /// The kubelet.
    pub kubelet: KubeletSettings,
    /// The GPUs, and what runs on them.
    pub gpus: GpuSettings,
    /// The API server, and what is written there.
    pub cluster: ClusterSettings,
    /// The admin API.
    pub admin: AdminSettings,
    /// Log and traces.
    pub observe: ObserveSettings,
    /// How containers get their devices.
    pub containers: ContainerSettings,
    /// The guard, and the daemon's connection to it; a change needs a restart.
    pub guard: berth_guard::Settings,
    /// The DRA driver; a change needs a restart.
    pub dra: DraSettings,
    /// What GPUs are offered as.
    pub offers: OfferSettings,
    /// What makes a GPU unhealthy, and how often that is checked.
    pub health: HealthSettings,
    /// The kernel's rules.
    pub rules: Rules,
    /// Intervals of the reconcile passes.
    pub reconcile: ReconcileTiming,
    /// Where these settings come from.
    pub loaded: Loaded,
}

/// The node; a change needs a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeSettings {
    /// The node's name, for the API and events.
    pub name: String,
    /// The folder of the store, the policies and the token.
    pub state_dir: PathBuf,
    /// Limits of the journal of decisions; `None` if there is none.
    pub decisions: Option<JournalLimit>,
}

/// The kubelet; a change needs a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct KubeletSettings {
    /// The folder of kubelet.sock, of the kubelet's checkpoint and of the plugins' sockets.
    pub device_plugins_dir: PathBuf,
    /// The kubelet's `--root-dir`, with `pod-resources/` and `pods-api/`.
    pub root_dir: PathBuf,
    /// Whether Berth registers even if running pods cannot be adopted.
    pub skip_adoption: bool,
}

/// The GPUs, and what runs on them; a change needs a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuSettings {
    /// The source of the GPUs.
    pub source: GpuSource,
    /// GPUs that are not offered under any stack.
    pub excluded: Vec<GpuSelector>,
    /// Processes on GPUs: which ones are ignored.
    pub processes: ProcessSettings,
    /// Whether readings and failing calls make a GPU unhealthy; if not, only a missing GPU is withheld.
    pub health_checks: bool,
    /// Whether the daemon ends if the GPUs cannot be read at the start.
    pub fail_on_init_error: bool,
}

/// The API server, and what is written there; a change needs a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterSettings {
    /// Access to the API server.
    pub api_server: ApiServer,
    /// Labels of the node.
    pub labels: LabelSettings,
    /// Set if the daemon writes its GPUNode and carries out GPUMaintenances: where it pulls the policies that its GPUNode names.
    pub fleet: Option<PullSettings>,
}

/// The admin API; a change needs a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct AdminSettings {
    /// Its address.
    pub listen: SocketAddr,
    /// Address that serves only `/livez`, `/readyz` and `/metrics`, without a token.
    pub health_listen: Option<SocketAddr>,
    /// The bearer token's file, created at the first start.
    pub token_file: PathBuf,
    /// Further access: tokens, TLS, a Unix socket, cluster users.
    pub access: AdminAccess,
}

/// Log and traces; a change needs a restart.
#[derive(Clone, Debug, PartialEq)]
pub struct ObserveSettings {
    /// Format of the log.
    pub log: LogFormat,
    /// Export of traces; `None` if it is off.
    pub tracing: Option<TracingSettings>,
}

/// How containers get their devices.
#[derive(Clone, Debug)]
pub struct ContainerSettings {
    /// How allocated devices are passed to containers.
    pub edits: Edits,
    /// Whether the strategies of `edits` are replaced by those that work on the node.
    pub auto_strategy: bool,
    /// CDI specifications and the container runtime's configuration.
    pub cdi: CdiSettings,
}

/// What GPUs are offered as.
#[derive(Clone, Debug)]
pub struct OfferSettings {
    /// The resource of whole GPUs, unless a policy names another.
    pub resource: Resource,
    /// The MIG strategy, unless a policy decides otherwise.
    pub mig_strategy: MigStrategy,
    /// The file's stack, in the order of evaluation.
    pub stack: Vec<StackEntryConfig>,
}

/// What makes a GPU unhealthy, and how often that is checked.
#[derive(Clone, Debug)]
pub struct HealthSettings {
    /// XIDs that do not make a GPU unhealthy.
    pub xids: XidRules,
    /// Interval of the inventory scans.
    pub scan_interval: Duration,
}

/// Where settings come from.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Their file, for the line numbers of errors that are found later.
    pub source: Option<Arc<Source>>,
    /// Their files, to read them again; `None` without a file.
    pub files: Option<Arc<Files>>,
    /// The file that a node label selected, if `--config-dir` is set.
    pub chosen: Option<Chosen>,
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
            Some(file) => match Files::new(args, file, base).read()? {
                (Some(config), problems, _) if problems.is_empty() => config,
                (_, problems, source) => return Err(source.error(problems)),
            },
            None => Self::merge(args, FileConfig::default())?,
        };
        config
            .loaded
            .notices
            .extend(nvidia::args::unused_environment_notices(|name| std::env::var(name).ok()));
        Ok(config)
    }

    /// The error of a setting, with its line in the file that these settings come from.
    #[must_use]
    pub fn locate(&self, bad: BadSetting) -> Problem {
        match &self.loaded.source {
            Some(source) => source.locate(bad, &ServeArgs::default()),
            None => Problem { place: None, key: bad.setting, what: bad.what },
        }
    }

    /// What is answered if every policy passes.
    #[must_use]
    pub fn baseline(&self) -> Baseline {
        Baseline {
            resource: self.offers.resource.clone(),
            mig: self.offers.mig_strategy,
            mps_sockets: self.containers.edits.mps_sockets(),
            xids: self.health.xids.clone(),
            quiet_ms: self.rules.timing.quiet_ms,
        }
    }

    /// Merges the flags (which include the environment), a file's settings and the defaults.
    ///
    /// # Errors
    /// All invalid values.
    pub fn merge(args: &ServeArgs, mut file: FileConfig) -> Result<Self, BadSettings> {
        let mut checks = Checks::default();
        let state_dir =
            args.state_dir.clone().or(file.state_dir.take()).unwrap_or_else(|| "/var/lib/berth".into());
        let state_dir = checks.absolute_path("stateDir", state_dir);
        let kubelet = KubeletSettings::merge(args, &mut file, &mut checks);
        let kubeconfig = args.kubeconfig.clone().or(file.kubeconfig.take());
        let kubeconfig = kubeconfig.map(|path| checks.absolute_path("kubeconfig", path));
        let overcommit = file.memory_overcommit.unwrap_or(1.0);
        checks.ok(in_range("memoryOvercommit", overcommit, 1.0..=16.0));
        let health = file.health.take().unwrap_or_default();
        let defaults = Timing::default();
        let quiet_ms = health.quiet_seconds.map_or(defaults.quiet_ms, |s| s.saturating_mul(1000));
        let timing = file.timing.take().unwrap_or_default().resolve(&Timing { quiet_ms, ..defaults });
        // A scan takes a few calls per GPU: shorter intervals would leave no pause between scans.
        let poll_seconds = health.poll_seconds.unwrap_or(5.0);
        checks.ok(in_range("health.pollSeconds", poll_seconds, 0.05..=3600.0));
        let admin = AdminSettings::merge(args, &mut file, &state_dir, &mut checks);
        let resource = file.resource.take().unwrap_or_else(|| "nvidia.com/gpu".into());
        let resource = Resource::parse(&resource).map_err(|e| invalid_because("resource", &resource, e.rule));
        let resource = checks.record_error(resource);
        let edits = file.container_edits.take().unwrap_or_default();
        let (edits, auto_strategy) = edits.resolve(&args.edits, &args.nvidia, &mut checks);
        let cdi = cdi::resolve(file.cdi.take(), file.container_runtime.take(), &args.nvidia, &mut checks);
        let health_checks =
            HealthChecks::new(args.disable_healthchecks.as_deref(), args.enable_healthchecks.as_deref());
        let mut notices = args.nvidia.notices(&mut checks);
        notices.extend(args.overridden_nvidia_args());
        notices.extend(health_checks.notices());
        let gpus = GpuSettings::merge(args, &mut file, &edits, &health_checks, &mut checks);
        let mig = args.mig_strategy.clone().or(file.mig_strategy.take());
        let mig_strategy = mig.and_then(|keyword| checks.ok(mig_strategy(&keyword))).unwrap_or_default();
        let history = checks.ok(file.history.take().unwrap_or_default().limit()).unwrap_or_default();
        let decisions = checks.ok(file.decisions.take().unwrap_or_default().limit()).flatten();
        let tracing = checks.ok(file.tracing.take().unwrap_or_default().resolve(&args.tracing)).flatten();
        let trusted_keys = trusted::keys(file.trusted_keys.take(), &mut checks);
        let enforcement = file.enforce.take().unwrap_or_default().memory();
        let bypass = file.bypass.take().unwrap_or_default().resolve(&mut checks);
        let labels = file.labels.take().unwrap_or_default().resolve(&mut checks);
        let stack = file::resolve_stack(
            file.stack.take().unwrap_or_default(),
            args.nvidia.shared_devices_allocation_policy.as_deref(),
            &mut checks,
        );
        let guard = file.guard.take().unwrap_or_default();
        let source = gpus.as_ref().map(|gpus| &gpus.source).ok();
        let api_server = api_server(args.api_server.or(file.api_server), kubeconfig);
        let dra = file.dra.take().unwrap_or_default();
        let (dra, via) = dra.resolve(args.is_guard || api_server != ApiServer::Off, &mut checks);
        let fleet = file.fleet.take().unwrap_or_default();
        let fleet = fleet.settings(args.is_guard || api_server != ApiServer::Off, &mut checks);
        let claim_grants = grants_folder(&kubelet.root_dir, &dra.driver);
        let folders = (kubelet.device_plugins_dir.clone(), claim_grants.clone());
        let guard = guard.resolve(source, enforcement, folders, &mut checks);
        checks.finish()?;
        let name = node_name(args.node_name.clone().or(file.node_name));
        Ok(Self {
            node: NodeSettings { name, state_dir, decisions },
            kubelet,
            gpus: gpus?,
            cluster: ClusterSettings { api_server, labels, fleet },
            admin: admin?,
            observe: ObserveSettings { log: args.log.or(file.log).unwrap_or_default(), tracing },
            containers: ContainerSettings { edits, auto_strategy, cdi },
            guard,
            dra,
            offers: OfferSettings { resource: resource?, mig_strategy, stack },
            health: HealthSettings {
                xids: health_checks.rules(health.ignored_xids),
                scan_interval: Duration::from_secs_f64(poll_seconds),
            },
            rules: Rules {
                timing,
                overcommit_percent: percent(overcommit),
                enforcement,
                bypass,
                claim_grants: Some(claim_grants.display().to_string().into()),
                via,
                history,
                trusted_keys,
            },
            reconcile: file.rounds.unwrap_or_default().resolve(&ReconcileTiming::default()),
            loaded: Loaded { notices, ..Loaded::default() },
        })
    }
}

impl KubeletSettings {
    fn merge(args: &ServeArgs, file: &mut FileConfig, checks: &mut Checks) -> Self {
        let kubelet_dir =
            args.kubelet_dir().or(file.kubelet_dir.take()).unwrap_or_else(|| "/var/lib/kubelet".into());
        let kubelet_dir = checks.absolute_path("kubeletDir", kubelet_dir);
        let device_plugins_dir = args.device_plugins_dir.clone().or(file.device_plugins_dir.take());
        let root_dir = args.kubelet_root_dir.clone().or(file.kubelet_root_dir.take());
        Self {
            device_plugins_dir: device_plugins_dir.map_or_else(
                || kubelet_dir.join("device-plugins"),
                |path| checks.absolute_path("devicePluginsDir", path),
            ),
            root_dir: root_dir.map_or(kubelet_dir, |path| checks.absolute_path("kubeletRootDir", path)),
            skip_adoption: args.skip_adoption || file.skip_adoption.unwrap_or(false),
        }
    }
}

impl AdminSettings {
    fn merge(
        args: &ServeArgs,
        file: &mut FileConfig,
        state_dir: &Path,
        checks: &mut Checks,
    ) -> Result<Self, BadSetting> {
        let access = file.admin.take().unwrap_or_default().resolve(args.admin_socket.clone(), checks);
        let listen = args.admin_listen.clone().or(file.admin_listen.take());
        let listen = listen.as_deref().unwrap_or("127.0.0.1:9470");
        let listen = checks.record_error(admin::listen(listen, access.tls.is_some()));
        let health_listen = args.health_listen.clone().or(file.health_listen.take());
        let health_listen = health_listen.as_deref().and_then(|h| checks.ok(address("healthListen", h)));
        let token_file = args.token_file.clone().or(file.token_file.take());
        let token_file =
            checks.absolute_path("tokenFile", token_file.unwrap_or_else(|| state_dir.join("token")));
        Ok(Self { listen: listen?, health_listen, token_file, access })
    }
}

impl GpuSettings {
    fn merge(
        args: &ServeArgs,
        file: &mut FileConfig,
        edits: &Edits,
        health_checks: &HealthChecks,
        checks: &mut Checks,
    ) -> Result<Self, BadSetting> {
        let driver =
            nvidia::args::non_empty(args.nvidia.driver_root_ctr_path.as_ref()).unwrap_or(&edits.driver_root);
        let library = args.nvml_library.clone().or(file.nvml_library.take());
        let library = library.map(|path| checks.plain_path("nvmlLibrary", path));
        let gpus = file.gpus.take().unwrap_or_default();
        let source = args.gpus.clone().or_else(|| gpus.source.clone()).unwrap_or_else(|| "nvml".into());
        let source = checks.record_error(gpu_source(&source, library, driver));
        let fail_on_init_error = args.nvidia.fail_on_init_error.or(file.fail_on_init_error);
        Ok(Self {
            excluded: gpus.excluded(checks),
            processes: file.processes.take().unwrap_or_default().resolve(checks),
            source: source?,
            health_checks: !health_checks.is_off(),
            fail_on_init_error: fail_on_init_error.unwrap_or(false),
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
