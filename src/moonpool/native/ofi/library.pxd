"""libfabric's types as far as Moonpool uses them, and its opened library (see library.pyx)."""

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "ofi_library.h" nogil:
    ctypedef uint64_t fi_addr_t
    struct fid:
        pass
    struct fid_fabric:
        fid fid
    struct fid_domain:
        fid fid
    struct fid_ep:
        fid fid
    struct fid_cq:
        fid fid
    struct fid_av:
        fid fid
    struct fid_mr:
        fid fid
    struct fi_context2:
        pass
    struct fi_tx_attr:
        size_t size
        uint64_t op_flags
        uint64_t msg_order
    struct fi_ep_attr:
        size_t max_msg_size
        uint32_t protocol
    struct fi_domain_attr:
        char* name
        int mr_mode
        size_t mr_key_size
    struct fi_fabric_attr:
        char* name
        char* prov_name
    struct fi_info:
        fi_info* next
        uint32_t addr_format
        size_t src_addrlen
        fi_tx_attr* tx_attr
        fi_ep_attr* ep_attr
        fi_domain_attr* domain_attr
        fi_fabric_attr* fabric_attr
    struct fi_cq_entry:
        void* op_context
    struct fi_cq_err_entry:
        void* op_context
        int err
        int prov_errno
    ctypedef struct mp_ofi_calls:
        void* handle
        void (*freeinfo)(fi_info*) noexcept nogil
        fi_info* (*dupinfo)(const fi_info*) noexcept nogil
        int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) noexcept nogil
        const char* (*strerror)(int) noexcept nogil
        uint32_t (*version)() noexcept nogil
    enum:
        MP_OFI_BOUNCE
        MP_OFI_FLUSH
        MP_OFI_SHARED
        FI_MR_LOCAL
        FI_MR_VIRT_ADDR
        FI_MR_ALLOCATED
        FI_MR_PROV_KEY
        FI_MR_ENDPOINT
        FI_EAGAIN
        FI_EAVAIL
        FI_EINTR
        FI_ENOMEM
        FI_EACCES
        FI_EKEYREJECTED
        FI_ENOKEY
        FI_EPERM
        FI_ADDR_STR
    uint64_t FI_READ
    uint64_t FI_WRITE
    uint64_t FI_REMOTE_READ
    uint64_t FI_REMOTE_WRITE
    uint64_t FI_COMPLETION
    uint64_t FI_DELIVERY_COMPLETE
    uint64_t FI_ORDER_RAW
    int mp_ofi_load(mp_ofi_calls* calls, const char* path, const char** problem)
    int mp_ofi_query(const mp_ofi_calls* calls, const char* provider, const char* node, int delivery, fi_info** found)
    bint mp_ofi_is_ip(const fi_info* info)
    int mp_ofi_open_queue(fid_domain* domain, size_t size, fid_cq** queue, int* fd)
    int mp_ofi_open_addresses(fid_domain* domain, fid_av** av)
    int mp_ofi_open_endpoint(fid_domain* domain, fi_info* info, fid_cq* queue, fid_av* av, fid_ep** ep)
    int mp_ofi_may_sleep(fid_fabric* fabric, fid_cq* queue)
    int mp_ofi_close(void* thing)
    ssize_t mp_ofi_post(fid_ep* ep, int write, uint64_t flags, void* buffer, size_t n, void* desc, fi_addr_t peer,
                        uint64_t address, uint64_t key, void* context)
    int fi_domain(fid_fabric* fabric, fi_info* info, fid_domain** domain, void* context)
    int mp_ofi_name(fid_ep* thing, void* address, size_t* length)
    int fi_av_insert(fid_av* av, const void* address, size_t count, fi_addr_t* found, uint64_t flags, void* context)
    int fi_mr_reg(fid_domain* domain, const void* buf, size_t n, uint64_t access, uint64_t offset, uint64_t key,
                  uint64_t flags, fid_mr** mr, void* context)
    int mp_ofi_bind(fid_mr* mr, fid_ep* thing)
    int fi_mr_enable(fid_mr* mr)
    void* fi_mr_desc(fid_mr* mr)
    uint64_t fi_mr_key(fid_mr* mr)
    ssize_t fi_cq_read(fid_cq* queue, void* entries, size_t count)
    ssize_t fi_cq_readerr(fid_cq* queue, fi_cq_err_entry* entry, uint64_t flags)

cdef mp_ofi_calls* ofi_calls() except NULL
cdef str ofi_error(int code)
