//! What was read from files that their writers do not replace as a whole. `nvidia-ctk runtime configure` truncates the
//! runtime's configuration and then writes it, so that a reader may see an empty file or half of one.

use std::time::{Duration, Instant};

/// How long a changed reading must stay the same until it is used.
pub(super) const SETTLE_TIME: Duration = Duration::from_secs(1);

/// The last reading that was not just one of a file in the middle of a write.
#[derive(Default)]
pub(super) struct Settled<T> {
    used: Option<T>,
    /// Another reading, and when it was seen first.
    changed: Option<(T, Instant)>,
}

impl<T: Clone + PartialEq> Settled<T> {
    /// Whether the last reading was another one than the one in use.
    pub(super) fn is_settling(&self) -> bool {
        self.changed.is_some()
    }

    /// The reading to use after this one: the first, and then each that two readings in a row agree on.
    pub(super) fn after(&mut self, read: T, now: Instant) -> T {
        let used = self.used.get_or_insert_with(|| read.clone());
        let since =
            self.changed.take().filter(|(changed, _)| *changed == read).map_or(now, |(_, since)| since);
        if *used != read {
            if now.duration_since(since) >= SETTLE_TIME {
                *used = read;
            } else {
                self.changed = Some((read, since));
            }
        }
        used.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_reading_is_used_once_it_was_seen_for_a_second() {
        let (mut settled, start) = (Settled::default(), Instant::now());
        let mut after = |read, ms| settled.after(read, start + Duration::from_millis(ms));
        assert_eq!(after("full", 0), "full", "the first one at once");
        assert_eq!(after("", 2_000), "full", "half-written");
        assert_eq!(after("full", 4_000), "full");
        assert_eq!(after("", 6_000), "full", "it is counted from here");
        assert_eq!(after("", 6_010), "full", "two readings of one moment");
        assert_eq!(after("new", 6_999), "full");
        assert_eq!(after("", 7_500), "full");
        assert_eq!(after("new", 8_000), "full");
        assert_eq!(after("new", 10_000), "new");
    }
}
