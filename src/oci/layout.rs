//! Folders of the OCI image layout, which carry artifacts where no registry can be reached.

use crate::artifact::{
    Artifact, MANIFEST_BYTES_MAX, MANIFEST_TYPE, PulledPolicy, check_digest, check_layer, check_manifest,
    digest_of, read_manifest,
};
use crate::error::PullError;
use berth_kernel::ids::names::Digest;
use berth_kernel::policy::hooks::MODULE_BYTES_MAX;
use serde_json::{Value, json};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Largest index, bytes: some thousand artifacts.
const INDEX_BYTES_MAX: u64 = 4 << 20;

/// Reads a policy from a layout; `None` if the layout does not have its manifest.
///
/// # Errors
/// If a file cannot be read, or the artifact is not what it should be.
pub fn read(folder: &Path, manifest: &Digest, layer: &Digest) -> Result<Option<PulledPolicy>, PullError> {
    let Some(bytes) = blob(folder, manifest, MANIFEST_BYTES_MAX)? else { return Ok(None) };
    let signature = check_manifest(&bytes, manifest, layer)?;
    let path = path_of(folder, layer);
    let module = blob(folder, layer, MODULE_BYTES_MAX)?;
    let module = module.ok_or(PullError::Layout { path, error: ErrorKind::NotFound.into() })?;
    check_layer(&module, layer)?;
    Ok(Some(PulledPolicy { module, signature }))
}

/// The digest of the layer of an artifact; `None` if the layout does not have its manifest.
///
/// # Errors
/// If the manifest cannot be read, or is not that of a policy.
pub fn layer_of(folder: &Path, manifest: &Digest) -> Result<Option<Digest>, PullError> {
    let Some(bytes) = blob(folder, manifest, MANIFEST_BYTES_MAX)? else { return Ok(None) };
    check_digest("the manifest", &bytes, manifest)?;
    Ok(Some(read_manifest(&bytes)?.0))
}

fn path_of(folder: &Path, digest: &Digest) -> PathBuf {
    folder.join("blobs/sha256").join(digest.as_str())
}

fn blob(folder: &Path, digest: &Digest, bytes_max: usize) -> Result<Option<Vec<u8>>, PullError> {
    let path = path_of(folder, digest);
    match berth_files::read(&path, bytes_max as u64) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(PullError::Layout { path, error }),
    }
}

/// Adds an artifact to a layout, which is created if the folder is missing or empty. Other artifacts of the layout stay; one with the
/// same tag loses the tag.
///
/// # Errors
/// If the folder is no layout, or cannot be written.
pub fn add(folder: &Path, artifact: &Artifact, tag: &str) -> Result<(), PullError> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |error| PullError::Layout { path, error }
    };
    let blobs = folder.join("blobs/sha256");
    let mut index = index_of(folder)?;
    fs::create_dir_all(&blobs).map_err(at(&blobs))?;
    for bytes in [&artifact.config, &artifact.layer, &artifact.manifest] {
        let path = path_of(folder, &digest_of(bytes));
        replace(&path, bytes).map_err(at(&path))?;
    }
    let digest = format!("sha256:{}", artifact.digest());
    let manifests = index.get_mut("manifests").and_then(Value::as_array_mut);
    let manifests = manifests.ok_or_else(|| no_layout(folder, "`manifests` of its index.json is no list"))?;
    manifests.retain(|one| one["digest"] != digest);
    const TAG: &str = "org.opencontainers.image.ref.name";
    for other in manifests.iter_mut().filter(|one| one["annotations"][TAG] == tag) {
        if let Some(annotations) = other["annotations"].as_object_mut() {
            annotations.remove(TAG);
        }
    }
    manifests.push(json!({
        "mediaType": MANIFEST_TYPE,
        "digest": digest,
        "size": artifact.manifest.len(),
        "annotations": {TAG: tag},
    }));
    // Last, so that the index never names a file that is missing.
    for (name, value) in [("oci-layout", &json!({"imageLayoutVersion": "1.0.0"})), ("index.json", &index)] {
        let path = folder.join(name);
        replace(&path, value.to_string().as_bytes()).map_err(at(&path))?;
    }
    Ok(())
}

/// Writes a file that others see whole or not at all.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let unfinished = path.with_extension("unfinished");
    fs::write(&unfinished, bytes)?;
    fs::rename(&unfinished, path)
}

fn index_of(folder: &Path) -> Result<Value, PullError> {
    let path = folder.join("index.json");
    let bytes = match berth_files::read(&path, INDEX_BYTES_MAX) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let has_files = fs::read_dir(folder).is_ok_and(|mut files| files.next().is_some());
            if has_files {
                return Err(no_layout(folder, "it has other files, but no index.json"));
            }
            return Ok(json!({"schemaVersion": 2, "manifests": []}));
        }
        Err(error) => return Err(PullError::Layout { path, error }),
    };
    serde_json::from_slice(&bytes).map_err(|error| no_layout(folder, &format!("index.json: {error}")))
}

fn no_layout(folder: &Path, why: &str) -> PullError {
    let error =
        std::io::Error::new(ErrorKind::InvalidData, format!("the folder is no OCI image layout: {why}"));
    PullError::Layout { path: folder.to_owned(), error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::artifact::tests::component;

    #[test]
    fn what_was_added_is_read_and_a_tag_moves() {
        let folder = tempfile::tempdir().unwrap();
        let layout = folder.path().join("new/layout");
        let pack = |text: &str| Artifact::pack(component(text), "a.wasm", None).unwrap();
        let (first, second) = (pack("a"), pack("b"));
        add(&layout, &first, "1").unwrap();
        add(&layout, &first, "1").unwrap();
        add(&layout, &second, "1").unwrap();
        for artifact in [&first, &second] {
            let found = read(&layout, &artifact.digest(), &artifact.layer_digest()).unwrap().unwrap();
            assert_eq!(found.module, artifact.layer);
        }
        let index: Value = serde_json::from_slice(&fs::read(layout.join("index.json")).unwrap()).unwrap();
        let tags: Vec<&Value> =
            index["manifests"].as_array().unwrap().iter().map(|m| &m["annotations"]).collect();
        assert_eq!(tags, [&json!({}), &json!({"org.opencontainers.image.ref.name": "1"})]);
    }

    #[test]
    fn a_folder_of_something_else_is_left_alone_and_a_damaged_blob_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let artifact = Artifact::pack(component("a"), "a.wasm", None).unwrap();
        let other = folder.path().join("other");
        fs::create_dir(&other).unwrap();
        fs::write(other.join("file"), "x").unwrap();
        let error = add(&other, &artifact, "1").unwrap_err().to_string();
        assert!(error.contains("no OCI image layout"), "{error}");
        assert_eq!(fs::read_dir(&other).unwrap().count(), 1);
        let layout = folder.path().join("layout");
        let (manifest, layer) = (artifact.digest(), artifact.layer_digest());
        assert_eq!(read(&layout, &manifest, &layer).ok().flatten(), None);
        add(&layout, &artifact, "1").unwrap();
        fs::write(path_of(&layout, &layer), component("c")).unwrap();
        assert!(matches!(read(&layout, &manifest, &layer), Err(PullError::DigestMismatch { .. })));
        for other in ["[]", "{}", "x"] {
            fs::write(layout.join("index.json"), other).unwrap();
            assert!(add(&layout, &artifact, "1").is_err());
        }
        fs::remove_file(path_of(&layout, &layer)).unwrap();
        assert!(matches!(read(&layout, &manifest, &layer), Err(PullError::Layout { .. })));
    }
}
