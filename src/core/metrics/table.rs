//! Every family of numbers, in one table: its name, its labels, and what it says. What is written at a
//! scrape takes all of that from here, and `deploy/METRICS.md` is this table as a page.
//!
//! Names after the conventions of Prometheus: base units, `_total` on what only grows, `_info` on facts.

/// What kind of number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, from 0 at the daemon's start.
    Counter,
    /// Comes and goes.
    Gauge,
    /// How long things took.
    Histogram,
    /// Facts in labels; its value is always 1.
    Info,
}

impl Kind {
    /// As OpenMetrics writes it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
            Self::Info => "info",
        }
    }
}

/// One family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// As a query names it, a histogram without `_bucket`, `_sum` and `_count`.
    pub name: &'static str,
    /// What kind.
    pub kind: Kind,
    /// Its labels, in order.
    pub labels: &'static [&'static str],
    /// What it says, and which values its labels have.
    pub help: &'static str,
}

const fn family(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
) -> Family {
    Family { name, kind, labels, help }
}

const fn counter(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    family(name, Kind::Counter, labels, help)
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    family(name, Kind::Gauge, labels, help)
}

const fn histogram(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    family(name, Kind::Histogram, labels, help)
}

const fn info(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Family {
    family(name, Kind::Info, labels, help)
}

macro_rules! families {
    ($($group:literal { $($name:ident = $family:expr;)+ })+) => {
        $($(pub(super) const $name: Family = $family;)+)+

        /// All of them, by what they are about, in the order of a scrape.
        pub const GROUPS: &[(&str, &[Family])] = &[$(($group, &[$($name),+])),+];
    };
}

families! {
    "The daemon" {
        BUILD = info("berth_build_info", &["version"], "Which berth this is.");
        NVIDIA = info("berth_nvidia_info", &["driver_version", "cuda_version"],
            "NVIDIA's driver on this node, and the newest CUDA that it serves; empty where it is not known.");
        READY = gauge("berth_ready", &["check"],
            "Result of each check of /readyz, 1 if it passes: gpus, adoption, store, mig, policies, kubelet, evidence.");
        LIVE = gauge("berth_live", &["check"],
            "What /livez is held against, 1 if it is well: keeper, policies, looks, kubelet, streams.");
        NOTED = gauge("berth_check_noted", &["check"],
            "1 while a check of /readyz has words to say, whether it fails or not: those of berth_ready, and labels and tls where they are configured.");
    }
    "GPUs" {
        GPU = info("berth_gpu_info", &["gpu", "uuid", "model", "pci_bus", "compute_capability"],
            "A GPU: its index, UUID and product name.");
        GPU_PRESENT = gauge("berth_gpu_present", &["gpu", "uuid"], "1 if the last look at the node found it.");
        GPU_CAPACITY = gauge("berth_gpu_memory_capacity_bytes", &["gpu", "uuid"], "Memory that it has.");
        GPU_USED = gauge("berth_gpu_memory_used_bytes", &["gpu", "uuid"],
            "Memory in use, by whomever; absent where it cannot be read.");
        GPU_PROCESSES = gauge("berth_gpu_processes", &["gpu", "uuid"],
            "Processes on it, those of its MIG instances among them; absent where they cannot be seen.");
        GPU_BYPASSES = gauge("berth_gpu_bypasses", &["gpu", "uuid"],
            "Processes on it that no allocation explains.");
        GPU_HEALTH = gauge("berth_gpu_health", &["gpu", "uuid", "state"],
            "1 for the state that it is in: healthy, degraded, unhealthy, vanished.");
        GPU_DRAIN = gauge("berth_gpu_drain", &["gpu", "uuid", "state"],
            "1 for the state that it is in: active, cordoned, draining, drained.");
        HEALTH_CHANGES = counter("berth_gpu_health_changes_total", &["state"],
            "Turns of GPUs to another state of health, by the state that they turned to.");
        XIDS = counter("berth_gpu_xids_total", &["gpu", "uuid", "code"],
            "XIDs that GPUs reported, whatever policies made of them. The first 256 pairs of a GPU and a code are counted each, the rest under code other.");
        LOOKS = counter("berth_gpu_looks_total", &["outcome"],
            "Looks at all GPUs: answered, or failed as a whole.");
        LOOK_TIME = histogram("berth_gpu_look_duration_seconds", &[], "How long a look at all GPUs takes.");
        LOOKED = gauge("berth_gpu_look_timestamp_seconds", &[],
            "When the last look that was answered ended, seconds since 1970; absent before the second one.");
    }
    "Drain" {
        DRAIN_HOLDERS = gauge("berth_gpu_drain_holders", &["gpu", "uuid"],
            "Pods that still hold something of a GPU that is drained.");
        DRAIN_BLOCKERS = gauge("berth_gpu_drain_blockers", &["gpu", "uuid"],
            "Those of them that do not leave: static pods, pods that a disruption budget keeps or that could not be asked.");
        DRAIN_SINCE = gauge("berth_gpu_drain_since_timestamp_seconds", &["gpu", "uuid"],
            "Since when a GPU is cordoned, draining or drained, seconds since 1970.");
        DRAIN_DEADLINE = gauge("berth_gpu_drain_deadline_timestamp_seconds", &["gpu", "uuid"],
            "By when a GPU that is drained is to be empty, seconds since 1970; absent without a deadline.");
    }
    "Devices and allocations" {
        DEVICES = gauge("berth_devices", &["resource", "state"],
            "Devices that the kubelet is shown: free (to be had now), held, withdrawn (free but not to be had now), retiring (of an older offer, on their way out).");
        ALLOCATIONS = gauge("berth_allocations", &["resource", "gpu", "uuid"],
            "Live allocations that hold something of a GPU. One that spans several GPUs counts on each.");
        GRANTED = counter("berth_allocations_granted_total", &["resource", "how"],
            "Allocations that began: granted, or adopted from what pods held already.");
        ENDED = counter("berth_allocations_ended_total", &["resource", "reason"],
            "Allocations that ended: released, neverStarted, podGone, superseded, operator.");
        REFUSALS = counter("berth_allocate_refusals_total", &["kind"],
            "Allocate calls of the kubelet that were not granted, by why; each is a pod that failed.");
        ON_HOLD = gauge("berth_allocations_on_hold", &[],
            "1 while no allocation ends, since the sources contradict each other.");
        STUCK = gauge("berth_allocations_stuck", &[],
            "Live allocations that cannot end at present, because a source cannot be read or the sources contradict each other; the check evidence of /readyz says why.");
    }
    "The ledger and its store" {
        GENERATION = gauge("berth_ledger_generation", &[], "Grows by one with each change of the ledger.");
        QUEUE = gauge("berth_keeper_queue_length", &["inbox"],
            "What waits for the ledger's one writer: of the kubelet (at most 64), of others (at most 256).");
        TURN_TIME = histogram("berth_keeper_turn_duration_seconds", &[],
            "How long the ledger's writer takes for one command, with its append.");
        APPEND_TIME = histogram("berth_store_append_duration_seconds", &[],
            "How long it takes until a change is durable.");
        APPEND_FAILURES = counter("berth_store_append_failures_total", &[], "Appends that the disk did not take.");
        STORE_SIZE = gauge("berth_store_size_bytes", &[],
            "Files of the allocation store, looked at every 10 s at most; absent where that is not known.");
        STORE_TROUBLE = gauge("berth_store_trouble", &[], "1 while the store cannot be used; nothing is granted then.");
    }
    "Policies" {
        REVISION = gauge("berth_stack_revision", &[], "Counts activations of stacks of policies.");
        DECISIONS = counter("berth_decisions_total", &["hook", "outcome"],
            "Questions to the stack, by what came of them: offered, placed, granted, denied, refused, triaged.");
        POLICY_CALLS = counter("berth_policy_calls_total", &["policy", "digest", "hook", "outcome"],
            "Calls of policies of the active stack: answer, pass, fault. Trials and shadows do not count.");
        POLICY_FAULTS = counter("berth_policy_faults_total", &["policy", "digest", "hook", "kind"],
            "Calls that failed: fuel, time, memory, trap, answer, parameters, missing.");
        POLICY_TIME = histogram("berth_policy_call_duration_seconds", &["policy", "digest", "hook"],
            "Wall time of calls of policies.");
        POLICY_SUSPENDED = gauge("berth_policy_suspended", &["policy", "digest"],
            "1 if a policy of the active stack is no longer asked, after faults in a row.");
        JOURNAL_KEPT = gauge("berth_journal_kept", &[], "Decisions on the record; absent, as all of the record, without one.");
        JOURNAL_BYTES = gauge("berth_journal_bytes", &[], "Room that the record takes.");
        JOURNAL_DROPPED = counter("berth_journal_dropped_total", &[],
            "Decisions that left the record for want of room or by their age.");
        JOURNAL_LOST = counter("berth_journal_lost_total", &[],
            "Decisions that were never put down: too many at once, or the disk failed.");
    }
    "The kubelet" {
        REGISTRATION = gauge("berth_kubelet_registration", &["resource", "state"],
            "1 for the state that a resource is in: waiting (for a kubelet), registering, registered, contested (by another plugin).");
        REGISTERS = counter("berth_kubelet_registrations_total", &["outcome"],
            "Registrations: registered, or refused by the kubelet.");
        STREAMS = gauge("berth_list_and_watch_streams", &["resource"],
            "Streams on which a kubelet watches the devices of a resource; one each where all is well.");
        GRPC_CALLS = counter("berth_grpc_calls_total", &["method", "code"],
            "Calls of the device plugin API that ended, by gRPC's status code. A ListAndWatch counts when it begins.");
        GRPC_TIME = histogram("berth_grpc_call_duration_seconds", &["method"],
            "How long these calls took, but for ListAndWatch, which lasts as long as the kubelet.");
        ROUNDS = counter("berth_rounds_total", &["outcome"],
            "Looks at the kubelet's accounts of who holds what: applied (all of it was seen), partial (List or the checkpoint could not be read), failed.");
        ROUND_TIME = histogram("berth_round_duration_seconds", &[], "How long such a look takes.");
    }
    "The admin API" {
        HTTP_REQUESTS = counter("berth_http_requests_total", &["route", "method", "status"],
            "Answers, by the route's template, method and status: 2xx, 3xx, 4xx, 5xx.");
        HTTP_TIME = histogram("berth_http_request_duration_seconds", &["route", "method"],
            "How long it took until the head of an answer was ready; streams go on after it.");
    }
    "Traces" {
        TRACE_SPANS = counter("berth_trace_spans_total", &["outcome"],
            "Spans of traces: exported, failed (the collector could not be reached or refused them), dropped (too many waited).");
    }
    "The process" {
        CPU = counter("process_cpu_seconds_total", &[], "Processor time of user and system.");
        OPEN_FDS = gauge("process_open_fds", &[], "File descriptors that are open.");
        MAX_FDS = gauge("process_max_fds", &[], "File descriptors that may be open; absent where there is no limit.");
        RESIDENT = gauge("process_resident_memory_bytes", &[], "Memory that is resident.");
        VIRTUAL = gauge("process_virtual_memory_bytes", &[], "Memory that is mapped.");
        STARTED = gauge("process_start_time_seconds", &[], "When the process started, seconds since 1970.");
    }
}

/// The table as the page `deploy/METRICS.md`.
#[must_use]
pub fn page() -> String {
    let mut page = String::from(PAGE_HEAD);
    for (group, families) in GROUPS {
        page.push_str(&format!("\n## {group}\n\n| name | type | labels | |\n|---|---|---|---|\n"));
        for family in *families {
            let labels: Vec<String> = family.labels.iter().map(|label| format!("`{label}`")).collect();
            let (name, kind, help) = (family.name, family.kind.as_str(), family.help);
            page.push_str(&format!("| `{name}` | {kind} | {} | {help} |\n", labels.join(", ")));
        }
    }
    page
}

const PAGE_HEAD: &str = "\
# The numbers of `/metrics`

OpenMetrics text for Prometheus. This page is made from the table in `src/core/metrics/table.rs`, and a test holds the two equal
(`BERTH_WRITE_PAGES=1 cargo test --test it the_page_of_metrics` writes it). Counters begin at 0 with the daemon. A
histogram `x` is queried as `x_bucket`, `x_sum` and `x_count`.

Label values are bounded: at most 64 GPUs are shown, 64 resources, 32 versions of policies, 256 pairs of a GPU and an XID,
and as many routes as the API has. Pods and namespaces are never labels. `gpu` is NVML's index, `uuid` the GPU's.
";
