//! The kernel's links, forwarding databases, neighbours and routes over rtnetlink (rtnetlink(7)): changes as they
//! happen, whole tables, and requests that change them.
//!
//! [`Subscription`] and [`Requests`] use a socket each, so that replies and notifications do not mix. Both belong to
//! the network namespace of the thread that made them.

mod messages;
mod requests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

pub use messages::{
    BridgeEntry, Fdb, Link, LinkKind, Malformed, Message, Neighbour, Nexthop, NexthopTarget, NudState, Route, RouteHop,
    TunnelEntry, Vxlan,
};
pub use requests::{LinkAddress, Requests, Table};

use crate::drivers::kernel::common::netlink::Netlink;

/// Multicast groups of links, of neighbours, which include forwarding databases, of IPv6 on links, and of nexthop
/// objects: `RTNLGRP_LINK`, `NEIGH`, `IPV6_IFINFO` and `NEXTHOP`, each a bit.
const GROUPS: u32 = 1 | 1 << 2 | 1 << 11 | 1 << 31;
/// Multicast groups of addresses, routes and rules of both IP versions: the groups `RTNLGRP_IPV4_IFADDR`, `IPV4_ROUTE`,
/// `IPV4_RULE`, `IPV6_IFADDR`, `IPV6_ROUTE` and `IPV6_RULE`, each a bit.
const ROUTE_GROUPS: u32 = 1 << 4 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 10 | 1 << 18;

/// Outcome of [`Subscription::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// All waiting messages were received.
    All,
    /// More messages wait.
    More,
    /// The kernel dropped messages (`ENOBUFS`). Others may wait. The caller receives these, and then reads the tables.
    Lost,
}

/// Receives the kernel's notifications about links, forwarding databases, neighbours and nexthop objects, and about
/// addresses and routes if wanted.
#[derive(Debug)]
pub struct Subscription {
    netlink: Netlink,
}

impl Subscription {
    /// Subscribes, with a receive buffer of this many bytes.
    ///
    /// # Errors
    /// If the kernel refuses the socket.
    pub fn new(buffer: usize) -> io::Result<Self> {
        Self::to_groups(GROUPS, buffer)
    }

    /// Subscribes to addresses and routes too.
    ///
    /// # Errors
    /// If the kernel refuses the socket.
    pub fn with_routes(buffer: usize) -> io::Result<Self> {
        Self::to_groups(GROUPS | ROUTE_GROUPS, buffer)
    }

    fn to_groups(groups: u32, buffer: usize) -> io::Result<Self> {
        let mut netlink = Netlink::route_groups(groups)?;
        netlink.set_receive_buffer(buffer)?;
        Ok(Self { netlink })
    }

    /// Passes the waiting messages to `each`, those of at most `limit` datagrams. Does not block.
    ///
    /// # Errors
    /// If the socket fails.
    pub fn receive(&mut self, limit: usize, mut each: impl FnMut(Result<Message, Malformed>)) -> io::Result<Received> {
        let received = self.netlink.notifications_up_to(limit, |kind, body| {
            if let Some(message) = Message::read(kind, body).transpose() {
                each(message);
            }
        });
        match received {
            Ok(true) => Ok(Received::More),
            Ok(false) => Ok(Received::All),
            Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => Ok(Received::Lost),
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Subscription {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.netlink.descriptor()
    }
}
