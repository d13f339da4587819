//! The rows that the run ends with.

use crate::bench::measure::Series;
use std::fmt;
use std::time::Duration;

/// As budgets of memory count.
const MEGABYTE: u64 = 1_000_000;

/// What a row may cost.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Budget {
    pub(crate) median: Option<Duration>,
    pub(crate) p99: Option<Duration>,
    pub(crate) ratio: Option<f64>,
    pub(crate) bytes: Option<u64>,
}

impl Budget {
    /// Shown for comparison.
    pub(crate) const NONE: Self = Self { median: None, p99: None, ratio: None, bytes: None };

    pub(crate) fn median(micros: u64) -> Self {
        Self { median: Some(Duration::from_micros(micros)), ..Self::NONE }
    }

    pub(crate) fn p99(micros: u64) -> Self {
        Self { p99: Some(Duration::from_micros(micros)), ..Self::NONE }
    }

    pub(crate) fn megabytes(megabytes: u64) -> Self {
        Self { bytes: Some(megabytes * MEGABYTE), ..Self::NONE }
    }

    pub(crate) fn ratio(ratio: f64) -> Self {
        Self { ratio: Some(ratio), ..Self::NONE }
    }
}

/// What was seen of it.
#[derive(Clone, Copy, Debug)]
enum Seen {
    Times {
        /// Of the runs' medians.
        median: Duration,
        /// Of the quietest run, and which that is.
        p99: (Duration, usize),
    },
    Bytes(u64),
}

/// One measured thing.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    name: String,
    seen: Seen,
    /// How it compares, and with what of the same run.
    ratio: Option<(f64, &'static str)>,
    budget: Budget,
}

impl Row {
    pub(crate) fn new(name: impl Into<String>, series: &Series, budget: Budget) -> Self {
        let seen = Seen::Times { median: series.median(), p99: (series.p99(), series.p99_run()) };
        Self { name: name.into(), seen, ratio: None, budget }
    }

    pub(crate) fn bytes(name: impl Into<String>, bytes: u64, budget: Budget) -> Self {
        Self { name: name.into(), seen: Seen::Bytes(bytes), ratio: None, budget }
    }

    pub(crate) fn beside(mut self, ratio: f64, what: &'static str) -> Self {
        self.ratio = Some((ratio, what));
        self
    }

    /// `None` if nothing was promised.
    fn kept(&self) -> Option<bool> {
        let (median, p99, bytes) = match self.seen {
            Seen::Times { median, p99: (p99, _) } => (Some(median), Some(p99), None),
            Seen::Bytes(bytes) => (None, None, Some(bytes)),
        };
        let kept = [
            self.budget.median.zip(median).map(|(most, median)| median <= most),
            self.budget.p99.zip(p99).map(|(most, p99)| p99 <= most),
            self.budget.bytes.zip(bytes).map(|(most, bytes)| bytes <= most),
            self.budget.ratio.zip(self.ratio).map(|(most, (ratio, _))| ratio <= most),
        ];
        kept.into_iter().flatten().reduce(|a, b| a && b)
    }

    fn cells(&self) -> [String; 6] {
        let budget = [
            self.budget.median.map(|d| format!("median {}", time(d))),
            self.budget.p99.map(|d| format!("p99 {}", time(d))),
            self.budget.ratio.map(|r| format!("{r} x")),
            self.budget.bytes.map(|bytes| megabytes(bytes as f64)),
        ];
        let budget: Vec<String> = budget.into_iter().flatten().collect();
        let kept = match self.kept() {
            None => "",
            Some(true) => "kept",
            Some(false) => "MISSED",
        };
        let (median, p99) = match self.seen {
            Seen::Times { median, p99: (p99, run) } => (time(median), format!("{} #{run}", time(p99))),
            Seen::Bytes(bytes) => (megabytes(bytes as f64), String::new()),
        };
        [
            self.name.clone(),
            median,
            p99,
            self.ratio.map(|(ratio, of)| format!("{} x {of}", digits(ratio))).unwrap_or_default(),
            budget.join(", "),
            kept.to_owned(),
        ]
    }
}

/// All rows.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table(Vec<Row>);

impl Table {
    pub(crate) fn add(&mut self, row: Row) {
        self.0.push(row);
    }

    pub(crate) fn missed(&self) -> usize {
        self.0.iter().filter(|row| row.kept() == Some(false)).count()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = ["what", "median", "p99 #run", "ratio", "budget", ""].map(String::from);
        let rows: Vec<[String; 6]> = std::iter::once(head).chain(self.0.iter().map(Row::cells)).collect();
        aligned(f, &rows, [false, true, true, false, false, false])
    }
}

/// A table with columns as wide as they need, those that are `right` aligned to the right.
pub(crate) fn aligned<const N: usize>(
    f: &mut fmt::Formatter<'_>,
    rows: &[[String; N]],
    right: [bool; N],
) -> fmt::Result {
    let widths: [usize; N] =
        std::array::from_fn(|column| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0));
    for row in rows {
        let mut line = String::new();
        for ((cell, width), right) in row.iter().zip(widths).zip(right) {
            line += &if right { format!("{cell:>width$}  ") } else { format!("{cell:width$}  ") };
        }
        writeln!(f, "{}", line.trim_end())?;
    }
    Ok(())
}

/// Three digits, in the unit that needs the fewest.
pub(crate) fn time(time: Duration) -> String {
    let micros = time.as_secs_f64() * 1e6;
    if micros < 1000.0 {
        format!("{} us", digits(micros))
    } else if micros < 1e6 {
        format!("{} ms", digits(micros / 1e3))
    } else {
        format!("{} s", digits(micros / 1e6))
    }
}

/// `bytes`: exact up to 2^53.
pub(crate) fn megabytes(bytes: f64) -> String {
    format!("{} MB", digits(bytes / MEGABYTE as f64))
}

pub(crate) fn digits(value: f64) -> String {
    match value {
        v if v >= 100.0 => format!("{v:.0}"),
        v if v >= 10.0 => format!("{v:.1}"),
        v if v >= 0.1 => format!("{v:.2}"),
        v => format!("{v:.4}"),
    }
}
