//! Commands as `write(2)` carries them (`rdma/ib_user_verbs.h`).
//!
//! Plain: [`CommandHeader`], core structure, driver part; lengths in words of 4 bytes, header included. Extended ([`EXTENDED`]):
//! [`CommandHeader`], [`ExtendedHeader`], core structure, driver part; lengths of both parts in words of 8 bytes, headers not included.

use crate::table::{constants, structures};

/// Flag of extended commands.
pub const EXTENDED: u32 = 0x8000_0000;

constants! {
    /// What is compared with rdma/ib_user_verbs.h.
    CONSTANTS;
    /// Opens the context.
    GET_CONTEXT: u32 = 0, "IB_USER_VERBS_CMD_GET_CONTEXT";
    /// Limits of the device; extended too.
    QUERY_DEVICE: u32 = 1, "IB_USER_VERBS_CMD_QUERY_DEVICE";
    /// State of a port.
    QUERY_PORT: u32 = 2, "IB_USER_VERBS_CMD_QUERY_PORT";
    /// New protection domain.
    ALLOC_PD: u32 = 3, "IB_USER_VERBS_CMD_ALLOC_PD";
    /// Protection domain gone.
    DEALLOC_PD: u32 = 4, "IB_USER_VERBS_CMD_DEALLOC_PD";
    /// New memory region.
    REG_MR: u32 = 9, "IB_USER_VERBS_CMD_REG_MR";
    /// Memory region gone.
    DEREG_MR: u32 = 13, "IB_USER_VERBS_CMD_DEREG_MR";
    /// New completion channel.
    CREATE_COMP_CHANNEL: u32 = 17, "IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL";
    /// New completion queue; extended too.
    CREATE_CQ: u32 = 18, "IB_USER_VERBS_CMD_CREATE_CQ";
    /// Completion queue gone.
    DESTROY_CQ: u32 = 20, "IB_USER_VERBS_CMD_DESTROY_CQ";
    /// Asks for an event.
    REQ_NOTIFY_CQ: u32 = 23, "IB_USER_VERBS_CMD_REQ_NOTIFY_CQ";
    /// New queue pair; extended too.
    CREATE_QP: u32 = 24, "IB_USER_VERBS_CMD_CREATE_QP";
    /// State of a queue pair.
    QUERY_QP: u32 = 25, "IB_USER_VERBS_CMD_QUERY_QP";
    /// New state of a queue pair; extended too.
    MODIFY_QP: u32 = 26, "IB_USER_VERBS_CMD_MODIFY_QP";
    /// Queue pair gone.
    DESTROY_QP: u32 = 27, "IB_USER_VERBS_CMD_DESTROY_QP";
    /// Extended: new flow rule.
    CREATE_FLOW: u32 = 50, "IB_USER_VERBS_EX_CMD_CREATE_FLOW";
    /// Extended: flow rule gone.
    DESTROY_FLOW: u32 = 51, "IB_USER_VERBS_EX_CMD_DESTROY_FLOW";
    /// Extended: new work queue.
    CREATE_WQ: u32 = 52, "IB_USER_VERBS_EX_CMD_CREATE_WQ";
    /// Extended: new state of a work queue.
    MODIFY_WQ: u32 = 53, "IB_USER_VERBS_EX_CMD_MODIFY_WQ";
    /// Extended: work queue gone.
    DESTROY_WQ: u32 = 54, "IB_USER_VERBS_EX_CMD_DESTROY_WQ";
    /// Extended: new indirection table.
    CREATE_RWQ_IND_TBL: u32 = 55, "IB_USER_VERBS_EX_CMD_CREATE_RWQ_IND_TBL";
    /// Extended: indirection table gone.
    DESTROY_RWQ_IND_TBL: u32 = 56, "IB_USER_VERBS_EX_CMD_DESTROY_RWQ_IND_TBL";
    /// Largest indirection table, as a power of two.
    MAX_LOG_IND_TBL_SIZE: u32 = 13, "IB_USER_VERBS_MAX_LOG_IND_TBL_SIZE";
    /// [`ExtendedCreateQp`] names an indirection table.
    CREATE_QP_MASK_IND_TABLE: u32 = 1, "IB_UVERBS_CREATE_QP_MASK_IND_TABLE";
}

structures! {
    /// What is compared with rdma/ib_user_verbs.h.
    STRUCTURES;

    /// Start of every command.
    struct CommandHeader = "struct ib_uverbs_cmd_hdr" {
        /// Command, with [`EXTENDED`] or without.
        command: u32,
        /// See the module.
        in_words: u16,
        /// See the module.
        out_words: u16,
    }

    /// Follows the header of an extended command.
    struct ExtendedHeader = "struct ib_uverbs_ex_cmd_hdr" {
        /// Address of the reply.
        response: u64,
        /// Words of 8 bytes.
        provider_in_words: u16,
        /// Words of 8 bytes.
        provider_out_words: u16,
        /// Zero.
        cmd_hdr_reserved: u32,
    }

    /// Record of the asynchronous event descriptor.
    struct AsyncEvent = "struct ib_uverbs_async_event_desc" {
        /// User handle of the object, or the port.
        element: u64,
        /// `enum ibv_event_type`.
        event_type: u32,
        /// Zero.
        reserved: u32,
    }

    /// Record of a completion channel.
    struct CompletionEvent = "struct ib_uverbs_comp_event_desc" {
        /// User handle of the completion queue.
        cq_handle: u64,
    }

    /// Request.
    struct GetContext = "struct ib_uverbs_get_context" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply.
    struct GetContextReply = "struct ib_uverbs_get_context_resp" {
        /// Descriptor of asynchronous events.
        async_fd: u32,
        /// Completion vectors.
        num_comp_vectors: u32,
    }

    /// Request.
    struct QueryDevice = "struct ib_uverbs_query_device" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply.
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

    /// Request.
    struct ExtendedQueryDevice = "struct ib_uverbs_ex_query_device" {
        /// Zero.
        comp_mask: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply; fields beyond `response_length` count as zero.
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

    /// Request.
    struct QueryPort = "struct ib_uverbs_query_port" {
        /// Address of the reply.
        response: u64,
        /// From 1.
        port_num: u8,
        /// Zero.
        reserved: [u8; 7],
    }

    /// Reply.
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

    /// Request.
    struct AllocPd = "struct ib_uverbs_alloc_pd" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply.
    struct AllocPdReply = "struct ib_uverbs_alloc_pd_resp" {
        /// Handle.
        pd_handle: u32,
    }

    /// Request.
    struct DeallocPd = "struct ib_uverbs_dealloc_pd" {
        /// Handle.
        pd_handle: u32,
    }

    /// Request.
    struct RegMr = "struct ib_uverbs_reg_mr" {
        /// Address of the reply.
        response: u64,
        /// Address in the process.
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

    /// Reply.
    struct RegMrReply = "struct ib_uverbs_reg_mr_resp" {
        /// Handle.
        mr_handle: u32,
        /// Key for our queues.
        lkey: u32,
        /// Key for peers.
        rkey: u32,
    }

    /// Request.
    struct DeregMr = "struct ib_uverbs_dereg_mr" {
        /// Handle.
        mr_handle: u32,
    }

    /// Request.
    struct CreateCompChannel = "struct ib_uverbs_create_comp_channel" {
        /// Address of the reply.
        response: u64,
    }

    /// Reply.
    struct CreateCompChannelReply = "struct ib_uverbs_create_comp_channel_resp" {
        /// Descriptor.
        fd: u32,
    }

    /// Request.
    struct CreateCq = "struct ib_uverbs_create_cq" {
        /// Address of the reply.
        response: u64,
        /// Comes back in events.
        user_handle: u64,
        /// Entries.
        cqe: u32,
        /// Vector.
        comp_vector: u32,
        /// Descriptor, or -1.
        comp_channel: i32,
        /// Zero.
        reserved: u32,
    }

    /// Reply.
    struct CreateCqReply = "struct ib_uverbs_create_cq_resp" {
        /// Handle.
        cq_handle: u32,
        /// Entries.
        cqe: u32,
    }

    /// Request.
    struct ExtendedCreateCq = "struct ib_uverbs_ex_create_cq" {
        /// Comes back in events.
        user_handle: u64,
        /// Entries.
        cqe: u32,
        /// Vector.
        comp_vector: u32,
        /// Descriptor, or -1.
        comp_channel: i32,
        /// Zero.
        comp_mask: u32,
        /// Timestamps 1, overruns ignored 2.
        flags: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply.
    struct ExtendedCreateCqReply = "struct ib_uverbs_ex_create_cq_resp" {
        /// As in the plain command.
        base: CreateCqReply,
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
    }

    /// Request.
    struct DestroyCq = "struct ib_uverbs_destroy_cq" {
        /// Address of the reply.
        response: u64,
        /// Handle.
        cq_handle: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply: the library waits until it has acknowledged this many events.
    struct DestroyCqReply = "struct ib_uverbs_destroy_cq_resp" {
        /// Events that were read from the channel.
        comp_events_reported: u32,
        /// Events that were read from the asynchronous descriptor.
        async_events_reported: u32,
    }

    /// Request.
    struct CreateQp = "struct ib_uverbs_create_qp" {
        /// Address of the reply.
        response: u64,
        /// Comes back in events.
        user_handle: u64,
        /// Handle.
        pd_handle: u32,
        /// Handle.
        send_cq_handle: u32,
        /// Handle.
        recv_cq_handle: u32,
        /// Handle, if `is_srq`.
        srq_handle: u32,
        /// Work requests.
        max_send_wr: u32,
        /// Work requests.
        max_recv_wr: u32,
        /// Scatter entries for each.
        max_send_sge: u32,
        /// Scatter entries for each.
        max_recv_sge: u32,
        /// Bytes.
        max_inline_data: u32,
        /// Every request completes.
        sq_sig_all: u8,
        /// `QPT_*`.
        qp_type: u8,
        /// Uses a shared receive queue.
        is_srq: u8,
        /// Zero.
        reserved: u8,
    }

    /// Reply.
    struct CreateQpReply = "struct ib_uverbs_create_qp_resp" {
        /// Handle.
        qp_handle: u32,
        /// Number.
        qpn: u32,
        /// As granted.
        max_send_wr: u32,
        /// As granted.
        max_recv_wr: u32,
        /// As granted.
        max_send_sge: u32,
        /// As granted.
        max_recv_sge: u32,
        /// As granted.
        max_inline_data: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request.
    struct ExtendedCreateQp = "struct ib_uverbs_ex_create_qp" {
        /// Comes back in events.
        user_handle: u64,
        /// Handle.
        pd_handle: u32,
        /// Handle.
        send_cq_handle: u32,
        /// Handle.
        recv_cq_handle: u32,
        /// Handle, if `is_srq`.
        srq_handle: u32,
        /// Work requests.
        max_send_wr: u32,
        /// Work requests.
        max_recv_wr: u32,
        /// Scatter entries for each.
        max_send_sge: u32,
        /// Scatter entries for each.
        max_recv_sge: u32,
        /// Bytes.
        max_inline_data: u32,
        /// Every request completes.
        sq_sig_all: u8,
        /// `QPT_*`.
        qp_type: u8,
        /// Uses a shared receive queue.
        is_srq: u8,
        /// Zero.
        reserved: u8,
        /// [`CREATE_QP_MASK_IND_TABLE`].
        comp_mask: u32,
        /// Flags.
        create_flags: u32,
        /// Handle.
        rwq_ind_tbl_handle: u32,
        /// Unused here.
        source_qpn: u32,
    }

    /// Reply.
    struct ExtendedCreateQpReply = "struct ib_uverbs_ex_create_qp_resp" {
        /// As in the plain command.
        base: CreateQpReply,
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
    }

    /// Request; the paths of connected queue pairs are left as bytes.
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

    /// Request.
    struct DestroyQp = "struct ib_uverbs_destroy_qp" {
        /// Address of the reply.
        response: u64,
        /// Handle.
        qp_handle: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply: the library waits until it has acknowledged this many events.
    struct DestroyQpReply = "struct ib_uverbs_destroy_qp_resp" {
        /// Events that were read from the asynchronous descriptor.
        events_reported: u32,
    }

    /// Request.
    struct CreateWq = "struct ib_uverbs_ex_create_wq" {
        /// Zero.
        comp_mask: u32,
        /// `WQT_*`.
        wq_type: u32,
        /// Comes back in events.
        user_handle: u64,
        /// Handle.
        pd_handle: u32,
        /// Handle.
        cq_handle: u32,
        /// Work requests.
        max_wr: u32,
        /// Scatter entries for each.
        max_sge: u32,
        /// `WQ_FLAGS_*`.
        create_flags: u32,
        /// Zero.
        reserved: u32,
    }

    /// Reply.
    struct CreateWqReply = "struct ib_uverbs_ex_create_wq_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
        /// Handle.
        wq_handle: u32,
        /// As granted.
        max_wr: u32,
        /// As granted.
        max_sge: u32,
        /// Number.
        wqn: u32,
    }

    /// Request.
    struct DestroyWq = "struct ib_uverbs_ex_destroy_wq" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        wq_handle: u32,
    }

    /// Reply.
    struct DestroyWqReply = "struct ib_uverbs_ex_destroy_wq_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
        /// Events that were read from the asynchronous descriptor.
        events_reported: u32,
        /// Zero.
        reserved: u32,
    }

    /// Request.
    struct ModifyWq = "struct ib_uverbs_ex_modify_wq" {
        /// State 1, current state 2, flags 4.
        attr_mask: u32,
        /// Handle.
        wq_handle: u32,
        /// Reset 0, ready 1, error 2.
        wq_state: u32,
        /// As `wq_state`.
        curr_wq_state: u32,
        /// `WQ_FLAGS_*`.
        flags: u32,
        /// Which flags.
        flags_mask: u32,
    }

    /// Request; the handles of the work queues follow.
    struct CreateIndirectionTable = "struct ib_uverbs_ex_create_rwq_ind_table" {
        /// Zero.
        comp_mask: u32,
        /// At most [`MAX_LOG_IND_TBL_SIZE`].
        log_ind_tbl_size: u32,
    }

    /// Reply.
    struct CreateIndirectionTableReply = "struct ib_uverbs_ex_create_rwq_ind_table_resp" {
        /// Zero.
        comp_mask: u32,
        /// Bytes of this structure.
        response_length: u32,
        /// Handle.
        ind_tbl_handle: u32,
        /// Number.
        ind_tbl_num: u32,
    }

    /// Request.
    struct DestroyIndirectionTable = "struct ib_uverbs_ex_destroy_rwq_ind_table" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        ind_tbl_handle: u32,
    }

    /// Request; rules follow. Padding of the C structure's attribute is part of `flow_attr`.
    struct CreateFlow = "struct ib_uverbs_create_flow" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        qp_handle: u32,
        /// Attribute in front of the specs.
        flow_attr: [u8; 16],
    }

    /// Reply.
    struct CreateFlowReply = "struct ib_uverbs_create_flow_resp" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        flow_handle: u32,
    }

    /// Request.
    struct DestroyFlow = "struct ib_uverbs_destroy_flow" {
        /// Zero.
        comp_mask: u32,
        /// Handle.
        flow_handle: u32,
    }
}
