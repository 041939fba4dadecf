//! Devices, their attributes and ports, asynchronous events.

use std::ffi::{c_char, c_int, c_void};

use super::{ibv_cq, ibv_qp, ibv_srq, ibv_wq};

mirror! {
    header "infiniband/verbs.h" as DEVICE_LAYOUTS;
    structs {
        ibv_device {
            _ops: [*mut c_void; 2],
            node_type: c_int,
            transport_type: c_int,
            name: [c_char; 64],
            dev_name: [c_char; 64],
            dev_path: [c_char; 256],
            ibdev_path: [c_char; 256],
        }
        ibv_device_attr {
            fw_ver: [c_char; 64],
            /// Network byte order.
            node_guid: u64,
            /// Network byte order.
            sys_image_guid: u64,
            max_mr_size: u64,
            page_size_cap: u64,
            vendor_id: u32,
            vendor_part_id: u32,
            hw_ver: u32,
            max_qp: c_int,
            max_qp_wr: c_int,
            device_cap_flags: u32,
            max_sge: c_int,
            max_sge_rd: c_int,
            max_cq: c_int,
            max_cqe: c_int,
            max_mr: c_int,
            max_pd: c_int,
            max_qp_rd_atom: c_int,
            max_ee_rd_atom: c_int,
            max_res_rd_atom: c_int,
            max_qp_init_rd_atom: c_int,
            max_ee_init_rd_atom: c_int,
            atomic_cap: u32,
            max_ee: c_int,
            max_rdd: c_int,
            max_mw: c_int,
            max_raw_ipv6_qp: c_int,
            max_raw_ethy_qp: c_int,
            max_mcast_grp: c_int,
            max_mcast_qp_attach: c_int,
            max_total_mcast_qp_attach: c_int,
            max_ah: c_int,
            max_fmr: c_int,
            max_map_per_fmr: c_int,
            max_srq: c_int,
            max_srq_wr: c_int,
            max_srq_sge: c_int,
            max_pkeys: u16,
            local_ca_ack_delay: u8,
            phys_port_cnt: u8,
        }
        ibv_query_device_ex_input { comp_mask: u32 }
        ibv_odp_per_transport_caps as "__typeof__(((struct ibv_odp_caps *)0)->per_transport_caps)" {
            rc_odp_caps: u32,
            uc_odp_caps: u32,
            ud_odp_caps: u32,
        }
        ibv_odp_caps {
            general_caps: u64,
            per_transport_caps: ibv_odp_per_transport_caps,
        }
        ibv_tso_caps {
            max_tso: u32,
            supported_qpts: u32,
        }
        ibv_rss_caps {
            supported_qpts: u32,
            max_rwq_indirection_tables: u32,
            max_rwq_indirection_table_size: u32,
            rx_hash_fields_mask: u64,
            rx_hash_function: u8,
        }
        ibv_packet_pacing_caps {
            qp_rate_limit_min: u32,
            qp_rate_limit_max: u32,
            supported_qpts: u32,
        }
        ibv_tm_caps {
            max_rndv_hdr_size: u32,
            max_num_tags: u32,
            flags: u32,
            max_ops: u32,
            max_sge: u32,
        }
        ibv_cq_moderation_caps {
            max_cq_count: u16,
            max_cq_period: u16,
        }
        ibv_pci_atomic_caps {
            fetch_add: u16,
            swap: u16,
            compare_swap: u16,
        }
        ibv_device_attr_ex {
            orig_attr: ibv_device_attr,
            comp_mask: u32,
            odp_caps: ibv_odp_caps,
            completion_timestamp_mask: u64,
            hca_core_clock: u64,
            device_cap_flags_ex: u64,
            tso_caps: ibv_tso_caps,
            rss_caps: ibv_rss_caps,
            max_wq_type_rq: u32,
            packet_pacing_caps: ibv_packet_pacing_caps,
            raw_packet_caps: u32,
            tm_caps: ibv_tm_caps,
            cq_mod_caps: ibv_cq_moderation_caps,
            max_dm_size: u64,
            pci_atomic_caps: ibv_pci_atomic_caps,
            xrc_odp_caps: u32,
            phys_port_cnt_ex: u32,
        }
        /// As in rdma-core 44. Later versions append `active_speed_ex`. The query passes the length of the
        /// caller's struct.
        ibv_port_attr {
            state: u32,
            max_mtu: u32,
            active_mtu: u32,
            gid_tbl_len: c_int,
            port_cap_flags: u32,
            max_msg_sz: u32,
            bad_pkey_cntr: u32,
            qkey_viol_cntr: u32,
            pkey_tbl_len: u16,
            lid: u16,
            sm_lid: u16,
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
            port_cap_flags2: u16,
        }
        ibv_async_event {
            element: ibv_async_event_element,
            event_type: u32,
        }
        ibv_values_ex {
            comp_mask: u32,
            raw_clock: libc::timespec,
        }
    }
    unions {
        ibv_async_event_element as "__typeof__(((struct ibv_async_event *)0)->element)" {
            cq: *mut ibv_cq,
            qp: *mut ibv_qp,
            srq: *mut ibv_srq,
            wq: *mut ibv_wq,
            port_num: c_int,
        }
    }
    constants {
        c_int {
            IBV_NODE_UNKNOWN = -1,
            IBV_NODE_CA = 1,
            IBV_NODE_SWITCH = 2,
            IBV_NODE_ROUTER = 3,
            IBV_NODE_RNIC = 4,
            IBV_NODE_USNIC = 5,
            IBV_NODE_USNIC_UDP = 6,
            IBV_NODE_UNSPECIFIED = 7,
            IBV_TRANSPORT_UNKNOWN = -1,
            IBV_TRANSPORT_IB = 0,
            IBV_TRANSPORT_IWARP = 1,
            IBV_TRANSPORT_UNSPECIFIED = 4,
        }
        u32 {
            IBV_DEVICE_RAW_MULTI = 1 << 3,
            IBV_DEVICE_RAW_IP_CSUM = 1 << 26,
            IBV_DEVICE_MANAGED_FLOW_STEERING = 1 << 29,
            IBV_RX_HASH_FUNC_TOEPLITZ = 1 << 0,
            IBV_RAW_PACKET_CAP_CVLAN_STRIPPING = 1 << 0,
            IBV_RAW_PACKET_CAP_SCATTER_FCS = 1 << 1,
            IBV_RAW_PACKET_CAP_IP_CSUM = 1 << 2,
            IBV_RAW_PACKET_CAP_DELAY_DROP = 1 << 3,
            IBV_MTU_256 = 1,
            IBV_MTU_512 = 2,
            IBV_MTU_1024 = 3,
            IBV_MTU_2048 = 4,
            IBV_MTU_4096 = 5,
            IBV_PORT_NOP = 0,
            IBV_PORT_DOWN = 1,
            IBV_PORT_INIT = 2,
            IBV_PORT_ARMED = 3,
            IBV_PORT_ACTIVE = 4,
            IBV_PORT_ACTIVE_DEFER = 5,
            IBV_EVENT_CQ_ERR = 0,
            IBV_EVENT_QP_FATAL = 1,
            IBV_EVENT_QP_REQ_ERR = 2,
            IBV_EVENT_QP_ACCESS_ERR = 3,
            IBV_EVENT_COMM_EST = 4,
            IBV_EVENT_SQ_DRAINED = 5,
            IBV_EVENT_PATH_MIG = 6,
            IBV_EVENT_PATH_MIG_ERR = 7,
            IBV_EVENT_DEVICE_FATAL = 8,
            IBV_EVENT_PORT_ACTIVE = 9,
            IBV_EVENT_PORT_ERR = 10,
            IBV_EVENT_LID_CHANGE = 11,
            IBV_EVENT_PKEY_CHANGE = 12,
            IBV_EVENT_SM_CHANGE = 13,
            IBV_EVENT_SRQ_ERR = 14,
            IBV_EVENT_SRQ_LIMIT_REACHED = 15,
            IBV_EVENT_QP_LAST_WQE_REACHED = 16,
            IBV_EVENT_CLIENT_REREGISTER = 17,
            IBV_EVENT_GID_CHANGE = 18,
            IBV_EVENT_WQ_FATAL = 19,
            IBV_EVENT_DEVICE_SPEED_CHANGE since 62 = 20,
            IBV_VALUES_MASK_RAW_CLOCK = 1 << 0,
        }
        u64 {
            IBV_DEVICE_RAW_SCATTER_FCS = 1 << 34,
            IBV_DEVICE_PCI_WRITE_END_PADDING = 1 << 36,
            IBV_RX_HASH_SRC_IPV4 = 1 << 0,
            IBV_RX_HASH_DST_IPV4 = 1 << 1,
            IBV_RX_HASH_SRC_IPV6 = 1 << 2,
            IBV_RX_HASH_DST_IPV6 = 1 << 3,
            IBV_RX_HASH_SRC_PORT_TCP = 1 << 4,
            IBV_RX_HASH_DST_PORT_TCP = 1 << 5,
            IBV_RX_HASH_SRC_PORT_UDP = 1 << 6,
            IBV_RX_HASH_DST_PORT_UDP = 1 << 7,
            IBV_RX_HASH_IPSEC_SPI = 1 << 8,
            IBV_RX_HASH_INNER = 1 << 31,
        }
        u8 {
            IBV_LINK_LAYER_UNSPECIFIED = 0,
            IBV_LINK_LAYER_INFINIBAND = 1,
            IBV_LINK_LAYER_ETHERNET = 2,
        }
    }
}
