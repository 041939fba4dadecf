//! The reference of the configuration: what it says is what the programs do.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use wirepath::Config;
use wirepath::reference::{Listed, Reference};
use wirepath::settings::{Form, KeySpec, Source};
use wirepath_apps::gateway::Setup;
use wirepath_apps::l2fwd::Mode;
use wirepath_apps::tools::config::reference::{PAGE_COMMAND, TOPOLOGY_PAGE_COMMAND, reference, topology};
use wirepath_nic_emulator::topology::Topology;

fn wirepath(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_wirepath")).args(["config", "reference"]).args(arguments).output().unwrap()
}

fn shown(arguments: &[&str]) -> String {
    let output = wirepath(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A program that reads a file.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Reader {
    Gateway,
    L2fwd,
    Emulator,
}

/// Place of a table in a valid file.
#[derive(Clone, Debug)]
struct Place {
    reader: Reader,
    /// Everything before the table.
    before: String,
    /// The table with what it needs, open for further keys.
    table: String,
    /// Between a key and its predecessor, and behind it.
    separators: (&'static str, &'static str),
    /// Everything behind the table.
    after: &'static str,
}

const PORTS: &str = "[[port]]\nname = \"lan\"\ndevice = \"eth1\"\n[[port]]\nname = \"wan\"\ndevice = \"eth2\"\n";
const UNDERLAY: &str = "[underlay]\nport = \"wan\"\naddresses = [\"10.9.0.1/24\"]\n";

impl Place {
    /// The place of a table `[[segment]]` that is a layer-3 tunnel.
    fn of_routed_tunnel() -> Self {
        let network = "[[segment]]\nremotes = [\"10.9.0.2\"]\naddresses = [\"10.1.0.1/24\"]\n";
        Self { table: network.to_owned(), ..Self::of("segment").expect("the table is known") }
    }

    /// The place of a table; `None` if this test does not know the table.
    fn of(path: &str) -> Option<Self> {
        let reader = |is_gateway| if is_gateway { Reader::Gateway } else { Reader::L2fwd };
        let place = |is_gateway, before: &str, table: &str| {
            let (before, table) = (before.to_owned(), table.to_owned());
            Some(Self { reader: reader(is_gateway), before, table, separators: ("", "\n"), after: "" })
        };
        let inline = |is_gateway, before: &str, table: &str| {
            let (before, table) = (before.to_owned(), table.to_owned());
            Some(Self { reader: reader(is_gateway), before, table, separators: (", ", ""), after: " }]\n" })
        };
        let port = |driver: &str, device: &str| format!("[[port]]\nname = \"third\"\ndriver = \"{driver}\"\n{device}");
        let segment = format!("{PORTS}{UNDERLAY}[[segment]]\nvni = 16\nremotes = [\"10.9.0.2\"]\n");
        let lan = "ports = [{ port = \"lan\" }]\n";
        match path {
            "workers" | "pool" | "control" | "privileges" | "log" | "rules" | "l2fwd" => {
                place(false, PORTS, &format!("[{path}]\n"))
            }
            "port" => place(false, "[l2fwd]\nmode = \"bridge\"\n", "[[port]]\nname = \"a\"\ndevice = \"eth3\"\n"),
            "port.null" | "port.pcap" | "port.memory" | "port.tap" | "port.xdp_live" | "port.verbs" | "port.mlx5"
            | "port.mana" | "port.af_xdp" | "port.af_packet" | "port.auto" | "port.null.vxlan" => {
                let driver = path.split('.').nth(1)?;
                // The example of pcap names a file itself.
                let device = if driver == "pcap" { "" } else { "device = \"eth3\"\n" };
                let before = format!("[l2fwd]\nmode = \"bridge\"\n{}", port(driver, device));
                let table = match path {
                    "port.pcap" => "[port.pcap]\nread = \"in.pcap\"\n".to_owned(),
                    "port.null.vxlan" => "[port.null.vxlan]\nsource_mac = \"02:00:00:00:00:01\"\n\
                        destination_mac = \"02:00:00:00:00:02\"\nsource = \"10.9.0.2\"\ndestination = \"10.9.0.1\"\n"
                        .to_owned(),
                    _ => format!("[{path}]\n"),
                };
                place(false, &before, &table)
            }
            "port.faults" | "port.faults.rx" | "port.faults.tx" => {
                let before = format!("[l2fwd]\nmode = \"bridge\"\n{}", port("null", ""));
                place(false, &before, &format!("[{path}]\n"))
            }
            "rule" => place(false, PORTS, "[[rule]]\nactions = [{ action = \"drop\" }]\n"),
            "rule.pattern" => inline(
                false,
                &format!("{PORTS}[[rule]]\ndirection = \"ingress\"\nactions = [{{ action = \"drop\" }}]\n"),
                "pattern = [{ item = \"ipv4\"",
            ),
            "rule.actions" => {
                inline(false, &format!("{PORTS}[[rule]]\ndirection = \"ingress\"\n"), "actions = [{ action = \"drop\"")
            }
            "underlay" => place(true, &format!("{segment}{lan}").replace(UNDERLAY, ""), UNDERLAY),
            "segment" => place(
                true,
                &format!("{PORTS}[[port]]\nname = \"lan2\"\ndevice = \"eth3\"\n{UNDERLAY}"),
                &format!("[[segment]]\nvni = 16\nremotes = [\"10.9.0.2\", \"10.9.0.3\"]\n{lan}"),
            ),
            "segment.ports" => inline(
                true,
                &format!("[[port]]\nname = \"lan2\"\ndevice = \"eth3\"\n{segment}"),
                "ports = [{ port = \"lan\"",
            ),
            "segment.geneve_options" => inline(
                true,
                &format!("{segment}{lan}kind = \"geneve\"\n"),
                "geneve_options = [{ class = 0x0102, type = 1",
            ),
            "segment.gre" => place(true, &format!("{segment}{lan}kind = \"gretap\"\n"), "[segment.gre]\n"),
            "segment.mpls" => place(true, &format!("{segment}{lan}kind = \"mpls-udp\"\n"), "[segment.mpls]\n"),
            "segment.srv6" => {
                let table = "[segment.srv6]\nlocal_sid = \"fd00:9::100\"\nsegs = [\"fd00:9::200\"]\n";
                let segment = "[[segment]]\nkind = \"srv6\"\npayload = \"ip\"\nremotes = [\"fd00:9::2\"]\n\
                               addresses = [\"10.255.0.1/30\"]\n";
                let underlay = UNDERLAY.replace("10.9.0.1/24", "fd00:9::1/64") + "gateways = [\"fd00:9::fe\"]\n";
                place(true, &format!("{PORTS}{underlay}{segment}"), table)
            }
            "segment.neighbours" => inline(
                true,
                &format!("{segment}{lan}neighbour_suppression = true\n"),
                "neighbours = [{ address = \"10.1.0.1\", mac = \"02:00:00:00:00:01\"",
            ),
            "segment.static" => inline(
                true,
                &format!(
                    "[[port]]\nname = \"lan2\"\ndevice = \"eth3\"\n{segment}\
                     ports = [{{ port = \"lan2\", vlan = 1 }}, {{ port = \"lan2\", vlan = 4094 }}]\n"
                ),
                "static = [{ mac = \"02:00:00:00:00:01\"",
            ),
            "segment.backups" => inline(
                true,
                &format!(
                    "[bfd]\n{}{lan}",
                    segment.replace("remotes = [\"10.9.0.2\"]", "remotes = [\"10.9.0.2\", \"10.9.0.3\"]")
                ),
                "backups = [{ primary = \"10.9.0.2\", backup = \"10.9.0.3\"",
            ),
            "bfd" => {
                let segment = segment.replace("remotes = [", "remotes = [\"10.9.0.9\", ");
                place(true, &format!("{segment}{lan}"), "[bfd]\n")
            }
            "state" => place(true, &format!("{segment}{lan}"), "[state]\nfile = \"gateway.state\"\n"),
            "vrf" => place(
                true,
                &format!("{segment}{lan}vrf = \"red\"\naddresses = [\"10.1.0.1/24\"]\n"),
                "[[vrf]]\nname = \"red\"\n",
            ),
            "vrf.routes" => inline(
                true,
                &format!("{segment}{lan}addresses = [\"10.1.0.1/24\"]\n[[vrf]]\nname = \"default\"\n"),
                "routes = [{ to = \"10.2.0.0/16\"",
            ),
            "vrf.routes.next_hops" => inline(
                true,
                &format!(
                    "{segment}{lan}addresses = [\"10.1.0.1/24\"]\n[[vrf]]\nname = \"default\"\n\
                     [[vrf.routes]]\nto = \"10.2.0.0/16\"\n"
                ),
                "next_hops = [{ via = \"10.1.0.9\"",
            ),
            _ => None,
        }
    }

    /// The place of a table in a topology; `None` if this test does not know the table.
    fn in_topology(path: &str) -> Option<Self> {
        const DEVICE: &str = "[[device]]\nkind = \"mlx5\"\n";
        const PORT: &str = "[[device.port]]\n";
        let place = |before: String, table: &str, after| {
            let (reader, table) = (Reader::Emulator, table.to_owned());
            Some(Self { reader, before, table, separators: ("", "\n"), after })
        };
        match path {
            "" => place(String::new(), "", "[[device]]\nkind = \"mlx5\"\n[[device.port]]\n"),
            "device" => place(String::new(), DEVICE, PORT),
            "device.port" => place(DEVICE.to_owned(), PORT, ""),
            "device.steering" => place(DEVICE.to_owned(), "[device.steering]\n", PORT),
            "fault" => place(format!("{DEVICE}{}", PORT.repeat(8)), "[[fault]]\nkind = \"device-fatal\"\n", ""),
            _ => None,
        }
    }

    /// The example of the table with what a valid file needs around it.
    fn with_example(&self, example: &str) -> Result<String, String> {
        match (self.reader, self.separators.0) {
            // The example of a device has its port.
            (Reader::Emulator, _) if example.contains("[[device.port]]") && !example.contains("[[device]]") => {
                self.read_table(example)
            }
            (Reader::Emulator, _) if example.contains("[[device]]") => {
                Self { after: "", ..self.clone() }.read_table(example)
            }
            (_, "") => self.read_table(example),
            _ => Self { after: "", ..self.clone() }.read_table(example),
        }
    }

    /// Reads the configuration with these lines at the end of the table. The result shows all that was read.
    fn read(&self, lines: &[&str]) -> Result<String, String> {
        let mut table = self.table.clone();
        for line in lines.iter().filter(|line| !line.is_empty()) {
            // A key that the place has already is replaced.
            let name = format!("{} = ", line.split(' ').next().unwrap());
            let end = if self.separators.0.is_empty() { "\n" } else { ", " };
            match table
                .find(&format!("\n{name}"))
                .map(|at| at + 1)
                .or_else(|| table.find(&format!("{{ {name}")).map(|at| at + 2))
                .or_else(|| table.find(&format!(", {name}")).map(|at| at + 2))
            {
                Some(at) => {
                    let end = table[at..].find(end).map_or(table.len(), |length| at + length);
                    table.replace_range(at..end, line);
                }
                None => table = table + self.separators.0 + line + self.separators.1,
            }
        }
        self.read_table(&table)
    }

    fn read_table(&self, table: &str) -> Result<String, String> {
        let text = format!("{}{table}{}", self.before, self.after);
        let source = Source::new("/etc/wirepath/c.toml", &text);
        let read = match self.reader {
            Reader::Emulator => Topology::read(&source).map(|it| format!("{it:?}")).map_err(|error| error.to_string()),
            Reader::Gateway => Setup::read(&source).map(|it| format!("{it:?}")).map_err(|error| error.to_string()),
            Reader::L2fwd => Config::read(&source, Config::tables::<Mode>(), <Mode as wirepath::AppSettings>::read)
                .map(|it| format!("{it:?}"))
                .map_err(|error| error.to_string()),
        };
        read.map(|shown| without_offsets(&shown)).map_err(|error| format!("{error}\nin\n{text}"))
    }
}

/// Leaves out positions in the text, which a further key may move.
fn without_offsets(shown: &str) -> String {
    let mut parts = shown.split("offset: ");
    let mut kept = parts.next().unwrap_or_default().to_owned();
    parts.for_each(|part| kept += part.trim_start_matches(|c: char| c.is_ascii_digit()));
    kept
}

/// All tables with their places.
fn tables() -> Vec<(Listed, Place)> {
    let missing = |path: &str| -> ! { panic!("write a place for the table {path}") };
    let programs =
        reference().tables.into_iter().map(|it| (Place::of(&it.path).unwrap_or_else(|| missing(&it.path)), it));
    let emulator =
        topology().tables.into_iter().map(|it| (Place::in_topology(&it.path).unwrap_or_else(|| missing(&it.path)), it));
    programs.chain(emulator).map(|(place, it)| (it, place)).collect()
}

/// All keys with their tables and places.
fn keys(tables: &[(Listed, Place)]) -> Vec<(&Listed, &'static dyn KeySpec, &Place)> {
    tables.iter().flat_map(|(listed, place)| listed.table.keys.iter().map(move |key| (listed, *key, place))).collect()
}

#[test]
fn every_table_has_a_purpose_and_a_valid_example() {
    for (listed, place) in tables() {
        let table = listed.table;
        assert!(!table.about.is_empty() && !table.example.is_empty(), "{}", listed.path);
        let example = place.with_example(table.example);
        assert!(example.is_ok(), "{}: {}", listed.path, example.unwrap_err());
    }
}

#[test]
fn every_key_says_what_it_means() {
    for (listed, key, _) in keys(&tables()) {
        let name = format!("{}.{}", listed.path, key.name());
        assert!(key.about().ends_with('.') && key.about().len() > 10, "{name}: {}", key.about());
        let default = key.default().is_some() || !key.absent().is_empty() || key.is_required();
        assert!(default, "{name} does not say what a missing key means");
        if let Form::Choice(words) = key.form() {
            assert!(words.iter().all(|word| !word.about.is_empty()), "{name}");
        }
    }
}

#[test]
fn defaults_are_those_in_force() {
    let mut compared = 0;
    for (listed, key, place) in keys(&tables()) {
        let Some(default) = key.default() else { continue };
        let name = format!("{}.{}", listed.path, key.name());
        let without = place.read(&[key.when()]).unwrap_or_else(|error| panic!("{name}: {error}"));
        let with = place.read(&[key.when(), &format!("{} = {default}", key.name())]);
        assert_eq!(with.unwrap_or_else(|error| panic!("{name}: {error}")), without, "{name} = {default}");
        compared += 1;
    }
    assert!(compared > 50, "{compared}");
}

#[test]
fn bounds_and_choices_are_those_in_force() {
    let mut tried = 0;
    for (listed, key, place) in keys(&tables()) {
        let name = format!("{}.{}", listed.path, key.name());
        let form = match key.form() {
            Form::List(item) => *item,
            form => form,
        };
        let mut accept = |value: String, needs: &str| {
            let line = format!("{} = {value}", key.name());
            place.read(&[key.when(), needs, &line]).unwrap_or_else(|error| panic!("{name} = {value}: {error}"));
            tried += 1;
        };
        let refuse = |value: String, why: &str| {
            let line = format!("{} = {value}", key.name());
            let error = place.read(&[key.when(), &line]).expect_err(&format!("{name} = {value}"));
            assert!(error.lines().any(|line| line.contains(key.name()) && line.contains(why)), "{name}: {error}");
        };
        match form {
            Form::Flag => {
                accept("true".to_owned(), "");
                accept("false".to_owned(), "");
                refuse("1".to_owned(), "expected true or false");
            }
            Form::Integer { min, max, .. } => {
                accept(min.to_string(), "");
                accept(max.to_string(), "");
                let why = format!("expected an integer from {min} to {max}");
                refuse((i128::from(min) - 1).to_string(), &why);
                // TOML has no larger integers.
                if max < i64::MAX {
                    refuse((max + 1).to_string(), &why);
                }
            }
            Form::Number { min, max, .. } => {
                accept(format!("{min:?}"), "");
                accept(format!("{max:.1}"), "");
                let below = if min == 0.0 { -0.01 } else { min * 0.99 };
                refuse(format!("{below:?}"), "expected a number");
                refuse(format!("{:.3}", max * 1.01), "expected a number");
            }
            Form::Choice(words) => {
                for word in words {
                    if ["segment.kind = gre", "segment.kind = ipip", "segment.payload = ip"]
                        .contains(&format!("{name} = {}", word.word).as_str())
                    {
                        let line = format!("{} = \"{}\"", key.name(), word.word);
                        let read = Place::of_routed_tunnel().read(&[key.needs(word.word).unwrap_or_default(), &line]);
                        read.unwrap_or_else(|error| panic!("{name} = {}: {error}", word.word));
                        continue;
                    }
                    if (name.as_str(), word.word) == ("segment.kind", "srv6") {
                        let place = Place::of("segment.srv6").expect("the table is known");
                        place.read(&[]).unwrap_or_else(|error| panic!("{name} = srv6: {error}"));
                        continue;
                    }
                    if (name.as_str(), word.word) == ("segment.control", "kernel") {
                        let table = place.table.replace("remotes = [\"10.9.0.2\", \"10.9.0.3\"]\n", "");
                        let read = Place { table, ..place.clone() }.read(&["control = \"kernel\""]);
                        read.unwrap_or_else(|error| panic!("{name} = kernel: {error}"));
                        continue;
                    }
                    accept(format!("\"{}\"", word.word), key.needs(word.word).unwrap_or_default());
                }
                refuse("\"no such word\"".to_owned(), "expected one of");
            }
            Form::Text(_) => refuse("7".to_owned(), "expected a string"),
            Form::Other(_) | Form::Lists(_) => refuse("[[{ }]]".to_owned(), "expected"),
            Form::List(_) => panic!("{name}: a list of lists has a form of its own"),
        }
    }
    assert!(tried > 150, "{tried}");
}

fn configurations() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|it| it == "toml")).collect();
    files.sort();
    files
}

/// Asserts that a table of a file and the tables inside have only described keys. Returns the number of keys.
fn check_table(file: &str, reference: &Reference, path: &str, table: &dyn toml_edit::TableLike) -> usize {
    let is_path = |listed: &&Listed| listed.path == path || listed.also.iter().any(|also| also == path);
    let listed = reference.tables.iter().find(is_path);
    let listed = listed.unwrap_or_else(|| panic!("{file}: the table {path} has no description"));
    let mut count = 0;
    for (key, item) in table.iter() {
        count += 1;
        if listed.table.keys.iter().any(|known| known.name() == key) || !listed.table.others.is_empty() {
            continue;
        }
        count += check_item(file, reference, &format!("{path}.{key}"), item);
    }
    count
}

fn check_item(file: &str, reference: &Reference, path: &str, item: &toml_edit::Item) -> usize {
    if let Some(table) = item.as_table_like() {
        return check_table(file, reference, path, table);
    }
    if let Some(tables) = item.as_array_of_tables() {
        return tables.iter().map(|table| check_table(file, reference, path, table)).sum();
    }
    let Some(array) = item.as_array() else { panic!("{file}: the key {path} has no description") };
    let tables = array.iter().map(|value| value.as_inline_table().unwrap_or_else(|| panic!("{file}: {path}")));
    tables.map(|table| check_table(file, reference, path, table)).sum()
}

#[test]
fn examples_have_only_described_keys() {
    let mut count = 0;
    for path in configurations() {
        let file = path.display().to_string();
        let reference = if file.contains("/emulated-") { topology() } else { reference() };
        let document: toml_edit::DocumentMut = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        let top = reference.tables.iter().find(|listed| listed.path.is_empty());
        let is_key = |name: &str| top.is_some_and(|top| top.table.key(name).is_some());
        let document = document.iter().filter(|(name, _)| !is_key(name));
        count += document.map(|(name, item)| check_item(&file, &reference, name, item)).sum::<usize>();
    }
    assert!(count > 100, "{count}");
}

#[test]
fn the_pages_of_the_guide_are_up_to_date() {
    let pages: [(&str, &[&str], &str); 2] = [
        ("configuration.md", &["--markdown"], PAGE_COMMAND),
        ("topology.md", &["--topology", "--markdown"], TOPOLOGY_PAGE_COMMAND),
    ];
    for (name, arguments, command) in pages {
        let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("guide").join(name));
        let is_same = page.is_ok_and(|page| page == shown(arguments));
        assert!(is_same, "run `cargo run --bin {}`", command.replacen(' ', " -- ", 1));
    }
}

#[test]
fn a_key_is_found_by_its_name_alone() {
    let text = shown(&["sleep_below"]);
    for part in
        ["[workers]", "sleep_below  integer from 1 to", "packets per second", "default: 20000", "idle = \"sleep\""]
    {
        assert!(text.contains(part), "{part} is missing in\n{text}");
    }
    let text = shown(&["vlan"]);
    for table in ["[underlay] of tunnel-gateway", "segment.ports = [{ ... }, ...]", "[port.null]"] {
        assert!(text.contains(table), "{table} is missing in\n{text}");
    }
    // A key as errors name it.
    assert!(shown(&["port[1].mtu"]).contains("integer from 68 to 9202, in bytes"));
    let all = shown(&[]);
    assert!(all.lines().all(|line| line.chars().count() <= 100) && all.contains("\n[workers]\n"), "{all}");
    // Only topologies have this key and this table.
    assert!(shown(&["modify_actions"]).contains("[device.steering]"));
    assert!(shown(&["device.port"]).contains("own_address_only"));
    assert!(shown(&["--topology", "mtu"]).contains("integer from 576 to 9978, in bytes"));
    let output = wirepath(&["workers.coers"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(error.contains("did you mean \"workers.cores\"?"), "{error}");
}

#[test]
fn json_has_all_tables_and_keys() {
    let json = |arguments: &[&str]| -> serde_json::Value { serde_json::from_str(&shown(arguments)).unwrap() };
    let all = json(&["--json"]);
    let reference = reference();
    assert_eq!(all["tables"].as_array().unwrap().len(), reference.tables.len());
    let found = json(&["sleep_below", "--json"]);
    assert_eq!(found["tables"].as_array().unwrap().len(), 1);
    let key = &found["tables"][0]["keys"][0];
    assert_eq!(
        (&key["name"], &key["type"], &key["default"]),
        (&"sleep_below".into(), &"integer".into(), &"20000".into())
    );
    assert_eq!((&key["min"], &key["max"], &key["unit"]), (&1.into(), &u32::MAX.into(), &"packets per second".into()));
}
