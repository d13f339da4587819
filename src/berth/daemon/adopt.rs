//! Adoption of the devices that running pods hold, and the wait for the kubelet's checkpoint, which lists them.

use super::{Daemon, RETRY_INTERVAL};
use berth_admin::Step;

impl Daemon {
    /// Adopts the devices of running pods before the first registration, since a device in use must not be offered as free.
    pub(super) async fn adopt(&self, front: &berth_kubelet::Front) {
        let ledger = self.kernel().snapshot();
        // A store with allocations is more reliable than the checkpoint, which is then read only for devices that another
        // plugin granted meanwhile, without waiting for it.
        let is_required = ledger.live.is_empty() && ledger.ended.is_empty();
        if self.config.skip_adoption {
            tracing::warn!("running pods are not adopted (--skip-adoption)");
            return self.progress.set_adoption(Step::Done);
        }
        let mut is_logged = false;
        loop {
            match front.adopt().await {
                Ok(holdings) => {
                    tracing::info!(holdings, "adopted the devices of running pods");
                    return self.progress.set_adoption(Step::Done);
                }
                Err(error) if !is_required => {
                    tracing::warn!(
                        "the devices of running pods are not adopted: {:#}",
                        anyhow::Error::new(error)
                    );
                    return self.progress.set_adoption(Step::Done);
                }
                Err(error) => {
                    let message = format!("{:#}", anyhow::Error::new(error));
                    if !std::mem::replace(&mut is_logged, true) {
                        tracing::error!("{message}");
                    }
                    self.progress.set_adoption(Step::Waiting(message));
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }
}
