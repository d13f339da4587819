//! `berth config check`: reads a file as the daemon would, names all that is wrong with it, and starts nothing.

mod door;

use crate::config::{BadSetting, Config, ConfigError, Findings, GpuSource, ServeArgs, Source, Without};
use berth_cli::output::{Out, facts};
use berth_files::yaml::Problem;
use berth_http::check_files;
use door::Door;
use serde::Serialize;
use std::path::Path;

/// What `berth config check` answers.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Checked {
    ok: bool,
    file: String,
    /// Why a daemon would refuse it, in one text.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// The same one by one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<Wrong>,
    #[serde(skip_serializing_if = "Option::is_none")]
    settings: Option<Settings>,
    /// What cannot be known without the node.
    notes: Vec<String>,
}

/// One error of the file.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Wrong {
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    column: Option<u64>,
    /// Such as `stack[0].policy`.
    key: String,
    what: String,
}

impl From<&Problem> for Wrong {
    fn from(Problem { place, key, what }: &Problem) -> Self {
        let (line, column) = (place.map(|place| place.line), place.map(|place| place.column));
        Self { line, column, key: key.clone(), what: what.clone() }
    }
}

/// What the file comes to, defaults filled in.
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
    admin: Door,
    resource: String,
    /// Where traces go, and what is spoken there.
    #[serde(skip_serializing_if = "Option::is_none")]
    tracing: Option<String>,
    /// The policies of its stack, in order.
    stack: Vec<String>,
}

pub(crate) fn run(file: &Path, without: Without, out: &mut Out) -> anyhow::Result<()> {
    let name = file.display().to_string();
    let checked =
        Source::read(file).map_err(anyhow::Error::from).and_then(|source| examine(&source, without));
    match checked {
        Ok((config, notes)) => {
            let settings = Some(settings(&config));
            let checked =
                Checked { ok: true, file: name, problem: None, problems: Vec::new(), settings, notes };
            out.answer(&checked, shown)
        }
        Err(error) => {
            // For people the error itself is printed.
            if !out.is_table() {
                let problems = match error.downcast_ref() {
                    Some(ConfigError::Wrong { problems, .. }) => problems.iter().map(Wrong::from).collect(),
                    _ => Vec::new(),
                };
                let problem = Some(format!("{error:#}"));
                let checked =
                    Checked { ok: false, file: name, problem, problems, settings: None, notes: Vec::new() };
                out.answer(&checked, |_| String::new())?;
            }
            Err(error)
        }
    }
}

/// The settings of a file, and what cannot be known of them on this machine.
fn examine(source: &Source, without: Without) -> anyhow::Result<(Config, Vec<String>)> {
    let args = &ServeArgs::default();
    let (config, mut problems) = source.settings(args);
    let mut notes = Vec::new();
    if let Some(config) = &config {
        let (found, unasked) = match crate::daemon::rehearse(config, without) {
            Ok(found) => (found, None),
            Err(error) => (Findings::default(), Some(error)),
        };
        notes = found.notes;
        notes.extend(config.notices.iter().cloned());
        let mut wrong = found.errors;
        if without.files {
            notes.push("the token and TLS files that it names were not read".into());
        } else {
            wrong.extend(files(config));
            if !config.token_file.exists() {
                notes.push(format!("the daemon makes {} when it first starts", config.token_file.display()));
            }
        }
        // The lists of these settings lack what could not be read.
        let source = config.source.as_deref().unwrap_or(source);
        wrong.into_iter().for_each(|bad| problems.push(source.locate(bad, args)));
        if let Some(error) = unasked {
            // Alone it says nothing against the file; beside what is wrong with that it must not hide it.
            if problems.is_empty() {
                return Err(error);
            }
            problems
                .push(source.locate(BadSetting::new("stack", format!("was not checked: {error:#}")), args));
        }
    }
    match config {
        Some(config) if problems.is_empty() => Ok((config, notes)),
        _ => Err(source.wrong(problems).into()),
    }
}

/// What is wrong with the files of tokens and of TLS.
fn files(config: &Config) -> impl Iterator<Item = BadSetting> {
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
        admin: Door::of(config),
        resource: config.resource.to_string(),
        tracing: config.tracing.as_ref().map(|t| format!("{} ({})", t.endpoint.url, t.endpoint.protocol)),
        stack: config.stack.iter().map(|entry| entry.policy.clone()).collect(),
    }
}

fn shown(checked: &Checked) -> String {
    let mut text = format!("ok: {}\n", checked.file);
    if let Some(settings) = &checked.settings {
        let stack = match settings.stack.as_slice() {
            [] => "none: the baseline offers whole GPUs".into(),
            policies => policies.join(", "),
        };
        let door = &settings.admin;
        text += &facts(&[
            ("  node", settings.node.clone()),
            ("  GPUs", settings.gpus.clone()),
            ("  kubelet folder", settings.kubelet_dir.clone()),
            ("  state folder", settings.state_dir.clone()),
            ("  admin API", door.address(&settings.admin_listen)),
            ("  lets in", door.lets_in()),
            ("  at most", door.limits()),
            ("  health", settings.health_listen.clone().unwrap_or_default()),
            ("  resource", settings.resource.clone()),
            ("  traces", settings.tracing.clone().unwrap_or_default()),
            ("  stack", stack),
        ]);
    }
    let notes: String = checked.notes.iter().map(|note| format!("note: {note}\n")).collect();
    text + &notes
}
