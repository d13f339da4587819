//! Where the demo prints: on a terminal one screen that is redrawn in place, elsewhere plain lines.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;

/// Upper left corner (ECMA-48: CUP), the rest of a line (EL), the rest of the screen (ED).
const HOME: &str = "\u{1b}[H";
const REST_OF_LINE: &str = "\u{1b}[K";
const REST_OF_SCREEN: &str = "\u{1b}[J";

/// The output of the demo.
pub(crate) struct Screen {
    /// Absent if lines are printed one after another.
    frame: Option<Mutex<Frame>>,
}

/// What a terminal shows, from top to bottom.
#[derive(Default)]
struct Frame {
    /// The addresses, and how to use them.
    head: String,
    /// The step of the tour.
    step: String,
    /// What happened last.
    status: String,
    /// The GPUs.
    table: String,
}

impl Screen {
    /// In place on a terminal, except for a tour that is run once, whose lines are read afterwards.
    pub(crate) fn new(once: bool) -> Self {
        let is_live = !once && std::io::stdout().is_terminal();
        if is_live {
            print(&format!("{HOME}{REST_OF_SCREEN}"));
        }
        Self { frame: is_live.then(Mutex::default) }
    }

    /// Whether it is redrawn in place.
    pub(crate) fn is_live(&self) -> bool {
        self.frame.is_some()
    }

    /// The addresses. As lines they are printed once.
    pub(crate) fn head(&self, text: &str) {
        self.change(&format!("{text}\n"), |frame| text.clone_into(&mut frame.head));
    }

    /// A step of the tour.
    pub(crate) fn step(&self, text: &str) {
        self.change(text, |frame| {
            text.clone_into(&mut frame.step);
            frame.status.clear();
        });
    }

    /// Something that happened.
    pub(crate) fn say(&self, text: &str) {
        self.change(text, |frame| text.clone_into(&mut frame.status));
    }

    /// The GPUs.
    pub(crate) fn table(&self, text: &str) {
        self.change(text, |frame| text.clone_into(&mut frame.table));
    }

    fn change(&self, line: &str, change: impl FnOnce(&mut Frame)) {
        let Some(frame) = &self.frame else {
            print(&format!("{line}\n"));
            return;
        };
        // A panic of another thread leaves a frame that can be drawn.
        let mut frame = frame.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        change(&mut frame);
        print(&frame.text());
    }
}

impl Frame {
    /// The frame over the one before. The status is one line that is always there, so that nothing below it moves.
    fn text(&self) -> String {
        let status = self.status.lines().next().unwrap_or_default();
        let parts = [self.head.as_str(), "", &self.step, status, "", &self.table];
        let lines = parts.iter().flat_map(|part| part.split('\n'));
        let drawn: String = lines.map(|line| format!("{line}{REST_OF_LINE}\n")).collect();
        format!("{HOME}{drawn}{REST_OF_SCREEN}")
    }
}

/// A closed standard output (`| head`) is noticed by the next signal, not here.
fn print(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_has_the_addresses_one_status_line_and_the_table() {
        let mut frame = Frame {
            head: "page  http://x/\ntoken  t".into(),
            step: "1. whole GPUs".into(),
            table: "GPU  0".into(),
            ..Frame::default()
        };
        let rows = frame.text().lines().count();
        frame.status = "+ pod a\nmore".into();
        assert_eq!(frame.text().lines().count(), rows, "an event moves nothing");
        let text = frame.text();
        assert!(text.starts_with("\u{1b}[Hpage  http://x/\u{1b}[K\ntoken  t\u{1b}[K\n\u{1b}[K\n1. whole GPUs\u{1b}[K\n+ pod a\u{1b}[K\n"), "{text:?}");
        assert!(text.ends_with("GPU  0\u{1b}[K\n\u{1b}[J"), "{text:?}");
    }
}
