//! What the RDMA drivers need of a machine, for `wirepath doctor`.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::Serialize;
pub use wirepath_verbs::Version;
use wirepath_verbs::hbl::{Hbl, MAX_ENCAP_HEADER};
use wirepath_verbs::{Device, PortState, Provider, Search, Verbs};

use super::{Candidate, Driver, mana, mlx5};

/// The oldest rdma-core that the drivers were tested with.
pub const NEEDED: Version = Version { major: 44, minor: 0 };

/// A kind of NIC that has a driver of its own here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The driver.
    pub driver: &'static str,
    /// Its library.
    pub library: &'static str,
    /// The kernel's module for RDMA devices of it, and the first Linux with that.
    pub module: &'static str,
    /// As above.
    pub since: &'static str,
    /// Adapters on the PCI bus, with or without a driver of the kernel.
    pub adapters: usize,
    /// Its ports, each with the reason why it cannot be used, if so.
    pub ports: Vec<(String, Option<String>)>,
}

/// What there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rdma {
    /// The directory that `WIREPATH_RDMA_LIB_DIR` names, where libraries are looked for instead of where the system has them.
    pub directory: Option<PathBuf>,
    /// Libraries that are there; or the one line that says what is missing.
    pub libraries: Result<Vec<Found>, String>,
    /// Names of RDMA devices.
    pub devices: Vec<String>,
    /// Ports that are down although they could be used: interface, or device and number.
    pub down: Vec<String>,
    /// NICs by their drivers.
    pub kinds: Vec<Kind>,
    /// What NICs can put around RDMA packets; or why there is nothing to say of that.
    pub encapsulation: Result<PairEncapsulation, String>,
}

/// Tunnels that a NIC puts around the RDMA packets of a queue pair (hbldv_create_encap(3)). A capability of its own: the four kinds of
/// reformat are of flow rules and raw packets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PairEncapsulation {
    /// RDMA devices that can do it.
    pub devices: Vec<String>,
    /// What carries the tunnel header; a device may do less.
    pub over: &'static [&'static str],
    /// Most bytes of a tunnel header.
    pub max_header: usize,
}

impl PairEncapsulation {
    /// Looks; an error says in one line what is missing.
    pub fn look() -> Result<Self, String> {
        let verbs = Verbs::load().map_err(|error| error.to_string())?;
        if verbs.libraries().iter().all(|library| library.name != "libhbl") {
            return Err("libhbl is not there; no distribution packages it, and it is used where it is".to_owned());
        }
        let devices = verbs.devices().map_err(|error| error.to_string())?;
        let can = |device: &&Device| Hbl::drives(device).unwrap_or(false);
        let devices = devices.iter().filter(can).map(Device::name).collect();
        Ok(Self { devices, over: &["ipv4", "udp"], max_header: MAX_ENCAP_HEADER })
    }
}

/// A library that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Such as `libmlx5`.
    pub name: String,
    /// What its file's name says.
    pub version: Option<Version>,
    /// In words, with the file.
    pub text: String,
}

impl Default for Rdma {
    /// Nothing.
    fn default() -> Self {
        Self {
            directory: None,
            libraries: Ok(Vec::new()),
            devices: Vec::new(),
            down: Vec::new(),
            kinds: Vec::new(),
            encapsulation: Err("libhbl is not there".to_owned()),
        }
    }
}

impl Rdma {
    /// Looks; `root` is `/` but for tests.
    pub fn look(root: &Path) -> Self {
        let verbs = Verbs::load();
        let devices = verbs.as_ref().ok().and_then(|verbs| verbs.devices().ok()).unwrap_or_default();
        Self {
            directory: match Search::from_environment() {
                Search::Directory(directory) => Some(directory),
                Search::System => None,
            },
            libraries: verbs
                .map(|verbs| {
                    let found = verbs.libraries().into_iter().map(|library| Found {
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
                // Functions 1414:00b9 and 1414:00ba (linux: drivers/net/ethernet/microsoft/mana/gdma_main.c).
                kind(&mana::Mana, "libmana", "mana_ib", "6.2", adapters(root, "0x1414", &[0x00b9..=0x00ba])),
                // linux: drivers/net/ethernet/mellanox/mlx5/core/main.c, mlx5_core_pci_table.
                kind(&mlx5::Mlx5, "libmlx5", "mlx5_ib", "3.11", adapters(root, "0x15b3", MLX5)),
            ],
            encapsulation: PairEncapsulation::look(),
        }
    }
}

/// Device numbers of ConnectX-4 to 9 and of BlueField.
const MLX5: &[RangeInclusive<u32>] =
    &[0x1013..=0x1025, 0xa2d2..=0xa2d3, 0xa2d6..=0xa2d6, 0xa2dc..=0xa2dc, 0xa2df..=0xa2df];

fn kind(
    driver: &dyn Driver,
    library: &'static str,
    module: &'static str,
    since: &'static str,
    adapters: usize,
) -> Kind {
    let port = |Candidate { device, usable }| (device, usable.err());
    let ports = driver.candidates().into_iter().map(port).collect();
    Kind { driver: driver.name(), library, module, since, adapters, ports }
}

/// Ports of a device that the kernel has not set up. Those of MANA may not be up: the kernel has them then.
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

/// Functions on the PCI bus with these numbers.
fn adapters(root: &Path, vendor: &str, numbers: &[RangeInclusive<u32>]) -> usize {
    let Ok(devices) = root.join("sys/bus/pci/devices").read_dir() else { return 0 };
    let is_one = |path: &Path| {
        let read = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        let number = read("device").trim().strip_prefix("0x").and_then(|text| u32::from_str_radix(text, 16).ok());
        read("vendor").trim() == vendor && number.is_some_and(|number| numbers.iter().any(|all| all.contains(&number)))
    };
    devices.flatten().filter(|entry| is_one(&entry.path())).count()
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
