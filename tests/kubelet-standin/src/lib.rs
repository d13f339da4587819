//! A stand-in kubelet.
//!
//! It behaves towards a device plugin as kubelet 1.36 does, defects included:
//! device lists that replace each other, a disconnect keyed by resource name,
//! a checkpoint that goes stale, a `List` that purges. It uses a folder of its
//! own (`device-plugins/`, `pod-resources/`), needs no root and no container
//! runtime, and never starts a container: a pod is only what the kubelet's
//! device manager and its pod resources API store about it.
//!
//! Not included: the scheduler, CPU and memory managers, the plugin watcher, DRA,
//! and the kubelet's check of node resources before admission. So a pod that
//! requests too much fails in the device manager.
//!
//! ```text
//!   Kubelet ── NodeState      kept across kubelet restarts: pods, faults, counters, anomalies
//!      └────── KubeletState   one kubelet process: sockets, clients, device manager
//! ```

mod admission;
mod anomalies;
mod calls;
mod checkpoint;
mod client;
mod container;
mod devices;
mod faults;
mod go_client;
mod inspect;
mod kubelet;
mod kubelet_state;
mod node_state;
mod plugin;
mod pod_lifecycle;
mod pod_resources;
mod pods;
mod pods_api;
mod process;
mod registration;
mod rng;
mod select;
mod wait;

pub use admission::AdmissionError;
pub use anomalies::Anomaly;
pub use calls::{CallStats, Rpc};
pub use checkpoint::{CHECKPOINT_FILE, CheckpointMode};
pub use container::ContainerView;
pub use faults::Faults;
pub use kubelet::{Kubelet, Options, Sources};
pub use plugin::TinyPlugin;
pub use pods::{ContainerSpec, Phase, Pod, PodSpec};
pub use wait::TimedOut;

pub use berth_proto as proto;

/// The health of a device that may be allocated.
pub const HEALTHY: &str = "Healthy";
/// The health of a device that may not be allocated.
pub const UNHEALTHY: &str = "Unhealthy";
/// The only version that the kubelet's registration accepts.
pub const API_VERSION: &str = "v1beta1";
