//! The committed description of the admin API equals the one that the code makes, and is complete.

use berth_api::Operation;
use berth_gpus::sim::SimGpus;
use berth_kernel::node::ports::Gpus;
use serde_json::Value;
use std::collections::BTreeSet;

fn document() -> Value {
    serde_json::from_str(berth_admin::openapi_json()).unwrap()
}

fn operations(document: &Value) -> Vec<(String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let all = paths.iter().flat_map(|(path, item)| {
        let methods = item.as_object().unwrap().iter();
        methods.map(move |(method, operation)| (format!("{method} {path}"), operation.clone()))
    });
    all.collect()
}

#[test]
fn the_committed_description_is_the_generated_one() {
    let committed = concat!(env!("CARGO_MANIFEST_DIR"), "/../..", "/openapi/berth.json");
    let committed = std::fs::read_to_string(committed).unwrap_or_default();
    assert!(
        committed == berth_admin::openapi_json(),
        "openapi/berth.json differs from the code; if the change is meant: \
         cargo run -- openapi > openapi/berth.json"
    );
}

#[test]
fn the_operations_that_problems_name_are_in_the_description() {
    let document = document();
    for operation in Operation::ALL {
        let (method, path) = operation.route();
        let described = &document["paths"][path][method.to_lowercase()]["operationId"];
        assert_eq!(described, &serde_json::to_value(operation).unwrap(), "{method} {path}");
    }
}

#[test]
fn every_operation_has_a_description_and_its_errors() {
    let document = document();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["components"]["securitySchemes"]["token"]["scheme"], "bearer");
    let operations = operations(&document);
    assert_eq!(operations.len(), 49);
    let mut ids = BTreeSet::new();
    for (name, operation) in &operations {
        assert!(operation["summary"].as_str().is_some_and(|s| !s.is_empty()), "{name} has no summary");
        assert!(operation["description"].as_str().is_some_and(|d| d.len() > 20), "{name} has no description");
        assert!(operation["tags"].as_array().is_some_and(|t| t.len() == 1), "{name} has no tag");
        assert!(ids.insert(operation["operationId"].as_str().unwrap()), "{name} shares its id");
        let responses = operation["responses"].as_object().unwrap();
        let mut expected = vec!["400", "406", "421", "429", "503"];
        if name.contains("/api/v1/") {
            expected.extend(["401", "403"]);
        }
        if name.contains('{') {
            expected.extend(["400", "404"]);
        }
        if !name.starts_with("get ") {
            expected.extend(["412", "504"]);
        }
        if operation["parameters"].as_array().is_some_and(|all| all.iter().any(|p| p["in"] == "query")) {
            expected.push("400");
        }
        if operation["parameters"].as_array().is_some_and(|all| all.iter().any(|p| p["name"] == "If-Match")) {
            expected.push("412");
        }
        if operation.get("requestBody").is_some() {
            expected.extend(["400", "408", "413", "415", "422"]);
        }
        for status in expected {
            assert!(responses.contains_key(status), "{name} does not say {status}");
        }
        for (status, response) in responses {
            assert!(response["description"].as_str().is_some_and(|d| !d.is_empty()), "{name} {status}");
            if status.as_str() >= "400" {
                let schema = &response["content"]["application/problem+json"]["schema"]["$ref"];
                assert_eq!(schema, "#/components/schemas/Problem", "{name} {status}");
            }
        }
        let nothing = serde_json::json!({});
        let open = operation["security"].as_array().is_some_and(|ways| ways.contains(&nothing));
        assert_eq!(open, !name.contains("/api/v1/"), "{name}: who may ask is not said");
    }
}

/// Each body and each needed parameter has an example; that of an optional one is in its description, since Swagger UI
/// fills examples into their fields.
#[test]
fn every_request_and_every_response_has_an_example() {
    let document = document();
    for (name, operation) in operations(&document) {
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            let example = parameter.get("example").or(parameter["schema"].get("example"));
            let text = parameter["description"].as_str().unwrap_or_default();
            let fixed = parameter["schema"]["enum"].is_array();
            let about = format!("{name}: {}", parameter["name"]);
            assert!(!text.is_empty(), "{about} is not explained");
            if parameter["required"] == true {
                assert!(example.is_some() || fixed, "{about} has no example");
            } else if operation["operationId"] != "streamEvents" || parameter["name"] != "follow" {
                assert_eq!(example, None, "{about} is optional and would be filled in");
                assert!(text.contains("Example: `") || fixed, "{about} has no example");
            }
        }
        let mut bodies = vec![("the request", &operation["requestBody"])];
        bodies.extend(operation["responses"].as_object().unwrap().iter().map(|(s, r)| (s.as_str(), r)));
        for (which, body) in bodies {
            for (kind, content) in body["content"].as_object().into_iter().flatten() {
                let named = content["examples"].as_object().into_iter().flatten();
                let mut examples: Vec<_> = named.map(|(_, example)| &example["value"]).collect();
                examples.extend(content.get("example"));
                assert!(!examples.is_empty(), "{name}: {which} ({kind}) has no example");
                for example in examples {
                    assert!(!empty(example), "{name}: an example of {which} ({kind}) says nothing");
                    assert!(
                        which != "the request" || example.get("by").is_none(),
                        "{name}: in another's name"
                    );
                }
            }
        }
    }
}

/// A node of eight simulated H100, such as the demo's, has what the examples of paths name.
#[test]
fn the_examples_of_paths_are_on_the_node_of_the_demo() {
    let document = document();
    let text = std::fs::read_to_string(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../policies-wasm/prebuilt/manifest.json"
    ));
    let shipped: Value = serde_json::from_str(&text.unwrap()).unwrap();
    let digest = &shipped["policies"]["binpack"]["artifact"];
    let gpus = SimGpus::open("8xh100").unwrap().scan().unwrap();
    let first = gpus.parts.iter().find(|part| part.gpu_index == 0).unwrap().id.to_string();
    for (name, operation) in operations(&document) {
        for parameter in
            operation["parameters"].as_array().into_iter().flatten().filter(|p| p["in"] == "path")
        {
            match parameter["name"].as_str().unwrap() {
                "uuid" => assert_eq!(parameter["example"], first, "{name}"),
                "digest" => assert_eq!(&parameter["example"], digest, "{name}"),
                _ => {}
            }
        }
    }
}

/// A generator for Go puts types, their constructors (`NewStack` of a schema `Stack`) and the constants of all
/// enumerations into one namespace.
#[test]
fn no_two_names_of_a_generated_client_are_the_same() {
    let document = document();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    let mut names = BTreeSet::new();
    for (name, schema) in schemas {
        for made in [name.clone(), format!("New{name}"), format!("New{name}WithDefaults")] {
            assert!(names.insert(made.to_lowercase()), "{made} is made of two schemas");
        }
        let values = schema["enum"].as_array().map_or(0, Vec::len);
        let constants = schema["x-enum-varnames"].as_array();
        assert_eq!(constants.map_or(0, Vec::len), values, "{name} has constants without a name");
        for constant in constants.into_iter().flatten() {
            let constant = constant.as_str().unwrap();
            assert!(names.insert(constant.to_lowercase()), "{constant} is a value of two schemas");
        }
    }
    let states: Vec<_> =
        ["Active", "Cordoned", "Draining", "Drained"].map(|s| format!("DrainState{s}")).into();
    assert_eq!(schemas["DrainState"]["x-enum-varnames"], serde_json::json!(states));
}

fn empty(example: &Value) -> bool {
    match example {
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::String(text) => text.is_empty(),
        _ => false,
    }
}

#[test]
fn every_property_is_explained() {
    let document = document();
    let schemas = document["components"]["schemas"].as_object().unwrap();
    for (name, schema) in schemas {
        let parts = std::iter::once(schema).chain(schema["allOf"].as_array().into_iter().flatten());
        for properties in parts.filter_map(|s| s["properties"].as_object()) {
            for (property, about) in properties {
                // What may be missing is the thing or null, with the words beside the thing.
                let text = about["description"].as_str().or(about["oneOf"][0]["description"].as_str());
                let text = text.unwrap_or_default();
                assert!(!text.is_empty(), "{name}.{property} is not explained");
            }
        }
    }
}

/// A megabyte of 1024 times 1024 bytes is written MiB.
#[test]
fn units_are_written_as_people_write_them() {
    let document = document();
    let schemas = document["components"]["schemas"].as_object().unwrap().values();
    let parts = schemas.flat_map(|s| std::iter::once(s).chain(s["allOf"].as_array().into_iter().flatten()));
    let properties = parts.filter_map(|s| s["properties"].as_object()).flat_map(|p| p.keys());
    let of_memory: Vec<_> = properties.filter(|name| name.to_lowercase().ends_with("mib")).collect();
    assert!(of_memory.len() > 8 && of_memory.iter().all(|name| name.ends_with("MiB")), "{of_memory:?}");
}

#[test]
fn each_part_of_a_path_that_varies_is_a_parameter() {
    let document: Value = serde_json::from_str(berth_admin::openapi_json()).unwrap();
    let mut varying = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        let parts = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
        let parts: Vec<&str> = parts.collect();
        for (method, operation) in item.as_object().unwrap() {
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let names = parameters.filter(|one| one["in"] == "path").map(|one| one["name"].as_str().unwrap());
            assert_eq!(names.collect::<Vec<_>>(), parts, "{method} {path}");
            varying += parts.len();
        }
    }
    assert!(varying > 15, "{varying}");
}
