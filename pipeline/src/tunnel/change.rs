//! Changes of a running gateway by operators.

use std::net::IpAddr;

use serde_json::{Value, json};
use wirepath_settings::nearest;
use wirepath_wire::MacAddr;

use super::config::StaticDestination;
use super::control::GatewayControl;
use super::tables::Destination;
use crate::ControlPlane;
use crate::registry::{Argument, Change, ObjectSpec, Operation};
use crate::table::Key;

/// The objects of a gateway that can be changed.
pub(super) const OBJECTS: [&ObjectSpec; 2] = [&STATIC, &FDB];

const SEGMENT: Argument = Argument { name: "segment", about: "name of the segment", required: true };
const MAC: Argument = Argument { name: "mac", about: "Ethernet address", required: true };

static STATIC: ObjectSpec = ObjectSpec {
    name: "static",
    about: "A static forwarding entry, which does not age or move",
    operations: &[
        (
            Operation::Add,
            &[
                SEGMENT,
                MAC,
                Argument { name: "remote", about: "configured remote behind which the address is", required: false },
                Argument { name: "port", about: "port behind which the address is", required: false },
                Argument { name: "vlan", about: "VLAN ID on the port", required: false },
            ],
        ),
        (Operation::Remove, &[SEGMENT, MAC]),
    ],
};

static FDB: ObjectSpec = ObjectSpec {
    name: "fdb",
    about: "Learned forwarding entries",
    operations: &[(
        Operation::Remove,
        &[
            Argument { name: "segment", about: "only those of this segment", required: false },
            Argument { name: "mac", about: "only this Ethernet address", required: false },
        ],
    )],
};

impl GatewayControl {
    /// Carries out a change of one of [`OBJECTS`].
    pub(super) fn change_object(&mut self, change: &Change<'_>, plane: &ControlPlane) -> Result<Value, String> {
        let segment = change.text("segment")?.map(|name| self.segment_index(name)).transpose()?;
        let mac = change.text("mac")?.map(parse_mac).transpose()?;
        match (change.object, change.operation, segment, mac) {
            ("static", Operation::Add, Some(segment), Some(mac)) => self.add_static(segment, mac, change, plane),
            ("static", Operation::Remove, Some(segment), Some(mac)) => self.remove_static(segment, mac, change),
            ("fdb", Operation::Remove, ..) => {
                let segment = segment.map(|index| index as u16);
                let removed = self.fdb.flush(|entry| {
                    segment.is_none_or(|segment| entry.key.segment() == segment)
                        && mac.is_none_or(|mac| entry.key.mac() == mac.0)
                });
                tracing::info!("{removed} learned forwarding entries removed by {}", change.origin);
                Ok(json!({ "removed": removed }))
            }
            _ => Err(change.unknown()),
        }
    }

    fn segment_index(&self, name: &str) -> Result<usize, String> {
        let names: Vec<&str> = self.config.segments.iter().map(|segment| segment.name.as_str()).collect();
        names.iter().position(|known| *known == name).ok_or_else(|| match nearest(name, &names) {
            Some(near) => format!("there is no segment \"{name}\"; did you mean \"{near}\"?"),
            None => format!("there is no segment \"{name}\""),
        })
    }

    fn add_static(
        &mut self,
        segment: usize,
        mac: MacAddr,
        change: &Change<'_>,
        plane: &ControlPlane,
    ) -> Result<Value, String> {
        if mac.0[0] & 1 != 0 || mac == MacAddr::ZERO {
            return Err(format!("mac: {mac} is not a unicast address"));
        }
        let config = &self.config.segments[segment];
        let layout = &self.tables.layout.segments[segment];
        let place = match (change.text("remote")?, change.text("port")?) {
            (Some(_), Some(_)) | (None, None) => return Err("expected either \"remote\" or \"port\"".to_owned()),
            (Some(text), None) => {
                let address: IpAddr = text.parse().map_err(|_| format!("remote: \"{text}\" is not an IP address"))?;
                let index = config.remotes.iter().position(|remote| remote.address == address);
                StaticDestination::Remote(
                    index.ok_or_else(|| format!("segment {} has no remote {address}", config.name))?,
                )
            }
            (None, Some(name)) => {
                let vlan = change.number("vlan")?;
                let of_port = |port: usize| plane.ports().get(port).is_some_and(|port| port.name == name);
                let index = config
                    .attachments
                    .iter()
                    .position(|it| of_port(it.port) && it.vlan.map(u64::from) == vlan)
                    .ok_or_else(|| {
                        let vlan = vlan.map(|vlan| format!(" with VLAN {vlan}")).unwrap_or_default();
                        format!("port \"{name}\"{vlan} is not attached to segment {}", config.name)
                    })?;
                StaticDestination::Attachment(index)
            }
        };
        let destination = match place {
            StaticDestination::Remote(index) => layout.remotes.get(index).map(|index| Destination::Remote(*index)),
            StaticDestination::Attachment(index) => {
                layout.attachments.get(index).map(|index| Destination::Attachment(*index))
            }
        };
        let destination = destination.ok_or("the destination does not exist")?;
        if !self.fdb.insert_static(Key::new(segment as u16, mac.0), destination.pack()) {
            return Err("the forwarding table is full".to_owned());
        }
        let statics = &mut self.config.segments[segment].statics;
        statics.retain(|(known, _)| *known != mac);
        statics.push((mac, place));
        tracing::info!(
            "static entry {mac} of segment {} added by {}",
            self.config.segments[segment].name,
            change.origin
        );
        Ok(json!({}))
    }

    fn remove_static(&mut self, segment: usize, mac: MacAddr, change: &Change<'_>) -> Result<Value, String> {
        let config = &mut self.config.segments[segment];
        let before = config.statics.len();
        config.statics.retain(|(known, _)| *known != mac);
        if config.statics.len() == before {
            return Err(format!("segment {} has no static entry {mac}", config.name));
        }
        self.fdb.remove(Key::new(segment as u16, mac.0));
        tracing::info!("static entry {mac} of segment {} removed by {}", config.name, change.origin);
        Ok(json!({}))
    }
}

fn parse_mac(text: &str) -> Result<MacAddr, String> {
    text.parse().map_err(|_| format!("mac: \"{text}\" is not an Ethernet address such as 02:00:00:00:00:01"))
}
