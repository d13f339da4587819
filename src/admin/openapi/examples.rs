//! Examples of every body in the document, composed from the examples of the properties, so that each fits its schema
//! and none is written twice.

use super::operations;
use crate::resources::events::EVENT_STREAM;
use serde_json::{Map, Value, json};
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaFormat, SchemaType, Type};
use utoipa::openapi::{Content, OpenApi as Document, RefOr, Schema};

/// Deepest nesting that is followed, a reference counting as one: a recursive schema must end somewhere, and no
/// schema needs half of it.
const DEPTH_MAX: usize = 40;
/// The key of an object with free keys: such objects are by hook.
const KEY: &str = "place";
/// The placeholder for the bytes of a policy.
const MODULE: &str = "(the bytes of a WebAssembly component)";
/// A scrape.
const METRICS: &str = "# TYPE berth_policy_calls counter\nberth_policy_calls_total{hook=\"offer\",policy=\"timeslice@9f86d081884c\"} 12\n# EOF\n";
/// An event stream.
const STREAM: &str = "retry: 3000\nid: 19a8c3f2b10-16\nevent: here\ndata: {\"kind\":\"here\",\"at\":\"2026-02-03T04:05:06.000Z\",\"generation\":41,\"words\":\"8 GPUs, 3 allocations, stack 3\"}\n\nid: 19a8c3f2b10-17\nevent: gpuCordoned\ndata: {\"kind\":\"gpuCordoned\",\"at\":\"2026-02-03T04:05:07.000Z\",\"generation\":42,\"gpu\":\"GPU-8a56a4bc-e184-a047-2620-be19fdf913d5\",\"words\":\"GPU 0 is cordoned by admin (fan replacement)\"}\n\n";

/// Adds an example to every body of the document, and a schema to bodies of bytes or text.
pub(crate) fn complete(document: &mut Document) {
    let schemas = serde_json::to_value(&*document)
        .ok()
        .and_then(|mut whole| whole.pointer_mut("/components/schemas").map(Value::take))
        .unwrap_or_default();
    for item in document.paths.paths.values_mut() {
        for (operation, _) in operations(item) {
            if let Some(RefOr::T(body)) = &mut operation.request_body {
                body.content.iter_mut().for_each(|(kind, content)| fill(kind, content, &schemas));
            }
            for response in operation.responses.responses.values_mut() {
                if let RefOr::T(response) = response {
                    response.content.iter_mut().for_each(|(kind, content)| fill(kind, content, &schemas));
                }
            }
        }
    }
}

fn fill(kind: &str, content: &mut RefOr<Content>, schemas: &Value) {
    let RefOr::T(content) = content else { return };
    let text = match kind {
        "application/wasm" => Some((MODULE, Some("binary"))),
        "application/openmetrics-text" => Some((METRICS, None)),
        EVENT_STREAM => Some((STREAM, None)),
        _ => None,
    };
    if let Some((example, format)) = text {
        let mut schema = string(format);
        if kind == EVENT_STREAM {
            // The schema of each `data`: JSON Schema has `contentSchema`, the library does not. Without a type: for
            // some tools the stream is a text, for others each event is an object.
            let event = json!({"$ref": "#/components/schemas/Event"});
            schema.schema_type = SchemaType::AnyValue;
            schema.extensions = Some([("contentSchema", event)].into_iter().collect());
        }
        content.schema = Some(RefOr::T(Schema::Object(schema)));
        content.example = Some(example.into());
    }
    if content.example.is_none() {
        let schema = serde_json::to_value(&content.schema).unwrap_or_default();
        content.example = Some(of(&schema, schemas, 0));
    }
}

fn string(format: Option<&str>) -> Object {
    let format = format.map(|format| SchemaFormat::Custom(format.to_owned()));
    ObjectBuilder::new().schema_type(Type::String).format(format).build()
}

/// The example of a schema: its own, or one composed of its parts.
fn of(schema: &Value, schemas: &Value, depth: usize) -> Value {
    if depth > DEPTH_MAX {
        return Value::Null;
    }
    let of = |schema: &Value| of(schema, schemas, depth + 1);
    if let Some(example) = schema.get("example").or(schema.get("default")) {
        return example.clone();
    }
    if let Some(name) = schema["$ref"].as_str() {
        return of(&schemas[name.rsplit('/').next().unwrap_or_default()]);
    }
    for choice in ["oneOf", "anyOf"] {
        if let Some(choices) = schema[choice].as_array() {
            let some = choices.iter().find(|choice| choice["type"] != "null");
            return some.map_or(Value::Null, of);
        }
    }
    if let Some(parts) = schema["allOf"].as_array() {
        let parts = parts.iter().map(of).filter_map(|part| part.as_object().cloned());
        return Value::Object(parts.flatten().collect());
    }
    if let Some(first) = schema["enum"].get(0) {
        return first.clone();
    }
    match kind(schema) {
        "object" => object(schema, &of),
        "array" => json!([of(&schema["items"])]),
        "integer" | "number" => schema.get("minimum").cloned().unwrap_or_else(|| 1.into()),
        "boolean" => true.into(),
        "string" => "text".into(),
        _ => Value::Null,
    }
}

/// The type of a schema; of `[string, null]` the one that is not null.
fn kind(schema: &Value) -> &str {
    let several = schema["type"].as_array().into_iter().flatten();
    let some = several.filter_map(Value::as_str).find(|kind| *kind != "null");
    some.or(schema["type"].as_str()).unwrap_or("object")
}

fn object(schema: &Value, of: &impl Fn(&Value) -> Value) -> Value {
    let properties = schema["properties"].as_object().into_iter().flatten();
    let mut example: Map<_, _> = properties.map(|(name, about)| (name.clone(), of(about))).collect();
    if example.is_empty() && schema["additionalProperties"].is_object() {
        example.insert(KEY.into(), of(&schema["additionalProperties"]));
    }
    Value::Object(example)
}

#[cfg(test)]
mod tests {
    use super::of;
    use serde_json::json;

    #[test]
    fn an_example_is_composed_of_those_of_the_properties() {
        let schemas = json!({
            "Pair": {"type": "object", "properties": {
                "name": {"type": ["string", "null"], "example": "a"},
                "kind": {"$ref": "#/components/schemas/Kind"},
                "many": {"type": "array", "items": {"type": "integer", "minimum": 3}},
                "by": {"type": "object", "additionalProperties": {"$ref": "#/components/schemas/Kind"}},
                "maybe": {"oneOf": [{"type": "null"}, {"$ref": "#/components/schemas/Kind"}]},
            }},
            "Kind": {"type": "string", "enum": ["one", "two"]},
            "More": {"allOf": [{"$ref": "#/components/schemas/Pair"}, {"properties": {"x": {"example": 7}}}]},
            "Loop": {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/Loop"}}},
        });
        let more = of(&json!({"$ref": "#/components/schemas/More"}), &schemas, 0);
        let pair = json!({"name": "a", "kind": "one", "many": [3], "by": {"place": "one"}, "maybe": "one"});
        let mut whole = pair.as_object().unwrap().clone();
        whole.insert("x".into(), 7.into());
        assert_eq!(more, serde_json::Value::Object(whole));
        // A recursive one ends.
        of(&schemas["Loop"], &schemas, 0);
    }
}
