//! An installed version: its loaded component, the calls of its hooks, and its description.

use std::sync::OnceLock;

use serde_json::Value;
use wasmtime::component::{Component, ComponentExportIndex, ComponentNamedList, Instance, Lift, Lower};
use wasmtime::{Result as Wasm, Store};

use super::artifacts::Artifacts;
use super::bindings::PolicyPre;
use super::bindings::berth::policy::types as wit;
use super::call::{CallResult, Runner};
use super::compile::not_a_policy;
use super::convert::{HOOKS, WitAnswer, WitQuestion};
use super::fault;
use super::guest::Guest;
use super::limits::{DESCRIBE_WALL_MS_MAX, SUMMARY_BYTES_MAX, VERSION_BYTES_MAX};
use berth_kernel::node::ports::InstallError;
use berth_kernel::policy::hooks::{Fault, Hook, SCHEMA_BYTES_MAX};
use berth_kernel::policy::version::PolicyVersion;

/// Longest name, characters: that of a DNS label.
const NAME_BYTES_MAX: usize = 63;

/// An installed version.
pub(super) struct Installed {
    pub(super) version: PolicyVersion,
    pub(super) label: String,
    /// Empty until the first call, so that an unused version takes little memory.
    pub(super) module: OnceLock<Module>,
}

impl Installed {
    pub(super) fn new(version: PolicyVersion) -> Self {
        Self { label: version.label(), version, module: OnceLock::new() }
    }

    /// The version's code, loaded by the first call.
    pub(super) fn module(&self, artifacts: &Artifacts, runner: &Runner) -> Result<&Module, Fault> {
        if let Some(module) = self.module.get() {
            return Ok(module);
        }
        // Callers restore the version first, which compiles it if necessary. A call itself does not compile.
        let missing =
            || fault::missing(format!("the compiled form of {} is missing: activate it again", self.label));
        let artifact = artifacts.artifact(&self.version.digest, &self.version.artifact);
        let module = Module::load(runner, &artifact.ok_or_else(missing)?);
        let module = module.map_err(|error| fault::missing(error.to_string()))?;
        // Concurrent first calls may each load the module; the first one is used.
        Ok(self.module.get_or_init(|| module))
    }
}

/// A component that can be called. The indices of its hooks are looked up once, so that a call checks the type of its
/// own hook only and not of all exports.
pub(super) struct Module {
    /// For `describe` only: instantiating it checks the types of all exports.
    policy: PolicyPre<Guest>,
    offer: ComponentExportIndex,
    place: ComponentExportIndex,
    admit: ComponentExportIndex,
    triage: ComponentExportIndex,
}

impl Module {
    /// Loads an artifact.
    ///
    /// # Errors
    /// If it needs more memory than the pool has, or its imports or exports do not fit the world. The types of exports
    /// are checked at each call, and all of them when `describe` is called at installation.
    pub(super) fn load(runner: &Runner, artifact: &[u8]) -> Result<Self, InstallError> {
        Self::link(runner, artifact).map_err(|error| not_a_policy(fault::error_chain(&error)))
    }

    fn link(runner: &Runner, artifact: &[u8]) -> Wasm<Self> {
        // SAFETY: `deserialize` requires bytes that wasmtime produced. These are in memory, where nothing changes
        // them, and come either directly from the compiler process or from a file whose sha256 is the one in the
        // store. wasmtime itself checks that the artifact fits this release, processor and configuration.
        #[allow(unsafe_code)]
        let component = unsafe { Component::deserialize(&runner.engine, artifact) }?;
        let policy = PolicyPre::new(runner.linker.instantiate_pre(&component)?)?;
        let find = |name: &str| {
            let index = component.get_export_index(None, name);
            index.ok_or_else(|| wasmtime::format_err!("it does not export `{name}`"))
        };
        Ok(Self {
            policy,
            offer: find("offer")?,
            place: find("place")?,
            admit: find("admit")?,
            triage: find("triage")?,
        })
    }

    /// Calls the hook of a question in a fresh instance.
    pub(super) fn call(
        &self,
        runner: &Runner,
        label: &str,
        wall_ms: u64,
        context: &wit::Context,
        question: &WitQuestion,
    ) -> CallResult<WitAnswer> {
        let instantiate = |store: &mut Store<Guest>| self.policy.instance_pre().instantiate(store);
        runner.call(label, wall_ms, instantiate, |of, store| {
            Ok(match question {
                WitQuestion::Offer => WitAnswer::Offer(call_hook(of, store, self.offer, (context,))?),
                WitQuestion::Place(request) => {
                    WitAnswer::Place(call_hook(of, store, self.place, (context, request))?)
                }
                WitQuestion::Admit(request) => {
                    WitAnswer::Admit(call_hook(of, store, self.admit, (context, request))?)
                }
                WitQuestion::Triage(reading) => {
                    WitAnswer::Triage(call_hook(of, store, self.triage, (context, reading))?)
                }
            })
        })
    }

    /// Calls `describe`, and checks the description.
    ///
    /// # Errors
    /// If the call fails, or the description is invalid.
    pub(super) fn describe(&self, runner: &Runner) -> Result<(wit::Description, Vec<Hook>), InstallError> {
        let CallResult { answer, .. } = runner.call(
            "describe",
            DESCRIBE_WALL_MS_MAX,
            |store| self.policy.instantiate(store),
            |policy, store| policy.call_describe(store),
        );
        let description = answer.map_err(|fault| not_a_policy(format!("`describe`: {fault}")))?;
        let hooks = check(&description).map_err(|reason| not_a_policy(format!("`describe`: {reason}")))?;
        Ok((description, hooks))
    }
}

/// Calls the hook with this export index. `None` is `pass`.
///
/// # Errors
/// If the policy traps or returns malformed data.
fn call_hook<P: ComponentNamedList + Lower, R: Lift>(
    instance: &Instance,
    store: &mut Store<Guest>,
    hook: ComponentExportIndex,
    parameters: P,
) -> Wasm<Option<R>> {
    let hook = instance.get_typed_func::<P, (Option<R>,)>(&mut *store, hook)?;
    Ok(hook.call(store, parameters)?.0)
}

/// Checks a description by the rules of the WIT world. Returns the hooks that it names.
fn check(description: &wit::Description) -> Result<Vec<Hook>, String> {
    check_name(&description.name)?;
    check_version(&description.version)?;
    check_text("the summary", &description.summary, SUMMARY_BYTES_MAX)?;
    check_schema(&description.parameters_schema)?;
    let hooks = HOOKS.into_iter().filter(|(_, flag)| description.hooks.contains(*flag));
    let hooks: Vec<_> = hooks.map(|(hook, _)| hook).collect();
    if hooks.is_empty() {
        return Err("it names no hook, so it would never be called".to_owned());
    }
    Ok(hooks)
}

fn check_name(name: &str) -> Result<(), String> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let dashed = name.starts_with('-') || name.ends_with('-');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || dashed || !name.bytes().all(inner) {
        return Err(format!("the name {} is not a DNS label", quoted(name)));
    }
    Ok(())
}

/// Checks the form `1.2.3-pre+build` of semantic versions.
fn check_version(version: &str) -> Result<(), String> {
    let (rest, build) = version.split_once('+').map_or((version, None), |(a, b)| (a, Some(b)));
    let (core, pre) = rest.split_once('-').map_or((rest, None), |(a, b)| (a, Some(b)));
    let number = |part: &str| {
        let digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        digits && (part == "0" || !part.starts_with('0'))
    };
    let label = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let labels = |text: Option<&str>| text.is_none_or(|text| text.split('.').all(label));
    let numbers = core.split('.').filter(|part| number(part)).count();
    if version.len() > VERSION_BYTES_MAX
        || numbers != 3
        || core.split('.').count() != 3
        || !labels(pre)
        || !labels(build)
    {
        return Err(format!("the version {} is not a semantic version", quoted(version)));
    }
    Ok(())
}

fn check_text(what: &str, text: &str, bytes_max: usize) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err(format!("{what} is empty"));
    }
    if text.len() > bytes_max {
        return Err(format!("{what} has {} bytes; at most {bytes_max}", text.len()));
    }
    if text.chars().any(char::is_control) {
        return Err(format!("{what} contains control characters"));
    }
    Ok(())
}

fn check_schema(schema: &str) -> Result<(), String> {
    if schema.len() > SCHEMA_BYTES_MAX {
        let bytes = schema.len();
        return Err(format!("the schema has {bytes} bytes; at most {SCHEMA_BYTES_MAX}"));
    }
    match serde_json::from_str(schema) {
        Ok(Value::Object(_)) => Ok(()),
        Ok(_) => Err("the schema is not a JSON object".to_owned()),
        Err(error) => Err(format!("the schema is not JSON: {error}")),
    }
}

/// A guest's text for an error: quoted, escaped and truncated.
fn quoted(text: &str) -> String {
    let start: String = text.chars().take(80).collect();
    format!("{start:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> wit::Description {
        wit::Description {
            name: "example".into(),
            version: "1.2.3".into(),
            summary: "An example.".into(),
            hooks: wit::Hooks::ADMIT | wit::Hooks::OFFER,
            parameters_schema: r#"{"type": "object"}"#.into(),
        }
    }

    #[test]
    fn a_valid_description_is_accepted() {
        assert_eq!(check(&description()).unwrap(), [Hook::Offer, Hook::Admit]);
        for version in ["0.0.0", "1.0.0-rc.1", "1.0.0+a-b", "10.20.30-x.7.z-y+0"] {
            assert_eq!(check_version(version), Ok(()), "{version}");
        }
    }

    #[test]
    fn each_broken_rule_is_reported() {
        type Change = fn(&mut wit::Description);
        let cases: [(Change, &str); 10] = [
            (|d| d.name.clear(), "not a DNS label"),
            (|d| d.name = "Example".into(), "not a DNS label"),
            (|d| d.name = "x".repeat(64), "not a DNS label"),
            (|d| d.version = "1.2".into(), "not a semantic version"),
            (|d| d.version = "1.2.3.04".into(), "not a semantic version"),
            (|d| d.summary = "a\nb".into(), "control characters"),
            (|d| d.summary = " ".into(), "empty"),
            (|d| d.hooks = wit::Hooks::empty(), "no hook"),
            (|d| d.parameters_schema = "[]".into(), "not a JSON object"),
            (|d| d.parameters_schema = " ".repeat(7000), "at most 6144"),
        ];
        for (change, message) in cases {
            let mut description = description();
            change(&mut description);
            let error = check(&description).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
