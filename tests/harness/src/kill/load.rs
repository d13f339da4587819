//! Pods that come and go, as fast as the kubelet admits them.

use super::believed;
use super::check::Memory;
use super::rng::Rng;
use super::runtime::Runtime;
use super::tally::Wrong;
use kubelet_standin::{Kubelet, PodSpec};
use std::time::Duration;
use tokio::sync::watch;

pub(crate) const WHOLE: &str = "nvidia.com/gpu";
pub(crate) const SHARED: &str = "nvidia.com/gpu.shared";
/// From so many living pods on more leave than come: under what eight GPUs hold in any mix.
const PODS_BUSY: usize = 12;

/// What the load needs from round to round.
#[derive(Debug)]
pub(crate) struct Load {
    kubelet: Kubelet,
    pub(crate) runtime: Runtime,
    pub(crate) rng: Rng,
    pub(crate) memory: Memory,
    living: Vec<String>,
    pods: u64,
    pub(crate) refused: u64,
}

impl Load {
    pub(crate) fn new(kubelet: &Kubelet, runtime: Runtime, rng: Rng) -> Self {
        Self {
            kubelet: kubelet.clone(),
            runtime,
            rng,
            memory: Memory::default(),
            living: Vec::new(),
            pods: 0,
            refused: 0,
        }
    }

    /// Until the daemon is dead.
    pub(crate) async fn run(&mut self, dead: &watch::Receiver<bool>) -> Vec<Wrong> {
        let mut wrong = Vec::new();
        while !*dead.borrow() {
            if !self.kubelet.is_served(WHOLE) || !self.kubelet.is_served(SHARED) {
                // Until it has registered, an admission would fail without asking it.
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            let leave = if self.living.len() < PODS_BUSY { 35 } else { 65 };
            if self.living.is_empty() || !self.rng.chance(leave) {
                wrong.extend(self.admit(dead).await);
            } else {
                self.leave().await;
            }
            tokio::task::yield_now().await;
        }
        wrong
    }

    async fn admit(&mut self, dead: &watch::Receiver<bool>) -> Vec<Wrong> {
        let resource = if self.rng.chance(70) { SHARED } else { WHOLE };
        let count = if self.rng.chance(20) { 2 } else { 1 };
        // There is no scheduler: usually only free devices are requested.
        let (free, taken) = (self.kubelet.allocatable(resource), self.kubelet.in_use(resource).len());
        if free.unwrap_or(0) < taken + count && !self.rng.chance(3) {
            // Nothing to do but wait for the next list, or for a pod to leave.
            tokio::time::sleep(Duration::from_millis(1)).await;
            return Vec::new();
        }
        self.pods += 1;
        let mut pod = PodSpec::new("crash", &format!("p{}", self.pods));
        let mut allocates = 1;
        if self.rng.chance(10) {
            pod = pod.init("init", &[(resource, count)]);
            allocates += 1;
        }
        pod = pod.container("main", &[(resource, count)]);
        if self.rng.chance(10) && free.unwrap_or(0) >= taken + 2 * count {
            pod = pod.container("beside", &[(resource, count)]);
            allocates += 1;
        }
        let uid = pod.uid.clone();
        if self.kubelet.admit(pod.clone()).await.is_err() {
            if !*dead.borrow() {
                self.refused += 1;
            }
            self.memory.fail(allocates, ids(&self.kubelet, &uid));
            self.kubelet.delete(&uid);
            return Vec::new();
        }
        self.living.push(uid.clone());
        let wrong = self.memory.hear(ids(&self.kubelet, &uid));
        // Its containers are cached: no call is made that could fail.
        let _ = self.kubelet.run(&uid).await;
        self.runtime.run(&self.kubelet, &pod).await;
        wrong
    }

    async fn leave(&mut self) {
        let at = self.rng.below(self.living.len() as u64);
        let uid = self.living.swap_remove(usize::try_from(at).unwrap_or(0));
        if self.rng.chance(30) {
            self.kubelet.finish(&uid);
        }
        // A pod that is deleted by force leaves the kubelet before its containers end.
        let is_forced = self.rng.chance(20);
        if !is_forced {
            self.runtime.end(&uid).await;
        }
        self.kubelet.delete(&uid);
        if is_forced {
            self.runtime.end(&uid).await;
        }
    }
}

fn ids(kubelet: &Kubelet, uid: &str) -> impl Iterator<Item = String> {
    believed::of_pod(kubelet, uid).into_keys()
}
