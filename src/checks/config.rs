//! `berth config check`: reads a file as the daemon would and reports all errors, without starting anything.

use crate::{Findings, SkippedChecks, dry_run};
use berth_cli::output::{Out, facts, report};
use berth_config::{BadSetting, Config, ConfigError, GpuSource, ServeArgs, Source, read_text_or_input};
use berth_files::yaml::Problem;
use berth_http::{Right, TokenSource, check_files};
use serde::Serialize;
use std::path::Path;

/// The result of `berth config check`.
#[derive(Default, Serialize)]
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

/// The environment variables of these flags that are set. They are not applied, since the daemon has an environment of
/// its own.
fn set_variables(serve: &clap::Command) -> Vec<String> {
    let flags = serve.get_arguments();
    let names = flags.filter_map(|flag| flag.get_env()).filter(|name| std::env::var_os(name).is_some());
    names.map(|name| name.to_string_lossy().into_owned()).collect()
}

/// The resulting settings, with defaults.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Settings {
    node: String,
    gpus: String,
    device_plugins_dir: String,
    kubelet_root_dir: String,
    state_dir: String,
    admin_listen: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    health_listen: Option<String>,
    admin: AccessSummary,
    resource: String,
    /// `enforce.memory`.
    memory_limits: &'static str,
    /// `bypass.action`.
    bypass_action: &'static str,
    /// Endpoint and protocol of traces.
    #[serde(skip_serializing_if = "Option::is_none")]
    tracing: Option<String>,
    /// The policies of the stack, in order.
    stack: Vec<String>,
}

/// Runs the command. `serve` is the definition of `berth serve`, for its flags.
///
/// # Errors
/// If the file has errors.
pub fn run(file: &Path, skipped: SkippedChecks, serve: &clap::Command, out: &mut Out) -> anyhow::Result<()> {
    let set = set_variables(serve);
    if !set.is_empty() {
        let set = set.join(", ");
        report(&format!(
            "only the file is checked; `berth serve` would also apply these variables, which are set here: {set}"
        ));
    }
    let is_input = file == Path::new("-");
    let file = if is_input { Path::new("standard input") } else { file };
    let name = file.display().to_string();
    let read = read_text_or_input(if is_input { Path::new("-") } else { file });
    let source = read.and_then(|text| Source::parse(file, &text));
    let checked = source.map_err(anyhow::Error::from).and_then(|source| examine(&source, skipped));
    match checked {
        Ok((config, notes)) => {
            let settings = Some(settings(&config));
            let checked = CheckResult { ok: true, file: name, settings, notes, ..CheckResult::default() };
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
                let checked = CheckResult { file: name, problem, problems, ..CheckResult::default() };
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
        let (findings, dry_run_error) = match dry_run(config, skipped) {
            Ok(findings) => (findings, None),
            Err(error) => (Findings::default(), Some(error)),
        };
        notes = findings.notes;
        notes.extend(config.loaded.notices.iter().cloned());
        notes.extend(
            config
                .rules
                .why_guard_is_needed()
                .map(|why| format!("{why}: `berth guard` must run on the node, too")),
        );
        let mut errors = findings.errors;
        if skipped.files {
            notes.push("the token and TLS files were not read".into());
        } else {
            errors.extend(file_errors(config));
            if !config.admin.token_file.exists() {
                notes.push(format!(
                    "the daemon creates {} when it first starts",
                    config.admin.token_file.display()
                ));
            }
        }
        // Invalid values were left out of the lists, so their indices refer to the source of the settings.
        let source = config.loaded.source.as_deref().unwrap_or(source);
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
    check_files(&config.admin.token_file, &config.admin.access).into_iter().map(|(key, error)| {
        let error = anyhow::Error::new(error);
        let hint = "on a machine without these files, use --without-files";
        BadSetting::new(key, format!("the daemon would not start: {error:#} ({hint})"))
    })
}

fn settings(config: &Config) -> Settings {
    let gpus = match &config.gpus.source {
        GpuSource::Nvml { library: None, .. } => "nvml".into(),
        GpuSource::Nvml { library: Some(path), .. } => format!("nvml by {}", path.display()),
        GpuSource::Sim(profile) => format!("simulated: {profile}"),
    };
    Settings {
        node: config.node.name.clone(),
        gpus,
        device_plugins_dir: config.kubelet.device_plugins_dir.display().to_string(),
        kubelet_root_dir: config.kubelet.root_dir.display().to_string(),
        state_dir: config.node.state_dir.display().to_string(),
        admin_listen: config.admin.listen.to_string(),
        health_listen: config.admin.health_listen.map(|listen| listen.to_string()),
        admin: AccessSummary::new(config),
        resource: config.offers.resource.to_string(),
        memory_limits: config.rules.enforcement.as_str(),
        bypass_action: config.rules.bypass.action.as_str(),
        tracing: config
            .observe
            .tracing
            .as_ref()
            .map(|t| format!("{} ({})", t.endpoint.url, t.endpoint.protocol)),
        stack: config.offers.stack.iter().map(|entry| entry.policy.clone()).collect(),
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
            ("  device plugins", settings.device_plugins_dir.clone()),
            ("  kubelet root", settings.kubelet_root_dir.clone()),
            ("  state folder", settings.state_dir.clone()),
            ("  admin API", access.address(&settings.admin_listen)),
            ("  callers", access.callers()),
            ("  limits", access.limits()),
            ("  health", settings.health_listen.clone().unwrap_or_default()),
            ("  resource", settings.resource.clone()),
            ("  memory limits", settings.memory_limits.into()),
            ("  bypass action", settings.bypass_action.into()),
            ("  traces", settings.tracing.clone().unwrap_or_default()),
            ("  stack", stack),
        ]);
    }
    let notes: String = checked.notes.iter().map(|note| format!("note: {note}\n")).collect();
    text + &notes
}

/// The access settings of the admin API, with defaults.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct AccessSummary {
    /// The file of the token that the first start creates.
    token_file: String,
    /// Further tokens.
    tokens: Vec<Token>,
    /// `None`: plain HTTP.
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<Tls>,
    /// The Unix socket for root.
    #[serde(skip_serializing_if = "Option::is_none")]
    socket: Option<String>,
    /// Whether users of the cluster are accepted.
    kubernetes: bool,
    reads_per_second: u32,
    changes_per_second: u32,
}

#[derive(Serialize)]
struct Token {
    name: String,
    right: &'static str,
    /// `None` if the configuration has the token's SHA-256.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Tls {
    cert_file: String,
    key_file: String,
    /// The CA of client certificates, if they are accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    client_ca_file: Option<String>,
    require_client_cert: bool,
    clients: Vec<Client>,
    #[serde(skip_serializing_if = "Option::is_none")]
    others_may: Option<&'static str>,
}

#[derive(Serialize)]
struct Client {
    name: String,
    right: &'static str,
}

impl AccessSummary {
    fn new(config: &Config) -> Self {
        let access = &config.admin.access;
        let shown = |path: &Path| path.display().to_string();
        let tokens = access.tokens.iter().map(|token| Token {
            name: token.name.clone(),
            right: token.right.as_str(),
            file: match &token.source {
                TokenSource::File(path) => Some(shown(path)),
                TokenSource::Sha256(_) => None,
            },
        });
        let tls = access.tls.as_ref().map(|tls| Tls {
            cert_file: shown(&tls.cert),
            key_file: shown(&tls.key),
            client_ca_file: tls.client_ca.as_deref().map(shown),
            require_client_cert: tls.require_client_cert,
            clients: tls
                .clients
                .iter()
                .flatten()
                .map(|(name, right)| Client { name: name.clone(), right: right.as_str() })
                .collect(),
            others_may: tls.others_may.map(Right::as_str),
        });
        Self {
            token_file: shown(&config.admin.token_file),
            tokens: tokens.collect(),
            tls,
            socket: access.socket.as_deref().map(shown),
            kubernetes: access.kubernetes.is_some(),
            reads_per_second: access.limits.reads_per_second,
            changes_per_second: access.limits.changes_per_second,
        }
    }

    /// The address, and whether it uses TLS.
    fn address(&self, listen: &str) -> String {
        match &self.tls {
            Some(tls) => format!("https://{listen}, TLS by {} and {}", tls.cert_file, tls.key_file),
            None => format!("http://{listen}, without TLS"),
        }
    }

    /// All kinds of callers, with their rights.
    fn callers(&self) -> String {
        let mut callers = vec![format!("the token in {} (change)", self.token_file)];
        callers.extend(self.tokens.iter().map(|Token { name, right, file }| match file {
            Some(file) => format!("token {name} in {file} ({right})"),
            None => format!("token {name} by its SHA-256 ({right})"),
        }));
        if let Some(tls) = &self.tls
            && let Some(ca) = &tls.client_ca_file
        {
            let rights = tls.clients.iter().map(|Client { name, right }| format!("{name}: {right}"));
            let others = format!("others: {}", tls.others_may.unwrap_or("nothing"));
            let rights = rights.chain([others]).collect::<Vec<_>>().join(", ");
            let required = if tls.require_client_cert { ", required" } else { "" };
            callers.push(format!("client certificates of {ca} ({rights}){required}"));
        }
        callers.extend(self.socket.as_ref().map(|socket| format!("root at {socket} (change)")));
        if self.kubernetes {
            callers.push("users of the cluster, by their rights there".into());
        }
        callers.join("; ")
    }

    /// The rate limits of one client.
    fn limits(&self) -> String {
        format!("{} reads and {} changes a second per client", self.reads_per_second, self.changes_per_second)
    }
}
