//! The keeper's inboxes and its thread.

use super::{CommandError, CommandResult, Keeper, Snapshot, StoreFailure};
use berth_kernel::node::command::Command;
use berth_kernel::node::steps::{Step, pass};
use berth_observe::counters::Counters;
use berth_observe::spans;
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, select_biased};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tracing::Span;

/// Capacity of the kubelet's inbox: it calls the device plugin serially, so one command per resource
/// ([`berth_kernel::sharing::offer::RESOURCES_MAX`] = 64). Claims beyond it are tried again.
pub const KUBELET_INBOX: usize = 64;
/// Capacity of the other inbox: a turn takes well under a millisecond with a disk of 0.2 ms, so a
/// full inbox is a fraction of a second of work. A full inbox refuses instead of waiting.
pub const OTHER_INBOX: usize = 256;
/// Least time between two [`Command::Tick`]s, and between a change of the ledger and the tick that finds out what time
/// changes next.
const TICK_MIN: Duration = Duration::from_secs(1);
/// Longest time between two ticks, so that `/livez` knows that the thread runs.
const TICK_MAX: Duration = Duration::from_secs(10);

pub(super) struct Request {
    pub(super) command: Command,
    pub(super) reply: oneshot::Sender<CommandResult>,
    /// The span of the submitter.
    pub(super) span: Span,
}

/// A handle to the keeper's thread. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    kubelet: Sender<Request>,
    other: Sender<Request>,
    snapshots: watch::Receiver<Snapshot>,
    store_failure: StoreFailure,
    counters: Arc<Counters>,
}

impl Handle {
    /// The newest snapshot.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        Arc::clone(&self.snapshots.borrow())
    }

    /// A receiver that wakes at each new snapshot.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Snapshot> {
        self.snapshots.clone()
    }

    /// Error of the store, if it failed.
    #[must_use]
    pub fn store_trouble(&self) -> Option<String> {
        self.store_failure.lock().clone()
    }

    /// Counters and heartbeats since the daemon started.
    #[must_use]
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Number of commands in the kubelet's inbox and in the other one.
    #[must_use]
    pub fn queue_lengths(&self) -> (usize, usize) {
        (self.kubelet.len(), self.other.len())
    }

    /// Puts a command into an inbox: the kubelet's for its own calls, else the other one.
    ///
    /// # Errors
    /// [`CommandError::Busy`] if the inbox is full, [`CommandError::Stopping`] if the keeper has ended.
    pub fn submit(&self, command: Command) -> Result<oneshot::Receiver<CommandResult>, CommandError> {
        let inbox = if is_of_kubelet(&command) { &self.kubelet } else { &self.other };
        let (reply, answer) = oneshot::channel();
        match inbox.try_send(Request { command, reply, span: spans::current() }) {
            Ok(()) => Ok(answer),
            Err(TrySendError::Full(_)) => Err(CommandError::Busy),
            Err(TrySendError::Disconnected(_)) => Err(CommandError::Stopping),
        }
    }

    /// Submits a command and waits for the answer, from a thread that may block.
    ///
    /// # Errors
    /// As [`Keeper::turn`] and [`Handle::submit`].
    pub fn execute(&self, command: Command) -> CommandResult {
        self.submit(command)?.blocking_recv().unwrap_or(Err(CommandError::Stopping))
    }
}

/// The running keeper. Dropping its last [`Handle`] ends the thread after its current turn.
pub struct Running {
    /// The handle to it.
    pub handle: Handle,
    /// The watcher's thread; ends after the keeper, which ends when all handles are dropped.
    pub thread: JoinHandle<()>,
}

/// The receiving ends of a keeper's channels. A keeper that takes over receives from the same ones.
#[derive(Clone)]
pub(super) struct Inboxes {
    pub(super) kubelet: Receiver<Request>,
    pub(super) other: Receiver<Request>,
    pub(super) nudge: Sender<()>,
}

/// Starts the keeper's thread, and the one that watches over its calls of the store. The keeper signals each
/// publication on `nudge`, without waiting.
///
/// # Errors
/// If a thread cannot be started.
pub fn spawn(keeper: Keeper, nudge: Sender<()>) -> std::io::Result<Running> {
    let (kubelet, kubelet_requests) = bounded(KUBELET_INBOX);
    let (other, other_requests) = bounded(OTHER_INBOX);
    let snapshots = keeper.publisher.subscribe();
    let store_failure = Arc::clone(&keeper.store_failure);
    let counters = Arc::clone(&keeper.counters);
    // The heartbeat starts before the first turn.
    drop(counters.keeper.heartbeat.begin());
    let inboxes = Inboxes { kubelet: kubelet_requests, other: other_requests, nudge };
    let successor = keeper.successor();
    let first = start(keeper, &inboxes)?;
    let thread = std::thread::Builder::new()
        .name("keeper-watch".into())
        .spawn(move || watch(&successor, &inboxes, first))?;
    Ok(Running { handle: Handle { kubelet, other, snapshots, store_failure, counters }, thread })
}

fn start(keeper: Keeper, inboxes: &Inboxes) -> std::io::Result<JoinHandle<()>> {
    let (inboxes, disk) = (inboxes.clone(), Arc::clone(&keeper.disk));
    std::thread::Builder::new().name("keeper".into()).spawn(move || {
        if catch_unwind(AssertUnwindSafe(|| run(keeper, &inboxes))).is_err() {
            // Ends the watcher, so that senders learn that the inboxes are closed.
            disk.close();
        }
    })
}

/// Starts the next keeper each time the current one hangs in a call of the store. The thread of the hanging one ends
/// with its call.
fn watch(successor: &Keeper, inboxes: &Inboxes, mut current: JoinHandle<()>) {
    while let Some((error, answer)) = successor.disk.wait_for_late_call() {
        let next = successor.successor().take_over(&error);
        if let Some((reply, error)) = answer {
            let _ = reply.send(Err(error));
        }
        match start(next, inboxes) {
            Ok(thread) => current = thread,
            Err(error) => {
                // The heartbeat of the hanging keeper makes the liveness probe fail.
                tracing::error!(%error, "cannot start another thread to write the ledger");
                return;
            }
        }
    }
    let _ = current.join();
}

pub(super) fn run(mut keeper: Keeper, inboxes: &Inboxes) {
    let mut tick_at = Instant::now() + TICK_MIN;
    loop {
        let generation = keeper.ledger.generation;
        // The kubelet's commands first: it has no timeout and admits no other pod meanwhile.
        select_biased! {
            recv(inboxes.kubelet) -> request => match request {
                Ok(request) => handle_request(&mut keeper, request),
                Err(_) => break,
            },
            recv(inboxes.other) -> request => match request {
                Ok(request) => handle_request(&mut keeper, request),
                Err(_) => break,
            },
            default(tick_at.saturating_duration_since(Instant::now())) => {
                if let Err(error) = turn(&mut keeper, &Command::Tick) {
                    tracing::debug!(%error, "a tick failed");
                }
                let until_due = keeper.until_next_tick().unwrap_or(TICK_MAX);
                tick_at = Instant::now() + until_due.clamp(TICK_MIN, TICK_MAX);
            }
        }
        if keeper.is_replaced {
            return;
        }
        keeper.wake_readers();
        if keeper.ledger.generation != generation || keeper.has_store_failed() {
            tick_at = tick_at.min(Instant::now() + TICK_MIN);
        }
        if keeper.ledger.generation != generation {
            // A full channel already holds a signal.
            let _ = inboxes.nudge.try_send(());
        }
    }
    keeper.disk.close();
}

/// Whether the kubelet waits for the command, with a pod that starts or ends.
fn is_of_kubelet(command: &Command) -> bool {
    let command = command.unconditional();
    matches!(command, Command::Allocate { .. } | Command::Prepare { .. } | Command::Unprepare { .. })
}

fn handle_request(keeper: &mut Keeper, request: Request) {
    // A grant whose caller has left would hold GPUs without a pod.
    let is_grant =
        matches!(request.command.unconditional(), Command::Allocate { .. } | Command::Prepare { .. });
    if is_grant && request.reply.is_closed() {
        return;
    }
    let Request { command, reply, span } = request;
    keeper.disk.begin(reply);
    let span = spans::turn(&span, command.as_str());
    let answer = span.in_scope(|| turn(keeper, &command));
    let failed = matches!(answer, Err(CommandError::Store(_)));
    let outcome = answer.as_ref().err().map_or("applied", CommandError::kind);
    spans::turn_ended(&span, keeper.ledger.generation, outcome, failed);
    drop(span);
    pass(Step::BeforeReply);
    // The request of a keeper that was taken over has been answered; the slot may hold its successor's.
    if keeper.is_replaced {
        return;
    }
    if let Some(reply) = keeper.disk.end() {
        // The submitter may have stopped waiting; the command stays applied.
        let _ = reply.send(answer);
    }
}

/// One turn, with heartbeat and duration.
fn turn(keeper: &mut Keeper, command: &Command) -> CommandResult {
    let counters = Arc::clone(&keeper.counters);
    let _busy = counters.keeper.heartbeat.begin();
    let began = Instant::now();
    let answer = keeper.turn(command);
    counters.keeper.turn_durations.add(began.elapsed());
    answer
}
