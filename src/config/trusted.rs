//! `trustedKeys`: the keys whose policies this node accepts.

use super::checks::{BadSetting, Checks, bad};
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_kernel::policy::version::TrustedKey;
use serde::Deserialize;

/// Most keys: a signature is checked against each.
const KEYS_MAX: usize = 16;
/// Longest name of a key, bytes.
const NAME_BYTES_MAX: usize = 64;
/// The bytes before the 32 bytes of an Ed25519 key in a SubjectPublicKeyInfo (RFC 8410, section 4).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
const PEM_BEGIN: &str = "-----BEGIN PUBLIC KEY-----";
const PEM_END: &str = "-----END PUBLIC KEY-----";

/// One key in the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct TrustedKeyFile {
    /// The key's name, which versions that it signed show as `signedBy`.
    name: String,
    /// An Ed25519 public key: PEM as `openssl pkey -pubout` writes it, or 32 bytes in base64.
    key: String,
}

pub(super) fn keys(file: Option<Vec<TrustedKeyFile>>, checks: &mut Checks) -> Vec<TrustedKey> {
    let file = file.unwrap_or_default();
    checks.at_most("trustedKeys", file.len(), KEYS_MAX, "keys");
    let mut keys: Vec<TrustedKey> = Vec::with_capacity(file.len());
    for (at, key) in file.into_iter().enumerate() {
        let key = trusted_key(at, key, &keys);
        keys.extend(checks.ok(key));
    }
    keys
}

fn trusted_key(at: usize, file: TrustedKeyFile, earlier: &[TrustedKey]) -> Result<TrustedKey, BadSetting> {
    let TrustedKeyFile { name, key } = file;
    let setting = |key| format!("trustedKeys[{at}].{key}");
    let is_valid_name =
        (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_graphic());
    if !is_valid_name {
        let rule = format!("1 to {NAME_BYTES_MAX} letters, digits or signs, without spaces");
        return Err(bad(setting("name"), &name, rule));
    }
    if earlier.iter().any(|key| key.name == name) {
        return Err(bad(setting("name"), &name, "a name that is used only once"));
    }
    // The value is hidden: it may be a private key.
    let key = parse(&key).map_err(|reason| {
        let what = format!("the key {name:?} is not allowed (value hidden); {reason}");
        BadSetting::new(setting("key"), what)
    })?;
    Ok(TrustedKey { name, key })
}

fn parse(text: &str) -> Result<[u8; 32], String> {
    let expected =
        "expected an Ed25519 public key: PEM as `openssl pkey -pubout` writes it, or its 32 bytes in base64";
    if text.contains("PRIVATE KEY") {
        return Err(format!("this is a private key, which must not be on a node; {expected}"));
    }
    let pem = text.trim().strip_prefix(PEM_BEGIN).and_then(|text| text.strip_suffix(PEM_END));
    let body: String = pem.unwrap_or(text).split_whitespace().collect();
    let bytes = BASE64.decode(body).map_err(|_| expected.to_owned())?;
    let key = match pem {
        Some(_) => bytes
            .strip_prefix(&SPKI_PREFIX[..])
            .ok_or_else(|| format!("this PEM holds another kind of key; {expected}"))?,
        None => &bytes,
    };
    key.try_into().map_err(|_| format!("it has {} bytes; {expected}", key.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BadSettings;

    /// The key of the first test of RFC 8032, as `openssl pkey -pubout` prints it.
    const PEM: &str = "-----BEGIN PUBLIC KEY-----\n\
        MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n\
        -----END PUBLIC KEY-----\n";
    const RAW: &str = "11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";

    fn entry(name: &str, key: &str) -> TrustedKeyFile {
        TrustedKeyFile { name: name.into(), key: key.into() }
    }

    fn keys(file: Option<Vec<TrustedKeyFile>>) -> Result<Vec<TrustedKey>, BadSettings> {
        let mut checks = Checks::default();
        let keys = super::keys(file, &mut checks);
        checks.finish().map(|()| keys)
    }

    #[test]
    fn both_forms_of_a_key_are_the_same_key() {
        let read = keys(Some(vec![entry("pem", PEM), entry("raw", RAW)])).unwrap();
        assert_eq!(read[0].key, read[1].key);
        assert_eq!(read[0].key[..4], [0xd7, 0x5a, 0x98, 0x01]);
        assert!(keys(None).unwrap().is_empty());
    }

    #[test]
    fn an_invalid_key_is_reported_with_the_expected_format() {
        let rsa =
            "-----BEGIN PUBLIC KEY-----\nMFwwDQYJKoZIhvcNAQEBBQADSwAwSAJBAL8=\n-----END PUBLIC KEY-----";
        let private = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA==\n-----END PRIVATE KEY-----";
        for (entries, expected) in [
            (vec![entry("", RAW)], "trustedKeys[0].name"),
            (vec![entry("with space", RAW)], "without spaces"),
            (vec![entry("a", RAW), entry("a", RAW)], "a name that is used only once"),
            (vec![entry("a", "AAAA")], "3 bytes"),
            (vec![entry("a", "no base64!")], "openssl pkey -pubout"),
            (vec![entry("a", rsa)], "another kind of key"),
            (vec![entry("a", private)], "private key"),
            ((0..17).map(|i| entry(&i.to_string(), RAW)).collect(), "at most 16"),
        ] {
            let error = keys(Some(entries)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("MC4CAQAw"), "a private key is not quoted");
        }
    }
}
