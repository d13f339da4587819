//! Trust in policies: trusted keys, and the origin of a version.
//!
//! The kernel does not verify signatures: `core` does at every start and sets [`Origin::signed_by`].

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

/// The origin of a policy version.
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
