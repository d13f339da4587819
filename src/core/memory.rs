//! Keeps the daemon's memory small. Reading the store and compiling policies need several times the memory that is
//! kept, and a third of the program's pages is needed only for the start.
#![allow(unsafe_code, reason = "calls the C library's allocator, and madvise on the program's pages")]

use crate::next_beat;
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
pub fn configure_allocator() {
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
pub async fn trim_periodically() {
    tokio::time::sleep(FIRST_TRIM_DELAY).await;
    // Fails only while the daemon stops.
    let _ = tokio::task::spawn_blocking(trim).await;
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

/// Returns all unused memory. Takes a few milliseconds.
fn trim() {
    trim_heaps();
    #[cfg(target_os = "linux")]
    release_program_pages();
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

/// Unmaps the program's pages, which otherwise stay resident after their last use. Needed ones are mapped again from
/// the page cache or the file.
#[cfg(target_os = "linux")]
fn release_program_pages() {
    let (Ok(program), Ok(smaps)) = (fs::read_link("/proc/self/exe"), fs::read_to_string("/proc/self/smaps"))
    else {
        return;
    };
    for (begin, end) in clean_mappings(&smaps, &program.to_string_lossy()) {
        // SAFETY: a private, read-only mapping of a file whose pages all equal the file: the next access reads the same
        // bytes (madvise(2), MADV_DONTNEED).
        unsafe {
            libc::madvise(std::ptr::without_provenance_mut(begin), end - begin, libc::MADV_DONTNEED);
        }
    }
}

/// The address ranges of the program's private, read-only mappings in `/proc/self/smaps` (proc_pid_smaps(5)) without
/// modified pages. Pages with relocations of the loader are modified.
fn clean_mappings(smaps: &str, program: &str) -> Vec<(usize, usize)> {
    let mut ranges = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        if let Some(size) = line.strip_prefix("Anonymous:") {
            ranges.extend(candidate.take().filter(|_| size.trim() == "0 kB"));
        } else if let Some((range, rights, path)) = parse_header(line) {
            let is_read_only = matches!(rights, "r--p" | "r-xp" | "--xp");
            candidate = (is_read_only && path == program).then_some(range);
        }
    }
    ranges
}

/// Range, rights and path of a mapping, from `begin-end rights offset device inode path`; the path may contain spaces.
fn parse_header(line: &str) -> Option<((usize, usize), &str, &str)> {
    let mut fields = line.splitn(6, ' ');
    let (begin, end) = fields.next()?.split_once('-')?;
    let number = |hex| usize::from_str_radix(hex, 16).ok();
    let range = (number(begin)?, number(end)?);
    let rights = fields.next()?;
    Some((range, rights, fields.nth(3).unwrap_or_default().trim_start()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
55d0c0000000-55d0c1000000 r--p 00000000 fe:00 12 /usr/bin/a berth
Size:              16384 kB
Anonymous:             0 kB
55d0c1000000-55d0c3000000 r-xp 01000000 fe:00 12                         /usr/bin/a berth
Anonymous:             0 kB
VmFlags: rd ex mr mw me
55d0c3000000-55d0c3100000 r--p 03000000 fe:00 12 /usr/bin/a berth
Anonymous:          1024 kB
55d0c3100000-55d0c3200000 rw-p 03100000 fe:00 12 /usr/bin/a berth
Anonymous:             0 kB
7f0000000000-7f0000001000 r-xp 00000000 fe:00 13 /usr/lib/libc.so.6
Anonymous:             0 kB
7f0000002000-7f0000003000 rw-p 00000000 00:00 0
Anonymous:             0 kB
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]
Anonymous:             0 kB
";

    #[test]
    fn only_unmodified_mappings_of_the_program_are_released() {
        let range = |begin: usize, end: usize| (begin << 20, end << 20);
        let expected = [range(0x55d_0c00, 0x55d_0c10), range(0x55d_0c10, 0x55d_0c30)];
        assert_eq!(clean_mappings(SMAPS, "/usr/bin/a berth"), expected);
        assert_eq!(clean_mappings(SMAPS, "/usr/bin/a"), []);
        assert_eq!(clean_mappings("", ""), []);
    }

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

    #[test]
    fn the_program_runs_after_its_pages_are_released() {
        let program = fs::read_link("/proc/self/exe").unwrap();
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        assert!(!clean_mappings(&smaps, &program.to_string_lossy()).is_empty());
        // An address that the loader relocated: a released page would have the file's value.
        type Clean = fn(&str, &str) -> Vec<(usize, usize)>;
        static RELOCATED: [Clean; 1] = [clean_mappings];
        let address = || std::hint::black_box(&RELOCATED)[0] as usize;
        let before = address();
        trim();
        assert_eq!(address(), before);
        assert_eq!(std::hint::black_box(&RELOCATED)[0](SMAPS, "/usr/bin/a berth").len(), 2);
    }
}
