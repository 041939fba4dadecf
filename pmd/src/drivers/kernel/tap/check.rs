//! A TAP port of a check: what opening and starting it would refuse, found without creating the interface.

use std::io;
use std::path::Path;

use rustix::thread::{CapabilitySet, capabilities};

use super::device::FILE;
use super::{NAME, Options, ipv6_disabled, open_error};
use crate::drivers::kernel::common::link::{Interface, Tap};
use crate::drivers::kernel::common::system_error;
use crate::port::{Capabilities, Device, DeviceLink, Link, PortConfig, PortError, PortEvent, Queues};

/// A TAP interface that exists or could be created.
pub(super) struct CheckedTap {
    options: Options,
    multi_queue: bool,
}

impl CheckedTap {
    /// Finds the errors of [`super::Opened::new`] and of the start.
    pub(super) fn new(options: Options) -> Result<Self, PortError> {
        let device = &options.device;
        let refused = |errno| Err(open_error(device, io::Error::from_raw_os_error(errno)));
        std::fs::File::options().read(true).write(true).open(FILE).map_err(|error| open_error(device, error))?;
        let may_create = capabilities(None).is_ok_and(|process| process.effective.contains(CapabilitySet::NET_ADMIN));
        let existing = match Interface::find(device, NAME) {
            Ok(interface) => Some(interface),
            Err(PortError::NoDevice { .. }) => None,
            Err(error) => return Err(error),
        };
        let tap = existing.as_ref().map(|interface| interface.tap);
        let multi_queue = match tap {
            None if may_create => true,
            None => return refused(libc::EPERM),
            Some(None) => return refused(libc::EINVAL),
            Some(Some(tap)) if !may_create && !is_permitted(tap) => return refused(libc::EPERM),
            Some(Some(Tap { multi_queue: false, attached: true, .. })) => return refused(libc::EBUSY),
            Some(Some(tap)) => tap.multi_queue,
        };
        if !may_create {
            let source = io::Error::from_raw_os_error(libc::EPERM);
            return Err(system_error(NAME, device, "setting MTU and state of the interface", source));
        }
        // The kernel replaces `%d` in the name of a new interface.
        let scope = if existing.is_some() { device } else { "default" };
        if options.addresses.iter().any(|prefix| prefix.is_ipv6()) && is_ipv6_disabled(scope) {
            return Err(ipv6_disabled(device, device, io::Error::from_raw_os_error(libc::EACCES)));
        }
        Ok(Self { options, multi_queue })
    }
}

/// Returns whether this process may attach queues without a capability (`tun_not_capable` in drivers/net/tun.c).
fn is_permitted(tap: Tap) -> bool {
    let own = |id| rustix::process::getegid().as_raw() == id;
    let groups = rustix::process::getgroups().unwrap_or_default();
    let is_member = |id| own(id) || groups.iter().any(|group| group.as_raw() == id);
    tap.owner.is_none_or(|owner| rustix::process::geteuid().as_raw() == owner) && tap.group.is_none_or(is_member)
}

fn is_ipv6_disabled(scope: &str) -> bool {
    let file = Path::new("/proc/sys/net/ipv6/conf").join(scope).join("disable_ipv6");
    std::fs::read_to_string(file).is_ok_and(|value| value.trim() == "1")
}

impl Device for CheckedTap {
    fn capabilities(&self) -> Capabilities {
        self.options.capabilities(self.multi_queue)
    }

    fn start(&mut self, _: &PortConfig) -> Result<Queues, PortError> {
        let (device, reason) = (self.options.device.clone(), "was opened for a check only".to_owned());
        Err(PortError::Refused { driver: NAME, device, reason })
    }

    fn stop(&mut self, _: Queues) -> Result<(), PortError> {
        Ok(())
    }
}

impl DeviceLink for CheckedTap {
    fn link(&mut self) -> Link {
        Link::DOWN
    }

    fn events(&mut self) -> Vec<PortEvent> {
        Vec::new()
    }
}
