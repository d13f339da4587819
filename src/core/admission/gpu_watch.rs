//! Two threads beside the GPUs: one looks at all of them every few seconds, one waits for events.
//! Only they may wait for NVML.

use super::Door;
use super::looker::Looker;
use berth_kernel::ports::Gpus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest wait for one event: how long a stop may take to be noticed.
const EVENT_WAIT: Duration = Duration::from_millis(200);
/// Pause after events could not be had.
const EVENT_RETRY: Duration = Duration::from_secs(5);

/// The running threads.
pub struct GpuWatch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl GpuWatch {
    /// Starts both threads; the first look was already taken.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn start(looker: &Looker, door: &Door, every: Duration) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        door.figures().gpus.begin_looking(every);
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            std::thread::Builder::new().name(name.into()).spawn(work)
        };
        let (l, d, s) = (looker.clone(), door.clone(), Arc::clone(&stop));
        let look = spawn("gpu-look", Box::new(move || looks(&l, &d, &s, every)))?;
        let mut threads = vec![look];
        if looker.has_health_checks() {
            let (g, d, s) = (Arc::clone(looker.gpus()), door.clone(), Arc::clone(&stop));
            threads.push(spawn("gpu-events", Box::new(move || events(&*g, &d, &s)))?);
        }
        Ok(Self { stop, threads })
    }

    /// Asks both to end. Does not wait: a thread inside a hung NVML call ends with the process.
    pub fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.into_iter().filter(JoinHandle::is_finished) {
            let _ = thread.join();
        }
    }
}

fn looks(looker: &Looker, door: &Door, stop: &AtomicBool, every: Duration) {
    let mut failing = false;
    let figures = &door.figures().gpus;
    while pause(every, stop) {
        // To the end of the turn: a thread that dies at what it has seen is missed like one that hangs.
        let _busy = figures.beat.begin();
        let began = Instant::now();
        let looked = looker.look();
        figures.looked(began.elapsed(), looked.as_ref().err().map(ToString::to_string));
        match looked {
            Ok(inventory) => {
                if std::mem::take(&mut failing) {
                    tracing::info!("GPUs can be read again");
                }
                if let Err(error) = door.looked(inventory) {
                    tracing::warn!(%error, "a scan of the GPUs was not recorded");
                }
            }
            Err(error) if !failing => {
                failing = true;
                tracing::error!(%error, "GPUs cannot be read; their last known state stays");
            }
            Err(_) => {}
        }
    }
}

fn events(gpus: &dyn Gpus, door: &Door, stop: &AtomicBool) {
    let mut failing = false;
    while !stop.load(Ordering::Relaxed) {
        match gpus.next_reading(EVENT_WAIT) {
            Ok(None) => failing = false,
            Ok(Some(reading)) => {
                failing = false;
                if let Err(error) = door.read(reading) {
                    tracing::error!(%error, "a GPU event was lost");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, "GPU events cannot be had; health is polled only");
                }
                pause(EVENT_RETRY, stop);
            }
        }
    }
}

/// Waits, but not past a stop. Answers whether to go on.
fn pause(wait: Duration, stop: &AtomicBool) -> bool {
    let end = Instant::now() + wait;
    while Instant::now() < end && !stop.load(Ordering::Relaxed) {
        std::thread::sleep(EVENT_WAIT.min(end.saturating_duration_since(Instant::now())));
    }
    !stop.load(Ordering::Relaxed)
}
