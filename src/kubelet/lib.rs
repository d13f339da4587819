//! Front end 1: the kubelet. The only room that speaks gRPC.
//!
//! ```text
//!   supervisor ── one plugin a listed resource:
//!      plugin        the registration's state machine
//!      socket        the unix socket
//!      connections   which connections to it are served, and which are closed
//!      device_plugin the five calls of the API
//!      board         the device list that its streams show
//!   rounds ── pod_resources, checkpoint, folder: what the kubelet can be asked or read
//!   pods_api      its pods, watched, where it shows them
//!   parse, convert, nodes, status: wire types stop here
//! ```
//!
//! What is deliberately absent: any state of its own about who holds what. It asks the middle,
//! and reads snapshots.

mod board;
mod boards;
pub mod checkpoint;
mod connections;
mod convert;
mod device_plugin;
mod disputes;
mod edits;
mod folder;
mod front;
mod nodes;
mod parse;
mod plugin;
mod pod_resources;
mod pods_api;
mod register;
mod rounds;
pub mod settings;
mod socket;
mod socket_path;
mod status;
mod supervisor;
mod wire;

pub use edits::{
    DeviceIdStrategy, DeviceListStrategy, Edits, Feature, MpsEdits, ResourceEdits, WantedDevice, WantedMount,
};
pub use front::{AdoptError, Front, Running};
pub use plugin::{Registration, Registrations};
pub use rounds::RoundError;
pub use settings::{RoundTiming, Settings, Waits};
pub use socket_path::{NoSocket, socket_metadata};
