//! The device context and the table of operations before it.

use std::ffi::{c_int, c_void};

use libc::pthread_mutex_t;

use super::*;

/// A function of the tables that is not called from here.
pub type uncalled = Option<unsafe extern "C" fn()>;

mirror! {
    header "infiniband/verbs.h" as CONTEXT_LAYOUTS;
    structs {
        ibv_context_ops {
            _compat_query_device: uncalled,
            _compat_query_port: uncalled,
            _compat_alloc_pd: uncalled,
            _compat_dealloc_pd: uncalled,
            _compat_reg_mr: uncalled,
            _compat_rereg_mr: uncalled,
            _compat_dereg_mr: uncalled,
            alloc_mw: uncalled,
            bind_mw: uncalled,
            dealloc_mw: uncalled,
            _compat_create_cq: uncalled,
            poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
            req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
            _compat_cq_event: uncalled,
            _compat_resize_cq: uncalled,
            _compat_destroy_cq: uncalled,
            _compat_create_srq: uncalled,
            _compat_modify_srq: uncalled,
            _compat_query_srq: uncalled,
            _compat_destroy_srq: uncalled,
            post_srq_recv: uncalled,
            _compat_create_qp: uncalled,
            _compat_query_qp: uncalled,
            _compat_modify_qp: uncalled,
            _compat_destroy_qp: uncalled,
            post_send: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
            post_recv: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
            _compat_create_ah: uncalled,
            _compat_destroy_ah: uncalled,
            _compat_attach_mcast: uncalled,
            _compat_detach_mcast: uncalled,
            _compat_async_event: uncalled,
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
        /// `struct verbs_context` as rdma-core 44 has it. Newer libraries grow it at the front: only distances from `context` backwards are
        /// valid, and only as far as `sz` says. Reach operations through the functions of this module, never through a pointer to this type.
        verbs_context {
            query_port: Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
            advise_mr: uncalled,
            alloc_null_mr: uncalled,
            read_counters: Option<unsafe extern "C" fn(*mut ibv_counters, *mut u64, u32, u32) -> c_int>,
            attach_counters_point_flow:
                Option<unsafe extern "C" fn(*mut ibv_counters, *mut ibv_counter_attach_attr, *mut ibv_flow) -> c_int>,
            create_counters:
                Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_counters_init_attr) -> *mut ibv_counters>,
            destroy_counters: Option<unsafe extern "C" fn(*mut ibv_counters) -> c_int>,
            reg_dm_mr: uncalled,
            alloc_dm: uncalled,
            free_dm: uncalled,
            modify_flow_action_esp: uncalled,
            destroy_flow_action: Option<unsafe extern "C" fn(*mut ibv_flow_action) -> c_int>,
            create_flow_action_esp:
                Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_flow_action_esp_attr) -> *mut ibv_flow_action>,
            modify_qp_rate_limit: uncalled,
            alloc_parent_domain:
                Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd>,
            dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
            alloc_td: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
            modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int>,
            post_srq_ops: uncalled,
            destroy_rwq_ind_table: Option<unsafe extern "C" fn(*mut ibv_rwq_ind_table) -> c_int>,
            create_rwq_ind_table:
                Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_rwq_ind_table_init_attr) -> *mut ibv_rwq_ind_table>,
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
            placeholder2 as "ABI_placeholder2": uncalled,
            ibv_create_flow: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_flow_attr) -> *mut ibv_flow>,
            placeholder1 as "ABI_placeholder1": uncalled,
            open_qp: uncalled,
            create_qp_ex: Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
            get_srq_num: uncalled,
            create_srq_ex: uncalled,
            open_xrcd: uncalled,
            close_xrcd: uncalled,
            placeholder3 as "_ABI_placeholder3": u64,
            sz: usize,
            context: ibv_context,
        }
    }
    unions {}
    constants {}
}
