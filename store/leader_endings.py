"""How objects end, for every reason: facts, quarantine, events, and what whoever asks must wait for."""

from __future__ import annotations

from collections.abc import Iterable

from moonpool.store.holds import Needs
from moonpool.store.leader_core import LeaderCore
from moonpool.store.records import Reason, StoredObject


def end_objects(core: LeaderCore, ended: list[StoredObject], leases: list[int], reason: Reason) -> Needs:
    """Ends objects of one tenant: their facts, their extents' quarantine, events. What a reply waits for."""
    needs = Needs(not_before_ms=core.silent_until_ms)
    if not ended:
        return needs
    tenant = ended[0].tenant
    core.commit_gone(reason, tenant, [(each.object_id, each.key) for each in ended])
    for stored, lease in zip(ended, leases, strict=True):
        for place in stored.places:
            needs.join(core.retire(stored, place, reason, lease))
    core.removed_events(tenant, [(each.key, each.places) for each in ended])
    needs.sequence = core.counters.last_fact
    join_ending(core, needs, tenant, [each.key for each in ended])
    return needs


def join_ending(core: LeaderCore, needs: Needs, tenant: int, keys: Iterable[bytes]) -> None:
    """Adds what is still to come of earlier ends of these keys."""
    if core.holds.ending:
        for key in keys:
            earlier = core.holds.ending.get((tenant, key))
            if earlier is not None:
                needs.join(earlier)
