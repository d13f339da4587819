//! Programs and folders of the same build as the program that runs.

use anyhow::{Context as _, ensure};
use std::path::{Path, PathBuf};

/// The path beside this program's own.
///
/// # Errors
/// If the system does not give this program's path.
pub fn beside_this(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("this program's own path")?;
    Ok(own.with_file_name(name))
}

/// The program that was given, or else the one beside this.
///
/// # Errors
/// If there is none, with what to do.
pub fn or_beside_this(given: Option<&Path>, name: &str) -> anyhow::Result<PathBuf> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => beside_this(name)?,
    };
    ensure!(
        path.is_file(),
        "{} does not exist: build it (cargo build -p {name}) or name it with --{name}",
        path.display()
    );
    Ok(path)
}
