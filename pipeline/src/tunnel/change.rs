//! Changes of a running gateway by operators.

use serde_json::{Value, json};
use wirepath_settings::nearest;
use wirepath_wire::MacAddr;

use super::control::GatewayControl;
use super::tables::Destination;
use crate::registry::{Argument, ArgumentKind, Change, ObjectSpec, Operation};

/// The objects of a gateway that can be changed.
pub(super) const OBJECTS: [&ObjectSpec; 1] = [&FDB];

static FDB: ObjectSpec = ObjectSpec {
    name: "fdb",
    about: "Learned forwarding entries",
    operations: &[(
        Operation::Remove,
        &[
            Argument::optional("segment", ArgumentKind::Text, "only those of this segment"),
            Argument::optional("mac", ArgumentKind::Text, "only this Ethernet address"),
        ],
    )],
};

impl GatewayControl {
    /// Carries out a change of one of [`OBJECTS`].
    pub(super) fn change_object(&mut self, change: &Change<'_>, seconds: u32) -> Result<Value, String> {
        let segment = change.text("segment")?.map(|name| self.segment_index(name)).transpose()?;
        let mac = change.text("mac")?.map(parse_mac).transpose()?;
        match (change.object, change.operation) {
            ("fdb", Operation::Remove) => {
                let (learned, damping) = (&mut self.learned, &mut self.move_damping);
                let removed = self.fdb.flush(|entry| {
                    let selected = segment.is_none_or(|segment| entry.key.segment() == segment)
                        && mac.is_none_or(|mac| entry.key.mac() == mac);
                    if let (true, Destination::Remote(index)) = (selected, Destination::unpack(entry.destination)) {
                        learned.remove_key(index, entry.key, seconds);
                    }
                    if selected {
                        damping.forget(entry.key);
                    }
                    selected
                });
                tracing::info!("{removed} learned forwarding entries removed by {}", change.origin);
                Ok(json!({ "removed": removed }))
            }
            _ => Err(change.unknown()),
        }
    }

    pub(super) fn segment_index(&self, name: &str) -> Result<u16, String> {
        let names: Vec<&str> = self.config.segments.iter().map(|segment| segment.name.as_str()).collect();
        let place = names.iter().position(|known| *known == name).and_then(|at| self.places.segments.get(at));
        place.map(|place| place.index).ok_or_else(|| match nearest(name, &names) {
            Some(near) => format!("there is no segment \"{name}\"; did you mean \"{near}\"?"),
            None => format!("there is no segment \"{name}\""),
        })
    }
}

fn parse_mac(text: &str) -> Result<MacAddr, String> {
    text.parse().map_err(|_| format!("mac: \"{text}\" is not an Ethernet address such as 02:00:00:00:00:01"))
}
