//! A forwarder between two ports of any driver, and traffic of the kernel's own for it.

#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_pmd::counters::QueueStats;
use wirepath_pmd::drivers;
use wirepath_pmd::packet::{Batch, Pool};
use wirepath_pmd::port::{OpenPort, PortConfig, PortError, RxQueue, StartedPort, TxQueue};
use wirepath_pmd::settings::Source;
use wirepath_testlab::Namespace;

/// Opens and starts the port of a `[[port]]` table (its keys without `name`) in the calling thread's namespace.
pub(crate) fn start(table: &str, pool: &Pool) -> Result<StartedPort, PortError> {
    start_with(table, pool, |_| {})
}

/// As [`start`], with what a table cannot say.
pub(crate) fn start_with(
    table: &str,
    pool: &Pool,
    change: impl FnOnce(&mut PortConfig),
) -> Result<StartedPort, PortError> {
    let source = Source::new("test.toml", format!("[[port]]\nname = \"port\"\n{table}"));
    let document = source.parse().unwrap_or_else(|error| panic!("{error}"));
    let port = document.settings().tables("port").expect("one port").remove(0);
    let settings = drivers::plan(port).unwrap_or_else(|error| panic!("{error}"));
    let mut config = settings.config(0, pool.clone());
    change(&mut config);
    OpenPort::open("port", settings.plan)?.configure(config)?.start()
}

/// A pool for a test.
pub(crate) fn pool() -> Pool {
    Pool::new("test", 8192).expect("memory for a pool")
}

/// What the queues of a port did, both ports of a forwarder.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) rx: [QueueStats; 2],
    pub(crate) tx: [QueueStats; 2],
    pub(crate) modes: [String; 2],
}

/// Carries everything from each of two ports to the other, sleeping when there is nothing.
pub(crate) struct Forwarder {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Done>,
}

impl Forwarder {
    /// Starts in a namespace; the ports are there when this returns.
    pub(crate) fn start(place: &Arc<Namespace>, tables: [String; 2]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (there, stopped) = (Arc::clone(place), Arc::clone(&stop));
        let (ready, wait) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || there.inside(|| run(&tables, &stopped, &ready)));
        wait.recv().expect("the forwarder starts");
        Self { stop, thread }
    }

    /// Stops it.
    pub(crate) fn finish(self) -> Done {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the forwarder ends in peace")
    }
}

fn run(tables: &[String; 2], stop: &AtomicBool, ready: &std::sync::mpsc::Sender<()>) -> Done {
    let pool = pool();
    let mut ports = tables.each_ref().map(|table| start(table, &pool).unwrap_or_else(|error| panic!("{error}")));
    let _ = ready.send(());
    while !stop.load(Ordering::Relaxed) {
        let [a, b] = &mut ports;
        let moved = carry(&mut a.rx[0], &mut b.tx[0]) + carry(&mut b.rx[0], &mut a.tx[0]);
        if moved == 0 {
            sleep([&mut a.rx[0], &mut b.rx[0]]);
        }
    }
    let stats = |port: &StartedPort| {
        (port.port.rx_statistics().remove(0), port.port.tx_statistics().remove(0), port.port.capabilities().mode)
    };
    let [(ra, ta, ma), (rb, tb, mb)] = ports.each_ref().map(stats);
    for StartedPort { port, rx, tx } in ports {
        port.stop(rx, tx).expect("stops");
    }
    assert_eq!(pool.outstanding(), 0, "buffers that did not come back");
    Done { rx: [ra, rb], tx: [ta, tb], modes: [ma, mb] }
}

/// Carries what one poll of `from` finds to `to`; returns how many packets.
pub(crate) fn carry(from: &mut RxQueue, to: &mut TxQueue) -> usize {
    let mut batch = Batch::new();
    let n = from.receive(&mut batch);
    for _ in 0..1000 {
        to.transmit(&mut batch);
        if batch.is_empty() {
            break;
        }
        std::thread::yield_now();
    }
    n
}

fn sleep(queues: [&mut RxQueue; 2]) {
    let [a, b] = queues;
    let (Some(a), Some(b)) = (a.wait_descriptor(), b.wait_descriptor()) else { return };
    let mut wait = [PollFd::from_borrowed_fd(a, PollFlags::IN), PollFd::from_borrowed_fd(b, PollFlags::IN)];
    let _ = poll(&mut wait, Some(&Timespec { tv_sec: 0, tv_nsec: 20_000_000 }));
}

/// Sends `bytes` bytes of a pattern over TCP from one namespace to an address in another, which must get exactly those.
pub(crate) fn tcp(from: &Namespace, to: &Namespace, address: IpAddr, bytes: usize) {
    let listener = to.inside(|| TcpListener::bind(SocketAddr::new(address, 0)).expect("listens"));
    let address = listener.local_addr().expect("bound");
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("accepts");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
            let mut got = Vec::with_capacity(bytes);
            stream.read_to_end(&mut got).expect("receives");
            stream.write_all(&[1]).expect("answers");
            got
        });
        from.inside(|| {
            let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(20)).expect("connects");
            stream.set_write_timeout(Some(Duration::from_secs(20))).expect("timeout");
            stream.write_all(&pattern(bytes)).expect("sends");
            stream.shutdown(std::net::Shutdown::Write).expect("ends");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("timeout");
            stream.read_exact(&mut [0]).expect("an answer");
        });
        let got = receiver.join().expect("the receiver ends in peace");
        assert!(got == pattern(bytes), "{} of {bytes} bytes, or changed on the way", got.len());
    });
}

/// Bytes that repeat in no power of two.
pub(crate) fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8 ^ (at / 251) as u8).collect()
}
