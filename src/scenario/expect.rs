//! The expectations of a step, and how its outcome differs from them.

use serde::de::{MapAccess, SeqAccess, Visitor, value};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// `expect` of a step: absent keys are not checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Expect {
    gpus: Option<Gpus>,
    free: Option<BTreeMap<String, u32>>,
    environment: Option<BTreeMap<String, String>>,
    limits: Option<Limits>,
    severity: Option<String>,
    #[serde(default, deserialize_with = "nullable")]
    again_after_seconds: Option<Option<u32>>,
    reason: Option<String>,
    /// A part of the refusal.
    pub(super) refused: Option<String>,
    /// A part of a policy's fault.
    pub(super) fault: Option<String>,
}

/// The offered resources by GPU, or the GPU of each chosen device.
#[derive(Clone, Debug)]
enum Gpus {
    Offered(BTreeMap<u32, BTreeMap<String, u32>>),
    Chosen(Vec<u32>),
}

impl<'de> Deserialize<'de> for Gpus {
    // Not `#[serde(untagged)]`, which loses the lines of errors.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct GpusVisitor;
        impl<'de> Visitor<'de> for GpusVisitor {
            type Value = Gpus;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of GPUs, or a mapping from GPU to resources")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Gpus, A::Error> {
                Deserialize::deserialize(value::MapAccessDeserializer::new(map)).map(Gpus::Offered)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Gpus, A::Error> {
                Deserialize::deserialize(value::SeqAccessDeserializer::new(seq)).map(Gpus::Chosen)
            }
        }
        deserializer.deserialize_any(GpusVisitor)
    }
}

/// The limits that a container gets; `null` means no limit.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Limits {
    #[serde(default, rename = "memoryMiB", deserialize_with = "nullable")]
    memory_mib: Option<Option<u64>>,
    #[serde(default, deserialize_with = "nullable")]
    compute_percent: Option<Option<u32>>,
}

/// Distinguishes a key with `null` from an absent key.
fn nullable<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// The outcome of a step, as far as it can be expected.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// The number of offered devices by GPU and resource.
    pub(super) offered: BTreeMap<u32, BTreeMap<String, u32>>,
    /// The number of free devices by resource.
    pub(super) free: BTreeMap<String, u32>,
    /// The GPU of each device, sorted.
    pub(super) gpus: Vec<u32>,
    /// The container's environment.
    pub(super) environment: BTreeMap<String, String>,
    /// The container's memory limit, MiB.
    pub(super) memory_mib: Option<u64>,
    /// The container's compute limit, percent.
    pub(super) compute_percent: Option<u32>,
    /// The severity of a reading.
    pub(super) severity: String,
    /// The time until the policy is called again.
    pub(super) again_after_seconds: Option<u32>,
    /// The policies' reason.
    pub(super) reason: String,
    /// The refusal, if the request was refused.
    pub(super) refused: Option<String>,
}

impl Outcome {
    pub(super) fn refused(refusal: String) -> Self {
        Self { refused: Some(refusal), ..Self::default() }
    }
}

/// An unmet expectation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Mismatch {
    /// Its key.
    pub what: String,
    /// The expected value.
    pub expected: String,
    /// The actual value.
    pub got: String,
}

impl Mismatch {
    pub(super) fn new(what: &str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { what: what.into(), expected: expected.into(), got: got.into() }
    }
}

impl Expect {
    /// The GPUs that the expectations name.
    pub(super) fn named_gpus(&self) -> Vec<u32> {
        match &self.gpus {
            None => Vec::new(),
            Some(Gpus::Offered(map)) => map.keys().copied().collect(),
            Some(Gpus::Chosen(list)) => list.clone(),
        }
    }

    /// Checks that the verb supports all expected keys.
    pub(super) fn check_keys(&self, verb: &str, supported: &[&str]) -> Result<(), String> {
        let keys = [
            ("gpus", self.gpus.is_some()),
            ("free", self.free.is_some()),
            ("environment", self.environment.is_some()),
            ("limits", self.limits.is_some()),
            ("severity", self.severity.is_some()),
            ("againAfterSeconds", self.again_after_seconds.is_some()),
            ("reason", self.reason.is_some()),
            ("refused", self.refused.is_some()),
        ];
        if let Some((key, _)) = keys.iter().find(|(key, is_set)| *is_set && !supported.contains(key)) {
            let allowed =
                if supported.is_empty() { "fault".into() } else { supported.join(", ") + ", fault" };
            return Err(format!("expect: `{key}` cannot be expected of `{verb}`; allowed are {allowed}"));
        }
        match (&self.gpus, verb) {
            (Some(Gpus::Chosen(_)), "offer") => {
                Err("expect.gpus of an offer is a mapping by GPU: {0: {nvidia.com/gpu: 1}}".into())
            }
            (Some(Gpus::Offered(_)), "allocate" | "place") => {
                Err(format!("expect.gpus of `{verb}` is a list with the GPU of each device: [0, 1]"))
            }
            _ => Ok(()),
        }
    }

    /// The differences, without refusals and faults, which the caller compares.
    pub(super) fn differences(&self, outcome: &Outcome) -> Vec<Mismatch> {
        let mut differences = Vec::new();
        let mut compare = |what: String, expected: String, got: String| {
            if expected != got {
                differences.push(Mismatch { what, expected, got });
            }
        };
        match &self.gpus {
            None => {}
            Some(Gpus::Offered(expected)) => {
                for (gpu, lines) in expected {
                    let offered = outcome.offered.get(gpu).cloned().unwrap_or_default();
                    compare(format!("gpus.{gpu}"), counts(lines), counts(&offered));
                }
            }
            Some(Gpus::Chosen(expected)) => {
                let mut sorted = expected.clone();
                sorted.sort_unstable();
                compare("gpus".into(), format!("{sorted:?}"), format!("{:?}", outcome.gpus));
            }
        }
        for (resource, expected) in self.free.iter().flatten() {
            let free = outcome.free.get(resource).copied().unwrap_or(0);
            compare(format!("free.{resource}"), expected.to_string(), free.to_string());
        }
        for (key, expected) in self.environment.iter().flatten() {
            let got = outcome.environment.get(key).map_or("nothing".into(), |value| format!("{value:?}"));
            compare(format!("environment.{key}"), format!("{expected:?}"), got);
        }
        let limits = self.limits.clone().unwrap_or_default();
        for (what, expected, got) in [
            ("limits.memoryMiB", limits.memory_mib.map(or_null), or_null(outcome.memory_mib)),
            ("limits.computePercent", limits.compute_percent.map(or_null), or_null(outcome.compute_percent)),
            ("severity", self.severity.clone(), outcome.severity.clone()),
            (
                "againAfterSeconds",
                self.again_after_seconds.map(or_null),
                or_null(outcome.again_after_seconds),
            ),
        ] {
            if let Some(expected) = expected {
                compare(what.into(), expected, got);
            }
        }
        if let Some(part) = self.reason.as_ref().filter(|part| !contains(&outcome.reason, part)) {
            compare("reason".into(), format!("...{part}..."), format!("{:?}", outcome.reason));
        }
        differences
    }
}

/// Whether a text contains a part, ignoring case.
pub(super) fn contains(text: &str, part: &str) -> bool {
    text.to_lowercase().contains(&part.to_lowercase())
}

fn or_null<T: ToString>(value: Option<T>) -> String {
    value.map_or("null".into(), |value| value.to_string())
}

fn counts(lines: &BTreeMap<String, u32>) -> String {
    let lines: Vec<_> = lines.iter().map(|(resource, count)| format!("{resource}: {count}")).collect();
    format!("{{{}}}", lines.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differ(yaml: &str, outcome: &Outcome) -> Vec<String> {
        let expect: Expect = berth_files::yaml::from_str(yaml).unwrap();
        let differences = expect.differences(outcome).into_iter();
        differences.map(|d| format!("{} {} / {}", d.what, d.expected, d.got)).collect()
    }

    #[test]
    fn only_present_keys_are_compared_and_null_is_a_value() {
        let line = BTreeMap::from([("a/b".to_owned(), 4)]);
        let outcome = Outcome {
            offered: BTreeMap::from([(0, line)]),
            gpus: vec![0, 1],
            memory_mib: Some(5),
            reason: "It fell off the BUS".into(),
            ..Outcome::default()
        };
        assert!(differ("{}", &outcome).is_empty());
        assert!(differ("{gpus: {0: {a/b: 4}, 1: {}}, reason: the bus}", &outcome).is_empty());
        assert!(
            differ("{gpus: [1, 0], limits: {memoryMiB: 5}, againAfterSeconds: null}", &outcome).is_empty()
        );
        assert_eq!(differ("{gpus: {0: {}}}", &outcome), ["gpus.0 {} / {a/b: 4}"]);
        assert_eq!(differ("{gpus: [0]}", &outcome), ["gpus [0] / [0, 1]"]);
        assert_eq!(differ("{free: {a/b: 1}}", &outcome), ["free.a/b 1 / 0"]);
        assert_eq!(
            differ("{limits: {memoryMiB: null, computePercent: 3}}", &outcome),
            ["limits.memoryMiB null / 5", "limits.computePercent 3 / null"]
        );
        assert_eq!(differ("{environment: {K: v}}", &outcome), ["environment.K \"v\" / nothing"]);
    }
}
