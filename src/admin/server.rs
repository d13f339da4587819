//! The listeners and the threads behind them: bound at start, run once the ledger is open, stopped
//! within a second.

use super::Settings;
use crate::admission::Door;
use actix_web::{App, HttpResponse, HttpServer, web};
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

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
        source: std::io::Error,
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
        source: Option<std::io::Error>,
    },
    /// The system gives no thread.
    #[error("cannot start the admin API's threads")]
    Threads(#[source] std::io::Error),
}

/// A server that listens but does not answer yet.
pub struct Server {
    settings: Settings,
    admin: TcpListener,
    health: Option<TcpListener>,
}

/// A server that answers. Stops when told to, or dropped.
pub struct Running {
    stop: tokio::sync::mpsc::Sender<()>,
    stopped: mpsc::Receiver<()>,
    /// Where the API listens: the port that the system gave, if 0 was asked for.
    pub address: SocketAddr,
    /// Where health is served.
    pub health_address: Option<SocketAddr>,
}

/// Longest that [`Running::stop`] waits in all.
const STOP_MAX: Duration = Duration::from_millis(900);

impl Server {
    /// Listens, and reads the token or makes one. A taken port fails here, before anything else
    /// has begun.
    ///
    /// # Errors
    /// If an address or the token file cannot be used; says what to do.
    pub fn bind(settings: Settings) -> Result<Self, AdminError> {
        let admin = listen(settings.listen, "--admin-listen")?;
        let health = settings
            .health_listen
            .map(|address| listen(address, "--health-listen"))
            .transpose()?;
        Ok(Self {
            settings,
            admin,
            health,
        })
    }

    /// Answers, on threads of its own.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn run(self, door: Door) -> Result<Running, AdminError> {
        let address = self.admin.local_addr().map_err(AdminError::Threads)?;
        let health_address = match &self.health {
            Some(listener) => Some(listener.local_addr().map_err(AdminError::Threads)?),
            None => None,
        };
        let (stop, mut stops) = tokio::sync::mpsc::channel(1);
        let (ended, stopped) = mpsc::channel();
        let work = move || {
            let _settings = self.settings;
            let served = actix_web::rt::System::new().block_on(async move {
                let server = HttpServer::new(move || {
                    App::new()
                        .app_data(web::Data::new(door.clone()))
                        .route("/livez", web::get().to(HttpResponse::Ok))
                })
                .workers(2)
                .disable_signals()
                .listen(self.admin)?
                .run();
                let handle = server.handle();
                let server = actix_web::rt::spawn(server);
                stops.recv().await;
                handle.stop(false).await;
                let _ = server.await;
                std::io::Result::Ok(())
            });
            if let Err(error) = served {
                tracing::error!(%error, "the admin API ended");
            }
            let _ = ended.send(());
        };
        std::thread::Builder::new()
            .name("admin".into())
            .spawn(work)
            .map_err(AdminError::Threads)?;
        Ok(Running {
            stop,
            stopped,
            address,
            health_address,
        })
    }
}

impl Running {
    /// Lets requests under way finish, for at most half a second, and ends. Blocks for less than
    /// one second.
    pub fn stop(self) {
        let _ = self.stop.try_send(());
        if self.stopped.recv_timeout(STOP_MAX).is_err() {
            tracing::warn!("the admin API was still at work when the daemon ended");
        }
    }
}

fn listen(address: SocketAddr, flag: &'static str) -> Result<TcpListener, AdminError> {
    TcpListener::bind(address).map_err(|source| {
        if source.kind() == ErrorKind::AddrInUse {
            AdminError::Taken { address, flag }
        } else {
            AdminError::Listen {
                address,
                flag,
                source,
            }
        }
    })
}
