//! The built daemon as a child process of a test program.

use anyhow::{Context as _, ensure};
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

/// A running daemon; killed when dropped.
pub struct Serving {
    /// The daemon's process.
    pub child: Child,
    /// The admin API's URL without `/api/v1`.
    pub origin: String,
}

impl Serving {
    /// Starts the daemon, and reads its log until it logs its API's address.
    ///
    /// # Errors
    /// If the daemon does not start, or ends before that; with its log.
    pub fn start(mut command: Command) -> anyhow::Result<Self> {
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let spawned = command.spawn();
        let child = spawned.with_context(|| format!("cannot start {}", command.get_program().display()))?;
        let mut serving = Self { child, origin: String::new() };
        serving.origin = read_origin(&mut serving.child)?;
        Ok(serving)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The admin API's URL without `/api/v1`, if this is the line of the log that shows it.
pub fn origin(line: &str) -> Option<String> {
    let (_, rest) = line.split_once("Swagger UI at ")?;
    rest.split("/swagger-ui").next().map(str::to_owned)
}

/// Reads the API's address from the log. A thread reads the rest of the log, so that the daemon never blocks
/// on a full pipe.
fn read_origin(child: &mut Child) -> anyhow::Result<String> {
    let mut log = BufReader::new(child.stderr.take().context("the daemon has no log pipe")?);
    let mut text = String::new();
    loop {
        let mut line = String::new();
        ensure!(log.read_line(&mut line)? > 0, "the daemon ended before its API answered: {text}");
        text += &line;
        if let Some(origin) = origin(&line) {
            std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
            return Ok(origin);
        }
    }
}
