//! What users are told to give the daemon in a cluster.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// The roles by name, each with its rights as `VERB GROUP/RESOURCE`.
fn roles() -> Vec<(String, BTreeSet<String>)> {
    let text = read("deploy/cluster-role.yaml");
    let documents = serde_norway::Deserializer::from_str(&text);
    let roles = documents.map(|document| {
        let role = Value::deserialize(document).unwrap();
        assert_eq!(
            (&role["kind"], &role["apiVersion"]),
            (&"ClusterRole".into(), &"rbac.authorization.k8s.io/v1".into())
        );
        let list = |rule: &Value, key: &str| -> Vec<String> {
            rule[key].as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
        };
        let mut rights = BTreeSet::new();
        for rule in role["rules"].as_array().unwrap() {
            for verb in list(rule, "verbs") {
                for group in list(rule, "apiGroups") {
                    rights.extend(
                        list(rule, "resources").iter().map(|resource| format!("{verb} {group}/{resource}")),
                    );
                }
            }
        }
        (role["metadata"]["name"].as_str().unwrap().to_owned(), rights)
    });
    roles.collect()
}

#[test]
fn each_role_gives_one_kind_of_right_and_no_more() {
    let wanted: [(&str, &[&str]); 4] = [
        ("berth", &["get /nodes", "list /pods", "watch /pods"]),
        ("berth-tell", &["create events.k8s.io/events", "patch events.k8s.io/events", "patch /nodes/status"]),
        ("berth-evict", &["create /pods/eviction"]),
        ("berth-delete", &["delete /pods"]),
    ];
    let wanted =
        wanted.map(|(name, rights)| (name.to_owned(), rights.iter().map(|r| (*r).to_owned()).collect()));
    assert_eq!(roles(), wanted);
}

#[test]
fn every_role_is_known_to_readers_to_the_daemon_and_to_the_end_to_end_test() {
    let sources: String =
        ["client", "condition", "events", "evict"].map(|f| read(&format!("src/cluster/{f}.rs"))).concat();
    let (readme, test) = (read("README.md"), read("tests/e2e/controlplane.py"));
    for (name, _) in roles() {
        assert!(sources.contains(&format!("ClusterRole {name}")), "no error of the daemon names {name}");
        assert!(readme.contains(&format!("| `{name}` |")), "README.md says nothing of {name}");
        assert!(test.contains(&format!("\"{name}\"")), "the end-to-end test does not bind {name}");
    }
}
