//! The state of a running daemon, above the kernel.
//!
//! Front ends parse requests, submit commands to [`KernelHandle`], and read snapshots. Async ends there: the single
//! writer of the ledger ([`keeper`]) and the thread that calls the policies of the stack ([`stack`]) are synchronous.
//! [`PolicyService`] uploads and activates policies; [`Lab`] tries them on recorded and live decisions.

mod beat;
mod clock;
mod driver_access;
mod gpu_watch;
mod guard_driver_use;
mod jobs;
pub mod keeper;
mod kernel_handle;
pub mod lab;
pub mod log_limit;
pub mod memory;
pub mod metrics;
pub mod policies;
mod policy_thread;
pub mod policy_transitions;
mod priority;
mod refusals;
mod release;
mod shared;
pub mod stack;
pub mod transition_log;
pub mod transition_stream;
mod wake;

pub use beat::next_beat;
pub use clock::SystemClock;
pub use driver_access::{DriverAccess, ReleaseError, ReleaseOrder};
pub use gpu_watch::{GpuWatch, InventoryScanner};
pub use guard_driver_use::{GuardDriverState, GuardDriverUse};
pub use jobs::{ActivateError, FileStack, Granted, Prepared, Reconfiguration, Unprepared};
pub use kernel_handle::KernelHandle;
pub use lab::Lab;
pub use policies::PolicyService;
pub use refusals::{REFUSALS_PER_MINUTE_MAX, RefusedRequest};
pub use release::Release;
pub use shared::Shared;

use crate::stack::Baseline;
use crate::stack::policy_stats::PolicyStats;
use berth_kernel::node::ports::{Clock, Journal, PolicyFiles, PolicyRuntime};
use crossbeam_channel::bounded;
use keeper::Keeper;
use policy_thread::{Configured, Inboxes, Worker};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Capacity of the inbox for the kubelet's jobs, as at the keeper.
const KUBELET_JOBS: usize = keeper::KUBELET_INBOX;
/// Capacity of the inbox for other jobs: at most one reading per GPU and event, 64 GPUs.
const OTHER_JOBS: usize = 64;

/// The handles to a running core. Cheap to clone.
#[derive(Clone)]
pub struct Core {
    /// Snapshots and commands.
    pub kernel: KernelHandle,
    /// Uploads and activations of policies.
    pub policies: PolicyService,
    /// Recorded decisions, and policies that are tried without effect.
    pub lab: Lab,
    /// Releases and resumes the use of the GPUs' driver.
    pub driver: DriverAccess,
}

/// The running keeper, policy thread and recorder. They end when all handles are dropped.
pub struct RunningCore {
    /// The handles.
    pub core: Core,
    /// The threads, in the order in which they end.
    pub threads: Vec<JoinHandle<()>>,
}

/// Starts keeper, policy thread and recorder. Without a journal no decision is recorded.
///
/// # Errors
/// If a thread cannot be started.
pub fn start<P: PolicyFiles + PolicyRuntime + 'static>(
    keeper: Keeper,
    policies: &Arc<P>,
    clock: Arc<dyn Clock>,
    baseline: Baseline,
    journal: Option<Arc<dyn Journal>>,
) -> std::io::Result<RunningCore> {
    let (nudge, nudges) = bounded(1);
    let running = keeper::spawn(keeper, nudge)?;
    let (kubelet_jobs, kubelet) = bounded(KUBELET_JOBS);
    let (other_jobs, other) = bounded(OTHER_JOBS);
    let (baseline, policy_stats) = (Shared::new(baseline), PolicyStats::default());
    let file_stack = Shared::new(FileStack::default());
    let runtime: Arc<dyn PolicyRuntime> = Arc::clone(policies) as _;
    let shadows = Arc::default();
    let recording = lab::recorder::start(Arc::clone(&runtime), journal.clone(), Arc::clone(&shadows))?;
    let worker = Worker::new(
        running.handle.clone(),
        recording.recorder.clone(),
        Arc::clone(&runtime),
        Arc::clone(&clock),
        Configured { baseline: baseline.clone(), file_stack: file_stack.clone() },
        policy_stats.clone(),
    );
    let inboxes = Inboxes { kubelet, other, nudge: nudges };
    let thread = std::thread::Builder::new().name("policy".into()).spawn(move || worker.run(&inboxes))?;
    let kernel = KernelHandle {
        keeper: running.handle,
        kubelet_jobs,
        other_jobs,
        recorder: recording.recorder,
        clock,
        baseline: baseline.clone(),
        policy_stats,
        gpu_history: Arc::default(),
        refusals: Arc::default(),
    };
    let files = Arc::clone(policies) as _;
    let policies = PolicyService::new(kernel.clone(), files, runtime, baseline, file_stack, shadows);
    let lab = Lab::new(policies.clone(), journal, recording.lost);
    let threads = vec![thread, recording.thread, running.thread];
    Ok(RunningCore { core: Core { kernel, policies, lab, driver: DriverAccess::default() }, threads })
}
