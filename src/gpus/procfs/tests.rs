//! Tests with a `/proc` made of files, and with the real one.

use super::*;
use berth_kernel::hardware::process::PodProcess;
use std::fs;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

const UID: &str = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1";

/// A folder with the layout of `/proc`.
struct FakeProc(TempDir);

impl FakeProc {
    fn new(namespace: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("self/ns")).unwrap();
        symlink(namespace, folder.path().join("self/ns/pid")).unwrap();
        Self(folder)
    }

    fn add_process(&self, pid: u32, name: &str, started: u64, cgroup: &str) {
        let folder = self.0.path().join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        let stat = format!("{pid} ({name}) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0\n");
        fs::write(folder.join("stat"), stat).unwrap();
        fs::write(folder.join("cgroup"), cgroup).unwrap();
    }

    fn open(&self, ignore: &[&str]) -> ProcFs {
        let ignore: Vec<_> = ignore.iter().map(ToString::to_string).collect();
        ProcFs::new(self.0.path().to_owned(), &ignore)
    }
}

/// The identity of one process.
fn identify(procfs: &ProcFs, pid: u32) -> ProcessIdentity {
    let mut who = procfs.identify(&BTreeSet::from([pid]));
    assert_eq!(who.len(), 1);
    who.remove(&pid).unwrap()
}

#[test]
fn a_process_of_a_pod_is_known_by_pod_and_container() {
    let fake = FakeProc::new(HOST_PID_NAMESPACE);
    fake.add_process(7, "python3", 99, &format!("0::/kubepods/burstable/pod{UID}/{}\n", "ab".repeat(32)));
    let log = format!(
        "1 1 8:1 /var/lib/kubelet/pods/{UID}/containers/main/12ab /dev/termination-log rw - ext4 x rw\n"
    );
    fs::write(fake.0.path().join("7/mountinfo"), log).unwrap();
    let procfs = fake.open(&[]);
    assert_eq!(procfs.process_visibility(), ProcessVisibility::Visible);
    let who = identify(&procfs, 7);
    assert_eq!((who.name.as_deref(), who.started_ticks, who.ignored), (Some("python3"), Some(99), false));
    let container_id = Some("ab".repeat(32));
    assert_eq!(
        who.owner,
        Owner::Pod(PodProcess { uid: UID.into(), container_id, container: Some("main".into()) })
    );
}

#[test]
fn a_later_process_with_the_same_id_is_read_again_and_the_same_process_is_not() {
    let fake = FakeProc::new(HOST_PID_NAMESPACE);
    let procfs = fake.open(&[]);
    fake.add_process(7, "a", 1, &format!("0::/kubepods/pod{UID}\n"));
    assert!(identify(&procfs, 7).owner.pod().is_some());
    // A process does not leave its pod, so its files are not read again.
    fake.add_process(7, "a", 1, "0::/\n");
    assert!(identify(&procfs, 7).owner.pod().is_some());
    fake.add_process(7, "b", 2, "0::/\n");
    assert_eq!(identify(&procfs, 7).owner, Owner::NoPod { container_id: None });
    // Processes that a call does not name are forgotten.
    procfs.identify(&BTreeSet::new());
    assert!(procfs.known.lock().is_empty());
}

#[test]
fn a_process_that_cannot_be_identified_has_a_reason() {
    let fake = FakeProc::new(HOST_PID_NAMESPACE);
    fake.add_process(8, "x", 1, "");
    fs::create_dir_all(fake.0.path().join("9/stat")).unwrap();
    let procfs = fake.open(&[]);
    let unseen = |pid| match identify(&procfs, pid).owner {
        Owner::Unknown(unseen) => unseen,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        (unseen(7), unseen(8), unseen(9)),
        (UnknownReason::Gone, UnknownReason::Unreadable, UnknownReason::Unreadable)
    );
    let many: BTreeSet<u32> = (1..=u32::try_from(PIDS_MAX).unwrap() + 1).collect();
    let last = procfs.identify(&many).pop_last().unwrap().1;
    assert_eq!(last.owner, Owner::Unknown(UnknownReason::TooMany));
}

#[test]
fn in_a_pid_namespace_of_its_own_no_process_is_identified() {
    let fake = FakeProc::new("pid:[4026532271]");
    fake.add_process(7, "innocent", 1, &format!("0::/kubepods/pod{UID}\n"));
    let procfs = fake.open(&[]);
    assert!(
        matches!(procfs.process_visibility(), ProcessVisibility::Hidden { fix, .. } if fix.contains("hostPID: true"))
    );
    assert_eq!(identify(&procfs, 7).owner, Owner::Unknown(UnknownReason::Hidden));
    let none = ProcFs::new("/nowhere".into(), &[]);
    assert!(matches!(none.process_visibility(), ProcessVisibility::Unsupported { .. }));
    assert_eq!(identify(&none, 7).owner, Owner::Unknown(UnknownReason::Unreadable));
}

#[test]
fn processes_are_ignored_by_the_name_that_the_kernel_keeps() {
    let fake = FakeProc::new(HOST_PID_NAMESPACE);
    fake.add_process(7, "nvidia-persiste", 1, "0::/\n");
    fake.add_process(8, "nvidia-smi2", 1, "0::/\n");
    let procfs = fake.open(&["nvidia-persistenced", "nvidia-smi"]);
    assert!(identify(&procfs, 7).ignored);
    assert!(!identify(&procfs, 8).ignored);
}

#[test]
fn this_process_is_read_from_the_real_proc() {
    let procfs = ProcFs::new("/proc".into(), &[]);
    let pid = std::process::id();
    match procfs.process_visibility() {
        ProcessVisibility::Visible => {
            let who = identify(&procfs, pid);
            assert!(who.name.is_some() && who.started_ticks.is_some(), "{who:?}");
        }
        ProcessVisibility::Hidden { why, .. } => assert!(why.contains("pid:["), "{why}"),
        ProcessVisibility::Unsupported { why } => panic!("{why}"),
    }
    let (started, who) = procfs.read_identity(pid, None).unwrap();
    assert!(started > 0 && !matches!(who.owner, Owner::Unknown(_)), "{who:?}");
    assert_eq!(procfs.read_identity(u32::MAX, None), Err(UnknownReason::Gone));
}

#[test]
fn a_name_may_look_like_the_fields_after_it() {
    let rest = "S 1 4117 4117 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 182734 12345 99 18446744073709551615";
    for name in ["python3", "a) S 1 (b", "", "tmux: server", ")"] {
        let stat = parse_stat(&format!("4117 ({name}) {rest}\n")).unwrap();
        assert_eq!(stat, Stat { name: name.into(), started_ticks: 182_734 });
    }
    let numbers = "1 ".repeat(18);
    for bad in ["", "4117", "4117 (x", "4117 (x) S 1", &format!("4117 (x) S {numbers}start 1")] {
        assert_eq!(parse_stat(bad), None, "{bad}");
    }
}

#[test]
fn a_long_name_is_truncated_as_in_the_kernel() {
    assert_eq!(truncate("nvidia-persistenced"), "nvidia-persiste");
    assert_eq!(truncate("nvidia-smi"), "nvidia-smi");
    assert_eq!(truncate("fifteen-bytes-é"), "fifteen-bytes-", "never half a character");
}

fn mount(root: &str, at: &str) -> String {
    format!("812 790 259:1 {root} {at} rw,relatime - ext4 /dev/nvme0n1p1 rw\n")
}

#[test]
fn the_termination_log_has_the_name_of_the_container() {
    let log = |folder: &str, uid: &str, name: &str| {
        mount(&format!("{folder}/pods/{uid}/containers/{name}/1f2e3d4c"), "/dev/termination-log")
    };
    let hosts = mount(&format!("/var/lib/kubelet/pods/{UID}/etc-hosts"), "/etc/hosts");
    let volume = mount(&format!("/var/lib/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/x"), "/x");
    for (text, name) in [
        (log("/var/lib/kubelet", UID, "trainer"), Some("trainer")),
        // The kubelet's folder is the root of a file system.
        (log("", UID, "trainer"), Some("trainer")),
        (hosts.clone() + &volume + &log("/data/kubelet", UID, "a"), Some("a")),
        (log("/var/lib/kubelet", UID, "a") + &log("/var/lib/kubelet", UID, "a"), Some("a")),
        (log("/var/lib/kubelet", UID, "a") + &log("/var/lib/kubelet", UID, "b"), None),
        (log("/var/lib/kubelet", "another", "a"), None),
        (hosts + &volume, None),
        (mount("/", "/") + &mount("/pods", "/p"), None),
        (String::new(), None),
        ("nonsense\n".to_owned(), None),
    ] {
        assert_eq!(container(&text, UID).as_deref(), name, "{text}");
    }
}
