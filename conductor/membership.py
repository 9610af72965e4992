"""Numbers for contexts and holders, and who belongs where: names outside, small integers in the table."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final, NamedTuple, final

from moonpool.errors import InternalError, LimitExceeded
from moonpool.events import CacheContext, Holder, check_context, check_holder


class Place(NamedTuple):
    """The numbers of a context and of a holder in it."""

    context: int
    holder: int


@final
class Membership:
    """Contexts and holders by name. Numbers are small and dense; a freed one is given out again.

    `names` is replaced, never changed: whoever keeps it keeps the names as they were. Not thread-safe.
    """

    def __init__(self, contexts_max: int, holders_max: int) -> None:
        self._contexts_max: Final = contexts_max
        self._holders_max: Final = holders_max
        self.contexts: Final[dict[CacheContext, int]] = {}
        #: Where a holder's blocks of a context go; the one look-up of a change.
        self.places: Final[dict[tuple[CacheContext, Holder], Place]] = {}
        #: The holder with each number; None where a number is free.
        self.names: tuple[Holder | None, ...] = ()
        #: Grows with every change of membership.
        self.version = 0
        self._holders: Final[dict[Holder, int]] = {}
        self._members: Final[dict[CacheContext, set[Holder]]] = {}
        self._homes: Final[dict[Holder, set[CacheContext]]] = {}
        self._free_holders: Final[list[int]] = []
        self._free_contexts: Final[list[int]] = []

    def enter(self, context: CacheContext, holder: Holder) -> Place:
        """Makes the holder a member; raises `LimitExceeded` or `UsageError`, and then nothing has changed."""
        known = self.places.get((context, holder))
        if known is not None:
            return known
        context, holder = check_context(CacheContext(*context)), check_holder(Holder(*holder))
        if context not in self.contexts and len(self.contexts) >= self._contexts_max:
            raise LimitExceeded(
                "the index has as many contexts as it may; unregister some or raise contexts_max",
                field="contexts_max",
                limit=self._contexts_max,
            )
        if holder not in self._holders and len(self._holders) >= self._holders_max:
            raise LimitExceeded(
                "the index has as many holders as it may; unregister some or raise holders_max",
                field="holders_max",
                limit=self._holders_max,
            )
        place = Place(self._number_of_context(context), self._number_of_holder(holder))
        self._members.setdefault(context, set()).add(holder)
        self._homes.setdefault(holder, set()).add(context)
        self.places[context, holder] = place
        self.version += 1
        return place

    def leave(self, context: CacheContext, holder: Holder) -> None:
        """Ends a membership, after the holder's blocks there are gone; frees numbers that nobody uses."""
        place = self.places.pop((context, holder))
        self._members[context].remove(holder)
        self._homes[holder].remove(context)
        if not self._members[context]:
            del self._members[context], self.contexts[context]
            heappush(self._free_contexts, place.context)
        if not self._homes[holder]:
            del self._homes[holder], self._holders[holder]
            heappush(self._free_holders, place.holder)
            self.names = (*self.names[: place.holder], None, *self.names[place.holder + 1 :])
        self.version += 1

    def members(self, context: CacheContext) -> frozenset[Holder]:
        """The holders of a context, whether they have blocks or not."""
        return frozenset(self._members.get(context, ()))

    def member_count(self, context: CacheContext) -> int:
        """How many holders a context has."""
        return len(self._members.get(context, ()))

    def homes(self, holder: Holder) -> frozenset[CacheContext]:
        """The contexts that a holder is a member of."""
        return frozenset(self._homes.get(holder, ()))

    def number(self, holder: Holder) -> int | None:
        """A holder's number; None when it is a member of nothing."""
        return self._holders.get(holder)

    def check(self) -> None:
        """Asserts that names, numbers and memberships agree; raises `InternalError`."""
        named = {number: holder for number, holder in enumerate(self.names) if holder is not None}
        if {holder: number for number, holder in named.items()} != self._holders:
            raise InternalError("names and numbers of holders disagree")
        if set(self._free_holders) != set(range(len(self.names))) - named.keys():
            raise InternalError("a holder's number is neither in use nor free")
        pairs = {(context, holder) for context, holders in self._members.items() for holder in holders}
        if pairs != self.places.keys() or pairs != {
            (context, holder) for holder, contexts in self._homes.items() for context in contexts
        }:
            raise InternalError("members, homes and places disagree")
        for (context, holder), place in self.places.items():
            if place != (self.contexts[context], self._holders[holder]):
                raise InternalError("a place has other numbers than its names")
        if self.contexts.keys() != self._members.keys() or not all(self._members.values()):
            raise InternalError("a context has no member")
        numbers = sorted([*self.contexts.values(), *self._free_contexts])
        if numbers != list(range(len(numbers))):
            raise InternalError("two contexts share a number, or a number is lost")

    def _number_of_context(self, context: CacheContext) -> int:
        number = self.contexts.get(context)
        if number is None:
            free = self._free_contexts
            number = self.contexts[context] = heappop(free) if free else len(self.contexts)
        return number

    def _number_of_holder(self, holder: Holder) -> int:
        number = self._holders.get(holder)
        if number is None:
            if self._free_holders:
                number = heappop(self._free_holders)
                self.names = (*self.names[:number], holder, *self.names[number + 1 :])
            else:
                number = len(self.names)
                self.names = (*self.names, holder)
            self._holders[holder] = number
        return number
