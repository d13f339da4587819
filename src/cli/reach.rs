//! How to connect to a daemon: HTTP on loopback, HTTPS, or the Unix socket.

use super::connection::ClientArgs;
use super::unix::{NoNames, UnixConnector};
use super::usage::BadUsage;
use anyhow::{Context, bail};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::Agent;
use ureq::config::{Config, ConfigBuilder};
use ureq::http::Uri;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};
use ureq::typestate::AgentScope;

/// Longest wait for the connection.
pub(crate) const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Largest answer to a probe, bytes: a problem has some 500.
const PROBLEM_BYTES_MAX: u64 = 16 * 1024;
/// Most bytes that are read of a certificate or key file, as the daemon has it.
const PEM_BYTES_MAX: u64 = 1024 * 1024;

/// The address of a daemon, and the settings of connections to it.
pub(crate) struct Reach {
    /// What requests begin with: scheme, host and port.
    pub(crate) base: String,
    /// As given by the user, for messages.
    pub(crate) shown: String,
    way: Way,
}

enum Way {
    Plain {
        /// Whether the address is one of this machine.
        stays_here: bool,
    },
    Tls(Box<TlsConfig>),
    Socket(PathBuf),
}

impl Reach {
    /// From the flags.
    ///
    /// # Errors
    /// If the address is none, or a file cannot be read.
    pub(crate) fn of(args: &ClientArgs) -> anyhow::Result<Self> {
        let shown = args.server.clone();
        if let Some(path) = shown.strip_prefix("unix://") {
            if !path.starts_with('/') {
                bail!(BadUsage(format!(
                    "--server (or BERTH_SERVER) {shown:?} is not a socket such as unix:///run/berth/admin.sock"
                )));
            }
            // A request needs a host name; the daemon ignores that of its socket.
            return Ok(Self { base: "http://localhost".into(), way: Way::Socket(path.into()), shown });
        }
        let uri = shown
            .parse()
            .ok()
            .filter(|u: &Uri| matches!(u.scheme_str(), Some("http" | "https")) && u.authority().is_some());
        let Some(uri) = uri else {
            bail!(BadUsage(format!(
                "--server (or BERTH_SERVER) {shown:?} is not an address such as http://127.0.0.1:9470, \
                 https://gpu-1:9470 or unix:///run/berth/admin.sock"
            )));
        };
        if uri.path() != "/" || uri.query().is_some() {
            bail!(BadUsage(format!(
                "--server (or BERTH_SERVER) {shown:?} has a path; only http://HOST:PORT is accepted"
            )));
        }
        let tls = uri.scheme_str() == Some("https");
        let flags = [
            ("--ca-file", &args.ca_file),
            ("--client-cert", &args.client_cert),
            ("--client-key", &args.client_key),
        ];
        if !tls && let Some((flag, _)) = flags.iter().find(|(_, file)| file.is_some()) {
            bail!(BadUsage(format!(
                "{flag} requires a --server that begins with https://, but it is {shown:?}"
            )));
        }
        let scheme = if tls { "https" } else { "http" };
        let base = format!("{scheme}://{}", uri.authority().map(ToString::to_string).unwrap_or_default());
        let way = match tls {
            true => Way::Tls(Box::new(tls_config(args)?)),
            false => Way::Plain { stays_here: uri.host().is_some_and(is_this_machine) },
        };
        Ok(Self { base, way, shown })
    }

    /// Whether the daemon may identify the caller without a token.
    pub(crate) fn may_need_no_token(&self) -> bool {
        match &self.way {
            Way::Plain { .. } => false,
            Way::Tls(tls) => tls.client_cert().is_some(),
            Way::Socket(_) => true,
        }
    }

    /// Whether a token could be read on the network.
    pub(crate) fn shows_the_token(&self) -> bool {
        matches!(self.way, Way::Plain { stays_here: false })
    }

    /// What to check if nothing answers.
    pub(crate) fn advice(&self) -> &'static str {
        match self.way {
            Way::Plain { .. } => {
                "is `berth serve` running there? Without TLS its admin API listens on loopback only, so run this on the \
                 node, or forward the port and give the address with --server or BERTH_SERVER"
            }
            Way::Tls(_) => {
                "is `berth serve` running there, with admin.tls? A CA that this machine does not know is given with \
                 --ca-file"
            }
            Way::Socket(_) => {
                "is `berth serve` running with --admin-socket, and are you root? Only root and the daemon's own user \
                 may connect"
            }
        }
    }

    /// What to check if the answer is not HTTP or TLS fails.
    pub(crate) fn advice_on(&self, cause: &impl std::fmt::Display) -> &'static str {
        let cause = cause.to_string();
        match self.way {
            // Only the text of rustls' error has it.
            Way::Tls(_) if cause.contains("CaUsedAsEndEntity") => {
                "its certificate is that of a CA, which may not be a server's, too: create it again with \
                 basicConstraints CA:FALSE, or let a CA sign one for the server"
            }
            Way::Plain { .. } if cause.contains("protocol") || cause.contains("http parse") => {
                "what listens there does not speak plain HTTP; with admin.tls it is https://..."
            }
            _ => self.advice(),
        }
    }

    /// For one answer, which must be complete within `wait`.
    pub(crate) fn agent(&self, wait: Duration) -> Agent {
        self.made(self.settings().timeout_global(Some(wait)).build())
    }

    /// For an answer without a fixed end: the longest waits for its head and for each piece.
    pub(crate) fn stream_agent(&self, head: Duration, piece: Duration) -> Agent {
        let settings = self.settings().timeout_recv_response(Some(head)).timeout_per_read(Some(piece));
        self.made(settings.build())
    }

    /// Without proxy and redirects, which would get the token.
    fn settings(&self) -> ConfigBuilder<AgentScope> {
        let settings = Agent::config_builder()
            .http_status_as_error(false)
            .proxy(None)
            .max_redirects(0)
            .timeout_connect(Some(CONNECT_MAX));
        match &self.way {
            Way::Tls(tls) => settings.tls_config((**tls).clone()),
            _ => settings,
        }
    }

    fn made(&self, config: Config) -> Agent {
        match &self.way {
            Way::Socket(path) => Agent::with_parts(config, UnixConnector(path.clone()), NoNames),
            _ => config.new_agent(),
        }
    }
}

/// Whether a host is this machine by its text: an address, or `localhost` (RFC 6761, 6.3). Other names may resolve to
/// any machine.
fn is_this_machine(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    match address.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => host.eq_ignore_ascii_case("localhost"),
    }
}

/// Whether a daemon with TLS answers at this address, whatever its certificate. No token is sent, since the server is not
/// verified.
pub fn berth_has(address: SocketAddr) -> bool {
    use_ring();
    let here = match address.ip() {
        ip if !ip.is_unspecified() => ip,
        IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    let agent = Agent::config_builder()
        .http_status_as_error(false)
        .proxy(None)
        .max_redirects(0)
        .timeout_global(Some(CONNECT_MAX))
        .tls_config(TlsConfig::builder().disable_verification(true).build())
        .build()
        .new_agent();
    let asked = agent.get(format!("https://{}/api/v1/node", SocketAddr::new(here, address.port()))).call();
    match asked {
        // Berth's answer to a request without a token.
        Ok(mut answer) => {
            let text = answer.body_mut().with_config().limit(PROBLEM_BYTES_MAX).read_to_string();
            text.is_ok_and(|text| text.contains("/problems/unauthorized"))
        }
        // It requires a client certificate: it has TLS, and shows no more than that.
        Err(error) => error.to_string().contains("CertificateRequired"),
    }
}

fn tls_config(args: &ClientArgs) -> anyhow::Result<TlsConfig> {
    use_ring();
    let roots = match &args.ca_file {
        Some(path) => {
            let all = certificates(path)?;
            RootCerts::new_with_certs(&all)
        }
        None => RootCerts::PlatformVerifier,
    };
    let client = match (&args.client_cert, &args.client_key) {
        (Some(cert), Some(key)) => {
            let pem = read(key)?;
            let key = PrivateKey::from_pem(&pem)
                .ok()
                .with_context(|| format!("{} holds no private key in PEM, unencrypted", key.display()))?;
            Some(ClientCert::new_with_certs(&certificates(cert)?, key))
        }
        (None, None) => None,
        _ => bail!(BadUsage("--client-cert and --client-key must be given together".into())),
    };
    Ok(TlsConfig::builder().root_certs(roots).client_cert(client).build())
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    berth_files::read(path, PEM_BYTES_MAX).with_context(|| format!("cannot read {}", path.display()))
}

fn certificates(path: &Path) -> anyhow::Result<Vec<Certificate<'static>>> {
    let mut all = Vec::new();
    for item in parse_pem(&read(path)?) {
        match item {
            Ok(PemItem::Certificate(certificate)) => all.push(certificate),
            Ok(_) => {}
            Err(_) => bail!("{} is no PEM", path.display()),
        }
    }
    if all.is_empty() {
        bail!("{} holds no certificate in PEM", path.display());
    }
    Ok(all)
}

/// Selects ring as the cryptography of rustls, which ureq uses.
pub fn use_ring() {
    // An error means that a provider is selected already.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
