//! Samples and their summary.

use std::time::{Duration, Instant};

/// How much is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effort {
    /// Once or twice, to see that it works.
    Glance,
    /// Enough for a 99th percentile.
    Full,
}

impl Effort {
    /// Runs of everything that is compared, each with all its subjects.
    pub(crate) fn runs(self) -> usize {
        match self {
            Self::Glance => 1,
            Self::Full => 5,
        }
    }

    /// Samples of one run: `most`, or as few as show that it works.
    pub(crate) fn samples(self, most: usize) -> usize {
        match self {
            Self::Glance => 2,
            Self::Full => most,
        }
    }
}

/// Samples of one thing, run by run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    runs: Vec<Vec<Duration>>,
}

impl Series {
    /// Begins the next run.
    pub(crate) fn begin(&mut self) {
        self.runs.push(Vec::new());
    }

    pub(crate) fn push(&mut self, sample: Duration) {
        if self.runs.is_empty() {
            self.begin();
        }
        if let Some(run) = self.runs.last_mut() {
            run.push(sample);
        }
    }

    /// Times `act` so many times as one run.
    pub(crate) fn run<T>(&mut self, samples: usize, mut act: impl FnMut() -> T) {
        self.begin();
        for _ in 0..samples {
            let began = Instant::now();
            let made = act();
            let took = began.elapsed();
            // Freeing what was made is the caller's, and not timed.
            drop(std::hint::black_box(made));
            self.push(took);
        }
    }

    /// The median of the runs' medians: a moment in which the machine did something else costs one
    /// of them.
    pub(crate) fn median(&self) -> Duration {
        rank(&self.of_runs(50), 50).unwrap_or_default()
    }

    /// The 99th percentile of the quietest run. What else the machine does only ever adds, a whole
    /// time slice where it takes the processor away; what is our own doing is in every run.
    pub(crate) fn p99(&self) -> Duration {
        self.quietest().1
    }

    /// Which run that is, from 1.
    pub(crate) fn p99_run(&self) -> usize {
        self.quietest().0
    }

    fn quietest(&self) -> (usize, Duration) {
        (1..).zip(self.of_runs(99)).min_by_key(|(_, p99)| *p99).unwrap_or_default()
    }

    fn of_runs(&self, percent: usize) -> Vec<Duration> {
        self.runs.iter().filter_map(|run| rank(run, percent)).collect()
    }
}

/// The smallest sample that so many percent of all do not exceed.
fn rank(samples: &[Duration], percent: usize) -> Option<Duration> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len() * percent).div_ceil(100).max(1) - 1;
    sorted.get(at).copied()
}

/// The subjects of a ratio alternate in order: the one that follows a slow one finds the
/// processor awake and the disk busy, and that must happen to each of them equally often.
pub(crate) fn turns(sample: usize, subjects: usize) -> impl Iterator<Item = usize> {
    (0..subjects).map(move |turn| (sample + turn) % subjects)
}

/// How many times `b` goes into `a`.
pub(crate) fn ratio(a: Duration, b: Duration) -> f64 {
    a.as_secs_f64() / b.as_secs_f64()
}
