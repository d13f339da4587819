//! The stream that follows a registration: whether it comes, and what its end means.

use super::{Plugin, Registration, Turn};
use crate::kubelet::folder::{FileId, Seen};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// What follows a registration.
pub(super) enum Watched {
    /// The kubelet asks for the devices.
    Yes,
    /// It does not.
    Not,
    /// Another kubelet.sock, or none, is there now.
    KubeletChanged,
}

impl Plugin {
    /// Waits for the stream that follows a registration.
    pub(super) async fn watched(&mut self, kubelet: FileId, within: Duration) -> Watched {
        let mut streams = self.desk.streams.subscribe();
        tokio::select! {
            biased;
            there = streams.wait_for(|n| *n > 0) => if there.is_ok() { Watched::Yes } else { Watched::Not },
            turn = self.wait(kubelet, within) => match turn {
                Turn::KubeletChanged => Watched::KubeletChanged,
                Turn::Done => Watched::Not,
            },
        }
    }

    /// The kubelet that took the registration has ended, or it made its socket anew and is about to ask:
    /// to that one, two registrations at once would be poison.
    pub(super) async fn asked_behind_a_new_socket(&mut self) -> bool {
        let mut streams = self.desk.streams.subscribe();
        let asked = timeout(self.settings.waits.settle, streams.wait_for(|n| *n > 0)).await;
        let asked = matches!(asked, Ok(Ok(_)));
        if asked {
            self.known_to = self.seen.borrow().kubelet;
        }
        asked
    }

    /// Returns when the last stream has ended. A new kubelet.sock alone means nothing: a living
    /// kubelet may make its socket anew and keep its clients.
    pub(super) async fn watch_over(&mut self) {
        let mut streams = self.desk.streams.subscribe();
        let mut seen = self.seen.clone();
        loop {
            let now = tokio::select! {
                () = none_left(&mut streams) => return,
                now = next_kubelet(&mut seen) => now,
            };
            if now.is_some() && now != self.known_to && self.streams() > 0 {
                self.outlived(now).await;
            }
        }
    }

    /// The socket is another one while our stream lives. If it still lives after the time that
    /// the end of a process takes to reach us, it is the same kubelet behind a new socket.
    async fn outlived(&mut self, now: Option<FileId>) {
        let mut streams = self.desk.streams.subscribe();
        let ended = none_left(&mut streams);
        if timeout(self.settings.waits.settle, ended).await.is_err() {
            self.known_to = now;
            tracing::info!(
                resource = %self.desk.resource,
                "the kubelet made its socket anew and keeps watching"
            );
        }
    }

    /// The stream is gone: soon after registering, again and again, means a rival.
    pub(super) async fn lost(&mut self, since: Instant) {
        let waits = self.settings.waits.clone();
        let kubelet = self.seen.borrow().kubelet;
        if kubelet != self.known_to || since.elapsed() >= waits.quick_loss {
            self.quick_losses = 0;
        } else {
            self.quick_losses += 1;
        }
        tracing::info!(resource = %self.desk.resource, "the kubelet's stream ended; registering again");
        if self.quick_losses < waits.quick_losses_max {
            return;
        }
        self.quick_losses = 0;
        self.turn(Registration::Contested);
        tracing::error!(
            resource = %self.desk.resource,
            "another device plugin registers {} too: the kubelet dropped us {} times, each within {} s. Remove the other plugin or rename the resource; trying again in {} s",
            self.desk.resource,
            waits.quick_losses_max,
            waits.quick_loss.as_secs(),
            waits.foreign_pause.as_secs()
        );
        match kubelet {
            Some(kubelet) => {
                self.wait(kubelet, waits.foreign_pause).await;
            }
            None => sleep(waits.dial_again).await,
        }
    }
}

/// Returns when the count is at nought.
async fn none_left(count: &mut watch::Receiver<usize>) {
    // Its sender lives as long as the plugin.
    let _ = count.wait_for(|n| *n == 0).await;
}

/// The kubelet.sock of the next look that differs from the last one.
async fn next_kubelet(seen: &mut watch::Receiver<Seen>) -> Option<FileId> {
    if seen.changed().await.is_err() {
        // The folder's watcher is gone, so we are being stopped.
        std::future::pending::<()>().await;
    }
    seen.borrow_and_update().kubelet
}
