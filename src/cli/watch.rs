//! `--watch`: a command repeated until it is interrupted.

use super::Request;
use super::allocation::AllocationCommand;
use super::client::Temporary;
use super::command::ClientCommand;
use super::decision::DecisionCommand;
use super::gpu::GpuCommand;
use super::output::{Out, Output, note};
use super::policy::PolicyCommand;
use super::process::ProcessCommand;
use super::trial::{ShadowCommand, TrialCommand};
use super::usage::BadUsage;
use std::io::IsTerminal;
use std::time::Duration;

/// Shortest interval: a list of 64 GPUs takes the daemon well under a millisecond.
const EVERY_MIN: Duration = Duration::from_millis(100);
/// Upper left corner, and nothing below it (ECMA-48: CUP, ED).
const CLEAR: &str = "\u{1b}[H\u{1b}[J";

/// Whether a command changes nothing, so that it can be repeated.
pub(super) fn is_repeatable(request: Request<'_>) -> bool {
    match request {
        Request::Command(command) => match command {
            ClientCommand::Gpu { command } => matches!(command, GpuCommand::List | GpuCommand::Show { .. }),
            ClientCommand::Allocation { command } => {
                matches!(command, AllocationCommand::List(_) | AllocationCommand::Show { .. })
            }
            ClientCommand::Process { command } => {
                matches!(command, ProcessCommand::List { .. } | ProcessCommand::Bypass)
            }
            ClientCommand::Decision { command } => matches!(command, DecisionCommand::List(_)),
            ClientCommand::Events(_) => false,
        },
        Request::Policy(command) => match command {
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
pub(super) fn run(
    every: Duration,
    out: &mut Out,
    mut look: impl FnMut(&mut Out) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if every < EVERY_MIN {
        let least = humantime::format_duration(EVERY_MIN);
        return Err(BadUsage(format!("--watch repeats at most every {least}")).into());
    }
    let terminal = std::io::stdout().is_terminal();
    let mut last: Option<Result<String, String>> = None;
    loop {
        let mut heard = out.capturing();
        let seen = match look(&mut heard) {
            Ok(()) => Ok(heard.captured()),
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

/// An empty line separates tables, and a marker YAML documents; JSON needs no separator.
fn separated(text: &str, follows: bool, out: &Out) -> String {
    let between = match (follows, out.form()) {
        (false, _) | (true, Output::Json) => "",
        (true, Output::Yaml) => "---\n",
        (true, Output::Table | Output::Wide) => "\n",
    };
    format!("{between}{text}")
}
