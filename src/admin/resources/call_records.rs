//! Call statistics of policies as the API shows them: in entries of the stack, in replays and in shadows.

use berth_api::{
    Comparison, Difference, Faults, Hook, HookRecord, Record, Replay, Shadow, parameters, rfc3339,
};
use berth_kernel::policy;
use std::collections::BTreeMap;

/// The call statistics of a stack entry.
pub(crate) fn record(calls: &berth_core::stack::EntryStats) -> Record {
    let by_kind = calls.faults().into_iter();
    let hooks = || calls.hooks.iter();
    Record {
        calls: hooks().map(|(hook, stats)| ((*hook).into(), stats.calls)).collect(),
        hooks: hooks().map(|(hook, stats)| ((*hook).into(), hook_record(stats))).collect(),
        faults: Faults {
            by_kind: by_kind.map(|(kind, n)| ((&kind).into(), n)).collect(),
            in_a_row: calls.in_a_row,
            last: calls.last.clone(),
        },
        suspended: calls.suspended,
    }
}

fn hook_record(stats: &berth_core::stack::CallStats) -> HookRecord {
    let percentile = |percent| stats.latencies.percentile_us(percent).unwrap_or(0);
    HookRecord {
        calls: stats.calls,
        passes: stats.passes,
        faults: stats.failed(),
        p50_microseconds: percentile(50),
        p99_microseconds: percentile(99),
        worst_microseconds: stats.latencies.worst_us,
    }
}

/// The result of a replay of the candidate `policy`.
pub(crate) fn replay(policy: &str, report: &berth_core::lab::Report) -> Replay {
    Replay {
        policy: policy.to_owned(),
        looked: report.decisions,
        unreadable: report.unreadable,
        counts: counts(&report.counts),
        differences: report.differences.iter().map(difference).collect(),
        next: report.next.map(|seq| seq.to_string()),
    }
}

/// A shadow, newest differences first.
pub(crate) fn shadow(shadow: &berth_core::lab::Shadow) -> Shadow {
    Shadow {
        id: shadow.id,
        policy: shadow.candidate.policy.clone(),
        digest: shadow.candidate.digest.to_string(),
        parameters: parameters(&shadow.candidate.parameters),
        since: rfc3339(shadow.since.wall_ms),
        counts: counts(&shadow.counts),
        differences: shadow.differences.iter().rev().map(difference).collect(),
    }
}

fn difference(difference: &berth_core::lab::Difference) -> Difference {
    Difference {
        seq: difference.seq,
        at: rfc3339(difference.at_wall_ms),
        hook: difference.hook.into(),
        failed: difference.failed,
        words: difference.message.clone(),
    }
}

fn counts(counts: &BTreeMap<policy::Hook, berth_core::lab::Counts>) -> BTreeMap<Hook, Comparison> {
    let one = |counts: &berth_core::lab::Counts| {
        let berth_core::lab::Counts { same, differs, passes, fails, skipped } = *counts;
        Comparison { same, differs, passes, fails, skipped }
    };
    counts.iter().map(|(hook, counts)| ((*hook).into(), one(counts))).collect()
}
