//! The Host header against DNS rebinding: a page of another origin can make a browser resolve its
//! own name to 127.0.0.1, but cannot make it send another name than its own.

use super::problem::{Kind, Problem};
use actix_web::http::header::{HOST, HeaderMap};
use std::net::IpAddr;

/// Whether the request means this machine by a name that only means itself.
pub(super) fn check(headers: &HeaderMap) -> Result<(), Problem> {
    let mut given = headers.get_all(HOST);
    let (first, second) = (given.next(), given.next());
    let host = first.and_then(|h| h.to_str().ok());
    match (host, second) {
        (Some(host), None) if is_loopback(host) => Ok(()),
        _ => Err(Problem::new(
            Kind::Host,
            format!(
                "this listener answers to localhost, 127.0.0.1 and [::1], not to {:?}",
                host.unwrap_or_default().chars().take(80).collect::<String>()
            ),
        )
        .hint("reach it on the node itself, or by `kubectl port-forward`")),
    }
}

fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((name, port)) if port.is_empty() || is_port(port) => name,
            _ => return false,
        },
        None => match host.split_once(':') {
            Some((name, port)) if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) => name,
            Some(_) => return false,
            None => host,
        },
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn is_port(text: &str) -> bool {
    text.strip_prefix(':').is_some_and(|p| !p.is_empty() && p.bytes().all(|b| b.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::is_loopback;

    #[test]
    fn only_names_of_this_machine_are_taken() {
        for host in ["localhost", "LocalHost:9470", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:9470"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:9470",
            "10.0.0.1",
            "::1",
            "[::1]x",
            "localhost:",
            "localhost:x",
            "[::2]",
            "localhost:1:2",
            "0.0.0.0",
        ] {
            assert!(!is_loopback(host), "{host}");
        }
    }
}
