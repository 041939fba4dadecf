//! Parse results of a batch.

use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, Packet};
use wirepath_wire::{ParseError, Parsed, Parser};

use crate::context::Context;

/// Parses a packet. If its headers lie in several segments, they are moved into the first one, as far as that has
/// room.
pub fn parse_packet(parser: &Parser, packet: &mut Packet) -> Result<Parsed, ParseError> {
    match parser.parse_chain(packet.data(), packet.len()) {
        Err(ParseError::HeaderSplit) => {
            packet.pull_up(packet.len().min(packet.data().len() + packet.tailroom()));
            parser.parse_chain(packet.data(), packet.len())
        }
        parsed => parsed,
    }
}

/// Header offsets of each packet of a batch. A stage keeps this scratch memory and fills it for every batch. A stage
/// that looks at each packet once does not need it: [`Context::parse_each`].
///
/// The results describe the batch as it was parsed. A stage that removes packets or changes their headers
/// later uses [`Self::filter_map`], which keeps packets and results together.
///
/// ```
/// use wirepath_pipeline::{Context, ParsedBatch, Stage};
/// use wirepath_packet::drops::DropReason;
/// use wirepath_packet::Batch;
/// use wirepath_wire::{L4Type, Parser};
///
/// /// Lets nothing but UDP pass.
/// fn udp_only() -> impl Stage {
///     let (parser, mut parsed) = (Parser::default(), ParsedBatch::new());
///     move |context: &mut Context<'_>, batch: &mut Batch| {
///         parsed.parse(&parser, context, batch);
///         parsed.filter_map(batch, |packet, headers| {
///             if headers.outer().l4_type() == L4Type::Udp {
///                 Some(packet)
///             } else {
///                 context.drop(packet, DropReason::RuleDrop);
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
    /// Creates room for one batch.
    pub fn new() -> Self {
        Self { results: Box::new([Parsed::default(); BATCH]), len: 0 }
    }

    /// Parses every packet. Headers that lie in several segments are moved into the first one. Packets whose
    /// headers are invalid or have no room there are dropped and counted. The other packets keep their order,
    /// and result *i* belongs to packet *i* of the remaining batch.
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

    /// Parses a batch that contains an invalid packet.
    #[cold]
    fn parse_with_drops(&mut self, parser: &Parser, context: &mut Context<'_>, batch: &mut Batch) {
        let (results, mut good) = (&mut self.results, 0);
        batch.filter_map(|mut packet| match parse_packet(parser, &mut packet) {
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

    /// Returns the results in packet order.
    #[inline(always)]
    pub fn as_slice(&self) -> &[Parsed] {
        &self.results[..self.len]
    }

    /// Iterates over the packets, mutably, together with their results.
    #[inline(always)]
    pub fn zip<'b>(&'b self, batch: &'b mut Batch) -> impl Iterator<Item = (&'b mut Packet, &'b Parsed)> {
        batch.iter_mut().zip(self.as_slice())
    }

    /// Passes each packet with its result to `decide`, which returns the packet to keep it. The results of
    /// kept packets stay with them.
    #[inline]
    pub fn filter_map(&mut self, batch: &mut Batch, mut decide: impl FnMut(Packet, &Parsed) -> Option<Packet>) {
        let (results, len) = (&mut self.results, self.len);
        let (mut at, mut kept) = (0, 0);
        batch.filter_map(|packet| {
            // Packets that were added after parsing have no result. They stay at the end of the batch.
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
