//! Embeds the files that `berth policy new` writes.

use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// The folder of the SDK, the contract and the templates.
const POLICIES_DIR: &str = "../../policies-wasm";

/// Generates `POLICY_FILES`: path and text of each file, sorted.
fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join(POLICIES_DIR);
    let mut files = Vec::new();
    for folder in ["sdk", "templates", "wit"] {
        println!("cargo::rerun-if-changed={POLICIES_DIR}/{folder}");
        collect(&root.join(folder), &mut files)?;
    }
    files.sort();
    let mut text = "static POLICY_FILES: &[(&str, &str)] = &[\n".to_owned();
    for file in files {
        let name = file.strip_prefix(&root)?.to_str().ok_or("paths are UTF-8")?;
        writeln!(text, "    ({name:?}, include_str!({file:?})),")?;
    }
    text += "];\n";
    fs::write(Path::new(&env::var("OUT_DIR")?).join("policy_files.rs"), text)?;
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // Build outputs of templates are left out.
        if ["target", "build", "node_modules", "Cargo.lock", "__pycache__"].contains(&name) {
            continue;
        }
        if path.is_dir() { collect(&path, files)? } else { files.push(path) }
    }
    Ok(())
}
