//! Finding the built library, and installing a copy of it with a state of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::state::{State, StateError};

/// What cargo calls the library.
const BUILT_NAME: &str = "libfake_nvml.so";

/// What programs that use NVML open.
const NVML_NAME: &str = "libnvidia-ml.so.1";

/// The state file that is read if `FAKE_NVML_CONFIG` is not set: this name, in the folder of the library.
pub const STATE_FILE_NAME: &str = "fake-nvml.json";

/// Why the library cannot be found or installed.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    /// Not where cargo leaves it.
    #[error("{BUILT_NAME} is not in {}; build it with `cargo build -p fake-nvml`", .0.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))]
    NotBuilt(Vec<PathBuf>),
    /// A folder or a copy failed.
    #[error("the library cannot be installed")]
    Io(#[from] io::Error),
    /// The state cannot be written.
    #[error("its state cannot be written")]
    State(#[from] StateError),
}

/// The built `libfake_nvml.so`, found beside the running binary: cargo leaves it in `target/<profile>/deps` when this
/// crate is a dev-dependency and in `target/<profile>` when it is built itself; test binaries lie in `deps`, examples
/// in `examples`.
///
/// # Errors
/// If it is in none of these folders.
pub fn library_path() -> Result<PathBuf, InstallError> {
    let binary = std::env::current_exe()?;
    let folder = binary.parent().unwrap_or(Path::new("/"));
    let profile = folder.parent().unwrap_or(folder);
    let candidates = [folder.to_owned(), folder.join("deps"), profile.join("deps"), profile.to_owned()];
    // The newest one: an old copy may lie in another of the folders.
    let found = candidates
        .iter()
        .map(|folder| folder.join(BUILT_NAME))
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .max();
    found.map(|(_, path)| path).ok_or_else(|| InstallError::NotBuilt(candidates.to_vec()))
}

/// A copy of the library, called `libnvidia-ml.so.1`, with its state file beside it.
///
/// A process opens each library file once, so tests of one binary that want different states need different files.
#[derive(Clone, Debug)]
pub struct Installed {
    library: PathBuf,
    state: PathBuf,
}

impl Installed {
    /// Copies the library into `folder` (made if missing) and writes `state` beside it.
    ///
    /// # Errors
    /// If the library is not built, or something cannot be written.
    pub fn new(folder: &Path, state: &State) -> Result<Self, InstallError> {
        let built = library_path()?;
        fs::create_dir_all(folder)?;
        let installed = Self { library: folder.join(NVML_NAME), state: folder.join(STATE_FILE_NAME) };
        fs::copy(built, &installed.library)?;
        state.write(&installed.state)?;
        Ok(installed)
    }

    /// The `libnvidia-ml.so.1` to open.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The path of its state file, which a test may also write itself.
    pub fn state_path(&self) -> &Path {
        &self.state
    }

    /// Changes the state: reads the file, lets `change` alter it, and writes it back.
    ///
    /// # Errors
    /// If the file cannot be read or written, or the new state contradicts itself.
    pub fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> Result<T, StateError> {
        let mut state = State::read(&self.state)?;
        let answer = change(&mut state);
        state.write(&self.state)?;
        Ok(answer)
    }
}
