"""libibverbs as its header groups it (infiniband/verbs.h of rdma-core), and our table of its calls (verbs_calls.h)."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "infiniband/verbs.h" nogil:
    enum:
        IBV_WC_SUCCESS
        IBV_WC_LOC_LEN_ERR
        IBV_WC_LOC_QP_OP_ERR
        IBV_WC_LOC_PROT_ERR
        IBV_WC_WR_FLUSH_ERR
        IBV_WC_LOC_ACCESS_ERR
        IBV_WC_REM_INV_REQ_ERR
        IBV_WC_REM_ACCESS_ERR
        IBV_WC_REM_OP_ERR
        IBV_WC_RETRY_EXC_ERR
        IBV_WC_RNR_RETRY_EXC_ERR
        IBV_WC_FATAL_ERR
        IBV_WC_RESP_TIMEOUT_ERR
        IBV_WC_GENERAL_ERR
    enum:
        IBV_WR_RDMA_WRITE
        IBV_WR_RDMA_READ
    enum:
        IBV_ACCESS_LOCAL_WRITE
        IBV_ACCESS_REMOTE_WRITE
        IBV_ACCESS_REMOTE_READ
        IBV_ACCESS_RELAXED_ORDERING
    enum:
        IBV_QPS_RESET
        IBV_QPS_INIT
        IBV_QPS_RTR
        IBV_QPS_RTS
        IBV_QPS_SQD
        IBV_QPS_SQE
        IBV_QPS_ERR
    enum:
        IBV_QP_STATE
        IBV_QP_CAP
    enum:
        IBV_QPT_RC
    enum:
        IBV_EVENT_CQ_ERR
        IBV_EVENT_QP_FATAL
        IBV_EVENT_QP_REQ_ERR
        IBV_EVENT_QP_ACCESS_ERR
        IBV_EVENT_DEVICE_FATAL
        IBV_EVENT_PORT_ACTIVE
        IBV_EVENT_PORT_ERR
        IBV_EVENT_LID_CHANGE
        IBV_EVENT_GID_CHANGE
    enum:
        IBV_PORT_ACTIVE
        IBV_LINK_LAYER_INFINIBAND
        IBV_LINK_LAYER_ETHERNET
        IBV_ODP_SUPPORT
    union ibv_gid:
        uint8_t raw[16]
    struct ibv_gid_entry:
        ibv_gid gid
        uint32_t gid_index
        uint32_t port_num
        uint32_t gid_type
        uint32_t ndev_ifindex
    struct ibv_device:
        pass
    struct ibv_context:
        ibv_device* device
        int cmd_fd
        int async_fd
        int num_comp_vectors
    struct ibv_pd:
        pass
    struct ibv_mr:
        uint32_t lkey
        uint32_t rkey
    struct ibv_comp_channel:
        int fd
    struct ibv_cq:
        int cqe
    struct ibv_qp:
        uint32_t qp_num
    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey
    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr* next
        ibv_sge* sg_list
        int num_sge
        unsigned int send_flags
    struct ibv_wc:
        uint64_t wr_id
        int status
        int opcode
        uint32_t vendor_err
        uint32_t byte_len
        uint32_t qp_num
    struct ibv_qp_cap:
        uint32_t max_send_wr
        uint32_t max_recv_wr
        uint32_t max_send_sge
        uint32_t max_recv_sge
        uint32_t max_inline_data
    struct ibv_qp_init_attr:
        void* qp_context
        ibv_cq* send_cq
        ibv_cq* recv_cq
        ibv_qp_cap cap
        int qp_type
        int sq_sig_all
    struct ibv_qp_attr:
        int qp_state
    struct ibv_device_attr:
        char fw_ver[64]
        uint64_t max_mr_size
        uint32_t vendor_id
        uint32_t vendor_part_id
        int max_qp
        int max_qp_wr
        int max_sge
        int max_sge_rd
        int max_cq
        int max_cqe
        int max_mr
        int max_qp_rd_atom
        int max_qp_init_rd_atom
        uint8_t phys_port_cnt
    struct ibv_odp_caps:
        uint64_t general_caps
    struct ibv_device_attr_ex:
        ibv_device_attr orig_attr
        ibv_odp_caps odp_caps
    struct ibv_port_attr:
        int state
        int max_mtu
        int active_mtu
        int gid_tbl_len
        uint32_t max_msg_sz
        uint16_t pkey_tbl_len
        uint16_t lid
        uint8_t lmc
        uint8_t active_width
        uint8_t active_speed
        uint8_t link_layer
    # The data path: inlines that go through the context.
    int ibv_post_send(ibv_qp* qp, ibv_send_wr* first, ibv_send_wr** bad)
    int ibv_poll_cq(ibv_cq* cq, int n_max, ibv_wc* wc)
    int ibv_req_notify_cq(ibv_cq* cq, int solicited_only)

cdef extern from "verbs_calls.h" nogil:
    ctypedef struct mp_verbs:
        ibv_device** (*get_device_list)(int* n) noexcept nogil
        void (*free_device_list)(ibv_device** devices) noexcept nogil
        const char* (*get_device_name)(ibv_device* device) noexcept nogil
        uint64_t (*get_device_guid)(ibv_device* device) noexcept nogil
        ibv_context* (*open_device)(ibv_device* device) noexcept nogil
        int (*close_device)(ibv_context* context) noexcept nogil
        int (*query_gid)(ibv_context* context, uint8_t port, int index, ibv_gid* gid) noexcept nogil
        int (*query_pkey)(ibv_context* context, uint8_t port, int index, uint16_t* pkey) noexcept nogil
        ibv_pd* (*alloc_pd)(ibv_context* context) noexcept nogil
        int (*dealloc_pd)(ibv_pd* pd) noexcept nogil
        ibv_mr* (*reg_mr)(ibv_pd* pd, void* address, size_t length, int access) noexcept nogil
        int (*dereg_mr)(ibv_mr* mr) noexcept nogil
        ibv_comp_channel* (*create_comp_channel)(ibv_context* context) noexcept nogil
        int (*destroy_comp_channel)(ibv_comp_channel* channel) noexcept nogil
        ibv_cq* (*create_cq)(ibv_context* context, int depth, void* user, ibv_comp_channel* channel,
                             int vector) noexcept nogil
        int (*destroy_cq)(ibv_cq* cq) noexcept nogil
        ibv_qp* (*create_qp)(ibv_pd* pd, ibv_qp_init_attr* attr) noexcept nogil
        int (*query_qp)(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) noexcept nogil
        int (*destroy_qp)(ibv_qp* qp) noexcept nogil
        const char* (*wc_status_str)(int status) noexcept nogil
        const char* (*event_type_str)(int event) noexcept nogil
        ibv_mr* (*reg_mr_iova2)(ibv_pd* pd, void* address, size_t length, uint64_t iova,
                                unsigned int access) noexcept nogil
        ibv_mr* (*reg_dmabuf_mr)(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                 int access) noexcept nogil
        ssize_t (*query_gid_table)(ibv_context* context, ibv_gid_entry* entries, size_t n_max, uint32_t flags,
                                   size_t entry_bytes) noexcept nogil
    const char* mp_verbs_load(mp_verbs* v, void* library)
    int mp_query_device(const mp_verbs* v, ibv_context* context, ibv_device_attr_ex* attr)
    int mp_query_port(const mp_verbs* v, ibv_context* context, uint8_t port, ibv_port_attr* attr)

    ctypedef struct mp_route:
        uint8_t remote_gid[16]
        uint32_t remote_qpn
        uint32_t local_psn
        uint32_t remote_psn
        uint16_t remote_lid
        uint8_t port
        uint8_t sgid_index
        uint8_t with_grh
        uint8_t mtu
        uint8_t traffic_class
        uint8_t service_level
        uint8_t hop_limit
        uint8_t timeout
        uint8_t retry_cnt
        uint8_t rnr_retry
        uint8_t min_rnr_timer
        uint8_t rd_atomic
        uint8_t dest_rd_atomic
    # Each gives 0 or an errno.
    int mp_qp_to_init(const mp_verbs* v, ibv_qp* qp, uint8_t port, uint16_t pkey_index, unsigned int remote_access)
    int mp_qp_to_rtr(const mp_verbs* v, ibv_qp* qp, const mp_route* route)
    int mp_qp_to_rts(const mp_verbs* v, ibv_qp* qp, const mp_route* route)
    int mp_qp_to_state(const mp_verbs* v, ibv_qp* qp, int state)
    void mp_wr_fill(ibv_send_wr* wr, uint64_t id, int op, ibv_sge* pieces, int n_pieces, uint64_t remote_address,
                    uint32_t rkey, int signalled, ibv_send_wr* next)

    ctypedef struct mp_cq:
        const mp_verbs* calls
        ibv_cq* cq
        ibv_comp_channel* channel
        int depth
    int mp_cq_poll(mp_cq* q, int n_max, ibv_wc* wc)
    int mp_cq_arm(mp_cq* q)
    int mp_cq_take(mp_cq* q)
    int mp_cq_wait(mp_cq* q, uint64_t deadline_ns)

    ctypedef struct mp_async:
        int type
        int port
        uint32_t qp_num
    int mp_async_take(const mp_verbs* v, ibv_context* context, mp_async* out)

    ctypedef struct mp_registration:
        uint64_t base
        uint64_t length
        uint64_t chunk_bytes
        uint32_t n_chunks
        uint32_t n_devices
        uint32_t* lkeys
        uint32_t* rkeys
    bint mp_registered(const mp_registration* r, uint64_t address, uint64_t length)
    uint32_t mp_chunk_of(const mp_registration* r, uint64_t address)
    uint64_t mp_chunk_room(const mp_registration* r, uint64_t address)
    uint32_t mp_lkey_of(const mp_registration* r, uint32_t device, uint64_t address)
    uint32_t mp_rkey_of(const mp_registration* r, uint32_t device, uint64_t address)
