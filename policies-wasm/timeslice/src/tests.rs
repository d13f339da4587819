use super::*;
use berth_policy_sdk::parse;
use berth_policy_sdk::testing::{NodeBuilder, assert_schema_matches};

const SHARED: &str = "nvidia.com/gpu.shared";

fn timeslice(json: &str) -> Result<Timeslice, String> {
    parse(json).and_then(Timeslice::new)
}

/// Part, devices, MiB and percent of each.
fn offered(json: &str, node: &Node) -> Vec<(u32, u32, u64, u32)> {
    let answer = timeslice(json).unwrap().offer(node).expect("an offer");
    let line = |offer: &PartOffer| {
        let [line] = &offer.lines[..] else { panic!("one line a part") };
        let Consumes::Slice(slice) = line.consumes else { panic!("a share is a slice") };
        (offer.part, line.count, slice.memory_mib, slice.compute_percent)
    };
    answer.parts.iter().map(line).collect()
}

#[test]
fn every_gpu_is_four_shares_by_default() {
    let node = NodeBuilder::new().gpus(2, "Tesla T4", 15_360).build().node;
    assert_eq!(offered("{}", &node), [(0, 4, 3_840, 25), (1, 4, 3_840, 25)]);
    let answer = timeslice("{}").unwrap().offer(&node).unwrap();
    assert_eq!(answer.parts[0].lines[0].resource, SHARED);
    assert_eq!(answer.again_after_seconds, None);
}

#[test]
fn all_shares_together_fit_the_gpu() {
    let node = NodeBuilder::new().gpus(1, "Tesla T4", 15_109).build().node;
    for replicas in 1..=REPLICAS_MAX {
        let (_, count, memory, compute) = offered(&format!(r#"{{"replicas": {replicas}}}"#), &node)[0];
        assert_eq!(count, replicas);
        assert!(memory * u64::from(count) <= 15_109 && compute * count <= 100);
    }
}

#[test]
fn an_override_goes_by_model_index_or_uuid_and_the_first_counts() {
    let node =
        NodeBuilder::new().gpus(2, "NVIDIA H100 80GB HBM3", 80_000).gpus(2, "Tesla T4", 16_000).build().node;
    let json = r#"{"replicas": 2, "overrides": [
        {"uuid": "GPU-0", "replicas": 1},
        {"model": "NVIDIA H100*", "replicas": 10},
        {"index": 0, "replicas": 99},
        {"model": "Tesla T4", "index": 3, "replicas": 5}]}"#;
    let expected = [(0, 1, 80_000, 100), (1, 10, 8_000, 10), (2, 2, 8_000, 50), (3, 5, 3_200, 20)];
    assert_eq!(offered(json, &node), expected);
}

#[test]
fn other_gpus_than_only_are_passed_on() {
    let node = NodeBuilder::new().gpus(3, "Tesla T4", 16_000).build().node;
    let json = r#"{"only": [{"index": 1}, {"uuid": "GPU-2"}]}"#;
    assert_eq!(offered(json, &node), [(1, 4, 4_000, 25), (2, 4, 4_000, 25)]);
    assert_eq!(offered(r#"{"only": []}"#, &node), []);
}

#[test]
fn mig_is_passed_on() {
    let node = NodeBuilder::new().gpus(2, "NVIDIA H100", 80_000).mig(0, "1g.10gb", 2, 10_000).build().node;
    assert_eq!(offered("{}", &node), [(1, 4, 20_000, 25)]);
}

#[test]
fn shares_are_placed_on_the_least_held_gpu_and_other_resources_passed_on() {
    let whole = "nvidia.com/gpu";
    let share = Consumes::Slice(Slice { memory_mib: 4_000, compute_percent: 25 });
    let built = NodeBuilder::new()
        .gpus(3, "Tesla T4", 16_000)
        .devices(0, SHARED, 4, share)
        .devices(1, SHARED, 4, share)
        .devices(2, whole, 1, Consumes::Whole)
        .hold(&[0])
        .build();
    let policy = timeslice("{}").unwrap();
    let placed = policy.place(&built.node, &built.place_request(SHARED, 2)).unwrap();
    assert_eq!(placed.devices, [4, 1]);
    assert_eq!(policy.place(&built.node, &built.place_request(whole, 1)), None);
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let cases = [
        (r#"{"replicas": 0}"#, "replicas: 0 is out of range"),
        (r#"{"replicas": 129}"#, "write 1 to 128"),
        (r#"{"replicas": -1}"#, "expected u32"),
        (r#"{"replica": 2}"#, "unknown field `replica`"),
        (r#"{"resource": "shared"}"#, "resource: `shared`"),
        (r#"{"only": [{"index": 0}, {}]}"#, "only[1]: names no GPU"),
        (r#"{"only": [{"indx": 0}]}"#, "unknown field `indx`"),
        (r#"{"overrides": [{"index": 0}]}"#, "missing field `replicas`"),
        (r#"{"overrides": [{"replicas": 2}]}"#, "overrides[0]: names no GPU"),
        (r#"{"overrides": [{"index": 1, "replicas": 200}]}"#, "overrides[0].replicas: 200"),
    ];
    for (json, expected) in cases {
        let error = timeslice(json).unwrap_err();
        assert!(error.contains(expected), "{json}: {error}");
    }
}

#[test]
fn the_schema_names_exactly_the_parameters() {
    let example = r#"{"replicas": 2, "resource": "a.b/c", "only": [], "overrides": []}"#;
    timeslice(example).unwrap();
    assert_schema_matches(&Timeslice::describe().parameters_schema, example);
}
