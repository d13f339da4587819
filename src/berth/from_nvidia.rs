//! `berth config from-nvidia`: converts a configuration file of NVIDIA's device plugin.

use crate::config::nvidia::{Finding, is_nvidia, translate};
use crate::config::read_text;
use anyhow::{anyhow, ensure};
use berth_cli::output::Out;
use berth_files::yaml::Document;
use serde::Serialize;
use std::path::Path;

/// The JSON output.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Converted {
    yaml: String,
    findings: Vec<Finding>,
}

pub(super) fn run(file: &Path, out: &mut Out) -> anyhow::Result<()> {
    let text = read_text(file)?;
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
    let converted = Converted { yaml: translated.yaml, findings: translated.findings };
    out.answer(&converted, |converted| {
        format!("# {name}, converted to a Berth configuration\n{}", converted.yaml)
    })?;
    ensure!(refusal.is_empty(), "{name} uses settings that Berth does not support: {refusal}");
    Ok(())
}
