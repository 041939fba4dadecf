//! The device thread: frames from outside, doorbells that wait, queues in scan mode, other processes.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use wirepath_nic_emulator::topology::{DeviceKind, Doorbells};

use crate::process::Nic;
use crate::{control, shared, traps};

static STARTED: AtomicBool = AtomicBool::new(false);
static OTHERS: AtomicBool = AtomicBool::new(false);
static SLEEPS: AtomicBool = AtomicBool::new(false);
/// Written to wake the thread; -1 before it is there.
static WAKER: AtomicI32 = AtomicI32::new(-1);
/// Processors of the process before it pinned anything.
static PROCESSORS: OnceLock<libc::cpu_set_t> = OnceLock::new();

/// Looks at the doorbell page before queues are looked at again that nobody rang for. A driver writes to its queues for some time before it
/// rings; who looks there meanwhile takes their lines out of its hands.
const LOOKS: u32 = 16;

/// Time without work after which the thread sleeps between looks.
const RESTLESS: Duration = Duration::from_millis(20);

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = {
    extern "C" fn at_load() {
        // SAFETY: plain call with a set of the right size.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0 {
                let _ = PROCESSORS.set(set);
            }
        }
    }
    at_load
};

/// Starts the thread, once.
pub(crate) fn start(nic: &'static Nic) {
    if STARTED.swap(true, Ordering::AcqRel) {
        return;
    }
    // A process that only lists devices, or has one handed over, leaves the socket to the one that works with them.
    control::start(nic);
    let Ok(waker) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK) else {
        nic.log().line("no eventfd for the device thread");
        return;
    };
    WAKER.store(waker.as_raw_fd(), Ordering::Release);
    traps::install();
    // The thread takes no signal of the program.
    // SAFETY: plain calls on valid sets; the mask is put back.
    let old = unsafe {
        let (mut all, mut old): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::sigdelset(&raw mut all, libc::SIGSEGV);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let started = std::thread::Builder::new().name("wirepath-nic".to_owned()).spawn(move || run(nic, &waker));
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    if let Err(error) = started {
        nic.log().line(format_args!("no device thread: {error}"));
    }
}

/// Whether a device was ever opened in this process.
pub(crate) fn started() -> bool {
    STARTED.load(Ordering::Acquire)
}

/// After `fork`: there is no thread.
pub(crate) fn forget() {
    STARTED.store(false, Ordering::Release);
    WAKER.store(-1, Ordering::Release);
    OTHERS.store(false, Ordering::Relaxed);
}

/// Another process may ring doorbells from now on.
pub(crate) fn expect_others() {
    OTHERS.store(true, Ordering::Release);
    wake();
}

/// Whether another process may ring doorbells.
pub(crate) fn expects_others() -> bool {
    OTHERS.load(Ordering::Acquire)
}

/// A doorbell may wait for the thread.
pub(crate) fn wake_for_doorbell() {
    if SLEEPS.load(Ordering::Acquire) {
        wake();
    }
}

fn wake() {
    let fd = WAKER.load(Ordering::Acquire);
    if fd >= 0 {
        let one = 1u64;
        // SAFETY: eight bytes; a failed wake only delays.
        unsafe { libc::syscall(libc::SYS_write, fd, &raw const one, 8usize) };
    }
}

fn run(nic: &'static Nic, waker: &OwnedFd) {
    traps::enter_device();
    if let Some(processors) = PROCESSORS.get() {
        // SAFETY: a set of the right size, for this thread.
        unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), processors) };
    }
    let spins = nic.must_spin();
    let listens = nic.topology().doorbells == Doorbells::Scan
        && nic.topology().devices.iter().all(|device| device.kind == DeviceKind::Mana);
    let patience = if listens { 256 / LOOKS } else { 256 };
    let mut last = Instant::now();
    let mut idle = 0u32;
    loop {
        let turn = catch_unwind(AssertUnwindSafe(|| nic.serve() | (expects_others() && shared::serve(nic))));
        let Ok(busy) = turn else {
            nic.log()
                .line("a fault of the emulator itself ended the device thread: please report it with what is above");
            return;
        };
        if busy {
            idle = 0;
            continue;
        }
        idle += 1;
        if spins || expects_others() {
            // Asking for the time is dear compared with a look at the queues.
            if idle.is_multiple_of(patience) {
                let now = Instant::now();
                if idle == patience {
                    last = now;
                }
                if now - last > RESTLESS {
                    wait(nic, waker, 1);
                } else {
                    std::thread::yield_now();
                }
            } else {
                for _ in 0..if listens { LOOKS } else { 1 } {
                    std::hint::spin_loop();
                    if listens && shared::rang() {
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
    SLEEPS.store(true, Ordering::Release);
    // SAFETY: as many entries as said.
    unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, millis) };
    SLEEPS.store(false, Ordering::Release);
    let mut count = 0u64;
    // SAFETY: eight bytes.
    unsafe { libc::syscall(libc::SYS_read, waker.as_raw_fd(), &raw mut count, 8usize) };
}
