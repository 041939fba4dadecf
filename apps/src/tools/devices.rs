//! `wirepath devices`: lists the usable ports with driver and mode, and the unusable ones with the reason.

use clap::Args;
use serde::Serialize;
use wirepath_packet::Pool;
use wirepath_packet::PortId;
use wirepath_pmd::drivers::inventory::DeviceInfo;
use wirepath_pmd::drivers::nic::rdma::QueuePairEncapsulation;
use wirepath_pmd::drivers::{self, Candidate, DRIVERS, Driver};
use wirepath_pmd::port::hardware::RuleCapabilities;
use wirepath_pmd::port::{ConfiguredPort, OpenPort, PortConfig, PortSpec, StartedPort};
use wirepath_settings::Source;

use wirepath::cli::{Failure, Table, print, print_json};

/// Lists the usable ports with driver and mode, and the unusable ones with the reason
///
/// Nothing is opened for traffic and nothing is changed. An interface appears once for each driver, the
/// best one first. `driver = "auto"` uses that driver, unless the interface carries the default route.
/// With --json: an object with `devices` (device, driver, usable, and mode or reason) and `drivers`
/// (driver, about).
#[derive(Debug, Args)]
pub struct Options {
    /// Instead, open this device and print its rule capabilities as JSON, as read by
    /// `flow explain --capabilities`
    #[arg(long, value_name = "DRIVER:DEVICE")]
    rules: Option<String>,
}

/// A device and one driver's result for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// Value of the key `device`.
    pub device: String,
    /// Value of the key `driver`.
    pub driver: &'static str,
    /// True if the driver can open the device.
    pub usable: bool,
    /// The expected operating mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Reason why the driver cannot open the device, with a remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Properties of the device, if it is an interface or an RDMA device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub info: Option<DeviceInfo>,
    /// Capabilities of the rule hardware, as `wirepath flow explain --capabilities` reads them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules: Option<RuleCapabilities>,
    /// Reason why the capabilities are unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_rules: Option<String>,
}

/// Output of `--json`.
#[derive(Debug, Serialize)]
struct Report<'a> {
    devices: &'a [Offer],
    drivers: Vec<DriverInfo>,
    encapsulation: Encapsulation,
}

/// Encapsulation by RDMA queue pairs, which is independent of flow rules.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Encapsulation {
    ByQueuePair(QueuePairEncapsulation),
    No(String),
}

#[derive(Debug, Serialize)]
struct DriverInfo {
    driver: &'static str,
    about: &'static str,
}

/// Prints all devices, or the rule capabilities of one.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    match &options.rules {
        Some(device) => print_json(&query_rules(device, None)?),
        None => list(json),
    }
}

fn list(json: bool) -> Result<(), Failure> {
    let mut offers = offers(DRIVERS);
    let mut read = None;
    for offer in &mut offers {
        // The offers for a device are adjacent.
        if !matches!(&read, Some((device, _)) if *device == offer.device) {
            read = Some((offer.device.clone(), DeviceInfo::read(&offer.device)));
        }
        offer.info = read.as_ref().and_then(|(_, info)| info.clone());
    }
    let drivers = DRIVERS.iter().map(|driver| DriverInfo { driver: driver.name(), about: driver.about() });
    if json {
        let has_rules = |name| drivers::find(name).is_some_and(Driver::may_have_rule_hardware);
        for offer in offers.iter_mut().filter(|offer| offer.usable && has_rules(offer.driver)) {
            let name = format!("{}:{}", offer.driver, offer.device);
            // A listing starts no port, because a started port would take frames from the current user of the
            // device.
            match open(&name, None).map(|mut port| port.rule_hardware().map(|hardware| hardware.capabilities())) {
                Ok(Some(capabilities)) => offer.rules = Some(capabilities),
                Ok(None) => offer.no_rules = Some(format!("it says so when it runs: wirepath devices --rules {name}")),
                Err(failure) => offer.no_rules = Some(failure.to_string()),
            }
        }
        let encapsulation = QueuePairEncapsulation::probe().map_or_else(Encapsulation::No, Encapsulation::ByQueuePair);
        return print_json(&Report { devices: &offers, drivers: drivers.collect(), encapsulation });
    }
    let mut table = Table::new(["DEVICE", "DRIVER", "", "MODE, OR WHY NOT"]);
    for offer in &offers {
        let answer = offer.mode.as_ref().or(offer.reason.as_ref());
        // Line breaks would break the table.
        let answer = answer.map(|text| text.replace('\n', "; ")).unwrap_or_default();
        let mark = if offer.usable { "yes" } else { "no" };
        table.row([offer.device.clone(), offer.driver.to_owned(), mark.to_owned(), answer]);
    }
    let mut properties = Table::new(["DEVICE", "MAC", "MTU", "LINK", "MBIT/S", "QUEUES", "NUMA", "PCI"]);
    let mut shown: Option<&str> = None;
    for Offer { device, info, .. } in &offers {
        let Some(info) = info.as_ref().filter(|_| shown != Some(device)) else { continue };
        shown = Some(device);
        let number = |value: Option<u32>| value.map_or_else(|| "-".to_owned(), |value| value.to_string());
        let text = |value: &Option<String>| value.clone().unwrap_or_else(|| "-".to_owned());
        let queues = info.rx_queues.zip(info.tx_queues);
        let queues = queues.map_or_else(|| "-".to_owned(), |(rx, tx)| format!("{rx} rx, {tx} tx"));
        let link = info.link.map_or("-", |up| if up { "up" } else { "down" });
        properties.row([
            device.clone(),
            text(&info.mac),
            number(info.mtu),
            link.to_owned(),
            number(info.speed),
            queues,
            number(info.numa_node),
            text(&info.pci),
        ]);
    }
    let mut about = Table::new(["DRIVER", "WHAT IT DOES"]);
    for driver in drivers {
        about.row([driver.driver.to_owned(), driver.about.to_owned()]);
    }
    print(format_args!("{table}\n{properties}\n{about}"))
}

/// Splits a name into driver and device.
fn parts(name: &str) -> Result<(&str, &str), Failure> {
    name.split_once(':')
        .ok_or_else(|| Failure::usage(format!("found \"{name}\", expected a driver and a device such as mlx5:eth1")))
}

/// Opens a device. `like` is a port whose settings are used.
fn open(name: &str, like: Option<&dyn PortSpec>) -> Result<OpenPort, Failure> {
    let (driver, device) = parts(name)?;
    let found = drivers::find(driver).ok_or_else(|| Failure::usage(format!("there is no driver \"{driver}\"")))?;
    let source = Source::new("the command line", "");
    let document = source.parse()?;
    let plan = match like.and_then(|like| like.rule_spec_for(driver, device)) {
        Some(plan) => plan,
        None => found.plan(Some(device), &document.settings().described(found.table()))?,
    };
    // A device without rule hardware is not opened. Opening would attach an XDP program or create a TAP
    // device.
    if !plan.may_offload_rules() {
        return Err(no_rules(name));
    }
    OpenPort::open(name, plan).map_err(Failure::failed)
}

fn no_rules(name: &str) -> Failure {
    Failure::failed(format!("{name} has no hardware for flow rules: the workers do them all"))
}

/// Returns the rule capabilities of a device, `DRIVER:DEVICE`, for a port with the settings `like`. The
/// device is opened. If it reports its capabilities only while running, it is started for a moment, without
/// receiving frames for other hosts.
pub fn query_rules(name: &str, like: Option<&dyn PortSpec>) -> Result<RuleCapabilities, Failure> {
    let mut port = open(name, like)?;
    if let Some(hardware) = port.rule_hardware() {
        return Ok(hardware.capabilities());
    }
    let pool = Pool::new("capabilities", 4096)?;
    let config = PortConfig { promiscuous: false, depth: 64, ..PortConfig::new(PortId::new(0), pool) };
    let StartedPort { mut port, rx, tx } =
        port.configure(config).and_then(ConfiguredPort::start).map_err(Failure::failed)?;
    let capabilities = port.rule_hardware().map(|hardware| hardware.capabilities());
    port.stop(rx, tx).map_err(Failure::failed)?;
    capabilities.ok_or_else(|| no_rules(name))
}

/// Queries every driver. The results for one device are adjacent, best driver first.
fn offers(drivers: &[&dyn Driver]) -> Vec<Offer> {
    let mut offers: Vec<Offer> = Vec::new();
    for driver in drivers {
        for Candidate { device, usable } in driver.candidates() {
            let (mode, reason) = match usable {
                Ok(mode) => (Some(mode), None),
                Err(reason) => (None, Some(reason)),
            };
            let at = offers.iter().rposition(|offer| offer.device == device).map_or(offers.len(), |last| last + 1);
            let usable = mode.is_some();
            let offer =
                Offer { device, driver: driver.name(), usable, mode, reason, info: None, rules: None, no_rules: None };
            offers.insert(at, offer);
        }
    }
    offers
}

#[cfg(test)]
mod tests {
    use wirepath_settings::{ConfigError, ConfigTable, Settings};

    use super::*;

    struct Fake(&'static str, Vec<(&'static str, Result<&'static str, &'static str>)>);

    impl Driver for Fake {
        fn name(&self) -> &'static str {
            self.0
        }

        fn about(&self) -> &'static str {
            "a test"
        }

        fn table(&self) -> &'static ConfigTable {
            &ConfigTable::EMPTY
        }

        fn plan(&self, _: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn PortSpec>, ConfigError> {
            Err(settings.error("opens nothing"))
        }

        fn candidates(&self) -> Vec<Candidate> {
            let candidate = |(device, usable): &(&str, Result<&str, &str>)| Candidate {
                device: (*device).to_owned(),
                usable: usable.map(str::to_owned).map_err(str::to_owned),
            };
            self.1.iter().map(candidate).collect()
        }
    }

    #[test]
    fn offers_for_a_device_stand_together() {
        let fast = Fake("fast", vec![("eth0", Err("no privilege")), ("eth1", Ok("zero-copy"))]);
        let slow = Fake("slow", vec![("eth0", Ok("copy")), ("eth1", Ok("copy")), ("lo", Err("no Ethernet"))]);
        let offers = offers(&[&fast, &slow]);
        let rows: Vec<_> = offers.iter().map(|offer| (&*offer.device, offer.driver, offer.usable)).collect();
        let want = [
            ("eth0", "fast", false),
            ("eth0", "slow", true),
            ("eth1", "fast", true),
            ("eth1", "slow", true),
            ("lo", "slow", false),
        ];
        assert_eq!(rows, want);
        let json = serde_json::to_string(&offers[0]).unwrap();
        assert_eq!(json, r#"{"device":"eth0","driver":"fast","usable":false,"reason":"no privilege"}"#);
    }
}
