//! Who processes are on this node.

use crate::config::Config;
use crate::kernel::process::Sight;
use crate::ports::Processes as _;
use crate::procfs::ProcFs;

/// As the configuration says.
#[must_use]
pub fn processes(config: &Config) -> ProcFs {
    ProcFs::new(config.processes.proc_root.clone(), &config.processes.ignore)
}

/// How far a daemon that is started here could tell whose processes are.
#[must_use]
pub fn sight(config: &Config) -> Sight {
    processes(config).sight()
}
