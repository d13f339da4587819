//! The listeners and the threads behind them: bound at start, run once the ledger is open, stopped
//! within a second.

use super::access::Access;
use super::socket::AdminSocket;
use super::state::State;
use super::{Settings, events, gzip, peer, routes};
use crate::admission::{self, Door};
use actix_web::http::KeepAlive;
use actix_web::middleware::{Compress, from_fn};
use actix_web::rt;
use actix_web::web::{Data, ServiceConfig};
use actix_web::{App, HttpServer, dev};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Workers of the admin listener. Fixed: GPU nodes have 96 to 256 processors.
const WORKERS: usize = 2;
/// Connections of each worker; the rest waits in the system's queue. Two workers serve a few
/// operators, browsers (6 connections each) and scripts.
const CONNECTIONS_PER_WORKER: usize = 128;
/// What was sent and not acknowledged for so long ends its connection: a client that does not read
/// holds its place, and what the system buffers for it, no longer. Milliseconds.
const UNREAD_MS_MAX: u32 = 60_000;
/// Connections of the health listener's one worker: probes, one at a time.
const HEALTH_CONNECTIONS: usize = 64;
/// Threads of a worker for what may block: uploads and module reads.
const BLOCKING_THREADS: usize = 4;
/// Connections of the Unix socket's one worker: root and its scripts.
const SOCKET_CONNECTIONS: usize = 64;
/// Longest time for a TLS handshake. At most 256 are under way at a time in each worker, by the library.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);
/// Longest time for a request's head to come in. Its size is limited by the library: 128 KiB, 96
/// headers.
const HEAD_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for the next request on a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Longest time for a connection to close.
const CLOSE_WAIT: Duration = Duration::from_millis(500);
/// Longest that requests under way may take once a stop was asked for.
const FINISH_WAIT: Duration = Duration::from_millis(500);
/// How often that is looked at.
const FINISH_LOOK: Duration = Duration::from_millis(10);
/// For the last answers to leave after their handlers are done: they go to local sockets.
const FLUSH_WAIT: Duration = Duration::from_millis(50);
/// Longest that [`Running::stop`] waits in all.
const STOP_MAX: Duration = Duration::from_millis(900);

/// Why the API cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Somebody else listens there.
    #[error(
        "{address} is taken by another process: stop it (`ss -ltnp` shows which), or choose another address with {flag}"
    )]
    Taken {
        /// The address.
        address: SocketAddr,
        /// The flag that chooses another one.
        flag: &'static str,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: choose another address with {flag}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The flag that chooses another one.
        flag: &'static str,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The token can be neither read nor made.
    #[error("the token file {path} cannot be used: {rule}")]
    Token {
        /// The file.
        path: PathBuf,
        /// What to do.
        rule: &'static str,
        /// The system's word, where there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// A file of TLS cannot be used.
    #[error("the TLS file {path} {rule} (admin.tls in the configuration)")]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        rule: String,
        /// The system's word, where there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// The Unix socket cannot be listened on.
    #[error("the admin socket {path} cannot be used: {rule}")]
    Socket {
        /// The file.
        path: PathBuf,
        /// What to do.
        rule: &'static str,
        /// The system's word, where there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// The system gives no thread or socket.
    #[error("cannot start the admin API's threads")]
    Threads(#[source] io::Error),
}

/// What both listeners have in common. A macro, because the type of a server names its handlers.
macro_rules! limited {
    ($server:expr) => {
        $server
            .worker_max_blocking_threads(BLOCKING_THREADS)
            .client_request_timeout(HEAD_WAIT)
            .client_disconnect_timeout(CLOSE_WAIT)
            .keep_alive(KeepAlive::Timeout(KEEP_ALIVE))
            .on_connect(peer::note)
            .disable_signals()
    };
}

/// A server that listens but does not answer yet: connections wait in the system's queue.
pub struct Server {
    settings: Settings,
    access: Access,
    admin: TcpListener,
    health: Option<TcpListener>,
    socket: Option<AdminSocket>,
}

/// A server that answers. Dropping it stops it without waiting.
pub struct Running {
    stop: tokio::sync::mpsc::Sender<()>,
    stopped: mpsc::Receiver<()>,
    /// Where the API listens: the port that the system gave, if 0 was asked for.
    pub address: SocketAddr,
    /// The same as a URL, `https` with TLS.
    pub url: String,
    /// Where health is served.
    pub health_address: Option<SocketAddr>,
}

impl Server {
    /// Listens, and reads the token or makes one. A taken port fails here, before anything else
    /// has begun.
    ///
    /// # Errors
    /// If an address or the token file cannot be used; says what to do.
    pub fn bind(settings: Settings) -> Result<Self, AdminError> {
        let admin = listen(settings.listen, "--admin-listen")?;
        let health = settings.health_listen.map(|address| listen(address, "--health-listen"));
        let health = health.transpose()?;
        let access = Access::open(&settings)?;
        let socket = settings.access.socket.as_deref().map(AdminSocket::bind).transpose()?;
        Ok(Self { settings, access, admin, health, socket })
    }

    /// Answers, on threads of its own.
    ///
    /// # Errors
    /// If the system gives no thread or socket; whatever was started ends again.
    pub fn run(self, door: Door) -> Result<Running, AdminError> {
        let address = self.admin.local_addr().map_err(AdminError::Threads)?;
        let health_address = self.health.as_ref().map(TcpListener::local_addr);
        let health_address = health_address.transpose().map_err(AdminError::Threads)?;
        let scheme = if self.access.tls().is_some() { "https" } else { "http" };
        let (stop, stops) = tokio::sync::mpsc::channel(1);
        let (ended, stopped) = mpsc::channel();
        let (started, starts) = mpsc::channel();
        let thread = std::thread::Builder::new().name("admin".into());
        let work = move || {
            // With all its workers and their threads for what may block: they are started from here.
            admission::step_back();
            rt::System::new().block_on(self.serve(door, stops, &started));
            let _ = ended.send(());
        };
        thread.spawn(work).map_err(AdminError::Threads)?;
        match starts.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(AdminError::Threads(error)),
            Err(gone) => return Err(AdminError::Threads(io::Error::other(gone))),
        }
        tracing::debug!(%address, "the admin API answers");
        Ok(Running { stop, stopped, address, url: format!("{scheme}://{address}"), health_address })
    }

    async fn serve(
        self,
        door: Door,
        mut stops: tokio::sync::mpsc::Receiver<()>,
        started: &mpsc::Sender<io::Result<()>>,
    ) {
        let state = Data::new(State::new(&self.settings, self.access, door));
        let (socket, _file) = self.socket.map(AdminSocket::split).unzip();
        let servers = match start(&state, self.admin, self.health, socket) {
            Ok(servers) => servers,
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let handles: Vec<_> = servers.iter().map(dev::Server::handle).collect();
        // From before the first answer: what a client changes is told.
        let feed = events::keep(state.clone());
        let running: Vec<_> = servers.into_iter().map(rt::spawn).collect();
        let _ = started.send(Ok(()));
        let feeding = rt::spawn(feed);
        tokio::select! {
            _ = stops.recv() => {}
            () = look_at_tls(&state, self.settings.tls_look) => {}
        }
        // The library's own graceful stop looks only once a second whether all are done.
        state.gate.close();
        feeding.abort();
        state.feed.close("the daemon stops");
        let until = tokio::time::Instant::now() + FINISH_WAIT;
        while !state.gate.is_empty() && tokio::time::Instant::now() < until {
            tokio::time::sleep(FINISH_LOOK).await;
        }
        tokio::time::sleep(FLUSH_WAIT).await;
        for handle in handles {
            handle.stop(false).await;
        }
        for server in running {
            if let Ok(Err(error)) = server.await {
                tracing::error!(%error, "the admin API ended");
            }
        }
    }
}

impl Running {
    /// Lets requests under way finish, for at most half a second, and ends. Blocks for less than
    /// one second.
    pub fn stop(self) {
        let _ = self.stop.try_send(());
        if self.stopped.recv_timeout(STOP_MAX) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the admin API was still at work when the daemon ended");
        }
    }
}

fn start(
    state: &Data<State>,
    admin: TcpListener,
    health: Option<TcpListener>,
    socket: Option<UnixListener>,
) -> io::Result<Vec<dev::Server>> {
    let mut servers = Vec::new();
    let shared = state.clone();
    let server = HttpServer::new(move || {
        let routes = |config: &mut ServiceConfig| routes::admin(config);
        let app = App::new().app_data(shared.clone()).configure(routes);
        app.wrap(from_fn(gzip::here)).wrap(Compress::default()).wrap(from_fn(routes::admin_gate))
    });
    let server = limited!(server.workers(WORKERS).max_connections(CONNECTIONS_PER_WORKER));
    let server = match state.access.tls() {
        Some(tls) => server
            .tls_handshake_timeout(HANDSHAKE_WAIT)
            .listen_rustls_0_23(admin, tls.server_config().map_err(io::Error::other)?)?,
        None => server.listen(admin)?,
    };
    servers.push(server.run());
    if let Some(listener) = socket {
        // Workers and connections of its own: root gets in while the others are all taken.
        let shared = state.clone();
        let server = HttpServer::new(move || {
            let routes = |config: &mut ServiceConfig| routes::admin(config);
            App::new().app_data(shared.clone()).configure(routes).wrap(from_fn(routes::admin_gate))
        });
        let server = limited!(server.workers(1).max_connections(SOCKET_CONNECTIONS));
        servers.push(server.listen_uds(listener)?.run());
    }
    if let Some(listener) = health {
        let shared = state.clone();
        let server = HttpServer::new(move || {
            let routes = |config: &mut ServiceConfig| routes::health(config);
            App::new().app_data(shared.clone()).configure(routes).wrap(from_fn(routes::health_gate))
        });
        let server = server.workers(1).max_connections(HEALTH_CONNECTIONS);
        servers.push(limited!(server).listen(listener)?.run());
    }
    Ok(servers)
}

/// Takes renewed files of TLS over; never ends. They are small, and read on the thread that waits for the
/// stop, which answers nobody.
async fn look_at_tls(state: &State, every: Duration) {
    let Some(tls) = state.access.tls() else { return std::future::pending().await };
    loop {
        tokio::time::sleep(every).await;
        tls.look();
    }
}

fn listen(address: SocketAddr, flag: &'static str) -> Result<TcpListener, AdminError> {
    let listener = TcpListener::bind(address).map_err(|source| {
        if source.kind() == ErrorKind::AddrInUse {
            AdminError::Taken { address, flag }
        } else {
            AdminError::Listen { address, flag, source }
        }
    })?;
    // Every connection has it from its listener. A system without it serves all the same.
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&listener, UNREAD_MS_MAX);
    Ok(listener)
}
