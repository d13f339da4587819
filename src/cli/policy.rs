//! `berth policy`.

use crate::age::age;
use crate::arguments::read_file;
use crate::client::{Client, escaped};
use crate::comparison::{self, TrialCommand};
use crate::complete;
use crate::names::{name_with_digest, short_digest};
use crate::output::Column::{Name, Text, Whole};
use crate::output::{Out, facts, fitted, joined, table};
use crate::parameters;
use crate::policy_version::{find, resolve_newest};
use crate::stack::{self, stack_table};
use crate::stack_change::{self, Change, ChangeArgs};
use crate::upload::{self, PushArgs};
use anyhow::{Context, anyhow, bail};
use berth_api::{
    ActivationList, NewStackEntry, OnFault, Permissions, Policy, PolicyDetail, PolicyList, Stack,
};
use berth_files::yaml::{Document, LeftOut, Problems, RootType};
use clap::Subcommand;
use clap_complete::engine::ArgValueCandidates;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Largest stack file, bytes: as large as a configuration file may be.
const STACK_BYTES_MAX: u64 = 1024 * 1024;

const STACK_FILE: &str = "\
The file is a list of entries in the order in which policies are called, or a \
configuration file with such a list under `stack`. Only `policy` is required:
  - policy: timeslice          # or timeslice@DIGEST
    parameters: {replicas: 4}  # see `berth policy show`
    permissions: {deny: false, shareMax: 4}
    onFault: skip              # or deny
What `berth policy stack -o yaml` prints can be changed and activated, too.";

/// `berth policy`.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// List all versions of policies on the node
    List,
    /// One version with its parameters; `-o json` has their schema
    Show {
        /// Name, digest, the beginning of a digest, or name@ and that
        #[arg(add = ArgValueCandidates::new(complete::policies))]
        policy: String,
    },
    /// Upload a policy; it is not called until a stack names it
    Push(PushArgs),
    /// Try a policy without effect.
    #[command(flatten)]
    Trial(TrialCommand),
    /// Delete a version that is not active
    Delete {
        /// Name, digest, the beginning of a digest, or name@ and that
        #[arg(add = ArgValueCandidates::new(complete::policies))]
        policy: String,
    },
    /// Replace the active stack, tested on the live node first
    #[command(after_help = STACK_FILE)]
    Activate {
        /// The stack as YAML or JSON; `-` reads standard input
        file: PathBuf,
        /// Only if the active stack is still at this revision
        #[arg(long, value_name = "REVISION", add = ArgValueCandidates::new(complete::revisions))]
        if_revision: Option<u64>,
        /// For this time (1m to 24h), use FILE in place of the GPUNode's stack; needs --reason; `berth policy reset` ends it
        #[arg(long, value_name = "TIME", requires = "reason", value_parser = break_glass_time)]
        break_glass: Option<Duration>,
        /// How.
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// Return to the stack of the configuration file, or end a break-glass
    Reset(ChangeArgs),
    /// Download the bytes of a version
    #[command(after_help = "\
Examples:
  berth policy download timeslice                       Into timeslice-9f86d081884c.wasm
  berth policy download quota@9f86d081884c --to quota.wasm
  berth policy download quota --to - | sha256sum")]
    Download {
        /// Name, digest, the beginning of a digest, or name@ and that
        #[arg(add = ArgValueCandidates::new(complete::policies))]
        policy: String,
        /// Output file; `-` writes to standard output [default: NAME-DIGEST.wasm, which must not exist yet]
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
    },
    /// The newest activations: the stack, by whom, when and why
    History,
    /// Activate a stack of the history again, checked like any activation
    #[command(after_help = "\
Without a revision, the previously active stack is activated. A rollback gets a new \
revision; rolling back twice activates the present stack again. With a revision of the \
configuration file the file decides again, if it still has that stack. `berth policy \
history` shows the revisions.

Examples:
  berth policy rollback
  berth policy rollback 12 --why 'the new quota denies too much'")]
    Rollback {
        /// The revision; the one before the active one if not given
        #[arg(add = ArgValueCandidates::new(complete::revisions))]
        revision: Option<u64>,
        /// Only if the active stack is still at this revision
        #[arg(long, value_name = "REVISION", add = ArgValueCandidates::new(complete::revisions))]
        if_revision: Option<u64>,
        /// How.
        #[command(flatten)]
        change: ChangeArgs,
    },
    /// End the suspension of a policy that had several faults in a row
    Unsuspend {
        /// The policy's index in `berth policy stack`, or its name if the stack has it only once
        entry: String,
    },
    /// The active stack, with calls and faults of its policies
    Stack,
}

fn break_glass_time(text: &str) -> Result<Duration, String> {
    let time = humantime::parse_duration(text).ok();
    let allowed = Duration::from_secs(60)..=Duration::from_secs(86_400);
    let time = time.filter(|time| allowed.contains(time));
    time.ok_or_else(|| "the time must be from 1m to 24h, such as 2h".to_owned())
}

pub(crate) fn run(command: &PolicyCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        PolicyCommand::List => {
            let wide = out.wide();
            let policies = client.get::<PolicyList>("/policies")?;
            let empty_text = policies.items.is_empty().then(|| "No policies found".into());
            out.list(
                &policies,
                empty_text,
                |policies| if wide { list_wide(policies) } else { list(policies) },
            )
        }
        PolicyCommand::Show { policy } => {
            let path = format!("/policies/{}", resolve_newest(client, policy)?);
            out.answer(&client.get::<PolicyDetail>(&path)?, show)
        }
        PolicyCommand::Push(args) => upload::run(args, client, out),
        PolicyCommand::Trial(command) => comparison::run(command, client, out),
        PolicyCommand::Delete { policy } => {
            let version = find(client, policy)?;
            let label = name_with_digest(&version);
            client
                .remove(&format!("/policies/{}", escaped(&version.digest)))
                .with_context(|| format!("{label} was not deleted"))?;
            out.done(&format!("policy {label} was deleted"))
        }
        PolicyCommand::Activate { file, if_revision, break_glass, change } => {
            let break_glass_seconds = break_glass.map(|time| time.as_secs());
            let activation = Change::Activate { entries: read_stack(file)?, break_glass_seconds };
            stack_change::run(&activation, change, *if_revision, client, out)
        }
        PolicyCommand::Reset(change) => stack_change::run(&Change::Reset, change, None, client, out),
        PolicyCommand::Download { policy, to } => stack::download(policy, to.as_deref(), client, out),
        PolicyCommand::History => {
            let wide = out.wide();
            out.answer(&client.get::<ActivationList>("/stack/history")?, |list| stack::history(list, wide))
        }
        PolicyCommand::Rollback { revision, if_revision, change } => {
            stack_change::run(&Change::RollBack(*revision), change, *if_revision, client, out)
        }
        PolicyCommand::Unsuspend { entry } => stack::unsuspend(entry, client, out),
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
    parse_stack(&name, &text)
}

fn list(list: &PolicyList) -> String {
    let row = |p: &Policy| {
        vec![
            p.name.clone(),
            short_digest(&p.digest).into(),
            if p.shipped { "shipped" } else { "uploaded" }.into(),
            if p.active { "yes" } else { "" }.into(),
            age(&p.since),
            p.summary.clone(),
        ]
    };
    let head = [
        ("NAME", Name),
        ("DIGEST", Whole),
        ("ORIGIN", Whole),
        ("ACTIVE", Whole),
        ("AGE", Whole),
        ("SUMMARY", Text),
    ];
    fitted(&head, list.items.iter().map(row))
}

fn list_wide(list: &PolicyList) -> String {
    let row = |p: &Policy| {
        vec![
            p.name.clone(),
            p.version.clone(),
            short_digest(&p.digest).into(),
            if p.shipped { "shipped" } else { "uploaded" }.into(),
            if p.active { "yes" } else { "" }.into(),
            p.since.clone(),
            p.by.clone().unwrap_or_default(),
            p.signed_by.clone().unwrap_or_default(),
            joined(&p.hooks, ","),
            p.summary.clone(),
        ]
    };
    let head =
        ["NAME", "VERSION", "DIGEST", "ORIGIN", "ACTIVE", "SINCE", "BY", "SIGNED BY", "HOOKS", "SUMMARY"];
    table(&head, list.items.iter().map(row))
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

/// The expected form, for errors.
const SHAPE: &str = "a list of entries such as `- policy: timeslice`, or such a list under `stack:`";

/// A configuration file or a body of the API; other keys are not read.
#[derive(Deserialize)]
struct StackFile {
    #[serde(alias = "entries")]
    stack: Vec<NewStackEntry>,
}

/// A stack as the API answers it and `berth policy stack -o yaml` prints it; other keys are not read.
#[derive(Deserialize)]
struct Printed {
    entries: Vec<PrintedEntry>,
}

/// An entry of it. Its version and its statistics cannot be set.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PrintedEntry {
    policy: String,
    digest: Option<String>,
    #[serde(default)]
    parameters: Map<String, Value>,
    #[serde(default)]
    permissions: Permissions,
    #[serde(default)]
    on_fault: OnFault,
    #[serde(rename = "version")]
    _version: Option<IgnoredAny>,
    #[serde(rename = "record")]
    _record: Option<IgnoredAny>,
}

impl PrintedEntry {
    fn into_new(self) -> NewStackEntry {
        let Self { policy, digest, parameters, permissions, on_fault, .. } = self;
        NewStackEntry { policy, digest, parameters, permissions, on_fault }
    }
}

/// Parses the file of `berth policy activate`: a list of entries, any file with such a list under `stack` (a
/// configuration) or `entries` (what the API takes), or a stack that was printed. `name` is for errors.
///
/// # Errors
/// If it has another form; the message has the wrong fields, their positions, and the expected form.
fn parse_stack(name: &str, text: &[u8]) -> anyhow::Result<Vec<NewStackEntry>> {
    let wrong = |problems: Problems| anyhow!("{name} is not a stack: {problems}");
    let text =
        std::str::from_utf8(text).map_err(|e| anyhow!("{name} is not a stack: it is not UTF-8: {e}"))?;
    let document = Document::parse(text).map_err(wrong)?;
    let entries = match document.root_type() {
        RootType::List => document.read(LeftOut::default()).whole(),
        RootType::Map(keys) if keys.contains(&"revision") && keys.contains(&"entries") => document
            .read::<Printed>(LeftOut::default())
            .whole()
            .map(|printed| printed.entries.into_iter().map(PrintedEntry::into_new).collect()),
        RootType::Map(keys) if keys.contains(&"stack") || keys.contains(&"entries") => {
            document.read::<StackFile>(LeftOut::default()).whole().map(|whole| whole.stack)
        }
        RootType::Map(keys) if keys.contains(&"policy") => {
            bail!("{name} is not a stack: it is one entry and not a list; put `- ` before `policy:`")
        }
        other => bail!("{name} is not a stack: expected {SHAPE}; found {}", kind(&other)),
    };
    entries.map_err(wrong)
}

fn kind(found: &RootType<'_>) -> String {
    match found {
        RootType::Nothing => "an empty file (an empty list is `[]`)".into(),
        RootType::Map(keys) => {
            let keys: Vec<_> = keys.iter().copied().take(8).collect();
            format!("a mapping with the keys {}", keys.join(", "))
        }
        RootType::Text => "text".into(),
        RootType::List | RootType::Scalar => "a single value".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_a_configuration_and_a_body_are_taken() {
        for text in [
            "- policy: mixed\n- {policy: exclusive, onFault: deny}\n",
            "gpus: nvml\nstack: [{policy: mixed}, {policy: exclusive, parameters: {}}]\n",
            r#"{"entries": [{"policy": "mixed"}, {"policy": "exclusive"}]}"#,
        ] {
            let names: Vec<_> =
                parse_stack("f", text.as_bytes()).unwrap().into_iter().map(|e| e.policy).collect();
            assert_eq!(names, ["mixed", "exclusive"]);
        }
        assert!(parse_stack("f", b"[]").unwrap().is_empty());
    }

    #[test]
    fn a_stack_that_was_printed_can_be_activated() {
        let printed = serde_json::json!({
            "revision": 3, "source": "api", "by": "ada", "since": "2026-02-03T04:05:06.000Z",
            "fileStack": {"shadowed": false, "entries": []},
            "entries": [{
                "policy": "timeslice", "digest": "9f86d081884c", "version": "0.1.0", "parameters": {"replicas": 4},
                "permissions": {"deny": false, "shareMax": 4, "resources": [], "environment": []}, "onFault": "deny",
                "record": {"calls": {}, "faults": {"inARow": 0, "byKind": {}}, "suspended": false, "hooks": {}},
            }],
        });
        let text = berth_files::yaml::to_string(&printed).unwrap();
        let entries = parse_stack("f", text.as_bytes()).unwrap();
        assert_eq!((entries[0].policy.as_str(), entries[0].permissions.share_max), ("timeslice", 4));
        assert_eq!(serde_json::to_value(&entries[0].parameters).unwrap(), serde_json::json!({"replicas": 4}));
        let longer = text.clone() + "- policy: binpack\n";
        let (at, rest) = text.split_once("entries:").unwrap();
        let longer = if at.is_empty() { longer } else { format!("{at}entries:\n- policy: binpack{rest}") };
        assert_eq!(parse_stack("f", longer.as_bytes()).unwrap().len(), 2);
        let wrong = text.replace("replicas: 4", "\"replicas: 4\"");
        let error = parse_stack("f", wrong.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("entries[0].parameters"), "{error}");
    }

    #[test]
    fn an_error_names_the_key_and_what_was_expected() {
        for (text, says) in [
            (
                "- policy: mixed\n- policy: mixed\n  onFault: maybe\n",
                &["line 3", "[1].onFault", "expected one of `skip`, `deny`"][..],
            ),
            ("stack:\n- policy: mixed\n  parameters: 4\n", &["stack[0].parameters", "expected a mapping"]),
            (
                "- policy: mixed\n  permissions: {shareMax: lots}\n",
                &["permissions.shareMax", "a whole number from 0 to 4294967295"],
            ),
            ("- polizy: mixed\n", &["\"polizy\"", "did you mean `policy`?", "line 1"]),
            ("- onFault: skip\n", &["the key `policy` is missing"]),
            ("- mixed\n", &["[0]", "expected a mapping with keys such as `policy`"]),
            ("stack: mixed\n", &["stack", "expected a list"]),
            ("policy: mixed\n", &["put `- ` before"]),
            ("gpus: nvml\n", &["keys gpus", "under `stack:`"]),
            ("hello", &["found text"]),
            ("", &["found an empty file"]),
            ("a: [", &["not YAML", "line 1"]),
        ] {
            let text = parse_stack("f.yaml", text.as_bytes()).unwrap_err().to_string();
            assert!(text.starts_with("f.yaml is no"), "{text}");
            for word in says {
                assert!(text.contains(word), "{word}: {text}");
            }
            assert!(!text.contains("untagged"), "{text}");
        }
    }
}
