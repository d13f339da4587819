//! A loaded policy: its callable component and its description.

use serde_json::Value;
use wasmtime::component::Component;
use wasmtime::{Result as Wasm, Store};

use super::bindings::PolicyPre;
use super::bindings::berth::policy::types as wit;
use super::call::{CallResult, Runner};
use super::exports::{Exports, Hooks};
use super::fault;
use super::guest::Guest;
use super::limits::{DESCRIBE_WALL_MS_MAX, SUMMARY_BYTES_MAX, VERSION_BYTES_MAX};
use berth_kernel::policy::{Hook, SCHEMA_BYTES_MAX};
use berth_kernel::ports::InstallError;

/// Longest name, characters: that of a DNS label.
const NAME_BYTES_MAX: usize = 63;

/// A component that can be called.
pub(super) struct Module {
    /// For `describe` only: instantiating it checks the types of all exports.
    policy: PolicyPre<Guest>,
    exports: Exports,
}

/// A policy's checked answer to `describe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) summary: String,
    pub(super) hooks: Vec<Hook>,
    pub(super) parameters_schema: String,
}

impl Module {
    /// Loads an artifact.
    ///
    /// # Errors
    /// If it needs more memory than the pool has, or its imports or exports do not fit the world.
    pub(super) fn load(runner: &Runner, artifact: &[u8]) -> Result<Self, InstallError> {
        // SAFETY: `deserialize` requires bytes that wasmtime produced. These are in memory, where nothing changes
        // them, and come either directly from the compiler process or from a file whose sha256 is the one in the
        // store. wasmtime itself checks that the artifact fits this release, processor and configuration.
        #[allow(unsafe_code)]
        let component = unsafe { Component::deserialize(&runner.engine, artifact) };
        let policy = component.and_then(|component| runner.prepare(&component));
        let policy = policy.map_err(|error| not_a_policy(fault::error_chain(&error)))?;
        let exports = Exports::find(policy.instance_pre());
        let exports = exports.map_err(|error| not_a_policy(fault::error_chain(&error)))?;
        Ok(Self { policy, exports })
    }

    /// Calls one hook in a fresh instance.
    pub(super) fn call<R>(
        &self,
        runner: &Runner,
        label: &str,
        wall_ms: u64,
        call_hook: impl FnOnce(&Hooks<'_>, &mut Store<Guest>) -> Wasm<R>,
    ) -> CallResult<R> {
        let instance = self.policy.instance_pre();
        runner.call(
            label,
            wall_ms,
            |store| instance.instantiate(store),
            |instance, store| call_hook(&Hooks { instance: *instance, exports: &self.exports }, store),
        )
    }

    /// Calls `describe`.
    ///
    /// # Errors
    /// If the call fails, or the description is invalid.
    pub(super) fn describe(&self, runner: &Runner) -> Result<Description, InstallError> {
        let CallResult { answer, .. } = runner.call(
            "describe",
            DESCRIBE_WALL_MS_MAX,
            |store| self.policy.instantiate(store),
            |policy, store| policy.call_describe(store),
        );
        let description = answer.map_err(|fault| not_a_policy(format!("`describe`: {fault}")))?;
        check(description).map_err(|reason| not_a_policy(format!("`describe`: {reason}")))
    }
}

/// Longest reason of a refusal, bytes. It may include names of imports and exports, which the module chooses.
const REFUSAL_BYTES_MAX: usize = 2048;

pub(super) fn not_a_policy(mut what: String) -> InstallError {
    what.truncate(what.floor_char_boundary(REFUSAL_BYTES_MAX));
    InstallError::NotAPolicy { what }
}

/// Checks a description by the rules of the WIT world.
fn check(description: wit::Description) -> Result<Description, String> {
    check_name(&description.name)?;
    check_version(&description.version)?;
    check_text("the summary", &description.summary, SUMMARY_BYTES_MAX)?;
    check_schema(&description.parameters_schema)?;
    let flags = [
        (wit::Hooks::OFFER, Hook::Offer),
        (wit::Hooks::PLACE, Hook::Place),
        (wit::Hooks::ADMIT, Hook::Admit),
        (wit::Hooks::TRIAGE, Hook::Triage),
    ];
    let hooks = flags.into_iter().filter(|(flag, _)| description.hooks.contains(*flag));
    let hooks: Vec<_> = hooks.map(|(_, hook)| hook).collect();
    if hooks.is_empty() {
        return Err("it names no hook, so it would never be called".to_owned());
    }
    Ok(Description {
        name: description.name,
        version: description.version,
        summary: description.summary,
        hooks,
        parameters_schema: description.parameters_schema,
    })
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
        let checked = check(description()).unwrap();
        assert_eq!(checked.hooks, [Hook::Offer, Hook::Admit]);
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
            let error = check(description).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }
}
