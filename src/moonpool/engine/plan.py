"""From the arguments of a call to a native batch: what is a number, what a vector, and what a buffer."""

from __future__ import annotations

import math
import operator
from typing import Any, TypeAlias

from moonpool.config import EngineConfig
from moonpool.errors import MoonpoolError, UsageError
from moonpool.native.io.batch import Batch as NativeBatch
from moonpool.native.io.memory import BufferHold
from moonpool.operations import Op
from moonpool.transport.base import DeviceTaking
from moonpool.units import NS_PER_MS, NS_PER_S

#: local, region, offset, length: numbers for all transfers, or vectors; `local` may be a buffer instead.
What: TypeAlias = tuple[Any, Any, Any, Any]
#: path, digest, timeout_s, grants: as in `Engine.transfer`.
How: TypeAlias = tuple[Any, bool, float | None, Any]

#: A longer timeout is a mistake of units; it would also leave the range of the native clock.
TIMEOUT_S_MAX = 1e9


def timeout_ns(timeout_s: float) -> int:
    """Nanoseconds of a timeout; UsageError when it is negative, no number, or over `TIMEOUT_S_MAX`."""
    if not 0 <= timeout_s <= TIMEOUT_S_MAX:
        raise UsageError(
            f"timeout_s={timeout_s}: a timeout is from 0 to {TIMEOUT_S_MAX:.0e} seconds", field="timeout_s"
        )
    return math.ceil(timeout_s * NS_PER_S)


def as_number(value: Any) -> Any:
    """An integer of any type (numpy's too) as an int; anything else as it is."""
    if type(value) is int or value is None:
        return value
    if hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0:
        return operator.index(value)
    return value


def as_memory(local: Any, op: Op, devices: DeviceTaking | None = None) -> Any:
    """The local side of one transfer: an address (int) or any buffer, held (a device's with `devices`)."""
    local = as_number(local)
    if type(local) is int or type(local) is BufferHold:
        return local
    hold = BufferHold(local, writable=op == Op.READ, device=devices is not None)
    if hold.on_device and devices is not None:
        devices.settle(hold)
    return hold


def plan_batch(
    op: Op, what: What, how: How, config: EngineConfig, devices: DeviceTaking | None = None
) -> NativeBatch:
    """A filled batch whose deadline runs, not yet bound to a segment; UsageError for what is no batch."""
    local, region, offset, length = map(as_number, what)
    path, digest, timeout_s, grants = how
    path = as_number(path)
    if not _is_vector(local):
        local = as_memory(local, op, devices)
    if length is None:
        if type(local) is not BufferHold:
            raise UsageError("length is required with an address", field="length")
        length = local.size_bytes
    n = _batch_size((local, region, offset, length, path))
    if n > config.batch_transfers_max:
        raise UsageError(
            f"a batch has at most {config.batch_transfers_max} transfers, this one {n}",
            field="batch_transfers_max",
            limit=config.batch_transfers_max,
        )
    native = NativeBatch(op, n)
    try:
        native.fill(local, region, offset, length, path, digest)
        if grants is not None:
            native.attach_grants(grants)
    except (OverflowError, TypeError, ValueError, BufferError) as problem:
        if isinstance(problem, MoonpoolError):
            raise
        raise UsageError(f"these are no transfers: {problem}") from problem
    limit_ns = config.transfer_timeout_ms * NS_PER_MS if timeout_s is None else timeout_ns(timeout_s)
    native.set_timeout(limit_ns / NS_PER_S)
    return native


def _is_vector(value: Any) -> bool:
    """True for arrays of addresses: sequences of ints, or a one-dimensional buffer of 8-byte integers."""
    if type(value) is int:
        return False
    if isinstance(value, list | tuple):
        return True
    try:
        with memoryview(value) as view:
            return view.ndim == 1 and view.itemsize == 8 and view.format in ("Q", "q", "L", "l")
    except (TypeError, ValueError, BufferError):
        return False


def _batch_size(values: tuple[Any, ...]) -> int:
    """The common length of the vectors among the arguments; 1 when all are numbers."""
    sizes = {len(value) for value in values if type(value) is not int and hasattr(value, "__len__")}
    if len(sizes) > 1:
        raise UsageError(f"the arrays of a batch have different lengths: {sorted(sizes)}")
    return sizes.pop() if sizes else 1
