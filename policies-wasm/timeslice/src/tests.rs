use super::*;
use berth_policy_sdk::Attribute;
use berth_policy_sdk::parse;
use berth_policy_sdk::testing::{NodeBuilder, assert_schema_matches, logged};

const SHARED: &str = "nvidia.com/gpu.shared";

fn timeslice(json: &str) -> Result<Timeslice, String> {
    parse(json).and_then(Timeslice::new)
}

/// For each offered part: its index, the number of devices, and the MiB and percent of each.
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
fn an_override_selects_by_model_index_or_uuid_and_the_first_counts() {
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
fn gpus_that_only_does_not_select_are_passed_on() {
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

const GPU: &str = "nvidia.com/gpu";
const SMALL: &str = "nvidia.com/mig-1g.10gb";

/// Two GPUs and one with two instances. Each part has the attribute with its resource that the daemon sets
/// with `migStrategy: mixed`.
fn named() -> NodeBuilder {
    let mut node = NodeBuilder::new().gpus(3, "NVIDIA H100", 80_000).mig(2, "1g.10gb", 2, 10_000);
    for (part, resource) in [(0, GPU), (1, GPU), (3, SMALL), (4, SMALL)] {
        node = node.part(part, |part| {
            part.attributes.push(Attribute { key: "baseline.resource".into(), value: resource.into() });
        });
    }
    for (part, index) in [(3, "0"), (4, "1")] {
        node = node.part(part, |part| {
            part.attributes.push(Attribute { key: "mig.index".into(), value: index.into() });
        });
    }
    node
}

/// The shared parts, each with its resource and number of shares, and the warnings.
fn shared(resources: &str, node: &Node) -> (Vec<(u32, String, u32)>, Vec<String>) {
    let policy = timeslice(&format!(r#"{{"resources": {resources}}}"#)).unwrap();
    let (answer, warnings) = logged(|| policy.offer(node).unwrap());
    let parts = answer.parts.into_iter().map(|mut offer| {
        let line = offer.lines.remove(0);
        (offer.part, line.resource, line.count)
    });
    (parts.collect(), warnings)
}

#[test]
fn resources_share_devices_of_their_name_including_mig_instances() {
    let node = named().build().node;
    let both = r#"[{"name": "nvidia.com/gpu", "rename": "nvidia.com/gpu.shared", "replicas": 10},
        {"name": "nvidia.com/mig-1g.10gb", "replicas": 2}, {"name": "nvidia.com/mig-2g.20gb", "replicas": 3}]"#;
    let (parts, warnings) = shared(both, &node);
    let expected =
        [(0, SHARED.into(), 10), (1, SHARED.into(), 10), (3, SMALL.into(), 2), (4, SMALL.into(), 2)];
    let missing = "warning: resources[2].name: this node has no device of nvidia.com/mig-2g.20gb";
    assert_eq!((parts, warnings), (expected.to_vec(), vec![missing.to_owned()]));
    let policy = timeslice(&format!(r#"{{"resources": {both}}}"#)).unwrap();
    let answer = policy.offer(&node).unwrap();
    let half = Consumes::Slice(Slice { memory_mib: 5_000, compute_percent: 50 });
    assert_eq!(answer.parts[2].lines[0].consumes, half);
    // Parts that the daemon would not offer, such as mixed profiles with `migStrategy: single`, are not shared.
    let mut bare = node;
    bare.parts.iter_mut().for_each(|part| part.attributes.clear());
    let (parts, warnings) = shared(both, &bare);
    assert_eq!((parts, warnings.len()), (vec![], 3), "{warnings:?}");
}

#[test]
fn devices_of_a_resource_are_all_a_number_or_a_list() {
    let node = named().build().node;
    let cases: [(&str, &str, &[u32]); 8] = [
        (GPU, r#""all""#, &[0, 1]),
        (GPU, "1", &[0]),
        (GPU, "[1]", &[1]),
        (GPU, r#"["1", "GPU-0"]"#, &[0, 1]),
        (SMALL, r#"["2:1"]"#, &[4]),
        (SMALL, r#"["MIG-2-0"]"#, &[3]),
        (SMALL, "1", &[3]),
        (SMALL, r#"["2:0", "2:1"]"#, &[3, 4]),
    ];
    for (name, devices, expected) in cases {
        let entry = format!(r#"[{{"name": "{name}", "replicas": 2, "devices": {devices}}}]"#);
        let (parts, warnings) = shared(&entry, &node);
        let parts: Vec<u32> = parts.into_iter().map(|(part, ..)| part).collect();
        assert_eq!((parts.as_slice(), warnings), (expected, vec![]), "{entry}");
    }
}

#[test]
fn devices_that_do_not_exist_cause_warnings() {
    let node = named().build().node;
    let warned = |name: &str, devices: &str| {
        shared(&format!(r#"[{{"name": "{name}", "replicas": 2, "devices": {devices}}}]"#), &node).1
    };
    assert_eq!(
        warned(GPU, r#"[0, 7, "2:0"]"#),
        [
            "warning: resources[0].devices: 7 is not a device of nvidia.com/gpu on this node",
            "warning: resources[0].devices: 2:0 is not a device of nvidia.com/gpu on this node",
        ]
    );
    let few =
        "warning: resources[0].devices: 3 devices of nvidia.com/gpu are to be shared, but this node has 2";
    assert_eq!(warned(GPU, "3"), [few]);
    // The resource does not exist on this node: as with NVIDIA's plugin that is no error.
    let missing = "warning: resources[0].name: this node has no device of nvidia.com/mig-7g.80gb";
    assert_eq!(warned("nvidia.com/mig-7g.80gb", r#"["0:0"]"#), [missing]);
    // Before the first scan the node has none of any name.
    let empty = NodeBuilder::new().build().node;
    assert_eq!(shared(r#"[{"name": "a.b/c", "replicas": 2}]"#, &empty), (vec![], vec![]));
}

#[test]
fn gpus_in_mig_mode_that_a_parameter_leaves_out_cause_warnings() {
    let node = named().build().node;
    let warned = |json: &str, node: &Node| logged(|| timeslice(json).unwrap().offer(node)).1;
    assert_eq!(warned("{}", &node), Vec::<String>::new());
    let left_out =
        "warning: only[0]: all GPUs that match {index: 2} are in MIG mode, and this policy leaves those out";
    assert_eq!(warned(r#"{"only": [{"index": 2}]}"#, &node), [left_out]);
    let mut all = node;
    all.parts.iter_mut().filter(|part| part.parent.is_none()).for_each(|part| part.mig_enabled = true);
    let instead = "warning: all GPUs of this node are in MIG mode, and this policy leaves those out; \
                   `resources: [{name: nvidia.com/mig-1g.10gb, replicas: 4}]` shares their instances";
    assert_eq!(warned("{}", &all), [instead]);
    let (parts, warnings) = shared(r#"[{"name": "nvidia.com/mig-1g.10gb", "replicas": 4}]"#, &all);
    assert_eq!((parts.len(), warnings), (2, vec![]), "the remedy shares both instances");
}

#[test]
fn an_override_that_decides_on_no_gpu_causes_a_warning() {
    let node = NodeBuilder::new().gpus(2, "Tesla T4", 16_000).build().node;
    let json = r#"{"only": [{"index": 0}], "overrides": [{"index": 0, "replicas": 2}, {"index": 1, "replicas": 3},
        {"model": "Tesla*", "replicas": 5}]}"#;
    let expected = [
        "warning: overrides[1]: `only` or an earlier override decides on all GPUs that match {index: 1}",
        "warning: overrides[2]: `only` or an earlier override decides on all GPUs that match {model: Tesla*}",
    ];
    assert_eq!(logged(|| timeslice(json).unwrap().offer(&node)).1, expected);
}

#[test]
fn the_first_entry_that_shares_a_device_counts() {
    let node = named().build().node;
    let resources = r#"[{"name": "nvidia.com/gpu", "replicas": 2, "devices": [1]},
        {"name": "nvidia.com/gpu", "rename": "nvidia.com/gpu.shared", "replicas": 9}]"#;
    assert_eq!(shared(resources, &node).0, [(0, SHARED.into(), 9), (1, GPU.into(), 2)]);
}

#[test]
fn a_model_that_no_gpu_has_causes_a_warning_and_a_star_may_be_anywhere() {
    let node = NodeBuilder::new().gpus(1, "NVIDIA A100-SXM4-40GB", 40_960).build().node;
    let json = r#"{"only": [{"model": "*A100*"}, {"model": "*H100*"}],
        "overrides": [{"uuid": "GPU-9", "replicas": 2}]}"#;
    let (answer, warnings) = logged(|| timeslice(json).unwrap().offer(&node).unwrap());
    assert_eq!(answer.parts.len(), 1);
    let expected = [
        "warning: only[1]: no GPU of this node matches {model: *H100*}",
        "warning: overrides[0]: no GPU of this node matches {uuid: GPU-9}",
    ];
    assert_eq!(warnings, expected);
}

/// A GPU with two shares and a whole GPU, under the same resource.
fn partly_shared() -> berth_policy_sdk::testing::Built {
    let share = Consumes::Slice(Slice { memory_mib: 8_000, compute_percent: 50 });
    let node = NodeBuilder::new().gpus(2, "Tesla T4", 16_000);
    node.devices(0, GPU, 2, share).devices(1, GPU, 1, Consumes::Whole).build()
}

#[test]
fn more_than_one_share_is_denied_if_configured() {
    let node = partly_shared();
    let entry = r#""resources": [{"name": "nvidia.com/gpu", "replicas": 2}]"#;
    let admit = |json: String, devices: &[u32]| {
        timeslice(&json).unwrap().admit(&node.node, &node.admit_request(devices, &[]))
    };
    let refusing = || format!(r#"{{"failRequestsGreaterThanOne": true, {entry}}}"#);
    let reason = "a container may request at most 1 share of nvidia.com/gpu, and this one requests 2 \
                  (failRequestsGreaterThanOne)";
    assert_eq!(admit(refusing(), &[0, 1]), Some(Verdict::Deny(reason.into())));
    assert_eq!(admit(refusing(), &[1, 2]), Some(Verdict::Deny(reason.into())));
    assert_eq!(admit(refusing(), &[0]), None);
    assert_eq!(admit(refusing(), &[2]), None);
    assert_eq!(admit(format!("{{{entry}}}"), &[0, 1]), None);
    // Shares of another policy are not checked.
    assert_eq!(admit(r#"{"failRequestsGreaterThanOne": true}"#.into(), &[0, 1]), None);
    let own = r#"{"failRequestsGreaterThanOne": true, "resource": "nvidia.com/gpu"}"#;
    assert_eq!(admit(own.into(), &[0, 1]), Some(Verdict::Deny(reason.into())));
}

#[test]
fn whole_gpus_with_the_resource_of_shares_are_not_placed() {
    let node = partly_shared();
    let policy = timeslice(r#"{"resource": "nvidia.com/gpu"}"#).unwrap();
    let mut request = node.place_request(GPU, 1);
    assert!(policy.place(&node.node, &request).is_some());
    request.available = vec![2];
    assert_eq!(policy.place(&node.node, &request), None);
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let cases = [
        (r#"{"replicas": 0}"#, "replicas: 0 is out of range"),
        (r#"{"replicas": 129}"#, "write 1 to 128"),
        (r#"{"replicas": -1}"#, "expected u32"),
        (r#"{"replica": 2}"#, "unknown field `replica`"),
        (r#"{"resource": "shared"}"#, "resource: `shared`"),
        (
            r#"{"resource": "nvidia.com/mig-1g.10gb", "replicas": 2}"#,
            "resource: `nvidia.com/mig-1g.10gb` is a name of MIG instances, and it is for GPUs here; write \
             `resources: [{name: nvidia.com/mig-1g.10gb, replicas: 2}]` instead of it and `replicas`",
        ),
        (r#"{"only": [{"index": 0}, {}]}"#, "only[1]: selects no GPU"),
        (r#"{"only": [{"indx": 0}]}"#, "unknown field `indx`"),
        (r#"{"overrides": [{"index": 0}]}"#, "missing field `replicas`"),
        (r#"{"overrides": [{"replicas": 2}]}"#, "overrides[0]: selects no GPU"),
        (r#"{"overrides": [{"index": 1, "replicas": 200}]}"#, "overrides[0].replicas: 200"),
        (r#"{"failRequestsGreaterThanOne": "yes"}"#, "expected a boolean"),
        (r#"{"resources": []}"#, "resources: the list is empty"),
        (r#"{"resources": [{"name": "a.b/c"}]}"#, "missing field `replicas`"),
        (r#"{"resources": [{"name": "a.b/c", "replicas": 0}]}"#, "resources[0].replicas: 0 is out"),
        (r#"{"resources": [{"name": "gpu", "replicas": 2}]}"#, "resources[0].name: `gpu`"),
        (r#"{"resources": [{"name": "a.b/c", "replicas": 2, "rename": "d"}]}"#, "resources[0].rename: `d`"),
        (
            r#"{"resources": [{"name": "a.b/c", "replicas": 2}], "replicas": 2}"#,
            "resources: replaces `replicas`",
        ),
        (
            r#"{"resources": [{"name": "a.b/c", "replicas": 2, "devices": "some"}]}"#,
            "expected `all`, a number",
        ),
        (r#"{"resources": [{"name": "a.b/c", "replicas": 2, "devices": 0}]}"#, "at least 1"),
        (r#"{"resources": [{"name": "a.b/c", "replicas": 2, "devices": []}]}"#, "or a list of devices"),
        (
            r#"{"resources": [{"name": "a.b/c", "replicas": 2, "devices": ["x"]}]}"#,
            "expected the index of a GPU",
        ),
        (r#"{"resources": [{"name": "a.b/c", "replicas": 2, "devices": ["0:x"]}]}"#, "string \"0:x\""),
    ];
    for (json, expected) in cases {
        let error = timeslice(json).unwrap_err();
        assert!(error.contains(expected), "{json}: {error}");
    }
}

#[test]
fn the_schema_names_exactly_the_parameters() {
    let example = r#"{"replicas": 4, "resource": "nvidia.com/gpu.shared", "overrides": [],
        "resources": [{"name": "a.b/c", "rename": "a.b/d", "replicas": 2, "devices": "all"}],
        "failRequestsGreaterThanOne": true, "only": null}"#;
    timeslice(example).unwrap();
    assert_schema_matches(&Timeslice::describe().parameters_schema, example);
}
