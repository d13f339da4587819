//! Other programs of the node that connect to a plugin's socket: registration with the kubelet works, and only the
//! kubelet's stream counts.

use crate::kubelet::registration::never_watched;
use crate::support::gpus::{WHOLE, resource};
use crate::support::kubelet_node::{KubeletNode, NodeOptions};
use crate::support::wait::SOON;
use berth_kubelet::Registration;
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::v1beta1::Empty;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use kubelet_standin::{Kubelet, PodSpec, Rpc};
use sha2::{Digest as _, Sha256};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream as Blocking;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

const MINUTE: Duration = Duration::from_secs(60);

fn socket(node: &KubeletNode) -> PathBuf {
    let hex = format!("{:x}", Sha256::digest(WHOLE));
    node.plugins_folder().join(format!("berth-{}.sock", &hex[..16]))
}

fn registers(kubelet: &Kubelet) -> u64 {
    kubelet.calls(Rpc::Register, WHOLE).count
}

/// Restarts the kubelet, and shows how long after its start Berth registered.
#[allow(clippy::print_stdout)] // a figure for who reads the test's output, too noisy to be asserted
async fn restart(node: &KubeletNode, why: &str) {
    let before = registers(&node.kubelet);
    node.kubelet.restart().await.unwrap();
    let there = Instant::now();
    let again = |k: &Kubelet| registers(k) > before;
    node.kubelet.wait_for("a registration with the new kubelet", SOON, again).await.unwrap();
    println!("{why}: registered {:.1} ms after the new kubelet.sock", there.elapsed().as_secs_f64() * 1e3);
    node.allocatable(WHOLE, 4).await;
}

/// A program that streams the devices, and opens the next stream when one ends, until it is dropped.
struct Streaming {
    task: tokio::task::JoinHandle<()>,
    /// Lists that came, over all its streams.
    lists: watch::Receiver<usize>,
    /// Streams that ended or were not opened.
    ended: Arc<AtomicUsize>,
}

impl Streaming {
    /// With `asks_first`, it requests the options before each stream, as a kubelet does.
    fn begin(socket: &Path, asks_first: bool) -> Self {
        let (count, lists) = watch::channel(0);
        let socket = socket.to_owned();
        let ended = Arc::new(AtomicUsize::new(0));
        let count_ended = Arc::clone(&ended);
        let task = tokio::spawn(async move {
            loop {
                // However a stream ended, the next one is opened.
                let _ = stream(&socket, asks_first, &count).await;
                count_ended.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        Self { task, lists, ended }
    }

    /// Waits for the next list.
    async fn next_list(&mut self) {
        tokio::time::timeout(SOON, self.lists.changed()).await.unwrap().unwrap();
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn connect(socket: &Path) -> Result<DevicePluginClient<Channel>, Status> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    Ok(DevicePluginClient::new(channel.map_err(|error| Status::unavailable(error.to_string()))?))
}

async fn stream(socket: &Path, asks_first: bool, count: &watch::Sender<usize>) -> Result<(), Status> {
    let mut client = connect(socket).await?;
    if asks_first {
        client.get_device_plugin_options(Empty {}).await?;
    }
    let mut lists = client.list_and_watch(Empty {}).await?.into_inner();
    while lists.message().await?.is_some() {
        count.send_modify(|n| *n += 1);
    }
    Ok(())
}

/// Every wait on a connection would be longer than the test.
fn never_waits() -> NodeOptions {
    NodeOptions::default().with_timeouts(|t| {
        t.disconnect.exit_seen_within = MINUTE;
        t.disconnect.close_within = MINUTE;
        t.disconnect.settle = MINUTE;
        t.connections.idle_max = MINUTE;
    })
}

#[tokio::test]
async fn a_stream_that_another_program_holds_open_does_not_delay_a_registration() {
    let node = never_waits().started().await;
    node.allocatable(WHOLE, 4).await;
    restart(&node, "no other client connected").await;
    let mut streaming = Streaming::begin(&socket(&node), false);
    for _ in 0..5 {
        streaming.next_list().await;
        restart(&node, "another program streams").await;
    }
    node.assert_harmless();
}

/// It may be taken for the kubelet where its call for the options falls into our Register.
#[tokio::test]
async fn a_program_that_behaves_like_a_kubelet_delays_a_registration_by_seconds_at_most() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let mut streaming = Streaming::begin(&socket(&node), true);
    streaming.next_list().await;
    for _ in 0..3 {
        restart(&node, "another program does as the kubelet does").await;
    }
    node.assert_harmless();
}

#[tokio::test]
async fn a_stream_of_another_program_does_not_count_as_the_kubelets() {
    let mut node = never_watched().await;
    let mut streaming = Streaming::begin(&socket(&node), false);
    node.start();
    streaming.next_list().await;
    let before = registers(&node.kubelet);
    let again = |k: &Kubelet| registers(k) >= before + 2;
    node.kubelet.wait_for("registrations that go on", SOON, again).await.unwrap();
    let registrations = node.running.as_ref().unwrap().registrations();
    let now = registrations.borrow().get(&resource(WHOLE)).cloned();
    let Some(Registration::Registering { cause: Some(cause) }) = now else { panic!("{now:?}") };
    assert!(cause.contains("did not call ListAndWatch"), "{cause}");
    node.kubelet.set_faults(|f| f.never_watch = false);
    node.allocatable(WHOLE, 4).await;
}

#[tokio::test]
async fn the_loss_of_the_kubelets_stream_is_detected_despite_other_streams() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    // Those that ask for the options come back while a new kubelet is registered with, and some are taken for it.
    for (size, asks_first) in [(1, false), (8, true), (8, true), (8, true)] {
        let mut all: Vec<_> = (0..size).map(|_| Streaming::begin(&socket(&node), asks_first)).collect();
        for streaming in &mut all {
            streaming.next_list().await;
        }
        restart(&node, "other programs stream").await;
        for streaming in &mut all {
            streaming.next_list().await;
        }
        node.kubelet.drop_stream(WHOLE);
        node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
        node.allocatable(WHOLE, 4).await;
    }
    node.assert_harmless();
}

#[tokio::test]
async fn a_connection_from_before_a_registration_does_not_count_as_the_kubelets() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let polling = tokio::spawn(poll_options(socket(&node)));
    restart(&node, "another program asks for the options all the time").await;
    node.kubelet.drop_stream(WHOLE);
    node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
    node.allocatable(WHOLE, 4).await;
    polling.abort();
    node.assert_harmless();
}

/// Requests the options without a pause, on one connection as long as it lasts, and streams on it.
async fn poll_options(socket: PathBuf) {
    loop {
        let Ok(mut client) = connect(&socket).await else {
            // A missing socket fails at once, and without a wait nothing else would run on this thread.
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        };
        let mut streaming = client.clone();
        let streams = tokio::spawn(async move {
            while let Ok(lists) = streaming.list_and_watch(Empty {}).await {
                let mut lists = lists.into_inner();
                while let Ok(Some(_)) = lists.message().await {}
            }
        });
        while client.get_device_plugin_options(Empty {}).await.is_ok() {}
        streams.abort();
    }
}

/// Threads that connect, send something, read until they are disconnected, and connect again.
struct Crowd {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<u64>>,
}

impl Crowd {
    fn begin(socket: &Path, size: usize, says: &'static [u8]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = (0..size).map(|_| {
            let (stop, socket) = (Arc::clone(&stop), socket.to_owned());
            std::thread::spawn(move || {
                let mut connected = 0;
                while !stop.load(Ordering::SeqCst) {
                    let Ok(mut stream) = Blocking::connect(&socket) else {
                        std::thread::sleep(Duration::from_millis(1));
                        continue;
                    };
                    connected += 1;
                    stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
                    let _ = stream.write_all(says);
                    let mut bytes = [0; 1024];
                    while !stop.load(Ordering::SeqCst) {
                        match stream.read(&mut bytes) {
                            Ok(1..) => {}
                            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
                            // Closed or reset.
                            Ok(0) | Err(_) => break,
                        }
                    }
                }
                connected
            })
        });
        let threads = threads.collect();
        Self { stop, threads }
    }

    /// Ends it; how often it connected.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        self.threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    }
}

/// The begin of every HTTP/2 connection, and an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_silent_connections_do_not_block_the_kubelet() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    // The first is the one that was seen to do so; the others are more than there are slots.
    for (size, says) in [(24, &b""[..]), (200, b""), (200, PREFACE)] {
        let crowd = Crowd::begin(&socket(&node), size, says);
        let before = registers(&node.kubelet);
        // The kubelet's connection stays, and is of use.
        let pod = PodSpec::new("default", "p").container("main", &[(WHOLE, 1)]);
        let uid = pod.uid.clone();
        node.kubelet.admit(pod).await.unwrap();
        node.kubelet.delete(&uid);
        assert_eq!(registers(&node.kubelet), before);
        // It drops it, and gets through with the next one.
        node.kubelet.drop_stream(WHOLE);
        node.kubelet.wait_allocatable(WHOLE, 0, SOON).await.unwrap();
        let dropped = Instant::now();
        let served = |k: &Kubelet| k.is_served(WHOLE) && registers(k) > before;
        node.kubelet.wait_for("the kubelet's next stream", SOON, served).await.unwrap();
        println!("{size} silent connections: watched again after {} ms", dropped.elapsed().as_millis());
        restart(&node, "beside silent connections").await;
        println!("{} connections were made meanwhile", crowd.end());
    }
    node.assert_harmless();
}

#[tokio::test]
async fn streams_of_others_in_all_slots_do_not_block_the_kubelet() {
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let before = registers(&node.kubelet);
    let mut all = Vec::new();
    // More than a plugin has slots for connections.
    for _ in 0..80 {
        all.push(Streaming::begin(&socket(&node), false));
    }
    for streaming in &mut all {
        streaming.next_list().await;
    }
    assert!(node.kubelet.is_served(WHOLE), "the kubelet's stream went for one of theirs");
    assert_eq!(registers(&node.kubelet), before);
    restart(&node, "beside 80 streams").await;
    node.assert_harmless();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_without_a_call_is_closed_and_one_with_a_stream_is_not() {
    let node = NodeOptions::default()
        .with_timeouts(|t| t.connections.idle_max = Duration::from_millis(300))
        .started()
        .await;
    node.allocatable(WHOLE, 4).await;
    let mut streaming = Streaming::begin(&socket(&node), true);
    streaming.next_list().await;
    let ended = || streaming.ended.load(Ordering::Relaxed);
    let before = (registers(&node.kubelet), ended());
    // The begin of a HEADERS frame that never ends.
    let half: Vec<u8> = [PREFACE, b"\0\0\xff\x01\x04\0\0\0\x01half"].concat();
    for says in [&b""[..], b"GET / HTTP/1.1\r\n", PREFACE, &half] {
        let path = socket(&node);
        let says = says.to_owned();
        let closed = tokio::task::spawn_blocking(move || {
            let mut stream = Blocking::connect(path).unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            stream.write_all(&says).unwrap();
            let began = Instant::now();
            let mut bytes = Vec::new();
            let end = stream.read_to_end(&mut bytes);
            // A reset is an end, too; a timeout is none.
            assert!(!end.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock), "it stays open");
            began.elapsed()
        });
        println!("closed after {} ms", closed.await.unwrap().as_millis());
    }
    assert!(node.kubelet.is_served(WHOLE));
    assert_eq!((registers(&node.kubelet), ended()), before, "each still has its stream");
    node.assert_harmless();
}

/// The right to connect is the socket's, and beside it only root and our own user are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_of_another_user_is_not_served() {
    if !rustix::process::geteuid().is_root() {
        println!("only root can be another user");
        return;
    }
    let node = NodeOptions::default().started().await;
    node.allocatable(WHOLE, 4).await;
    let path = socket(&node);
    // The other user may come to it.
    let open = |path: &Path| {
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    };
    path.ancestors().take(3).for_each(open);
    let refused = tokio::task::spawn_blocking(move || {
        // Of this thread alone; it ends below.
        std::thread::spawn(move || {
            as_the_user_nobody();
            let mut stream = Blocking::connect(path).unwrap();
            stream.set_read_timeout(Some(SOON)).unwrap();
            let _ = stream.write_all(PREFACE);
            let mut bytes = Vec::new();
            let end = stream.read_to_end(&mut bytes);
            assert!(!end.is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock), "it stays open");
            bytes
        })
        .join()
        .unwrap()
    });
    assert_eq!(refused.await.unwrap(), b"", "it was answered");
    assert!(node.kubelet.is_served(WHOLE));
}

/// Makes the calling thread act as user 65534.
fn as_the_user_nobody() {
    use rustix::process::Uid;
    let (keep, unprivileged) = (None, Some(Uid::from_raw(65_534)));
    rustix::thread::set_thread_res_uid(keep, unprivileged, keep).unwrap();
}
