//! Changes of the headers of a packet.

use wirepath_wire::checksum::is_pseudo_header_sum;
use wirepath_wire::checksum_offload::ChecksumSpan;
use wirepath_wire::edit::PendingChecksums;
use wirepath_wire::{HeaderOffsets, HeadersMut, Parsed};

use crate::Packet;
use crate::offload::Flags;

impl Packet {
    /// Gives access to the headers of the outer stack, with getters and with setters that keep all checksums
    /// right; see [`wirepath_wire::edit`]. The headers must lie in the first segment, as they do after parsing.
    ///
    /// A checksum field that a device completes ([`Flags::TX_L4_CHECKSUM`]) keeps the sum of the pseudo header.
    #[inline]
    pub fn headers_mut<'a>(&'a mut self, parsed: &'a Parsed) -> HeadersMut<'a> {
        let pending = self.pending_checksums(parsed);
        parsed.outer_mut_with(self.data_mut(), pending)
    }

    /// Gives access to the headers of the inner stack, if the packet has a tunnel with valid inner headers.
    /// Setters update the checksum of the tunnel too.
    #[inline]
    pub fn inner_headers_mut<'a>(&'a mut self, parsed: &'a Parsed) -> Option<HeadersMut<'a>> {
        let pending = self.pending_checksums(parsed);
        parsed.inner_mut_with(self.data_mut(), pending)
    }

    #[inline(always)]
    fn pending_checksums(&self, parsed: &Parsed) -> PendingChecksums {
        if self.flags().intersects(Flags::TX_L4_CHECKSUM | Flags::TX_OUTER_L4_CHECKSUM) {
            self.find_pending_checksums(parsed)
        } else {
            PendingChecksums::default()
        }
    }

    #[cold]
    fn find_pending_checksums(&self, parsed: &Parsed) -> PendingChecksums {
        let flags = self.flags();
        let is_pending = |layers: &HeaderOffsets, request: Flags| {
            // A request does not prove that the field holds the sum: the checksum may also be complete. The sum of a
            // superframe may leave out the length.
            flags.contains(request) && (flags.contains(Flags::TX_SEGMENT) || holds_pseudo_sum(self.data(), layers))
        };
        match parsed.inner() {
            // The request for layer 4 is about the innermost headers.
            Some(inner) => PendingChecksums {
                outer: is_pending(parsed.outer(), Flags::TX_OUTER_L4_CHECKSUM),
                inner: is_pending(inner, Flags::TX_L4_CHECKSUM),
            },
            None => PendingChecksums { outer: is_pending(parsed.outer(), Flags::TX_L4_CHECKSUM), inner: false },
        }
    }
}

fn holds_pseudo_sum(frame: &[u8], layers: &HeaderOffsets) -> bool {
    ChecksumSpan::of(frame, layers).is_some_and(|span| {
        let field = frame.get(span.start..).and_then(|segment| span.transport.field(segment));
        field.is_some_and(|field| is_pseudo_header_sum(field, span.pseudo))
    })
}
