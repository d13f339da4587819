//! Why the admin API cannot be served.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Why the API cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Another process listens there.
    #[error(
        "{address} is in use by another process: stop it (`ss -ltnp` shows which), or choose another address with {flag}"
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
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The token can be neither read nor created.
    #[error("the token file {path} cannot be used: {rule}")]
    Token {
        /// The file.
        path: PathBuf,
        /// What to do.
        rule: &'static str,
        /// The system's error, if there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// A TLS file cannot be used.
    #[error("the TLS file {path} {rule} (admin.tls in the configuration)")]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        rule: String,
        /// The system's error, if there is one.
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
        /// The system's error, if there is one.
        #[source]
        source: Option<io::Error>,
    },
    /// The system refused a thread or a socket.
    #[error("cannot start the admin API's threads")]
    Threads(#[source] io::Error),
}
