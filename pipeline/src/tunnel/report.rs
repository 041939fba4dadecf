//! Reports of the gateway stage for traces: what it looked up, and with which result. They are called for traced
//! packets only.

use std::fmt::Write;

use super::outer::TunnelId;
use super::stage::View;
use super::tables::{Destination, NextHop, Remote, Remotes};
use crate::Context;
use crate::table::Key;

/// Name of the stage in traces.
pub(super) const STAGE: &str = "gateway";

impl View<'_> {
    /// Returns the identifier of a segment, for reports.
    fn id(&self, segment: u16) -> TunnelId {
        super::control::tunnel_id(self.layout, segment)
    }

    /// Describes a destination of a forwarding entry.
    fn describe(&self, context: &Context<'_>, remotes: &Remotes, destination: Destination) -> String {
        match destination {
            Destination::Attachment(index) => match self.layout.attachments.get(index as usize) {
                Some(attachment) => {
                    let vlan = attachment.vlan.map(|vlan| format!(" VLAN {vlan}")).unwrap_or_default();
                    format!("port {}{vlan}", context.port_name(attachment.port))
                }
                None => "no attachment".to_owned(),
            },
            Destination::Remote(index) => match remotes.list.get(index as usize) {
                Some(remote) => format!("remote {}", remote.address),
                None => "no remote".to_owned(),
            },
            Destination::Group(index) => format!("group {index} of remotes"),
            Destination::Router => "router".to_owned(),
        }
    }

    /// Reports the attachment or the remote that a frame came from.
    #[cold]
    pub(super) fn report_origin(
        &self,
        context: &mut Context<'_>,
        remotes: &Remotes,
        from: Option<Destination>,
        segment: u16,
    ) {
        let from = from.map_or("an unknown remote".to_owned(), |from| self.describe(context, remotes, from));
        let id = self.id(segment);
        context.trace(STAGE, |text| write!(text, "frame from {from}: segment of {id}"));
    }

    /// Reports a lookup of a frame's destination in the forwarding database.
    #[cold]
    pub(super) fn report_lookup(
        &self,
        context: &mut Context<'_>,
        remotes: &Remotes,
        key: Key,
        found: Option<Destination>,
    ) {
        let (mac, id) = (key.mac(), self.id(key.segment()));
        let id = id.id.map_or_else(|| id.to_string(), |id| id.to_string());
        let result = match found {
            Some(destination) => self.describe(context, remotes, destination),
            None if key.is_unicast() => "unknown, so the frame is flooded".to_owned(),
            None => "a group address, so the frame is flooded".to_owned(),
        };
        context.trace(STAGE, |text| write!(text, "FDB {mac} in segment {id}: {result}"));
    }
}

/// Reports the state of the next hop of a remote.
#[cold]
pub(super) fn report_next_hop(context: &mut Context<'_>, remote: &Remote) {
    let state = match &remote.next_hop {
        NextHop::Ready(_) => "is resolved".to_owned(),
        NextHop::InNic(_, numbers) => {
            let all: Vec<String> = numbers.all().map(|number| number.to_string()).collect();
            format!("is resolved; the NIC has its headers as number {}", all.join(" and "))
        }
        NextHop::Held(..) => "is asked again, because the link was lost".to_owned(),
        NextHop::Resolving => "is being resolved".to_owned(),
        NextHop::Unreachable => "does not answer".to_owned(),
        NextHop::Out => "is not used: BFD keeps the remote out".to_owned(),
    };
    let (address, most) = (remote.address, remote.max_frame);
    context.trace(STAGE, |text| write!(text, "remote {address}: next hop {state}; frames of at most {most} bytes"));
}
