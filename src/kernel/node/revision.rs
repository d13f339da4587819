//! What a caller has read and relies on. A command under this condition is refused if the ledger has something else by
//! now.

use crate::drain::marks::Marks;
use crate::ids::names::GpuId;
use crate::node::ledger::Ledger;
use crate::node::refusal::Refusal;
use crate::policy::version::PolicyVersion;
use crate::sharing::via::Via;

/// A part of the ledger as a caller has read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Revision {
    /// The marks of a GPU.
    Marks {
        /// The GPU.
        gpu: GpuId,
        /// Its marks.
        marks: Marks,
    },
    /// The API of a GPU.
    Via {
        /// The GPU.
        gpu: GpuId,
        /// Its API, and the order to change it.
        via: Via,
    },
    /// The revision of the active stack.
    Stack(u64),
    /// The record of a policy version, but for its artifact, which only this machine can tell.
    Policy {
        /// The record.
        version: Box<PolicyVersion>,
        /// Whether it is in the active stack.
        is_active: bool,
    },
}

impl Revision {
    /// Checks that the ledger still has what the caller has read. The keeper does this in the turn that decides the
    /// command, so nothing comes between the check and the change: neither another caller, nor a tick or a scan.
    ///
    /// # Errors
    /// [`Refusal::MarksChanged`], [`Refusal::ViaChanged`], [`Refusal::StackChanged`] or [`Refusal::PolicyChanged`]; for a GPU or a version that
    /// is gone, that it is not known.
    pub fn check(&self, ledger: &Ledger) -> Result<(), Refusal> {
        match self {
            Self::Marks { gpu, marks } => match ledger.gpus.get(gpu) {
                Some(known) if known.marks == *marks => Ok(()),
                Some(_) => Err(Refusal::MarksChanged { gpu: gpu.clone() }),
                None => Err(Refusal::UnknownGpu { gpu: gpu.clone() }),
            },
            Self::Via { gpu, via } => match ledger.gpus.get(gpu) {
                Some(known) if known.via == *via => Ok(()),
                Some(_) => Err(Refusal::ViaChanged { gpu: gpu.clone() }),
                None => Err(Refusal::UnknownGpu { gpu: gpu.clone() }),
            },
            Self::Stack(revision) if ledger.stack.revision == *revision => Ok(()),
            Self::Stack(_) => Err(Refusal::StackChanged { revision: ledger.stack.revision }),
            Self::Policy { version, is_active } => {
                let digest = &version.digest;
                let is_same = |known: &PolicyVersion| {
                    let artifact = version.artifact.clone();
                    PolicyVersion { artifact, ..known.clone() } == **version
                        && ledger.stack.has(digest) == *is_active
                };
                match ledger.policies.get(digest) {
                    Some(known) if is_same(known) => Ok(()),
                    Some(_) => Err(Refusal::PolicyChanged { digest: digest.clone() }),
                    None => Err(Refusal::UnknownPolicy { digest: digest.clone() }),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drain::marks::Author;
    use crate::ids::names::Digest;
    use crate::node::command::{Activation, Command, NewStack};
    use crate::node::test_node::{Node, gpu_id};
    use crate::policy::stack::{OnFault, Permissions, StackEntry, StackOrigin};
    use crate::policy::version::{Origin, Signature, test_version};

    fn digest() -> Digest {
        test_version('a').digest
    }

    fn read(signature: u8, is_active: bool) -> Revision {
        Revision::Policy { version: Box::new(version(signature)), is_active }
    }

    fn version(signature: u8) -> PolicyVersion {
        let origin = Origin { signature: Some(Signature([signature; 64])), ..Origin::default() };
        PolicyVersion { origin, ..test_version('a') }
    }

    #[test]
    fn a_command_is_refused_once_what_its_caller_has_read_was_changed() {
        let mut node = Node::new();
        node.decide(&Command::RecordUpload(version(1))).unwrap();
        let gpu = gpu_id("GPU-0");
        let author = || Author::api("ann".into(), "fan".into());
        let stack = |entries| NewStack {
            origin: StackOrigin::Api,
            failed: None,
            by: "ann".into(),
            why: String::new(),
            entries,
        };
        let activate = |entries| {
            Command::Activate(Activation { stack: stack(entries), offers: Vec::new(), triage: Vec::new() })
        };
        let entry = StackEntry {
            name: "own".into(),
            digest: digest(),
            parameters: "{}".into(),
            permissions: Permissions::default(),
            on_fault: OnFault::Skip,
        };
        let revision = node.ledger.stack.revision;
        let marks = node.ledger.gpus[&gpu].marks.clone();
        let cases = [
            (
                Revision::Marks { gpu: gpu.clone(), marks },
                Command::Cordon { gpu: gpu.clone(), author: author() },
                Refusal::MarksChanged { gpu },
            ),
            (
                Revision::Stack(revision),
                activate(Vec::new()),
                Refusal::StackChanged { revision: revision + 1 },
            ),
            (read(1, false), Command::RecordUpload(version(2)), Refusal::PolicyChanged { digest: digest() }),
            (read(2, false), activate(vec![entry]), Refusal::PolicyChanged { digest: digest() }),
            (read(2, true), activate(Vec::new()), Refusal::PolicyChanged { digest: digest() }),
        ];
        for (expected, change, refusal) in cases {
            let command = Command::Tick.expecting(Some(expected));
            assert_eq!(node.decide(&command).map(drop), Ok(()));
            node.decide(&change).unwrap();
            assert_eq!(node.decide(&command), Err(refusal));
        }
    }

    #[test]
    fn a_gpu_or_a_version_that_is_gone_is_said_to_be_unknown() {
        let node = Node::new();
        let gone = Revision::Marks { gpu: gpu_id("GPU-9"), marks: Marks::default() };
        assert_eq!(gone.check(&node.ledger), Err(Refusal::UnknownGpu { gpu: gpu_id("GPU-9") }));
        assert_eq!(read(1, false).check(&node.ledger), Err(Refusal::UnknownPolicy { digest: digest() }));
    }
}
