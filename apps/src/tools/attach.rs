//! `wirepath attach`: looks at a port of a running program, or works with queues of it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use wirepath_pmd::attach::{AttachError, Attached, QueueStatus, Status, Wanted};
use wirepath_pmd::packet::Batch;

use crate::cli::{Failure, Stop, Table, print, print_json};

/// Packet buffers beside those of receive rings.
const BUFFERS: u32 = 512;
/// How long frames that were accepted may take to leave once it is to stop.
const DRAIN: Duration = Duration::from_secs(1);

/// What to do there.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Socket on which the program offers its port (`attach` of the port's driver table)
    pub socket: PathBuf,

    /// Attaches, and sends so many test frames (EtherType 0x88b5, IEEE 802 local experimental) by a queue of its own (`attach_tx_queues`)
    #[arg(long, value_name = "FRAMES")]
    pub transmit: Option<u64>,

    /// Attaches, and takes what a receive queue of its own gets, for so long; the port must offer one (`attach_rx_queues`)
    #[arg(long, value_name = "SECONDS")]
    pub receive: Option<u64>,

    /// Bytes of a test frame, without the checksum at its end
    #[arg(long, value_name = "BYTES", default_value_t = 60, value_parser = clap::value_parser!(u16).range(60..=1514))]
    pub size: u16,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    port: Status,
    #[serde(skip_serializing_if = "Option::is_none")]
    done: Option<Done>,
}

/// What was done with queues of its own.
#[derive(Debug, Default, Serialize)]
struct Done {
    transmitted: u64,
    received: u64,
    received_bytes: u64,
    /// The page of virtio doorbells of the device, or why there is none.
    var: String,
}

/// Looks, or attaches and works.
///
/// # Errors
/// Nobody offers a port there, or not what is asked for.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let failed = |error: AttachError| Failure::failed(format!("{}: {error}", options.socket.display()));
    let done = match options {
        Options { transmit: None, receive: None, .. } => None,
        _ => Some(work(options, &Stop::on_signals()?).map_err(failed)?),
    };
    let port = Attached::look(&options.socket).map_err(failed)?;
    if json {
        return print_json(&Report { port, done });
    }
    print(describe(&options.socket, &port))?;
    match done {
        None => Ok(()),
        Some(Done { transmitted, received, received_bytes, var }) => print(format_args!(
            "transmitted {transmitted} frames, received {received} ({received_bytes} bytes); virtio doorbells: {var}\n"
        )),
    }
}

fn work(options: &Options, stop: &Stop) -> Result<Done, AttachError> {
    let receives = options.receive.is_some();
    let wanted = Wanted {
        tx_queues: u16::from(options.transmit.is_some()),
        rx_queues: u16::from(receives),
        buffers: if receives { Attached::look(&options.socket)?.offered.buffers } else { BUFFERS },
    };
    let mut attached = Attached::attach(&options.socket, &wanted, 0)?;
    let var = attached.var.as_ref().map(|var| format!("page {}", var.page_id()));
    let mut done = Done { var: var.unwrap_or_else(Clone::clone), ..Done::default() };
    let begin = Instant::now();
    let patience = Duration::from_secs(options.receive.unwrap_or(0));
    let frames = options.transmit.unwrap_or(0);
    let mut rest = Batch::new();
    let mut looked = begin;
    let mut stopped = None;
    loop {
        if stop.requested() && stopped.is_none() {
            stopped = Some(Instant::now());
            rest = Batch::new();
        }
        let works = stopped.is_none() && (done.transmitted < frames || begin.elapsed() < patience);
        // Without receive buffers, what is out of the pool is on its way.
        let flies = !receives && attached.pool.outstanding() > 0;
        if !works && (!flies || stopped.is_some_and(|since| since.elapsed() > DRAIN)) {
            return Ok(done);
        }
        while works
            && (rest.len() as u64) < 32.min(frames - done.transmitted)
            && let Some(mut frame) = attached.pool.take()
        {
            let Some(bytes) = frame.append(options.size.into()) else { break };
            bytes.fill(0);
            // To everybody, from nobody: a locally administered address.
            bytes[..6].fill(0xff);
            bytes[6..14].copy_from_slice(&[2, 0, 0, 0, 0, 1, 0x88, 0xb5]);
            if rest.push(frame).is_err() {
                break;
            }
        }
        if let Some(queue) = attached.tx.first_mut() {
            done.transmitted += queue.transmit(&mut rest) as u64;
            queue.reclaim();
        }
        if let Some(queue) = attached.rx.first_mut() {
            let mut batch = Batch::new();
            done.received += queue.receive(&mut batch) as u64;
            done.received_bytes += batch.iter().map(|packet| packet.len() as u64).sum::<u64>();
        }
        if looked.elapsed() > Duration::from_millis(100) {
            looked = Instant::now();
            if let Some(why) = attached.why_ended() {
                return Err(AttachError::Ended(why.to_owned()));
            }
        }
        std::thread::yield_now();
    }
}

fn describe(socket: &Path, port: &Status) -> String {
    let Status { device, driver, mode, mtu, process, pool, attached, attached_ever, lost, .. } = port;
    let mut table = Table::new(["QUEUE", "PACKETS", "BYTES", "DROPS"]);
    let mut rows = |way: &str, queues: &[QueueStatus]| {
        for (index, QueueStatus { packets, bytes, drops }) in queues.iter().enumerate() {
            table.row([format!("{way} {index}"), packets.to_string(), bytes.to_string(), drops.to_string()]);
        }
    };
    rows("receive", &port.rx);
    rows("transmit", &port.tx);
    format!(
        "{}: {device}, driver {driver}, MTU {mtu}, of process {process}\n{mode}\n\n{table}\npool '{}': {} of {} buffers free\n\
         attached: {attached} processes now, {attached_ever} so far, {lost} of them ended without a word\n",
        socket.display(),
        pool.name,
        pool.free,
        pool.buffers
    )
}
