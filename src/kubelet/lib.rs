//! The kubelet front end: device plugin registration, device lists, Allocate, the DRA driver, and reconciliation
//! with the kubelet's records. No other crate uses gRPC.
//!
//! ```text
//!   supervisor ── one plugin per listed resource:
//!      plugin        the registration's state machine
//!      rival         what shows another plugin for the resource
//!      socket        the unix socket
//!      connections   which connections to it are served, and which are closed
//!      device_plugin the five calls of the API
//!      device_list   the device list that its streams send
//!   dra           the DRA driver: registration, claims, CDI specifications, health
//!   reconciler ── pod_resources, checkpoint, folder: the kubelet's APIs and files
//!   pods_api      the kubelet's pods, watched where it serves them
//!   parse, convert, device_nodes, status: the only users of the wire types
//! ```
//!
//! This crate keeps no state of its own about allocations: it sends commands to the core and reads
//! its snapshots.

pub mod checkpoint;
mod connections;
mod container_ends;
mod convert;
mod device_list;
mod device_nodes;
mod device_plugin;
mod device_plugins;
mod disputes;
pub mod dra;
mod edits;
mod folder;
mod parse;
mod plugin;
mod pod_resources;
mod pods_api;
mod reconciler;
mod register;
mod rival;
pub mod settings;
mod socket;
mod socket_path;
mod status;
mod strategy;
mod supervisor;
mod timeouts;
mod wire;

pub use device_nodes::missing_nodes;
pub use device_plugins::{AdoptError, DevicePlugins, RunningPlugins};
pub use edits::{
    DeviceIdStrategy, DeviceListStrategy, Edits, Feature, HostDevice, HostMount, MpsEdits, ResourceEdits,
    device_name,
};
pub use plugin::{Registration, Registrations};
pub use reconciler::ReconcileError;
pub use settings::{CurrentEdits, ReconcileTiming, Settings};
pub use socket_path::{NoConnection, NoSocket, permission_advice, socket_metadata};
pub use strategy::{
    Cdi, DefaultRuntime, FoundSpec, Resolution, Runtime, StrategyError, StrategyFacts, resolve,
};
pub use timeouts::{
    ConnectionTimeouts, DisconnectTimeouts, FolderTimeouts, LossTimeouts, PodsApiTimeouts, ReconcileTimeouts,
    RegistrationTimeouts, Timeouts,
};
