//! The objects of a gateway's configuration that can be changed alone while the program runs.

use toml_edit::TableLike;
use wirepath_pipeline::registry::ArgumentKind::{Attachments, Flag, List, Number, NumberOrText, Rule, Text, Toml};
use wirepath_pipeline::registry::{Argument, ObjectSpec, Operation};

use wirepath::configuration::{ConfigObject, PORT, Parent, Place};

/// All kinds of objects.
pub(super) static OBJECTS: [&ConfigObject; 15] = [
    &PORT,
    &SEGMENT,
    &REMOTE,
    &BACKUP,
    &ATTACHMENT,
    &STATIC,
    &NEIGHBOUR,
    &ADDRESS,
    &NEXT_HOP,
    &UNDERLAY,
    &BFD,
    &VRF,
    &ROUTE,
    &SEGMENT_FILTER,
    &VRF_FILTER,
];

/// Name of a segment without the key `name`, as [`wirepath_pipeline::tunnel::config`] gives it.
fn unnamed(table: &dyn TableLike) -> Option<String> {
    match table.get("vni") {
        Some(vni) => vni.as_integer().map(|vni| format!("vni{vni}")),
        None => table.get("kind")?.as_str().map(str::to_owned),
    }
}

const IN_SEGMENT: Parent = Parent::Named { key: "segment", argument: "segment", unnamed };
const NAME: Argument = Argument::required("name", Text, "name of the segment");
const OF_SEGMENT: Argument = Argument::required("segment", Text, "name of the segment");
const MAC: Argument = Argument::required("mac", Text, "Ethernet address");

/// Declares the keys of a segment that have defaults, after other arguments.
macro_rules! segment_keys {
    ($($first:expr,)*) => {
        &[
            $($first,)*
            Argument::optional("vni", Number, "network identifier; most kinds need one"),
            Argument::optional("kind", Text, "kind of the tunnels; without it, that of the underlay"),
            Argument::optional("payload", Text, "payload of the tunnels: ethernet or ip"),
            Argument::optional("gre", Toml, "fields of GRE headers, as in { checksum = true }"),
            Argument::optional("geneve_options", Toml, "GENEVE options, as in [{ class = 0x102, type = 1 }]"),
            Argument::optional("mpls", Toml, "form of pseudowires, as in { control_word = false }"),
            Argument::optional("srv6", Toml, "SIDs, as in { local_sid = 'fc00:1::100', segs = ['fc00:2::100'] }"),
            Argument::optional("control", Text, "source of the remotes: static or kernel"),
            Argument::optional("remotes", List, "addresses of the remotes, with commas between"),
            Argument::optional("ports", Attachments, "ports with their VLAN, as in lan,lan2.100"),
            Argument::optional("local", Text, "own address of the tunnels"),
            Argument::optional("learning", Flag, "whether addresses are learned"),
            Argument::optional("ageing", Number, "seconds until an unseen address is removed; 0: never"),
            Argument::optional("mtu", Number, "largest inner IP packet in bytes"),
            Argument::optional("accept_unknown_remotes", Flag, "whether unlisted VTEPs are accepted and learned"),
            Argument::optional("inner_vlans", Text, "tags inside the tunnel: discard or carry"),
            Argument::optional("clamp_mss", Flag, "whether the MSS of TCP connections is lowered"),
            Argument::optional("outer_fragmentation", Flag, "whether long tunnel packets are sent as IP fragments"),
            Argument::optional("vrf", Text, "VRF of the segment's router"),
            Argument::optional("addresses", List, "addresses of the router with their prefix lengths"),
            Argument::optional("router_mac", Text, "Ethernet address of the router"),
            Argument::optional("broadcast_limit", Number, "most flooded broadcast frames per second"),
            Argument::optional("multicast_limit", Number, "most flooded multicast frames per second"),
            Argument::optional("unknown_unicast_limit", Number, "most flooded unknown unicast frames per second"),
            Argument::optional("mac_limit", Number, "most addresses that the segment learns"),
            Argument::optional("remote_mac_limit", Number, "most addresses that are learned behind each remote"),
            Argument::optional("neighbour_suppression", Flag, "whether known ARP and ND requests are answered"),
            Argument::optional("mirror", Text, "port that gets copies of all frames"),
            Argument::optional("move_limit", Number, "moves after which an address is frozen; 0: any number"),
            Argument::optional("move_window", Number, "seconds in which moves are counted"),
            Argument::optional("freeze_time", Number, "seconds for which an address is frozen; 0: until it is removed"),
        ]
    };
}

static SEGMENT: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "segment",
        about: "A layer-2 network of local ports and remotes, or a layer-3 tunnel; an empty value means the default",
        operations: &[
            (Operation::Add, segment_keys![NAME,]),
            (Operation::Set, segment_keys![NAME,]),
            (Operation::Remove, &[NAME]),
        ],
    },
    place: Place::Tables { key: "segment", unnamed },
};

static REMOTE: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "remote",
        about: "A remote VTEP of a segment",
        operations: &[(Operation::Add, REMOTE_ARGUMENTS), (Operation::Remove, REMOTE_ARGUMENTS)],
    },
    place: Place::Values { parent: IN_SEGMENT, key: "remotes", argument: "address" },
};
const REMOTE_ARGUMENTS: &[Argument] = &[OF_SEGMENT, Argument::required("address", Text, "IP address of the remote")];

static BACKUP: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "backup",
        about: "A remote that carries frames only while another remote of the segment is down",
        operations: &[
            (Operation::Add, BACKUP_ARGUMENTS),
            (Operation::Set, BACKUP_ARGUMENTS),
            (Operation::Remove, &[OF_SEGMENT, PRIMARY]),
        ],
    },
    place: Place::Elements { parent: IN_SEGMENT, key: "backups", identity: &["primary"] },
};
const PRIMARY: Argument = Argument::required("primary", Text, "IP address of the remote that it replaces");
const BACKUP_ARGUMENTS: &[Argument] =
    &[OF_SEGMENT, PRIMARY, Argument::optional("backup", Text, "IP address of the backup")];

static ATTACHMENT: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "attachment",
        about: "A local port of a segment, or a VLAN of one; an empty value means the default",
        operations: &[
            (Operation::Add, ATTACHMENT_ARGUMENTS),
            (Operation::Set, ATTACHMENT_ARGUMENTS),
            (Operation::Remove, &[OF_SEGMENT, ATTACHED_PORT, ATTACHED_VLAN]),
        ],
    },
    place: Place::Elements { parent: IN_SEGMENT, key: "ports", identity: &["port", "vlan"] },
};
const ATTACHED_PORT: Argument = Argument::required("port", Text, "name of the port");
const ATTACHED_VLAN: Argument =
    Argument::optional("vlan", Number, "VLAN ID on the port; without it, frames without a tag");
const ATTACHMENT_ARGUMENTS: &[Argument] = &[
    OF_SEGMENT,
    ATTACHED_PORT,
    ATTACHED_VLAN,
    Argument::optional("mac_limit", Number, "most addresses that are learned there"),
    Argument::optional("sticky", Flag, "whether addresses that are learned there stay there"),
    Argument::optional("isolated", Flag, "whether no frames pass between it and other isolated ports"),
];

static STATIC: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "static",
        about: "A static forwarding entry, which does not age or move",
        operations: &[
            (Operation::Add, STATIC_ARGUMENTS),
            (Operation::Set, STATIC_ARGUMENTS),
            (Operation::Remove, &[OF_SEGMENT, MAC]),
        ],
    },
    place: Place::Elements { parent: IN_SEGMENT, key: "static", identity: &["mac"] },
};

const STATIC_ARGUMENTS: &[Argument] = &[
    OF_SEGMENT,
    MAC,
    Argument::optional("remote", Text, "configured remote behind which the address is"),
    Argument::optional("port", Text, "port behind which the address is"),
    Argument::optional("vlan", Number, "VLAN ID on the port"),
];

static NEIGHBOUR: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "neighbour",
        about: "The Ethernet address of a host's IP address, for neighbour suppression",
        operations: &[
            (Operation::Add, NEIGHBOUR_ARGUMENTS),
            (Operation::Set, NEIGHBOUR_ARGUMENTS),
            (Operation::Remove, &[OF_SEGMENT, HOST_ADDRESS]),
        ],
    },
    place: Place::Elements { parent: IN_SEGMENT, key: "neighbours", identity: &["address"] },
};
const HOST_ADDRESS: Argument = Argument::required("address", Text, "IP address of the host");
const NEIGHBOUR_ARGUMENTS: &[Argument] = &[
    OF_SEGMENT,
    HOST_ADDRESS,
    Argument::optional("mac", Text, "its Ethernet address"),
    Argument::optional("router", Flag, "whether it is an IPv6 router"),
];

static ADDRESS: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "address",
        about: "An address of the gateway on the underlay",
        operations: &[(Operation::Add, ADDRESS_ARGUMENTS), (Operation::Remove, ADDRESS_ARGUMENTS)],
    },
    place: Place::Values { parent: Parent::Table("underlay"), key: "addresses", argument: "address" },
};
const ADDRESS_ARGUMENTS: &[Argument] =
    &[Argument::required("address", Text, "IP address with its prefix length, as in 10.9.0.1/24")];

static NEXT_HOP: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "gateway",
        about: "The next hop for remotes in other networks, one for each IP version",
        operations: &[(Operation::Add, NEXT_HOP_ARGUMENTS), (Operation::Remove, NEXT_HOP_ARGUMENTS)],
    },
    place: Place::Values { parent: Parent::Table("underlay"), key: "gateways", argument: "address" },
};
const NEXT_HOP_ARGUMENTS: &[Argument] = &[Argument::required("address", Text, "IP address of the next hop")];

static UNDERLAY: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "underlay",
        about: "Properties of all tunnels; an empty value means the default",
        operations: &[(
            Operation::Set,
            &[
                Argument::optional("vlan", Number, "VLAN ID of the underlay"),
                Argument::optional("source_ports", Text, "range of outer source ports, as in 49152-65535"),
                Argument::optional("ttl", Number, "outer TTL or hop limit"),
                Argument::optional("dscp", NumberOrText, "outer DSCP, or copy"),
                Argument::optional("udp_checksum", Text, "standard, always or zero"),
                Argument::optional("reassembly", Flag, "whether fragments of tunnel packets are joined"),
            ],
        )],
    },
    place: Place::Table { key: "underlay" },
};

static BFD: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "bfd",
        about: "Properties of all BFD sessions; an empty value means the default",
        operations: &[(
            Operation::Set,
            &[
                Argument::optional("transmit_interval", Number, "milliseconds between two sent packets"),
                Argument::optional("receive_interval", Number, "milliseconds between two received packets"),
                Argument::optional("multiplier", Number, "intervals without a packet until the remote is down"),
                Argument::optional("multihop", Flag, "whether all sessions are multihop ones"),
                Argument::optional("minimum_ttl", Number, "smallest TTL of received packets of multihop sessions"),
                Argument::optional("management_vni", Number, "VNI of control packets in VXLAN tunnels"),
                Argument::optional("peer_admin_down", Text, "what a remote does that ends its session: leave or stay"),
                Argument::optional("except", List, "remotes without a session, with commas between"),
            ],
        )],
    },
    place: Place::Table { key: "bfd" },
};

/// A VRF always has its name.
fn nameless(_: &dyn TableLike) -> Option<String> {
    None
}

static VRF: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "vrf",
        about: "A routing table for the routers of segments",
        operations: &[
            (Operation::Add, VRF_ARGUMENTS),
            (Operation::Set, VRF_ARGUMENTS),
            (Operation::Remove, &[Argument::required("name", Text, "name of the VRF")]),
        ],
    },
    place: Place::Tables { key: "vrf", unnamed: nameless },
};
const VRF_ARGUMENTS: &[Argument] = &[
    Argument::required("name", Text, "name of the VRF"),
    Argument::optional("source_check", Text, "check of source addresses: off, loose or strict"),
];

static ROUTE: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "route",
        about: "A static route of a VRF that has a table",
        operations: &[
            (Operation::Add, ROUTE_ARGUMENTS),
            (Operation::Set, ROUTE_ARGUMENTS),
            (Operation::Remove, &[OF_VRF, TO]),
        ],
    },
    place: Place::Elements { parent: IN_VRF, key: "routes", identity: &["to"] },
};
const IN_VRF: Parent = Parent::Named { key: "vrf", argument: "vrf", unnamed: nameless };
const OF_VRF: Argument = Argument::required("vrf", Text, "name of the VRF");
const TO: Argument = Argument::required("to", Text, "network of the destinations, as in 10.2.0.0/16");
const ROUTE_ARGUMENTS: &[Argument] = &[
    OF_VRF,
    TO,
    Argument::optional("via", List, "addresses of the next hops, with commas between"),
    Argument::optional("lookup", Text, "VRF whose routes decide instead"),
    Argument::optional("discard", Text, "blackhole, unreachable or prohibit"),
];

static SEGMENT_FILTER: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "segment_filter",
        about: "A flow rule for the frames that enter a segment",
        operations: &[(Operation::Add, &[OF_SEGMENT, RULE]), (Operation::Remove, &[OF_SEGMENT, RULE])],
    },
    place: Place::Values { parent: IN_SEGMENT, key: "filter", argument: "rule" },
};
const RULE: Argument = Argument::required("rule", Rule, "the rule as text; actions are count, drop and limit");

static VRF_FILTER: ConfigObject = ConfigObject {
    spec: &ObjectSpec {
        name: "vrf_filter",
        about: "A flow rule for the packets that the routers of a VRF with a table take",
        operations: &[(Operation::Add, &[OF_VRF, RULE]), (Operation::Remove, &[OF_VRF, RULE])],
    },
    place: Place::Values { parent: IN_VRF, key: "filter", argument: "rule" },
};

#[cfg(test)]
mod tests {
    use serde_json::json;
    use toml_edit::DocumentMut;
    use wirepath_pipeline::registry::Operation::{self, Add, Remove, Set};

    use super::*;
    use wirepath::configuration::Edit;

    const TEXT: &str = "\
# ports
[[port]]
name = 'lan.5'
[[port]]
name = 'lan'

[underlay] # the underlay
addresses = '10.9.0.1/24'

[[segment]]
vni = 42 # blue
remotes = ['10.9.0.2', 'FD00::2']
ports = [{ port = 'lan' }]
";

    fn edit(operation: Operation, object: &str, arguments: serde_json::Value) -> Edit {
        let object = OBJECTS.iter().find(|it| it.spec.name == object).unwrap();
        Edit { object, operation, arguments: arguments.as_object().unwrap().clone() }
    }

    fn apply(document: &mut DocumentMut, operation: Operation, object: &str, arguments: serde_json::Value) -> String {
        let mut changed = document.clone();
        match edit(operation, object, arguments).apply(&mut changed) {
            Ok(()) => {
                *document = changed;
                String::new()
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn objects_are_edited_in_their_place() {
        let mut document: DocumentMut = TEXT.parse().unwrap();
        for (operation, object, arguments) in [
            (Add, "remote", json!({ "segment": "vni42", "address": "10.9.0.3" })),
            (Remove, "remote", json!({ "segment": "vni42", "address": "fd00:0::2" })),
            (Add, "segment", json!({ "name": "red", "vni": "7", "ports": "lan.5,lan.6", "learning": "false" })),
            (Add, "attachment", json!({ "segment": "red", "port": "lan", "vlan": 8 })),
            (Remove, "attachment", json!({ "segment": "red", "port": "lan", "vlan": "6" })),
            (Set, "segment", json!({ "name": "red", "mtu": 1300, "learning": "" })),
            (Add, "address", json!({ "address": "fd00::1/64" })),
            (Set, "underlay", json!({ "dscp": "copy", "ttl": "9" })),
            (Add, "static", json!({ "segment": "red", "mac": "02:00:00:00:00:0a", "port": "lan", "vlan": 8 })),
            (Set, "bfd", json!({ "multiplier": 5, "except": "10.9.0.9" })),
            (Set, "bfd", json!({ "multiplier": "" })),
            (Add, "segment", json!({ "name": "sid", "srv6": "{ local_sid = 'fd00::9', segs = ['fd00::2'] }" })),
            (Add, "backup", json!({ "segment": "vni42", "primary": "10.9.0.2", "backup": "10.9.0.3" })),
            (Set, "backup", json!({ "segment": "vni42", "primary": "10.9.0.2", "backup": "10.9.0.4" })),
        ] {
            assert_eq!(apply(&mut document, operation, object, arguments), "");
        }
        assert_eq!(
            document.to_string(),
            "\
# ports
[[port]]
name = 'lan.5'
[[port]]
name = 'lan'

[underlay] # the underlay
addresses = ['10.9.0.1/24', \"fd00::1/64\"]
ttl = 9
dscp = \"copy\"

[[segment]]
vni = 42 # blue
remotes = ['10.9.0.2', \"10.9.0.3\"]
ports = [{ port = 'lan' }]
backups = [{ primary = \"10.9.0.2\", backup = \"10.9.0.4\" }]

[[segment]]
name = \"red\"
vni = 7
ports = [{ port = \"lan.5\" }, { port = \"lan\", vlan = 8 }]
mtu = 1300
static = [{ mac = \"02:00:00:00:00:0a\", port = \"lan\", vlan = 8 }]

[[segment]]
name = \"sid\"
srv6 = { local_sid = 'fd00::9', segs = ['fd00::2'] }

[bfd]
except = [\"10.9.0.9\"]
"
        );
        for (object, arguments) in [
            ("static", json!({ "segment": "red", "mac": "02:00:00:00:00:0A" })),
            ("segment", json!({ "name": "red" })),
            ("segment", json!({ "name": "sid" })),
            ("segment", json!({ "name": "vni42" })),
        ] {
            assert_eq!(apply(&mut document, Remove, object, arguments), "");
        }
        assert!(!document.contains_key("segment"), "{document}");
    }

    #[test]
    fn impossible_edits_have_reasons() {
        let document: DocumentMut = TEXT.parse().unwrap();
        let why = |operation, object, arguments| apply(&mut document.clone(), operation, object, arguments);
        let address = |address: &str| json!({ "segment": "vni42", "address": address });
        assert_eq!(why(Add, "remote", address("10.9.0.2")), "the remote 10.9.0.2 exists already");
        assert_eq!(why(Remove, "remote", address("10.9.0.4")), "there is no remote 10.9.0.4");
        let other = json!({ "segment": "vni43", "address": "10.9.0.4" });
        assert_eq!(why(Add, "remote", other), "there is no segment \"vni43\"; did you mean \"vni42\"?");
        assert_eq!(why(Add, "segment", json!({ "name": "vni42" })), "the segment \"vni42\" exists already");
        let wrong = |key: &str, value: serde_json::Value| why(Set, "segment", json!({ "name": "vni42", key: value }));
        assert_eq!(wrong("mtu", json!("big")), "mtu: found \"big\", expected a number");
        assert_eq!(wrong("mtu", json!({})), "mtu: found {}, expected a number");
        let toml = "srv6: found \"{ segs\", expected a TOML value as in a configuration file";
        assert_eq!(wrong("srv6", json!("{ segs")), toml);
        assert_eq!(wrong("learning", json!(7)), "learning: found 7, expected true or false");
        assert_eq!(wrong("remotes", json!([1])), "remotes: found [1], expected texts with commas between");
        assert_eq!(why(Add, "remote", json!({ "segment": ["x"], "address": "1" })), "segment: expected a text");
    }
}
