//! The devices that the specifications on a node name, by the rules of CDI runtimes.

use super::spec::Spec;
use std::collections::BTreeMap;
use std::error::Error as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Most specifications of one folder that are read.
const FILES_MAX: usize = 256;

/// The devices of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamedDevices {
    /// The file by the device's name.
    pub files: BTreeMap<String, PathBuf>,
    /// Devices that no runtime resolves, because these files of one folder name them.
    pub conflicts: BTreeMap<String, Vec<PathBuf>>,
    /// Files that cannot be read, with the reason. Runtimes skip them.
    pub broken: Vec<String>,
}

/// The devices of `kind` in these folders. A later folder has precedence over an earlier one; a device that two files
/// of one folder name is not resolved (CDI SPEC.md, "Device resolution").
#[must_use]
pub fn named_devices(folders: &[PathBuf], kind: &str) -> NamedDevices {
    let mut found = NamedDevices::default();
    for folder in folders {
        let mut names: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for path in spec_files(folder) {
            match Spec::read(&path) {
                Ok(spec) if spec.kind == kind => {
                    for device in spec.devices {
                        names.entry(device.name).or_default().push(path.clone());
                    }
                }
                Ok(_) => {}
                Err(error) => found.broken.push(match error.source() {
                    Some(cause) => format!("{error}: {cause}"),
                    None => error.to_string(),
                }),
            }
        }
        for (name, files) in names {
            found.conflicts.remove(&name);
            found.files.remove(&name);
            match <[PathBuf; 1]>::try_from(files) {
                Ok([file]) => drop(found.files.insert(name, file)),
                Err(files) => drop(found.conflicts.insert(name, files)),
            }
        }
    }
    found
}

/// Inode, size, and time of the last change in seconds and nanoseconds: enough to notice another content.
pub type FileState = (u64, u64, i64, i64);

/// The state of a file; `None` if it does not exist.
#[must_use]
pub fn file_state(file: &Path) -> Option<FileState> {
    let metadata = std::fs::metadata(file).ok()?;
    Some((metadata.ino(), metadata.size(), metadata.ctime(), metadata.ctime_nsec()))
}

/// The files that runtimes read in these folders. While they are the same, so are the devices that they name.
#[must_use]
pub fn file_states(folders: &[PathBuf]) -> Vec<(PathBuf, Option<FileState>)> {
    let files = folders.iter().flat_map(|folder| spec_files(folder));
    files.map(|file| (file_state(&file), file)).map(|(state, file)| (file, state)).collect()
}

/// The files of a folder that runtimes read, sorted.
fn spec_files(folder: &Path) -> Vec<PathBuf> {
    let entries =
        std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok().map(|e| e.path()));
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|e| e == "yaml" || e == "json")).collect();
    files.sort();
    files.truncate(FILES_MAX);
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, name: &str, kind: &str, devices: &[&str]) {
        std::fs::create_dir_all(folder).unwrap();
        let devices: Vec<_> = devices.iter().map(|name| format!("{{\"name\": \"{name}\"}}")).collect();
        let text =
            format!(r#"{{"cdiVersion": "0.5.0", "kind": "{kind}", "devices": [{}]}}"#, devices.join(","));
        std::fs::write(folder.join(name), text).unwrap();
    }

    #[test]
    fn a_device_named_twice_in_one_folder_is_not_resolved() {
        let root = tempfile::tempdir().unwrap();
        let folders = [root.path().join("etc"), root.path().join("run")];
        write(&folders[0], "a.json", "nvidia.com/gpu", &["0", "1", "2"]);
        write(&folders[0], "b.yaml", "nvidia.com/gpu", &["1", "2"]);
        write(&folders[0], "c.json", "berth/gpu", &["9"]);
        write(&folders[0], "ignored.txt", "nvidia.com/gpu", &["8"]);
        write(&folders[1], "a.json", "nvidia.com/gpu", &["2", "3"]);
        std::fs::write(folders[1].join("broken.json"), "{").unwrap();
        let found = named_devices(&folders, "nvidia.com/gpu");
        let names: Vec<_> = found.files.keys().map(String::as_str).collect();
        assert_eq!(names, ["0", "2", "3"]);
        assert_eq!(found.files["2"], folders[1].join("a.json"), "the later folder has precedence");
        let both = vec![folders[0].join("a.json"), folders[0].join("b.yaml")];
        assert_eq!(found.conflicts, BTreeMap::from([("1".to_owned(), both)]));
        assert!(found.broken[0].contains("broken.json is not a CDI specification: "), "{:?}", found.broken);
    }
}
