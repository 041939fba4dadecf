//! Queues of a running port for other processes.
//!
//! The server is the process that owns the port. It listens on a UNIX socket. A client attaches through this
//! socket and gets its own queues and a part of the packet buffers. It maps the memory of the queues, the
//! packets and the doorbell page. It then transmits and receives without the server. The server keeps all
//! hardware objects and continues to use its own queues.
//!
//! ```text
//! server (owns the port)                      client
//!                            <- attach ------ number of queues and buffers
//! creates queues, reserves buffers
//!   -- description, files: device, packets, queue memory, lease ->
//!                                             maps them, posts buffers, runs
//!                            <- done -------- (or nothing, if it was killed)
//! destroys the queues
//!   -- ended ----------------------------->   frees posted buffers
//!                                             unmaps the packets when none is left
//! takes the buffers back    <- closes -------
//! ```
//!
//! Either process may die at any time. If a client dies, its socket closes: the server destroys its queues
//! and then takes the buffers back. It cannot do so earlier, because the client may write even to free
//! buffers of its share. A client detects the end of the server with [`AttachedPort::is_live`] and gets the
//! reason from [`AttachedPort::end_reason`] (the device failed, the port stopped).
//!
//! Transmit queues of a client do not affect the server. Receive queues take part in receive-side scaling
//! (RSS):
//!
//! * mlx5 spreads packets by flow rules. Queues for a client are created beside the running ones, and new
//!   rules replace the old ones. The server loses no packets and keeps its flow rules.
//! * MANA has one RSS queue pair per port, which cannot be changed (linux: drivers/infiniband/hw/mana/qp.c).
//!   All receive queues are recreated when a client takes or returns some, and packets that arrive meanwhile
//!   are lost.
//! * An mlx5 port with flow rules behaves like MANA after its queues were recreated while some were leased:
//!   its rules then deliver to the leased queues.
//!
//! # Trust
//!
//! Every message carries the protocol and its version, and is validated before anything is mapped. Where the
//! provider can import objects (libmlx5), the client also compares the description with what the kernel
//! reports of device, domain and registration. A client that sends malformed, oversized or no messages is
//! disconnected; other clients are not affected.
//!
//! The memory of all queues of the port is mapped in both processes. The server treats words that a client
//! writes into rings, completions and doorbell records like words of a faulty device. They cannot make it
//! access memory outside its buffers. Each such write may cost the server a queue, which is recreated without
//! the packets in flight.
//!
//! The following is not protected. A client must therefore be trusted like the server itself:
//!
//! * The packets: the region of the pool is mapped whole, with the metadata of every packet and the free
//!   lists. The fast path does not check them. A client that writes outside its share can make the server
//!   read and write any address.
//! * The device's DMA: descriptors contain addresses and keys, and the keys of all registrations of the port
//!   are valid in them.
//! * The device file: it accepts kernel commands for every object that the server has created.
//!
//! The socket is therefore restricted to the user of the server: its mode is 0600 and the peer's credentials
//! are checked. An untrusted process needs a port and a pool of its own, and a copy of each packet.
//!
//! A server that has given up its privileges still has those of its NIC, and a client gets the same by the device file.
//! SECURITY.md lists this boundary beside the others.

mod attach;
mod client;
mod config;
mod message;
mod server;

pub(crate) use client::AttachOffer;
pub use client::AttachedPort;
pub use config::AttachConfig;
pub(crate) use config::{ATTACH, ATTACH_BUFFERS, ATTACH_RX_QUEUES, ATTACH_TX_QUEUES};
#[cfg(any(test, fuzzing))]
pub use message::fuzz;
pub use message::{AttachError, AttachRequest, PoolStatus, QueueStatus, Status, VERSION};
pub(crate) use server::{AttachServer, RxSharing, ServeContext};
