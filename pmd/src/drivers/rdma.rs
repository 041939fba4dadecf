//! What the RDMA drivers need of a machine, for `wirepath doctor`.

use std::path::Path;

use wirepath_verbs::Verbs;

use super::{Candidate, Driver, mana};

/// What there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rdma {
    /// Libraries that are there, each with version and file; or the one line that says what is missing.
    pub libraries: Result<Vec<String>, String>,
    /// Names of RDMA devices.
    pub devices: Vec<String>,
    /// MANA adapters on the PCI bus, with or without a driver of the kernel.
    pub mana_adapters: usize,
    /// Ports of MANA devices, each with the reason why it cannot be used, if so.
    pub mana_ports: Vec<(String, Option<String>)>,
}

impl Default for Rdma {
    /// Nothing.
    fn default() -> Self {
        Self { libraries: Ok(Vec::new()), devices: Vec::new(), mana_adapters: 0, mana_ports: Vec::new() }
    }
}

impl Rdma {
    /// Looks; `root` is `/` but for tests.
    pub fn look(root: &Path) -> Self {
        let verbs = Verbs::load();
        let devices = verbs.as_ref().ok().and_then(|verbs| verbs.devices().ok()).unwrap_or_default();
        let port = |Candidate { device, usable }| (device, usable.err());
        Self {
            libraries: verbs
                .map(|verbs| verbs.libraries().into_iter().map(ToString::to_string).collect())
                .map_err(|error| error.to_string()),
            devices: devices.iter().map(wirepath_verbs::Device::name).collect(),
            mana_adapters: mana_adapters(root),
            mana_ports: mana::Mana.candidates().into_iter().map(port).collect(),
        }
    }
}

/// Functions 1414:00b9 and 1414:00ba (linux: drivers/net/ethernet/microsoft/mana/gdma_main.c).
fn mana_adapters(root: &Path) -> usize {
    let Ok(devices) = root.join("sys/bus/pci/devices").read_dir() else { return 0 };
    let is_mana = |path: &Path| {
        let read = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        read("vendor").trim() == "0x1414" && ["0x00b9", "0x00ba"].contains(&read("device").trim())
    };
    devices.flatten().filter(|entry| is_mana(&entry.path())).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adapters_are_counted_by_their_pci_numbers() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(mana_adapters(root.path()), 0);
        for (name, vendor, device) in [("a", "0x1414", "0x00ba"), ("b", "0x1414", "0x5353"), ("c", "0x15b3", "0x00ba")]
        {
            let folder = root.path().join("sys/bus/pci/devices").join(name);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("vendor"), format!("{vendor}\n")).unwrap();
            std::fs::write(folder.join("device"), format!("{device}\n")).unwrap();
        }
        assert_eq!(mana_adapters(root.path()), 1);
    }
}
