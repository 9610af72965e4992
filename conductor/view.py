"""What a policy sees of one request and all candidates: arrays over the prefill instances, computed once."""

from __future__ import annotations

import math
import random
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.instance import LoadTable, Role
from moonpool.conductor.predictor import PrefillPredictor
from moonpool.conductor.request import Prompt
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.conductor.transfer_model import LinkClocks
from moonpool.kernels.placement import Standing

F64 = NDArray[np.float64]
I32 = NDArray[np.int32]


@final
class Beliefs:
    """What the scheduler knows besides the prompt; made once, changed by bookings and reports."""

    def __init__(
        self,
        load: LoadTable,
        predictor: PrefillPredictor,
        links: LinkClocks,
        config: SchedulerConfig,
        seed: int,
    ) -> None:
        self.load: Final = load
        self.predictor: Final = predictor
        self.links: Final = links
        self.config: Final = config
        #: Breaks ties; seeded, so that the same requests give the same decisions.
        self.random: Final = random.Random(seed)
        instances = [load.instances[at] for at in load.prefills]
        mixed = [each.role is Role.BOTH for each in instances]
        #: Tokens of a chunk that shares its step with a decode batch; 0 where it never does.
        self.shared_chunk: Final = np.array(
            [
                float(each.chunk_tokens or 1 << 30) if both else 0.0
                for each, both in zip(instances, mixed, strict=True)
            ]
        )
        self.mixed: Final = any(mixed)
        #: Prefill and decode on one instance: the decode side is not chosen.
        self.aggregated: Final = all(mixed)
        #: All of it as the placement kernel takes it; the arrays are those above and change with them.
        self.standing: Final = Standing(
            load.rows,
            predictor.rows,
            links.rows,
            load.balance.seconds,
            load.prefills.astype(np.int64),
            self.shared_chunk,
        )


@final
class View:
    """One prompt against p prefill instances; arrays are in the order of `load.prefills`.

    `local` is int32[p]: leading blocks that each holds in any tier. Seconds are from `now`. What a policy
    does not ask for is not computed.
    """

    __slots__ = (
        "_best",
        "_least_blocks",
        "_local_prefill_s",
        "_queue_s",
        "_step_s",
        "beliefs",
        "held",
        "local",
        "now",
        "prompt",
        "tokens",
    )

    def __init__(self, beliefs: Beliefs, prompt: Prompt, held: I32, now: float) -> None:
        self.beliefs: Final = beliefs
        self.prompt: Final = prompt
        self.now: Final = now
        self.tokens: Final = prompt.tokens
        #: int32[tiers, n] over all instances.
        self.held: Final = held
        self.local: Final[I32] = held[-1][beliefs.load.prefills]
        self._queue_s: F64 | None = None
        self._step_s: F64 | None = None
        self._local_prefill_s: F64 | None = None
        self._best: int | None = None
        self._least_blocks: int | None = None

    @property
    def queue_s(self) -> F64:
        """float64[p]: prefill seconds ahead of the prompt."""
        if self._queue_s is None:
            load = self.beliefs.load
            self._queue_s = load.queue_seconds(self.now)[load.prefills]
        return self._queue_s

    @property
    def step_s(self) -> F64:
        """float64[p]: one decode step of each candidate's present batch."""
        if self._step_s is None:
            load = self.beliefs.load
            self._step_s = load.step_seconds()[load.prefills]
        return self._step_s

    @property
    def best(self) -> int:
        """The instance with the longest match, among all."""
        if self._best is None:
            self._best = int(self.held[-1].argmax())
        return self._best

    @property
    def best_blocks(self) -> int:
        """How many leading blocks the longest match has."""
        return int(self.held[-1].item(self.best))

    @property
    def least_blocks(self) -> int:
        """Blocks that every candidate holds: they say nothing about where to go."""
        if self._least_blocks is None:
            self._least_blocks = int(self.local.min())
        return self._least_blocks

    def know(self, queue_s: F64, local_prefill_s: F64, matches: tuple[int, int]) -> None:
        """Takes what a policy's kernel has computed already; `matches` are `best` and `least_blocks`."""
        self._queue_s, self._local_prefill_s = queue_s, local_prefill_s
        self._best, self._least_blocks = matches

    def cached_tokens(self, blocks: I32 | int) -> F64:
        """Tokens that so many leading blocks save; the last token is always computed."""
        tokens: F64 = np.minimum(
            np.multiply(blocks, float(self.beliefs.config.block_tokens)), self.tokens - 1.0
        )
        return tokens

    def prefill_seconds(self, blocks: I32 | int) -> F64:
        """float64[p]: prefill time with that many blocks cached, with the decode steps that run between."""
        beliefs = self.beliefs
        cached = self.cached_tokens(blocks)
        seconds = beliefs.predictor.seconds(beliefs.load.prefills, self.tokens, cached)
        if beliefs.mixed:
            shared = beliefs.shared_chunk
            chunks = np.ceil((self.tokens - cached) / np.maximum(shared, 1.0)) * (shared > 0)
            busy = beliefs.load.batch[beliefs.load.prefills] > 0
            seconds = seconds + chunks * self.step_s * busy
        return seconds

    @property
    def local_prefill_s(self) -> F64:
        """float64[p]: prefill time with what each holds itself; computed once."""
        if self._local_prefill_s is None:
            self._local_prefill_s = self.prefill_seconds(self.local)
        return self._local_prefill_s

    def prefill_at(self, at: int, blocks: int) -> float:
        """Prefill time on the candidate at position `at` with that many blocks cached."""
        beliefs = self.beliefs
        position = int(beliefs.load.prefills[at])
        cached = min(blocks * beliefs.config.block_tokens, self.tokens - 1)
        seconds = beliefs.predictor.one(position, self.tokens, cached)
        shared = float(beliefs.shared_chunk[at])
        if shared and beliefs.load.batch[position] > 0:
            seconds += math.ceil((self.tokens - cached) / shared) * beliefs.load.step_at(position)
        return seconds

    def fetch_seconds(self, source: int, blocks: I32) -> F64:
        """float64[p]: until the blocks that each candidate lacks of the first `blocks` came from `source`."""
        config = self.beliefs.config
        size = blocks.astype(np.float64) * (config.block_tokens * config.token_bytes)
        return self.beliefs.links.arrival_seconds(source, self.beliefs.load.prefills, size, self.now)

    def least(self, cost: F64) -> int:
        """The position of the least cost; equal ones are drawn, so that no instance is preferred."""
        low = float(cost.min())
        ties = np.flatnonzero(cost <= low + 1e-9 * abs(low))
        if len(ties) == 1:
            return int(ties[0])
        return int(ties[int(self.beliefs.random.random() * len(ties))])
