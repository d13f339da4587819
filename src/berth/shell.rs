//! `berth completions` and `berth man`.

use crate::args::Cli;
use anyhow::Context;
use berth_cli::output::Out;
use clap::CommandFactory;
use clap_complete::Shell;
use std::path::Path;

/// Prints the shell completions of `berth`.
pub(super) fn completions(shell: Shell, out: &mut Out) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "berth", &mut text);
    out.text(&String::from_utf8(text).context("the completions are not UTF-8")?)
}

/// Prints the manual page of `berth`, or writes the pages of all commands to a folder.
pub(super) fn man(folder: Option<&Path>, out: &mut Out) -> anyhow::Result<()> {
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(Cli::command()).render(&mut page)?;
        return out.text(&String::from_utf8(page).context("the manual page is not UTF-8")?);
    };
    let context = || format!("cannot write manual pages into {}", folder.display());
    std::fs::create_dir_all(folder).with_context(context)?;
    clap_mangen::generate_to(Cli::command(), folder).with_context(context)?;
    let pages = std::fs::read_dir(folder).with_context(context)?.count();
    out.done(&format!(
        "wrote {pages} pages to {}; `man -l {}` shows one",
        folder.display(),
        folder.join("berth.1").display()
    ))
}
