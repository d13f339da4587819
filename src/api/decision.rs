//! The journal of decisions.

use crate::allocation::Holder;
use crate::gpu::OfferLine;
use crate::policy::{Hook, parameters};
use crate::values::values;
use berth_kernel::hardware::triage::TriageAnswer;
use berth_kernel::ids::time::rfc3339;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{DecisionPage, JournalStats};
use berth_kernel::policy::decision as kernel;
use berth_kernel::policy::decision::CallOutcome;
use berth_kernel::policy::hooks::{Answer, Terms};
use berth_kernel::sharing::offer::PartOffer;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// Decisions, newest first.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionRecordList {
    /// Matching decisions, up to the limit.
    pub items: Vec<DecisionRecord>,
    /// The `cursor` of the next page; absent on the last page. A page covers only a part of the journal, so it may be
    /// empty although a cursor is present, and the next page may be empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "4711")]
    pub next: Option<String>,
    /// The size of the journal.
    pub journal: JournalState,
}

/// The size of the journal of decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct JournalState {
    /// Decisions in the journal.
    #[schema(example = 5120)]
    pub kept: u64,
    /// Size of these decisions in bytes.
    #[schema(example = 7_340_032)]
    pub bytes: u64,
    /// Decisions that were removed since the daemon started, due to their age or the journal's size.
    #[schema(example = 0)]
    pub dropped: u64,
    /// Decisions that were not recorded since the daemon started: too many at once, or the disk failed.
    #[schema(example = 0)]
    pub lost: u64,
}

/// One recorded decision of the stack.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionRecord {
    /// The number of the decision.
    #[schema(example = 4710)]
    pub seq: u64,
    /// The time of the decision.
    #[schema(format = DateTime, example = "2026-02-03T04:05:06.000Z")]
    pub at: String,
    /// The hook that was called.
    pub hook: Hook,
    /// The generation of the node's state: the number of changes since the daemon started.
    #[schema(example = 812)]
    pub generation: u64,
    /// The request; absent for `offer` and `triage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<DecisionRequest>,
    /// The reported error; only for `triage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reading: Option<DecisionReading>,
    /// The GPUs of the question and of the outcome.
    #[schema(example = json!(["GPU-8a56a4bc-e184-a047-2620-be19fdf913d5"]))]
    pub gpus: Vec<String>,
    /// Pods that may have made the request, as namespace/pod. Empty if no source shows pods.
    #[schema(example = json!(["default/trainer-0"]))]
    pub candidates: Vec<String>,
    /// The calls of policies, in order.
    pub calls: Vec<DecisionCall>,
    /// The outcome.
    pub outcome: Outcome,
    /// The policies that decided, or `baseline`.
    #[schema(example = json!(["timeslice@0123456789ab"]))]
    pub by: Vec<String>,
    /// The reason of the outcome.
    #[schema(example = "the emptiest GPU")]
    pub reason: String,
    /// The granted allocation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "5eed0001-17")]
    pub allocation: Option<String>,
    /// The container that holds or held the granted allocation; absent until a source has shown it, and once the ended
    /// allocation is no longer in the history.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holder: Option<Holder>,
    /// The final answer.
    #[schema(value_type = Object, example = json!({"environment": {}}))]
    pub answer: Value,
    /// sha256 of the node as passed to the policies, which is in `/decisions/{seq}/input`. Absent
    /// if it was not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub input: Option<String>,
}

values! {
    /// The outcome of a decision.
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

/// A request for devices.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionRequest {
    /// The resource.
    #[schema(example = "nvidia.com/gpu.shared")]
    pub resource: String,
    /// The number of devices.
    #[schema(example = 1)]
    pub count: usize,
    /// The devices of an Allocate, or the required devices of a placement.
    pub devices: Vec<String>,
}

/// A reported error of a GPU.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionReading {
    /// The part.
    #[schema(example = "GPU-8a56a4bc-e184-a047-2620-be19fdf913d5")]
    pub part: String,
    /// The source of the error.
    #[schema(example = "xid")]
    pub source: String,
    /// The error's code in that source.
    #[schema(example = 79)]
    pub code: u64,
    /// The error's message.
    pub detail: String,
}

/// One call of a policy for a decision.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct DecisionCall {
    /// The policy's name and the beginning of its digest.
    #[schema(example = "timeslice@0123456789ab")]
    pub policy: String,
    /// The digest of the policy's version.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    pub digest: String,
    /// The policy's parameters.
    #[schema(value_type = Object, example = json!({"replicas": 4}))]
    pub parameters: Value,
    /// The outcome of the call.
    pub said: CallResult,
    /// The policy's answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>, example = json!({"allow": true}))]
    pub answer: Option<Value>,
    /// The policy's fault.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "unreachable (trap)")]
    pub fault: Option<String>,
    /// Units of fuel that the call used.
    #[schema(example = 181_000)]
    pub fuel: u64,
    /// Wall time of the call in microseconds.
    #[schema(example = 58)]
    pub microseconds: u64,
}

values! {
    /// The outcome of a call of a policy.
    CallResult from CallOutcome {
        /// It answered.
        Answer = "answer",
        /// It left the answer to the next policy.
        Pass = "pass",
        /// It failed.
        Fault = "fault",
        /// It was not called, since it was suspended after too many faults.
        Suspended = "suspended",
    }
}

impl DecisionRecordList {
    /// A page of decisions, with the size of the journal.
    #[must_use]
    pub fn of(ledger: &Ledger, found: &DecisionPage, journal: JournalStats) -> Self {
        let JournalStats { kept, bytes, dropped, lost, .. } = journal;
        Self {
            items: found.decisions.iter().map(|decision| DecisionRecord::of(ledger, decision)).collect(),
            next: found.next.map(|seq| seq.to_string()),
            journal: JournalState { kept, bytes, dropped, lost },
        }
    }
}

impl DecisionRecord {
    /// The body of a recorded decision, with the holder as the ledger has it now: it was not known yet when the journal
    /// recorded the decision.
    #[must_use]
    pub fn of(ledger: &Ledger, decision: &kernel::Decision) -> Self {
        let outcome = &decision.outcome;
        let allocation = match outcome {
            kernel::Outcome::Granted(grant) => grant.allocation,
            _ => None,
        };
        let holder = |id| match ledger.live.get(&id) {
            Some(live) => Holder::of(&live.holder),
            None => Holder::of(&ledger.ended.get(id)?.allocation().holder),
        };
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
            allocation: allocation.map(|id| id.to_string()),
            holder: allocation.and_then(holder),
            answer: ended(outcome),
            input: decision.input.as_ref().map(ToString::to_string),
        }
    }
}

impl DecisionCall {
    /// The body of a recorded call.
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
        kernel::Outcome::Granted(grant) => allowed(&grant.terms),
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

fn texts<T: ToString>(all: &[T]) -> Vec<String> {
    all.iter().map(ToString::to_string).collect()
}
