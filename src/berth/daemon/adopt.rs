//! Adoption of the devices that running pods hold, and the wait for the kubelet's checkpoint, which lists them.

use super::{Daemon, WAIT_AGAIN};
use berth_admin::Step;

impl Daemon {
    /// Takes over what pods hold before the first registration: a device that is in use must not be
    /// offered as free.
    pub(super) async fn adopt(&self, front: &berth_kubelet::Front) {
        let known = self.door().snapshot();
        // A store that knows of allocations is worth more than the checkpoint: that is asked only for
        // what another plugin granted meanwhile, and not waited for.
        let wait = known.live.is_empty() && known.ended.is_empty();
        if self.config.skip_adoption {
            tracing::warn!("running pods are not adopted (--skip-adoption)");
            return self.progress.adoption(Step::Done);
        }
        let mut said = false;
        loop {
            match front.adopt().await {
                Ok(holdings) => {
                    tracing::info!(holdings, "looked for what running pods hold");
                    return self.progress.adoption(Step::Done);
                }
                Err(error) if !wait => {
                    tracing::warn!("nothing is adopted: {:#}", anyhow::Error::new(error));
                    return self.progress.adoption(Step::Done);
                }
                Err(error) => {
                    let words = format!("{:#}", anyhow::Error::new(error));
                    if !std::mem::replace(&mut said, true) {
                        tracing::error!("{words}");
                    }
                    self.progress.adoption(Step::Waiting(words));
                    tokio::time::sleep(WAIT_AGAIN).await;
                }
            }
        }
    }
}
