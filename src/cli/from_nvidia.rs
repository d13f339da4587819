//! `berth config from-nvidia`: a file of NVIDIA's device plugin as Berth's own.

use super::output::Out;
use crate::config::nvidia::{Finding, is_nvidia, translate};
use crate::config::read_text;
use anyhow::{anyhow, ensure};
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
    let translated = translate(&text)
        .map_err(|what| anyhow!("{name}: NVIDIA's device plugin would not start with it: {what}"))?;
    ensure!(
        is_nvidia(&text) || translated.findings.is_empty(),
        "{name} is no configuration of NVIDIA's device plugin: it has none of version, flags, sharing, resources, imex"
    );
    let refusal = translated.refusal;
    let shown = Shown { yaml: translated.yaml, findings: translated.findings };
    out.answer(&shown, |shown| format!("# {name} as a configuration of Berth's\n{}", shown.yaml))?;
    ensure!(refusal.is_empty(), "{name} asks for what Berth has not: {refusal}");
    Ok(())
}
