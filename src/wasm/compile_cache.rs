//! Compilers' replies in a folder of one user, so that commands that run one after another compile a module once.
//!
//! Not for the daemon: it runs only machine code whose digest its store has. Here the folder and its files
//! are trusted, like the cache of a build tool: one that another user owns or can write to is not used.

use std::fs::{self, DirBuilder, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::artifacts::digest;
use super::compile_child::FRAME_BYTES_MAX;

/// Most replies that are kept; the oldest is deleted for a new one. A reply may take 37 MB.
const REPLIES_MAX: usize = 8;
/// Suffix of a reply's file.
const REPLY: &str = ".reply";
/// Suffix of a reply that is being written.
const DRAFT: &str = ".draft";
/// Length of the checksum at the start of a file, bytes.
const CHECKSUM_BYTES: usize = 32;

/// The replies of one compiler program.
#[derive(Debug)]
pub(super) struct CompileCache {
    folder: PathBuf,
    /// A hash of what a reply depends on besides the module: wasmtime's settings, and the program that compiles.
    compiler: String,
}

impl CompileCache {
    /// `None` if the folder cannot be created or trusted, or the compiler's file cannot be read: then every module is
    /// compiled.
    pub(super) fn open(folder: &Path, program: &Path, compatibility: &str) -> Option<Self> {
        DirBuilder::new().recursive(true).mode(0o700).create(folder).ok()?;
        let own = fs::symlink_metadata(folder).ok()?;
        let is_private = own.is_dir() && is_private(&own);
        let compiler = fs::metadata(program).ok()?;
        let mut hasher = DefaultHasher::new();
        (compatibility, compiler.len(), compiler.mtime(), compiler.mtime_nsec()).hash(&mut hasher);
        is_private.then(|| Self { folder: folder.to_owned(), compiler: format!("{:016x}", hasher.finish()) })
    }

    /// The encoded reply to this module, unless its file is missing or damaged.
    pub(super) fn read(&self, module: &[u8]) -> Option<Vec<u8>> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let mut file = OpenOptions::new().read(true).custom_flags(flags).open(self.path(module)).ok()?;
        // Another user may have replaced the folder since, if the user can write to a parent of it.
        file.metadata().ok().filter(|own| own.is_file() && is_private(own))?;
        let mut checksum = [0; CHECKSUM_BYTES];
        file.read_exact(&mut checksum).ok()?;
        let mut frame = Vec::new();
        file.take(FRAME_BYTES_MAX as u64).read_to_end(&mut frame).ok()?;
        (Sha256::digest(&frame).as_slice() == checksum).then_some(frame)
    }

    /// Keeps the encoded reply to this module.
    ///
    /// # Errors
    /// If it cannot be written; nothing is lost but time.
    pub(super) fn write(&self, module: &[u8], frame: &[u8]) -> io::Result<()> {
        self.make_room()?;
        // The draft has a random name, so that no other command can open or replace it. It is deleted unless it is
        // renamed.
        let mut draft = tempfile::Builder::new().suffix(DRAFT).tempfile_in(&self.folder)?;
        draft.write_all(&Sha256::digest(frame)).and_then(|()| draft.write_all(frame))?;
        draft.persist(self.path(module))?;
        Ok(())
    }

    fn path(&self, module: &[u8]) -> PathBuf {
        self.folder.join(format!("{}-{}{REPLY}", digest(module), self.compiler))
    }

    /// Deletes the oldest replies, and drafts that commands left, so that one more can be written.
    fn make_room(&self) -> io::Result<()> {
        let mut files: Vec<_> = fs::read_dir(&self.folder)?
            .flatten()
            .filter(|entry| {
                let name = entry.file_name().into_encoded_bytes();
                [REPLY, DRAFT].iter().any(|suffix| name.ends_with(suffix.as_bytes()))
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        files.sort();
        let surplus = (files.len() + 1).saturating_sub(REPLIES_MAX);
        files.iter().take(surplus).try_for_each(|(_, path)| fs::remove_file(path))
    }
}

/// Whether only this user, or root, can have written it.
fn is_private(file: &fs::Metadata) -> bool {
    file.uid() == rustix::process::geteuid().as_raw() && file.mode() & (libc::S_IWGRP | libc::S_IWOTH) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn open(folder: &Path) -> Option<CompileCache> {
        CompileCache::open(folder, Path::new("/proc/self/exe"), "0123")
    }

    #[test]
    fn a_reply_is_read_again_and_a_damaged_one_is_not_used() {
        let state = tempfile::tempdir().unwrap();
        let folder = state.path().join("a/b");
        let cache = open(&folder).unwrap();
        assert_eq!(cache.read(b"module"), None);
        cache.write(b"module", b"reply").unwrap();
        cache.write(b"module", b"reply").unwrap();
        assert_eq!(cache.read(b"module").unwrap(), b"reply");
        assert_eq!(cache.read(b"another"), None);
        // With other settings of wasmtime no kept reply is read.
        let other = CompileCache::open(&folder, Path::new("/proc/self/exe"), "4567").unwrap();
        assert_eq!(other.read(b"module"), None);

        fs::write(cache.path(b"module"), [0; CHECKSUM_BYTES + 5]).unwrap();
        assert_eq!(cache.read(b"module"), None);
        fs::write(cache.path(b"module"), b"short").unwrap();
        assert_eq!(cache.read(b"module"), None);
    }

    #[test]
    fn a_folder_that_others_may_write_is_not_used() {
        let state = tempfile::tempdir().unwrap();
        assert!(open(state.path()).is_some());
        fs::set_permissions(state.path(), fs::Permissions::from_mode(0o770)).unwrap();
        assert!(open(state.path()).is_none());
        let link = state.path().join("link");
        std::os::unix::fs::symlink("/", &link).unwrap();
        assert!(open(&link).is_none(), "a link is not followed");
    }

    #[test]
    fn a_reply_that_others_may_write_is_not_read() {
        let state = tempfile::tempdir().unwrap();
        let cache = open(state.path()).unwrap();
        cache.write(b"module", b"reply").unwrap();
        fs::set_permissions(cache.path(b"module"), fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(cache.read(b"module"), None);
        fs::remove_file(cache.path(b"module")).unwrap();
        fs::create_dir(cache.path(b"module")).unwrap();
        assert_eq!(cache.read(b"module"), None);
    }

    /// In containers many commands have the same process id, and may share a home.
    #[test]
    fn commands_of_one_process_id_never_write_into_each_others_drafts() {
        let state = tempfile::tempdir().unwrap();
        let cache = open(state.path()).unwrap();
        let reply = |module: u8| vec![module; 100_000];
        std::thread::scope(|scope| {
            for module in 0..4 {
                let cache = &cache;
                scope.spawn(move || {
                    for _ in 0..50 {
                        // A draft that another one deletes to make room is not kept.
                        let _ = cache.write(&[module], &reply(module));
                        assert!(cache.read(&[module]).is_none_or(|found| found == reply(module)), "{module}");
                    }
                });
            }
        });
        assert!((0..4).any(|module| cache.read(&[module]).is_some()));
    }

    #[test]
    fn only_the_newest_replies_are_kept() {
        let state = tempfile::tempdir().unwrap();
        let cache = open(state.path()).unwrap();
        // Nothing else in the folder is deleted.
        fs::write(state.path().join("policy.wasm"), "uploaded").unwrap();
        fs::create_dir(state.path().join("folder")).unwrap();
        for module in 0..u8::try_from(REPLIES_MAX).unwrap() + 3 {
            cache.write(&[module], b"reply").unwrap();
            // File systems keep times in steps of some milliseconds.
            let age = std::time::Duration::from_secs(100 - u64::from(module));
            let time = std::time::SystemTime::now() - age;
            fs::File::options().write(true).open(cache.path(&[module])).unwrap().set_modified(time).unwrap();
        }
        assert_eq!(fs::read_dir(state.path()).unwrap().count(), REPLIES_MAX + 2);
        assert_eq!(cache.read(&[2]), None);
        assert!(cache.read(&[3]).is_some());
    }
}
