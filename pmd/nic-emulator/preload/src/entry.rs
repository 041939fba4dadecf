//! The functions of libc that this library stands in front of. Variadic ones are defined with the arguments that they have at most: on
//! this platform both are called alike.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{mode_t, msghdr, off_t, size_t, sockaddr_nl, socklen_t, ssize_t, stat as Stat};
use rustix::io::Errno;
use wirepath_nic_defs::netlink;
use wirepath_nic_emulator::topology::Doorbells;

use crate::next::{self, fail};
use crate::process::{self, Kind, Nic, kind, mark};
use crate::{shared, thread, traps};

const DEVICES: &[u8] = b"/dev/infiniband/uverbs";

/// Number of the emulated device that a path names.
///
/// # Safety
/// `path` is null or ends in zero.
unsafe fn device(path: *const c_char) -> Option<u32> {
    if path.is_null() {
        return None;
    }
    // SAFETY: the caller's promise.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let number = path.strip_prefix(DEVICES)?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Runs the emulator; a panic of it must not unwind into the program.
fn guarded<R>(nic: &Nic, run: impl FnOnce() -> Result<R, Errno>) -> Result<R, Errno> {
    traps::at_work(|| catch_unwind(AssertUnwindSafe(run))).unwrap_or_else(|_| {
        nic.log().line("a fault of the emulator itself: please report it with what is above");
        Err(Errno::IO)
    })
}

fn open_device(minor: u32) -> Option<c_int> {
    let nic = process::nic()?;
    let opened = guarded(nic, || {
        let opened = nic.open(minor)?;
        shared::add(opened.file.as_raw_fd(), opened.context)?;
        Ok(opened)
    });
    Some(match opened {
        Ok(opened) => {
            let fd = opened.file.into_raw_fd();
            mark(fd, Kind::Device);
            thread::start(nic);
            fd
        }
        Err(errno) => fail(errno),
    })
}

macro_rules! opens {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: a path, as the function demands.
            if let Some(fd) = unsafe { device(path) }.and_then(open_device) {
                return fd;
            }
            // SAFETY: the program's own call.
            unsafe { next::$name(path, flags, mode) }
        }
    )* };
}

opens! { open; open64; }

macro_rules! opens_at {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: a path, as the function demands.
            if let Some(fd) = unsafe { device(path) }.and_then(open_device) {
                return fd;
            }
            // SAFETY: the program's own call.
            unsafe { next::$name(folder, path, flags, mode) }
        }
    )* };
}

opens_at! { openat; openat64; }

#[unsafe(no_mangle)]
unsafe extern "C" fn close(fd: c_int) -> c_int {
    let kind = kind(fd);
    if kind != Kind::Foreign
        && let Some(nic) = process::existing()
    {
        mark(fd, Kind::Foreign);
        let _ = guarded(nic, || {
            nic.close(fd);
            Ok(())
        });
        if kind == Kind::Device {
            shared::remove(fd);
        }
    }
    // SAFETY: the program's own call.
    unsafe { next::close(fd) }
}

/// Makes a file look like the character device that it stands for.
///
/// # Safety
/// `to` is valid.
unsafe fn dress(to: *mut Stat, minor: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        (*to).st_mode = libc::S_IFCHR | 0o666;
        (*to).st_rdev = next::device_number(minor);
        (*to).st_nlink = 1;
    }
}

macro_rules! stats {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, to: *mut Stat) -> c_int {
            // SAFETY: a path, as the function demands.
            if let Some(minor) = unsafe { device(path) }
                && let Some(nic) = process::nic()
                && (minor as usize) < nic.topology().devices.len()
            {
                // SAFETY: a buffer, as the function demands.
                unsafe {
                    to.write_bytes(0, 1);
                    dress(to, minor);
                }
                return 0;
            }
            // SAFETY: the program's own call.
            unsafe { next::$name(path, to) }
        }
    )* };
}

stats! { stat; stat64; }

/// Whether it is a file without a name, as those behind open devices are.
///
/// # Safety
/// `stat` is valid.
unsafe fn is_unlinked_file(stat: *const Stat) -> bool {
    // SAFETY: the caller's promise.
    unsafe { (*stat).st_mode & libc::S_IFMT == libc::S_IFREG && (*stat).st_nlink == 0 }
}

/// A descriptor that may be a duplicate of an open device's, or one of another process's device: `ibv_import_device` looks at what it is
/// given before it uses it. The emulator, if it is one.
fn adopt(fd: c_int, inode: u64) -> Option<&'static Nic> {
    // Made no sooner than it is needed: a program may look at memory of its own, and then put an allocator of its own in place, as VPP does.
    let nic = shared::is_ours(fd).then(process::nic).flatten()?;
    guarded(nic, || {
        if !nic.adopt(fd, inode) {
            shared::adopt_foreign(nic, fd, inode)?;
        }
        Ok(())
    })
    .ok()?;
    mark(fd, Kind::Device);
    Some(nic)
}

macro_rules! fstats {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int, to: *mut Stat) -> c_int {
            // SAFETY: the program's own call.
            let result = unsafe { next::$name(fd, to) };
            // SAFETY: the call above has filled it.
            if result == 0 && kind(fd) == Kind::Foreign && unsafe { is_unlinked_file(to) } {
                // SAFETY: as above.
                adopt(fd, unsafe { (*to).st_ino });
            }
            if result == 0
                && kind(fd) == Kind::Device
                && let Some(minor) = process::existing().and_then(|nic| nic.minor(fd))
            {
                // SAFETY: the call above has filled it.
                unsafe { dress(to, minor) };
            }
            result
        }
    )* };
}

fstats! { fstat; fstat64; }

/// The emulator, for a command on a descriptor, once it has seen what other processes have stored before.
fn behind_others(nic: &Nic, fd: c_int) -> &Nic {
    if thread::expects_others() {
        shared::settle(nic, fd);
    }
    nic
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if kind(fd) == Kind::Device
        && let Some(nic) = process::existing()
    {
        return match guarded(nic, || behind_others(nic, fd).ioctl(fd, request, argument as u64)) {
            Ok(()) => 0,
            Err(errno) => fail(errno),
        };
    }
    // SAFETY: the program's own call.
    unsafe { next::ioctl(fd, request, argument) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, from: *const c_void, length: size_t) -> ssize_t {
    if kind(fd) == Kind::Device
        && let Some(nic) = process::existing()
    {
        return match guarded(nic, || behind_others(nic, fd).write(fd, from as u64, length)) {
            Ok(taken) => taken as ssize_t,
            Err(errno) => fail(errno) as ssize_t,
        };
    }
    // SAFETY: the program's own call.
    unsafe { next::write(fd, from, length) }
}

/// Maps a doorbell page: open in scan mode, else closed, so that stores are seen.
///
/// # Safety
/// As mmap(2).
unsafe fn map_device(
    nic: &Nic,
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let mapped = guarded(nic, || {
        if protection & libc::PROT_EXEC != 0 || flags & libc::MAP_SHARED == 0 {
            nic.log().line("mmap of a device must be MAP_SHARED and not executable");
            return Err(Errno::INVAL);
        }
        nic.map(fd, offset as u64, length)
    });
    let (context, at) = match mapped {
        Ok(mapped) => mapped,
        Err(errno) => {
            fail(errno);
            return libc::MAP_FAILED;
        }
    };
    let trapped = nic.topology().doorbells != Doorbells::Scan;
    let protection = if trapped { libc::PROT_NONE } else { protection };
    // SAFETY: a page of the context's file.
    let page = unsafe { next::mmap(address, length, protection, flags, fd, at as off_t) };
    if page != libc::MAP_FAILED {
        // As the kernel's doorbell mappings: a child does not get it.
        // SAFETY: the mapping just made.
        unsafe { libc::madvise(page, length, libc::MADV_DONTFORK) };
        let target = shared::owner_of(context).unwrap_or(traps::Target::Context(context));
        if trapped && !traps::watch(page as usize, length, at as usize, target) {
            nic.log().line("too many doorbell pages");
        }
    }
    page
}

macro_rules! maps {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(address: *mut c_void, length: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void {
            if fd >= 0 && flags & libc::MAP_SHARED != 0 {
                if kind(fd) == Kind::Device
                    && let Some(nic) = process::existing()
                {
                    // SAFETY: the program's own call.
                    return unsafe { map_device(nic, address, length, protection, flags, fd, offset) };
                }
                // SAFETY: the program's own call.
                if let Some(page) = unsafe { shared::map_foreign(address, length, protection, flags, fd, offset) } {
                    return page;
                }
                // Where a register lies that is not at the start, only its context knows.
                if offset != 0
                    && let Some(inode) = shared::inode(fd)
                    && let Some(nic) = adopt(fd, inode)
                {
                    // SAFETY: the program's own call.
                    return unsafe { map_device(nic, address, length, protection, flags, fd, offset) };
                }
            }
            // SAFETY: the program's own call.
            unsafe { next::mmap(address, length, protection, flags, fd, offset) }
        }
    )* };
}

maps! { mmap; mmap64; }

#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(address: *mut c_void, length: size_t) -> c_int {
    traps::unwatch(address as usize, length);
    // SAFETY: the program's own call.
    unsafe { next::munmap(address, length) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == libc::AF_NETLINK
        && protocol == netlink::PROTOCOL
        && let Some(nic) = process::nic()
    {
        // A real socket of another netlink family: bind, getsockname and options work on it.
        // SAFETY: plain call.
        let fd = unsafe { next::socket(domain, kind, libc::NETLINK_ROUTE) };
        if fd >= 0 {
            mark(fd, Kind::Netlink);
            nic.netlink_open(fd);
        }
        return fd;
    }
    // SAFETY: the program's own call.
    unsafe { next::socket(domain, kind, protocol) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    if kind(fd) == Kind::Netlink
        && let Some(nic) = process::existing()
    {
        // SAFETY: a message header with its parts, as the function demands.
        let parts = unsafe { std::slice::from_raw_parts((*message).msg_iov, (*message).msg_iovlen) };
        let mut datagram = Vec::new();
        for part in parts {
            // SAFETY: as above.
            datagram.extend_from_slice(unsafe { std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len) });
        }
        let length = datagram.len() as ssize_t;
        return match guarded(nic, || {
            nic.netlink_send(fd, &datagram);
            Ok(length)
        }) {
            Ok(length) => length,
            Err(errno) => fail(errno) as ssize_t,
        };
    }
    // SAFETY: a message header, as the function demands.
    if process::existing().is_some() && unsafe { shared::hands_over(message) } {
        thread::expect_others();
    }
    // SAFETY: the program's own call.
    unsafe { next::sendmsg(fd, message, flags) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    if kind(fd) == Kind::Netlink
        && let Some(nic) = process::existing()
    {
        let datagram = match guarded(nic, || nic.netlink_receive(fd, flags & libc::MSG_PEEK != 0)) {
            Ok(datagram) => datagram,
            Err(errno) => return fail(errno) as ssize_t,
        };
        // SAFETY: a message header with its parts, as the function demands.
        return unsafe { hand_datagram(&mut *message, &datagram, flags) };
    }
    // SAFETY: the program's own call.
    unsafe { next::recvmsg(fd, message, flags) }
}

/// Fills a message header as the kernel would.
///
/// # Safety
/// The header's parts are valid.
unsafe fn hand_datagram(message: &mut msghdr, datagram: &[u8], flags: c_int) -> ssize_t {
    let mut rest = datagram;
    // SAFETY: the caller's promise.
    for part in unsafe { std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen) } {
        let size = part.iov_len.min(rest.len());
        // SAFETY: the part is that long.
        unsafe { part.iov_base.cast::<u8>().copy_from_nonoverlapping(rest.as_ptr(), size) };
        rest = &rest[size..];
    }
    message.msg_flags = if rest.is_empty() { 0 } else { libc::MSG_TRUNC };
    message.msg_controllen = 0;
    let size = size_of::<sockaddr_nl>();
    if !message.msg_name.is_null() && message.msg_namelen as usize >= size {
        // SAFETY: zero is a valid address: the kernel's.
        let mut from: sockaddr_nl = unsafe { std::mem::zeroed() };
        from.nl_family = libc::AF_NETLINK as u16;
        // SAFETY: there is room.
        unsafe { message.msg_name.cast::<sockaddr_nl>().write_unaligned(from) };
        message.msg_namelen = size as socklen_t;
    }
    let taken = if flags & libc::MSG_TRUNC != 0 { datagram.len() } else { datagram.len() - rest.len() };
    taken as ssize_t
}
