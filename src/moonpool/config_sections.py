"""Configs of several parts from one TOML file and the environment: a table and a prefix of variables for
each.

The field `evict_high` of the section `master` is the key `evict_high` in `[master]`, or the variable
`MOONPOOL_MASTER_EVICT_HIGH`. What the caller gives wins over the environment, and that over the file. The
engine's own section has the variables that `EngineConfig.from_env` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from moonpool.config import ENV_PREFIX, EngineConfig, load_config, process_environment
from moonpool.config_text import from_text, from_toml, is_readable, read_toml
from moonpool.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Config = TypeVar("_Config", bound="DataclassInstance")


@final
@dataclass(frozen=True, slots=True)
class Settings:
    """What a file and the environment say, before any config is made of it."""

    file: Path | None
    tables: Mapping[str, Mapping[str, Any]]
    environ: Mapping[str, str]

    @classmethod
    def read(
        cls, file: Path | None, sections: Iterable[str], environ: Mapping[str, str] | None = None
    ) -> Settings:
        """Reads the file, if any; `UsageError` for a table that is none of `sections` or "engine"."""
        source = process_environment() if environ is None else environ
        if file is None:
            return cls(None, {}, source)
        document = read_toml(file)
        known = {*sections, "engine"}
        for name, table in document.items():
            if name not in known:
                raise UsageError(f"{file}: unknown table [{name}]; known are {', '.join(sorted(known))}")
            if not isinstance(table, dict):
                raise UsageError(f"{file}: {name} must be a table; write [{name}] above its keys", field=name)
        return cls(file, document, source)

    def build(self, kind: type[_Config], section: str, given: Mapping[str, Any] | None = None) -> _Config:
        """A config of that kind. `given` are values of the caller; those that are None count as not given."""
        types = {one.name: one.type for one in fields(kind) if is_readable(one.type)}
        values: dict[str, Any] = {}
        for name, value in self.tables.get(section, {}).items():
            if name not in types:
                raise UsageError(f"{self.file}: unknown key {name!r} in [{section}]; remove it", field=name)
            values[name] = from_toml(name, types[name], value)
        for name, declared in types.items():
            variable = f"{ENV_PREFIX}{section.upper()}_{name.upper()}"
            if variable in self.environ:
                values[name] = from_text(name, declared, self.environ[variable], variable)
        values |= {name: value for name, value in (given or {}).items() if value is not None}
        return kind(**values)

    def engine(self, given: Mapping[str, Any] | None = None) -> EngineConfig:
        """The engine's config, in the same order of precedence."""
        base = EngineConfig() if self.file is None else load_config(self.file)
        changes = {name: value for name, value in (given or {}).items() if value is not None}
        return replace(EngineConfig.from_env(self.environ, base), **changes)
