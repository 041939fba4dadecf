//! The control socket: reports counters and accepts faults. Each connection carries one request, which ends
//! with an empty line or at its end.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use crate::process::Nic;

/// Maximum length of a request in bytes.
const LONGEST: u64 = 64 << 10;

/// Starts a thread that serves the socket, if the topology names one.
pub(crate) fn start(nic: &'static Nic) {
    let Some(path) = &nic.topology().control else { return };
    // The first process that works with the devices binds the socket. A socket without listener is left over
    // from a dead process.
    if UnixStream::connect(path).is_ok() {
        return;
    }
    let _ = std::fs::remove_file(path);
    let listener = match UnixListener::bind(path) {
        Ok(listener) => listener,
        Err(error) => {
            nic.log().line(format_args!("cannot bind the control socket {}: {error}", path.display()));
            return;
        }
    };
    let served = std::thread::Builder::new().name("wirepath-nic-ctl".to_owned()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that disconnects is no error of the emulator.
            let _ = serve(nic, &stream);
        }
    });
    if let Err(error) = served {
        nic.log().line(format_args!("cannot start the control thread: {error}"));
    }
}

fn serve(nic: &Nic, mut stream: &UnixStream) -> std::io::Result<()> {
    let mut text = String::new();
    for line in BufReader::new(std::io::Read::take(stream, LONGEST)).lines() {
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
