//! When each device was last healthy, held and named, by the true time: whether it may leave the list (I10).

use super::violation::Violation;
use berth_kernel::ids::names::{DeviceId, Resource};
use berth_kernel::ids::time::Timing;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::listing::listing;
use berth_kernel::sharing::via::KubeletApi;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    /// Last time that the list showed it Healthy, or an allocation of the device plugin API held it.
    busy_ms: u64,
    /// Last time that an Allocate naming it was answered with success.
    named_ms: Option<u64>,
}

/// The marks of all listed devices, and of those that have left the list: they may come back, as those of a GPU that is moved to
/// the device plugin API again.
#[derive(Debug, Default)]
pub(crate) struct Marks(BTreeMap<(Resource, DeviceId), Mark>, BTreeMap<(Resource, DeviceId), Mark>);

impl Marks {
    /// An Allocate naming these was answered with success.
    pub(crate) fn named(&mut self, resource: &Resource, devices: &[DeviceId], true_ms: u64) {
        for id in devices {
            self.0.entry((resource.clone(), id.clone())).or_default().named_ms = Some(true_ms);
        }
    }

    /// Takes down what is listed now, and checks what left since the last time.
    pub(crate) fn look(&mut self, ledger: &Ledger, timing: &Timing, true_ms: u64) -> Result<(), Violation> {
        let mut still = BTreeMap::new();
        for resource in ledger.resources() {
            for listed in listing(ledger, &resource) {
                let holders = ledger.holders_of(&resource, &listed.id).iter();
                let mut apis = holders.filter_map(|id| ledger.live.get(id)).map(|holder| holder.origin.api());
                // The kubelet knows nothing of what a claim holds.
                let held = apis.any(|api| api == KubeletApi::DevicePlugin);
                let key = (resource.clone(), listed.id);
                // What was never seen before becomes known as unhealthy from now on.
                let known = self.0.remove(&key).or_else(|| self.1.remove(&key));
                let mut mark = known.unwrap_or(Mark { busy_ms: true_ms, named_ms: None });
                if held || listed.healthy {
                    mark.busy_ms = true_ms;
                }
                still.insert(key, mark);
            }
        }
        let left = std::mem::replace(&mut self.0, still);
        for ((resource, id), mark) in left {
            if true_ms < mark.busy_ms + timing.retire_ms {
                let ms = true_ms - mark.busy_ms;
                let what = format!("{id} of {resource} left the list {ms} ms after it was Healthy or held");
                return Err(Violation::new("I10", what));
            }
            if let Some(ms) = mark.named_ms.map(|at| true_ms - at).filter(|ms| *ms < timing.allocate_grace_ms)
            {
                let what = format!("{id} of {resource} left the list {ms} ms after an Allocate named it");
                return Err(Violation::new("I10", what));
            }
            self.1.insert((resource, id), mark);
        }
        Ok(())
    }
}
