//! A short run of `just crash`: the real binary, killed at random moments. Only the harness's own build has named
//! steps.

use crate::support::child;
use harness::kill::{self, Beside, Program, SmallDisk, Tally};
use std::path::PathBuf;

/// Enough for a start that is killed, a load that is killed, and both ways to settle.
const ROUNDS: u64 = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_kill_loses_or_invents_an_allocation() {
    no_kill_loses(Beside::Guard).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_kill_loses_or_invents_an_allocation_of_a_claim() {
    no_kill_loses(Beside::Claims).await;
}

async fn no_kill_loses(beside: Beside) {
    let folder = tempfile::tempdir().unwrap();
    let program = Program {
        exe: env!("CARGO_BIN_EXE_berth").into(),
        environment: Vec::new(),
        named_steps: false,
        small_disk: None,
    };
    let tally = kill::run(&program, beside, folder.path(), ROUNDS, 7, |_| {}).await.unwrap();
    assert_eq!(tally, Tally { rounds: tally.rounds, ..Tally::default() });
}

/// In the child: the folder of the node.
const FOLDER: &str = "BERTH_TEST_CRASH_FOLDER";
/// In the child: the name of the disk.
const DISK: &str = "BERTH_TEST_CRASH_DISK";

/// Room that the store gave back would be gone at once; and what it records is there after each kill.
#[test]
fn another_program_that_fills_the_disk_prevents_no_start() {
    if let (Some(folder), Ok(disk)) = (std::env::var_os(FOLDER), std::env::var(DISK)) {
        let small_disk = Some(if disk == "tmpfs" { SmallDisk::Tmpfs } else { SmallDisk::Ext4 });
        let exe = PathBuf::from(env!("CARGO_BIN_EXE_berth"));
        let program = Program { exe, environment: Vec::new(), named_steps: false, small_disk };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.unwrap();
        for (name, beside) in [("guard", Beside::Guard), ("claims", Beside::Claims)] {
            let folder = PathBuf::from(&folder).join(name);
            std::fs::create_dir(&folder).unwrap();
            let tally = runtime.block_on(kill::run(&program, beside, &folder, ROUNDS, 3, |_| {})).unwrap();
            assert_eq!(tally, Tally { rounds: tally.rounds, ..Tally::default() }, "{name}");
        }
        return;
    }
    for (name, disk) in [("tmpfs", SmallDisk::Tmpfs), ("ext4", SmallDisk::Ext4)] {
        if let Some(why) = disk.missing() {
            eprintln!("skipped on {name}: {why}");
            continue;
        }
        let folder = tempfile::tempdir().unwrap();
        let test = "another_program_that_fills_the_disk_prevents_no_start";
        let mut process = disk.namespace(&std::env::current_exe().unwrap());
        process.args(child::only(module_path!(), test));
        let output = process.env(FOLDER, folder.path()).env(DISK, name).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success() && child::has_run(&output.stdout),
            "{name}: {}{}",
            text(&output.stdout),
            text(&output.stderr)
        );
    }
}
