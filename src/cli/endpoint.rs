//! How to connect to a daemon: the flags that every command for a running daemon takes; HTTP on loopback, HTTPS, or the
//! Unix socket.

use crate::output::Output;
use crate::usage::BadUsage;
use anyhow::{Context, bail};
use berth_files::socket::connect_within;
use clap::Args;
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::config::{Config, ConfigBuilder};
use ureq::http::Uri;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};
use ureq::typestate::AgentScope;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport,
};
use ureq::{Agent, Error};

/// Longest wait for the connection.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Largest answer to a probe, bytes: a problem has some 500.
const PROBLEM_BYTES_MAX: u64 = 16 * 1024;
/// Most bytes that are read of a certificate or key file, as the daemon has it.
const PEM_BYTES_MAX: u64 = 1024 * 1024;

/// The address of a daemon, and the settings of connections to it.
pub(crate) struct Endpoint {
    /// What requests begin with: scheme, host and port.
    pub(crate) base: String,
    /// As given by the user, for messages.
    pub(crate) shown: String,
    way: Connection,
}

enum Connection {
    Plain {
        /// Whether the address is one of this machine.
        is_local: bool,
    },
    Tls(Box<TlsConfig>),
    Socket(PathBuf),
}

impl Endpoint {
    /// From the flags.
    ///
    /// # Errors
    /// If the address is invalid, or a file cannot be read.
    pub(crate) fn of(args: &ClientArgs) -> anyhow::Result<Self> {
        let shown = args.server.clone();
        if let Some(path) = shown.strip_prefix("unix://") {
            if !path.starts_with('/') {
                bail!(BadUsage(format!(
                    "--server (or BERTH_SERVER) {shown:?} is not a socket such as unix:///run/berth/admin.sock"
                )));
            }
            // A request needs a host name; the daemon ignores that of its socket.
            return Ok(Self { base: "http://localhost".into(), way: Connection::Socket(path.into()), shown });
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
            true => Connection::Tls(Box::new(tls_config(args)?)),
            false => Connection::Plain { is_local: uri.host().is_some_and(is_this_machine) },
        };
        Ok(Self { base, way, shown })
    }

    /// Whether the daemon may identify the caller without a token.
    pub(crate) fn may_need_no_token(&self) -> bool {
        match &self.way {
            Connection::Plain { .. } => false,
            Connection::Tls(tls) => tls.client_cert().is_some(),
            Connection::Socket(_) => true,
        }
    }

    /// Whether a token could be read on the network.
    pub(crate) fn shows_the_token(&self) -> bool {
        matches!(self.way, Connection::Plain { is_local: false })
    }

    /// What to check if nothing answers.
    pub(crate) fn advice(&self) -> &'static str {
        match self.way {
            Connection::Plain { .. } => {
                "is `berth serve` running there? Without TLS its admin API listens on loopback only, so run this on the \
                 node, or forward the port and give the address with --server or BERTH_SERVER"
            }
            Connection::Tls(_) => {
                "is `berth serve` running there, with admin.tls? A CA that this machine does not know is given with \
                 --ca-file"
            }
            Connection::Socket(_) => {
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
            Connection::Tls(_) if cause.contains("CaUsedAsEndEntity") => {
                "its certificate is a CA certificate, which a server must not use: create it again with \
                 basicConstraints CA:FALSE, or let a CA sign one for the server"
            }
            Connection::Plain { .. } if cause.contains("protocol") || cause.contains("http parse") => {
                "the server at this address does not use plain HTTP; with admin.tls the address begins with https://"
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
            Connection::Tls(tls) => settings.tls_config((**tls).clone()),
            _ => settings,
        }
    }

    fn made(&self, config: Config) -> Agent {
        match &self.way {
            Connection::Socket(path) => Agent::with_parts(config, UnixConnector(path.clone()), NoNames),
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

/// Whether a daemon answers at this address by this scheme, `http` or `https`, whatever its certificate. No token is
/// sent, since the server is not verified.
pub fn is_berth_at(scheme: &str, address: SocketAddr) -> bool {
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
    let response =
        agent.get(format!("{scheme}://{}/api/v1/node", SocketAddr::new(here, address.port()))).call();
    match response {
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
            Err(_) => bail!("{} is not a PEM file", path.display()),
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

/// How to reach a running daemon, and how to print its answers. `berth options` shows how to reach it; the help of each
/// command leaves that out, since it would be half of it.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Connection to a running daemon")]
pub struct ClientArgs {
    /// Address of the daemon's admin API: http://, https:// or unix:///PATH, the socket of --admin-socket
    #[arg(
        long,
        global = true,
        env = "BERTH_SERVER",
        value_name = "URL",
        default_value = "http://127.0.0.1:9470",
        hide_short_help = true
    )]
    pub server: String,
    /// The file with the daemon's token, created when the daemon first starts [default: /var/lib/berth/token;
    /// for `serve` and `node check`: token in the state folder]
    #[arg(long, global = true, env = "BERTH_TOKEN_FILE", value_name = "FILE", hide_short_help = true)]
    pub token_file: Option<PathBuf>,
    /// With https: CA certificates to verify the daemon's certificate, PEM [default: those of this machine]
    #[arg(long, global = true, env = "BERTH_CA_FILE", value_name = "FILE", hide_short_help = true)]
    pub ca_file: Option<PathBuf>,
    /// With https: a client certificate instead of a token, PEM
    #[arg(long, global = true, env = "BERTH_CLIENT_CERT", value_name = "FILE", hide_short_help = true)]
    pub client_cert: Option<PathBuf>,
    /// The key of the client certificate, PEM
    #[arg(long, global = true, env = "BERTH_CLIENT_KEY", value_name = "FILE", hide_short_help = true)]
    pub client_key: Option<PathBuf>,
    /// Send the token over http:// to another machine; anyone on the network path can read it
    #[arg(long, global = true, hide_short_help = true)]
    pub allow_plain_http: bool,
    /// Output format: table, wide (all columns), json or yaml
    #[arg(
        short,
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        hide_possible_values = true,
        hide_default_value = true,
        help_heading = None::<&str>,
        display_order = 1001
    )]
    pub output: Output,
    /// Repeat every 2 s, or as in `-w=500ms` (lists, `show`)
    #[arg(
        short,
        long,
        global = true,
        help_heading = None::<&str>,
        display_order = 1002,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2s",
        value_parser = super::usage::interval
    )]
    pub watch: Option<Duration>,
}

impl ClientArgs {
    /// The token file that was named, or where a daemon has it by default.
    #[must_use]
    pub fn token_file(&self) -> PathBuf {
        self.token_file.clone().unwrap_or_else(|| "/var/lib/berth/token".into())
    }
}

/// HTTP over the daemon's Unix socket: connects to one socket, whatever the address of a request says.
#[derive(Debug)]
struct UnixConnector(PathBuf);

impl<In: Transport> Connector<In> for UnixConnector {
    type Out = UnixTransport;

    fn connect(
        &self,
        details: &ConnectionDetails<'_>,
        _: Option<In>,
    ) -> Result<Option<UnixTransport>, Error> {
        let wait = details.timeout.not_zero().map_or(CONNECT_MAX, |left| CONNECT_MAX.min(*left));
        let stream = connect_within(&self.0, wait).map_err(|error| match error.kind() {
            ErrorKind::TimedOut => Error::Timeout(details.timeout.reason),
            _ => error.into(),
        })?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(UnixTransport { stream, buffers }))
    }
}

/// There is no name to look up.
#[derive(Debug)]
struct NoNames;

impl Resolver for NoNames {
    fn resolve(&self, _: &Uri, _: &Config, _: NextTimeout) -> Result<ResolvedSocketAddrs, Error> {
        let mut addresses = self.empty();
        // The library requires at least one address; it is not connected to.
        addresses.push((IpAddr::from([127, 0, 0, 1]), 0).into());
        Ok(addresses)
    }
}

/// One connection.
struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
}

impl fmt::Debug for UnixTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnixTransport").finish_non_exhaustive()
    }
}

/// The error of a wait that was too long.
fn late(error: io::Error, timeout: NextTimeout) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(timeout.reason),
        _ => error.into(),
    }
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.stream.set_write_timeout(timeout.not_zero().map(|t| *t))?;
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output).map_err(|error| late(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.stream.set_read_timeout(timeout.not_zero().map(|t| *t))?;
        let input = self.buffers.input_append_buf();
        let amount = loop {
            match self.stream.read(input) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other.map_err(|error| late(error, timeout))?,
            }
        };
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    /// Each request has an agent of its own, so none is used again.
    fn is_open(&mut self) -> bool {
        false
    }
}
