"""Bounds of settings: one check, and one sentence, for the configs of all parts."""

from __future__ import annotations

from collections.abc import Mapping

from moonpool.errors import UsageError


def check_ranges(config: object, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Raises `UsageError` for the first field of `config` that is not within its bounds, both inclusive.

    A field is a whole number unless a bound of it is a float. True and False are no numbers.
    """
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        kinds = (int, float) if float in (type(low), type(high)) else (int,)
        if type(value) not in kinds or not low <= value <= high:
            raise UsageError(
                f"{name} must be from {low} to {high}; it is {value!r}", field=name, value=repr(value)
            )
