//! The page at `/`: public, without data, and with a content policy that permits only itself.

use crate::support::admin_node::AdminNode;

const FILES: &[(&str, &str)] = &[
    ("/", "text/html; charset=utf-8"),
    ("/page/index.html", "text/html; charset=utf-8"),
    ("/page/page.css", "text/css; charset=utf-8"),
    ("/page/page.js", "text/javascript; charset=utf-8"),
    ("/page/icon.svg", "image/svg+xml"),
];

#[test]
fn the_page_is_public_and_has_no_data_in_it() {
    let node = AdminNode::new(2);
    node.allocate(0);
    for (path, kind) in FILES {
        let answer = node.ask_bare("GET", path, &[], b"");
        assert_eq!((answer.status, answer.headers["content-type"].as_str()), (200, *kind), "{path}");
        let text = String::from_utf8(answer.body).unwrap();
        for secret in [node.token.as_str(), "GPU-0", "GPU-1", "node-1"] {
            assert!(!text.contains(secret), "{path} has {secret} in it");
        }
    }
    // Not even the token changes what it is.
    let bearer = format!("Bearer {}", node.token);
    let signed_in = node.ask_bare("GET", "/", &[("authorization", &bearer)], b"");
    assert_eq!(signed_in.body, node.ask_bare("GET", "/", &[], b"").body);
    node.ask_bare("GET", "/page/nothing.js", &[], b"").problem(404, "no-such-route");
    node.ask_bare("GET", "/page/", &[], b"").problem(404, "no-such-route");
    node.ask_bare("GET", "/page/..%2Fpage.rs", &[], b"").problem(404, "no-such-route");
    let head = node.ask_bare("HEAD", "/", &[], b"");
    assert_eq!((head.status, head.body.len()), (200, 0));
}

#[test]
fn the_page_may_load_from_and_send_requests_to_this_daemon_only() {
    let node = AdminNode::new(1);
    for (path, _) in FILES {
        let answer = node.ask_bare("GET", path, &[], b"");
        let policy = &answer.headers["content-security-policy"];
        let rules: Vec<_> = policy.split("; ").collect();
        for rule in [
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self' data:",
            "base-uri 'none'",
            "frame-ancestors 'none'",
            "form-action 'none'",
        ] {
            assert!(rules.contains(&rule), "{path}: {rule} is not in {policy}");
        }
        assert!(!policy.contains("unsafe"), "{path}: {policy}");
        for (header, value) in [
            ("x-content-type-options", "nosniff"),
            ("x-frame-options", "DENY"),
            ("referrer-policy", "no-referrer"),
        ] {
            assert_eq!(answer.headers[header], value, "{path}");
        }
    }
}

#[test]
fn a_browser_caches_the_files_and_revalidates_them() {
    let node = AdminNode::new(1);
    let page = node.ask_bare("GET", "/", &[], b"");
    assert_eq!(page.headers["cache-control"], "no-cache");
    let tag = page.headers["etag"].clone();
    for known in [tag.clone(), format!("\"x\", {tag}"), tag.trim_start_matches("W/").to_owned(), "*".into()] {
        let again = node.ask_bare("GET", "/", &[("if-none-match", &known)], b"");
        assert_eq!((again.status, again.body.len()), (304, 0), "{known}");
        assert_eq!(again.headers["etag"], tag);
        assert!(again.headers.contains_key("content-security-policy"));
    }
    for other in ["W/\"0000000000000000\"", "\"x\"", "not a tag"] {
        let again = node.ask_bare("GET", "/", &[("if-none-match", other)], b"");
        assert_eq!((again.status, again.body.len()), (200, page.body.len()), "{other}");
    }
    let script = node.ask_bare("GET", "/page/page.js", &[], b"");
    assert_ne!(script.headers["etag"], tag);
}
