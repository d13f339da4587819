#!/usr/bin/env bash
# start.sh ROOT POLICY SECONDS [EMULATOR MACHINE]: starts the image that is unpacked in ROOT with simulated GPUs, and has its
# daemon compile POLICY, for which it waits SECONDS at most. `start.py` runs it in user, mount and process namespaces of its
# own, with which all of it ends. EMULATOR: QEMU's program for programs of another MACHINE (aarch64).
set -euo pipefail
root=$1 policy=$2 seconds=$3 emulator=${4:-} machine=${5:-}

mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
if [ -n "$emulator" ]; then
    case $machine in x86_64) elf='\x3e' ;; aarch64) elf='\xb7' ;; *) exit 2 ;; esac
    # The handler belongs to this user namespace. Before Linux 6.7 that is not possible; then the one that is registered on
    # the machine is used.
    if mount -t binfmt_misc binfmt_misc "$root/proc/sys/fs/binfmt_misc" 2>/dev/null; then
        # An executable ELF file, of 64 bits, for that machine. F: QEMU is opened now, since ROOT has none.
        magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00'$elf'\x00'
        mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
        printf %s ":berth-$machine:M::$magic:$mask:$emulator:F" >"$root/proc/sys/fs/binfmt_misc/register"
    fi
fi
berth=(env -i PATH=/usr/sbin:/usr/bin chroot "$root" /usr/bin/berth)

"${berth[@]}" --version
# A custom section is added, so that no cache has compiled code for these bytes.
{ cat "$policy"; printf '\x00\x05\x04test'; } >"$root/tmp/policy.wasm"
socket=/tmp/admin.sock
"${berth[@]}" serve --gpus sim:2xh100 --api-server off --admin-listen 127.0.0.1:0 --admin-socket $socket &
daemon=$!
end=$((SECONDS + seconds))
until [ -S "$root$socket" ] && "${berth[@]}" --server unix://$socket policy push /tmp/policy.wasm 2>"$root/tmp/answer"; do
    if ! kill -0 $daemon 2>/dev/null || [ $SECONDS -ge $end ]; then
        cat "$root/tmp/answer" >&2 || true
        echo "the daemon compiles no policy within $seconds s" >&2
        exit 1
    fi
    sleep 0.5
done
kill $daemon
wait $daemon
