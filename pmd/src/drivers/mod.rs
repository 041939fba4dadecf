//! Poll-mode drivers. To add one, write its folder and add one line to [`DRIVERS`], and one to [`LEFT_OUT`] for builds
//! without its feature. The features `nic`, `kernel` and `pcap` choose drivers.
//!
//! A port is a table of the configuration, which [`PORT`] describes. The settings of a driver are in a table of its
//! name inside, which [`Driver::table`] describes:
//!
//! ```toml
//! [[port]]
//! name = "lan"
//! driver = "af_packet"
//! device = "eth1"
//!
//! [port.af_packet]
//! exclusive = false
//!
//! [port.faults]
//! seed = 1
//! rx = { loss = 0.01, reorder = 0.05, distance = 4 }
//! ```

pub mod auto;
pub mod inventory;
pub mod kernel;
#[cfg(feature = "nic")]
pub mod nic;
mod privilege;
pub mod sw_offload;
pub mod r#virtual;

use std::fmt;
use std::sync::LazyLock;
use std::time::Duration;

pub use privilege::setcap_command;

use crate::port::faults::{self, Faults, QueueFaults};
use crate::port::{Bifurcation, Capabilities, PortConfig, PortError, PortId, PortSpec};
use wirepath_packet::{DATA_ROOM, Pool};
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{
    Choice, ConfigError, ConfigTable, Flag, Integer, Key, Number, Required, Settings, Span, Text, WithDefault, Written,
};

/// A driver, and all that programs know about it.
///
/// A new driver needs its folder (with the `mod` line for it) and a line in [`DRIVERS`] and [`LEFT_OUT`] each. The
/// list of devices, `driver = "auto"`, `wirepath doctor` and the gateway use the properties below, never the names
/// of drivers.
pub trait Driver: Sync {
    /// Returns the name in configurations, in lower case.
    fn name(&self) -> &'static str;

    /// Returns a description of one line.
    fn about(&self) -> &'static str;

    /// Returns the kind of device that the driver opens.
    fn device_kind(&self) -> DeviceKind {
        DeviceKind::Virtual
    }

    /// Returns whether `driver = "auto"` tries the driver. It tries drivers in the order of [`DRIVERS`].
    fn in_auto(&self) -> bool {
        false
    }

    /// Returns whether `driver = "auto"` tries the driver first on virtual cables (veth(4)).
    fn is_first_on_veth(&self) -> bool {
        false
    }

    /// Returns whether devices of the driver may have hardware for flow rules.
    fn may_have_rule_hardware(&self) -> bool {
        false
    }

    /// Returns the capabilities that its ports need, also when their devices are lost and return.
    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::empty()
    }

    /// Returns the description of the driver's table, which has the name of the driver.
    fn table(&self) -> &'static ConfigTable;

    /// Returns settings that select each receive mode and each transmit mode at least once, as TOML keys of the
    /// driver's table. Tests run in every mode.
    fn modes(&self) -> &'static [&'static str] {
        &[""]
    }

    /// Checks the settings of a port without touching the device.
    ///
    /// `device` is the configured device. `settings` is the table that [`Self::table`] describes, or an empty one. The
    /// caller reads it with [`Settings::complete`].
    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError>;

    /// Returns the devices of this machine that the driver might open, for `wirepath devices`.
    fn candidates(&self) -> Vec<Candidate> {
        Vec::new()
    }
}

/// Kind of device that a driver opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// No device: packets come from memory, files or a generator. No privileges are needed.
    Virtual,
    /// A network interface that the driver creates.
    CreatedInterface,
    /// A network interface of the kernel, whose frames the port takes.
    Interface,
    /// A port of an RDMA device, whose frames the port takes. The device or its network interface names the port.
    RdmaPort,
}

impl DeviceKind {
    /// Returns whether a port takes the frames of an existing interface from the kernel.
    pub fn takes_frames_from_kernel(self) -> bool {
        matches!(self, Self::Interface | Self::RdmaPort)
    }
}

/// A device as one driver sees it without opening it.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// Value of the key `device`.
    pub device: String,
    /// Expected mode, or the reason why the driver cannot open the device.
    pub usable: Result<String, String>,
}

/// All drivers. `driver = "auto"` and lists of devices use this order: best first.
pub static DRIVERS: &[&dyn Driver] = &[
    &auto::Auto,
    #[cfg(feature = "nic")]
    &nic::mlx5::Mlx5,
    #[cfg(feature = "nic")]
    &nic::mana::Mana,
    #[cfg(feature = "nic")]
    &nic::verbs::Verbs,
    #[cfg(feature = "kernel")]
    &kernel::af_xdp::AfXdp,
    #[cfg(feature = "kernel")]
    &kernel::af_packet::AfPacket,
    #[cfg(feature = "kernel")]
    &kernel::tap::Tap,
    #[cfg(feature = "kernel")]
    &kernel::xdp_live::XdpLive,
    &r#virtual::memory::Memory,
    &r#virtual::null::Null,
    #[cfg(feature = "pcap")]
    &r#virtual::pcap::Pcap,
];

/// A driver of this crate that is not built in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Name in configurations.
    pub name: &'static str,
    /// Feature of the crates `wirepath` and `wirepath-pmd` that builds the driver in.
    pub feature: &'static str,
    /// True if `driver = "auto"` would try the driver.
    pub in_auto: bool,
}

/// Drivers that are not built in. Empty with the default features.
pub static LEFT_OUT: &[LeftOut] = &[
    #[cfg(not(feature = "nic"))]
    LeftOut { name: "mlx5", feature: "nic", in_auto: true },
    #[cfg(not(feature = "nic"))]
    LeftOut { name: "mana", feature: "nic", in_auto: true },
    #[cfg(not(feature = "nic"))]
    LeftOut { name: "verbs", feature: "nic", in_auto: false },
    #[cfg(not(feature = "kernel"))]
    LeftOut { name: "af_xdp", feature: "kernel", in_auto: true },
    #[cfg(not(feature = "kernel"))]
    LeftOut { name: "af_packet", feature: "kernel", in_auto: true },
    #[cfg(not(feature = "kernel"))]
    LeftOut { name: "tap", feature: "kernel", in_auto: false },
    #[cfg(not(feature = "kernel"))]
    LeftOut { name: "xdp_live", feature: "kernel", in_auto: false },
    #[cfg(not(feature = "pcap"))]
    LeftOut { name: "pcap", feature: "pcap", in_auto: false },
];

/// Descriptions of the tables of drivers that are not built in, so that a reader may ask for them.
static LEFT_OUT_TABLES: LazyLock<Vec<ConfigTable>> = LazyLock::new(|| {
    let table = |driver: &LeftOut| ConfigTable {
        name: driver.name,
        about: "Settings of a driver that is not built in.",
        others: "Keys of the driver.",
        ..ConfigTable::EMPTY
    };
    LEFT_OUT.iter().map(table).collect()
});

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, feature, .. } = self;
        write!(f, "driver {name} is not built in; build the program with the feature \"{feature}\" of wirepath")
    }
}

/// Finds a driver by name.
pub fn find(name: &str) -> Option<&'static dyn Driver> {
    DRIVERS.iter().copied().find(|driver| driver.name() == name)
}

/// Returns the kind of device that the named driver opens.
pub fn device_kind(driver: &str) -> DeviceKind {
    find(driver).map_or(DeviceKind::Virtual, Driver::device_kind)
}

/// Returns the capabilities that ports of the named driver need.
pub fn privileges(driver: &str) -> CapabilitySet {
    find(driver).map_or(CapabilitySet::empty(), Driver::privileges)
}

/// Positions of the keys whose values a port may refuse.
#[derive(Clone, Debug)]
pub struct KeySpans([(&'static str, Span); 4]);

impl KeySpans {
    /// Returns the position of a key's value: of `device`, `queues`, `depth` or `mtu`.
    pub fn of(&self, key: &str) -> &Span {
        let (_, span) = self.0.iter().find(|(known, _)| *known == key).unwrap_or(&self.0[0]);
        span
    }

    fn read(port: &Settings<'_>) -> Self {
        Self(["device", "queues", "depth", "mtu"].map(|key| (key, port.span(key))))
    }

    /// Returns the position of the value that the port refused. Without such a key, it is that of the device.
    pub fn of_error(&self, error: &PortError) -> &Span {
        self.of(error.key())
    }
}

/// MTU of ports whose device has none.
pub const DEFAULT_MTU: u16 = 1500;
/// Bytes of an Ethernet header with two VLAN tags.
const FRAME_OVERHEAD: u32 = 22;

const PORT_NAME: Key<Required<Text>> = Key::text("name", "letters, digits, '-', '_' and '.'")
    .required()
    .about("Name by which other tables, rules and displays refer to the port.");
const DRIVER: Key<Choice<&'static dyn Driver>> =
    Key::choice_of("driver", || DRIVERS.iter().map(|driver| (driver.name(), *driver, driver.about())).collect())
        .same_as("\"auto\"")
        .about("Driver of the port. `wirepath devices` lists what each driver can open on this machine.");
const DEVICE: Key<Text> = Key::text("device", "name of an interface, an RDMA device, a file or a cable")
    .absent("an error, unless the driver needs no device")
    .about("Device that the driver opens.");
const QUEUES: Key<WithDefault<Integer<u16>>> = Key::integer("queues", 1..=256)
    .default(1)
    .about("Receive queues, and as many transmit queues. Each worker needs at least one receive queue.");
const DEPTH: Key<WithDefault<Integer<u32>>> = Key::integer("depth", 16..=65_536)
    .unit("packets")
    .default(1024)
    .about("Entries of each receive and transmit ring. A driver rounds up, and the log shows the result.");
const MTU: Key<Integer<u16>> = Key::integer("mtu", 68..=9202)
    .unit("bytes")
    .absent(
        "the MTU of the device, or 1500 if it has none; a NIC with larger packets than the pool has room for gets 1500",
    )
    .about("Largest layer-3 packet. Frames may have 22 bytes more: an Ethernet header and two VLAN tags.");
const GRO: Key<WithDefault<Flag>> = Key::flag("gro").default(false).about(
    "Joins TCP packets, and UDP datagrams of one length, that arrive in one burst to superframes, also inside tunnels \
     (generic receive offload): over UDP on their standard ports, GRE, and IP in IP. They are cut when they leave, by \
     the device if it can.",
);
const PROMISCUOUS: Key<WithDefault<Flag>> =
    Key::flag("promiscuous").default(true).about("Also receives frames for other link-layer addresses.");
const ON_LOSS: Key<WithDefault<Choice<OnLoss>>> = Key::choice(
    "on_loss",
    &[
        ("wait", OnLoss::Wait, "waits for the device without limit; the other ports continue"),
        (
            "fail-after",
            OnLoss::FailAfter(Duration::ZERO),
            "waits for `loss_timeout`; then the port has failed, the others continue, and the exit code will be 1",
        ),
        ("exit", OnLoss::Exit, "stops the program at once with exit code 1"),
    ],
)
.default_word("wait")
.needs(&[("fail-after", "loss_timeout = 30")])
.about(
    "What follows when the port loses its device, for example because its interface is removed. Until the device is \
     back, packets for the port are dropped as `device_lost`.",
);
const LOSS_TIMEOUT: Key<Integer<u64>> = Key::integer("loss_timeout", 1..=31_536_000)
    .unit("seconds")
    .when("on_loss = \"fail-after\"")
    .absent("an error with on_loss = \"fail-after\"")
    .about("Time for which the port waits for a lost device.");

/// Description of a table `[[port]]`.
pub static PORT: ConfigTable = ConfigTable {
    name: "port",
    written: Written::Repeated,
    about: "A port: a device and the driver that opens it. Ports have numbers in the order of the configuration.",
    absent: "an error, because a program needs a port",
    keys: &[&PORT_NAME, &DRIVER, &DEVICE, &QUEUES, &DEPTH, &MTU, &PROMISCUOUS, &GRO, &ON_LOSS, &LOSS_TIMEOUT],
    tables: || DRIVERS.iter().map(|driver| driver.table()).chain(LEFT_OUT_TABLES.iter()).chain([&FAULTS]).collect(),
    example: "[[port]]\nname = \"lan\"\ndevice = \"eth1\"\nqueues = 2\n",
    ..ConfigTable::EMPTY
};

const SEED: Key<WithDefault<Integer<u64>>> = Key::integer("seed", 0..=i64::MAX)
    .default(0)
    .about("Seed of the random numbers. Each queue has a sequence of its own, which depends on nothing else.");
const LOSS: Key<WithDefault<Number>> =
    Key::number("loss", 0.0, 1.0).unit("probability").default(0.0).about("A packet is lost.");
const DUPLICATE: Key<WithDefault<Number>> =
    Key::number("duplicate", 0.0, 1.0).unit("probability").default(0.0).about("A packet comes twice.");
const REORDER: Key<WithDefault<Number>> = Key::number("reorder", 0.0, 1.0)
    .unit("probability")
    .default(0.0)
    .about("A packet is delayed until others have passed it: as many as `distance`.");
const DISTANCE: Key<WithDefault<Integer<u32>>> = Key::integer("distance", 1..=faults::MAX_DISTANCE as i64)
    .unit("packets")
    .default(4)
    .about("Packets that pass a delayed one. A queue without further packets releases it earlier.");
const CORRUPT: Key<WithDefault<Number>> = Key::number("corrupt", 0.0, 1.0)
    .unit("probability")
    .default(0.0)
    .about("One bit of a packet is flipped, in its first segment.");
const FULL: Key<WithDefault<Number>> = Key::number("full", 0.0, 1.0)
    .unit("probability")
    .default(0.0)
    .about("A call of the transmit queue begins a period in which the queue accepts no packets.");
const FULL_CALLS: Key<WithDefault<Integer<u32>>> =
    Key::integer("full_calls", 1..=1_000_000).unit("calls").default(4).about("Length of a period that `full` begins.");

static RX_FAULTS: ConfigTable = ConfigTable {
    name: "rx",
    about: "Faults of the receive queues.",
    absent: "no faults",
    keys: &[&LOSS, &DUPLICATE, &REORDER, &DISTANCE, &CORRUPT],
    example: "[port.faults.rx]\nloss = 0.01\n",
    ..ConfigTable::EMPTY
};

static TX_FAULTS: ConfigTable = ConfigTable {
    name: "tx",
    about: "Faults of the transmit queues.",
    absent: "no faults",
    keys: &[&LOSS, &DUPLICATE, &REORDER, &DISTANCE, &CORRUPT, &FULL, &FULL_CALLS],
    example: "[port.faults.tx]\nfull = 0.001\n",
    ..ConfigTable::EMPTY
};

static FAULTS: ConfigTable = ConfigTable {
    name: "faults",
    about: "For tests: faults that the port injects into its queues. Every fault is counted.",
    absent: "no faults",
    keys: &[&SEED],
    tables: || vec![&RX_FAULTS, &TX_FAULTS],
    example: "[port.faults]\nseed = 1\nrx = { loss = 0.01, reorder = 0.05 }\n",
    ..ConfigTable::EMPTY
};

/// Checked settings of a port.
pub struct PortSettings {
    /// Name of the port.
    pub name: String,
    /// Position of the name in the configuration.
    pub name_span: Span,
    /// Positions of other keys.
    pub key_spans: KeySpans,
    /// Device that the driver opens, as configured.
    pub device: Option<String>,
    /// The driver and its settings.
    pub plan: Box<dyn PortSpec>,
    /// Number of receive queues and of transmit queues.
    pub queues: u16,
    /// Ring entries.
    pub depth: u32,
    /// Largest layer-3 packet in bytes; `None`: see [`choose_mtu`].
    pub mtu: Option<u16>,
    /// Also receive frames for other hosts.
    pub promiscuous: bool,
    /// Joins TCP packets of a burst to superframes.
    pub gro: bool,
    /// Packets that the port takes; `None`: all. A program that shares the interface with the kernel sets it.
    pub bifurcation: Option<Bifurcation>,
    /// Reaction to the loss of the device.
    pub on_loss: OnLoss,
}

/// Reaction of a program to the loss of a port's device (`on_loss`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnLoss {
    /// The port waits for the device without limit.
    #[default]
    Wait,
    /// The port waits for this time and then has failed. The other ports continue; the program ends with an error.
    FailAfter(Duration),
    /// The program stops at once with an error.
    Exit,
}

impl OnLoss {
    fn read(port: &Settings<'_>) -> Result<Self, ConfigError> {
        let on_loss = port.read(&ON_LOSS)?;
        let seconds = port.read(&LOSS_TIMEOUT)?;
        match (on_loss, seconds) {
            (Self::FailAfter(_), Some(seconds)) => Ok(Self::FailAfter(Duration::from_secs(seconds))),
            (Self::FailAfter(_), None) => {
                Err(port.error_in(&ON_LOSS, "\"fail-after\" needs the key loss_timeout, in seconds"))
            }
            (_, Some(_)) => Err(port.error_in(&LOSS_TIMEOUT, "applies only with on_loss = \"fail-after\"")),
            (other, None) => Ok(other),
        }
    }
}

impl PortSettings {
    /// Returns whether both ports would take the frames of the same interface. Only one of them would get these.
    pub fn shares_interface(&self, other: &Self) -> bool {
        let takes = |port: &Self| device_kind(port.plan.driver()).takes_frames_from_kernel();
        takes(self) && takes(other) && self.device == other.device
    }

    /// Returns an error if the program has given up a capability that the port needs.
    ///
    /// # Errors
    /// [`PortError::GivenUp`].
    pub fn check_privileges(&self) -> Result<(), PortError> {
        privilege::check(self.plan.driver(), self.device.as_deref().unwrap_or(&self.name), self.plan.privileges())
    }

    /// Returns the configuration to start the port with, with an MTU of 1500 if none is configured.
    pub fn config(&self, id: PortId, pool: Pool) -> PortConfig {
        PortConfig {
            id,
            rx_queues: self.queues,
            tx_queues: self.queues,
            depth: self.depth,
            mtu: self.mtu.unwrap_or(DEFAULT_MTU),
            promiscuous: self.promiscuous,
            gro: self.gro,
            bifurcation: self.bifurcation.clone(),
            pool,
        }
    }
}

/// Returns the MTU of a port on a device, and the reason for it as a part of a sentence.
///
/// If none is configured, it is that of the device. A NIC needs buffers for frames of that length in all of its rings,
/// which have `entries` together. If these are more than `buffers`, the MTU is at most [`DEFAULT_MTU`].
pub fn choose_mtu(configured: Option<u16>, device: &Capabilities, entries: u32, buffers: u32) -> (u16, String) {
    let of_device = device.mtu.filter(|mtu| *mtu >= 68);
    if let Some(mtu) = configured {
        let other = of_device.filter(|other| *other != u32::from(mtu));
        return (
            mtu,
            format!("as configured{}", other.map_or_else(String::new, |mtu| format!("; the device has {mtu}"))),
        );
    }
    let Some(of_device) = of_device else { return (DEFAULT_MTU, "the default; the device has none".to_owned()) };
    let mtu = u16::try_from(of_device).unwrap_or(u16::MAX).min(device.max_mtu);
    let needed = entries.saturating_mul((u32::from(mtu) + FRAME_OVERHEAD).div_ceil(DATA_ROOM as u32));
    if device_kind(device.driver) == DeviceKind::RdmaPort && mtu > DEFAULT_MTU && needed > buffers {
        let why = format!("the default; the device has {of_device}, for which its rings need {needed} buffers");
        return (DEFAULT_MTU, why);
    }
    if u32::from(mtu) < of_device {
        return (mtu, format!("the largest of driver {}; the device has {of_device}", device.driver));
    }
    (mtu, "that of the device".to_owned())
}

impl fmt::Debug for PortSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortSettings")
            .field("name", &self.name)
            .field("device", &self.device)
            .field("plan", &self.plan)
            .field("queues", &self.queues)
            .field("depth", &self.depth)
            .field("mtu", &self.mtu)
            .field("promiscuous", &self.promiscuous)
            .field("gro", &self.gro)
            .field("bifurcation", &self.bifurcation)
            .field("on_loss", &self.on_loss)
            .finish_non_exhaustive()
    }
}

/// Reads one `[[port]]` table.
pub fn plan(settings: Settings<'_>) -> Result<PortSettings, ConfigError> {
    settings.described(&PORT).complete(read_port)
}

/// Reads one table that [`PORT`] describes, which the caller finishes.
pub fn read_port(settings: &Settings<'_>) -> Result<PortSettings, ConfigError> {
    let name_span = settings.span(&PORT_NAME);
    let key_spans = KeySpans::read(settings);
    let driver = read_driver(settings)?;
    let device = settings.read(&DEVICE)?;
    let queues = settings.read(&QUEUES)?;
    let depth = settings.read(&DEPTH)?;
    let mtu = settings.read(&MTU)?;
    let promiscuous = settings.read(&PROMISCUOUS)?;
    let gro = settings.read(&GRO)?;
    let on_loss = OnLoss::read(settings);
    let plan = match driver {
        // The table of a driver cannot be read without the driver.
        None if settings.has(&DRIVER) => {
            for driver in DRIVERS {
                settings.has(driver.name());
            }
            for driver in LEFT_OUT {
                settings.has(driver.name);
            }
            None
        }
        driver => Some(driver_plan(driver.unwrap_or(&auto::Auto), device.as_deref(), settings)),
    };
    let faults = read_faults(settings);
    let name = settings.read(&PORT_NAME)?;
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        settings.record(name_span.error(format!("found \"{name}\", expected letters, digits, '-', '_' and '.'")));
    }
    settings.check_keys()?;
    let plan = plan.unwrap_or_else(|| Err(settings.error_in(&DRIVER, "missing, expected a driver")))?;
    let on_loss = on_loss?;
    let plan = match faults? {
        Some(faults) => faults::inject(plan, faults),
        None => plan,
    };
    Ok(PortSettings {
        name,
        name_span,
        key_spans,
        device,
        plan,
        queues,
        depth,
        mtu,
        promiscuous,
        gro,
        bifurcation: None,
        on_loss,
    })
}

/// Reads the table `faults` inside a port's table.
fn read_faults(port: &Settings<'_>) -> Result<Option<Faults>, ConfigError> {
    let Some(table) = port.subtable(&FAULTS)? else { return Ok(None) };
    let faults = table.complete(|table| {
        let seed = table.read(&SEED)?;
        let rx = table.read_table(&RX_FAULTS, |queues| read_queue_faults(queues, false));
        let tx = table.read_table(&TX_FAULTS, |queues| read_queue_faults(queues, true));
        Ok(Faults { seed, rx: rx?, tx: tx? })
    })?;
    Ok(Some(faults))
}

/// Reads the faults of one direction.
fn read_queue_faults(table: &Settings<'_>, is_tx: bool) -> Result<QueueFaults, ConfigError> {
    let defaults = QueueFaults::default();
    let (full, full_calls) = match is_tx {
        true => (table.read(&FULL)?, table.read(&FULL_CALLS)?),
        false => (defaults.full, defaults.full_calls),
    };
    Ok(QueueFaults {
        loss: table.read(&LOSS)?,
        duplicate: table.read(&DUPLICATE)?,
        reorder: table.read(&REORDER)?,
        distance: table.read(&DISTANCE)?,
        corrupt: table.read(&CORRUPT)?,
        full,
        full_calls,
    })
}

/// Reads the key `driver`: `None` if it is missing or wrong.
fn read_driver(port: &Settings<'_>) -> Result<Option<&'static dyn Driver>, ConfigError> {
    let name: Option<String> = if port.is::<String>("driver") { port.get("driver")? } else { None };
    if let Some(driver) = LEFT_OUT.iter().find(|driver| name.as_deref() == Some(driver.name)) {
        port.record(port.error_in(&DRIVER, driver.to_string()));
        return Ok(None);
    }
    port.read(&DRIVER)
}

/// Reads the table of a driver inside a port's table.
fn driver_plan(
    driver: &dyn Driver,
    device: Option<&str>,
    port: &Settings<'_>,
) -> Result<Box<dyn PortSpec>, ConfigError> {
    let needs_device = driver.device_kind().takes_frames_from_kernel();
    if needs_device && device.is_none() {
        let what = "the name of a network interface; `wirepath devices` lists them";
        port.record(
            port.misspelt(&DEVICE).unwrap_or_else(|| port.error_in(&DEVICE, format!("missing, expected {what}"))),
        );
    }
    // The rest of the table is checked without a device too.
    let device = device.or(needs_device.then_some(""));
    port.read_table(driver.table(), |table| driver.plan(device, table))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a port with these keys; the error is in the form for users.
    fn read_keys(keys: &str) -> Result<PortSettings, String> {
        let text = format!("[[port]]\nname = 'a'\n{keys}");
        let source = wirepath_settings::Source::new("c.toml", &text);
        let document = source.parse().unwrap();
        let table = document.settings().tables("port").unwrap().remove(0);
        plan(table).map_err(|error| error.to_string())
    }

    #[test]
    fn every_driver_is_built_in_or_named_as_left_out() {
        let built_in = DRIVERS.iter().map(|driver| (driver.name(), driver.in_auto()));
        let left_out = LEFT_OUT.iter().map(|driver| (driver.name, driver.in_auto));
        let mut all: Vec<_> = built_in.chain(left_out).collect();
        all.sort_unstable();
        let auto = ["af_packet", "af_xdp", "mana", "mlx5"].map(|name| (name, true));
        let others = ["auto", "memory", "null", "pcap", "tap", "verbs", "xdp_live"].map(|name| (name, false));
        let mut expected = [&auto[..], &others[..]].concat();
        expected.sort_unstable();
        assert_eq!(all, expected);
    }

    #[test]
    fn an_error_names_the_feature_of_a_driver_left_out() {
        for driver in LEFT_OUT {
            let LeftOut { name, feature, in_auto } = driver;
            let message = |key: &str| {
                format!(
                    "{key}: driver {name} is not built in; build the program with the feature \"{feature}\" of wirepath"
                )
            };
            let port = read_keys(&format!("driver = '{name}'\ndevice = 'x'\n[port.{name}]\nanything = 1")).unwrap_err();
            assert_eq!(port, format!("c.toml:3:10: {}", message("port[0].driver")));
            let auto = read_keys(&format!("device = 'no-such-if'\n[port.auto.{name}]\nanything = 1")).unwrap_err();
            assert_eq!(auto, format!("c.toml:4:1: {}", message(&format!("port[0].auto.{name}"))));
            if *in_auto {
                let error = crate::port::PortError::NoDriver { device: "eth0".to_owned(), tried: Vec::new() };
                assert!(error.to_string().contains(&driver.to_string()), "{error}");
            }
        }
    }

    #[cfg(all(feature = "nic", feature = "kernel"))]
    #[test]
    fn auto_tries_drivers_from_the_fastest_on() {
        let auto: Vec<_> = DRIVERS.iter().filter(|driver| driver.in_auto()).map(|driver| driver.name()).collect();
        assert_eq!(auto, ["mlx5", "mana", "af_xdp", "af_packet"]);
    }

    #[test]
    fn the_reaction_to_a_loss_is_checked() {
        let read = |keys: &str| {
            let text = format!("[[port]]\nname = 'a'\ndriver = 'null'\n{keys}");
            let source = wirepath_settings::Source::new("c.toml", &text);
            let document = source.parse().unwrap();
            let table = document.settings().tables("port").unwrap().remove(0);
            plan(table).map(|port| port.on_loss).map_err(|error| error.to_string())
        };
        assert_eq!(read(""), Ok(OnLoss::Wait));
        assert_eq!(read("on_loss = 'exit'"), Ok(OnLoss::Exit));
        let ten = OnLoss::FailAfter(Duration::from_secs(10));
        assert_eq!(read("on_loss = 'fail-after'\nloss_timeout = 10"), Ok(ten));
        let error = read("on_loss = 'fail-after'").unwrap_err();
        assert_eq!(error, "c.toml:4:11: port[0].on_loss: \"fail-after\" needs the key loss_timeout, in seconds");
        let error = read("loss_timeout = 10").unwrap_err();
        assert!(error.ends_with("loss_timeout: applies only with on_loss = \"fail-after\""), "{error}");
        assert!(read("on_loss = 'never'").unwrap_err().contains("\"wait\", \"fail-after\", \"exit\""));
    }

    #[test]
    fn driver_names_are_unique_and_found() {
        for driver in DRIVERS {
            assert_eq!(DRIVERS.iter().filter(|other| other.name() == driver.name()).count(), 1);
            assert_eq!(device_kind(driver.name()), driver.device_kind());
            assert_eq!(driver.table().name, driver.name());
        }
    }
}
