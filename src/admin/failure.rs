//! Converts refusals and errors of the core into problems. No wildcard arm: a new refusal does not compile until it
//! has a problem.

use berth_api::{Action, Kind, Operation};
use berth_core::keeper::CommandError;
use berth_core::lab::{LabError, TrialError};
use berth_core::policies::signatures::SignatureError;
use berth_core::policies::{DeleteError, UploadError};
use berth_core::{ActivateError, Unprepared};
use berth_http::Failure;
use berth_kernel::node::ports::InstallError;
use berth_kernel::node::refusal::Refusal;

/// `Retry-After` while inboxes are full, seconds: a command takes about a millisecond.
const BUSY_RETRY_S: u64 = 1;
/// `Retry-After` while another policy is compiled, seconds.
const COMPILE_RETRY_S: u64 = 5;
/// `Retry-After` while another replay runs, seconds: it takes at most 20 s.
const REPLAY_RETRY_S: u64 = 20;
/// `Retry-After` after an error of the store, seconds: it is checked every half second.
const STORE_RETRY_S: u64 = 2;

/// The hint for a policy without a signature of a trusted key.
const UNSIGNED_HINT: &str = "sign the file with the private half of such a key (openssl pkeyutl -sign -rawin) and upload both; \
     trustedKeys in the configuration file names the keys";

/// Conversion of an error of the core.
pub(crate) trait IntoFailure {
    /// The response's error.
    fn into_failure(self) -> Failure;
}

/// Conversion of a result of the core.
pub(crate) trait OrFailure<T> {
    /// The value, or the response's error.
    fn or_failure(self) -> Result<T, Failure>;
}

impl<T, E: IntoFailure> OrFailure<T> for Result<T, E> {
    fn or_failure(self) -> Result<T, Failure> {
        self.map_err(IntoFailure::into_failure)
    }
}

impl IntoFailure for Refusal {
    fn into_failure(self) -> Failure {
        let problem = |kind| Failure::new(kind, &self);
        match &self {
            Refusal::UnknownDevice { .. } => problem(Kind::UnknownDevice),
            Refusal::NotOffered { .. }
            | Refusal::OtherApi { .. }
            | Refusal::Cordoned { .. }
            | Refusal::Unhealthy { .. }
            | Refusal::Vanished { .. }
            | Refusal::NoDeviceStrategy { .. }
            | Refusal::NoCdiName { .. }
            | Refusal::NotEnforced { .. } => problem(Kind::State),
            Refusal::NoAnswer { .. } => problem(Kind::State).hint(
                "it is scanned again every few seconds: reset it, or repair the driver, the slot or the node, and mark it \
                 healthy once it answers; it also becomes healthy by itself after a time without errors",
            ),
            Refusal::StillThere { .. } => problem(Kind::State)
                .hint("to stop grants on a GPU that is present, cordon it instead"),
            Refusal::TooSoon { wait_ms, .. } => {
                problem(Kind::State).retry_after(wait_ms.div_ceil(1000))
            }
            Refusal::Held { .. } | Refusal::DoesNotFit { .. } => problem(Kind::Held),
            Refusal::StillHeld { by, .. } => problem(Kind::Held)
                .hint("it ends once its pod is gone; if no source reports the pod, end it")
                .action(Action::new(Operation::EndAllocation, &[("id", &by.to_string())])),
            Refusal::Denied { .. } | Refusal::Faulted { .. } => problem(Kind::Denied),
            Refusal::Moved => problem(Kind::Changed).retry_after(BUSY_RETRY_S),
            Refusal::StackChanged { .. } => problem(Kind::Changed)
                .hint("read the active stack before you repeat the change")
                .action(Operation::GetStack),
            Refusal::MarksChanged { gpu } => problem(Kind::Changed)
                .hint("read the drain state before you repeat the request")
                .action(Action::new(Operation::GetGpu, &[("uuid", gpu.as_str())])),
            Refusal::ViaChanged { gpu } => problem(Kind::Changed)
                .hint("read the GPU before you repeat the request")
                .action(Action::new(Operation::GetGpu, &[("uuid", gpu.as_str())])),
            Refusal::CannotMoveYet { gpu, .. } => problem(Kind::State)
                .hint("it is moved by itself when that has ended")
                .action(Action::new(Operation::GetGpu, &[("uuid", gpu.as_str())])),
            Refusal::PolicyChanged { .. } => problem(Kind::Changed)
                .hint("read the policy before you repeat the request"),
            Refusal::Untrusted { .. } => problem(Kind::Untrusted).hint(UNSIGNED_HINT),
            Refusal::LedgerFull { .. } | Refusal::TooManyVersions { .. } => problem(Kind::Limit),
            Refusal::TooManyMarks { gpu } => problem(Kind::Limit)
                .hint("remove the mark of an owner who no longer needs it; the GPU shows its marks")
                .action(Action::new(Operation::GetGpu, &[("uuid", gpu.as_str())])),
            Refusal::UnknownGpu { .. } => {
                problem(Kind::UnknownGpu).hint("list the GPUs with their UUIDs").action(Operation::ListGpus)
            }
            Refusal::UnknownAllocation { .. } => {
                problem(Kind::UnknownAllocation).hint("list the allocations").action(Operation::ListAllocations)
            }
            Refusal::AlreadyEnded { .. } => problem(Kind::Ended),
            Refusal::StillRunning { id, .. } => problem(Kind::Running)
                .hint(
                    "delete the pod, and the allocation ends by itself; to free its devices while the pod runs, end it \
                     by force",
                )
                .action(Action::new(Operation::EndAllocation, &[("id", &id.to_string()), ("force", "true")])),
            Refusal::UnknownPolicy { .. } => {
                problem(Kind::UnknownPolicy).hint("list the policies").action(Operation::ListPolicies)
            }
            Refusal::PolicyInUse { .. } => problem(Kind::InUse)
                .hint("activate a stack without it")
                .action(Operation::ActivateStack),
            Refusal::PolicyShadows { shadow, .. } => {
                problem(Kind::InUse)
                    .hint("end the shadow")
                    .action(Action::new(Operation::EndShadow, &[("id", &shadow.to_string())]))
            }
            Refusal::PolicyShipped { .. } => problem(Kind::InUse),
            Refusal::BadOffer { .. } => problem(Kind::StackFails),
        }
    }
}

impl IntoFailure for CommandError {
    fn into_failure(self) -> Failure {
        match self {
            CommandError::Refused(refusal) => refusal.into_failure(),
            CommandError::Store(_) => Failure::new(Kind::Store, &self)
                .hint("check the disk of the state folder: is it full, read-only or missing?")
                .retry_after(STORE_RETRY_S),
            CommandError::Busy => Failure::new(Kind::Busy, &self).retry_after(BUSY_RETRY_S),
            CommandError::Late(_) => {
                Failure::new(Kind::Late, &self).hint("read the state again before a retry")
            }
            CommandError::Stopping => Failure::new(Kind::Stopping, &self),
        }
    }
}

impl IntoFailure for InstallError {
    fn into_failure(self) -> Failure {
        uninstalled(&self, &self)
    }
}

impl IntoFailure for Unprepared {
    fn into_failure(self) -> Failure {
        uninstalled(&self.error, &self)
    }
}

fn uninstalled(error: &InstallError, message: &dyn std::fmt::Display) -> Failure {
    let problem = |kind| Failure::new(kind, message);
    match error {
        InstallError::TooLarge { .. } => problem(Kind::TooLarge),
        InstallError::NotAPolicy { .. } => problem(Kind::NotAPolicy),
        InstallError::TooCostly { .. } => problem(Kind::TooCostly),
        InstallError::Busy => problem(Kind::Busy).retry_after(COMPILE_RETRY_S),
        InstallError::Lost { .. } => problem(Kind::Lost),
        InstallError::Stopping => problem(Kind::Stopping),
        InstallError::Failed { .. } => problem(Kind::Internal)
            .hint("no stack and no version was changed; fix this on the node (the folder policies in the state folder, its disk, its memory) and repeat the request"),
    }
}

impl IntoFailure for UploadError {
    fn into_failure(self) -> Failure {
        match self {
            UploadError::Signature(error) => Failure::new(Kind::Untrusted, &error).hint(match error {
                SignatureError::Missing { .. } | SignatureError::Wrong { .. } => UNSIGNED_HINT,
                SignatureError::CoreModule => "convert it into a component first, and sign that",
            }),
            UploadError::Install(error) => error.into_failure(),
            UploadError::Command(error) => error.into_failure(),
        }
    }
}

impl IntoFailure for DeleteError {
    fn into_failure(self) -> Failure {
        match self {
            DeleteError::AtWork => Failure::new(Kind::Busy, &self).retry_after(COMPILE_RETRY_S),
            DeleteError::Command(error) => error.into_failure(),
        }
    }
}

impl IntoFailure for ActivateError {
    fn into_failure(self) -> Failure {
        match self {
            ActivateError::Fails { passing: true, .. } => Failure::new(Kind::StackFails, &self).hint(
                "the active stack is unchanged; an overloaded node can also cause this: repeat the request, and if it \
                 fails again, fix the policy, which is too slow",
            ),
            ActivateError::Fails { .. } => Failure::new(Kind::StackFails, &self)
                .hint("the active stack is unchanged; fix the policy, its parameters or its permissions"),
            ActivateError::Unprepared(ref unprepared) => uninstalled(&unprepared.error, &self),
            ActivateError::FileChanged => Failure::new(Kind::Changed, &self)
                .hint("the active stack is unchanged; repeat the request"),
            ActivateError::Command(error) => error.into_failure(),
        }
    }
}

impl IntoFailure for LabError {
    fn into_failure(self) -> Failure {
        match self {
            LabError::None => {
                Failure::new(Kind::NoJournal, &self).hint("set decisions.maxMiB in the configuration")
            }
            LabError::Journal { .. } => Failure::new(Kind::Internal, &self),
            LabError::Unprepared(error) => error.into_failure(),
            LabError::Fails { .. } => {
                Failure::new(Kind::StackFails, &self).hint("fix the policy or its parameters")
            }
            LabError::Command(error) => error.into_failure(),
            LabError::Busy => Failure::new(Kind::Busy, &self).retry_after(REPLAY_RETRY_S),
            LabError::ShadowsFull => {
                Failure::new(Kind::Limit, &self).hint("end one of the shadows").action(Operation::ListShadows)
            }
            LabError::Stopping => Failure::new(Kind::Stopping, &self),
        }
    }
}

impl IntoFailure for TrialError {
    fn into_failure(self) -> Failure {
        match self {
            TrialError::Unprepared(error) => error.into_failure(),
            TrialError::Busy => Failure::new(Kind::Busy, self).retry_after(COMPILE_RETRY_S),
            TrialError::Full => {
                Failure::new(Kind::Limit, self).hint("`\"alone\": true` leaves the other entries out")
            }
            TrialError::Stopping => Failure::new(Kind::Stopping, self),
        }
    }
}
