"""Status pages: what is answered, what is refused, and that nobody can hold the server up."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from moonpool.errors import ResourceError, UsageError
from moonpool.http_status import HttpStatus, HttpStatusConfig, Page, health_page, text_page

WAIT_S = 10.0


def broken_page() -> Page:
    raise ValueError("the gauge fell off")


@pytest.fixture
def server() -> Iterator[HttpStatus]:
    pages = {
        "/metrics": lambda: text_page("up 1\n"),
        "/healthz": lambda: health_page("the journal is away", role="leader"),
        "/broken": broken_page,
    }
    config = HttpStatusConfig(connections_max=2, request_timeout_ms=300)
    with HttpStatus(pages, config) as running:
        yield running


def ask(server: HttpStatus, method: str, path: str) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(server.address, timeout=WAIT_S)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_pages(server: HttpStatus) -> None:
    status, headers, body = ask(server, "GET", "/metrics?name=x")
    assert (status, body) == (200, b"up 1\n")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    status, _, body = ask(server, "GET", "/healthz")
    assert status == 503
    assert json.loads(body) == {"ok": False, "reason": "the journal is away", "role": "leader"}
    status, headers, body = ask(server, "HEAD", "/metrics")
    assert (status, headers["Content-Length"], body) == (200, "5", b"")


def test_what_is_wrong_is_said(server: HttpStatus) -> None:
    assert ask(server, "GET", "/nothing")[0] == 404
    status, _, body = ask(server, "GET", "/broken")
    assert status == 500
    assert b"the gauge fell off" in body
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = ask(server, method, "/metrics")
        assert (status, headers["Allow"]) == (405, "GET, HEAD")


def test_a_slow_request_is_cut_off_and_a_flood_refused(server: HttpStatus) -> None:
    host, _, port = server.address.rpartition(":")
    slow = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(2)]
    try:
        for one in slow:
            one.sendall(b"GET /metrics HT")
        extra = socket.create_connection((host, int(port)), WAIT_S)
        with extra:
            assert extra.recv(1) == b""  # over the bound: closed at once
        for one in slow:
            assert one.recv(1) == b""  # over its time
    finally:
        for one in slow:
            one.close()
    assert server.counters()["connections_refused"] >= 1
    assert server.counters()["requests_cut_off"] == 2
    assert ask(server, "GET", "/metrics")[0] == 200


def test_a_burst_of_connections_waits_for_no_retry_of_the_kernels(server: HttpStatus) -> None:
    host, _, port = server.address.rpartition(":")
    began = time.monotonic()
    burst = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(100)]
    took = time.monotonic() - began
    for one in burst:
        one.close()
    assert took < 0.9  # a connection that finds the queue full tries again after a second


def test_without_descriptors_it_waits_and_does_not_spin(server: HttpStatus) -> None:
    host, _, port = server.address.rpartition(":")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as one:
        one.settimeout(WAIT_S)
        lowest = os.dup(one.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            one.connect((host, int(port)))
            one.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            used = time.process_time()
            time.sleep(0.5)
            used = time.process_time() - used
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert used < 0.2
        assert one.recv(64).startswith(b"HTTP/1.0 200")


def test_close_ends_its_threads() -> None:
    before = threading.active_count()
    server = HttpStatus({"/": lambda: text_page("")})
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S):
        server.close()
        server.close()
    assert threading.active_count() == before


def test_an_address_in_use_is_a_typed_error(server: HttpStatus) -> None:
    host, _, port = server.address.rpartition(":")
    with pytest.raises(ResourceError, match="status pages"):
        HttpStatus({}, HttpStatusConfig(bind_host=host, port=int(port)))
    with pytest.raises(UsageError, match="connections_max"):
        HttpStatusConfig(connections_max=0)
