//! A NIC's driver on emulated NICs, in a process of its own, and what every such driver must stand: hostile completions, a device that is
//! reset, queues that stall or cannot be destroyed, every way in which doorbells are seen.

#![allow(dead_code, unused_imports, unused_macros)]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_nic_emulator::launch;
use wirepath_nic_emulator::uverbs::COMMANDS;
use wirepath_pmd::drivers;
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::offload::Flags;
use wirepath_pmd::packet::{Batch, L3, L4, Packet, Pool};
use wirepath_pmd::port::{Link, OpenPort, Plan, PortConfig, PortError, PortEvent, StartedPort};
use wirepath_pmd::settings::Source;

/// How long something that must happen may take: it only ends a hopeless wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Says, in the process with the NICs, where their log and control socket are.
const FOLDER: &str = "WIREPATH_NIC_TEST";

/// A driver, and the emulated device that it is tried on.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    /// Name of the driver.
    pub(crate) driver: &'static str,
    /// Name of the device; its port is plugged into itself.
    pub(crate) device: &'static str,
    /// Settings of the driver, one set after the other.
    pub(crate) modes: &'static [&'static str],
}

/// Emulated NICs of this process.
pub(crate) struct Nics {
    pub(crate) folder: PathBuf,
}

impl Nics {
    /// Asks the control socket.
    pub(crate) fn ask(&self, request: &str) -> String {
        let mut socket = UnixStream::connect(self.folder.join("control")).expect("the control socket");
        writeln!(socket, "{request}").expect("a request");
        socket.shutdown(Shutdown::Write).expect("the end of the request");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        answer
    }

    /// Orders a fault.
    pub(crate) fn order(&self, fault: &str) {
        assert_eq!(self.ask(fault).trim(), "ordered");
    }

    /// A counter of each queue that sends, in the first device.
    pub(crate) fn sent(&self, name: &str) -> Vec<u64> {
        let all: serde_json::Value = serde_json::from_str(&self.ask("counters")).expect("counters");
        let queues = all["devices"][0]["send_queues"].as_array().expect("send queues");
        queues.iter().map(|queue| queue[name].as_u64().expect("a number")).collect()
    }

    /// Faults that were ordered and have not struck.
    pub(crate) fn waiting(&self) -> u64 {
        let all: serde_json::Value = serde_json::from_str(&self.ask("counters")).expect("counters");
        all["faults_waiting"].as_u64().expect("a number")
    }

    /// What the NICs refused, without what was ordered.
    pub(crate) fn refused(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        log.lines().filter(|line| !line.contains("as ordered")).map(str::to_owned).collect()
    }
}

/// Runs `work` in a process with NICs; `rest` is the topology.
pub(crate) fn under(name: &str, rest: &str, work: impl FnOnce(&Nics)) {
    let folder = std::env::var_os(FOLDER).map_or_else(
        || tempfile::Builder::new().prefix("wirepath-nic-").tempdir().expect("a folder").keep(),
        PathBuf::from,
    );
    let topology = format!("log = '{0}/log'\ncontrol = '{0}/control'\n{rest}", folder.display());
    let place = folder.display().to_string();
    launch::under_with(name, &topology, &[(FOLDER, &place)], || work(&Nics { folder: folder.clone() }));
    let _ = std::fs::remove_dir_all(folder);
}

impl Kind {
    /// The device in a topology.
    pub(crate) fn topology(&self) -> String {
        // Plain verbs have no device of their own.
        let kind = if self.driver == "verbs" { "mlx5" } else { self.driver };
        format!("[[device]]\nkind = '{kind}'\nname = '{}'\n[[device.port]]\nlink = 'loop'\n", self.device)
    }

    /// Commands of the kernel that the driver or a library may give.
    fn commands(&self) -> impl Iterator<Item = &'static str> {
        // Where these are refused while it opens a device, libmlx5 goes on as if the device were an old one, or could do nothing, and then
        // refuses to post or to poll; plain verbs have no other way.
        let lost: &[&str] = if self.driver == "verbs" { &["get_context", "query_device", "query_port"] } else { &[] };
        COMMANDS.iter().copied().filter(move |command| !lost.contains(command))
    }

    /// A port of `device`, not yet opened.
    pub(crate) fn plan(&self, device: &str, settings: &str) -> Box<dyn Plan> {
        let driver = self.driver;
        let text =
            format!("[[port]]\nname = 'dut'\ndriver = '{driver}'\ndevice = '{device}'\n[port.{driver}]\n{settings}\n");
        let source = Source::new("test.toml", text);
        let document = source.parse().unwrap_or_else(|error| panic!("{error}"));
        let port = document.settings().tables("port").expect("one port").remove(0);
        drivers::plan(port).unwrap_or_else(|error| panic!("{error}")).plan
    }

    /// A port of `device`, not yet started.
    pub(crate) fn open(&self, device: &str, settings: &str) -> OpenPort {
        OpenPort::open("dut", self.plan(device, settings)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A started port of `device`.
    pub(crate) fn start_on(
        &self,
        device: &str,
        pool: &Pool,
        settings: &str,
        change: impl FnOnce(&mut PortConfig),
    ) -> StartedPort {
        let mut config = PortConfig { mtu: 9000, depth: 256, ..PortConfig::new(3, pool.clone()) };
        change(&mut config);
        let open = self.open(device, settings);
        open.configure(config).and_then(|port| port.start()).unwrap_or_else(|error| panic!("{error}"))
    }

    /// A started port.
    pub(crate) fn start(&self, pool: &Pool, settings: &str, change: impl FnOnce(&mut PortConfig)) -> StartedPort {
        self.start_on(self.device, pool, settings, change)
    }

    /// Runs `work` in a process with the device; `keys` of the topology come before it.
    pub(crate) fn under(&self, name: &str, keys: &str, work: impl FnOnce(&Nics)) {
        under(name, &(keys.to_owned() + &self.topology()), work);
    }
}

/// Two queues each way.
pub(crate) fn two_queues(config: &mut PortConfig) {
    (config.rx_queues, config.tx_queues) = (2, 2);
}

/// A figure of the device.
pub(crate) fn figure(port: &mut StartedPort, name: &str) -> u64 {
    let figures = port.port.extra_statistics();
    figures.iter().find(|(found, _)| *found == name).unwrap_or_else(|| panic!("no {name} among {figures:?}")).1
}

/// Sends packets by queue 0, as they come, until all are taken.
pub(crate) fn send(port: &mut StartedPort, packets: impl IntoIterator<Item = Packet>) {
    let mut batch: Batch = packets.into_iter().collect();
    let start = Instant::now();
    while !batch.is_empty() {
        port.tx[0].transmit(&mut batch);
        assert!(start.elapsed() < PATIENCE, "the port takes nothing");
    }
}

/// Receives until there are as many packets.
pub(crate) fn receive(port: &mut StartedPort, count: usize) -> Vec<Packet> {
    let mut all = Vec::new();
    let start = Instant::now();
    while all.len() < count {
        for queue in &mut port.rx {
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            batch.drain_front(usize::MAX, |packet| all.push(packet));
        }
        assert!(start.elapsed() < PATIENCE, "{} of {count} received", all.len());
    }
    all
}

/// A UDP or TCP packet over IPv4 or IPv6 with checksums left to the device, as an application leaves them.
pub(crate) fn packet(pool: &Pool, l3: L3, l4: L4, payload: usize) -> Packet {
    let (header, protocol) = if l4 == L4::Tcp { (20, 6u8) } else { (8, 17) };
    let mut frame = vec![2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9];
    let length = (header + payload) as u16;
    let pseudo = match l3 {
        L3::Ipv6 => {
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
    if l4 == L4::Tcp {
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
    let mut layers = packet.layers();
    (layers.l2_len, layers.l3_len, layers.l4_len) = (14, l3_len as u8, header as u8);
    packet.set_layers(layers.with_kinds(l3, l4, L3::Other));
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

pub(crate) fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().collect::<Vec<_>>().concat()
}

/// Whether the checksums of a frame are right, by our own count.
pub(crate) fn is_sound(frame: &[u8]) -> bool {
    let (l4, pseudo) = match frame[12..14] {
        [0x86, 0xdd] => (54, sum(&frame[22..54]) + u32::from(frame[20])),
        _ if fold(sum(&frame[14..34])) != 0xffff => return false,
        _ => (34, sum(&frame[26..34]) + u32::from(frame[23])),
    };
    fold(pseudo + (frame.len() - l4) as u32 + sum(&frame[l4..])) == 0xffff
}

/// Stops a port; every buffer must come back.
pub(crate) fn finish(port: StartedPort, pool: &Pool) {
    let StartedPort { port, rx, tx } = port;
    drop(port.stop(rx, tx).expect("the port stops"));
    assert_eq!(pool.outstanding(), 0, "buffers that did not come back");
}

/// Sends until one comes back, looking after the port in between as a control thread does. Returns the events.
pub(crate) fn until_it_flows(port: &mut StartedPort, pool: &Pool) -> Vec<PortEvent> {
    let (start, mut events) = (Instant::now(), Vec::new());
    loop {
        assert!(start.elapsed() < PATIENCE, "nothing flows: {events:?}, {:?}", port.port.rx_statistics());
        events.extend(port.port.events());
        let mut batch = Batch::new();
        drop(batch.push(packet(pool, L3::Ipv4, L4::Udp, 30)));
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

/// Orders lies, each of which must cost a queue and nothing else.
pub(crate) fn hostile_completions(kind: Kind, name: &str, lies: &[(&str, &str)]) {
    kind.under(name, "", |nics| {
        for ((queue, what), mode) in lies.iter().zip(kind.modes.iter().cycle()) {
            let pool = Pool::new("hostile", 4096).expect("memory");
            let mut port = kind.start(&pool, mode, two_queues);
            // A few first: the position of completions may be learned from them.
            for _ in 0..10 {
                until_it_flows(&mut port, &pool);
            }
            assert_eq!(figure(&mut port, "queue_resets"), 0, "{queue} {what}");
            nics.order(&format!("kind = 'hostile'\nqueue = '{queue}'\nwhat = '{what}'"));
            let start = Instant::now();
            while figure(&mut port, "queue_resets") == 0 {
                assert!(start.elapsed() < PATIENCE, "{queue} {what} was not seen");
                until_it_flows(&mut port, &pool);
            }
            for _ in 0..20 {
                until_it_flows(&mut port, &pool);
            }
            let drops: u64 = port.rx.iter().map(|queue| queue.counters().drops.get(DropReason::BadDescriptor)).sum();
            assert_eq!(drops, u64::from(*queue == "rx"), "{queue} {what}");
            finish(port, &pool);
        }
    });
}

/// Resets the device, which must come back by itself.
pub(crate) fn reset_device(kind: Kind, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("fatal", 4096).expect("memory");
        let mut port = kind.start(&pool, "", two_queues);
        for round in 1..=3 {
            until_it_flows(&mut port, &pool);
            nics.order("kind = 'device-fatal'");
            let (start, mut events) = (Instant::now(), Vec::new());
            while !events.contains(&PortEvent::Link(Link::UP)) {
                assert!(start.elapsed() < PATIENCE, "round {round}: {events:?}");
                // Workers poll on.
                let mut batch: Batch = [packet(&pool, L3::Ipv4, L4::Udp, 30)].into_iter().collect();
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
            assert_eq!(events, [PortEvent::Link(Link::DOWN), PortEvent::Link(Link::UP)]);
            until_it_flows(&mut port, &pool);
            assert_eq!(figure(&mut port, "device_resets"), round);
        }
        assert_eq!(figure(&mut port, "buried_packets"), 0, "a device that was reset has let go of everything");
        finish(port, &pool);
    });
}

/// Keeps a completion back: the transmit queue is made anew although nothing else happens. A worker that sleeps is no reason to.
pub(crate) fn stalled_queue(kind: Kind, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("stalled", 4096).expect("memory");
        let mut port = kind.start(&pool, "seconds_stalled = 1", |_| ());
        until_it_flows(&mut port, &pool);
        send(&mut port, [packet(&pool, L3::Ipv4, L4::Udp, 30)]);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(1300) {
            drop(port.port.events());
            std::thread::sleep(Duration::from_millis(20));
        }
        port.tx[0].reclaim();
        drop(port.port.events());
        assert_eq!(figure(&mut port, "queue_resets"), 0, "nobody looked, and it was there");
        nics.order("kind = 'hostile'\nqueue = 'tx'\nwhat = 'nothing'");
        send(&mut port, (0..5).map(|_| packet(&pool, L3::Ipv4, L4::Udp, 30)));
        let start = Instant::now();
        while figure(&mut port, "queue_stalls") == 0 {
            assert!(start.elapsed() < PATIENCE, "nobody noticed");
            drop(port.port.events());
            port.tx[0].reclaim();
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(figure(&mut port, "queue_resets"), 1);
        assert_eq!(port.tx[0].counters().drops.get(DropReason::TxError), 5);
        until_it_flows(&mut port, &pool);
        finish(port, &pool);
    });
}

/// Lets the kernel refuse to destroy queues: their packets are out of reach for ever, and counted.
pub(crate) fn queues_that_stay(kind: Kind, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("buried", 4096).expect("memory");
        let mut port = kind.start(&pool, kind.modes[0], |_| ());
        until_it_flows(&mut port, &pool);
        // All that is sent is back: what is outstanding is posted.
        port.tx[0].reclaim();
        let before = pool.outstanding();
        // The queue is made anew because of the lie; the old one stays.
        nics.order("kind = 'refuse'\ncommand = 'destroy_wq'\nerrno = 'ENOMEM'");
        nics.order("kind = 'hostile'\nqueue = 'rx'\nwhat = 'type'");
        let start = Instant::now();
        while figure(&mut port, "buried_packets") == 0 {
            assert!(start.elapsed() < PATIENCE, "nobody was buried");
            until_it_flows(&mut port, &pool);
        }
        for _ in 0..20 {
            until_it_flows(&mut port, &pool);
        }
        port.tx[0].reclaim();
        let buried = figure(&mut port, "buried_packets");
        assert_eq!((buried, pool.outstanding()), (u64::from(before), 2 * before), "all that were posted");
        let StartedPort { port, rx, tx } = port;
        drop(port.stop(rx, tx).expect("the port stops"));
        assert_eq!(pool.outstanding(), before, "not even when the device is closed");
    });
}

/// What this process holds that a driver could leave behind: files and mappings.
fn held() -> [usize; 2] {
    let files = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let maps = std::fs::read_to_string("/proc/self/maps").expect("procfs");
    // Memory that is not shared has no name, and the emulator's own grows as it likes.
    [files, maps.lines().filter(|line| line.contains("uverbs") || line.contains("memfd:")).count()]
}

/// Has the kernel refuse each command in its turn while a port is opened and started, until none is left to refuse: it starts without what was
/// refused or says what was, leaves nothing behind, and starts the next time.
pub(crate) fn refused_commands(kind: Kind, name: &str) {
    kind.under(name, "", |nics| {
        let start = |pool: &Pool, mode: &str| -> Result<StartedPort, PortError> {
            let mut config = PortConfig { mtu: 9000, depth: 64, ..PortConfig::new(3, pool.clone()) };
            two_queues(&mut config);
            OpenPort::open("dut", kind.plan(kind.device, mode))?.configure(config)?.start()
        };
        let mut told = BTreeSet::new();
        for mode in [kind.modes[0], kind.modes[kind.modes.len() - 1]] {
            let mut pool = Pool::new("refused", 2048).expect("memory");
            for _ in 0..2 {
                finish(start(&pool, mode).unwrap_or_else(|error| panic!("{mode}: {error}")), &pool);
            }
            let mut before = held();
            for command in kind.commands() {
                // What cannot be destroyed stays, and its buffers with it.
                let stays = command.starts_with("de") || command == "modify_wq";
                for after in 0.. {
                    let waiting = nics.waiting();
                    nics.order(&format!("kind = 'refuse'\ncommand = '{command}'\nafter = {after}\nerrno = 'ENOMEM'"));
                    match start(&pool, mode) {
                        Ok(mut port) => {
                            until_it_flows(&mut port, &pool);
                            let StartedPort { port, rx, tx } = port;
                            drop(port.stop(rx, tx).expect("the port stops"));
                        }
                        Err(error) => {
                            let text = error.to_string();
                            assert_eq!(nics.waiting(), waiting, "{command} {after}: {text}");
                            assert!(text.contains(kind.device), "{command} {after}: {text}");
                            told.insert(format!("{command}: {text}"));
                        }
                    }
                    if stays && pool.outstanding() > 0 {
                        pool = Pool::new("refused", 2048).expect("memory");
                        continue;
                    }
                    assert_eq!(pool.outstanding(), 0, "{mode}: {command} {after}");
                    if nics.waiting() > waiting {
                        // Fewer of these are given than that. The rest of the order is spent, if there are any at all.
                        for _ in 0..after {
                            let _ = start(&pool, mode).map(|port| {
                                let StartedPort { port, rx, tx } = port;
                                drop(port.stop(rx, tx).expect("the port stops"));
                            });
                        }
                        break;
                    }
                    assert!(stays || held() == before, "{mode}: {command} {after}: {before:?} became {:?}", held());
                }
                if stays {
                    if pool.outstanding() > 0 {
                        pool = Pool::new("refused", 2048).expect("memory");
                    }
                    // And libraries keep what it needs.
                    before = held();
                }
            }
        }
        eprint!("{}", told.iter().map(|line| format!("{line}\n")).collect::<String>());
        assert!(!told.is_empty());
    });
}

/// Has the kernel refuse each command in its turn while a broken queue, or the whole device, is made anew: it is tried again, and nothing is lost.
pub(crate) fn refused_mending(kind: Kind, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("mended", 4096).expect("memory");
        let mut port = kind.start(&pool, kind.modes[0], two_queues);
        until_it_flows(&mut port, &pool);
        port.tx.iter_mut().for_each(|queue| queue.reclaim());
        let posted = pool.outstanding();
        for command in kind.commands().filter(|name| !name.starts_with("de") && *name != "modify_wq") {
            for after in 0..4 {
                for fault in ["kind = 'hostile'\nqueue = 'rx'\nwhat = 'empty'", "kind = 'device-fatal'"] {
                    let total = |port: &mut StartedPort| figure(port, "queue_resets") + figure(port, "device_resets");
                    let before = total(&mut port);
                    nics.order(&format!("kind = 'refuse'\ncommand = '{command}'\nafter = {after}\nerrno = 'ENOMEM'"));
                    nics.order(fault);
                    let start = Instant::now();
                    while total(&mut port) == before {
                        assert!(start.elapsed() < 2 * PATIENCE, "{command} {after} {fault}");
                        until_it_flows(&mut port, &pool);
                    }
                    until_it_flows(&mut port, &pool);
                }
            }
        }
        port.tx.iter_mut().for_each(|queue| queue.reclaim());
        assert_eq!((pool.outstanding(), figure(&mut port, "buried_packets")), (posted, 0));
        finish(port, &pool);
    });
}

/// Large TCP packets leave as segments that carry the whole payload.
pub(crate) fn large_tcp(kind: Kind, name: &str) {
    kind.under(name, "", |nics| {
        let pool = Pool::new("lso", 8192).expect("memory");
        let mut port = kind.start(&pool, "", |_| ());
        // The longer ones have more buffers than a MANA's descriptor has entries.
        let cases = [20_000, 61_000, 65_450].into_iter().flat_map(|len| [(L3::Ipv4, len), (L3::Ipv6, len)]);
        for (l3, len) in cases {
            let mut large = packet(&pool, l3, L4::Tcp, len);
            large.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM).with(Flags::TX_L3_CHECKSUM));
            large.set_mss(1440);
            let headers = if l3 == L3::Ipv4 { 54 } else { 74 };
            let payload = bytes(&large)[headers..].to_vec();
            send(&mut port, [large]);
            let pieces = receive(&mut port, len.div_ceil(1440));
            let mut whole = Vec::new();
            for piece in &pieces {
                let piece = bytes(piece);
                assert!(is_sound(&piece) && piece.len() <= headers + 1440);
                whole.extend_from_slice(&piece[headers..]);
            }
            assert_eq!(whole, payload);
        }
        assert_eq!(nics.refused(), [""; 0]);
        finish(port, &pool);
    });
}

/// Whoever waits for a queue is woken by the next packet, each time anew, and does not wait while there are packets.
pub(crate) fn sleepers_are_woken(kind: Kind, name: &str, way: &str, settings: &str) {
    kind.under(name, way, |nics| {
        let pool = Pool::new("sleep", 4096).expect("memory");
        let mut port = kind.start(&pool, settings, |config| (config.rx_queues, config.tx_queues) = (2, 1));
        assert!(port.port.capabilities().can_wait);
        for round in 0..40usize {
            let came = {
                let StartedPort { rx, tx, .. } = &mut port;
                let mut fds = Vec::new();
                for queue in rx.iter_mut() {
                    // As a worker does that is about to sleep once more, for another reason.
                    assert!(queue.wait_descriptor().is_some());
                    fds.push(queue.wait_descriptor().expect("nothing is there"));
                }
                let ready = |seconds: i64| {
                    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
                    poll(&mut fds, Some(&Timespec { tv_sec: seconds, tv_nsec: 0 })).expect("a wait");
                    fds.iter().map(|fd| fd.revents().contains(PollFlags::IN)).collect::<Vec<_>>()
                };
                assert_eq!(ready(0), [false, false], "round {round}: nothing was sent");
                let mut batch: Batch =
                    (0..1 + round % 9).map(|i| packet(&pool, L3::Ipv4, L4::Udp, 30 + 8 * round + i)).collect();
                tx[0].transmit(&mut batch);
                ready(PATIENCE.as_secs() as i64)
            };
            // One flow: one queue.
            let at = came.iter().position(|came| *came).unwrap_or_else(|| panic!("round {round}: nobody was woken"));
            let start = Instant::now();
            let mut got = 0;
            while got < 1 + round % 9 {
                assert!(start.elapsed() < PATIENCE, "round {round}: {got}");
                if got == 0 {
                    assert!(port.rx[at].wait_descriptor().is_none(), "round {round}: packets are there");
                }
                let mut batch = Batch::new();
                got += port.rx[at].receive(&mut batch);
                port.tx[0].reclaim();
            }
        }
        assert_eq!(nics.refused(), [""; 0]);
        finish(port, &pool);
    });
}

/// Bursts of every size, up to jumbo frames, on four queues each way; `way` are keys of the topology.
pub(crate) fn bursts(kind: Kind, name: &str, way: &str) {
    kind.under(name, way, |nics| {
        let pool = Pool::new("ways", 4096).expect("memory");
        let mut port = kind.start(&pool, "", |config| (config.rx_queues, config.tx_queues) = (4, 4));
        for round in 0..200usize {
            let n = 1 + round % 40;
            send(&mut port, (0..n).map(|i| packet(&pool, L3::Ipv4, L4::Udp, 30 + (i * 397) % 8000)));
            let got = receive(&mut port, n);
            assert!(got.iter().all(|packet| is_sound(&bytes(packet))), "round {round}");
        }
        assert_eq!(nics.refused(), [""; 0]);
        finish(port, &pool);
    });
}

/// The tests that every [`Kind`] has to stand; `lies` are those that its completions can tell.
macro_rules! every_nic {
    ($kind:expr, $need:expr, $lies:expr, $($name:ident: $body:expr;)*) => { $(
        #[test]
        fn $name() {
            wirepath_testlab::require!($need);
            $body($kind, stringify!($name));
        }
    )* };
    ($kind:expr, $need:expr, $lies:expr) => {
        crate::nic::every_nic! { $kind, $need, $lies,
            hostile_completions_cost_a_queue_and_nothing_else:
                |kind, name| crate::nic::hostile_completions(kind, name, $lies);
            a_reset_device_is_opened_again_without_a_restart: crate::nic::reset_device;
            a_transmit_queue_that_stalls_is_made_anew: crate::nic::stalled_queue;
            commands_that_are_refused_one_by_one: crate::nic::refused_commands;
            commands_that_are_refused_while_queues_are_made_anew: crate::nic::refused_mending;
            packets_of_queues_that_cannot_be_destroyed_are_buried: crate::nic::queues_that_stay;
            doorbells_served_by_a_thread: |kind, name| crate::nic::bursts(kind, name, "doorbells = 'queue'\n");
            descriptors_fetched_late:
                |kind, name| crate::nic::bursts(kind, name, "doorbells = 'queue'\nfetch = 'late'\n");
            the_older_kernel_interface: |kind, name| crate::nic::bursts(kind, name, "abi = 'write'\n");
            queues_looked_at_without_doorbells:
                |kind, name| crate::nic::bursts(kind, name, "doorbells = 'scan'\n");
        }
    };
}
pub(crate) use every_nic;
