//! What was measured, row by row, and the table and the line that the run ends with.

use super::subject::Subject;
use crate::bench::table::{aligned, digits, megabytes, time};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What is measured, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Row {
    Prepare,
    PrepareP99,
    Allocate,
    AllocateP99,
    Get,
    GetP99,
    OfAllocate,
    BeyondParts,
    Unprepare,
    Burst,
    BurstFailed,
    Slices,
    MemoryWithout,
    Memory,
    MemoryAdded,
    MemoryAfterCalls,
}

/// How a value is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Seconds.
    Time,
    Bytes,
    Count,
    Times,
}

const MILLISECOND: f64 = 1e-3;
const MEGABYTE: f64 = 1e6;

impl Row {
    const ALL: [Self; 16] = [
        Self::Prepare,
        Self::PrepareP99,
        Self::Allocate,
        Self::AllocateP99,
        Self::Get,
        Self::GetP99,
        Self::OfAllocate,
        Self::BeyondParts,
        Self::Unprepare,
        Self::Burst,
        Self::BurstFailed,
        Self::Slices,
        Self::MemoryWithout,
        Self::Memory,
        Self::MemoryAdded,
        Self::MemoryAfterCalls,
    ];

    /// Its name, its unit, and what Berth's value must not exceed.
    fn describe(self) -> (&'static str, Unit, Option<f64>) {
        match self {
            Self::Prepare => ("prepare of a claim of 1 GPU, median", Unit::Time, None),
            Self::PrepareP99 => ("the same, 99th percentile", Unit::Time, None),
            Self::Allocate => {
                ("Allocate of 1 GPU by the device plugin, store on disk, median", Unit::Time, None)
            }
            Self::AllocateP99 => ("the same, 99th percentile", Unit::Time, None),
            Self::Get => ("GET of a claim from the API server, median", Unit::Time, None),
            Self::GetP99 => ("the same, 99th percentile", Unit::Time, None),
            Self::OfAllocate => ("prepare / Allocate, medians", Unit::Times, None),
            Self::BeyondParts => ("prepare minus Allocate and GET, medians", Unit::Time, Some(MILLISECOND)),
            Self::Unprepare => ("unprepare of a claim of 1 GPU, median", Unit::Time, None),
            Self::Burst => ("32 claims prepared at once, until the last one", Unit::Time, Some(2.0)),
            Self::BurstFailed => ("of these claims, those that were not prepared", Unit::Count, Some(0.0)),
            Self::Slices => ("all ResourceSlices deleted, until the pool is complete", Unit::Time, Some(1.0)),
            Self::MemoryWithout => ("memory at rest (PSS), without the DRA driver", Unit::Bytes, None),
            Self::Memory => ("memory at rest (PSS), with the DRA driver", Unit::Bytes, None),
            Self::MemoryAdded => {
                ("memory at rest (PSS) that the driver adds", Unit::Bytes, Some(2.0 * MEGABYTE))
            }
            Self::MemoryAfterCalls => ("memory after all calls (PSS)", Unit::Bytes, None),
        }
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        // A difference may be negative.
        let sign = if value < 0.0 { "-" } else { "" };
        match self {
            Self::Time => format!("{sign}{}", time(Duration::from_secs_f64(value.abs()))),
            Self::Bytes => format!("{sign}{}", megabytes(value.abs())),
            Self::Count => format!("{value:.0}"),
            Self::Times => format!("{} x", digits(value)),
        }
    }
}

/// The values of all rows, one of each round.
#[derive(Debug, Default)]
pub(crate) struct Figures(BTreeMap<(Row, Subject), Vec<f64>>);

impl Figures {
    /// Adds a round's value, in the base unit of the row (seconds, bytes), and prints it.
    pub(crate) fn add(&mut self, row: Row, subject: Subject, value: f64) {
        let (name, unit, _) = row.describe();
        println!("  {:>11}  {subject:<6}  {name}", unit.show(value));
        self.0.entry((row, subject)).or_default().push(value);
    }

    /// The median of the rounds.
    fn median(&self, row: Row, subject: Subject) -> Option<f64> {
        median(self.0.get(&(row, subject))?.iter().copied())
    }

    /// The median of the rounds' ratios, Berth's value over NVIDIA's.
    fn ratio(&self, row: Row) -> Option<f64> {
        let (ours, theirs) = (self.0.get(&(row, Subject::Berth))?, self.0.get(&(row, Subject::Nvidia))?);
        let rounds = ours.iter().zip(theirs).filter(|(_, theirs)| **theirs > 0.0);
        median(rounds.map(|(ours, theirs)| ours / theirs))
    }

    /// The last line of the run; `-` for what was not measured.
    pub(crate) fn line(&self) -> String {
        let value = |row: Row, unit: f64, name: &str| {
            let value = self.median(row, Subject::Berth).map(|value| value / unit);
            value.map_or("-".to_owned(), |value| {
                let sign = if value < 0.0 { "-" } else { "" };
                format!("{sign}{}{name}", digits(value.abs()))
            })
        };
        format!(
            "bench-dra: prepare={} of_allocate={} burst32={} slices={} memory={}",
            value(Row::Prepare, MILLISECOND, "ms"),
            value(Row::OfAllocate, 1.0, "x"),
            value(Row::Burst, MILLISECOND, "ms"),
            value(Row::Slices, MILLISECOND, "ms"),
            value(Row::MemoryAdded, MEGABYTE, "MB"),
        )
    }

    fn cells(&self, row: Row) -> Option<[String; 6]> {
        let (name, unit, most) = row.describe();
        let [ours, theirs] = [Subject::Berth, Subject::Nvidia].map(|subject| self.median(row, subject));
        if ours.is_none() && theirs.is_none() {
            return None;
        }
        let show = |value: Option<f64>| value.map_or(String::new(), |value| unit.show(value));
        let kept = most.zip(ours).map_or("", |(most, ours)| if ours <= most { "kept" } else { "MISSED" });
        let ratio = self.ratio(row).map_or(String::new(), |ratio| format!("{} x", digits(ratio)));
        Some([name.to_owned(), show(ours), show(theirs), ratio, show(most), kept.to_owned()])
    }
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["medians of the rounds", "Berth", "NVIDIA's", "ratio", "goal", ""].map(String::from);
        let rows = Row::ALL.into_iter().filter_map(|row| self.cells(row));
        let rows: Vec<[String; 6]> = std::iter::once(head).chain(rows).collect();
        aligned(f, &rows, [false, true, true, true, false, false])
    }
}

fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::{Figures, Row};
    use crate::bench_dra::subject::Subject;

    #[test]
    fn a_ratio_is_of_values_of_one_round_and_what_is_missing_is_a_dash() {
        let mut figures = Figures::default();
        for (ours, theirs) in [(0.001, 0.002), (0.004, 0.012), (0.003, 0.03)] {
            figures.add(Row::Prepare, Subject::Berth, ours);
            figures.add(Row::Prepare, Subject::Nvidia, theirs);
            figures.add(Row::Burst, Subject::Berth, 3.0);
            figures.add(Row::MemoryAdded, Subject::Berth, -250_000.0);
        }
        assert_eq!(
            figures.line(),
            "bench-dra: prepare=3.00ms of_allocate=- burst32=3000ms slices=- memory=-0.25MB"
        );
        let table = figures.to_string();
        let cells = |name: &str| {
            let line = table.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(cells("prepare of a claim of 1 GPU, median"), "3.00 ms 12.0 ms 0.33 x");
        assert_eq!(cells("32 claims prepared at once, until the last one"), "3.00 s 2.00 s MISSED");
        assert_eq!(cells("memory at rest (PSS) that the driver adds"), "-0.25 MB 2.00 MB kept");
        assert!(!table.contains("unprepare"), "{table}");
    }
}
