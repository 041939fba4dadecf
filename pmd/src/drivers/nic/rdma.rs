//! Requirements of the RDMA drivers, for `wirepath doctor`.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Serialize;
pub use wirepath_verbs::Version;
use wirepath_verbs::hbl::{Hbl, MAX_ENCAP_HEADER};
use wirepath_verbs::{Device, PortState, Provider, Search, Verbs};

use super::{mana, mlx5};
use crate::drivers::{Candidate, Driver};

/// Oldest rdma-core that the drivers were tested with.
pub const MIN_RDMA_CORE: Version = Version { major: 44, minor: 0 };

/// A kind of NIC with a driver of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicKind {
    /// Name of the driver.
    pub driver: &'static str,
    /// Name of its provider library.
    pub library: &'static str,
    /// Kernel module of its RDMA devices.
    pub module: &'static str,
    /// First Linux version with this module.
    pub since: &'static str,
    /// Number of adapters on the PCI bus, with or without a kernel driver.
    pub adapters: usize,
    /// Its ports, each with the reason why it cannot be used, if any.
    pub ports: Vec<(String, Option<String>)>,
}

/// RDMA environment of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rdma {
    /// The directory in `WIREPATH_RDMA_LIB_DIR`, which replaces the system's library paths.
    pub directory: Option<PathBuf>,
    /// Libraries found; or one line that says what is missing.
    pub libraries: Result<Vec<FoundLibrary>, String>,
    /// Names of RDMA devices.
    pub devices: Vec<String>,
    /// Usable ports that are down: interface, or device and port number.
    pub down: Vec<String>,
    /// Kinds of NICs.
    pub kinds: Vec<NicKind>,
    /// Encapsulation of RDMA packets, or the reason why it cannot be queried.
    pub encapsulation: Result<QueuePairEncapsulation, String>,
}

/// Encapsulation of RDMA packets per queue pair (hbldv_create_encap(3)). This is separate from the four kinds
/// of reformat, which belong to flow rules and raw packets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueuePairEncapsulation {
    /// RDMA devices that support it.
    pub devices: Vec<String>,
    /// Protocols that can carry the tunnel header. A device may support fewer.
    pub over: &'static [&'static str],
    /// Maximum length of a tunnel header in bytes.
    pub max_header: usize,
}

impl QueuePairEncapsulation {
    /// Queries all devices. An error says in one line what is missing.
    pub fn probe() -> Result<Self, String> {
        let verbs = Verbs::load().map_err(|error| error.to_string())?;
        if verbs.libraries().iter().all(|library| library.name != "libhbl") {
            return Err("libhbl is not installed; no distribution packages it, and it is optional".to_owned());
        }
        let devices = verbs.devices().map_err(|error| error.to_string())?;
        let can = |device: &&Device| Hbl::is_supported(device).unwrap_or(false);
        let devices = devices.iter().filter(can).map(Device::name).collect();
        Ok(Self { devices, over: &["ipv4", "udp"], max_header: MAX_ENCAP_HEADER })
    }
}

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Name, such as `libmlx5`.
    pub name: String,
    /// Version, as in its file name.
    pub version: Option<Version>,
    /// Description with the path of the file.
    pub text: String,
}

impl Default for Rdma {
    /// Returns an environment without libraries and devices.
    fn default() -> Self {
        Self {
            directory: None,
            libraries: Ok(Vec::new()),
            devices: Vec::new(),
            down: Vec::new(),
            kinds: Vec::new(),
            encapsulation: Err("libhbl is not installed".to_owned()),
        }
    }
}

impl Rdma {
    /// Examines the machine. `root` is `/`, except in tests.
    pub fn probe(root: &Path) -> Self {
        let verbs = Verbs::load();
        let devices = verbs.as_ref().ok().and_then(|verbs| verbs.devices().ok()).unwrap_or_default();
        Self {
            directory: match Search::from_environment() {
                Search::Directory(directory) => Some(directory),
                Search::System => None,
            },
            libraries: verbs
                .map(|verbs| {
                    let found = verbs.libraries().into_iter().map(|library| FoundLibrary {
                        name: library.name.to_owned(),
                        version: library.version,
                        text: library.to_string(),
                    });
                    found.collect()
                })
                .map_err(|error| error.to_string()),
            down: devices.iter().flat_map(down).collect(),
            devices: devices.iter().map(Device::name).collect(),
            kinds: vec![
                kind(&mana::Mana, "libmana", "mana_ib", "6.2", adapters(root, "0x1414", MANA)),
                kind(&mlx5::Mlx5, "libmlx5", "mlx5_ib", "3.11", adapters(root, "0x15b3", MLX5)),
            ],
            encapsulation: QueuePairEncapsulation::probe(),
        }
    }
}

/// PCI device IDs of MANA (linux: drivers/net/ethernet/microsoft/mana/gdma_main.c).
const MANA: &[RangeInclusive<u32>] = &[0x00b9..=0x00ba];

/// PCI device IDs of ConnectX-4 to ConnectX-9 and of BlueField (linux: drivers/net/ethernet/mellanox/mlx5/core/main.c,
/// mlx5_core_pci_table).
const MLX5: &[RangeInclusive<u32>] =
    &[0x1013..=0x1025, 0xa2d2..=0xa2d3, 0xa2d6..=0xa2d6, 0xa2dc..=0xa2dc, 0xa2df..=0xa2df];

fn kind(
    driver: &dyn Driver,
    library: &'static str,
    module: &'static str,
    since: &'static str,
    adapters: usize,
) -> NicKind {
    let port = |Candidate { device, usable }| (device, usable.err());
    let ports = driver.candidates().into_iter().map(port).collect();
    NicKind { driver: driver.name(), library, module, since, adapters, ports }
}

/// Returns the ports that are administratively down. MANA ports are skipped: while they are up, the kernel
/// owns them.
fn down(device: &Device) -> Vec<String> {
    let Ok(context) = device.open() else { return Vec::new() };
    if context.provider() == Provider::Mana {
        return Vec::new();
    }
    let interfaces = device.interfaces();
    let is_down = |port: u8| context.port(port).is_ok_and(|port| port.state == PortState::Down);
    let name = |port: u8| {
        let interface = interfaces.iter().find(|interface| interface.port == port);
        interface.map_or_else(|| format!("{}/{port}", device.name()), |interface| interface.name.clone())
    };
    let ports = context.attributes().map_or(0, |attributes| attributes.ports);
    (1..=ports).filter(|port| is_down(*port)).map(name).collect()
}

/// Counts the functions on the PCI bus with these IDs.
fn adapters(root: &Path, vendor: &str, numbers: &[RangeInclusive<u32>]) -> usize {
    let Ok(devices) = root.join("sys/bus/pci/devices").read_dir() else { return 0 };
    devices.flatten().filter(|entry| is_function(&entry.path(), vendor, numbers)).count()
}

/// Returns whether the PCI function in this folder of sysfs has these IDs.
fn is_function(path: &Path, vendor: &str, numbers: &[RangeInclusive<u32>]) -> bool {
    let read = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
    let number = read("device").trim().strip_prefix("0x").and_then(|text| u32::from_str_radix(text, 16).ok());
    read("vendor").trim() == vendor && number.is_some_and(|number| numbers.iter().any(|all| all.contains(&number)))
}

/// Returns whether the PCI function at this address is a NIC of the driver.
pub(crate) fn is_adapter_of(driver: &str, address: &str) -> bool {
    let path = Path::new("/sys/bus/pci/devices").join(address);
    match driver {
        "mlx5" => is_function(&path, "0x15b3", MLX5),
        "mana" => is_function(&path, "0x1414", MANA),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_counted_by_their_pci_numbers() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(adapters(root.path(), "0x15b3", MLX5), 0);
        for (name, vendor, device) in [
            ("a", "0x1414", "0x00ba"),
            ("b", "0x1414", "0x5353"),
            ("c", "0x15b3", "0x00ba"),
            ("d", "0x15b3", "0x101d"),
            ("e", "0x15b3", "0xa2dc"),
            ("f", "0x15b3", "nonsense"),
        ] {
            let folder = root.path().join("sys/bus/pci/devices").join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("vendor"), format!("{vendor}\n")).unwrap();
            std::fs::write(folder.join("device"), format!("{device}\n")).unwrap();
        }
        assert_eq!(adapters(root.path(), "0x1414", &[0x00b9..=0x00ba]), 1);
        assert_eq!(adapters(root.path(), "0x15b3", MLX5), 2);
    }
}
