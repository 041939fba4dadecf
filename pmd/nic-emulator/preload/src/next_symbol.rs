//! The functions that this library replaces: the next definition of each symbol, or the system call if there
//! is none.

use std::ffi::{CStr, c_char, c_int, c_long, c_uint, c_ulong, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicPtr, Ordering};

use libc::{mode_t, msghdr, off_t, size_t, ssize_t, stat as Stat};

/// Address of a function, looked up once.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Returns the address, or null if no object defines the symbol. The lookup does not allocate if the
    /// symbol exists.
    fn get(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: the name is a valid string that ends in NUL.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// Defines functions that call the next definition of their name.
macro_rules! next {
    ($($(#[$meta:meta])* $name:ident($($argument:ident: $kind:ty),*) -> $result:ty, else $fallback:expr;)*) => { $(
        $(#[$meta])*
        pub(crate) unsafe fn $name($($argument: $kind),*) -> $result {
            static NEXT: Next = Next::new(match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            });
            let found = NEXT.get();
            if found.is_null() {
                // SAFETY: the system call does what the function does, and the caller guarantees that the
                // arguments are valid for it.
                return unsafe { $fallback } as $result;
            }
            // SAFETY: the next definition of this symbol has this type. Variadic functions take their
            // arguments in the same registers. The caller guarantees that the arguments are valid.
            unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> $result>(found)($($argument),*) }
        }
    )* };
}

next! {
    open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        else libc::syscall(libc::SYS_open, path, flags, mode);
    open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        else libc::syscall(libc::SYS_open, path, flags, mode);
    openat(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        else libc::syscall(libc::SYS_openat, folder, path, flags, mode);
    openat64(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int,
        else libc::syscall(libc::SYS_openat, folder, path, flags, mode);
    close(fd: c_int) -> c_int,
        else libc::syscall(libc::SYS_close, fd);
    stat(path: *const c_char, to: *mut Stat) -> c_int,
        else libc::syscall(libc::SYS_stat, path, to);
    stat64(path: *const c_char, to: *mut Stat) -> c_int,
        else libc::syscall(libc::SYS_stat, path, to);
    fstat(fd: c_int, to: *mut Stat) -> c_int,
        else libc::syscall(libc::SYS_fstat, fd, to);
    fstat64(fd: c_int, to: *mut Stat) -> c_int,
        else libc::syscall(libc::SYS_fstat, fd, to);
    ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int,
        else libc::syscall(libc::SYS_ioctl, fd, request, argument);
    write(fd: c_int, from: *const c_void, length: size_t) -> ssize_t,
        else libc::syscall(libc::SYS_write, fd, from, length);
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int,
        else libc::syscall(libc::SYS_socket, domain, kind, protocol);
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t,
        else libc::syscall(libc::SYS_sendmsg, fd, message, flags);
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t,
        else libc::syscall(libc::SYS_recvmsg, fd, message, flags);
}

/// Calls mmap(2) by the system call, because memory allocators call it before symbols can be looked up.
pub(crate) unsafe fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller guarantees what mmap(2) requires.
    let result = unsafe {
        libc::syscall(libc::SYS_mmap, address, length, protection as c_long, flags as c_long, fd as c_long, offset)
    };
    result as *mut c_void
}

/// Calls munmap(2) by the system call.
pub(crate) unsafe fn munmap(address: *mut c_void, length: size_t) -> c_int {
    // SAFETY: the caller guarantees that the range is not used any more.
    unsafe { libc::syscall(libc::SYS_munmap, address, length) as c_int }
}

/// Sets `errno` and returns -1.
pub(crate) fn fail(errno: rustix::io::Errno) -> c_int {
    // SAFETY: the pointer refers to the `errno` of this thread, which lives as long as the thread.
    unsafe { *libc::__errno_location() = errno.raw_os_error() };
    -1
}

/// Returns the device number of an emulated device, as `st_rdev` contains it.
pub(crate) fn device_number(minor: c_uint) -> u64 {
    libc::makedev(wirepath_nic_emulator::netlink::MAJOR, minor)
}
