"""Which of NVIDIA's tests are run against Berth, which are not, and why."""

from __future__ import annotations

from nvidia_dra_node import STANDINS

#: As NVIDIA's Makefile sets them on a developer's machine without GPUs.
SUITE = {
    "MOCK_NVML": "true",
    "DISABLE_COMPUTE_DOMAINS": "true",
    "TEST_GPU_STRESS_PODS_N": "12",
    "TEST_GPU_STRESS_ITERATIONS": "2",
    "TEST_GPU_STRESS_DELAY": "1",
    "NVMM_PATH": str(STANDINS),
}
#: File and the beginning of the test's name.
BATS = [
    ("gpu_basic", "GPUs: 1 pod(s), 1 full GPU"),
    ("gpu_basic", "GPUs: 2 pod(s), 1 full GPU each"),
    ("gpu_basic", "GPUs: 2 pod(s), 1 full GPU (shared, 1 RC)"),
    ("gpu_basic", "GPUs: 1 pod(s), 2 cntrs, 1 full GPU (shared, 1 RCT)"),
    ("gpu_robustness", "GPUs: ResourceClaim lifecycle"),
    ("gpu_robustness", "GPUs: GPU re-acquired after pod delete and re-create"),
    ("gpu_robustness", "GPUs: pod with two ResourceClaimTemplates gets two distinct GPUs"),
    ("gpu_robustness", "GPUs: CEL selector matches GPU by architecture attribute"),
    ("gpu_robustness", "GPUs: CEL selector rejects non-matching productName"),
    ("gpu_robustness", "GPUs: ResourceSlice device count matches host GPU count"),
    ("gpu_robustness", "GPUs: rapid claim create/delete does not leak resources"),
    ("gpu_stress", "GPUs: shared RC across"),
    ("gpu_cuda_workloads", "GPUs: Job with ResourceClaimTemplate allocates GPUs to completions"),
    ("gpu_cuda_workloads", "GPUs: Deployment with 2 replicas gets distinct GPUs simultaneously"),
    ("gpu_extres", "GPUs: handle legacy 'nvidia.com/gpu: 1' (with DRAExtendedResource)"),
    ("gpu_mig", "StaticMIG: allocate (1 cnt)"),
    ("gpu_mig", "StaticMIG: mutual exclusivity with physical GPU"),
]
SHARES = "it requests shares by the class gpu.nvidia.com; Berth's shares have the class shared.gpu.nvidia.com"
_ATTRIBUTES = "it demands exactly the attributes of NVIDIA's driver; Berth's are others"
_CONFIG = "Berth does not apply GpuConfig"
_CUDA = "it needs a real GPU"
#: What is left out, and why.
LEFT_OUT = [
    ("gpu_basic", "GPUs: inspect device attributes in resource slice (gpu)", _ATTRIBUTES),
    ("gpu_mig", "StaticMIG: inspect device attributes in resource slice (mig)", _ATTRIBUTES),
    ("gpu_robustness", "GPUs: kubelet-plugin exposes Prometheus metrics", "it reads the metrics of NVIDIA's driver in its pod"),
    ("gpu_sharing", "GPUs: TimeSlicing", _CONFIG),
    ("gpu_sharing", "GPUs: MPS", _CONFIG),
    ("gpu_consumable_shares", "all", SHARES),
    ("gpu_cuda_workloads", "GPUs: single GPU runs CUDA demo suite", _CUDA),
    ("gpu_cuda_workloads", "GPUs: busGrind memory bandwidth stress test", _CUDA),
    ("gpu_dynmig", "all", "Berth creates no MIG instances"),
    ("gpu_updowngrade", "all", "it upgrades NVIDIA's chart, and reads its checkpoint"),
    ("quickstart", "gpu-test5, gpu-test-mps", _CONFIG),
    ("quickstart", "gpu-test6", "it selects by `index`, which NVIDIA's driver publishes no more either"),
    ("quickstart", "gpu-test-vfio-config, gpu-test-vfiopci, imex-test1", "Berth has neither VFIO nor IMEX channels"),
    ("basics", "all", "it tests the installation of NVIDIA's chart"),
    ("cd_*", "all", "Berth has no ComputeDomains"),
]
