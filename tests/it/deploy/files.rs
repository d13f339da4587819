//! The files of deploy/: rights in the cluster, and the policies that limit the daemon to its own node.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// Who the daemon is to the API server, by the plain manifests.
const ACCOUNT: &str = "system:serviceaccount:berth:berth";
/// Where the API server says which node's pod a token was made for (Kubernetes 1.30).
const NODE_CLAIM: &str = "'authentication.kubernetes.io/node-name'";

pub(crate) fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)).unwrap()
}

/// The documents of a file.
pub(crate) fn documents(path: &str) -> Vec<Value> {
    let text = read(path);
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
    documents.into_iter().filter(|d| !d.is_null()).collect()
}

/// Those of one kind.
pub(crate) fn of_kind(path: &str, kind: &str) -> Vec<Value> {
    documents(path).into_iter().filter(|document| document["kind"] == kind).collect()
}

pub(crate) fn name(document: &Value) -> &str {
    document["metadata"]["name"].as_str().unwrap()
}

/// The only document of a kind with that name.
fn one(path: &str, kind: &str, wanted: &str) -> Value {
    let mut found: Vec<Value> = of_kind(path, kind).into_iter().filter(|d| name(d) == wanted).collect();
    assert_eq!(found.len(), 1, "{kind} {wanted} in {path}");
    found.remove(0)
}

/// The roles by name, each with its rights as `VERB GROUP/RESOURCE`.
fn roles(path: &str) -> Vec<(String, BTreeSet<String>)> {
    let roles = of_kind(path, "ClusterRole").into_iter().map(|role| {
        assert_eq!(role["apiVersion"], "rbac.authorization.k8s.io/v1");
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
    let wanted: [(&str, &[&str]); 10] = [
        ("berth", &["get /nodes", "list /pods", "watch /pods"]),
        (
            "berth-events",
            &["create events.k8s.io/events", "patch events.k8s.io/events", "patch /nodes/status"],
        ),
        ("berth-evict", &["create /pods/eviction"]),
        ("berth-delete", &["delete /pods"]),
        ("berth-label", &["patch /nodes"]),
        (
            "berth-dra",
            &[
                "list resource.k8s.io/resourceslices",
                "watch resource.k8s.io/resourceslices",
                "create resource.k8s.io/resourceslices",
                "update resource.k8s.io/resourceslices",
                "delete resource.k8s.io/resourceslices",
                "get resource.k8s.io/resourceclaims",
                "list resource.k8s.io/resourceclaims",
                "list resource.k8s.io/devicetaintrules",
                "watch resource.k8s.io/devicetaintrules",
            ],
        ),
        (
            "berth-fleet",
            &[
                "get fleet.berth.dev/gpunodes",
                "list fleet.berth.dev/gpunodes",
                "watch fleet.berth.dev/gpunodes",
                "get fleet.berth.dev/gpumaintenances",
                "list fleet.berth.dev/gpumaintenances",
                "watch fleet.berth.dev/gpumaintenances",
                "create fleet.berth.dev/gpunodes",
                "patch fleet.berth.dev/gpunodes/status",
                "patch fleet.berth.dev/gpumaintenances/status",
                "get apiextensions.k8s.io/customresourcedefinitions",
            ],
        ),
        (
            "berth-controller",
            &[
                "list /nodes",
                "watch /nodes",
                "list fleet.berth.dev/gpunodes",
                "watch fleet.berth.dev/gpunodes",
                "list fleet.berth.dev/sharingpolicies",
                "watch fleet.berth.dev/sharingpolicies",
                "patch fleet.berth.dev/gpunodes",
                "patch fleet.berth.dev/sharingpolicies/status",
            ],
        ),
        (
            "berth-controller-lease",
            &[
                "create coordination.k8s.io/leases",
                "get coordination.k8s.io/leases",
                "update coordination.k8s.io/leases",
            ],
        ),
        (
            "berth-review",
            &[
                "create authentication.k8s.io/tokenreviews",
                "create authorization.k8s.io/subjectaccessreviews",
            ],
        ),
    ];
    let wanted =
        wanted.map(|(name, rights)| (name.to_owned(), rights.iter().map(|r| (*r).to_owned()).collect()));
    assert_eq!(roles("deploy/cluster-role.yaml"), wanted);
    assert_eq!(documents("deploy/cluster-role.yaml").len(), 10, "it holds roles and nothing else");
}

#[test]
fn every_role_is_known_to_readers_to_the_daemon_and_to_the_end_to_end_test() {
    let sources: String =
        ["client", "condition", "events", "evict", "reviews", "labels", "slices", "fleet/gpu_node"]
            .map(|f| read(&format!("src/cluster/{f}.rs")))
            .into_iter()
            .chain(["controller", "lease"].map(|f| read(&format!("src/fleet/{f}.rs"))))
            .collect();
    let (page, test) = (read("docs/cluster.md"), read("tests/e2e/controlplane.py"));
    for (name, _) in roles("deploy/cluster-role.yaml") {
        assert!(sources.contains(&format!("ClusterRole {name}")), "no error of the daemon names {name}");
        assert!(page.contains(&format!("| `{name}` |")), "docs/cluster.md has no row for {name}");
        assert!(test.contains(&format!("\"{name}\"")), "the end-to-end test does not bind {name}");
    }
}

#[test]
fn the_manifests_bind_the_first_role_and_the_others_only_if_configured() {
    let known = roles("deploy/cluster-role.yaml");
    assert_eq!(roles("deploy/manifests/berth.yaml"), known[..1]);
    let mut all = roles("deploy/manifests/rights.yaml");
    all.sort_by_key(|(name, _)| known.iter().position(|(known, _)| known == name));
    let of_fleet = ["berth-fleet", "berth-controller", "berth-controller-lease"];
    let in_rights = |(name, _): &&(String, _)| name != "berth-dra" && !of_fleet.contains(&name.as_str());
    assert_eq!(all, known.iter().filter(in_rights).cloned().collect::<Vec<_>>());
    let dra = known.iter().filter(|(name, _)| ["berth", "berth-dra"].contains(&name.as_str()));
    assert_eq!(roles("deploy/manifests/dra.yaml"), dra.cloned().collect::<Vec<_>>());
    let fleet = known.iter().filter(|(name, _)| name == "berth" || of_fleet.contains(&name.as_str()));
    let mut in_fleet = roles("deploy/manifests/fleet.yaml");
    in_fleet.sort_by_key(|(name, _)| known.iter().position(|(known, _)| known == name));
    assert_eq!(in_fleet, fleet.cloned().collect::<Vec<_>>());
    let review = known.iter().filter(|(name, _)| ["berth", "berth-review"].contains(&name.as_str()));
    assert_eq!(roles("deploy/manifests/admin-tls.yaml"), review.cloned().collect::<Vec<_>>());
    for path in ["berth.yaml", "rights.yaml", "dra.yaml", "fleet.yaml", "admin-tls.yaml"]
        .map(|name| format!("deploy/manifests/{name}"))
    {
        let path = path.as_str();
        let mut bindings = of_kind(path, "ClusterRoleBinding");
        bindings.extend(of_kind(path, "RoleBinding"));
        assert_eq!(bindings.len(), roles(path).len());
        for binding in bindings {
            assert_eq!(binding["roleRef"]["name"], name(&binding));
            let of_controller = name(&binding).starts_with("berth-controller");
            let account = if of_controller { "berth-controller" } else { "berth" };
            let account = json!([{"kind": "ServiceAccount", "name": account, "namespace": "berth"}]);
            assert_eq!(binding["subjects"], account);
        }
    }
    for path in ["deploy/manifests/profiles.yaml", "deploy/manifests/monitoring.yaml"] {
        assert!(of_kind(path, "ClusterRole").is_empty() && of_kind(path, "ClusterRoleBinding").is_empty());
    }
}

#[test]
fn every_right_to_change_something_ends_at_the_own_node() {
    const RIGHTS: &str = "deploy/manifests/rights.yaml";
    let slices = &one("deploy/manifests/dra.yaml", "ValidatingAdmissionPolicy", "berth-dra-own-node")["spec"];
    let rules = &slices["matchConstraints"]["resourceRules"][0];
    assert_eq!(
        (&rules["resources"], &rules["operations"]),
        (&json!(["resourceslices"]), &json!(["CREATE", "UPDATE", "DELETE"]))
    );
    let first = slices["validations"][0]["expression"].as_str().unwrap();
    assert!(
        first.starts_with("variables.node != '' &&") && first.contains("s.spec.nodeName == variables.node"),
        "{first}"
    );
    let wanted = [
        ("berth-label-own-node", "nodes", "UPDATE", "object.metadata.name == variables.node"),
        ("berth-condition-own-node", "nodes/status", "UPDATE", "object.metadata.name == variables.node"),
        ("berth-events-own-node", "events", "CREATE UPDATE", "e.reportingInstance == variables.node"),
        ("berth-delete-own-node", "pods", "DELETE", "oldObject.spec.nodeName == variables.node"),
        ("berth-evict-own-node", "pods/eviction", "CREATE", "params.spec.nodeName == variables.node"),
    ];
    let policies: BTreeSet<String> =
        of_kind(RIGHTS, "ValidatingAdmissionPolicy").iter().map(|policy| name(policy).to_owned()).collect();
    assert_eq!(policies, wanted.iter().map(|(name, ..)| (*name).to_owned()).collect());
    for (name, resource, operations, expression) in wanted {
        let spec = &one(RIGHTS, "ValidatingAdmissionPolicy", name)["spec"];
        assert_eq!(spec["failurePolicy"], "Fail");
        let group = if resource == "events" { "events.k8s.io" } else { "" };
        let operations: Vec<&str> = operations.split(' ').collect();
        let rules = json!([{"apiGroups": [group], "apiVersions": ["*"], "resources": [resource], "operations": operations}]);
        assert_eq!(spec["matchConstraints"]["resourceRules"], rules);
        let who = format!("request.userInfo.username == '{ACCOUNT}'");
        assert_eq!(spec["matchConditions"], json!([{"name": "is-berth", "expression": who}]));
        let node = spec["variables"][0]["expression"].as_str().unwrap();
        assert!(node.contains(NODE_CLAIM), "{node}");
        let first = spec["validations"][0]["expression"].as_str().unwrap();
        assert!(first.contains(expression) && first.starts_with("variables.node != '' &&"), "{first}");
        let binding = &one(RIGHTS, "ValidatingAdmissionPolicyBinding", name)["spec"];
        assert_eq!((&binding["policyName"], &binding["validationActions"]), (&json!(name), &json!(["Deny"])));
        assert_eq!(binding["matchResources"], Value::Null, "{name} is to hold in every namespace");
    }
    // An Eviction does not have its pod's node: the pods of its namespace are evaluated.
    let evict = one(RIGHTS, "ValidatingAdmissionPolicy", "berth-evict-own-node");
    assert_eq!(evict["spec"]["paramKind"], json!({"apiVersion": "v1", "kind": "Pod"}));
    let binding = one(RIGHTS, "ValidatingAdmissionPolicyBinding", "berth-evict-own-node");
    assert_eq!(binding["spec"]["paramRef"], json!({"selector": {}, "parameterNotFoundAction": "Deny"}));
}

/// An owner that is not there has the node collected as garbage; the rest of the status sends pods where it likes.
#[test]
fn the_right_to_events_is_limited_to_a_condition_and_to_events_by_berth() {
    let expressions = |name| {
        let policy = one("deploy/manifests/rights.yaml", "ValidatingAdmissionPolicy", name);
        let validations = policy["spec"]["validations"].as_array().unwrap().clone();
        validations.iter().map(|v| v["expression"].as_str().unwrap().to_owned()).collect::<String>()
    };
    let of_node = expressions("berth-condition-own-node");
    let metadata =
        ["labels", "annotations", "finalizers", "ownerReferences"].map(|field| ("object.metadata", field));
    // `NodeStatus` of Kubernetes 1.36 but for `conditions`; what a newer one has besides deployed.py finds.
    let status = "capacity allocatable phase addresses daemonEndpoints nodeInfo images volumesInUse volumesAttached config \
                  runtimeHandlers features declaredFeatures";
    let status = status.split_whitespace().map(|field| ("variables.now", field));
    for (now, field) in metadata.into_iter().chain(status) {
        let before = now.replace("now", "before").replace("object", "oldObject");
        for word in [
            format!("has({now}.{field}) == has({before}.{field})"),
            format!("(!has({now}.{field}) || {now}.{field} == {before}.{field})"),
        ] {
            assert!(of_node.contains(&word), "it does not say {word}");
        }
    }
    let of_events = expressions("berth-events-own-node");
    assert!(read("src/cluster/events.rs").contains("const CONTROLLER: &str = \"berth\";"));
    for word in ["e.reportingController == 'berth'", "e.regarding.name == variables.node"] {
        assert!(of_events.contains(word), "it does not say {word}");
    }
}

/// A right to patch a node includes its taints, and so the placement of pods: RBAC has no fields.
#[test]
fn the_right_to_label_is_one_to_labels_of_gpus() {
    let policy = one("deploy/manifests/rights.yaml", "ValidatingAdmissionPolicy", "berth-label-own-node");
    let validations = policy["spec"]["validations"].as_array().unwrap();
    let expressions: Vec<&str> = validations.iter().map(|v| v["expression"].as_str().unwrap()).collect();
    for word in ["object.spec == oldObject.spec", "metadata.annotations", "finalizers", "ownerReferences"] {
        assert!(expressions.iter().any(|e| e.contains(word)), "it does not hold {word}");
    }
    let prefixes = expressions.iter().flat_map(|e| e.split("startsWith('").skip(1));
    let prefixes: BTreeSet<&str> = prefixes.map(|rest| rest.split_once('\'').unwrap().0).collect();
    assert_eq!(prefixes, BTreeSet::from(["nvidia.com/"]));
}

#[test]
fn pods_that_bypass_the_plugin_cause_warnings_and_the_daemons_pod_does_not() {
    const MANIFEST: &str = "deploy/manifests/berth.yaml";
    let policy = one(MANIFEST, "ValidatingAdmissionPolicy", "berth-bypass");
    let text = policy.to_string();
    for word in [
        "NVIDIA_VISIBLE_DEVICES",
        "privileged",
        "envFrom",
        "nvidia-container-devices",
        "initContainers",
        "ephemeralContainers",
        "CronJob",
    ] {
        assert!(text.contains(word), "it does not look at {word}");
    }
    // What the daemon itself takes for no bypass: see `PodBypass::shows_gpus`.
    assert!(text.contains("['', 'void', 'none']"));
    assert_eq!(policy["spec"]["failurePolicy"], "Ignore");
    let binding = &one(MANIFEST, "ValidatingAdmissionPolicyBinding", "berth-bypass")["spec"];
    assert_eq!(binding["validationActions"], json!(["Warn"]));
    let rule = &binding["matchResources"]["namespaceSelector"]["matchExpressions"][0];
    assert_eq!((&rule["key"], &rule["operator"]), (&json!("kubernetes.io/metadata.name"), &json!("NotIn")));
    let exempt = rule["values"].as_array().unwrap();
    assert!(exempt.contains(&json!("kube-system")) && exempt.contains(&json!("berth")), "{exempt:?}");
}
