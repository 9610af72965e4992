"""The thread of a node that hashes bytes in place, one object after the other, with the GIL released."""

from __future__ import annotations

import logging
import struct
import threading
from typing import Final, final

from moonpool.errors import MoonpoolError
from moonpool.native.io.copying import chunk_digests, root_digest
from moonpool.store.directory import CHUNK_BYTES
from moonpool.store.node_hashing import HashWork, Job
from moonpool.store.node_memory import SegmentBytes

_log = logging.getLogger(__name__)
#: The root digest of unreadable bytes: no bytes have this one but by a chance of 1 in 2^128.
_NOT_A_ROOT: Final = bytes(16)


@final
class Hasher:
    """Does the jobs of a `HashWork`, which `lock` guards, over the payload of the node's segments."""

    def __init__(self, work: HashWork, payload: SegmentBytes, lock: threading.Lock) -> None:
        self._work = work
        self._payload = payload
        self._lock = lock
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="moonpool-rehash", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be jobs."""
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Ends the thread after the job at hand."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing:
            with self._lock:
                job = self._work.take()
            if job is None:
                self._wake.wait()
                self._wake.clear()
                continue
            root, chunks = self._hash(job)
            with self._lock:
                self._work.hashed(job, root, chunks)

    def _hash(self, job: Job) -> tuple[bytes, bytes]:
        try:
            payload = self._payload.read(job.place.segment, job.offset, job.size)
        except MoonpoolError as problem:
            # Bytes that their own node cannot read are lost: they must not pass for good ones.
            if not self._closing:
                _log.warning("segment %d at %d: unreadable: %s", job.place.segment, job.offset, problem)
            return _NOT_A_ROOT, b""
        digests = chunk_digests(payload)
        packed = struct.pack(f"<{len(digests)}Q", *digests) if job.size > CHUNK_BYTES else b""
        return root_digest(digests), packed
