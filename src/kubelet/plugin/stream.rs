//! The kubelet's stream after a registration: waits for its start and handles its end.

use super::{Plugin, Registration};
use crate::folder::FileId;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

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
pub(super) enum Loss {
    /// The kubelet's stream ended.
    StreamEnded,
    /// One of several streams that may be the kubelet's ended.
    OneOfSeveralEnded,
    /// kubelet.sock was replaced.
    KubeletChanged,
}

impl Plugin {
    /// Waits for the stream that follows a registration. A kubelet that exits meanwhile closes its
    /// connection. A replaced kubelet.sock alone is ignored: if a running kubelet replaced it, its stream is
    /// still to come, and a second Register would create a dead endpoint.
    pub(super) async fn wait_for_stream(&self) -> StreamStart {
        let mut streams = self.handler.streams.subscribe();
        let mut connections = self.handler.kubelet_connections.subscribe();
        tokio::select! {
            biased;
            opened = streams.wait_for(|n| *n > 0) => if opened.is_ok() { StreamStart::Opened } else { StreamStart::TimedOut },
            () = wait_for_zero(&mut connections) => StreamStart::Disconnected,
            () = sleep(self.settings.waits.watch_within) => StreamStart::TimedOut,
        }
    }

    /// Waits until one of the kubelet's streams ends or kubelet.sock is replaced. A removed kubelet.sock is
    /// ignored: the kubelet's stream stays open.
    pub(super) async fn wait_for_loss(&mut self, kubelet: FileId) -> Loss {
        let mut streams = self.handler.streams.subscribe();
        tokio::select! {
            biased;
            remaining = wait_for_decrease(&mut streams) => if remaining == 0 { Loss::StreamEnded } else { Loss::OneOfSeveralEnded },
            () = self.wait_until(|state| state.kubelet.is_ok_and(|id| id != kubelet)) => Loss::KubeletChanged,
        }
    }

    /// Handles the end of the kubelet's stream. Several ends soon after Register indicate another plugin for
    /// the same resource.
    pub(super) async fn handle_loss(&mut self, since: Instant) {
        let waits = self.settings.waits.clone();
        let kubelet = self.folder_state.borrow().kubelet.ok();
        if kubelet != self.contacted_kubelet || since.elapsed() >= waits.quick_loss {
            self.quick_losses = 0;
        } else {
            self.quick_losses += 1;
        }
        tracing::info!(resource = %self.handler.resource, "the kubelet's stream ended; registering again");
        if self.quick_losses < waits.quick_losses_max {
            return;
        }
        self.quick_losses = 0;
        self.publish(Registration::Contested);
        tracing::error!(
            resource = %self.handler.resource,
            "another device plugin registers {} too: the kubelet ended the stream {} times, each within {} s. Remove the \
             other plugin or rename the resource; trying again in {} s",
            self.handler.resource,
            waits.quick_losses_max,
            waits.quick_loss.as_secs(),
            waits.contested_pause.as_secs()
        );
        match kubelet {
            Some(kubelet) => {
                self.wait(kubelet, waits.contested_pause).await;
            }
            None => sleep(waits.connect_retry_max).await,
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
