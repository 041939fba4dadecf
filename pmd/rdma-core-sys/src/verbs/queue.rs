//! Completion queues, work queues, queue pairs, work requests.

use std::ffi::{c_int, c_void};

use libc::{pthread_cond_t, pthread_mutex_t};

use super::{ibv_context, ibv_mr, ibv_pd};

/// Opaque objects: shared receive queue, address handle, XRC domain, memory window.
#[repr(C)]
pub struct ibv_srq {
    _private: [u8; 0],
}
#[repr(C)]
pub struct ibv_ah {
    _private: [u8; 0],
}
#[repr(C)]
pub struct ibv_xrcd {
    _private: [u8; 0],
}
#[repr(C)]
pub struct ibv_mw {
    _private: [u8; 0],
}

/// Anonymous last union of `ibv_send_wr`. Its members are compared with C one by one.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_operation {
    pub bind_mw: ibv_send_wr_bind_mw,
    pub tso: ibv_send_wr_tso,
}

type QpEx = *mut ibv_qp_ex;
type CqEx = *mut ibv_cq_ex;

mirror! {
    header "infiniband/verbs.h" as QUEUE_LAYOUTS;
    structs {
        ibv_comp_channel {
            context: *mut ibv_context,
            fd: c_int,
            refcnt: c_int,
        }
        ibv_cq {
            context: *mut ibv_context,
            channel: *mut ibv_comp_channel,
            cq_context: *mut c_void,
            handle: u32,
            cqe: c_int,
            mutex: pthread_mutex_t,
            cond: pthread_cond_t,
            comp_events_completed: u32,
            async_events_completed: u32,
        }
        ibv_poll_cq_attr { comp_mask: u32 }
        ibv_wc_tm_info {
            tag: u64,
            private as "priv": u32,
        }
        ibv_cq_ex {
            context: *mut ibv_context,
            channel: *mut ibv_comp_channel,
            cq_context: *mut c_void,
            handle: u32,
            cqe: c_int,
            mutex: pthread_mutex_t,
            cond: pthread_cond_t,
            comp_events_completed: u32,
            async_events_completed: u32,
            comp_mask: u32,
            status: u32,
            wr_id: u64,
            start_poll: Option<unsafe extern "C" fn(CqEx, *mut ibv_poll_cq_attr) -> c_int>,
            next_poll: Option<unsafe extern "C" fn(CqEx) -> c_int>,
            end_poll: Option<unsafe extern "C" fn(CqEx)>,
            read_opcode: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_vendor_err: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_byte_len: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_imm_data: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_qp_num: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_src_qp: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_wc_flags: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_slid: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_sl: Option<unsafe extern "C" fn(CqEx) -> u8>,
            read_dlid_path_bits: Option<unsafe extern "C" fn(CqEx) -> u8>,
            read_completion_ts: Option<unsafe extern "C" fn(CqEx) -> u64>,
            read_cvlan: Option<unsafe extern "C" fn(CqEx) -> u16>,
            read_flow_tag: Option<unsafe extern "C" fn(CqEx) -> u32>,
            read_tm_info: Option<unsafe extern "C" fn(CqEx, *mut ibv_wc_tm_info)>,
            read_completion_wallclock_ns: Option<unsafe extern "C" fn(CqEx) -> u64>,
        }
        ibv_cq_init_attr_ex {
            cqe: u32,
            cq_context: *mut c_void,
            channel: *mut ibv_comp_channel,
            comp_vector: u32,
            wc_flags: u64,
            comp_mask: u32,
            flags: u32,
            parent_domain: *mut ibv_pd,
        }
        ibv_moderate_cq {
            cq_count: u16,
            /// Microseconds.
            cq_period: u16,
        }
        ibv_modify_cq_attr {
            attr_mask: u32,
            moderate: ibv_moderate_cq,
        }
        ibv_wc {
            wr_id: u64,
            status: u32,
            opcode: u32,
            vendor_err: u32,
            byte_len: u32,
            /// Immediate data in network byte order, or the invalidated rkey.
            imm_data: u32,
            qp_num: u32,
            src_qp: u32,
            wc_flags: u32,
            pkey_index: u16,
            slid: u16,
            sl: u8,
            dlid_path_bits: u8,
        }
        ibv_wq {
            context: *mut ibv_context,
            wq_context: *mut c_void,
            pd: *mut ibv_pd,
            cq: *mut ibv_cq,
            wq_num: u32,
            handle: u32,
            state: u32,
            wq_type: u32,
            post_recv: Option<unsafe extern "C" fn(*mut ibv_wq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
            mutex: pthread_mutex_t,
            cond: pthread_cond_t,
            events_completed: u32,
            comp_mask: u32,
        }
        ibv_wq_init_attr {
            wq_context: *mut c_void,
            wq_type: u32,
            max_wr: u32,
            max_sge: u32,
            pd: *mut ibv_pd,
            cq: *mut ibv_cq,
            comp_mask: u32,
            create_flags: u32,
        }
        ibv_wq_attr {
            attr_mask: u32,
            wq_state: u32,
            curr_wq_state: u32,
            flags: u32,
            flags_mask: u32,
        }
        ibv_rwq_ind_table {
            context: *mut ibv_context,
            ind_tbl_handle: c_int,
            ind_tbl_num: c_int,
            comp_mask: u32,
        }
        ibv_rwq_ind_table_init_attr {
            log_ind_tbl_size: u32,
            ind_tbl: *mut *mut ibv_wq,
            comp_mask: u32,
        }
        ibv_qp_cap {
            max_send_wr: u32,
            max_recv_wr: u32,
            max_send_sge: u32,
            max_recv_sge: u32,
            max_inline_data: u32,
        }
        ibv_qp_init_attr {
            qp_context: *mut c_void,
            send_cq: *mut ibv_cq,
            recv_cq: *mut ibv_cq,
            srq: *mut ibv_srq,
            cap: ibv_qp_cap,
            qp_type: u32,
            sq_sig_all: c_int,
        }
        ibv_rx_hash_conf {
            rx_hash_function: u8,
            rx_hash_key_len: u8,
            rx_hash_key: *mut u8,
            rx_hash_fields_mask: u64,
        }
        ibv_qp_init_attr_ex {
            qp_context: *mut c_void,
            send_cq: *mut ibv_cq,
            recv_cq: *mut ibv_cq,
            srq: *mut ibv_srq,
            cap: ibv_qp_cap,
            qp_type: u32,
            sq_sig_all: c_int,
            comp_mask: u32,
            pd: *mut ibv_pd,
            xrcd: *mut ibv_xrcd,
            create_flags: u32,
            max_tso_header: u16,
            rwq_ind_tbl: *mut ibv_rwq_ind_table,
            rx_hash_conf: ibv_rx_hash_conf,
            source_qpn: u32,
            send_ops_flags: u64,
        }
        ibv_gid_global as "__typeof__(((union ibv_gid *)0)->global)" {
            /// Network byte order.
            subnet_prefix: u64,
            /// Network byte order.
            interface_id: u64,
        }
        ibv_global_route {
            dgid: ibv_gid,
            flow_label: u32,
            sgid_index: u8,
            hop_limit: u8,
            traffic_class: u8,
        }
        ibv_ah_attr {
            grh: ibv_global_route,
            dlid: u16,
            sl: u8,
            src_path_bits: u8,
            static_rate: u8,
            is_global: u8,
            port_num: u8,
        }
        ibv_qp_attr {
            qp_state: u32,
            cur_qp_state: u32,
            path_mtu: u32,
            path_mig_state: u32,
            qkey: u32,
            rq_psn: u32,
            sq_psn: u32,
            dest_qp_num: u32,
            qp_access_flags: u32,
            cap: ibv_qp_cap,
            ah_attr: ibv_ah_attr,
            alt_ah_attr: ibv_ah_attr,
            pkey_index: u16,
            alt_pkey_index: u16,
            en_sqd_async_notify: u8,
            sq_draining: u8,
            max_rd_atomic: u8,
            max_dest_rd_atomic: u8,
            min_rnr_timer: u8,
            port_num: u8,
            timeout: u8,
            retry_cnt: u8,
            rnr_retry: u8,
            alt_port_num: u8,
            alt_timeout: u8,
            rate_limit: u32,
        }
        ibv_qp {
            context: *mut ibv_context,
            qp_context: *mut c_void,
            pd: *mut ibv_pd,
            send_cq: *mut ibv_cq,
            recv_cq: *mut ibv_cq,
            srq: *mut ibv_srq,
            handle: u32,
            qp_num: u32,
            state: u32,
            qp_type: u32,
            mutex: pthread_mutex_t,
            cond: pthread_cond_t,
            events_completed: u32,
        }
        ibv_data_buf {
            addr: *mut c_void,
            length: usize,
        }
        ibv_sge {
            addr: u64,
            length: u32,
            lkey: u32,
        }
        /// Covers the fields up to `wr_abort`. The later ones (`wr_atomic_write`, and `wr_flush` of rdma-core
        /// 45) do not apply to raw packets. Use this type only behind a pointer.
        ibv_qp_ex {
            qp_base: ibv_qp,
            comp_mask: u64,
            wr_id: u64,
            wr_flags: u32,
            wr_atomic_cmp_swp: Option<unsafe extern "C" fn(QpEx, u32, u64, u64, u64)>,
            wr_atomic_fetch_add: Option<unsafe extern "C" fn(QpEx, u32, u64, u64)>,
            wr_bind_mw: Option<unsafe extern "C" fn(QpEx, *mut ibv_mw, u32, *const ibv_mw_bind_info)>,
            wr_local_inv: Option<unsafe extern "C" fn(QpEx, u32)>,
            wr_rdma_read: Option<unsafe extern "C" fn(QpEx, u32, u64)>,
            wr_rdma_write: Option<unsafe extern "C" fn(QpEx, u32, u64)>,
            wr_rdma_write_imm: Option<unsafe extern "C" fn(QpEx, u32, u64, u32)>,
            wr_send: Option<unsafe extern "C" fn(QpEx)>,
            wr_send_imm: Option<unsafe extern "C" fn(QpEx, u32)>,
            wr_send_inv: Option<unsafe extern "C" fn(QpEx, u32)>,
            wr_send_tso: Option<unsafe extern "C" fn(QpEx, *mut c_void, u16, u16)>,
            wr_set_ud_addr: Option<unsafe extern "C" fn(QpEx, *mut ibv_ah, u32, u32)>,
            wr_set_xrc_srqn: Option<unsafe extern "C" fn(QpEx, u32)>,
            wr_set_inline_data: Option<unsafe extern "C" fn(QpEx, *mut c_void, usize)>,
            wr_set_inline_data_list: Option<unsafe extern "C" fn(QpEx, usize, *const ibv_data_buf)>,
            wr_set_sge: Option<unsafe extern "C" fn(QpEx, u32, u64, u32)>,
            wr_set_sge_list: Option<unsafe extern "C" fn(QpEx, usize, *const ibv_sge)>,
            wr_start: Option<unsafe extern "C" fn(QpEx)>,
            wr_complete: Option<unsafe extern "C" fn(QpEx) -> c_int>,
            wr_abort: Option<unsafe extern "C" fn(QpEx)>,
        }
        ibv_mw_bind_info {
            mr: *mut ibv_mr,
            addr: u64,
            length: u64,
            mw_access_flags: u32,
        }
        ibv_send_wr_rdma as "__typeof__(((struct ibv_send_wr *)0)->wr.rdma)" {
            remote_addr: u64,
            rkey: u32,
        }
        ibv_send_wr_atomic as "__typeof__(((struct ibv_send_wr *)0)->wr.atomic)" {
            remote_addr: u64,
            compare_add: u64,
            swap: u64,
            rkey: u32,
        }
        ibv_send_wr_ud as "__typeof__(((struct ibv_send_wr *)0)->wr.ud)" {
            ah: *mut ibv_ah,
            remote_qpn: u32,
            remote_qkey: u32,
        }
        ibv_send_wr_bind_mw as "__typeof__(((struct ibv_send_wr *)0)->bind_mw)" {
            mw: *mut ibv_mw,
            rkey: u32,
            bind_info: ibv_mw_bind_info,
        }
        ibv_send_wr_tso as "__typeof__(((struct ibv_send_wr *)0)->tso)" {
            hdr: *mut c_void,
            hdr_sz: u16,
            mss: u16,
        }
        ibv_send_wr {
            wr_id: u64,
            next: *mut ibv_send_wr,
            sg_list: *mut ibv_sge,
            num_sge: c_int,
            opcode: u32,
            send_flags: u32,
            imm_data: u32,
            wr: ibv_send_wr_target,
            remote_srqn as "qp_type.xrc.remote_srqn": u32,
            operation as "bind_mw": ibv_send_wr_operation,
        }
        ibv_recv_wr {
            wr_id: u64,
            next: *mut ibv_recv_wr,
            sg_list: *mut ibv_sge,
            num_sge: c_int,
        }
    }
    unions {
        ibv_gid {
            raw: [u8; 16],
            global: ibv_gid_global,
        }
        ibv_send_wr_target as "__typeof__(((struct ibv_send_wr *)0)->wr)" {
            rdma: ibv_send_wr_rdma,
            atomic: ibv_send_wr_atomic,
            ud: ibv_send_wr_ud,
        }
    }
    constants {
        u32 {
            IBV_WQT_RQ = 0,
            IBV_WQ_INIT_ATTR_FLAGS = 1 << 0,
            IBV_WQ_FLAGS_CVLAN_STRIPPING = 1 << 0,
            IBV_WQ_FLAGS_SCATTER_FCS = 1 << 1,
            IBV_WQ_FLAGS_DELAY_DROP = 1 << 2,
            IBV_WQ_FLAGS_PCI_WRITE_END_PADDING = 1 << 3,
            IBV_WQS_RESET = 0,
            IBV_WQS_RDY = 1,
            IBV_WQS_ERR = 2,
            IBV_WQS_UNKNOWN = 3,
            IBV_WQ_ATTR_STATE = 1 << 0,
            IBV_WQ_ATTR_CURR_STATE = 1 << 1,
            IBV_WQ_ATTR_FLAGS = 1 << 2,
            IBV_QPT_RC = 2,
            IBV_QPT_UC = 3,
            IBV_QPT_UD = 4,
            IBV_QPT_RAW_PACKET = 8,
            IBV_QPT_DRIVER = 0xff,
            IBV_QP_INIT_ATTR_PD = 1 << 0,
            IBV_QP_INIT_ATTR_XRCD = 1 << 1,
            IBV_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2,
            IBV_QP_INIT_ATTR_MAX_TSO_HEADER = 1 << 3,
            IBV_QP_INIT_ATTR_IND_TABLE = 1 << 4,
            IBV_QP_INIT_ATTR_RX_HASH = 1 << 5,
            IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6,
            IBV_QP_CREATE_BLOCK_SELF_MCAST_LB = 1 << 1,
            IBV_QP_CREATE_SCATTER_FCS = 1 << 8,
            IBV_QP_CREATE_CVLAN_STRIPPING = 1 << 9,
            IBV_QP_CREATE_PCI_WRITE_END_PADDING = 1 << 11,
            IBV_QP_STATE = 1 << 0,
            IBV_QP_CUR_STATE = 1 << 1,
            IBV_QP_ACCESS_FLAGS = 1 << 3,
            IBV_QP_PKEY_INDEX = 1 << 4,
            IBV_QP_PORT = 1 << 5,
            IBV_QP_AV = 1 << 7,
            IBV_QP_PATH_MTU = 1 << 8,
            IBV_QP_TIMEOUT = 1 << 9,
            IBV_QP_RETRY_CNT = 1 << 10,
            IBV_QP_RNR_RETRY = 1 << 11,
            IBV_QP_RQ_PSN = 1 << 12,
            IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
            IBV_QP_MIN_RNR_TIMER = 1 << 15,
            IBV_QP_SQ_PSN = 1 << 16,
            IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
            IBV_QP_DEST_QPN = 1 << 20,
            IBV_QP_CAP = 1 << 19,
            IBV_QP_RATE_LIMIT = 1 << 25,
            IBV_QPS_RESET = 0,
            IBV_QPS_INIT = 1,
            IBV_QPS_RTR = 2,
            IBV_QPS_RTS = 3,
            IBV_QPS_SQD = 4,
            IBV_QPS_SQE = 5,
            IBV_QPS_ERR = 6,
            IBV_QPS_UNKNOWN = 7,
            IBV_WR_SEND = 2,
            IBV_WR_SEND_WITH_IMM = 3,
            IBV_WR_TSO = 10,
            IBV_SEND_FENCE = 1 << 0,
            IBV_SEND_SIGNALED = 1 << 1,
            IBV_SEND_SOLICITED = 1 << 2,
            IBV_SEND_INLINE = 1 << 3,
            IBV_SEND_IP_CSUM = 1 << 4,
            IBV_WC_SUCCESS = 0,
            IBV_WC_LOC_LEN_ERR = 1,
            IBV_WC_LOC_QP_OP_ERR = 2,
            IBV_WC_LOC_EEC_OP_ERR = 3,
            IBV_WC_LOC_PROT_ERR = 4,
            IBV_WC_WR_FLUSH_ERR = 5,
            IBV_WC_MW_BIND_ERR = 6,
            IBV_WC_BAD_RESP_ERR = 7,
            IBV_WC_LOC_ACCESS_ERR = 8,
            IBV_WC_REM_INV_REQ_ERR = 9,
            IBV_WC_REM_ACCESS_ERR = 10,
            IBV_WC_REM_OP_ERR = 11,
            IBV_WC_RETRY_EXC_ERR = 12,
            IBV_WC_RNR_RETRY_EXC_ERR = 13,
            IBV_WC_FATAL_ERR = 19,
            IBV_WC_RESP_TIMEOUT_ERR = 20,
            IBV_WC_GENERAL_ERR = 21,
            IBV_WC_SEND = 0,
            IBV_WC_TSO = 7,
            IBV_WC_RECV = 1 << 7,
            IBV_WC_IP_CSUM_OK = 1 << 2,
            IBV_CQ_ATTR_MODERATE = 1 << 0,
            IBV_CQ_INIT_ATTR_MASK_FLAGS = 1 << 0,
            IBV_CQ_INIT_ATTR_MASK_PD = 1 << 1,
            IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1 << 0,
            IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 1 << 1,
        }
        u64 {
            IBV_QP_EX_WITH_SEND = 1 << 2,
            IBV_QP_EX_WITH_SEND_WITH_IMM = 1 << 3,
            IBV_QP_EX_WITH_TSO = 1 << 10,
            IBV_WC_EX_WITH_BYTE_LEN = 1 << 0,
            IBV_WC_EX_WITH_IMM = 1 << 1,
            IBV_WC_EX_WITH_QP_NUM = 1 << 2,
            IBV_WC_EX_WITH_SRC_QP = 1 << 3,
            IBV_WC_EX_WITH_SLID = 1 << 4,
            IBV_WC_EX_WITH_SL = 1 << 5,
            IBV_WC_EX_WITH_DLID_PATH_BITS = 1 << 6,
            IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 1 << 7,
            IBV_WC_EX_WITH_CVLAN = 1 << 8,
            IBV_WC_EX_WITH_FLOW_TAG = 1 << 9,
            IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11,
        }
    }
}
