use super::*;
use berth_policy_sdk::testing::{Built, NodeBuilder, assert_schema_matches, logged};
use berth_policy_sdk::{DrainState, parse};

const SMALL: &str = "nvidia.com/gpu.mem-4g";
const LARGE: &str = "nvidia.com/gpu.mem-8g";

fn memory(json: &str) -> Result<Memory, String> {
    parse(json).and_then(Memory::new)
}

/// Resource, devices, MiB and percent of each line of the first part.
fn offered(json: &str, node: &Node) -> Vec<(String, u32, u64, u32)> {
    let answer = memory(json).unwrap().offer(node).expect("an offer");
    let line = |line: &OfferLine| {
        let Consumes::Slice(slice) = line.consumes else { panic!("a slice") };
        (line.resource.clone(), line.count, slice.memory_mib, slice.compute_percent)
    };
    answer.parts[0].lines.iter().map(line).collect()
}

fn counts(json: &str, memory_mib: u64) -> Vec<u32> {
    let node = NodeBuilder::new().gpus(1, "Test GPU", memory_mib).build().node;
    offered(json, &node).iter().map(|(_, count, ..)| *count).collect()
}

fn slice(memory_mib: u64) -> Consumes {
    Consumes::Slice(Slice { memory_mib, compute_percent: 0 })
}

/// GPUs of 16 GiB, each with four small and two large slices: 0 to 3 and 4 to 5, 6 to 9 and 10 to 11...
fn cut(gpus: u32) -> NodeBuilder {
    (0..gpus).fold(NodeBuilder::new().gpus(gpus, "Tesla T4", 16_384), |node, gpu| {
        node.devices(gpu, SMALL, 4, slice(4_096)).devices(gpu, LARGE, 2, slice(8_192))
    })
}

fn placed(built: &Built, resource: &str, size: u32) -> Vec<u32> {
    let policy = memory("{}").unwrap();
    policy.place(&built.node, &built.place_request(resource, size)).expect("a placement").devices
}

#[test]
fn each_size_is_offered_as_often_as_it_fits_alone() {
    let node = NodeBuilder::new().gpus(1, "Tesla T4", 15_360).build().node;
    let expected = [(SMALL.to_owned(), 3, 4_096, 0), (LARGE.to_owned(), 1, 8_192, 0)];
    assert_eq!(offered("{}", &node), expected);
}

#[test]
fn sizes_that_do_not_fit_are_not_offered_and_a_gpu_too_small_for_all_is_passed_on() {
    assert_eq!(counts("{}", 8_000), [1]);
    let node = NodeBuilder::new().gpus(1, "Tesla K10", 3_584).gpus(1, "Tesla T4", 15_360).build().node;
    let answer = memory("{}").unwrap().offer(&node).unwrap();
    assert_eq!(answer.parts.iter().map(|offer| offer.part).collect::<Vec<_>>(), [1]);
}

#[test]
fn a_size_may_have_a_maximum_per_gpu() {
    let json = r#"{"sizes": [{"resource": "a.b/1g", "memoryMiB": 1024, "maxPerGpu": 3},
                             {"resource": "a.b/4g", "memoryMiB": 4096}]}"#;
    assert_eq!(counts(json, 16_384), [3, 4]);
}

#[test]
fn no_gpu_is_cut_into_more_slices_than_the_limit() {
    let sizes = |mibs: &[u64]| {
        let size = |mib: &u64| format!(r#"{{"resource": "a.b/m{mib}", "memoryMiB": {mib}}}"#);
        format!(r#"{{"sizes": [{}]}}"#, mibs.iter().map(size).collect::<Vec<_>>().join(","))
    };
    assert_eq!(counts(&sizes(&[640]), 81_920), [128], "the arithmetic of the limit");
    assert_eq!(counts(&sizes(&[320]), 81_920), [128]);
    assert_eq!(counts(&sizes(&[320, 321]), 81_920), [64, 64]);
    // The small sizes are reduced, and the large ones keep all that fit.
    let eight = [1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 40_960, 81_920];
    assert_eq!(counts(&sizes(&eight), 81_920), [48, 40, 20, 10, 5, 2, 2, 1]);
    let sixteen: Vec<u64> = (1..=16).collect();
    assert_eq!(counts(&sizes(&sixteen), 81_920), [8; 16]);
}

#[test]
fn fewer_slices_than_would_fit_and_a_size_that_fits_nowhere_cause_warnings() {
    let node = NodeBuilder::new().gpus(2, "NVIDIA H200", 144_384).gpus(1, "Tesla T4", 15_360).build().node;
    let warned = |sizes: &str| {
        let policy = memory(&format!(r#"{{"sizes": [{sizes}]}}"#)).unwrap();
        logged(|| policy.offer(&node)).1
    };
    let small = r#"{"resource": "a.b/1g", "memoryMiB": 1024}"#;
    let cut = "warning: sizes[0]: 141 slices of a.b/1g would fit, 128 are offered on GPU 0, 1, since a GPU has at most \
               128 slices over all sizes (accept it: maxPerGpu: 128)";
    assert_eq!(warned(small), [cut]);
    assert_eq!(
        warned(r#"{"resource": "a.b/1g", "memoryMiB": 1024, "maxPerGpu": 128}"#),
        Vec::<String>::new()
    );
    let both = format!(r#"{small}, {{"resource": "a.b/2g", "memoryMiB": 2048}}"#);
    let expected = [
        "warning: sizes[0]: 141 slices of a.b/1g would fit, 64 are offered on GPU 0, 1, since a GPU has at most 128 \
         slices over all sizes (accept it: maxPerGpu: 64)",
        "warning: sizes[1]: 70 slices of a.b/2g would fit, 64 are offered on GPU 0, 1, since a GPU has at most 128 \
         slices over all sizes (accept it: maxPerGpu: 64)",
    ];
    assert_eq!(warned(&both), expected);
    let large = r#"{"resource": "a.b/all", "memoryMiB": 200000}"#;
    assert_eq!(warned(large), ["warning: sizes[0]: no GPU that is cut has 200000 MiB for a.b/all"]);
}

#[test]
fn compute_is_proportional_to_memory_if_configured() {
    let node = NodeBuilder::new().gpus(1, "Tesla T4", 15_360).build().node;
    let shares = offered(r#"{"compute": "proportional"}"#, &node);
    assert_eq!(shares.iter().map(|line| line.3).collect::<Vec<_>>(), [26, 53]);
    let thin = r#"{"compute": "proportional", "sizes": [{"resource": "a.b/c", "memoryMiB": 100}]}"#;
    assert_eq!(offered(thin, &node)[0].3, 0);
}

#[test]
fn a_full_gpu_has_compute_for_all_of_its_slices() {
    for memory_mib in [4_096, 15_109, 16_384, 24_258, 40_536, 81_559, 143_771] {
        let node = NodeBuilder::new().gpus(1, "Test GPU", memory_mib).build().node;
        for (_, count, mib, percent) in offered(r#"{"compute": "proportional"}"#, &node) {
            assert!(count * percent <= 100 && u64::from(count) * mib <= memory_mib);
        }
    }
}

#[test]
fn other_gpus_and_mig_are_passed_on() {
    let node = NodeBuilder::new().gpus(3, "NVIDIA H100", 80_000).mig(0, "1g.10gb", 2, 10_000).build().node;
    let parts = |json: &str| -> Vec<u32> {
        memory(json).unwrap().offer(&node).unwrap().parts.iter().map(|offer| offer.part).collect()
    };
    assert_eq!(parts("{}"), [1, 2]);
    assert_eq!(parts(r#"{"only": [{"index": 2}, {"index": 0}]}"#), [2]);
}

#[test]
fn a_slice_is_placed_on_the_gpu_with_the_least_memory_left() {
    // GPU 1 has a small slice: the next small one is placed there, and a large one as well.
    let built = cut(3).hold(&[6]).build();
    assert_eq!(placed(&built, SMALL, 1), [7]);
    assert_eq!(placed(&built, LARGE, 1), [10]);
    // 12 GiB of GPU 1 are held: a large slice no longer fits there, a small one does.
    let built = cut(3).hold(&[10]).hold(&[6]).build();
    assert_eq!(placed(&built, SMALL, 1), [7]);
    assert_eq!(placed(&built, LARGE, 1), [4]);
}

#[test]
fn several_slices_are_on_one_gpu_if_they_fit() {
    let built = cut(3).hold(&[10]).hold(&[6]).build();
    assert_eq!(placed(&built, SMALL, 2), [0, 1], "GPU 1 has room for one");
    assert_eq!(placed(&built, SMALL, 4), [0, 1, 2, 3]);
    // Five and six do not fit on one GPU: four are on an empty one, the others where the least is left.
    assert_eq!(placed(&built, SMALL, 5), [0, 1, 2, 3, 7]);
    assert_eq!(placed(&built, SMALL, 6), [0, 1, 2, 3, 12, 13]);
}

#[test]
fn required_slices_are_in_the_answer_and_consume_memory() {
    let built = cut(2).build();
    let mut request = built.place_request(LARGE, 2);
    request.required = vec![11];
    let policy = memory("{}").unwrap();
    assert_eq!(policy.place(&built.node, &request).unwrap().devices, [11, 10]);
    request.size = 3;
    assert_eq!(policy.place(&built.node, &request).unwrap().devices, [11, 10, 4]);
    // On the GPU of the required slice, although another GPU has less memory left.
    let built = cut(2).hold(&[0]).build();
    let mut request = built.place_request(SMALL, 2);
    request.required = vec![6];
    assert_eq!(policy.place(&built.node, &request).unwrap().devices, [6, 7]);
}

#[test]
fn a_draining_gpu_comes_last_and_requests_that_cannot_be_met_are_passed_on() {
    let built = cut(2).hold(&[0]).part(0, |part| part.drain = DrainState::Draining).build();
    assert_eq!(placed(&built, SMALL, 1), [6]);
    assert_eq!(placed(&built, SMALL, 5), [6, 7, 8, 9, 1]);
    let policy = memory("{}").unwrap();
    assert_eq!(policy.place(&built.node, &built.place_request(SMALL, 8)), None);
}

#[test]
fn with_overcommit_all_available_slices_can_be_chosen() {
    // Four small slices are held, so that no memory is left, but large ones are still available.
    let built = cut(1).hold(&[0, 1, 2, 3]).build();
    assert_eq!(placed(&built, LARGE, 2), [4, 5]);
}

#[test]
fn limits_are_sums_per_gpu() {
    let built = cut(2).build();
    let limits = |json: &str, devices: &[u32]| {
        let request = built.admit_request(devices, &[]);
        match memory(json).unwrap().admit(&built.node, &request) {
            Some(Verdict::Allow(terms)) => (terms.limits.memory_mib, terms.limits.compute_percent),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(limits("{}", &[4]), (Some(8_192), None));
    assert_eq!(limits("{}", &[0, 1, 2]), (Some(12_288), None));
    assert_eq!(limits("{}", &[0, 1, 6]), (Some(4_096), None), "one number for both GPUs");
}

#[test]
fn compute_is_limited_if_it_is_reserved() {
    let share = Consumes::Slice(Slice { memory_mib: 4_096, compute_percent: 25 });
    let built = NodeBuilder::new().gpus(1, "Tesla T4", 16_384).devices(0, SMALL, 4, share).build();
    let policy = memory(r#"{"compute": "proportional"}"#).unwrap();
    let Some(Verdict::Allow(terms)) = policy.admit(&built.node, &built.admit_request(&[0, 1, 2], &[])) else {
        panic!("allowed")
    };
    assert_eq!((terms.limits.memory_mib, terms.limits.compute_percent), (Some(12_288), Some(75)));
    assert_eq!(terms.reason, "3 x 4096 MiB");
}

#[test]
fn other_resources_are_passed_on() {
    let whole = "nvidia.com/gpu";
    let built = NodeBuilder::new().gpus(1, "Tesla T4", 16_384).devices(0, whole, 1, Consumes::Whole).build();
    let policy = memory("{}").unwrap();
    assert_eq!(policy.place(&built.node, &built.place_request(whole, 1)), None);
    assert_eq!(policy.admit(&built.node, &built.admit_request(&[0], &[])), None);
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let many: Vec<_> = (1..=17).map(|n| format!(r#"{{"resource": "a.b/c{n}", "memoryMiB": {n}}}"#)).collect();
    let many = format!(r#"{{"sizes": [{}]}}"#, many.join(","));
    let cases = [
        (r#"{"sizes": [{"resource": "a.b/c"}]}"#, "missing field `memoryMiB`"),
        (r#"{"sizes": [{"resource": "a.b/c", "memoryMib": 1}]}"#, "unknown field `memoryMib`"),
        (r#"{"sizes": [{"resource": "c", "memoryMiB": 1}]}"#, "sizes[0].resource: `c`"),
        (r#"{"sizes": [{"resource": "a.b/c", "memoryMiB": 0}]}"#, "sizes[0].memoryMiB: 0 is not a size"),
        (
            r#"{"sizes": [{"resource": "a.b/c", "memoryMiB": 1, "maxPerGpu": 0}]}"#,
            "sizes[0].maxPerGpu: 0 would offer no slices",
        ),
        (
            r#"{"sizes": [{"resource": "a.b/c", "memoryMiB": 1}, {"resource": "a.b/c", "memoryMiB": 2}]}"#,
            "sizes[1].resource: `a.b/c` is used twice",
        ),
        (many.as_str(), "sizes: 17 entries; at most 16"),
        (r#"{"compute": "half"}"#, "expected `none` or `proportional`"),
        (r#"{"only": [{}]}"#, "only[0]: selects no GPU"),
    ];
    for (json, expected) in cases {
        let error = memory(json).unwrap_err();
        assert!(error.contains(expected), "{json}: {error}");
    }
}

#[test]
fn the_schema_names_exactly_the_parameters() {
    let example = r#"{"sizes": [], "compute": "none", "only": []}"#;
    memory(example).unwrap();
    assert_schema_matches(&Memory::describe().parameters_schema, example);
}
