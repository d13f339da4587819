//! What was measured, row by row, and the table and the line that the run ends with.

use crate::bench::table::{aligned, digits, megabytes, time};
use crate::bench_peer::subject::Subject;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// What is measured of both programs, in the order of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Row {
    Allocate1,
    Allocate8,
    Durable1,
    Durable8,
    Bare,
    Processor,
    ProcessorDurable,
    Preferred1,
    Preferred4,
    Preferred8,
    Live0,
    Live80,
    Live1000,
    LiveGrowth,
    ProcessorLive0,
    ProcessorLive1000,
    StartKept,
    StartFresh,
    Exit,
    Threads,
    Wakeups,
    ProcessorAtRest,
    WakeupsWithPods,
    ProcessorWithPods,
    Share,
    Resident,
    ResidentAfterLoad,
    GrowthByLoad,
    ShareWithHistory,
    NothingCall,
    NothingCallProcessor,
    StoreAppend,
    StoreAppendDurable,
    AppendProcessor,
    HandOvers,
    PrintVersion,
    StoreOpen,
}

/// How a value is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Seconds.
    Time,
    Bytes,
    Count,
    PerSecond,
    /// Seconds of a processor in a second.
    Load,
    Times,
}

/// What a row must not exceed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Goal {
    None,
    /// Berth's value over NVIDIA's.
    Ratio(f64),
    /// Berth's value, in the unit of the row.
    Berth(f64),
}

const MILLISECOND: f64 = 1e-3;
const MEGABYTE: f64 = 1e6;

impl Row {
    const ALL: [Self; 37] = [
        Self::Allocate1,
        Self::Allocate8,
        Self::Durable1,
        Self::Durable8,
        Self::Bare,
        Self::Processor,
        Self::ProcessorDurable,
        Self::Preferred1,
        Self::Preferred4,
        Self::Preferred8,
        Self::Live0,
        Self::Live80,
        Self::Live1000,
        Self::LiveGrowth,
        Self::ProcessorLive0,
        Self::ProcessorLive1000,
        Self::StartKept,
        Self::StartFresh,
        Self::Exit,
        Self::Threads,
        Self::Wakeups,
        Self::ProcessorAtRest,
        Self::WakeupsWithPods,
        Self::ProcessorWithPods,
        Self::Share,
        Self::Resident,
        Self::ResidentAfterLoad,
        Self::GrowthByLoad,
        Self::ShareWithHistory,
        Self::NothingCall,
        Self::NothingCallProcessor,
        Self::StoreAppend,
        Self::StoreAppendDurable,
        Self::AppendProcessor,
        Self::HandOvers,
        Self::PrintVersion,
        Self::StoreOpen,
    ];

    fn describe(self) -> (&'static str, Unit, Goal) {
        use Goal::{Berth, Ratio};
        match self {
            Self::Allocate1 => ("Allocate of 1 GPU, store in memory", Unit::Time, Ratio(1.0)),
            Self::Allocate8 => ("Allocate of 8 GPUs, store in memory", Unit::Time, Goal::None),
            Self::Durable1 => {
                ("Allocate of 1 GPU, on disk (NVIDIA's + bare append, fdatasync)", Unit::Time, Ratio(1.1))
            }
            Self::Durable8 => {
                ("Allocate of 8 GPUs, on disk (NVIDIA's + bare append, fdatasync)", Unit::Time, Goal::None)
            }
            Self::Bare => ("a bare append and fdatasync, the daemon at rest", Unit::Time, Goal::None),
            Self::Processor => ("processor time of an Allocate of 1 GPU", Unit::Time, Ratio(1.3)),
            Self::ProcessorDurable => ("the same, store on disk", Unit::Time, Goal::None),
            Self::Preferred1 => ("GetPreferredAllocation, 1 of 8", Unit::Time, Goal::None),
            Self::Preferred4 => ("GetPreferredAllocation, 4 of 8", Unit::Time, Goal::None),
            Self::Preferred8 => ("GetPreferredAllocation, 8 of 8", Unit::Time, Goal::None),
            Self::Live0 => ("Allocate of 1 share of 1,024, none live", Unit::Time, Goal::None),
            Self::Live80 => ("the same, 80 live", Unit::Time, Goal::None),
            Self::Live1000 => ("the same, 1,000 live", Unit::Time, Goal::None),
            Self::LiveGrowth => ("the same, 1,000 live / none live", Unit::Times, Berth(1.2)),
            Self::ProcessorLive0 => ("processor time of it, none live", Unit::Time, Goal::None),
            Self::ProcessorLive1000 => ("processor time of it, 1,000 live", Unit::Time, Berth(MILLISECOND)),
            Self::StartKept => ("start to registered, kept state", Unit::Time, Ratio(1.5)),
            Self::StartFresh => ("start to registered, fresh state, no policy", Unit::Time, Goal::None),
            Self::Exit => ("SIGTERM to exit", Unit::Time, Berth(40.0 * MILLISECOND)),
            Self::Threads => ("threads at rest", Unit::Count, Goal::None),
            Self::Wakeups => ("wake-ups at rest", Unit::PerSecond, Berth(5.0)),
            Self::ProcessorAtRest => ("processor time at rest", Unit::Load, Berth(0.3 * MILLISECOND)),
            Self::WakeupsWithPods => ("wake-ups, 8 pods running", Unit::PerSecond, Goal::None),
            Self::ProcessorWithPods => ("processor time, 8 pods running", Unit::Load, Goal::None),
            Self::Share => ("memory at rest (PSS)", Unit::Bytes, Ratio(0.75)),
            Self::Resident => ("memory at rest (resident)", Unit::Bytes, Goal::None),
            Self::ResidentAfterLoad => ("memory after load (resident)", Unit::Bytes, Goal::None),
            Self::GrowthByLoad => ("growth of resident memory by load", Unit::Bytes, Berth(3.0 * MEGABYTE)),
            Self::ShareWithHistory => (
                "memory at rest (PSS), 10,000 records of ended allocations",
                Unit::Bytes,
                Berth(20.0 * MEGABYTE),
            ),
            Self::NothingCall => {
                ("floor: a call that the same library answers at once", Unit::Time, Goal::None)
            }
            Self::NothingCallProcessor => (
                "floor: processor time of a call that the same library answers at once",
                Unit::Time,
                Goal::None,
            ),
            Self::StoreAppend => ("floor: an append to the store, in memory", Unit::Time, Goal::None),
            Self::StoreAppendDurable => ("floor: an append to the store, on disk", Unit::Time, Goal::None),
            Self::AppendProcessor => {
                ("floor: processor time of an append, in memory", Unit::Time, Goal::None)
            }
            Self::HandOvers => ("floor: to another thread and back", Unit::Time, Goal::None),
            Self::PrintVersion => {
                ("floor: the program starts, prints its version and exits", Unit::Time, Goal::None)
            }
            Self::StoreOpen => {
                ("floor: sled alone opens and reads a new store, on disk", Unit::Time, Goal::None)
            }
        }
    }
}

impl Unit {
    fn show(self, value: f64) -> String {
        match self {
            Self::Time => time(Duration::from_secs_f64(value.max(0.0))),
            // A growth may be negative.
            Self::Bytes => format!("{}{}", if value < 0.0 { "-" } else { "" }, megabytes(value.abs())),
            Self::Count => format!("{value:.0}"),
            Self::PerSecond => format!("{value:.1} /s"),
            Self::Load => format!("{value:.3} ms/s", value = value / MILLISECOND),
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
    pub(crate) fn median(&self, row: Row, subject: Subject) -> Option<f64> {
        median(self.0.get(&(row, subject))?)
    }

    /// Berth's median over NVIDIA's.
    fn ratio(&self, row: Row) -> Option<f64> {
        let theirs = self.median(row, Subject::Nvidia).filter(|value| *value > 0.0)?;
        Some(self.median(row, Subject::Berth)? / theirs)
    }

    /// The last line of the run; `-` for what was not measured.
    pub(crate) fn line(&self) -> String {
        let times = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}x"));
        let preferred = [Row::Preferred1, Row::Preferred4, Row::Preferred8].map(|row| self.ratio(row));
        let preferred: Option<Vec<f64>> = preferred.into_iter().collect();
        let wakeups = self.median(Row::Wakeups, Subject::Berth);
        format!(
            "bench-peer: allocate={} durable={} live1000={} start={} exit={} preferred={} idle_wakeups={} memory={}",
            times(self.ratio(Row::Allocate1)),
            times(self.ratio(Row::Durable1)),
            times(self.median(Row::LiveGrowth, Subject::Berth)),
            times(self.ratio(Row::StartKept)),
            times(self.ratio(Row::Exit)),
            times(preferred.map(|sizes| sizes.into_iter().fold(0.0, f64::max))),
            wakeups.map_or("-".to_owned(), |value| format!("{value:.1}")),
            times(self.ratio(Row::Share)),
        )
    }

    fn cells(&self, row: Row) -> Option<[String; 6]> {
        let (name, unit, goal) = row.describe();
        let values = Subject::BOTH.map(|subject| self.median(row, subject));
        if values.iter().all(Option::is_none) {
            return None;
        }
        let [theirs, berth] = values.map(|value| value.map_or(String::new(), |value| unit.show(value)));
        let ratio = self.ratio(row);
        let (goal, kept) = match goal {
            Goal::None => (String::new(), None),
            Goal::Ratio(most) => (format!("{most} x"), ratio.map(|ratio| rounded(ratio) <= most)),
            Goal::Berth(most) => (unit.show(most), values[1].map(|value| value <= most)),
        };
        let kept = kept.map_or("", |kept| if kept { "kept" } else { "MISSED" });
        let ratio = ratio.map_or(String::new(), |ratio| format!("{ratio:.2} x"));
        Some([name.to_owned(), berth, theirs, ratio, goal, kept.to_owned()])
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

/// As it is printed.
fn rounded(ratio: f64) -> f64 {
    (ratio * 100.0).round() / 100.0
}

pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    sorted.get(sorted.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::{Figures, Row};
    use crate::bench_peer::subject::Subject;

    #[test]
    fn the_last_line_has_ratios_of_medians_and_a_dash_for_what_is_missing() {
        let mut figures = Figures::default();
        for (row, theirs, berth) in [
            (Row::Allocate1, [0.4, 0.5, 9.0], [1.0, 0.7, 0.6]),
            (Row::LiveGrowth, [1.0, 1.0, 1.0], [1.3, 1.15, 1.1]),
            (Row::Preferred1, [1.0, 1.0, 1.0], [0.1, 0.1, 0.1]),
            (Row::Preferred4, [1.0, 1.0, 1.0], [0.3, 0.3, 0.3]),
            (Row::Preferred8, [1.0, 1.0, 1.0], [0.2, 0.2, 0.2]),
            (Row::Wakeups, [2.5, 2.5, 2.5], [36.0, 35.04, 4.0]),
        ] {
            for round in 0..3 {
                figures.add(row, Subject::Nvidia, theirs[round]);
                figures.add(row, Subject::Berth, berth[round]);
            }
        }
        assert_eq!(
            figures.line(),
            "bench-peer: allocate=1.40x durable=- live1000=1.15x start=- exit=- preferred=0.30x \
             idle_wakeups=35.0 memory=-"
        );
        let table = figures.to_string();
        let cells = |name: &str| {
            let line = table.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(cells("Allocate of 1 GPU, store in memory"), "700 ms 500 ms 1.40 x 1 x MISSED");
        assert_eq!(cells("the same, 1,000 live / none live"), "1.15 x 1.00 x 1.15 x 1.20 x kept");
        assert!(!table.contains("SIGTERM"), "{table}");
    }
}
