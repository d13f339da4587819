//! `topology` on the largest board: every size of 16 GPUs, for several wirings, within its budget.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use berth_kernel::hardware::gpu::{Link, Path};
use berth_kernel::node::ports::{CallOutput, PolicyRuntime as _};
use berth_kernel::policy::hooks::{Answer, Question};
use berth_kernel::sharing::offer::Consumes;
use berth_policy_sdk::testing::Random;

use crate::support::gpus::WHOLE;
use crate::support::guests::{NOW, policies};
use crate::support::ledger_node::LedgerNode;

const GPUS: u32 = 16;
/// A millisecond: the search takes some 9 units a nanosecond (4.2 million in 0.46 ms, on a busy
/// machine).
const FUEL_MAX: u64 = 9_000_000;
/// Three GPUs that are in all good sets make every walk of the search long, so that its table takes
/// over: 18 million units and 0.8 ms beyond what any call takes. No board is wired so, and nothing
/// takes more.
const FUEL_MAX_WORST: u64 = 20_000_000;
/// The wiring that this is for.
const WORST: &str = "three in all good sets";

fn node(link: impl Fn(u32, u32) -> Link) -> LedgerNode {
    let node = LedgerNode::new().gpus(GPUS).links(GPUS, link);
    (0..GPUS).fold(node, |node, gpu| node.offer(gpu, &[(WHOLE, 1, Consumes::Whole)]))
}

/// A placement among sixteen GPUs takes half a minute, in which the kubelet admits no pod.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/774
#[test]
fn any_size_of_sixteen_gpus_is_found_within_the_budget() {
    let mut random = Random(1);
    let noise: Vec<u32> = (0..GPUS * GPUS).map(|_| random.below(19)).collect();
    let noise = |a: u32, b: u32| noise[(a * GPUS + b) as usize];
    let link = |path, nvlinks| Link { path, nvlinks };
    let wirings = [
        ("nvswitch", node(|_, _| link(Path::SameNuma, 18))),
        ("boards of 4", node(|a, b| link(Path::SameNuma, if a / 4 == b / 4 { 4 } else { 0 }))),
        ("bridges", node(|a, b| link(Path::CrossNuma, if a / 2 == b / 2 { 4 } else { 0 }))),
        ("any", node(|a, b| link(Path::HostBridge, noise(a, b)))),
        (
            WORST,
            node(|a, b| link(Path::SameNuma, if b < 3 { 40 + noise(a, b) % 2 } else { noise(a, b) % 3 })),
        ),
    ];
    let versions = policies().restore_shipped(NOW).unwrap();
    let version = versions.iter().find(|version| version.name == "topology").unwrap();
    for (name, node) in &wirings {
        for size in 1..16 {
            let place = node.place(WHOLE, size);
            let CallOutput { answer, cost, .. } =
                policies().call(node.call(version, "{}", Question::Place(&place)));
            let Ok(Some(Answer::Place(placement))) = answer else { panic!("{answer:?}") };
            assert_eq!(placement.devices.len(), size);
            println!("{name:22} {size:2} of 16: fuel {:8} {} us", cost.fuel, cost.wall_us);
            assert!(
                cost.fuel < if *name == WORST { FUEL_MAX_WORST } else { FUEL_MAX },
                "{name} {size}: {}",
                cost.fuel
            );
        }
    }
}
