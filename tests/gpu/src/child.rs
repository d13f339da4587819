//! This program again, for work that must not be in the checking process: an open library keeps the driver busy, a
//! fault of CUDA lasts as long as its process, and a hung call cannot be ended.
#![allow(unsafe_code, reason = "what a child does before it becomes another program")]

use anyhow::{Context as _, ensure};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Longest part of a program's errors that is shown, bytes.
const ERRORS_BYTES: usize = 2000;

/// Makes the child end with the thread that starts it, also if that thread is killed, so that nothing is left running
/// on the machine.
pub(crate) fn ends_with_this_thread(command: &mut Command) {
    // SAFETY: one system call, which may be made between fork and exec.
    unsafe {
        command.pre_exec(|| Ok(set_parent_process_death_signal(Some(Signal::KILL))?));
    }
}

/// This program with a hidden subcommand.
pub(crate) fn command(subcommand: &str, arguments: &[&OsStr]) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe().context("no path of this program")?);
    command.arg(subcommand).args(arguments).stdin(Stdio::null());
    ends_with_this_thread(&mut command);
    Ok(command)
}

/// Runs a hidden subcommand to its end.
///
/// # Errors
/// If it fails; with what it wrote to standard error.
pub(crate) fn output(subcommand: &str, arguments: &[&OsStr]) -> anyhow::Result<String> {
    let output = command(subcommand, arguments)?.output().context("cannot start this program again")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}", failure(subcommand, &output.status.to_string(), &errors));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn failure(what: &str, status: &str, errors: &str) -> String {
    let start = errors.len().saturating_sub(ERRORS_BYTES);
    let start = (start..=errors.len()).find(|at| errors.is_char_boundary(*at)).unwrap_or(errors.len());
    let errors = errors[start..].trim();
    if errors.is_empty() { format!("{what} ended with {status}") } else { errors.to_owned() }
}

/// A hidden subcommand that works until it is stopped; killed when dropped.
pub(crate) struct Running {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Running {
    /// Starts it.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub(crate) fn start(subcommand: &str, arguments: &[&OsStr]) -> anyhow::Result<Self> {
        let mut command = command(subcommand, arguments)?;
        // Its standard input ends with this value, too.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start this program again")?;
        let output = BufReader::new(child.stdout.take().context("the child has no output")?);
        Ok(Self { child, output })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line of its output.
    ///
    /// # Errors
    /// If it ends instead; with what it wrote to standard error.
    pub(crate) fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? > 0 {
            return Ok(line.trim().to_owned());
        }
        let status = self.child.wait()?;
        let mut errors = String::new();
        self.child.stderr.take().context("the child has no errors")?.read_to_string(&mut errors)?;
        anyhow::bail!(failure("the child", &status.to_string(), &errors))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
