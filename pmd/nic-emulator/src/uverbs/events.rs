//! Descriptors from which events are read: completion channels, and the asynchronous event descriptor of a
//! context.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair};

/// Maximum length of a record in bytes.
const RECORD: usize = 16;

/// A queue of records whose other end belongs to the application. Record boundaries are preserved
/// (`SOCK_SEQPACKET`).
#[derive(Debug)]
pub(crate) struct Channel {
    ours: OwnedFd,
    /// Duplicate of the application's descriptor, from which unread records can be taken back.
    theirs: OwnedFd,
}

impl Channel {
    /// Creates a channel; returns it and the descriptor for the application.
    pub(crate) fn new() -> Result<(Self, OwnedFd), Errno> {
        let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let handed = rustix::io::fcntl_dupfd_cloexec(&theirs, 0)?;
        Ok((Self { ours, theirs }, handed))
    }

    /// Appends a record; returns false if the queue is full.
    pub(crate) fn push(&self, record: &[u8]) -> bool {
        send(&self.ours, record, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).is_ok()
    }

    /// Removes the unread records of an object, which start with its user handle; returns their number.
    pub(crate) fn withdraw(&self, user_handle: u64, concerns: impl Fn(&[u8]) -> bool) -> u32 {
        let mut kept: Vec<Vec<u8>> = Vec::new();
        let mut withdrawn = 0;
        let mut record = [0; RECORD];
        while let Ok((length, _)) = recv(&self.theirs, &mut record, RecvFlags::DONTWAIT) {
            if length == 0 {
                break;
            }
            let bytes = &record[..length];
            if bytes.starts_with(&user_handle.to_ne_bytes()) && concerns(bytes) {
                withdrawn += 1;
            } else {
                kept.push(bytes.to_vec());
            }
        }
        for record in kept {
            self.push(&record);
        }
        withdrawn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unread_records_of_an_object_are_withdrawn() {
        let (channel, theirs) = Channel::new().unwrap();
        for handle in [1u64, 2, 1, 3] {
            assert!(channel.push(&handle.to_ne_bytes()));
        }
        let mut record = [0; 16];
        assert_eq!(recv(&theirs, &mut record, RecvFlags::empty()).unwrap().0, 8);
        assert_eq!(record[0], 1);
        assert_eq!(channel.withdraw(1, |_| true), 1);
        let rest: Vec<u8> =
            (0..2).map(|_| (recv(&theirs, &mut record, RecvFlags::empty()).unwrap(), record[0]).1).collect();
        assert_eq!(rest, [2, 3]);
    }
}
