//! The form of a policy as an OCI artifact: an image manifest with the configuration of a WebAssembly component and one layer, the
//! component itself ("Wasm OCI Artifact layout" of the CNCF). The digest of the layer is that of the policy.

use crate::error::PullError;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_kernel::ids::names::Digest;
use berth_kernel::policy::hooks::MODULE_BYTES_MAX;
use berth_kernel::policy::version::Signature;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;

/// The annotation of the layer, or of the manifest, with the Ed25519 signature over the layer, in base64.
pub const SIGNATURE_ANNOTATION: &str = "dev.berth.signature.ed25519";
/// Largest manifest, bytes. The OCI distribution specification has registries accept 4 MiB; one of a policy has less than 2 KiB.
pub const MANIFEST_BYTES_MAX: usize = 256 * 1024;

pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG_TYPE: &str = "application/vnd.wasm.config.v0+json";
const LAYER_TYPE: &str = "application/wasm";
/// The first eight bytes of a component: the magic, and version 13 of layer 1.
const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";

/// A policy that was pulled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PulledPolicy {
    /// The component.
    pub module: Vec<u8>,
    /// The signature in the annotation, if there is one.
    pub signature: Option<Signature>,
}

/// A policy as it is pushed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Artifact {
    /// The manifest, JSON.
    pub manifest: Vec<u8>,
    /// The configuration, JSON.
    pub config: Vec<u8>,
    /// The component.
    pub layer: Vec<u8>,
}

impl Artifact {
    /// The artifact of a component.
    ///
    /// # Errors
    /// If it is no component, or too large.
    pub fn pack(module: Vec<u8>, title: &str, signature: Option<&Signature>) -> Result<Self, PullError> {
        check_module(&module)?;
        let layer_digest = digest_of(&module);
        // The fields that the layout requires. `created` is left out, so that the same file gives the same artifact.
        let config = serde_json::json!({
            "architecture": "wasm",
            "os": "wasip2",
            "layerDigests": [format!("sha256:{layer_digest}")],
            "component": {"exports": [], "imports": []},
        });
        let config = config.to_string().into_bytes();
        let mut annotations =
            BTreeMap::from([("org.opencontainers.image.title".to_owned(), title.to_owned())]);
        if let Some(signature) = signature {
            annotations.insert(SIGNATURE_ANNOTATION.to_owned(), BASE64.encode(signature.0));
        }
        let descriptor = |media_type: &str, bytes: &[u8], annotations| Descriptor {
            media_type: media_type.to_owned(),
            digest: format!("sha256:{}", digest_of(bytes)),
            size: bytes.len() as u64,
            annotations,
        };
        let manifest = Manifest {
            schema_version: 2,
            media_type: Some(MANIFEST_TYPE.to_owned()),
            config: descriptor(CONFIG_TYPE, &config, BTreeMap::new()),
            layers: vec![descriptor(LAYER_TYPE, &module, annotations)],
            annotations: BTreeMap::new(),
        };
        let manifest = serde_json::to_vec(&manifest).map_err(|error| wrong(error.to_string()))?;
        Ok(Self { manifest, config, layer: module })
    }

    /// The digest of the manifest, by which the artifact is pulled.
    #[must_use]
    pub fn digest(&self) -> Digest {
        digest_of(&self.manifest)
    }

    /// The digest of the component, which is that of the policy.
    #[must_use]
    pub fn layer_digest(&self) -> Digest {
        digest_of(&self.layer)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    media_type: Option<String>,
    config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

/// Checks a manifest, and that its layer is the one that is expected. Returns the signature.
///
/// # Errors
/// If it has another digest, is not that of a policy, or has another layer.
pub(crate) fn check_manifest(
    bytes: &[u8],
    expected: &Digest,
    layer: &Digest,
) -> Result<Option<Signature>, PullError> {
    check_digest("the manifest", bytes, expected)?;
    let (named, signature) = read_manifest(bytes)?;
    if named != *layer {
        return Err(PullError::OtherLayer { expected: layer.clone(), actual: named });
    }
    Ok(signature)
}

/// The layer that a manifest names, and the signature.
///
/// # Errors
/// If the manifest is not that of a policy.
pub(crate) fn read_manifest(bytes: &[u8]) -> Result<(Digest, Option<Signature>), PullError> {
    let manifest: Manifest = serde_json::from_slice(bytes)
        .map_err(|error| wrong(format!("its manifest is not an OCI image manifest: {error}")))?;
    let is = |what: &str, actual: &str, expected: &str| {
        if actual == expected {
            return Ok(());
        }
        let actual: String = actual.chars().take(80).collect();
        Err(wrong(format!("{what} has the media type {actual:?}, not {expected}")))
    };
    is("its manifest", manifest.media_type.as_deref().unwrap_or(MANIFEST_TYPE), MANIFEST_TYPE)?;
    is("its configuration", &manifest.config.media_type, CONFIG_TYPE)?;
    let [descriptor] = manifest.layers.as_slice() else {
        return Err(wrong(format!("it has {} layers, not one", manifest.layers.len())));
    };
    is("its layer", &descriptor.media_type, LAYER_TYPE)?;
    let named = Digest::parse(&descriptor.digest).map_err(|error| wrong(format!("its layer: {error}")))?;
    if descriptor.size > MODULE_BYTES_MAX as u64 {
        return Err(PullError::TooLarge { max: MODULE_BYTES_MAX });
    }
    let annotation = |annotations: &BTreeMap<String, String>| annotations.get(SIGNATURE_ANNOTATION).cloned();
    let text = annotation(&descriptor.annotations).or_else(|| annotation(&manifest.annotations));
    Ok((named, text.map(|text| signature(&text)).transpose()?))
}

/// Checks the layer.
///
/// # Errors
/// If it has another digest, or is no component.
pub(crate) fn check_layer(bytes: &[u8], expected: &Digest) -> Result<(), PullError> {
    check_digest("the layer", bytes, expected)?;
    check_module(bytes)
}

fn check_module(bytes: &[u8]) -> Result<(), PullError> {
    if bytes.len() > MODULE_BYTES_MAX {
        return Err(PullError::TooLarge { max: MODULE_BYTES_MAX });
    }
    if !bytes.starts_with(COMPONENT) {
        return Err(wrong(
            "it is no WebAssembly component (a core module must be made into one first: `wasm-tools component new`)".into(),
        ));
    }
    Ok(())
}

pub(crate) fn check_digest(what: &str, bytes: &[u8], expected: &Digest) -> Result<(), PullError> {
    let actual = digest_of(bytes);
    if actual == *expected {
        return Ok(());
    }
    Err(PullError::DigestMismatch { what: what.to_owned(), expected: expected.clone(), actual })
}

fn signature(text: &str) -> Result<Signature, PullError> {
    let bytes = BASE64.decode(text.trim()).ok().and_then(|bytes| bytes.try_into().ok());
    let why = || wrong(format!("its annotation {SIGNATURE_ANNOTATION} is not 64 bytes in base64"));
    bytes.map(Signature).ok_or_else(why)
}

fn wrong(why: String) -> PullError {
    PullError::WrongMediaType(why)
}

pub(crate) fn digest_of(bytes: &[u8]) -> Digest {
    let hex = format!("{:x}", Sha256::digest(bytes));
    Digest::parse(&hex).unwrap_or_else(|_| unreachable!("64 lower-case hex digits"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Value, json};

    pub(crate) fn component(text: &str) -> Vec<u8> {
        [COMPONENT, text.as_bytes()].concat()
    }

    fn packed() -> Artifact {
        Artifact::pack(component("a"), "a.wasm", Some(&Signature([7; 64]))).unwrap()
    }

    /// The manifest with changes.
    fn changed(change: impl FnOnce(&mut Value)) -> (Vec<u8>, Digest) {
        let mut manifest: Value = serde_json::from_slice(&packed().manifest).unwrap();
        change(&mut manifest);
        let bytes = manifest.to_string().into_bytes();
        let digest = digest_of(&bytes);
        (bytes, digest)
    }

    #[test]
    fn what_is_packed_can_be_pulled_and_the_same_file_gives_the_same_artifact() {
        let artifact = packed();
        assert_eq!(artifact, packed());
        let (digest, layer) = (artifact.digest(), artifact.layer_digest());
        let signature = check_manifest(&artifact.manifest, &digest, &layer).unwrap();
        assert_eq!(signature, Some(Signature([7; 64])));
        check_layer(&artifact.layer, &layer).unwrap();
        let unsigned = Artifact::pack(component("a"), "a.wasm", None).unwrap();
        assert_eq!(check_manifest(&unsigned.manifest, &unsigned.digest(), &layer).unwrap(), None);
    }

    #[test]
    fn the_signature_may_also_be_an_annotation_of_the_manifest() {
        let (bytes, digest) = changed(|manifest| {
            let of_layer = manifest["layers"][0]["annotations"].take();
            manifest["annotations"] = of_layer;
            manifest["layers"][0].as_object_mut().unwrap().remove("annotations");
        });
        let signature = check_manifest(&bytes, &digest, &packed().layer_digest()).unwrap();
        assert_eq!(signature, Some(Signature([7; 64])));
    }

    #[test]
    fn another_digest_type_size_or_number_of_layers_is_refused() {
        let layer = packed().layer_digest();
        let error = |(bytes, digest): (Vec<u8>, Digest)| {
            check_manifest(&bytes, &digest, &layer).unwrap_err().to_string()
        };
        let index = "application/vnd.oci.image.index.v1+json";
        for (changed, expected) in [
            (changed(|m| m["mediaType"] = json!(index)), "its manifest has the media type"),
            (
                changed(|m| m["config"]["mediaType"] = json!("x")),
                "its configuration has the media type \"x\"",
            ),
            (changed(|m| m["layers"][0]["mediaType"] = json!("x")), "its layer has the media type \"x\""),
            (changed(|m| m["layers"] = json!([])), "0 layers"),
            (changed(|m| m["layers"][0]["size"] = json!(33 << 20)), "more than 33554432 bytes"),
            (
                changed(|m| m["layers"][0]["digest"] = json!(format!("sha256:{}", "0".repeat(64)))),
                "the layer of the manifest is",
            ),
            (changed(|m| m["layers"][0]["digest"] = json!("md5:0")), "not a digest"),
            (changed(|m| m["layers"][0]["annotations"][SIGNATURE_ANNOTATION] = json!("AA==")), "64 bytes"),
            (changed(|m| *m = json!([])), "not an OCI image manifest"),
        ] {
            let text = error(changed);
            assert!(text.contains(expected), "{text}");
        }
        let (bytes, _) = changed(|_| ());
        assert!(matches!(check_manifest(&bytes, &layer, &layer), Err(PullError::DigestMismatch { .. })));
    }

    #[test]
    fn only_a_component_is_a_layer() {
        let core = b"\0asm\x01\0\0\0".to_vec();
        let digest = digest_of(&core);
        assert!(matches!(check_layer(&core, &digest), Err(PullError::WrongMediaType(_))));
        assert!(matches!(check_layer(&component("b"), &digest), Err(PullError::DigestMismatch { .. })));
        let large = [component(""), vec![0; MODULE_BYTES_MAX]].concat();
        assert!(matches!(Artifact::pack(large, "a", None), Err(PullError::TooLarge { .. })));
        assert!(Artifact::pack(core, "a", None).is_err());
    }
}
