//! The control socket: reports counters and accepts faults. Each connection carries one request, which ends
//! with an empty line or at its end.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use wirepath_control_socket::{Access, Listener};

use crate::process::Nic;

/// Maximum length of a request in bytes.
const LONGEST: u64 = 64 << 10;
/// Time for a request and its answer. Further clients wait meanwhile.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Starts a thread that serves the socket, if the topology names one.
pub(crate) fn start(nic: &'static Nic) {
    let Some(path) = &nic.topology().control else { return };
    let listener = match Listener::bind(path, &Access::default()) {
        Ok(listener) => listener,
        // The first process that works with the devices binds the socket.
        Err(error) if error.kind() == ErrorKind::AddrInUse => return,
        Err(error) => {
            nic.log().line(format_args!("cannot bind the control socket {}: {error}", path.display()));
            return;
        }
    };
    let served = std::thread::Builder::new().name("wirepath-nic-ctl".to_owned()).spawn(move || {
        loop {
            let _ = poll(&mut [PollFd::new(&listener, PollFlags::IN)], None);
            if let Some((stream, peer)) = listener.accept()
                && peer.is_owner()
            {
                // A client that disconnects is no error of the emulator.
                let _ = stream.set_nonblocking(false).and_then(|()| serve(nic, &stream));
            }
        }
    });
    if let Err(error) = served {
        nic.log().line(format_args!("cannot start the control thread: {error}"));
    }
}

/// A client whose reads and writes end at one time.
struct Limited<'s> {
    stream: &'s UnixStream,
    end: Instant,
}

impl Limited<'_> {
    fn left(&self) -> std::io::Result<Option<Duration>> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(Error::from(ErrorKind::TimedOut)) } else { Ok(Some(left)) }
    }
}

impl Read for Limited<'_> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(to)
    }
}

impl Write for Limited<'_> {
    fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn serve(nic: &Nic, stream: &UnixStream) -> std::io::Result<()> {
    let mut stream = Limited { stream, end: Instant::now() + TIME_LIMIT };
    let mut text = String::new();
    for line in BufReader::new(Read::take(&mut stream, LONGEST)).lines() {
        let line = line?;
        if line.is_empty() {
            break;
        }
        text.push_str(&line);
        text.push('\n');
    }
    match text.trim() {
        "counters" => writeln!(stream, "{}", nic.counters()),
        fault => match nic.inject_toml(fault) {
            Ok(()) => writeln!(stream, "injected"),
            Err(error) => writeln!(stream, "refused: {error}"),
        },
    }
}
