//! Decisions on the record.

use crate::gpu::OfferLine;
use crate::policy::Hook;
use crate::values::values;
use berth_kernel::date::rfc3339;
use berth_kernel::decision as kernel;
use berth_kernel::decision::CallOutcome;
use berth_kernel::offer::PartOffer;
use berth_kernel::policy::{Answer, Terms, TriageAnswer};
use berth_kernel::ports::{DecisionPage, JournalStats};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Decisions, newest first.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionRecordList {
    /// Those that match, up to the limit.
    pub items: Vec<DecisionRecord>,
    /// What to ask for the following ones with, as `cursor`. It may be there although none follow, and
    /// with no items: one answer looks at a part of the journal only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "4711")]
    pub next: Option<String>,
    /// How much there is.
    pub journal: JournalState,
}

/// How much of the past there is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JournalState {
    /// Decisions that are kept.
    #[schema(example = 5120)]
    pub kept: u64,
    /// Bytes that they take.
    #[schema(example = 7_340_032)]
    pub bytes: u64,
    /// Decisions that went since the daemon started: too old, or no room.
    #[schema(example = 0)]
    pub dropped: u64,
    /// Decisions that were not recorded since the daemon started: too many at once, or the disk failed.
    #[schema(example = 0)]
    pub lost: u64,
}

/// One question to the stack, on the record.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionRecord {
    /// Its number.
    #[schema(example = 4710)]
    pub seq: u64,
    /// When it was asked.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub at: String,
    /// What was asked.
    pub hook: Hook,
    /// The state of the node that it was asked on: counts changes since the daemon started.
    #[schema(example = 812)]
    pub generation: u64,
    /// What was asked for; absent for `offer` and `triage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<DecisionRequest>,
    /// What was reported; only for `triage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reading: Option<DecisionReading>,
    /// GPUs that the question or the outcome names.
    #[schema(example = json!(["GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"]))]
    pub gpus: Vec<String>,
    /// Pods that may have asked, as namespace/pod, where a source of pods showed any.
    #[schema(example = json!(["default/trainer-0"]))]
    pub candidates: Vec<String>,
    /// What each policy said, in the order in which they were asked.
    pub calls: Vec<DecisionCall>,
    /// What came of it.
    pub outcome: Outcome,
    /// Who is behind it.
    #[schema(example = json!(["timeslice@0123456789ab"]))]
    pub by: Vec<String>,
    /// Why, in words.
    #[schema(example = "the emptiest GPU")]
    pub reason: String,
    /// The allocation, if one was granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "5eed0001-17")]
    pub allocation: Option<String>,
    /// What was answered in the end.
    #[schema(value_type = Object, example = json!({"environment": {}}))]
    pub answer: Value,
    /// sha256 of the node as policies were shown it; `/decisions/{seq}/input` has it whole. Absent
    /// where it was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub input: Option<String>,
}

values! {
    /// What came of a question.
    Outcome from kernel::Outcome {
        /// Devices were granted.
        Granted = "granted",
        /// A policy denied.
        Denied = "denied",
        /// The kernel refused what policies allowed.
        Refused = "refused",
        /// Parts are offered.
        Offered = "offered",
        /// Devices were chosen.
        Placed = "placed",
        /// A reading was judged.
        Triaged = "triaged",
    }
}

/// What was asked for.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionRequest {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// How many devices.
    #[schema(example = 1)]
    pub count: usize,
    /// The devices that an Allocate named, or that a placement had to hold.
    pub devices: Vec<String>,
}

/// What was reported.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionReading {
    /// The part.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub part: String,
    /// Where it comes from.
    #[schema(example = "xid")]
    pub source: String,
    /// Its number there.
    #[schema(example = 79)]
    pub code: u64,
    /// In words.
    pub detail: String,
}

/// One policy's part in a decision.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionCall {
    /// Its name, and the beginning of its digest.
    #[schema(example = "timeslice@0123456789ab")]
    pub policy: String,
    /// Which version.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: String,
    /// What it was set to.
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Value,
    /// What came of the call.
    pub said: CallResult,
    /// What it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>, example = json!({"allow": true}))]
    pub answer: Option<Value>,
    /// How it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "unreachable (trap)")]
    pub fault: Option<String>,
    /// Units of fuel that it used.
    #[schema(example = 181_000)]
    pub fuel: u64,
    /// Wall time that it took, microseconds.
    #[schema(example = 58)]
    pub microseconds: u64,
}

values! {
    /// What came of a call of a policy.
    CallResult from CallOutcome {
        /// It answered.
        Answer = "answer",
        /// It left the answer to others.
        Pass = "pass",
        /// It failed.
        Fault = "fault",
        /// It was not asked, since it had failed too often.
        Suspended = "suspended",
    }
}

impl DecisionRecordList {
    /// What was found, beside the state of the journal.
    #[must_use]
    pub fn of(found: &DecisionPage, standing: JournalStats) -> Self {
        let JournalStats { kept, bytes, dropped, lost, .. } = standing;
        Self {
            items: found.decisions.iter().map(DecisionRecord::of).collect(),
            next: found.next.map(|seq| seq.to_string()),
            journal: JournalState { kept, bytes, dropped, lost },
        }
    }
}

impl DecisionRecord {
    /// Of the record of one decision.
    #[must_use]
    pub fn of(decision: &kernel::Decision) -> Self {
        let outcome = &decision.outcome;
        Self {
            seq: decision.seq,
            at: rfc3339(decision.at_wall_ms),
            hook: decision.hook.into(),
            generation: decision.generation,
            request: decision.request.as_ref().map(|r| DecisionRequest {
                resource: r.resource.clone(),
                count: r.count,
                devices: r.devices.clone(),
            }),
            reading: decision.reading.as_ref().map(|r| DecisionReading {
                part: r.part.to_string(),
                source: r.source.clone(),
                code: r.code,
                detail: r.detail.clone(),
            }),
            gpus: texts(&decision.gpus),
            candidates: decision.candidates.clone(),
            calls: decision.calls.iter().map(DecisionCall::of).collect(),
            outcome: outcome.into(),
            by: outcome.by().into_iter().map(str::to_owned).collect(),
            reason: outcome.reason().to_owned(),
            allocation: match outcome {
                kernel::Outcome::Granted(grant) => grant.allocation.map(|id| id.to_string()),
                _ => None,
            },
            answer: ended(outcome),
            input: decision.input.as_ref().map(ToString::to_string),
        }
    }
}

impl DecisionCall {
    /// Of one call of a policy.
    #[must_use]
    pub fn of(call: &kernel::CallRecord) -> Self {
        let (answer, fault) = match &call.outcome {
            CallOutcome::Pass | CallOutcome::Suspended => (None, None),
            CallOutcome::Fault(fault) => (None, Some(fault.to_string())),
            CallOutcome::Answer(answer) => (Some(answered(answer)), None),
        };
        Self {
            policy: call.policy.clone(),
            digest: call.digest.to_string(),
            parameters: parameters(&call.parameters),
            said: (&call.outcome).into(),
            answer,
            fault,
            fuel: call.cost.fuel,
            microseconds: call.cost.wall_us,
        }
    }
}

fn answered(answer: &Answer) -> Value {
    match answer {
        Answer::Offer(offers) => json!({
            "parts": offers.parts.iter().map(|offer| offered(offer, None)).collect::<Vec<_>>(),
            "againAfterSeconds": offers.again_after_s,
        }),
        Answer::Place(placement) => {
            json!({"devices": texts(&placement.devices), "reason": placement.reason})
        }
        Answer::Allow(terms) => allowed(terms),
        Answer::Deny(reason) => json!({"allow": false, "reason": reason}),
        Answer::Triage(answer) => triaged(answer),
    }
}

fn ended(outcome: &kernel::Outcome) -> Value {
    match outcome {
        kernel::Outcome::Offered(offers) => {
            json!({"parts": offers.iter().map(|(offer, by)| offered(offer, Some(by.as_str()))).collect::<Vec<_>>()})
        }
        kernel::Outcome::Placed(placement, _) => json!({"devices": texts(&placement.devices)}),
        kernel::Outcome::Granted(grant) => allowed(&Terms {
            environment: grant.environment.clone(),
            limits: grant.limits,
            reason: grant.reason.clone(),
        }),
        kernel::Outcome::Denied { reason, .. } | kernel::Outcome::Refused { reason } => {
            json!({"allow": false, "reason": reason})
        }
        kernel::Outcome::Triaged(answer, _) => triaged(answer),
    }
}

fn offered(offer: &PartOffer, by: Option<&str>) -> Value {
    let lines: Vec<OfferLine> = offer.lines.iter().map(OfferLine::from).collect();
    match by {
        Some(by) => json!({"part": offer.part.as_str(), "offered": lines, "by": by}),
        None => json!({"part": offer.part.as_str(), "offered": lines}),
    }
}

fn allowed(terms: &Terms) -> Value {
    let environment: BTreeMap<_, _> = terms.environment.iter().cloned().collect();
    json!({
        "allow": true,
        "environment": environment,
        "limits": {"memoryMiB": terms.limits.memory_mib, "computePercent": terms.limits.compute_percent},
        "reason": terms.reason,
    })
}

fn triaged(answer: &TriageAnswer) -> Value {
    json!({
        "severity": answer.severity.as_str(),
        "againAfterSeconds": answer.again_after_s,
        "reason": answer.reason,
    })
}

/// Parameters as JSON, or as text where they are none.
#[must_use]
pub fn parameters(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

fn texts<T: ToString>(all: &[T]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}
