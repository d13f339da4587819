#!/bin/sh
# What this machine has of NVIDIA: hardware, driver, device nodes, and how long nvidia-smi takes. Reads only.
# Lines `smi_ms MILLISECONDS` are read by gpu-check; the rest is for people.
section() { printf '\n== %s\n' "$1"; }
now_ms() { echo $(($(date +%s%N) / 1000000)); }
smi_time() {
    began=$(now_ms)
    nvidia-smi >/dev/null 2>&1 || echo "nvidia-smi failed with $?"
    echo "smi_ms $(($(now_ms) - began))"
}

section "time of nvidia-smi, twice: the first call may wake the GPU"
if command -v nvidia-smi >/dev/null 2>&1; then
    smi_time
    smi_time
else
    echo "nvidia-smi is not in the PATH"
fi

section "system"
uname -a
id
nproc
grep -m1 'model name' /proc/cpuinfo
grep MemTotal /proc/meminfo
cat /proc/self/cgroup
readlink /proc/self/ns/pid /proc/1/ns/pid 2>&1

section "driver"
cat /proc/driver/nvidia/version /proc/driver/nvidia/params 2>&1
for file in /proc/driver/nvidia/gpus/*/information; do
    echo "$file"
    cat "$file" 2>&1
done
grep -i nvidia /proc/devices
grep '^nvidia' /proc/modules
head -40 /proc/driver/nvidia-caps/mig-minors 2>&1

section "device nodes"
ls -l /dev/nvidia* /dev/dri /dev/dxg 2>&1

section "PCI devices of NVIDIA"
for device in /sys/bus/pci/devices/*; do
    if [ "$(cat "$device/vendor" 2>/dev/null)" = 0x10de ]; then
        echo "$(basename "$device") class $(cat "$device/class") device $(cat "$device/device") numa $(cat "$device/numa_node" 2>/dev/null)"
    fi
done

section "libraries"
for library in libnvidia-ml.so.1 libcuda.so.1; do
    ldconfig -p 2>/dev/null | grep "$library"
done
timeout 5 find /usr /lib /lib64 /opt /run -xdev \( -name 'libnvidia-ml.so*' -o -name 'libcuda.so*' \) 2>/dev/null | head -20
ls -d /usr/local/nvidia/* 2>/dev/null
command -v nvidia-ctk nvidia-cdi-hook nvidia-container-cli nvidia-persistenced nvcc

section "nvidia-smi -q"
command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -q 2>&1
exit 0
