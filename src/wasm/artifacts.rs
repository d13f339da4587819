//! Policy files: uploaded components and compiled artifacts.
//!
//! The files are `<digest>.wasm` and `<digest>-<compatibility>.cwasm` in `policies` under the state folder,
//! readable by the daemon's user alone. They are not in the store, since sled writes values of that size to
//! separate files without making them durable. A file is read through one descriptor and the digest is computed
//! from the bytes in memory, so that it cannot change between check and use.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

use super::limits::{ARTIFACT_BYTES_MAX, MODULE_BYTES_MAX};
use berth_kernel::ids::names::Digest;

/// The folder under the state folder.
const FOLDER: &str = "policies";
/// Suffix of artifacts.
const ARTIFACT: &str = ".cwasm";
/// Suffix of files that are being written.
const DRAFT: &str = ".draft";
/// Length of the digest at the start of a file name.
const DIGEST_CHARS: usize = 64;

/// The files of all versions.
pub(super) struct Artifacts {
    folder: PathBuf,
    compatibility: String,
}

/// sha256 of bytes.
pub(super) fn digest(bytes: &[u8]) -> Digest {
    let hex = format!("{:x}", Sha256::digest(bytes));
    // `parse` accepts 32 bytes in lower-case hex.
    #[allow(clippy::expect_used)]
    Digest::parse(&hex).expect("64 lower-case hex digits")
}

impl Artifacts {
    /// Creates the folder if it is missing.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub(super) fn open(state_dir: &Path, compatibility: String) -> io::Result<Self> {
        let folder = state_dir.join(FOLDER);
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        Ok(Self { folder, compatibility })
    }

    /// Writes both files, durable before `Ok`, and deletes artifacts of other releases.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub(super) fn save(&self, digest: &Digest, component: &[u8], artifact: &[u8]) -> io::Result<()> {
        let start = format!("{digest}-");
        self.delete_matching(|name| name.starts_with(&start));
        self.write(&component_name(digest), component)?;
        self.write(&self.artifact_name(digest), artifact)?;
        // Makes the names durable.
        File::open(&self.folder)?.sync_all()
    }

    /// The component with this digest; `None` if its file is missing or has changed.
    ///
    /// # Errors
    /// If the file cannot be read; the component may be intact.
    pub(super) fn component(&self, wanted: &Digest) -> io::Result<Option<Vec<u8>>> {
        self.read(&component_name(wanted), MODULE_BYTES_MAX, wanted)
    }

    /// At most `bytes_max` bytes of a component from offset `from`, fewer only at its end; `None` if its file is
    /// missing. The digest is not checked. Each piece opens the file again, so that slow readers hold no
    /// descriptor.
    ///
    /// # Errors
    /// If the file cannot be read; the component may be intact.
    pub(super) fn component_piece(
        &self,
        of: &Digest,
        from: u64,
        bytes_max: usize,
    ) -> io::Result<Option<Vec<u8>>> {
        let path = self.folder.join(component_name(of));
        found(&path, read_piece(&path, MODULE_BYTES_MAX, from, bytes_max))
    }

    /// The artifact of a version for this release and processor; `None` if its file is missing, cannot be
    /// read, or has another digest than `wanted`. The component can then be compiled again.
    pub(super) fn artifact(&self, of: &Digest, wanted: &Digest) -> Option<Vec<u8>> {
        self.read(&self.artifact_name(of), ARTIFACT_BYTES_MAX, wanted).unwrap_or_default()
    }

    /// Whether there is an artifact of a version for this release and processor. Does not check its digest.
    pub(super) fn has_artifact(&self, of: &Digest) -> bool {
        self.folder.join(self.artifact_name(of)).is_file()
    }

    /// Whether there is a component file with this digest. Does not check its digest.
    pub(super) fn has_component(&self, digest: &Digest) -> bool {
        self.folder.join(component_name(digest)).is_file()
    }

    /// Deletes the files of a version.
    pub(super) fn remove(&self, digest: &Digest) {
        self.delete_matching(|name| name.starts_with(digest.as_str()));
    }

    /// Deletes drafts of killed processes, and artifacts of versions that are not `known`. Keeps components: they
    /// are the only copies of uploads, and a restored store may refer to them.
    pub(super) fn tidy(&self, known: impl Fn(&Digest) -> bool) {
        self.delete_matching(|name| {
            let of = name.get(..DIGEST_CHARS).and_then(|digest| Digest::parse(digest).ok());
            of.is_some_and(|of| name.ends_with(DRAFT) || name.ends_with(ARTIFACT) && !known(&of))
        });
    }

    fn delete_matching(&self, matches: impl Fn(&str) -> bool) {
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if entry.file_name().to_str().is_some_and(&matches) {
                self.delete(&entry.path());
            }
        }
    }

    fn delete(&self, path: &Path) {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!("cannot delete {}: {error}", path.display());
            }
            Ok(()) | Err(_) => {}
        }
    }

    fn artifact_name(&self, digest: &Digest) -> String {
        format!("{digest}-{}{ARTIFACT}", self.compatibility)
    }

    fn read(&self, name: &str, bytes_max: usize, wanted: &Digest) -> io::Result<Option<Vec<u8>>> {
        let path = self.folder.join(name);
        let read = read_piece(&path, bytes_max, 0, bytes_max);
        let Some(bytes) = found(&path, read)? else { return Ok(None) };
        if digest(&bytes) != *wanted {
            tracing::warn!("{} has changed since Berth wrote it; it is not used", path.display());
            return Ok(None);
        }
        Ok(Some(bytes))
    }

    /// Writes a draft and renames it, so that no file is seen half written.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let draft = self.folder.join(format!("{name}{DRAFT}"));
        self.delete(&draft);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(&draft)?;
        let written = file.write_all(bytes).and_then(|()| file.sync_all());
        // A draft that stays would fill a full disk further.
        written.and_then(|()| fs::rename(&draft, self.folder.join(name))).inspect_err(|_| self.delete(&draft))
    }
}

fn component_name(digest: &Digest) -> String {
    format!("{digest}.wasm")
}

/// The result of a read; `None` if the file does not exist or is not a policy file.
fn found(path: &Path, read: io::Result<Vec<u8>>) -> io::Result<Option<Vec<u8>>> {
    match read {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            tracing::warn!("cannot read {}: {error}", path.display());
            // A link, or not a policy file: reading again would not help.
            let is_other_file = [Some(libc::ELOOP), None].contains(&error.raw_os_error());
            if is_other_file { Ok(None) } else { Err(error) }
        }
    }
}

/// At most `bytes_max` bytes from offset `from` of a regular file, not of a link to one, with at most `file_bytes_max`
/// bytes.
fn read_piece(path: &Path, file_bytes_max: usize, from: u64, bytes_max: usize) -> io::Result<Vec<u8>> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.len() > file_bytes_max as u64 {
        return Err(io::Error::other("not a policy file"));
    }
    let wanted = meta.len().saturating_sub(from).min(bytes_max as u64);
    file.seek(SeekFrom::Start(from.min(meta.len())))?;
    let mut read = Vec::with_capacity(usize::try_from(wanted).unwrap_or(0));
    file.take(wanted).read_to_end(&mut read)?;
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn files_are_private_and_a_changed_file_is_not_used() {
        let state = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(state.path(), "0123".into()).unwrap();
        let (component, artifact) = (b"component".as_slice(), b"artifact".as_slice());
        let (id, wanted) = (digest(component), digest(artifact));
        artifacts.save(&id, component, artifact).unwrap();
        artifacts.save(&id, component, artifact).unwrap();
        assert_eq!(artifacts.component(&id).unwrap().unwrap(), component);
        assert_eq!(artifacts.artifact(&id, &wanted).unwrap(), artifact);
        let piece = |from, bytes_max| artifacts.component_piece(&id, from, bytes_max).unwrap().unwrap();
        assert_eq!(
            [piece(0, 4), piece(4, 99), piece(9, 4), piece(u64::MAX, 4)],
            [&b"comp"[..], b"onent", b"", b""]
        );
        let folder = state.path().join(FOLDER);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        for entry in fs::read_dir(&folder).unwrap() {
            assert_eq!(mode(&entry.unwrap().path()), 0o600);
        }

        let file = folder.join(format!("{id}-0123.cwasm"));
        fs::write(&file, b"artifacT").unwrap();
        assert_eq!(artifacts.artifact(&id, &wanted), None);
        fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(folder.join(format!("{id}.wasm")), &file).unwrap();
        assert_eq!(artifacts.artifact(&id, &id), None, "a link is not followed");

        artifacts.remove(&id);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0);
        assert_eq!(artifacts.component(&id).unwrap(), None);
        assert_eq!(artifacts.component_piece(&id, 0, 4).unwrap(), None);
    }

    #[test]
    fn a_failed_write_leaves_no_draft_and_a_failed_read_is_an_error() {
        let state = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(state.path(), "0123".into()).unwrap();
        let (id, wanted) = (digest(b"c"), digest(b"a"));
        let folder = state.path().join(FOLDER);
        // A file cannot replace a folder that is not empty, not even for root.
        let inside = folder.join(format!("{id}-0123.cwasm")).join("inside");
        fs::create_dir_all(&inside).unwrap();
        artifacts.save(&id, b"c", b"a").unwrap_err();
        let names = || fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(names().all(|name| !name.to_str().unwrap().ends_with(DRAFT)), "{:?}", names());
        assert_eq!(artifacts.artifact(&id, &wanted), None);

        let moved = state.path().join("moved");
        fs::rename(&folder, &moved).unwrap();
        assert_eq!(artifacts.component(&id).unwrap(), None, "the folder is missing");
        fs::write(&folder, b"").unwrap();
        artifacts.component(&id).unwrap_err();
        fs::remove_file(&folder).unwrap();
        fs::rename(&moved, &folder).unwrap();
        assert_eq!(artifacts.component(&id).unwrap().unwrap(), b"c");
        fs::rename(inside.parent().unwrap(), folder.join(format!("{wanted}.wasm"))).unwrap();
        assert_eq!(artifacts.component(&wanted).unwrap(), None, "a folder is not a policy");
    }

    #[test]
    fn another_release_ignores_and_replaces_these_artifacts() {
        let state = tempfile::tempdir().unwrap();
        let older = Artifacts::open(state.path(), "aaaa".into()).unwrap();
        let newer = Artifacts::open(state.path(), "bbbb".into()).unwrap();
        let (id, wanted) = (digest(b"c"), digest(b"a"));
        older.save(&id, b"c", b"a").unwrap();
        assert_eq!(newer.artifact(&id, &wanted), None);
        newer.save(&id, b"c", b"a").unwrap();
        assert!(newer.artifact(&id, &wanted).is_some());
        assert_eq!(older.artifact(&id, &wanted), None);
    }
}
