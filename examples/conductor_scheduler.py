"""The scheduler in a stranger's serving stack: an index fed by block events, and a decision for each prompt.

Run it: python examples/conductor_scheduler.py
"""

from __future__ import annotations

from moonpool.conductor import (
    CacheContext,
    Holder,
    IndexView,
    InstanceSpec,
    PrefixIndex,
    Prompt,
    Role,
    Scheduler,
    SchedulerConfig,
)
from moonpool.conductor.cost import DecodeCost, PrefillCost

BLOCK_TOKENS = 16


def main() -> None:
    """Places three prompts that share a prefix on four engines, and explains the last decision."""
    names = [f"engine-{number}" for number in range(4)]
    context, holders = CacheContext("a-model", block_tokens=BLOCK_TOKENS), [Holder(name) for name in names]
    index = PrefixIndex()
    fleet = [
        InstanceSpec(
            name=name,
            role=Role.BOTH,
            prefill=PrefillCost(quadratic_s=1e-10, linear_s=2e-5),
            decode=DecodeCost(step_s=0.01, request_s=1e-4, context_token_s=1e-8),
            kv_tokens_max=500_000,
            chunk_tokens=2_048,
        )
        for name in names
    ]
    config = SchedulerConfig(block_tokens=BLOCK_TOKENS)
    scheduler = Scheduler(fleet, IndexView(index, context, holders), config=config, seed=1)

    system_prompt = list(range(1_000, 1_200))
    for number in range(3):
        hashes = [*system_prompt, *range(5_000 * (number + 1), 5_000 * (number + 1) + 50)]
        now = float(number)
        decision = scheduler.schedule(Prompt(number, len(hashes) * BLOCK_TOKENS + 7, hashes), now)
        print(decision.explain(), end="\n\n")
        # The engine serves it: its events feed the index, its answers the scheduler.
        index.store(context, holders[decision.prefill], hashes)
        scheduler.first_token(number, now + decision.ttft_s, cached_tokens=0)
        scheduler.finished(number, now + decision.ttft_s + 2.0)


if __name__ == "__main__":
    main()
