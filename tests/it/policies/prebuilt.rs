//! The committed policies are those of the committed sources.
// Clippy does not see that helpers of tests are tests, too.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use berth_kernel::node::ports::PolicyFiles as _;
use berth_kernel::policy::version::PolicyVersion;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::support::guests::{NOW, policies};

const WHAT_TO_DO: &str = "run `just policies` and commit policies-wasm/prebuilt";

fn workspace() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("policies-wasm")
}

fn read(path: &str) -> Vec<u8> {
    let path = workspace().join(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// As policies-wasm/componentize computes it: path, NUL, length, content, by path; without
/// the policy's page and scenarios.
fn sources_digest(policy: &str) -> String {
    let mut files = vec!["Cargo.lock".to_owned(), "Cargo.toml".to_owned()];
    let mut folders = vec!["wit".to_owned(), "sdk".to_owned(), policy.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(workspace().join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = format!("{folder}/{}", entry.file_name().to_str().unwrap());
            if path.ends_with("/README.md") || path.ends_with("/scenarios") {
                continue;
            }
            let to = if entry.file_type().unwrap().is_dir() { &mut folders } else { &mut files };
            to.push(path);
        }
    }
    files.sort_by_key(|file| PathBuf::from(file));
    let mut digest = Sha256::new();
    for file in files {
        let content = read(&file);
        digest.update(&file);
        digest.update([0]);
        digest.update((content.len() as u64).to_le_bytes());
        digest.update(content);
    }
    format!("{:x}", digest.finalize())
}

#[test]
fn the_committed_policies_are_those_of_the_committed_sources() {
    let manifest: Value = serde_json::from_slice(&read("prebuilt/manifest.json")).unwrap();
    let policies = manifest["policies"].as_object().unwrap();
    let names: Vec<_> = policies.keys().collect();
    let expected =
        ["binpack", "exclusive", "memory", "mixed", "quota", "spread", "timeslice", "topology", "triage-xid"];
    assert_eq!(names, expected);
    for (name, entry) in policies {
        let sources = sources_digest(name);
        assert_eq!(entry["sources"], sources, "{name} has other sources now; {WHAT_TO_DO}");
        let artifact = read(&format!("prebuilt/{name}.wasm"));
        let digest = format!("{:x}", Sha256::digest(&artifact));
        assert_eq!(entry["artifact"], digest, "{name}.wasm is not what was built; {WHAT_TO_DO}");
    }
}

/// With `UPDATE_EXPECT=1` the file is written instead.
#[test]
fn the_descriptions_of_the_shipped_policies_are_committed() {
    let manifest: Value = serde_json::from_slice(&read("prebuilt/manifest.json")).unwrap();
    let mut versions = BTreeMap::new();
    for name in manifest["policies"].as_object().unwrap().keys() {
        let version = policies().install(&read(&format!("prebuilt/{name}.wasm")), NOW).unwrap();
        assert_eq!(version.name, *name);
        versions.insert(name.clone(), version);
    }
    let described = |v: &PolicyVersion| {
        let hooks: Vec<_> = v.hooks.iter().map(|hook| hook.as_str()).collect();
        json!({
            "digest": v.digest.to_string(),
            "version": v.version,
            "summary": v.summary,
            "hooks": hooks,
            "parametersSchema": v.parameters_schema,
        })
    };
    let truth: BTreeMap<_, _> = versions.iter().map(|(name, v)| (name, described(v))).collect();
    let truth = serde_json::to_string_pretty(&truth).unwrap() + "\n";
    let path = workspace().join("prebuilt/described.json");
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        return std::fs::write(&path, truth).unwrap();
    }
    assert!(std::fs::read_to_string(&path).unwrap() == truth, "{} is stale; {WHAT_TO_DO}", path.display());
    // And what the program has in it is that file.
    for embedded in policies().shipped(NOW) {
        let compiled = &versions[&embedded.name];
        assert!(embedded.shipped && embedded.artifact == embedded.digest, "{embedded:?}");
        assert_eq!(PolicyVersion { artifact: compiled.artifact.clone(), ..embedded }, *compiled);
    }
}
