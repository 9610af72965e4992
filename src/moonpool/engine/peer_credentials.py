"""Who is at the other end of a unix socket: SO_PEERCRED, and a pidfd that can mean no other process.

The kernel fills SO_PEERCRED, so the peer cannot lie: it names whoever called connect(2), or, seen from the
client, whoever called listen(2). Sources: unix(7), pidfd_open(2), Linux include/uapi/asm-generic/socket.h.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from typing import Final, final

from moonpool.errors import ResourceError

_UCRED: Final = struct.Struct("iII")
# Linux 6.5; the socket module has no name for it.
_SO_PEERPIDFD: Final = 77
_ROOT_UID: Final = 0


@final
@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What the kernel says of a peer; `pid` is None when the peer lives outside our pid namespace."""

    pid: int | None
    uid: int
    gid: int


def read_peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Credentials of a connected unix socket's peer; raises `ResourceError` when the system gives none."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    except OSError as exc:
        raise ResourceError(f"the peer's credentials cannot be read: {exc}", errno=exc.errno or 0) from exc
    pid, uid, gid = _UCRED.unpack(raw)
    return PeerCredentials(pid if pid > 0 else None, uid, gid)


def is_trusted_uid(uid: int) -> bool:
    """True for this process's own effective user and for root, who could read its memory anyway."""
    return uid in (os.geteuid(), _ROOT_UID)


def open_peer_pidfd(sock: socket.socket, pid: int | None) -> int | None:
    """A close-on-exec pidfd of a unix socket's peer, owned by the caller; None where the system has none.

    From Linux 6.5 the socket itself gives it, so it is the process that made the socket whatever happened
    since. Before that it is opened by number: the caller must then hear from the peer *after* this call,
    which proves that the number had not passed on to another process.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    if pid is None:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
