use std::fmt;

use crate::packet::{Packet, Pool};
use crate::port::PortId;
use crate::settings::{ConfigError, Settings};

/// Which frames a source makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Buffers as they are: only the length is set. What moving packets costs, without making them.
    Untouched,
}

/// Frames of a source.
#[derive(Clone, Debug)]
pub struct Frames {
    /// Which headers.
    pub kind: Kind,
    /// Bytes of a frame, without frame check sequence.
    pub size: u16,
    /// Different flows, taken in turn.
    pub flows: u32,
}

impl fmt::Display for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} frames of {} bytes in {} flows", self.kind, self.size, self.flows)
    }
}

impl Frames {
    pub(super) fn from_settings(settings: &Settings<'_>) -> Result<Option<Self>, ConfigError> {
        let kind = settings.choice("source", &[("none", None), ("untouched", Some(Kind::Untouched))])?.flatten();
        let size = settings.integer("size", 60..=9216)?.unwrap_or(64);
        let flows = settings.integer("flows", 1..=16_000_000)?.unwrap_or(1);
        Ok(kind.map(|kind| Self { kind, size, flows }))
    }

    pub(super) fn generator(&self, _queue: u16) -> Result<Generator, String> {
        Ok(Generator { size: self.size.into() })
    }
}

/// Makes the frames of one queue.
pub(super) struct Generator {
    size: usize,
}

impl Generator {
    /// Fills fresh packets; returns their bytes.
    #[inline(always)]
    pub(super) fn fill(&mut self, packets: &mut [Packet], port: PortId, _pool: &Pool) -> u64 {
        for packet in packets.iter_mut() {
            let _ = packet.append(self.size);
            packet.set_in_port(port);
        }
        (packets.len() * self.size) as u64
    }
}
