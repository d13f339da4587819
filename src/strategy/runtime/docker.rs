//! Docker behind cri-dockerd: Docker must have CDI on, and cri-dockerd must pass the devices of a pod to it.

use super::programs::{Program, Version};
use super::{BYTES_MAX, VERSION_FIX, default_runtime, spec_folders, under};
use berth_kubelet::{Cdi, Runtime};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The first version of Docker with CDI, which had to be turned on (`features.cdi`), and the first that has it on
/// unless it is turned off (moby, `daemon/command/daemon.go`, `cdiEnabled`).
const FIRST: Version = Version { major: 25, minor: 0, patch: 0 };
const FIRST_BY_DEFAULT: Version = Version { major: 28, minor: 2, patch: 0 };
/// The last release of cri-dockerd that leaves out the CDI devices of a pod (cri-dockerd, `core/container_create.go`).
const LAST_WITHOUT: Version = Version { major: 0, minor: 4, patch: 3 };
/// A Docker with NVIDIA's runtime needs no CDI.
const RUNTIME_FIX: &str =
    "use containerd or CRI-O, since released versions of cri-dockerd (up to 0.4.3) pass no CDI devices";

/// What Docker with this file does; `None` if there is no such file. `version`: that of Docker, if the node object
/// shows it.
pub(super) fn read(
    file: &Path,
    root: &Path,
    version: Option<Version>,
    programs: &[Program],
) -> Option<Runtime> {
    let path = under(root, file);
    path.is_file().then_some(())?;
    let shown = file.display().to_string();
    let text = berth_files::read_text(&path, BYTES_MAX).map_err(|error| error.to_string());
    let settings =
        text.and_then(|text| serde_json::from_str::<Value>(&text).map_err(|error| error.to_string()));
    let runtime = |cdi, fix: &str, default_runtime| {
        Some(Runtime {
            name: "Docker".into(),
            file: shown.clone(),
            cdi,
            cdi_fix: fix.into(),
            default_runtime,
        })
    };
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => {
            let why = format!("what Docker makes of {shown} is unknown: {error}");
            let fix = "correct the file: `dockerd --validate` reads it";
            return runtime(Cdi::Unknown(why.clone()), fix, Err(why));
        }
    };
    let name = settings["default-runtime"].as_str().unwrap_or("runc");
    let default = default_runtime(name, settings["runtimes"][name]["path"].as_str());
    let running =
        |name: &str| programs.iter().find(|program| program.name == name).map(|program| program.version);
    let docker = of_docker(&settings, &shown, version.or_else(|| running("dockerd")));
    let (cdi, fix) = match (docker, running("cri-dockerd")) {
        (Cdi::Off(why), _) => (Cdi::Off(why), RUNTIME_FIX),
        (_, Some(found)) if found <= LAST_WITHOUT => {
            (Cdi::Off(format!("cri-dockerd {found} passes no CDI devices to Docker")), RUNTIME_FIX)
        }
        (docker, Some(_)) => (docker, VERSION_FIX),
        (_, None) => {
            let why = format!(
                "whether the pods of Docker get CDI devices is unknown, since cri-dockerd up to {LAST_WITHOUT} passes none, and \
                 its version is not known"
            );
            (Cdi::Unknown(why), RUNTIME_FIX)
        }
    };
    runtime(cdi, fix, Ok(default))
}

/// Whether Docker itself has CDI on.
fn of_docker(settings: &Value, shown: &str, version: Option<Version>) -> Cdi {
    let folders = match settings["cdi-spec-dirs"].as_array() {
        Some(folders) => folders
            .iter()
            .filter_map(Value::as_str)
            .filter(|folder| !folder.is_empty())
            .map(PathBuf::from)
            .collect(),
        None => spec_folders(),
    };
    let is_on = match (settings["features"]["cdi"].as_bool(), version) {
        (Some(false), _) => Some(false),
        _ if folders.is_empty() => Some(false),
        (Some(true), Some(version)) => Some(version >= FIRST),
        (Some(true), None) => Some(true),
        (None, Some(version)) => Some(version >= FIRST_BY_DEFAULT),
        (None, None) => None,
    };
    match is_on {
        Some(true) => Cdi::On { folders, why: "Docker has CDI on".into() },
        Some(false) => Cdi::Off(format!("Docker has CDI off ({shown})")),
        None => Cdi::Unknown(format!(
            "whether Docker has CDI on depends on its version, which is not known ({shown} has no features.cdi; from \
             {FIRST_BY_DEFAULT} on it is on)"
        )),
    }
}
