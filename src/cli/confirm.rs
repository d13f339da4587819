//! Questions before a change that takes something away. They are asked on a terminal only: a script has decided
//! already.

use crate::output::warn;
use anyhow::{Context, bail};
use std::io::{BufRead, IsTerminal, Write};

/// Warns of the effect of a change, and asks whether to make it, unless `yes` skips the question or standard input is
/// no terminal. Returns whether a person has confirmed it.
///
/// # Errors
/// If the answer is not yes, or cannot be read. Nothing has changed then.
pub(crate) fn warn_and_ask(effect: &str, question: &str, yes: bool) -> anyhow::Result<bool> {
    warn(effect);
    if yes || !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    write!(std::io::stderr(), "{question} [y/N] ")?;
    confirmed(&mut std::io::stdin().lock())?;
    Ok(true)
}

/// Reads the answer to a question; anything but a yes changes nothing.
fn confirmed(input: &mut impl BufRead) -> anyhow::Result<()> {
    let mut answer = String::new();
    input.read_line(&mut answer).context("reading the answer")?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => bail!("not confirmed; nothing was changed (--yes skips the confirmation)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_yes_confirms() {
        let answer = |text: &str| confirmed(&mut text.as_bytes()).map_err(|error| error.to_string());
        for yes in ["y\n", "Yes\n", " YES"] {
            assert_eq!(answer(yes), Ok(()), "{yes:?}");
        }
        for no in ["", "\n", "n\n", "no\n", "yess\n", "5eed0001-17\n"] {
            assert!(answer(no).unwrap_err().contains("nothing was changed"), "{no:?}");
        }
    }
}
