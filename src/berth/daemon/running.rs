//! A daemon that is up.

use super::{Base, Options, Starting};
use berth_config::Config;
use berth_core::{GpuWatch, KernelHandle};
use berth_strategy::StrategySettings;
use std::net::SocketAddr;

/// A daemon that is up.
pub struct Running {
    pub(super) base: Base,
    pub(super) parts: Parts,
}

/// What only a daemon that is up has. Dropping it stops it without waiting.
pub(super) struct Parts {
    pub(super) admin: berth_http::RunningServer,
    pub(super) gpus: GpuWatch,
    /// Sends settings to the task that decides how GPUs are passed to containers.
    pub(super) strategy: StrategySettings,
    pub(super) cluster: berth_cluster::ClusterTasks,
    pub(super) kubelet: berth_kubelet::RunningPlugins,
    pub(super) driver: Option<berth_kubelet::dra::RunningDriver>,
}

impl Running {
    /// Starts a daemon that no signal interrupts.
    ///
    /// # Errors
    /// As for [`Starting::open`] and [`Starting::bring_up`].
    pub async fn start(config: Config, options: Options) -> anyhow::Result<Self> {
        Box::pin(Starting::open(config, options)).await?.bring_up_uninterrupted().await
    }

    /// The handle of the kernel.
    #[must_use]
    pub fn kernel(&self) -> &KernelHandle {
        self.base.kernel()
    }

    /// The address of the admin API.
    #[must_use]
    pub fn admin_address(&self) -> SocketAddr {
        self.base.admin_address
    }

    /// Stops the tasks, the GPU threads and the client of the API server, then the device plugin, the DRA driver and the
    /// admin API together, then the threads of the ledger. Returns after [`Options::stop_max`] at the latest, even if steps
    /// remain.
    pub async fn stop(self) {
        let Parts { admin, gpus, strategy: _, cluster, kubelet, driver } = self.parts;
        let fronts = async {
            drop((gpus, cluster));
            let admin = tokio::task::spawn_blocking(move || admin.stop());
            let driver = async {
                if let Some(driver) = driver {
                    driver.stop().await;
                }
            };
            let _ = tokio::join!(kubelet.stop(), driver, admin);
        };
        Box::pin(self.base.stop(fronts)).await;
    }
}
