//! The conditions of a SharingPolicy, as kstatus reads them.

use berth_kube::{ConditionContent, conditions};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// What has become of the specification: the reason in a word, and in a sentence.
pub(super) enum Outcome {
    /// It is carried out.
    Ready(&'static str, String),
    /// It is being carried out.
    Reconciling(&'static str, String),
    /// It is not carried out until an operator acts.
    Stalled(&'static str, String),
}

impl Outcome {
    /// The conditions. One whose status is that of `before` keeps its time.
    pub(super) fn conditions(self, before: &[Condition], generation: i64, now: &Time) -> Vec<Condition> {
        let place = match &self {
            Self::Ready(..) => 0,
            Self::Reconciling(..) => 1,
            Self::Stalled(..) => 2,
        };
        let (Self::Ready(reason, message)
        | Self::Reconciling(reason, message)
        | Self::Stalled(reason, message)) = self;
        let content = |(at, type_): (usize, &'static str)| ConditionContent {
            type_,
            status: at == place,
            reason,
            message: message.clone(),
        };
        let contents = ["Ready", "Reconciling", "Stalled"].into_iter().enumerate().map(content).collect();
        conditions(contents, before, Some(generation), now)
    }
}
