"""Who is registered, and the answers that need names: which contexts a question means, and what they hold.

Pure; owned by one thread together with its index. The feeds of all streams live here, so that an instance's
index entries, its suspicion and its drift go with its registration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, final

from moonpool.conductor.blocks import BlockHasher
from moonpool.conductor.chaining import Tokens
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.prefix_match import Depths
from moonpool.conductor.recipes import HashRecipe
from moonpool.conductor.registration import Registration, index_context
from moonpool.conductor.stream_feed import StreamFeed
from moonpool.errors import LimitExceeded, UsageError
from moonpool.events import DEFAULT_TENANT, CacheContext, Hashes, Holder

_HASHERS_MAX: Final = 4_096


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which blocks are asked about. `block_tokens` 0 and `instance` "" mean any."""

    model: str
    lora: str = ""
    tenant: str = DEFAULT_TENANT
    block_tokens: int = 0
    salt: str = ""
    instance: str = ""


class Answer(NamedTuple):
    """What holders have of one prompt, in blocks of `block_tokens`, those without a match included."""

    block_tokens: int
    blocks: int
    depths: dict[Holder, Depths]


class _Domain(NamedTuple):
    """Registrations whose blocks are hashed and kept alike."""

    recipe: HashRecipe
    context: CacheContext
    hash_context: CacheContext


@final
class Catalogue:
    """Registrations by key, their feeds, and queries over all of them."""

    def __init__(self, index: PrefixIndex, *, registrations_max: int, names_max: int, held_max: int) -> None:
        self.index: Final = index
        self._registrations_max: Final = registrations_max
        self._names_max: Final = names_max
        self._held_max: Final = held_max
        self._feeds: dict[tuple[str, str, int], StreamFeed] = {}
        self._registered: dict[tuple[str, str, int], Registration] = {}
        self._hashers: dict[tuple[HashRecipe, CacheContext], BlockHasher] = {}
        #: What questions without their instance came to, until a registration changes.
        self._known_domains: dict[Question, tuple[_Domain, ...]] = {}

    def __len__(self) -> int:
        return len(self._registered)

    def __iter__(self) -> Iterator[Registration]:
        return iter(list(self._registered.values()))

    def feed(self, key: tuple[str, str, int]) -> StreamFeed | None:
        """The feed of a registration; None for an unknown key."""
        return self._feeds.get(key)

    def feeds_of(self, instance: str) -> list[StreamFeed]:
        """The feeds of all ranks of an instance."""
        return [feed for key, feed in self._feeds.items() if key[0] == instance]

    def register(self, registration: Registration) -> bool:
        """Takes a registration in; False when an equal one is there already.

        Raises `UsageError` when its key is registered otherwise, and `LimitExceeded` at the bounds.
        """
        known = self._registered.get(registration.key)
        if known is not None:
            if known == registration:
                return False
            raise UsageError(
                f"{registration.instance} is registered otherwise; unregister it first",
                field="instance_id",
                value="invalid_registration",
            )
        if len(self._registered) >= self._registrations_max:
            raise LimitExceeded(
                "as many streams are registered as may be; unregister some or raise registrations_max",
                field="registrations_max",
                limit=self._registrations_max,
            )
        self.index.register(registration.context, registration.holder)
        self._known_domains.clear()
        self._registered[registration.key] = registration
        self._feeds[registration.key] = StreamFeed(
            registration.source(self._names_max),
            self.index,
            can_replay=bool(registration.replay_endpoint),
            held_max=self._held_max,
        )
        return True

    def unregister(self, instance: str, tenant: str | None, rank: int | None) -> list[Registration]:
        """Forgets registrations and their blocks; None means all of the instance's. Returns what went."""
        gone = [
            known
            for key, known in self._registered.items()
            if key[0] == instance and tenant in (None, key[1]) and rank in (None, key[2])
        ]
        self._known_domains.clear()
        for known in gone:
            del self._registered[known.key]
            del self._feeds[known.key]
        left = {known.holder for known in self._registered.values()}
        for holder in {known.holder for known in gone}:
            if holder not in left:
                self.index.unregister(holder)
            else:
                for known in gone:
                    if known.holder == holder:
                        self.index.unregister(holder, known.context)
        return gone

    def ask(self, question: Question, tokens: Tokens) -> list[Answer]:
        """What each holder has of these tokens, for each way of hashing that the question covers."""
        answers = []
        for domain in self._domains(question):
            hashes = self._hasher(domain).hashes(tokens)
            answers.append(self._answer(domain, question, hashes))
        return answers

    def ask_hashes(self, question: Question, hashes: Hashes) -> list[Answer]:
        """The same for a chain of hashes that the asker made by the registrations' recipe."""
        return [self._answer(domain, question, hashes) for domain in self._domains(question)]

    def hashes(self, question: Question, tokens: Tokens) -> Any:
        """`array('Q')` of the first way of hashing that the question covers; None when it covers none."""
        for domain in self._domains(question):
            return self._hasher(domain).hashes(tokens)
        return None

    def context_of(self, question: Question) -> CacheContext | None:
        """Where the first way of hashing that the question covers keeps its blocks."""
        for domain in self._domains(question):
            return domain.context
        return None

    def _domains(self, question: Question) -> tuple[_Domain, ...]:
        where = replace(question, instance="") if question.instance else question
        domains = self._known_domains.get(where)
        if domains is None:
            if len(self._known_domains) >= _HASHERS_MAX:
                self._known_domains.clear()
            domains = self._known_domains[where] = tuple(self._find_domains(where))
        return domains

    def _find_domains(self, question: Question) -> Iterable[_Domain]:
        found: dict[CacheContext, _Domain] = {}
        for known in self._registered.values():
            if (known.model, known.tenant) != (question.model, question.tenant):
                continue
            if question.block_tokens not in (0, known.block_tokens):
                continue
            # A record may name a LoRA that the registration does not, so the question's counts.
            context = index_context(known, known.recipe, question.salt)._replace(lora=question.lora)
            hashed = CacheContext(known.model, known.block_tokens, known.tenant, question.lora, question.salt)
            found.setdefault(context, _Domain(known.recipe, context, hashed))
        return found.values()

    def _hasher(self, domain: _Domain) -> BlockHasher:
        key = (domain.recipe, domain.hash_context)
        hasher = self._hashers.get(key)
        if hasher is None:
            if len(self._hashers) >= _HASHERS_MAX:
                self._hashers.pop(next(iter(self._hashers)))
            hasher = self._hashers[key] = BlockHasher(domain.recipe, domain.hash_context)
        return hasher

    def _answer(self, domain: _Domain, question: Question, hashes: Hashes) -> Answer:
        match = self.index.query(domain.context, hashes)
        depths = match.by_holder()
        nothing = Depths(0, 0, 0)
        for holder in self.index.members(domain.context):
            depths.setdefault(holder, nothing)
        if question.instance:
            depths = {h: found for h, found in depths.items() if h.instance == question.instance}
        return Answer(domain.context.block_tokens, len(hashes), depths)
