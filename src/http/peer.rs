//! The peer of a connection, as the connection itself shows it: an address, a client certificate, or a user of this
//! machine.

use super::certificate::ClientCertificate;
use actix_web::rt::net::{TcpStream, UnixStream};
use rustls::pki_types::CertificateDer;
use std::fmt;
use std::net::SocketAddr;

/// The peer. The HTTP library keeps it with each connection.
pub(super) enum Peer {
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

impl Peer {
    /// Over plain TCP; `None` if it has disconnected already.
    pub(super) fn tcp(io: &TcpStream) -> Option<Self> {
        io.peer_addr().ok().map(Self::Tcp)
    }

    /// Over TLS, with the chain that the handshake verified.
    pub(super) fn tls(io: &TcpStream, chain: Option<&[CertificateDer<'static>]>) -> Option<Self> {
        let from = io.peer_addr().ok()?;
        Some(Self::Tls { from, certificate: chain.and_then(ClientCertificate::of) })
    }

    /// Over the Unix socket.
    pub(super) fn unix(io: &UnixStream) -> Option<Self> {
        let peer = io.peer_cred().ok()?;
        Some(Self::Unix { uid: peer.uid(), pid: peer.pid() })
    }
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
