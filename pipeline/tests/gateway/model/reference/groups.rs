//! Groups of next hops of the reference.
//!
//! The specification does not say which member a flow gets. So a model takes the member that [`Model::pick`] says, and
//! the caller looks which of several models did what the gateway did.

use std::collections::HashMap;

use super::super::config::{Config, Member, NETWORKS, Target, silent_at};
use super::super::wire::packets;
use super::Model;

/// A flow of a route: VRF, number of the route, and [`packets::flow`].
pub(super) type Flow = (usize, usize, Vec<u8>);

impl Model {
    /// Returns the next hop of a packet: a member that lives, or any if none does. A flow keeps its member.
    pub(super) fn member_of(&mut self, (vrf, number): (usize, usize), mask: u8, packet: &[u8]) -> Member {
        let members = self.config.members(vrf, mask);
        let silent = silent_at(vrf, NETWORKS[number].0.is_ipv6());
        let has_failed = self.silent.get(&silent).is_some_and(|host| host.has_failed());
        let lives = |member: &Member| !(*member == Member::Silent && has_failed);
        let mut living: Vec<Member> = members.iter().copied().filter(lives).collect();
        if living.is_empty() {
            living = members;
        } else if living.len() < members.len() {
            self.count("member that has failed");
        }
        let [first, _, ..] = living[..] else { return living[0] };
        let flow = (vrf, number, packets::flow(packet));
        let known = self.flows.get(&flow).copied();
        if let Some(known) = known.filter(|it| living.contains(it)) {
            self.count("flow that keeps its member");
            return known;
        }
        self.count(if known.is_some() { "flow whose member has failed" } else { "new flow of a group" });
        let member = living.get(self.pick).copied().unwrap_or(first);
        self.choices = self.choices.max(living.len());
        self.flows.insert(flow.clone(), member);
        self.chosen = Some(flow);
        member
    }

    /// Keeps the member of the flow that got one last.
    pub(crate) fn end_choice(&mut self) {
        (self.chosen, self.choices) = (None, 0);
    }

    /// Forgets the member of the flow that got one last.
    pub(crate) fn forget_chosen(&mut self) {
        if let Some(flow) = self.chosen.take() {
            self.flows.remove(&flow);
        }
    }

    /// Takes the groups of another configuration than this one.
    pub(super) fn replace_groups(&mut self, old: &Config) {
        let group = |config: &Config, vrf: usize, number: usize| match config.route(vrf, number) {
            Some(Target::Group(mask)) => Some(config.members(vrf, mask)),
            _ => None,
        };
        let config = &self.config;
        self.flows.retain(|(vrf, number, _), _| group(config, *vrf, *number) == group(old, *vrf, *number));
        let hosts = config.silent_members();
        self.silent.retain(|host, it| !it.is_member || hosts.contains_key(host));
    }
}

pub(super) type Flows = HashMap<Flow, Member>;
