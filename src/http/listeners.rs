//! The listeners and their threads: bound at start, run once the ledger is open, stopped within a second.

use crate::access::AccessControl;
use crate::connection::{self, Connection};
use crate::connection_slots::{ConnectionSlots, SWEEP_EVERY, UNREAD_MAX};
use crate::gate::{self, Context};
use crate::guarded;
use crate::on_demand::on_demand;
use crate::route_table::{Listener, RouteTable};
use crate::settings::{AdminError, Settings};
use crate::unix_socket::AdminSocket;
use crate::{clock_guard, compress};
use actix_http::HttpService;
use actix_server::ServerBuilder;
use actix_service::{IntoServiceFactory, ServiceFactoryExt, fn_service, map_config};
use actix_tls::accept::rustls_0_23::Acceptor;
use actix_web::dev::{self, AppConfig};
use actix_web::http::KeepAlive;
use actix_web::middleware::{Compress, from_fn};
use actix_web::web::{Data, ServiceConfig};
use actix_web::{App, rt};
use berth_observe::counters::{Counters, MALFORMED};
use std::cell::RefCell;
use std::future::{Future, ready};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Workers of the admin listener. Fixed: GPU nodes have 96 to 256 processors.
const WORKERS: usize = 2;
/// Connections of the admin listener: for some operators, browsers (6 connections each) and scripts. A further one
/// replaces another ([`crate::connection_slots`]). With buffers of 8 KiB each way they take 4 MiB, and with TLS some
/// 16 KiB more each.
const CONNECTIONS: usize = 256;
/// Connections of each worker that have lost their slot and are not closed yet, which takes some milliseconds, or
/// wait for a slot; beyond that, new ones wait in the system's queue. All listeners together have at most 256 + 64 +
/// 64 connections and 4 x 32 of these, so 512 descriptors: half of a process's usual limit.
const CLOSING_MAX: usize = 32;
/// Connections of the health listener: probes, one at a time, and scrapes.
const HEALTH_CONNECTIONS: usize = 64;
/// Connections that wait to be accepted; the system's own limit, usually 4,096, holds too.
const BACKLOG: i32 = 4_096;
/// The system's send buffer of a connection, bytes; the system doubles it for its own needs. Its default may grow to
/// 4 MiB (`tcp_wmem`) for each connection, which counts against the pod's memory limit.
const SEND_BUFFER: usize = 64 * 1024;
/// Blocking threads of a worker: for uploads and reads of modules.
const BLOCKING_THREADS: usize = 4;
/// Connections of the Unix socket: root and its scripts.
const SOCKET_CONNECTIONS: usize = 64;
/// Deadline of a TLS handshake. The library limits them to 256 at the same time in each worker, which is more than it
/// has connections.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(5);
/// Deadline of a connection's first head; for later ones see [`crate::connection_slots::IDLE_MAX`]. The library limits
/// its size: 128 KiB, 96 headers.
const HEAD_WAIT: Duration = Duration::from_secs(5);
/// Longest wait for the next request on a connection.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// Longest time for a connection to close.
const CLOSE_WAIT: Duration = Duration::from_millis(500);
/// Longest time for requests in progress to finish after a stop.
const FINISH_WAIT: Duration = Duration::from_millis(500);
/// How often the requests and connections in progress are checked then.
const FINISH_POLL: Duration = Duration::from_millis(5);
/// Time for the last responses to leave after their handlers have finished: they go to local sockets.
const FLUSH_WAIT: Duration = Duration::from_millis(50);
/// Longest duration of [`RunningServer::stop`].
const STOP_MAX: Duration = Duration::from_millis(900);

/// The routes that the listeners serve.
pub trait Application: Clone + Send + 'static {
    /// Its routes.
    fn routes() -> &'static RouteTable;

    /// Adds the data of the handlers.
    fn data(&self, config: &mut ServiceConfig);

    /// Ends responses that last as long as their clients. Called once no request is accepted any more.
    fn stop(&self);
}

/// The application of any listener. A macro, because the type of an app names its handlers.
macro_rules! http {
    ($app:expr) => {{
        let app = $app.into_factory().map_err(|error: actix_web::Error| error.error_response());
        on_demand(map_config(app, |()| AppConfig::default()), |app| {
            HttpService::build()
                .keep_alive(KeepAlive::Timeout(KEEP_ALIVE))
                .client_request_timeout(HEAD_WAIT)
                .client_disconnect_timeout(CLOSE_WAIT)
                .on_connect_ext(connection::note)
                .h1(app)
                .map_err(drop)
        })
    }};
}

/// A server that listens but does not respond yet: connections wait in the system's queue.
pub struct Server {
    settings: Settings,
    access: AccessControl,
    admin: TcpListener,
    health: Option<TcpListener>,
    socket: Option<AdminSocket>,
}

/// A running server. Dropping it stops it without waiting.
pub struct RunningServer {
    stop: tokio::sync::mpsc::Sender<()>,
    stopped: mpsc::Receiver<()>,
    /// The address of the API, with the port that the system chose if 0 was requested.
    pub address: SocketAddr,
    /// The address as a URL, `https` with TLS.
    pub url: String,
    /// The address of the health listener.
    pub health_address: Option<SocketAddr>,
}

impl Server {
    /// Listens, and reads or creates the token. A port in use fails here, before anything else has started.
    ///
    /// # Errors
    /// If an address or the token file cannot be used, with what to do.
    pub fn bind(settings: Settings) -> Result<Self, AdminError> {
        let admin = listen(settings.listen, "--admin-listen")?;
        let health = settings.health_listen.map(|address| listen(address, "--health-listen"));
        let health = health.transpose()?;
        let access = AccessControl::open(&settings)?;
        let socket = settings.access.socket.as_deref().map(AdminSocket::bind).transpose()?;
        Ok(Self { settings, access, admin, health, socket })
    }

    /// The address of the API, with the port that the system chose if 0 was requested.
    ///
    /// # Errors
    /// If the system does not know it.
    pub fn address(&self) -> Result<SocketAddr, AdminError> {
        self.admin.local_addr().map_err(AdminError::Threads)
    }

    /// Serves requests, on threads of its own. The future that `application` returns runs from before the first response until
    /// the listeners stop.
    ///
    /// # Errors
    /// If the system refuses a thread or socket; everything that was started ends again.
    pub fn run<A: Application, F: Future<Output = ()> + 'static>(
        self,
        counters: Arc<Counters>,
        application: impl FnOnce(Arc<Context>) -> (A, F) + Send + 'static,
    ) -> Result<RunningServer, AdminError> {
        let address = self.address()?;
        let health_address = self.health.as_ref().map(TcpListener::local_addr);
        let health_address = health_address.transpose().map_err(AdminError::Threads)?;
        clock_guard::watch();
        let scheme = if self.access.tls().is_some() { "https" } else { "http" };
        let (stop, stops) = tokio::sync::mpsc::channel(1);
        let (ended, stopped) = mpsc::channel();
        let (started, starts) = mpsc::channel();
        let thread = std::thread::Builder::new().name("admin".into());
        let work = move || {
            rt::System::new().block_on(self.serve(counters, application, stops, &started));
            let _ = ended.send(());
        };
        thread.spawn(work).map_err(AdminError::Threads)?;
        match starts.recv() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(AdminError::Threads(error)),
            Err(gone) => return Err(AdminError::Threads(io::Error::other(gone))),
        }
        tracing::debug!(%address, "the admin API is listening");
        Ok(RunningServer { stop, stopped, address, url: format!("{scheme}://{address}"), health_address })
    }

    async fn serve<A: Application, F: Future<Output = ()> + 'static>(
        self,
        counters: Arc<Counters>,
        application: impl FnOnce(Arc<Context>) -> (A, F),
        mut stops: tokio::sync::mpsc::Receiver<()>,
        started: &mpsc::Sender<io::Result<()>>,
    ) {
        let context = Arc::new(Context::new(self.access, A::routes(), counters));
        let (application, background) = application(Arc::clone(&context));
        let (socket, _file) = self.socket.map(AdminSocket::split).unzip();
        let (servers, slots) = match start(&context, &application, self.admin, self.health, socket) {
            Ok(started) => started,
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let handles: Vec<_> = servers.iter().map(dev::Server::handle).collect();
        let running: Vec<_> = servers.into_iter().map(rt::spawn).collect();
        let _ = started.send(Ok(()));
        let malformed = Rc::<RefCell<Malformed>>::default();
        let sweeps = slots.iter().map(|slots| rt::spawn(sweep(Arc::clone(slots), Rc::clone(&malformed))));
        let (background, sweeps) = (rt::spawn(background), sweeps.collect::<Vec<_>>());
        tokio::select! {
            _ = stops.recv() => {}
            () = watch_tls_files(&context, self.settings.tls_poll_interval) => {}
        }
        // The library's own graceful stop checks only once a second whether all requests have finished.
        context.gate.close();
        background.abort();
        sweeps.iter().for_each(rt::task::JoinHandle::abort);
        application.stop();
        let until = tokio::time::Instant::now() + FINISH_WAIT;
        while !context.gate.is_empty() && tokio::time::Instant::now() < until {
            tokio::time::sleep(FINISH_POLL).await;
        }
        let until = tokio::time::Instant::now() + FLUSH_WAIT;
        let has_active = || slots.iter().any(|slots| slots.has_active(FLUSH_WAIT));
        while has_active() && tokio::time::Instant::now() < until {
            tokio::time::sleep(FINISH_POLL).await;
        }
        for handle in handles {
            handle.stop(false).await;
        }
        for server in running {
            if let Ok(Err(error)) = server.await {
                tracing::error!(%error, "the admin API server stopped with an error");
            }
        }
    }
}

impl RunningServer {
    /// Lets requests in progress finish, for at most half a second, and stops. Blocks for less than a second.
    pub fn stop(self) {
        let _ = self.stop.try_send(());
        if self.stopped.recv_timeout(STOP_MAX) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the admin API had not finished its requests when the daemon stopped");
        }
    }
}

fn start<A: Application>(
    context: &Arc<Context>,
    application: &A,
    admin: TcpListener,
    health: Option<TcpListener>,
    socket: Option<UnixListener>,
) -> io::Result<(Vec<dev::Server>, Vec<Arc<ConnectionSlots>>)> {
    let (mut servers, mut all_slots) = (Vec::new(), Vec::new());
    let mut slots = |what, most| {
        let slots = ConnectionSlots::new(what, most);
        all_slots.push(Arc::clone(&slots));
        slots
    };
    let context = Data::from(Arc::clone(context));
    let (shared, own) = (context.clone(), application.clone());
    let app = move || {
        let app = App::new().app_data(shared.clone()).configure(gate::problems);
        let app = app.configure(|config| serve_routes(&own, Listener::Admin, config));
        app.wrap(from_fn(compress::here)).wrap(Compress::default()).wrap(from_fn(gate::admin_gate))
    };
    let server = builder(WORKERS, CONNECTIONS);
    let taken = slots("admin", CONNECTIONS);
    let server = match context.access.tls() {
        Some(tls) => {
            let mut acceptor = Acceptor::new(tls.server_config().map_err(io::Error::other)?);
            acceptor.set_handshake_timeout(HANDSHAKE_WAIT);
            server.listen("admin", admin, move || {
                let taken = Arc::clone(&taken);
                fn_service(move |io| Connection::tcp(io, Arc::clone(&taken)))
                    .and_then(clock_guard::guard())
                    .and_then(acceptor.clone().map_err(drop))
                    .and_then(|tls| ready(Ok((tls, None))))
                    .and_then(http!(app()))
            })?
        }
        None => server.listen("admin", admin, move || {
            let taken = Arc::clone(&taken);
            fn_service(move |io| Connection::tcp(io, Arc::clone(&taken)))
                .and_then(clock_guard::guard())
                .and_then(|wire| ready(Ok((wire, None))))
                .and_then(http!(app()))
        })?,
    };
    servers.push(server.run());
    if let Some(listener) = socket {
        // Workers and connections of its own: root can connect while all others are in use.
        let (shared, own) = (context.clone(), application.clone());
        let taken = slots("socket", SOCKET_CONNECTIONS);
        let server = builder(1, SOCKET_CONNECTIONS).listen_uds("socket", listener, move || {
            let app = App::new().app_data(shared.clone()).configure(gate::problems);
            let app = app.configure(|config| serve_routes(&own, Listener::Admin, config));
            let taken = Arc::clone(&taken);
            fn_service(move |io| Connection::unix(io, Arc::clone(&taken)))
                .and_then(clock_guard::guard())
                .and_then(|wire| ready(Ok((wire, None))))
                .and_then(http!(app.wrap(from_fn(gate::admin_gate))))
        })?;
        servers.push(server.run());
    }
    if let Some(listener) = health {
        let (shared, own) = (context, application.clone());
        let taken = slots("health", HEALTH_CONNECTIONS);
        let server = builder(1, HEALTH_CONNECTIONS).listen("health", listener, move || {
            let app = App::new().app_data(shared.clone()).configure(gate::problems);
            let app = app.configure(|config| serve_routes(&own, Listener::Health, config));
            let taken = Arc::clone(&taken);
            fn_service(move |io| Connection::tcp(io, Arc::clone(&taken)))
                .and_then(clock_guard::guard())
                .and_then(|wire| ready(Ok((wire, None))))
                .and_then(http!(app.wrap(from_fn(gate::health_gate))))
        })?;
        servers.push(server.run());
    }
    Ok((servers, all_slots))
}

/// Adds the routes of a listener and then their data, so that nothing which the data adds comes before a route.
fn serve_routes<A: Application>(application: &A, listener: Listener, config: &mut ServiceConfig) {
    guarded::register(A::routes(), config, listener);
    application.data(config);
}

fn builder(workers: usize, connections: usize) -> ServerBuilder {
    dev::Server::build()
        .workers(workers)
        .max_concurrent_connections(connections.div_ceil(workers) + CLOSING_MAX)
        .worker_max_blocking_threads(BLOCKING_THREADS)
        .disable_signals()
}

/// Closes connections that are idle for too long, and logs how many sent no HTTP; never returns. Runs only while there
/// are connections.
async fn sweep(slots: Arc<ConnectionSlots>, malformed: Rc<RefCell<Malformed>>) {
    loop {
        slots.wait_for_connection().await;
        loop {
            tokio::time::sleep(SWEEP_EVERY).await;
            slots.sweep();
            let all = MALFORMED.load(Ordering::Relaxed);
            malformed.borrow_mut().log(all);
            if slots.is_empty() && malformed.borrow().logged == all {
                break;
            }
        }
    }
}

/// Loads renewed TLS files; never returns. They are small, and are read on the thread that waits for the stop and
/// serves no requests.
async fn watch_tls_files(context: &Context, every: Duration) {
    let Some(tls) = context.access.tls() else { return std::future::pending().await };
    loop {
        tokio::time::sleep(every).await;
        tls.reload_if_changed();
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
    // A longer queue than the standard library requests: in a burst, a client that finds the queue full retries only
    // after a second, and so does the kubelet's probe.
    let _ = rustix::net::listen(&listener, BACKLOG);
    // A connection ends when sent bytes stay unacknowledged for this time. Every connection inherits this and the
    // next option from its listener. A system without the option still works.
    let unread = u32::try_from(UNREAD_MAX.as_millis()).unwrap_or(u32::MAX);
    let _ = rustix::net::sockopt::set_tcp_user_timeout(&listener, unread);
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(&listener, SEND_BUFFER);
    Ok(listener)
}

/// Least time between two log lines about connections that sent no HTTP.
const EVERY: Duration = Duration::from_secs(60);

/// The number of connections that sent no HTTP, as logged so far. Every client can open them, so they are counted and
/// not logged one by one.
#[derive(Default)]
struct Malformed {
    logged: u64,
    at: Option<Instant>,
}

impl Malformed {
    /// Logs how many came since the last line; `all` is their total.
    fn log(&mut self, all: u64) {
        if let Some(came) = self.due(all, Instant::now()) {
            tracing::warn!(connections = came, "closed connections to the admin API that did not send HTTP");
        }
    }

    fn due(&mut self, all: u64, now: Instant) -> Option<u64> {
        let came = all.saturating_sub(self.logged);
        if came == 0 || self.at.is_some_and(|at| now.duration_since(at) < EVERY) {
            return None;
        }
        (self.logged, self.at) = (all, Some(now));
        Some(came)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_one_line_a_minute_and_all_are_counted() {
        let (mut malformed, now) = (Malformed::default(), Instant::now());
        assert_eq!(malformed.due(0, now), None);
        assert_eq!(malformed.due(1, now), Some(1));
        assert_eq!(malformed.due(5_000, now + EVERY / 2), None);
        assert_eq!(malformed.due(5_001, now + EVERY), Some(5_000));
        assert_eq!(malformed.due(5_001, now + EVERY * 3), None);
    }
}
