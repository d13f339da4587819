//! Detects that the node's label selects another configuration file.

use anyhow::Context;
use berth_checks::{policy_settings, start_stack, test_stack};
use berth_cluster::WatchedLabel;
use berth_config::{Chosen, Config};
use berth_core::PolicyService;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// Interval of attempts to use the selected file: the kubelet may mount a ConfigMap's new file up to a minute after it
/// was written, and the label may select it earlier.
const RETRY_INTERVAL: Duration = Duration::from_secs(30);

/// The selected file, and the label's current value.
#[derive(Clone)]
pub(super) struct Configuration {
    chosen: Chosen,
    value: watch::Sender<Option<String>>,
    /// See [`RETRY_INTERVAL`].
    retry_interval: Duration,
}

impl Configuration {
    /// `None` if the configuration was not selected by a label.
    pub(super) fn new(config: &Config) -> Option<Self> {
        let chosen = config.loaded.chosen.clone()?;
        let (name, label) = (chosen.shown(), &chosen.choice.key);
        tracing::info!("using the configuration {name} (selected by the node label {label})");
        let value = watch::Sender::new(chosen.value.clone());
        Some(Self { chosen, value, retry_interval: RETRY_INTERVAL })
    }

    /// The label for `berth_cluster` to watch.
    pub(super) fn watched_label(&self) -> WatchedLabel {
        WatchedLabel { key: self.chosen.choice.key.clone(), value: self.value.clone() }
    }

    /// Returns once the label selects another configuration with which a start on this node would succeed.
    pub(super) async fn changed(self, policies: PolicyService, folder: PathBuf, compiler: PathBuf) {
        let chosen = self.chosen.clone();
        let select = async |label| select_other(&chosen, label, &policies, &folder, &compiler).await;
        self.wait_for_change(select).await;
    }

    /// Returns once the label selects another usable file. The daemon keeps its configuration while the selected file
    /// is not usable.
    ///
    /// `select` returns the name of the file that a value of the label selects, if it is another one and usable.
    async fn wait_for_change(self, select: impl AsyncFn(Option<String>) -> anyhow::Result<Option<String>>) {
        let Self { chosen, value, retry_interval } = self;
        let (key, current) = (&chosen.choice.key, chosen.shown());
        let (mut value, mut seen) = (value.subscribe(), chosen.value.clone());
        // Why the selected file is not usable.
        let mut last_error: Option<String> = None;
        loop {
            let limit = if last_error.is_some() { retry_interval } else { Duration::MAX };
            let change = async { value.wait_for(|new| *new != seen).await.map(|new| new.clone()) };
            match timeout(limit, change).await {
                Ok(Ok(new)) => (seen, last_error) = (new, None),
                // The daemon stops.
                Ok(Err(_)) => break,
                Err(_) => {}
            }
            match select(seen.clone()).await {
                Ok(Some(name)) => {
                    tracing::info!(
                        "the node label {key} changed: starting again with the configuration {name} in place of {current}"
                    );
                    return;
                }
                Ok(None) => {
                    tracing::info!("the node label {key} changed but still selects {current}");
                    last_error = None;
                }
                Err(error) => {
                    let cause = Some(format!("{error:#}"));
                    if last_error != cause {
                        let (cause, every) = (cause.as_deref().unwrap_or_default(), retry_interval.as_secs());
                        tracing::warn!(
                            "the node label {key} changed, but no usable configuration is selected; keeping {current}: {cause}; trying again \
                              every {every} s"
                        );
                    }
                    last_error = cause;
                }
            }
        }
        std::future::pending::<()>().await;
    }
}

/// The name of the file that this value of the label selects, if it is another one. Tests that a start with it would
/// succeed, since the daemon stops for it.
async fn select_other(
    chosen: &Chosen,
    label: Option<String>,
    policies: &PolicyService,
    folder: &Path,
    compiler: &Path,
) -> anyhow::Result<Option<String>> {
    let (chosen, node) = (chosen.clone(), policies.kernel().snapshot());
    let read = move || {
        let Some(other) = chosen.changed_for(label.as_deref())? else { return Ok(None) };
        let entries = start_stack(&other, &node).with_context(|| unusable_text(&other))?;
        anyhow::Ok(Some((other, entries)))
    };
    let read = tokio::task::spawn_blocking(read).await.context("selecting the configuration failed")??;
    let Some((other, entries)) = read else { return Ok(None) };
    // Prepared by the daemon, so that compiled policies are kept for the next attempt and for the start.
    let prepared = policies.prepare(entries.iter().map(|entry| &entry.digest)).await;
    let prepared = prepared.with_context(|| unusable_text(&other))?;
    let settings =
        berth_wasm::Settings { compiler: compiler.to_owned(), ..policy_settings(&other, folder.to_owned()) };
    let (node, now) = (policies.kernel().snapshot(), policies.kernel().now());
    let test = move || {
        let _prepared = prepared;
        let tested = test_stack(&other, entries, &node, now, settings).and_then(|problems| {
            if problems.is_empty() { Ok(()) } else { Err(anyhow::Error::new(problems)) }
        });
        tested.with_context(|| unusable_text(&other))?;
        Ok(Some(name(&other).to_owned()))
    };
    let tested = tokio::task::spawn_blocking(test).await.context("selecting the configuration failed");
    policies.unload_unused();
    tested?
}

fn unusable_text(other: &Config) -> String {
    format!("the configuration {} cannot be used", name(other))
}

fn name(config: &Config) -> &str {
    config.loaded.chosen.as_ref().map_or("none", Chosen::shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_config::{Choice, ChoiceArgs, ServeArgs};

    #[tokio::test]
    async fn a_file_that_is_created_after_its_label_is_selected() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(folder.path().join(name), "gpus: sim:1xt4\n").unwrap();
        write("default");
        let args = ChoiceArgs { config_dir: Some(folder.path().into()), ..ChoiceArgs::default() };
        let config =
            Config::load_chosen(&ServeArgs::default(), Choice::from_args(&args).unwrap(), None).unwrap();
        let retry_interval = Duration::from_millis(10);
        let configuration = Configuration { retry_interval, ..Configuration::new(&config).unwrap() };
        let value = configuration.watched_label().value;
        let chosen = config.loaded.chosen.clone().unwrap();
        let select = async move |label: Option<String>| {
            let other = chosen.changed_for(label.as_deref())?.and_then(|other| other.loaded.chosen);
            Ok(other.map(|other| other.shown().to_owned()))
        };
        let changed = tokio::spawn(configuration.wait_for_change(select));
        value.send_replace(Some("later".into()));
        tokio::time::sleep(retry_interval * 5).await;
        assert!(!changed.is_finished(), "the file does not exist yet");
        write("later");
        tokio::time::timeout(Duration::from_secs(60), changed).await.unwrap().unwrap();
    }
}
