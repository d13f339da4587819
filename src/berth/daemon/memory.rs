//! How the daemon stays small. Reading the store and compiling policies take a few times what is kept, and
//! a third of the program is read only to get going.
#![allow(
    unsafe_code,
    reason = "calls of the C library's allocator, and one of the kernel, on pages of the program"
)]

use std::fs;
use std::time::Duration;

/// The start is over this long after the registration: the first reconcile passes have run, and pods that waited for this
/// node have arrived.
const SETTLED: Duration = Duration::from_secs(5);

/// Interval of the checks whether there is much memory to give back.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// Longest interval between two checks while the memory that was added is in use.
const LOOK_MAX: Duration = Duration::from_secs(320);
/// What is worth the few milliseconds of a heap's lock, bytes.
const GROWN_BYTES: u64 = 24 * 1024 * 1024;

/// Heaps that threads share. The C library makes one a thread, up to eight a processor, and a GPU node has
/// 96 to 256 of those; with two the threads of an Allocate seldom meet.
const HEAPS: i32 = 2;
/// Blocks of so many bytes are mapped alone. The C library starts at half of it, and raises its mark to the
/// largest block that was freed: the store is opened twice (on a copy first), and the second time its page
/// table and counters, from 512 KiB to 4 MiB each and nearly all zero, would lie in a heap and be written
/// through. Answers of the API and buffers of the decision record are smaller, and stay in the heaps.
const MAPPED_ALONE_BYTES: i32 = 256 * 1024;
/// So much free memory at a heap's end is kept for what comes next.
const KEPT_BYTES: i32 = 512 * 1024;

/// Tells the C library how to lay memory out; before there are threads.
pub(super) fn lay_out() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (setting, value) in [
        (libc::M_ARENA_MAX, HEAPS),
        (libc::M_MMAP_THRESHOLD, MAPPED_ALONE_BYTES),
        (libc::M_TRIM_THRESHOLD, KEPT_BYTES),
    ] {
        // SAFETY: takes two numbers (mallopt(3)); one that is not taken changes nothing.
        unsafe {
            libc::mallopt(setting, value);
        }
    }
}

/// Gives back what only the start needed, at once and when its last steps are over; and from then on what a
/// crowd of clients, an upload or a long list left behind.
pub(super) async fn keep_small() {
    for wait in [Duration::ZERO, SETTLED] {
        tokio::time::sleep(wait).await;
        // It ends early only with the daemon.
        let _ = tokio::task::spawn_blocking(trim).await;
    }
    let mut looks = Looks { small: resident_bytes(), wait: LOOK_EVERY };
    loop {
        tokio::time::sleep(looks.wait).await;
        if looks.has_grown(resident_bytes()) {
            let _ = tokio::task::spawn_blocking(trim_heaps).await;
            looks.trimmed(resident_bytes());
        }
    }
}

/// When to look again how much there is to give back.
struct Looks {
    /// How small the process was, bytes.
    small: u64,
    wait: Duration,
}

impl Looks {
    fn has_grown(&mut self, now: u64) -> bool {
        self.small = self.small.min(now);
        let grown = now > self.small + GROWN_BYTES;
        if !grown {
            self.wait = LOOK_EVERY;
        }
        grown
    }

    /// What is in use stays, and is free some time: later each time, since it may be for good.
    fn trimmed(&mut self, now: u64) {
        let stays = now > self.small + GROWN_BYTES;
        self.wait = if stays { (self.wait * 2).min(LOOK_MAX) } else { LOOK_EVERY };
    }
}

/// Of the process, by the kernel; 0 where it does not say.
fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or_default();
    pages * rustix::param::page_size() as u64
}

/// All that there is. Takes a few milliseconds.
fn trim() {
    trim_heaps();
    #[cfg(target_os = "linux")]
    rest_program();
}

/// What was freed. The C library gives it back by itself only from a heap's end.
fn trim_heaps() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: takes a number and no pointer, and may be called from any thread at any time
    // (malloc_trim(3): MT-Safe).
    unsafe {
        libc::malloc_trim(0);
    }
}

/// The kernel keeps pages of a program for it as long as they are mapped, used or not. Those that are needed again are mapped again from
/// the page cache, or read from the file.
#[cfg(target_os = "linux")]
fn rest_program() {
    let (Ok(program), Ok(smaps)) = (fs::read_link("/proc/self/exe"), fs::read_to_string("/proc/self/smaps"))
    else {
        return;
    };
    for (begin, end) in clean(&smaps, &program.to_string_lossy()) {
        // SAFETY: a private mapping of a file that cannot be written to and of which no page differs from
        // the file: the next access finds the same bytes (madvise(2), MADV_DONTNEED).
        unsafe {
            libc::madvise(std::ptr::without_provenance_mut(begin), end - begin, libc::MADV_DONTNEED);
        }
    }
}

/// The mappings of this file, as `/proc/self/smaps` shows them (proc_pid_smaps(5)), that are private,
/// cannot be written to, and have no page of their own. What the loader has relocated has.
fn clean(smaps: &str, program: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut candidate = None;
    for line in smaps.lines() {
        if let Some(mapping) = header(line) {
            candidate = mapping.of(program);
        } else if let Some(rest) = line.strip_prefix("Anonymous:") {
            let own = rest.trim().trim_end_matches("kB").trim();
            found.extend(candidate.take().filter(|_| own == "0"));
        }
    }
    found
}

/// One mapping.
struct Mapping<'s> {
    range: (usize, usize),
    rights: &'s str,
    path: &'s str,
}

impl Mapping<'_> {
    fn of(&self, program: &str) -> Option<(usize, usize)> {
        let fixed = matches!(self.rights, "r--p" | "r-xp" | "--xp");
        (fixed && self.path == program).then_some(self.range)
    }
}

/// `begin-end rights offset device inode path`, the path with whatever spaces it has.
fn header(line: &str) -> Option<Mapping<'_>> {
    let (range, rest) = line.split_once(' ')?;
    let (begin, end) = range.split_once('-')?;
    let number = |hex| usize::from_str_radix(hex, 16).ok();
    let range = (number(begin)?, number(end)?);
    let (rights, rest) = rest.split_once(' ')?;
    let mut rest = rest;
    for _ in 0..3 {
        rest = rest.trim_start().split_once(' ').map_or("", |(_, rest)| rest);
    }
    Some(Mapping { range, rights, path: rest.trim_start() })
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
    fn only_what_is_as_in_the_program_file_is_let_go_of() {
        let range = |begin: usize, end: usize| (begin << 20, end << 20);
        let fixed = [range(0x55d_0c00, 0x55d_0c10), range(0x55d_0c10, 0x55d_0c30)];
        assert_eq!(clean(SMAPS, "/usr/bin/a berth"), fixed);
        assert_eq!(clean(SMAPS, "/usr/bin/a"), []);
        assert_eq!(clean("", ""), []);
    }

    #[test]
    fn what_is_in_use_is_looked_at_again_and_less_often() {
        const MIB: u64 = 1024 * 1024;
        let mut looks = Looks { small: 20 * MIB, wait: LOOK_EVERY };
        assert!(!looks.has_grown(44 * MIB) && looks.has_grown(120 * MIB));
        for seconds in [20, 40, 80, 160, 320, 320] {
            looks.trimmed(118 * MIB);
            assert_eq!(looks.wait, Duration::from_secs(seconds));
            assert!(looks.has_grown(118 * MIB), "it did not become smaller");
        }
        looks.trimmed(30 * MIB);
        assert_eq!(looks.wait, LOOK_EVERY);
        // What the crowd left is measured against how small it was before.
        assert!(!looks.has_grown(18 * MIB) && looks.has_grown(43 * MIB));
        looks.trimmed(43 * MIB);
        assert!(!looks.has_grown(40 * MIB) && looks.wait == LOOK_EVERY);
    }

    #[test]
    fn this_program_runs_on_without_its_start() {
        let program = fs::read_link("/proc/self/exe").unwrap();
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        assert!(!clean(&smaps, &program.to_string_lossy()).is_empty());
        // Addresses that the loader relocated: let go of, they would be those of the file.
        type Clean = fn(&str, &str) -> Vec<(usize, usize)>;
        static RELOCATED: [Clean; 1] = [clean];
        let address = || std::hint::black_box(&RELOCATED)[0] as usize;
        let before = address();
        trim();
        assert_eq!(address(), before);
        assert_eq!(std::hint::black_box(&RELOCATED)[0](SMAPS, "/usr/bin/a berth").len(), 2);
    }
}
