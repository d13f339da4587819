//! Times as ages (`3m`), in the style of kubectl, and durations (`10m`) in place of times.

use std::time::{Duration, SystemTime};

/// How long ago a time of the API was, by this machine's clock; `-` if it cannot be read.
pub(crate) fn age(at: &str) -> String {
    age_at(at, SystemTime::now())
}

/// As [`age`], of a time that may be missing.
pub(crate) fn age_of(at: Option<&str>) -> String {
    at.map_or_else(|| "-".into(), age)
}

fn age_at(at: &str, now: SystemTime) -> String {
    // A daemon whose clock is ahead of this machine's answers with times of the future.
    humantime::parse_rfc3339(at)
        .map_or_else(|_| "-".into(), |then| short_duration(now.duration_since(then).unwrap_or_default()))
}

/// A duration with one or two units, the second one only while the first is small.
fn short_duration(duration: Duration) -> String {
    let s = duration.as_secs();
    let (minutes, hours, days) = (s / 60, s / 3600, s / 86_400);
    match s {
        0..120 => format!("{s}s"),
        120..600 if !s.is_multiple_of(60) => format!("{minutes}m{}s", s % 60),
        120..10_800 => format!("{minutes}m"),
        10_800..28_800 if !minutes.is_multiple_of(60) => format!("{hours}h{}m", minutes % 60),
        10_800..172_800 => format!("{hours}h"),
        _ => format!("{days}d"),
    }
}

/// Parses a time of a query: `10m` is the time 10 minutes ago; `today`, `yesterday` and a date are their beginning
/// (UTC). A time is returned unchanged.
///
/// # Errors
/// If it is none of these, or before 1970.
pub(crate) fn parse_time_or_duration(text: &str) -> Result<String, String> {
    let now = SystemTime::now();
    if let Some(day) = beginning_of_day(text, now) {
        return Ok(humantime::format_rfc3339_millis(day).to_string());
    }
    let Ok(duration) = humantime::parse_duration(text) else {
        return match humantime::parse_rfc3339_weak(text.trim_end_matches('Z')) {
            Ok(_) => Ok(text.to_owned()),
            Err(_) => {
                Err("give a duration such as 30m, `today`, `yesterday`, a date, or a time such as 2026-02-03T04:05:06Z".into())
            }
        };
    };
    let at = now.checked_sub(duration).filter(|at| *at >= SystemTime::UNIX_EPOCH);
    at.map(|at| humantime::format_rfc3339_millis(at).to_string()).ok_or_else(|| "it is too long ago".into())
}

/// The beginning of the day that a word or a date names.
fn beginning_of_day(text: &str, now: SystemTime) -> Option<SystemTime> {
    const DAY: Duration = Duration::from_secs(86_400);
    let since_1970 = now.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    let today = now
        - Duration::from_secs(since_1970.as_secs() % DAY.as_secs())
        - Duration::from_nanos(since_1970.subsec_nanos().into());
    match text {
        "today" => Some(today),
        "yesterday" => today.checked_sub(DAY),
        date => humantime::parse_rfc3339(&format!("{date}T00:00:00Z")).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_one_or_two_units() {
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (185, "3m5s"),
            (600, "10m"),
            (10_799, "179m"),
            (10_800, "3h"),
            (11_100, "3h5m"),
            (28_800, "8h"),
            (172_799, "47h"),
            (172_800, "2d"),
            (40 * 86_400, "40d"),
        ] {
            assert_eq!(short_duration(Duration::from_secs(seconds)), text, "{seconds}");
        }
        let now = humantime::parse_rfc3339("2026-02-03T04:05:06.500Z").unwrap();
        assert_eq!(age_at("2026-02-03T04:00:06.000Z", now), "5m");
        assert_eq!(age_at("2026-02-03T05:05:06.000Z", now), "0s", "a clock that is ahead");
        assert_eq!(age_at("some day", now), "-");
    }

    #[test]
    fn a_duration_becomes_a_time_in_the_past_and_a_time_stays_unchanged() {
        let before = SystemTime::now() - Duration::from_secs(600);
        let at = humantime::parse_rfc3339(&parse_time_or_duration("10m").unwrap()).unwrap();
        let off = at.duration_since(before).unwrap_or_else(|early| early.duration());
        assert!(off < Duration::from_secs(5), "{off:?}");
        for text in ["2026-02-03T04:05:06Z", "2026-02-03 04:05:06"] {
            assert_eq!(parse_time_or_duration(text).as_deref(), Ok(text));
        }
        for text in ["1000years", "10", "someday", "2026-02-03T04:05:06+02:00"] {
            assert!(parse_time_or_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_day_begins_at_midnight() {
        let now = humantime::parse_rfc3339("2026-02-03T04:05:06.789Z").unwrap();
        for (text, begins) in [
            ("today", "2026-02-03T00:00:00Z"),
            ("yesterday", "2026-02-02T00:00:00Z"),
            ("2026-01-31", "2026-01-31T00:00:00Z"),
        ] {
            let day = beginning_of_day(text, now).unwrap();
            assert_eq!(humantime::format_rfc3339(day).to_string(), begins, "{text}");
        }
        for text in ["someday", "2026-02-30", "2026-02-03T04:05:06Z", "10m"] {
            assert_eq!(beginning_of_day(text, now), None, "{text}");
        }
    }
}
