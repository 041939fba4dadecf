//! Commands as `ioctl(2)` carries them: [`Header`] and a list of [`Attribute`]s (`rdma/rdma_user_ioctl_cmds.h`,
//! `rdma/ib_user_ioctl_cmds.h`).
//!
//! Inputs of at most 8 bytes lie in [`Attribute::data`] itself, longer ones where it points; outputs are always where it points.
//! Attributes are numbered within their method.

use crate::table::{constants, structures};

/// `RDMA_VERBS_IOCTL`, the request number.
pub const REQUEST: u64 = 0xc018_1b01;

structures! {
    /// What is compared with rdma/rdma_user_ioctl_cmds.h.
    STRUCTURES;

    /// Start of a command.
    struct Header = "struct ib_uverbs_ioctl_hdr" {
        /// Bytes, attributes included.
        length: u16,
        /// `OBJECT_*`.
        object_id: u16,
        /// Method of the object.
        method_id: u16,
        /// Number of attributes that follow.
        num_attrs: u16,
        /// Zero.
        reserved1: u64,
        /// Driver, `DRIVER_*`.
        driver_id: u32,
        /// Zero.
        reserved2: u32,
    }

    /// One attribute.
    struct Attribute = "struct ib_uverbs_attr" {
        /// Number within the method.
        attr_id: u16,
        /// Bytes of the value; 0 for handles and descriptors.
        len: u16,
        /// [`MANDATORY`], [`VALID_OUTPUT`].
        flags: u16,
        /// Choice of an enumeration.
        elem_id = "attr_data.enum_data.elem_id": u8,
        /// Zero.
        reserved = "attr_data.enum_data.reserved": u8,
        /// Value, handle, descriptor or address.
        data: u64,
    }

    /// One entry of a GID table.
    struct GidEntry = "struct ib_uverbs_gid_entry" {
        /// Big-endian.
        gid: [u64; 2],
        /// Place in the table.
        gid_index: u32,
        /// From 1.
        port_num: u32,
        /// `GID_TYPE_*`.
        gid_type: u32,
        /// Zero if there is none.
        netdev_ifindex: u32,
    }

    /// Sizes of a queue pair.
    #[allow(missing_docs, reason = "the names are those of ibv_qp_cap, ibv_create_qp(3)")]
    struct QpCap = "struct ib_uverbs_qp_cap" {
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
    }

    /// Reply of [`QUERY_PORT`].
    struct QueryPortReply = "struct ib_uverbs_query_port_resp_ex" {
        /// As in the write form.
        legacy_resp: super::write::QueryPortReply,
        /// More capabilities.
        port_cap_flags2: u16,
        /// Newer: extended speed in the middle four bytes.
        reserved: [u8; 6],
    }
}

constants! {
    /// What is compared with the two headers.
    CONSTANTS;
    /// The kernel must know the attribute.
    MANDATORY: u16 = 1, "UVERBS_ATTR_F_MANDATORY";
    /// The kernel has written the output.
    VALID_OUTPUT: u16 = 2, "UVERBS_ATTR_F_VALID_OUTPUT";
    /// Attributes from here on belong to drivers.
    DRIVER_NAMESPACE: u16 = 0x1000, "UVERBS_UDATA_DRIVER_DATA_FLAG";
    /// Input of the driver, for methods of the core.
    UHW_IN: u16 = 0x1000, "UVERBS_ATTR_UHW_IN";
    /// Output of the driver, for methods of the core.
    UHW_OUT: u16 = 0x1001, "UVERBS_ATTR_UHW_OUT";

    /// Object.
    OBJECT_DEVICE: u16 = 0, "UVERBS_OBJECT_DEVICE";
    /// Object.
    OBJECT_PD: u16 = 1, "UVERBS_OBJECT_PD";
    /// Object.
    OBJECT_COMP_CHANNEL: u16 = 2, "UVERBS_OBJECT_COMP_CHANNEL";
    /// Object.
    OBJECT_CQ: u16 = 3, "UVERBS_OBJECT_CQ";
    /// Object.
    OBJECT_QP: u16 = 4, "UVERBS_OBJECT_QP";
    /// Object.
    OBJECT_MR: u16 = 7, "UVERBS_OBJECT_MR";
    /// Object.
    OBJECT_FLOW: u16 = 9, "UVERBS_OBJECT_FLOW";
    /// Object.
    OBJECT_RWQ_IND_TBL: u16 = 11, "UVERBS_OBJECT_RWQ_IND_TBL";
    /// Object.
    OBJECT_WQ: u16 = 12, "UVERBS_OBJECT_WQ";
    /// Object.
    OBJECT_FLOW_ACTION: u16 = 13, "UVERBS_OBJECT_FLOW_ACTION";
    /// Object.
    OBJECT_COUNTERS: u16 = 15, "UVERBS_OBJECT_COUNTERS";
    /// Object.
    OBJECT_ASYNC_EVENT: u16 = 16, "UVERBS_OBJECT_ASYNC_EVENT";

    /// Device: a command of the write form.
    INVOKE_WRITE: u16 = 0, "UVERBS_METHOD_INVOKE_WRITE";
    /// Device.
    INFO_HANDLES: u16 = 1, "UVERBS_METHOD_INFO_HANDLES";
    /// Device.
    QUERY_PORT: u16 = 2, "UVERBS_METHOD_QUERY_PORT";
    /// Device.
    GET_CONTEXT: u16 = 3, "UVERBS_METHOD_GET_CONTEXT";
    /// Device.
    QUERY_CONTEXT: u16 = 4, "UVERBS_METHOD_QUERY_CONTEXT";
    /// Device.
    QUERY_GID_TABLE: u16 = 5, "UVERBS_METHOD_QUERY_GID_TABLE";
    /// Device.
    QUERY_GID_ENTRY: u16 = 6, "UVERBS_METHOD_QUERY_GID_ENTRY";
    /// Protection domain.
    PD_DESTROY: u16 = 0, "UVERBS_METHOD_PD_DESTROY";
    /// Completion queue.
    CQ_CREATE: u16 = 0, "UVERBS_METHOD_CQ_CREATE";
    /// Completion queue.
    CQ_DESTROY: u16 = 1, "UVERBS_METHOD_CQ_DESTROY";
    /// Queue pair.
    QP_CREATE: u16 = 0, "UVERBS_METHOD_QP_CREATE";
    /// Queue pair.
    QP_DESTROY: u16 = 1, "UVERBS_METHOD_QP_DESTROY";
    /// Memory region.
    MR_DESTROY: u16 = 1, "UVERBS_METHOD_MR_DESTROY";
    /// Memory region.
    QUERY_MR: u16 = 3, "UVERBS_METHOD_QUERY_MR";
    /// Flow rule.
    FLOW_DESTROY: u16 = 0, "UVERBS_METHOD_FLOW_DESTROY";
    /// Flow action.
    FLOW_ACTION_DESTROY: u16 = 1, "UVERBS_METHOD_FLOW_ACTION_DESTROY";
    /// Counters.
    COUNTERS_CREATE: u16 = 0, "UVERBS_METHOD_COUNTERS_CREATE";
    /// Counters.
    COUNTERS_DESTROY: u16 = 1, "UVERBS_METHOD_COUNTERS_DESTROY";
    /// Counters.
    COUNTERS_READ: u16 = 2, "UVERBS_METHOD_COUNTERS_READ";
    /// Indirection table.
    RWQ_IND_TBL_DESTROY: u16 = 0, "UVERBS_METHOD_RWQ_IND_TBL_DESTROY";
    /// Work queue.
    WQ_CREATE: u16 = 0, "UVERBS_METHOD_WQ_CREATE";
    /// Work queue.
    WQ_DESTROY: u16 = 1, "UVERBS_METHOD_WQ_DESTROY";
    /// Asynchronous events.
    ASYNC_EVENT_ALLOC: u16 = 0, "UVERBS_METHOD_ASYNC_EVENT_ALLOC";

    /// [`INVOKE_WRITE`]: core structure in.
    CORE_IN: u16 = 0, "UVERBS_ATTR_CORE_IN";
    /// [`INVOKE_WRITE`]: core structure out.
    CORE_OUT: u16 = 1, "UVERBS_ATTR_CORE_OUT";
    /// [`INVOKE_WRITE`]: which command.
    WRITE_CMD: u16 = 2, "UVERBS_ATTR_WRITE_CMD";
    /// [`QUERY_PORT`].
    QUERY_PORT_PORT_NUM: u16 = 0, "UVERBS_ATTR_QUERY_PORT_PORT_NUM";
    /// [`QUERY_PORT`].
    QUERY_PORT_RESP: u16 = 1, "UVERBS_ATTR_QUERY_PORT_RESP";
    /// [`GET_CONTEXT`], [`QUERY_CONTEXT`].
    GET_CONTEXT_NUM_COMP_VECTORS: u16 = 0, "UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS";
    /// [`GET_CONTEXT`], [`QUERY_CONTEXT`].
    GET_CONTEXT_CORE_SUPPORT: u16 = 1, "UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT";
    /// [`QUERY_GID_TABLE`].
    GID_TABLE_ENTRY_SIZE: u16 = 0, "UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE";
    /// [`QUERY_GID_TABLE`].
    GID_TABLE_RESP_ENTRIES: u16 = 2, "UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES";
    /// [`QUERY_GID_TABLE`].
    GID_TABLE_RESP_NUM: u16 = 3, "UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES";
    /// [`QUERY_GID_ENTRY`].
    GID_ENTRY_PORT: u16 = 0, "UVERBS_ATTR_QUERY_GID_ENTRY_PORT";
    /// [`QUERY_GID_ENTRY`].
    GID_ENTRY_INDEX: u16 = 1, "UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX";
    /// [`QUERY_GID_ENTRY`].
    GID_ENTRY_RESP: u16 = 3, "UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY";
    /// Attribute 0 of every destroy method.
    DESTROY_HANDLE: u16 = 0, "UVERBS_ATTR_DESTROY_PD_HANDLE";
    /// [`CQ_CREATE`].
    CREATE_CQ_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_CQ_HANDLE";
    /// [`CQ_CREATE`].
    CREATE_CQ_CQE: u16 = 1, "UVERBS_ATTR_CREATE_CQ_CQE";
    /// [`CQ_CREATE`].
    CREATE_CQ_USER_HANDLE: u16 = 2, "UVERBS_ATTR_CREATE_CQ_USER_HANDLE";
    /// [`CQ_CREATE`].
    CREATE_CQ_COMP_CHANNEL: u16 = 3, "UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL";
    /// [`CQ_CREATE`].
    CREATE_CQ_COMP_VECTOR: u16 = 4, "UVERBS_ATTR_CREATE_CQ_COMP_VECTOR";
    /// [`CQ_CREATE`].
    CREATE_CQ_FLAGS: u16 = 5, "UVERBS_ATTR_CREATE_CQ_FLAGS";
    /// [`CQ_CREATE`].
    CREATE_CQ_RESP_CQE: u16 = 6, "UVERBS_ATTR_CREATE_CQ_RESP_CQE";
    /// [`CQ_CREATE`].
    CREATE_CQ_EVENT_FD: u16 = 7, "UVERBS_ATTR_CREATE_CQ_EVENT_FD";
    /// [`CQ_DESTROY`].
    DESTROY_CQ_RESP: u16 = 1, "UVERBS_ATTR_DESTROY_CQ_RESP";
    /// [`QP_CREATE`].
    CREATE_QP_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_QP_HANDLE";
    /// [`QP_CREATE`].
    CREATE_QP_PD: u16 = 2, "UVERBS_ATTR_CREATE_QP_PD_HANDLE";
    /// [`QP_CREATE`].
    CREATE_QP_SEND_CQ: u16 = 4, "UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE";
    /// [`QP_CREATE`].
    CREATE_QP_RECV_CQ: u16 = 5, "UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE";
    /// [`QP_CREATE`].
    CREATE_QP_IND_TABLE: u16 = 6, "UVERBS_ATTR_CREATE_QP_IND_TABLE_HANDLE";
    /// [`QP_CREATE`].
    CREATE_QP_USER_HANDLE: u16 = 7, "UVERBS_ATTR_CREATE_QP_USER_HANDLE";
    /// [`QP_CREATE`].
    CREATE_QP_CAP: u16 = 8, "UVERBS_ATTR_CREATE_QP_CAP";
    /// [`QP_CREATE`].
    CREATE_QP_TYPE: u16 = 9, "UVERBS_ATTR_CREATE_QP_TYPE";
    /// [`QP_CREATE`].
    CREATE_QP_FLAGS: u16 = 10, "UVERBS_ATTR_CREATE_QP_FLAGS";
    /// [`QP_CREATE`].
    CREATE_QP_EVENT_FD: u16 = 12, "UVERBS_ATTR_CREATE_QP_EVENT_FD";
    /// [`QP_CREATE`].
    CREATE_QP_RESP_CAP: u16 = 13, "UVERBS_ATTR_CREATE_QP_RESP_CAP";
    /// [`QP_CREATE`].
    CREATE_QP_RESP_QP_NUM: u16 = 14, "UVERBS_ATTR_CREATE_QP_RESP_QP_NUM";
    /// [`QP_DESTROY`].
    DESTROY_QP_RESP: u16 = 1, "UVERBS_ATTR_DESTROY_QP_RESP";
    /// [`WQ_CREATE`].
    CREATE_WQ_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_WQ_HANDLE";
    /// [`WQ_CREATE`].
    CREATE_WQ_PD: u16 = 1, "UVERBS_ATTR_CREATE_WQ_PD_HANDLE";
    /// [`WQ_CREATE`].
    CREATE_WQ_CQ: u16 = 2, "UVERBS_ATTR_CREATE_WQ_CQ_HANDLE";
    /// [`WQ_CREATE`].
    CREATE_WQ_USER_HANDLE: u16 = 3, "UVERBS_ATTR_CREATE_WQ_USER_HANDLE";
    /// [`WQ_CREATE`].
    CREATE_WQ_TYPE: u16 = 4, "UVERBS_ATTR_CREATE_WQ_TYPE";
    /// [`WQ_CREATE`].
    CREATE_WQ_EVENT_FD: u16 = 5, "UVERBS_ATTR_CREATE_WQ_EVENT_FD";
    /// [`WQ_CREATE`].
    CREATE_WQ_MAX_WR: u16 = 6, "UVERBS_ATTR_CREATE_WQ_MAX_WR";
    /// [`WQ_CREATE`].
    CREATE_WQ_MAX_SGE: u16 = 7, "UVERBS_ATTR_CREATE_WQ_MAX_SGE";
    /// [`WQ_CREATE`].
    CREATE_WQ_FLAGS: u16 = 8, "UVERBS_ATTR_CREATE_WQ_FLAGS";
    /// [`WQ_CREATE`].
    CREATE_WQ_RESP_MAX_WR: u16 = 9, "UVERBS_ATTR_CREATE_WQ_RESP_MAX_WR";
    /// [`WQ_CREATE`].
    CREATE_WQ_RESP_MAX_SGE: u16 = 10, "UVERBS_ATTR_CREATE_WQ_RESP_MAX_SGE";
    /// [`WQ_CREATE`].
    CREATE_WQ_RESP_WQ_NUM: u16 = 11, "UVERBS_ATTR_CREATE_WQ_RESP_WQ_NUM";
    /// [`WQ_DESTROY`].
    DESTROY_WQ_RESP: u16 = 1, "UVERBS_ATTR_DESTROY_WQ_RESP";
    /// [`QUERY_MR`].
    QUERY_MR_RESP_LKEY: u16 = 1, "UVERBS_ATTR_QUERY_MR_RESP_LKEY";
    /// [`QUERY_MR`].
    QUERY_MR_RESP_RKEY: u16 = 2, "UVERBS_ATTR_QUERY_MR_RESP_RKEY";
    /// [`QUERY_MR`].
    QUERY_MR_RESP_LENGTH: u16 = 3, "UVERBS_ATTR_QUERY_MR_RESP_LENGTH";
    /// [`COUNTERS_CREATE`].
    CREATE_COUNTERS_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_COUNTERS_HANDLE";
    /// [`COUNTERS_READ`].
    READ_COUNTERS_HANDLE: u16 = 0, "UVERBS_ATTR_READ_COUNTERS_HANDLE";
    /// [`COUNTERS_READ`]: room for words of 64 bits.
    READ_COUNTERS_BUFFER: u16 = 1, "UVERBS_ATTR_READ_COUNTERS_BUFF";
    /// [`COUNTERS_READ`].
    READ_COUNTERS_FLAGS: u16 = 2, "UVERBS_ATTR_READ_COUNTERS_FLAGS";
    /// [`ASYNC_EVENT_ALLOC`].
    ASYNC_EVENT_FD: u16 = 0, "UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE";
}
