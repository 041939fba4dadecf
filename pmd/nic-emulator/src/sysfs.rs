//! A tree like `/sys` for the emulated devices: libibverbs takes its root from `SYSFS_PATH`, DPDK its PCI devices from
//! `SYSFS_PCI_DEVICES`.

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
/// If a file or folder cannot be made.
pub fn generate(topology: &Topology, root: &Path) -> io::Result<()> {
    let verbs = root.join("class/infiniband_verbs");
    fs::create_dir_all(&verbs)?;
    fs::create_dir_all(root.join("class/infiniband"))?;
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

/// What `SYSFS_PCI_DEVICES` must name.
pub fn pci_devices(root: &Path) -> PathBuf {
    root.join("bus/pci/devices")
}

fn put(folder: &Path, name: &str, text: &str) -> io::Result<()> {
    fs::write(folder.join(name), format!("{text}\n"))
}

fn pci_device(folder: &Path, device: &DeviceSpec, root: &Path) -> io::Result<()> {
    let (vendor, id, driver) = match device.kind {
        DeviceKind::Mana => ("0x1414", "0x00ba".to_owned(), "mana"),
        DeviceKind::Mlx5 => ("0x15b3", format!("{:#06x}", device.mlx5.class.part()), "mlx5_core"),
    };
    fs::create_dir_all(folder)?;
    put(folder, "vendor", vendor)?;
    put(folder, "device", &id)?;
    put(folder, "subsystem_vendor", vendor)?;
    put(folder, "subsystem_device", "0x0000")?;
    put(folder, "class", "0x020000")?;
    put(folder, "numa_node", &device.numa_node.to_string())?;
    put(folder, "max_vfs", "0")?;
    put(folder, "resource", &["0x0000000000000000 0x0000000000000000 0x0000000000000000"; 13].join("\n"))?;
    put(folder, "modalias", &format!("pci:v0000{}d0000{}sv*sd*bc02sc00i00", &vendor[2..], &id[2..]).to_uppercase())?;
    let ids = format!("{}:{}", &vendor[2..], &id[2..]).to_uppercase();
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
    }
    Ok(())
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
        put(&ports, "state", "4: ACTIVE")?;
        put(&ports, "link_layer", "Ethernet")?;
    }
    Ok(())
}
