//! What a provider's device can do, and the verbs objects of its queues.

use std::iter;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use wirepath_memory::BufferAllocator;
use wirepath_verbs::mlx5::var::{ImportedVar, Var};
use wirepath_verbs::{
    CompletionQueue, CompletionQueueOptions, Context, Error, ProtectionDomain, Provider, QueuePairState, RawPacketQp,
    RawPacketQpOptions, Result, RssQp, Segment, SendRequests, WorkQueue, WorkQueueOptions,
};

use super::rx::{ReceiveMode, ReceiveRing};
use super::tx::SendRing;
use super::{NAME, Options};
use crate::drivers::direct::attach::{Borrow, Lend, Lent, Views};
use crate::drivers::direct::device::{Direction, Made, Nic, Parts, Receivers};
use crate::drivers::direct::fault::Fault;
use crate::drivers::direct::find::Who;
use crate::drivers::direct::graves::Ending;
use crate::drivers::direct::keys::Keys;
use crate::drivers::direct::opened;
use crate::drivers::direct::receive::{PoolDry, Spread, buffers_for};
use crate::drivers::direct::registered::Registered;
use crate::drivers::direct::rules::Rules;
use crate::drivers::direct::rules::ibv::{self, Ibv};
use crate::drivers::direct::steering::{MakePair, Whose, spread};
use crate::drivers::direct::{MIN_DEPTH, RSS_KEY, longest_frame};
use crate::packet::Pool;
use crate::port::{Capabilities, Offloads, PortConfig, RuleHardware};

/// Most queues each way that are offered.
const MAX_QUEUES: u32 = 256;
/// Most entries of a ring.
const MAX_DEPTH: u32 = 1 << 14;
/// Largest MTU that is offered; the device may end it earlier.
const MAX_MTU: u16 = 9202;
/// Segments of a send request beyond the buffers of the longest frame: a header that was put in front.
const HEADERS: usize = 1;

type Opened = opened::Opened<()>;

/// A device of any provider.
pub(super) struct VerbsNic {
    queues: u16,
    /// Most entries of a ring.
    depth: u32,
    /// Most segments of a request.
    segments: u32,
    /// Whether the device computes checksums of what is sent. Whether it tells of those received, no provider says before.
    checksums: bool,
    notes: Vec<String>,
    /// Rules in the device.
    rules: Option<Rules<Ibv>>,
}

impl VerbsNic {
    /// Buffers of a receive request, and segments of a send request.
    fn buffers(config: &PortConfig) -> usize {
        buffers_for(longest_frame(config.mtu))
    }

    fn send_depth(&self, config: &PortConfig) -> u32 {
        config.depth.max(MIN_DEPTH).next_power_of_two().min(self.depth)
    }

    /// Requests of a receive ring: one of long frames holds about as many buffers as one of short frames.
    fn receive_depth(&self, config: &PortConfig) -> u32 {
        (config.depth / Self::buffers(config) as u32).max(MIN_DEPTH).next_power_of_two().min(self.depth)
    }
}

/// A queue pair that sends, and where it completes.
fn sender(opened: &Opened, requests: u32, segments: u32, owner: &str) -> Result<(CompletionQueue, RawPacketQp)> {
    let completions = CompletionQueue::new(&opened.context, &CompletionQueueOptions::new(requests, owner))?;
    let options = RawPacketQpOptions::send(&completions, requests, segments, owner);
    let pair = RawPacketQp::new(&opened.domain, &options)?;
    Ok((completions, pair))
}

/// Whether the provider's library takes a request with checksums. libmlx5 asks the device and its ports for itself as it opens them, goes on
/// where the kernel refuses that, and then refuses each such request although the device tells everybody else that it has checksums. A pair
/// in the error state sends nothing.
fn checksums_refused(pair: &RawPacketQp, port: u8) -> Result<Option<Error>> {
    // By way of the state in which it could send: libraries note there what may be posted.
    pair.start(port)?;
    pair.set_state(QueuePairState::Error, port)?;
    let frame = [0u8; 64];
    let mut requests = SendRequests::new(1, 1);
    let pushed = requests.push(0, true, iter::once(Segment { address: frame.as_ptr() as u64, bytes: 64, key: 0 }));
    debug_assert!(pushed, "there is room for one");
    Ok(requests.post(pair).err().map(|refused| refused.error))
}

impl Nic for VerbsNic {
    const WHO: Who = Who { driver: NAME, module: "ib_uverbs", since: "2.6.12", prefix: "", provider: Provider::Other };
    type Options = Options;
    type Verbs = ();
    type Memory = Registered;
    type Tx = SendRing;
    type Rx = ReceiveRing;
    type ReceiveAt = ();

    fn verbs(_: &ProtectionDomain, _: Arc<BufferAllocator>, _: u8) -> Result<()> {
        Ok(())
    }

    fn meet(options: Options, opened: &Opened) -> Result<Self> {
        let attributes = opened.attributes()?;
        let lacks = |what: &str| {
            let name = opened.context.device().name();
            Err(Error::Request(format!("{name} ({}) {what}", opened.context.provider())))
        };
        if opened.context.provider() == Provider::Mana {
            return lacks("posts nothing through libibverbs; use driver = \"mana\"");
        }
        if attributes.rss.is_none() || attributes.max_receive_work_queues == 0 {
            return lacks("has no receive work queues for raw packets");
        }
        // Says now what stands in the way of a queue pair, such as a missing capability.
        let probe = sender(opened, MIN_DEPTH, 1, "probe")?;
        let queues = attributes
            .max_queue_pairs
            .min(attributes.max_completion_queues / 2)
            .min(attributes.max_receive_work_queues);
        let depth = (attributes.max_work_requests / 2).min(attributes.max_completions).clamp(MIN_DEPTH, MAX_DEPTH);
        let refusal = match options.checksums && attributes.raw_checksum {
            true => checksums_refused(&probe.1, opened.port)?,
            false => None,
        };
        let checksums = options.checksums && attributes.raw_checksum && refusal.is_none();
        let mut notes = vec![
            "VLAN tags stay in received frames, and nothing is known of hashes: completions of libibverbs tell neither"
                .to_owned(),
        ];
        let rules = attributes.flow_steering.then(|| {
            let mut can = ibv::capabilities(NAME, &options.which.device);
            can.tag_bits = 0;
            can.notes.push("rules mark nothing: completions of libibverbs do not tell the mark".to_owned());
            Rules::new(can)
        });
        notes.push(match &rules {
            Some(_) => {
                "flow rules get into the device by ibv_create_flow, as far as they mark and change nothing".to_owned()
            }
            None => "no flow rules in the device: all of them run in software".to_owned(),
        });
        match refusal {
            Some(error) => notes.push(format!(
                "checksums in software: the device has them, and {} refuses them ({error}); it may not have been let query the device or \
                 the port (query_device, query_port) when it opened the device",
                opened.context.provider()
            )),
            None if options.checksums && !checksums => {
                notes.push("checksums in software: the device has none for raw packets".to_owned());
            }
            None => {}
        }
        if opened.context.provider() == Provider::Mlx5 {
            notes.push("driver = \"mlx5\" is faster on this device, and can do more".to_owned());
        }
        Ok(Self {
            queues: queues.clamp(1, MAX_QUEUES) as u16,
            // The power of two below.
            depth: 1 << depth.ilog2(),
            segments: attributes.max_segments.max(1),
            checksums,
            notes,
            rules,
        })
    }

    fn capabilities(&self, plain: Capabilities) -> Capabilities {
        // What the device cannot do for a packet, the driver does.
        let offloads = Offloads::RX_CHAINS
            .with(Offloads::TX_CHAINS)
            .with(Offloads::TX_VLAN_INSERT)
            .with(Offloads::TX_L3_CHECKSUM)
            .with(Offloads::TX_L4_CHECKSUM);
        let checksums = if self.checksums { "checksums sent by the device" } else { "checksums in software" };
        Capabilities {
            mode: format!("plain verbs, {checksums}, RSS"),
            notes: self.notes.clone(),
            max_rx_queues: self.queues,
            max_tx_queues: self.queues,
            max_mtu: MAX_MTU,
            // Rings that are asked to be deeper get as deep as they can.
            max_depth: MAX_DEPTH,
            offloads,
            max_tx_segments: (self.segments as usize).min(buffers_for(longest_frame(MAX_MTU)) + HEADERS) as u16,
            ..plain
        }
    }

    fn depths(&self, config: &PortConfig) -> [usize; 2] {
        [self.send_depth(config) as usize, self.receive_depth(config) as usize * Self::buffers(config)]
    }

    fn register(&self, opened: &Opened, pool: &Pool) -> Result<Registered> {
        let rules = self.rules.as_ref().map(|rules| rules.open(Ibv::new(&opened.context, opened.port)));
        Ok(Registered::new(opened, pool)?.with(rules))
    }

    fn send(&self, parts: &Parts<'_, Self>, index: usize) -> Result<Made<SendRing>> {
        let Parts { opened, memory, config, .. } = parts;
        let depth = self.send_depth(config);
        let segments = ((Self::buffers(config) + HEADERS) as u32).min(self.segments);
        let (completions, pair) = sender(opened, depth, segments, &opened.owner("transmit", index))?;
        pair.start(opened.port)?;
        let (ending, id) = (Ending::new(Box::new(()), vec![pair.fate()], parts.graves), pair.id());
        let depth = depth.min(pair.sizes().send_requests);
        let keys = Arc::clone(&memory.keys);
        let ring = SendRing::new(ending, pair, completions, keys, depth, segments as usize, self.checksums);
        Ok(Made { ring, id })
    }

    fn receive(&self, parts: &Parts<'_, Self>, _: usize) -> Result<Receivers<Self>> {
        let Parts { opened, memory, config, .. } = parts;
        let depth = self.receive_depth(config);
        let mode = ReceiveMode {
            buffers: Self::buffers(config),
            longest: longest_frame(config.mtu) as u32,
            lkey: memory.keys.home().lkey(),
            sink: memory.sink,
        };
        // The last segment is the sink.
        let segments = mode.buffers as u32 + 1;
        if segments > self.segments {
            return Err(Error::Request(format!(
                "an MTU of {} takes {segments} segments, and the device has {}",
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
        let fates = all.iter().map(WorkQueue::fate).collect();
        let domain = opened.domain.clone();
        let pairs: MakePair = Arc::new(move |table, fields| RssQp::new(&domain, table, fields, &RSS_KEY));
        let (own, reception) = spread(&pairs, &all, opened.port, Whose::of(parts.found.mac, config), false)?;
        let rules = self.rules.as_ref().map(|rules| rules.receive(reception));
        // In this order: nothing is unregistered that the device may still write.
        let hardware = Box::new((rules, own, all, Arc::clone(&memory.keys)));
        let spread = Spread::new(Ending::new(hardware, fates, parts.graves));
        let mut made = Vec::new();
        for (completions, queue) in queues {
            let id = queue.id();
            let ring =
                ReceiveRing::new(Arc::clone(&spread), queue, completions, &config.pool, parts.blank, depth, mode)?;
            made.push(Made { ring, id });
        }
        Ok(Receivers { spread, queues: made, lent: Vec::new() })
    }

    fn learn(&mut self, _: Fault, _: Direction) {}

    fn forget(&mut self) {
        if let Some(rules) = &self.rules {
            rules.clear();
        }
    }

    fn rules(&mut self) -> Option<&mut dyn RuleHardware> {
        self.rules.as_mut().map(|rules| rules as &mut dyn RuleHardware)
    }
}

/// Queues of libibverbs lie in memory that only its own process knows: a port of this driver is offered to nobody.
fn not_lent() -> Error {
    Error::Request("queues of plain verbs cannot be in another process".to_owned())
}

impl Lend for VerbsNic {
    type Common = ();
    type SendAt = ();
    type Visitor = ();

    fn common(&self, _: &Registered, _: &PortConfig) {}

    fn lend_send(&self, _: &Parts<'_, Self>, _: usize) -> Result<Lent<()>> {
        Err(not_lent())
    }

    fn lkey(memory: &Registered) -> u32 {
        memory.keys.home().lkey()
    }

    fn registration(memory: &Registered) -> Option<u32> {
        Some(memory.handle)
    }

    fn var((): &()) -> Result<Var> {
        Err(not_lent())
    }

    fn import_var((): &(), _: &[u8], _: &OwnedFd) -> Result<ImportedVar> {
        Err(not_lent())
    }

    fn visit(_: OwnedFd) -> Result<((), Option<Context>)> {
        Err(not_lent())
    }

    fn borrow_send((): &(), (): &(), (): &(), _: &Views, _: &Arc<Keys>, _: Ending) -> Result<Option<SendRing>> {
        Err(not_lent())
    }

    fn borrow_receive(
        (): &(),
        (): &(),
        (): &(),
        _: &Views,
        _: &Borrow<'_>,
        _: Arc<Spread>,
    ) -> std::result::Result<Option<ReceiveRing>, PoolDry> {
        Ok(None)
    }

    fn mtu((): &()) -> Option<u16> {
        None
    }
}
