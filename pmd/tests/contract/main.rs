//! The contract: requirements for every driver, checked by the same tests for all of them.
//!
//! To add a driver, write a file in `fixtures/` that connects a port to a wire, and add a line below. A
//! property in `properties/` is a function over a [`Bench`](bench::Bench). A fixture declares the properties
//! that a driver cannot have, with the reason, which the run prints. After every test the port is stopped,
//! and all buffers must be back in their pool.
//!
//! A single driver: `cargo test -p wirepath-pmd --test contract memory::`

#[path = "../common/mod.rs"]
mod common;

mod allocations;
mod bench;
mod fixture;
mod fixtures;
mod properties;

use wirepath_testlab::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Defines a test for each property in the module of each driver.
macro_rules! contract {
    ($($driver:ident: $fixture:expr;)*) => { $(
        mod $driver {
            use crate::fixture::Property;
            use crate::{bench, properties};

            contract! { @properties $driver, $fixture;
                order_and_no_loss: Order, properties::order::in_order_without_loss;
                partial_transmit: PartialTransmit, properties::partial::leaves_what_it_cannot_take;
                sizes: Sizes, properties::sizes::every_size_both_ways;
                too_long_is_refused: TooLong, properties::sizes::too_long_is_dropped_and_counted;
                chains: Chains, properties::chains::go_out_whole;
                superframes: Superframes, properties::superframes::become_the_datagrams_that_they_were;
                statistics: Statistics, properties::statistics::equal_what_was_moved;
                several_queues: Queues, properties::queues::share_the_flows;
                pool_runs_dry: Exhaustion, properties::exhaustion::drops_counts_and_recovers;
                stop_and_start_under_traffic: Restart, properties::restart::stops_and_starts_under_traffic;
                link_down_and_up: Link, properties::link::goes_down_and_comes_back;
                removed_while_running: Removal, properties::removal::says_so_and_others_go_on;
                killed_and_started_again: Kill, properties::kill::leaves_nothing_in_the_way;
            }
        }
    )* };
    (@properties $driver:ident, $fixture:expr; $($test:ident: $property:ident, $body:path;)*) => { $(
        #[test]
        fn $test() {
            let name = concat!(stringify!($driver), "::", stringify!($test));
            bench::check(name, &$fixture, Property::$property, $body);
        }
    )* };
}

contract! {
    af_packet: crate::fixtures::af_packet::AfPacket;
    af_xdp: crate::fixtures::af_xdp::AfXdp { keys: "driver = \"af_xdp\"\n", mtu: 9202 };
    af_xdp_generic: crate::fixtures::af_xdp::AfXdp {
        keys: "driver = \"af_xdp\"\n[port.af_xdp]\nmode = \"generic\"\n",
        mtu: 9202,
    };
    af_xdp_copying: crate::fixtures::af_xdp::AfXdp {
        keys: "driver = \"af_xdp\"\n[port.af_xdp]\npool_as_umem = false\n",
        mtu: 9202,
    };
    af_xdp_single_buffer: crate::fixtures::af_xdp::AfXdp {
        keys: "driver = \"af_xdp\"\n[port.af_xdp]\nfragments = false\nattach_by_link = false\n",
        mtu: 2026,
    };
    mana: crate::fixtures::nic::Nic { driver: "mana", settings: "", doorbells: "trap", device: "" };
    mana_scan_coalesced: crate::fixtures::nic::Nic {
        driver: "mana",
        settings: "",
        doorbells: "scan",
        device: "coalesce = true\n",
    };
    mlx5: crate::fixtures::nic::Nic { driver: "mlx5", settings: "cqe_compression = \
         'off'\n", doorbells: "trap", device: "" };
    mlx5_compressed: crate::fixtures::nic::Nic {
        driver: "mlx5",
        settings: "cqe_compression = 'hash'\nmulti_packet = false\n",
        doorbells: "trap",
        device: "doorbell_pages = 'static'\n",
    };
    mlx5_checksum_inline: crate::fixtures::nic::Nic {
        driver: "mlx5",
        settings: "cqe_compression = 'checksum'\ntx_inline = 200\n",
        doorbells: "queue",
        device: "cqe_version = 0\n",
    };
    mlx5_striding: crate::fixtures::nic::Nic {
        driver: "mlx5",
        settings: "rx_mode = 'striding'\ncqe_compression = 'off'\nmin_inline = '18'\n",
        doorbells: "trap",
        device: "min_inline = 'l2'\n",
    };
    mlx5_striding_compressed: crate::fixtures::nic::Nic {
        driver: "mlx5",
        settings: "rx_mode = 'striding'\ncqe_compression = 'stride'\n",
        doorbells: "scan",
        device: "",
    };
    verbs: crate::fixtures::nic::Nic { driver: "verbs", settings: "", doorbells: "trap", device: "" };
    memory: crate::fixtures::memory::Memory;
    null: crate::fixtures::null::Null;
    pcap: crate::fixtures::pcap::Pcap;
    tap: crate::fixtures::tap::Tap;
    xdp_live: crate::fixtures::xdp_live::XdpLive { keys: "driver = \"xdp_live\"\n" };
    xdp_live_short_bursts: crate::fixtures::xdp_live::XdpLive {
        keys: "driver = \"xdp_live\"\n[port.xdp_live]\nburst = 3\n",
    };
}

/// Child process of [`properties::kill`]: this test, with a port in the environment. Without one it does
/// nothing.
#[test]
fn child() {
    properties::kill::child();
}
