//! Counts of calls and how long they took.

use std::{collections::HashMap, time::Duration};

/// The calls that are counted. The first group comes from plugins and readers,
/// the second goes to plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rpc {
    /// Registration.Register.
    Register,
    /// PodResourcesLister.List.
    List,
    /// PodResourcesLister.GetAllocatableResources.
    GetAllocatableResources,
    /// PodResourcesLister.Get.
    Get,
    /// Pods.WatchPods: a stream opened.
    WatchPods,
    /// DevicePlugin.GetDevicePluginOptions.
    GetDevicePluginOptions,
    /// A ListAndWatch stream opened.
    ListAndWatch,
    /// A message on a ListAndWatch stream.
    ListMessage,
    /// DevicePlugin.GetPreferredAllocation.
    GetPreferredAllocation,
    /// DevicePlugin.Allocate.
    Allocate,
    /// DevicePlugin.PreStartContainer.
    PreStartContainer,
}

/// What happened with one call of one resource since the stand-in was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallStats {
    /// Calls finished, failed ones included.
    pub count: u64,
    /// Those that failed.
    pub errors: u64,
    /// Time spent in all of them.
    pub total: Duration,
    /// The longest.
    pub longest: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Calls(HashMap<(Rpc, String), CallStats>);

impl Calls {
    pub(crate) fn record(&mut self, rpc: Rpc, resource: &str, took: Duration, failed: bool) {
        let stats = self.0.entry((rpc, resource.to_owned())).or_default();
        stats.count += 1;
        stats.errors += u64::from(failed);
        stats.total += took;
        stats.longest = stats.longest.max(took);
    }

    pub(crate) fn get(&self, rpc: Rpc, resource: &str) -> CallStats {
        self.0.get(&(rpc, resource.to_owned())).copied().unwrap_or_default()
    }
}
