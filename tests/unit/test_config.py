"""The configuration: defaults, every bound, the environment and TOML."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import moonpool.config
from moonpool.config import _RANGES, EngineConfig, load_config
from moonpool.errors import UsageError
from moonpool.operations import Priority, class_rates
from moonpool.units import KIB, MIB

SECRET = b"sixteen bytes at least"
INTEGERS = [one.name for one in dataclasses.fields(EngineConfig) if one.type == "int"]


def refused(field: str, **changes: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**changes)  # type: ignore[arg-type]
    assert caught.value.field == field
    assert field in str(caught.value)
    return caught.value


def test_defaults_are_valid_and_the_value_is_frozen() -> None:
    config = EngineConfig()
    assert (config.bind_host, config.port, config.transports) == ("127.0.0.1", 0, ("local", "shm", "tcp"))
    assert (config.stripe_min_bytes, config.non_temporal_min_bytes) == (8 * MIB, 32 * KIB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.port = 1  # type: ignore[misc]


def test_every_field_is_documented_and_every_integer_bounded() -> None:
    source = Path(moonpool.config.__file__).read_text()
    documented = set(re.findall(r"^    #: .+\n(?:    #: .+\n)*    (\w+):", source, re.MULTILINE))
    assert documented == {one.name for one in dataclasses.fields(EngineConfig)}
    assert set(INTEGERS) == set(_RANGES)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_outside_their_bounds_are_refused(name: str) -> None:
    low, high = _RANGES[name]
    for value in (low - 1, high + 1, True, 1.0, "1", None):
        refused(name, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("name", "two words"),
        ("name", "x" * 256),
        ("name", "bell\a"),
        ("name", "\udc80"),
        ("name", 5),
        ("bind_host", ""),
        ("bind_host", "a b"),
        ("bind_host", "a/b"),
        ("advertise_host", "0.0.0.0"),
        ("transports", ()),
        ("transports", ("tcp", "tcp")),
        ("transports", ["tcp"]),
        ("transports", ("TCP",)),
        ("file_roots", ("relative",)),
        ("file_roots", ("/pool", "/zero\0byte")),
        ("file_roots", "/pool"),
        ("metadata", "redis"),
        ("metadata", "redis://"),
        ("metadata", "ftp://host"),
        ("congestion_local", "cu bic"),
        ("congestion_remote", "x" * 33),
        ("tcp_io", "threads"),
        ("huge_pages", 1),
        ("bulk_lanes", 5),
        ("bulk_lanes_remote", 5),
        ("handshakes_max", 1_025),
    ],
)
def test_wrong_values_are_refused_by_name(name: str, value: object) -> None:
    refused(name, **{name: value})


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_listening_everywhere_needs_an_address_to_tell(host: str) -> None:
    assert "connect to" in str(refused("advertise_host", bind_host=host))
    assert EngineConfig(bind_host=host, advertise_host="node-1").advertise_host == "node-1"


@pytest.mark.parametrize("secret", [b"", b"short", bytes(4097), "text of sixteen bytes"])
def test_bad_secrets_are_refused_and_never_shown(secret: object) -> None:
    error = refused("cluster_secret", cluster_secret=secret)
    assert "<hidden>" in str(error)
    assert "sixteen" not in str(error)
    assert "short" not in str(error)


def test_the_secret_is_not_in_the_representation() -> None:
    assert "sixteen" not in repr(EngineConfig(cluster_secret=SECRET))


@pytest.mark.parametrize(
    "url", ["p2p", "redis://host:6379/0", "rediss://host", "redis+unix:///run/redis.sock?db=1"]
)
def test_metadata_addresses(url: str) -> None:
    assert EngineConfig(metadata=url).metadata == url


def test_the_environment_sets_fields_with_units() -> None:
    config = EngineConfig.from_env(
        {
            "MOONPOOL_NAME": "node-1",
            "MOONPOOL_PORT": "7000",
            "MOONPOOL_STRIPE_MIN_BYTES": "2 MiB",
            "MOONPOOL_LEASE_MS": "5 s",
            "MOONPOOL_SPIN_US": "1 ms",
            "MOONPOOL_HUGE_PAGES": "Yes",
            "MOONPOOL_TRANSPORTS": "tcp, shm",
            "MOONPOOL_CLUSTER_SECRET": SECRET.decode(),
            "MOONPOOL_NATIVE": "require",
            "PATH": "/bin",
        }
    )
    assert config == EngineConfig(
        name="node-1",
        port=7000,
        stripe_min_bytes=2 * MIB,
        lease_ms=5_000,
        spin_us=1_000,
        huge_pages=True,
        transports=("tcp", "shm"),
        cluster_secret=SECRET,
    )


def test_the_environment_goes_over_a_base() -> None:
    base = EngineConfig(port=1, name="base")
    assert EngineConfig.from_env({"MOONPOOL_PORT": "2"}, base) == dataclasses.replace(base, port=2)
    assert EngineConfig.from_env({}, base) == base


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_PEERS_MAX", "77")
    assert EngineConfig.from_env().peers_max == 77


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("MOONPOOL_PORT", "many"),
        ("MOONPOOL_PORT", "1__0"),
        ("MOONPOOL_PORT", "+-5"),
        ("MOONPOOL_PORT", "9" * 41),
        ("MOONPOOL_LEASE_MS", "5 us"),
        ("MOONPOOL_SPIN_MAX_BYTES", "5 s"),
        ("MOONPOOL_HUGE_PAGES", "maybe"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(UsageError, match=variable):
        EngineConfig.from_env({variable: text})


def test_a_value_out_of_bounds_from_the_environment_names_the_field() -> None:
    with pytest.raises(UsageError, match="port") as caught:
        EngineConfig.from_env({"MOONPOOL_PORT": "70000"})
    assert caught.value.field == "port"


def test_the_secret_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(SECRET + b"\n")
    config = EngineConfig.from_env({"MOONPOOL_CLUSTER_SECRET_FILE": str(file)})
    assert config.cluster_secret == SECRET
    both = {"MOONPOOL_CLUSTER_SECRET_FILE": str(file), "MOONPOOL_CLUSTER_SECRET": SECRET.decode()}
    with pytest.raises(UsageError, match="not both"):
        EngineConfig.from_env(both)
    with pytest.raises(UsageError, match="cannot read"):
        EngineConfig.from_env({"MOONPOOL_CLUSTER_SECRET_FILE": str(tmp_path / "absent")})


def test_toml_sets_fields(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    file = tmp_path / "moonpool.toml"
    file.write_text(
        """
        [engine]
        name = "node-2"
        port = 7000
        transports = ["shm", "tcp"]
        stripe_min_bytes = "1 MiB"
        huge_pages = true
        cluster_secret_file = "secret"
        [other]
        ignored = 1
        """
    )
    assert load_config(file) == EngineConfig(
        name="node-2",
        port=7000,
        transports=("shm", "tcp"),
        stripe_min_bytes=MIB,
        huge_pages=True,
        cluster_secret=SECRET,
    )


def test_toml_without_the_table_gives_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "empty.toml"
    file.write_text("")
    assert load_config(file) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[engine", "not valid TOML"),
        ("engine = 1", "must be a table"),
        ("[engine]\nprot = 1", "unknown key 'prot'"),
        ("[engine]\nport = 1.5", "port must be a whole number"),
        ("[engine]\nport = true", "port must be a whole number"),
        ("[engine]\ntransports = [1]", "transports must be"),
        ("[engine]\nname = 3", "name must be text"),
        ("[engine]\ncluster_secret_file = 3", "must be a path"),
    ],
)
def test_bad_toml_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        load_config(file)


def test_unreadable_and_oversized_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load_config(tmp_path / "absent.toml")
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (MIB + 1))
    with pytest.raises(UsageError, match="larger than"):
        load_config(huge)


@pytest.mark.parametrize("text", ["low", "low=0", "idle=1MiB", "low=fast", "low=1MiB,low=2MiB", "=5"])
def test_rates_of_classes_that_make_no_sense_are_refused(text: str) -> None:
    refused("class_rates", class_rates=tuple(text.split(",")))


def test_rates_of_classes_are_read_from_text() -> None:
    config = EngineConfig.from_env({"MOONPOOL_CLASS_RATES": "low=200MiB, high = 1GB"})
    assert class_rates(config.class_rates) == {Priority.LOW: 200 * MIB, Priority.HIGH: 10**9}


@pytest.mark.parametrize(("value", "priority"), [(0, 0), ("high", 2), ("Normal", 1), (Priority.LOW, 0)])
def test_a_priority_is_a_number_or_a_name(value: object, priority: int) -> None:
    assert Priority.of(value) is Priority(priority)


@pytest.mark.parametrize("value", [3, -1, True, "urgent", None, 1.0, b"low"])
def test_other_priorities_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="priority"):
        Priority.of(value)
