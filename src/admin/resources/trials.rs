//! `/trials`: the effect that a policy would have on the node at present.

use crate::failure::OrFailure;
use crate::resources::comparisons::candidate;
use crate::resources::pod_rules;
use crate::resources::stack_entries::resolve;
use crate::state::State;
use actix_web::web::{Data, Payload};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{
    Candidate, DecisionCall, Kind, NewTrial, OfferLine, Trial, TrialCall, TrialOffer, TrialOutcome,
    TrialRequest, TrialResource,
};
use berth_core::lab::{
    CallReport, DeviceRequest, Proposed, RequestOutcome, RequestingPod, TRIAL_DEVICES_MAX, TrialReport,
};
use berth_http::{Failure, HandlerResult, body};
use berth_kernel::ids::names::Resource;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::decision::{CallOutcome, Outcome};
use berth_kernel::policy::describe;
use berth_kernel::policy::stack::Permissions;
use berth_kernel::sharing::listing::free_devices;
use berth_kernel::sharing::part_state::PartState;
use std::collections::BTreeMap;

/// Longest name of a pod, bytes: a DNS subdomain.
const NAME_BYTES_MAX: usize = 253;
/// Most labels of a pod that policies are shown.
const LABELS_MAX: usize = 64;
/// Longest value of a label, bytes, and longest key without its prefix.
const LABEL_BYTES_MAX: usize = 63;

/// Try a policy on the live node
///
/// Calls the policy with the node's present state for its offers and, with a request, for the devices that it would
/// choose and whether a container would be granted them, together with the rest of the active stack or alone; or a whole
/// stack (`entries`), as its activation would. The
/// kernel checks the answers as for a real request. All of that happens on a copy: nothing is recorded, granted or
/// shown to the kubelet. One trial runs at a time, usually for milliseconds; for up to a minute and a half if
/// policies use all the time of an activation, and longer if one must be compiled first.
#[utoipa::path(post, path = "",
    request_body(content = NewTrial),
    responses(
        (status = 200, description = "The result of the trial, including faults of policies", body = Trial),
        (status = 400, description = "No JSON"),
        (status = 403, description = "No trusted key signed the policy"),
        (status = 409, description = "The active stack has 16 entries, and the policy replaces none of them"),
        (status = 422, description = "The policy, its parameters or the request cannot be used"),
    ))]
pub(crate) async fn add(state: Data<State>, request: HttpRequest, payload: Payload) -> HandlerResult {
    let wanted: NewTrial = body::json(&request, payload).await?;
    let NewTrial { policy, entries, digest, parameters, permissions, on_fault, alone, request } = wanted;
    let invalid = |rule: String| Failure::new(Kind::Invalid, rule);
    let request = request.map(device_request).transpose().map_err(invalid)?;
    let ledger = state.kernel.snapshot();
    let proposed = match entries {
        Some(entries) => {
            let of_policy = digest.is_some() || permissions.is_some() || on_fault.is_some() || alone;
            if of_policy || !policy.is_empty() || !parameters.is_empty() {
                let rule = "entries: the whole stack to try; of the other keys only request goes with it";
                return Err(invalid(rule.into()));
            }
            Proposed::Stack(resolve(&ledger, entries)?)
        }
        None if policy.is_empty() => {
            return Err(invalid(
                "policy: missing; name the policy to try, or the whole stack in entries".into(),
            ));
        }
        None => {
            let permissions = permissions.map(Permissions::from);
            permissions.as_ref().map_or(Ok(()), Permissions::check).map_err(invalid)?;
            Proposed::Policy {
                candidate: candidate(&ledger, Candidate { policy, digest, parameters })?,
                permissions,
                on_fault: on_fault.map(Into::into),
                alone,
            }
        }
    };
    let trial = berth_core::lab::Proposal { proposed, request: request.clone() };
    let report = state.lab.try_policy(trial).await.or_failure()?;
    let mut trial = shown(&report, request.as_ref());
    trial.warnings.extend(pod_rules::warnings(&state, &report.node, &report.stack.entries));
    Ok(HttpResponse::Ok().json(trial))
}

fn device_request(request: TrialRequest) -> Result<DeviceRequest, String> {
    let TrialRequest { resource, count, namespace, pod, labels } = request;
    let resource = Resource::parse(&resource).map_err(|error| format!("request.resource: {error}"))?;
    if !(1..=TRIAL_DEVICES_MAX).contains(&count) {
        return Err(format!("request.count: 1 to {TRIAL_DEVICES_MAX}, not {count}"));
    }
    for (key, name) in [("namespace", &namespace), ("pod", &pod)] {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
        let good = |name: &String| (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(inner);
        if name.as_ref().is_some_and(|name| !good(name)) {
            return Err(format!(
                "request.{key}: not a Kubernetes name: lower-case letters, digits, `-` and `.`"
            ));
        }
    }
    check_labels(&labels)?;
    let is_given = namespace.is_some() || pod.is_some() || !labels.is_empty();
    let pod = is_given.then(|| RequestingPod {
        namespace: namespace.unwrap_or_else(|| "default".into()),
        name: pod.unwrap_or_else(|| "trial".into()),
        labels,
    });
    Ok(DeviceRequest { resource, count, pod })
}

/// Checks labels by the rules of Kubernetes.
fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), String> {
    if labels.len() > LABELS_MAX {
        return Err(format!("request.labels: {} labels; at most {LABELS_MAX} are allowed", labels.len()));
    }
    let is_name = |text: &str| {
        let ends = |end: Option<char>| end.is_some_and(|c| c.is_ascii_alphanumeric());
        let inner = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        text.len() <= LABEL_BYTES_MAX
            && text.bytes().all(inner)
            && ends(text.chars().next())
            && ends(text.chars().next_back())
    };
    let is_prefix = |text: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b);
        (1..=NAME_BYTES_MAX).contains(&text.len()) && text.bytes().all(inner)
    };
    for (key, value) in labels {
        let is_key = match key.split_once('/') {
            Some((prefix, name)) => is_prefix(prefix) && is_name(name),
            None => is_name(key),
        };
        if !is_key {
            return Err(format!(
                "request.labels: {key:?} is not a valid label key: write NAME or PREFIX/NAME, the name with at most \
                 {LABEL_BYTES_MAX} letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit, and \
                 the prefix with lower-case letters, digits, `-` and `.`"
            ));
        }
        if !value.is_empty() && !is_name(value) {
            return Err(format!(
                "request.labels: {value:?} is not a valid value of the label {key}: write at most {LABEL_BYTES_MAX} \
                 letters, digits, `-`, `_` and `.`, beginning and ending with a letter or digit"
            ));
        }
    }
    Ok(())
}

fn shown(report: &TrialReport, request: Option<&DeviceRequest>) -> Trial {
    let label = |place: usize| report.stack.entries.get(place).map(|entry| entry.label()).unwrap_or_default();
    Trial {
        policy: label(report.index),
        stack: report.stack.entries.iter().map(|entry| entry.label()).collect(),
        instead_of: report.replaces.clone(),
        generation: report.node.generation,
        refused: report.refused.clone(),
        warnings: report.warnings.clone(),
        offers: offers(&report.node, &report.after),
        resources: resources(&report.node, &report.after),
        request: report
            .outcome
            .as_ref()
            .zip(request)
            .map(|(given, request)| outcome(&report.after, given, request)),
        calls: report.calls.iter().map(|one| call(&report.after, one)).collect(),
    }
}

/// The offers of all parts after a change of the stack, beside the present ones.
pub(crate) fn offers(present: &Ledger, after: &Ledger) -> Vec<TrialOffer> {
    let lines = |part: &PartState| part.lines.iter().map(OfferLine::from).collect::<Vec<_>>();
    let text = |part: &PartState| part.offered_by.as_ref().map(ToString::to_string).unwrap_or_default();
    let mut parts: Vec<_> = after.parts.values().filter(|part| part.present).collect();
    parts.sort_by(|a, b| (a.part.gpu_index, &a.part.id).cmp(&(b.part.gpu_index, &b.part.id)));
    let offer = |part: &PartState| {
        let now = present.part(&part.part.id);
        TrialOffer {
            part: part.part.id.to_string(),
            name: describe::gpu(after, &part.part.id),
            offered: lines(part),
            by: text(part),
            offered_now: now.map(lines).unwrap_or_default(),
            by_now: now.map(text).unwrap_or_default(),
            differs: now.is_none_or(|now| now.lines != part.lines),
        }
    };
    parts.into_iter().map(|part| offer(part)).collect()
}

/// The devices of each resource after a change of the stack, beside the present ones.
pub(crate) fn resources(present: &Ledger, after: &Ledger) -> Vec<TrialResource> {
    let offered = |ledger: &Ledger| {
        let mut counts = BTreeMap::<Resource, usize>::new();
        for part in ledger.parts.values().filter(|part| part.present) {
            for line in &part.lines {
                *counts.entry(line.resource.clone()).or_default() += line.count as usize;
            }
        }
        counts
    };
    let (then, now) = (offered(after), offered(present));
    let mut names: Vec<&Resource> = then.keys().chain(now.keys()).collect();
    names.sort();
    names.dedup();
    let of = |counts: &BTreeMap<Resource, usize>, name: &Resource| counts.get(name).copied().unwrap_or(0);
    let resource = |name: &Resource| TrialResource {
        resource: name.to_string(),
        devices: of(&then, name),
        free: free_devices(after, name).len(),
        devices_now: of(&now, name),
        free_now: free_devices(present, name).len(),
    };
    names.into_iter().map(resource).collect()
}

fn outcome(after: &Ledger, given: &RequestOutcome, request: &DeviceRequest) -> TrialOutcome {
    let (placed_by, placed_because) = given.placed.clone().unzip();
    let grant = match &given.outcome {
        Outcome::Granted(grant) => Some(grant),
        _ => None,
    };
    TrialOutcome {
        resource: request.resource.to_string(),
        count: request.count,
        candidates: given.candidates.clone(),
        devices: given.devices.iter().map(ToString::to_string).collect(),
        names: given.devices.iter().map(|id| describe::device(after, id)).collect(),
        placed_by,
        placed_because: placed_because.unwrap_or_default(),
        outcome: (&given.outcome).into(),
        by: given.outcome.by().into_iter().map(str::to_owned).collect(),
        reason: given.outcome.reason().to_owned(),
        environment: grant.map(|g| g.terms.environment.iter().cloned().collect()).unwrap_or_default(),
        memory_limit_mib: grant.and_then(|g| g.terms.limits.memory_mib),
        compute_limit_percent: grant.and_then(|g| g.terms.limits.compute_percent),
    }
}

fn call(after: &Ledger, report: &CallReport) -> TrialCall {
    let message = match &report.note.outcome {
        CallOutcome::Pass => "pass".to_owned(),
        CallOutcome::Suspended => "not called: it is suspended".to_owned(),
        CallOutcome::Answer(answer) => describe::answer(answer, after),
        CallOutcome::Fault(fault) => format!("fault: {fault}"),
    };
    TrialCall {
        hook: report.hook.into(),
        message,
        log: report.log_lines.clone(),
        call: DecisionCall::of(&report.note),
    }
}
