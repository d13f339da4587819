//! `berth state`: export, import and verify, and the errors for a store that is damaged, in use or absent.

use crate::store::contract::{allocation, identity, meta};
use berth_kernel::node::ports::Store;
use berth_kernel::node::record::{Record, Write};
use berth_store::SledStore;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

fn berth(args: &[&str], dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    command
        .arg("state")
        .args(args)
        .arg("--state-dir")
        .arg(dir)
        .env_remove("BERTH_STATE_DIR")
        .stdin(Stdio::null());
    command
}

fn done(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

fn refused(mut command: Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(stdout.is_empty(), "{}", String::from_utf8_lossy(&stdout));
    String::from_utf8(stderr).unwrap()
}

/// A state folder with 150 allocations, and what its store holds.
fn filled() -> (TempDir, Vec<Record>) {
    let dir = tempfile::tempdir().unwrap();
    let mut store = SledStore::open(&dir.path().join("store")).unwrap();
    let id = identity(&store.load().unwrap());
    for number in 0..150 {
        let writes =
            [Write::Put(meta(id, number + 1)), Write::Put(allocation(number, "a reason \u{1f600}\n"))];
        store.append(&writes).unwrap();
    }
    let held = store.load().unwrap();
    (dir, held)
}

fn import(dir: &Path, text: &str) -> Output {
    let mut command = berth(&["import"], dir);
    let mut child =
        command.arg("-").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It may refuse, and go, before all is written.
    let _ = child.stdin.take().unwrap().write_all(text.as_bytes());
    child.wait_with_output().unwrap()
}

#[test]
fn an_imported_export_is_the_same_store() {
    let (dir, held) = filled();
    let text = done(berth(&["export"], dir.path()));
    assert_eq!(text.lines().count(), 1 + held.len());
    assert_eq!(text.lines().next(), Some(r#"{"berthState":1,"recordFormat":3,"records":151}"#));
    let output = done(berth(&["verify"], dir.path()));
    assert!(output.contains("151 ") || output.contains("151\n"), "{output}");
    assert!(output.contains("150 allocation, 1 meta"), "{output}");

    let other = tempfile::tempdir().unwrap();
    let into = other.path().join("new");
    let file = other.path().join("state.jsonl");
    done({
        let mut command = berth(&["export"], dir.path());
        command.arg(&file);
        command
    });
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    let mut command = berth(&["import"], &into);
    command.arg(&file);
    let output = done(command);
    assert!(output.starts_with("imported: "), "{output}");
    assert_eq!(SledStore::open(&into.join("store")).unwrap().load().unwrap(), held);
    assert_eq!(done(berth(&["export"], &into)), text);
    // Neither a store nor an export is written over.
    let mut again = berth(&["import"], &into);
    again.arg(&file);
    assert!(refused(again).contains("holds a store already"));
    let mut again = berth(&["export"], dir.path());
    again.arg(&file);
    assert!(refused(again).contains("cannot create"));
}

#[test]
fn a_file_with_one_wrong_line_imports_nothing() {
    let (dir, _) = filled();
    let text = done(berth(&["export"], dir.path()));
    let lines: Vec<&str> = text.lines().collect();
    let without = |i: usize| [&lines[..i], &lines[i + 1..]].concat().join("\n");
    let twice = [&lines[..3], &lines[2..]].concat().join("\n");
    let cases = [
        (lines[1..].join("\n"), "line 1: "),
        (lines[..100].join("\n"), "ends after 99 of 151"),
        (without(1), "line "),
        (without(50), "ends after 150 of 151"),
        (twice, "line 4: out of order"),
        (text.replacen("allocation", "alocation", 1), "unknown record kind alocation"),
        (text.replacen(r#""reason":"#, r#""raison":"#, 1), "line 3: "),
        (text.replacen(r#""berthState":1"#, r#""berthState":2"#, 1), "newer berth"),
        (text.replacen("a reason", &"x".repeat(40_000), 1), "longer than"),
        (String::new(), "line 1: "),
    ];
    for (text, says) in cases {
        let into = tempfile::tempdir().unwrap();
        let output = import(into.path(), &text);
        let printed = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && printed.contains(says), "{says}: {printed}");
        assert_eq!(fs::read_dir(into.path()).unwrap().count(), 0, "{says}");
    }
}

#[test]
fn a_store_that_is_damaged_in_use_or_absent_is_reported() {
    let (dir, _) = filled();
    let store = SledStore::open(&dir.path().join("store")).unwrap();
    for command in ["verify", "export"] {
        assert!(refused(berth(&[command], dir.path())).contains("in use by another process"), "{command}");
    }
    drop(store);
    let log = dir.path().join("store/data/db");
    let bytes = fs::read(&log).unwrap();
    // The log also has places that no record is read from any more.
    let everywhere = (0..bytes.len().saturating_sub(8)).filter(|at| bytes[*at..].starts_with(b"a reason"));
    let file = fs::OpenOptions::new().write(true).open(&log).unwrap();
    everywhere.for_each(|at| file.write_all_at(b"X", at as u64).unwrap());
    let spoilt = fs::read(&log).unwrap();
    for command in ["verify", "export"] {
        assert!(refused(berth(&[command], dir.path())).contains("is damaged"), "{command}");
    }
    assert_eq!(fs::read(&log).unwrap(), spoilt, "it was left as it is");
    let empty = tempfile::tempdir().unwrap();
    assert!(refused(berth(&["verify"], empty.path())).contains("holds no store"));
    assert_eq!(fs::read_dir(empty.path()).unwrap().count(), 0);
}

#[test]
fn a_lost_store_is_restored_by_import_or_replaced_by_init() {
    let (dir, held) = filled();
    let text = done(berth(&["export"], dir.path()));
    assert!(refused(berth(&["init"], dir.path())).contains("holds a store already"));
    fs::remove_dir_all(dir.path().join("store/data")).unwrap();
    assert!(SledStore::open(&dir.path().join("store")).is_err());
    let lost = refused(berth(&["verify"], dir.path()));
    let remedy = format!("`berth state init --state-dir {}`", dir.path().display());
    assert!(lost.contains("one was created here") && lost.contains(&remedy), "{lost}");
    let output = import(dir.path(), &text);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(SledStore::open(&dir.path().join("store")).unwrap().load().unwrap(), held);

    fs::remove_dir_all(dir.path().join("store")).unwrap();
    let printed = done(berth(&["init"], dir.path()));
    assert!(printed.starts_with("created: ") && printed.contains("1 meta"), "{printed}");
    assert_eq!(SledStore::open(&dir.path().join("store")).unwrap().load().unwrap().len(), 1);
}
