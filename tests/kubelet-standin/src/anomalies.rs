//! Behaviour of a device plugin that would harm a real kubelet or its pods.

use std::time::Duration;

/// One defect of a plugin. A test of a plugin ends with `assert_eq!(kubelet.anomalies(), [])`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Anomaly {
    /// Register was called while a `ListAndWatch` stream of that resource was open:
    /// the old stream's end will disconnect the new client.
    RegisteredOverLiveStream {
        /// The resource that registered.
        resource: String,
    },
    /// Register was called after the old connection closed and before the kubelet's
    /// manager was notified: the new endpoint will be stopped by name.
    RegisteredWhileDisconnecting {
        /// The resource that registered.
        resource: String,
    },
    /// An id was removed from the list during its Allocate. The kubelet dereferences
    /// its entry after the call and would have crashed.
    WouldCrashInFlight {
        /// The resource of the list.
        resource: String,
        /// The missing id.
        id: String,
    },
    /// An id that an active pod holds is not in the list. The kubelet's topology
    /// hints dereference its entry after a restart and would crash.
    WouldCrashHeld {
        /// The resource of the list.
        resource: String,
        /// The missing id.
        id: String,
        /// The UID of the pod that holds it.
        pod_uid: String,
    },
    /// The first device list arrived too late after the stream was opened.
    LateList {
        /// The resource of the stream.
        resource: String,
        /// The exceeded time limit.
        waited: Duration,
    },
    /// An id that occurs twice in one list.
    DuplicateId {
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
        /// The health in the list.
        health: String,
    },
    /// A negative NUMA node: a device without one must have no topology.
    NegativeNumaNode {
        /// The resource of the list.
        resource: String,
        /// The id.
        id: String,
    },
    /// An Allocate response without a container response.
    EmptyAllocateResponse {
        /// The resource of the call.
        resource: String,
    },
}
