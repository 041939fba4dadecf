//! Functions of libc that this library replaces. Variadic functions are defined with their maximum number of
//! arguments: on this platform the calling convention is the same.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::os::fd::{AsRawFd, IntoRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};

use libc::{mode_t, msghdr, off_t, size_t, sockaddr_nl, socklen_t, ssize_t, stat as Stat};
use rustix::io::Errno;
use wirepath_nic_defs::netlink;
use wirepath_nic_emulator::ClockPage;
use wirepath_nic_emulator::device::Mapping;
use wirepath_nic_emulator::topology::Doorbells;

use crate::next_symbol::{self, fail};
use crate::process::{self, Kind, Nic, kind, set_kind};
use crate::{lifecycle, remote_doorbells, thread, traps};

const DEVICES: &[u8] = b"/dev/infiniband/uverbs";

/// Returns the minor number of the emulated device that a path names.
///
/// # Safety
/// `path` must be null or a valid string that ends in NUL.
unsafe fn device(path: *const c_char) -> Option<u32> {
    if path.is_null() {
        return None;
    }
    // SAFETY: `path` is not null, and the caller guarantees that it is a valid string that ends in NUL.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let number = path.strip_prefix(DEVICES)?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Calls the emulator. A panic must not unwind into the program, and is reported as `EIO`.
fn guarded<R>(nic: &Nic, run: impl FnOnce() -> Result<R, Errno>) -> Result<R, Errno> {
    traps::with_device_active(|| catch_unwind(AssertUnwindSafe(run))).unwrap_or_else(|_| {
        nic.log().line("internal error of the emulator; please report it with the preceding lines");
        Err(Errno::IO)
    })
}

fn open_device(minor: u32) -> Option<c_int> {
    let nic = lifecycle::nic()?;
    let opened = guarded(nic, || {
        let opened = nic.open(minor)?;
        remote_doorbells::add(opened.file.as_raw_fd(), opened.context)?;
        Ok(opened)
    });
    Some(match opened {
        Ok(opened) => {
            let fd = opened.file.into_raw_fd();
            set_kind(fd, Kind::Device);
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
            // SAFETY: `open` requires a path that ends in NUL, and the program passes it on.
            if let Some(fd) = unsafe { device(path) }.and_then(open_device) {
                return fd;
            }
            // SAFETY: the arguments are those of the program's own call.
            unsafe { next_symbol::$name(path, flags, mode) }
        }
    )* };
}

opens! { open; open64; }

macro_rules! opens_at {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(folder: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int {
            // SAFETY: `openat` requires a path that ends in NUL, and the program passes it on.
            if let Some(fd) = unsafe { device(path) }.and_then(open_device) {
                return fd;
            }
            // SAFETY: the arguments are those of the program's own call.
            unsafe { next_symbol::$name(folder, path, flags, mode) }
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
        set_kind(fd, Kind::Foreign);
        let _ = guarded(nic, || {
            nic.close(fd);
            Ok(())
        });
        if kind == Kind::Device {
            remote_doorbells::remove(fd);
        }
    }
    // SAFETY: the argument is that of the program's own call.
    unsafe { next_symbol::close(fd) }
}

/// Makes the status of a file look like that of a character device.
///
/// # Safety
/// `to` must be valid for writes.
unsafe fn set_device_stat(to: *mut Stat, minor: u32) {
    // SAFETY: the caller guarantees that `to` is valid for writes.
    unsafe {
        (*to).st_mode = libc::S_IFCHR | 0o666;
        (*to).st_rdev = next_symbol::device_number(minor);
        (*to).st_nlink = 1;
    }
}

macro_rules! stats {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, to: *mut Stat) -> c_int {
            // SAFETY: `stat` requires a path that ends in NUL, and the program passes it on.
            if let Some(minor) = unsafe { device(path) }
                && let Some(nic) = lifecycle::nic()
                && (minor as usize) < nic.topology().devices.len()
            {
                // SAFETY: `stat` requires a buffer that is valid for writes, and the program passes it on.
                // All-zero bytes are a valid `stat`.
                unsafe {
                    to.write_bytes(0, 1);
                    set_device_stat(to, minor);
                }
                return 0;
            }
            // SAFETY: the arguments are those of the program's own call.
            unsafe { next_symbol::$name(path, to) }
        }
    )* };
}

stats! { stat; stat64; }

/// Returns true for a file without a name, as the files behind open devices are.
///
/// # Safety
/// `stat` must be valid for reads.
unsafe fn is_unlinked_file(stat: *const Stat) -> bool {
    // SAFETY: the caller guarantees that `stat` is valid for reads.
    unsafe { (*stat).st_mode & libc::S_IFMT == libc::S_IFREG && (*stat).st_nlink == 0 }
}

/// Registers a descriptor if it is a duplicate of an open device, or a device that another process has
/// passed. `ibv_import_device` checks a descriptor before it uses it. Returns the emulator if the descriptor
/// was registered.
fn adopt(fd: c_int, inode: u64) -> Option<&'static Nic> {
    // The emulator is created as late as possible. A program may inspect its own memory and then install its
    // own allocator, as VPP does.
    let nic = remote_doorbells::is_device_file(fd).then(lifecycle::nic).flatten()?;
    guarded(nic, || {
        if !nic.register_duplicate(fd, inode) {
            remote_doorbells::import_context(nic, fd, inode)?;
        }
        Ok(())
    })
    .ok()?;
    set_kind(fd, Kind::Device);
    Some(nic)
}

macro_rules! fstats {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(fd: c_int, to: *mut Stat) -> c_int {
            // SAFETY: the arguments are those of the program's own call.
            let result = unsafe { next_symbol::$name(fd, to) };
            // SAFETY: the call succeeded, so it has filled `to`, which is valid for reads.
            if result == 0 && kind(fd) == Kind::Foreign && unsafe { is_unlinked_file(to) } {
                // SAFETY: the call succeeded, so it has filled `to`, which is valid for reads.
                adopt(fd, unsafe { (*to).st_ino });
            }
            if result == 0
                && kind(fd) == Kind::Device
                && let Some(minor) = process::existing().and_then(|nic| nic.minor(fd))
            {
                // SAFETY: the call succeeded, so `to` is valid for writes.
                unsafe { set_device_stat(to, minor) };
            }
            result
        }
    )* };
}

fstats! { fstat; fstat64; }

/// Applies the doorbells that other processes have rung before a command on the descriptor, and returns the
/// emulator.
fn after_remote_stores(nic: &Nic, fd: c_int) -> &Nic {
    if thread::has_remote_doorbells() {
        remote_doorbells::drain(nic, fd);
    }
    nic
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if kind(fd) == Kind::Device
        && let Some(nic) = process::existing()
    {
        return match guarded(nic, || after_remote_stores(nic, fd).ioctl(fd, request, argument as u64)) {
            Ok(()) => 0,
            Err(errno) => fail(errno),
        };
    }
    // SAFETY: the arguments are those of the program's own call.
    unsafe { next_symbol::ioctl(fd, request, argument) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn write(fd: c_int, from: *const c_void, length: size_t) -> ssize_t {
    if kind(fd) == Kind::Device
        && let Some(nic) = process::existing()
    {
        return match guarded(nic, || after_remote_stores(nic, fd).write(fd, from as u64, length)) {
            Ok(taken) => taken as ssize_t,
            Err(errno) => fail(errno) as ssize_t,
        };
    }
    // SAFETY: the arguments are those of the program's own call.
    unsafe { next_symbol::write(fd, from, length) }
}

/// Maps a doorbell page: accessible in scan mode, otherwise protected, so that stores trap.
///
/// # Safety
/// The caller must guarantee what mmap(2) requires; with `MAP_FIXED` that the range may be replaced.
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
        Ok((context, Mapping::Doorbells(at))) => (context, at),
        Ok((_, Mapping::Clock(page))) => {
            // SAFETY: the caller guarantees what mmap(2) requires.
            return unsafe { map_clock(nic, address, length, protection, flags, page) };
        }
        Err(errno) => {
            fail(errno);
            return libc::MAP_FAILED;
        }
    };
    let trapped = nic.topology().doorbells != Doorbells::Scan;
    let protection = if trapped { libc::PROT_NONE } else { protection };
    // SAFETY: the caller guarantees what mmap(2) requires; `at` is a page of the context's file.
    let page = unsafe { next_symbol::mmap(address, length, protection, flags, fd, at as off_t) };
    if page != libc::MAP_FAILED {
        // The kernel's doorbell mappings are not inherited by a child either. SAFETY: the range is the
        // mapping that was just created.
        unsafe { libc::madvise(page, length, libc::MADV_DONTFORK) };
        let target = remote_doorbells::doorbell_target(context).unwrap_or(traps::Target::Context(context));
        if trapped && !traps::watch(page as usize, length, at as usize, target) {
            nic.log().line("too many doorbell pages: stores to the new one will fault");
        }
    }
    page
}

/// Maps a page that shows the clock. It is protected in all modes, so that each load traps.
///
/// # Safety
/// The caller must guarantee what mmap(2) requires; with `MAP_FIXED` that the range may be replaced.
unsafe fn map_clock(
    nic: &Nic,
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    clock: ClockPage,
) -> *mut c_void {
    if protection & libc::PROT_WRITE != 0 {
        nic.log().line("the clock of a device can only be mapped for reading");
        fail(Errno::PERM);
        return libc::MAP_FAILED;
    }
    clock.prepare();
    let flags = flags & !libc::MAP_SHARED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the caller guarantees what mmap(2) requires. The page has no content.
    let page = unsafe { next_symbol::mmap(address, length, libc::PROT_NONE, flags, -1, 0) };
    if page != libc::MAP_FAILED && !traps::watch(page as usize, length, 0, traps::Target::Clock(clock)) {
        nic.log().line("too many device pages: loads from the clock will fault");
    }
    page
}

/// Returns true if the topology sets the scan mode. It applies to the pages of other processes' devices too,
/// because these processes use the same topology.
fn scans() -> bool {
    lifecycle::nic().is_some_and(|nic| nic.topology().doorbells == Doorbells::Scan)
}

macro_rules! maps {
    ($($name:ident;)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(
            address: *mut c_void,
            length: size_t,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: off_t,
        ) -> *mut c_void {
            if fd >= 0 && flags & libc::MAP_SHARED != 0 {
                if kind(fd) == Kind::Device
                    && let Some(nic) = process::existing()
                {
                    // SAFETY: the program guarantees what its own mmap(2) call requires.
                    return unsafe { map_device(nic, address, length, protection, flags, fd, offset) };
                }
                // SAFETY: the program guarantees what its own mmap(2) call requires.
                let page = unsafe {
                    remote_doorbells::map_remote_page(address, length, protection, flags, fd, offset, scans)
                };
                if let Some(page) = page {
                    return page;
                }
                // Pages that are not at the start of the file are known only to their context.
                if offset != 0
                    && let Some(inode) = remote_doorbells::inode(fd)
                    && let Some(nic) = adopt(fd, inode)
                {
                    // SAFETY: the program guarantees what its own mmap(2) call requires.
                    return unsafe { map_device(nic, address, length, protection, flags, fd, offset) };
                }
            }
            // SAFETY: the arguments are those of the program's own call.
            unsafe { next_symbol::mmap(address, length, protection, flags, fd, offset) }
        }
    )* };
}

maps! { mmap; mmap64; }

#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(address: *mut c_void, length: size_t) -> c_int {
    traps::unwatch(address as usize, length);
    // SAFETY: the arguments are those of the program's own call.
    unsafe { next_symbol::munmap(address, length) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    if domain == libc::AF_NETLINK
        && protocol == netlink::PROTOCOL
        && let Some(nic) = lifecycle::nic()
    {
        // A real socket of another netlink family supports bind, getsockname and socket options. SAFETY: the
        // call has no pointer arguments.
        let fd = unsafe { next_symbol::socket(domain, kind, libc::NETLINK_ROUTE) };
        if fd >= 0 {
            set_kind(fd, Kind::Netlink);
            nic.netlink_open(fd);
        }
        return fd;
    }
    // SAFETY: the arguments are those of the program's own call.
    unsafe { next_symbol::socket(domain, kind, protocol) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    if kind(fd) == Kind::Netlink
        && let Some(nic) = process::existing()
    {
        // SAFETY: `sendmsg` requires a valid message header, whose `msg_iov` has `msg_iovlen` elements.
        let parts = unsafe { std::slice::from_raw_parts((*message).msg_iov, (*message).msg_iovlen) };
        let mut datagram = Vec::new();
        for part in parts {
            // SAFETY: `sendmsg` requires that each element is valid for reads of `iov_len` bytes.
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
    // SAFETY: `sendmsg` requires a valid message header, and the program passes it on.
    if process::existing().is_some() && unsafe { remote_doorbells::passes_device_fd(message) } {
        thread::enable_remote_doorbells();
    }
    // SAFETY: the arguments are those of the program's own call.
    unsafe { next_symbol::sendmsg(fd, message, flags) }
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
        // SAFETY: `recvmsg` requires a valid message header whose elements are valid for writes.
        return unsafe { copy_datagram(&mut *message, &datagram, flags) };
    }
    // SAFETY: the arguments are those of the program's own call.
    unsafe { next_symbol::recvmsg(fd, message, flags) }
}

/// Fills a message header, as the kernel does.
///
/// # Safety
/// `msg_iov` must have `msg_iovlen` elements that are valid for writes of `iov_len` bytes. `msg_name` must be
/// null or valid for writes of `msg_namelen` bytes.
unsafe fn copy_datagram(message: &mut msghdr, datagram: &[u8], flags: c_int) -> ssize_t {
    let mut rest = datagram;
    // SAFETY: the caller guarantees that `msg_iov` has `msg_iovlen` elements.
    for part in unsafe { std::slice::from_raw_parts(message.msg_iov, message.msg_iovlen) } {
        let size = part.iov_len.min(rest.len());
        // SAFETY: the caller guarantees that the element is valid for writes of `iov_len` bytes, and `size`
        // is at most that.
        unsafe { part.iov_base.cast::<u8>().copy_from_nonoverlapping(rest.as_ptr(), size) };
        rest = &rest[size..];
    }
    message.msg_flags = if rest.is_empty() { 0 } else { libc::MSG_TRUNC };
    message.msg_controllen = 0;
    let size = size_of::<sockaddr_nl>();
    if !message.msg_name.is_null() && message.msg_namelen as usize >= size {
        // SAFETY: `sockaddr_nl` contains only integers, so all-zero bytes are a valid value. Port 0 is the
        // kernel.
        let mut from: sockaddr_nl = unsafe { std::mem::zeroed() };
        from.nl_family = libc::AF_NETLINK as u16;
        // SAFETY: `msg_name` is not null and valid for writes of `msg_namelen` bytes, which is at least the
        // size of `sockaddr_nl`.
        unsafe { message.msg_name.cast::<sockaddr_nl>().write_unaligned(from) };
        message.msg_namelen = size as socklen_t;
    }
    let taken = if flags & libc::MSG_TRUNC != 0 { datagram.len() } else { datagram.len() - rest.len() };
    taken as ssize_t
}
