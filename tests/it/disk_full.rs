//! A disk that is full or read-only at any moment, under the whole daemon: an Allocate fails and says why,
//! nothing is lost or invented, and it recovers without a hand.

use crate::crash::kill::Program;
use crate::crash::kill::believed::grants;
use crate::crash::kill::process::Serving;
use disk_faults::{Fault, Faults};
use kubelet_standin::{Kubelet, PodSpec};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(30);
const SHARED: &str = "nvidia.com/gpu.shared";
const CONFIGURATION: &str = "
gpus: sim:2xt4
stack: [{ policy: timeslice, parameters: { replicas: 8 } }]
rounds: { listEveryMs: 100, listEveryCordonedMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 100, kubeletSettleMs: 100, replySettleMs: 200, retireMs: 500, namedMs: 200 }
";

struct Node {
    folder: tempfile::TempDir,
    kubelet: Kubelet,
    faults: Faults,
    program: Program,
    pods: usize,
}

impl Node {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.yaml"), CONFIGURATION).unwrap();
        let kubelet = Kubelet::started(folder.path().join("kubelet")).await.unwrap();
        let faults = Faults::new(&folder.path().join("state"), &folder.path().join("faults"));
        let program = Program {
            exe: env!("CARGO_BIN_EXE_berth").into(),
            environment: faults.environment().unwrap(),
            kill_points: false,
        };
        Self { folder, kubelet, faults, program, pods: 0 }
    }

    async fn serve(&self) -> Serving {
        let mut serving = Serving::start(&self.program, self.folder.path(), None).unwrap();
        let end = Instant::now() + SOON;
        while !serving.is_up() {
            assert!(!serving.is_dead().unwrap() && Instant::now() < end, "{}", serving.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.kubelet.wait_for("its devices", SOON, |k| k.is_served(SHARED)).await.unwrap();
        serving
    }

    /// One more pod; it ends again if it was admitted, so that the node never fills up.
    async fn pod(&mut self) -> Result<String, String> {
        self.pods += 1;
        let pod = PodSpec::new("ns", &format!("p{}", self.pods)).container("main", &[(SHARED, 1)]);
        let uid = pod.uid.clone();
        match self.kubelet.admit(pod).await {
            Ok(()) => Ok(uid),
            Err(error) => {
                self.kubelet.delete(&uid);
                Err(error.to_string())
            }
        }
    }

    /// Every grant that was answered with success is listed with its devices.
    async fn check(&self, serving: &mut Serving) {
        let list = serving.live().await.unwrap().unwrap();
        for (id, grant) in grants(&self.kubelet) {
            let found = list.iter().find(|a| a.id == id).unwrap_or_else(|| panic!("{id} is lost: {list:?}"));
            assert_eq!(found.devices.iter().cloned().collect::<BTreeSet<_>>(), grant.devices);
        }
    }

    /// The list is what the kubelet believes and nothing else.
    async fn settled(&self, serving: &mut Serving) {
        let end = Instant::now() + SOON;
        loop {
            self.check(serving).await;
            let list = serving.live().await.unwrap().unwrap();
            let grants = grants(&self.kubelet);
            if list.iter().all(|a| grants.contains_key(&a.id)) {
                return;
            }
            assert!(Instant::now() < end, "{list:?} but {grants:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_fails_at_any_moment_fails_allocates_clearly_and_nothing_else() {
    let mut node = Node::new().await;
    let mut serving = node.serve().await;
    let mut running = vec![node.pod().await.unwrap()];
    let faults = [(Fault::Full, "No space left on device"), (Fault::ReadOnly, "Read-only file system")];
    for (fault, words) in faults {
        // One append makes some five calls that change something: each of them is the first to fail once.
        for after in 0..8 {
            node.faults.set(Some((fault, after))).unwrap();
            let end = Instant::now() + SOON;
            let said = loop {
                match node.pod().await {
                    Ok(uid) => running.push(uid),
                    Err(said) => break said,
                }
                assert!(Instant::now() < end, "{fault:?} {after}: every pod was admitted");
                if running.len() > 4 {
                    node.kubelet.delete(&running.remove(0));
                }
            };
            assert!(
                said.contains("the allocation store failed, so nothing was changed"),
                "{fault:?} {after}: {said}"
            );
            assert!(
                said.contains(words) || said.contains("not yet read back") || said.contains("did not answer"),
                "{fault:?} {after}: {said}"
            );
            // Readers are served meanwhile.
            node.check(&mut serving).await;
            node.faults.set(None).unwrap();
            let end = Instant::now() + SOON;
            loop {
                match node.pod().await {
                    Ok(uid) => break running.push(uid),
                    Err(said) => {
                        assert!(Instant::now() < end, "{fault:?} {after}: it does not recover: {said}");
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            while running.len() > 4 {
                node.kubelet.delete(&running.remove(0));
            }
            node.settled(&mut serving).await;
        }
    }
    // What the disk has is what was said.
    serving.kill();
    let mut serving = node.serve().await;
    node.settled(&mut serving).await;
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_on_a_full_disk_says_so_and_leaves_the_store_as_it_was() {
    let mut node = Node::new().await;
    let mut serving = node.serve().await;
    node.pod().await.unwrap();
    serving.kill();
    let log = node.folder.path().join("state/store/data/db");
    let before = std::fs::read(&log).unwrap();
    for (fault, words) in [(Fault::Full, "free some space"), (Fault::ReadOnly, "mount it writable")] {
        node.faults.set(Some((fault, 0))).unwrap();
        let mut serving = Serving::start(&node.program, node.folder.path(), None).unwrap();
        let end = Instant::now() + SOON;
        let said = loop {
            match serving.is_dead() {
                Err(said) => break said.to_string(),
                Ok(dead) => assert!(!dead && Instant::now() < end, "{}", serving.log()),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        assert!(said.contains(words), "{said}");
        assert!(std::fs::read(&log).unwrap() == before, "{fault:?}");
    }
    node.faults.set(None).unwrap();
    let mut serving = node.serve().await;
    node.settled(&mut serving).await;
    assert!(Path::new(&log).exists());
}
