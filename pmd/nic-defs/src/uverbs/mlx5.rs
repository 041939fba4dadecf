//! Driver parts of mlx5 commands (`rdma/mlx5-abi.h`, `rdma/mlx5_user_ioctl_cmds.h`, `rdma/mlx5_user_ioctl_verbs.h`).

use crate::table::{constants, structures};

/// ABI version of the driver.
pub const ABI_VERSION: u64 = 1;

structures! {
    /// Structures that `tests/headers.rs` compares with rdma/mlx5-abi.h.
    STRUCTURES;

    /// Request to open a context. The library tries 32 bytes, then 24, then 16.
    struct GetContext = "struct mlx5_ib_alloc_ucontext_req_v2" {
        /// Requested number of BlueFlame registers.
        total_num_bfregs: u32,
        /// Number of these that are dedicated to one queue each.
        num_low_latency_bfregs: u32,
        /// Flags: [`CONTEXT_DEVX`].
        flags: u32,
        /// Zero.
        comp_mask: u32,
        /// 1 if the library supports CQEs with a user index.
        max_cqe_version: u8,
        /// Zero.
        reserved0: u8,
        /// Zero.
        reserved1: u16,
        /// Zero.
        reserved2: u32,
        /// Library capabilities `LIB_CAP_*`.
        lib_caps: u64,
    }

    /// Reply to [`GetContext`].
    struct GetContextReply = "struct mlx5_ib_alloc_ucontext_resp" {
        /// Number of queue pairs, a power of two.
        qp_tab_size: u32,
        /// Bytes of a BlueFlame register. Each of its two buffers has half of them.
        bf_reg_size: u32,
        /// Number of BlueFlame registers mapped at open. 0 if UAR pages are objects.
        tot_bfregs: u32,
        /// Distance between doorbell records, in bytes.
        cache_line_size: u32,
        /// Maximum bytes of a send WQE.
        max_sq_desc_sz: u16,
        /// Maximum bytes of a receive WQE.
        max_rq_desc_sz: u16,
        /// Maximum basic blocks of a send queue.
        max_send_wqebb: u32,
        /// Maximum entries of a receive queue.
        max_recv_wr: u32,
        /// Maximum entries of a shared receive queue.
        max_srq_recv_wr: u32,
        /// Number of ports.
        num_ports: u16,
        /// Flow action flags, for IPsec.
        flow_action_flags: u16,
        /// Validity of the following fields, one bit each.
        comp_mask: u32,
        /// Bytes of this reply.
        response_length: u32,
        /// 1 if CQEs carry a user index.
        cqe_version: u8,
        /// Commands with a driver part, `UHW_*`.
        cmds_supp_uhw: u8,
        /// Minimum inline header, `INLINE_*`.
        eth_min_inline: u8,
        /// Versions of the clock information page; zero: none.
        clock_info_versions: u8,
        /// Offset of the clock page.
        hca_core_clock_offset: u64,
        /// Size of a UAR page, logarithm.
        log_uar_size: u32,
        /// Number of UARs in a page.
        num_uars_per_page: u32,
        /// Number of BlueFlame registers that can be allocated later.
        num_dyn_bfregs: u32,
        /// Memory key of a region that reads as zeros.
        dump_fill_mkey: u32,
    }

    /// Reply to the allocation of a protection domain.
    struct AllocPdReply = "struct mlx5_ib_alloc_pd_resp" {
        /// Protection domain number.
        pdn: u32,
    }

    /// TCP segmentation offload (TSO) capabilities.
    struct TsoCaps = "struct mlx5_ib_tso_caps" {
        /// Maximum bytes of payload.
        max_tso: u32,
        /// Supported queue pair types, one bit each.
        supported_qpts: u32,
    }

    /// RSS capabilities.
    struct RssCaps = "struct mlx5_ib_rss_caps" {
        /// Hashed fields `RX_HASH_*`.
        rx_hash_fields_mask: u64,
        /// Hash function; 1: Toeplitz.
        rx_hash_function: u8,
        /// Zero.
        reserved: [u8; 7],
    }

    /// CQE compression capabilities.
    struct CqeCompCaps = "struct mlx5_ib_cqe_comp_caps" {
        /// Maximum number of mini CQEs in a session.
        max_num: u32,
        /// Formats `MINI_FORMAT_*`.
        supported_format: u32,
    }

    /// Packet pacing capabilities.
    struct PacingCaps = "struct mlx5_packet_pacing_caps" {
        /// Minimum rate in kbit/s.
        qp_rate_limit_min: u32,
        /// Maximum rate in kbit/s.
        qp_rate_limit_max: u32,
        /// Supported queue pair types, one bit each.
        supported_qpts: u32,
        /// 1 if bursts are supported.
        cap_flags: u8,
        /// Zero.
        reserved: [u8; 3],
    }

    /// Software parser (SWP) capabilities.
    struct SwParsingCaps = "struct mlx5_ib_sw_parsing_caps" {
        /// Offloads `SW_PARSING_*`.
        sw_parsing_offloads: u32,
        /// Supported queue pair types, one bit each.
        supported_qpts: u32,
    }

    /// Capabilities of striding receive queues.
    struct StridingCaps = "struct mlx5_ib_striding_rq_caps" {
        /// Minimum bytes of a stride, logarithm.
        min_single_stride_log_num_of_bytes: u32,
        /// Maximum bytes of a stride, logarithm.
        max_single_stride_log_num_of_bytes: u32,
        /// Minimum strides of a WQE, logarithm.
        min_single_wqe_log_num_of_strides: u32,
        /// Maximum strides of a WQE, logarithm.
        max_single_wqe_log_num_of_strides: u32,
        /// Supported queue pair types, one bit each.
        supported_qpts: u32,
        /// Zero.
        reserved: u32,
    }

    /// Capabilities of DCI streams, for InfiniBand.
    struct DciCaps = "struct mlx5_ib_dci_streams_caps" {
        /// Number of streams, logarithm.
        max_log_num_concurent: u8,
        /// Number of streams in error, logarithm.
        max_log_num_errored: u8,
    }

    /// Reply to the device query: capabilities of the device.
    struct QueryDeviceReply = "struct mlx5_ib_query_device_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this reply.
        response_length: u32,
        /// TCP segmentation offload.
        tso_caps: TsoCaps,
        /// RSS.
        rss_caps: RssCaps,
        /// CQE compression.
        cqe_comp_caps: CqeCompCaps,
        /// Packet pacing.
        packet_pacing_caps: PacingCaps,
        /// Multi-packet WQE flags `MPW_*`.
        mlx5_ib_support_multi_pkt_send_wqes: u32,
        /// Flags for 128-byte CQEs and other features.
        flags: u32,
        /// Software parser.
        sw_parsing_caps: SwParsingCaps,
        /// Striding receive queues.
        striding_rq_caps: StridingCaps,
        /// Tunnel offloads `TUNNEL_*`.
        tunnel_offloads_caps: u32,
        /// DCI streams, for InfiniBand.
        dci_streams_caps: DciCaps,
        /// Zero.
        reserved: u16,
    }

    /// Request to create a completion queue.
    struct CreateCq = "struct mlx5_ib_create_cq" {
        /// Address of the ring.
        buf_addr: u64,
        /// Address of the doorbell record.
        db_addr: u64,
        /// Bytes of a CQE: 64 or 128.
        cqe_size: u32,
        /// 1 to enable CQE compression.
        cqe_comp_en: u8,
        /// Format of compressed CQEs, one of `MINI_FORMAT_*`.
        cqe_comp_res_format: u8,
        /// Flags `CREATE_CQ_*`.
        flags: u16,
        /// UAR page of the register that arms the queue.
        uar_page_index: u16,
        /// Zero.
        reserved0: u16,
        /// Zero.
        reserved1: u32,
    }

    /// Reply to [`CreateCq`].
    struct CreateCqReply = "struct mlx5_ib_create_cq_resp" {
        /// Completion queue number.
        cqn: u32,
        /// Zero.
        reserved: u32,
    }

    /// DCI streams, for InfiniBand.
    struct DciStreams = "struct mlx5_ib_create_qp_dci_streams" {
        /// Number of streams, logarithm.
        log_num_concurent: u8,
        /// Number of streams in error, logarithm.
        log_num_errored: u8,
    }

    /// Request to create a queue pair with its own queues.
    struct CreateQp = "struct mlx5_ib_create_qp" {
        /// Address of the receive ring, or of the common ring.
        buf_addr: u64,
        /// Address of the doorbell record.
        db_addr: u64,
        /// Basic blocks of the send ring.
        sq_wqe_count: u32,
        /// Entries of the receive ring.
        rq_wqe_count: u32,
        /// Bytes of a receive entry, logarithm.
        rq_wqe_shift: u32,
        /// Flags `QP_FLAG_*`.
        flags: u32,
        /// User index that CQEs carry.
        uidx: u32,
        /// Index of the BlueFlame register, or of its UAR page.
        bfreg_index: u32,
        /// Address of the send ring of a raw-packet queue pair.
        sq_buf_addr: u64,
        /// Enhanced connection establishment (ECE) options.
        ece_options: u32,
        /// DCI streams, for InfiniBand.
        dci_streams: DciStreams,
        /// Zero.
        reserved: u16,
    }

    /// Request to create an RSS queue pair over an indirection table.
    struct CreateRssQp = "struct mlx5_ib_create_qp_rss" {
        /// Hashed fields `RX_HASH_*`.
        rx_hash_fields_mask: u64,
        /// Hash function; 1: Toeplitz.
        rx_hash_function: u8,
        /// Bytes of the key: 40.
        rx_key_len: u8,
        /// Zero.
        reserved: [u8; 6],
        /// RSS hash key.
        rx_hash_key: [u8; 128],
        /// Zero.
        comp_mask: u32,
        /// Flags `QP_FLAG_*`.
        flags: u32,
    }

    /// Reply to [`CreateQp`] and [`CreateRssQp`].
    struct CreateQpReply = "struct mlx5_ib_create_qp_resp" {
        /// Index of the BlueFlame register that the kernel chose.
        bfreg_index: u32,
        /// Enhanced connection establishment (ECE) options.
        ece_options: u32,
        /// Validity of the following numbers, `QP_REPLY_*`.
        comp_mask: u32,
        /// Number of the transport interface receive (TIR) object.
        tirn: u32,
        /// Number of the transport interface send (TIS) object.
        tisn: u32,
        /// Number of the receive queue.
        rqn: u32,
        /// Number of the send queue.
        sqn: u32,
        /// Zero.
        reserved1: u32,
        /// Address of the TIR, for software steering.
        tir_icm_addr: u64,
    }

    /// Request to create a work queue.
    struct CreateWq = "struct mlx5_ib_create_wq" {
        /// Address of the ring.
        buf_addr: u64,
        /// Address of the doorbell record.
        db_addr: u64,
        /// Entries.
        rq_wqe_count: u32,
        /// Bytes of an entry, logarithm.
        rq_wqe_shift: u32,
        /// User index that CQEs carry.
        user_index: u32,
        /// Zero.
        flags: u32,
        /// Flags: [`CREATE_WQ_STRIDING`].
        comp_mask: u32,
        /// Bytes of a stride, logarithm.
        single_stride_log_num_of_bytes: u32,
        /// Strides of an entry, logarithm.
        single_wqe_log_num_of_strides: u32,
        /// 1 to insert two bytes before each packet, which aligns the IP header.
        two_byte_shift_en: u32,
    }

    /// Reply to [`CreateWq`].
    struct CreateWqReply = "struct mlx5_ib_create_wq_resp" {
        /// Bytes of this reply.
        response_length: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request to change the state of a work queue.
    struct ModifyWq = "struct mlx5_ib_modify_wq" {
        /// Zero.
        comp_mask: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request to create a flow rule (ibv_create_flow(3)). [`FlowCounters`] follow.
    struct CreateFlow = "struct mlx5_ib_create_flow" {
        /// Number of [`FlowCounters`] that follow: one for each counter spec.
        ncounters_data: u32,
        /// Zero.
        reserved: u32,
    }

    /// Counters of a set.
    struct FlowCounters = "struct mlx5_ib_flow_counters_data" {
        /// Address of an array of [`FlowCounter`].
        counters_data: u64,
        /// Number of elements in the array.
        ncounters: u32,
        /// Zero.
        reserved: u32,
    }

    /// Counter of a set.
    struct FlowCounter = "struct mlx5_ib_flow_counters_desc" {
        /// Counted unit: [`COUNTER_PACKETS`] or [`COUNTER_BYTES`].
        description: u32,
        /// Index in the set.
        index: u32,
    }

    /// Clock information page: how the kernel converts counts of the core clock to time.
    struct ClockInfo = "struct mlx5_ib_clock_info" {
        /// Sequence number. It is odd while the kernel writes, and changes with each update.
        sign: u32,
        /// Zero.
        resv: u32,
        /// Nanoseconds at the last update.
        nsec: u64,
        /// Count at the last update.
        cycles: u64,
        /// Fraction of a nanosecond at the last update, shifted by `shift`.
        frac: u64,
        /// Nanoseconds of a tick, shifted by `shift`.
        mult: u32,
        /// Shift of `mult`.
        shift: u32,
        /// Bits of the counter.
        mask: u64,
        /// Nanoseconds within which the page must be read again.
        overflow_period: u64,
    }
}

/// Attribute of [`MATCHER_CREATE`] since rdma-core 50: port, counted from 1.
/// Older headers do not define `MLX5_IB_ATTR_FLOW_MATCHER_IB_PORT`.
pub const MATCHER_PORT: u16 = 0x1006;

constants! {
    /// Constants that `tests/headers.rs` compares with the headers of mlx5.
    CONSTANTS;
    /// Flag of [`GetContext::flags`].
    CONTEXT_DEVX: u32 = 1, "MLX5_IB_ALLOC_UCTX_DEVX";
    /// Flag of [`GetContext::lib_caps`]: UAR pages of 4 KiB.
    LIB_CAP_4K_UAR: u64 = 1, "MLX5_LIB_CAP_4K_UAR";
    /// Flag of [`GetContext::lib_caps`]: UAR pages as objects.
    LIB_CAP_DYN_UAR: u64 = 2, "MLX5_LIB_CAP_DYN_UAR";
    /// Flag of [`GetContextReply::cmds_supp_uhw`]: the device query has a driver part.
    UHW_QUERY_DEVICE: u8 = 1, "MLX5_USER_CMDS_SUPP_UHW_QUERY_DEVICE";
    /// Flag of [`GetContextReply::cmds_supp_uhw`]: address handles have a driver part.
    UHW_CREATE_AH: u8 = 2, "MLX5_USER_CMDS_SUPP_UHW_CREATE_AH";
    /// Value of [`GetContextReply::eth_min_inline`]: not specified.
    INLINE_NOT_SAID: u8 = 0, "MLX5_USER_INLINE_MODE_NA";
    /// Value of [`GetContextReply::eth_min_inline`]: no inline header is required.
    INLINE_NONE: u8 = 1, "MLX5_USER_INLINE_MODE_NONE";
    /// Value of [`GetContextReply::eth_min_inline`]: the Ethernet header must be inline.
    INLINE_L2: u8 = 2, "MLX5_USER_INLINE_MODE_L2";
    /// Value of [`GetContextReply::eth_min_inline`]: the IP header must be inline.
    INLINE_IP: u8 = 3, "MLX5_USER_INLINE_MODE_IP";
    /// Value of [`GetContextReply::eth_min_inline`]: the TCP or UDP header must be inline.
    INLINE_TCP_UDP: u8 = 4, "MLX5_USER_INLINE_MODE_TCP_UDP";
    /// Flag of [`QueryDeviceReply::mlx5_ib_support_multi_pkt_send_wqes`]: allowed.
    MPW_ALLOWED: u32 = 2, "MLX5_IB_ALLOW_MPW";
    /// Flag of [`QueryDeviceReply::mlx5_ib_support_multi_pkt_send_wqes`]: enhanced.
    MPW_ENHANCED: u32 = 4, "MLX5_IB_SUPPORT_EMPW";
    /// Flag of [`SwParsingCaps::sw_parsing_offloads`].
    SW_PARSING: u32 = 1, "MLX5_IB_SW_PARSING";
    /// Flag of [`SwParsingCaps::sw_parsing_offloads`]: checksums.
    SW_PARSING_CSUM: u32 = 2, "MLX5_IB_SW_PARSING_CSUM";
    /// Flag of [`SwParsingCaps::sw_parsing_offloads`]: segmentation.
    SW_PARSING_LSO: u32 = 4, "MLX5_IB_SW_PARSING_LSO";
    /// Flag of [`QueryDeviceReply::tunnel_offloads_caps`]: VXLAN.
    TUNNEL_VXLAN: u32 = 1, "MLX5_IB_TUNNELED_OFFLOADS_VXLAN";
    /// Flag of [`QueryDeviceReply::tunnel_offloads_caps`]: GRE.
    TUNNEL_GRE: u32 = 2, "MLX5_IB_TUNNELED_OFFLOADS_GRE";
    /// Flag of [`QueryDeviceReply::tunnel_offloads_caps`]: GENEVE.
    TUNNEL_GENEVE: u32 = 4, "MLX5_IB_TUNNELED_OFFLOADS_GENEVE";
    /// Flag of [`GetContextReply::comp_mask`]: the kernel maps the core clock.
    CONTEXT_REPLY_CORE_CLOCK: u32 = 1, "MLX5_IB_ALLOC_UCONTEXT_RESP_MASK_CORE_CLOCK_OFFSET";
    /// Command in the offset of a mapping: page of the core clock.
    MMAP_CORE_CLOCK: u64 = 5, "MLX5_IB_MMAP_CORE_CLOCK";
    /// Command in the offset of a mapping: [`ClockInfo`].
    MMAP_CLOCK_INFO: u64 = 7, "MLX5_IB_MMAP_CLOCK_INFO";
    /// Bit of [`GetContextReply::clock_info_versions`], and index of its mapping.
    CLOCK_INFO_V1: u64 = 0, "MLX5_IB_CLOCK_INFO_V1";
    /// Flag of [`CreateCq::flags`]: `uar_page_index` is valid.
    CREATE_CQ_UAR_PAGE: u16 = 2, "MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX";
    /// Flag of [`CreateCq::flags`]: timestamps in seconds and nanoseconds.
    CREATE_CQ_REAL_TIME: u16 = 4, "MLX5_IB_CREATE_CQ_FLAGS_REAL_TIME_TS";
    /// Flag of [`CreateQp::flags`]: small packets may be scattered to the CQE.
    QP_FLAG_SCATTER_CQE: u32 = 2, "MLX5_QP_FLAG_SCATTER_CQE";
    /// Flag of [`CreateQp::flags`]: inner headers of tunnelled packets are parsed.
    QP_FLAG_TUNNEL: u32 = 4, "MLX5_QP_FLAG_TUNNEL_OFFLOADS";
    /// Flag of [`CreateRssQp::flags`]: receive unicast packets that the port itself sends.
    QP_FLAG_LOOPBACK_UC: u32 = 0x40, "MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_UC";
    /// Flag of [`CreateRssQp::flags`]: receive multicast packets that the port itself sends.
    QP_FLAG_LOOPBACK_MC: u32 = 0x80, "MLX5_QP_FLAG_TIR_ALLOW_SELF_LB_MC";
    /// Flag of [`CreateQp::flags`]: `bfreg_index` is a register index.
    QP_FLAG_BFREG_INDEX: u32 = 8, "MLX5_QP_FLAG_BFREG_INDEX";
    /// Flag of [`CreateQp::flags`]: `bfreg_index` is a UAR page index.
    QP_FLAG_UAR_PAGE_INDEX: u32 = 0x400, "MLX5_QP_FLAG_UAR_PAGE_INDEX";
    /// Flag of [`CreateQpReply::comp_mask`].
    QP_REPLY_TIRN: u32 = 1, "MLX5_IB_CREATE_QP_RESP_MASK_TIRN";
    /// Flag of [`CreateQpReply::comp_mask`].
    QP_REPLY_TISN: u32 = 2, "MLX5_IB_CREATE_QP_RESP_MASK_TISN";
    /// Flag of [`CreateQpReply::comp_mask`].
    QP_REPLY_RQN: u32 = 4, "MLX5_IB_CREATE_QP_RESP_MASK_RQN";
    /// Flag of [`CreateQpReply::comp_mask`].
    QP_REPLY_SQN: u32 = 8, "MLX5_IB_CREATE_QP_RESP_MASK_SQN";
    /// Flag of [`CreateWq::comp_mask`].
    CREATE_WQ_STRIDING: u32 = 1, "MLX5_IB_CREATE_WQ_STRIDING_RQ";
    /// Hashed field: IPsec SPI.
    RX_HASH_IPSEC_SPI: u64 = 0x100, "MLX5_RX_HASH_IPSEC_SPI";
    /// Hashed field modifier: inner headers.
    RX_HASH_INNER: u64 = 0x8000_0000, "MLX5_RX_HASH_INNER";

    /// Object type: DevX, for firmware commands.
    OBJECT_DEVX: u16 = 0x1000, "MLX5_IB_OBJECT_DEVX";
    /// Object type: firmware object.
    OBJECT_DEVX_OBJ: u16 = 0x1001, "MLX5_IB_OBJECT_DEVX_OBJ";
    /// Object type: memory for firmware commands.
    OBJECT_DEVX_UMEM: u16 = 0x1002, "MLX5_IB_OBJECT_DEVX_UMEM";
    /// Object type: flow matcher.
    OBJECT_FLOW_MATCHER: u16 = 0x1003, "MLX5_IB_OBJECT_FLOW_MATCHER";
    /// Object type: descriptor for asynchronous firmware commands.
    OBJECT_DEVX_ASYNC_CMD_FD: u16 = 0x1004, "MLX5_IB_OBJECT_DEVX_ASYNC_CMD_FD";
    /// Object type: VAR, a virtio-net doorbell region.
    OBJECT_VAR: u16 = 0x1006, "MLX5_IB_OBJECT_VAR";
    /// Object type: UAR, a doorbell page.
    OBJECT_UAR: u16 = 0x1008, "MLX5_IB_OBJECT_UAR";
    /// Value of [`FlowCounter::description`].
    COUNTER_PACKETS: u32 = 0, "IBV_COUNTER_PACKETS";
    /// Value of [`FlowCounter::description`].
    COUNTER_BYTES: u32 = 1, "IBV_COUNTER_BYTES";
    /// Method of firmware objects.
    DEVX_OBJ_CREATE: u16 = 0x1000, "MLX5_IB_METHOD_DEVX_OBJ_CREATE";
    /// Method of firmware objects.
    DEVX_OBJ_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_DEVX_OBJ_DESTROY";
    /// Method of firmware objects.
    DEVX_OBJ_MODIFY: u16 = 0x1002, "MLX5_IB_METHOD_DEVX_OBJ_MODIFY";
    /// Method of firmware objects.
    DEVX_OBJ_QUERY: u16 = 0x1003, "MLX5_IB_METHOD_DEVX_OBJ_QUERY";
    /// Attribute of every method of firmware objects.
    DEVX_OBJ_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE";
    /// Attribute: command.
    DEVX_OBJ_IN: u16 = 0x1001, "MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN";
    /// Attribute: output of the command.
    DEVX_OBJ_OUT: u16 = 0x1002, "MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT";
    /// Method of the DevX object: general command.
    DEVX_OTHER: u16 = 0x1000, "MLX5_IB_METHOD_DEVX_OTHER";
    /// Attribute: command.
    DEVX_OTHER_IN: u16 = 0x1000, "MLX5_IB_ATTR_DEVX_OTHER_CMD_IN";
    /// Attribute: output of the command.
    DEVX_OTHER_OUT: u16 = 0x1001, "MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT";
    /// Method of the DevX object: event queue of a completion vector.
    DEVX_QUERY_EQN: u16 = 0x1002, "MLX5_IB_METHOD_DEVX_QUERY_EQN";
    /// Attribute of [`DEVX_QUERY_EQN`]: completion vector.
    DEVX_QUERY_EQN_VECTOR: u16 = 0x1000, "MLX5_IB_ATTR_DEVX_QUERY_EQN_USER_VEC";
    /// Attribute of [`DEVX_QUERY_EQN`]: number of the event queue.
    DEVX_QUERY_EQN_NUMBER: u16 = 0x1001, "MLX5_IB_ATTR_DEVX_QUERY_EQN_DEV_EQN";
    /// Method of [`OBJECT_DEVX_UMEM`].
    UMEM_REG: u16 = 0x1000, "MLX5_IB_METHOD_DEVX_UMEM_REG";
    /// Method of [`OBJECT_DEVX_UMEM`].
    UMEM_DEREG: u16 = 0x1001, "MLX5_IB_METHOD_DEVX_UMEM_DEREG";
    /// Attribute of [`UMEM_REG`].
    UMEM_REG_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_DEVX_UMEM_REG_HANDLE";
    /// Attribute of [`UMEM_REG`].
    UMEM_REG_ADDRESS: u16 = 0x1001, "MLX5_IB_ATTR_DEVX_UMEM_REG_ADDR";
    /// Attribute of [`UMEM_REG`]: bytes.
    UMEM_REG_LENGTH: u16 = 0x1002, "MLX5_IB_ATTR_DEVX_UMEM_REG_LEN";
    /// Attribute of [`UMEM_REG`]: number in firmware commands.
    UMEM_REG_NUMBER: u16 = 0x1004, "MLX5_IB_ATTR_DEVX_UMEM_REG_OUT_ID";
    /// Attribute of [`UMEM_DEREG`].
    UMEM_DEREG_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_DEVX_UMEM_DEREG_HANDLE";
    /// Method of UAR objects.
    UAR_ALLOC: u16 = 0x1000, "MLX5_IB_METHOD_UAR_OBJ_ALLOC";
    /// Method of UAR objects.
    UAR_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_UAR_OBJ_DESTROY";
    /// Attribute of [`UAR_ALLOC`].
    UAR_ALLOC_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE";
    /// Attribute of [`UAR_ALLOC`]: [`UAR_BLUE_FLAME`] or [`UAR_NON_CACHED`].
    UAR_ALLOC_TYPE: u16 = 0x1001, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_TYPE";
    /// Attribute of [`UAR_ALLOC`].
    UAR_ALLOC_OFFSET: u16 = 0x1002, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET";
    /// Attribute of [`UAR_ALLOC`].
    UAR_ALLOC_LENGTH: u16 = 0x1003, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH";
    /// Attribute of [`UAR_ALLOC`].
    UAR_ALLOC_PAGE_ID: u16 = 0x1004, "MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID";
    /// Attribute of [`UAR_DESTROY`].
    UAR_DESTROY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_UAR_OBJ_DESTROY_HANDLE";
    /// UAR type for BlueFlame: write-combining.
    UAR_BLUE_FLAME: u32 = 0, "MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF";
    /// UAR type: uncached, not write-combining.
    UAR_NON_CACHED: u32 = 1, "MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC";
    /// Method of VAR objects.
    VAR_ALLOC: u16 = 0x1000, "MLX5_IB_METHOD_VAR_OBJ_ALLOC";
    /// Method of VAR objects.
    VAR_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_VAR_OBJ_DESTROY";
    /// Attribute of [`VAR_ALLOC`].
    VAR_ALLOC_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_HANDLE";
    /// Attribute of [`VAR_ALLOC`].
    VAR_ALLOC_OFFSET: u16 = 0x1001, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_OFFSET";
    /// Attribute of [`VAR_ALLOC`].
    VAR_ALLOC_LENGTH: u16 = 0x1002, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_MMAP_LENGTH";
    /// Attribute of [`VAR_ALLOC`].
    VAR_ALLOC_PAGE_ID: u16 = 0x1003, "MLX5_IB_ATTR_VAR_OBJ_ALLOC_PAGE_ID";
    /// Attribute of [`VAR_DESTROY`].
    VAR_DESTROY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_VAR_OBJ_DESTROY_HANDLE";
    /// Attribute of the context query that an importing process sends: context reply.
    QUERY_CONTEXT_REPLY: u16 = 0x1000, "MLX5_IB_ATTR_QUERY_CONTEXT_RESP_UCTX";
    /// Method of protection domains.
    PD_QUERY: u16 = 0x1000, "MLX5_IB_METHOD_PD_QUERY";
    /// Attribute of [`PD_QUERY`].
    PD_QUERY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_QUERY_PD_HANDLE";
    /// Attribute of [`PD_QUERY`].
    PD_QUERY_PDN: u16 = 0x1001, "MLX5_IB_ATTR_QUERY_PD_RESP_PDN";
    /// Method of flow matchers.
    MATCHER_CREATE: u16 = 0x1000, "MLX5_IB_METHOD_FLOW_MATCHER_CREATE";
    /// Method of flow matchers.
    MATCHER_DESTROY: u16 = 0x1001, "MLX5_IB_METHOD_FLOW_MATCHER_DESTROY";
    /// Attribute of [`MATCHER_CREATE`].
    MATCHER_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_FLOW_MATCHER_CREATE_HANDLE";
    /// Attribute of [`MATCHER_CREATE`]: match parameters of the mask.
    MATCHER_MASK: u16 = 0x1001, "MLX5_IB_ATTR_FLOW_MATCHER_MATCH_MASK";
    /// Attribute of [`MATCHER_CREATE`]: enumeration with the priority as payload.
    MATCHER_FLOW_TYPE: u16 = 0x1002, "MLX5_IB_ATTR_FLOW_MATCHER_FLOW_TYPE";
    /// Attribute of [`MATCHER_CREATE`]: criteria `CRITERIA_*`.
    MATCHER_CRITERIA: u16 = 0x1003, "MLX5_IB_ATTR_FLOW_MATCHER_MATCH_CRITERIA";
    /// Attribute of [`MATCHER_CREATE`].
    MATCHER_FLAGS: u16 = 0x1004, "MLX5_IB_ATTR_FLOW_MATCHER_FLOW_FLAGS";
    /// Attribute: table type `TABLE_*`.
    MATCHER_TABLE: u16 = 0x1005, "MLX5_IB_ATTR_FLOW_MATCHER_FT_TYPE";
    /// Attribute of [`MATCHER_DESTROY`].
    MATCHER_DESTROY_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_FLOW_MATCHER_DESTROY_HANDLE";
    /// Method of flow objects.
    FLOW_REMOVE: u16 = 0x1001, "MLX5_IB_METHOD_DESTROY_FLOW";
    /// Method of flow objects.
    FLOW_CREATE: u16 = 0x1000, "MLX5_IB_METHOD_CREATE_FLOW";
    /// Attribute of [`FLOW_CREATE`].
    FLOW_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_CREATE_FLOW_HANDLE";
    /// Attribute of [`FLOW_CREATE`]: match parameters of the value.
    FLOW_VALUE: u16 = 0x1001, "MLX5_IB_ATTR_CREATE_FLOW_MATCH_VALUE";
    /// Attribute of [`FLOW_CREATE`].
    FLOW_DEST_QP: u16 = 0x1002, "MLX5_IB_ATTR_CREATE_FLOW_DEST_QP";
    /// Attribute of [`FLOW_CREATE`].
    FLOW_DEST_DEVX: u16 = 0x1003, "MLX5_IB_ATTR_CREATE_FLOW_DEST_DEVX";
    /// Attribute of [`FLOW_CREATE`].
    FLOW_MATCHER: u16 = 0x1004, "MLX5_IB_ATTR_CREATE_FLOW_MATCHER";
    /// Attribute of [`FLOW_CREATE`]: handles of actions.
    FLOW_ACTIONS: u16 = 0x1005, "MLX5_IB_ATTR_CREATE_FLOW_ARR_FLOW_ACTIONS";
    /// Attribute of [`FLOW_CREATE`]: tag of 24 bits.
    FLOW_TAG: u16 = 0x1006, "MLX5_IB_ATTR_CREATE_FLOW_TAG";
    /// Attribute of [`FLOW_CREATE`]: handles of counters.
    FLOW_COUNTERS: u16 = 0x1007, "MLX5_IB_ATTR_CREATE_FLOW_ARR_COUNTERS_DEVX";
    /// Attribute of [`FLOW_CREATE`].
    FLOW_COUNTERS_OFFSET: u16 = 0x1008, "MLX5_IB_ATTR_CREATE_FLOW_ARR_COUNTERS_DEVX_OFFSET";
    /// Attribute of [`FLOW_CREATE`]: flags [`FLOW_DEFAULT_MISS`], [`FLOW_DROP`].
    FLOW_FLAGS: u16 = 0x1009, "MLX5_IB_ATTR_CREATE_FLOW_FLAGS";
    /// Flag of [`FLOW_FLAGS`]: packets continue to the kernel's rules.
    FLOW_DEFAULT_MISS: u32 = 1, "MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DEFAULT_MISS";
    /// Flag of [`FLOW_FLAGS`]: packets are dropped.
    FLOW_DROP: u32 = 2, "MLX5_IB_ATTR_CREATE_FLOW_FLAGS_DROP";
    /// Method of flow actions.
    ACTION_MODIFY_HEADER: u16 = 0x1000, "MLX5_IB_METHOD_FLOW_ACTION_CREATE_MODIFY_HEADER";
    /// Method of flow actions.
    ACTION_REFORMAT: u16 = 0x1001, "MLX5_IB_METHOD_FLOW_ACTION_CREATE_PACKET_REFORMAT";
    /// Attribute of [`ACTION_MODIFY_HEADER`].
    MODIFY_HEADER_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_CREATE_MODIFY_HEADER_HANDLE";
    /// Attribute of [`ACTION_MODIFY_HEADER`]: commands.
    MODIFY_HEADER_COMMANDS: u16 = 0x1001, "MLX5_IB_ATTR_CREATE_MODIFY_HEADER_ACTIONS_PRM";
    /// Attribute: table type `TABLE_*`.
    MODIFY_HEADER_TABLE: u16 = 0x1002, "MLX5_IB_ATTR_CREATE_MODIFY_HEADER_FT_TYPE";
    /// Attribute of [`ACTION_REFORMAT`].
    REFORMAT_HANDLE: u16 = 0x1000, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_HANDLE";
    /// Attribute of [`ACTION_REFORMAT`]: type `REFORMAT_*`.
    REFORMAT_TYPE: u16 = 0x1001, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_TYPE";
    /// Attribute: table type `TABLE_*`.
    REFORMAT_TABLE: u16 = 0x1002, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_FT_TYPE";
    /// Attribute of [`ACTION_REFORMAT`]: header bytes.
    REFORMAT_DATA: u16 = 0x1003, "MLX5_IB_ATTR_CREATE_PACKET_REFORMAT_DATA_BUF";
    /// Table type: ingress of the NIC.
    TABLE_NIC_RX: u8 = 0, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_NIC_RX";
    /// Table type: egress of the NIC.
    TABLE_NIC_TX: u8 = 1, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_NIC_TX";
    /// Table type: embedded switch.
    TABLE_FDB: u8 = 2, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_FDB";
    /// Table type: RDMA ingress.
    TABLE_RDMA_RX: u8 = 3, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_RX";
    /// Table type: RDMA egress.
    TABLE_RDMA_TX: u8 = 4, "MLX5_IB_UAPI_FLOW_TABLE_TYPE_RDMA_TX";
    /// Reformat type: removes the outer headers.
    REFORMAT_L2_TUNNEL_TO_L2: u8 = 0, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2";
    /// Reformat type: inserts outer headers before the frame.
    REFORMAT_L2_TO_L2_TUNNEL: u8 = 1, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L2_TUNNEL";
    /// Reformat type: removes the outer headers and inserts a link-layer header.
    REFORMAT_L3_TUNNEL_TO_L2: u8 = 2, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L3_TUNNEL_TO_L2";
    /// Reformat type: replaces the link-layer header with outer headers.
    REFORMAT_L2_TO_L3_TUNNEL: u8 = 3, "MLX5_IB_UAPI_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L3_TUNNEL";
}
