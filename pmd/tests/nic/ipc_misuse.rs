//! Misbehaving clients. They write arbitrary bytes into the memory of queues, their own and the server's, and
//! send invalid messages. Further tests check what a client sees when the server's device fails.
//!
//! Each test starts itself again in a process with the NICs, which starts the client. The client implements
//! the protocol itself.

// UNSAFETY: the misbehaving client writes to memory that was passed to it.
#![allow(unsafe_code)]

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common;
use crate::emulated::{self, EmulatedNic, Nics, statistic};
use serde_json::{Value, json};
use wirepath_memory::{Region, RegionBuilder, fd_passing};
use wirepath_packet::PortId;
use wirepath_packet::{Arena, Batch, Pool, PtypeL3, PtypeL4};
use wirepath_pmd::ipc::{AttachRequest, AttachedPort};
use wirepath_pmd::port::{PortEvent, StartedPort};
use wirepath_testlab::{Requirement, require};

const RDMA: Requirement = Requirement::File("/etc/libibverbs.d/mana.driver");
/// Maximum time for an event that must happen. It only ends a hopeless wait.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Environment variable of the client: its role and the path of the socket.
const ROLE: &str = "WIREPATH_TEST_HOSTILE";
/// Buffers of the server's pool, and of a lease.
const BUFFERS: u32 = 8192;
const LEASED: u32 = 2500;

const MLX5: EmulatedNic = EmulatedNic { driver: "mlx5", device: "dut", modes: &[""] };
const STRIDING: EmulatedNic = EmulatedNic { modes: &["rx_mode = 'striding'\n"], ..MLX5 };
const MANA: EmulatedNic = EmulatedNic { driver: "mana", device: "dut", modes: &[""] };

/// The server, whose frames return to it.
struct Server<'n> {
    nics: &'n Nics,
    port: StartedPort,
    pool: Pool,
    socket: PathBuf,
    events: Vec<PortEvent>,
    /// Frames sent, received intact, and received otherwise.
    sent: u64,
    received: u64,
    corrupted: u64,
}

impl<'n> Server<'n> {
    fn start(kind: EmulatedNic, nics: &'n Nics) -> Self {
        let socket = nics.folder.join("port.sock");
        let region = RegionBuilder::new(Arena::bytes(BUFFERS).unwrap()).shared().map().unwrap();
        let pool = Arena::in_region(region).pool("first", BUFFERS).unwrap();
        let settings = format!(
            "{}attach = '{}'\nattach_tx_queues = 2\nattach_rx_queues = 2\nattach_buffers = 3000\ntx_timeout = 1\n",
            kind.modes[0],
            socket.display()
        );
        let port = kind.start(&pool, &settings, |config| (config.rx_queues, config.mtu, config.depth) = (2, 1500, 256));
        Self { nics, port, pool, socket, events: Vec::new(), sent: 0, received: 0, corrupted: 0 }
    }

    /// Performs one iteration of a program.
    fn step(&mut self, count: usize) {
        let packets = (0..count).map(|i| emulated::packet(&self.pool, PtypeL3::Ipv4, PtypeL4::Udp, 30 + 97 * i));
        let mut batch: Batch = packets.collect();
        self.port.tx[0].transmit(&mut batch);
        self.sent += (count - batch.len()) as u64;
        for queue in &mut self.port.rx {
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            for packet in batch.iter() {
                let bytes = common::bytes(packet);
                let whole = bytes.len() > 42 && bytes[42..].iter().enumerate().all(|(i, byte)| *byte == (i * 7) as u8);
                *(if whole { &mut self.received } else { &mut self.corrupted }) += 1;
            }
        }
        self.events.extend(self.port.port.events());
        let other_loss =
            |event: &PortEvent| matches!(event, PortEvent::Lost(why) if !why.ends_with("reported a fatal error"));
        assert!(!self.events.iter().any(other_loss), "{:?}", self.events);
        self.port.tx[0].reclaim();
    }

    /// Iterates until a condition holds.
    fn run_until(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            self.step(4);
            if start.elapsed() > TIMEOUT {
                let port = &mut self.port.port;
                let figures = (port.extra_statistics(), port.rx_statistics(), port.tx_statistics());
                panic!("{what}; {figures:?}; {}", self.nics.request("counters"));
            }
        }
    }

    fn statistic(&mut self, name: &str) -> u64 {
        statistic(&mut self.port, name)
    }

    /// Starts a client and waits until it is attached.
    fn attached_client(&mut self, name: &str, role: &str) -> Child {
        let client = spawn_client(name, role, &self.socket);
        let sign = attached_sign(&self.socket);
        self.run_until("it is attached", |_| sign.exists());
        std::fs::remove_file(sign).expect("a file");
        assert_eq!(self.statistic("attached_processes"), 1);
        client
    }

    /// Checks that frames sent from now on return.
    fn flows(&mut self) {
        let received = self.received;
        self.run_until("frames come back", |server| server.received > received + 200);
    }

    fn finish(mut self) {
        let buried = self.statistic("buried_packets");
        let Self { port: StartedPort { port, rx, tx }, pool, .. } = self;
        drop(port.stop(rx, tx).expect("stops"));
        assert_eq!((pool.outstanding(), buried), (0, 0), "buffers that did not come back");
    }
}

/// Starts this test again as the client.
fn spawn_client(name: &str, role: &str, socket: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, format!("{role} {}", socket.display())).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).spawn().expect("this program starts again")
}

/// Runs a test in a process with the NICs, or acts as the client.
fn under(name: &str, kind: EmulatedNic, work: impl FnOnce(&mut Server<'_>), client: impl FnOnce(&str, &Path)) {
    if let Ok(role) = std::env::var(ROLE) {
        let (role, socket) = role.split_once(' ').expect("a role and a socket");
        return client(role, Path::new(socket));
    }
    kind.under(name, "", |nics| {
        let mut server = Server::start(kind, nics);
        server.flows();
        work(&mut server);
        server.flows();
        server.finish();
    });
}

/// Encodes a message.
fn message(what: &Value) -> Vec<u8> {
    [b"wpattach\x02\0".as_slice(), what.to_string().as_bytes()].concat()
}

/// Sends a request and returns the answer.
fn ask(socket: &UnixStream, what: &Value) -> (Value, Vec<OwnedFd>) {
    fd_passing::send(socket, &message(what), &[]).expect("a request");
    let (bytes, files) = fd_passing::receive(socket).expect("an answer");
    (serde_json::from_slice(&bytes[10..]).expect("an answer"), files)
}

fn wanted(rx_queues: u16) -> Value {
    json!({"Attach": {"tx_queues": 2, "rx_queues": rx_queues, "buffers": LEASED}})
}

/// Attaches without the library. Returns the socket and the memory of all queues.
fn attach_by_hand(socket: &Path, rx_queues: u16) -> (UnixStream, Vec<Region>) {
    let socket = UnixStream::connect(socket).expect("a socket");
    let (answer, files) = ask(&socket, &wanted(rx_queues));
    let description = &answer["Attached"];
    let regions = description["regions"].as_u64().expect("regions") as usize;
    (socket, files.into_iter().skip(2).take(regions).map(|file| Region::from_memfd(file).expect("memory")).collect())
}

/// Writes into the memory of all queues until the process is killed. It avoids valid addresses with valid
/// keys: a process that can write descriptors can make the device write to any such address.
fn corrupt_queues(role: &str, socket: &Path) {
    let (_socket, regions) = attach_by_hand(socket, if role.ends_with("both") { 2 } else { 0 });
    let mut random = fastrand::Rng::with_seed(1);
    // The used part of the regions, as words.
    let words: Vec<&[AtomicU64]> = regions
        .iter()
        .map(|region| {
            // SAFETY: the region is page-aligned, stays mapped until the process ends, and is accessed by
            // atomics only.
            unsafe { std::slice::from_raw_parts(region.base().as_ptr().cast(), region.bytes() / 8) }
        })
        .collect();
    loop {
        for words in &words {
            let used = words.iter().rposition(|word| word.load(Ordering::Relaxed) != 0).map_or(0, |last| last + 1);
            for _ in 0..used.div_ceil(64) {
                let at = random.usize(..used);
                let value = match random.u8(..4) {
                    0 => 0,
                    1 => u64::MAX,
                    // Another counter value, in either byte order.
                    2 => words[at].load(Ordering::Relaxed) ^ 1 << random.u32(56..64),
                    _ => random.u64(..),
                };
                // Odd words of segments and requests are addresses. A partial address is invalid.
                let is_address = at % 2 == 1 && value != 0 && value != u64::MAX;
                words[at].store(if is_address { random.u64(..) | 1 << 63 } else { value }, Ordering::Relaxed);
            }
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// Corrupted queue memory costs queue resets and nothing else.
fn corrupted_queues(name: &str, kind: EmulatedNic) {
    require!(RDMA);
    under(
        name,
        kind,
        |server| {
            for role in ["alone", "both", "alone"] {
                let (lost, own) = (server.statistic("attachments_lost"), server.pool.outstanding());
                let mut client = spawn_client(name, role, &server.socket);
                server.run_until("it is attached", |server| server.statistic("attached_processes") == 1);
                let resets = server.statistic("queue_resets");
                server.run_until("queues are made anew", |server| server.statistic("queue_resets") > resets + 20);
                client.kill().expect("a kill");
                client.wait().expect("an end");
                server.run_until("its end", |server| server.statistic("attachments_lost") > lost);
                server.flows();
                server.run_until("its buffers are back", |server| {
                    server.step(0);
                    server.pool.outstanding() <= own + 64
                });
            }
            eprintln!(
                "{} sent, {} came back, {} odd; {:?}",
                server.sent,
                server.received,
                server.corrupted,
                server.port.port.extra_statistics()
            );
        },
        corrupt_queues,
    );
}

#[test]
fn corrupted_queue_memory_of_mlx5() {
    corrupted_queues("ipc_misuse::corrupted_queue_memory_of_mlx5", MLX5);
}

#[test]
fn corrupted_queue_memory_of_mlx5_with_strides() {
    corrupted_queues("ipc_misuse::corrupted_queue_memory_of_mlx5_with_strides", STRIDING);
}

#[test]
fn corrupted_queue_memory_of_mana() {
    corrupted_queues("ipc_misuse::corrupted_queue_memory_of_mana", MANA);
}

/// Sets all doorbell records to zero, which means "nothing posted", and exits.
fn zero_doorbell_records(_: &str, socket: &Path) {
    let (_socket, regions) = attach_by_hand(socket, 0);
    for region in &regions {
        // SAFETY: the region is page-aligned, stays mapped until the process ends, and is accessed by atomics
        // only.
        let words: &[AtomicU64] =
            unsafe { std::slice::from_raw_parts(region.base().as_ptr().cast(), region.bytes() / 8) };
        for page in words.chunks(512) {
            // Records are at the beginning of a page whose remainder is empty.
            if page[256..].iter().all(|word| word.load(Ordering::Relaxed) == 0) {
                page.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            }
        }
    }
    std::fs::write(attached_sign(socket), "").expect("a file");
}

#[test]
fn a_queue_survives_zeroed_doorbell_records() {
    require!(RDMA);
    const NAME: &str = "ipc_misuse::a_queue_survives_zeroed_doorbell_records";
    if let Ok(role) = std::env::var(ROLE) {
        return zero_doorbell_records("", Path::new(role.split_once(' ').expect("a socket").1));
    }
    STRIDING.under(NAME, "", |nics| {
        // Nothing has arrived yet, so a zero record means an empty ring.
        let mut server = Server::start(STRIDING, nics);
        let mut client = spawn_client(NAME, "once", &server.socket);
        let sign = attached_sign(&server.socket);
        let start = Instant::now();
        while !sign.exists() {
            drop(server.port.port.events());
            assert!(start.elapsed() < TIMEOUT, "it does nothing");
        }
        assert!(client.wait().expect("an end").success());
        server.flows();
        assert_eq!(server.statistic("queue_resets"), 0);
        server.run_until("its end", |server| server.statistic("attachments_lost") == 1);
        server.run_until("its buffers are back", |server| {
            server.step(0);
            server.pool.outstanding() <= 4096
        });
        server.finish();
    });
}

/// Requests that are out of order, truncated or endless, from processes that exit at each step of attaching.
fn misbehaving_clients(name: &str, kind: EmulatedNic) {
    require!(RDMA);
    under(
        name,
        kind,
        |server| {
            let own = server.pool.outstanding();
            let say = |stranger: &UnixStream, what: &Value| {
                let _ = fd_passing::send(stranger, &message(what), &[]);
            };
            for round in 0..12usize {
                let mut stranger = UnixStream::connect(&server.socket).expect("a socket");
                let attached = server.statistic("attached_processes");
                match round % 6 {
                    // `Done` before anything else, and twice.
                    0 => (0..2).for_each(|_| say(&stranger, &json!("Done"))),
                    // Two requests at once; a request after `Done`.
                    1 => (0..2).for_each(|_| say(&stranger, &wanted(1))),
                    2 => [wanted(0), json!("Done"), wanted(0)].iter().for_each(|what| say(&stranger, what)),
                    // The process exits while its queues are being created, after a different number of
                    // iterations each time.
                    3 => {
                        say(&stranger, &wanted(2));
                        (0..round).for_each(|_| server.step(1));
                    }
                    // Attached, then a partial message and nothing more.
                    4 => {
                        say(&stranger, &wanted(1));
                        server.run_until("attached", |server| server.statistic("attached_processes") > attached);
                        let _ = stranger.write_all(&[200, 0, 0, 0, b'w']);
                    }
                    // Attached, then endless bytes.
                    _ => {
                        say(&stranger, &wanted(0));
                        server.run_until("attached", |server| server.statistic("attached_processes") > attached);
                        let _ = stranger.write_all(&[0xff; 4096]);
                    }
                }
                let sent = server.sent;
                server.run_until("turns", |server| server.sent > sent + 100);
                stranger.set_nonblocking(true).expect("a switch");
                let mut answer = Vec::new();
                let end = stranger.read_to_end(&mut answer);
                let ends = [0, 1, 2, 5].contains(&(round % 6));
                assert!(!ends || !answer.is_empty(), "{round}: the error is reported");
                assert!(
                    end.is_ok()
                        || end
                            .is_err_and(|error| error.kind() == ErrorKind::WouldBlock
                                || error.kind() == ErrorKind::ConnectionReset)
                );
                drop(stranger);
                server.run_until("it is forgotten", |server| server.statistic("attached_processes") == 0);
                server.run_until("its buffers are back", |server| {
                    server.step(0);
                    server.pool.outstanding() <= own + 64
                });
            }
            // More silent connections than are accepted at a time. Later clients wait for them, but the
            // traffic does not.
            let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&server.socket).expect("a socket")).collect();
            server.flows();
            drop(silent);
            let mut client = spawn_client(name, "look", &server.socket);
            server.run_until("an answer", |_| client.try_wait().expect("a look").is_some());
            assert!(client.wait().expect("an end").success());
        },
        |_, socket| drop(AttachedPort::query(socket).expect("an answer")),
    );
}

#[test]
fn misbehaving_clients_of_mlx5() {
    misbehaving_clients("ipc_misuse::misbehaving_clients_of_mlx5", MLX5);
}

#[test]
fn misbehaving_clients_of_mana() {
    misbehaving_clients("ipc_misuse::misbehaving_clients_of_mana", MANA);
}

/// Sends and receives with the library until the port is gone. Then prints the reason.
fn well_behaved_client(role: &str, socket: &Path) {
    let rx_queues = if role == "both" { 2 } else { 0 };
    let wanted = AttachRequest { tx_queues: 1, rx_queues, buffers: LEASED };
    let mut attached = AttachedPort::attach(socket, &wanted, PortId::new(9)).expect("a loan");
    std::fs::write(attached_sign(socket), "").expect("a file");
    let start = Instant::now();
    while attached.is_live() {
        let packet = emulated::packet(&attached.pool, PtypeL3::Ipv4, PtypeL4::Udp, 30);
        let mut batch: Batch = [packet].into_iter().collect();
        attached.tx[0].transmit(&mut batch);
        attached.tx[0].reclaim();
        for queue in &mut attached.rx {
            queue.receive(&mut batch);
            batch.clear();
        }
        // Limits the packets in flight to the posted buffers.
        std::thread::sleep(Duration::from_micros(200));
        assert!(start.elapsed() < TIMEOUT, "the end was not reported");
    }
    println!("why: {}", attached.end_reason().expect("a reason"));
    // The client may continue to use its queues: no packet moves and nothing fails.
    for _ in 0..100 {
        let mut batch: Batch = attached.pool.take().into_iter().collect();
        attached.tx[0].transmit(&mut batch);
        attached.tx[0].reclaim();
        for queue in &mut attached.rx {
            queue.receive(&mut batch);
        }
    }
    let begin = Instant::now();
    drop(attached);
    assert!(begin.elapsed() < TIMEOUT / 2);
    println!("left");
}

/// Returns the file that a client creates when it is attached.
fn attached_sign(socket: &Path) -> PathBuf {
    socket.with_file_name("here")
}

fn output_of(client: &mut Child) -> String {
    let mut said = String::new();
    client.stdout.take().expect("a pipe").read_to_string(&mut said).expect("what it says");
    said
}

/// The device fails while a client is attached. The client is informed, the port recovers, and the buffers
/// return.
fn device_reset(name: &str, kind: EmulatedNic) {
    require!(RDMA);
    under(
        name,
        kind,
        |server| {
            for (round, role) in ["alone", "both", "both"].into_iter().enumerate() {
                let own = server.pool.outstanding();
                let mut client = server.attached_client(name, role);
                server.flows();
                server.nics.inject("kind = 'device-fatal'");
                server.run_until("the device is back", |server| server.statistic("device_resets") == round as u64 + 1);
                server.run_until("the guest ends", |_| client.try_wait().expect("a look").is_some());
                let said = output_of(&mut client);
                assert!(client.wait().expect("an end").success(), "{said}");
                assert!(said.contains("why: ") && said.contains("fatal error") && said.contains("left"), "{said}");
                server.flows();
                server.run_until("its buffers are back", |server| {
                    server.step(0);
                    server.pool.outstanding() <= own + 64
                });
                assert_eq!(server.statistic("attached_processes"), 0);
            }
        },
        well_behaved_client,
    );
}

#[test]
fn mlx5_device_reset_with_a_client() {
    device_reset("ipc_misuse::mlx5_device_reset_with_a_client", MLX5);
}

#[test]
fn mana_device_reset_with_a_client() {
    device_reset("ipc_misuse::mana_device_reset_with_a_client", MANA);
}

/// The link goes down while a client is attached. The client only sees that no frames arrive. It is informed
/// when the port stops.
fn link_loss(name: &str, kind: EmulatedNic) {
    require!(RDMA);
    under(
        name,
        kind,
        |server| {
            let mut client = server.attached_client(name, "both");
            for _ in 0..3 {
                server.flows();
                for (order, wanted) in
                    [("down", wirepath_pmd::port::LinkState::Down), ("up", wirepath_pmd::port::LinkState::Up)]
                {
                    server.nics.inject(&format!("kind = 'port-{order}'"));
                    server.events.clear();
                    server.run_until("the link changes", |server| {
                        server.events.iter().any(|event| matches!(event, PortEvent::Link(link) if link.state == wanted))
                    });
                    let sent = server.sent;
                    let begin = Instant::now();
                    server.run_until("turns", |server| {
                        server.sent > sent + 100 || begin.elapsed() > Duration::from_millis(300)
                    });
                }
            }
            server.flows();
            assert_eq!((server.statistic("attached_processes"), server.statistic("attachments_lost")), (1, 0));
            assert!(client.try_wait().expect("a look").is_none());
            client.kill().expect("a kill");
            client.wait().expect("an end");
            server.run_until("it is forgotten", |server| server.statistic("attached_processes") == 0);
        },
        well_behaved_client,
    );
}

#[test]
fn mlx5_link_loss_with_a_client() {
    link_loss("ipc_misuse::mlx5_link_loss_with_a_client", MLX5);
}

#[test]
fn mana_link_loss_with_a_client() {
    link_loss("ipc_misuse::mana_link_loss_with_a_client", MANA);
}
