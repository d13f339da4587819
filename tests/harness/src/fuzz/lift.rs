//! `lift`: whatever bytes a guest leaves where its answer should be, the host reads an answer or says what
//! is wrong with it, and what comes of it is within the rules.
//!
//! The guest is `tests/guests/parrot.wat`. The first byte of an input chooses the hook, the rest is the
//! answer's memory.

use super::bytes::Bytes;
use super::hold;
use super::node::{baseline, entry, node, resources};
use crate::sim::simulation::{answers, state};
use berth_core::stack::{Evaluation, Faults};
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::ids::names::{DeviceId, PartId};
use berth_kernel::ids::time::Now;
use berth_kernel::node::command::Command;
use berth_kernel::node::decide::decide;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::PolicyRuntime;
use berth_kernel::node::rules::Rules;
use berth_kernel::policy::hooks::{AdmitRequest, PlaceRequest, REASON_BYTES_MAX};
use berth_kernel::policy::stack::{Stack, StackEntry};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::fmt::Write as _;
use std::sync::Arc;

/// Longest answer, bytes: what lies before the question in the guest's memory.
const ANSWER_BYTES_MAX: usize = 0x4000 - 0x800;

/// Plays one input.
pub fn run(policies: &dyn PolicyRuntime, parrot: &PolicyVersion, data: &[u8]) {
    let Some((hook, memory)) = data.split_first() else { return };
    let memory = &memory[..memory.len().min(ANSWER_BYTES_MAX)];
    let (mut ledger, now) = (Arc::new(shared()), Now::default());
    // All permissions, so that the rules behind them are met.
    let entry = StackEntry {
        name: parrot.name.clone(),
        digest: parrot.digest.clone(),
        parameters: letters(memory),
        ..entry(&mut Bytes::new(&[1, 0, 1, 1, 0]), 'f')
    };
    let stack = Stack { entries: vec![entry], ..Stack::default() };
    let baseline = baseline();
    let (mut faults, mut calls) = (Faults::default(), Vec::new());
    let walk = Evaluation {
        stack: &stack,
        policies,
        node: &ledger,
        now,
        faults: &mut faults,
        baseline: &baseline,
        calls: &mut calls,
        time_factor: 1,
    };
    let resource = resources()[1].clone();
    let devices: Vec<DeviceId> =
        ledger.parts.keys().flat_map(|part| (0..4).map(|n| DeviceId::share(part, n))).collect();
    match hook % 4 {
        0 => {
            let offers = walk.offers();
            hold(answers::offers(&ledger, &stack, 100, &offers));
            let verdict = decide(&ledger, &Command::Offer(offers.parts), now);
            Arc::make_mut(&mut ledger).apply(&verdict.entry);
            hold(state::check(&ledger, &Rules::default(), now));
        }
        1 => {
            let request = PlaceRequest {
                resource,
                available: devices.clone(),
                required: devices[..1].to_vec(),
                size: 2,
            };
            hold(answers::place(&request, &walk.place(&request).0.devices));
        }
        2 => {
            let request = AdmitRequest { resource, devices: devices[..2].to_vec(), claim: None };
            hold(answers::admit(&stack, &walk.admit(&request)));
        }
        _ => {
            let part = devices[0].part.clone();
            let reading = Reading { part, source: "xid".into(), code: 79, detail: String::new() };
            let answer = walk.triage(&reading).answer;
            assert!(answer.reason.len() <= REASON_BYTES_MAX, "I8: {:?}", answer.reason);
        }
    }
    for note in &calls {
        if let berth_kernel::policy::decision::CallOutcome::Fault(fault) = &note.outcome {
            let line = !fault.detail.contains('\n') && fault.detail.len() <= REASON_BYTES_MAX;
            assert!(line, "a fault is one line: {fault:?}");
        }
    }
}

/// Two GPUs of four shares each.
fn shared() -> Ledger {
    let mut ledger = node(&mut Bytes::new(&[1, 0]));
    let consumes = Consumes::Slice { memory_mib: 20_480, compute_percent: 25 };
    let offer = |part: &PartId| {
        let lines = vec![OfferLine { resource: resources()[1].clone(), count: 4, consumes }];
        (PartOffer { part: part.clone(), lines }, "test".into())
    };
    let offers = ledger.parts.keys().map(offer).collect();
    let verdict = decide(&ledger, &Command::Offer(offers), Now::default());
    ledger.apply(&verdict.entry);
    ledger
}

/// Two letters a byte, as the guest reads them.
fn letters(memory: &[u8]) -> String {
    let mut letters = String::with_capacity(2 * memory.len());
    for byte in memory {
        let letter = |nibble: u8| char::from(b'a' + nibble);
        let _ = write!(letters, "{}{}", letter(byte >> 4), letter(byte & 15));
    }
    letters
}
