//! A forwarder between two ports of any driver, and kernel traffic through it.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_packet::Batch;
use wirepath_packet::counters::QueueStats;
use wirepath_pmd::port::{RxQueue, StartedPort, TxQueue};
use wirepath_testlab::{Namespace, eventually};

use crate::common::{pool, start};

/// Counters of the queues and modes of both ports.
#[derive(Debug)]
pub(crate) struct Done {
    pub(crate) rx: [QueueStats; 2],
    pub(crate) tx: [QueueStats; 2],
    pub(crate) modes: [String; 2],
}

impl Done {
    /// Panics if a queue has dropped a packet.
    #[track_caller]
    pub(crate) fn assert_no_drops(&self) {
        for queue in self.rx.iter().chain(&self.tx) {
            assert_eq!(queue.dropped(), 0, "{self:?}");
        }
    }
}

/// Forwards all packets between two ports in both directions, and sleeps when idle.
pub(crate) struct Forwarder {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Done>,
}

impl Forwarder {
    /// Starts in a namespace. The ports are started when this returns.
    pub(crate) fn start(namespace: &Arc<Namespace>, tables: [String; 2]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (there, stopped) = (Arc::clone(namespace), Arc::clone(&stop));
        let (ready, wait) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || there.inside(|| run(&tables, &stopped, &ready)));
        wait.recv().expect("the forwarder starts");
        Self { stop, thread }
    }

    /// Stops the forwarder and returns the counters.
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

/// Moves the packets of one poll of `from` to `to`. Returns their number.
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

/// Sends `bytes` bytes over TCP from one namespace to an address in another, and checks that they arrive
/// unchanged.
pub(crate) fn tcp(from: &Namespace, to: &Namespace, address: IpAddr, bytes: usize) {
    let listener = to.inside(|| TcpListener::bind(SocketAddr::new(address, 0)).expect("listens"));
    let address = listener.local_addr().expect("bound");
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            // Without a limit, a failure of the sender would hold the test for ever.
            listener.set_nonblocking(true).expect("a listener that does not wait");
            let mut accepted = None;
            assert!(eventually(Duration::from_secs(30), || {
                accepted = listener.accept().ok();
                accepted.is_some()
            }));
            let (mut stream, _) = accepted.expect("accepts");
            stream.set_nonblocking(false).expect("a stream that waits");
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

/// Returns a byte pattern whose period is not a power of two.
pub(crate) fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8 ^ (at / 251) as u8).collect()
}
