//! Times as texts.

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
