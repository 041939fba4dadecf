//! Captures of a running program as pcapng, each written by a thread of its own.
//!
//! Each port is an interface of the file, and a last one has the packets without a port. The flags of a packet say
//! whether it was received or sent; a dropped packet has its drop reason as a comment. Interface statistics at the end
//! have the numbers of packets in the file and of those left out, with the reasons as a comment.

mod file;
mod pcapng;
mod socket;

pub use file::FileCapture;
pub use pcapng::{CaptureLimits, EndReason};
pub(crate) use socket::SocketCapture;
