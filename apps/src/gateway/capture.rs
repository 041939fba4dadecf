use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_pmd::drivers::r#virtual::pcap::{Format, MAX_FRAME, Precision, Writer};

use crate::cli::Failure;

const O_NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();

/// A pcapng file of dropped packets, each with its drop reason as a comment.
#[derive(Debug)]
pub struct Capture {
    writer: Option<Writer<File>>,
    path: String,
}

impl Capture {
    /// Creates the file, or truncates it.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let failed = |e| Failure::failed(format!("{name}: {e}"));
        // A pipe or a device could hold the control thread. A pipe without a reader would hold the start.
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .custom_flags(O_NONBLOCK)
            .open(path)
            .map_err(failed)?;
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(Failure::usage(format!("{name}: expected a regular file")));
        }
        let writer = Writer::new(file, Format::Pcapng, Precision::Nano, MAX_FRAME as u32, "drops").map_err(failed)?;
        Ok(Self { writer: Some(writer), path: name })
    }

    /// Writes a packet.
    pub fn write(&mut self, packet: &Packet, reason: DropReason) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
        let comment = format!("{}: {}", reason.name(), reason.text());
        self.with(|writer| writer.write_with_comment(now, packet.segments(), packet.len(), &comment));
    }

    /// Flushes buffered packets to the operating system.
    pub fn flush(&mut self) {
        self.with(|writer| if writer.is_dirty() { writer.flush() } else { Ok(()) });
    }

    /// Runs a write action. An error, such as a full disk, ends the capture but not the gateway.
    fn with(&mut self, action: impl FnOnce(&mut Writer<File>) -> std::io::Result<()>) {
        if let Some(Err(error)) = self.writer.as_mut().map(action) {
            tracing::error!("{}: {error}; the capture has ended", self.path);
            self.writer = None;
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.flush();
    }
}
