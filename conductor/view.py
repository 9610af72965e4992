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


@final
class View:
    """One prompt against p prefill instances; arrays are in the order of `load.prefills`.

    `local` is int32[p]: leading blocks that each holds in any tier. Seconds are from `now`.
    """

    __slots__ = (
        "_local_prefill_s",
        "beliefs",
        "best",
        "best_blocks",
        "held",
        "least_blocks",
        "local",
        "now",
        "prompt",
        "queue_s",
        "step_s",
        "tokens",
    )

    def __init__(self, beliefs: Beliefs, prompt: Prompt, held: I32, now: float) -> None:
        load = beliefs.load
        self.beliefs: Final = beliefs
        self.prompt: Final = prompt
        self.now: Final = now
        self.tokens: Final = prompt.tokens
        #: int32[tiers, n] over all instances.
        self.held: Final = held
        self.local: Final[I32] = held[-1][load.prefills]
        self.queue_s: Final[F64] = load.queue_seconds(now)[load.prefills]
        #: One decode step of each candidate's present batch.
        self.step_s: Final[F64] = load.step_seconds()[load.prefills]
        self.best: Final = int(held[-1].argmax())
        self.best_blocks: Final = int(held[-1][self.best])
        #: Blocks that every candidate holds: they say nothing about where to go.
        self.least_blocks: Final = int(self.local.min())
        self._local_prefill_s: F64 | None = None

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
            seconds += math.ceil((self.tokens - cached) / shared) * float(self.step_s[at])
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
