//! The state file being watched: read again as soon as it has changed.

use std::error::Error;
use std::ffi::{CStr, OsStr};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs, ptr};

use crate::code::{Answer, Code};
use crate::install::STATE_FILE_NAME;
use crate::state::{State, StateError};

/// The environment variable that names the state file.
pub(crate) const CONFIG_VARIABLE: &str = "FAKE_NVML_CONFIG";

/// What distinguishes one version of the file from another.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

/// The state file and the newest state read from it.
pub(crate) struct Source {
    path: Option<PathBuf>,
    stamp: Option<Stamp>,
    state: Option<Arc<State>>,
    /// The last message on stderr, which is not repeated.
    last_message: String,
}

impl Source {
    /// A source that has read nothing yet.
    pub(crate) const fn new() -> Self {
        Self { path: None, stamp: None, state: None, last_message: String::new() }
    }

    /// The path of the file, once it was searched for.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Finds and reads the file, as `nvmlInit` does. Without a valid file there is no driver.
    pub(crate) fn open(&mut self) -> Answer {
        self.path = Some(config_path());
        self.stamp = None;
        self.state = None;
        self.refresh();
        if self.state.is_some() { Ok(()) } else { Err(Code::DriverNotLoaded) }
    }

    /// The newest state. If the file has become unreadable since `open`, the last good state stays.
    pub(crate) fn state(&mut self) -> Answer<Arc<State>> {
        self.refresh();
        self.state.clone().ok_or(Code::DriverNotLoaded)
    }

    fn refresh(&mut self) {
        let Some(path) = self.path.clone() else {
            return;
        };
        let stamp = stamp(&path);
        if stamp.is_some() && stamp == self.stamp {
            return;
        }
        // The stamp is taken before the content: a write in between is then seen as a change by the next call.
        self.stamp = stamp;
        match State::read(&path) {
            Ok(state) => {
                self.state = Some(Arc::new(state));
                self.last_message.clear();
            }
            // A file taken away later, as at the end of a test, is no mistake.
            Err(StateError::Io { source, .. })
                if self.state.is_some() && source.kind() == ErrorKind::NotFound => {}
            Err(error) => self.tell(&error),
        }
    }

    fn tell(&mut self, error: &dyn Error) {
        let mut line = format!("fake-nvml: {error}");
        let mut cause = error.source();
        while let Some(error) = cause {
            let _ = write!(line, ": {error}");
            cause = error.source();
        }
        line += match self.state {
            Some(_) => "; the last good state stays",
            None => "; set FAKE_NVML_CONFIG to a state file, or put fake-nvml.json beside the library",
        };
        if line != self.last_message {
            eprintln!("{line}");
            self.last_message = line;
        }
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let found = fs::metadata(path).ok()?;
    Some(Stamp {
        device: found.dev(),
        inode: found.ino(),
        bytes: found.size(),
        modified: (found.mtime(), found.mtime_nsec()),
    })
}

/// `$FAKE_NVML_CONFIG`, else `fake-nvml.json` in the folder of this library.
fn config_path() -> PathBuf {
    match env::var_os(CONFIG_VARIABLE) {
        Some(path) if !path.is_empty() => path.into(),
        _ => own_folder().unwrap_or_default().join(STATE_FILE_NAME),
    }
}

/// The inode of the file that this code was loaded from, although another file may have its path by now.
pub(crate) fn own_inode() -> Option<u64> {
    let here: fn() -> Option<u64> = own_inode;
    let address = here as usize;
    // "START-END PERMISSIONS OFFSET DEVICE INODE PATH", see proc_pid_maps(5).
    fs::read_to_string("/proc/self/maps").ok()?.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |text: &str| usize::from_str_radix(text, 16).ok();
        (hex(start)? <= address && address < hex(end)?).then(|| words.nth(3)?.parse().ok())?
    })
}

/// The folder of the file that this code was loaded from.
fn own_folder() -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: ptr::null(),
        dli_fbase: ptr::null_mut(),
        dli_sname: ptr::null(),
        dli_saddr: ptr::null_mut(),
    };
    let here: fn() -> Option<PathBuf> = own_folder;
    // SAFETY: `dladdr` only compares the address, and writes to `info`, which lives until it returns.
    let found = unsafe { libc::dladdr(here as *const libc::c_void, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: after success `dli_fname` leads to a NUL-terminated name that lives as long as the library is loaded, and
    // this code is part of it.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(Path::new(OsStr::from_bytes(name.to_bytes())).parent()?.to_owned())
}
