//! Blocks, pairs of them, and their summary.

use crate::load_admin::allocates::Allocates;
use crate::load_admin::readers::{Readers, Seen};
use anyhow::Context as _;
use std::fmt;
use std::time::Duration;

/// Bounds, besides the requested rate.
const P99_MAX: Duration = Duration::from_millis(5);
const RATIO_MAX: f64 = 2.0;
/// From this fraction on, the summary reports that the machine did not have all of its processors.
const STOLEN_TOLD_PERCENT: f64 = 3.0;

/// One block.
pub(crate) struct Block {
    allocates: Vec<Duration>,
    seen: Option<Seen>,
}

impl Block {
    /// Lets both work for so long.
    pub(crate) fn run(
        allocates: &mut Allocates,
        readers: Option<&mut Readers>,
        length: Duration,
    ) -> anyhow::Result<Self> {
        std::thread::scope(|scope| {
            let reading = readers.map(|readers| scope.spawn(move || readers.run(length)));
            let allocates = allocates.run(length);
            let seen =
                reading.map(|thread| thread.join().map_err(|_| anyhow::anyhow!("the readers panicked")));
            Ok(Self { allocates: allocates?, seen: seen.transpose()?.transpose()? })
        })
    }
}

/// A block without readers and one with them.
pub(crate) struct Pair {
    number: u32,
    alone: [Duration; 2],
    loaded: [Duration; 2],
    reads_per_s: f64,
    reads: [Duration; 2],
    unchanged_percent: f64,
    mib_per_s: f64,
    /// What the daemon used of the processors in both blocks.
    used: Duration,
    /// What the machine's host took of them meanwhile, percent.
    stolen: f64,
}

impl Pair {
    pub(crate) const HEAD: &str = "pair   Allocate alone       Allocate, API read   p99    \
         reads/s   p50      p99       304   MiB/s  daemon  stolen\n       p50      p99        p50      p99        ratio";

    pub(crate) fn of(
        number: u32,
        alone: Block,
        loaded: Block,
        used: Duration,
        stolen: f64,
    ) -> anyhow::Result<Self> {
        let seen = loaded.seen.context("no read was answered")?;
        let (answers, lasted) = (seen.took.len() as f64, seen.lasted.as_secs_f64());
        let mib = seen.bytes as f64 / f64::from(1 << 20);
        Ok(Self {
            number,
            alone: middle_and_end(alone.allocates),
            loaded: middle_and_end(loaded.allocates),
            reads_per_s: answers / lasted,
            unchanged_percent: seen.unchanged as f64 / answers * 100.0,
            mib_per_s: mib / lasted,
            reads: middle_and_end(seen.took),
            used,
            stolen,
        })
    }

    fn ratio(&self) -> f64 {
        self.loaded[1].as_secs_f64() / self.alone[1].as_secs_f64()
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| format!("{:.2} ms", time.as_secs_f64() * 1e3);
        write!(
            f,
            "{:<6} {:<8} {:<10} {:<8} {:<10} {:<6.2} {:<9.0} {:<8} {:<9} {:<5.0} {:<6.1} {:<7} {:.0} %",
            self.number,
            ms(self.alone[0]),
            ms(self.alone[1]),
            ms(self.loaded[0]),
            ms(self.loaded[1]),
            self.ratio(),
            self.reads_per_s,
            ms(self.reads[0]),
            ms(self.reads[1]),
            self.unchanged_percent,
            self.mib_per_s,
            format!("{:.1} s", self.used.as_secs_f64()),
            self.stolen
        )
    }
}

/// The medians over all pairs.
pub(crate) struct Summary {
    reads_per_s: f64,
    p99_ms: f64,
    ratio: f64,
    stolen: f64,
    alone_ms: f64,
    loaded_ms: f64,
}

impl Summary {
    pub(crate) fn of(pairs: &[Pair]) -> anyhow::Result<Self> {
        let median = |figure: &dyn Fn(&Pair) -> f64| {
            let mut all: Vec<f64> = pairs.iter().map(figure).collect();
            all.sort_unstable_by(f64::total_cmp);
            all.get(all.len() / 2).copied().context("no pair")
        };
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Ok(Self {
            reads_per_s: median(&|pair| pair.reads_per_s)?,
            p99_ms: median(&|pair| ms(pair.reads[1]))?,
            ratio: median(&Pair::ratio)?,
            stolen: median(&|pair| pair.stolen)?,
            alone_ms: median(&|pair| ms(pair.alone[1]))?,
            loaded_ms: median(&|pair| ms(pair.loaded[1]))?,
        })
    }

    /// The bounds that it is not within.
    pub(crate) fn missed(&self, rate: u64) -> Vec<String> {
        let bounds = [
            (self.reads_per_s >= rate as f64, format!("at least {rate} reads a second")),
            (self.p99_ms < P99_MAX.as_secs_f64() * 1e3, format!("a p99 of reads under {P99_MAX:?}")),
            (
                self.ratio <= RATIO_MAX,
                format!("Allocate's p99 at most {RATIO_MAX} times that of an unread daemon"),
            ),
        ];
        bounds.into_iter().filter(|(held, _)| !held).map(|(_, bound)| bound).collect()
    }

    pub(crate) fn line(&self) -> String {
        format!(
            "load-admin: reads_per_s={:.0} p99_ms={:.2} allocate_p99_ratio={:.2}",
            self.reads_per_s, self.p99_ms, self.ratio
        )
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "medians: {:.0} reads a second, their p99 {:.2} ms; Allocate's p99 {:.2} ms alone, {:.2} ms while \
             the API is read",
            self.reads_per_s, self.p99_ms, self.alone_ms, self.loaded_ms
        )?;
        if self.stolen >= STOLEN_TOLD_PERCENT {
            write!(
                f,
                "\nthis machine's host kept {:.0} % of its processors' time for others: so long nothing here could run, \
                 and whatever waits waits for that as well",
                self.stolen
            )?;
        }
        Ok(())
    }
}

/// The median and the 99th percentile.
fn middle_and_end(mut times: Vec<Duration>) -> [Duration; 2] {
    times.sort_unstable();
    let at = |percent: usize| times.get((times.len() * percent).div_ceil(100).max(1) - 1).copied();
    [50, 99].map(|percent| at(percent).unwrap_or_default())
}
