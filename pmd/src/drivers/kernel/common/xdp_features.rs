//! XDP features that a network driver reports (netlink family `netdev`, Linux 6.3; `linux/netdev.h`).

use super::netlink::{Attributes, Netlink, put, read_u16};

const GENL_ID_CTRL: u16 = 0x10;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
const GENL_HEADER: usize = 4;

const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
const NETDEV_A_DEV_XDP_RX_METADATA_FEATURES: u16 = 5;

const NETDEV_XDP_ACT_BASIC: u64 = 1;
const NETDEV_XDP_ACT_NDO_XMIT: u64 = 4;
const NETDEV_XDP_ACT_XSK_ZEROCOPY: u64 = 8;
const NETDEV_XDP_ACT_RX_SG: u64 = 32;
const NETDEV_XDP_RX_METADATA_VLAN_TAG: u64 = 4;

/// XDP features of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XdpFeatures {
    /// The driver supports native XDP.
    pub(crate) native: bool,
    /// The interface sends frames that XDP programs redirect to it.
    pub(crate) sends: bool,
    /// AF_XDP works without a copy.
    pub(crate) zero_copy: bool,
    /// Frames may have several buffers.
    pub(crate) fragments: bool,
    /// XDP programs can read a VLAN tag that the NIC stripped.
    pub(crate) vlan_tag: bool,
}

/// Queries the features of an interface; `None` if the kernel does not report them.
pub(crate) fn query(interface: u32) -> Option<XdpFeatures> {
    let mut netlink = Netlink::generic().ok()?;
    let mut body = vec![CTRL_CMD_GETFAMILY, 1, 0, 0];
    put(&mut body, CTRL_ATTR_FAMILY_NAME, b"netdev\0");
    let mut family = None;
    netlink
        .request(GENL_ID_CTRL, 0, &body, |_, body| {
            let id = Attributes::after_header(body, GENL_HEADER).find(CTRL_ATTR_FAMILY_ID);
            family = family.or(id.and_then(|id| read_u16(id, 0)));
        })
        .ok()?;
    let mut body = vec![NETDEV_CMD_DEV_GET, 1, 0, 0];
    put(&mut body, NETDEV_A_DEV_IFINDEX, &interface.to_ne_bytes());
    let mut features = None;
    netlink
        .request(family?, 0, &body, |_, body| {
            let attributes = Attributes::after_header(body, GENL_HEADER);
            let bits = |kind| {
                let value = attributes.find(kind)?;
                Some(u64::from_ne_bytes(*value.first_chunk()?))
            };
            let (xdp, metadata) =
                (bits(NETDEV_A_DEV_XDP_FEATURES), bits(NETDEV_A_DEV_XDP_RX_METADATA_FEATURES).unwrap_or(0));
            features = xdp.map(|xdp| XdpFeatures {
                native: xdp & NETDEV_XDP_ACT_BASIC != 0,
                sends: xdp & NETDEV_XDP_ACT_NDO_XMIT != 0,
                zero_copy: xdp & NETDEV_XDP_ACT_XSK_ZEROCOPY != 0,
                fragments: xdp & NETDEV_XDP_ACT_RX_SG != 0,
                vlan_tag: metadata & NETDEV_XDP_RX_METADATA_VLAN_TAG != 0,
            });
        })
        .ok()?;
    features
}
