//! Errors returned to the kubelet, as gRPC statuses. The kubelet copies the message into the pod's status,
//! so it names the GPU, the resource and a remedy.

use super::parse::BadRequest;
use super::reconciler::with_causes;
use berth_core::keeper::CommandError;
use berth_kernel::ids::names::Resource;
use berth_kernel::node::refusal::Refusal;
use tonic::{Code, Status};

/// The status of an invalid request, with all causes in its message.
pub(super) fn bad_request(error: &BadRequest) -> Status {
    Status::invalid_argument(with_causes(error))
}

/// The status of an Allocate call without a grant.
pub(super) fn refused(resource: &Resource, error: &CommandError) -> Status {
    let text = |advice: &str| format!("{resource}: {error}; {advice}");
    match error {
        CommandError::Refused(refusal) => {
            let (code, advice) = advice(refusal);
            Status::new(code, text(&advice))
        }
        CommandError::Store(_) => {
            Status::unavailable(text("run `berth node check`, and check the disk of the state folder"))
        }
        CommandError::Busy => Status::resource_exhausted(text("recreate the pod")),
        CommandError::Late(_) | CommandError::Stopping => Status::unavailable(text("recreate the pod")),
    }
}

/// The code of a refusal, and its remedy.
fn advice(refusal: &Refusal) -> (Code, String) {
    match refusal {
        Refusal::UnknownDevice { .. } => (
            Code::InvalidArgument,
            "the kubelet's device list is outdated; a new pod gets a listed device".into(),
        ),
        Refusal::NotOffered { .. } => (
            Code::FailedPrecondition,
            "the sharing of this GPU has changed; a new pod gets another device".into(),
        ),
        Refusal::Held { .. } | Refusal::DoesNotFit { .. } => {
            (Code::ResourceExhausted, "wait for its holder to end, or end it; then recreate the pod".into())
        }
        Refusal::Cordoned { gpu, .. } => {
            let advice = format!(
                "run `berth gpu uncordon {gpu} --owner all`, which allows grants again or names what must be deleted first"
            );
            (Code::FailedPrecondition, advice)
        }
        Refusal::OtherApi { gpu, .. } => (
            Code::FailedPrecondition,
            format!(
                "recreate the pod, so that it gets another GPU, or run `berth gpu via {gpu} device-plugin`"
            ),
        ),
        Refusal::Unhealthy { gpu, .. } => {
            (Code::FailedPrecondition, format!("`berth gpu show {gpu}` shows when it is checked again"))
        }
        Refusal::Vanished { gpu } => (
            Code::FailedPrecondition,
            format!("check the node's GPUs; if it was removed permanently, run `berth gpu forget {gpu}`"),
        ),
        Refusal::NoDeviceStrategy { .. } => {
            (Code::FailedPrecondition, "`berth node check` shows what the node offers".into())
        }
        Refusal::NoCdiName { .. } => (
            Code::FailedPrecondition,
            "it is offered once one does; if none will, `berth node check` shows why".into(),
        ),
        Refusal::NotEnforced { .. } => (
            Code::FailedPrecondition,
            "repair that (`berth node show` has the guard's state) and recreate the pod, or request a whole GPU".into(),
        ),
        Refusal::Denied { .. } => (
            Code::PermissionDenied,
            "change the pod, or the policy's parameters (`berth policy list`)".into(),
        ),
        Refusal::Faulted { policy, .. } => (
            Code::Internal,
            format!("repair or deactivate policy {policy}, or set its onFault to skip (`berth policy list`)"),
        ),
        Refusal::Moved => (Code::Aborted, "recreate the pod".into()),
        Refusal::LedgerFull { .. } => {
            (Code::ResourceExhausted, "end some of them (`berth allocation list`)".into())
        }
        // Only operators' commands return these, never an Allocate.
        Refusal::TooManyMarks { .. }
        | Refusal::UnknownGpu { .. }
        | Refusal::NoAnswer { .. }
        | Refusal::StillThere { .. }
        | Refusal::StillHeld { .. }
        | Refusal::TooSoon { .. }
        | Refusal::UnknownAllocation { .. }
        | Refusal::AlreadyEnded { .. }
        | Refusal::StillRunning { .. }
        | Refusal::StackChanged { .. }
        | Refusal::PolicyChanged { .. }
        | Refusal::MarksChanged { .. }
        | Refusal::CannotMoveYet { .. }
        | Refusal::ViaChanged { .. }
        | Refusal::PolicyInUse { .. }
        | Refusal::PolicyShadows { .. }
        | Refusal::UnknownPolicy { .. }
        | Refusal::Untrusted { .. }
        | Refusal::PolicyShipped { .. }
        | Refusal::TooManyVersions { .. }
        | Refusal::BadOffer { .. } => (Code::Internal, "please report this as a bug".into()),
    }
}
