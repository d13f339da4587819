//! Writes prebuilt/ from compiled policies.
//!
//!     componentize WORKSPACE TARGET-FOLDER TOOLCHAIN POLICY...
//!
//! For each policy, the core module `TARGET-FOLDER/berth_policy_<name>.wasm` becomes the component
//! `WORKSPACE/prebuilt/<name>.wasm`, and `prebuilt/manifest.json` has the digest of its sources. A test of
//! the daemon computes the digests again, over the same files in the same order
//! (tests/it/policies/prebuilt.rs).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Map, json};
use sha2::{Digest, Sha256};
use wit_component::ComponentEncoder;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [workspace, target, toolchain, policies @ ..] = &arguments[..] else {
        bail!("usage: componentize WORKSPACE TARGET-FOLDER TOOLCHAIN POLICY...");
    };
    let workspace = Path::new(workspace);
    let mut entries = Map::new();
    for policy in policies {
        let core = Path::new(target).join(format!("berth_policy_{}.wasm", policy.replace('-', "_")));
        let core = fs::read(&core).with_context(|| format!("read {}", core.display()))?;
        let component = ComponentEncoder::default()
            .module(&core)
            .and_then(|encoder| encoder.validate(true).encode())
            .with_context(|| format!("convert {policy} into a component"))?;
        let path = workspace.join("prebuilt").join(format!("{policy}.wasm"));
        fs::write(&path, &component).with_context(|| format!("write {}", path.display()))?;
        let entry = json!({
            "sources": sources_digest(workspace, policy)?,
            "artifact": format!("{:x}", Sha256::digest(&component)),
            "bytes": component.len(),
        });
        entries.insert(policy.clone(), entry);
    }
    let manifest = json!({ "toolchain": toolchain, "policies": entries });
    let path = workspace.join("prebuilt/manifest.json");
    let text = serde_json::to_string_pretty(&manifest)? + "\n";
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}

/// The digest of all files that a policy is built from. For each file, sorted by path: the path, a NUL,
/// the length as eight bytes in little-endian order, and the content. The policy's README and scenarios
/// are not part of the build.
fn sources_digest(workspace: &Path, policy: &str) -> Result<String> {
    let mut files: Vec<PathBuf> = ["Cargo.lock", "Cargo.toml"].map(PathBuf::from).into();
    for folder in ["wit", "sdk", policy] {
        collect(workspace, Path::new(folder), &mut files)?;
    }
    files.sort();
    let mut digest = Sha256::new();
    for file in files {
        let content = fs::read(workspace.join(&file)).with_context(|| format!("read {}", file.display()))?;
        let length = u64::try_from(content.len())?;
        digest.update(file.to_str().context("paths are UTF-8")?);
        digest.update([0]);
        digest.update(length.to_le_bytes());
        digest.update(content);
    }
    Ok(format!("{:x}", digest.finalize()))
}

fn collect(workspace: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = fs::read_dir(workspace.join(folder));
    for entry in entries.with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        let path = folder.join(entry.file_name());
        if path.ends_with("README.md") || path.ends_with("scenarios") {
            continue;
        }
        if entry.file_type()?.is_dir() {
            collect(workspace, &path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
