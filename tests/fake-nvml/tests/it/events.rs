//! Events reach every set that was there before them, once.

use std::thread;
use std::time::{Duration, Instant};

use fake_nvml::State;
use nvml_wrapper::EventSet;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;

use crate::{Bench, PATIENCE};

const WAIT_MS: u32 = 300_000;

fn watch<'n>(bench: &'n Bench, gpus: &[u32]) -> EventSet<'n> {
    let mut set = bench.nvml.create_event_set().unwrap();
    for gpu in gpus {
        let device = bench.nvml.device_by_index(*gpu).unwrap();
        let kinds = device.supported_event_types().unwrap();
        assert!(kinds.contains(EventTypes::CRITICAL_XID_ERROR));
        set =
            device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|error| error.error).unwrap();
    }
    set
}

fn next(set: &EventSet) -> (u32, u64) {
    let event = set.wait(WAIT_MS).unwrap();
    assert_eq!(event.event_type, EventTypes::CRITICAL_XID_ERROR);
    let Some(XidError::Value(xid)) = event.event_data else {
        panic!("no XID in {event:?}");
    };
    (event.device.index().unwrap(), xid)
}

fn push(bench: &Bench, gpu: usize, xid: u64) {
    bench.change(|state| {
        let uuid = state.gpus[gpu].uuid.clone();
        state.push_xid(&uuid, xid);
    });
}

#[test]
fn each_set_gets_each_event_once_and_nothing_from_before_it() {
    let bench = Bench::new(&State::h100(4));
    push(&bench, 0, 13);
    let first = watch(&bench, &[0, 1, 2, 3]);
    assert!(matches!(first.wait(0), Err(NvmlError::Timeout)));
    push(&bench, 1, 48);
    let second = watch(&bench, &[0, 1]);
    push(&bench, 2, 79);
    push(&bench, 0, 94);
    assert_eq!([next(&first), next(&first), next(&first)], [(1, 48), (2, 79), (0, 94)]);
    assert_eq!(next(&second), (0, 94), "not the one from before it");
    for set in [&first, &second] {
        assert!(matches!(set.wait(5), Err(NvmlError::Timeout)));
    }
    // A file whose old events were cleared away brings nothing again.
    bench.change(|state| drop(state.events.drain(..2)));
    push(&bench, 3, 95);
    assert_eq!(next(&first), (3, 95));
    assert!(matches!(first.wait(0), Err(NvmlError::Timeout)));
}

#[test]
fn a_wait_ends_with_an_event_and_blocks_no_other_call() {
    let bench = Bench::new(&State::h100(2));
    let set = watch(&bench, &[0, 1]);
    thread::scope(|scope| {
        let waiting = scope.spawn(move || {
            let began = Instant::now();
            (next(&set), began.elapsed())
        });
        for _ in 0..100 {
            assert_eq!(bench.nvml.device_count().unwrap(), 2);
        }
        push(&bench, 1, 62);
        let (event, took) = waiting.join().unwrap();
        assert_eq!(event, (1, 62));
        assert!(took < PATIENCE);
    });
}

#[test]
fn a_wait_lasts_for_its_timeout() {
    let bench = Bench::new(&State::t4(1));
    let set = watch(&bench, &[0]);
    let began = Instant::now();
    assert!(matches!(set.wait(30), Err(NvmlError::Timeout)));
    assert!(began.elapsed() >= Duration::from_millis(30));
}

#[test]
fn the_loss_of_a_watched_gpu_follows_its_last_events() {
    let bench = Bench::new(&State::h100(3));
    let set = watch(&bench, &[0, 1]);
    bench.change(|state| {
        let uuid = state.gpus[1].uuid.clone();
        state.push_xid(&uuid, 79);
        state.gpus[1].lost = true;
        state.gpus[2].lost = true;
    });
    let event = set.wait(WAIT_MS).unwrap();
    assert_eq!(event.event_data.map(|xid| format!("{xid:?}")).as_deref(), Some("Value(79)"));
    assert!(matches!(event.device.uuid(), Err(NvmlError::GpuLost)));
    assert!(matches!(set.wait(WAIT_MS), Err(NvmlError::GpuLost)));
    bench.change(|state| state.gpus[1].lost = false);
    assert!(matches!(set.wait(1), Err(NvmlError::Timeout)));
}
