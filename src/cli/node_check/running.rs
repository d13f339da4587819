//! The listeners' ports, and whether a daemon runs with this very configuration already: then what
//! it has is taken, and all is well.

use super::Line;
use crate::admin::dto::Node;
use crate::cli::args::ClientArgs;
use crate::cli::client::Client;
use crate::cli::reach::berth_has;
use crate::config::Config;
use std::net::TcpListener;

/// Whether the daemon that answers at the admin address takes the token of this state folder; where it has TLS,
/// whether it is a daemon of ours with TLS, since its certificate may name no address of this node.
pub(super) fn answers(config: &Config) -> bool {
    let server = match (&config.admin.socket, &config.admin.tls) {
        (Some(path), _) => format!("unix://{}", path.display()),
        (None, Some(_)) => return berth_has(config.admin_listen),
        (None, None) => format!("http://{}", config.admin_listen),
    };
    let args = ClientArgs { server, token_file: Some(config.token_file.clone()), ..ClientArgs::default() };
    Client::new(&args).and_then(|client| client.get::<Node>("/node")).is_ok()
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
