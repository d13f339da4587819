//! What the author of a policy needs and no daemon: `berth policy new`, `check` and `test`.

use crate::args::PolicyCommand;
use crate::scenario::{Bench, FILE_BYTES_MAX, POLICY_BYTES_MAX, Report};
use crate::{command, policy_new};
use anyhow::{Context, anyhow, bail};
use berth_cli::input_file::read_file;
use berth_cli::output::{Out, facts, print_error};
use berth_cli::parameters::{self, read_parameters};
use berth_cli::upload::shipped_name;
use berth_cli::usage::BadUsage;
use berth_kernel::policy::{Hook, PolicyVersion};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// What a core module begins with; a component has another number behind it.
const CORE_MODULE: &[u8] = b"\0asm\x01\0\0\0";

/// Runs one. 0 good, 1 refused or failed.
pub(super) fn run(command: &PolicyCommand, out: &mut Out) -> ExitCode {
    let good = match command {
        PolicyCommand::Check { file, parameters } => check(file, parameters.as_deref(), out),
        PolicyCommand::Test { file, scenarios, shipped } => {
            test(file.as_deref(), scenarios, shipped.as_deref(), out)
        }
        PolicyCommand::New(new) => policy_new::run(new, out).map(|()| true),
        // `command` has sent these to the daemon.
        PolicyCommand::Client(_) => Ok(true),
    };
    match good {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            print_error(&error);
            command::exit_code(&error)
        }
    }
}

/// What `berth policy check` answers.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Checked {
    ok: bool,
    file: String,
    /// Why a daemon would refuse it.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// What a daemon takes and may yet surprise.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Described>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<Taken>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Described {
    name: String,
    version: String,
    summary: String,
    hooks: Vec<&'static str>,
    digest: String,
    /// `component`, or `coreModule` that became one.
    kind: &'static str,
    bytes: u64,
    parameters_schema: serde_json::Value,
}

/// Whether it takes the parameters that were given.
#[derive(Serialize)]
struct Taken {
    taken: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

fn check(file: &Path, parameters: Option<&str>, out: &mut Out) -> anyhow::Result<bool> {
    // One more, so that the size is refused in the daemon's own words.
    let module = read_file(file, u64::try_from(POLICY_BYTES_MAX)?.saturating_add(1))?;
    let parameters = parameters.map(|given| read_parameters("--parameters", given)).transpose()?;
    let bench = Bench::new()?;
    let name = file.display().to_string();
    let checked = match bench.install(&module) {
        Err(error) => {
            let problem = Some(error.to_string());
            Checked { ok: false, file: name, problem, warning: None, policy: None, parameters: None }
        }
        Ok(version) => {
            let taken = parameters.map(|json| bench.takes(&version, &json));
            Checked {
                ok: taken.as_ref().is_none_or(Result::is_ok),
                file: name,
                problem: None,
                warning: bench.ships_another(&version).then(|| shipped_name(&version.name, &version.label())),
                parameters: taken.map(|taken| Taken { taken: taken.is_ok(), problem: taken.err() }),
                policy: Some(described(&version, module.starts_with(CORE_MODULE))),
            }
        }
    };
    out.answer(&checked, shown)?;
    Ok(checked.ok)
}

fn described(version: &PolicyVersion, core_module: bool) -> Described {
    Described {
        name: version.name.clone(),
        version: version.version.clone(),
        summary: version.summary.clone(),
        hooks: version.hooks.iter().copied().map(Hook::as_str).collect(),
        digest: version.digest.to_string(),
        kind: if core_module { "coreModule" } else { "component" },
        bytes: version.bytes,
        parameters_schema: serde_json::from_str(&version.parameters_schema).unwrap_or_default(),
    }
}

fn shown(checked: &Checked) -> String {
    let mut text = match (&checked.problem, &checked.policy) {
        (Some(problem), _) => format!("refused: {}: {problem}\n", checked.file),
        (None, Some(p)) => {
            let kind = if p.kind == "component" { "component" } else { "core module, becomes a component" };
            let good = format!("ok: {} is a policy that a daemon takes\n", checked.file);
            good + &facts(&[
                ("name", p.name.clone()),
                ("version", p.version.clone()),
                ("summary", p.summary.clone()),
                ("hooks", p.hooks.join(" ")),
                ("kind", kind.into()),
                ("bytes", p.bytes.to_string()),
                ("digest", p.digest.clone()),
            ]) + &parameters::shown(&p.parameters_schema)
        }
        (None, None) => String::new(),
    };
    if let Some(warning) = &checked.warning {
        text += &format!("warning: {warning}\n");
    }
    match &checked.parameters {
        None => {}
        Some(Taken { problem: Some(problem), .. }) => {
            text += &format!("refused: it does not take these parameters: {problem}\n");
        }
        Some(_) => text += "ok: it takes these parameters\n",
    }
    text
}

/// What `berth policy test` answers.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Tested {
    policy: String,
    passed: usize,
    failed: usize,
    scenarios: Vec<Report>,
}

fn test(
    file: Option<&Path>,
    scenarios: &[PathBuf],
    shipped: Option<&str>,
    out: &mut Out,
) -> anyhow::Result<bool> {
    usage_of_test(file, scenarios, shipped)?;
    // With --shipped every path is a scenario.
    let (module, named): (Option<&Path>, Vec<&Path>) = match (shipped, file) {
        (Some(_), file) => (None, file.into_iter().chain(scenarios.iter().map(PathBuf::as_path)).collect()),
        (None, file) => (file, scenarios.iter().map(PathBuf::as_path).collect()),
    };
    let files = files(&named)?;
    let bench = Bench::new()?;
    let version = match (module, shipped) {
        (Some(file), _) => {
            let module = read_file(file, u64::try_from(POLICY_BYTES_MAX)?.saturating_add(1))?;
            bench.install(&module).map_err(|error| anyhow!("{}: {error}", file.display()))?
        }
        (None, name) => bench.shipped(name.unwrap_or_default()).map_err(|why| anyhow!(why))?,
    };
    let mut reports = Vec::new();
    for file in &files {
        let bytes = read_file(file, FILE_BYTES_MAX)?;
        let name = file.display().to_string();
        let text = String::from_utf8(bytes).with_context(|| format!("{name} is no text"))?;
        reports.push(bench.run(&version, &name, &text));
    }
    let passed = reports.iter().filter(|report| report.passed).count();
    let failed = reports.len() - passed;
    let tested = Tested { policy: version.label(), passed, failed, scenarios: reports };
    out.answer(&tested, |tested| {
        let each: String = tested.scenarios.iter().map(Report::text).collect();
        format!("{each}scenarios: {passed} passed, {failed} failed\n")
    })?;
    Ok(failed == 0)
}

/// Exactly one policy must be named, and a scenario.
fn usage_of_test(file: Option<&Path>, scenarios: &[PathBuf], shipped: Option<&str>) -> Result<(), BadUsage> {
    let ends =
        |path: &Path, with: &[&str]| path.extension().is_some_and(|end| with.iter().any(|w| end == *w));
    let paths = || file.into_iter().chain(scenarios.iter().map(PathBuf::as_path));
    if let Some(name) = shipped {
        if name.contains(['/', '.']) {
            return Err(BadUsage(format!(
                "--shipped takes the name of a policy that came with this program, such as timeslice, and {name:?} is a \
                 path: `berth policy test FILE SCENARIOS` tests the policy of a file"
            )));
        }
        if let Some(policy) = paths().find(|path| ends(path, &["wasm"])) {
            return Err(BadUsage(format!(
                "{} and --shipped {name} each name a policy, and one is tested: leave one of them out",
                policy.display()
            )));
        }
    }
    if let (None, Some(story)) = (shipped, file.filter(|file| ends(file, &["yaml", "yml"]))) {
        return Err(BadUsage(format!(
            "{} is a scenario: name the policy's file before it, or --shipped NAME",
            story.display()
        )));
    }
    let named = scenarios.len() + usize::from(shipped.is_some() && file.is_some());
    if named == 0 {
        let given = file.map(|file| format!(", and not only {}", file.display())).unwrap_or_default();
        return Err(BadUsage(format!(
            "name a policy (its file, or --shipped NAME) and then a scenario file or a folder of them{given}"
        )));
    }
    Ok(())
}

/// The files that are named, and those of the folders that are, sorted within each.
fn files(named: &[&Path]) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for path in named {
        if !path.is_dir() {
            found.push(path.to_path_buf());
            continue;
        }
        let reading = || format!("cannot read the folder {}", path.display());
        let mut inside = Vec::new();
        for entry in path.read_dir().with_context(reading)? {
            let file = entry.with_context(reading)?.path();
            if file.extension().is_some_and(|end| end == "yaml" || end == "yml") {
                inside.push(file);
            }
        }
        if inside.is_empty() {
            bail!("the folder {} has no .yaml file", path.display());
        }
        inside.sort();
        found.append(&mut inside);
    }
    Ok(found)
}
