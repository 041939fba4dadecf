//! The programs among peers that we did not write: Linux hosts behind veth cables, the kernel's `vxlan` device as remote VTEP, scapy
//! and tshark as judges of frames. Everything happens in network namespaces that each test makes and removes.
//!
//! Each check runs over both kernel drivers and over emulated NICs, and over both IP versions of the underlay; the ways in which one driver
//! receives and transmits meet those checks that show traffic of every kind. Offloads of the peers are as the kernel sets them. One alone: `cargo test -p wirepath-apps --test peers af_xdp_ipv6::ping`

mod broadcast;
mod frames;
mod hostile;
mod l2fwd;
mod life;
mod memory;
mod moves;
mod mtu;
mod offload;
mod ping;
mod program;
mod rules;
mod tcp;
mod underlay;
mod vlans;
mod world;

use world::{Way, by};

/// Checks as tests of one way.
macro_rules! over {
    ($module:ident, $way:expr, $($test:ident: $body:path;)*) => {
        mod $module {
            use super::*;

            $(#[test]
            fn $test() {
                crate::world::with(Way { name: concat!(stringify!($module), "::", stringify!($test)), ..$way }, $body);
            })*
        }
    };
}

/// What judges every way in which frames come and go, and the checks named, as tests of one way.
macro_rules! frames {
    ($module:ident, $way:expr, $($test:ident: $body:path;)*) => {
        over! {
            $module,
            $way,
            ping: crate::ping::small_and_jumbo;
            tcp: crate::tcp::some_unharmed;
            frames_out: crate::frames::judged_on_the_way_out;
            frames_in: crate::frames::judged_on_the_way_in;
            $($test: $body;)*
        }
    };
}

/// Each check as a test of each combination.
macro_rules! everywhere {
    ($($test:ident: $body:path;)*) => {
        over!(af_packet_ipv4, by("af_packet", false), $($test: $body;)*);
        over!(af_packet_ipv6, by("af_packet", true), $($test: $body;)*);
        over!(af_xdp_ipv4, by("af_xdp", false), $($test: $body;)*);
        over!(af_xdp_ipv6, by("af_xdp", true), $($test: $body;)*);
        over!(mana_ipv4, by("mana", false), $($test: $body;)*);
        over!(mana_ipv6, by("mana", true), $($test: $body;)*);
        // Multi-packet send, linear receive compressed by hash: as it comes.
        over!(mlx5_ipv4, by("mlx5", false), $($test: $body;)*);
    };
}

everywhere! {
    ping: crate::ping::small_and_jumbo;
    tcp: crate::tcp::a_gibibyte_unharmed;
    broadcast: crate::broadcast::reaches_every_remote_once;
    moves: crate::moves::the_forwarding_database_follows;
    vlans: crate::vlans::each_vlan_its_segment;
    mtu: crate::mtu::too_big_is_refused_and_counted;
    frames_out: crate::frames::judged_on_the_way_out;
    frames_in: crate::frames::judged_on_the_way_in;
    underlay: crate::underlay::answers_for_its_address_alone;
    hostile: crate::hostile::survives_and_counts;
    terminated: crate::life::ends_cleanly;
    killed: crate::life::starts_again_after_a_kill;
    port_lost: crate::life::goes_on_without_a_port;
    memory: crate::memory::stays_small;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
    l2fwd_bridge: crate::l2fwd::bridges_and_learns;
    l2fwd_rules: crate::rules::l2fwd_acts;
    rules_for_the_kernel: crate::rules::software_decides_for_the_kernel;
    rules_change: crate::rules::changed_while_it_runs;
    gateway_rules: crate::rules::gateway_list;
}

over! {
    mlx5_rules,
    by("mlx5", false),
    offload: crate::offload::software_touches_no_tunnel_header;
    off: crate::offload::off_is_off;
    asked_again: crate::offload::a_nic_that_refuses_is_asked_again;
}
over! {
    mlx5_segmentation,
    by("mlx5", false),
    cut: crate::l2fwd::superframes_are_cut_by_the_nic;
}
frames! {
    mlx5_striding,
    Way { settings: ["receive = \"striding\"\ninline = 200", ""], ..by("mlx5", true) },
    vlans: crate::vlans::each_vlan_its_segment;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
}
frames! {
    mlx5_plain,
    Way { settings: ["compress = \"off\"\nmulti_packet = false", ""], ..by("mlx5", true) },
}
frames! {
    mlx5_checksum,
    Way { settings: ["compress = \"checksum\"\nmin_inline = \"18\"", ""], ..by("mlx5", false) },
}
frames! {
    verbs,
    by("verbs", false),
    vlans: crate::vlans::each_vlan_its_segment;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
}
frames! {
    mlx5_and_mana,
    Way { others: Some("mana"), ..by("mlx5", false) },
    vlans: crate::vlans::each_vlan_its_segment;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
}
