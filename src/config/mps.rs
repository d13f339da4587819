//! Limits that NVIDIA's MPS keeps. Berth runs no MPS: an operator starts a control daemon, and the
//! configuration says for which resource containers are sent to it.

use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The control daemon's socket in its pipe directory.
const CONTROL_SOCKET: &str = "control";

/// The control daemon of one resource's containers.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MpsEdits {
    /// Its pipe directory on the host: what it was started with as `CUDA_MPS_PIPE_DIRECTORY`, or where
    /// the host has that of a daemon in a container.
    pub pipe_directory: String,
    /// The same in the container, where it is not as on the host. Clients and daemon must know it by one
    /// name, so this is the daemon's own where that runs in a container.
    pub container_pipe_directory: Option<String>,
    /// The daemon's log directory on the host; mounted by the same name.
    pub log_directory: Option<String>,
    /// The shared memory that daemon and clients have in common; `/dev/shm` in the container.
    #[serde(default = "host_shm")]
    pub shm: String,
}

fn host_shm() -> String {
    "/dev/shm".into()
}

impl MpsEdits {
    /// Every path in it, with its key.
    pub(super) fn paths(&self) -> impl Iterator<Item = (&'static str, &String)> {
        let given = [("pipeDirectory", &self.pipe_directory), ("shm", &self.shm)].into_iter();
        let container = self.container_pipe_directory.iter().map(|path| ("containerPipeDirectory", path));
        given.chain(container).chain(self.log_directory.iter().map(|path| ("logDirectory", path)))
    }

    /// The pipe directory's name in the container.
    #[must_use]
    pub fn inner_pipe_directory(&self) -> &str {
        self.container_pipe_directory.as_ref().unwrap_or(&self.pipe_directory)
    }

    /// What is there as long as the daemon runs.
    #[must_use]
    pub fn control_socket(&self) -> PathBuf {
        Path::new(&self.pipe_directory).join(CONTROL_SOCKET)
    }
}

#[cfg(test)]
mod tests;
