"""Whole frames for clients that own their socket elsewhere (asyncio): requests out, messages in, replies decoded."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from moonpool.native.io.rpc_codec cimport (
    EndReply,
    LookupReply,
    PutReply,
    as_number,
    frame_buffer,
    listed,
    read_exists,
    write_call,
    write_exists,
    write_lookup,
    write_put_end,
    write_put_start,
)
from moonpool.native.io.rpc_msgpack cimport (
    MP_RPC_PUSH,
    MP_RPC_REPLY,
    mp_rpc_length_of,
    mp_rpc_message,
    mp_rpc_parse,
)

from moonpool.errors import ProtocolError


cdef bytes taken(frame_buffer* f):
    try:
        return (<char*>f.data)[:f.length]
    finally:
        free(f.data)
        f.data = NULL


def call_frame(uint64_t message_id, str method not None, bytes params not None) -> bytes:
    """The frame of a request with the MessagePack of its params (a list)."""
    cdef frame_buffer f = frame_buffer(NULL, 0, 0)
    try:
        write_call(&f, message_id, method, params)
        return taken(&f)
    finally:
        free(f.data)


def exists_frame(uint64_t message_id, keys, lease_ms) -> bytes:
    """The frame of `exists`; keys are str or bytes."""
    cdef frame_buffer f = frame_buffer(NULL, 0, 0)
    try:
        write_exists(&f, message_id, listed(keys), as_number(lease_ms))
        return taken(&f)
    finally:
        free(f.data)


def lookup_frame(uint64_t message_id, keys, lease_ms) -> bytes:
    """The frame of `lookup`; keys are str or bytes."""
    cdef frame_buffer f = frame_buffer(NULL, 0, 0)
    try:
        write_lookup(&f, message_id, listed(keys), as_number(lease_ms))
        return taken(&f)
    finally:
        free(f.data)


def put_start_frame(uint64_t message_id, keys, sizes, bytes policy, wait_ms) -> bytes:
    """The frame of `put_start`; `policy` is the MessagePack of a map, or None."""
    cdef frame_buffer f = frame_buffer(NULL, 0, 0)
    try:
        write_put_start(&f, message_id, listed(keys), listed(sizes), policy, as_number(wait_ms))
        return taken(&f)
    finally:
        free(f.data)


def put_end_frame(uint64_t message_id, put_id, indexes, digests, chunks=None) -> bytes:
    """The frame of `put_end`; `digests` holds 16 bytes for each index, `chunks` a bytes-like for each, or is None."""
    cdef frame_buffer f = frame_buffer(NULL, 0, 0)
    try:
        write_put_end(&f, message_id, as_number(put_id), listed(indexes), digests,
                      None if chunks is None else listed(chunks))
        return taken(&f)
    finally:
        free(f.data)


def exists_result(bytes body not None, uint32_t count) -> bytes:
    """One byte for each key from the MessagePack of a result; `ProtocolError` for anything else."""
    return read_exists(<const uint8_t*>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), count)


def lookup_result(bytes body not None, uint32_t count) -> LookupReply:
    """The reply of `lookup` for so many keys from the MessagePack of its result."""
    cdef LookupReply reply = LookupReply()
    reply.read(<const uint8_t*>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), count)
    return reply


def put_start_result(bytes body not None, uint32_t count) -> PutReply:
    """The reply of `put_start` for so many keys from the MessagePack of its result."""
    cdef PutReply reply = PutReply()
    reply.read(<const uint8_t*>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), count)
    return reply


def put_end_result(bytes body not None, uint32_t count) -> EndReply:
    """The reply of `put_end` for so many entries from the MessagePack of its result."""
    cdef EndReply reply = EndReply()
    reply.read(<const uint8_t*>PyBytes_AS_STRING(body), PyBytes_GET_SIZE(body), count)
    return reply


def take_messages(data, size_t frame_bytes_max) -> tuple:
    """(bytes used, messages) of the whole frames that `data` begins with; what is left is an unfinished frame.

    A reply is `(message id, error or None, result)`, a push `(None, method, params)`; all but id and method are
    MessagePack, checked. Raises `ProtocolError` for anything else.
    """
    cdef Py_buffer view
    cdef const uint8_t* at
    cdef size_t used = 0
    cdef uint32_t length
    cdef mp_rpc_message m
    cdef list messages = []
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        while <size_t>view.len - used >= 4:
            at = <const uint8_t*>view.buf + used
            length = mp_rpc_length_of(at)
            if length == 0 or length > frame_bytes_max:
                raise ProtocolError(f"a frame of {length} bytes is not allowed here")
            if <size_t>view.len - used - 4 < length:
                break
            if mp_rpc_parse(at + 4, length, &m):
                raise ProtocolError("a frame holds no message of the rpc")
            used += 4 + length
            body = (<const char*>m.body)[:m.body_bytes]
            if m.type == MP_RPC_REPLY:
                error = None if m.error[0] == 0xc0 else (<const char*>m.error)[:m.error_bytes]
                messages.append((m.id, error, body))
            elif m.type == MP_RPC_PUSH:
                messages.append((None, (<const char*>m.method)[:m.method_bytes].decode("utf-8", "replace"), body))
            else:
                raise ProtocolError("a server asks nothing of its clients")
    finally:
        PyBuffer_Release(&view)
    return used, messages
