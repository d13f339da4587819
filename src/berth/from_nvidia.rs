//! `berth config from-nvidia`: a file of NVIDIA's device plugin as Berth's own.

use crate::config::nvidia::{Finding, is_nvidia, translate};
use crate::config::read_text;
use anyhow::{anyhow, ensure};
use berth_cli::output::Out;
use berth_files::yaml::Document;
use serde::Serialize;
use std::path::Path;

/// What is answered to programs.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Shown {
    yaml: String,
    findings: Vec<Finding>,
}

pub(super) fn run(file: &Path, out: &mut Out) -> anyhow::Result<()> {
    let text = read_text(file)?;
    let name = file.display();
    let read = Document::parse(&text).and_then(|document| Ok((is_nvidia(&document), translate(&document)?)));
    let (is_nvidias, translated) =
        read.map_err(|what| anyhow!("{name}: NVIDIA's device plugin would not start with it: {what}"))?;
    ensure!(
        is_nvidias || translated.findings.is_empty(),
        "{name} is not a configuration file of NVIDIA's device plugin: it has none of the keys version, flags, sharing, \
         resources, imex"
    );
    let refusal = translated.refusal;
    let shown = Shown { yaml: translated.yaml, findings: translated.findings };
    out.answer(&shown, |shown| format!("# {name}, converted to a Berth configuration\n{}", shown.yaml))?;
    ensure!(refusal.is_empty(), "{name} uses settings that Berth does not support: {refusal}");
    Ok(())
}
