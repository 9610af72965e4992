"""What happens to cached blocks: the values that the store, serving engines and the conductor exchange.

An event says that a holder (one rank of one instance) has, or no longer has, blocks of one context in a tier.
A context is everything that must be equal for equal chain hashes to mean equal prefixes. Codecs of engines'
wire formats turn bytes into these values; the prefix index takes them in (docs/events.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NewType, TypeAlias, final

from moonpool.errors import UsageError
from moonpool.units import U64_MAX

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

#: A block and all before it, as 64 bits: equal hashes in one context are equal prefixes.
BlockHash = NewType("BlockHash", int)
#: Hashes of blocks in chain order: integers from -2**63 to 2**64 - 1, or a buffer of 64-bit integers.
Hashes: TypeAlias = "Sequence[int] | array[int] | NDArray[Any]"

DEFAULT_TENANT: Final = "default"
BLOCK_TOKENS_MAX: Final = 8_192
RANK_MAX: Final = 65_535


class Tier(IntEnum):
    """Where a copy lies: G1 device memory, G2 host memory, G3 disk. Lower is faster."""

    DEVICE = 0
    HOST = 1
    DISK = 2

    @property
    def label(self) -> str:
        return f"G{self.value + 1}"


#: Names of storage media in the events of vLLM, SGLang, TensorRT-LLM, LMCache and Mooncake, upper case.
MEDIA: Final[Mapping[str, Tier]] = MappingProxyType(
    {
        "GPU": Tier.DEVICE,
        "DEVICE": Tier.DEVICE,
        "HBM": Tier.DEVICE,
        "CPU": Tier.HOST,
        "CPU_TIER1": Tier.HOST,
        "CPU_TIER2": Tier.HOST,
        "CPU_PINNED": Tier.HOST,
        "DRAM": Tier.HOST,
        "HOST": Tier.HOST,
        "DISK": Tier.DISK,
        "SSD": Tier.DISK,
        "EXTERNAL": Tier.DISK,
        "SHARED_STORAGE": Tier.DISK,
        "STORAGE": Tier.DISK,
    }
)


def tier_of_medium(medium: str | None) -> Tier:
    """The tier that an engine's medium means; none named means device memory. Raises `UsageError`."""
    if medium is None:
        return Tier.DEVICE
    tier = MEDIA.get(medium.upper())
    if tier is None:
        known = ", ".join(MEDIA)
        raise UsageError(
            f"the medium {medium!r} is not known; known are {known}", field="medium", value=medium
        )
    return tier


class CacheContext(NamedTuple):
    """Equal hashes mean equal prefixes within one of these. `salt` separates users who must not share."""

    model: str
    block_tokens: int
    tenant: str = DEFAULT_TENANT
    lora: str = ""
    salt: str = ""


class Holder(NamedTuple):
    """One data-parallel rank of an instance: what owns cached blocks."""

    instance: str
    rank: int = 0


@final
@dataclass(frozen=True, slots=True)
class BlocksStored:
    """The holder now has these blocks in this tier. Tokens, when known, are those of the blocks in order.

    `parent` is the hash before the first block: None at a prompt's start, or when the source does not say.
    """

    context: CacheContext
    holder: Holder
    hashes: Hashes
    tier: Tier = Tier.DEVICE
    parent: BlockHash | None = None
    tokens: Sequence[int] = ()


@final
@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """The holder no longer has these blocks in this tier; None: in any."""

    context: CacheContext
    holder: Holder
    hashes: Hashes
    tier: Tier | None = None


@final
@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The holder has nothing any more: in this context and tier, or with None in any."""

    holder: Holder
    context: CacheContext | None = None
    tier: Tier | None = None


@final
@dataclass(frozen=True, slots=True)
class ObjectsStored:
    """Objects of the store have a complete copy on this node in this tier."""

    tenant: str
    keys: tuple[bytes, ...]
    node: str
    tier: Tier


@final
@dataclass(frozen=True, slots=True)
class ObjectsRemoved:
    """Objects of the store have no copy on this node in this tier any more."""

    tenant: str
    keys: tuple[bytes, ...]
    node: str
    tier: Tier


BlockEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared
ObjectEvent: TypeAlias = ObjectsStored | ObjectsRemoved


@final
@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one stream in their order. Sequence numbers of a stream are consecutive; a gap means loss.

    `stamp_s` is the source's own clock, for display only.
    """

    stream: str
    sequence: int
    events: tuple[BlockEvent | ObjectEvent, ...]
    stamp_s: float = 0.0


def check_context(context: CacheContext) -> CacheContext:
    """Raises `UsageError` for a context that no block can have; returns it otherwise."""
    texts = (context.model, context.tenant, context.lora, context.salt)
    if not all(isinstance(text, str) for text in texts) or not context.model:
        raise UsageError("a context's model, tenant, LoRA and salt are texts, and the model is not empty")
    if not isinstance(context.block_tokens, int) or not 1 <= context.block_tokens <= BLOCK_TOKENS_MAX:
        raise UsageError(
            f"a block has 1 to {BLOCK_TOKENS_MAX} tokens; got {context.block_tokens!r}", field="block_tokens"
        )
    return context


def check_holder(holder: Holder) -> Holder:
    """Raises `UsageError` for a holder that cannot be; returns it otherwise."""
    if not isinstance(holder.instance, str) or not holder.instance:
        raise UsageError("an instance's name is a text that is not empty", field="instance")
    if not isinstance(holder.rank, int) or not 0 <= holder.rank <= RANK_MAX:
        raise UsageError(f"a rank is from 0 to {RANK_MAX}; got {holder.rank!r}", field="rank")
    return holder


def block_hash(raw: int | bytes) -> BlockHash:
    """A hash as engines send it, as unsigned 64 bits: an integer, or a digest (its last 8 bytes).

    Raises `UsageError` for what does not fit. Source: vLLM, `maybe_convert_block_hash`.
    """
    if isinstance(raw, int):
        if not -(2**63) <= raw <= U64_MAX:
            raise UsageError("a block hash has 64 bits; this number has more", field="hashes")
        return BlockHash(raw & U64_MAX)
    if not isinstance(raw, bytes) or len(raw) < 8:
        raise UsageError(
            "a block hash is an integer of 64 bits or a digest of 8 bytes or more", field="hashes"
        )
    return BlockHash(int.from_bytes(raw[-8:], "big"))
