//! The inboxes before the writer's thread, and the thread.

use super::{Answered, AskError, Keeper, Snapshot, Trouble};
use crate::figures::Figures;
use crate::spans;
use berth_kernel::command::Command;
use berth_kernel::steps::{Step, pass};
use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, select_biased, tick};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::{oneshot, watch};
use tracing::Span;

/// Asks of the kubelet that may wait: it calls serially, so one a resource ([`berth_kernel::offer::RESOURCES_MAX`] = 64).
pub const KUBELET_INBOX: usize = 64;
/// Other asks that may wait: a turn takes well under a millisecond beside a disk of 0.2 ms, so a
/// full inbox is a fraction of a second of work. Full is an answer, not a wait.
pub const OTHER_INBOX: usize = 256;
/// How often time passes for the ledger.
const TICK: Duration = Duration::from_secs(1);
pub(super) struct Ask {
    pub(super) command: Command,
    pub(super) reply: oneshot::Sender<Answered>,
    /// Of the work that waits for it.
    pub(super) span: Span,
}

/// The way to the keeper.
#[derive(Clone)]
pub struct Handle {
    kubelet: Sender<Ask>,
    other: Sender<Ask>,
    snapshots: watch::Receiver<Snapshot>,
    trouble: Trouble,
    figures: Arc<Figures>,
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

    /// What is wrong with the store, if anything.
    #[must_use]
    pub fn store_trouble(&self) -> Option<String> {
        self.trouble.lock().clone()
    }

    /// What is counted as long as the daemon lives.
    #[must_use]
    pub fn figures(&self) -> &Arc<Figures> {
        &self.figures
    }

    /// How many commands wait: the kubelet's, and others'.
    #[must_use]
    pub fn waiting(&self) -> (usize, usize) {
        (self.kubelet.len(), self.other.len())
    }

    /// Puts a command into the inbox: the kubelet's for Allocate, else the other one.
    ///
    /// # Errors
    /// [`AskError::Busy`] if the inbox is full, [`AskError::Stopping`] if nobody reads it any more.
    pub fn submit(&self, command: Command) -> Result<oneshot::Receiver<Answered>, AskError> {
        let inbox = if matches!(command, Command::Allocate { .. }) { &self.kubelet } else { &self.other };
        let (reply, answer) = oneshot::channel();
        match inbox.try_send(Ask { command, reply, span: spans::here() }) {
            Ok(()) => Ok(answer),
            Err(TrySendError::Full(_)) => Err(AskError::Busy),
            Err(TrySendError::Disconnected(_)) => Err(AskError::Stopping),
        }
    }

    /// Submits and waits, from a thread that may block.
    ///
    /// # Errors
    /// As [`Keeper::turn`] and [`Handle::submit`].
    pub fn ask(&self, command: Command) -> Answered {
        self.submit(command)?.blocking_recv().unwrap_or(Err(AskError::Stopping))
    }
}

/// The running keeper. Dropping its last [`Handle`] ends the thread after what it has begun.
pub struct Running {
    /// The way to it.
    pub handle: Handle,
    /// Ends when all handles are gone.
    pub thread: JoinHandle<()>,
}

/// Starts the keeper's thread. `nudge` is told, without waiting, that something was published.
///
/// # Errors
/// If the system gives no thread.
pub fn spawn(keeper: Keeper, nudge: Sender<()>) -> std::io::Result<Running> {
    let (kubelet, kubelet_asks) = bounded(KUBELET_INBOX);
    let (other, other_asks) = bounded(OTHER_INBOX);
    let snapshots = keeper.publisher.subscribe();
    let trouble = Arc::clone(&keeper.trouble);
    let figures = Arc::clone(&keeper.figures);
    // From its start on it takes turns.
    drop(figures.keeper.beat.begin());
    let thread = std::thread::Builder::new()
        .name("keeper".into())
        .spawn(move || run(keeper, &kubelet_asks, &other_asks, &nudge))?;
    Ok(Running { handle: Handle { kubelet, other, snapshots, trouble, figures }, thread })
}

pub(super) fn run(mut keeper: Keeper, kubelet: &Receiver<Ask>, other: &Receiver<Ask>, nudge: &Sender<()>) {
    let ticks = tick(TICK);
    loop {
        let generation = keeper.ledger.generation;
        // The kubelet's asks always first: it has no timeout and admits no other pod meanwhile.
        select_biased! {
            recv(kubelet) -> ask => match ask {
                Ok(ask) => answer(&mut keeper, ask),
                Err(_) => return,
            },
            recv(other) -> ask => match ask {
                Ok(ask) => answer(&mut keeper, ask),
                Err(_) => return,
            },
            recv(ticks) -> _ => {
                if let Err(error) = turn(&mut keeper, &Command::Tick) {
                    tracing::debug!(%error, "tick");
                }
            }
        }
        if keeper.ledger.generation != generation {
            // A nudge that is already waiting says the same.
            let _ = nudge.try_send(());
        }
    }
}

fn answer(keeper: &mut Keeper, ask: Ask) {
    if matches!(ask.command, Command::Allocate { .. }) && ask.reply.is_closed() {
        return;
    }
    let span = spans::turn(&ask.span, ask.command.word());
    let answered = span.in_scope(|| turn(keeper, &ask.command));
    let failed = matches!(answered, Err(AskError::Store(_)));
    let outcome = answered.as_ref().err().map_or("applied", AskError::kind);
    spans::turned(&span, keeper.ledger.generation, outcome, failed);
    drop(span);
    pass(Step::BeforeReply);
    // Whoever asked may have given up waiting; what is applied stays applied.
    let _ = ask.reply.send(answered);
}

/// One turn, with its signs of life.
fn turn(keeper: &mut Keeper, command: &Command) -> Answered {
    let figures = Arc::clone(&keeper.figures);
    let _busy = figures.keeper.beat.begin();
    let began = Instant::now();
    let answered = keeper.turn(command);
    figures.keeper.turns.add(began.elapsed());
    answered
}
