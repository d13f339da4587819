//! What a device plugin did that would hurt a real kubelet or its pods.

use std::time::Duration;

/// One thing that no well-behaved plugin does. A test of a plugin ends with
/// `assert_eq!(kubelet.anomalies(), [])`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Anomaly {
    /// Register came while a `ListAndWatch` stream of that resource still lived:
    /// the old stream's end will disconnect the new client.
    RegisteredOverLiveStream {
        /// The resource that registered.
        resource: String,
    },
    /// Register came after the old connection closed and before the kubelet's
    /// manager was told: the new endpoint will be stopped by name.
    RegisteredWhileDisconnecting {
        /// The resource that registered.
        resource: String,
    },
    /// An id left the list while an Allocate named it. The kubelet looks the id
    /// up after the call and would have crashed.
    WouldCrashInFlight {
        /// The resource of the list.
        resource: String,
        /// The id that left.
        id: String,
    },
    /// An id that a live pod holds is not in the list. The kubelet's topology
    /// hints look it up after a restart and would crash.
    WouldCrashHeld {
        /// The resource of the list.
        resource: String,
        /// The id that left.
        id: String,
        /// The pod that holds it.
        pod_uid: String,
    },
    /// The first device list came too late after the stream was opened.
    LateList {
        /// The resource of the stream.
        resource: String,
        /// How long the kubelet had waited when it noticed.
        waited: Duration,
    },
    /// The same id twice in one list.
    DoubledId {
        /// The resource of the list.
        resource: String,
        /// The id.
        id: String,
    },
    /// An id over 63 characters.
    LongId {
        /// The resource of the list.
        resource: String,
        /// The id.
        id: String,
    },
    /// A health that is neither "Healthy" nor "Unhealthy".
    UnknownHealth {
        /// The resource of the list.
        resource: String,
        /// What the list said.
        health: String,
    },
    /// A NUMA node below zero: a device without one must carry no topology.
    NegativeNumaNode {
        /// The resource of the list.
        resource: String,
        /// The id.
        id: String,
    },
    /// An Allocate answer without a container response.
    EmptyAllocateResponse {
        /// The resource that was asked.
        resource: String,
    },
}
