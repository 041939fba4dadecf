//! Ports that a changed configuration adds or removes.

use wirepath_pipeline::registry::ArgumentKind::{Flag, Number, Text};
use wirepath_pipeline::registry::{Argument, ObjectSpec, Operation};
use wirepath_pipeline::{ControlPlane, NewPort, PortInfo, PortOpener};
use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::port::PortId;

use super::{ConfigObject, Place};

/// New ports of one change, at most. Further ones take another change.
const MAX_NEW: usize = 64;

/// A port as an object of the configuration, for programs whose ports can change while they run.
pub static PORT: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "port",
        about: "A port; to change one, remove it and add it again",
        operations: &[
            (
                Operation::Add,
                &[
                    NAME,
                    Argument::optional("device", Text, "interface, device or cable"),
                    Argument::optional("driver", Text, "driver; without it the fastest one that works"),
                    Argument::optional("queues", Number, "receive queues, and transmit queues"),
                    Argument::optional("depth", Number, "entries of each ring"),
                    Argument::optional("mtu", Number, "largest layer-3 packet in bytes"),
                    Argument::optional("promiscuous", Flag, "whether frames for other hosts are received"),
                    Argument::optional("gro", Flag, "whether TCP and UDP packets of a burst are joined"),
                    Argument::optional("on_loss", Text, "reaction to the loss of the device: wait or exit"),
                ],
            ),
            (Operation::Remove, &[NAME]),
        ],
    },
    place: Place::Tables { key: "port", unnamed: |_| None },
};
const NAME: Argument = Argument::required("name", Text, "name of the port");

/// Numbers of the ports of a running program, and those for new ports. At the start, the ports of a configuration are
/// numbered in its order.
#[derive(Clone, Debug, Default)]
pub struct PortNumbers {
    /// Names by number. Numbers without a port have an empty name.
    running: Vec<String>,
    /// Numbers for new ports.
    free: Vec<PortId>,
}

impl PortNumbers {
    /// Returns the numbers of a running program.
    pub fn of(plane: &ControlPlane) -> Self {
        let running = plane.ports().iter().map(|port| port.name.clone()).collect();
        let free = (1..=MAX_NEW).rev().find_map(|n| plane.new_port_ids(n).ok());
        Self { running, free: free.unwrap_or_default() }
    }

    /// Returns whether a port of this name runs.
    pub fn is_running(&self, name: &str) -> bool {
        !name.is_empty() && self.running.iter().any(|running| running == name)
    }

    /// Returns the names of the ports that run and that a configuration lacks.
    pub(super) fn removed(&self, configured: &[String]) -> Vec<String> {
        self.running.iter().filter(|name| !name.is_empty() && !configured.contains(name)).cloned().collect()
    }

    /// Returns the names of a configuration's ports by number. Ports that run keep their numbers. Numbers without a
    /// port have an empty name.
    pub fn names(&self, configured: Vec<String>) -> Vec<String> {
        if self.running.is_empty() {
            return configured;
        }
        let kept = |name: &String| if configured.contains(name) { name.clone() } else { String::new() };
        let mut names: Vec<String> = self.running.iter().map(kept).collect();
        let mut free = self.free.iter();
        for name in configured.into_iter().filter(|name| !self.is_running(name)) {
            let at = free.next().map_or(names.len(), |id| id.index());
            names.resize(names.len().max(at + 1), String::new());
            names[at] = name;
        }
        names
    }
}

/// Ports that a change of the configuration adds and removes.
#[derive(Debug, Default)]
pub struct ChangedPorts {
    /// All ports after the change, by number. In a dry run, new ports are missing.
    pub after: Vec<PortInfo>,
    /// Numbers of the ports that are removed.
    pub removed: Vec<PortId>,
}

impl ChangedPorts {
    /// Describes a change of the present ports.
    pub(super) fn new(plane: &ControlPlane, new: &[NewPort], removed: &[String]) -> Self {
        let mut it = Self { after: plane.ports().to_vec(), removed: Vec::new() };
        for port in it.after.iter_mut().filter(|port| !port.is_removed && removed.contains(&port.name)) {
            port.is_removed = true;
            it.removed.push(port.id);
        }
        for new in new {
            let at = new.info().id.index();
            let placeholder = PortInfo { is_removed: true, name: String::new(), ..new.info().clone() };
            it.after.resize(it.after.len().max(at + 1), placeholder);
            it.after[at] = new.info().clone();
        }
        it
    }
}

/// Opens new ports, all or none.
///
/// # Errors
/// The reason why a port cannot be opened.
pub(super) fn open(opener: &PortOpener, ports: Vec<(PortId, PortSettings)>) -> Result<Vec<NewPort>, String> {
    let open = |(id, settings)| opener.open(id, settings, &[]).map_err(|error| error.to_string());
    ports.into_iter().map(open).collect()
}
