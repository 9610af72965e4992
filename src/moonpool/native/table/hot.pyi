from collections.abc import Iterable, Sequence
from typing import Any, Self, final

from moonpool.native.table.directory_slots import DirectorySlots
from moonpool.native.table.extents import Extents
from moonpool.native.table.hot_state import HotCounters
from moonpool.native.table.objects import ObjectTable
from moonpool.native.table.open_puts import OpenPuts

@final
class HotCore:
    def __new__(
        cls,
        objects: ObjectTable,
        puts: OpenPuts,
        counters: HotCounters,
        *,
        batch_keys_max: int,
        lease_ms_max: int,
        put_ms: int,
        put_bytes_per_ms: int,
        facts_waiting_max: int,
        waiting_bytes_max: int = 67108864,
    ) -> Self: ...
    @property
    def counters(self) -> HotCounters: ...
    @property
    def has_changes(self) -> bool: ...
    def hot_binding(self) -> Any: ...
    def set_turn(
        self, now_ms: int, durable: int, segments_version: int, *, may_change: bool, may_end: bool
    ) -> None: ...
    def set_segment(
        self,
        segment_id: int,
        extents: Extents,
        slots: DirectorySlots,
        *,
        data_handle: int,
        rank: int | None,
        node_id: int,
    ) -> None: ...
    def set_floor(self, segment_id: int, *, resolved: bool, floor: int, slot_floor: int) -> None: ...
    def set_join(self, segment_id: int, grant_key: bytes | None, clock_ms: int, clock_at_ms: int) -> None: ...
    def drop_segment(self, segment_id: int) -> None: ...
    def set_schedule(self, segment_ids: Sequence[int], largest_segment: int) -> None: ...
    def set_quotas(self, tenants: Iterable[int]) -> None: ...
    def take(self) -> tuple[list[bytes], int, list[tuple[int, int, bytes]], bool]: ...
    def call(self, method: int, client: int, tenant: int, now_ms: int, params: bytes) -> bytes | None: ...
