//! Every combination of device list strategies.

use super::*;

/// As `getAllocateResponse` of NVIDIA's device plugin v0.20: the variable holds the names, or the mounts'
/// folder where mounts name the GPUs. Mounts, annotations and CDI devices belong to one strategy each, and
/// device nodes to every strategy other than CDI.
#[test]
fn every_combination_of_strategies_matches_nvidias_plugin() {
    use DeviceListStrategy::{CdiAnnotations, CdiCri, Envvar, VolumeMounts};
    let grant = allocation("nvidia.com/gpu", &["GPU-8::0", "GPU-9::1"]);
    let ledger = ledger();
    let root = "/var/run/nvidia-container-devices";
    for (id_strategy, names) in
        [(DeviceIdStrategy::Uuid, ["GPU-9", "GPU-8"]), (DeviceIdStrategy::Index, ["0", "1"])]
    {
        for set in 1..16u8 {
            let all = [Envvar, VolumeMounts, CdiAnnotations, CdiCri];
            let strategies: Vec<_> = (0..4).filter(|n| set & 1 << n != 0).map(|n| all[n]).collect();
            let has = |strategy| strategies.contains(&strategy);
            let edits = Edits {
                id_strategy,
                pass_device_specs: true,
                driver_root: PathBuf::from("/nowhere"),
                ..edits_with(&strategies)
            };
            let response = response(&grant, &ledger, &edits);
            let visible = match (has(VolumeMounts), has(Envvar)) {
                (true, _) => Some(root.to_owned()),
                (false, true) => Some(names.join(",")),
                (false, false) => Some("void".to_owned()),
            };
            assert_eq!(response.envs.get("NVIDIA_VISIBLE_DEVICES"), visible.as_ref(), "{strategies:?}");
            let mounts: Vec<_> = response
                .mounts
                .iter()
                .map(|m| (m.host_path.as_str(), m.container_path.clone(), m.read_only))
                .collect();
            let mounted = names.map(|name| ("/dev/null", format!("{root}/{name}"), false));
            assert_eq!(mounts, if has(VolumeMounts) { mounted.to_vec() } else { vec![] }, "{strategies:?}");
            let cdi = names.map(|name| format!("nvidia.com/gpu={name}"));
            let devices: Vec<_> = response.cdi_devices.iter().map(|device| device.name.clone()).collect();
            assert_eq!(devices, if has(CdiCri) { cdi.to_vec() } else { vec![] }, "{strategies:?}");
            let mut annotations = response.annotations;
            annotations.remove("berth.dev/grant.nvidia.com_gpu").unwrap();
            let annotations: Vec<_> = annotations.into_iter().collect();
            let annotation = ("cdi.k8s.io/berth_000000ab-7".to_owned(), cdi.join(","));
            let expected = if has(CdiAnnotations) { vec![annotation] } else { vec![] };
            assert_eq!(annotations, expected, "{strategies:?}");
            let gpus = response.devices.iter().filter(|node| node.container_path.starts_with("/dev/nvidia"));
            let gpus =
                gpus.filter(|node| node.container_path.ends_with(|c: char| c.is_ascii_digit())).count();
            let expected = if has(Envvar) || has(VolumeMounts) { 2 } else { 0 };
            assert_eq!(gpus, expected, "{strategies:?}");
            assert!(expected > 0 || response.devices.is_empty(), "{strategies:?}: {:?}", response.devices);
        }
    }
}
