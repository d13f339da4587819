//! `berth policy`.

use super::client::{Client, escaped};
use super::input_file::read_file;
use super::output::{Out, facts, joined, table};
use super::policy_version::{find, label, resolve, short};
use super::reason::ReasonArgs;
use super::stack_table::stack_table;
use super::trial::TrialCommand;
use super::upload::PushArgs;
use super::versions::VersionCommand;
use super::{parameters, stack_file, trial, upload, versions};
use anyhow::Context;
use berth_api::{NewStack, NewStackEntry, PolicyDetail, PolicyList, Stack};
use clap::Subcommand;
use std::path::{Path, PathBuf};

/// Largest stack file, bytes: as large as a configuration file may be.
const STACK_BYTES_MAX: u64 = 1024 * 1024;

const STACK_FILE: &str = "\
The file is a list of entries in the order in which policies are called, or a configuration file with
such a list under `stack`. Only `policy` is required:
  - policy: timeslice
    digest: 9f86d081884c              # which version of it; or `policy: timeslice@9f86d081884c`
    parameters: {replicas: 4}         # `berth policy show timeslice` lists them
    permissions: {deny: false, shareMax: 4, resources: [nvidia.com/gpu.shared]}
    onFault: skip                     # or deny";

/// `berth policy`.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// List all versions of policies on the node
    List,
    /// One version with its parameters; `-o json` has their schema
    Show {
        /// Name, digest, the beginning of a digest, or name@ and that
        policy: String,
    },
    /// Upload a policy: it is checked, compiled and kept; it decides nothing until a stack names it
    Push(PushArgs),
    /// Try a policy without effect.
    #[command(flatten)]
    Trial(TrialCommand),
    /// Delete a version that is not active
    Delete {
        /// Name, digest, the beginning of a digest, or name@ and that
        policy: String,
    },
    /// Replace the active stack: tested on the live node first, and unchanged if a policy fails
    #[command(after_help = STACK_FILE)]
    Activate {
        /// The stack as YAML or JSON; `-` reads standard input
        file: PathBuf,
        /// Only if the active stack is still at this revision
        #[arg(long, value_name = "REVISION")]
        if_revision: Option<u64>,
        /// For whom, and why.
        #[command(flatten)]
        word: ReasonArgs,
    },
    /// Return to the stack of the configuration file
    Reset(ReasonArgs),
    /// Versions and activations.
    #[command(flatten)]
    Versions(VersionCommand),
    /// The active stack, with calls and faults of its policies
    Stack,
}

pub(crate) fn run(command: &PolicyCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        PolicyCommand::List => out.answer(&client.get::<PolicyList>("/policies")?, list),
        PolicyCommand::Show { policy } => {
            let path = format!("/policies/{}", resolve(client, policy)?);
            out.answer(&client.get::<PolicyDetail>(&path)?, show)
        }
        PolicyCommand::Push(args) => upload::run(args, client, out),
        PolicyCommand::Trial(command) => trial::run(command, client, out),
        PolicyCommand::Delete { policy } => {
            let version = find(client, policy)?;
            let label = label(&version);
            client
                .remove(&format!("/policies/{}", escaped(&version.digest)))
                .with_context(|| format!("{label} was not deleted"))?;
            out.done(&format!("policy {label} was deleted"))
        }
        PolicyCommand::Activate { file, if_revision, word } => {
            let stack =
                NewStack { entries: read_stack(file)?, by: word.by.clone(), reason: word.reason.clone() };
            out.answer(&client.put::<Stack>("/stack", &stack, *if_revision)?, |s| {
                format!("active:\n{}", stack_table(s))
            })
        }
        PolicyCommand::Reset(word) => {
            let path = format!("/stack/override{}", word.query());
            out.answer(&client.delete::<Stack>(&path)?, |s| format!("active:\n{}", stack_table(s)))
        }
        PolicyCommand::Versions(command) => versions::run(command, client, out),
        PolicyCommand::Stack => out.answer(&client.get::<Stack>("/stack")?, stack_table),
    }
}

fn read_stack(file: &Path) -> anyhow::Result<Vec<NewStackEntry>> {
    let name = if file == Path::new("-") { "standard input".into() } else { file.display().to_string() };
    let text = read_file(file, STACK_BYTES_MAX).map_err(|error| {
        match file.exists() || name.contains(['/', '.']) {
            true => error,
            // A common mistake: the name of a policy in place of a file.
            false => error.context(format!(
                "a stack is activated from a file; one of this policy alone has the line `- policy: {name}`"
            )),
        }
    })?;
    stack_file::parse(&name, &text)
}

fn list(list: &PolicyList) -> String {
    let rows: Vec<_> = list
        .items
        .iter()
        .map(|p| {
            let origin = if p.shipped { "shipped" } else { "uploaded" };
            let active = if p.active { "yes" } else { "" };
            vec![
                p.name.clone(),
                p.version.clone(),
                short(&p.digest).into(),
                origin.into(),
                active.into(),
                p.since.clone(),
                p.by.clone().unwrap_or_default(),
                p.signed_by.clone().unwrap_or_default(),
                joined(&p.hooks, ","),
                p.summary.clone(),
            ]
        })
        .collect();
    let head =
        ["NAME", "VERSION", "DIGEST", "ORIGIN", "ACTIVE", "SINCE", "BY", "SIGNED BY", "HOOKS", "SUMMARY"];
    table(&head, &rows)
}

fn show(detail: &PolicyDetail) -> String {
    let p = &detail.policy;
    facts(&[
        ("name", p.name.clone()),
        ("version", p.version.clone()),
        ("summary", p.summary.clone()),
        ("digest", p.digest.clone()),
        ("origin", if p.shipped { "shipped" } else { "uploaded" }.into()),
        ("active", if p.active { "yes" } else { "no" }.into()),
        ("hooks", joined(&p.hooks, " ")),
        ("bytes", p.bytes.to_string()),
        ("since", p.since.clone()),
        ("by", p.by.clone().unwrap_or_default()),
        ("why", p.why.clone().unwrap_or_default()),
        ("signed by", p.signed_by.clone().unwrap_or_default()),
    ]) + &parameters::shown(&detail.parameters_schema)
}
