//! The parameter `resources` of every placement policy: the resources that it places.

use serde::Deserialize;

use crate::room::part_of;
use crate::{Consumes, Node, Part, check_resource};

/// Names of resources; without the parameter the policy's own default applies.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(transparent)]
pub struct Resources(Option<Vec<String>>);

/// What the devices of a resource are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Whole GPUs.
    Whole,
    /// MIG instances.
    Instance,
    /// Shares of GPUs or instances.
    Share,
}

impl Resources {
    /// Checks the names.
    ///
    /// # Errors
    /// A sentence for the operator.
    pub fn check(&self) -> Result<(), String> {
        match &self.0 {
            Some(names) if names.is_empty() => {
                Err("resources: the list is empty; omit it to place all resources".to_owned())
            }
            Some(names) => (0..)
                .zip(names)
                .try_for_each(|(n, name): (u32, _)| check_resource(&format!("resources[{n}]"), name)),
            None => Ok(()),
        }
    }

    /// Whether a resource is to be placed: it is in the list, or there is no list and `otherwise` accepts
    /// the kind of its devices. A resource without devices is never placed.
    pub fn include(&self, node: &Node, resource: u32, otherwise: impl Fn(Kind) -> bool) -> bool {
        let Some(kind) = Kind::of(node, resource) else {
            return false;
        };
        match &self.0 {
            Some(names) => {
                let name = usize::try_from(resource).ok().and_then(|index| node.resources.get(index));
                name.is_some_and(|name| names.contains(name))
            }
            None => otherwise(kind),
        }
    }
}

impl Kind {
    /// The kind of a resource in the present offers. Devices of an earlier offer stay listed for a while
    /// and count only if the resource is no longer offered. If a resource has several kinds, shares take
    /// precedence over instances, and instances over whole GPUs. `None` if it has no device.
    #[must_use]
    pub fn of(node: &Node, resource: u32) -> Option<Self> {
        let name = node.resources.get(usize::try_from(resource).ok()?)?;
        let lines = node.parts.iter().flat_map(|part| part.offered.iter().map(move |line| (part, line)));
        let offered = lines.filter(|(_, line)| line.resource == *name);
        offered.map(|(part, line)| Self::from(line.consumes, part)).max().or_else(|| {
            let device = node.devices.iter().find(|device| device.resource == resource)?;
            Some(Self::from(device.consumes, part_of(node, device)?))
        })
    }

    fn from(consumes: Consumes, part: &Part) -> Self {
        match (consumes, part.parent) {
            (Consumes::Slice(_), _) => Self::Share,
            (Consumes::Whole, Some(_)) => Self::Instance,
            (Consumes::Whole, None) => Self::Whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceState;
    use crate::testing::{NodeBuilder, share};

    fn read(json: &str) -> Resources {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_list_of_names_decides_and_without_one_the_kind() {
        let node = NodeBuilder::new()
            .gpus(2, "Test GPU", 4096)
            .mig(1, "1g.1gb", 1, 1024)
            .devices(0, "a.b/whole", 1, Consumes::Whole)
            .devices(0, "a.b/share", 2, share(2, 4096))
            .devices(2, "a.b/mig", 1, Consumes::Whole)
            .build()
            .node;
        let included = |json: &str| {
            let resources = read(json);
            (0..4).map(|n| resources.include(&node, n, |kind| kind == Kind::Share)).collect::<Vec<_>>()
        };
        assert_eq!(included("null"), [false, true, false, false]);
        assert_eq!(included(r#"["a.b/mig", "a.b/whole"]"#), [true, false, true, false]);
        assert_eq!(Kind::of(&node, 2), Some(Kind::Instance));
        assert_eq!(Kind::of(&node, 9), None);
    }

    #[test]
    fn devices_of_an_earlier_offer_do_not_decide_the_kind() {
        let mut node = NodeBuilder::new()
            .gpus(2, "Test GPU", 4096)
            .devices(0, "a.b/gpu", 1, Consumes::Whole)
            .devices(0, "a.b/gpu", 2, share(2, 4096))
            .build()
            .node;
        node.parts[0].offered.remove(0);
        node.devices[0].state = DeviceState::Retiring;
        assert_eq!(Kind::of(&node, 0), Some(Kind::Share));
        // The resource is no longer offered, and one of its devices is retiring.
        node.parts[0].offered.clear();
        assert_eq!(Kind::of(&node, 0), Some(Kind::Whole));
    }

    #[test]
    fn errors_of_wrong_names_have_their_position() {
        assert_eq!(read(r#"["a.b/c"]"#).check(), Ok(()));
        assert!(read(r#"["a.b/c", "d"]"#).check().unwrap_err().starts_with("resources[1]: `d`"));
        assert!(read("[]").check().unwrap_err().starts_with("resources: the list is empty"));
    }
}
