//! Indices of GPUs, for texts of the API that name GPUs by UUID.

use super::client::Client;
use berth_api::GpuList;

/// The GPUs of a node by UUID.
pub(super) struct Names(Vec<(String, u32)>);

impl Names {
    /// Requests the list. Without an answer, texts stay as they are.
    pub(super) fn of(client: &Client) -> Self {
        let gpus = client.get::<GpuList>("/gpus").map(|list| list.items).unwrap_or_default();
        Self(gpus.into_iter().filter(|gpu| gpu.present).map(|gpu| (gpu.uuid, gpu.index)).collect())
    }

    /// The text with `GPU 3 (GPU-71d5...)` for a UUID, and `GPU 3 share 1 (GPU-71d5...::1)` for a device.
    pub(super) fn with_indices(&self, text: &str) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_comes_with_its_index_and_longer_words_stay() {
        let names = Names(vec![("GPU-1".into(), 1), ("GPU-10".into(), 7)]);
        for (text, expected) in [
            ("chooses GPU-1 instead of GPU-10", "chooses GPU 1 (GPU-1) instead of GPU 7 (GPU-10)"),
            ("GPU-10::3, GPU-1::12.", "GPU 7 share 3 (GPU-10::3), GPU 1 share 12 (GPU-1::12)."),
            ("GPU-1 x2; GPU-1::", "GPU 1 (GPU-1) x2; GPU 1 (GPU-1)::"),
            ("{\"part\":\"GPU-1\"}", "{\"part\":\"GPU-1\"}"),
            ("MIG-GPU-1 GPU-100 GPU-1-a \u{e9}", "MIG-GPU-1 GPU-100 GPU-1-a \u{e9}"),
        ] {
            assert_eq!(names.with_indices(text), expected);
        }
        assert_eq!(Names(Vec::new()).with_indices("GPU-1"), "GPU-1");
    }
}
