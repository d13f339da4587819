//! Amounts as the API server writes them (apimachinery `pkg/api/resource`: `Quantity`).

/// The amount in units of 1, rounded up. `None` for text that the API server does not write, a negative amount, or one above
/// `u64::MAX`.
pub(crate) fn amount(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, suffix) = text.split_at(end);
    let number: u64 = number.parse().ok()?;
    let divided_by = |divisor: u64| Some(number.div_ceil(divisor));
    let times = |factor: Option<u64>| number.checked_mul(factor?);
    match suffix {
        "" => Some(number),
        "n" => divided_by(1_000_000_000),
        "u" => divided_by(1_000_000),
        "m" => divided_by(1_000),
        _ => {
            let of = |suffixes: [&str; 6]| suffixes.iter().position(|one| *one == suffix);
            let power = |at: usize| u32::try_from(at + 1).ok();
            let binary = of(["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"]).and_then(power);
            let decimal = of(["k", "M", "G", "T", "P", "E"]).and_then(power);
            let exponent = || suffix.strip_prefix(['e', 'E'])?.parse::<u32>().ok();
            let factor = binary.map(|power| 1_024_u64.checked_pow(power));
            let factor = factor.or_else(|| decimal.map(|power| 1_000_u64.checked_pow(power)));
            times(factor.or_else(|| exponent().map(|power| 10_u64.checked_pow(power)))?)
        }
    }
}

/// This number of MiB as the API server writes it: in the largest binary unit of which it is a multiple.
pub(crate) fn mebibytes(mib: u64) -> String {
    let (mut value, mut units) = (mib, ["Mi", "Gi", "Ti", "Pi"].iter());
    let mut unit = units.next();
    while value != 0 && value.is_multiple_of(1024) {
        let Some(next) = units.next() else { break };
        (value, unit) = (value / 1024, Some(next));
    }
    if value == 0 { "0".to_owned() } else { format!("{value}{}", unit.copied().unwrap_or_default()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_the_api_server_writes_them() {
        for (text, read) in [
            ("0", Some(0)),
            ("12", Some(12)),
            ("2k", Some(2_000)),
            ("20Gi", Some(20 << 30)),
            ("20389Mi", Some(20_389 << 20)),
            ("1500m", Some(2)),
            ("1E", Some(1_000_000_000_000_000_000)),
            ("3e6", Some(3_000_000)),
            ("x", None),
            ("", None),
            ("-1", None),
            ("1.5Gi", None),
            ("1Zi", None),
            ("99Ei", None),
        ] {
            assert_eq!(amount(text), read, "{text}");
        }
    }

    #[test]
    fn memory_is_written_as_the_api_server_writes_it() {
        for (mib, text) in [(81_559, "81559Mi"), (81_920, "80Gi"), (1024 * 1024, "1Ti"), (1, "1Mi"), (0, "0")]
        {
            assert_eq!(mebibytes(mib), text);
        }
    }
}
