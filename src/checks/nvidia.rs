//! `berth config from-nvidia`: converts a configuration file of NVIDIA's device plugin.

use anyhow::{anyhow, ensure};
use berth_cli::output::Out;
use berth_config::nvidia::{Finding, is_nvidia, translate};
use berth_config::read_text_or_input;
use berth_files::yaml::Document;
use serde::Serialize;
use std::path::Path;

/// The JSON output of `berth config from-nvidia`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Converted {
    yaml: String,
    findings: Vec<Finding>,
}

/// Converts the file.
///
/// # Errors
/// If it cannot be read, or uses settings that Berth does not support.
pub fn run(file: &Path, out: &mut Out) -> anyhow::Result<()> {
    let text = read_text_or_input(file)?;
    let file = if file == Path::new("-") { Path::new("standard input") } else { file };
    let name = file.display();
    let parsed =
        Document::parse(&text).and_then(|document| Ok((is_nvidia(&document), translate(&document)?)));
    let (is_nvidia, translated) = parsed
        .map_err(|problems| anyhow!("{name}: NVIDIA's device plugin would not start with it: {problems}"))?;
    ensure!(
        is_nvidia || translated.findings.is_empty(),
        "{name} is not a configuration file of NVIDIA's device plugin: it has none of the keys version, flags, sharing, \
         resources, imex"
    );
    let refusal = translated.refusal;
    let mut yaml = translated.yaml;
    if !refusal.is_empty() {
        let keys = translated.findings.iter().filter(|finding| finding.refused).map(|finding| &finding.key);
        yaml += &unsupported(&keys.collect::<Vec<_>>())?;
    }
    let converted = Converted { yaml, findings: translated.findings };
    out.answer(&converted, |converted| {
        format!("# {name}, converted to a Berth configuration\n{}", converted.yaml)
    })?;
    ensure!(refusal.is_empty(), "{name} uses settings that Berth does not support: {refusal}");
    Ok(())
}

/// The lines that make Berth refuse a converted file which lacks settings of the original: without them it would be a
/// valid file with another meaning, such as whole GPUs in place of shares.
fn unsupported(keys: &[&String]) -> anyhow::Result<String> {
    let keys = serde_json::to_string(keys)?;
    Ok(format!(
        "# The line `unsupported` makes Berth refuse this file: replace its settings as the comments describe, then remove it.\n\
         unsupported: {keys}\n"
    ))
}
