//! `berth policy check` and `test`: commands for authors of policies, which need no daemon.

use crate::{FILE_BYTES_MAX, PolicyTester, ScenarioReport};
use anyhow::{Context, anyhow, bail};
use berth_cli::arguments::{read_file, read_parameters};
use berth_cli::output::{Out, facts};
use berth_cli::parameters;
use berth_cli::upload::shipped_name;
use berth_cli::usage::BadUsage;
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::version::PolicyVersion;
use berth_wasm::limits::MODULE_BYTES_MAX;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The first bytes of a core module; a component has another version number.
pub(crate) const CORE_MODULE: &[u8] = b"\0asm\x01\0\0\0";

/// The result of `berth policy check`.
#[derive(Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckResult {
    ok: bool,
    file: String,
    /// Why a daemon would refuse it.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// A problem with which a daemon accepts it nevertheless.
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Description>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<ParametersResult>,
    /// Whether it can be used on a sample node; absent if that needs parameters that were not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    activation: Option<ActivationResult>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Description {
    name: String,
    version: String,
    summary: String,
    hooks: Vec<&'static str>,
    digest: String,
    /// `component`, or `coreModule` that is converted to one.
    kind: &'static str,
    bytes: u64,
    parameters_schema: serde_json::Value,
}

/// Whether the policy accepts the given parameters.
#[derive(Serialize)]
struct ParametersResult {
    taken: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// Whether a stack of the policy alone can be activated on a sample node, and its devices granted.
#[derive(Serialize)]
struct ActivationResult {
    possible: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// `berth policy check`. Returns whether the policy is accepted.
///
/// # Errors
/// If a file cannot be read.
pub fn check(file: &Path, parameters: Option<&str>, out: &mut Out) -> anyhow::Result<bool> {
    let module = read_module(file)?;
    let parameters = parameters.map(|text| read_parameters("--parameters", text)).transpose()?;
    let bench = PolicyTester::new()?;
    let name = file.display().to_string();
    let checked = match bench.install(&module) {
        Err(error) => CheckResult { file: name, problem: Some(error.to_string()), ..CheckResult::default() },
        Ok(version) => {
            let accepted = parameters.as_ref().map(|json| bench.check_parameters(&version, json));
            // Without parameters it is tried with the defaults, unless it has to be given some.
            let (is_tried, json) = match &accepted {
                Some(accepted) => (accepted.is_ok(), parameters.as_deref().unwrap_or("{}")),
                None => (!bench.needs_parameters(&version), "{}"),
            };
            let activated = is_tried.then(|| bench.check_activation(&version, json));
            CheckResult {
                ok: accepted.as_ref().is_none_or(Result::is_ok)
                    && activated.as_ref().is_none_or(Result::is_ok),
                activation: activated
                    .map(|result| ActivationResult { possible: result.is_ok(), problem: result.err() }),
                file: name,
                warning: bench.ships_another(&version).then(|| shipped_name(&version.name, &version.label())),
                parameters: accepted
                    .map(|result| ParametersResult { taken: result.is_ok(), problem: result.err() }),
                policy: Some(describe(&version, module.starts_with(CORE_MODULE))),
                ..CheckResult::default()
            }
        }
    };
    out.answer(&checked, as_text)?;
    Ok(checked.ok)
}

pub(crate) fn read_module(file: &Path) -> anyhow::Result<Vec<u8>> {
    // One byte more than allowed, so that `install` refuses the size with the daemon's error.
    read_file(file, u64::try_from(MODULE_BYTES_MAX)?.saturating_add(1))
}

fn describe(version: &PolicyVersion, core_module: bool) -> Description {
    Description {
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

fn as_text(checked: &CheckResult) -> String {
    let mut text = match (&checked.problem, &checked.policy) {
        (Some(problem), _) => format!("refused: {}: {problem}\n", checked.file),
        (None, Some(p)) => {
            let kind =
                if p.kind == "component" { "component" } else { "core module, converted to a component" };
            let verdict = format!("ok: {} is a valid policy\n", checked.file);
            verdict
                + &facts(&[
                    ("name", p.name.clone()),
                    ("version", p.version.clone()),
                    ("summary", p.summary.clone()),
                    ("hooks", p.hooks.join(" ")),
                    ("kind", kind.into()),
                    ("bytes", p.bytes.to_string()),
                    ("digest", p.digest.clone()),
                ])
                + &parameters::shown(&p.parameters_schema)
        }
        (None, None) => String::new(),
    };
    if let Some(warning) = &checked.warning {
        text += &format!("warning: {warning}\n");
    }
    match &checked.parameters {
        None => {}
        Some(ParametersResult { problem: Some(problem), .. }) => {
            text += &format!("refused: the parameters are not accepted: {problem}\n");
        }
        Some(_) => text += "ok: the parameters are accepted\n",
    }
    match (&checked.activation, &checked.policy, &checked.parameters) {
        (Some(ActivationResult { problem: Some(problem), .. }), ..) => {
            text += &format!("refused: a node of eight H100s cannot use it: {problem}\n");
        }
        (Some(_), ..) => {
            text += "ok: it can be activated on a node of eight H100s, and its devices granted\n";
        }
        (None, Some(_), None) => {
            text += "note: without parameters it does not work; --parameters tries it with some\n";
        }
        (None, ..) => {}
    }
    text
}

/// The result of `berth policy test`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct TestResult {
    policy: String,
    passed: usize,
    failed: usize,
    scenarios: Vec<ScenarioReport>,
}

/// `berth policy test`. Returns whether all scenarios passed.
///
/// # Errors
/// If a file cannot be read, or the policy cannot be used.
pub fn test(
    file: Option<&Path>,
    scenarios: &[PathBuf],
    shipped: Option<&str>,
    out: &mut Out,
) -> anyhow::Result<bool> {
    check_test_usage(file, scenarios, shipped)?;
    // With --shipped every path is a scenario.
    let (module, paths): (Option<&Path>, Vec<&Path>) = match (shipped, file) {
        (Some(_), file) => (None, file.into_iter().chain(scenarios.iter().map(PathBuf::as_path)).collect()),
        (None, file) => (file, scenarios.iter().map(PathBuf::as_path).collect()),
    };
    let files = scenario_files(&paths)?;
    let bench = PolicyTester::new()?;
    let version = match (module, shipped) {
        (Some(file), _) => {
            bench.install(&read_module(file)?).map_err(|error| anyhow!("{}: {error}", file.display()))?
        }
        (None, name) => bench.shipped(name.unwrap_or_default()).map_err(|error| anyhow!(error))?,
    };
    let mut reports = Vec::new();
    for file in &files {
        let bytes = read_file(file, FILE_BYTES_MAX)?;
        let name = file.display().to_string();
        let text = String::from_utf8(bytes).with_context(|| format!("{name} is not text"))?;
        reports.push(bench.run(&version, &name, &text));
    }
    let passed = reports.iter().filter(|report| report.passed).count();
    let failed = reports.len() - passed;
    let tested = TestResult { policy: version.label(), passed, failed, scenarios: reports };
    out.answer(&tested, |tested| {
        let reports: String = tested.scenarios.iter().map(ScenarioReport::text).collect();
        format!("{reports}scenarios: {passed} passed, {failed} failed\n")
    })?;
    Ok(failed == 0)
}

/// Checks that exactly one policy and at least one scenario are given.
fn check_test_usage(
    file: Option<&Path>,
    scenarios: &[PathBuf],
    shipped: Option<&str>,
) -> Result<(), BadUsage> {
    let has_extension = |path: &Path, extensions: &[&str]| {
        path.extension().is_some_and(|end| extensions.iter().any(|e| end == *e))
    };
    let paths = || file.into_iter().chain(scenarios.iter().map(PathBuf::as_path));
    if let Some(name) = shipped {
        if name.contains(['/', '.']) {
            return Err(BadUsage(format!(
                "--shipped needs the name of a policy that is built into this program, such as timeslice, and {name:?} is a \
                 path: `berth policy test FILE SCENARIOS` tests the policy of a file"
            )));
        }
        if let Some(policy) = paths().find(|path| has_extension(path, &["wasm"])) {
            return Err(BadUsage(format!(
                "{} and --shipped {name} each name a policy, but only one is tested: remove one of them",
                policy.display()
            )));
        }
    }
    if let (None, Some(scenario)) = (shipped, file.filter(|file| has_extension(file, &["yaml", "yml"]))) {
        return Err(BadUsage(format!(
            "{} is a scenario: name the policy's file before it, or --shipped NAME",
            scenario.display()
        )));
    }
    let count = scenarios.len() + usize::from(shipped.is_some() && file.is_some());
    if count == 0 {
        let only = file.map(|file| format!(", and not only {}", file.display())).unwrap_or_default();
        return Err(BadUsage(format!(
            "name a policy (its file, or --shipped NAME) and then a scenario file or a folder of them{only}"
        )));
    }
    Ok(())
}

/// The given files, and the `.yaml` files of the given folders, sorted within each folder.
fn scenario_files(paths: &[&Path]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.to_path_buf());
            continue;
        }
        let context = || format!("cannot read the folder {}", path.display());
        let mut entries = Vec::new();
        for entry in path.read_dir().with_context(context)? {
            let file = entry.with_context(context)?.path();
            if file.extension().is_some_and(|end| end == "yaml" || end == "yml") {
                entries.push(file);
            }
        }
        if entries.is_empty() {
            bail!("the folder {} has no .yaml file", path.display());
        }
        entries.sort();
        files.append(&mut entries);
    }
    Ok(files)
}
