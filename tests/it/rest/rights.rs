//! Rights by client certificate, also of unknown names and with an emptied CA; and what is public, seen from another
//! machine.

use crate::rest::tls::{Ca, TlsNode};
use crate::support::admin_node::{agent, ask_by};
use berth_http::Settings;
use berth_http::{AdminAccess, Right, TlsFiles};
use std::net::{IpAddr, UdpSocket};
use ureq::tls::TlsConfig;

const CORDON: &str = "/api/v1/gpus/GPU-0/cordon";
const NODE: &str = "/api/v1/node";

#[test]
fn a_certificate_without_an_entry_has_the_right_of_others_may_and_none_by_default() {
    let clients = Ca::new();
    for (others_may, reads, changes) in
        [(None, 403, 403), (Some(Right::Read), 200, 403), (Some(Right::Change), 200, 200)]
    {
        let node = TlsNode::with_clients(&clients, |files| files.others_may = others_may);
        let anybody = node.ca.agent(Some(&clients.client("anybody")));
        let status = |method, path| node.ask(&anybody, method, path, false).unwrap().status;
        assert_eq!((status("GET", NODE), status("PUT", CORDON)), (reads, changes), "{others_may:?}");
    }
}

fn check_failure(node: &TlsNode) -> Option<String> {
    let value = node.ask(&node.ca.agent(None), "GET", NODE, true).unwrap().expect(200);
    let checks = value["checks"].as_array().unwrap().clone();
    checks.into_iter().find(|c| c["name"] == "tls").unwrap()["detail"].as_str().map(str::to_owned)
}

#[test]
fn an_emptied_ca_file_refuses_all_clients_even_with_a_broken_key_pair() {
    let clients = Ca::new();
    let node = TlsNode::with_clients(&clients, |_| {});
    let folder = node.admin.dir.path();
    let opens = || {
        let alice = node.ca.agent(Some(&clients.client("alice")));
        node.ask(&alice, "GET", NODE, false).is_ok_and(|answer| answer.status == 200)
    };
    assert!(opens());
    // The key pair is broken, and the previous one stays in effect; the CA is still checked.
    std::fs::write(folder.join("server.key"), "").unwrap();
    node.until("the broken pair is reported", || {
        check_failure(&node).is_some_and(|w| w.contains("no private key"))
    });
    assert!(opens());
    for emptied in ["", "# none\n", "no PEM"] {
        std::fs::write(folder.join("clients.crt"), emptied).unwrap();
        node.until("the CA is missing", || {
            check_failure(&node).is_some_and(|w| w.contains("no client certificate is accepted"))
        });
        assert!(!opens(), "{emptied:?}");
        std::fs::write(folder.join("clients.crt"), &clients.pem).unwrap();
        // Otherwise the next iteration could take the error that is still shown for its own.
        node.until("the CA is back", || {
            opens() && check_failure(&node).is_some_and(|w| !w.contains("no client certificate is accepted"))
        });
    }
    // A CA file that cannot be read for a moment, as while a mount is renewed, changes no right.
    std::fs::remove_file(folder.join("clients.crt")).unwrap();
    node.until("it is reported", || check_failure(&node).is_some_and(|w| w.contains("cannot be read")));
    assert!(opens());
}

/// An address of this machine that is not loopback, if it has one. Nothing is sent.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    socket
        .local_addr()
        .ok()
        .map(|address| address.ip())
        .filter(|ip| !ip.is_loopback() && !ip.is_unspecified())
}

#[test]
fn from_another_machine_metrics_and_details_need_the_right_to_read() {
    let Some(own) = own_address() else { return };
    let clients = Ca::new();
    let mut node = TlsNode::with_clients(&clients, |_| {});
    let folder = node.admin.dir.path().to_owned();
    let files = TlsFiles {
        cert: folder.join("server.crt"),
        key: folder.join("server.key"),
        client_ca: Some(folder.join("clients.crt")),
        require_client_cert: false,
        clients: None,
        others_may: None,
    };
    let access = AdminAccess { tls: Some(files), ..AdminAccess::default() };
    let listen = "0.0.0.0:0".parse().unwrap();
    node.admin.start_again(Settings { listen, access, ..node.admin.settings() });
    let port = node.admin.address().port();
    let stranger = agent(TlsConfig::builder().disable_verification(true).build());
    let bearer = format!("Bearer {}", node.admin.token);
    let ask = |host: &str, path: &str, token: Option<&str>| {
        let headers: Vec<_> = token.map(|token| ("authorization", token)).into_iter().collect();
        ask_by(&stranger, &format!("https://{host}:{port}{path}"), "GET", &headers, b"").unwrap()
    };
    let away = own.to_string();
    for path in ["/metrics", "/%6detrics"] {
        ask(&away, path, None).problem(401, "unauthorized");
        ask(&away, path, Some("Bearer wrong")).problem(401, "unauthorized");
    }
    assert_eq!(ask(&away, "/metrics", Some(&bearer)).status, 200);
    assert_eq!(ask("127.0.0.1", "/metrics", None).status, 200, "this node");
    // Readiness says which checks fail, and no more.
    node.admin.facts.lock().unwrap().adoption = berth_admin::StartStep::Waiting("secret words".into());
    for token in [None, Some("Bearer wrong")] {
        let bare = ask(&away, "/readyz", token);
        assert_eq!(bare.problem(503, "not-ready").trim_end_matches("; "), "adoption");
        assert!(!String::from_utf8(bare.body).unwrap().contains("secret words"));
        let bare = ask(&away, "/livez", token).expect(200);
        assert!(bare["checks"].as_array().unwrap().iter().all(|c| c["detail"].is_null()), "{bare}");
    }
    for response in [ask(&away, "/readyz", Some(&bearer)), ask("127.0.0.1", "/readyz", None)] {
        assert!(response.problem(503, "not-ready").contains("adoption: secret words"));
    }
    // The health listener is for probes and scrapes, and closed by other means.
    let health = node.admin.api.as_ref().unwrap().health_address.unwrap();
    assert_eq!(crate::support::admin_node::ask(health, "GET", "/metrics", &[], b"").status, 200);
    let response =
        crate::support::admin_node::ask(health, "GET", "/readyz", &[], b"").problem(503, "not-ready");
    assert!(response.contains("secret words"));
}
