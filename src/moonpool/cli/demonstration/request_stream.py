"""The requests that the demo replays: block chains of a published trace, or generated with its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, final

from moonpool.conductor.trace import GeneratorConfig, Trace, generate_trace, load_trace
from moonpool.errors import UsageError

#: What a folder of traces is searched for first.
PREFERRED_TRACE: Final = "conversation_trace.jsonl"

#: Fits the published conversation trace over 12,000 requests: a third of all blocks can be found again, the
#: first block is everybody's, prompts of 12,000 tokens on average and 7,000 in the median, half of the
#: reuse after 480 requests.
CONVERSATION: Final[dict[str, Any]] = {
    "per_s": 3.4,
    "system_tokens": 512,
    "turn_tokens_mean": 7_900.0,
    "spread": 1.15,
    "turns_mean": 1.53,
    "think_s_mean": 230.0,
    "output_tokens_mean": 343.0,
}


@final
@dataclass(frozen=True, slots=True)
class RequestStream:
    """Requests in the order of their arrival: chain k holds the block ids of request k, the prompt's start
    first.

    Equal ids mean equal prefixes, as in the published traces. `distinct` counts the ids that occur.
    """

    source: str
    chains: tuple[tuple[int, ...], ...]
    distinct: int

    @property
    def references(self) -> int:
        """Blocks of all chains together: what hit ratios divide by."""
        return sum(map(len, self.chains))

    @property
    def longest(self) -> int:
        """Blocks of the longest chain."""
        return max(map(len, self.chains), default=0)


def stream_of(trace: Trace, source: str) -> RequestStream:
    """The chains of a trace; requests without a block are left out."""
    ids, starts = trace.block_ids.tolist(), trace.starts.tolist()
    chains = tuple(tuple(ids[low:high]) for low, high in pairwise(starts) if high > low)
    if not chains:
        raise UsageError(f"{source} has no request with a block in it", field="trace")
    return RequestStream(source, chains, len({block for chain in chains for block in chain}))


def find_trace(path: Path) -> Path:
    """The file that a path of the user means: itself, or in a folder the conversation trace, else the first
    one.
    """
    if not path.is_dir():
        return path
    found = sorted(path.glob("*.jsonl"))
    if not found:
        raise UsageError(f"{path} holds no trace; a trace is a .jsonl file", field="trace", value=str(path))
    return next((file for file in found if file.name == PREFERRED_TRACE), found[0])


def read_stream(path: Path, requests: int | None) -> RequestStream:
    """The first `requests` (None: all) of a published trace, or of the one that a folder holds."""
    file = find_trace(path)
    trace = load_trace(file)
    return stream_of(trace if requests is None else trace.first(requests), file.name)


def generate_stream(requests: int, seed: int) -> RequestStream:
    """Conversations with the published statistics; the same seed gives the same requests."""
    trace = generate_trace(GeneratorConfig(requests=requests, **CONVERSATION), seed)
    return stream_of(trace, f"generated, seed {seed}")
