//! What is counted of looks at the GPUs, and of what they report.

use super::beat::Beat;
use super::times::Times;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Pairs of a GPU and an XID that are counted each: 16 GPUs with 16 different XIDs each. A node that
/// has more kinds of trouble is read in its log.
pub const XIDS_COUNTED_MAX: usize = 256;

/// From a node of one GPU to one whose calls run into their deadlines.
const LOOK_US: &[u64] =
    &[1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 15_000_000];

/// See the module.
#[derive(Debug)]
pub struct GpuFigures {
    /// Looks at all GPUs.
    pub beat: Beat,
    /// How long they took.
    pub looks: Times,
    every: Mutex<Option<Duration>>,
    answered: AtomicU64,
    failed: AtomicU64,
    last: Mutex<Last>,
    versions: Mutex<Versions>,
    xids: Mutex<BTreeMap<(String, u64), u64>>,
    more_xids: AtomicU64,
}

/// How the last look ended.
#[derive(Debug, Default)]
struct Last {
    /// When one was last answered, milliseconds since 1970.
    answered_wall_ms: Option<u64>,
    /// Why the newest one failed, if it did.
    trouble: Option<String>,
}

/// Versions of NVIDIA's software, by the newest look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// Of the driver.
    pub driver: Option<String>,
    /// The newest CUDA that it serves.
    pub cuda: Option<String>,
}

impl Default for GpuFigures {
    fn default() -> Self {
        Self {
            beat: Beat::default(),
            looks: Times::new(LOOK_US),
            every: Mutex::default(),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            last: Mutex::default(),
            versions: Mutex::default(),
            xids: Mutex::default(),
            more_xids: AtomicU64::new(0),
        }
    }
}

impl GpuFigures {
    /// Looks are taken from now on, so far apart.
    pub fn begin_looking(&self, every: Duration) {
        *self.every.lock() = Some(every);
        drop(self.beat.begin());
    }

    /// How far apart looks are; `None` before the first is due.
    #[must_use]
    pub fn every(&self) -> Option<Duration> {
        *self.every.lock()
    }

    /// A look ended; what failed, if it did.
    pub fn looked(&self, took: Duration, trouble: Option<String>) {
        self.looks.add(took);
        let count = if trouble.is_none() { &self.answered } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
        let mut last = self.last.lock();
        if trouble.is_none() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            last.answered_wall_ms = u64::try_from(now.as_millis()).ok();
        }
        last.trouble = trouble;
    }

    /// What a look says of versions: a driver may be replaced while we run.
    pub fn set_versions(&self, versions: Versions) {
        *self.versions.lock() = versions;
    }

    /// The versions of the newest look.
    #[must_use]
    pub fn versions(&self) -> Versions {
        self.versions.lock().clone()
    }

    /// Looks that were answered, and that failed.
    #[must_use]
    pub fn outcomes(&self) -> [(&'static str, u64); 2] {
        [("answered", self.answered.load(Ordering::Relaxed)), ("failed", self.failed.load(Ordering::Relaxed))]
    }

    /// When a look was last answered, milliseconds since 1970; `None` before the first.
    #[must_use]
    pub fn answered_wall_ms(&self) -> Option<u64> {
        self.last.lock().answered_wall_ms
    }

    /// Why the newest look failed, if it did.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.last.lock().trouble.clone()
    }

    /// A GPU, named by its UUID, reported an XID.
    pub fn xid(&self, gpu: &str, code: u64) {
        let mut xids = self.xids.lock();
        if let Some(count) = xids.get_mut(&(gpu.to_owned(), code)) {
            *count += 1;
        } else if xids.len() < XIDS_COUNTED_MAX {
            xids.insert((gpu.to_owned(), code), 1);
        } else {
            self.more_xids.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// XIDs by GPU and code.
    #[must_use]
    pub fn xids(&self) -> BTreeMap<(String, u64), u64> {
        self.xids.lock().clone()
    }

    /// XIDs beyond [`XIDS_COUNTED_MAX`] pairs.
    #[must_use]
    pub fn more_xids(&self) -> u64 {
        self.more_xids.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xids_are_bounded_and_none_is_lost() {
        let figures = GpuFigures::default();
        for code in 0..1_000 {
            figures.xid("GPU-0", code);
            figures.xid("GPU-0", 79);
        }
        let counted: u64 = figures.xids().values().sum();
        assert_eq!(figures.xids().len(), XIDS_COUNTED_MAX);
        assert_eq!(counted + figures.more_xids(), 2_000);
        assert_eq!(figures.xids()[&("GPU-0".into(), 79)], 1_001);
    }

    #[test]
    fn a_look_that_fails_leaves_when_one_was_answered() {
        let figures = GpuFigures::default();
        assert_eq!(figures.answered_wall_ms(), None);
        figures.looked(Duration::from_millis(3), None);
        let answered = figures.answered_wall_ms();
        assert!(answered.is_some());
        figures.looked(Duration::from_millis(3), Some("no NVML".into()));
        assert_eq!((figures.answered_wall_ms(), figures.trouble()), (answered, Some("no NVML".into())));
        assert_eq!(figures.outcomes(), [("answered", 1), ("failed", 1)]);
    }
}
