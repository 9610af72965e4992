"""The MessagePack and the rpc frames of rpc_msgpack.h."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "rpc_msgpack.h" nogil:
    ctypedef struct mp_pack_reader:
        const uint8_t* at
        const uint8_t* end
    int mp_pack_skip(mp_pack_reader* r)
    int mp_pack_read_uint(mp_pack_reader* r, uint64_t* value)
    int mp_pack_read_array(mp_pack_reader* r, uint32_t* count)
    int mp_pack_read_bytes(mp_pack_reader* r, const uint8_t** data, uint32_t* count)
    int mp_pack_read_nil(mp_pack_reader* r)
    uint8_t* mp_pack_uint(uint8_t* p, uint64_t v)
    uint8_t* mp_pack_nil(uint8_t* p)
    uint8_t* mp_pack_array(uint8_t* p, uint32_t n)
    uint8_t* mp_pack_bin(uint8_t* p, uint32_t n)
    uint8_t* mp_pack_str(uint8_t* p, uint32_t n)
    enum:
        MP_RPC_REQUEST
        MP_RPC_REPLY
        MP_RPC_PUSH
    ctypedef struct mp_rpc_message:
        int type
        uint64_t id
        const uint8_t* method
        uint32_t method_bytes
        const uint8_t* error
        size_t error_bytes
        const uint8_t* body
        size_t body_bytes
    int mp_rpc_parse(const uint8_t* data, size_t n, mp_rpc_message* m)
    uint8_t* mp_rpc_begin_reply(uint8_t* p, uint64_t id)
    void mp_rpc_length(uint8_t* frame, uint32_t n)
    uint32_t mp_rpc_length_of(const uint8_t* frame)
