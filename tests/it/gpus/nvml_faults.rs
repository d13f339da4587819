//! NVML that hangs, fails or is missing: GPUs become unhealthy, and every request is answered.

use crate::support::nvml::FakeNvml;
use crate::support::wait::SOON;
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_kernel::hardware::gpu::{Inventory, Load, Part, ROWS, ROWS_FAILED, ROWS_PENDING};
use berth_kernel::hardware::process::PROCESSES_PER_GPU_MAX;
use berth_kernel::node::ports::Gpus;
use fake_nvml::{Code, Event, EventKind, Fault, Installed, Process, RecoveryAction, State};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// How long the calls on one GPU may take in tests of hanging calls. On a busy machine calls that do not hang exceed
/// it, too.
const DEADLINE: Duration = Duration::from_secs(2);

/// The first call that exceeds the deadline counts as hung.
fn with_deadline(state: &State, deadline: Duration) -> FakeNvml {
    FakeNvml::new(state, |options| NvmlOptions { deadline, hung_after: Duration::ZERO, ..options })
}

fn opened(state: &State) -> FakeNvml {
    with_deadline(state, SOON)
}

fn options(library: &Path, sysfs: &Path) -> NvmlOptions {
    NvmlOptions {
        library: Some(library.to_owned()),
        sysfs: sysfs.to_owned(),
        deadline: SOON,
        // The first call that exceeds the deadline counts as hung.
        hung_after: Duration::ZERO,
        ..NvmlOptions::default()
    }
}

/// The inventory without its loads, which lack what a busy machine did not read in time.
fn without_loads(inventory: &Inventory) -> Inventory {
    Inventory { loads: BTreeMap::new(), ..inventory.clone() }
}

#[test]
fn a_call_that_hangs_on_one_gpu_costs_that_gpu_its_health() {
    let nvml = with_deadline(&State::h100(4), DEADLINE);
    let has_loads = |inventory: &Inventory| inventory.loads.len() == 4;
    let before = without_loads(&nvml.scan_until("scanned with its loads", has_loads));
    let hung = before.parts[1].gpu.clone();
    nvml.change(|state| {
        let fault = Fault::hang("nvmlDeviceGetMemoryInfo*").of_gpu(hung.as_str());
        state.faults.push(fault);
    });
    let text = "nvmlDeviceGetMemoryInfo_v2 does not answer";
    let during = nvml.scan_until("hung", |inventory| {
        inventory.scan_errors.keys().eq([&hung]) && inventory.scan_errors[&hung].reason.contains(text)
    });
    assert_eq!(during.parts, before.parts);
    assert_eq!(during.usage.len(), 3, "the others are read");
    // It is known to hang now, and is not waited for again. A busy machine may need several attempts.
    let end = Instant::now() + SOON;
    loop {
        let began = Instant::now();
        let is_one = (0..10).all(|_| nvml.scan().scan_errors.len() == 1);
        let took = began.elapsed();
        if is_one && took < DEADLINE * 9 {
            break;
        }
        assert!(Instant::now() < end, "one error: {is_one}, {took:?}");
    }
    // Events of the others still come.
    nvml.xid(2, 48);
    let reading = nvml.next();
    assert_eq!((&reading.part, reading.code), (&before.parts[2].id, 48));
    nvml.change(|state| state.faults.clear());
    nvml.scan_until("well again", |inventory| has_loads(inventory) && without_loads(inventory) == before);
}

#[test]
fn a_hanging_driver_leaves_all_gpus_listed_with_an_error() {
    let nvml = with_deadline(&State::h100(8), DEADLINE);
    let has_loads = |inventory: &Inventory| inventory.loads.len() == 8;
    let before = without_loads(&nvml.scan_until("scanned with its loads", has_loads));
    nvml.change(|state| state.faults.push(Fault::hang("*")));
    let during = nvml.scan();
    assert_eq!(during.parts, before.parts);
    assert_eq!(during.links, before.links);
    assert_eq!(during.scan_errors.len(), 8);
    assert!(during.usage.is_empty());
    nvml.change(|state| state.faults.clear());
    nvml.scan_until("well again", |inventory| has_loads(inventory) && without_loads(inventory) == before);
}

#[test]
fn hanging_gpus_cost_two_deadlines_in_total() {
    let nvml = with_deadline(&State::h100(16), DEADLINE);
    let end = Instant::now() + SOON;
    loop {
        nvml.scan_until("all are read", |inventory| inventory.usage.len() == 16);
        nvml.change(|state| state.faults.push(Fault::hang("nvmlDeviceGetMigMode")));
        let began = Instant::now();
        let during = nvml.scan();
        let took = began.elapsed();
        assert_eq!(during.scan_errors.len(), 16);
        nvml.change(|state| state.faults.clear());
        // A deadline for each GPU would take longer. A busy machine may take as long.
        if took < DEADLINE * 8 {
            break;
        }
        assert!(Instant::now() < end, "{took:?}");
    }
}

#[test]
fn an_error_on_one_gpu_is_reported_as_text() {
    let nvml = opened(&State::h100(2));
    let id = nvml.scan().parts[0].gpu.clone();
    for (code, says) in [
        (Code::Unknown, "nvmlDeviceGetUUID"),
        (Code::ResetRequired, "needs a reset"),
        (Code::GpuIsLost, "fell off the bus"),
    ] {
        nvml.change(|state| {
            let fault = Fault::fail("nvmlDeviceGetUUID", code).of_gpu(id.as_str());
            state.faults = vec![fault];
        });
        let inventory = nvml.scan();
        assert!(inventory.scan_errors[&id].reason.contains(says), "{:?}", inventory.scan_errors);
        assert_eq!(inventory.parts.len(), 2);
    }
}

#[test]
fn pending_and_failed_row_remappings_are_signs() {
    let nvml = opened(&State::a100(1));
    let rows = |pending, failed| {
        nvml.change(|state| {
            let rows = state.gpus[0].remapped_rows.as_mut().expect("an A100 has rows");
            (rows.pending, rows.failed) = (pending, failed);
        });
        let inventory = nvml.scan();
        assert!(inventory.scan_errors.is_empty(), "{:?}", inventory.scan_errors);
        inventory.signs
    };
    assert_eq!(rows(false, false), []);
    let pending = rows(true, false);
    assert_eq!((pending[0].source.as_str(), pending[0].code), (ROWS, ROWS_PENDING));
    let failed = rows(true, true);
    assert_eq!((failed.len(), failed[0].code), (1, ROWS_FAILED), "the worse one");
    assert!(failed[0].detail.contains("replace it"), "{failed:?}");
}

#[test]
fn ecc_errors_are_counted_if_no_event_reports_them() {
    let nvml = opened(&State::a100(2));
    let ecc = |gpu: usize, errors| {
        nvml.change(|state| {
            state.gpus[gpu].ecc.as_mut().expect("an A100 counts").uncorrected_volatile = errors;
        });
        let signs = nvml.scan().signs;
        signs.into_iter().map(|sign| (sign.source, sign.code)).collect::<Vec<_>>()
    };
    // Those that were counted before the first scan are judged as if they had just come.
    assert_eq!(ecc(1, 3), [("ecc".to_owned(), 3)]);
    assert_eq!(ecc(1, 5), [("ecc".to_owned(), 2)]);
    assert_eq!(ecc(1, 5), [], "reported once");
    assert_eq!(ecc(1, 0), [("recovery".to_owned(), 0)], "the GPU was reset, or the driver loaded again");
    assert_eq!(ecc(1, 1), [("ecc".to_owned(), 1)]);
}

#[test]
fn every_recovery_action_has_a_text() {
    let nvml = opened(&State::h100(1));
    for (action, code, says) in [
        (RecoveryAction::GpuReset, 1, "a reset of the GPU"),
        (RecoveryAction::NodeReboot, 2, "a reboot of the node"),
        (RecoveryAction::DrainP2p, 3, "peer-to-peer"),
        (RecoveryAction::DrainAndReset, 4, "a stop of its work and then a reset"),
        (RecoveryAction::RecoverImex, 5, "the IMEX domain"),
        (RecoveryAction::BusReset, 6, "a reset of its PCIe bus"),
        (RecoveryAction::SystemReboot, 7, "a reboot of the system"),
    ] {
        nvml.change(|state| state.gpus[0].recovery_action = action);
        let signs = nvml.scan().signs;
        assert_eq!((signs.len(), signs[0].code), (1, code));
        assert!(signs[0].detail.contains(says), "{signs:?}");
    }
    nvml.change(|state| {
        state.gpus[0].recovery_action = RecoveryAction::None;
        // Drivers before R550 do not know the field.
        state.faults.push(Fault::fail("nvmlDeviceGetFieldValues", Code::NotSupported));
    });
    assert_eq!(nvml.scan().signs, []);
}

#[test]
fn a_profiles_attributes_are_read_from_nvml_if_the_name_has_none() {
    let mut state = State::h100(1);
    state.split(0, &[1, 1, 1, 2]);
    let instances = &mut state.gpus[0].mig.as_mut().expect("it is split").instances;
    for (instance, extras) in instances.iter_mut().zip(["+me", "-me", "", "+gfx"]) {
        instance.profile += extras;
    }
    let profiles = |nvml: &FakeNvml| -> Vec<String> {
        let parts = nvml.scan().parts;
        parts.into_iter().filter_map(|part| Some(part.mig?.profile)).collect()
    };
    let nvml = opened(&state);
    assert_eq!(profiles(&nvml), ["1g.10gb+me", "1g.10gb-me", "1g.10gb", "2g.20gb+gfx"]);
    // Without the right to query, the name counts.
    state.faults.push(Fault::fail("nvmlDeviceGetGpuInstanceById", Code::NoPermission));
    let nvml = opened(&state);
    assert_eq!(profiles(&nvml), ["1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb"]);
}

/// A GPU in MIG mode cannot be read for lack of a right.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/229
#[test]
fn without_the_right_to_see_a_gpu_in_mig_mode_its_instances_are_read_by_themselves() {
    let mut state = State::h100(1);
    let uuids = state.split(0, &[1, 2]);
    state.gpus[0].processes = vec![
        Process { gpu_instance: Some(7), compute_instance: Some(0), ..Process::new(42, 100) },
        Process { gpu_instance: Some(8), compute_instance: Some(0), ..Process::new(43, 200) },
    ];
    state.gpus[0].mig.as_mut().expect("it is split").privileged = false;
    let nvml = opened(&state);
    let inventory = nvml.scan();
    assert!(inventory.scan_errors.is_empty(), "{:?}", inventory.scan_errors);
    let [gpu, instances @ ..] = &inventory.parts[..] else { panic!("no GPU") };
    assert_eq!(gpu.memory_mib, 0, "not known");
    let read = |part: &Part| (part.id.to_string(), part.mig.clone().map(|mig| mig.profile), part.memory_mib);
    let memory = |at: usize| state.gpus[0].mig.as_ref().expect("it is split").instances[at].memory_mib;
    let profile = |name: &str| Some(name.to_owned());
    assert_eq!(
        instances.iter().map(read).collect::<Vec<_>>(),
        [
            (uuids[0].clone(), profile("1g.10gb"), memory(0)),
            (uuids[1].clone(), profile("2g.20gb"), memory(1))
        ]
    );
    // NVML lists the GPU's processes to others only; those of its instances make up for it.
    let seen: Vec<_> =
        inventory.processes[&gpu.gpu].iter().map(|one| (one.pid, one.part.to_string())).collect();
    assert_eq!(seen, [(42, uuids[0].clone()), (43, uuids[1].clone())]);
    // The memory can be read again once MIG is off.
    nvml.change(|state| {
        let gpu = &mut state.gpus[0];
        gpu.processes.clear();
        gpu.mig.as_mut().expect("it has MIG").enabled = false;
    });
    let whole = nvml.scan();
    assert_eq!((whole.parts.len(), whole.parts[0].memory_mib), (1, 81_559));
}

#[test]
fn calls_that_use_a_megabyte_of_stack_find_it() {
    let mut state = State::h100(2);
    state.stack_kib = 1024;
    let nvml = opened(&state);
    assert_eq!(nvml.scan().parts.len(), 2);
    nvml.xid(1, 48);
    assert_eq!(nvml.next().code, 48);
}

#[test]
fn a_gpu_that_is_attached_later_is_found_by_opening_nvml_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut state = State::h100(4);
    state.counts_at_init = true;
    let late = state.gpus.split_off(2);
    let installed = Installed::new(folder.path(), &state).expect("the fake is built");
    let attached = folder.path().join("attached");
    let attach = |bus: &str| std::fs::create_dir_all(attached.join(bus)).expect("a folder");
    attach("0000:07:00.0");
    attach("0000:13:00.0");
    let options = NvmlOptions { attached: attached.clone(), ..options(installed.library(), folder.path()) };
    let gpus = NvmlGpus::open(options).expect("it opens");
    let nvml = FakeNvml { gpus, installed, folder };
    let first = nvml.scan();
    assert_eq!(first.parts.len(), 2);
    nvml.change(|state| state.gpus.extend(late));
    assert!(first.loads.is_empty(), "the first scan starts the GPUs and reads no load");
    // A scan that follows another at once may find a GPU still in use by its thread, and leaves out its load.
    let again = nvml.scan_until("scanned with its loads", |inventory| inventory.loads.len() == 2);
    assert_eq!(without_loads(&again), first, "NVML counts when it is opened");
    let end = Instant::now() + SOON;
    let both = loop {
        attach("0000:1f:00.0");
        attach("0000:2b:00.0");
        let both = nvml.scan();
        if both.parts.len() == 4 || Instant::now() > end {
            break both;
        }
        // A busy machine may not close NVML in time: then it is opened with the GPUs that it had.
        std::fs::remove_dir(attached.join("0000:2b:00.0")).expect("a folder");
        nvml.scan();
    };
    assert_eq!((both.parts.len(), both.scan_errors.len()), (4, 0));
    assert_eq!(both.parts[..2], first.parts);
    // Its events come, too.
    nvml.xid(3, 48);
    let reading = nvml.next();
    assert_eq!((&reading.part, reading.code), (&both.parts[3].id, 48));
}

#[test]
fn a_driver_that_is_replaced_costs_every_gpu_its_health_until_it_fits_again() {
    let nvml = opened(&State::h100(2));
    let before = nvml.scan();
    for (call, code, says) in [
        ("nvmlDeviceGetUUID", Code::DriverNotLoaded, "nvidia-smi"),
        ("nvmlInit*", Code::LibRmVersionMismatch, "different versions"),
        ("nvmlInit*", Code::DriverNotLoaded, "modprobe nvidia"),
    ] {
        nvml.change(|state| {
            // Only an open library can be opened again.
            state.faults =
                vec![Fault::fail("nvmlDeviceGetCount_v2", Code::Uninitialized), Fault::fail(call, code)];
        });
        nvml.scan();
        nvml.change(|state| state.faults = vec![Fault::fail(call, code)]);
        let during = nvml.scan_until("the reading", |inventory| {
            inventory.scan_errors.len() == 2
                && inventory.scan_errors.values().all(|error| error.reason.contains(says))
        });
        assert_eq!((&during.parts, &during.links), (&before.parts, &before.links));
        nvml.change(|state| state.faults.clear());
        nvml.scan_until("well again", |inventory| *inventory == before);
    }
}

#[test]
fn values_that_a_model_does_not_report_are_omitted() {
    let mut state = State::t4(2);
    for call in ["nvmlDeviceGetTopologyCommonAncestor", "nvmlDeviceGetMemoryAffinity"] {
        state.faults.push(Fault::fail(call, Code::NotSupported));
    }
    state.faults.push(Fault::fail("nvmlDeviceGetComputeRunningProcesses_v3", Code::NoPermission));
    let nvml = opened(&state);
    let inventory = nvml.scan();
    assert!(inventory.scan_errors.is_empty(), "{:?}", inventory.scan_errors);
    assert_eq!(inventory.parts[0].numa_node, None);
    assert_eq!(inventory.links.iter().count(), 1);
    assert!(inventory.usage.is_empty(), "processes that cannot be seen are not none");
    assert!(inventory.processes.is_empty());
}

#[test]
fn processes_of_a_gpu_are_listed_up_to_a_limit_and_it_stays_healthy() {
    for (running, reported) in [(64, 64), (65, 65), (300, PROCESSES_PER_GPU_MAX)] {
        let mut state = State::h100(1);
        (0..running).for_each(|n| state.gpus[0].run(1000 + n, 1));
        let nvml = opened(&state);
        let inventory = nvml.scan();
        assert!(inventory.scan_errors.is_empty(), "{:?}", inventory.scan_errors);
        let gpu = &inventory.parts[0].gpu;
        assert_eq!(
            (inventory.usage[gpu.as_part()].processes, inventory.processes[gpu].len()),
            (running, reported)
        );
    }
    // More than are ever read: not visible, which is not an error.
    let mut state = State::h100(1);
    (0..2000).for_each(|n| state.gpus[0].run(1000 + n, 1));
    let inventory = opened(&state).scan();
    assert!(inventory.scan_errors.is_empty() && inventory.processes.is_empty());
}

#[test]
fn memory_that_nvml_does_not_report_is_not_zero() {
    let mut state = State::h100(1);
    state.gpus[0].processes.push(Process { memory_hidden: true, ..Process::new(7, 5) });
    let inventory = opened(&state).scan();
    let process = &inventory.processes[&inventory.parts[0].gpu][0];
    assert_eq!((process.pid, process.memory_mib), (7, None));
}

#[test]
fn processes_of_a_gpu_that_does_not_answer_are_not_reported() {
    let mut state = State::h100(2);
    state.gpus[0].run(7, 5);
    let nvml = opened(&state);
    assert_eq!(nvml.scan().processes.len(), 2);
    nvml.change(|state| state.gpus[0].lost = true);
    let inventory = nvml.scan();
    assert_eq!(inventory.processes.keys().collect::<Vec<_>>(), [&inventory.parts[1].gpu]);
}

#[test]
fn the_numa_node_of_sysfs_takes_precedence() {
    let folder = tempfile::tempdir().expect("a folder");
    let installed = Installed::new(folder.path(), &State::h100(2)).expect("it is built");
    for (bus, node) in [("0000:07:00.0", "3\n"), ("0000:13:00.0", "-1\n")] {
        let slot = folder.path().join("bus/pci/devices").join(bus);
        std::fs::create_dir_all(&slot).expect("a folder");
        std::fs::write(slot.join("numa_node"), node).expect("a file");
    }
    let gpus = NvmlGpus::open(options(installed.library(), folder.path())).expect("it opens");
    let inventory = gpus.scan().expect("a scan");
    let nodes: Vec<_> = inventory.parts.iter().map(|part| part.numa_node).collect();
    assert_eq!(nodes, [Some(3), None], "-1 is no node");
}

#[test]
fn an_event_of_a_mig_instance_names_it() {
    let mut state = State::h100(1);
    state.split(0, &[1, 1]);
    let nvml = opened(&state);
    let inventory = nvml.scan();
    nvml.change(|state| {
        let gpu = state.gpus[0].uuid.clone();
        for (seq, gpu_instance) in [(1, Some(8)), (2, None)] {
            state.events.push(Event {
                seq,
                gpu: gpu.clone(),
                kind: EventKind::Xid,
                data: 94,
                gpu_instance,
                compute_instance: gpu_instance.map(|_| 0),
            });
        }
    });
    assert_eq!(nvml.next().part, inventory.parts[2].id);
    assert_eq!(nvml.next().part, inventory.parts[0].id);
}

#[test]
fn double_bit_errors_are_read_and_single_bit_errors_are_not() {
    let nvml = opened(&State::h100(1));
    nvml.scan();
    nvml.change(|state| {
        let gpu = state.gpus[0].uuid.clone();
        for (seq, kind) in [(1, EventKind::SingleBitEcc), (2, EventKind::DoubleBitEcc)] {
            state.events.push(Event {
                seq,
                gpu: gpu.clone(),
                kind,
                data: 0,
                gpu_instance: None,
                compute_instance: None,
            });
        }
    });
    assert_eq!(nvml.next().source, "ecc");
    let none = nvml.gpus.next_reading(Duration::from_millis(50));
    assert_eq!(none.expect("events work"), None);
}

#[test]
fn the_loss_of_one_gpu_does_not_stop_events_of_the_others() {
    let nvml = opened(&State::h100(3));
    let parts = nvml.scan().parts;
    nvml.change(|state| state.gpus[0].lost = true);
    let lost = nvml.next();
    assert_eq!((lost.source.as_str(), &lost.part), ("lost", &parts[0].id));
    // NVML makes a new event set without the lost one; an event in between is lost with the old
    // set, so the XID is repeated until it is read.
    let began = Instant::now();
    loop {
        nvml.xid(2, 62);
        match nvml.gpus.next_reading(Duration::from_millis(300)) {
            Ok(Some(reading)) => {
                assert_eq!((reading.source.as_str(), &reading.part), ("xid", &parts[2].id));
                break;
            }
            _ => assert!(began.elapsed() < SOON, "no event after the loss"),
        }
    }
}

#[test]
fn a_gpu_that_hangs_while_it_is_registered_for_events_does_not_delay_the_others() {
    let mut state = State::h100(3);
    let hanging = state.gpus[1].uuid.clone();
    state.faults.push(Fault::hang("nvmlDeviceRegisterEvents").of_gpu(hanging.as_str()));
    let end = Instant::now() + SOON;
    loop {
        let nvml = with_deadline(&state, DEADLINE);
        let parts = nvml.scan().parts;
        let began = Instant::now();
        nvml.xid(2, 62);
        let reading = nvml.next();
        let took = began.elapsed();
        assert_eq!((reading.source.as_str(), &reading.part), ("xid", &parts[2].id));
        nvml.change(|state| state.faults.clear());
        // The hang takes a deadline. A GPU that is left out then would be registered after the next wait for
        // events, of 5 s. On a busy machine any GPU may be as late.
        if took < DEADLINE + Duration::from_millis(4500) {
            break;
        }
        assert!(Instant::now() < end, "{took:?}");
    }
}

#[test]
fn without_events_health_is_polled_and_that_is_reported() {
    let mut state = State::h100(1);
    state.faults.push(Fault::fail("nvmlEventSetCreate", Code::NoPermission));
    let nvml = opened(&state);
    assert!(nvml.scan().scan_errors.is_empty());
    let began = Instant::now();
    loop {
        match nvml.gpus.next_reading(Duration::from_millis(20)) {
            Err(error) => {
                assert!(error.what.contains("health is polled"), "{error}");
                break;
            }
            Ok(_) => assert!(began.elapsed() < SOON),
        }
    }
    nvml.change(|state| state.faults.clear());
    let began = Instant::now();
    while nvml.gpus.next_reading(Duration::from_millis(20)).is_err() {
        assert!(began.elapsed() < SOON, "events never work again");
    }
    nvml.xid(0, 79);
    assert_eq!(nvml.next().code, 79);
}

#[test]
fn an_unloaded_driver_is_opened_again() {
    let nvml = opened(&State::h100(2));
    let before = nvml.scan();
    nvml.change(|state| {
        state.faults.push(Fault::fail("nvmlDeviceGetCount_v2", Code::Uninitialized));
    });
    let during = nvml.scan();
    assert_eq!((&during.parts, during.scan_errors.len()), (&before.parts, 2));
    assert!(
        during.scan_errors.values().all(|error| error.reason.contains("nvidia-smi")),
        "{:?}",
        during.scan_errors
    );
    assert!(nvml.gpus.next_reading(Duration::ZERO).is_err());
    nvml.change(|state| state.faults.clear());
    assert_eq!(nvml.scan(), before);
    nvml.xid(1, 48);
    assert_eq!(nvml.next().code, 48);
}

#[test]
fn a_broken_library_is_reported_with_advice() {
    let folder = tempfile::tempdir().expect("a folder");
    let refusal = |library: &Path| {
        let opened = NvmlGpus::open(options(library, folder.path()));
        opened.err().expect("it does not open").what
    };
    let missing = refusal(&folder.path().join("none.so"));
    assert!(missing.contains("--nvml-library"), "{missing}");
    let mut state = State::h100(1);
    for (code, says) in [
        (Code::DriverNotLoaded, "modprobe nvidia"),
        (Code::LibRmVersionMismatch, "reboot the node"),
        (Code::NoPermission, "/dev/nvidiactl"),
        (Code::Unknown, "nvidia-smi"),
    ] {
        state.faults = vec![Fault::fail("nvmlInit*", code)];
        let installed = Installed::new(folder.path(), &state).expect("it is built");
        let reported = refusal(installed.library());
        assert!(reported.contains(says), "{reported}");
    }
}

/// NVML does not support the memory of the GPU (GB10, DGX Spark).
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1482
/// Report: https://github.com/NVIDIA/gpu-operator/issues/1794
#[test]
fn a_gpu_whose_memory_cannot_be_read_is_listed() {
    // Under MIG without the right to it, and on models that share the processor's memory; drivers before 510 have only
    // the first form of the call.
    for (fault, memory_mib) in [
        (Fault::fail("nvmlDeviceGetMemoryInfo*", Code::NoPermission), 0),
        (Fault::fail("nvmlDeviceGetMemoryInfo*", Code::NotSupported), 0),
        (Fault::fail("nvmlDeviceGetMemoryInfo_v2", Code::FunctionNotFound), 81_559),
    ] {
        let mut state = State::h100(2);
        state.gpus[1].run(4711, 1024);
        let uuid = state.gpus[1].uuid.clone();
        state.faults.push(fault.of_gpu(uuid.clone()));
        let nvml = opened(&state);
        let found = nvml.scan();
        assert_eq!(found.scan_errors.len(), 0, "{:?}", found.scan_errors);
        let part = found.parts.iter().find(|part| part.id.as_str() == uuid).expect("it is listed");
        assert_eq!(part.memory_mib, memory_mib);
        assert_eq!(found.usage[&part.id].processes, 1, "its processes are counted");
    }
    let mut state = State::h100(1);
    state.gpus[0].memory_total_mib = None;
    assert_eq!(opened(&state).scan().parts[0].memory_mib, 0);
}

#[test]
fn a_link_that_is_not_supported_does_not_end_the_count() {
    let mut state = State::h100(2);
    for gpu in &mut state.gpus {
        gpu.nvlinks[3] = None;
    }
    let found = opened(&state).scan();
    let link = found.links.iter().next().expect("they are linked").2;
    assert_eq!(link.nvlinks, 17);
}

#[test]
fn failed_rows_stay_known_while_mig_hides_them() {
    let nvml = opened(&State::h100(1));
    nvml.change(|state| state.gpus[0].remapped_rows.as_mut().expect("an H100 has them").failed = true);
    let failed = nvml.scan().signs;
    assert_eq!((failed.len(), failed[0].code), (1, ROWS_FAILED));
    nvml.change(|state| state.split(0, &[3, 3]));
    let split = nvml.scan();
    assert_eq!((split.parts.len(), split.signs), (3, failed));
    nvml.change(|state| {
        state.gpus[0].mig.as_mut().expect("it is split").enabled = false;
        state.gpus[0].remapped_rows.as_mut().expect("an H100 has them").failed = false;
    });
    assert_eq!(nvml.scan().signs, [], "read again");
}

#[test]
fn an_event_of_a_gpu_instance_alone_names_its_mig_instances() {
    let mut state = State::h100(2);
    state.split(1, &[3, 3]);
    let nvml = opened(&state);
    let parts = nvml.scan().parts;
    let instance = parts.iter().filter(|part| part.mig.is_some()).nth(1).expect("two instances");
    let gpu_instance = instance.mig.as_ref().map(|mig| mig.gpu_instance);
    nvml.change(|state| {
        let uuid = state.gpus[1].uuid.clone();
        state.push_xid(&uuid, 94);
        state.events.last_mut().expect("an event").gpu_instance = gpu_instance;
    });
    let reading = nvml.next();
    assert_eq!((&reading.part, reading.code), (&instance.id, 94));
}

#[test]
fn a_driver_whose_waits_return_at_once_costs_no_processor() {
    let mut state = State::h100(1);
    (state.supported_events, state.empty_wait_at_once) = (Some(0), true);
    let nvml = opened(&state);
    nvml.scan();
    // Processor time of the threads that collect events, ticks of 10 ms. Those of other tests sleep between two scans.
    let times = || -> BTreeMap<std::path::PathBuf, u64> {
        let tasks = std::fs::read_dir("/proc/self/task").expect("procfs").flatten().map(|task| task.path());
        let ticks = |task: &Path| {
            let stat = std::fs::read_to_string(task.join("stat")).ok()?;
            let (name, fields) = stat.split_once('(')?.1.rsplit_once(") ")?;
            let time = fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
            (name == "nvml-events").then_some(time)
        };
        tasks.filter_map(|task| Some((task.clone(), ticks(&task)?))).collect()
    };
    let before = times();
    std::thread::sleep(Duration::from_secs(3));
    let used = times().into_iter().filter_map(|(task, after)| Some(after - before.get(&task)?));
    assert!(used.max().unwrap_or(0) < 60, "a thread was busy for three seconds");
}

#[test]
fn links_that_come_up_after_the_driver_are_found() {
    let mut state = State::h100(2);
    for link in state.gpus.iter_mut().flat_map(|gpu| gpu.nvlinks.iter_mut().flatten()) {
        link.active = false;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let installed = Installed::new(folder.path(), &state).expect("the fake is built");
    let interval = Duration::from_millis(200);
    let options = NvmlOptions { links_interval: interval, ..options(installed.library(), folder.path()) };
    let gpus = NvmlGpus::open(options).expect("it opens");
    let links = || gpus.scan().expect("a scan").links.iter().next().expect("a path").2.nvlinks;
    assert_eq!(links(), 0, "the fabric is not up yet");
    let up = |state: &mut State| {
        for link in state.gpus.iter_mut().flat_map(|gpu| gpu.nvlinks.iter_mut().flatten()) {
            link.active = true;
        }
    };
    installed.change(up).expect("a change");
    std::thread::sleep(interval);
    assert_eq!(links(), 18);
}

#[test]
fn the_load_is_read_where_the_gpu_reports_it_and_its_failures_make_no_gpu_unhealthy() {
    let mut state = State::h100(3);
    let (unsupported, failing) = (state.gpus[1].uuid.clone(), state.gpus[2].uuid.clone());
    state.gpus[0].utilization_gpu = 42;
    state.gpus[0].temperature_c = 61;
    state.gpus[0].power_mw = 350_499;
    state.gpus[0].processes =
        vec![Process { utilization: Some(30), ..Process::new(7, 100) }, Process::new(8, 100)];
    for call in
        ["nvmlDeviceGetPowerUsage", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetProcessUtilization"]
    {
        state.faults.push(Fault::fail(call, Code::NotSupported).of_gpu(unsupported.as_str()));
        state.faults.push(Fault::fail(call, Code::Unknown).of_gpu(failing.as_str()));
    }
    state.faults.push(Fault::fail("nvmlDeviceGetTemperature", Code::NoPermission).of_gpu(failing.as_str()));
    let nvml = opened(&state);
    // A busy machine may be too slow for the loads of one scan, or for all values of one load.
    let are_complete = |inventory: &Inventory| {
        let load = |at: usize| inventory.loads.get(&inventory.parts[at].gpu);
        inventory.loads.len() == 3
            && load(0).is_some_and(|load| load.processes_percent.is_some())
            && load(1).is_some_and(|load| load.temperature_celsius.is_some())
    };
    let inventory = nvml.scan_until("scanned with its loads", are_complete);
    assert!(inventory.scan_errors.is_empty(), "{:?}", inventory.scan_errors);
    let load = |inventory: &Inventory, at: usize| inventory.loads[&inventory.parts[at].gpu].clone();
    let full = load(&inventory, 0);
    assert_eq!(
        (full.utilization_percent, full.temperature_celsius, full.power_watts),
        (Some(42), Some(61), Some(350))
    );
    assert_eq!(full.processes_percent, Some(BTreeMap::from([(7, 30)])));
    assert_eq!(load(&inventory, 1), Load { temperature_celsius: Some(32), ..Load::default() });
    assert_eq!(load(&inventory, 2), Load::default());
    nvml.change(|state| {
        (state.gpus[0].utilization_gpu, state.gpus[0].temperature_c) = (43, 62);
        state.gpus[0].processes.clear();
    });
    let moved = load(&nvml.scan_until("scanned with its loads", are_complete), 0);
    assert_eq!((moved.utilization_percent, moved.temperature_celsius), (Some(43), Some(62)));
    assert_eq!(moved.processes_percent, Some(BTreeMap::new()), "no process used the GPU");
}

#[test]
fn a_load_that_is_slow_to_read_leaves_out_the_loads_after_it_and_no_facts() {
    let mut state = State::h100(3);
    let slow = state.gpus[1].uuid.clone();
    state.faults.push(Fault::hang("nvmlDeviceGetPowerUsage").of_gpu(slow.as_str()));
    let began = Instant::now();
    let (nvml, inventory) = loop {
        let nvml = with_deadline(&state, DEADLINE);
        nvml.scan();
        let inventory = nvml.scan();
        // A GPU that is being registered for events at that moment has no load, and a busy machine may be too
        // slow for the facts.
        let is_read = inventory.usage.len() == 3 && inventory.loads.keys().eq([&inventory.parts[0].gpu]);
        if is_read || began.elapsed() > SOON {
            break (nvml, inventory);
        }
        nvml.change(|state| state.faults.clear());
    };
    assert_eq!((inventory.parts.len(), inventory.usage.len(), inventory.scan_errors.len()), (3, 3, 0));
    let known: Vec<_> = inventory.loads.keys().collect();
    assert_eq!(known, [&inventory.parts[0].gpu]);
    nvml.change(|state| state.faults.clear());
    let all = nvml.scan_until("read again", |inventory| inventory.loads.len() == 3);
    assert!(all.scan_errors.is_empty());
}
