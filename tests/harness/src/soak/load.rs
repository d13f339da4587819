//! The load: pods that come at a steady rate, are checked, and go.

use crate::soak::{SHARED, Wrong};
use berth_core::KernelHandle;
use berth_kernel::ids::names::AllocationId;
use kubelet_standin::{Kubelet, PodSpec};
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// Tasks that start pods. The kubelet admits one pod at a time, so more would only wait.
const TASKS: usize = 4;
/// The environment variable that names the allocation.
const ID: &str = "BERTH_ALLOCATION_ID_NVIDIA_COM_GPU_SHARED";

/// The running load.
pub(crate) struct Load {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

struct Shared {
    kubelet: Arc<Kubelet>,
    kernel: KernelHandle,
    wrong: Arc<Wrong>,
    /// Which policies may be behind a grant: those of one stack, never of two.
    label_sets: Vec<BTreeSet<String>>,
    /// Pods that one task lets run at a time.
    running: usize,
    pods: AtomicU64,
    checked: AtomicU64,
    took_us: Mutex<Vec<u64>>,
    stop: AtomicBool,
}

/// What it saw.
pub(crate) struct Summary {
    pub(crate) pods: u64,
    pub(crate) checked: u64,
    took_us: Vec<u64>,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |percent: usize| self.took_us.get(self.took_us.len() * percent / 100).copied().unwrap_or(0);
        let worst = self.took_us.last().copied().unwrap_or(0);
        write!(f, "p50 {} us, p99 {} us, worst {worst} us", at(50), at(99))
    }
}

impl Load {
    pub(crate) fn start(
        kubelet: &Arc<Kubelet>,
        kernel: &KernelHandle,
        wrong: &Arc<Wrong>,
        label_sets: &[BTreeSet<String>],
        rate: u64,
        shares: usize,
    ) -> Self {
        let shared = Arc::new(Shared {
            kubelet: Arc::clone(kubelet),
            kernel: kernel.clone(),
            wrong: Arc::clone(wrong),
            label_sets: label_sets.to_vec(),
            // Half of what there is, so that there is always a free share to choose.
            running: (shares / 2 / TASKS).max(1),
            pods: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            took_us: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            tasks.spawn(Arc::clone(&shared).run(task, rate));
        }
        Self { shared, tasks }
    }

    pub(crate) fn pods(&self) -> u64 {
        self.shared.pods.load(Ordering::Relaxed)
    }

    pub(crate) async fn stop(mut self) -> Summary {
        self.shared.stop.store(true, Ordering::Relaxed);
        while self.tasks.join_next().await.is_some() {}
        let mut took_us =
            std::mem::take(&mut *self.shared.took_us.lock().unwrap_or_else(PoisonError::into_inner));
        took_us.sort_unstable();
        Summary { pods: self.pods(), checked: self.shared.checked.load(Ordering::Relaxed), took_us }
    }
}

impl Shared {
    async fn run(self: Arc<Self>, task: usize, rate: u64) {
        let period = Duration::from_micros(1_000_000 * TASKS as u64 / rate.max(1));
        let mut tick = tokio::time::interval(period);
        // A burst after a delay keeps the configured rate.
        tick.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut running = VecDeque::<String>::new();
        let mut n = 0_u64;
        while !self.stop.load(Ordering::Relaxed) {
            tick.tick().await;
            n += 1;
            if running.len() >= self.running
                && let Some(oldest) = running.pop_front()
            {
                self.kubelet.delete(&oldest);
            }
            let name = format!("p{task}-{n}");
            let pod = PodSpec::new("soak", &name).container("main", &[(SHARED, 1)]);
            let uid = pod.uid.clone();
            let began = Instant::now();
            let admitted = self.kubelet.admit(pod).await;
            let us = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.took_us.lock().unwrap_or_else(PoisonError::into_inner).push(us);
            self.pods.fetch_add(1, Ordering::Relaxed);
            match admitted {
                Ok(()) => {
                    self.check(&uid, &name).await;
                    running.push_back(uid);
                }
                Err(error) => {
                    self.wrong.failed(&format!("{name}: {error}"));
                    self.kubelet.delete(&uid);
                }
            }
        }
        for uid in running {
            self.kubelet.delete(&uid);
        }
    }

    /// A grant is on the record under the id that its container has, on the very devices, and one stack
    /// alone is behind it.
    async fn check(&self, uid: &str, name: &str) {
        let view = match self.kubelet.start_container(uid, "main").await {
            Ok(view) => view,
            Err(error) => return self.wrong.failed(&format!("{name} cannot be started: {error}")),
        };
        let Some(id) = view.envs.get(ID).and_then(|id| AllocationId::parse(id).ok()) else {
            return self.wrong.violated(&format!("{name} has no allocation id"));
        };
        let ledger = self.kernel.snapshot();
        let Some(allocation) = ledger.live.get(&id) else {
            return self.wrong.violated(&format!("{id} of {name} is not on the record"));
        };
        let on_record: BTreeSet<String> = allocation.devices.iter().map(ToString::to_string).collect();
        let held: BTreeSet<String> = self.kubelet.held(uid, "main", SHARED).into_iter().collect();
        if on_record != held {
            self.wrong.violated(&format!("{name} holds {held:?}, and {id} is {on_record:?}"));
        }
        let by: BTreeSet<String> = allocation.decision.by.iter().map(ToString::to_string).collect();
        if !self.label_sets.contains(&by) {
            self.wrong.violated(&format!("{id} of {name} was allowed by {by:?}, which is no stack's word"));
        }
        self.checked.fetch_add(1, Ordering::Relaxed);
    }
}
