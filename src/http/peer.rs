//! Who is at the other end of a connection, as far as the connection itself tells: an address, a client
//! certificate, or a user of this machine.

use super::certificate::ClientCertificate;
use actix_web::rt::net::{TcpStream, UnixStream};
use rustls::pki_types::CertificateDer;
use std::fmt;
use std::net::SocketAddr;

/// The other end. Kept beside each connection by the HTTP library.
pub(super) enum Peer {
    /// Over plain TCP.
    Tcp(SocketAddr),
    /// Over TLS.
    Tls {
        /// Where from.
        from: SocketAddr,
        /// What the client showed; it stood the check of the handshake.
        certificate: Option<ClientCertificate>,
    },
    /// Over the Unix socket: whom the kernel says it is (SO_PEERCRED), as of its connect.
    Unix {
        /// Effective user.
        uid: u32,
        /// Process, where it is of our namespace.
        pid: Option<i32>,
    },
}

impl Peer {
    /// Over plain TCP; `None` where it is gone already.
    pub(super) fn tcp(io: &TcpStream) -> Option<Self> {
        io.peer_addr().ok().map(Self::Tcp)
    }

    /// Over TLS, with the chain that stood the handshake's check.
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
