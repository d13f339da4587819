//! Follows the configuration file while the daemon runs. A changed file is checked as a whole, as a start would check
//! it; then its settings are applied, or the file is refused and nothing changes.
//!
//! The daemon gets events of changes in the file's folder, and also compares the file's version at intervals, so that
//! it notices every kind of replacement, even on file systems without events. The kubelet updates a mounted ConfigMap
//! only about once a minute. After SIGHUP the daemon reads the file at once.

use super::{Base, Running};
use berth_api::{ConfigurationError, ConfigurationState, SettingEffect, SettingProblem, rfc3339};
use berth_checks::{policy_settings, test_stack};
use berth_config::{
    BadSetting, Config, ConfigError, Effect, Files, Reloaded, SettingChange, Versions, new_stack,
};
use berth_core::keeper::{CommandError, Snapshot};
use berth_core::{ActivateError, FileStack, Reconfiguration, next_beat};
use berth_files::FolderEvents;
use berth_files::yaml::{Problem, Problems};
use berth_http::check_files;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::refusal::Refusal;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::Signal;
use tokio::time::{Instant, sleep_until};

/// Time between two checks of a changed file. It is read once both found the same version, so that a file that is just
/// being written is not read half.
const SETTLE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the checks whether the file changed, without an event.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Interval of attempts to use a refused file: its cause may have passed, such as a policy that was uploaded since.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);
/// Most changes that a log line or the API lists.
const CHANGES_MAX: usize = 50;
/// Most attempts to apply a file while other stacks are activated.
const ATTEMPTS_MAX: u32 = 5;

/// Why the file is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trigger {
    Signal,
    Change,
    Retry,
}

/// A new configuration that passed the checks of a start.
struct Checked {
    reloaded: Reloaded,
    /// The file's stack, with the versions of its policies; or why it cannot be used, while a stack of the API is
    /// active.
    file_stack: FileStack,
}

/// Why a configuration was not applied.
enum NotApplied {
    /// It cannot be used.
    Invalid(Problems),
    /// The active stack changed after the test of this configuration, so the test is no longer valid.
    StackChanged,
}

impl Running {
    /// Reads the configuration again at each change of its file and at each SIGHUP, also one that came since `hangup`
    /// was created. Never returns.
    pub(super) async fn follow_configuration(&mut self, mut hangup: Signal) -> Infallible {
        let Some(files) = self.base.config.loaded.files.clone() else {
            loop {
                hangup.recv().await;
                tracing::info!("SIGHUP: there is no configuration file to read again (--config)");
            }
        };
        let mut seen = files.versions().clone();
        // The errors of the last attempt, if the file was refused.
        let mut last_refusal: Option<String> = None;
        let mut events = FolderEvents::new()
            .inspect_err(
                |error| tracing::warn!(%error, "cannot watch the configuration file; it is compared at intervals instead"),
            )
            .ok();
        loop {
            let retry_at = last_refusal.as_ref().map(|_| Instant::now() + RETRY_INTERVAL);
            let trigger = wait(&files, &mut seen, &mut hangup, retry_at, &mut events).await;
            let file = files.file().display();
            match self.reload().await {
                Ok(changes) => {
                    if trigger != Trigger::Retry || !changes.is_empty() || last_refusal.is_some() {
                        self.log_changes(&changes);
                    }
                    last_refusal = None;
                }
                Err(problems) => {
                    let text = one_line(&problems);
                    if trigger != Trigger::Retry || last_refusal.as_ref() != Some(&text) {
                        tracing::error!(
                            "the configuration {file} is refused, and the previous settings stay in use: {text}"
                        );
                    }
                    last_refusal = Some(text);
                    self.show_refused(&problems);
                }
            }
        }
    }

    /// Reads, checks and applies the configuration. Returns the differences to the settings that were in use.
    ///
    /// # Errors
    /// All errors of the file. Nothing has changed then.
    async fn reload(&mut self) -> Result<Vec<SettingChange>, Problems> {
        let (running, node) = (self.base.config.clone(), self.base.kernel().snapshot());
        let check = move || check(&running, &node);
        let Checked { reloaded: Reloaded { config, mut changes }, file_stack } =
            tokio::task::spawn_blocking(check).await.map_err(|error| file_error(error.to_string()))??;
        let mut attempts_left = ATTEMPTS_MAX;
        let active = loop {
            attempts_left -= 1;
            let active = self.base.kernel().snapshot();
            match self.apply_to_core(&config, &file_stack, &active).await {
                Ok(()) => break active,
                // Another stack was activated, or the API's was reset, while this file was tried.
                Err(NotApplied::StackChanged) if attempts_left > 0 => {}
                Err(NotApplied::StackChanged) => {
                    let what = "other stacks are activated at the same time; it is read again soon";
                    return Err(key_error(&config, "stack", what));
                }
                Err(NotApplied::Invalid(problems)) => return Err(problems),
            }
        };
        if !active.stack.is_of_file() {
            let of_stack = |change: &&mut SettingChange| change.key.starts_with("stack[");
            changes.iter_mut().filter(of_stack).for_each(|change| change.effect = Effect::Overridden);
        }
        if let Some(error) = &file_stack.error {
            tracing::error!("the stack of the configuration cannot be used: {error}");
        }
        self.parts.strategy.set(&config).await;
        self.parts.kubelet.set_timing(config.reconcile.clone());
        if config.health.scan_interval != self.base.config.health.scan_interval {
            self.parts.gpus.set_interval(config.health.scan_interval);
        }
        self.base.labels.set_sharing(
            config.offers.mig_strategy,
            config.containers.edits.mps_sockets().into_keys().collect(),
        );
        for notice in
            config.loaded.notices.iter().filter(|notice| !self.base.config.loaded.notices.contains(notice))
        {
            tracing::warn!("{notice}");
        }
        self.base.progress.update(|facts| {
            facts.mps = config.containers.edits.mps_sockets().into_keys().collect();
        });
        self.base.config = config;
        self.base.show_loaded(&changes);
        Ok(changes)
    }

    /// Tests the file's stack on the node with the new settings, in a separate policy runtime. While a stack of the API
    /// is active, the file's stack is not in use; it is tested when the API's stack is reset.
    async fn try_stack(
        &self,
        config: &Config,
        file_stack: &FileStack,
        active: &Snapshot,
    ) -> Result<(), Problems> {
        if !active.stack.is_of_file() {
            return Ok(());
        }
        let entries = &file_stack.entries;
        // Compiled by the daemon's own runtime, which then keeps the policies for the activation.
        let prepared = self.base.policies().prepare(entries.iter().map(|entry| &entry.digest)).await;
        let prepared = prepared.map_err(|error| key_error(config, "stack", &error.to_string()))?;
        let settings = berth_wasm::Settings {
            compiler: self.base.options.compiler.clone(),
            ..policy_settings(config, config.node.state_dir.clone())
        };
        let (node, now) = (self.base.kernel().snapshot(), self.base.kernel().now());
        let (config, entries) = (config.clone(), entries.clone());
        let test = move || {
            let _prepared = prepared;
            match test_stack(&config, entries, &node, now, settings) {
                Ok(problems) if problems.is_empty() => Ok(()),
                Ok(problems) => Err(problems),
                Err(error) => Err(key_error(&config, "stack", &format!("{error:#}"))),
            }
        };
        tokio::task::spawn_blocking(test).await.map_err(|error| file_error(error.to_string()))?
    }

    fn is_core_unchanged(&self, config: &Config, file_stack: &FileStack, active: &Snapshot) -> bool {
        let is_stack_unchanged = !active.stack.is_of_file() || active.stack.entries == file_stack.entries;
        is_stack_unchanged
            && *self.base.policies().file_stack() == *file_stack
            && config.rules == *active.rules
            && config.baseline() == *self.base.policies().baseline()
    }

    /// Tries the file's stack beside the one that is active, and replaces the rules, the baseline and the stack. The
    /// keeper gets the rules and the offers in one command, and held devices stay listed until they are free (I10).
    async fn apply_to_core(
        &self,
        config: &Config,
        file_stack: &FileStack,
        active: &Snapshot,
    ) -> Result<(), NotApplied> {
        if self.is_core_unchanged(config, file_stack, active) {
            return Ok(());
        }
        if let Some(error) = file_stack.error.as_ref().filter(|_| active.stack.is_of_file()) {
            // The API's stack was reset meanwhile, and the stack of this file cannot be used in its place.
            return Err(NotApplied::Invalid(key_error(config, "stack", error)));
        }
        self.try_stack(config, file_stack, active).await.map_err(NotApplied::Invalid)?;
        let is_replaced = active.stack.is_of_file() && active.stack.entries != file_stack.entries;
        let new = Reconfiguration {
            rules: config.rules.clone(),
            baseline: config.baseline(),
            file_stack: file_stack.clone(),
            stack: is_replaced.then(|| new_stack(file_stack.entries.clone())),
            revision: active.stack.revision,
        };
        let show = |config: &Config| {
            let (resource, mig) = (config.offers.resource.clone(), config.offers.mig_strategy);
            self.base.wasm.set_offers(resource, mig);
        };
        show(config);
        let Err(error) = self.base.policies().reconfigure(new).await else { return Ok(()) };
        show(&self.base.config);
        Err(match error {
            ActivateError::Command(CommandError::Refused(Refusal::StackChanged { .. })) => {
                NotApplied::StackChanged
            }
            error => NotApplied::Invalid(key_error(config, "stack", &error.to_string())),
        })
    }

    fn show_refused(&self, problems: &Problems) {
        let problems = problems.iter().map(|Problem { place, key, what }| SettingProblem {
            line: place.map(|place| place.line),
            key: (!key.is_empty()).then(|| key.clone()),
            message: what.clone(),
        });
        let at = rfc3339(self.base.kernel().now().wall_ms);
        let error = ConfigurationError { at, problems: problems.collect() };
        self.base.progress.update(|facts| {
            if let Some(configuration) = &mut facts.configuration {
                configuration.error = Some(error);
            }
        });
    }

    fn log_changes(&self, changes: &[SettingChange]) {
        let Some(files) = &self.base.config.loaded.files else { return };
        let file = files.file().display();
        let listed = |effect: Effect| {
            let lines = changes.iter().filter(|change| change.effect == effect).map(ToString::to_string);
            let lines: Vec<String> = lines.collect();
            let more = lines.len().saturating_sub(CHANGES_MAX);
            let shown = lines[..lines.len() - more].join("; ");
            if more > 0 { format!("{shown}; and {more} more") } else { shown }
        };
        if changes.is_empty() {
            tracing::info!("the configuration {file} was read again: no setting changed");
        }
        let (applied, waits) = (listed(Effect::Applied), listed(Effect::AfterRestart));
        if !applied.is_empty() {
            tracing::info!(
                "the configuration {file} was read again, and its changes are in effect: {applied}"
            );
        }
        if !waits.is_empty() {
            tracing::warn!(
                "changes of the configuration {file} need a restart of the daemon; until then the previous values stay in \
                 use: {waits}"
            );
        }
        let overridden = listed(Effect::Overridden);
        if !overridden.is_empty() {
            tracing::warn!(
                "changes of the configuration {file} have no effect, since a flag, a variable, a stack of the API (`berth \
                 policy reset` ends that) or the stack of the GPUNode takes precedence: {overridden}"
            );
        }
    }
}

impl Base {
    /// Shows the loaded configuration in the API: the changes of the last reload that changed a setting, and the
    /// settings that need a restart.
    pub(super) fn show_loaded(&self, changes: &[SettingChange]) {
        let Some(files) = &self.config.loaded.files else { return };
        let loaded_at = rfc3339(self.kernel().now().wall_ms);
        let listed = |waits: bool| {
            let is_listed = move |change: &&SettingChange| (change.effect == Effect::AfterRestart) == waits;
            changes.iter().filter(is_listed).take(CHANGES_MAX).map(to_api).collect::<Vec<_>>()
        };
        self.progress.update(|facts| {
            let before = facts.configuration.take().map(|before| before.changed).unwrap_or_default();
            let changed = listed(false);
            facts.configuration = Some(ConfigurationState {
                file: files.file().display().to_string(),
                loaded_at,
                changed: if changed.is_empty() { before } else { changed },
                needs_restart: listed(true),
                error: None,
            });
        });
    }
}

/// Waits until the files are to be read. `seen`: their versions when they were read last.
async fn wait(
    files: &Files,
    seen: &mut Versions,
    hangup: &mut Signal,
    retry_at: Option<Instant>,
    events: &mut Option<FolderEvents>,
) -> Trigger {
    let mut last = seen.clone();
    loop {
        if let Some(events) = events {
            let folders = files.folders();
            if let Err(error) = events.watch(folders.iter().map(PathBuf::as_path)) {
                tracing::debug!(%error, "a folder of the configuration cannot be watched");
            }
        }
        let present = files.present_versions();
        let is_changed = present != *seen;
        if is_changed && present == last {
            *seen = present;
            return Trigger::Change;
        }
        last = present;
        if retry_at.is_some_and(|at| Instant::now() >= at) {
            return Trigger::Retry;
        }
        let next = if is_changed { Instant::now() + SETTLE_INTERVAL } else { next_beat(POLL_INTERVAL) };
        let changed = async {
            match events {
                Some(events) if !is_changed => events.changed().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = hangup.recv() => {
                *seen = files.present_versions();
                return Trigger::Signal;
            }
            () = changed => {}
            () = sleep_until(retry_at.map_or(next, |at| at.min(next))) => {}
        }
    }
}

/// Reads the files and checks what a start would check, except calls of policies.
fn check(running: &Config, node: &Arc<Ledger>) -> Result<Checked, Problems> {
    let Some(files) = &running.loaded.files else {
        return Err(file_error("there is no configuration file"));
    };
    let (new, mut problems) = Config::read_again(files).map_err(|error| match error {
        ConfigError::Wrong { problems, .. } => problems,
        error => file_error(format!("{:#}", anyhow::Error::new(error))),
    })?;
    let Some(new) = new else { return Err(problems) };
    if let Err(error) = new.gpus.source.check() {
        problems.push(new.locate(BadSetting::new("gpus", error.to_string())));
    }
    for (key, error) in check_files(&new.admin.token_file, &new.admin.access) {
        problems.push(new.locate(BadSetting::new(key, format!("{:#}", anyhow::Error::new(error)))));
    }
    let reloaded = running.reloaded(new);
    let mut file_stack = FileStack::default();
    match reloaded.config.resolve_stack(node) {
        Ok(entries) => file_stack.entries = entries,
        // As at a start: the active stack does not come from this file, so the rest of it is applied.
        Err(of_stack) if !node.stack.is_of_file() => file_stack.error = Some(of_stack.to_string()),
        Err(of_stack) => of_stack.iter().for_each(|problem| problems.push(problem.clone())),
    }
    if problems.is_empty() { Ok(Checked { reloaded, file_stack }) } else { Err(problems) }
}

/// An error of the file as a whole.
fn file_error(what: impl Into<String>) -> Problems {
    Problems::from_iter([Problem { place: None, key: String::new(), what: what.into() }])
}

/// An error of this key, with its line.
fn key_error(config: &Config, key: &str, what: &str) -> Problems {
    Problems::from_iter([config.locate(BadSetting::new(key, what))])
}

fn one_line(problems: &Problems) -> String {
    let lines: Vec<String> = problems.iter().map(ToString::to_string).collect();
    match lines.as_slice() {
        [one] => one.clone(),
        all => format!("{} errors: {}", all.len(), all.join("; ")),
    }
}

fn to_api(change: &SettingChange) -> berth_api::SettingChange {
    let SettingChange { key, from, to, effect } = change.clone();
    let effect = match effect {
        Effect::Applied => SettingEffect::Applied,
        Effect::AfterRestart => SettingEffect::AfterRestart,
        Effect::Overridden => SettingEffect::Overridden,
    };
    berth_api::SettingChange { key, from, to, effect }
}
