//! One policy call in a fresh instance: what the kubelet waits for. Budget for `place` with 8 GPUs
//! of 10 devices: median 60 us.
#![allow(missing_docs, dead_code, unreachable_pub)]

#[path = "../tests/it/policies_guests.rs"]
mod policies_guests;
#[path = "../tests/it/policies_node.rs"]
mod policies_node;

use std::hint::black_box;

use berth::kernel::policy::Question;
use berth::ports::Policies;
use criterion::{Criterion, criterion_group, criterion_main};

use policies_guests::{NOW, policies};
use policies_node::{SHARED, shared_node};

fn calls(criterion: &mut Criterion) {
    let versions = policies().restore_shipped(NOW).expect("they compile here");
    for (gpus, shares) in [(8, 10), (64, 10), (16, 128)] {
        let node = shared_node(gpus, shares);
        let place = node.place(SHARED, 1);
        for version in versions.iter().filter(|version| version.name != "exclusive") {
            for (hook, question) in [("place", Question::Place(&place)), ("offer", Question::Offer)] {
                let name = format!("policy call/{gpus}x{shares}/{}/{hook}", version.name);
                let call = node.call(version, "{}", question);
                criterion.bench_function(&name, |bench| {
                    bench.iter(|| policies().ask(black_box(call)).expect("an answer"));
                });
            }
        }
    }
}

criterion_group!(benches, calls);
criterion_main!(benches);
