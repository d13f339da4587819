//! Counters of GPU scans and of the XIDs that GPUs report.

use super::heartbeat::Heartbeat;
use super::histogram::Histogram;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Pairs of GPU and XID with a counter of their own: 16 GPUs with 16 different XIDs each. Further pairs are in the log
/// only and share one counter.
pub const XIDS_COUNTED_MAX: usize = 256;

/// From a node with one GPU to one whose NVML calls reach their deadlines.
const SCAN_US: &[u64] =
    &[1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 15_000_000];

/// Counters of GPU scans and XIDs.
#[derive(Debug)]
pub struct GpuCounters {
    /// Heartbeat of the scan thread.
    pub heartbeat: Heartbeat,
    /// Durations of scans of all GPUs.
    pub scan_durations: Histogram,
    interval: Mutex<Option<Duration>>,
    answered: AtomicU64,
    failed: AtomicU64,
    last_scan: Mutex<LastScan>,
    restart_reason: Mutex<Option<String>>,
    versions: Mutex<DriverVersions>,
    xids: Mutex<BTreeMap<(String, u64), u64>>,
    other_xids: AtomicU64,
}

/// Result of the last scan.
#[derive(Debug, Default)]
struct LastScan {
    /// End of the last scan that succeeded, milliseconds since 1970.
    answered_wall_ms: Option<u64>,
    /// Error of the last scan, if it failed.
    error: Option<String>,
}

/// Versions of NVIDIA's software, as of the last scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverVersions {
    /// The driver's version.
    pub driver: Option<String>,
    /// The newest CUDA version that the driver supports.
    pub cuda: Option<String>,
}

impl Default for GpuCounters {
    fn default() -> Self {
        Self {
            heartbeat: Heartbeat::default(),
            scan_durations: Histogram::new(SCAN_US),
            interval: Mutex::default(),
            answered: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            last_scan: Mutex::default(),
            restart_reason: Mutex::default(),
            versions: Mutex::default(),
            xids: Mutex::default(),
            other_xids: AtomicU64::new(0),
        }
    }
}

impl GpuCounters {
    /// Sets the scan interval and starts the heartbeat.
    pub fn start_scanning(&self, interval: Duration) {
        *self.interval.lock() = Some(interval);
        drop(self.heartbeat.begin());
    }

    /// Changes the scan interval.
    pub fn set_scan_interval(&self, interval: Duration) {
        *self.interval.lock() = Some(interval);
    }

    /// The scan interval; `None` before scanning starts.
    #[must_use]
    pub fn scan_interval(&self) -> Option<Duration> {
        *self.interval.lock()
    }

    /// Counts a scan that ended, with its error if it failed.
    pub fn scan_ended(&self, took: Duration, error: Option<String>) {
        self.scan_durations.add(took);
        let count = if error.is_none() { &self.answered } else { &self.failed };
        count.fetch_add(1, Ordering::Relaxed);
        let mut last = self.last_scan.lock();
        if error.is_none() {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            last.answered_wall_ms = u64::try_from(now.as_millis()).ok();
        }
        last.error = error;
    }

    /// Sets why only a restart of the container can help, or that none is needed.
    pub fn set_restart_reason(&self, why: Option<String>) {
        *self.restart_reason.lock() = why;
    }

    /// Why only a restart of the container can help, if so: see [`berth_kernel::node::ports::Gpus::restart_reason`].
    #[must_use]
    pub fn restart_reason(&self) -> Option<String> {
        self.restart_reason.lock().clone()
    }

    /// Sets the versions that a scan found: the driver may be replaced while the daemon runs.
    pub fn set_versions(&self, versions: DriverVersions) {
        *self.versions.lock() = versions;
    }

    /// Versions as of the last scan.
    #[must_use]
    pub fn versions(&self) -> DriverVersions {
        self.versions.lock().clone()
    }

    /// Scans by outcome.
    #[must_use]
    pub fn outcomes(&self) -> [(&'static str, u64); 2] {
        [("answered", self.answered.load(Ordering::Relaxed)), ("failed", self.failed.load(Ordering::Relaxed))]
    }

    /// End of the last scan that succeeded, milliseconds since 1970; `None` before the first.
    #[must_use]
    pub fn answered_wall_ms(&self) -> Option<u64> {
        self.last_scan.lock().answered_wall_ms
    }

    /// Error of the last scan, if it failed.
    #[must_use]
    pub fn last_error(&self) -> Option<String> {
        self.last_scan.lock().error.clone()
    }

    /// Counts an XID that the GPU with this UUID reported.
    pub fn xid(&self, gpu: &str, code: u64) {
        let mut xids = self.xids.lock();
        if let Some(count) = xids.get_mut(&(gpu.to_owned(), code)) {
            *count += 1;
        } else if xids.len() < XIDS_COUNTED_MAX {
            xids.insert((gpu.to_owned(), code), 1);
        } else {
            self.other_xids.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// XIDs by GPU and code.
    #[must_use]
    pub fn xids(&self) -> BTreeMap<(String, u64), u64> {
        self.xids.lock().clone()
    }

    /// XIDs beyond [`XIDS_COUNTED_MAX`] pairs.
    #[must_use]
    pub fn other_xids(&self) -> u64 {
        self.other_xids.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xid_counters_are_bounded_and_every_xid_is_counted() {
        let counters = GpuCounters::default();
        for code in 0..1_000 {
            counters.xid("GPU-0", code);
            counters.xid("GPU-0", 79);
        }
        let counted: u64 = counters.xids().values().sum();
        assert_eq!(counters.xids().len(), XIDS_COUNTED_MAX);
        assert_eq!(counted + counters.other_xids(), 2_000);
        assert_eq!(counters.xids()[&("GPU-0".into(), 79)], 1_001);
    }

    #[test]
    fn a_failed_scan_keeps_the_time_of_the_last_success() {
        let counters = GpuCounters::default();
        assert_eq!(counters.answered_wall_ms(), None);
        counters.scan_ended(Duration::from_millis(3), None);
        let answered = counters.answered_wall_ms();
        assert!(answered.is_some());
        counters.scan_ended(Duration::from_millis(3), Some("no NVML".into()));
        assert_eq!((counters.answered_wall_ms(), counters.last_error()), (answered, Some("no NVML".into())));
        assert_eq!(counters.outcomes(), [("answered", 1), ("failed", 1)]);
    }
}
