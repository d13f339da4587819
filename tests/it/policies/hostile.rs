//! The table of `just hostile`, with fewer uploads.

use harness::hostile::table::{self, Attack};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_guest_harms_the_daemon_or_the_next_pod() {
    // Other tests run beside this one.
    let attack = Attack { berth: env!("CARGO_BIN_EXE_berth").into(), uploads: 12, patience: 20 };
    let mut wrong = Vec::new();
    let tally = table::run(&attack, |line| {
        if !line.is_right() {
            wrong.push(line.to_string());
        }
    });
    let tally = tally.await.unwrap();
    assert!(tally.is_clean(), "{tally}\n{}", wrong.join("\n"));
}
