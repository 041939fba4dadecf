//! Watches an interface for its link, its MTU and its end.

use std::io;

use super::link::Interface;
use super::netlink::{Netlink, read_u32};
use crate::port::{Link, LinkState, PortEvent};

const RTM_DELLINK: u16 = 17;
const RTMGRP_LINK: u32 = 1;

/// Follows one interface through the kernel's notifications.
#[derive(Debug)]
pub(crate) struct Watch {
    notifications: Netlink,
    /// For questions; a socket of its own, so that answers and notifications do not mix.
    questions: Netlink,
    interface: Interface,
    link: Link,
    lost: bool,
}

impl Watch {
    /// Starts to watch.
    pub(crate) fn new(interface: &Interface) -> io::Result<Self> {
        // Subscribe first and look then: what happens between is seen twice, but not missed.
        let notifications = Netlink::route_groups(RTMGRP_LINK)?;
        let mut questions = Netlink::route()?;
        let now = interface.again(&mut questions);
        let lost = now.is_none();
        let interface = now.unwrap_or_else(|| interface.clone());
        Ok(Self { link: link_of(&interface), notifications, questions, interface, lost })
    }

    /// What happened since the last call: changes of the link, and the end of the device, which is told once.
    pub(crate) fn events(&mut self) -> Vec<PortEvent> {
        if self.lost {
            return Vec::new();
        }
        let index = self.interface.index;
        let (mut events, mut gone) = (Vec::new(), false);
        let (link, interface) = (&mut self.link, &mut self.interface);
        let mut look = |now: Interface| {
            let now_link = link_of(&now);
            if now_link.state != link.state {
                events.push(PortEvent::Link(now_link));
            }
            *link = now_link;
            *interface = now;
        };
        let read = self.notifications.notifications(|kind, body| {
            if read_u32(body, 4) != Some(index) {
                return;
            }
            // A bridge tells of a port that leaves it with the same message, in family AF_BRIDGE.
            if kind == RTM_DELLINK && body.first() == Some(&0) {
                gone = true;
            } else if body.first() == Some(&0)
                && let Some(now) = Interface::read(kind, body)
            {
                look(now);
            }
        });
        if read.is_err() {
            // Notifications were lost: look for ourselves.
            match self.interface.again(&mut self.questions) {
                Some(now) => {
                    let now_link = link_of(&now);
                    if now_link.state != self.link.state {
                        events.push(PortEvent::Link(now_link));
                    }
                    (self.link, self.interface) = (now_link, now);
                }
                None => gone = true,
            }
        }
        if gone {
            events.extend(self.lose("was removed"));
        }
        events
    }

    /// Notes that the device is gone, for drivers that learn it from a queue; tells it if it is news.
    pub(crate) fn lose(&mut self, how: &str) -> Option<PortEvent> {
        (!std::mem::replace(&mut self.lost, true)).then(|| {
            self.link = Link::DOWN;
            PortEvent::Lost(format!("interface {} {how}", self.interface.name))
        })
    }

    /// MTU in bytes, as of the last call of [`Self::events`].
    pub(crate) fn mtu(&self) -> u32 {
        self.interface.mtu
    }

    /// Whether the device is gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost
    }

    /// The link as the kernel sees it now.
    pub(crate) fn link(&mut self) -> Link {
        if self.lost {
            return Link::DOWN;
        }
        self.interface.again(&mut self.questions).map_or(Link::DOWN, |now| link_of(&now))
    }
}

fn link_of(interface: &Interface) -> Link {
    let state = if interface.up && interface.running { LinkState::Up } else { LinkState::Down };
    Link { state, speed: None }
}
