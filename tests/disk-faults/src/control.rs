//! What is wrong at present: one line in a file, written by a test and read before each call.

use std::io;
use std::path::{Path, PathBuf};

/// Names the folder whose disk it is.
pub(crate) const UNDER: &str = "DISK_FAULTS_UNDER";
/// Names the file that says what is wrong.
pub(crate) const CONTROL: &str = "DISK_FAULTS_CONTROL";
/// The library's file, as cargo builds it.
const BUILT_NAME: &str = "libdisk_faults.so";

/// What is wrong with the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// No room: what would write or make a file fails with ENOSPC.
    Full,
    /// No room for data: what would write fails with ENOSPC, but empty files can be made, as on most full disks.
    NoData,
    /// Read-only, as a file system becomes after an error: what would change anything fails with EROFS,
    /// through open descriptors too.
    ReadOnly,
}

/// The faults of one program's disk.
#[derive(Clone, Debug)]
pub struct Faults {
    under: PathBuf,
    control: PathBuf,
}

impl Faults {
    /// No fault yet, of the disk below `under`; `control` is a file elsewhere.
    #[must_use]
    pub fn new(under: &Path, control: &Path) -> Self {
        Self { under: under.to_owned(), control: control.to_owned() }
    }

    /// The environment of the program.
    ///
    /// # Errors
    /// If the library is not where cargo leaves it: beside the running test.
    pub fn environment(&self) -> io::Result<Vec<(String, String)>> {
        let text = |path: &Path| path.display().to_string();
        Ok(vec![
            ("LD_PRELOAD".into(), library()?),
            (UNDER.into(), text(&self.under)),
            (CONTROL.into(), text(&self.control)),
        ])
    }

    /// From now on, or after so many more calls that change something; `None` heals the disk.
    ///
    /// # Errors
    /// If the control file cannot be written.
    pub fn set(&self, fault: Option<(Fault, u32)>) -> io::Result<()> {
        let text = match fault {
            None => String::new(),
            Some((Fault::Full, after)) => format!("full {after}"),
            Some((Fault::NoData, after)) => format!("nodata {after}"),
            Some((Fault::ReadOnly, after)) => format!("readonly {after}"),
        };
        // In one step: the program reads it at any time.
        let new = self.control.with_extension("new");
        std::fs::write(&new, text)?;
        std::fs::rename(new, &self.control)
    }
}

/// The library to preload.
pub(crate) fn library() -> io::Result<String> {
    let library = std::env::current_exe()?.with_file_name(BUILT_NAME);
    if !library.is_file() {
        return Err(io::Error::other(format!("{} was not built", library.display())));
    }
    Ok(library.display().to_string())
}

/// The file's line, as the program reads it.
pub(crate) fn parse(text: &[u8]) -> Option<(Fault, u32)> {
    let (what, after) = std::str::from_utf8(text).ok()?.split_once(' ')?;
    let fault = match what {
        "full" => Fault::Full,
        "nodata" => Fault::NoData,
        "readonly" => Fault::ReadOnly,
        _ => return None,
    };
    Some((fault, after.parse().ok()?))
}
