//! Lists show the same of each item as its own resource does, whatever was cached before.

use crate::support::admin_node::AdminNode;
use crate::support::gpus::{WHOLE, gpu, gpu_id};
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
fn check(node: &AdminNode, what: &str) -> Vec<serde_json::Value> {
    let list = node.get("/api/v1/allocations?state=all").expect(200);
    let items = list["items"].as_array().unwrap().clone();
    assert_eq!(list["total"], items.len(), "{what}");
    for item in &items {
        let id = item["id"].as_str().unwrap();
        assert_eq!(*item, node.get(&format!("/api/v1/allocations/{id}")).expect(200), "{what}");
    }
    items
}

#[test]
fn the_cached_json_of_an_allocation_is_not_used_after_a_change() {
    let node = AdminNode::new(3);
    assert_eq!(check(&node, "none").len(), 0);
    let first = node.allocate(0);
    node.allocate(1);
    assert_eq!(check(&node, "two").len(), 2);
    check(&node, "the same again");
    let used = |items: &[serde_json::Value]| -> Vec<serde_json::Value> {
        let of_first = items.iter().find(|item| item["id"] == first.id.to_string()).unwrap();
        of_first["uses"].as_array().unwrap().clone()
    };
    let visible = |on_first: Vec<Process>| {
        node.scan_with(3, |seen| {
            seen.process_visibility = ProcessVisibility::Visible;
            seen.processes = [(gpu_id(0), on_first), (gpu_id(1), Vec::new()), (gpu_id(2), Vec::new())].into();
        });
    };
    // No process at first; then one starts, and uses more.
    visible(Vec::new());
    assert_eq!(used(&check(&node, "an idle GPU"))[0]["memoryUsedMiB"], 0);
    for memory_mib in [100, 200] {
        visible(vec![process(0, 4711, memory_mib)]);
        assert_eq!(used(&check(&node, "a process"))[0]["shared"]["memoryMiB"], memory_mib);
    }
    // Another allocation on the same GPU: the process's owner is then ambiguous.
    let again = node.allocate(0);
    let with = &used(&check(&node, "one more holder"))[0]["shared"]["with"];
    assert_eq!(*with, serde_json::json!([again.id.to_string()]));
    // The effects of the configuration, of an operator's command, and of GPUs that vanish.
    node.facts.lock().unwrap().mps = [Resource::parse(WHOLE).unwrap()].into();
    check(&node, "with MPS");
    node.delete(&format!("/api/v1/allocations/{}?force=true", first.id)).expect(200);
    let ended = check(&node, "one has ended");
    assert!(ended.iter().any(|item| item["state"] == "ended"), "{ended:?}");
    node.scan_with(1, |_| ());
    check(&node, "GPUs are gone");
    node.scan(3);
    // Many that come and go.
    for _ in 0..80 {
        let one = node.allocate(2);
        node.get("/api/v1/allocations").expect(200);
        node.delete(&format!("/api/v1/allocations/{}?force=true", one.id)).expect(200);
    }
    check(&node, "after many");
}
