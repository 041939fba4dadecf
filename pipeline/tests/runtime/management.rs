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
}

impl Management for Echo {
    fn serve(&mut self, _: &mut dyn Control, _: &mut ControlPlane) -> bool {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut byte = [0];
        if self.refuses {
            return false;
        }
        match self.stream.read(&mut byte) {
            Ok(1) => self.stream.write_all(&byte).is_ok(),
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

#[derive(Default)]
struct Ticks(u64);

impl Control for Ticks {
    fn tick(&mut self, _: &mut ControlPlane) {
        self.0 += 1;
    }
}

/// Runs a program whose management has one client, for the time that the client takes. Returns the numbers of ticks
/// and of calls of the management.
fn run(name: &str, refuses: bool, client: impl FnOnce(UnixStream) + Send + 'static) -> (u64, u64) {
    let (stream, other) = UnixStream::pair().unwrap();
    stream.set_nonblocking(true).unwrap();
    let calls = Arc::new(AtomicU64::new(0));
    let mut runtime = open(&format!("{PORT}'{name}'\n")).unwrap();
    runtime.set_management(Box::new(Echo { stream, calls: Arc::clone(&calls), refuses }));
    let mut running = runtime.start(|_| |_: &mut Context<'_>, _: &mut Batch| ()).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let thread = std::thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            client(other);
            stop.store(true, Ordering::Relaxed);
        }
    });
    let mut ticks = Ticks::default();
    running.run(&mut ticks, &RunOptions { stop: Some(stop), ..RunOptions::default() });
    thread.join().unwrap();
    running.stop(&mut ());
    (ticks.0, calls.load(Ordering::Relaxed))
}

#[test]
fn requests_do_not_wait_for_the_next_tick() {
    const REQUESTS: u64 = 200;
    let (ticks, _) = run("operators", false, |mut stream| {
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
fn a_descriptor_that_stays_readable_keeps_nobody_busy() {
    let (ticks, calls) = run("stuck operator", true, |mut stream| {
        stream.write_all(&[1]).unwrap();
        std::thread::sleep(Duration::from_millis(300));
    });
    // The first call may come between two ticks, and the one of the stop is no tick of this application.
    assert!(ticks > 1 && calls <= 2 * ticks + 2, "{calls} calls in {ticks} ticks");
}
