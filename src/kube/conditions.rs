//! The conditions of an object's status.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;

/// A condition without its times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConditionContent {
    /// Its type.
    pub type_: &'static str,
    /// Whether it is True.
    pub status: bool,
    /// The reason in a word.
    pub reason: &'static str,
    /// The reason in a sentence.
    pub message: String,
}

/// The conditions of an object. A condition whose status is that of `before` keeps its time.
#[must_use]
pub fn conditions(
    contents: Vec<ConditionContent>,
    before: &[Condition],
    generation: Option<i64>,
    now: &Time,
) -> Vec<Condition> {
    let with_time = |ConditionContent { type_, status, reason, message }: ConditionContent| {
        let status = if status { "True" } else { "False" };
        // The condition of an object that no daemon has seen yet is as old as the epoch.
        let is_same = |known: &&Condition| {
            known.type_ == type_ && known.status == status && known.last_transition_time != time(0)
        };
        let known = before.iter().find(is_same);
        Condition {
            type_: type_.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            observed_generation: generation,
            last_transition_time: known
                .map_or_else(|| now.clone(), |known| known.last_transition_time.clone()),
        }
    };
    contents.into_iter().map(with_time).collect()
}

/// A time in milliseconds since 1970, in whole seconds as Kubernetes has them.
#[must_use]
pub fn time(wall_ms: u64) -> Time {
    let seconds = i64::try_from(wall_ms / 1000).unwrap_or(i64::MAX);
    Time(Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_time_but_not_that_of_an_object_that_no_daemon_has_seen() {
        let reconciling = |message: &str| ConditionContent {
            type_: "Reconciling",
            status: true,
            reason: "Draining",
            message: message.to_owned(),
        };
        let unseen = conditions(vec![reconciling("")], &[], Some(1), &time(0));
        let first = conditions(vec![reconciling("a")], &unseen, Some(1), &time(7_000));
        assert_eq!(first[0].last_transition_time, time(7_000));
        let later = conditions(vec![reconciling("b")], &first, Some(1), &time(9_000));
        assert_eq!((later[0].last_transition_time.clone(), later[0].message.as_str()), (time(7_000), "b"));
        let other = ConditionContent { status: false, ..reconciling("c") };
        assert_eq!(
            conditions(vec![other], &later, Some(1), &time(9_000))[0].last_transition_time,
            time(9_000)
        );
    }
}
