//! One kept connection, plain or TLS, that never blocks.

use crate::load_admin::node::Node;
use anyhow::Context as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

/// A connection.
pub(crate) enum Wire {
    Plain(TcpStream),
    Tls(Box<rustls::StreamOwned<ClientConnection, TcpStream>>),
}

/// How to connect.
pub(crate) struct Connector {
    address: SocketAddr,
    tls: Option<Arc<ClientConfig>>,
}

impl Connector {
    pub(crate) fn to(node: &Node) -> anyhow::Result<Self> {
        let config = |pem: &String| -> anyhow::Result<_> {
            berth_cli::endpoint::use_ring();
            let mut roots = RootCertStore::empty();
            roots.add(CertificateDer::from_pem_slice(pem.as_bytes())?)?;
            Ok(Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth()))
        };
        Ok(Self { address: node.address()?, tls: node.ca.as_ref().map(config).transpose()? })
    }

    /// Connects, and shakes hands.
    pub(crate) fn connect(&self) -> anyhow::Result<Wire> {
        let stream = TcpStream::connect(self.address).context("connecting to the admin API")?;
        stream.set_nodelay(true)?;
        let Some(config) = &self.tls else {
            stream.set_nonblocking(true)?;
            return Ok(Wire::Plain(stream));
        };
        let connection = ClientConnection::new(Arc::clone(config), ServerName::try_from("localhost")?)?;
        let mut tls = rustls::StreamOwned::new(connection, stream);
        while tls.conn.is_handshaking() {
            tls.conn.complete_io(&mut tls.sock)?;
        }
        tls.sock.set_nonblocking(true)?;
        Ok(Wire::Tls(Box::new(tls)))
    }
}

impl Wire {
    /// The sockets that are polled.
    pub(crate) fn socket(&self) -> &TcpStream {
        match self {
            Self::Plain(stream) => stream,
            Self::Tls(tls) => &tls.sock,
        }
    }

    /// Sends a request. It is far smaller than the system's buffer, which is empty: nothing is under way on
    /// this connection.
    pub(crate) fn send(&mut self, request: &[u8]) -> io::Result<()> {
        match self {
            Self::Plain(stream) => stream.write_all(request),
            Self::Tls(tls) => tls.write_all(request).and_then(|()| tls.flush()),
        }
    }

    /// Reads what has come; 0 where nothing has.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = match self {
            Self::Plain(stream) => stream.read(into),
            Self::Tls(tls) => tls.read(into),
        };
        match read {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            read => read,
        }
    }
}
