"""What the service does with a request's fields: no HTTP, no socket, no clock of its own.

One object holds the catalogue (who is registered, what they hold), a fleet for each model, and the requests
under way. Handlers take a body and a time and return a plain answer; the shell turns errors into replies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

from moonpool.conductor import service_bodies as bodies
from moonpool.conductor.admission import make_admission
from moonpool.conductor.catalogue import Catalogue, Question
from moonpool.conductor.cost import DecodeCost, PrefillCost
from moonpool.conductor.fleet import Fleet, Member
from moonpool.conductor.index import PrefixIndex
from moonpool.conductor.instance import InstanceSpec, Role
from moonpool.conductor.registration import Registration, plain, read_registration
from moonpool.conductor.request import NOBODY, TOKENS_MAX, Decision, Prompt
from moonpool.conductor.service_config import ConductorConfig
from moonpool.errors import LimitExceeded, UsageError
from moonpool.events import DEFAULT_TENANT, Holder
from moonpool.units import MS_PER_S

_QUESTION_FIELDS: Final = frozenset({"token_ids"})
_HASH_FIELDS: Final = frozenset({"seq_hashes", "block_hash"})
_SCHEDULE_FIELDS: Final = frozenset(
    {"request_id", "token_ids", "seq_hashes", "tokens", "max_tokens", "priority", "explain"}
)
_ROLES: Final[Mapping[str, Role]] = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.BOTH}
#: A first guess for an instance that says nothing of its speed; prefill is learned where it can be.
_PREFILL: Final = {"quadratic_s": 1e-10, "linear_s": 5e-5}
_DECODE: Final = {"step_s": 0.01, "request_s": 1e-4, "context_token_s": 1e-8}
_INSTANCE_FIELDS: Final = frozenset(
    {"instance_id", "dp_rank", "model", "url", "role", "prefill", "decode", "block_size"}
    | {"kv_tokens_max", "batch_max", "chunk_tokens", "link_bytes_per_s"}
)


@dataclass(slots=True)
class _Running:
    """A request between `schedule` and its end."""

    model: str
    since: float
    instance: str
    believed_tokens: int


@final
class ConductorCore:
    """Registrations, queries, decisions and reports. One thread; times are seconds that do not go back."""

    def __init__(self, config: ConductorConfig) -> None:
        self.config: Final = config
        self.index: Final = PrefixIndex(config.index)
        self.catalogue: Final = Catalogue(
            self.index,
            registrations_max=config.registrations_max,
            names_max=config.names_max,
            held_max=config.held_messages_max,
        )
        self._fleets: dict[str, Fleet] = {}
        self._instances: dict[tuple[str, str], dict[str, Any]] = {}
        self._running: OrderedDict[str, _Running] = OrderedDict()
        self.verdicts: dict[str, int] = {}
        self.expired = 0
        make_admission(config.admission)  # a wrong name is an error now

    @property
    def requests_running(self) -> int:
        """Requests between `schedule` and their end."""
        return len(self._running)

    # ---- registrations --------------------------------------------------------------------------------

    def register(self, body: Mapping[Any, Any]) -> tuple[Registration, bool]:
        """Takes a stream in; the registration, and whether it is new."""
        registration = read_registration(body, self.config.hash_seed)
        return registration, self.catalogue.register(registration)

    def unregister(self, body: Mapping[Any, Any]) -> list[Registration]:
        """Forgets the streams of an instance; empty when there were none."""
        instance = bodies.text(body, "instance_id", required=True)
        tenant = bodies.text(body, "tenant_id") or None
        rank = bodies.number(body, "dp_rank", 0, 65_535) if body.get("dp_rank") is not None else None
        return self.catalogue.unregister(instance, tenant, rank)

    def services(self) -> list[dict[str, Any]]:
        """All registrations, as bodies, with how their streams do."""
        found = []
        for registration in self.catalogue:
            feed = self.catalogue.feed(registration.key)
            assert feed is not None
            stream = {"suspect": feed.is_suspect, "expected": feed.expected, "drift": feed.drift}
            found.append({**plain(registration), "stream": stream})
        return found

    # ---- queries --------------------------------------------------------------------------------

    def query(self, body: Mapping[Any, Any], peers_shape: bool) -> dict[str, Any]:
        """Who has the start of these tokens. `peers_shape`: by instance, as the C++ generation answers."""
        question = bodies.read_question(body, _QUESTION_FIELDS)
        answers = self.catalogue.ask(question, bodies.read_tokens(body))
        return bodies.by_instance(answers) if peers_shape else bodies.by_tenant(question.tenant, answers)

    def query_by_hash(self, body: Mapping[Any, Any], peers_shape: bool) -> dict[str, Any]:
        """The same for a chain of hashes."""
        question = bodies.read_question(body, _HASH_FIELDS)
        answers = self.catalogue.ask_hashes(question, bodies.read_hashes(body))
        return bodies.by_instance(answers) if peers_shape else bodies.by_tenant(question.tenant, answers)

    # ---- instances --------------------------------------------------------------------------------

    def put_instance(self, body: Mapping[Any, Any], now: float) -> bool:
        """Adds or changes an instance to schedule on; False when nothing changed."""
        for name in body:
            if name not in _INSTANCE_FIELDS:
                raise UsageError(f"an instance has no field {name!r}", field=str(name), value="unknown_field")
        model = bodies.text(body, "model", required=True)
        member = _member(body)
        fleet = self._fleets.get(model)
        if fleet is None:
            fleet = self._new_fleet(model, bodies.number(body, "block_size", 0, 8_192))
        changed = fleet.put(member, now)
        self._instances[model, member.spec.name] = dict(body)
        return changed

    def drop_instance(self, model: str, name: str, now: float) -> bool:
        """Removes an instance and the requests on it; False for an unknown one."""
        self._instances.pop((model, name), None)
        fleet = self._fleets.get(model)
        if fleet is None or not fleet.drop(name, now):
            return False
        if not len(fleet):
            del self._fleets[model]
        return True

    def instances(self) -> list[dict[str, Any]]:
        """All instances, as bodies, with what is booked on each."""
        found = []
        for model, fleet in self._fleets.items():
            load = fleet.scheduler.load if fleet.scheduler is not None else None
            for position, member in enumerate(fleet.members):
                booked = {}
                if load is not None and position < len(load.instances):
                    booked = {
                        "batch": float(load.batch[position]),
                        "waiting": float(load.waiting[position]),
                        "queued_s": float(load.queued_s[position]),
                    }
                found.append({**self._instances[model, member.spec.name], "booked": booked})
        return found

    def saved_instances(self) -> list[dict[str, Any]]:
        """The bodies that bring all instances back."""
        return list(self._instances.values())

    # ---- decisions --------------------------------------------------------------------------------

    def schedule(self, body: Mapping[Any, Any], now: float) -> dict[str, Any]:
        """Places a request and books it; `request_id` is what its reports will name."""
        question = bodies.read_question(body, _SCHEDULE_FIELDS)
        request_id = bodies.text(body, "request_id", required=True)
        self._forget_old(now)
        fleet = self._fleets.get(question.model)
        if fleet is None:
            raise UsageError(f"no instance serves the model {question.model!r}", field="model")
        tokens, hashes = self._prompt(body, question)
        prompt = Prompt(
            request_id,
            tokens,
            hashes,
            bodies.number(body, "max_tokens", 0, TOKENS_MAX),
            bodies.number(body, "priority", -100, 100),
        )
        decision = fleet.schedule(prompt, self.catalogue.context_of(question), now)
        self.verdicts[decision.verdict] = self.verdicts.get(decision.verdict, 0) + 1
        if decision.accepted:
            member = fleet.members[decision.prefill]
            blocks = max(decision.cached_blocks, decision.fetch_blocks)
            believed = min(blocks * self._block_tokens(fleet), tokens)
            self._running[request_id] = _Running(question.model, now, member.holder.instance, believed)
        return _answer(decision, fleet, self._block_tokens(fleet), bool(body.get("explain")))

    def complete(self, body: Mapping[Any, Any], now: float) -> bool:
        """A report on a request: its first token, its end, or that it will never come. False if unknown."""
        known = {"request_id", "event", "cached_tokens"}
        for name in body:
            if name not in known:
                raise UsageError(f"this path takes no field {name!r}", field=str(name), value="unknown_field")
        request_id = bodies.text(body, "request_id", required=True)
        event = bodies.text(body, "event") or "finished"
        if event not in ("first_token", "finished", "cancelled", "refused"):
            raise UsageError("event is first_token, finished, cancelled or refused", field="event")
        running = self._running.get(request_id)
        fleet = self._fleets.get(running.model) if running is not None else None
        if running is None or fleet is None:
            return False
        cached = None
        if body.get("cached_tokens") is not None:
            cached = bodies.number(body, "cached_tokens", 0, TOKENS_MAX)
            for feed in self.catalogue.feeds_of(running.instance):
                feed.note_feedback(running.believed_tokens, cached)
        if event == "first_token":
            fleet.first_token(request_id, now, cached)
            return True
        del self._running[request_id]
        if event == "finished":
            fleet.finished(request_id, now)
        else:
            fleet.cancelled(request_id, now)
        return True

    def _prompt(self, body: Mapping[Any, Any], question: Question) -> tuple[int, Any]:
        if body.get("token_ids") is not None:
            tokens = bodies.read_tokens(body)
            hashes = self.catalogue.hashes(question, tokens)
            return bodies.token_count(tokens), () if hashes is None else hashes
        tokens = bodies.number(body, "tokens", 1, TOKENS_MAX)
        if not tokens:
            raise UsageError("a request needs token_ids, or tokens (how many) and seq_hashes", field="tokens")
        return tokens, bodies.read_hashes(body) if body.get("seq_hashes") is not None else ()

    def _new_fleet(self, model: str, block_tokens: int) -> Fleet:
        if len(self._fleets) >= self.config.models_max:
            raise LimitExceeded(
                "as many models are served as may be; remove one or raise models_max",
                field="models_max",
                limit=self.config.models_max,
            )
        known = next((each.block_tokens for each in self.catalogue if each.model == model), 0)
        size = block_tokens or known or self.config.scheduler.block_tokens
        fleet = self._fleets[model] = Fleet(
            self.index,
            config=replace(self.config.scheduler, block_tokens=size),
            policy=self.config.policy,
            admission=lambda: make_admission(self.config.admission),
            members_max=self.config.instances_max,
        )
        return fleet

    @staticmethod
    def _block_tokens(fleet: Fleet) -> int:
        return fleet.scheduler.config.block_tokens if fleet.scheduler is not None else 0

    def _forget_old(self, now: float) -> None:
        oldest = now - self.config.request_timeout_ms / MS_PER_S
        while self._running:
            request_id, running = next(iter(self._running.items()))
            if running.since > oldest:
                return
            del self._running[request_id]
            self.expired += 1
            fleet = self._fleets.get(running.model)
            if fleet is not None:
                fleet.cancelled(request_id, now)


def _member(body: Mapping[Any, Any]) -> Member:
    instance = bodies.text(body, "instance_id", required=True)
    rank = bodies.number(body, "dp_rank", 0, 65_535)
    role = bodies.text(body, "role") or "both"
    if role not in _ROLES:
        raise UsageError("role is prefill, decode or both", field="role", value=role)
    spec = InstanceSpec(
        name=instance if not rank else f"{instance}#{rank}",
        role=_ROLES[role],
        prefill=PrefillCost(**_costs(body, "prefill", _PREFILL)),
        decode=DecodeCost(**_costs(body, "decode", _DECODE)),
        kv_tokens_max=bodies.number(body, "kv_tokens_max", 1, 1 << 40, 1_000_000),
        batch_max=bodies.number(body, "batch_max", 1, 1 << 20, 256),
        chunk_tokens=bodies.number(body, "chunk_tokens", 0, TOKENS_MAX, 2_048),
        link_bytes_per_s=float(bodies.number(body, "link_bytes_per_s", 1, 1 << 50, 10**10)),
    )
    return Member(Holder(instance, rank), spec, bodies.text(body, "url"))


def _costs(body: Mapping[Any, Any], name: str, defaults: Mapping[str, float]) -> dict[str, float]:
    given = body.get(name) or {}
    if not isinstance(given, Mapping) or not set(given) <= set(defaults):
        raise UsageError(f"{name} is a map of {', '.join(defaults)}", field=name)
    for value in given.values():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UsageError(f"{name} has numbers", field=name)
    return {**defaults, **given}


def _answer(decision: Decision, fleet: Fleet, block_tokens: int, explain: bool) -> dict[str, Any]:
    def place(position: int) -> dict[str, Any] | None:
        if position == NOBODY or not decision.accepted:
            return None
        member = fleet.members[position]
        return {
            "instance_id": member.holder.instance,
            "dp_rank": member.holder.rank,
            "url": member.url,
        }

    answer: dict[str, Any] = {
        "request_id": decision.id,
        "accepted": decision.accepted,
        "verdict": str(decision.verdict),
        "prefill": place(decision.prefill),
        "decode": place(decision.decode),
        "source": place(decision.source),
        "fetch_tokens": decision.fetch_blocks * block_tokens,
        "cached_tokens": decision.cached_blocks * block_tokens,
        "ttft_s": decision.ttft_s,
        "tbt_s": decision.tbt_s,
        "copies": [
            {
                "source": place(copy.source),
                "target": place(copy.target),
                "seq_hashes": [int(each) for each in copy.hashes],
                "expected_saving_s": copy.expected_saving_s,
            }
            for copy in decision.copies
        ],
    }
    if explain:
        answer["explanation"] = decision.explain()
    return answer


def global_view(core: ConductorCore) -> dict[str, Any]:
    """Contexts with their members and how many blocks those hold; for people."""
    contexts = []
    for context in core.index.contexts():
        members = core.index.members(context)
        contexts.append(
            {
                "model": context.model,
                "tenant_id": context.tenant or DEFAULT_TENANT,
                "lora_name": context.lora,
                "block_size": context.block_tokens,
                "instances": sorted(
                    ({"instance_id": h.instance, "dp_rank": h.rank} for h in members),
                    key=lambda each: (each["instance_id"], each["dp_rank"]),
                ),
            }
        )
    return {"contexts": contexts, "blocks": len(core.index)}
