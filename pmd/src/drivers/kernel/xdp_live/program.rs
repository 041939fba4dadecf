//! The XDP program. It fills one live frame with the next packet of a burst and sends it out of the interface.

use crate::drivers::kernel::common::assembler::Register::*;
use crate::drivers::kernel::common::assembler::{Assembler, Condition, Width, function};

/// Program name.
pub(super) const NAME: &str = "wirepath_live";

/// Bytes of the memory that a queue shares with its program.
pub(super) const BYTES: usize = 2 << 20;
/// Offset of the next record. The program moves it on.
pub(super) const NEXT: usize = 0;
/// Offset behind the last record.
pub(super) const END: usize = 8;
/// Records that the program has taken.
pub(super) const TAKEN: usize = 16;
/// Records among them that it could not send.
pub(super) const FAILED: usize = 24;
/// Offset of the first record. A record is a header and the frame, and ends at a multiple of 8.
pub(super) const FIRST: usize = 64;
/// Header of a record: length of the frame, and its difference to that of a live frame.
pub(super) const HEADER: usize = 16;

/// Shortest frame: an Ethernet header.
pub(super) const SHORTEST: usize = 14;
/// Longest frame. A live frame is a page, in which about 700 of 4096 bytes are the kernel's
/// (`xdp_test_run_init_page` in net/bpf/test_run.c).
pub(super) const LONGEST: usize = 3072;

const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;

/// `ingress_ifindex` of `struct xdp_md`.
const INTERFACE: i16 = 12;

/// Returns the bytes of a record.
#[inline]
pub(super) const fn record(len: usize) -> usize {
    (HEADER + len).next_multiple_of(8)
}

/// Assembles the program for the memory `value` (a map of one entry) and an interface.
///
/// It is attached to the interface too, and passes the frames that come from there to the kernel.
pub(super) fn assemble(value: i32, interface: u32) -> Result<Vec<[u8; 8]>, &'static str> {
    let mut a = Assembler::default();
    let (live, more, fits, failed) = (a.label(), a.label(), a.label(), a.label());
    a.copy(R6, R1);
    a.load(Width::Word, R2, R6, INTERFACE);
    a.jump_if_32(R2, Condition::NotEqual, interface, live);
    a.set(R0, XDP_PASS);
    a.exit();

    // R7: memory, R8: record, R9: its offset.
    a.bind(live);
    a.load_value(R7, value);
    a.load(Width::Double, R9, R7, NEXT as i16);
    a.load(Width::Double, R1, R7, END as i16);
    a.jump_if_register(R1, Condition::Greater, R9, more);
    a.jump(failed);
    a.bind(more);
    a.jump_if(R9, Condition::Greater, (BYTES - HEADER - LONGEST) as i32, failed);
    a.copy(R8, R7);
    a.add_register(R8, R9);
    a.load(Width::Double, R2, R8, 0);
    a.jump_if(R2, Condition::Greater, LONGEST as i32, failed);
    a.jump_if(R2, Condition::Less, SHORTEST as i32, failed);
    a.add_register(R9, R2);
    a.add(R9, HEADER as i32 + 7);
    a.and(R9, -8);
    a.store(Width::Double, R7, NEXT as i16, R9);
    a.load(Width::Double, R1, R7, TAKEN as i16);
    a.add(R1, 1);
    a.store(Width::Double, R7, TAKEN as i16, R1);

    // R9: length.
    a.copy(R9, R2);
    a.load(Width::Double, R2, R8, 8);
    a.jump_if(R2, Condition::Equal, 0, fits);
    a.copy(R1, R6);
    a.call(function::XDP_ADJUST_TAIL);
    a.jump_if(R0, Condition::NotEqual, 0, failed);
    a.bind(fits);
    a.copy(R1, R6);
    a.set(R2, 0);
    a.copy(R3, R8);
    a.add(R3, HEADER as i32);
    a.copy(R4, R9);
    a.call(function::XDP_STORE_BYTES);
    a.jump_if(R0, Condition::NotEqual, 0, failed);
    // The action XDP_TX would send a frame that came from the interface. Live frames come from the loopback interface.
    a.set(R1, interface as i32);
    a.set(R2, 0);
    a.call(function::REDIRECT);
    a.exit();

    a.bind(failed);
    a.load(Width::Double, R1, R7, FAILED as i16);
    a.add(R1, 1);
    a.store(Width::Double, R7, FAILED as i16, R1);
    a.set(R0, XDP_DROP);
    a.exit();
    a.finish()
}
