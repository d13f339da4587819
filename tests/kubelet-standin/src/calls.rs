//! Counts and durations of calls.

use std::{collections::HashMap, time::Duration};

/// The counted calls: first those that the kubelet serves, then those that it makes.
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
    /// Pods.WatchPods: an opened stream.
    WatchPods,
    /// DevicePlugin.GetDevicePluginOptions.
    GetDevicePluginOptions,
    /// DevicePlugin.ListAndWatch: an opened stream.
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

/// Statistics of one call for one resource since the stand-in was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallStats {
    /// Finished calls, including failed ones.
    pub count: u64,
    /// Failed calls.
    pub errors: u64,
    /// The total duration.
    pub total: Duration,
    /// The longest duration.
    pub longest: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct Calls(HashMap<(Rpc, String), CallStats>);

impl Calls {
    pub(crate) fn record(&mut self, rpc: Rpc, resource: &str, duration: Duration, failed: bool) {
        let stats = self.0.entry((rpc, resource.to_owned())).or_default();
        stats.count += 1;
        stats.errors += u64::from(failed);
        stats.total += duration;
        stats.longest = stats.longest.max(duration);
    }

    pub(crate) fn get(&self, rpc: Rpc, resource: &str) -> CallStats {
        self.0.get(&(rpc, resource.to_owned())).copied().unwrap_or_default()
    }
}
