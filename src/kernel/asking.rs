//! Whether a pod that is new to us may be the one that the kubelet asks for next. Its view is handed
//! in without delay: both hear of a pod at the same moment, and the kubelet's Allocate may come within
//! milliseconds.

use super::ledger::Ledger;
use super::pods::{Pod, Stage};

/// Views that are handed in without delay in one second. The kubelet admits one pod after another and
/// starts no more in a second; when a storm brings more, the rest is gathered as other news are: for
/// 100 ms of the API server, 50 ms of the kubelet. So pods cost the keeper at most 20 + 10 turns a
/// second by the one source and 20 + 20 by the other, however many there are.
pub const AT_ONCE_MAX: u32 = 20;

/// Whether `pod` waits for devices of any kind, and `known`, which stands for it so far, did not.
#[must_use]
pub fn waits_anew(pod: &Pod, known: Option<&Pod>) -> bool {
    pod.stage == Stage::Waiting
        && pod.containers.iter().any(|container| !container.asks.is_empty())
        && known.is_none_or(|known| known.stage != Stage::Waiting || known.containers != pod.containers)
}

/// Whether a pod asks for a resource of ours: one with a listed device. Others are not asked of us.
#[must_use]
pub fn asks_for_ours(pod: &Pod, ledger: &Ledger) -> bool {
    let ours = |asked| ledger.parts.values().any(|part| part.devices.keys().any(|(name, _)| name == asked));
    pod.containers.iter().flat_map(|container| &container.asks).any(|(asked, _)| ours(asked))
}

/// How often views were handed in without delay lately.
#[derive(Debug, Default)]
pub struct Haste {
    second_mono_ms: Option<u64>,
    taken: u32,
}

impl Haste {
    /// Whether one more may go without delay now; it is counted if so.
    pub fn take(&mut self, now_mono_ms: u64) -> bool {
        if self.second_mono_ms.is_none_or(|began| now_mono_ms.saturating_sub(began) >= 1_000) {
            (self.second_mono_ms, self.taken) = (Some(now_mono_ms), 0);
        }
        let may = self.taken < AT_ONCE_MAX;
        self.taken += u32::from(may);
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Resource;
    use crate::pods::PodContainer;

    fn pod(stage: Stage, asks: &[(&str, u32)]) -> Pod {
        let asks = asks.iter().map(|(name, n)| (Resource::parse(name).unwrap(), *n)).collect();
        Pod {
            uid: "u-1".into(),
            namespace: "team".into(),
            name: "p".into(),
            labels: Vec::new(),
            is_static: false,
            of_daemon_set: false,
            stage,
            leaving_since_wall_ms: None,
            created_wall_ms: 0,
            containers: vec![PodContainer { name: "main".into(), asks }],
            bypass: None,
        }
    }

    #[test]
    fn a_pod_waits_anew_when_it_comes_and_when_it_asks_for_something_else() {
        let (one, two) = ([("nvidia.com/gpu", 1)], [("nvidia.com/gpu", 2)]);
        let waiting = pod(Stage::Waiting, &one);
        assert!(waits_anew(&waiting, None));
        assert!(waits_anew(&waiting, Some(&pod(Stage::Waiting, &two))));
        let labelled = Pod { labels: vec![("a".into(), "b".into())], ..waiting.clone() };
        assert!(!waits_anew(&labelled, Some(&waiting)), "its status or labels are no news of this kind");
        assert!(!waits_anew(&pod(Stage::Admitted, &one), None));
        assert!(!waits_anew(&pod(Stage::Waiting, &[]), None));
    }

    #[test]
    fn a_storm_is_hasty_so_many_times_a_second_and_no_more() {
        let mut haste = Haste::default();
        let taken = |haste: &mut Haste, from: u64, to: u64| (from..to).filter(|ms| haste.take(*ms)).count();
        assert_eq!(taken(&mut haste, 5_000, 6_000), AT_ONCE_MAX as usize);
        assert_eq!(taken(&mut haste, 6_000, 6_999), AT_ONCE_MAX as usize);
    }
}
