use std::path::PathBuf;
use std::sync::Arc;

use wirepath_testlab::{Lab, Namespace};

/// A property that the contract demands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Property {
    Order,
    PartialTransmit,
    Sizes,
    TooLong,
    Chains,
    Superframes,
    Statistics,
    Queues,
    Exhaustion,
    Restart,
    Link,
    Removal,
    Kill,
}

/// Setup of a device with a wire for a driver.
pub(crate) trait Fixture: Sync {
    /// Returns the name of the driver.
    fn driver(&self) -> &'static str;

    /// Returns the reason why the driver cannot have a property.
    fn exempt(&self, _: Property) -> Option<&'static str> {
        None
    }

    /// Returns the emulated NICs that the test needs. The test then starts itself again in a process with
    /// them.
    fn emulation(&self) -> Option<Emulation> {
        None
    }

    /// Creates the device and the wire. The error says why the test cannot run on this machine.
    fn set_up(&self) -> Result<Setup, String>;
}

/// Emulated NICs.
pub(crate) struct Emulation {
    /// Configuration of the emulator.
    pub(crate) topology: String,
    /// Environment of the process with the NICs.
    pub(crate) environment: Vec<(&'static str, String)>,
    /// Folder of the emulator's `log`, with a line for everything that a real NIC would refuse. Removed after
    /// the test.
    pub(crate) folder: PathBuf,
}

/// A device and a wire for one test.
pub(crate) struct Setup {
    /// The wire.
    pub(crate) wire: Box<dyn Wire>,
    /// Namespace of the test; `None` for the current one.
    pub(crate) namespace: Option<Arc<Namespace>>,
    /// Dropped last.
    pub(crate) lab: Option<Lab>,
}

/// The device of a port, and the other end of its wire.
pub(crate) trait Wire: Send {
    /// Returns the keys of the `[[port]]` table without `name`, one per line. `feed` holds the frames that
    /// the port shall receive, for wires that must know them before the start.
    fn port(&mut self, feed: &[Vec<u8>]) -> String;

    /// Returns the properties of the wire.
    fn traits(&self) -> WireTraits {
        WireTraits::default()
    }

    /// Waits until the wire carries frames to the started port.
    fn settle(&mut self) {}

    /// Sends a frame to the port. Returns `false` if there is no space at the moment.
    fn offer(&mut self, frame: &[u8]) -> bool;

    /// Returns the frames that the port has sent since the last call.
    fn arrived(&mut self) -> Vec<Vec<u8>>;

    /// Sets the link down or up.
    fn set_link(&mut self, _up: bool) {
        unreachable!("the fixture declares no exemption from Property::Link");
    }

    /// Removes the device. Returns the name that the report of the loss must contain.
    fn remove(&mut self) -> String {
        unreachable!("the fixture declares no exemption from Property::Removal");
    }

    /// Returns a second device with a separate wire, in the same namespace.
    fn second_device(&mut self) -> Box<dyn Wire> {
        unreachable!("the fixture declares no exemption from Property::Removal");
    }
}

/// Properties of a wire.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WireTraits {
    /// Frames given to `offer` (or `port`) reach the port. Otherwise the port generates frames.
    pub(crate) delivers: bool,
    /// `arrived` returns the frames that the port sent.
    pub(crate) shows_sent: bool,
    /// `arrived` returns them only after the port has stopped.
    pub(crate) shows_sent_after_stop: bool,
    /// The port stops accepting packets while the wire is full, so that a partial transmit can be provoked.
    pub(crate) has_backpressure: bool,
    /// Maximum number of frames on the wire, in either direction, without loss.
    pub(crate) capacity: usize,
}

impl Default for WireTraits {
    fn default() -> Self {
        Self { delivers: true, shows_sent: true, shows_sent_after_stop: false, has_backpressure: false, capacity: 256 }
    }
}
