// UNSAFETY: calls libibverbs and reads the device structs that it hands out.
#![allow(unsafe_code)]

//! The list of devices.

use std::ffi::{c_char, c_int};
use std::fmt;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::ibv_device;
use rdma_core_sys::{Library, RdmaCore, Search};

use crate::context::last_errno;
use crate::error::{CallError, Cause, Situation, diagnose};
use crate::{Context, Result};

/// The RDMA libraries of this machine.
#[derive(Clone, Copy, Debug)]
pub struct Verbs {
    pub(crate) libraries: &'static RdmaCore,
}

impl Verbs {
    /// Opens the libraries: those in the directory that `WIREPATH_RDMA_LIB_DIR` names, else the system's.
    ///
    /// # Errors
    /// They are not there: [`crate::Error::Library`], one line that says what to install.
    pub fn load() -> Result<Self> {
        Self::load_from(&Search::from_environment())
    }

    /// Opens the libraries from where the caller says. A process has one set of them for its life.
    ///
    /// # Errors
    /// They are not there, or others are in use.
    pub fn load_from(search: &Search) -> Result<Self> {
        Ok(Self { libraries: RdmaCore::load(search)? })
    }

    /// The libraries that are loaded, with their versions.
    pub fn libraries(&self) -> Vec<&'static Library> {
        self.libraries.libraries()
    }

    /// The device that another process has open, by the file that it passed ([`Context::descriptor`]; ibv_import_device(3)): both have one
    /// context of the kernel, which lives until both have closed it. Objects of the other process are imported
    /// ([`crate::ImportedDomain`], [`crate::ImportedRegion`], [`crate::mlx5::var::ImportedVar`]).
    ///
    /// # Errors
    /// It is no open device, or of one whose provider cannot import: of rdma-core, only libmlx5 can.
    pub fn import_device(&self, file: OwnedFd) -> Result<Context> {
        let ibverbs = self.libraries.ibverbs();
        let import = ibverbs.ibv_import_device()?;
        ibverbs.ibv_close_device()?;
        let devices = self.devices()?;
        // SAFETY: a descriptor that is open.
        let raw = unsafe { import(file.as_raw_fd()) };
        let errno = last_errno();
        let failed = |errno: i32, cause| {
            let subject = "the file that another process passed".to_owned();
            Err(CallError { call: "ibv_import_device", subject, errno, cause }.into())
        };
        let Some(raw) = NonNull::new(raw) else {
            let cause = match errno {
                // No device file, or a context whose registers are no objects.
                0 | libc::EINVAL => Cause::Refused,
                errno => diagnose("ibv_import_device", errno, &Situation::default()),
            };
            return failed(if errno == 0 { libc::EINVAL } else { errno }, cause);
        };
        // The context closes it from here on.
        let _: i32 = file.into_raw_fd();
        // SAFETY: an open context, whose device lives as long.
        let name = unsafe { text(&(*(*raw.as_ptr()).device).name) };
        match devices.into_iter().find(|device| device.name() == name) {
            Some(device) => Context::open_by(&device, "ibv_import_device", |_| raw.as_ptr()),
            None => {
                if let Ok(close) = ibverbs.ibv_close_device() {
                    // SAFETY: opened just now.
                    unsafe { close(raw.as_ptr()) };
                }
                failed(libc::ENODEV, Cause::DeviceGone)
            }
        }
    }

    /// The devices of this machine, now. No kernel support for RDMA is no error: there are none then.
    ///
    /// # Errors
    /// The list could not be made.
    pub fn devices(&self) -> Result<Vec<Device>> {
        let ibverbs = self.libraries.ibverbs();
        let list_devices = ibverbs.ibv_get_device_list()?;
        // What uses the list must be there before there is one.
        ibverbs.ibv_free_device_list()?;
        let mut number: c_int = 0;
        // SAFETY: the number is written.
        let list = unsafe { list_devices(&raw mut number) };
        let errno = last_errno();
        self.libraries.allow_destroying_after_the_device_is_gone();
        let Some(list) = NonNull::new(list) else {
            // "Kernel does not support verbs", ibv_get_device_list(3).
            if errno == libc::ENOSYS {
                return Ok(Vec::new());
            }
            let cause = diagnose("ibv_get_device_list", errno, &Situation::default());
            return Err(
                CallError { call: "ibv_get_device_list", subject: "this machine".to_owned(), errno, cause }.into()
            );
        };
        let list = Arc::new(DeviceList { verbs: *self, list });
        let number = usize::try_from(number).unwrap_or(0);
        // SAFETY: the list has this many entries, each a device until the list is freed.
        let devices = (0..number).filter_map(|index| NonNull::new(unsafe { *list.list.add(index).as_ptr() }));
        Ok(devices.map(|raw| Device { list: Arc::clone(&list), raw }).collect())
    }
}

/// An array of libibverbs, which keeps the devices in it.
struct DeviceList {
    verbs: Verbs,
    list: NonNull<*mut ibv_device>,
}

// SAFETY: the array is not changed, and libibverbs locks its own state.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // It was there when the list was made.
        if let Ok(free) = self.verbs.libraries.ibverbs().ibv_free_device_list() {
            // SAFETY: made by ibv_get_device_list, freed once; open contexts keep their device by themselves.
            unsafe { free(self.list.as_ptr()) };
        }
    }
}

/// A device, not open yet.
#[derive(Clone)]
pub struct Device {
    list: Arc<DeviceList>,
    raw: NonNull<ibv_device>,
}

// SAFETY: the device is kept by the list; what is read from it never changes.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A network interface of the kernel that belongs to a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Such as `eth1`.
    pub name: String,
    /// Port of the device, counted from 1.
    pub port: u8,
    /// MAC address.
    pub mac: [u8; 6],
    /// Most bytes behind the Ethernet header, as the interface is set now.
    pub mtu: Option<u32>,
}

fn text(field: &[c_char]) -> String {
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

    fn fields(&self) -> &ibv_device {
        // SAFETY: kept by the list; libibverbs changes nothing in it.
        unsafe { self.raw.as_ref() }
    }

    /// Name of the RDMA device, such as `mana_0`.
    pub fn name(&self) -> String {
        text(&self.fields().name)
    }

    /// The file that is opened, such as `/dev/infiniband/uverbs0`.
    pub fn file(&self) -> String {
        format!("/dev/infiniband/{}", text(&self.fields().dev_name))
    }

    /// Directory of the device in sysfs; it need not exist.
    pub fn sysfs(&self) -> PathBuf {
        PathBuf::from(text(&self.fields().ibdev_path))
    }

    /// Node GUID, 0 if unknown.
    pub fn guid(&self) -> u64 {
        self.list.verbs.libraries.ibverbs().ibv_get_device_guid().map_or(0, |guid| {
            // SAFETY: a device of a living list.
            u64::from_be(unsafe { guid(self.raw.as_ptr()) })
        })
    }

    /// Address on the PCI bus, such as `0000:3b:00.0`, if sysfs tells it.
    pub fn pci_address(&self) -> Option<String> {
        let link = self.sysfs().join("device").read_link().ok()?;
        let name = link.file_name()?.to_str()?;
        (name.matches(':').count() == 2 && name.contains('.')).then(|| name.to_owned())
    }

    /// NUMA node, if the machine has several and sysfs tells it.
    pub fn numa_node(&self) -> Option<u32> {
        std::fs::read_to_string(self.sysfs().join("device/numa_node")).ok()?.trim().parse().ok()
    }

    /// The kernel's network interfaces of the device, by sysfs.
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
    /// The kernel or the provider refused, see [`crate::Cause::DeviceFile`].
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
        f.debug_struct("Device").field("name", &self.name()).field("file", &self.file()).finish_non_exhaustive()
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
    fn names_end_at_the_zero() {
        let field: Vec<c_char> = b"mana_0\0rest".iter().map(|byte| byte.cast_signed()).collect();
        assert_eq!(text(&field), "mana_0");
        assert_eq!(text(&field[..4]), "mana");
    }
}
