use wirepath_pipeline::tables::{BFD, SEGMENT, UNDERLAY, VRF};
use wirepath_pipeline::tunnel::GatewayConfig;
use wirepath_pipeline::tunnel::config::{SegmentConfig, UnderlayControl};
use wirepath_pipeline::{PortInfo, Runtime};
use wirepath_pmd::drivers::{DeviceKind, device_kind};
use wirepath_pmd::port::{PortId, VlanTags};
use wirepath_settings::{ConfigError, ConfigTable, Source};
use wirepath_wire::Parser;

use super::state::{STATE, StateSettings};
use wirepath::cli::Failure;
use wirepath::configuration::PortNumbers;
use wirepath::{Config, common_tables};

/// Example configuration for the help text.
pub const EXAMPLE: &str = r#"[[port]]
name = "wan"
device = "eth0"

[[port]]
name = "lan"
device = "eth1"

[underlay]
port = "wan"
addresses = ["10.9.0.1/24"]

[[segment]]
name = "blue"
vni = 42
remotes = ["10.9.0.2"]
ports = [{ port = "lan" }]
"#;

/// Description of all tables of the gateway's configuration.
pub static TABLES: ConfigTable = ConfigTable {
    tables: || [common_tables(), vec![&UNDERLAY, &SEGMENT, &VRF, &BFD, &STATE]].concat(),
    ..ConfigTable::EMPTY
};

/// Complete configuration of the gateway, checked as far as possible without opening a port.
#[derive(Debug)]
pub struct Setup {
    /// The tables that every program has.
    pub common: Config,
    /// Underlay and segments.
    pub gateway: GatewayConfig,
    /// File for what is learned.
    pub state: Option<StateSettings>,
}

impl Setup {
    /// Reads a configuration.
    pub fn read(source: &Source) -> Result<Self, ConfigError> {
        Self::read_numbered(source, &PortNumbers::default())
    }

    /// Reads a configuration for a gateway whose ports have these numbers.
    pub(super) fn read_numbered(source: &Source, numbers: &PortNumbers) -> Result<Self, ConfigError> {
        let (mut common, (gateway, state)) = Config::read_numbered(source, &TABLES, numbers, |top, names| {
            let names: Vec<&str> = names.iter().map(String::as_str).collect();
            let gateway = GatewayConfig::read(top, &names);
            let state = StateSettings::read(top)?;
            Ok((gateway?, state))
        })?;
        let underlay = common.port(gateway.underlay.port).map(|port| port.name.clone());
        for port in common.ports.iter_mut().filter(|port| Some(&port.name) == underlay.as_ref()) {
            port.bifurcation = gateway.bifurcation();
        }
        // Without the key, the MTU is known when the port is open.
        if let Some(mtu) = common.port(gateway.underlay.port).and_then(|port| port.mtu) {
            gateway.check_mtus(mtu)?;
        }
        Ok(Self { common, gateway, state })
    }

    /// Rejects ports that are not used, because a segment was probably forgotten. A flow rule may use a port too, and
    /// so may a rule that is added while the program runs.
    pub fn check_ports_used(&self) -> Result<(), ConfigError> {
        let ports = (0..self.common.port_names().len()).filter_map(|index| Some((index, self.common.port(index)?)));
        for (index, port) in ports {
            let uses = |s: &SegmentConfig| s.attachments.iter().any(|a| a.port == index) || s.mirror == Some(index);
            let attached = self.gateway.segments.iter().any(uses);
            let by_rule = self.common.rules.changeable || self.common.rules.use_port(PortId::new(index as u16));
            if index != self.gateway.underlay.port && !attached && !by_rule {
                let message = format!(
                    "port \"{}\" is neither the underlay's nor attached to a segment, and no flow rule uses it",
                    port.name
                );
                return Err(port.name_span.error(message));
            }
        }
        Ok(())
    }

    /// Opens the ports and checks the properties that only open ports have. Nothing is started.
    pub fn open(self) -> Result<(Runtime, GatewayConfig), Failure> {
        let Self { common, gateway, .. } = self;
        let runtime = common.open()?;
        check_opened(runtime.ports(), &gateway)?;
        if let Some(underlay) = runtime.ports().get(gateway.underlay.port) {
            for segment in &gateway.segments {
                tracing::info!("segment {}: inner MTU {}", segment.name, gateway.inner_mtu(segment, underlay.mtu));
            }
        }
        Ok((runtime, gateway))
    }
}

/// Checks the properties that only open ports have.
pub fn check_opened(ports: &[PortInfo], gateway: &GatewayConfig) -> Result<(), Failure> {
    check_running(ports, gateway)?;
    check_addresses(ports, gateway)
}

/// Checks the properties of open ports that a change of the configuration can violate.
pub(super) fn check_running(ports: &[PortInfo], gateway: &GatewayConfig) -> Result<(), Failure> {
    check_tags(ports, gateway)?;
    match ports.get(gateway.underlay.port) {
        Some(underlay) => Ok(gateway.check_mtus(underlay.mtu)?),
        None => Ok(()),
    }
}

/// Checks that the addresses of the gateway are not the kernel's, or that they are if they have to be.
pub(super) fn check_addresses(ports: &[PortInfo], gateway: &GatewayConfig) -> Result<(), Failure> {
    match ports.get(gateway.underlay.port) {
        Some(underlay) => Ok(check_kernel(underlay.capabilities.driver, gateway)?),
        None => Ok(()),
    }
}

/// Returns the parser of the program's rules: they recognise VXLAN on the UDP port of the gateway's tunnels.
pub fn rule_parser(gateway: &GatewayConfig) -> Parser {
    let tunnels = gateway.underlay.rule_tunnels();
    Parser { tunnels, ..Parser::default() }
}

/// Rejects addresses that are also configured in the kernel, unless it has to have them. The kernel would answer for
/// them with another Ethernet address or with "port unreachable". `driver` is that of the underlay.
fn check_kernel(driver: &str, gateway: &GatewayConfig) -> Result<(), ConfigError> {
    let is_kernels = gateway.underlay.control == UnderlayControl::Kernel;
    // Virtual ports bypass no kernel interface.
    if device_kind(driver) == DeviceKind::Virtual {
        return Ok(());
    }
    // A network namespace without any IPv4 address has no table of local addresses. There, Linux takes every address
    // for a broadcast address, which can be bound (`inet_addr_type_table` in net/ipv4/fib_frontend.c).
    let table = std::fs::read_to_string("/proc/thread-self/net/fib_trie");
    let no_table = table.is_ok_and(|table| table.trim().is_empty());
    for prefix in &gateway.underlay.addresses {
        let ip = prefix.address;
        if ip.is_ipv4() && no_table && !is_kernels {
            continue;
        }
        let version = if ip.is_ipv4() { "ipv4" } else { "ipv6" };
        let any = std::fs::read_to_string(format!("/proc/sys/net/{version}/ip_nonlocal_bind"));
        // The check is meaningless if every address can be bound.
        let says = any.is_ok_and(|value| value.trim() == "0");
        let has = || std::net::UdpSocket::bind((ip, 0)).is_ok() && !(ip.is_ipv4() && no_table);
        if says && is_kernels && !has() {
            let message = format!(
                "{ip} is not an address of the kernel, which has to own it because of control = \"kernel\". Add it: \
                 ip address add {prefix} dev INTERFACE"
            );
            return Err(gateway.underlay.addresses_span.error(message));
        }
        if says && !is_kernels && has() {
            let message = format!(
                "{ip} is configured in the kernel, which would answer for it instead of the gateway. Remove it: \
                 ip address del {prefix} dev INTERFACE"
            );
            return Err(gateway.underlay.addresses_span.error(message));
        }
    }
    Ok(())
}

/// Rejects VLANs on ports that lose the tags of received frames, because tagged frames would leak into the
/// untagged segment. The check is repeated after the ports are started, when their mode is final.
pub fn check_tags(ports: &[PortInfo], gateway: &GatewayConfig) -> Result<(), Failure> {
    let losing = |index: usize| ports.get(index).filter(|port| !port.is_removed).and_then(loses_tags);
    if let (Some(why), true) = (losing(gateway.underlay.port), gateway.underlay.vlan.is_some()) {
        let message = format!("{why}, so the underlay cannot have a VLAN there; driver = \"af_packet\" keeps them");
        return Err(gateway.underlay.port_span.error(message).into());
    }
    for segment in &gateway.segments {
        for attachment in &segment.attachments {
            let Some(why) = losing(attachment.port) else { continue };
            if attachment.vlan.is_some() {
                let message =
                    format!("{why}, so VLANs cannot separate segments there; driver = \"af_packet\" keeps them");
                return Err(attachment.port_span.error(message).into());
            }
        }
    }
    Ok(())
}

/// Warns about started ports that lose the tags of received frames, because tagged frames go unnoticed there.
pub fn warn_of_lost_tags(ports: &[PortInfo], gateway: &GatewayConfig) {
    for segment in &gateway.segments {
        for attachment in &segment.attachments {
            if let Some(why) = ports.get(attachment.port).and_then(loses_tags) {
                let name = &segment.name;
                tracing::warn!("{why}: tagged frames are handled as untagged frames of segment \"{name}\"");
            }
        }
    }
}

fn loses_tags(port: &PortInfo) -> Option<String> {
    (port.capabilities.vlan_tags == VlanTags::Lost).then(|| {
        let (name, driver) = (&port.name, port.capabilities.driver);
        format!("port \"{name}\" (driver {driver}) loses the VLAN tags of received frames")
    })
}
