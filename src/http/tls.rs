//! TLS of the admin listener: its certificate and the CA of its clients, both renewed when their files change.
//!
//! Only this module uses rustls directly: kube and ureq use it by themselves, and the admin listener is the only TLS
//! server. Its cryptography is ring, which they need anyway.

use crate::settings::{AdminError, Right, TlsFiles};
use parking_lot::{Mutex, RwLock};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, ring as by_ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, ServerConfig, SignatureScheme};
use sha2::{Digest, Sha256};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Largest file of certificates or of a key, bytes: a bundle of a few hundred CAs.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// How often the files are checked. A mounted Secret is updated with a delay of about a minute anyway.
pub const TLS_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The TLS configuration in use, and its files.
pub struct Tls {
    files: TlsFiles,
    provider: Arc<CryptoProvider>,
    current: RwLock<CurrentConfig>,
    /// Why the present files are not in use, if so.
    last_error: Mutex<Option<String>>,
}

/// The state that was read from the files. The certificate and the CA of clients are renewed independently: an
/// invalid one does not keep the other from being renewed, or removed.
struct CurrentConfig {
    /// Of the certificate file and the key file.
    pair: Digests,
    key: Arc<CertifiedKey>,
    /// Of the CA file; empty without one.
    ca: Digests,
    /// Counts the reads of the CA file, from 1.
    state: u64,
    /// `None`: no client certificate is accepted.
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

/// The SHA-256 of each file: times of change are not reliable.
type Digests = Vec<[u8; 32]>;

impl Tls {
    /// Reads the files.
    ///
    /// # Errors
    /// If one is missing or they do not fit together, with the file and what to do.
    pub(crate) fn open(files: TlsFiles) -> Result<Arc<Self>, AdminError> {
        let provider = Arc::new(by_ring::default_provider());
        let pair = read_all(&[&files.cert, &files.key])?;
        let key = load_pair(&files, &provider, &pair)?;
        let ca = read_all(files.client_ca.as_slice())?;
        let clients = load_ca(&files, &provider, &ca)?;
        let now =
            CurrentConfig { pair: digests(&pair), key: Arc::new(key), ca: digests(&ca), state: 1, clients };
        Ok(Arc::new(Self { files, provider, current: RwLock::new(now), last_error: Mutex::default() }))
    }

    /// The configuration of the listener. Sessions are not resumed: that would admit a client whose CA was removed.
    ///
    /// # Errors
    /// If the cryptography does not support TLS 1.2 and 1.3, which ring does.
    pub(crate) fn server_config(self: &Arc<Self>) -> Result<ServerConfig, Error> {
        let builder = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?;
        let builder = match self.files.client_ca {
            Some(_) => builder.with_client_cert_verifier(Arc::<Self>::clone(self)),
            None => builder.with_no_client_auth(),
        };
        let mut config = builder.with_cert_resolver(Arc::<Self>::clone(self));
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        // One protocol, whose limits are known; a client that offers only others is refused.
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    /// Loads changed files. Each new error is logged once. A certificate and key that do not fit together, or an
    /// unreadable file, leave the present state in use; a CA file without a CA removes the CA, since it was emptied
    /// on purpose.
    pub(crate) fn reload_if_changed(&self) {
        let (pair, ca) = (self.take_pair(), self.take_ca());
        if matches!(pair, Ok(true)) || matches!(ca, Ok(true)) {
            tracing::info!(certificate = %self.files.cert.display(), "the admin API's renewed TLS files are in effect");
        }
        let words = |error: AdminError| format!("{:#}", anyhow::Error::new(error));
        let stays = |error| format!("the previous TLS files stay in effect: {}", words(error));
        let all = [
            pair.err().map(stays),
            match ca {
                Ok(_) => None,
                Err(Ca::Unread(error)) => Some(stays(error)),
                Err(Ca::None(error)) => Some(format!("no client certificate is accepted: {}", words(error))),
            },
        ];
        let now =
            Some(all.into_iter().flatten().collect::<Vec<_>>().join("; ")).filter(|now| !now.is_empty());
        let mut last_error = self.last_error.lock();
        if let Some(now) = now.as_ref().filter(|now| last_error.as_ref() != Some(*now)) {
            tracing::error!("the admin API's TLS: {now}");
        }
        *last_error = now;
    }

    /// Returns whether it was renewed.
    fn take_pair(&self) -> Result<bool, AdminError> {
        let read = read_all(&[&self.files.cert, &self.files.key])?;
        if self.current.read().pair == digests(&read) {
            return Ok(false);
        }
        let key = Arc::new(load_pair(&self.files, &self.provider, &read)?);
        let mut now = self.current.write();
        (now.pair, now.key) = (digests(&read), key);
        Ok(true)
    }

    /// Returns whether it was renewed.
    fn take_ca(&self) -> Result<bool, Ca> {
        let read = read_all(self.files.client_ca.as_slice()).map_err(Ca::Unread)?;
        // Parsed each time: an error is reported as long as it lasts.
        let loaded = load_ca(&self.files, &self.provider, &read);
        let mut now = self.current.write();
        let changed = now.ca != digests(&read);
        if !changed {
            return loaded.map(|_| false).map_err(Ca::None);
        }
        (now.ca, now.state) = (digests(&read), now.state + 1);
        match loaded {
            Ok(clients) => {
                now.clients = clients;
                Ok(true)
            }
            Err(error) => {
                now.clients = None;
                Err(Ca::None(error))
            }
        }
    }

    /// Why the present files are not in use, if so.
    pub fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }

    /// The number of the read of the CA file that is in use.
    pub(crate) fn state(&self) -> u64 {
        self.current.read().state
    }

    /// The right of a certificate with this name, if it has one.
    pub(crate) fn right_of(&self, name: &str) -> Option<Right> {
        self.files.clients.as_ref().and_then(|clients| clients.get(name)).copied().or(self.files.others_may)
    }

    /// Whether a client's certificate is valid by the present CA.
    pub(crate) fn verify(&self, chain: &[CertificateDer<'_>]) -> bool {
        let Some((first, others)) = chain.split_first() else { return false };
        self.verify_client_cert(first, others, UnixTime::now()).is_ok()
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

impl ResolvesServerCert for Tls {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.current.read().key))
    }
}

/// Delegates to the CA that is in use.
impl ClientCertVerifier for Tls {
    fn client_auth_mandatory(&self) -> bool {
        self.files.require_client_cert
    }

    /// Empty: the list would have to outlive a change of the CA, and clients have one certificate.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let clients = self.current.read().clients.clone();
        match clients {
            Some(clients) => clients.verify_client_cert(end_entity, intermediates, now),
            None => Err(Error::General("no client certificates are accepted".into())),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// An error of the CA file.
enum Ca {
    /// It is unreadable.
    Unread(AdminError),
    /// It contains no CA.
    None(AdminError),
}

fn read_all<P: AsRef<Path>>(files: &[P]) -> Result<Vec<Vec<u8>>, AdminError> {
    files.iter().map(|path| read(path.as_ref())).collect()
}

fn read(path: &Path) -> Result<Vec<u8>, AdminError> {
    let unreadable =
        |source| AdminError::Tls { path: path.into(), rule: "cannot be read".into(), source: Some(source) };
    berth_files::read(path, FILE_BYTES_MAX).map_err(|error| match error.kind() {
        std::io::ErrorKind::FileTooLarge => wrong(path, "is larger than 1 MiB"),
        _ => unreadable(error),
    })
}

fn digests(read: &[Vec<u8>]) -> Digests {
    read.iter().map(|bytes| Sha256::digest(bytes).into()).collect()
}

fn wrong(path: &Path, rule: impl Into<String>) -> AdminError {
    AdminError::Tls { path: path.into(), rule: rule.into(), source: None }
}

fn load_pair(
    files: &TlsFiles,
    provider: &Arc<CryptoProvider>,
    read: &[Vec<u8>],
) -> Result<CertifiedKey, AdminError> {
    let chain = certificates(&files.cert, &read[0])?;
    // The parser's error may contain parts of the file.
    let key = PrivateKeyDer::from_pem_slice(&read[1]).map_err(|_| {
        wrong(&files.key, "holds no private key in PEM, unencrypted (PKCS #8, PKCS #1 or SEC1)")
    })?;
    CertifiedKey::from_der(chain, key, provider).map_err(|error| {
        let of = files.cert.display();
        wrong(&files.key, format!("does not match the certificate in {of}: {error}"))
    })
}

/// The verifier of client certificates, if there is a CA file.
fn load_ca(
    files: &TlsFiles,
    provider: &Arc<CryptoProvider>,
    read: &[Vec<u8>],
) -> Result<Option<Arc<dyn ClientCertVerifier>>, AdminError> {
    match (&files.client_ca, read.first()) {
        (Some(path), Some(pem)) => client_verifier(path, pem, provider).map(Some),
        _ => Ok(None),
    }
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, AdminError> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        _ => Err(wrong(path, "holds no certificate in PEM, or a broken one")),
    }
}

fn client_verifier(
    path: &Path,
    pem: &[u8],
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, AdminError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, pem)? {
        roots
            .add(certificate)
            .map_err(|error| wrong(path, format!("holds a CA that cannot be used: {error}")))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
        .build()
        .map_err(|error| wrong(path, format!("cannot be used: {error}")))
}
