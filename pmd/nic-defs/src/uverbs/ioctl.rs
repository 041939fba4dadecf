//! Commands in the format of `ioctl(2)`: a [`Header`] and a list of [`Attribute`]s (`rdma/rdma_user_ioctl_cmds.h`,
//! `rdma/ib_user_ioctl_cmds.h`).
//!
//! [`Attribute::data`] holds inputs of at most 8 bytes. For longer inputs and for all outputs, it holds an address.
//! Attributes are numbered within their method.

use crate::table::{constants, structures};

/// `RDMA_VERBS_IOCTL`, the request number.
pub const REQUEST: u64 = 0xc018_1b01;

structures! {
    /// Structures that `tests/headers.rs` compares with rdma/rdma_user_ioctl_cmds.h.
    STRUCTURES;

    /// Header of a command.
    struct Header = "struct ib_uverbs_ioctl_hdr" {
        /// Bytes, attributes included.
        length: u16,
        /// `OBJECT_*`.
        object_id: u16,
        /// Method number of the object.
        method_id: u16,
        /// Number of attributes after the header.
        num_attrs: u16,
        /// Zero.
        reserved1: u64,
        /// Driver ID, one of `DRIVER_*`.
        driver_id: u32,
        /// Zero.
        reserved2: u32,
    }

    /// Attribute of a command.
    struct Attribute = "struct ib_uverbs_attr" {
        /// Attribute number within the method.
        attr_id: u16,
        /// Bytes of the value; 0 for handles and file descriptors.
        len: u16,
        /// Flags: [`MANDATORY`], [`VALID_OUTPUT`].
        flags: u16,
        /// Element of an enumeration.
        elem_id = "attr_data.enum_data.elem_id": u8,
        /// Zero.
        reserved = "attr_data.enum_data.reserved": u8,
        /// Value, handle, file descriptor or address.
        data: u64,
    }

    /// Entry of a GID table.
    struct GidEntry = "struct ib_uverbs_gid_entry" {
        /// GID, big-endian.
        gid: [u64; 2],
        /// Index in the table.
        gid_index: u32,
        /// Port number, counted from 1.
        port_num: u32,
        /// `GID_TYPE_*`.
        gid_type: u32,
        /// Index of the network interface; zero if there is none.
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

    /// Reply to [`QUERY_PORT`].
    struct QueryPortReply = "struct ib_uverbs_query_port_resp_ex" {
        /// Reply of the `write` form.
        legacy_resp: super::write::QueryPortReply,
        /// More capabilities.
        port_cap_flags2: u16,
        /// In newer kernels the middle four bytes hold the extended speed.
        reserved: [u8; 6],
    }
}

constants! {
    /// Constants that `tests/headers.rs` compares with the two headers.
    CONSTANTS;
    /// Flag of an attribute: the command fails if the kernel does not know the attribute.
    MANDATORY: u16 = 1, "UVERBS_ATTR_F_MANDATORY";
    /// Flag of an attribute: the kernel has written the output.
    VALID_OUTPUT: u16 = 2, "UVERBS_ATTR_F_VALID_OUTPUT";
    /// First attribute number of drivers.
    DRIVER_NAMESPACE: u16 = 0x1000, "UVERBS_UDATA_DRIVER_DATA_FLAG";
    /// Driver input of core methods.
    UHW_IN: u16 = 0x1000, "UVERBS_ATTR_UHW_IN";
    /// Driver output of core methods.
    UHW_OUT: u16 = 0x1001, "UVERBS_ATTR_UHW_OUT";

    /// Object type: device.
    OBJECT_DEVICE: u16 = 0, "UVERBS_OBJECT_DEVICE";
    /// Object type: protection domain.
    OBJECT_PD: u16 = 1, "UVERBS_OBJECT_PD";
    /// Object type: completion channel.
    OBJECT_COMP_CHANNEL: u16 = 2, "UVERBS_OBJECT_COMP_CHANNEL";
    /// Object type: completion queue.
    OBJECT_CQ: u16 = 3, "UVERBS_OBJECT_CQ";
    /// Object type: queue pair.
    OBJECT_QP: u16 = 4, "UVERBS_OBJECT_QP";
    /// Object type: memory region.
    OBJECT_MR: u16 = 7, "UVERBS_OBJECT_MR";
    /// Object type: flow rule.
    OBJECT_FLOW: u16 = 9, "UVERBS_OBJECT_FLOW";
    /// Object type: indirection table.
    OBJECT_RWQ_IND_TBL: u16 = 11, "UVERBS_OBJECT_RWQ_IND_TBL";
    /// Object type: work queue.
    OBJECT_WQ: u16 = 12, "UVERBS_OBJECT_WQ";
    /// Object type: flow action.
    OBJECT_FLOW_ACTION: u16 = 13, "UVERBS_OBJECT_FLOW_ACTION";
    /// Object type: counters.
    OBJECT_COUNTERS: u16 = 15, "UVERBS_OBJECT_COUNTERS";
    /// Object type: asynchronous event descriptor.
    OBJECT_ASYNC_EVENT: u16 = 16, "UVERBS_OBJECT_ASYNC_EVENT";

    /// Method of device objects: executes a command of the `write` form.
    INVOKE_WRITE: u16 = 0, "UVERBS_METHOD_INVOKE_WRITE";
    /// Method of device objects.
    INFO_HANDLES: u16 = 1, "UVERBS_METHOD_INFO_HANDLES";
    /// Method of device objects.
    QUERY_PORT: u16 = 2, "UVERBS_METHOD_QUERY_PORT";
    /// Method of device objects.
    GET_CONTEXT: u16 = 3, "UVERBS_METHOD_GET_CONTEXT";
    /// Method of device objects.
    QUERY_CONTEXT: u16 = 4, "UVERBS_METHOD_QUERY_CONTEXT";
    /// Method of device objects.
    QUERY_GID_TABLE: u16 = 5, "UVERBS_METHOD_QUERY_GID_TABLE";
    /// Method of device objects.
    QUERY_GID_ENTRY: u16 = 6, "UVERBS_METHOD_QUERY_GID_ENTRY";
    /// Method of protection domain objects.
    PD_DESTROY: u16 = 0, "UVERBS_METHOD_PD_DESTROY";
    /// Method of completion queue objects.
    CQ_CREATE: u16 = 0, "UVERBS_METHOD_CQ_CREATE";
    /// Method of completion queue objects.
    CQ_DESTROY: u16 = 1, "UVERBS_METHOD_CQ_DESTROY";
    /// Method of queue pair objects.
    QP_CREATE: u16 = 0, "UVERBS_METHOD_QP_CREATE";
    /// Method of queue pair objects.
    QP_DESTROY: u16 = 1, "UVERBS_METHOD_QP_DESTROY";
    /// Method of memory region objects.
    MR_DESTROY: u16 = 1, "UVERBS_METHOD_MR_DESTROY";
    /// Method of memory region objects.
    QUERY_MR: u16 = 3, "UVERBS_METHOD_QUERY_MR";
    /// Method of flow rule objects.
    FLOW_DESTROY: u16 = 0, "UVERBS_METHOD_FLOW_DESTROY";
    /// Method of flow action objects.
    FLOW_ACTION_DESTROY: u16 = 1, "UVERBS_METHOD_FLOW_ACTION_DESTROY";
    /// Method of counters objects.
    COUNTERS_CREATE: u16 = 0, "UVERBS_METHOD_COUNTERS_CREATE";
    /// Method of counters objects.
    COUNTERS_DESTROY: u16 = 1, "UVERBS_METHOD_COUNTERS_DESTROY";
    /// Method of counters objects.
    COUNTERS_READ: u16 = 2, "UVERBS_METHOD_COUNTERS_READ";
    /// Method of indirection table objects.
    RWQ_IND_TBL_DESTROY: u16 = 0, "UVERBS_METHOD_RWQ_IND_TBL_DESTROY";
    /// Method of work queue objects.
    WQ_CREATE: u16 = 0, "UVERBS_METHOD_WQ_CREATE";
    /// Method of work queue objects.
    WQ_DESTROY: u16 = 1, "UVERBS_METHOD_WQ_DESTROY";
    /// Method of asynchronous event objects.
    ASYNC_EVENT_ALLOC: u16 = 0, "UVERBS_METHOD_ASYNC_EVENT_ALLOC";

    /// Attribute of [`INVOKE_WRITE`]: core structure of the request.
    CORE_IN: u16 = 0, "UVERBS_ATTR_CORE_IN";
    /// Attribute of [`INVOKE_WRITE`]: core structure of the reply.
    CORE_OUT: u16 = 1, "UVERBS_ATTR_CORE_OUT";
    /// Attribute of [`INVOKE_WRITE`]: command number.
    WRITE_CMD: u16 = 2, "UVERBS_ATTR_WRITE_CMD";
    /// Attribute of [`QUERY_PORT`].
    QUERY_PORT_PORT_NUM: u16 = 0, "UVERBS_ATTR_QUERY_PORT_PORT_NUM";
    /// Attribute of [`QUERY_PORT`].
    QUERY_PORT_RESP: u16 = 1, "UVERBS_ATTR_QUERY_PORT_RESP";
    /// Attribute of [`GET_CONTEXT`], [`QUERY_CONTEXT`].
    GET_CONTEXT_NUM_COMP_VECTORS: u16 = 0, "UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS";
    /// Attribute of [`GET_CONTEXT`], [`QUERY_CONTEXT`].
    GET_CONTEXT_CORE_SUPPORT: u16 = 1, "UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT";
    /// Attribute of [`QUERY_GID_TABLE`].
    GID_TABLE_ENTRY_SIZE: u16 = 0, "UVERBS_ATTR_QUERY_GID_TABLE_ENTRY_SIZE";
    /// Attribute of [`QUERY_GID_TABLE`].
    GID_TABLE_RESP_ENTRIES: u16 = 2, "UVERBS_ATTR_QUERY_GID_TABLE_RESP_ENTRIES";
    /// Attribute of [`QUERY_GID_TABLE`].
    GID_TABLE_RESP_NUM: u16 = 3, "UVERBS_ATTR_QUERY_GID_TABLE_RESP_NUM_ENTRIES";
    /// Attribute of [`QUERY_GID_ENTRY`].
    GID_ENTRY_PORT: u16 = 0, "UVERBS_ATTR_QUERY_GID_ENTRY_PORT";
    /// Attribute of [`QUERY_GID_ENTRY`].
    GID_ENTRY_INDEX: u16 = 1, "UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX";
    /// Attribute of [`QUERY_GID_ENTRY`].
    GID_ENTRY_RESP: u16 = 3, "UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY";
    /// Attribute of every destroy method: handle.
    DESTROY_HANDLE: u16 = 0, "UVERBS_ATTR_DESTROY_PD_HANDLE";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_CQ_HANDLE";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_CQE: u16 = 1, "UVERBS_ATTR_CREATE_CQ_CQE";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_USER_HANDLE: u16 = 2, "UVERBS_ATTR_CREATE_CQ_USER_HANDLE";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_COMP_CHANNEL: u16 = 3, "UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_COMP_VECTOR: u16 = 4, "UVERBS_ATTR_CREATE_CQ_COMP_VECTOR";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_FLAGS: u16 = 5, "UVERBS_ATTR_CREATE_CQ_FLAGS";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_RESP_CQE: u16 = 6, "UVERBS_ATTR_CREATE_CQ_RESP_CQE";
    /// Attribute of [`CQ_CREATE`].
    CREATE_CQ_EVENT_FD: u16 = 7, "UVERBS_ATTR_CREATE_CQ_EVENT_FD";
    /// Attribute of [`CQ_DESTROY`].
    DESTROY_CQ_RESP: u16 = 1, "UVERBS_ATTR_DESTROY_CQ_RESP";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_QP_HANDLE";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_PD: u16 = 2, "UVERBS_ATTR_CREATE_QP_PD_HANDLE";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_SEND_CQ: u16 = 4, "UVERBS_ATTR_CREATE_QP_SEND_CQ_HANDLE";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_RECV_CQ: u16 = 5, "UVERBS_ATTR_CREATE_QP_RECV_CQ_HANDLE";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_IND_TABLE: u16 = 6, "UVERBS_ATTR_CREATE_QP_IND_TABLE_HANDLE";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_USER_HANDLE: u16 = 7, "UVERBS_ATTR_CREATE_QP_USER_HANDLE";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_CAP: u16 = 8, "UVERBS_ATTR_CREATE_QP_CAP";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_TYPE: u16 = 9, "UVERBS_ATTR_CREATE_QP_TYPE";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_FLAGS: u16 = 10, "UVERBS_ATTR_CREATE_QP_FLAGS";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_EVENT_FD: u16 = 12, "UVERBS_ATTR_CREATE_QP_EVENT_FD";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_RESP_CAP: u16 = 13, "UVERBS_ATTR_CREATE_QP_RESP_CAP";
    /// Attribute of [`QP_CREATE`].
    CREATE_QP_RESP_QP_NUM: u16 = 14, "UVERBS_ATTR_CREATE_QP_RESP_QP_NUM";
    /// Attribute of [`QP_DESTROY`].
    DESTROY_QP_RESP: u16 = 1, "UVERBS_ATTR_DESTROY_QP_RESP";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_WQ_HANDLE";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_PD: u16 = 1, "UVERBS_ATTR_CREATE_WQ_PD_HANDLE";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_CQ: u16 = 2, "UVERBS_ATTR_CREATE_WQ_CQ_HANDLE";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_USER_HANDLE: u16 = 3, "UVERBS_ATTR_CREATE_WQ_USER_HANDLE";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_TYPE: u16 = 4, "UVERBS_ATTR_CREATE_WQ_TYPE";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_EVENT_FD: u16 = 5, "UVERBS_ATTR_CREATE_WQ_EVENT_FD";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_MAX_WR: u16 = 6, "UVERBS_ATTR_CREATE_WQ_MAX_WR";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_MAX_SGE: u16 = 7, "UVERBS_ATTR_CREATE_WQ_MAX_SGE";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_FLAGS: u16 = 8, "UVERBS_ATTR_CREATE_WQ_FLAGS";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_RESP_MAX_WR: u16 = 9, "UVERBS_ATTR_CREATE_WQ_RESP_MAX_WR";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_RESP_MAX_SGE: u16 = 10, "UVERBS_ATTR_CREATE_WQ_RESP_MAX_SGE";
    /// Attribute of [`WQ_CREATE`].
    CREATE_WQ_RESP_WQ_NUM: u16 = 11, "UVERBS_ATTR_CREATE_WQ_RESP_WQ_NUM";
    /// Attribute of [`WQ_DESTROY`].
    DESTROY_WQ_RESP: u16 = 1, "UVERBS_ATTR_DESTROY_WQ_RESP";
    /// Attribute of [`QUERY_MR`].
    QUERY_MR_RESP_LKEY: u16 = 1, "UVERBS_ATTR_QUERY_MR_RESP_LKEY";
    /// Attribute of [`QUERY_MR`].
    QUERY_MR_RESP_RKEY: u16 = 2, "UVERBS_ATTR_QUERY_MR_RESP_RKEY";
    /// Attribute of [`QUERY_MR`].
    QUERY_MR_RESP_LENGTH: u16 = 3, "UVERBS_ATTR_QUERY_MR_RESP_LENGTH";
    /// Attribute of [`COUNTERS_CREATE`].
    CREATE_COUNTERS_HANDLE: u16 = 0, "UVERBS_ATTR_CREATE_COUNTERS_HANDLE";
    /// Attribute of [`COUNTERS_READ`].
    READ_COUNTERS_HANDLE: u16 = 0, "UVERBS_ATTR_READ_COUNTERS_HANDLE";
    /// Attribute of [`COUNTERS_READ`]: buffer for 64-bit values.
    READ_COUNTERS_BUFFER: u16 = 1, "UVERBS_ATTR_READ_COUNTERS_BUFF";
    /// Attribute of [`COUNTERS_READ`].
    READ_COUNTERS_FLAGS: u16 = 2, "UVERBS_ATTR_READ_COUNTERS_FLAGS";
    /// Attribute of [`ASYNC_EVENT_ALLOC`].
    ASYNC_EVENT_FD: u16 = 0, "UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE";
}
