"""The thread of a node that hashes bytes in place, one object after the other, with the GIL released."""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import final

from moonpool.native.io.copying import chunk_digests, root_digest
from moonpool.store.directory import CHUNK_BYTES
from moonpool.store.node_hashing import HashWork, Job


@final
class Hasher:
    """Does the jobs of a `HashWork`, which `lock` guards. `views` are the payload bytes of each segment."""

    def __init__(self, work: HashWork, views: Sequence[memoryview], lock: threading.Lock) -> None:
        self._work = work
        self._views = views
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
        view = self._views[job.place.segment]
        digests = chunk_digests(view[job.offset : job.offset + job.size])
        packed = struct.pack(f"<{len(digests)}Q", *digests) if job.size > CHUNK_BYTES else b""
        return root_digest(digests), packed
