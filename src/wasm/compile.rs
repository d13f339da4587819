//! Compilation, as the daemon sees it: starts one compiler process at a time, sends it the module, reads its
//! reply and ends it.

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

/// Limits of one compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileLimits {
    /// Processor time.
    pub cpu_s: u64,
    /// Wall time.
    pub wall: Duration,
    /// How long a compilation waits for another to end.
    pub wait: Duration,
    /// Address space, bytes; `None`: what the cgroup's memory limit leaves, at most
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

/// How long a process may take to exit after its output has ended.
const EXIT_WAIT: Duration = Duration::from_secs(2);

/// A process' output, its messages and its exit status.
type Outcome = (Vec<u8>, String, std::io::Result<ExitStatus>);

/// A component with its artifact.
pub(super) struct Compiled<'m> {
    /// Borrowed if the module is a component itself: it may have 32 MiB.
    pub(super) component: Cow<'m, [u8]>,
    pub(super) artifact: Vec<u8>,
}

/// Starts compiler processes.
pub(super) struct Compiler {
    program: PathBuf,
    limits: CompileLimits,
    busy: Mutex<bool>,
    done: Condvar,
    /// Notes of compiler processes that have been logged.
    logged_notes: Mutex<BTreeSet<String>>,
}

/// Prevents a second compilation until it is dropped: two at once would need twice the memory.
struct CompileGuard<'a>(&'a Compiler);

impl Compiler {
    pub(super) fn new(program: PathBuf, limits: CompileLimits) -> Self {
        Self {
            program,
            limits,
            busy: Mutex::new(false),
            done: Condvar::new(),
            logged_notes: Mutex::default(),
        }
    }

    /// # Errors
    /// If the module is not a policy, exceeds a limit, or no process can be started.
    pub(super) fn compile<'m>(&self, module: &'m [u8]) -> Result<Compiled<'m>, InstallError> {
        let memory_bytes = match self.limits.memory_bytes {
            Some(bytes) => bytes,
            None => memory::compiler_memory_bytes().map_err(install_failed)?,
        };
        let _guard = self.acquire().ok_or(InstallError::Busy)?;
        self.compile_now(module, memory_bytes)
    }

    fn compile_now<'m>(&self, module: &'m [u8], memory_bytes: u64) -> Result<Compiled<'m>, InstallError> {
        let mut child = self.spawn(memory_bytes)?;
        let outcome = self.exchange(&mut child, module);
        let (frame, messages, status) = outcome.map_err(|what| InstallError::TooCostly { what })?;
        let status =
            status.map_err(|error| install_failed(format!("cannot wait for the compiler: {error}")))?;
        self.log_notes(&messages);
        match Reply::decode(&frame) {
            Some(Reply::Compiled { component, artifact }) => {
                let component = component.map_or(Cow::Borrowed(module), Cow::Owned);
                Ok(Compiled { component, artifact })
            }
            Some(Reply::Refused(reason)) => Err(not_a_policy(reason)),
            Some(Reply::TooCostly(what)) => Err(InstallError::TooCostly { what }),
            None => Err(self.exit_error(status, &messages, memory_bytes)),
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
            install_failed(format!("cannot start the compiler {program}: {error}"))
        })
    }

    /// Sends the module to the process, reads its reply and ends it. The pipes, and so the threads, end with the
    /// process.
    fn exchange(&self, child: &mut Child, module: &[u8]) -> Result<Outcome, String> {
        let (input, output, error) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        thread::scope(|scope| {
            // Fails if the process has exited; its messages and its exit status have the reason.
            scope.spawn(move || input.map(|mut input| input.write_all(module)));
            let messages = scope.spawn(move || read(error, COMPILE_MESSAGES_BYTES_MAX));
            let (send, receive) = mpsc::channel();
            scope.spawn(move || send.send(read(output, FRAME_BYTES_MAX)));
            let frame = receive.recv_timeout(self.limits.wall);
            let grace = if frame.is_ok() { EXIT_WAIT } else { Duration::ZERO };
            let status = end(child, grace);
            let messages = messages.join().unwrap_or_default();
            let messages = String::from_utf8_lossy(&messages).into_owned();
            match frame {
                Ok(frame) => Ok((frame, messages, status)),
                Err(RecvTimeoutError::Timeout) => {
                    let s = self.limits.wall.as_secs_f32();
                    Err(format!("it took longer than {s} s"))
                }
                Err(RecvTimeoutError::Disconnected) => Err("its reply was lost".to_owned()),
            }
        })
    }

    /// The error of a process that exited without a valid reply.
    fn exit_error(&self, status: ExitStatus, messages: &str, memory_bytes: u64) -> InstallError {
        const OUT_OF_MEMORY: &str = "memory allocation of";
        let costly = |what| InstallError::TooCostly { what };
        let errors: Vec<_> = messages.lines().filter(|line| !line.starts_with(NOTE)).collect();
        let errors = errors.join(" ");
        match status.signal() {
            Some(libc::SIGXCPU) => {
                costly(format!("it took longer than {} s of processor time", self.limits.cpu_s))
            }
            _ if errors.contains(OUT_OF_MEMORY) => {
                costly(format!("it needed more than {} MiB", memory_bytes >> 20))
            }
            Some(libc::SIGKILL) => costly("the system killed the compiler".to_owned()),
            Some(signal) => not_a_policy(format!("the compiler crashed on it (signal {signal})")),
            None => install_failed(format!("the compiler did not reply ({status}): {errors}")),
        }
    }

    fn log_notes(&self, messages: &str) {
        let mut logged_notes = self.logged_notes.lock();
        for note in messages.lines().filter_map(|line| line.strip_prefix(NOTE)) {
            if logged_notes.insert(note.to_owned()) {
                tracing::info!("policies are compiled in a limited process, but {note}");
            }
        }
    }

    fn acquire(&self) -> Option<CompileGuard<'_>> {
        let mut busy = self.lock();
        let waited = self.done.wait_while_for(&mut busy, |busy| *busy, self.limits.wait);
        if waited.timed_out() {
            return None;
        }
        *busy = true;
        Some(CompileGuard(self))
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.busy.lock()
    }
}

impl Drop for CompileGuard<'_> {
    fn drop(&mut self) {
        *self.0.lock() = false;
        self.0.done.notify_one();
    }
}

/// Waits for a process that has closed its output, and kills it after `grace`: a compromised compiler could close
/// its output and keep running.
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

/// Reads at most `bytes_max` bytes. A broken pipe is the end of the output.
fn read(pipe: Option<impl Read>, bytes_max: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(pipe) = pipe {
        let _ = pipe.take(bytes_max as u64).read_to_end(&mut bytes);
    }
    bytes
}

pub(super) fn install_failed(what: String) -> InstallError {
    InstallError::Failed { what }
}
