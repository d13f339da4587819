//! What a process takes of the machine, as /proc shows it.

use anyhow::{Context as _, Result};
use std::collections::BTreeMap;
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

/// What the threads of a process have done since they were started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Threads(BTreeMap<String, Thread>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Thread {
    processor: Duration,
    /// How often it has waited for something: each wait ends with a wake-up.
    waits: u64,
}

impl Threads {
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let mut threads = BTreeMap::new();
        for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let task = task?;
            // One that has ended meanwhile did little.
            let read = |name| std::fs::read_to_string(task.path().join(name));
            let (Ok(scheduled), Ok(status)) = (read("schedstat"), read("status")) else { continue };
            let thread = Thread::parse(&scheduled, &status);
            threads.insert(task.file_name().to_string_lossy().into_owned(), thread.context("/proc/*/task")?);
        }
        Ok(Self(threads))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Of all threads together.
    pub(crate) fn processor_time(&self) -> Duration {
        self.0.values().map(|thread| thread.processor).sum()
    }

    /// What those that still run have used since `before`, and those that were started since.
    pub(crate) fn processor_since(&self, before: &Self) -> Duration {
        self.since(before).map(|(now, then)| now.processor.saturating_sub(then.processor)).sum()
    }

    /// How often a thread waited since `before`, which is how often one was woken up.
    pub(crate) fn wakeups_since(&self, before: &Self) -> u64 {
        self.since(before).map(|(now, then)| now.waits.saturating_sub(then.waits)).sum()
    }

    fn since<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = (Thread, Thread)> + 'a {
        self.0.iter().map(|(id, now)| (*now, before.0.get(id).copied().unwrap_or_default()))
    }
}

impl Thread {
    /// `schedstat`: the first number is nanoseconds at work. `status`: see proc(5).
    fn parse(scheduled: &str, status: &str) -> Option<Self> {
        let ns = scheduled.split(' ').next()?.parse().ok()?;
        let waits = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
        Some(Self { processor: Duration::from_nanos(ns), waits: waits.trim().parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::{Memory, Thread, Threads};
    use std::time::Duration;

    #[test]
    fn a_thread_that_works_and_waits_is_counted() {
        let pid = std::process::id();
        let before = Threads::of(pid).unwrap();
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
        assert!(after.processor_since(&before) >= Duration::from_millis(5), "{after:?}");
        assert!(after.processor_time() >= after.processor_since(&before));
    }

    #[test]
    fn files_of_proc_are_read() {
        let status = "Name:\tberth\nvoluntary_ctxt_switches:\t42\nnonvoluntary_ctxt_switches:\t7\n";
        let thread = Thread { processor: Duration::from_nanos(1_500), waits: 42 };
        assert_eq!(Thread::parse("1500 20 3\n", status), Some(thread));
        let memory = Memory::of(std::process::id()).unwrap();
        assert!(memory.share > 0 && memory.share <= memory.resident, "{memory:?}");
        assert!(memory.share_of_files <= memory.share, "{memory:?}");
    }
}
