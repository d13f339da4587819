//! The name in a client certificate: the common name (CN) of its subject.
//!
//! It is read directly from the DER, since nothing else of it is needed, and only from certificates that the TLS
//! library has parsed and found signed by the configured CA. A subject in any unusual form has no name.

use crate::settings::NAME_BYTES_MAX;
use crate::tls::Tls;
use parking_lot::Mutex;
use rustls::pki_types::CertificateDer;
use std::time::{Duration, Instant};

/// How often a certificate is checked again: it may have expired on an open connection.
const RECHECK_EVERY: Duration = Duration::from_secs(60);

const SEQUENCE: u8 = 0x30;
const SET: u8 = 0x31;
const OBJECT_ID: u8 = 0x06;
/// `[0] EXPLICIT`: the version of the certificate.
const VERSION: u8 = 0xa0;
/// UTF8String, PrintableString, IA5String: their bytes are UTF-8.
const STRINGS: [u8; 3] = [0x0c, 0x13, 0x16];
/// id-at-commonName, 2.5.4.3.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];

/// The certificate that a client sent in the handshake.
pub(crate) struct ClientCertificate {
    chain: Vec<CertificateDer<'static>>,
    name: Option<String>,
    /// When it was last valid, and with which state of the CA's file.
    checked: Mutex<(Instant, u64)>,
}

impl ClientCertificate {
    /// `None` for an empty chain.
    pub(crate) fn of(chain: &[CertificateDer<'static>]) -> Option<Self> {
        let name = common_name(chain.first()?);
        // The handshake used some state of the CA's file that is not known here, so the certificate is checked again.
        Some(Self { chain: chain.to_vec(), name, checked: Mutex::new((Instant::now(), 0)) })
    }

    /// Its common name, if it has exactly one that is printable.
    pub(crate) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether it is still valid: signed by a CA of the present file, and not expired.
    pub(crate) fn is_good(&self, tls: &Tls) -> bool {
        let (since, state) = *self.checked.lock();
        state == tls.state() && since.elapsed() < RECHECK_EVERY || self.is_good_now(tls)
    }

    /// As [`Self::is_good`], checked now.
    pub(crate) fn is_good_now(&self, tls: &Tls) -> bool {
        let mut good = self.checked.lock();
        let state = tls.state();
        let is_good = tls.verify(&self.chain);
        // An invalid one is checked again next time.
        *good = (Instant::now(), if is_good { state } else { 0 });
        is_good
    }
}

/// One element: its tag, its content, and the bytes after it.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&tag, rest) = der.split_first()?;
    let (&first, rest) = rest.split_first()?;
    let (length, rest) = match first {
        0..=0x7f => (usize::from(first), rest),
        // Long form, of one to four bytes; certificates are far below 4 GiB.
        0x81..=0x84 => {
            let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
            (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
        }
        _ => return None,
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// The content of the next element, which must have this tag, and the bytes after it.
fn expect(tag: u8, der: &[u8]) -> Option<(&[u8], &[u8])> {
    element(der).filter(|e| e.0 == tag).map(|(_, content, rest)| (content, rest))
}

/// RFC 5280, 4.1: Certificate, TBSCertificate, subject.
fn common_name(certificate: &[u8]) -> Option<String> {
    let (certificate, _) = expect(SEQUENCE, certificate)?;
    let (mut rest, _) = expect(SEQUENCE, certificate)?;
    if let Some((VERSION, _, after)) = element(rest) {
        rest = after;
    }
    // Serial number, algorithm, issuer, validity.
    for _ in 0..4 {
        (_, _, rest) = element(rest)?;
    }
    let (mut subject, _) = expect(SEQUENCE, rest)?;
    let mut name = None;
    while !subject.is_empty() {
        let (mut set, after) = expect(SET, subject)?;
        subject = after;
        while !set.is_empty() {
            let (attribute, after) = expect(SEQUENCE, set)?;
            set = after;
            let (kind, value) = expect(OBJECT_ID, attribute)?;
            if kind != COMMON_NAME {
                continue;
            }
            let (tag, text, _) = element(value)?;
            let text = std::str::from_utf8(text).ok().filter(|_| STRINGS.contains(&tag))?;
            // Two names: another reader might use the other one.
            if name.replace(text).is_some() {
                return None;
            }
        }
    }
    let shown = |n: &&str| {
        (1..=NAME_BYTES_MAX).contains(&n.len()) && !n.trim().is_empty() && !n.chars().any(char::is_control)
    };
    name.filter(shown).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue, KeyPair};

    fn certificate(names: &[(DnType, &str)]) -> Vec<u8> {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.distinguished_name = DistinguishedName::new();
        for (kind, name) in names {
            params.distinguished_name.push(kind.clone(), DnValue::Utf8String((*name).into()));
        }
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().to_vec()
    }

    #[test]
    fn the_common_name_is_found_and_nothing_else_is_taken_for_it() {
        let named = |name| certificate(&[(DnType::OrganizationName, "ops"), (DnType::CommonName, name)]);
        assert_eq!(common_name(&named("alice")).as_deref(), Some("alice"));
        assert_eq!(common_name(&named("J\u{f6}rg Z")).as_deref(), Some("J\u{f6}rg Z"));
        assert_eq!(common_name(&certificate(&[(DnType::OrganizationName, "alice")])), None);
        assert_eq!(common_name(&certificate(&[])), None);
        for odd in ["", " ", "a\nb", "a\0b", &"x".repeat(NAME_BYTES_MAX + 1)] {
            assert_eq!(common_name(&named(odd)), None, "{odd:?}");
        }
        let twice = [(DnType::CommonName, "alice"), (DnType::CustomDnType(vec![2, 5, 4, 3]), "root")];
        assert_eq!(common_name(&certificate(&twice)), None);
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let whole = certificate(&[(DnType::CommonName, "alice")]);
        for end in 0..whole.len() {
            assert_eq!(common_name(&whole[..end]), None);
        }
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0x80, 0x81, 0x84, 0x85, 0xff] {
                let mut broken = whole.clone();
                broken[at] = value;
                let _ = common_name(&broken);
            }
        }
    }
}
