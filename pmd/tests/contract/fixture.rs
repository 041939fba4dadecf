use std::path::PathBuf;
use std::sync::Arc;

use wirepath_testlab::{Lab, Namespace};

/// What the contract asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Property {
    Order,
    PartialTransmit,
    Sizes,
    TooLong,
    Chains,
    Statistics,
    Queues,
    Exhaustion,
    Restart,
    Link,
    Removal,
    Kill,
}

/// How a driver is brought to a wire.
pub(crate) trait Fixture: Sync {
    /// Name of the driver.
    fn driver(&self) -> &'static str;

    /// Why the driver cannot have a property, if so.
    fn exempt(&self, _: Property) -> Option<&'static str> {
        None
    }

    /// The NICs that the test needs in its process; it is then started again in one that has them.
    fn emulation(&self) -> Option<Emulation> {
        None
    }

    /// Makes device and wire; an error is why the test cannot run on this machine.
    fn set_up(&self) -> Result<Setup, String>;
}

/// Emulated NICs.
pub(crate) struct Emulation {
    /// Which ones: the emulator's file.
    pub(crate) topology: String,
    /// For the process that has them.
    pub(crate) environment: Vec<(&'static str, String)>,
    /// Where the emulator's `log` is: a line for everything that a real NIC would refuse. Removed after the test.
    pub(crate) folder: PathBuf,
}

/// A device and a wire, made for one test.
pub(crate) struct Setup {
    /// The wire.
    pub(crate) rig: Box<dyn Rig>,
    /// Where the test runs; `None`: where it is.
    pub(crate) place: Option<Arc<Namespace>>,
    /// Dropped last.
    pub(crate) lab: Option<Lab>,
}

/// A port's device, and what is at the other end of its wire.
pub(crate) trait Rig: Send {
    /// Keys of the `[[port]]` table without `name`, one for each line. `feed` is what the port shall receive, for rigs that must know
    /// before it starts.
    fn port(&mut self, feed: &[Vec<u8>]) -> String;

    /// What to know about the wire.
    fn nature(&self) -> Nature {
        Nature::default()
    }

    /// Waits until the wire carries frames to the port, which has just been started.
    fn settle(&mut self) {}

    /// Puts a frame on the wire to the port; `false`: no room at the moment.
    fn offer(&mut self, frame: &[u8]) -> bool;

    /// What came out of the port since the last call.
    fn arrived(&mut self) -> Vec<Vec<u8>>;

    /// Pulls the cable or plugs it in.
    fn set_link(&mut self, _up: bool) {
        unreachable!("the fixture declares no exemption from Property::Link");
    }

    /// Takes the device away; returns the name by which its loss must be reported.
    fn remove(&mut self) -> String {
        unreachable!("the fixture declares no exemption from Property::Removal");
    }

    /// A second device with a wire of its own, in the same place.
    fn another(&mut self) -> Box<dyn Rig> {
        unreachable!("the fixture declares no exemption from Property::Removal");
    }
}

/// What differs between wires, as data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Nature {
    /// Frames given to `offer` (or `port`) reach the port. Otherwise it makes its own.
    pub(crate) feeds: bool,
    /// `arrived` shows what the port sent.
    pub(crate) shows: bool,
    /// It does so only once the port is stopped.
    pub(crate) shows_after_stop: bool,
    /// The port stops taking packets while nobody takes them off the wire, so that a partial transmit can be provoked.
    pub(crate) fills: bool,
    /// Most frames that may be on the wire, in either direction, without a loss.
    pub(crate) capacity: usize,
}

impl Default for Nature {
    fn default() -> Self {
        Self { feeds: true, shows: true, shows_after_stop: false, fills: false, capacity: 256 }
    }
}
