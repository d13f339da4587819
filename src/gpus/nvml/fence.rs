//! Every NVML call runs behind a fence: on another thread, with a deadline.
//!
//! A call that hangs keeps its thread and its *lane* (one for each GPU, and one for the node). Another call on that
//! lane fails at once; calls on other lanes run on other threads. So calls that hang hold at most one thread for each
//! lane, however long a driver hangs. Idle threads are reused.

use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

/// Stack size of a thread, bytes: the default of Rust's threads, since the driver's library is foreign code. Untouched
/// pages cost nothing.
const STACK_BYTES: usize = 2 * 1024 * 1024;
/// How long an idle thread is kept: longer than the interval of scans (`health.pollSeconds`, by default 5 s), so that
/// each scan reuses threads.
const IDLE_MAX: Duration = Duration::from_secs(15);
/// Interval of attempts to start a thread.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Calls on one lane run one at a time; a hang blocks its lane only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Lane {
    /// Calls that name no GPU.
    Node,
    /// Calls on the GPU with this NVML index.
    Gpu(u32),
}

/// Why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CallFailure {
    /// It did not return within its deadline, and may never.
    Hung {
        /// The NVML function.
        call: &'static str,
        /// How long it has been running.
        running: Duration,
        /// Whether this job was started by the caller, and not by an earlier one.
        is_new: bool,
    },
    /// It could not be made: no thread could be started, or the wrapper panicked.
    NotMade(String),
}

impl fmt::Display for CallFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // Without the time: health has its start already, and a text that changes with each scan would be a new
            // reason each time.
            Self::Hung { call, .. } => write!(f, "{call} does not answer"),
            Self::NotMade(why) => write!(f, "NVML could not be called: {why}"),
        }
    }
}

/// The name of the call that a thread makes, so that a hang can be reported with it.
#[derive(Clone)]
pub(super) struct Steps(Arc<Mutex<&'static str>>);

impl Steps {
    /// To be called before each call of an NVML function, with its name.
    pub(super) fn at(&self, call: &'static str) {
        *self.0.lock() = call;
    }

    /// The name of the newest one.
    pub(super) fn now(&self) -> &'static str {
        *self.0.lock()
    }
}

/// A job that holds a lane.
#[derive(Clone)]
struct RunningJob {
    since: Instant,
    allowed: Duration,
    steps: Steps,
}

impl RunningJob {
    fn new(allowed: Duration) -> Self {
        Self { since: Instant::now(), allowed, steps: Steps(Arc::new(Mutex::new("an NVML call"))) }
    }
}

#[derive(Default)]
struct Shared {
    /// The lanes in use.
    running: Mutex<BTreeMap<Lane, RunningJob>>,
    /// Notified when a lane is free again.
    freed: Condvar,
    /// The idle threads; the one that finished its work last is at the end, and is used first.
    idle: Mutex<Vec<(ThreadId, Sender<Work>)>>,
}

/// What a thread runs: one job, or a series of jobs.
type Work = Box<dyn FnOnce() + Send>;

/// Runs NVML calls on threads with deadlines.
#[derive(Clone)]
pub(super) struct Fence {
    shared: Arc<Shared>,
    idle_max: Duration,
}

impl Default for Fence {
    fn default() -> Self {
        Self { shared: Arc::default(), idle_max: IDLE_MAX }
    }
}

/// A started job.
pub(super) struct Pending<T> {
    answer: Receiver<T>,
    job: RunningJob,
}

impl Fence {
    /// Runs `work` on a thread and waits for its result, at most for `allowed`.
    pub(super) fn run<T: Send + 'static>(
        &self,
        lane: Lane,
        allowed: Duration,
        work: impl FnOnce(&Steps) -> T + Send + 'static,
    ) -> Result<T, CallFailure> {
        self.start(lane, allowed, work)?.wait()
    }

    /// Starts `work` on a thread. If another job holds the lane, waits for its end; fails if that job exceeds its
    /// deadline.
    pub(super) fn start<T: Send + 'static>(
        &self,
        lane: Lane,
        allowed: Duration,
        work: impl FnOnce(&Steps) -> T + Send + 'static,
    ) -> Result<Pending<T>, CallFailure> {
        let job = self.acquire(lane, allowed)?;
        let (sender, answer) = channel();
        let (steps, guard) = (job.steps.clone(), LaneGuard { fence: self.clone(), lane });
        let run = move || {
            let done = work(&steps);
            // The lane is freed before the result is sent: its receiver may start the next job on this lane.
            drop(guard);
            // The receiver is dropped if the deadline has passed.
            let _ = sender.send(done);
        };
        self.execute(job.since + job.allowed, Box::new(run))?;
        Ok(Pending { answer, job })
    }

    /// Runs jobs one after the other on one thread, each on its lane and for `allowed` at most. A job whose lane is in
    /// use is left out. Returns the results of the first jobs, in their order, and why the next one has none, if so;
    /// the jobs after that one are not run. The caller is woken once, at the end.
    pub(super) fn run_series<T: Send + 'static>(
        &self,
        jobs: Vec<(Lane, impl FnOnce(&Steps) -> T + Send + 'static)>,
        allowed: Duration,
    ) -> (Vec<Option<T>>, Option<CallFailure>) {
        let (began, count) = (Instant::now(), jobs.len());
        let series = Arc::new(Series::default());
        let (fence, end) = (self.clone(), SeriesEnd(Arc::clone(&series)));
        let run = move || {
            for (lane, work) in jobs {
                let job = fence.try_acquire(lane, allowed);
                let guard = job.as_ref().map(|_| LaneGuard { fence: fence.clone(), lane });
                {
                    let mut state = end.0.state.lock();
                    if state.is_abandoned {
                        return;
                    }
                    state.current.clone_from(&job);
                }
                let done = job.map(|job| work(&job.steps));
                drop(guard);
                end.0.state.lock().done.push(done);
            }
        };
        if let Err(failure) = self.execute(began + allowed, Box::new(run)) {
            return (Vec::new(), Some(failure));
        }
        let mut state = series.state.lock();
        while !state.has_ended {
            let since = state.current.as_ref().map_or(began, |job| job.since);
            let left = allowed.saturating_sub(since.elapsed());
            if left.is_zero() {
                break;
            }
            series.ended.wait_for(&mut state, left);
        }
        let done = std::mem::take(&mut state.done);
        let call = state.current.as_ref().map_or("an NVML call", |job| job.steps.now());
        let failure = match state.has_ended {
            true if done.len() == count => None,
            true => Some(CallFailure::NotMade(format!("{call} panicked in its wrapper"))),
            false => {
                state.is_abandoned = true;
                let running = state.current.as_ref().map_or(began, |job| job.since).elapsed();
                Some(CallFailure::Hung { call, running, is_new: true })
            }
        };
        (done, failure)
    }

    /// The call that has been running longest.
    pub(super) fn longest(&self) -> Option<&'static str> {
        let running = self.shared.running.lock();
        running.values().min_by_key(|job| job.since).map(|job| job.steps.now())
    }

    /// Runs `work` on an idle thread, or on a new one. Retries the start of a thread until `deadline`, since a node may
    /// lack threads for a moment, and a GPU that cannot be read becomes unhealthy.
    fn execute(&self, deadline: Instant, work: Work) -> Result<(), CallFailure> {
        let idle = self.shared.idle.lock().pop();
        let work = match idle {
            Some((_, sender)) => match sender.send(work) {
                Ok(()) => return Ok(()),
                Err(unsent) => unsent.0,
            },
            None => work,
        };
        // `spawn` drops the closure of a thread that it cannot start.
        let work = Arc::new(Mutex::new(Some(work)));
        loop {
            let (attempt, fence, idle_max) = (Arc::clone(&work), Arc::downgrade(&self.shared), self.idle_max);
            let run = move || {
                let work = attempt.lock().take();
                if let Some(work) = work {
                    run_thread(work, &fence, idle_max);
                }
            };
            let Err(error) =
                thread::Builder::new().name("nvml".to_owned()).stack_size(STACK_BYTES).spawn(run)
            else {
                return Ok(());
            };
            if Instant::now() + RETRY_INTERVAL > deadline {
                return Err(CallFailure::NotMade(format!("no thread can be started: {error}")));
            }
            thread::sleep(RETRY_INTERVAL);
        }
    }

    /// Takes the lane. Waits while another job holds it, up to that job's deadline.
    fn acquire(&self, lane: Lane, allowed: Duration) -> Result<RunningJob, CallFailure> {
        let mut running_jobs = self.shared.running.lock();
        while let Some(other) = running_jobs.get(&lane) {
            let running = other.since.elapsed();
            let left = other.allowed.saturating_sub(running);
            if left.is_zero() {
                return Err(CallFailure::Hung { call: other.steps.now(), running, is_new: false });
            }
            self.shared.freed.wait_for(&mut running_jobs, left);
        }
        let job = RunningJob::new(allowed);
        running_jobs.insert(lane, job.clone());
        Ok(job)
    }

    /// Takes the lane if no other job holds it.
    fn try_acquire(&self, lane: Lane, allowed: Duration) -> Option<RunningJob> {
        let mut running_jobs = self.shared.running.lock();
        if running_jobs.contains_key(&lane) {
            return None;
        }
        let job = RunningJob::new(allowed);
        running_jobs.insert(lane, job.clone());
        Some(job)
    }
}

/// Jobs that run one after the other.
struct Series<T> {
    state: Mutex<SeriesState<T>>,
    /// Notified once no more results follow.
    ended: Condvar,
}

struct SeriesState<T> {
    /// The results so far; `None` for a job that was left out.
    done: Vec<Option<T>>,
    /// The job that runs.
    current: Option<RunningJob>,
    /// Whether no more results follow.
    has_ended: bool,
    /// Whether the caller waits no longer.
    is_abandoned: bool,
}

impl<T> Default for Series<T> {
    fn default() -> Self {
        let state = SeriesState { done: Vec::new(), current: None, has_ended: false, is_abandoned: false };
        Self { state: Mutex::new(state), ended: Condvar::new() }
    }
}

/// Ends a series when it is dropped, also by a panic of a job.
struct SeriesEnd<T>(Arc<Series<T>>);

impl<T> Drop for SeriesEnd<T> {
    fn drop(&mut self) {
        self.0.state.lock().has_ended = true;
        self.0.ended.notify_all();
    }
}

/// The body of a thread: runs `work`, then each closure that it receives.
fn run_thread(mut work: Work, fence: &Weak<Shared>, idle_max: Duration) {
    let this = thread::current().id();
    loop {
        work();
        let Some(shared) = fence.upgrade() else { return };
        let (sender, next) = channel();
        shared.idle.lock().push((this, sender));
        drop(shared);
        work = match next.recv_timeout(idle_max) {
            Ok(work) => work,
            // The fence was dropped.
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let Some(shared) = fence.upgrade() else { return };
                let mut idle = shared.idle.lock();
                if let Some(at) = idle.iter().position(|(thread, _)| *thread == this) {
                    idle.remove(at);
                    return;
                }
                drop(idle);
                // `execute` has taken the sender from the list, and sends the next job.
                let Ok(work) = next.recv() else { return };
                work
            }
        };
    }
}

/// Frees the lane when the job ends, also by a panic.
struct LaneGuard {
    fence: Fence,
    lane: Lane,
}

impl Drop for LaneGuard {
    fn drop(&mut self) {
        self.fence.shared.running.lock().remove(&self.lane);
        self.fence.shared.freed.notify_all();
    }
}

impl<T> Pending<T> {
    /// Waits for the result until the job's deadline.
    pub(super) fn wait(self) -> Result<T, CallFailure> {
        let RunningJob { since, allowed, steps } = self.job;
        self.answer.recv_timeout(allowed.saturating_sub(since.elapsed())).map_err(|error| match error {
            RecvTimeoutError::Timeout => {
                CallFailure::Hung { call: steps.now(), running: since.elapsed(), is_new: true }
            }
            RecvTimeoutError::Disconnected => {
                CallFailure::NotMade(format!("{} panicked in its wrapper", steps.now()))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(300);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn an_answer_comes_back_and_the_lane_is_free_again() {
        let fence = Fence::default();
        for n in 0..100 {
            assert_eq!(fence.run(Lane::Node, LONG, move |_| n), Ok(n));
        }
    }

    #[test]
    fn a_hang_has_the_name_of_its_call_and_blocks_only_its_lane() {
        let mut allowed = SHORT;
        // On a busy machine the time may be over before the thread has begun its call.
        let (fence, release, call, running) = loop {
            let fence = Fence::default();
            let (release, held) = channel::<()>();
            let hung = fence.run(Lane::Gpu(3), allowed, move |steps| {
                steps.at("nvmlDeviceGetName");
                held.recv().ok();
            });
            let Err(CallFailure::Hung { call, running, is_new: true }) = hung else {
                panic!("{hung:?}");
            };
            if call == "nvmlDeviceGetName" || allowed > LONG / 2 {
                break (fence, release, call, running);
            }
            allowed *= 2;
        };
        assert_eq!(call, "nvmlDeviceGetName");
        assert!(running >= allowed);
        // The second call fails at once instead of waiting for its own timeout.
        let again = Instant::now();
        assert!(matches!(
            fence.run(Lane::Gpu(3), LONG, |_| ()),
            Err(CallFailure::Hung { is_new: false, .. })
        ));
        assert!(again.elapsed() < LONG / 2);
        assert_eq!(fence.run(Lane::Gpu(4), LONG, |_| 7), Ok(7));
        assert_eq!(fence.run(Lane::Node, LONG, |_| 8), Ok(8));
        release.send(()).unwrap();
        let began = Instant::now();
        while fence.run(Lane::Gpu(3), LONG, |_| ()).is_err() {
            assert!(began.elapsed() < LONG, "the lane is never free again");
            thread::yield_now();
        }
    }

    #[test]
    fn a_lane_in_use_is_waited_for_while_its_job_is_in_time() {
        let fence = Fence::default();
        let (release, held) = channel::<()>();
        let first = fence.start(Lane::Node, LONG, move |_| held.recv().is_ok()).unwrap();
        let second = thread::spawn(move || fence.run(Lane::Node, LONG, |_| 2));
        release.send(()).unwrap();
        assert_eq!(first.wait(), Ok(true));
        assert_eq!(second.join().unwrap(), Ok(2));
    }

    #[test]
    fn an_idle_thread_runs_the_next_job() {
        let fence = Fence::default();
        let (job, began) = (|_: &Steps| thread::current().id(), Instant::now());
        let wait_while = |holds: &dyn Fn() -> bool| {
            while holds() {
                assert!(began.elapsed() < LONG);
                thread::yield_now();
            }
        };
        let first = fence.run(Lane::Node, LONG, job).unwrap();
        wait_while(&|| fence.shared.idle.lock().is_empty());
        assert_eq!(fence.run(Lane::Gpu(1), LONG, job), Ok(first));
        // An idle thread does not keep the fence alive.
        let shared = Arc::downgrade(&fence.shared);
        drop(fence);
        wait_while(&|| shared.strong_count() > 0);
    }

    #[test]
    fn a_thread_that_is_given_a_job_when_its_time_is_over_runs_it() {
        let idle_max = Duration::from_millis(20);
        let fence = Fence { idle_max, ..Fence::default() };
        let began = Instant::now();
        let sender = loop {
            assert!(began.elapsed() < LONG);
            fence.run(Lane::Node, LONG, |_| ()).unwrap();
            let mut idle = fence.shared.idle.lock();
            if let Some((_, sender)) = idle.pop() {
                // Meanwhile the thread waits for this lock, to remove its entry.
                thread::sleep(3 * idle_max);
                break sender;
            }
        };
        let (done, ran) = channel();
        sender.send(Box::new(move || done.send(()).unwrap())).unwrap();
        ran.recv_timeout(LONG).unwrap();
    }

    #[test]
    fn a_panic_frees_the_lane_and_is_reported() {
        let fence = Fence::default();
        let result = fence.run(Lane::Node, LONG, |_| {
            assert!(LONG.is_zero(), "made to fail");
        });
        assert!(matches!(result, Err(CallFailure::NotMade(_))), "{result:?}");
        assert_eq!(fence.run(Lane::Node, LONG, |_| 1), Ok(1));
    }

    #[test]
    fn jobs_on_different_lanes_run_at_the_same_time() {
        let fence = Fence::default();
        let barrier = Arc::new(std::sync::Barrier::new(16));
        let start = |gpu| {
            let barrier = Arc::clone(&barrier);
            let job = move |_: &Steps| {
                barrier.wait();
                gpu
            };
            fence.start(Lane::Gpu(gpu), LONG, job).unwrap()
        };
        let pending: Vec<_> = (0..16).map(start).collect();
        let sum: u32 = pending.into_iter().map(|p| p.wait().unwrap()).sum();
        assert_eq!(sum, 120);
        assert!(fence.shared.running.lock().is_empty());
    }

    #[test]
    fn a_series_runs_on_one_thread_and_leaves_out_lanes_in_use() {
        let fence = Fence::default();
        let (release, held) = channel::<()>();
        let other = fence.start(Lane::Gpu(1), LONG, move |_| held.recv().is_ok()).unwrap();
        let job = |_: &Steps| thread::current().id();
        let (done, failure) = fence.run_series((0..3).map(|gpu| (Lane::Gpu(gpu), job)).collect(), LONG);
        assert_eq!(failure, None);
        assert_eq!((done[1], done.len()), (None, 3));
        assert!(done[0].is_some() && done[0] == done[2], "{done:?}");
        release.send(()).unwrap();
        assert_eq!(other.wait(), Ok(true));
        assert!(fence.shared.running.lock().is_empty());
    }

    #[test]
    fn a_hang_or_a_panic_ends_a_series() {
        let mut allowed = SHORT;
        // On a busy machine the time may be over before the thread has begun the second job.
        let (fence, release, job, done, failure) = loop {
            let fence = Fence::default();
            let (release, held) = channel::<()>();
            let held = Arc::new(Mutex::new(held));
            let job = move |gpu: u32| {
                let held = Arc::clone(&held);
                let job = move |steps: &Steps| {
                    steps.at("nvmlDeviceGetName");
                    if gpu == 1 {
                        let _ = held.lock().recv();
                    }
                    gpu
                };
                (Lane::Gpu(gpu), job)
            };
            let (done, failure) = fence.run_series((0..3).map(&job).collect(), allowed);
            let is_named = matches!(failure, Some(CallFailure::Hung { call: "nvmlDeviceGetName", .. }));
            if (is_named && done == [Some(0)]) || allowed > LONG / 2 {
                break (fence, release, job, done, failure);
            }
            allowed *= 2;
        };
        assert_eq!(done, [Some(0)]);
        assert!(
            matches!(failure, Some(CallFailure::Hung { call: "nvmlDeviceGetName", is_new: true, .. })),
            "{failure:?}"
        );
        // The lane stays in use, and the third job is not run once the second one returns.
        assert_eq!(fence.run_series(vec![job(1)], LONG), (vec![None], None));
        release.send(()).unwrap();
        let began = Instant::now();
        while !fence.shared.running.lock().is_empty() {
            assert!(began.elapsed() < LONG, "the lane is never free again");
            thread::yield_now();
        }

        let fails = |gpu: u32| (Lane::Gpu(gpu), move |_: &Steps| assert!(gpu == 0, "made to fail"));
        let (done, failure) = fence.run_series((0..3).map(fails).collect(), LONG);
        assert_eq!(done, [Some(())]);
        assert!(matches!(failure, Some(CallFailure::NotMade(_))), "{failure:?}");
        assert_eq!(fence.run(Lane::Gpu(1), LONG, |_| 1), Ok(1));
    }
}
