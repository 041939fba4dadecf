//! UNIX sockets through which other processes ask and change a running program.
//!
//! * [`Listener`]: a socket file that has its mode from the first moment, and that is removed only by its owner.
//! * [`Peer`]: the process at the other end, as the kernel knows it (`SO_PEERCRED`, unix(7)).
//! * [`LineServer`]: requests and answers of one line each, served in turns of bounded length by a thread that
//!   has other work.
//! * [`connect`]: the client side, with a time limit.
//! * [`remove_abandoned`]: the sockets of killed programs.
#![forbid(unsafe_code)]

mod line_server;
mod listener;

pub use line_server::{Answer, Limits, LineServer, Service};
pub use listener::{Access, Listener, Peer, connect, remove_abandoned, set_owner};
