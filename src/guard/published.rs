//! What the guard shows to daemons, as a whole and as changes.

use berth_proto::guard::{Container, ContainerBypass, ContainerBypasses, Status, Update};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// What the guard shows to daemons.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Published {
    pub(crate) status: Status,
    /// UIDs of the pods whose sandbox runs.
    pub(crate) pods: BTreeSet<String>,
    /// Containers with allocations, by id.
    pub(crate) containers: BTreeMap<String, Arc<Container>>,
    /// What the guard did about containers that could use GPUs that were not allocated to them.
    pub(crate) bypasses: Vec<ContainerBypass>,
}

impl Published {
    /// All of it.
    pub(crate) fn whole(&self) -> Update {
        Update { is_whole: true, ..self.since(&Self::default()) }
    }

    /// What has changed since `before`.
    pub(crate) fn since(&self, before: &Self) -> Update {
        let is_new =
            |(id, container): &(&String, &Arc<Container>)| before.containers.get(*id) != Some(*container);
        let removed = before.containers.keys().filter(|id| !self.containers.contains_key(*id));
        Update {
            is_whole: false,
            status: (self.status != before.status).then(|| self.status.clone()),
            containers: self.containers.iter().filter(is_new).map(|(_, one)| Container::clone(one)).collect(),
            removed_containers: removed.cloned().collect(),
            pods: self.pods.difference(&before.pods).cloned().collect(),
            removed_pods: before.pods.difference(&self.pods).cloned().collect(),
            container_bypasses: (self.bypasses != before.bypasses)
                .then(|| ContainerBypasses { containers: self.bypasses.clone() }),
        }
    }

    /// Takes over what the guard sent.
    pub(crate) fn apply(&mut self, update: Update) {
        if update.is_whole {
            *self = Self::default();
        }
        if let Some(status) = update.status {
            self.status = status;
        }
        if let Some(ContainerBypasses { containers }) = update.container_bypasses {
            self.bypasses = containers;
        }
        self.pods.retain(|uid| !update.removed_pods.contains(uid));
        self.pods.extend(update.pods);
        update.removed_containers.iter().for_each(|id| drop(self.containers.remove(id)));
        self.containers.extend(update.containers.into_iter().map(|one| (one.id.clone(), Arc::new(one))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_map, btree_set};
    use proptest::prelude::*;

    fn container(id: &str, pod: &str) -> Container {
        Container { id: id.into(), pod: pod.into(), ..Container::default() }
    }

    fn published(run: u64, pods: &[&str], containers: &[(&str, &str)]) -> Published {
        Published {
            status: Status { run, ..Status::default() },
            pods: pods.iter().map(|uid| (*uid).to_owned()).collect(),
            containers: containers
                .iter()
                .map(|(id, pod)| ((*id).to_owned(), Arc::new(container(id, pod))))
                .collect(),
            bypasses: vec![ContainerBypass {
                count: u32::try_from(run).unwrap(),
                ..ContainerBypass::default()
            }],
        }
    }

    #[test]
    fn only_what_changed_is_sent() {
        let before = published(1, &["a", "b"], &[("c", "p"), ("d", "p")]);
        let now = published(1, &["b"], &[("d", "p"), ("e", "p")]);
        let update = now.since(&before);
        assert_eq!(
            (update.removed_pods, update.removed_containers),
            (vec!["a".to_owned()], vec!["c".to_owned()])
        );
        assert_eq!((update.containers, update.pods), (vec![container("e", "p")], Vec::new()));
        assert_eq!(update.status, None);
        assert_eq!(now.since(&now), Update::default());
    }

    proptest! {
        #[test]
        fn changes_that_are_applied_give_what_was_published(
            states in prop::collection::vec(
                (0u64..3, btree_set("[a-d]", 0..4), btree_map("[a-d]", "[x-z]", 0..4)),
                1..8,
            ),
        ) {
            let states: Vec<Published> = states.iter().map(|(run, pods, containers)| {
                let pods: Vec<_> = pods.iter().map(String::as_str).collect();
                let containers: Vec<_> = containers.iter().map(|(id, pod)| (id.as_str(), pod.as_str())).collect();
                published(*run, &pods, &containers)
            }).collect();
            let mut followed = published(9, &["old"], &[("old", "old")]);
            followed.apply(states[0].whole());
            for pair in states.windows(2) {
                followed.apply(pair[1].since(&pair[0]));
            }
            prop_assert_eq!(&followed, states.last().unwrap());
        }
    }
}
