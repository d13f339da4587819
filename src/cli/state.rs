//! `berth state`: the allocation store of a stopped daemon, or of a copy of its state folder.

use super::output::{Out, facts};
use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// `berth state`.
#[derive(Subcommand, Debug)]
pub enum StateCommand {
    /// Write every record as JSON lines, to a new file or standard output
    Export {
        /// Which store.
        #[command(flatten)]
        state: StateDir,
        /// A file that is not there yet; standard output if not given
        file: Option<PathBuf>,
    },
    /// Make the store of a state folder that has none; all of it or nothing
    Import {
        /// Which store.
        #[command(flatten)]
        state: StateDir,
        /// What `berth state export` wrote; `-` reads standard input
        file: PathBuf,
    },
    /// Make an empty store in a state folder whose store is gone; cordons and the stack are lost with it
    Init {
        /// Which store.
        #[command(flatten)]
        state: StateDir,
    },
    /// Read everything and say what there is, or what is damaged; exit code 1 then
    Verify {
        /// Which store.
        #[command(flatten)]
        state: StateDir,
    },
}

/// Which store.
#[derive(Args, Clone, Debug)]
pub struct StateDir {
    /// The state folder of the daemon, or a copy of it
    #[arg(long, env = "BERTH_STATE_DIR", value_name = "DIR", default_value = "/var/lib/berth")]
    pub state_dir: PathBuf,
}

/// What the store can do, given by `main`, so that the command line names no adapter.
#[derive(Clone, Copy)]
pub struct StateHooks {
    /// Writes everything as JSON lines.
    pub export: fn(&Path, &mut dyn Write) -> anyhow::Result<()>,
    /// Makes a store from JSON lines.
    pub import: fn(&Path, &mut dyn BufRead) -> anyhow::Result<StateSummary>,
    /// Makes an empty store.
    pub init: fn(&Path) -> anyhow::Result<StateSummary>,
    /// Reads everything.
    pub verify: fn(&Path) -> anyhow::Result<StateSummary>,
}

/// What a store was found to hold.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StateSummary {
    /// Appends that it took.
    pub appends: u64,
    /// Records in all.
    pub records: usize,
    /// Records by kind.
    pub kinds: BTreeMap<&'static str, usize>,
}

pub(super) fn run(command: &StateCommand, hooks: &StateHooks, out: &mut Out) -> anyhow::Result<()> {
    match command {
        StateCommand::Export { state, file } => export(state, file.as_deref(), hooks),
        StateCommand::Import { state, file } => {
            let done = if file == Path::new("-") {
                (hooks.import)(&state.state_dir, &mut std::io::stdin().lock())
            } else {
                let opened = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
                (hooks.import)(&state.state_dir, &mut BufReader::new(opened))
            };
            show(&done?, "imported", state, out)
        }
        StateCommand::Init { state } => show(&(hooks.init)(&state.state_dir)?, "made", state, out),
        StateCommand::Verify { state } => show(&(hooks.verify)(&state.state_dir)?, "ok", state, out),
    }
}

fn export(state: &StateDir, file: Option<&Path>, hooks: &StateHooks) -> anyhow::Result<()> {
    let Some(file) = file else {
        return (hooks.export)(&state.state_dir, &mut BufWriter::new(std::io::stdout().lock()));
    };
    // Never over another export: that may be the only good one.
    let opened = File::create_new(file).with_context(|| format!("cannot make {}", file.display()))?;
    let done = (hooks.export)(&state.state_dir, &mut BufWriter::new(&opened))
        .and_then(|()| opened.sync_all().context("writing the export"));
    if done.is_err() {
        // Half an export is of no use; that it stays is harmless, since an import notices.
        let _ = std::fs::remove_file(file);
    }
    done
}

fn show(summary: &StateSummary, done: &str, state: &StateDir, out: &mut Out) -> anyhow::Result<()> {
    out.answer(summary, |summary| {
        let mut rows =
            vec![("  appends", summary.appends.to_string()), ("  records", summary.records.to_string())];
        let kinds: Vec<_> = summary.kinds.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
        rows.push(("  of them", kinds.join(", ")));
        format!("{done}: {}\n{}", state.state_dir.display(), facts(&rows))
    })
}
