//! A disk that is full or read-only at any moment, under the whole daemon: an Allocate fails with the reason, nothing
//! is lost or invented, and the daemon recovers by itself.

use crate::store::contract::allocation;
use crate::support::child;
use crate::support::gpus::SHARED;
use crate::support::wait::SOON;
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::Write;
use berth_store::SledStore;
use disk_faults::{Fault, Faults};
use harness::kill::believed::grants;
use harness::kill::process::Serving;
use harness::kill::{Filler, Program, SmallDisk};
use kubelet_standin::{Kubelet, PodSpec};
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const CONFIGURATION: &str = "
gpus: sim:2xt4
stack: [{ policy: timeslice, parameters: { replicas: 8 } }]
rounds: { listEveryMs: 100, listEveryCordonedMs: 100, roundEveryMs: 200 }
timing: { roundsApartMs: 100, kubeletSettleMs: 100, replySettleMs: 200, retireMs: 500, namedMs: 200 }
";

struct DiskNode {
    folder: tempfile::TempDir,
    kubelet: Kubelet,
    faults: Faults,
    program: Program,
    pods: usize,
}

impl DiskNode {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.yaml"), CONFIGURATION).unwrap();
        let kubelet = Kubelet::started(folder.path().join("kubelet")).await.unwrap();
        let faults = Faults::new(&folder.path().join("state"), &folder.path().join("faults"));
        let program = Program {
            exe: env!("CARGO_BIN_EXE_berth").into(),
            environment: faults.environment().unwrap(),
            named_steps: false,
            small_disk: None,
        };
        Self { folder, kubelet, faults, program, pods: 0 }
    }

    /// A node whose daemon was killed after one grant, and whose disk has this fault; the store's log and its bytes.
    async fn killed(fault: Fault) -> (Self, PathBuf, Vec<u8>) {
        let mut node = Self::new().await;
        let mut daemon = node.serve().await;
        node.pod().await.unwrap();
        daemon.kill();
        let log = node.folder.path().join("state/store/data/db");
        let before = std::fs::read(&log).unwrap();
        node.faults.set(Some((fault, 0))).unwrap();
        (node, log, before)
    }

    async fn serve(&self) -> Serving {
        let mut daemon = Serving::start(&self.program, self.folder.path(), None).unwrap();
        let end = Instant::now() + SOON;
        while !daemon.is_up() {
            assert!(!daemon.is_dead().unwrap() && Instant::now() < end, "{}", daemon.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        self.kubelet.wait_for("its devices", SOON, |k| k.is_served(SHARED)).await.unwrap();
        daemon
    }

    /// Admits one more pod, or returns the kubelet's error.
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
    async fn check(&self, daemon: &mut Serving) {
        let list = daemon.live().await.unwrap().unwrap();
        for (id, grant) in grants(&self.kubelet) {
            let found = list.iter().find(|a| a.id == id).unwrap_or_else(|| panic!("{id} is lost: {list:?}"));
            assert_eq!(found.devices.iter().cloned().collect::<BTreeSet<_>>(), grant.devices);
        }
    }

    /// Waits until the list holds all grants that the kubelet knows, and no others.
    async fn settled(&self, daemon: &mut Serving) {
        let end = Instant::now() + SOON;
        loop {
            self.check(daemon).await;
            let list = daemon.live().await.unwrap().unwrap();
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
async fn a_failing_disk_fails_allocates_with_a_clear_error_and_nothing_else() {
    let mut node = DiskNode::new().await;
    let mut daemon = node.serve().await;
    let mut running = vec![node.pod().await.unwrap()];
    let faults = [(Fault::Full, "No space left on device"), (Fault::ReadOnly, "Read-only file system")];
    for (fault, words) in faults {
        // One append makes some five calls that change something: each of them is the first to fail once.
        for after in 0..8 {
            node.faults.set(Some((fault, after))).unwrap();
            let end = Instant::now() + SOON;
            let message = loop {
                match node.pod().await {
                    Ok(uid) => running.push(uid),
                    Err(message) => break message,
                }
                assert!(Instant::now() < end, "{fault:?} {after}: every pod was admitted");
                if running.len() > 4 {
                    node.kubelet.delete(&running.remove(0));
                }
            };
            assert!(
                message.contains("the allocation store failed, so nothing was changed"),
                "{fault:?} {after}: {message}"
            );
            assert!(
                message.contains(words)
                    || message.contains("not yet read back")
                    || message.contains("did not answer"),
                "{fault:?} {after}: {message}"
            );
            // Readers are served meanwhile.
            node.check(&mut daemon).await;
            node.faults.set(None).unwrap();
            let end = Instant::now() + SOON;
            loop {
                match node.pod().await {
                    Ok(uid) => break running.push(uid),
                    Err(message) => {
                        assert!(Instant::now() < end, "{fault:?} {after}: it does not recover: {message}");
                    }
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            while running.len() > 4 {
                node.kubelet.delete(&running.remove(0));
            }
            node.settled(&mut daemon).await;
        }
    }
    // The disk has what was reported.
    daemon.kill();
    let mut daemon = node.serve().await;
    node.settled(&mut daemon).await;
    assert_eq!(node.kubelet.anomalies(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_on_a_full_disk_serves_what_is_recorded_and_does_not_change_the_store() {
    let (mut node, log, before) = DiskNode::killed(Fault::Full).await;
    let mut daemon = node.serve().await;
    node.check(&mut daemon).await;
    let end = Instant::now() + SOON;
    let refused = loop {
        let refused = node.pod().await.unwrap_err();
        // The kubelet has not read the new device list yet.
        if !refused.contains("no healthy devices") || Instant::now() > end {
            break refused;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert!(refused.contains("the allocation store failed, so nothing was changed"), "{refused}");
    assert!(std::fs::read(&log).unwrap() == before);
    node.faults.set(None).unwrap();
    let end = Instant::now() + SOON;
    while let Err(refused) = node.pod().await {
        assert!(Instant::now() < end, "it does not recover: {refused}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    node.settled(&mut daemon).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_on_a_read_only_disk_reports_that_and_does_not_change_the_store() {
    let (node, log, before) = DiskNode::killed(Fault::ReadOnly).await;
    let mut daemon = Serving::start(&node.program, node.folder.path(), None).unwrap();
    let end = Instant::now() + SOON;
    let message = loop {
        match daemon.is_dead() {
            Err(message) => break message.to_string(),
            Ok(dead) => assert!(!dead && Instant::now() < end, "{}", daemon.log()),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(message.contains("mount it writable"), "{message}");
    assert!(std::fs::read(&log).unwrap() == before);
    node.faults.set(None).unwrap();
    let mut daemon = node.serve().await;
    node.settled(&mut daemon).await;
}

/// In the processes that run on a small disk: its name, and the folder that its mount point is in.
const SMALL_DISK: &str = "BERTH_TEST_SMALL_DISK";
/// Set in the process that appends until it kills itself.
const APPENDS: &str = "BERTH_TEST_APPENDS";
/// Appends that fail in each of these processes.
const FAILED_APPENDS: u32 = 200;
/// Such processes, one after the other, on one disk.
const KILLS: usize = 20;

fn this_test() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(child::only(module_path!(), "failed_appends_on_a_full_disk_give_no_room_away"));
    command
}

/// Appends until the disk is full, and then more, and reads the store after every second failure (the keeper does so
/// after each); then kills itself. Prints what it found and what was acknowledged.
fn append_and_die(folder: &Path) {
    let mut store = SledStore::open(&folder.join("state/store")).expect("it opens");
    let records = store.load().expect("it was read");
    eprintln!("found {}", records.len());
    let mut next = records.len() as u64;
    let mut failed = 0;
    while failed < FAILED_APPENDS {
        match store.append(&[Write::Put(allocation(next, &"x".repeat(8_000)))]) {
            Ok(()) => {
                next += 1;
                eprintln!("acknowledged {next}");
            }
            Err(error) => {
                assert!(matches!(error, StoreError::Full { .. }), "{error}");
                failed += 1;
                // sled wrote nothing for the refused append, so further appends need no load.
                if failed % 2 == 0 {
                    let _ = store.load();
                }
            }
        }
    }
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
}

/// The rule: room is kept in the store's own file, so that no other program can take it, however often an append fails.
#[test]
fn failed_appends_on_a_full_disk_give_no_room_away() {
    let disks = [("tmpfs", SmallDisk::Tmpfs), ("ext4", SmallDisk::Ext4)];
    let Some(place) = std::env::var_os(SMALL_DISK) else {
        for (name, disk) in disks {
            if let Some(why) = disk.missing() {
                eprintln!("skipped on {name}: {why}");
                continue;
            }
            let folder = tempfile::tempdir().unwrap();
            let test = this_test();
            let mut child = disk.namespace(Path::new(test.get_program()));
            child.args(test.get_args()).env(SMALL_DISK, folder.path().join(name));
            let output = child.output().unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let has_run = output.status.success() && child::has_run(&output.stdout);
            assert!(has_run, "{name}: {}{}", text(&output.stdout), text(&output.stderr));
        }
        return;
    };
    let folder = PathBuf::from(place);
    if std::env::var_os(APPENDS).is_some() {
        return append_and_die(&folder);
    }
    std::fs::create_dir_all(&folder).unwrap();
    let name = folder.file_name().unwrap().to_str().unwrap();
    let _mounted = disks.iter().find(|(known, _)| *known == name).unwrap().1.mount(&folder).unwrap();
    drop(SledStore::open(&folder.join("state/store")).unwrap());
    let _filler = Filler::start(&folder.join("state")).unwrap();
    let mut acknowledged = 1;
    for kill in 0..KILLS {
        let output = this_test().env(APPENDS, "1").output().unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        let number = |word: &str| {
            printed.lines().rev().find_map(|line| line.strip_prefix(word)?.trim().parse::<u64>().ok())
        };
        let errors = || format!("kill {kill}: {printed}{}", String::from_utf8_lossy(&output.stdout));
        let found = number("found ").unwrap_or_else(|| panic!("{}", errors()));
        // An append that was not acknowledged may be there.
        assert!((acknowledged..=acknowledged + 1).contains(&found), "{acknowledged} but {}", errors());
        assert_eq!(output.status.signal(), Some(9), "{}", errors());
        acknowledged = number("acknowledged ").unwrap_or(found);
    }
}

/// Starts the daemon on a disk of 12 MiB and fills that; kills it and starts it again, three times; and once
/// more after a clean stop. `$1` is the program, `$2` the disk's folder, `$3` a folder for logs and the kubelet.
const ON_A_FULL_DISK: &str = r#"
set -eu
mount -t tmpfs -o size=12m none "$2"
start() {
    # That of the start before would be read until the new process has emptied it.
    rm -f "$3/log"
    "$1" serve --gpus sim:2xt4 --admin-listen 127.0.0.1:0 --state-dir "$2" --kubelet-dir "$3/kubelet" \
        --api-server off 2>"$3/log" &
    pid=$!
    left=1500
    until grep -qs 'Swagger UI at' "$3/log"; do
        left=$((left - 1))
        { [ $left -gt 0 ] && kill -0 $pid 2>/dev/null; } || { cat "$3/log" >&2; kill -9 $pid; exit 1; }
        sleep 0.02
    done
}
start "$@"
dd if=/dev/zero of="$2/fill" bs=4k 2>/dev/null && exit 2
for again in 1 2 3; do
    # Recorded where the store has room of its own; what it recorded is read back on a full disk.
    url=$(sed -n 's|.*Swagger UI at \(.*\)/swagger-ui.*|\1|p' "$3/log")
    left=1500
    until "$1" gpu cordon 0 --reason "fill $again" --server "$url" --token-file "$2/token" >"$3/cordon" 2>&1; do
        left=$((left - 1))
        [ $left -gt 0 ] || { cat "$3/cordon" "$3/log" >&2; kill -9 $pid; exit 1; }
        sleep 0.02
    done
    kill -9 $pid
    wait $pid || true
    start "$@"
    dd if=/dev/zero of="$2/fill-$again" bs=4k 2>/dev/null && exit 2
done
kill -TERM $pid
wait $pid
start "$@"
url=$(sed -n 's|.*Swagger UI at \(.*\)/swagger-ui.*|\1|p' "$3/log")
"$1" gpu show 0 --server "$url" --token-file "$2/token" >"$3/shown" || exit 3
grep -q 'fill 3' "$3/shown" || { cat "$3/shown" >&2; kill -9 $pid; exit 4; }
kill -9 $pid
"#;

#[test]
fn a_full_disk_prevents_no_start() {
    let folder = tempfile::tempdir().unwrap();
    let (disk, logs) = (folder.path().join("disk"), folder.path().join("logs"));
    std::fs::create_dir(&disk).unwrap();
    std::fs::create_dir(&logs).unwrap();
    let mount = format!("mount -t tmpfs -o size=64k none {}", disk.display());
    let may_mount = Command::new("unshare").args(["-rm", "sh", "-c", &mount]).stderr(Stdio::null()).status();
    if !may_mount.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no mount namespace can be made here");
        return;
    }
    let mut command = Command::new("unshare");
    command.args(["-rm", "sh", "-c", ON_A_FULL_DISK, "sh", env!("CARGO_BIN_EXE_berth")]);
    let output = command.arg(&disk).arg(&logs).env_remove("RUST_LOG").output().unwrap();
    assert!(output.status.success(), "{:?}: {}", output.status, String::from_utf8_lossy(&output.stderr));
}
