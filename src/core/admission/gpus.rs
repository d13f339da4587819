//! What is handed in of the GPUs, and what the baseline makes of them.

use super::thread::OtherJob;
use super::{Door, send};
use crate::figures::Versions;
use crate::keeper::{Applied, AskError};
use berth_kernel::command::Command;
use berth_kernel::gpu::{Inventory, Reading, XID};

impl Door {
    /// Hands in a look at the GPUs, from a thread that may block.
    ///
    /// # Errors
    /// If it could not be recorded; what needs no record is published all the same.
    pub fn looked(&self, mut inventory: Inventory) -> Result<Applied, AskError> {
        let signs = std::mem::take(&mut inventory.signs);
        let (driver, cuda) = (inventory.driver_version.clone(), inventory.cuda_version.clone());
        self.figures().gpus.set_versions(Versions { driver, cuda });
        // First what is there: a sign of a GPU that nobody knows yet would mean nothing.
        let applied = self.keeper.ask(Command::Look(inventory));
        for sign in signs {
            if let Err(error) = self.read(sign) {
                tracing::warn!(%error, "an event or reading of a GPU could not be recorded; it is tried again at the next scan");
            }
        }
        applied
    }

    /// Hands in a reading of a GPU; the policies say what it means.
    ///
    /// # Errors
    /// If too many wait already.
    pub fn read(&self, reading: Reading) -> Result<(), AskError> {
        if reading.source == XID {
            let snapshot = self.snapshot();
            let gpu = snapshot.part(&reading.part).map_or(&reading.part, |part| part.part.gpu());
            self.figures().gpus.xid(gpu.as_str(), reading.code);
        }
        send(&self.other_jobs, OtherJob::Triage(reading))
    }
}
