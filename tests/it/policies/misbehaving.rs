//! Guests that misbehave: the kind of fault, the time limit, and that the next call works.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use berth_kernel::node::ports::{PolicyFiles as _, PolicyRuntime as _};
use berth_kernel::policy::hooks::{AdmitRequest, Answer, FaultKind, Question};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::Consumes;

use crate::policies::install::room;
use crate::support::gpus::{SHARED, WHOLE, resource};
use crate::support::guests::{NOW, guest, installed, policies, refused};
use crate::support::ledger_node::{LedgerNode, share, shared_node};

/// What a call may take on a machine that is busy with other tests: ten times the 180 ms that the
/// fuel of one call was measured to last at most.
const TIME_MAX: Duration = Duration::from_secs(20);

fn node() -> LedgerNode {
    shared_node(2, 4)
}

#[derive(Clone, Copy)]
enum Hook {
    Offer,
    Place,
    Admit,
}

/// One call at a time, so that its time is its own.
static ALONE: Mutex<()> = Mutex::new(());

/// Calls the policy and returns the kind and text of its fault; then calls a harmless policy, which must work.
fn fault_of(name: &str, hook: Hook) -> (FaultKind, String) {
    let version = installed(name);
    let fault = ask(&version, hook).expect_err("a fault");
    let harmless = installed("pass");
    for hook in [Hook::Offer, Hook::Place, Hook::Admit] {
        assert_eq!(ask(&harmless, hook), Ok(None), "the next call works");
    }
    // Nothing is carried over: the same guest fails in the same way again.
    let again = ask(&version, hook).expect_err("a fault");
    assert_eq!((again.kind, &again.detail), (fault.kind, &fault.detail));
    (fault.kind, fault.detail)
}

fn ask(version: &PolicyVersion, hook: Hook) -> Result<Option<Answer>, berth_kernel::policy::hooks::Fault> {
    let node = node();
    let place = node.place(SHARED, 1);
    let admit =
        AdmitRequest { resource: resource(SHARED), devices: vec![place.available[0].clone()], claim: None };
    let question = match hook {
        Hook::Offer => Question::Offer,
        Hook::Place => Question::Place(&place),
        Hook::Admit => Question::Admit(&admit),
    };
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let started = Instant::now();
    let answer = policies().call(node.call(version, "{}", question)).answer;
    let took = started.elapsed();
    assert!(took < TIME_MAX, "{} took {took:?}", version.label());
    answer
}

fn assert_fault(name: &str, hook: Hook, kind: FaultKind, words: &str) {
    let (found, detail) = fault_of(name, hook);
    assert_eq!(found, kind, "{name}: {detail}");
    assert!(detail.contains(words), "{name}: {detail}");
    assert!(!detail.contains('\n') && detail.len() <= 1024, "{name}: {detail}");
}

#[test]
fn a_loop_is_stopped_by_fuel_wherever_it_is() {
    assert_fault("loop-in-hook", Hook::Place, FaultKind::Fuel, "used up its 400000000 units");
    assert_eq!(ask(&installed("loop-in-hook"), Hook::Offer), Ok(None), "another hook of it works");
    // Even `describe` is never reached.
    let error = refused(&guest("loop-in-start")).to_string();
    assert!(error.contains("`describe`: used up"), "{error}");
    // `describe` takes no lists, so this one can be installed.
    assert_fault("loop-in-realloc", Hook::Place, FaultKind::Fuel, "used up");
}

#[test]
fn a_loop_that_has_less_time_than_fuel_is_stopped_by_the_clock() {
    let version = installed("loop-in-hook");
    let node = node();
    let place = node.place(SHARED, 1);
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // The clock's thread may not get to run before the fuel is used up, on a machine of few
    // processors: then it is asked again.
    let (fault, took) = (0..50)
        .find_map(|_| {
            let mut call = node.call(&version, "{}", Question::Place(&place));
            call.wall_ms_max = 10;
            let started = Instant::now();
            let fault = policies().call(call).answer.expect_err("a fault");
            (fault.kind != FaultKind::Fuel).then(|| (fault, started.elapsed()))
        })
        .expect("the clock stops it once in 50 times");
    assert_eq!(fault.kind, FaultKind::Time, "{fault}");
    assert_eq!(fault.detail, "ran longer than 10 ms");
    assert!(took >= Duration::from_millis(10) && took < TIME_MAX, "{took:?}");
    assert!(!fault.kind.is_policy_fault(), "a slow machine is not the policy's fault");
}

#[test]
fn memory_beyond_the_limit_is_refused() {
    let memory = "requested more than 128 MiB of memory";
    assert_fault("memory-grab", Hook::Place, FaultKind::Memory, memory);
    let tables = "elements of one table";
    assert_fault("table-grab", Hook::Place, FaultKind::Memory, tables);
    assert_fault("recursion", Hook::Place, FaultKind::Memory, "256 KiB of stack");
    // Who takes no for an answer may go on.
    assert_eq!(ask(&installed("memory-grab-polite"), Hook::Place), Ok(None));
    let error = refused(&guest("memory-at-once")).to_string();
    assert!(error.contains("memory"), "{error}");
}

#[test]
fn a_trap_has_the_guests_message_escaped() {
    assert_fault("trap", Hook::Place, FaultKind::Trap, "`unreachable`");
    let (kind, detail) = fault_of("trap-with-words", Hook::Place);
    assert_eq!(kind, FaultKind::Trap);
    let words = "out of ideas\\nERROR forged \\u{1b}[31mline";
    assert!(detail.ends_with(words), "{detail}");
}

#[test]
fn logging_costs_fuel_and_has_a_limit() {
    assert_fault("log-flood", Hook::Place, FaultKind::Fuel, "used up");
    assert_fault("log-huge", Hook::Place, FaultKind::Answer, "more than 1024 KiB to the host at once");
}

#[test]
fn answers_that_are_too_large_or_malformed_are_faults() {
    let answer = FaultKind::Answer;
    assert_fault("answer-beyond-memory", Hook::Place, answer, "malformed");
    assert_fault("answer-oversized", Hook::Place, answer, "more than 1024 KiB to the host at once");
    assert_fault("answer-aliased", Hook::Offer, answer, "more than 1024 KiB to the host at once");
    assert_fault("answer-no-text", Hook::Place, answer, "utf-8");
    assert_fault("answer-no-pointer", Hook::Place, answer, "malformed");
    assert_fault("answer-no-case", Hook::Admit, answer, "malformed");
    assert_fault("forged-room", Hook::Place, answer, "malformed");
}

#[test]
fn indices_that_are_out_of_range_are_faults() {
    let answer = FaultKind::Answer;
    let there = "named device 999, but there are 8";
    assert_fault("device-out-of-range", Hook::Place, answer, there);
    assert_fault("device-twice", Hook::Place, answer, "chose device 1 twice");
    assert_fault("part-out-of-range", Hook::Offer, answer, "named part 77, but there are 2");
    assert_fault("part-twice", Hook::Offer, answer, "named part 0 twice");
    assert_fault("resource-no-name", Hook::Offer, answer, "\"gpu\" is not a resource name");
}

#[test]
fn a_device_of_another_resource_is_a_fault_and_one_not_available_is_the_kernels_to_judge() {
    let version = installed("device-not-available");
    let node = LedgerNode::new().gpus(1).offer(0, &[(WHOLE, 1, Consumes::Whole), (SHARED, 4, share(4))]);
    let mut place = node.place(SHARED, 1);
    let fault = policies().call(node.call(&version, "{}", Question::Place(&place))).answer.unwrap_err();
    assert_eq!(fault.kind, FaultKind::Answer);
    assert!(fault.detail.contains("of another resource"), "{fault}");
    place = node.place(WHOLE, 1);
    place.available.clear();
    let answer = policies().call(node.call(&version, "{}", Question::Place(&place))).answer;
    let Ok(Some(Answer::Place(placement))) = answer else {
        panic!("{answer:?}");
    };
    assert_eq!(placement.devices, node.devices(WHOLE));
}

#[test]
fn a_call_that_cannot_be_made_is_not_a_fault_of_the_policy() {
    let version = installed("pass");
    let node = node();
    let mut place = node.place("nvidia.com/gpu.shared", 1);
    place.available = LedgerNode::new().gpus(3).offer(2, &[(SHARED, 1, share(1))]).devices(SHARED);
    let fault = policies().call(node.call(&version, "{}", Question::Place(&place))).answer.unwrap_err();
    assert_eq!(fault.kind, FaultKind::Missing, "{fault}");
    let mut stranger = version;
    stranger.digest = berth_kernel::ids::names::Digest::parse(&"0".repeat(64)).unwrap();
    let fault = policies().call(node.call(&stranger, "{}", Question::Offer)).answer.unwrap_err();
    assert_eq!(fault.kind, FaultKind::Missing, "{fault}");
    assert!(!fault.kind.is_policy_fault());
}

#[test]
fn many_concurrent_calls_are_all_answered() {
    // A room of its own: the others' calls must not wait for its places.
    let (policies, _state) = room(|_| {});
    let harmless = policies.install(&guest("pass"), NOW).unwrap();
    let looping = policies.install(&guest("loop-in-hook"), NOW).unwrap();
    let policies = &policies;
    std::thread::scope(|scope| {
        for n in 0..12 {
            let (harmless, looping) = (&harmless, &looping);
            scope.spawn(move || {
                let node = node();
                let place = node.place(SHARED, 1);
                let version = if n % 3 == 0 { looping } else { harmless };
                let mut call = node.call(version, "{}", Question::Place(&place));
                // Four run at once; the others wait for their turn.
                call.wall_ms_max = 60_000;
                let answer = policies.call(call).answer;
                match n % 3 {
                    0 => assert_eq!(answer.unwrap_err().kind, FaultKind::Fuel),
                    _ => assert_eq!(answer, Ok(None)),
                }
            });
        }
    });
}
