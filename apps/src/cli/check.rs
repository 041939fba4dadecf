//! The option `--check`: what a start would refuse, without starting anything.

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, json};
use wirepath_packet::Pool;
use wirepath_pipeline::RuntimeConfig;
use wirepath_pmd::drivers::inventory::DeviceInfo;
use wirepath_pmd::drivers::{DEFAULT_MTU, DeviceKind, PortSettings, choose_mtu, device_kind};
use wirepath_pmd::port::{OpenPort, PortError, PortId};

use super::{Failure, print, print_json};

/// Extent of `--check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CheckScope {
    /// The configuration, and whether this machine has what it asks for
    Machine,
    /// The configuration only, for another machine
    File,
}

/// Result of the check of this machine.
#[derive(Debug, Default)]
pub struct MachineCheck {
    /// Ports in configuration order.
    pub ports: Vec<CheckedPort>,
    /// Reasons for which a start would be refused, each with its position.
    pub errors: Vec<String>,
    /// Parts that could not be checked, each with the reason.
    pub not_checked: Vec<String>,
}

/// A port of a checked configuration.
#[derive(Clone, Debug, Serialize)]
pub struct CheckedPort {
    /// Name.
    pub name: String,
    /// Driver: the configured one, or the one that `auto` takes.
    pub driver: &'static str,
    /// Device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// MTU, if it is known before the start.
    pub mtu: Option<u16>,
    /// Reason for the MTU.
    pub mtu_reason: String,
    /// Queues of the device that the driver can use, if the device was opened.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queues: Option<u16>,
}

impl MachineCheck {
    /// Opens the devices of the ports without starting them, so no frame is taken from another user. Devices that an
    /// opening would create or change are not opened.
    pub fn run(ports: Vec<PortSettings>, runtime: &RuntimeConfig) -> Self {
        let mut check = Self::default();
        let queues = ports.iter().map(|port| usize::from(port.queues)).sum();
        for result in [runtime.check_cores(), runtime.check_queues(queues)] {
            check.errors.extend(result.err().map(|error| error.to_string()));
        }
        let share = runtime.buffers / (ports.len().max(1) as u32);
        for port in ports {
            check.port(port, share);
        }
        check
    }

    fn port(&mut self, port: PortSettings, share: u32) {
        let PortSettings { name, plan, device, queues, depth, mtu, key_spans, .. } = port;
        let driver = plan.driver();
        let mut checked = CheckedPort {
            name: name.clone(),
            driver,
            device,
            mtu,
            mtu_reason: "as configured".to_owned(),
            max_queues: None,
        };
        let kind = device_kind(driver);
        if !kind.takes_frames_from_kernel() {
            if kind == DeviceKind::CreatedInterface || checked.device.is_some() {
                self.not_checked.push(format!("port {name}: driver {driver} opens its device at the start"));
            }
            if mtu.is_none() {
                (checked.mtu, checked.mtu_reason) = (Some(DEFAULT_MTU), "the default; the device has none".to_owned());
            }
            self.ports.push(checked);
            return;
        }
        let info = checked.device.as_deref().and_then(DeviceInfo::read);
        let has = info.as_ref().and_then(|info| info.mtu);
        if let (Some(mtu), Some(has)) = (mtu, has.filter(|has| mtu.is_some_and(|mtu| u32::from(mtu) > *has))) {
            let device = checked.device.as_deref().unwrap_or_default();
            let message = format!("found {mtu}, but {device} has MTU {has}; `ip link set dev {device} mtu {mtu}`");
            self.errors.push(key_spans.of("mtu").error(message).to_string());
        }
        let at = |error: &PortError| key_spans.of_error(error).error(format!("port '{name}'"));
        let opened = OpenPort::open(&*name, plan).and_then(|port| {
            let device = port.capabilities();
            let entries = depth.saturating_mul(queues.into());
            let (mtu, why) = choose_mtu(mtu, &device, entries, share);
            let pool = Pool::new("check", 64)?;
            let mut config = wirepath_pmd::port::PortConfig::new(PortId::new(0), pool);
            (config.rx_queues, config.tx_queues, config.depth, config.mtu) = (queues, queues, depth, mtu);
            let device = port.configure(config)?.capabilities();
            Ok((mtu, why, device))
        });
        match opened {
            Ok((mtu, why, device)) => {
                (checked.mtu, checked.mtu_reason, checked.driver) = (Some(mtu), why, device.driver);
                checked.max_queues = Some(device.max_rx_queues);
            }
            Err(error) => {
                if let (None, Some(info)) = (mtu, &info) {
                    checked.mtu = info.mtu.and_then(|mtu| u16::try_from(mtu).ok());
                    "that of the device, if the driver supports it".clone_into(&mut checked.mtu_reason);
                }
                let text = format!("{}: {error}", at(&error));
                if error.is_privilege() {
                    let who = "run --check as the user that starts the program";
                    self.not_checked.push(format!("queues and driver of port {name} ({who}): {text}"));
                } else {
                    self.errors.push(text);
                }
            }
        }
        self.ports.push(checked);
    }
}

/// Prints the result of `--check`: the number of each kind of element, and what this machine has for it. Fails if the
/// start would be refused. `segments` are names and inner MTUs.
pub fn report_check(
    counts: &[(&str, usize)],
    machine: Option<&MachineCheck>,
    segments: &[(String, Option<u16>)],
    as_json: bool,
) -> Result<(), Failure> {
    if let Some(machine) = machine.filter(|machine| !machine.errors.is_empty()) {
        return Err(Failure::Usage(machine.errors.join("\nerror: ")));
    }
    if as_json {
        let mut object = serde_json::Map::new();
        object.insert("ok".to_owned(), true.into());
        object.extend(counts.iter().map(|(name, count)| ((*name).to_owned(), (*count).into())));
        if let Some(MachineCheck { ports, not_checked, .. }) = machine {
            object.insert("machine".to_owned(), json!({ "ports": ports, "not_checked": not_checked }));
        }
        if !segments.is_empty() {
            let mtus = segments.iter().map(|(name, mtu)| (name.clone(), Value::from(*mtu)));
            object.insert("inner_mtu".to_owned(), Value::Object(mtus.collect()));
        }
        return print_json(&object);
    }
    let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name}: {count}")).collect();
    let mut text = format!("configuration is valid; {}\n", counts.join(", "));
    for port in machine.iter().flat_map(|machine| &machine.ports) {
        let device = port.device.as_ref().map_or_else(String::new, |device| format!(" on {device}"));
        let mtu = port.mtu.map_or_else(|| "unknown".to_owned(), |mtu| mtu.to_string());
        let queues = port.max_queues.map_or_else(String::new, |most| format!(", at most {most} queues"));
        text += &format!("port {}: {}{device}, MTU {mtu} ({}){queues}\n", port.name, port.driver, port.mtu_reason);
    }
    for (name, mtu) in segments {
        let mtu =
            mtu.map_or_else(|| "known at the start, from the MTU of the device".to_owned(), |mtu| mtu.to_string());
        text += &format!("segment {name}: inner MTU {mtu}\n");
    }
    for what in machine.iter().flat_map(|machine| &machine.not_checked) {
        text += &format!("not checked: {what}\n");
    }
    print(text)
}
