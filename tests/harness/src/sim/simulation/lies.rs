//! Answers of a hostile policy: each breaks one rule.

use super::policies::resource;
use berth_kernel::grants::allocation::Limits;
use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{DeviceId, PartId, Resource};
use berth_kernel::node::ports::Call;
use berth_kernel::policy::hooks::{
    AdmitRequest, Answer, OfferAnswer, PlaceRequest, Placement, Question, Terms,
};
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};

/// One of the lies.
pub(crate) fn answer(call: &Call<'_>, which: u32) -> Answer {
    match call.question {
        Question::Offer => offer(call, which),
        Question::Place(request) => place(request, which),
        Question::Admit(request) => admit(request, which),
        Question::Triage(_) => triage(which),
    }
}

fn offer(call: &Call<'_>, which: u32) -> Answer {
    let first = call.node.parts.values().map(|p| &p.part).find(|p| !p.mig_enabled);
    let Some(part) = first else {
        return Answer::Deny("not asked".into());
    };
    let slice = |memory_mib, compute_percent| Consumes::Slice { memory_mib, compute_percent };
    let line = |r: u32, count, consumes| OfferLine { resource: resource(r), count, consumes };
    let strange = OfferLine {
        resource: Resource::parse("other.example/gpu").expect("a resource name"),
        ..line(0, 1, Consumes::Whole)
    };
    let lines = match which % 12 {
        0 => return offers(vec![(unknown_part(), vec![line(0, 1, Consumes::Whole)])]),
        1 => return twice(part, line(0, 1, Consumes::Whole)),
        2 => vec![line(1, 0, slice(1, 1))],
        3 => vec![line(1, 100_000, slice(1, 1))],
        4 => vec![line(1, 1, slice(part.memory_mib * 100, 1))],
        5 => vec![line(1, 1, slice(1, 101))],
        6 => vec![strange],
        7 => vec![line(0, 2, Consumes::Whole)],
        8 => vec![line(0, 1, Consumes::Whole), line(2, 1, Consumes::Whole)],
        9 => vec![line(0, 1, Consumes::Whole), line(0, 1, Consumes::Whole)],
        10 => return Answer::Allow(Terms::default()),
        // The GPU that is in MIG mode, if there is one.
        _ => {
            let mig = call.node.parts.values().map(|p| &p.part).find(|p| p.mig_enabled).unwrap_or(part);
            return twice(mig, line(0, 1, Consumes::Whole));
        }
    };
    offers(vec![(part.id.clone(), lines)])
}

fn offers(parts: Vec<(PartId, Vec<OfferLine>)>) -> Answer {
    let parts = parts.into_iter().map(|(part, lines)| PartOffer { part, lines }).collect();
    Answer::Offer(OfferAnswer { parts, again_after_s: Some(0) })
}

fn twice(part: &Part, line: OfferLine) -> Answer {
    offers(vec![(part.id.clone(), vec![line.clone()]), (part.id.clone(), vec![line])])
}

fn unknown_part() -> PartId {
    PartId::parse("GPU-nowhere").expect("letters")
}

fn place(request: &PlaceRequest, which: u32) -> Answer {
    let all = request.available.iter();
    let not_required = || all.clone().filter(|id| !request.required.contains(id));
    let devices: Vec<DeviceId> = match which % 5 {
        0 => vec![DeviceId::whole(&unknown_part()); request.size],
        1 => all.clone().take(1).cycle().take(request.size.max(2)).cloned().collect(),
        2 => all.clone().take(request.size.saturating_sub(1)).cloned().collect(),
        3 => not_required().take(request.size + 1).cloned().collect(),
        _ => return Answer::Deny("not asked".into()),
    };
    Answer::Place(Placement { devices, reason: "x".repeat(if which > 15 { 5_000 } else { 1 }) })
}

fn admit(request: &AdmitRequest, which: u32) -> Answer {
    let set = |pairs: &[(&str, &str)]| Terms {
        environment: pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        ..Terms::default()
    };
    let long = "x".repeat(5_000);
    let terms = match which % 11 {
        0 => set(&[("NVIDIA_VISIBLE_DEVICES", "all")]),
        1 => set(&[("LD_PRELOAD", "/tmp/x")]),
        2 => set(&[("SIM_A", "1"), ("SIM_A", "2")]),
        3 => set(&[("SIM_DEVICES", "other than the other policy says")]),
        4 => set(&[("SIM_A", "two\nlines")]),
        5 => set(&[("SIM_A", &long)]),
        6 => Terms { reason: long, ..Terms::default() },
        7 => Terms {
            environment: (0..40).map(|i| (format!("SIM_{i}"), String::new())).collect(),
            ..Terms::default()
        },
        8 => Terms {
            limits: Limits { memory_mib: Some(u64::MAX), compute_percent: Some(900) },
            ..Terms::default()
        },
        9 => return Answer::Place(Placement { devices: request.devices.clone(), reason: String::new() }),
        _ => return Answer::Deny(long),
    };
    Answer::Allow(terms)
}

fn triage(which: u32) -> Answer {
    match which % 3 {
        0 => Answer::Allow(Terms::default()),
        1 => Answer::Triage(TriageAnswer {
            severity: Severity::Unhealthy,
            reason: "x".repeat(5_000),
            again_after_s: Some(u32::MAX),
        }),
        _ => Answer::Triage(TriageAnswer {
            severity: Severity::Degraded,
            reason: String::new(),
            again_after_s: Some(0),
        }),
    }
}
