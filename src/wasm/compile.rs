//! Compilation, as the daemon sees it: starts one compiler process at a time, sends it the module, reads its
//! reply and ends it.

use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::compile_cache::CompileCache;
use super::compile_child::{ARGUMENT, FRAME_BYTES_MAX, NOTE, Reply};
use super::limits::{
    COMPILE_CPU_S_MAX, COMPILE_MEMORY_BYTES_MAX, COMPILE_MEMORY_BYTES_MIN, COMPILE_MESSAGES_BYTES_MAX,
    COMPILE_WAIT_S_MAX, COMPILE_WALL_S_MAX, DAEMON_MEMORY_BYTES,
};
use berth_kernel::node::ports::InstallError;

/// Longest reason of a refusal, bytes. It may include names of imports and exports, which the module chooses.
const REFUSAL_BYTES_MAX: usize = 2048;

/// Limits of one compilation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompileLimits {
    /// Processor time.
    pub cpu_s: u64,
    /// Wall time.
    pub wall: Duration,
    /// How long a compilation waits for another to end.
    pub wait: Duration,
    /// Address space, bytes; `None`: what the cgroup's memory limit leaves, at most [`COMPILE_MEMORY_BYTES_MAX`].
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
    /// Replies of earlier processes, if they are kept.
    cache: Option<CompileCache>,
    /// Held during a compilation: two at once would need twice the memory.
    busy: Mutex<()>,
    /// Notes of compiler processes that have been logged.
    logged_notes: Mutex<BTreeSet<String>>,
}

impl Compiler {
    pub(super) fn new(program: PathBuf, limits: CompileLimits, cache: Option<CompileCache>) -> Self {
        Self { program, limits, cache, busy: Mutex::default(), logged_notes: Mutex::default() }
    }

    /// # Errors
    /// If the module is not a policy, exceeds a limit, or no process can be started.
    pub(super) fn compile<'m>(&self, module: &'m [u8]) -> Result<Compiled<'m>, InstallError> {
        let kept = self.cache.as_ref().and_then(|cache| cache.read(module));
        if let Some(reply) = kept.as_deref().and_then(Reply::decode) {
            return reply.into_compiled(module);
        }
        let memory_bytes = match self.limits.memory_bytes {
            Some(bytes) => bytes,
            None => compiler_memory_bytes().map_err(install_failed)?,
        };
        let _guard = self.busy.try_lock_for(self.limits.wait).ok_or(InstallError::Busy)?;
        let mut child = self.spawn(memory_bytes)?;
        let (frame, messages, status) = self.exchange(&mut child, module)?;
        self.log_notes(&messages);
        let reply = Reply::decode(&frame);
        let compiled =
            reply.ok_or_else(|| self.exit_error(status, &messages, memory_bytes))?.into_compiled(module)?;
        if let Some(cache) = &self.cache
            && let Err(error) = cache.write(module, &frame)
        {
            tracing::debug!("the compiled policy is not kept for the next command: {error}");
        }
        Ok(compiled)
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

    /// Sends the module to the process, reads its output and its messages, and ends it. The pipes, and so the threads,
    /// end with the process.
    fn exchange(
        &self,
        child: &mut Child,
        module: &[u8],
    ) -> Result<(Vec<u8>, String, ExitStatus), InstallError> {
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
            let frame = frame.map_err(|error| match error {
                RecvTimeoutError::Timeout => {
                    too_costly(format!("it took longer than {} s", self.limits.wall.as_secs_f32()))
                }
                RecvTimeoutError::Disconnected => too_costly("its reply was lost".to_owned()),
            })?;
            let failed = |error| install_failed(format!("cannot wait for the compiler: {error}"));
            Ok((frame, messages, status.map_err(failed)?))
        })
    }

    /// The error of a process that exited without a valid reply.
    fn exit_error(&self, status: ExitStatus, messages: &str, memory_bytes: u64) -> InstallError {
        const OUT_OF_MEMORY: &str = "memory allocation of";
        let errors: Vec<_> = messages.lines().filter(|line| !line.starts_with(NOTE)).collect();
        let errors = errors.join(" ");
        match status.signal() {
            Some(libc::SIGXCPU) => {
                too_costly(format!("it took longer than {} s of processor time", self.limits.cpu_s))
            }
            _ if errors.contains(OUT_OF_MEMORY) => {
                too_costly(format!("it needed more than {} MiB", memory_bytes >> 20))
            }
            Some(libc::SIGKILL) => too_costly("the system killed the compiler".to_owned()),
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
}

impl Reply {
    /// The reply to the compilation of `module`.
    pub(super) fn into_compiled(self, module: &[u8]) -> Result<Compiled<'_>, InstallError> {
        match self {
            Self::Compiled { component, artifact } => {
                Ok(Compiled { component: component.map_or(Cow::Borrowed(module), Cow::Owned), artifact })
            }
            Self::Refused(reason) => Err(not_a_policy(reason)),
            Self::TooCostly(what) => Err(too_costly(what)),
        }
    }
}

pub(super) fn not_a_policy(mut what: String) -> InstallError {
    what.truncate(what.floor_char_boundary(REFUSAL_BYTES_MAX));
    InstallError::NotAPolicy { what }
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

fn too_costly(what: String) -> InstallError {
    InstallError::TooCostly { what }
}

/// Address space for one compilation, bytes. With cgroup v2 the kubelet has all processes of a container killed when
/// one exceeds the memory limit, so a compilation must fail by a lower limit of its own. With cgroup v1 only the
/// compiler is killed, and no other limit is necessary.
///
/// # Errors
/// If the memory limit of this process' cgroup is too low.
fn compiler_memory_bytes() -> Result<u64, String> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    share_of(cgroup_limit(&own, Path::new("/sys/fs/cgroup")))
}

fn share_of(limit: Option<u64>) -> Result<u64, String> {
    let Some(limit) = limit else { return Ok(COMPILE_MEMORY_BYTES_MAX) };
    let left = limit.saturating_sub(DAEMON_MEMORY_BYTES);
    if left < COMPILE_MEMORY_BYTES_MIN {
        return Err(format!(
            "the memory limit of this container is {} MiB, but compiling needs {} MiB; raise the limit, {} MiB are \
             enough for every policy",
            limit >> 20,
            (COMPILE_MEMORY_BYTES_MIN + DAEMON_MEMORY_BYTES) >> 20,
            (COMPILE_MEMORY_BYTES_MAX + DAEMON_MEMORY_BYTES) >> 20
        ));
    }
    Ok(left.min(COMPILE_MEMORY_BYTES_MAX))
}

/// The lowest `memory.max` of this process' cgroup and its ancestors; `None` without a limit or without cgroup v2.
fn cgroup_limit(own: &str, root: &Path) -> Option<u64> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let folder = root.join(own);
    let groups = folder.ancestors().take_while(|group| group.starts_with(root));
    let limits = groups.filter_map(|group| {
        let text = fs::read_to_string(group.join("memory.max")).ok()?;
        // `max` means that there is no limit.
        text.trim().parse::<u64>().ok()
    });
    limits.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_lowest_limit_of_all_ancestors_counts() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        fs::create_dir_all(root.join("pods/one")).unwrap();
        assert_eq!(cgroup_limit("0::/pods/one\n", root), None);
        fs::write(root.join("pods/one/memory.max"), "max\n").unwrap();
        assert_eq!(cgroup_limit("0::/pods/one\n", root), None);
        fs::write(root.join("pods/memory.max"), "1000\n").unwrap();
        assert_eq!(cgroup_limit("4:memory:/x\n0::/pods/one\n", root), Some(1000));
        fs::write(root.join("pods/one/memory.max"), "999\n").unwrap();
        assert_eq!(cgroup_limit("0::/pods/one\n", root), Some(999));
        // A container sees its own group as the root.
        fs::write(root.join("memory.max"), "500\n").unwrap();
        assert_eq!(cgroup_limit("0::/\n", root), Some(500));
        assert_eq!(cgroup_limit("4:memory:/x\n", root), None);
    }

    #[test]
    fn the_compiler_gets_the_memory_that_the_daemon_does_not_need() {
        assert_eq!(share_of(None), Ok(768 * MIB));
        assert_eq!(share_of(Some(8192 * MIB)), Ok(768 * MIB));
        assert_eq!(share_of(Some(512 * MIB)), Ok(448 * MIB));
        let error = share_of(Some(128 * MIB)).unwrap_err();
        assert!(error.contains("128 MiB") && error.contains("192 MiB"), "{error}");
    }
}
