//! The feature file that NFD reads labels from, in its folder `features.d`: one line `key=value` for each label.

use super::{Labels, OTHER_WRITER};
use berth_files::{self, Links};
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Most bytes that are read of a file; GFD's has some 50 lines.
const OTHER_BYTES_MAX: u64 = 64 * 1024;
/// Most other files of the folder that are read.
const OTHERS_MAX: usize = 64;

/// The labels in the format of the file.
#[must_use]
pub fn text(labels: &Labels) -> String {
    labels.iter().map(|(key, value)| format!("{key}={value}\n")).collect()
}

/// Replaces the labels of the file; without labels the file is removed. The replacement is atomic: a reader finds the
/// old or the new labels. Returns whether anything changed.
///
/// # Errors
/// If the folder does not exist or is not writable.
pub fn write(path: &Path, labels: &Labels) -> io::Result<bool> {
    if labels.is_empty() {
        return remove(path);
    }
    let text = text(labels);
    if berth_files::read_text(path, OTHER_BYTES_MAX).is_ok_and(|now| now == text) {
        return Ok(false);
    }
    // NFD ignores files whose name begins with a dot.
    let draft = draft_path(path)?;
    let replace = || -> io::Result<()> {
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // `create_new`: never through a symbolic link that exists there.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(&draft)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&draft, path)
    };
    replace().inspect_err(|_| {
        // The draft may not exist.
        let _ = fs::remove_file(&draft);
    })?;
    Ok(true)
}

/// Removes the file. Returns whether it existed.
///
/// # Errors
/// If it cannot be removed.
pub fn remove(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Another file of the folder with GFD's timestamp label: its writer writes the same labels.
#[must_use]
pub fn other_writer(path: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(path.parent()?).ok()?;
    let others = entries.flatten().map(|entry| entry.path()).filter(|other| other != path);
    others.take(OTHERS_MAX).find(|other| {
        let mut text = String::new();
        let mut read =
            || berth_files::open(other, Links::Follow)?.take(OTHER_BYTES_MAX).read_to_string(&mut text);
        read().is_ok() && text.lines().any(|line| line.trim_start().starts_with(OTHER_WRITER))
    })
}

fn draft_path(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(path.with_file_name(format!(".{}.new", name.to_string_lossy())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(value: &str) -> Labels {
        Labels::from([("nvidia.com/gpu.product".into(), value.into()), ("nvidia.com/b".into(), "1".into())])
    }

    #[test]
    fn the_file_is_replaced_and_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("berth");
        assert!(write(&path, &labels("A100")).unwrap());
        assert_eq!(fs::read_to_string(&path).unwrap(), "nvidia.com/b=1\nnvidia.com/gpu.product=A100\n");
        assert!(!write(&path, &labels("A100")).unwrap(), "unchanged");
        // A draft that a killed process left.
        fs::write(folder.path().join(".berth.new"), "half").unwrap();
        assert!(write(&path, &labels("H100")).unwrap());
        let names: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["berth"]);
        assert!(write(&path, &Labels::new()).unwrap() && !path.exists());
        assert!(!write(&path, &Labels::new()).unwrap());
        assert!(write(&folder.path().join("no/berth"), &labels("x")).is_err());
    }

    #[test]
    fn the_file_of_gfd_beside_it_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("berth");
        fs::write(&path, "nvidia.com/gfd.timestamp=1\n").unwrap();
        fs::write(folder.path().join("other"), "x=1\n").unwrap();
        fs::create_dir(folder.path().join("folder")).unwrap();
        fs::write(folder.path().join("binary"), [0xff, 0xfe]).unwrap();
        assert_eq!(other_writer(&path), None);
        let gfd = folder.path().join("gfd");
        fs::write(&gfd, "nvidia.com/gpu.count=1\nnvidia.com/gfd.timestamp=1700000000\n").unwrap();
        assert_eq!(other_writer(&path), Some(gfd));
    }
}
