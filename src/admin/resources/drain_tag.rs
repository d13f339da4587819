//! The strong tag of a GPU's drain state, for `If-Match`.

use berth_kernel::drain::{AtDeadline, Marks};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The tag of a GPU's drain state: it depends on what operators set, not on the progress.
pub(crate) fn of(marks: &Marks) -> String {
    let state = marks.drain();
    if marks.is_empty() {
        return format!("\"{}\"", state.as_str());
    }
    let mut hasher = DefaultHasher::new();
    marks.drained_wall_ms.hash(&mut hasher);
    for (owner, mark) in &marks.by_owner {
        let order = mark.order().map(|order| {
            let then = match order.at_deadline {
                AtDeadline::Wait => 0u8,
                AtDeadline::Delete => 1,
                AtDeadline::GiveUp => 2,
            };
            (order.evict, order.deadline_wall_ms, then)
        });
        (owner.as_str(), &mark.by, &mark.why, mark.since_wall_ms, order, mark.expired).hash(&mut hasher);
    }
    format!("\"{}-{:016x}\"", state.as_str(), hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::drain::{Mark, MarkKind, Order, Owner};

    #[test]
    fn the_tag_of_a_drain_depends_on_all_that_operators_set() {
        let late = Order { deadline_wall_ms: Some(9), ..Order::default() };
        let drain = |order| Mark { kind: MarkKind::Drain(order), ..Mark::cordon("admin", "a", 7) };
        let of_one = |mark: Mark| Marks::from(mark);
        let second = |mut marks: Marks| {
            marks.by_owner.insert(Owner::api("bob"), Mark::cordon("bob", "", 8));
            marks
        };
        let states = [
            Marks::default(),
            of_one(Mark::cordon("admin", "a", 7)),
            of_one(Mark::cordon("admin", "b", 7)),
            of_one(Mark { expired: true, ..Mark::cordon("admin", "a", 7) }),
            of_one(drain(Order::default())),
            of_one(drain(Order { evict: true, ..Order::default() })),
            of_one(drain(Order { at_deadline: AtDeadline::GiveUp, ..late })),
            of_one(drain(late)),
            second(of_one(drain(late))),
            Marks { drained_wall_ms: Some(9), ..of_one(drain(Order::default())) },
        ];
        let tags: std::collections::BTreeSet<_> = states.iter().map(of).collect();
        assert_eq!(tags.len(), states.len());
        assert_eq!(of(&states[1]), of(&states[1].clone()));
    }
}
