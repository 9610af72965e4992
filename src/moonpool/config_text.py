"""Settings from text: numbers with units, truth values, lists; and bounded reading of TOML files."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from moonpool.errors import UsageError
from moonpool.units import MIB, NS_PER_MS, NS_PER_US, parse_duration_ns, parse_size

CONFIG_FILE_BYTES_MAX: Final = 1 * MIB
_INTEGER: Final = re.compile(r"\s*[+-]?\d{1,20}(_\d{1,20}){0,6}\s*\Z", re.ASCII)
_NUMBER: Final = re.compile(r"\s*\d{1,20}(\.\d{1,20})?\s*\Z", re.ASCII)
_BOOLEANS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def wrong_text(name: str, text: str, rule: str) -> UsageError:
    """Makes the error for a text that a field cannot have."""
    return UsageError(f"config field {name} {rule}; it is {text!r}", field=name, value=repr(text))


def _integer(name: str, text: str) -> int:
    if _INTEGER.match(text):
        return int(text)
    if "_bytes" in name:
        return parse_size(text)
    for suffix, unit_ns in (("_ms", NS_PER_MS), ("_us", NS_PER_US)):
        if name.endswith((suffix, f"{suffix}_max")):
            whole, rest = divmod(parse_duration_ns(text), unit_ns)
            if rest:
                raise UsageError(f"{text!r} is not a whole number of {suffix[1:]}", field=name, value=text)
            return whole
    raise wrong_text(name, text, "must be a whole number")


def _boolean(name: str, text: str) -> bool:
    if text.strip().lower() not in _BOOLEANS:
        raise wrong_text(name, text, f"must be one of {', '.join(_BOOLEANS)}")
    return _BOOLEANS[text.strip().lower()]


def _fraction(name: str, text: str) -> float:
    if not _NUMBER.match(text):
        raise wrong_text(name, text, "must be a number such as 0.95")
    return float(text)


_READERS: Final[dict[str, Callable[[str, str], Any]]] = {
    "int": _integer,
    "bool": _boolean,
    "float": _fraction,
    "str": lambda _, text: text,
    "bytes": lambda _, text: text.encode(),
    "bytes | None": lambda _, text: text.encode() if text else None,
    "tuple[str, ...]": lambda _, text: tuple(part.strip() for part in text.split(",") if part.strip()),
}


def is_readable(declared: object) -> bool:
    """Whether a field of that annotation can be written as text."""
    return str(declared) in _READERS


def from_text(name: str, declared: object, text: str, variable: str) -> Any:
    """The value of a field of the annotation `declared`; `UsageError` that names the environment variable."""
    try:
        return _READERS[str(declared)](name, text)
    except UsageError as exc:
        raise UsageError(f"environment variable {variable}: {exc.message}", field=name) from exc


def from_toml(name: str, declared: object, value: Any) -> Any:
    """The value of a field from TOML, where numbers with units are texts; other types are left to the
    config.
    """
    if isinstance(value, str):
        try:
            return _READERS[str(declared)](name, value)
        except UsageError as exc:
            told = exc.message if exc.field == name else f"config field {name}: {exc.message}"
            raise UsageError(told, field=name, value=value) from exc
    if isinstance(value, list) and declared == "tuple[str, ...]":
        return tuple(value)
    return value


def read_bounded(file: Path) -> bytes:
    """A file of settings; `UsageError` when it cannot be read or is larger than any can be."""
    try:
        with file.open("rb") as stream:
            data = stream.read(CONFIG_FILE_BYTES_MAX + 1)
    except OSError as exc:
        raise UsageError(f"cannot read {file}: {exc.strerror}; check the path and its rights") from exc
    if len(data) > CONFIG_FILE_BYTES_MAX:
        raise UsageError(f"{file} is larger than {CONFIG_FILE_BYTES_MAX} bytes; is it the right file?")
    return data


def read_toml(file: Path) -> dict[str, Any]:
    """The document in a file; `UsageError` when it is no TOML."""
    try:
        return tomllib.loads(read_bounded(file).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UsageError(f"{file} is not valid TOML: {exc}", value=str(file)) from exc
