//! A generated tree like `/sys` for the emulated devices. libibverbs takes its root from `SYSFS_PATH`, DPDK
//! its PCI devices from `SYSFS_PCI_DEVICES`. For programs without such a variable, for example VPP, the tree
//! can be mounted over `/sys`.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::identity::guid_text;
use crate::netlink::MAJOR;
use crate::topology::{DeviceKind, DeviceSpec, Topology};

/// Writes the tree below `root`.
///
/// # Errors
/// If a file or folder cannot be created.
pub fn generate(topology: &Topology, root: &Path) -> io::Result<()> {
    let verbs = root.join("class/infiniband_verbs");
    fs::create_dir_all(&verbs)?;
    fs::create_dir_all(root.join("class/infiniband"))?;
    fs::create_dir_all(root.join("class/net"))?;
    fs::create_dir_all(pci_devices(root))?;
    put(&verbs, "abi_version", "6")?;
    for (minor, device) in topology.devices.iter().enumerate() {
        let name = device.name.as_str();
        let pci = pci_devices(root).join(&device.pci);
        pci_device(&pci, device, root)?;

        let rdma = pci.join("infiniband").join(name);
        rdma_device(&rdma, device)?;
        symlink(&pci, rdma.join("device"))?;
        symlink(&rdma, root.join("class/infiniband").join(name))?;

        let uverbs = verbs.join(format!("uverbs{minor}"));
        fs::create_dir_all(&uverbs)?;
        put(&uverbs, "ibdev", name)?;
        put(&uverbs, "dev", &format!("{MAJOR}:{minor}"))?;
        put(&uverbs, "abi_version", "1")?;
        symlink(&pci, uverbs.join("device"))?;
    }
    Ok(())
}

/// Returns the file of a counter of packets without a receive buffer, below the root. Ports count from 0.
pub fn out_of_buffer(device: &str, port: usize) -> PathBuf {
    Path::new("class/infiniband").join(device).join(format!("ports/{}/hw_counters/out_of_buffer", port + 1))
}

/// Returns the path for `SYSFS_PCI_DEVICES`.
pub fn pci_devices(root: &Path) -> PathBuf {
    root.join("bus/pci/devices")
}

fn put(folder: &Path, name: &str, text: &str) -> io::Result<()> {
    fs::write(folder.join(name), format!("{text}\n"))
}

fn pci_device(folder: &Path, device: &DeviceSpec, root: &Path) -> io::Result<()> {
    let (vendor, id, driver) = match device.kind {
        DeviceKind::Mana => (0x1414, 0x00ba, "mana"),
        DeviceKind::Mlx5 => (0x15b3, device.mlx5.class.part(), "mlx5_core"),
    };
    fs::create_dir_all(folder)?;
    put(folder, "vendor", &format!("{vendor:#06x}"))?;
    put(folder, "device", &format!("{id:#06x}"))?;
    put(folder, "subsystem_vendor", &format!("{vendor:#06x}"))?;
    put(folder, "subsystem_device", "0x0000")?;
    put(folder, "class", "0x020000")?;
    put(folder, "revision", "0x00")?;
    fs::write(folder.join("config"), configuration(vendor, id))?;
    put(folder, "numa_node", &device.numa_node.to_string())?;
    put(folder, "max_vfs", "0")?;
    put(folder, "resource", &["0x0000000000000000 0x0000000000000000 0x0000000000000000"; 13].join("\n"))?;
    put(folder, "modalias", &format!("PCI:V0000{vendor:04X}D0000{id:04X}SV*SD*BC02SC00I00"))?;
    let ids = format!("{vendor:04X}:{id:04X}");
    put(folder, "uevent", &format!("DRIVER={driver}\nPCI_CLASS=20000\nPCI_ID={ids}\nPCI_SLOT_NAME={}", device.pci))?;
    let drivers = root.join("bus/pci/drivers").join(driver);
    fs::create_dir_all(&drivers)?;
    symlink(drivers, folder.join("driver"))?;
    for (at, port) in device.ports.iter().enumerate() {
        let net = folder.join("net").join(&port.netdev);
        fs::create_dir_all(&net)?;
        put(&net, "address", &port.mac.map(|byte| format!("{byte:02x}")).join(":"))?;
        put(&net, "dev_port", &at.to_string())?;
        put(&net, "mtu", &port.mtu.to_string())?;
        symlink(folder, net.join("device"))?;
        symlink(&net, root.join("class/net").join(&port.netdev))?;
    }
    Ok(())
}

/// Returns a PCI configuration space: the header of an Ethernet function, without resources or capabilities.
fn configuration(vendor: u32, id: u32) -> [u8; 256] {
    let mut space = [0; 256];
    space[0x00..0x04].copy_from_slice(&(vendor | id << 16).to_le_bytes());
    space[0x0b] = 0x02; // network controller
    space[0x2c..0x30].copy_from_slice(&vendor.to_le_bytes());
    space
}

fn rdma_device(folder: &Path, device: &DeviceSpec) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let guid = guid_text(device.ports[0].mac);
    put(folder, "node_type", "1: CA")?;
    put(folder, "node_guid", &guid)?;
    put(folder, "sys_image_guid", &guid)?;
    put(folder, "fw_ver", "0.0.0")?;
    for (at, port) in device.ports.iter().enumerate() {
        let ports = folder.join("ports").join((at + 1).to_string());
        for inner in ["gids", "pkeys", "gid_attrs/types", "gid_attrs/ndevs"] {
            fs::create_dir_all(ports.join(inner))?;
        }
        put(&ports.join("gids"), "0", &format!("fe80:0000:0000:0000:{}", guid_text(port.mac)))?;
        put(&ports.join("gid_attrs/types"), "0", "RoCE v2")?;
        put(&ports.join("gid_attrs/ndevs"), "0", &port.netdev)?;
        put(&ports.join("pkeys"), "0", "0xffff")?;
        if device.kind == DeviceKind::Mlx5 {
            fs::create_dir_all(ports.join("hw_counters"))?;
            put(&ports, "hw_counters/out_of_buffer", "0")?;
        }
        put(&ports, "state", "4: ACTIVE")?;
        put(&ports, "link_layer", "Ethernet")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use wirepath_settings::Source;

    use super::*;

    #[test]
    fn an_interface_links_to_its_pci_device() {
        let topology =
            "[[device]]\nkind = 'mlx5'\nclass = 'connectx-5'\n[[device.port]]\nlink = 'loop'\nnetdev = 'eth7'\n";
        let folder = tempfile::tempdir().unwrap();
        generate(&Topology::read(&Source::new("topology", topology)).unwrap(), folder.path()).unwrap();
        let device = folder.path().join("class/net/eth7/device").canonicalize().unwrap();
        assert_eq!(device.file_name().unwrap(), "0000:00:10.0");
        let read = |name: &str| fs::read_to_string(device.join(name)).unwrap();
        assert_eq!((read("vendor"), read("device")), ("0x15b3\n".to_owned(), "0x1017\n".to_owned()));
        let configuration = fs::read(device.join("config")).unwrap();
        assert_eq!((configuration.len(), &configuration[..4]), (256, &[0xb3, 0x15, 0x17, 0x10][..]));
        assert_eq!(device.join("driver").canonicalize().unwrap().file_name().unwrap(), "mlx5_core");
    }
}
