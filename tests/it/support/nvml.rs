//! The GPUs of the fake NVML, read as the daemon reads them.

use crate::support::wait::SOON;
use berth_gpus::nvml::{NvmlGpus, NvmlOptions};
use berth_kernel::hardware::gpu::{Inventory, Reading};
use berth_kernel::node::ports::Gpus as _;
use fake_nvml::{Installed, State};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The fake NVML and an open backend over it.
pub(crate) struct FakeNvml {
    pub(crate) gpus: NvmlGpus,
    pub(crate) installed: Installed,
    pub(crate) folder: TempDir,
}

impl FakeNvml {
    /// `change` changes the options of the backend, which has no short deadline otherwise.
    pub(crate) fn new(state: &State, change: impl FnOnce(NvmlOptions) -> NvmlOptions) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let installed = Installed::new(folder.path(), state).unwrap();
        let options = NvmlOptions {
            library: Some(installed.library().to_owned()),
            sysfs: folder.path().to_owned(),
            deadline: SOON,
            ..NvmlOptions::default()
        };
        let gpus = NvmlGpus::open(change(options)).unwrap();
        Self { gpus, installed, folder }
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        self.installed.change(change).unwrap()
    }

    /// Adds an event with this XID of a GPU.
    pub(crate) fn xid(&self, gpu: usize, xid: u64) {
        self.change(|state| {
            let uuid = state.gpus[gpu].uuid.clone();
            state.push_xid(&uuid, xid);
        });
    }

    pub(crate) fn scan(&self) -> Inventory {
        let began = Instant::now();
        loop {
            let scan = self.gpus.scan();
            assert!(began.elapsed() < SOON, "a scan took {:?}", began.elapsed());
            match scan {
                Ok(inventory) => return inventory,
                // On a busy machine the first count of the GPUs may exceed a short deadline.
                Err(error) => assert!(error.what.contains("does not answer"), "{error}"),
            }
        }
    }

    /// Scans until `holds` is true of the inventory.
    pub(crate) fn scan_until(&self, what: &str, holds: impl Fn(&Inventory) -> bool) -> Inventory {
        let began = Instant::now();
        loop {
            let inventory = self.scan();
            if holds(&inventory) {
                return inventory;
            }
            assert!(began.elapsed() < SOON, "never {what}: {inventory:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Waits for the next reading.
    pub(crate) fn next(&self) -> Reading {
        let began = Instant::now();
        while began.elapsed() < SOON {
            if let Ok(Some(reading)) = self.gpus.next_reading(Duration::from_millis(100)) {
                return reading;
            }
        }
        panic!("no reading");
    }
}
