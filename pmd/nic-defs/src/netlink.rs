//! RDMA netlink (`rdma/rdma_netlink.h`). libibverbs uses it to find devices and the driver of each device.

use crate::table::constants;

/// Protocol of the netlink socket, `NETLINK_RDMA` of linux/netlink.h.
pub const PROTOCOL: i32 = 20;

/// Returns the message type of an operation of the device family. The upper bits hold the family.
pub const fn message_type(operation: u16) -> u16 {
    (FAMILY << 10) | operation
}

constants! {
    /// Constants that `tests/headers.rs` compares with rdma/rdma_netlink.h.
    CONSTANTS;
    /// Family: device messages.
    FAMILY: u16 = 5, "RDMA_NL_NLDEV";
    /// Operation: query a device, or dump all devices.
    GET: u16 = 1, "RDMA_NLDEV_CMD_GET";
    /// Operation: query the ports of a device.
    PORT_GET: u16 = 5, "RDMA_NLDEV_CMD_PORT_GET";
    /// Operation: query the capabilities of the RDMA subsystem.
    SYS_GET: u16 = 6, "RDMA_NLDEV_CMD_SYS_GET";
    /// Operation: query the character device of a device.
    GET_CHARDEV: u16 = 15, "RDMA_NLDEV_CMD_GET_CHARDEV";
    /// u32.
    DEV_INDEX: u16 = 1, "RDMA_NLDEV_ATTR_DEV_INDEX";
    /// String.
    DEV_NAME: u16 = 2, "RDMA_NLDEV_ATTR_DEV_NAME";
    /// u32: the number of ports in the reply to [`GET`], otherwise the port.
    PORT_INDEX: u16 = 3, "RDMA_NLDEV_ATTR_PORT_INDEX";
    /// String.
    FW_VERSION: u16 = 5, "RDMA_NLDEV_ATTR_FW_VERSION";
    /// u64, host order.
    NODE_GUID: u16 = 6, "RDMA_NLDEV_ATTR_NODE_GUID";
    /// u64, host order.
    SYS_IMAGE_GUID: u16 = 7, "RDMA_NLDEV_ATTR_SYS_IMAGE_GUID";
    /// u8: 4 is active.
    PORT_STATE: u16 = 12, "RDMA_NLDEV_ATTR_PORT_STATE";
    /// u8: 5 is link up.
    PORT_PHYS_STATE: u16 = 13, "RDMA_NLDEV_ATTR_PORT_PHYS_STATE";
    /// u8: 1 is channel adapter.
    DEV_NODE_TYPE: u16 = 14, "RDMA_NLDEV_ATTR_DEV_NODE_TYPE";
    /// u32.
    NDEV_INDEX: u16 = 50, "RDMA_NLDEV_ATTR_NDEV_INDEX";
    /// String.
    NDEV_NAME: u16 = 51, "RDMA_NLDEV_ATTR_NDEV_NAME";
    /// u8.
    NETNS_MODE: u16 = 66, "RDMA_NLDEV_SYS_ATTR_NETNS_MODE";
    /// String: type of the requested character device.
    CHARDEV_TYPE: u16 = 69, "RDMA_NLDEV_ATTR_CHARDEV_TYPE";
    /// String.
    CHARDEV_NAME: u16 = 70, "RDMA_NLDEV_ATTR_CHARDEV_NAME";
    /// u64: ABI version of the driver.
    CHARDEV_ABI: u16 = 71, "RDMA_NLDEV_ATTR_CHARDEV_ABI";
    /// u64: `huge_encode_dev`.
    CHARDEV: u16 = 72, "RDMA_NLDEV_ATTR_CHARDEV";
    /// u32: `enum rdma_driver_id`.
    UVERBS_DRIVER_ID: u16 = 73, "RDMA_NLDEV_ATTR_UVERBS_DRIVER_ID";
    /// u8.
    COPY_ON_FORK: u16 = 93, "RDMA_NLDEV_SYS_ATTR_COPY_ON_FORK";
}

/// Encodes a character device number in the format of [`CHARDEV`] (Linux `huge_encode_dev`).
pub const fn encode_device(major: u32, minor: u32) -> u64 {
    (minor & 0xff) as u64 | ((major as u64) << 8) | (((minor & !0xff) as u64) << 12)
}
