//! The API's description, generated from the handlers and the wire types, so that it cannot differ from them. A copy
//! is committed as openapi/berth.json; a test compares them.

mod examples;

use crate::resources::{
    allocations, comparisons, decisions, drains, events, gpus, livez, metrics, node, policies, processes,
    stack, stack_history, trials,
};
use actix_web::http::StatusCode;
use actix_web::http::header::IF_NONE_MATCH;
use berth_api::Event;
use berth_api::{Kind, Problem};
use berth_http::PROBLEM_JSON;
use std::sync::LazyLock;
use utoipa::openapi::header::HeaderBuilder;
use utoipa::openapi::path::{Operation, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{
    ContentBuilder, OpenApi as Document, PathItem, Ref, RefOr, Required, Response, ResponseBuilder, Schema,
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
        node::show, gpus::list, gpus::show, gpus::forget, gpus::cordon, gpus::uncordon, drains::start, drains::show, drains::stop, drains::mark_healthy,
        processes::list, processes::bypass, events::follow,
        allocations::list, allocations::show, allocations::end,
        decisions::list, decisions::show, decisions::input, decisions::explain,
        comparisons::replay, comparisons::list, comparisons::add, comparisons::show, comparisons::end, trials::add,
        policies::list, policies::upload, policies::show, policies::module, policies::delete,
        stack::show, stack::activate, stack::reset, livez::livez, node::readyz, metrics::metrics,
        stack_history::list, stack_history::roll_back, stack_history::end_suspension,
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
            for (operation, asks) in operations(item) {
                complete(operation, path, guarded, asks);
            }
        }
        examples::complete(document);
    }
}

/// The 400 of operations without a query and without another reason.
const NO_QUERY: &str = "An unknown key in the query";

/// The 403 of operations without another reason.
const NOT_ALLOWED: &str = "The caller is not allowed to do this";

/// Operations whose responses have a weak ETag, with 304 for `If-None-Match`.
const CACHED: [&str; 15] = [
    "getNode",
    "listGpus",
    "getGpu",
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

/// Operations whose body is optional.
const BODY_OPTIONAL: [&str; 3] = ["cordonGpu", "drainGpu", "rollBackStack"];

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

fn complete(operation: &mut Operation, path: &str, guarded: bool, asks: bool) {
    let id = operation.operation_id.clone().unwrap_or_default();
    if CACHED.contains(&id.as_str()) {
        cached(operation);
    }
    if let Some(RefOr::T(body)) = &mut operation.request_body {
        let needed = !BODY_OPTIONAL.contains(&id.as_str());
        body.required = Some(if needed { Required::True } else { Required::False });
    }
    let responses = &mut operation.responses.responses;
    let mut also = |status: &str, text: &str| {
        let response = ResponseBuilder::new().description(text).build();
        responses.entry(status.into()).or_insert(RefOr::T(response));
    };
    also("406", "Accept-Encoding excludes every encoding that the daemon can send");
    also("400", NO_QUERY);
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
    if asks {
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
        (409, Some(_)) if path.ends_with("/drain") => Some(Kind::NoApiServer),
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
