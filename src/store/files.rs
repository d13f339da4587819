//! The store's files as a whole: kept in memory, and put back if sled has changed them.

use super::counter::{Counter, Digest};
use super::folder::{Folder, sync_folder, unless_missing};
use berth_kernel::node::ports::StoreError;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

/// The name of the file that is not sled's.
const COUNTER: &str = "counter";
/// Largest size of the files that are kept in memory while the store is opened. Of larger ones, a copy is opened first.
const FILES_KEPT_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Bytes of one read of a file.
const BUFFER_BYTES: usize = 64 * 1024;

/// sled's files with their bytes, sorted by path.
#[derive(Debug)]
pub(super) struct Files(Vec<(PathBuf, FileBytes)>);

/// The bytes of a file without the zeros at its end: sled fills the newest segment of its log with up to 2 MiB of them.
#[derive(Debug, PartialEq, Eq)]
struct FileBytes {
    head: Vec<u8>,
    /// The length of the file, with the zeros at its end.
    len: u64,
}

impl FileBytes {
    fn read(path: &Path) -> io::Result<Self> {
        static ZEROS: [u8; BUFFER_BYTES] = [0; BUFFER_BYTES];
        let mut file = File::open(path)?;
        let mut buffer = [0; BUFFER_BYTES];
        let (mut head, mut len) = (Vec::new(), 0);
        loop {
            let count = file.read(&mut buffer)?;
            let read = &buffer[..count];
            if read.is_empty() {
                return Ok(Self { head, len: len as u64 });
            }
            // One comparison of the whole buffer is much faster than a search for its last byte that is not zero.
            if *read != ZEROS[..read.len()] {
                let zeros = read.iter().rev().take_while(|byte| **byte == 0).count();
                head.resize(len, 0);
                head.extend_from_slice(&read[..read.len() - zeros]);
            }
            len += read.len();
        }
    }

    fn write(&self, path: &Path) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        file.write_all(&self.head)?;
        // Shortened first, so that the bytes after `head` are zeros, whatever the file contained.
        file.set_len(self.head.len() as u64)?;
        file.set_len(self.len)?;
        file.sync_all()
    }
}

impl Files {
    /// Reads the files of this folder; `None` if they have more than `bytes_max` bytes.
    fn read(data: &Path, bytes_max: u64) -> io::Result<Option<Self>> {
        let paths = collect_files(data)?;
        let mut bytes = 0;
        for path in &paths {
            bytes += fs::metadata(path)?.len();
        }
        if bytes > bytes_max {
            return Ok(None);
        }
        let read = |path: PathBuf| FileBytes::read(&path).map(|bytes| (path, bytes));
        paths.into_iter().map(read).collect::<io::Result<_>>().map(|files| Some(Self(files)))
    }

    /// The digest of these files, with their paths relative to `data`, and of `count`, the number of acknowledged
    /// appends.
    fn digest(&self, data: &Path, count: u64) -> Digest {
        let mut sha = Sha256::new();
        sha.update(count.to_le_bytes());
        for (path, FileBytes { head, len }) in &self.0 {
            let name = path.strip_prefix(data).unwrap_or(path).as_os_str().as_encoded_bytes();
            for length in [name.len() as u64, head.len() as u64, *len] {
                sha.update(length.to_le_bytes());
            }
            sha.update(name);
            sha.update(head);
        }
        sha.finalize().into()
    }

    /// Makes the folder's files equal to these again. Writes only what differs.
    fn restore(&self, data: &Path) -> io::Result<()> {
        for (path, bytes) in &self.0 {
            if !FileBytes::read(path).is_ok_and(|now| now == *bytes) {
                bytes.write(path)?;
            }
        }
        let is_new = |path: &PathBuf| !self.0.iter().any(|(known, _)| known == path);
        for path in collect_files(data)?.into_iter().filter(is_new) {
            unless_missing(fs::remove_file(path))?;
        }
        sync_folder(data)
    }
}

impl Folder {
    /// The files, if they are unchanged since a clean stop after `count` appends, and not too large to be kept in
    /// memory.
    pub(super) fn files_of_clean_stop(&self, counter: &Counter, count: u64) -> Option<Files> {
        let expected = counter.clean_stop_digest()?;
        let files = Files::read(&self.data(), FILES_KEPT_BYTES_MAX).ok()??;
        (files.digest(&self.data(), count) == expected).then_some(files)
    }

    /// The digest of the current files; `None` if they are too large to be kept in memory.
    pub(super) fn digest(&self, count: u64) -> io::Result<Option<Digest>> {
        let files = Files::read(&self.data(), FILES_KEPT_BYTES_MAX)?;
        Ok(files.map(|files| files.digest(&self.data(), count)))
    }

    /// Calls `open`, which opens sled's files. If that fails, sled may have repaired the files by truncating them: then
    /// they are made equal to `original` again, so that other tools can recover what they hold. A full disk is no
    /// damage, and has no room for that.
    pub(super) fn or_restore<T>(
        &self,
        original: &Files,
        open: impl FnOnce() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        open().or_else(|error| {
            // sled's threads may still write.
            let _ = self.wait_released()?;
            if !matches!(error, StoreError::Full { .. }) {
                original.restore(&self.data()).map_err(|e| self.errors.io("putting its files back", &e))?;
            }
            Err(error)
        })
    }
}

/// Every regular file below a folder except the counter, sorted.
fn collect_files(data: &Path) -> io::Result<Vec<PathBuf>> {
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
    fn only_the_zeros_at_the_end_of_a_file_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let (first, second) = (folder.path().join("first"), folder.path().join("second"));
        let zeros = vec![0; BUFFER_BYTES + 5];
        let whole = [&b"a"[..], &zeros, b"b", &zeros].concat();
        fs::write(&first, &whole).unwrap();
        fs::write(&second, [whole.as_slice(), b"longer"].concat()).unwrap();
        let bytes = FileBytes::read(&first).unwrap();
        assert_eq!((bytes.head.len(), bytes.len), (zeros.len() + 2, whole.len() as u64));
        assert_ne!(FileBytes::read(&second).unwrap(), bytes);
        bytes.write(&second).unwrap();
        assert_eq!(fs::read(&second).unwrap(), whole);
        fs::write(&second, b"").unwrap();
        assert_eq!(FileBytes::read(&second).unwrap(), FileBytes { head: Vec::new(), len: 0 });
    }

    #[test]
    fn the_digest_depends_on_names_lengths_and_bytes() {
        let digest = |files: &[(&str, &[u8])]| {
            let folder = tempfile::tempdir().unwrap();
            files.iter().for_each(|(name, bytes)| fs::write(folder.path().join(name), bytes).unwrap());
            Files::read(folder.path(), 100).unwrap().unwrap().digest(folder.path(), 7)
        };
        let files: [&[(&str, &[u8])]; 6] = [
            &[("db", b"ab"), ("snap.1", b"c")],
            &[("db", b"a"), ("snap.1", b"bc")],
            &[("db", b"ab\0"), ("snap.1", b"c")],
            &[("db", b"ab"), ("snap.1", b"c\0")],
            &[("db", b"ab"), ("snap.2", b"c")],
            &[("db", b"ab"), ("snap.1", b"c"), ("snap.2", b"")],
        ];
        let digests: std::collections::BTreeSet<Digest> = files.iter().map(|files| digest(files)).collect();
        assert_eq!(digests.len(), files.len());
        assert_eq!(digest(files[0]), digest(files[0]));
    }

    #[test]
    fn files_are_put_back_byte_for_byte() {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path();
        fs::create_dir(data.join("blobs")).unwrap();
        for (name, text) in [("db", "log\0\0"), ("snap.1", "old"), ("blobs/1", "blob"), ("counter", "7")] {
            fs::write(data.join(name), text).unwrap();
        }
        assert!(Files::read(data, 11).unwrap().is_none());
        let files = Files::read(data, 12).unwrap().unwrap();
        fs::write(data.join("db"), "longer than before").unwrap();
        fs::remove_file(data.join("snap.1")).unwrap();
        fs::write(data.join("snap.2"), "new").unwrap();
        fs::File::create(data.join("counter")).unwrap();
        files.restore(data).unwrap();
        let names = collect_files(data).unwrap();
        assert_eq!(names, ["blobs/1", "db", "snap.1"].map(|name| data.join(name)));
        assert_eq!(fs::read(data.join("db")).unwrap(), b"log\0\0");
        assert_eq!(fs::read(data.join("counter")).unwrap(), b"", "the counter is not sled's");
    }
}
