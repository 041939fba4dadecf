//! Emulated NICs in a separate process, and the tests that every NIC driver must pass: corrupted completions,
//! device resets, stalled and indestructible queues, failing commands and all doorbell modes.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_nic_emulator::faults::COMMANDS;
use wirepath_nic_emulator::launch;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{Batch, Packet, Pool, PtypeL3, PtypeL4};
use wirepath_pmd::port::{Link, LinkState, OpenPort, PortConfig, PortError, PortEvent, PortSpec, StartedPort};

use crate::common::{self, bytes};

/// Maximum time for an event that must happen. It only ends a hopeless wait.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// Environment variable of the process with the NICs: folder of their log and control socket.
const FOLDER: &str = "WIREPATH_NIC_TEST";

/// A driver and the emulated device on which it is tested.
#[derive(Clone, Copy)]
pub(crate) struct EmulatedNic {
    /// Name of the driver.
    pub(crate) driver: &'static str,
    /// Name of the device. Its port is connected to itself.
    pub(crate) device: &'static str,
    /// Settings of the driver to test in turn.
    pub(crate) modes: &'static [&'static str],
}

/// The emulated NICs of this process.
pub(crate) struct Nics {
    pub(crate) folder: PathBuf,
}

impl Nics {
    /// Sends a request to the control socket.
    pub(crate) fn request(&self, request: &str) -> String {
        let mut socket = UnixStream::connect(self.folder.join("control")).expect("the control socket");
        writeln!(socket, "{request}").expect("a request");
        socket.shutdown(Shutdown::Write).expect("the end of the request");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// Injects a fault.
    pub(crate) fn inject(&self, fault: &str) {
        assert_eq!(self.request(fault).trim(), "injected");
    }

    /// Returns a counter of each send queue of the first device.
    pub(crate) fn sent(&self, name: &str) -> Vec<u64> {
        let all: serde_json::Value = serde_json::from_str(&self.request("counters")).expect("counters");
        let queues = all["devices"][0]["send_queues"].as_array().expect("send queues");
        queues.iter().map(|queue| queue[name].as_u64().expect("a number")).collect()
    }

    /// Returns the number of injected faults that have not occurred yet.
    pub(crate) fn pending_faults(&self) -> u64 {
        let all: serde_json::Value = serde_json::from_str(&self.request("counters")).expect("counters");
        all["faults_waiting"].as_u64().expect("a number")
    }

    /// Returns the driver errors that the NICs logged, without injected faults.
    pub(crate) fn violations(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        log.lines().filter(|line| !line.contains("injected fault")).map(str::to_owned).collect()
    }
}

/// Runs `work` in a process with NICs. `rest` is the topology.
pub(crate) fn under(name: &str, rest: &str, work: impl FnOnce(&Nics)) {
    let folder = std::env::var_os(FOLDER).map_or_else(
        || tempfile::Builder::new().prefix("wirepath-nic-").tempdir().expect("a folder").keep(),
        PathBuf::from,
    );
    let topology = format!("log = '{0}/log'\ncontrol = '{0}/control'\n{rest}", folder.display());
    let folder_text = folder.display().to_string();
    launch::run_test_with_env(name, &topology, &[(FOLDER, &folder_text)], || work(&Nics { folder: folder.clone() }));
    let _ = std::fs::remove_dir_all(folder);
}

impl EmulatedNic {
    /// Returns the topology entry of the device.
    pub(crate) fn topology(&self) -> String {
        // The verbs driver has no device of its own.
        let kind = if self.driver == "verbs" { "mlx5" } else { self.driver };
        format!("[[device]]\nkind = '{kind}'\nname = '{}'\n[[device.port]]\nlink = 'loop'\n", self.device)
    }

    /// Returns the kernel commands that the driver or a library may issue.
    fn commands(&self) -> impl Iterator<Item = &'static str> {
        // If these fail while it opens a device, libmlx5 assumes a device without features, and later refuses to
        // post. The verbs driver has no alternative.
        let lost: &[&str] = if self.driver == "verbs" { &["query_device", "query_port"] } else { &[] };
        COMMANDS.iter().copied().filter(move |command| !lost.contains(command))
    }

    /// Returns the specification of a port on `device`.
    pub(crate) fn plan(&self, device: &str, settings: &str) -> Box<dyn PortSpec> {
        let driver = self.driver;
        let table = format!("driver = '{driver}'\ndevice = '{device}'\n[port.{driver}]\n{settings}\n");
        common::settings(&table).plan
    }

    /// Opens a port on `device`.
    pub(crate) fn open(&self, device: &str, settings: &str) -> OpenPort {
        OpenPort::open("dut", self.plan(device, settings)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts a port on `device`.
    pub(crate) fn start_on(
        &self,
        device: &str,
        pool: &Pool,
        settings: &str,
        change: impl FnOnce(&mut PortConfig),
    ) -> StartedPort {
        let mut config = PortConfig { mtu: 9000, depth: 256, ..PortConfig::new(PortId::new(3), pool.clone()) };
        change(&mut config);
        let open = self.open(device, settings);
        open.configure(config).and_then(|port| port.start()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts a port on the default device.
    pub(crate) fn start(&self, pool: &Pool, settings: &str, change: impl FnOnce(&mut PortConfig)) -> StartedPort {
        self.start_on(self.device, pool, settings, change)
    }

    /// Runs `work` in a process with the device. `keys` precede it in the topology.
    pub(crate) fn under(&self, name: &str, keys: &str, work: impl FnOnce(&Nics)) {
        under(name, &(keys.to_owned() + &self.topology()), work);
    }
}

/// Configures two receive and two transmit queues.
pub(crate) fn two_queues(config: &mut PortConfig) {
    (config.rx_queues, config.tx_queues) = (2, 2);
}

/// Returns a statistic of the device.
pub(crate) fn statistic(port: &mut StartedPort, name: &str) -> u64 {
    let figures = port.port.extra_statistics();
    figures.iter().find(|(found, _)| *found == name).unwrap_or_else(|| panic!("no {name} among {figures:?}")).1
}

/// Sends packets on queue 0 until all are taken.
pub(crate) fn send(port: &mut StartedPort, packets: impl IntoIterator<Item = Packet>) {
    let mut batch: Batch = packets.into_iter().collect();
    let start = Instant::now();
    while !batch.is_empty() {
        port.tx[0].transmit(&mut batch);
        assert!(start.elapsed() < TIMEOUT, "the port takes nothing");
    }
}

/// Receives until `count` packets have arrived.
pub(crate) fn receive(port: &mut StartedPort, count: usize) -> Vec<Packet> {
    let mut all = Vec::new();
    let start = Instant::now();
    while all.len() < count {
        for queue in &mut port.rx {
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            batch.drain_front(usize::MAX, |packet| all.push(packet));
        }
        assert!(start.elapsed() < TIMEOUT, "{} of {count} received", all.len());
    }
    all
}

/// Returns a UDP or TCP packet over IPv4 or IPv6 with requested checksums, prepared as applications do.
pub(crate) fn packet(pool: &Pool, l3: PtypeL3, l4: PtypeL4, payload: usize) -> Packet {
    let (header, protocol) = if l4 == PtypeL4::Tcp { (20, 6u8) } else { (8, 17) };
    let mut frame = vec![2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9];
    let length = (header + payload) as u16;
    let pseudo = match l3 {
        PtypeL3::Ipv6 => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend(length.to_be_bytes());
            frame.extend([protocol, 64]);
            frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
            frame.extend([0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
            sum(&frame[22..54])
        }
        _ => {
            frame.extend([0x08, 0, 0x45, 0]);
            frame.extend((20 + length).to_be_bytes());
            frame.extend([0, 7, 0x40, 0, 64, protocol, 0xde, 0xad, 198, 18, 0, 1, 198, 18, 0, 2]);
            sum(&frame[26..34])
        }
    };
    let l3_len = frame.len() - 14;
    let partial = fold(pseudo + u32::from(protocol) + u32::from(length));
    frame.extend([0x30, 0x39, 0, 9]);
    if l4 == PtypeL4::Tcp {
        frame.extend([0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x18, 0x20, 0]);
        frame.extend(partial.to_be_bytes());
        frame.extend([0, 0]);
    } else {
        frame.extend(length.to_be_bytes());
        frame.extend(partial.to_be_bytes());
    }
    frame.extend((0..payload).map(|i| (i * 7) as u8));
    let mut packet = pool.take().expect("a buffer");
    assert!(packet.extend_from_slice(&frame, pool));
    let mut layers = packet.header_lengths();
    (layers.l2_len, layers.l3_len, layers.l4_len) = (14, l3_len as u8, header as u8);
    packet.set_header_lengths(layers.with_types(l3, l4, PtypeL3::Other));
    packet.set_flags(Flags::TX_L3_CHECKSUM.with(Flags::TX_L4_CHECKSUM));
    packet
}

pub(crate) fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum()
}

pub(crate) fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// Returns whether the checksums of a frame are valid, with an independent computation.
pub(crate) fn has_valid_checksums(frame: &[u8]) -> bool {
    let (l4, pseudo) = match frame[12..14] {
        [0x86, 0xdd] => (54, sum(&frame[22..54]) + u32::from(frame[20])),
        _ if fold(sum(&frame[14..34])) != 0xffff => return false,
        _ => (34, sum(&frame[26..34]) + u32::from(frame[23])),
    };
    fold(pseudo + (frame.len() - l4) as u32 + sum(&frame[l4..])) == 0xffff
}

/// A packet that was sent with requested checksums.
pub(crate) struct ChecksumCase {
    pub(crate) l3: PtypeL3,
    pub(crate) l4: PtypeL4,
    /// Bytes of the sent packet.
    pub(crate) len: usize,
    /// Requested VLAN tag.
    pub(crate) tag: Option<u16>,
}

/// Sends TCP and UDP packets of several lengths over IPv4 and IPv6, with requested checksums and some with a VLAN tag.
/// Passes each case and the received packet to `check`.
pub(crate) fn checksum_cases(port: &mut StartedPort, pool: &Pool, check: impl Fn(&ChecksumCase, &Packet)) {
    for l3 in [PtypeL3::Ipv4, PtypeL3::Ipv6] {
        for l4 in [PtypeL4::Tcp, PtypeL4::Udp] {
            for (payload, tag) in [(100, None), (1, None), (8000, None), (1400, Some(0xb123))] {
                let mut sent = packet(pool, l3, l4, payload);
                if let Some(tag) = tag {
                    sent.set_vlan(tag);
                }
                let len = sent.len();
                send(port, [sent]);
                check(&ChecksumCase { l3, l4, len, tag }, &receive(port, 1)[0]);
            }
        }
    }
}

/// Stops a port; every buffer must come back.
pub(crate) fn finish(port: StartedPort, pool: &Pool) {
    let StartedPort { port, rx, tx } = port;
    drop(port.stop(rx, tx).expect("the port stops"));
    assert_eq!(pool.outstanding(), 0, "buffers that did not come back");
}

/// Sends until a packet returns, and polls the port's events like a control thread. Returns the events.
pub(crate) fn send_until_received(port: &mut StartedPort, pool: &Pool) -> Vec<PortEvent> {
    let (start, mut events) = (Instant::now(), Vec::new());
    loop {
        assert!(start.elapsed() < TIMEOUT, "nothing flows: {events:?}, {:?}", port.port.rx_statistics());
        events.extend(port.port.events());
        let mut batch = Batch::new();
        drop(batch.push(packet(pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)));
        port.tx.iter_mut().for_each(|queue| queue.reclaim());
        port.tx[0].transmit(&mut batch);
        batch.clear();
        let mut came = 0;
        for queue in &mut port.rx {
            came += queue.receive(&mut batch);
            batch.clear();
        }
        if came > 0 {
            return events;
        }
    }
}

/// Injects corrupted completions. Each must cost one queue reset and nothing else.
pub(crate) fn corrupt_completions(kind: EmulatedNic, name: &str, corruptions: &[(&str, &str)]) {
    kind.under(name, "", |nics| {
        for ((queue, what), mode) in corruptions.iter().zip(kind.modes.iter().cycle()) {
            let pool = Pool::new("hostile", 4096).expect("memory");
            let mut port = kind.start(&pool, mode, two_queues);
            // The first packets show the position of the completions to the emulator.
            for _ in 0..10 {
                send_until_received(&mut port, &pool);
            }
            assert_eq!(statistic(&mut port, "queue_resets"), 0, "{queue} {what}");
            nics.inject(&format!("kind = 'hostile'\nqueue = '{queue}'\nwhat = '{what}'"));
            let start = Instant::now();
            while statistic(&mut port, "queue_resets") == 0 {
                assert!(start.elapsed() < TIMEOUT, "{queue} {what} was not seen");
                send_until_received(&mut port, &pool);
            }
            for _ in 0..20 {
                send_until_received(&mut port, &pool);
            }
            let drops: u64 = port.rx.iter().map(|queue| queue.counters().drops.get(DropReason::BadDescriptor)).sum();
            assert_eq!(drops, u64::from(*queue == "rx"), "{queue} {what}");
            finish(port, &pool);
        }
    });
}

/// Corrupts every completion of a received packet: the port fails and names the queue. All buffers come back.
pub(crate) fn futile_resets(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("futile", 4096).expect("memory");
        let mut port = kind.start(&pool, "", |_| ());
        send_until_received(&mut port, &pool);
        nics.inject("kind = 'hostile'\nqueue = 'rx'\nwhat = 'length'\ncount = 1000000000");
        let (start, mut events, mut received) = (Instant::now(), Vec::new(), 0);
        while !events.iter().any(|event| matches!(event, PortEvent::Lost(_))) {
            assert!(start.elapsed() < TIMEOUT, "{} resets, {events:?}", statistic(&mut port, "queue_resets"));
            let mut batch: Batch = [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)].into_iter().collect();
            port.tx[0].reclaim();
            port.tx[0].transmit(&mut batch);
            batch.clear();
            received += port.rx[0].receive(&mut batch);
            events.extend(port.port.events());
        }
        assert_eq!(received, 0);
        let [PortEvent::Link(Link::DOWN), PortEvent::Lost(why)] = &events[..] else { panic!("{events:?}") };
        let queue = format!("{} port {}: receive queue 0 was reset ", kind.driver, kind.device);
        assert!(why.starts_with(&queue) && why.ends_with("a received packet of an invalid length"), "{why}");
        assert!(statistic(&mut port, "queue_resets") >= 16);
        // Workers continue to poll. What they send is counted as lost.
        let lost = |port: &StartedPort| port.tx[0].counters().drops.get(DropReason::DeviceLost);
        while lost(&port) == 0 {
            assert!(start.elapsed() < TIMEOUT, "{:?}", port.port.tx_statistics());
            let mut batch: Batch = [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)].into_iter().collect();
            port.tx[0].transmit(&mut batch);
            batch.clear();
            assert_eq!(port.rx[0].receive(&mut batch), 0);
            assert_eq!(port.port.events(), []);
        }
        finish(port, &pool);
    });
}

/// Resets the device, which must recover by itself.
pub(crate) fn reset_device(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("fatal", 4096).expect("memory");
        let mut port = kind.start(&pool, "", two_queues);
        for round in 1..=3 {
            send_until_received(&mut port, &pool);
            nics.inject("kind = 'device-fatal'");
            let (start, mut events) = (Instant::now(), Vec::new());
            while !events.iter().any(|event| matches!(event, PortEvent::Link(_))) {
                assert!(start.elapsed() < TIMEOUT, "round {round}: {events:?}");
                // Workers continue to poll.
                let mut batch: Batch = [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)].into_iter().collect();
                for queue in &mut port.tx {
                    queue.transmit(&mut batch);
                    queue.reclaim();
                }
                batch.clear();
                for queue in &mut port.rx {
                    queue.receive(&mut batch);
                }
                events.extend(port.port.events());
            }
            let [PortEvent::Lost(why), PortEvent::Returned, PortEvent::Link(Link { state: LinkState::Up, .. })] =
                &events[..]
            else {
                panic!("{events:?}")
            };
            assert!(why.contains(kind.device) && why.ends_with("reported a fatal error"), "{why}");
            send_until_received(&mut port, &pool);
            assert_eq!(statistic(&mut port, "device_resets"), round);
        }
        assert_eq!(statistic(&mut port, "buried_packets"), 0, "a device that was reset has let go of everything");
        finish(port, &pool);
    });
}

/// Suppresses a completion: the transmit queue is recreated although nothing else happens. A sleeping worker
/// alone is no reason for that.
pub(crate) fn stalled_queue(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("stalled", 4096).expect("memory");
        let mut port = kind.start(&pool, "tx_timeout = 1", |_| ());
        send_until_received(&mut port, &pool);
        send(&mut port, [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)]);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(1300) {
            drop(port.port.events());
            std::thread::sleep(Duration::from_millis(20));
        }
        port.tx[0].reclaim();
        drop(port.port.events());
        assert_eq!(statistic(&mut port, "queue_resets"), 0, "an unpolled completion is no stall");
        nics.inject("kind = 'hostile'\nqueue = 'tx'\nwhat = 'nothing'");
        send(&mut port, (0..5).map(|_| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)));
        let start = Instant::now();
        while statistic(&mut port, "queue_stalls") == 0 {
            assert!(start.elapsed() < TIMEOUT, "the stall was not detected");
            drop(port.port.events());
            port.tx[0].reclaim();
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(statistic(&mut port, "queue_resets"), 1);
        assert_eq!(port.tx[0].counters().drops.get(DropReason::TxError), 5);
        send_until_received(&mut port, &pool);
        finish(port, &pool);
    });
}

/// Suppresses all completions of a transmit queue. A new queue does not help, so the device counts as lost after two
/// stalls, that is after two times `tx_timeout`, and is opened again.
pub(crate) fn stalled_device(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("stalled", 4096).expect("memory");
        let mut port = kind.start(&pool, "tx_timeout = 1", |_| ());
        send_until_received(&mut port, &pool);
        port.tx[0].reclaim();
        let before = port.port.tx_statistics().remove(0);
        nics.inject("kind = 'hostile'\nqueue = 'tx'\nwhat = 'nothing'\ncount = 1000000000");
        let (start, mut events, mut offered) = (Instant::now(), Vec::new(), 0);
        while !events.iter().any(|event| matches!(event, PortEvent::Lost(_))) {
            assert!(start.elapsed() < TIMEOUT, "{events:?}");
            let mut batch: Batch = [packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30)].into_iter().collect();
            offered += port.tx[0].transmit(&mut batch) as u64;
            port.tx[0].reclaim();
            batch.clear();
            port.rx[0].receive(&mut batch);
            events.extend(port.port.events());
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(statistic(&mut port, "queue_stalls"), 2);
        let [PortEvent::Lost(why)] = &events[..] else { panic!("{events:?}") };
        assert!(why.contains("transmit queue 0 stalled again"), "{why}");
        while !port.port.events().contains(&PortEvent::Returned) {
            assert!(start.elapsed() < TIMEOUT, "it returns");
            port.tx[0].reclaim();
            port.rx[0].receive(&mut Batch::new());
        }
        // No packet that was in flight counts as sent.
        let now = port.port.tx_statistics().remove(0);
        assert_eq!((now.packets, now.dropped()), (before.packets, before.dropped() + offered), "{now:?}");
        assert_eq!(now.bytes, before.bytes);
        finish(port, &pool);
    });
}

/// Makes the kernel refuse to destroy queues. Their packets are leaked and counted.
pub(crate) fn indestructible_queues(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("buried", 4096).expect("memory");
        let mut port = kind.start(&pool, kind.modes[0], |_| ());
        send_until_received(&mut port, &pool);
        // All sent packets have returned, so the outstanding buffers are the posted ones.
        port.tx[0].reclaim();
        let before = pool.outstanding();
        // The corrupted completion causes a reset, but the old queue cannot be destroyed.
        nics.inject("kind = 'refuse'\ncommand = 'destroy_wq'\nerrno = 'ENOMEM'");
        nics.inject("kind = 'hostile'\nqueue = 'rx'\nwhat = 'type'");
        let start = Instant::now();
        while statistic(&mut port, "buried_packets") == 0 {
            assert!(start.elapsed() < TIMEOUT, "no packet was leaked");
            send_until_received(&mut port, &pool);
        }
        for _ in 0..20 {
            send_until_received(&mut port, &pool);
        }
        port.tx[0].reclaim();
        let buried = statistic(&mut port, "buried_packets");
        assert_eq!((buried, pool.outstanding()), (u64::from(before), 2 * before), "all that were posted");
        let StartedPort { port, rx, tx } = port;
        drop(port.stop(rx, tx).expect("the port stops"));
        assert_eq!(pool.outstanding(), before, "not even when the device is closed");
    });
}

/// Returns the number of resources that a driver could leak: open files and shared mappings.
fn open_resources() -> [usize; 2] {
    let files = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    // Private memory is ignored: it has no name, and the emulator's own grows.
    [files, maps.lines().filter(|line| line.contains("uverbs") || line.contains("memfd:")).count()]
}

/// Makes each kernel command fail in turn while a port is opened and started, until no further one is issued.
/// The port starts without the refused feature or names the command in its error. It leaks nothing and starts
/// the next time.
pub(crate) fn failing_commands(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let start = |pool: &Pool, mode: &str| -> Result<StartedPort, PortError> {
            let mut config = PortConfig { mtu: 9000, depth: 64, ..PortConfig::new(PortId::new(3), pool.clone()) };
            two_queues(&mut config);
            OpenPort::open("dut", kind.plan(kind.device, mode))?.configure(config)?.start()
        };
        let mut errors = BTreeSet::new();
        for mode in [kind.modes[0], kind.modes[kind.modes.len() - 1]] {
            let mut pool = Pool::new("refused", 2048).expect("memory");
            for _ in 0..2 {
                finish(start(&pool, mode).unwrap_or_else(|error| panic!("{mode}: {error}")), &pool);
            }
            let mut before = open_resources();
            for command in kind.commands() {
                // An indestructible queue remains, and its buffers with it.
                let stays = command.starts_with("de") || command == "modify_wq";
                for after in 0.. {
                    let waiting = nics.pending_faults();
                    nics.inject(&format!("kind = 'refuse'\ncommand = '{command}'\nafter = {after}\nerrno = 'ENOMEM'"));
                    match start(&pool, mode) {
                        Ok(mut port) => {
                            send_until_received(&mut port, &pool);
                            let StartedPort { port, rx, tx } = port;
                            drop(port.stop(rx, tx).expect("the port stops"));
                        }
                        Err(error) => {
                            let text = error.to_string();
                            assert_eq!(nics.pending_faults(), waiting, "{command} {after}: {text}");
                            assert!(text.contains(kind.device), "{command} {after}: {text}");
                            errors.insert(format!("{command}: {text}"));
                        }
                    }
                    if stays && pool.outstanding() > 0 {
                        pool = Pool::new("refused", 2048).expect("memory");
                        continue;
                    }
                    assert_eq!(pool.outstanding(), 0, "{mode}: {command} {after}");
                    if nics.pending_faults() > waiting {
                        // The command was issued fewer times than that. Consume the rest of the fault, if the
                        // command is issued at all.
                        for _ in 0..after {
                            let _ = start(&pool, mode).map(|port| {
                                let StartedPort { port, rx, tx } = port;
                                drop(port.stop(rx, tx).expect("the port stops"));
                            });
                        }
                        break;
                    }
                    assert!(
                        stays || open_resources() == before,
                        "{mode}: {command} {after}: {before:?} became {:?}",
                        open_resources()
                    );
                }
                if stays {
                    if pool.outstanding() > 0 {
                        pool = Pool::new("refused", 2048).expect("memory");
                    }
                    // Libraries keep some resources too.
                    before = open_resources();
                }
            }
        }
        eprint!("{}", errors.iter().map(|line| format!("{line}\n")).collect::<String>());
        assert!(!errors.is_empty());
    });
}

/// Makes each kernel command fail in turn while a broken queue or the whole device is recreated. The driver
/// retries, and nothing is lost.
pub(crate) fn failing_recovery(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("mended", 4096).expect("memory");
        let mut port = kind.start(&pool, kind.modes[0], two_queues);
        send_until_received(&mut port, &pool);
        port.tx.iter_mut().for_each(|queue| queue.reclaim());
        let posted = pool.outstanding();
        for command in kind.commands().filter(|name| !name.starts_with("de") && *name != "modify_wq") {
            for after in 0..4 {
                for fault in ["kind = 'hostile'\nqueue = 'rx'\nwhat = 'empty'", "kind = 'device-fatal'"] {
                    let total =
                        |port: &mut StartedPort| statistic(port, "queue_resets") + statistic(port, "device_resets");
                    let before = total(&mut port);
                    nics.inject(&format!("kind = 'refuse'\ncommand = '{command}'\nafter = {after}\nerrno = 'ENOMEM'"));
                    nics.inject(fault);
                    let start = Instant::now();
                    while total(&mut port) == before {
                        assert!(start.elapsed() < 2 * TIMEOUT, "{command} {after} {fault}");
                        send_until_received(&mut port, &pool);
                    }
                    send_until_received(&mut port, &pool);
                }
            }
        }
        port.tx.iter_mut().for_each(|queue| queue.reclaim());
        assert_eq!((pool.outstanding(), statistic(&mut port, "buried_packets")), (posted, 0));
        finish(port, &pool);
    });
}

/// Large TCP packets are sent as segments that carry the whole payload.
pub(crate) fn large_tcp(kind: EmulatedNic, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("lso", 8192).expect("memory");
        let mut port = kind.start(&pool, "", |_| ());
        // The longer ones have more buffers than a MANA descriptor has entries.
        let cases = [20_000, 61_000, 65_450].into_iter().flat_map(|len| [(PtypeL3::Ipv4, len), (PtypeL3::Ipv6, len)]);
        for (l3, len) in cases {
            let mut large = packet(&pool, l3, PtypeL4::Tcp, len);
            large.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM).with(Flags::TX_L3_CHECKSUM));
            large.set_mss(1440);
            let headers = if l3 == PtypeL3::Ipv4 { 54 } else { 74 };
            let payload = bytes(&large)[headers..].to_vec();
            send(&mut port, [large]);
            let pieces = receive(&mut port, len.div_ceil(1440));
            let mut whole = Vec::new();
            for piece in &pieces {
                let piece = bytes(piece);
                assert!(has_valid_checksums(&piece) && piece.len() <= headers + 1440);
                whole.extend_from_slice(&piece[headers..]);
            }
            assert_eq!(whole, payload);
        }
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

/// Sends TCP packets over IPv4 with as much payload as the device segments, `most` bytes, and with more. Software cuts
/// the longer ones. `keys` are keys of the device.
pub(crate) fn oversized_tcp(kind: EmulatedNic, name: &str, keys: &str, most: usize) {
    const MSS: usize = 1440;
    let device = kind.topology().replace("[[device.port]]", &format!("{keys}\n[[device.port]]"));
    under(name, &device, |nics| {
        let pool = Pool::new("oversized", 8192).expect("memory");
        let mut port = kind.start(&pool, "", |_| ());
        port.port.segment_superframes();
        for (len, in_software) in [(most, 0), (most + 1, 1), (most + 10, 2), (most, 2)] {
            let mut large = packet(&pool, PtypeL3::Ipv4, PtypeL4::Tcp, len);
            large.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM).with(Flags::TX_L3_CHECKSUM));
            large.set_mss(MSS as u16);
            let payload = bytes(&large)[54..].to_vec();
            send(&mut port, [large]);
            let mut frames = Vec::new();
            while frames.len() < len.div_ceil(MSS) {
                // Frames that software cut may wait for room in the ring.
                port.tx[0].reclaim();
                frames.extend(receive(&mut port, 1).iter().map(bytes));
            }
            assert!(frames.iter().all(|frame| has_valid_checksums(frame)), "{len}");
            assert_eq!(frames.iter().flat_map(|frame| &frame[54..]).copied().collect::<Vec<_>>(), payload, "{len}");
            assert_eq!(port.tx[0].counters().segmented.get(), in_software, "{len}");
        }
        let sent = port.port.tx_statistics().remove(0);
        assert_eq!((sent.drops, nics.violations()), (Vec::new(), Vec::new()));
        finish(port, &pool);
    });
}

/// A waiting worker is woken by the next packet, every time, and does not wait while packets are available.
pub(crate) fn wakeups(kind: EmulatedNic, name: &str, topology_keys: &str, settings: &str) {
    kind.under(name, topology_keys, |nics| {
        let pool = Pool::new("sleep", 4096).expect("memory");
        let mut port = kind.start(&pool, settings, |config| (config.rx_queues, config.tx_queues) = (2, 1));
        assert!(port.port.capabilities().can_wait);
        for round in 0..40usize {
            let came = {
                let StartedPort { rx, tx, .. } = &mut port;
                let mut fds = Vec::new();
                for queue in rx.iter_mut() {
                    // A worker may ask again before it sleeps.
                    assert!(queue.wait_descriptor().is_some());
                    fds.push(queue.wait_descriptor().expect("nothing is there"));
                }
                let ready = |seconds: i64| {
                    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
                    poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).expect("a wait");
                    fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect::<Vec<_>>()
                };
                assert_eq!(ready(0), [false, false], "round {round}: nothing was sent");
                let mut batch: Batch = (0..1 + round % 9)
                    .map(|i| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30 + 8 * round + i))
                    .collect();
                tx[0].transmit(&mut batch);
                ready(TIMEOUT.as_secs() as i64)
            };
            // All packets of a flow use one queue.
            let at = came.iter().position(|came| *came).unwrap_or_else(|| panic!("round {round}: no queue was woken"));
            let start = Instant::now();
            let mut got = 0;
            while got < 1 + round % 9 {
                assert!(start.elapsed() < TIMEOUT, "round {round}: {got}");
                if got == 0 {
                    assert!(port.rx[at].wait_descriptor().is_none(), "round {round}: packets are there");
                }
                let mut batch = Batch::new();
                got += port.rx[at].receive(&mut batch);
                port.tx[0].reclaim();
            }
        }
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

/// Bursts of every size, up to jumbo frames, on four queues per direction. `topology_keys` are keys of the topology.
pub(crate) fn bursts(kind: EmulatedNic, name: &str, topology_keys: &str) {
    kind.under(name, topology_keys, |nics| {
        let pool = Pool::new("ways", 4096).expect("memory");
        let mut port = kind.start(&pool, "", |config| (config.rx_queues, config.tx_queues) = (4, 4));
        for round in 0..200usize {
            let n = 1 + round % 40;
            send(&mut port, (0..n).map(|i| packet(&pool, PtypeL3::Ipv4, PtypeL4::Udp, 30 + (i * 397) % 8000)));
            let got = receive(&mut port, n);
            assert!(got.iter().all(|packet| has_valid_checksums(&bytes(packet))), "round {round}");
        }
        assert_eq!(nics.violations(), [""; 0]);
        finish(port, &pool);
    });
}

/// Defines the tests that every [`EmulatedNic`] must pass. `corruptions` lists those that its completions can
/// have.
macro_rules! nic_tests {
    ($module:literal, $kind:expr, $need:expr, $($name:ident: $body:expr;)*) => { $(
        #[test]
        fn $name() {
            wirepath_testlab::require!($need);
            $body($kind, concat!($module, "::", stringify!($name)));
        }
    )* };
    ($module:literal, $kind:expr, $need:expr, $corruptions:expr) => {
        crate::emulated::nic_tests! { $module, $kind, $need,
            corrupt_completions_reset_one_queue_only:
                |kind, name| crate::emulated::corrupt_completions(kind, name, $corruptions);
            a_queue_that_never_works_fails_the_port: crate::emulated::futile_resets;
            a_reset_device_is_reopened_without_a_restart: crate::emulated::reset_device;
            a_stalled_transmit_queue_is_recreated: crate::emulated::stalled_queue;
            a_device_that_does_not_send_is_reopened: crate::emulated::stalled_device;
            each_failing_command_is_survived_at_start: crate::emulated::failing_commands;
            each_failing_command_is_survived_on_recovery: crate::emulated::failing_recovery;
            packets_of_indestructible_queues_are_leaked: crate::emulated::indestructible_queues;
            doorbells_served_by_a_thread: |kind, name| crate::emulated::bursts(kind, name, "doorbells = 'queue'\n");
            descriptors_fetched_late:
                |kind, name| crate::emulated::bursts(kind, name, "doorbells = 'queue'\nfetch = 'late'\n");
            the_older_kernel_interface: |kind, name| crate::emulated::bursts(kind, name, "abi = 'write'\n");
            queues_looked_at_without_doorbells:
                |kind, name| crate::emulated::bursts(kind, name, "doorbells = 'scan'\n");
        }
    };
}
pub(crate) use nic_tests;
