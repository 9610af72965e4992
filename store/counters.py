"""The numbers a leader gives: facts, objects, puts. One small object, shared with the native core.

Order within one decision, in Python and in native code alike: (1) the object id (lost when the table is
full), (2) the change of the tables, (3) the fact's sequence number, (4) the effects, in the order of the
object's places. For a put that starts: all extents key by key, then the put id, then the grants.
"""

from __future__ import annotations

from typing import Final, final

from moonpool.errors import InternalError
from moonpool.store.records import EPOCH_MAX, SEQUENCE_BITS, object_id_of

_U32: Final = 0xFFFFFFFF
_ROUNDS: Final = 27
PUT_KEY_BYTES: Final = 16


def put_id_keys(key: bytes) -> tuple[int, ...]:
    """The 27 round keys of Speck64/128 for a key of 16 bytes (little-endian words, the first is used first).

    Source: Beaulieu et al., "The SIMON and SPECK Families of Lightweight Block Ciphers", section 4.
    """
    words = [int.from_bytes(key[at : at + 4], "little") for at in range(0, PUT_KEY_BYTES, 4)]
    left, keys = words[1:], [words[0]]
    for index in range(_ROUNDS - 1):
        rotated = (left[index] >> 8 | left[index] << 24) & _U32
        left.append((keys[index] + rotated & _U32) ^ index)
        keys.append((keys[index] << 3 & _U32 | keys[index] >> 29) ^ left[-1])
    return tuple(keys)


def put_id_of(counter: int, keys: tuple[int, ...]) -> int:
    """Speck64/128 of a counter: a permutation, so no put id comes twice, and nobody can guess the next."""
    high, low = counter >> 32, counter & _U32
    for key in keys:
        high = ((high >> 8 | high << 24) + low & _U32) ^ key
        low = (low << 3 & _U32 | low >> 29) ^ high
    return high << 32 | low


@final
class Counters:
    """What was given last of each number."""

    __slots__ = ("_put_keys", "epoch", "last_fact", "last_object", "last_put", "place_cursor", "put_key")

    def __init__(self, epoch: int, last_fact: int, put_key: bytes) -> None:
        self.epoch = epoch
        #: Sequence number of the last fact.
        self.last_fact = last_fact
        #: Of the epoch, counted from 1.
        self.last_object = 0
        self.last_put = 0
        #: Where in the schedule of segments the next key begins.
        self.place_cursor = 0
        self.put_key = put_key
        self._put_keys = put_id_keys(put_key)

    def next_object_id(self) -> int:
        """The id of one more object."""
        self.last_object += 1
        if self.last_object >> SEQUENCE_BITS:
            raise InternalError("this epoch has no object id left; a new leader has")
        return object_id_of(self.epoch, self.last_object)

    def next_put_id(self) -> int:
        """An id that no other put of this epoch has, never 0."""
        self.last_put += 1
        put_id = put_id_of(self.last_put, self._put_keys)
        return put_id or self.next_put_id()

    def raise_epoch(self, epoch: int) -> None:
        """A new epoch: objects count from 1 again."""
        if not self.epoch < epoch <= EPOCH_MAX:
            raise InternalError(f"epoch {epoch} cannot follow epoch {self.epoch}")
        self.epoch, self.last_object = epoch, 0
