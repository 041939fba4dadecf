//! The `mana` driver on emulated NICs: what the contract of all drivers does not ask for. Offloads, hostile completions, a device that
//! is reset, a port that the kernel holds. Each test starts itself again in a process with the NICs.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use wirepath_memory::RegionBuilder;
use wirepath_nic_emulator::launch;
use wirepath_pmd::drivers::mana::{Borrowed, Lender, Options, Shape};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::offload::{Flags, Verdicts};
use wirepath_pmd::packet::{Arena, Batch, L3, L4, Packet, Pool};
use wirepath_pmd::port::{Link, OpenPort, PortConfig, PortEvent, StartedPort};
use wirepath_testlab::{Need, require};

/// How long something that must happen may take: it only ends a hopeless wait.
const PATIENCE: Duration = Duration::from_secs(10);
/// Says, in the process with the NICs, where their log and control socket are.
const FOLDER: &str = "WIREPATH_MANA_TEST";
/// What a port is plugged into, and keys of the device.
const LOOP: &str = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n";

/// Emulated NICs of this process.
struct Nics {
    folder: PathBuf,
}

impl Nics {
    /// Orders a fault.
    fn order(&self, fault: &str) {
        let mut socket = UnixStream::connect(self.folder.join("control")).expect("the control socket");
        writeln!(socket, "{fault}").expect("a request");
        socket.shutdown(Shutdown::Write).expect("the end of the request");
        let mut answer = String::new();
        socket.read_to_string(&mut answer).expect("an answer");
        assert_eq!(answer.trim(), "ordered");
    }

    /// What the NICs refused, without what was ordered.
    fn refused(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder.join("log")).unwrap_or_default();
        log.lines().filter(|line| !line.contains("as ordered")).map(str::to_owned).collect()
    }
}

/// Runs `work` in a process with NICs; `rest` is the topology.
fn under(name: &str, rest: &str, work: impl FnOnce(&Nics)) {
    let folder = std::env::var_os(FOLDER).map_or_else(
        || tempfile::Builder::new().prefix("wirepath-mana-").tempdir().expect("a folder").keep(),
        PathBuf::from,
    );
    let topology = format!("log = '{0}/log'\ncontrol = '{0}/control'\n{rest}", folder.display());
    let place = folder.display().to_string();
    launch::under_with(name, &topology, &[(FOLDER, &place)], || work(&Nics { folder: folder.clone() }));
    let _ = std::fs::remove_dir_all(folder);
}

const RDMA: Need = Need::File("/etc/libibverbs.d/mana.driver");

/// A started port of `mana0`.
fn start(pool: &Pool, change: impl FnOnce(&mut PortConfig)) -> StartedPort {
    let mut config = PortConfig { mtu: 9000, depth: 256, ..PortConfig::new(3, pool.clone()) };
    change(&mut config);
    let open = OpenPort::open("dut", Box::new(Options::new("mana0"))).unwrap_or_else(|error| panic!("{error}"));
    open.configure(config).and_then(|port| port.start()).unwrap_or_else(|error| panic!("{error}"))
}

/// Sends packets by queue 0, as they come, until all are taken.
fn send(port: &mut StartedPort, packets: impl IntoIterator<Item = Packet>) {
    let mut batch: Batch = packets.into_iter().collect();
    let start = Instant::now();
    while !batch.is_empty() {
        port.tx[0].transmit(&mut batch);
        assert!(start.elapsed() < PATIENCE, "the port takes nothing");
    }
}

/// Receives until there are as many packets.
fn receive(port: &mut StartedPort, count: usize) -> Vec<Packet> {
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
fn packet(pool: &Pool, l3: L3, l4: L4, payload: usize) -> Packet {
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

fn sum(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0))).sum()
}

fn fold(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn bytes(packet: &Packet) -> Vec<u8> {
    packet.segments().collect::<Vec<_>>().concat()
}

/// Whether the checksums of a frame are right, by our own count.
fn is_sound(frame: &[u8]) -> bool {
    let (l4, pseudo) = match frame[12..14] {
        [0x86, 0xdd] => (54, sum(&frame[22..54]) + u32::from(frame[20])),
        _ if fold(sum(&frame[14..34])) != 0xffff => return false,
        _ => (34, sum(&frame[26..34]) + u32::from(frame[23])),
    };
    fold(pseudo + (frame.len() - l4) as u32 + sum(&frame[l4..])) == 0xffff
}

fn finish(port: StartedPort, pool: &Pool) {
    let StartedPort { port, rx, tx } = port;
    drop(port.stop(rx, tx).expect("the port stops"));
    assert_eq!(pool.outstanding(), 0, "buffers that did not come back");
}

#[test]
fn checksums_and_tags_are_the_devices_work() {
    require!(RDMA);
    under("checksums_and_tags_are_the_devices_work", LOOP, |nics| {
        let pool = Pool::new("offloads", 8192).expect("memory");
        let mut port = start(&pool, |_| ());
        for l3 in [L3::Ipv4, L3::Ipv6] {
            for l4 in [L4::Tcp, L4::Udp] {
                for (payload, tag) in [(100, None), (1, None), (8000, None), (1400, Some(0xb123))] {
                    let mut sent = packet(&pool, l3, l4, payload);
                    if let Some(tag) = tag {
                        sent.set_vlan(tag);
                    }
                    let len = sent.len();
                    send(&mut port, [sent]);
                    let got = receive(&mut port, 1).remove(0);
                    assert_eq!((got.len(), got.in_port()), (len, 3));
                    assert!(is_sound(&bytes(&got)), "{l3:?} {l4:?} {payload}");
                    // The completion has no room for the priority.
                    assert_eq!(got.vlan(), tag.map(|tag| tag & 0xfff));
                    let good = if l3 == L3::Ipv4 { Verdicts::L3_GOOD } else { Verdicts::NONE };
                    assert_eq!(got.verdicts(), good.with(Verdicts::L4_GOOD));
                    assert!(got.rss_hash().is_some());
                }
            }
        }
        // A wrong one is not mended on the way, and is told of.
        let mut wrong = packet(&pool, L3::Ipv4, L4::Udp, 50);
        wrong.set_flags(Flags::NONE);
        send(&mut port, [wrong]);
        assert_eq!(receive(&mut port, 1)[0].verdicts(), Verdicts::L3_BAD.with(Verdicts::L4_BAD));
        assert_eq!(nics.refused(), [""; 0]);
        finish(port, &pool);
    });
}

#[test]
fn large_tcp_packets_are_cut_by_the_device() {
    require!(RDMA);
    under("large_tcp_packets_are_cut_by_the_device", LOOP, |nics| {
        let pool = Pool::new("lso", 8192).expect("memory");
        let mut port = start(&pool, |_| ());
        for l3 in [L3::Ipv4, L3::Ipv6] {
            let mut large = packet(&pool, l3, L4::Tcp, 20_000);
            large.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM).with(Flags::TX_L3_CHECKSUM));
            large.set_mss(1440);
            let headers = if l3 == L3::Ipv4 { 54 } else { 74 };
            let payload = bytes(&large)[headers..].to_vec();
            send(&mut port, [large]);
            let pieces = receive(&mut port, 20_000usize.div_ceil(1440));
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

/// Sends until one comes back, looking after the port in between as a control thread does. Returns the events.
fn until_it_flows(port: &mut StartedPort, pool: &Pool) -> Vec<PortEvent> {
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

#[test]
fn hostile_completions_cost_a_queue_and_nothing_else() {
    require!(RDMA);
    under("hostile_completions_cost_a_queue_and_nothing_else", LOOP, |nics| {
        let lies = [
            ("rx", "owner"),
            ("rx", "queue"),
            ("rx", "kind"),
            ("rx", "length"),
            ("rx", "empty"),
            ("rx", "type"),
            ("rx", "position"),
            ("rx", "twice"),
            ("tx", "owner"),
            ("tx", "queue"),
            ("tx", "kind"),
            ("tx", "type"),
            ("tx", "position"),
            ("tx", "twice"),
        ];
        let resets = |port: &mut StartedPort| {
            port.port.extra_statistics().iter().find(|(n, _)| *n == "queue_resets").map(|s| s.1)
        };
        for (queue, what) in lies {
            let pool = Pool::new("hostile", 4096).expect("memory");
            let mut port = start(&pool, |config| (config.rx_queues, config.tx_queues) = (2, 2));
            // A few first: the position of completions is learned from them.
            for _ in 0..10 {
                until_it_flows(&mut port, &pool);
            }
            assert_eq!(resets(&mut port), Some(0), "{queue} {what}");
            nics.order(&format!("kind = 'hostile'\nqueue = '{queue}'\nwhat = '{what}'"));
            let start = Instant::now();
            while resets(&mut port) == Some(0) {
                assert!(start.elapsed() < PATIENCE, "{queue} {what} was not seen");
                until_it_flows(&mut port, &pool);
            }
            for _ in 0..20 {
                until_it_flows(&mut port, &pool);
            }
            let drops: u64 = port.rx.iter().map(|queue| queue.counters().drops.get(DropReason::BadDescriptor)).sum();
            assert_eq!(drops, u64::from(queue == "rx"), "{queue} {what}");
            finish(port, &pool);
        }
    });
}

#[test]
fn error_completions_are_counted_and_a_stopped_queue_is_made_anew() {
    require!(RDMA);
    under("error_completions_are_counted_and_a_stopped_queue_is_made_anew", LOOP, |nics| {
        let pool = Pool::new("errors", 4096).expect("memory");
        let mut port = start(&pool, |_| ());
        until_it_flows(&mut port, &pool);
        let errors = |port: &StartedPort| port.tx[0].counters().drops.get(DropReason::TxError);
        for code in 33..=41 {
            nics.order(&format!("kind = 'completion-error'\ncode = {code}\nafter = 2"));
            let before = errors(&port);
            // The third of eight fails; the others arrive.
            send(&mut port, (0..8).map(|_| packet(&pool, L3::Ipv4, L4::Udp, 30)));
            assert_eq!(receive(&mut port, 7).len(), 7);
            port.tx[0].reclaim();
            assert_eq!(errors(&port), before + 1, "type {code}");
        }
        assert_eq!(port.port.extra_statistics()[0], ("queue_resets", 0));
        nics.order("kind = 'completion-error'\ncode = 42");
        send(&mut port, [packet(&pool, L3::Ipv4, L4::Udp, 30)]);
        until_it_flows(&mut port, &pool);
        assert_eq!(port.port.extra_statistics()[0], ("queue_resets", 1));
        assert!(errors(&port) > 9);
        finish(port, &pool);
    });
}

#[test]
fn a_reset_device_is_opened_again_without_a_restart() {
    require!(RDMA);
    under("a_reset_device_is_opened_again_without_a_restart", LOOP, |nics| {
        let pool = Pool::new("fatal", 4096).expect("memory");
        let mut port = start(&pool, |config| (config.rx_queues, config.tx_queues) = (2, 2));
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
            assert_eq!(port.port.extra_statistics()[1], ("device_resets", round));
        }
        finish(port, &pool);
    });
}

#[test]
fn a_port_that_the_kernel_holds_comes_with_the_command_that_frees_it() {
    require!(RDMA);
    let topology = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\nnetdev = 'eth7'\n";
    under("a_port_that_the_kernel_holds_comes_with_the_command_that_frees_it", topology, |nics| {
        let open = || OpenPort::open("dut", Box::new(Options::new("eth7"))).unwrap_or_else(|error| panic!("{error}"));
        drop(open());
        for errno in ["EBUSY", "ENODEV"] {
            nics.order(&format!("kind = 'port-held'\nerrno = '{errno}'"));
            for name in ["mana0", "eth7"] {
                let error = OpenPort::open("dut", Box::new(Options::new(name))).expect_err("held").to_string();
                assert!(error.starts_with(&format!("mana: {name}: ")), "{error}");
                assert!(error.contains("the kernel's network interface eth7 holds the port"), "{error}");
                assert!(error.ends_with("ip link set dev eth7 down"), "{error}");
            }
        }
        nics.order("kind = 'port-freed'");
        let can = open().capabilities();
        assert_eq!((can.driver, can.device.as_str()), ("mana", "eth7"));
        assert!(can.mac.is_some() && can.max_rx_queues >= 2);
        assert!(can.notes.iter().any(|note| note.contains("no flow rules in this hardware")), "{:?}", can.notes);
    });
}

#[test]
fn what_is_not_there_is_named() {
    require!(RDMA);
    let topology = "[[device]]\nkind = 'mana'\nname = 'left'\n[[device.port]]\nnetdev = 'eth8'\n";
    under("what_is_not_there_is_named", topology, |_| {
        let error = OpenPort::open("dut", Box::new(Options::new("eth9"))).expect_err("no such").to_string();
        assert_eq!(
            error,
            "mana: no device 'eth9': no RDMA device of that name or behind that interface; there are left (eth8)"
        );
        let error = OpenPort::open("dut", Box::new(Options::new("left/2"))).expect_err("one port").to_string();
        assert!(error.starts_with("mana: left/2: "), "{error}");
        let first = OpenPort::open("dut", Box::new(Options::new("eth8"))).unwrap();
        let error = OpenPort::open("again", Box::new(Options::new("left"))).expect_err("open already").to_string();
        assert_eq!(error, "mana: left: port 1 of left is open in this program already");
        drop(first);
        OpenPort::open("again", Box::new(Options::new("left"))).unwrap();
    });
}

/// Where the second process finds the socket.
const LOAN: &str = "WIREPATH_MANA_LOAN";

#[test]
fn a_second_process_transmits_and_receives() {
    require!(RDMA);
    // What the second process does; it has the library of the NICs loaded, but opens none.
    if let Some(path) = std::env::var_os(LOAN) {
        return borrow(UnixStream::connect(path).expect("the lender listens"));
    }
    under("a_second_process_transmits_and_receives", LOOP, |nics| {
        let bytes = Arena::bytes(4096).expect("a size");
        let packets = Arc::new(RegionBuilder::new(bytes).shared().map().expect("memory"));
        let path = nics.folder.join("loan");
        let listener = UnixListener::bind(&path).expect("a socket");
        // The second one takes over where a killed one left.
        for killed in [true, false] {
            let shape = Shape { tx_queues: 2, rx_queues: 2, depth: 256, mtu: 9000 };
            let lender = Lender::open(Options::new("mana0"), shape, &packets).unwrap_or_else(|error| panic!("{error}"));
            let mut child = Command::new(std::env::current_exe().expect("a path"))
                .args(["a_second_process_transmits_and_receives", "--exact", "--nocapture"])
                .env(LOAN, &path)
                .env("WIREPATH_MANA_DIE", if killed { "1" } else { "" })
                .spawn()
                .expect("this program starts again");
            let (socket, _) = listener.accept().expect("the borrower connects");
            lender.lend(&socket).expect("lent");
            assert_eq!(child.wait().expect("the borrower ends").success(), !killed);
        }
        assert_eq!(nics.refused(), [""; 0]);
    });
}

fn borrow(socket: UnixStream) {
    let Borrowed { mut rx, mut tx, pool, .. } = Borrowed::take(socket, 9).unwrap_or_else(|error| panic!("{error}"));
    for round in 0..300usize {
        let n = 1 + round % 20;
        let mut batch: Batch =
            (0..n).map(|i| packet(&pool, L3::Ipv4, L4::Udp, 30 + (i * 397 + round) % 8000)).collect();
        let mut want: Vec<usize> = batch.iter().map(Packet::len).collect();
        let (start, mut got) = (Instant::now(), Vec::new());
        while got.len() < n {
            assert!(start.elapsed() < PATIENCE, "round {round}: {} of {n} came back", got.len());
            tx[round % 2].transmit(&mut batch);
            let mut arrived = Batch::new();
            rx.iter_mut().for_each(|queue| {
                queue.receive(&mut arrived);
            });
            for packet in arrived.iter() {
                assert!(is_sound(&bytes(packet)) && packet.in_port() == 9);
                got.push(packet.len());
            }
        }
        got.sort_unstable();
        want.sort_unstable();
        assert_eq!(got, want);
        if round == 150 && std::env::var_os("WIREPATH_MANA_DIE").is_some_and(|die| !die.is_empty()) {
            std::process::abort();
        }
    }
    drop((rx, tx));
    assert_eq!(pool.outstanding(), 0, "buffers that did not come back");
}

/// Bursts of every size, up to jumbo frames, on four queues each way.
fn bursts(name: &str, way: &str) {
    under(name, &format!("{way}{LOOP}"), |nics| {
        let pool = Pool::new("ways", 4096).expect("memory");
        let mut port = start(&pool, |config| (config.rx_queues, config.tx_queues) = (4, 4));
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

#[test]
fn doorbells_served_by_a_thread() {
    require!(RDMA);
    bursts("doorbells_served_by_a_thread", "doorbells = 'queue'\n");
}

#[test]
fn descriptors_fetched_late() {
    require!(RDMA);
    bursts("descriptors_fetched_late", "doorbells = 'queue'\nfetch = 'late'\n");
}

#[test]
fn the_older_kernel_interface() {
    require!(RDMA);
    bursts("the_older_kernel_interface", "abi = 'write'\n");
}

#[test]
fn queues_looked_at_without_doorbells() {
    require!(RDMA);
    bursts("queues_looked_at_without_doorbells", "doorbells = 'scan'\n");
}
