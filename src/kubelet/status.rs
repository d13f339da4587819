//! Every "no" to the kubelet, as a gRPC status. The kubelet puts its text into the pod's status,
//! where a person reads it: so it names the GPU and the resource, and says what to do.

use super::parse::BadRequest;
use berth_core::keeper::CommandError;
use berth_kernel::names::Resource;
use berth_kernel::refusal::Refusal;
use tonic::{Code, Status};

/// A request that means nothing, with its whole chain of causes.
pub(super) fn bad_request(error: &BadRequest) -> Status {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    Status::invalid_argument(text)
}

/// Why there was no grant.
pub(super) fn declined(resource: &Resource, error: &CommandError) -> Status {
    let text = |advice: &str| format!("{resource}: {error}; {advice}");
    match error {
        CommandError::Refused(refusal) => {
            let (code, advice) = advice(refusal);
            Status::new(code, text(&advice))
        }
        CommandError::Store(_) => {
            Status::unavailable(text("see `berth node check` and its state folder's disk"))
        }
        CommandError::Busy => Status::resource_exhausted(text("make the pod anew")),
        CommandError::Late(_) | CommandError::Stopping => Status::unavailable(text("make the pod anew")),
    }
}

/// The code of a refusal, and what to do about it.
fn advice(refusal: &Refusal) -> (Code, String) {
    match refusal {
        Refusal::UnknownDevice { .. } => {
            (Code::InvalidArgument, "the kubelet has an old list; a new pod will get a listed device".into())
        }
        Refusal::NotOffered { .. } => (
            Code::FailedPrecondition,
            "how this GPU is shared has changed; a new pod will get another device".into(),
        ),
        Refusal::Held { .. } | Refusal::DoesNotFit { .. } => {
            (Code::ResourceExhausted, "wait for its holder to end, or end it; then make the pod anew".into())
        }
        Refusal::Cordoned { gpu, .. } => {
            (Code::FailedPrecondition, format!("`berth gpu uncordon {gpu}` lets it be granted again"))
        }
        Refusal::Unhealthy { gpu, .. } => {
            (Code::FailedPrecondition, format!("`berth gpu show {gpu}` says when it is looked at again"))
        }
        Refusal::Vanished { gpu } => (
            Code::FailedPrecondition,
            format!(
                "look at the node's GPUs; if it is gone for good, `berth gpu forget {gpu}` lets go of it"
            ),
        ),
        Refusal::Denied { .. } => (
            Code::PermissionDenied,
            "change the pod, or the policy's parameters (`berth policy list`)".into(),
        ),
        Refusal::Faulted { policy, .. } => (
            Code::Internal,
            format!("repair or deactivate policy {policy}, or set its onFault to skip (`berth policy list`)"),
        ),
        Refusal::Moved => (Code::Aborted, "make the pod anew".into()),
        Refusal::LedgerFull { .. } => {
            (Code::ResourceExhausted, "end some of them (`berth allocation list`)".into())
        }
        // Answers to operators' commands; an Allocate never meets them.
        Refusal::UnknownGpu { .. }
        | Refusal::NoAnswer { .. }
        | Refusal::StillThere { .. }
        | Refusal::StillHeld { .. }
        | Refusal::TooSoon { .. }
        | Refusal::UnknownAllocation { .. }
        | Refusal::AlreadyEnded { .. }
        | Refusal::StillRunning { .. }
        | Refusal::StackMoved { .. }
        | Refusal::PolicyInUse { .. }
        | Refusal::PolicyShadows { .. }
        | Refusal::UnknownPolicy { .. }
        | Refusal::Untrusted { .. }
        | Refusal::PolicyShipped { .. }
        | Refusal::TooManyVersions { .. }
        | Refusal::BadOffer { .. } => (Code::Internal, "please report this as a bug".into()),
    }
}
