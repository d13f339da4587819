//! Histories as JSON lines: first the seed of the world and what broke, then one event a line.

use crate::sim::simulation::event::Event;
use crate::sim::simulation::violation::Violation;
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Head {
    seed: u64,
    invariant: String,
    what: String,
}

/// One event as a line.
pub(crate) fn line(event: &Event) -> String {
    serde_json::to_string(event).unwrap_or_else(|error| error.to_string())
}

/// Writes the history that broke an invariant; answers where.
pub(crate) fn write(
    folder: &Path,
    seed: u64,
    events: &[Event],
    broke: &Violation,
) -> anyhow::Result<PathBuf> {
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let head = Head { seed, invariant: broke.invariant.into(), what: broke.what.clone() };
    let mut text = serde_json::to_string(&head)?;
    for event in events {
        text.push('\n');
        text.push_str(&line(event));
    }
    text.push('\n');
    let path = folder.join(format!("seed-{seed}.jsonl"));
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Reads a history back: the seed of its world, and its events.
pub(crate) fn read(path: &Path) -> anyhow::Result<(u64, Vec<Event>)> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let Some(head) = lines.next() else {
        bail!("{} is empty", path.display());
    };
    let head: Head = serde_json::from_str(head).with_context(|| format!("line 1 of {}", path.display()))?;
    let event = |(i, line): (usize, &str)| {
        serde_json::from_str(line).with_context(|| format!("line {} of {}", i + 2, path.display()))
    };
    Ok((head.seed, lines.enumerate().map(event).collect::<Result<_, _>>()?))
}
