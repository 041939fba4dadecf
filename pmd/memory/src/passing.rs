// UNSAFETY: hands descriptors over by sendmsg(2) of the C library.
#![allow(unsafe_code)]

//! Bytes and files from process to process, over a UNIX socket (`SCM_RIGHTS`, unix(7)).

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Files that a message comes with, at most: what the kernel passes at once (`SCM_MAX_FD`).
pub const MOST_FILES: usize = 253;
/// Bytes of a message, at most: what the buffer of a socket takes at once, so that nobody has to wait.
pub const MOST_BYTES: usize = 128 << 10;

/// Sends a message: its length as four bytes, little-endian, with the files, then its bytes.
///
/// # Errors
/// The socket cannot be written, the message is too long, or there are too many files.
pub fn send(mut socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= MOST_BYTES);
    let length = length.ok_or_else(|| io::Error::other(format!("a message of {} bytes", bytes.len())))?;
    send_with_files(socket, &length.to_le_bytes(), files)?;
    socket.write_all(bytes)
}

/// Receives a message and the files that came with it. Files that came with a message that is none are closed.
///
/// # Errors
/// The socket cannot be read or was closed; the message is too long (`InvalidData`).
pub fn receive(mut socket: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
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
        // The stream may be cut anywhere; files come with the first byte.
        some => socket.read_exact(&mut length[some..])?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MOST_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a message of {length} bytes")));
    }
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    Ok((bytes, files))
}

/// Sends bytes with files. By the C library, and not by a bare system call: an emulated NIC watches for device files that are handed over.
fn send_with_files(socket: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    const ROOM: usize = 16 + 4 * MOST_FILES;
    if files.len() > MOST_FILES {
        return Err(io::Error::other(format!("{} files are more than can be passed", files.len())));
    }
    let mut control = [0u64; ROOM.div_ceil(8)];
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: all zero is a valid header; the control message fits into `control`, which is aligned for it; every pointer is valid for its
    // length and outlives the call, which reads only.
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
        assert!(send(&one, &vec![0; MOST_BYTES + 1], &[]).is_err());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [[0xff; 4].as_slice(), &[1], &[4, 0, 0, 0, 1], &[]] {
            let (mut one, other) = UnixStream::pair().unwrap();
            one.write_all(bytes).unwrap();
            drop(one);
            assert!(receive(&other).is_err(), "{bytes:?}");
        }
    }
}
