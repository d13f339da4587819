//! A short run of `just crash`: the real binary, killed at random moments. Only the harness's own build has named
//! steps.

use harness::kill::{self, Program, Tally};

/// Enough for a start that is killed, a load that is killed, and both ways to settle.
const ROUNDS: u64 = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_kill_loses_or_invents_an_allocation() {
    let folder = tempfile::tempdir().unwrap();
    let program =
        Program { exe: env!("CARGO_BIN_EXE_berth").into(), environment: Vec::new(), named_steps: false };
    let tally = kill::run(&program, folder.path(), ROUNDS, 7, |_| {}).await.unwrap();
    assert_eq!(tally, Tally { rounds: ROUNDS, ..Tally::default() });
}
