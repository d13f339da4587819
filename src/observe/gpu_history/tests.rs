//! Samples of ledgers, limits, and the memory that a full history takes.

use super::*;
use berth_kernel::grants::allocation::Holder;
use berth_kernel::hardware::gpu::Usage;
use berth_kernel::hardware::process::{ProcessTable, TrackedProcess};
use berth_kernel::ids::names::GpuId;
use berth_kernel::sharing::part_state::PartState;
use test_node::{Node, gpu_id, of_pod, part, process};

#[allow(dead_code, reason = "shared with the tests of other crates")]
#[path = "../../kernel/node/test_node.rs"]
mod test_node;

const HOUR: Duration = Duration::from_secs(3600);

fn load(percent: u8, processes: &[(u32, u8)]) -> Load {
    Load {
        utilization_percent: Some(percent),
        temperature_celsius: Some(50),
        power_watts: None,
        processes_percent: Some(processes.iter().copied().collect()),
    }
}

/// Sets the names of the pods of all allocations, which are those of their UIDs.
fn name_pods(node: &mut Node) {
    for allocation in Arc::make_mut(&mut node.ledger.live).values_mut() {
        let allocation = Arc::make_mut(allocation);
        let pod = allocation.holder.pod_uid.clone();
        allocation.holder = Holder { namespace: Some("default".into()), pod, ..allocation.holder.clone() };
    }
}

fn use_memory(node: &mut Node, gpu: &str, memory_used_mib: u64) {
    let usage = Usage { memory_used_mib: Some(memory_used_mib), processes: 1 };
    Arc::make_mut(&mut node.ledger.usage).insert(part(gpu), usage);
}

#[test]
fn a_scan_adds_memory_load_and_the_use_of_each_pod() {
    let mut node = Node::new();
    node.grant("GPU-0", None, "a", "main");
    name_pods(&mut node);
    node.look(&[
        ("GPU-0", process(1, "GPU-0", of_pod("a", "main"))),
        ("GPU-0", process(2, "GPU-0", of_pod("a", "main"))),
        ("GPU-0", process(3, "GPU-0", of_pod("stranger", "main"))),
    ]);
    use_memory(&mut node, "GPU-0", 700);
    let history = GpuHistory::default();
    for (utilization, processes) in [(80, [(1, 30), (2, 20)]), (60, [(1, 30), (3, 10)])] {
        let loads = BTreeMap::from([(gpu_id("GPU-0"), load(utilization, &processes))]);
        history.add(&node.ledger, loads, node.now);
        node.pass(2);
    }
    let past = history.past(&gpu_id("GPU-0"), HOUR, 240, node.now);
    assert_eq!(past.step_s, 15);
    let [point] = past.gpu[..] else { panic!("{past:?}") };
    assert_eq!((point.memory_used_mib, point.memory_granted_mib), (Some(700), Some(81_920)));
    assert_eq!((point.utilization_percent, point.temperature_celsius), (Some(70), Some(50)));
    assert_eq!((point.power_watts, point.at_wall_ms % 15_000), (None, 0));
    let [(name, points)] = &past.pods[..] else { panic!("{past:?}") };
    assert_eq!((name.namespace.as_str(), name.pod.as_str()), ("default", "a"));
    assert_eq!((points[0].memory_used_mib, points[0].utilization_percent), (Some(200), Some(40)));
    let other = history.past(&gpu_id("GPU-1"), HOUR, 240, node.now);
    assert_eq!((other.gpu[0].memory_granted_mib, other.gpu[0].memory_used_mib), (Some(0), None));
    assert!(other.pods.is_empty());
    assert_eq!(history.loads()[&gpu_id("GPU-0")].utilization_percent, Some(60));
    history.scan_failed();
    assert!(history.loads().is_empty());
}

#[test]
fn a_gpu_that_vanishes_keeps_its_past_for_a_day_and_gets_no_new_points() {
    let mut node = Node::new();
    use_memory(&mut node, "GPU-0", 700);
    let history = GpuHistory::default();
    history.add(&node.ledger, BTreeMap::new(), node.now);
    node.pass(60);
    let gone = Arc::make_mut(node.ledger.parts.get_mut(&part("GPU-0")).unwrap());
    gone.present = false;
    history.add(&node.ledger, BTreeMap::new(), node.now);
    assert_eq!(history.past(&gpu_id("GPU-0"), HOUR, 240, node.now).gpu.len(), 1);
    node.pass(23 * 3600);
    assert_eq!(history.past(&gpu_id("GPU-0"), LAST_MAX, 240, node.now).gpu.len(), 1);
    node.pass(3600);
    history.add(&node.ledger, BTreeMap::new(), node.now);
    assert!(history.past(&gpu_id("GPU-0"), LAST_MAX, 240, node.now).gpu.is_empty());
    assert!(!history.kept.lock().gpus.contains_key(&gpu_id("GPU-0")));
}

#[test]
fn a_wall_clock_that_jumps_moves_all_points_and_loses_none() {
    let mut node = Node::new();
    use_memory(&mut node, "GPU-0", 1);
    let history = GpuHistory::default();
    history.add(&node.ledger, BTreeMap::new(), node.now);
    node.pass(60);
    let before = history.past(&gpu_id("GPU-0"), HOUR, 240, node.now).gpu;
    node.now.wall_ms += 7;
    assert_eq!(history.past(&gpu_id("GPU-0"), HOUR, 240, node.now).gpu, before, "milliseconds do not count");
    node.now.wall_ms -= 500_007;
    history.add(&node.ledger, BTreeMap::new(), node.now);
    let after = history.past(&gpu_id("GPU-0"), HOUR, 240, node.now).gpu;
    assert_eq!(after.len(), 2);
    assert_eq!(before[0].at_wall_ms - after[0].at_wall_ms, 500_000);
}

#[test]
fn a_new_pod_takes_the_place_of_the_one_that_was_seen_longest_ago() {
    let mut all: BTreeMap<u32, u64> = BTreeMap::new();
    for key in 0..5 {
        *series_for(&mut all, &key, 3, u64::from(key) + 1, |seen| *seen).unwrap() = u64::from(key) + 1;
    }
    assert_eq!(all.keys().copied().collect::<Vec<_>>(), [2, 3, 4]);
    for seen in all.values_mut() {
        *seen = 9;
    }
    assert!(series_for(&mut all, &7, 3, 9, |seen| *seen).is_none(), "all were seen now");
    assert!(series_for(&mut all, &3, 3, 9, |seen| *seen).is_some());
}

/// A node of `gpus` GPUs on each of which this many pods have a process.
fn full_node(gpus: usize, pods: usize) -> Node {
    let mut node = Node::new();
    let model = PartState::clone(node.ledger.part(&part("GPU-0")).unwrap());
    node.ledger.parts.clear();
    let mut by_gpu = BTreeMap::new();
    for gpu in 0..gpus {
        let id = format!("GPU-8a56a4bc-e184-a047-2620-be19fdf91{gpu:03}");
        let mut state = model.clone();
        (state.part.id, state.part.gpu) = (part(&id), gpu_id(&id));
        node.ledger.parts.insert(part(&id), Arc::new(state));
        use_memory(&mut node, &id, 70_000);
        let mut on_gpu = Vec::new();
        for pod in 0..pods {
            let name = format!("{:0>40}", gpu * pods + pod);
            node.grant(&id, u32::try_from(pod).ok(), &name, "main");
            let process = process(u32::try_from(gpu * pods + pod).unwrap(), &id, of_pod(&name, "main"));
            on_gpu.push(TrackedProcess {
                process,
                first: node.now,
                unexplained_since: None,
                is_reported: false,
            });
        }
        by_gpu.insert(gpu_id(&id), on_gpu);
    }
    name_pods(&mut node);
    node.ledger.processes = Arc::new(ProcessTable { by_gpu, ..ProcessTable::clone(&node.ledger.processes) });
    node
}

#[test]
fn new_pods_take_the_place_of_no_pod_that_the_same_scan_sees() {
    let mut node = full_node(17, 16);
    let all = Arc::clone(&node.ledger.processes);
    let mut without_first = ProcessTable::clone(&all);
    without_first.by_gpu.pop_first();
    node.ledger.processes = Arc::new(without_first);
    let mut kept = SeriesStore::default();
    kept.add(&node.ledger, &BTreeMap::new(), node.now);
    let before: Vec<_> = kept.pods.keys().cloned().collect();
    assert_eq!(before.len(), PODS_MAX);
    node.pass(10);
    // The pairs of the first GPU come first.
    node.ledger.processes = all;
    kept.add(&node.ledger, &BTreeMap::new(), node.now);
    assert!(kept.pods.keys().eq(&before));
}

/// Bytes of the history after a day of scans, without the allocator's own.
fn bytes_after_a_day(node: &mut Node) -> (usize, usize) {
    let mut kept = SeriesStore::default();
    let all: Vec<u32> = (0..4_000).collect();
    let percents: Vec<_> = all.iter().map(|pid| (*pid, 3)).collect();
    let full = Load { power_watts: Some(700), ..load(99, &percents) };
    let loads: BTreeMap<_, _> =
        node.ledger.parts.values().map(|part| (part.part.gpu.clone(), full.clone())).collect();
    for _ in 0..3 {
        kept.add(&node.ledger, &loads, node.now);
        node.pass(8 * 3600);
    }
    let gpus: usize = kept.gpus.values().map(GpuSeries::bytes).sum();
    let pods: usize = kept.pods.values().map(PodSeries::bytes).sum();
    let names: usize =
        kept.pods.keys().map(|(gpu, name)| gpu.as_str().len() + name.namespace.len() + name.pod.len()).sum();
    let entries = kept.gpus.len() * size_of::<(GpuId, GpuSeries)>()
        + kept.pods.len() * size_of::<((GpuId, PodName), PodSeries)>();
    (gpus + pods, names + entries)
}

#[test]
fn sixteen_gpus_with_ten_pods_each_take_about_a_mebibyte_and_no_node_takes_more_than_the_limit() {
    let (slots, rest) = bytes_after_a_day(&mut full_node(16, 10));
    assert_eq!(slots, 952_320);
    assert!(slots + rest < 1_100_000, "{slots} {rest}");
    let (slots, rest) = bytes_after_a_day(&mut full_node(70, 10));
    assert_eq!((slots, BYTES_MAX), (BYTES_MAX, 1_966_080));
    assert!(rest < 640 * (GPUS_MAX + PODS_MAX), "{rest}");
}
