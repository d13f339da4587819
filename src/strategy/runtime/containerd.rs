//! containerd: its file, the files that this imports, and what each series of versions makes of them. The series differ
//! in how they move settings of older files to the names of newer ones, so one set of files can have several meanings.
//! `tests/runtimes` holds this to the programs' own answers.

use super::programs::Version;
use super::{FILES_MAX, VERSION_FIX, at, default_runtime, read_toml, spec_folders, strings, under};
use berth_kubelet::{Cdi, DefaultRuntime, Runtime};
use std::collections::{BTreeSet, VecDeque};
use std::path::{Component, Path, PathBuf};
use toml::{Table, Value};

/// The plugin that runs containers for the kubelet, up to version 2 of the file and from 3 on.
const OLD_PLUGIN: &str = "io.containerd.grpc.v1.cri";
const PLUGIN: &str = "io.containerd.cri.v1.runtime";
/// The plugins without which no container of the kubelet runs.
const CRI_PLUGINS: [&str; 3] = [OLD_PLUGIN, PLUGIN, "io.containerd.cri.v1.images"];
/// Keys of the old plugin's `containerd` that another plugin has today (containerd, `plugins/cri/runtime/plugin.go`).
const IMAGE_KEYS: [&str; 3] = ["snapshotter", "disable_snapshot_annotations", "discard_unpacked_layers"];

/// Versions that read files alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Series {
    /// 1.7. Knows no file of version 3; a plugin's section in a later file replaces the whole of it.
    V1_7,
    /// 2.0 to 2.2. The old plugin's section is moved once, after all files, and only if the last `version` is below 3.
    V2_0,
    /// 2.3.0 to 2.3.4. The section is moved in each file; an import may not have a newer version than the root file.
    V2_3,
    /// From 2.3.5 on. An import may have a newer version.
    V2_3_5,
    /// From 2.4 on. CDI cannot be turned off.
    V2_4,
}

impl Series {
    const ALL: [Self; 5] = [Self::V1_7, Self::V2_0, Self::V2_3, Self::V2_3_5, Self::V2_4];

    fn of(version: Version) -> Self {
        match (version.major, version.minor, version.patch) {
            (..=1, ..) => Self::V1_7,
            (2, 0..=2, _) => Self::V2_0,
            (2, 3, 0..=4) => Self::V2_3,
            (2, 3, _) => Self::V2_3_5,
            _ => Self::V2_4,
        }
    }

    /// Its first version.
    fn first(self) -> &'static str {
        match self {
            Self::V1_7 => "1.7",
            Self::V2_0 => "2.0",
            Self::V2_3 => "2.3",
            Self::V2_3_5 => "2.3.5",
            Self::V2_4 => "2.4",
        }
    }

    /// The newest version of the file that it reads.
    fn file_version(self) -> i64 {
        match self {
            Self::V1_7 => 2,
            Self::V2_0 => 3,
            Self::V2_3 | Self::V2_3_5 | Self::V2_4 => 4,
        }
    }
}

/// What Berth needs to know of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Settings {
    /// Whether it serves a kubelet.
    has_cri: bool,
    /// Whether CDI is on.
    has_cdi: bool,
    spec_folders: Vec<String>,
    default_runtime: String,
    /// The default runtime's program; empty if the file names none.
    program: String,
}

/// What a containerd with this file makes of it. `versions` are those that run with it, as far as they are known.
/// `None` if there is no such file, or it serves no kubelet.
pub(super) fn read(file: &Path, root: &Path, versions: &[Version]) -> Option<Runtime> {
    let path = under(root, file);
    // A containerd that runs without its file has its defaults.
    let files = match path.is_file() {
        true => read_files(&path, root),
        false if versions.is_empty() => return None,
        false => Ok(Vec::new()),
    };
    let shown = file.display().to_string();
    let series: BTreeSet<Series> = match versions {
        [] => Series::ALL.into(),
        known => known.iter().map(|version| Series::of(*version)).collect(),
    };
    let read: Vec<(Series, Result<Settings, String>)> = series
        .into_iter()
        .map(|series| (series, files.clone().and_then(|files| settings(files, series))))
        .collect();
    let works: Vec<(Series, &Settings)> =
        read.iter().filter_map(|(series, settings)| Some((*series, settings.as_ref().ok()?))).collect();
    // Without a version, those that refuse the files are not the one that runs with them.
    if works.is_empty() || (!versions.is_empty() && works.len() < read.len()) {
        let error = read.iter().rev().find_map(|(_, settings)| settings.clone().err()).unwrap_or_default();
        let why = format!("what containerd makes of {shown} is unknown: {error}");
        let fix = format!(
            "correct {shown} or what it imports (`containerd --config {shown} config dump` reads them), or let Berth's pod read \
             all of these files (chart: containerRuntime.configFolders)"
        );
        return Some(runtime(shown, Cdi::Unknown(why.clone()), fix, Err(why)));
    }
    if works.iter().all(|(_, settings)| !settings.has_cri) {
        return None;
    }
    let is_too_old = versions.iter().find(|version| **version < Version { major: 1, minor: 7, patch: 0 });
    let (cdi, fix) = match is_too_old {
        Some(old) => {
            (Cdi::Off(format!("containerd {old} has no CDI")), "upgrade containerd to 1.7 or newer".into())
        }
        None => cdi(&works, &shown),
    };
    Some(runtime(shown.clone(), cdi, fix, default(&works, &shown)))
}

/// A containerd whose files Berth does not find, as in a pod that does not mount them. It probably has the defaults of
/// its version, but that is not certain.
pub(super) fn without_file(version: Version) -> Runtime {
    let unknown =
        || "the configuration of containerd was not found (containerRuntime.configFiles)".to_owned();
    let cdi = if version.major < 2 {
        Cdi::Unknown(unknown())
    } else {
        let why = format!("containerd {version} has CDI on by default (its configuration was not found)");
        Cdi::On { folders: spec_folders(), why }
    };
    let fix = "name the configuration of containerd in containerRuntime.configFiles (chart: mount its folder by \
        containerRuntime.configFolders)";
    runtime("its defaults".into(), cdi, fix.into(), Err(unknown()))
}

fn runtime(
    file: String,
    cdi: Cdi,
    cdi_fix: String,
    default_runtime: Result<DefaultRuntime, String>,
) -> Runtime {
    Runtime { name: "containerd".into(), file, cdi, cdi_fix, default_runtime }
}

/// What all of them agree on, or what each of them has.
fn agreed<T: PartialEq>(
    works: &[(Series, &Settings)],
    of: impl Fn(&Settings) -> T,
) -> Result<T, Vec<(Series, T)>> {
    let mut answers: Vec<(Series, T)> =
        works.iter().map(|(series, settings)| (*series, of(settings))).collect();
    answers.dedup_by(|(_, next), (_, before)| next == before);
    match answers.len() {
        1 => Ok(answers.remove(0).1),
        _ => Err(answers),
    }
}

/// `1.7: off, from 2.0 on: on`.
fn differ<T>(answers: &[(Series, T)], text: impl Fn(&T) -> String) -> String {
    let by_series = answers.iter().enumerate().map(|(n, (series, answer))| {
        let first = series.first();
        let versions = if n == 0 { first.to_owned() } else { format!("from {first} on") };
        format!("{versions}: {}", text(answer))
    });
    by_series.collect::<Vec<_>>().join(", ")
}

fn cdi(works: &[(Series, &Settings)], shown: &str) -> (Cdi, String) {
    let on = |settings: &Settings| settings.has_cdi.then(|| settings.spec_folders.clone());
    match agreed(works, on) {
        Ok(Some(folders)) => {
            let folders = folders.into_iter().map(PathBuf::from).collect();
            (Cdi::On { folders, why: "containerd has CDI on".into() }, String::new())
        }
        Ok(None) => {
            let key = if works.iter().any(|(series, _)| *series == Series::V1_7) {
                format!("set enable_cdi = true in [plugins.\"{OLD_PLUGIN}\"]")
            } else {
                "remove enable_cdi = false, which is deprecated,".into()
            };
            let fix = format!("{key} in {shown} or the files that it imports, and restart containerd");
            (Cdi::Off(format!("containerd has CDI off ({shown})")), fix)
        }
        Err(answers) => {
            let text = |folders: &Option<Vec<String>>| match folders {
                Some(folders) => format!("on, with {}", folders.join(" and ")),
                None => "off".into(),
            };
            let why = format!(
                "whether containerd has CDI on by {shown} depends on its version, which is not known ({})",
                differ(&answers, text)
            );
            (Cdi::Unknown(why), VERSION_FIX.into())
        }
    }
}

fn default(works: &[(Series, &Settings)], shown: &str) -> Result<DefaultRuntime, String> {
    let default = |settings: &Settings| default_runtime(&settings.default_runtime, Some(&settings.program));
    agreed(works, default).map_err(|answers| {
        format!(
            "the default runtime of containerd by {shown} depends on its version, which is not known ({})",
            differ(&answers, |default| default.name.clone())
        )
    })
}

/// The files in the order in which containerd merges them, later ones over earlier ones: the root file, what it
/// imports, what that imports (containerd, `cmd/containerd/server/config/config.go`).
fn read_files(path: &Path, root: &Path) -> Result<Vec<Table>, String> {
    let mut files = Vec::new();
    let mut seen = BTreeSet::new();
    let mut pending = VecDeque::from([path.to_owned()]);
    while let Some(path) = pending.pop_front() {
        if !seen.insert(path.clone()) {
            continue;
        }
        let shown = Path::new("/").join(path.strip_prefix(root).unwrap_or(&path));
        if files.len() == FILES_MAX {
            return Err(format!("Berth reads at most {FILES_MAX} files, and there is {}", shown.display()));
        }
        let table = read_toml(&path).map_err(|error| format!("{}: {error}", shown.display()))?;
        for pattern in table.get("imports").map(strings).unwrap_or_default() {
            let folder = path.parent().unwrap_or(root);
            pending.extend(imported(Path::new(&pattern), folder, root)?);
        }
        files.push(table);
    }
    Ok(files)
}

/// The files of an import, which is a pattern if it has a `*`.
fn imported(import: &Path, folder: &Path, root: &Path) -> Result<Vec<PathBuf>, String> {
    let path = clean(&if import.is_absolute() { under(root, import) } else { folder.join(import) });
    let text = path.display().to_string();
    if !text.contains('*') {
        return Ok(vec![path]);
    }
    // The folder of a test may have characters that patterns have.
    let root_text = root.display().to_string();
    let rest = text.strip_prefix(&root_text).unwrap_or(&text);
    let pattern = format!("{}{rest}", glob::Pattern::escape(&root_text));
    let found = glob::glob(&pattern).map_err(|error| format!("{}: {error}", import.display()))?;
    Ok(found.flatten().take(FILES_MAX).collect())
}

/// The path without `.` and `..`.
fn clean(path: &Path) -> PathBuf {
    let mut cleaned = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(cleaned.pop()),
            part => cleaned.push(part),
        }
    }
    cleaned
}

/// What containerds of this series make of these files; an error if they refuse them.
fn settings(files: Vec<Table>, series: Series) -> Result<Settings, String> {
    let newest = series.file_version();
    let Merged { version, mut plugins, off } = merge(files, series)?;
    if version > newest {
        return Err(format!(
            "version {version} is newer than {newest}, the newest that containerd {} reads",
            series.first()
        ));
    }
    let has_full_names = version >= 2;
    let is_full = |name: &&String| match series {
        Series::V1_7 => name.starts_with("io.containerd.") && name.split('.').count() >= 4,
        _ => name.contains('.'),
    };
    // containerd 1.7 checks the sections as well, later ones take any.
    let sections = plugins.keys().filter(|_| series == Series::V1_7);
    if let Some(name) = off.iter().chain(sections).find(|name| has_full_names && !is_full(name)) {
        return Err(format!("{name} is not the full name of a plugin, such as {OLD_PLUGIN}"));
    }
    if series == Series::V2_0 && version < newest {
        move_old_plugin(&mut plugins);
    }
    let section = match series {
        Series::V1_7 if has_full_names => OLD_PLUGIN,
        Series::V1_7 => "cri",
        _ => PLUGIN,
    };
    let is_off =
        CRI_PLUGINS.iter().any(|name| off.contains(*name)) || (!has_full_names && off.contains("cri"));
    let empty = Table::new();
    let cri = plugins.get(section).and_then(Value::as_table).unwrap_or(&empty);
    Ok(of_section(cri, series, !is_off))
}

/// The files of one configuration as one.
struct Merged {
    /// The version by which its names are read.
    version: i64,
    plugins: Table,
    /// The plugins that are turned off.
    off: BTreeSet<String>,
}

/// Merges the files as containerds of this series do; an error if they refuse one.
fn merge(files: Vec<Table>, series: Series) -> Result<Merged, String> {
    let newest = series.file_version();
    // containerd 1.7 begins with version 1, later ones with their own.
    let mut version = if series == Series::V1_7 { 1 } else { newest };
    let mut root_version = 0;
    let (mut plugins, mut off) = (Table::new(), BTreeSet::new());
    for mut file in files {
        let mut own_version = match file.remove("version") {
            None => 0,
            Some(Value::Integer(number)) => number,
            Some(_) => return Err("version is not a number".into()),
        };
        let mut own = match file.remove("plugins") {
            Some(Value::Table(table)) => table,
            _ => Table::new(),
        };
        let mut own_off = file.get("disabled_plugins").map(strings).unwrap_or_default();
        if root_version == 0 {
            root_version = own_version;
        }
        if series == Series::V2_3 && own_version > root_version {
            return Err(format!(
                "an import of version {own_version} is newer than the root file's {root_version}"
            ));
        }
        match series {
            Series::V1_7 => {}
            Series::V2_0 => {
                if own_version < 2 {
                    rename_short_names(&mut own, &mut own_off);
                    own_version = version;
                }
            }
            Series::V2_3 | Series::V2_3_5 | Series::V2_4 => {
                if own_version < 2 {
                    rename_short_names(&mut own, &mut own_off);
                }
                if own_version < newest {
                    move_old_plugin(&mut own);
                    own_version = newest;
                }
            }
        }
        if own_version != 0 {
            version = own_version;
        }
        off.extend(own_off);
        if series == Series::V1_7 {
            plugins.extend(own);
        } else {
            overlay(&mut plugins, own);
        }
    }
    Ok(Merged { version, plugins, off })
}

fn of_section(cri: &Table, series: Series, has_cri: bool) -> Settings {
    let text = |path: &[&str]| at(cri, path).and_then(Value::as_str);
    let mut default_runtime = text(&["containerd", "default_runtime_name"]).unwrap_or("runc");
    let mut program = text(&["containerd", "runtimes", default_runtime, "options", "BinaryName"]);
    // A section that 1.7 still takes for the runtime `default`.
    if series == Series::V1_7
        && text(&["containerd", "default_runtime", "runtime_type"]).is_some_and(|kind| !kind.is_empty())
    {
        default_runtime = "default";
        program = text(&["containerd", "default_runtime", "options", "BinaryName"]);
    }
    let is_set_on = cri.get("enable_cdi").and_then(Value::as_bool);
    Settings {
        has_cri,
        has_cdi: series == Series::V2_4 || is_set_on.unwrap_or(series != Series::V1_7),
        spec_folders: cri
            .get("cdi_spec_dirs")
            .map_or_else(|| super::SPEC_FOLDERS.map(str::to_owned).into(), strings),
        default_runtime: default_runtime.to_owned(),
        program: program.unwrap_or_default().to_owned(),
    }
}

/// Gives the CRI plugin of a file of version 1 its full name.
fn rename_short_names(plugins: &mut Table, off: &mut [String]) {
    if let Some(section) = plugins.remove("cri") {
        plugins.insert(OLD_PLUGIN.into(), section);
    }
    for name in off.iter_mut().filter(|name| *name == "cri") {
        OLD_PLUGIN.clone_into(name);
    }
}

/// Moves the settings of the old plugin to the new one, where it has no such key: table by table only in `containerd`.
fn move_old_plugin(plugins: &mut Table) {
    let Some(Value::Table(old)) = plugins.get(OLD_PLUGIN).cloned() else { return };
    let Value::Table(new) = plugins.entry(PLUGIN).or_insert_with(|| Value::Table(Table::new())) else {
        return;
    };
    for (key, value) in old {
        match (key.as_str(), value) {
            ("containerd", Value::Table(old)) => {
                let Value::Table(new) = new.entry(key).or_insert_with(|| Value::Table(Table::new())) else {
                    continue;
                };
                for (key, value) in old.into_iter().filter(|(key, _)| !IMAGE_KEYS.contains(&key.as_str())) {
                    new.entry(key).or_insert(value);
                }
            }
            (_, value) => drop(new.entry(key).or_insert(value)),
        }
    }
}

/// Lays `above` over `below`, table by table; other values, lists included, are replaced.
fn overlay(below: &mut Table, above: Table) {
    for (key, value) in above {
        match (below.get_mut(&key), value) {
            (Some(Value::Table(old)), Value::Table(new)) => overlay(old, new),
            (_, value) => drop(below.insert(key, value)),
        }
    }
}

#[cfg(test)]
mod tests;
