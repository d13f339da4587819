//! The GPUs that a user names, and the texts that several commands show of a GPU.

use crate::client::Client;
use crate::names::scheduling;
use anyhow::bail;
use berth_api::{Drain, DrainState, Gpu, GpuList, GpuSummary};
use serde::Serialize;

/// Several GPUs in the form of the API's lists.
#[derive(Serialize)]
pub(crate) struct ChangedGpus {
    pub(crate) items: Vec<Gpu>,
}

/// As [`resolve`], for several; each once. An unknown one is found before any is changed.
pub(crate) fn resolve_all(client: &Client, given: &[String]) -> anyhow::Result<Vec<String>> {
    let GpuList { items, .. } = client.get("/gpus")?;
    let mut uuids: Vec<String> = Vec::new();
    for given in given {
        let uuid = resolve_in(&items, given)?;
        if !uuids.contains(&uuid) {
            uuids.push(uuid);
        }
    }
    Ok(uuids)
}

/// The UUID of the GPU that is named by a UUID, the beginning of one, or an index.
pub(crate) fn resolve(client: &Client, given: &str) -> anyhow::Result<String> {
    let GpuList { items, .. } = client.get("/gpus")?;
    resolve_in(&items, given)
}

fn resolve_in(items: &[GpuSummary], given: &str) -> anyhow::Result<String> {
    let index: Option<u32> = given.parse().ok();
    let meant = |g: &&GpuSummary| g.uuid.eq_ignore_ascii_case(given) || Some(g.index) == index;
    let begins = |uuid: &str| uuid.get(..given.len()).is_some_and(|start| start.eq_ignore_ascii_case(given));
    // A vanished GPU keeps its index until it is forgotten; the present one with that index is meant.
    let exact = items.iter().filter(meant).max_by_key(|g| g.present);
    let beginning: Vec<_> = items.iter().filter(|g| !given.is_empty() && begins(&g.uuid)).collect();
    match (exact, beginning.as_slice()) {
        (Some(gpu), _) => Ok(gpu.uuid.clone()),
        (None, [gpu]) => Ok(gpu.uuid.clone()),
        (None, []) => bail!("this node has no GPU {given:?}; `berth gpu list` shows its GPUs"),
        (None, several) => {
            bail!("{given:?} is the beginning of the UUIDs of {} GPUs: give more characters", several.len())
        }
    }
}

/// The name of a GPU in sentences.
pub(crate) fn title(gpu: &Gpu) -> String {
    format!("GPU {}", gpu.summary.index)
}

/// MiB as GiB, rounded to a whole number from ten on; `-` if it is unknown.
pub(crate) fn gib(mib: Option<u64>) -> String {
    match mib {
        None => "-".into(),
        Some(0) => "0".into(),
        // Tenths, rounded: 10/1024 of a MiB.
        Some(mib) if mib < 10 * 1024 - 51 => {
            let tenths = (mib * 10 + 512) / 1024;
            format!("{}.{}", tenths / 10, tenths % 10)
        }
        Some(mib) => ((mib + 512) / 1024).to_string(),
    }
}

/// A value with its unit; `-` if it is unknown.
pub(crate) fn with_unit(value: Option<u32>, unit: &str) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value}{unit}"))
}

/// The scheduling state of a GPU, with who ordered it and why.
pub(crate) fn drain(drain: &Drain) -> String {
    let state = scheduling(&drain.state);
    let is_drain = matches!(drain.state, DrainState::Draining | DrainState::Drained);
    let ordered = if is_drain { ", ordered" } else { "" };
    match (&drain.by, &drain.why) {
        (Some(by), Some(why)) => format!("{state}{ordered} by {by} ({why})"),
        (Some(by), None) => format!("{state}{ordered} by {by}"),
        _ => state.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_shown_in_gib_with_a_decimal_below_ten() {
        for (mib, text) in [
            (None, "-"),
            (Some(0), "0"),
            (Some(1), "0.0"),
            (Some(922), "0.9"),
            (Some(1024), "1.0"),
            (Some(10_188), "9.9"),
            (Some(10_189), "10"),
            (Some(81_559), "80"),
        ] {
            assert_eq!(gib(mib), text, "{mib:?}");
        }
    }
}
