//! The terminal of a command that redraws its screen: the alternate screen, and keys that are read one by one.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use std::io::{Stdin, Write, stdin, stdout};
use std::time::Duration;

/// The alternate screen on and off (xterm: DECSET 1049), so that the shell's lines are there again afterwards.
const ALTERNATE: &str = "\u{1b}[?1049h";
const NORMAL: &str = "\u{1b}[?1049l";
/// Ctrl-C and Ctrl-D, which are keys like others meanwhile.
const INTERRUPT: u8 = 3;
const END_OF_INPUT: u8 = 4;

/// A terminal in use by this program; restored when it is dropped.
pub(crate) struct Terminal {
    /// Standard input and its modes before; `None` if it is no terminal.
    input: Option<(Stdin, Termios)>,
}

impl Terminal {
    /// Switches to the alternate screen. Where standard input is a terminal, a key is read at once, without an echo.
    pub(crate) fn open() -> anyhow::Result<Self> {
        let input = stdin();
        let modes = if isatty(&input) { Some(tcgetattr(&input)?) } else { None };
        if let Some(modes) = &modes {
            let mut by_key = modes.clone();
            by_key.local_modes -= LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
            tcsetattr(&input, OptionalActions::Flush, &by_key)?;
        }
        // From here on the modes are restored, whatever fails.
        let terminal = Self { input: modes.map(|modes| (input, modes)) };
        write!(stdout(), "{ALTERNATE}")?;
        Ok(terminal)
    }

    /// Waits for a time. Returns whether the user wants to quit: by `q`, Ctrl-C or Ctrl-D.
    pub(crate) fn wait_for_quit(&self, time: Duration) -> anyhow::Result<bool> {
        let Some((input, _)) = &self.input else {
            std::thread::sleep(time);
            return Ok(false);
        };
        let timeout =
            Timespec { tv_sec: i64::try_from(time.as_secs())?, tv_nsec: i64::from(time.subsec_nanos()) };
        match poll(&mut [PollFd::new(input, PollFlags::IN)], Some(&timeout)) {
            // A signal, such as that of a terminal whose size has changed: the screen is drawn again.
            Ok(0) | Err(rustix::io::Errno::INTR) => return Ok(false),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        let mut keys = [0; 64];
        let count = rustix::io::read(input, &mut keys)?;
        // Without any, the terminal is gone.
        Ok(count == 0
            || keys[..count].iter().any(|key| matches!(*key, b'q' | b'Q' | INTERRUPT | END_OF_INPUT)))
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // A terminal that is gone needs no modes.
        if let Some((input, modes)) = &self.input {
            let _ = tcsetattr(input, OptionalActions::Flush, modes);
        }
        let _ = write!(stdout(), "{NORMAL}");
        let _ = stdout().flush();
    }
}
