//! Functions that libibverbs exports.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::verbs::*;

library! {
    /// Functions of libibverbs. [`crate::verbs`] has those that the header defines inline.
    pub struct Ibverbs: "libibverbs" "libibverbs.so.1" {
        fn ibv_get_device_list(number: *mut c_int) -> *mut *mut ibv_device = "IBVERBS_1.1" since 1;
        fn ibv_free_device_list(list: *mut *mut ibv_device) -> () = "IBVERBS_1.1" since 1;
        fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char = "IBVERBS_1.1" since 1;
        fn ibv_get_device_index(device: *mut ibv_device) -> c_int = "IBVERBS_1.9" since 30;
        fn ibv_get_device_guid(device: *mut ibv_device) -> u64 = "IBVERBS_1.1" since 1;
        fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context = "IBVERBS_1.1" since 1;
        fn ibv_close_device(context: *mut ibv_context) -> c_int = "IBVERBS_1.1" since 1;
        fn ibv_import_device(fd: c_int) -> *mut ibv_context = "IBVERBS_1.10" since 31;
        fn ibv_import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd = "IBVERBS_1.10" since 31;
        fn ibv_unimport_pd(pd: *mut ibv_pd) -> () = "IBVERBS_1.10" since 31;
        fn ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr = "IBVERBS_1.10" since 31;
        fn ibv_unimport_mr(mr: *mut ibv_mr) -> () = "IBVERBS_1.10" since 31;
        fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int = "IBVERBS_1.1" since 1;
        fn ibv_ack_async_event(event: *mut ibv_async_event) -> () = "IBVERBS_1.1" since 1;
        fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int = "IBVERBS_1.1" since 1;
        /// Fills only the first 44 bytes. [`ibv_query_port_ex`] does what the C macro of this name does.
        fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int
            = "IBVERBS_1.1" since 1;
        fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd = "IBVERBS_1.1" since 1;
        fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int = "IBVERBS_1.1" since 1;
        /// The C macro of this name calls `ibv_reg_mr_iova2` if an access flag is optional (relaxed
        /// ordering).
        fn ibv_reg_mr(pd: *mut ibv_pd, address: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr
            = "IBVERBS_1.1" since 1;
        fn ibv_reg_mr_iova2(pd: *mut ibv_pd, address: *mut c_void, length: usize, iova: u64, access: c_uint)
            -> *mut ibv_mr
            = "IBVERBS_1.8" since 28;
        fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int = "IBVERBS_1.1" since 1;
        fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel = "IBVERBS_1.0" since 1;
        fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int = "IBVERBS_1.0" since 1;
        fn ibv_create_cq(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void,
            channel: *mut ibv_comp_channel, vector: c_int)
            -> *mut ibv_cq = "IBVERBS_1.1" since 1;
        fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int = "IBVERBS_1.1" since 1;
        fn ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int
            = "IBVERBS_1.1" since 1;
        fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) -> () = "IBVERBS_1.1" since 1;
        fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp = "IBVERBS_1.1" since 1;
        fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex = "IBVERBS_1.6" since 24;
        fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int = "IBVERBS_1.1" since 1;
        fn ibv_query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int
            = "IBVERBS_1.1" since 1;
        fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int = "IBVERBS_1.1" since 1;
        fn ibv_fork_init() -> c_int = "IBVERBS_1.1" since 1;
        fn ibv_is_fork_initialized() -> c_uint = "IBVERBS_1.13" since 35;
    }
}
