//! What ResourceSlices have: devices, and the counters that keep a GPU from being allocated whole and in shares at once.

use super::quantity::mebibytes;
use berth_kernel::sharing::publish::{Attribute, Capacity, MEMORY, PublishedDevice, SHARES, Shares, Taint};
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, CounterSet, Device, DeviceAttribute,
    DeviceCapacity, DeviceCounterConsumption, DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

/// Most devices of one slice that has taints or counters (`resource.k8s.io/v1`:
/// `ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`).
const DEVICES_PER_SLICE: usize = 64;
/// Most sets of counters of one slice (the same: `ResourceSliceMaxCounterSets`).
const COUNTER_SETS_PER_SLICE: usize = 8;
/// The one counter of a set: the whole GPU takes it, and so does the device of its shares, once for all claims.
const COUNTER: &str = "exclusive";

/// The devices or the counters of one slice: the API allows only one of the two.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SliceContents {
    pub(crate) devices: Vec<Device>,
    pub(crate) counters: Vec<CounterSet>,
}

/// Fields that an API server drops without an error if their feature gate is off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GatedFields {
    /// Taints of devices: `DRADeviceTaints`.
    pub(crate) taints: bool,
    /// Devices that several claims share: `DRAConsumableCapacity`.
    pub(crate) shares: bool,
    /// Counters: `DRAPartitionableDevices`.
    pub(crate) counters: bool,
}

impl GatedFields {
    /// The fields that a device has.
    pub(crate) fn of(device: &Device) -> Self {
        Self {
            taints: device.taints.as_ref().is_some_and(|taints| !taints.is_empty()),
            shares: device.allow_multiple_allocations == Some(true),
            counters: device.consumes_counters.as_ref().is_some_and(|consumes| !consumes.is_empty()),
        }
    }

    /// These fields but for those of `other`.
    pub(crate) fn without(self, other: Self) -> Self {
        Self {
            taints: self.taints && !other.taints,
            shares: self.shares && !other.shares,
            counters: self.counters && !other.counters,
        }
    }

    /// A device that has these fields, for a dry run.
    pub(crate) fn probe_device(self, driver: &str) -> Device {
        Device {
            name: "probe".into(),
            taints: self.taints.then(|| vec![taint(driver, Taint::Cordoned)]),
            allow_multiple_allocations: self.shares.then_some(true),
            consumes_counters: self.counters.then(|| vec![consumption(COUNTER)]),
            ..Device::default()
        }
    }

    /// Logs what is no longer published because the API server drops these fields; `before` are those that it dropped until now.
    pub(crate) fn log_dropped(self, before: Self) {
        if self.taints && !before.taints {
            tracing::warn!(
                "the API server drops the taints of devices (feature gate DRADeviceTaints): GPUs that are to be given to no \
                 further claim are left out of the ResourceSlices instead"
            );
        }
        let why = self.why_no_shares().or_else(|| self.why_no_counters());
        if let Some(why) = why.filter(|_| (self.shares, self.counters) != (before.shares, before.counters)) {
            tracing::warn!(why, "shares of GPUs are left out of the ResourceSlices");
        }
    }

    /// Why shares are left out if these fields are dropped; `None` if they are not.
    pub(crate) fn why_no_shares(self) -> Option<String> {
        let why = "the API server drops `allowMultipleAllocations`: enable the API server's feature gate DRAConsumableCapacity";
        self.shares.then(|| why.to_owned())
    }

    /// The same of the shares of GPUs that are also offered whole.
    pub(crate) fn why_no_counters(self) -> Option<String> {
        let why = "the API server drops counters, so GPUs that are offered both whole and in shares are published whole \
                   only: enable the API server's feature gate DRAPartitionableDevices";
        self.counters.then(|| why.to_owned())
    }
}

/// The contents of the slices that publish these devices, with the fields that can be used. There is at least one slice.
pub(crate) fn contents(
    published: &[PublishedDevice],
    usable: GatedFields,
    driver: &str,
) -> Vec<SliceContents> {
    let can_count = usable.shares && usable.counters;
    // The scheduler would allocate a device whose taint was dropped, and a GPU both whole and in shares without a counter.
    let is_shown = |device: &&PublishedDevice| {
        let is_counted = can_count || device.counter.is_none();
        let is_allocatable = match device.capacity {
            Capacity::Whole { .. } => is_counted || !device.is_other_held,
            Capacity::Shared(_) => usable.shares && is_counted,
        };
        is_allocatable && (usable.taints || device.taints.is_empty())
    };
    let shown = || published.iter().filter(is_shown);
    let mut counters: Vec<&str> = shown().filter_map(|device| device.counter.as_deref()).collect();
    counters.sort_unstable();
    counters.dedup();
    counters.retain(|_| can_count);
    let counters: Vec<CounterSet> = counters
        .into_iter()
        .map(|name| CounterSet { name: name.to_owned(), counters: one_counter() })
        .collect();
    let devices: Vec<Device> = shown().map(|device| convert(device, can_count, driver)).collect();
    let mut slices: Vec<SliceContents> = counters
        .chunks(COUNTER_SETS_PER_SLICE)
        .map(|counters| SliceContents { counters: counters.to_vec(), devices: Vec::new() })
        .collect();
    slices.extend(
        devices
            .chunks(DEVICES_PER_SLICE)
            .map(|devices| SliceContents { devices: devices.to_vec(), counters: Vec::new() }),
    );
    if slices.is_empty() {
        slices.push(SliceContents::default());
    }
    slices
}

fn one_counter() -> BTreeMap<String, Counter> {
    [(COUNTER.to_owned(), Counter { value: Quantity("1".into()) })].into()
}

fn consumption(counter_set: &str) -> DeviceCounterConsumption {
    DeviceCounterConsumption {
        counter_set: counter_set.to_owned(),
        counters: one_counter(),
        ..DeviceCounterConsumption::default()
    }
}

fn taint(driver: &str, taint: Taint) -> DeviceTaint {
    let key = format!("{driver}/{}", taint.as_str());
    DeviceTaint { key, effect: "NoSchedule".into(), ..DeviceTaint::default() }
}

fn convert(device: &PublishedDevice, can_count: bool, driver: &str) -> Device {
    let attribute = |value: &Attribute| match value {
        Attribute::Text(text) => DeviceAttribute { string: Some(text.clone()), ..Default::default() },
        Attribute::Version(version) => {
            DeviceAttribute { version: Some(version.clone()), ..Default::default() }
        }
        Attribute::Number(number) => DeviceAttribute { int: Some(*number), ..Default::default() },
    };
    let taints: Vec<DeviceTaint> = device.taints.iter().map(|of| taint(driver, *of)).collect();
    let counter = device.counter.iter().filter(|_| can_count);
    let consumes: Vec<DeviceCounterConsumption> = counter.map(|set| consumption(set)).collect();
    let (name, capacity) = capacity(device.capacity);
    Device {
        name: device.name.clone(),
        attributes: Some(
            device.attributes.iter().map(|(name, value)| (name.clone(), attribute(value))).collect(),
        ),
        allow_multiple_allocations: matches!(device.capacity, Capacity::Shared(_)).then_some(true),
        capacity: Some([(name.to_owned(), capacity)].into()),
        consumes_counters: Some(consumes).filter(|consumes| !consumes.is_empty()),
        taints: Some(taints).filter(|taints| !taints.is_empty()),
        ..Device::default()
    }
}

/// A claim that requests nothing gets one share; other requests are rounded up to whole shares.
fn capacity(capacity: Capacity) -> (&'static str, DeviceCapacity) {
    let shares = match capacity {
        Capacity::Whole { memory_mib } => {
            return (MEMORY, DeviceCapacity { value: Quantity(mebibytes(memory_mib)), request_policy: None });
        }
        Capacity::Shared(shares) => shares,
    };
    let Shares { count, memory_mib } = shares;
    let amount = |shares: u32| match memory_mib {
        0 => Quantity(shares.to_string()),
        _ => Quantity(mebibytes(memory_mib.saturating_mul(shares.into()))),
    };
    let range = CapacityRequestPolicyRange {
        min: amount(1),
        max: Some(amount(count)),
        // A range of one value has no steps.
        step: (count > 1).then(|| amount(1)),
    };
    let policy =
        CapacityRequestPolicy { default: Some(amount(1)), valid_range: Some(range), valid_values: None };
    let capacity = DeviceCapacity { value: amount(count), request_policy: Some(policy) };
    (if memory_mib == 0 { SHARES } else { MEMORY }, capacity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::ids::names::{GpuId, PartId, Resource};

    const ALL: GatedFields = GatedFields { taints: true, shares: true, counters: true };

    fn device(name: &str, capacity: Capacity, counter: Option<&str>) -> PublishedDevice {
        PublishedDevice {
            name: name.into(),
            gpu: GpuId::parse("GPU-0").unwrap(),
            part: PartId::parse("GPU-0").unwrap(),
            resource: Resource::parse("nvidia.com/gpu").unwrap(),
            attributes: BTreeMap::new(),
            capacity,
            counter: counter.map(str::to_owned),
            is_other_held: false,
            taints: Vec::new(),
        }
    }

    fn whole_and_shared(name: &str) -> [PublishedDevice; 2] {
        let shares = Capacity::Shared(Shares { count: 4, memory_mib: 20_480 });
        [
            device(name, Capacity::Whole { memory_mib: 81_920 }, Some(name)),
            device(&format!("{name}-shared"), shares, Some(name)),
        ]
    }

    fn names(slices: &[SliceContents]) -> Vec<&str> {
        slices.iter().flat_map(|slice| &slice.devices).map(|device| device.name.as_str()).collect()
    }

    #[test]
    fn shares_have_a_policy_by_which_a_claim_gets_one_of_them() {
        let of = |count, memory_mib| capacity(Capacity::Shared(Shares { count, memory_mib }));
        let (name, memory) = of(4, 20_480);
        assert_eq!((name, memory.value.0.as_str()), ("memory", "80Gi"));
        let policy = memory.request_policy.unwrap();
        let range = policy.valid_range.unwrap();
        let texts = [policy.default, Some(range.min), range.max, range.step].map(|amount| amount.unwrap().0);
        assert_eq!(texts, ["20Gi", "20Gi", "80Gi", "20Gi"]);
        let (name, counted) = of(10, 0);
        assert_eq!((name, counted.value.0.as_str()), ("shares", "10"));
        let one = of(1, 0).1.request_policy.unwrap().valid_range.unwrap();
        assert_eq!((one.max.unwrap().0.as_str(), one.step), ("1", None));
    }

    #[test]
    fn a_gpu_that_is_offered_whole_and_in_shares_has_a_counter_that_both_take() {
        let devices: Vec<PublishedDevice> =
            (0..9).flat_map(|n| whole_and_shared(&format!("gpu-{n}"))).collect();
        let slices = contents(&devices, ALL, "d");
        let lengths: Vec<_> =
            slices.iter().map(|slice| (slice.counters.len(), slice.devices.len())).collect();
        assert_eq!(lengths, [(8, 0), (1, 0), (0, 18)]);
        for pair in slices[2].devices.chunks(2) {
            let taken = pair.iter().map(|device| &device.consumes_counters.as_ref().unwrap()[0].counter_set);
            assert!(taken.eq([&pair[0].name, &pair[0].name]));
            let shared = pair.iter().map(|device| device.allow_multiple_allocations);
            assert!(shared.eq([None, Some(true)]));
        }
    }

    #[test]
    fn without_a_field_what_needs_it_is_left_out() {
        let mut devices = whole_and_shared("gpu-0").to_vec();
        devices.push(device("gpu-1-shared", Capacity::Shared(Shares { count: 2, memory_mib: 0 }), None));
        devices[2].taints.push(Taint::Cordoned);
        let before = devices.clone();
        let shown = |usable: GatedFields| contents(&before, usable, "d");
        assert_eq!(names(&shown(ALL)), ["gpu-0", "gpu-0-shared", "gpu-1-shared"]);
        let slices = shown(GatedFields { counters: false, ..ALL });
        assert_eq!(names(&slices), ["gpu-0", "gpu-1-shared"]);
        assert!(slices.iter().all(|slice| slice.counters.is_empty()));
        assert_eq!(slices[0].devices[0].consumes_counters, None);
        let slices = shown(GatedFields { shares: false, ..ALL });
        assert_eq!((names(&slices), slices[0].counters.len()), (vec!["gpu-0"], 0));
        assert_eq!(names(&shown(GatedFields { taints: false, ..ALL })), ["gpu-0", "gpu-0-shared"]);
        devices[0].is_other_held = true;
        assert_eq!(names(&contents(&devices, GatedFields { shares: false, ..ALL }, "d")), [""; 0]);
        assert_eq!(contents(&[], ALL, "d"), [SliceContents::default()]);
    }

    #[test]
    fn a_probed_device_shows_which_fields_were_dropped() {
        let none = GatedFields::default();
        for fields in [none, GatedFields { taints: true, ..none }, ALL] {
            assert_eq!(GatedFields::of(&fields.probe_device("d")), fields);
            assert_eq!(ALL.without(ALL.without(fields)), fields);
        }
        assert_eq!((none.why_no_shares(), none.why_no_counters()), (None, None));
        assert!(ALL.why_no_shares().unwrap().contains("DRAConsumableCapacity"));
        assert!(ALL.why_no_counters().unwrap().contains("published whole only"));
    }
}
