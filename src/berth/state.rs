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
        /// The state folder.
        #[command(flatten)]
        state: StateDir,
        /// A new file [default: standard output]
        file: Option<PathBuf>,
    },
    /// Create the store of a state folder that has none; imports all records or none
    Import {
        /// The state folder.
        #[command(flatten)]
        state: StateDir,
        /// The output of `berth state export`; `-` reads standard input
        file: PathBuf,
    },
    /// Create an empty store in a state folder whose store is lost; cordons and the stack are lost with it
    Init {
        /// The state folder.
        #[command(flatten)]
        state: StateDir,
    },
    /// Read all records and show their number; if one is damaged, show which, and exit with 1
    Verify {
        /// The state folder.
        #[command(flatten)]
        state: StateDir,
    },
}

/// The state folder of a command.
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
            let summary = if file == Path::new("-") {
                berth_store::import(&state.state_dir, &mut std::io::stdin().lock())
            } else {
                let input = File::open(file).with_context(|| format!("cannot read {}", file.display()))?;
                berth_store::import(&state.state_dir, &mut BufReader::new(input))
            };
            show(&summary?, "imported", state, out)
        }
        StateCommand::Init { state } => show(&berth_store::init(&state.state_dir)?, "created", state, out),
        StateCommand::Verify { state } => show(&berth_store::verify(&state.state_dir)?, "ok", state, out),
    }
}

fn export(state: &StateDir, file: Option<&Path>) -> anyhow::Result<()> {
    let Some(file) = file else {
        return Ok(berth_store::export(&state.state_dir, &mut BufWriter::new(std::io::stdout().lock()))?);
    };
    // An existing file is not overwritten: it may be the only good export.
    let output = File::create_new(file).with_context(|| format!("cannot create {}", file.display()))?;
    let exported = berth_store::export(&state.state_dir, &mut BufWriter::new(&output))
        .map_err(anyhow::Error::from)
        .and_then(|()| output.sync_all().context("writing the export"));
    if exported.is_err() {
        // An incomplete export is useless. A failure to remove it is harmless, since an import detects it.
        let _ = std::fs::remove_file(file);
    }
    exported
}

fn show(summary: &Summary, action: &str, state: &StateDir, out: &mut Out) -> anyhow::Result<()> {
    out.answer(summary, |summary| {
        let mut rows =
            vec![("  appends", summary.appends.to_string()), ("  records", summary.records.to_string())];
        let kinds: Vec<_> = summary.kinds.iter().map(|(kind, n)| format!("{n} {kind}")).collect();
        rows.push(("  by kind", kinds.join(", ")));
        format!("{action}: {}\n{}", state.state_dir.display(), facts(&rows))
    })
}
