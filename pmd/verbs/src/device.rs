// UNSAFETY: calls libibverbs and reads the device structures that it returns.
#![allow(unsafe_code)]

//! The RDMA libraries of the machine, and its RDMA devices before they are opened.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::ibv_device;
use rdma_core_sys::{Library, RdmaCore, Search};

use crate::context::last_errno;
use crate::error::{CallContext, CallError, Cause, diagnose};
use crate::{Context, Result};

/// Loaded RDMA libraries.
#[derive(Clone, Copy, Debug)]
pub struct Verbs {
    pub(crate) libraries: &'static RdmaCore,
}

impl Verbs {
    /// Loads the libraries from the directory in `WIREPATH_RDMA_LIB_DIR`, or else those of the system. A process uses
    /// one set of libraries for its lifetime.
    ///
    /// # Errors
    /// [`crate::Error::Library`]: the libraries are missing. Its one-line text says what to install.
    pub fn load() -> Result<Self> {
        Ok(Self { libraries: RdmaCore::load(&Search::from_environment())? })
    }

    /// Returns the loaded libraries with their versions.
    pub fn libraries(&self) -> Vec<&'static Library> {
        self.libraries.libraries()
    }

    /// Imports a device that another process has open (ibv_import_device(3)).
    ///
    /// `cmd_fd` is the file descriptor that the other process passed ([`Context::cmd_fd`]). Both processes share
    /// one kernel context, which lives until both have closed it. Objects of the other process can be imported
    /// ([`crate::ImportedDomain`], [`crate::ImportedRegion`], [`crate::mlx5::var::ImportedVar`]).
    ///
    /// # Errors
    /// `cmd_fd` is not an open RDMA device, or the provider does not implement the import. In rdma-core, only libmlx5
    /// does.
    pub fn import_device(&self, cmd_fd: OwnedFd) -> Result<Context> {
        let ibverbs = self.libraries.ibverbs();
        let import = ibverbs.ibv_import_device()?;
        ibverbs.ibv_close_device()?;
        let devices = self.devices()?;
        // SAFETY: `cmd_fd` is an open file descriptor.
        let raw = unsafe { import(cmd_fd.as_raw_fd()) };
        let errno = last_errno();
        let failed = |errno: i32, cause| {
            let subject = "the file descriptor of another process".to_owned();
            Err(CallError { call: "ibv_import_device", subject, errno, cause }.into())
        };
        let Some(raw) = NonNull::new(raw) else {
            let cause = match errno {
                // The file is not an RDMA device, or the UARs of its context are not uverbs objects (libmlx5).
                0 | libc::EINVAL => Cause::InvalidArgument,
                errno => diagnose("ibv_import_device", errno, &CallContext::default()),
            };
            return failed(if errno == 0 { libc::EINVAL } else { errno }, cause);
        };
        // The context owns the file descriptor from here on.
        let _: i32 = cmd_fd.into_raw_fd();
        // SAFETY: the context is open, and its device lives as long as the context.
        let name = unsafe { string_from_c_chars(&(*(*raw.as_ptr()).device).name) };
        match devices.into_iter().find(|device| device.name() == name) {
            Some(device) => Context::open_with(&device, "ibv_import_device", |_| raw.as_ptr()),
            None => {
                if let Ok(close) = ibverbs.ibv_close_device() {
                    // SAFETY: the context was opened by this call, is closed once, and no object refers to it.
                    unsafe { close(raw.as_ptr()) };
                }
                failed(libc::ENODEV, Cause::DeviceLost)
            }
        }
    }

    /// Returns the RDMA devices that exist now. The list is empty if the kernel has no RDMA support.
    ///
    /// # Errors
    /// libibverbs cannot list the devices.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let ibverbs = self.libraries.ibverbs();
        let list_devices = ibverbs.ibv_get_device_list()?;
        // Fails here, before a list is allocated, if the library cannot free it.
        ibverbs.ibv_free_device_list()?;
        let mut number: c_int = 0;
        // SAFETY: `number` is valid for the write of the call.
        let list = unsafe { list_devices(&raw mut number) };
        let errno = last_errno();
        self.libraries.allow_disassociate_destroy();
        let Some(list) = NonNull::new(list) else {
            // "Kernel does not support verbs", ibv_get_device_list(3).
            if errno == libc::ENOSYS {
                return Ok(Vec::new());
            }
            let cause = diagnose("ibv_get_device_list", errno, &CallContext::default());
            return Err(
                CallError { call: "ibv_get_device_list", subject: "this machine".to_owned(), errno, cause }.into()
            );
        };
        let list = Arc::new(DeviceList { verbs: *self, list });
        let number = usize::try_from(number).unwrap_or(0);
        // SAFETY: the list has `number` entries. Each points to a device that lives until the list is freed.
        let devices = (0..number).filter_map(|index| NonNull::new(unsafe { *list.list.add(index).as_ptr() }));
        Ok(devices.map(|raw| Device { list: Arc::clone(&list), raw }).collect())
    }
}

/// Result of ibv_get_device_list(3). Its devices are valid until it is freed.
struct DeviceList {
    verbs: Verbs,
    list: NonNull<*mut ibv_device>,
}

// SAFETY: the list does not change, and libibverbs locks its own state.
unsafe impl Send for DeviceList {}
// SAFETY: the list does not change, and libibverbs locks its own state.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // `Verbs::devices` has checked that the library has this function.
        if let Ok(free) = self.verbs.libraries.ibverbs().ibv_free_device_list() {
            // SAFETY: ibv_get_device_list returned the list, and it is freed once. An open context holds
            // its own reference to its device.
            unsafe { free(self.list.as_ptr()) };
        }
    }
}

/// RDMA device in the device list. [`Device::open`] opens it.
#[derive(Clone)]
pub struct Device {
    list: Arc<DeviceList>,
    raw: NonNull<ibv_device>,
}

// SAFETY: `list` keeps the device alive, and its fields never change.
unsafe impl Send for Device {}
// SAFETY: `list` keeps the device alive, and its fields never change.
unsafe impl Sync for Device {}

/// Kernel network interface of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Interface name, such as `eth1`.
    pub name: String,
    /// Port of the device, counted from 1.
    pub port: u8,
    /// MAC address.
    pub mac: [u8; 6],
    /// Current MTU of the interface in bytes, if sysfs contains it.
    pub mtu: Option<u32>,
}

/// Returns the characters of a `char` array of C up to its NUL byte.
fn string_from_c_chars(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|c| c.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Device {
    pub(crate) fn verbs(&self) -> Verbs {
        self.list.verbs
    }

    pub(crate) fn raw(&self) -> NonNull<ibv_device> {
        self.raw
    }

    /// Returns the device structure of libibverbs.
    fn ibv_device(&self) -> &ibv_device {
        // SAFETY: `list` keeps the device alive, and libibverbs does not change its fields.
        unsafe { self.raw.as_ref() }
    }

    /// Returns the name of the RDMA device, such as `mana_0`.
    pub fn name(&self) -> String {
        string_from_c_chars(&self.ibv_device().name)
    }

    /// Returns the path of the device file, such as `/dev/infiniband/uverbs0`.
    pub fn device_file(&self) -> String {
        format!("/dev/infiniband/{}", string_from_c_chars(&self.ibv_device().dev_name))
    }

    /// Returns the sysfs directory of the device. It may not exist.
    pub fn sysfs(&self) -> PathBuf {
        PathBuf::from(string_from_c_chars(&self.ibv_device().ibdev_path))
    }

    /// Returns the NUMA node of the device as read from sysfs.
    pub fn numa_node(&self) -> Option<u32> {
        std::fs::read_to_string(self.sysfs().join("device/numa_node")).ok()?.trim().parse().ok()
    }

    /// Returns the kernel network interfaces of the device, as found in sysfs.
    pub fn interfaces(&self) -> Vec<Interface> {
        let Ok(entries) = self.sysfs().join("device/net").read_dir() else { return Vec::new() };
        let mut interfaces: Vec<Interface> = entries
            .flatten()
            .filter_map(|entry| {
                let read = |file: &str| std::fs::read_to_string(entry.path().join(file)).ok();
                // dev_port counts from 0.
                let port: u8 = read("dev_port")?.trim().parse().ok()?;
                let mac = parse_mac(read("address")?.trim())?;
                let mtu = read("mtu").and_then(|mtu| mtu.trim().parse().ok());
                Some(Interface { name: entry.file_name().into_string().ok()?, port: port.checked_add(1)?, mac, mtu })
            })
            .collect();
        interfaces.sort_by(|a, b| (a.port, &a.name).cmp(&(b.port, &b.name)));
        interfaces
    }

    /// Opens the device.
    ///
    /// # Errors
    /// The device file is missing or cannot be opened ([`crate::Cause::DeviceFile`]), or the provider does not
    /// support the device.
    pub fn open(&self) -> Result<Context> {
        Context::open(self)
    }
}

fn parse_mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(parts.next().filter(|part| part.len() == 2)?, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name()).field("file", &self.device_file()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_addresses_of_sysfs() {
        assert_eq!(parse_mac("00:15:5d:0a:FF:01"), Some([0, 0x15, 0x5d, 0x0a, 0xff, 1]));
        for wrong in ["", "00:15:5d:0a:ff", "00:15:5d:0a:ff:01:02", "0:15:5d:0a:ff:01", "00:15:5d:0a:ff:xx"] {
            assert_eq!(parse_mac(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn names_end_at_the_nul_byte() {
        let field: Vec<c_char> = b"mana_0\0rest".iter().map(|byte| byte.cast_signed()).collect();
        assert_eq!(string_from_c_chars(&field), "mana_0");
        assert_eq!(string_from_c_chars(&field[..4]), "mana");
    }
}
