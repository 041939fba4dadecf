//! The programs with independent peers: Linux hosts behind veth cables, the kernel's `vxlan` device as remote
//! VTEP, and scapy and tshark as checkers of frames. Further remotes are Debian's kernel in a guest and Open
//! vSwitch. Each test creates and removes its own network namespaces.
//!
//! Each check runs with both kernel drivers and with emulated NICs. Checks of the frames in tunnels run with both IP
//! versions of the underlay, the others with one for each driver. The checks with traffic of every kind also run with
//! each receive and transmit mode of a driver. Ignored tests belong to `scripts/test --long`.
//! The peers use the kernel's default offloads. To run one test: `cargo test -p wirepath-apps --test peers
//! af_xdp_ipv6::ping`

mod address_moves;
mod bfd;
mod broadcast;
mod cgroup;
mod evpn;
mod evpn_doctor;
mod evpn_hosts;
mod evpn_ipv6;
mod evpn_leaves;
mod evpn_multihoming;
mod evpn_routing;
mod faults;
mod floods;
mod frames;
mod frr;
mod geneve;
mod gpe;
mod gre;
mod guest;
mod l2fwd;
mod lifecycle;
mod link;
mod malformed;
mod memory;
mod mpls;
mod mss;
mod mtu;
mod nic_tunnels;
mod observe;
mod offload;
mod ovs;
mod path_mtu;
mod ping;
mod privileges;
mod program;
mod reload;
mod restart;
mod routing;
mod rules;
mod scapy_remote;
mod segments;
mod soak;
mod srv6;
mod superframes;
mod tcp;
mod underlay;
mod vlans;
mod world;

use world::{Variant, by};

/// Defines tests that run checks with one set of parameters.
macro_rules! over {
    ($module:ident, $variant:expr, $($(#[$attribute:meta])* $test:ident: $body:path;)*) => {
        mod $module {
            use super::*;

            $(#[test]
            $(#[$attribute])*
            fn $test() {
                let name = concat!(stringify!($module), "::", stringify!($test));
                crate::world::with(Variant { name, ..$variant }, $body);
            })*
        }
    };
}

/// Defines the tests of a receive or transmit mode: the traffic checks and the checks named.
macro_rules! frames {
    ($module:ident, $variant:expr, $($test:ident: $body:path;)*) => {
        over! {
            $module,
            $variant,
            ping: crate::ping::small_and_jumbo;
            tcp: crate::tcp::some_unharmed;
            frames_out: crate::frames::outgoing_are_valid;
            frames_in: crate::frames::incoming_are_checked;
            $($test: $body;)*
        }
    };
}

/// Defines each check as a test of each driver and IP version.
macro_rules! everywhere {
    ($($test:ident: $body:path;)*) => {
        over!(af_packet_ipv4, by("af_packet", false), $($test: $body;)*);
        over!(af_packet_ipv6, by("af_packet", true), $($test: $body;)*);
        over!(af_xdp_ipv4, by("af_xdp", false), $($test: $body;)*);
        over!(af_xdp_ipv6, by("af_xdp", true), $($test: $body;)*);
        over!(mana_ipv4, by("mana", false), $($test: $body;)*);
        over!(mana_ipv6, by("mana", true), $($test: $body;)*);
        // The default mode: multi-packet send and linear receive with compression by hash.
        over!(mlx5_ipv4, by("mlx5", false), $($test: $body;)*);
    };
}

everywhere! {
    ping: crate::ping::small_and_jumbo;
    tcp: crate::tcp::a_gibibyte_unharmed;
    broadcast: crate::broadcast::reaches_every_remote_once;
    vlans: crate::vlans::each_vlan_its_segment;
    mtu: crate::mtu::too_big_is_refused_and_counted;
    frames_out: crate::frames::outgoing_are_valid;
    frames_in: crate::frames::incoming_are_checked;
    underlay: crate::underlay::answers_for_its_address_alone;
    malformed: crate::malformed::survives_and_counts;
}

/// Defines each check as a test of each driver. The IP version of the underlay changes little for these, so each driver
/// has one.
macro_rules! each_driver {
    ($($test:ident: $body:path;)*) => {
        over!(driver_af_packet_ipv4, by("af_packet", false), $($test: $body;)*);
        over!(driver_af_xdp_ipv6, by("af_xdp", true), $($test: $body;)*);
        over!(driver_mana_ipv6, by("mana", true), $($test: $body;)*);
        over!(driver_mlx5_ipv4, by("mlx5", false), $($test: $body;)*);
    };
}

each_driver! {
    moves: crate::address_moves::the_forwarding_database_follows;
    terminated: crate::lifecycle::ends_cleanly;
    killed: crate::lifecycle::starts_again_after_a_kill;
    port_lost: crate::lifecycle::goes_on_without_a_port;
    memory: crate::memory::stays_small;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
    l2fwd_bridge: crate::l2fwd::bridges_and_learns;
    l2fwd_rules: crate::rules::l2fwd_acts;
    rules_for_the_kernel: crate::rules::software_decides_for_the_kernel;
    rules_change: crate::rules::changed_while_it_runs;
    gateway_rules: crate::rules::gateway_list;
    routing: crate::routing::reaches_every_segment;
    routing_errors: crate::routing::errors_are_understood;
}

/// Privileges that programs keep.
macro_rules! privileges {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            needed: crate::privileges::only_what_the_ports_need;
            user: crate::privileges::another_user;
        })*
    };
}

privileges! {
    privileges_af_packet, by("af_packet", false);
    privileges_af_xdp, by("af_xdp", false);
    privileges_mlx5, by("mlx5", false);
    privileges_mana, by("mana", true);
    privileges_verbs, by("verbs", false);
}

over! {
    privileges_of_programs,
    by("af_packet", false),
    shared: crate::privileges::a_shared_interface;
    tap: crate::privileges::a_tap_port;
    new_ports: crate::privileges::ports_of_other_drivers;
    kept: crate::privileges::nothing_is_given_up;
}

/// Checks of the gateway that do not depend on the mode of a driver.
macro_rules! gateway {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            floods: crate::floods::lose_no_ping;
            link: crate::link::a_new_address_is_found;
            reload: crate::reload::a_segment_that_stays_loses_nothing;
            port_changes: crate::reload::ports_come_and_go_beside_a_stream;
            observe: crate::observe::traces_and_captures_tell_the_truth;
        })*
    };
}

/// Faults of the machine below a running gateway.
macro_rules! faults {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            clock: crate::faults::the_wall_clock_jumps;
            disk: crate::faults::the_disk_is_full;
            descriptors: crate::faults::no_descriptor_is_free;
            threads: crate::faults::no_thread_can_start;
            memory: crate::faults::memory_is_short;
            processors: crate::faults::a_processor_is_taken_away;
            stopped: crate::faults::stopped_for_twenty_seconds;
            namespace: crate::faults::the_name_of_the_namespace_is_deleted;
        })*
    };
}

faults! {
    faults_af_packet, by("af_packet", false);
}
over! {
    faults_af_xdp,
    by("af_xdp", true),
    descriptors: crate::faults::no_descriptor_is_free;
    processors: crate::faults::a_processor_is_taken_away;
    namespace: crate::faults::the_name_of_the_namespace_is_deleted;
}
over! {
    faults_mlx5,
    by("mlx5", false),
    stopped: crate::faults::stopped_for_twenty_seconds;
    upgrade: crate::faults::rdma_core_is_upgraded;
}

// The long run: `scripts/test --soak`.
over! {
    soak_runs,
    by("af_packet", false),
    gateway: crate::soak::all_ports_at_once;
    fabric: crate::soak::leaves_restart_and_hosts_move;
}

/// Limits and rules of segments, which the workers and the control thread keep without drivers.
macro_rules! segments {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            storms: crate::segments::storms_are_limited;
            address_floods: crate::segments::address_floods_are_limited;
            frozen: crate::segments::a_moving_address_is_frozen;
            sticky: crate::segments::a_sticky_address_stays;
            isolated: crate::segments::isolated_hosts_reach_remotes;
            suppression: crate::segments::requests_are_answered;
            mirror: crate::segments::a_mirror_shows_both_directions;
            filters: crate::segments::filters_hold_in_both_directions;
            mss: crate::mss::is_lowered;
        })*
    };
}

segments! {
    segments_af_packet_ipv4, by("af_packet", false);
    segments_af_xdp_ipv6, by("af_xdp", true);
}

// EVPN by FRR. The VTEPs of its version 8.4 have IPv4 addresses.
over! {
    evpn_af_packet_ipv4,
    by("af_packet", false),
    leaves: crate::evpn::leaves_exchange_addresses;
    moves: crate::evpn::a_host_moves_between_leaves;
    doctor: crate::evpn_doctor::wrong_devices_are_found;
    hosts: crate::evpn_hosts::other_leaves_answer_for_hosts;
    hosts_return: crate::evpn_hosts::addresses_survive_a_restart;
    three: crate::evpn_leaves::two_gateways_and_a_kernel_leaf;
    restarts: crate::evpn::daemons_start_again;
    storm: crate::evpn::a_storm_of_entries_loses_none;
    nexthop_groups: crate::evpn::groups_of_nexthops_share_flows;
    shared: crate::evpn::the_underlay_is_shared_with_the_kernel;
}

// EVPN without FRR, whose version 8.4 knows no VTEPs with IPv6 addresses.
over! {
    evpn_af_packet_ipv6,
    by("af_packet", true),
    vteps: crate::evpn_ipv6::vteps_have_ipv6_addresses;
    routes: crate::evpn_routing::subnets_are_routed_by_ipv6_vteps;
}

over! {
    evpn_af_xdp_ipv6,
    by("af_xdp", true),
    vteps: crate::evpn_ipv6::vteps_have_ipv6_addresses;
}

over! {
    evpn_af_xdp_ipv4,
    by("af_xdp", false),
    shared: crate::evpn::the_underlay_is_shared_with_the_kernel;
}

// A NIC with flow rules leaves the rest to the kernel. The far end of its cable is the kernel's.
over! {
    evpn_mlx5_ipv4,
    by("mlx5", false),
    shared: crate::evpn::the_underlay_is_shared_with_the_kernel;
}

over! {
    evpn_mlx5_ipv6,
    by("mlx5", true),
    vteps: crate::evpn_ipv6::vteps_have_ipv6_addresses;
}

over! {
    evpn_routing_af_packet_ipv4,
    by("af_packet", false),
    subnets: crate::evpn_routing::subnets_are_routed_both_ways;
    shared_network: crate::evpn_routing::leaves_share_a_network;
    vrf_device: crate::evpn_routing::a_vrf_of_the_kernel_has_the_routes;
    multihoming: crate::evpn_multihoming::leaves_share_the_flows_to_their_host;
}

over! {
    evpn_routing_af_xdp_ipv4,
    by("af_xdp", false),
    shared: crate::evpn_routing::subnets_are_routed_over_a_shared_underlay;
}

/// An underlay whose addresses are the kernel's.
macro_rules! shared_underlay {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            kernel: crate::underlay::the_kernel_keeps_all_but_tunnels;
        })*
    };
}

shared_underlay! {
    shared_af_packet_ipv4, by("af_packet", false);
    shared_af_packet_ipv6, by("af_packet", true);
    shared_af_xdp_ipv4, by("af_xdp", false);
    shared_af_xdp_ipv6, by("af_xdp", true);
    shared_mlx5_ipv4, by("mlx5", false);
    shared_mlx5_ipv6, by("mlx5", true);
    shared_verbs_ipv4, by("verbs", false);
    // The ring instead of whole superframes.
    shared_af_packet_cut, Variant { settings: ["superframes = 'cut'"; 2], ..by("af_packet", false) };
}

/// GENEVE, of which no device of the kernel is needed.
macro_rules! geneve {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            frames_out: crate::geneve::outgoing_are_valid;
            frames_in: crate::geneve::incoming_are_checked;
        })*
    };
}

geneve! {
    geneve_af_packet_ipv4, by("af_packet", false);
    geneve_af_packet_ipv6, by("af_packet", true);
    geneve_af_xdp_ipv4, by("af_xdp", false);
    geneve_mlx5_ipv4, by("mlx5", false);
}

/// VXLAN-GPE with Ethernet frames and with IP packets.
macro_rules! gpe {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            frames_out: crate::gpe::frames_out;
            frames_in: crate::gpe::frames_in;
            packets_out: crate::gpe::packets_out;
            packets_in: crate::gpe::packets_in;
        })*
    };
}

gpe! {
    gpe_af_packet_ipv4, by("af_packet", false);
    gpe_af_packet_ipv6, by("af_packet", true);
    gpe_af_xdp_ipv4, by("af_xdp", false);
    gpe_mlx5_ipv4, by("mlx5", false);
}

/// GRE with Ethernet frames.
macro_rules! gre {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            gretap_out: crate::gre::gretap_out;
            gretap_in: crate::gre::gretap_in;
            nvgre: crate::gre::nvgre;
        })*
    };
}

gre! {
    gre_af_packet_ipv4, by("af_packet", false);
    gre_af_packet_ipv6, by("af_packet", true);
    gre_af_xdp_ipv4, by("af_xdp", false);
    gre_mlx5_ipv4, by("mlx5", false);
}

/// MPLS over UDP and GRE with Ethernet frames.
macro_rules! mpls {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            udp_out: crate::mpls::udp_out;
            udp_in: crate::mpls::udp_in;
            gre_out: crate::mpls::gre_out;
            gre_in: crate::mpls::gre_in;
        })*
    };
}

mpls! {
    mpls_af_packet_ipv4, by("af_packet", false);
    mpls_af_packet_ipv6, by("af_packet", true);
    mpls_af_xdp_ipv4, by("af_xdp", false);
    mpls_mlx5_ipv4, by("mlx5", false);
}

/// SRv6 with Ethernet frames.
macro_rules! srv6 {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            frames_out: crate::srv6::outgoing_are_valid;
            frames_in: crate::srv6::incoming_are_checked;
        })*
    };
}

srv6! {
    srv6_af_packet, by("af_packet", true);
    srv6_af_xdp, by("af_xdp", true);
    srv6_mlx5, by("mlx5", true);
}

/// Streams through the router.
macro_rules! routing {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            tcp: crate::routing::tcp_unharmed;
        })*
    };
}

routing! {
    routing_af_packet_ipv4, by("af_packet", false);
    routing_af_xdp_ipv6, by("af_xdp", true);
    routing_mlx5_ipv4, by("mlx5", false);
}

/// A router of the underlay with a smaller MTU.
macro_rules! path_mtu {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            reported: crate::path_mtu::a_router_reports_its_mtu;
            forged: crate::path_mtu::forged_messages_are_refused;
            fragments: crate::path_mtu::the_kernel_joins_fragments;
            reassembly: crate::path_mtu::fragments_of_the_kernel_are_joined;
        })*
    };
}

path_mtu! {
    path_mtu_af_packet_ipv4, by("af_packet", false);
    path_mtu_af_packet_ipv6, by("af_packet", true);
    path_mtu_af_xdp_ipv4, by("af_xdp", false);
    path_mtu_mlx5_ipv4, by("mlx5", false);
}

gateway! {
    gateway_af_packet_ipv4, by("af_packet", false);
    gateway_af_packet_ipv6, by("af_packet", true);
    gateway_af_xdp_ipv4, by("af_xdp", false);
}
// Frames of each length from 64 to 9000 bytes.
over! {
    lengths_af_packet_ipv4,
    by("af_packet", false),
    echo: crate::ping::frames_of_each_length;
}
over! {
    lengths_af_packet_ipv6,
    by("af_packet", true),
    echo: crate::ping::frames_of_each_length;
}
over! {
    busy_kernel_af_packet,
    by("af_packet", false),
    port_changes: crate::reload::a_busy_kernel_stops_no_operator;
}
over! {
    busy_kernel_af_xdp,
    by("af_xdp", false),
    port_changes: crate::reload::a_busy_kernel_stops_no_operator;
}
over! {
    af_packet_return,
    by("af_packet", false),
    learned_state: crate::restart::floods_no_known_station;
    interfaces: crate::lifecycle::goes_on_when_interfaces_return;
    l2fwd_address: crate::l2fwd::a_new_address_is_the_source;
}
over! {
    af_xdp_return,
    by("af_xdp", true),
    learned_state: crate::restart::floods_no_known_station;
    interfaces: crate::lifecycle::goes_on_when_interfaces_return;
}
over! {
    mlx5_rules,
    by("mlx5", false),
    offload: crate::offload::software_touches_no_tunnel_header;
    off: crate::offload::off_is_off;
    asked_again: crate::offload::a_nic_that_refuses_is_asked_again;
    reload: crate::reload::a_segment_that_stays_loses_nothing;
    observe: crate::observe::traces_and_captures_tell_the_truth;
}
over! {
    nic_tunnels_ipv4,
    by("mlx5", false),
    each_kind: crate::nic_tunnels::each_kind;
}
over! {
    nic_tunnels_ipv6,
    by("mlx5", true),
    each_kind: crate::nic_tunnels::each_kind;
}
over! {
    mlx5_segmentation,
    by("mlx5", false),
    cut: crate::l2fwd::superframes_are_cut_by_the_nic;
}
frames! {
    af_packet_cut_ipv4,
    Variant { settings: [crate::superframes::CUT, ""], ..by("af_packet", false) },
    vlans: crate::vlans::each_vlan_its_segment;
    mtu: crate::mtu::too_big_is_refused_and_counted;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
}
frames! {
    af_packet_cut_ipv6,
    Variant { settings: [crate::superframes::CUT, ""], ..by("af_packet", true) },
    mtu: crate::mtu::too_big_is_refused_and_counted;
}
over! {
    superframes_ipv4,
    by("af_packet", false),
    whole: crate::superframes::pass_whole;
    datagrams: crate::superframes::datagrams_pass_whole;
}
over! {
    superframes_ipv6,
    by("af_packet", true),
    whole: crate::superframes::pass_whole;
    datagrams: crate::superframes::datagrams_pass_whole;
}
// The default settings of the lab of README.md.
over! {
    superframes_auto,
    by("auto", false),
    whole: crate::superframes::pass_whole;
}
over! {
    superframes_cut_at_once,
    Variant { settings: [crate::superframes::CUT, ""], ..by("af_packet", false) },
    cut: crate::superframes::are_cut_at_once;
    datagrams: crate::superframes::datagrams_are_cut_at_once;
}
over! {
    superframes_of_a_new_port,
    Variant { others: Some("af_packet"), settings: ["", crate::superframes::CUT], ..by("af_xdp", false) },
    cut: crate::reload::superframes_of_a_new_port_are_cut;
}
// Superframes of one port leave by a port that cuts them in software: inside the tunnel, and plain.
over! {
    software_gso_in_tunnels,
    Variant { others: Some("af_packet"), ..by("af_xdp", false) },
    tcp: crate::tcp::some_unharmed;
    cut: crate::superframes::are_cut_in_software;
    datagrams: crate::superframes::datagrams_are_cut_in_software;
}
over! {
    software_gso_in_tunnels_ipv6,
    Variant { others: Some("af_packet"), ..by("af_xdp", true) },
    cut: crate::superframes::are_cut_in_software;
    datagrams: crate::superframes::datagrams_are_cut_in_software;
}
over! {
    software_gso,
    Variant { others: Some("af_xdp"), ..by("af_packet", true) },
    tcp: crate::tcp::some_unharmed;
    cut: crate::superframes::are_cut_in_software;
    datagrams: crate::superframes::datagrams_are_cut_in_software;
}
// The NIC segments TCP only, so software cuts datagrams.
over! {
    software_gso_of_datagrams,
    Variant { others: Some("af_packet"), ..by("mlx5", false) },
    datagrams: crate::superframes::datagrams_are_cut_in_software;
}
// Superframes leave in tunnels by a NIC that segments them.
over! {
    nic_tunnel_tso_ipv4,
    Variant { others: Some("af_packet"), ..by("mlx5", false) },
    whole: crate::superframes::are_segmented_by_the_nic;
}
over! {
    nic_tunnel_tso_ipv6,
    Variant { others: Some("af_packet"), ..by("mlx5", true) },
    whole: crate::superframes::are_segmented_by_the_nic;
}
// Packets are joined as they arrive, plain and inside the tunnel. The port that sends them cuts them again.
over! {
    gro_ipv4,
    Variant { others: Some("af_packet"), ..by("af_xdp", false) },
    joined: crate::superframes::are_joined;
    datagrams: crate::superframes::datagrams_are_joined;
}
over! {
    gro_ipv6,
    by("af_xdp", true),
    joined: crate::superframes::are_joined;
    datagrams: crate::superframes::datagrams_are_joined;
}
over! {
    gro_for_a_tap,
    Variant { others: Some("tap"), ..by("af_xdp", false) },
    datagrams: crate::superframes::datagrams_are_joined_for_a_tap;
}
over! {
    tap_superframes_ipv4,
    by("tap", false),
    whole: crate::superframes::pass_whole_between_taps;
    datagrams: crate::superframes::datagrams_pass_whole_between_taps;
}
over! {
    tap_superframes_ipv6,
    by("tap", true),
    whole: crate::superframes::pass_whole_between_taps;
    datagrams: crate::superframes::datagrams_pass_whole_between_taps;
}

// The tunnel devices of Debian's kernel, in a guest.
over! {
    guest_af_packet,
    by("af_packet", false),
    tunnels_over_ipv4: crate::guest::carry_over_ipv4;
    tunnels_over_ipv6: crate::guest::carry_over_ipv6;
}
over! {
    guest_af_xdp,
    by("af_xdp", false),
    #[ignore = "scripts/test --long: guest_af_packet and the tests with scapy and Open vSwitch check most of it"]
    tunnels: crate::guest::carry;
}
over! {
    guest_mlx5,
    by("mlx5", false),
    #[ignore = "scripts/test --long: guest_af_packet and nic_tunnels check most of it"]
    tunnels: crate::guest::carry;
}

/// Remotes watched by BFD: FRR's, and scapy's in VXLAN tunnels.
macro_rules! bfd {
    ($($module:ident, $variant:expr;)*) => {
        $(over! {
            $module,
            $variant,
            leaves: crate::bfd::a_remote_leaves_and_returns;
            multihop: crate::bfd::multihop;
            backup: crate::bfd::a_backup_takes_over;
            in_vxlan: crate::bfd::a_remote_in_vxlan_leaves_and_returns;
        })*
    };
}

bfd! {
    bfd_af_packet_ipv4, by("af_packet", false);
    bfd_af_packet_ipv6, by("af_packet", true);
    bfd_mlx5_ipv4, by("mlx5", false);
}

// Open vSwitch reads its interface by packet sockets without virtio headers, which do not take superframes.
over! {
    ovs_af_packet_ipv4,
    Variant { settings: [crate::superframes::CUT, ""], ..by("af_packet", false) },
    tunnels: crate::ovs::carry;
}
over! {
    ovs_af_xdp_ipv6,
    by("af_xdp", true),
    tunnels: crate::ovs::carry;
}
over! {
    guest_superframes,
    by("af_packet", false),
    tunnels: crate::guest::carry_superframes;
}
over! {
    guest_superframes_nic,
    Variant { others: Some("af_packet"), ..by("mlx5", false) },
    #[ignore = "scripts/test --long: nic_tunnel_tso and guest_superframes check most of it"]
    tunnels: crate::guest::carry_superframes;
}
frames! {
    mlx5_striding,
    Variant { settings: ["rx_mode = \"striding\"\ntx_inline = 200", ""], ..by("mlx5", true) },
    vlans: crate::vlans::each_vlan_its_segment;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
}
frames! {
    mlx5_plain,
    Variant { settings: ["cqe_compression = \"off\"\nmulti_packet = false", ""], ..by("mlx5", true) },
}
frames! {
    mlx5_checksum,
    Variant { settings: ["cqe_compression = \"checksum\"\nmin_inline = \"18\"", ""], ..by("mlx5", false) },
}
frames! {
    verbs,
    by("verbs", false),
    vlans: crate::vlans::each_vlan_its_segment;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
}
frames! {
    mlx5_and_mana,
    Variant { others: Some("mana"), ..by("mlx5", false) },
    vlans: crate::vlans::each_vlan_its_segment;
    l2fwd_pair: crate::l2fwd::joins_a_pair;
}
