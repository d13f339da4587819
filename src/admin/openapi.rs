//! The API's description, generated from the route table, the handlers and the wire types, so that it cannot differ from
//! them. A copy is committed as openapi/berth.json; a test compares them. Examples of bodies are composed from the examples of their
//! properties, so that each fits its schema and none is written twice.

use crate::resources::events::EVENT_STREAM;
use crate::row::{Condition, Description, Row};
use actix_web::http::StatusCode;
use actix_web::http::header::IF_NONE_MATCH;
use berth_api::{
    Candidate, DrainOrder, Event, Kind, NewStack, NewTrial, Problem, ReleaseOrder, Rollback, Shape,
};
use berth_http::{Audience, PROBLEM_JSON, RouteRow, Verb, body};
use serde_json::{Map, Value, json};
use utoipa::OpenApi;
use utoipa::openapi::example::ExampleBuilder;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{HttpMethod, Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{KnownFormat, Object, ObjectBuilder, SchemaFormat, SchemaType, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    Content, ContentBuilder, OpenApi as Document, Ref, RefOr, Required, Response, ResponseBuilder, Schema,
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Berth",
        description = "The admin API of one GPU node: its GPUs and their holders, the policies that decide, and the commands of operators.\n\nErrors are `application/problem+json` (RFC 9457); the `type` of each is the path of a page that explains it and what to do, and `/problems` lists them. Lists that grow take `limit` and `cursor`, and have `next` in the response. A weak ETag is for `If-None-Match`, which is answered with 304 while nothing has changed; a strong one is for `If-Match`, which is refused on routes without one. Bodies are compressed if `Accept-Encoding` allows gzip. All of `/api/v1` needs a token, `Authorization: Bearer TOKEN`, or a client certificate; GET and HEAD need the right to read, every other method the right to change.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    servers((url = "/", description = "This node")),
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
)]
struct Base;

/// The document of these operations.
pub(crate) fn written(rows: &[Row]) -> String {
    let mut document = Base::openapi();
    for row in rows {
        let Some(description) = &row.description else { continue };
        let of_handler = (description.of_handler)();
        let items = of_handler.paths.paths.into_values();
        let mut operations = items.flat_map(|item| [item.get, item.put, item.post, item.delete]).flatten();
        let Some(mut operation) = operations.next() else { continue };
        complete(&mut operation, &row.route, description);
        let method = match row.route.verb {
            Verb::Get => HttpMethod::Get,
            Verb::Put => HttpMethod::Put,
            Verb::Post => HttpMethod::Post,
            Verb::Delete => HttpMethod::Delete,
        };
        document.paths.add_path_operation(row.route.path, vec![method], operation);
        let schemas = of_handler.components.map(|components| components.schemas).unwrap_or_default();
        document.components.get_or_insert_default().schemas.extend(schemas);
    }
    let scheme = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some("The content of the daemon's token file, by default /var/lib/berth/token"))
        .build();
    let components = document.components.get_or_insert_default();
    components.add_security_scheme("token", SecurityScheme::Http(scheme));
    for (name, schema) in &mut components.schemas {
        if let RefOr::T(Schema::Object(schema)) = schema {
            name_values(name, schema);
        }
    }
    add_examples(&mut document);
    let mut json = document.to_pretty_json().unwrap_or_default();
    json.push('\n');
    json
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

/// A part of a path that varies.
struct PathParameter {
    /// What comes before it in the path, and its name.
    at: &'static str,
    about: &'static str,
    /// Such that it exists on the node of the demo: its GPU 0, the shipped policy `binpack`, its first allocation, and
    /// its first decision. A test compares the first two with the node.
    example: PathExample,
    /// The text of 400, unless the handler has another one.
    malformed: Option<&'static str>,
    /// The text of 404, unless the handler has another one.
    unknown: Option<&'static str>,
    /// What 404 shows.
    kind: Kind,
}

/// The example of a path parameter, which tells its type.
enum PathExample {
    Text(&'static str),
    Number(u64),
    Index(u64),
}

static PATH_PARAMETERS: [PathParameter; 6] = [
    PathParameter {
        at: "gpus/{uuid}",
        about: "UUID of the GPU; an index is answered with 404 and a hint with its UUID",
        example: PathExample::Text("GPU-40e3b113-e356-8f83-a45c-ca82546b96d9"),
        malformed: Some("No UUID"),
        unknown: Some("No such GPU"),
        kind: Kind::UnknownGpu,
    },
    PathParameter {
        at: "policies/{digest}",
        about: "sha256 of its bytes",
        example: PathExample::Text("76026800cefffec9082ed267558050b28c0032f51a84779e9282bcd82a7f52bb"),
        malformed: Some("No digest"),
        unknown: Some("No such version"),
        kind: Kind::UnknownPolicy,
    },
    PathParameter {
        at: "allocations/{id}",
        about: "The id of the allocation",
        example: PathExample::Text("5eed0001-1"),
        malformed: Some("No id"),
        unknown: Some("There is no such allocation, or it has ended and is no longer kept"),
        kind: Kind::UnknownAllocation,
    },
    PathParameter {
        at: "shadows/{id}",
        about: "The number of the shadow",
        example: PathExample::Number(1),
        malformed: Some("No number"),
        unknown: Some("No such shadow"),
        kind: Kind::UnknownShadow,
    },
    PathParameter {
        at: "decisions/{seq}",
        about: "The number of the decision",
        example: PathExample::Number(1),
        malformed: None,
        unknown: None,
        kind: Kind::UnknownDecision,
    },
    PathParameter {
        at: "entries/{place}",
        about: "Index of the entry in the active stack, from 0",
        example: PathExample::Index(0),
        malformed: None,
        unknown: None,
        kind: Kind::UnknownEntry,
    },
];

impl PathParameter {
    /// The one that varies in this path.
    fn of(path: &str) -> Option<&'static Self> {
        PATH_PARAMETERS.iter().find(|parameter| path.contains(parameter.at))
    }

    fn shown(&self) -> Parameter {
        let (_, name) = self.at.split_once('{').unwrap_or_default();
        let integer = || ObjectBuilder::new().schema_type(Type::Integer).minimum(Some(0));
        let (schema, example) = match self.example {
            PathExample::Text(text) => (ObjectBuilder::new().schema_type(Type::String), text.into()),
            PathExample::Number(number) => {
                (integer().format(Some(SchemaFormat::KnownFormat(KnownFormat::Int64))), number.into())
            }
            PathExample::Index(index) => (integer(), index.into()),
        };
        ParameterBuilder::new()
            .name(name.trim_end_matches('}'))
            .parameter_in(ParameterIn::Path)
            .required(Required::True)
            .description(Some(self.about))
            .schema(Some(RefOr::T(Schema::Object(schema.build()))))
            .example(Some(example))
            .build()
    }
}

impl Condition {
    fn shown(&self) -> Parameter {
        let text = ObjectBuilder::new().schema_type(SchemaType::from_iter([Type::String, Type::Null]));
        ParameterBuilder::new()
            .name("If-Match")
            .parameter_in(ParameterIn::Header)
            .required(Required::False)
            .description(Some(self.about))
            .schema(Some(RefOr::T(Schema::Object(text.build()))))
            .example(Some(self.example.into()))
            .build()
    }
}

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

/// Adds what the row knows of an operation, and what all operations have in common: the token, and the errors.
fn complete(operation: &mut Operation, route: &RouteRow, description: &Description) {
    operation.tags = Some(vec![description.tag.to_owned()]);
    operation.operation_id = Some(description.id.to_owned());
    let in_path = PathParameter::of(route.path);
    let query = (description.query)();
    let has_query = !query.is_empty();
    let headers = operation.parameters.take().unwrap_or_default();
    let mut parameters: Vec<RefOr<Parameter>> = query.into_iter().map(RefOr::T).collect();
    parameters.extend(headers);
    parameters.extend(description.condition.map(|condition| RefOr::T(condition.shown())));
    parameters.splice(0..0, in_path.map(|parameter| RefOr::T(parameter.shown())));
    operation.parameters = Some(parameters).filter(|parameters| !parameters.is_empty());
    if description.is_cached {
        cached(operation);
    }
    move_examples_into_descriptions(operation);
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        let is_optional = description.is_body_optional;
        body.required = Some(if is_optional { Required::False } else { Required::True });
    }
    let has_body = operation.request_body.is_some();
    let responses = &mut operation.responses.responses;
    let mut also = |status: &str, text: &str| {
        let response = ResponseBuilder::new().description(text).build();
        responses.entry(status.into()).or_insert(RefOr::T(response));
    };
    also("406", "Accept-Encoding excludes every encoding that the daemon can send");
    in_path.and_then(|parameter| parameter.malformed).into_iter().for_each(|text| also("400", text));
    in_path.and_then(|parameter| parameter.unknown).into_iter().for_each(|text| also("404", text));
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
    if route.audience == Audience::Guarded {
        also("401", "No credentials, or a wrong token");
        also("403", NOT_ALLOWED);
    }
    if route.verb != Verb::Get {
        description.condition.into_iter().for_each(|condition| also("412", condition.changed));
        also("412", "If-None-Match: * was sent, but the resource exists");
        also("504", "No answer in time; the request may have been carried out");
    }
    for (status, response) in responses {
        let status: Option<StatusCode> = status.parse().ok();
        if let (Some(status), RefOr::T(response)) = (status.filter(|s| s.as_u16() >= 400), response) {
            show_problem(description, in_path, status, response);
        }
    }
}

/// The only optional parameter whose example Swagger UI fills in: without it, the stream of events has no end.
const PREFILLED_PARAMETER: (&str, &str) = ("streamEvents", "follow");

/// Makes each operation one that can be executed in Swagger UI as it stands. The page fills examples of parameters into
/// their fields: a filter that was not meant empties a list, and an `If-Match` refuses a change. So the examples of optional
/// parameters become a part of their descriptions.
fn move_examples_into_descriptions(operation: &mut Operation) {
    let id = operation.operation_id.clone().unwrap_or_default();
    for parameter in operation.parameters.iter_mut().flatten() {
        let RefOr::T(parameter) = parameter else { continue };
        let is_needed = matches!(parameter.required, Required::True)
            || PREFILLED_PARAMETER == (id.as_str(), parameter.name.as_str());
        if is_needed {
            continue;
        }
        let example = serde_json::to_value(&*parameter)
            .ok()
            .and_then(|mut whole| Some(whole.get_mut("example")?.take()));
        if let Some(example) = example {
            let shown = example.as_str().map_or_else(|| example.to_string(), str::to_owned);
            let text = parameter.description.take().unwrap_or_default();
            let end = if text.ends_with('.') { "" } else { "." };
            parameter.description = Some(format!("{text}{end} Example: `{shown}`"));
        }
        *parameter = ParameterBuilder::from(parameter.clone()).example(None).build();
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

fn show_problem(
    description: &Description,
    in_path: Option<&PathParameter>,
    status: StatusCode,
    response: &mut Response,
) {
    let detail = response.description.clone();
    let of_row = description.kinds.iter().find(|(of, _)| *of == status.as_u16()).map(|(_, kind)| *kind);
    let kind = of_row.or_else(|| match status.as_u16() {
        404 => in_path.map(|parameter| parameter.kind),
        400 if detail == NO_QUERY => Some(Kind::Query),
        403 if detail == NOT_ALLOWED => Some(Kind::Forbidden),
        403 => Some(Kind::Untrusted),
        _ => None,
    });
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
        let operations = [&mut item.get, &mut item.put, &mut item.post, &mut item.delete];
        for operation in operations.into_iter().flatten() {
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
