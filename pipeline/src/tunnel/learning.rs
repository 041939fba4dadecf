//! Rules for learned addresses, on the control thread: limits of their number, sticky places and frozen addresses.
//!
//! Workers report a source address that is new, or at another place than in the forwarding database. A refused address
//! changes nothing: its frames are forwarded, and frames to it are flooded or go to its known place.

use wirepath_settings::{Flag, Integer, Key as ConfigKey, Settings, WithDefault};

use super::config::Result;
use super::control::GatewayControl;
use super::move_damping::MoveLimits;
use super::neighbour::Millis;
use super::tables::Destination;
use crate::table::{FdbEntry, Key, LearnLimits, Learned};
use crate::{ControlPlane, Learn};

/// Largest limit: no segment learns more addresses.
const MAX_LIMIT: i64 = 16_384;
/// Minimum milliseconds between two log messages about refused addresses.
const LOG_INTERVAL: Millis = 10_000;

pub(super) const MAC_LIMIT: ConfigKey<Integer<u32>> = ConfigKey::integer("mac_limit", 1..=MAX_LIMIT)
    .absent("16384")
    .about("Most addresses that the segment learns. Frames to further addresses are flooded.");
pub(super) const REMOTE_MAC_LIMIT: ConfigKey<Integer<u32>> = ConfigKey::integer("remote_mac_limit", 1..=MAX_LIMIT)
    .absent("no limit but that of the segment")
    .about("Most addresses that the segment learns behind each remote.");
pub(super) const PORT_MAC_LIMIT: ConfigKey<Integer<u32>> = ConfigKey::integer("mac_limit", 1..=MAX_LIMIT)
    .absent("no limit but that of the segment")
    .about("Most addresses that the segment learns behind this port and VLAN.");
pub(super) const STICKY: ConfigKey<WithDefault<Flag>> = ConfigKey::flag("sticky")
    .default(false)
    .about("Addresses learned here do not move to another place until they age out.");
pub(super) const ISOLATED: ConfigKey<WithDefault<Flag>> = ConfigKey::flag("isolated")
    .default(false)
    .about("Frames do not pass between this and other isolated ports of the segment. They pass to all others.");

/// Rules of a segment for the addresses that it learns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LearnRules {
    /// Most addresses of the segment.
    pub limit: Option<u32>,
    /// Most addresses behind each remote.
    pub remote_limit: Option<u32>,
    /// Limit of their moves.
    pub moves: MoveLimits,
}

impl LearnRules {
    pub(super) fn read(table: &Settings<'_>) -> Result<Self> {
        let moves = MoveLimits::read(table)?;
        Ok(Self { limit: table.read(&MAC_LIMIT)?, remote_limit: table.read(&REMOTE_MAC_LIMIT)?, moves })
    }
}

/// Rules of an attachment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttachmentRules {
    /// Most addresses that are learned there.
    pub mac_limit: Option<u32>,
    /// If true, addresses that are learned there do not move.
    pub sticky: bool,
    /// If true, frames do not pass to and from other isolated attachments.
    pub isolated: bool,
}

impl AttachmentRules {
    pub(super) fn read(table: &Settings<'_>) -> Result<Self> {
        Ok(Self {
            mac_limit: table.read(&PORT_MAC_LIMIT)?,
            sticky: table.read(&STICKY)?,
            isolated: table.read(&ISOLATED)?,
        })
    }
}

/// Log messages of one kind, at most one in [`LOG_INTERVAL`].
#[derive(Debug, Default)]
pub(super) struct RareLog {
    last: Option<Millis>,
}

impl RareLog {
    /// Returns whether a message may be logged now.
    pub(super) fn admits(&mut self, now: Millis) -> bool {
        let admitted = self.last.is_none_or(|last| now >= last + LOG_INTERVAL);
        if admitted {
            self.last = Some(now);
        }
        admitted
    }
}

impl GatewayControl {
    /// Learns an address that a worker reported, within the rules.
    pub(super) fn learn_address(&mut self, learn: Learn, plane: &ControlPlane) {
        let Learn { key, destination } = learn;
        let to = Destination::unpack(destination);
        // The segment, port or remote may have been removed since. Nothing is sent to a remote that BFD keeps out.
        let is_there = match to {
            Destination::Remote(index) => {
                let learns = self.layout.segments.get(usize::from(key.segment())).is_some_and(|it| it.learns_remotes);
                learns && self.is_live(index) && self.bfd.out(index).is_none()
            }
            Destination::Attachment(index) => self.has_attachment(key.segment(), index),
            Destination::Group(_) | Destination::Router => false,
        };
        if !is_there || usize::from(key.segment()) >= self.learns.len() {
            return;
        }
        let now = plane.seconds();
        let moves = self.learn_rules(key.segment()).moves;
        let known = self.fdb.get(key).filter(|entry| entry.seen.is_some() && entry.destination != destination);
        if known.is_some_and(|entry| self.stays(entry, now)) {
            self.learns[usize::from(key.segment())].moves_refused += 1;
            return;
        }
        let limits = self.learn_limits(key.segment(), to);
        let outcome = self.fdb.learn_within(key, destination, now, limits);
        if let (Learned::New | Learned::Moved { .. }, Destination::Remote(index)) = (outcome, to) {
            self.learned.add_key(index, key);
        }
        let stats = &mut self.learns[usize::from(key.segment())];
        match outcome {
            Learned::New => stats.learned += 1,
            Learned::Moved { from } => {
                stats.moved += 1;
                let from = Destination::unpack(from);
                if let Destination::Remote(index) = from {
                    self.learned.remove_key(index, key, now);
                }
                tracing::debug!("{} moved from {from:?} to {to:?}", key.mac());
                if self.move_damping.record(key, moves, now) {
                    stats.frozen += 1;
                    if self.frozen_log.admits(plane.now() / 1_000_000) {
                        let (mac, name, place) = (key.mac(), self.segment_name(key), self.place_name(to, plane));
                        tracing::warn!("{mac} in segment \"{name}\" moves too often and stays at {place} for a while");
                    }
                }
            }
            Learned::Full => {
                stats.refused += 1;
                if self.refusal_log.admits(plane.now() / 1_000_000) {
                    let (mac, name) = (key.mac(), self.segment_name(key));
                    let place = self.place_name(to, plane);
                    tracing::warn!("segment \"{name}\" does not learn {mac} from {place}: a limit is reached");
                }
            }
            Learned::Known | Learned::Static | Learned::NotUnicast => {}
        }
    }

    /// Returns the rules of a segment.
    fn learn_rules(&self, segment: u16) -> LearnRules {
        self.layout.segments.get(usize::from(segment)).map(|segment| segment.learn_rules).unwrap_or_default()
    }

    /// Returns whether a learned address does not move to another place.
    fn stays(&self, entry: FdbEntry, now: u32) -> bool {
        self.layout.is_sticky(Destination::unpack(entry.destination))
            || self.move_damping.is_frozen(entry.key, self.learn_rules(entry.key.segment()).moves, now)
    }

    /// Returns the limits for an address of a segment at this place.
    pub(super) fn learn_limits(&self, segment: u16, to: Destination) -> LearnLimits {
        let rules = self.learn_rules(segment);
        let destination = match to {
            Destination::Attachment(index) => {
                self.layout.attachments.get(index as usize).and_then(|attachment| attachment.rules.mac_limit)
            }
            Destination::Remote(_) => rules.remote_limit,
            Destination::Group(_) | Destination::Router => None,
        };
        LearnLimits {
            segment: rules.limit.map(|limit| limit as usize),
            destination: destination.map(|limit| limit as usize),
        }
    }

    /// Returns the name of the segment of a forwarding entry.
    pub(super) fn segment_name(&self, key: Key) -> String {
        self.segment_config(key.segment()).map_or_else(String::new, |segment| segment.name.clone())
    }
}
