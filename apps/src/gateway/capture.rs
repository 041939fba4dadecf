use std::fs::File;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use wirepath_pmd::drivers::pcap::{Format, MAX_FRAME, Precision, Writer};
use wirepath_pmd::drops::DropReason;
use wirepath_pmd::packet::Packet;

use crate::cli::Failure;

/// A pcapng file of the packets that were dropped, each with its reason as comment.
#[derive(Debug)]
pub struct Capture {
    writer: Option<Writer<File>>,
    path: String,
}

impl Capture {
    /// Makes the file, or empties it.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let failed = |e| Failure::failed(format!("{name}: {e}"));
        let file = File::create(path).map_err(failed)?;
        let writer = Writer::new(file, Format::Pcapng, Precision::Nano, MAX_FRAME as u32, "drops").map_err(failed)?;
        Ok(Self { writer: Some(writer), path: name })
    }

    /// Writes a packet.
    pub fn write(&mut self, packet: &Packet, reason: DropReason) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let comment = format!("{}: {}", reason.name(), reason.text());
        self.with(|writer| writer.write_with(now, packet.segments(), packet.len(), &comment));
    }

    /// Hands what was written to the system.
    pub fn flush(&mut self) {
        self.with(|writer| if writer.is_dirty() { writer.flush() } else { Ok(()) });
    }

    /// A full disk ends the capture, not the gateway.
    fn with(&mut self, action: impl FnOnce(&mut Writer<File>) -> std::io::Result<()>) {
        if let Some(Err(error)) = self.writer.as_mut().map(action) {
            tracing::error!("{}: {error}; dropped packets are captured no more", self.path);
            self.writer = None;
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.flush();
    }
}
