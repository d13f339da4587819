//! Paths of programs and folders of the same build as this program.

use anyhow::{Context as _, ensure};
use std::path::{Path, PathBuf};

/// The path of `name` in this program's folder.
///
/// # Errors
/// If the system does not give this program's path.
pub fn beside_this(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("this program's path")?;
    Ok(own.with_file_name(name))
}

/// The given program, or the one in this program's folder.
///
/// # Errors
/// If the program does not exist; with the remedy.
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
