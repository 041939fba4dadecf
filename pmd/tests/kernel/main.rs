//! Drivers of kernel interfaces on a real kernel: `af_packet`, `af_xdp` and `tap` between network namespaces.

#[path = "../common/mod.rs"]
mod common;
mod conservation;
mod forwarder;
mod topology;

mod af_packet;
mod af_xdp;
mod reattach;
mod tap;
mod xdp_live;
mod xdp_rules;

use wirepath_testlab::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
