//! An installed version: what it says of itself, and its component ready to be called.

use serde_json::Value;
use wasmtime::component::Component;
use wasmtime::{Result as Wasm, Store};

use super::bindings::PolicyPre;
use super::bindings::berth::policy::types as wit;
use super::call::{Called, Runner};
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
    /// For `describe`, which checks the types of all exports.
    policy: PolicyPre<Guest>,
    exports: Exports,
}

/// What a policy says of itself, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) summary: String,
    pub(super) hooks: Vec<Hook>,
    pub(super) parameters_schema: String,
}

impl Module {
    /// Makes an artifact callable.
    ///
    /// # Errors
    /// If it needs more than the pool has, imports what is not given, or exports too little.
    pub(super) fn load(runner: &Runner, artifact: &[u8]) -> Result<Self, InstallError> {
        // SAFETY: deserializing trusts its input like code of our own. The bytes are in memory, where
        // nobody changes them any more, and come either straight from the compiler's process or from
        // a file whose sha256 is the one that the store keeps for this version. That an artifact
        // fits this release, this processor and these settings is checked by wasmtime itself.
        #[allow(unsafe_code)]
        let component = unsafe { Component::deserialize(&runner.engine, artifact) };
        let policy = component.and_then(|component| runner.prepare(&component));
        let policy = policy.map_err(|error| not_a_policy(fault::words_of(&error)))?;
        let exports = Exports::find(policy.instance_pre());
        let exports = exports.map_err(|error| not_a_policy(fault::words_of(&error)))?;
        Ok(Self { policy, exports })
    }

    /// Asks one hook in a fresh instance.
    pub(super) fn ask<R>(
        &self,
        runner: &Runner,
        who: &str,
        wall_ms: u64,
        ask: impl FnOnce(&Hooks<'_>, &mut Store<Guest>) -> Wasm<R>,
    ) -> Called<R> {
        let instance = self.policy.instance_pre();
        runner.call(
            who,
            wall_ms,
            |store| instance.instantiate(store),
            |instance, store| ask(&Hooks { instance: *instance, exports: &self.exports }, store),
        )
    }

    /// Asks what it is.
    ///
    /// # Errors
    /// If it cannot say, or what it says breaks a rule.
    pub(super) fn describe(&self, runner: &Runner) -> Result<Description, InstallError> {
        let Called { answer, .. } = runner.call(
            "describe",
            DESCRIBE_WALL_MS_MAX,
            |store| self.policy.instantiate(store),
            |policy, store| policy.call_describe(store),
        );
        let description = answer.map_err(|fault| not_a_policy(format!("`describe`: {fault}")))?;
        check(description).map_err(|words| not_a_policy(format!("`describe`: {words}")))
    }
}

/// Longest reason of a refusal, bytes. Names of imports and exports come from the module, and may be as
/// long as it is.
const REFUSAL_BYTES_MAX: usize = 2048;

pub(super) fn not_a_policy(mut what: String) -> InstallError {
    what.truncate(what.floor_char_boundary(REFUSAL_BYTES_MAX));
    InstallError::NotAPolicy { what }
}

/// The rules of the contract for a description.
fn check(told: wit::Description) -> Result<Description, String> {
    check_name(&told.name)?;
    check_version(&told.version)?;
    check_text("the summary", &told.summary, SUMMARY_BYTES_MAX)?;
    check_schema(&told.parameters_schema)?;
    let all = [
        (wit::Hooks::OFFER, Hook::Offer),
        (wit::Hooks::PLACE, Hook::Place),
        (wit::Hooks::ADMIT, Hook::Admit),
        (wit::Hooks::TRIAGE, Hook::Triage),
    ];
    let hooks = all.into_iter().filter(|(flag, _)| told.hooks.contains(*flag));
    let hooks: Vec<_> = hooks.map(|(_, hook)| hook).collect();
    if hooks.is_empty() {
        return Err("it names no hook, so it would never be asked".to_owned());
    }
    Ok(Description {
        name: told.name,
        version: told.version,
        summary: told.summary,
        hooks,
        parameters_schema: told.parameters_schema,
    })
}

fn check_name(name: &str) -> Result<(), String> {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let dashed = name.starts_with('-') || name.ends_with('-');
    if name.is_empty() || name.len() > NAME_BYTES_MAX || dashed || !name.bytes().all(inner) {
        return Err(format!("the name {} is no DNS label", shown(name)));
    }
    Ok(())
}

/// `1.2.3`, `-pre` and `+build` after it: of semantic versions all that matters here.
fn check_version(version: &str) -> Result<(), String> {
    let wrong = || Err(format!("the version {} is no semantic version", shown(version)));
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
        return wrong();
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
        return Err(format!("{what} holds control characters"));
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
        Ok(_) => Err("the schema is no JSON object".to_owned()),
        Err(error) => Err(format!("the schema is no JSON: {error}")),
    }
}

/// A guest's text in an error: quoted, escaped and short.
fn shown(text: &str) -> String {
    let short: String = text.chars().take(80).collect();
    format!("{short:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told() -> wit::Description {
        wit::Description {
            name: "example".into(),
            version: "1.2.3".into(),
            summary: "An example.".into(),
            hooks: wit::Hooks::ADMIT | wit::Hooks::OFFER,
            parameters_schema: r#"{"type": "object"}"#.into(),
        }
    }

    #[test]
    fn a_good_description_is_taken() {
        let description = check(told()).unwrap();
        assert_eq!(description.hooks, [Hook::Offer, Hook::Admit]);
        for version in ["0.0.0", "1.0.0-rc.1", "1.0.0+a-b", "10.20.30-x.7.z-y+0"] {
            assert_eq!(check_version(version), Ok(()), "{version}");
        }
    }

    #[test]
    fn each_rule_is_told_when_broken() {
        type Change = fn(&mut wit::Description);
        let cases: [(Change, &str); 10] = [
            (|d| d.name.clear(), "no DNS label"),
            (|d| d.name = "Example".into(), "no DNS label"),
            (|d| d.name = "x".repeat(64), "no DNS label"),
            (|d| d.version = "1.2".into(), "no semantic version"),
            (|d| d.version = "1.2.3.04".into(), "no semantic version"),
            (|d| d.summary = "a\nb".into(), "control characters"),
            (|d| d.summary = " ".into(), "empty"),
            (|d| d.hooks = wit::Hooks::empty(), "no hook"),
            (|d| d.parameters_schema = "[]".into(), "no JSON object"),
            (|d| d.parameters_schema = " ".repeat(7000), "at most 6144"),
        ];
        for (change, words) in cases {
            let mut description = told();
            change(&mut description);
            let error = check(description).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
