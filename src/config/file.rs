//! The configuration file. Unknown keys are refused.

use super::admin::AdminFile;
use super::args::ApiServerMode;
use super::cdi::{CdiFile, RuntimeFile};
use super::checks::{BadSetting, Checks, bad, in_range};
use super::dra::DraFile;
use super::edits::EditsFile;
use super::fleet::FleetFile;
use super::gpus::{GpusFile, HealthFile, ProcessesFile};
use super::guard::{BypassFile, EnforceFile, GuardFile};
use super::nvidia::args::PACKED;
use super::tracing::TracingFile;
use super::trusted::TrustedKeyFile;
use berth_api::OnFault;
use berth_cluster::LabelSettings;
use berth_files::yaml::{self, Problems};
use berth_kernel::grants::history::{
    HISTORY_ALLOCATIONS_DEFAULT, HISTORY_ALLOCATIONS_MAX, HISTORY_ALLOCATIONS_MIN, HistoryLimit,
};
use berth_kernel::ids::time::Timing;
use berth_kernel::policy::decision::JournalLimit;
use berth_kernel::policy::hooks::{PARAMETERS_BYTES_MAX, STACK_ENTRIES_MAX};
use berth_kernel::policy::stack::Permissions;
use berth_kubelet::ReconcileTiming;
use berth_observe::logs::LogFormat;
use serde::Deserialize;
use std::path::PathBuf;
use std::time::Duration;

/// The file as written; each key is documented at the setting that it becomes, in [`Config`](super::Config).
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FileConfig {
    pub(super) node_name: Option<String>,
    pub(super) kubelet_dir: Option<PathBuf>,
    pub(super) kubelet_root_dir: Option<PathBuf>,
    pub(super) device_plugins_dir: Option<PathBuf>,
    pub(super) state_dir: Option<PathBuf>,
    pub(super) gpus: Option<GpusFile>,
    pub(super) nvml_library: Option<PathBuf>,
    pub(super) api_server: Option<ApiServerMode>,
    pub(super) kubeconfig: Option<PathBuf>,
    pub(super) admin_listen: Option<String>,
    pub(super) admin: Option<AdminFile>,
    pub(super) health_listen: Option<String>,
    pub(super) token_file: Option<PathBuf>,
    pub(super) log: Option<LogFormat>,
    pub(super) tracing: Option<TracingFile>,
    pub(super) resource: Option<String>,
    pub(super) mig_strategy: Option<String>,
    pub(super) memory_overcommit: Option<f64>,
    pub(super) skip_adoption: Option<bool>,
    pub(super) fail_on_init_error: Option<bool>,
    pub(super) health: Option<HealthFile>,
    pub(super) history: Option<HistoryFile>,
    pub(super) decisions: Option<DecisionsFile>,
    pub(super) processes: Option<ProcessesFile>,
    pub(super) labels: Option<LabelsFile>,
    pub(super) container_edits: Option<EditsFile>,
    pub(super) cdi: Option<CdiFile>,
    pub(super) container_runtime: Option<RuntimeFile>,
    pub(super) guard: Option<GuardFile>,
    pub(super) enforce: Option<EnforceFile>,
    pub(super) bypass: Option<BypassFile>,
    pub(super) dra: Option<DraFile>,
    pub(super) fleet: Option<FleetFile>,
    pub(super) rounds: Option<RoundsFile>,
    pub(super) timing: Option<TimingFile>,
    pub(super) trusted_keys: Option<Vec<TrustedKeyFile>>,
    pub(super) stack: Option<Vec<StackEntryConfig>>,
}

/// `history`: how many ended allocations are kept.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct HistoryFile {
    allocations: Option<usize>,
}

impl HistoryFile {
    pub(super) fn limit(self) -> Result<HistoryLimit, BadSetting> {
        let allocations = self.allocations.unwrap_or(HISTORY_ALLOCATIONS_DEFAULT);
        let allowed = HISTORY_ALLOCATIONS_MIN..=HISTORY_ALLOCATIONS_MAX;
        let allocations = in_range("history.allocations", allocations, allowed)?;
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
pub(super) struct DecisionsFile {
    #[serde(rename = "maxMiB")]
    max_mib: Option<u64>,
    max_age_days: Option<u64>,
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
            limit.age_ms = in_range("decisions.maxAgeDays", days, 1..=DECISIONS_DAYS_MAX)? * 24 * 3_600_000;
        }
        Ok(Some(limit))
    }
}

/// `labels` in the file.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct LabelsFile {
    nfd_file: Option<PathBuf>,
    node: Option<bool>,
}

impl LabelsFile {
    pub(super) fn resolve(self, checks: &mut Checks) -> LabelSettings {
        const SETTING: &str = "labels.nfdFile";
        let node = self.node.unwrap_or(false);
        let nfd_file = self.nfd_file.map(|path| checks.plain_path(SETTING, path));
        if let Some(path) = &nfd_file {
            let shown = path.display().to_string();
            if !path.is_absolute() || path.file_name().is_none() {
                let rule = "the absolute path of a file, such as /etc/kubernetes/node-feature-discovery/features.d/berth";
                checks.add(bad(SETTING, &shown, rule));
            }
            if node {
                let rule = "only one of labels.nfdFile and labels.node: both write the same labels, and each \
                            would mistake the other for another writer";
                checks.add(bad(SETTING, &shown, rule));
            }
        }
        LabelSettings { nfd_file, node }
    }
}

/// `rounds`: see [`ReconcileTiming`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct RoundsFile {
    list_every_ms: Option<u64>,
    list_every_cordoned_ms: Option<u64>,
    round_every_ms: Option<u64>,
    checkpoint_wait_ms: Option<u64>,
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
pub(super) struct TimingFile {
    retire_ms: Option<u64>,
    named_ms: Option<u64>,
    rounds_apart_ms: Option<u64>,
    kubelet_settle_ms: Option<u64>,
    reply_settle_ms: Option<u64>,
    bypass_ms: Option<u64>,
    drained_ms: Option<u64>,
    evict_again_ms: Option<u64>,
    via_ms: Option<u64>,
}

impl TimingFile {
    pub(super) fn resolve(&self, defaults: &Timing) -> Timing {
        Timing {
            retire_ms: self.retire_ms.unwrap_or(defaults.retire_ms),
            allocate_grace_ms: self.named_ms.unwrap_or(defaults.allocate_grace_ms),
            passes_apart_ms: self.rounds_apart_ms.unwrap_or(defaults.passes_apart_ms),
            kubelet_settle_ms: self.kubelet_settle_ms.unwrap_or(defaults.kubelet_settle_ms),
            reply_settle_ms: self.reply_settle_ms.unwrap_or(defaults.reply_settle_ms),
            bypass_ms: self.bypass_ms.unwrap_or(defaults.bypass_ms),
            drained_ms: self.drained_ms.unwrap_or(defaults.drained_ms),
            evict_again_ms: self.evict_again_ms.unwrap_or(defaults.evict_again_ms),
            via_ms: self.via_ms.unwrap_or(defaults.via_ms),
            ..defaults.clone()
        }
    }
}

/// One entry of `stack`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
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

/// `permissions` of an entry; absent keys have defaults.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PermissionsConfig {
    deny: Option<bool>,
    share_max: Option<u32>,
    resources: Option<Vec<String>>,
    environment: Option<Vec<String>>,
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
            kubelet_root_dir: self.kubelet_root_dir.or(base.kubelet_root_dir),
            device_plugins_dir: self.device_plugins_dir.or(base.device_plugins_dir),
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
            cdi: self.cdi.or(base.cdi),
            container_runtime: self.container_runtime.or(base.container_runtime),
            guard: self.guard.or(base.guard),
            enforce: self.enforce.or(base.enforce),
            bypass: self.bypass.or(base.bypass),
            dra: self.dra.or(base.dra),
            fleet: self.fleet.or(base.fleet),
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

/// Checks the limits of a stack. Returns it with `binpack` first for NVIDIA's allocation policy `packed`, and without
/// it for `distributed`.
pub(super) fn resolve_stack(
    mut stack: Vec<StackEntryConfig>,
    allocation_policy: Option<&str>,
    checks: &mut Checks,
) -> Vec<StackEntryConfig> {
    checks.at_most("stack", stack.len(), STACK_ENTRIES_MAX, "entries");
    for (at, entry) in stack.iter().enumerate() {
        let bytes = serde_json::to_string(&entry.parameters).map_or(usize::MAX, |json| json.len());
        if bytes > PARAMETERS_BYTES_MAX {
            let size = format!("{bytes} bytes of JSON");
            let rule = format!("at most {PARAMETERS_BYTES_MAX} bytes");
            checks.add(bad(format!("stack[{at}].parameters"), &size, rule));
        }
    }
    let is_binpack = |entry: &StackEntryConfig| entry.policy == PACKED;
    match allocation_policy {
        Some("packed") if !stack.iter().any(is_binpack) => {
            stack.insert(0, StackEntryConfig { policy: PACKED.into(), ..StackEntryConfig::default() });
        }
        Some("distributed") => stack.retain(|entry| !is_binpack(entry)),
        _ => {}
    }
    stack
}
