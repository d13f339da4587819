//! The stream that follows a registration: whether it comes, and what its end means.

use super::{Plugin, Registration};
use crate::folder::FileId;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// What follows a registration.
pub(super) enum Watched {
    /// The kubelet asks for the devices.
    Yes,
    /// It does not.
    Not,
    /// It closed the connection that it made when it registered us.
    Left,
}

/// Why a registration has to be made again.
pub(super) enum End {
    /// The kubelet's stream ended.
    Lost,
    /// One of several streams ended that were taken for the kubelet's: it may have been the kubelet's.
    OneOfSeveral,
    /// Another kubelet.sock is there.
    KubeletChanged,
}

impl Plugin {
    /// Waits for the stream that follows a registration. A kubelet that ends or restarts meanwhile
    /// closes its connection; another kubelet.sock alone means nothing yet, since a living kubelet
    /// that made it is about to ask, and a second Register would give it a dead endpoint.
    pub(super) async fn watched(&self) -> Watched {
        let mut streams = self.desk.streams.subscribe();
        let mut kubelets = self.desk.kubelets.subscribe();
        tokio::select! {
            biased;
            there = streams.wait_for(|n| *n > 0) => if there.is_ok() { Watched::Yes } else { Watched::Not },
            () = none_left(&mut kubelets) => Watched::Left,
            () = sleep(self.settings.waits.watch_within) => Watched::Not,
        }
    }

    /// Returns when a stream of the kubelet's has ended or another kubelet.sock is there. That there is
    /// none means nothing: the kubelet that watches goes on watching.
    pub(super) async fn watch_over(&mut self, kubelet: FileId) -> End {
        let mut streams = self.desk.streams.subscribe();
        tokio::select! {
            biased;
            left = one_fewer(&mut streams) => if left == 0 { End::Lost } else { End::OneOfSeveral },
            () = self.seen_until(|seen| seen.kubelet.is_ok_and(|id| id != kubelet)) => End::KubeletChanged,
        }
    }

    /// The kubelet left: soon after registering, again and again, means another plugin for the same
    /// resource.
    pub(super) async fn lost(&mut self, since: Instant) {
        let waits = self.settings.waits.clone();
        let kubelet = self.seen.borrow().kubelet.ok();
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

/// Returns when the count has become smaller: what is left.
async fn one_fewer(count: &mut watch::Receiver<usize>) -> usize {
    let mut most = *count.borrow_and_update();
    while most > 0 && count.changed().await.is_ok() {
        let now = *count.borrow_and_update();
        if now < most {
            return now;
        }
        most = now;
    }
    0
}

/// Returns when the count is 0.
pub(super) async fn none_left(count: &mut watch::Receiver<usize>) {
    // Its sender lives as long as the plugin.
    let _ = count.wait_for(|n| *n == 0).await;
}
