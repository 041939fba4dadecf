//! Changes of a gateway's configuration while it runs.

use wirepath_pipeline::ControlPlane;
use wirepath_settings::Source;

use super::objects::OBJECTS;
use super::setup::{check_addresses, check_running};
use super::{GatewayMonitor, Setup, warn_of_lost_tags};
use wirepath::Config;
use wirepath::cli::Failure;
use wirepath::configuration::{ChangedParts, ChangedPorts, ChangedRules, ConfigObject, PortNumbers, Reconfigure};
use wirepath::rules::RuleSettings;

/// Keys of the underlay that need a restart: the parser of rules and the ports depend on them.
const FIXED: [&str; 4] = ["port", "kind", "udp_port", "control"];

impl AsRef<RuleSettings> for Setup {
    fn as_ref(&self) -> &RuleSettings {
        &self.common.rules
    }
}

impl Reconfigure for GatewayMonitor {
    type Setup = Setup;

    fn read(source: &Source, numbers: &PortNumbers) -> Result<Setup, Failure> {
        let setup = Setup::read_numbered(source, numbers)?;
        setup.common.check_rules()?;
        setup.check_ports_used()?;
        Ok(setup)
    }

    fn config(setup: &mut Setup) -> &mut Config {
        &mut setup.common
    }

    fn can_change_ports(&self) -> bool {
        true
    }

    fn config_objects() -> &'static [&'static ConfigObject] {
        &OBJECTS
    }

    fn can_change(&self, path: &[String]) -> bool {
        match path {
            [table, key, ..] if table == "underlay" => !FIXED.contains(&key.as_str()),
            [table, ..] => ["segment", "vrf", "bfd", "log"].contains(&table.as_str()),
            [] => false,
        }
    }

    fn check(
        &mut self,
        setup: &Setup,
        ports: &ChangedPorts,
        _: ChangedParts,
        plane: &mut ControlPlane,
    ) -> Result<(), Failure> {
        check_running(&ports.after, &setup.gateway)?;
        self.check_exchange(&setup.gateway)?;
        let (old, new) = (&self.gateway.config().underlay, &setup.gateway.underlay);
        if old.addresses != new.addresses {
            check_addresses(plane.ports(), &setup.gateway)?;
        }
        self.gateway.prepare(setup.gateway.clone(), plane.seconds()).map(|_| ()).map_err(Failure::failed)
    }

    fn apply(&mut self, setup: Setup, parts: ChangedParts, plane: &mut ControlPlane) -> Result<Vec<String>, Failure> {
        let before = self.gateway.config().bifurcation();
        let change = self.gateway.prepare(setup.gateway, plane.seconds()).map_err(Failure::failed)?;
        self.gateway.reconfigure(change, plane.ports(), plane.seconds());
        if parts.log {
            self.common.configure_log(&setup.common.log);
        }
        warn_of_lost_tags(plane.ports(), self.gateway.config());
        // The change is in force, so a failure is no reason to refuse it.
        let mut notes: Vec<String> = self.update_evpn(plane).err().map(|error| error.to_string()).into_iter().collect();
        let config = self.gateway.config();
        let port = plane.ports().get(config.underlay.port).map(|port| port.id);
        if let (Some(port), Some(after)) = (port, config.bifurcation().filter(|after| before.as_ref() != Some(after))) {
            let changed = plane.set_bifurcation(port, &after);
            notes.extend(changed.err().map(|error| format!("the underlay port takes the packets of before: {error}")));
        }
        Ok(notes)
    }

    fn changed_rules(&self) -> Option<ChangedRules> {
        None
    }
}
