//! One kept connection, plain or TLS, that never blocks.

use crate::node::Node;
use anyhow::Context as _;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

/// A connection.
pub(crate) enum Wire {
    Plain(TcpStream),
    Tls(Box<rustls::StreamOwned<ClientConnection, TcpStream>>),
}

impl Wire {
    /// Connects, and shakes hands.
    pub(crate) fn connect(node: &Node) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(node.address()?).context("connecting to the admin API")?;
        stream.set_nodelay(true)?;
        let Some(pem) = &node.ca else {
            stream.set_nonblocking(true)?;
            return Ok(Self::Plain(stream));
        };
        berth::admin::use_ring();
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(pem.as_bytes())?)?;
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        let name = ServerName::try_from("localhost")?;
        let mut tls = rustls::StreamOwned::new(ClientConnection::new(Arc::new(config), name)?, stream);
        while tls.conn.is_handshaking() {
            tls.conn.complete_io(&mut tls.sock)?;
        }
        tls.sock.set_nonblocking(true)?;
        Ok(Self::Tls(Box::new(tls)))
    }

    /// What the system is asked about.
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
