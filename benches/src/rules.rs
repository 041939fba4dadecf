//! The rule engine: packets with a cache hit, packets with a cache miss, and rules that change during the
//! run.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use fastrand::Rng;
use serde::Serialize;
use wirepath::cli::Failure;
use wirepath_flow::{Action, Direction, Field, Item, ItemKind, MaskedValue, Rule};
use wirepath_packet::Batch;
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::rules::{FlowCacheStats, RuleId, RuleLimits, RulePorts, RuleStage, RuleTable, Timeouts};
use wirepath_pipeline::table::hash_u64;
use wirepath_pipeline::{Context, Runtime, Stage, WorkerInfo};
use wirepath_pmd::drivers::PortSettings;
use wirepath_wire::Parser;

use crate::measure::{self, Common, MakeStage, PacketLimit, Phase, Results, Spread, Work, count, measured};
use crate::real::{Offered, RealPorts};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Number of rules
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = count(1..=4_000_000))]
    rules: u32,

    /// Number of different masks
    #[arg(long, value_name = "M", default_value_t = 20, value_parser = count(1..=1024))]
    masks: u32,

    /// Number of flows, in random order
    #[arg(long, value_name = "F", default_value_t = 100_000, value_parser = count(1..=4_000_000))]
    flows: u32,

    /// Changes of rules per second while packets pass; half of them are additions
    #[arg(long, value_name = "R", default_value_t = 0, value_parser = count(0..=10_000_000))]
    changes: u32,

    /// Kind of rules that change
    #[arg(long, value_enum, default_value_t = Changed::Exact)]
    changed: Changed,

    /// Kind of attack
    #[arg(long, value_enum, default_value_t = Attack::None)]
    attack: Attack,

    /// Flows for which the cache has room [default: all, twice]
    #[arg(long, value_name = "N", value_parser = count(64..=8_000_000))]
    cache: Option<u32>,

    #[command(flatten)]
    common: Common,

    #[command(flatten)]
    limit: PacketLimit,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Changed {
    /// Rules for single flows outside the traffic, as in connection setup
    Exact,
    /// Wildcard rules that match the traffic
    Wild,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Attack {
    /// No attack
    None,
    /// Flows whose addresses and ports have the same lower bits of CRC32C
    Flood,
    /// Eight times more flows than the cache can hold
    Thrash,
    /// Rules with the default maximum number of masks
    Explode,
}

/// Figures in cycles of the time-stamp counter per packet, in the time in which the worker had its core. They
/// include packet source and sink, parsing, lookup and the rule's action (a mark).
#[derive(Debug, Default, Serialize)]
pub(crate) struct Figures {
    rules: u32,
    masks: u32,
    flows: u32,
    /// Packets sent during the measurements.
    packets: u64,
    /// Cycles for the same packets with one rule that matches all of them.
    one_rule_cycles: f64,
    /// Cycles with all rules and a cache with room for all flows.
    cycles: f64,
    /// The same by round.
    cached_cycles: Spread,
    /// Ratio of these two.
    ratio: f64,
    /// Fraction of the packets with a cache hit.
    cached: f64,
    /// Cycles with all rules and a cache of 64 flows, so that nearly every packet is looked up.
    miss_cycles: f64,
    /// Changes per second made by the control thread, one change set each.
    changes: f64,
    /// Cycles without and with these changes, alternating in one run.
    quiet_cycles: f64,
    changing_cycles: f64,
    /// Relative increase caused by the changes.
    changes_cost: f64,
    /// Memory per rule in bytes, in addition to the rule itself.
    bytes_per_rule: usize,
}

impl Figures {
    /// Returns the cycles per packet with all rules, in the cache.
    pub(crate) fn cycles(&self) -> f64 {
        self.cycles
    }
}

impl Results for Figures {
    fn text(&self) -> String {
        let mut text = format!(
            "one rule {:.1}, {} rules of {} masks {:.1} ({:.2} times), missed {:.1} cycles/packet; {} bytes/rule\n",
            self.one_rule_cycles,
            self.rules,
            self.masks,
            self.cycles,
            self.ratio,
            self.miss_cycles,
            self.bytes_per_rule
        );
        if self.changes > 0.0 {
            text += &format!(
                "{:.0} changes/s: {:.1} instead of {:.1} cycles/packet, {:+.1} %\n",
                self.changes,
                self.changing_cycles,
                self.quiet_cycles,
                100.0 * self.changes_cost
            );
        }
        text
    }

    fn spread(&self) -> Option<f64> {
        Some(self.cached_cycles.spread)
    }
}

/// A flow: IPv4 addresses and UDP ports.
#[derive(Clone, Copy)]
pub(crate) struct Flow {
    source: u32,
    destination: u32,
    ports: [u16; 2],
}

impl Flow {
    pub(crate) fn random(random: &mut Rng) -> Self {
        let (addresses, ports) = (random.u64(..), random.u64(..));
        // The addresses come from large networks, so that flows share prefixes.
        Self {
            source: 0x0a00_0000 | (addresses >> 32) as u32 & 0x00ff_ffff,
            destination: 0xac10_0000 | addresses as u32 & 0x000f_ffff,
            ports: [(ports >> 32) as u16 | 1, ports as u16 % 1000 + 1],
        }
    }

    pub(crate) fn frame(&self) -> [u8; 64] {
        let mut frame = [0u8; 64];
        frame[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
        frame[12..26].copy_from_slice(&[8, 0, 0x45, 0, 0, 50, 0, 0, 0x40, 0, 64, 17, 0, 0]);
        frame[26..30].copy_from_slice(&self.source.to_be_bytes());
        frame[30..34].copy_from_slice(&self.destination.to_be_bytes());
        let sum: u32 = frame[14..34].chunks(2).map(|two| u32::from(two[0]) << 8 | u32::from(two[1])).sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        frame[24..26].copy_from_slice(&(!((sum & 0xffff) + (sum >> 16)) as u16).to_be_bytes());
        frame[34..36].copy_from_slice(&self.ports[0].to_be_bytes());
        frame[36..38].copy_from_slice(&self.ports[1].to_be_bytes());
        frame[38..40].copy_from_slice(&30u16.to_be_bytes());
        frame
    }

    /// Returns a rule that matches this flow with the given mask.
    fn rule(&self, mask: u32, priority: u32, mark: u32) -> Rule {
        let mut ip = Item::new(ItemKind::Ipv4);
        let mut udp = Item::new(ItemKind::Udp);
        let prefix = |address: u32, length| MaskedValue::prefix(address.into(), length, 32);
        // The mask number in mixed radix gives the destination prefix length, the source prefix length and
        // the compared ports.
        let (destination, source, ports) =
            (32 - mask % 11, [0, 24, 16, 32, 28, 20][mask as usize / 11 % 6], mask / 66 % 4);
        ip = ip.with(Field::Ipv4Dst, prefix(self.destination, destination as u8));
        ip = ip.with(Field::Ipv4Src, prefix(self.source, source));
        if (ports + mask) & 1 != 0 {
            udp = udp.exact(Field::UdpDst, self.ports[1].into());
        }
        if ports & 2 != 0 {
            udp = udp.exact(Field::UdpSrc, self.ports[0].into());
        }
        made(vec![Item::new(ItemKind::Eth), ip, udp], priority, mark)
    }

    pub(crate) fn exact_rule(&self, mark: u32) -> Rule {
        let ip = Item::new(ItemKind::Ipv4).exact(Field::Ipv4Src, self.source.into());
        let ip = ip.exact(Field::Ipv4Dst, self.destination.into());
        let udp = Item::new(ItemKind::Udp).exact(Field::UdpSrc, self.ports[0].into());
        made(vec![Item::new(ItemKind::Eth), ip, udp.exact(Field::UdpDst, self.ports[1].into())], 100, mark)
    }
}

/// Returns a rule of one of three kinds: half of the numbers, two fifths, and one tenth. Each rule overlaps
/// with all rules of the other two kinds, with none of its own kind, and matches no [`Flow`].
pub(crate) fn overlapping(number: u32) -> Rule {
    let address = u128::from(0x0b00_0000 | number & 0x00ff_ffff);
    let (eth, ip, udp) = (Item::new(ItemKind::Eth), Item::new(ItemKind::Ipv4), Item::new(ItemKind::Udp));
    match number % 10 {
        0 => made(vec![eth.exact(Field::EthSrc, 0x0200_0000_0000 | address)], 120, number),
        1..=4 => made(vec![eth, ip.exact(Field::Ipv4Dst, address)], 110, number),
        _ => {
            let udp = udp.exact(Field::UdpDst, u128::from(number % 50_000 + 1));
            made(vec![eth, ip.exact(Field::Ipv4Src, address), udp], 100, number)
        }
    }
}

fn made(pattern: Vec<Item>, priority: u32, mark: u32) -> Rule {
    Rule::new(Direction::Ingress, priority, pattern, vec![Action::Mark(mark & 0xffff | 1)]).expect("a rule")
}

/// Returns the rule that matches every packet of the measurement.
pub(crate) fn any(priority: u32) -> Rule {
    made(vec![Item::new(ItemKind::Eth), Item::new(ItemKind::Ipv4), Item::new(ItemKind::Udp)], priority, 1)
}

/// Packets and rules of a measurement.
struct Setting {
    flows: Vec<Flow>,
    frames: Arc<[[u8; 64]]>,
    /// Indices of the flows in packet order.
    order: Arc<[u32]>,
    rules: Vec<Rule>,
}

impl Setting {
    fn new(arguments: &Arguments, flows: u32, masks: u32) -> Self {
        let mut random = Rng::with_seed(1);
        let mut some = Vec::with_capacity(flows as usize);
        while some.len() < flows as usize {
            let flow = Flow::random(&mut random);
            let key = u64::from(flow.source) << 32 | u64::from(flow.destination);
            let ports = u64::from(flow.ports[0]) << 16 | u64::from(flow.ports[1]);
            // CRC is linear: keys that collide here collide with every initial value.
            if arguments.attack != Attack::Flood || (hash_u64(key) ^ hash_u64(ports << 32)) & 0xfff == 0 {
                some.push(flow);
            }
        }
        // One mask belongs to the rule that matches everything. A flow may match any number of rules. All
        // have the same priority, so that every search has to visit all tables.
        let mut rules = vec![any(200)];
        while rules.len() < arguments.rules as usize {
            let flow = some[random.usize(..some.len())];
            let mask = random.usize(..masks.saturating_sub(1).max(1) as usize);
            rules.push(flow.rule(mask as u32, 100, rules.len() as u32));
        }
        Self {
            frames: some.iter().map(Flow::frame).collect(),
            order: (0..1 << 20).map(|_| random.usize(..some.len()) as u32).collect(),
            flows: some,
            rules,
        }
    }
}

/// Overwrites received packets with the measurement's frames, applies the rules and sends the packets.
fn chain<S: Stage>(
    mut rules: RuleStage<S>,
    setting: &Setting,
    stats: Arc<Mutex<FlowCacheStats>>,
) -> impl Stage + use<S> {
    let (frames, order) = (Arc::clone(&setting.frames), Arc::clone(&setting.order));
    let (mut at, mut batches) = (0, 0u32);
    move |context: &mut Context<'_>, batch: &mut Batch| {
        for packet in batch.iter_mut() {
            if let Some(data) = packet.data_mut().first_chunk_mut::<64>() {
                *data = frames[order[at] as usize];
            }
            at = (at + 1) % order.len();
        }
        rules.process(context, batch);
        batches += 1;
        if batches % 1024 == 0 {
            *stats.lock().expect("not poisoned") = rules.stats()[0];
        }
    }
}

/// Sends packets from one port to the other.
fn across(context: &mut Context<'_>, batch: &mut Batch) {
    if let Some(port) = context.in_port() {
        context.send_batch(port.paired(), batch);
    }
}

/// State of the control thread, which changes rules during the measurement.
struct Changer<'s> {
    setting: &'s Setting,
    changed: Changed,
    masks: u32,
    random: Rng,
    added: VecDeque<RuleId>,
    made: u64,
}

impl Changer<'_> {
    /// Makes changes at the given rate for the given time.
    fn run(&mut self, table: &mut RuleTable, rate: f64, time: Duration) {
        /// Number of rules that exist at a time.
        const STANDING: usize = 1000;
        let (start, mut made) = (Instant::now(), 0.0);
        while start.elapsed() < time {
            if made >= start.elapsed().as_secs_f64() * rate {
                std::hint::spin_loop();
                continue;
            }
            made += 1.0;
            self.made += 1;
            if self.added.len() >= STANDING {
                // From here on, half of the changes are removals.
                if let Some(id) = self.added.pop_front() {
                    let _ = table.remove(id);
                }
                continue;
            }
            let mark = self.random.u32(..);
            let rule = match self.changed {
                Changed::Exact => Flow::random(&mut self.random).exact_rule(mark),
                Changed::Wild => {
                    let flow = self.setting.flows[self.random.usize(..self.setting.flows.len())];
                    let mask = self.random.usize(..self.masks.saturating_sub(1).max(1) as usize);
                    flow.rule(mask as u32, 100, mark)
                }
            };
            if let Ok(id) = table.add(rule, Timeouts::NONE) {
                self.added.push_back(id);
            }
        }
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<Figures, Failure> {
    let masks = if arguments.attack == Attack::Explode { RuleLimits::default().masks as u32 } else { arguments.masks };
    let room = arguments.cache.map_or(arguments.flows.next_power_of_two() as usize * 2, |room| room as usize);
    let flows = if arguments.attack == Attack::Thrash { room as u32 * 8 } else { arguments.flows };
    let setting = Setting::new(arguments, flows, masks);
    let limits = RuleLimits { masks: masks as usize + 1, flows: room, ..RuleLimits::default() };

    let mut figures = Figures { rules: arguments.rules, flows, ..Figures::default() };
    if arguments.limit.packets.is_some() {
        let all = phases(arguments, &setting, &setting.rules, limits, 0)?;
        (figures.packets, figures.cached_cycles, figures.cached) = (all.phases[0].packets, all.cycles(), all.cached);
        (figures.cycles, figures.masks) = (figures.cached_cycles.median, all.masks as u32);
        return Ok(figures);
    }
    let one = phases(arguments, &setting, &[any(200)], limits, 0)?;
    figures.one_rule_cycles = one.cycles().median;
    let all = phases(arguments, &setting, &setting.rules, limits, 0)?;
    (figures.cached_cycles, figures.cached) = (all.cycles(), all.cached);
    figures.cycles = figures.cached_cycles.median;
    figures.ratio = figures.cycles / figures.one_rule_cycles;
    (figures.masks, figures.bytes_per_rule) = (all.masks as u32, all.bytes_per_rule);
    let missed = phases(arguments, &setting, &setting.rules, RuleLimits { flows: 64, ..limits }, 0)?;
    figures.miss_cycles = missed.cycles().median;
    figures.packets = [one, all, missed].iter().flat_map(|it| &it.phases).map(|phase| phase.packets).sum();
    if arguments.changes > 0 {
        let both = phases(arguments, &setting, &setting.rules, limits, arguments.changes)?.phases;
        let mean = |odd: usize| {
            let of = both.iter().skip(odd).step_by(2).map(|phase| phase.cycles);
            of.clone().sum::<f64>() / of.count() as f64
        };
        (figures.quiet_cycles, figures.changing_cycles) = (mean(0), mean(1));
        figures.changes =
            both.iter().skip(1).step_by(2).map(|phase| phase.extra).sum::<f64>() / (both.len() / 2) as f64;
        figures.changes_cost = figures.changing_cycles / figures.quiet_cycles - 1.0;
    }
    Ok(figures)
}

/// Builds a table with the same rules that no worker reads.
fn decoy(rules: &[Rule], limits: RuleLimits) -> RuleTable {
    let mut table = RuleTable::new(&Domain::new(), limits, 0);
    for rule in rules {
        let _ = table.add(rule.clone(), Timeouts::NONE);
    }
    table
}

/// Result of one run.
struct Measured {
    phases: Vec<Phase>,
    cached: f64,
    masks: usize,
    bytes_per_rule: usize,
}

impl Measured {
    /// Returns the cycles per packet of the phases.
    fn cycles(&self) -> Spread {
        Spread::new(self.phases.iter().map(|phase| phase.cycles))
    }
}

/// Returns the packet source and the sink.
fn ports(common: &Common) -> Result<Vec<PortSettings>, Failure> {
    let ring = common.ring();
    measure::ports(&format!(
        "[[port]]\nname = \"a\"\ndriver = \"null\"\nnull = {{ source = \"untouched\", size = 64, ring = {ring} }}\n\
         [[port]]\nname = \"b\"\ndriver = \"null\"\n"
    ))
}

/// Runs the packets against some rules. Returns a phase for each round, or with `changes` several, of which every
/// second one has that number of changes per second.
fn phases(
    arguments: &Arguments,
    setting: &Setting,
    rules: &[Rule],
    limits: RuleLimits,
    changes: u32,
) -> Result<Measured, Failure> {
    let shared: Rc<RefCell<Option<RuleTable>>> = Rc::default();
    let stats = Arc::new(Mutex::new(FlowCacheStats::default()));
    let (common, timing) = (&arguments.common, &arguments.common.timing);
    let seconds = Duration::from_secs_f64(timing.seconds);
    let (prepared, counted) = (Rc::clone(&shared), Arc::clone(&stats));
    let prepare = move |runtime: &Runtime| -> Result<MakeStage<_>, Failure> {
        let mut table = RuleTable::new(runtime.domain(), limits, 0);
        table
            .change(|change| rules.iter().try_for_each(|rule| change.add(rule.clone(), Timeouts::NONE).map(drop)))
            .map_err(Failure::failed)?;
        let around = RulePorts::new(runtime.domain(), runtime.ports(), runtime.queue_workers(), Parser::default());
        let by_rule_stage = RuleStage::new(across, &mut table, Arc::new(around), 0);
        *prepared.borrow_mut() = Some(table);
        let mut stage = Some(chain(by_rule_stage, setting, counted));
        Ok(Box::new(move |_: &WorkerInfo| stage.take().expect("one worker")))
    };
    let work = |phase: &mut dyn FnMut(&mut dyn FnMut() -> f64) -> Phase| {
        let mut table = shared.borrow_mut();
        let table = table.as_mut().expect("prepared before");
        if changes == 0 {
            let mut round = || {
                std::thread::sleep(timing.round());
                0.0
            };
            return (0..timing.rounds).map(|_| phase(&mut round)).collect();
        }
        const ROUNDS: u32 = 8;
        let time = seconds / ROUNDS;
        // The control thread does the same work in every phase, but in every second phase on a table that
        // no worker reads. This excludes the cost of sharing caches, memory and often a core between two
        // threads.
        let mut elsewhere = decoy(rules, limits);
        let changer = || Changer {
            setting,
            changed: arguments.changed,
            masks: arguments.masks,
            random: Rng::with_seed(77),
            added: VecDeque::new(),
            made: 0,
        };
        let mut changers = [changer(), changer()];
        let mut all = Vec::new();
        for round in 0..2 * ROUNDS + 2 {
            let changer = &mut changers[round as usize % 2];
            let table = if round % 2 == 0 { &mut elsewhere } else { &mut *table };
            let before = changer.made;
            let measured = phase(&mut || {
                let start = Instant::now();
                changer.run(table, changes.into(), time);
                (changer.made - before) as f64 / start.elapsed().as_secs_f64()
            });
            // The first round of each table creates the standing rules.
            if round >= 2 {
                all.push(measured);
            }
        }
        all
    };
    let phases = if arguments.limit.packets.is_some() {
        let work = |runtime: &Runtime| Ok(Work { stages: prepare(runtime)?, offered: Offered::default() });
        let figures = measure::run(ports(common)?, common, &arguments.limit, &RealPorts::default(), work)?;
        let figures = measured(figures)?;
        vec![Phase { packets: figures.packets, cycles: figures.own_cycles_per_packet, extra: 0.0 }]
    } else {
        measure::run_phases(ports(common)?, common, prepare, work)?
    };
    let stats = *stats.lock().expect("not poisoned");
    tracing::debug!("{stats:?}");
    let table = shared.borrow();
    let (masks, bytes_per_rule) = table.as_ref().map_or((0, 0), |table| (table.masks()[0], table.bytes_per_rule()));
    let cached = stats.hits as f64 / (stats.hits + stats.misses).max(1) as f64;
    Ok(Measured { phases, cached, masks, bytes_per_rule })
}
