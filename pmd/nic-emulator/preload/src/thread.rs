//! The device thread: handles frames from outside, queued doorbells, queues in scan mode, and other
//! processes.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use wirepath_nic_emulator::topology::{DeviceKind, Doorbells};

use crate::process::Nic;
use crate::waker::{set_sleeping, set_waker, wake};
use crate::{control, remote_doorbells, traps};

static STARTED: AtomicBool = AtomicBool::new(false);
static REMOTE_DOORBELLS: AtomicBool = AtomicBool::new(false);
/// CPU affinity of the process at load time, before it pinned any thread.
static PROCESSORS: OnceLock<libc::cpu_set_t> = OnceLock::new();

/// Number of polls of the doorbell page between two polls of the queues. A driver writes to its queues for
/// some time before it rings the doorbell. Polling the queues in that time would take their cache lines away
/// from the driver.
const DOORBELL_POLLS: u32 = 16;

/// Idle time after which the thread sleeps between polls.
const SPIN_TIME: Duration = Duration::from_millis(20);

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        // SAFETY: all-zero bytes are a valid `cpu_set_t`, and the call gets its size.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0 {
                let _ = PROCESSORS.set(set);
            }
        }
    }
    at_load
};

/// Starts the thread, if it is not running yet.
pub(crate) fn start(nic: &'static Nic) {
    if STARTED.swap(true, Ordering::AcqRel) {
        return;
    }
    // A process that only lists devices, or has received one from another process, leaves the socket to the
    // process that works with them.
    control::start(nic);
    let Ok(waker) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) else {
        nic.log().line("cannot create the eventfd of the device thread");
        return;
    };
    set_waker(waker.as_raw_fd());
    traps::install();
    // The thread receives no signals of the program. SAFETY: both signal sets are live and initialised;
    // all-zero bytes are valid. The old mask is restored below.
    let old = unsafe {
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::sigdelset(&raw mut all, libc::SIGSEGV);
        // The program may give up its privileges in all threads by this signal (wirepath-privileges).
        libc::sigdelset(&raw mut all, libc::SIGSYS);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let started = std::thread::Builder::new().name("wirepath-nic".to_owned()).spawn(move || run(nic, &waker));
    // SAFETY: `old` is the signal mask that the call above has written.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    if let Err(error) = started {
        nic.log().line(format_args!("cannot start the device thread: {error}"));
    }
}

/// Returns true if a device was opened in this process.
pub(crate) fn started() -> bool {
    STARTED.load(Ordering::Acquire)
}

/// Resets the state after `fork`, because the child has no device thread.
pub(crate) fn reset_after_fork() {
    STARTED.store(false, Ordering::Release);
    set_waker(-1);
    REMOTE_DOORBELLS.store(false, Ordering::Relaxed);
}

/// Enables doorbells from other processes.
pub(crate) fn enable_remote_doorbells() {
    REMOTE_DOORBELLS.store(true, Ordering::Release);
    wake();
}

/// Returns true if other processes may ring doorbells.
pub(crate) fn has_remote_doorbells() -> bool {
    REMOTE_DOORBELLS.load(Ordering::Acquire)
}

fn run(nic: &'static Nic, waker: &OwnedFd) {
    traps::mark_device_thread();
    if let Some(processors) = PROCESSORS.get() {
        // SAFETY: `processors` is a live `cpu_set_t`, and the call gets its size. It applies to this thread.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), processors) };
    }
    let spins = nic.needs_polling();
    let listens = nic.topology().doorbells == Doorbells::Scan
        && nic.topology().devices.iter().all(|device| device.kind == DeviceKind::Mana);
    let polls_per_clock = if listens { 256 / DOORBELL_POLLS } else { 256 };
    let mut last = Instant::now();
    let mut idle = 0u32;
    loop {
        let turn =
            catch_unwind(AssertUnwindSafe(|| nic.serve() | (has_remote_doorbells() && remote_doorbells::serve(nic))));
        let Ok(busy) = turn else {
            nic.log().line(
                "internal error of the emulator ended the device thread; please report it with the preceding lines",
            );
            return;
        };
        if busy {
            idle = 0;
            continue;
        }
        idle += 1;
        if spins || has_remote_doorbells() {
            // Reading the clock is expensive compared with a poll of the queues.
            if idle.is_multiple_of(polls_per_clock) {
                let now = Instant::now();
                if idle == polls_per_clock {
                    last = now;
                }
                if now - last > SPIN_TIME {
                    wait(nic, waker, 1);
                } else {
                    std::thread::yield_now();
                }
            } else {
                for _ in 0..if listens { DOORBELL_POLLS } else { 1 } {
                    std::hint::spin_loop();
                    if listens && remote_doorbells::doorbell_changed() {
                        break;
                    }
                }
            }
        } else {
            wait(nic, waker, -1);
        }
    }
}

fn wait(nic: &Nic, waker: &OwnedFd, millis: c_int) {
    let mut waits: Vec<libc::pollfd> = nic
        .descriptors()
        .into_iter()
        .chain([waker.as_fd().as_raw_fd()])
        .map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 })
        .collect();
    set_sleeping(true);
    // SAFETY: `waits` is valid for reads and writes of `waits.len()` elements.
    unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, millis) };
    set_sleeping(false);
    let mut count = 0u64;
    // SAFETY: the kernel writes the 8 bytes of `count`.
    unsafe { libc::syscall(libc::SYS_read, waker.as_raw_fd(), &raw mut count, 8usize) };
}
