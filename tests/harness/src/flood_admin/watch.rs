//! Who must be served while a flood goes on, how long each waited, and what the daemon took.

use crate::flood_admin::node::{Node, SHARED, Size, Target, size};
use anyhow::ensure;
use kubelet_standin::{Kubelet, PodSpec};
use std::fmt;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait of a good client, and of root: that of a user at a terminal who does not wonder what is
/// wrong. It is also what a silent connection may take for its head: a client that had to wait for one is later.
const GOOD_MS_MAX: u128 = 5_000;
/// Longest wait of the probe: the kubelet's default timeout.
const PROBE_MS_MAX: u128 = 1_000;
/// Longest admission of a pod, whose Allocate does not go through the admin API.
const POD_MS_MAX: u128 = 1_000;
/// What a flood may add to the daemon's memory, KiB. All of 256 connections with as much as may wait in each:
/// a head of 128 KiB in a buffer that doubles as it grows, or a body of 256 KiB, or 0.3 MiB of requests one
/// behind the other: 77 MiB. Two uploads of 32 MiB: 64 MiB. Those of the other listeners, which take no
/// bodies from strangers, and 16 KiB of buffers for each: 19 MiB. Unread responses are at most 64 MiB, less
/// than bodies and uploads, which the same clients do not send meanwhile.
const MEMORY_KIB_MAX: u64 = (77 + 64 + 19) * 1024;
/// What a flood may add to its descriptors: 256 + 64 + 64 connections and 4 workers with 32 that leave; and
/// 24 of pods and good clients.
const DESCRIPTORS_MAX: usize = 256 + 64 + 64 + 4 * 32 + 24;
/// How often each sends a request.
const EVERY: Duration = Duration::from_millis(100);

/// The running watch.
pub(crate) struct Watch {
    stop: Arc<AtomicBool>,
    before: Size,
    sampler: JoinHandle<Size>,
    askers: Vec<JoinHandle<Waits>>,
    pods: tokio::task::JoinHandle<Waits>,
}

/// What it saw.
pub(crate) struct Seen {
    before: Size,
    peak: Size,
    waits: Vec<Waits>,
}

/// How one of them was served.
struct Waits {
    who: &'static str,
    limit_ms: u128,
    served: usize,
    worst_ms: u128,
    failed: Vec<String>,
}

impl Waits {
    fn new(who: &'static str, limit_ms: u128) -> Self {
        Self { who, limit_ms, served: 0, worst_ms: 0, failed: Vec::new() }
    }

    fn one(&mut self, began: Instant, asked: anyhow::Result<()>) {
        self.worst_ms = self.worst_ms.max(began.elapsed().as_millis());
        match asked {
            Ok(()) => self.served += 1,
            Err(error) => self.failed.push(format!("{error:#}")),
        }
    }
}

impl Watch {
    /// `before` is what the daemon took before the first flood: what one leaves counts against the next.
    pub(crate) fn start(node: &Node, before: Size) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let asks = |who, limit_ms, ask: fn(&Target) -> anyhow::Result<()>| {
            let (stop, target) = (Arc::clone(&stop), node.target.clone());
            std::thread::spawn(move || {
                let mut waits = Waits::new(who, limit_ms);
                while !stop.load(Ordering::Relaxed) {
                    let began = Instant::now();
                    waits.one(began, ask(&target));
                    std::thread::sleep(EVERY);
                }
                waits
            })
        };
        let askers = vec![
            asks("good", GOOD_MS_MAX, |target| target.ask("/api/v1/node").map(drop)),
            asks("probe", PROBE_MS_MAX, |target| {
                let mut stream = TcpStream::connect(target.health)?;
                ok(&mut stream, "GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
                Ok(stream.shutdown(Shutdown::Both)?)
            }),
            asks("root", GOOD_MS_MAX, |target| {
                let mut stream = UnixStream::connect(&target.socket)?;
                ok(&mut stream, "GET /api/v1/node HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            }),
        ];
        let (pid, stopped) = (node.pid(), Arc::clone(&stop));
        let sampler = std::thread::spawn(move || {
            let mut peak = Size::default();
            while !stopped.load(Ordering::Relaxed) {
                let now = size(pid).unwrap_or_default();
                peak.resident_kib = peak.resident_kib.max(now.resident_kib);
                peak.descriptors = peak.descriptors.max(now.descriptors);
                std::thread::sleep(Duration::from_millis(20));
            }
            peak
        });
        let pods = tokio::spawn(admit(Arc::clone(&node.kubelet), Arc::clone(&stop)));
        Self { stop, before, sampler, askers, pods }
    }

    pub(crate) async fn stop(self) -> Seen {
        self.stop.store(true, Ordering::Relaxed);
        let (askers, sampler) = (self.askers, self.sampler);
        let joined = tokio::task::spawn_blocking(move || {
            let waits: Vec<_> = askers.into_iter().filter_map(|asker| asker.join().ok()).collect();
            (waits, sampler.join().unwrap_or_default())
        });
        let (mut waits, peak) = joined.await.unwrap_or_default();
        waits.extend(self.pods.await);
        Seen { before: self.before, peak, waits }
    }
}

async fn admit(kubelet: Arc<Kubelet>, stop: Arc<AtomicBool>) -> Waits {
    let mut waits = Waits::new("pods", POD_MS_MAX);
    for n in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let pod = PodSpec::new("flood", &format!("pod-{n}")).container("main", &[(SHARED, 1)]);
        let (uid, began) = (pod.uid.clone(), Instant::now());
        let admitted = kubelet.admit(pod).await;
        waits.one(began, admitted.map_err(anyhow::Error::from));
        kubelet.delete(&uid);
        tokio::time::sleep(EVERY).await;
    }
    waits
}

fn ok(stream: &mut (impl Read + Write), request: &str) -> anyhow::Result<()> {
    stream.write_all(request.as_bytes())?;
    let mut answer = [0; 4096];
    let n = stream.read(&mut answer)?;
    let line = String::from_utf8_lossy(&answer[..n]).lines().next().unwrap_or_default().to_owned();
    ensure!(line.starts_with("HTTP/1.1 200"), "answered {line:?}");
    Ok(())
}

impl Seen {
    /// What should not be.
    pub(crate) fn wrong(&self, patience: u32) -> Vec<String> {
        let mut wrong = Vec::new();
        for waits in &self.waits {
            if let Some(first) = waits.failed.first() {
                wrong.push(format!("{} failed {} times: {first}", waits.who, waits.failed.len()));
            }
            if waits.worst_ms > waits.limit_ms * u128::from(patience) {
                wrong.push(format!("{} waited for {} ms", waits.who, waits.worst_ms));
            }
            if waits.served == 0 {
                wrong.push(format!("{} was never served", waits.who));
            }
        }
        if self.waits.len() != 4 {
            wrong.push("a client of good, probe, root and pods has ended".into());
        }
        if self.peak.resident_kib > self.before.resident_kib + MEMORY_KIB_MAX {
            wrong.push(format!("more than {} MiB of memory were added", MEMORY_KIB_MAX / 1024));
        }
        if self.peak.descriptors > self.before.descriptors + DESCRIPTORS_MAX {
            wrong.push(format!("more than {DESCRIPTORS_MAX} descriptors were added"));
        }
        wrong
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = |size: Size| size.resident_kib / 1024;
        write!(f, "{:>3} -> {:>3} MiB, {:>3} fds", mib(self.before), mib(self.peak), self.peak.descriptors)?;
        for waits in &self.waits {
            write!(f, ", {} {}x {} ms", waits.who, waits.served, waits.worst_ms)?;
        }
        Ok(())
    }
}
