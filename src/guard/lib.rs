//! The connection to the container runtime's Node Resource Interface (NRI), by which a plugin sees each container of the
//! node before its first instruction runs.
//!
//! `frame` cuts the bytes of the socket into messages of ttrpc, `session` registers and answers the runtime's calls.
//! What the guard does with a container is the [`Plugin`] that the session calls.

mod frame;
mod plugin;
mod session;

pub use berth_proto::nri;
pub use frame::FrameError;
pub use plugin::{ContainerEvent, Plugin, Refusal, RuntimeInfo};
pub use session::{SessionError, run};
