//! `sim:FILE`: simulated GPUs that follow a file.

use crate::support::files::replace;
use crate::support::wait::SOON;
use berth_gpus::sim::SimGpus;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::node::ports::Gpus;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn file(text: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("machine.yaml");
    fs::write(&path, text).expect("a file");
    (folder, path)
}

fn open(path: &Path) -> SimGpus {
    SimGpus::open(path.to_str().expect("UTF-8")).expect("it opens")
}

fn next(gpus: &SimGpus) -> Reading {
    let reading = gpus.next_reading(SOON).expect("events work");
    reading.expect("a reading")
}

#[test]
fn the_file_is_followed() {
    let (_folder, path) = file("model: h100\ncount: 4\n");
    let gpus = open(&path);
    let before = gpus.scan().expect("a scan");
    assert_eq!(before.parts.len(), 4);
    replace(
        &path,
        "model: h100\ncount: 6\ngpus: [{index: 1, lost: true}, {index: 2, processes: 3, memoryUsedMiB: 99}]\n",
    );
    let after = gpus.scan().expect("a scan");
    assert_eq!(after.parts.len(), 6);
    assert_eq!(after.scan_errors.keys().collect::<Vec<_>>(), [&before.parts[1].gpu]);
    let usage = &after.usage[&before.parts[2].id];
    assert_eq!((usage.processes, usage.memory_used_mib), (3, Some(99)));
    assert_eq!(next(&gpus).source, "lost");
}

#[test]
fn a_new_event_in_the_file_ends_a_wait_and_an_old_one_does_not() {
    let old = "model: t4\ncount: 2\nevents:\n  - {seq: 7, gpu: 0, xid: 13}\n";
    let (_folder, path) = file(old);
    let gpus = open(&path);
    assert_eq!(gpus.next_reading(Duration::ZERO).expect("events work"), None);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let began = Instant::now();
            (next(&gpus), began.elapsed())
        });
        replace(&path, format!("{old}  - {{seq: 8, gpu: 1, xid: 79}}\n"));
        let (reading, took) = waiting.join().expect("it waits");
        assert_eq!((reading.source.as_str(), reading.code), ("xid", 79));
        assert!(took < SOON);
    });
    assert_eq!(gpus.next_reading(Duration::ZERO).expect("events work"), None);
}

#[test]
fn a_broken_file_is_reported_and_a_valid_one_is_used_again() {
    let (_folder, path) = file("model: l4\ncount: 1\n");
    let gpus = open(&path);
    for bad in ["model: l4\n", "model: l4\ncount: 99\n", "{"] {
        replace(&path, bad);
        let error = gpus.scan().expect_err("it cannot be used");
        assert!(error.what.contains("machine.yaml"), "{error}");
        assert_eq!(gpus.next_reading(Duration::ZERO).expect("events work"), None);
    }
    fs::remove_file(&path).expect("it was there");
    assert!(gpus.scan().is_err());
    replace(&path, "model: l4\ncount: 2\n");
    assert_eq!(gpus.scan().expect("a scan").parts.len(), 2);
}

#[test]
fn invalid_simulations_are_refused_with_advice() {
    for spec in ["8xk80", "99xh100", "/nowhere/machine.yaml", "nonsense"] {
        let refusal = SimGpus::open(spec).err().expect("it is refused").what;
        assert!(refusal.contains(spec) && refusal.contains("sim:8xh100"), "{refusal}");
    }
}
