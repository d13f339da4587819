//! Keeps the daemon's memory small: reading the store and compiling policies need several times the memory that is
//! kept.
#![allow(unsafe_code, reason = "calls the C library's allocator")]

use berth_core::next_beat;
use std::fs;
use std::time::Duration;

/// Time from the registration to the first trim: by then the first reconcile passes are over, and waiting pods have
/// started.
const FIRST_TRIM_DELAY: Duration = Duration::from_secs(5);

/// Interval of checks whether memory has grown.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Longest interval of checks while the grown memory is in use.
const CHECK_INTERVAL_MAX: Duration = Duration::from_secs(320);
/// Growth that justifies a trim, which locks a heap for a few milliseconds, bytes.
const GROWTH_BYTES_MIN: u64 = 24 * 1024 * 1024;

/// Heaps that threads share. By default the C library has up to eight per processor, and a GPU node has 96 to 256
/// processors; with two heaps, the threads of an Allocate rarely contend.
const HEAPS_MAX: i32 = 2;
/// Size from which blocks are mapped outside of heaps. The C library starts at half of it and raises its threshold to
/// the largest freed block. The store is opened twice (first a copy), so the second time its page table and counters,
/// 512 KiB to 4 MiB each and mostly zero, would be in a heap and fully resident. API responses and buffers of the
/// decision journal are smaller and stay in the heaps.
const MMAP_THRESHOLD_BYTES: i32 = 256 * 1024;
/// Free memory that is kept at a heap's end.
const TRIM_THRESHOLD_BYTES: i32 = 512 * 1024;

/// Configures the C library's allocator; called before threads start.
pub(super) fn configure_allocator() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (setting, value) in [
        (libc::M_ARENA_MAX, HEAPS_MAX),
        (libc::M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES),
        (libc::M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES),
    ] {
        // SAFETY: takes two numbers (mallopt(3)); an invalid one changes nothing.
        unsafe {
            libc::mallopt(setting, value);
        }
    }
}

/// Returns freed memory to the system: once after the start, then whenever the resident memory has grown, as after many
/// clients, uploads or long lists.
pub(super) async fn trim_periodically() {
    tokio::time::sleep(FIRST_TRIM_DELAY).await;
    // Fails only while the daemon stops.
    let _ = tokio::task::spawn_blocking(trim_heaps).await;
    let mut schedule = TrimSchedule { smallest: resident_bytes(), wait: CHECK_INTERVAL };
    loop {
        tokio::time::sleep_until(next_beat(schedule.wait)).await;
        if schedule.has_grown(resident_bytes()) {
            let _ = tokio::task::spawn_blocking(trim_heaps).await;
            schedule.record_trim(resident_bytes());
        }
    }
}

/// Decides when to trim.
struct TrimSchedule {
    /// The smallest resident size so far, bytes.
    smallest: u64,
    wait: Duration,
}

impl TrimSchedule {
    fn has_grown(&mut self, now: u64) -> bool {
        self.smallest = self.smallest.min(now);
        let grown = now > self.smallest + GROWTH_BYTES_MIN;
        if !grown {
            self.wait = CHECK_INTERVAL;
        }
        grown
    }

    /// Doubles the interval if the memory is still in use after a trim, since that may be permanent.
    fn record_trim(&mut self, now: u64) {
        let is_in_use = now > self.smallest + GROWTH_BYTES_MIN;
        self.wait = if is_in_use { (self.wait * 2).min(CHECK_INTERVAL_MAX) } else { CHECK_INTERVAL };
    }
}

/// The resident memory of the process, bytes; 0 if it cannot be read.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or_default();
    pages * rustix::param::page_size() as u64
}

/// Returns freed memory. The C library itself returns only free memory at a heap's end.
fn trim_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number and no pointer, and may be called from any thread at any time
    // (malloc_trim(3): MT-Safe).
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_in_use_is_checked_less_and_less_often() {
        const MIB: u64 = 1024 * 1024;
        let mut schedule = TrimSchedule { smallest: 20 * MIB, wait: CHECK_INTERVAL };
        assert!(!schedule.has_grown(44 * MIB) && schedule.has_grown(120 * MIB));
        for seconds in [20, 40, 80, 160, 320, 320] {
            schedule.record_trim(118 * MIB);
            assert_eq!(schedule.wait, Duration::from_secs(seconds));
            assert!(schedule.has_grown(118 * MIB), "it did not shrink");
        }
        schedule.record_trim(30 * MIB);
        assert_eq!(schedule.wait, CHECK_INTERVAL);
        // Growth is measured from the smallest size.
        assert!(!schedule.has_grown(18 * MIB) && schedule.has_grown(43 * MIB));
        schedule.record_trim(43 * MIB);
        assert!(!schedule.has_grown(40 * MIB) && schedule.wait == CHECK_INTERVAL);
    }
}
