from collections.abc import Callable
from typing import Any, final

from moonpool.native.io.batch import Batch
from moonpool.native.io.rpc_codec import LookupReply
from moonpool.native.io.segment import NativeSegment

def read_object(
    segment: NativeSegment,
    local: int,
    region: int,
    offset: int,
    length: int,
    root: bytes | None,
    timeout_ns: int,
) -> int: ...
def read_confirmed(
    segment: NativeSegment,
    local: int,
    region: int,
    offset: int,
    length: int,
    root: bytes | None,
    directory: int,
    word_at: int,
    object_id: int,
    timeout_ns: int,
) -> int: ...
def read_word(segment: NativeSegment, directory: int, word_at: int, timeout_ns: int) -> int | None: ...
def write_object(
    segment: NativeSegment,
    local: int,
    region: int,
    offset: int,
    length: int,
    grant: bytes,
    deadline_ns: int,
) -> tuple[int, bytes, bytes]: ...
@final
class Plan:
    def __new__(cls, reply: LookupReply) -> Plan: ...
    @property
    def marks(self) -> bytearray: ...
    def prepare(
        self,
        resolve: Callable[[int], Any],
        address: Any,
        capacity: Any,
        things: object,
        hash_in_copy: bool,
        timeout_ns: int,
    ) -> list[tuple[Any, Batch]]: ...
    def members(self, batch: Batch) -> bytes: ...
    def judge(self, verify: bool, trust_copy: bool) -> bool: ...
