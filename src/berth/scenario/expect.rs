//! What a step is expected to bring, and how that differs from what came.

use serde::de::{MapAccess, SeqAccess, Visitor, value};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// `expect` of a step: what is not named is not checked.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Expect {
    gpus: Option<Gpus>,
    free: Option<BTreeMap<String, u32>>,
    environment: Option<BTreeMap<String, String>>,
    limits: Option<Limits>,
    severity: Option<String>,
    #[serde(default, deserialize_with = "given")]
    again_after_seconds: Option<Option<u32>>,
    reason: Option<String>,
    /// A part of why it was refused.
    pub(super) refused: Option<String>,
    /// A part of the fault that a policy is to have.
    pub(super) fault: Option<String>,
}

/// By GPU what it is offered as, or the GPU of each device.
#[derive(Clone, Debug)]
enum Gpus {
    Offered(BTreeMap<u32, BTreeMap<String, u32>>),
    Chosen(Vec<u32>),
}

impl<'de> Deserialize<'de> for Gpus {
    // By hand, so that an error keeps its line.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Gpus;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of GPUs, or by GPU its resources")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Gpus, A::Error> {
                Deserialize::deserialize(value::MapAccessDeserializer::new(map)).map(Gpus::Offered)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Gpus, A::Error> {
                Deserialize::deserialize(value::SeqAccessDeserializer::new(seq)).map(Gpus::Chosen)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

/// What a container is told it may use; `null` is "nothing is said".
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Limits {
    #[serde(default, rename = "memoryMiB", deserialize_with = "given")]
    memory_mib: Option<Option<u64>>,
    #[serde(default, deserialize_with = "given")]
    compute_percent: Option<Option<u32>>,
}

/// Tells a key that is `null` from one that is not there.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(from: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// What a step brought, as far as it can be expected.
#[derive(Clone, Debug, Default)]
pub(super) struct Got {
    /// By GPU and resource the number of devices offered.
    pub(super) offered: BTreeMap<u32, BTreeMap<String, u32>>,
    /// By resource the devices to be had.
    pub(super) free: BTreeMap<String, u32>,
    /// The GPU of each device, sorted.
    pub(super) gpus: Vec<u32>,
    /// For the container.
    pub(super) environment: BTreeMap<String, String>,
    /// What it may use.
    pub(super) memory_mib: Option<u64>,
    /// What it may use.
    pub(super) compute_percent: Option<u32>,
    /// What a reading means.
    pub(super) severity: String,
    /// When it is looked at again.
    pub(super) again_after_seconds: Option<u32>,
    /// Why.
    pub(super) reason: String,
    /// Why not, if it was refused.
    pub(super) refused: Option<String>,
}

/// One expectation that was not met.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Difference {
    /// Its key.
    pub what: String,
    /// As the file has it.
    pub expected: String,
    /// As it was.
    pub got: String,
}

impl Difference {
    pub(super) fn of(what: &str, expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { what: what.into(), expected: expected.into(), got: got.into() }
    }
}

impl Expect {
    /// GPUs that it names.
    pub(super) fn gpus_named(&self) -> Vec<u32> {
        match &self.gpus {
            None => Vec::new(),
            Some(Gpus::Offered(map)) => map.keys().copied().collect(),
            Some(Gpus::Chosen(list)) => list.clone(),
        }
    }

    /// Whether it asks for nothing but what this verb answers.
    pub(super) fn fits(&self, verb: &str, answers: &[&str]) -> Result<(), String> {
        let given = [
            ("gpus", self.gpus.is_some()),
            ("free", self.free.is_some()),
            ("environment", self.environment.is_some()),
            ("limits", self.limits.is_some()),
            ("severity", self.severity.is_some()),
            ("againAfterSeconds", self.again_after_seconds.is_some()),
            ("reason", self.reason.is_some()),
            ("refused", self.refused.is_some()),
        ];
        if let Some((key, _)) = given.iter().find(|(key, given)| *given && !answers.contains(key)) {
            let may = if answers.is_empty() { "fault".into() } else { answers.join(", ") + ", fault" };
            return Err(format!("expect: `{key}` says nothing of `{verb}`; it may have: {may}"));
        }
        match (&self.gpus, verb) {
            (Some(Gpus::Chosen(_)), "offer") => {
                Err("expect.gpus of an offer is by GPU: {0: {nvidia.com/gpu: 1}}".into())
            }
            (Some(Gpus::Offered(_)), "allocate" | "place") => {
                Err(format!("expect.gpus of `{verb}` is a list with the GPU of each device: [0, 1]"))
            }
            _ => Ok(()),
        }
    }

    /// What differs, but for refusals and faults, which the caller knows.
    pub(super) fn differences(&self, got: &Got) -> Vec<Difference> {
        let mut found = Vec::new();
        match &self.gpus {
            None => {}
            Some(Gpus::Offered(expected)) => {
                let none = BTreeMap::new();
                for (gpu, lines) in expected {
                    let offered = got.offered.get(gpu).unwrap_or(&none);
                    if offered != lines {
                        let what = format!("gpus.{gpu}");
                        found.push(Difference::of(&what, counts(lines), counts(offered)));
                    }
                }
            }
            Some(Gpus::Chosen(expected)) => {
                let mut sorted = expected.clone();
                sorted.sort_unstable();
                if sorted != got.gpus {
                    found.push(Difference::of("gpus", format!("{sorted:?}"), format!("{:?}", got.gpus)));
                }
            }
        }
        for (resource, expected) in self.free.iter().flatten() {
            let free = got.free.get(resource).copied().unwrap_or(0);
            if free != *expected {
                let what = format!("free.{resource}");
                found.push(Difference::of(&what, expected.to_string(), free.to_string()));
            }
        }
        for (key, expected) in self.environment.iter().flatten() {
            let value = got.environment.get(key);
            if value != Some(expected) {
                let what = format!("environment.{key}");
                let got = value.map_or("nothing".into(), |value| format!("{value:?}"));
                found.push(Difference::of(&what, format!("{expected:?}"), got));
            }
        }
        let limits = self.limits.clone().unwrap_or_default();
        found.extend(number("limits.memoryMiB", limits.memory_mib, got.memory_mib));
        found.extend(number("limits.computePercent", limits.compute_percent, got.compute_percent));
        if let Some(expected) = self.severity.as_ref().filter(|expected| **expected != got.severity) {
            found.push(Difference::of("severity", expected, &got.severity));
        }
        found.extend(number("againAfterSeconds", self.again_after_seconds, got.again_after_seconds));
        if let Some(expected) = self.reason.as_ref().filter(|expected| !contains(&got.reason, expected)) {
            found.push(Difference::of("reason", format!("...{expected}..."), format!("{:?}", got.reason)));
        }
        found
    }
}

/// Whether a text has a part, whatever the case.
pub(super) fn contains(text: &str, part: &str) -> bool {
    text.to_lowercase().contains(&part.to_lowercase())
}

fn number<T: PartialEq + ToString + Copy>(
    what: &str,
    expected: Option<Option<T>>,
    got: Option<T>,
) -> Option<Difference> {
    let shown = |value: &Option<T>| value.as_ref().map_or("null".into(), ToString::to_string);
    let expected = expected.filter(|expected| *expected != got)?;
    Some(Difference::of(what, shown(&expected), shown(&got)))
}

fn counts(lines: &BTreeMap<String, u32>) -> String {
    let lines: Vec<_> = lines.iter().map(|(resource, count)| format!("{resource}: {count}")).collect();
    format!("{{{}}}", lines.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differ(yaml: &str, got: &Got) -> Vec<String> {
        let expect: Expect = berth_files::yaml::from_str(yaml).unwrap();
        let all = expect.differences(got).into_iter();
        all.map(|d| format!("{} {} / {}", d.what, d.expected, d.got)).collect()
    }

    #[test]
    fn only_what_is_named_is_compared_and_null_is_something() {
        let line = BTreeMap::from([("a/b".to_owned(), 4)]);
        let got = Got {
            offered: BTreeMap::from([(0, line)]),
            gpus: vec![0, 1],
            memory_mib: Some(5),
            reason: "It fell off the BUS".into(),
            ..Got::default()
        };
        assert!(differ("{}", &got).is_empty());
        assert!(differ("{gpus: {0: {a/b: 4}, 1: {}}, reason: the bus}", &got).is_empty());
        assert!(differ("{gpus: [1, 0], limits: {memoryMiB: 5}, againAfterSeconds: null}", &got).is_empty());
        assert_eq!(differ("{gpus: {0: {}}}", &got), ["gpus.0 {} / {a/b: 4}"]);
        assert_eq!(differ("{gpus: [0]}", &got), ["gpus [0] / [0, 1]"]);
        assert_eq!(differ("{free: {a/b: 1}}", &got), ["free.a/b 1 / 0"]);
        assert_eq!(
            differ("{limits: {memoryMiB: null, computePercent: 3}}", &got),
            ["limits.memoryMiB null / 5", "limits.computePercent 3 / null"]
        );
        assert_eq!(differ("{environment: {K: v}}", &got), ["environment.K \"v\" / nothing"]);
    }
}
