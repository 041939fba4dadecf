//! `infiniband/mlx5dv.h`: direct verbs of mlx5 (mlx5dv(7)). Covers queues in application memory, steering
//! with packet reformat, and VAR.

use std::ffi::{c_int, c_void};

use crate::verbs::*;

/// `alloc` of the external allocators: size in bytes, user data. The library requests no alignment: return
/// whole pages.
pub type allocator_alloc = unsafe extern "C" fn(size: usize, data: *mut c_void) -> *mut c_void;
/// `free` of the external allocators. It is also called with a null pointer.
pub type allocator_free = unsafe extern "C" fn(pointer: *mut c_void, data: *mut c_void);

/// Opaque objects.
#[repr(C)]
pub struct mlx5dv_flow_matcher {
    _private: [u8; 0],
}
#[repr(C)]
pub struct mlx5dv_devx_obj {
    _private: [u8; 0],
}
#[repr(C)]
pub struct mlx5dv_ah {
    _private: [u8; 0],
}
#[repr(C)]
pub struct mlx5dv_dm {
    _private: [u8; 0],
}
#[repr(C)]
pub struct mlx5dv_srq {
    _private: [u8; 0],
}
#[repr(C)]
pub struct ibv_dm {
    _private: [u8; 0],
}

mirror! {
    header "infiniband/mlx5dv.h" as MLX5DV_LAYOUTS;
    structs {
        mlx5dv_cqe_comp_caps {
            max_num: u32,
            supported_format: u32,
        }
        mlx5dv_sw_parsing_caps {
            sw_parsing_offloads: u32,
            supported_qpts: u32,
        }
        mlx5dv_striding_rq_caps {
            min_single_stride_log_num_of_bytes: u32,
            max_single_stride_log_num_of_bytes: u32,
            min_single_wqe_log_num_of_strides: u32,
            max_single_wqe_log_num_of_strides: u32,
            supported_qpts: u32,
        }
        mlx5dv_sig_caps {
            block_size: u64,
            block_prot: u32,
            t10dif_bg: u16,
            crc_type: u16,
        }
        mlx5dv_dci_streams_caps {
            max_log_num_concurent: u8,
            max_log_num_errored: u8,
        }
        mlx5dv_crypto_caps {
            failed_selftests: u16,
            crypto_engines: u8,
            wrapped_import_method: u8,
            log_max_num_deks: u8,
            flags: u32,
        }
        /// As in rdma-core 44. The library fills the fields that `comp_mask` requests, and later fields have
        /// later bits.
        mlx5dv_context {
            version: u8,
            flags: u64,
            comp_mask: u64,
            cqe_comp_caps: mlx5dv_cqe_comp_caps,
            sw_parsing_caps: mlx5dv_sw_parsing_caps,
            striding_rq_caps: mlx5dv_striding_rq_caps,
            tunnel_offloads_caps: u32,
            max_dynamic_bfregs: u32,
            max_clock_info_update_nsec: u64,
            flow_action_flags: u32,
            dc_odp_caps: u32,
            hca_core_clock: *mut c_void,
            num_lag_ports: u8,
            sig_caps: mlx5dv_sig_caps,
            dci_streams_caps: mlx5dv_dci_streams_caps,
            max_wr_memcpy_length: usize,
            crypto_caps: mlx5dv_crypto_caps,
        }
        /// As in rdma-core 44. A bit of `comp_mask` enables the field `fds` of version 57 and later.
        mlx5dv_context_attr {
            flags: u32,
            comp_mask: u64,
        }
        mlx5dv_ctx_allocators {
            alloc: Option<allocator_alloc>,
            free: Option<allocator_free>,
            data: *mut c_void,
        }
        mlx5dv_cq_init_attr {
            comp_mask: u64,
            cqe_comp_res_format: u8,
            flags: u32,
            cqe_size: u16,
        }
        mlx5dv_dci_streams {
            log_num_concurent: u8,
            log_num_errored: u8,
        }
        mlx5dv_dc_init_attr {
            dc_type: u32,
            dct_access_key: u64,
        }
        mlx5dv_qp_init_attr {
            comp_mask: u64,
            create_flags: u32,
            dc_init_attr: mlx5dv_dc_init_attr,
            send_ops_flags: u64,
        }
        mlx5dv_striding_rq_init_attr {
            single_stride_log_num_of_bytes: u32,
            single_wqe_log_num_of_strides: u32,
            two_byte_shift_en: u8,
        }
        mlx5dv_wq_init_attr {
            comp_mask: u64,
            striding_rq_attrs: mlx5dv_striding_rq_init_attr,
        }
        mlx5dv_qp_ring as "__typeof__(((struct mlx5dv_qp *)0)->sq)" {
            buf: *mut c_void,
            wqe_cnt: u32,
            stride: u32,
        }
        mlx5dv_qp_bf as "__typeof__(((struct mlx5dv_qp *)0)->bf)" {
            reg: *mut c_void,
            size: u32,
        }
        mlx5dv_qp {
            /// Two big-endian words: receive, send.
            dbrec: *mut u32,
            sq: mlx5dv_qp_ring,
            rq: mlx5dv_qp_ring,
            bf: mlx5dv_qp_bf,
            comp_mask: u64,
            uar_mmap_offset: libc::off_t,
            tirn: u32,
            tisn: u32,
            rqn: u32,
            sqn: u32,
            tir_icm_addr: u64,
        }
        mlx5dv_cq {
            buf: *mut c_void,
            /// Two big-endian words: consumer index, arm.
            dbrec: *mut u32,
            cqe_cnt: u32,
            cqe_size: u32,
            /// May be null.
            cq_uar: *mut c_void,
            cqn: u32,
            comp_mask: u64,
        }
        mlx5dv_rwq {
            buf: *mut c_void,
            dbrec: *mut u32,
            wqe_cnt: u32,
            stride: u32,
            comp_mask: u64,
        }
        mlx5dv_pd {
            pdn: u32,
            comp_mask: u64,
        }
        mlx5dv_obj_qp as "__typeof__(((struct mlx5dv_obj *)0)->qp)" {
            in_ as "in": *mut ibv_qp,
            out: *mut mlx5dv_qp,
        }
        mlx5dv_obj_cq as "__typeof__(((struct mlx5dv_obj *)0)->cq)" {
            in_ as "in": *mut ibv_cq,
            out: *mut mlx5dv_cq,
        }
        mlx5dv_obj_srq as "__typeof__(((struct mlx5dv_obj *)0)->srq)" {
            in_ as "in": *mut ibv_srq,
            out: *mut mlx5dv_srq,
        }
        mlx5dv_obj_rwq as "__typeof__(((struct mlx5dv_obj *)0)->rwq)" {
            in_ as "in": *mut ibv_wq,
            out: *mut mlx5dv_rwq,
        }
        mlx5dv_obj_dm as "__typeof__(((struct mlx5dv_obj *)0)->dm)" {
            in_ as "in": *mut ibv_dm,
            out: *mut mlx5dv_dm,
        }
        mlx5dv_obj_ah as "__typeof__(((struct mlx5dv_obj *)0)->ah)" {
            in_ as "in": *mut ibv_ah,
            out: *mut mlx5dv_ah,
        }
        mlx5dv_obj_pd as "__typeof__(((struct mlx5dv_obj *)0)->pd)" {
            in_ as "in": *mut ibv_pd,
            out: *mut mlx5dv_pd,
        }
        /// As in rdma-core 44. An object type bit enables the field `devx` of version 63 and later.
        mlx5dv_obj {
            qp: mlx5dv_obj_qp,
            cq: mlx5dv_obj_cq,
            srq: mlx5dv_obj_srq,
            rwq: mlx5dv_obj_rwq,
            dm: mlx5dv_obj_dm,
            ah: mlx5dv_obj_ah,
            pd: mlx5dv_obj_pd,
        }
        mlx5dv_clock_info {
            nsec: u64,
            last_cycles: u64,
            frac: u64,
            mult: u32,
            shift: u32,
            mask: u64,
        }
        /// Followed by `match_sz` bytes in the device's format.
        mlx5dv_flow_match_parameters {
            match_sz: usize,
        }
        mlx5dv_flow_matcher_attr {
            type_ as "type": u32,
            flags: u32,
            priority: u16,
            match_criteria_enable: u8,
            match_mask: *mut mlx5dv_flow_match_parameters,
            comp_mask: u64,
            ft_type: u32,
            /// This field lies in the padding of rdma-core 44.
            ib_port since 57: u32,
        }
        /// As in rdma-core 44 to 60. From 61 on the C struct has 24 bytes. The libraries 61 and 62 read
        /// arrays with a stride of 24 under the old symbol; see [`Mlx5dv::create_flow`].
        mlx5dv_flow_action_attr {
            type_ as "type": u32,
            object as "qp": mlx5dv_flow_action_object,
        }
        mlx5dv_devx_umem { umem_id: u32 }
        mlx5dv_devx_uar {
            reg_addr: *mut c_void,
            base_addr: *mut c_void,
            page_id: u32,
            mmap_off: libc::off_t,
            comp_mask: u64,
        }
        mlx5dv_var {
            page_id: u32,
            length: u32,
            mmap_off: libc::off_t,
            comp_mask: u64,
        }
        mlx5dv_export_sizes since 63 {
            var_attrs_size: u32,
            devx_umem_attrs_size: u32,
            devx_obj_attrs_size: u32,
        }
        mlx5dv_reg as "struct mlx5_ib_uapi_reg" {
            value: u32,
            mask: u32,
        }
        mlx5dv_port as "struct mlx5_ib_uapi_query_port" {
            flags: u64,
            vport: u16,
            vport_vhca_id: u16,
            esw_owner_vhca_id: u16,
            rsvd0: u16,
            vport_steering_icm_rx: u64,
            vport_steering_icm_tx: u64,
            reg_c0: mlx5dv_reg,
        }
    }
    unions {}
    constants {
        u64 {
            MLX5DV_CONTEXT_MASK_CQE_COMPRESION = 1 << 0,
            MLX5DV_CONTEXT_MASK_SWP = 1 << 1,
            MLX5DV_CONTEXT_MASK_STRIDING_RQ = 1 << 2,
            MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS = 1 << 3,
            MLX5DV_CONTEXT_MASK_DYN_BFREGS = 1 << 4,
            MLX5DV_CONTEXT_MASK_CLOCK_INFO_UPDATE = 1 << 5,
            MLX5DV_CONTEXT_MASK_FLOW_ACTION_FLAGS = 1 << 6,
            MLX5DV_CONTEXT_MASK_DC_ODP_CAPS = 1 << 7,
            MLX5DV_CONTEXT_MASK_HCA_CORE_CLOCK = 1 << 8,
            MLX5DV_CONTEXT_MASK_NUM_LAG_PORTS = 1 << 9,
            MLX5DV_CONTEXT_FLAGS_CQE_V1 = 1 << 0,
            MLX5DV_CONTEXT_FLAGS_MPW_ALLOWED = 1 << 2,
            MLX5DV_CONTEXT_FLAGS_ENHANCED_MPW = 1 << 3,
            MLX5DV_CONTEXT_FLAGS_CQE_128B_COMP = 1 << 4,
            MLX5DV_CONTEXT_FLAGS_CQE_128B_PAD = 1 << 5,
            MLX5DV_CONTEXT_FLAGS_REAL_TIME_TS = 1 << 7,
            MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE = 1 << 0,
            MLX5DV_CQ_INIT_ATTR_MASK_FLAGS = 1 << 1,
            MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE = 1 << 2,
            MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS = 1 << 0,
            MLX5DV_WQ_INIT_ATTR_MASK_STRIDING_RQ = 1 << 0,
            MLX5DV_QP_MASK_UAR_MMAP_OFFSET = 1 << 0,
            MLX5DV_QP_MASK_RAW_QP_HANDLES = 1 << 1,
            MLX5DV_QP_MASK_RAW_QP_TIR_ADDR = 1 << 2,
            MLX5DV_OBJ_QP = 1 << 0,
            MLX5DV_OBJ_CQ = 1 << 1,
            MLX5DV_OBJ_SRQ = 1 << 2,
            MLX5DV_OBJ_RWQ = 1 << 3,
            MLX5DV_OBJ_DM = 1 << 4,
            MLX5DV_OBJ_AH = 1 << 5,
            MLX5DV_OBJ_PD = 1 << 6,
            MLX5DV_FLOW_MATCHER_MASK_FT_TYPE = 1 << 0,
            MLX5DV_FLOW_MATCHER_MASK_IB_PORT since 57 = 1 << 1,
            MLX5DV_RES_TYPE_QP = (1 << 32) | 1,
            MLX5DV_RES_TYPE_RWQ = (1 << 32) | 2,
            MLX5DV_RES_TYPE_DBR = (1 << 32) | 3,
            MLX5DV_RES_TYPE_SRQ = (1 << 32) | 4,
            MLX5DV_RES_TYPE_CQ = (1 << 32) | 5,
        }
        u32 {
            MLX5_RCV_DBR = 0,
            MLX5_SND_DBR = 1,
            MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_VXLAN = 1 << 0,
            MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_GRE = 1 << 1,
            MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_GENEVE = 1 << 2,
            MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_CW_MPLS_OVER_GRE = 1 << 3,
            MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_CW_MPLS_OVER_UDP = 1 << 4,
            MLX5DV_CTX_ATTR_BUF_ALLOCATORS = 1,
            MLX5DV_CONTEXT_FLAGS_DEVX = 1 << 0,
            MLX5DV_CQ_INIT_ATTR_FLAGS_CQE_PAD = 1 << 0,
            MLX5DV_QP_CREATE_TUNNEL_OFFLOADS = 1 << 0,
            MLX5DV_QP_CREATE_TIR_ALLOW_SELF_LOOPBACK_UC = 1 << 1,
            MLX5DV_QP_CREATE_TIR_ALLOW_SELF_LOOPBACK_MC = 1 << 2,
            MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE = 1 << 3,
            MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE = 1 << 4,
            MLX5DV_FLOW_ACTION_DEST_IBV_QP = 0,
            MLX5DV_FLOW_ACTION_DROP = 1,
            MLX5DV_FLOW_ACTION_IBV_COUNTER = 2,
            MLX5DV_FLOW_ACTION_IBV_FLOW_ACTION = 3,
            MLX5DV_FLOW_ACTION_TAG = 4,
            MLX5DV_FLOW_ACTION_DEST_DEVX = 5,
            MLX5DV_FLOW_ACTION_COUNTERS_DEVX = 6,
            MLX5DV_FLOW_ACTION_DEFAULT_MISS = 7,
            MLX5DV_FLOW_TABLE_TYPE_NIC_RX = 0,
            MLX5DV_FLOW_TABLE_TYPE_NIC_TX = 1,
            MLX5DV_FLOW_TABLE_TYPE_FDB = 2,
            MLX5DV_FLOW_TABLE_TYPE_RDMA_RX = 3,
            MLX5DV_FLOW_TABLE_TYPE_RDMA_TX = 4,
            MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TUNNEL_TO_L2 = 0,
            MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L2_TUNNEL = 1,
            MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L3_TUNNEL_TO_L2 = 2,
            MLX5DV_FLOW_ACTION_PACKET_REFORMAT_TYPE_L2_TO_L3_TUNNEL = 3,
            MLX5DV_UAR_ALLOC_TYPE_BF = 0,
            MLX5DV_UAR_ALLOC_TYPE_NC = 1,
        }
    }
}

/// Anonymous union of `mlx5dv_flow_action_attr`, without the bulk counters of rdma-core 61.
#[repr(C)]
#[derive(Clone, Copy)]
pub union mlx5dv_flow_action_object {
    pub qp: *mut ibv_qp,
    pub counter: *mut ibv_counters,
    pub action: *mut ibv_flow_action,
    pub tag_value: u32,
    pub obj: *mut mlx5dv_devx_obj,
}

library! {
    /// Functions of libmlx5.
    pub struct Mlx5dv: "libmlx5" "libmlx5.so.1" {
        fn mlx5dv_is_supported(device: *mut ibv_device) -> bool = "MLX5_1.8" since 22;
        fn mlx5dv_open_device(device: *mut ibv_device, attr: *mut mlx5dv_context_attr) -> *mut ibv_context
            = "MLX5_1.7" since 21;
        fn mlx5dv_query_device(context: *mut ibv_context, attrs: *mut mlx5dv_context) -> c_int = "MLX5_1.0" since 13;
        fn mlx5dv_set_context_attr(context: *mut ibv_context, kind: u32, attr: *mut c_void) -> c_int
            = "MLX5_1.2" since 15;
        fn mlx5dv_get_clock_info(context: *mut ibv_context, info: *mut mlx5dv_clock_info) -> c_int
            = "MLX5_1.4" since 17;
        /// The later one of two symbol versions. That of `MLX5_1.0` returns another `cq_uar`.
        fn mlx5dv_init_obj(object: *mut mlx5dv_obj, kinds: u64) -> c_int = "MLX5_1.2" since 15;
        fn mlx5dv_create_cq(context: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex, mlx5: *mut mlx5dv_cq_init_attr)
            -> *mut ibv_cq_ex = "MLX5_1.1" since 14;
        fn mlx5dv_create_qp(context: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex, mlx5: *mut mlx5dv_qp_init_attr)
            -> *mut ibv_qp = "MLX5_1.3" since 16;
        fn mlx5dv_create_wq(context: *mut ibv_context, attr: *mut ibv_wq_init_attr, mlx5: *mut mlx5dv_wq_init_attr)
            -> *mut ibv_wq = "MLX5_1.3" since 16;
        fn mlx5dv_create_flow_matcher(context: *mut ibv_context, attr: *mut mlx5dv_flow_matcher_attr)
            -> *mut mlx5dv_flow_matcher
            = "MLX5_1.6" since 20;
        fn mlx5dv_destroy_flow_matcher(matcher: *mut mlx5dv_flow_matcher) -> c_int = "MLX5_1.6" since 20;
        /// Reads the actions with a stride of 16 or 24 bytes, depending on the library version: call
        /// [`Mlx5dv::create_flow`].
        fn mlx5dv_create_flow(matcher: *mut mlx5dv_flow_matcher, value: *mut mlx5dv_flow_match_parameters,
            actions: usize,
            attrs: *mut c_void) -> *mut ibv_flow = "MLX5_1.6" since 20;
        /// Call [`Mlx5dv::create_flow`] instead.
        fn __mlx5dv_create_flow(matcher: *mut mlx5dv_flow_matcher, value: *mut mlx5dv_flow_match_parameters,
            actions: usize,
            attrs: *mut c_void, attr_bytes: usize) -> *mut ibv_flow = "MLX5_1.25.1" since 63;
        fn mlx5dv_create_flow_action_modify_header(context: *mut ibv_context, bytes: usize, actions: *mut u64,
            table: u32)
            -> *mut ibv_flow_action = "MLX5_1.7" since 21;
        fn mlx5dv_create_flow_action_packet_reformat(context: *mut ibv_context, bytes: usize, data: *mut c_void,
            kind: u32, table: u32)
            -> *mut ibv_flow_action = "MLX5_1.7" since 21;
        fn mlx5dv_alloc_var(context: *mut ibv_context, flags: u32) -> *mut mlx5dv_var = "MLX5_1.12" since 28;
        fn mlx5dv_free_var(var: *mut mlx5dv_var) -> () = "MLX5_1.12" since 28;
        fn _mlx5dv_get_export_sizes(sizes: *mut mlx5dv_export_sizes, bytes: usize) -> () = "MLX5_1.27" since 63;
        fn mlx5dv_var_export(var: *mut mlx5dv_var, data: *mut c_void) -> c_int = "MLX5_1.27" since 63;
        fn mlx5dv_var_import(context: *mut ibv_context, data: *mut c_void) -> *mut mlx5dv_var = "MLX5_1.27" since 63;
        fn mlx5dv_var_unimport(var: *mut mlx5dv_var) -> () = "MLX5_1.27" since 63;
        fn mlx5dv_devx_alloc_uar(context: *mut ibv_context, flags: u32) -> *mut mlx5dv_devx_uar = "MLX5_1.7" since 21;
        fn mlx5dv_devx_free_uar(uar: *mut mlx5dv_devx_uar) -> () = "MLX5_1.7" since 21;
        fn mlx5dv_devx_general_cmd(context: *mut ibv_context, input: *const c_void, input_bytes: usize,
            output: *mut c_void,
            output_bytes: usize) -> c_int = "MLX5_1.7" since 21;
        fn mlx5dv_devx_obj_create(context: *mut ibv_context, input: *const c_void, input_bytes: usize,
            output: *mut c_void,
            output_bytes: usize) -> *mut mlx5dv_devx_obj = "MLX5_1.7" since 21;
        fn mlx5dv_devx_obj_query(object: *mut mlx5dv_devx_obj, input: *const c_void, input_bytes: usize,
            output: *mut c_void,
            output_bytes: usize) -> c_int = "MLX5_1.7" since 21;
        fn mlx5dv_devx_obj_destroy(object: *mut mlx5dv_devx_obj) -> c_int = "MLX5_1.7" since 21;
        fn _mlx5dv_query_port(context: *mut ibv_context, port: u32, info: *mut mlx5dv_port, bytes: usize) -> c_int
            = "MLX5_1.19" since 35;
    }
}

/// Stride at which a library reads the actions of `mlx5dv_create_flow`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ActionStride {
    /// rdma-core 63 and later: the caller passes the stride.
    Passed,
    /// Fixed stride, bytes.
    Fixed(usize),
    /// The library has no version. Only one action is safe.
    Unknown,
}

impl Mlx5dv {
    fn action_stride(&self) -> ActionStride {
        if self.__mlx5dv_create_flow().is_ok() {
            return ActionStride::Passed;
        }
        match self.library().version {
            // The struct grew in 61 under the same symbol version. Version 63 restored the old meaning of
            // that symbol.
            Some(version) if version.major == 61 || version.major == 62 => ActionStride::Fixed(24),
            Some(_) => ActionStride::Fixed(size_of::<mlx5dv_flow_action_attr>()),
            None => ActionStride::Unknown,
        }
    }

    /// Calls `mlx5dv_create_flow` with the action stride of the loaded library.
    ///
    /// Returns null and sets `errno` on failure. `EOPNOTSUPP` is also set if the library has no version and
    /// there is more than one action.
    ///
    /// # Errors
    /// The library has no such function.
    ///
    /// # Safety
    /// The contract of the C function applies: `matcher` and everything that the actions point to are live, and
    /// `value` is followed by `match_sz` bytes.
    pub unsafe fn create_flow(
        &self,
        matcher: *mut mlx5dv_flow_matcher,
        value: *mut mlx5dv_flow_match_parameters,
        actions: &[mlx5dv_flow_action_attr],
    ) -> Result<*mut ibv_flow, crate::MissingSymbol> {
        let function = self.mlx5dv_create_flow()?;
        let step = match self.action_stride() {
            ActionStride::Passed => {
                let function = self.__mlx5dv_create_flow()?;
                let bytes = size_of::<mlx5dv_flow_action_attr>();
                // SAFETY: the caller guarantees live objects. The function gets the stride of the array.
                return Ok(unsafe {
                    function(matcher, value, actions.len(), actions.as_ptr().cast_mut().cast(), bytes)
                });
            }
            ActionStride::Fixed(step) => step,
            ActionStride::Unknown if actions.len() <= 1 => 24,
            ActionStride::Unknown => {
                // SAFETY: `__errno_location` returns the address of this thread's errno.
                unsafe { *libc::__errno_location() = libc::EOPNOTSUPP };
                return Ok(std::ptr::null_mut());
            }
        };
        let mut laid_out = lay_out(actions, step);
        // SAFETY: the caller guarantees live objects. The array has the stride that this library reads.
        Ok(unsafe { function(matcher, value, actions.len(), laid_out.as_mut_ptr().cast()) })
    }
}

/// Copies the actions to a zeroed array with a stride of `step` bytes, which is a multiple of 8.
fn lay_out(actions: &[mlx5dv_flow_action_attr], step: usize) -> Vec<u64> {
    const WORDS: usize = size_of::<mlx5dv_flow_action_attr>() / 8;
    let mut words = vec![0u64; actions.len() * step / 8];
    for (target, action) in words.chunks_exact_mut(step / 8).zip(actions) {
        // SAFETY: source and destination are 16 bytes of integers and pointers, aligned to 8. Padding bytes
        // are copied too.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const *action).cast::<u64>(), target.as_mut_ptr(), WORDS);
        }
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_have_the_stride_of_the_library() {
        let mut tag = mlx5dv_flow_action_attr::zeroed();
        tag.type_ = MLX5DV_FLOW_ACTION_TAG;
        tag.object = mlx5dv_flow_action_object { obj: std::ptr::without_provenance_mut(0x1234) };
        let mut drop = mlx5dv_flow_action_attr::zeroed();
        drop.type_ = MLX5DV_FLOW_ACTION_DROP;
        assert_eq!(lay_out(&[tag, drop], 16), [4, 0x1234, 1, 0]);
        assert_eq!(lay_out(&[tag, drop], 24), [4, 0x1234, 0, 1, 0, 0]);
        assert!(lay_out(&[], 24).is_empty());
    }
}
