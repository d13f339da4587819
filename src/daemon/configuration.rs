//! The file that a label of the node chose, and the moment at which the label chooses another one.

use super::Daemon;
use crate::cluster::{FollowedLabel, words};
use crate::config::{Chosen, Config};
use tokio::sync::watch;

/// The chosen file, and the label's value as it changes.
#[derive(Clone)]
pub(super) struct Configuration {
    chosen: Chosen,
    value: watch::Sender<Option<String>>,
}

impl Configuration {
    /// `None` where no label chooses.
    pub(super) fn of(config: &Config) -> Option<Self> {
        let chosen = config.chosen.clone()?;
        tracing::info!("the configuration is {}, by the node label {}", chosen.shown(), chosen.choice.label);
        let value = watch::Sender::new(chosen.label.clone());
        Some(Self { chosen, value })
    }

    /// For the room that follows the label.
    pub(super) fn followed(&self) -> FollowedLabel {
        FollowedLabel { key: self.chosen.choice.label.clone(), value: self.value.clone() }
    }

    /// Returns once the label chooses another file that can be used. One that cannot be used changes nothing: the
    /// node keeps the configuration that it has.
    pub(super) async fn changed(self) {
        let Self { chosen, value } = self;
        let (key, before) = (&chosen.choice.label, chosen.shown());
        let (mut value, mut seen) = (value.subscribe(), chosen.label.clone());
        while let Ok(now) = value.wait_for(|now| *now != seen).await.map(|now| now.clone()) {
            seen.clone_from(&now);
            let choose = chosen.clone();
            match tokio::task::spawn_blocking(move || choose.another(now.as_deref())).await {
                Ok(Ok(Some(other))) => {
                    let now = other.shown();
                    tracing::info!(
                        "the node label {key} changed: starting again with the configuration {now} in place of {before}"
                    );
                    return;
                }
                Ok(Ok(None)) => {
                    tracing::info!("the node label {key} changed, and chooses {before} as before");
                }
                Ok(Err(error)) => {
                    let why = words(&error);
                    tracing::warn!(
                        "the node label {key} changed, and the configuration stays {before}: {why}"
                    );
                }
                Err(error) => tracing::error!(%error, "choosing the configuration failed"),
            }
        }
        // The daemon stops.
        std::future::pending::<()>().await;
    }
}

impl Daemon {
    /// Returns once a label of the node chooses another configuration; never where none does. Borrows nothing.
    pub(super) fn reconfigured(&self) -> impl Future<Output = ()> + use<> {
        let configuration = self.configuration.clone();
        async {
            match configuration {
                Some(configuration) => configuration.changed().await,
                None => std::future::pending().await,
            }
        }
    }
}
