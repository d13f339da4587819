//! Lost GPUs, and calls that are slow, hang or fail.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fake_nvml::{Code, Fault, State};
use nvml_wrapper::error::NvmlError;

use crate::{Bench, eventually};

#[test]
fn every_call_on_a_lost_gpu_returns_that_until_it_is_back() {
    let bench = Bench::new(&State::h100(4));
    let uuid = bench.nvml.device_by_index(2).unwrap().uuid().unwrap();
    let device = bench.nvml.device_by_index(2).unwrap();
    let same = bench.nvml.device_by_index(2).unwrap();
    bench.change(|state| state.gpus[2].lost = true);
    assert!(matches!(device.uuid(), Err(NvmlError::GpuLost)));
    assert!(matches!(device.memory_info(), Err(NvmlError::GpuLost)));
    assert!(matches!(device.link_wrapper_for(0).is_active(), Err(NvmlError::GpuLost)));
    assert!(matches!(device.running_compute_processes(), Err(NvmlError::GpuLost)));
    assert!(matches!(bench.nvml.device_by_index(2), Err(NvmlError::GpuLost)));
    assert!(matches!(bench.nvml.device_by_uuid(uuid.as_str()), Err(NvmlError::GpuLost)));
    let other = bench.nvml.device_by_index(3).unwrap();
    assert!(matches!(other.topology_common_ancestor(same), Err(NvmlError::GpuLost)));
    assert_eq!(bench.nvml.device_count().unwrap(), 4, "indices do not move when a GPU is lost");
    assert!(other.memory_info().is_ok());
    bench.change(|state| state.gpus[2].lost = false);
    assert_eq!(device.uuid().unwrap(), uuid);
}

#[test]
fn a_gpu_that_leaves_the_file_is_lost_to_its_handle() {
    let bench = Bench::new(&State::h100(4));
    let device = bench.nvml.device_by_index(3).unwrap();
    bench.change(|state| drop(state.gpus.pop()));
    assert!(matches!(device.name(), Err(NvmlError::GpuLost)));
    assert_eq!(bench.nvml.device_count().unwrap(), 3);
}

#[test]
fn a_hanging_call_blocks_no_other_and_ends_when_the_file_changes() {
    let bench = Bench::new(&State::h100(2));
    let uuid = bench.nvml.device_by_index(0).unwrap().uuid().unwrap();
    bench.change(|state| {
        state.faults.push(Fault::hang("nvmlDeviceGetMemoryInfo*").of_gpu(&uuid));
    });
    let inside = AtomicBool::new(false);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let hanging = scope.spawn(|| {
            let device = bench.nvml.device_by_index(0).unwrap();
            inside.store(true, Ordering::SeqCst);
            let answer = device.memory_info();
            done.store(true, Ordering::SeqCst);
            answer
        });
        eventually("the call has begun", || inside.load(Ordering::SeqCst));
        let first = bench.nvml.device_by_index(0).unwrap();
        let second = bench.nvml.device_by_index(1).unwrap();
        for _ in 0..100 {
            assert!(first.name().is_ok(), "another call on the same GPU");
            assert!(second.memory_info().is_ok(), "the same call on another GPU");
        }
        // Long enough for the call to have returned if nothing held it.
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(50) {
            assert!(!done.load(Ordering::SeqCst));
            thread::yield_now();
        }
        bench.change(|state| {
            state.faults.clear();
            state.gpus[0].memory_used_mib = 77;
        });
        let answer = hanging.join().unwrap().unwrap();
        assert_eq!(answer.used, 77 * 1024 * 1024, "the state after the hang holds");
    });
}

#[test]
fn a_slow_call_lasts_as_configured() {
    let bench = Bench::new(&State::t4(1));
    let device = bench.nvml.device_by_index(0).unwrap();
    bench.change(|state| state.faults.push(Fault::slow("nvmlDeviceGetName", 30)));
    let began = Instant::now();
    assert_eq!(device.name().unwrap(), "Tesla T4");
    assert!(began.elapsed() >= Duration::from_millis(30));
    bench.change(|state| {
        state.faults = vec![Fault { delay_ms: 20, ..Fault::fail("nvmlDeviceGetName", Code::Unknown) }];
    });
    let began = Instant::now();
    assert!(matches!(device.name(), Err(NvmlError::Unknown)));
    assert!(began.elapsed() >= Duration::from_millis(20));
}

#[test]
fn any_call_can_be_made_to_fail_also_for_one_gpu() {
    let bench = Bench::new(&State::t4(2));
    let uuid = bench.nvml.device_by_index(1).unwrap().uuid().unwrap();
    bench.change(|state| {
        state.faults.push(Fault::fail("nvmlDeviceGetHandleBy*", Code::NoPermission).of_gpu(uuid));
        state.faults.push(Fault::fail("nvmlDeviceGetCount_v2", Code::IrqIssue));
    });
    assert!(bench.nvml.device_by_index(0).is_ok());
    assert!(matches!(bench.nvml.device_by_index(1), Err(NvmlError::NoPermission)));
    assert!(matches!(bench.nvml.device_count(), Err(NvmlError::IrqIssue)));
}

#[test]
fn many_threads_at_once() {
    let bench = Bench::new(&State::h100(8));
    thread::scope(|scope| {
        for thread in 0..8 {
            let nvml = &bench.nvml;
            scope.spawn(move || {
                let device = nvml.device_by_index(thread).unwrap();
                for _ in 0..500 {
                    assert_eq!(device.index().unwrap(), thread);
                    assert_eq!(device.memory_info().unwrap().total, 81_559 * 1024 * 1024);
                }
            });
        }
        for round in 0..50 {
            bench.change(|state| state.gpus[0].utilization_gpu = round);
        }
    });
}
