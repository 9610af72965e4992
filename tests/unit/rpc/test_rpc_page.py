"""docs/rpc.md says what the code says."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest

from moonpool.store.method_table import METHODS
from moonpool.wire.rpc import RpcCode, RpcPush, RpcReply, RpcRequest, decode_body

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "rpc.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / ".ci" / "rpc_page.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(script: ModuleType) -> None:
    assert PAGE.read_text() == script.render(), "run `make docs`"


def test_the_page_has_every_method_and_code_once() -> None:
    text = PAGE.read_text()
    named = re.findall(r"^\| `(\w+)` \| .* \| `", text, re.MULTILINE)
    assert sorted(named) == sorted(METHODS)
    codes = [int(code) for code in re.findall(r"^\| (\d+) \| [A-Z_]+ \|", text, re.MULTILINE)]
    assert codes == sorted(set(codes))
    assert set(RpcCode) <= set(codes)


def test_the_examples_are_frames() -> None:
    lines = re.findall(r"^([0-9a-f]{2}(?: [0-9a-f]{2})+)$", PAGE.read_text(), re.MULTILINE)
    frames = [bytes.fromhex(line) for line in lines]
    assert [struct.unpack_from("<I", frame)[0] + 4 for frame in frames] == [len(frame) for frame in frames]
    assert [decode_body(frame[4:]) for frame in frames] == [
        RpcRequest(1, "exists", [["a"], 0]),
        RpcReply(1, None, b"\x01"),
        RpcPush("effects", [1, 2, []]),
    ]


def test_the_script_writes_the_page(script: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "rpc.md"
    assert script.main([str(target)]) == 0
    assert target.read_text() == PAGE.read_text()
    assert script.main([]) == 2
    assert "moonpool.store.method_table" in sys.modules
