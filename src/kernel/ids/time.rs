//! Time as a value, and as text: callers pass the time, and the kernel reads no clock.

/// One reading of both clocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Milliseconds since 1970. May jump; only for times that people read.
    pub wall_ms: u64,
    /// Milliseconds since a fixed time of this process, monotonic. All intervals are measured with it; it
    /// restarts with the process.
    pub mono_ms: u64,
}

impl Now {
    /// Whether at least `wait_ms` have passed since the monotonic time `since_ms`.
    #[must_use]
    pub fn passed(self, since_ms: u64, wait_ms: u64) -> bool {
        self.mono_ms >= since_ms.saturating_add(wait_ms)
    }
}

/// The intervals of the kernel's rules. The program uses the defaults; tests shorten them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long an id that is neither offered nor held stays listed as Unhealthy before it leaves the list
    /// (I10).
    pub retire_ms: u64,
    /// How long an id stays listed after an Allocate named it (I10).
    pub allocate_grace_ms: u64,
    /// Least time between the two reconcile passes that end an allocation.
    pub passes_apart_ms: u64,
    /// Least time between the creation of kubelet.sock and the end of an allocation.
    pub kubelet_settle_ms: u64,
    /// Least time between our reply and the end of an allocation.
    pub reply_settle_ms: u64,
    /// How long a GPU stays unhealthy after its last bad reading, unless the triage gives another time.
    pub quiet_ms: u64,
    /// How long all scans must find a GPU empty before it counts as drained.
    pub drained_ms: u64,
    /// The same for a GPU whose processes are not visible: longer than a pod's grace period.
    pub drained_unseen_ms: u64,
    /// How long a process must be on a GPU without an allocation before it is reported as a bypass: a
    /// holder is learned up to seconds after its container starts, and a process may outlive its pod.
    pub bypass_ms: u64,
    /// Least time between the order to move a GPU to the kubelet's other API and the move: a scheduler that has not seen the
    /// order may allocate the GPU until then.
    pub via_ms: u64,
    /// Time after which the eviction of a pod that still runs is requested again: that of `kubectl drain`.
    pub evict_again_ms: u64,
    /// Denials of one resource in this window count together.
    pub breaker_window_ms: u64,
    /// The breaker's first pause; doubles up to `breaker_pause_max_ms`.
    pub breaker_pause_ms: u64,
    /// The breaker's longest pause.
    pub breaker_pause_max_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            retire_ms: 60_000,
            allocate_grace_ms: 30_000,
            passes_apart_ms: 5_000,
            kubelet_settle_ms: 30_000,
            reply_settle_ms: 30_000,
            quiet_ms: 300_000,
            drained_ms: 10_000,
            drained_unseen_ms: 60_000,
            bypass_ms: 10_000,
            via_ms: 30_000,
            evict_again_ms: 5_000,
            breaker_window_ms: 60_000,
            breaker_pause_ms: 10_000,
            breaker_pause_max_ms: 300_000,
        }
    }
}

/// Milliseconds since 1970 as RFC 3339 in UTC, to the millisecond.
#[must_use]
pub fn rfc3339(wall_ms: u64) -> String {
    let (days, ms) = (wall_ms / 86_400_000, wall_ms % 86_400_000);
    let (year, month, day) = date(days);
    let (s, ms) = (ms / 1000, ms % 1000);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{ms:03}Z", s / 3600, s / 60 % 60, s % 60)
}

/// Milliseconds since 1970 as RFC 3339 in UTC, to the second.
#[must_use]
pub fn rfc3339_seconds(wall_ms: u64) -> String {
    let mut text = rfc3339(wall_ms);
    text.truncate(text.len() - ".000Z".len());
    text + "Z"
}

/// Days since 1970 as a date of the Gregorian calendar. Counted in years that begin in March, so
/// that the leap day is the last one; 400 years have 146097 days.
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // from 0000-03-01
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::{rfc3339, rfc3339_seconds};

    #[test]
    fn a_time_is_formatted_as_date_prints_it() {
        for (s, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (951_868_800, "2000-03-01T00:00:00.000Z"),
            (1_709_164_800, "2024-02-29T00:00:00.000Z"),
            (1_735_689_599, "2024-12-31T23:59:59.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(s * 1000), text);
        }
        assert_eq!(rfc3339(1_234), "1970-01-01T00:00:01.234Z");
        assert_eq!(rfc3339_seconds(1_999), "1970-01-01T00:00:01Z");
    }
}
