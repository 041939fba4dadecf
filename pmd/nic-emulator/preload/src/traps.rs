//! The SIGSEGV handler. It emulates stores to protected doorbell pages and loads from protected clock pages, and
//! continues the program behind them.
//! It also handles faults of a device on memory that the program has unmapped.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::mem::{MaybeUninit, zeroed};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use libc::{sigaction, siginfo_t, ucontext_t};
use wirepath_nic_emulator::ClockPage;
use wirepath_nic_emulator::device::{ContextId, Store};
use wirepath_nic_emulator::load_decoder::{self, Destination};
use wirepath_nic_emulator::store_decoder::{LONGEST, Registers, decode};

use crate::ring::Ring;
use crate::{next_symbol, process, waker};

/// Maximum number of protected pages.
const MOST: usize = 256;
const PAGE: usize = 4096;
/// Lowest address at which programs have memory; null and broken pointers are below it.
const LOWEST: usize = 64 << 10;
/// Distance, the size of a huge page, within which unmapped memory is reported once.
const NEAR: usize = 2 << 20;

/// Number that says that an extended area follows the FXSAVE area (`FP_XSTATE_MAGIC1`).
const EXTENDED_STATE: u32 = 0x4650_5853;

/// Target of the accesses to a page.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// A context of this process.
    Context(ContextId),
    /// The process that has passed the page.
    Remote(&'static Ring),
    /// A clock that loads read.
    Clock(ClockPage),
}

struct Page {
    /// Address of the page; 0 if the entry is free, 1 while it is being filled.
    start: AtomicUsize,
    length: AtomicUsize,
    /// Offset of the page in its file.
    offset: AtomicUsize,
    context: AtomicUsize,
    ring: AtomicPtr<Ring>,
    /// Number of the [`ClockPage`]; 0 for doorbells.
    clock: AtomicU64,
}

static PAGES: [Page; MOST] = [const {
    Page {
        start: AtomicUsize::new(0),
        length: AtomicUsize::new(0),
        offset: AtomicUsize::new(0),
        context: AtomicUsize::new(0),
        ring: AtomicPtr::new(ptr::null_mut()),
        clock: AtomicU64::new(0),
    }
}; MOST];
/// Number of entries that were ever used.
static USED: AtomicUsize = AtomicUsize::new(0);

static INSTALLED: AtomicBool = AtomicBool::new(false);
static mut PREVIOUS: MaybeUninit<sigaction> = MaybeUninit::uninit();

thread_local! {
    /// True while the device works in this thread. A fault then concerns memory that the program has unmapped
    /// or protected.
    static DEVICE_ACTIVE: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as the device thread.
pub(crate) fn mark_device_thread() {
    DEVICE_ACTIVE.set(true);
}

/// Traps accesses to a page that is at `offset` of its file; returns false if there are too many pages.
pub(crate) fn watch(start: usize, length: usize, offset: usize, target: Target) -> bool {
    install();
    for (i, page) in PAGES.iter().enumerate() {
        // The address is written last, because the handler reads the other fields after it.
        if page.start.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            page.length.store(length, Ordering::Relaxed);
            page.offset.store(offset, Ordering::Relaxed);
            let (context, ring, clock) = match target {
                Target::Context(context) => (context as usize, ptr::null_mut(), 0),
                Target::Remote(ring) => (0, ptr::from_ref(ring).cast_mut(), 0),
                Target::Clock(clock) => (0, ptr::null_mut(), clock.to_number()),
            };
            page.context.store(context, Ordering::Relaxed);
            page.ring.store(ring, Ordering::Relaxed);
            page.clock.store(clock, Ordering::Relaxed);
            page.start.store(start, Ordering::Release);
            USED.fetch_max(i + 1, Ordering::Release);
            return true;
        }
    }
    false
}

/// Runs device code that may access memory that the program has unmapped.
pub(crate) fn with_device_active<R>(run: impl FnOnce() -> R) -> R {
    let before = DEVICE_ACTIVE.replace(true);
    let result = run();
    DEVICE_ACTIVE.set(before);
    result
}

/// Stops trapping accesses to the pages of a range.
pub(crate) fn unwatch(start: usize, length: usize) {
    for page in &PAGES[..USED.load(Ordering::Acquire)] {
        let at = page.start.load(Ordering::Acquire);
        if at > 1 && at >= start && at - start < length {
            page.start.store(0, Ordering::Release);
        }
    }
}

/// Removes all pages after `fork`.
pub(crate) fn reset_after_fork() {
    for page in &PAGES {
        page.start.store(0, Ordering::Release);
    }
}

/// Installs the handler before the current one.
pub(crate) fn install() {
    // SAFETY: `sigaction` structures are live and initialised; all-zero bytes are valid. The handler has the
    // signature that `SA_SIGINFO` requires. The previous handler is kept for other faults. This is repeated
    // for each page, because the program may have installed its own handler since.
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
        // The handler does not run on the alternate stack, which is often small. Other signals are blocked,
        // because their handlers could ring doorbells too. A fault of the device itself must be handled.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | libc::SA_RESTART;
        libc::sigfillset(&raw mut action.sa_mask);
        libc::sigdelset(&raw mut action.sa_mask, libc::SIGSEGV);
        libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut());
    }
}

extern "C" fn handler(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo and ucontext to a handler with `SA_SIGINFO`.
    let (address, context) = unsafe { ((*info).si_addr() as usize, context.cast::<ucontext_t>()) };
    if DEVICE_ACTIVE.get() {
        if map_empty_page(address) {
            return;
        }
        // SAFETY: this is a signal handler, and the arguments are those that the kernel passed.
        unsafe { chain_to_previous(signal, info, context.cast()) };
        return;
    }
    for page in &PAGES[..USED.load(Ordering::Acquire)] {
        let start = page.start.load(Ordering::Acquire);
        if start > 1 && address >= start && address - start < page.length.load(Ordering::Relaxed) {
            let offset = address - start;
            // SAFETY: `context` is the valid ucontext of a fault of this thread, and nobody else refers to
            // it.
            let is_emulated = unsafe {
                match ClockPage::from_number(page.clock.load(Ordering::Relaxed)) {
                    Some(clock) => emulate_load(clock, offset, &mut *context),
                    None => emulate_store(page, offset, &mut *context),
                }
            };
            if is_emulated {
                return;
            }
            break;
        }
    }
    // SAFETY: this is a signal handler, and the arguments are those that the kernel passed.
    unsafe { chain_to_previous(signal, info, context.cast()) };
}

/// General registers in the order of their numbers.
const GENERAL: [c_int; 16] = [
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

/// Returns the bytes at an instruction, and how many of them are in its page. The others are 0.
///
/// # Safety
/// The processor must have fetched an instruction at `ip`.
unsafe fn faulted_code(ip: usize) -> ([u8; LONGEST], usize) {
    // The rest of the instruction's page is readable. The next page is readable if the instruction extends
    // into it.
    let here = LONGEST.min(4096 - ip % 4096);
    let mut code = [0; LONGEST];
    // SAFETY: the caller guarantees that the page is readable up to its end, and `here` ends there at the
    // latest.
    unsafe { ptr::copy_nonoverlapping(ip as *const u8, code.as_mut_ptr(), here) };
    (code, here)
}

/// Decodes the bytes of [`faulted_code`], with those of the next page if the instruction needs them.
fn decode_fully<T>(ip: usize, mut code: [u8; LONGEST], here: usize, decode: impl Fn(&[u8]) -> Option<T>) -> Option<T> {
    let decoded = decode(&code[..here]);
    if decoded.is_some() || here == LONGEST {
        return decoded;
    }
    // A failed copy means that the instruction does not continue there.
    crate::memory::copy_in((ip + here) as u64, &mut code[here..]).ok()?;
    decode(&code)
}

/// Emulates the load at the instruction pointer and steps over it. Returns false if the instruction is not a known
/// load.
///
/// # Safety
/// `context` must be the context of a fault of this thread.
unsafe fn emulate_load(clock: ClockPage, offset: usize, context: &mut ucontext_t) -> bool {
    let ip = context.uc_mcontext.gregs[libc::REG_RIP as usize] as usize;
    // SAFETY: the instruction at `ip` has faulted.
    let (code, here) = unsafe { faulted_code(ip) };
    let Some(load) = decode_fully(ip, code, here, load_decoder::decode) else {
        if let Some(nic) = process::existing() {
            nic.log().line(format_args!("access to a clock page by an unknown instruction: {code:02x?} at {ip:#x}"));
        }
        return false;
    };
    let bytes = clock.load(offset);
    match load.to {
        Destination::General(register) => {
            let register = &mut context.uc_mcontext.gregs[GENERAL[register] as usize];
            *register = load.general(register.cast_unsigned(), bytes).cast_signed();
        }
        Destination::Vector(register) => {
            let state = context.uc_mcontext.fpregs.cast::<u8>();
            if state.is_null() {
                return false;
            }
            // SAFETY: `state` refers to the kernel's FXSAVE area of 512 bytes, which has 16 bytes for each of xmm0 to
            // xmm15 from offset 160 on. A magic number in its reserved bytes says that the header of an extended area
            // follows. Bit 1 there says that the vector registers are in use; without it the kernel would clear them.
            unsafe {
                ptr::copy_nonoverlapping(bytes.as_ptr(), state.add(160 + 16 * register), 16);
                if state.add(464).cast::<u32>().read_unaligned() == EXTENDED_STATE {
                    let features = state.add(512).cast::<u64>();
                    features.write_unaligned(features.read_unaligned() | 2);
                }
            }
        }
    }
    context.uc_mcontext.gregs[libc::REG_RIP as usize] = (ip + load.length) as i64;
    true
}

/// Emulates the store at the instruction pointer and steps over it. Returns false if the instruction is not a
/// known store.
///
/// # Safety
/// `context` must be the context of a fault of this thread.
unsafe fn emulate_store(page: &Page, offset: usize, context: &mut ucontext_t) -> bool {
    let registers = &mut context.uc_mcontext.gregs;
    let ip = registers[libc::REG_RIP as usize] as usize;
    let general = GENERAL.map(|register| registers[register as usize] as u64);
    // SAFETY: the instruction at `ip` has faulted.
    let (code, here) = unsafe { faulted_code(ip) };
    let mut vector = [[0; 32]; 16];
    let state = context.uc_mcontext.fpregs;
    if !state.is_null() {
        for (i, register) in vector.iter_mut().enumerate() {
            // SAFETY: `state` refers to the kernel's FXSAVE area, which has 16 bytes for each of xmm0 to
            // xmm15 from offset 160 on.
            unsafe { ptr::copy_nonoverlapping(state.cast::<u8>().add(160 + 16 * i), register.as_mut_ptr(), 16) };
        }
        // SAFETY: `state` refers to the FXSAVE area of 512 bytes. A magic number in its reserved bytes 464 to
        // 511 says that an extended area follows. The upper halves of ymm0 to ymm15 are then at offset 576.
        unsafe {
            let magic = state.cast::<u8>().add(464).cast::<u32>().read_unaligned();
            let features = state.cast::<u8>().add(512).cast::<u64>().read_unaligned();
            if magic == EXTENDED_STATE && features & 4 != 0 {
                for (i, register) in vector.iter_mut().enumerate() {
                    ptr::copy_nonoverlapping(state.cast::<u8>().add(576 + 16 * i), register[16..].as_mut_ptr(), 16);
                }
            }
        }
    }
    let seen = Registers { general, vector };
    let decoded = decode_fully(ip, code, here, |code| decode(code, &seen));
    let nic = process::existing();
    let Some(decoded) = decoded else {
        if let Some(nic) = nic {
            nic.log().line(format_args!("access to a doorbell page by an unknown instruction: {code:02x?} at {ip:#x}"));
        }
        return false;
    };
    // SAFETY: the pointer refers to the `errno` of this thread. The program must find the old value after the
    // handler.
    let errno = unsafe { *libc::__errno_location() };
    DEVICE_ACTIVE.set(true);
    // A wide store covers several consecutive registers.
    for at in (0..decoded.size).step_by(8) {
        let size = (decoded.size - at).min(8);
        let value = decoded.bytes[at..].first_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let mask = u64::MAX >> (64 - 8 * size as u32);
        let at_page = page.offset.load(Ordering::Relaxed) + offset + at;
        let store = Store { offset: at_page, size, value: value & mask };
        // SAFETY: the pointer is null or refers to a ring that stays mapped as long as the process lives.
        match unsafe { page.ring.load(Ordering::Relaxed).as_ref() } {
            Some(ring) => ring.push(store),
            None => {
                let context = page.context.load(Ordering::Relaxed) as ContextId;
                if let Some(nic) = nic {
                    let rung = catch_unwind(AssertUnwindSafe(|| nic.doorbell(context, store)));
                    match rung {
                        Ok(true) => waker::wake_for_doorbell(),
                        Ok(false) => {}
                        Err(_) => {
                            nic.log().line("internal error of the emulator; please report it with the preceding lines");
                        }
                    }
                }
            }
        }
    }
    DEVICE_ACTIVE.set(false);
    // SAFETY: the pointer refers to the `errno` of this thread.
    unsafe { *libc::__errno_location() = errno };
    registers[libc::REG_RIP as usize] = (ip + decoded.length) as i64;
    true
}

/// Maps an empty page where a device faulted, and reports it.
///
/// The kernel keeps pinned pages for a NIC even if the program unmaps them, and the NIC continues unnoticed.
/// An empty page has the same effect. Returns false if another mapping is there that is not accessible.
fn map_empty_page(address: usize) -> bool {
    let page = address & !(PAGE - 1);
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: `MAP_FIXED_NOREPLACE` creates a mapping only where there is none.
    let mapped = unsafe { next_symbol::mmap(page as *mut c_void, PAGE, both, flags, -1, 0) };
    // Without a valid address, or without the requested address, the fault has another cause, or the kernel
    // is older than 4.17.
    let fits = mapped as usize == page && page >= LOWEST;
    if !fits && mapped != libc::MAP_FAILED {
        // SAFETY: the range was mapped above, and nobody uses it.
        unsafe { next_symbol::munmap(mapped, PAGE) };
    }
    // A fault in the following code does not come from the device.
    DEVICE_ACTIVE.set(false);
    if let Some(nic) = process::existing() {
        let (near, what) = (address & !(NEAR - 1), if fits { "unmapped" } else { "protected" });
        nic.log().line(format_args!(
            "the device accessed registered memory near {near:#x}, which the program has since {what}"
        ));
    }
    DEVICE_ACTIVE.set(fits);
    fits
}

/// Passes a fault to the previously installed handler.
///
/// # Safety
/// The caller must be a signal handler, and pass on its own arguments.
unsafe fn chain_to_previous(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: `PREVIOUS` was written before this handler was installed.
    let previous = unsafe { (&raw const PREVIOUS).read().assume_init() };
    match previous.sa_sigaction {
        libc::SIG_DFL => {
            // After the return the access is repeated and terminates the program, as without this library.
            // SAFETY: `action` is live and initialised; all-zero bytes are a valid `sigaction`.
            unsafe {
                let mut action: sigaction = zeroed();
                action.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const action, ptr::null_mut());
            }
        }
        libc::SIG_IGN => {}
        // SAFETY: the previous handler has the signature that its flags say, and the arguments are those of
        // the kernel.
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
