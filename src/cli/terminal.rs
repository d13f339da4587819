//! The terminal of a command that redraws its screen: the alternate screen, and keys that have an effect at once.

use anyhow::Context;
use rustix::termios::{LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{Read, Write, stdin, stdout};
use std::thread;

/// The alternate screen on and off (xterm: DECSET 1049), so that the shell's lines are there again afterwards.
const ALTERNATE: &str = "\u{1b}[?1049h";
const NORMAL: &str = "\u{1b}[?1049l";
/// Ctrl-D, which ends the input of other programs.
const END_OF_INPUT: u8 = 4;

/// A terminal that this program has set up for itself. Dropping it restores its former modes.
pub(crate) struct Terminal {
    /// The modes of standard input before; `None` if it is no terminal.
    modes: Option<Termios>,
}

impl Terminal {
    /// Switches to the alternate screen. `q` ends the program, as do Ctrl-C and the usual signals, also while it waits
    /// for an answer; each of them leaves the terminal as it was.
    ///
    /// # Errors
    /// If the modes of the terminal cannot be changed, or no thread can be started.
    pub(crate) fn open() -> anyhow::Result<Self> {
        let modes = if isatty(stdin()) { Some(tcgetattr(stdin())?) } else { None };
        let mut signals = Signals::new([SIGHUP, SIGINT, SIGTERM])?;
        let before = modes.clone();
        let wait = move || {
            if let Some(signal) = signals.forever().next() {
                restore(before.as_ref());
                // As a shell reports a program that a signal has ended.
                std::process::exit(128 + signal);
            }
        };
        thread::Builder::new().name("signals".to_owned()).spawn(wait).context("cannot start a thread")?;
        if let Some(modes) = &modes {
            let mut by_key = modes.clone();
            by_key.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
            tcsetattr(stdin(), OptionalActions::Flush, &by_key)?;
        }
        // From here on the modes are restored, whatever fails.
        let terminal = Self { modes };
        if let Some(before) = terminal.modes.clone() {
            let wait = move || {
                wait_for_quit();
                restore(Some(&before));
                std::process::exit(0);
            };
            thread::Builder::new().name("keys".to_owned()).spawn(wait).context("cannot start a thread")?;
        }
        write!(stdout(), "{ALTERNATE}")?;
        Ok(terminal)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        restore(self.modes.as_ref());
    }
}

/// Returns when the user quits, or the terminal is gone.
fn wait_for_quit() {
    let mut key = [0];
    while let Ok(1) = stdin().read(&mut key) {
        if matches!(key[0], b'q' | b'Q' | END_OF_INPUT) {
            return;
        }
    }
}

/// Leaves the alternate screen, and sets the modes from before. A terminal that is gone needs neither.
fn restore(modes: Option<&Termios>) {
    let _ = write!(stdout(), "{NORMAL}");
    let _ = stdout().flush();
    if let Some(modes) = modes {
        let _ = tcsetattr(stdin(), OptionalActions::Flush, modes);
    }
}
