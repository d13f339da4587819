//! One look: at the GPUs, and at who is on them.

use berth_kernel::gpu::Inventory;
use berth_kernel::ports::{Gpus, GpusError, Processes};
use berth_kernel::process::{Owner, Unseen, Who};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Puts what the GPUs tell and what the node knows of their processes together. Cheap to clone.
#[derive(Clone)]
pub struct Looker {
    gpus: Arc<dyn Gpus>,
    processes: Arc<dyn Processes>,
    health_checks: bool,
}

impl Looker {
    /// Looks through both.
    #[must_use]
    pub fn new(gpus: Arc<dyn Gpus>, processes: Arc<dyn Processes>) -> Self {
        Self { gpus, processes, health_checks: true }
    }

    /// Whether failing calls, signs and events count against a GPU. Without, only one that is gone is not
    /// granted.
    #[must_use]
    pub fn with_health_checks(self, health_checks: bool) -> Self {
        Self { health_checks, ..self }
    }

    /// See [`Self::with_health_checks`].
    #[must_use]
    pub fn has_health_checks(&self) -> bool {
        self.health_checks
    }

    /// The GPUs alone.
    #[must_use]
    pub fn gpus(&self) -> &Arc<dyn Gpus> {
        &self.gpus
    }

    /// One look, processes known by who they are. Blocks, as [`Gpus::look`] does.
    ///
    /// A process may end between the two answers and its id be given to another: then one look is wrong
    /// about it, and the next one, which finds another start or no such process, puts it right. Nothing
    /// is told of a process before several looks have found the same one.
    ///
    /// # Errors
    /// If the GPUs cannot be asked.
    pub fn look(&self) -> Result<Inventory, GpusError> {
        let mut inventory = self.gpus.look()?;
        if !self.health_checks {
            inventory.troubles.clear();
            inventory.signs.clear();
        }
        let pids: BTreeSet<u32> = inventory.processes.values().flatten().map(|p| p.pid).collect();
        inventory.sight = self.processes.sight();
        let known = self.processes.who(&pids);
        for process in inventory.processes.values_mut().flatten() {
            let unknown = || Who { owner: Owner::Unknown(Unseen::NotAsked), ..Who::default() };
            process.who = known.get(&process.pid).cloned().unwrap_or_else(unknown);
        }
        Ok(inventory)
    }
}
