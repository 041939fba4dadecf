//! Operators are served as soon as they wait, and a descriptor that stays readable does not keep the control thread
//! busy.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use wirepath_packet::Batch;
use wirepath_pipeline::registry::Management;
use wirepath_pipeline::{Context, Control, ControlPlane, RunOptions};

use crate::programs::open;

const PORT: &str = "[[port]]\nname = 'a'\ndriver = 'memory'\ndevice = ";

/// Answers each byte with a byte.
struct Echo {
    stream: UnixStream,
    calls: Arc<AtomicU64>,
    /// Reads nothing: the descriptor stays readable.
    refuses: bool,
    /// Ticks so far, and at the last call.
    ticks: Arc<AtomicU64>,
    last_ticks: u64,
    /// Answers between two ticks.
    between: Arc<AtomicU64>,
}

impl Management for Echo {
    fn serve(&mut self, _: &mut dyn Control, _: &mut ControlPlane) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut byte = [0];
        if self.refuses {
            return false;
        }
        let ticks = self.ticks.load(Ordering::Relaxed);
        let is_between = std::mem::replace(&mut self.last_ticks, ticks) == ticks;
        match self.stream.read(&mut byte) {
            Ok(1) => {
                self.between.fetch_add(is_between.into(), Ordering::Relaxed);
                self.stream.write_all(&byte).is_ok()
            }
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                false
            }
        }
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.stream.as_fd())
    }
}

struct Ticks(Arc<AtomicU64>);

impl Control for Ticks {
    fn tick(&mut self, _: &mut ControlPlane) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs a program whose management has one client, for the time that the client takes. Returns the numbers of ticks,
/// of calls of the management, and of answers between two ticks.
fn run(name: &str, refuses: bool, client: impl FnOnce(UnixStream) + Send + 'static) -> (u64, u64, u64) {
    let (stream, other) = UnixStream::pair().unwrap();
    stream.set_nonblocking(true).unwrap();
    let [calls, ticks, between] = [(); 3].map(|()| Arc::new(AtomicU64::new(0)));
    let mut runtime = open(&format!("{PORT}'{name}'\n")).unwrap();
    runtime.set_management(Box::new(Echo {
        stream,
        calls: Arc::clone(&calls),
        refuses,
        ticks: Arc::clone(&ticks),
        last_ticks: 0,
        between: Arc::clone(&between),
    }));
    let mut running = runtime.start(|_| |_: &mut Context<'_>, _: &mut Batch| ()).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let thread = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            client(other);
            stop.store(true, Ordering::Relaxed);
        }
    });
    running.run(&mut Ticks(Arc::clone(&ticks)), &RunOptions { stop: Some(stop), ..RunOptions::default() });
    thread.join().unwrap();
    running.stop(&mut ());
    let [ticks, calls, between] = [ticks, calls, between].map(|it| it.load(Ordering::Relaxed));
    (ticks, calls, between)
}

#[test]
fn requests_do_not_wait_for_the_next_tick() {
    const REQUESTS: u64 = 200;
    let (ticks, ..) = run("operators", false, |mut stream| {
        for i in 0..REQUESTS {
            let mut byte = [i as u8];
            stream.write_all(&byte).unwrap();
            stream.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [i as u8], "answers come in order");
        }
    });
    assert!(ticks < REQUESTS, "{ticks} ticks for {REQUESTS} requests, one after the other");
}

#[test]
fn the_first_request_after_silence_does_not_wait() {
    const REQUESTS: u64 = 40;
    let (.., between) = run("silence", false, |mut stream| {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..REQUESTS {
            std::thread::sleep(Duration::from_millis(random.u64(15..35)));
            let mut byte = [1];
            stream.write_all(&byte).unwrap();
            stream.read_exact(&mut byte).unwrap();
        }
    });
    // Some meet a tick, more of them on a busy machine.
    assert!(between >= REQUESTS / 4, "{between} of {REQUESTS} requests were answered between two ticks");
}

#[test]
fn a_descriptor_that_stays_readable_keeps_nobody_busy() {
    let (ticks, calls, _) = run("stuck operator", true, |mut stream| {
        stream.write_all(&[1]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    });
    // The first call may come between two ticks, and the one of the stop is no tick of this application.
    assert!(ticks > 1 && calls <= 2 * ticks + 2, "{calls} calls in {ticks} ticks");
}
