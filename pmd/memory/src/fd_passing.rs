// UNSAFETY: passes file descriptors with sendmsg(2) of the C library.
#![allow(unsafe_code)]

//! Messages with file descriptors between processes, over a UNIX socket (`SCM_RIGHTS`, unix(7)).

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Largest number of files of a message: what the kernel passes in one control message (`SCM_MAX_FD`).
pub const MAX_FILES: usize = 253;
/// Largest message in bytes. It fits into the buffer of a socket, so that the sender does not block.
pub const MAX_MESSAGE_BYTES: usize = 128 << 10;

/// Sends a message: its length as four bytes in little-endian order together with the files, then its bytes.
///
/// # Errors
/// The socket cannot be written, the message is too long, or there are too many files.
pub fn send(mut socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= MAX_MESSAGE_BYTES);
    let length = length.ok_or_else(|| {
        io::Error::other(format!("a message of {} bytes exceeds {MAX_MESSAGE_BYTES} bytes", bytes.len()))
    })?;
    send_with_files(socket, &length.to_le_bytes(), files)?;
    socket.write_all(bytes)
}

/// Receives a message and its files. Files are closed if the message is malformed.
///
/// # Errors
/// The socket cannot be read or was closed, or the message is too long (`InvalidData`).
pub fn receive(mut socket: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut length = [0; 4];
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut length)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            files.extend(passed);
        }
    }
    match got.bytes {
        0 => return Err(io::ErrorKind::UnexpectedEof.into()),
        4 => {}
        // The stream may split the length anywhere; the files come with its first byte.
        some => socket.read_exact(&mut length[some..])?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message of {length} bytes exceeds {MAX_MESSAGE_BYTES} bytes"),
        ));
    }
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    Ok((bytes, files))
}

/// Sends bytes with files.
///
/// It calls the C library instead of the kernel, since the emulator intercepts sendmsg(2) to see passed
/// device files.
fn send_with_files(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    const ROOM: usize = 16 + 4 * MAX_FILES;
    if files.len() > MAX_FILES {
        return Err(io::Error::other(format!("{} files exceed the limit of {MAX_FILES} for a message", files.len())));
    }
    let mut control = [0u64; ROOM.div_ceil(8)];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: an all-zero `msghdr` is valid. The control message fits into `control`, which is aligned for
    // it. All pointers are valid for their lengths and outlive the call, which only reads.
    let sent = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        if !files.is_empty() {
            let length = size_of_val(files) as libc::c_uint;
            (message.msg_control, message.msg_controllen) =
                (control.as_mut_ptr().cast(), libc::CMSG_SPACE(length) as usize);
            let head = libc::CMSG_FIRSTHDR(&raw const message);
            ((*head).cmsg_level, (*head).cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
            (*head).cmsg_len = libc::CMSG_LEN(length) as usize;
            for (i, file) in files.iter().enumerate() {
                let number = file.as_raw_fd().to_ne_bytes();
                libc::CMSG_DATA(head).add(i * number.len()).copy_from_nonoverlapping(number.as_ptr(), number.len());
            }
        }
        libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL)
    };
    match usize::try_from(sent) {
        Ok(sent) if sent == bytes.len() => Ok(()),
        Ok(_) => Err(io::ErrorKind::WriteZero.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_message_arrives_with_its_files() {
        let (one, other) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"seen").unwrap();
        send(&one, b"look", &[file.as_fd(), one.as_fd()]).unwrap();
        let (bytes, files) = receive(&other).unwrap();
        assert_eq!((bytes.as_slice(), files.len()), (b"look".as_slice(), 2));
        let mut text = String::new();
        let mut seen = std::fs::File::from(files.into_iter().next().unwrap());
        seen.seek(SeekFrom::Start(0)).unwrap();
        seen.read_to_string(&mut text).unwrap();
        assert_eq!(text, "seen");
        send(&one, b"", &[]).unwrap();
        assert_eq!(receive(&other).unwrap().0, b"");
        assert!(send(&one, &vec![0; MAX_MESSAGE_BYTES + 1], &[]).is_err());
    }

    #[test]
    fn malformed_messages_are_refused() {
        for bytes in [[0xff; 4].as_slice(), &[1], &[4, 0, 0, 0, 1], &[]] {
            let (mut one, other) = UnixStream::pair().unwrap();
            one.write_all(bytes).unwrap();
            drop(one);
            assert!(receive(&other).is_err(), "{bytes:?}");
        }
    }
}
