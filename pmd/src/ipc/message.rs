//! Messages between the server, which owns the port, and its clients.

use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wirepath_memory::fd_passing::MAX_MESSAGE_BYTES;

use wirepath_packet::counters::QueueCounters;

/// Version of the protocol. Both processes must use the same.
pub const VERSION: u16 = 2;
/// First bytes of every message; the version follows.
const MAGIC: &[u8; 8] = b"wpattach";
/// Bytes of magic and version.
const HEAD: usize = MAGIC.len() + size_of::<u16>();

/// An error while attaching, or the reason why the lease has ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// A socket operation failed.
    #[error("no process offers a port on this socket, or it has ended: {0}")]
    Socket(#[from] std::io::Error),
    /// A message does not follow the protocol.
    #[error("invalid message on the socket: {0}")]
    Message(String),
    /// The other process uses another version of the protocol.
    #[error(
        "the other process uses version {theirs} of the protocol, this one version {VERSION}; \
         use the same release for both"
    )]
    Version {
        /// Version of the other process.
        theirs: u16,
    },
    /// The server refused the request.
    #[error("the server refused the request: {0}")]
    Refused(String),
    /// The server has ended the lease.
    #[error("the server ended the lease: {0}")]
    Ended(String),
    /// The server's description is inconsistent.
    #[error("the server sent an inconsistent description: {0}")]
    Description(String),
    /// A verbs call failed.
    #[error(transparent)]
    Verbs(#[from] wirepath_verbs::Error),
    /// Received memory cannot be mapped.
    #[error(transparent)]
    Memory(#[from] wirepath_memory::RegionError),
    /// Received buffers cannot form a pool.
    #[error(transparent)]
    Pool(#[from] wirepath_packet::PoolError),
}

/// Number of queues and buffers that a client requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    /// Transmit queues.
    pub tx_queues: u16,
    /// Receive queues.
    pub rx_queues: u16,
    /// Packet buffers.
    pub buffers: u32,
}

/// A message from the client.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Request {
    /// Requests the state of the port.
    Look,
    /// Requests queues and buffers; allowed once per connection.
    Attach(AttachRequest),
    /// Reports that the client no longer uses its queues.
    Done,
}

/// A message from the server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Reply {
    Status(Box<Status>),
    /// Carries these files: device, packets, regions of queue memory, and the lease of the VAR, if any.
    Attached(Box<Description>),
    /// Confirms that the hardware no longer uses the queues.
    Ended,
    Refused(String),
}

/// Everything that the server created for a client.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Description {
    pub(super) status: Status,
    pub(super) packets: Packets,
    /// Kernel handles of the protection domain and of the memory registration of the packets.
    pub(super) domain: u32,
    pub(super) registration: Option<u32>,
    /// Number of regions of queue memory.
    pub(super) regions: usize,
    /// The queues, in the driver's own format.
    pub(super) common: serde_json::Value,
    pub(super) tx: Vec<serde_json::Value>,
    pub(super) rx: Vec<serde_json::Value>,
    /// The exported VAR (a page of virtio doorbells), or the reason for its absence.
    pub(super) var: Result<Vec<u8>, String>,
}

/// The packet buffers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Packets {
    /// Address of the region in the server, its length, and its lkey there.
    pub(super) address: u64,
    pub(super) bytes: usize,
    pub(super) lkey: u32,
    /// Offset of the pool in the region, and the pool's number of buffers.
    pub(super) offset: usize,
    pub(super) span: u32,
    /// Indices of the leased buffers.
    #[serde(with = "run_lengths")]
    pub(super) lent: Vec<Range<u32>>,
}

/// Compact form of sorted ranges: the length of each gap, followed by the length of the range after it.
mod run_lengths {
    use std::ops::Range;

    use serde::de::Error as _;
    use serde::ser::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(ranges: &[Range<u32>], to: S) -> Result<S::Ok, S::Error> {
        let mut last = 0;
        let steps = |range: &Range<u32>| {
            let begin = std::mem::replace(&mut last, range.end);
            Some([range.start.checked_sub(begin)?, range.end.checked_sub(range.start)?])
        };
        let steps: Option<Vec<[u32; 2]>> = ranges.iter().map(steps).collect();
        to.collect_seq(steps.ok_or_else(|| Error::custom("overlapping ranges of leased buffers"))?.as_flattened())
    }

    pub(super) fn deserialize<'d, D: Deserializer<'d>>(from: D) -> Result<Vec<Range<u32>>, D::Error> {
        let mut last = 0u32;
        let range = |pair: &[u32]| {
            let &[not, are] = pair else { return None };
            let start = last.checked_add(not)?;
            last = start.checked_add(are)?;
            Some(start..last)
        };
        let ranges: Option<_> = Vec::<u32>::deserialize(from)?.chunks(2).map(range).collect();
        ranges.ok_or_else(|| D::Error::custom("indices of leased buffers overflow"))
    }
}

/// State of a port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// Its device, as configured.
    pub device: String,
    /// Name of its driver.
    pub driver: String,
    /// Its mode, as in the capabilities.
    pub mode: String,
    /// Port number that its packets carry.
    pub port: u16,
    /// MTU in bytes, without the Ethernet header.
    pub mtu: u16,
    /// Process ID of the server.
    pub process: u32,
    /// Counters of its transmit queues.
    pub tx: Vec<QueueStatus>,
    /// Counters of its receive queues.
    pub rx: Vec<QueueStatus>,
    /// Fill level of its pool.
    pub pool: PoolStatus,
    /// Most queues and buffers that one client can have.
    pub offered: AttachRequest,
    /// Clients that currently have queues.
    pub attached: u64,
    /// Clients that have ever had queues.
    pub attached_ever: u64,
    /// Clients whose lease ended without a `Done` message.
    pub lost: u64,
}

/// Counters of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueStatus {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
    /// Dropped packets.
    pub drops: u64,
}

impl QueueStatus {
    pub(crate) fn of(counters: &QueueCounters) -> Self {
        let (packets, bytes) = (counters.packets.get(), counters.bytes.get());
        Self { packets, bytes, drops: counters.drops.total() }
    }
}

/// Fill level of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolStatus {
    /// Name of the pool.
    pub name: String,
    /// Capacity, in buffers.
    pub buffers: u32,
    /// Free buffers.
    pub free: u32,
}

/// Encodes a message.
pub(super) fn encode(message: &impl Serialize) -> Result<Vec<u8>, AttachError> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    serde_json::to_writer(&mut bytes, message).map_err(|error| AttachError::Message(error.to_string()))?;
    if bytes.len() > MAX_MESSAGE_BYTES {
        return Err(AttachError::Message(format!("{} bytes exceed the limit", bytes.len())));
    }
    Ok(bytes)
}

/// Decodes a message.
pub(super) fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, AttachError> {
    let Some((head, text)) = bytes.split_first_chunk::<HEAD>().filter(|(head, _)| head.starts_with(MAGIC)) else {
        return Err(AttachError::Message("the magic number is missing".to_owned()));
    };
    let theirs = u16::from_le_bytes([head[HEAD - 2], head[HEAD - 1]]);
    if theirs != VERSION {
        return Err(AttachError::Version { theirs });
    }
    serde_json::from_slice(text).map_err(|error| AttachError::Message(error.to_string()))
}

/// Bytes of a stream of requests, each preceded by its length.
#[derive(Debug, Default)]
pub(super) struct Inbox(Vec<u8>);

impl Inbox {
    /// Bytes of the longest request.
    const LONGEST: usize = 1024;

    /// Appends received bytes. An error means that no valid request can follow.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<(), AttachError> {
        self.0.extend(bytes);
        match self.length() {
            Some(length) if length > Self::LONGEST => {
                Err(AttachError::Message(format!("a request of {length} bytes exceeds the limit")))
            }
            _ if self.0.len() > 4 * Self::LONGEST => Err(AttachError::Message("too many requests at once".to_owned())),
            _ => Ok(()),
        }
    }

    fn length(&self) -> Option<usize> {
        self.0.first_chunk().map(|length| u32::from_le_bytes(*length) as usize)
    }

    /// Removes and returns the next request, if it is complete.
    pub(super) fn next(&mut self) -> Option<Result<Request, AttachError>> {
        let end = 4 + self.length()?;
        let message = self.0.get(4..end).map(decode)?;
        self.0.drain(..end);
        Some(message)
    }
}

/// Decoding of untrusted bytes, for tests and fuzzing.
#[cfg(any(test, fuzzing))]
pub mod fuzz {
    use super::{Description, Inbox, MAX_MESSAGE_BYTES, Reply, decode, encode};

    /// Decodes bytes as requests and as a reply. Valid requests are encoded and decoded again.
    pub fn messages(bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(MAX_MESSAGE_BYTES)];
        let mut inbox = Inbox::default();
        for piece in bytes.chunks(7) {
            if inbox.take(piece).is_err() {
                break;
            }
            while let Some(request) = inbox.next() {
                let Ok(request) = request else { break };
                let again = encode(&request).expect("a request is short");
                assert_eq!(decode::<super::Request>(&again).expect("what was written"), request);
            }
        }
        if let Ok(Reply::Attached(description)) = decode::<Reply>(bytes) {
            let Description { packets, .. } = &*description;
            super::super::client::fuzz_packets(packets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::MAX_BUFFERS;
    use super::*;

    #[test]
    fn requests_are_parsed_from_pieces() {
        let wanted = Request::Attach(AttachRequest { tx_queues: 1, rx_queues: 2, buffers: 3 });
        let mut stream = Vec::new();
        for request in [&Request::Look, &wanted, &Request::Done] {
            let bytes = encode(request).unwrap();
            stream.extend((bytes.len() as u32).to_le_bytes());
            stream.extend(bytes);
        }
        for piece in [1, 5, 1000] {
            let (mut inbox, mut got) = (Inbox::default(), Vec::new());
            for bytes in stream.chunks(piece) {
                inbox.take(bytes).unwrap();
                while let Some(request) = inbox.next() {
                    got.push(request.unwrap());
                }
            }
            assert_eq!(got.len(), 3, "{piece}");
            assert_eq!(got[1], wanted);
        }
        assert!(Inbox::default().take(&2000u32.to_le_bytes()).is_err());
        for wrong in
            [&b""[..], b"wpattach", b"wpattach\x02\x00", b"xpattach\x02\x00\"Look\"", b"wpattach\x02\x00\"Lock\""]
        {
            assert!(matches!(decode::<Request>(wrong), Err(AttachError::Message(_))), "{wrong:?}");
        }
        let later = decode::<Request>(b"wpattach\x03\x00\"Look\"").unwrap_err().to_string();
        assert!(later.contains("uses version 3 of the protocol, this one version 2"), "{later}");
    }

    #[test]
    fn largest_lease_fits_into_a_message() {
        let every = |nth: u32| (0..MAX_BUFFERS).map(move |at| nth * at + 1..nth * at + 2).collect::<Vec<_>>();
        for lent in [every(2), every(8000), vec![0..5, 7..9, 9..10], Vec::new()] {
            let packets = Packets { address: u64::MAX, bytes: 1 << 40, lkey: 1, offset: 0, span: u32::MAX, lent };
            let bytes = encode(&packets).unwrap();
            // The other parts take a few kilobytes: names, the counters of each queue, and the spans of queue
            // memory.
            assert!(bytes.len() < MAX_MESSAGE_BYTES - (8 << 10), "{}", bytes.len());
            assert_eq!(decode::<Packets>(&bytes).unwrap().lent, packets.lent);
        }
        let text = b"wpattach\x02\x00{\"address\":0,\"bytes\":0,\"lkey\":0,\"offset\":0,\"span\":0,\"lent\":";
        for wrong in ["[1]}", "[4294967295,1]}", "[1,-1]}", "[1,2,3]}"] {
            assert!(decode::<Packets>(&[text, wrong.as_bytes()].concat()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn random_bytes_are_rejected() {
        let mut rng = fastrand::Rng::with_seed(1);
        for round in 0..2000 {
            let mut bytes = if round % 2 == 0 { Vec::new() } else { encode(&Request::Look).unwrap() };
            bytes.extend((0..round % 100).map(|_| rng.u8(..)));
            fuzz::messages(&bytes);
        }
    }
}
