"""The hot methods' requests and replies (docs/store/architecture.md, "RPC"), encoded and decoded in C.

Both clients use it: no Python object a key is made where none is asked for. The bytes are those of the reference codec
(`moonpool.wire.rpc`); what a server sends is checked against the counts that were asked for.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.sequence cimport PySequence_Fast
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset
from moonpool.native.io.rpc_msgpack cimport (
    mp_pack_array,
    mp_pack_bin,
    mp_pack_nil,
    mp_pack_read_array,
    mp_pack_read_bytes,
    mp_pack_read_nil,
    mp_pack_read_uint,
    mp_pack_reader,
    mp_pack_str,
    mp_pack_uint,
    mp_rpc_length,
)

from moonpool.errors import ProtocolError, UsageError

cdef extern from "Python.h":
    Py_ssize_t PySequence_Fast_GET_SIZE(object)
    void* PySequence_Fast_GET_ITEM(object, Py_ssize_t)

cdef enum:
    HEAD_BYTES = 32          # length word, array, type, id, method's head
    KEY_BYTES_MAX = 1024
    DIGEST_BYTES = 16
    GRANT_BYTES = 24
    KEYS_MAX = 1 << 20


# ---- requests --------------------------------------------------------------------------------------------------------

cdef int reserve(frame_buffer* f, size_t more) except -1:
    cdef size_t wanted = f.length + more, capacity
    cdef uint8_t* grown
    if wanted <= f.capacity:
        return 0
    capacity = f.capacity * 2 if f.capacity else 512
    if capacity < wanted:
        capacity = wanted
    grown = <uint8_t*>realloc(f.data, capacity)
    if grown == NULL:
        raise MemoryError
    f.data = grown
    f.capacity = capacity
    return 0


cdef int begin(frame_buffer* f, uint64_t message_id, const char* method, size_t n) except -1:
    """[0, id, method, behind room for the length word."""
    cdef uint8_t* p
    reserve(f, HEAD_BYTES + n)
    p = f.data + 4
    p[0] = 0x94
    p[1] = 0
    p = mp_pack_str(mp_pack_uint(p + 2, message_id), n)
    memcpy(p, method, n)
    f.length = p + n - f.data
    return 0


cdef int put_head(frame_buffer* f, uint32_t n) except -1:
    reserve(f, 5)
    f.length = mp_pack_array(f.data + f.length, n) - f.data
    return 0


cdef int put_uint(frame_buffer* f, uint64_t value) except -1:
    reserve(f, 9)
    f.length = mp_pack_uint(f.data + f.length, value) - f.data
    return 0


cdef int put_bin(frame_buffer* f, const void* data, size_t n) except -1:
    cdef uint8_t* p
    reserve(f, n + 5)
    p = mp_pack_bin(f.data + f.length, n)
    memcpy(p, data, n)
    f.length = p + n - f.data
    return 0


cdef uint64_t as_number(value) except? 0xdeadbeefdeadbeef:
    """A u64; UsageError for what is none."""
    try:
        return value
    except (TypeError, OverflowError):
        raise UsageError(f"{value!r} is not a whole number from 0 to 2^64 - 1") from None


cdef void finish(frame_buffer* f) noexcept:
    mp_rpc_length(f.data, f.length - 4)


cdef int put_keys(frame_buffer* f, keys) except -1:
    """A list of keys, text as text and bytes as binary."""
    cdef Py_ssize_t k, n = PySequence_Fast_GET_SIZE(keys), size = 0
    cdef const char* data
    cdef uint8_t* p
    put_head(f, n)
    for k in range(n):
        key = <object>PySequence_Fast_GET_ITEM(keys, k)
        if isinstance(key, bytes):
            data = PyBytes_AS_STRING(key)
            size = PyBytes_GET_SIZE(key)
        elif isinstance(key, str):
            try:
                data = PyUnicode_AsUTF8AndSize(key, &size)
            except UnicodeEncodeError:
                raise UsageError("a key is no text that UTF-8 can carry", index=k, field="key") from None
        else:
            raise UsageError(f"a key is str or bytes, not {type(key).__name__}", index=k)
        if size < 1 or size > KEY_BYTES_MAX:
            raise UsageError(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {size}", index=k, field="key")
        reserve(f, size + 5)
        p = f.data + f.length
        p = mp_pack_bin(p, size) if isinstance(key, bytes) else mp_pack_str(p, size)
        memcpy(p, data, size)
        f.length = p + size - f.data
    return 0


cdef object listed(keys):
    """A list or tuple of at most KEYS_MAX items."""
    if isinstance(keys, (str, bytes)):
        raise UsageError("give a list of keys, not one key")
    cdef object fast = PySequence_Fast(keys, "keys, sizes and indexes are sequences")
    if PySequence_Fast_GET_SIZE(fast) > KEYS_MAX:
        raise UsageError(f"one call takes at most {KEYS_MAX} keys", limit=KEYS_MAX)
    return fast


cdef int write_call(frame_buffer* f, uint64_t message_id, str method, bytes params) except -1:
    """Any method, with the MessagePack of its params."""
    cdef bytes name = method.encode()
    if not 1 <= PyBytes_GET_SIZE(name) <= 64:
        raise UsageError(f"a method's name has 1 to 64 bytes, not {len(name)}")
    begin(f, message_id, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
    reserve(f, PyBytes_GET_SIZE(params))
    memcpy(f.data + f.length, PyBytes_AS_STRING(params), PyBytes_GET_SIZE(params))
    f.length += PyBytes_GET_SIZE(params)
    finish(f)
    return 0


cdef int write_exists(frame_buffer* f, uint64_t message_id, keys, uint64_t lease_ms) except -1:
    begin(f, message_id, b"exists", 6)
    put_head(f, 2)
    put_keys(f, keys)
    put_uint(f, lease_ms)
    finish(f)
    return 0


cdef int write_lookup(frame_buffer* f, uint64_t message_id, keys, uint64_t lease_ms) except -1:
    begin(f, message_id, b"lookup", 6)
    put_head(f, 2)
    put_keys(f, keys)
    put_uint(f, lease_ms)
    finish(f)
    return 0


cdef int write_put_start(frame_buffer* f, uint64_t message_id, keys, sizes, bytes policy, uint64_t wait_ms) except -1:
    """`policy` is the MessagePack of a map; None is nil."""
    cdef Py_ssize_t k, n = PySequence_Fast_GET_SIZE(keys)
    if PySequence_Fast_GET_SIZE(sizes) != n:
        raise UsageError(f"{n} keys came with {len(sizes)} sizes")
    begin(f, message_id, b"put_start", 9)
    put_head(f, 4)
    put_keys(f, keys)
    put_head(f, n)
    for k in range(n):
        put_uint(f, as_number(<object>PySequence_Fast_GET_ITEM(sizes, k)))
    if policy is None:
        reserve(f, 1)
        f.length = mp_pack_nil(f.data + f.length) - f.data
    else:
        reserve(f, PyBytes_GET_SIZE(policy))
        memcpy(f.data + f.length, PyBytes_AS_STRING(policy), PyBytes_GET_SIZE(policy))
        f.length += PyBytes_GET_SIZE(policy)
    put_uint(f, wait_ms)
    finish(f)
    return 0


cdef int write_put_end(frame_buffer* f, uint64_t message_id, uint64_t put_id, indexes, digests, chunks) except -1:
    """`digests` holds 16 bytes for each index; `chunks` one bytes-like for each, or None: none has any."""
    cdef Py_ssize_t k, n = PySequence_Fast_GET_SIZE(indexes)
    cdef Py_buffer roots, list_of
    if chunks is not None and PySequence_Fast_GET_SIZE(chunks) != n:
        raise UsageError(f"{n} indexes came with {len(chunks)} chunk lists")
    PyObject_GetBuffer(digests, &roots, PyBUF_SIMPLE)
    try:
        if roots.len != n * DIGEST_BYTES:
            raise UsageError(f"{n} indexes came with {roots.len} bytes of digests, not 16 for each")
        begin(f, message_id, b"put_end", 7)
        put_head(f, 2)
        put_uint(f, put_id)
        put_head(f, n)
        for k in range(n):
            put_head(f, 3)
            put_uint(f, as_number(<object>PySequence_Fast_GET_ITEM(indexes, k)))
            put_bin(f, <char*>roots.buf + k * DIGEST_BYTES, DIGEST_BYTES)
            if chunks is None:
                put_bin(f, b"", 0)
                continue
            PyObject_GetBuffer(<object>PySequence_Fast_GET_ITEM(chunks, k), &list_of, PyBUF_SIMPLE)
            try:
                put_bin(f, list_of.buf, list_of.len)
            finally:
                PyBuffer_Release(&list_of)
    finally:
        PyBuffer_Release(&roots)
    finish(f)
    return 0


# ---- replies ---------------------------------------------------------------------------------------------------------

cdef object wrong(str what):
    return ProtocolError(f"the server's reply to {what} is not one; run compatible releases on both ends")


cdef bytes read_exists(const uint8_t* data, size_t n, uint32_t expected):
    """One byte for each key, 0 or 1."""
    cdef mp_pack_reader r
    cdef const uint8_t* found
    cdef uint32_t size
    r.at = data
    r.end = data + n
    if mp_pack_read_bytes(&r, &found, &size) or size != expected:
        raise wrong("exists")
    return (<const char*>found)[:size]


cdef reply_entry ENTRY       # where the fields of these lie is all that is asked of them
cdef place_entry PLACE


cdef object gathered(const char* first, uint32_t n, size_t stride, size_t size, str form):
    """A field of `size` bytes out of each of n structures: a memoryview of that form, or bytes where it is ""."""
    cdef bytes made = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>(n * size))
    cdef char* out = PyBytes_AS_STRING(made)
    cdef uint32_t k
    for k in range(n):
        memcpy(out + k * size, first + k * stride, size)
    return memoryview(made).cast(form) if form else made


cdef class PlacesReply:
    """What the replies of `lookup`, `put_start` and `put_end` share: entries in the order of the keys, and places.

    Columns are made when asked for: memoryviews of their own bytes, which NumPy takes without a copy. Place columns
    hold the places of all entries one after another, `place_counts[i]` of them for entry i.
    """

    def __dealloc__(self):
        free(self.entries)
        free(self.places)

    def __len__(self) -> int:
        return self.n_entries

    cdef int allocate(self, uint32_t n) except -1:
        self.entries = <reply_entry*>calloc(n if n else 1, sizeof(reply_entry))
        if self.entries == NULL:
            raise MemoryError
        self.n_entries = n
        return 0

    cdef int read_places(self, void* reader, reply_entry* entry, bint granted) except -1:
        """-1 (raised) or 0; counts what it took into the entry."""
        cdef mp_pack_reader* r = <mp_pack_reader*>reader
        cdef uint32_t count, fields, size
        cdef uint64_t segment, offset, slot
        cdef const uint8_t* grant
        cdef place_entry* place
        if mp_pack_read_array(r, &count) or count > <size_t>(r.end - r.at):
            raise wrong("a call for places")
        entry.first_place = self.n_places
        entry.n_places = count
        if self.n_places + count > self.room:
            self.room = max(self.n_places + count, 2 * self.room, self.n_entries)
            place = <place_entry*>realloc(self.places, self.room * sizeof(place_entry))
            if place == NULL:
                raise MemoryError
            self.places = place
        for _ in range(count):
            place = &self.places[self.n_places]
            memset(place, 0, sizeof(place_entry))
            if (mp_pack_read_array(r, &fields) or fields != <uint32_t>(4 if granted else 3)
                    or mp_pack_read_uint(r, &segment) or mp_pack_read_uint(r, &offset) or mp_pack_read_uint(r, &slot)
                    or segment > 0xffffffff or slot > 0xffffffff):
                raise wrong("a call for places")
            place.segment = segment
            place.offset = offset
            place.slot = slot
            if granted:
                if mp_pack_read_bytes(r, &grant, &size) or (size != GRANT_BYTES and size != 0):
                    raise wrong("put_start")
                memcpy(place.grant, grant, size)
            self.n_places += 1
        return 0

    cdef reply_entry* entry_at(self, Py_ssize_t index) except NULL:
        if not 0 <= index < self.n_entries:
            raise IndexError(index)
        return &self.entries[index]

    cdef tuple places_of(self, reply_entry* entry, bint granted):
        cdef uint32_t k
        cdef place_entry* place
        cdef list found = []
        for k in range(entry.first_place, entry.first_place + entry.n_places):
            place = &self.places[k]
            if granted:
                found.append((place.segment, place.offset, place.slot, (<char*>place.grant)[:GRANT_BYTES]))
            else:
                found.append((place.segment, place.offset, place.slot))
        return tuple(found)

    cdef object entry_column(self, const void* field, size_t size, str form):
        """A field of all entries; `field` is that of ENTRY."""
        cdef size_t at = <size_t>(<const char*>field - <const char*>&ENTRY)
        if self.n_entries == 0:
            return memoryview(b"").cast(form) if form else b""
        return gathered(<const char*>self.entries + at, self.n_entries, sizeof(reply_entry), size, form)

    cdef object place_column(self, const void* field, size_t size, str form):
        """A field of all places; `field` is that of PLACE."""
        cdef size_t at = <size_t>(<const char*>field - <const char*>&PLACE)
        if self.n_places == 0:
            return memoryview(b"").cast(form) if form else b""
        return gathered(<const char*>self.places + at, self.n_places, sizeof(place_entry), size, form)

    @property
    def place_counts(self) -> memoryview:
        """uint32: places of each entry."""
        return self.entry_column(&ENTRY.n_places, 4, "I")

    @property
    def place_segments(self) -> memoryview:
        """uint32: segment ids."""
        return self.place_column(&PLACE.segment, 4, "I")

    @property
    def place_slots(self) -> memoryview:
        """uint32: slots of the segments' directories."""
        return self.place_column(&PLACE.slot, 4, "I")

    @property
    def place_offsets(self) -> memoryview:
        """uint64: where the extents start in their segments."""
        return self.place_column(&PLACE.offset, 8, "Q")


cdef class LookupReply(PlacesReply):
    """Where objects are. A missing key has object id 0, no places, and zeros elsewhere."""

    cdef int read(self, const uint8_t* data, size_t n, uint32_t expected) except -1:
        cdef mp_pack_reader r
        cdef uint32_t count, k, size
        cdef uint64_t kind
        cdef const uint8_t* digest
        cdef reply_entry* entry
        r.at = data
        r.end = data + n
        if (mp_pack_read_array(&r, &count) or count != 3 or mp_pack_read_uint(&r, &self.epoch)
                or mp_pack_read_uint(&r, &self.segments_version) or mp_pack_read_array(&r, &count)
                or count != expected):
            raise wrong("lookup")
        self.allocate(count)
        for k in range(expected):
            if mp_pack_read_nil(&r) == 0:
                continue
            entry = &self.entries[k]
            if (mp_pack_read_array(&r, &count) or count != 5 or mp_pack_read_uint(&r, &entry.object_id)
                    or mp_pack_read_uint(&r, &entry.size) or mp_pack_read_bytes(&r, &digest, &size)
                    or size != DIGEST_BYTES or mp_pack_read_uint(&r, &kind) or kind > 255 or entry.object_id == 0):
                raise wrong("lookup")
            memcpy(entry.digest, digest, DIGEST_BYTES)
            entry.type = kind
            self.read_places(&r, entry, False)
        return 0

    def entry(self, index: int) -> tuple | None:
        """(object id, size, digest, type, ((segment, offset, slot), ...)), or None for a miss."""
        cdef reply_entry* entry = self.entry_at(index)
        if entry.object_id == 0:
            return None
        return (entry.object_id, entry.size, (<char*>entry.digest)[:DIGEST_BYTES], entry.type,
                self.places_of(entry, False))

    @property
    def object_ids(self) -> memoryview:
        """uint64: object ids, 0 for a miss."""
        return self.entry_column(&ENTRY.object_id, 8, "Q")

    @property
    def sizes(self) -> memoryview:
        """uint64: payload bytes."""
        return self.entry_column(&ENTRY.size, 8, "Q")

    @property
    def digests(self) -> bytes:
        """16 bytes for each key."""
        return self.entry_column(&ENTRY.digest, DIGEST_BYTES, "")

    @property
    def types(self) -> bytes:
        """One byte for each key."""
        return self.entry_column(&ENTRY.type, 1, "")


cdef class PutReply(PlacesReply):
    """Extents to write to, with their grants."""

    cdef int read(self, const uint8_t* data, size_t n, uint32_t expected) except -1:
        cdef mp_pack_reader r
        cdef uint32_t count, k
        cdef uint64_t code
        r.at = data
        r.end = data + n
        if (mp_pack_read_array(&r, &count) or count != 5 or mp_pack_read_uint(&r, &self.epoch)
                or mp_pack_read_uint(&r, &self.segments_version) or mp_pack_read_uint(&r, &self.put_id)
                or mp_pack_read_uint(&r, &self.remaining_ms) or mp_pack_read_array(&r, &count) or count != expected):
            raise wrong("put_start")
        self.allocate(count)
        for k in range(expected):
            if mp_pack_read_array(&r, &count) or count != 2 or mp_pack_read_uint(&r, &code) or code > 255:
                raise wrong("put_start")
            self.entries[k].code = code
            self.read_places(&r, &self.entries[k], True)
        return 0

    def entry(self, index: int) -> tuple:
        """(code, ((segment, offset, slot, grant), ...)); a place without a grant has zeros."""
        cdef reply_entry* entry = self.entry_at(index)
        return entry.code, self.places_of(entry, True)

    @property
    def codes(self) -> bytes:
        """One byte for each key."""
        return self.entry_column(&ENTRY.code, 1, "")

    @property
    def grants(self) -> bytes:
        """24 bytes for each place."""
        return self.place_column(&PLACE.grant, GRANT_BYTES, "")


cdef class EndReply(PlacesReply):
    """How each entry of a put ended."""

    cdef int read(self, const uint8_t* data, size_t n, uint32_t expected) except -1:
        cdef mp_pack_reader r
        cdef uint32_t count, k
        cdef uint64_t code
        r.at = data
        r.end = data + n
        if (mp_pack_read_array(&r, &count) or count != 2 or mp_pack_read_uint(&r, &self.epoch)
                or mp_pack_read_array(&r, &count) or count != expected):
            raise wrong("put_end")
        self.allocate(count)
        for k in range(expected):
            if (mp_pack_read_array(&r, &count) or count != 2 or mp_pack_read_uint(&r, &code) or code > 255
                    or (mp_pack_read_nil(&r) and mp_pack_read_uint(&r, &self.entries[k].object_id))):
                raise wrong("put_end")
            self.entries[k].code = code
        return 0

    def entry(self, index: int) -> tuple:
        """(code, object id)."""
        cdef reply_entry* entry = self.entry_at(index)
        return entry.code, entry.object_id

    @property
    def codes(self) -> bytes:
        """One byte for each entry."""
        return self.entry_column(&ENTRY.code, 1, "")

    @property
    def object_ids(self) -> memoryview:
        """uint64: object ids."""
        return self.entry_column(&ENTRY.object_id, 8, "Q")
