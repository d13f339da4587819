//! `berth policy download`, `history`, `rollback` and `unsuspend`.

use super::client::{Client, escaped};
use super::output::{Out, table};
use super::policy_version::{resolve, short};
use super::reason::ReasonArgs;
use super::stack_table::stack_table;
use anyhow::{Context, bail};
use berth_api::MODULE_BYTES_MAX;
use berth_api::{Activation, ActivationList, PolicyDetail, Rollback, Stack};
use clap::Subcommand;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Commands of `berth policy` about versions and activations.
#[derive(Subcommand, Clone, Debug)]
pub enum VersionCommand {
    /// Download the bytes of a version
    #[command(after_help = "\
Examples:
  berth policy download timeslice                       Into timeslice-9f86d081884c.wasm
  berth policy download quota@9f86d081884c --to quota.wasm
  berth policy download quota --to - | sha256sum")]
    Download {
        /// Name, digest, the beginning of a digest, or name@ and that
        policy: String,
        /// Output file; `-` writes to standard output [default: NAME-DIGEST.wasm, which must not exist yet]
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// The newest activations: the stack, by whom, when and why
    History,
    /// Activate a stack of the history again, checked like any activation
    #[command(after_help = "\
Without a revision, the previously active stack is activated. A rollback gets a new revision; rolling back
twice activates the present stack again. `berth policy history` shows the revisions.

Examples:
  berth policy rollback
  berth policy rollback 12 --why 'the new quota denies too much'")]
    Rollback {
        /// The revision; the one before the active one if not given
        revision: Option<u64>,
        /// Only if the active stack is still at this revision
        #[arg(long, value_name = "REVISION")]
        if_revision: Option<u64>,
        /// For whom, and why.
        #[command(flatten)]
        word: ReasonArgs,
    },
    /// Use a policy again that was suspended after several faults in a row
    Unsuspend {
        /// Its index in `berth policy stack`, or its name if the stack has it once
        entry: String,
    },
}

pub(super) fn run(command: &VersionCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        VersionCommand::Download { policy, to } => download(policy, to.as_deref(), client, out),
        VersionCommand::History => out.answer(&client.get::<ActivationList>("/stack/history")?, history),
        VersionCommand::Rollback { revision, if_revision, word } => {
            let ReasonArgs { by, reason } = word.clone();
            let to = Rollback { revision: *revision, by, reason };
            let stack: Stack = client.post("/stack/rollback", &to, *if_revision)?;
            out.answer(&stack, |s| format!("active:\n{}", stack_table(s)))
        }
        VersionCommand::Unsuspend { entry } => unsuspend(entry, client, out),
    }
}

fn download(policy: &str, to: Option<&Path>, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let digest = resolve(client, policy)?;
    let bytes = client.bytes(&format!("/policies/{digest}/module"), u64::try_from(MODULE_BYTES_MAX)?)?;
    if to == Some(Path::new("-")) {
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(&bytes).and_then(|()| stdout.flush()).context("writing to standard output")?;
        return Ok(());
    }
    let file = match to {
        Some(file) => file.to_owned(),
        None => {
            let detail: PolicyDetail = client.get(&format!("/policies/{digest}"))?;
            // A DNS label by the daemon's rules; escaped, so that no answer names a file elsewhere.
            PathBuf::from(format!("{}-{}.wasm", escaped(&detail.policy.name), short(&digest)))
        }
    };
    let mut options = OpenOptions::new();
    let options = options.write(true);
    let opened = match to {
        Some(_) => options.create(true).truncate(true).open(&file),
        None => options.create_new(true).open(&file),
    };
    let written = opened.and_then(|mut opened| opened.write_all(&bytes));
    written.with_context(|| format!("cannot write {} (--to names another file)", file.display()))?;
    out.done(&format!("{} has {} bytes, sha256 {digest}", file.display(), bytes.len()))
}

fn history(list: &ActivationList) -> String {
    let rows: Vec<_> = list.items.iter().map(row).collect();
    let mut text = table(&["REVISION", "ACTIVE", "SOURCE", "SINCE", "BY", "POLICIES", "WHY"], &rows);
    for activation in list.items.iter().filter(|a| !a.gone.is_empty()) {
        let gone = activation.gone.join(" ");
        text += &format!("revision {} cannot be rolled back to: {gone} was deleted\n", activation.revision);
    }
    text
}

fn row(activation: &Activation) -> Vec<String> {
    let label = |e: &berth_api::StackEntry| format!("{}@{}", e.policy, short(&e.digest));
    let policies: Vec<_> = activation.entries.iter().map(label).collect();
    vec![
        activation.revision.to_string(),
        if activation.active { "yes" } else { "" }.into(),
        activation.source.to_string(),
        activation.since.clone().unwrap_or_else(|| "-".into()),
        activation.by.clone().unwrap_or_else(|| "-".into()),
        if policies.is_empty() { "-".into() } else { policies.join(" ") },
        activation.why.clone().unwrap_or_default(),
    ]
}

fn unsuspend(entry: &str, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let stack: Stack = client.get("/stack")?;
    let named: Vec<usize> =
        (0..stack.entries.len()).filter(|place| stack.entries[*place].policy == entry).collect();
    let place = match (named.as_slice(), entry.parse::<usize>()) {
        ([place], _) => *place,
        ([], Ok(place)) if place < stack.entries.len() => place,
        ([], _) => bail!("the active stack has no entry {entry:?}; `berth policy stack` shows its entries"),
        (several, _) => {
            let places: Vec<_> = several.iter().map(ToString::to_string).collect();
            bail!("the active stack has {entry:?} several times; give its index: {}", places.join(" "))
        }
    };
    let suspended = |stack: &Stack| stack.entries[place].record.as_ref().is_some_and(|r| r.suspended);
    let was = suspended(&stack);
    let path = format!("/stack/entries/{place}/suspension");
    let now: Stack = client.delete_at(&path, stack.revision)?;
    out.answer(&now, |s| {
        let what = if was { "is called again" } else { "was not suspended" };
        format!("{entry} {what}\n{}", stack_table(s))
    })
}
