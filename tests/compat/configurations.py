"""The cases: what NVIDIA's README, documentation, tests, chart and flags show, said in our own words.

`named` is what a line of Berth's output must have where it does not use a setting, or refuses it. `instead` is what Berth
must come to where that is not what NVIDIA's plugin of tests/e2e/nvidia comes to: Berth does something else and names it,
or that plugin is older than what the case is about (v0.20). `judge` is False where that plugin cannot be asked at all, since
it is older or cannot be brought to it on a node without a driver; `refuses` then says what v0.20 does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outcome import Outcome

MODEL = "NVIDIA H100 80GB HBM3"
UUIDS = [f"GPU-0000000{n}-c0de-4bad-8bad-00000000c0de" for n in range(8)]
INSTANCES = [f"MIG-0000000{n}-c0de-5bad-8bad-00000000c0de" for n in range(16)]
GFD_FILE = "/etc/kubernetes/node-feature-discovery/features.d/gfd"

Machine = list[tuple[bool, list[str]]]
#: GPUs, each with whether it is in MIG mode and its instances.
PLAIN: Machine = [(False, []), (False, [])]
SPLIT: Machine = [(False, []), (True, ["1g.10gb", "1g.10gb", "3g.40gb"])]
UNIFORM: Machine = [(True, ["1g.10gb"] * 3), (True, ["1g.10gb"] * 2)]
UNEQUAL: Machine = [(True, ["1g.10gb", "3g.40gb"]), (True, ["1g.10gb"])]
HALF: Machine = [(False, []), (True, ["1g.10gb"] * 2)]
BARE: Machine = [(True, []), (True, ["1g.10gb"])]
NONE: Machine = []
SLICES = {"1g": 1, "2g": 2, "3g": 3, "4g": 4, "7g": 7}


@dataclass
class Case:
    name: str
    file: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    machine: Machine = field(default_factory=lambda: PLAIN)
    #: XIDs that the driver then reports, of GPU 0 in this order.
    events: list[int] = field(default_factory=list)
    named: str | None = None
    #: What Berth's outcome has in place of NVIDIA's.
    instead: dict = field(default_factory=dict)
    judge: bool = True
    refuses: bool = False
    #: How the file is named: `flag` or `env`.
    by: str = "flag"
    #: Whether there is a libnvidia-ml.so.1.
    driver: bool = True
    #: What NVIDIA's v0.20 lists, if it is not run.
    lists: dict | None = None
    answers: dict = field(default_factory=dict)

    @property
    def serves_nothing(self) -> bool:
        return not self.driver or not self.machine or self.machine in (BARE, HALF, UNEQUAL)

    def outcome(self) -> Outcome:
        """What is known of NVIDIA's v0.20 where it is not asked."""
        lists = self.lists or {}
        return Outcome(refused=self.refuses, first=lists, lists=lists, answers=self.answers)

    def gpus(self, events: bool = False) -> dict:
        gpus, used = [], 0
        for index, (mig, profiles) in enumerate(self.machine):
            gpu = {"uuid": UUIDS[index], "name": MODEL, "memory_total_mib": 81559, "pci_bus_id": f"00000000:{index + 1:02x}:00.0"}
            if mig:
                instances = []
                for number, profile in enumerate(profiles):
                    slices = SLICES[profile.partition(".")[0]]
                    memory = int(profile.partition(".")[2].removesuffix("gb")) * 1024 - 200
                    own = {"uuid": INSTANCES[used], "gpu_instance": 7 + number, "compute_instance": 0, "profile": profile}
                    instances.append({**own, "memory_mib": memory, "slices": slices, "multiprocessors": 16 * slices})
                    used += 1
                gpu["mig"] = {"enabled": True, "max_devices": 7, "instances": instances}
            gpus.append(gpu)
        state = {"gpus": gpus}
        if events:
            state["events"] = [
                {"seq": seq, "gpu": UUIDS[0], "kind": "xid", "data": xid} for seq, xid in enumerate(self.events, 1)
            ]
        return state


def flags(text: str) -> str:
    return f"version: v1\nflags:\n  {text}\n"


def plugin(text: str) -> str:
    return f"version: v1\nflags:\n  plugin:\n    {text}\n"


def shared(*entries: str, more: str = "") -> str:
    listed = "".join(f"    - {entry}\n" for entry in entries)
    return f"version: v1\n{more}sharing:\n  timeSlicing:\n    resources:\n{listed}"


def shares(replicas: int, unhealthy: int = 0) -> dict:
    """Shares of two GPUs; those of the first so many are unhealthy."""
    health = ["Unhealthy" if gpu < unhealthy else "Healthy" for gpu in range(2)]
    return {"nvidia.com/gpu": {f"{UUIDS[gpu]}::{n}": health[gpu] for gpu in range(2) for n in range(replicas)}}


def whole(count: int = 2) -> dict:
    return {"nvidia.com/gpu": {uuid: "Healthy" for uuid in UUIDS[:count]}}


def serves(*ids: str) -> dict:
    """What `instead` has where Berth goes on and lists these, and what Allocate answers is not compared."""
    lists = {"nvidia.com/gpu": dict.fromkeys(ids, "Healthy")}
    return {**NOTHING, "first": lists, "lists": lists}


#: The value of `instead` if Berth exits, and if it continues and lists nothing.
REFUSED = {"refused": True}
NOTHING = {"refused": False, "first": {}, "lists": {}, "answers": {}, "preferred": {}}

#: v0.20 puts the next shares on the GPU of which most are held (its internal/rm/allocate.go).
PACKED_SHARES = {"preferred": {f"nvidia.com/gpu x{count}": {"beside": count, "elsewhere": []} for count in (1, 3)}}

TEN = "{name: nvidia.com/gpu, replicas: 10}"
PACKED = "{name: nvidia.com/gpu, replicas: 4}"
#: Compiles `timeslice` and `binpack`, which all others then have.
WARM = Case("warm", flags(f"plugin: {{sharedDevicesAllocationPolicy: packed}}\nsharing: {{timeSlicing: {{resources: [{TEN}]}}}}"))

# Files: README, "As a configuration file" and what may stand in each place of it.
FILES = [
    Case("no setting at all"),
    Case("an empty file", ""),
    Case("comments alone", "# nothing\n"),
    Case("only a version", "version: v1\n"),
    Case("no version", "flags: {migStrategy: none}\n"),
    Case("JSON", '{"version": "v1", "flags": {"migStrategy": "none"}}'),
    Case("keys in another case", "Version: v1\nFlags: {MigStrategy: none, Plugin: {PassDeviceSpecs: true}}\n"),
    Case("another version", "version: v2\n"),
    Case("broken YAML", "version: v1\nflags: [\n"),
    Case("flags as a list", "version: v1\nflags: []\n"),
    Case("the README's file", flags('migStrategy: "none"\n  failOnInitError: true\n  nvidiaDriverRoot: "/"\n  plugin:\n    passDeviceSpecs: false\n    deviceListStrategy: "envvar"\n    deviceIDStrategy: "uuid"')),
    Case("the file by CONFIG_FILE", shared(TEN), by="env"),
    Case("an empty CONFIG_FILE", env={"CONFIG_FILE": ""}),
    Case("a file that is not there", flags=["--config-file=/nowhere/config.yaml"]),
    Case("an unknown key", flags("migStrategi: mixed"), named="set, not used: flags.migStrategi"),
    Case("an unknown section", "version: v1\nextra: {a: 1}\n", named="set, not used: extra"),
]
STRATEGIES = [
    Case("device list by volume mounts", plugin("deviceListStrategy: volume-mounts")),
    Case("device list: a list of one", plugin("deviceListStrategy: [envvar]")),
    Case("device list: both without CDI", plugin("deviceListStrategy: [envvar, volume-mounts]")),
    Case("device list: two words in one", plugin('deviceListStrategy: "envvar,volume-mounts"')),
    Case("device list: unknown", plugin("deviceListStrategy: environment")),
    Case("device list: none", plugin("deviceListStrategy: []"), named="deviceListStrategy: with an empty list", instead=REFUSED),
    Case("device ids by index", plugin("deviceIDStrategy: index")),
    Case("device ids by index, mounted", plugin("deviceIDStrategy: index\n    deviceListStrategy: volume-mounts")),
    Case("device ids: unknown", plugin("deviceIDStrategy: name")),
    Case("device nodes", plugin("passDeviceSpecs: true")),
    Case("device nodes under a driver root", flags("nvidiaDriverRoot: /run/nvidia/driver\n  plugin: {passDeviceSpecs: true}")),
    Case("device nodes under a dev root", flags("nvidiaDevRoot: /host\n  nvidiaDriverRoot: /run/nvidia/driver\n  plugin: {passDeviceSpecs: true}")),
    Case("device nodes beside mounts", plugin("passDeviceSpecs: true\n    deviceListStrategy: volume-mounts")),
    Case("GPUDirect Storage", flags("gdsEnabled: true")),
    Case("MOFED", flags("mofedEnabled: true")),
    Case("GDRCopy", flags("gdrcopyEnabled: true")),
    Case("all three", flags("gdsEnabled: true\n  mofedEnabled: true\n  gdrcopyEnabled: true")),
    Case("all three off", flags("gdsEnabled: false\n  mofedEnabled: false\n  gdrcopyEnabled: false")),
    Case("a truth that is none", flags("gdsEnabled: maybe")),
    Case("CDI by the CRI", plugin("deviceListStrategy: cdi-cri"), named="wrote the CDI specification"),
    Case("CDI by annotations", plugin("deviceListStrategy: cdi-annotations"), named="wrote the CDI specification"),
    Case("CDI beside a variable", plugin("deviceListStrategy: [envvar, cdi-cri]"), named="wrote the CDI specification"),
    Case("an annotation prefix", plugin("cdiAnnotationPrefix: cdi.nvidia.com/")),
    Case("a hook for CDI", plugin("nvidiaCTKPath: /usr/bin/nvidia-ctk"), named="set, not used: flags.plugin.nvidiaCTKPath"),
    Case("a driver root in the container", plugin("containerDriverRoot: /driver"), named="set, not used: flags.plugin.containerDriverRoot"),
    Case("devices found by NVML", flags("deviceDiscoveryStrategy: nvml")),
    Case("devices found by themselves", flags("deviceDiscoveryStrategy: auto")),
    Case("devices found in an unknown way", flags("deviceDiscoveryStrategy: pci")),
    Case("devices found as on Tegra", flags("deviceDiscoveryStrategy: tegra"), named="leave NVIDIA's plugin", instead=REFUSED),
    Case("an MPS folder without MPS", flags("mpsRoot: /run/nvidia/mps"), named="set, not used: flags.mpsRoot"),
    Case("the node feature API", flags("useNodeFeatureAPI: true"), named="set, not used: flags.useNodeFeatureAPI"),
    Case("feature discovery's own flags", flags(f"gfd: {{oneshot: true, noTimestamp: true, sleepInterval: 30s, outputFile: {GFD_FILE}}}"), named="set, not used: flags.gfd.sleepInterval"),
]
SHARING = [
    Case("ten shares", shared(TEN)),
    Case("two shares by the short name", shared("{name: gpu, replicas: 2}")),
    Case("128 shares", shared("{name: gpu, replicas: 128}")),
    Case("129 shares", shared("{name: gpu, replicas: 129}"), named="at most 128", instead=REFUSED),
    Case("shares under a name of their own", shared(TEN).replace("resources:\n", "resources:\n", 1).replace("timeSlicing:\n", "timeSlicing:\n    renameByDefault: true\n")),
    Case("requests of more than one refused", shared(TEN).replace("timeSlicing:\n", "timeSlicing:\n    failRequestsGreaterThanOne: true\n")),
    Case("requests of more than one granted", shared(TEN).replace("timeSlicing:\n", "timeSlicing:\n    failRequestsGreaterThanOne: false\n")),
    Case("renamed and refused", shared(TEN).replace("timeSlicing:\n", "timeSlicing:\n    renameByDefault: true\n    failRequestsGreaterThanOne: true\n")),
    Case("a name of the user's choice", shared("{name: nvidia.com/gpu, rename: slow-gpu, replicas: 3}"), named="set, not used: sharing.timeSlicing.resources.0..rename"),
    Case("all devices by name", shared("{name: nvidia.com/gpu, devices: all, replicas: 3}")),
    Case("one device by number", shared("{name: nvidia.com/gpu, devices: 1, replicas: 3}"), named="resources.0..devices"),
    Case("a device by index", shared("{name: nvidia.com/gpu, devices: [0], replicas: 3}"), named="resources.0..devices"),
    Case("a device by UUID", shared(f"{{name: nvidia.com/gpu, devices: [{UUIDS[1]}], replicas: 3}}"), named="resources.0..devices"),
    Case("devices of every kind", shared(f'{{name: nvidia.com/gpu, devices: [0, "1", "0:0", {UUIDS[0]}, {INSTANCES[0]}], replicas: 3}}'), named="resources.0..devices"),
    Case("a device that is none", shared("{name: nvidia.com/gpu, devices: [GPU-UUID], replicas: 3}")),
    Case("devices by a word", shared("{name: nvidia.com/gpu, devices: some, replicas: 3}")),
    Case("a negative number of devices", shared("{name: nvidia.com/gpu, devices: -2, replicas: 3}")),
    Case("one share", shared("{name: nvidia.com/gpu, replicas: 1}")),
    Case("shares without a number", shared("{name: nvidia.com/gpu}")),
    Case("shares without a name", shared("{replicas: 2}")),
    Case("shares by a word", shared("{name: nvidia.com/gpu, replicas: many}")),
    Case("no resource to share", "version: v1\nsharing: {timeSlicing: {resources: []}}\n"),
    Case("time-slicing without resources", "version: v1\nsharing: {timeSlicing: {}}\n"),
    Case("a resource that is no name", shared("{name: $invalid$, replicas: 2}")),
    Case("a resource that is too long", shared(f"{{name: {'g' * 60}, replicas: 2}}")),
    Case("a rename that is no name", shared("{name: gpu, rename: $invalid$, replicas: 2}")),
    Case("a resource that no node has", shared("{name: nvidia.com/tpu, replicas: 2}")),
    Case("instances that the node has not", shared("{name: nvidia.com/mig-1g.5gb, replicas: 2}")),
    Case("shares mounted", shared(TEN, more="flags: {plugin: {deviceListStrategy: volume-mounts}}\n")),
    Case("shares by index", shared(TEN, more="flags: {plugin: {deviceIDStrategy: index}}\n")),
    Case("shares with device nodes", shared(TEN, more="flags: {plugin: {passDeviceSpecs: true}}\n")),
    Case("shares packed", shared(PACKED, more="flags: {plugin: {sharedDevicesAllocationPolicy: packed}}\n"), instead=PACKED_SHARES),
    Case("shares distributed", shared(PACKED, more="flags: {plugin: {sharedDevicesAllocationPolicy: distributed}}\n")),
    Case("an allocation policy that is none", shared(PACKED, more="flags: {plugin: {sharedDevicesAllocationPolicy: random}}\n"), judge=False, refuses=True),
    Case("MPS", "version: v1\nflags: {mpsRoot: /mps}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n", named="nvidia-cuda-mps-control", instead=REFUSED),
    Case("MPS without a folder", "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n"),
    Case("MPS with instances", "version: v1\nflags: {migStrategy: mixed, mpsRoot: /mps}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}\n"),
    Case("MPS that allows more than one", "version: v1\nflags: {mpsRoot: /mps}\nsharing: {mps: {failRequestsGreaterThanOne: false, resources: [{name: gpu, replicas: 2}]}}\n", named="nvidia-cuda-mps-control", instead=REFUSED),
    Case("MPS without resources", "version: v1\nsharing: {mps: {resources: []}}\n"),
    Case("resources by model", "version: v1\nresources: {gpus: [{pattern: '*H100*', name: h100}]}\n", named="set, not used: resources.gpus.0."),
    Case("resources by profile", "version: v1\nresources: {mig: [{pattern: 1g.10gb, name: small}]}\n", named="set, not used: resources.mig.0."),
    Case("a resource without a pattern", "version: v1\nresources: {gpus: [{name: h100}]}\n"),
    Case("a resource without a name", "version: v1\nresources: {gpus: [{pattern: '*'}]}\n"),
]
MIG = [
    Case("MIG none", flags("migStrategy: none"), machine=SPLIT),
    Case("MIG none, all in MIG mode", flags("migStrategy: none"), machine=UNIFORM),
    Case("MIG mixed", flags("migStrategy: mixed"), machine=SPLIT),
    Case("MIG mixed without MIG", flags("migStrategy: mixed")),
    Case("MIG mixed, one GPU without instances", flags("migStrategy: mixed"), machine=BARE),
    Case("MIG single", flags("migStrategy: single"), machine=UNIFORM),
    Case("MIG single without MIG", flags("migStrategy: single")),
    Case("MIG single, one GPU outside of MIG mode", flags("migStrategy: single"), machine=HALF, named="migStrategy single lists", instead=NOTHING),
    Case("MIG single, two profiles", flags("migStrategy: single"), machine=UNEQUAL, named="migStrategy single lists", instead=NOTHING),
    Case("MIG single, one GPU without instances", flags("migStrategy: single"), machine=BARE, named="has no instance", instead=serves(INSTANCES[0])),
    Case("MIG unknown", flags("migStrategy: both")),
    Case("MIG mixed by index", flags("migStrategy: mixed\n  plugin: {deviceIDStrategy: index}"), machine=SPLIT),
    Case("MIG mixed, mounted", flags("migStrategy: mixed\n  plugin: {deviceListStrategy: volume-mounts}"), machine=SPLIT),
    Case("MIG mixed with device nodes", flags("migStrategy: mixed\n  plugin: {passDeviceSpecs: true}"), machine=SPLIT),
    Case("MIG single with device nodes", flags("migStrategy: single\n  plugin: {passDeviceSpecs: true}"), machine=UNIFORM),
    Case("shares of instances", shared("{name: nvidia.com/mig-1g.10gb, replicas: 2}", more="flags: {migStrategy: mixed}\n"), machine=SPLIT),
    Case("shares of GPUs and instances", shared(TEN, "{name: nvidia.com/mig-1g.10gb, replicas: 2}", "{name: nvidia.com/mig-3g.40gb, replicas: 3}", more="flags: {migStrategy: mixed}\n"), machine=SPLIT),
    Case("shares of instances, renamed", shared("{name: nvidia.com/mig-1g.10gb, replicas: 2}", more="flags: {migStrategy: mixed}\n").replace("timeSlicing:\n", "timeSlicing:\n    renameByDefault: true\n"), machine=SPLIT),
    Case("shares of GPUs beside instances", shared(TEN, more="flags: {migStrategy: mixed}\n"), machine=SPLIT),
    Case("shares under single", shared("{name: nvidia.com/gpu, replicas: 3}", more="flags: {migStrategy: single}\n"), machine=UNIFORM),
    Case("shares of GPUs in MIG mode under none", shared("{name: nvidia.com/gpu, replicas: 2}"), machine=SPLIT),
]
IMEX = [
    Case("no IMEX channel", "version: v1\nimex: {channelIDs: []}\n"),
    Case("no IMEX channel, required", "version: v1\nimex: {channelIDs: [], required: true}\n"),
    Case("an IMEX channel where there is one", "version: v1\nimex: {channelIDs: [0]}\n", named="set, not used: imex.channelIDs"),
    Case("a required IMEX channel", "version: v1\nimex: {channelIDs: [0], required: true}\n", named="imex.channelIDs.*leave NVIDIA's plugin", instead=REFUSED),
    Case("another IMEX channel", "version: v1\nimex: {channelIDs: [1]}\n"),
    Case("two IMEX channels", "version: v1\nimex: {channelIDs: [0, 1]}\n"),
]
# The same by variables and flags, which go before the file.
SETTINGS = [
    Case("MIG_STRATEGY", env={"MIG_STRATEGY": "mixed"}, machine=SPLIT),
    Case("MIG_STRATEGY over the file", flags("migStrategy: none"), env={"MIG_STRATEGY": "mixed"}, machine=SPLIT),
    Case("--mig-strategy over MIG_STRATEGY", env={"MIG_STRATEGY": "none"}, flags=["--mig-strategy=mixed"], machine=SPLIT),
    Case("--mig-strategy twice", flags=["--mig-strategy=none", "--mig-strategy=mixed"], machine=SPLIT),
    Case("an empty MIG_STRATEGY", env={"MIG_STRATEGY": ""}),
    Case("an empty PASS_DEVICE_SPECS", env={"PASS_DEVICE_SPECS": ""}),
    Case("PASS_DEVICE_SPECS", env={"PASS_DEVICE_SPECS": "true"}),
    Case("PASS_DEVICE_SPECS as a number", env={"PASS_DEVICE_SPECS": "1"}),
    Case("PASS_DEVICE_SPECS wrong", env={"PASS_DEVICE_SPECS": "perhaps"}),
    Case("--pass-device-specs alone", flags=["--pass-device-specs"]),
    Case("DEVICE_LIST_STRATEGY with a comma", env={"DEVICE_LIST_STRATEGY": "envvar,volume-mounts"}),
    Case("--device-list-strategy twice", flags=["--device-list-strategy=envvar", "--device-list-strategy=volume-mounts"]),
    Case("DEVICE_LIST_STRATEGY wrong", env={"DEVICE_LIST_STRATEGY": "x"}),
    Case("DEVICE_ID_STRATEGY", env={"DEVICE_ID_STRATEGY": "index"}),
    Case("NVIDIA_DRIVER_ROOT", env={"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver", "PASS_DEVICE_SPECS": "true"}),
    Case("--driver-root", flags=["--driver-root=/run/nvidia/driver", "--pass-device-specs"]),
    Case("--nvidia-driver-root", flags=["--nvidia-driver-root=/run/nvidia/driver", "--pass-device-specs"]),
    Case("NVIDIA_DEV_ROOT", env={"NVIDIA_DEV_ROOT": "/host", "PASS_DEVICE_SPECS": "true"}),
    Case("--dev-root", flags=["--dev-root=/host", "--pass-device-specs"]),
    Case("GDS_ENABLED and MOFED_ENABLED", env={"GDS_ENABLED": "true", "MOFED_ENABLED": "true"}),
    Case("GDRCOPY_ENABLED", env={"GDRCOPY_ENABLED": "true"}),
    Case("--gds-enabled over the file", flags("gdsEnabled: true"), flags=["--gds-enabled=false"]),
    Case("--mofed-enabled and --gdrcopy-enabled", flags=["--mofed-enabled", "--gdrcopy-enabled=true"]),
    Case("SHARED_DEVICES_ALLOCATION_POLICY", shared(PACKED), env={"SHARED_DEVICES_ALLOCATION_POLICY": "packed"}, instead=PACKED_SHARES),
    Case("KUBELET_SOCKET", env={"KUBELET_SOCKET": "/var/lib/kubelet/device-plugins/kubelet.sock"}),
    Case("--kubelet-socket", flags=["--kubelet-socket=/var/lib/kubelet/device-plugins/kubelet.sock"]),
    Case("DEVICE_DISCOVERY_STRATEGY", env={"DEVICE_DISCOVERY_STRATEGY": "nvml"}),
    Case("--device-discovery-strategy wrong", flags=["--device-discovery-strategy=pci"]),
    Case("MPS_ROOT", env={"MPS_ROOT": "/run/nvidia/mps"}, named="set, not used: MPS_ROOT"),
    Case("--mps-root", flags=["--mps-root=/run/nvidia/mps"], named="set, not used: MPS_ROOT"),
    Case("NVIDIA_CDI_HOOK_PATH", env={"NVIDIA_CDI_HOOK_PATH": "/usr/bin/nvidia-cdi-hook"}),
    Case("NVIDIA_CTK_PATH", env={"NVIDIA_CTK_PATH": "/usr/bin/nvidia-ctk"}, named="set, not used: NVIDIA_CTK_PATH"),
    Case("--nvidia-ctk-path", flags=["--nvidia-ctk-path=/usr/bin/nvidia-ctk"]),
    Case("CDI_FEATURE_FLAGS", env={"CDI_FEATURE_FLAGS": "disable-nvsandbox-utils"}, named="set, not used: CDI_FEATURE_FLAGS"),
    Case("CDI_DISABLE_HOOKS", env={"CDI_DISABLE_HOOKS": "all"}, named="set, not used: CDI_DISABLE_HOOKS"),
    Case("CDI_ANNOTATION_PREFIX", env={"CDI_ANNOTATION_PREFIX": "cdi.nvidia.com/"}),
    Case("DRIVER_ROOT_CTR_PATH", env={"DRIVER_ROOT_CTR_PATH": "/driver-root"}),
    Case("CONTAINER_DRIVER_ROOT", env={"CONTAINER_DRIVER_ROOT": "/driver-root"}, named="set, not used: CONTAINER_DRIVER_ROOT"),
    Case("IMEX_CHANNEL_IDS", env={"IMEX_CHANNEL_IDS": "0"}, named="set, not used: IMEX_CHANNEL_IDS"),
    Case("IMEX_REQUIRED", env={"IMEX_CHANNEL_IDS": "0", "IMEX_REQUIRED": "true"}, named="IMEX_CHANNEL_IDS.*leave NVIDIA's plugin", instead=REFUSED),
    Case("feature discovery's variables", env={"GFD_OUTPUT_FILE": GFD_FILE}, named="set, not used: GFD_OUTPUT_FILE"),
    Case("USE_NODE_FEATURE_API", env={"USE_NODE_FEATURE_API": "true"}, named="set, not used: USE_NODE_FEATURE_API"),
    Case("the chart's variables", env={"NVIDIA_MIG_MONITOR_DEVICES": "all", "FAIL_ON_INIT_ERROR": "true", "PASS_DEVICE_SPECS": "false", "MIG_STRATEGY": "none"}, named="set, not used: NVIDIA_MIG_MONITOR_DEVICES"),
    Case("an unknown flag", flags=["--mig-strategi=none"]),
]
HEALTH = [
    Case("an XID", events=[79]),
    Case("an application's XID", events=[13, 31, 43, 45, 68, 109]),
    # NVIDIA's plugin marks one of the GPU's shares, and pods go on to be placed on the others; Berth marks all of them.
    Case("an XID of a shared GPU", shared(TEN), events=[79], named="GPU 0 .* is unhealthy: XID 79", instead={"lists": shares(10, unhealthy=1)}),
    Case("health checks off: all", env={"DP_DISABLE_HEALTHCHECKS": "all"}, events=[79]),
    Case("health checks off: ALL", env={"DP_DISABLE_HEALTHCHECKS": "ALL"}, events=[79]),
    Case("health checks off: xids", env={"DP_DISABLE_HEALTHCHECKS": "xids"}, events=[79]),
    Case("health checks off: xids,79", env={"DP_DISABLE_HEALTHCHECKS": "xids,79"}, events=[48]),
    Case("health checks off for one XID", env={"DP_DISABLE_HEALTHCHECKS": "79"}, events=[79]),
    Case("health checks off for another XID", env={"DP_DISABLE_HEALTHCHECKS": "48"}, events=[79]),
    Case("a word among XIDs", env={"DP_DISABLE_HEALTHCHECKS": "68,not-an-int,79"}, events=[79]),
    Case("a negative XID", env={"DP_DISABLE_HEALTHCHECKS": "-79"}, events=[79]),
    Case("an XID switched on", env={"DP_ENABLE_HEALTHCHECKS": "31"}, events=[31]),
    Case("every XID switched on", env={"DP_ENABLE_HEALTHCHECKS": "all"}, events=[13]),
    Case("an XID on that was off", env={"DP_DISABLE_HEALTHCHECKS": "79", "DP_ENABLE_HEALTHCHECKS": "79"}, events=[79]),
]
START = [
    Case("no GPU", machine=NONE),
    Case("no driver, and failing on it", flags("failOnInitError: true"), driver=False),
    Case("no driver, and waiting", flags("failOnInitError: false"), driver=False),
    Case("FAIL_ON_INIT_ERROR", env={"FAIL_ON_INIT_ERROR": "true"}, driver=False),
    Case("FAIL_ON_INIT_ERROR off", env={"FAIL_ON_INIT_ERROR": "false"}, driver=False),
    Case("--fail-on-init-error off", flags=["--fail-on-init-error=false"], driver=False),
    Case("no driver and no setting", driver=False, named="the GPUs cannot be read: .*; trying again every", instead=NOTHING),
]
CASES = FILES + STRATEGIES + SHARING + MIG + IMEX + SETTINGS + HEALTH + START
assert len({case.name for case in CASES}) == len(CASES) >= 90
