//! Who uses GPUs without an allocation, and who does so no more.

use super::names::gpu_name;
use super::news::News;
use berth_api::EventKind;
use berth_kernel::belongs::Owners;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Uses that are told, by GPU, process and part; each with its reason and its words.
pub(super) type Bypasses = BTreeMap<(PartId, u32, PartId), (&'static str, String)>;

/// Whether anything that the answer follows from is another. Whose a process is takes some finding out.
pub(super) fn may_differ(old: &Ledger, new: &Ledger) -> bool {
    !(Arc::ptr_eq(&old.processes, &new.processes)
        && Arc::ptr_eq(&old.live, &new.live)
        && Arc::ptr_eq(&old.ended, &new.ended)
        && same(old.pods.as_ref(), new.pods.as_ref()))
}

fn same<T>(a: Option<&Arc<T>>, b: Option<&Arc<T>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

pub(super) fn bypasses(ledger: &Ledger) -> Bypasses {
    if !ledger.processes.on.values().flatten().any(|seen| seen.told) {
        return Bypasses::new();
    }
    let all = Owners::of(ledger).bypasses().into_iter().map(|bypass| {
        let process = &bypass.process;
        let name = process.who.name.as_deref().map(|name| format!(" ({name})")).unwrap_or_default();
        let words = format!(
            "{} is used without an allocation by process {}{name}: {}",
            gpu_name(ledger, &bypass.gpu),
            process.pid,
            bypass.reason.words()
        );
        ((bypass.gpu.clone(), process.pid, process.part.clone()), (bypass.reason.as_str(), words))
    });
    all.collect()
}

pub(super) fn news(ledger: &Ledger, old: &Bypasses, new: &Bypasses) -> Vec<News> {
    let mut news = Vec::new();
    for (key, (reason, words)) in new {
        if old.get(key).is_none_or(|(before, _)| before != reason) {
            news.push(News::of_gpu(EventKind::Bypass, &key.0, words.clone()));
        }
    }
    for (gpu, pid, _) in old.keys().filter(|key| !new.contains_key(key)) {
        let words = format!("process {pid} no longer uses {} without an allocation", gpu_name(ledger, gpu));
        news.push(News::of_gpu(EventKind::BypassOver, gpu, words));
    }
    news
}
