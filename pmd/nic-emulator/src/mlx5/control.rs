//! Objects of the device: the checks and replies of the kernel's `mlx5_ib`.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{self as defs, CQE_BYTES, SEND_BLOCK};
use wirepath_nic_defs::uverbs::{self, ioctl, mlx5 as abi, write};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::completion::{Cq, MAX_MINIS};
use super::queues::{Layout, Rq, Sq, State};
use super::virtio_doorbells::VARS;
use super::{
    BLUE_FLAME, FIRST_PAGE, MAX_RECV_WQE, MAX_SEND_WQE, MAX_TABLE, Mlx5, OBJECT_PAGES, PAGE, PAGES, Qp, Rss,
    STATIC_PAGES, STATIC_REGISTERS, UserContext,
};
use crate::attributes::Attributes;
use crate::core_clock::ClockPage;
use crate::device::QpCap;
use crate::device::{Call, ContextId, Device, Env, Event, Mapping, NewCq, NewQp, NewWq, ObjectId, Store, set_link};
use crate::faults::FaultKind;
use crate::frame::Toeplitz;
use crate::host::Host;
use crate::identity;
use crate::log::Log;
use crate::rules::FlowRules;
use crate::slots::CachePadded;
use crate::topology::{DeviceSpec, MinInline};

/// PCI vendor number of Mellanox.
const VENDOR: u32 = 0x02c9;
const MOST: u32 = 1 << 16;
const MAX_SEND_SGE: u32 = 30;

/// Returns the driver part of a request. Fields that an older library does not send are zero.
fn driver_part<T: FromBytes + IntoBytes + Immutable + KnownLayout>(input: &[u8], least: usize) -> Result<T, Errno> {
    if input.len() < least {
        return Err(Errno::INVAL);
    }
    let mut part = T::new_zeroed();
    let size = input.len().min(size_of::<T>());
    part.as_mut_bytes()[..size].copy_from_slice(&input[..size]);
    Ok(part)
}

impl<H: Host> Mlx5<H> {
    pub(super) fn pin(&self, call: &Call<'_, H>, what: &str, address: u64, bytes: u64) -> Result<H::Region, Errno> {
        call.host.pin(address, bytes, true).map_err(|errno| {
            call.refuse(
                errno,
                format_args!(
                    "{}: {what} of {bytes} bytes at {address:#x} is not completely mapped writable",
                    self.name()
                ),
            )
        })
    }

    pub(super) fn ring_of(&self, call: &Call<'_, H>, what: &str, address: u64, bytes: u64) -> Result<H::Region, Errno> {
        if !address.is_multiple_of(PAGE) {
            return Err(
                call.refuse(Errno::INVAL, format_args!("{}: {what} at {address:#x} is not page-aligned", self.name()))
            );
        }
        self.pin(call, what, address, bytes)
    }

    pub(super) fn record(&self, call: &Call<'_, H>, address: u64) -> Result<H::Region, Errno> {
        if !address.is_multiple_of(8) {
            return Err(call.refuse(
                Errno::INVAL,
                format_args!("{}: doorbell record at {address:#x} is not aligned to 8 bytes", self.name()),
            ));
        }
        self.pin(call, "doorbell record", address, 8)
    }

    fn create_sq(&mut self, call: &mut Call<'_, H>, qp: &NewQp) -> Result<(ObjectId, u32, QpCap), Errno> {
        let part: abi::CreateQp = driver_part(call.input, 40)?;
        let name = self.spec.name.clone();
        if qp.cap.max_recv_wr != 0 || part.rq_wqe_count != 0 {
            let why =
                format!("{name}: a raw queue pair with a receive queue of its own is not emulated; use work queues");
            return Err(call.refuse(Errno::OPNOTSUPP, why));
        }
        let Some(send_cq) = qp.send_cq else {
            return Err(call.refuse(Errno::INVAL, format_args!("{name}: a queue pair without completion queue")));
        };
        let blocks = part.sq_wqe_count;
        if !blocks.is_power_of_two() || blocks > self.spec.max_queue || qp.cap.max_send_sge > MAX_SEND_SGE {
            let why = format!(
                "{name}: a send ring of {blocks} blocks, {} entries each; \
                 at most {} (a power of two) and {MAX_SEND_SGE}",
                qp.cap.max_send_sge, self.spec.max_queue
            );
            return Err(call.refuse(Errno::INVAL, why));
        }
        if part.flags & (abi::QP_FLAG_BFREG_INDEX | abi::QP_FLAG_UAR_PAGE_INDEX) != 0 {
            let page = part.bfreg_index as usize;
            if part.flags & abi::QP_FLAG_UAR_PAGE_INDEX != 0 && !self.has_page(call.context, page) {
                return Err(call.refuse(Errno::INVAL, format_args!("{name}: doorbell page {page} does not exist")));
            }
        }
        let ring = self.ring_of(call, "send ring", part.sq_buf_addr, u64::from(blocks * SEND_BLOCK))?;
        let record = self.record(call, part.db_addr)?;
        let number = self.queue_numbers.alloc().ok_or(Errno::NOSPC)?;
        let user_index = if self.spec.mlx5.cqe_version == 0 { 0xff_ffff } else { part.uidx };
        // Register 0 is for doorbells without ordering. The others are assigned to the least loaded one
        // (Linux drivers/infiniband/hw/mlx5/qp.c, `alloc_bfreg`).
        let opened = self.contexts.get_mut(&call.context).filter(|opened| !opened.objects);
        let register = opened.map(|opened| {
            let least = (1..STATIC_REGISTERS).min_by_key(|at| opened.registers[*at]).unwrap_or(0);
            opened.registers[least] += 1;
            least
        });
        let mut sq = Sq::new(number, user_index, (ring, blocks), record, send_cq, call.context, qp.pd, qp.owner);
        sq.register = register;
        let sq = self.sqs.add(sq);
        self.by_sq.insert(number, sq);
        let reply = abi::CreateQpReply {
            bfreg_index: register.map_or(part.bfreg_index, |register| register as u32),
            comp_mask: abi::QP_REPLY_TISN | abi::QP_REPLY_SQN,
            tisn: number,
            sqn: number,
            ..abi::CreateQpReply::new_zeroed()
        };
        call.output = reply.as_bytes().to_vec();
        Ok((self.qps.add(Qp::Send(sq)), number, qp.cap))
    }

    fn create_rss(
        &mut self,
        call: &mut Call<'_, H>,
        qp: &NewQp,
        table: ObjectId,
    ) -> Result<(ObjectId, u32, QpCap), Errno> {
        let part: abi::CreateRssQp = driver_part(call.input, size_of::<abi::CreateRssQp>())?;
        let name = self.spec.name.clone();
        let fields = part.rx_hash_fields_mask;
        let table = self.tables.get(table).ok_or(Errno::INVAL)?.clone();
        let both = |a: u64, b: u64| fields & a != 0 && fields & b != 0;
        let v4 = uverbs::RX_HASH_SRC_IPV4 | uverbs::RX_HASH_DST_IPV4;
        let v6 = uverbs::RX_HASH_SRC_IPV6 | uverbs::RX_HASH_DST_IPV6;
        let tcp = uverbs::RX_HASH_SRC_PORT_TCP | uverbs::RX_HASH_DST_PORT_TCP;
        let udp = uverbs::RX_HASH_SRC_PORT_UDP | uverbs::RX_HASH_DST_PORT_UDP;
        let known = v4 | v6 | tcp | udp | abi::RX_HASH_IPSEC_SPI | abi::RX_HASH_INNER;
        let tunnels = part.flags & abi::QP_FLAG_TUNNEL != 0;
        let wrong = if fields & !known != 0 {
            Some(format!("unsupported hash fields {fields:#x}"))
        } else if both(v4, v6) {
            Some("IPv4 and IPv6 in one hash: each kind of packet has its own queue pair".to_owned())
        } else if both(tcp, udp) {
            Some("TCP and UDP in one hash: each kind of packet has its own queue pair".to_owned())
        } else if fields == 0 && table.len() > 1 {
            Some(format!("no hash over a table of {} entries", table.len()))
        } else if fields != 0 && (part.rx_hash_function != 1 || part.rx_key_len != 40) {
            Some(format!(
                "hash function {} with a key of {} bytes; expected Toeplitz (1) with 40",
                part.rx_hash_function, part.rx_key_len
            ))
        } else {
            None
        };
        if let Some(why) = wrong {
            return Err(call.refuse(Errno::INVAL, format_args!("{name}: {why}")));
        }
        // Only the loopback flags are allowed besides (Linux drivers/infiniband/hw/mlx5/qp.c,
        // `create_rss_raw_qp_tir`).
        if part.flags & !(abi::QP_FLAG_TUNNEL | abi::QP_FLAG_LOOPBACK_UC | abi::QP_FLAG_LOOPBACK_MC) != 0 {
            return Err(call.refuse(Errno::OPNOTSUPP, format_args!("{name}: unsupported flags {:#x}", part.flags)));
        }
        if tunnels && !self.spec.mlx5.tunnels {
            return Err(call.refuse(Errno::OPNOTSUPP, format_args!("{name}: the device has no tunnel offloads")));
        }
        if fields & abi::RX_HASH_INNER != 0 && !tunnels {
            return Err(
                call.refuse(Errno::OPNOTSUPP, format_args!("{name}: a hash of inner headers without tunnel offloads"))
            );
        }
        let key: [u8; 40] = part.rx_hash_key[..40].try_into().expect("forty bytes");
        let hash = (fields != 0).then(|| Toeplitz::new(&key));
        let number = self.queue_numbers.alloc().ok_or(Errno::NOSPC)?;
        let reply =
            abi::CreateQpReply { comp_mask: abi::QP_REPLY_TIRN, tirn: number, ..abi::CreateQpReply::new_zeroed() };
        call.output = reply.as_bytes().to_vec();
        let id = self.add_rss(number, table, hash, fields, tunnels);
        Ok((id, number, qp.cap))
    }

    /// Adds a spread of received packets over a table of receive queues.
    pub(super) fn add_rss(
        &mut self,
        number: u32,
        table: Vec<ObjectId>,
        hash: Option<Toeplitz>,
        fields: u64,
        tunnels: bool,
    ) -> ObjectId {
        let mut rss =
            Rss { number, table: Vec::new(), single_queue: None, hash: None, fields: 0, tuples: None, tunnels };
        rss.set_table(table);
        rss.set_hash(hash, fields);
        self.qps.add(Qp::Rss(Box::new(CachePadded(rss))))
    }

    /// Removes a send queue.
    pub(super) fn remove_sq(&mut self, sq: ObjectId) {
        if let Some(sq) = self.sqs.remove(sq) {
            if let (Some(at), Some(opened)) = (sq.register, self.contexts.get_mut(&sq.context)) {
                opened.registers[at] = opened.registers[at].saturating_sub(1);
            }
            self.by_sq.remove(&sq.number);
            self.queue_numbers.free(sq.number);
        }
    }

    fn context_reply(&self, objects: bool, cqe_version: u8) -> abi::GetContextReply {
        abi::GetContextReply {
            qp_tab_size: 1 << 18,
            bf_reg_size: BLUE_FLAME as u32,
            tot_bfregs: if objects { 0 } else { STATIC_REGISTERS as u32 },
            cache_line_size: 64,
            max_sq_desc_sz: MAX_SEND_WQE,
            max_rq_desc_sz: MAX_RECV_WQE,
            max_send_wqebb: self.spec.max_queue,
            max_recv_wr: self.spec.max_queue,
            max_srq_recv_wr: self.spec.max_queue,
            num_ports: self.spec.ports.len() as u16,
            // The counter is at the start of its page (Linux include/linux/mlx5/device.h, `internal_timer_h` in
            // `mlx5_init_seg`).
            comp_mask: if self.spec.mlx5.clock_page { abi::CONTEXT_REPLY_CORE_CLOCK } else { 0 },
            hca_core_clock_offset: 0,
            clock_info_versions: if self.spec.mlx5.clock_page { 1 << abi::CLOCK_INFO_V1 } else { 0 },
            response_length: size_of::<abi::GetContextReply>() as u32,
            cqe_version,
            cmds_supp_uhw: abi::UHW_QUERY_DEVICE | abi::UHW_CREATE_AH,
            eth_min_inline: match self.spec.mlx5.min_inline {
                MinInline::None | MinInline::UnreportedL2 => abi::INLINE_NONE,
                MinInline::L2 => abi::INLINE_L2,
            },
            log_uar_size: 12,
            num_uars_per_page: 1,
            num_dyn_bfregs: 512,
            ..abi::GetContextReply::new_zeroed()
        }
    }

    fn has_page(&self, context: ContextId, page: usize) -> bool {
        self.contexts
            .get(&context)
            .is_some_and(|context| context.pages.get(page).is_some_and(|used| *used || context.imported))
    }

    fn uar_alloc(&mut self, call: &Call<'_, H>, attributes: &mut Attributes<'_, H>) -> Result<(), Errno> {
        let kind = attributes.number(abi::UAR_ALLOC_TYPE)?.ok_or(Errno::INVAL)?;
        if kind > u64::from(abi::UAR_NON_CACHED) {
            return Err(Errno::INVAL);
        }
        let context = self.contexts.get_mut(&call.context).ok_or(Errno::INVAL)?;
        let page = context.pages.iter().position(|used| !used).ok_or(Errno::NOMEM)?;
        context.pages[page] = true;
        let offset = (OBJECT_PAGES + page as u64) * PAGE;
        attributes.put_handle(abi::UAR_ALLOC_HANDLE, page as u64);
        attributes.put(abi::UAR_ALLOC_OFFSET, offset.as_bytes())?;
        attributes.put(abi::UAR_ALLOC_LENGTH, (PAGE as u32).as_bytes())?;
        attributes.put(abi::UAR_ALLOC_PAGE_ID, (page as u32).as_bytes())
    }

    fn uar_destroy(&mut self, call: &Call<'_, H>, attributes: &Attributes<'_, H>) -> Result<(), Errno> {
        let page = attributes.handle(abi::UAR_DESTROY_HANDLE).ok_or(Errno::INVAL)? as usize;
        let context = self.contexts.get_mut(&call.context).ok_or(Errno::INVAL)?;
        match context.pages.get_mut(page).filter(|used| **used) {
            Some(used) => {
                *used = false;
                Ok(())
            }
            None => Err(Errno::NOENT),
        }
    }
}

impl<H: Host> Device<H> for Mlx5<H> {
    fn driver(&self) -> u32 {
        uverbs::DRIVER_MLX5
    }

    fn abi(&self) -> u64 {
        abi::ABI_VERSION
    }

    fn spec(&self) -> &DeviceSpec {
        &self.spec
    }

    fn query(&self) -> write::ExtendedQueryDeviceReply {
        let flags = uverbs::DEVICE_RAW_IP_CSUM | uverbs::DEVICE_MANAGED_FLOW_STEERING;
        let class = self.spec.mlx5.class;
        let mut reply = identity::device_reply(&self.spec, VENDOR, class.part(), MOST);
        reply.base.fw_ver = u64::from(class.firmware()) << 32 | 31 << 16 | 1014;
        reply.base.max_mr_size = u64::MAX;
        reply.base.page_size_cap = 0xffff_f000;
        reply.base.device_cap_flags = flags as u32;
        reply.base.max_sge = MAX_SEND_SGE;
        reply.base.max_cqe = (1 << 22) - 1;
        reply.device_cap_flags_ex = flags;
        reply.timestamp_mask = u64::MAX;
        reply.hca_core_clock = self.spec.mlx5.clock_khz.into();
        reply.rss_supported_qpts = 1 << uverbs::QPT_RAW_PACKET;
        reply.rss_max_rwq_indirection_tables = MOST;
        reply.rss_max_rwq_indirection_table_size = MAX_TABLE as u32;
        reply.max_wq_type_rq = MOST;
        reply.raw_packet_caps = uverbs::RAW_PACKET_CAP_IP_CSUM | uverbs::RAW_PACKET_CAP_CVLAN_STRIPPING;
        reply
    }

    fn query_driver_part(&self, room: usize) -> Vec<u8> {
        let raw = 1 << uverbs::QPT_RAW_PACKET;
        let mlx5 = &self.spec.mlx5;
        let mut reply = abi::QueryDeviceReply::new_zeroed();
        reply.response_length = size_of::<abi::QueryDeviceReply>() as u32;
        reply.tso_caps = abi::TsoCaps { max_tso: mlx5.max_tso, supported_qpts: raw };
        reply.rss_caps.rx_hash_fields_mask = 0xff | abi::RX_HASH_INNER;
        reply.rss_caps.rx_hash_function = 1;
        if mlx5.compression {
            let formats = defs::MINI_FORMAT_HASH | defs::MINI_FORMAT_CSUM | defs::MINI_FORMAT_CSUM_STRIDE;
            reply.cqe_comp_caps = abi::CqeCompCaps { max_num: MAX_MINIS as u32, supported_format: u32::from(formats) };
        }
        if mlx5.multi_packet {
            reply.mlx5_ib_support_multi_pkt_send_wqes = abi::MPW_ALLOWED | abi::MPW_ENHANCED;
        }
        if mlx5.striding {
            reply.striding_rq_caps = abi::StridingCaps {
                min_single_stride_log_num_of_bytes: 6,
                max_single_stride_log_num_of_bytes: 13,
                min_single_wqe_log_num_of_strides: 3,
                max_single_wqe_log_num_of_strides: 16,
                supported_qpts: raw,
                reserved: 0,
            };
        }
        if mlx5.tunnels {
            reply.tunnel_offloads_caps = abi::TUNNEL_VXLAN | abi::TUNNEL_GRE | abi::TUNNEL_GENEVE;
        }
        if mlx5.sw_parser {
            let sw_parsing_offloads = abi::SW_PARSING | abi::SW_PARSING_CSUM | abi::SW_PARSING_LSO;
            reply.sw_parsing_caps = abi::SwParsingCaps { sw_parsing_offloads, supported_qpts: raw };
        }
        reply.as_bytes()[..size_of::<abi::QueryDeviceReply>().min(room)].to_vec()
    }

    fn query_port(&self, port: u8) -> Option<ioctl::QueryPortReply> {
        let at = usize::from(port).checked_sub(1)?;
        let (spec, state) = (self.spec.ports.get(at)?, self.ports.get(at)?);
        let mut reply = identity::port_reply(spec.mtu, state.up, 0x4000_0000);
        // The device supports more than the current MTU of the port.
        reply.legacy_resp.max_mtu = uverbs::MTU_4096;
        Some(reply)
    }

    fn open(&mut self, call: &mut Call<'_, H>) -> Result<(), Errno> {
        let request: abi::GetContext = driver_part(call.input, 16)?;
        let firmware = request.flags & abi::CONTEXT_DEVX != 0;
        if firmware && !self.spec.mlx5.steering.firmware {
            // The device has no firmware commands for programs; the library opens it again without them.
            return Err(call.decline(Errno::INVAL));
        }
        let objects = self.spec.mlx5.dynamic_pages && request.lib_caps & abi::LIB_CAP_DYN_UAR != 0;
        let cqe_version = self.spec.mlx5.cqe_version.min(request.max_cqe_version);
        let reply = self.context_reply(objects, cqe_version);
        call.output = reply.as_bytes()[..size_of::<abi::GetContextReply>().min(call.room)].to_vec();
        let mut opened = UserContext { objects, firmware, cqe_version, ..UserContext::default() };
        if !objects {
            opened.pages[..STATIC_PAGES as usize].fill(true);
        }
        self.contexts.insert(call.context, opened);
        Ok(())
    }

    fn query_context(&self, call: &mut Call<'_, H>) -> Result<(), Errno> {
        let opened = self.contexts.get(&call.context).ok_or(Errno::INVAL)?;
        // Only a context whose pages are objects can be imported.
        let reply = self.context_reply(opened.objects, opened.cqe_version);
        call.output = reply.as_bytes()[..size_of::<abi::GetContextReply>().min(call.room)].to_vec();
        Ok(())
    }

    fn export_context(&self, context: ContextId) -> Option<u64> {
        self.contexts.get(&context).filter(|context| context.objects).map(|context| context.cqe_version.into())
    }

    fn import_context(&mut self, context: ContextId, export_state: u64) -> Result<(), Errno> {
        let cqe_version = u8::try_from(export_state).map_err(|_| Errno::OPNOTSUPP)?;
        self.contexts
            .insert(context, UserContext { objects: true, cqe_version, imported: true, ..UserContext::default() });
        Ok(())
    }

    fn pd_number(&self, pd: ObjectId) -> Option<u32> {
        self.pds.get(pd).map(|_| pd + 1)
    }

    fn close(&mut self, context: ContextId) {
        self.contexts.remove(&context);
        self.umems.retain(|_, umem| umem.context != context);
        self.last_doorbells.retain(|(of, _), _| *of != context);
    }

    fn map(&mut self, log: &Log, context: ContextId, offset: u64, length: usize) -> Result<Mapping, Errno> {
        let page = offset / PAGE;
        // Bits 8 to 15 are the command. The bits above them extend the index beyond 8 bits.
        let (command, index) = (page >> 8 & 0xff, page & 0xff | page >> 16 << 8);
        let clock = match command {
            abi::MMAP_CORE_CLOCK => Some(ClockPage::Counter(self.clock)),
            abi::MMAP_CLOCK_INFO if index == abi::CLOCK_INFO_V1 => Some(ClockPage::Info(self.clock)),
            _ => None,
        };
        if let Some(page) = clock.filter(|_| self.spec.mlx5.clock_page && length == PAGE as usize) {
            return Ok(Mapping::Clock(page));
        }
        let right = length == PAGE as usize && offset.is_multiple_of(PAGE) && index < (PAGES + VARS) as u64;
        let known = matches!(command, 0 | 2 | 3) || command == OBJECT_PAGES >> 8;
        let there = self.has_page(context, index as usize) || self.has_var(context, index as usize);
        if !right || !known || !there {
            log.line(format_args!(
                "{}: mmap of {length} bytes at {offset:#x}: command {command}, page {index}: no such doorbell page",
                self.name()
            ));
            return Err(Errno::INVAL);
        }
        Ok(Mapping::Doorbells((FIRST_PAGE + index) * PAGE))
    }

    fn alloc_pd(&mut self, call: &mut Call<'_, H>) -> Result<ObjectId, Errno> {
        let id = self.pds.add(call.context);
        call.output = abi::AllocPdReply { pdn: id + 1 }.as_bytes()[..4.min(call.room)].to_vec();
        Ok(id)
    }

    fn dealloc_pd(&mut self, pd: ObjectId) {
        self.pds.remove(pd);
    }

    fn reg_mr(
        &mut self,
        call: &mut Call<'_, H>,
        pd: ObjectId,
        region: H::Region,
        iova: u64,
        access: u32,
    ) -> Result<(ObjectId, u32, u32), Errno> {
        if access & uverbs::ACCESS_ON_DEMAND != 0 {
            return Err(
                call.refuse(Errno::OPNOTSUPP, format_args!("{}: on-demand paging is not emulated", self.name()))
            );
        }
        let (id, key) = self.keys.add(region, iova, pd, access);
        Ok((id, key, key))
    }

    fn query_mr(&self, mr: ObjectId) -> Option<(u32, u32, u64)> {
        self.keys.key_and_length(mr).map(|(key, length)| (key, key, length))
    }

    fn dereg_mr(&mut self, mr: ObjectId) {
        self.keys.remove(mr);
    }

    fn create_cq(&mut self, call: &mut Call<'_, H>, cq: &NewCq) -> Result<(ObjectId, u32), Errno> {
        let part: abi::CreateCq = driver_part(call.input, 20)?;
        let name = self.spec.name.clone();
        // The library requests one entry less than the ring has.
        let entries = (u64::from(cq.entries) + 1).next_power_of_two();
        if part.cqe_size as usize != CQE_BYTES || entries > 1 << 22 {
            let why =
                format!("{name}: {entries} completions of {} bytes; at most 4194304 of {CQE_BYTES}", part.cqe_size);
            return Err(call.refuse(Errno::INVAL, why));
        }
        let format = part.cqe_comp_res_format;
        let formats = [defs::MINI_FORMAT_HASH, defs::MINI_FORMAT_CSUM, defs::MINI_FORMAT_CSUM_STRIDE];
        if part.cqe_comp_en != 0 && (!self.spec.mlx5.compression || !formats.contains(&format)) {
            return Err(call.refuse(
                Errno::OPNOTSUPP,
                format_args!("{name}: unsupported format {format} of compressed completions"),
            ));
        }
        let ring = self.ring_of(call, "completion ring", part.buf_addr, entries * CQE_BYTES as u64)?;
        let record = self.record(call, part.db_addr)?;
        let number = self.cq_numbers.alloc().ok_or(Errno::NOSPC)?;
        let compress = (part.cqe_comp_en != 0).then_some(format);
        let id = self.cqs.add(Cq::new(number, ring, record, entries.trailing_zeros(), compress, cq.owner, self.scan));
        self.by_cq.insert(number, id);
        call.output = abi::CreateCqReply { cqn: number, reserved: 0 }.as_bytes().to_vec();
        Ok((id, entries as u32 - 1))
    }

    fn destroy_cq(&mut self, cq: ObjectId) {
        if let Some(cq) = self.cqs.remove(cq) {
            self.by_cq.remove(&cq.number);
            self.cq_numbers.free(cq.number);
        }
    }

    fn create_qp(&mut self, call: &mut Call<'_, H>, qp: &NewQp) -> Result<(ObjectId, u32, QpCap), Errno> {
        qp.check_raw_packet(call, self.name())?;
        match qp.table {
            Some(table) => self.create_rss(call, qp, table),
            None => self.create_sq(call, qp),
        }
    }

    fn modify_qp(&mut self, call: &mut Call<'_, H>, qp: ObjectId, mask: u32, state: u8, port: u8) -> Result<(), Errno> {
        const STATE: u32 = 1;
        const PORT: u32 = 0x20;
        let name = self.spec.name.clone();
        let ports = self.ports.len();
        let Some(Qp::Send(sq)) = self.qps.get(qp) else {
            return Err(call.refuse(
                Errno::OPNOTSUPP,
                format_args!("{name}: a queue pair over an indirection table has no states"),
            ));
        };
        let sq = self.sqs.get_mut(*sq).ok_or(Errno::INVAL)?;
        if mask & STATE == 0 {
            return Err(call.refuse(
                Errno::INVAL,
                format_args!("{name}: modify_qp with mask {mask:#x} does not change the state"),
            ));
        }
        let refuse = |why: String| Err(call.refuse(Errno::INVAL, format_args!("{name} sq {:#x}: {why}", sq.number)));
        let next = match (sq.state, state) {
            (_, 0) => State::Reset,
            (_, 6) => State::Error,
            (now @ (State::Reset | State::Init), 1) => {
                let names = mask & PORT != 0;
                if now == State::Reset && !names || names && !(1..=ports).contains(&usize::from(port)) {
                    return refuse(format!("INIT needs a port from 1 to {ports}"));
                }
                State::Init
            }
            (State::Init, 2) => State::ReadyToReceive,
            (State::ReadyToReceive | State::Ready, 3) => State::Ready,
            (now, state) => return refuse(format!("cannot change from {now:?} to state {state}")),
        };
        if next == State::Init && mask & PORT != 0 {
            sq.port = usize::from(port) - 1;
        }
        if next == State::Reset {
            sq.reset();
        }
        sq.state = next;
        Ok(())
    }

    fn destroy_qp(&mut self, qp: ObjectId) {
        match self.qps.remove(qp) {
            Some(Qp::Send(sq)) => self.remove_sq(sq),
            Some(Qp::Rss(rss)) => self.queue_numbers.free(rss.number),
            None => {}
        }
    }

    fn create_wq(&mut self, call: &mut Call<'_, H>, wq: &NewWq) -> Result<(ObjectId, u32), Errno> {
        let part: abi::CreateWq = driver_part(call.input, 36)?;
        let name = self.spec.name.clone();
        let (entries, shift) = (part.rq_wqe_count, part.rq_wqe_shift);
        if !entries.is_power_of_two() || entries > self.spec.max_queue || !(4..=9).contains(&shift) {
            let why = format!(
                "{name}: a receive ring of {entries} entries of 2^{shift} bytes; \
                 at most {} (a power of two), 16 to 512 bytes",
                self.spec.max_queue
            );
            return Err(call.refuse(Errno::INVAL, why));
        }
        let layout = if part.comp_mask & abi::CREATE_WQ_STRIDING != 0 {
            let (log_bytes, log_strides) = (part.single_stride_log_num_of_bytes, part.single_wqe_log_num_of_strides);
            if !self.spec.mlx5.striding
                || !(6..=13).contains(&log_bytes)
                || !(3..=16).contains(&log_strides)
                || part.two_byte_shift_en != 0
            {
                let why = format!(
                    "{name}: unsupported strides: 2^{log_strides} of 2^{log_bytes} bytes, shift {}",
                    part.two_byte_shift_en
                );
                return Err(call.refuse(Errno::OPNOTSUPP, why));
            }
            Layout::Striding { log_bytes, log_strides }
        } else {
            Layout::Linear
        };
        let allowed = uverbs::WQ_FLAGS_CVLAN_STRIPPING;
        if wq.flags & !allowed != 0 {
            return Err(
                call.refuse(Errno::OPNOTSUPP, format_args!("{name}: unsupported work queue flags {:#x}", wq.flags))
            );
        }
        let ring = self.ring_of(call, "receive ring", part.buf_addr, u64::from(entries) << shift)?;
        let record = self.record(call, part.db_addr)?;
        let number = self.queue_numbers.alloc().ok_or(Errno::NOSPC)?;
        let user_index = if self.spec.mlx5.cqe_version == 0 { 0xff_ffff } else { part.user_index };
        let strip = wq.flags & uverbs::WQ_FLAGS_CVLAN_STRIPPING != 0;
        let rq = Rq::new(number, user_index, (ring, entries, shift), record, layout, strip, wq.cq, wq.pd, wq.owner);
        call.output = abi::CreateWqReply { response_length: 8, reserved: 0 }.as_bytes()[..8.min(call.room)].to_vec();
        Ok((self.rqs.add(rq), number))
    }

    fn modify_wq(&mut self, call: &mut Call<'_, H>, wq: ObjectId, mask: u32, state: u32) -> Result<(), Errno> {
        const STATE: u32 = 1;
        let name = self.spec.name.clone();
        let rq = self.rqs.get_mut(wq).ok_or(Errno::INVAL)?;
        if mask & STATE == 0 {
            return Ok(());
        }
        let next = match (rq.state, state) {
            (_, 0) => State::Reset,
            (_, 2) => State::Error,
            (State::Reset | State::Ready, 1) => State::Ready,
            (now, state) => {
                return Err(call.refuse(
                    Errno::INVAL,
                    format_args!("{name} rq {:#x}: cannot change from {now:?} to state {state}", rq.number),
                ));
            }
        };
        if next == State::Reset || rq.state == State::Reset {
            rq.reset();
        }
        rq.state = next;
        Ok(())
    }

    fn destroy_wq(&mut self, wq: ObjectId) {
        if let Some(rq) = self.rqs.remove(wq) {
            self.queue_numbers.free(rq.number);
        }
    }

    fn create_table(&mut self, call: &mut Call<'_, H>, wqs: &[ObjectId]) -> Result<ObjectId, Errno> {
        if !wqs.len().is_power_of_two() || wqs.len() > MAX_TABLE {
            let why = format!(
                "{}: an indirection table of {} entries; a power of two up to {MAX_TABLE}",
                self.name(),
                wqs.len()
            );
            return Err(call.refuse(Errno::INVAL, why));
        }
        Ok(self.tables.add(wqs.to_vec()))
    }

    fn destroy_table(&mut self, table: ObjectId) {
        self.tables.remove(table);
    }

    fn rules(&mut self) -> Option<&mut dyn FlowRules<H>> {
        Some(self)
    }

    fn method(&mut self, call: &mut Call<'_, H>, attributes: &mut Attributes<'_, H>) -> Result<(), Errno> {
        match attributes.method() {
            (abi::OBJECT_UAR, abi::UAR_ALLOC) if self.spec.mlx5.dynamic_pages => self.uar_alloc(call, attributes),
            (abi::OBJECT_UAR, abi::UAR_DESTROY) => self.uar_destroy(call, attributes),
            (abi::OBJECT_VAR, abi::VAR_ALLOC) if self.spec.mlx5.var => self.var_alloc(call, attributes),
            (abi::OBJECT_VAR, abi::VAR_DESTROY) if self.spec.mlx5.var => self.var_destroy(call, attributes),
            (abi::OBJECT_DEVX_UMEM, abi::UMEM_REG) => self.reg_umem(call, attributes),
            (abi::OBJECT_DEVX_UMEM, abi::UMEM_DEREG) => self.dereg_umem(call, attributes),
            (abi::OBJECT_DEVX, abi::DEVX_QUERY_EQN) => self.query_eqn(call, attributes),
            (abi::OBJECT_DEVX, abi::DEVX_OTHER) => self.general_command(call, attributes),
            // Programs do without the descriptor of asynchronous commands.
            (abi::OBJECT_DEVX_ASYNC_CMD_FD, _) => Err(call.decline(Errno::PROTONOSUPPORT)),
            _ => Err(Errno::PROTONOSUPPORT),
        }
    }

    fn doorbell(&mut self, env: &mut Env<'_>, context: ContextId, store: Store) -> bool {
        if self.contexts.get(&context).is_none_or(|context| context.dead) {
            return false;
        }
        Mlx5::ring(self, env, context, store);
        self.work(env)
    }

    fn work(&mut self, env: &mut Env<'_>) -> bool {
        let more = Mlx5::transmit(self, env);
        self.deliver_to_sniffers(env);
        more
    }

    fn receive(&mut self, env: &mut Env<'_>, port: usize, frames: &[&[u8]], lossless: bool) -> usize {
        self.receive_frames(env, port, frames, lossless)
    }

    fn flush(&mut self, env: &mut Env<'_>) {
        self.end_burst(env);
    }

    fn fault(&mut self, env: &mut Env<'_>, kind: &FaultKind) {
        match *kind {
            FaultKind::Link { port, up } => set_link(&mut self.ports[usize::from(port) - 1].up, port, up, env.events),
            FaultKind::DeviceFatal => {
                self.reset();
                env.events.push(Event::Device(uverbs::EVENT_DEVICE_FATAL));
            }
            FaultKind::PortHeld { .. } | FaultKind::PortFreed { .. } => {
                env.log.line(format_args!(
                    "{}: the kernel shares the ports of this device and never holds one",
                    self.spec.name
                ));
                return;
            }
            FaultKind::FailCommand { .. } | FaultKind::CompletionError { .. } | FaultKind::CorruptCqe { .. } => return,
        }
        env.log.line(format_args!("{}: injected fault: {kind}", self.spec.name));
    }

    fn is_dead(&self, context: ContextId) -> bool {
        self.contexts.get(&context).is_some_and(|context| context.dead)
    }

    fn out_of_buffer(&self, port: usize) -> Option<u64> {
        Some(self.ports.get(port)?.counters.no_buffer)
    }

    fn counters(&self) -> serde_json::Value {
        let sqs: Vec<_> = self
            .sqs
            .iter()
            .map(|(_, sq)| {
                serde_json::json!({
                    "number": sq.number, "port": sq.port + 1, "packets": sq.sent, "bytes": sq.sent_bytes,
                    "errors": sq.errors, "descriptors": sq.descriptors, "completions": sq.completions,
                    "doorbells": sq.doorbells,
                    "blue_flames": sq.blue_flames, "segmented": sq.segmented,
                    "segmented_in_tunnels": sq.segmented_in_tunnels,
                    "wrong_doorbells": sq.wrong_doorbells, "unserved": sq.unserved(),
                    "state": format!("{:?}", sq.state),
                })
            })
            .collect();
        let rqs: Vec<_> = self
            .rqs
            .iter()
            .map(|(_, rq)| {
                serde_json::json!({
                    "number": rq.number, "packets": rq.received, "bytes": rq.received_bytes, "no_buffer": rq.no_buffer,
                    "fillers": rq.fillers, "errors": rq.errors, "state": format!("{:?}", rq.state),
                })
            })
            .collect();
        let ports: Vec<_> = self
            .ports
            .iter()
            .enumerate()
            .map(|(at, port)| {
                let c = &port.counters;
                serde_json::json!({
                    "port": at + 1, "up": port.up, "received": c.received, "received_bytes": c.received_bytes,
                    "sent": c.sent, "sent_bytes": c.sent_bytes, "no_rule": c.no_rule,
                    "ruled_out": c.ruled_out, "no_buffer": c.no_buffer,
                    "sent_ruled_out": c.sent_ruled_out, "too_long": c.too_long, "rules": self.steering.rules(at),
                })
            })
            .collect();
        serde_json::json!({
            "name": self.spec.name, "ports": ports, "send_queues": sqs, "receive_queues": rqs, "resets": self.resets,
            "stray_doorbells": self.stray_doorbells, "var_doorbells": self.var_doorbells,
            "unfit": self.steering.unfit, "to_kernel": self.steering.to_kernel,
            "completions": self.cqs.iter().map(|(_, cq)| cq.completions).sum::<u64>(),
            "compressed_sessions": self.cqs.iter().map(|(_, cq)| cq.sessions).sum::<u64>(),
        })
    }
}
