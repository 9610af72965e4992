#!/bin/bash
# Runs in the guest of `tests/lab/run.py --rdma 2`: two soft-RoCE devices are active, a reliable connection between
# them carries 4 KiB messages whose bytes are checked, and the packets really crossed the link.
set -euo pipefail

fail() { echo "rdma: $*" >&2; exit 1; }

active=$(ibv_devinfo | grep -c PORT_ACTIVE) || true
[ "$active" = 2 ] || fail "$active active devices, not 2"
before=$(cat /sys/class/net/lab0/statistics/tx_packets)

server_log=$(mktemp)
timeout 60 ibv_rc_pingpong -c -d rxe1 -g 1 -s 4096 -n 200 >"$server_log" 2>&1 &
server=$!
for _ in $(seq 200); do # 20 s
    ss -Hltn 'sport = :18515' | grep -q . && break
    kill -0 "$server" 2>/dev/null || fail "the server ended early: $(cat "$server_log")"
    sleep .1
done
client=$(timeout 60 ibv_rc_pingpong -c -d rxe0 -g 1 -s 4096 -n 200 10.99.0.2 2>&1) || fail "client: $client"
wait "$server" || fail "server: $(cat "$server_log")"
if grep -qi 'invalid data' <<<"$client $(cat "$server_log")"; then fail "bytes arrived changed"; fi

after=$(cat /sys/class/net/lab0/statistics/tx_packets)
[ $((after - before)) -ge 200 ] || fail "only $((after - before)) packets left by lab0"
echo "rdma: 200 messages of 4 KiB each way over rxe0 -> rxe1, bytes checked; $((after - before)) packets on lab0"
