//! Records each policy call made through it.

use berth_kernel::ids::names::Digest;
use berth_kernel::node::ports::{Call, CallOutput, InstallError, PolicyRuntime};
use berth_kernel::policy::hooks::{Answer, Fault, Hook};
use berth_kernel::policy::version::PolicyVersion;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// One call of one policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedCall {
    /// The policy version's digest.
    pub digest: Digest,
    /// The version's label; empty if the node does not know it.
    pub policy: String,
    /// The hook that was called.
    pub hook: Hook,
    /// The answer, before the daemon checks it; `None` is `pass`.
    pub answer: Result<Option<Answer>, Fault>,
    /// Lines that the policy logged.
    pub log_lines: Vec<String>,
}

/// Wraps a [`PolicyRuntime`] and records the calls.
pub struct CallRecorder<'p> {
    policies: &'p dyn PolicyRuntime,
    calls: Mutex<VecDeque<RecordedCall>>,
}

impl<'p> CallRecorder<'p> {
    /// A recorder without calls.
    #[must_use]
    pub fn new(policies: &'p dyn PolicyRuntime) -> Self {
        Self { policies, calls: Mutex::default() }
    }

    /// Removes and returns the recorded calls, in order.
    #[must_use]
    pub fn take(&self) -> VecDeque<RecordedCall> {
        std::mem::take(&mut *self.calls.lock())
    }
}

impl PolicyRuntime for CallRecorder<'_> {
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        self.policies.load(version)
    }

    fn call(&self, call: Call<'_>) -> CallOutput {
        let (digest, hook) = (call.digest.clone(), call.question.hook());
        let policy = call.node.policies.get(&digest).map_or_else(String::new, |version| version.label());
        let output = self.policies.call(call);
        let (answer, log_lines) = (output.answer.clone(), output.log_lines.clone());
        self.calls.lock().push_back(RecordedCall { digest, policy, hook, answer, log_lines });
        output
    }
}
