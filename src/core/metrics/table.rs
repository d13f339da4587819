//! The table of all metric families: name, labels and help text. Scrapes read it, and `deploy/METRICS.md` is generated
//! from it.
//!
//! Names follow the conventions of Prometheus: base units, `_total` for counters, `_info` for facts.

/// Type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number that only grows, from 0 at the daemon's start.
    Counter,
    /// A number that rises and falls.
    Gauge,
    /// A distribution of durations.
    Histogram,
    /// Facts in labels; the value is always 1.
    Info,
}

impl Kind {
    /// The type's name in OpenMetrics.
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

/// One metric family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Family {
    /// Name in queries; of a histogram, without `_bucket`, `_sum` and `_count`.
    pub name: &'static str,
    /// Type.
    pub kind: Kind,
    /// Labels, in order.
    pub labels: &'static [&'static str],
    /// Help text, with the labels' values.
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

        /// All families by group, in the order of a scrape.
        pub const GROUPS: &[(&str, &[Family])] = &[$(($group, &[$($name),+])),+];
    };
}

families! {
    "The daemon" {
        BUILD = info("berth_build_info", &["version"], "Version of berth.");
        NVIDIA = info("berth_nvidia_info", &["driver_version", "cuda_version"],
            "Version of NVIDIA's driver on this node, and of the newest CUDA that it supports; empty if unknown.");
        READY = gauge("berth_ready", &["check"],
            "Result of each check of /readyz, 1 if it passes: gpus, adoption, store, mig, policies, kubelet, evidence.");
        LIVE = gauge("berth_live", &["check"],
            "Result of each check of /livez, 1 if it passes: keeper, policies, scans, kubelet, streams.");
        CHECK_WARNINGS = gauge("berth_check_warning", &["check"],
            "1 while a check of /readyz has a message, even if it passes: the checks of berth_ready, and configuration, labels and tls if configured.");
        FILE_REFUSED = gauge("berth_configuration_refused", &[],
            "1 while the configuration file as it is now is refused, so that the settings before it stay in use; absent without a file.");
        FILE_STACK_OVERRIDDEN = gauge("berth_file_stack_overridden", &[],
            "1 while a stack of the API or of the node's GPUNode is in use instead of the configuration file's; absent without a file.");
    }
    "GPUs" {
        GPU = info("berth_gpu_info", &["gpu", "uuid", "model", "pci_bus", "compute_capability"],
            "A GPU: its index, UUID and product name.");
        GPUS_UNIDENTIFIED = gauge("berth_gpus_unidentified", &[],
            "GPUs that the driver has and whose UUID is not known, such as one that fell off the bus before the start. No other family has them.");
        GPU_PRESENT = gauge("berth_gpu_present", &["gpu", "uuid"], "1 if the last GPU scan found it.");
        GPU_CAPACITY = gauge("berth_gpu_memory_capacity_bytes", &["gpu", "uuid"], "Memory of the GPU.");
        GPU_USED = gauge("berth_gpu_memory_used_bytes", &["gpu", "uuid"],
            "Memory in use, by any process; absent if it cannot be read.");
        GPU_UTILIZATION = gauge("berth_gpu_utilization_ratio", &["gpu", "uuid"],
            "Share of the time in which a kernel ran on the GPU, 0 to 1; absent if the last scan could not read it, as in MIG mode.");
        GPU_TEMPERATURE = gauge("berth_gpu_temperature_celsius", &["gpu", "uuid"],
            "Temperature of the GPU; absent if the last scan could not read it.");
        GPU_POWER = gauge("berth_gpu_power_watts", &["gpu", "uuid"],
            "Power that the GPU draws; absent if the last scan could not read it.");
        GPU_PROCESSES = gauge("berth_gpu_processes", &["gpu", "uuid"],
            "Processes on the GPU, including its MIG instances; absent if they cannot be read.");
        GPU_BYPASSES = gauge("berth_gpu_bypasses", &["gpu", "uuid"],
            "Processes on the GPU without an allocation.");
        GPU_HEALTH = gauge("berth_gpu_health", &["gpu", "uuid", "state"],
            "1 for the GPU's health state: healthy, degraded, unhealthy, vanished.");
        GPU_DRAIN = gauge("berth_gpu_drain", &["gpu", "uuid", "state"],
            "1 for the GPU's drain state: active, cordoned, draining, drained.");
        HEALTH_CHANGES = counter("berth_gpu_health_changes_total", &["state"],
            "Changes of GPU health, by new state.");
        XIDS = counter("berth_gpu_xids_total", &["gpu", "uuid", "code"],
            "XIDs that GPUs reported, however judged by policies. Beyond 256 pairs of GPU and code, they are counted under code other.");
        SCANS = counter("berth_gpu_scans_total", &["outcome"],
            "Scans of all GPUs: answered, or failed as a whole.");
        SCAN_TIME = histogram("berth_gpu_scan_duration_seconds", &[], "Duration of a scan of all GPUs.");
        LAST_SCAN = gauge("berth_gpu_scan_timestamp_seconds", &[],
            "End of the last successful scan, seconds since 1970; absent before the second one.");
    }
    "Drain" {
        DRAIN_HOLDERS = gauge("berth_gpu_drain_holders", &["gpu", "uuid"],
            "Pods that still hold a part of a GPU that is being drained.");
        DRAIN_BLOCKERS = gauge("berth_gpu_drain_blockers", &["gpu", "uuid"],
            "Those of them that cannot be evicted: static pods, pods protected by a disruption budget, and pods whose eviction failed.");
        DRAIN_SINCE = gauge("berth_gpu_drain_since_timestamp_seconds", &["gpu", "uuid"],
            "Time since which a GPU is cordoned, draining or drained, seconds since 1970.");
        DRAIN_DEADLINE = gauge("berth_gpu_drain_deadline_timestamp_seconds", &["gpu", "uuid"],
            "Deadline of a GPU's drain, seconds since 1970; absent without a deadline.");
    }
    "Devices and allocations" {
        DEVICES = gauge("berth_devices", &["resource", "state"],
            "Devices that the kubelet is sent: free, held, withdrawn (free, but not grantable now), retiring (of an older offer).");
        ALLOCATIONS = gauge("berth_allocations", &["resource", "gpu", "uuid"],
            "Live allocations that hold a part of a GPU. An allocation that spans several GPUs counts on each.");
        GRANTED = counter("berth_allocations_granted_total", &["resource", "how"],
            "New allocations: granted, or adopted from devices that pods already held.");
        ENDED = counter("berth_allocations_ended_total", &["resource", "reason"],
            "Allocations that ended: released, neverStarted, podGone, superseded, operator.");
        REFUSALS = counter("berth_allocate_refusals_total", &["kind"],
            "Allocate calls of the kubelet that were not granted, by reason; each is a pod that failed.");
        ON_HOLD = gauge("berth_allocations_on_hold", &[],
            "1 while allocations do not end because the sources contradict each other.");
        STUCK = gauge("berth_allocations_stuck", &[],
            "Live allocations that cannot end now, as a source cannot be read or sources contradict each other; /readyz has the reason.");
    }
    "The guard" {
        GUARD_CONNECTED = gauge("berth_guard_connected", &[],
            "1 while the guard shows the containers of the node; absent if none has connected and no setting needs one.");
        LIMITS = gauge("berth_memory_limits", &["state"],
            "Memory limits of containers: pending, set, late, failed, and stale (set, and not read back for a minute).");
        BYPASS_CONTAINERS = gauge("berth_bypass_containers", &["outcome"],
            "Containers that could use GPUs that were not allocated to them, by the guard's outcome: failed, stripped, denied.");
        LIMIT_USED = gauge("berth_memory_limit_used_bytes", &["gpu", "uuid"],
            "GPU memory that containers with limits use, as the driver counts it against the limits.");
    }
    "The ledger and its store" {
        GENERATION = gauge("berth_ledger_generation", &[], "Number of changes of the ledger.");
        QUEUE = gauge("berth_keeper_queue_length", &["inbox"],
            "Commands that wait for the ledger's single writer: kubelet (at most 64), other (at most 256).");
        TURN_TIME = histogram("berth_keeper_turn_duration_seconds", &[],
            "Duration of one command in the ledger's writer, including the append.");
        APPEND_TIME = histogram("berth_store_append_duration_seconds", &[],
            "Duration until a change is durable.");
        APPEND_FAILURES = counter("berth_store_append_failures_total", &[], "Appends that failed.");
        STORE_SIZE = gauge("berth_store_size_bytes", &[],
            "Size of the allocation store's files, read every 10 s at most; absent if unknown.");
        STORE_FAILED = gauge("berth_store_failed", &[], "1 while the store cannot be used; nothing is granted then.");
    }
    "Policies" {
        REVISION = gauge("berth_stack_revision", &[], "Number of activations of policy stacks.");
        DECISIONS = counter("berth_decisions_total", &["hook", "outcome"],
            "Decisions of the stack by outcome: offered, placed, granted, denied, refused, triaged.");
        POLICY_CALLS = counter("berth_policy_calls_total", &["policy", "digest", "hook", "outcome"],
            "Policy calls of the active stack: answer, pass, fault. Trials and shadows are not counted.");
        POLICY_FAULTS = counter("berth_policy_faults_total", &["policy", "digest", "hook", "kind"],
            "Policy calls that failed: fuel, time, memory, trap, answer, parameters, missing.");
        POLICY_TIME = histogram("berth_policy_call_duration_seconds", &["policy", "digest", "hook"],
            "Wall time of policy calls.");
        POLICY_SUSPENDED = gauge("berth_policy_suspended", &["policy", "digest"],
            "1 if a policy of the active stack is suspended after several faults in a row, and no longer called.");
        JOURNAL_KEPT = gauge("berth_journal_kept", &[],
            "Decisions in the journal; absent, like all journal metrics, if there is no journal.");
        JOURNAL_BYTES = gauge("berth_journal_bytes", &[], "Size of the journal.");
        JOURNAL_DROPPED = counter("berth_journal_dropped_total", &[],
            "Decisions removed from the journal because of its size limit or their age.");
        JOURNAL_LOST = counter("berth_journal_lost_total", &[],
            "Decisions that were not recorded: too many at once, or the disk failed.");
    }
    "The kubelet" {
        REGISTRATION = gauge("berth_kubelet_registration", &["resource", "state"],
            "1 for the state of the registration: waiting (for a kubelet), registering, registered, contested (by another plugin).");
        REGISTERS = counter("berth_kubelet_registrations_total", &["outcome"],
            "Attempts to register: registered; refused (by the kubelet); denied (a permission), unreachable (no process answers on kubelet.sock), notWatched (no ListAndWatch followed).");
        STREAMS = gauge("berth_list_and_watch_streams", &["resource"],
            "Streams on which a kubelet watches the devices of a resource; normally one each.");
        GRPC_CALLS = counter("berth_grpc_calls_total", &["method", "code"],
            "Calls of the device plugin API and the DRA API that ended, by gRPC status code. A ListAndWatch counts when it begins; FAILED_PRECONDITION: NodePrepareResources did not prepare all of its claims.");
        GRPC_TIME = histogram("berth_grpc_call_duration_seconds", &["method"],
            "Duration of these calls, except ListAndWatch, which lasts as long as the kubelet.");
        PASSES = counter("berth_reconcile_passes_total", &["outcome"],
            "Reconcile passes over the kubelet's reports: applied (all were read), partial (List or checkpoint unreadable), failed.");
        PASS_TIME = histogram("berth_reconcile_duration_seconds", &[], "Duration of a reconcile pass.");
    }
    "The admin API" {
        HTTP_REQUESTS = counter("berth_http_requests_total", &["route", "method", "status"],
            "Responses by route template, method and status class: 2xx, 3xx, 4xx, 5xx.");
        HTTP_TIME = histogram("berth_http_request_duration_seconds", &["route", "method"],
            "Duration until the head of the response was ready; streams continue after it.");
    }
    "Traces" {
        TRACE_SPANS = counter("berth_trace_spans_total", &["outcome"],
            "Trace spans: exported, failed (the collector was unreachable or refused them), dropped (the queue was full).");
    }
    "The process" {
        CPU = counter("process_cpu_seconds_total", &[], "User and system CPU time.");
        OPEN_FDS = gauge("process_open_fds", &[], "Open file descriptors.");
        MAX_FDS = gauge("process_max_fds", &[], "Limit of open file descriptors; absent if there is none.");
        RESIDENT = gauge("process_resident_memory_bytes", &[], "Resident memory.");
        VIRTUAL = gauge("process_virtual_memory_bytes", &[], "Virtual memory.");
        STARTED = gauge("process_start_time_seconds", &[], "Start time of the process, seconds since 1970.");
    }
}

/// Renders the table as `deploy/METRICS.md`.
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
# Metrics of `/metrics`

OpenMetrics text for Prometheus. This page is generated from the table in `src/core/metrics/table.rs`, and a test compares the two
(`BERTH_WRITE_PAGES=1 cargo test --test it the_page_of_metrics` writes it). Counters start at 0 with the daemon. A
histogram `x` is queried as `x_bucket`, `x_sum` and `x_count`.

Label values are bounded: at most 64 GPUs, 128 resources, 32 policy versions, 256 pairs of GPU and XID,
and as many routes as the API has. Pods and namespaces are never labels. `gpu` is NVML's index, `uuid` the GPU's UUID.
";
