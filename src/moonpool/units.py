"""Sizes and durations: constants, and text such as "8 MiB" or "1.5 s" read and written."""

from __future__ import annotations

import math
import re
from typing import Final

from moonpool.errors import UsageError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40
#: The address space of a process on x86-64.
MAPPING_BYTES_MAX: Final = 1 << 47

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000
MS_PER_S: Final = 1_000

U16_MAX: Final = (1 << 16) - 1
U32_MAX: Final = (1 << 32) - 1
U64_MAX: Final = (1 << 64) - 1

_SIZE_UNITS: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    "k": KIB,
    "kib": KIB,
    "m": MIB,
    "mib": MIB,
    "g": GIB,
    "gib": GIB,
    "t": TIB,
    "tib": TIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_DURATION_UNITS_NS: Final[dict[str, int]] = {
    "ns": 1,
    "us": NS_PER_US,
    "ms": NS_PER_MS,
    "s": NS_PER_S,
    "min": 60 * NS_PER_S,
    "h": 3_600 * NS_PER_S,
}
# The digits are bounded so that a hostile text cannot buy a huge integer conversion.
_QUANTITY: Final = re.compile(r"\s*(\d{1,20}(?:_\d{1,20}){0,6})(\.\d{1,9})?\s*([A-Za-z]*)\s*\Z", re.ASCII)


def _scale(text: str, units: dict[str, int], what: str) -> int:
    match = _QUANTITY.match(text)
    unit = match.group(3).lower() if match else ""
    if match is None or unit not in units:
        known = ", ".join(unit for unit in units if unit)
        raise UsageError(f"{text!r} is not a {what}; write a number and one of {known}", value=text)
    scale = units[unit]
    whole = int(match.group(1).replace("_", "")) * scale
    if match.group(2) is None:
        return whole
    digits = match.group(2)[1:]
    denominator: int = 10 ** len(digits)
    part, rest = divmod(int(digits) * scale, denominator)
    if rest:
        raise UsageError(f"{text!r} is not a whole number of the smallest unit of a {what}", value=text)
    return whole + part


def parse_size(text: str) -> int:
    """Bytes in a text like "4096", "64 KiB", "8M" (binary) or "1.5 GB" (decimal).

    Raises `UsageError` for anything else, negative numbers and fractions of a byte included.
    """
    return _scale(text, _SIZE_UNITS, "size")


def parse_duration_ns(text: str) -> int:
    """Nanoseconds in a text like "250us", "3 s" or "1.5 min"; the unit is required.

    Raises `UsageError` for anything else.
    """
    return _scale(text, _DURATION_UNITS_NS, "duration")


def format_size(size_bytes: int) -> str:
    """Shortest exact-looking binary text of a size: "64 KiB", "1.5 GiB", "4097 B"."""
    for name, unit in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= unit:
            value = size_bytes / unit
            return f"{value:.0f} {name}" if size_bytes % unit == 0 else f"{value:.2f} {name}"
    return f"{size_bytes} B"


def format_duration(duration_ns: float) -> str:
    """Three significant digits and a fitting unit: "4.05 us", "1.20 s"."""
    for name, unit in (("s", NS_PER_S), ("ms", NS_PER_MS), ("us", NS_PER_US)):
        if abs(duration_ns) >= unit:
            return f"{_three_digits(duration_ns / unit)} {name}"
    return f"{_three_digits(duration_ns)} ns"


def format_rate(bytes_per_s: float) -> str:
    """Decimal rate as the field quotes it: "7.85 GB/s", "120 MB/s"."""
    for name, unit in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= unit:
            return f"{_three_digits(bytes_per_s / unit)} {name}"
    return f"{_three_digits(bytes_per_s)} B/s"


def _three_digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(decimals, 6)}f}"
