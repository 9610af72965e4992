"""Prometheus text read back by a strict parser written from the format's description, and quantiles of
buckets.
"""

from __future__ import annotations

import math
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.errors import InternalError, Status, UsageError
from moonpool.metrics import (
    LATENCY_BOUNDS_US,
    Bucket,
    LatencyHistogram,
    Quantiles,
    merge_buckets,
    quantile_us,
    quantiles,
    render_prometheus,
)

Sample = tuple[str, tuple[tuple[str, str], ...], float]


def parse(text: str) -> tuple[dict[str, str], list[Sample]]:
    """Types by family and all samples; fails on anything the exposition format 0.0.4 does not allow."""
    assert text == "" or text.endswith("\n")
    types: dict[str, str] = {}
    samples: list[Sample] = []
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            assert re.fullmatch(r"# HELP [a-zA-Z_:][a-zA-Z0-9_:]* .*", line, re.DOTALL)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind in {"counter", "gauge", "histogram"}
            assert name not in types, f"{name} appears twice"
            types[name] = kind
        else:
            samples.append(parse_sample(line))
            family = list(types)[-1]
            name = samples[-1][0]
            allowed = (
                {family}
                if types[family] != "histogram"
                else {f"{family}_{s}" for s in ("bucket", "sum", "count")}
            )
            assert name in allowed, f"{name} is not below its own family"
    keys = [(name, labels) for name, labels, _ in samples]
    assert len(set(keys)) == len(keys), "a series appears twice"
    return types, samples


def parse_sample(line: str) -> Sample:
    match = re.fullmatch(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)", line)
    assert match, f"not a sample: {line!r}"
    labels = []
    rest = match[2] or ""
    while rest:
        found = re.match(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\[\\"n])*)"(?:,|$)', rest)
        assert found, f"not a label: {rest!r}"
        value = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], found[2])
        labels.append((found[1], value))
        rest = rest[found.end() :]
    return match[1], tuple(labels), float(match[3])


def path(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "transport": "tcp",
        "peer": "10.0.0.2:7420",
        "path": "eth0->eth0",
        "op": "READ",
        "transfers": 7,
        "bytes": 7 * 4096,
        "errors": {},
        "latency_us_buckets": [(0.256, 0), (1.024, 3), (1.28, 2), (16.384, 1), (2.0e8, 1)],
        "latency_sum_us": 25.5,
    }
    return base | changes


def test_paths_become_counters_and_a_cumulative_histogram() -> None:
    types, samples = parse(render_prometheus({"paths": [path()]}))
    assert types == {
        "moonpool_transfers_total": "counter",
        "moonpool_transfer_bytes_total": "counter",
        "moonpool_transfer_latency_seconds": "histogram",
    }
    labels = (("transport", "tcp"), ("peer", "10.0.0.2:7420"), ("path", "eth0->eth0"), ("op", "READ"))
    values = {(name, found): value for name, found, value in samples}
    assert values["moonpool_transfers_total", labels] == 7
    assert values["moonpool_transfer_bytes_total", labels] == 28_672
    name = "moonpool_transfer_latency_seconds"
    assert values[f"{name}_sum", labels] == pytest.approx(25.5e-6)
    assert values[f"{name}_count", labels] == 7
    buckets = [(float(found[-1][1]), value) for n, found, value in samples if n == f"{name}_bucket"]
    assert [bound for bound, _ in buckets] == [*(bound / 1e6 for bound in LATENCY_BOUNDS_US), math.inf]
    cumulative = dict(buckets)
    assert cumulative[256e-9] == 0
    assert cumulative[1.024e-6] == 3
    assert cumulative[2.048e-6] == 5, "1.28 us is counted at the next bound of the grid"
    assert cumulative[16.384e-6] == 6
    assert cumulative[LATENCY_BOUNDS_US[-1] / 1e6] == 6
    assert cumulative[math.inf] == 7


def test_rows_with_the_same_labels_are_one_series() -> None:
    _, samples = parse(
        render_prometheus({"paths": [path(errors={2: 1}), path(errors={2: 2}), path(op="WRITE")]})
    )
    read = {
        (name, dict(labels).get("le", "")): value
        for name, labels, value in samples
        if ("op", "READ") in labels
    }
    assert read["moonpool_transfers_total", ""] == 14
    assert read["moonpool_transfer_errors_total", ""] == 3
    assert read["moonpool_transfer_latency_seconds_count", ""] == 14
    assert read["moonpool_transfer_latency_seconds_sum", ""] == pytest.approx(51e-6)


def test_errors_are_named_however_the_status_is_given() -> None:
    for status in (Status.TIMED_OUT, 2, "2", "TIMED_OUT"):
        _, samples = parse(render_prometheus({"paths": [path(errors={status: 4})]}))
        (sample,) = (s for s in samples if s[0] == "moonpool_transfer_errors_total")
        assert dict(sample[1])["status"] == "TIMED_OUT"
        assert sample[2] == 4


def test_counters_gauges_prefix_and_labels() -> None:
    text = render_prometheus(
        {"counters": {"lanes.opened": 3, "drops_total": 2**63}, "gauges": {"regions": 2, "load": 0.1}},
        prefix="mp",
        labels={"engine": "a"},
    )
    types, samples = parse(text)
    assert types == {
        "mp_lanes_opened_total": "counter",
        "mp_drops_total": "counter",
        "mp_regions": "gauge",
        "mp_load": "gauge",
    }
    assert [value for _, _, value in samples] == [3, 2**63, 2, 0.1]
    assert "9223372036854775808" in text, "whole numbers are exact"
    assert all(labels == (("engine", "a"),) for _, labels, _ in samples)


def test_empty_snapshot_is_empty_text() -> None:
    assert render_prometheus({}) == ""
    assert render_prometheus({"paths": [], "counters": {}, "gauges": {}}) == ""


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e-300, 12345.678])
def test_gauge_values_read_back(value: float) -> None:
    _, samples = parse(render_prometheus({"gauges": {"x": value}}))
    assert samples[0][2] == value


def test_not_a_number_reads_back() -> None:
    _, samples = parse(render_prometheus({"gauges": {"x": math.nan}}))
    assert math.isnan(samples[0][2])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text())
def test_any_label_value_survives(value: str) -> None:
    _, samples = parse(render_prometheus({"paths": [path(peer=value)]}))
    assert all(dict(labels)["peer"] == value for _, labels, _ in samples)


def test_help_text_of_an_odd_counter_name_stays_on_its_line() -> None:
    types, _ = parse(render_prometheus({"counters": {"odd\n\\name": 1}}))
    assert types == {"moonpool_odd__name_total": "counter"}


@pytest.mark.parametrize(
    ("snapshot", "options", "error"),
    [
        ({"counters": {"a b": 1, "a-b": 1}}, {}, UsageError),
        ({"gauges": {"x": 1}}, {"prefix": "0x"}, UsageError),
        ({"gauges": {"x": 1}}, {"labels": {"le": "1"}}, UsageError),
        ({"gauges": {"x": 1}}, {"labels": {"__name__": "1"}}, UsageError),
        ({"gauges": {"x": 1}}, {"labels": {"a-b": "1"}}, UsageError),
        ({"paths": [path(latency_us_buckets=[(2.0, 1), (1.0, 1)])]}, {}, InternalError),
        ({"paths": [path(latency_us_buckets=[(2.0, -1)])]}, {}, InternalError),
    ],
)
def test_what_would_be_wrong_text_is_refused(
    snapshot: dict[str, Any], options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        render_prometheus(snapshot, **options)


def test_quantiles_inside_a_bucket_are_linear() -> None:
    buckets: list[Bucket] = [(10.0, 100), (20.0, 100)]
    assert quantile_us(buckets, 0.0) == 0.0
    assert quantile_us(buckets, 0.25) == pytest.approx(5.0)
    assert quantile_us(buckets, 0.5) == pytest.approx(10.0)
    assert quantile_us(buckets, 0.75) == pytest.approx(15.0)
    assert quantile_us(buckets, 1.0) == pytest.approx(20.0)


def test_quantiles_of_nothing_and_of_the_unbounded_bucket() -> None:
    assert quantile_us([], 0.5) is None
    assert quantiles([(1.0, 0)]) == Quantiles(None, None, None)
    assert quantile_us([(8.0, 1), (math.inf, 99)], 0.5) == 8.0
    with pytest.raises(UsageError):
        quantile_us([(1.0, 1)], 1.5)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_quantiles_are_right_to_a_bucket(seed: int) -> None:
    rng = random.Random(seed)
    samples = sorted(rng.lognormvariate(3, 1.5) for _ in range(5000))
    bounds = [2 ** (step / 4) for step in range(-16, 80)]
    buckets: list[Bucket] = []
    lower = 0.0
    for upper in bounds:
        buckets.append((upper, sum(1 for sample in samples if lower < sample <= upper)))
        lower = upper
    for fraction in (0.01, 0.5, 0.9, 0.99, 0.999):
        exact = samples[math.ceil(fraction * len(samples)) - 1]
        found = quantile_us(buckets, fraction)
        assert found is not None
        assert exact / 2**0.25 <= found <= exact * 2**0.25, f"seed {seed}, quantile {fraction}"


def test_histogram_counts_every_sample_once() -> None:
    histogram = LatencyHistogram()
    for latency_us in (0.0, 0.1, 1.0, 1.01, 1e6, 1e12):
        histogram.add(latency_us)
    assert sum(count for _, count in histogram.buckets) == 6
    assert dict(histogram.buckets)[1.0] == 1, "a bound belongs to its own bucket"
    assert dict(histogram.buckets)[math.inf] == 1
    assert quantile_us(histogram.buckets, 0.5) == pytest.approx(1.0)


def test_merging_adds_counts_over_all_bounds() -> None:
    assert merge_buckets([[(1.0, 1), (4.0, 2)], [(2.0, 5), (4.0, 1)], []]) == [(1.0, 1), (2.0, 5), (4.0, 3)]
