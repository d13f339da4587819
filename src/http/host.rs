//! Checks the Host header against DNS rebinding: a page of another origin can make a browser resolve its own name to
//! 127.0.0.1, but cannot send another name than its own.

use super::failure::Failure;
use actix_web::http::header::{HOST, HeaderMap};
use berth_api::Kind;
use std::net::IpAddr;

/// Checks that the request names this machine by a name that means only itself.
pub(super) fn check(headers: &HeaderMap) -> Result<(), Failure> {
    let mut given = headers.get_all(HOST);
    let (first, second) = (given.next(), given.next());
    let host = first.and_then(|h| h.to_str().ok());
    match (host, second) {
        (Some(host), None) if is_loopback(host) => Ok(()),
        _ => Err(Failure::new(
            Kind::Host,
            format!(
                "this listener answers to localhost, 127.0.0.1 and [::1], not to {:?}",
                host.unwrap_or_default().chars().take(80).collect::<String>()
            ),
        )
        .hint("reach it on the node itself, or by `kubectl port-forward`")),
    }
}

/// Checks that a browser that sends its certificate does so for a page of this API. Other programs send neither
/// header.
pub(super) fn same_site(headers: &HeaderMap) -> Result<(), Failure> {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let own = match (text("sec-fetch-site"), text("origin")) {
        (Some(site), _) => matches!(site, "same-origin" | "none"),
        (None, Some(origin)) => text("host").is_some_and(|host| origin == format!("https://{host}")),
        (None, None) => true,
    };
    match own {
        true => Ok(()),
        false => Err(Failure::new(
            Kind::Forbidden,
            "the request for this change comes from a page of another site",
        )
        .hint("open the daemon's own page for it")),
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
    use super::*;
    use actix_web::http::header::{HeaderName, HeaderValue};

    #[test]
    fn a_page_of_another_site_changes_nothing_with_a_browsers_certificate() {
        let may = |given: &[(&str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in given {
                let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
                headers.insert(name, HeaderValue::from_str(value).unwrap());
            }
            same_site(&headers).is_ok()
        };
        let host = ("host", "gpu-1:9470");
        assert!(may(&[host]));
        assert!(may(&[host, ("origin", "https://gpu-1:9470")]));
        assert!(may(&[host, ("sec-fetch-site", "same-origin"), ("origin", "https://gpu-1:9470")]));
        for closed in [
            [host, ("origin", "https://evil.example")],
            [host, ("origin", "http://gpu-1:9470")],
            [host, ("origin", "null")],
            [host, ("sec-fetch-site", "cross-site")],
            [host, ("sec-fetch-site", "same-site")],
        ] {
            assert!(!may(&closed), "{closed:?}");
        }
    }

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
