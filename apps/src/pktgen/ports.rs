//! The ports of a run: their names on the command line, and how they are opened.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, Instant};

use wirepath::Failure;
use wirepath_packet::counters::QueueStats;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{Pool, PortId};
use wirepath_pipeline::RuntimeConfig;
use wirepath_pmd::drivers::inventory::DeviceInfo;
use wirepath_pmd::drivers::{self, PortSettings, choose_mtu};
use wirepath_pmd::port::{Capabilities, LinkState, Offloads, OpenPort, Port, PortConfig, StartedPort};
use wirepath_settings::Source;

/// Buffers for packets that are in no ring.
const SPARE_BUFFERS: u32 = 4096;
/// Most buffers of a pool.
const MAX_BUFFERS: u32 = 1 << 20;
/// Longest wait for the links.
const LINK_TIMEOUT: Duration = Duration::from_secs(5);

/// A port as the command line names it: the name of a port in the configuration, `DRIVER:DEVICE` or `DEVICE`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortName(String);

impl FromStr for PortName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("expected a device such as eth1, or a driver and a device such as af_xdp:eth1".to_owned());
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Part of a port in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Role {
    /// The port sends.
    pub sends: bool,
    /// Packets that arrive at the port count as received. Those of other ports are loops.
    pub receives: bool,
}

impl PortName {
    /// Returns the port as a table of a configuration.
    ///
    /// # Errors
    /// If there is no such driver.
    pub fn to_toml(&self, role: Role) -> Result<String, String> {
        let (driver, device) = match self.0.split_once(':') {
            Some((driver, device)) => (driver, device),
            None => ("auto", self.0.as_str()),
        };
        if drivers::find(driver).is_none() {
            let names: Vec<&str> = drivers::DRIVERS.iter().map(|driver| driver.name()).collect();
            return Err(format!("{self}: there is no driver \"{driver}\"; there are {}", names.join(", ")));
        }
        let quoted = |text: &str| toml_edit::Value::from(text).to_string();
        let name: String =
            self.0.chars().map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
        let mut text = format!("[[port]]\nname = {}\ndriver = {}\n", quoted(&name), quoted(driver));
        // The device of a capture file is one that is read. A sending port writes it.
        let is_written = driver == "pcap" && role.sends;
        if !device.is_empty() && !is_written {
            text += &format!("device = {}\n", quoted(device));
        }
        match driver {
            "pcap" if is_written => text += &format!("[port.pcap]\nwrite = {}\n", quoted(device)),
            // Whole superframes are no packets of a cable.
            "af_packet" => text += "[port.af_packet]\nsuperframes = \"cut\"\n",
            "auto" => text += "[port.auto.af_packet]\nsuperframes = \"cut\"\n",
            "tap" => text += "[port.tap]\nsuperframes = \"cut\"\n",
            _ => {}
        }
        Ok(text)
    }

    /// Reads the settings of ports, with their roles. `configured` are those of a configuration file.
    ///
    /// # Errors
    /// A name that is neither in the configuration nor that of a driver with a device, and wrong settings.
    pub fn settings(
        names: &[(Self, Role)],
        mut configured: Vec<PortSettings>,
    ) -> Result<Vec<(PortSettings, Role)>, Failure> {
        let mut all = Vec::new();
        for (name, role) in names {
            if let Some(at) = configured.iter().position(|port| port.name == name.0) {
                all.push((configured.swap_remove(at), *role));
                continue;
            }
            let text = name.to_toml(*role).map_err(Failure::usage)?;
            let source = Source::new("the command line", text.as_str());
            let document = source.parse()?;
            let ports = RuntimeConfig::ports_from_settings(&document.settings())
                .map_err(|error| Failure::usage(format!("{name}: {error}")))?;
            all.extend(ports.into_iter().map(|port| (port, *role)));
        }
        Ok(all)
    }
}

/// A started port with its queues.
pub(super) struct Started {
    pub(super) port: StartedPort,
    pub(super) role: Role,
    /// Capabilities before the start.
    pub(super) capabilities: Capabilities,
    pub(super) mtu: u16,
    /// Speed of the link in Mbit/s.
    pub(super) speed: Option<u32>,
    /// True if the port has receive timestamps and their clock can be read.
    pub(super) has_readable_clock: bool,
}

impl Started {
    /// Returns the name, and the driver with its mode.
    pub(super) fn describe(&self) -> (String, String) {
        let it = self.port.port.capabilities();
        let mode = if it.mode.is_empty() { String::new() } else { format!(" ({})", it.mode) };
        (self.port.port.name().to_owned(), format!("{}:{}{mode}, MTU {}", it.driver, it.device, self.mtu))
    }
}

/// Counts of a port from its start to a moment, or between two moments.
pub(super) struct PortCounts {
    /// Sum of the receive queues.
    pub(super) rx: QueueStats,
    /// Sum of the transmit queues.
    pub(super) tx: QueueStats,
    /// Packets that the device or the kernel dropped before the receive queues.
    pub(super) device_drops: Vec<(DropReason, u64)>,
}

impl PortCounts {
    /// Reads the counts from the start to now.
    pub(super) fn read(port: &mut Port) -> Self {
        let sum = |queues: Vec<QueueStats>| {
            queues.iter().fold(QueueStats::default(), |mut sum, queue| {
                sum.add(queue);
                sum
            })
        };
        Self { rx: sum(port.rx_statistics()), tx: sum(port.tx_statistics()), device_drops: port.device_drops() }
    }

    /// Returns the counts since an earlier moment.
    pub(super) fn since(self, before: &Self) -> Self {
        Self {
            rx: queue_since(self.rx, &before.rx),
            tx: queue_since(self.tx, &before.tx),
            device_drops: drops_since(self.device_drops, &before.device_drops),
        }
    }
}

fn queue_since(now: QueueStats, before: &QueueStats) -> QueueStats {
    QueueStats {
        // Packets that a port finds unsent do not count any more.
        packets: now.packets.saturating_sub(before.packets),
        bytes: now.bytes.saturating_sub(before.bytes),
        injected_copies: now.injected_copies - before.injected_copies,
        drops: drops_since(now.drops, &before.drops),
        ..now
    }
}

fn drops_since(now: Vec<(DropReason, u64)>, before: &[(DropReason, u64)]) -> Vec<(DropReason, u64)> {
    let was = |reason: DropReason| before.iter().find(|(other, _)| *other == reason).map_or(0, |(_, n)| *n);
    let new = now.into_iter().map(|(reason, n)| (reason, n.saturating_sub(was(reason))));
    new.filter(|(_, n)| *n > 0).collect()
}

/// Opens and starts ports, and waits for their links. `senders` is the number of threads that send.
pub(super) fn open(ports: Vec<(PortSettings, Role)>, senders: u16) -> Result<(Vec<Started>, Pool), Failure> {
    let mut opened = Vec::new();
    let mut buffers = SPARE_BUFFERS;
    for (settings, role) in ports {
        let name = settings.name.clone();
        let queues = settings.queues.max(if role.sends { senders } else { 1 });
        let config = (settings.depth, settings.mtu, settings.promiscuous, queues);
        let refused = |error: wirepath_pmd::port::PortError| Failure::usage(format!("port {name}: {error}"));
        let port = OpenPort::open(name.clone(), settings.plan).map_err(refused)?;
        let depth = config.0.min(port.capabilities().max_depth);
        buffers = buffers.saturating_add(depth.saturating_mul(2).saturating_mul(queues.into()));
        opened.push((port, role, config, depth, name));
    }
    let pool = Pool::new("pktgen", buffers.min(MAX_BUFFERS))?;
    let mut started: Vec<Started> = Vec::new();
    for ((port, role, (_, mtu, promiscuous, queues), depth, name), id) in opened.into_iter().zip(0..) {
        let capabilities = port.capabilities();
        let (mtu, _) = choose_mtu(mtu, &capabilities, depth * u32::from(queues), pool.capacity());
        let config = PortConfig {
            rx_queues: queues,
            tx_queues: queues,
            depth,
            mtu,
            promiscuous,
            ..PortConfig::new(PortId::new(id), pool.clone())
        };
        let refused = |error| Failure::usage(format!("port {name}: {error}"));
        let mut port = port.configure(config).map_err(refused)?.start()?;
        let has_readable_clock =
            capabilities.offloads.contains(Offloads::RX_TIMESTAMP) && port.port.read_clock().is_some();
        started.push(Started { port, role, capabilities, mtu, speed: None, has_readable_clock });
    }
    let end = Instant::now() + LINK_TIMEOUT;
    for Started { port, speed, capabilities, .. } in &mut started {
        // The sockets of the kernel report no speed; its devices do. That of a virtual device means nothing.
        let nominal = Some(&capabilities.device)
            .filter(|_| matches!(capabilities.driver, "af_xdp" | "af_packet"))
            .and_then(|device| DeviceInfo::read(device))
            .filter(|info| info.pci.is_some())
            .and_then(|info| info.speed);
        loop {
            let link = port.port.link();
            *speed = link.speed.or(nominal);
            if link.state == LinkState::Up {
                break;
            }
            if Instant::now() > end {
                let seconds = LINK_TIMEOUT.as_secs();
                return Err(Failure::failed(format!(
                    "port {}: its link is down; it did not come up within {seconds} s",
                    port.port.name()
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    Ok((started, pool))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_tables_of_a_configuration() {
        let toml = |name: &str, sends| {
            PortName::from_str(name).unwrap().to_toml(Role { sends, receives: true }).unwrap_or_else(|error| error)
        };
        // The driver that is chosen may be af_packet.
        let cut = "[port.auto.af_packet]\nsuperframes = \"cut\"\n";
        let auto = format!("[[port]]\nname = \"eth1\"\ndriver = \"auto\"\ndevice = \"eth1\"\n{cut}");
        assert_eq!(toml("eth1", true), auto);
        assert!(toml("pcap:/a b", true).ends_with("driver = \"pcap\"\n[port.pcap]\nwrite = \"/a b\"\n"));
        assert!(toml("pcap:/a b", false).ends_with("device = \"/a b\"\n"));
        assert!(toml("null:", true).ends_with("driver = \"null\"\n"));
        assert!(toml("nul:x", true).contains("no driver \"nul\"; there are auto,"));
        assert!(toml("memory:a\"b", true).contains("device = 'a\"b'"));
        let name = |name: &str| [(PortName::from_str(name).unwrap(), Role::default())];
        let settings = PortName::settings(&name("memory:pktgen-names"), Vec::new()).unwrap();
        assert_eq!(settings[0].0.name, "memory_pktgen-names");
        assert!(PortName::settings(&name("memory:"), Vec::new()).unwrap_err().to_string().contains("device: missing"));
    }
}
