//! Says once when a GPU begins to be used without an allocation, and once when that is over.

use crate::kernel::belongs::{Bypass, OnGpu, Owners};
use crate::kernel::command::Rules;
use crate::kernel::ledger::Ledger;
use crate::kernel::names::PartId;
use crate::kernel::time::Now;
use std::collections::BTreeMap;

/// Most lines about single processes after one look, each way: a job of eight ranks on each of two
/// GPUs, and some room. What is beyond is one number; the API lists them all.
const LINES_MAX: usize = 20;

/// GPU, process id, start.
type Key = (PartId, u32, Option<u64>);

/// What was said so far.
#[derive(Default)]
pub(super) struct BypassLog {
    open: BTreeMap<Key, String>,
}

impl BypassLog {
    /// Compares what is with what was said, and says the difference.
    pub(super) fn tell(&mut self, ledger: &Ledger, rules: &Rules, now: Now) {
        let now_open = Owners::of(ledger).bypasses(rules.timing.bypass_ms, now).into_iter().filter_map(named);
        let (began, ended) = self.turn(now_open.collect());
        for (gpu, pid, what) in began.iter().take(LINES_MAX) {
            tracing::warn!(%gpu, pid, "a GPU is used without an allocation: {what}");
        }
        for (gpu, pid, what) in ended.iter().take(LINES_MAX) {
            tracing::info!(%gpu, pid, "no longer used without an allocation: {what}");
        }
        let unsaid = began.len().saturating_sub(LINES_MAX) + ended.len().saturating_sub(LINES_MAX);
        if unsaid > 0 {
            tracing::warn!(
                unsaid,
                "more processes without an allocation came or went (`berth process bypass` lists them)"
            );
        }
    }

    /// What is new and what is over.
    fn turn(
        &mut self,
        now_open: BTreeMap<Key, String>,
    ) -> (Vec<(PartId, u32, String)>, Vec<(PartId, u32, String)>) {
        let told = |(key, what): (&Key, &String)| (key.0.clone(), key.1, what.clone());
        let began = now_open.iter().filter(|(key, _)| !self.open.contains_key(*key)).map(told).collect();
        let ended = self.open.iter().filter(|(key, _)| !now_open.contains_key(*key)).map(told).collect();
        self.open = now_open;
        (began, ended)
    }
}

/// A process by what names it, and in words. What was seen without a process is told by who saw it.
fn named(bypass: Bypass) -> Option<(Key, String)> {
    let OnGpu { gpu, process } = bypass.process?;
    let name = process.who.name.as_deref().unwrap_or("a process").escape_debug().to_string();
    let pod = bypass.pod.map_or_else(String::new, |pod| format!(" of pod {}", pod.uid));
    let key = (gpu, process.pid, process.who.started_ticks);
    Some((key, format!("{name}{pod}: {}", bypass.reason.words())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_said_once_when_it_begins_and_once_when_it_ends() {
        let gpu = PartId::parse("GPU-0").unwrap();
        let open = |all: &[(u32, u64)]| -> BTreeMap<Key, String> {
            all.iter().map(|(pid, start)| ((gpu.clone(), *pid, Some(*start)), format!("p{start}"))).collect()
        };
        let mut log = BypassLog::default();
        let pids = |said: Vec<(PartId, u32, String)>| {
            said.into_iter().map(|(_, pid, what)| (pid, what)).collect::<Vec<_>>()
        };
        let mut turn = |all: &[(u32, u64)]| {
            let (began, ended) = log.turn(open(all));
            (pids(began), pids(ended))
        };
        let one = |start: u64| vec![(7, format!("p{start}"))];
        assert_eq!(turn(&[(7, 1)]), (one(1), vec![]));
        assert_eq!(turn(&[(7, 1)]), (vec![], vec![]));
        // Another process with the same id.
        assert_eq!(turn(&[(7, 2)]), (one(2), one(1)));
        assert_eq!(turn(&[]), (vec![], one(2)));
        assert_eq!(turn(&[]), (vec![], vec![]));
    }
}
