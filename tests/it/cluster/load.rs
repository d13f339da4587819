//! The load of a daemon on the API server: the requests of an idle one, and how it reconnects after a loss.

use crate::cluster::faults::{settings, soon, view};
use crate::support::api_server::{ApiServer, Cut, LIST, NODE_READ, NODE_WATCH, Read, Unread, WATCH, pod};
use crate::support::batches::batches;
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use berth_cluster::{self, ApiServerStatus, ClusterTasks, Settings, WatchedLabel};
use std::time::{Duration, Instant};

const SECOND: Duration = Duration::from_secs(1);
const LABEL: &str = "nvidia.com/device-plugin.config";

/// A watched API server with one pod, the daemon's room that watches it, and its node.
struct Watched {
    server: ApiServer,
    node: KubeletNode,
    running: ClusterTasks,
    _folder: tempfile::TempDir,
}

impl Watched {
    async fn start(change: impl FnOnce(&mut Settings)) -> Self {
        let (server, folder) = (ApiServer::start(), tempfile::tempdir().unwrap());
        server.world.apply(pod("ns", "first", "a-1", &[]));
        Self::of(server, folder, change).await
    }

    async fn of(server: ApiServer, folder: tempfile::TempDir, change: impl FnOnce(&mut Settings)) -> Self {
        let node = NodeOptions::default().unstarted().await;
        let mut settings = settings(&server, folder.path());
        change(&mut settings);
        let running = berth_cluster::start(settings, node.kernel.clone(), batches(&node.kernel));
        running.allow_connection();
        let watched = Self { server, node, running, _folder: folder };
        watched.is_current().await;
        watched.begun(1).await;
        watched
    }

    /// Waits until so many watches began.
    async fn begun(&self, count: usize) {
        soon("a watch began", || (self.server.world.watches_begun() >= count).then_some(())).await;
    }

    async fn is_current(&self) {
        soon("the view is current", || view(&self.node).filter(|view| view.current)).await;
    }

    /// Waits until exactly these pods are shown, by a source that is current.
    async fn shows(&self, uids: &[&str]) {
        let shown = || view(&self.node).filter(|view| view.current && view.pods.keys().eq(uids));
        soon("the pods are shown", shown).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_daemon_sends_one_request_per_watch_and_no_other() {
    let watched = Watched::start(|settings| settings.connection.watch_timeout = SECOND).await;
    let world = &watched.server.world;
    let condition = || world.requests().keys().any(|what| what.starts_with("PATCH ")).then_some(());
    soon("the condition is written", condition).await;
    let mut link = watched.running.link();
    soon("it watches", || (*link.borrow_and_update() == ApiServerStatus::Watching).then_some(())).await;
    let since = Instant::now();
    let before = world.requests();
    let opened = before[WATCH];
    soon("three more watches", || (world.requests()[WATCH] >= opened + 3).then_some(())).await;
    let mut added = world.requests();
    for (what, count) in &before {
        *added.get_mut(what).unwrap() -= count;
    }
    added.retain(|_, count| *count > 0);
    assert_eq!(added.keys().collect::<Vec<_>>(), [WATCH], "no list above all");
    // Each watch lasts a second.
    let most = usize::try_from(since.elapsed().as_secs()).unwrap() + 1;
    assert!((3..=most).contains(&added[WATCH]), "{added:?}, at most {most}");
    assert_eq!(world.came(LIST).len(), 1);
    assert!(!link.has_changed().unwrap(), "it stays current all the time");
    // The condition was read once and written once; the next writing is due in 12 to 18 minutes.
    let node = "/api/v1/nodes/node-1";
    assert_eq!(
        (before[&format!("PATCH {node}/status")], before[&format!("GET {node}")]),
        (1, 2),
        "{before:?}"
    );
    drop(watched.running);
}

/// A label that is followed, and who follows it.
fn followed() -> (WatchedLabel, tokio::sync::watch::Receiver<Option<String>>) {
    let (value, seen) = tokio::sync::watch::channel(None);
    (WatchedLabel { key: LABEL.into(), value }, seen)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_label_that_is_followed_costs_one_request_for_each_watch_of_the_node() {
    let (label, seen) = followed();
    let change = |settings: &mut Settings| {
        (settings.connection.watch_timeout, settings.watched_label) = (SECOND, Some(label));
    };
    let watched = Watched::start(change).await;
    let world = &watched.server.world;
    let condition = || world.requests().keys().any(|what| what.starts_with("PATCH ")).then_some(());
    soon("the condition is written", condition).await;
    // Otherwise the label could be read before the first watch.
    soon("the node is watched", || (!world.came(NODE_WATCH).is_empty()).then_some(())).await;
    world.label(LABEL, "first", "kubectl");
    soon("the label is seen", || (seen.borrow().as_deref() == Some("first")).then_some(())).await;
    let before = world.requests();
    let opened = before[NODE_WATCH];
    soon("three more watches", || (world.requests()[NODE_WATCH] >= opened + 3).then_some(())).await;
    let after = world.requests();
    assert_eq!(after[NODE_READ], before[NODE_READ], "a watch that ends in its time goes on where it was");
    let asked = world.came(NODE_WATCH);
    let apart = asked[opened + 1] - asked[opened];
    assert!(apart >= 2 * SECOND, "{apart:?}: twice as long as a watch of pods");
    world.label(LABEL, "second", "kubectl");
    soon("the label is seen", || (seen.borrow().as_deref() == Some("second")).then_some(())).await;
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_watch_of_the_node_resumes_and_reads_the_label_only_if_needed() {
    let (label, seen) = followed();
    let watched = Watched::start(|settings| settings.watched_label = Some(label)).await;
    let world = &watched.server.world;
    // The whole node is read before the condition is written, and this test counts that read, too.
    let condition = || world.requests().keys().any(|what| what.starts_with("PATCH ")).then_some(());
    soon("the condition is written", condition).await;
    soon("the node is watched", || (!world.came(NODE_WATCH).is_empty()).then_some(())).await;
    for (n, cut) in [Cut::Broken, Cut::Clean, Cut::Event(500), Cut::Event(410)].into_iter().enumerate() {
        // A watch that only came may still miss the cut: it is open once a label came over it.
        let now = format!("before-{n}");
        world.label(LABEL, &now, "kubectl");
        soon("the label is seen", || (*seen.borrow() == Some(now.clone())).then_some(())).await;
        let reads = world.came(NODE_READ).len();
        // While the watch is away the label changes.
        world.read_fault(Read::NodeWatch, Some(Unread::Hang));
        world.cut(cut);
        let hung = world.unread();
        soon("the next watch hangs", || (world.unread() > hung).then_some(())).await;
        let now = format!("after-{n}");
        world.label(LABEL, &now, "kubectl");
        world.read_fault(Read::NodeWatch, None);
        soon("the label is seen", || (*seen.borrow() == Some(now.clone())).then_some(())).await;
        let expired = usize::from(cut == Cut::Event(410));
        assert_eq!(world.came(NODE_READ).len() - reads, expired, "{cut:?}");
    }
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_watch_the_node_its_label_is_read_with_each_attempt_and_then_rarely() {
    let (server, folder) = (ApiServer::start(), tempfile::tempdir().unwrap());
    server.world.apply(pod("ns", "first", "a-1", &[]));
    server.world.read_fault(Read::NodeWatch, Some(Unread::Refuse(403)));
    let (label, seen) = followed();
    let watched = Watched::of(server, folder, |settings| settings.watched_label = Some(label)).await;
    let world = &watched.server.world;
    world.label(LABEL, "first", "kubectl");
    soon("the label is seen", || (seen.borrow().as_deref() == Some("first")).then_some(())).await;
    // Five failures are waited for shortly.
    soon("six tries", || (world.came(NODE_WATCH).len() >= 6).then_some(())).await;
    // The whole node is read before the condition is written, and that read must not be counted below.
    let condition = || world.requests().keys().any(|what| what.starts_with("PATCH ")).then_some(());
    soon("the condition is written", condition).await;
    let reads = world.came(NODE_READ).len();
    tokio::time::sleep(2 * SECOND).await;
    assert_eq!((world.came(NODE_WATCH).len(), world.came(NODE_READ).len()), (6, reads));
    // Each attempt, the connection, and the first read of the condition.
    assert!((7..=8).contains(&reads), "{reads}");
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_watch_resumes_without_a_list() {
    let watched = Watched::start(|_| {}).await;
    let world = &watched.server.world;
    let mut uid = "a-1".to_owned();
    for (n, cut) in [Cut::Broken, Cut::Clean, Cut::Event(500)].into_iter().enumerate() {
        // While the watch is away the one pod goes and another one comes.
        world.read_fault(Read::Pods, Some(Unread::Refuse(500)));
        world.cut(cut);
        soon("the source is silent", || view(&watched.node).filter(|view| !view.current)).await;
        world.delete(&uid);
        uid = format!("b-{n}");
        world.apply(pod("ns", &format!("pod-{n}"), &uid, &[]));
        world.read_fault(Read::Pods, None);
        watched.shows(&[&uid]).await;
        assert_eq!(world.came(LIST).len(), 1, "{cut:?}");
    }
    let gone = view(&watched.node).unwrap().deleted.clone();
    assert_eq!(gone, ["a-1", "b-0", "b-1"], "by events: none was missed");
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_watch_is_current_again_without_changes() {
    let watched = Watched::start(|_| {}).await;
    let opened = watched.server.world.came(WATCH).len();
    watched.server.world.cut(Cut::Broken);
    let again = || (watched.server.world.came(WATCH).len() > opened).then_some(());
    soon("a watch is opened again", again).await;
    watched.shows(&["a-1"]).await;
    assert_eq!(watched.server.world.came(LIST).len(), 1);
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_resource_version_causes_one_list() {
    let watched = Watched::start(|_| {}).await;
    let world = &watched.server.world;
    // As when the API server restarts: every watch is lost, and what happened before is forgotten.
    world.read_fault(Read::Pods, Some(Unread::Refuse(500)));
    world.cut(Cut::Broken);
    soon("the source is silent", || view(&watched.node).filter(|view| !view.current)).await;
    world.delete("a-1");
    world.apply(pod("ns", "second", "a-2", &[]));
    world.forget();
    world.read_fault(Read::Pods, None);
    watched.shows(&["a-2"]).await;
    assert_eq!(world.came(LIST).len(), 2);
    // The same while a watch is under way.
    watched.begun(2).await;
    world.cut(Cut::Event(410));
    soon("one more list", || (world.came(LIST).len() == 3).then_some(())).await;
    watched.shows(&["a-2"]).await;
    assert_eq!(world.came(LIST).len(), 3);
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_after_is_waited() {
    let watched = Watched::start(|_| {}).await;
    let world = &watched.server.world;
    let opened = world.came(WATCH).len();
    world.refuse_pods(429, 1, 2);
    world.cut(Cut::Broken);
    soon("two more watches", || (world.came(WATCH).len() >= opened + 2).then_some(())).await;
    let asked = &world.came(WATCH)[opened..];
    let apart = asked[1] - asked[0];
    assert!(apart >= 2 * SECOND, "{apart:?}: its waits alone are 50 ms at most");
    watched.shows(&["a-1"]).await;
    assert_eq!(world.came(LIST).len(), 1);
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn bookmarks_keep_a_quiet_watch_alive() {
    let (server, folder) = (ApiServer::start(), tempfile::tempdir().unwrap());
    server.world.apply(pod("ns", "first", "a-1", &[]));
    server.world.bookmarks(Duration::from_millis(200));
    let change = |settings: &mut Settings| {
        (settings.connection.watch_timeout, settings.connection.read_timeout) = (3 * SECOND, SECOND);
    };
    let watched = Watched::of(server, folder, change).await;
    let world = &watched.server.world;
    let mut link = watched.running.link();
    let since = Instant::now();
    // A busy machine may be silent for a second as well, so one watch that lasts for its time is enough.
    loop {
        soon("it watches", || (*link.borrow_and_update() == ApiServerStatus::Watching).then_some(())).await;
        let opened = world.came(WATCH).len();
        soon("the next watch", || (world.came(WATCH).len() > opened).then_some(())).await;
        let asked = world.came(WATCH);
        let lasted = asked[opened] - asked[opened - 1];
        if lasted >= 3 * SECOND && !link.has_changed().unwrap() {
            break;
        }
        assert!(since.elapsed() < 300 * SECOND, "no watch lasts for its time: {lasted:?}");
    }
    drop(watched.running);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_bookmarks_a_silent_watch_is_lost() {
    let watched = Watched::start(|settings| settings.connection.read_timeout = SECOND).await;
    let world = &watched.server.world;
    soon("the next watch", || (world.came(WATCH).len() >= 2).then_some(())).await;
    let asked = world.came(WATCH);
    assert!(asked[1] - asked[0] < 60 * SECOND, "long before its time");
    assert_eq!(world.came(LIST).len(), 1);
    drop(watched.running);
}

#[test]
fn each_process_chooses_a_random_length_of_its_watches() {
    let drawn = || Settings::new(berth_cluster::ApiServer::Off, "n".into());
    let all: Vec<_> = (0..32).map(|_| drawn().connection.watch_timeout.as_secs()).collect();
    assert!(all.iter().all(|seconds| (300..=600).contains(seconds)), "{all:?}");
    assert!(all.iter().any(|seconds| *seconds != all[0]), "{all:?}");
    let settings = drawn();
    assert_eq!((settings.connection.read_timeout, settings.reconnect_wait_max), (150 * SECOND, 10 * SECOND));
    assert!(
        settings.connection.read_timeout < settings.connection.watch_timeout,
        "a dead connection is noticed before its watch would end"
    );
}
