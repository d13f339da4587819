//! `berth config check`: reads a file as the daemon would and reports all errors, without starting anything.

mod access;

use crate::config::{BadSetting, Config, ConfigError, Findings, GpuSource, ServeArgs, SkippedChecks, Source};
use access::AccessSummary;
use berth_cli::output::{Out, facts};
use berth_files::yaml::Problem;
use berth_http::check_files;
use serde::Serialize;
use std::path::Path;

/// The result of `berth config check`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckResult {
    ok: bool,
    file: String,
    /// All errors in one text.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The errors one by one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<FileError>,
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<Settings>,
    /// Facts that only a check on the node can verify.
    notes: Vec<String>,
}

/// One error of the file.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FileError {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<u64>,
    /// Such as `stack[0].policy`.
    key: String,
    what: String,
}

impl From<&Problem> for FileError {
    fn from(Problem { place, key, what }: &Problem) -> Self {
        let (line, column) = (place.map(|place| place.line), place.map(|place| place.column));
        Self { line, column, key: key.clone(), what: what.clone() }
    }
}

/// The resulting settings, with defaults.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Settings {
    node: String,
    gpus: String,
    kubelet_dir: String,
    state_dir: String,
    admin_listen: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    health_listen: Option<String>,
    admin: AccessSummary,
    resource: String,
    /// Endpoint and protocol of traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    tracing: Option<String>,
    /// The policies of the stack, in order.
    stack: Vec<String>,
}

pub(crate) fn run(file: &Path, skipped: SkippedChecks, out: &mut Out) -> anyhow::Result<()> {
    let name = file.display().to_string();
    let checked =
        Source::read(file).map_err(anyhow::Error::from).and_then(|source| examine(&source, skipped));
    match checked {
        Ok((config, notes)) => {
            let settings = Some(settings(&config));
            let checked =
                CheckResult { ok: true, file: name, problem: None, problems: Vec::new(), settings, notes };
            out.answer(&checked, as_text)
        }
        Err(error) => {
            // As text, the caller prints the error.
            if !out.is_table() {
                let problems = match error.downcast_ref() {
                    Some(ConfigError::Wrong { problems, .. }) => {
                        problems.iter().map(FileError::from).collect()
                    }
                    _ => Vec::new(),
                };
                let problem = Some(format!("{error:#}"));
                let checked = CheckResult {
                    ok: false,
                    file: name,
                    problem,
                    problems,
                    settings: None,
                    notes: Vec::new(),
                };
                out.answer(&checked, |_| String::new())?;
            }
            Err(error)
        }
    }
}

/// The settings of a file, with notes on what this machine cannot verify.
fn examine(source: &Source, skipped: SkippedChecks) -> anyhow::Result<(Config, Vec<String>)> {
    let args = &ServeArgs::default();
    let (config, mut problems) = source.settings(args);
    let mut notes = Vec::new();
    if let Some(config) = &config {
        let (findings, dry_run_error) = match crate::daemon::dry_run(config, skipped) {
            Ok(findings) => (findings, None),
            Err(error) => (Findings::default(), Some(error)),
        };
        notes = findings.notes;
        notes.extend(config.notices.iter().cloned());
        let mut errors = findings.errors;
        if skipped.files {
            notes.push("the token and TLS files were not read".into());
        } else {
            errors.extend(file_errors(config));
            if !config.token_file.exists() {
                notes
                    .push(format!("the daemon creates {} when it first starts", config.token_file.display()));
            }
        }
        // Invalid values were left out of the lists, so their indices refer to the source of the settings.
        let source = config.source.as_deref().unwrap_or(source);
        errors.into_iter().for_each(|bad| problems.push(source.locate(bad, args)));
        if let Some(error) = dry_run_error {
            // It is not an error of the file, and must not hide those.
            if problems.is_empty() {
                return Err(error);
            }
            problems
                .push(source.locate(BadSetting::new("stack", format!("was not checked: {error:#}")), args));
        }
    }
    match config {
        Some(config) if problems.is_empty() => Ok((config, notes)),
        _ => Err(source.error(problems).into()),
    }
}

/// Errors of the token and TLS files.
fn file_errors(config: &Config) -> impl Iterator<Item = BadSetting> {
    check_files(&config.token_file, &config.admin).into_iter().map(|(key, error)| {
        let error = anyhow::Error::new(error);
        let hint = "on a machine without these files, use --without-files";
        BadSetting::new(key, format!("the daemon would not start: {error:#} ({hint})"))
    })
}

fn settings(config: &Config) -> Settings {
    let gpus = match &config.gpus {
        GpuSource::Nvml { library: None, .. } => "nvml".into(),
        GpuSource::Nvml { library: Some(path), .. } => format!("nvml by {}", path.display()),
        GpuSource::Sim(profile) => format!("simulated: {profile}"),
    };
    Settings {
        node: config.node_name.clone(),
        gpus,
        kubelet_dir: config.kubelet_dir.display().to_string(),
        state_dir: config.state_dir.display().to_string(),
        admin_listen: config.admin_listen.to_string(),
        health_listen: config.health_listen.map(|listen| listen.to_string()),
        admin: AccessSummary::new(config),
        resource: config.resource.to_string(),
        tracing: config.tracing.as_ref().map(|t| format!("{} ({})", t.endpoint.url, t.endpoint.protocol)),
        stack: config.stack.iter().map(|entry| entry.policy.clone()).collect(),
    }
}

fn as_text(checked: &CheckResult) -> String {
    let mut text = format!("ok: {}\n", checked.file);
    if let Some(settings) = &checked.settings {
        let stack = match settings.stack.as_slice() {
            [] => "none: the baseline offers whole GPUs".into(),
            policies => policies.join(", "),
        };
        let access = &settings.admin;
        text += &facts(&[
            ("  node", settings.node.clone()),
            ("  GPUs", settings.gpus.clone()),
            ("  kubelet folder", settings.kubelet_dir.clone()),
            ("  state folder", settings.state_dir.clone()),
            ("  admin API", access.address(&settings.admin_listen)),
            ("  callers", access.callers()),
            ("  limits", access.limits()),
            ("  health", settings.health_listen.clone().unwrap_or_default()),
            ("  resource", settings.resource.clone()),
            ("  traces", settings.tracing.clone().unwrap_or_default()),
            ("  stack", stack),
        ]);
    }
    let notes: String = checked.notes.iter().map(|note| format!("note: {note}\n")).collect();
    text + &notes
}
