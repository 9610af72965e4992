#!/bin/bash
# Runs in the guest of `tests/lab/run.py --nvmf tcp|rdma`: io_uring with O_DIRECT on the block device, with every
# block verified, and NVMe passthrough on the character device.
set -euo pipefail

fail() { echo "nvmf: $*" >&2; exit 1; }

for device in /dev/nvme0n1 /dev/ng0n1; do
    [ -e "$device" ] || fail "no $device"
done
cd "$(mktemp -d)" # fio leaves its verify state in the current folder
run_fio() { timeout 120 fio --name=lab --thread=1 --minimal "$@" >/dev/null || fail "fio $*"; }
run_fio --filename=/dev/nvme0n1 --ioengine=io_uring --direct=1 --size=16m --rw=write --bs=64k --iodepth=4 \
    --verify=crc32c --do_verify=1 --verify_fatal=1
run_fio --filename=/dev/ng0n1 --ioengine=io_uring_cmd --cmd_type=nvme --size=16m --rw=write --bs=64k --iodepth=4
run_fio --filename=/dev/ng0n1 --ioengine=io_uring_cmd --cmd_type=nvme --size=16m --rw=randread --bs=4k --iodepth=8 \
    --number_ios=256
echo "nvmf: 16 MiB written and verified on /dev/nvme0n1, passthrough works on /dev/ng0n1"
