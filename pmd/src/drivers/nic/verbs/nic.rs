//! Capabilities of a device of any provider, and the verbs objects of its queues.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use wirepath_memory::BufferAllocator;
use wirepath_nic_defs::mlx5::ETH_L2_INLINE;
use wirepath_verbs::mlx5::Mlx5;
use wirepath_verbs::mlx5::var::{ImportedVar, Var};
use wirepath_verbs::{
    CompletionQueue, CompletionQueueOptions, Context, DeviceAttributes, Error, ProtectionDomain, Provider, RawPacketQp,
    RawPacketQpOptions, Result, RssQp, WorkQueue, WorkQueueOptions,
};

use super::ring_end::RingEnd;
use super::rx::{RxConfig, RxRing};
use super::tx::{DeviceLimits, MAX_TSO_HEADER, TxRing};
use super::{NAME, Options};
use crate::drivers::nic::common::mr_table::MrTable;
use crate::drivers::nic::common::nic::{Direction, NewRing, NewRxQueues, Nic, QueueContext, SharedQueue};
use crate::drivers::nic::common::open_device;
use crate::drivers::nic::common::post_probe;
use crate::drivers::nic::common::probe::ProbeSpec;
use crate::drivers::nic::common::quarantine::QueueTeardown;
use crate::drivers::nic::common::queue_fault::QueueFault;
use crate::drivers::nic::common::registered_memory::RegisteredMemory;
use crate::drivers::nic::common::rules::ibv::{self, IbvBackend};
use crate::drivers::nic::common::rules::{CreateRssQp, Rules};
use crate::drivers::nic::common::rx_queue::{PoolExhausted, RssGroup, buffers_for};
use crate::drivers::nic::common::shared_memory::SharedRegions;
use crate::drivers::nic::common::shared_nic::{RxImport, SharedNic};
use crate::drivers::nic::common::steering::{RxFilter, Steering, install_steering};
use crate::drivers::nic::common::{MIN_DEPTH, RSS_KEY, max_frame_len, ring_depth};
use crate::port::{Bifurcation, Capabilities, Offloads, PortConfig, RuleHardware};
use wirepath_packet::Pool;

/// Most queues offered in each direction.
const MAX_QUEUES: u32 = 256;
/// Most entries of a ring.
const MAX_DEPTH: u32 = 1 << 14;
/// Largest MTU that is offered. The device may support less.
const MAX_MTU: u16 = 9202;
/// Segments of a send request beyond the buffers of the longest frame: one prepended header.
const HEADERS: usize = 1;
/// Most bytes of a superframe: a Linux socket buffer of 64 KiB with its Ethernet header and a tag.
const MAX_SUPERFRAME: usize = (1 << 16) + 18;

type OpenDevice = open_device::OpenDevice<()>;

/// A device of any provider.
pub(super) struct VerbsNic {
    queues: u16,
    /// Most entries of a ring.
    depth: u32,
    /// Most segments of a request.
    segments: u32,
    /// True if the device computes checksums of sent packets. Providers do not report whether it verifies
    /// those of received packets.
    checksums: bool,
    /// TCP segmentation by the device.
    tso: Option<TsoLimits>,
    notes: Vec<String>,
    /// Flow rules in the device.
    rules: Option<Rules<IbvBackend>>,
    /// Steering of the receive queues, while they exist.
    steering: Mutex<Weak<Mutex<Steering>>>,
}

/// Limits of send rings with TCP segmentation.
struct TsoLimits {
    /// Most payload bytes of a packet.
    max_bytes: usize,
    /// Most entries of a ring, which have room for headers and many segments.
    depth: u32,
    /// Segments of a request.
    segments: u32,
    /// Bytes of other packets that libmlx5 copies into its requests.
    inline: usize,
}

impl VerbsNic {
    /// Returns the buffers of a receive request, and the segments of a send request without TCP segmentation.
    fn buffers(config: &PortConfig) -> usize {
        buffers_for(max_frame_len(config.mtu))
    }

    fn send_depth(&self, config: &PortConfig) -> u32 {
        ring_depth(config.depth, self.tso.as_ref().map_or(self.depth, |tso| tso.depth))
    }

    /// Returns the requests of a receive ring. The number of buffers is about the same for short and long
    /// frames.
    fn receive_depth(&self, config: &PortConfig) -> u32 {
        ring_depth(config.depth / Self::buffers(config) as u32, self.depth)
    }
}

/// Creates a queue pair for sending, with its completion queue. `max_header`: most header bytes of a TSO packet.
fn sender(
    opened: &OpenDevice,
    requests: u32,
    segments: u32,
    max_header: usize,
    owner: &str,
) -> Result<(CompletionQueue, RawPacketQp)> {
    let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(requests, owner))?;
    let max_tso_header = max_header as u16;
    let options =
        RawPacketQpOptions { max_tso_header, ..RawPacketQpOptions::send(&completions, requests, segments, owner) };
    let pair = RawPacketQp::new(&opened.domain, &options)?;
    Ok((completions, pair))
}

/// Finds out what the provider does of TCP segmentation, in rings of up to `depth` entries, a power of two.
///
/// The device's attributes are not enough: libmlx4 passes them on, but does not post such packets.
fn probe_tso(opened: &OpenDevice, attributes: &DeviceAttributes, mut depth: u32) -> Result<TsoLimits> {
    let segments = attributes.max_segments.min((buffers_for(MAX_SUPERFRAME) + HEADERS) as u32);
    let (_completions, pair) = loop {
        match sender(opened, depth, segments, MAX_TSO_HEADER, "probe") {
            // The ring would be too large.
            Err(error) if error.errno() == Some(libc::EINVAL) && depth > MIN_DEPTH => depth /= 2,
            created => break created?,
        }
    };
    if let Some(error) = post_probe::tso_refusal(&pair, opened.port)? {
        return Err(error);
    }
    // libmlx5 copies the Ethernet header and a tag into requests, if the device needs them there, and refuses shorter
    // packets (rdma-core: providers/mlx5/qp.c, copy_eth_inline_headers).
    let is_inline = opened.context.provider() == Provider::Mlx5
        && post_probe::refusal(&pair, opened.port, ETH_L2_INLINE as u32 - 1, false)?.is_some();
    let inline = if is_inline { ETH_L2_INLINE } else { 0 };
    Ok(TsoLimits { max_bytes: attributes.max_tso as usize, depth, segments, inline })
}

impl Nic for VerbsNic {
    const PROBE: ProbeSpec =
        ProbeSpec { driver: NAME, module: "ib_uverbs", since: "2.6.12", prefix: "", provider: Provider::Other };
    type Options = Options;
    type Verbs = ();
    type Memory = RegisteredMemory;
    type Tx = TxRing;
    type Rx = RxRing;
    type RxQueueSpans = ();

    /// Fails if libmlx5 found no completions of work queues. A refused command at any opening can cause this too:
    /// libmlx5 then takes the device for an older one.
    fn verbs(domain: &ProtectionDomain, allocator: Arc<BufferAllocator>, _: u8) -> Result<()> {
        let context = domain.context();
        if context.provider() != Provider::Mlx5 {
            return Ok(());
        }
        let mlx5 = Mlx5::from_context(context)?;
        // With CQE version 0 libmlx5 looks for the queue of a received packet among queue pairs and shared
        // receive queues only (rdma-core: providers/mlx5/cq.c, get_cur_rsc), so that every poll fails.
        if !mlx5.capabilities()?.cqe_version_1 {
            return Err(Error::InvalidRequest(format!(
                "{} (libmlx5) reports completions of version 0, in which libmlx5 does not find receive work queues; \
                 use driver = \"mlx5\"",
                context.device().name()
            )));
        }
        // `RingEnd` reads the doorbell records of send queues.
        mlx5.set_allocator(allocator)
    }

    fn probe(options: Options, opened: &OpenDevice) -> Result<Self> {
        let attributes = opened.attributes()?;
        let lacks = |what: &str| {
            let name = opened.context.device().name();
            Err(Error::InvalidRequest(format!("{name} ({}) {what}", opened.context.provider())))
        };
        if opened.context.provider() == Provider::Mana {
            return lacks("does not support posting through libibverbs; use driver = \"mana\"");
        }
        if attributes.rss.is_none() || attributes.max_receive_work_queues == 0 {
            return lacks("has no receive work queues for raw packets");
        }
        // Fails early if no queue pair can be created, for example for lack of a privilege.
        let probe = sender(opened, MIN_DEPTH, 1, 0, "probe")?;
        let queues = attributes
            .max_queue_pairs
            .min(attributes.max_completion_queues / 2)
            .min(attributes.max_receive_work_queues);
        let depth = (attributes.max_work_requests / 2).min(attributes.max_completions).clamp(MIN_DEPTH, MAX_DEPTH);
        // Rounded down to a power of two.
        let depth = 1 << depth.ilog2();
        let refusal = match options.checksums && attributes.raw_checksum {
            // libmlx5 queries device and ports itself when it opens them. If the kernel refuses that, it
            // continues and later refuses each such request, although the device reports checksums.
            true => post_probe::refusal(&probe.1, opened.port, 64, true)?,
            false => None,
        };
        let checksums = options.checksums && attributes.raw_checksum && refusal.is_none();
        let mut notes = vec![
            "VLAN tags stay in received frames and RSS hashes are unknown: completions of libibverbs contain neither"
                .to_owned(),
        ];
        let rules = attributes.flow_steering.then(|| {
            let mut caps = ibv::capabilities(NAME, &options.selector.device);
            caps.tag_bits = 0;
            caps.notes.push("rules cannot mark packets: completions of libibverbs do not contain the mark".to_owned());
            Rules::new(caps)
        });
        notes.push(match &rules {
            Some(_) => "flow rules without marks and modifications are installed by ibv_create_flow".to_owned(),
            None => "no flow rules in the device: all rules run in software".to_owned(),
        });
        match refusal {
            Some(error) => notes.push(format!(
                "checksums in software: the device supports them, but {} refuses them ({error}); the kernel may have \
                 refused its queries of device or port (query_device, query_port) when it opened the device",
                opened.context.provider()
            )),
            None if options.checksums && !checksums => {
                notes.push("checksums in software: the device does not support them for raw packets".to_owned());
            }
            None => {}
        }
        let tso = match checksums && attributes.max_tso > 0 {
            true => match probe_tso(opened, &attributes, depth) {
                Ok(tso) => Some(tso),
                Err(error) => {
                    let provider = opened.context.provider();
                    notes.push(format!(
                        "TCP segmentation in software: the device supports it, but {provider} refuses it ({error})"
                    ));
                    None
                }
            },
            false => None,
        };
        if opened.context.provider() == Provider::Mlx5 {
            notes.push("driver = \"mlx5\" is faster on this device and has more features".to_owned());
        }
        Ok(Self {
            queues: queues.clamp(1, MAX_QUEUES) as u16,
            depth,
            segments: attributes.max_segments.max(1),
            checksums,
            tso,
            notes,
            rules,
            steering: Mutex::default(),
        })
    }

    fn capabilities(&self, plain: Capabilities) -> Capabilities {
        // The driver does what the device cannot.
        let offloads = Offloads::RX_CHAINS
            .with(Offloads::TX_CHAINS)
            .with(Offloads::TX_VLAN_INSERT)
            .with(Offloads::TX_L3_CHECKSUM)
            .with(Offloads::TX_L4_CHECKSUM);
        let offloads = if self.tso.is_some() { offloads.with(Offloads::TX_SEGMENT) } else { offloads };
        let checksums = if self.checksums { "transmit checksums by the device" } else { "checksums in software" };
        let tso = if self.tso.is_some() { ", TCP segmentation by the device" } else { "" };
        Capabilities {
            mode: format!("plain verbs, {checksums}{tso}, RSS"),
            notes: self.notes.clone(),
            max_rx_queues: self.queues,
            max_tx_queues: self.queues,
            max_mtu: MAX_MTU,
            // Deeper settings are reduced to what the device supports.
            max_depth: MAX_DEPTH,
            offloads,
            can_bifurcate: true,
            max_tx_segments: (self.segments as usize).min(buffers_for(max_frame_len(MAX_MTU)) + HEADERS) as u16,
            ..plain
        }
    }

    fn depths(&self, config: &PortConfig) -> [usize; 2] {
        [self.send_depth(config) as usize, self.receive_depth(config) as usize * Self::buffers(config)]
    }

    fn register(&self, opened: &OpenDevice, pool: &Pool) -> Result<RegisteredMemory> {
        let rules = self.rules.as_ref().map(|rules| rules.open(IbvBackend::new(&opened.context, opened.port)));
        Ok(RegisteredMemory::new(opened, pool)?.keep_alive(rules))
    }

    fn create_tx(&self, context: &QueueContext<'_, Self>, index: usize) -> Result<NewRing<TxRing>> {
        let QueueContext { opened, memory, config, .. } = context;
        let depth = self.send_depth(config);
        let (segments, max_header) = match &self.tso {
            Some(tso) => (tso.segments, MAX_TSO_HEADER),
            None => (((Self::buffers(config) + HEADERS) as u32).min(self.segments), 0),
        };
        let (completions, pair) = sender(opened, depth, segments, max_header, &opened.owner("transmit", index))?;
        pair.start(opened.port)?;
        let ring_end = match &self.tso {
            Some(tso) if opened.context.provider() == Provider::Mlx5 => {
                Some(RingEnd::new(&Mlx5::from_context(&opened.context)?.send_queue(&pair)?, tso.inline))
            }
            _ => None,
        };
        let (teardown, id) =
            (QueueTeardown::new(Box::new(()), vec![pair.destroyed_flag()], context.quarantine), pair.id());
        let depth = depth.min(pair.sizes().send_requests);
        let limits = DeviceLimits {
            mrs: Arc::clone(&memory.mrs),
            segments: segments as usize,
            checksums: self.checksums,
            max_tso: self.tso.as_ref().map_or(0, |tso| tso.max_bytes),
            ring_end,
        };
        let ring = TxRing::new(teardown, pair, completions, depth, limits);
        Ok(NewRing { ring, id })
    }

    fn create_rx(&self, context: &QueueContext<'_, Self>, _: usize) -> Result<NewRxQueues<Self>> {
        let QueueContext { opened, memory, config, .. } = context;
        let depth = self.receive_depth(config);
        let mode = RxConfig {
            buffers: Self::buffers(config),
            longest: max_frame_len(config.mtu) as u32,
            lkey: memory.mrs.primary_mr().lkey(),
            sink: memory.sink,
        };
        // The last segment is the sink.
        let segments = mode.buffers as u32 + 1;
        if segments > self.segments {
            return Err(Error::InvalidRequest(format!(
                "an MTU of {} needs {segments} segments; the device supports {}",
                config.mtu, self.segments
            )));
        }
        let mut queues = Vec::new();
        for index in 0..usize::from(config.rx_queues) {
            let owner = opened.owner("receive", index);
            let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(depth, &*owner))?;
            let options = WorkQueueOptions { segments, ..WorkQueueOptions::new(&completions, depth, &*owner) };
            let queue = WorkQueue::new(&opened.domain, &options)?;
            queue.start()?;
            queues.push((completions, queue));
        }
        let all: Vec<_> = queues.iter().map(|(_, queue)| queue.clone()).collect();
        let destroyed_flags = all.iter().map(WorkQueue::destroyed_flag).collect();
        let domain = opened.domain.clone();
        let create_qp: CreateRssQp = Arc::new(move |table, fields| RssQp::new(&domain, table, fields, &RSS_KEY));
        let filter = RxFilter::new(context.rdma_port.mac, config);
        let (steering, default_rss) = install_steering(&create_qp, &all, opened.port, filter, false)?;
        let steering = Arc::new(Mutex::new(steering));
        *self.steering.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&steering);
        let rules = self.rules.as_ref().map(|rules| rules.receive(default_rss));
        // Drop order: no memory is deregistered while the device may still write to it.
        let hardware = Box::new((rules, steering, all, Arc::clone(&memory.mrs)));
        let rss_group = RssGroup::new(QueueTeardown::new(hardware, destroyed_flags, context.quarantine));
        let mut created = Vec::new();
        for (completions, queue) in queues {
            let id = queue.id();
            let ring =
                RxRing::new(Arc::clone(&rss_group), queue, completions, &config.pool, context.template, depth, mode)?;
            created.push(NewRing { ring, id });
        }
        Ok(NewRxQueues { rss_group, queues: created, shared: Vec::new() })
    }

    fn set_bifurcation(&self, packets: &Bifurcation) -> Result<()> {
        let steering = self.steering.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        let Some(steering) = steering else { return Ok(()) };
        steering.lock().unwrap_or_else(PoisonError::into_inner).set_bifurcation(packets)
    }

    fn adapt_to_fault(&mut self, _: QueueFault, _: Direction) {}

    fn reset_state(&mut self) {
        if let Some(rules) = &self.rules {
            rules.clear();
        }
    }

    fn rules(&mut self) -> Option<&mut dyn RuleHardware> {
        self.rules.as_mut().map(|rules| rules as &mut dyn RuleHardware)
    }
}

/// Returns the error for sharing. Queues of libibverbs are in memory that only their own process knows.
fn not_shareable() -> Error {
    Error::InvalidRequest("the \"verbs\" driver cannot share queues with other processes".to_owned())
}

impl SharedNic for VerbsNic {
    type Common = ();
    type TxQueueSpans = ();
    type ImportedDevice = ();

    fn common(&self, _: &RegisteredMemory, _: &PortConfig) {}

    fn share_tx(&self, _: &QueueContext<'_, Self>, _: usize) -> Result<SharedQueue<()>> {
        Err(not_shareable())
    }

    fn lkey(memory: &RegisteredMemory) -> u32 {
        memory.mrs.primary_mr().lkey()
    }

    fn mr_handle(memory: &RegisteredMemory) -> Option<u32> {
        Some(memory.handle)
    }

    fn alloc_var((): &()) -> Result<Var> {
        Err(not_shareable())
    }

    fn import_var((): &(), _: &[u8], _: &OwnedFd) -> Result<ImportedVar> {
        Err(not_shareable())
    }

    fn import_device(_: OwnedFd) -> Result<((), Option<Context>)> {
        Err(not_shareable())
    }

    fn import_tx(
        (): &(),
        (): &(),
        (): &(),
        _: &SharedRegions,
        _: &Arc<MrTable>,
        _: QueueTeardown,
    ) -> Result<Option<TxRing>> {
        Err(not_shareable())
    }

    fn import_rx(
        (): &(),
        (): &(),
        (): &(),
        _: &SharedRegions,
        _: &RxImport<'_>,
        _: Arc<RssGroup>,
    ) -> std::result::Result<Option<RxRing>, PoolExhausted> {
        Ok(None)
    }

    fn checked_mtu((): &()) -> Option<u16> {
        None
    }
}
