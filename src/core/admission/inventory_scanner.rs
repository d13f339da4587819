//! Scans the GPUs and resolves the owner of each process.

use berth_kernel::gpu::Inventory;
use berth_kernel::ports::{Gpus, GpusError, Processes};
use berth_kernel::process::{Owner, ProcessIdentity, UnknownReason};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Combines the GPUs' inventory with the owners of their processes. Cheap to clone.
#[derive(Clone)]
pub struct InventoryScanner {
    gpus: Arc<dyn Gpus>,
    processes: Arc<dyn Processes>,
    health_checks: bool,
}

impl InventoryScanner {
    /// A scanner of these GPUs and processes, with health checks.
    #[must_use]
    pub fn new(gpus: Arc<dyn Gpus>, processes: Arc<dyn Processes>) -> Self {
        Self { gpus, processes, health_checks: true }
    }

    /// Sets whether failing calls, signs and events make a GPU unhealthy. Without health checks only a vanished GPU is
    /// not granted.
    #[must_use]
    pub fn with_health_checks(self, health_checks: bool) -> Self {
        Self { health_checks, ..self }
    }

    /// See [`Self::with_health_checks`].
    #[must_use]
    pub fn has_health_checks(&self) -> bool {
        self.health_checks
    }

    /// The GPUs, without the owners of their processes.
    #[must_use]
    pub fn gpus(&self) -> &Arc<dyn Gpus> {
        &self.gpus
    }

    /// Scans the GPUs, and resolves the owners of their processes. Blocks, as [`Gpus::scan`] does.
    ///
    /// A process may end between the two steps, and its id may be reused: then one scan is wrong about it, and
    /// the next one, which finds another start time or no such process, corrects that. A process is reported
    /// only after several scans have found it.
    ///
    /// # Errors
    /// If the GPUs cannot be read.
    pub fn scan(&self) -> Result<Inventory, GpusError> {
        let mut inventory = self.gpus.scan()?;
        if !self.health_checks {
            inventory.scan_errors.clear();
            inventory.signs.clear();
        }
        let pids: BTreeSet<u32> = inventory.processes.values().flatten().map(|p| p.pid).collect();
        inventory.sight = self.processes.sight();
        let owners = self.processes.identify(&pids);
        for process in inventory.processes.values_mut().flatten() {
            let unknown = || ProcessIdentity {
                owner: Owner::Unknown(UnknownReason::NotLookedUp),
                ..ProcessIdentity::default()
            };
            process.identity = owners.get(&process.pid).cloned().unwrap_or_else(unknown);
        }
        Ok(inventory)
    }
}
