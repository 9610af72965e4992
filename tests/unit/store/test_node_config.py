"""A node's settings: what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.errors import UsageError
from moonpool.store.node_config import NodeConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("addresses", ()),
        ("addresses", ("a b",)),
        ("addresses", ("",)),
        ("addresses", ("x",) * 17),
        ("name", "two\nlines"),
        ("name", "n" * 256),
        ("host", "\0"),
        ("segment_bytes", 4096),
        ("segment_bytes", (1 << 20) + 64),
        ("segment_bytes", 1e6),
        ("segments", 0),
        ("slot_bytes", 32),
        ("log_bytes_per_slot", 0),
        ("tier", 9),
        ("pins_max", 0),
        ("report_page_bytes", 1 << 24),
        ("request_timeout_ms", 0),
        ("retry_first_ms", 5_000),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any) -> None:
    settings: dict[str, Any] = {"addresses": ("127.0.0.1:7420",), field: value}
    with pytest.raises(UsageError) as caught:
        NodeConfig(**settings)
    assert caught.value.field == field


def test_the_defaults_are_good() -> None:
    config = NodeConfig(addresses=("@master", "/run/master", "host:1"))
    limits = config.limits()
    assert (limits.pins_max, limits.report_page_bytes) == (config.pins_max, config.report_page_bytes)
    assert config.kind == 1
