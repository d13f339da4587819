//! A policy version on this node, and where it comes from.
//!
//! The kernel does not verify signatures: `core` does at every start and sets [`Origin::signed_by`].

use crate::ids::names::Digest;
use crate::policy::hooks::Hook;

/// One policy version on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyVersion {
    /// The name that it reports, a DNS label.
    pub name: String,
    /// The semantic version that it reports.
    pub version: String,
    /// The summary that it reports, one sentence.
    pub summary: String,
    /// Hooks that it implements.
    pub hooks: Vec<Hook>,
    /// JSON schema of its parameters.
    pub parameters_schema: String,
    /// sha256 of the component's bytes.
    pub digest: Digest,
    /// sha256 of the artifact compiled on this machine; a file that differs is never loaded. Until it is
    /// compiled, sha256 of the component.
    pub artifact: Digest,
    /// Size of the component in bytes.
    pub bytes: u64,
    /// Whether it is built into the daemon.
    pub shipped: bool,
    /// When it was added, milliseconds since 1970.
    pub since_wall_ms: u64,
    /// Its upload and signature.
    pub origin: Origin,
}

impl PolicyVersion {
    /// `name@` and the first twelve digits of the digest.
    #[must_use]
    pub fn label(&self) -> String {
        format!("{}@{}", self.name, self.digest.short())
    }
}

/// A public key that uploads must be signed with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustedKey {
    /// Its name in the configuration.
    pub name: String,
    /// Ed25519, as RFC 8032 encodes it.
    pub key: [u8; 32],
}

/// An Ed25519 signature over a component's bytes, as RFC 8032 encodes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature(pub [u8; 64]);

/// Who uploaded a policy version, and who signed it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Origin {
    /// The uploader as given by the upload; may be empty.
    pub by: String,
    /// The uploader's reason; may be empty.
    pub why: String,
    /// The signature of the upload, whether or not its key is trusted.
    pub signature: Option<Signature>,
    /// Name of the trusted key that made the signature, if there is one.
    pub signed_by: Option<String>,
    /// Whether it was built into an earlier release of the daemon.
    pub once_shipped: bool,
}

/// A version for tests, whose digest is this letter.
#[cfg(test)]
pub(crate) fn test_version(letter: char) -> PolicyVersion {
    let digest = Digest::parse(&letter.to_string().repeat(64)).unwrap();
    PolicyVersion {
        name: "own".into(),
        version: "1.0.0".into(),
        summary: String::new(),
        hooks: Vec::new(),
        parameters_schema: "{}".into(),
        artifact: digest.clone(),
        digest,
        bytes: 1,
        shipped: false,
        since_wall_ms: 0,
        origin: Origin::default(),
    }
}
