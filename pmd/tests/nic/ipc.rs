//! Queues of a running port in a client process, on emulated NICs of both kinds. The tests check the traffic
//! of the client and the consequences of killing either process.
//!
//! Each test starts itself again in a process with the NICs, which starts the client.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};
use wirepath_packet::PortId;

use wirepath_memory::RegionBuilder;
use wirepath_nic_emulator::launch;
use wirepath_packet::{Arena, Batch, Packet, Pool};
use wirepath_pmd::ipc::{AttachError, AttachRequest, AttachedPort, Status};
use wirepath_pmd::port::{PortEvent, StartedPort};
use wirepath_testlab::{Requirement, require};

use crate::common;

/// Maximum time for an event that must happen. It only ends a hopeless wait.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Environment variable of the client: its role and the path of the socket.
const ROLE: &str = "WIREPATH_TEST_ATTACH";
/// Buffers of the server's pool.
const BUFFERS: u32 = 8192;

/// An emulated NIC and the port on it.
#[derive(Clone, Copy)]
struct Nic {
    driver: &'static str,
    /// Keys of the driver's table.
    keys: &'static str,
    topology: &'static str,
    /// If this exceeds one buffer, every fourth frame has this length.
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
const STRIDING: Nic = Nic { keys: "rx_mode = \"striding\"\n", ..MLX5 };

impl Nic {
    /// Returns the same NIC with frames of several buffers, and with smaller rings.
    const fn long(self) -> Self {
        Self { mtu: 9000, depth: 128, ..self }
    }
}

const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mana.driver");

/// Returns a frame of a flow. Its payload consists of the byte `who`, which identifies the sender.
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

/// Returns the sender of a frame and checks that the frame is intact.
fn sender(packet: &Packet) -> u8 {
    let bytes = packet.segments().collect::<Vec<_>>().concat();
    let (head, payload) = bytes.split_at(42);
    assert_eq!(payload.len() + 8, usize::from(u16::from_be_bytes([head[38], head[39]])));
    assert!(payload.iter().all(|byte| *byte == payload[0]), "a frame of two");
    payload[0]
}

/// The server: a port whose packets return to it and to its clients.
struct Server {
    port: StartedPort,
    pool: Pool,
    socket: PathBuf,
    /// Frames sent, and frames received for each sender.
    sent: u64,
    received: [u64; 256],
    /// Received frames of several buffers, for each sender.
    chains: [u64; 256],
    nic: Nic,
    flow: u16,
    /// Flows of the frames to send; all flows in turn if empty.
    flows: Vec<u16>,
    /// Flows of additional frames, which are not counted.
    uncounted_flows: Vec<u16>,
    /// RSS hashes of the received flows.
    hashes: HashMap<u16, u32>,
    /// Pipe that permits the client to send, and the number of permitted frames.
    permits: Option<(ChildStdin, u64)>,
}

impl Server {
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
            received: [0; 256],
            chains: [0; 256],
            nic,
            flow: 0,
            flows: Vec::new(),
            uncounted_flows: Vec::new(),
            hashes: HashMap::new(),
            permits: None,
        }
    }

    /// Performs one iteration of a program: sends `count` packets, receives, and polls the port's events.
    fn step(&mut self, count: usize) {
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
        if let Some(flow) = self.uncounted_flows.get(usize::from(self.flow) % self.uncounted_flows.len().max(1)) {
            self.port.tx[0].transmit(&mut [frame(self.nic, &self.pool, b'X', *flow)].into_iter().collect());
        }
        for queue in &mut self.port.rx {
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            batch.drain_front(usize::MAX, |packet| {
                let who = usize::from(sender(&packet));
                self.received[who] += 1;
                let flow = u16::from_be_bytes([packet.data()[34], packet.data()[35]]);
                self.hashes.extend(packet.rss_hash().map(|hash| (flow, hash)));
                self.chains[who] += u64::from(packet.is_chain());
            });
        }
        // The packets in flight must not exceed the posted buffers.
        let theirs = self.received[usize::from(b'G')] + self.received[usize::from(b'S')];
        if let Some((pipe, granted)) = &mut self.permits
            && *granted < theirs + 64
        {
            *granted += if pipe.write_all(&[1]).is_ok() { FRAMES_PER_PERMIT as u64 } else { 0 };
        }
        for event in self.port.port.events() {
            assert!(!matches!(event, PortEvent::Lost(_)), "{event:?}");
        }
        self.port.tx[0].reclaim();
    }

    /// Permits a new client to send.
    fn permit_sending(&mut self, child: &mut Child) {
        let theirs = self.received[usize::from(b'G')] + self.received[usize::from(b'S')];
        self.permits = child.stdin.take().map(|pipe| (pipe, theirs));
    }

    /// Iterates until a condition holds.
    fn run_until(&mut self, what: &str, count: usize, mut so: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !so(self) {
            self.step(count);
            let frames = (self.sent, self.received[usize::from(b'F')]);
            assert!(
                start.elapsed() < TIMEOUT,
                "{what}; {frames:?} sent and received; {:?} {:?}",
                self.port.port.extra_statistics(),
                self.port.port.rx_statistics()
            );
        }
    }

    fn statistic(&mut self, name: &str) -> u64 {
        let found = self.port.port.extra_statistics().into_iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("no statistic {name}")).1
    }

    /// Checks that all own frames have returned and that no buffer is missing, and stops the port.
    fn finish(mut self) {
        self.run_until("every frame comes back", 0, |server| server.received[usize::from(b'F')] == server.sent);
        let buried = self.statistic("buried_packets");
        let Self { port: StartedPort { port, rx, tx }, pool, socket, .. } = self;
        drop(port.stop(rx, tx).expect("stops"));
        assert_eq!((pool.outstanding(), buried), (0, 0), "buffers that did not come back");
        assert!(!socket.exists());
    }
}

/// Frames that one byte on the pipe permits.
const FRAMES_PER_PERMIT: usize = 4;

/// Starts this test again as the client.
fn spawn_client(name: &str, role: &str, socket: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{role} {}", socket.display()));
    command.stdin(Stdio::piped()).spawn().expect("this program starts again")
}

/// Runs a test in a process with the NICs, or acts as the client.
fn under(name: &str, nic: Nic, work: impl FnOnce(&Path)) {
    if let Ok(role) = std::env::var(ROLE) {
        let (role, socket) = role.split_once(' ').expect("a role and a socket");
        return attach(nic, role, Path::new(socket));
    }
    // The emulator works in threads: a stopped process must not stop the device.
    launch::run_test(name, nic.topology, || {
        let folder = tempfile::tempdir().unwrap();
        work(folder.path());
    });
}

/// Attaches as soon as the server listens.
fn attached(socket: &Path, wanted: AttachRequest) -> AttachedPort {
    let start = Instant::now();
    loop {
        match AttachedPort::attach(socket, &wanted, PortId::new(9)) {
            Ok(attached) => return attached,
            Err(error) => assert!(start.elapsed() < TIMEOUT && matches!(error, AttachError::Socket(_)), "{error}"),
        }
    }
}

/// The client. Role `forever`: transmits until it is killed. `some`: transmits 500 frames and exits. `both`:
/// transmits and receives. `silent`: does not transmit.
fn attach(nic: Nic, role: &str, socket: &Path) {
    let (both, silent) = (role.ends_with("both"), role.contains("silent"));
    let wanted = AttachRequest { tx_queues: 2, rx_queues: if both { 2 } else { 0 }, buffers: 2500 };
    let mut attached = attached(socket, wanted);
    if role == "holds" {
        let packets: Vec<Packet> = std::iter::from_fn(|| attached.pool.take()).collect();
        assert_eq!(packets.len(), 2500);
        // The client's queues are destroyed when this returns.
        drop(attached);
        std::io::stdin().read_exact(&mut [0]).expect("a grant");
        // Freeing a buffer writes to it.
        drop(packets);
        return;
    }
    let AttachedPort { rx, tx, pool, status, var, .. } = &mut attached;
    assert_eq!((status.pool.name.as_str(), pool.capacity()), ("first", 2500));
    assert!(var.is_ok() || !var.as_ref().unwrap_err().is_empty());
    let who = if role.starts_with("forever") { b'G' } else { b'S' };
    let (mut sent, mut received, mut chains, mut flow) = (0, 0, 0, 0u16);
    // Frames of several buffers arrive here too.
    let wanted_chains = if nic.mtu > 1500 { 10 } else { 0 };
    let start = Instant::now();
    let max_packets = if silent { 0 } else { 500 };
    while who == b'G' || sent < max_packets || both && (received < 100 || chains < wanted_chains) {
        let mut batch = Batch::new();
        if !both {
            std::io::stdin().read_exact(&mut [0]).expect("a grant");
        }
        while !silent && batch.len() < FRAMES_PER_PERMIT && (who == b'G' || sent + batch.len() < max_packets) {
            flow = flow.wrapping_add(1);
            batch.push(frame(nic, pool, who, flow)).expect("room");
        }
        let before = batch.len();
        tx[usize::from(flow % 8 < 4)].transmit(&mut batch);
        sent += before - batch.len();
        tx.iter_mut().for_each(wirepath_pmd::port::TxQueue::reclaim);
        for queue in rx.iter_mut() {
            let mut batch = Batch::new();
            received += queue.receive(&mut batch);
            chains += batch.iter().filter(|packet| packet.is_chain()).count();
            assert!(
                batch
                    .iter()
                    .all(|packet| packet.in_port() == Some(PortId::new(9)) && b"FGSX".contains(&sender(packet)))
            );
        }
        assert!(start.elapsed() < TIMEOUT, "{sent} sent, {received} received");
        std::thread::yield_now();
    }
    // An accepted packet is in flight until its buffer is free.
    while !both && pool.outstanding() > 0 {
        tx.iter_mut().for_each(wirepath_pmd::port::TxQueue::reclaim);
        assert!(start.elapsed() < TIMEOUT, "{} on their way", pool.outstanding());
        std::thread::yield_now();
    }
}

/// A client attaches and is killed; another one attaches and exits.
fn two_clients(name: &str, nic: Nic) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut server = Server::start(nic, folder, 2);
        let mut killed = spawn_client(name, "forever", &server.socket);
        server.permit_sending(&mut killed);
        server.run_until("frames of the second process", 4, |server| server.received[usize::from(b'G')] > 1000);
        assert_eq!((server.statistic("attached_processes"), server.statistic("attachments_lost")), (1, 0));
        killed.kill().expect("a kill");
        killed.wait().expect("an end");
        server.run_until("the end is seen", 4, |server| server.statistic("attachments_lost") == 1);
        assert_eq!(server.statistic("attached_processes"), 0);
        let mut next = spawn_client(name, "some", &server.socket);
        server.permit_sending(&mut next);
        server.run_until("frames of the third process", 4, |server| server.received[usize::from(b'S')] == 500);
        server.run_until("its end", 4, |server| server.statistic("attached_processes") == 0);
        assert!(next.wait().expect("an end").success());
        // The server is not affected: its queues were never reset.
        for (statistic, value) in
            [("attachments", 2), ("attachments_lost", 1), ("queue_resets", 0), ("device_resets", 0)]
        {
            assert_eq!(server.statistic(statistic), value, "{statistic}");
        }
        server.finish();
    });
}

/// Buffers stay leased until the client can no longer write to them.
fn leased_buffers(name: &str, nic: Nic, killed: bool) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut server = Server::start(nic, folder, 1);
        let own = server.pool.outstanding();
        let mut client = spawn_client(name, "holds", &server.socket);
        server.run_until("it is attached", 0, |server| server.statistic("attached_processes") == 1);
        server.run_until("its end", 0, |server| server.statistic("attached_processes") == 0);
        // More iterations than a lease takes to end, with own packets.
        let sent = server.sent;
        server.run_until("turns", 4, |server| server.sent > sent + 2000);
        server.run_until("frames are back", 0, |server| server.received[usize::from(b'F')] == server.sent);
        assert_eq!(server.pool.outstanding(), own + 2500, "{killed}: taken back from a process that has them");
        if killed {
            client.kill().expect("a kill");
        } else {
            client.stdin.as_mut().expect("a pipe").write_all(&[1]).expect("a grant");
        }
        server.run_until("buffers are back", 0, |server| server.pool.outstanding() == own);
        assert_eq!(client.wait().expect("an end").success(), !killed);
        assert_eq!((server.statistic("attachments_lost"), server.statistic("buried_packets")), (0, 0));
        server.finish();
    });
}

#[test]
fn buffers_stay_leased_until_the_last_packet_is_freed() {
    leased_buffers("ipc::buffers_stay_leased_until_the_last_packet_is_freed", MLX5, false);
}

#[test]
fn buffers_stay_leased_until_the_process_exits() {
    leased_buffers("ipc::buffers_stay_leased_until_the_process_exits", MANA, true);
}

#[test]
fn mana_clients_are_killed_and_exit() {
    two_clients("ipc::mana_clients_are_killed_and_exit", MANA);
}

#[test]
fn mlx5_clients_are_killed_and_exit() {
    two_clients("ipc::mlx5_clients_are_killed_and_exit", MLX5);
}

/// Receive queues are shared by both processes. They return to the server after an exit and after a kill.
fn shared_queues(name: &str, nic: Nic, own: u16) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut server = Server::start(nic, folder, own);
        for (role, lost) in [("forever-both", true), ("some-both", false), ("forever-both", true), ("some-both", false)]
        {
            let mut client = spawn_client(name, role, &server.socket);
            server.run_until("a client is attached", 4, |server| server.statistic("attached_processes") == 1);
            if lost {
                let before = server.sent;
                server.run_until("some turns", 4, |server| server.sent > before + 2000);
                client.kill().expect("a kill");
            }
            server.run_until("the end", 4, |server| server.statistic("attached_processes") == 0);
            server.run_until("turns behind it", 4, |server| {
                server.step(0);
                client.try_wait().expect("a look").is_some()
            });
            assert_eq!(client.wait().expect("an end").success(), !lost, "{role}");
        }
        assert_eq!(server.statistic("attachments_lost"), 2);
        assert_eq!((server.statistic("queue_resets"), server.statistic("device_resets")), (0, 0));
        // The server receives everything again, if it has receive queues.
        server.run_until("buffers are back", 0, |server| {
            server.step(0);
            server.pool.outstanding() <= u32::from(own) * 2048
        });
        if own > 0 {
            let (sent, received) = (server.sent, server.received[usize::from(b'F')]);
            server.run_until("frames go out", 4, |server| server.sent >= sent + 400);
            let sent = server.sent - sent;
            server.run_until("and come back", 0, |server| server.received[usize::from(b'F')] >= received + sent);
        }
        if nic.mtu > 1500 {
            let [own, theirs] =
                [&b"F"[..], b"GS"].map(|who| who.iter().map(|&it| server.chains[usize::from(it)]).sum::<u64>());
            assert!(own > 0 && theirs > 0, "{own} and {theirs} frames of several buffers");
        }
        // Frames that arrived while queues were recreated are lost.
        server.sent = server.received[usize::from(b'F')];
        server.finish();
    });
}

/// The server receives all frames to its own queues, while clients take other queues, return them and are
/// killed.
fn separate_queues(name: &str, nic: Nic) {
    require!(RDMA);
    under(name, nic, |folder| {
        let mut server = Server::start(nic, folder, 2);
        server.run_until("hashes of many flows", 4, |server| server.hashes.len() > 400);
        // Of the four queues, the server has the first two.
        let (own, theirs): (Vec<_>, Vec<_>) = server.hashes.iter().partition(|(_, hash)| **hash % 4 < 2);
        let flows = |of: &[(&u16, &u32)]| of.iter().map(|(flow, _)| **flow).collect::<Vec<_>>();
        (server.flows, server.uncounted_flows) = (flows(&own), flows(&theirs));
        assert!(own.len() > 100 && theirs.len() > 100, "{} and {} flows", own.len(), theirs.len());
        server.run_until("frames are back", 0, |server| server.received[usize::from(b'F')] == server.sent);
        let own_buffers = server.pool.outstanding();
        let rounds = [("forever-silent-both", true), ("some-silent-both", false), ("forever-silent-both", true)];
        for (round, (role, killed)) in rounds.into_iter().enumerate() {
            let mut client = spawn_client(name, role, &server.socket);
            server.run_until("a client is attached", 4, |server| server.statistic("attachments") == 1 + round as u64);
            let before = server.sent;
            server.run_until("some turns", 4, |server| server.sent > before + 2000);
            if killed {
                client.kill().expect("a kill");
            }
            server.run_until("the end", 4, |server| server.statistic("attached_processes") == 0);
            server.run_until("turns behind it", 4, |server| {
                client.try_wait().expect("a look").is_some() && server.sent > before
            });
            assert_eq!(client.wait().expect("an end").success(), !killed, "{role}");
            server.run_until("frames and buffers are back", 0, |server| {
                server.received[usize::from(b'F')] == server.sent && server.pool.outstanding() == own_buffers
            });
        }
        assert_eq!((server.statistic("attachments_lost"), server.statistic("queue_resets")), (2, 0));
        // Flows of the former client queues arrive too.
        server.flows.clear();
        server.uncounted_flows.clear();
        let sent = server.sent;
        server.run_until("all flows", 4, |server| server.sent > sent + 1000);
        server.finish();
    });
}

#[test]
fn mlx5_loses_nothing_while_clients_take_queues() {
    separate_queues("ipc::mlx5_loses_nothing_while_clients_take_queues", MLX5);
}

#[test]
fn mlx5_striding_loses_nothing_while_clients_take_queues() {
    separate_queues("ipc::mlx5_striding_loses_nothing_while_clients_take_queues", STRIDING.long());
}

#[test]
fn mana_receives_in_two_processes() {
    shared_queues("ipc::mana_receives_in_two_processes", MANA, 2);
}

#[test]
fn mana_receives_in_the_second_process_only() {
    shared_queues("ipc::mana_receives_in_the_second_process_only", MANA, 0);
}

#[test]
fn mlx5_receives_in_two_processes() {
    shared_queues("ipc::mlx5_receives_in_two_processes", MLX5, 2);
}

#[test]
fn mlx5_striding_receives_in_two_processes() {
    shared_queues("ipc::mlx5_striding_receives_in_two_processes", STRIDING, 1);
}

#[test]
fn mana_jumbo_frames_in_two_processes() {
    shared_queues("ipc::mana_jumbo_frames_in_two_processes", MANA.long(), 2);
}

#[test]
fn mlx5_jumbo_frames_in_two_processes() {
    shared_queues("ipc::mlx5_jumbo_frames_in_two_processes", MLX5.long(), 2);
}

#[test]
fn mlx5_striding_jumbo_frames_in_two_processes() {
    shared_queues("ipc::mlx5_striding_jumbo_frames_in_two_processes", STRIDING.long(), 1);
}

#[test]
fn malformed_and_excessive_requests_are_refused() {
    require!(RDMA);
    const NAME: &str = "ipc::malformed_and_excessive_requests_are_refused";
    under(NAME, MLX5, |folder| {
        let mut server = Server::start(MLX5, folder, 1);
        let socket = server.socket.clone();
        let wants = |server: &mut Server, wanted: AttachRequest| {
            let socket = server.socket.clone();
            let asks = std::thread::spawn(move || {
                AttachedPort::attach(&socket, &wanted, PortId::new(1)).map(drop).unwrap_err().to_string()
            });
            server.run_until("an answer", 0, |_| asks.is_finished());
            asks.join().expect("an answer")
        };
        let wanted = AttachRequest { tx_queues: 1, rx_queues: 0, buffers: 100 };
        for (wanted, why) in [
            (
                AttachRequest { tx_queues: 3, ..wanted },
                "3 transmit queues requested; at most 2 are offered (`attach_tx_queues` of the port)",
            ),
            (
                AttachRequest { rx_queues: 3, ..wanted },
                "3 receive queues requested; at most 2 are offered (`attach_rx_queues` of the port)",
            ),
            (
                AttachRequest { buffers: 3001, ..wanted },
                "3001 buffers requested; at most 3000 are offered (`attach_buffers` of the port)",
            ),
        ] {
            assert_eq!(wants(&mut server, wanted), format!("the server refused the request: {why}"));
        }
        let seen = {
            let socket = socket.clone();
            let looks = std::thread::spawn(move || AttachedPort::query(&socket).unwrap());
            server.run_until("an answer", 4, |_| looks.is_finished());
            looks.join().expect("an answer")
        };
        let Status { device, driver, port, tx, rx, .. } = &seen;
        assert_eq!((device.as_str(), driver.as_str(), *port, tx.len(), rx.len()), ("dut", "mlx5", 0, 1, 1));
        assert_eq!((seen.pool.name.as_str(), seen.pool.buffers, seen.attached_ever), ("first", BUFFERS, 0));
        assert_eq!(seen.process, std::process::id());
        // Invalid messages of many lengths, including the empty one.
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..60usize {
            let mut stranger = UnixStream::connect(&socket).expect("a socket");
            let mut bytes: Vec<u8> = (0..round * 3).map(|_| random.u8(..)).collect();
            match round % 3 {
                0 => bytes.splice(0..0, 12u32.to_le_bytes()).for_each(drop),
                1 => bytes.splice(0..0, *b"\x10\0\0\0wpattach\x03\0\"Look\"").for_each(drop),
                _ => {}
            }
            let _ = stranger.write_all(&bytes);
            server.step(4);
            stranger.set_nonblocking(true).expect("a switch");
            let mut answer = Vec::new();
            let _ = stranger.read_to_end(&mut answer);
            let text = String::from_utf8_lossy(&answer);
            assert!(!text.contains("Attached"), "{text}");
            if round % 3 == 1 {
                server.run_until("an answer", 0, |_| {
                    let _ = stranger.read_to_end(&mut answer);
                    String::from_utf8_lossy(&answer).contains("uses version 3")
                });
            }
        }
        server.run_until("the invalid connections are closed", 4, |server| server.received[usize::from(b'F')] > 400);
        assert_eq!((server.statistic("attachments"), server.statistic("attachments_lost")), (0, 0));
        server.finish();
        // The socket is in use; a pool that is not shared cannot be offered.
        let table = |path: &Path| {
            format!("driver = \"mlx5\"\ndevice = \"dut\"\n[port.mlx5]\nattach = \"{}\"\n", path.display())
        };
        let listener = std::os::unix::net::UnixListener::bind(&socket).expect("a socket");
        let region = RegionBuilder::new(Arena::bytes(BUFFERS).unwrap()).shared().map().unwrap();
        let pool = Arena::in_region(region).pool("second", BUFFERS).unwrap();
        let error = common::start(&table(&socket), &pool).expect_err("taken").to_string();
        assert!(
            error.contains("cannot listen for clients on") && error.contains("another program listens there"),
            "{error}"
        );
        drop(listener);
        let error = common::start(&table(&socket), &common::pool()).expect_err("not shared").to_string();
        assert!(error.contains("`shared = true` in `[pool]`"), "{error}");
    });
}

#[test]
fn a_client_sees_that_the_server_was_killed() {
    require!(RDMA);
    const NAME: &str = "ipc::a_client_sees_that_the_server_was_killed";
    if std::env::var(ROLE).is_ok_and(|role| role.starts_with("port ")) {
        let role = std::env::var(ROLE).unwrap();
        let folder = Path::new(role.split_once(' ').unwrap().1).parent().unwrap().to_owned();
        let mut server = Server::start(MLX5, &folder, 1);
        // Until the process is killed, but not for ever.
        let start = Instant::now();
        while start.elapsed() < 2 * TIMEOUT {
            server.step(1);
        }
        return;
    }
    under(NAME, MLX5, |folder| {
        let socket = folder.join("port.sock");
        for round in 0..2 {
            // In the second round, the socket file of the first one still exists.
            let mut port = spawn_client(NAME, "port", &socket);
            let wanted = AttachRequest { tx_queues: 1, rx_queues: 0, buffers: 200 };
            let mut attached = attached(&socket, wanted);
            assert!(attached.is_live());
            let mut batch: Batch = (0..8).map(|flow| frame(MLX5, &attached.pool, b'S', flow)).collect();
            attached.tx[0].transmit(&mut batch);
            assert!(batch.is_empty(), "{round}");
            port.kill().expect("a kill");
            port.wait().expect("an end");
            assert!(!attached.is_live());
            assert_eq!(attached.end_reason(), Some("the server process is gone"));
            assert!(socket.exists());
        }
    });
}
