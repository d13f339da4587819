//! The peer of a connection.

use crate::certificate::ClientCertificate;
use std::fmt;
use std::net::SocketAddr;

/// The peer of a connection, as the connection itself shows it: an address, a client certificate, or a user of this
/// machine. The HTTP library keeps it with each connection.
pub(crate) enum Peer {
    /// Over plain TCP.
    Tcp(SocketAddr),
    /// Over TLS.
    Tls {
        /// The address.
        from: SocketAddr,
        /// The client's certificate, verified in the handshake.
        certificate: Option<ClientCertificate>,
    },
    /// Over the Unix socket: the user by SO_PEERCRED, at the time of the connect.
    Unix {
        /// Effective user.
        uid: u32,
        /// The process id, if it is of our namespace.
        pid: Option<i32>,
    },
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(from) | Self::Tls { from, .. } => write!(f, "{from}"),
            Self::Unix { uid, pid: Some(pid) } => write!(f, "user {uid}, process {pid}"),
            Self::Unix { uid, pid: None } => write!(f, "user {uid}"),
        }
    }
}
