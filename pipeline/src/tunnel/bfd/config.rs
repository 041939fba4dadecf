//! The table `[bfd]` and the key `backups` of a segment.

use std::collections::HashSet;
use std::net::IpAddr;

use wirepath_settings::{
    Choice, ConfigTable, Flag, Integer, Key, List, Parsed, Required, Settings, WithDefault, Written,
};
use wirepath_wire::Vni;

use super::packet::{MULTIHOP_PORT, SINGLE_HOP_PORT};
use super::session::Timers;
use super::{MAX_RATE, MAX_SESSIONS, Micros};
use crate::tunnel::config::{RemoteConfig, Result, SegmentConfig, UnderlayConfig};
use crate::tunnel::kinds::vxlan;

const IP_ADDRESS: &str = "an IP address";
const INTERVALS: std::ops::RangeInclusive<i64> = 50..=60_000;

const TRANSMIT_INTERVAL: Key<WithDefault<Integer<u32>>> = Key::integer("transmit_interval", INTERVALS)
    .unit("milliseconds")
    .default(300)
    .about("Shortest interval between two sent packets. A remote can ask for a longer one.");
const RECEIVE_INTERVAL: Key<WithDefault<Integer<u32>>> = Key::integer("receive_interval", INTERVALS)
    .unit("milliseconds")
    .default(300)
    .about("Shortest interval between two received packets. Remotes do not send faster.");
const MULTIPLIER: Key<WithDefault<Integer<u8>>> = Key::integer("multiplier", 1..=255)
    .default(3)
    .about("Number of intervals without a packet after which the remote takes the session down.");
const MULTIHOP: Key<WithDefault<Flag>> = Key::flag("multihop").default(false).about(
    "Uses multihop sessions (RFC 5883) for remotes in the networks of `addresses` too. Sessions with remotes behind a \
     gateway always are.",
);
const MINIMUM_TTL: Key<WithDefault<Integer<u8>>> = Key::integer("minimum_ttl", 1..=255).default(254).about(
    "Smallest TTL of received packets of multihop sessions: 255 less the number of routers on the path. It has no \
         effect with `management_vni`, as packets in tunnels pass no router.",
);
const MANAGEMENT_VNI: Key<Integer<u32>> =
    Key::integer("management_vni", 0..=Vni::MAX as i64).absent("control packets are outside of tunnels").about(
        "Sends and takes control packets in VXLAN tunnels with this VNI (RFC 8971), which no segment has. Both ends \
         need the same VNI; RFC 8971 proposes 1.",
    );
const PEER_ADMIN_DOWN: Key<WithDefault<Choice<PeerAdminDown>>> = Key::choice(
    "peer_admin_down",
    &[
        ("leave", PeerAdminDown::Leave, "the remote carries nothing, as after a failure"),
        ("stay", PeerAdminDown::Stay, "the remote carries frames as before (RFC 5882 section 3.2)"),
    ],
)
.default_word("leave")
.about("Effect of a remote that ends its session on purpose, such as a gateway that stops.");
const EXCEPT: Key<List<Parsed<IpAddr>>> =
    Key::parsed("except", IP_ADDRESS).list().absent("all remotes of segments have sessions").about(
        "Remotes without a session. They always carry frames. Remotes of segments with SIDs have none in any case, and \
         may be named.",
    );

/// Description of the table `[bfd]`.
pub static BFD: ConfigTable = ConfigTable {
    name: "bfd",
    about: "Watches the remotes by BFD (RFC 5880): a remote carries frames only while its session is up.",
    absent: "remotes are not watched",
    keys: &[
        &TRANSMIT_INTERVAL,
        &RECEIVE_INTERVAL,
        &MULTIPLIER,
        &MULTIHOP,
        &MINIMUM_TTL,
        &MANAGEMENT_VNI,
        &PEER_ADMIN_DOWN,
        &EXCEPT,
    ],
    example: "[bfd]\ntransmit_interval = 100\nreceive_interval = 100\nexcept = [\"10.9.0.9\"]\n",
    ..ConfigTable::EMPTY
};

const PRIMARY: Key<Required<Parsed<IpAddr>>> =
    Key::parsed("primary", IP_ADDRESS).required().about("Remote of the segment that has a session.");
const BACKUP: Key<Required<Parsed<IpAddr>>> =
    Key::parsed("backup", IP_ADDRESS).required().about("Remote of the segment that takes its place.");

pub(in crate::tunnel) static BACKUPS: ConfigTable = ConfigTable {
    name: "backups",
    written: Written::InlineList,
    about: "Remotes that carry frames only while another one is down. Static hosts of that one move to them meanwhile.",
    absent: "all remotes carry frames",
    keys: &[&PRIMARY, &BACKUP],
    example: "backups = [{ primary = \"10.9.0.2\", backup = \"10.9.0.3\" }]\n",
    ..ConfigTable::EMPTY
};

/// Effect of a remote that is administratively down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerAdminDown {
    /// It carries nothing.
    Leave,
    /// It carries frames as before.
    Stay,
}

/// Settings of the sessions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BfdConfig {
    pub(super) timers: Timers,
    pub(super) multihop: bool,
    pub(super) minimum_ttl: u8,
    /// VNI of control packets in tunnels.
    pub(super) management_vni: Option<u32>,
    pub(super) peer_admin_down: PeerAdminDown,
    /// Remotes without a session.
    except: Vec<IpAddr>,
}

/// A backup of a remote, by the indices of both in [`SegmentConfig::remotes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupConfig {
    /// The remote that carries frames while its session is up.
    pub primary: usize,
    /// The remote that carries them otherwise.
    pub backup: usize,
}

impl BfdConfig {
    /// Reads the table `[bfd]`. `segments` are the segments of the same configuration.
    pub(in crate::tunnel) fn read(
        root: &Settings<'_>,
        underlay: &UnderlayConfig,
        segments: &[SegmentConfig],
    ) -> Result<Option<Self>> {
        let Some(table) = root.subtable(&BFD)? else { return Ok(None) };
        table.complete(|table| {
            let micros = |millis: u32| Micros::from(millis) * 1000;
            let timers = Timers {
                transmit: micros(table.read(&TRANSMIT_INTERVAL)?),
                receive: micros(table.read(&RECEIVE_INTERVAL)?),
                multiplier: table.read(&MULTIPLIER)?,
            };
            let (multihop, minimum_ttl) = (table.read(&MULTIHOP)?, table.read(&MINIMUM_TTL)?);
            let peer_admin_down = table.read(&PEER_ADMIN_DOWN)?;
            let remotes: HashSet<(IpAddr, IpAddr)> = sessions(segments).collect();
            let mut except = Vec::new();
            for address in table.read(&EXCEPT)? {
                let mut all = segments.iter().flat_map(|segment| &segment.remotes);
                if !all.any(|remote| remote.address == address.value) {
                    table.record(address.error(format!("{} is not a remote of a segment", address.value)));
                }
                except.push(address.value);
            }
            let management_vni = table.read(&MANAGEMENT_VNI)?;
            if let Some(vni) = management_vni {
                check_management_vni(table, vni, segments, &except)?;
                if multihop {
                    let message = "found true beside \"management_vni\"; sessions in tunnels are single-hop".to_owned();
                    return Err(table.error_in(&MULTIHOP, message));
                }
            }
            let count = remotes.iter().filter(|(_, remote)| !except.contains(remote)).count();
            if count > MAX_SESSIONS {
                let message = format!("{count} remotes would have sessions, expected at most {MAX_SESSIONS}");
                return Err(table.error_in(&EXCEPT, message));
            }
            // Packets leave after 75 % of the interval at the earliest (RFC 5880 section 6.8.7).
            let interval = timers.transmit.min(timers.receive);
            let rate = count as u64 * 4_000_000 / (3 * interval);
            if rate > MAX_RATE {
                let message = format!(
                    "{count} remotes would have sessions with up to {rate} packets per second, expected at most \
                     {MAX_RATE}; give \"transmit_interval\" and \"receive_interval\" at least {} ms",
                    (count as u64 * 4000).div_ceil(3 * MAX_RATE)
                );
                return Err(table.error(message));
            }
            let kinds = std::iter::once(underlay.kind).chain(segments.iter().map(|segment| segment.kind));
            let mut ports = kinds.filter_map(|kind| underlay.port_of(kind));
            if ports.any(|port| port == SINGLE_HOP_PORT || port == MULTIHOP_PORT) {
                let message = format!("tunnels use a port of BFD, {SINGLE_HOP_PORT} or {MULTIHOP_PORT}");
                return Err(root.error_in(&BFD, message));
            }
            Ok(Some(Self { timers, multihop, minimum_ttl, management_vni, peer_admin_down, except }))
        })
    }

    /// Returns whether all control packets are in tunnels.
    pub(in crate::tunnel) fn is_in_tunnels(&self) -> bool {
        self.management_vni.is_some()
    }

    /// Returns whether a remote has a session.
    pub(in crate::tunnel) fn watches(&self, remote: IpAddr) -> bool {
        !self.except.contains(&remote)
    }
}

/// Checks that control packets in tunnels suit the segments: RFC 8971 is about VXLAN only, and the management VNI has
/// no tenants.
fn check_management_vni(table: &Settings<'_>, vni: u32, segments: &[SegmentConfig], except: &[IpAddr]) -> Result<()> {
    for segment in watched(segments) {
        let (name, kind) = (&segment.name, segment.kind);
        if kind != &vxlan::KIND {
            let mut remotes = segment.remotes.iter().map(|remote| remote.address);
            let Some(remote) = remotes.find(|remote| !except.contains(remote)) else { continue };
            let message = format!(
                "segment \"{name}\" of kind \"{}\" has the watched remote {remote}, but RFC 8971 is about VXLAN only; \
                 expected {remote} in \"except\", or no management_vni",
                kind.name
            );
            return Err(table.error_in(&MANAGEMENT_VNI, message));
        }
        if segment.vni == Some(vni) {
            let message = format!("{vni} is the VNI of segment \"{name}\", expected one that no segment has");
            return Err(table.error_in(&MANAGEMENT_VNI, message));
        }
    }
    Ok(())
}

/// Iterates over the segments whose remotes have sessions. Those with SIDs do not: a path of SIDs can fail without the
/// path to the remote's address.
fn watched(segments: &[SegmentConfig]) -> impl Iterator<Item = &SegmentConfig> {
    segments.iter().filter(|segment| segment.kind.sids.is_none())
}

/// Iterates over local and remote address of all remotes that can have a session.
pub(super) fn sessions(segments: &[SegmentConfig]) -> impl Iterator<Item = (IpAddr, IpAddr)> {
    watched(segments).flat_map(|segment| segment.remotes.iter().map(|remote| (remote.local, remote.address)))
}

/// Reads the backups of a segment with these remotes.
pub(in crate::tunnel) fn read_backups(table: &Settings<'_>, remotes: &[RemoteConfig]) -> Result<Vec<BackupConfig>> {
    let mut backups: Vec<BackupConfig> = Vec::new();
    table.read_tables(&BACKUPS, |entry| {
        let (primary, backup) = (entry.read(&PRIMARY)?, entry.read(&BACKUP)?);
        let position = |key: &'static str, ip: IpAddr| {
            let found = remotes.iter().position(|remote| remote.address == ip);
            found.ok_or_else(|| entry.error_in(key, format!("found {ip}, expected one of \"remotes\"")))
        };
        let new = BackupConfig { primary: position("primary", primary)?, backup: position("backup", backup)? };
        if backups.iter().any(|other| other.primary == new.primary) {
            return Err(entry.error_in(&PRIMARY, format!("{primary} has a backup already")));
        }
        if new.primary == new.backup || backups.iter().any(|it| it.backup == new.primary || it.primary == new.backup) {
            return Err(entry.error_in(&BACKUP, "expected a backup that has none itself".to_owned()));
        }
        backups.push(new);
        Ok(())
    })?;
    Ok(backups)
}

/// Checks that the primary remote of each backup has a session.
pub(in crate::tunnel) fn check_backups(
    root: &Settings<'_>,
    bfd: Option<&BfdConfig>,
    segments: &[SegmentConfig],
) -> Result<()> {
    for segment in segments {
        let mut primaries = segment.backups.iter().filter_map(|it| segment.remotes.get(it.primary));
        let unwatched = |remote: &&RemoteConfig| !bfd.is_some_and(|bfd| bfd.watches(remote.address));
        if let Some(primary) = primaries.find(unwatched) {
            let (name, address) = (&segment.name, primary.address);
            let message = format!(
                "segment \"{name}\" has a backup of {address}, which has no session; expected a table [bfd] that does \
                 not except it"
            );
            return Err(root.error_in(&BFD, message));
        }
    }
    Ok(())
}
