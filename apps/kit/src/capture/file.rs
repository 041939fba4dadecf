use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use wirepath_pipeline::observe::CaptureReader;

use super::pcapng::{CaptureLimits, EndReason, Pcapng};
use crate::cli::Failure;

const O_NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
/// Time between two looks for packets.
const INTERVAL: Duration = Duration::from_millis(10);

/// A capture from the start of a program to its end, in a file.
#[derive(Debug)]
pub struct FileCapture {
    thread: Option<JoinHandle<()>>,
    /// Ends the capture.
    stop: Arc<AtomicBool>,
}

impl FileCapture {
    /// Creates the file, or truncates it.
    ///
    /// # Errors
    /// If it cannot be written or is not a regular file.
    pub fn create(path: &Path) -> Result<File, Failure> {
        let name = path.display().to_string();
        let failed = |e| Failure::failed(format!("{name}: {e}"));
        // A pipe without a reader would hold the start.
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
        Ok(file)
    }

    /// Writes a capture to a file until the program stops. An error, such as a full disk, ends the capture but not the
    /// program.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(path: &Path, mut file: File, reader: CaptureReader, ports: &[String]) -> Result<Self, Failure> {
        let name = path.display().to_string();
        let mut capture = Pcapng::new(reader, CaptureLimits::default(), ports);
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("capture".to_owned()).spawn(move || {
            let mut out = Vec::new();
            capture.append_head(&mut out);
            let mut ended = false;
            while !ended {
                if stopping.load(Ordering::Acquire) {
                    capture.end(EndReason::Stop);
                }
                ended = capture.append_packets(&mut out);
                if ended {
                    capture.append_statistics(&mut out);
                } else if out.is_empty() {
                    std::thread::sleep(INTERVAL);
                }
                if let Err(error) = file.write_all(&out) {
                    tracing::error!("{name}: {error}; the capture has ended");
                    return;
                }
                out.clear();
            }
        });
        let thread = thread.map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
        Ok(Self { thread: Some(thread), stop })
    }
}

impl Drop for FileCapture {
    /// Ends the capture and waits until the file is complete.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
