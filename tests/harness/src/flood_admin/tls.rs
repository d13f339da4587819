//! TLS of the node under test, and sessions that begin and go no further.

use crate::flood_admin::connections::From;
use anyhow::Context;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

/// A certificate authority, and the daemon's files by it.
pub(crate) struct Authority {
    pem: String,
    cert: PathBuf,
    key: PathBuf,
}

impl Authority {
    pub(crate) fn new(folder: &Path) -> anyhow::Result<Self> {
        berth_cli::endpoint::use_ring();
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let own = KeyPair::generate()?;
        let pem = params.self_signed(&own)?.pem();
        let issuer = Issuer::new(params, own);
        let key = KeyPair::generate()?;
        let server = CertificateParams::new(vec!["localhost".to_owned()])?.signed_by(&key, &issuer)?;
        let all = Self { pem, cert: folder.join("server.crt"), key: folder.join("server.key") };
        std::fs::write(&all.cert, server.pem())?;
        std::fs::write(&all.key, key.serialize_pem())?;
        Ok(all)
    }

    /// Of the daemon.
    pub(crate) fn settings(&self) -> String {
        format!("  tls: {{ certFile: {}, keyFile: {} }}\n", self.cert.display(), self.key.display())
    }

    /// Of a client of ours.
    pub(crate) fn trusted(&self) -> TlsConfig {
        let root = Certificate::from_pem(self.pem.as_bytes());
        let roots = root.map(|root| RootCerts::new_with_certs(&[root])).unwrap_or(RootCerts::WebPki);
        TlsConfig::builder().root_certs(roots).build()
    }

    fn session(&self) -> anyhow::Result<ClientConnection> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.pem.as_bytes()).context("our own certificate")?)?;
        let config = ClientConfig::builder().with_root_certificates(roots).with_no_client_auth();
        Ok(ClientConnection::new(Arc::new(config), ServerName::try_from("localhost")?)?)
    }

    /// What a client says first.
    pub(crate) fn hello(&self) -> anyhow::Result<Vec<u8>> {
        let (mut session, mut hello) = (self.session()?, Vec::new());
        session.write_tls(&mut hello)?;
        Ok(hello)
    }

    /// A session over which this was sent; nothing is read of it any more.
    pub(crate) async fn sent(&self, to: SocketAddr, n: usize, bytes: Vec<u8>) -> anyhow::Result<Held> {
        let mut stream = From::Many(200).connect(to, n).await?.into_std()?;
        let mut session = self.session()?;
        tokio::task::spawn_blocking(move || {
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(Some(Duration::from_secs(5)))?;
            stream.set_write_timeout(Some(Duration::from_secs(2)))?;
            while session.is_handshaking() {
                session.complete_io(&mut stream)?;
            }
            session.writer().write_all(&bytes)?;
            while session.wants_write() && session.write_tls(&mut stream).is_ok() {}
            Ok(Held { _stream: stream })
        })
        .await?
    }
}

/// A connection that is kept.
pub(crate) struct Held {
    _stream: TcpStream,
}
