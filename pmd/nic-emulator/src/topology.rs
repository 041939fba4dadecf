//! The topology file: a TOML file that describes the NICs and what they are connected to. [`TOPOLOGY`] describes its
//! tables and keys.
//!
//! ```toml
//! log = "nic.log"
//!
//! [[device]]
//! name = "mana0"
//! kind = "mana"
//!
//! [[device.port]]
//! link = "cable:a"
//! lose = 0.01
//!
//! [[fault]]
//! kind = "refuse"
//! command = "create_qp"
//! errno = "ENOMEM"
//! ```

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use wirepath_settings::{
    Choice, ConfigError, ConfigTable, Flag, Integer, Key, Number, Parsed, Required, Settings, Source, Span, Text,
    WithDefault, Written,
};

use crate::StampFormat;
use crate::connectx;
pub use crate::connectx::{Class, SteeringSpec};
use crate::faults::{self, Fault};

type Result<T> = std::result::Result<T, ConfigError>;

const DOORBELLS: Key<WithDefault<Choice<Doorbells>>> = Key::choice(
    "doorbells",
    &[
        ("trap", Doorbells::Trap, "each doorbell traps, and the device works before the program goes on"),
        ("queue", Doorbells::Queue, "each doorbell traps, and a thread of the emulator does the work"),
        ("scan", Doorbells::Scan, "doorbells do not trap; a thread polls the queues, which is fast"),
    ],
)
.default_word("trap")
.about("How the emulator notices doorbells. `scan` does not notice a missing doorbell.");
const FETCH: Key<WithDefault<Choice<bool>>> = Key::choice(
    "fetch",
    &[
        ("at-once", false, "at the doorbell"),
        ("late", true, "some time after the doorbell, which detects buffers that are reused too early"),
    ],
)
.default_word("at-once")
.about("When the device reads descriptors and packets. `late` excludes `doorbells = \"scan\"`.");
const ABI: Key<WithDefault<Choice<bool>>> = Key::choice(
    "abi",
    &[
        ("ioctl", false, "the ioctl form, and write(2) where libibverbs uses it"),
        ("write", true, "write(2) only, as of older kernels"),
    ],
)
.default_word("ioctl")
.about("Form of the kernel interface of RDMA devices.");
const LOG: Key<Text> =
    Key::text("log", "path of a file").absent("standard error").about("File of what the device refuses, and why.");
const STATS: Key<Text> = Key::text("stats", "path of a file").absent("no file").about(
    "File for the counters, in JSON, written when the program ends. Of several processes the last one writes it.",
);
const CONTROL: Key<Text> = Key::text("control", "path of a socket")
    .absent("no socket")
    .about("Unix socket for counters, and for faults at run time. The first process binds it.");
const SEED: Key<WithDefault<Integer<u64>>> =
    Key::integer("seed", 0..=i64::MAX).default(1).about("Seed of all pseudo-random decisions.");

/// The tables of a topology.
pub static TOPOLOGY: ConfigTable = ConfigTable {
    about: "Emulated NICs, their cables and their faults.",
    keys: &[&DOORBELLS, &FETCH, &ABI, &LOG, &STATS, &CONTROL, &SEED],
    tables: || vec![&DEVICE, &faults::FAULT],
    example: "doorbells = \"trap\"\nlog = \"nic.log\"\n",
    ..ConfigTable::EMPTY
};

const KIND: Key<Required<Choice<DeviceKind>>> = Key::choice(
    "kind",
    &[
        ("mana", DeviceKind::Mana, "Microsoft Azure Network Adapter"),
        ("mlx5", DeviceKind::Mlx5, "ConnectX of the generation `class`"),
    ],
)
.required()
.about("Kind of NIC.");
const NAME: Key<Text> = Key::text("name", "letters, digits, '_' and '-', at most 60")
    .absent("mana or mlx5_ and the number of the device in the file, from 0")
    .about("Name of the RDMA device.");
const PCI: Key<Parsed<Pci>> = Key::parsed("pci", "a PCI address such as \"0000:00:05.0\"")
    .absent("0000:00:10.0 for the first device, 0000:00:11.0 for the second, and so on")
    .about("PCI address.");
const NUMA_NODE: Key<WithDefault<Integer<i32>>> =
    Key::integer("numa_node", -1..=1023).default(-1).about("NUMA node in sysfs; -1: none.");
const MAX_QUEUE: Key<WithDefault<Integer<u32>>> = Key::integer("max_queue", 64..=65_536)
    .unit("entries")
    .default(8192)
    .about("Largest queue of work requests or completions that the device reports and accepts.");
const COALESCE: Key<WithDefault<Flag>> = Key::flag("coalesce")
    .default(false)
    .when("kind = \"mana\"")
    .about("Lets up to four received packets share a completion. Only `mana` has the key.");
const CQE_VERSION: Key<WithDefault<Integer<u8>>> = Key::integer("cqe_version", 0..=1)
    .default(1)
    .when("kind = \"mlx5\"")
    .about("Form of completions: 1 names a queue by the driver's index, 0 by the number of the queue.");
const DOORBELL_PAGES: Key<Choice<bool>> = Key::choice(
    "doorbell_pages",
    &[
        ("objects", true, "allocated one by one, as kernels with ioctl have them"),
        ("static", false, "mapped when the device is opened"),
    ],
)
.absent("\"objects\"; with `abi = \"write\"` it is \"static\"")
.when("kind = \"mlx5\"")
.about("How a program gets doorbell pages (UAR).");
const MIN_INLINE: Key<WithDefault<Choice<MinInline>>> = Key::choice(
    "min_inline",
    &[
        ("none", MinInline::None, "nothing"),
        ("l2", MinInline::L2, "the Ethernet header"),
        (
            "l2-unreported",
            MinInline::UnreportedL2,
            "the Ethernet header, though the device reports that nothing must be",
        ),
    ],
)
.default_word("none")
.when("kind = \"mlx5\"")
.about("Part of a packet that a send descriptor must contain itself.");
const COMPRESSION: Key<WithDefault<Flag>> = Key::flag("compression")
    .default(true)
    .when("kind = \"mlx5\"")
    .about("Whether the device can compress completions (CQE compression).");
const MULTI_PACKET: Key<WithDefault<Flag>> = Key::flag("multi_packet")
    .default(true)
    .when("kind = \"mlx5\"")
    .about("Whether a send descriptor can carry several packets (enhanced multi-packet send).");
const STRIDING: Key<WithDefault<Flag>> = Key::flag("striding")
    .default(true)
    .when("kind = \"mlx5\"")
    .about("Whether a receive descriptor can be divided into strides (multi-packet receive queue).");
const TUNNELS: Key<WithDefault<Flag>> = Key::flag("tunnels")
    .default(true)
    .when("kind = \"mlx5\"")
    .about("Whether the device finds the headers inside VXLAN, GENEVE and GRE.");
const SW_PARSER: Key<WithDefault<Flag>> = Key::flag("sw_parser")
    .default(true)
    .when("kind = \"mlx5\"")
    .about("Whether a send descriptor can say where the headers of a tunnel packet are (software parser).");
const MAX_TSO: Key<WithDefault<Integer<u32>>> = Key::integer("max_tso", 0..=1 << 18)
    .unit("bytes")
    .default(1 << 18)
    .when("kind = \"mlx5\"")
    .about("Longest payload of a TCP packet that the device segments. 0: it segments none.");
const VAR: Key<WithDefault<Flag>> = Key::flag("var")
    .default(true)
    .when("kind = \"mlx5\"")
    .about("Whether pages of virtio doorbells (VAR) can be allocated.");
const CLASS: Key<WithDefault<Choice<Class>>> = Key::choice(
    "class",
    &[("connectx-5", Class::ConnectX5, "ConnectX-5"), ("connectx-6dx", Class::ConnectX6Dx, "ConnectX-6 Dx")],
)
.default_word("connectx-6dx")
.when("kind = \"mlx5\"")
.about("Generation of the ConnectX: its identity and the capabilities of its flow rules.");

const CLOCK_KHZ: Key<WithDefault<Integer<u32>>> = Key::integer("clock_khz", 1_000..=10_000_000)
    .unit("kHz")
    .default(156_250)
    .when("kind = \"mlx5\"")
    .about("Frequency of the core clock.");
const TIMESTAMPS: Key<WithDefault<Choice<StampFormat>>> = Key::choice(
    "timestamps",
    &[
        ("free-running", StampFormat::FreeRunning, "ticks of the core clock"),
        ("real-time", StampFormat::RealTime, "the time of day, as some firmware has it"),
    ],
)
.default_word("free-running")
.when("kind = \"mlx5\"")
.about("Time in completions.");
const CLOCK_PAGE: Key<WithDefault<Flag>> = Key::flag("clock_page")
    .default(true)
    .when("kind = \"mlx5\"")
    .about("Whether programs can map the core clock to read it.");

static DEVICE: ConfigTable = ConfigTable {
    name: "device",
    written: Written::Repeated,
    about: "A NIC. It has one to eight ports.",
    absent: "an error; a topology has at least one device",
    keys: &[
        &KIND,
        &NAME,
        &PCI,
        &NUMA_NODE,
        &MAX_QUEUE,
        &COALESCE,
        &CQE_VERSION,
        &DOORBELL_PAGES,
        &MIN_INLINE,
        &COMPRESSION,
        &MULTI_PACKET,
        &STRIDING,
        &TUNNELS,
        &SW_PARSER,
        &MAX_TSO,
        &VAR,
        &CLASS,
        &CLOCK_KHZ,
        &CLOCK_PAGE,
        &TIMESTAMPS,
    ],
    tables: || vec![&PORT, &connectx::STEERING],
    // A MANA has no keys of a ConnectX.
    alternatives: true,
    example: "[[device]]\nkind = \"mlx5\"\nname = \"mlx5_0\"\n[[device.port]]\nlink = \"loop\"\n",
    ..ConfigTable::EMPTY
};

const NETDEV: Key<Text> = Key::text("netdev", "name of an interface")
    .absent("nic and the number of the port in the file, from 0")
    .about("Name of the port's network interface in sysfs. The emulator makes it in the kernel with `kernel` only.");
const KERNEL: Key<WithDefault<Flag>> = Key::flag("kernel").default(false).about(
    "Makes the interface `netdev` in the kernel, as a TAP device with address and MTU of the port. It has the frames \
     that no flow rule takes (flow bifurcation). What the kernel sends there leaves the port. Only `mlx5` has this.",
);
const MAC: Key<Parsed<Mac>> = Key::parsed("mac", "a unicast address such as \"02:00:00:00:01:01\"")
    .absent("02:00:00:00:D:P with the numbers of device and port, from 1")
    .about("MAC address.");
const MTU: Key<WithDefault<Integer<u32>>> = Key::integer("mtu", 576..=MAX_MTU)
    .unit("bytes")
    .default(9000)
    .about("Largest packet without its Ethernet header. A `mana` has at most 9000.");
const LINK: Key<Parsed<LinkSpec>> = Key::parsed(
    "link",
    "none, loop, sink, generator, cable:NAME, tap:INTERFACE, veth:INTERFACE or pcap:FILE",
)
.same_as("\"none\"")
.about(
    "Far end. `cable` joins two ports of the same NAME; `loop` returns frames; `sink` counts them; `generator` also \
     sends UDP without end; `tap` and `veth` are interfaces of the kernel; `pcap` writes what the port sends.",
);
const LOSE: Key<WithDefault<Number>> =
    Key::number("lose", 0.0, 1.0).default(0.0).about("Share of sent frames that are lost.");
const DUPLICATE: Key<WithDefault<Number>> =
    Key::number("duplicate", 0.0, 1.0).default(0.0).about("Share of sent frames that arrive twice.");
const CORRUPT: Key<WithDefault<Number>> =
    Key::number("corrupt", 0.0, 1.0).default(0.0).about("Share of sent frames in which one bit is inverted.");
const REORDER: Key<WithDefault<Number>> =
    Key::number("reorder", 0.0, 1.0).default(0.0).about("Share of sent frames that arrive behind the next one.");
const OWN_ADDRESS_ONLY: Key<WithDefault<Flag>> = Key::flag("own_address_only")
    .default(false)
    .about("Does not deliver frames to other unicast addresses. Only `mana` does so, as in Azure.");
const SOURCE_CHECK: Key<WithDefault<Flag>> = Key::flag("source_check")
    .default(false)
    .about("Refuses to send frames from other source addresses. Only `mana` does so, as in Azure.");

static PORT: ConfigTable = ConfigTable {
    name: "port",
    written: Written::Repeated,
    about: "A port of the NIC above.",
    absent: "an error; a device has at least one port",
    keys: &[
        &NETDEV,
        &KERNEL,
        &MAC,
        &MTU,
        &LINK,
        &LOSE,
        &DUPLICATE,
        &CORRUPT,
        &REORDER,
        &OWN_ADDRESS_ONLY,
        &SOURCE_CHECK,
    ],
    example: "[[device.port]]\nmac = \"02:00:00:00:01:01\"\nlink = \"loop\"\nlose = 0.01\n",
    ..ConfigTable::EMPTY
};

/// A topology: the content of a topology file.
#[derive(Clone, Debug)]
pub struct Topology {
    /// Mode in which doorbells are observed.
    pub doorbells: Doorbells,
    /// True if descriptors and data are fetched some time after the doorbell.
    pub fetch_late: bool,
    /// True if every ioctl fails with `ENOTTY`, so that libibverbs falls back to `write(2)`.
    pub write_abi: bool,
    /// Log file of refusals; `None` is standard error.
    pub log: Option<PathBuf>,
    /// File that receives the counters when the program ends.
    pub stats: Option<PathBuf>,
    /// Path of the control socket for counters and faults at run time.
    pub control: Option<PathBuf>,
    /// Seed of all pseudo-random decisions.
    pub seed: u64,
    /// Devices.
    pub devices: Vec<DeviceSpec>,
    /// Faults that are pending from the start.
    pub faults: Vec<Fault>,
}

/// Modes in which doorbells are observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doorbells {
    /// The page is protected. Each store traps, and the device works inside the trap handler. Lossless and
    /// deterministic; needs no second core.
    Trap,
    /// The page is protected. Each store traps and is queued for a thread.
    Queue,
    /// The page is accessible, and a thread polls the work queues. Missing doorbells go unnoticed, and arming
    /// of completion queues is not seen.
    Scan,
}

/// Specification of a NIC.
#[derive(Clone, Debug)]
pub struct DeviceSpec {
    /// Name of the RDMA device.
    pub name: String,
    /// Kind of NIC.
    pub kind: DeviceKind,
    /// PCI address, such as `0000:00:05.0`.
    pub pci: String,
    /// NUMA node; -1 for none.
    pub numa_node: i32,
    /// Ports; at least one.
    pub ports: Vec<PortSpec>,
    /// Maximum number of work requests or completion entries of a queue.
    pub max_queue: u32,
    /// True if a completion entry may hold four packets (MANA).
    pub coalesce: bool,
    /// Capabilities of a ConnectX.
    pub mlx5: Mlx5Spec,
}

/// Capabilities of a ConnectX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mlx5Spec {
    /// Version of completion entries: with 1 they name queues by the driver's index, with 0 by the queue
    /// number.
    pub cqe_version: u8,
    /// True if doorbell pages are objects of the kernel interface; otherwise they are mapped at open.
    pub dynamic_pages: bool,
    /// Packet header that must be inline in the send descriptor.
    pub min_inline: MinInline,
    /// True if completions may be compressed.
    pub compression: bool,
    /// True if a send descriptor may carry several packets.
    pub multi_packet: bool,
    /// True if receive descriptors may be divided into strides.
    pub striding: bool,
    /// True if the device finds the headers inside tunnels.
    pub tunnels: bool,
    /// True if a send descriptor may have offsets of headers.
    pub sw_parser: bool,
    /// Most payload bytes of a TCP packet that the device segments.
    pub max_tso: u32,
    /// True if pages of virtio doorbells (VAR) can be allocated.
    pub var: bool,
    /// ConnectX generation.
    pub class: Class,
    /// Frequency of the core clock in kHz.
    pub clock_khz: u32,
    /// True if programs can map the core clock.
    pub clock_page: bool,
    /// Format of the time stamps in completions.
    pub timestamps: StampFormat,
    /// Capabilities of flow rules.
    pub steering: SteeringSpec,
}

/// Packet header that must be inline in a send descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MinInline {
    /// No header.
    None,
    /// The Ethernet header.
    L2,
    /// The Ethernet header, although the device reports none: an administrator has changed it since.
    UnreportedL2,
}

/// Kinds of NICs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// Microsoft Azure Network Adapter.
    Mana,
    /// ConnectX-5 or ConnectX-6 Dx.
    Mlx5,
}

impl DeviceKind {
    /// Returns the name in a topology file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mana => "mana",
            Self::Mlx5 => "mlx5",
        }
    }
}

/// Specification of a port.
#[derive(Clone, Debug)]
pub struct PortSpec {
    /// Name of the network interface in the generated sysfs.
    pub netdev: String,
    /// True if the kernel has that interface, with the frames that no flow rule takes.
    pub kernel: bool,
    /// MAC address.
    pub mac: [u8; 6],
    /// MTU: largest packet without the Ethernet header, in bytes.
    pub mtu: u32,
    /// Far end of the link.
    pub link: LinkSpec,
    /// Impairments of frames that leave the port.
    pub impair: Impairments,
    /// True if frames to other unicast addresses are not received.
    pub own_address_only: bool,
    /// True if frames from other source addresses are not sent.
    pub source_check: bool,
}

/// Far end of a port's link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkSpec {
    /// No far end: the port is up, and frames that it sends are lost.
    None,
    /// The port itself: it receives what it sends.
    Loop,
    /// The other port with the same cable name.
    Cable(String),
    /// A counter that accepts every frame.
    Sink,
    /// An endless source of UDP packets. Frames that the port sends are counted.
    Generator,
    /// A TAP interface.
    Tap(String),
    /// A network interface, through a packet socket.
    Veth(String),
    /// A pcap file of the frames that the port sends.
    Pcap(PathBuf),
}

impl fmt::Display for LinkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Loop => f.write_str("loop"),
            Self::Cable(name) => write!(f, "cable {name}"),
            Self::Sink => f.write_str("sink"),
            Self::Generator => f.write_str("generator"),
            Self::Tap(name) => write!(f, "tap {name}"),
            Self::Veth(name) => write!(f, "veth {name}"),
            Self::Pcap(path) => write!(f, "pcap {}", path.display()),
        }
    }
}

/// Impairments of a link, each as a probability from 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Impairments {
    /// The frame is lost.
    pub lose: f64,
    /// The frame is delivered twice.
    pub duplicate: f64,
    /// One bit of the frame is inverted.
    pub corrupt: f64,
    /// The frame is delivered after the next one.
    pub reorder: f64,
}

impl Topology {
    /// Returns name and number of ports of each device, for [`faults::read`].
    pub(crate) fn fault_devices(&self) -> Vec<(&str, usize)> {
        self.devices.iter().map(|device| (device.name.as_str(), device.ports.len())).collect()
    }

    /// Reads a topology file.
    ///
    /// # Errors
    /// File, line, key, the value found and the accepted values.
    pub fn load(path: &Path) -> Result<Self> {
        Self::read(&Source::load(path)?)
    }

    /// Reads a topology from a text.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn read(source: &Source) -> Result<Self> {
        source.parse()?.read_as(&TOPOLOGY, Self::from_settings)
    }

    fn from_settings(settings: &Settings<'_>) -> Result<Self> {
        let mut topology = Self {
            doorbells: settings.read(&DOORBELLS)?,
            fetch_late: settings.read(&FETCH)?,
            write_abi: settings.read(&ABI)?,
            log: settings.read(&LOG)?.map(PathBuf::from),
            stats: settings.read(&STATS)?.map(PathBuf::from),
            control: settings.read(&CONTROL)?.map(PathBuf::from),
            seed: settings.read(&SEED)?,
            devices: Vec::new(),
            faults: Vec::new(),
        };
        if topology.fetch_late && topology.doorbells == Doorbells::Scan {
            return Err(settings.error_in("fetch", "found \"late\", which requires doorbells = \"trap\" or \"queue\""));
        }
        let (mut netdevs, mut cables) = (0, Vec::new());
        let mut index = 0;
        let devices = settings.read_tables(&DEVICE, |table| {
            index += 1;
            topology.devices.push(device(table, index - 1, &mut netdevs, &mut cables, &topology)?);
            Ok(())
        });
        settings.has("fault");
        settings.check_keys()?;
        devices?;
        if topology.devices.is_empty() {
            let missing = || settings.error("no device; a NIC is a table [[device]] with kind and [[device.port]]");
            return Err(settings.misspelt("device").unwrap_or_else(missing));
        }
        let mates = |name| cables.iter().filter(|(other, _)| other == name).count();
        if let Some((name, span)) = cables.iter().find(|(name, _)| mates(name) == 1) {
            return Err(span.error(format!("cable:{name} has one end; a cable joins two ports")));
        }
        topology.faults =
            settings.read_tables(&faults::FAULT, |table| faults::read(table, &topology.fault_devices()))?;
        Ok(topology)
    }
}

fn device(
    table: &Settings<'_>,
    index: usize,
    netdevs: &mut usize,
    cables: &mut Vec<(String, Span)>,
    so_far: &Topology,
) -> Result<DeviceSpec> {
    let kind = table.read(&KIND)?;
    let name = match table.read(&NAME)? {
        Some(name) => name,
        None if kind == DeviceKind::Mlx5 => format!("mlx5_{index}"),
        None => format!("mana{index}"),
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || name.len() > 60 || !name.chars().all(plain) {
        return Err(table.error_in("name", "expected a name of letters, digits, '_' and '-', at most 60"));
    }
    if so_far.devices.iter().any(|other| other.name == name) {
        return Err(table.error_in("name", format!("there is a device {name} already")));
    }
    let pci = match table.read(&PCI)? {
        Some(Pci(address)) => address,
        None => format!("0000:00:{:02x}.0", 0x10 + index),
    };
    if so_far.devices.iter().any(|other| other.pci == pci) {
        return Err(table.error_in("pci", format!("there is a device at {pci} already")));
    }
    let mut device = DeviceSpec {
        name,
        kind,
        pci,
        numa_node: table.read(&NUMA_NODE)?,
        ports: Vec::new(),
        max_queue: table.read(&MAX_QUEUE)?,
        coalesce: kind == DeviceKind::Mana && table.read(&COALESCE)?,
        mlx5: mlx5(table, kind, so_far.write_abi)?,
    };
    let ports = table.subtables(&PORT)?;
    if ports.len() > 8 {
        return Err(table.error_in("port", "a device has at most 8 ports"));
    }
    for port in ports {
        let spec = self::port(&port, kind, index, device.ports.len(), *netdevs)?;
        check_conflicts(&port, &spec, so_far.devices.iter().flat_map(|device| &device.ports).chain(&device.ports))?;
        if let LinkSpec::Cable(name) = &spec.link {
            cables.push((name.clone(), port.span("link")));
        }
        port.finish()?;
        *netdevs += 1;
        device.ports.push(spec);
    }
    if device.ports.is_empty() {
        let missing = || table.error("a device has at least one port: [[device.port]]");
        return Err(table.misspelt("port").unwrap_or_else(missing));
    }
    Ok(device)
}

/// Reads the keys that only a ConnectX has.
fn mlx5(table: &Settings<'_>, kind: DeviceKind, write_abi: bool) -> Result<Mlx5Spec> {
    let mut spec = Mlx5Spec {
        cqe_version: 1,
        dynamic_pages: true,
        min_inline: MinInline::None,
        compression: true,
        multi_packet: true,
        striding: true,
        tunnels: true,
        sw_parser: true,
        max_tso: 1 << 18,
        var: true,
        class: Class::ConnectX6Dx,
        clock_khz: CLOCK_KHZ.default_value(),
        clock_page: CLOCK_PAGE.default_value(),
        timestamps: TIMESTAMPS.default_value(),
        steering: SteeringSpec::of(Class::ConnectX6Dx),
    };
    if kind == DeviceKind::Mlx5 {
        spec.cqe_version = table.read(&CQE_VERSION)?;
        // A kernel without the ioctl form has no such objects.
        spec.dynamic_pages = table.read(&DOORBELL_PAGES)?.unwrap_or(!write_abi);
        spec.min_inline = table.read(&MIN_INLINE)?;
        spec.compression = table.read(&COMPRESSION)?;
        spec.multi_packet = table.read(&MULTI_PACKET)?;
        spec.striding = table.read(&STRIDING)?;
        spec.tunnels = table.read(&TUNNELS)?;
        spec.sw_parser = table.read(&SW_PARSER)?;
        spec.max_tso = table.read(&MAX_TSO)?;
        spec.var = table.read(&VAR)?;
        spec.class = table.read(&CLASS)?;
        spec.clock_khz = table.read(&CLOCK_KHZ)?;
        spec.clock_page = table.read(&CLOCK_PAGE)?;
        spec.timestamps = table.read(&TIMESTAMPS)?;
        spec.steering = SteeringSpec::of(spec.class);
        if let Some(table) = table.subtable(&connectx::STEERING)? {
            spec.steering.read(&table)?;
            table.finish()?;
        }
    }
    Ok(spec)
}

/// Largest MTU that the kernel's drivers accept, in bytes.
const MAX_MTU: i64 = 9978;
/// That of MANA.
const MAX_MTU_MANA: u32 = 9000;
/// Longest name of an interface (`IFNAMSIZ` of linux/if.h, without the final NUL).
const MAX_INTERFACE: usize = 15;

fn port(table: &Settings<'_>, kind: DeviceKind, device: usize, port: usize, netdev: usize) -> Result<PortSpec> {
    let mtu = table.read(&MTU)?;
    if kind == DeviceKind::Mana && mtu > MAX_MTU_MANA {
        return Err(table.error_in(&MTU, format!("found {mtu}, a mana has at most {MAX_MTU_MANA}")));
    }
    let netdev = table.read(&NETDEV)?.unwrap_or_else(|| format!("nic{netdev}"));
    let kernel = table.read(&KERNEL)?;
    if kernel && kind == DeviceKind::Mana {
        let why = "a mana has no flow rules, so its frames are either the program's or the kernel's";
        return Err(table.error_in(&KERNEL, why));
    }
    if kernel && netdev.len() > MAX_INTERFACE {
        let why = format!("found {netdev}, an interface of the kernel has a name of at most {MAX_INTERFACE} bytes");
        return Err(table.error_in(&NETDEV, why));
    }
    Ok(PortSpec {
        netdev,
        kernel,
        mac: table.read(&MAC)?.map_or([2, 0, 0, 0, device as u8 + 1, port as u8 + 1], |Mac(mac)| mac),
        mtu,
        link: table.read(&LINK)?.unwrap_or(LinkSpec::None),
        impair: Impairments {
            lose: table.read(&LOSE)?,
            duplicate: table.read(&DUPLICATE)?,
            corrupt: table.read(&CORRUPT)?,
            reorder: table.read(&REORDER)?,
        },
        own_address_only: table.read(&OWN_ADDRESS_ONLY)?,
        source_check: table.read(&SOURCE_CHECK)?,
    })
}

/// Returns an error if a port uses an interface, an address or a link that another port has already.
fn check_conflicts<'a>(
    table: &Settings<'_>,
    port: &PortSpec,
    others: impl Iterator<Item = &'a PortSpec>,
) -> Result<()> {
    let mut ends = 1;
    for other in others {
        if other.netdev == port.netdev {
            return Err(table.error_in("netdev", format!("there is a port with the interface {} already", port.netdev)));
        }
        if other.mac == port.mac {
            return Err(table.error_in("mac", format!("the port of {} has this address already", other.netdev)));
        }
        if other.link != port.link {
            continue;
        }
        match &port.link {
            LinkSpec::Cable(_) => ends += 1,
            LinkSpec::Tap(name) | LinkSpec::Veth(name) => {
                return Err(
                    table.error_in("link", format!("the port of {} is plugged into {name} already", other.netdev))
                );
            }
            LinkSpec::Pcap(file) => {
                let file = file.display();
                return Err(table.error_in("link", format!("the port of {} writes {file} already", other.netdev)));
            }
            LinkSpec::None | LinkSpec::Loop | LinkSpec::Sink | LinkSpec::Generator => {}
        }
        if ends > 2 {
            return Err(table.error_in("link", "the cable has two ends already"));
        }
    }
    Ok(())
}

impl FromStr for LinkSpec {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        match text.split_once(':').unwrap_or((text, "")) {
            ("none", "") => Ok(Self::None),
            ("loop", "") => Ok(Self::Loop),
            ("sink", "") => Ok(Self::Sink),
            ("generator", "") => Ok(Self::Generator),
            (_, "") => Err(()),
            ("cable", name) => Ok(Self::Cable(name.to_owned())),
            ("tap", interface) if interface.len() <= MAX_INTERFACE => Ok(Self::Tap(interface.to_owned())),
            ("veth", interface) if interface.len() <= MAX_INTERFACE => Ok(Self::Veth(interface.to_owned())),
            ("pcap", file) => Ok(Self::Pcap(file.into())),
            _ => Err(()),
        }
    }
}

struct Mac([u8; 6]);

impl FromStr for Mac {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let bytes: Vec<u8> = text
            .split(':')
            .map(|part| u8::from_str_radix(part, 16).map_err(drop))
            .collect::<std::result::Result<_, ()>>()?;
        let mac: [u8; 6] = bytes.try_into().map_err(drop)?;
        if mac[0] & 1 != 0 || mac == [0; 6] { Err(()) } else { Ok(Self(mac)) }
    }
}

struct Pci(String);

impl FromStr for Pci {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let hex = |part: &str, digits| {
            part.len() == digits && part.chars().all(|c| c.is_ascii_hexdigit() && !c.is_ascii_uppercase())
        };
        let parts: Vec<&str> = text.split([':', '.']).collect();
        let right = matches!(parts[..], [domain, bus, device, function]
            if hex(domain, 4) && hex(bus, 2) && hex(device, 2) && hex(function, 1));
        if right && text.len() == 12 { Ok(Self(text.to_owned())) } else { Err(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Topology> {
        Topology::read(&Source::new("t.toml", text))
    }

    #[test]
    fn a_short_file_has_sensible_defaults() {
        let topology = read("[[device]]\nkind = 'mana'\n[[device.port]]\n").unwrap();
        assert_eq!(topology.doorbells, Doorbells::Trap);
        let device = &topology.devices[0];
        assert_eq!((device.name.as_str(), device.pci.as_str()), ("mana0", "0000:00:10.0"));
        assert_eq!(device.ports[0].mac, [2, 0, 0, 0, 1, 1]);
        assert_eq!(device.ports[0].link, LinkSpec::None);
    }

    #[test]
    fn errors_name_line_and_remedy() {
        let message = |text: &str| read(text).unwrap_err().to_string();
        assert_eq!(
            message("doorbells = 'trapp'"),
            "t.toml:1:13: doorbells: found 'trapp', expected one of \"trap\", \"queue\", \"scan\" \
             (did you mean \"trap\"?)"
        );
        let port = "[[device]]\nkind = 'mana'\n[[device.port]]\n";
        assert!(
            message(&format!("{port}link = 'cable:a'\n"))
                .ends_with("t.toml:4:8: device[0].port[0].link: cable:a has one end; a cable joins two ports")
        );
        assert!(
            message(&format!("{port}lnk = 'sink'\n"))
                .ends_with("device[0].port[0].lnk: unknown key; did you mean \"link\"?")
        );
        assert!(message(&format!("{port}lose = 2\n")).contains("found 2, expected a number from 0 to 1"));
        assert!(message(&format!("{port}mac = '03:00:00:00:00:01'\n")).contains("a unicast address"));
        let twice = |key: &str| format!("{port}{key}\n[[device.port]]\n{key}\n");
        assert!(
            message(&twice("netdev = 'a'")).ends_with("port[1].netdev: there is a port with the interface a already")
        );
        assert!(message(&twice("mac = '02:00:00:00:00:07'")).contains("has this address already"));
        assert!(message(&twice("link = 'pcap:f.pcap'")).contains("writes f.pcap already"));
        assert!(message("[[device]]\nkind = 'mana'\n[[device.port]]\nkernel = true\n").contains("has no flow rules"));
        let long = message("[[device]]\nkind = 'mlx5'\n[[device.port]]\nkernel = true\nnetdev = 'sixteen-letters-'\n");
        assert!(long.contains("a name of at most 15 bytes"), "{long}");
        assert!(message(&twice("link = 'tap:t'")).contains("plugged into t already"));
        let three = format!("{}[[device.port]]\nlink = 'cable:a'\n", twice("link = 'cable:a'"));
        assert!(message(&three).ends_with("port[2].link: the cable has two ends already"));
        assert!(message("").contains("no device"));
        assert!(message("[[device]]\nkind = 'mana'\n").contains("at least one port"));
    }
}
