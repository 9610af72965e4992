"""Puts whose last answer was lost: whether they counted is found out, not guessed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from moonpool.store.client_results import PutResult, PutStatus
from moonpool.store.records import EntryCode

if TYPE_CHECKING:
    from moonpool.store.client_context import Context


class Written(NamedTuple):
    """An object whose only copy was written, and whose `put_end` was not answered."""

    key: bytes
    size: int
    put_id: int
    joins: int
    root: bytes
    chunks: bytes


async def end_written(context: Context, written: Written) -> PutResult | None:
    """Ends a put again, on whichever connection there is; None when it must be put anew."""
    reply = await context.link.put_end(written.put_id, [0], written.root, [written.chunks])
    code, object_id = reply.entry(0)
    if code == EntryCode.OK:
        return PutResult(PutStatus.STORED, object_id, 1)
    # Either the first message came through, or the put went with its connection.
    return await look_whether_stored(context, written.key, written.size, written.root)


async def look_whether_stored(context: Context, key: bytes, size: int, root: bytes) -> PutResult | None:
    """Did a `put_end` count whose reply was lost? The same bytes under the key are as good."""
    found = (await context.link.lookup([key], 0)).entry(0)
    if found is not None and found[2] == root and found[1] == size:
        return PutResult(PutStatus.STORED, found[0], len(found[4]))
    return None
