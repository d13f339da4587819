//! The listeners' ports, and whether a daemon runs with this very configuration already: then what
//! it has is taken, and all is well.

use super::line::Line;
use crate::config::Config;
use berth_api::Node;
use berth_cli::client::Client;
use berth_cli::connection::ClientArgs;
use berth_cli::reach::berth_has;
use std::net::TcpListener;

/// Whether the daemon that answers at the admin address takes the token of this state folder; where it has TLS,
/// whether it is a daemon of ours with TLS, since its certificate may name no address of this node.
pub(super) fn answers(config: &Config) -> bool {
    match server(config) {
        Some(server) => node(config, server).is_some(),
        None => berth_has(config.admin_listen),
    }
}

fn node(config: &Config, server: String) -> Option<Node> {
    let args = ClientArgs { server, token_file: Some(config.token_file.clone()), ..ClientArgs::default() };
    Client::new(&args).and_then(|client| client.get::<Node>("/node")).ok()
}

/// Whether allocations of pods that ended can end, by the daemon that runs here; `None` where none answers
/// without TLS.
pub(super) fn evidence(config: &Config) -> Option<Line> {
    const CHECK: &str = "evidence";
    let node = node(config, server(config)?)?;
    let check = node.checks.into_iter().find(|check| check.name == CHECK)?;
    Some(match check.detail {
        None => Line::ok(CHECK, "the kubelet's checkpoint and pod resources can be read"),
        Some(stuck) => {
            let fix =
                "let the daemon read the kubelet's folders; `berth allocation list` shows what it holds";
            Line::warn(CHECK, stuck, fix)
        }
    })
}

/// Where a daemon with this configuration answers without TLS.
fn server(config: &Config) -> Option<String> {
    match (&config.admin.socket, &config.admin.tls) {
        (Some(path), _) => Some(format!("unix://{}", path.display())),
        (None, Some(_)) => None,
        (None, None) => Some(format!("http://{}", config.admin_listen)),
    }
}

pub(super) fn ports(config: &Config) -> Line {
    const CHECK: &str = "admin API";
    let all = [(Some(config.admin_listen), "--admin-listen"), (config.health_listen, "--health-listen")];
    for (address, flag) in all.into_iter().filter_map(|(address, flag)| Some((address?, flag))) {
        let Err(error) = TcpListener::bind(address) else { continue };
        if answers(config) {
            return Line::ok(CHECK, format!("berth answers at {} already", config.admin_listen));
        }
        let detail = format!("{address} cannot be listened on: {error}");
        let fix = format!("stop what has it (ss -ltnp shows which), or choose another address with {flag}");
        return Line::fail(CHECK, detail, fix);
    }
    Line::ok(CHECK, format!("{} is free", config.admin_listen))
}
