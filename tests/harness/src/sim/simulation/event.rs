//! Everything that can happen in a run. An event carries numbers, never names of things that an
//! earlier event made: any event can be dropped from a run and the rest still means something.

use serde::{Deserialize, Serialize};

/// One thing that happens. `which` and `pick` choose among what there is, modulo how many.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
pub(crate) enum Event {
    /// Time passes, milliseconds; then the keeper ticks.
    Wait {
        ms: u64,
    },
    /// The wall clock jumps, milliseconds.
    ClockJump {
        ms: i64,
    },
    /// A pod is admitted: its first container requests devices that the kubelet considers free.
    Start {
        resource: u32,
        count: u32,
        pick: u32,
        fate: Fate,
        stale: bool,
        init: bool,
    },
    /// The app container of a pod whose init container holds devices requests the same ones.
    App {
        which: u32,
        subset: bool,
    },
    /// The kubelet repeats an Allocate for the devices that a container holds.
    Reissue {
        which: u32,
        stale: bool,
    },
    /// The kubelet writes down a grant that it was slow with.
    Record,
    /// A pod ends.
    Stop {
        which: u32,
    },
    /// An Allocate that no kubelet would send.
    Odd {
        resource: u32,
        part: u32,
        share: u32,
        twice: bool,
    },
    /// A client that is not a kubelet requests, several times, the devices of a container, or a device of a part.
    Foreign {
        which: u32,
        held: bool,
        times: u32,
    },
    /// One Allocate names two containers of a pod.
    Pair {
        resource: u32,
        count: u32,
        pick: u32,
    },
    /// A pod has the name of one that has ended: the next one that requests devices, or one without devices that starts
    /// now.
    Successor {
        which: u32,
        devices: bool,
    },
    /// The kubelet gives what a container holds to another pod, too (kubernetes#137534).
    Twice {
        which: u32,
    },
    /// From now on one of the kubelet's accounts is lost so, or none.
    Evidence {
        lost: Option<Lost>,
    },
    /// The kubelet reads the newest device lists.
    Stream,
    KubeletStops,
    /// It starts again from its checkpoint; `ready` is whether it knows all its pods at once.
    KubeletStarts {
        ready: bool,
    },
    /// It has heard of all its pods.
    KubeletReady,
    /// A whole reconcile pass, submitted at once.
    Round(Look),
    /// A reconcile pass begins and calls `List`.
    RoundBegins {
        list: bool,
    },
    /// It reads the checkpoint; its view waits to be submitted.
    RoundReads {
        write: bool,
        read: bool,
    },
    /// One of the waiting views is submitted, and once more later if `keep`.
    RoundArrives {
        which: u32,
        keep: bool,
    },
    /// Reads both sources without making the kubelet write.
    Glance {
        list: bool,
        read: bool,
    },
    /// The kubelet's checkpoint is lost with what one living pod holds by its books.
    KubeletForgets {
        which: u32,
    },
    /// The kubelet writes the status of its pods to the API server.
    Status,
    /// The guard sends what the container runtime shows.
    Containers(Containers),
    /// Another program changes a memory limit.
    LimitDrifts {
        which: u32,
        to_mib: Option<u64>,
    },
    /// A pod ends for the kubelet, and its containers go on.
    LeaveContainers {
        which: u32,
    },
    /// The containers that went on end.
    EndLeftContainers,
    /// The object of a pod that ended goes, or by force that of any.
    DeletePod {
        which: u32,
        force: bool,
    },
    /// The source of all pods by UID shows them; the view is submitted now, or later.
    Pods {
        how: Showing,
        later: bool,
    },
    /// One of the waiting views is submitted, and once more later if `keep`.
    PodsArrive {
        which: u32,
        keep: bool,
    },
    /// A pod is evicted from a GPU that is being drained.
    Evict {
        which: u32,
        refusal: u32,
        stale: bool,
    },
    /// The outcome is submitted, and once more later if `keep`.
    EvictAnswered {
        keep: bool,
    },
    /// A process of the host comes to a GPU, or goes.
    HostProcess {
        part: u32,
        on: bool,
    },
    /// A GPU begins or stops to list its processes.
    Tells {
        part: u32,
        on: bool,
    },
    /// A pod ends and its processes do not, or what was left behind goes.
    LeaveBehind {
        which: u32,
    },
    /// A GPU or MIG instance is no longer there.
    Vanish {
        part: u32,
    },
    Return {
        part: u32,
    },
    /// A GPU is there but does not work, or works again.
    Trouble {
        part: u32,
        on: bool,
    },
    /// The driver of all GPUs is in this state.
    Driver(Driver),
    /// A scan of the GPUs, submitted at once.
    GpuLook,
    /// A scan of the GPUs whose result waits.
    GpuLookBegins,
    /// One of the waiting scans is submitted, however old.
    GpuLookArrives {
        which: u32,
        keep: bool,
    },
    /// An event of a GPU.
    Xid {
        part: u32,
        code: u32,
    },
    Cordon {
        gpu: u32,
        why: bool,
    },
    Uncordon {
        gpu: u32,
    },
    /// An operator has a GPU emptied, or calls that off, or says that it works.
    Drain {
        gpu: u32,
        evict: bool,
        deadline: bool,
    },
    StopDrain {
        gpu: u32,
    },
    Heal {
        gpu: u32,
    },
    Forget {
        gpu: u32,
    },
    /// An operator ends an allocation.
    End {
        which: u32,
    },
    /// A scheduler allocates published devices to a claim, and the kubelet has it prepared.
    Claim {
        count: u32,
        pick: u32,
        contested: bool,
        stale: bool,
    },
    /// The kubelet has a claim prepared again, for one more pod if `more`.
    PrepareAgain {
        which: u32,
        more: bool,
        stale: bool,
    },
    /// The kubelet has a claim unprepared.
    Unprepare {
        which: u32,
    },
    /// An operator orders that a GPU is granted by claims, or by the device plugin API.
    Via {
        gpu: u32,
        dra: bool,
    },
    /// The API server shows that nothing is allocated through a GPU's former API any more.
    FinishMove {
        gpu: u32,
    },
    /// A policy version is uploaded.
    Upload {
        policy: u32,
    },
    Delete {
        policy: u32,
    },
    /// A stack is activated: its policies, in the order of their calls.
    Activate {
        policies: Vec<StackLine>,
        expected: bool,
    },
    /// From now on a policy behaves so.
    Mood {
        policy: u32,
        mood: Mood,
    },
    /// The stack is evaluated for offers.
    Offer,
    /// From now on the disk behaves so.
    Disk {
        fault: Option<DiskFault>,
    },
    /// The process dies at a moment.
    Crash {
        at: CrashAt,
    },
    /// A daemon that is down starts.
    DaemonStarts,
}

/// The state of the driver of all GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Driver {
    Ready,
    /// A call hangs, or the GPUs have just been started.
    Hung,
    /// An operator released it.
    Released,
    /// The GPUs wait for their NVLink fabric.
    Fabric,
    /// It was unloaded or replaced.
    Replaced,
}

/// What the kubelet does with a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Fate {
    /// Writes it down and runs the pod.
    Runs,
    /// Writes it down later.
    Slow,
    /// Never writes it down: another resource of the container failed.
    Dropped,
    /// Writes it down, and fails the pod for another reason.
    Failed,
}

/// How the guard shows the containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
pub(crate) enum Containers {
    /// All but those at these positions, which have exited in their sandbox.
    Whole { exited: u64 },
    /// The guard has lost the runtime, or the daemon the guard.
    Away,
    /// The guard has started again, and shows all of them.
    GuardRestarted,
}

/// How a source shows the pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Showing {
    /// The API server answers a list.
    List,
    /// Its watch resumes.
    Watch,
    /// It is not heard any more.
    Silent,
    /// It has more pods than are taken.
    TooMany,
    /// The kubelet's Pods API shows its own.
    KubeletPods,
    /// That is not heard any more.
    KubeletSilent,
}

/// How one of the kubelet's accounts is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Lost {
    /// `List` does not answer.
    List,
    /// The checkpoint cannot be read.
    Checkpoint,
    /// It can be read, and is not written any more.
    Stale,
}

/// How much of a round works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Look {
    /// `List` answers.
    pub(crate) list: bool,
    /// The kubelet rewrites its checkpoint in time.
    pub(crate) write: bool,
    /// The checkpoint can be read.
    pub(crate) read: bool,
}

/// One entry of a stack to activate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct StackLine {
    pub(crate) policy: u32,
    /// Which of a few sets of permissions.
    pub(crate) permissions: u32,
    pub(crate) deny_on_fault: bool,
}

/// How a policy behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Mood {
    #[default]
    Honest,
    Pass,
    Deny,
    Trap,
    Fuel,
    Time,
    Memory,
    Missing,
    /// One of many answers outside what is permitted.
    Lie(u32),
}

/// How the disk fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum DiskFault {
    /// Appends fail and nothing is written.
    BeforeWrite,
    /// Appends fail, but what they wrote is there after all.
    AfterWrite,
    /// Neither appends nor reads work.
    Gone,
}

/// When the process dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum CrashAt {
    Now,
    /// In the next append, before anything is written.
    BeforeAppend,
    /// In the next append, when all is written and not yet answered.
    AfterAppend,
    /// In the next reading of the store.
    Load,
}
