use super::*;
use berth_policy_sdk::testing::NodeBuilder;
use berth_policy_sdk::{Health, parse};

fn offered(policy: &Exclusive, node: &Node) -> Vec<(u32, String, u32)> {
    let answer = policy.offer(node).expect("an offer");
    let lines = answer.parts.into_iter().flat_map(|offer| {
        assert!(offer.lines.iter().all(|line| line.consumes == Consumes::Whole));
        let part = offer.part;
        offer.lines.into_iter().map(move |line| (part, line.resource, line.count))
    });
    lines.collect()
}

fn exclusive(json: &str) -> Result<Exclusive, String> {
    parse(json).and_then(Exclusive::new)
}

#[test]
fn every_gpu_is_one_device() {
    let node = NodeBuilder::new().gpus(2, "NVIDIA H100", 81_920).build().node;
    let one = |part| (part, "nvidia.com/gpu".to_owned(), 1);
    assert_eq!(offered(&exclusive("{}").unwrap(), &node), [one(0), one(1)]);
}

#[test]
fn the_resource_can_be_named() {
    let node = NodeBuilder::new().gpus(1, "NVIDIA H100", 81_920).build().node;
    let policy = exclusive(r#"{"resource": "nvidia.com/whole"}"#).unwrap();
    assert_eq!(offered(&policy, &node), [(0, "nvidia.com/whole".to_owned(), 1)]);
}

#[test]
fn mig_instances_go_by_their_profile_and_their_gpu_is_not_offered() {
    let node = NodeBuilder::new()
        .gpus(2, "NVIDIA H100", 81_920)
        .mig(0, "1g.10gb", 2, 9_728)
        .mig(0, "1g.10gb+me", 1, 9_728)
        .part(4, |part| part.health = Health::Unhealthy)
        .build()
        .node;
    let expected = [
        (1, "nvidia.com/gpu".to_owned(), 1),
        (2, "nvidia.com/mig-1g.10gb".to_owned(), 1),
        (3, "nvidia.com/mig-1g.10gb".to_owned(), 1),
        // The daemon handles health: an unhealthy part keeps its offer.
        (4, "nvidia.com/mig-1g.10gb.me".to_owned(), 1),
    ];
    assert_eq!(offered(&exclusive("{}").unwrap(), &node), expected);
}

#[test]
fn an_instance_without_a_known_profile_is_passed_on() {
    let node = NodeBuilder::new()
        .gpus(1, "NVIDIA H100", 81_920)
        .mig(0, "1g.10gb", 1, 9_728)
        .part(1, |part| part.attributes.clear())
        .build()
        .node;
    assert_eq!(offered(&exclusive("{}").unwrap(), &node), []);
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let error = exclusive(r#"{"resources": "nvidia.com/gpu"}"#).unwrap_err();
    assert!(error.contains("`resources`") && error.contains("`resource`"), "{error}");
    for wrong in ["", "gpu", "/gpu", "nvidia.com/", "nvidia.com/a b", "nvidia.com/a/b"] {
        let error = exclusive(&format!(r#"{{"resource": "{wrong}"}}"#)).unwrap_err();
        assert!(error.starts_with("resource: "), "{error}");
    }
}

#[test]
fn the_schema_names_exactly_the_parameters() {
    let schema = Exclusive::describe().parameters_schema;
    berth_policy_sdk::testing::assert_schema_matches(&schema, r#"{"resource": "a.b/c"}"#);
    exclusive(r#"{"resource": "a.b/c"}"#).unwrap();
}
