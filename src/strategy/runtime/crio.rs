//! CRI-O: its file, and the drop-ins of the folder beside it (CRI-O, `pkg/config/config.go`, `UpdateFromPath`).

use super::programs::Version;
use super::{FILES_MAX, at, default_runtime, read_toml, spec_folders, strings, under};
use berth_kubelet::{Cdi, Runtime};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// The first minor version of CRI-O 1.x whose default runtime is crun; it was runc before.
const CRUN_MINOR: u32 = 31;

/// What a CRI-O with this file makes of it; `None` if neither the file nor a drop-in exists. CDI is on from 1.23 on,
/// which is older than any kubelet that Berth supports.
pub(super) fn read(file: &Path, root: &Path, version: Option<Version>) -> Option<Runtime> {
    let path = under(root, file);
    let mut files: Vec<PathBuf> = path.is_file().then(|| path.clone()).into_iter().collect();
    drop_ins(&path.with_file_name("crio.conf.d"), &mut files);
    files.first()?;
    let shown = file.display().to_string();
    let runtime = |cdi, cdi_fix, default_runtime| {
        Some(Runtime { name: "CRI-O".into(), file: shown.clone(), cdi, cdi_fix, default_runtime })
    };
    let read = match files.get(FILES_MAX) {
        Some(file) => Err(format!("Berth reads at most {FILES_MAX} files, and there is {}", file.display())),
        None => merged(&files),
    };
    let settings = match read {
        Ok(settings) => settings,
        Err(error) => {
            let why = format!("what CRI-O makes of {shown} and its drop-ins is unknown: {error}");
            let fix = format!("correct the files: `crio --config {shown} config` reads them");
            return runtime(Cdi::Unknown(why.clone()), fix, Err(why));
        }
    };
    let text = |path: &[&str]| at(&settings, path).and_then(Value::as_str);
    let default = match text(&["default_runtime"]).filter(|name| !name.is_empty()) {
        Some(name) => default_runtime(name, text(&["runtimes", name, "runtime_path"])),
        None => {
            let is_crun = version.map(|version| (version.major, version.minor) >= (1, CRUN_MINOR));
            let name = match is_crun {
                Some(true) => "crun".to_owned(),
                Some(false) => "runc".to_owned(),
                None => format!("its own (crun from 1.{CRUN_MINOR} on, else runc)"),
            };
            default_runtime(&name, None)
        }
    };
    let folders = match settings.get("cdi_spec_dirs") {
        Some(folders) => strings(folders).into_iter().map(PathBuf::from).collect(),
        None => spec_folders(),
    };
    let cdi = Cdi::On { folders, why: "CRI-O has CDI on".into() };
    runtime(cdi, String::new(), Ok(default))
}

/// All files below a folder, whatever their names, in the order of a walk through it.
fn drop_ins(folder: &Path, files: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        // A link to a folder is not walked through, and CRI-O fails to read it as a file.
        if path.is_dir() && !path.is_symlink() {
            drop_ins(&path, files);
        } else {
            files.push(path);
        }
        if files.len() > FILES_MAX {
            return;
        }
    }
}

/// `[crio.runtime]` of these files. Each key of a later file replaces that of an earlier one, and a runtime is replaced
/// as a whole.
fn merged(files: &[PathBuf]) -> Result<Table, String> {
    let mut merged = Table::new();
    for file in files {
        let mut table = read_toml(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let section = table.get_mut("crio").and_then(|crio| crio.get_mut("runtime"));
        let Some(Value::Table(section)) = section else { continue };
        for (key, value) in std::mem::take(section) {
            match (merged.get_mut(&key), value) {
                (Some(Value::Table(old)), Value::Table(new)) => old.extend(new),
                (_, value) => drop(merged.insert(key, value)),
            }
        }
    }
    Ok(merged)
}
