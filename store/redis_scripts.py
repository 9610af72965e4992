"""The journal's keys and the scripts that change them: each change is one script, so Redis decides its order.

All keys share the hash tag {prefix}, so that they live in one slot of a Redis Cluster. docs/store/journal.md
has the format; it is version 1, and a head with another version refuses to load.
"""

from __future__ import annotations

from typing import Final, final

from moonpool.store.redis_resp import Script

FORMAT_VERSION: Final = 1
TOKEN_BYTES: Final = 32
GROUP_FIELD: Final = b"g"
#: Epochs have 23 bits (docs/store/architecture.md, identities).
EPOCH_MAX: Final = (1 << 23) - 1

# Answers of APPEND that are not the sequence.
FENCED: Final = -1
LOST: Final = -2
GAP: Final = -3
# Answers of ELECT beside 1.
HELD: Final = 0
BROKEN: Final = -1
UNKNOWN_VERSION: Final = -2
EPOCHS_OVER: Final = -3


@final
class Keys:
    """Names of the journal's keys under one prefix."""

    __slots__ = ("_tag", "head", "journal", "leader", "prefix", "run")

    def __init__(self, prefix: str) -> None:
        self.prefix: Final = prefix
        self._tag: Final = f"{{{prefix}}}:"
        #: Hash: version, journal, epoch, sequence, snapshot, released.
        self.head: Final = f"{self._tag}head".encode()
        #: String with a TTL: token, epoch and endpoints of the leader.
        self.leader: Final = f"{self._tag}leader".encode()
        #: String: the id of a server, and the name of the run that it goes on with.
        self.run: Final = f"{self._tag}run".encode()
        #: Stream of groups; an entry's id is the last sequence in its group.
        self.journal: Final = f"{self._tag}journal".encode()

    def snapshot_head(self, number: int) -> bytes:
        """Hash that describes a snapshot."""
        return f"{self._tag}snapshot:{number}:head".encode()

    def snapshot_piece(self, number: int, piece: int) -> bytes:
        """String: one piece of a snapshot."""
        return f"{self._tag}snapshot:{number}:{piece}".encode()


# KEYS head, leader, journal. ARGV token, lease ms, text about the leader, epoch to exceed, journal id for a
# new journal. Answers {1, epoch, sequence, journal}, or why not.
ELECT: Final = Script("""
local held = redis.call('GET', KEYS[2])
if held then
    if string.sub(held, 1, 32) ~= ARGV[1] then return {0, held, redis.call('PTTL', KEYS[2])} end
end
local head = redis.call('HMGET', KEYS[1], 'version', 'epoch', 'sequence', 'journal')
if not head[1] then
    if redis.call('EXISTS', KEYS[3]) == 1 then return {-1, 'the stream has no head'} end
    redis.call('HSET', KEYS[1], 'version', '1', 'journal', ARGV[5], 'epoch', '0', 'sequence', '0',
        'snapshot', '0')
    head = {'1', '0', '0', ARGV[5]}
end
if head[1] ~= '1' then return {-2, head[1]} end
local epoch = math.max(tonumber(head[2]), tonumber(ARGV[4])) + 1
if epoch > 8388607 then return {-3, head[2]} end
local text = string.format('%.0f', epoch)
redis.call('HSET', KEYS[1], 'epoch', text)
redis.call('SET', KEYS[2], ARGV[1] .. '\\n' .. text .. '\\n' .. ARGV[3], 'PX', ARGV[2])
return {1, epoch, tonumber(head[3]), head[4]}
""")

# KEYS head, leader. ARGV token, epoch, lease ms, text about the leader, journal. Answers 1, or 0: deposed.
# A lease that ended is taken up again when nobody led in between, which the epoch shows.
RENEW: Final = Script("""
local head = redis.call('HMGET', KEYS[1], 'epoch', 'journal')
if head[1] ~= ARGV[2] or head[2] ~= ARGV[5] then return 0 end
local held = redis.call('GET', KEYS[2])
if held and string.sub(held, 1, 32) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[2], ARGV[1] .. '\\n' .. ARGV[2] .. '\\n' .. ARGV[4], 'PX', ARGV[3])
return 1
""")

# KEYS head, leader. ARGV token, epoch, lease ms, text about the leader, epoch to exceed. Answers the new
# epoch, or 0.
RAISE: Final = Script("""
local held = redis.call('GET', KEYS[2])
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] or not held then return 0 end
if string.sub(held, 1, 32) ~= ARGV[1] then return 0 end
local epoch = math.max(tonumber(ARGV[2]), tonumber(ARGV[5])) + 1
if epoch > 8388607 then return -3 end
local text = string.format('%.0f', epoch)
redis.call('HSET', KEYS[1], 'epoch', text)
redis.call('SET', KEYS[2], ARGV[1] .. '\\n' .. text .. '\\n' .. ARGV[4], 'PX', ARGV[3])
return epoch
""")

# KEYS head, leader. ARGV token, epoch. Ends a lease at once; `released` tells standbys that nobody answers in
# this epoch any more.
RELEASE: Final = Script("""
local held = redis.call('GET', KEYS[2])
if not held or string.sub(held, 1, 32) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
redis.call('HSET', KEYS[1], 'released', ARGV[2])
return 1
""")

# KEYS head, leader. Answers what a standby watches.
WATCH: Final = Script("""
local head = redis.call('HMGET', KEYS[1], 'version', 'journal', 'epoch', 'sequence', 'snapshot', 'released')
local value, ttl = redis.call('GET', KEYS[2]), redis.call('PTTL', KEYS[2])
return {value, ttl, head[1], head[2], head[3], head[4], head[5], head[6]}
""")

# KEYS head, journal. ARGV journal, epoch, first and last sequence, group. Answers the last sequence when the
# group is in the journal, from now or from before (written again even then, for a WAIT that follows);
# {-1, epoch} fenced; {-2} the journal was lost or went back; {-3, sequence} does not follow.
APPEND: Final = Script("""
local head = redis.call('HMGET', KEYS[1], 'journal', 'epoch', 'sequence')
if head[1] ~= ARGV[1] then return {-2} end
if head[2] ~= ARGV[2] then
    if tonumber(head[2]) > tonumber(ARGV[2]) then return {-1, tonumber(head[2])} end
    return {-2}
end
local sequence, last = tonumber(head[3]), tonumber(ARGV[4])
if sequence + 1 == tonumber(ARGV[3]) then
    redis.call('XADD', KEYS[2], ARGV[4] .. '-0', 'g', ARGV[5])
    redis.call('HSET', KEYS[1], 'sequence', ARGV[4])
    return last
end
if sequence >= last then
    redis.call('HSET', KEYS[1], 'sequence', head[3])
    return last
end
return {-3, sequence}
""")

# KEYS head, journal, head and pieces of the new snapshot, then keys of the old one. ARGV journal, epoch,
# sequence, snapshot number, how many keys are of the new one. Answers 1; 0: not ours to say; {-3, sequence}:
# the journal is not there yet; {-4}: a piece is missing.
PUBLISH: Final = Script("""
local head = redis.call('HMGET', KEYS[1], 'journal', 'epoch', 'sequence')
if head[1] ~= ARGV[1] or head[2] ~= ARGV[2] then return 0 end
if tonumber(head[3]) < tonumber(ARGV[3]) then return {-3, tonumber(head[3])} end
local count = tonumber(ARGV[5])
for i = 3, 2 + count do
    if redis.call('EXISTS', KEYS[i]) == 0 then return {-4} end
end
for i = 3, 2 + count do redis.call('PERSIST', KEYS[i]) end
redis.call('HSET', KEYS[1], 'snapshot', ARGV[4])
for i = 3 + count, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('XTRIM', KEYS[2], 'MINID', string.format('%.0f-0', tonumber(ARGV[3]) + 1))
return 1
""")

ALL: Final = (ELECT, RENEW, RAISE, RELEASE, WATCH, APPEND, PUBLISH)
