//! What a start makes of the configuration, once.

use crate::admission::Baseline;
use crate::config::Config;
use crate::wasm;
use anyhow::Context;
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

/// How policies are asked that lie in this state folder.
pub(super) fn policies(config: &Config, folder: PathBuf) -> wasm::Settings {
    wasm::Settings {
        memory_overcommit_percent: config.rules.overcommit_percent,
        resource: config.resource.clone(),
        mig: config.mig_strategy,
        ..wasm::Settings::new(folder)
    }
}

pub(super) fn make_state_dir(config: &Config) -> anyhow::Result<()> {
    let path = &config.state_dir;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).with_context(|| {
        format!(
            "cannot make the state folder {} (set --state-dir to a folder that this user may write)",
            path.display()
        )
    })
}
