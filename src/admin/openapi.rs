//! The API's description, generated from the handlers and the wire types, so that it cannot differ from them. A copy
//! is committed as openapi/berth.json; a test compares them. Examples of bodies are composed from the examples of their
//! properties, so that each fits its schema and none is written twice.

use crate::resources::events::{self, EVENT_STREAM};
use crate::resources::{
    access, allocations, comparisons, decisions, drains, driver, gpus, health, history, node, policies,
    processes, stack, trials,
};
use actix_web::http::StatusCode;
use actix_web::http::header::IF_NONE_MATCH;
use berth_api::{
    Candidate, DrainOrder, Event, Kind, NewStack, NewTrial, Problem, ReleaseOrder, Rollback, Shape,
};
use berth_http::{PROBLEM_JSON, body};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;
use utoipa::openapi::example::ExampleBuilder;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{Object, ObjectBuilder, SchemaFormat, SchemaType, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Content, ContentBuilder, OpenApi as Document, PathItem, Ref, RefOr, Required, Response, ResponseBuilder,
    Schema,
};
use utoipa::{Modify, OpenApi};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Berth",
        description = "The admin API of one GPU node: its GPUs and their holders, the policies that decide, and the commands of operators.\n\nErrors are `application/problem+json` (RFC 9457); the `type` of each is the path of a page that explains it and what to do, and `/problems` lists them. Lists that grow take `limit` and `cursor`, and have `next` in the response. A weak ETag is for `If-None-Match`, which is answered with 304 while nothing has changed; a strong one is for `If-Match`, which is refused on routes without one. Bodies are compressed if `Accept-Encoding` allows gzip. All of `/api/v1` needs a token, `Authorization: Bearer TOKEN`, or a client certificate; GET and HEAD need the right to read, every other method the right to change.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    servers((url = "/", description = "This node")),
    paths(
        node::show, access::show, driver::release, driver::resume, gpus::list, gpus::show, gpus::forget, history::of_gpu, drains::cordon, drains::uncordon, drains::start, drains::show, drains::preview, drains::stop, drains::mark_healthy,
        processes::list, processes::bypass, events::follow, history::of_events,
        allocations::list, allocations::show, allocations::end,
        decisions::list, decisions::show, decisions::input, decisions::explain,
        comparisons::replay, comparisons::list, comparisons::add, comparisons::show, comparisons::end, trials::add,
        policies::list, policies::upload, policies::show, policies::module, policies::delete,
        stack::show, stack::activate, stack::reset, health::livez, health::readyz, health::metrics,
        stack::history, stack::roll_back, stack::end_suspension,
    ),
    components(schemas(Problem, Event)),
    tags(
        (name = "node", description = "The node and its daemon"),
        (name = "gpus", description = "GPUs: health, devices, cordon and drain"),
        (name = "processes", description = "Processes on the GPUs, and those without an allocation"),
        (name = "events", description = "Changes on the node as they happen"),
        (name = "allocations", description = "Allocations: holders and their devices"),
        (name = "decisions", description = "Recorded decisions of policies, and trials, replays and shadows of others"),
        (name = "policies", description = "Versions of policies"),
        (name = "stack", description = "The active policies, in the order in which they are called"),
        (name = "health", description = "For probes and scrapes; no token on the node and on the health listener"),
    ),
    security(("token" = [])),
    modifiers(&Errors),
)]
struct Api;

/// The document.
#[must_use]
pub fn openapi_json() -> &'static str {
    static JSON: LazyLock<String> = LazyLock::new(|| {
        let mut json = Api::openapi().to_pretty_json().unwrap_or_default();
        json.push('\n');
        json
    });
    &JSON
}

/// Adds what all operations have in common: the token, and the errors.
struct Errors;

impl Modify for Errors {
    fn modify(&self, document: &mut Document) {
        let scheme = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some("The content of the daemon's token file, by default /var/lib/berth/token"))
            .build();
        let components = document.components.get_or_insert_default();
        components.add_security_scheme("token", SecurityScheme::Http(scheme));
        for (path, item) in &mut document.paths.paths {
            let guarded = path.starts_with("/api/v1/");
            for (operation, is_change) in operations(item) {
                complete(operation, path, guarded, is_change);
                move_examples_into_descriptions(operation, path);
            }
        }
        for (name, schema) in &mut document.components.get_or_insert_default().schemas {
            if let RefOr::T(Schema::Object(schema)) = schema {
                name_values(name, schema);
            }
        }
        add_examples(document);
    }
}

/// Names the values of an enumeration for generators of clients, `drained` of `DrainState` as `DrainStateDrained`. In Go
/// the constants of all types are in one namespace, and several types have the value `cordoned`.
fn name_values(name: &str, schema: &mut Object) {
    let Some(values) = &schema.enum_values else { return };
    let names = values.iter().filter_map(Value::as_str).map(|value| {
        let mut letters = value.chars();
        let first: String = letters.next().into_iter().flat_map(char::to_uppercase).collect();
        format!("{name}{first}{}", letters.as_str())
    });
    let names = json!(names.collect::<Vec<_>>());
    schema.extensions.get_or_insert_default().merge([("x-enum-varnames", names)].into_iter().collect());
}

/// The 400 of operations without a query and without another reason.
const NO_QUERY: &str = "An unknown key in the query";

/// The 403 of operations without another reason.
const NOT_ALLOWED: &str = "The caller is not allowed to do this";

/// Operations whose responses have a weak ETag, with 304 for `If-None-Match`.
const CACHED: [&str; 18] = [
    "getNode",
    "getAccess",
    "listGpus",
    "getGpu",
    "getGpuHistory",
    "listPastEvents",
    "listGpuProcesses",
    "listBypasses",
    "listAllocations",
    "getAllocation",
    "listDecisions",
    "getDecision",
    "listShadows",
    "getShadow",
    "listPolicies",
    "getPolicy",
    "listActivations",
    "explainAllocation",
];

/// Responses of all operations with this in their path: part of the path, status, description. A handler whose reason is
/// another one describes it itself; so for all common responses.
const BY_PATH: [(&str, &str, &str); 9] = [
    ("{uuid}", "400", "No UUID"),
    ("{uuid}", "404", "No such GPU"),
    ("{digest}", "400", "No digest"),
    ("{digest}", "404", "No such version"),
    ("/allocations/{id}", "400", "No id"),
    ("/allocations/{id}", "404", "There is no such allocation, or it has ended and is no longer kept"),
    ("/shadows/{id}", "400", "No number"),
    ("/shadows/{id}", "404", "No such shadow"),
    ("/decisions", "409", "This daemon has no journal"),
];

/// The 412 of changes with this in their path, which take `If-Match`.
const CONDITIONAL: [(&str, &str); 3] = [
    ("/stack", "Another client activated a stack first"),
    ("/cordon", "Another client changed the drain state first"),
    ("/drain", "Another client changed the drain state first"),
];

/// Operations whose body is optional.
const BODY_OPTIONAL: [&str; 4] = ["cordonGpu", "drainGpu", "releaseDriver", "rollBackStack"];

/// Adds the condition, the tag, and 304.
fn cached(operation: &mut Operation) {
    let text = || Some(RefOr::T(Schema::Object(ObjectBuilder::new().schema_type(Type::String).build())));
    let condition = ParameterBuilder::new()
        .name(IF_NONE_MATCH.as_str())
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some("The ETag of a response that the client has; 304 means that it has not changed"))
        .schema(text())
        .example(Some("W/\"5d41402abc4b2a76\"".into()))
        .build();
    operation.parameters.get_or_insert_default().push(RefOr::T(condition));
    let tag = || {
        let about = "Identifies this response, for If-None-Match";
        HeaderBuilder::new().schema(text()).description(Some(about)).build()
    };
    let responses = &mut operation.responses.responses;
    if let Some(RefOr::T(found)) = responses.get_mut("200") {
        found.headers.entry("ETag".into()).or_insert_with(|| RefOr::T(tag()));
    }
    let same = ResponseBuilder::new().description("The response has not changed").header("ETag", tag());
    responses.insert("304".into(), RefOr::T(same.build()));
}

/// The operations of a path, and whether each submits a command to the ledger's thread.
fn operations(item: &mut PathItem) -> impl Iterator<Item = (&mut Operation, bool)> {
    let reads = item.get.iter_mut().map(|o| (o, false));
    let changes = [&mut item.put, &mut item.post, &mut item.delete];
    reads.chain(changes.into_iter().flatten().map(|o| (o, true)))
}

fn complete(operation: &mut Operation, path: &str, guarded: bool, is_change: bool) {
    let id = operation.operation_id.clone().unwrap_or_default();
    if CACHED.contains(&id.as_str()) {
        cached(operation);
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        let needed = !BODY_OPTIONAL.contains(&id.as_str());
        body.required = Some(if needed { Required::True } else { Required::False });
    }
    let has_body = operation.request_body.is_some();
    let mut parameters = operation.parameters.iter().flatten();
    let has_query =
        parameters.any(|one| matches!(one, RefOr::T(one) if matches!(one.parameter_in, ParameterIn::Query)));
    let responses = &mut operation.responses.responses;
    let mut also = |status: &str, text: &str| {
        let response = ResponseBuilder::new().description(text).build();
        responses.entry(status.into()).or_insert(RefOr::T(response));
    };
    also("406", "Accept-Encoding excludes every encoding that the daemon can send");
    for (_, status, text) in BY_PATH.iter().filter(|(part, ..)| path.contains(part)) {
        also(status, text);
    }
    also("400", if has_query { "A malformed query, or an unknown key in it" } else { NO_QUERY });
    if has_body {
        also("408", "The body was not received in time");
        also("413", "The body is too large");
        also("415", "The body is not application/json");
    }
    also("421", "The Host header names another machine");
    also(
        "503",
        "Too many requests wait, too many responses are unread, the store failed, or the daemon is stopping",
    );
    also("429", "Too many requests");
    if guarded {
        also("401", "No credentials, or a wrong token");
        also("403", NOT_ALLOWED);
    }
    if is_change {
        for (_, text) in CONDITIONAL.iter().filter(|(part, _)| path.contains(part)) {
            also("412", text);
        }
        also("412", "If-None-Match: * was sent, but the resource exists");
        also("504", "No answer in time; the request may have been carried out");
    }
    for (status, response) in responses {
        let status: Option<StatusCode> = status.parse().ok();
        if let (Some(status), RefOr::T(response)) = (status.filter(|s| s.as_u16() >= 400), response) {
            show_problem(path, status, response);
        }
    }
}

/// The example of a parameter in a path, such that it exists on the node of the demo: its GPU 0, the shipped policy
/// `binpack`, its first allocation, and its first decision. A test compares the first two with the node.
fn path_example(path: &str, name: &str) -> Option<Value> {
    match name {
        "uuid" => Some("GPU-40e3b113-e356-8f83-a45c-ca82546b96d9".into()),
        "digest" => Some("76026800cefffec9082ed267558050b28c0032f51a84779e9282bcd82a7f52bb".into()),
        "id" if path.contains("/allocations/") => Some("5eed0001-1".into()),
        "seq" => Some(1.into()),
        _ => None,
    }
}
/// The only optional parameter whose example Swagger UI fills in: without it, the stream of events has no end.
const PREFILLED_PARAMETER: (&str, &str) = ("streamEvents", "follow");

/// Makes each operation one that can be executed in Swagger UI as it stands. The page fills examples of parameters into
/// their fields: a filter that was not meant empties a list, and an `If-Match` refuses a change. So the examples of optional
/// parameters become a part of their descriptions.
fn move_examples_into_descriptions(operation: &mut Operation, path: &str) {
    let id = operation.operation_id.clone().unwrap_or_default();
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(parameter) = parameter else { continue };
        let is_in_path = matches!(parameter.parameter_in, ParameterIn::Path);
        let in_path = path_example(path, &parameter.name).filter(|_| is_in_path);
        let is_needed = matches!(parameter.required, Required::True)
            || PREFILLED_PARAMETER == (id.as_str(), parameter.name.as_str());
        if is_needed && in_path.is_none() {
            continue;
        }
        let example = serde_json::to_value(&*parameter)
            .ok()
            .and_then(|mut whole| Some(whole.get_mut("example")?.take()));
        let new = match in_path {
            Some(example) => Some(example),
            None => {
                if let Some(example) = example {
                    let shown = example.as_str().map_or_else(|| example.to_string(), str::to_owned);
                    let text = parameter.description.take().unwrap_or_default();
                    let end = if text.ends_with('.') { "" } else { "." };
                    parameter.description = Some(format!("{text}{end} Example: `{shown}`"));
                }
                None
            }
        };
        *parameter = ParameterBuilder::from(parameter.clone()).example(new).build();
    }
}

/// The named examples of a body, by the name of its schema.
fn named_examples(schema: &str) -> &'static [(&'static str, &'static str)] {
    match schema {
        "DrainOrder" => DrainOrder::NAMED_EXAMPLES,
        "StackSpec" => NewStack::NAMED_EXAMPLES,
        "TrialSpec" => NewTrial::NAMED_EXAMPLES,
        "ReleaseOrder" => ReleaseOrder::NAMED_EXAMPLES,
        "Rollback" => Rollback::NAMED_EXAMPLES,
        _ => &[],
    }
}

/// The examples of a body: named ones where there are some, else one.
fn fill_body(kind: &str, content: &mut RefOr<Content>, schemas: &Value) {
    let RefOr::T(body) = &mut *content else { return };
    let schema = serde_json::to_value(&body.schema).unwrap_or_default();
    let name = schema["$ref"].as_str().and_then(|path| path.rsplit('/').next()).unwrap_or_default();
    if name == "Candidate" {
        // Without this, Swagger UI builds an example from the properties, with a digest that no node has.
        body.example = serde_json::from_str(Candidate::EXAMPLE).ok();
    }
    for (name, text) in named_examples(name) {
        let example = ExampleBuilder::new().value(serde_json::from_str(text).ok()).build();
        body.examples.insert((*name).to_owned(), RefOr::T(example));
    }
    if body.examples.is_empty() {
        fill(kind, content, schemas);
    }
}

fn show_problem(path: &str, status: StatusCode, response: &mut Response) {
    let detail = response.description.clone();
    let noun = path.strip_prefix("/api/v1/").and_then(|rest| rest.split('/').next());
    let kind = match (status.as_u16(), noun) {
        (503, Some("events")) => Some(Kind::Streams),
        (404, Some("gpus")) => Some(Kind::UnknownGpu),
        (404, Some("allocations")) => Some(Kind::UnknownAllocation),
        (404, Some("decisions")) => Some(Kind::UnknownDecision),
        (404, Some("shadows")) => Some(Kind::UnknownShadow),
        (409, Some("decisions" | "replays")) => Some(Kind::NoJournal),
        (409, Some("shadows" | "trials")) => Some(Kind::Limit),
        (400, _) if detail == NO_QUERY => Some(Kind::Query),
        (403, _) if detail == NOT_ALLOWED => Some(Kind::Forbidden),
        (403, _) => Some(Kind::Untrusted),
        (404, Some("policies")) => Some(Kind::UnknownPolicy),
        (404, Some("stack")) if path.ends_with("/suspension") => Some(Kind::UnknownEntry),
        (404, Some("stack")) => Some(Kind::UnknownRevision),
        (409, Some("policies")) => Some(Kind::InUse),
        (409, Some("allocations")) => Some(Kind::Running),
        (409, Some(_)) if path.contains("/drain") => Some(Kind::NoApiServer),
        (409, Some(_)) => Some(Kind::State),
        (422, Some("policies")) => Some(Kind::NotAPolicy),
        (422, Some("stack")) => Some(Kind::StackFails),
        (503, None) if path == "/livez" => Some(Kind::NotAlive),
        (503, None) => Some(Kind::NotReady),
        _ => None,
    };
    let example = match kind {
        Some(kind) => Problem::new(kind, detail),
        None => Problem::of_status(status.as_u16(), detail),
    };
    let content = ContentBuilder::new()
        .schema(Some(Ref::from_schema_name("Problem")))
        .example(serde_json::to_value(example).ok())
        .build();
    response.content.insert(PROBLEM_JSON.into(), RefOr::T(content));
}

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
fn add_examples(document: &mut Document) {
    let schemas = serde_json::to_value(&*document)
        .ok()
        .and_then(|mut whole| whole.pointer_mut("/components/schemas").map(Value::take))
        .unwrap_or_default();
    for item in document.paths.paths.values_mut() {
        for (operation, _) in operations(item) {
            if let Some(RefOr::T(body)) = &mut operation.request_body {
                body.content.iter_mut().for_each(|(kind, content)| fill_body(kind, content, &schemas));
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
        body::WASM | body::BYTES => Some((MODULE, Some("binary"))),
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
        content.example = Some(example_of(&schema, schemas, 0));
    }
}

fn string(format: Option<&str>) -> Object {
    let format = format.map(|format| SchemaFormat::Custom(format.to_owned()));
    ObjectBuilder::new().schema_type(Type::String).format(format).build()
}

/// The example of a schema: its own, or one composed of its parts.
fn example_of(schema: &Value, schemas: &Value, depth: usize) -> Value {
    if depth > DEPTH_MAX {
        return Value::Null;
    }
    let of = |schema: &Value| example_of(schema, schemas, depth + 1);
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
    use super::example_of;
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
        let more = example_of(&json!({"$ref": "#/components/schemas/More"}), &schemas, 0);
        let pair = json!({"name": "a", "kind": "one", "many": [3], "by": {"place": "one"}, "maybe": "one"});
        let mut whole = pair.as_object().unwrap().clone();
        whole.insert("x".into(), 7.into());
        assert_eq!(more, serde_json::Value::Object(whole));
        // A recursive one ends.
        example_of(&schemas["Loop"], &schemas, 0);
    }
}
