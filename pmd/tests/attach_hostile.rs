//! A process that is attached and writes what it likes: into the memory of queues, its own and the first process's, and over the socket. And
//! what an attached process sees when the device of the first fails. Each test starts itself again in a process with the NICs, and that one
//! starts the other, which speaks the protocol by hand.

// UNSAFETY: the hostile process writes to memory that was passed to it.
#![allow(unsafe_code)]

#[path = "common/nic.rs"]
mod nic;

use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nic::{Kind, Nics, figure};
use serde_json::{Value, json};
use wirepath_memory::{Region, RegionBuilder, passing};
use wirepath_pmd::attach::{Attached, Wanted};
use wirepath_pmd::packet::{Arena, Batch, L3, L4, Pool};
use wirepath_pmd::port::{PortEvent, StartedPort};
use wirepath_testlab::{Need, require};

const RDMA: Need = Need::File("/etc/libibverbs.d/mana.driver");
/// How long something that must happen may take: it only ends a hopeless wait.
const PATIENCE: Duration = Duration::from_secs(30);
/// Says, in the second process, what it does and where the socket is.
const ROLE: &str = "WIREPATH_TEST_HOSTILE";
/// Buffers of the first process's pool, and of a loan.
const BUFFERS: u32 = 8192;
const LENT: u32 = 2500;

const MLX5: Kind = Kind { driver: "mlx5", device: "dut", modes: &[""] };
const STRIDING: Kind = Kind { modes: &["receive = 'striding'\n"], ..MLX5 };
const MANA: Kind = Kind { driver: "mana", device: "dut", modes: &[""] };

/// The process with the port, whose frames come back to it.
struct First<'n> {
    nics: &'n Nics,
    port: StartedPort,
    pool: Pool,
    socket: PathBuf,
    events: Vec<PortEvent>,
    /// Frames sent, received whole, and others.
    sent: u64,
    got: u64,
    odd: u64,
}

impl<'n> First<'n> {
    fn start(kind: Kind, nics: &'n Nics) -> Self {
        let socket = nics.folder.join("port.sock");
        let region = RegionBuilder::new(Arena::bytes(BUFFERS).unwrap()).shared().map().unwrap();
        let pool = Arena::in_region(region).pool("first", BUFFERS).unwrap();
        let settings = format!(
            "{}attach = '{}'\nattach_tx_queues = 2\nattach_rx_queues = 2\nattach_buffers = 3000\nseconds_stalled = 1\n",
            kind.modes[0],
            socket.display()
        );
        let port = kind.start(&pool, &settings, |config| (config.rx_queues, config.mtu, config.depth) = (2, 1500, 256));
        Self { nics, port, pool, socket, events: Vec::new(), sent: 0, got: 0, odd: 0 }
    }

    /// One turn of a program.
    fn turn(&mut self, count: usize) {
        let packets = (0..count).map(|i| nic::packet(&self.pool, L3::Ipv4, L4::Udp, 30 + 97 * i));
        let mut batch: Batch = packets.collect();
        self.port.tx[0].transmit(&mut batch);
        self.sent += (count - batch.len()) as u64;
        for queue in &mut self.port.rx {
            let mut batch = Batch::new();
            queue.receive(&mut batch);
            for packet in batch.iter() {
                let bytes = nic::bytes(packet);
                let whole = bytes.len() > 42 && bytes[42..].iter().enumerate().all(|(i, byte)| *byte == (i * 7) as u8);
                *(if whole { &mut self.got } else { &mut self.odd }) += 1;
            }
        }
        self.events.extend(self.port.port.events());
        assert!(!self.events.iter().any(|event| matches!(event, PortEvent::Lost(_))), "{:?}", self.events);
        self.port.tx[0].reclaim();
    }

    /// Turns until something is so.
    fn until(&mut self, what: &str, mut so: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !so(self) {
            self.turn(4);
            if start.elapsed() > PATIENCE {
                let port = &mut self.port.port;
                let figures = (port.extra_statistics(), port.rx_statistics(), port.tx_statistics());
                panic!("{what}; {figures:?}; {}", self.nics.ask("counters"));
            }
        }
    }

    fn figure(&mut self, name: &str) -> u64 {
        figure(&mut self.port, name)
    }

    /// Starts a guest, and waits until it has all that it wants.
    fn honest_guest(&mut self, name: &str, role: &str) -> Child {
        let guest = second(name, role, &self.socket);
        let sign = here(&self.socket);
        self.until("it is attached", |_| sign.exists());
        std::fs::remove_file(sign).expect("a file");
        assert_eq!(self.figure("attached_processes"), 1);
        guest
    }

    /// Frames come back, those sent from now on.
    fn flows(&mut self) {
        let got = self.got;
        self.until("frames come back", |first| first.got > got + 200);
    }

    fn finish(mut self) {
        let buried = self.figure("buried_packets");
        let Self { port: StartedPort { port, rx, tx }, pool, .. } = self;
        drop(port.stop(rx, tx).expect("stops"));
        assert_eq!((pool.outstanding(), buried), (0, 0), "buffers that did not come back");
    }
}

/// Starts this test again as the second process.
fn second(name: &str, role: &str, socket: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, format!("{role} {}", socket.display())).stdin(Stdio::piped());
    command.stdout(Stdio::piped()).spawn().expect("this program starts again")
}

/// Runs a test in a process with the NICs, or what the second process is for.
fn under(name: &str, kind: Kind, work: impl FnOnce(&mut First<'_>), guest: impl FnOnce(&str, &Path)) {
    if let Ok(role) = std::env::var(ROLE) {
        let (role, socket) = role.split_once(' ').expect("a role and a socket");
        return guest(role, Path::new(socket));
    }
    kind.under(name, "", |nics| {
        let mut first = First::start(kind, nics);
        first.flows();
        work(&mut first);
        first.flows();
        first.finish();
    });
}

/// The bytes of a message.
fn message(what: &Value) -> Vec<u8> {
    [b"wpattach\x02\0".as_slice(), what.to_string().as_bytes()].concat()
}

/// Asks, and hears.
fn ask(socket: &UnixStream, what: &Value) -> (Value, Vec<OwnedFd>) {
    passing::send(socket, &message(what), &[]).expect("a request");
    let (bytes, files) = passing::receive(socket).expect("an answer");
    (serde_json::from_slice(&bytes[10..]).expect("an answer"), files)
}

fn wanted(rx_queues: u16) -> Value {
    json!({"Attach": {"tx_queues": 2, "rx_queues": rx_queues, "buffers": LENT}})
}

/// Attaches by hand: the socket and the memory of all queues.
fn attach_by_hand(socket: &Path, rx_queues: u16) -> (UnixStream, Vec<Region>) {
    let socket = UnixStream::connect(socket).expect("a socket");
    let (answer, files) = ask(&socket, &wanted(rx_queues));
    let description = &answer["Attached"];
    let regions = description["regions"].as_u64().expect("regions") as usize;
    (socket, files.into_iter().skip(2).take(regions).map(|file| Region::attach(file).expect("memory")).collect())
}

fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Writes into the memory of all queues, until it is killed. Nothing that a descriptor points to with the right key is among it: where the
/// device may write, whoever can write descriptors decides.
fn scribble(role: &str, socket: &Path) {
    let (_socket, regions) = attach_by_hand(socket, if role.ends_with("both") { 2 } else { 0 });
    let mut state = 0x9e37_79b9_7f4a_7c15;
    // What is in use, as words.
    let words: Vec<&[AtomicU64]> = regions
        .iter()
        .map(|region| {
            // SAFETY: the region is mapped for as long as this process lives, is aligned, and is reached by atomics only.
            unsafe { std::slice::from_raw_parts(region.base().as_ptr().cast(), region.bytes() / 8) }
        })
        .collect();
    loop {
        for words in &words {
            let used = words.iter().rposition(|word| word.load(Ordering::Relaxed) != 0).map_or(0, |last| last + 1);
            for _ in 0..used.div_ceil(64) {
                let at = next(&mut state) as usize % used;
                let value = match next(&mut state) % 4 {
                    0 => 0,
                    1 => u64::MAX,
                    // Another counter, in either order of bytes.
                    2 => words[at].load(Ordering::Relaxed) ^ 1 << (56 + next(&mut state) % 8),
                    _ => next(&mut state),
                };
                // The second words of segments and of requests are addresses; half an address is none.
                let is_address = at % 2 == 1 && value != 0 && value != u64::MAX;
                words[at].store(if is_address { next(&mut state) | 1 << 63 } else { value }, Ordering::Relaxed);
            }
        }
        std::thread::sleep(Duration::from_millis(3));
    }
}

/// What another process writes into queue memory costs queues, and nothing else.
fn scribbled(name: &str, kind: Kind) {
    require!(RDMA);
    under(
        name,
        kind,
        |first| {
            for role in ["alone", "both", "alone"] {
                let (lost, own) = (first.figure("attachments_lost"), first.pool.outstanding());
                let mut guest = second(name, role, &first.socket);
                first.until("it is attached", |first| first.figure("attached_processes") == 1);
                let resets = first.figure("queue_resets");
                first.until("queues are made anew", |first| first.figure("queue_resets") > resets + 20);
                guest.kill().expect("a kill");
                guest.wait().expect("an end");
                first.until("its end", |first| first.figure("attachments_lost") > lost);
                first.flows();
                first.until("its buffers are back", |first| {
                    first.turn(0);
                    first.pool.outstanding() <= own + 64
                });
            }
            eprintln!(
                "{} sent, {} came back, {} odd; {:?}",
                first.sent,
                first.got,
                first.odd,
                first.port.port.extra_statistics()
            );
        },
        scribble,
    );
}

#[test]
fn words_in_queues_of_mlx5() {
    scribbled("words_in_queues_of_mlx5", MLX5);
}

#[test]
fn words_in_queues_of_mlx5_with_strides() {
    scribbled("words_in_queues_of_mlx5_with_strides", STRIDING);
}

#[test]
fn words_in_queues_of_mana() {
    scribbled("words_in_queues_of_mana", MANA);
}

/// Makes all doorbell records say that nothing is posted, once, and goes.
fn zeroes_records(_: &str, socket: &Path) {
    let (_socket, regions) = attach_by_hand(socket, 0);
    for region in &regions {
        // SAFETY: as above.
        let words: &[AtomicU64] =
            unsafe { std::slice::from_raw_parts(region.base().as_ptr().cast(), region.bytes() / 8) };
        for page in words.chunks(512) {
            // Records lie at the beginning of a page, and the rest of it is empty.
            if page[256..].iter().all(|word| word.load(Ordering::Relaxed) == 0) {
                page.iter().for_each(|word| word.store(0, Ordering::Relaxed));
            }
        }
    }
    std::fs::write(here(socket), "").expect("a file");
}

#[test]
fn a_queue_of_which_the_device_believes_that_nothing_is_posted_goes_on() {
    require!(RDMA);
    const NAME: &str = "a_queue_of_which_the_device_believes_that_nothing_is_posted_goes_on";
    if let Ok(role) = std::env::var(ROLE) {
        return zeroes_records("", Path::new(role.split_once(' ').expect("a socket").1));
    }
    STRIDING.under(NAME, "", |nics| {
        // Nothing has arrived yet: a record of zero is one of an empty ring.
        let mut first = First::start(STRIDING, nics);
        let mut guest = second(NAME, "once", &first.socket);
        let sign = here(&first.socket);
        let start = Instant::now();
        while !sign.exists() {
            drop(first.port.port.events());
            assert!(start.elapsed() < PATIENCE, "it does nothing");
        }
        assert!(guest.wait().expect("an end").success());
        first.flows();
        assert_eq!(first.figure("queue_resets"), 0);
        first.until("its end", |first| first.figure("attachments_lost") == 1);
        first.until("its buffers are back", |first| {
            first.turn(0);
            first.pool.outstanding() <= 4096
        });
        first.finish();
    });
}

/// Requests out of order, cut short, without an end, by processes that go at every step of an attachment.
fn strange_guests(name: &str, kind: Kind) {
    require!(RDMA);
    under(
        name,
        kind,
        |first| {
            let own = first.pool.outstanding();
            let say = |stranger: &UnixStream, what: &Value| {
                let _ = passing::send(stranger, &message(what), &[]);
            };
            for round in 0..12usize {
                let mut stranger = UnixStream::connect(&first.socket).expect("a socket");
                let attached = first.figure("attached_processes");
                match round % 6 {
                    // Done before anything, and twice.
                    0 => (0..2).for_each(|_| say(&stranger, &json!("Done"))),
                    // Two wishes at once; a wish behind the end.
                    1 => (0..2).for_each(|_| say(&stranger, &wanted(1))),
                    2 => [wanted(0), json!("Done"), wanted(0)].iter().for_each(|what| say(&stranger, what)),
                    // Gone while its queues are being made, at a different turn each time.
                    3 => {
                        say(&stranger, &wanted(2));
                        (0..round).for_each(|_| first.turn(1));
                    }
                    // Attached, then half a message, then nothing.
                    4 => {
                        say(&stranger, &wanted(1));
                        first.until("attached", |first| first.figure("attached_processes") > attached);
                        let _ = stranger.write_all(&[200, 0, 0, 0, b'w']);
                    }
                    // Attached, and then bytes without an end.
                    _ => {
                        say(&stranger, &wanted(0));
                        first.until("attached", |first| first.figure("attached_processes") > attached);
                        let _ = stranger.write_all(&[0xff; 4096]);
                    }
                }
                let sent = first.sent;
                first.until("turns", |first| first.sent > sent + 100);
                stranger.set_nonblocking(true).expect("a switch");
                let mut answer = Vec::new();
                let end = stranger.read_to_end(&mut answer);
                let ends = [0, 1, 2, 5].contains(&(round % 6));
                assert!(!ends || !answer.is_empty(), "{round}: it is told why");
                assert!(
                    end.is_ok()
                        || end
                            .is_err_and(|error| error.kind() == ErrorKind::WouldBlock
                                || error.kind() == ErrorKind::ConnectionReset)
                );
                drop(stranger);
                first.until("it is forgotten", |first| first.figure("attached_processes") == 0);
                first.until("its buffers are back", |first| {
                    first.turn(0);
                    first.pool.outstanding() <= own + 64
                });
            }
            // More strangers than are let in at a time, who say nothing: whoever comes next waits for them, and the traffic does not.
            let silent: Vec<_> = (0..20).map(|_| UnixStream::connect(&first.socket).expect("a socket")).collect();
            first.flows();
            drop(silent);
            let mut guest = second(name, "look", &first.socket);
            first.until("an answer", |_| guest.try_wait().expect("a look").is_some());
            assert!(guest.wait().expect("an end").success());
        },
        |_, socket| drop(Attached::look(socket).expect("an answer")),
    );
}

#[test]
fn strange_guests_of_mlx5() {
    strange_guests("strange_guests_of_mlx5", MLX5);
}

#[test]
fn strange_guests_of_mana() {
    strange_guests("strange_guests_of_mana", MANA);
}

/// Sends and receives by the library until the port is gone, then says why it ended, and whether by itself.
fn honest(role: &str, socket: &Path) {
    let rx_queues = if role == "both" { 2 } else { 0 };
    let wanted = Wanted { tx_queues: 1, rx_queues, buffers: LENT };
    let mut attached = Attached::attach(socket, &wanted, 9).expect("a loan");
    std::fs::write(here(socket), "").expect("a file");
    let start = Instant::now();
    while attached.is_live() {
        let packet = nic::packet(&attached.pool, L3::Ipv4, L4::Udp, 30);
        let mut batch: Batch = [packet].into_iter().collect();
        attached.tx[0].transmit(&mut batch);
        attached.tx[0].reclaim();
        for queue in &mut attached.rx {
            queue.receive(&mut batch);
            batch.clear();
        }
        // Not more on their way than there are buffers for.
        std::thread::sleep(Duration::from_micros(200));
        assert!(start.elapsed() < PATIENCE, "nobody says that it is over");
    }
    println!("why: {}", attached.why_ended().expect("a reason"));
    // It may go on using what it has: it moves nothing, and nothing breaks.
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
    assert!(begin.elapsed() < PATIENCE / 2);
    println!("left");
}

/// What a guest leaves when it has all that it was lent.
fn here(socket: &Path) -> PathBuf {
    socket.with_file_name("here")
}

fn reads(guest: &mut Child) -> String {
    let mut said = String::new();
    guest.stdout.take().expect("a pipe").read_to_string(&mut said).expect("what it says");
    said
}

/// The device fails while somebody is attached, who is told; the port comes back, and so do the buffers.
fn fatal(name: &str, kind: Kind) {
    require!(RDMA);
    under(
        name,
        kind,
        |first| {
            for (round, role) in ["alone", "both", "both"].into_iter().enumerate() {
                let own = first.pool.outstanding();
                let mut guest = first.honest_guest(name, role);
                first.flows();
                first.nics.order("kind = 'device-fatal'");
                first.until("the device is back", |first| first.figure("device_resets") == round as u64 + 1);
                first.until("the guest ends", |_| guest.try_wait().expect("a look").is_some());
                let said = reads(&mut guest);
                assert!(guest.wait().expect("an end").success(), "{said}");
                assert!(said.contains("why: ") && said.contains("fatal error") && said.contains("left"), "{said}");
                first.flows();
                first.until("its buffers are back", |first| {
                    first.turn(0);
                    first.pool.outstanding() <= own + 64
                });
                assert_eq!(first.figure("attached_processes"), 0);
            }
        },
        honest,
    );
}

#[test]
fn a_device_of_mlx5_fails_while_somebody_is_attached() {
    fatal("a_device_of_mlx5_fails_while_somebody_is_attached", MLX5);
}

#[test]
fn a_device_of_mana_fails_while_somebody_is_attached() {
    fatal("a_device_of_mana_fails_while_somebody_is_attached", MANA);
}

/// The link goes while somebody is attached, who notices nothing but that nothing comes; the port stops, and whoever is attached is told.
fn link(name: &str, kind: Kind) {
    require!(RDMA);
    under(
        name,
        kind,
        |first| {
            let mut guest = first.honest_guest(name, "both");
            for _ in 0..3 {
                first.flows();
                for (order, wanted) in
                    [("down", wirepath_pmd::port::LinkState::Down), ("up", wirepath_pmd::port::LinkState::Up)]
                {
                    first.nics.order(&format!("kind = 'port-{order}'"));
                    first.events.clear();
                    first.until("the link changes", |first| {
                        first.events.iter().any(|event| matches!(event, PortEvent::Link(link) if link.state == wanted))
                    });
                    let sent = first.sent;
                    let begin = Instant::now();
                    first.until("turns", |first| {
                        first.sent > sent + 100 || begin.elapsed() > Duration::from_millis(300)
                    });
                }
            }
            first.flows();
            assert_eq!((first.figure("attached_processes"), first.figure("attachments_lost")), (1, 0));
            assert!(guest.try_wait().expect("a look").is_none());
            guest.kill().expect("a kill");
            guest.wait().expect("an end");
            first.until("it is forgotten", |first| first.figure("attached_processes") == 0);
        },
        honest,
    );
}

#[test]
fn a_link_of_mlx5_goes_while_somebody_is_attached() {
    link("a_link_of_mlx5_goes_while_somebody_is_attached", MLX5);
}

#[test]
fn a_link_of_mana_goes_while_somebody_is_attached() {
    link("a_link_of_mana_goes_while_somebody_is_attached", MANA);
}
