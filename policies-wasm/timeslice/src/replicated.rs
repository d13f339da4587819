//! The parameter `resources`: devices to share, selected by the resource that they would be offered as
//! without this policy, as in the configuration of NVIDIA's device plugin.

use berth_policy_sdk::{Node, Part, check_resource, warn};
use serde::Deserialize;

use crate::check_replicas;
use crate::devices::Devices;

/// Attribute of a part: the resource that the daemon itself would offer it as.
const BASELINE_RESOURCE: &str = "baseline.resource";

/// One resource whose devices are shared.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Replicated {
    /// The resource that the daemon itself would use, such as `nvidia.com/gpu` or `nvidia.com/mig-1g.10gb`.
    pub name: String,
    /// The resource of the shares; `name` if it is missing.
    pub rename: Option<String>,
    /// Shares of each device.
    pub replicas: u32,
    /// Which devices; all if it is missing.
    #[serde(default)]
    pub devices: Devices,
}

impl Replicated {
    pub(crate) fn check(&self, key: &str) -> Result<(), String> {
        check_resource(&format!("{key}.name"), &self.name)?;
        check_replicas(&format!("{key}.replicas"), self.replicas)?;
        self.rename.iter().try_for_each(|rename| check_resource(&format!("{key}.rename"), rename))
    }

    /// The resource of the shares.
    pub(crate) fn resource(&self) -> &str {
        self.rename.as_ref().unwrap_or(&self.name)
    }

    /// Whether the daemon itself would offer a part under this name; with `migStrategy: none` this includes
    /// GPUs in MIG mode.
    fn is_name_of(&self, part: &Part) -> bool {
        baseline_resource(part) == Some(self.name.as_str())
    }
}

/// The resource that the daemon itself would offer a part as.
pub(crate) fn baseline_resource(part: &Part) -> Option<&str> {
    let baseline = part.attributes.iter().find(|attribute| attribute.key == BASELINE_RESOURCE);
    baseline.map(|baseline| baseline.value.as_str())
}

/// For each part of the node the first entry that shares it.
pub(crate) fn by_part<'r>(resources: &'r [Replicated], node: &Node) -> Vec<Option<&'r Replicated>> {
    let mut found = vec![None; node.parts.len()];
    for (n, entry) in resources.iter().enumerate() {
        let named: Vec<usize> =
            (0..).zip(&node.parts).filter(|(_, p)| entry.is_name_of(p)).map(|(i, _)| i).collect();
        if named.is_empty() && !node.parts.is_empty() {
            warn(&format!("resources[{n}].name: this node has no device of {}", entry.name));
        }
        for index in chosen(&format!("resources[{n}].devices"), entry, &named, node) {
            found[index].get_or_insert(entry);
        }
    }
    found
}

/// The parts that an entry shares, out of those with its name. Warns of devices that do not exist, unless
/// the node has no part with that name.
fn chosen(key: &str, entry: &Replicated, named: &[usize], node: &Node) -> Vec<usize> {
    let (name, there) = (&entry.name, named.len());
    match &entry.devices {
        _ if named.is_empty() => Vec::new(),
        Devices::All => named.to_vec(),
        Devices::Count(count) => {
            if *count > there {
                warn(&format!(
                    "{key}: {count} devices of {name} are to be shared, but this node has {there}"
                ));
            }
            named.iter().copied().take(*count).collect()
        }
        Devices::List(list) => {
            let fits = |index: &usize, device: &crate::DeviceRef| device.fits(&node.parts[*index]);
            for device in list.iter().filter(|device| !named.iter().any(|index| fits(index, device))) {
                warn(&format!("{key}: {device} is not a device of {name} on this node"));
            }
            named.iter().copied().filter(|index| list.iter().any(|device| fits(index, device))).collect()
        }
    }
}
