//! The kubelet's stream after a registration: waits for its start and handles its end.

use super::{Plugin, Registration, WaitOutcome};
use crate::folder::FileId;
use crate::rival::Search;
use crate::socket::Socket;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// How the wait for the stream after a registration ended.
pub(super) enum StreamStart {
    /// The kubelet opened the stream.
    Opened,
    /// The kubelet did not open a stream in time.
    TimedOut,
    /// The kubelet closed the connection that it opened during Register.
    Disconnected,
}

/// Why the plugin has to register again.
#[derive(Clone, Copy, Debug, thiserror::Error)]
pub(super) enum Loss {
    /// The kubelet's stream ended.
    #[error("the kubelet's stream ended")]
    StreamEnded,
    /// One of several streams that may be the kubelet's ended.
    #[error("one of several streams ended, and it may have been the kubelet's")]
    OneOfSeveralEnded,
    /// kubelet.sock was replaced.
    #[error("kubelet.sock was replaced")]
    KubeletChanged,
    /// The plugin's socket was removed or replaced, and kubelet.sock was not.
    #[error("the device plugin's socket was removed")]
    SocketGone,
}

impl Plugin {
    /// Waits for the stream that follows a registration. A kubelet that exits meanwhile closes its
    /// connection. A replaced kubelet.sock alone is ignored: if a running kubelet replaced it, its stream is
    /// still to come, and a second Register would create a dead endpoint.
    pub(super) async fn wait_for_stream(&self) -> StreamStart {
        let mut streams = self.handler.device_list.streams.subscribe();
        let mut connections = self.handler.kubelet_connections.subscribe();
        tokio::select! {
            biased;
            opened = streams.wait_for(|n| *n > 0) => if opened.is_ok() { StreamStart::Opened } else { StreamStart::TimedOut },
            () = wait_for_zero(&mut connections) => StreamStart::Disconnected,
            () = sleep(self.settings.timeouts.registration.watch_within) => StreamStart::TimedOut,
        }
    }

    /// Waits until one of the kubelet's streams ends, or kubelet.sock or the plugin's socket is replaced. A removed
    /// kubelet.sock is ignored: the kubelet's stream stays open.
    pub(super) async fn wait_for_loss(&mut self, kubelet: FileId) -> Loss {
        let mut streams = self.handler.device_list.streams.subscribe();
        tokio::select! {
            biased;
            remaining = wait_for_decrease(&mut streams) => if remaining == 0 { Loss::StreamEnded } else { Loss::OneOfSeveralEnded },
            loss = self.wait_for_folder_loss(kubelet) => loss,
        }
    }

    async fn wait_for_folder_loss(&mut self, kubelet: FileId) -> Loss {
        loop {
            if self.folder_state.borrow_and_update().kubelet.is_ok_and(|id| id != kubelet) {
                return Loss::KubeletChanged;
            }
            if !self.is_served() {
                // A kubelet that creates its socket again deletes all others just before.
                let settle = self.settings.timeouts.disconnect.settle;
                let replaced = self.wait_until(|state| state.kubelet.is_ok_and(|id| id != kubelet));
                if timeout(settle, replaced).await.is_ok() {
                    return Loss::KubeletChanged;
                }
                if !self.is_served() {
                    return Loss::SocketGone;
                }
            }
            if self.folder_state.changed().await.is_err() {
                // The folder's watcher has ended, so this plugin is being stopped.
                std::future::pending::<()>().await;
            }
        }
    }

    pub(super) fn is_served(&self) -> bool {
        self.socket.as_ref().is_some_and(Socket::is_in_place)
    }

    /// Handles the end of the kubelet's stream. Several ends soon after Register need a cause, which may be another
    /// plugin for the same resource.
    pub(super) async fn handle_loss(&mut self, since: Instant) {
        let timeouts = self.settings.timeouts.loss;
        let kubelet = self.folder_state.borrow().kubelet.ok();
        if kubelet != self.contacted_kubelet || since.elapsed() >= timeouts.quick_loss {
            self.quick_losses = 0;
        } else {
            self.quick_losses += 1;
        }
        self.register_again(&Loss::StreamEnded.to_string());
        let Some(kubelet) = kubelet.filter(|_| self.quick_losses >= timeouts.quick_losses_max) else {
            return;
        };
        let losses = std::mem::take(&mut self.quick_losses);
        if let Some(evidence) = self.search(Search::evidence).await {
            return self.wait_while_contested(kubelet, evidence).await;
        }
        let others = self.search(|search| Some(search.other_plugins())).await.unwrap_or_default().join(", ");
        let others =
            if others.is_empty() { String::new() } else { format!(" other device plugins: {others};") };
        let cause = format!(
            "the kubelet ended the stream {losses} times, each within {} s of the registration, and nothing on the node \
             shows why;{others} its log has the cause (journalctl -u kubelet); registering again in {} s",
            timeouts.quick_loss.as_secs(),
            timeouts.unexplained_pause.as_secs()
        );
        tracing::warn!(resource = %self.handler.resource, "{cause}");
        self.set_cause(cause);
        self.wait(kubelet, timeouts.unexplained_pause).await;
    }

    /// Searches the folder for other plugins; `None` if nothing is found.
    async fn search<T: Send + 'static>(
        &self,
        find: impl FnOnce(&Search) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        let listed = Arc::clone(&self.handler.device_list.devices.borrow());
        let search = Search {
            folder: self.settings.device_plugins.clone(),
            resource: self.handler.resource.clone(),
            listed: listed.iter().map(|device| device.id.clone()).collect(),
            registered_wall_ms: self.registered_wall_ms,
        };
        // Reads files, so not on a thread that answers the kubelet.
        tokio::task::spawn_blocking(move || find(&search)).await.ok().flatten()
    }

    /// Publishes what shows another plugin, and waits until nothing shows one any more, kubelet.sock is replaced, or
    /// the longest pause has passed.
    pub(super) async fn wait_while_contested(&mut self, kubelet: FileId, evidence: String) {
        let timeouts = self.settings.timeouts.loss;
        let end = Instant::now() + timeouts.contested_pause;
        let remedy = "stop it, or rename the resource (docs/changeover.md)";
        tracing::error!(
            resource = %self.handler.resource,
            "another device plugin serves this resource: {evidence}; {remedy}"
        );
        self.last_cause = Some(format!("another device plugin served it: {evidence}"));
        let mut evidence = Some(evidence);
        while let Some(shown) = evidence
            && Instant::now() < end
        {
            let evidence_text = format!("another device plugin serves this resource: {shown}; {remedy}");
            self.publish(Registration::Contested { evidence: evidence_text });
            if matches!(self.wait(kubelet, timeouts.contested_check).await, WaitOutcome::KubeletChanged) {
                return;
            }
            evidence = self.other_evidence().await;
        }
        tracing::info!(resource = %self.handler.resource, "registering again");
    }

    /// What shows another plugin at present.
    async fn other_evidence(&self) -> Option<String> {
        let server = if self.is_served() { None } else { self.other_server() };
        match server {
            Some(server) => Some(server),
            None => self.search(Search::evidence).await,
        }
    }
}

/// Waits until the count decreases, and returns it.
async fn wait_for_decrease(count: &mut watch::Receiver<usize>) -> usize {
    let mut last = *count.borrow_and_update();
    while last > 0 && count.changed().await.is_ok() {
        let now = *count.borrow_and_update();
        if now < last {
            return now;
        }
        last = now;
    }
    0
}

/// Waits until the count is 0.
pub(super) async fn wait_for_zero(count: &mut watch::Receiver<usize>) {
    // The handler owns the sender, so this fails only when the plugin is dropped.
    let _ = count.wait_for(|n| *n == 0).await;
}
