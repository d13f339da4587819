//! Rules that all of the API has in common, over HTTP: conditions, pages of lists, repeated uploads, compression, and
//! a page for each problem.

use crate::support::admin_fakes::module;
use crate::support::admin_node::{AdminNode, Answer};
use berth_api::{Kind, Problem};
use std::io::Read;

const CORDON: &str = "/api/v1/gpus/GPU-0/cordon";
const DRAIN: &str = "/api/v1/gpus/GPU-0/drain";

fn if_match(node: &AdminNode, method: &str, path: &str, tag: &str) -> Answer {
    node.ask(method, path, &[("if-match", tag)], b"")
}

#[test]
fn a_drain_state_is_changed_only_with_its_current_etag() {
    let node = AdminNode::new(1);
    let tag = |answer: &Answer| answer.headers["etag"].clone();
    let active = tag(&node.get(DRAIN));
    assert_eq!(active, "\"active\"");
    let cordoned = if_match(&node, "PUT", CORDON, &active);
    assert_eq!(cordoned.status, 200);
    assert_eq!(tag(&node.get(DRAIN)), tag(&cordoned));
    // A client that saw it active is late, whatever its request.
    for (method, path) in [("PUT", CORDON), ("DELETE", CORDON), ("PUT", DRAIN), ("DELETE", DRAIN)] {
        if_match(&node, method, path, &active).problem(412, "changed-meanwhile");
        if_match(&node, method, path, "active").problem(400, "malformed-header");
        let weak = format!("W/{}", tag(&cordoned));
        if_match(&node, method, path, &weak).problem(412, "changed-meanwhile");
    }
    assert_eq!(node.get(DRAIN).value()["state"], "cordoned");
    let draining = if_match(&node, "PUT", DRAIN, &tag(&cordoned));
    assert_eq!(draining.status, 200);
    assert_ne!(tag(&draining), tag(&cordoned));
    assert_eq!(if_match(&node, "DELETE", DRAIN, "*").status, 200);
    assert_eq!(if_match(&node, "DELETE", CORDON, &tag(&node.get(DRAIN))).status, 200);
    assert_eq!(tag(&node.get(DRAIN)), active);
    if_match(&node, "PUT", "/api/v1/gpus/GPU-9/cordon", "*").problem(404, "unknown-gpu");
}

#[test]
fn of_many_concurrent_changes_with_the_same_etag_one_succeeds() {
    let node = AdminNode::new(1);
    let address = node.address();
    let bearer = format!("Bearer {}", node.token);
    let done: Vec<u16> = std::thread::scope(|scope| {
        let order = |n: usize| {
            let headers = [
                ("authorization", bearer.as_str()),
                ("if-match", "\"active\""),
                ("content-type", "application/json"),
            ];
            let body = format!("{{\"reason\": \"{n}\"}}");
            crate::support::admin_node::ask(address, "PUT", CORDON, &headers, body.as_bytes()).status
        };
        let all: Vec<_> = (0..8).map(|n| scope.spawn(move || order(n))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert_eq!(done.iter().filter(|status| **status == 200).count(), 1, "{done:?}");
    assert!(done.iter().all(|status| [200, 412].contains(status)), "{done:?}");
}

#[test]
fn unchanged_responses_are_not_sent_again() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(0).id.to_string();
    let version = node.upload(&module("a", "")).expect(201);
    let lists = ["node", "gpus", "allocations", "policies", "stack/history", "bypass", "shadows"];
    let mut paths: Vec<_> = lists.iter().map(|list| format!("/api/v1/{list}")).collect();
    paths.extend([
        "/api/v1/gpus/GPU-0".to_owned(),
        "/api/v1/gpus/GPU-0/processes".to_owned(),
        format!("/api/v1/allocations/{allocation}"),
        format!("/api/v1/policies/{}", version["digest"].as_str().unwrap()),
    ]);
    for path in &paths {
        let first = node.get(path);
        let tag = first.headers.get("etag").unwrap_or_else(|| panic!("{path} has no ETag"));
        let again = node.ask("GET", path, &[("if-none-match", tag)], b"");
        assert_eq!((again.status, again.body.len()), (304, 0), "{path}");
        assert_eq!(again.headers["etag"], *tag, "{path}");
        assert_eq!(node.ask("GET", path, &[("if-none-match", "\"other\"")], b"").status, 200, "{path}");
    }
    let gpus = node.get("/api/v1/gpus").headers["etag"].clone();
    node.json("PUT", CORDON, "{}").expect(200);
    assert_eq!(node.ask("GET", "/api/v1/gpus", &[("if-none-match", &gpus)], b"").status, 200);
}

#[test]
fn a_version_is_deleted_only_if_unchanged() {
    let node = AdminNode::new(1);
    let version = node.upload(&module("a", "")).expect(201);
    let path = format!("/api/v1/policies/{}", version["digest"].as_str().unwrap());
    let tag = node.get(&path).headers["etag"].clone();
    assert!(tag.starts_with('"'), "{tag}");
    if_match(&node, "DELETE", &path, "\"0123456789abcdef\"").problem(412, "changed-meanwhile");
    assert_eq!(if_match(&node, "DELETE", &path, &tag).status, 204);
    if_match(&node, "DELETE", &path, &tag).problem(404, "unknown-policy");
}

#[test]
fn an_upload_that_is_sent_again_changes_nothing() {
    let node = AdminNode::new(1);
    let first = node.upload(&module("a", ""));
    let path = first.headers["location"].clone();
    assert_eq!(first.status, 201);
    let again = node.upload(&module("a", ""));
    assert_eq!((again.status, &again.body), (200, &first.body));
    assert!(!again.headers.contains_key("location"));
    // The header of earlier builds is one that no route reads.
    let headers = [("content-type", "application/wasm"), ("idempotency-key", "two words")];
    assert_eq!(node.ask("POST", "/api/v1/policies", &headers, &module("a", "")).status, 200);
    let known = node.get("/api/v1/policies").expect(200)["items"].as_array().unwrap().len();
    assert_eq!(known, 1);
    assert_eq!(node.delete(&path).status, 204);
    assert_eq!(node.upload(&module("a", "")).status, 201);
    node.get(&path).expect(200);
}

#[test]
fn lists_have_pages_and_filters() {
    let node = AdminNode::new(2);
    for n in 0..5 {
        node.upload(&module(&format!("p{n}"), "")).expect(201);
    }
    node.record_shipped(b"shipped", "shipped", 1);
    let whole = node.get("/api/v1/policies").expect(200);
    let digests = |list: &serde_json::Value| -> Vec<String> {
        let items = list["items"].as_array().unwrap().iter();
        items.map(|item| item["digest"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!((digests(&whole).len(), &whole["next"]), (6, &serde_json::Value::Null));
    let (mut found, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = node.get(&format!("/api/v1/policies?limit=2{cursor}")).expect(200);
        assert!(digests(&page).len() <= 2);
        found.extend(digests(&page));
        let Some(next) = page["next"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(found, digests(&whole));
    let count = |query: &str| digests(&node.get(&format!("/api/v1/policies?{query}")).expect(200)).len();
    assert_eq!((count("shipped=true"), count("shipped=false"), count("active=true")), (1, 5, 0));
    assert_eq!((count("name=shipped"), count("name=unknown")), (1, 0));
    node.json("PUT", CORDON, "{}").expect(200);
    let gpus = |query: &str| node.get(&format!("/api/v1/gpus?{query}")).expect(200)["items"].clone();
    assert_eq!(gpus("drain=cordoned")[0]["uuid"], "GPU-0");
    assert_eq!(
        (gpus("drain=active").as_array().unwrap().len(), gpus("health=unhealthy")),
        (1, serde_json::json!([]))
    );
    for odd in [
        "gpus?health=well",
        "gpus?drain=full",
        "policies?limit=0",
        "policies?cursor=x",
        "policies?shipped=maybe",
        "allocations?cursor=x",
        "bypass?cursor=x",
        "bypass?gpu=",
        "bypass?limit=1025",
        "gpus?more=1",
    ] {
        node.get(&format!("/api/v1/{odd}")).problem(400, "malformed-query");
    }
    // The keywords of earlier releases mean the same.
    node.get("/api/v1/allocations?after=1.00000001-1").expect(200);
}

#[test]
fn responses_are_compressed_if_allowed() {
    let node = AdminNode::new(2);
    let ask = |codings: &str, path: &str| node.ask("GET", path, &[("accept-encoding", codings)], b"");
    let plain = node.get("/api/v1/gpus").body;
    let packed = ask("gzip", "/api/v1/gpus");
    assert_eq!(packed.headers["content-encoding"], "gzip");
    assert!(packed.headers["vary"].eq_ignore_ascii_case("accept-encoding"));
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(&packed.body[..]).read_to_end(&mut text).unwrap();
    assert_eq!(text, plain);
    assert!(packed.body.len() < plain.len());
    assert!(!ask("identity", "/api/v1/gpus").headers.contains_key("content-encoding"));
    let says = ask("identity;q=0, br", "/api/v1/gpus").problem(406, "not-acceptable");
    assert!(says.contains("neither gzip") && says.contains("send `Accept-Encoding: gzip`"), "{says}");
    // The document is several hundred kilobytes, and the same words in each of its operations.
    let (document, plain) = (ask("gzip", "/openapi.json"), node.get("/openapi.json").body);
    assert!(document.body.len() < plain.len() / 4, "{} of {} bytes", document.body.len(), plain.len());
}

#[test]
fn every_problem_has_a_page_that_needs_no_token() {
    let node = AdminNode::new(1);
    let page = |path: &str| node.ask_bare("GET", path, &[], b"");
    let index = page("/problems");
    assert_eq!((index.status, index.headers["content-type"].as_str()), (200, "text/html; charset=utf-8"));
    let index = String::from_utf8(index.body).unwrap();
    for kind in Kind::ALL {
        let problem = Problem::new(*kind, "x");
        assert!(index.contains(&format!("href=\"{}\"", problem.kind)), "{kind:?} is not listed");
        let found = page(&problem.kind);
        let text = String::from_utf8(found.body).unwrap();
        assert_eq!(found.status, 200, "{kind:?}");
        assert!(text.contains(&*problem.title) && text.contains("What to do"), "{text}");
        assert!(found.headers["content-security-policy"].starts_with("default-src 'none'"));
    }
    // And nothing is listed that is no problem.
    assert_eq!(index.matches("<li>").count(), Kind::ALL.len());
    assert_eq!(page("/problems/").body, index.as_bytes(), "with a slash at its end, too");
    page("/problems/none").problem(404, "no-such-route");
}
