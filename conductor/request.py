"""What the scheduler is told about a prompt, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.errors import UsageError

if TYPE_CHECKING:
    from moonpool.conductor.explanation import Terms

#: No instance.
NOBODY: Final = -1
TOKENS_MAX: Final = 1 << 24
PRIORITY_MAX: Final = 100


class Verdict(StrEnum):
    """What became of a request at its arrival."""

    ACCEPTED = "accepted"
    NO_ROOM = "no_room"
    """No instance has memory for its prompt and answer."""
    SLOW_FIRST_TOKEN = "slow_first_token"
    """Its first token would come later than the limit."""
    SLOW_TOKENS = "slow_tokens"
    """The decode instance would be slower than the limit with it."""


@final
@dataclass(frozen=True, slots=True)
class Prompt:
    """A request to be placed. Raises `UsageError` for sizes that no request can have.

    `hashes` are the chain hashes of its blocks, from the first; a partial last block may be left out.
    `output_tokens` is the most it may answer, 0 when nobody knows. A higher `priority` is rejected later.
    Hashes of prompts in different `space`s never match: give each context a 64-bit number of its own.
    """

    id: Hashable
    tokens: int
    hashes: Sequence[int] | NDArray[np.integer]
    output_tokens: int = 0
    priority: int = 0
    space: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= TOKENS_MAX:
            raise UsageError(f"a prompt has 1 to {TOKENS_MAX} tokens", field="tokens", value=str(self.tokens))
        if not 0 <= self.output_tokens <= TOKENS_MAX:
            raise UsageError(
                f"an answer has 0 (unknown) to {TOKENS_MAX} tokens",
                field="output_tokens",
                value=str(self.output_tokens),
            )
        if abs(self.priority) > PRIORITY_MAX:
            raise UsageError(
                f"a priority lies within -{PRIORITY_MAX} and {PRIORITY_MAX}",
                field="priority",
                value=str(self.priority),
            )


@final
@dataclass(frozen=True, slots=True)
class CopyRequest:
    """Ask a store to copy the first `blocks` blocks of a chain; the scheduler itself moves nothing."""

    source: int
    target: int
    hashes: tuple[int, ...]
    expected_saving_s: float
    """Prefill seconds that the copy is expected to save while it is likely to stay cached."""


@final
@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, what that is expected to give, and why.

    Instances are positions in the scheduler's list. `source` holds `fetch_blocks` leading blocks that the
    prefill instance should pull; NOBODY when it uses what it has. Times in seconds from the decision.
    """

    id: Hashable
    verdict: Verdict
    prefill: int = NOBODY
    decode: int = NOBODY
    source: int = NOBODY
    fetch_blocks: int = 0
    cached_blocks: int = 0
    ttft_s: float = 0.0
    tbt_s: float = 0.0
    copies: tuple[CopyRequest, ...] = ()
    terms: Terms | None = field(default=None, repr=False, compare=False)

    @property
    def accepted(self) -> bool:
        return self.verdict is Verdict.ACCEPTED

    def explain(self) -> str:
        """The cost terms of every candidate, and why a hit was zero, as lines of text."""
        from moonpool.conductor.explanation import describe

        return describe(self)
