//! Who is at the other end of a connection, as far as the connection itself tells: an address, a client
//! certificate, or a user of this machine.

use super::certificate::ClientCertificate;
use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::Extensions;
use actix_web::rt::net::{TcpStream, UnixStream};
use std::any::Any;
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

/// Takes down who is at the other end. What cannot be told is not taken down, and opens nothing.
pub(super) fn note(io: &dyn Any, data: &mut Extensions) {
    if let Some(tcp) = io.downcast_ref::<TcpStream>() {
        if let Ok(from) = tcp.peer_addr() {
            data.insert(Peer::Tcp(from));
        }
    } else if let Some(tls) = io.downcast_ref::<TlsStream<TcpStream>>() {
        let (tcp, session) = tls.get_ref();
        if let Ok(from) = tcp.peer_addr() {
            let certificate = session.peer_certificates().and_then(ClientCertificate::of);
            data.insert(Peer::Tls { from, certificate });
        }
    } else if let Some(unix) = io.downcast_ref::<UnixStream>()
        && let Ok(peer) = unix.peer_cred()
    {
        data.insert(Peer::Unix { uid: peer.uid(), pid: peer.pid() });
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
