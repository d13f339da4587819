//! What a start needs: the system's clock, the state folder, the journal.

use anyhow::Context;
use berth_config::Config;
use berth_files::{Exposure, WRITABLE_BY_OTHERS};
use berth_kernel::node::ports::Journal;
use berth_store::journal::FileJournal;
use std::os::unix::fs::DirBuilderExt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Interval of checks whether the clock is set.
const CLOCK_CHECK_INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn create_state_dir(config: &Config) -> anyhow::Result<()> {
    let path = &config.node.state_dir;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).with_context(|| {
        format!(
            "cannot create the state folder {} (set --state-dir to a folder that this user can write)",
            path.display()
        )
    })?;
    for Exposure { what, fix } in berth_files::exposures(path, &path.metadata()?, WRITABLE_BY_OTHERS) {
        tracing::warn!("{what}, so others can change all state of Berth; run `{fix}`");
    }
    Ok(())
}

/// Opens the journal of decisions. Without it the daemon still runs, so an error is only logged.
pub(super) fn open_journal(config: &Config) -> Option<Arc<dyn Journal>> {
    let limits = config.node.decisions?;
    match FileJournal::open(&config.node.state_dir.join("decisions"), limits) {
        Ok(journal) => Some(Arc::new(journal)),
        Err(error) => {
            let cause = error.source.as_ref().map_or_else(String::new, |source| format!(": {source}"));
            tracing::error!("decisions are not recorded: {error}{cause}");
            None
        }
    }
}

/// Waits while the clock shows a time before 1970, as on a node without a battery until its time is set: the libraries
/// of the store and of the admin API panic at such times.
pub(super) async fn wait_until_clock_is_set() {
    let mut is_logged = false;
    while SystemTime::now() < UNIX_EPOCH {
        if !std::mem::replace(&mut is_logged, true) {
            tracing::error!("the system's clock shows a time before 1970: waiting until it is set");
        }
        tokio::time::sleep(CLOCK_CHECK_INTERVAL).await;
    }
}
