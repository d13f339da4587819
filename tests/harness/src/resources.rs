//! Memory, processor time and wake-ups of a process.
#![allow(unsafe_code, reason = "calls the C library's clocks")]

use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

/// The memory of a process, bytes (proc(5), `smaps_rollup`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Resident pages.
    pub(crate) resident: u64,
    /// The same, with each page divided by the number of processes that share it (PSS).
    pub(crate) share: u64,
    /// Of the share, pages of files: how much of the program file counts depends on who else runs it.
    pub(crate) share_of_files: u64,
}

impl Memory {
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
        let field = |name: &str| -> Result<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            let line = line.with_context(|| format!("no {name} in smaps_rollup"))?;
            Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
        };
        Ok(Self { resident: field("Rss:")?, share: field("Pss:")?, share_of_files: field("Pss_File:")? })
    }
}

/// The processor time of a process, with that of threads that have ended.
pub(crate) fn processor_time(pid: u32) -> Result<Duration> {
    let (pid, mut clock) = (i32::try_from(pid)?, 0);
    // SAFETY: writes only to `clock` (clock_getcpuclockid(3)).
    match unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) } {
        0 => read_clock(clock),
        error => Err(io::Error::from_raw_os_error(error)),
    }
    .with_context(|| format!("cannot read the processor time of process {pid}"))
}

/// The processor time of the calling thread.
pub(crate) fn processor_time_of_this_thread() -> Result<Duration> {
    Ok(read_clock(libc::CLOCK_THREAD_CPUTIME_ID)?)
}

fn read_clock(clock: libc::clockid_t) -> io::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes only to `time` (clock_gettime(2)).
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Processor time is never negative.
    Ok(Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0)))
}

/// How often each thread of a process has waited for something: each wait ends with a wake-up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Threads(BTreeMap<String, u64>);

impl Threads {
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let mut threads = BTreeMap::new();
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?;
            // One that has ended meanwhile did little.
            let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
            let waits = waits(&status).context("no voluntary_ctxt_switches in the status of a thread")?;
            threads.insert(task.file_name().to_string_lossy().into_owned(), waits);
        }
        Ok(Self(threads))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// How often the threads that still run have waited, and so were woken up, since `before`.
    pub(crate) fn wakeups_since(&self, before: &Self) -> u64 {
        let since = |(id, now): (&String, &u64)| now.saturating_sub(before.0.get(id).copied().unwrap_or(0));
        self.0.iter().map(since).sum()
    }
}

/// The waits in `status` of a thread, see proc(5).
fn waits(status: &str) -> Option<u64> {
    let waits = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    waits.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{Memory, Threads, processor_time, waits};
    use std::time::Duration;

    #[test]
    fn a_thread_that_works_and_waits_is_counted() {
        let pid = std::process::id();
        let (before, worked) = (Threads::of(pid).unwrap(), processor_time(pid).unwrap());
        let worker = std::thread::spawn(|| {
            for _ in 0..20 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let began = std::time::Instant::now();
            while began.elapsed() < Duration::from_millis(20) {
                std::hint::spin_loop();
            }
            Threads::of(std::process::id()).unwrap()
        });
        let after = worker.join().unwrap();
        assert!(after.count() > 1, "{after:?}");
        assert!(after.wakeups_since(&before) >= 20, "{after:?}");
        // Also that of a thread that has ended.
        assert!(processor_time(pid).unwrap() >= worked + Duration::from_millis(5));
        // Above every process id of Linux (2^22).
        assert!(processor_time(1 << 24).is_err());
    }

    #[test]
    fn files_of_proc_are_read() {
        let status = "Name:\tberth\nvoluntary_ctxt_switches:\t42\nnonvoluntary_ctxt_switches:\t7\n";
        assert_eq!(waits(status), Some(42));
        let memory = Memory::of(std::process::id()).unwrap();
        assert!(memory.share > 0 && memory.share <= memory.resident, "{memory:?}");
        assert!(memory.share_of_files <= memory.share, "{memory:?}");
    }
}
