"""A server of the rpc as a process: echo, waits, pushes, its counters. Ends when its standard input does.

    rpc_peer.py '{"endpoints": [...], "secret": "hex", "limits": {...}, "descriptors": n}'

The first line on standard output is the JSON list of its addresses.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
from typing import Any

from moonpool.errors import MoonpoolError
from moonpool.ids import new_instance_id
from moonpool.rpc.limits import ServerLimits
from moonpool.rpc.server import Closed, Request, RpcPort
from moonpool.wire.rpc import RpcCode, RpcFault


def serve(port: RpcPort, request: Request, kept: list[Request]) -> None:
    who, message_id, params = request.connection, request.message_id, request.params
    match request.method:
        case "echo":
            port.reply(who, message_id, params)
        case "keep":
            kept.append(request)
        case "answer":
            for one in kept:
                port.reply(one.connection, one.message_id, one.params)
            kept.clear()
            port.reply(who, message_id, None)
        case "push":
            for number in range(params[0]):
                port.push(who, "told", [number, *params[1:]])
            port.reply(who, message_id, None)
        case "large":
            port.reply(who, message_id, bytes(params[0]))
        case "leave":
            port.reply(who, message_id, "bye")
            port.close_connection(who)
        case "counters":
            port.reply(who, message_id, port.counters())
        case _:
            fault = RpcFault(RpcCode.UNKNOWN_METHOD, RpcCode.UNKNOWN_METHOD.name, request.method)
            port.fail(who, message_id, fault)


def main() -> int:
    told: dict[str, Any] = json.loads(sys.argv[1])
    if "descriptors" in told:
        resource.setrlimit(resource.RLIMIT_NOFILE, (told["descriptors"], told["descriptors"]))
    secret = bytes.fromhex(told["secret"]) if told.get("secret") else None
    limits = ServerLimits(**told.get("limits", {}))
    try:
        port = RpcPort(told["endpoints"], instance=new_instance_id(), secret=secret, limits=limits)
    except MoonpoolError as exc:
        print(json.dumps({"error": str(exc), "errno": getattr(exc, "errno", None)}), flush=True)
        return 1
    ended = threading.Event()

    def watch() -> None:
        sys.stdin.read()
        ended.set()
        port.wake()

    threading.Thread(target=watch, daemon=True).start()
    kept: list[Request] = []
    with port:
        port.start()
        print(json.dumps(port.addresses), flush=True)
        while not ended.is_set():
            for event in port.poll(1_000):
                if isinstance(event, Closed):
                    kept = [one for one in kept if one.connection != event.connection]
                else:
                    serve(port, event, kept)
    return 0


if __name__ == "__main__":
    sys.exit(main())
