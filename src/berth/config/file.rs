//! The configuration file. Unknown keys are refused; units are in the names.

use super::admin::AdminFile;
use super::checks::{BadSetting, Checks, bad};
use super::edits::EditsFile;
use super::labels::LabelsFile;
use super::processes::ProcessesFile;
use super::tracing::TracingFile;
use super::trusted::TrustedKeyFile;
use super::{ApiServerMode, LogFormat, RoundTiming};
use berth_files::yaml::{self, Problems};
use berth_kernel::decision::JournalLimit;
use berth_kernel::history::{
    HISTORY_ALLOCATIONS_DEFAULT, HISTORY_ALLOCATIONS_MAX, HISTORY_ALLOCATIONS_MIN, HistoryLimit,
};
use berth_kernel::policy::{PARAMETERS_BYTES_MAX, STACK_ENTRIES_MAX};
use berth_kernel::stack::{OnFault, Permissions};
use berth_kernel::time::Timing;
use serde::Deserialize;
use std::path::PathBuf;
use std::time::Duration;

/// The file as it is written.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)] // each is documented at the setting that it becomes, in `Config`
pub struct FileConfig {
    pub node_name: Option<String>,
    pub kubelet_dir: Option<PathBuf>,
    pub state_dir: Option<PathBuf>,
    pub gpus: Option<String>,
    pub nvml_library: Option<PathBuf>,
    pub api_server: Option<ApiServerFile>,
    pub kubeconfig: Option<PathBuf>,
    pub admin_listen: Option<String>,
    pub admin: Option<AdminFile>,
    pub health_listen: Option<String>,
    pub token_file: Option<PathBuf>,
    pub log: Option<LogFile>,
    pub tracing: Option<TracingFile>,
    pub resource: Option<String>,
    pub mig_strategy: Option<String>,
    pub memory_overcommit: Option<f64>,
    pub skip_adoption: Option<bool>,
    pub fail_on_init_error: Option<bool>,
    pub health: Option<HealthFile>,
    pub history: Option<HistoryFile>,
    pub decisions: Option<DecisionsFile>,
    pub processes: Option<ProcessesFile>,
    pub labels: Option<LabelsFile>,
    pub container_edits: Option<EditsFile>,
    pub rounds: Option<RoundsFile>,
    pub timing: Option<TimingFile>,
    pub trusted_keys: Option<Vec<TrustedKeyFile>>,
    pub stack: Option<Vec<StackEntryConfig>>,
}

/// `apiServer`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum ApiServerFile {
    Auto,
    Off,
}

impl From<ApiServerFile> for ApiServerMode {
    fn from(file: ApiServerFile) -> Self {
        match file {
            ApiServerFile::Auto => Self::Auto,
            ApiServerFile::Off => Self::Off,
        }
    }
}

/// `log`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum LogFile {
    Text,
    Json,
}

impl From<LogFile> for LogFormat {
    fn from(file: LogFile) -> Self {
        match file {
            LogFile::Text => Self::Text,
            LogFile::Json => Self::Json,
        }
    }
}

/// `health`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct HealthFile {
    pub poll_seconds: Option<f64>,
    pub quiet_seconds: Option<u64>,
    pub ignored_xids: Option<Vec<u64>>,
}

/// `history`: how much is kept of what has ended.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct HistoryFile {
    pub allocations: Option<usize>,
}

impl HistoryFile {
    pub(super) fn limit(self) -> Result<HistoryLimit, BadSetting> {
        let allocations = self.allocations.unwrap_or(HISTORY_ALLOCATIONS_DEFAULT);
        if !(HISTORY_ALLOCATIONS_MIN..=HISTORY_ALLOCATIONS_MAX).contains(&allocations) {
            let rule = format!("{HISTORY_ALLOCATIONS_MIN} to {HISTORY_ALLOCATIONS_MAX}");
            return Err(bad("history.allocations", &allocations.to_string(), rule));
        }
        Ok(HistoryLimit { allocations, ..HistoryLimit::default() })
    }
}

/// Most that the journal of decisions may take, MiB: what a look through all of it still bears.
const DECISIONS_MIB_MAX: u64 = 4096;
/// Least: two files of it.
const DECISIONS_MIB_MIN: u64 = 8;
/// Longest that decisions are kept, days.
const DECISIONS_DAYS_MAX: u64 = 365;

/// `decisions`: how much is kept of what policies were asked and said. 0 MiB: nothing.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct DecisionsFile {
    #[serde(rename = "maxMiB")]
    pub max_mib: Option<u64>,
    pub max_age_days: Option<u64>,
}

impl DecisionsFile {
    /// `None` where no journal is wanted.
    pub(super) fn limit(self) -> Result<Option<JournalLimit>, BadSetting> {
        let mut limit = JournalLimit::default();
        if let Some(mib) = self.max_mib {
            if mib == 0 {
                return Ok(None);
            }
            if !(DECISIONS_MIB_MIN..=DECISIONS_MIB_MAX).contains(&mib) {
                let rule = format!("0 (no journal), or {DECISIONS_MIB_MIN} to {DECISIONS_MIB_MAX}");
                return Err(bad("decisions.maxMiB", &mib.to_string(), rule));
            }
            limit.bytes = mib * 1024 * 1024;
        }
        if let Some(days) = self.max_age_days {
            if !(1..=DECISIONS_DAYS_MAX).contains(&days) {
                let rule = format!("1 to {DECISIONS_DAYS_MAX}");
                return Err(bad("decisions.maxAgeDays", &days.to_string(), rule));
            }
            limit.age_ms = days * 24 * 3_600_000;
        }
        Ok(Some(limit))
    }
}

/// `rounds`: see [`RoundTiming`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct RoundsFile {
    pub list_every_ms: Option<u64>,
    pub list_every_cordoned_ms: Option<u64>,
    pub round_every_ms: Option<u64>,
    pub checkpoint_wait_ms: Option<u64>,
}

impl RoundsFile {
    pub(super) fn over(&self, defaults: &RoundTiming) -> RoundTiming {
        let ms = |given: Option<u64>, default| given.map_or(default, Duration::from_millis);
        RoundTiming {
            list_every: ms(self.list_every_ms, defaults.list_every),
            list_every_cordoned: ms(self.list_every_cordoned_ms, defaults.list_every_cordoned),
            round_every: ms(self.round_every_ms, defaults.round_every),
            checkpoint_wait: ms(self.checkpoint_wait_ms, defaults.checkpoint_wait),
        }
    }
}

/// `timing`: see [`Timing`]. Shortening these weakens what they guard.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct TimingFile {
    pub retire_ms: Option<u64>,
    pub named_ms: Option<u64>,
    pub rounds_apart_ms: Option<u64>,
    pub kubelet_settle_ms: Option<u64>,
    pub reply_settle_ms: Option<u64>,
    pub bypass_ms: Option<u64>,
    pub drained_ms: Option<u64>,
    pub evict_again_ms: Option<u64>,
}

impl TimingFile {
    pub(super) fn over(&self, defaults: &Timing) -> Timing {
        Timing {
            retire_ms: self.retire_ms.unwrap_or(defaults.retire_ms),
            named_ms: self.named_ms.unwrap_or(defaults.named_ms),
            rounds_apart_ms: self.rounds_apart_ms.unwrap_or(defaults.rounds_apart_ms),
            kubelet_settle_ms: self.kubelet_settle_ms.unwrap_or(defaults.kubelet_settle_ms),
            reply_settle_ms: self.reply_settle_ms.unwrap_or(defaults.reply_settle_ms),
            bypass_ms: self.bypass_ms.unwrap_or(defaults.bypass_ms),
            drained_ms: self.drained_ms.unwrap_or(defaults.drained_ms),
            evict_again_ms: self.evict_again_ms.unwrap_or(defaults.evict_again_ms),
            ..defaults.clone()
        }
    }
}

/// One entry of `stack`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StackEntryConfig {
    /// A shipped policy's name, or that of an uploaded one; `name@digest` says which version.
    pub policy: String,
    /// Which version; the shipped one if not given.
    pub digest: Option<String>,
    /// Handed to the policy as JSON.
    #[serde(default)]
    pub parameters: serde_json::Map<String, serde_json::Value>,
    /// What it may do.
    #[serde(default)]
    pub permissions: PermissionsConfig,
    /// What happens when it fails.
    #[serde(default)]
    pub on_fault: OnFaultConfig,
}

impl StackEntryConfig {
    /// An entry with nothing but a policy's name.
    #[must_use]
    pub fn named(policy: &str) -> Self {
        Self {
            policy: policy.into(),
            digest: None,
            parameters: serde_json::Map::new(),
            permissions: PermissionsConfig::default(),
            on_fault: OnFaultConfig::default(),
        }
    }
}

/// `permissions` of an entry; what is not given is the default.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct PermissionsConfig {
    pub deny: Option<bool>,
    pub share_max: Option<u32>,
    pub resources: Option<Vec<String>>,
    pub environment: Option<Vec<String>>,
}

impl PermissionsConfig {
    /// With the defaults filled in.
    #[must_use]
    pub fn resolve(&self) -> Permissions {
        let defaults = Permissions::default();
        Permissions {
            deny: self.deny.unwrap_or(defaults.deny),
            share_max: self.share_max.unwrap_or(defaults.share_max),
            resources: self.resources.clone().unwrap_or(defaults.resources),
            environment: self.environment.clone().unwrap_or(defaults.environment),
        }
    }
}

/// `onFault` of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum OnFaultConfig {
    #[default]
    Skip,
    Deny,
}

impl From<OnFaultConfig> for OnFault {
    fn from(config: OnFaultConfig) -> Self {
        match config {
            OnFaultConfig::Skip => Self::Skip,
            OnFaultConfig::Deny => Self::Deny,
        }
    }
}

impl FileConfig {
    /// With the keys that only the other file has; a key of this one replaces that of the other, whole.
    pub(super) fn over(self, below: Self) -> Self {
        Self {
            node_name: self.node_name.or(below.node_name),
            kubelet_dir: self.kubelet_dir.or(below.kubelet_dir),
            state_dir: self.state_dir.or(below.state_dir),
            gpus: self.gpus.or(below.gpus),
            nvml_library: self.nvml_library.or(below.nvml_library),
            api_server: self.api_server.or(below.api_server),
            kubeconfig: self.kubeconfig.or(below.kubeconfig),
            admin_listen: self.admin_listen.or(below.admin_listen),
            admin: self.admin.or(below.admin),
            health_listen: self.health_listen.or(below.health_listen),
            token_file: self.token_file.or(below.token_file),
            log: self.log.or(below.log),
            tracing: self.tracing.or(below.tracing),
            resource: self.resource.or(below.resource),
            mig_strategy: self.mig_strategy.or(below.mig_strategy),
            memory_overcommit: self.memory_overcommit.or(below.memory_overcommit),
            skip_adoption: self.skip_adoption.or(below.skip_adoption),
            fail_on_init_error: self.fail_on_init_error.or(below.fail_on_init_error),
            health: self.health.or(below.health),
            history: self.history.or(below.history),
            decisions: self.decisions.or(below.decisions),
            processes: self.processes.or(below.processes),
            labels: self.labels.or(below.labels),
            container_edits: self.container_edits.or(below.container_edits),
            rounds: self.rounds.or(below.rounds),
            timing: self.timing.or(below.timing),
            trusted_keys: self.trusted_keys.or(below.trusted_keys),
            stack: self.stack.or(below.stack),
        }
    }

    /// The same for a translation of NVIDIA's file, which has no `containerEdits`: its flags stand there side by side,
    /// and each replaces that of the other alone.
    pub(super) fn translated_over(mut self, mut below: Self) -> Self {
        self.container_edits = match (self.container_edits.take(), below.container_edits.take()) {
            (Some(own), Some(other)) => Some(own.over(other)),
            (own, other) => own.or(other),
        };
        self.over(below)
    }

    /// Reads the text of a file. Empty text is all defaults.
    ///
    /// # Errors
    /// All that is wrong, with lines.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        yaml::from_str(text)
    }
}

/// The entries of a file within the limits of a stack.
pub(super) fn stack(entries: Vec<StackEntryConfig>, checks: &mut Checks) -> Vec<StackEntryConfig> {
    checks.at_most("stack", entries.len(), STACK_ENTRIES_MAX, "entries");
    for (at, entry) in entries.iter().enumerate() {
        let bytes = serde_json::to_string(&entry.parameters).map_or(usize::MAX, |json| json.len());
        if bytes > PARAMETERS_BYTES_MAX {
            let given = format!("{bytes} bytes of JSON");
            let rule = format!("at most {PARAMETERS_BYTES_MAX} bytes");
            checks.add(bad(format!("stack[{at}].parameters"), &given, rule));
        }
    }
    entries
}
