//! Poll-mode drivers: one folder each, and one line in [`DRIVERS`].
//!
//! A port is a table of a configuration:
//!
//! ```toml
//! [[port]]
//! name = "lan"          # how everything else calls it
//! driver = "auto"       # or the name of a driver; auto is the default
//! device = "eth1"       # what the driver opens
//! queues = 1            # receive queues, and as many transmit queues
//! depth = 1024          # ring entries
//! mtu = 1500
//! promiscuous = true
//!
//! [port.af_packet]      # settings of one driver, in a table of its name
//! ```

pub mod af_packet;
pub mod af_xdp;
pub mod auto;
pub(crate) mod direct;
pub(crate) mod kernel;
pub mod mana;
pub mod memory;
pub mod mlx5;
pub mod null;
pub mod pcap;
pub mod rdma;
pub mod requests;
pub mod tap;
pub mod verbs;

use std::fmt;

use crate::packet::Pool;
use crate::port::{Plan, PortConfig, PortError, PortId};
use crate::settings::{ConfigError, Place, Settings};

/// What a driver tells the program about itself.
pub trait Driver: Sync {
    /// Name in configurations: lower case.
    fn name(&self) -> &'static str;

    /// One line for people.
    fn about(&self) -> &'static str;

    /// Checks the settings of a port: `device` as configured, and `settings`, the table named after the driver (empty if there is
    /// none). Must not touch the device. Calls [`Settings::finish`] on nothing: the caller does.
    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError>;

    /// Devices of this machine that the driver could open or not, for `wirepath devices`.
    fn candidates(&self) -> Vec<Candidate> {
        Vec::new()
    }
}

/// A device as seen by one driver, without opening it.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What to write as `device`.
    pub device: String,
    /// Mode to expect, or why the driver cannot take the device.
    pub usable: Result<String, String>,
}

/// All drivers.
pub static DRIVERS: &[&dyn Driver] = &[
    &auto::Auto,
    &mlx5::Mlx5,
    &mana::Mana,
    &verbs::Verbs,
    &af_xdp::AfXdp,
    &af_packet::AfPacket,
    &memory::Memory,
    &null::Null,
    &pcap::Pcap,
    &tap::Tap,
];

/// Finds a driver by name.
pub fn find(name: &str) -> Option<&'static dyn Driver> {
    DRIVERS.iter().copied().find(|driver| driver.name() == name)
}

/// Where a configuration asks for what a port may refuse.
#[derive(Clone, Debug)]
pub struct Places([(&'static str, Place); 4]);

impl Places {
    fn of(port: &Settings<'_>) -> Self {
        Self(["device", "queues", "depth", "mtu"].map(|key| (key, port.place(key))))
    }

    /// Where what the port refused is asked for; without such a key, where the port begins.
    pub fn refused(&self, error: &PortError) -> &Place {
        let (_, place) = self.0.iter().find(|(key, _)| *key == error.key()).unwrap_or(&self.0[0]);
        place
    }
}

/// A port of a configuration, checked.
pub struct PortSettings {
    /// Name of the port.
    pub name: String,
    /// Where the port's name stands in the configuration.
    pub place: Place,
    /// Where the rest stands.
    pub places: Places,
    /// What the driver opens, as written in the configuration.
    pub device: Option<String>,
    /// Driver and its settings.
    pub plan: Box<dyn Plan>,
    /// Queues each way.
    pub queues: u16,
    /// Ring entries.
    pub depth: u32,
    /// Largest layer-3 packet in bytes.
    pub mtu: u16,
    /// Receive frames for other stations too.
    pub promiscuous: bool,
}

impl PortSettings {
    /// Whether both ports would take the same interface from the kernel. One of them would get its frames, not both.
    pub fn shares_interface(&self, other: &Self) -> bool {
        let takes =
            |port: &Self| ["auto", "mlx5", "mana", "verbs", "af_xdp", "af_packet"].contains(&port.plan.driver());
        takes(self) && takes(other) && self.device == other.device
    }

    /// The configuration to start the port with.
    pub fn config(&self, id: PortId, pool: Pool) -> PortConfig {
        PortConfig {
            id,
            rx_queues: self.queues,
            tx_queues: self.queues,
            depth: self.depth,
            mtu: self.mtu,
            promiscuous: self.promiscuous,
            pool,
        }
    }
}

impl fmt::Debug for PortSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PortSettings").field("name", &self.name).field("plan", &self.plan).finish_non_exhaustive()
    }
}

/// Reads one `[[port]]` table.
pub fn plan(settings: Settings<'_>) -> Result<PortSettings, ConfigError> {
    let place = settings.place("name");
    let places = Places::of(&settings);
    let name: String = settings.required("name")?;
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        return Err(place.error(format!("found \"{name}\", expected letters, digits, '-', '_' and '.'")));
    }
    let names: Vec<_> = DRIVERS.iter().map(|driver| (driver.name(), *driver)).collect();
    let driver = settings.choice("driver", &names)?.unwrap_or(&auto::Auto);
    let device: Option<String> = settings.get("device")?;
    let queues = settings.integer("queues", 1..=256)?.unwrap_or(1);
    let depth = settings.integer("depth", 16..=65_536)?.unwrap_or(1024);
    let mtu = settings.integer("mtu", 68..=9202)?.unwrap_or(1500);
    let promiscuous = settings.get("promiscuous")?.unwrap_or(true);
    // A misspelt key is reported before what the driver misses for want of it.
    let plan = driver_plan(driver, device.as_deref(), &settings);
    settings.check_keys()?;
    let plan = plan?;
    settings.finish()?;
    Ok(PortSettings { name, place, places, device, plan, queues, depth, mtu, promiscuous })
}

/// Reads the table of one driver inside a port's table.
fn driver_plan(driver: &dyn Driver, device: Option<&str>, port: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
    let table = port.table(driver.name())?;
    match table {
        Some(table) => {
            let plan = driver.plan(device, &table)?;
            table.finish()?;
            Ok(plan)
        }
        None => driver.plan(device, &port.empty(driver.name())),
    }
}
