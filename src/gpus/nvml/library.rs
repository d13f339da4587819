//! Finds and opens `libnvidia-ml.so.1`.

use super::fence::{Fence, Lane};
use berth_kernel::node::ports::GpusError;
use crossbeam_channel::{Receiver, Sender, bounded};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// File name of the library.
const NAME: &str = "libnvidia-ml.so.1";

/// How long `nvmlInit` may take. With many GPUs and no persistence daemon it takes seconds.
const INIT_MAX: Duration = Duration::from_secs(60);

/// Folders of the driver's libraries under a root: those of distributions (Debian's alternatives among them), of the
/// GPU operator's containers, of Google's images and NixOS, and of WSL. NVIDIA's container toolkit has the same list
/// (`internal/lookup/library.go`).
const FOLDERS: [&str; 16] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "lib/x86_64-linux-gnu/nvidia/current",
    "lib/aarch64-linux-gnu/nvidia/current",
    "usr/local/nvidia/lib64",
    "home/kubernetes/bin/nvidia/lib64",
    "run/opengl-driver/lib",
    "usr/lib/wsl/lib",
    "opt/nvidia/lib64",
];

/// Roots that are searched after the configured one.
const ROOTS: [&str; 3] = ["/run/nvidia/driver", "/driver-root", "/"];

/// An initialised NVML. Its last user closes it on a thread of its own, since `nvmlShutdown` may hang with the driver.
pub(super) struct OpenNvml {
    nvml: Option<Nvml>,
    /// Dropped once the library is closed.
    closed: Option<Sender<()>>,
}

impl OpenNvml {
    /// The receiver is disconnected once the library is closed.
    fn new(nvml: Nvml) -> (Self, Receiver<()>) {
        let (closed, closing) = bounded(0);
        (Self { nvml: Some(nvml), closed: Some(closed) }, closing)
    }
}

impl Deref for OpenNvml {
    type Target = Nvml;

    fn deref(&self) -> &Nvml {
        self.nvml.as_ref().expect("only a drop takes it")
    }
}

impl Drop for OpenNvml {
    fn drop(&mut self) {
        let (nvml, closed) = (self.nvml.take(), self.closed.take());
        let close = move || {
            drop(nvml);
            drop(closed);
        };
        // If no thread can be started, `spawn` drops the closure, and with it the library, on this thread.
        let _ = thread::Builder::new().name("nvml".to_owned()).spawn(close);
    }
}

/// An opened and initialised library.
pub(super) struct Library {
    pub(super) nvml: Arc<OpenNvml>,
    /// Disconnected once the library is closed, some time after its last user has dropped it.
    pub(super) closing: Receiver<()>,
    pub(super) path: PathBuf,
    pub(super) driver_version: Option<String>,
    pub(super) cuda_version: Option<String>,
}

/// Opens the configured library, or else the first one that can be opened, and returns it with what `prepare` makes of it
/// before anything is read.
pub(super) fn open<T: Send + 'static>(
    fence: &Fence,
    named: Option<&Path>,
    driver_root: &Path,
    prepare: fn(&Nvml) -> T,
) -> Result<(Library, T), GpusError> {
    let paths = match named {
        Some(path) => vec![path.to_owned()],
        None => candidates(driver_root),
    };
    let tried = paths.clone();
    let opened = fence.run(Lane::Node, INIT_MAX, move |steps| {
        steps.at("nvmlInit_v2");
        let mut last = None;
        for path in paths {
            match open_one(&path, prepare) {
                Ok(opened) => return Ok(opened),
                // The library opened, but the driver has an error: another copy would return the same.
                Err(error) if !matches!(error, NvmlError::LibloadingError(_)) => {
                    return Err((path, error));
                }
                Err(error) => last = last.or(Some((path, error))),
            }
        }
        Err(last.unwrap_or((PathBuf::from(NAME), NvmlError::LibraryNotFound)))
    });
    match opened {
        Ok(Ok(opened)) => Ok(opened),
        Ok(Err((path, error))) => Err(open_error(&path, error, named.is_some(), &tried)),
        Err(failure) => Err(GpusError {
            what: format!(
                "{failure}: the NVIDIA driver hangs; look for Xid or NVRM lines in the kernel log, and reboot the node if `nvidia-smi` hangs too"
            ),
            source: None,
        }),
    }
}

fn open_one<T>(path: &Path, prepare: fn(&Nvml) -> T) -> Result<(Library, T), NvmlError> {
    let nvml = Nvml::builder().lib_path(path.as_os_str()).init()?;
    let cuda = nvml.sys_cuda_driver_version().ok();
    let driver_version = nvml.sys_driver_version().ok();
    let cuda_version = cuda.map(|v| format!("{}.{}", v / 1000, v % 1000 / 10));
    let prepared = prepare(&nvml);
    let (nvml, closing) = OpenNvml::new(nvml);
    let nvml = Arc::new(nvml);
    Ok((Library { nvml, closing, path: path.to_owned(), driver_version, cuda_version }, prepared))
}

/// The paths to try, in order: under the configured root; by the search of the dynamic loader; under the usual roots.
fn candidates(driver_root: &Path) -> Vec<PathBuf> {
    let under = |root: &Path| -> Vec<PathBuf> {
        let paths = FOLDERS.iter().map(|folder| root.join(folder).join(NAME));
        paths.filter(|path| path.exists()).collect()
    };
    let mut paths = Vec::new();
    if driver_root != Path::new("/") {
        paths.extend(under(driver_root));
    }
    paths.push(PathBuf::from(NAME));
    for root in ROOTS {
        paths.extend(under(Path::new(root)));
    }
    paths
}

/// The error, with the remedy.
fn open_error(path: &Path, error: NvmlError, named: bool, tried: &[PathBuf]) -> GpusError {
    let shown = path.display();
    let what = match &error {
        NvmlError::LibloadingError(_) if named => {
            format!(
                "{shown} cannot be opened as NVML; --nvml-library must name the driver's {NAME}"
            )
        }
        NvmlError::LibloadingError(_) => return none_opened(tried, error),
        NvmlError::DriverNotLoaded => format!(
            "{shown} exists, but the NVIDIA kernel driver is not loaded: load it (modprobe nvidia) and check that `nvidia-smi` works on the node"
        ),
        NvmlError::LibRmVersionMismatch => format!(
            "{shown} and the loaded kernel driver have different versions, as after an upgrade without a reload: reload the driver or reboot the node"
        ),
        NvmlError::NoPermission => "NVML has no access to the driver: run with access to /dev/nvidiactl and /dev/nvidia* (a privileged container has it)".to_owned(),
        other => format!(
            "{shown} cannot be initialised ({other}): check that `nvidia-smi` works on the node"
        ),
    };
    GpusError { what, source: Some(Box::new(error)) }
}

/// The error when no copy can be opened: none exists, or all fail.
fn none_opened(tried: &[PathBuf], error: NvmlError) -> GpusError {
    let existing: Vec<_> =
        tried.iter().filter(|p| *p != Path::new(NAME)).map(|p| p.display().to_string()).collect();
    if existing.is_empty() {
        // Without the loader's error, which only repeats that there is no such file.
        return GpusError {
            what: format!(
                "there is no {NAME} here: install the NVIDIA driver; in a container, use the NVIDIA runtime, or mount the driver and name its folder with --nvidia-driver-root; or try berth without a GPU with `berth serve --gpus sim:8xh100 --kubelet-dir /tmp/k --state-dir /tmp/s`"
            ),
            source: None,
        };
    }
    GpusError {
        what: format!(
            "{} cannot be opened: install the NVIDIA driver that fits this system, or name another copy with --nvml-library",
            existing.join(", ")
        ),
        source: Some(Box::new(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_missing_library_names_it_once_with_a_remedy() {
        let missing = none_opened(&[PathBuf::from(NAME)], NvmlError::LibraryNotFound);
        assert_eq!(missing.what.matches(NAME).count(), 1, "{}", missing.what);
        assert!(missing.what.contains("--gpus sim:8xh100") && missing.source.is_none());
        let copy = PathBuf::from("/driver-root/usr/lib64").join(NAME);
        let missing = none_opened(&[copy.clone(), NAME.into()], NvmlError::LibraryNotFound);
        assert!(missing.what.starts_with(copy.to_str().unwrap()), "{}", missing.what);
    }

    #[test]
    fn a_configured_root_goes_before_the_loader() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("usr/lib64");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(NAME), "").unwrap();
        let paths = candidates(root.path());
        assert_eq!(paths[0], folder.join(NAME));
        assert_eq!(paths[1], Path::new(NAME));
        assert_eq!(candidates(Path::new("/"))[0], Path::new(NAME));
    }

    #[test]
    fn the_library_is_found_in_each_folder_of_a_root() {
        for folder in ["lib64", "lib/aarch64-linux-gnu", "usr/lib/x86_64-linux-gnu/nvidia/current"] {
            let root = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
            let library = root.path().join(folder).join(NAME);
            std::fs::write(&library, "").unwrap();
            assert_eq!(candidates(root.path())[0], library);
        }
    }
}
