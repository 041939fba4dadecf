//! Parse results beside a batch.

use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::{BATCH, Batch, Packet};
use wirepath_wire::{Parsed, Parser};

use crate::context::Context;

/// Where the headers of each packet of a batch lie: scratch memory that a stage keeps and fills for every batch.
///
/// The results belong to the batch as it was parsed. A stage that takes packets out or changes their headers afterwards does so with
/// the result at hand, see [`Self::filter_map`].
///
/// ```
/// use wirepath_pipeline::{Context, ParsedBatch, Stage};
/// use wirepath_pmd::drops::DropReason;
/// use wirepath_pmd::packet::Batch;
/// use wirepath_wire::{L4, Parser};
///
/// /// Lets nothing but UDP pass.
/// fn udp_only() -> impl Stage {
///     let (parser, mut parsed) = (Parser::default(), ParsedBatch::new());
///     move |context: &mut Context<'_>, batch: &mut Batch| {
///         parsed.parse(&parser, context, batch);
///         parsed.filter_map(batch, |packet, headers| {
///             if headers.outer().l4_kind() == L4::Udp {
///                 Some(packet)
///             } else {
///                 context.drop(packet, DropReason::Ruled);
///                 None
///             }
///         });
///     }
/// }
/// ```
#[derive(Debug)]
pub struct ParsedBatch {
    results: Box<[Parsed; BATCH]>,
    len: usize,
}

impl ParsedBatch {
    /// Room for one batch.
    pub fn new() -> Self {
        Self { results: Box::new([Parsed::default(); BATCH]), len: 0 }
    }

    /// Parses every packet. Those whose headers are wrong, or do not lie in the first segment, are dropped and counted; the others keep
    /// their order, and result *i* is that of packet *i* of what is left.
    #[inline]
    pub fn parse(&mut self, parser: &Parser, context: &mut Context<'_>, batch: &mut Batch) {
        batch.prefetch_data();
        let (results, mut good) = (&mut self.results, 0);
        let mut bad = None;
        for packet in batch.iter() {
            match parser.parse_chain(packet.data(), packet.len()) {
                Ok(parsed) => {
                    results[good] = parsed;
                    good += 1;
                }
                Err(error) => {
                    bad = Some(error);
                    break;
                }
            }
        }
        self.len = good;
        if bad.is_some() {
            self.parse_with_drops(parser, context, batch);
        }
    }

    /// The same for a batch with a bad packet in it.
    #[cold]
    fn parse_with_drops(&mut self, parser: &Parser, context: &mut Context<'_>, batch: &mut Batch) {
        let (results, mut good) = (&mut self.results, 0);
        batch.filter_map(|packet| match parser.parse_chain(packet.data(), packet.len()) {
            Ok(parsed) => {
                results[good] = parsed;
                good += 1;
                Some(packet)
            }
            Err(error) => {
                context.drop(packet, DropReason::from(error));
                None
            }
        });
        self.len = good;
    }

    /// The results, in the order of the packets.
    #[inline(always)]
    pub fn as_slice(&self) -> &[Parsed] {
        &self.results[..self.len]
    }

    /// Packets with their results, to change the packets.
    #[inline(always)]
    pub fn zip<'b>(&'b self, batch: &'b mut Batch) -> impl Iterator<Item = (&'b mut Packet, &'b Parsed)> {
        batch.iter_mut().zip(self.as_slice())
    }

    /// Gives each packet with its result to `decide`, which keeps the packet (`Some`) or takes it (`None`). The results of the kept ones
    /// stay with them.
    #[inline]
    pub fn filter_map(&mut self, batch: &mut Batch, mut decide: impl FnMut(Packet, &Parsed) -> Option<Packet>) {
        let (results, len) = (&mut self.results, self.len);
        let (mut at, mut kept) = (0, 0);
        batch.filter_map(|packet| {
            // A batch that grew since it was parsed has packets without a result; they are left alone at the end.
            if at >= len {
                return Some(packet);
            }
            let parsed = results[at];
            at += 1;
            let packet = decide(packet, &parsed)?;
            results[kept] = parsed;
            kept += 1;
            Some(packet)
        });
        self.len = kept;
    }
}

impl Default for ParsedBatch {
    fn default() -> Self {
        Self::new()
    }
}
