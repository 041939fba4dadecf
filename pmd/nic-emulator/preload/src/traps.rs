//! Closed doorbell pages: stores to them fault, are carried out here, and the program goes on behind them. So does a device that uses memory
//! which the program has unmapped.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, zeroed};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use libc::{sigaction, siginfo_t, ucontext_t};
use wirepath_nic_emulator::device::{ContextId, Store};
use wirepath_nic_emulator::trap::{LONGEST, Registers, decode};

use crate::shared::Ring;
use crate::{next, process, thread};

/// Most doorbell pages at a time.
const MOST: usize = 256;
const PAGE: usize = 4096;
/// Where programs have no memory: broken pointers lead there.
const LOWEST: usize = 64 << 10;
/// Bytes, a huge page, within which memory that is gone is told of as one.
const NEAR: usize = 2 << 20;

/// Who gets the stores to a page.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// A context of this process.
    Context(ContextId),
    /// The process that the page was handed over by.
    Other(&'static Ring),
}

struct Page {
    /// 0 if the place is free.
    start: AtomicUsize,
    length: AtomicUsize,
    /// Where it lies in its file.
    offset: AtomicUsize,
    context: AtomicUsize,
    ring: AtomicPtr<Ring>,
}

static PAGES: [Page; MOST] = [const {
    Page {
        start: AtomicUsize::new(0),
        length: AtomicUsize::new(0),
        offset: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        ring: AtomicPtr::new(ptr::null_mut()),
    }
}; MOST];
/// One more than the highest place ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

static INSTALLED: AtomicBool = AtomicBool::new(false);
static mut PREVIOUS: MaybeUninit<sigaction> = MaybeUninit::uninit();

thread_local! {
    /// The device is at work in this thread: a fault is then one of memory that the program has taken away.
    static AT_WORK: Cell<bool> = const { Cell::new(false) };
}

/// Marks a thread as the device's own.
pub(crate) fn enter_device() {
    AT_WORK.set(true);
}

/// Watches a page that lies at `offset` of its file; false if there are too many.
pub(crate) fn watch(start: usize, length: usize, offset: usize, target: Target) -> bool {
    install();
    for (i, page) in PAGES.iter().enumerate() {
        // The start is written last: the handler believes what it finds behind it.
        if page.start.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            page.length.store(length, Ordering::Relaxed);
            page.offset.store(offset, Ordering::Relaxed);
            let (context, ring) = match target {
                Target::Context(context) => (context as usize, ptr::null_mut()),
                Target::Other(ring) => (0, ptr::from_ref(ring).cast_mut()),
            };
            page.context.store(context, Ordering::Relaxed);
            page.ring.store(ring, Ordering::Relaxed);
            page.start.store(start, Ordering::Release);
            USED.fetch_max(i + 1, Ordering::Release);
            return true;
        }
    }
    false
}

/// Runs what the device does for a call of the program, and may touch memory that the program has taken away.
pub(crate) fn at_work<R>(run: impl FnOnce() -> R) -> R {
    let before = AT_WORK.replace(true);
    let result = run();
    AT_WORK.set(before);
    result
}

/// Watches pages of a range no longer.
pub(crate) fn unwatch(start: usize, length: usize) {
    for page in &PAGES[..USED.load(Ordering::Acquire)] {
        let at = page.start.load(Ordering::Acquire);
        if at > 1 && at >= start && at - start < length {
            page.start.store(0, Ordering::Release);
        }
    }
}

/// Forgets all pages.
pub(crate) fn forget() {
    for page in &PAGES {
        page.start.store(0, Ordering::Release);
    }
}

/// Puts the handler in front of what there is.
pub(crate) fn install() {
    // SAFETY: the handler below is installed, and what was there is kept for everything that is not ours. Done again with each page, in
    // case that the program has put its own handler in front.
    unsafe {
        let mut current: sigaction = zeroed();
        libc::sigaction(libc::SIGSEGV, ptr::null(), &raw mut current);
        let ours = handler as extern "C" fn(c_int, *mut siginfo_t, *mut c_void) as usize;
        if current.sa_sigaction == ours {
            return;
        }
        if !INSTALLED.swap(true, Ordering::AcqRel) || current.sa_sigaction != ours {
            (&raw mut PREVIOUS).write(MaybeUninit::new(current));
        }
        let mut action: sigaction = zeroed();
        action.sa_sigaction = ours;
        // Not on the alternate stack, which is often small; other signals wait, since their handlers could ring doorbells too; but a
        // fault of the device itself is to be seen.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        libc::sigdelset(&raw mut action.sa_mask, libc::SIGSEGV);
        libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut());
    }
}

extern "C" fn handler(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel hands a valid siginfo and ucontext to a SA_SIGINFO handler.
    let (address, context) = unsafe { ((*info).si_addr() as usize, context.cast::<ucontext_t>()) };
    if AT_WORK.get() {
        if stand_in(address) {
            return;
        }
        // SAFETY: as above.
        unsafe { pass_on(signal, info, context.cast()) };
        return;
    }
    for page in &PAGES[..USED.load(Ordering::Acquire)] {
        let start = page.start.load(Ordering::Acquire);
        if start > 1 && address >= start && address - start < page.length.load(Ordering::Relaxed) {
            // SAFETY: as above.
            if unsafe { carry_out(page, address - start, &mut *context) } {
                return;
            }
            break;
        }
    }
    // SAFETY: as above.
    unsafe { pass_on(signal, info, context.cast()) };
}

/// Carries out the store at the instruction pointer and steps over it; false if it is no store that is known.
///
/// # Safety
/// `context` is that of a fault of this thread.
unsafe fn carry_out(page: &Page, offset: usize, context: &mut ucontext_t) -> bool {
    let registers = &mut context.uc_mcontext.gregs;
    let ip = registers[libc::REG_RIP as usize] as usize;
    let order = [
        libc::REG_RAX,
        libc::REG_RCX,
        libc::REG_RDX,
        libc::REG_RBX,
        libc::REG_RSP,
        libc::REG_RBP,
        libc::REG_RSI,
        libc::REG_RDI,
        libc::REG_R8,
        libc::REG_R9,
        libc::REG_R10,
        libc::REG_R11,
        libc::REG_R12,
        libc::REG_R13,
        libc::REG_R14,
        libc::REG_R15,
    ];
    let general = order.map(|register| registers[register as usize] as u64);
    // The rest of the page that the instruction is on can be read; beyond it only if the instruction reaches there, which then can too.
    let here = LONGEST.min(4096 - ip % 4096);
    let mut code = [0; LONGEST];
    // SAFETY: the processor has just read an instruction there.
    unsafe { ptr::copy_nonoverlapping(ip as *const u8, code.as_mut_ptr(), here) };
    let mut vector = [[0; 32]; 16];
    let state = context.uc_mcontext.fpregs;
    if !state.is_null() {
        for (i, register) in vector.iter_mut().enumerate() {
            // SAFETY: the kernel's FXSAVE area: 16 bytes for each of xmm0 to xmm15 from offset 160.
            unsafe { ptr::copy_nonoverlapping(state.cast::<u8>().add(160 + 16 * i), register.as_mut_ptr(), 16) };
        }
        // SAFETY: the kernel marks an extended area with a magic number in the reserved bytes 464 to 511 of the legacy one; the upper
        // halves of ymm0 to ymm15 then lie at offset 576.
        unsafe {
            let magic = state.cast::<u8>().add(464).cast::<u32>().read_unaligned();
            let features = state.cast::<u8>().add(512).cast::<u64>().read_unaligned();
            if magic == 0x4650_5853 && features & 4 != 0 {
                for (i, register) in vector.iter_mut().enumerate() {
                    ptr::copy_nonoverlapping(state.cast::<u8>().add(576 + 16 * i), register[16..].as_mut_ptr(), 16);
                }
            }
        }
    }
    let seen = Registers { general, vector };
    let mut decoded = decode(&code[..here], &seen);
    if decoded.is_none() && here < LONGEST {
        // SAFETY: the instruction goes on in the next page, or is not known.
        let more = crate::memory::copy_in((ip + here) as u64, &mut code[here..]).is_ok();
        decoded = if more { decode(&code, &seen) } else { None };
    }
    let nic = process::existing();
    let Some(decoded) = decoded else {
        if let Some(nic) = nic {
            nic.log().line(format_args!("an access to a doorbell page that is no known store: {code:02x?} at {ip:#x}"));
        }
        return false;
    };
    // SAFETY: errno is this thread's own; the program must find it as it was.
    let errno = unsafe { *libc::__errno_location() };
    AT_WORK.set(true);
    // A wide store is several registers, one behind the other.
    for at in (0..decoded.size).step_by(8) {
        let size = (decoded.size - at).min(8);
        let value = decoded.bytes[at..].first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let mask = u64::MAX >> (64 - 8 * size as u32);
        let place = page.offset.load(Ordering::Relaxed) + offset + at;
        let store = Store { offset: place, size, value: value & mask };
        // SAFETY: rings live as long as the process.
        match unsafe { page.ring.load(Ordering::Relaxed).as_ref() } {
            Some(ring) => ring.push(store),
            None => {
                let context = page.context.load(Ordering::Relaxed) as ContextId;
                if let Some(nic) = nic {
                    let rung = catch_unwind(AssertUnwindSafe(|| nic.doorbell(context, store)));
                    match rung {
                        Ok(true) => thread::wake_for_doorbell(),
                        Ok(false) => {}
                        Err(_) => nic.log().line("a fault of the emulator itself: please report it with what is above"),
                    }
                }
            }
        }
    }
    AT_WORK.set(false);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    registers[libc::REG_RIP as usize] = (ip + decoded.length) as i64;
    true
}

/// A device faulted on memory of the program, which is told. What the program has unmapped the kernel keeps for a NIC, which goes on with it
/// unseen: an empty page in its place does as well. False: something else lies there, closed to the device.
fn stand_in(address: usize) -> bool {
    let page = address & !(PAGE - 1);
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a fresh page where there is none.
    let mapped = unsafe { next::mmap(page as *mut c_void, PAGE, both, flags, -1, 0) };
    // What is not given with an address, or not as asked for, is a fault of another kind, or a kernel before 4.17.
    let fits = mapped as usize == page && page >= LOWEST;
    if !fits && mapped != libc::MAP_FAILED {
        // SAFETY: mapped above.
        unsafe { next::munmap(mapped, PAGE) };
    }
    // A fault meanwhile is none of the device.
    AT_WORK.set(false);
    if let Some(nic) = process::existing() {
        let (near, what) = (address & !(NEAR - 1), if fits { "unmapped" } else { "closed" });
        nic.log()
            .line(format_args!("the device used registered memory near {near:#x}, which the program has {what} since"));
    }
    AT_WORK.set(fits);
    fits
}

/// Gives a fault to the handler that was there before ours.
///
/// # Safety
/// Within a signal handler, with its arguments.
unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: written before our handler was installed.
    let previous = unsafe { (&raw const PREVIOUS).read().assume_init() };
    match previous.sa_sigaction {
        libc::SIG_DFL => {
            // Returning repeats the access, which then ends the program as it would have without us.
            // SAFETY: plain calls.
            unsafe {
                let mut action: sigaction = zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
        libc::SIG_IGN => {}
        // SAFETY: the program's handler, of the kind that its flags say.
        handler => unsafe {
            if previous.sa_flags & libc::SA_SIGINFO != 0 {
                std::mem::transmute::<usize, extern "C" fn(c_int, *mut siginfo_t, *mut c_void)>(handler)(
                    signal, info, context,
                );
            } else {
                std::mem::transmute::<usize, extern "C" fn(c_int)>(handler)(signal);
            }
        },
    }
}
