//! Commands in the format of `write(2)` (`rdma/ib_user_verbs.h`).
//!
//! - Plain command: [`CommandHeader`], core structure, driver part. Lengths are in words of 4 bytes and include the
//!   header.
//! - Extended command ([`EXTENDED`]): [`CommandHeader`], [`ExtendedHeader`], core structure, driver part. Lengths of
//!   both parts are in words of 8 bytes and exclude the headers.

use crate::table::{constants, structures};

/// Flag of extended commands.
pub const EXTENDED: u32 = 0x8000_0000;

constants! {
    /// Constants that `tests/headers.rs` compares with rdma/ib_user_verbs.h.
    CONSTANTS;
    /// Command: opens the context.
    GET_CONTEXT: u32 = 0, "IB_USER_VERBS_CMD_GET_CONTEXT";
    /// Command, plain or extended: queries the limits of the device.
    QUERY_DEVICE: u32 = 1, "IB_USER_VERBS_CMD_QUERY_DEVICE";
    /// Command: queries the state of a port.
    QUERY_PORT: u32 = 2, "IB_USER_VERBS_CMD_QUERY_PORT";
    /// Command: allocates a protection domain.
    ALLOC_PD: u32 = 3, "IB_USER_VERBS_CMD_ALLOC_PD";
    /// Command: frees a protection domain.
    DEALLOC_PD: u32 = 4, "IB_USER_VERBS_CMD_DEALLOC_PD";
    /// Command: registers a memory region.
    REG_MR: u32 = 9, "IB_USER_VERBS_CMD_REG_MR";
    /// Command: deregisters a memory region.
    DEREG_MR: u32 = 13, "IB_USER_VERBS_CMD_DEREG_MR";
    /// Command: creates a completion channel.
    CREATE_COMP_CHANNEL: u32 = 17, "IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL";
    /// Command, plain or extended: creates a completion queue.
    CREATE_CQ: u32 = 18, "IB_USER_VERBS_CMD_CREATE_CQ";
    /// Command: destroys a completion queue.
    DESTROY_CQ: u32 = 20, "IB_USER_VERBS_CMD_DESTROY_CQ";
    /// Command: requests an event at the next completion.
    REQ_NOTIFY_CQ: u32 = 23, "IB_USER_VERBS_CMD_REQ_NOTIFY_CQ";
    /// Command, plain or extended: creates a queue pair.
    CREATE_QP: u32 = 24, "IB_USER_VERBS_CMD_CREATE_QP";
    /// Command: queries the state of a queue pair.
    QUERY_QP: u32 = 25, "IB_USER_VERBS_CMD_QUERY_QP";
    /// Command, plain or extended: changes the state of a queue pair.
    MODIFY_QP: u32 = 26, "IB_USER_VERBS_CMD_MODIFY_QP";
    /// Command: destroys a queue pair.
    DESTROY_QP: u32 = 27, "IB_USER_VERBS_CMD_DESTROY_QP";
    /// Extended command: creates a flow rule.
    CREATE_FLOW: u32 = 50, "IB_USER_VERBS_EX_CMD_CREATE_FLOW";
    /// Extended command: destroys a flow rule.
    DESTROY_FLOW: u32 = 51, "IB_USER_VERBS_EX_CMD_DESTROY_FLOW";
    /// Extended command: creates a work queue.
    CREATE_WQ: u32 = 52, "IB_USER_VERBS_EX_CMD_CREATE_WQ";
    /// Extended command: changes the state of a work queue.
    MODIFY_WQ: u32 = 53, "IB_USER_VERBS_EX_CMD_MODIFY_WQ";
    /// Extended command: destroys a work queue.
    DESTROY_WQ: u32 = 54, "IB_USER_VERBS_EX_CMD_DESTROY_WQ";
    /// Extended command: creates an indirection table.
    CREATE_RWQ_IND_TBL: u32 = 55, "IB_USER_VERBS_EX_CMD_CREATE_RWQ_IND_TBL";
    /// Extended command: destroys an indirection table.
    DESTROY_RWQ_IND_TBL: u32 = 56, "IB_USER_VERBS_EX_CMD_DESTROY_RWQ_IND_TBL";
    /// Maximum size of an indirection table, as a power of two.
    MAX_LOG_IND_TBL_SIZE: u32 = 13, "IB_USER_VERBS_MAX_LOG_IND_TBL_SIZE";
    /// Flag of [`ExtendedCreateQp::comp_mask`]: the request contains an indirection table.
    CREATE_QP_MASK_IND_TABLE: u32 = 1, "IB_UVERBS_CREATE_QP_MASK_IND_TABLE";
}

structures! {
    /// Structures that `tests/headers.rs` compares with rdma/ib_user_verbs.h.
    STRUCTURES;

    /// Header of every command.
    struct CommandHeader = "struct ib_uverbs_cmd_hdr" {
        /// Command number, ORed with [`EXTENDED`] for an extended command.
        command: u32,
        /// Length of the request, in words (see the module).
        in_words: u16,
        /// Length of the reply, in words (see the module).
        out_words: u16,
    }

    /// Second header of an extended command.
    struct ExtendedHeader = "struct ib_uverbs_ex_cmd_hdr" {
        /// Address of the reply.
        response: u64,
        /// Length of the driver part of the request, in words of 8 bytes.
        provider_in_words: u16,
        /// Length of the driver part of the reply, in words of 8 bytes.
        provider_out_words: u16,
        /// Zero.
        cmd_hdr_reserved: u32,
    }

    /// Record read from the asynchronous event descriptor.
    struct AsyncEvent = "struct ib_uverbs_async_event_desc" {
        /// User handle of the object, or the port.
        element: u64,
        /// `enum ibv_event_type`.
        event_type: u32,
        /// Zero.
        reserved: u32,
    }

    /// Record read from a completion channel.
    struct CompletionEvent = "struct ib_uverbs_comp_event_desc" {
        /// User handle of the completion queue.
        cq_handle: u64,
    }

    /// Request of [`GET_CONTEXT`].
    struct GetContext = "struct ib_uverbs_get_context" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply to [`GET_CONTEXT`].
    struct GetContextReply = "struct ib_uverbs_get_context_resp" {
        /// File descriptor of asynchronous events.
        async_fd: u32,
        /// Number of completion vectors.
        num_comp_vectors: u32,
    }

    /// Request of [`QUERY_DEVICE`].
    struct QueryDevice = "struct ib_uverbs_query_device" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply to [`QUERY_DEVICE`].
    #[allow(missing_docs, reason = "the names are those of ibv_device_attr, ibv_query_device(3)")]
    struct QueryDeviceReply = "struct ib_uverbs_query_device_resp" {
        fw_ver: u64,
        node_guid: [u8; 8],
        sys_image_guid: [u8; 8],
        max_mr_size: u64,
        page_size_cap: u64,
        vendor_id: u32,
        vendor_part_id: u32,
        hw_ver: u32,
        max_qp: u32,
        max_qp_wr: u32,
        device_cap_flags: u32,
        max_sge: u32,
        max_sge_rd: u32,
        max_cq: u32,
        max_cqe: u32,
        max_mr: u32,
        max_pd: u32,
        max_qp_rd_atom: u32,
        max_ee_rd_atom: u32,
        max_res_rd_atom: u32,
        max_qp_init_rd_atom: u32,
        max_ee_init_rd_atom: u32,
        atomic_cap: u32,
        max_ee: u32,
        max_rdd: u32,
        max_mw: u32,
        max_raw_ipv6_qp: u32,
        max_raw_ethy_qp: u32,
        max_mcast_grp: u32,
        max_mcast_qp_attach: u32,
        max_total_mcast_qp_attach: u32,
        max_ah: u32,
        max_fmr: u32,
        max_map_per_fmr: u32,
        max_srq: u32,
        max_srq_wr: u32,
        max_srq_sge: u32,
        max_pkeys: u16,
        local_ca_ack_delay: u8,
        phys_port_cnt: u8,
        reserved: [u8; 4],
    }

    /// Extended request of [`QUERY_DEVICE`].
    struct ExtendedQueryDevice = "struct ib_uverbs_ex_query_device" {
        /// Zero.
        comp_mask: u32,
        /// Zero.
        reserved: u32,
    }

    /// Extended reply to [`QUERY_DEVICE`]. Fields beyond `response_length` count as zero.
    #[allow(missing_docs, reason = "the names are those of ibv_device_attr_ex, ibv_query_device_ex(3)")]
    struct ExtendedQueryDeviceReply = "struct ib_uverbs_ex_query_device_resp" {
        base: QueryDeviceReply,
        comp_mask: u32,
        response_length: u32,
        odp_general_caps = "odp_caps.general_caps": u64,
        odp_rc_caps = "odp_caps.per_transport_caps.rc_odp_caps": u32,
        odp_uc_caps = "odp_caps.per_transport_caps.uc_odp_caps": u32,
        odp_ud_caps = "odp_caps.per_transport_caps.ud_odp_caps": u32,
        odp_reserved = "odp_caps.reserved": u32,
        timestamp_mask: u64,
        hca_core_clock: u64,
        device_cap_flags_ex: u64,
        rss_supported_qpts = "rss_caps.supported_qpts": u32,
        rss_max_rwq_indirection_tables = "rss_caps.max_rwq_indirection_tables": u32,
        rss_max_rwq_indirection_table_size = "rss_caps.max_rwq_indirection_table_size": u32,
        rss_reserved = "rss_caps.reserved": u32,
        max_wq_type_rq: u32,
        raw_packet_caps: u32,
        tm_caps: [u32; 6],
        cq_moderation_max_count = "cq_moderation_caps.max_cq_moderation_count": u16,
        cq_moderation_max_period = "cq_moderation_caps.max_cq_moderation_period": u16,
        cq_moderation_reserved = "cq_moderation_caps.reserved": u32,
        max_dm_size: u64,
        xrc_odp_caps: u32,
        reserved: u32,
    }

    /// Request of [`QUERY_PORT`].
    struct QueryPort = "struct ib_uverbs_query_port" {
        /// Address of the reply.
        response: u64,
        /// Port number, counted from 1.
        port_num: u8,
        /// Zero.
        reserved: [u8; 7],
    }

    /// Reply to [`QUERY_PORT`].
    #[allow(missing_docs, reason = "the names are those of ibv_port_attr, ibv_query_port(3)")]
    struct QueryPortReply = "struct ib_uverbs_query_port_resp" {
        port_cap_flags: u32,
        max_msg_sz: u32,
        bad_pkey_cntr: u32,
        qkey_viol_cntr: u32,
        gid_tbl_len: u32,
        pkey_tbl_len: u16,
        lid: u16,
        sm_lid: u16,
        state: u8,
        max_mtu: u8,
        active_mtu: u8,
        lmc: u8,
        max_vl_num: u8,
        sm_sl: u8,
        subnet_timeout: u8,
        init_type_reply: u8,
        active_width: u8,
        active_speed: u8,
        phys_state: u8,
        link_layer: u8,
        flags: u8,
        reserved: u8,
    }

    /// Request of [`ALLOC_PD`].
    struct AllocPd = "struct ib_uverbs_alloc_pd" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply to [`ALLOC_PD`].
    struct AllocPdReply = "struct ib_uverbs_alloc_pd_resp" {
        /// Handle.
        pd_handle: u32,
    }

    /// Request of [`DEALLOC_PD`].
    struct DeallocPd = "struct ib_uverbs_dealloc_pd" {
        /// Handle.
        pd_handle: u32,
    }

    /// Request of [`REG_MR`].
    struct RegMr = "struct ib_uverbs_reg_mr" {
        /// Address of the reply.
        response: u64,
        /// Start address in the process.
        start: u64,
        /// Bytes.
        length: u64,
        /// Address that the device uses for `start`.
        hca_va: u64,
        /// Handle.
        pd_handle: u32,
        /// `ACCESS_*`.
        access_flags: u32,
    }

    /// Reply to [`REG_MR`].
    struct RegMrReply = "struct ib_uverbs_reg_mr_resp" {
        /// Handle.
        mr_handle: u32,
        /// Key for local access.
        lkey: u32,
        /// Key for remote access.
        rkey: u32,
    }

    /// Request of [`DEREG_MR`].
    struct DeregMr = "struct ib_uverbs_dereg_mr" {
        /// Handle.
        mr_handle: u32,
    }

    /// Request of [`CREATE_COMP_CHANNEL`].
    struct CreateCompChannel = "struct ib_uverbs_create_comp_channel" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply to [`CREATE_COMP_CHANNEL`].
    struct CreateCompChannelReply = "struct ib_uverbs_create_comp_channel_resp" {
        /// File descriptor.
        fd: u32,
    }

    /// Request of [`CREATE_CQ`].
    struct CreateCq = "struct ib_uverbs_create_cq" {
        /// Address of the reply.
        response: u64,
        /// Value returned in events.
        user_handle: u64,
        /// Entries.
        cqe: u32,
        /// Completion vector.
        comp_vector: u32,
        /// File descriptor of the completion channel, or -1.
        comp_channel: i32,
        /// Zero.
        reserved: u32,
    }

    /// Reply to [`CREATE_CQ`].
    struct CreateCqReply = "struct ib_uverbs_create_cq_resp" {
        /// Handle.
        cq_handle: u32,
        /// Entries.
        cqe: u32,
    }

    /// Extended request of [`CREATE_CQ`].
    struct ExtendedCreateCq = "struct ib_uverbs_ex_create_cq" {
        /// Value returned in events.
        user_handle: u64,
        /// Entries.
        cqe: u32,
        /// Completion vector.
        comp_vector: u32,
        /// File descriptor of the completion channel, or -1.
        comp_channel: i32,
        /// Zero.
        comp_mask: u32,
        /// Bit 0: timestamps. Bit 1: ignore overruns.
        flags: u32,
        /// Zero.
        reserved: u32,
    }

    /// Extended reply to [`CREATE_CQ`].
    struct ExtendedCreateCqReply = "struct ib_uverbs_ex_create_cq_resp" {
        /// Reply of the plain command.
        base: CreateCqReply,
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
    }

    /// Request of [`DESTROY_CQ`].
    struct DestroyCq = "struct ib_uverbs_destroy_cq" {
        /// Address of the reply.
        response: u64,
        /// Handle.
        cq_handle: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply to [`DESTROY_CQ`]. The library waits until it has acknowledged this many events.
    struct DestroyCqReply = "struct ib_uverbs_destroy_cq_resp" {
        /// Number of events read from the channel.
        comp_events_reported: u32,
        /// Number of events read from the asynchronous event descriptor.
        async_events_reported: u32,
    }

    /// Request of [`CREATE_QP`].
    struct CreateQp = "struct ib_uverbs_create_qp" {
        /// Address of the reply.
        response: u64,
        /// Value returned in events.
        user_handle: u64,
        /// Handle.
        pd_handle: u32,
        /// Handle.
        send_cq_handle: u32,
        /// Handle.
        recv_cq_handle: u32,
        /// Handle of the shared receive queue, valid with `is_srq`.
        srq_handle: u32,
        /// Maximum outstanding work requests.
        max_send_wr: u32,
        /// Maximum outstanding work requests.
        max_recv_wr: u32,
        /// Scatter-gather entries of each work request.
        max_send_sge: u32,
        /// Scatter-gather entries of each work request.
        max_recv_sge: u32,
        /// Bytes.
        max_inline_data: u32,
        /// 1 if every send request generates a completion.
        sq_sig_all: u8,
        /// `QPT_*`.
        qp_type: u8,
        /// 1 if the queue pair uses a shared receive queue.
        is_srq: u8,
        /// Zero.
        reserved: u8,
    }

    /// Reply to [`CREATE_QP`].
    struct CreateQpReply = "struct ib_uverbs_create_qp_resp" {
        /// Handle.
        qp_handle: u32,
        /// Queue pair number.
        qpn: u32,
        /// Granted value.
        max_send_wr: u32,
        /// Granted value.
        max_recv_wr: u32,
        /// Granted value.
        max_send_sge: u32,
        /// Granted value.
        max_recv_sge: u32,
        /// Granted value.
        max_inline_data: u32,
        /// Zero.
        reserved: u32,
    }

    /// Extended request of [`CREATE_QP`].
    struct ExtendedCreateQp = "struct ib_uverbs_ex_create_qp" {
        /// Value returned in events.
        user_handle: u64,
        /// Handle.
        pd_handle: u32,
        /// Handle.
        send_cq_handle: u32,
        /// Handle.
        recv_cq_handle: u32,
        /// Handle of the shared receive queue, valid with `is_srq`.
        srq_handle: u32,
        /// Maximum outstanding work requests.
        max_send_wr: u32,
        /// Maximum outstanding work requests.
        max_recv_wr: u32,
        /// Scatter-gather entries of each work request.
        max_send_sge: u32,
        /// Scatter-gather entries of each work request.
        max_recv_sge: u32,
        /// Bytes.
        max_inline_data: u32,
        /// 1 if every send request generates a completion.
        sq_sig_all: u8,
        /// `QPT_*`.
        qp_type: u8,
        /// 1 if the queue pair uses a shared receive queue.
        is_srq: u8,
        /// Zero.
        reserved: u8,
        /// Flags: [`CREATE_QP_MASK_IND_TABLE`].
        comp_mask: u32,
        /// Flags.
        create_flags: u32,
        /// Handle.
        rwq_ind_tbl_handle: u32,
        /// Not used by these drivers.
        source_qpn: u32,
    }

    /// Extended reply to [`CREATE_QP`].
    struct ExtendedCreateQpReply = "struct ib_uverbs_ex_create_qp_resp" {
        /// Reply of the plain command.
        base: CreateQpReply,
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
    }

    /// Request of [`MODIFY_QP`]. The paths of connected queue pairs are opaque bytes.
    #[allow(missing_docs, reason = "the names are those of ibv_qp_attr, ibv_modify_qp(3)")]
    struct ModifyQp = "struct ib_uverbs_modify_qp" {
        dest: [u8; 32],
        alt_dest: [u8; 32],
        qp_handle: u32,
        attr_mask: u32,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: u32,
        pkey_index: u16,
        alt_pkey_index: u16,
        qp_state: u8,
        cur_qp_state: u8,
        path_mtu: u8,
        path_mig_state: u8,
        en_sqd_async_notify: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        reserved: [u8; 2],
    }

    /// Request of [`DESTROY_QP`].
    struct DestroyQp = "struct ib_uverbs_destroy_qp" {
        /// Address of the reply.
        response: u64,
        /// Handle.
        qp_handle: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply to [`DESTROY_QP`]. The library waits until it has acknowledged this many events.
    struct DestroyQpReply = "struct ib_uverbs_destroy_qp_resp" {
        /// Number of events read from the asynchronous event descriptor.
        events_reported: u32,
    }

    /// Request of [`CREATE_WQ`].
    struct CreateWq = "struct ib_uverbs_ex_create_wq" {
        /// Zero.
        comp_mask: u32,
        /// `WQT_*`.
        wq_type: u32,
        /// Value returned in events.
        user_handle: u64,
        /// Handle.
        pd_handle: u32,
        /// Handle.
        cq_handle: u32,
        /// Maximum outstanding work requests.
        max_wr: u32,
        /// Scatter-gather entries of each work request.
        max_sge: u32,
        /// `WQ_FLAGS_*`.
        create_flags: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply to [`CREATE_WQ`].
    struct CreateWqReply = "struct ib_uverbs_ex_create_wq_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
        /// Handle.
        wq_handle: u32,
        /// Granted value.
        max_wr: u32,
        /// Granted value.
        max_sge: u32,
        /// Work queue number.
        wqn: u32,
    }

    /// Request of [`DESTROY_WQ`].
    struct DestroyWq = "struct ib_uverbs_ex_destroy_wq" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        wq_handle: u32,
    }

    /// Reply to [`DESTROY_WQ`].
    struct DestroyWqReply = "struct ib_uverbs_ex_destroy_wq_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
        /// Number of events read from the asynchronous event descriptor.
        events_reported: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request of [`MODIFY_WQ`].
    struct ModifyWq = "struct ib_uverbs_ex_modify_wq" {
        /// Valid fields. Bit 0: state. Bit 1: current state. Bit 2: flags.
        attr_mask: u32,
        /// Handle.
        wq_handle: u32,
        /// New state. 0: reset. 1: ready. 2: error.
        wq_state: u32,
        /// Current state, with the values of `wq_state`.
        curr_wq_state: u32,
        /// `WQ_FLAGS_*`.
        flags: u32,
        /// Mask of the flags to change.
        flags_mask: u32,
    }

    /// Request of [`CREATE_RWQ_IND_TBL`]. The handles of the work queues follow.
    struct CreateIndirectionTable = "struct ib_uverbs_ex_create_rwq_ind_table" {
        /// Zero.
        comp_mask: u32,
        /// At most [`MAX_LOG_IND_TBL_SIZE`].
        log_ind_tbl_size: u32,
    }

    /// Reply to [`CREATE_RWQ_IND_TBL`].
    struct CreateIndirectionTableReply = "struct ib_uverbs_ex_create_rwq_ind_table_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
        /// Handle.
        ind_tbl_handle: u32,
        /// Indirection table number.
        ind_tbl_num: u32,
    }

    /// Request of [`DESTROY_RWQ_IND_TBL`].
    struct DestroyIndirectionTable = "struct ib_uverbs_ex_destroy_rwq_ind_table" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        ind_tbl_handle: u32,
    }

    /// Request of [`CREATE_FLOW`]. The specs follow. `flow_attr` includes the padding of the C structure's attribute.
    struct CreateFlow = "struct ib_uverbs_create_flow" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        qp_handle: u32,
        /// Flow attribute, which precedes the specs.
        flow_attr: [u8; 16],
    }

    /// Reply to [`CREATE_FLOW`].
    struct CreateFlowReply = "struct ib_uverbs_create_flow_resp" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        flow_handle: u32,
    }

    /// Request of [`DESTROY_FLOW`].
    struct DestroyFlow = "struct ib_uverbs_destroy_flow" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        flow_handle: u32,
    }
}
