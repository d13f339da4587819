//! Distinguishes the states of a file without reading it.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A state of the file at a path, links followed. It differs after a write, after a replacement by rename, and after
/// the kubelet has pointed the link `..data` of a mounted ConfigMap at another folder. The inode number alone is not
/// enough, since a file system may reuse it at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileVersion {
    device: u64,
    inode: u64,
    bytes: u64,
    /// Seconds and nanoseconds since 1970.
    modified: (i64, i64),
    /// The same of the last change of content, owner, mode or name.
    changed: (i64, i64),
}

impl FileVersion {
    /// The present state; `None` if there is nothing that can be examined at this path.
    #[must_use]
    pub fn of(path: &Path) -> Option<Self> {
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn writes_renames_and_links_make_another_version() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let file = at("config.yaml");
        assert_eq!(FileVersion::of(&file), None);
        for data in ["..1", "..2"] {
            fs::create_dir(at(data)).unwrap();
            fs::write(at(data).join("config.yaml"), "same").unwrap();
        }
        symlink("..1", at("..data")).unwrap();
        symlink("..data/config.yaml", &file).unwrap();
        let first = FileVersion::of(&file);
        assert!(first.is_some() && first == FileVersion::of(&file));
        symlink("..2", at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
        let second = FileVersion::of(&file);
        assert_ne!(first, second);
        fs::write(at("..2").join("config.yaml"), "longer").unwrap();
        let third = FileVersion::of(&file);
        assert_ne!(second, third);
        fs::write(at("new"), "longer").unwrap();
        fs::rename(at("new"), &file).unwrap();
        assert_ne!(third, FileVersion::of(&file));
    }
}
