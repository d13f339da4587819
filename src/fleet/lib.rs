//! The objects of the API group `fleet.berth.dev`, and the controller that rolls out stacks of policies.
//!
//! A daemon creates the [`GpuNode`] of its node and writes its status. People and remediation tools create a
//! [`GpuMaintenance`] to take GPUs out; the daemon of its node carries it out.
//! The CustomResourceDefinitions in `deploy/helm/berth/files/crds` are generated from these types ([`definitions`]).

pub mod controller;
pub mod gpu_node;
mod lease;
pub mod maintenance;
pub mod plan;
mod resolver;
pub mod revision;
pub mod sharing_policy;

use gpu_node::GpuNode;
use kube::CustomResourceExt;
use maintenance::GpuMaintenance;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};
use sharing_policy::SharingPolicy;

/// The API group.
pub const GROUP: &str = "fleet.berth.dev";
/// The field manager with which a daemon writes (server-side apply).
pub const FIELD_MANAGER: &str = "berth";
/// The field manager of the controller.
pub const CONTROLLER: &str = "berth-controller";

/// The CustomResourceDefinitions of all kinds.
#[must_use]
pub fn definitions() -> [Value; 3] {
    [GpuNode::crd(), SharingPolicy::crd(), GpuMaintenance::crd()].map(|definition| {
        let mut definition = json!(definition);
        tidy(&mut definition);
        let reader = match definition["spec"]["names"]["kind"].as_str() {
            Some("GPUMaintenance") => "the daemon of the node",
            Some("SharingPolicy") => "the controller",
            _ => return definition,
        };
        let version = &mut definition["spec"]["versions"][0];
        version["schema"]["openAPIV3Schema"]["properties"]["status"]["default"] = not_seen(reader);
        definition
    })
}

/// The status of an object that its reader has not seen yet. Without it, tools that follow kstatus would take a new object for one that
/// is carried out.
fn not_seen(reader: &str) -> Value {
    json!({"conditions": [{
        "type": "Reconciling",
        "status": "True",
        "reason": "Pending",
        "message": format!("{reader} has not seen the object yet"),
        "lastTransitionTime": "1970-01-01T00:00:00Z",
    }]})
}

/// Changes a generated schema. The API server warns of the format `uint32`, so it becomes `int64`. `nullable` is removed, so that the
/// rules need not handle null beside a field that is absent.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            fields.remove("nullable");
            if fields.get("format").is_some_and(|format| format == "uint32") {
                fields.insert("format".into(), "int64".into());
                fields.entry("minimum").or_insert_with(|| 0.into());
            }
            fields.values_mut().for_each(tidy);
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

/// The schema of `conditions`, as that of `metav1.Condition` in Kubernetes.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 8,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {"type": "string", "maxLength": 316},
                "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
                "observedGeneration": {"type": "integer", "format": "int64", "minimum": 0},
                "lastTransitionTime": {"type": "string", "format": "date-time"},
                "reason": {"type": "string", "minLength": 1, "maxLength": 1024},
                "message": {"type": "string", "maxLength": 32768}
            }
        }
    })
}

/// The schema of a label selector, as that of `metav1.LabelSelector` in Kubernetes.
fn label_selector(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "properties": {
            "matchLabels": {"type": "object", "additionalProperties": {"type": "string"}},
            "matchExpressions": {
                "type": "array",
                "x-kubernetes-list-type": "atomic",
                "items": {
                    "type": "object",
                    "required": ["key", "operator"],
                    "properties": {
                        "key": {"type": "string", "minLength": 1, "maxLength": 317},
                        "operator": {"type": "string", "enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
                        "values": {
                            "type": "array",
                            "maxItems": 100,
                            "x-kubernetes-list-type": "atomic",
                            "items": {"type": "string", "maxLength": 63}
                        }
                    }
                }
            }
        }
    })
}

/// The schema of a JSON object with any fields.
fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

/// The schema of a time.
fn time(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time"})
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// `UPDATE_EXPECT=1` writes the files.
    #[test]
    fn the_definitions_in_deploy_are_those_of_the_types() {
        for definition in definitions() {
            let plural = definition["spec"]["names"]["plural"].as_str().unwrap();
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(format!("../../deploy/helm/berth/files/crds/{plural}.yaml"));
            let text = serde_saphyr::to_string(&definition).unwrap();
            if std::env::var_os("UPDATE_EXPECT").is_some() {
                std::fs::write(&path, &text).unwrap();
            }
            let file = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(file == text, "{} differs: run this test with UPDATE_EXPECT=1", path.display());
        }
    }

    /// GitOps tools compare the stored object with their file, and would show each default as a difference.
    #[test]
    fn no_specification_has_a_default_and_status_is_a_subresource() {
        for definition in definitions() {
            let [version] = &definition["spec"]["versions"].as_array().unwrap()[..] else {
                panic!("one version")
            };
            assert_eq!(version["name"], "v1alpha1");
            let spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"].to_string();
            assert!(!spec.contains("\"default\":"), "{spec}");
            assert!(version["subresources"]["status"].is_object());
        }
    }
}
