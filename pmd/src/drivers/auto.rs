//! `driver = "auto"`: the best driver that can take the interface, with the reasons why the others were passed over.

use super::{Driver, driver_plan};
use crate::port::{Capabilities, Device, Link, Plan, PortConfig, PortError, PortEvent, Queues};
use crate::settings::{ConfigError, Settings};

/// Drivers that `auto` tries, best first.
const ORDER: &[&str] = &["af_xdp", "af_packet"];

/// The driver that chooses a driver.
#[derive(Debug)]
pub struct Auto;

impl Driver for Auto {
    fn name(&self) -> &'static str {
        "auto"
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

impl Plan for Choice {
    fn driver(&self) -> &'static str {
        "auto"
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        let _ = self.force;
        let mut passed_over = Vec::new();
        for plan in self.choices {
            let driver = plan.driver();
            match plan.open() {
                Ok(device) => return Ok(Box::new(Chosen { device, passed_over })),
                Err(error) => passed_over.push((driver, error.to_string())),
            }
        }
        Err(PortError::NoDriver { device: self.device, tried: passed_over })
    }
}

/// A device that `auto` opened.
struct Chosen {
    device: Box<dyn Device>,
    passed_over: Vec<(&'static str, String)>,
}

impl Device for Chosen {
    fn capabilities(&self) -> Capabilities {
        let mut capabilities = self.device.capabilities();
        let passed = self.passed_over.iter().map(|(driver, why)| format!("auto passed over {driver}: {why}"));
        capabilities.notes.extend(passed);
        capabilities
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        self.device.start(config)
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
}
