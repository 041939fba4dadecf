//! Monitors an interface: link state, address, MTU, name and removal.

use std::io;

use super::link::{Dropped, Interface};
use super::netlink::{Netlink, read_u32};
#[cfg(feature = "nic")]
use crate::port::MacAddr;
use crate::port::{Link, LinkState, PortEvent};

const RTM_DELLINK: u16 = 17;
const RTMGRP_LINK: u32 = 1;

/// Tracks one interface through the kernel's netlink notifications.
#[derive(Debug)]
pub(crate) struct LinkMonitor {
    notifications: Netlink,
    /// Socket for requests. It is separate from `notifications`, so that replies and notifications do not
    /// mix.
    requests: Netlink,
    interface: Interface,
    link: Link,
    lost: bool,
    /// Frames that the interface had dropped at the start.
    dropped_before: Dropped,
}

impl LinkMonitor {
    /// Starts to monitor the interface.
    pub(crate) fn new(interface: &Interface) -> io::Result<Self> {
        // Subscribe before the first read. A change in between is then seen twice instead of being missed.
        let notifications = Netlink::route_groups(RTMGRP_LINK)?;
        let mut requests = Netlink::route()?;
        let now = interface.refresh(&mut requests);
        let lost = now.is_none();
        let interface = now.unwrap_or_else(|| interface.clone());
        let dropped_before = interface.dropped;
        Ok(Self { link: link_of(&interface), notifications, requests, interface, lost, dropped_before })
    }

    /// Returns the events since the last call: link changes and the loss of the device, which is reported
    /// once.
    pub(crate) fn events(&mut self) -> Vec<PortEvent> {
        if self.lost {
            return Vec::new();
        }
        let index = self.interface.index;
        let (mut events, mut gone) = (Vec::new(), false);
        let mut last = None;
        let (link, interface) = (&mut self.link, &mut self.interface);
        let mut look = |now: Interface| {
            let now_link = link_of(&now);
            if now_link.state != link.state {
                events.push(PortEvent::Link(now_link));
            }
            if now.mac != interface.mac {
                events.extend(now.mac.map(PortEvent::Address));
            }
            if now.mtu != interface.mtu {
                events.push(PortEvent::Mtu(now.mtu));
            }
            if now.name != interface.name {
                tracing::info!("interface {} was renamed to {}; its port keeps it", interface.name, now.name);
            }
            *link = now_link;
            *interface = now;
        };
        let read = self.notifications.notifications(|kind, body| {
            if read_u32(body, 4) != Some(index) {
                return;
            }
            // A bridge sends the same message, with family AF_BRIDGE, when a port leaves it.
            if kind == RTM_DELLINK && body.first() == Some(&0) {
                gone = true;
                last = Dropped::read(body);
            } else if body.first() == Some(&0)
                && let Some(now) = Interface::read(kind, body)
            {
                look(now);
            }
        });
        if read.is_err() {
            // The kernel dropped notifications: read the interface's state instead.
            match Interface::by_index(index, &mut self.requests) {
                Some(now) => look(now),
                None => gone = true,
            }
        }
        if let Some(last) = last {
            self.interface.dropped = last;
        }
        if gone {
            events.extend(self.mark_lost("was removed"));
        }
        events
    }

    /// Marks the device as lost, for drivers that learn it from a queue. Returns the event at the first call
    /// only.
    pub(crate) fn mark_lost(&mut self, how: &str) -> Option<PortEvent> {
        (!std::mem::replace(&mut self.lost, true)).then(|| {
            self.link = Link::DOWN;
            PortEvent::Lost(format!("interface {} {how}", self.interface.name))
        })
    }

    /// Returns the frames that the interface has dropped since the monitor exists. After a loss, the kernel's last
    /// message about the interface gives the numbers.
    pub(crate) fn dropped(&mut self) -> Dropped {
        if !self.lost
            && let Some(now) = self.interface.refresh(&mut self.requests)
        {
            self.interface.dropped = now.dropped;
        }
        self.interface.dropped.since(self.dropped_before)
    }

    /// Counts dropped frames from now on.
    pub(crate) fn forget_drops(&mut self) {
        self.dropped();
        self.dropped_before = self.interface.dropped;
    }

    /// Returns the Ethernet address as of the last call of [`Self::events`].
    #[cfg(feature = "nic")]
    pub(crate) fn mac(&self) -> Option<MacAddr> {
        self.interface.mac
    }

    /// Returns the MTU in bytes as of the last call of [`Self::events`].
    pub(crate) fn mtu(&self) -> u32 {
        self.interface.mtu
    }

    /// Returns whether the device is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// Reads the current link state from the kernel.
    pub(crate) fn link(&mut self) -> Link {
        if self.lost {
            return Link::DOWN;
        }
        self.interface.refresh(&mut self.requests).map_or(Link::DOWN, |now| link_of(&now))
    }
}

fn link_of(interface: &Interface) -> Link {
    let state = if interface.up && interface.running { LinkState::Up } else { LinkState::Down };
    Link { state, speed: None }
}
