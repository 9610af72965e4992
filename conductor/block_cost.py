"""The selection rule that NVIDIA Dynamo 1.6 publishes for its KV router, as a policy to compare with.

`cost = prefill_scale * max(prefill blocks - credit * matched blocks, 0) + decode blocks`, where prefill
blocks are those queued at the instance and the prompt's own, and decode blocks are those its running
requests hold with the prompt's own that none of them shares. Lower wins, equal ones are drawn. Defaults are
the published ones. Where prefill and decode are apart, its decode router counts decode blocks only; so does
the choice here.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.policy import Placement
from moonpool.conductor.request import NOBODY, Decision, Prompt
from moonpool.conductor.view import View


@final
class ActiveBlocks:
    """Distinct blocks of the running requests of each instance: a shared block counts once."""

    def __init__(self) -> None:
        self._held: Counter[tuple[int, int]] = Counter()
        self._holders: dict[int, set[int]] = {}
        self._anonymous: Counter[int] = Counter()
        self._distinct: Counter[int] = Counter()

    def add(self, instance: int, hashes: NDArray[np.integer], more: int) -> None:
        """A request starts: its chain, and `more` blocks that nobody can share."""
        for block in hashes.tolist():
            self._held[block, instance] += 1
            if self._held[block, instance] == 1:
                self._holders.setdefault(block, set()).add(instance)
                self._distinct[instance] += 1
        self._anonymous[instance] += more

    def drop(self, instance: int, hashes: NDArray[np.integer], more: int) -> None:
        """The same request ends."""
        for block in hashes.tolist():
            self._held[block, instance] -= 1
            if not self._held[block, instance]:
                del self._held[block, instance]
                self._distinct[instance] -= 1
                holders = self._holders[block]
                holders.discard(instance)
                if not holders:
                    del self._holders[block]
        self._anonymous[instance] -= more

    def needed(self, hashes: NDArray[np.integer], instances: NDArray[np.intp]) -> NDArray[np.float64]:
        """float64[k]: blocks each instance would hold with this chain added."""
        shared: Counter[int] = Counter()
        for block in hashes.tolist():
            holders = self._holders.get(block)
            if holders is None:
                # Chains: where a block is active, so is all before it.
                break
            shared.update(holders)
        blocks = [
            self._distinct[at] + self._anonymous[at] + len(hashes) - shared[at] for at in instances.tolist()
        ]
        return np.array(blocks, np.float64)


@final
class BlockCost:
    """Fewest blocks to prefill and to hold."""

    name: Final = "dynamo"

    def __init__(self, prefill_scale: float = 1.0, credit: float = 1.0) -> None:
        self._scale: Final = prefill_scale
        self._credit: Final = credit
        self._active: Final = ActiveBlocks()

    def choose(self, view: View) -> Placement:
        load, size = view.beliefs.load, view.beliefs.config.block_tokens
        raw = (load.queued_tokens[load.prefills] + view.tokens) / size
        cost = self._scale * np.maximum(raw - self._credit * view.local, 0.0)
        if view.beliefs.aggregated:
            cost = cost + self._active.needed(np.asarray(view.prompt.hashes), load.prefills)
        return Placement(view.least(cost), cost=cost)

    def booked(self, prompt: Prompt, decision: Decision) -> None:
        if decision.decode != NOBODY:
            self._active.add(decision.decode, np.asarray(prompt.hashes), 0)

    def released(self, prompt: Prompt, decision: Decision) -> None:
        if decision.decode != NOBODY:
            self._active.drop(decision.decode, np.asarray(prompt.hashes), 0)
