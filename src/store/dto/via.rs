//! The serialized form of the API of a GPU.

use berth_kernel::sharing::via as kernel;
use serde::{Deserialize, Serialize};

/// See [`kernel::Via`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Via {
    api: String,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    moving: bool,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    by: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    why: String,
    since_ms: u64,
}

impl Via {
    pub(in super::super) fn from_kernel(via: &kernel::Via) -> Self {
        let kernel::Via { api, moving, by, why, since_wall_ms, since_mono_ms: _ } = via.clone();
        Self { api: api.as_str().into(), moving, by, why, since_ms: since_wall_ms }
    }

    pub(in super::super) fn into_kernel(self) -> Result<kernel::Via, String> {
        let Self { api, moving, by, why, since_ms } = self;
        let api = kernel::KubeletApi::parse(&api).ok_or_else(|| format!("no API is called {api:?}"))?;
        Ok(kernel::Via { api, moving, by, why, since_wall_ms: since_ms, since_mono_ms: 0 })
    }
}
