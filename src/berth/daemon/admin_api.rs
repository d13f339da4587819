//! Starts the threads of the admin API once the kubelet has the node's resources, since the registration does not need
//! them, or once that takes long.

use super::progress::Progress;
use anyhow::Context as _;
use berth_core::Core;
use berth_core::transition_stream::Batches;
use berth_http::RunningServer;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The longest delay of the start of the API's threads. Connections wait in the system's queue meanwhile.
pub(super) const DELAY_MAX: Duration = Duration::from_millis(100);

/// The API until its threads run. Dropping it stops it.
pub(super) struct StartingApi {
    pub(super) address: SocketAddr,
    /// Ends the delay.
    pub(super) start_now: Arc<Notify>,
    /// One task.
    starting: JoinSet<anyhow::Result<RunningServer>>,
}

impl StartingApi {
    /// Starts the API after its delay.
    ///
    /// # Errors
    /// If the system does not know its address.
    pub(super) fn new(
        server: berth_admin::AdminServer,
        core: Core,
        batches: Batches,
        progress: Arc<Progress>,
        token_file: &std::path::Path,
    ) -> anyhow::Result<Self> {
        let (address, start_now) = (server.address()?, Arc::new(Notify::new()));
        let (delay, token_file) = (Arc::clone(&start_now), token_file.to_owned());
        let mut starting = JoinSet::new();
        starting.spawn(async move {
            let _ = timeout(DELAY_MAX, delay.notified()).await;
            let facts = Arc::new(move || progress.facts());
            let run = move || server.run(core, facts, batches);
            let running = tokio::task::spawn_blocking(run)
                .await
                .context("the task that starts the admin API panicked")??;
            tracing::info!(
                token_file = %token_file.display(),
                "admin API: Swagger UI at {}/swagger-ui/", running.url
            );
            Ok(running)
        });
        Ok(Self { address, start_now, starting })
    }

    /// Waits until it runs.
    ///
    /// # Errors
    /// If the system refuses a thread or socket.
    pub(super) async fn started(mut self) -> anyhow::Result<RunningServer> {
        let ended = self.starting.join_next().await.context("the admin API was not started")?;
        ended.context("the task that starts the admin API panicked")?
    }
}
