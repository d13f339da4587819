//! What the configuration files of container runtimes show: whether they have CDI, and which runtime is the default.
//! What a file means depends on the version of the program that reads it, so the version is asked of the API server or
//! of the program that runs; where it is not known and the versions differ, the answer is that it is unknown.

mod containerd;
mod crio;
mod docker;
mod programs;

use berth_kubelet::{DefaultRuntime, Runtime};
use programs::Version;
pub(super) use programs::{Program, Programs};
use std::path::{Path, PathBuf};

/// Largest configuration file that is read, bytes.
const BYTES_MAX: u64 = 1024 * 1024;
/// Most files that one configuration is made of.
const FILES_MAX: usize = 64;
/// The folders in which each runtime reads CDI specifications by default.
const SPEC_FOLDERS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// How Berth learns the version of a runtime.
const VERSION_FIX: &str = "let Berth use the API server, whose node object shows the version of the runtime \
    (docs/cluster.md), or run it on the node itself while the runtime runs";

/// What is known of the runtime that the kubelet uses.
#[derive(Clone, Copy, Default)]
pub(super) struct Running<'a> {
    /// Its name and version (`containerd://2.1.4`), if the API server shows them.
    pub(super) node_object: Option<&'a str>,
    /// The programs that run on the node, as far as this process sees them.
    pub(super) programs: &'a [Program],
}

/// The runtimes whose configuration exists, below `root`, which is `/` outside tests. Where it is known which of them
/// the kubelet uses, the others are left out.
pub(super) fn runtimes(files: &[PathBuf], root: &Path, running: Running<'_>) -> Vec<Runtime> {
    let (scheme, version) = running.node_object.and_then(|text| text.split_once("://")).unzip();
    let version = version.and_then(Version::parse);
    let runs = |name: &str| running.programs.iter().any(|program| program.name == name);
    let others_run = runs("crio") || runs("cri-dockerd");
    let with_file = |file: &Path| -> Vec<Version> {
        let programs = running.programs.iter().filter(|program| program.name == "containerd");
        programs.filter(|program| program.config_file() == file).map(|program| program.version).collect()
    };
    let is_one_known = files.iter().any(|file| !with_file(file).is_empty());
    let mut found = Vec::new();
    for file in files {
        match file.file_name().and_then(|name| name.to_str()).unwrap_or_default() {
            "daemon.json" => {
                let is_left_out = runs("crio") || is_one_known;
                if scheme.map_or(runs("cri-dockerd") || !is_left_out, |scheme| scheme == "docker") {
                    found.extend(docker::read(file, root, version, running.programs));
                }
            }
            name if name.starts_with("crio") => {
                let is_left_out = runs("cri-dockerd") || is_one_known;
                if scheme.map_or(runs("crio") || !is_left_out, |scheme| scheme == "cri-o") {
                    found.extend(crio::read(file, root, version));
                }
            }
            _ => {
                let of_programs = with_file(file);
                let is_left_out = others_run || is_one_known;
                let (is_wanted, versions) = match scheme {
                    // A file that Berth does not find may be hidden from it; a program that runs here has none.
                    Some(scheme) => {
                        let is_wanted = scheme == "containerd" && under(root, file).is_file();
                        (is_wanted, version.into_iter().collect())
                    }
                    None => (!of_programs.is_empty() || !is_left_out, of_programs),
                };
                if is_wanted {
                    found.extend(containerd::read(file, root, &versions));
                }
            }
        }
    }
    if let (true, Some("containerd"), Some(version)) = (found.is_empty(), scheme, version) {
        found.push(containerd::without_file(version));
    }
    found
}

/// The path on the node, below `root`.
pub(super) fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

/// Reads a TOML file.
fn read_toml(path: &Path) -> Result<toml::Table, String> {
    let text = berth_files::read_text(path, BYTES_MAX).map_err(|error| error.to_string())?;
    text.parse::<toml::Table>().map_err(|error| error.message().to_owned())
}

/// The value at this path.
fn at<'t>(table: &'t toml::Table, path: &[&str]) -> Option<&'t toml::Value> {
    let (first, rest) = path.split_first()?;
    let value = table.get(*first)?;
    if rest.is_empty() { Some(value) } else { at(value.as_table()?, rest) }
}

/// The strings of a list.
fn strings(value: &toml::Value) -> Vec<String> {
    value.as_array().into_iter().flatten().filter_map(|value| value.as_str().map(str::to_owned)).collect()
}

fn spec_folders() -> Vec<PathBuf> {
    SPEC_FOLDERS.map(PathBuf::from).into()
}

/// A default runtime, which is NVIDIA's by its name or its program.
fn default_runtime(name: &str, program: Option<&str>) -> DefaultRuntime {
    let is_nvidia =
        name == "nvidia" || program.is_some_and(|program| program.contains("nvidia-container-runtime"));
    DefaultRuntime { name: name.to_owned(), is_nvidia }
}

#[cfg(test)]
mod tests;
