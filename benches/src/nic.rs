//! The bursts of a NIC driver without a pipeline, on an emulated or a real NIC.

use std::fmt::Write;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use clap::ValueEnum;
use wirepath::cli::Failure;
use wirepath_nic_emulator::launch::Launch;
use wirepath_packet::{BATCH, Batch, MetaTemplate, Pool};
use wirepath_pmd::port::{OpenPort, PortConfig, PortEvent, StartedPort};

use crate::measure::{self, Figures, PacketLimit, Round, Timing};

/// Buffers of the pool. They fill the rings in both directions and the per-thread caches.
const BUFFERS: u32 = 16 << 10;
/// Bursts in flight in the loop.
const IN_FLIGHT: usize = 8;
/// Bursts between two reads of the clock and of device events, which are system calls.
const POLLS_PER_CHECK: usize = 4096;
/// Bursts between two checks if packets are counted, so that the count is not exceeded by much.
const FEW_POLLS_PER_CHECK: usize = 256;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Driver of the port
    #[arg(long, value_enum)]
    driver: Driver,

    /// Operation of the port
    #[arg(long, value_enum, default_value_t = Mode::Loopback)]
    mode: Mode,

    /// A real NIC (an interface or RDMA device); without it, one is emulated
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Keys of the driver's own table, as in `[port.mlx5]`, such as "rx_mode = 'striding'"
    #[arg(long, value_name = "TOML")]
    settings: Vec<String>,

    /// How the emulated NIC detects doorbells
    #[arg(long, value_enum, default_value_t = Doorbells::Scan)]
    doorbells: Doorbells,

    /// Length of a sent frame in bytes
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(60..=2048))]
    size: u16,

    /// Packets of a burst; for received bursts only with --packets
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=64))]
    burst: u16,

    /// Entries of each ring
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=4096))]
    depth: u32,

    #[command(flatten)]
    limit: PacketLimit,

    #[command(flatten)]
    timing: Timing,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Driver {
    /// Microsoft Azure Network Adapter
    Mana,
    /// ConnectX
    Mlx5,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Mode {
    /// Send frames that are already in their buffers
    Tx,
    /// Receive packets and free them
    Rx,
    /// Send received packets, which come back
    Loopback,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Doorbells {
    /// Without a trap: a thread polls the queues
    Scan,
    /// With a trap, served by a thread
    Queue,
    /// With a trap, served at once
    Trap,
}

/// Returns the command-line name of a choice.
fn word(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Runs the benchmark. `None`: a copy of the program ran on an emulated NIC and has printed its figures.
pub(crate) fn run(arguments: &Arguments) -> Result<Option<Figures>, Failure> {
    match &arguments.device {
        Some(device) => on(arguments, device).map(Some),
        None => emulate(arguments).map(|()| None),
    }
}

/// Measures on an emulated NIC.
fn emulate(arguments: &Arguments) -> Result<(), Failure> {
    let link = match arguments.mode {
        Mode::Tx => "sink",
        Mode::Rx => "generator",
        Mode::Loopback => "loop",
    };
    // 1500 bytes is the default MTU of interfaces.
    let topology = format!(
        "doorbells = '{}'\n[[device]]\nkind = '{}'\nname = 'nic0'\n[[device.port]]\nlink = '{link}'\nmtu = 1500\n",
        word(arguments.doorbells),
        word(arguments.driver)
    );
    rerun_emulated(&topology)
}

/// Runs this program again with the same arguments and `--device nic0`, on the NICs of a topology.
pub(crate) fn rerun_emulated(topology: &str) -> Result<(), Failure> {
    let file = std::env::temp_dir().join(format!("wirepath-bench-{}.toml", std::process::id()));
    fs::write(&file, topology).map_err(Failure::failed)?;
    let launched = Launch::new(&file);
    let started = launched.map_err(Failure::failed).and_then(|launch| {
        let program = std::env::current_exe().map_err(Failure::failed)?;
        let mut command: Command = launch.command(program);
        command.args(std::env::args_os().skip(1)).args(["--device", "nic0"]);
        command.status().map_err(Failure::failed)
    });
    let _ = fs::remove_file(&file);
    match started?.code() {
        Some(0) => Ok(()),
        code => Err(Failure::Ended(code.map_or(1, |code| code as u8))),
    }
}

fn on(arguments: &Arguments, device: &str) -> Result<Figures, Failure> {
    let driver = word(arguments.driver);
    let mut text = format!("[[port]]\nname = 'nic'\ndriver = '{driver}'\ndevice = '{device}'\n[port.{driver}]\n");
    for key in &arguments.settings {
        let _ = writeln!(text, "{key}");
    }
    let port = measure::ports(&text)?.remove(0);
    let pool = Pool::new("nic", BUFFERS).map_err(Failure::failed)?;
    let config = PortConfig { depth: arguments.depth, ..PortConfig::new(PortId::new(0), pool.clone()) };
    let open = OpenPort::open("nic", port.plan).map_err(Failure::failed)?;
    let mut port = open.configure(config).and_then(|port| port.start()).map_err(Failure::failed)?;
    measure::pin(arguments.timing.core)?;
    prepare(&pool, arguments.size.into());
    let figures = measured(arguments, &mut port, &pool)?;
    let StartedPort { port, rx, tx } = port;
    port.stop(rx, tx).map_err(Failure::failed)?;
    Ok(figures)
}

/// Writes a frame into every free buffer, where it stays, so that sending costs only the driver's work.
fn prepare(pool: &Pool, size: usize) {
    let frame: Vec<u8> = [2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 0x08, 0]
        .into_iter()
        .chain([0x45, 0, 0, (size - 14) as u8, 0, 0, 0x40, 0, 64, 17, 0, 0, 198, 18, 0, 1, 198, 18, 0, 2])
        .chain(std::iter::repeat(0))
        .take(size)
        .collect();
    let mut all = Vec::new();
    while let Some(mut packet) = pool.take() {
        if let Some(data) = packet.append(size) {
            data.copy_from_slice(&frame);
        }
        all.push(packet);
    }
}

/// A separate function, so that its instructions can be counted.
#[inline(never)]
fn free_received(batch: &mut Batch) {
    batch.clear();
}

/// Parameters of the polling loop.
struct Work<'a> {
    mode: Mode,
    burst: usize,
    /// If true, waits while idle, so that there are few empty polls.
    yields: bool,
    pool: &'a Pool,
    /// Metadata of a frame that is already in its buffer.
    ready: MetaTemplate,
}

impl Work<'_> {
    fn send(&self, port: &mut StartedPort) {
        let mut batch = Batch::new();
        self.pool.take_batch_from_template(self.burst, &mut batch, &self.ready);
        port.tx[0].transmit(&mut batch);
        self.yield_if_idle(batch.is_empty());
    }

    fn yield_if_idle(&self, busy: bool) {
        if !busy && self.yields {
            // Long enough for the thread of an emulated device that shares the core.
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Sends received packets back. Packets that the queue does not accept are dropped.
    fn forward(&self, port: &mut StartedPort) {
        let mut batch = Batch::new();
        let received = port.rx[0].receive(&mut batch);
        port.tx[0].transmit(&mut batch);
        self.yield_if_idle(received > 0);
    }

    /// Receives at most one burst and frees it.
    fn receive_burst(&self, port: &mut StartedPort) {
        // A queue fills a batch up to its capacity, so the batch is filled beforehand.
        let (mut batch, mut others) = (Batch::new(), Batch::new());
        let others_len = self.pool.take_batch_from_template(BATCH - self.burst, &mut batch, &self.ready);
        let received = port.rx[0].receive(&mut batch);
        batch.drain_front(others_len, |packet| drop(others.push(packet)));
        if received > 0 {
            free_received(&mut batch);
        }
        self.yield_if_idle(received > 0);
    }

    fn run_polls(&self, port: &mut StartedPort) -> Result<(), Failure> {
        for _ in 0..if self.yields { FEW_POLLS_PER_CHECK } else { POLLS_PER_CHECK } {
            match self.mode {
                Mode::Tx => self.send(port),
                Mode::Rx if self.yields => self.receive_burst(port),
                Mode::Rx => {
                    let mut batch = Batch::new();
                    let received = port.rx[0].receive(&mut batch);
                    self.yield_if_idle(received > 0);
                }
                Mode::Loopback => self.forward(port),
            }
        }
        // A failed queue is restarted here, which spoils the figure. Its packets are counted as drops.
        match port.port.events().pop() {
            Some(PortEvent::Lost(why)) => Err(Failure::failed(why)),
            _ => Ok(()),
        }
    }

    /// Number of moved packets.
    fn moved(&self, port: &StartedPort) -> u64 {
        let counters = if self.mode == Mode::Tx { port.tx[0].counters() } else { port.rx[0].counters() };
        counters.packets.get()
    }
}

fn measured(arguments: &Arguments, port: &mut StartedPort, pool: &Pool) -> Result<Figures, Failure> {
    let ready = pool.meta_template().len(arguments.size.into());
    let work = Work {
        mode: arguments.mode,
        burst: arguments.burst.into(),
        yields: arguments.limit.packets.is_some(),
        pool,
        ready,
    };
    if work.mode == Mode::Loopback {
        (0..IN_FLIGHT).for_each(|_| work.send(port));
    }
    let timing = &arguments.timing;
    let mut run = |length: Duration, until: u64| {
        Round::measure(measure::thread_time, || {
            let (before, start) = (work.moved(port), Instant::now());
            while work.moved(port) < until && start.elapsed() < length {
                work.run_polls(port)?;
            }
            Ok::<u64, Failure>(work.moved(port) - before)
        })
    };
    let rounds = match arguments.limit.packets {
        Some(packets) => vec![run(Duration::MAX, packets)?],
        None => {
            run(Duration::from_secs_f64(timing.warm_up), u64::MAX)?;
            (0..timing.rounds).map(|_| run(timing.round(), u64::MAX)).collect::<Result<_, _>>()?
        }
    };
    let dropped = [port.rx[0].counters(), port.tx[0].counters()].map(|counters| counters.drops.total()).iter().sum();
    Figures::new(&rounds, dropped)
}
