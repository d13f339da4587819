//! The configuration file. Unknown keys are refused.

use super::admin::AdminFile;
use super::checks::{BadSetting, Checks, bad};
use super::edits::EditsFile;
use super::labels::LabelsFile;
use super::processes::ProcessesFile;
use super::tracing::TracingFile;
use super::trusted::TrustedKeyFile;
use super::{ApiServerMode, LogFormat, ReconcileTiming};
use berth_api::OnFault;
use berth_files::yaml::{self, Problems};
use berth_kernel::decision::JournalLimit;
use berth_kernel::history::{
    HISTORY_ALLOCATIONS_DEFAULT, HISTORY_ALLOCATIONS_MAX, HISTORY_ALLOCATIONS_MIN, HistoryLimit,
};
use berth_kernel::policy::{PARAMETERS_BYTES_MAX, STACK_ENTRIES_MAX};
use berth_kernel::stack::Permissions;
use berth_kernel::time::Timing;
use serde::Deserialize;
use std::path::PathBuf;
use std::time::Duration;

/// The file as written.
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

/// `history`: how many ended allocations are kept.
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

/// Largest journal of decisions, MiB: a search reads all of it.
const DECISIONS_MIB_MAX: u64 = 4096;
/// Smallest journal, MiB: two files.
const DECISIONS_MIB_MIN: u64 = 8;
/// Longest retention of decisions, days.
const DECISIONS_DAYS_MAX: u64 = 365;

/// `decisions`: limits of the journal of policy calls; 0 MiB turns it off.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(missing_docs)]
pub struct DecisionsFile {
    #[serde(rename = "maxMiB")]
    pub max_mib: Option<u64>,
    pub max_age_days: Option<u64>,
}

impl DecisionsFile {
    /// `None` if the journal is off.
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

/// `rounds`: see [`ReconcileTiming`].
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
    pub(super) fn resolve(&self, defaults: &ReconcileTiming) -> ReconcileTiming {
        let ms = |millis: Option<u64>, default| millis.map_or(default, Duration::from_millis);
        ReconcileTiming {
            list_interval: ms(self.list_every_ms, defaults.list_interval),
            list_interval_cordoned: ms(self.list_every_cordoned_ms, defaults.list_interval_cordoned),
            full_pass_interval: ms(self.round_every_ms, defaults.full_pass_interval),
            checkpoint_wait: ms(self.checkpoint_wait_ms, defaults.checkpoint_wait),
        }
    }
}

/// `timing`: see [`Timing`]. Shorter times weaken the guarantees that they protect.
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
    pub(super) fn resolve(&self, defaults: &Timing) -> Timing {
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
    /// The name of a shipped or uploaded policy; `name@digest` selects a version.
    pub policy: String,
    /// The version; by default the shipped one.
    pub digest: Option<String>,
    /// Passed to the policy as JSON.
    #[serde(default)]
    pub parameters: serde_json::Map<String, serde_json::Value>,
    /// What the policy may do.
    #[serde(default)]
    pub permissions: PermissionsConfig,
    /// What happens when the policy fails.
    #[serde(default)]
    pub on_fault: OnFault,
}

impl StackEntryConfig {
    /// An entry with only a policy's name.
    #[must_use]
    pub fn named(policy: &str) -> Self {
        Self {
            policy: policy.into(),
            digest: None,
            parameters: serde_json::Map::new(),
            permissions: PermissionsConfig::default(),
            on_fault: OnFault::default(),
        }
    }
}

/// `permissions` of an entry; absent keys have defaults.
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
    /// The permissions, with defaults.
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

impl FileConfig {
    /// This file, with the keys of `base` that it lacks. A top-level key replaces that of `base` as a whole.
    pub(super) fn overlay(self, base: Self) -> Self {
        Self {
            node_name: self.node_name.or(base.node_name),
            kubelet_dir: self.kubelet_dir.or(base.kubelet_dir),
            state_dir: self.state_dir.or(base.state_dir),
            gpus: self.gpus.or(base.gpus),
            nvml_library: self.nvml_library.or(base.nvml_library),
            api_server: self.api_server.or(base.api_server),
            kubeconfig: self.kubeconfig.or(base.kubeconfig),
            admin_listen: self.admin_listen.or(base.admin_listen),
            admin: self.admin.or(base.admin),
            health_listen: self.health_listen.or(base.health_listen),
            token_file: self.token_file.or(base.token_file),
            log: self.log.or(base.log),
            tracing: self.tracing.or(base.tracing),
            resource: self.resource.or(base.resource),
            mig_strategy: self.mig_strategy.or(base.mig_strategy),
            memory_overcommit: self.memory_overcommit.or(base.memory_overcommit),
            skip_adoption: self.skip_adoption.or(base.skip_adoption),
            fail_on_init_error: self.fail_on_init_error.or(base.fail_on_init_error),
            health: self.health.or(base.health),
            history: self.history.or(base.history),
            decisions: self.decisions.or(base.decisions),
            processes: self.processes.or(base.processes),
            labels: self.labels.or(base.labels),
            container_edits: self.container_edits.or(base.container_edits),
            rounds: self.rounds.or(base.rounds),
            timing: self.timing.or(base.timing),
            trusted_keys: self.trusted_keys.or(base.trusted_keys),
            stack: self.stack.or(base.stack),
        }
    }

    /// As [`Self::overlay`], for the translation of an NVIDIA file. Its flags become keys of `containerEdits`, so each
    /// of these keys replaces only its equal.
    pub(super) fn overlay_translated(mut self, mut base: Self) -> Self {
        self.container_edits = match (self.container_edits.take(), base.container_edits.take()) {
            (Some(own), Some(base)) => Some(own.overlay(base)),
            (own, base) => own.or(base),
        };
        self.overlay(base)
    }

    /// Parses a file's text. Empty text means defaults.
    ///
    /// # Errors
    /// All errors of the text, with lines.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        yaml::from_str(text)
    }
}

/// Checks the limits of a stack and returns the entries.
pub(super) fn check_stack(entries: Vec<StackEntryConfig>, checks: &mut Checks) -> Vec<StackEntryConfig> {
    checks.at_most("stack", entries.len(), STACK_ENTRIES_MAX, "entries");
    for (at, entry) in entries.iter().enumerate() {
        let bytes = serde_json::to_string(&entry.parameters).map_or(usize::MAX, |json| json.len());
        if bytes > PARAMETERS_BYTES_MAX {
            let size = format!("{bytes} bytes of JSON");
            let rule = format!("at most {PARAMETERS_BYTES_MAX} bytes");
            checks.add(bad(format!("stack[{at}].parameters"), &size, rule));
        }
    }
    entries
}
