"""Why a request went where it went: every candidate's terms, and why a hit was zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.request import NOBODY, Verdict

if TYPE_CHECKING:
    from moonpool.conductor.request import Decision

F64 = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """What was known of each candidate; arrays are of the p prefill instances, in their order."""

    policy: str
    names: tuple[str, ...]
    positions: NDArray[np.intp]
    queue_s: F64
    prefill_s: F64
    local_blocks: NDArray[np.int32]
    cost: F64 | None
    prompt_blocks: int
    block_tokens: int
    tokens: int

    def zero_hit_reason(self) -> str | None:
        """Why no instance matched a single block, or None when one did."""
        if self.local_blocks.any():
            return None
        if self.prompt_blocks == 0:
            if self.tokens < self.block_tokens:
                return f"the prompt of {self.tokens} tokens is shorter than a block of {self.block_tokens}"
            return "the request carried no block hashes"
        return (
            "no instance is known to hold its first block: a new prefix, other hashes or salt, or no events"
        )


def describe(decision: Decision) -> str:
    """The decision as lines of text: outcome, then one line for each candidate, the chosen one starred."""
    terms = decision.terms
    head = f"request {decision.id}: {decision.verdict}"
    if terms is None:
        return head
    lines = [
        f"{head} by {terms.policy}; predicted TTFT {decision.ttft_s:.3f} s, TBT {decision.tbt_s * 1e3:.1f} ms"
    ]
    if decision.source != NOBODY:
        lines.append(f"fetches {decision.fetch_blocks} leading blocks from {terms.names[decision.source]}")
    lines += [
        f"asks to copy {len(copy.hashes)} blocks to {terms.names[copy.target]}, "
        f"expected to save {copy.expected_saving_s:.2f} s"
        for copy in decision.copies
    ]
    reason = terms.zero_hit_reason()
    if reason is not None:
        lines.append(f"no cached block: {reason}")
    if decision.verdict is Verdict.NO_ROOM:
        lines.append("no decode instance has memory for the prompt and its answer")
    for at, position in enumerate(terms.positions.tolist()):
        star = "*" if position == decision.prefill else " "
        cost = "" if terms.cost is None else f", cost {terms.cost[at]:.3f}"
        lines.append(
            f"{star} {terms.names[position]}: queue {terms.queue_s[at]:.3f} s, "
            f"prefill {terms.prefill_s[at]:.3f} s, "
            f"{terms.local_blocks[at]} of {terms.prompt_blocks} blocks cached{cost}"
        )
    return "\n".join(lines)
