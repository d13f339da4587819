//! Names for people: GPUs by their indices in place of UUIDs, pods, versions of policies, and whether a GPU is
//! scheduled.

use crate::client::Client;
use berth_api::{DrainState, GpuList, GpuSummary, Holder, Policy, UnidentifiedGpu};

/// The indices of a node's GPUs by UUID, for texts of the API that name GPUs by UUID.
pub(crate) struct GpuIndices(Vec<(String, u32)>);

impl GpuIndices {
    /// Requests the list. Without an answer, texts stay as they are.
    pub(crate) fn fetch(client: &Client) -> Self {
        Self::from_gpus(&client.get::<GpuList>("/gpus").map(|list| list.items).unwrap_or_default())
    }

    /// Of these GPUs. One that vanished keeps its index unless another one has it now.
    pub(crate) fn from_gpus(gpus: &[GpuSummary]) -> Self {
        let keeps_index = |gpu: &&GpuSummary| {
            gpu.present || !gpus.iter().any(|other| other.present && other.index == gpu.index)
        };
        Self(gpus.iter().filter(keeps_index).map(|gpu| (gpu.uuid.clone(), gpu.index)).collect())
    }

    /// Whether this is the index of another GPU now, since the GPU vanished.
    pub(crate) fn lost_index(&self, uuid: &str) -> bool {
        !self.0.is_empty() && !self.0.iter().any(|(known, _)| known == uuid)
    }

    /// The index of a GPU as text; the beginning of its UUID if it has none.
    pub(crate) fn index_or_uuid(&self, uuid: &str) -> String {
        let known = self.0.iter().find(|(known, _)| known == uuid);
        known.map_or_else(|| short_uuid(uuid).to_owned(), |(_, index)| index.to_string())
    }

    /// The indices of several GPUs in order, runs of them as `0-3`.
    pub(crate) fn indices(&self, uuids: &[String]) -> String {
        let index = |uuid: &String| self.0.iter().find(|(known, _)| known == uuid).map(|(_, index)| *index);
        let mut texts = runs(uuids.iter().filter_map(index));
        texts.extend(
            uuids.iter().filter(|uuid| index(uuid).is_none()).map(|uuid| short_uuid(uuid).to_owned()),
        );
        texts.join(",")
    }

    /// The text with `GPU 3 (GPU-71d5...)` for a UUID, and `GPU 3 share 1 (GPU-71d5...::1)` for a device.
    pub(crate) fn with_indices(&self, text: &str) -> String {
        let mut result = String::with_capacity(text.len());
        let mut rest = text;
        // A UUID inside a longer word is left alone.
        let in_word = |c: char| c.is_ascii_alphanumeric() || c == '-';
        while !rest.is_empty() {
            // A UUID in JSON, after a quote, is left alone.
            let free = !result.ends_with(in_word) && !result.ends_with('"');
            let here = |(uuid, _): &&(String, u32)| {
                rest.strip_prefix(uuid.as_str()).is_some_and(|behind| !behind.starts_with(in_word))
            };
            if let Some((uuid, index)) = self.0.iter().filter(|_| free).find(here) {
                let behind = &rest[uuid.len()..];
                let share = behind
                    .strip_prefix("::")
                    .map(|n| &n[..n.find(|c: char| !c.is_ascii_digit()).unwrap_or(n.len())]);
                match share.filter(|share| !share.is_empty()) {
                    Some(share) => {
                        result += &format!("GPU {index} share {share} ({uuid}::{share})");
                        rest = &behind[2 + share.len()..];
                    }
                    None => {
                        result += &format!("GPU {index} ({uuid})");
                        rest = behind;
                    }
                }
                continue;
            }
            let Some(next) = rest.chars().next() else { break };
            result.push(next);
            rest = &rest[next.len_utf8()..];
        }
        result
    }
}

/// The name of a GPU without a known UUID.
pub(crate) fn unidentified(gpu: &UnidentifiedGpu) -> String {
    match (gpu.index, &gpu.pci_bus) {
        (Some(index), Some(bus)) => format!("GPU {index} ({bus})"),
        (Some(index), None) => format!("GPU {index}"),
        (None, Some(bus)) => format!("the GPU at {bus}"),
        (None, None) => "a GPU".into(),
    }
}

/// The beginning of a UUID, which commands take in its place: `GPU-8a56a4bc`.
fn short_uuid(uuid: &str) -> &str {
    uuid.get(..12).unwrap_or(uuid)
}

/// Indices in order, runs of them as `0-3`.
pub(crate) fn runs(indices: impl IntoIterator<Item = u32>) -> Vec<String> {
    let mut known: Vec<u32> = indices.into_iter().collect();
    known.sort_unstable();
    known.dedup();
    let text = |run: &[u32]| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    };
    known.chunk_by(|a, b| a + 1 == *b).map(text).collect()
}

/// The pod that holds an allocation.
pub(crate) fn pod_name(holder: Option<&Holder>) -> String {
    let Some(holder) = holder else {
        return "not known yet".into();
    };
    let part = |p: &Option<String>| p.clone().unwrap_or_else(|| "?".into());
    format!("{}/{}", part(&holder.namespace), part(&holder.pod))
}

/// Whether new allocations are made on a GPU, in the words of `kubectl cordon` and `drain`.
pub(crate) fn scheduling(state: &DrainState) -> &str {
    match state {
        DrainState::Active => "open",
        DrainState::Cordoned | DrainState::Draining | DrainState::Drained | DrainState::Other(_) => {
            state.as_str()
        }
    }
}

/// The same for a GPU, which the configuration may exclude.
pub(crate) fn scheduling_of(gpu: &GpuSummary) -> &str {
    if gpu.excluded { "excluded" } else { scheduling(&gpu.drain.state) }
}

/// The name of a version on the command line and in a stack file.
pub(crate) fn name_with_digest(policy: &Policy) -> String {
    format!("{}@{}", policy.name, short_digest(&policy.digest))
}

pub(crate) fn short_digest(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_in_order_and_runs_are_joined() {
        let gpus = GpuIndices((0..9).map(|i| (format!("G{i}"), i)).collect());
        let indices =
            |uuids: &[&str]| gpus.indices(&uuids.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(indices(&["G3", "G1", "G2", "G2", "G8"]), "1-3,8");
        assert_eq!(indices(&["G0", "GPU-8a56a4bc-e184"]), "0,GPU-8a56a4bc");
        assert_eq!(
            (indices(&[]).as_str(), gpus.index_or_uuid("G4").as_str(), gpus.index_or_uuid("x").as_str()),
            ("", "4", "x")
        );
    }

    /// Every state of the API has a word, and only `active` has another one than the API.
    #[test]
    fn scheduling_is_open_unless_the_gpu_is_cordoned_or_drained() {
        let words: Vec<_> = DrainState::NAMES.iter().filter_map(|name| DrainState::parse(name)).collect();
        let words: Vec<_> = words.iter().map(scheduling).collect();
        assert_eq!(words, ["open", "cordoned", "draining", "drained"]);
    }

    #[test]
    fn a_uuid_comes_with_its_index_and_longer_words_stay() {
        let gpus = GpuIndices(vec![("GPU-1".into(), 1), ("GPU-10".into(), 7)]);
        for (text, expected) in [
            ("chooses GPU-1 instead of GPU-10", "chooses GPU 1 (GPU-1) instead of GPU 7 (GPU-10)"),
            ("GPU-10::3, GPU-1::12.", "GPU 7 share 3 (GPU-10::3), GPU 1 share 12 (GPU-1::12)."),
            ("GPU-1 x2; GPU-1::", "GPU 1 (GPU-1) x2; GPU 1 (GPU-1)::"),
            ("{\"part\":\"GPU-1\"}", "{\"part\":\"GPU-1\"}"),
            ("MIG-GPU-1 GPU-100 GPU-1-a \u{e9}", "MIG-GPU-1 GPU-100 GPU-1-a \u{e9}"),
        ] {
            assert_eq!(gpus.with_indices(text), expected);
        }
        assert_eq!(GpuIndices(Vec::new()).with_indices("GPU-1"), "GPU-1");
    }
}
