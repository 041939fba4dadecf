//! The bursts of a NIC's driver, without a pipeline around them: on an emulated NIC, or on one that is there.

use std::fmt::Write;
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use wirepath_apps::cli::Failure;
use wirepath_nic_emulator::launch::Launch;
use wirepath_pipeline::clock;
use wirepath_pmd::packet::{BATCH, Batch, Blank, Pool};
use wirepath_pmd::port::{OpenPort, PortConfig, PortEvent, StartedPort};

use crate::measure::{self, Figures, WARM_UP};

/// Buffers of the pool: what a ring holds, both ways, and what threads keep at hand.
const BUFFERS: u32 = 16 << 10;
/// Bursts on their way round the loop.
const IN_FLIGHT: usize = 8;
/// Bursts between two looks at the clock and at events of the device, which are system calls.
const STRETCH: usize = 4096;
/// The same where packets are counted, so that there are not many more than wanted.
const SHORT_STRETCH: usize = 256;

#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Arguments {
    /// Driver of the port
    #[arg(long, value_enum)]
    driver: Driver,

    /// What the port does
    #[arg(long, value_enum, default_value_t = Mode::Loopback)]
    mode: Mode,

    /// A NIC that is there (an interface or RDMA device); without it, one is emulated
    #[arg(long, value_name = "NAME")]
    device: Option<String>,

    /// Keys of the driver's own table, as in `[port.mlx5]`, such as "receive = 'striding'"
    #[arg(long, value_name = "TOML")]
    settings: Vec<String>,

    /// How the emulated NIC sees doorbells
    #[arg(long, value_enum, default_value_t = Doorbells::Scan)]
    doorbells: Doorbells,

    /// Bytes of a frame that is sent
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u16).range(60..=2048))]
    size: u16,

    /// Packets of a burst; of received ones only with --packets
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=64))]
    burst: u16,

    /// Entries of each ring
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(64..=4096))]
    depth: u32,

    /// End after so many packets instead of after a time, for a tool that counts instructions
    #[arg(long, value_name = "N")]
    packets: Option<u64>,

    /// Core to run on
    #[arg(long, value_name = "N")]
    core: Option<usize>,

    /// Length of the measurement, after a warm-up of 0.3 seconds
    #[arg(long, value_name = "N", default_value_t = 3.0, value_parser = measure::positive)]
    seconds: f64,
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
    /// Sends frames that are ready in their buffers
    Tx,
    /// Receives, and frees what it gets
    Rx,
    /// Sends what it receives, which comes back
    Loopback,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Doorbells {
    /// Not at all: a thread looks at the queues
    Scan,
    /// By a trap, served by a thread
    Queue,
    /// By a trap, served at once
    Trap,
}

/// Name of a choice, as it is written.
fn word(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// `None`: the program has been run on an emulated NIC, and has printed its figures.
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
    // The MTU that interfaces have of themselves.
    let topology = format!(
        "doorbells = '{}'\n[[device]]\nkind = '{}'\nname = 'nic0'\n[[device.port]]\nlink = '{link}'\nmtu = 1500\n",
        word(arguments.doorbells),
        word(arguments.driver)
    );
    again(&topology)
}

/// Starts this program again, with the same arguments and `--device nic0`, on the NICs of a topology.
pub(crate) fn again(topology: &str) -> Result<(), Failure> {
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
    let config = PortConfig { depth: arguments.depth, ..PortConfig::new(0, pool.clone()) };
    let open = OpenPort::open("nic", port.plan).map_err(Failure::failed)?;
    let mut port = open.configure(config).and_then(|port| port.start()).map_err(Failure::failed)?;
    measure::pin(arguments.core)?;
    prepare(&pool, arguments.size.into());
    let figures = measured(arguments, &mut port, &pool)?;
    let StartedPort { port, rx, tx } = port;
    port.stop(rx, tx).map_err(Failure::failed)?;
    Ok(figures)
}

/// Writes a frame into every buffer that is free, where it stays: what is sent costs the driver alone.
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

/// A function of its own, so that its instructions can be counted.
#[inline(never)]
fn free_received(batch: &mut Batch) {
    batch.clear();
}

/// What is done over and over.
struct Work<'a> {
    mode: Mode,
    burst: usize,
    /// Waits when there is nothing to do, so that few polls are in vain.
    polite: bool,
    pool: &'a Pool,
    /// A frame that lies in its buffer.
    ready: Blank,
}

impl Work<'_> {
    fn send(&self, port: &mut StartedPort) {
        let mut batch = Batch::new();
        self.pool.take_batch_like(self.burst, &mut batch, &self.ready);
        port.tx[0].transmit(&mut batch);
        self.give_way(batch.is_empty());
    }

    fn give_way(&self, busy: bool) {
        if !busy && self.polite {
            // Long enough for a device whose thread takes turns with this one.
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Sends back what comes, as far as it is taken.
    fn forward(&self, port: &mut StartedPort) {
        let mut batch = Batch::new();
        let came = port.rx[0].receive(&mut batch);
        port.tx[0].transmit(&mut batch);
        self.give_way(came > 0);
    }

    /// Receives at most a burst, and frees it.
    fn receive_burst(&self, port: &mut StartedPort) {
        // A queue fills a batch as far as there is room.
        let (mut batch, mut others) = (Batch::new(), Batch::new());
        let others_len = self.pool.take_batch_like(BATCH - self.burst, &mut batch, &self.ready);
        let came = port.rx[0].receive(&mut batch);
        batch.drain_front(others_len, |packet| drop(others.push(packet)));
        if came > 0 {
            free_received(&mut batch);
        }
        self.give_way(came > 0);
    }

    fn stretch(&self, port: &mut StartedPort) -> Result<(), Failure> {
        for _ in 0..if self.polite { SHORT_STRETCH } else { STRETCH } {
            match self.mode {
                Mode::Tx => self.send(port),
                Mode::Rx if self.polite => self.receive_burst(port),
                Mode::Rx => {
                    let mut batch = Batch::new();
                    let came = port.rx[0].receive(&mut batch);
                    self.give_way(came > 0);
                }
                Mode::Loopback => self.forward(port),
            }
        }
        // A queue that breaks is made anew here, which spoils the figure: it is among the drops.
        match port.port.events().pop() {
            Some(PortEvent::Lost(why)) => Err(Failure::failed(why)),
            _ => Ok(()),
        }
    }

    /// Packets that were moved.
    fn moved(&self, port: &StartedPort) -> u64 {
        let counters = if self.mode == Mode::Tx { port.tx[0].counters() } else { port.rx[0].counters() };
        counters.packets.get()
    }
}

fn measured(arguments: &Arguments, port: &mut StartedPort, pool: &Pool) -> Result<Figures, Failure> {
    let ready = pool.blank().len(arguments.size.into());
    let work =
        Work { mode: arguments.mode, burst: arguments.burst.into(), polite: arguments.packets.is_some(), pool, ready };
    if work.mode == Mode::Loopback {
        (0..IN_FLIGHT).for_each(|_| work.send(port));
    }
    let start = Instant::now();
    while arguments.packets.is_none() && start.elapsed() < WARM_UP {
        work.stretch(port)?;
    }
    let (at, ticks_at, cpu_at, before) = (Instant::now(), clock::ticks(), measure::thread_time(), work.moved(port));
    let length = Duration::from_secs_f64(arguments.seconds);
    while match arguments.packets {
        Some(packets) => work.moved(port) < packets,
        None => at.elapsed() < length,
    } {
        work.stretch(port)?;
    }
    let (packets, ticks, elapsed) = (work.moved(port) - before, clock::ticks() - ticks_at, at.elapsed().as_secs_f64());
    let cpu_share = (measure::thread_time() - cpu_at) / elapsed;
    let dropped = [port.rx[0].counters(), port.tx[0].counters()].map(|counters| counters.drops.total()).iter().sum();
    Figures::new(packets, dropped, elapsed, ticks, cpu_share)
}
