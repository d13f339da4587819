//! The guard: a plugin of the container runtime (NRI), in a process of its own, which sees each container of the node
//! before its first instruction runs; and the daemon's connection to it.
//!
//! ```text
//!   berth guard                                            berth serve
//!     frame       the bytes of the runtime's socket          daemon   what the guard shows, to the keeper
//!     session     registration, answers to its calls
//!     plugin      what a session calls
//!     containers  those that hold allocations
//!     cgroup        the cgroup of a container
//!     limiter     their memory limits
//!     suspended     a process that waits for its limits
//!     bypass      containers that can use GPUs that were not allocated to them
//!     device_filter  device nodes to which a cgroup is denied access
//!     state       what is known of all of them
//!     published   what daemons are shown of it
//!     process     puts these together  ──── link ────────────┘
//! ```

mod bypass;
mod cgroup;
mod containers;
mod daemon;
mod device_filter;
mod frame;
mod limiter;
mod link;
mod plugin;
mod process;
mod published;
mod session;
mod settings;
mod state;
mod suspended;

pub use berth_proto::nri;
pub use daemon::{GuardStatus, follow, query};
pub use device_filter::DeniedDevices;
pub use frame::FrameError;
pub use plugin::{ContainerEvent, Plugin, Refusal, RuntimeInfo};
pub use process::{GuardError, run as run_guard};
pub use session::{SessionError, run};
pub use settings::{LimitSettings, Settings};
