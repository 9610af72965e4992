"""Chain hashes of token blocks, bit for bit as the serving engines compute them: XXH3 chains and digest chains.

XXH3 chain: a block alone is XXH3-64 of its tokens; the chain's first hash is the first block's, each later one is
XXH3-64 of (hash before, block alone). Digest chain: a digest (SHA-256 or XXH3-128) of parent digest, tokens and extra
keys in one of four encodings. Only whole blocks are hashed. The oracles are hashlib, pickle and the xxhash library.

`tokens` is a list or tuple of integers, a contiguous buffer of 32-bit or 64-bit integers, or bytes of little-endian
u32; those of a list behind the last whole block are not looked at. `extras` are bytes that enter the blocks' messages:
block i takes `extras[min(i, len(extras) - 1)]`.
"""

cimport cython
from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

import array

from moonpool.native.table.integer_arrays cimport (
    Keys, Tokens, close_keys, close_tokens, open_keys, open_tokens, read_tokens,
)

from moonpool.errors import OutOfMemory, UsageError

cdef extern from "block_hashes.h" nogil:
    ctypedef struct mp_seeded:
        uint64_t seed
    ctypedef void (*mp_sha256_fn)(uint32_t*, const uint8_t*, size_t) noexcept nogil
    ctypedef struct mp_recipe:
        int encoding
        int digest_bytes
        mp_sha256_fn sha256
        size_t block_tokens
        uint8_t* message
    enum:
        MP_PICKLE
        MP_PAGE
        MP_BIGRAM
        MP_SHA256_DIGEST
        MP_XXH3_DIGEST
    void mp_seeded_make(mp_seeded* made, uint64_t seed)
    uint64_t mp_xxh3_seeded(const void* data, size_t size, const mp_seeded* seeded)
    uint64_t mp_xxh3_link(uint64_t before, uint64_t alone, uint64_t seed)
    ctypedef struct XXH128_hash_t:
        uint64_t low64
    ctypedef struct XXH128_canonical_t:
        unsigned char digest[16]
    XXH128_hash_t XXH3_128bits(const void* data, size_t size)
    void XXH128_canonicalFromHash(XXH128_canonical_t* out, XXH128_hash_t value)
    uint64_t XXH3_64bits_withSeed(const void* data, size_t size, uint64_t seed)
    mp_sha256_fn mp_pick_sha256(int plain_only)
    size_t mp_message_bytes(size_t block_tokens, size_t parent_bytes, size_t extra_bytes)
    void mp_digest_block(
        const mp_recipe* recipe, const uint8_t* parent, size_t parent_bytes, const uint32_t* tokens,
        const uint8_t* extra, size_t extra_bytes, uint8_t* out,
    )
    uint64_t mp_key_of_digest(const mp_recipe* recipe, const uint8_t* digest)

# A longer pickle would be cut into several frames; no engine has larger blocks.
BLOCK_TOKENS_MAX = 8192
EXTRA_BYTES_MAX = 16384
PARENT_BYTES_MAX = 255
ENCODINGS = ("pickle", "cbor", "page", "bigram")
DIGESTS = ("sha256", "xxh3_128", "sha256_plain")

cdef enum:
    RELEASE_FROM = 4096   # tokens in a buffer from which the GIL is released: some microseconds of work

cdef array.array TEMPLATE = array.array("Q")
cdef array.array TOKENS_TEMPLATE = array.array("I")


cdef struct Links:        # one chain while it is being hashed
    bint linked           # False: every block stands alone
    bint goes_on          # `before` is the hash of all before the next block
    uint64_t before


def xxh3_64(data, uint64_t seed=0) -> int:
    """XXH3-64 of a contiguous buffer's bytes: what seeds are derived from."""
    cdef const uint8_t[::1] view = memoryview(data).cast("B")
    return XXH3_64bits_withSeed(&view[0] if view.shape[0] else NULL, view.shape[0], seed)


def xxh3_128(data) -> bytes:
    """XXH3-128 of a contiguous buffer's bytes, in canonical (big-endian) form."""
    cdef const uint8_t[::1] view = memoryview(data).cast("B")
    cdef XXH128_canonical_t out
    XXH128_canonicalFromHash(&out, XXH3_128bits(&view[0] if view.shape[0] else NULL, view.shape[0]))
    return PyBytes_FromStringAndSize(<char*>out.digest, 16)


def pack_tokens(tokens) -> array.array:
    """`array('I')`: a copy of the tokens, each proved to be from 0 to 2**32 - 1."""
    cdef Tokens source
    cdef array.array out
    open_tokens(tokens, &source)
    try:
        out = array.clone(TOKENS_TEMPLATE, source.count, False)
        if source.data == NULL:
            read_tokens(tokens, 0, source.count, <uint32_t*>out.data.as_uints)
        elif source.count:
            memcpy(out.data.as_uints, source.data, 4 * source.count)
    finally:
        close_tokens(&source)
    return out


@cython.final
cdef class Xxh3Chain:
    """The XXH3 recipe: `seed` for blocks alone, `link_seed` for the links between them.

    A block is hashed over `window_tokens` tokens from its first one (0: the block's own), which may reach into the
    next block. Immutable, so threads may share one.
    """

    cdef Py_ssize_t block_tokens, window_tokens
    cdef uint64_t link_seed
    cdef mp_seeded seeded

    def __cinit__(self, *, Py_ssize_t block_tokens, Py_ssize_t window_tokens=0, uint64_t seed=0, uint64_t link_seed=0):
        check_block(block_tokens)
        self.block_tokens = block_tokens
        self.window_tokens = window_tokens or block_tokens
        if not block_tokens <= self.window_tokens <= 2 * block_tokens:
            raise UsageError("a window holds one block at least and two at most", field="window_tokens")
        self.link_seed = link_seed
        mp_seeded_make(&self.seeded, seed)

    def chain(self, tokens, parent=None, extras=()) -> array.array:
        """`array('Q')`: one hash for each whole block and all before it. `parent` is the hash to go on from."""
        cdef Links links
        links.linked = True
        links.goes_on = parent is not None
        links.before = <uint64_t>parent if links.goes_on else 0
        return self.hash_prompt(tokens, &links, extras)

    def blocks(self, tokens, extras=()) -> array.array:
        """`array('Q')`: the hash of each whole block alone."""
        cdef Links links
        links.linked = links.goes_on = False
        return self.hash_prompt(tokens, &links, extras)

    def chain_prompts(self, tokens, offsets) -> tuple:
        """Chains of many prompts that lie one behind another in `tokens` (a buffer), prompt i from `offsets[i]` on.

        Returns (hashes, starts), both `array('Q')`: prompt i has `hashes[starts[i]:starts[i + 1]]`. Without the GIL.
        """
        cdef Tokens source
        cdef Keys bounds
        cdef array.array hashes, starts
        open_tokens(tokens, &source)
        try:
            if source.data == NULL:
                raise UsageError("the tokens of many prompts must be one buffer", field="tokens")
            open_keys(offsets, &bounds)
            try:
                starts = self.starts_of(&source, &bounds)
                hashes = array.clone(TEMPLATE, starts.data.as_ulonglongs[len(starts) - 1], False)
                self.fill_prompts(&source, &bounds, starts.data.as_ulonglongs, hashes.data.as_ulonglongs)
            finally:
                close_keys(&bounds)
        finally:
            close_tokens(&source)
        return hashes, starts

    cdef array.array starts_of(self, Tokens* source, Keys* bounds):
        """Where each prompt's hashes start; refuses offsets that do not ascend inside the tokens."""
        cdef Py_ssize_t i, blocks = 0
        cdef array.array starts = array.clone(TEMPLATE, max(bounds.count, 1), False)
        starts.data.as_ulonglongs[0] = 0
        for i in range(bounds.count - 1):
            if bounds.data[i] > bounds.data[i + 1] or bounds.data[i + 1] > <uint64_t>source.count:
                raise UsageError("offsets must ascend and end inside the tokens", field="offsets", index=i + 1)
            blocks += self.whole_blocks(bounds.data[i + 1] - bounds.data[i])
            starts.data.as_ulonglongs[i + 1] = blocks
        return starts

    cdef int fill_prompts(self, Tokens* source, Keys* bounds, const unsigned long long* starts,
                          unsigned long long* hashes) except -1:
        cdef Links links
        cdef Py_ssize_t i
        with nogil:
            for i in range(bounds.count - 1):
                links.linked = True
                links.goes_on = False
                links.before = 0
                self.hash_array(
                    source.data + bounds.data[i], &links, <uint64_t*>hashes + starts[i], starts[i + 1] - starts[i]
                )
        return 0

    cdef Py_ssize_t whole_blocks(self, Py_ssize_t tokens) noexcept nogil:
        cdef Py_ssize_t beyond = self.window_tokens - self.block_tokens
        return (tokens - beyond) // self.block_tokens if tokens > beyond else 0

    cdef array.array hash_prompt(self, object tokens, Links* links, object extras):
        cdef Tokens source
        cdef array.array out
        cdef uint64_t* hashes
        cdef Py_ssize_t blocks
        open_tokens(tokens, &source)
        try:
            blocks = self.whole_blocks(source.count)
            out = array.clone(TEMPLATE, blocks, False)
            hashes = <uint64_t*>out.data.as_ulonglongs
            if extras or source.data == NULL:
                self.hash_pieces(tokens, &source, links, hashes, blocks, extras)
            elif source.count < RELEASE_FROM:
                self.hash_array(source.data, links, hashes, blocks)
            else:
                with nogil:
                    self.hash_array(source.data, links, hashes, blocks)
        finally:
            close_tokens(&source)
        return out

    cdef inline uint64_t next_hash(self, Links* links, const void* message, size_t size) noexcept nogil:
        cdef uint64_t hash_value = mp_xxh3_seeded(message, size, &self.seeded)
        if links.linked:
            if links.goes_on:
                hash_value = mp_xxh3_link(links.before, hash_value, self.link_seed)
            links.before = hash_value
            links.goes_on = True
        return hash_value

    cdef void hash_array(
        self, const uint32_t* tokens, Links* links, uint64_t* hashes, Py_ssize_t blocks
    ) noexcept nogil:
        cdef Py_ssize_t i
        for i in range(blocks):
            hashes[i] = self.next_hash(links, tokens + i * self.block_tokens, 4 * self.window_tokens)

    cdef int hash_pieces(self, object tokens, Tokens* source, Links* links, uint64_t* hashes, Py_ssize_t blocks,
                         object extras) except -1:
        """Block by block through a message of our own: from a list, or with extras behind the tokens.

        Reading a list's next block overlaps with hashing this one; converting the list first costs half as much again.
        """
        cdef Py_ssize_t i, start, size = 4 * self.window_tokens
        cdef bytes extra = b""
        cdef uint8_t* message = <uint8_t*>PyMem_RawMalloc(size + extra_room(extras))
        if message == NULL:
            raise OutOfMemory("no memory for one block of tokens")
        try:
            for i in range(blocks):
                start = i * self.block_tokens
                if source.data == NULL:
                    read_tokens(tokens, start, start + self.window_tokens, <uint32_t*>message)
                else:
                    memcpy(message, source.data + start, size)
                if extras:
                    extra = extras[min(i, len(extras) - 1)]
                    memcpy(message + size, PyBytes_AS_STRING(extra), PyBytes_GET_SIZE(extra))
                hashes[i] = self.next_hash(links, message, size + PyBytes_GET_SIZE(extra))
        finally:
            PyMem_RawFree(message)
        return 0


@cython.final
cdef class DigestChain:
    """A recipe of digests: `encoding` of (parent, tokens, extra) and `digest` of it; `root` is the first parent.

    `extra` is bytes in the same encoding ("pickle", "cbor"), and is left out of pages. Immutable, so threads may share
    one.
    """

    cdef mp_recipe recipe
    cdef bytes root, no_extra

    def __cinit__(self, *, Py_ssize_t block_tokens, str encoding, str digest, bytes root):
        check_block(block_tokens)
        if encoding not in ENCODINGS:
            raise UsageError(f"encoding must be one of {', '.join(ENCODINGS)}", field="encoding", value=encoding)
        if digest not in DIGESTS:
            raise UsageError(f"digest must be one of {', '.join(DIGESTS)}", field="digest", value=digest)
        check_parent(root)
        self.recipe.encoding = ENCODINGS.index(encoding)
        self.recipe.digest_bytes = MP_XXH3_DIGEST if digest == "xxh3_128" else MP_SHA256_DIGEST
        self.recipe.sha256 = mp_pick_sha256(digest == "sha256_plain")
        self.recipe.block_tokens = block_tokens
        self.recipe.message = NULL
        self.root = root
        self.no_extra = (b"N", b"\xf6", b"", b"")[self.recipe.encoding]

    def chain(self, tokens, parent=None, extras=()) -> tuple:
        """(digests, keys): the blocks' digests one behind another, and `array('Q')` of their 64-bit forms.

        `parent` is the digest to go on from (None: the root). About 0.2 us a block of 16 tokens with SHA-256.
        """
        cdef Tokens source
        cdef Py_ssize_t blocks, beyond = self.recipe.encoding == MP_BIGRAM
        cdef bytes digests, first = self.root if parent is None else parent
        cdef array.array keys
        check_parent(first)
        open_tokens(tokens, &source)
        try:
            if extras and self.recipe.encoding >= MP_PAGE:
                raise UsageError("a page's hash takes no extra keys; put a salt into the root", field="extras")
            blocks = (source.count - beyond) // <Py_ssize_t>self.recipe.block_tokens if source.count > beyond else 0
            digests = PyBytes_FromStringAndSize(NULL, blocks * self.recipe.digest_bytes)
            keys = array.clone(TEMPLATE, blocks, False)
            self.fill(tokens, &source, first, extras, digests, keys)
        finally:
            close_tokens(&source)
        return digests, keys

    cdef int fill(self, object tokens, Tokens* source, bytes first, object extras, bytes digests,
                  array.array keys) except -1:
        cdef mp_recipe recipe = self.recipe
        cdef Py_ssize_t i, blocks = len(keys), start, width = recipe.block_tokens + (recipe.encoding == MP_BIGRAM)
        cdef const uint8_t* parent = <const uint8_t*>PyBytes_AS_STRING(first)
        cdef size_t parent_bytes = PyBytes_GET_SIZE(first)
        cdef uint8_t* out = <uint8_t*>PyBytes_AS_STRING(digests)
        cdef bytes extra = self.no_extra
        cdef size_t extra_bytes = max(extra_room(extras), <size_t>PyBytes_GET_SIZE(extra))
        cdef size_t room = mp_message_bytes(recipe.block_tokens, PARENT_BYTES_MAX, extra_bytes) // 8 * 8 + 8
        cdef const uint32_t* block
        recipe.message = <uint8_t*>PyMem_RawMalloc(room + 4 * width)
        if recipe.message == NULL:
            raise OutOfMemory("no memory for one block's message")
        try:
            for i in range(blocks):
                start = i * recipe.block_tokens
                block = source.data + start
                if source.data == NULL:
                    block = <uint32_t*>(recipe.message + room)
                    read_tokens(tokens, start, start + width, <uint32_t*>block)
                if recipe.encoding == MP_PICKLE:
                    check_signed(block, width, start)
                if extras:
                    extra = extras[min(i, len(extras) - 1)]
                mp_digest_block(
                    &recipe, parent, parent_bytes, block,
                    <const uint8_t*>PyBytes_AS_STRING(extra), PyBytes_GET_SIZE(extra), out,
                )
                keys.data.as_ulonglongs[i] = mp_key_of_digest(&recipe, out)
                parent = out
                parent_bytes = recipe.digest_bytes
                out += recipe.digest_bytes
        finally:
            PyMem_RawFree(recipe.message)
        return 0


cdef int check_block(Py_ssize_t block_tokens) except -1:
    if not 1 <= block_tokens <= BLOCK_TOKENS_MAX:
        raise UsageError(f"a block has 1 to {BLOCK_TOKENS_MAX} tokens; got {block_tokens}", field="block_tokens")
    return 0


cdef int check_signed(const uint32_t* tokens, Py_ssize_t count, Py_ssize_t start) except -1:
    """Pickle writes a number from 2**31 on in another form, which no vocabulary needs."""
    cdef uint32_t seen = 0
    cdef Py_ssize_t i
    for i in range(count):
        seen |= tokens[i]
    if seen >> 31:
        raise UsageError(
            f"a token id from 2**31 on, after token {start}, cannot be pickled; use CBOR", field="tokens", index=start
        )
    return 0


cdef int check_parent(object parent) except -1:
    if not isinstance(parent, bytes) or len(parent) > PARENT_BYTES_MAX:
        raise UsageError(f"a parent digest is at most {PARENT_BYTES_MAX} bytes", field="parent")
    return 0


cdef size_t extra_room(object extras) except? 0:
    """The longest extra's size in bytes; refuses what is no list of bytes."""
    cdef size_t longest = 0
    for extra in extras:
        if not isinstance(extra, bytes) or len(extra) > EXTRA_BYTES_MAX:
            raise UsageError(f"an extra is at most {EXTRA_BYTES_MAX} bytes, encoded", field="extras")
        longest = max(longest, <size_t>len(extra))
    return longest
