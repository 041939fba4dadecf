//! Properties of devices, read without opening a port and without privileges.

use serde::Serialize;

use super::kernel::common::ethtool;
use super::kernel::common::link::Interface;
#[cfg(feature = "nic")]
use super::nic::common::probe::list_devices;

/// Properties of a device. `None`: the device has none, or does not report it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DeviceInfo {
    /// Link-layer address.
    pub mac: Option<String>,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// True if the link carries packets.
    pub link: Option<bool>,
    /// Link speed in Mbit/s.
    pub speed: Option<u32>,
    /// Receive queues in use.
    pub rx_queues: Option<u32>,
    /// Transmit queues in use.
    pub tx_queues: Option<u32>,
    /// NUMA node.
    pub numa_node: Option<u32>,
    /// Address on the PCI bus.
    pub pci: Option<String>,
}

impl DeviceInfo {
    /// Reads the properties of a network interface, of an RDMA device, or of a port of one (`mlx5_0/2`). `None` if
    /// nothing has this name.
    pub fn read(device: &str) -> Option<Self> {
        let (kernel, rdma) = (Self::of_interface(device), Self::of_rdma_port(device));
        let (Some(kernel), Some(rdma)) = (&kernel, &rdma) else { return kernel.or(rdma) };
        Some(Self {
            mac: kernel.mac.clone(),
            mtu: kernel.mtu,
            link: kernel.link,
            speed: kernel.speed.or(rdma.speed),
            rx_queues: kernel.rx_queues,
            tx_queues: kernel.tx_queues,
            numa_node: kernel.numa_node.or(rdma.numa_node),
            pci: kernel.pci.clone().or_else(|| rdma.pci.clone()),
        })
    }

    fn of_interface(name: &str) -> Option<Self> {
        let interface = Interface::find(name, "").ok()?;
        let (rx_queues, tx_queues) = interface.queues_in_use();
        Some(Self {
            mac: interface.mac.map(|mac| mac.to_string()),
            mtu: Some(interface.mtu),
            link: Some(interface.running),
            speed: ethtool::speed(name).ok().flatten(),
            rx_queues: Some(rx_queues),
            tx_queues: Some(tx_queues),
            numa_node: interface.numa_node(),
            pci: interface.parent,
        })
    }

    #[cfg(not(feature = "nic"))]
    fn of_rdma_port(_: &str) -> Option<Self> {
        None
    }

    #[cfg(feature = "nic")]
    fn of_rdma_port(name: &str) -> Option<Self> {
        list_devices().into_iter().find_map(|device| {
            let interfaces = device.interfaces();
            let number = match name.split_once('/') {
                Some((of, number)) if of == device.name() => number.parse().ok()?,
                _ if name == device.name() => 1,
                _ => interfaces.iter().find(|interface| interface.name == name)?.port,
            };
            let interface = interfaces.iter().find(|interface| interface.port == number);
            let port = device.open().and_then(|context| context.port(number)).ok();
            let pci = std::fs::read_link(device.sysfs().join("device")).ok();
            Some(Self {
                mac: interface.map(|interface| crate::port::MacAddr::from(interface.mac).to_string()),
                mtu: interface.and_then(|interface| interface.mtu),
                link: port.as_ref().map(|port| port.state == wirepath_verbs::PortState::Active),
                speed: port.and_then(|port| port.speed),
                numa_node: device.numa_node(),
                pci: pci.and_then(|path| Some(path.file_name()?.to_str()?.to_owned())),
                ..Self::default()
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_has_properties() {
        let lo = DeviceInfo::read("lo").unwrap();
        assert!(lo.mtu.is_some_and(|mtu| mtu > 0));
        assert_eq!((lo.rx_queues, lo.pci, lo.numa_node), (Some(1), None, None));
        assert_eq!(DeviceInfo::read("no-such-if"), None);
    }
}
