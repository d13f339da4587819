//! The file that a label of the node chose, and the moment at which the label chooses another one.

use super::rehearsal::{stack_of_start, try_stack};
use super::{Daemon, setup};
use crate::config::{Chosen, Config};
use anyhow::Context;
use berth_cluster::WatchedLabel;
use berth_core::admission::Door;
use std::path::Path;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::timeout;

/// A file that cannot be used is tried again after this long: the kubelet brings a ConfigMap's new file into the pod up
/// to a minute after it was written, and the label may name it before.
const TRY_AGAIN: Duration = Duration::from_secs(30);

/// The chosen file, and the label's value as it changes.
#[derive(Clone)]
pub(super) struct Configuration {
    chosen: Chosen,
    value: watch::Sender<Option<String>>,
    /// See [`TRY_AGAIN`].
    again: Duration,
}

impl Configuration {
    /// `None` where no label chooses.
    pub(super) fn of(config: &Config) -> Option<Self> {
        let chosen = config.chosen.clone()?;
        let (name, label) = (chosen.shown(), &chosen.choice.label);
        tracing::info!("using the configuration {name} (selected by the node label {label})");
        let value = watch::Sender::new(chosen.label.clone());
        Some(Self { chosen, value, again: TRY_AGAIN })
    }

    /// For the module that watches the label.
    pub(super) fn followed(&self) -> WatchedLabel {
        WatchedLabel { key: self.chosen.choice.label.clone(), value: self.value.clone() }
    }

    /// Returns once the label chooses another file that can be used. One that cannot be used changes nothing: the
    /// node keeps the configuration that it has, until the file can be used or the label chooses another.
    ///
    /// `choose` answers the name of the file that a value of the label chooses, if it is another one and can be used.
    async fn changed(self, choose: impl AsyncFn(Option<String>) -> anyhow::Result<Option<String>>) {
        let Self { chosen, value, again } = self;
        let (key, before) = (&chosen.choice.label, chosen.shown());
        let (mut value, mut seen) = (value.subscribe(), chosen.label.clone());
        // Why the file of the label as it was seen last cannot be used.
        let mut last_error: Option<String> = None;
        loop {
            let longest = if last_error.is_some() { again } else { Duration::MAX };
            let changed = async { value.wait_for(|now| *now != seen).await.map(|now| now.clone()) };
            match timeout(longest, changed).await {
                Ok(Ok(now)) => (seen, last_error) = (now, None),
                // The daemon stops.
                Ok(Err(_)) => break,
                Err(_) => {}
            }
            match choose(seen.clone()).await {
                Ok(Some(now)) => {
                    tracing::info!(
                        "the node label {key} changed: starting again with the configuration {now} in place of {before}"
                    );
                    return;
                }
                Ok(None) => {
                    tracing::info!("the node label {key} changed but still selects {before}");
                    last_error = None;
                }
                Err(error) => {
                    let why = Some(format!("{error:#}"));
                    if last_error != why {
                        let (why, every) = (why.as_deref().unwrap_or_default(), again.as_secs());
                        tracing::warn!(
                            "the node label {key} changed, but no usable configuration is selected; keeping {before}: {why}; trying again \
                              every {every} s"
                        );
                    }
                    last_error = why;
                }
            }
        }
        std::future::pending::<()>().await;
    }
}

impl Daemon {
    /// Returns once a label of the node chooses another configuration; never where none does. Borrows nothing.
    pub(super) fn reconfigured(&self) -> impl Future<Output = ()> + use<> {
        let (configuration, door) = (self.configuration.clone(), self.door().clone());
        let (folder, compiler) = (self.config.state_dir.clone(), self.options.compiler.clone());
        async move {
            let Some(configuration) = configuration else { return std::future::pending().await };
            let chosen = configuration.chosen.clone();
            configuration
                .changed(async |label| another(&chosen, label, &door, &folder, &compiler).await)
                .await;
        }
    }
}

/// The name of the file that this value of the label chooses, if it is another one, with which a start would go well:
/// the daemon ends itself for it, and a start that failed would leave the node without one.
async fn another(
    chosen: &Chosen,
    label: Option<String>,
    door: &Door,
    folder: &Path,
    compiler: &Path,
) -> anyhow::Result<Option<String>> {
    let (chosen, node) = (chosen.clone(), door.snapshot());
    let read = move || {
        let Some(other) = chosen.changed_for(label.as_deref())? else { return Ok(None) };
        let entries = stack_of_start(&other, &node).with_context(|| unusable(&other))?;
        anyhow::Ok(Some((other, entries)))
    };
    let read = tokio::task::spawn_blocking(read).await.context("choosing the configuration failed")??;
    let Some((other, entries)) = read else { return Ok(None) };
    // Here, so that what must be compiled is on the record, for the next try and for the start.
    let prepared = door.prepare(entries.iter().map(|entry| &entry.digest)).await;
    let prepared = prepared.with_context(|| unusable(&other))?;
    let settings =
        berth_wasm::Settings { compiler: compiler.to_owned(), ..setup::policies(&other, folder.to_owned()) };
    let (node, now) = (door.snapshot(), door.now());
    let ask = move || {
        let _prepared = prepared;
        try_stack(&other, entries, &node, now, settings).with_context(|| unusable(&other))?;
        Ok(Some(name(&other).to_owned()))
    };
    let asked = tokio::task::spawn_blocking(ask).await.context("choosing the configuration failed");
    door.rest();
    asked?
}

fn unusable(other: &Config) -> String {
    format!("the configuration {} cannot be used", name(other))
}

fn name(config: &Config) -> &str {
    config.chosen.as_ref().map_or("none", Chosen::shown)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Choice, ChoiceArgs, ServeArgs};

    #[tokio::test]
    async fn a_file_that_comes_after_its_label_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str| std::fs::write(folder.path().join(name), "gpus: sim:1xt4\n").unwrap();
        write("default");
        let args = ChoiceArgs { config_dir: Some(folder.path().into()), ..ChoiceArgs::default() };
        let config = Config::load_chosen(&ServeArgs::default(), Choice::of(&args).unwrap(), None).unwrap();
        let again = Duration::from_millis(10);
        let configuration = Configuration { again, ..Configuration::of(&config).unwrap() };
        let value = configuration.followed().value;
        let chosen = config.chosen.clone().unwrap();
        let choose = async move |label: Option<String>| {
            let other = chosen.changed_for(label.as_deref())?.and_then(|other| other.chosen);
            Ok(other.map(|other| other.shown().to_owned()))
        };
        let changed = tokio::spawn(configuration.changed(choose));
        value.send_replace(Some("later".into()));
        tokio::time::sleep(again * 5).await;
        assert!(!changed.is_finished(), "there is no such file yet");
        write("later");
        tokio::time::timeout(Duration::from_secs(60), changed).await.unwrap().unwrap();
    }
}
