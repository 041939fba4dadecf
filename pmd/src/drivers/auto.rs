//! `driver = "auto"`: the best driver that can take the interface, with the reasons why the others were passed over.

use std::vec::IntoIter;

use super::direct::find::{describe, known};
use super::kernel::link::Interface;
use super::kernel::routes::carries_default_route;
use super::{Driver, driver_plan};
use crate::flow::Rule;
use crate::port::{
    Capabilities, Device, KernelRule, Link, Plan, PortConfig, PortError, PortEvent, PortId, Queues, RuleHardware,
    ToKernel,
};
use crate::settings::{ConfigError, Settings};

const NAME: &str = "auto";

/// Drivers that `auto` tries, best first. `verbs` is taken by name only: nobody has seen yet what providers without a driver of their own
/// here make of raw packets.
const ORDER: &[&str] = &["mlx5", "mana", "af_xdp", "af_packet"];

/// Those that find their devices without an interface of the kernel.
const BESIDE_THE_KERNEL: &[&str] = &["mlx5", "mana"];

/// The driver that chooses a driver.
#[derive(Debug)]
pub struct Auto;

impl Driver for Auto {
    fn name(&self) -> &'static str {
        NAME
    }

    fn about(&self) -> &'static str {
        "takes the fastest driver that can open the interface, and says why it passed over the others"
    }

    fn plan(&self, device: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
        let Some(device) = device else {
            return Err(settings.error("device: missing, expected the name of a network interface"));
        };
        let force = settings.get("force")?.unwrap_or(false);
        let mut choices = Vec::new();
        for name in ORDER {
            if let Some(driver) = super::find(name) {
                choices.push(driver_plan(driver, Some(device), settings)?);
            }
        }
        Ok(Box::new(Choice { device: device.to_owned(), force, choices }))
    }
}

#[derive(Debug)]
struct Choice {
    device: String,
    force: bool,
    choices: Vec<Box<dyn Plan>>,
}

impl Choice {
    /// The driver that takes most interfaces.
    fn expected(&self) -> Option<&dyn Plan> {
        self.choices.iter().find(|plan| plan.driver() == "af_xdp").map(|plan| &**plan)
    }
}

impl Plan for Choice {
    fn driver(&self) -> &'static str {
        NAME
    }

    fn to_kernel(&self) -> ToKernel {
        self.expected().map_or(ToKernel::No("no driver would open it"), |plan| plan.to_kernel())
    }

    fn decide(&self, rules: &[Rule], port: PortId) -> Vec<KernelRule> {
        self.expected().map_or_else(Vec::new, |plan| plan.decide(rules, port))
    }

    fn rules_in_hardware(&self) -> bool {
        self.choices.iter().any(|plan| plan.rules_in_hardware())
    }

    fn for_rules_of(&self, driver: &str, device: &str) -> Option<Box<dyn Plan>> {
        self.choices.iter().find_map(|plan| plan.for_rules_of(driver, device))
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        let mut left = self.choices.into_iter();
        let mut passed_over = Vec::new();
        let interface = match Interface::find(&self.device, NAME) {
            Ok(interface) => interface,
            // A port of an RDMA device need not have an interface that this network namespace knows.
            Err(unknown) => {
                let mut rdma =
                    left.filter(|plan| BESIDE_THE_KERNEL.contains(&plan.driver())).collect::<Vec<_>>().into_iter();
                let Some(device) = next(&mut rdma, &mut passed_over) else {
                    return Err(with_rdma_devices(unknown, &passed_over));
                };
                return Ok(Chosen::boxed(self.device, device, rdma, passed_over, false));
            }
        };
        let default_route = carries_default_route(interface.index)
            .map_err(|source| super::kernel::system(NAME, &self.device, "looking for default routes", source))?;
        if default_route && !self.force {
            return Err(PortError::Refused {
                driver: NAME,
                device: self.device,
                reason: "carries a default route of this machine, and taking it from the kernel may cut the machine off; use another \
                         interface, or set force = true in the table [port.auto]"
                    .into(),
            });
        }
        match next(&mut left, &mut passed_over) {
            Some(device) => Ok(Chosen::boxed(self.device, device, left, passed_over, default_route)),
            None => Err(PortError::NoDriver { device: self.device, tried: passed_over }),
        }
    }
}

/// What is said of a name that no interface has, with what else it could be, or why an RDMA device of that name was not taken.
fn with_rdma_devices(unknown: PortError, passed_over: &PassedOver) -> PortError {
    let devices = known();
    // A name may have a port behind it.
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

/// Opens the next device that can be opened.
fn next(left: &mut IntoIter<Box<dyn Plan>>, passed_over: &mut PassedOver) -> Option<Box<dyn Device>> {
    left.find_map(|plan| {
        let driver = plan.driver();
        plan.open().map_err(|error| passed_over.push((driver, error.to_string()))).ok()
    })
}

/// Whether another program, or another port of this one, has the interface's queues.
fn is_taken(error: &PortError) -> bool {
    matches!(error, PortError::System { source, .. } if source.raw_os_error() == Some(libc::EBUSY))
}

/// Drivers, and why they were not taken.
type PassedOver = Vec<(&'static str, String)>;

/// A device that `auto` opened.
struct Chosen {
    name: String,
    device: Box<dyn Device>,
    /// Drivers to try if this one opens the device but cannot start it.
    left: IntoIter<Box<dyn Plan>>,
    passed_over: PassedOver,
    default_route: bool,
    /// What the device was told, for the next one.
    rules: Vec<Rule>,
}

impl Chosen {
    fn boxed(
        name: String,
        device: Box<dyn Device>,
        left: IntoIter<Box<dyn Plan>>,
        passed_over: PassedOver,
        default_route: bool,
    ) -> Box<dyn Device> {
        Box::new(Self { name, device, left, passed_over, default_route, rules: Vec::new() })
    }
}

impl Device for Chosen {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.device.capabilities();
        let taken = format!("auto took {}", capabilities.driver);
        let route = self.default_route.then(|| "carries a default route, taken since force is set".to_owned());
        let passed = self.passed_over.iter().map(|(_, why)| format!("auto passed over {why}"));
        let own = std::mem::take(&mut capabilities.notes);
        capabilities.notes = std::iter::once(taken).chain(route).chain(passed).chain(own).collect();
        capabilities
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        loop {
            let error = match self.device.start(config) {
                Ok(queues) => {
                    // Stopped and started again it stays with this driver.
                    self.left = Vec::new().into_iter();
                    return Ok(queues);
                }
                // Somebody forwards on this interface already. With another driver beside it both would send, and one would get nothing.
                Err(error) if is_taken(&error) => return Err(error),
                Err(error) => error,
            };
            let driver = self.device.capabilities().driver;
            match next(&mut self.left, &mut self.passed_over) {
                Some(device) => {
                    self.passed_over.push((driver, error.to_string()));
                    self.device = device;
                    self.device.set_rules(&self.rules, config.id)?;
                }
                None if self.passed_over.is_empty() => return Err(error),
                None => {
                    let mut tried = self.passed_over.clone();
                    tried.push((driver, error.to_string()));
                    return Err(PortError::NoDriver { device: self.name.clone(), tried });
                }
            }
        }
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        self.device.stop(queues)
    }

    fn link(&mut self) -> Link {
        self.device.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        self.device.events()
    }

    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        self.device.extra_statistics()
    }

    fn set_rules(&mut self, rules: &[Rule], port: PortId) -> Result<Vec<KernelRule>, PortError> {
        self.rules = rules.to_vec();
        self.device.set_rules(rules, port)
    }

    fn rule_counters(&mut self, rule: &Rule) -> Option<(u64, u64)> {
        self.device.rule_counters(rule)
    }

    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.device.rule_hardware()
    }

    fn inject(&mut self, frame: &[u8]) -> std::io::Result<()> {
        self.device.inject(frame)
    }
}
