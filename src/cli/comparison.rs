//! `berth policy replay` and `berth policy shadow`, and the commands of `berth policy` that try a policy.

use crate::age::{age, parse_time_or_duration};
use crate::arguments::CandidateArgs;
use crate::client::{Client, query};
use crate::complete;
use crate::names::GpuIndices;
use crate::output::Column::{Lines, Name, Whole};
use crate::output::{Out, facts, fitted, or_dash, table};
use crate::trial::{self, TryArgs};
use anyhow::bail;
use berth_api::{Comparison, Difference, Hook, Replay, Shadow, ShadowList};
use clap::Subcommand;
use clap_complete::engine::ArgValueCandidates;
use std::collections::BTreeMap;

/// Commands of `berth policy` that try a policy without effect.
#[derive(Clone, Debug, Subcommand)]
pub enum TrialCommand {
    /// Call a policy on the live node, without effect
    #[command(after_help = "\
The policy replaces the entry of its name in the active stack, or is called before \
the others. The node must have it: `berth policy push FILE`. The exit code is 1 if \
it would not be activated, or the request would not be granted.
  berth policy try timeslice --parameters '{\"replicas\": 4}'
  berth policy try timeslice --parameters @four.json \\
      --request nvidia.com/gpu.shared=2 --namespace team-a --label tier=gold")]
    Try(TryArgs),
    /// Call a policy with the recorded inputs, and show which results would have differed
    #[command(after_help = "\
Exit code 1 if the policy failed on any of them; different answers are not a failure.
  berth policy replay binpack
  berth policy replay timeslice --parameters '{\"replicas\": 4}' --hook offer")]
    Replay {
        /// The policy.
        #[command(flatten)]
        candidate: CandidateArgs,
        /// At most this many decisions, newest first
        #[arg(long, default_value_t = 1000)]
        limit: u64,
        /// Only decisions of this hook
        #[arg(long, value_parser = ["offer", "place", "admit", "triage"])]
        hook: Option<String>,
        /// Only decisions since a time, such as 2026-02-03T04:05:06Z or today, or of the last 10m
        #[arg(long, value_name = "TIME", value_parser = parse_time_or_duration)]
        since: Option<String>,
        /// Only decisions with a smaller number
        #[arg(long)]
        before: Option<u64>,
    },
    /// Call a policy in addition to the active stack, without effect
    Shadow {
        /// What to do.
        #[command(subcommand)]
        command: ShadowCommand,
    },
}

/// `berth policy shadow`.
#[derive(Clone, Debug, Subcommand)]
pub enum ShadowCommand {
    /// Start a shadow: call the policy from now on, in addition to the active stack
    Start(CandidateArgs),
    /// List the shadows, with their differences so far
    List,
    /// One shadow with its newest differences
    Show {
        /// The shadow's number, or its policy's name
        #[arg(add = ArgValueCandidates::new(complete::shadows))]
        shadow: String,
    },
    /// Stop a shadow: the policy is no longer called for comparison
    Stop {
        /// The shadow's number, or its policy's name
        #[arg(add = ArgValueCandidates::new(complete::shadows))]
        shadow: String,
    },
}

pub(crate) fn run(command: &TrialCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        TrialCommand::Try(args) => trial::run(args, client, out),
        TrialCommand::Replay { candidate, limit, hook, since, before } => {
            let query = query(&[
                ("limit", Some(&limit.to_string())),
                ("hook", hook.as_deref()),
                ("since", since.as_deref()),
                ("cursor", before.map(|before| before.to_string()).as_deref()),
            ]);
            let replayed: Replay =
                client.post(&format!("/replays{query}"), &candidate.candidate(client)?, None)?;
            out.answer(&replayed, |replayed| replay(replayed, &GpuIndices::fetch(client)))?;
            match replayed.counts.values().map(|counts| counts.fails).sum::<u64>() {
                0 => Ok(()),
                fails => bail!("{} failed on {fails} of the calls", replayed.policy),
            }
        }
        TrialCommand::Shadow { command: ShadowCommand::Start(candidate) } => {
            let shadow: Shadow = client.post("/shadows", &candidate.candidate(client)?, None)?;
            out.answer(&shadow, |s| {
                format!(
                    "started shadow {1} of {0}; status: `berth policy shadow show {2}`\n",
                    s.policy, s.id, s.id
                )
            })
        }
        TrialCommand::Shadow { command: ShadowCommand::List } => {
            let shadows = client.get::<ShadowList>("/shadows")?;
            let empty_text = "No shadows found; `berth policy shadow start POLICY` starts one";
            out.list(&shadows, shadows.items.is_empty().then(|| empty_text.into()), list)
        }
        TrialCommand::Shadow { command: ShadowCommand::Show { shadow } } => {
            let id = shadow_id(shadow, client)?;
            let found: Shadow = client.get(&format!("/shadows/{id}"))?;
            out.answer(&found, |shadow| show(shadow, &GpuIndices::fetch(client)))
        }
        TrialCommand::Shadow { command: ShadowCommand::Stop { shadow } } => {
            let id = shadow_id(shadow, client)?;
            let ended: Shadow = client.delete(&format!("/shadows/{id}"), None)?;
            let stopped = |shadow: &Shadow| format!("shadow {} is stopped\n", shadow.id);
            out.answer(&ended, |shadow| stopped(shadow) + &show(shadow, &GpuIndices::fetch(client)))
        }
    }
}

/// The number of the shadow that is named by its number, its policy's name, or that with a digest.
fn shadow_id(given: &str, client: &Client) -> anyhow::Result<u64> {
    // Names of policies begin with a letter, so none is a number.
    if let Ok(id) = given.parse() {
        return Ok(id);
    }
    let ShadowList { items } = client.get("/shadows")?;
    let is_meant = |shadow: &&Shadow| {
        let name = shadow.policy.split('@').next();
        name == Some(given) || (given.contains('@') && shadow.policy.starts_with(given))
    };
    match items.iter().filter(is_meant).collect::<Vec<_>>().as_slice() {
        [shadow] => Ok(shadow.id),
        [] => bail!("there is no shadow of policy {given:?}; `berth policy shadow list` lists the shadows"),
        several => {
            let numbers: Vec<_> = several.iter().map(|s| format!("{} ({})", s.id, s.policy)).collect();
            bail!("there are several shadows of {given:?}; give a number: {}", numbers.join(", "))
        }
    }
}

fn replay(replay: &Replay, indices: &GpuIndices) -> String {
    let mut text = facts(&[
        ("policy", replay.policy.clone()),
        ("decisions", replay.decisions.to_string()),
        ("unreadable", if replay.unreadable == 0 { String::new() } else { replay.unreadable.to_string() }),
    ]);
    text += &comparisons(&replay.counts);
    text += &without_candidates(&replay.counts);
    text += &differences(&replay.differences, indices);
    if let Some(next) = &replay.next {
        text += &format!("--before {next} continues with older ones\n");
    }
    text
}

fn list(list: &ShadowList) -> String {
    let sum =
        |shadow: &Shadow, of: fn(&Comparison) -> u64| shadow.counts.values().map(of).sum::<u64>().to_string();
    let row = |s: &Shadow| {
        vec![
            s.id.to_string(),
            s.policy.clone(),
            age(&s.since),
            sum(s, |c| c.same),
            sum(s, |c| c.differs),
            sum(s, |c| c.denies),
            sum(s, |c| c.passes),
            sum(s, |c| c.fails),
            sum(s, |c| c.skipped),
        ]
    };
    let head = [
        ("ID", Whole),
        ("POLICY", Name),
        ("AGE", Whole),
        ("SAME", Whole),
        ("DIFFERS", Whole),
        ("DENIES", Whole),
        ("NO OPINION", Whole),
        ("FAILS", Whole),
        ("SKIPPED", Whole),
    ];
    fitted(&head, list.items.iter().map(row))
}

fn show(shadow: &Shadow, indices: &GpuIndices) -> String {
    let mut text = facts(&[
        ("shadow", shadow.id.to_string()),
        ("policy", shadow.policy.clone()),
        ("parameters", shadow.parameters.to_string()),
        ("since", shadow.since.clone()),
    ]);
    text += &comparisons(&shadow.counts);
    text += &without_candidates(&shadow.counts);
    text + &differences(&shadow.differences, indices)
}

fn comparisons(counts: &BTreeMap<Hook, Comparison>) -> String {
    if counts.is_empty() {
        return "no calls yet\n".into();
    }
    let row = |(hook, c): (&Hook, &Comparison)| {
        vec![
            hook.to_string(),
            c.same.to_string(),
            c.differs.to_string(),
            c.denies.to_string(),
            c.passes.to_string(),
            c.fails.to_string(),
            c.skipped.to_string(),
        ]
    };
    table(&["HOOK", "SAME", "DIFFERS", "DENIES", "NO OPINION", "FAILS", "SKIPPED"], counts.iter().map(row))
}

/// How many calls had no candidates; empty if none had.
fn without_candidates(counts: &BTreeMap<Hook, Comparison>) -> String {
    let row = |(hook, c): (&Hook, &Comparison)| {
        let calls = c.same + c.differs + c.passes + c.fails;
        format!(
            "{} of {calls} calls of {hook} had no candidates, since no source showed the requesting pod: a rule about pods \
             had no effect on them\n",
            c.without_candidates
        )
    };
    counts.iter().filter(|(_, c)| c.without_candidates > 0).map(row).collect()
}

fn differences(differences: &[Difference], indices: &GpuIndices) -> String {
    if differences.is_empty() {
        return String::new();
    }
    let row = |d: &Difference| {
        let how = if d.failed { format!("fails: {}", d.message) } else { d.message.clone() };
        vec![or_dash(d.seq), age(&d.at), d.hook.to_string(), indices.with_indices(&how)]
    };
    let head = [("DECISION", Whole), ("AGE", Whole), ("HOOK", Whole), ("DIFFERENCE", Lines)];
    let mut text = fitted(&head, differences.iter().map(row));
    if differences.iter().any(|difference| difference.seq.is_none()) {
        text += "-: not recorded, so without a number: an unchanged offer, or there is no journal (decisions.maxMiB: 0), or \
                 too many decisions at once\n";
    }
    text
}
