//! Ports under test, and the exchange of frames between them.

use std::time::{Duration, Instant};

use wirepath_packet::offload::{ChecksumStatus, Flags};
use wirepath_packet::{Batch, Packet, Pool, PortId};
use wirepath_pmd::drivers;
use wirepath_pmd::port::{Capabilities, LinkState, MacAddr, OpenPort, PortConfig, PortEvent, StartedPort};
use wirepath_settings::Source;

use super::frames::SOURCE;
use wirepath::cli::Failure;
use wirepath::rules::engine::frame_bytes;

/// Buffers of the pool: rings, caches and the frames of one exchange.
const BUFFERS: u32 = 16 << 10;
/// Entries of each ring.
const DEPTH: u32 = 512;
/// Time after the last received frame at which missing frames count as lost.
const LOSS_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after the expected frames in which no further frame may arrive.
const QUIET_TIME: Duration = Duration::from_millis(20);
/// The same for tests that repeat the same frames many times.
const SHORT_QUIET_TIME: Duration = Duration::from_millis(1);
/// Longest wait for a link.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest MTU that is tested without a request.
const MAX_MTU: u16 = 9000;
/// Frames in flight, below the depth of the rings.
const WINDOW: usize = 64;

/// A port in the command line: `DEVICE` or `DRIVER:DEVICE`.
#[derive(Clone, Debug)]
pub(super) struct PortName {
    pub(super) driver: String,
    pub(super) device: String,
}

impl std::str::FromStr for PortName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (driver, device) = text.split_once(':').unwrap_or(("auto", text));
        if device.is_empty() {
            return Err("expected a device such as eth1, or a driver and a device such as mlx5:eth1".to_owned());
        }
        if drivers::find(driver).is_none() {
            return Err(format!("there is no driver \"{driver}\"; `wirepath devices` lists them"));
        }
        Ok(Self { driver: driver.to_owned(), device: device.to_owned() })
    }
}

/// The ports to test and how to open them.
#[derive(Clone, Debug)]
pub(super) struct Wiring {
    /// The port under test, and the port at the other end of its cable if there is one.
    pub(super) ports: Vec<PortName>,
    /// Keys of the driver's own table.
    pub(super) settings: Vec<String>,
    /// Requested MTU; `None`: that of the interface, or as large as the device allows, at most 9000.
    pub(super) mtu: Option<u16>,
}

/// Started ports. Frames that the first port sends arrive at the last one, and the other way round.
pub(super) struct Bench {
    ports: Vec<StartedPort>,
    pub(super) pool: Pool,
    pub(super) mtu: u16,
    quiet_time: Duration,
}

/// A received test frame.
#[derive(Debug)]
pub(super) struct Received {
    /// Bytes, with a stripped VLAN tag inserted again.
    pub(super) bytes: Vec<u8>,
    /// True if the device stripped a tag.
    pub(super) stripped_tag: bool,
    pub(super) queue: usize,
    pub(super) hash: Option<u32>,
    pub(super) mark: Option<u32>,
    pub(super) status: ChecksumStatus,
}

impl Wiring {
    /// Opens and starts the ports. `mode` has further keys of the driver's table.
    pub(super) fn start(&self, mode: &str, rx_queues: u16) -> Result<Bench, Failure> {
        let pool = Pool::new("selftest", BUFFERS)?;
        let mut opened = Vec::new();
        for (i, name) in self.ports.iter().enumerate() {
            // Settings belong to the port under test. The other one receives what a cable carries: no superframes.
            let keys = match name.driver.as_str() {
                _ if i == 0 => self.settings.join("\n") + "\n" + mode,
                "af_packet" | "tap" => "superframes = 'cut'".to_owned(),
                _ => String::new(),
            };
            // The quotes of a TOML string protect any device name.
            let device = toml_string(&name.device);
            let text = format!(
                "[[port]]\nname = 'p{i}'\ndriver = '{driver}'\ndevice = {device}\n[port.{driver}]\n{keys}\n",
                driver = name.driver
            );
            let source = Source::new("the command line", text.as_str());
            let document = source.parse()?;
            let settings =
                document.settings().tables("port")?.into_iter().map(drivers::plan).collect::<Result<Vec<_>, _>>()?;
            for settings in settings {
                opened.push(OpenPort::open(name.device.clone(), settings.plan)?);
            }
        }
        let largest = opened.iter().map(|port| port.capabilities().max_mtu).min().unwrap_or(1500);
        let interfaces = opened.iter().filter_map(|port| port.capabilities().mtu).min();
        let interfaces = interfaces.map_or(MAX_MTU, |mtu| u16::try_from(mtu).unwrap_or(MAX_MTU).min(MAX_MTU));
        let mtu = self.mtu.unwrap_or(largest.min(interfaces));
        let mut ports = Vec::new();
        for (i, port) in opened.into_iter().enumerate() {
            let limits = port.capabilities();
            let config = PortConfig {
                mtu,
                depth: DEPTH.min(limits.max_depth),
                rx_queues: rx_queues.min(limits.max_rx_queues),
                ..PortConfig::new(PortId::new(i as u16), pool.clone())
            };
            ports.push(port.configure(config).and_then(|port| port.start())?);
        }
        Ok(Bench { ports, pool, mtu, quiet_time: QUIET_TIME })
    }
}

fn toml_string(text: &str) -> String {
    let escaped: String = text
        .chars()
        .flat_map(|c| match c {
            '"' | '\\' => vec!['\\', c],
            c => vec![c],
        })
        .collect();
    format!("\"{escaped}\"")
}

impl Bench {
    /// Capabilities of the port under test.
    pub(super) fn capabilities(&self) -> Capabilities {
        self.ports[0].port.capabilities()
    }

    /// Shortens the time in which no further frame may arrive.
    pub(super) fn shorten_quiet_time(&mut self) {
        self.quiet_time = SHORT_QUIET_TIME;
    }

    /// The port under test.
    pub(super) fn port(&mut self) -> &mut StartedPort {
        &mut self.ports[0]
    }

    /// Directions: index of the sending port and text for messages.
    pub(super) fn directions(&self) -> Vec<(usize, &'static str)> {
        if self.ports.len() == 1 { vec![(0, "")] } else { vec![(0, "to the peer: "), (1, "from the peer: ")] }
    }

    fn receiver(&self, from: usize) -> usize {
        self.ports.len() - 1 - from
    }

    /// Link-layer address of the port that receives what port `from` sends.
    pub(super) fn address_of_receiver(&self, from: usize) -> MacAddr {
        let to = self.ports[self.receiver(from)].port.capabilities().mac;
        to.unwrap_or(MacAddr([0x02, 0x57, 0x50, 0x54, 0x53, 0x01]))
    }

    /// Waits until all links are up. Returns the names of the ports whose link stays down.
    pub(super) fn links_down(&mut self) -> Vec<String> {
        let start = Instant::now();
        loop {
            let down: Vec<String> = self
                .ports
                .iter_mut()
                .filter_map(|port| {
                    let name = port.port.name().to_owned();
                    (port.port.link().state == LinkState::Down).then_some(name)
                })
                .collect();
            if down.is_empty() || start.elapsed() > LINK_TIMEOUT {
                return down;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the port under test sees its link go down. Returns false if it does not.
    pub(super) fn wait_for_link_down(&mut self) -> bool {
        let start = Instant::now();
        while start.elapsed() < LINK_TIMEOUT {
            if self.ports[0].port.link().state == LinkState::Down {
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }

    /// Copies a frame into a packet.
    pub(super) fn packet(&self, frame: &[u8]) -> Result<Packet, String> {
        let packet =
            self.pool.take().and_then(|mut packet| packet.extend_from_slice(frame, &self.pool).then_some(packet));
        packet.ok_or_else(|| "no free buffers: an earlier test did not get its packets back".to_owned())
    }

    /// Sends frames without offload requests from port `from`; see [`Self::exchange`].
    pub(super) fn exchange_frames(
        &mut self,
        from: usize,
        frames: &[Vec<u8>],
        expected: usize,
    ) -> Result<Vec<Received>, String> {
        let packets = frames.iter().map(|frame| self.packet(frame)).collect::<Result<_, _>>()?;
        self.exchange(from, packets, expected)
    }

    /// Sends packets from port `from` and returns the test frames that arrive at the other end, in order for each
    /// queue. Waits until `expected` frames have arrived, and a moment longer for frames that should not arrive.
    ///
    /// # Errors
    /// A port is lost, or does not accept packets.
    pub(super) fn exchange(
        &mut self,
        from: usize,
        packets: Vec<Packet>,
        expected: usize,
    ) -> Result<Vec<Received>, String> {
        let to = self.receiver(from);
        // Frames of an earlier exchange that arrive late belong to nobody.
        self.collect(to, &mut Vec::new());
        let mut waiting = packets.into_iter();
        let mut batch = Batch::new();
        let mut received = Vec::new();
        let (mut sent, mut lost, mut progress) = (0usize, 0, Instant::now());
        loop {
            while batch.len() < WINDOW / 2
                && (sent + batch.len()).saturating_sub(received.len() + lost) < WINDOW
                && let Some(packet) = waiting.next()
            {
                drop(batch.push(packet));
            }
            let taken = self.ports[from].tx[0].transmit(&mut batch);
            self.ports[from].tx[0].reclaim();
            sent += taken;
            let before = received.len();
            self.collect(to, &mut received);
            let idle = taken == 0 && received.len() == before;
            if !idle {
                progress = Instant::now();
            } else if batch.is_empty() && waiting.len() == 0 {
                let wait = if received.len() >= expected { self.quiet_time } else { LOSS_TIMEOUT };
                if progress.elapsed() > wait {
                    break;
                }
            } else if progress.elapsed() > LOSS_TIMEOUT {
                if !batch.is_empty() {
                    return Err(format!("the port accepts no packets: {} wait", batch.len()));
                }
                lost = sent.saturating_sub(received.len());
                progress = Instant::now();
            }
            self.check_events()?;
            if idle {
                std::thread::yield_now();
            }
        }
        batch.clear();
        Ok(received)
    }

    /// Appends the test frames that have arrived at port `to`.
    fn collect(&mut self, to: usize, received: &mut Vec<Received>) {
        for (queue, rx) in self.ports[to].rx.iter_mut().enumerate() {
            let mut batch = Batch::new();
            rx.receive(&mut batch);
            batch.drain_front(usize::MAX, |packet| {
                let bytes = frame_bytes(&packet);
                // A rule under test may change the last byte.
                if bytes.get(6..11) == Some(&SOURCE.0[..5]) {
                    received.push(Received {
                        bytes,
                        stripped_tag: packet.vlan().is_some(),
                        queue,
                        hash: packet.rss_hash(),
                        mark: packet.mark(),
                        status: packet.checksum_status(),
                    });
                }
            });
        }
    }

    fn check_events(&mut self) -> Result<(), String> {
        for port in &mut self.ports {
            for event in port.port.events() {
                if let PortEvent::Lost(why) = event {
                    return Err(format!("{} is lost: {why}", port.port.name()));
                }
            }
        }
        Ok(())
    }

    /// Counters that explain a failure: drops by reason, and the device's statistics that are not 0.
    pub(super) fn diagnosis(&mut self) -> String {
        let mut text = Vec::new();
        for port in &mut self.ports {
            let queues = port.port.rx_statistics().into_iter().chain(port.port.tx_statistics());
            for (reason, n) in queues.flat_map(|queue| queue.drops) {
                text.push(format!("{} dropped {n} ({})", port.port.name(), reason.name()));
            }
            for (name, n) in port.port.extra_statistics().into_iter().filter(|(_, n)| *n > 0) {
                text.push(format!("{} {name} {n}", port.port.name()));
            }
        }
        text.join(", ")
    }

    /// Stops the ports and returns the number of buffers that did not come back.
    pub(super) fn stop(self) -> Result<u32, Failure> {
        for StartedPort { port, rx, tx } in self.ports {
            port.stop(rx, tx)?;
        }
        Ok(self.pool.outstanding())
    }
}

/// Sets the metadata that egress rules match.
pub(super) fn with_metadata(mut packet: Packet, data: u32) -> Packet {
    let flags = packet.flags();
    packet.set_flags(flags.with(Flags::TX_METADATA));
    packet.set_mark(data);
    // The software engine compares the application's data.
    packet.set_app([data.into(), 0]);
    packet
}
