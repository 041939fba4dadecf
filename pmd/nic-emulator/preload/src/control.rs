//! The control socket: counters out, faults in. One request for each connection, to its end or to an empty line.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use crate::process::Nic;

/// Longest request.
const LONGEST: u64 = 64 << 10;

/// Starts serving the socket, if the topology names one.
pub(crate) fn start(nic: &'static Nic) {
    let Some(path) = &nic.topology().control else { return };
    // The first process that works with the devices has it; what a dead one left behind is taken away.
    if UnixStream::connect(path).is_ok() {
        return;
    }
    let _ = std::fs::remove_file(path);
    let listener = match UnixListener::bind(path) {
        Ok(listener) => listener,
        Err(error) => {
            nic.log().line(format_args!("control socket {}: {error}", path.display()));
            return;
        }
    };
    let served = std::thread::Builder::new().name("wirepath-nic-ctl".to_owned()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that goes away is its own affair.
            let _ = serve(nic, &stream);
        }
    });
    if let Err(error) = served {
        nic.log().line(format_args!("control socket: {error}"));
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
        fault => match nic.order_text(fault) {
            Ok(()) => writeln!(stream, "ordered"),
            Err(error) => writeln!(stream, "refused: {error}"),
        },
    }
}
