//! The bytes of a policy for somebody who takes them in their own time: never more than a piece of them in
//! memory, and never all of them unless they are what their digest says.

use berth_kernel::names::Digest;
use berth_kernel::ports::{InstallError, Policies};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::sync::Arc;

/// A piece, bytes: the largest policy is 512 of them, and each takes a disk well under a millisecond.
const PIECE_BYTES: usize = 64 * 1024;

/// What is left of a policy's bytes.
pub struct Pieces {
    policies: Arc<dyn Policies>,
    digest: Digest,
    bytes: u64,
    at: u64,
    sum: Sha256,
}

impl fmt::Debug for Pieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pieces").field("digest", &self.digest).field("at", &self.at).finish_non_exhaustive()
    }
}

impl Pieces {
    /// Reads all of it once, so that what is damaged is told before anything is sent. Blocks.
    ///
    /// # Errors
    /// If its bytes are gone or changed.
    pub(super) fn of(policies: Arc<dyn Policies>, digest: Digest) -> Result<Self, InstallError> {
        let (mut sum, mut bytes) = (Sha256::new(), 0);
        loop {
            let piece = policies.module_piece(&digest, bytes, PIECE_BYTES)?;
            sum.update(&piece);
            bytes += piece.len() as u64;
            if piece.len() < PIECE_BYTES {
                break;
            }
        }
        if !is(sum, &digest) {
            return Err(InstallError::Lost { digest });
        }
        Ok(Self { policies, digest, bytes, at: 0, sum: Sha256::new() })
    }

    /// All of it, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The next piece, and what is left then; `None` after the last. The last one comes only if all of them are
    /// still what they were: the file may change meanwhile.
    ///
    /// # Errors
    /// If the bytes are gone or changed by now.
    pub async fn next(self) -> Result<Option<(Vec<u8>, Self)>, InstallError> {
        if self.at == self.bytes {
            return Ok(None);
        }
        let read = tokio::task::spawn_blocking(move || self.read()).await;
        read.unwrap_or(Err(InstallError::Stopping)).map(Some)
    }

    fn read(mut self) -> Result<(Vec<u8>, Self), InstallError> {
        let left = usize::try_from(self.bytes - self.at).unwrap_or(usize::MAX);
        let piece = self.policies.module_piece(&self.digest, self.at, left.min(PIECE_BYTES))?;
        self.sum.update(&piece);
        self.at += piece.len() as u64;
        if piece.is_empty() || self.at == self.bytes && !is(self.sum.clone(), &self.digest) {
            tracing::warn!(policy = self.digest.short(), "a policy's file changed while it was being sent");
            return Err(InstallError::Lost { digest: self.digest });
        }
        Ok((piece, self))
    }
}

fn is(sum: Sha256, digest: &Digest) -> bool {
    format!("{:x}", sum.finalize()) == digest.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::policy::{Answer, Call, Fault, PolicyVersion};
    use berth_kernel::time::Now;
    use parking_lot::Mutex;

    /// One policy's file.
    struct One(Mutex<Vec<u8>>);

    impl Policies for One {
        fn install(&self, _: &[u8], _: Now) -> Result<PolicyVersion, InstallError> {
            Err(InstallError::Busy)
        }
        fn restore(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
            Ok(version.clone())
        }
        fn module(&self, _: &Digest) -> Result<Vec<u8>, InstallError> {
            Ok(self.0.lock().clone())
        }
        fn remove(&self, _: &Digest) {}
        fn ask(&self, _: Call<'_>) -> Result<Option<Answer>, Fault> {
            Ok(None)
        }
    }

    fn one(bytes: Vec<u8>) -> (Arc<One>, Digest) {
        let digest = Digest::parse(&format!("{:x}", Sha256::digest(&bytes))).unwrap();
        (Arc::new(One(Mutex::new(bytes))), digest)
    }

    fn noise(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|n| (n.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0]).collect()
    }

    #[tokio::test]
    async fn pieces_put_together_are_all_of_it_and_no_more_than_one_is_at_hand() {
        for size in [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7] {
            let (policies, digest) = one(noise(size));
            let mut left = Pieces::of(policies, digest).unwrap();
            assert_eq!(left.bytes(), size as u64);
            let mut all = Vec::new();
            while let Some((piece, rest)) = left.next().await.unwrap() {
                assert!((1..=PIECE_BYTES).contains(&piece.len()));
                all.extend(piece);
                left = rest;
            }
            assert_eq!(all, noise(size));
        }
    }

    #[tokio::test]
    async fn what_is_not_what_its_digest_says_never_comes_whole() {
        let good = noise(3 * PIECE_BYTES);
        let (policies, digest) = one(good.clone());
        let lost = InstallError::Lost { digest: digest.clone() };
        let changes: [fn(&mut Vec<u8>); 5] = [
            |bytes| bytes[PIECE_BYTES] ^= 1,
            |bytes| *bytes.last_mut().unwrap() ^= 1,
            |bytes| bytes.truncate(2 * PIECE_BYTES + 1),
            |bytes| bytes.truncate(2 * PIECE_BYTES),
            Vec::clear,
        ];
        for change in changes {
            let pieces = Pieces::of(policies.clone(), digest.clone()).unwrap();
            let mut came = pieces.next().await.unwrap();
            change(&mut policies.0.lock());
            assert_eq!(Pieces::of(policies.clone(), digest.clone()).unwrap_err(), lost);
            let mut bytes = 0;
            let ended = loop {
                let Some((piece, left)) = came else { break Ok(bytes) };
                bytes += piece.len();
                match left.next().await {
                    Ok(next) => came = next,
                    Err(error) => break Err(error),
                }
            };
            match ended {
                Ok(whole) => panic!("{whole} bytes came"),
                Err(error) => assert!(error == lost && bytes < good.len(), "{bytes}"),
            }
            policies.0.lock().clone_from(&good);
        }
    }
}
