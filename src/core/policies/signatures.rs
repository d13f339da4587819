//! Policy signatures: Ed25519 (RFC 8032) over a component's bytes, verified with ring.

use berth_kernel::policy::version::{Signature, TrustedKey};
use ring::signature::{ED25519, UnparsedPublicKey};

/// The first eight bytes of a core module: the magic, and version 1 of layer 0.
const CORE_MODULE: &[u8] = b"\0asm\x01\0\0\0";

/// Error of an upload's signature.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SignatureError {
    /// The node has trusted keys, and the upload has no signature.
    #[error("this node accepts signed policies only, and this one has no signature; trusted keys: {keys}")]
    Missing {
        /// Names of the keys.
        keys: String,
    },
    /// No trusted key made the signature over these bytes.
    #[error("the signature does not match this file and a trusted key; trusted keys: {keys}")]
    Wrong {
        /// Names of the keys.
        keys: String,
    },
    /// The store keeps the component that is made from a core module, so a signature over the module
    /// could not be verified again.
    #[error("only a component can be signed, and this is a core module")]
    CoreModule,
}

/// The name of the trusted key that made this signature over these bytes.
#[must_use]
pub fn signer<'k>(keys: &'k [TrustedKey], bytes: &[u8], signature: &Signature) -> Option<&'k str> {
    let verifies =
        |key: &&TrustedKey| UnparsedPublicKey::new(&ED25519, key.key).verify(bytes, &signature.0).is_ok();
    keys.iter().find(verifies).map(|key| key.name.as_str())
}

/// Checks an upload's signature. Returns the name of the key that signed it, or `None` if the node has no trusted keys.
///
/// # Errors
/// If the node has trusted keys and none of them signed these bytes, or if a core module is signed.
pub fn check(
    keys: &[TrustedKey],
    bytes: &[u8],
    signature: Option<&Signature>,
) -> Result<Option<String>, SignatureError> {
    let names = || keys.iter().map(|key| key.name.as_str()).collect::<Vec<_>>().join(", ");
    match signature {
        None if keys.is_empty() => Ok(None),
        None => Err(SignatureError::Missing { keys: names() }),
        Some(_) if bytes.starts_with(CORE_MODULE) => Err(SignatureError::CoreModule),
        // The signature is stored, and verified once keys are configured.
        Some(_) if keys.is_empty() => Ok(None),
        Some(signature) => match signer(keys, bytes, signature) {
            Some(name) => Ok(Some(name.to_owned())),
            None => Err(SignatureError::Wrong { keys: names() }),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ring::signature::{Ed25519KeyPair, KeyPair};

    fn pair(seed: u8) -> (Ed25519KeyPair, TrustedKey) {
        let pair = Ed25519KeyPair::from_seed_unchecked(&[seed; 32]).unwrap();
        let key = pair.public_key().as_ref().try_into().unwrap();
        (pair, TrustedKey { name: format!("key-{seed}"), key })
    }

    fn sign(pair: &Ed25519KeyPair, bytes: &[u8]) -> Signature {
        Signature(pair.sign(bytes).as_ref().try_into().unwrap())
    }

    #[test]
    fn only_a_trusted_keys_signature_over_the_same_bytes_is_accepted() {
        let ((own, own_key), (other, other_key), (untrusted, _)) = (pair(1), pair(2), pair(3));
        let keys = [own_key, other_key];
        let bytes = b"\0asm\x0d\0\x01\0 component";
        assert_eq!(check(&keys, bytes, Some(&sign(&own, bytes))), Ok(Some("key-1".into())));
        assert_eq!(check(&keys, bytes, Some(&sign(&other, bytes))), Ok(Some("key-2".into())));
        let wrong = Err(SignatureError::Wrong { keys: "key-1, key-2".into() });
        assert_eq!(check(&keys, bytes, Some(&sign(&untrusted, bytes))), wrong);
        assert_eq!(check(&keys, b"\0asm\x0d\0\x01\0 Component", Some(&sign(&own, bytes))), wrong);
        let mut corrupt = sign(&own, bytes);
        corrupt.0[40] ^= 1;
        assert_eq!(check(&keys, bytes, Some(&corrupt)), wrong);
        let missing = Err(SignatureError::Missing { keys: "key-1, key-2".into() });
        assert_eq!(check(&keys, bytes, None), missing);
    }

    #[test]
    fn without_trusted_keys_no_signature_is_needed_or_verified() {
        let bytes = b"\0asm\x0d\0\x01\0";
        let (own, _) = pair(1);
        assert_eq!(check(&[], bytes, None), Ok(None));
        assert_eq!(check(&[], bytes, Some(&sign(&own, bytes))), Ok(None));
    }

    #[test]
    fn a_signed_core_module_is_rejected() {
        let (own, key) = pair(1);
        let signature = sign(&own, CORE_MODULE);
        assert_eq!(check(&[key], CORE_MODULE, Some(&signature)), Err(SignatureError::CoreModule));
        assert_eq!(check(&[], CORE_MODULE, Some(&signature)), Err(SignatureError::CoreModule));
        assert_eq!(check(&[], CORE_MODULE, None), Ok(None));
    }

    /// The first test of RFC 8032, section 7.1: an empty message.
    #[test]
    fn the_rfcs_test_vector_verifies() {
        let hex = |text: &str| -> Vec<u8> {
            (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
        };
        let key = hex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
        let signature = hex(
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b\
             d25bf5f0595bbe24655141438e7a100b",
        );
        let keys = [TrustedKey { name: "rfc".into(), key: key.try_into().unwrap() }];
        assert_eq!(signer(&keys, b"", &Signature(signature.try_into().unwrap())), Some("rfc"));
    }
}
