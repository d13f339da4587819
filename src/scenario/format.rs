//! The format of a scenario file. Unknown keys are refused.

use super::expect::Expect;
use berth_api::{HealthState, OnFault, Permissions};
use berth_files::yaml;
use berth_kernel::grants::pod_candidates::CANDIDATES_MAX;
use berth_kernel::hardware::process::PROCESSES_PER_GPU_MAX;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Largest scenario file, bytes: readable ones have a few KiB.
pub const FILE_BYTES_MAX: u64 = 256 * 1024;
/// Most steps of one file: a tenth of a second, at about 100 us per step.
const STEPS_MAX: usize = 1000;
/// Longest time of one step, seconds: a day. Each second takes a tick and an inventory scan.
const SECONDS_MAX: u32 = 86_400;

/// A scenario on one simulated node.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Scenario {
    /// Its purpose, in a sentence.
    pub(super) about: String,
    /// Groups of GPUs, in order of index.
    pub(super) node: Vec<Group>,
    /// The stack, in order of evaluation; by default only the policy under test.
    #[serde(default)]
    pub(super) stack: Option<Vec<Entry>>,
    /// The steps, in order.
    pub(super) steps: Vec<Step>,
    /// The line of each step; empty if the lines are unknown.
    #[serde(skip)]
    lines: Vec<usize>,
}

/// GPUs of one model.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Group {
    /// The model, as in `--gpus sim:8xh100`.
    pub(super) model: String,
    /// The number of GPUs.
    pub(super) count: u32,
    /// The profiles of each GPU's MIG instances; without any, MIG mode is off.
    #[serde(default)]
    pub(super) mig: Vec<String>,
}

/// One policy of the stack.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Entry {
    /// `this`, or the name of a shipped policy.
    pub(super) policy: String,
    /// Passed to the policy as JSON.
    #[serde(default)]
    pub(super) parameters: Map<String, Value>,
    /// What the policy may do.
    #[serde(default)]
    pub(super) permissions: Permissions,
    /// What happens when the policy fails.
    #[serde(default)]
    pub(super) on_fault: OnFault,
}

/// One step: a verb and its expectations.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Step {
    offer: Option<Empty>,
    allocate: Option<Allocate>,
    place: Option<Place>,
    release: Option<String>,
    health: Option<Health>,
    cordon: Option<u32>,
    uncordon: Option<u32>,
    reading: Option<ReportedReading>,
    usage: Option<Usage>,
    seconds: Option<u32>,
    /// The expectations; absent keys are not checked.
    #[serde(default)]
    pub(super) expect: Expect,
}

/// `{}`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Empty {}

/// A container requests devices.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Allocate {
    pub(super) resource: String,
    /// The number of devices; by default the length of `on`.
    pub(super) count: Option<usize>,
    /// GPUs of which one device each is taken, without asking policies for a placement.
    pub(super) on: Option<Vec<u32>>,
    /// A name for later steps.
    #[serde(rename = "as")]
    pub(super) name: Option<String>,
    /// The containers that may have sent the request; the first one becomes the holder.
    #[serde(default)]
    pub(super) candidates: Vec<Candidate>,
}

/// A container that may have sent a request.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Candidate {
    pub(super) namespace: String,
    pub(super) pod: String,
    #[serde(default = "default_container")]
    pub(super) container: String,
    #[serde(default)]
    pub(super) labels: BTreeMap<String, String>,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} (container {})", self.namespace, self.pod, self.container)
    }
}

fn default_container() -> String {
    "main".into()
}

/// The kubelet asks for the best devices.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Place {
    pub(super) resource: String,
    pub(super) count: usize,
    /// GPUs to choose from; by default all.
    pub(super) among: Option<Vec<u32>>,
    /// GPUs of which one device each must be chosen.
    #[serde(default)]
    pub(super) required: Vec<u32>,
}

/// A GPU's health changes.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Health {
    pub(super) gpu: u32,
    #[serde(deserialize_with = "known_state")]
    pub(super) state: HealthState,
}

fn known_state<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HealthState, D::Error> {
    let text = String::deserialize(deserializer)?;
    HealthState::parse(&text).ok_or_else(|| D::Error::unknown_variant(&text, HealthState::NAMES))
}

/// A GPU reports a reading.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct ReportedReading {
    pub(super) gpu: u32,
    #[serde(default = "default_source")]
    pub(super) source: String,
    #[serde(default)]
    pub(super) code: u64,
    #[serde(default)]
    pub(super) detail: String,
}

fn default_source() -> String {
    "xid".into()
}

/// What runs on a GPU changes; an absent key changes nothing.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Usage {
    pub(super) gpu: u32,
    /// The memory in use, MiB.
    #[serde(rename = "memoryUsedMiB")]
    pub(super) memory_used_mib: Option<u64>,
    /// The number of processes.
    pub(super) processes: Option<u32>,
}

/// The action of a step.
#[derive(Clone, Copy, Debug)]
pub(super) enum Verb<'s> {
    Offer,
    Allocate(&'s Allocate),
    Place(&'s Place),
    Release(&'s str),
    Health(&'s Health),
    Cordon(u32),
    Uncordon(u32),
    Reading(&'s ReportedReading),
    Usage(&'s Usage),
    Seconds(u32),
}

impl Verb<'_> {
    /// The keys of `expect` that it supports, besides `fault`.
    fn expected_keys(&self) -> &'static [&'static str] {
        match self {
            Self::Offer => &["gpus", "free"],
            Self::Allocate(_) => &["gpus", "environment", "limits", "reason", "refused"],
            Self::Place(_) => &["gpus", "reason", "refused"],
            Self::Reading(_) => &["severity", "againAfterSeconds", "reason"],
            Self::Release(_)
            | Self::Health(_)
            | Self::Cordon(_)
            | Self::Uncordon(_)
            | Self::Usage(_)
            | Self::Seconds(_) => &[],
        }
    }
}

impl Step {
    /// The step's only verb, with its key.
    pub(super) fn verb(&self) -> Result<(&'static str, Verb<'_>), String> {
        let verbs = [
            ("offer", self.offer.map(|_| Verb::Offer)),
            ("allocate", self.allocate.as_ref().map(Verb::Allocate)),
            ("place", self.place.as_ref().map(Verb::Place)),
            ("release", self.release.as_deref().map(Verb::Release)),
            ("health", self.health.as_ref().map(Verb::Health)),
            ("cordon", self.cordon.map(Verb::Cordon)),
            ("uncordon", self.uncordon.map(Verb::Uncordon)),
            ("reading", self.reading.as_ref().map(Verb::Reading)),
            ("usage", self.usage.as_ref().map(Verb::Usage)),
            ("seconds", self.seconds.map(Verb::Seconds)),
        ];
        let verbs: Vec<_> = verbs.into_iter().filter_map(|(key, verb)| Some((key, verb?))).collect();
        match verbs.as_slice() {
            [verb] => Ok(*verb),
            [] => Err("it has no verb: write one of offer (`offer: {}`), allocate, place, release, health, cordon, \
                       uncordon, reading, usage, seconds"
                .into()),
            verbs => {
                let keys: Vec<_> = verbs.iter().map(|(key, _)| *key).collect();
                Err(format!("it has several verbs ({}): write one step for each", keys.join(", ")))
            }
        }
    }
}

impl Scenario {
    /// Parses a file's text.
    ///
    /// # Errors
    /// The first error, with its line if known.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut scenario: Self = yaml::from_str(text).map_err(|error| error.to_string())?;
        let lines = step_lines(text);
        if lines.len() == scenario.steps.len() {
            scenario.lines = lines;
        }
        scenario.check().map(|()| scenario)
    }

    /// The line of a step, from 1.
    pub(super) fn line(&self, step: usize) -> Option<usize> {
        self.lines.get(step).copied()
    }

    /// The error of a step, with its number and line.
    pub(super) fn step_error(&self, step: usize, error: &str) -> String {
        let line = self.line(step).map_or(String::new(), |line| format!(" (line {line})"));
        format!("step {}{line}: {error}", step + 1)
    }

    fn check(&self) -> Result<(), String> {
        if self.about.trim().is_empty() {
            return Err("about: describe the scenario in a sentence".into());
        }
        if self.steps.is_empty() || self.steps.len() > STEPS_MAX {
            return Err(format!("steps: {} of them; 1 to {STEPS_MAX}", self.steps.len()));
        }
        let count: u64 = self.node.iter().map(|group| u64::from(group.count)).sum();
        let mut names = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            self.check_step(step, count, &mut names).map_err(|error| self.step_error(index, &error))?;
        }
        Ok(())
    }

    fn check_step<'s>(&self, step: &'s Step, count: u64, names: &mut Vec<&'s str>) -> Result<(), String> {
        let (key, verb) = step.verb()?;
        let mut gpus: Vec<u32> = step.expect.named_gpus();
        match verb {
            Verb::Allocate(allocate) => {
                match (&allocate.on, allocate.count) {
                    (None, None) => {
                        return Err("allocate: set how many devices (count), or which GPUs (on)".into());
                    }
                    (Some(on), Some(count)) if on.len() != count => {
                        return Err(format!("allocate: count is {count}, and on names {} GPUs", on.len()));
                    }
                    _ => {}
                }
                check_candidates(&allocate.candidates)?;
                gpus.extend(allocate.on.iter().flatten());
                names.extend(allocate.name.as_deref());
            }
            Verb::Place(place) => {
                gpus.extend(place.among.iter().flatten().chain(&place.required));
            }
            Verb::Release(name) if !names.contains(&name) => {
                return Err(format!("release: no step before it allocates `as: {name}`"));
            }
            Verb::Health(health) => gpus.push(health.gpu),
            Verb::Cordon(gpu) | Verb::Uncordon(gpu) => gpus.push(gpu),
            Verb::Reading(reading) => gpus.push(reading.gpu),
            Verb::Usage(usage) => {
                check_usage(usage)?;
                gpus.push(usage.gpu);
            }
            Verb::Seconds(seconds) if seconds > SECONDS_MAX => {
                return Err(format!("seconds: at most {SECONDS_MAX} in one step"));
            }
            Verb::Offer | Verb::Release(_) | Verb::Seconds(_) => {}
        }
        if let Some(unknown) = gpus.into_iter().find(|gpu| u64::from(*gpu) >= count) {
            return Err(format!("there is no GPU {unknown}: the node has {count}, counted from 0"));
        }
        step.expect.check_keys(key, verb.expected_keys())
    }
}

fn check_candidates(candidates: &[Candidate]) -> Result<(), String> {
    if candidates.len() > CANDIDATES_MAX {
        let count = candidates.len();
        return Err(format!("allocate: {count} candidates; policies are shown {CANDIDATES_MAX} at most"));
    }
    let mut seen = BTreeSet::new();
    for candidate in candidates {
        if !seen.insert((&candidate.namespace, &candidate.pod, &candidate.container)) {
            return Err(format!("allocate: the candidate {candidate} is listed twice"));
        }
    }
    Ok(())
}

fn check_usage(usage: &Usage) -> Result<(), String> {
    match usage {
        Usage { memory_used_mib: None, processes: None, .. } => {
            Err("usage: set the memory in use (memoryUsedMiB), or the number of processes (processes)".into())
        }
        Usage { processes: Some(processes), .. }
            if usize::try_from(*processes).is_ok_and(|processes| processes > PROCESSES_PER_GPU_MAX) =>
        {
            Err(format!("usage: {processes} processes; at most {PROCESSES_PER_GPU_MAX}"))
        }
        Usage { .. } => Ok(()),
    }
}

/// The first lines of the items of `steps`, if it is in block style.
fn step_lines(text: &str) -> Vec<usize> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let mut lines = (1..).zip(text.lines()).skip_while(|(_, line)| !line.starts_with("steps:")).skip(1);
    let mut item_lines = Vec::new();
    let mut item_indent = None;
    for (number, line) in &mut lines {
        let item = line.trim_start().starts_with("- ") || line.trim() == "-";
        if item && *item_indent.get_or_insert(indent(line)) == indent(line) {
            item_lines.push(number);
        } else if !item && indent(line) == 0 && !line.trim().is_empty() && !line.starts_with('#') {
            break;
        }
    }
    item_lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "about: x\nnode: [{model: l4, count: 2}]\nsteps:\n";

    #[test]
    fn the_line_of_each_step_is_known() {
        let text = format!(
            "{HEAD}  # first\n  - offer: {{}}\n    expect:\n      gpus:\n        0: {{}}\n\n  - seconds: 3\n"
        );
        let scenario = Scenario::parse(&text).unwrap();
        assert_eq!((scenario.line(0), scenario.line(1)), (Some(5), Some(10)));
        let flow = Scenario::parse("about: x\nnode: []\nsteps: [{offer: {}}]\n").unwrap();
        assert_eq!(flow.line(0), None);
    }

    #[test]
    fn errors_have_the_line_of_their_step() {
        for (steps, expected) in [
            (
                "- offer: {}\n- ofer: {}\n",
                &["line 5", "steps[1]: the key \"ofer\" is not known; did you mean `offer`?"][..],
            ),
            ("- offer: {}\n- expect: {gpus: {}}\n", &["step 2 (line 5)", "no verb"]),
            ("- {cordon: 1, uncordon: 1}\n", &["several verbs (cordon, uncordon)"]),
            ("- cordon: 2\n", &["no GPU 2", "has 2"]),
            ("- offer: {}\n  expect: {gpus: {3: {}}}\n", &["no GPU 3"]),
            ("- offer: {}\n  expect: {gpus: [0]}\n", &["offer", "by GPU"]),
            ("- place: {resource: a/b, count: 1}\n  expect: {gpus: {0: {}}}\n", &["place", "a list"]),
            ("- cordon: 1\n  expect: {refused: x}\n", &["`refused` cannot be expected of `cordon`"]),
            (
                "- offer: {}\n  expect: {gpu: {}}\n",
                &["the key \"gpu\" is not known; did you mean `gpus`?", "line 5"],
            ),
            ("- allocate: {resource: a/b}\n", &["how many"]),
            ("- allocate: {resource: a/b, count: 1, on: [0, 1]}\n", &["on names 2"]),
            ("- release: a\n", &["allocates `as: a`"]),
            (
                "- health: {gpu: 0, state: ill}\n",
                &["\"ill\" is not known; expected one of `healthy`", "line 4"],
            ),
            ("- seconds: 86401\n", &["at most 86400"]),
            ("- offer: {}\n- usage: {gpu: 0}\n", &["step 2 (line 5)", "memoryUsedMiB"]),
            ("- usage: {gpu: 2, processes: 1}\n", &["no GPU 2"]),
            ("- usage: {gpu: 0, processes: 100000}\n", &["100000 processes; at most"]),
            ("- usage: {gpu: 0, processes: -1}\n", &["line 4"]),
            ("- usage: {gpu: 0, memoryMiB: 1}\n", &["the key \"memoryMiB\" is not known", "line 4"]),
            (
                "- allocate: {resource: a/b, count: 1, candidates: [{namespace: n, pod: p}, {namespace: n, pod: p}]}\n",
                &["line 4", "n/p (container main) is listed twice"],
            ),
            ("  []\n", &["1 to 1000"]),
        ] {
            let error = Scenario::parse(&format!("{HEAD}{steps}")).unwrap_err();
            for part in expected {
                assert!(error.contains(part), "{steps}: {part}: {error}");
            }
        }
    }
}
