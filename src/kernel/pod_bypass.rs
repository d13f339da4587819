//! How a pod's spec lets it use GPUs that were not given to it.

/// How a pod may reach GPUs past every device plugin: its own environment is appended after the
/// plugin's, NVIDIA's runtime may be told to take GPUs from mounts, and a privileged container sees all devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodBypass {
    /// A container sets `NVIDIA_VISIBLE_DEVICES` itself.
    NamesGpus {
        /// Which container.
        container: String,
    },
    /// A container mounts something at [`DEVICE_MOUNTS`].
    MountsGpus {
        /// Which container.
        container: String,
    },
    /// A container is privileged.
    Privileged {
        /// Which container.
        container: String,
    },
    /// A container takes variables from elsewhere under a prefix with which a key makes [`VISIBLE_DEVICES`].
    TakesVariables {
        /// Which container.
        container: String,
    },
}

/// The variable that NVIDIA's container runtime obeys, wherever it comes from.
pub const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// The folder below `/var/run` whose mounts' names are GPUs to NVIDIA's container runtime (the strategy `volume-mounts`).
pub const DEVICE_MOUNTS: &str = "nvidia-container-devices";

impl PodBypass {
    /// Of what the containers of a pod show, what says most; of equal ones the first.
    #[must_use]
    pub fn plainest(all: impl Iterator<Item = Self>) -> Option<Self> {
        all.min_by_key(|bypass| match bypass {
            Self::NamesGpus { .. } => 0,
            Self::MountsGpus { .. } => 1,
            Self::Privileged { .. } => 2,
            Self::TakesVariables { .. } => 3,
        })
    }

    /// Whether what is mounted there names GPUs, in any spelling of the path.
    #[must_use]
    pub fn mounts_gpus(path: &str) -> bool {
        path.contains(DEVICE_MOUNTS)
    }

    /// Whether a variable under this prefix may be [`VISIBLE_DEVICES`]. Without one that is not told from any other
    /// ConfigMap.
    #[must_use]
    pub fn may_name_gpus(prefix: &str) -> bool {
        !prefix.is_empty() && prefix != VISIBLE_DEVICES && VISIBLE_DEVICES.starts_with(prefix)
    }

    /// What a container's own [`VISIBLE_DEVICES`] shows it: with no value of its own the value comes
    /// from elsewhere and is not known, and that it is set at all is odd.
    #[must_use]
    pub fn shows_gpus(value: Option<&str>) -> bool {
        !matches!(value, Some("" | "void" | "none"))
    }

    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        match self {
            Self::NamesGpus { container } => {
                format!(
                    "its container {container} sets NVIDIA_VISIBLE_DEVICES itself, which wins over every grant"
                )
            }
            Self::MountsGpus { container } => {
                format!(
                    "its container {container} mounts /var/run/{DEVICE_MOUNTS} itself, which may name any GPU"
                )
            }
            Self::TakesVariables { container } => {
                format!(
                    "its container {container} takes variables from elsewhere under a prefix that may make \
                     NVIDIA_VISIBLE_DEVICES of one"
                )
            }
            Self::Privileged { container } => {
                format!("its container {container} is privileged and sees every GPU")
            }
        }
    }
}
