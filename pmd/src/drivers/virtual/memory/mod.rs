//! `memory`: a cable inside the process. The packets that one port transmits are received by the other
//! without a copy.
//!
//! ```toml
//! [[port]]
//! name = "left"
//! driver = "memory"
//! device = "demo"      # the first two ports with this name are joined
//! ```
//!
//! Programs create a pair with [`cable`], or use one end themselves with [`Endpoint`].
//!
//! - Transmit queue *i* feeds receive queue *i* modulo the number of queues of the other side, so that
//!   packets of one queue stay in order.
//! - Each transmit queue has a ring for as many packets as the receiving port's `depth`. When it is full, the
//!   remaining packets stay with the sender.
//! - While the other side is not started, the link is down and sent packets are dropped as `link_down`.
//! - Requested offloads (checksums, VLAN tag) are applied in software. Other metadata is not passed on.

mod cable;
mod endpoint;
mod queues;
mod spsc_ring;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use cable::{Cable, CableEnd, Lane, Lanes};
pub use endpoint::Endpoint;
use queues::{Receiver, Sender};

use crate::drivers::{Candidate, Driver};
use crate::port::{
    Capabilities, Device, DeviceLink, Link, MacAddr, Offloads, PortConfig, PortError, PortEvent, PortSpec, Queues,
};
use wirepath_settings::{ConfigError, ConfigTable, Settings};

static TABLE: ConfigTable = ConfigTable {
    name: "memory",
    about: "Settings of driver = \"memory\". There are none.",
    absent: "the table has no keys",
    example: "[port.memory]\n",
    ..ConfigTable::EMPTY
};

/// The driver.
#[derive(Debug)]
pub struct Memory;

/// Options of a cable that a program creates.
#[derive(Clone, Debug)]
pub struct Options {
    /// Name in messages. Such cables are joined by [`cable`], not by name.
    pub name: String,
}

impl Default for Options {
    fn default() -> Self {
        Self { name: "cable".to_owned() }
    }
}

/// Creates a cable and returns the specifications of the ports at its two ends.
pub fn cable(options: Options) -> (Box<dyn PortSpec>, Box<dyn PortSpec>) {
    let cable = Cable::new(&options.name);
    (Box::new(CableSpec::Shared(Arc::clone(&cable))), Box::new(CableSpec::Shared(cable)))
}

impl Driver for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn about(&self) -> &'static str {
        "cable inside the process: joins the two ports that have the same device name"
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        match device {
            Some(name) if !name.is_empty() => Ok(Box::new(CableSpec::Named(name.to_owned()))),
            _ => Err(settings.error("device: missing, expected a name that two memory ports have in common")),
        }
    }

    fn candidates(&self) -> Vec<Candidate> {
        vec![Candidate {
            device: "any name".to_owned(),
            usable: Ok("cable between two ports of one program".to_owned()),
        }]
    }
}

#[derive(Debug)]
enum CableSpec {
    Named(String),
    Shared(Arc<Cable>),
}

impl PortSpec for CableSpec {
    fn driver(&self) -> &'static str {
        "memory"
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Box::new(self.claim()?))
    }
}

impl CableSpec {
    fn claim(self) -> Result<MemoryDevice, PortError> {
        let cable = match self {
            Self::Named(name) => Cable::named(&name),
            Self::Shared(cable) => cable,
        };
        let name = cable.name.clone();
        match cable.claim_end() {
            Some(end) => Ok(MemoryDevice { end: Arc::new(end), started: false, reported: Link::DOWN, lost: false }),
            None => Err(PortError::Refused {
                driver: "memory",
                reason: "both ends of this cable are in use; give this port and its peer another device name"
                    .to_owned(),
                device: name,
            }),
        }
    }
}

struct MemoryDevice {
    end: Arc<CableEnd>,
    started: bool,
    reported: Link,
    lost: bool,
}

impl MemoryDevice {
    fn name(&self) -> &str {
        &self.end.cable.name
    }

    fn start_queues(&mut self, config: &PortConfig) -> Result<(Vec<Receiver>, Vec<Sender>), PortError> {
        if self.end.cable.is_cut() {
            return Err(PortError::Refused {
                driver: "memory",
                device: self.name().to_owned(),
                reason: "the cable was cut".to_owned(),
            });
        }
        let lanes: Result<Arc<Lanes>, _> = (0..config.rx_queues).map(|_| Lane::new(config.depth)).collect();
        let lanes = lanes.map_err(|error| PortError::System {
            driver: "memory",
            device: self.name().to_owned(),
            what: "eventfd".to_owned(),
            source: error.into(),
            hint: "; raise the limit of open files (ulimit -n)".to_owned(),
        })?;
        let rx = (0..config.rx_queues).map(|i| Receiver::new(Arc::clone(&lanes), i, config)).collect();
        let tx = (0..config.tx_queues).map(|i| Sender::new(Arc::clone(&self.end), i, config)).collect();
        self.end.open(lanes);
        self.started = true;
        self.reported = self.link();
        Ok((rx, tx))
    }

    fn stop_queues(&mut self) {
        self.end.close();
        self.started = false;
    }
}

impl Device for MemoryDevice {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            mode: "in-process cable, packets change hands without a copy".to_owned(),
            mac: Some(mac_of(self.name(), self.end.side)),
            max_rx_queues: 256,
            max_tx_queues: 256,
            offloads: Offloads::RX_CHAINS.with(Offloads::TX_CHAINS),
            max_tx_segments: u16::MAX,
            can_wait: true,
            ..Capabilities::plain("memory", self.name())
        }
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let (rx, tx) = self.start_queues(config)?;
        Ok(Queues {
            rx: rx.into_iter().map(|queue| Box::new(queue) as _).collect(),
            tx: tx.into_iter().map(|queue| Box::new(queue) as _).collect(),
        })
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        // The order matters: senders first learn that nobody receives; then the packets that they sent are
        // freed.
        self.stop_queues();
        drop(queues);
        Ok(())
    }
}

impl DeviceLink for MemoryDevice {
    fn link(&mut self) -> Link {
        if self.end.link_is_up() { Link::UP } else { Link::DOWN }
    }

    fn events(&mut self) -> Vec<PortEvent> {
        let mut events = Vec::new();
        let link = self.link();
        if self.started && link != self.reported {
            self.reported = link;
            events.push(PortEvent::Link(link));
        }
        if !self.lost && self.end.cable.is_cut() {
            self.lost = true;
            events.push(PortEvent::Lost(format!("memory cable '{}' was cut", self.name())));
        }
        events
    }
}

impl Drop for MemoryDevice {
    fn drop(&mut self) {
        // Transmit queues that were not returned keep the end alive. The link still goes down.
        self.stop_queues();
    }
}

/// Returns a locally administered address that is the same at every start.
fn mac_of(name: &str, side: usize) -> MacAddr {
    // FNV-1a.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    let [a, b, c, d, ..] = hash.to_be_bytes();
    MacAddr::new(0x02, a, b, c, d, side as u8 + 1)
}
