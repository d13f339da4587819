//! `berth state`: the allocation store of a stopped daemon, or of a copy of its state folder.

use anyhow::Context;
use berth_cli::output::{Out, facts};
use berth_store::Summary;
use clap::{Args, Subcommand};
use std::fs::File;
use std::io::{BufReader, BufWriter};
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

pub(super) fn run(command: &StateCommand, out: &mut Out) -> anyhow::Result<()> {
    match command {
        StateCommand::Export { state, file } => export(state, file.as_deref()),
        StateCommand::Import { state, file } => {
            let done = if file == Path::new("-") {
                berth_store::import(&state.state_dir, &mut std::io::stdin().lock())
            } else {
                let opened = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
                berth_store::import(&state.state_dir, &mut BufReader::new(opened))
            };
            show(&done?, "imported", state, out)
        }
        StateCommand::Init { state } => show(&berth_store::init(&state.state_dir)?, "made", state, out),
        StateCommand::Verify { state } => show(&berth_store::verify(&state.state_dir)?, "ok", state, out),
    }
}

fn export(state: &StateDir, file: Option<&Path>) -> anyhow::Result<()> {
    let Some(file) = file else {
        return Ok(berth_store::export(&state.state_dir, &mut BufWriter::new(std::io::stdout().lock()))?);
    };
    // Never over another export: that may be the only good one.
    let opened = File::create_new(file).with_context(|| format!("cannot make {}", file.display()))?;
    let done = berth_store::export(&state.state_dir, &mut BufWriter::new(&opened))
        .map_err(anyhow::Error::from)
        .and_then(|()| opened.sync_all().context("writing the export"));
    if done.is_err() {
        // Half an export is of no use; that it stays is harmless, since an import notices.
        let _ = std::fs::remove_file(file);
    }
    done
}

fn show(summary: &Summary, done: &str, state: &StateDir, out: &mut Out) -> anyhow::Result<()> {
    out.answer(summary, |summary| {
        let mut rows =
            vec![("  appends", summary.appends.to_string()), ("  records", summary.records.to_string())];
        let kinds: Vec<_> = summary.kinds.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
        rows.push(("  of them", kinds.join(", ")));
        format!("{done}: {}\n{}", state.state_dir.display(), facts(&rows))
    })
}
