//! The front ends' handle to the kernel, and the thread that calls policies.
//!
//! Front ends parse requests, submit commands here, and read snapshots. Async ends here: everything below is synchronous.

mod activation;
mod baseline;
mod call_counters;
mod call_recorder;
mod call_stats;
mod decisions;
mod evaluate;
mod fault_log;
mod faults;
mod gpu_watch;
mod gpus;
mod inventory_scanner;
mod jobs;
mod kernel_handle;
mod offers;
mod policy_stats;
mod policy_thread;
mod prepare;
mod recorder;
mod replay;
mod shadow;
#[cfg(test)]
mod stack_tests;
mod trial;
mod uploads;

pub use activation::{TIME_FACTOR, Trial};
pub use baseline::Baseline;
pub use berth_kernel::command::Attempt;
pub use call_counters::{CallCounters, PolicyCounters, VERSIONS_COUNTED_MAX};
pub use call_recorder::{CallRecorder, RecordedCall};
pub use call_stats::{CallStats, LATENCY_BOUNDS_US, Latencies};
pub use decisions::DecisionsError;
pub use evaluate::{CALL_MS_MAX, Evaluation, STACK_TIME_MAX};
pub use faults::{EntryStats, FAULTS_TO_SUSPEND, Faults, PolicyStatus, PolicyStatuses};
pub use gpu_watch::GpuWatch;
pub use inventory_scanner::InventoryScanner;
pub use jobs::{ActivateError, Granted, Unprepared};
pub use kernel_handle::KernelHandle;
pub use offers::{OfferNotes, Offers};
pub use prepare::Prepared;
pub use replay::{Candidate, Report};
pub use shadow::{Counts, Difference, SHADOWS_MAX, Shadow};
pub use trial::{
    CallReport, DeviceRequest, Proposal, RequestOutcome, TRIAL_DEVICES_MAX, TrialError, TrialReport,
};
pub use uploads::{DeleteError, DeletePrecondition, ModuleChunks, Upload, UploadError};

use crate::keeper::{self, Keeper};
use berth_kernel::command::Rules;
use berth_kernel::ports::{Clock, Journal, Policies};
use crossbeam_channel::bounded;
use policy_thread::{Inboxes, Worker};
use std::cell::RefCell;
use std::sync::Arc;
use std::thread::JoinHandle;

/// Capacity of the inbox for the kubelet's jobs, as at the keeper.
const KUBELET_JOBS: usize = keeper::KUBELET_INBOX;
/// Capacity of the inbox for other jobs: at most one reading per GPU and event, 64 GPUs.
const OTHER_JOBS: usize = 64;

/// The running keeper, policy thread and recorder. They end when the last [`KernelHandle`] is dropped.
pub struct RunningCore {
    /// The front ends' handle.
    pub handle: KernelHandle,
    /// The threads, in the order in which they end.
    pub threads: Vec<JoinHandle<()>>,
}

/// Starts keeper, policy thread and recorder. Without a journal no decision is recorded.
///
/// # Errors
/// If a thread cannot be started.
pub fn start(
    keeper: Keeper,
    policies: Arc<dyn Policies>,
    clock: Arc<dyn Clock>,
    rules: Rules,
    baseline: Baseline,
    journal: Option<Arc<dyn Journal>>,
) -> std::io::Result<RunningCore> {
    let (nudge, nudges) = bounded(1);
    let running = keeper::spawn(keeper, nudge)?;
    let (kubelet_jobs, kubelet) = bounded(KUBELET_JOBS);
    let (other_jobs, other) = bounded(OTHER_JOBS);
    let policy_stats = policy_stats::PolicyStats::default();
    let shadows = Arc::default();
    let recording = recorder::start(Arc::clone(&policies), journal.clone(), Arc::clone(&shadows))?;
    let worker = Worker {
        recorder: recording.recorder,
        last_offers: RefCell::default(),
        keeper: running.handle.clone(),
        policies: Arc::clone(&policies),
        clock: Arc::clone(&clock),
        baseline: baseline.clone(),
        last_signs: RefCell::default(),
        rules: rules.clone(),
        policy_stats: policy_stats.clone(),
        fault_log: RefCell::default(),
    };
    let inboxes = Inboxes { kubelet, other, nudge: nudges };
    let thread = std::thread::Builder::new().name("policy".into()).spawn(move || worker.run(&inboxes))?;
    let (rules, baseline) = (Arc::new(rules), Arc::new(baseline));
    let (files, preparing, trying) = (Arc::default(), Arc::default(), Arc::default());
    let decisions = decisions::Decisions::new(journal, recording.lost, shadows, Arc::clone(&policies));
    let kernel = KernelHandle {
        keeper: running.handle,
        kubelet_jobs,
        other_jobs,
        policies,
        clock,
        rules,
        baseline,
        policy_stats,
        trials: Arc::new(tokio::sync::Semaphore::new(trial::TRIALS)),
        files,
        preparing,
        trying,
        decisions,
    };
    Ok(RunningCore { handle: kernel, threads: vec![thread, recording.thread, running.thread] })
}
