//! Changes of the active stack: `berth policy activate`, `reset` and `rollback`. Each can be tried with `--dry-run`,
//! and says before it withdraws devices how many.

use crate::arguments::ReasonArgs;
use crate::client::{Client, query};
use crate::confirm::warn_and_ask;
use crate::output::Out;
use crate::stack::{self, stack_table};
use crate::trial;
use berth_api::{NewStack, NewStackEntry, Rollback, Stack, StackPreview, StackSource};
use clap::Args;

/// The arguments of every change.
#[derive(Args, Clone, Debug, Default)]
pub struct ChangeArgs {
    /// Show what would change, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Skip the confirmation before devices are withdrawn
    #[arg(short, long)]
    pub yes: bool,
    /// The person behind the change, and the reason.
    #[command(flatten)]
    pub word: ReasonArgs,
}

/// A change.
pub(crate) enum Change {
    Activate { entries: Vec<NewStackEntry>, break_glass_seconds: Option<u64> },
    Reset,
    RollBack(Option<u64>),
}

impl Change {
    /// Orders it, or has it tried; with a revision, only if that is still the active one.
    fn send(
        &self,
        client: &Client,
        word: &ReasonArgs,
        dry_run: bool,
        revision: Option<u64>,
    ) -> anyhow::Result<Stack> {
        let ReasonArgs { by, reason } = word.clone();
        let dry = dry_run.then_some("true");
        let dry_query = query(&[("dryRun", dry)]);
        match self {
            Self::Activate { entries, break_glass_seconds } => {
                let (entries, break_glass_seconds) = (entries.clone(), *break_glass_seconds);
                let stack = NewStack { entries, by, reason, break_glass_seconds };
                client.put(&format!("/stack{dry_query}"), &stack, revision)
            }
            Self::Reset => {
                let reason = Some(reason.as_str()).filter(|reason| !reason.is_empty());
                let query = query(&[("by", by.as_deref()), ("reason", reason), ("dryRun", dry)]);
                client.delete(&format!("/stack/override{query}"), revision)
            }
            Self::RollBack(to) => {
                let to = Rollback { revision: *to, by, reason };
                client.post(&format!("/stack/rollback{dry_query}"), &to, revision)
            }
        }
    }
}

/// Makes a change and prints the stack with what was added and removed, or with `--dry-run` what would be.
pub(crate) fn run(
    change: &Change,
    args: &ChangeArgs,
    if_revision: Option<u64>,
    client: &Client,
    out: &mut Out,
) -> anyhow::Result<()> {
    let tried = match args.dry_run || !args.yes {
        true => Some(change.send(client, &args.word, true, if_revision)?),
        false => None,
    };
    if args.dry_run {
        let wide = out.wide();
        return tried.map_or(Ok(()), |tried| out.answer(&tried, |tried| dry_run(tried, wide)));
    }
    let mut expected = if_revision;
    if let Some(tried) = &tried
        && let Some(withdrawn) = tried.preview.as_ref().and_then(withdrawn)
    {
        // What was confirmed is what is done: not after another change.
        if warn_and_ask(&withdrawn, "Change the stack?", args.yes)? {
            expected = Some(tried.revision);
        }
    }
    // Without an answer the change is made all the same.
    let before = tried.or_else(|| client.get::<Stack>("/stack").ok());
    out.answer(&change.send(client, &args.word, false, expected)?, |stack| {
        if matches!(change, Change::Reset) && stack.source == StackSource::BreakGlass {
            return "the break-glass has ended; the daemon now activates the stack that was active before it (`berth policy stack` shows \
                    the active stack)\n"
                .into();
        }
        let changes = before.as_ref().map(|before| stack::changes(&before.entries, &stack.entries));
        format!("active:\n{}{}", stack_table(stack), changes.unwrap_or_default())
    })
}

/// How many devices a change withdraws; `None` if it withdraws none.
fn withdrawn(preview: &StackPreview) -> Option<String> {
    let lost = |r: &berth_api::TrialResource| r.devices_now.saturating_sub(r.devices);
    let each: Vec<_> = preview
        .resources
        .iter()
        .filter(|resource| lost(resource) > 0)
        .map(|resource| format!("{} of {} {}", lost(resource), resource.devices_now, resource.resource))
        .collect();
    let total: usize = preview.resources.iter().map(lost).sum();
    let devices = if total == 1 { "device" } else { "devices" };
    (total > 0).then(|| {
        format!(
            "this withdraws {total} {devices} ({}); pods keep those that they hold until they end",
            each.join(", ")
        )
    })
}

fn dry_run(tried: &Stack, wide: bool) -> String {
    let Some(preview) = &tried.preview else {
        if tried.source == StackSource::BreakGlass {
            return "the break-glass would end, and the daemon would activate the stack that was active before it\n"
                .into();
        }
        return "nothing to reset: the configuration file's stack is the active one\n".into();
    };
    let source = match &preview.source {
        StackSource::File => "the configuration file decides again".to_owned(),
        StackSource::Api => "it would take precedence over the configuration file".to_owned(),
        StackSource::Fleet => "the node's GPUNode would decide".to_owned(),
        StackSource::BreakGlass => "it would take precedence over the node's GPUNode for a while".to_owned(),
        StackSource::Other(source) => format!("it would be of the {source}"),
    };
    let mut text = format!("the activation would be accepted; {source}\n");
    text += &stack::changes(&tried.entries, &preview.entries);
    text += "\n";
    text += &trial::offers(&preview.offers, &preview.resources, wide);
    for warning in &preview.warnings {
        text += &format!("warning: {warning}\n");
    }
    if let Some(withdrawn) = withdrawn(preview) {
        text += &format!("\n{withdrawn}\n");
    }
    text + "nothing was changed\n"
}
