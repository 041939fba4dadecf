//! The stage and its table of the configuration.

use wirepath::prelude::*;
use wirepath::settings::{ConfigTable, Integer, Key, List};
use wirepath::wire::FiveTuple;

const UDP_PORTS: Key<List<Integer<u16>>> = Key::integer("udp_ports", 1..=65_535)
    .list()
    .about("Destination ports of datagrams that may pass.");

static GUARD: ConfigTable = ConfigTable {
    name: "guard",
    about: "Which datagrams may pass.",
    keys: &[&UDP_PORTS],
    example: "[guard]\nudp_ports = [53, 123]\n",
    ..ConfigTable::EMPTY
};

/// The table `[guard]`.
#[derive(Debug)]
pub struct GuardSettings {
    /// Destination ports of datagrams that may pass.
    pub udp_ports: Vec<u16>,
}

impl AppSettings for GuardSettings {
    fn tables() -> Vec<&'static ConfigTable> {
        vec![&GUARD]
    }

    fn read(top: &Settings<'_>, ports: &[String]) -> Result<Self, ConfigError> {
        if ports.len() != 2 {
            top.record(top.error_in("port", format!("found {}, expected two", ports.len())));
        }
        top.required_subtable(&GUARD)?.complete(|table| {
            let udp_ports = table.read(&UDP_PORTS)?;
            Ok(Self {
                udp_ports: udp_ports.into_iter().map(|port| port.value).collect(),
            })
        })
    }
}

/// Passes packets to the other port, except for datagrams to closed ports.
#[derive(Clone)]
pub struct Guard {
    /// One entry for each UDP port.
    is_open: Box<[bool]>,
    closed: DropReason,
}

impl Guard {
    /// Creates the stage, and its drop reason in the tables and metrics of operators.
    pub fn new(udp_ports: &[u16]) -> Result<Self, Failure> {
        let closed = DropReason::register("closed_port", "the guard does not list the UDP port")?;
        let mut is_open = vec![false; 1 << 16].into_boxed_slice();
        udp_ports
            .iter()
            .for_each(|port| is_open[usize::from(*port)] = true);
        Ok(Self { is_open, closed })
    }
}

impl Stage for Guard {
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        context.parse_each(batch, |context, mut packet, headers| {
            if headers.outer().l4_type() == L4Type::Udp {
                let flow = FiveTuple::of(packet.data(), headers.outer());
                if !flow.is_some_and(|flow| self.is_open[usize::from(flow.dst_port())]) {
                    context.drop(packet, self.closed);
                    return None;
                }
            }
            packet.set_out_port(packet.in_port().map(PortId::paired));
            Some(packet)
        });
    }
}

#[cfg(test)]
mod tests {
    use wirepath::packet::Pool;
    use wirepath::pipeline::epoch::Domain;
    use wirepath::pipeline::{PortInfo, SteppedRuntime};
    use wirepath::settings::Source;

    use super::*;

    /// Headers of a datagram from 192.0.2.1 to 192.0.2.2.
    #[rustfmt::skip]
    fn datagram(port: u16) -> [u8; 42] {
        let [high, low] = port.to_be_bytes();
        [
            2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0,
            0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0xf6, 0xcd, 192, 0, 2, 1, 192, 0, 2, 2,
            0x80, 0, high, low, 0, 8, 0, 0,
        ]
    }

    #[test]
    fn datagrams_to_closed_ports_are_dropped() {
        let pool = Pool::new("test", 64).unwrap();
        let port = |id, name| PortInfo::simulated(PortId::new(id), name, None, 1500, &pool);
        let ports = vec![port(0, "outside"), port(1, "inside")];
        let guard = Guard::new(&[53]).unwrap();
        let mut stepped = SteppedRuntime::new(ports, &Domain::new(), guard).unwrap();

        let mut arp = datagram(54);
        arp[12..14].copy_from_slice(&[0x88, 0xb5]);
        let mut batch = Batch::new();
        for frame in [datagram(53), datagram(54), arp] {
            let mut packet = pool.take().unwrap();
            assert!(packet.extend_from_slice(&frame, &pool));
            batch.push(packet).unwrap();
        }
        stepped.process(Some(PortId::new(0)), &mut batch);

        for expected in [datagram(53), arp] {
            let packet = stepped.next_sent().unwrap();
            assert_eq!(packet.data(), expected);
            assert_eq!(packet.out_port(), Some(PortId::new(1)));
        }
        assert!(stepped.next_sent().is_none());
        let closed = DropReason::of_name("closed_port").unwrap();
        assert_eq!(
            stepped.drops().into_iter().collect::<Vec<_>>(),
            [(closed, 1)]
        );
    }

    #[test]
    fn the_table_is_checked() {
        let read = |text: &str| {
            let ports =
                "[[port]]\nname = 'a'\ndriver = 'null'\n[[port]]\nname = 'b'\ndriver = 'null'\n";
            let source = Source::new("c.toml", format!("{ports}{text}"));
            let read = Config::parse_with::<GuardSettings>(&source);
            read.map(|(_, own)| own.udp_ports)
                .map_err(|error| error.to_string())
        };
        assert_eq!(read("[guard]\nudp_ports = [53, 123]").unwrap(), [53, 123]);
        let error = read("[guard]\nudp_ports = [53, 70000]").unwrap_err();
        assert!(
            error.starts_with("c.toml:8:18: guard.udp_ports[1]: found 70000"),
            "{error}"
        );
        let error = read("").unwrap_err();
        assert!(error.contains("expected the table [guard]"), "{error}");
    }

    #[test]
    fn the_example_configuration_is_valid() {
        let text = include_str!("../udp-guard.toml");
        let source = Source::new("udp-guard.toml", text);
        let (config, own) = Config::parse_with::<GuardSettings>(&source).unwrap();
        assert_eq!((config.ports.len(), own.udp_ports), (2, vec![53, 123]));
    }
}
