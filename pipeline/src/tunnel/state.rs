//! State that a gateway passes to its next process: addresses, remotes, bindings and path MTUs that it has learned.
//!
//! [`PARTS`] lists all state of a running gateway: what a process passes to its successor, and what that makes anew.
//! The control thread collects [`Facts`](Fact) in parts of bounded length ([`StatePass`]), since the forwarding
//! database can have many entries. Facts have names, not numbers: a successor may number ports and segments
//! differently.

use std::collections::HashMap;
use std::net::IpAddr;

use serde_json::{Value, json};
use wirepath_packet::drops::DropReason;
use wirepath_wire::MacAddr;

use super::bindings::{BindingOrigin, Claim, Claimed};
use super::config::SegmentConfig;
use super::control::{GatewayControl, Route, max_frame};
use super::tables::{Destination, Remote};
use crate::PortInfo;
use crate::table::{Key, Learned};

/// Most slots of the forwarding database, and about the most bindings, that one call collects.
const STEP: usize = 4096;

/// Way of a part of the state to the next process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// Facts of this name carry it over.
    Fact(&'static str),
    /// The successor makes it anew, for this reason.
    Anew(&'static str),
}

/// One part of the state of a running gateway.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Description.
    pub name: &'static str,
    /// Its way to the next process.
    pub passed: Passed,
}

/// All state of a running gateway.
pub const PARTS: [Part; 14] = [
    Part { name: "learned addresses of the forwarding database", passed: Passed::Fact("address") },
    Part { name: "learned remotes", passed: Passed::Fact("remote") },
    Part { name: "learned ARP and ND bindings of hosts in segments", passed: Passed::Fact("binding") },
    Part { name: "lower path MTUs", passed: Passed::Fact("path_mtu") },
    Part {
        name: "static addresses, bindings, remotes, routes, filters and names",
        passed: Passed::Anew("the configuration has them"),
    },
    Part {
        name: "addresses, remotes, bindings and routes of a routing daemon",
        passed: Passed::Anew("the kernel's tables have them, and may have changed"),
    },
    Part {
        name: "sockets, and queues of NICs",
        passed: Passed::Anew("a descriptor belongs to the rings of one process, whose memory is lost with it"),
    },
    Part {
        name: "flow rules and tunnels in NICs",
        passed: Passed::Anew("the driver removes them with its device context, and they follow from the configuration"),
    },
    Part {
        name: "next hops and neighbours of routers",
        passed: Passed::Anew("one exchange of ARP or ND confirms an address that could be another host's by now"),
    },
    Part { name: "BFD sessions", passed: Passed::Anew("the peer has noticed the restart (RFC 5880 section 6.8.16)") },
    Part {
        name: "packets that wait, and fragments to reassemble",
        passed: Passed::Anew("they are older than a sender waits"),
    },
    Part {
        name: "sequence numbers of GRE, and identifications of fragments",
        passed: Passed::Anew("peers accept a restart of the numbers (RFC 2890 section 2.2)"),
    },
    Part {
        name: "limits: tokens of storm control and policers, move damping",
        passed: Passed::Anew("they fill within seconds"),
    },
    Part { name: "counters", passed: Passed::Anew("readers of metrics expect that a new process begins with zero") },
];

/// Where a learned address is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A port, with the VLAN of the segment there.
    Port(String, Option<u16>),
    /// A remote.
    Remote(IpAddr),
}

/// Something that a gateway has learned. Segments and ports have their names in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// A learned remote.
    Remote {
        /// Name of the segment.
        segment: String,
        /// Address of the remote.
        address: IpAddr,
        /// True if a frame had to be sent to it.
        contacted: bool,
    },
    /// A learned Ethernet address. Its remote precedes it.
    Address {
        /// Name of the segment.
        segment: String,
        /// The address.
        mac: MacAddr,
        /// Its place.
        place: Place,
        /// Seconds since a frame of it was seen.
        age: u32,
    },
    /// A learned binding of an IP address.
    Binding {
        /// Name of the segment.
        segment: String,
        /// The IP address.
        ip: IpAddr,
        /// Ethernet address of its host.
        mac: MacAddr,
        /// Router flag of its advertisements, if it is known.
        is_router: Option<bool>,
        /// Seconds since a message confirmed it.
        age: u32,
    },
    /// A lower MTU of a path.
    PathMtu {
        /// The gateway's address.
        local: IpAddr,
        /// Address of the remote.
        remote: IpAddr,
        /// MTU in bytes.
        mtu: u16,
        /// Seconds until it is forgotten.
        left: u32,
    },
}

impl Fact {
    /// Returns the serialised form: a JSON array that begins with the name in [`PARTS`].
    pub fn to_json(&self) -> Value {
        match self {
            Self::Remote { segment, address, contacted } => json!(["remote", segment, address.to_string(), contacted]),
            Self::Address { segment, mac, place: Place::Port(port, vlan), age } => {
                json!(["address", segment, mac.to_string(), age, "port", port, vlan])
            }
            Self::Address { segment, mac, place: Place::Remote(remote), age } => {
                json!(["address", segment, mac.to_string(), age, "remote", remote.to_string()])
            }
            Self::Binding { segment, ip, mac, is_router, age } => {
                json!(["binding", segment, ip.to_string(), mac.to_string(), is_router, age])
            }
            Self::PathMtu { local, remote, mtu, left } => {
                json!(["path_mtu", local.to_string(), remote.to_string(), mtu, left])
            }
        }
    }

    /// Reads the serialised form. Returns `None` if it is another one, such as that of a later version.
    pub fn from_json(value: &Value) -> Option<Self> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let address = |value: &Value| value.as_str()?.parse::<IpAddr>().ok();
        let mac = |value: &Value| value.as_str()?.parse::<MacAddr>().ok();
        let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let short = |value: &Value| u16::try_from(value.as_u64()?).ok();
        let (name, rest) = value.as_array()?.split_first()?;
        Some(match (name.as_str()?, rest) {
            ("remote", [segment, at, contacted]) => {
                Self::Remote { segment: text(segment)?, address: address(at)?, contacted: contacted.as_bool()? }
            }
            ("address", [segment, at, age, kind, place @ ..]) => {
                let place = match (kind.as_str()?, place) {
                    ("port", [port, Value::Null]) => Place::Port(text(port)?, None),
                    ("port", [port, vlan]) => Place::Port(text(port)?, Some(short(vlan)?)),
                    ("remote", [remote]) => Place::Remote(address(remote)?),
                    _ => return None,
                };
                Self::Address { segment: text(segment)?, mac: mac(at)?, place, age: number(age)? }
            }
            ("binding", [segment, ip, at, is_router, age]) => Self::Binding {
                segment: text(segment)?,
                ip: address(ip)?,
                mac: mac(at)?,
                is_router: if is_router.is_null() { None } else { Some(is_router.as_bool()?) },
                age: number(age)?,
            },
            ("path_mtu", [local, remote, mtu, left]) => Self::PathMtu {
                local: address(local)?,
                remote: address(remote)?,
                mtu: short(mtu)?,
                left: number(left)?,
            },
            _ => return None,
        })
    }
}

/// The next part that a [`StatePass`] collects.
#[derive(Clone, Copy, Debug, Default)]
enum Step {
    #[default]
    Remotes,
    /// Bindings, from this one on.
    Bindings(Option<(u16, IpAddr)>),
    /// Slots of the forwarding database from this position on.
    Addresses(u64),
    Complete,
}

/// Facts that are collected in parts.
#[derive(Debug, Default)]
pub struct StatePass {
    step: Step,
    facts: Vec<Fact>,
    /// Number of facts in front of the addresses, and number of the table that has them.
    addresses: (usize, u64),
}

impl StatePass {
    /// Returns the collected facts.
    pub fn into_facts(self) -> Vec<Fact> {
        self.facts
    }
}

/// Result of [`GatewayControl::restore`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Ethernet addresses.
    pub addresses: u64,
    /// Learned remotes.
    pub remotes: u64,
    /// Bindings.
    pub bindings: u64,
    /// Path MTUs.
    pub path_mtus: u64,
    /// Facts that are too old, have no place in the configuration, or exceed a limit.
    pub left_out: u64,
}

impl GatewayControl {
    /// Collects the next facts. Returns whether the pass is complete.
    pub fn collect_state(&mut self, pass: &mut StatePass, ports: &[PortInfo], now: u32) -> bool {
        match pass.step {
            Step::Remotes => {
                self.collect_remotes(pass, now);
                pass.step = Step::Bindings(None);
            }
            Step::Bindings(after) => {
                let last = self.collect_bindings(pass, after, now);
                pass.step = last.map_or(Step::Addresses(0), |last| Step::Bindings(Some(last)));
                pass.addresses = (pass.facts.len(), self.fdb.rebuilds());
            }
            Step::Addresses(from) => {
                // A table that was rebuilt has its entries at other positions.
                if self.fdb.rebuilds() != pass.addresses.1 {
                    pass.facts.truncate(pass.addresses.0);
                    pass.addresses.1 = self.fdb.rebuilds();
                    pass.step = Step::Addresses(0);
                    return false;
                }
                let next = self.collect_addresses(pass, from, ports, now);
                pass.step = next.map_or(Step::Complete, Step::Addresses);
            }
            Step::Complete => {}
        }
        matches!(pass.step, Step::Complete)
    }

    fn collect_remotes(&self, pass: &mut StatePass, now: u32) {
        for index in self.learned.indices() {
            let Some(remote) = self.list.get(index as usize) else { continue };
            let Some(segment) = self.segment_config(remote.segment) else { continue };
            pass.facts.push(Fact::Remote {
                segment: segment.name.clone(),
                address: remote.address,
                contacted: self.learned.is_contacted(index),
            });
        }
        pass.facts.extend(self.path_mtus.lowered(now).map(|((local, remote), mtu, left)| Fact::PathMtu {
            local,
            remote,
            mtu,
            left,
        }));
    }

    /// Returns the last one if there may be more.
    fn collect_bindings(&self, pass: &mut StatePass, after: Option<(u16, IpAddr)>, now: u32) -> Option<(u16, IpAddr)> {
        let mut last = None;
        for (number, (segment, ip, binding)) in self.bindings.iter_after(after).enumerate() {
            if number == STEP {
                return last;
            }
            last = Some((segment, ip));
            let Some(config) = self.segment_config(segment).filter(|_| binding.origin == BindingOrigin::Learned) else {
                continue;
            };
            pass.facts.push(Fact::Binding {
                segment: config.name.clone(),
                ip,
                mac: binding.mac,
                is_router: binding.is_router,
                age: now.saturating_sub(binding.seen()),
            });
        }
        None
    }

    /// Returns the position of the next slot if there are more.
    fn collect_addresses(&mut self, pass: &mut StatePass, from: u64, ports: &[PortInfo], now: u32) -> Option<u64> {
        let Self { fdb, places, config, layout, list, .. } = self;
        let mut slots = fdb.slots_from(from);
        for (_, slot) in slots.by_ref().take(STEP) {
            let Some(entry) = slot.filter(|entry| !entry.external) else { continue };
            let Some(seen) = entry.seen else { continue };
            let segment = places.position(entry.key.segment()).and_then(|at| config.segments.get(at));
            let place = match Destination::unpack(entry.destination) {
                Destination::Attachment(index) => layout.attachments.get(index as usize).and_then(|it| {
                    Some(Place::Port(ports.get(it.port.index()).filter(|it| !it.is_removed)?.name.clone(), it.vlan))
                }),
                Destination::Remote(index) => list.get(index as usize).map(|it| Place::Remote(it.address)),
                Destination::Group(_) | Destination::Router => None,
            };
            let (Some(segment), Some(place)) = (segment, place) else { continue };
            let age = now.saturating_sub(seen);
            pass.facts.push(Fact::Address { segment: segment.name.clone(), mac: entry.key.mac(), place, age });
        }
        slots.next().map(|(position, _)| position)
    }

    /// Takes facts over that another process collected `elapsed` seconds ago. Call this before the workers start. All
    /// limits apply. What is older than the ageing time is left out, and the rest ages from now on.
    pub fn restore(&mut self, facts: &[Fact], ports: &[PortInfo], elapsed: u32, now: u32) -> Restored {
        let mut restored = Restored::default();
        let positions: HashMap<String, usize> =
            self.config.segments.iter().enumerate().map(|(at, segment)| (segment.name.clone(), at)).collect();
        let mut remotes: HashMap<(u16, IpAddr), u32> =
            (0..).zip(&self.list).map(|(index, it)| ((it.segment, it.address), index)).collect();
        let attachments: HashMap<(u16, &str, Option<u16>), u32> = self.restorable_attachments(ports);
        for fact in facts {
            let segment = match fact {
                Fact::Remote { segment, .. } | Fact::Address { segment, .. } | Fact::Binding { segment, .. } => {
                    positions.get(segment)
                }
                Fact::PathMtu { .. } => None,
            };
            let place =
                segment.and_then(|at| Some((self.places.segments.get(*at)?.index, self.config.segments.get(*at)?)));
            let is_restored = match (fact, place) {
                (Fact::Remote { address, contacted, .. }, Some((segment, _))) => {
                    let added = self.restore_remote(segment, *address, *contacted, now);
                    remotes.extend(added.map(|index| ((segment, *address), index)));
                    restored.remotes += u64::from(added.is_some());
                    added.is_some()
                }
                (Fact::Address { mac, place, age, .. }, Some((segment, config))) => {
                    let to = match place {
                        Place::Port(port, vlan) => {
                            attachments.get(&(segment, port, *vlan)).map(|it| Destination::Attachment(*it))
                        }
                        // Nothing is sent to a remote until its BFD session is up, which may never be.
                        Place::Remote(address) => remotes
                            .get(&(segment, *address))
                            .filter(|index| self.bfd.out(**index).is_none())
                            .map(|index| Destination::Remote(*index)),
                    };
                    let is_young = config.ageing == 0 || age.saturating_add(elapsed) < config.ageing;
                    let is_learned = to
                        .filter(|_| is_young && config.learning)
                        .is_some_and(|to| self.restore_address(Key::new(segment, *mac), to, now));
                    restored.addresses += u64::from(is_learned);
                    is_learned
                }
                (Fact::Binding { ip, mac, is_router, age, .. }, Some((segment, config))) => {
                    let is_young = config.ageing == 0 || age.saturating_add(elapsed) < config.ageing;
                    let (ip, mac, is_router) = (*ip, *mac, *is_router);
                    let claim = Claim { segment, ip, mac, is_router, overrides: false };
                    let is_learned = is_young
                        && config.suppression.enabled
                        && matches!(self.bindings.claim(claim, now), Claimed::New | Claimed::Moved);
                    restored.bindings += u64::from(is_learned);
                    is_learned
                }
                (Fact::PathMtu { local, remote, mtu, left }, _) => {
                    let path = (*local, *remote);
                    let is_used = *left > elapsed
                        && self.list.iter().zip(&self.routes).any(|(to, route)| (route.local, to.address) == path);
                    if is_used {
                        self.path_mtus.restore(path, *mtu, now.saturating_add(left - elapsed));
                    }
                    restored.path_mtus += u64::from(is_used);
                    is_used
                }
                (_, None) => false,
            };
            restored.left_out += u64::from(!is_restored);
        }
        if restored.path_mtus > 0 {
            self.update_max_frames(|_| true);
        }
        self.known_hosts_changed = true;
        self.publish();
        restored
    }

    /// Returns the index of each attachment by its segment, port and VLAN.
    fn restorable_attachments<'p>(&self, ports: &'p [PortInfo]) -> HashMap<(u16, &'p str, Option<u16>), u32> {
        let mut all = HashMap::new();
        for (segment, place) in self.config.segments.iter().zip(&self.places.segments) {
            for (attachment, index) in segment.attachments.iter().zip(&place.attachments) {
                if let Some(port) = ports.get(attachment.port) {
                    all.insert((place.index, port.name.as_str(), attachment.vlan), *index);
                }
            }
        }
        all
    }

    /// Adds a learned remote again. Its next hop is resolved from now on if it was before.
    fn restore_remote(&mut self, segment: u16, address: IpAddr, contacted: bool, now: u32) -> Option<u32> {
        let learns = self.layout.segments.get(usize::from(segment)).is_some_and(|it| it.learns_remotes)
            && self.segment_config(segment).is_some_and(|it| it.accept_unknown_remotes);
        let is_known = self.list.iter().any(|it| it.segment == segment && it.address == address);
        // Nothing is evicted for a remote that may be gone.
        if !learns || is_known || self.learned.is_full(segment) {
            return None;
        }
        let index = self.add_learned_remote(segment, address, now).ok()?;
        let next_hop = self.routes.get(index as usize).and_then(|route| route.next_hop);
        if let Some(next_hop) = next_hop.filter(|_| contacted) {
            self.learned.contact(index);
            self.next_hops.add_user(next_hop, index);
            self.next_hops.resolve(next_hop, u64::from(now) * 1000);
        }
        Some(index)
    }

    fn restore_address(&mut self, key: Key, to: Destination, now: u32) -> bool {
        let limits = self.learn_limits(key.segment(), to);
        let outcome = self.fdb.learn_within(key, to.pack(), now, limits);
        if let (Learned::New, Destination::Remote(index)) = (outcome, to) {
            self.learned.add_key(index, key);
        }
        outcome == Learned::New
    }

    /// Adds a remote that a segment learns. Returns its index.
    ///
    /// # Errors
    /// The reason to drop the packet from which it was learned.
    pub(super) fn add_learned_remote(&mut self, segment: u16, source: IpAddr, now: u32) -> Result<u32, DropReason> {
        let locals = self.segment_config(segment).map(|s| s.locals.as_slice()).unwrap_or_default();
        let local = locals.iter().copied().find(|ip| ip.is_ipv4() == source.is_ipv4());
        let destination = self.segment_config(segment).map_or(source, |it| it.destination(source));
        let next_hop = self.next_hops.next_hop(destination);
        let (Some(local), Some(next_hop)) = (local, next_hop) else { return Err(DropReason::NoRoute) };
        if !self.layout.underlay.can_be_remote(source) {
            return Err(DropReason::BadSource);
        }
        let index = self.place_for_remote(segment, now).ok_or(DropReason::RemoteLimit)?;
        let settings: Option<&SegmentConfig> = self.segment_config(segment);
        let mtu = self.path_mtus.of(local, source, self.underlay_mtu);
        let max_frame = max_frame(&self.config.underlay, mtu, settings, source);
        // Its next hop is resolved when the first frame has to be sent to it.
        let remote = Remote::new(source, segment, max_frame, settings);
        let route = Route::new(local, Some(next_hop));
        match (self.list.get_mut(index as usize), self.routes.get_mut(index as usize)) {
            (Some(free), Some(free_route)) => (*free, *free_route) = (remote, route),
            _ => {
                self.list.push(remote);
                self.routes.push(route);
            }
        }
        self.dirty = true;
        Ok(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Vec<Fact> {
        let segment = || "blue \"1\"\n".to_owned();
        let (v4, v6) = (IpAddr::from([10, 9, 0, 2]), "fd00::2".parse().unwrap());
        let mac = MacAddr([2, 0, 0, 0, 0, 0xfe]);
        vec![
            Fact::Remote { segment: segment(), address: v6, contacted: true },
            Fact::Remote { segment: segment(), address: v4, contacted: false },
            Fact::Address { segment: segment(), mac, place: Place::Remote(v4), age: 0 },
            Fact::Address { segment: segment(), mac, place: Place::Port("lan".into(), None), age: 7 },
            Fact::Address { segment: segment(), mac, place: Place::Port("lan".into(), Some(4094)), age: u32::MAX },
            Fact::Binding { segment: segment(), ip: v6, mac, is_router: Some(false), age: 9 },
            Fact::Binding { segment: segment(), ip: v4, mac, is_router: None, age: 9 },
            Fact::PathMtu { local: v4, remote: v4, mtu: 1400, left: 600 },
        ]
    }

    #[test]
    fn all_facts_survive_their_serialised_form() {
        for fact in facts() {
            let text = fact.to_json().to_string();
            assert!(!text.contains('\n'), "a fact is a line");
            assert_eq!(Fact::from_json(&serde_json::from_str(&text).unwrap()), Some(fact));
        }
        let mut names: Vec<String> =
            facts().iter().map(|fact| fact.to_json()[0].as_str().unwrap().to_owned()).collect();
        names.dedup();
        let mut passed: Vec<&str> = PARTS
            .iter()
            .filter_map(|part| match part.passed {
                Passed::Fact(name) => Some(name),
                Passed::Anew(_) => None,
            })
            .collect();
        names.sort_unstable();
        passed.sort_unstable();
        assert_eq!(names, passed, "each part that is passed on has a fact here");
    }

    #[test]
    fn other_forms_are_refused() {
        for fact in facts() {
            let whole = fact.to_json();
            let array = whole.as_array().unwrap();
            for at in 0..array.len() {
                let mut other = array.clone();
                other[at] = json!({ "a": 1 });
                assert_eq!(Fact::from_json(&other.clone().into()), None, "{other:?}");
                other.truncate(at);
                assert_eq!(Fact::from_json(&other.clone().into()), None, "{other:?}");
            }
            assert_eq!(Fact::from_json(&[array.clone(), vec![json!(1)]].concat().into()), None, "longer");
        }
        for text in ["null", "[]", "[1]", "[\"address\"]", "[\"path_mtu\",\"1.1.1.1\",\"1.1.1.2\",65536,1]"] {
            assert_eq!(Fact::from_json(&serde_json::from_str(text).unwrap()), None, "{text}");
        }
    }
}
