"""How peers are found and made to load; no package is downloaded."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from moonpool.bench import peers_setup
from moonpool.bench.peers_setup import PACKAGES, Peer, PeerSetupFailed, load_peer


def describe(directory: Path, peer: Peer) -> None:
    home = directory / peer.name
    home.mkdir(parents=True, exist_ok=True)
    (home / peers_setup.DESCRIPTION_FILE).write_text(json.dumps(asdict(peer)))


def peer_of(python: str) -> Peer:
    package = PACKAGES[0]
    return Peer(name=package.name, python=python, requirements=package.requirements, environment={"A": "b"})


def test_a_peer_is_found_again(tmp_path: Path) -> None:
    peer = peer_of(sys.executable)
    describe(tmp_path, peer)
    assert load_peer(peer.name, tmp_path) == peer


def test_a_missing_outdated_or_broken_peer_is_not_found(tmp_path: Path) -> None:
    peer = peer_of(sys.executable)
    assert load_peer(peer.name, tmp_path) is None
    describe(tmp_path, replace(peer, requirements=("mooncake==0",)))
    assert load_peer(peer.name, tmp_path) is None
    describe(tmp_path, replace(peer, python=str(tmp_path / "gone")))
    assert load_peer(peer.name, tmp_path) is None


def test_the_stand_in_driver_answers_every_symbol_with_no_device(tmp_path: Path) -> None:
    wheel = tmp_path / "mooncake"
    wheel.mkdir()
    source = tmp_path / "user.c"
    source.write_text(
        "int cuInit(int); int cuDeviceGet(void); int use(void) { return cuInit(0) + cuDeviceGet(); }\n"
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", wheel / "engine.so", source], check=True, timeout=60)
    folder = peers_setup.build_cuda_stand_in(tmp_path, tmp_path / "made")
    library = ctypes.CDLL(str(folder / "libcuda.so.1"))
    assert (library.cuInit(0), library.cuDeviceGet()) == (100, 100)


def test_a_wheel_without_driver_symbols_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PeerSetupFailed, match="layout changed"):
        peers_setup.build_cuda_stand_in(tmp_path, tmp_path / "made")


def test_the_runtime_of_the_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "nvidia" / "cu13" / "lib"
    folder.mkdir(parents=True)
    (folder / "libcudart.so.13").touch()
    monkeypatch.setattr(peers_setup, "TOOLKIT_FOLDER", tmp_path / "no-toolkit")
    assert peers_setup.find_cuda_runtime(tmp_path) == folder
    assert peers_setup.find_cuda_runtime(tmp_path / "empty") is None


def test_a_failing_step_is_told_with_its_last_words() -> None:
    failing = [sys.executable, "-c", "import sys; print('the reason', file=sys.stderr); sys.exit(3)"]
    with pytest.raises(PeerSetupFailed, match=r"doing it.*code 3:\nthe reason"):
        peers_setup.run(failing, 30, "doing it")
    with pytest.raises(PeerSetupFailed, match="is not installed"):
        peers_setup.run(["no-such-program-here"], 30, "doing it")
    with pytest.raises(PeerSetupFailed, match="not finished after 0 s"):
        peers_setup.run([sys.executable, "-c", "import signal; signal.pause()"], 0.2, "doing it")
