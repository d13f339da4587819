//! Settings of other crates that are derived from the configuration.

use crate::config::Config;
use anyhow::Context;
use berth_core::stack::Baseline;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

pub(super) fn baseline(config: &Config) -> Baseline {
    Baseline {
        resource: config.resource.clone(),
        mig: config.mig_strategy,
        mps_sockets: config.edits.mps_sockets(),
        ignored_xids: config.ignored_xids.clone(),
        quiet_ms: config.rules.timing.quiet_ms,
    }
}

/// The settings of the policy runtime, with the policies of this state folder.
pub(super) fn policies(config: &Config, folder: PathBuf) -> berth_wasm::Settings {
    berth_wasm::Settings {
        memory_overcommit_percent: config.rules.overcommit_percent,
        resource: config.resource.clone(),
        mig: config.mig_strategy,
        ..berth_wasm::Settings::new(folder)
    }
}

pub(super) fn create_state_dir(config: &Config) -> anyhow::Result<()> {
    let path = &config.state_dir;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).with_context(|| {
        format!(
            "cannot create the state folder {} (set --state-dir to a folder that this user can write)",
            path.display()
        )
    })
}
