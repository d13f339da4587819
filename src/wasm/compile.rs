//! The daemon's side of compiling: one process at a time, bytes in, one frame out, and an end to
//! it.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::compile_child::{ARGUMENT, NOTE};
use super::frame::{FRAME_BYTES_MAX, Reply};
use super::limits::{COMPILE_CPU_S_MAX, COMPILE_MESSAGES_BYTES_MAX, COMPILE_WAIT_S_MAX, COMPILE_WALL_S_MAX};
use super::memory;
use super::module::not_a_policy;
use berth_kernel::ports::InstallError;

/// What one compilation may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileLimits {
    /// Processor time.
    pub cpu_s: u64,
    /// Wall time.
    pub wall: Duration,
    /// How long one waits for the one before it.
    pub wait: Duration,
    /// Address space, bytes; `None`: what the cgroup leaves, at most
    /// [`limits::COMPILE_MEMORY_BYTES_MAX`](super::limits::COMPILE_MEMORY_BYTES_MAX).
    pub memory_bytes: Option<u64>,
}

impl Default for CompileLimits {
    fn default() -> Self {
        Self {
            cpu_s: COMPILE_CPU_S_MAX,
            wall: Duration::from_secs(COMPILE_WALL_S_MAX),
            wait: Duration::from_secs(COMPILE_WAIT_S_MAX),
            memory_bytes: None,
        }
    }
}

/// How long a process may take to end once its output has ended.
const END_WAIT: Duration = Duration::from_secs(2);

/// Its output, its messages, and how it ended.
type Outcome = (Vec<u8>, String, std::io::Result<ExitStatus>);

/// A component with its artifact.
pub(super) struct Compiled<'m> {
    /// The module itself, where it is one: 32 MiB need not be there twice.
    pub(super) component: Cow<'m, [u8]>,
    pub(super) artifact: Vec<u8>,
}

/// Starts compilers.
pub(super) struct Compiler {
    program: PathBuf,
    limits: CompileLimits,
    busy: Mutex<bool>,
    done: Condvar,
    /// Notes of the process that the log has already.
    noted: Mutex<BTreeSet<String>>,
}

/// While it lives, no other compilation starts: two at once would need twice the memory.
struct Turn<'a>(&'a Compiler);

impl Compiler {
    pub(super) fn new(program: PathBuf, limits: CompileLimits) -> Self {
        Self { program, limits, busy: Mutex::new(false), done: Condvar::new(), noted: Mutex::default() }
    }

    /// # Errors
    /// If the module is none, needs too much, or no process can be had.
    pub(super) fn compile<'m>(&self, module: &'m [u8]) -> Result<Compiled<'m>, InstallError> {
        let memory_bytes = match self.limits.memory_bytes {
            Some(bytes) => bytes,
            None => memory::compiler_memory_bytes().map_err(trouble)?,
        };
        let _turn = self.turn().ok_or(InstallError::Busy)?;
        self.compile_now(module, memory_bytes)
    }

    fn compile_now<'m>(&self, module: &'m [u8], memory_bytes: u64) -> Result<Compiled<'m>, InstallError> {
        let mut child = self.spawn(memory_bytes)?;
        let outcome = self.converse(&mut child, module);
        let (frame, messages, status) = outcome.map_err(|late| InstallError::TooCostly { what: late })?;
        let status = status.map_err(|error| trouble(format!("the compiler: {error}")))?;
        self.log_notes(&messages);
        match Reply::decode(&frame) {
            Some(Reply::Compiled { component, artifact }) => {
                let component = component.map_or(Cow::Borrowed(module), Cow::Owned);
                Ok(Compiled { component, artifact })
            }
            Some(Reply::Refused(words)) => Err(not_a_policy(words)),
            Some(Reply::TooCostly(what)) => Err(InstallError::TooCostly { what }),
            None => Err(self.died(status, &messages, memory_bytes)),
        }
    }

    fn spawn(&self, memory_bytes: u64) -> Result<Child, InstallError> {
        let mut command = Command::new(&self.program);
        command.arg(ARGUMENT).arg(self.limits.cpu_s.to_string());
        command.arg(memory_bytes.to_string()).env_clear().current_dir("/");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let spawned = command.spawn();
        spawned.map_err(|error| {
            let program = self.program.display();
            trouble(format!("the compiler {program} does not start: {error}"))
        })
    }

    /// Feeds and reads the process, and ends it in any case: all its pipes end with it, and so do
    /// the threads.
    fn converse(&self, child: &mut Child, module: &[u8]) -> Result<Outcome, String> {
        let (input, output, error) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        thread::scope(|scope| {
            // A process that died does not read on; what it says or how it ended tells why.
            scope.spawn(move || input.map(|mut input| input.write_all(module)));
            let messages = scope.spawn(move || read(error, COMPILE_MESSAGES_BYTES_MAX));
            let (send, receive) = mpsc::channel();
            scope.spawn(move || send.send(read(output, FRAME_BYTES_MAX)));
            let frame = receive.recv_timeout(self.limits.wall);
            let grace = if frame.is_ok() { END_WAIT } else { Duration::ZERO };
            let status = end(child, grace);
            let messages = messages.join().unwrap_or_default();
            let messages = String::from_utf8_lossy(&messages).into_owned();
            match frame {
                Ok(frame) => Ok((frame, messages, status)),
                Err(RecvTimeoutError::Timeout) => {
                    let s = self.limits.wall.as_secs_f32();
                    Err(format!("it took longer than {s} s"))
                }
                Err(RecvTimeoutError::Disconnected) => Err("its answer was lost".to_owned()),
            }
        })
    }

    /// A process that ended without an answer.
    fn died(&self, status: ExitStatus, messages: &str, memory_bytes: u64) -> InstallError {
        const OUT_OF_MEMORY: &str = "memory allocation of";
        let costly = |what| InstallError::TooCostly { what };
        let words = messages.lines().filter(|line| !line.starts_with(NOTE));
        let words: Vec<_> = words.collect();
        let words = words.join(" ");
        match status.signal() {
            Some(libc::SIGXCPU) => {
                costly(format!("it took longer than {} s of processor time", self.limits.cpu_s))
            }
            _ if words.contains(OUT_OF_MEMORY) => {
                costly(format!("it needed more than {} MiB", memory_bytes >> 20))
            }
            Some(libc::SIGKILL) => costly("the system killed the compiler".to_owned()),
            Some(signal) => not_a_policy(format!("the compiler crashed on it (signal {signal})")),
            None => trouble(format!("the compiler gave no answer ({status}): {words}")),
        }
    }

    fn log_notes(&self, messages: &str) {
        let mut noted = self.noted.lock();
        for note in messages.lines().filter_map(|line| line.strip_prefix(NOTE)) {
            if noted.insert(note.to_owned()) {
                tracing::info!("policies are compiled in a limited process, but {note}");
            }
        }
    }

    fn turn(&self) -> Option<Turn<'_>> {
        let mut busy = self.lock();
        let waited = self.done.wait_while_for(&mut busy, |busy| *busy, self.limits.wait);
        if waited.timed_out() {
            return None;
        }
        *busy = true;
        Some(Turn(self))
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.busy.lock()
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        self.0.done.notify_one();
    }
}

/// Waits for a process that has nothing left to say, and kills it if it does not end by itself: who
/// took the compiler over could close its output and stay.
fn end(child: &mut Child, grace: Duration) -> std::io::Result<ExitStatus> {
    let deadline = Instant::now() + grace;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() >= deadline {
            child.kill()?;
            return child.wait();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// At most so many bytes; a pipe that breaks is one that ends.
fn read(pipe: Option<impl Read>, bytes_max: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let _ = pipe.take(bytes_max as u64).read_to_end(&mut bytes);
    }
    bytes
}

pub(super) fn trouble(what: String) -> InstallError {
    InstallError::Failed { what }
}
