//! `infiniband/manadv.h`: MANA queues in memory that the application allocates (manadv(7)).
//!
//! libmana accesses private structures around the given objects without checks: pass only objects of its own
//! contexts.

use std::ffi::{c_int, c_void};

use crate::mlx5dv::{allocator_alloc, allocator_free};
use crate::verbs::{ibv_context, ibv_cq, ibv_qp, ibv_wq};

mirror! {
    header "infiniband/manadv.h" as MANADV_LAYOUTS;
    structs {
        manadv_ctx_allocators {
            alloc: Option<allocator_alloc>,
            free: Option<allocator_free>,
            data: *mut c_void,
        }
        manadv_qp {
            sq_buf: *mut c_void,
            /// `max_send_wr` from the kernel: work requests, not basic units.
            sq_count: u32,
            /// Bytes.
            sq_size: u32,
            sq_id: u32,
            tx_vp_offset: u32,
            db_page: *mut c_void,
        }
        manadv_cq {
            buf: *mut c_void,
            /// Number of entries. With external allocators it is the requested number, which need not be a
            /// power of two.
            count: u32,
            /// Valid once a queue pair uses the queue.
            cq_id: u32,
        }
        manadv_rwq {
            buf: *mut c_void,
            count: u32,
            /// Bytes.
            size: u32,
            wq_id: u32,
            db_page: *mut c_void,
        }
        manadv_obj_qp as "__typeof__(((struct manadv_obj *)0)->qp)" {
            in_ as "in": *mut ibv_qp,
            out: *mut manadv_qp,
        }
        manadv_obj_cq as "__typeof__(((struct manadv_obj *)0)->cq)" {
            in_ as "in": *mut ibv_cq,
            out: *mut manadv_cq,
        }
        manadv_obj_rwq as "__typeof__(((struct manadv_obj *)0)->rwq)" {
            in_ as "in": *mut ibv_wq,
            out: *mut manadv_rwq,
        }
        manadv_obj {
            qp: manadv_obj_qp,
            cq: manadv_obj_cq,
            rwq: manadv_obj_rwq,
        }
    }
    unions {}
    constants {
        u32 {
            MANADV_CTX_ATTR_BUF_ALLOCATORS = 0,
        }
        u64 {
            MANADV_OBJ_QP = 1 << 0,
            MANADV_OBJ_CQ = 1 << 1,
            MANADV_OBJ_RWQ = 1 << 2,
        }
    }
}

library! {
    /// Functions of libmana, first released with rdma-core 41.
    pub struct Manadv: "libmana" "libmana.so.1" {
        fn manadv_set_context_attr(context: *mut ibv_context, kind: u32, attr: *mut c_void) -> c_int
            = "MANA_1.0" since 41;
        fn manadv_init_obj(object: *mut manadv_obj, kinds: u64) -> c_int = "MANA_1.0" since 41;
    }
}
