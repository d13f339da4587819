//! The serialized form of policy versions.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_kernel::names::Digest;
use berth_kernel::policy as kernel;
use berth_kernel::trust::{Origin, Signature};
use serde::{Deserialize, Serialize};

/// See [`kernel::PolicyVersion`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Policy {
    name: String,
    version: String,
    summary: String,
    hooks: Vec<Hook>,
    schema: String,
    artifact: String,
    bytes: u64,
    shipped: bool,
    since_ms: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    by: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    why: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signed_by: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    once_shipped: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Hook {
    Describe,
    Offer,
    Place,
    Admit,
    Triage,
}

impl Hook {
    fn from_kernel(hook: kernel::Hook) -> Self {
        match hook {
            kernel::Hook::Describe => Self::Describe,
            kernel::Hook::Offer => Self::Offer,
            kernel::Hook::Place => Self::Place,
            kernel::Hook::Admit => Self::Admit,
            kernel::Hook::Triage => Self::Triage,
        }
    }

    fn into_kernel(self) -> kernel::Hook {
        match self {
            Self::Describe => kernel::Hook::Describe,
            Self::Offer => kernel::Hook::Offer,
            Self::Place => kernel::Hook::Place,
            Self::Admit => kernel::Hook::Admit,
            Self::Triage => kernel::Hook::Triage,
        }
    }
}

impl Policy {
    pub(in super::super) fn from_kernel(version: &kernel::PolicyVersion) -> Self {
        Self {
            name: version.name.clone(),
            version: version.version.clone(),
            summary: version.summary.clone(),
            hooks: version.hooks.iter().copied().map(Hook::from_kernel).collect(),
            schema: version.parameters_schema.clone(),
            artifact: version.artifact.to_string(),
            bytes: version.bytes,
            shipped: version.shipped,
            since_ms: version.since_wall_ms,
            by: version.origin.by.clone(),
            why: version.origin.why.clone(),
            signature: version.origin.signature.map(|s| BASE64.encode(s.0)),
            signed_by: version.origin.signed_by.clone(),
            once_shipped: version.origin.once_shipped,
        }
    }

    pub(in super::super) fn into_kernel(self, digest: Digest) -> Result<kernel::PolicyVersion, String> {
        Ok(kernel::PolicyVersion {
            name: self.name,
            version: self.version,
            summary: self.summary,
            hooks: self.hooks.into_iter().map(Hook::into_kernel).collect(),
            parameters_schema: self.schema,
            digest,
            artifact: Digest::parse(&self.artifact).map_err(|e| e.to_string())?,
            bytes: self.bytes,
            shipped: self.shipped,
            since_wall_ms: self.since_ms,
            origin: Origin {
                by: self.by,
                why: self.why,
                signature: self.signature.as_deref().map(parse_signature).transpose()?,
                signed_by: self.signed_by,
                once_shipped: self.once_shipped,
            },
        })
    }
}

fn parse_signature(text: &str) -> Result<Signature, String> {
    let bytes = BASE64.decode(text).map_err(|e| format!("the signature: {e}"))?;
    let bytes = bytes.try_into().map_err(|_| "the signature is not 64 bytes long".to_owned())?;
    Ok(Signature(bytes))
}
