//! Streams the bytes of a policy to a client of any speed: at most one chunk is in memory, and the last chunk is sent
//! only if all bytes match the digest.

use berth_kernel::ids::names::Digest;
use berth_kernel::node::ports::{InstallError, PolicyFiles};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::sync::Arc;

/// Size of a chunk, bytes: the largest policy has 512, and reading one from disk takes well under a millisecond.
const CHUNK_BYTES: usize = 64 * 1024;

/// The remaining bytes of a policy.
pub struct ModuleChunks {
    files: Arc<dyn PolicyFiles>,
    digest: Digest,
    bytes: u64,
    offset: u64,
    hash: Sha256,
}

impl fmt::Debug for ModuleChunks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModuleChunks")
            .field("digest", &self.digest)
            .field("offset", &self.offset)
            .finish_non_exhaustive()
    }
}

impl ModuleChunks {
    /// Reads and checks all bytes once, so that a damaged file is reported before anything is sent. Blocks.
    ///
    /// # Errors
    /// If the bytes are missing or changed.
    pub(crate) fn open(files: Arc<dyn PolicyFiles>, digest: Digest) -> Result<Self, InstallError> {
        let (mut hash, mut bytes) = (Sha256::new(), 0);
        loop {
            let chunk = files.read(&digest, bytes, CHUNK_BYTES)?;
            hash.update(&chunk);
            bytes += chunk.len() as u64;
            if chunk.len() < CHUNK_BYTES {
                break;
            }
        }
        if !matches(hash, &digest) {
            return Err(InstallError::Lost { digest });
        }
        Ok(Self { files, digest, bytes, offset: 0, hash: Sha256::new() })
    }

    /// Size of the whole policy, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next chunk and the remaining ones; `None` after the last. The last chunk is returned only if all bytes
    /// still match the digest, since the file may change meanwhile.
    ///
    /// # Errors
    /// If the bytes are missing or changed.
    pub async fn next(self) -> Result<Option<(Vec<u8>, Self)>, InstallError> {
        if self.offset == self.bytes {
            return Ok(None);
        }
        let read = tokio::task::spawn_blocking(move || self.read()).await;
        read.unwrap_or(Err(InstallError::Stopping)).map(Some)
    }

    fn read(mut self) -> Result<(Vec<u8>, Self), InstallError> {
        let left = usize::try_from(self.bytes - self.offset).unwrap_or(usize::MAX);
        let chunk = self.files.read(&self.digest, self.offset, left.min(CHUNK_BYTES))?;
        self.hash.update(&chunk);
        self.offset += chunk.len() as u64;
        if chunk.is_empty() || self.offset == self.bytes && !matches(self.hash.clone(), &self.digest) {
            tracing::warn!(policy = self.digest.short(), "a policy's file changed while it was being sent");
            return Err(InstallError::Lost { digest: self.digest });
        }
        Ok((chunk, self))
    }
}

fn matches(hash: Sha256, digest: &Digest) -> bool {
    format!("{:x}", hash.finalize()) == digest.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::ids::time::Now;
    use berth_kernel::policy::version::PolicyVersion;
    use parking_lot::Mutex;

    /// A single policy's file.
    struct SinglePolicy(Mutex<Vec<u8>>);

    impl PolicyFiles for SinglePolicy {
        fn install(&self, _: &[u8], _: Now) -> Result<PolicyVersion, InstallError> {
            Err(InstallError::Busy)
        }
        fn read_all(&self, _: &Digest) -> Result<Vec<u8>, InstallError> {
            Ok(self.0.lock().clone())
        }
        fn remove(&self, _: &Digest) {}
    }

    fn single_policy(bytes: Vec<u8>) -> (Arc<SinglePolicy>, Digest) {
        let digest = Digest::parse(&format!("{:x}", Sha256::digest(&bytes))).unwrap();
        (Arc::new(SinglePolicy(Mutex::new(bytes))), digest)
    }

    fn pseudo_random(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0]).collect()
    }

    #[tokio::test]
    async fn the_chunks_are_bounded_and_add_up_to_the_policy() {
        for size in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7] {
            let (policies, digest) = single_policy(pseudo_random(size));
            let mut chunks = ModuleChunks::open(policies, digest).unwrap();
            assert_eq!(chunks.bytes(), size as u64);
            let mut received = Vec::new();
            while let Some((chunk, rest)) = chunks.next().await.unwrap() {
                assert!((1..=CHUNK_BYTES).contains(&chunk.len()));
                received.extend(chunk);
                chunks = rest;
            }
            assert_eq!(received, pseudo_random(size));
        }
    }

    #[tokio::test]
    async fn bytes_that_do_not_match_the_digest_are_never_sent_completely() {
        let good = pseudo_random(3 * CHUNK_BYTES);
        let (policies, digest) = single_policy(good.clone());
        let lost = InstallError::Lost { digest: digest.clone() };
        let changes: [fn(&mut Vec<u8>); 5] = [
            |bytes| bytes[CHUNK_BYTES] ^= 1,
            |bytes| *bytes.last_mut().unwrap() ^= 1,
            |bytes| bytes.truncate(2 * CHUNK_BYTES + 1),
            |bytes| bytes.truncate(2 * CHUNK_BYTES),
            Vec::clear,
        ];
        for change in changes {
            let chunks = ModuleChunks::open(policies.clone(), digest.clone()).unwrap();
            let mut received = chunks.next().await.unwrap();
            change(&mut policies.0.lock());
            assert_eq!(ModuleChunks::open(policies.clone(), digest.clone()).unwrap_err(), lost);
            let mut bytes = 0;
            let result = loop {
                let Some((chunk, rest)) = received else { break Ok(bytes) };
                bytes += chunk.len();
                match rest.next().await {
                    Ok(next) => received = next,
                    Err(error) => break Err(error),
                }
            };
            match result {
                Ok(bytes) => panic!("{bytes} bytes were sent"),
                Err(error) => assert!(error == lost && bytes < good.len(), "{bytes}"),
            }
            policies.0.lock().clone_from(&good);
        }
    }
}
