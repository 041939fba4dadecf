//! SIGSYS: reports of the filter, and the order to a thread to restrict itself.
// UNSAFETY: a signal handler that changes the saved registers of the thread, and signals to threads. Both have no safe
// interface.
#![allow(unsafe_code)]

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rustix::process::{Pid, getpid};

use crate::names::LIMIT;
use crate::restrict::{Plan, ThreadError};

/// `si_code` of a call that a filter refused (asm-generic/siginfo.h).
const SYS_SECCOMP: libc::c_int = 1;

/// Refused calls by number; the last place is for all numbers that are not below it.
static REFUSED: [AtomicU32; LIMIT + 1] = [const { AtomicU32::new(0) }; LIMIT + 1];
/// True if there are refused calls that nobody has asked for.
static ANY_REFUSED: AtomicBool = AtomicBool::new(false);
/// The order to each thread that gets the signal.
static ORDER: OnceLock<Order> = OnceLock::new();

/// A plan for all threads, and what became of it.
pub(crate) struct Order {
    plan: Plan,
    /// Threads that have carried out the plan.
    done: AtomicU32,
    /// The first error.
    failed: OnceLock<ThreadError>,
}

/// Installs the handler.
pub(crate) fn install() -> io::Result<()> {
    // SAFETY: all-zero bytes are a valid `sigaction`, whose mask is empty. The handler has the signature that
    // `SA_SIGINFO` requires, and calls nothing that a signal handler must not call.
    let result = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut())
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The handler of SIGSYS. It allocates nothing and takes no lock.
extern "C" fn handler(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler with `SA_SIGINFO`.
    let (code, sender) = unsafe { ((*info).si_code, (*info).si_pid()) };
    if code == SYS_SECCOMP {
        let context: *mut libc::ucontext_t = context.cast();
        // SAFETY: the kernel passes the saved context of this thread, which nobody else uses while the handler runs.
        // The kernel has put the number of the call back into RAX. Its value is the result that the caller gets.
        let number = unsafe {
            let rax = &mut (*context).uc_mcontext.gregs[libc::REG_RAX as usize];
            std::mem::replace(rax, -i64::from(libc::EPERM))
        };
        let place = usize::try_from(number).map_or(LIMIT, |number| number.min(LIMIT));
        REFUSED[place].fetch_add(1, Ordering::Relaxed);
        ANY_REFUSED.store(true, Ordering::Release);
    } else if let Some(order) = ORDER.get()
        && code == libc::SI_TKILL
        && sender == getpid().as_raw_nonzero().get()
    {
        if let Err(error) = order.plan.apply_to_thread() {
            let _ = order.failed.set(error);
        }
        order.done.fetch_add(1, Ordering::AcqRel);
    }
}

/// Takes the numbers of refused calls and how often each was refused.
pub(crate) fn take_refused() -> Vec<(usize, u32)> {
    if !ANY_REFUSED.load(Ordering::Relaxed) || !ANY_REFUSED.swap(false, Ordering::Acquire) {
        return Vec::new();
    }
    let counts = REFUSED.iter().map(|count| count.swap(0, Ordering::Relaxed));
    counts.enumerate().filter(|(_, count)| *count > 0).collect()
}

impl Order {
    /// Gives the one order of this process; `None` if there was one already.
    pub(crate) fn give(plan: Plan) -> Option<&'static Self> {
        let order = Self { plan, done: AtomicU32::new(0), failed: OnceLock::new() };
        ORDER.set(order).ok()?;
        ORDER.get()
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the number of other threads that have carried out the plan.
    pub(crate) fn done(&self) -> u32 {
        self.done.load(Ordering::Acquire)
    }

    /// Returns the first error of another thread.
    pub(crate) fn failed(&self) -> Option<&ThreadError> {
        self.failed.get()
    }
}

/// Makes a thread of this process carry out the order. Returns false if the thread has ended.
pub(crate) fn send(thread: Pid) -> io::Result<bool> {
    let (process, thread) = (getpid().as_raw_nonzero().get(), thread.as_raw_nonzero().get());
    // SAFETY: the call has no memory arguments. The handler of the signal is installed.
    if unsafe { libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGSYS) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ESRCH) => Ok(false),
        error => Err(error),
    }
}
