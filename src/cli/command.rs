//! The commands for a running daemon, and `--watch`, which repeats one until it is interrupted. Each help text
//! describes what the command does and shows how it is used.

use crate::allocation::{self, AllocationCommand};
use crate::client::{Client, Temporary};
use crate::comparison::{ShadowCommand, TrialCommand};
use crate::decision::{self, DecisionCommand};
use crate::driver::{self, DriverCommand};
use crate::endpoint::ClientArgs;
use crate::event::{self, EventsArgs};
use crate::gpu::{self, GpuCommand};
use crate::node::{self, NodeCommand};
use crate::output::{Out, Output, note};
use crate::policy::{self, PolicyCommand};
use crate::process::{self, ProcessCommand};
use crate::top::{self, TopArgs};
use crate::usage::BadUsage;
use clap::Subcommand;
use std::io::IsTerminal;
use std::time::Duration;

/// The commands for a running daemon, except those of `berth node` and `berth policy`.
#[derive(Subcommand, Debug)]
pub enum ClientCommand {
    /// List GPUs, cordon and drain them, remove vanished ones
    #[command(after_help = "\
A GPU is named by its index, its UUID, or the beginning of it:
  berth gpu list
  berth gpu show 0
  berth gpu cordon GPU-8a56 --reason 'row remapping pending'
  berth gpu uncordon GPU-8a56")]
    Gpu {
        /// What to do.
        #[command(subcommand)]
        command: GpuCommand,
    },
    /// List the allocations: which pod and container holds what
    #[command(after_help = "\
Examples:
  berth allocation list --namespace default
  berth allocation list --state all --limit 20
  berth allocation show 5eed0001-17 -o yaml")]
    Allocation {
        /// What to do.
        #[command(subcommand)]
        command: AllocationCommand,
    },
    /// List the processes on the GPUs, and those without an allocation
    Process {
        /// What to do.
        #[command(subcommand)]
        command: ProcessCommand,
    },
    /// List the decisions: the answers of policies, and the results
    #[command(after_help = "\
The decisions, newest first, with the answer of each policy:
  berth decision list --outcome denied
  berth decision list --pod trainer-0 -n default
  berth decision show 4711
  berth allocation explain ID")]
    Decision {
        /// What to do.
        #[command(subcommand)]
        command: DecisionCommand,
    },
    /// Release the GPUs' driver for its upgrade or a reset of a GPU
    Nvml {
        /// What to do.
        #[command(subcommand)]
        command: DriverCommand,
    },
    /// Show the use of GPUs and the pods on them, live
    #[command(after_help = "\
Shows utilization, memory in use, granted and in total (GiB), temperature and \
power of each GPU, and then the devices and the memory of each pod. `-`: not known. \
On a terminal it is redrawn every 2 s (-w 5: every 5 s) until q or Ctrl-C.
`berth gpu history` shows the last hours.
  berth top
  berth top --once -o json")]
    Top(TopArgs),
    /// Print changes on the node as they happen
    #[command(after_help = "\
Examples:
  berth events
  berth events --gpu 3 --kind gpuHealth,gpuDraining,gpuDrained
  berth events --since 1h             First those of the last hour
  berth events --no-follow            The latest events, without waiting
  berth events --since-id ID -o json  One JSON object a line, after the event ID")]
    Events(EventsArgs),
}

/// A command for a running daemon.
#[derive(Clone, Copy, Debug)]
pub enum DaemonCommand<'c> {
    /// All but those of `berth node` and `berth policy`.
    Client(&'c ClientCommand),
    /// Of `berth node`.
    Node(&'c NodeCommand),
    /// Of `berth policy`.
    Policy(&'c PolicyCommand),
}

/// Runs a command for a running daemon, with `--watch` again and again.
///
/// # Errors
/// If the daemon cannot be reached or refuses it; the message has advice.
pub fn run(command: DaemonCommand<'_>, args: &ClientArgs, out: &mut Out) -> anyhow::Result<()> {
    let repeats_itself = matches!(command, DaemonCommand::Client(ClientCommand::Top(_)));
    check_interval(args.watch)?;
    let Some(every) = args.watch.filter(|_| !repeats_itself) else { return ask(command, args, out) };
    if !is_repeatable(command) {
        return Err(not_watched().into());
    }
    watch(every, out, |out| ask(command, args, out))
}

/// The error of `--watch` with a command that changes something.
#[must_use]
pub fn not_watched() -> BadUsage {
    let message = "--watch works only with commands that change nothing: `list`, `show`, `process bypass`, `policy stack`";
    BadUsage(message.into())
}

fn ask(command: DaemonCommand<'_>, args: &ClientArgs, out: &mut Out) -> anyhow::Result<()> {
    let client = Client::new(args)?;
    match command {
        DaemonCommand::Client(command) => match command {
            ClientCommand::Gpu { command } => gpu::run(command, &client, out),
            ClientCommand::Allocation { command } => allocation::run(command, &client, out),
            ClientCommand::Process { command } => process::run(command, &client, out),
            ClientCommand::Decision { command } => decision::run(command, &client, out),
            ClientCommand::Nvml { command } => driver::run(command, &client, out),
            ClientCommand::Events(args) => event::run(args, &client, out),
            ClientCommand::Top(top) => top::run(top, args.watch, &client, out),
        },
        DaemonCommand::Node(command) => node::run(command, &client, out),
        DaemonCommand::Policy(command) => policy::run(command, &client, out),
    }
}

/// Shortest interval: a list of 64 GPUs takes the daemon well under a millisecond.
const EVERY_MIN: Duration = Duration::from_millis(100);
/// Upper left corner, and nothing below it (ECMA-48: CUP, ED).
const CLEAR: &str = "\u{1b}[H\u{1b}[J";

/// Whether a command changes nothing, so that it can be repeated.
fn is_repeatable(command: DaemonCommand<'_>) -> bool {
    match command {
        DaemonCommand::Client(command) => match command {
            ClientCommand::Gpu { command } => {
                matches!(command, GpuCommand::List | GpuCommand::Show { .. } | GpuCommand::History(_))
            }
            ClientCommand::Allocation { command } => {
                matches!(command, AllocationCommand::List(_) | AllocationCommand::Show { .. })
            }
            ClientCommand::Process { command } => {
                matches!(command, ProcessCommand::List { .. } | ProcessCommand::Bypass)
            }
            ClientCommand::Decision { command } => matches!(command, DecisionCommand::List(_)),
            ClientCommand::Nvml { .. } | ClientCommand::Events(_) | ClientCommand::Top(_) => false,
        },
        DaemonCommand::Node(NodeCommand::Show) => true,
        DaemonCommand::Policy(command) => match command {
            PolicyCommand::List | PolicyCommand::Stack => true,
            PolicyCommand::Trial(trial) => matches!(
                trial,
                TrialCommand::Shadow { command: ShadowCommand::List | ShadowCommand::Show { .. } }
            ),
            _ => false,
        },
    }
}

/// Repeats a command until it is interrupted. A terminal shows the newest answer alone; elsewhere each answer that
/// differs from the one before is printed. It continues while the daemon cannot be reached.
///
/// # Errors
/// The first error of the command that is not [`Temporary`].
fn watch(
    every: Duration,
    out: &mut Out,
    mut ask: impl FnMut(&mut Out) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let terminal = std::io::stdout().is_terminal();
    let mut last: Option<Result<String, String>> = None;
    loop {
        let mut captured = out.capturing();
        let seen = match ask(&mut captured) {
            Ok(()) => Ok(captured.captured()),
            Err(error) if error.is::<Temporary>() => Err(format!("{error:#}")),
            Err(error) => return Err(error),
        };
        // The exact way in which it cannot be reached does not matter.
        let still_away = seen.is_err() && last.as_ref().is_some_and(Result::is_err);
        if last.as_ref() != Some(&seen) && !still_away {
            match &seen {
                Ok(text) if terminal => out.text(&format!("{CLEAR}{text}"))?,
                Ok(text) => out.text(&separated(text, last.is_some(), out))?,
                Err(why) => note(&format!("{why}; trying on")),
            }
            last = Some(seen);
        }
        if out.is_closed() {
            return Ok(());
        }
        std::thread::sleep(every);
    }
}

/// Checks the interval of `--watch`.
fn check_interval(every: Option<Duration>) -> Result<(), BadUsage> {
    if every.is_some_and(|every| every < EVERY_MIN) {
        let least = humantime::format_duration(EVERY_MIN);
        return Err(BadUsage(format!("--watch takes an interval of at least {least}, such as --watch=2s")));
    }
    Ok(())
}

/// An empty line separates tables, and a marker YAML documents; JSON needs no separator.
fn separated(text: &str, follows: bool, out: &Out) -> String {
    let between = match (follows, out.form()) {
        (false, _) | (true, Output::Json) => "",
        (true, Output::Yaml) => "---\n",
        (true, Output::Table | Output::Wide) => "\n",
    };
    format!("{between}{text}")
}
