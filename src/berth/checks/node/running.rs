//! The ports of the listeners. A daemon that already runs with this configuration may use them.

use super::line::Line;
use crate::config::Config;
use berth_api::Node;
use berth_cli::client::Client;
use berth_cli::reach::ClientArgs;
use berth_cli::reach::berth_has;
use std::net::TcpListener;

/// Whether a daemon with this configuration runs: it accepts the token of this state folder. With TLS, whether any
/// Berth daemon answers, since its certificate may name no address of this node.
pub(super) fn is_running(config: &Config) -> bool {
    match url(config) {
        Some(url) => node(config, url).is_some(),
        None => berth_has(config.admin_listen),
    }
}

fn node(config: &Config, url: String) -> Option<Node> {
    let args =
        ClientArgs { server: url, token_file: Some(config.token_file.clone()), ..ClientArgs::default() };
    Client::new(&args).and_then(|client| client.get::<Node>("/node")).ok()
}

/// The running daemon's check of whether allocations of ended pods can end; `None` if no daemon answers without TLS.
pub(super) fn evidence(config: &Config) -> Option<Line> {
    const CHECK: &str = "evidence";
    let node = node(config, url(config)?)?;
    let check = node.checks.into_iter().find(|check| check.name == CHECK)?;
    Some(match check.detail {
        None => Line::ok(CHECK, "the kubelet's checkpoint and pod resources can be read"),
        Some(detail) => {
            let fix =
                "let the daemon read the kubelet's folders; `berth allocation list` shows the allocations";
            Line::warn(CHECK, detail, fix)
        }
    })
}

/// The admin API's URL for a daemon with this configuration; `None` if only TLS is served.
fn url(config: &Config) -> Option<String> {
    match (&config.admin.socket, &config.admin.tls) {
        (Some(path), _) => Some(format!("unix://{}", path.display())),
        (None, Some(_)) => None,
        (None, None) => Some(format!("http://{}", config.admin_listen)),
    }
}

pub(super) fn ports(config: &Config) -> Line {
    const CHECK: &str = "admin API";
    let addresses =
        [(Some(config.admin_listen), "--admin-listen"), (config.health_listen, "--health-listen")];
    for (address, flag) in addresses.into_iter().filter_map(|(address, flag)| Some((address?, flag))) {
        let Err(error) = TcpListener::bind(address) else { continue };
        if is_running(config) {
            return Line::ok(CHECK, format!("berth answers at {} already", config.admin_listen));
        }
        let detail = format!("cannot listen on {address}: {error}");
        let fix =
            format!("stop the program that uses it (see ss -ltnp), or choose another address with {flag}");
        return Line::fail(CHECK, detail, fix);
    }
    Line::ok(CHECK, format!("{} is free", config.admin_listen))
}
