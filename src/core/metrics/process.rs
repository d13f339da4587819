//! Metrics of the process, with the names that Prometheus clients have in common, read from /proc (proc(5)).

use super::families::Families;
use super::table;
use std::fmt;
use std::fs;

/// Clock ticks per second in /proc: Linux' USER_HZ is 100 on every architecture that berth is built for.
const TICKS: f64 = 100.0;

pub(super) fn encode(families: &mut Families<'_>) -> fmt::Result {
    let stat = fs::read_to_string("/proc/self/stat").ok().and_then(|text| Stat::read(&text));
    let read = |name: &str| fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    let (status, limits) = (read("status"), read("limits"));
    families.counter_f64(&table::CPU, stat.as_ref().map(|stat| stat.cpu_ticks / TICKS))?;
    // The listing of the directory needs one descriptor itself.
    let open = fs::read_dir("/proc/self/fd").map(|fds| fds.count().saturating_sub(1)).ok();
    families.value(&table::OPEN_FDS, open.and_then(|n| u64::try_from(n).ok()))?;
    families.value(&table::MAX_FDS, max_fds(&limits))?;
    families.value(&table::RESIDENT, kib(&status, "VmRSS:"))?;
    families.value(&table::VIRTUAL, kib(&status, "VmSize:"))?;
    let booted = fs::read_to_string("/proc/stat").ok().and_then(|text| booted(&text));
    let started = stat.zip(booted).map(|(stat, booted)| booted + stat.start_ticks / TICKS);
    families.gauge_f64(&table::STARTED, started.map(|at| (Vec::new(), at)))
}

/// The fields of /proc/self/stat that the metrics need.
#[derive(Debug, PartialEq)]
struct Stat {
    /// User and system time.
    cpu_ticks: f64,
    /// Start time since boot.
    start_ticks: f64,
}

impl Stat {
    fn read(text: &str) -> Option<Self> {
        // The process name in parentheses may hold spaces and parentheses. Field 3 follows it.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
        Some(Self { cpu_ticks: number(14)? + number(15)?, start_ticks: number(22)? })
    }
}

/// The node's boot time, seconds since 1970.
fn booted(stat: &str) -> Option<f64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// The value of a line of /proc/self/status, converted from kB to bytes.
fn kib(status: &str, name: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
    let number: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(number * 1024)
}

/// The soft limit of open files; `None` if unlimited.
fn max_fds(limits: &str) -> Option<u64> {
    let rest = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_may_hold_spaces_and_parentheses() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 12 34 0 0 20 0 9 0 5000 1 2";
        assert_eq!(Stat::read(stat), Some(Stat { cpu_ticks: 46.0, start_ticks: 5000.0 }));
        assert_eq!(Stat::read("7 (a"), None);
        assert_eq!(booted("cpu 1\nbtime 1700000000\n"), Some(1.7e9));
        assert_eq!(kib("VmPeak:\t 9 kB\nVmRSS:\t    20 kB\n", "VmRSS:"), Some(20_480));
        let limits = |soft| format!("Limit Soft Hard\nMax open files            {soft}      4096  files\n");
        assert_eq!((max_fds(&limits("1024")), max_fds(&limits("unlimited"))), (Some(1024), None));
    }
}
