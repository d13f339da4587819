//! Whether devices can be passed to containers. The daemon reports it, and the ledger withholds all devices while it is
//! not possible.

use std::sync::Arc;

/// Why containers cannot get devices, or not all device nodes. Observed again after each start, so it is not stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Passing {
    /// Why no device list strategy can work on this node, with the remedy; `None` if one can. While it is set, every
    /// device is listed Unhealthy and nothing is granted.
    pub no_strategy: Option<Arc<str>>,
    /// Device nodes that containers need and that do not exist, with the remedy. Devices are granted all the same.
    pub missing_nodes: Option<Arc<str>>,
}
