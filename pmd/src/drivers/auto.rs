//! `driver = "auto"`: the best driver that can open the interface, with the reasons why others were passed over.
//!
//! Drivers with [`Driver::in_auto`] are tried in the order of [`DRIVERS`]. `verbs` is not among them: raw packets
//! of RDMA providers without a dedicated driver here are untested. On a virtual cable (veth(4)) those with
//! [`Driver::is_first_on_veth`] come first, unless an XDP program is attached, behind which they would receive nothing.

use std::vec::IntoIter;

use super::kernel::common::link::Interface;
use super::kernel::common::routes::carries_default_route;
#[cfg(feature = "nic")]
use super::nic::common::probe::{describe, list_devices};
#[cfg(feature = "nic")]
use super::nic::rdma::is_adapter_of;
use super::{DRIVERS, DeviceKind, Driver, LEFT_OUT, LEFT_OUT_TABLES, device_kind, driver_plan, find};
use crate::port::{
    Bifurcation, Capabilities, Device, DeviceLink, DeviceStatistics, KernelPunt, KernelRule, Link, PortConfig,
    PortError, PortEvent, PortId, PortSpec, PuntToKernel, Queues, RuleHardware, TriedDriver,
};
use wirepath_flow::Rule;
use wirepath_packet::drops::DropReason;
use wirepath_privileges::CapabilitySet;
use wirepath_settings::{ConfigError, ConfigTable, Flag, Key, Settings, WithDefault};

const NAME: &str = "auto";

const FORCE: Key<WithDefault<Flag>> = Key::flag("force")
    .default(false)
    .about("Takes an interface even if it carries a default route of this machine, which may cut the machine off.");

static TABLE: ConfigTable = ConfigTable {
    name: NAME,
    about: "Settings of driver = \"auto\". Tables of drivers inside apply if `auto` chooses that driver.",
    absent: "every key has its default",
    keys: &[&FORCE],
    tables: || {
        let built_in = DRIVERS.iter().filter(|driver| driver.in_auto()).map(|driver| driver.table());
        built_in.chain(LEFT_OUT_TABLES.iter()).collect()
    },
    example: "[port.auto]\nforce = true\n\n[port.auto.af_xdp]\nmode = \"generic\"\n",
    ..ConfigTable::EMPTY
};

/// The driver that chooses a driver.
#[derive(Debug)]
pub struct Auto;

impl Driver for Auto {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "uses the fastest driver that can open the interface, and reports why others were passed over"
    }

    fn device_kind(&self) -> DeviceKind {
        DeviceKind::Interface
    }

    fn privileges(&self) -> CapabilitySet {
        let tried = DRIVERS.iter().filter(|driver| driver.in_auto());
        tried.fold(CapabilitySet::empty(), |all, driver| all | driver.privileges())
    }

    fn table(&self) -> &'static ConfigTable {
        &TABLE
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error("device: missing, expected the name of a network interface"));
        };
        for driver in LEFT_OUT.iter().filter(|driver| settings.has(driver.name)) {
            settings.record(settings.error_in(driver.name, driver.to_string()));
        }
        let force = settings.read(&FORCE)?;
        let mut choices = Vec::new();
        for driver in DRIVERS.iter().filter(|driver| driver.in_auto()) {
            choices.push(driver_plan(*driver, Some(device), settings)?);
        }
        Ok(Box::new(AutoPlan { device: device.to_owned(), force, choices }))
    }
}

#[derive(Debug)]
struct AutoPlan {
    device: String,
    force: bool,
    choices: Vec<Box<dyn PortSpec>>,
}

impl AutoPlan {
    /// Returns the specification of the first driver that opens an interface like this one. It answers before a device
    /// is opened.
    fn expected(&self) -> Option<&dyn PortSpec> {
        let is_veth = Interface::find(&self.device, NAME).is_ok_and(|interface| is_free_veth(&interface));
        let of_interfaces = || self.choices.iter().filter(|plan| device_kind(plan.driver()) == DeviceKind::Interface);
        let first = of_interfaces().find(|plan| is_veth && is_first_on_veth(plan.driver()));
        first.or_else(|| of_interfaces().next()).map(|plan| &**plan)
    }
}

/// Returns whether the interface is a virtual cable without an XDP program.
fn is_free_veth(interface: &Interface) -> bool {
    interface.is_veth && interface.xdp.is_none()
}

fn is_first_on_veth(driver: &str) -> bool {
    find(driver).is_some_and(Driver::is_first_on_veth)
}

impl PortSpec for AutoPlan {
    fn driver(&self) -> &'static str {
        NAME
    }

    /// None for certain: another driver may open the device.
    fn privileges(&self) -> CapabilitySet {
        CapabilitySet::empty()
    }

    fn kernel_punt(&self) -> KernelPunt {
        match self.expected() {
            None => KernelPunt::No("no driver would open it"),
            Some(plan) => match plan.kernel_punt() {
                KernelPunt::No(_) if is_first_on_veth(plan.driver()) => KernelPunt::No(
                    "`auto` takes a veth interface wholly from the kernel; with driver = \"af_xdp\" the kernel gets \
                     the packets of these rules",
                ),
                punt => punt,
            },
        }
    }

    fn kernel_rules(&self, rules: &[Rule], port: PortId) -> Vec<KernelRule> {
        self.expected().map_or_else(Vec::new, |plan| plan.kernel_rules(rules, port))
    }

    fn may_offload_rules(&self) -> bool {
        self.choices.iter().any(|plan| plan.may_offload_rules())
    }

    fn rule_spec_for(&self, driver: &str, device: &str) -> Option<Box<dyn PortSpec>> {
        self.choices.iter().find_map(|plan| plan.rule_spec_for(driver, device))
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        let mut passed_over = PassedOver::new();
        let mut choices = self.choices;
        let interface = match Interface::find(&self.device, NAME) {
            Ok(interface) => interface,
            // A port of an RDMA device may have no interface in this network namespace.
            Err(unknown) => {
                let mut rdma = choices
                    .into_iter()
                    .filter(|plan| device_kind(plan.driver()) == DeviceKind::RdmaPort)
                    .collect::<Vec<_>>()
                    .into_iter();
                let Some(device) = open_next(&mut rdma, &mut passed_over) else {
                    return Err(add_rdma_hint(unknown, &passed_over));
                };
                return Ok(AutoDevice::new_boxed(self.device, device, rdma, passed_over, false));
            }
        };
        let default_route = carries_default_route(interface.index).map_err(|source| {
            super::kernel::common::system_error(NAME, &self.device, "looking for default routes", source)
        })?;
        if default_route && !self.force {
            return Err(PortError::Refused {
                driver: NAME,
                device: self.device,
                reason: "carries a default route of this machine, and taking it from the kernel may cut the \
                     machine off; use another interface, or set force = true in the table [port.auto]"
                    .into(),
            });
        }
        if is_free_veth(&interface) {
            choices.sort_by_key(|plan| !is_first_on_veth(plan.driver()));
        }
        let mut remaining = choices.into_iter();
        match open_next(&mut remaining, &mut passed_over) {
            Some(device) => Ok(AutoDevice::new_boxed(self.device, device, remaining, passed_over, default_route)),
            None => Err(PortError::NoDriver { device: self.device, tried: passed_over }),
        }
    }
}

/// Extends the error for an unknown interface by the names of RDMA devices. If one has the name, the error says
/// why it was not opened.
#[cfg(feature = "nic")]
fn add_rdma_hint(unknown: PortError, passed_over: &PassedOver) -> PortError {
    let devices = list_devices();
    // A port number may follow the name.
    let is_one = |name: &str| devices.iter().any(|device| name.split('/').next() == Some(&*device.name()));
    match unknown {
        PortError::NoDevice { device, .. } if is_one(&device) => {
            PortError::NoDriver { device, tried: passed_over.clone() }
        }
        PortError::NoDevice { driver, device, hint } if !devices.is_empty() => {
            let devices: Vec<_> = devices.iter().map(describe).collect();
            PortError::NoDevice { driver, device, hint: format!("{hint}; RDMA devices: {}", devices.join(", ")) }
        }
        other => other,
    }
}

/// Without drivers for RDMA devices, their names would not help.
#[cfg(not(feature = "nic"))]
fn add_rdma_hint(unknown: PortError, _: &PassedOver) -> PortError {
    unknown
}

/// Opens the device with the next driver that can.
fn open_next(remaining: &mut IntoIter<Box<dyn PortSpec>>, passed_over: &mut PassedOver) -> Option<Box<dyn Device>> {
    remaining.find_map(|plan| {
        let driver = plan.driver();
        plan.open().map_err(|error| passed_over.push(tried(driver, &error))).ok()
    })
}

/// No driver for NICs is built in.
#[cfg(not(feature = "nic"))]
fn is_adapter_of(_: &str, _: &str) -> bool {
    false
}

fn tried(driver: &'static str, error: &PortError) -> TriedDriver {
    let is_foreign = match error {
        // The NIC is there, and its RDMA device is missing: that is worth a message.
        PortError::NoDevice { device, .. } if device_kind(driver) == DeviceKind::RdmaPort => {
            let interface = Interface::find(device, NAME).ok();
            !interface.and_then(|interface| interface.parent).is_some_and(|parent| is_adapter_of(driver, &parent))
        }
        _ => false,
    };
    TriedDriver { driver, error: error.to_string(), is_foreign, is_privilege: error.is_privilege() }
}

/// Returns whether another program, or another port of this one, uses the interface's queues.
fn is_busy(error: &PortError) -> bool {
    matches!(error, PortError::System { source, .. } if source.raw_os_error() == Some(libc::EBUSY))
}

/// Drivers with the reasons why they were passed over.
type PassedOver = Vec<TriedDriver>;

/// A device that `auto` opened.
struct AutoDevice {
    name: String,
    device: Box<dyn Device>,
    /// Drivers to try if this one opens the device but cannot start it.
    remaining: IntoIter<Box<dyn PortSpec>>,
    passed_over: PassedOver,
    default_route: bool,
    /// Rules of the last `set_rules`, for the next device.
    rules: Vec<Rule>,
}

impl AutoDevice {
    fn new_boxed(
        name: String,
        device: Box<dyn Device>,
        remaining: IntoIter<Box<dyn PortSpec>>,
        passed_over: PassedOver,
        default_route: bool,
    ) -> Box<dyn Device> {
        for tried in passed_over.iter().filter(|tried| tried.is_foreign) {
            tracing::debug!("auto passed over {}", tried.error);
        }
        Box::new(Self { name, device, remaining, passed_over, default_route, rules: Vec::new() })
    }

    /// Replaces the device by that of the next driver, because of this error. Without such a driver, all errors are
    /// returned.
    fn replace(&mut self, error: PortError) -> Result<(), PortError> {
        if self.passed_over.is_empty() && self.remaining.len() == 0 {
            return Err(error);
        }
        self.passed_over.push(tried(self.device.capabilities().driver, &error));
        match open_next(&mut self.remaining, &mut self.passed_over) {
            Some(device) => {
                self.device = device;
                Ok(())
            }
            None => Err(PortError::NoDriver { device: self.name.clone(), tried: self.passed_over.clone() }),
        }
    }
}

impl Device for AutoDevice {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.device.capabilities();
        let taken = format!("auto took {}", capabilities.driver);
        let route = self.default_route.then(|| "carries a default route, taken since force is set".to_owned());
        let passed = self.passed_over.iter().filter(|tried| !tried.is_foreign);
        let passed = passed.map(|tried| format!("auto passed over {}", tried.error));
        let own = std::mem::take(&mut capabilities.notes);
        capabilities.notes = std::iter::once(taken).chain(route).chain(passed).chain(own).collect();
        capabilities
    }

    fn check(&mut self, config: &PortConfig) -> Result<(), PortError> {
        while let Err(error) = self.device.check(config) {
            self.replace(error)?;
        }
        Ok(())
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        loop {
            let error = match self.device.check(config).and_then(|()| self.device.start(config)) {
                Ok(queues) => {
                    // A restart stays with this driver.
                    self.remaining = Vec::new().into_iter();
                    return Ok(queues);
                }
                // The interface is in use. With another driver both users would send, but only one would receive.
                Err(error) if is_busy(&error) => return Err(error),
                Err(error) => error,
            };
            self.replace(error)?;
            if let Some(device) = self.device.punt_to_kernel() {
                device.set_rules(&self.rules, config.id)?;
            }
        }
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        self.device.stop(queues)
    }

    fn can_return(&self) -> bool {
        self.device.can_return()
    }

    fn privileges(&self) -> CapabilitySet {
        self.device.privileges()
    }

    fn restart(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        self.device.restart(config)
    }

    fn set_bifurcation(&mut self, bifurcation: &Bifurcation) -> Result<(), PortError> {
        self.device.set_bifurcation(bifurcation)
    }

    fn read_clock(&mut self) -> Option<u64> {
        self.device.read_clock()
    }

    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }

    fn punt_to_kernel(&mut self) -> Option<&mut dyn PuntToKernel> {
        Some(self)
    }
}

impl DeviceLink for AutoDevice {
    fn link(&mut self) -> Link {
        self.device.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        self.device.events()
    }
}

impl DeviceStatistics for AutoDevice {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.device.statistics().map_or_else(Vec::new, DeviceStatistics::extra_statistics)
    }

    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        self.device.statistics().map_or_else(Vec::new, DeviceStatistics::drops)
    }
}

impl PuntToKernel for AutoDevice {
    fn set_rules(&mut self, rules: &[Rule], port: PortId) -> Result<Vec<KernelRule>, PortError> {
        self.rules = rules.to_vec();
        self.device.punt_to_kernel().map_or(Ok(Vec::new()), |device| device.set_rules(rules, port))
    }

    fn rule_counters(&mut self, rule: &Rule) -> Option<(u64, u64)> {
        self.device.punt_to_kernel()?.rule_counters(rule)
    }

    fn inject(&mut self, frame: &[u8]) -> std::io::Result<()> {
        match self.device.punt_to_kernel() {
            Some(device) => device.inject(frame),
            None => Err(std::io::ErrorKind::Unsupported.into()),
        }
    }
}
