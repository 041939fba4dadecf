//! Driver parts of mlx5 (`rdma/mlx5-abi.h`, `rdma/mlx5_user_ioctl_cmds.h`, `rdma/mlx5_user_ioctl_verbs.h`).

use crate::table::{constants, structures};

/// ABI version of the driver.
pub const ABI_VERSION: u64 = 1;

structures! {
    /// What is compared with rdma/mlx5-abi.h.
    STRUCTURES;

    /// Context. The library asks with 32 bytes, then 24, then 16.
    struct GetContext = "struct mlx5_ib_alloc_ucontext_req_v2" {
        /// BlueFlame registers wanted.
        total_num_bfregs: u32,
        /// Of these, for one queue alone.
        num_low_latency_bfregs: u32,
        /// [`CONTEXT_DEVX`].
        flags: u32,
        /// Zero.
        comp_mask: u32,
        /// 1: completions with a user index are understood.
        max_cqe_version: u8,
        /// Zero.
        reserved0: u8,
        /// Zero.
        reserved1: u16,
        /// Zero.
        reserved2: u32,
        /// `LIB_CAP_*`.
        lib_caps: u64,
    }

    /// Reply.
    struct GetContextReply = "struct mlx5_ib_alloc_ucontext_resp" {
        /// Queue pairs, a power of two.
        qp_tab_size: u32,
        /// Bytes of a BlueFlame register; its buffers have half.
        bf_reg_size: u32,
        /// BlueFlame registers mapped at once; 0: UAR pages are objects.
        tot_bfregs: u32,
        /// Distance of doorbell records.
        cache_line_size: u32,
        /// Most bytes of a send WQE.
        max_sq_desc_sz: u16,
        /// Most bytes of a receive WQE.
        max_rq_desc_sz: u16,
        /// Most basic blocks of a send queue.
        max_send_wqebb: u32,
        /// Most entries of a receive queue.
        max_recv_wr: u32,
        /// Most entries of a shared receive queue.
        max_srq_recv_wr: u32,
        /// Ports.
        num_ports: u16,
        /// IPsec.
        flow_action_flags: u16,
        /// Which of the later fields hold.
        comp_mask: u32,
        /// Bytes of this reply.
        response_length: u32,
        /// 1: completions carry a user index.
        cqe_version: u8,
        /// `UHW_*`.
        cmds_supp_uhw: u8,
        /// `INLINE_*`.
        eth_min_inline: u8,
        /// Zero: none.
        clock_info_versions: u8,
        /// Where the clock's page is.
        hca_core_clock_offset: u64,
        /// Of a UAR page.
        log_uar_size: u32,
        /// UARs in a page.
        num_uars_per_page: u32,
        /// BlueFlame registers that can be asked for later.
        num_dyn_bfregs: u32,
        /// Key that reads as zeros.
        dump_fill_mkey: u32,
    }

    /// Protection domain.
    struct AllocPdReply = "struct mlx5_ib_alloc_pd_resp" {
        /// Number.
        pdn: u32,
    }

    /// Large TCP packets.
    struct TsoCaps = "struct mlx5_ib_tso_caps" {
        /// Most bytes of payload.
        max_tso: u32,
        /// Bit for each kind of queue pair.
        supported_qpts: u32,
    }

    /// Hashing.
    struct RssCaps = "struct mlx5_ib_rss_caps" {
        /// `RX_HASH_*`.
        rx_hash_fields_mask: u64,
        /// 1: Toeplitz.
        rx_hash_function: u8,
        /// Zero.
        reserved: [u8; 7],
    }

    /// Compression of completions.
    struct CqeCompCaps = "struct mlx5_ib_cqe_comp_caps" {
        /// Most mini entries of a session.
        max_num: u32,
        /// `MINI_FORMAT_*`.
        supported_format: u32,
    }

    /// Packet pacing.
    struct PacingCaps = "struct mlx5_packet_pacing_caps" {
        /// In kbit/s.
        qp_rate_limit_min: u32,
        /// In kbit/s.
        qp_rate_limit_max: u32,
        /// Bit for each kind of queue pair.
        supported_qpts: u32,
        /// 1: bursts.
        cap_flags: u8,
        /// Zero.
        reserved: [u8; 3],
    }

    /// Offsets given by software.
    struct SwParsingCaps = "struct mlx5_ib_sw_parsing_caps" {
        /// `SW_PARSING_*`.
        sw_parsing_offloads: u32,
        /// Bit for each kind of queue pair.
        supported_qpts: u32,
    }

    /// Striding receive queues.
    struct StridingCaps = "struct mlx5_ib_striding_rq_caps" {
        /// Least size of a stride, logarithm.
        min_single_stride_log_num_of_bytes: u32,
        /// Largest size of a stride, logarithm.
        max_single_stride_log_num_of_bytes: u32,
        /// Fewest strides of a WQE, logarithm.
        min_single_wqe_log_num_of_strides: u32,
        /// Most strides of a WQE, logarithm.
        max_single_wqe_log_num_of_strides: u32,
        /// Bit for each kind of queue pair.
        supported_qpts: u32,
        /// Zero.
        reserved: u32,
    }

    /// InfiniBand.
    struct DciCaps = "struct mlx5_ib_dci_streams_caps" {
        /// Streams.
        max_log_num_concurent: u8,
        /// Streams in error.
        max_log_num_errored: u8,
    }

    /// What the device can do.
    struct QueryDeviceReply = "struct mlx5_ib_query_device_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this reply.
        response_length: u32,
        /// Large TCP packets.
        tso_caps: TsoCaps,
        /// Hashing.
        rss_caps: RssCaps,
        /// Compression of completions.
        cqe_comp_caps: CqeCompCaps,
        /// Packet pacing.
        packet_pacing_caps: PacingCaps,
        /// `MPW_*`.
        mlx5_ib_support_multi_pkt_send_wqes: u32,
        /// 128-byte completions and others.
        flags: u32,
        /// Offsets given by software.
        sw_parsing_caps: SwParsingCaps,
        /// Striding receive queues.
        striding_rq_caps: StridingCaps,
        /// `TUNNEL_*`.
        tunnel_offloads_caps: u32,
        /// InfiniBand.
        dci_streams_caps: DciCaps,
        /// Zero.
        reserved: u16,
    }

    /// Completion queue.
    struct CreateCq = "struct mlx5_ib_create_cq" {
        /// Address of the ring.
        buf_addr: u64,
        /// Address of the doorbell record.
        db_addr: u64,
        /// Bytes of an entry: 64 or 128.
        cqe_size: u32,
        /// Compressed entries may come.
        cqe_comp_en: u8,
        /// One of `MINI_FORMAT_*`.
        cqe_comp_res_format: u8,
        /// `CREATE_CQ_*`.
        flags: u16,
        /// Page of the register that arms it.
        uar_page_index: u16,
        /// Zero.
        reserved0: u16,
        /// Zero.
        reserved1: u32,
    }

    /// Reply.
    struct CreateCqReply = "struct mlx5_ib_create_cq_resp" {
        /// Number.
        cqn: u32,
        /// Zero.
        reserved: u32,
    }

    /// InfiniBand.
    struct DciStreams = "struct mlx5_ib_create_qp_dci_streams" {
        /// Streams.
        log_num_concurent: u8,
        /// Streams in error.
        log_num_errored: u8,
    }

    /// Queue pair with queues of its own.
    struct CreateQp = "struct mlx5_ib_create_qp" {
        /// Address of the receive ring, or of the only ring.
        buf_addr: u64,
        /// Address of the doorbell record.
        db_addr: u64,
        /// Basic blocks of the send ring.
        sq_wqe_count: u32,
        /// Entries of the receive ring.
        rq_wqe_count: u32,
        /// Bytes of a receive entry, logarithm.
        rq_wqe_shift: u32,
        /// `QP_FLAG_*`.
        flags: u32,
        /// What completions say of the queue.
        uidx: u32,
        /// Register, or page of it.
        bfreg_index: u32,
        /// Address of the send ring of a raw-packet queue pair.
        sq_buf_addr: u64,
        /// Congestion control.
        ece_options: u32,
        /// InfiniBand.
        dci_streams: DciStreams,
        /// Zero.
        reserved: u16,
    }

    /// Queue pair that spreads packets over an indirection table.
    struct CreateRssQp = "struct mlx5_ib_create_qp_rss" {
        /// `RX_HASH_*`.
        rx_hash_fields_mask: u64,
        /// 1: Toeplitz.
        rx_hash_function: u8,
        /// Bytes of the key: 40.
        rx_key_len: u8,
        /// Zero.
        reserved: [u8; 6],
        /// Key.
        rx_hash_key: [u8; 128],
        /// Zero.
        comp_mask: u32,
        /// `QP_FLAG_*`.
        flags: u32,
    }

    /// Reply to both.
    struct CreateQpReply = "struct mlx5_ib_create_qp_resp" {
        /// Register that was chosen.
        bfreg_index: u32,
        /// Congestion control.
        ece_options: u32,
        /// `QP_REPLY_*`: which of the numbers hold.
        comp_mask: u32,
        /// Number of the receive transport object.
        tirn: u32,
        /// Number of the send transport object.
        tisn: u32,
        /// Number of the receive queue.
        rqn: u32,
        /// Number of the send queue.
        sqn: u32,
        /// Zero.
        reserved1: u32,
        /// For steering by software.
        tir_icm_addr: u64,
    }

    /// Work queue.
    struct CreateWq = "struct mlx5_ib_create_wq" {
        /// Address of the ring.
        buf_addr: u64,
        /// Address of the doorbell record.
        db_addr: u64,
        /// Entries.
        rq_wqe_count: u32,
        /// Bytes of an entry, logarithm.
        rq_wqe_shift: u32,
        /// What completions say of the queue.
        user_index: u32,
        /// Zero.
        flags: u32,
        /// [`CREATE_WQ_STRIDING`].
        comp_mask: u32,
        /// Bytes of a stride, logarithm.
        single_stride_log_num_of_bytes: u32,
        /// Strides of an entry, logarithm.
        single_wqe_log_num_of_strides: u32,
        /// Two bytes in front of each packet, so that IP is aligned.
        two_byte_shift_en: u32,
    }

    /// Reply.
    struct CreateWqReply = "struct mlx5_ib_create_wq_resp" {
        /// Bytes of this reply.
        response_length: u32,
        /// Zero.
        reserved: u32,
    }

    /// Work queue changes its state.
    struct ModifyWq = "struct mlx5_ib_modify_wq" {
        /// Zero.
        comp_mask: u32,
        /// Zero.
        reserved: u32,
    }

    /// Rule of `ibv_create_flow`: what its counters count follows.
    struct CreateFlow = "struct mlx5_ib_create_flow" {
        /// Number of [`FlowCounters`] that follow: one for each spec that counts.
        ncounters_data: u32,
        /// Zero.
        reserved: u32,
    }

    /// What a set of counters counts.
    struct FlowCounters = "struct mlx5_ib_flow_counters_data" {
        /// Address of [`FlowCounter`]s.
        counters_data: u64,
        /// How many.
        ncounters: u32,
        /// Zero.
        reserved: u32,
    }

    /// One counter of a set.
    struct FlowCounter = "struct mlx5_ib_flow_counters_desc" {
        /// [`COUNTER_PACKETS`] or [`COUNTER_BYTES`].
        description: u32,
        /// Where it stands in the set.
        index: u32,
    }
}

/// Attribute of [`MATCHER_CREATE`] since rdma-core 50: the port, from 1. Older headers do not have `MLX5_IB_ATTR_FLOW_MATCHER_IB_PORT`.
pub const MATCHER_PORT: u16 = 0x1006;

constants! {
    /// What is compared with the headers of mlx5.
    CONSTANTS;
    /// [`GetContext::flags`].
    CONTEXT_DEVX: u32 = 1, "MLX5_IB_ALLOC_UCTX_DEVX";
    /// [`GetContext::lib_caps`]: UAR pages of 4 KiB.
    LIB_CAP_4K_UAR: u64 = 1, "MLX5_LIB_CAP_4K_UAR";
    /// [`GetContext::lib_caps`]: UAR pages as objects.
    LIB_CAP_DYN_UAR: u64 = 2, "MLX5_LIB_CAP_DYN_UAR";
    /// [`GetContextReply::cmds_supp_uhw`]: the device query has a driver part.
    UHW_QUERY_DEVICE: u8 = 1, "MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE";
    /// [`GetContextReply::cmds_supp_uhw`]: address handles have a driver part.
    UHW_CREATE_AH: u8 = 2, "MLX5_USER_CMDS_SUPP_UHW_CREATE_AH";
    /// [`GetContextReply::eth_min_inline`]: not said.
    INLINE_NOT_SAID: u8 = 0, "MLX5_USER_INLINE_MODE_NA";
    /// No header need be inline.
    INLINE_NONE: u8 = 1, "MLX5_USER_INLINE_MODE_NONE";
    /// The Ethernet header must be inline.
    INLINE_L2: u8 = 2, "MLX5_USER_INLINE_MODE_L2";
    /// The IP header must be inline.
    INLINE_IP: u8 = 3, "MLX5_USER_INLINE_MODE_IP";
    /// The TCP or UDP header must be inline.
    INLINE_TCP_UDP: u8 = 4, "MLX5_USER_INLINE_MODE_TCP_UDP";
    /// [`QueryDeviceReply::mlx5_ib_support_multi_pkt_send_wqes`]: allowed.
    MPW_ALLOWED: u32 = 2, "MLX5_IB_ALLOW_MPW";
    /// Enhanced.
    MPW_ENHANCED: u32 = 4, "MLX5_IB_SUPPORT_EMPW";
    /// [`SwParsingCaps::sw_parsing_offloads`].
    SW_PARSING: u32 = 1, "MLX5_IB_SW_PARSING";
    /// With checksums.
    SW_PARSING_CSUM: u32 = 2, "MLX5_IB_SW_PARSING_CSUM";
    /// With segmentation.
    SW_PARSING_LSO: u32 = 4, "MLX5_IB_SW_PARSING_LSO";
    /// [`QueryDeviceReply::tunnel_offloads_caps`]: VXLAN.
    TUNNEL_VXLAN: u32 = 1, "MLX5_IB_TUNNELED_OFFLOADS_VXLAN";
    /// GRE.
    TUNNEL_GRE: u32 = 2, "MLX5_IB_TUNNELED_OFFLOADS_GRE";
    /// GENEVE.
    TUNNEL_GENEVE: u32 = 4, "MLX5_IB_TUNNELED_OFFLOADS_GENEVE";
    /// [`CreateCq::flags`]: the page of the register is named.
    CREATE_CQ_UAR_PAGE: u16 = 2, "MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX";
    /// [`CreateCq::flags`]: timestamps in seconds and nanoseconds.
    CREATE_CQ_REAL_TIME: u16 = 4, "MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS";
    /// [`CreateQp::flags`]: small packets may come in the completion.
    QP_FLAG_SCATTER_CQE: u32 = 2, "MLX5_QP_FLAG_SCATTER_CQE";
    /// [`CreateQp::flags`]: inner headers are looked at.
    QP_FLAG_TUNNEL: u32 = 4, "MLX5_QP_FLAG_TUNNEL_OFFLOADS";
    /// [`CreateRssQp::flags`]: what the port itself sends to one station is received.
    QP_FLAG_LOOPBACK_UC: u32 = 0x40, "MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_UC";
    /// [`CreateRssQp::flags`]: what the port itself sends to groups is received.
    QP_FLAG_LOOPBACK_MC: u32 = 0x80, "MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_MC";
    /// [`CreateQp::flags`]: the register is named.
    QP_FLAG_BFREG_INDEX: u32 = 8, "MLX5_QP_FLAG_BFREG_INDEX";
    /// [`CreateQp::flags`]: the page of the register is named.
    QP_FLAG_UAR_PAGE_INDEX: u32 = 0x400, "MLX5_QP_FLAG_UAR_PAGE_INDEX";
    /// [`CreateQpReply::comp_mask`].
    QP_REPLY_TIRN: u32 = 1, "MLX5_IB_CREATE_QP_RESP_MASK_TIRN";
    /// [`CreateQpReply::comp_mask`].
    QP_REPLY_TISN: u32 = 2, "MLX5_IB_CREATE_QP_RESP_MASK_TISN";
    /// [`CreateQpReply::comp_mask`].
    QP_REPLY_RQN: u32 = 4, "MLX5_IB_CREATE_QP_RESP_MASK_RQN";
    /// [`CreateQpReply::comp_mask`].
    QP_REPLY_SQN: u32 = 8, "MLX5_IB_CREATE_QP_RESP_MASK_SQN";
    /// [`CreateWq::comp_mask`].
    CREATE_WQ_STRIDING: u32 = 1, "MLX5_IB_CREATE_WQ_STRIDING_RQ";
    /// Hash: the SPI of IPsec.
    RX_HASH_IPSEC_SPI: u64 = 0x100, "MLX5_RX_HASH_IPSEC_SPI";
    /// Hash: the inner headers.
    RX_HASH_INNER: u64 = 0x8000_0000, "MLX5_RX_HASH_INNER";

    /// Object: firmware commands.
    OBJECT_DEVX: u16 = 0x1000, "MLX5_IB_OBJECT_DEVX";
    /// Object.
    OBJECT_DEVX_OBJ: u16 = 0x1001, "MLX5_IB_OBJECT_DEVX_OBJ";
    /// Object: memory for firmware commands.
    OBJECT_DEVX_UMEM: u16 = 0x1002, "MLX5_IB_OBJECT_DEVX_UMEM";
    /// Object: flow matcher.
    OBJECT_FLOW_MATCHER: u16 = 0x1003, "MLX5_IB_OBJECT_FLOW_MATCHER";
    /// Object: virtio-net doorbell region.
    OBJECT_VAR: u16 = 0x1006, "MLX5_IB_OBJECT_VAR";
    /// Object: doorbell page.
    OBJECT_UAR: u16 = 0x1008, "MLX5_IB_OBJECT_UAR";
    /// [`FlowCounter::description`].
    COUNTER_PACKETS: u32 = 0, "IBV_COUNTER_PACKETS";
    /// [`FlowCounter::description`].
    COUNTER_BYTES: u32 = 1, "IBV_COUNTER_BYTES";
    /// Method of firmware objects.
    DEVX_OBJ_CREATE: u16 = 0x1000, "MLX5_IB_METHOD_DEVX_OBJ_CREATE";
    /// Method of firmware objects.
    DEVX_OBJ_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_DEVX_OBJ_DESTROY";
    /// Method of firmware objects.
    DEVX_OBJ_QUERY: u16 = 0x1003, "MLX5_IB_METHOD_DEVX_OBJ_QUERY";
    /// Attribute of every method of firmware objects.
    DEVX_OBJ_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE";
    /// Attribute: command.
    DEVX_OBJ_IN: u16 = 0x1001, "MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN";
    /// Attribute: answer.
    DEVX_OBJ_OUT: u16 = 0x1002, "MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT";
    /// Method.
    DEVX_OTHER: u16 = 0x1000, "MLX5_IB_METHOD_DEVX_OTHER";
    /// Attribute: command.
    DEVX_OTHER_IN: u16 = 0x1000, "MLX5_IB_ATTR_DEVX_OTHER_CMD_IN";
    /// Attribute: reply.
    DEVX_OTHER_OUT: u16 = 0x1001, "MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT";
    /// Method.
    UAR_ALLOC: u16 = 0x1000, "MLX5_IB_METHOD_UAR_OBJ_ALLOC";
    /// Method.
    UAR_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_UAR_OBJ_DESTROY";
    /// Attribute.
    UAR_ALLOC_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE";
    /// Attribute: [`UAR_BLUE_FLAME`] or [`UAR_NON_CACHED`].
    UAR_ALLOC_TYPE: u16 = 0x1001, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE";
    /// Attribute.
    UAR_ALLOC_OFFSET: u16 = 0x1002, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET";
    /// Attribute.
    UAR_ALLOC_LENGTH: u16 = 0x1003, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH";
    /// Attribute.
    UAR_ALLOC_PAGE_ID: u16 = 0x1004, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID";
    /// Attribute.
    UAR_DESTROY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE";
    /// For BlueFlame: writes are combined.
    UAR_BLUE_FLAME: u32 = 0, "MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF";
    /// Not cached, not combined.
    UAR_NON_CACHED: u32 = 1, "MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC";
    /// Method.
    VAR_ALLOC: u16 = 0x1000, "MLX5_IB_METHOD_VAR_OBJ_ALLOC";
    /// Method.
    VAR_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_VAR_OBJ_DESTROY";
    /// Attribute.
    VAR_ALLOC_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE";
    /// Attribute.
    VAR_ALLOC_OFFSET: u16 = 0x1001, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET";
    /// Attribute.
    VAR_ALLOC_LENGTH: u16 = 0x1002, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH";
    /// Attribute.
    VAR_ALLOC_PAGE_ID: u16 = 0x1003, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID";
    /// Attribute.
    VAR_DESTROY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE";
    /// Attribute of the context query that an importing process sends: the context reply.
    QUERY_CONTEXT_REPLY: u16 = 0x1000, "MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX";
    /// Method.
    PD_QUERY: u16 = 0x1000, "MLX5_IB_METHOD_PD_QUERY";
    /// Attribute.
    PD_QUERY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_QUERY_PD_HANDLE";
    /// Attribute.
    PD_QUERY_PDN: u16 = 0x1001, "MLX5_IB_ATTR_QUERY_PD_RESP_PDN";
    /// Method.
    MATCHER_CREATE: u16 = 0x1000, "MLX5_IB_METHOD_FLOW_MATCHER_CREATE";
    /// Method.
    MATCHER_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_FLOW_MATCHER_DESTROY";
    /// Attribute.
    MATCHER_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_FLOW_MATCHER_CREATE_HANDLE";
    /// Attribute: match parameters.
    MATCHER_MASK: u16 = 0x1001, "MLX5_IB_ATTR_FLOW_MATCHER_MATCH_MASK";
    /// Attribute: enum with the priority as payload.
    MATCHER_FLOW_TYPE: u16 = 0x1002, "MLX5_IB_ATTR_FLOW_MATCHER_FLOW_TYPE";
    /// Attribute: `CRITERIA_*`.
    MATCHER_CRITERIA: u16 = 0x1003, "MLX5_IB_ATTR_FLOW_MATCHER_MATCH_CRITERIA";
    /// Attribute.
    MATCHER_FLAGS: u16 = 0x1004, "MLX5_IB_ATTR_FLOW_MATCHER_FLOW_FLAGS";
    /// Attribute: `TABLE_*`.
    MATCHER_TABLE: u16 = 0x1005, "MLX5_IB_ATTR_FLOW_MATCHER_FT_TYPE";
    /// Attribute.
    MATCHER_DESTROY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_FLOW_MATCHER_DESTROY_HANDLE";
    /// Method of flows.
    FLOW_REMOVE: u16 = 0x1001, "MLX5_IB_METHOD_DESTROY_FLOW";
    /// Method of flows.
    FLOW_CREATE: u16 = 0x1000, "MLX5_IB_METHOD_CREATE_FLOW";
    /// Attribute.
    FLOW_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_CREATE_FLOW_HANDLE";
    /// Attribute: match parameters.
    FLOW_VALUE: u16 = 0x1001, "MLX5_IB_ATTR_CREATE_FLOW_MATCH_VALUE";
    /// Attribute.
    FLOW_DEST_QP: u16 = 0x1002, "MLX5_IB_ATTR_CREATE_FLOW_DEST_QP";
    /// Attribute.
    FLOW_DEST_DEVX: u16 = 0x1003, "MLX5_IB_ATTR_CREATE_FLOW_DEST_DEVX";
    /// Attribute.
    FLOW_MATCHER: u16 = 0x1004, "MLX5_IB_ATTR_CREATE_FLOW_MATCHER";
    /// Attribute: handles of actions.
    FLOW_ACTIONS: u16 = 0x1005, "MLX5_IB_ATTR_CREATE_FLOW_ARR_FLOW_ACTIONS";
    /// Attribute: 24 bits.
    FLOW_TAG: u16 = 0x1006, "MLX5_IB_ATTR_CREATE_FLOW_TAG";
    /// Attribute: handles of counters.
    FLOW_COUNTERS: u16 = 0x1007, "MLX5_IB_ATTR_CREATE_FLOW_ARR_COUNTERS_DEVX";
    /// Attribute.
    FLOW_COUNTERS_OFFSET: u16 = 0x1008, "MLX5_IB_ATTR_CREATE_FLOW_ARR_COUNTERS_DEVX_OFFSET";
    /// Attribute: [`FLOW_DEFAULT_MISS`], [`FLOW_DROP`].
    FLOW_FLAGS: u16 = 0x1009, "MLX5_IB_ATTR_CREATE_FLOW_FLAGS";
    /// On to the kernel's rules.
    FLOW_DEFAULT_MISS: u32 = 1, "MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DEFAULT_MISS";
    /// Dropped.
    FLOW_DROP: u32 = 2, "MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DROP";
    /// Method of flow actions.
    ACTION_MODIFY_HEADER: u16 = 0x1000, "MLX5_IB_METHOD_FLOW_ACTION_CREATE_MODIFY_HEADER";
    /// Method of flow actions.
    ACTION_REFORMAT: u16 = 0x1001, "MLX5_IB_METHOD_FLOW_ACTION_CREATE_PACKET_REFORMAT";
    /// Attribute.
    MODIFY_HEADER_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_CREATE_MODIFY_HEADER_HANDLE";
    /// Attribute: commands.
    MODIFY_HEADER_COMMANDS: u16 = 0x1001, "MLX5_IB_ATTR_CREATE_MODIFY_HEADER_ACTIONS_PRM";
    /// Attribute: `TABLE_*`.
    MODIFY_HEADER_TABLE: u16 = 0x1002, "MLX5_IB_ATTR_CREATE_MODIFY_HEADER_FT_TYPE";
    /// Attribute.
    REFORMAT_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_HANDLE";
    /// Attribute: `REFORMAT_*`.
    REFORMAT_TYPE: u16 = 0x1001, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_TYPE";
    /// Attribute: `TABLE_*`.
    REFORMAT_TABLE: u16 = 0x1002, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_FT_TYPE";
    /// Attribute: header.
    REFORMAT_DATA: u16 = 0x1003, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_DATA_BUF";
    /// Ingress of the NIC.
    TABLE_NIC_RX: u8 = 0, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_NIC_RX";
    /// Egress of the NIC.
    TABLE_NIC_TX: u8 = 1, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_NIC_TX";
    /// The embedded switch.
    TABLE_FDB: u8 = 2, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_FDB";
    /// Ingress of RDMA.
    TABLE_RDMA_RX: u8 = 3, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_RX";
    /// Egress of RDMA.
    TABLE_RDMA_TX: u8 = 4, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_TX";
    /// Takes the outer headers off.
    REFORMAT_L2_TUNNEL_TO_L2: u8 = 0, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2";
    /// Puts outer headers in front of a frame.
    REFORMAT_L2_TO_L2_TUNNEL: u8 = 1, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L2_TUNNEL";
    /// Takes the outer headers off and puts a link header in front.
    REFORMAT_L3_TUNNEL_TO_L2: u8 = 2, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L3_TUNNEL_TO_L2";
    /// Puts outer headers in place of the link header.
    REFORMAT_L2_TO_L3_TUNNEL: u8 = 3, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L3_TUNNEL";
}
