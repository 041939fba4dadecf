//! A counter of an RDMA port that the kernel shows in sysfs.

use std::path::{Path, PathBuf};

/// Name of the counter of packets for which a receive queue had no buffer.
///
/// The kernel's driver of ConnectX has it in the set of counters to which it assigns the receive queues that programs
/// create (linux: drivers/infiniband/hw/mlx5/counters.c, `basic_q_cnts`). DPDK reads it here too, unless its queues
/// have a counter of their own (dpdk: drivers/net/mlx5/linux/mlx5_os.c, `mlx5_os_read_dev_stat`). It includes the
/// queues of other programs on the same port, and not those of the kernel's network stack.
const OUT_OF_BUFFER: &str = "out_of_buffer";

/// Increase of a counter since it was opened.
#[derive(Debug)]
pub(crate) struct PortCounter {
    path: PathBuf,
    last: u64,
    total: u64,
}

impl PortCounter {
    /// Opens the counter of packets without a receive buffer. `None` if the device has none. `sysfs` is the directory
    /// of the device; ports count from 1.
    pub(crate) fn out_of_buffer(sysfs: &Path, port: u8) -> Option<Self> {
        let path = sysfs.join(format!("ports/{port}/hw_counters/{OUT_OF_BUFFER}"));
        let last = read(&path)?;
        Some(Self { path, last, total: 0 })
    }

    /// Returns the increase. A lower value than before means that the device was reset and counts from 0.
    pub(crate) fn read(&mut self) -> u64 {
        if let Some(now) = read(&self.path) {
            self.total += now.checked_sub(self.last).unwrap_or(now);
            self.last = now;
        }
        self.total
    }
}

fn read(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resets_and_missing_files_lose_nothing() {
        let sysfs = tempfile::tempdir().unwrap();
        assert!(PortCounter::out_of_buffer(sysfs.path(), 1).is_none());
        let folder = sysfs.path().join("ports/2/hw_counters");
        std::fs::create_dir_all(&folder).unwrap();
        let put = |text: &str| std::fs::write(folder.join(OUT_OF_BUFFER), text).unwrap();
        put("5\n");
        let mut counter = PortCounter::out_of_buffer(sysfs.path(), 2).unwrap();
        assert_eq!(counter.read(), 0);
        put("9\n");
        assert_eq!((counter.read(), counter.read()), (4, 4));
        put("2\n");
        assert_eq!(counter.read(), 6);
        put("");
        assert_eq!(counter.read(), 6);
        std::fs::remove_file(folder.join(OUT_OF_BUFFER)).unwrap();
        assert_eq!(counter.read(), 6);
    }
}
