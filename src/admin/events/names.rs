//! GPUs, holders and devices as events name them.

use berth_kernel::allocation::Allocation;
use berth_kernel::drain::Mark;
use berth_kernel::ledger::Ledger;
use berth_kernel::names::PartId;

/// `GPU 3`; a GPU of which nothing is known any more goes by its UUID.
pub(super) fn gpu_name(ledger: &Ledger, gpu: &PartId) -> String {
    let known = ledger.part(gpu).or_else(|| {
        let mut parts = ledger.parts.values().map(AsRef::as_ref);
        parts.find(|part| part.part.gpu() == gpu)
    });
    known.map_or_else(|| gpu.to_string(), |part| format!("GPU {}", part.part.gpu_index))
}

/// ` by alice (new fan)`.
pub(super) fn by(mark: &Mark) -> String {
    if mark.why.is_empty() { format!(" by {}", mark.by) } else { format!(" by {} ({})", mark.by, mark.why) }
}

/// `namespace/pod/container`, as far as it is known.
pub(super) fn holder(allocation: &Allocation) -> String {
    let holder = &allocation.holder;
    if holder.is_unknown() {
        return "somebody who is not known yet".into();
    }
    let words = [&holder.namespace, &holder.pod, &holder.container];
    let words: Vec<_> = words.iter().map(|word| word.as_deref().unwrap_or("?")).collect();
    words.join("/")
}

/// `2 x nvidia.com/gpu of default/trainer-0/main`.
pub(super) fn devices(allocation: &Allocation) -> String {
    let what = format!("{} x {}", allocation.devices.len(), allocation.resource);
    if allocation.holder.is_unknown() { what } else { format!("{what} of {}", holder(allocation)) }
}
