//! Encoding of work-queue elements (WQEs).

use std::sync::atomic::AtomicU64;

use wirepath_memory::Slots;
use wirepath_nic_defs::mana::{
    FORMAT_LONG, FORMAT_SHORT, MAX_TX_WQE, OOB_LONG, OOB_SHORT, OOB_WORDS_LONG, OOB_WORDS_SHORT, SGE_BYTES, TxOob,
    TxOob1, TxOob2, TxOob3, VSQ_FRAME_SHIFT, WQE_HEADER, WQE_UNIT, WqeFlags, WqeLast,
};

/// Words of a basic unit.
pub(super) const UNIT: usize = WQE_UNIT as usize / 8;
/// Units of the longest transmit WQE.
pub(super) const MAX_UNITS: usize = (MAX_TX_WQE / WQE_UNIT) as usize;
/// Most segments of a transmit WQE with the long out-of-band part.
pub(super) const MAX_SEGMENTS: usize = ((MAX_TX_WQE - WQE_HEADER - OOB_LONG) / SGE_BYTES) as usize;
/// Suppresses the completion, in the first word of the out-of-band part.
pub(super) const SUPPRESS: u64 = TxOob(0).with_suppress_completion(1).0 as u64;

/// A work queue as basic units.
pub(super) type Units = Slots<[AtomicU64; UNIT]>;

/// Combines two 32-bit words in memory order.
pub(super) const fn pair(first: u32, second: u32) -> u64 {
    first as u64 | (second as u64) << 32
}

/// Converts a free-running position in units to bytes modulo 2^32, as doorbells need it.
pub(super) const fn tail(position: u32) -> u32 {
    position.wrapping_mul(WQE_UNIT)
}

// The conversion stays continuous when the byte counter wraps around.
const _: () = assert!(tail(u32::MAX) == 0u32.wrapping_sub(WQE_UNIT) && tail(1 << 27) == 0);

/// Returns the header of a WQE with a short out-of-band part and `sges` entries.
pub(super) const fn short_header(sges: u32) -> u64 {
    pair(0, WqeFlags(0).with_sges(sges).with_oob_words(OOB_WORDS_SHORT).0)
}

/// A WQE under construction.
pub(super) struct Wqe {
    words: [u64; MAX_UNITS * UNIT],
    used: usize,
}

impl Wqe {
    /// Begins a WQE with these words. The first is the header, to which [`Self::finish`] adds the number of
    /// entries.
    pub(super) fn new(start: &[u64]) -> Self {
        let mut words = [0; MAX_UNITS * UNIT];
        words[..start.len()].copy_from_slice(start);
        Self { words, used: start.len() }
    }

    /// Appends an entry. Returns false if there is no room.
    #[must_use]
    pub(super) fn push(&mut self, address: u64, key: u32, bytes: usize) -> bool {
        let Some([at, what]) = self.words.get_mut(self.used..).and_then(|left| left.first_chunk_mut::<2>()) else {
            return false;
        };
        (*at, *what) = (address, pair(key, bytes as u32));
        self.used += 2;
        true
    }

    /// Returns the number of units of the WQE.
    pub(super) fn units(&self) -> usize {
        self.used.div_ceil(UNIT)
    }

    /// Writes all units except the first. Returns the first one, which must be written last.
    pub(super) fn write_rest(&self, ring: &Units, at: u32) -> [u64; UNIT] {
        let (units, _) = self.words.as_chunks::<UNIT>();
        for (i, unit) in units[..self.units()].iter().enumerate().skip(1) {
            ring.write(at.wrapping_add(i as u32), *unit);
        }
        units[0]
    }
}

/// Fields of the out-of-band part that are constant in a send queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Addressing {
    oob0: TxOob,
    oob1: TxOob1,
    oob3: TxOob3,
    /// True if the virtual port does not fit in the short form.
    pub(super) needs_long: bool,
}

impl Addressing {
    /// Creates the fields for send queue `sq` with completion queue `cq` and a virtual port.
    pub(super) fn new(sq: u32, cq: u32, vport: u32) -> Self {
        Self {
            oob0: TxOob::default().with_vcq(cq),
            oob1: TxOob1::default().with_vsq_frame(sq >> VSQ_FRAME_SHIFT).with_vport(vport),
            oob3: TxOob3::default().with_long_vport(vport),
            needs_long: vport > 0xff,
        }
    }

    /// Returns the short out-of-band part of a packet without offloads and without a completion.
    pub(super) fn plain(&self) -> u64 {
        pair(self.oob0.with_format(FORMAT_SHORT).0, self.oob1.0) | SUPPRESS
    }

    /// Begins the WQE of a packet with these offloads and without a completion.
    pub(super) fn begin(&self, what: &TxOffloads) -> Wqe {
        let oob0 = TxOob(self.oob0.0 | what.checksums.0).with_suppress_completion(1);
        let oob1 = self.oob1.with_transport_offset(what.transport_offset);
        let mut flags = WqeFlags::default();
        let mut last = WqeLast::default();
        if let Some(lso) = what.segment {
            flags = flags.with_oob_in_sgl(1).with_client_data_unit(lso.mss.into());
            last = last.with_last_vbytes(lso.header.into());
        }
        if self.needs_long || what.tag.is_some() {
            let oob2 = what.tag.map_or(TxOob2::default(), |tci| {
                let tci = u32::from(tci);
                TxOob2::default()
                    .with_inject_vlan(1)
                    .with_pcp(tci >> 13)
                    .with_dei(tci >> 12 & 1)
                    .with_vlan_id(tci & 0xfff)
            });
            let flags = flags.with_oob_words(OOB_WORDS_LONG);
            Wqe::new(&[
                pair(last.0, flags.0),
                pair(oob0.with_format(FORMAT_LONG).0, oob1.0),
                pair(oob2.0, self.oob3.0),
                0,
            ])
        } else {
            let flags = flags.with_oob_words(OOB_WORDS_SHORT);
            Wqe::new(&[pair(last.0, flags.0), pair(oob0.with_format(FORMAT_SHORT).0, oob1.0)])
        }
    }
}

impl Wqe {
    /// Adds the number of entries to the header.
    pub(super) fn finish(&mut self, sges: u32) {
        self.words[0] |= pair(0, WqeFlags(0).with_sges(sges).0);
    }
}

/// Offloads of a packet, as requested from the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TxOffloads {
    /// The bits for checksums and header types.
    pub(super) checksums: TxOob,
    /// Offset of the transport header, if its checksum is requested.
    pub(super) transport_offset: u32,
    /// VLAN tag to insert.
    pub(super) tag: Option<u16>,
    /// TCP segmentation, if requested.
    pub(super) segment: Option<Lso>,
}

/// Parameters of TCP segmentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lso {
    /// Most payload bytes of a segment.
    pub(super) mss: u16,
    /// Bytes of all headers, which form the first entry.
    pub(super) header: u8,
}

const _: () = assert!(WQE_HEADER + OOB_SHORT == 16 && WQE_HEADER + OOB_LONG == WQE_UNIT && MAX_SEGMENTS == 30);
