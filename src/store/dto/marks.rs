//! The serialized form of marks.

use berth_kernel::drain::marks::{self as kernel, MARKS_MAX, MarkKind, Owner};
use serde::{Deserialize, Serialize};

/// See [`kernel::Marks`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct Marks {
    marks: Vec<Mark>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drained_ms: Option<u64>,
}

/// See [`kernel::Mark`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Mark {
    owner: String,
    by: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    why: String,
    since_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drain: Option<Drain>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    expired: bool,
}

#[derive(Serialize, Deserialize)]
struct Drain(#[serde(with = "Order")] kernel::Order);

/// See [`kernel::Order`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "kernel::Order", deny_unknown_fields, rename_all = "camelCase")]
struct Order {
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    evict: bool,
    #[serde(rename = "deadlineMs", default, skip_serializing_if = "Option::is_none")]
    deadline_wall_ms: Option<u64>,
    #[serde(skip)]
    deadline_mono_ms: Option<u64>,
    #[serde(with = "AtDeadline")]
    at_deadline: kernel::AtDeadline,
}

/// See [`kernel::AtDeadline`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "kernel::AtDeadline", rename_all = "camelCase")]
enum AtDeadline {
    Wait,
    Delete,
    GiveUp,
}

impl Marks {
    pub(in super::super) fn from_kernel(marks: &kernel::Marks) -> Self {
        let mark = |(owner, mark): (&Owner, &kernel::Mark)| Mark {
            owner: owner.as_str().into(),
            by: mark.by.clone(),
            why: mark.why.clone(),
            since_ms: mark.since_wall_ms,
            drain: mark.order().copied().map(Drain),
            expired: mark.expired,
        };
        Self { marks: marks.by_owner.iter().map(mark).collect(), drained_ms: marks.drained_wall_ms }
    }

    pub(in super::super) fn into_kernel(self) -> Result<kernel::Marks, String> {
        if self.marks.len() > MARKS_MAX {
            return Err(format!("more than {MARKS_MAX} marks"));
        }
        let mut marks = kernel::Marks { drained_wall_ms: self.drained_ms, ..kernel::Marks::default() };
        for mark in self.marks {
            let owner = Owner::parse(&mark.owner).map_err(|e| e.to_string())?;
            let mark = kernel::Mark {
                kind: mark.drain.map_or(MarkKind::Cordon, |drain| MarkKind::Drain(drain.0)),
                by: mark.by,
                why: mark.why,
                since_wall_ms: mark.since_ms,
                expired: mark.expired,
            };
            if marks.by_owner.insert(owner, mark).is_some() {
                return Err("two marks of one owner".into());
            }
        }
        Ok(marks)
    }
}

/// The drain state of a GPU in format 1: one mark, whose owner was not recorded.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) enum MarksOfFormat1 {
    Active,
    Cordoned(MarkOfFormat1),
    Draining(MarkOfFormat1, #[serde(with = "Order")] kernel::Order),
    Drained(MarkOfFormat1),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(in super::super) struct MarkOfFormat1 {
    by: String,
    why: String,
    since_ms: u64,
}

impl MarksOfFormat1 {
    pub(in super::super) fn into_kernel(self) -> kernel::Marks {
        let (mark, kind, is_drained) = match self {
            Self::Active => return kernel::Marks::default(),
            Self::Cordoned(mark) => (mark, MarkKind::Cordon, false),
            Self::Draining(mark, order) => (mark, MarkKind::Drain(order), false),
            Self::Drained(mark) => (mark, MarkKind::Drain(kernel::Order::default()), true),
        };
        let drained_wall_ms = is_drained.then_some(mark.since_ms);
        let why = (kind == MarkKind::Cordon).then(|| without_given_up(&mark.why)).flatten();
        let mark = kernel::Mark {
            kind,
            by: mark.by,
            expired: why.is_some(),
            why: why.unwrap_or(mark.why),
            since_wall_ms: mark.since_ms,
        };
        kernel::Marks { by_owner: [(Owner::operator(), mark)].into(), drained_wall_ms }
    }
}

/// The operator's reason without the suffix that format 1 added when a drain was given up, in parentheses or after
/// a semicolon; `None` if the reason has no such suffix.
fn without_given_up(why: &str) -> Option<String> {
    const GIVEN_UP: &str = "drain given up at its deadline";
    let in_parentheses = why.strip_suffix(')').and_then(|why| why.strip_suffix(GIVEN_UP)?.strip_suffix('('));
    let before = in_parentheses.or_else(|| why.strip_suffix(GIVEN_UP))?;
    match before.strip_suffix("; ").or_else(|| before.strip_suffix(' ')) {
        Some(reason) => Some(reason.to_owned()),
        // Otherwise the operator's reason happens to end with the same text.
        None => before.is_empty().then(String::new),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_suffix_of_a_drain_that_was_given_up_becomes_a_flag() {
        for (why, reason, expired) in [
            ("fan; drain given up at its deadline", "fan", true),
            ("fan (drain given up at its deadline)", "fan", true),
            ("drain given up at its deadline", "", true),
            ("(drain given up at its deadline)", "", true),
            ("nodrain given up at its deadline", "nodrain given up at its deadline", false),
            ("fan", "fan", false),
        ] {
            let mark = MarkOfFormat1 { by: "ada".into(), why: why.into(), since_ms: 7 };
            let marks = MarksOfFormat1::Cordoned(mark).into_kernel();
            let mark = &marks.by_owner[&Owner::operator()];
            assert_eq!((mark.why.as_str(), mark.expired), (reason, expired));
        }
    }
}
