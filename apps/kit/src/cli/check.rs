//! The option `--check`: what a start would refuse, without starting anything.

use clap::ValueEnum;
use serde::Serialize;
use serde_json::{Value, json};
use wirepath_pipeline::{CheckedPorts, OpenedPort, PortInfo, Runtime, RuntimeConfig};
use wirepath_pmd::drivers::{PortSettings, device_kind};

use super::{Failure, print, print_json};

/// Extent of `--check`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CheckScope {
    /// The configuration, and whether this machine has what it asks for
    Machine,
    /// The configuration only, for another machine
    File,
}

/// A port of a configuration that this machine can start.
#[derive(Clone, Debug, Serialize)]
pub struct CheckedPort {
    /// Name.
    pub name: String,
    /// Driver: the configured one, or the one that `auto` takes.
    pub driver: &'static str,
    /// Device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// MTU in bytes.
    pub mtu: u16,
    /// Reason for the MTU.
    pub mtu_reason: String,
    /// Queues of the device that the driver can use, if the device has frames of the kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queues: Option<u16>,
}

/// Opens the ports for a check, and passes them to `further` for the checks of the program. Takes no frame from another
/// user, and changes nothing on the machine.
///
/// # Errors
/// The errors of the start, and its exit code. All errors of ports are reported at once.
pub fn check_machine(
    ports: Vec<PortSettings>,
    config: RuntimeConfig,
    further: impl FnOnce(&mut Runtime) -> Result<(), Failure>,
) -> Result<Vec<CheckedPort>, Failure> {
    let devices: Vec<Option<String>> = ports.iter().map(|port| port.device.clone()).collect();
    let CheckedPorts { ports, runtime } = Runtime::check(ports, config);
    let refused = |errors: Vec<_>| Failure::all(&errors.into_iter().map(Failure::from).collect::<Vec<_>>());
    further(&mut runtime.map_err(refused)?)?;
    let checked = |(OpenedPort { info, mtu_reason }, device)| {
        let driver = info.capabilities.driver;
        let is_shared = device_kind(driver).takes_frames_from_kernel();
        let max_queues = is_shared.then_some(info.capabilities.max_rx_queues);
        CheckedPort { name: info.name, driver, device, mtu: info.mtu, mtu_reason, max_queues }
    };
    Ok(ports.into_iter().zip(devices).map(checked).collect())
}

/// Prints the result of `--check`: the number of each kind of element, and the ports on this machine. `segments` are
/// names and inner MTUs.
pub fn report_check(
    counts: &[(&str, usize)],
    machine: Option<&[CheckedPort]>,
    segments: &[(String, Option<u16>)],
    as_json: bool,
) -> Result<(), Failure> {
    if as_json {
        let mut object = serde_json::Map::new();
        object.insert("ok".to_owned(), true.into());
        object.extend(counts.iter().map(|(name, count)| ((*name).to_owned(), (*count).into())));
        if let Some(ports) = machine {
            object.insert("machine".to_owned(), json!({ "ports": ports }));
        }
        if !segments.is_empty() {
            let mtus = segments.iter().map(|(name, mtu)| (name.clone(), Value::from(*mtu)));
            object.insert("inner_mtu".to_owned(), Value::Object(mtus.collect()));
        }
        return print_json(&object);
    }
    let counts: Vec<String> = counts.iter().map(|(name, count)| format!("{name}: {count}")).collect();
    let mut text = format!("configuration is valid; {}\n", counts.join(", "));
    for CheckedPort { name, driver, device, mtu, mtu_reason, max_queues } in machine.into_iter().flatten() {
        let device = device.as_ref().map_or_else(String::new, |device| format!(" on {device}"));
        let queues = max_queues.map_or_else(String::new, |most| format!(", at most {most} queues"));
        text += &format!("port {name}: {driver}{device}, MTU {mtu} ({mtu_reason}){queues}\n");
    }
    for (name, mtu) in segments {
        let mtu =
            mtu.map_or_else(|| "known at the start, from the MTU of the device".to_owned(), |mtu| mtu.to_string());
        text += &format!("segment {name}: inner MTU {mtu}\n");
    }
    print(text)
}

/// Refuses a configuration whose ports have another order than those that run.
pub fn check_same_ports(running: &[PortInfo], configured: &[PortSettings]) -> Result<(), Failure> {
    let same = running.iter().map(|port| &port.name).eq(configured.iter().map(|port| &port.name));
    if same {
        Ok(())
    } else {
        Err(Failure::usage("the order of the ports cannot change without a restart of the program"))
    }
}
