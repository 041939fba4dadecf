//! `wirepath devices`: the ports that could be used, by which driver, in which mode, and why not.

use serde::Serialize;
use wirepath_pmd::drivers::rdma::PairEncapsulation;
use wirepath_pmd::drivers::{self, Candidate, DRIVERS, Driver};
use wirepath_pmd::packet::Pool;
use wirepath_pmd::port::hardware::RuleCapabilities;
use wirepath_pmd::port::{ConfiguredPort, OpenPort, Plan, PortConfig, StartedPort};
use wirepath_pmd::settings::Source;

use crate::cli::{Failure, Table, print, print_json};

/// A device and one driver's opinion of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Offer {
    /// What to write as `device`.
    pub device: String,
    /// What to write as `driver`.
    pub driver: &'static str,
    /// Whether the driver can take it.
    pub usable: bool,
    /// The mode to expect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Why the driver cannot take it, and what would help.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What its rule hardware can do, as `wirepath flow explain --capabilities` reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rules: Option<RuleCapabilities>,
    /// Why that is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub no_rules: Option<String>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    devices: &'a [Offer],
    drivers: Vec<About>,
    encapsulation: Encapsulation,
}

/// Of RDMA packets, by queue pair: beside what rules of a device can do.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Encapsulation {
    ByQueuePair(PairEncapsulation),
    No(String),
}

#[derive(Debug, Serialize)]
struct About {
    driver: &'static str,
    about: &'static str,
}

/// Drivers whose devices may have rule hardware.
const WITH_RULES: [&str; 2] = ["mlx5", "verbs"];

/// Prints all offers.
pub fn run(json: bool) -> Result<(), Failure> {
    let mut offers = offers(DRIVERS);
    let drivers = DRIVERS.iter().map(|driver| About { driver: driver.name(), about: driver.about() });
    if json {
        for offer in offers.iter_mut().filter(|offer| offer.usable && WITH_RULES.contains(&offer.driver)) {
            let name = format!("{}:{}", offer.driver, offer.device);
            // Nothing is started for a list: that would take frames from whoever uses the device.
            match open(&name, None).map(|mut port| port.rule_hardware().map(|hardware| hardware.capabilities())) {
                Ok(Some(can)) => offer.rules = Some(can),
                Ok(None) => offer.no_rules = Some(format!("it says so when it runs: wirepath devices --rules {name}")),
                Err(failure) => offer.no_rules = Some(failure.to_string()),
            }
        }
        let encapsulation = PairEncapsulation::look().map_or_else(Encapsulation::No, Encapsulation::ByQueuePair);
        return print_json(&Report { devices: &offers, drivers: drivers.collect(), encapsulation });
    }
    let mut table = Table::new(["DEVICE", "DRIVER", "", "MODE, OR WHY NOT"]);
    for offer in &offers {
        let answer = offer.mode.as_ref().or(offer.reason.as_ref());
        // Several lines would break the table.
        let answer = answer.map(|text| text.replace('\n', "; ")).unwrap_or_default();
        let mark = if offer.usable { "yes" } else { "no" };
        table.row([offer.device.clone(), offer.driver.to_owned(), mark.to_owned(), answer]);
    }
    let mut about = Table::new(["DRIVER", "WHAT IT DOES"]);
    for driver in drivers {
        about.row([driver.driver.to_owned(), driver.about.to_owned()]);
    }
    print(format_args!("{table}\n{about}"))
}

/// Driver and device.
fn parts(name: &str) -> Result<(&str, &str), Failure> {
    name.split_once(':')
        .ok_or_else(|| Failure::usage(format!("found \"{name}\", expected a driver and a device such as mlx5:eth1")))
}

/// `like`: a port whose settings say how.
fn open(name: &str, like: Option<&dyn Plan>) -> Result<OpenPort, Failure> {
    let (driver, device) = parts(name)?;
    let found = drivers::find(driver).ok_or_else(|| Failure::usage(format!("there is no driver \"{driver}\"")))?;
    let source = Source::new("the command line", "");
    let document = source.parse()?;
    let plan = match like.and_then(|like| like.for_rules_of(driver, device)) {
        Some(plan) => plan,
        None => found.plan(Some(device), &document.settings())?,
    };
    // What has none is not opened: an interface would get an XDP program, and a TAP device come into being.
    if !plan.rules_in_hardware() {
        return Err(no_rules(name));
    }
    OpenPort::open(name, plan).map_err(Failure::failed)
}

fn no_rules(name: &str) -> Failure {
    Failure::failed(format!("{name} has no hardware for flow rules: the workers do them all"))
}

/// What the rule hardware of a device can do, `DRIVER:DEVICE`, for a port like this. The device is opened; where it says so only when it
/// runs, it is started for a moment, without taking frames for other stations.
pub fn ask(name: &str, like: Option<&dyn Plan>) -> Result<RuleCapabilities, Failure> {
    let mut port = open(name, like)?;
    if let Some(hardware) = port.rule_hardware() {
        return Ok(hardware.capabilities());
    }
    let pool = Pool::new("capabilities", 4096)?;
    let config = PortConfig { promiscuous: false, depth: 64, ..PortConfig::new(0, pool) };
    let StartedPort { mut port, rx, tx } =
        port.configure(config).and_then(ConfiguredPort::start).map_err(Failure::failed)?;
    let can = port.rule_hardware().map(|hardware| hardware.capabilities());
    port.stop(rx, tx).map_err(Failure::failed)?;
    can.ok_or_else(|| no_rules(name))
}

/// Prints what the rule hardware of a device can do, as `wirepath flow explain --capabilities` reads it.
pub fn rules(name: &str) -> Result<(), Failure> {
    print_json(&ask(name, None)?)
}

/// Asks every driver; the offers for one device stand together, best driver first.
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
            let offer = Offer { device, driver: driver.name(), usable, mode, reason, rules: None, no_rules: None };
            offers.insert(at, offer);
        }
    }
    offers
}

#[cfg(test)]
mod tests {
    use wirepath_pmd::settings::{ConfigError, Settings};

    use super::*;

    struct Fake(&'static str, Vec<(&'static str, Result<&'static str, &'static str>)>);

    impl Driver for Fake {
        fn name(&self) -> &'static str {
            self.0
        }

        fn about(&self) -> &'static str {
            "a test"
        }

        fn plan(&self, _: Option<&str>, settings: &Settings<'_>) -> Result<Box<dyn Plan>, ConfigError> {
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
