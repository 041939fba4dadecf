//! Queues of a running port in another process, on emulated NICs of both kinds: what is sent and received there, and what becomes of it when
//! either process is killed. Each test starts itself again in a process with the NICs, and that one starts the other.

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use wirepath_memory::RegionBuilder;
use wirepath_nic_emulator::launch;
use wirepath_pmd::attach::{AttachError, Attached, Status, Wanted};
use wirepath_pmd::packet::{Arena, Batch, Packet, Pool};
use wirepath_pmd::port::{PortEvent, StartedPort};
use wirepath_testlab::{Need, require};

/// How long something that must happen may take: it only ends a hopeless wait.
const PATIENCE: Duration = Duration::from_secs(20);
/// Says, in the second process, what it does and where the socket is.
const ROLE: &str = "WIREPATH_TEST_ATTACH";
/// Buffers of the first process's pool.
const BUFFERS: u32 = 8192;

/// A kind of NIC.
#[derive(Clone, Copy)]
struct Nic {
    driver: &'static str,
    /// Keys of its table.
    keys: &'static str,
    topology: &'static str,
    /// With more than one buffer holds, every fourth frame is as long as that.
    mtu: u16,
    depth: u32,
}

const MANA: Nic = Nic {
    driver: "mana",
    keys: "",
    topology: "[[device]]\nkind = 'mana'\nname = 'dut'\n[[device.port]]\nlink = 'loop'\n",
    mtu: 1500,
    depth: 256,
};
const MLX5: Nic = Nic {
    driver: "mlx5",
    keys: "",
    topology: "[[device]]\nkind = 'mlx5'\nname = 'dut'\n[[device.port]]\nlink = 'loop'\n",
    mtu: 1500,
    depth: 256,
};
const STRIDING: Nic = Nic { keys: "receive = \"striding\"\n", ..MLX5 };

impl Nic {
    /// The same with frames that take several buffers, and fewer of them at a time.
    const fn long(self) -> Self {
        Self { mtu: 9000, depth: 128, ..self }
    }
}

const RDMA: Need = Need::File("/etc/libibverbs.d/mana.driver");

/// A frame of one of many flows; `who` sent it.
fn frame(nic: Nic, pool: &Pool, who: u8, flow: u16) -> Packet {
    let payload = if nic.mtu > 1500 && flow.is_multiple_of(4) { nic.mtu - 28 } else { 20 + flow % 1400 };
    let [high, low] = (28 + payload).to_be_bytes();
    let mut bytes = vec![2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 8, 0];
    bytes.extend([0x45, 0, high, low, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend(flow.to_be_bytes());
    bytes.extend([0x12, 0xb5]);
    bytes.extend((8 + payload).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.resize(bytes.len() + usize::from(payload), who);
    let mut packet = pool.take().expect("a buffer");
    assert!(packet.extend_from_slice(&bytes, pool), "buffers");
    packet
}

/// Who sent a frame, which has arrived whole.
fn sender(packet: &Packet) -> u8 {
    let bytes = packet.segments().collect::<Vec<_>>().concat();
    let (head, payload) = bytes.split_at(42);
    assert_eq!(payload.len() + 8, usize::from(u16::from_be_bytes([head[38], head[39]])));
    assert!(payload.iter().all(|byte| *byte == payload[0]), "a frame of two");
    payload[0]
}

/// A port of the first process, whose packets come back to it, and to whoever is attached.
struct First {
    port: StartedPort,
    pool: Pool,
    socket: PathBuf,
    /// Frames sent, and received by sender.
    sent: u64,
    got: [u64; 256],
    /// Those of several buffers.
    chains: [u64; 256],
    nic: Nic,
    flow: u16,
    /// What the next frames are of; all flows in turn, if there are none.
    flows: Vec<u16>,
    /// Flows of frames in between, which nobody counts.
    others: Vec<u16>,
    /// Flows and hashes of what came.
    hashes: HashMap<u16, u32>,
    /// By which the second process is told that it may send, and how many frames so far.
    grants: Option<(ChildStdin, u64)>,
}

impl First {
    fn start(nic: Nic, folder: &Path, rx_queues: u16) -> Self {
        let socket = folder.join("port.sock");
        let region = RegionBuilder::new(Arena::bytes(BUFFERS).unwrap()).shared().map().unwrap();
        let pool = Arena::in_region(region).pool("first", BUFFERS).unwrap();
        let table = format!(
            "driver = \"{0}\"\ndevice = \"dut\"\ndepth = {3}\nmtu = {4}\n[port.{0}]\n{1}attach = \"{2}\"\n\
             attach_tx_queues = 2\nattach_rx_queues = 2\nattach_buffers = 3000\n",
            nic.driver,
            nic.keys,
            socket.display(),
            nic.depth,
            nic.mtu
        );
        let port = common::start_with(&table, &pool, |config| config.rx_queues = rx_queues);
        let port = port.unwrap_or_else(|error| panic!("{error}"));
        Self {
            port,
            pool,
            socket,
            sent: 0,
            got: [0; 256],
            chains: [0; 256],
            nic,
            flow: 0,
            flows: Vec::new(),
            others: Vec::new(),
            hashes: HashMap::new(),
            grants: None,
        }
    }

    /// One turn of a program: some packets out, whatever there is in, and a look at the port.
    fn turn(&mut self, count: usize) {
        let mut batch: Batch = (0..count)
            .map(|_| {
                self.flow = self.flow.wrapping_add(1);
                let flow =
                    self.flows.get(usize::from(self.flow) % self.flows.len().max(1)).copied().unwrap_or(self.flow);
                frame(self.nic, &self.pool, b'F', flow)
            })
            .collect();
        self.port.tx[0].transmit(&mut batch);
        self.sent += (count - batch.len()) as u64;
        if let Some(flow) = self.others.get(usize::from(self.flow) % self.others.len().max(1)) {
            self.port.tx[0].transmit(&mut [frame(self.nic, &self.pool, b'X', *flow)].into_iter().collect());
        }
        for queue in &mut self.port.rx {
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            batch.drain_front(usize::MAX, |packet| {
                let who = usize::from(sender(&packet));
                self.got[who] += 1;
                let flow = u16::from_be_bytes([packet.data()[34], packet.data()[35]]);
                self.hashes.extend(packet.rss_hash().map(|hash| (flow, hash)));
                self.chains[who] += u64::from(packet.is_chain());
            });
        }
        // Never more on their way than there are buffers for.
        let theirs = self.got[usize::from(b'G')] + self.got[usize::from(b'S')];
        if let Some((pipe, granted)) = &mut self.grants
            && *granted < theirs + 64
        {
            *granted += if pipe.write_all(&[1]).is_ok() { GRANT as u64 } else { 0 };
        }
        for event in self.port.port.events() {
            assert!(!matches!(event, PortEvent::Lost(_)), "{event:?}");
        }
        self.port.tx[0].reclaim();
    }

    /// Allows a new process to send.
    fn grant(&mut self, child: &mut Child) {
        let theirs = self.got[usize::from(b'G')] + self.got[usize::from(b'S')];
        self.grants = child.stdin.take().map(|pipe| (pipe, theirs));
    }

    /// Turns until something is so.
    fn until(&mut self, what: &str, count: usize, mut so: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !so(self) {
            self.turn(count);
            let frames = (self.sent, self.got[usize::from(b'F')]);
            assert!(
                start.elapsed() < PATIENCE,
                "{what}; {frames:?} sent and received; {:?} {:?}",
                self.port.port.extra_statistics(),
                self.port.port.rx_statistics()
            );
        }
    }

    fn statistic(&mut self, name: &str) -> u64 {
        let found = self.port.port.extra_statistics().into_iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("no figure {name}")).1
    }

    /// Everything of its own came back, and nothing is left behind.
    fn finish(mut self) {
        self.until("every frame comes back", 0, |first| first.got[usize::from(b'F')] == first.sent);
        let buried = self.statistic("buried_packets");
        let Self { port: StartedPort { port, rx, tx }, pool, socket, .. } = self;
        drop(port.stop(rx, tx).expect("stops"));
        assert_eq!((pool.outstanding(), buried), (0, 0), "buffers that did not come back");
        assert!(!socket.exists());
    }
}

/// Frames that a byte allows.
const GRANT: usize = 4;

/// Starts this test again as the second process.
fn second(name: &str, role: &str, socket: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{role} {}", socket.display()));
    command.stdin(Stdio::piped()).spawn().expect("this program starts again")
}

/// Runs a test in a process with the NICs, or does what the second process is for.
fn under(name: &str, nic: Nic, work: impl FnOnce(&Path)) {
    if let Ok(role) = std::env::var(ROLE) {
        let (role, socket) = role.split_once(' ').expect("a role and a socket");
        return attach(nic, role, Path::new(socket));
    }
    // By threads: a process that stops to wait must not keep the device from working.
    launch::under(name, nic.topology, || {
        let folder = tempfile::tempdir().unwrap();
        work(folder.path());
    });
}

/// Attaches as soon as somebody listens.
fn attached(socket: &Path, wanted: Wanted) -> Attached {
    let start = Instant::now();
    loop {
        match Attached::attach(socket, &wanted, 9) {
            Ok(attached) => return attached,
            Err(error) => assert!(start.elapsed() < PATIENCE && matches!(error, AttachError::Socket(_)), "{error}"),
        }
    }
}

/// The second process. `forever`: transmits until it is killed. `some`: transmits 500 frames and goes. `both`: transmits and receives.
/// `silent`: does not transmit.
fn attach(nic: Nic, role: &str, socket: &Path) {
    let (both, silent) = (role.ends_with("both"), role.contains("silent"));
    let wanted = Wanted { tx_queues: 2, rx_queues: if both { 2 } else { 0 }, buffers: 2500 };
    let mut attached = attached(socket, wanted);
    if role == "holds" {
        let packets: Vec<Packet> = std::iter::from_fn(|| attached.pool.take()).collect();
        assert_eq!(packets.len(), 2500);
        // Its queues have ended when this returns.
        drop(attached);
        std::io::stdin().read_exact(&mut [0]).expect("a grant");
        // What is free is written to as well.
        drop(packets);
        return;
    }
    let Attached { rx, tx, pool, status, var, .. } = &mut attached;
    assert_eq!((status.pool.name.as_str(), pool.capacity()), ("first", 2500));
    assert!(var.is_ok() || !var.as_ref().unwrap_err().is_empty());
    let who = if role.starts_with("forever") { b'G' } else { b'S' };
    let (mut sent, mut got, mut chains, mut flow) = (0, 0, 0, 0u16);
    // Long ones come here as well.
    let wanted_chains = if nic.mtu > 1500 { 10 } else { 0 };
    let start = Instant::now();
    let most = if silent { 0 } else { 500 };
    while who == b'G' || sent < most || both && (got < 100 || chains < wanted_chains) {
        let mut batch = Batch::new();
        if !both {
            std::io::stdin().read_exact(&mut [0]).expect("a grant");
        }
        while !silent && batch.len() < GRANT && (who == b'G' || sent + batch.len() < most) {
            flow = flow.wrapping_add(1);
            batch.push(frame(nic, pool, who, flow)).expect("room");
        }
        let before = batch.len();
        tx[usize::from(flow % 8 < 4)].transmit(&mut batch);
        sent += before - batch.len();
        tx.iter_mut().for_each(wirepath_pmd::port::TxQueue::reclaim);
        for queue in rx.iter_mut() {
            let mut batch = Batch::new();
            got += queue.receive(&mut batch);
            chains += batch.iter().filter(|packet| packet.is_chain()).count();
            assert!(batch.iter().all(|packet| packet.in_port() == 9 && b"FGSX".contains(&sender(packet))));
        }
        assert!(start.elapsed() < PATIENCE, "{sent} sent, {got} received");
        std::thread::yield_now();
    }
    // What was accepted is on its way until its buffer is back.
    while !both && pool.outstanding() > 0 {
        tx.iter_mut().for_each(wirepath_pmd::port::TxQueue::reclaim);
        assert!(start.elapsed() < PATIENCE, "{} on their way", pool.outstanding());
        std::thread::yield_now();
    }
}

/// One process attaches and is killed, another attaches and goes by itself.
fn two_guests(name: &str, nic: Nic) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut first = First::start(nic, folder, 2);
        let mut killed = second(name, "forever", &first.socket);
        first.grant(&mut killed);
        first.until("frames of the second process", 4, |first| first.got[usize::from(b'G')] > 1000);
        assert_eq!((first.statistic("attached_processes"), first.statistic("attachments_lost")), (1, 0));
        killed.kill().expect("a kill");
        killed.wait().expect("an end");
        first.until("the end is seen", 4, |first| first.statistic("attachments_lost") == 1);
        assert_eq!(first.statistic("attached_processes"), 0);
        let mut next = second(name, "some", &first.socket);
        first.grant(&mut next);
        first.until("frames of the third process", 4, |first| first.got[usize::from(b'S')] == 500);
        first.until("its end", 4, |first| first.statistic("attached_processes") == 0);
        assert!(next.wait().expect("an end").success());
        // The first has noticed nothing: its queues are the ones that it began with.
        for (figure, value) in [("attachments", 2), ("attachments_lost", 1), ("queue_resets", 0), ("device_resets", 0)]
        {
            assert_eq!(first.statistic(figure), value, "{figure}");
        }
        first.finish();
    });
}

/// Buffers are lent until nothing in the other process can write to them.
fn held(name: &str, nic: Nic, killed: bool) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut first = First::start(nic, folder, 1);
        let own = first.pool.outstanding();
        let mut guest = second(name, "holds", &first.socket);
        first.until("it is attached", 0, |first| first.statistic("attached_processes") == 1);
        first.until("its end", 0, |first| first.statistic("attached_processes") == 0);
        // More turns than a loan takes to come back, with packets of its own.
        let sent = first.sent;
        first.until("turns", 4, |first| first.sent > sent + 2000);
        first.until("frames are back", 0, |first| first.got[usize::from(b'F')] == first.sent);
        assert_eq!(first.pool.outstanding(), own + 2500, "{killed}: taken back from a process that has them");
        if killed {
            guest.kill().expect("a kill");
        } else {
            guest.stdin.as_mut().expect("a pipe").write_all(&[1]).expect("a grant");
        }
        first.until("buffers are back", 0, |first| first.pool.outstanding() == own);
        assert_eq!(guest.wait().expect("an end").success(), !killed);
        assert_eq!((first.statistic("attachments_lost"), first.statistic("buried_packets")), (0, 0));
        first.finish();
    });
}

#[test]
fn buffers_are_lent_until_the_last_packet_is_gone() {
    held("buffers_are_lent_until_the_last_packet_is_gone", MLX5, false);
}

#[test]
fn buffers_are_lent_until_the_process_is_gone() {
    held("buffers_are_lent_until_the_process_is_gone", MANA, true);
}

#[test]
fn mana_is_used_by_a_process_that_is_killed() {
    two_guests("mana_is_used_by_a_process_that_is_killed", MANA);
}

#[test]
fn mlx5_is_used_by_a_process_that_is_killed() {
    two_guests("mlx5_is_used_by_a_process_that_is_killed", MLX5);
}

/// Receive queues are spread over both processes, come back, and come back from one that was killed.
fn spread(name: &str, nic: Nic, own: u16) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut first = First::start(nic, folder, own);
        for (role, lost) in [("forever-both", true), ("some-both", false), ("forever-both", true), ("some-both", false)]
        {
            let mut guest = second(name, role, &first.socket);
            first.until("somebody attached", 4, |first| first.statistic("attached_processes") == 1);
            if lost {
                let before = first.sent;
                first.until("some turns", 4, |first| first.sent > before + 2000);
                guest.kill().expect("a kill");
            }
            first.until("the end", 4, |first| first.statistic("attached_processes") == 0);
            first.until("turns behind it", 4, |first| {
                first.turn(0);
                guest.try_wait().expect("a look").is_some()
            });
            assert_eq!(guest.wait().expect("an end").success(), !lost, "{role}");
        }
        assert_eq!(first.statistic("attachments_lost"), 2);
        assert_eq!((first.statistic("queue_resets"), first.statistic("device_resets")), (0, 0));
        // Everything is received here again, where there is somebody to receive it.
        first.until("buffers are back", 0, |first| {
            first.turn(0);
            first.pool.outstanding() <= u32::from(own) * 2048
        });
        if own > 0 {
            let (sent, got) = (first.sent, first.got[usize::from(b'F')]);
            first.until("frames go out", 4, |first| first.sent >= sent + 400);
            let sent = first.sent - sent;
            first.until("and come back", 0, |first| first.got[usize::from(b'F')] >= got + sent);
        }
        if nic.mtu > 1500 {
            let [own, theirs] =
                [&b"F"[..], b"GS"].map(|who| who.iter().map(|&it| first.chains[usize::from(it)]).sum::<u64>());
            assert!(own > 0 && theirs > 0, "{own} and {theirs} frames of several buffers");
        }
        // What came while queues were made anew is lost.
        first.sent = first.got[usize::from(b'F')];
        first.finish();
    });
}

/// What comes to queues of its own, the first process receives whole: while others take queues beside them, give them back, are killed.
fn undisturbed(name: &str, nic: Nic) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut first = First::start(nic, folder, 2);
        first.until("hashes of many flows", 4, |first| first.hashes.len() > 400);
        // Of four queues, those of the first process are the first two.
        let (own, theirs): (Vec<_>, Vec<_>) = first.hashes.iter().partition(|(_, hash)| **hash % 4 < 2);
        let flows = |of: &[(&u16, &u32)]| of.iter().map(|(flow, _)| **flow).collect::<Vec<_>>();
        (first.flows, first.others) = (flows(&own), flows(&theirs));
        assert!(own.len() > 100 && theirs.len() > 100, "{} and {} flows", own.len(), theirs.len());
        first.until("frames are back", 0, |first| first.got[usize::from(b'F')] == first.sent);
        let own_buffers = first.pool.outstanding();
        let rounds = [("forever-silent-both", true), ("some-silent-both", false), ("forever-silent-both", true)];
        for (round, (role, killed)) in rounds.into_iter().enumerate() {
            let mut guest = second(name, role, &first.socket);
            first.until("somebody attached", 4, |first| first.statistic("attachments") == 1 + round as u64);
            let before = first.sent;
            first.until("some turns", 4, |first| first.sent > before + 2000);
            if killed {
                guest.kill().expect("a kill");
            }
            first.until("the end", 4, |first| first.statistic("attached_processes") == 0);
            first.until("turns behind it", 4, |first| {
                guest.try_wait().expect("a look").is_some() && first.sent > before
            });
            assert_eq!(guest.wait().expect("an end").success(), !killed, "{role}");
            first.until("frames and buffers are back", 0, |first| {
                first.got[usize::from(b'F')] == first.sent && first.pool.outstanding() == own_buffers
            });
        }
        assert_eq!((first.statistic("attachments_lost"), first.statistic("queue_resets")), (2, 0));
        // And everything that belongs to no queue of theirs any more.
        first.flows.clear();
        first.others.clear();
        let sent = first.sent;
        first.until("all flows", 4, |first| first.sent > sent + 1000);
        first.finish();
    });
}

#[test]
fn mlx5_loses_nothing_while_others_take_receive_queues() {
    undisturbed("mlx5_loses_nothing_while_others_take_receive_queues", MLX5);
}

#[test]
fn mlx5_in_strides_loses_nothing_while_others_take_receive_queues() {
    undisturbed("mlx5_in_strides_loses_nothing_while_others_take_receive_queues", STRIDING.long());
}

#[test]
fn mana_receives_in_two_processes() {
    spread("mana_receives_in_two_processes", MANA, 2);
}

#[test]
fn mana_receives_in_the_second_process_only() {
    spread("mana_receives_in_the_second_process_only", MANA, 0);
}

#[test]
fn mlx5_receives_in_two_processes() {
    spread("mlx5_receives_in_two_processes", MLX5, 2);
}

#[test]
fn mlx5_receives_in_strides_in_two_processes() {
    spread("mlx5_receives_in_strides_in_two_processes", STRIDING, 1);
}

#[test]
fn long_frames_of_mana_are_sent_and_received_in_two_processes() {
    spread("long_frames_of_mana_are_sent_and_received_in_two_processes", MANA.long(), 2);
}

#[test]
fn long_frames_of_mlx5_are_sent_and_received_in_two_processes() {
    spread("long_frames_of_mlx5_are_sent_and_received_in_two_processes", MLX5.long(), 2);
}

#[test]
fn long_frames_of_mlx5_in_strides_are_sent_and_received_in_two_processes() {
    spread("long_frames_of_mlx5_in_strides_are_sent_and_received_in_two_processes", STRIDING.long(), 1);
}

#[test]
fn foreign_bytes_and_wishes_that_are_not_offered_are_refused() {
    require!(RDMA);
    const NAME: &str = "foreign_bytes_and_wishes_that_are_not_offered_are_refused";
    under(NAME, MLX5, |folder| {
        let mut first = First::start(MLX5, folder, 1);
        let socket = first.socket.clone();
        let wants = |first: &mut First, wanted: Wanted| {
            let socket = first.socket.clone();
            let asks =
                std::thread::spawn(move || Attached::attach(&socket, &wanted, 1).map(drop).unwrap_err().to_string());
            first.until("an answer", 0, |_| asks.is_finished());
            asks.join().expect("an answer")
        };
        let wanted = Wanted { tx_queues: 1, rx_queues: 0, buffers: 100 };
        for (wanted, why) in [
            (
                Wanted { tx_queues: 3, ..wanted },
                "3 transmit queues; at most 2 are offered (`attach_tx_queues` of the port)",
            ),
            (
                Wanted { rx_queues: 3, ..wanted },
                "3 receive queues; at most 2 are offered (`attach_rx_queues` of the port)",
            ),
            (
                Wanted { buffers: 3001, ..wanted },
                "3001 buffers; at most 3000 are offered (`attach_buffers` of the port)",
            ),
        ] {
            assert_eq!(wants(&mut first, wanted), format!("the process with the port refuses: {why}"));
        }
        let seen = {
            let socket = socket.clone();
            let looks = std::thread::spawn(move || Attached::look(&socket).unwrap());
            first.until("an answer", 4, |_| looks.is_finished());
            looks.join().expect("an answer")
        };
        let Status { device, driver, port, tx, rx, .. } = &seen;
        assert_eq!((device.as_str(), driver.as_str(), *port, tx.len(), rx.len()), ("dut", "mlx5", 0, 1, 1));
        assert_eq!((seen.pool.name.as_str(), seen.pool.buffers, seen.attached_ever), ("first", BUFFERS, 0));
        assert_eq!(seen.process, std::process::id());
        // Bytes that are no messages, in one piece and in many, and nothing at all.
        let mut state = 7u64;
        for round in 0..60usize {
            let mut stranger = UnixStream::connect(&socket).expect("a socket");
            let mut bytes = Vec::new();
            for _ in 0..round * 3 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                bytes.push((state >> 56) as u8);
            }
            match round % 3 {
                0 => bytes.splice(0..0, 12u32.to_le_bytes()).for_each(drop),
                1 => bytes.splice(0..0, *b"\x10\0\0\0wpattach\x03\0\"Look\"").for_each(drop),
                _ => {}
            }
            let _ = stranger.write_all(&bytes);
            first.turn(4);
            stranger.set_nonblocking(true).expect("a switch");
            let mut answer = Vec::new();
            let _ = stranger.read_to_end(&mut answer);
            let text = String::from_utf8_lossy(&answer);
            assert!(!text.contains("Attached"), "{text}");
            if round % 3 == 1 {
                first.until("an answer", 0, |_| {
                    let _ = stranger.read_to_end(&mut answer);
                    String::from_utf8_lossy(&answer).contains("speaks version 3")
                });
            }
        }
        first.until("the strangers are gone", 4, |first| first.got[usize::from(b'F')] > 400);
        assert_eq!((first.statistic("attachments"), first.statistic("attachments_lost")), (0, 0));
        first.finish();
        // Somebody else listens there; packets that are nobody else's cannot be offered.
        let table = |path: &Path| {
            format!("driver = \"mlx5\"\ndevice = \"dut\"\n[port.mlx5]\nattach = \"{}\"\n", path.display())
        };
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        let region = RegionBuilder::new(Arena::bytes(BUFFERS).unwrap()).shared().map().unwrap();
        let pool = Arena::in_region(region).pool("second", BUFFERS).unwrap();
        let error = common::start(&table(&socket), &pool).expect_err("taken").to_string();
        assert!(error.contains("cannot be offered on") && error.contains("in use"), "{error}");
        drop(listener);
        let error = common::start(&table(&socket), &common::pool()).expect_err("not shared").to_string();
        assert!(error.contains("`[pool] shared = true`"), "{error}");
    });
}

#[test]
fn a_process_whose_port_is_killed_sees_it() {
    require!(RDMA);
    const NAME: &str = "a_process_whose_port_is_killed_sees_it";
    if std::env::var(ROLE).is_ok_and(|role| role.starts_with("port ")) {
        let role = std::env::var(ROLE).unwrap();
        let folder = Path::new(role.split_once(' ').unwrap().1).parent().unwrap().to_owned();
        let mut first = First::start(MLX5, &folder, 1);
        // Until it is killed, but not for ever.
        let start = Instant::now();
        while start.elapsed() < 2 * PATIENCE {
            first.turn(1);
        }
        return;
    }
    under(NAME, MLX5, |folder| {
        let socket = folder.join("port.sock");
        for round in 0..2 {
            // The second time, what the first has left on the disk is in the way.
            let mut port = second(NAME, "port", &socket);
            let wanted = Wanted { tx_queues: 1, rx_queues: 0, buffers: 200 };
            let mut attached = attached(&socket, wanted);
            assert!(attached.is_live());
            let mut batch: Batch = (0..8).map(|flow| frame(MLX5, &attached.pool, b'S', flow)).collect();
            attached.tx[0].transmit(&mut batch);
            assert!(batch.is_empty(), "{round}");
            port.kill().expect("a kill");
            port.wait().expect("an end");
            assert!(!attached.is_live());
            assert_eq!(attached.why_ended(), Some("it is gone"));
            assert!(socket.exists());
        }
    });
}
