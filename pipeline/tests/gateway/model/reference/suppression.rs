//! ARP and ND suppression of the reference: bindings of IP addresses, and answers for hosts.

use std::net::IpAddr;

use wirepath_wire::MacAddr;

use super::super::config::{Attached, Config, Place, SLOTS, StaticBinding};
use super::super::wire::resolution;
use super::Model;

/// Ethernet address of the host with an IP address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    mac: MacAddr,
    is_router: Option<bool>,
    /// Second of the last message that confirmed it. A static one has none.
    seen: Option<u32>,
}

/// Claim of a message for the control thread: slot, IP address, Ethernet address and router flag.
pub(super) type Claim = (usize, IpAddr, MacAddr, Option<bool>);

impl Model {
    /// Takes a frame, which may be a message of ARP or neighbour discovery, from a port or a remote. Returns true if it
    /// was answered.
    pub(super) fn watch(&mut self, slot: usize, from: Option<Attached>, frame: &[u8]) -> bool {
        if !self.segment(slot).suppression {
            return false;
        }
        let Some(content) = resolution::read(frame) else { return false };
        if let Some((ip, mac, is_router)) = content.claim {
            let second = self.second;
            match self.bindings.get_mut(&(slot, ip)) {
                // The message confirms the binding.
                Some(known) if known.mac == mac && (is_router.is_none() || known.is_router == is_router) => {
                    known.seen = known.seen.map(|_| second);
                }
                _ => self.claims.push((slot, ip, mac, is_router)),
            }
        }
        let (Some(at), Some((target, ip, asker))) = (from, content.asks) else { return false };
        let Some(binding) = self.bindings.get(&(slot, target)).copied() else { return false };
        if binding.mac == asker || target.is_ipv6() && binding.is_router.is_none() {
            return false;
        }
        let is_reachable = match self.lookup(slot, binding.mac) {
            Some(Place::Port(to)) => to != at && !self.are_isolated(slot, at, to),
            Some(Place::Remote(_)) => true,
            Some(Place::Router) => false,
            None => binding.seen.is_none(),
        };
        if is_reachable {
            self.count(if target.is_ipv6() { "answered solicitation" } else { "answered ARP request" });
            let answer = resolution::answer(target, binding.mac, binding.is_router == Some(true), (ip, asker));
            self.deliver(slot, at, &answer);
        }
        is_reachable
    }

    /// Learns what the messages say.
    pub(super) fn learn_bindings(&mut self) {
        let second = self.second;
        for (slot, ip, mac, is_router) in std::mem::take(&mut self.claims) {
            let mut new = Binding { mac, is_router, seen: Some(second) };
            match self.bindings.get(&(slot, ip)) {
                Some(Binding { seen: None, .. }) => continue,
                Some(known) if known.mac == mac => new.is_router = is_router.or(known.is_router),
                Some(_) => self.count("binding that moved"),
                None => self.count("binding learned"),
            }
            self.bindings.insert((slot, ip), new);
        }
    }

    /// Removes bindings that no message confirmed for the ageing time.
    pub(super) fn age_bindings(&mut self) {
        let (config, second, before) = (&self.config, self.second, self.bindings.len());
        self.bindings.retain(|(slot, _), binding| {
            let ageing = config.segments[*slot].as_ref().map_or(0, |it| it.ageing);
            ageing == 0 || binding.seen.is_none_or(|seen| second - seen < ageing)
        });
        if self.bindings.len() < before {
            self.count("binding that aged");
        }
    }

    /// Takes the static bindings of another configuration.
    pub(super) fn replace_static_bindings(&mut self) {
        let statics = static_bindings(&self.config);
        let config = &self.config;
        let stays = |slot: usize| config.segments[slot].as_ref().is_some_and(|it| it.suppression);
        self.bindings.retain(|(slot, _), binding| stays(*slot) && binding.seen.is_some());
        for (slot, StaticBinding { ip, mac, is_router }) in statics {
            self.bindings.insert((slot, ip), Binding { mac, is_router: Some(is_router), seen: None });
        }
    }

    /// Rows of the bindings as operators see them: segment, IP address, Ethernet address, origin, router flag, age.
    pub(crate) fn binding_rows(&self) -> Vec<[String; 6]> {
        let row = |((slot, ip), binding): (&(usize, IpAddr), &Binding)| {
            let name = SLOTS[*slot].name.to_owned();
            let origin = if binding.seen.is_some() { "learned" } else { "static" }.to_owned();
            let router = binding.is_router.map_or_else(String::new, |it| it.to_string());
            let age = binding.seen.map_or_else(String::new, |seen| (self.second - seen).to_string());
            [name, ip.to_string(), binding.mac.to_string(), origin, router, age]
        };
        let mut rows: Vec<_> = self.bindings.iter().map(row).collect();
        rows.sort();
        rows
    }
}

fn static_bindings(config: &Config) -> Vec<(usize, StaticBinding)> {
    let of = |slot: usize| config.segments[slot].iter().flat_map(|it| &it.bindings).map(move |it| (slot, *it));
    (0..SLOTS.len()).flat_map(of).collect()
}
