//! The room on a `/proc` of files, and on the real one.

use super::*;
use berth_kernel::process::PodProcess;
use std::fs;
use std::os::unix::fs::symlink;
use tempfile::TempDir;

const UID: &str = "3f0c8f5e-7f5b-4a53-a0c8-4a34d0f0b6a1";

/// A folder that looks like `/proc`.
struct Fake(TempDir);

impl Fake {
    fn new(namespace: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("self/ns")).unwrap();
        symlink(namespace, folder.path().join("self/ns/pid")).unwrap();
        Self(folder)
    }

    fn runs(&self, pid: u32, name: &str, started: u64, cgroup: &str) {
        let folder = self.0.path().join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        let stat = format!("{pid} ({name}) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {started} 0 0\n");
        fs::write(folder.join("stat"), stat).unwrap();
        fs::write(folder.join("cgroup"), cgroup).unwrap();
    }

    fn room(&self, ignore: &[&str]) -> ProcFs {
        let ignore: Vec<_> = ignore.iter().map(ToString::to_string).collect();
        ProcFs::new(self.0.path().to_owned(), &ignore)
    }
}

fn only(room: &ProcFs, pid: u32) -> Who {
    let mut who = room.who(&BTreeSet::from([pid]));
    assert_eq!(who.len(), 1);
    who.remove(&pid).unwrap()
}

#[test]
fn a_process_of_a_pod_is_known_by_pod_and_container() {
    let fake = Fake::new(HOST_PID_NAMESPACE);
    fake.runs(7, "python3", 99, &format!("0::/kubepods/burstable/pod{UID}/{}\n", "ab".repeat(32)));
    let log = format!(
        "1 1 8:1 /var/lib/kubelet/pods/{UID}/containers/main/12ab /dev/termination-log rw - ext4 x rw\n"
    );
    fs::write(fake.0.path().join("7/mountinfo"), log).unwrap();
    let room = fake.room(&[]);
    assert_eq!(room.sight(), Sight::Visible);
    let who = only(&room, 7);
    assert_eq!((who.name.as_deref(), who.started_ticks, who.ignored), (Some("python3"), Some(99), false));
    let container_id = Some("ab".repeat(32));
    assert_eq!(
        who.owner,
        Owner::Pod(PodProcess { uid: UID.into(), container_id, container: Some("main".into()) })
    );
}

#[test]
fn a_later_process_with_the_same_id_is_looked_at_anew_and_the_same_one_is_not() {
    let fake = Fake::new(HOST_PID_NAMESPACE);
    let room = fake.room(&[]);
    fake.runs(7, "a", 1, &format!("0::/kubepods/pod{UID}\n"));
    assert!(only(&room, 7).owner.pod().is_some());
    // A process does not leave its pod: what its files say now is not asked.
    fake.runs(7, "a", 1, "0::/\n");
    assert!(only(&room, 7).owner.pod().is_some());
    fake.runs(7, "b", 2, "0::/\n");
    assert_eq!(only(&room, 7).owner, Owner::NoPod { container_id: None });
    // Who is not asked about is forgotten.
    room.who(&BTreeSet::new());
    assert!(room.known.lock().is_empty());
}

#[test]
fn what_cannot_be_told_says_why() {
    let fake = Fake::new(HOST_PID_NAMESPACE);
    fake.runs(8, "x", 1, "");
    fs::create_dir_all(fake.0.path().join("9/stat")).unwrap();
    let room = fake.room(&[]);
    let unseen = |pid| match only(&room, pid).owner {
        Owner::Unknown(unseen) => unseen,
        other => panic!("{other:?}"),
    };
    assert_eq!((unseen(7), unseen(8), unseen(9)), (Unseen::Gone, Unseen::Unreadable, Unseen::Unreadable));
    let many: BTreeSet<u32> = (1..=u32::try_from(ASKED_MAX).unwrap() + 1).collect();
    let last = room.who(&many).pop_last().unwrap().1;
    assert_eq!(last.owner, Owner::Unknown(Unseen::TooMany));
}

#[test]
fn in_a_pid_namespace_of_its_own_it_guesses_nothing() {
    let fake = Fake::new("pid:[4026532271]");
    fake.runs(7, "innocent", 1, &format!("0::/kubepods/pod{UID}\n"));
    let room = fake.room(&[]);
    assert!(matches!(room.sight(), Sight::Hidden { fix, .. } if fix.contains("hostPID: true")));
    assert_eq!(only(&room, 7).owner, Owner::Unknown(Unseen::Hidden));
    let none = ProcFs::new("/nowhere".into(), &[]);
    assert!(matches!(none.sight(), Sight::Unsupported { .. }));
    assert_eq!(only(&none, 7).owner, Owner::Unknown(Unseen::Unreadable));
}

#[test]
fn daemons_are_ignored_by_the_name_that_the_kernel_keeps() {
    let fake = Fake::new(HOST_PID_NAMESPACE);
    fake.runs(7, "nvidia-persiste", 1, "0::/\n");
    fake.runs(8, "nvidia-smi2", 1, "0::/\n");
    let room = fake.room(&["nvidia-persistenced", "nvidia-smi"]);
    assert!(only(&room, 7).ignored);
    assert!(!only(&room, 8).ignored);
}

#[test]
fn this_process_is_read_from_the_real_proc() {
    let room = ProcFs::new("/proc".into(), &[]);
    let pid = std::process::id();
    match room.sight() {
        Sight::Visible => {
            let who = only(&room, pid);
            assert!(who.name.is_some() && who.started_ticks.is_some(), "{who:?}");
        }
        Sight::Hidden { why, .. } => assert!(why.contains("pid:["), "{why}"),
        Sight::Unsupported { why } => panic!("{why}"),
    }
    let (started, who) = room.one(pid, None).unwrap();
    assert!(started > 0 && !matches!(who.owner, Owner::Unknown(_)), "{who:?}");
    assert_eq!(room.one(u32::MAX, None), Err(Unseen::Gone));
}
