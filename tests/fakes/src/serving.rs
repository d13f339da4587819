//! The built daemon as a process beside the program that tries it.

use anyhow::{Context as _, ensure};
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

/// A daemon that runs; killed when dropped.
pub struct Serving {
    /// Its process.
    pub child: Child,
    /// The admin API, up to and without `/api/v1`.
    pub origin: String,
}

impl Serving {
    /// Starts it, and reads on until it says where its API listens.
    ///
    /// # Errors
    /// If it does not start, or ends before it says so; with what it said.
    pub fn start(mut command: Command) -> anyhow::Result<Self> {
        command.env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let spawned = command.spawn();
        let child = spawned.with_context(|| format!("{} does not start", command.get_program().display()))?;
        let mut serving = Self { child, origin: String::new() };
        serving.origin = listening(&mut serving.child)?;
        Ok(serving)
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Goes on emptying the pipe afterwards, so that the daemon never waits for room in it.
fn listening(child: &mut Child) -> anyhow::Result<String> {
    let mut log = BufReader::new(child.stderr.take().context("no log")?);
    let mut said = String::new();
    loop {
        let mut line = String::new();
        ensure!(log.read_line(&mut line)? > 0, "it ended before its API answered: {said}");
        said += &line;
        if let Some((_, rest)) = line.split_once("Swagger UI at ") {
            let origin = rest.split("/swagger-ui").next().unwrap_or_default().to_owned();
            std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
            return Ok(origin);
        }
    }
}
