//! Submits GPU scans and readings.

use super::jobs::OtherJob;
use super::kernel_handle::{KernelHandle, send};
use crate::counters::Versions;
use crate::keeper::{Applied, CommandError};
use berth_kernel::command::Command;
use berth_kernel::gpu::{Inventory, Reading, XID};

impl KernelHandle {
    /// Submits a scan of the GPUs, from a thread that may block.
    ///
    /// # Errors
    /// If the scan could not be recorded; changes that need no record are published all the same.
    pub fn record_scan(&self, mut inventory: Inventory) -> Result<Applied, CommandError> {
        let signs = std::mem::take(&mut inventory.signs);
        let (driver, cuda) = (inventory.driver_version.clone(), inventory.cuda_version.clone());
        self.counters().gpus.set_versions(Versions { driver, cuda });
        // The inventory first: a sign of an unknown GPU would be ignored.
        let applied = self.keeper.execute(Command::RecordScan(inventory));
        for sign in signs {
            if let Err(error) = self.submit_reading(sign) {
                tracing::warn!(%error, "a GPU reading could not be submitted; the next scan repeats it");
            }
        }
        applied
    }

    /// Submits a reading of a GPU to the policies, which judge its severity.
    ///
    /// # Errors
    /// If the policy thread's inbox is full.
    pub fn submit_reading(&self, reading: Reading) -> Result<(), CommandError> {
        if reading.source == XID {
            let snapshot = self.snapshot();
            let gpu = snapshot.part(&reading.part).map_or(&reading.part, |part| part.part.gpu());
            self.counters().gpus.xid(gpu.as_str(), reading.code);
        }
        send(&self.other_jobs, OtherJob::Triage(reading))
    }
}
