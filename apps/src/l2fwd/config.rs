use wirepath::AppSettings;
use wirepath_packet::PortId;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Flag, Integer, Key, Lists, Parsed, Settings, WithDefault};

const MODE: Key<Choice<bool>> = Key::choice(
    "mode",
    &[
        ("pairs", false, "packets received by a port leave by its peer"),
        ("bridge", true, "a learning bridge joins all ports"),
    ],
)
.same_as("\"pairs\"")
.about("Forwarding mode.");
const PAIRS: Key<Lists<Parsed<String>>> = Key::parsed("pairs", "pairs of port names, as in [[\"a\", \"b\"]]")
    .lists()
    .when("mode = \"pairs\"")
    .absent("neighbouring ports in order; a single port sends packets back")
    .about("Pairs of ports. Each port is in one pair.");
const REWRITE_MAC: Key<WithDefault<Flag>> = Key::flag("rewrite_mac")
    .default(false)
    .when("mode = \"pairs\"")
    .about("Frames leave with the address of the sending port as source and another one as destination.");
const AGEING: Key<Integer<u32>> = Key::integer("ageing", 0..=1_000_000)
    .unit("seconds")
    .same_as("300")
    .when("mode = \"bridge\"")
    .about("Time after which a learned address that sends nothing is removed. 0: never.");

static L2FWD: ConfigTable = ConfigTable {
    name: "l2fwd",
    about: "How packets get from port to port.",
    absent: "neighbouring ports are pairs",
    keys: &[&MODE, &PAIRS, &REWRITE_MAC, &AGEING],
    example: "[l2fwd]\nmode = \"pairs\"\npairs = [[\"lan\", \"wan\"]]\n",
    ..ConfigTable::EMPTY
};

/// Forwarding mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Packets received by a port leave by its peer port.
    Pairs {
        /// Peer of each port.
        peers: Vec<PortId>,
        /// If true, frames get new addresses.
        rewrite_mac: bool,
    },
    /// A learning bridge over all ports.
    Bridge {
        /// Seconds after which an unseen address is removed; 0: never.
        ageing: u32,
    },
}

impl AppSettings for Mode {
    fn tables() -> Vec<&'static ConfigTable> {
        vec![&L2FWD]
    }

    fn read(top: &Settings<'_>, ports: &[String]) -> Result<Self, ConfigError> {
        top.read_table(&L2FWD, |table| Self::read_table(table, ports))
    }
}

impl Mode {
    fn read_table(table: &Settings<'_>, ports: &[String]) -> Result<Self, ConfigError> {
        let mode = table.read(&MODE)?;
        let ageing = table.read(&AGEING)?;
        let rewrite_mac = table.read(&REWRITE_MAC)?;
        if table.has(&MODE) && mode.is_none() {
            // The other keys depend on the mode.
            return Err(table.error_in(&MODE, "expected \"pairs\" or \"bridge\""));
        }
        let bridge = mode.unwrap_or(false);
        if bridge {
            if table.has(&PAIRS) {
                return Err(table.error_in(&PAIRS, "pairs are for mode = \"pairs\"; a bridge joins all ports"));
            }
            if rewrite_mac {
                return Err(table.error_in(&REWRITE_MAC, "found true, but a bridge leaves addresses alone"));
            }
            return Ok(Self::Bridge { ageing: ageing.unwrap_or(300) });
        }
        if ageing.is_some() {
            return Err(table.error_in(&AGEING, "ageing is for mode = \"bridge\""));
        }
        let peers = if table.has(&PAIRS) { named_pairs(table, ports)? } else { adjacent_pairs(table, ports)? };
        Ok(Self::Pairs { peers, rewrite_mac })
    }
}

/// Default pairs without the key `pairs`: neighbouring ports in order. A single port sends packets back.
fn adjacent_pairs(table: &Settings<'_>, ports: &[String]) -> Result<Vec<PortId>, ConfigError> {
    match ports.len() {
        1 => Ok(vec![PortId::new(0)]),
        n if n % 2 == 0 => Ok((0..n).map(|port| PortId::new((port ^ 1) as u16)).collect()),
        n => Err(table.error(format!("{n} ports cannot be joined two by two; say pairs = [[\"a\", \"b\"], ...]"))),
    }
}

fn no_port(name: &str, ports: &[String]) -> String {
    let known: Vec<&str> = ports.iter().map(String::as_str).collect();
    match wirepath_settings::nearest(name, &known) {
        Some(near) => format!("there is no port \"{name}\"; did you mean \"{near}\"?"),
        None => format!("there is no port \"{name}\"; the ports are \"{}\"", known.join("\", \"")),
    }
}

fn named_pairs(table: &Settings<'_>, ports: &[String]) -> Result<Vec<PortId>, ConfigError> {
    let mut peers: Vec<Option<PortId>> = vec![None; ports.len()];
    let pairs = table.read(&PAIRS)?;
    // A wrong element is no element of its pair.
    if table.has_error(&PAIRS) {
        return Err(table.error_in(&PAIRS, "expected pairs of port names"));
    }
    for pair in pairs {
        let [a, b] = &pair[..] else {
            let error = pair.first().map_or_else(|| table.error_in(&PAIRS, ""), |name| name.error(""));
            let message = format!("found {} names, expected two: a pair", pair.len());
            return Err(error.with_message(message));
        };
        let index = |name: &wirepath_settings::Located<String>| {
            let found = ports.iter().position(|port| *port == name.value);
            let index = found.ok_or_else(|| name.error(no_port(&name.value, ports)))?;
            if peers[index].is_some() {
                return Err(name.error(format!("port \"{}\" is in another pair already", name.value)));
            }
            Ok(index)
        };
        let (first, second) = (index(a)?, index(b)?);
        (peers[first], peers[second]) = (Some(PortId::new(second as u16)), Some(PortId::new(first as u16)));
    }
    let alone = |port: usize| table.error_in(&PAIRS, format!("port \"{}\" is in no pair", ports[port]));
    peers.into_iter().enumerate().map(|(port, peer)| peer.ok_or_else(|| alone(port))).collect()
}

#[cfg(test)]
mod tests {
    use wirepath::Config;
    use wirepath_settings::Source;

    use super::*;

    fn read(source: &Source) -> Result<Mode, String> {
        Config::parse_with(source).map(|(_, mode)| mode).map_err(|error| error.to_string())
    }

    const PORTS: &str = "[[port]]\nname = 'a'\ndriver = 'null'\n[[port]]\nname = 'b'\ndriver = 'null'\n\
                         [[port]]\nname = 'c'\ndriver = 'null'\n[[port]]\nname = 'd'\ndriver = 'null'\n";

    fn mode(text: &str) -> Result<Mode, String> {
        let source = Source::new("c.toml", format!("{PORTS}[l2fwd]\n{text}"));
        read(&source)
    }

    #[test]
    fn reads_pairs_and_bridges() {
        assert_eq!(
            mode("").unwrap(),
            Mode::Pairs {
                peers: vec![PortId::new(1), PortId::new(0), PortId::new(3), PortId::new(2)],
                rewrite_mac: false
            }
        );
        let pairs = mode("pairs = [['a', 'd'], ['c', 'b']]\nrewrite_mac = true\n").unwrap();
        assert_eq!(
            pairs,
            Mode::Pairs {
                peers: vec![PortId::new(3), PortId::new(2), PortId::new(1), PortId::new(0)],
                rewrite_mac: true
            }
        );
        assert_eq!(mode("mode = 'bridge'\nageing = 7").unwrap(), Mode::Bridge { ageing: 7 });
        read(&Source::new("demonstration", super::super::DEMONSTRATION)).unwrap();
    }

    #[test]
    fn errors_name_position_and_cause() {
        let at = |text| mode(text).unwrap_err();
        let want =
            "c.toml:14:16: l2fwd.pairs[0][1]: there is no port \"xyz\"; the ports are \"a\", \"b\", \"c\", \"d\"";
        assert_eq!(at("pairs = [['a', 'xyz']]"), want);
        assert!(at("pairs = [['a', 'b'], ['b', 'c']]").ends_with("pairs[1][0]: port \"b\" is in another pair already"));
        assert!(at("pairs = [['a', 'b']]").ends_with("l2fwd.pairs: port \"c\" is in no pair"));
        assert!(at("pairs = [['a', 'b', 'c']]").ends_with("found 3 names, expected two: a pair"));
        assert!(at("pairs = [[]]").ends_with("found 0 names, expected two: a pair"));
        assert!(at("pairs = [1]").contains("found 1, expected pairs of port names"));
        assert!(at("mode = 'brige'").contains("did you mean \"bridge\"?"));
        assert!(at("mode = 'bridge'\nrewrite_mac = true").ends_with("a bridge leaves addresses alone"));
        assert!(at("ageing = 1").ends_with("ageing is for mode = \"bridge\""));
        assert!(at("agein = 1").contains("did you mean \"ageing\"?"));
        let three = &PORTS[..PORTS.rfind("[[port]]").unwrap()];
        let error = read(&Source::new("c", three)).unwrap_err();
        assert!(error.contains("3 ports cannot be joined two by two"), "{error}");
        assert!(read(&Source::new("c", "")).unwrap_err().contains("expected at least one table [[port]]"));
    }
}
