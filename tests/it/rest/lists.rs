//! Lists show the same of each item as its own resource does, whatever was cached before.

use crate::support::admin_bench::{Bench, GPU, gpu, gpu_id};
use berth_kernel::hardware::process::{Process, ProcessIdentity, ProcessVisibility, Uses};
use berth_kernel::ids::names::Resource;

/// A process on a GPU with an unknown owner.
fn process(index: u32, pid: u32, memory_mib: u64) -> Process {
    let uses = Uses { compute: true, ..Uses::default() };
    Process {
        pid,
        part: gpu(index),
        uses,
        memory_mib: Some(memory_mib),
        identity: ProcessIdentity::default(),
    }
}

/// Every allocation of the list is as it is alone; answers all of them.
fn check(bench: &Bench, what: &str) -> Vec<serde_json::Value> {
    let list = bench.get("/api/v1/allocations?state=all").expect(200);
    let items = list["items"].as_array().unwrap().clone();
    assert_eq!(list["total"], items.len(), "{what}");
    for item in &items {
        let id = item["id"].as_str().unwrap();
        assert_eq!(*item, bench.get(&format!("/api/v1/allocations/{id}")).expect(200), "{what}");
    }
    items
}

#[test]
fn the_cached_json_of_an_allocation_is_not_used_after_a_change() {
    let bench = Bench::new(3);
    assert_eq!(check(&bench, "none").len(), 0);
    let first = bench.allocate(0);
    bench.allocate(1);
    assert_eq!(check(&bench, "two").len(), 2);
    check(&bench, "the same again");
    let used = |items: &[serde_json::Value]| -> Vec<serde_json::Value> {
        let of_first = items.iter().find(|item| item["id"] == first.id.to_string()).unwrap();
        of_first["uses"].as_array().unwrap().clone()
    };
    let visible = |on_first: Vec<Process>| {
        bench.look_as(3, |seen| {
            seen.process_visibility = ProcessVisibility::Visible;
            seen.processes = [(gpu_id(0), on_first), (gpu_id(1), Vec::new()), (gpu_id(2), Vec::new())].into();
        });
    };
    // No process at first; then one starts, and uses more.
    visible(Vec::new());
    assert_eq!(used(&check(&bench, "an idle GPU"))[0]["memoryUsedMiB"], 0);
    for memory_mib in [100, 200] {
        visible(vec![process(0, 4711, memory_mib)]);
        assert_eq!(used(&check(&bench, "a process"))[0]["shared"]["memoryMiB"], memory_mib);
    }
    // Another allocation on the same GPU: the process's owner is then ambiguous.
    let again = bench.allocate(0);
    let with = &used(&check(&bench, "one more holder"))[0]["shared"]["with"];
    assert_eq!(*with, serde_json::json!([again.id.to_string()]));
    // The effects of the configuration, of an operator's command, and of GPUs that vanish.
    bench.facts.lock().unwrap().mps = [Resource::parse(GPU).unwrap()].into();
    check(&bench, "with MPS");
    bench.delete(&format!("/api/v1/allocations/{}?force=true", first.id)).expect(200);
    let ended = check(&bench, "one has ended");
    assert!(ended.iter().any(|item| item["state"] == "ended"), "{ended:?}");
    bench.look_as(1, |_| ());
    check(&bench, "GPUs are gone");
    bench.look(3);
    // Many that come and go.
    for _ in 0..80 {
        let one = bench.allocate(2);
        bench.get("/api/v1/allocations").expect(200);
        bench.delete(&format!("/api/v1/allocations/{}?force=true", one.id)).expect(200);
    }
    check(&bench, "after many");
}
