//! The journal's files. Each is named by its first decision number; the oldest are deleted first.

use crate::folder::unless_missing;
use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Bytes at which a new file is started: a sixteenth of the journal's default limit, so that deleting
/// the oldest file loses a sixteenth of the decisions.
pub(super) const SEGMENT_BYTES: u64 = 4 * 1024 * 1024;

/// Most bytes that are read of a file; a full file may exceed [`SEGMENT_BYTES`] by one write.
pub(super) const SEGMENT_READ_MAX: u64 = 16 * SEGMENT_BYTES;

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) path: PathBuf,
    /// The smallest decision number that it may contain.
    pub(super) first: u64,
    pub(super) bytes: u64,
    /// Time of the last write.
    pub(super) modified: SystemTime,
}

/// All files, oldest first.
#[derive(Debug)]
pub(super) struct Segments {
    folder: PathBuf,
    pub(super) list: VecDeque<Segment>,
}

impl Segments {
    /// Creates the folder if it does not exist, and lists its journal files. Other files are ignored.
    pub(super) fn open(folder: &Path) -> io::Result<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
        let mut list = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let first = entry.file_name().to_str().and_then(|name| name.strip_suffix(".log")?.parse().ok());
            let (Some(first), metadata) = (first, entry.metadata()?) else { continue };
            if metadata.is_file() {
                let modified = metadata.modified()?;
                list.push(Segment { path: entry.path(), first, bytes: metadata.len(), modified });
            }
        }
        list.sort_by_key(|segment| segment.first);
        Ok(Self { folder: folder.to_owned(), list: list.into() })
    }

    /// Creates the file whose first decision has this number.
    pub(super) fn create(&mut self, first: u64) -> io::Result<File> {
        let path = self.folder.join(format!("{first:020}.log"));
        let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&path)?;
        self.list.push_back(Segment { path, first, bytes: 0, modified: SystemTime::now() });
        Ok(file)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.list.iter().map(|segment| segment.bytes).sum()
    }

    /// Deletes the oldest files while the total exceeds `bytes_max`, but never the newest.
    ///
    /// # Errors
    /// If a file cannot be deleted; it stays in the list.
    pub(super) fn prune(&mut self, bytes_max: u64) -> io::Result<()> {
        while self.list.len() > 1 && self.bytes() > bytes_max {
            self.drop_oldest()?;
        }
        Ok(())
    }

    /// Deletes the oldest file if it is older than `age_max`, but never the newest.
    ///
    /// # Errors
    /// As [`Segments::prune`].
    pub(super) fn prune_aged(&mut self, age_max: Duration, now: SystemTime) -> io::Result<()> {
        let age = |segment: &Segment| now.duration_since(segment.modified).unwrap_or_default();
        if self.list.len() > 1 && self.list.front().is_some_and(|oldest| age(oldest) > age_max) {
            self.drop_oldest()?;
        }
        Ok(())
    }

    /// Deletes the oldest file, but never the newest.
    ///
    /// # Errors
    /// As [`Segments::prune`].
    pub(super) fn drop_oldest(&mut self) -> io::Result<()> {
        if self.list.len() > 1
            && let Some(oldest) = self.list.front()
        {
            unless_missing(fs::remove_file(&oldest.path))?;
            self.list.pop_front();
        }
        Ok(())
    }

    /// Deletes the newest file if it is empty.
    pub(super) fn drop_empty(&mut self) {
        if let Some(newest) = self.list.pop_back_if(|newest| newest.bytes == 0) {
            // Best effort: an empty file does no harm.
            let _ = fs::remove_file(newest.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pruning_by_age_deletes_one_file_per_call_and_never_the_newest() {
        let folder = tempfile::tempdir().unwrap();
        let mut segments = Segments::open(folder.path()).unwrap();
        for first in [1, 5, 9] {
            drop(segments.create(first).unwrap());
        }
        let (week, now) = (Duration::from_secs(7 * 24 * 3600), SystemTime::now());
        let mut remaining_at = |now| {
            segments.prune_aged(week, now).unwrap();
            segments.list.iter().map(|segment| segment.first).collect::<Vec<_>>()
        };
        assert_eq!(remaining_at(now), [1, 5, 9]);
        assert_eq!(remaining_at(now - week), [1, 5, 9], "a clock that was set back");
        let decade = now + 520 * week;
        assert_eq!(remaining_at(decade), [5, 9]);
        assert_eq!(remaining_at(decade), [9]);
        assert_eq!(remaining_at(decade), [9]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
