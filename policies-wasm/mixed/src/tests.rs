use super::*;
use berth_policy_sdk::testing::{NodeBuilder, assert_schema_matches};
use berth_policy_sdk::{DrainState, Health, parse};

const WHOLE: &str = "nvidia.com/gpu";
const SHARED: &str = "nvidia.com/gpu.shared";
const SHARE: Consumes = Consumes::Slice(Slice { memory_mib: 4_000, compute_percent: 25 });

fn mixed(json: &str) -> Result<Mixed, String> {
    parse(json).and_then(Mixed::new)
}

/// One letter per GPU: (W)hole, (S)hared, (B)oth.
fn letters(answer: &OfferAnswer) -> String {
    let letter = |offer: &PartOffer| {
        let names: Vec<_> = offer.lines.iter().map(|line| line.resource.as_str()).collect();
        match names[..] {
            [WHOLE] => 'W',
            [SHARED] => 'S',
            [WHOLE, SHARED] => 'B',
            _ => panic!("{names:?}"),
        }
    };
    answer.parts.iter().map(letter).collect()
}

fn listed(json: &str, node: &Node) -> (String, Option<u32>) {
    let answer = mixed(json).unwrap().offer(node).expect("an offer");
    (letters(&answer), answer.again_after_seconds)
}

/// A node with one GPU per letter, as in `letters`; lower case: one of its devices is held.
fn node_of(letters: &str) -> NodeBuilder {
    let count = u32::try_from(letters.len()).unwrap();
    let mut node = NodeBuilder::new().gpus(count, "Tesla T4", 16_000);
    let (mut devices, mut held) = (0, Vec::new());
    for (part, letter) in (0..).zip(letters.chars()) {
        if letter.is_lowercase() {
            held.push(devices);
        }
        (node, devices) = match letter.to_ascii_uppercase() {
            'W' => (node.devices(part, WHOLE, 1, Consumes::Whole), devices + 1),
            'S' => (node.devices(part, SHARED, 4, SHARE), devices + 4),
            'B' => {
                let node = node.devices(part, WHOLE, 1, Consumes::Whole);
                (node.devices(part, SHARED, 4, SHARE), devices + 5)
            }
            '-' => (node, devices),
            other => panic!("{other}"),
        };
    }
    held.into_iter().fold(node, |node, device| node.hold(&[device]))
}

#[test]
fn both_lists_each_gpu_whole_and_as_shares() {
    let node = node_of("--").build().node;
    let answer = mixed("{}").unwrap().offer(&node).unwrap();
    assert_eq!(letters(&answer), "BB");
    let lines = &answer.parts[1].lines;
    assert_eq!((lines[0].count, lines[0].consumes), (1, Consumes::Whole));
    assert_eq!((lines[1].count, lines[1].consumes), (4, SHARE));
}

#[test]
fn both_reserves_by_position_and_whole_takes_precedence() {
    let node = node_of("----").build().node;
    let both = |whole: u32, shared: u32| {
        let json = format!(r#"{{"reserveWhole": {whole}, "reserveShared": {shared}}}"#);
        listed(&json, &node).0
    };
    assert_eq!(both(0, 0), "BBBB");
    assert_eq!(both(1, 2), "WBSS");
    assert_eq!(both(3, 3), "WWWS");
    assert_eq!(both(9, 9), "WWWW");
    assert_eq!(both(0, 9), "SSSS");
}

#[test]
fn latched_starts_with_the_reserves_and_all_other_gpus_whole() {
    let node = node_of("----").build().node;
    assert_eq!(listed(r#"{"advertise": "latched"}"#, &node), ("WWWS".into(), None));
    let json = r#"{"advertise": "latched", "reserveShared": 9}"#;
    assert_eq!(listed(json, &node), ("WSSS".into(), None));
    let one = node_of("-").build().node;
    assert_eq!(listed(r#"{"advertise": "latched"}"#, &one), ("W".into(), None));
}

#[test]
fn latched_keeps_modes_while_none_runs_short() {
    let json = r#"{"advertise": "latched"}"#;
    for steady in ["SWWW", "WSsS", "wWSs", "WS", "ws"] {
        let node = node_of(steady).build().node;
        assert_eq!(listed(json, &node), (steady.to_uppercase(), None), "{steady}");
    }
}

#[test]
fn latched_changes_the_mode_of_a_settled_gpu_if_the_other_mode_runs_short() {
    let json = r#"{"advertise": "latched"}"#;
    // All whole GPUs are held: the first idle shared one changes, and one with a free share remains.
    assert_eq!(listed(json, &node_of("wSSs").build().node), ("WWSS".into(), None));
    // All shares are held: the last idle whole GPU changes.
    let full = node_of("WWs").hold(&[3, 4, 5]).build().node;
    assert_eq!(listed(json, &full), ("WSS".into(), None));
    // A share of the last GPU is free: no mode is short.
    let room = node_of("WWs").hold(&[3, 4]).build().node;
    assert_eq!(listed(json, &room), ("WWS".into(), None));
}

#[test]
fn latched_never_reduces_one_reserve_to_fill_the_other() {
    let json = r#"{"advertise": "latched"}"#;
    assert_eq!(listed(json, &node_of("wS").build().node), ("WS".into(), None));
    let full = node_of("Ws").hold(&[2, 3, 4]).build().node;
    assert_eq!(listed(json, &full), ("WS".into(), None));
    let json = r#"{"advertise": "latched", "reserveShared": 0}"#;
    assert_eq!(listed(json, &node_of("wS").build().node), ("WW".into(), None));
}

#[test]
fn latched_waits_until_a_gpu_has_settled_and_returns_the_time_left() {
    let json = r#"{"advertise": "latched", "settleSeconds": 30}"#;
    let idle = |first: u32, second: u32| {
        let node = node_of("wSSS");
        let node = node.part(1, |part| part.idle_seconds = first);
        let node = node.part(2, |part| part.idle_seconds = second);
        node.part(3, |part| part.idle_seconds = 0).build().node
    };
    assert_eq!(listed(json, &idle(12, 3)), ("WSSS".into(), Some(18)));
    assert_eq!(listed(json, &idle(3, 29)), ("WSSS".into(), Some(1)));
    // A GPU that has settled is preferred to one with a lower index that has not.
    assert_eq!(listed(json, &idle(12, 30)), ("WSWS".into(), None));
    let json = r#"{"advertise": "latched", "settleSeconds": 30, "reserveWhole": 2}"#;
    assert_eq!(listed(json, &idle(12, 30)), ("WSWS".into(), Some(18)));
}

#[test]
fn latched_does_not_change_gpus_that_cannot_be_granted() {
    let json = r#"{"advertise": "latched"}"#;
    let cordoned = node_of("wSS").part(1, |part| part.drain = DrainState::Cordoned);
    assert_eq!(listed(json, &cordoned.build().node), ("WSS".into(), None));
    let broken = node_of("WWS").part(2, |part| part.health = Health::Unhealthy);
    assert_eq!(listed(json, &broken.build().node), ("WSS".into(), None));
}

#[test]
fn latched_follows_held_devices_after_a_change_of_policy() {
    let json = r#"{"advertise": "latched", "reserveWhole": 4, "reserveShared": 4}"#;
    // From `both`: device 1 is a share of GPU 0, device 5 is GPU 1 whole.
    let node = node_of("BBBB").hold(&[1]).hold(&[5]).build().node;
    assert_eq!(listed(json, &node).0, "SWWW");
}

#[test]
fn each_change_of_mode_is_final_until_demand_changes() {
    // From any state, a second call on the listed answer gives the same answer.
    let json = r#"{"advertise": "latched", "reserveWhole": 2, "reserveShared": 2}"#;
    for number in 0..7_u32.pow(5) {
        let states = ['W', 'w', 'S', 's', 'B', 'b', '-'];
        let digit = |n: u32| states[usize::try_from(number / 7_u32.pow(n) % 7).unwrap()];
        let before: String = (0..5).map(digit).collect();
        let (after, _) = listed(json, &node_of(&before).build().node);
        let held = |(old, new): (char, char)| {
            if old.is_lowercase() { new.to_ascii_lowercase() } else { new }
        };
        let next: String = before.chars().zip(after.chars()).map(held).collect();
        assert_eq!(listed(json, &node_of(&next).build().node).0, after, "{before}");
        for (old, new) in before.chars().zip(after.chars()) {
            let kept = matches!((old, new), ('w' | 'b', 'W') | ('s', 'S'));
            assert!(!old.is_lowercase() || kept, "{before} -> {after}: changed while held");
        }
    }
}

#[test]
fn mig_is_passed_on() {
    let node = NodeBuilder::new().gpus(2, "NVIDIA H100", 80_000).mig(0, "1g.10gb", 2, 10_000).build().node;
    for json in ["{}", r#"{"advertise": "latched"}"#] {
        let answer = mixed(json).unwrap().offer(&node).unwrap();
        assert_eq!(answer.parts.iter().map(|p| p.part).collect::<Vec<_>>(), [1]);
    }
}

#[test]
fn shares_are_spread_and_whole_gpus_left_to_the_baseline() {
    let built = node_of("BBB").hold(&[1]).build();
    let policy = mixed("{}").unwrap();
    let placed = policy.place(&built.node, &built.place_request(SHARED, 3)).unwrap();
    assert_eq!(placed.devices, [6, 11, 2]);
    assert_eq!(policy.place(&built.node, &built.place_request(WHOLE, 1)), None);
}

#[test]
fn wrong_parameters_are_refused_by_name() {
    let cases = [
        (r#"{"advertise": "all"}"#, "expected `both` or `latched`"),
        (r#"{"replicas": 0}"#, "replicas: 0 is out of range; write 1 to 128"),
        (r#"{"settleSeconds": 86401}"#, "settleSeconds: 86401"),
        (r#"{"reserveWhole": -1}"#, "expected u32"),
        (r#"{"reserve": 1}"#, "unknown field `reserve`"),
        (r#"{"resource": "x"}"#, "resource: `x`"),
        (r#"{"sharedResource": "x"}"#, "sharedResource: `x`"),
        (r#"{"sharedResource": "nvidia.com/gpu"}"#, "shares need another one"),
    ];
    for (json, expected) in cases {
        let error = mixed(json).unwrap_err();
        assert!(error.contains(expected), "{json}: {error}");
    }
}

#[test]
fn the_schema_names_exactly_the_parameters() {
    let example = r#"{"advertise": "latched", "replicas": 2, "resource": "a.b/c",
        "sharedResource": "a.b/d", "reserveWhole": 0, "reserveShared": 0, "settleSeconds": 1}"#;
    mixed(example).unwrap();
    assert_schema_matches(&Mixed::describe().parameters_schema, example);
}
