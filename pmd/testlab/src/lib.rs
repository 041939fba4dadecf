//! What the tests of every crate share. Nothing of this ships.
//!
//! * [`require!`] and [`Need`]: a test that lacks something says `skipped: why`, and in CI that is a failure.
//! * [`Lab`] and [`Namespace`]: hosts and cables made of network namespaces and veth pairs, removed afterwards, also after a panic.
//! * [`FramePort`]: raw frames in and out of an interface. [`VlanTagger`]: a host behind a VLAN, without the 8021q module.
//! * [`judge`]: tshark and scapy say what they think of frames.
//! * [`CountingAllocator`]: shows that a burst path allocates nothing, and how much memory something takes.
//!
//! Panics are how this crate reports: a lab that cannot be set up fails the test that wanted it.

mod alloc;
mod frames;
pub mod judge;
mod lab;
mod need;
mod process;
mod vlan;

pub use alloc::{CountingAllocator, allocations, held};
pub use frames::{Frame, FramePort};
pub use lab::{Lab, Namespace, Veth};
pub use need::{Need, announce, skip_or_fail};
pub use process::{Background, Outcome, run, spawn};
pub use vlan::VlanTagger;

use std::time::{Duration, Instant};

/// Calls `done` until it says yes or `limit` is over; returns whether it did. For what another process or the kernel does in its own
/// time: the limit is generous and only ends a hopeless wait.
pub fn eventually(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
