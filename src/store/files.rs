//! The store's files as a whole: kept in memory, and put back if sled has changed them.

use super::folder::{Folder, sync_folder, unless_missing};
use berth_kernel::ports::StoreError;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// The name of the file that is not sled's.
const COUNTER: &str = "counter";

/// sled's files with their bytes.
#[derive(Debug)]
pub(super) struct Files(Vec<(PathBuf, Vec<u8>)>);

impl Files {
    /// Reads the files of this folder; `None` if they have more than `bytes_max` bytes.
    pub(super) fn read(data: &Path, bytes_max: u64) -> io::Result<Option<Self>> {
        let paths = collect_files(data)?;
        let mut bytes = 0;
        for path in &paths {
            bytes += fs::metadata(path)?.len();
        }
        if bytes > bytes_max {
            return Ok(None);
        }
        let read = |path: PathBuf| fs::read(&path).map(|bytes| (path, bytes));
        paths.into_iter().map(read).collect::<io::Result<_>>().map(|files| Some(Self(files)))
    }

    /// Their bytes in all.
    pub(super) fn bytes(&self) -> u64 {
        self.0.iter().map(|(_, bytes)| bytes.len() as u64).sum()
    }

    /// Whether the folder has files of the same names now.
    pub(super) fn has_names_of(&self, data: &Path) -> io::Result<bool> {
        Ok(collect_files(data)?.iter().eq(self.0.iter().map(|(path, _)| path)))
    }

    /// Makes the folder's files equal to these again. Writes only what differs.
    fn restore(&self, data: &Path) -> io::Result<()> {
        for (path, bytes) in &self.0 {
            if fs::read(path).is_ok_and(|now| now == *bytes) {
                continue;
            }
            let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
            file.write_all(bytes)?;
            file.set_len(bytes.len() as u64)?;
            file.sync_all()?;
        }
        let is_new = |path: &PathBuf| !self.0.iter().any(|(known, _)| known == path);
        for path in collect_files(data)?.into_iter().filter(is_new) {
            unless_missing(fs::remove_file(path))?;
        }
        sync_folder(data)
    }
}

impl Folder {
    /// Calls `open` with the folder of sled's files. If that fails, sled may have repaired the files by truncating them: then
    /// they are made equal to `original` again, so that other tools can recover what they hold.
    pub(super) fn or_restore<T>(
        &self,
        original: &Files,
        open: impl FnOnce(&Path) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        open(&self.data()).or_else(|error| {
            // sled's threads may still write.
            let _ = self.wait_released()?;
            original.restore(&self.data()).map_err(|e| self.errors.io("putting its files back", &e))?;
            Err(error)
        })
    }
}

/// Every regular file below a folder except the counter, sorted.
pub(super) fn collect_files(data: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![data.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    let counter = data.join(COUNTER);
    files.retain(|path| *path != counter);
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_put_back_byte_for_byte() {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path();
        fs::create_dir(data.join("blobs")).unwrap();
        for (name, text) in [("db", "log"), ("snap.1", "old"), ("blobs/1", "blob"), ("counter", "7")] {
            fs::write(data.join(name), text).unwrap();
        }
        assert!(Files::read(data, 9).unwrap().is_none());
        let files = Files::read(data, 10).unwrap().unwrap();
        assert_eq!(files.bytes(), 10);
        assert!(files.has_names_of(data).unwrap());
        fs::write(data.join("db"), "longer than before").unwrap();
        fs::remove_file(data.join("snap.1")).unwrap();
        fs::write(data.join("snap.2"), "new").unwrap();
        assert!(!files.has_names_of(data).unwrap());
        fs::File::create(data.join("counter")).unwrap();
        files.restore(data).unwrap();
        let names = collect_files(data).unwrap();
        assert_eq!(names, ["blobs/1", "db", "snap.1"].map(|name| data.join(name)));
        assert_eq!(fs::read(data.join("db")).unwrap(), b"log");
        assert_eq!(fs::read(data.join("counter")).unwrap(), b"", "the counter is not sled's");
    }
}
