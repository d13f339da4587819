//! `berth cdi check`: what containers get by one CDI specification and not by another.

use anyhow::Context;
use berth_cli::output::Out;
use berth_gpus::cdi::{Spec, compare, missing_host_paths};
use serde::Serialize;
use std::path::Path;

/// The result, as `-o json` shows it.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckResult {
    /// What a container does not get.
    missing: Vec<String>,
    /// What it gets in addition.
    extra: Vec<String>,
    /// Paths that this machine lacks.
    absent_on_host: Vec<String>,
    /// What Berth leaves out on purpose.
    left_out: Vec<String>,
    /// Libraries as files under their sonames.
    soname_files: Vec<String>,
}

/// Returns whether containers get the same.
///
/// # Errors
/// If a file cannot be read.
pub fn run(file: &Path, against: &Path, without_files: bool, out: &mut Out) -> anyhow::Result<bool> {
    let read = |path: &Path| Spec::read(path).with_context(|| format!("cannot use {}", path.display()));
    let (a, b) = (read(file)?, read(against)?);
    let found = compare(&a, &b);
    let absent_on_host = if without_files { Vec::new() } else { missing_host_paths(&a, Path::new("/")) };
    let is_good = found.is_equal() && absent_on_host.is_empty();
    let result = CheckResult {
        missing: found.missing,
        extra: found.extra,
        absent_on_host,
        left_out: found.left_out,
        soname_files: found.soname_files,
    };
    out.answer(&result, |result| as_text(result, file, against))?;
    Ok(is_good)
}

fn as_text(result: &CheckResult, file: &Path, against: &Path) -> String {
    let mut text = String::new();
    for (mark, lines) in [
        ("missing", &result.missing),
        ("extra", &result.extra),
        ("absent on this machine", &result.absent_on_host),
    ] {
        text.extend(lines.iter().map(|line| format!("{mark}: {line}\n")));
    }
    let differences = result.missing.len() + result.extra.len();
    let (file, against) = (file.display(), against.display());
    text += &match (differences, result.absent_on_host.len()) {
        (0, 0) => format!("containers get by {file} what they get by {against}"),
        (0, absent) => format!("containers get the same, but {absent} paths of {file} do not exist here"),
        (differences, _) => format!("{differences} differences of {file} from {against}"),
    };
    let (left_out, soname_files) = (result.left_out.len(), result.soname_files.len());
    text += &format!(
        "; not counted: {left_out} of graphics, firmware or `all`, {soname_files} libraries under their sonames\n"
    );
    text
}
