//! Device context and the table of operations in front of it.

use std::ffi::{c_int, c_void};

use libc::pthread_mutex_t;

use super::*;

/// An operation that this crate does not call.
pub type unused_operation = Option<unsafe extern "C" fn()>;

mirror! {
    header "infiniband/verbs.h" as CONTEXT_LAYOUTS;
    structs {
        ibv_context_ops {
            _compat_query_device: unused_operation,
            _compat_query_port: unused_operation,
            _compat_alloc_pd: unused_operation,
            _compat_dealloc_pd: unused_operation,
            _compat_reg_mr: unused_operation,
            _compat_rereg_mr: unused_operation,
            _compat_dereg_mr: unused_operation,
            alloc_mw: unused_operation,
            bind_mw: unused_operation,
            dealloc_mw: unused_operation,
            _compat_create_cq: unused_operation,
            poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
            req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
            _compat_cq_event: unused_operation,
            _compat_resize_cq: unused_operation,
            _compat_destroy_cq: unused_operation,
            _compat_create_srq: unused_operation,
            _compat_modify_srq: unused_operation,
            _compat_query_srq: unused_operation,
            _compat_destroy_srq: unused_operation,
            post_srq_recv: unused_operation,
            _compat_create_qp: unused_operation,
            _compat_query_qp: unused_operation,
            _compat_modify_qp: unused_operation,
            _compat_destroy_qp: unused_operation,
            post_send: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
            post_recv: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
            _compat_create_ah: unused_operation,
            _compat_destroy_ah: unused_operation,
            _compat_attach_mcast: unused_operation,
            _compat_detach_mcast: unused_operation,
            _compat_async_event: unused_operation,
        }
        ibv_context {
            device: *mut ibv_device,
            ops: ibv_context_ops,
            cmd_fd: c_int,
            async_fd: c_int,
            num_comp_vectors: c_int,
            mutex: pthread_mutex_t,
            abi_compat: *mut c_void,
        }
        /// `struct verbs_context` as in rdma-core 44. Newer libraries add fields at its front. Only distances
        /// backwards from `context` are valid, and only within `sz` bytes. Call operations through the
        /// functions of this module, never through a pointer to this type.
        verbs_context {
            query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
            advise_mr: unused_operation,
            alloc_null_mr: unused_operation,
            read_counters: Option<unsafe extern "C" fn(*mut ibv_counters, *mut u64, u32, u32) -> c_int>,
            attach_counters_point_flow:
                Option<unsafe extern "C" fn(*mut ibv_counters, *mut ibv_counter_attach_attr, *mut ibv_flow) -> c_int>,
            create_counters:
                Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_counters_init_attr) -> *mut ibv_counters>,
            destroy_counters: Option<unsafe extern "C" fn(*mut ibv_counters) -> c_int>,
            reg_dm_mr: unused_operation,
            alloc_dm: unused_operation,
            free_dm: unused_operation,
            modify_flow_action_esp: unused_operation,
            destroy_flow_action: Option<unsafe extern "C" fn(*mut ibv_flow_action) -> c_int>,
            create_flow_action_esp:
                Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_flow_action_esp_attr) -> *mut ibv_flow_action>,
            modify_qp_rate_limit: unused_operation,
            alloc_parent_domain:
                Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd>,
            dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
            alloc_td: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
            modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int>,
            post_srq_ops: unused_operation,
            destroy_rwq_ind_table: Option<unsafe extern "C" fn(*mut ibv_rwq_ind_table) -> c_int>,
            create_rwq_ind_table:
                Option<unsafe extern "C" fn(
                    *mut ibv_context,
                    *mut ibv_rwq_ind_table_init_attr,
                ) -> *mut ibv_rwq_ind_table>,
            destroy_wq: Option<unsafe extern "C" fn(*mut ibv_wq) -> c_int>,
            modify_wq: Option<unsafe extern "C" fn(*mut ibv_wq, *mut ibv_wq_attr) -> c_int>,
            create_wq: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_wq_init_attr) -> *mut ibv_wq>,
            query_rt_values: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int>,
            create_cq_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
            private as "priv": *mut c_void,
            query_device_ex: Option<
                unsafe extern "C" fn(
                    *mut ibv_context,
                    *const ibv_query_device_ex_input,
                    *mut ibv_device_attr_ex,
                    usize,
                ) -> c_int,
            >,
            ibv_destroy_flow: Option<unsafe extern "C" fn(*mut ibv_flow) -> c_int>,
            placeholder2 as "ABI_placeholder2": unused_operation,
            ibv_create_flow: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_flow_attr) -> *mut ibv_flow>,
            placeholder1 as "ABI_placeholder1": unused_operation,
            open_qp: unused_operation,
            create_qp_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
            get_srq_num: unused_operation,
            create_srq_ex: unused_operation,
            open_xrcd: unused_operation,
            close_xrcd: unused_operation,
            placeholder3 as "_ABI_placeholder3": u64,
            sz: usize,
            context: ibv_context,
        }
    }
    unions {}
    constants {}
}
