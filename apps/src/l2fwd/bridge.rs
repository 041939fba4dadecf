use std::fmt::Write;
use std::sync::Arc;

use serde_json::json;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::registry::{Column, Page, TableSpec, Unit};
use wirepath_pipeline::table::{Fdb, FdbEntry, FdbLimits, FdbWriter, Key, Learned, NO_DESTINATION};
use wirepath_pipeline::{Context, Control, ControlPlane, Learn, PortInfo, Stage};
use wirepath_pmd::port::{LinkState, PortEvent, PortId};
use wirepath_wire::MacAddr;

/// The only segment of the bridge. VLAN tags are part of the frame.
const SEGMENT: u16 = 0;

static FDB: TableSpec = TableSpec {
    name: "fdb",
    about: "Forwarding database: the places of Ethernet addresses",
    metric: None,
    columns: &[
        Column::key("mac", "Ethernet address"),
        Column::attribute("to", "Port behind which the address is"),
        Column::gauge("age", Unit::Seconds, "Time since the address was last seen as a source"),
    ],
};

/// A learning bridge over all ports.
///
/// It floods frames with a group address or an unknown destination by copying them. Flooding is rare in a
/// stable network, and a copy leaves every device in one segment. Reserved group addresses (IEEE 802.1Q table
/// 8-1, including spanning tree and flow control) are not forwarded. There is no spanning tree, so the ports
/// must not form a loop.
#[derive(Clone, Debug)]
pub struct Bridge {
    fdb: Arc<Fdb>,
    /// Buffer pool for copies to each port.
    pools: Arc<[Pool]>,
}

/// The control-thread part of a [`Bridge`].
#[derive(Debug)]
pub struct BridgeControl {
    writer: FdbWriter,
    aged: u32,
    /// Numbers of addresses learned, moved, aged out, and rejected for lack of room.
    counts: [u64; 4],
}

impl Bridge {
    /// Creates a bridge over `ports` and its control part.
    pub fn new(domain: &Domain, ports: &[PortInfo], ageing: u32) -> (Self, BridgeControl) {
        let writer = FdbWriter::new(domain, FdbLimits { ageing, per_segment: 65_536, ..FdbLimits::default() }, 0);
        let bridge = Self { fdb: writer.fdb(), pools: ports.iter().map(|port| port.pool.clone()).collect() };
        (bridge, BridgeControl { writer, aged: 0, counts: [0; 4] })
    }

    fn flood(&self, context: &mut Context<'_>, packet: Packet) {
        let from = packet.in_port();
        let mut others = (0..self.pools.len() as u16).map(PortId::new).filter(|port| Some(*port) != from).peekable();
        while let Some(port) = others.next() {
            if others.peek().is_none() {
                return context.send(port, packet);
            }
            context.count_copies(1);
            match packet.duplicate(&self.pools[port.index()]) {
                Some(copy) => context.send(port, copy),
                None => context.count_drops(DropReason::NoBuffer, 1),
            }
        }
        context.drop(packet, DropReason::NoDestination);
    }
}

/// Returns the destination and source keys of a frame, or the drop reason.
fn keys(packet: &Packet) -> Result<(Key, Key), DropReason> {
    let Some(header) = packet.data().first_chunk::<14>() else { return Err(DropReason::TooShort) };
    let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = *header;
    let (destination, source) = (MacAddr::new(a, b, c, d, e, f), MacAddr::new(g, h, i, j, k, l));
    let (destination, source) = (Key::new(SEGMENT, destination), Key::new(SEGMENT, source));
    if !source.is_unicast() {
        Err(DropReason::BadSource)
    } else if destination.to_u64() & !0xf == 0x0180_c200_0000 {
        Err(DropReason::LinkLocalMulticast)
    } else {
        Ok((destination, source))
    }
}

impl Stage for Bridge {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        let (mut destinations, mut sources) = ([Key::from_u64(0); BATCH], [Key::from_u64(0); BATCH]);
        let mut n = 0;
        batch.prefetch_data();
        batch.filter_map(|packet| match keys(&packet) {
            Ok(both) => {
                (destinations[n], sources[n]) = both;
                n += 1;
                Some(packet)
            }
            Err(reason) => {
                context.drop(packet, reason);
                None
            }
        });
        let (table, now) = (self.fdb.table(context.guard()), context.seconds());
        let packets = batch.as_slice();
        table.find_batch(&sources[..n], |i, entry| {
            let port = destination(packets[i].in_port());
            match entry {
                Some(entry) if entry.destination() == port => entry.touch(now),
                _ => context.learn(sources[i], port),
            }
        });
        let mut ports = [NO_DESTINATION; BATCH];
        table.lookup_batch(&destinations[..n], &mut ports[..n]);
        let mut at = 0;
        batch.filter_map(|mut packet| {
            let port = ports[at];
            at += 1;
            if context.is_tracing() {
                report_lookup(context, destinations[at - 1], port);
            }
            if port == NO_DESTINATION {
                self.flood(context, packet);
                None
            } else if port == destination(packet.in_port()) {
                context.drop(packet, DropReason::SamePort);
                None
            } else {
                packet.set_out_port(PortId::checked(port));
                Some(packet)
            }
        });
    }
}

/// Reports the lookup of a traced packet's destination.
#[cold]
fn report_lookup(context: &mut Context<'_>, key: Key, port: u32) {
    let name = PortId::checked(port).map(|port| context.port_name(port));
    let mac = key.mac();
    context.trace("bridge", |text| match name {
        Some(name) => write!(text, "FDB {mac}: port {name}"),
        None if key.is_unicast() => write!(text, "FDB {mac}: unknown, so the frame is flooded"),
        None => write!(text, "FDB {mac}: a group address, so the frame is flooded"),
    });
}

/// Destination of the forwarding table for a port.
fn destination(port: Option<PortId>) -> u32 {
    port.map_or(NO_DESTINATION, |port| port.number().into())
}

impl Control for BridgeControl {
    fn learn(&mut self, learn: Learn, plane: &mut ControlPlane) {
        match self.writer.learn(learn.key, learn.destination, plane.seconds()) {
            Learned::New => self.counts[0] += 1,
            Learned::Moved { .. } => self.counts[1] += 1,
            Learned::Full => self.counts[3] += 1,
            Learned::Known | Learned::Static | Learned::NotUnicast => {}
        }
    }

    fn tick(&mut self, plane: &mut ControlPlane) {
        let now = plane.seconds();
        if now != self.aged {
            self.aged = now;
            let forgotten = &mut self.counts[2];
            self.writer.age(now, |_| *forgotten += 1);
        }
    }

    fn port_event(&mut self, port: PortId, event: &PortEvent, _: &mut ControlPlane) {
        let link_lost = match event {
            PortEvent::Link(link) => link.state == LinkState::Down,
            PortEvent::Lost(_) => true,
            PortEvent::Returned | PortEvent::Address(_) | PortEvent::Mtu(_) | PortEvent::Finished => false,
        };
        if link_lost {
            // The hosts behind the port may reappear behind another port.
            self.writer.flush(|entry| entry.destination == destination(Some(port)));
        }
    }

    fn tables(&mut self) -> Vec<&'static TableSpec> {
        vec![&FDB]
    }

    fn list(&mut self, _: &'static TableSpec, page: &mut Page<'_>, plane: &mut ControlPlane) {
        let now = plane.seconds();
        let slots = self.writer.slots_from(page.cursor());
        page.extend_from(slots, |entry| {
            let entry: FdbEntry = entry?;
            let mac = entry.key.mac().to_string();
            let port = plane.ports().get(entry.destination as usize).map(|port| port.name.clone());
            let age = entry.seen.map(|seen| now.saturating_sub(seen));
            Some(vec![mac.into(), port.into(), age.into()])
        });
    }

    fn summary(&mut self) -> Option<serde_json::Value> {
        let [learned, moved, forgotten, refused] = self.counts;
        Some(json!({
            "addresses": self.writer.len(),
            "learned": learned,
            "moved": moved,
            "forgotten": forgotten,
            "refused": refused,
        }))
    }
}
