//! The store on disk under errors: damage, other releases, other processes, full disks, missing rights, and processes
//! that are killed.

use crate::store::contract::{
    Folder, allocation, an_append_that_failed_is_settled_by_load, identity, meta, written,
};
use crate::support::child;
use crate::support::wait::SOON;
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::{Record, Write};
use berth_store::SledStore;
use disk_faults::{Fault, Faults};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Names the folder that a test's child process works in.
const CHILD: &str = "BERTH_TEST_STORE";

/// A test of this binary again, in a process of its own, where it finds [`CHILD`] set. The shell
/// makes writing beyond a file size limit an error instead of a signal.
fn in_child(test: &str, folder: &Path) -> Command {
    let mut command = Command::new("sh");
    command
        .args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(child::only(module_path!(), test))
        .env(CHILD, folder)
        .stdin(Stdio::null());
    command
}

fn child_folder() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

/// From a child to its test.
fn say(line: &str) {
    let mut output = std::io::stdout().lock();
    output.write_all(format!("{line}\n").as_bytes()).and_then(|()| output.flush()).unwrap();
}

struct Fresh {
    _temporary: tempfile::TempDir,
    path: PathBuf,
}

fn fresh() -> Fresh {
    let temporary = tempfile::tempdir().unwrap();
    Fresh { path: temporary.path().join("store"), _temporary: temporary }
}

/// Every file below with its bytes, and every folder.
type Files = BTreeMap<PathBuf, Option<Vec<u8>>>;

fn files(folder: &Path) -> Files {
    let mut found = Files::from([(folder.to_owned(), None)]);
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            let bytes = fs::read(&path).unwrap();
            found.insert(path, Some(bytes));
        }
    }
    found
}

fn put_back(folder: &Path, files: &Files) {
    fs::remove_dir_all(folder).unwrap();
    for (path, bytes) in files {
        match bytes {
            Some(bytes) => fs::write(path, bytes).unwrap(),
            None => fs::create_dir(path).unwrap(),
        }
    }
}

/// A store of some appends, opened twice.
/// Answers what it holds.
fn filled(path: &Path, appends: u64, text: &str) -> Vec<Record> {
    let mut store = SledStore::open(path).unwrap();
    let id = identity(&store.load().unwrap());
    for n in 0..appends {
        if n == appends / 2 {
            drop(store);
            store = SledStore::open(path).unwrap();
        }
        let mut writes = vec![Write::Put(meta(id, n + 1)), Write::Put(allocation(n, text))];
        if n >= 40 {
            writes.push(Write::Delete(allocation(n - 40, "").key()));
        }
        store.append(&writes).unwrap();
    }
    store.load().unwrap()
}

fn assert_damaged_and_untouched(path: &Path, what: &str) -> String {
    let before = files(path);
    let error = SledStore::open(path).expect_err(what);
    assert!(matches!(error, StoreError::Damaged { .. }), "{what}: {error}");
    assert!(files(path) == before, "{what}: the folder was changed");
    error.to_string()
}

#[test]
fn damage_is_reported_and_nothing_is_touched() {
    let store = fresh();
    filled(&store.path, 60, "x");
    let good = files(&store.path);
    let data = store.path.join("data");
    let log = data.join("db");
    let bytes = good[&log].clone().unwrap();
    let length = written(&bytes);
    let cut = |to: usize| fs::write(&log, &bytes[..to]).unwrap();
    let garbage: Vec<u8> = (0..length).map(|i| ((i * 7919) >> 3).to_le_bytes()[0]).collect();
    type Damage<'a> = (&'a str, Box<dyn Fn() + 'a>);
    let damages: Vec<Damage> = vec![
        ("half of the log is missing", Box::new(|| cut(length / 2))),
        ("the log is empty", Box::new(|| cut(0))),
        ("the log's end is cut", Box::new(|| cut(length / 5 * 4))),
        ("the log is garbage", Box::new(|| fs::write(&log, &garbage).unwrap())),
        ("the log is zeros", Box::new(|| fs::write(&log, vec![0; length]).unwrap())),
        ("the log is missing", Box::new(|| fs::remove_file(&log).unwrap())),
        ("the counter is gone", Box::new(|| fs::remove_file(data.join("counter")).unwrap())),
        ("the counter is garbage", Box::new(|| fs::write(data.join("counter"), b"12").unwrap())),
        (
            "the data is gone",
            Box::new(|| {
                fs::remove_dir_all(&data).unwrap();
                fs::create_dir(&data).unwrap();
            }),
        ),
    ];
    for (what, damage) in damages {
        damage();
        let message = assert_damaged_and_untouched(&store.path, what);
        assert!(message.contains(store.path.to_str().unwrap()), "{message}");
        put_back(&store.path, &good);
        assert!(files(&store.path) == good);
    }
    assert_eq!(SledStore::open(&store.path).unwrap().load().unwrap().len(), 41);
}

/// Wherever one byte is wrong: either it does not matter, or the store says so. It is never opened
/// with other records than were acknowledged.
fn sweep(appends: u64, text: &str, probes: usize) {
    let store = fresh();
    let records = filled(&store.path, appends, text);
    let good = files(&store.path);
    let log = store.path.join("data/db");
    let bytes = good[&log].as_ref().unwrap();
    let length = written(bytes);
    let (mut fine, mut damaged) = (0, 0);
    for probe in 0..probes {
        // The last bytes are the newest append.
        let at = if probe == 0 { length - 20 } else { length / probes * probe + probe * 13 % 509 };
        let file = fs::OpenOptions::new().write(true).open(&log).unwrap();
        file.write_all_at(&[bytes[at] ^ 0x15], at as u64).unwrap();
        drop(file);
        let spoiled = files(&store.path);
        match SledStore::open(&store.path) {
            Ok(mut opened) => {
                assert!(opened.load().unwrap() == records, "byte {at} of {length}");
                fine += 1;
            }
            Err(StoreError::Damaged { .. }) => {
                assert!(files(&store.path) == spoiled, "byte {at}: the folder was changed");
                damaged += 1;
            }
            Err(other) => panic!("byte {at}: {other}"),
        }
        put_back(&store.path, &good);
    }
    assert!(damaged > 0, "no damage mattered in {fine} probes");
}

#[test]
fn one_wrong_byte_is_always_detected() {
    sweep(120, "x", 80);
}

/// Three segments of log: sled skips the rest of a broken one in silence.
#[test]
fn one_wrong_byte_between_segments_is_always_detected() {
    sweep(700, &"long ".repeat(3_000), 40);
}

/// Opens what the store keeps as the store does, to spoil it in ways that sled finds in order. A sled
/// that was just closed may hold its lock a little longer, by a thread of its own.
fn raw(path: &Path) -> sled::Db {
    let config = sled::Config::new().path(path.join("data")).segment_size(2 << 20).flush_every_ms(None);
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        match config.open() {
            Err(error) if error.to_string().contains("acquire lock") && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            opened => return opened.unwrap(),
        }
    }
}

#[test]
fn a_record_that_is_lost_or_old_is_damage() {
    let store = fresh();
    filled(&store.path, 10, "x");
    let good = files(&store.path);
    let key = [&[4][..], &1_u32.to_be_bytes(), &3_u64.to_be_bytes()].concat();
    let spoil = |how: &dyn Fn(&sled::Db)| {
        let db = raw(&store.path);
        assert!(db.contains_key(&key).unwrap());
        how(&db);
        drop(db);
    };
    spoil(&|db| drop(db.remove(&key).unwrap()));
    let message = assert_damaged_and_untouched(&store.path, "a record is lost");
    assert!(message.contains("should hold 11 records and holds 10"), "{message}");
    put_back(&store.path, &good);
    spoil(&|db| {
        let value = db.get(&key).unwrap().unwrap();
        let old = String::from_utf8(value.to_vec()).unwrap().replace("1003", "1002");
        db.insert(&key, old.as_bytes()).unwrap();
    });
    let message = assert_damaged_and_untouched(&store.path, "a record is old");
    assert!(message.contains("not as they were last written"), "{message}");
    put_back(&store.path, &good);
    spoil(&|db| drop(db.insert(&key, b"\x01{}").unwrap()));
    let message = assert_damaged_and_untouched(&store.path, "a record is malformed");
    assert!(message.contains("allocation 00000001-3"), "{message}");
}

#[test]
fn a_store_behind_its_counter_has_lost_appends() {
    let store = fresh();
    let mut open = SledStore::open(&store.path).unwrap();
    open.append(&[Write::Put(allocation(1, "x"))]).unwrap();
    drop(open);
    let older = files(&store.path.join("data"));
    let mut open = SledStore::open(&store.path).unwrap();
    open.append(&[Write::Put(allocation(2, "x"))]).unwrap();
    drop(open);
    // sled's files are put back, the counter is not.
    let counter = fs::read(store.path.join("data/counter")).unwrap();
    put_back(&store.path.join("data"), &older);
    fs::write(store.path.join("data/counter"), counter).unwrap();
    let message = assert_damaged_and_untouched(&store.path, "the newest append is lost");
    assert!(message.contains("ends after write 2, and 3 were acknowledged"), "{message}");
}

#[test]
fn a_store_of_a_later_release_is_not_changed() {
    let store = fresh();
    filled(&store.path, 3, "x");
    let good = files(&store.path);
    for key in [&[0][..], &[1]] {
        let db = raw(&store.path);
        let mut value = db.get(key).unwrap().unwrap().to_vec();
        value[0] = 9;
        db.insert(key, value).unwrap();
        drop(db);
        let before = files(&store.path);
        let error = SledStore::open(&store.path).unwrap_err();
        assert!(matches!(error, StoreError::Newer { found: 9, known: 3, .. }), "{error}");
        assert!(files(&store.path) == before);
        put_back(&store.path, &good);
    }
}

#[test]
fn incomplete_files_of_a_killed_process_are_deleted() {
    let store = fresh();
    fs::create_dir_all(store.path.join("data.new/blobs")).unwrap();
    fs::write(store.path.join("data.new/db"), b"half").unwrap();
    let records = filled(&store.path, 5, "x");
    fs::create_dir(store.path.join("data.check")).unwrap();
    fs::write(store.path.join("data.check/db"), b"half").unwrap();
    // A snapshot that an earlier release had not finished.
    fs::write(store.path.join("data/snap.7FFFFFFFFFFFFFFF.generating"), b"half").unwrap();
    assert_eq!(SledStore::open(&store.path).unwrap().load().unwrap(), records);
    let left: Vec<_> = fs::read_dir(&store.path).unwrap().map(|e| e.unwrap().file_name()).collect();
    let kept = ["data", "lock"];
    assert!(left.iter().all(|name| kept.iter().any(|kept| name == kept)), "{left:?}");
}

#[test]
fn a_lost_store_is_not_replaced_by_an_empty_one() {
    let store = fresh();
    // A first start that ended before there was a store is one that may be tried again.
    fs::create_dir(&store.path).unwrap();
    fs::write(store.path.join("lock"), b"").unwrap();
    filled(&store.path, 3, "x");
    for gone in [store.path.join("data"), store.path.clone()] {
        fs::remove_dir_all(gone).unwrap();
        let error = SledStore::open(&store.path).unwrap_err();
        assert!(matches!(error, StoreError::Gone { .. }), "{error}");
        for way_out in ["berth state import", "berth state init"] {
            assert!(error.to_string().contains(way_out), "{error}");
        }
        assert!(!store.path.join("data").exists());
    }
    assert!(SledStore::init(&store.path).unwrap());
    filled(&store.path, 3, "x");
    assert!(!SledStore::init(&store.path).unwrap(), "one that is there stays");
    assert_eq!(SledStore::open(&store.path).unwrap().load().unwrap().len(), 4);
    // A release that left no such file: it is written at the next start.
    fs::remove_file(store.path.with_extension("made")).unwrap();
    drop(SledStore::open(&store.path).unwrap());
    fs::remove_dir_all(&store.path).unwrap();
    assert!(matches!(SledStore::open(&store.path), Err(StoreError::Gone { .. })));
    // Without one, decisions show it. A folder for them does not: the store is opened before it is filled.
    fs::remove_file(store.path.with_extension("made")).unwrap();
    let decisions = store.path.with_file_name("decisions");
    fs::create_dir(&decisions).unwrap();
    let decision = decisions.join("00000000000000000001.log");
    fs::write(&decision, b"").unwrap();
    let error = SledStore::open(&store.path).unwrap_err();
    assert!(error.to_string().contains(decision.to_str().unwrap()), "{error}");
    fs::remove_file(&decision).unwrap();
    drop(SledStore::open(&store.path).unwrap());
}

#[test]
fn a_store_that_was_damaged_in_use_is_not_changed_by_the_next_start() {
    let store = fresh();
    filled(&store.path, 60, "x");
    let mut open = SledStore::open(&store.path).unwrap();
    open.append(&[Write::Put(allocation(99, "x"))]).unwrap();
    // Nothing reads these bytes again before the stop.
    let log = store.path.join("data/db");
    let mut bytes = fs::read(&log).unwrap();
    let tail = bytes.iter().rposition(|byte| *byte != 0).unwrap();
    bytes[tail - 200] ^= 0xff;
    fs::File::options().write(true).open(&log).unwrap().write_all_at(&bytes, 0).unwrap();
    drop(open);
    let damaged = files(&store.path);
    assert!(matches!(SledStore::open(&store.path), Err(StoreError::Damaged { .. })));
    assert!(files(&store.path) == damaged, "byte for byte");
}

#[test]
fn a_copy_is_made_after_a_kill_and_not_after_a_clean_stop() {
    let store = fresh();
    filled(&store.path, 60, "x");
    let leftover = store.path.join("data.check");
    // A copy begins with the removal of what a killed process left.
    let copied = || {
        fs::create_dir_all(&leftover).unwrap();
        let open = SledStore::open(&store.path).unwrap();
        (!leftover.exists(), open)
    };
    let (was_copied, open) = copied();
    assert!(!was_copied, "it was closed");
    drop(open);
    let (was_copied, mut open) = copied();
    assert!(!was_copied, "it was opened and closed");
    open.append(&[Write::Put(allocation(99, "x"))]).unwrap();
    let records = open.load().unwrap();
    let as_killed = files(&store.path);
    drop(open);
    put_back(&store.path, &as_killed);
    let (was_copied, mut open) = copied();
    assert!(was_copied, "it was killed");
    assert!(open.load().unwrap() == records);
    drop(open);
    assert!(!copied().0, "it was closed again");
}

/// Appends that each change the same record of 12 KB, so that about 170 of them fill a segment of the log.
fn grow_beyond_a_segment(store: &mut SledStore, appends: std::ops::Range<u64>) {
    let id = identity(&store.load().unwrap());
    for append in appends {
        let text = append.to_string().repeat(4_000);
        store.append(&[Write::Put(meta(id, append)), Write::Put(allocation(0, &text))]).unwrap();
    }
}

/// While sled opens its log, it overwrites segments of which no page is in use, and may then need its snapshot to read
/// the rest.
#[test]
fn a_store_of_several_segments_opens_again_and_again() {
    let store = fresh();
    let mut open = SledStore::open(&store.path).unwrap();
    let mut log_bytes = 0;
    for round in 0..14 {
        grow_beyond_a_segment(&mut open, round * 50 + 100..round * 50 + 150);
        let records = open.load().unwrap();
        log_bytes = log_bytes.max(fs::metadata(store.path.join("data/db")).unwrap().len());
        for opened in 0..4 {
            let as_killed = files(&store.path);
            drop(open);
            // Kills and clean stops alternate; rounds with an even number begin with a kill.
            if (round + opened) % 2 == 0 {
                put_back(&store.path, &as_killed);
            }
            let again = SledStore::open(&store.path);
            open = again.unwrap_or_else(|e| panic!("round {round}, opened {opened} times since: {e}"));
            assert!(open.load().unwrap() == records, "round {round}, opened {opened} times since");
        }
    }
    assert!(log_bytes > 2 << 20, "the log had at most {log_bytes} bytes: one segment");
}

/// The blocks of sled's next snapshot are allocated in advance, so that no other program can take them.
#[test]
fn the_next_snapshot_is_written_into_blocks_that_were_allocated_before() {
    let store = fresh();
    let data = store.path.join("data");
    let blocks = |name: &str| fs::metadata(data.join(name)).unwrap().blocks() * 512;
    let snapshots = || {
        let names = fs::read_dir(&data).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("snap.")).collect::<Vec<_>>()
    };
    let mut open = SledStore::open(&store.path).unwrap();
    assert!(blocks("next-snapshot") >= 64 << 10 && blocks("db") >= 4 << 20);
    assert!(snapshots().is_empty(), "a log of one segment needs no snapshot");
    grow_beyond_a_segment(&mut open, 100..350);
    let mut kept = Vec::new();
    for append in 350..353 {
        let inode = fs::metadata(data.join("next-snapshot")).unwrap().ino();
        grow_beyond_a_segment(&mut open, append..append + 1);
        drop(open);
        open = SledStore::open(&store.path).unwrap();
        let found = snapshots();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(fs::metadata(data.join(&found[0])).unwrap().ino(), inode);
        assert!(blocks("next-snapshot") >= 64 << 10);
        kept.extend(found);
    }
    assert!(kept.is_sorted_by(|earlier, later| earlier < later), "{kept:?}");
}

/// What stands in a file's place: made by the system's own tools.
fn stand_in(what: &str, path: &Path) {
    fs::remove_file(path).unwrap();
    match what {
        "a FIFO" => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
        "a symbolic link" => std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
        _ => fs::create_dir(path).unwrap(),
    }
}

#[test]
fn other_files_than_regular_ones_are_reported_at_once() {
    let store = fresh();
    filled(&store.path, 60, "x");
    let good = files(&store.path);
    for name in ["lock", "data/db", "data/conf", "data/counter", "data/next-snapshot"] {
        for what in ["a FIFO", "a symbolic link", "a folder"] {
            stand_in(what, &store.path.join(name));
            let (answer, answered) = std::sync::mpsc::channel();
            let path = store.path.clone();
            std::thread::spawn(move || answer.send(SledStore::open(&path).map(drop)));
            let error = answered.recv_timeout(SOON).expect("it hangs").unwrap_err();
            let message = error.to_string();
            assert!(message.contains(what) && message.contains(name), "{name} is {what}: {message}");
            put_back(&store.path, &good);
        }
    }
    drop(SledStore::open(&store.path).unwrap());
}

#[test]
fn a_counter_that_is_deleted_in_use_is_noticed() {
    let store = fresh();
    let mut open = SledStore::open(&store.path).unwrap();
    let counter = store.path.join("data/counter");
    let aside = store.path.join("aside");
    fs::rename(&counter, &aside).unwrap();
    let error = open.append(&[Write::Put(allocation(1, "x"))]).unwrap_err();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
    assert!(open.load().unwrap_err().to_string().contains("data/counter is missing"));
    fs::rename(&aside, &counter).unwrap();
    // Whether the append that failed is there is settled now.
    assert_eq!(open.load().unwrap().len(), 2);
    open.append(&[Write::Put(allocation(2, "x"))]).unwrap();
}

#[test]
fn the_folder_is_accessible_only_to_its_owner_and_records_stay_in_the_log() {
    let store = fresh();
    filled(&store.path, 60, &"x".repeat(15_000));
    for folder in [&store.path, &store.path.join("data")] {
        assert_eq!(fs::metadata(folder).unwrap().permissions().mode() & 0o777, 0o700);
    }
    // sled never syncs what it puts there.
    assert_eq!(fs::read_dir(store.path.join("data/blobs")).unwrap().count(), 0);
}

#[test]
fn files_that_are_moved_away_in_use_are_detected_and_not_replaced() {
    let store = fresh();
    let mut open = SledStore::open(&store.path).unwrap();
    let write = [Write::Put(allocation(1, "x"))];
    let aside = store.path.join("aside");
    fs::rename(store.path.join("data"), &aside).unwrap();
    assert!(matches!(open.append(&write), Err(StoreError::Io { .. })));
    let error = open.load().unwrap_err();
    assert!(error.to_string().contains("removed"), "{error}");
    assert!(!store.path.join("data").exists());
    fs::rename(&aside, store.path.join("data")).unwrap();
    // Whether the append that failed is there is settled now.
    assert_eq!(open.load().unwrap().len(), 2);
    open.append(&[Write::Put(allocation(2, "x"))]).unwrap();
    drop(open);
    assert_eq!(SledStore::open(&store.path).unwrap().load().unwrap().len(), 3);
}

#[test]
fn a_folder_that_cannot_be_created_is_reported_with_advice() {
    let store = fresh();
    fs::write(&store.path, b"a file").unwrap();
    let error = SledStore::open(&store.path).unwrap_err();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
    assert!(error.to_string().contains("choose another --state-dir"), "{error}");
    // Where folders cannot be created, whichever user runs the tests.
    let error = SledStore::open(Path::new("/sys/berth-test")).unwrap_err();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
}

#[test]
fn a_folder_of_another_user_is_reported_with_advice() {
    let store = fresh();
    filled(&store.path, 3, "x");
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(store.path.parent().unwrap(), 0o755);
    mode(&store.path, 0o755);
    mode(&store.path.join("lock"), 0o400);
    let before = files(&store.path);
    let path = store.path.clone();
    // A thread of its own, since it gives up its rights.
    let error = std::thread::spawn(move || {
        drop_to_the_user_nobody();
        SledStore::open(&path).unwrap_err()
    });
    let error = error.join().unwrap();
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
    assert!(error.to_string().contains("make the user that runs berth the owner"), "{error}");
    assert!(files(&store.path) == before);
}

/// Root may open everything; for files, this thread is then an unprivileged user.
#[allow(unsafe_code)]
fn drop_to_the_user_nobody() {
    if rustix::process::geteuid().is_root() {
        // SAFETY: a system call that takes a number, returns a number and changes this thread's
        // file rights alone; no memory is involved.
        unsafe { libc::setfsuid(65_534) };
    }
}

/// Ends the child when dropped, also after a failed check.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn lines(child: &mut Child, marked: &'static str) -> impl Iterator<Item = u64> {
    let output = BufReader::new(child.stdout.take().unwrap());
    output.lines().filter_map(move |line| line.ok()?.strip_prefix(marked)?.parse().ok())
}

#[test]
fn a_store_that_another_process_has_open_is_refused() {
    if let Some(folder) = child_folder() {
        let _store = SledStore::open(&folder).unwrap();
        // The harness has begun a line of its own.
        say("\nholds 1");
        // Until it is killed, or for the length of a test run if the parent has ended.
        std::thread::sleep(Duration::from_secs(60));
        return;
    }
    let store = fresh();
    let command = &mut in_child("a_store_that_another_process_has_open_is_refused", &store.path);
    let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
    assert_eq!(lines(&mut child.0, "holds ").next(), Some(1));
    let error = SledStore::open(&store.path).unwrap_err();
    assert!(matches!(error, StoreError::Locked { .. }), "{error}");
    drop(child);
    SledStore::open(&store.path).unwrap();
    // Another process opens sled's files with sled.
    let db = raw(&store.path);
    let error = SledStore::open(&store.path).unwrap_err();
    assert!(matches!(error, StoreError::Locked { .. }), "{error}");
    drop(db);
    SledStore::open(&store.path).unwrap();
}

#[test]
fn a_full_disk_loses_nothing() {
    if let Some(folder) = child_folder() {
        an_append_that_failed_is_settled_by_load(&Folder(folder));
        say("\nsettled 1");
        return;
    }
    let store = fresh();
    let mut command = in_child("a_full_disk_loses_nothing", &store.path);
    let output = command.output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && printed.contains("settled 1"), "{printed}{errors}");
}

/// Prints the acknowledged writes; ends by itself only if the parent has ended.
fn append_until_killed(folder: &Path) {
    // The harness has begun a line of its own.
    say("\nopens 0");
    let mut store = SledStore::open(folder).unwrap();
    let loaded = store.load().unwrap();
    let Some(Record::Meta(known)) = loaded.first() else { panic!("no meta") };
    let (id, mut next) = (known.store, known.next_number);
    let since = Instant::now();
    while since.elapsed() < Duration::from_secs(600) {
        let mut writes = vec![Write::Put(meta(id, next + 1)), Write::Put(allocation(next, "x"))];
        if next >= 50 {
            writes.push(Write::Delete(allocation(next - 50, "").key()));
        }
        store.append(&writes).unwrap();
        say(&format!("acknowledged {next}"));
        next += 1;
    }
}

fn acknowledged(line: &str) -> Option<u64> {
    line.strip_prefix("acknowledged ")?.parse().ok()
}

#[test]
fn acknowledged_writes_survive_a_kill() {
    if let Some(folder) = child_folder() {
        append_until_killed(&folder);
        return;
    }
    let store = fresh();
    let mut least = 0;
    for round in 0..16_u64 {
        let command = &mut in_child("acknowledged_writes_survive_a_kill", &store.path);
        let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut output = BufReader::new(child.0.stdout.take().unwrap()).lines().map_while(Result::ok);
        assert!(output.any(|line| line == "opens 0"));
        let mut message = None;
        if round % 4 == 3 {
            // Somewhere while it opens.
            let since = Instant::now();
            while since.elapsed() < Duration::from_micros(300 * round) {
                std::hint::spin_loop();
            }
        } else {
            let wanted = usize::try_from(round * round * 3).unwrap();
            message = output.by_ref().filter_map(|line| acknowledged(&line)).nth(wanted);
        }
        child.0.kill().unwrap();
        child.0.wait().unwrap();
        // Its output before it died counts as well.
        message = output.filter_map(|line| acknowledged(&line)).last().or(message);
        least = message.map_or(least, |n| n + 1);
        let loaded = SledStore::open(&store.path).unwrap().load().unwrap();
        let Some(Record::Meta(known)) = loaded.first() else { panic!("no meta") };
        let next = known.next_number;
        // One more may have been written and not yet reported.
        assert!((least..=least + 1).contains(&next), "round {round}: {next} after {least}");
        let kept = (next.saturating_sub(50)..next).map(|n| allocation(n, "x"));
        let expected: Vec<_> = [meta(known.store, next)].into_iter().chain(kept).collect();
        assert_eq!(loaded, expected, "round {round}");
        least = next;
    }
    assert!(least > 500, "{least}");
}

/// A store that release 0.1 wrote: three GPUs, of which one is cordoned, one drained and one draining.
fn extract_format_1(folder: &Path) -> PathBuf {
    let archive = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/it/data/store-format-1.tar.gz");
    let extracted = Command::new("tar").args(["xzf", archive, "-C"]).arg(folder).status().unwrap();
    assert!(extracted.success());
    folder.join("store")
}

#[test]
fn a_store_of_format_1_is_upgraded_once() {
    let temporary = tempfile::tempdir().unwrap();
    let path = extract_format_1(temporary.path());
    let (appends, before) = SledStore::read(&path).unwrap();
    let states: Vec<_> = before
        .iter()
        .filter_map(|record| match record {
            Record::Marks(_, marks) => {
                Some((marks.drain().as_str(), marks.by_owner.keys().next()?.to_string()))
            }
            _ => None,
        })
        .collect();
    let expected = ["cordoned", "draining", "drained"].map(|state| (state, "operator".to_owned()));
    assert_eq!(states, expected);
    for _ in 0..2 {
        let mut store = SledStore::open(&path).unwrap();
        assert_eq!(store.load().unwrap(), before);
        drop(store);
        assert_eq!(SledStore::read(&path).unwrap(), (appends + 1, before.clone()), "upgraded by one append");
    }
}

#[test]
fn a_disk_that_fails_during_an_upgrade_postpones_it_and_loses_nothing() {
    const TEST: &str = "a_disk_that_fails_during_an_upgrade_postpones_it_and_loses_nothing";
    if let Some(folder) = child_folder() {
        let opened = SledStore::open(&folder).and_then(|mut store| store.load());
        say(if opened.is_ok() { "\nopened 1" } else { "\nrefused 1" });
        return;
    }
    let mut opened_without_upgrade = 0;
    for after in 0..60 {
        let temporary = tempfile::tempdir().unwrap();
        let path = extract_format_1(temporary.path());
        let (appends, before) = SledStore::read(&path).unwrap();
        let faults = Faults::new(temporary.path(), &temporary.path().join("faults"));
        faults.set(Some((Fault::Full, after))).unwrap();
        let mut child = in_child(TEST, &path);
        let output = child.envs(faults.environment().unwrap()).output().unwrap();
        faults.set(None).unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(printed.contains("opened 1") || printed.contains("refused 1"), "{after}: {printed}");
        let (now, records) = SledStore::read(&path).unwrap();
        assert_eq!(records, before, "{after}");
        opened_without_upgrade += usize::from(printed.contains("opened 1") && now == appends);
        // The next start upgrades it, if this one did not.
        let mut store = SledStore::open(&path).unwrap();
        assert_eq!(store.load().unwrap(), before, "{after}");
        drop(store);
        assert!(SledStore::read(&path).unwrap().0 > appends, "{after}: it is upgraded");
    }
    assert!(opened_without_upgrade > 0, "no fault was met by the upgrade alone");
}
