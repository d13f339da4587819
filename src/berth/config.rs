//! The settings: one struct, read once, from flags, environment, file and defaults, in that order
//! of precedence. The only reader of files, environment and flags.

mod admin;
mod args;
mod checks;
mod choice;
mod edits;
mod error;
mod file;
mod healthchecks;
mod labels;
pub mod nvidia;
mod parsers;
mod processes;
mod source;
mod tracing;
mod trusted;

pub use admin::AdminFile;
pub use args::{NvidiaArgs, ServeArgs};
pub use checks::{BadSetting, BadSettings, Findings, Without};
pub use choice::{Choice, ChoiceArgs, ChoiceError, Chosen};
pub use error::ConfigError;
pub use file::{FileConfig, StackEntryConfig};
pub use labels::LabelSettings;
pub use processes::{IGNORED_PROCESSES, ProcessSettings};
pub use source::{CONFIG_BYTES_MAX, Source, read_text};
pub use tracing::{Endpoint, Protocol, TracingFile, TracingSettings};
pub use trusted::TrustedKeyFile;

use berth_cluster::ApiServer;
use berth_files::yaml::Problem;
use berth_http::AdminAccess;
use berth_kernel::command::Rules;
use berth_kernel::decision::JournalLimit;
use berth_kernel::mig::MigStrategy;
use berth_kernel::names::Resource;
use berth_kernel::time::Timing;
use berth_kubelet::{Edits, RoundTiming};
use checks::{Checks, bad, bad_because, parse_keyword};
use healthchecks::HealthChecks;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Everything that can be set.
#[derive(Clone, Debug)]
pub struct Config {
    /// The node's name, for the API and events.
    pub node_name: String,
    /// The kubelet's folder; holds device-plugins/ and pod-resources/.
    pub kubelet_dir: PathBuf,
    /// Where the store, policies and the token live.
    pub state_dir: PathBuf,
    /// How the API server is reached.
    pub api_server: ApiServer,
    /// Where GPUs come from.
    pub gpus: GpuSource,
    /// Where the admin API listens.
    pub admin_listen: SocketAddr,
    /// Where only /livez, /readyz and /metrics are served, without a token.
    pub health_listen: Option<SocketAddr>,
    /// The bearer token's file; made on first start.
    pub token_file: PathBuf,
    /// Who else may ask the admin API.
    pub admin: AdminAccess,
    /// How logs are written.
    pub log: LogFormat,
    /// Where traces go; `None`: nowhere.
    pub tracing: Option<TracingSettings>,
    /// What containers are given.
    pub edits: Edits,
    /// The resource under which whole GPUs are offered if no policy says otherwise.
    pub resource: Resource,
    /// What becomes of MIG if no policy says otherwise.
    pub mig_strategy: MigStrategy,
    /// The rules of the kernel.
    pub rules: Rules,
    /// How much is kept of what policies decided; `None`: nothing.
    pub decisions: Option<JournalLimit>,
    /// XIDs that say nothing of a GPU's health.
    pub ignored_xids: Vec<u64>,
    /// Which processes on GPUs are nobody's concern.
    pub processes: ProcessSettings,
    /// How often all GPUs are looked at.
    pub poll: Duration,
    /// How the node is labelled.
    pub labels: LabelSettings,
    /// The waits of rounds.
    pub rounds: RoundTiming,
    /// Register even if running pods cannot be adopted.
    pub skip_adoption: bool,
    /// The stack of the file, first asked first.
    pub stack: Vec<StackEntryConfig>,
    /// The file that these settings were read from, for the lines of what is found wrong later.
    pub source: Option<Arc<Source>>,
    /// The file that a label of the node chose, where one does.
    pub chosen: Option<Chosen>,
    /// Whether readings and failing calls count against a GPU; without, only one that is gone is not granted.
    pub health_checks: bool,
    /// Whether GPUs that cannot be read at the start end the daemon.
    pub fail_on_init_error: bool,
    /// What was set and is not used, or is used in another way: one line each for the log.
    pub notices: Vec<String>,
}

/// Where GPUs come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuSource {
    /// NVML.
    Nvml {
        /// `libnvidia-ml.so.1`, if not where the loader finds it.
        library: Option<PathBuf>,
        /// Where the driver is installed, if not at `/`.
        driver_root: Option<PathBuf>,
    },
    /// Simulated: a profile such as `8xh100`, or a file.
    Sim(String),
}

/// Whether the API server is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ApiServerMode {
    /// With a kubeconfig, or the service account of our pod, where there is one.
    #[default]
    Auto,
    /// Not at all.
    Off,
}

/// How logs are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl Config {
    /// Reads the settings of `berth serve`.
    ///
    /// # Errors
    /// If the file or a value cannot be used.
    pub fn load(args: &ServeArgs) -> Result<Self, ConfigError> {
        Self::load_over(args.config_file(), None, args)
    }

    /// The same by another file, with the keys that only the one below has.
    fn load_over(file: Option<&Path>, below: Option<&Path>, args: &ServeArgs) -> Result<Self, ConfigError> {
        let below = below.map(Source::read).transpose()?;
        let mut config = match file.map(Source::read).transpose()? {
            Some(source) => match source.settings_over(below.as_ref(), args) {
                (Some(config), problems) if problems.is_empty() => config,
                (_, problems) => return Err(source.wrong(problems)),
            },
            None => Self::merge(args, FileConfig::default())?,
        };
        config.notices.extend(nvidia::unused_environment(|name| std::env::var(name).ok()));
        Ok(config)
    }

    /// What was found wrong with a setting, with its place in the file that these settings come from.
    #[must_use]
    pub fn locate(&self, bad: BadSetting) -> Problem {
        match &self.source {
            Some(source) => source.locate(bad, &ServeArgs::default()),
            None => Problem { place: None, key: bad.setting, what: bad.what },
        }
    }

    /// Puts flags (with the environment in them) over a file's settings over the defaults.
    ///
    /// # Errors
    /// All values that cannot be used.
    pub fn merge(args: &ServeArgs, file: FileConfig) -> Result<Self, BadSettings> {
        let mut checks = Checks::default();
        let given = |flag: &Option<PathBuf>, file, default: &str| {
            flag.clone().or(file).unwrap_or_else(|| default.into())
        };
        let state_dir = checks.path("stateDir", given(&args.state_dir, file.state_dir, "/var/lib/berth"));
        let kubelet_dir = given(&args.kubelet_dir(), file.kubelet_dir, "/var/lib/kubelet");
        let token_file = args.token_file.clone().or(file.token_file);
        let token_file = token_file.unwrap_or_else(|| state_dir.join("token"));
        let kubeconfig = args.kubeconfig.clone().or(file.kubeconfig);
        let kubeconfig = kubeconfig.map(|path| checks.path("kubeconfig", path));
        let overcommit = file.memory_overcommit.unwrap_or(1.0);
        checks.within("memoryOvercommit", overcommit, 1.0, 16.0);
        let health = file.health.unwrap_or_default();
        let defaults = Timing::default();
        let quiet_ms = health.quiet_seconds.map_or(defaults.quiet_ms, |s| s.saturating_mul(1000));
        let timing = file.timing.unwrap_or_default().over(&Timing { quiet_ms, ..defaults });
        // One poll is a few calls a GPU; faster than this they would follow on each other.
        let poll_seconds = health.poll_seconds.unwrap_or(5.0);
        checks.within("health.pollSeconds", poll_seconds, 0.05, 3600.0);
        let admin = file.admin.unwrap_or_default().over(args.admin_socket.clone(), &mut checks);
        let listen = args.admin_listen.clone().or(file.admin_listen);
        let listen = listen.as_deref().unwrap_or("127.0.0.1:9470");
        let admin_listen = checks.see(admin::listen(listen, admin.tls.is_some()));
        let health_listen = args.health_listen.clone().or(file.health_listen);
        let health_listen = health_listen.as_deref().and_then(|h| checks.take(address("healthListen", h)));
        let resource = file.resource.unwrap_or_else(|| "nvidia.com/gpu".into());
        let resource = Resource::parse(&resource).map_err(|e| bad_because("resource", &resource, e.rule));
        let resource = checks.see(resource);
        let edits = file.container_edits.unwrap_or_default().under(args, &mut checks);
        let driver = args::given(args.nvidia.driver_root_ctr_path.as_ref()).unwrap_or(&edits.driver_root);
        let health_checks = HealthChecks::of(args);
        let mut notices = args.nvidia.notices(&mut checks);
        notices.extend(args.outdone());
        notices.extend(health_checks.notices());
        notices.extend(edits::cdi_notice(&args.edits.device_list_strategy));
        let library = args.nvml_library.clone().or(file.nvml_library);
        let library = library.map(|path| checks.plain("nvmlLibrary", path));
        let gpus = args.gpus.clone().or(file.gpus).unwrap_or_else(|| "nvml".into());
        let gpus = checks.see(gpu_source(&gpus, library, driver));
        let mig = checks.see(mig_strategy(args.mig_strategy.clone().or(file.mig_strategy).as_deref()));
        let history = checks.see(file.history.unwrap_or_default().limit());
        let decisions = checks.see(file.decisions.unwrap_or_default().limit());
        let tracing = checks.see(file.tracing.unwrap_or_default().under(args));
        let trusted_keys = trusted::keys(file.trusted_keys, &mut checks);
        let processes = file.processes.unwrap_or_default().over(ProcessSettings::default(), &mut checks);
        let labels = file.labels.unwrap_or_default().checked(&mut checks);
        let stack = args.nvidia.placed(file::stack(file.stack.unwrap_or_default(), &mut checks));
        let (kubelet_dir, token_file) =
            (checks.path("kubeletDir", kubelet_dir), checks.path("tokenFile", token_file));
        checks.done()?;
        Ok(Self {
            node_name: node_name(args.node_name.clone().or(file.node_name)),
            kubelet_dir,
            token_file,
            api_server: api_server(args.api_server.or(file.api_server.map(Into::into)), kubeconfig),
            gpus: gpus?,
            admin,
            admin_listen: admin_listen?,
            health_listen,
            log: args.log.or(file.log.map(Into::into)).unwrap_or_default(),
            tracing: tracing?,
            resource: resource?,
            mig_strategy: mig?,
            rules: Rules { timing, overcommit_percent: percent(overcommit), history: history?, trusted_keys },
            decisions: decisions?,
            ignored_xids: health_checks.ignored(health.ignored_xids),
            health_checks: !health_checks.is_off(),
            processes,
            poll: Duration::from_secs_f64(poll_seconds),
            labels,
            rounds: file.rounds.unwrap_or_default().over(&RoundTiming::default()),
            skip_adoption: args.skip_adoption || file.skip_adoption.unwrap_or(false),
            stack,
            chosen: None,
            state_dir,
            edits,
            source: None,
            fail_on_init_error: args.nvidia.fail_on_init_error.or(file.fail_on_init_error).unwrap_or(false),
            notices,
        })
    }
}

fn address(setting: &str, text: &str) -> Result<SocketAddr, BadSetting> {
    text.parse().map_err(|_| bad(setting, text, "an IP address and a port, such as 127.0.0.1:9470"))
}

fn gpu_source(text: &str, library: Option<PathBuf>, driver_root: &Path) -> Result<GpuSource, BadSetting> {
    let driver_root = (driver_root != Path::new("/")).then(|| driver_root.to_owned());
    match text.split_once(':') {
        None if text == "nvml" => Ok(GpuSource::Nvml { library, driver_root }),
        Some(("sim", profile)) if !profile.is_empty() => Ok(GpuSource::Sim(profile.into())),
        _ => Err(bad("gpus", text, "nvml, sim:8xh100 (so many, of a known model), or sim:FILE")),
    }
}

/// By the words of NVIDIA's device plugin.
fn mig_strategy(word: Option<&str>) -> Result<MigStrategy, BadSetting> {
    let known = [MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed];
    let known = known.map(|strategy| (strategy.as_str(), strategy));
    word.map_or(Ok(MigStrategy::default()), |word| parse_keyword("migStrategy", word, &known))
}

/// A kubeconfig means that it is wanted; without one it is used where a pod's service account is.
fn api_server(wanted: Option<ApiServerMode>, kubeconfig: Option<PathBuf>) -> ApiServer {
    let account = Path::new("/var/run/secrets/kubernetes.io/serviceaccount/token");
    match (wanted.unwrap_or_default(), kubeconfig) {
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

/// The kubelet tells pods their node by this variable through the downward API.
fn node_name(given: Option<String>) -> String {
    given
        .or_else(|| std::env::var("NODE_NAME").ok())
        .filter(|n| !n.is_empty())
        .unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned())
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // 100 to 1600 by the caller's check
fn percent(overcommit: f64) -> u32 {
    (overcommit * 100.0).round() as u32
}

#[cfg(test)]
mod mps_tests;
#[cfg(test)]
mod tests;
