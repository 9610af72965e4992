"""Instances that come and go under one scheduler: what a service schedules on.

Pure. A scheduler's instances are fixed, so a change makes a new one that inherits the requests under way and
what was learned. Changes are rare next to decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from moonpool.conductor.admission import Admission
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.instance import InstanceSpec, Role
from moonpool.conductor.policy import make_policy
from moonpool.conductor.request import Decision, Prompt
from moonpool.conductor.scheduler import Scheduler
from moonpool.conductor.scheduler_config import SchedulerConfig
from moonpool.errors import LimitExceeded, UsageError
from moonpool.events import CacheContext, Hashes, Holder
from moonpool.units import U64_MAX

_SPACES_MAX: Final = 65_536
#: Odd, so that multiples are distinct; its bits are even spread (2**64 over the golden ratio).
_SPREAD: Final = 0x9E3779B97F4A7C15


@final
@dataclass(frozen=True, slots=True)
class Member:
    """An instance to schedule on: who holds its blocks, where requests go, and how fast it is."""

    holder: Holder
    spec: InstanceSpec
    url: str = ""


@final
class FleetOverlap:
    """Answers a scheduler's `overlap` for the context of the prompt at hand."""

    def __init__(self, index: PrefixIndex, holders: tuple[Holder, ...]) -> None:
        self._index: Final = index
        self._holders: Final = holders
        #: None: nothing is known of any cache.
        self.context: CacheContext | None = None

    def overlap(self, hashes: Hashes) -> NDArray[np.int32]:
        """int32[3, n] in the order of the fleet; zeros for those whom the index does not know."""
        found = np.zeros((3, len(self._holders)), np.int32)
        if self.context is None or not len(hashes):
            return found
        depths = self._index.query_depths(self.context, hashes, mixed=True)
        for position, holder in enumerate(self._holders):
            number = self._index.number(holder)
            if number is not None and number < depths.shape[1]:
                found[:, position] = depths[:, number]
        return found


@final
class Fleet:
    """One model's instances and their scheduler. One thread at a time; the caller tells the time."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        config: SchedulerConfig,
        policy: str = "affinity",
        admission: Callable[[], Admission] | None = None,
        members_max: int = 4_096,
    ) -> None:
        self._index: Final = index
        self._config: Final = config
        self._policy: Final = policy
        self._admission: Final = admission
        self._members_max: Final = members_max
        self._members: dict[str, Member] = {}
        self._scheduler: Scheduler | None = None
        self._overlap: FleetOverlap | None = None
        self._spaces: dict[CacheContext | None, int] = {}
        self._spaces_given = 0
        make_policy(policy)  # a wrong name is an error now

    def __len__(self) -> int:
        return len(self._members)

    @property
    def members(self) -> tuple[Member, ...]:
        """In the order of the decisions' positions."""
        return tuple(self._members.values())

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler over the present members; None while nobody prefills or nobody decodes."""
        return self._scheduler

    def put(self, member: Member, now: float) -> bool:
        """Adds or replaces a member by its spec's name; False when nothing changed."""
        name = member.spec.name
        known = self._members.get(name)
        if known == member:
            return False
        if known is None and len(self._members) >= self._members_max:
            raise LimitExceeded(
                "the fleet has as many instances as it may; remove some or raise instances_max",
                field="instances_max",
                limit=self._members_max,
            )
        changed = {**self._members, name: member}
        self._rebuild(changed, now)
        return True

    def drop(self, name: str, now: float) -> bool:
        """Removes a member and the requests on it; False for an unknown name."""
        if name not in self._members:
            return False
        self._rebuild({known: each for known, each in self._members.items() if known != name}, now)
        return True

    def schedule(self, prompt: Prompt, context: CacheContext | None, now: float) -> Decision:
        """Places a prompt; `context` None schedules by load alone.

        Raises `UsageError` while no instance prefills or none decodes, and as `Scheduler.schedule` does.
        """
        scheduler = self._scheduler
        if scheduler is None or self._overlap is None:
            raise UsageError("no instance to schedule on: register some that prefill and some that decode")
        self._overlap.context = context
        return scheduler.schedule(replace(prompt, space=self._space(context)), now)

    def first_token(self, request_id: Hashable, now: float, cached_tokens: int | None = None) -> None:
        """As `Scheduler.first_token`."""
        if self._scheduler is not None:
            self._scheduler.first_token(request_id, now, cached_tokens)

    def finished(self, request_id: Hashable, now: float) -> None:
        """As `Scheduler.finished`."""
        if self._scheduler is not None:
            self._scheduler.finished(request_id, now)

    def cancelled(self, request_id: Hashable, now: float) -> None:
        """As `Scheduler.cancelled`."""
        if self._scheduler is not None:
            self._scheduler.cancelled(request_id, now)

    def _space(self, context: CacheContext | None) -> int:
        """A number that keeps hashes of different contexts apart, spread over 64 bits."""
        number = self._spaces.get(context)
        if number is None:
            if len(self._spaces) >= _SPACES_MAX:
                # Requests under way keep their numbers; only matches with them are missed.
                self._spaces.clear()
            self._spaces_given += 1
            number = self._spaces[context] = self._spaces_given * _SPREAD & U64_MAX
        return number

    def _rebuild(self, members: dict[str, Member], now: float) -> None:
        roles = [member.spec.role for member in members.values()]
        if any(role & Role.PREFILL for role in roles) and any(role & Role.DECODE for role in roles):
            overlap = FleetOverlap(self._index, tuple(member.holder for member in members.values()))
            scheduler = Scheduler(
                [member.spec for member in members.values()],
                overlap,
                policy=make_policy(self._policy),
                admission=self._admission() if self._admission else None,
                config=self._config,
                survival=None if self._scheduler is None else self._scheduler.survival,
            )
            if self._scheduler is not None:
                scheduler.inherit(self._scheduler, now)
            self._scheduler, self._overlap = scheduler, overlap
        elif not members:
            self._scheduler = self._overlap = None
        else:
            # Half a fleet cannot serve; what is under way is kept for when it can again.
            self._overlap = None
        self._members = members
