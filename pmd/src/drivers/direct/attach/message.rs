//! What the two processes say to each other.

use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use wirepath_memory::passing::MOST_BYTES;

use crate::counters::QueueCounters;

/// Version of the protocol: both processes speak the same.
pub const VERSION: u16 = 2;
/// What every message begins with; the version follows.
const MAGIC: &[u8; 8] = b"wpattach";
/// Bytes before what a message says.
const HEAD: usize = MAGIC.len() + size_of::<u16>();
/// Most queues of one attachment, each way.
pub(super) const MOST_QUEUES: u16 = 64;
/// Most buffers of one attachment: what their description has room for, scattered as they may be.
pub(super) const MOST_BUFFERS: u32 = 1 << 14;

/// Why a process could not attach, or is attached no more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The socket does not work.
    #[error("no process offers a port on this socket, or it ended meanwhile: {0}")]
    Socket(#[from] std::io::Error),
    /// Not the protocol.
    #[error("what came over the socket is no message of this protocol: {0}")]
    Message(String),
    /// Another version of it.
    #[error(
        "the other process speaks version {theirs} of the protocol, this one version {VERSION}: run the same release of both"
    )]
    Version {
        /// Of the other process.
        theirs: u16,
    },
    /// The process with the port says no.
    #[error("the process with the port refuses: {0}")]
    Refused(String),
    /// It has ended what it gave.
    #[error("the process with the port has ended this: {0}")]
    Ended(String),
    /// What it described is not so.
    #[error("the process with the port described what cannot be: {0}")]
    Description(String),
    /// A call failed.
    #[error(transparent)]
    Verbs(#[from] wirepath_verbs::Error),
    /// Memory that was passed cannot be mapped.
    #[error(transparent)]
    Memory(#[from] wirepath_memory::RegionError),
    /// The buffers that were passed make no pool.
    #[error(transparent)]
    Pool(#[from] crate::packet::PoolError),
}

/// What a process wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Wanted {
    /// Transmit queues.
    pub tx_queues: u16,
    /// Receive queues.
    pub rx_queues: u16,
    /// Packet buffers.
    pub buffers: u32,
}

/// From the process that attaches.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Request {
    /// How is the port?
    Look,
    /// Queues, please. Once on a socket.
    Attach(Wanted),
    /// Nothing of them is used any more.
    Done,
}

/// From the process with the port.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) enum Reply {
    Status(Box<Status>),
    /// With files: device, packets, regions of queue memory, and the lease of a VAR if there is one.
    Attached(Box<Description>),
    /// The hardware uses nothing of it any more.
    Ended,
    Refused(String),
}

/// Where something lies in a region of queue memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct At {
    pub(crate) region: usize,
    pub(crate) offset: usize,
    pub(crate) bytes: usize,
}

/// What was made for a process.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Description {
    pub(super) status: Status,
    pub(super) packets: Packets,
    /// The kernel's names of the protection domain and of the registration of the packets.
    pub(super) domain: u32,
    pub(super) registration: Option<u32>,
    /// Regions of queue memory.
    pub(super) regions: usize,
    /// As the driver describes them.
    pub(super) common: serde_json::Value,
    pub(super) tx: Vec<serde_json::Value>,
    pub(super) rx: Vec<serde_json::Value>,
    /// A page of virtio doorbells, or why there is none.
    pub(super) var: Result<Vec<u8>, String>,
}

/// The packet buffers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Packets {
    /// Address of the region in the process that registered it, and its key.
    pub(super) address: u64,
    pub(super) bytes: usize,
    pub(super) lkey: u32,
    /// Where the pool lies in the region, and how many buffers it has.
    pub(super) offset: usize,
    pub(super) span: u32,
    /// Those that are lent.
    #[serde(with = "steps")]
    pub(super) lent: Vec<Range<u32>>,
}

/// Ranges in order, in few bytes: how many are not in one, how many are, and so on in turn.
mod steps {
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
        to.collect_seq(steps.ok_or_else(|| Error::custom("buffers that are lent twice"))?.as_flattened())
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
        ranges.ok_or_else(|| D::Error::custom("buffers beyond all numbers"))
    }
}

/// How a port is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Status {
    /// Its device, as the configuration names it.
    pub device: String,
    /// The driver.
    pub driver: String,
    /// The mode that it is in.
    pub mode: String,
    /// Number that its packets carry.
    pub port: u16,
    /// Largest layer-3 packet.
    pub mtu: u16,
    /// Process that has it.
    pub process: u32,
    /// Its transmit queues.
    pub tx: Vec<QueueStatus>,
    /// Its receive queues.
    pub rx: Vec<QueueStatus>,
    /// Its packet buffers.
    pub pool: PoolStatus,
    /// What a process can have at most.
    pub offered: Wanted,
    /// Processes that are attached with queues now, attached ever, and of these ended without a word.
    pub attached: u64,
    /// See above.
    pub attached_ever: u64,
    /// See above.
    pub lost: u64,
}

/// What a queue did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QueueStatus {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
    /// Packets that were dropped.
    pub drops: u64,
}

impl QueueStatus {
    pub(crate) fn of(counters: &QueueCounters) -> Self {
        let (packets, bytes) = (counters.packets.get(), counters.bytes.get());
        Self { packets, bytes, drops: counters.drops.total() }
    }
}

/// Packet buffers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolStatus {
    /// Name of the pool.
    pub name: String,
    /// Buffers.
    pub buffers: u32,
    /// Of these free.
    pub free: u32,
}

/// The bytes of a message.
pub(super) fn encode(message: &impl Serialize) -> Result<Vec<u8>, AttachError> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend(VERSION.to_le_bytes());
    serde_json::to_writer(&mut bytes, message).map_err(|error| AttachError::Message(error.to_string()))?;
    if bytes.len() > MOST_BYTES {
        return Err(AttachError::Message(format!("{} bytes are too many", bytes.len())));
    }
    Ok(bytes)
}

/// What a message says.
pub(super) fn decode<M: DeserializeOwned>(bytes: &[u8]) -> Result<M, AttachError> {
    let Some((head, text)) = bytes.split_first_chunk::<HEAD>().filter(|(head, _)| head.starts_with(MAGIC)) else {
        return Err(AttachError::Message("it does not begin as one".to_owned()));
    };
    let theirs = u16::from_le_bytes([head[HEAD - 2], head[HEAD - 1]]);
    if theirs != VERSION {
        return Err(AttachError::Version { theirs });
    }
    serde_json::from_slice(text).map_err(|error| AttachError::Message(error.to_string()))
}

/// A message as it comes in pieces, length first.
#[derive(Debug, Default)]
pub(super) struct Inbox(Vec<u8>);

impl Inbox {
    /// Longest request.
    const LONGEST: usize = 1024;

    /// Takes in what was read. An error: there will be no message.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<(), AttachError> {
        self.0.extend(bytes);
        match self.length() {
            Some(length) if length > Self::LONGEST => Err(AttachError::Message(format!("{length} bytes"))),
            _ if self.0.len() > 4 * Self::LONGEST => Err(AttachError::Message("too much at once".to_owned())),
            _ => Ok(()),
        }
    }

    fn length(&self) -> Option<usize> {
        self.0.first_chunk().map(|length| u32::from_le_bytes(*length) as usize)
    }

    /// The next request, if it is there whole.
    pub(super) fn next(&mut self) -> Option<Result<Request, AttachError>> {
        let end = 4 + self.length()?;
        let message = self.0.get(4..end).map(decode)?;
        self.0.drain(..end);
        Some(message)
    }
}

/// For fuzzing: foreign bytes as what either process gets.
#[cfg(any(test, fuzzing))]
pub mod hostile {
    use super::{Description, Inbox, MOST_BYTES, Reply, decode, encode};

    /// Reads bytes as messages of either kind; what is one is written and read once more.
    pub fn attach(bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(MOST_BYTES)];
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
            super::super::borrower::hostile(packets);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_come_in_pieces_and_nothing_else_is_one() {
        let wanted = Request::Attach(Wanted { tx_queues: 1, rx_queues: 2, buffers: 3 });
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
        assert!(later.contains("speaks version 3 of the protocol, this one version 2"), "{later}");
    }

    #[test]
    fn the_largest_loan_fits_into_a_message_however_scattered_it_is() {
        let every = |nth: u32| (0..MOST_BUFFERS).map(move |at| nth * at + 1..nth * at + 2).collect::<Vec<_>>();
        for lent in [every(2), every(8000), vec![0..5, 7..9, 9..10], Vec::new()] {
            let packets = Packets { address: u64::MAX, bytes: 1 << 40, lkey: 1, offset: 0, span: u32::MAX, lent };
            let bytes = encode(&packets).unwrap();
            // The rest is a few kilobytes: names, counters of each queue, and where they lie.
            assert!(bytes.len() < MOST_BYTES - (8 << 10), "{}", bytes.len());
            assert_eq!(decode::<Packets>(&bytes).unwrap().lent, packets.lent);
        }
        let text = b"wpattach\x02\x00{\"address\":0,\"bytes\":0,\"lkey\":0,\"offset\":0,\"span\":0,\"lent\":";
        for wrong in ["[1]}", "[4294967295,1]}", "[1,-1]}", "[1,2,3]}"] {
            assert!(decode::<Packets>(&[text, wrong.as_bytes()].concat()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn random_bytes_are_no_messages() {
        let mut state = 1u64;
        for round in 0..2000 {
            let mut bytes = if round % 2 == 0 { Vec::new() } else { encode(&Request::Look).unwrap() };
            for _ in 0..round % 100 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                bytes.push((state >> 56) as u8);
            }
            hostile::attach(&bytes);
        }
    }
}
