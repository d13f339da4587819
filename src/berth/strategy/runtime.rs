//! What the configuration files of container runtimes show: whether they have CDI, and which runtime is the default.

use berth_kubelet::Runtime;
use std::collections::BTreeSet;
use std::fs::read_dir;
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Largest configuration file that is read, bytes.
const BYTES_MAX: u64 = 1024 * 1024;
/// Most files that one configuration is made of.
const FILES_MAX: usize = 64;
/// The plugin of containerd 2 that runs containers for the kubelet, and its predecessor's section.
const PLUGINS: [&str; 2] = ["io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"];

/// The runtimes whose configuration exists, below `root`, which is `/` outside tests. `running`: name and version of the
/// runtime that the kubelet uses (`containerd://2.1.4`), if the API server shows it; others are then left out.
pub(crate) fn runtimes(files: &[PathBuf], root: &Path, running: Option<&str>) -> Vec<Runtime> {
    let (name, version) = running.and_then(|running| running.split_once("://")).unzip();
    let mut found: Vec<Runtime> = files.iter().filter_map(|file| read_one(file, root, version)).collect();
    let scheme = |runtime: &Runtime| match runtime.name.as_str() {
        "CRI-O" => "cri-o",
        "Docker" => "docker",
        _ => "containerd",
    };
    if let Some(name) = name {
        found.retain(|runtime| scheme(runtime) == name);
    }
    // A containerd without a file has its defaults; without its version they are unknown.
    if let (true, Some("containerd"), Some(version)) = (found.is_empty(), name, version) {
        found.push(containerd(&Table::new(), "its defaults", Some(version)));
    }
    found
}

fn read_one(file: &Path, root: &Path, version: Option<&str>) -> Option<Runtime> {
    let under = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    let path = under(file);
    let shown = file.display().to_string();
    match file.file_name()?.to_str()? {
        "daemon.json" => docker(&path, &shown),
        name if name.starts_with("crio") => crio(&path, &shown),
        _ => {
            path.is_file().then_some(())?;
            let mut all = Table::new();
            let mut seen = BTreeSet::new();
            merge_containerd(&path, root, &mut all, &mut seen);
            Some(containerd(&all, &shown, version))
        }
    }
}

/// Reads a TOML file; an unreadable one is reported and counts as empty.
fn read_toml(path: &Path) -> Table {
    let text = berth_files::read_text(path, BYTES_MAX).map_err(|error| error.to_string());
    match text.and_then(|text| text.parse::<Table>().map_err(|error| error.message().to_owned())) {
        Ok(table) => table,
        Err(error) => {
            tracing::debug!(file = %path.display(), "the container runtime's configuration cannot be read: {error}");
            Table::new()
        }
    }
}

/// Adds a file and its imports, which have precedence (containerd, `docs/man/containerd-config.toml.5.md`).
fn merge_containerd(path: &Path, root: &Path, all: &mut Table, seen: &mut BTreeSet<PathBuf>) {
    if seen.len() >= FILES_MAX || !seen.insert(path.to_owned()) {
        return;
    }
    let mut table = read_toml(path);
    let imports = table.remove("imports");
    overlay(all, table);
    let patterns = imports.as_ref().and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    for pattern in patterns {
        let pattern = Path::new(pattern);
        let absolute = match pattern.strip_prefix("/") {
            Ok(relative) => root.join(relative),
            Err(_) => path.parent().unwrap_or(root).join(pattern),
        };
        for file in matching(&absolute) {
            merge_containerd(&file, root, all, seen);
        }
    }
}

/// The files of a pattern with at most one `*`, in its last part, sorted: the patterns that containerd's documentation and
/// NVIDIA's toolkit use.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let (Some(folder), Some(name)) = (pattern.parent(), pattern.file_name().and_then(|name| name.to_str()))
    else {
        return Vec::new();
    };
    let Some((start, end)) = name.split_once('*') else { return vec![pattern.to_owned()] };
    let entries =
        read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok().map(|entry| entry.path()));
    let mut files: Vec<_> = entries
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
        })
        .collect();
    files.sort();
    files
}

/// Lays `above` over `below`, table by table.
fn overlay(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => overlay(old, new),
            (_, value) => drop(below.insert(key, value)),
        }
    }
}

/// The value at this path.
fn at<'t>(table: &'t Table, path: &[&str]) -> Option<&'t Value> {
    let (first, rest) = path.split_first()?;
    let value = table.get(*first)?;
    if rest.is_empty() { Some(value) } else { at(value.as_table()?, rest) }
}

/// Whether this runtime is NVIDIA's, by its name or its program.
fn is_nvidia(name: &str, program: Option<&str>) -> bool {
    name == "nvidia" || program.is_some_and(|program| program.contains("nvidia-container-runtime"))
}

/// containerd has CDI on by default from version 2 on; 1.7 has it off, and a file does not show which of the two reads it,
/// unless it has the layout of version 3.
fn containerd(table: &Table, file: &str, version: Option<&str>) -> Runtime {
    let in_plugins =
        |rest: &[&str]| PLUGINS.iter().find_map(|plugin| at(table, &[&["plugins", *plugin], rest].concat()));
    let layout = table.get("version").and_then(Value::as_integer).unwrap_or(0);
    let major = version.and_then(|version| version.split('.').next()?.parse::<u32>().ok());
    let minor = version.and_then(|version| version.split('.').nth(1)?.parse::<u32>().ok());
    let by_default = match (major, layout) {
        (Some(major), _) => Some(major >= 2),
        (None, 3..) => Some(true),
        (None, _) => None,
    };
    let is_too_old = matches!((major, minor), (Some(0), _) | (Some(1), Some(..=6)));
    let set = in_plugins(&["enable_cdi"]).and_then(Value::as_bool);
    let default =
        in_plugins(&["containerd", "default_runtime_name"]).and_then(Value::as_str).unwrap_or("runc");
    let program =
        in_plugins(&["containerd", "runtimes", default, "options", "BinaryName"]).and_then(Value::as_str);
    Runtime {
        name: "containerd".into(),
        file: file.into(),
        has_cdi: if is_too_old { Some(false) } else { set.or(by_default) },
        cdi_fix: format!(
            "turn CDI on in {file} (containerd 1.7: enable_cdi = true in [plugins.\"{}\"]; 2.x has it on unless it is turned off; \
             {} before 1.7 has none) and restart containerd",
            PLUGINS[1], "containerd"
        ),
        default_runtime: (default.into(), is_nvidia(default, program)),
    }
}

/// CRI-O has CDI on from 1.23 on, which is older than any kubelet that Berth supports.
fn crio(path: &Path, file: &str) -> Option<Runtime> {
    let folder = path.with_file_name("crio.conf.d");
    let files: Vec<_> = std::iter::once(path.to_owned()).chain(matching(&folder.join("*"))).collect();
    let files: Vec<_> = files.into_iter().filter(|file| file.is_file()).take(FILES_MAX).collect();
    files.first()?;
    let mut all = Table::new();
    for file in files {
        overlay(&mut all, read_toml(&file));
    }
    let runtime = |rest: &[&str]| at(&all, &[&["crio", "runtime"], rest].concat()).and_then(Value::as_str);
    let default = runtime(&["default_runtime"]).unwrap_or("crun");
    Some(Runtime {
        name: "CRI-O".into(),
        file: file.into(),
        has_cdi: Some(true),
        cdi_fix: "upgrade CRI-O".into(),
        default_runtime: (
            default.into(),
            is_nvidia(default, runtime(&["runtimes", default, "runtime_path"])),
        ),
    })
}

/// Docker behind cri-dockerd, which passes no CDI devices.
fn docker(path: &Path, file: &str) -> Option<Runtime> {
    let text = berth_files::read_text(path, BYTES_MAX).ok()?;
    let settings: serde_json::Value = serde_json::from_str(&text).ok()?;
    let default = settings["default-runtime"].as_str().unwrap_or("runc");
    let program = settings["runtimes"][default]["path"].as_str();
    Some(Runtime {
        name: "Docker".into(),
        file: file.into(),
        has_cdi: Some(false),
        cdi_fix: "use containerd or CRI-O, since cri-dockerd passes no CDI devices".into(),
        default_runtime: (default.into(), is_nvidia(default, program)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RUNTIME_FILES;
    use std::fs;

    fn found(files: &[(&str, &str)], running: Option<&str>) -> Vec<(String, Option<bool>, String, bool)> {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let paths = RUNTIME_FILES.map(PathBuf::from);
        let runtimes = runtimes(&paths, root.path(), running);
        runtimes.into_iter().map(|r| (r.name, r.has_cdi, r.default_runtime.0, r.default_runtime.1)).collect()
    }

    fn containerd(text: &str, running: Option<&str>) -> (Option<bool>, String, bool) {
        let (_, has_cdi, name, is_nvidia) =
            found(&[("/etc/containerd/config.toml", text)], running).remove(0);
        (has_cdi, name, is_nvidia)
    }

    #[test]
    fn containerd_has_cdi_by_its_file_or_its_version() {
        let runc = |has_cdi| (has_cdi, "runc".to_owned(), false);
        let old = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\n";
        let new = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\n";
        assert_eq!(containerd("version = 3", None), runc(Some(true)));
        assert_eq!(containerd(&format!("{new}enable_cdi = false"), None), runc(Some(false)));
        assert_eq!(containerd(old, None), runc(None));
        assert_eq!(containerd(&format!("{old}enable_cdi = true"), None), runc(Some(true)));
        assert_eq!(containerd(old, Some("containerd://1.7.27")), runc(Some(false)));
        assert_eq!(containerd(old, Some("containerd://2.1.4")), runc(Some(true)));
        assert_eq!(
            containerd(&format!("{old}enable_cdi = true"), Some("containerd://1.6.9")),
            runc(Some(false))
        );
        assert_eq!(containerd("version = [", None), runc(None), "a broken file shows nothing");
    }

    #[test]
    fn the_default_runtime_is_found_in_imported_files_too() {
        let import = "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\", \"other.toml\"]\n";
        let nvidia =
            "[plugins.\"io.containerd.cri.v1.runtime\".containerd]\ndefault_runtime_name = \"nvidia\"\n";
        let files =
            [("/etc/containerd/config.toml", import), ("/etc/containerd/conf.d/99-nvidia.toml", nvidia)];
        assert_eq!(found(&files, None), [("containerd".to_owned(), Some(true), "nvidia".to_owned(), true)]);
        let by_program = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"gpu\"\n\
            [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.gpu.options]\nBinaryName = \"/usr/bin/nvidia-container-runtime\"\n";
        assert_eq!(containerd(by_program, None), (None, "gpu".to_owned(), true));
        // It imports itself.
        let files = [("/etc/containerd/config.toml", "version = 3\nimports = [\"config.toml\"]")];
        assert_eq!(found(&files, None).len(), 1);
    }

    #[test]
    fn cri_o_and_docker_are_read_and_the_running_one_counts() {
        let crio = "[crio.runtime]\ndefault_runtime = \"nvidia\"\n";
        let docker =
            r#"{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}"#;
        let files = [
            ("/etc/crio/crio.conf.d/99-nvidia.toml", crio),
            ("/etc/docker/daemon.json", docker),
            ("/etc/containerd/config.toml", "version = 3"),
        ];
        let all = found(&files, None);
        assert_eq!(all.iter().map(|r| r.0.as_str()).collect::<Vec<_>>(), ["containerd", "CRI-O", "Docker"]);
        assert_eq!(
            found(&files, Some("cri-o://1.33.0")),
            [("CRI-O".to_owned(), Some(true), "nvidia".to_owned(), true)]
        );
        assert_eq!(
            found(&files, Some("docker://27.0")),
            [("Docker".to_owned(), Some(false), "nvidia".to_owned(), true)]
        );
        assert!(found(&[], None).is_empty());
        let defaults = found(&[], Some("containerd://2.2.9"));
        assert_eq!(defaults, [("containerd".to_owned(), Some(true), "runc".to_owned(), false)]);
    }
}
