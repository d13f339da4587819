//! Pod specs that give access to GPUs that were not granted.

/// How a pod may reach GPUs without any device plugin: its own environment is appended after the
/// plugin's, NVIDIA's runtime may be configured to read GPUs from mounts, and a privileged container sees
/// all devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodBypass {
    /// A container sets `NVIDIA_VISIBLE_DEVICES` itself.
    NamesGpus {
        /// The container's name.
        container: String,
    },
    /// A container mounts a volume at [`DEVICE_MOUNTS`].
    MountsGpus {
        /// The container's name.
        container: String,
    },
    /// A container is privileged.
    Privileged {
        /// The container's name.
        container: String,
    },
    /// A container imports variables (`envFrom`) under a prefix that a key may complete to [`VISIBLE_DEVICES`].
    ImportsVariables {
        /// The container's name.
        container: String,
    },
}

/// The variable by which NVIDIA's container runtime selects GPUs, whatever set it.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The folder below `/var/run` in which NVIDIA's container runtime takes the names of mounts as GPUs (strategy
/// `volume-mounts`).
pub const DEVICE_MOUNTS: &str = "nvidia-container-devices";

impl PodBypass {
    /// The most explicit bypass of a pod's containers; of equal ones the first.
    #[must_use]
    pub fn most_explicit(bypasses: impl Iterator<Item = Self>) -> Option<Self> {
        bypasses.min_by_key(|bypass| match bypass {
            Self::NamesGpus { .. } => 0,
            Self::MountsGpus { .. } => 1,
            Self::Privileged { .. } => 2,
            Self::ImportsVariables { .. } => 3,
        })
    }

    /// Whether a mount at this path names GPUs, in any spelling of the path.
    #[must_use]
    pub fn mounts_gpus(path: &str) -> bool {
        path.contains(DEVICE_MOUNTS)
    }

    /// Whether a variable under this prefix may be [`VISIBLE_DEVICES`]. Without a prefix, such a source cannot be
    /// distinguished from any other ConfigMap.
    #[must_use]
    pub fn may_name_gpus(prefix: &str) -> bool {
        !prefix.is_empty() && prefix != VISIBLE_DEVICES && VISIBLE_DEVICES.starts_with(prefix)
    }

    /// Whether this value of a container's own [`VISIBLE_DEVICES`] shows GPUs to it. `None`, a value from a reference
    /// (`valueFrom`), is not known and counts as showing them.
    #[must_use]
    pub fn shows_gpus(value: Option<&str>) -> bool {
        !matches!(value, Some("" | "void" | "none"))
    }

    /// One sentence for people.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::NamesGpus { container } => {
                format!(
                    "its container {container} sets NVIDIA_VISIBLE_DEVICES itself, which overrides every grant"
                )
            }
            Self::MountsGpus { container } => {
                format!(
                    "its container {container} mounts /var/run/{DEVICE_MOUNTS} itself, which may name any GPU"
                )
            }
            Self::ImportsVariables { container } => {
                format!(
                    "its container {container} takes variables from elsewhere under a prefix that may set \
                     NVIDIA_VISIBLE_DEVICES"
                )
            }
            Self::Privileged { container } => {
                format!("its container {container} is privileged and sees every GPU")
            }
        }
    }
}
