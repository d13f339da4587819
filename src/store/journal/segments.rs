//! The files of the journal: each is called by the first number in it, and the oldest go first.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// How large a file grows: a sixteenth of the default for all of them, so that dropping the oldest
/// loses a sixteenth of the past.
pub(super) const SEGMENT_BYTES: u64 = 4 * 1024 * 1024;

/// Most bytes that are read of a file: one that grew to its size takes one batch more.
pub(super) const SEGMENT_READ_MAX: u64 = 16 * SEGMENT_BYTES;

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    /// The smallest number that may be in it.
    pub(super) first: u64,
    pub(super) bytes: u64,
    /// When it was written last.
    pub(super) written: SystemTime,
}

/// All of them, oldest first.
#[derive(Debug)]
pub(super) struct Segments {
    folder: PathBuf,
    pub(super) all: VecDeque<Segment>,
}

impl Segments {
    /// Makes the folder if need be and looks what is in it. Other files are left alone.
    pub(super) fn open(folder: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut all = Vec::new();
        for found in fs::read_dir(folder)? {
            let found = found?;
            let first = found.file_name().to_str().and_then(|name| name.strip_suffix(".log")?.parse().ok());
            let (Some(first), about) = (first, found.metadata()?) else { continue };
            if about.is_file() {
                let written = about.modified()?;
                all.push(Segment { path: found.path(), first, bytes: about.len(), written });
            }
        }
        all.sort_by_key(|segment| segment.first);
        Ok(Self { folder: folder.to_owned(), all: all.into() })
    }

    /// Begins a file with this number.
    pub(super) fn begin(&mut self, first: u64) -> io::Result<File> {
        let path = self.folder.join(format!("{first:020}.log"));
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?;
        self.all.push_back(Segment { path, first, bytes: 0, written: SystemTime::now() });
        Ok(file)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.all.iter().map(|segment| segment.bytes).sum()
    }

    /// Deletes the oldest while all together have more bytes; the newest stays.
    ///
    /// # Errors
    /// If a file cannot be deleted; it is still on the list then.
    pub(super) fn prune(&mut self, bytes_max: u64) -> io::Result<()> {
        while self.all.len() > 1 && self.bytes() > bytes_max {
            self.drop_oldest()?;
        }
        Ok(())
    }

    /// Deletes the oldest if it is older; the newest stays.
    ///
    /// # Errors
    /// As [`Segments::prune`].
    pub(super) fn prune_aged(&mut self, age_max: Duration, now: SystemTime) -> io::Result<()> {
        let age = |segment: &Segment| now.duration_since(segment.written).unwrap_or_default();
        if self.all.len() > 1 && self.all.front().is_some_and(|oldest| age(oldest) > age_max) {
            self.drop_oldest()?;
        }
        Ok(())
    }

    /// Deletes the oldest, but never the newest.
    ///
    /// # Errors
    /// As [`Segments::prune`].
    pub(super) fn drop_oldest(&mut self) -> io::Result<()> {
        if self.all.len() > 1
            && let Some(oldest) = self.all.front()
        {
            match fs::remove_file(&oldest.path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => self.all.pop_front(),
            };
        }
        Ok(())
    }

    /// Deletes the newest if nothing could be written to it.
    pub(super) fn drop_empty(&mut self) {
        if let Some(newest) = self.all.pop_back_if(|newest| newest.bytes == 0) {
            // Best effort: an empty file does no harm.
            let _ = fs::remove_file(newest.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn by_age_one_file_goes_at_a_time_and_the_newest_never() {
        let folder = tempfile::tempdir().unwrap();
        let mut segments = Segments::open(folder.path()).unwrap();
        for first in [1, 5, 9] {
            drop(segments.begin(first).unwrap());
        }
        let (week, now) = (Duration::from_secs(7 * 24 * 3600), SystemTime::now());
        let mut left = |now| {
            segments.prune_aged(week, now).unwrap();
            segments.all.iter().map(|segment| segment.first).collect::<Vec<_>>()
        };
        assert_eq!(left(now), [1, 5, 9]);
        assert_eq!(left(now - week), [1, 5, 9], "a clock that was set back");
        let decade = now + 520 * week;
        assert_eq!(left(decade), [5, 9]);
        assert_eq!(left(decade), [9]);
        assert_eq!(left(decade), [9]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
