//! Properties of a network interface, read by netlink.

use std::io;

use super::ethtool;
use super::netlink::{Attributes, DUMP, IFINFOMSG, Netlink, ifinfomsg, put, read_string, read_u32};
use crate::port::{MacAddr, PortError};

const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;

const IFLA_ADDRESS: u16 = 1;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_QDISC: u16 = 6;
const IFLA_NUM_TX_QUEUES: u16 = 31;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_LINKINFO: u16 = 18;
const IFLA_STATS64: u16 = 23;
const IFLA_CARRIER: u16 = 33;
const IFLA_GSO_MAX_SEGS: u16 = 40;
const IFLA_GSO_MAX_SIZE: u16 = 41;
const IFLA_XDP: u16 = 43;
const IFLA_PARENT_DEV_NAME: u16 = 56;
const IFLA_GSO_IPV4_MAX_SIZE: u16 = 63;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_PROG_ID: u16 = 4;

/// Attributes of `IFLA_LINKINFO`.
const IFLA_INFO_KIND: u16 = 1;
const IFLA_INFO_DATA: u16 = 2;
/// Attributes of `IFLA_INFO_DATA` of a TUN or TAP interface (linux/if_link.h).
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
/// `IFF_TAP` (linux/if_tun.h), as the value of `IFLA_TUN_TYPE`.
const TYPE_TAP: u8 = 2;

const IFF_UP: u32 = 1;
const IFF_LOOPBACK: u32 = 8;
const IFF_RUNNING: u32 = 0x40;

/// Snapshot of an interface as the kernel reported it.
#[derive(Clone, Debug)]
pub(crate) struct Interface {
    /// Interface name.
    pub(crate) name: String,
    /// Interface index. It survives renaming, and the kernel does not reuse it soon.
    pub(crate) index: u32,
    /// Ethernet address, if the interface has one.
    pub(crate) mac: Option<MacAddr>,
    /// Largest layer-3 packet in bytes.
    pub(crate) mtu: u32,
    /// Administratively up (`IFF_UP`).
    pub(crate) up: bool,
    /// Up and with carrier (`IFF_RUNNING`).
    pub(crate) running: bool,
    /// True for the loopback interface.
    pub(crate) loopback: bool,
    /// Bus address of the hardware; `None` for a virtual interface.
    pub(crate) parent: Option<String>,
    /// Allocated receive queues. Fewer may be in use: see [`Self::queues_in_use`].
    pub(crate) rx_queues: u32,
    /// Allocated transmit queues. Fewer may be in use.
    pub(crate) tx_queues: u32,
    /// XDP program attached to the interface.
    pub(crate) xdp: Option<Xdp>,
    /// Frames that the interface dropped since it exists.
    pub(crate) dropped: Dropped,
    /// State of a TAP interface; `None` for other interfaces.
    pub(crate) tap: Option<Tap>,
    /// True for an end of a virtual cable (veth(4)).
    pub(crate) is_veth: bool,
    /// True if frames do not wait in a queueing discipline (tc(8), `noqueue`).
    pub(crate) is_noqueue: bool,
    /// Limits of superframes that the device segments.
    pub(crate) gso_limits: GsoLimits,
}

/// Limits of superframes (ip-link(8), `gso_max_size` and `gso_max_segs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GsoLimits {
    /// Length that a superframe with its Ethernet header does not reach, in bytes.
    pub(crate) size: usize,
    /// Most frames of one superframe.
    pub(crate) segments: usize,
}

impl Default for GsoLimits {
    /// Returns the limits of the kernel for devices without own ones (`GSO_LEGACY_MAX_SIZE`, `GSO_MAX_SEGS`).
    fn default() -> Self {
        Self { size: 65_536, segments: 65_535 }
    }
}

impl GsoLimits {
    fn read(attributes: Attributes<'_>) -> Self {
        let number = |kind| attributes.find(kind).and_then(|value| read_u32(value, 0)).map(|value| value as usize);
        let all = Self::default();
        let size = [IFLA_GSO_MAX_SIZE, IFLA_GSO_IPV4_MAX_SIZE].into_iter().filter_map(number).min();
        Self { size: size.unwrap_or(all.size), segments: number(IFLA_GSO_MAX_SEGS).unwrap_or(all.segments) }
    }
}

/// A TAP interface as `RTM_GETLINK` reports it (Linux 4.16).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tap {
    /// True if several processes or threads may attach queues.
    pub(crate) multi_queue: bool,
    /// True if a queue is attached.
    pub(crate) attached: bool,
    /// User that may attach queues without a capability; `None`: every user, if there is no group either.
    pub(crate) owner: Option<u32>,
    /// Group whose members may.
    pub(crate) group: Option<u32>,
}

impl Tap {
    fn read(attributes: Attributes<'_>) -> Option<Self> {
        let info = Attributes(attributes.find(IFLA_LINKINFO)?);
        let data = Attributes(info.find(IFLA_INFO_DATA)?);
        let byte = |kind| data.find(kind).and_then(|value| value.first().copied());
        let id = |kind| data.find(kind).and_then(|value| read_u32(value, 0));
        let is_tap = info.find(IFLA_INFO_KIND).is_some_and(|kind| read_string(kind) == "tun")
            && byte(IFLA_TUN_TYPE) == Some(TYPE_TAP);
        is_tap.then(|| Self {
            multi_queue: byte(IFLA_TUN_MULTI_QUEUE) == Some(1),
            // The kernel takes the carrier from the interface with its last queue.
            attached: attributes.find(IFLA_CARRIER).and_then(<[u8]>::first) == Some(&1),
            owner: id(IFLA_TUN_OWNER),
            group: id(IFLA_TUN_GROUP),
        })
    }
}

/// Frames that an interface dropped (`struct rtnl_link_stats64`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dropped {
    /// Received frames (`rx_dropped`).
    pub(crate) rx: u64,
    /// Frames to be sent (`tx_dropped`).
    pub(crate) tx: u64,
}

impl Dropped {
    /// Reads the attributes of an `RTM_NEWLINK` or `RTM_DELLINK` message.
    pub(super) fn read(body: &[u8]) -> Option<Self> {
        let statistics = Attributes::after_header(body, IFINFOMSG).find(IFLA_STATS64)?;
        let number = |at: usize| Some(u64::from_ne_bytes(*statistics.get(at..)?.first_chunk()?));
        Some(Self { rx: number(48)?, tx: number(56)? })
    }

    /// Returns the frames dropped since `before`.
    pub(crate) fn since(self, before: Self) -> Self {
        Self { rx: self.rx.saturating_sub(before.rx), tx: self.tx.saturating_sub(before.tx) }
    }

    /// Returns the sum.
    pub(crate) fn plus(self, other: Self) -> Self {
        Self { rx: self.rx + other.rx, tx: self.tx + other.tx }
    }
}

/// An XDP program as `RTM_GETLINK` reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Xdp {
    /// `XDP_ATTACHED_*`: 1 native, 2 generic, 3 offloaded, 4 several.
    pub(crate) attached: u8,
    /// Program id; 0 if several programs are attached.
    pub(crate) program: u32,
}

impl Interface {
    /// Looks an interface up by name.
    pub(crate) fn find(name: &str, driver: &'static str) -> Result<Self, PortError> {
        let no_device = |hint: String| PortError::NoDevice { driver, device: name.to_owned(), hint };
        if name.is_empty() || name.len() > 15 {
            return Err(no_device("an interface name has 1 to 15 characters".into()));
        }
        let asked = Netlink::route().and_then(|mut netlink| Self::request_name(name, &mut netlink));
        match asked {
            Ok(found) => Ok(found),
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {
                let others = Self::all().unwrap_or_default();
                let names: Vec<_> = others.iter().filter(|i| !i.loopback).map(|i| i.name.as_str()).collect();
                Err(no_device(match names.as_slice() {
                    [] => "there is no interface except loopback (wrong network namespace?)".into(),
                    names => format!("interfaces here: {}", names.join(", ")),
                }))
            }
            Err(source) => Err(PortError::System {
                driver,
                device: name.to_owned(),
                what: "looking up the interface".into(),
                source,
                hint: String::new(),
            }),
        }
    }

    fn request_name(name: &str, netlink: &mut Netlink) -> io::Result<Self> {
        let mut body = ifinfomsg(0, 0, 0);
        put(&mut body, IFLA_IFNAME, &[name.as_bytes(), &[0]].concat());
        let mut found = None;
        netlink.request(RTM_GETLINK, 0, &body, |kind, body| found = found.take().or(Self::read(kind, body)))?;
        found.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Reads the interface with this name. Returns `None` if it is not in the namespace of the socket.
    pub(crate) fn by_name(name: &str, netlink: &mut Netlink) -> Option<Self> {
        Self::request_name(name, netlink).ok()
    }

    /// Reads the interface again by its index. Returns `None` if it is gone from the namespace of the socket.
    pub(crate) fn refresh(&self, netlink: &mut Netlink) -> Option<Self> {
        Self::by_index(self.index, netlink)
    }

    /// Reads the interface with this index. Returns `None` if it is not in the namespace of the socket.
    pub(crate) fn by_index(index: u32, netlink: &mut Netlink) -> Option<Self> {
        let mut found = None;
        let body = ifinfomsg(index, 0, 0);
        netlink.request(RTM_GETLINK, 0, &body, |kind, body| found = found.take().or(Self::read(kind, body))).ok()?;
        found
    }

    /// Returns all interfaces of the network namespace.
    pub(crate) fn all() -> io::Result<Vec<Self>> {
        let mut all = Vec::new();
        Netlink::route()?.request(RTM_GETLINK, DUMP, &ifinfomsg(0, 0, 0), |kind, body| {
            all.extend(Self::read(kind, body));
        })?;
        Ok(all)
    }

    /// Parses an `RTM_NEWLINK` message.
    pub(super) fn read(kind: u16, body: &[u8]) -> Option<Self> {
        if kind != RTM_NEWLINK {
            return None;
        }
        let flags = read_u32(body, 8)?;
        let attributes = Attributes::after_header(body, IFINFOMSG);
        let number = |kind| attributes.find(kind).and_then(|value| read_u32(value, 0));
        let xdp = attributes.find(IFLA_XDP).map(Attributes).and_then(|xdp| {
            let attached = *xdp.find(IFLA_XDP_ATTACHED)?.first()?;
            let program = xdp.find(IFLA_XDP_PROG_ID).and_then(|value| read_u32(value, 0)).unwrap_or(0);
            (attached != 0).then_some(Xdp { attached, program })
        });
        let info = attributes.find(IFLA_LINKINFO).map(Attributes);
        let is_veth = info.and_then(|info| info.find(IFLA_INFO_KIND)).is_some_and(|kind| read_string(kind) == "veth");
        Some(Self {
            name: read_string(attributes.find(IFLA_IFNAME)?),
            index: read_u32(body, 4)?,
            mac: attributes.find(IFLA_ADDRESS).and_then(|mac| <[u8; 6]>::try_from(mac).ok()).map(MacAddr::from),
            mtu: number(IFLA_MTU)?,
            up: flags & IFF_UP != 0,
            running: flags & IFF_RUNNING != 0,
            loopback: flags & IFF_LOOPBACK != 0,
            parent: attributes.find(IFLA_PARENT_DEV_NAME).map(read_string),
            rx_queues: number(IFLA_NUM_RX_QUEUES).unwrap_or(1),
            tx_queues: number(IFLA_NUM_TX_QUEUES).unwrap_or(1),
            xdp,
            dropped: Dropped::read(body).unwrap_or_default(),
            tap: Tap::read(attributes),
            // An interface that was never up has `noop`, and a virtual cable has `noqueue` then.
            is_noqueue: attributes
                .find(IFLA_QDISC)
                .map(read_string)
                .is_some_and(|name| name == "noqueue" || is_veth && name == "noop"),
            is_veth,
            gso_limits: GsoLimits::read(attributes),
        })
    }

    /// Returns the receive and transmit queues in use, at least one of each.
    pub(crate) fn queues_in_use(&self) -> (u32, u32) {
        let (rx, tx) = ethtool::channels(&self.name).unwrap_or((self.rx_queues, self.tx_queues));
        (rx.clamp(1, self.rx_queues.max(1)), tx.clamp(1, self.tx_queues.max(1)))
    }

    /// Returns whether received frames may carry checksums that the sender's kernel left to hardware. That is
    /// so on interfaces without hardware and on paravirtual network cards.
    pub(crate) fn may_have_partial_checksums(&self) -> bool {
        self.parent.as_deref().is_none_or(|parent| parent.starts_with("virtio") || parent.starts_with("vif"))
    }

    /// Returns the NUMA node of the hardware.
    pub(crate) fn numa_node(&self) -> Option<u32> {
        let parent = self.parent.as_deref()?;
        let text = std::fs::read_to_string(format!("/sys/bus/pci/devices/{parent}/numa_node")).ok()?;
        text.trim().parse().ok()
    }

    /// Sets the interface administratively up.
    pub(crate) fn set_up(&self) -> io::Result<()> {
        Netlink::route()?.request(RTM_NEWLINK, 0, &ifinfomsg(self.index, IFF_UP, IFF_UP), |_, _| {})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_loopback_interface() {
        let lo = Interface::find("lo", "test").unwrap();
        assert!(lo.loopback && lo.index > 0 && lo.mtu > 0);
        assert_eq!(lo.parent, None);
        assert!(Interface::all().unwrap().iter().any(|i| i.index == lo.index));
        assert_eq!(lo.refresh(&mut Netlink::route().unwrap()).unwrap().name, "lo");
        assert_eq!(lo.queues_in_use(), (1, 1));
    }

    #[test]
    fn a_missing_interface_is_an_error_that_names_it() {
        let error = Interface::find("no-such-if", "test").unwrap_err().to_string();
        assert!(error.starts_with("test: no device 'no-such-if': "), "{error}");
        assert!(Interface::find("a-name-that-is-too-long", "test").is_err());
    }
}
