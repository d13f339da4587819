//! The steps of a history.

use crate::hardware::triage::Severity;

#[derive(Clone, Debug)]
pub(super) enum Op {
    /// A pod requests free devices of a resource that are listed healthy, for its init container or its app container.
    /// It may have the name of a pod that has stopped.
    Start {
        resource: usize,
        count: usize,
        pick: usize,
        init: bool,
    },
    /// The app container of a pod requests what its init container holds.
    StartMain {
        which: usize,
    },
    /// A pod without devices starts under the name of a pod that has stopped.
    StartWithoutGpu {
        which: usize,
    },
    /// The kubelet gives the devices of a running pod to another pod, too (kubernetes#137534).
    StartOnHeld {
        which: usize,
    },
    /// The kubelet requests the devices of a running pod again.
    Reissue {
        which: usize,
    },
    /// A pod ends.
    Stop {
        which: usize,
    },
    /// An Allocate for an arbitrary device.
    ArbitraryAllocate {
        resource: usize,
        device: usize,
    },
    /// A policy of the stack denies Allocates for a device that is listed healthy, or fails.
    Deny {
        resource: usize,
        device: usize,
        times: usize,
        fails: bool,
    },
    /// A client other than the kubelet requests the same devices several times.
    ForeignClient {
        which: usize,
        times: usize,
    },
    Reconcile {
        list: bool,
        checkpoint: bool,
        fresh: bool,
    },
    RestartKubelet,
    Wait {
        ms: u64,
    },
    Cordon(usize),
    /// An order to drain, with or without eviction.
    Drain(usize, bool),
    StopDrain(usize),
    MarkHealthy(usize),
    /// An order to grant a GPU through DRA, or through the device plugin API.
    SetVia {
        gpu: usize,
        dra: bool,
    },
    /// The API server has shown that nothing is allocated through the former API of a GPU.
    FinishMove(usize),
    Uncordon(usize),
    /// An XID that Berth's own rules or a policy of the stack judges.
    Xid {
        gpu: usize,
        code: u64,
        again_s: Option<u32>,
        by_policy: bool,
        severity: Severity,
    },
    /// An inventory scan that shows these parts.
    Scan {
        mask: usize,
    },
    Forget(usize),
    Offer {
        shape: usize,
    },
    /// The daemon is killed and restarts; in between, another plugin may have granted a GPU.
    Crash {
        foreign: Option<usize>,
    },
    /// An operator ends an allocation.
    End {
        which: usize,
    },
    /// An operator activates a stack with this number of entries.
    Activate {
        entries: usize,
    },
    /// A source shows its view of all pods.
    Pods(PodsUpdate),
    /// The kubelet writes its pods' status to the API server.
    WriteStatus,
    /// A pod's object is deleted: that of a finished pod, or that of any pod by force.
    Delete {
        which: usize,
        force: bool,
    },
    /// The kubelet's checkpoint loses the devices of a running pod.
    LoseFromCheckpoint {
        which: usize,
    },
    /// A pod is evicted from a GPU.
    Evict {
        which: usize,
        outcome: usize,
    },
    /// A check of the CDI specification that found names for these parts.
    NameParts {
        mask: usize,
    },
    /// A pod ends for the kubelet, and its containers go on.
    Linger {
        which: usize,
    },
    /// Containers that went on end.
    EndLingering,
    /// The guard sends what the container runtime shows.
    Runtime(RuntimeUpdate),
    /// The kubelet prepares a claim with devices of a resource, each for a request of its own, or a prepared one again.
    Prepare {
        which: usize,
        resource: usize,
        device: usize,
        count: usize,
    },
    /// The API server shows that a claim, prepared or not, is reserved for this many pods.
    ReserveClaim {
        which: usize,
        pods: usize,
    },
    /// The kubelet unprepares a claim.
    Unprepare {
        which: usize,
    },
    /// An inventory scan that shows the processes on the GPUs.
    ScanProcesses {
        host: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RuntimeUpdate {
    /// All containers but those at these positions, which have exited in their sandboxes.
    Whole { exited: usize },
    /// The guard has lost the runtime, or the daemon the guard.
    Away,
    /// The guard has been started again, and shows all containers.
    GuardRestarted,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PodsUpdate {
    List,
    Watch,
    Silent,
    TooMany,
    /// The kubelet's Pods API.
    KubeletApi,
    /// A repeated earlier view.
    Repeated,
}
