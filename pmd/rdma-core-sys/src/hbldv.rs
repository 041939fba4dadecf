//! `infiniband/hbldv.h`: direct verbs of Habana / Intel Gaudi (encapsulation per queue pair).
//!
//! No released rdma-core contains this library or header. The layouts are those of the proposed provider's
//! header, for 64-bit hosts. Assertions below check them, because there are no installed headers to compare
//! with.

use std::ffi::{c_int, c_void};

use crate::verbs::{ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_qp, ibv_qp_attr};

mirror! {
    header "infiniband/hbldv.h" since 4294967295 as HBLDV_LAYOUTS;
    structs {
        hbldv_ucontext_attr {
            /// Bit n stands for port n, counted from 1. 0 stands for all ports.
            ports_mask: u64,
            core_fd: c_int,
        }
        hbldv_encap_attr {
            /// Address of the header bytes, copied during the call.
            tnl_hdr_ptr: u64,
            tnl_hdr_size: u32,
            /// Host byte order.
            ipv4_addr: u32,
            /// Counted from 1.
            port_num: u32,
            /// Host byte order; the IP protocol for `HBLDV_ENCAP_TYPE_ENC_OVER_IPV4`.
            udp_dst_port: u16,
            encap_type: u32,
        }
        hbldv_encap { encap_num: u32 }
        hbldv_qp_attr {
            caps: u64,
            local_key: u32,
            remote_key: u32,
            congestion_wnd: u32,
            reserved0: u32,
            dest_wq_size: u32,
            wq_type: u32,
            wq_granularity: u32,
            priority: u8,
            reserved1: u8,
            reserved2: u8,
            encap_num: u8,
            reserved3: u8,
        }
        hbldv_query_qp_attr {
            qp_num: u32,
            swq_cpu_addr: *mut c_void,
            rwq_cpu_addr: *mut c_void,
        }
        hbldv_wq_array_attr {
            max_num_of_wqs: u32,
            max_num_of_wqes_in_wq: u32,
            mem_id: u32,
            swq_granularity: u32,
        }
        hbldv_port_ex_attr {
            wq_arr_attr: [hbldv_wq_array_attr; 5],
            caps: u64,
            bp_offs: [u32; 16],
            reserved0: [u32; 2],
            port_num: u32,
            reserved1: u8,
        }
        hbldv_query_port_attr {
            max_num_of_qps: u32,
            num_allocated_qps: u32,
            max_allocated_qp_num: u32,
            max_cq_size: u32,
            reserved: [u32; 5],
            advanced: u8,
            max_num_of_cqs: u8,
            max_num_of_usr_fifos: u8,
            max_num_of_encaps: u8,
            nic_macro_idx: u8,
            nic_phys_port_idx: u8,
        }
        hbldv_cq_attr {
            port_num: u8,
            cq_type: u32,
        }
        hbldv_device_attr {
            caps: u64,
            ports_mask: u64,
        }
    }
    unions {}
    constants {
        u32 {
            HBLDV_ENCAP_TYPE_NO_ENC = 0,
            HBLDV_ENCAP_TYPE_ENC_OVER_IPV4 = 1,
            HBLDV_ENCAP_TYPE_ENC_OVER_UDP = 2,
            HBLDV_WQ_WRITE = 1,
            HBLDV_WQ_RECV_RDV = 2,
            HBLDV_WQ_READ_RDV = 4,
            HBLDV_WQ_SEND_RDV = 8,
            HBLDV_WQ_READ_RDV_ENDP = 0x10,
            HBLDV_SWQE_GRAN_32B = 0,
            HBLDV_SWQE_GRAN_64B = 1,
            HBLDV_MEM_HOST = 1,
            HBLDV_MEM_DEVICE = 2,
            HBLDV_CQ_TYPE_QP = 0,
            HBLDV_CQ_TYPE_CC = 1,
        }
        u64 {
            HBLDV_QP_CAP_LOOPBACK = 1,
            HBLDV_QP_CAP_CONG_CTRL = 2,
            HBLDV_QP_CAP_COMPRESSION = 4,
            HBLDV_QP_CAP_ENCAP = 0x10,
            HBLDV_PORT_CAP_ADVANCED = 1,
            HBLDV_PORT_CAP_ADAPTIVE_TIMEOUT = 2,
        }
    }
}

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<hbldv_ucontext_attr>() == 16 && offset_of!(hbldv_ucontext_attr, core_fd) == 8);
    assert!(size_of::<hbldv_encap_attr>() == 32);
    assert!(offset_of!(hbldv_encap_attr, ipv4_addr) == 12);
    assert!(offset_of!(hbldv_encap_attr, udp_dst_port) == 20 && offset_of!(hbldv_encap_attr, encap_type) == 24);
    assert!(size_of::<hbldv_qp_attr>() == 48);
    assert!(offset_of!(hbldv_qp_attr, wq_type) == 28 && offset_of!(hbldv_qp_attr, wq_granularity) == 32);
    assert!(offset_of!(hbldv_qp_attr, priority) == 36 && offset_of!(hbldv_qp_attr, encap_num) == 39);
    assert!(size_of::<hbldv_query_qp_attr>() == 24);
    assert!(size_of::<hbldv_wq_array_attr>() == 16);
    assert!(size_of::<hbldv_port_ex_attr>() == 168);
    assert!(offset_of!(hbldv_port_ex_attr, caps) == 80 && offset_of!(hbldv_port_ex_attr, bp_offs) == 88);
    assert!(offset_of!(hbldv_port_ex_attr, port_num) == 160);
    assert!(size_of::<hbldv_query_port_attr>() == 44 && offset_of!(hbldv_query_port_attr, max_num_of_encaps) == 39);
    assert!(size_of::<hbldv_cq_attr>() == 8 && offset_of!(hbldv_cq_attr, cq_type) == 4);
    assert!(size_of::<hbldv_device_attr>() == 16);
};

library! {
    /// Functions of libhbl. No rdma-core release has them.
    pub struct Hbldv: "libhbl" "libhbl.so.1" {
        fn hbldv_is_supported(device: *mut ibv_device) -> bool = "HBL_1.0" since 0;
        fn hbldv_open_device(device: *mut ibv_device, attr: *mut hbldv_ucontext_attr) -> *mut ibv_context
            = "HBL_1.0" since 0;
        fn hbldv_query_device(context: *mut ibv_context, attr: *mut hbldv_device_attr) -> c_int = "HBL_1.0" since 0;
        fn hbldv_set_port_ex(context: *mut ibv_context, attr: *mut hbldv_port_ex_attr) -> c_int = "HBL_1.0" since 0;
        fn hbldv_query_port(context: *mut ibv_context, port: u32, attr: *mut hbldv_query_port_attr) -> c_int
            = "HBL_1.0" since 0;
        fn hbldv_create_encap(context: *mut ibv_context, attr: *mut hbldv_encap_attr) -> *mut hbldv_encap
            = "HBL_1.0" since 0;
        fn hbldv_destroy_encap(encap: *mut hbldv_encap) -> c_int = "HBL_1.0" since 0;
        fn hbldv_create_cq(context: *mut ibv_context, cqe: c_int, channel: *mut ibv_comp_channel, vector: c_int,
            attr: *mut hbldv_cq_attr)
            -> *mut ibv_cq = "HBL_1.0" since 0;
        fn hbldv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, hbl: *mut hbldv_qp_attr) -> c_int
            = "HBL_1.0" since 0;
        fn hbldv_query_qp(qp: *mut ibv_qp, attr: *mut hbldv_query_qp_attr) -> c_int = "HBL_1.0" since 0;
        fn hbldv_query_cq(cq: *mut ibv_cq, attr: *mut c_void) -> c_int = "HBL_1.0" since 0;
    }
}
