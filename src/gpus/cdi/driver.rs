//! The files of an installed NVIDIA driver, as nvidia-ctk finds them (NVIDIA Container Toolkit 1.20, `pkg/nvcdi`).

use super::folders::{FileState, file_state};
use berth_kernel::hardware::device_nodes::HostFolder;
use berth_kernel::ids::pci::PciBusId;
use object::Endianness;
use object::elf::{DT_SONAME, DT_STRSZ, DT_STRTAB, FileHeader64};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _};
use object::read::{ReadCache, ReadRef as _};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Folders of libraries, in the order of nvidia-ctk; the last ones are Google's images, NixOS and others.
const LIBRARY_FOLDERS: [&str; 15] = [
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib/x86_64-linux-gnu/nvidia/current",
    "lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "run/opengl-driver/lib",
    "opt/nvidia/lib64",
];
/// A library of the driver whose name has another version.
const UNVERSIONED_LIBRARY: &str = "/libnvidia-nvvm70.so.";
/// Folders of programs, in the order of a search path.
const PROGRAM_FOLDERS: [&str; 6] = ["usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin"];
/// Programs that containers get.
const PROGRAMS: [&str; 7] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-imex",
    "nvidia-imex-ctl",
];
/// Sockets of the driver's daemons, and MPS' folder; of several places of one, the first that exists counts.
const SOCKETS: [&[&str]; 3] = [
    &["run/nvidia-persistenced/socket", "var/run/nvidia-persistenced/socket"],
    &["run/nvidia-fabricmanager/socket", "var/run/nvidia-fabricmanager/socket"],
    &["tmp/nvidia-mps"],
];
/// Where the NVIDIA Container Toolkit installs its hook: its packages, and the GPU operator.
const HOOKS: [&str; 3] = [
    "/usr/bin/nvidia-cdi-hook",
    "/usr/local/bin/nvidia-cdi-hook",
    "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
];
/// Subcommands that every version of the program has.
const OLD_SUBCOMMANDS: [&str; 2] = ["create-symlinks", "update-ldcache"];
/// Largest program that is searched for names, bytes. Version 1.20 has 12 MB.
const PROGRAM_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// nvidia-cdi-hook on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HookProgram {
    /// Its path on the host.
    pub(super) path: PathBuf,
    /// Where this process sees it, if it does.
    file: PathBuf,
}

impl HookProgram {
    /// What changes when the program, or the one that it starts, is replaced.
    pub(super) fn states(&self) -> [Option<FileState>; 2] {
        [file_state(&self.file), file_state(&self.real())]
    }

    /// The program that a script of this name starts.
    fn real(&self) -> PathBuf {
        let mut real = self.file.clone().into_os_string();
        real.push(".real");
        real.into()
    }

    /// Those of these subcommands that the program has. A container with a hook that its program does not know does not
    /// start, so a name counts only if the program contains it. The GPU operator installs a script that starts the
    /// program with `.real` at its end.
    pub(super) fn known<'n>(&self, subcommands: &[&'n str]) -> Vec<&'n str> {
        let read = |path: &Path| berth_files::read(path, PROGRAM_BYTES_MAX).unwrap_or_default();
        let programs = [read(&self.file), read(&self.real())];
        let has = |name: &str| programs.iter().any(|program| contains(program, name.as_bytes()));
        subcommands.iter().copied().filter(|name| OLD_SUBCOMMANDS.contains(name) || has(name)).collect()
    }
}

/// Whether `text` is in `bytes`.
fn contains(bytes: &[u8], text: &[u8]) -> bool {
    let Some(first) = text.first() else { return true };
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| byte == first) {
        rest = &rest[at..];
        if rest.starts_with(text) {
            return true;
        }
        rest = &rest[1..];
    }
    false
}

/// A driver's files cannot be found.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No library of the driver.
    #[error(
        "no libcuda.so.VERSION or libnvidia-ml.so.VERSION under {0}: name the folder that holds the driver in nvidiaDriverRoot \
         (containerEdits.nvidiaDriverRoot)"
    )]
    NoLibrary(PathBuf),
}

/// Where the files of an installed driver are.
#[derive(Clone, Debug)]
pub struct Driver {
    /// The driver root.
    pub root: HostFolder,
    /// Folders whose `dev` is searched for device nodes.
    pub nodes: Vec<HostFolder>,
    /// The path of nvidia-cdi-hook on the host, if an operator names it.
    pub hook: Option<PathBuf>,
    /// Mount point of sysfs, which has the display devices of a GPU.
    pub sysfs: PathBuf,
    /// The driver's table of MIG capabilities.
    pub capabilities: PathBuf,
}

/// A library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Library {
    /// The file, whose name ends with the driver's version.
    pub(super) file: HostFolder,
    /// Its path in a container.
    pub(super) path: PathBuf,
}

/// The libraries of one version of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Libraries {
    pub(super) version: String,
    pub(super) all: Vec<Library>,
    /// Their folders in a container, without those of VDPAU.
    pub(super) folders: Vec<PathBuf>,
}

impl Driver {
    /// The version of the driver: the end of the name of its CUDA library, else of NVML's.
    ///
    /// # Errors
    /// If there is no such library.
    pub fn version(&self) -> Result<String, DriverError> {
        for base in ["libcuda.so", "libnvidia-ml.so"] {
            for folder in LIBRARY_FOLDERS {
                let folder = self.root.seen.join(folder);
                // The library that is in use, where an older one was left behind.
                let current = fs::canonicalize(folder.join(format!("{base}.1"))).ok();
                let current = current.and_then(|path| version_of(base, &path));
                let versions = files_of(&folder).into_iter().filter_map(|path| version_of(base, &path));
                if let Some(version) = current.or_else(|| versions.max_by_key(|version| numbers(version))) {
                    return Ok(version);
                }
            }
        }
        Err(DriverError::NoLibrary(self.root.seen.clone()))
    }

    /// All libraries of the driver's version.
    pub(super) fn libraries(&self) -> Result<Libraries, DriverError> {
        let version = self.version()?;
        let suffix = format!(".so.{version}");
        let mut found: BTreeMap<PathBuf, Library> = BTreeMap::new();
        let mut folders = Vec::new();
        for folder in LIBRARY_FOLDERS {
            for folder in [folder.to_owned(), format!("{folder}/vdpau")] {
                for path in files_of(&self.root.seen.join(&folder)) {
                    let is_of_version = path
                        .to_str()
                        .is_some_and(|path| path.ends_with(&suffix) || path.contains(UNVERSIONED_LIBRARY));
                    // Two folders of the list may be one by a link, such as /lib64 and /usr/lib64.
                    let Some(relative) = is_of_version.then(|| self.resolve(&path)).flatten() else {
                        continue;
                    };
                    let in_container = Path::new("/").join(&relative);
                    let parent = in_container.parent().map(Path::to_path_buf).unwrap_or_default();
                    if !folder.ends_with("/vdpau") && !folders.contains(&parent) {
                        folders.push(parent);
                    }
                    let library = Library { file: self.root.join(&relative), path: in_container };
                    found.entry(relative).or_insert(library);
                }
            }
        }
        Ok(Libraries { version, all: found.into_values().collect(), folders })
    }

    /// The path relative to the root of what `path` resolves to; `None` outside the root. A link with an absolute
    /// target is meant from within the root.
    fn resolve(&self, path: &Path) -> Option<PathBuf> {
        let root = fs::canonicalize(&self.root.seen).ok()?;
        let resolved = fs::canonicalize(path).ok()?;
        resolved.strip_prefix(&root).ok().map(Path::to_path_buf)
    }

    /// The programs that exist.
    pub(super) fn programs(&self) -> Vec<PathBuf> {
        let find = |name: &&str| {
            let mut candidates = PROGRAM_FOLDERS.iter().map(|folder| Path::new(folder).join(name));
            candidates.find(|path| self.root.seen.join(path).is_file())
        };
        PROGRAMS.iter().filter_map(find).collect()
    }

    /// The sockets that exist.
    pub(super) fn sockets(&self) -> Vec<PathBuf> {
        let find = |places: &&[&str]| {
            places.iter().find(|place| self.root.seen.join(place).exists()).map(PathBuf::from)
        };
        SOCKETS.iter().filter_map(find).collect()
    }

    /// nvidia-cdi-hook, with the subcommands that it has. It is searched only where the driver root is the host's root:
    /// the GPU operator's driver root has no toolkit.
    pub(super) fn find_hook(&self) -> Option<HookProgram> {
        let is_host = self.root.host == Path::new("/");
        let seen = |path: &Path| match path.strip_prefix("/") {
            Ok(relative) if is_host => self.root.seen.join(relative),
            _ => path.to_owned(),
        };
        let usual = || HOOKS.into_iter().map(PathBuf::from).find(|hook| is_host && seen(hook).exists());
        let path = self.hook.clone().or_else(usual)?;
        Some(HookProgram { file: seen(&path), path })
    }

    /// The files of libraries of this version. A package manager unpacks them one after the other.
    pub(super) fn library_names(&self, version: &str) -> BTreeSet<PathBuf> {
        let suffix = format!(".so.{version}");
        let folders =
            LIBRARY_FOLDERS.iter().flat_map(|folder| [(*folder).to_owned(), format!("{folder}/vdpau")]);
        let files = folders.flat_map(|folder| files_of(&self.root.seen.join(folder)));
        files.filter(|path| path.to_str().is_some_and(|path| path.ends_with(&suffix))).collect()
    }

    /// A device node, relative to the folder that holds `dev`.
    pub(super) fn node(&self, path: &str) -> Option<HostFolder> {
        self.nodes.iter().map(|folder| folder.join(path)).find(|node| node.seen.exists())
    }

    /// The display devices of the GPU with this bus id, as paths relative to `/`; none if it is unknown.
    pub(super) fn display_nodes(&self, pci_bus: Option<PciBusId>) -> Vec<String> {
        let Some(bus) = pci_bus else { return Vec::new() };
        let folder = self.sysfs.join("bus/pci/devices").join(bus.sysfs_name()).join("drm");
        let names =
            files_of(&folder).into_iter().filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
        names.map(|name| format!("dev/dri/{name}")).collect()
    }
}

/// The entries of a folder, sorted; none if it cannot be read.
fn files_of(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    paths
}

/// `580.65.06` of `libcuda.so.580.65.06`; not the `1` of a soname.
fn version_of(base: &str, path: &Path) -> Option<String> {
    let version = path.file_name()?.to_str()?.strip_prefix(base)?.strip_prefix('.')?;
    let is_version = version.contains('.') && version.chars().all(|c| c == '.' || c.is_ascii_digit());
    is_version.then(|| version.to_owned())
}

fn numbers(version: &str) -> Vec<u64> {
    version.split('.').map(|number| number.parse().unwrap_or(0)).collect()
}

/// The links to a library that a container needs, as `target::link`: from its soname, from the name without a version,
/// and some that applications open without a soname. A link that the host does not have is not made.
pub(super) fn links(library: &Library) -> Vec<String> {
    let (Some(name), Some(folder)) =
        (library.path.file_name().and_then(|n| n.to_str()), library.path.parent())
    else {
        return Vec::new();
    };
    let link = |target: &str, name: &str| format!("{target}::{}", folder.join(name).display());
    let mut links = Vec::new();
    // The links that nvidia-ctk always makes.
    if name.starts_with("libcuda.so.") {
        links.push(link("libcuda.so.1", "libcuda.so"));
    } else if name.starts_with("libGLX_nvidia.so.") {
        links.push(link(name, "libGLX_indirect.so.0"));
    } else if name.starts_with("libnvidia-opticalflow.so.") {
        links.push(link("libnvidia-opticalflow.so.1", "libnvidia-opticalflow.so"));
    }
    let is_link = |name: &str| {
        let path = library.file.seen.with_file_name(name);
        fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_symlink())
    };
    let soname = soname(&library.file.seen).ok().flatten().unwrap_or_else(|| name.to_owned());
    if soname != name && is_link(&soname) {
        links.push(link(name, &soname));
    }
    if let Some(end) = soname.find(".so") {
        let plain = &soname[..end + 3];
        if plain != soname && is_link(plain) {
            links.push(link(&soname, plain));
        }
    }
    links
}

/// The soname of a library; `None` if it has none.
///
/// # Errors
/// If the file is not a 64-bit ELF file.
pub(super) fn soname(path: &Path) -> io::Result<Option<String>> {
    let invalid = |error: object::Error| io::Error::new(io::ErrorKind::InvalidData, error.to_string());
    let file = ReadCache::new(fs::File::open(path)?);
    let data = &file;
    let header = FileHeader64::<Endianness>::parse(data).map_err(invalid)?;
    let endian = header.endian().map_err(invalid)?;
    let segments = header.program_headers(endian, data).map_err(invalid)?;
    for segment in segments {
        let Some(entries) = segment.dynamic(endian, data).map_err(invalid)? else { continue };
        let value = |tag: i64| {
            let mut found = entries.iter().filter(|entry| entry.d_tag(endian) == tag);
            found.next().map(|entry| entry.d_val(endian))
        };
        let (Some(name), Some(table), Some(size)) = (value(DT_SONAME), value(DT_STRTAB), value(DT_STRSZ))
        else {
            return Ok(None);
        };
        // The table is given by its address; the segment that contains it has its place in the file.
        for loaded in segments {
            let (address, length) = (loaded.p_vaddr(endian), loaded.p_filesz(endian));
            if table < address || table - address >= length {
                continue;
            }
            let start = loaded.p_offset(endian) + (table - address);
            let bytes = data.read_bytes_at_until(start + name..start + size, 0);
            return Ok(bytes.ok().and_then(|bytes| String::from_utf8(bytes.to_vec()).ok()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn display_devices_are_found_in_every_pci_domain() {
        let folder = tempfile::tempdir().unwrap();
        let driver = Driver {
            root: HostFolder::same(folder.path()),
            nodes: Vec::new(),
            hook: None,
            sysfs: folder.path().to_owned(),
            capabilities: "/nowhere".into(),
        };
        for (sysfs, nvml) in [("0001:c3:00.0", "00000001:C3:00.0"), ("10000:03:00.0", "00010000:03:00.0")] {
            let card = format!("card{}", &nvml[9..11]);
            fs::create_dir_all(folder.path().join("bus/pci/devices").join(sysfs).join("drm").join(&card))
                .unwrap();
            assert_eq!(driver.display_nodes(PciBusId::parse(nvml).ok()), [format!("dev/dri/{card}")]);
        }
        assert!(driver.display_nodes(None).is_empty());
    }

    #[test]
    fn the_version_is_that_of_the_library_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let libraries = folder.path().join("usr/lib64");
        fs::create_dir_all(&libraries).unwrap();
        let driver = Driver {
            root: HostFolder::same(folder.path()),
            nodes: Vec::new(),
            hook: None,
            sysfs: "/nowhere".into(),
            capabilities: "/nowhere".into(),
        };
        assert!(driver.version().unwrap_err().to_string().contains("nvidiaDriverRoot"));
        for name in ["libcuda.so.9.1", "libcuda.so.580.65.06", "libcuda.so.1.txt"] {
            fs::write(libraries.join(name), "").unwrap();
        }
        assert_eq!(driver.version().unwrap(), "580.65.06");
        std::os::unix::fs::symlink("libcuda.so.9.1", libraries.join("libcuda.so.1")).unwrap();
        assert_eq!(driver.version().unwrap(), "9.1");
    }
}
