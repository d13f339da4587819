//! A container's first process that is suspended (SIGSTOP) before its first instruction.
//!
//! A frozen cgroup would not do: runc refuses to start a container that is paused (`runc/start.go`), while it waits for one
//! whose process is suspended.
//!
//! While a process is suspended, the runtime's start of its container waits, and with that, as during a stop, the lock of
//! the runtime's plugins: a registration would block all calls of the runtime. So the guard does not register meanwhile. If
//! it is killed, the next guard finds the process by a file, and resumes it before it registers.

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// The folder of the files of suspended processes, beside the guard's socket. Each file has the id of a process as its name
/// and the start of the process as its content.
#[derive(Clone, Debug)]
pub(crate) struct SuspendedFolder(PathBuf);

impl SuspendedFolder {
    /// The folder beside this socket.
    pub(crate) fn beside(socket: &Path) -> Self {
        Self(format!("{}.suspended", socket.display()).into())
    }

    /// Resumes the processes that a guard has left suspended, or ends them if they may not run without their limits.
    pub(crate) fn resume_all(&self, is_required: bool) {
        for entry in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let start = fs::read_to_string(entry.path()).unwrap_or_default();
            let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if let Some(pid) = pid.filter(|pid| start_of(*pid).as_ref() == Some(&start))
                && let Ok(process) = open(pid)
            {
                tracing::warn!(pid, "a process that an earlier guard had suspended is resumed");
                let _ = pidfd_send_signal(&process, end_signal(is_required));
            }
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A suspended process. It is resumed when this is dropped, or killed if it may not run without its limits.
#[derive(Debug)]
pub(crate) struct SuspendedProcess {
    process: OwnedFd,
    file: PathBuf,
    at_end: Signal,
}

impl SuspendedProcess {
    /// Suspends the process with this id. `is_required`: whether it may not run without its limits.
    ///
    /// # Errors
    /// If there is none, if its file cannot be written, or if the guard lacks the rights.
    pub(crate) fn suspend(pid: u32, folder: &SuspendedFolder, is_required: bool) -> io::Result<Self> {
        let process = open(pid)?;
        let start = start_of(pid).ok_or(ErrorKind::NotFound)?;
        fs::create_dir_all(&folder.0)?;
        let file = folder.0.join(pid.to_string());
        fs::write(&file, start)?;
        // From here on the drop removes the file.
        let suspended = Self { process, file, at_end: end_signal(is_required) };
        pidfd_send_signal(&suspended.process, Signal::STOP)?;
        Ok(suspended)
    }

    /// Resumes it.
    pub(crate) fn resume(mut self) {
        self.at_end = Signal::CONT;
    }

    /// Kills it, and with it its container.
    pub(crate) fn kill(mut self) {
        self.at_end = Signal::KILL;
    }
}

impl Drop for SuspendedProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = pidfd_send_signal(&self.process, self.at_end);
        let _ = fs::remove_file(&self.file);
    }
}

/// Kills the first process of a container that is to be refused: not every runtime ends the start for a plugin's refusal.
pub(crate) fn kill(pid: u32) {
    if let Ok(process) = open(pid) {
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}

fn open(pid: u32) -> io::Result<OwnedFd> {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

fn end_signal(is_required: bool) -> Signal {
    if is_required { Signal::KILL } else { Signal::CONT }
}

/// When a process started, clock ticks since the boot (`proc_pid_stat(5)`, field 22). Its name, before that, may have
/// spaces and parentheses.
fn start_of(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let after_name = &stat[stat.rfind(')')? + 1..];
    after_name.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command};
    use tempfile::TempDir;

    fn sleeping() -> Child {
        Command::new("sleep").arg("600").spawn().unwrap()
    }

    fn folder() -> (SuspendedFolder, TempDir) {
        let folder = tempfile::tempdir().unwrap();
        (SuspendedFolder::beside(&folder.path().join("guard.sock")), folder)
    }

    /// Waits until the process is suspended, or runs or waits.
    fn wait_for(process: &Child, is_suspended: bool) {
        let path = format!("/proc/{}/stat", process.id());
        while fs::read_to_string(&path).unwrap().contains(") T ") != is_suspended {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_process_is_suspended_until_it_is_resumed_or_killed() {
        let (folder, _root) = folder();
        let mut process = sleeping();
        let suspend = |is_required| SuspendedProcess::suspend(process.id(), &folder, is_required).unwrap();
        let suspended = suspend(false);
        wait_for(&process, true);
        drop(suspended);
        wait_for(&process, false);
        let suspended = suspend(true);
        wait_for(&process, true);
        suspended.resume();
        wait_for(&process, false);
        suspend(false).kill();
        assert_eq!(process.wait().unwrap().signal(), Some(9));
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
    }

    #[test]
    fn a_process_that_may_not_run_without_limits_is_killed_when_the_guard_ends() {
        let (folder, _root) = folder();
        let mut process = sleeping();
        drop(SuspendedProcess::suspend(process.id(), &folder, true).unwrap());
        assert_eq!(process.wait().unwrap().signal(), Some(9));
    }

    #[test]
    fn the_next_guard_resumes_what_a_killed_one_has_left_and_nothing_else() {
        let (folder, _root) = folder();
        let (mut left, mut other) = (sleeping(), sleeping());
        for process in [&left, &other] {
            std::mem::forget(SuspendedProcess::suspend(process.id(), &folder, false).unwrap());
            wait_for(process, true);
        }
        // The id belongs to another process by now.
        fs::write(folder.0.join(other.id().to_string()), "1").unwrap();
        fs::write(folder.0.join("no-number"), "1").unwrap();
        folder.resume_all(false);
        wait_for(&left, false);
        wait_for(&other, true);
        assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
        for process in [&mut left, &mut other] {
            kill(process.id());
            process.wait().unwrap();
        }
    }

    #[test]
    fn a_process_is_not_suspended_if_its_file_cannot_be_written() {
        let (folder, _root) = folder();
        fs::write(&folder.0, "a file in the place of the folder").unwrap();
        let mut process = sleeping();
        SuspendedProcess::suspend(process.id(), &folder, false).unwrap_err();
        wait_for(&process, false);
        kill(process.id());
        process.wait().unwrap();
    }

    #[test]
    fn there_must_be_such_a_process() {
        let (folder, _root) = folder();
        for pid in [0, u32::MAX, i32::MAX.unsigned_abs()] {
            SuspendedProcess::suspend(pid, &folder, false).unwrap_err();
        }
    }
}
