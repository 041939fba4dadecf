//! Utilities for the tests of all crates. No program contains this crate.
//!
//! * [`require!`] and [`Requirement`]: a test that lacks something prints `skipped: why`, which is a failure
//!   in CI.
//! * [`Lab`] and [`Namespace`]: hosts and cables made of network namespaces and veth pairs. They are removed
//!   afterwards, also after a panic.
//! * [`FramePort`]: raw frames of an interface. [`VlanTagger`]: a host in a VLAN, without the 8021q module.
//! * [`LinuxGuest`]: a host with Debian's kernel under QEMU.
//! * [`SetOnDrop`]: ends a thread of a test.
//! * [`read_histogram_log`]: the histograms that a program has written.
//! * [`oracle`]: tshark and scapy as independent implementations.
//! * [`CountingAllocator`]: shows that a burst path does not allocate, and how much memory a structure takes.
//!
//! Errors are reported by panics: a lab that cannot be set up fails its test.

mod alloc;
mod frames;
mod guest;
mod histograms;
mod lab;
pub mod oracle;
mod permit;
mod process;
mod requirements;
mod vlan;

pub use alloc::{CountingAllocator, allocations, retained_bytes};
pub use frames::{Frame, FramePort};
pub use guest::{GuestJob, LinuxGuest};
pub use histograms::read_histogram_log;
pub use lab::{Lab, Namespace, Veth};
pub use process::{Background, Outcome, copy_program, run, spawn};
pub use requirements::{Requirement, print_uncaptured, python, skip_or_fail};
pub use vlan::VlanTagger;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Writes a file below a folder that stands for the root of a machine.
///
/// # Panics
/// If it cannot be written.
pub fn write_below(root: &Path, path: &str, text: &str) {
    let path = root.join(path);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("make the folder");
    std::fs::write(path, text).expect("write the file");
}

/// Sets a flag when it is dropped. A thread that waits for the flag ends also if the test panics.
#[derive(Debug)]
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Calls `done` until it returns true or `limit` has passed. Returns whether it did. It serves to wait for
/// other processes and for the kernel; the limit should be generous, because it only ends a hopeless wait.
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
